"""Tokenizing a source: its speed, the memory of the process that reads it, and what a kill costs.

    python -m benchmarks.tokenizing [--megabytes 60] [--json FILE]

The source is a `.jsonl` file of random words, and the tokenizer a byte-pair encoding that is trained on them.
The file is tokenized once without an interruption, and once by a process that is killed about halfway and
continued by another. The tokens must be the same.
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
from typing import Any

_WORDS, _WORDS_PER_DOCUMENT = 5000, 400
_SAVE_SECONDS = 3.0
"""Seconds between two saves of the progress, so that there is one before the kill."""


def write_source(path: Path, megabytes: float) -> None:
    """Write documents of random words."""
    generator = random.Random(0)
    words = ["".join(generator.choices("etaoinshrdlucmfw", k=generator.randint(2, 9))) for _ in range(_WORDS)]
    left = megabytes * 1e6
    with path.open("w") as file:
        while left > 0:
            text = " ".join(generator.choices(words, k=_WORDS_PER_DOCUMENT))
            left -= len(text)
            file.write(json.dumps({"text": text}) + "\n")


def tokenize(source: Path, cache: Path, tokenizer_folder: Path) -> dict[str, Any]:
    """Tokenize a file; returns the seconds, the number of tokens, their digest, and the peak memory."""
    from portable.config.sections import DataConfig
    from portable.data.sources.opening import open_source
    from portable.data.sources.source import SourceSettings
    from portable.data.tokens import tokenize as tokenizing
    from portable.data.tokens.frame import special_token_frame
    from portable.data.tokens.tokenize import TokenizeJob
    from portable.data.tokens.tokenizer import Vocabulary, train_tokenizer

    settings = SourceSettings(DataConfig(source=str(source), cache_dir=str(cache)))
    opened = open_source(settings)
    opened.recognise()
    tokenizer = train_tokenizer(opened, 4000, tokenizer_folder)
    vocabulary = Vocabulary.of(tokenizer)
    frame = special_token_frame("causal-lm", vocabulary)
    tokenizing._SAVE_SECONDS = _SAVE_SECONDS
    began = time.monotonic()
    tokens = TokenizeJob(opened.settings, tokenizer, vocabulary, frame, cache).tokens(opened)
    return {
        "seconds": time.monotonic() - began,
        "tokens": tokens.total_tokens,
        "fingerprint": tokens.fingerprint,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def _run(queue: Any, *arguments: Path) -> None:
    queue.put(tokenize(*arguments))


def measure(megabytes: float, folder: Path, *, kill: bool) -> dict[str, Any]:
    """Tokenize without and, if ``kill`` is True, with a kill, each in a process of its own."""
    source = folder / "source.jsonl"
    write_source(source, megabytes)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    results: dict[str, Any] = {}

    def start(cache: str) -> Any:
        process = context.Process(target=_run, args=(queue, source, folder / cache, folder / "tokenizer"))
        process.start()
        return process

    for name in ("first (trains the tokenizer)", "whole"):
        shutil.rmtree(folder / "whole", ignore_errors=True)
        process = start("whole")
        results[name] = queue.get()
        process.join()
    if not kill:
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
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--megabytes", type=float, default=60.0, help="of text")
    parser.add_argument("--no-kill", action="store_true", help="skip the run that is killed")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = measure(options.megabytes, Path(folder), kill=not options.no_kill)
    for name, row in results.items():
        rate = options.megabytes / row["seconds"]
        print(f"{name:<30}{row['seconds']:8.1f} s {rate:8.2f} MB/s {row['peak_mb']:8.0f} MB", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
