"""Compare this project's step under DeepSpeed ZeRO with a bare DeepSpeed loop and the Trainer.

``python -m benchmarks.zero`` trains a model with all three loops, in turns of a few steps, from the
same weights, on the same data and with the same DeepSpeed JSON. It fails if this project's fp32
losses differ from the bare loop's losses.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

# If torch_xla is installed, transformers and accelerate would start its runtime on import.
os.environ.setdefault("USE_TORCH_XLA", "0")

import torch
import torch.distributed as dist

from benchmarks import harness
from benchmarks.harness import LEGEND, Result, check_losses, table
from benchmarks.loops import (
    Loop,
    PortableLoop,
    Setting,
    StepClock,
    TrainerLoop,
    Turn,
    cross_entropy,
    forget_accelerators,
    take_turns,
)
from benchmarks.machine import command_line, describe_machine, print_machine
from portable.data.samples.loader import TrainLoader
from portable.model.initialize import InitialWeights
from portable.model.parameters import map_tied_names
from portable.model.weight_sources import to_torch
from portable.ranks.launch import launch_ranks
from portable.registry import create_backend, resolve_backend_name
from portable.run.batches import build_train_loader
from portable.run.prepare import prepare_run
from portable.run.resolve import resolve_run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from portable.run.stages import PreparedRun

SAME_LOSS = 1e-5
"""Largest accepted relative difference between this project's fp32 losses and the bare loop's."""

BASELINE = "bare DeepSpeed"


@dataclass(frozen=True)
class Options(harness.Options):
    """Options of this benchmark.

    Attributes:
        steps: Number of optimizer steps per measured turn.
        warmup: Number of steps in the first turn, which is not measured.
        strategies: ZeRO strategies to measure, one after the other.
        ranks: Number of ranks.
        offload: Whether to offload the optimizer to the CPU.
        global_batch_size: Number of sequences per step.
        micro_batch_size: Number of sequences per micro-batch on one rank.
    """

    steps: int = 5
    warmup: int = 3
    strategies: tuple[str, ...] = ("zero2",)
    ranks: int = 2
    offload: bool = False
    global_batch_size: int = 8
    micro_batch_size: int = 4


def document(options: Options, strategy: str) -> dict[str, Any]:
    """Return the DeepSpeed JSON that all loops use for a strategy such as ``zero2``."""
    zero: dict[str, Any] = {"stage": int(strategy[-1])}
    if options.offload:
        on_gpu = torch.cuda.is_available() and options.backend != "cpu"
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": on_gpu}
    values: dict[str, Any] = {
        "train_batch_size": options.global_batch_size,
        "train_micro_batch_size_per_gpu": options.micro_batch_size,
        "gradient_accumulation_steps": accumulation(options),
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        # Allow torch's fused AdamW, because all loops use it.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if options.precision == "bf16":
        values |= {"bf16": {"enabled": True}, "communication_data_type": "fp32"}
        if strategy != "zero1":
            values["data_types"] = {"grad_accum_dtype": "fp32"}
    return values


def accumulation(options: Options) -> int:
    return options.global_batch_size // options.micro_batch_size // options.ranks


class BareZeroLoop:
    """Training loop from DeepSpeed's guide: ``initialize``, ``engine(...)``, ``backward``, ``step``."""

    def __init__(self, setting: Setting, values: dict[str, Any], name: str) -> None:
        import deepspeed

        self.name = name
        self._setting = setting
        self.model = setting.build_model()
        self._engine, *_ = deepspeed.initialize(
            model=self.model,
            optimizer=setting.build_optimizer(self.model),
            config=values,
            dist_init_required=False,
        )
        self._batches = iter(setting.batches)
        self._clock = StepClock(setting.device)

    def turn(self, steps: int) -> Turn:
        engine, device = self._engine, self._setting.device
        self._clock.start()
        for _ in range(steps):
            step_loss = torch.zeros((), device=device)
            for _ in range(self._setting.accumulation):
                batch = next(self._batches)
                logits = engine(input_ids=batch["input_ids"].to(device, non_blocking=True)).logits
                loss = cross_entropy(logits, batch["labels"].to(device, non_blocking=True))
                engine.backward(loss)
                engine.step()
                step_loss += loss.detach() / self._setting.accumulation
            self._clock.tick()
        seconds = self._clock.stop()
        dist.all_reduce(step_loss)
        return Turn(seconds, step_loss.item() / dist.get_world_size())


def measure(options: Options, strategy: str) -> list[Result]:
    """Measure all loops under one strategy on this rank. All ranks must call this function.

    Returns:
        The result of each loop on this rank. The bare loop is first.

    Raises:
        AssertionError: If this project's fp32 losses differ from the bare loop's losses.
    """
    forget_accelerators()  # other code in this process may have configured Accelerate without DeepSpeed
    with tempfile.TemporaryDirectory(prefix="zero-") as scratch:
        folder = Path(scratch)
        backend = create_backend(resolve_backend_name(options.backend))
        config = harness.quickstart(options, folder, deepspeed__config=document(options, strategy))
        resolved = resolve_run(config, backend.name)
        backend.start()
        try:
            results = _take_turns(options, strategy, prepare_run(resolved, backend), folder)
        finally:
            backend.stop()
            forget_accelerators()
    if options.precision == "fp32":
        check_losses(results, BASELINE, SAME_LOSS)
    return results


def _take_turns(options: Options, strategy: str, prepared: PreparedRun, folder: Path) -> list[Result]:
    weights = _whole_weights(prepared)
    batches = (options.total_steps + 2) * prepared.batch_plan.accumulation_steps
    # The Trainer distributes the samples to the ranks itself, so it gets the samples of all ranks.
    alone = TrainLoader(
        prepared.data.train,
        seed=prepared.config.seed,
        position=0,
        global_batch_size=options.global_batch_size,
        micro_batch_size=options.micro_batch_size,
        rank=0,
        world_size=1,
    )
    everything = list(islice(alone, batches * options.ranks))
    portable = PortableLoop(prepared, folder / "portable")
    setting = Setting(prepared, weights, list(islice(build_train_loader(prepared, 0), batches)))
    others: list[Loop] = [BareZeroLoop(setting, document(options, strategy), BASELINE), portable]
    if options.control:
        others.append(BareZeroLoop(setting, document(options, strategy), "bare, again"))
    trainer = TrainerLoop(
        Setting(prepared, weights, everything),
        folder / "trainer",
        logging_steps=options.steps,
        deepspeed=document(options, strategy),
    )
    try:
        turns = take_turns(trainer, others, options.turns, prepared.backend.barrier)
    finally:
        portable.close()
    last = {name: own[-1].loss for name, own in turns.items()}
    nan = float("nan")  # loss of loops that do not report one
    found = [(loop, last[loop.name]) for loop in (*others, trainer)]
    return [Result.of(loop, turns, nan if loss is None else loss) for loop, loss in found]


def _whole_weights(prepared: PreparedRun) -> dict[str, Tensor]:
    """Draw the complete initial weights of the run on this rank, for other libraries' loops.

    The result equals the weights of the run, in which each rank only draws its shard.
    """
    drawn = InitialWeights.from_model(prepared.model).build_lazy_weights(prepared.config.seed)
    weights = {name: to_torch(tensor.read()) for name, tensor in drawn.items()}
    for name, others in map_tied_names(prepared.model).items():
        weights |= dict.fromkeys(others, weights[name])
    return weights


def _rank(options: Options, strategy: str, path: str) -> int:
    results = measure(options, strategy)
    if os.environ["RANK"] == "0":
        Path(path).write_text(json.dumps([asdict(result) for result in results]), "utf-8")
    return 0


def parse(argv: Sequence[str] | None) -> tuple[Options, Path | None]:
    defaults = Options()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zero", description=__doc__)
    parser.add_argument(
        "--strategy", nargs="+", choices=("zero1", "zero2", "zero3"), default=defaults.strategies
    )
    parser.add_argument("--ranks", type=int, default=defaults.ranks)
    parser.add_argument("--offload", action="store_true", help="master weights and moments in host memory")
    parser.add_argument("--batch", type=int, default=defaults.global_batch_size, help="sequences of a step")
    parser.add_argument(
        "--micro-batch", type=int, default=defaults.micro_batch_size, help="sequences of a micro-batch"
    )
    defaults.add_to(parser)
    given = parser.parse_args(argv)
    if min(given.steps, given.warmup, given.rounds, given.ranks, given.micro_batch, given.batch) < 1:
        parser.error("numbers must be at least 1")
    if given.batch % (given.micro_batch * given.ranks):
        parser.error(f"--batch: {given.batch} is no multiple of --micro-batch x --ranks")
    options = Options(
        strategies=tuple(given.strategy),
        ranks=given.ranks,
        offload=given.offload,
        global_batch_size=given.batch,
        micro_batch_size=given.micro_batch,
        **Options.given(given),
    )
    return options, given.json


def main(argv: Sequence[str] | None = None) -> int:
    options, path = parse(argv)
    command = command_line("benchmarks.zero", argv)
    machine = describe_machine(create_backend(resolve_backend_name(options.backend)).device, "deepspeed")
    print_machine(command, machine)
    measured = []
    for strategy in options.strategies:
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            launch_ranks(_rank, (options, strategy, file.name), ranks=options.ranks)
            results = [Result(**values) for values in json.loads(Path(file.name).read_text("utf-8"))]
        measured.append(harness.about(options, "strategy", strategy, results))
        print(
            f"\n{strategy}{', optimizer offloaded' if options.offload else ''}, {options.precision}, "
            f"{options.ranks} ranks x {accumulation(options)} x {options.micro_batch_size} sequences a step, "
            f"{options.rounds} x {options.steps} steps each\n{table(results, BASELINE)}"
        )
    print(f"\n{LEGEND}")
    harness.write(path, command, machine, measured=measured)
    return 0


if __name__ == "__main__":
    sys.exit(main())
