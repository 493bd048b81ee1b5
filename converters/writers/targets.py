"""The formats that can be written, one module each with a `TARGET`.

To add one: write `converters/writers/<name>_writer.py` with a module-level `TARGET = Target(...)`, and list
it in `converters.options.WRITERS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from converters.options import WRITERS
from converters.storage.path_or_url import place
from converters.writers.conversion import carry_out

if TYPE_CHECKING:
    from converters.checkpoint import Checkpoint
    from converters.storage.path_or_url import Place
    from converters.writers.conversion import Plan


class MakePlan(Protocol):
    """Plans the output of a checkpoint; CheckpointError where the format cannot hold it."""

    def __call__(
        self, checkpoint: Checkpoint, *, dtype: str = ..., max_shard_size: int = ..., optimizer: bool = ...
    ) -> Plan: ...


@dataclass(frozen=True)
class Target:
    """A format to write.

    Attributes:
        plan: the files to write.
        opened_by: the programs that open them, for the documentation.
        optimizer: whether the format holds an optimizer's state.
        needs_optimizer: whether it cannot be without.
    """

    plan: MakePlan
    opened_by: str
    optimizer: bool = True
    needs_optimizer: bool = False


def target(name: str) -> Target:
    """The target of `--to <name>`."""
    found: Target = import_module(WRITERS[name]).TARGET
    return found


def write_checkpoint(
    checkpoint: Checkpoint,
    out: str | Place,
    to: str = "safetensors",
    *,
    dtype: str = "keep",
    max_shard_size: int = 5_000_000_000,
    optimizer: bool = False,
    overwrite: bool = False,
    progress: bool = True,
    verify: bool = False,
    expand: bool = False,
) -> Plan:
    """Write a checkpoint in the format `to`, one of `converters.options.WRITERS`, as `portable-convert` does.

    Args:
        dtype: keep, float32, bfloat16 or float16 (fp32, bf16, fp16), for floating model tensors of at least
            one dimension.
        max_shard_size: bytes of a file, where the format has several; a larger tensor gets a file of its own.
        optimizer: also write the optimizer's state and parameter groups.
        overwrite: replace `out` where it exists.
        progress: show a progress bar if stderr is a terminal.
        verify: read everything back and compare before `out` appears.
        expand: allow an output much larger than the source, where tensors share bytes.

    Returns:
        The plan that was carried out.

    Raises:
        CheckpointError: `out` is refused, the source is damaged, the format cannot hold it, the disk is full,
            or the object store is unreachable. `out` is then unchanged.
    """
    made = target(to).plan

    def make_plan() -> Plan:
        return made(checkpoint, dtype=dtype, max_shard_size=max_shard_size, optimizer=optimizer)

    return carry_out(
        checkpoint,
        make_plan,
        place(out),
        overwrite=overwrite,
        progress=progress,
        verify=verify,
        expand=expand,
    )
