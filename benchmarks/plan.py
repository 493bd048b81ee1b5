"""Compare planned and measured memory, by model family and strategy.

``python -m benchmarks.plan --docs docs/strategies.md`` builds each model with a run's engine, as
rank 0 of several CPU ranks. The other ranks do not exist, but all buffers for collectives are
allocated. The benchmark takes two steps with two micro-batches each, and compares the peak of
torch's allocator with the plan. With two micro-batches, all gradients exist when activation memory
is at its peak, as the planner assumes.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("USE_TORCH_XLA", "0")

import torch

from benchmarks.allocator import allocations
from benchmarks.machine import command_line
from portable.config import load_config
from portable.engines.engine_interface import RankInfo
from portable.engines.memory_trial import start_fake_ranks
from portable.model import build as models
from portable.model.initialize import InitialWeights
from portable.planner.activations import build_fake_batch
from portable.planner.memory_model import Cluster, StrategySetting
from portable.planner.meta_model import MetaModel
from portable.planner.pass_cost import PassRequest
from portable.planner.plan import DeviceBytes, Planner, PlanTarget
from portable.registry import import_engine_module

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from portable.config import RunConfig

MARKS = "<!-- benchmarks.plan: begin -->", "<!-- benchmarks.plan: end -->"
SIZES = {"vocab_size": 4096, "max_position_embeddings": 256}
WIDE = {**SIZES, "hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**WIDE, "model_type": "llama", "num_hidden_layers": 6, "num_key_value_heads": 2},
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 4096,
        "n_embd": 256,
        "n_layer": 6,
        "n_head": 4,
        "n_positions": 256,
    },
    "bert": {**WIDE, "model_type": "bert", "num_hidden_layers": 6},
    "t5": {
        "model_type": "t5",
        "vocab_size": 4096,
        "d_model": 256,
        "d_kv": 64,
        "d_ff": 688,
        "num_layers": 3,
        "num_decoder_layers": 3,
        "num_heads": 4,
    },
}
TASKS = {"bert": "masked-lm", "t5": "seq2seq-lm"}
SETTINGS = (
    StrategySetting("no_shard"),
    StrategySetting("zero1"),
    StrategySetting("zero2"),
    StrategySetting("shard_grad_op"),
    StrategySetting("zero3"),
    StrategySetting("full_shard"),
)
STEPS, MICRO_BATCHES, BATCH, LENGTH = 2, 2, 4, 128


@dataclass(frozen=True)
class Row:
    """Planned and measured memory of one model with one strategy.

    Attributes:
        family: Model family.
        setting: Strategy.
        recompute: Value of the setting ``memory.activation_checkpointing``.
        planned: Planned memory of rank 0 in bytes.
        measured: Measured peak memory of rank 0 in bytes.
    """

    family: str
    setting: StrategySetting
    recompute: str
    planned: DeviceBytes
    measured: int


def settings_of(
    family: str, setting: StrategySetting, recompute: str, ranks: int, folder: str
) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "backend": "cpu",
        "precision": "bf16",
        "output_dir": folder,
        "model.config": FAMILIES[family],
        "model.task": TASKS.get(family, "causal-lm"),
        "data.source": "texts.jsonl",
        "data.seq_len": LENGTH,
        "train.global_batch_size": BATCH * MICRO_BATCHES * ranks,
        "train.micro_batch_size": BATCH,
        "memory.activation_checkpointing": recompute,
        "strategy": setting.strategy,
    }
    if setting.strategy.startswith("zero"):
        # Let the buckets depend on the size of the model, as in the Trainer, because the default buckets are
        # intended for much larger models.
        sizes = {"reduce_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}
        stage = int(setting.strategy[-1])
        settings["deepspeed.config"] = {"zero_optimization": {"stage": stage, **sizes}}
    return settings


def measure(config: RunConfig, ranks: int) -> int:
    """Train two steps as rank 0 of ``ranks`` ranks, and return the last step's peak memory in bytes."""
    machine = RankInfo(torch.device("cpu"), 0, ranks, ranks)
    module = import_engine_module(config.strategy, "engine")
    gc.collect()
    with start_fake_ranks(machine) as at_stop:
        model = models.build_model_on_meta(models.load_model_config(config.model), config.model)
        request = PassRequest.from_config(config, micro_batch=BATCH, compute="cast", on_gpu=False)
        batch = build_fake_batch(model, request)
        weights = InitialWeights.from_model(model).build_lazy_weights(0)
        with allocations() as recording:
            engine = module.build_engine(model, config, machine, at_stop)
            engine.load_weights(weights)
            valid = torch.tensor(BATCH * LENGTH)
            for _ in range(STEPS):
                with recording.phase("step"):
                    for i in range(MICRO_BATCHES):
                        sums = engine.accumulate_gradients(
                            batch, valid, is_last_micro_batch=i == MICRO_BATCHES - 1
                        )
                    engine.take_optimizer_step(1e-4, 1.0, sums.values[0])
        del engine
    return max(phase.peak for phase in recording.phases.values())


def planned(config: RunConfig, ranks: int) -> DeviceBytes:
    model = models.build_model_on_meta(models.load_model_config(config.model), config.model)
    target = PlanTarget(config.backend, Cluster(ranks, ranks), None, None)
    subject = MetaModel(model, config)
    return Planner(config, subject, target).build_option(StrategySetting.from_config(config)).device_bytes


def measured_here(families: Sequence[str], ranks: int, folder: str) -> Iterator[Row]:
    for family in families:
        for recompute in ("none", "full"):
            for setting in SETTINGS:
                config = load_config(None, settings_of(family, setting, recompute, ranks, folder))
                taken = measure(config, ranks)
                yield Row(family, setting, recompute, planned(config, ranks), taken)


def table(rows: Sequence[Row]) -> str:
    """Format a Markdown table with one column per strategy.

    Each cell contains the measured memory in MiB and, in brackets, the ratio of planned to measured
    memory.
    """
    columns = list(dict.fromkeys(_column(row) for row in rows))
    cells = {
        (row.family, row.recompute, _column(row)): (
            f"{row.measured / (1 << 20):.1f} ({row.planned.total / row.measured:.2f})"
        )
        for row in rows
    }
    lines = [
        f"| model | recomputed | {' | '.join(columns)} |",
        f"| --- | --- |{' ---: |' * len(columns)}",
    ]
    for family, recompute in dict.fromkeys((row.family, row.recompute) for row in rows):
        found = [cells.get((family, recompute, column), "") for column in columns]
        lines.append(f"| {family} | {recompute} | {' | '.join(found)} |")
    return "\n".join(lines)


def _column(row: Row) -> str:
    return f"`{row.setting.strategy}`"


def put_into(page: Path, text: str, begin: str, end: str) -> None:
    """Replace the text between the marks ``begin`` and ``end`` in the file ``page``.

    Raises:
        ValueError: If the file does not contain the marks.
    """
    whole = page.read_text("utf-8")
    start, stop = whole.index(begin) + len(begin), whole.index(end)
    page.write_text(f"{whole[:start]}\n{text}\n{whole[stop:]}", "utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan", description=__doc__)
    parser.add_argument("--family", nargs="+", choices=list(FAMILIES), help="all of the table by default")
    parser.add_argument("--ranks", type=int, default=4, help="on the CPU")
    parser.add_argument("--docs", type=Path, metavar="PAGE", help="put the table into this page as well")
    given = parser.parse_args(argv)
    command = command_line("benchmarks.plan", argv)
    rows = []
    with tempfile.TemporaryDirectory(prefix="plan-") as folder:
        for row in measured_here(given.family or list(FAMILIES), given.ranks, folder):
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
    print(f"$ {command}\n\n{table(rows)}")
    if given.docs is not None:
        put_into(given.docs, f"\n{table(rows)}\n\n`{command}`\n", *MARKS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
