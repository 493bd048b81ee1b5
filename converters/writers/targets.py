"""The formats that can be written, one module each with a `TARGET`.

To add one: write `converters/writers/<name>_writer.py` with a module-level `TARGET = Target(...)`, and list
it in `converters.options.WRITERS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from converters.errors import CheckpointError
from converters.options import WRITERS
from converters.storage.path_or_url import place
from converters.writers.conversion import Choices, Options, carry_out

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Unpack

    from converters.checkpoint import Checkpoint
    from converters.storage.path_or_url import Place
    from converters.writers.conversion import Plan


@dataclass(frozen=True)
class Target:
    """A format to write.

    Attributes:
        plan: the files to write; CheckpointError where the format cannot hold the checkpoint.
        opened_by: the programs that open them, for the documentation.
        optimizer: whether the format holds an optimizer's state.
        needs_optimizer: whether it cannot be without.
        suffix: OUT with this ending is the one file of the format, and no folder.
    """

    plan: Callable[[Checkpoint, Choices], Plan]
    opened_by: str
    optimizer: bool = True
    needs_optimizer: bool = False
    suffix: str | None = None

    def single(self, out: Place) -> bool:
        """Whether `out` is a file."""
        return self.suffix is not None and out.suffix == self.suffix


def target(name: str) -> Target:
    """The target of `--to <name>`; CheckpointError for an unknown name."""
    if name not in WRITERS:
        raise CheckpointError(f"the format {name!r} is not one of {', '.join(WRITERS)}")
    module, _, variable = WRITERS[name].partition(":")
    found: Target = getattr(import_module(module), variable)
    return found


class WriterOptions(Options, total=False):
    """The options of `write_checkpoint`."""

    dtype: str
    max_shard_size: int
    optimizer: bool


def write_checkpoint(
    checkpoint: Checkpoint,
    out: str | Place,
    to: str = "safetensors",
    *,
    dtype: str = Choices.dtype,
    max_shard_size: int = Choices.max_shard_size,
    optimizer: bool = Choices.optimizer,
    **options: Unpack[Options],
) -> Plan:
    """Write a checkpoint in the format `to`, one of `converters.options.WRITERS`, as `portable-convert` does.

    Args:
        dtype, max_shard_size, optimizer: see `Choices`.
        options: see `Options`.

    Returns:
        The plan that was carried out.

    Raises:
        CheckpointError: `out` is refused, the source is damaged, the format cannot hold it, the disk is full,
            or the object store is unreachable. `out` is then unchanged.
    """
    format = target(to)
    plan = partial(format.plan, checkpoint, Choices(dtype, max_shard_size, optimizer))
    return carry_out(checkpoint, plan, place(out), single=format.single(place(out)), **options)


def write_safetensors(checkpoint: Checkpoint, out: str | Place, **options: Unpack[WriterOptions]) -> Plan:
    """`write_checkpoint` as safetensors files: `model.safetensors`, or numbered shards with an index."""
    return write_checkpoint(checkpoint, out, "safetensors", **options)


def write_dcp(checkpoint: Checkpoint, out: str | Place, **options: Unpack[WriterOptions]) -> Plan:
    """`write_checkpoint` for torch.distributed.checkpoint: `.metadata` and `__0_<i>.distcp`."""
    return write_checkpoint(checkpoint, out, "dcp", **options)
