"""Several processes, emulated by threads, write one output: it equals the output of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import safetensors.numpy

from portable.converters import CheckpointError, open_checkpoint, write_safetensors
from portable.converters.storage.completion_markers import COMPLETE_MARKER, INCOMPLETE_MARKER
from portable.converters.storage.object_store import RemotePath
from portable.converters.writers import atomic_output
from tests.converters.compare import tree
from tests.object_store import ObjectStore, scale_down

if TYPE_CHECKING:
    from portable.converters.storage.path_or_url import AnyPath

SHARD_BYTES = 400_000


class GroupOfThreads:
    """A writer group whose processes are threads. When one dies, the calls of the others fail."""

    def __init__(self, number: int, size: int, barrier: threading.Barrier, answers: list[object]) -> None:
        self.number = number
        self.size = size
        self._barrier = barrier
        self._answers = answers
        self.calls = 0
        self.dies_in = -1

    def call_everywhere(self, function: Callable[[], str]) -> list[str]:
        self.calls += 1
        try:
            answer: object = function()
        except Exception as error:
            answer = error
        if self.calls == self.dies_in:
            self._barrier.abort()
            raise SystemExit
        self._answers[self.number] = answer
        try:
            self._barrier.wait(timeout=30)
            answers = list(self._answers)
            self._barrier.wait(timeout=30)
        except threading.BrokenBarrierError:
            raise CheckpointError("another process has stopped") from None
        if isinstance(answer, Exception):
            raise answer
        for other in answers:
            if isinstance(other, Exception):
                raise CheckpointError(str(other))
        return [str(other) for other in answers]


def write_together(sources: list[Path], out: AnyPath, dies: tuple[int, int] = (-1, -1)) -> list[object]:
    """Write a checkpoint with one process per source; returns the outcome of each.

    Args:
        sources: The checkpoint as each process sees it.
        out: The output.
        dies: Number of a process, and of the call at whose end it dies.
    """
    size = len(sources)
    barrier, answers = threading.Barrier(size), [None] * size

    def write(number: int) -> object:
        group = GroupOfThreads(number, size, barrier, answers)  # type: ignore[arg-type]
        group.dies_in = dies[1] if number == dies[0] else -1
        opened = open_checkpoint(sources[number])
        try:
            return write_safetensors(
                opened, out, max_shard_size=SHARD_BYTES, overwrite=True, progress=False, group=group
            )
        except (CheckpointError, SystemExit) as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(write, range(size)))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tensors of different sizes, so that the files are not equally long."""
    folder = tmp_path_factory.mktemp("source")
    random = np.random.default_rng(0)
    tensors = {f"layer.{i}": random.standard_normal((100 + 60 * i, 150), np.float32) for i in range(9)}
    tensors |= {f"norm.{i}": random.standard_normal(8, np.float32) for i in range(50)}
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture(params=["disk", "bucket"])
def output(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Callable[[str], AnyPath], Callable[[str], dict[str, bytes]]]:
    """Functions that return the place of an output, and its files."""
    if request.param == "disk":
        return lambda name: tmp_path / name, lambda name: tree(tmp_path / name)
    scale_down(monkeypatch)
    s3: ObjectStore = request.getfixturevalue("s3")

    def files(name: str) -> dict[str, bytes]:
        assert s3.open_uploads() == []
        return {key: data for key, data in s3.tree(name).items() if key != COMPLETE_MARKER}

    return lambda name: RemotePath.from_url(s3.url(name)), files


@pytest.mark.parametrize("size", [2, 3, 12])
def test_writer_group_files_equal_one_process(
    size: int,
    source: Path,
    output: tuple[Callable[[str], AnyPath], Callable[[str], dict[str, bytes]]],
) -> None:
    place, files = output
    write_together([source], place("alone"))
    plans = write_together([source] * size, place("together"))
    assert not any(isinstance(plan, BaseException) for plan in plans)
    alone = files("alone")
    assert sum(name.endswith(".safetensors") for name in alone) > 3
    assert files("together") == alone
    write_together([source] * size, place("together"))  # which replaces its own
    assert files("together") == alone


@pytest.mark.parametrize("call", [1, 2, 3, 4])
@pytest.mark.parametrize("number", [0, 2])
def test_writer_group_with_dead_process_leaves_no_output(
    number: int,
    call: int,
    source: Path,
    output: tuple[Callable[[str], AnyPath], Callable[[str], dict[str, bytes]]],
) -> None:
    place, files = output
    outcomes = write_together([source] * 3, place("out"), dies=(number, call))
    assert all(isinstance(outcome, BaseException) for outcome in outcomes)
    left = files("out") if place("out").exists() else {}
    # In a bucket, objects that came late may stay, below the marker of an incomplete folder.
    assert not left or INCOMPLETE_MARKER in left
    write_together([source] * 3, place("out"))
    write_together([source], place("alone"))
    assert files("out") == files("alone")


def test_writer_group_rejects_different_sources(source: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    safetensors.numpy.save_file({"layer.0": np.ones(3, np.float32)}, other / "model.safetensors")
    outcomes = write_together([source, source, other], tmp_path / "out")
    assert all("process 2 of 3 does not read the same tensors" in str(outcome) for outcome in outcomes)
    assert {path.name for path in tmp_path.iterdir()} == {"other"}


def test_writer_group_needs_shared_file_system(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setattr(
        "portable.converters.writers.conversion.join_atomic_output",
        lambda _, name: atomic_output.join_atomic_output(elsewhere / "out", name),
    )
    outcomes = write_together([source, source], tmp_path / "out")
    assert all("No such file or directory" in str(outcome) for outcome in outcomes)
    assert {path.name for path in tmp_path.iterdir()} == {"elsewhere"}
    assert not list(elsewhere.iterdir())


def test_writer_group_detects_truncated_file(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = atomic_output.FolderOutput.check_sizes

    def cut_file(output: atomic_output.FolderOutput, sizes: dict[str, int]) -> None:
        path = output.folder / max(sizes)
        path.write_bytes(path.read_bytes()[:-1])
        checked(output, sizes)

    monkeypatch.setattr(atomic_output.FolderOutput, "check_sizes", cut_file)
    leader, _ = write_together([source, source], tmp_path / "out")
    assert isinstance(leader, CheckpointError) and "although another process has written the file" in str(
        leader
    )
    assert not list(tmp_path.iterdir())
