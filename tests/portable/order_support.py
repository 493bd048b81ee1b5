"""A mixture whose samples identify themselves, and a process that takes its batches until it is killed.

Every record is one sample of four tokens: the name of its source, two digits to base 100, and the end token.

    python -m tests.portable.order_support FOLDER WORLD_SIZE WORKERS STEPS

takes the batches of all ranks, starting at the position in ``FOLDER/position.json``. It appends the ids of
each step to ``FOLDER/taken``, and replaces the position every few steps, as a checkpoint does.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Generator, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from portable.config.sections import DataConfig
from portable.data.dataset import RunData, build_data
from portable.data.samples.loader import TrainLoader
from tests.portable.data_support import word_level, write_jsonl

BATCH = 84  # divides by 1, 2, 3, 4 and 7
SOURCES = {"web": 0, "code": 1, "books": 2}
SAVED_EVERY = 20  # steps
_DIGITS = 100


def write_sources(folder: Path, *, shards: int = 23, records: int = 600) -> DataConfig:
    """Write a stream of ``shards`` files and two plain files; return the settings of their mixture."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "web").mkdir()
    first = 0
    for shard in range(shards):
        count = records // 2 + shard * 97 % records
        write_jsonl(folder / "web" / f"{shard:03}.jsonl", _records("web", first, count))
        first += count
    assert first <= _DIGITS**2 * 4
    write_jsonl(folder / "code.jsonl", _records("code", 0, 5 * records))
    write_jsonl(folder / "books.jsonl", _records("books", 0, 7))
    write_tokenizer(folder / "tokenizer")
    return settings(folder)


def settings(folder: Path, **more: Any) -> DataConfig:
    given: dict[str, Any] = {
        "sources": (
            {"name": "web", "source": str(folder / "web" / "*.jsonl"), "stream": True, "weight": 0.5},
            {"name": "code", "source": str(folder / "code.jsonl"), "weight": 0.3},
            {"name": "books", "source": str(folder / "books.jsonl"), "weight": 0.2},
        ),
        "tokenizer": str(folder / "tokenizer"),
        "seq_len": 4,
        "eval_fraction": 0.0,
        "shuffle_window": 3,
        "cache_dir": str(folder / "cache"),
    }
    return DataConfig(**(given | more))


def _records(name: str, first: int, count: int) -> Iterator[dict[str, str]]:
    for number in range(first, first + count):
        high, low = divmod(number, _DIGITS)
        yield {"text": f"{name}{high // _DIGITS} h{high % _DIGITS} l{low}"}


def write_tokenizer(folder: Path) -> Path:
    """Write a tokenizer whose vocabulary has all words of the records."""
    words = ["<end>", "<unknown>"]
    words += [f"{name}{n}" for name in SOURCES for n in range(4)]
    words += [f"{digit}{n}" for digit in "hl" for n in range(_DIGITS)]
    word_level(words, eos_token="<end>", unk_token="<unknown>").save_pretrained(folder)
    return folder


def numbers(batch: Any) -> npt.NDArray[np.int64]:
    """Return the source and number of each sample, as ``source * 10**6 + number``, from its tokens."""
    tokens = batch["input_ids"].numpy()
    assert (tokens[:, 3] == 0).all() and (tokens[:, :3] > 1).all()
    source, top = np.divmod(tokens[:, 0] - 2, 4)
    assert (source == batch["source"].numpy()).all()
    first = 2 + 4 * len(SOURCES)
    found: npt.NDArray[np.int64] = source * 10**6 + (
        (top * _DIGITS + tokens[:, 1] - first) * _DIGITS + tokens[:, 2] - first - _DIGITS
    )
    return found


def steps(
    data: RunData, world_size: int, workers: int, position: int = 0, *, seed: int = 5
) -> Generator[npt.NDArray[np.int64]]:
    """Yield the samples of each step, as ``world_size`` ranks get them."""
    loaders = [
        TrainLoader(
            data.train,
            seed=seed,
            position=position,
            global_batch_size=BATCH,
            micro_batch_size=BATCH // world_size // (2 if BATCH // world_size % 2 == 0 else 1),
            rank=rank,
            world_size=world_size,
            num_workers=workers,
        )
        for rank in range(world_size)
    ]
    ranks = [iter(loader) for loader in loaders]
    try:
        while True:
            yield np.concatenate(
                [
                    numbers(batch)
                    for loader, rank in zip(loaders, ranks, strict=True)
                    for batch in islice(rank, loader.micro_batches_per_step)
                ]
            )
    finally:
        for rank in ranks:
            rank.close()


def main(folder: Path, world_size: int, workers: int, count: int) -> None:
    data = build_data(settings(folder), seed=5)
    saved = folder / "position.json"
    begun = 0
    if saved.exists():
        state = json.loads(saved.read_text())
        begun = state["step"]
        data.train.load_state_dict(state["streams"])
    taken = steps(data, world_size, workers, begun * BATCH)
    with (folder / "taken").open("ab", buffering=0) as file:
        for step in range(begun, count):
            row = np.concatenate([[step], next(taken)])
            file.write(row.astype("<i8").tobytes())
            if (step + 1) % SAVED_EVERY == 0 or step + 1 == count:
                draft = folder / "position.draft"
                draft.write_text(json.dumps({"step": step + 1, "streams": data.train.state_dict()}))
                draft.replace(saved)
    taken.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
