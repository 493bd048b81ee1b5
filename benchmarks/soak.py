"""Train a tiny model for an hour, and check that the run's memory and descriptors do not grow.

``python -m benchmarks.soak --minutes 60`` trains with document packing, a mixture that includes a
stream, a data worker, EMA, evaluations, a save every 10 steps (2 checkpoints and the 2 best are
retained) and TensorBoard. Each minute, it sums up the anonymous memory, file descriptors, threads
and CPU time of all processes in the run. At the end, it stops the run with SIGTERM, and prints the
first and last sample and the slopes. It exits with 1 if memory or descriptors grew, if a temporary
file remains in the run folder, or if the run did not stop with exit code 75.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.harness import SMALL_MODEL
from benchmarks.machine import command_line, describe_machine, print_machine
from portable.reporting.metrics import METRICS_FILE, read_metrics

if TYPE_CHECKING:
    from collections.abc import Sequence

EXIT_STOPPED = 75
WARM_UP = 0.2
"""Fraction of the samples, from the start of the run, that the slopes ignore because caches are
still filling.
"""
MEMORY_GROWTH, DESCRIPTOR_GROWTH = 16.0, 32.0
"""Largest accepted growth per hour, of anonymous memory in MiB and of the number of file descriptors."""
PATIENCE = 900.0
"""Time limit in seconds, for the first step as well as for the end of the run after SIGTERM."""


@dataclass(frozen=True)
class Sample:
    """Measurement of a run at one time. Numbers are sums over all processes in the run."""

    minutes: float
    """Minutes since the first step."""
    step: int
    processes: int
    memory: float
    """Anonymous memory in MiB."""
    descriptors: int
    threads: int
    cpu: float
    """Processor time in seconds."""
    cache: int
    """Bytes in the token cache."""
    log: int
    """Bytes of ``metrics.jsonl`` and ``log.txt``."""


def find_processes(pid: int) -> list[int]:
    """Return the process ID ``pid`` and the process IDs of its descendants."""
    pids = [pid]
    with suppress(OSError):
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            pids += [pid for child in children.read_text().split() for pid in find_processes(int(child))]
    return pids


def measure_folder(folder: Path) -> int:
    """Return the total size of all files below ``folder`` in bytes."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            total += path.lstat().st_size
    return total


def take_sample(pid: int, output: Path, cache: Path, started: float) -> Sample:
    """Measure a run at the current time.

    Args:
        pid: Process ID of the launcher. Its descendants are included.
        output: Folder of the run.
        cache: Folder of the token cache.
        started: Value of ``time.monotonic()`` at the first step.
    """
    memory = descriptors = threads = ticks = 0
    pids = find_processes(pid)
    for process in pids:
        with suppress(OSError):
            for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
                if line.startswith("Anonymous:"):
                    memory += int(line.split()[1])
            descriptors += sum(1 for _ in Path(f"/proc/{process}/fd").iterdir())
            threads += sum(1 for _ in Path(f"/proc/{process}/task").iterdir())
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    logs = [path for path in (output / METRICS_FILE, output / "log.txt") if path.exists()]
    return Sample(
        minutes=(time.monotonic() - started) / 60,
        step=max((row.get("step", 0) for row in read_metrics(output)), default=0),
        processes=len(pids),
        memory=memory / 1024,
        descriptors=descriptors,
        threads=threads,
        cpu=ticks / os.sysconf("SC_CLK_TCK"),
        cache=measure_folder(cache),
        log=sum(path.stat().st_size for path in logs),
    )


def write_texts(folder: Path) -> None:
    """Write the two sources for the mixture, and the evaluation data."""
    dice = random.Random(0)
    words = [f"word{number}" for number in range(500)]
    for name, count in (("web", 4000), ("chat", 1000), ("eval", 40)):
        with (folder / f"{name}.jsonl").open("w") as file:
            for _ in range(count):
                text = " ".join(dice.choices(words, k=dice.randint(2, 60)))
                file.write(json.dumps({"text": text}) + "\n")


def build_config(folder: Path) -> dict[str, Any]:
    """Build the config of the run. Its files are in ``folder``."""
    return {
        "backend": "cpu",
        "strategy": "no_shard",
        "precision": "fp32",
        "output_dir": str(folder / "run"),
        "model": {"config": {**SMALL_MODEL, "max_position_embeddings": 64}},
        "data": {
            "seq_len": 64,
            "packing": "documents",
            "num_workers": 1,
            "cache_dir": str(folder / "cache"),
            "eval": {"held_out": {"source": str(folder / "eval.jsonl")}},
            "sources": [
                {"name": "web", "source": str(folder / "web.jsonl"), "weight": 3, "stream": True},
                {"name": "chat", "source": str(folder / "chat.jsonl"), "weight": 1},
            ],
        },
        "train": {
            "steps": 10_000_000,
            "global_batch_size": 4,
            "micro_batch_size": 2,
            "learning_rate": 1e-4,
            "warmup_steps": 10,
            "ema": 0.9,
            "eval_every": 50,
        },
        "checkpoint": {"every_steps": 10, "keep": 2, "keep_best": 2},
        "log": {"every_steps": 1, "trackers": ["tensorboard"]},
    }


def compute_slope(samples: Sequence[Sample], name: str) -> float:
    """Return the least-squares slope per hour of a sample attribute, such as ``memory``.

    Samples from the warmup are ignored. Returns 0 if fewer than two samples remain.
    """
    settled = samples[int(len(samples) * WARM_UP) :]
    if len(settled) < 2:
        return 0.0
    hours = [sample.minutes / 60 for sample in settled]
    return float(np.polyfit(hours, [getattr(sample, name) for sample in settled], 1)[0])


def soak(folder: Path, minutes: float, interval: float) -> tuple[list[Sample], list[str]]:
    """Run the training for some minutes, stop it, and check the guarantees.

    Args:
        folder: Folder for the run and its data.
        minutes: Time from the first step to the stop in minutes.
        interval: Time between samples in seconds.

    Returns:
        The samples, and descriptions of the violated guarantees.
    """
    write_texts(folder)
    config = folder / "config.yaml"
    config.write_text(json.dumps(build_config(folder)))
    output, log = folder / "run", folder / "output.txt"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "portable.cli", "--config", str(config)], stdout=file, stderr=file
        )
    broken: list[str] = []
    samples: list[Sample] = []
    try:
        deadline = time.monotonic() + PATIENCE
        while process.poll() is None and not (output / METRICS_FILE).exists():
            if time.monotonic() > deadline:
                return [], ["no step within 15 minutes"]
            time.sleep(1)
        started = time.monotonic()
        while process.poll() is None and (time.monotonic() - started) / 60 < minutes:
            time.sleep(interval)
            if process.poll() is None:
                samples.append(take_sample(process.pid, output, folder / "cache", started))
                print(json.dumps(asdict(samples[-1])), flush=True)
        process.send_signal(signal.SIGTERM)
        code = process.wait(PATIENCE)
    finally:
        process.kill()
        process.wait()
    if code != EXIT_STOPPED:
        broken.append(f"exit code {code} after SIGTERM: {log.read_text()[-500:]}")
    if partial := [path.name for path in output.rglob("*") if ".partial" in path.name]:
        broken.append(f"left behind: {partial}")
    for name, limit in (("memory", MEMORY_GROWTH), ("descriptors", DESCRIPTOR_GROWTH)):
        hours = (samples[-1].minutes - samples[0].minutes) / 60 if samples else 0
        slope = compute_slope(samples, name)
        if hours >= 0.25 and slope > limit:
            broken.append(f"{name} grew by {slope:.1f} an hour")
    return samples, broken


def main(argv: Sequence[str] | None = None) -> int:
    """Run the soak test, and print its results. Returns 1 if a guarantee was violated, otherwise 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="duration after the first step")
    parser.add_argument("--interval", type=float, default=60.0, help="seconds between samples")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample to it as well")
    arguments = parser.parse_args(argv)
    command = command_line("benchmarks.soak", argv)
    machine = describe_machine(torch.device("cpu"))
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        samples, broken = soak(Path(folder), arguments.minutes, arguments.interval)
    if arguments.json is not None:
        values = {"command": command, "machine": machine, "samples": list(map(asdict, samples))}
        arguments.json.write_text(json.dumps(values, indent=1) + "\n", "utf-8")
    print_machine(command, machine)
    if samples:
        first, last = samples[0], samples[-1]
        steps = max(last.step - first.step, 1)
        for name in ("step", "processes", "memory", "descriptors", "threads", "cache", "log"):
            start, end = (getattr(sample, name) for sample in (first, last))
            print(
                f"{name:<13} {start:,.0f} -> {end:,.0f}",
                f"{compute_slope(samples, name):+,.1f} an hour",
            )
        print(f"{'CPU':<13} {1000 * (last.cpu - first.cpu) / steps:.1f} ms per step")
    print(f"promises broken: {len(broken)}", *broken, sep="\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
