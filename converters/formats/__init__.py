"""Checkpoint formats, one module each: a name, a test for a path, and a function that opens it.

To add one: write `converters/formats/<name>.py` with a module-level `FORMAT = Format(...)`, and list the
module in `_MODULES`. Formats are tried in that order, so one that holds more (fp32 masters, optimizer state)
comes before one that may lie beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from converters.checkpoint import Checkpoint
    from converters.storage.path_or_url import Place

_MODULES = (
    "converters.formats.megatron.core",
    "converters.formats.megatron.reader",
    "converters.formats.dcp.reader",
    "converters.formats.deepspeed.universal",
    "converters.formats.deepspeed.reader",
    "converters.formats.xla_fsdp.reader",
    "converters.formats.fsdp_ranks.reader",
    "converters.formats.orbax.reader",
    "converters.formats.torch_save.reader",
    "converters.formats.dcp_safetensors",
    "converters.formats.safetensors",
)


@dataclass(frozen=True)
class Source:
    """A path to open, and how.

    Attributes:
        path: the folder or file.
        tag: the step folder to open, where the format has several under `path` (DeepSpeed's
            `latest`); None for the newest.
        verify: check stored CRCs.
        order: the names of the model's parameters in module order, where the caller knows them.
        config: the model's config.json, where the caller names it; else formats look beside the files.
    """

    path: Place
    tag: str | None = None
    verify: bool = True
    order: tuple[str, ...] = ()
    config: Place | None = None


@dataclass(frozen=True)
class Format:
    """A checkpoint format.

    Attributes:
        name: the value of `Checkpoint.format`.
        detect: whether the path is of this format and complete; looks at file names and reads almost nothing.
        open: the logical checkpoint; CheckpointError for anything damaged.
        incomplete: why a path that looks like this format cannot be opened, for the error message; else None.
        tags: whether `open` handles `Source.tag` itself.
        written_by, recognised_by: for the documentation, in its own markup.
        optimizer: whether the optimizer's state is converted too.
    """

    name: str
    detect: Callable[[Source], bool]
    open: Callable[[Source], Checkpoint]
    incomplete: Callable[[Source], str | None] = lambda source: None
    tags: bool = False
    written_by: str = ""
    recognised_by: str = ""
    optimizer: bool = True


@cache
def formats() -> tuple[Format, ...]:
    """Every format, in the order they are tried."""
    return tuple(import_module(name).FORMAT for name in _MODULES)


def detect(source: Source) -> Format | None:
    """The first format that recognises the path, or None."""
    return next((found for found in formats() if found.detect(source)), None)
