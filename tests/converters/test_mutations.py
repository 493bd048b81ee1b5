"""Random damage of every format: an error names the checkpoint, or all bytes are correct.

A flip in a byte that the format does not protect (`Sample.unchecked`) may change a value. Even then, the
result is an error or a well-formed checkpoint.
"""

from __future__ import annotations

import random
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from portable.converters import CheckpointError, open_checkpoint
from tests.converters.compare import everything
from tests.converters.fuzz import run
from tests.converters.samples import Sample, all_samples, folder_of, parameters

SAMPLES = {sample.name: sample for sample in all_samples()}
FLIPS, FILES = 40, 8
"""Number of flipped bytes, and number of damaged files, per sample. ``tests.converters.fuzz`` tries more."""


class Damaged:
    """A copy of a sample that is damaged, read and repaired repeatedly."""

    def __init__(self, sample: Sample, original: Path, copy: Path) -> None:
        self.sample = sample
        self.folder = copy
        shutil.copytree(original, copy)
        self.good = everything(open_checkpoint(copy))
        self.files = [
            path
            for path in sorted(copy.rglob("*"))
            if path.is_file() and path.name not in sample.untouched and not path.name.endswith(".ref.pt")
        ]

    def look(self, what: str, *, vouched: bool = True) -> None:
        """Read all values of the checkpoint. Fail unless it is rejected or has the correct values."""
        try:
            checkpoint = open_checkpoint(self.folder)
            found = everything(checkpoint)
        except CheckpointError as error:
            assert str(self.folder) in str(error), what
            assert "\n" not in str(error), what
            return
        # A checkpoint is complete without its optimizer, but `--optimizer` rejects it.
        if found["groups"] is None:
            assert {k: v for k, v in self.good.items() if k in found and k != "groups"} == {
                k: v for k, v in found.items() if k != "groups"
            } or not vouched, what
            return
        assert found == self.good or not vouched, f"{what}: other values"


@pytest.fixture(scope="module", params=parameters(SAMPLES))
def damaged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Damaged]:
    sample = SAMPLES[request.param]
    original = folder_of(sample.name, request, tmp_path_factory.mktemp("original"))
    yield Damaged(sample, original, tmp_path_factory.mktemp("damaged") / "checkpoint")


def pick_byte(rng: random.Random, files: list[Path]) -> tuple[Path, int]:
    """Choose a file of any size with equal probability, and a byte, preferably in a header or directory."""
    path = rng.choice([path for path in files if path.stat().st_size])
    size = path.stat().st_size
    edge = min(size, 4096)
    at = rng.choice([rng.randrange(size), rng.randrange(edge), size - 1 - rng.randrange(edge)])
    return path, at


def test_flipped_bytes_are_detected(damaged: Damaged) -> None:
    rng = random.Random(zlib.crc32(damaged.sample.name.encode()))
    for _ in range(FLIPS):
        path, at = pick_byte(rng, damaged.files)
        data = path.read_bytes()
        bad = bytearray(data)
        bad[at] = rng.choice([bad[at] ^ 1 << rng.randrange(8), rng.randrange(256)])
        path.write_bytes(bad)
        vouched = not any(start <= at < stop for start, stop in damaged.sample.unchecked(path))
        damaged.look(f"{path.name}: byte {at} was {data[at]}, is {bad[at]}", vouched=vouched)
        path.write_bytes(data)


def test_truncated_and_foreign_files_are_detected(damaged: Damaged) -> None:
    rng = random.Random(1)
    for path in rng.sample(damaged.files, min(len(damaged.files), FILES)):
        data = path.read_bytes()
        cuts = {0, len(data) - 1, rng.randrange(len(data))} if data else set()
        for cut in sorted(cuts):
            path.write_bytes(data[:cut])
            damaged.look(f"{path.name}: cut to {cut} of {len(data)}")
        for junk in (b"hello" * 1000, bytes(len(data)), data + b"more", b"\0" * 3 + data):
            path.write_bytes(junk)
            damaged.look(f"{path.name}: {len(junk)} foreign bytes")
        path.write_bytes(data)


def test_missing_files_are_detected(damaged: Damaged) -> None:
    for path in damaged.files:
        data = path.read_bytes()
        path.unlink()
        damaged.look(f"{path.name}: deleted")
        path.mkdir()
        damaged.look(f"{path.name}: a folder")
        path.rmdir()
        path.symlink_to("nowhere")
        damaged.look(f"{path.name}: a dangling link")
        path.unlink()
        path.write_bytes(data)


def test_swapped_files_are_detected(damaged: Damaged) -> None:
    rng = random.Random(2)
    pairs = [(a, b) for i, a in enumerate(damaged.files) for b in damaged.files[i + 1 :]]
    for left, right in rng.sample(pairs, min(len(pairs), 15)):
        first, second = left.read_bytes(), right.read_bytes()
        left.write_bytes(second)
        right.write_bytes(first)
        told_apart = not damaged.sample.same_layout(left, right)
        damaged.look(f"{left.name} and {right.name} swapped", vouched=told_apart)
        left.write_bytes(first)
        if first != second:
            damaged.look(f"{left.name} twice", vouched=told_apart)
        right.write_bytes(second)


# -- at scale: `python -m tests.converters.fuzz` -------------------------------------------------------------


@pytest.mark.parametrize("name", ["torch-one-file", "torch-sharded", "safetensors-shards"])
def test_fuzz_program_runs(name: str, tmp_path: Path) -> None:
    """`python -m tests.converters.fuzz` uses thousands of files per format. This test runs a few."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("needs Linux, to measure memory")
    folder = tmp_path / "made" / name
    folder.mkdir(parents=True)
    make = SAMPLES[name].make
    assert make is not None
    make(folder)
    (tmp_path / "work").mkdir()
    costs = run(name, folder, tmp_path / "work", files=60)
    assert not [cost for cost in costs if cost.too_much]
    assert len(costs) == 60 and sum(cost.refused for cost in costs) > 10
