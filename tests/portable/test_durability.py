"""State after a power loss: all files of a checkpoint are on disk before it gets its name, and they stay."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from portable.checkpoint import store as checkpointing
from portable.checkpoint.store import CheckpointStore
from portable.checkpoint.trainer_state import STATE_FILE, TrainerState
from portable.converters import check_manifest, open_checkpoint, write_dcp, write_safetensors
from portable.converters.formats.dcp.reader import open_tensors
from portable.converters.manifest import MANIFEST
from portable.converters.writers.replace_folder import exchange_paths
from portable.engines.fsdp import saving, shard_writer
from portable.engines.fsdp.saving import DcpSaver
from portable.errors import RunError, UserError
from portable.paths import prepare_path_inside
from portable.run.rank import run_rank
from tests.engines import Engines
from tests.ranks import RankPool
from tests.runs import configured

pytestmark = pytest.mark.usefixtures("brief_runs")
Synced = dict[str, list[int]]


def synced_while(function: Callable[[], object], patch: pytest.MonkeyPatch) -> Synced:
    """Return when this process synced each file and folder, in ns since the epoch, by its path then."""
    real, when = os.fsync, dict[str, list[int]]()

    def fsync(file: Any) -> None:
        number = file if isinstance(file, int) else file.fileno()
        real(number)
        path = str(Path(f"/proc/self/fd/{number}").readlink())
        when.setdefault(path, []).append(time.time_ns())

    patch.setattr(os, "fsync", fsync)
    function()
    return when


def leg_watched(folder: Path, corpus: Path, backend: str, settings: dict[str, Any], log: Path) -> int:
    """Train, and record which files this rank syncs and when rank 0 renames checkpoints."""
    renames: Synced = {}
    rename = Path.rename

    def renamed(self: Path, target: Path) -> Path:
        renames.setdefault(str(target), []).append(time.time_ns())
        return rename(self, target)

    codes: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "rename", renamed)
        config = configured(folder, corpus, backend=backend, **settings)
        synced = synced_while(lambda: codes.append(run_rank(backend, config)), patch)
    rank = os.environ.get("RANK", "0")
    (log / f"{rank}.json").write_text(json.dumps({"synced": synced, "renames": renames}))
    return codes[0]


SETTINGS: dict[str, Any] = {"train__steps": 4, "checkpoint__every_steps": 4, "data__eval_fraction": 0}


@pytest.mark.parametrize(
    ("strategy", "background"),
    [*((name, True) for name in ("full_shard", "no_shard", "zero2", "zero3", "xla")), ("full_shard", False)],
)
def test_checkpoint_is_synced_before_rename(
    strategy: str,
    background: bool,
    tmp_path: Path,
    corpus: Path,
    engines: Engines,
) -> None:
    settings, backend = SETTINGS | {"checkpoint__async": background}, "xla"
    if strategy != "xla":
        settings, backend = settings | {"strategy": strategy, "train__micro_batch_size": 3}, "cpu"
    run = (strategy, 2, leg_watched, tmp_path / "run", corpus, backend, settings, tmp_path)
    assert engines.run(*run) == 0
    logs = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*.json"))]
    final = tmp_path / "run" / "checkpoints" / "step-000004"
    (named,) = logs[0]["renames"][str(final)]
    partial = final.with_name(f".{final.name}.partial")
    files = [path for path in final.rglob("*") if path.is_file()]
    assert len(files) > 6
    manifest = check_manifest(final)
    assert manifest is not None
    assert {*manifest["files"], MANIFEST} == {path.relative_to(final).as_posix() for path in files}
    for path in [*files, *(path for path in final.rglob("*") if path.is_dir()), final]:
        then = str(partial / path.relative_to(final))
        if path.name == STATE_FILE:  # written under another name, then replaced
            then = next(name for log in logs for name in log["synced"] if path.name in name)
        last = max(moment for log in logs for moment in log["synced"].get(then, [0]))
        # The rename changes the time of the folder itself, so only the times of its files show the last
        # write.
        written = path.stat().st_mtime_ns if path.is_file() else 0
        assert written <= last <= named, path
    # Each rank syncs its shards, because on several nodes no other rank could.
    for rank, log in enumerate(logs):
        own = [
            path for path in files if path.name.startswith(f"__{rank}_") or f"pp_rank_{rank}_" in path.name
        ]
        assert own
        assert all(str(partial / path.relative_to(final)) in log["synced"] for path in own)
    assert any(moment >= named for moment in logs[0]["synced"][str(final.parent)])  # and then the name
    exported = {Path(name).name for name in logs[0]["synced"] if "final.new" in name}
    exported |= {name.removeprefix(".").removesuffix(".partial") for name in exported}
    assert {path.name for path in (tmp_path / "run" / "final").iterdir()} <= exported


@pytest.mark.parametrize("write", [write_safetensors, write_dcp])
def test_converted_checkpoint_is_synced(
    write: Callable[..., Any], tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_rank("cpu", configured(tmp_path / "run", corpus, **SETTINGS)) == 0
    source = open_checkpoint(tmp_path / "run" / "checkpoints" / "step-000004")
    out = tmp_path / "out"
    synced = synced_while(lambda: write(source, out, optimizer=True, max_shard_size=100_000), monkeypatch)
    names = {Path(name).name for name in synced if f"/.{out.name}.tmp-" in name}
    assert {path.name for path in out.iterdir()} <= names
    assert len(names) > 4
    assert str(tmp_path) in synced


class _Written:
    """Shards that are being written until ``go`` is set. The write fails if there is a ``failure``."""

    def __init__(self, go: threading.Event | None = None, failure: Exception | None = None) -> None:
        self._go = go
        self._failure = failure

    def is_done(self) -> bool:
        return self._go is None or self._go.is_set()

    def wait(self) -> None:
        if self._go is not None:
            assert self._go.wait(60)
        if self._failure is not None:
            raise self._failure


def begin(checkpoints: CheckpointStore[Path], step: int, written: _Written) -> None:
    state = TrainerState(step, 6 * step, 0, {"total_steps": 8}, {}, "", "cpu", "no_shard", 1)

    def shards(folder: Path) -> _Written:
        for number in range(20):
            (folder / f"shard-{number}").write_bytes(b"x" * 1000)
        return written

    checkpoints.begin_save(Mock(), state, shards, lambda folder: None)


def save(checkpoints: CheckpointStore[Path], step: int) -> None:
    begin(checkpoints, step, _Written())
    checkpoints.finish_save()


def test_checkpoint_store_never_runs_two_saves(tmp_path: Path) -> None:
    checkpoints = CheckpointStore(tmp_path, keep=None)
    go = threading.Event()
    begin(checkpoints, 1, _Written(go))
    second = threading.Thread(target=begin, args=(checkpoints, 2, _Written()))
    second.start()
    second.join(0.3)
    assert second.is_alive()  # it waits
    assert [path.name for path in tmp_path.iterdir()] == [".step-000001.partial"]
    go.set()
    second.join(60)
    assert (tmp_path / "step-000001").is_dir()
    checkpoints.finish_save()
    assert [step for step, _ in checkpoints.list_complete()] == [1, 2]


def test_checkpoint_store_raises_failed_write_at_next_step(tmp_path: Path) -> None:
    """The error appears as soon as it is known. The loop checks after every step and does not wait."""
    checkpoints = CheckpointStore(tmp_path, keep=None)
    save(checkpoints, 1)
    go = threading.Event()
    begin(checkpoints, 2, _Written(go, OSError(28, "No space left on device")))
    checkpoints.finish_save_if_written()
    go.set()
    with pytest.raises(RunError, match=r"step-000002: could not be written .*No space.*step-000001"):
        while True:
            checkpoints.finish_save_if_written()
            time.sleep(0.01)
    assert [step for step, _ in checkpoints.list_complete()] == [1]
    save(checkpoints, 3)
    assert [step for step, _ in checkpoints.list_complete()] == [1, 3]


def dies_after(calls: int) -> Callable[[Any], Any]:
    """Return a wrapper of functions that emulates a kill: after this many calls in total, they do nothing."""
    left = iter(range(calls))

    def dying(real: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            if next(left, None) is None:
                raise MemoryError("killed")
            return real(*arguments, **options)

        return call

    return dying


@pytest.mark.parametrize("removed", range(0, 21, 4))
def test_partly_removed_checkpoint_is_not_listed(
    removed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is killed during the removal of an older checkpoint."""
    checkpoints = CheckpointStore(tmp_path, keep=1)
    save(checkpoints, 1)
    dies = dies_after(removed)(os.unlink)
    assert [step for step, _ in checkpoints.list_complete()] == [1]
    with monkeypatch.context() as patch, pytest.raises(RunError):
        patch.setattr(os, "unlink", dies)
        patch.setattr(os, "remove", dies)
        save(checkpoints, 2)
    found = CheckpointStore(tmp_path, keep=1).list_complete()
    assert [step for step, _ in found] == [2]
    assert all(len(list(folder.iterdir())) == 22 for _, folder in found)
    checkpoints.remove_interrupted_saves()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002"]


def test_checkpoint_of_repeated_step_always_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the process is killed at any rename, one of the two checkpoints is complete."""
    for survived in range(4):
        folder = tmp_path / str(survived)
        checkpoints = CheckpointStore(folder)
        save(checkpoints, 1)
        dying = dies_after(survived)
        with monkeypatch.context() as patch, suppress(RunError):
            patch.setattr(Path, "rename", dying(Path.rename))
            patch.setattr(checkpointing, "exchange_paths", dying(exchange_paths))
            patch.setattr(shutil, "rmtree", dying(shutil.rmtree))
            save(checkpoints, 1)
        assert [step for step, _ in CheckpointStore(folder).list_complete()] == [1]
        CheckpointStore(folder).remove_interrupted_saves()
        assert [path.name for path in folder.iterdir()] == ["step-000001"]


def test_folder_that_is_not_a_checkpoint_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "step-000001" / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("kept")
    checkpoints = CheckpointStore(tmp_path)
    checkpoints.remove_interrupted_saves()
    assert (
        "step-000001: has no trainer_state.json, so the folder is not a checkpoint; "
        in capsys.readouterr().err
    )
    save(checkpoints, 1)
    assert (tmp_path / "step-000001.kept" / "mine.txt").read_text() == "kept"
    assert "moved to" in capsys.readouterr().err
    assert [step for step, _ in checkpoints.list_complete()] == [1]


def test_prepare_path_inside_rejects_links(tmp_path: Path) -> None:
    mine, run = tmp_path / "mine", tmp_path / "run"
    mine.mkdir()
    run.mkdir()
    (mine / "file").write_text("mine")
    (run / "profile").mkdir()
    (run / "profile" / "rank0.json.gz").symlink_to(mine / "file")
    prepare_path_inside(run, "profile", "rank0.json.gz").write_text("a trace")
    (run / "memory").symlink_to(mine)
    with pytest.raises(UserError, match=r"memory is a link that leads out of .*; remove the link"):
        prepare_path_inside(run, "memory/rank0.pickle")
    with pytest.raises(UserError, match=r"run/memory is a link that leads out of .*; remove the link"):
        prepare_path_inside(run, "memory", "new", "rank0.pickle")
    assert (mine / "file").read_text() == "mine" and sorted(mine.iterdir()) == [mine / "file"]


def serve_in_thread(writer: shard_writer.WriterProcess) -> None:
    """Serve a writer in this process, because starting another process with torch takes seconds."""
    ours, theirs = Pipe()

    def serve() -> None:
        with suppress(EOFError):
            shard_writer.serve_write_requests(theirs)

    threading.Thread(target=serve, daemon=True).start()
    writer.connection = ours


def save_several(folder: Path, real_process: bool) -> list[str]:
    """Save several states in the same processes, as two runs would; the last save fails."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    whole = torch.arange(24.0).reshape(6, 4)
    mesh = init_device_mesh("cpu", (2,))
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    states: dict[str, dict[str, Any]] = {
        "all": {"model": {"w": sharded, "v": whole * 2}, "optim": {"step": torch.tensor(3.0)}},
        "part": {"model": {"v": whole * 3}, "optim": {"groups": [{"lr": 0.5}]}},
        # A custom optimizer may have state on a single rank.
        "differs": {"model": {"w": sharded}, "optim": {f"only{rank}": torch.full((3,), float(rank))}},
    }
    saver = DcpSaver()
    for name, state in states.items():
        (folder / name).mkdir(exist_ok=True)
        saver.save(state, folder / name, background=name == "all").wait()
    with pytest.MonkeyPatch.context() as patch:  # a large state is written by another process
        patch.setattr(saving, "MIN_PROCESS_BYTES", 0)
        if not real_process:
            patch.setattr(shard_writer.WriterProcess, "start", serve_in_thread)
        for name in ("process", "process again"):
            (folder / name).mkdir(exist_ok=True)
            saver.save(states["all"], folder / name, background=True).wait()
        saver.close()
    errors = []
    try:
        saver.save(states["all"], folder / ("all" if rank == 0 else "missing"), background=False)
    except OSError as error:
        errors.append(str(error))
    gathered: list[Any] = [None, None]
    torch.distributed.all_gather_object(gathered, errors)
    return [text for texts in gathered for text in texts]


@pytest.mark.parametrize("real_process", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_shard_writer_saves_several_states(tmp_path: Path, ranks: RankPool, real_process: bool) -> None:
    errors = ranks.run(2, save_several, tmp_path, real_process)
    assert len(errors) == 2 and all("missing" in error for error in errors) and "rank 1: " in errors[0]
    whole = np.arange(24.0).reshape(6, 4)
    expected: dict[str, dict[str, Any]] = {
        "all": {"model.w": whole, "model.v": whole * 2, "optim.step": 3.0},
        "part": {"model.v": whole * 3},
        "differs": {"model.w": whole, "optim.only0": [0.0] * 3, "optim.only1": [1.0] * 3},
    }
    for name in ("__0_0.distcp", "__1_0.distcp", ".metadata", "shard_checksums.json"):
        for other in ("process", "process again"):
            assert (tmp_path / other / name).read_bytes() == (tmp_path / "all" / name).read_bytes()
    for name, values in expected.items():
        tensors = open_tensors(tmp_path / name)
        assert tensors.keys() == values.keys()
        for key, value in values.items():
            assert np.array_equal(tensors[key].read(), value)
        # Each piece is in `.metadata` once, and torch reads it.
        state = {key: torch.zeros(tensor.shape) for key, tensor in tensors.items()}
        dcp_load(state, checkpoint_id=tmp_path / name, no_dist=True)
        assert all(np.array_equal(state[key], value) for key, value in values.items())
