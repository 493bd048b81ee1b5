"""Measure the tokenization of a source: its speed, its memory, and the cost of an interruption.

    python -m benchmarks.tokenizing [--megabytes 60] [--processes 1 2] [--json FILE]

The source is a `.jsonl` file of random words, and the tokenizer is a byte-pair encoding trained on
them. The file is first tokenized without an interruption. It is then tokenized by a process that is
killed about halfway, and by a second process that continues. The tokens must be the same. With
``--processes``, the file is instead tokenized once for each given number of processes, with one
thread per process. The CPU time is the sum over all processes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

_WORDS, _WORDS_PER_DOCUMENT = 5000, 400
_SAVE_SECONDS = 3.0
"""Seconds between two saves of the progress. The interval is short, so that a save precedes the kill."""


def write_source(path: Path, megabytes: float) -> None:
    """Write a ``.jsonl`` file of about ``megabytes`` MB with documents of random words."""
    generator = random.Random(0)
    words = ["".join(generator.choices("etaoinshrdlucmfw", k=generator.randint(2, 9))) for _ in range(_WORDS)]
    left = megabytes * 1e6
    with path.open("w") as file:
        while left > 0:
            text = " ".join(generator.choices(words, k=_WORDS_PER_DOCUMENT))
            left -= len(text)
            file.write(json.dumps({"text": text}) + "\n")


def tokenize(
    source: Path, cache: Path, tokenizer_folder: Path, processes: int | None = None
) -> dict[str, Any]:
    """Train a tokenizer on a file, and tokenize the file in this process.

    Args:
        source: File to tokenize.
        cache: Folder of the token cache.
        tokenizer_folder: Folder of the tokenizer. An existing tokenizer is loaded instead of trained.
        processes: Number of tokenizing processes, with one thread each. None to use the defaults.

    Returns:
        Wall and CPU time in seconds, number of tokens, fingerprint of the tokens, and peak memory in
        MiB.
    """
    if processes is not None:
        os.environ["RAYON_NUM_THREADS"] = "1"  # number of threads of the tokenizers library
    from portable.config.sections import DataConfig
    from portable.data.sources.source import SourceSettings
    from portable.data.sources.source_kinds import open_source
    from portable.data.tokens import tokenize as tokenizing
    from portable.data.tokens.special_tokens import build_special_token_frame
    from portable.data.tokens.tokenize import TokenizeJob
    from portable.data.tokens.tokenizer import Vocabulary, train_tokenizer

    settings = SourceSettings(DataConfig(source=str(source), cache_dir=str(cache)))
    opened = open_source(settings)
    opened.detect_and_set_format()
    tokenizer = train_tokenizer(opened, 4000, tokenizer_folder)
    vocabulary = Vocabulary.from_tokenizer(tokenizer)
    frame = build_special_token_frame("causal-lm", vocabulary)
    tokenizing._SAVE_SECONDS = _SAVE_SECONDS
    if processes is not None:
        tokenizing._count_processes = lambda: processes
    began, cpu_before = time.monotonic(), _read_cpu_seconds()
    tokens = TokenizeJob(opened.settings, tokenizer, vocabulary, frame, cache).tokenize_source(opened)
    return {
        "seconds": time.monotonic() - began,
        "cpu": _read_cpu_seconds() - cpu_before,
        "tokens": tokens.num_tokens,
        "fingerprint": tokens.fingerprint,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def _read_cpu_seconds() -> float:
    """Return the CPU time of this process and its terminated children, in seconds."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _run(queue: Any, *arguments: Any) -> None:
    queue.put(tokenize(*arguments))


def measure(
    megabytes: float, folder: Path, *, kill: bool, process_counts: Sequence[int] = ()
) -> dict[str, Any]:
    """Write a file, and tokenize it several times, each time in a new process.

    Args:
        megabytes: Size of the file in MB.
        folder: Folder for the file and the caches.
        kill: Whether to also kill a process halfway and continue in another process. Ignored if
            ``process_counts`` is not empty.
        process_counts: Numbers of tokenizing processes to compare.

    Returns:
        Results of :func:`tokenize`, keyed by description.

    Raises:
        AssertionError: If the tokens of two results differ.
    """
    source = folder / "source.jsonl"
    write_source(source, megabytes)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    results: dict[str, Any] = {}

    def start(cache: str, processes: int | None = None) -> Any:
        arguments = (queue, source, folder / cache, folder / "tokenizer", processes)
        process = context.Process(target=_run, args=arguments)
        process.start()
        return process

    for name in ("first (trains the tokenizer)", "whole"):
        shutil.rmtree(folder / "whole", ignore_errors=True)
        process = start("whole")
        results[name] = queue.get()
        process.join()
    for count in process_counts:
        process = start(f"by-{count}", count)
        results[f"{count} processes"] = queue.get()
        process.join()
        assert results[f"{count} processes"]["fingerprint"] == results["whole"]["fingerprint"]
    if not kill or process_counts:
        return results
    killed = start("killed")
    while not list((folder / "killed").glob("tokens/*.draft/progress.json")):
        time.sleep(0.2)
    os.kill(killed.pid, signal.SIGKILL)
    killed.join()
    process = start("killed")
    results["rest after a kill"] = queue.get()
    process.join()
    assert results["rest after a kill"]["fingerprint"] == results["whole"]["fingerprint"]
    return results


def main() -> None:
    """Run the benchmark and print its results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--megabytes", type=float, default=60.0, help="of text")
    parser.add_argument("--no-kill", action="store_true", help="skip the run that is killed")
    parser.add_argument(
        "--processes", type=int, nargs="+", default=[], help="numbers of processes to compare"
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kill, counts = not options.no_kill, options.processes
        results = measure(options.megabytes, Path(folder), kill=kill, process_counts=counts)
    for name, row in results.items():
        rate = options.megabytes / row["seconds"]
        print(
            f"{name:<30}{row['seconds']:8.1f} s {row['cpu']:8.1f} s of CPU {rate:8.2f} MB/s "
            f"{row['peak_mb']:8.0f} MB",
            flush=True,
        )
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
