"""The planner's order of strategies, fastest first, beside measured times of their steps.

``python -m benchmarks.order --docs docs/planning.md`` trains one model under every strategy and offload on
the ranks of this machine, in turns of a few steps, and sets the medians beside what the planner reckons for a
device with the rates of this one. Those are measured first, by all ranks at once: products, collectives, and
copies in memory. On CPUs there is no link to a host, so offloading costs what its own work costs.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("USE_TORCH_XLA", "0")

import torch
import torch.distributed as dist

from benchmarks.loops import PortableLoop
from benchmarks.machine import command_line, describe_machine, machine_in_words
from benchmarks.pages import put_into
from benchmarks.train_overhead import SMALL_MODEL, create_backend
from gpu import footprint
from portable.config import load_config
from portable.errors import UserError, one_line
from portable.planner import device_catalog as devices
from portable.planner import speed
from portable.planner.memory_model import Cluster, Setting
from portable.planner.plan import Planner, Target
from portable.planner.subject import LiveSubject
from portable.planner.tables import in_words
from portable.planner.this_machine import planner_here
from portable.ranks.launch import launch
from portable.run.leg import Prepared, resolve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portable.backend import Backend
    from portable.config import RunConfig
    from portable.planner.device_catalog import Device
    from portable.planner.plan import Option

BEGIN = "<!-- benchmarks.order: begin -->"
END = "<!-- benchmarks.order: end -->"
MODEL = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}
SEQUENCES = 4
"""Of a step on each rank, two at a time."""


@dataclass(frozen=True)
class Options:
    """``rounds`` turns of ``steps`` optimizer steps are measured under each setting."""

    backend: str = "auto"
    precision: str = "fp32"
    ranks: int = 2
    rounds: int = 7
    steps: int = 3
    small: bool = False


@dataclass(frozen=True)
class Row:
    """One setting."""

    words: str
    place: int
    """In the planner's order; equal ones are held to be alike."""
    reckoned: float | None
    """Seconds of a step."""
    measured: float
    """The same: the median over the rounds of the mean of a turn."""


def config_of(options: Options, setting: Setting, folder: Path) -> RunConfig:
    """Raises ``UserError`` where ``setting`` does not go with this machine."""
    length = 32 if options.small else 256
    text = folder / "text.txt"
    if not text.exists():
        text.write_text("\n".join(f"line {i} of a text with {i * i} words" for i in range(6000)))
    settings: dict[str, Any] = {
        "backend": options.backend,
        "precision": options.precision,
        "strategy": setting.strategy,
        "memory.offload_optimizer": setting.offload_optimizer,
        "memory.offload_params": setting.offload_params,
        "memory.activation_checkpointing": "none",
        "model.config": SMALL_MODEL if options.small else MODEL,
        "data.source": str(text),
        "data.cache_dir": str(folder / "cache"),
        "data.seq_len": length,
        "train.steps": (options.rounds + 1) * options.steps,
        "train.schedule": "constant",
        "train.warmup_steps": 0,
        "train.global_batch_size": SEQUENCES * options.ranks,
        "train.micro_batch_size": SEQUENCES // 2,
        "train.eval_every": None,
        "output_dir": str(folder / "run"),
        "log.trackers": [],
    }
    return load_config(None, settings)


# -- what this machine can do ------------------------------------------------------------------------------


def device_here(backend: Backend, precision: str) -> Device:
    """A device with the rates that the ranks have when all of them work; called on every rank."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    left = torch.randn(512, 256, dtype=dtype)
    right = torch.randn(256, 704, dtype=dtype)
    products = 2 * 512 * 256 * 704 / _seconds(lambda: left @ right, 200)
    row = torch.zeros(4 << 20)
    ranks = dist.get_world_size()
    sent = 2 * row.nbytes * (ranks - 1) / ranks
    links = sent / _seconds(lambda: dist.all_reduce(row), 10) if ranks > 1 else 1e12
    other = torch.empty_like(row)
    copies = row.nbytes / _seconds(lambda: other.copy_(row), 30)
    return devices.Device(
        name=backend.name,
        backend=backend.name,
        memory=1 << 50,
        flops={precision: products / speed.ACHIEVED},
        link=links / speed.LINKS_ACHIEVED,
        network=links / speed.LINKS_ACHIEVED,
        host_link=copies / speed.LINKS_ACHIEVED,
        per_node=ranks,
    )


def _seconds(work: Any, times: int) -> float:
    work()
    if dist.is_initialized():
        dist.barrier()
    start = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - start) / times


# -- measuring ---------------------------------------------------------------------------------------------


def measure(options: Options) -> list[Row]:
    """All settings, on this rank of the ranks that run them together."""
    backend = create_backend(options.backend)
    cluster = Cluster(options.ranks, options.ranks)
    with tempfile.TemporaryDirectory(prefix="order-") as scratch:
        folder = Path(scratch)
        first = config_of(options, Setting("no_shard"), folder)
        backend.start()
        try:
            device = device_here(backend, options.precision) if backend.name == "cpu" else None
            loops: dict[str, PortableLoop] = {}
            options_by_name: dict[str, tuple[Option, int]] = {}
            for setting in sorted(footprint.settings(first, cluster), key=str):
                try:
                    config = resolve(config_of(options, setting, folder), backend)
                    prepared = Prepared(config, backend)
                except UserError as error:
                    _say(f"left out, {setting}: {one_line(error)}")
                    continue
                planner = _planner(prepared, backend, device)
                option = planner.option(setting)
                name = in_words(option)
                loops[name] = PortableLoop(prepared, folder / name.replace(" ", "-"), time.perf_counter)
                options_by_name[name] = option, planner.place(setting)
                _say(f"ready: {name}")
            seconds = _turns(options, backend, loops)
            for loop in loops.values():
                loop.close()
        finally:
            backend.stop()
    rows = [
        Row(name, place, option.seconds, statistics.median(seconds[name]))
        for name, (option, place) in options_by_name.items()
    ]
    return sorted(rows, key=lambda row: (row.place, row.measured))


def _planner(prepared: Prepared, backend: Backend, device: Device | None) -> Planner:
    if device is None:
        return planner_here(prepared.config, prepared.model, backend)
    cluster = Cluster(backend.world_size, backend.world_size)
    target = Target(backend.name, cluster, device, None)
    subject = LiveSubject(prepared.model, prepared.config)
    return Planner(prepared.config, subject, target)


def _turns(options: Options, backend: Backend, loops: dict[str, PortableLoop]) -> dict[str, list[float]]:
    """Mean seconds of a step in each measured turn, by setting; each round begins with another one."""
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    names = list(loops)
    gc.collect()
    gc.freeze()
    for index in range(options.rounds + 1):
        start = index % len(names)
        for name in names[start:] + names[:start]:
            backend.barrier()
            taken = loops[name].turn(options.steps).seconds
            if index:  # the first round warms up
                seconds[name].append(statistics.fmean(taken))
        _say(f"round {index} of {options.rounds}")
    gc.unfreeze()
    return seconds


def _say(words: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(words, file=sys.stderr, flush=True)


def table(rows: Sequence[Row]) -> str:
    """A Markdown table, in the planner's order; times as multiples of the first line's."""
    lines = [
        "| in the planner's order | place | reckoned | measured | a step, ms |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    base = rows[0]
    for row in rows:
        reckoned = "" if not (row.reckoned and base.reckoned) else f"{row.reckoned / base.reckoned:.2f}"
        lines.append(
            f"| {row.words} | {row.place} | {reckoned} | {row.measured / base.measured:.2f} | "
            f"{row.measured * 1000:.0f} |"
        )
    return "\n".join(lines)


def _rank(options: Options, path: str) -> int:
    rows = measure(options)
    if os.environ["RANK"] == "0":
        Path(path).write_text(json.dumps([asdict(row) for row in rows]), "utf-8")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    defaults = Options()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.order", description=__doc__)
    parser.add_argument("--backend", choices=("auto", "cpu", "cuda"), default=defaults.backend)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default=defaults.precision)
    parser.add_argument("--ranks", type=int, default=defaults.ranks)
    parser.add_argument("--rounds", type=int, default=defaults.rounds)
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the program out")
    parser.add_argument("--docs", type=Path, metavar="PAGE", help="put the table into this page as well")
    given = vars(parser.parse_args(argv))
    page = given.pop("docs")
    options = Options(**given)
    command = command_line("benchmarks.order", argv)
    machine = describe_machine(create_backend(options.backend).device, "deepspeed")
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        launch(_rank, (options, file.name), ranks=options.ranks)
        rows = [Row(**values) for values in json.loads(Path(file.name).read_text("utf-8"))]
    on = machine_in_words(machine)
    told = f"{table(rows)}\n\n`{command}`; {options.ranks} ranks, {options.precision}; {on}"
    print(told)
    if page is not None:
        put_into(page, f"\n{told}\n", BEGIN, END)
    return 0


if __name__ == "__main__":
    sys.exit(main())
