"""Streams under faults: every sample is the right one, or the run ends with one line; nothing hangs."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from portable.data.dataset import build_data
from portable.data.samples.loader import TrainLoader
from portable.data.stream import Stream
from portable.errors import RunError, UserError
from portable.reporting.metrics import read_metrics
from portable.run.rank import run_rank
from tests.object_store import ObjectStore
from tests.portable.test_stream import files, ids, settings
from tests.portable.test_stream import opened as stream
from tests.runs import configured, write_corpus

__all__ = ["files"]
COUNT = 1600
"""Samples beyond an epoch: every file was read."""


def rows(found: Stream, count: int = COUNT) -> list[list[int]]:
    return found.batch(ids(found, 0, count))["input_ids"].tolist()


@pytest.fixture
def expected(files: Path) -> list[list[int]]:
    found = rows(stream(files, cache_dir=str(files.parent / "expected")))
    assert len(found) == COUNT
    return found


# -- stores -------------------------------------------------------------------------------------------------


def test_a_store_that_fails_and_recovers(files: Path, expected: list[list[int]], s3: ObjectStore) -> None:
    """Every third request fails, or its answer breaks off."""
    s3.put_tree(files, "data")
    found = stream(files, source=s3.url("data/*.jsonl"))
    found._processes = 1
    s3.fail(status=503, method="GET", key=".jsonl", every=3)
    s3.fail(cut=100, method="GET", key=".jsonl", every=5)
    assert rows(found) == expected
    found.close()


def test_a_store_that_is_gone_ends_the_run_and_the_next_goes_on(
    files: Path, expected: list[list[int]], s3: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.put_tree(files, "data")
    found = stream(files, source=s3.url("data/*.jsonl"))
    monkeypatch.setenv("PORTABLE_STORAGE_MINUTES", "0.01")
    s3.fail(status=503, method="GET", key=".jsonl")
    with pytest.raises(RunError, match=r"^data.source: .*cannot read, \d+ attempts failed") as refused:
        rows(found)
    assert "\n" not in str(refused.value)
    s3.heal()
    assert rows(found) == expected


def test_an_object_that_changed_since_it_was_listed(files: Path, s3: ObjectStore) -> None:
    s3.put_tree(files, "data")
    found = stream(files, source=s3.url("data/*.jsonl"))
    name = f"part-{int(found._order[-1])}.jsonl"
    s3.put(f"data/{name}", (files / name).read_bytes().replace(b"r3 ", b"r4 "))
    with pytest.raises(UserError, match=rf"{name}.*changed while it was read"):
        rows(found)
    s3.delete(f"data/{name}")
    with pytest.raises(UserError, match=rf"{name}.*cannot read it"):
        rows(found)


# -- processes ----------------------------------------------------------------------------------------------


def test_a_process_that_prepares_batches_dies(files: Path) -> None:
    loader = TrainLoader(stream(files), seed=0, global_batch_size=4, micro_batch_size=4, num_workers=1)
    batches = iter(loader)
    next(batches)
    generator: Any = batches._batches
    of_torch = generator.gi_frame.f_locals["batches"]
    os.kill(of_torch._workers[0].pid, signal.SIGKILL)
    with pytest.raises(RunError, match=r"data.num_workers: a process that prepares batches was killed"):
        for _ in range(50):
            next(batches)
    # torch does not shut it down, which would wait for ever for a lock that the process has died with.
    assert of_torch._shutdown
    assert [worker.join(60) or worker.is_alive() for worker in of_torch._workers] == [False]


# -- the cache ----------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 160 KiB, about the tokens of five files."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", "size=160k", "portable-test", str(folder)]
    if subprocess.run(mounted, capture_output=True).returncode:
        pytest.skip("mounting a file system is not allowed here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_is_emptied_of_what_is_not_in_use(
    files: Path, expected: list[list[int]], small_disk: Path
) -> None:
    build_data(settings(files)).tokenizer.save_pretrained(files.parent / "tokenizer")
    given = {"tokenizer": str(files.parent / "tokenizer"), "vocab_size": None, "cache_dir": str(small_disk)}
    found = stream(files, **given, cache_limit=1.0)
    assert rows(found) == expected
    shutil.rmtree(small_disk / "streams")
    ballast = small_disk / "ballast"
    with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(b"x" * 4096)
    with pytest.raises(UserError, match=r"^data.cache_dir: cannot write in .* \(.*No space left") as refused:
        stream(files, **given, cache_limit=1.0)
    assert "\n" not in str(refused.value)


def test_runs_that_share_a_cache_do_not_disturb_each_other(
    files: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each removes what the other may need next, in a room for less than one of them."""
    monkeypatch.setattr(Stream, "_read_ahead", lambda *_: None)
    runs = [stream(files, cache_limit=1e-6) for _ in range(2)]
    found: list[list[list[int]]] = [[], []]
    for run in runs:
        run._processes = 1  # sees to the limit

    def take(number: int) -> None:
        for position in range(0, 400, 8):
            at = position if number == 0 else 392 - position
            found[number] += runs[number].batch(ids(runs[number], at, 8))["input_ids"].tolist()

    threads = [threading.Thread(target=take, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    backwards = [row for at in range(392, -1, -8) for row in expected[at : at + 8]]
    assert found == [expected[:400], backwards]


def test_half_a_cache_is_not_used(files: Path, expected: list[list[int]]) -> None:
    """Drafts of killed writers, and a folder whose last file is missing."""
    first = stream(files)
    assert rows(first) == expected
    tokens = files.parent / "cache" / "streams" / "tokens"
    folders = sorted(one for one in tokens.iterdir() if one.is_dir())
    (folders[0] / "meta.json").unlink()
    (folders[1] / "text.bin").write_bytes((folders[1] / "text.bin").read_bytes()[:-4])
    folders[2].rename(folders[2].with_name(f"{folders[2].name}.draft"))
    damaged = bytearray((folders[3] / "text.bin").read_bytes())
    damaged[7] ^= 1
    (folders[3] / "text.bin").write_bytes(damaged)
    assert rows(stream(files)) == expected


# -- waits --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("brief_runs")
def test_waits_for_data_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each log has their share; from the second on, a long one is warned of, once."""

    begin = TrainLoader.__iter__

    def slow(loader: TrainLoader) -> Iterator[Any]:
        for batch in begin(loader):
            time.sleep(0.3)
            yield batch

    monkeypatch.setattr(TrainLoader, "__iter__", slow)
    texts = write_corpus(tmp_path)
    given = {"log__every_steps": 1, "train__steps": 4, "checkpoint__export": False}
    assert run_rank("cpu", configured(tmp_path / "run", texts, **given)) == 0
    shares = [row["data_wait"] for row in read_metrics(tmp_path / "run") if "loss" in row]
    assert len(shares) == 4 and all(0.05 < share <= 1 for share in shares)
    told = [line for line in capsys.readouterr().err.splitlines() if "steps wait for data" in line]
    assert len(told) == 1 and "raise data.num_workers" in told[0]
