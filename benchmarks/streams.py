"""A stream of web scale in simulation: start, memory, time per sample and resume, without its data.

    python -m benchmarks.streams [--shards 100000] [--tokens 1e12]

The shards have lengths as if they were tokenized, and no tokens. All else is what a run does.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portable.data.samples.base import Arrays, Samples
from portable.data.samples.mixture import Mixture, Share
from portable.data.sources.documents import Fields, Source
from portable.data.sources.shard import Shard
from portable.data.sources.shards import StreamedFiles
from portable.data.stream import Stream
from portable.formatting import table

if TYPE_CHECKING:
    from collections.abc import Sequence

SEQ_LEN = 4096


class Lengths(Samples):
    """Samples of which only the number is known."""

    def __init__(self, count: int) -> None:
        self.num_samples = count
        self.valid_tokens = SEQ_LEN

    def documents(self, index: int) -> Sequence[int]:
        return ()

    def arrays(self, places: Sequence[tuple[int, int]]) -> Arrays:
        raise NotImplementedError


class Tokens:
    """What a stream asks of the tokens of shard ``number``."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.fingerprint = f"{number:032x}"
        self.folder = Path("none")


class MakesLengths:
    """Makes samples of shards whose mean length is ``mean``."""

    def __init__(self, mean: int) -> None:
        self._mean = mean

    def __call__(self, found: Any) -> Samples:
        return Lengths(self._mean * 3 // 4 + found.number * 2654435761 % (self._mean // 2 + 1))

    def count(self, shard: Shard) -> None:
        return None


class Work:
    """Stands for the tokenizing, and counts the shards that were asked for."""

    cache = Path("none")

    def __init__(self) -> None:
        self.opened = 0

    def open(self, shard: Shard) -> Tokens:
        self.opened += 1
        return Tokens(int(shard.identity))


def simulated(shards: int, tokens: float) -> tuple[Stream, Work]:
    """A stream of ``shards`` shards with about ``tokens`` tokens."""
    mean = int(tokens / shards / SEQ_LEN)

    def source(fields: Fields) -> Source:
        raise NotImplementedError

    listed = [Shard(source, str(n), mean * SEQ_LEN * 4) for n in range(shards)]
    files = StreamedFiles.__new__(StreamedFiles)
    files.name, files.shards, files.fields = "simulation", tuple(listed), Fields()
    work = Work()

    return Stream("simulation", files, work, MakesLengths(mean), seed=0, processes=0), work  # type: ignore[arg-type]


def memory() -> float:
    """Peak memory in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=100_000)
    parser.add_argument("--tokens", type=float, default=1e12)
    args = parser.parse_args()
    before = memory()
    begun = time.perf_counter()
    stream, work = simulated(args.shards, args.tokens)
    stream.locate(0, 0)
    started = time.perf_counter() - begun
    rows = [
        ("start, to the place of the first sample", f"{started * 1e3:.0f} ms, {work.opened} shard read"),
        ("memory for the list", f"{memory() - before:.0f} MiB"),
    ]

    def rate(samples: Any, first: int) -> str:
        begun = time.perf_counter()
        for position in range(first, first + 20_000):
            samples.locate(position, 0)
        return f"{(time.perf_counter() - begun) / 20_000 * 1e6:.1f} us"

    rows.append(("time per sample, at the start", rate(stream, 0)))
    mean = int(args.tokens / args.shards / SEQ_LEN)
    total = mean * args.shards
    for share in (0.5, 0.98):
        position = int(total * share)
        stream.locate(position, 0)  # reads the lengths on the way
        rows.append((f"time per sample, after {share:.0%} of {total:,}", rate(stream, position)))
        begun = time.perf_counter()
        text = json.dumps(stream.state())
        saved = time.perf_counter() - begun
        begun = time.perf_counter()
        other, other_work = simulated(args.shards, args.tokens)
        read = other_work.opened
        made = time.perf_counter() - begun
        begun = time.perf_counter()
        other.adopt(json.loads(text))
        place = other.locate(position, 0)
        resumed = time.perf_counter() - begun
        assert place == stream.locate(position, 0)
        rows.append(("  manifest in the checkpoint", f"{len(text) / 1e6:.1f} MB, {saved * 1e3:.0f} ms"))
        told = f"{resumed * 1e3:.0f} ms (list {made * 1e3:.0f} ms), {other_work.opened - read} shards read"
        rows.append(("  resume there", told))
        begun = time.perf_counter()
        stream.consumed(position)
        rows.append(
            ("  digest that ranks compare at a save", f"{(time.perf_counter() - begun) * 1e3:.0f} ms")
        )
    mixed = Mixture.__new__(Mixture)
    Mixture._columns = lambda self: {}  # type: ignore[method-assign]  # which would read a sample
    mixed.__init__(  # type: ignore[misc]
        {"a": stream, "b": Lengths(10**6), "c": Lengths(10**5)},
        {"a": Share(weight=0.7), "b": Share(weight=0.2), "c": Share(weight=0.1)},
    )
    rows.append(("time per sample of a mixture of three", rate(mixed, 10_000_000)))
    rows.append(("peak memory", f"{memory():.0f} MiB, of which {before:.0f} before"))
    print(table(rows))


if __name__ == "__main__":
    main()
