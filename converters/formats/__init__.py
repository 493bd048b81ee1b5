"""Registry that detects and opens checkpoint formats.

A format finds its files at a path and opens them as a logical checkpoint. To add a format, write
`converters/formats/<name>.py` with a module-level `FORMAT = Format(...)`, and list the module in
`_MODULES`. A module may define a second format under another name. List it as `module:NAME`.

Formats are tried in the order of `_MODULES`. A folder may contain the files of several formats, so
the format with more content (fp32 masters, optimizer state) comes first.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from portable.converters.checkpoint import Checkpoint
    from portable.converters.storage.path_or_url import AnyPath

_MODULES = (
    "portable.converters.formats.dcp.reader",
    "portable.converters.formats.megatron.core",
    "portable.converters.formats.megatron.core:RANKS",
    "portable.converters.formats.deepspeed.universal",
    "portable.converters.formats.deepspeed.reader",
    "portable.converters.formats.xla_fsdp.reader",
    "portable.converters.formats.fsdp_ranks.reader",
    "portable.converters.formats.torch_checkpointing",
    "portable.converters.formats.orbax.reader",
    "portable.converters.formats.torch_save.reader",
    "portable.converters.formats.dcp_safetensors",
    "portable.converters.formats.safetensors",
)


@dataclass(frozen=True)
class CheckpointPath:
    """Path to open, with options.

    Attributes:
        path: Folder or file.
        tag: Name of the step folder to open. Only used by formats with `Format.selects_tag`, such
            as DeepSpeed. If None, `path` itself is opened if it contains the files of a checkpoint.
            Otherwise, DeepSpeed's file `latest` or `latest_universal` selects the step folder.
        parameter_order: Names of the model's parameters in module order. Empty if the order is not
            known.
        config_file: Path of the model's `config.json`. If None, the reader looks for the file near
            the checkpoint's files.
        rank: Rank and world size of the reader, if each rank of a job opens the checkpoint and
            reads only its own slices. The metadata of other ranks may then be read on demand. None
            if the reader needs everything.
        build_once: Function that lets one process per node write parsed metadata to a file for the
            other processes. See `open_checkpoint`. None if each process parses the metadata itself.
    """

    path: AnyPath
    tag: str | None = None
    parameter_order: tuple[str, ...] = ()
    config_file: AnyPath | None = None
    rank: tuple[int, int] | None = None
    build_once: Callable[[str, Callable[[Path], None]], Path | None] | None = None


@dataclass(frozen=True)
class Format:
    """Checkpoint format, with functions that detect and open its files.

    Attributes:
        name: Value of `Checkpoint.format`.
        find_files: Function that looks for the files of this format at a path. It returns the
            argument for `open`, such as the folder, or None if the path has a different format or
            is incomplete. It relies on file names and reads almost nothing.
        open: Function that opens the files that `find_files` returned. It raises CheckpointError if
            the files are damaged.
        explain_incomplete: Function that returns an error message if a path resembles this format
            but cannot be opened. It returns None for other paths.
        selects_tag: Whether `find_files` itself selects the step folder given by
            `CheckpointPath.tag`. If False, the caller selects the folder and passes its path
            without a tag.
    """

    name: str
    find_files: Callable[[CheckpointPath], Any]
    open: Callable[[CheckpointPath, Any], Checkpoint]
    explain_incomplete: Callable[[CheckpointPath], str | None] = lambda source: None
    selects_tag: bool = False


def iter_formats() -> Iterator[Format]:
    """Yield every format, in the order in which formats are tried.

    The module of a format is imported when the caller requests the format.
    """
    entries = (name.partition(":") for name in _MODULES)
    return (getattr(import_module(module), name or "FORMAT") for module, _, name in entries)


class DetectedFormat(NamedTuple):
    """Path whose format has been detected.

    Attributes:
        format: First format that recognized the path.
        source: Path and options with which the format was detected.
        files: Result of `Format.find_files`, to be passed to `Format.open`.
    """

    format: Format
    source: CheckpointPath
    files: Any


def detect_format(source: CheckpointPath) -> DetectedFormat | None:
    """Return the first format that recognizes a path, or None if no format does.

    The modules that define the formats are imported one by one, until a format recognizes the path.
    """
    for format in iter_formats():
        if (found_files := format.find_files(source)) is not None:
            return DetectedFormat(format, source, found_files)
    return None
