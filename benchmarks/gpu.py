"""One GPU: training loops by turns, Hugging Face's single-GPU guide, a roofline, saving and offloading.

``python -m benchmarks.gpu`` trains Llamas of 1.2 and 8 billion parameters and two sizes of Qwen3 with this
project, the Trainer and a bare compiled loop, each in a process of its own, by turns
(:mod:`benchmarks.gpu_turns`); compares a step with the card's limits; saves; and trains BERT-large under each
saving of the guide. A row is written to ``--rows`` as soon as it is measured; ``--table`` prints a file of
them. Without a GPU, or with ``--small``, everything is tiny, which only shows that the program works.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu_cases import BARE, CASES, OURS, TRAINER, Case, cases, contend, write_case
from benchmarks.gpu_turns import Contestant, take_turns
from benchmarks.gpu_work import (
    COMPLETE,
    FULL_BERT,
    ROWS,
    SMALL_BERT,
    STAGED,
    TO_DEVICE,
    TO_HOST,
    measure_roofline,
    measure_row,
    measure_saving,
    write_classes,
)
from benchmarks.machine import command_line, describe_machine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

GUIDE, ROOFLINE, SAVING = "guide", "roofline", "saving"
_FIRST = ("llama-1.2b", "llama-8b-lora", SAVING, ROOFLINE, "qwen3-1.7b", "qwen3-0.6b", GUIDE)
PARTS = (*_FIRST, *(name for name in CASES if name not in _FIRST))
"""In the order of worth."""
OF_PART = {SAVING: "qwen3-0.6b", ROOFLINE: "llama-1.2b"}
SAME_LOSS = {"fp32": 1e-5, "bf16": 2e-2}
"""Largest relative difference of the last loss from the bare loop's."""
SECONDS = 300.0

Rows = list[dict[str, Any]]


class Measurement:
    """What the parts of one command share.

    Args:
        small: whether everything is tiny.
        device: cuda or cpu.
        file: gets the rows; None for none.
    """

    def __init__(self, *, small: bool, device: str, file: Path | None) -> None:
        self.small, self.device, self._file = small, device, file
        self.rows: Rows = [] if file is None else read_rows(file)

    def record(self, part: str, row: dict[str, Any]) -> None:
        """Keep a row, and write it at once."""
        row = {"part": part, "small": self.small, **row}
        self.rows.append(row)
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def train(self, case: Case, seconds: float, folder: Path) -> None:
        """Let the loops of ``case`` take turns."""
        more = ["--small"] * self.small
        started = []
        for name in case.loops:
            command = [sys.executable, "-m", "benchmarks.gpu", "--loop", f"{case.name}:{name}", *more]
            errors = folder / f"errors of {name}.txt"
            started.append(partial(Contestant, name, [*command, str(folder)], errors))
        make = partial(write_case, case, self.device, folder)
        if case.together:
            take_turns([start() for start in started], case.plan, seconds, make, self._recording(case))
            return
        end = time.monotonic() + seconds
        make()
        for index, start in enumerate(started):
            share = (end - time.monotonic()) / (len(started) - index)
            take_turns([start()], case.plan, share, lambda: None, self._recording(case))

    def _recording(self, case: Case) -> Callable[[dict[str, Any]], None]:
        # Each loop draws the initial values of its adapter.
        tolerance = SAME_LOSS["bf16" if "adapter.type" in case.settings else case.precision]
        return lambda row: self.record(case.name, {"case": str(case), "tolerance": tolerance, **row})

    def guide(self, seconds: float, folder: Path) -> None:
        """Train the guide's rows that are missing."""
        end = time.monotonic() + seconds
        bert = SMALL_BERT if self.small else FULL_BERT
        write_classes(bert, folder)
        done = {row["name"] for row in self.rows if row["part"] == GUIDE and row["small"] == self.small}
        for row in ROWS:
            if row.name in done or time.monotonic() > end:
                continue
            try:
                found = measure_row(row, bert, self.device, folder)
            except Exception as error:
                found = {"name": row.name, "guide": row.guide, "failed": f"{type(error).__name__}: {error}"}
            self.record(GUIDE, found)

    def measure(self, part: str, seconds: float, folder: Path, trace: Path | None) -> None:
        """Measure one part in about ``seconds``, with its files in ``folder``."""
        if part in CASES:
            self.train(cases(small=self.small)[part], seconds, folder)
            return
        if part == GUIDE:
            self.guide(seconds, folder)
            return
        case = cases(small=self.small)[OF_PART[part]]
        write_case(case, self.device, folder)
        if part == SAVING:
            found = measure_saving(case, self.device, folder, seconds=seconds / 2)
        else:
            found = measure_roofline(case, self.device, folder, trace)
        self.record(part, {"case": case.name, **found})

    def succeeded(self, part: str) -> bool:
        """Whether a part gave figures, and none that are wrong."""
        own = [row for row in self.rows if row["part"] == part]
        measured = any("failed" not in row for row in own)
        return measured and (part not in CASES or different(own) is None)


def read_rows(file: Path) -> Rows:
    """The rows of a file; those that a kill cut short are left out."""
    rows = []
    for line in file.read_text("utf-8").splitlines() if file.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


# -- tables ------------------------------------------------------------------------------------------------


def tables(rows: Rows) -> str:
    """All tables that ``rows`` give, in the order of worth."""
    by_part = {part: [row for row in rows if row["part"] == part] for part in PARTS}
    found = []
    for part, own in by_part.items():
        if not own:
            continue
        if part == GUIDE:
            found.append(f"The single-GPU guide: BERT-large, 4 samples a step\n{guide_table(own)}")
        elif part == ROOFLINE:
            found.append(f"A step of {own[-1]['case']} against the roofline\n{roofline_table(own[-1])}")
        elif part == SAVING:
            found.append(f"Saving and offloading {own[-1]['case']}\n{saving_table(own[-1])}")
        else:
            found.append(f"{own[-1]['case']}\n{step_table(own)}")
    return "\n\n".join(found)


def medians(rows: Rows) -> dict[str, dict[str, Any]]:
    """By loop, the medians of its turns; where none succeeded, what failed."""
    found: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(row["name"] for row in rows):
        own = [row for row in rows if row["name"] == name]
        good = [row for row in own if "failed" not in row]
        if not good:
            found[name] = own[-1]
            continue
        found[name] = {"name": name, "turns": len(good)}
        for key in ("tokens_per_second", "step_seconds", "mfu", "peak_memory", "planned_memory"):
            values = [row[key] for row in good if row.get(key) is not None]
            found[name][key] = statistics.median(values) if values else None
        rates = [row["tokens_per_second"] for row in good]
        found[name]["spread"] = (max(rates) - min(rates)) / found[name]["tokens_per_second"]
        found[name]["loss"] = good[-1].get("loss")
    return found


def step_table(rows: Rows) -> str:
    """The loops of a case side by side."""
    results = medians(rows)
    trainer = results.get(TRAINER, {}).get("tokens_per_second")
    width = max(map(len, results)) + 2
    lines = [
        f"{'':<{width}}{'tokens/s':>10}{'spread':>8}{'step, ms':>10}{'MFU':>7}{'peak GiB':>10}{'planned':>9}"
        f"{'loss':>9}{'x Trainer':>11}"
    ]
    for name, result in results.items():
        if "failed" in result:
            lines.append(f"{name:<{width}}{result['failed']}")
            continue
        ratio = f"{result['tokens_per_second'] / trainer:.2f}" if trainer else "-"
        loss = "-" if result["loss"] is None else f"{result['loss']:.4f}"
        mfu, peak, planned = result["mfu"], result["peak_memory"], result["planned_memory"]
        lines.append(
            f"{name:<{width}}{result['tokens_per_second']:>10,.0f}{result['spread']:>8.1%}"
            f"{1e3 * result['step_seconds']:>10.1f}{_share(mfu):>7}{_gib(peak):>10}{_gib(planned):>9}"
            f"{loss:>9}{ratio:>11}"
        )
    if wrong := different(rows):
        lines.append(wrong)
    return "\n".join(lines)


def different(rows: Rows) -> str | None:
    """What is wrong if this project's last loss is not the bare loop's; None otherwise."""
    last = {row["name"]: row["loss"] for row in rows if row.get("loss") is not None}
    bare, ours = last.get(BARE), last.get(OURS)
    if bare is None or ours is None or abs(ours - bare) <= rows[-1]["tolerance"] * abs(bare):
        return None
    return f"WRONG: this project's loss is {ours:.7f} where the bare loop's is {bare:.7f}"


def guide_table(rows: Rows) -> str:
    """Our numbers beside the guide's, from a V100 with 16 GB."""
    lines = [
        f"{'':<30}{'ours: s':>10}{'samples/s':>11}{'driver MB':>11}{'guide: s':>11}{'samples/s':>11}{'MB':>8}"
    ]
    for row in rows:
        theirs = "" if row["guide"] is None else "{:>11.2f}{:>11.2f}{:>8}".format(*row["guide"])
        if "seconds" not in row:
            lines.append(f"{row['name']:<30}{row.get('failed') or row['refused']}")
            continue
        memory = "-" if row["driver_memory"] is None else f"{row['driver_memory'] / 2**20:.0f}"
        lines.append(
            f"{row['name']:<30}{row['seconds']:>10.2f}{row['samples_per_second']:>11.2f}{memory:>11}{theirs}"
        )
    return "\n".join(lines)


def roofline_table(found: dict[str, Any]) -> str:
    """The lower bound of each part beside its measured time."""
    bounds, spent = found["bounds_seconds"], found["spent_seconds"]
    lines = [
        f"ceilings measured here: {found['matrix_flops'] / 1e12:,.2f} TFLOP/s in the gated product, "
        f"{found['bytes_per_second'] / 1e9:,.1f} GB/s in a copy",
        f"{'':<26}{'at least, ms':>14}{'profiled, ms':>14}",
    ]
    for name in dict.fromkeys([*bounds, *spent]):
        least = f"{1e3 * bounds[name]:.2f}" if name in bounds else "-"
        took = f"{1e3 * spent[name]:.2f}" if name in spent else "-"
        lines.append(f"{name:<26}{least:>14}{took:>14}")
    total = sum(bounds.values())
    lines.append(
        f"{'all':<26}{1e3 * total:>14.2f}{1e3 * sum(spent.values()):>14.2f}   the step, unprofiled: "
        f"{1e3 * found['step_seconds']:.2f} ms, {total / found['step_seconds']:.0%} of it in the "
        "bounds"
    )
    return "\n".join(lines)


def saving_table(found: dict[str, Any]) -> str:
    """Seconds of the first time and of later ones, and gigabytes a second."""
    lines = [f"{'':<38}{'first, s':>10}{'later, s':>10}{'GB/s':>8}"]
    for name, seconds in found["seconds"].items():
        count = found["parameter_bytes"] if name in (TO_HOST, TO_DEVICE) else found["state_bytes"]
        later = statistics.median(seconds[1:] or seconds)
        rate = "-" if name == COMPLETE else f"{count / later / 1e9:.1f}"
        lines.append(f"{name:<38}{seconds[0]:>10.3f}{later:>10.3f}{rate:>8}")
    sizes = (
        f"{found['state_bytes'] / 1e9:.2f} GB of state, {found['parameter_bytes'] / 1e9:.2f} of parameters"
    )
    return "\n".join([*lines, f"{sizes}; {STAGED} is what the link between host and card gives"])


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _gib(count: float | None) -> str:
    return "-" if count is None else f"{count / 2**30:.1f}"


# -- the command -------------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--small", action="store_true", help="tiny models; the default without a GPU")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="which to measure")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help=f"for each part, about; default {SECONDS:.0f}"
    )
    parser.add_argument("--rows", type=Path, metavar="FILE", help="write each result to it as it comes")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="the kernels of a step (.json.gz)")
    parser.add_argument("--table", type=Path, metavar="FILE", help="only print the tables of a file of rows")
    parser.add_argument("--loop", help=argparse.SUPPRESS)
    parser.add_argument("folder", nargs="?", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; 1 if a part gave nothing, or our loss is not the bare loop's."""
    options = parse(argv)
    if options.table is not None:
        print(tables(read_rows(options.table)))
        return 0
    device = "cuda" if torch.cuda.is_available() else "cpu"
    small = options.small or device == "cpu"
    if options.loop is not None:
        case, name = options.loop.split(":")
        contend(cases(small=small)[case], name, device, options.folder)
        return 0
    print(f"$ {command_line('benchmarks.gpu', argv)}")
    described = describe_machine(torch.device(device))
    print("\n".join(f"{name:<13} {value}" for name, value in described.items()), flush=True)
    measurement = Measurement(small=small, device=device, file=options.rows)
    for part in options.parts:
        with tempfile.TemporaryDirectory(prefix="gpu-benchmark-") as scratch:
            measurement.measure(part, options.seconds, Path(scratch), options.trace)
        print("\n" + tables([row for row in measurement.rows if row["part"] == part]), flush=True)
    return int(not all(map(measurement.succeeded, options.parts)))


if __name__ == "__main__":
    sys.exit(main())
