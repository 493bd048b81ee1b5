"""Tokens per second of ``portable-data`` and of a stream, beside ``datasets.map`` and a training.

    python -m benchmarks.tokenizing [--megabytes 24] [--repeats 3]

The text is the standard library's, in .jsonl files; the tokenizer is the one that the quickstart trains. All
measurements are new processes, and they take turns. Times begin after the imports, and include the reading of
the files and the start of processes. Where others use the cores, tokens for a second of CPU time tell more.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from portable.data.tokens.parallel import cores
from portable.formatting import table

FILES = 16
WORKERS = 4
SEQ_LEN = 256


def write_texts(folder: Path, megabytes: float) -> None:
    """The texts of the standard library, again and again, in files of equal length."""
    from portable.data.sources.standard_library import StandardLibrary

    texts: list[str] = []
    size = 0
    while size < megabytes * 1e6:
        for document in StandardLibrary(None).documents():
            texts.append(f"{len(texts)} {document.text[:20_000]}")
            size += len(texts[-1])
            if size >= megabytes * 1e6:
                break
    folder.mkdir()
    for number in range(FILES):
        with (folder / f"{number:02}.jsonl").open("w") as file:
            for text in texts[number::FILES]:
                file.write(json.dumps({"text": text}) + "\n")


def settings(folder: Path, cache: Path) -> dict[str, Any]:
    return {
        "source": str(folder / "texts" / "*.jsonl"),
        "stream": True,
        "tokenizer": str(folder / "tokenizer"),
        "seq_len": SEQ_LEN,
        "eval_fraction": 0.0,
        "cache_dir": str(cache),
        "num_workers": WORKERS,
    }


def now() -> tuple[float, float]:
    """Seconds, and those of CPU time of this process and of all that it waited for."""
    return time.perf_counter(), sum(os.times()[:4])


def since(begun: tuple[float, float]) -> tuple[float, float]:
    return now()[0] - begun[0], now()[1] - begun[1]


def with_portable_data(folder: Path, scratch: Path) -> tuple[int, float, float]:
    from portable.commands.data import main as portable_data
    from portable.data.sources.prepared import read_index

    for name in ("portable.data.dataset", "portable.data.making", "transformers.models.auto"):
        import_module(name)
    config = scratch / "config.json"
    config.write_text(json.dumps({"data": settings(folder, scratch)}))
    begun = now()
    assert portable_data(["--config", str(config), "--out", str(scratch / "out")]) == 0
    taken = since(begun)
    return sum(tokens for _, tokens, _ in read_index(scratch / "out").shards), *taken


def with_datasets(folder: Path, scratch: Path) -> tuple[int, float, float]:
    from datasets import load_dataset
    from transformers import AutoTokenizer

    files = sorted(map(str, (folder / "texts").glob("*.jsonl")))
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    begun = now()
    found = load_dataset("json", data_files=files, split="train", cache_dir=str(scratch))
    made = found.map(
        lambda rows: {"input_ids": tokenizer(rows["text"], add_special_tokens=False)["input_ids"]},
        batched=True,
        remove_columns=found.column_names,
        num_proc=cores(),
    )
    taken = since(begun)
    lengths = made.with_format("arrow")[:]["input_ids"].combine_chunks().value_lengths()
    return int(lengths.to_numpy(zero_copy_only=False).sum()) + len(made), *taken


def with_a_stream(folder: Path, scratch: Path) -> tuple[int, float, float]:
    """An epoch from an empty cache, as a loader delivers it."""
    from portable.config import DataConfig
    from portable.data import TrainLoader, build_data
    from portable.data.stream import Stream

    begun = now()
    train = build_data(DataConfig(**settings(folder, scratch))).train
    assert isinstance(train, Stream)
    batches = iter(TrainLoader(train, seed=0, global_batch_size=8, micro_batch_size=8))
    taken = 0
    while (whole := train._whole()) is None or taken < whole:
        taken += len(next(batches)["input_ids"])
    batches.close()
    return taken * SEQ_LEN, since(begun)[0], 0.0  # the processes ahead still run


def quickstart(scratch: Path) -> float:
    """Tokens per second that the quickstart consumes."""
    from portable.reporting.metrics import read_metrics

    command = [sys.executable, "-m", "portable.cli", "--train.steps", "12", "--log.every_steps", "4"]
    command += ["--output_dir", str(scratch / "run"), "--checkpoint.export", "false"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    rows = [row["tokens_per_second"] for row in read_metrics(scratch / "run") if "tokens_per_second" in row]
    return float(rows[-1])


WAYS = {
    "portable-data, a process for each core": with_portable_data,
    "datasets.map, a process for each core": with_datasets,
    f"a stream's loader, {WORKERS} processes ahead": with_a_stream,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only-whole", action="store_true", help="neither a stream nor the quickstart")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        name, folder, scratch = args.measure
        print(json.dumps(WAYS[name](Path(folder), Path(scratch))))
        return
    with tempfile.TemporaryDirectory(prefix="tokenizing-") as temporary:
        folder = Path(temporary)
        write_texts(folder / "texts", args.megabytes)
        from portable.data.sources.opening import open_source
        from portable.data.tokens.tokenizer import train_tokenizer

        trained = train_tokenizer(open_source(None), None, folder / "trained")
        trained.save_pretrained(folder / "tokenizer")
        rates: dict[str, list[float]] = {}
        of_cpu: dict[str, list[float]] = {}
        for _ in range(args.repeats):
            for name in list(WAYS)[: 2 if args.only_whole else 3]:
                scratch = folder / "scratch"
                shutil.rmtree(scratch, ignore_errors=True)
                scratch.mkdir()
                command = [sys.executable, "-m", "benchmarks.tokenizing", "--measure", name, temporary]
                done = subprocess.run(
                    [*command, str(scratch)],
                    check=True,
                    stdout=subprocess.PIPE,
                    text=True,
                    env=dict(os.environ),
                )
                tokens, seconds, cpu = json.loads(done.stdout.splitlines()[-1])
                rates.setdefault(name, []).append(tokens / seconds)
                if cpu:
                    of_cpu.setdefault(name, []).append(tokens / cpu)
            if args.only_whole:
                continue
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir()
            rates.setdefault("the quickstart trains on", []).append(quickstart(scratch))
    medians = {name: statistics.median(found) for name, found in rates.items()}
    print(f"{cores()} cores, {args.megabytes:.0f} MB of text, medians of {args.repeats}")
    rows = [
        (
            name,
            f"{rate:,.0f} tokens/s"
            + (f", {statistics.median(of_cpu[name]):,.0f} a second of CPU time" if name in of_cpu else ""),
        )
        for name, rate in medians.items()
    ]
    print(table(rows))


if __name__ == "__main__":
    main()
