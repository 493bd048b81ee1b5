"""An export replaces the files of the previous export in one step, and keeps all other files."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from portable.cli import main
from portable.config import RunConfig
from portable.converters.storage.completion_markers import COMPLETE_MARKER, INCOMPLETE_MARKER
from portable.converters.storage.object_store import RemotePath
from portable.converters.writers import conversion
from portable.converters.writers import replace_folder as exchange_module
from portable.converters.writers import store_output as remote_output
from portable.converters.writers.replace_folder import exchange_paths
from portable.errors import UserError
from portable.output.export import EXPORT_MARKER_FILE, export_model, recover_export
from portable.run.finish import LARGE_EXPORT_BYTES, build_export_cost_rows
from portable.run.rank import run_rank
from tests.converters.compare import tree
from tests.object_store import ObjectStore
from tests.portable.test_durability import dies_after
from tests.ranks import RankError, RankPool
from tests.runs import configured, flags, leg, tiny, write_pretrained


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    folder = tmp_path_factory.mktemp("exporting") / "run"
    settings = {"train__steps": 1, "data__eval_fraction": 0, "checkpoint__export": False}
    assert run_rank("cpu", configured(folder, corpus, **settings)) == 0
    return folder / "checkpoints" / "step-000001"


@pytest.mark.parametrize(
    ("call", "part", "code", "message"),
    [
        (
            "fsync",
            ".final.new",
            74,
            "(No space left on device); free some space on the disk; training is complete, and",
        ),
        (
            "fsync",
            "config.yaml",
            1,
            "(No space left on device); free some space and run the same",
        ),
        ("rename", "config.yaml", 1, "(Input/output error); "),
        ("rename", "data_samples.json", 1, "(Input/output error); "),
        ("fsync", "checkpoints", 1, "No space left on device"),
    ],
)
def test_export_reports_disk_error_and_repeated_command_finishes(
    call: str,
    part: str,
    code: int,
    message: str,
    tmp_path: Path,
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = flags(
        tiny(tmp_path / "run", corpus, train__steps=1, data__eval_fraction=0, log__sample_tokens=0)
    )
    real, rename = os.fsync, Path.replace

    def fail_to_sync(file: int) -> None:
        if part in Path(f"/proc/self/fd/{file}").readlink().as_posix().partition("/run/")[2]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(file)

    def fail_to_rename(path: Path, target: Path) -> Path:
        if Path(target).name == part:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(path, target)

    with monkeypatch.context() as patched:
        if call == "fsync":
            patched.setattr(os, "fsync", fail_to_sync)
        else:
            patched.setattr(Path, "replace", fail_to_rename)
        assert main(settings) == code
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and message in error
    assert main(settings) == 0
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()


def test_export_keeps_files_of_user(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    final = tmp_path / "final"
    for _ in range(2):
        export_model(checkpoint, final)  # which replaces its own
    assert [path.name for path in tmp_path.iterdir()] == ["final"] and not capsys.readouterr().err
    (final / "README.md").write_text("mine")
    export_model(checkpoint, final)
    assert (tmp_path / "final.kept" / "README.md").read_text() == "mine"
    assert "README.md was not part of the export" in capsys.readouterr().err
    (final / "config.json").write_text("{}")
    export_model(checkpoint, final)
    assert (tmp_path / "final.kept-2" / "config.json").read_text() == "{}"


def test_export_does_not_follow_link(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "thesis.txt").write_text("mine")
    (tmp_path / "final").symlink_to("elsewhere")
    export_model(checkpoint, tmp_path / "final")
    assert not (tmp_path / "final").is_symlink()
    assert (tmp_path / "final" / "model.safetensors").exists()
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["thesis.txt"]
    assert (tmp_path / "final.kept").readlink().name == "elsewhere"


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("survived", range(8))
def test_killed_export_loses_nothing(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, atomic: bool, survived: int
) -> None:
    """The kill is emulated: after it, nothing is renamed or deleted."""
    final = tmp_path / "final"
    export_model(checkpoint, final)
    (final / "README.md").write_text("mine")
    dying, rmtree = dies_after(survived), shutil.rmtree

    def removed(path: Path, **_: object) -> None:
        if os.path.lexists(path):
            dying(rmtree)(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", dying(Path.rename))
        patch.setattr(shutil, "rmtree", removed)
        patch.setattr(exchange_module, "exchange_paths", dying(lambda *two: atomic and exchange_paths(*two)))
        try:
            export_model(checkpoint, final)
        except MemoryError:
            assert not atomic or (final / "model.safetensors").exists()
    recover_export(final)
    assert (final / "model.safetensors").exists()
    assert [path.read_text() for path in tmp_path.glob("final*/README.md")] == ["mine"]
    export_model(checkpoint, final)
    left_over = {path.name for path in tmp_path.iterdir()} - {"final", "final.kept"}
    # Only temporary files of the converter may remain, because this process still holds their lock.
    assert all(name.startswith("..final.new.tmp-") for name in left_over)


# -- in an object store --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["PUT", "DELETE"])
def test_killed_export_to_object_store_loses_and_leaves_nothing(
    checkpoint: Path,
    s3: ObjectStore,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    method: str,
) -> None:
    """The kill happens before or during the replacement. It is emulated: no cleanup code runs."""
    export_model(checkpoint, RemotePath.from_url(s3.url("run/final")))
    whole = s3.tree("run/final")
    s3.put("run/final/model-00002-of-00002.safetensors", b"mine")
    if method != "DELETE":
        s3.fail(status=403, method="PUT", key="final/tokenizer")
    else:  # deletes the marker, after the deletion of the moved files
        s3.fail(status=403, method="POST", query="delete", every=2, times=1)
    with monkeypatch.context() as patch, pytest.raises(UserError):
        patch.setattr(remote_output.StoreOutput, "abort_uploads", lambda _: None)
        export_model(checkpoint, RemotePath.from_url(s3.url("run/final")))
    s3.heal()
    assert INCOMPLETE_MARKER in s3.names("run/final/")
    assert list(s3.tree("run/final.kept").values()) == [b"mine"]
    s3.put("run/final/README.md", b"mine")  # a user adds a file to the remains
    capsys.readouterr()
    export_model(checkpoint, RemotePath.from_url(s3.url("run/final")))
    assert s3.tree("run/final.kept-2") == {"README.md": b"mine"}
    assert "README.md was not part of the export; the changed content is now in" in capsys.readouterr().err
    assert {**s3.tree("run/final"), COMPLETE_MARKER: b""} == {**whole, COMPLETE_MARKER: b""}


# -- by several nodes ----------------------------------------------------------------------------------------


def train_as_node(
    config: RunConfig,
    folder: Path,
    per_node: int = 1,
    dies: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Train as a rank of a node, and record which files of the export this rank writes.

    Args:
        config: The run.
        folder: Folder for the records.
        per_node: Ranks per node.
        dies: Rank that is killed while it writes.
        environment: Environment variables of the run.
    """
    rank = int(os.environ["RANK"])
    write_files = conversion._write_tensor_files

    def record(*arguments: Any) -> None:
        (folder / f"rank{rank}.json").write_text(json.dumps([file.name for file in arguments[3]]))
        if rank == dies:
            os.kill(os.getpid(), signal.SIGKILL)
        write_files(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversion, "_write_tensor_files", record)
        for name, value in {"LOCAL_RANK": str(rank % per_node), **(environment or {})}.items():
            patch.setenv(name, value)
        assert run_rank(config.backend, config) == 0


@pytest.fixture(scope="module")
def base_in_shards(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """Write a base model of several files, whose export has the same files."""
    folder = write_pretrained(tmp_path_factory.mktemp("base"), corpus)
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="50KB")
    assert len(list(folder.glob("*.safetensors"))) > 4
    return folder


def read_export(run: Path) -> dict[str, bytes]:
    return {name: data for name, data in tree(run / "final").items() if name != EXPORT_MARKER_FILE}


@pytest.mark.parametrize(
    ("strategy", "size", "per_node"), [("no_shard", 4, 1), ("full_shard", 4, 2), ("zero3", 2, 1)], ids=str
)
def test_export_of_nodes_equals_export_of_one_rank(
    strategy: str,
    size: int,
    per_node: int,
    base_in_shards: Path,
    tmp_path: Path,
    corpus: Path,
    ranks: RankPool,
) -> None:
    config = configured(tmp_path / "run", corpus, **of_base(base_in_shards, strategy=strategy))
    ranks.run(size, train_as_node, config, tmp_path, per_node)
    files = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("rank*.json"))]
    together = read_export(tmp_path / "run")
    assert len(files) == size // per_node and all(files)
    assert (
        sorted(chain.from_iterable(files))
        == [name for name in sorted(together) if "safetensors" in name][:-1]
    )
    shutil.rmtree(tmp_path / "run" / "final")
    ranks.run(size, leg, tmp_path / "run", corpus, of_base(base_in_shards, strategy=strategy))
    assert read_export(tmp_path / "run") == together


def of_base(base: Path, **more: Any) -> dict[str, Any]:
    return {
        "model__config": None,
        "model__name_or_path": str(base),
        "train__steps": 1,
        "train__global_batch_size": 4,
        "data__eval_fraction": 0,
        "log__sample_tokens": 0,
        **more,
    }


def test_export_of_nodes_to_object_store_equals_export_on_disk(
    base_in_shards: Path, tmp_path: Path, corpus: Path, s3: ObjectStore, ranks: RankPool
) -> None:
    settings = of_base(base_in_shards, strategy="full_shard")
    ranks.run(2, leg, tmp_path / "run", corpus, settings)
    config = configured(s3.url("run"), corpus, **settings)
    ranks.run(2, train_as_node, config, tmp_path, 1, None, s3.environment)
    assert all(json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    there = s3.tree("run/final")
    assert COMPLETE_MARKER in there and not s3.open_uploads()
    on_disk = read_export(tmp_path / "run")
    del there[COMPLETE_MARKER], there["README.md"], on_disk["README.md"]  # the cards name the places
    assert there == on_disk


@pytest.mark.parametrize("dies", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_export_of_killed_node_leaves_no_model(
    dies: int, base_in_shards: Path, tmp_path: Path, corpus: Path, ranks: RankPool
) -> None:
    settings = of_base(base_in_shards, strategy="full_shard")
    config = configured(tmp_path / "run", corpus, **settings)
    with pytest.raises(RankError):
        ranks.run(2, train_as_node, config, tmp_path, 1, dies)
    assert not (tmp_path / "run" / "final").exists()
    ranks.run(2, train_as_node, config, tmp_path)
    final = {path.name: load_file(path) for path in (tmp_path / "run" / "final").glob("*.safetensors")}
    assert final.keys() == {path.name for path in base_in_shards.glob("*.safetensors")} and all(
        final.values()
    )
    assert not list((tmp_path / "run").glob(".*final*"))


def test_export_cost_of_large_model_is_shown(tmp_path: Path, corpus: Path) -> None:
    config = configured(tmp_path / "run", corpus)
    assert build_export_cost_rows(config, int(LARGE_EXPORT_BYTES) - 1, 8, 8) == []
    assert build_export_cost_rows(config.replaced({"checkpoint.export": False}), 10**12, 8, 8) == []
    (alone,) = build_export_cost_rows(config, 36 * 10**11, 8, 8)
    assert "1 node writes " in alone[1] and "1:00:00 at 1 GB/s per node (8.0 idle device hours)" in alone[1]
    (shared,) = build_export_cost_rows(config, 36 * 10**11, 64, 8)
    assert "8 nodes write " in shared[1] and "7:30 at 1 GB/s per node (8.0 idle" in shared[1]
