"""Checkpoint formats, one module each: a name, what finds its files at a path, and what opens them.

To add one: write `converters/formats/<name>.py` with a module-level `FORMAT = Format(...)`, and list the
module in `_MODULES`, or `module:NAME` for a second one. Formats are tried in that order, so one that holds
more (fp32 masters, optimizer state) comes before one that may lie beside it.
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
    """A path to open, and how.

    Attributes:
        path: the folder or file.
        tag: the step folder to open, where the format has several under `path` (DeepSpeed's
            `latest`); None for the newest.
        parameter_order: the names of the model's parameters in module order, where the caller knows them.
        config_file: the model's config.json, where the caller names it; else formats look beside the files.
        rank: Rank and world size of a process that reads its own slices, if each rank of a job opens the
            checkpoint. Formats may then read the metadata of other ranks only when it is needed.
        build_once: Function that writes a file in one process of each node, if the processes of a node share
            what one of them has parsed.
    """

    path: AnyPath
    tag: str | None = None
    parameter_order: tuple[str, ...] = ()
    config_file: AnyPath | None = None
    rank: tuple[int, int] | None = None
    build_once: Callable[[str, Callable[[Path], None]], Path | None] | None = None


@dataclass(frozen=True)
class Format:
    """A checkpoint format.

    Attributes:
        name: the value of `Checkpoint.format`.
        find_files: what `open` needs (the folder or the file), None where the path is not of this format or
        not
            complete; looks at file names and reads almost nothing.
        open: the logical checkpoint of what `find_files` found; CheckpointError for anything damaged.
        explain_incomplete: why a path that looks like this format cannot be opened, for the error message;
        else None. selects_tag: whether `open` handles `CheckpointPath.tag` itself.
    """

    name: str
    find_files: Callable[[CheckpointPath], Any]
    open: Callable[[CheckpointPath, Any], Checkpoint]
    explain_incomplete: Callable[[CheckpointPath], str | None] = lambda source: None
    selects_tag: bool = False


def iter_formats() -> Iterator[Format]:
    """Every format, in the order they are tried. The module of each is imported when it is its turn."""
    entries = (name.partition(":") for name in _MODULES)
    return (getattr(import_module(module), name or "FORMAT") for module, _, name in entries)


class DetectedFormat(NamedTuple):
    """A path whose format is known; `files` is what its `find_files` returned."""

    format: Format
    source: CheckpointPath
    files: Any


def detect_format(source: CheckpointPath) -> DetectedFormat | None:
    """The path with the first format that recognizes it, or None."""
    for format in iter_formats():
        if (found_files := format.find_files(source)) is not None:
            return DetectedFormat(format, source, found_files)
    return None
