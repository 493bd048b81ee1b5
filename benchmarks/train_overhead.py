"""Compare this project's optimizer step with a bare PyTorch loop, Accelerate and the Trainer.

``python -m benchmarks.train_overhead`` trains the quickstart model with all four loops, in turns of
a few steps, from the same weights and on the same data. It fails if this project's fp32 losses
differ from the bare loop's losses.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

# If torch_xla is installed, transformers and accelerate would start its runtime on import.
os.environ.setdefault("USE_TORCH_XLA", "0")

import torch

from benchmarks import harness
from benchmarks.harness import LEGEND, Result, check_losses, table
from benchmarks.loops import (
    AccelerateLoop,
    BareLoop,
    Contestant,
    Loop,
    PortableLoop,
    Setting,
    TrainerLoop,
    cross_entropy,
    forget_accelerators,
    plain_model,
    take_turns,
)
from benchmarks.machine import command_line, describe_machine, print_machine
from portable.registry import create_backend, resolve_backend_name
from portable.run.prepare import prepare_run
from portable.run.resolve import resolve_run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from portable.run.stages import PreparedRun

SAME_LOSS = 1e-6
"""Largest accepted relative difference between this project's fp32 losses and the bare loop's."""

BASELINE = "bare PyTorch"
GLOBAL_BATCH_SIZE = 8


@dataclass(frozen=True)
class Options(harness.Options):
    """Options of this benchmark.

    Attributes:
        micro_batch_sizes: Micro-batch sizes to measure, one after the other.
        adapter: Type of adapter to train, ``lora`` or ``dora``. None to train all weights.
    """

    micro_batch_sizes: tuple[int, ...] = (8, 4)
    adapter: str | None = None


def measure(options: Options, micro_batch_size: int) -> list[Result]:
    """Measure all loops with one micro-batch size.

    Returns:
        The result of each loop. The bare loop is first.

    Raises:
        AssertionError: If this project's fp32 losses differ from the bare loop's losses.
    """
    sizes = {"train__global_batch_size": GLOBAL_BATCH_SIZE, "train__micro_batch_size": micro_batch_size}
    adapter = {"adapter__type": "lora", "adapter__use_dora": options.adapter == "dora"}
    with tempfile.TemporaryDirectory(prefix="train-overhead-") as scratch:
        folder = Path(scratch)
        backend = create_backend(resolve_backend_name(options.backend))
        config = harness.quickstart(options, folder, **sizes, **(adapter if options.adapter else {}))
        resolved = resolve_run(config, backend.name)
        backend.start()
        try:
            results = _take_turns(options, prepare_run(resolved, backend), folder)
        finally:
            backend.stop()
            forget_accelerators()
    if options.precision == "fp32":
        check_losses(results, BASELINE, SAME_LOSS)
    return results


def _take_turns(options: Options, prepared: PreparedRun, folder: Path) -> list[Result]:
    ours = PortableLoop(prepared, folder / "portable")
    setting = Setting.of(prepared, ours.model, steps=options.total_steps)
    trainer = TrainerLoop(setting, folder / "trainer", logging_steps=options.steps)
    others: list[Loop] = [BareLoop(setting, BASELINE), ours, AccelerateLoop(setting)]
    if options.control:
        others.append(BareLoop(setting, "bare, again"))
    try:
        turns = take_turns(trainer, others, options.turns)
    finally:
        ours.close()
    everyone: list[Contestant] = [*others, trainer]
    return [Result.of(loop, turns, _final_loss(setting, loop.model)) for loop in everyone]


@torch.no_grad()
def _final_loss(setting: Setting, trained: nn.Module) -> float:
    # Build a new model, because Accelerate may have wrapped the forward of the trained one.
    model = setting.build_model()
    plain_model(model).load_state_dict(plain_model(trained).state_dict())
    batch = setting.batches[-1]
    logits = model.eval()(input_ids=batch["input_ids"].to(setting.device)).logits
    return float(cross_entropy(logits, batch["labels"].to(setting.device)))


def parse(argv: Sequence[str] | None) -> tuple[Options, Path | None]:
    defaults = Options()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train_overhead", description=__doc__)
    defaults.add_to(parser)
    parser.add_argument(
        "--micro-batch",
        type=int,
        nargs="+",
        default=defaults.micro_batch_sizes,
        metavar="N",
        help="sequences of a micro-batch, of 8 a step; several are measured one after the other",
    )
    parser.add_argument(
        "--adapter", choices=("lora", "dora"), help="train an adapter; the other loops take peft's own"
    )
    given = parser.parse_args(argv)
    if min(given.steps, given.warmup, given.rounds) < 1:
        parser.error("--steps, --warmup and --rounds must be at least 1")
    if any(size < 1 or GLOBAL_BATCH_SIZE % size for size in given.micro_batch):
        parser.error(f"--micro-batch must divide the {GLOBAL_BATCH_SIZE} sequences of a step")
    sizes = tuple(given.micro_batch)
    return Options(**Options.given(given), micro_batch_sizes=sizes, adapter=given.adapter), given.json


def main(argv: Sequence[str] | None = None) -> int:
    options, path = parse(argv)
    command = command_line("benchmarks.train_overhead", argv)
    machine = describe_machine(create_backend(resolve_backend_name(options.backend)).device)
    print_machine(command, machine)
    measured = []
    for size in options.micro_batch_sizes:
        results = measure(options, size)
        measured.append(harness.about(options, "micro_batch_size", size, results))
        print(
            f"\n{options.precision}, {GLOBAL_BATCH_SIZE // size} x {size} sequences a step, "
            f"{options.rounds} x {options.steps} steps each\n{table(results, BASELINE)}"
        )
    print(f"\n{LEGEND}")
    harness.write(path, command, machine, measured=measured)
    return 0


if __name__ == "__main__":
    sys.exit(main())
