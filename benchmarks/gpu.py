"""One GPU: the training step beside its peers, Hugging Face's single-GPU guide, and a roofline.

``python -m benchmarks.gpu`` trains a Llama of 1.2 billion parameters with this project, the Trainer,
Accelerate and a bare compiled loop, by turns, each in a process of its own; then BERT-large under each
saving of the guide; then compares the step with the card's limits. Without a GPU, or with ``--small``,
everything is tiny and runs in this process, which only shows that the program works.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu_work import (
    CONTESTANTS,
    ROWS,
    SCALES,
    measure_loop,
    measure_roofline,
    measure_row,
    write_texts,
)
from benchmarks.machine import describe_machine

if TYPE_CHECKING:
    from collections.abc import Sequence

PARTS = ("step", "guide", "roofline")
SAME_LOSS = {"fp32": 1e-5, "bf16": 2e-2}
"""Largest relative difference of the last loss from the bare loop's."""


def run_piece(piece: str, index: int, scale: str, device: str, folder: Path) -> dict[str, Any]:
    """Measure contestant, row or roofline number ``index``."""
    if piece == "step":
        return measure_loop(CONTESTANTS[index], SCALES[scale], device, folder)
    if piece == "guide":
        return measure_row(ROWS[index], SCALES[scale], device, folder)
    return measure_roofline(SCALES[scale], device, folder)


def in_process_of_its_own(piece: str, index: int, scale: str, device: str, folder: Path) -> dict[str, Any]:
    """The same with the card to itself; for a piece that fails, its last output line."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--piece", f"{piece}:{index}:{scale}:{device}"]
    done = subprocess.run([*command, str(folder)], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        name = {"step": CONTESTANTS, "guide": [row.name for row in ROWS]}.get(piece, [piece])[index]
        return {"name": name, "failed": last}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# -- tables ------------------------------------------------------------------------------------------------


def step_table(
    rounds: Sequence[Sequence[dict[str, Any]]], precision: str
) -> tuple[list[dict[str, Any]], str]:
    """Medians over the rounds by contestant, and the table of them.

    Raises:
        AssertionError: if this project's last loss is not the bare loop's.
    """
    results = []
    for name in CONTESTANTS:
        runs = [run for turn in rounds for run in turn if run["name"] == name]
        good = [run for run in runs if "failed" not in run]
        if not good:
            results.append({"name": name, "failed": runs[0]["failed"]})
            continue
        middle = sorted(good, key=lambda run: float(run["tokens_per_second"]))[len(good) // 2]
        steps = [seconds for run in good for seconds in run["step_seconds"]]
        results.append({**middle, "step_seconds": statistics.median(steps), "rounds": runs})
    by_name = {result["name"]: result for result in results}
    _check_losses(by_name, SAME_LOSS[precision])
    trainer = by_name["Trainer"].get("tokens_per_second")
    lines = [f"{'':<16}{'tokens/s':>12}{'step, ms':>11}{'MFU':>8}{'peak GiB':>10}{'x Trainer':>11}"]
    for result in results:
        if "failed" in result:
            lines.append(f"{result['name']:<16}{result['failed']}")
            continue
        ratio = f"{result['tokens_per_second'] / trainer:.2f}" if trainer else "-"
        lines.append(
            f"{result['name']:<16}{result['tokens_per_second']:>12,.0f}{1e3 * result['step_seconds']:>11.1f}"
            f"{_share(result['mfu']):>8}{_gib(result['peak_memory']):>10}{ratio:>11}"
        )
    return results, "\n".join(lines)


def _check_losses(results: dict[str, dict[str, Any]], tolerance: float) -> None:
    bare, ours = results["bare PyTorch"].get("loss"), results["portable-train"].get("loss")
    if bare is not None and ours is not None and abs(ours - bare) > tolerance * abs(bare):
        raise AssertionError(f"this project's loss is {ours:.7f} where the bare loop's is {bare:.7f}")


def guide_table(rows: Sequence[dict[str, Any]]) -> str:
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
    if "failed" in found:
        return str(found["failed"])
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


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _gib(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**30:.1f}"


# -- the command -------------------------------------------------------------------------------------------


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--small", action="store_true", help="tiny models; the default without a GPU")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="which to measure")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each loop")
    parser.add_argument(
        "--isolate", action="store_true", help="a process for each piece; always so with full sizes"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    parser.add_argument("--piece", help=argparse.SUPPRESS)
    parser.add_argument("folder", nargs="?", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.rounds < 1:
        parser.error("--rounds must be at least 1")
    return given


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    options = parse(arguments)
    if options.piece is not None:
        piece, index, scale, device = options.piece.split(":")
        print(json.dumps(run_piece(piece, int(index), scale, device, options.folder)))
        return 0
    device = "cuda" if torch.cuda.is_available() else "cpu"
    scale = "small" if options.small or device == "cpu" else "full"
    measure = in_process_of_its_own if options.isolate or scale == "full" else run_piece
    command = shlex.join(["python", "-m", "benchmarks.gpu", *arguments])
    machine = describe_machine(torch.device(device))
    print(f"$ {command}")
    print("\n".join(f"{name:<13} {value}" for name, value in machine.items()))
    document: dict[str, Any] = {"command": command, "machine": machine, "scale": scale}
    with tempfile.TemporaryDirectory(prefix="gpu-benchmark-") as scratch:
        folder = Path(scratch)
        write_texts(folder, SCALES[scale])
        if "step" in options.parts:
            rounds = []
            for turn in range(options.rounds):
                order = [(turn + place) % len(CONTESTANTS) for place in range(len(CONTESTANTS))]
                rounds.append([measure("step", index, scale, device, folder) for index in order])
            document["step"], text = step_table(rounds, SCALES[scale].precision)
            print(f"\nThe training step: {_llama_in_words(scale)}\n{text}")
        if "guide" in options.parts:
            document["guide"] = [measure("guide", index, scale, device, folder) for index in range(len(ROWS))]
            print(f"\nThe single-GPU guide: {_bert_in_words(scale)}\n{guide_table(document['guide'])}")
        if "roofline" in options.parts:
            document["roofline"] = measure("roofline", 0, scale, device, folder)
            print(f"\nThe step against the roofline\n{roofline_table(document['roofline'])}")
    if options.json is not None:
        options.json.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    return 0


def _llama_in_words(scale: str) -> str:
    size = SCALES[scale]
    compiled = "compiled" if size.compile else "not compiled"
    return (
        f"Llama, {size.precision}, {compiled}, {size.global_batch_size // size.micro_batch_size} x "
        f"{size.micro_batch_size} sequences of {size.seq_len} tokens a step"
    )


def _bert_in_words(scale: str) -> str:
    size = SCALES[scale]
    return f"BERT for classification, {size.bert_samples} samples of {size.bert_seq_len} tokens, 4 a step"


if __name__ == "__main__":
    sys.exit(main())
