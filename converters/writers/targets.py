"""The formats that can be written, one function each.

To add one: write `converters/writers/<name>_writer.py` with a function that plans the files, and list it in
`converters.options.WRITERS`.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from converters.errors import CheckpointError
from converters.naming import with_live_names, with_published_names
from converters.options import PUBLISHED, WRITERS
from converters.storage.path_or_url import place
from converters.writers.conversion import Choices, Options, carry_out

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Unpack

    from converters.checkpoint import Checkpoint
    from converters.storage.path_or_url import Place
    from converters.writers.conversion import Plan


def planner(to: str) -> Callable[[Checkpoint, Choices], Plan]:
    """What plans the files of `--to <to>`; it raises CheckpointError where they cannot hold the checkpoint.

    Raises:
        CheckpointError: an unknown format.
    """
    if to not in WRITERS:
        raise CheckpointError(f"the format {to!r} is not one of {', '.join(WRITERS)}")
    module, _, function = WRITERS[to].partition(":")
    found: Callable[[Checkpoint, Choices], Plan] = getattr(import_module(module), function)
    return found


def is_single(to: str, out: Place) -> bool:
    """Whether `out` is the one file of a format, and no folder."""
    return to == "gguf" and out.suffix == ".gguf"


class WriterOptions(Options, total=False):
    """The options of `write_checkpoint`."""

    dtype: str
    max_shard_size: int
    optimizer: bool
    names: str | None


def write_checkpoint(
    checkpoint: Checkpoint,
    out: str | Place,
    to: str = "safetensors",
    *,
    dtype: str = Choices.dtype,
    max_shard_size: int = Choices.max_shard_size,
    optimizer: bool = Choices.optimizer,
    names: str | None = None,
    **options: Unpack[Options],
) -> Plan:
    """Write a checkpoint in the format `to`, one of `converters.options.WRITERS`, as `portable-convert` does.

    Args:
        dtype, max_shard_size, optimizer: see `Choices`.
        names: `published` for the names of published files, the default for safetensors, torch and gguf;
            `live` for those that transformers uses in memory; `stored` to keep those of the checkpoint.
        options: see `Options`.

    Returns:
        The plan that was carried out.

    Raises:
        CheckpointError: `out` is refused, the source is damaged, the format cannot hold it, the disk is full,
            or the object store is unreachable. `out` is then unchanged.
    """
    names = names or ("published" if to in PUBLISHED else "stored")
    if names == "published":
        checkpoint = with_published_names(checkpoint)
    elif names == "live":
        checkpoint = with_live_names(checkpoint)
    plan = partial(planner(to), checkpoint, Choices(dtype, max_shard_size, optimizer))
    return carry_out(checkpoint, plan, place(out), single=is_single(to, place(out)), **options)


def write_safetensors(checkpoint: Checkpoint, out: str | Place, **options: Unpack[WriterOptions]) -> Plan:
    """`write_checkpoint` as safetensors files: `model.safetensors`, or numbered shards with an index."""
    return write_checkpoint(checkpoint, out, "safetensors", **options)


def write_dcp(checkpoint: Checkpoint, out: str | Place, **options: Unpack[WriterOptions]) -> Plan:
    """`write_checkpoint` for torch.distributed.checkpoint: `.metadata` and `__0_<i>.distcp`."""
    return write_checkpoint(checkpoint, out, "dcp", **options)
