"""The formats that can be written, one module each with a `TARGET`.

To add one: write `converters/writers/<name>_writer.py` with a module-level `TARGET = Target(...)`, and list
it in `converters.options.WRITERS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypedDict

from converters.errors import CheckpointError
from converters.options import WRITERS
from converters.storage.path_or_url import place
from converters.writers.conversion import Choices, carry_out

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
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
    found: Target = import_module(WRITERS[name]).TARGET
    return found


def write_checkpoint(
    checkpoint: Checkpoint,
    out: str | Place,
    to: str = "safetensors",
    *,
    dtype: str = Choices.dtype,
    max_shard_size: int = Choices.max_shard_size,
    optimizer: bool = Choices.optimizer,
    overwrite: bool = False,
    progress: bool = True,
    verify: bool = False,
    expand: bool = False,
    facts: Mapping[str, Any] | None = None,
) -> Plan:
    """Write a checkpoint in the format `to`, one of `converters.options.WRITERS`, as `portable-convert` does.

    Args:
        dtype, max_shard_size, optimizer: see `Choices`.
        overwrite: replace `out` where it exists.
        progress: show a progress bar if stderr is a terminal.
        verify: read everything back and compare before `out` appears.
        expand: allow an output much larger than the source, where tensors share bytes.
        facts: extra fields for the completion marker of an `out` in an object store.

    Returns:
        The plan that was carried out.

    Raises:
        CheckpointError: `out` is refused, the source is damaged, the format cannot hold it, the disk is full,
            or the object store is unreachable. `out` is then unchanged.
    """
    format = target(to)
    return carry_out(
        checkpoint,
        lambda: format.plan(checkpoint, Choices(dtype, max_shard_size, optimizer)),
        place(out),
        single=format.single(place(out)),
        overwrite=overwrite,
        progress=progress,
        verify=verify,
        expand=expand,
        facts=facts,
    )


class Options(TypedDict, total=False):
    """The options of `write_checkpoint`."""

    dtype: str
    max_shard_size: int
    optimizer: bool
    overwrite: bool
    progress: bool
    verify: bool
    expand: bool
    facts: Mapping[str, Any] | None


def write_safetensors(checkpoint: Checkpoint, out: str | Place, **options: Unpack[Options]) -> Plan:
    """`write_checkpoint` as safetensors files: `model.safetensors`, or numbered shards with an index."""
    return write_checkpoint(checkpoint, out, "safetensors", **options)


def write_dcp(checkpoint: Checkpoint, out: str | Place, **options: Unpack[Options]) -> Plan:
    """`write_checkpoint` for torch.distributed.checkpoint: `.metadata` and `__0_<i>.distcp`."""
    return write_checkpoint(checkpoint, out, "dcp", **options)
