"""The promise about the order: the ids of samples, from the batches that ranks really get.

Sample *i* of a mixture with a stream is the same on any number of ranks and workers, after kills and with any
state of the cache; no sample comes twice in an epoch of its source, and none is left out.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from portable.data.dataset import build_data
from tests.portable.order_support import BATCH, SOURCES, settings, steps, write_sources


def order(folder: Path, count: int, world_size: int = 1, workers: int = 0) -> npt.NDArray[np.int64]:
    data = build_data(settings(folder), seed=5)
    taken = steps(data, world_size, workers)
    found = np.stack(list(islice(taken, count)))
    taken.close()
    return found


def check_epochs(samples: npt.NDArray[np.int64], expected: dict[str, npt.NDArray[np.int64]]) -> list[int]:
    """Check that each epoch of each source has every sample once; return the number of epochs by source."""
    source, number = np.divmod(samples.ravel(), 10**6)
    counted = []
    for name, at in SOURCES.items():
        of, size = number[source == at], len(expected[name])
        whole = len(of) // size
        epochs = of[: whole * size].reshape(-1, size)
        assert (np.sort(epochs, axis=1) == expected[name]).all()
        rest = of[whole * size :]
        assert len(np.unique(rest)) == len(rest)
        assert size < 10 or len({epoch.tobytes() for epoch in epochs}) == whole  # an order of its own
        counted.append(whole)
    return counted


def samples_of(folder: Path) -> dict[str, npt.NDArray[np.int64]]:
    """The samples of each source. The last record of a file has no next token, and so is no sample."""
    found = {}
    for name in SOURCES:
        first, known = 0, []
        for path in sorted((folder / name).iterdir()) if name == "web" else [folder / f"{name}.jsonl"]:
            count = len(path.read_text().splitlines())
            known.append(np.arange(first, first + count - 1))
            first += count
        found[name] = np.concatenate(known)
    return found


# -- the quick part -----------------------------------------------------------------------------------------


def test_the_order_is_that_of_any_number_of_ranks(tmp_path: Path) -> None:
    """Over two epochs of the stream, exactly; a resume with the manifest and an empty cache goes on."""
    write_sources(tmp_path, shards=7, records=60)
    whole = order(tmp_path, 20)
    web, code, books = check_epochs(whole, samples_of(tmp_path))
    assert web >= 2 and code >= 1 and books > 50
    for world_size in (2, 3, 7):
        assert (order(tmp_path, 20, world_size) == whole).all()
    data = build_data(settings(tmp_path), seed=5)
    state = data.train.state()
    shutil.rmtree(tmp_path / "cache")
    resumed = build_data(settings(tmp_path), seed=5)
    resumed.train.adopt(state)
    taken = steps(resumed, 3, 0, 13 * BATCH)
    assert (np.stack(list(islice(taken, 7))) == whole[13:]).all()
    taken.close()


# -- the whole of it ----------------------------------------------------------------------------------------

STEPS = 1200
"""More than 10^5 samples."""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, npt.NDArray[np.int64]]:
    """The sources, and their order on one rank without workers."""
    folder = tmp_path_factory.mktemp("large") / "data"
    write_sources(folder)
    whole = order(folder, STEPS)
    assert whole.size > 100_000
    web, code, books = check_epochs(whole, samples_of(folder))
    assert web >= 3 and code >= 10 and books > 3000
    return folder, whole


@pytest.mark.exhaustive
@pytest.mark.parametrize("workers", [0, 4])
@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_a_hundred_thousand_samples(
    world_size: int, workers: int, large: tuple[Path, npt.NDArray[np.int64]]
) -> None:
    """On ranks in turn; those with workers from an empty cache on."""
    folder, whole = large
    if workers:
        shutil.rmtree(folder / "cache", ignore_errors=True)  # an earlier stream may still be ending
    assert (order(folder, STEPS, world_size, workers) == whole).all()


@pytest.mark.exhaustive
def test_killed_at_random_and_moved(large: tuple[Path, npt.NDArray[np.int64]]) -> None:
    """Every batch that any launch took, on other ranks and workers each time, some with an emptied cache."""
    folder, whole = large
    chance = random.Random(7)
    launches = 0
    while launches < 40:
        world_size, workers = chance.choice([1, 2, 3, 4, 7]), chance.choice([0, 0, 1, 2])
        if chance.random() < 0.4:
            shutil.rmtree(folder / "cache", ignore_errors=True)
        process = launch(folder, world_size, workers, STEPS)
        launches += 1
        try:
            process.wait(chance.uniform(4, 20))
            assert process.returncode == 0
            break
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    else:
        launch(folder, 1, 0, STEPS).wait(timeout=300)
    rows = np.fromfile(folder / "taken", dtype="<i8").reshape(-1, 1 + BATCH)
    assert launches > 3 and set(rows[:, 0]) == set(range(STEPS))
    assert (rows[:, 1:] == whole[rows[:, 0]]).all()


def launch(folder: Path, world_size: int, workers: int, steps: int) -> subprocess.Popen[bytes]:
    """A process of its own group that takes batches until it is killed."""
    given = [str(folder), str(world_size), str(workers), str(steps)]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.portable.order_support", *given], start_new_session=True
    )
