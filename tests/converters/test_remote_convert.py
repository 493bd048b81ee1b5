"""`portable-convert` from and to an object store, with a real S3 server, a real client and real failures."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch

from portable.converters import open_checkpoint, write_safetensors
from portable.converters.cli import main
from portable.converters.storage import object_store as remote
from portable.converters.storage.completion_markers import COMPLETE_MARKER, INCOMPLETE_MARKER
from portable.converters.writers.store_output import FileUpload
from tests.converters.compare import error_of, tree
from tests.converters.samples import folder_of, parameters
from tests.object_store import SECRET_KEY, ObjectStore, scale_down
from tests.ranks import wait_for

# One per layout: several rank files, items within files, flat shards, an index, one zip.
NAMES = [
    "dcp",
    "deepspeed-zero2-bf16-2",
    "xla-flat3",
    "torch-sharded",
    "safetensors-shards",
    "torch-one-file",
]
NAMES += ["megatron-core", "orbax-maxtext", "orbax-zarr"]
# Reading does not depend on the target: each source is read once, and DCP is written twice.
CONVERSIONS = [
    *parameters([name for name in NAMES if name not in ("dcp", "torch-one-file")], "safetensors"),
    *parameters(["dcp", "torch-one-file"], "dcp"),
]
MB = 1_000_000
# Sizes of shards of `large`: all tensors in two shards, or one shard per large tensor. For the sizes, see
# `scale_down`.
TWO, THREE = "1600KB", "940KB"


@pytest.fixture(autouse=True)
def in_small(monkeypatch: pytest.MonkeyPatch) -> None:
    scale_down(monkeypatch)


def convert(*argv: object) -> int:
    return main(["--quiet", *map(str, argv)])


def refused(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    said = error_of(capsys, *argv)
    assert SECRET_KEY not in said
    return said


def published(s3: ObjectStore, name: str) -> dict[str, bytes]:
    """Return the objects of a completed conversion, without its marker."""
    found = s3.tree(name)
    assert COMPLETE_MARKER in found and INCOMPLETE_MARKER not in found and s3.open_uploads() == []
    del found[COMPLETE_MARKER]
    return found


@pytest.fixture
def large(s3: ObjectStore, tmp_path: Path) -> Path:
    """Write two safetensors shards of 1 MB, also into the bucket as `src`.

    The shards have three large and many small tensors.
    """
    random = np.random.default_rng(0)
    state = {f"layer.{i}.weight": random.standard_normal((250, 750), np.float32) for i in range(3)}
    state |= {f"norm.{i}": random.standard_normal(32, np.float32) for i in range(200)}
    folder = tmp_path / "large"
    folder.mkdir()
    safetensors.numpy.save_file(state, folder / "all.safetensors")
    write_safetensors(
        open_checkpoint(folder), tmp_path / "src", max_shard_size=int(TWO[:-2]) * 1000, progress=False
    )
    s3.put_tree(tmp_path / "src", "src")
    s3.forget()
    return tmp_path / "src"


@pytest.mark.parametrize(("name", "to"), CONVERSIONS)
def test_remote_convert_of_every_format_equals_local(
    name: str, to: str, request: pytest.FixtureRequest, s3: ObjectStore, tmp_path: Path
) -> None:
    source = folder_of(name, request, tmp_path / "sample")
    s3.put_tree(source, "src")
    options = ["--to", to, "--max-shard-size", "20KB"]
    options += ["--optimizer"] if open_checkpoint(source).optimizer is not None else []
    assert convert(source, tmp_path / "local", *options) == 0
    assert convert(s3.url("src"), s3.url("out"), "--verify", *options) == 0
    assert published(s3, "out") == tree(tmp_path / "local")
    if to == "dcp":  # our DCP checkpoint is read again
        assert convert(s3.url("out"), tmp_path / "back") == 0
        assert convert(tmp_path / "local", tmp_path / "back-local") == 0
        assert tree(tmp_path / "back") == tree(tmp_path / "back-local")


def test_remote_convert_selects_newest_complete_step(
    written: Path, s3: ObjectStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2, 3):
        s3.put_tree(written / "fsdp3-ours", f"run/checkpoints/step-00000{step}")
        s3.put(f"run/checkpoints/step-00000{step}/trainer_state.json", f'{{"step": {step}}}'.encode())
    s3.put("run/final/config.json", b'{"model_type": "odd"}')
    s3.put("run/checkpoints/step-000003/_INCOMPLETE", b"{}")
    assert open_checkpoint(s3.url("run")).metadata["step"] == 2
    assert open_checkpoint(s3.url("run"), "1").metadata["step"] == 1
    for source in ("run/checkpoints/step-000003", "run/checkpoints/step-000003/.metadata"):
        assert "_INCOMPLETE, but no completion marker" in refused(capsys, s3.url(source), tmp_path / "out")
    assert "_INCOMPLETE" in refused(capsys, s3.url("run"), tmp_path / "out", "--tag", "3")
    s3.put("run/checkpoints/step-000003/_COMPLETE", b"{}")
    assert open_checkpoint(s3.url("run")).metadata["step"] == 3


def test_remote_open_fetches_only_headers(
    large: Path, s3: ObjectStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([s3.url("src"), s3.url("out"), "--dry-run"]) == 0
    assert "peak buffer" in capsys.readouterr().out
    files = len(list(large.iterdir()))
    assert s3.bytes_out(".safetensors") < 300_000
    assert s3.count() < 20 + 4 * files and s3.count("PUT") == 0


RANKS = 128
LATENCY, LONGEST_OPENING = 0.05, 10
"""Seconds until a distant store responds, and maximum seconds to open a checkpoint."""


def write_zero3(folder: Path) -> None:
    """Write the rank files of a ZeRO-3 checkpoint with many ranks."""
    shapes = {f"layers.{i}.weight": torch.Size([RANKS, 1024]) for i in range(4)}
    flat = torch.ones(4 * 1024)  # Larger than one request, so that a file takes several requests.
    about = {"ds_config": {"zero_optimization": {"stage": 3}}, "ds_version": "0.16.0"}
    optimizer = {
        "zero_stage": 3,
        "partition_count": RANKS,
        "optimizer_state_dict": {
            "state": {0: {"step": torch.tensor(1.0), "exp_avg": flat.clone()}},
            "param_groups": [{"lr": 1e-4, "params": [0]}],
        },
        "fp32_flat_groups": [flat],
    }
    model = {
        "module": {name: torch.empty(0, dtype=torch.bfloat16) for name in shapes},
        "buffer_names": [],
        "param_shapes": [shapes],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {},
        "global_steps": 1,
        "dp_world_size": RANKS,
        "mp_world_size": 1,
        **about,
    }
    for rank in range(RANKS):
        name = f"zero_pp_rank_{rank}_mp_rank_00"
        torch.save({"optimizer_state_dict": optimizer, **about}, folder / f"bf16_{name}_optim_states.pt")
        torch.save(model, folder / f"{name}_model_states.pt")


def write_shards(folder: Path) -> None:
    """Write a safetensors checkpoint with many shards."""
    names = {f"layers.{i}.weight": f"model-{i + 1:05}-of-{RANKS:05}.safetensors" for i in range(RANKS)}
    for name, file in names.items():
        safetensors.numpy.save_file({name: np.ones(8, np.float32)}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


@pytest.mark.parametrize(("write", "limit"), [(write_zero3, 8 * RANKS + 20), (write_shards, RANKS + 20)])
def test_remote_open_reads_headers_in_parallel(
    write: Callable[[Path], None], limit: int, s3: ObjectStore, tmp_path: Path
) -> None:
    folder = tmp_path / "step"
    folder.mkdir()
    write(folder)
    s3.put_tree(folder, "src")
    s3.forget()
    s3.fail(delay=0.02)  # Shorter than `LATENCY`, because the number of rounds does not depend on it.
    checkpoint = open_checkpoint(s3.url("src"))
    assert s3.rounds * LATENCY < LONGEST_OPENING
    assert RANKS // 2 < s3.count() < limit and checkpoint.tensors
    assert 8 <= s3.most_at_once <= 16
    assert s3.count_alone < 20  # Listings and the first file, but not one request for each file.
    s3.forget()
    if checkpoint.optimizer is not None:
        assert s3.count_alone < 5


def test_remote_convert_transfers_each_byte_once(large: Path, s3: ObjectStore) -> None:
    total = sum(path.stat().st_size for path in large.glob("*.safetensors"))
    assert convert(s3.url("src"), s3.url("out"), "--max-shard-size", THREE) == 0
    assert total <= s3.bytes_out(".safetensors") < 1.02 * total
    assert total <= s3.bytes_in("out/") < 1.02 * total
    # A few requests for each 8 MiB, not one for each tensor.
    assert s3.count("GET", ".safetensors") < 40
    assert s3.count("PUT", "out/") < total / remote.PART_BYTES + 20


@pytest.mark.parametrize(
    "faults",
    [
        [{"status": 503, "every": 5}, {"cut": True, "method": "GET", "every": 4}, {"drop": True, "every": 7}],
        [
            {"status": 500, "method": "PUT", "every": 2},
            {"after": True, "drop": True, "method": "POST", "every": 3},
        ],
    ],
    ids=["reads", "writes"],
)
def test_remote_convert_survives_failures(
    large: Path, s3: ObjectStore, faults: list[dict[str, bool | int | str]]
) -> None:
    for fault in faults:
        s3.fail(**fault)
    assert convert(s3.url("src"), s3.url("out"), "--verify", "--max-shard-size", TWO) == 0
    assert sum(fault.done for fault in s3.faults) >= 3
    s3.heal()
    assert published(s3, "out") == tree(large)


def test_remote_convert_ends_if_store_is_unavailable(
    large: Path, s3: ObjectStore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PORTABLE_STORAGE_MINUTES", "0.01")
    fault = s3.fail(status=503, method="GET", key=".safetensors", times=1 << 30)
    fault.seen, fault.every = 0, 1
    started = time.monotonic()
    said = refused(capsys, s3.url("src"), s3.url("out"))
    assert re.search(r"cannot read, because \d+ attempts? failed", said) and ".safetensors" in said
    s3.heal()
    s3.fail(status=503, method="PUT", key="out/")
    assert re.search(
        r"cannot (upload|write), because \d+ attempts? failed", refused(capsys, s3.url("src"), s3.url("out"))
    )
    assert time.monotonic() - started < 60
    s3.heal()
    assert s3.names("out") == [] and s3.open_uploads() == []
    assert convert(s3.url("src"), s3.url("out")) == 0


def test_remote_convert_errors_name_cause(
    large: Path, s3: ObjectStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert "no such bucket" in refused(capsys, "s3://nowhere-at-all/x", out)
    assert "no such bucket" in refused(capsys, s3.url("src"), "s3://nowhere-at-all/x")
    assert "no such file or folder" in refused(capsys, s3.url("nothing"), out)
    assert "no checkpoint of a known format" in refused(capsys, s3.url(), out)
    assert "is the checkpoint itself" in refused(capsys, s3.url("src"), s3.url("src"))
    assert "is inside" in refused(capsys, s3.url("src"), s3.url("src/out"))
    assert "contains" in refused(capsys, s3.url("src"), s3.url())
    s3.fail(status=403, method="POST")
    assert "access denied" in refused(capsys, s3.url("src"), s3.url("out"))
    s3.heal()
    assert not out.exists() and s3.names("out") == []


def test_remote_convert_needs_access_only_to_checkpoint(s3: ObjectStore, large: Path, tmp_path: Path) -> None:
    """Companions are searched for in the parent folders, which a policy often hides."""
    s3.put_tree(large, "hidden/src")
    s3.fail(status=403, method="GET", query="prefix=hidden%2F&")
    s3.fail(status=403, method="GET", query="prefix=hidden/&")
    s3.fail(status=403, method="GET", query="prefix=&")
    assert convert(s3.url("hidden/src"), tmp_path / "out", "--max-shard-size", TWO) == 0
    assert tree(tmp_path / "out") == tree(large)


def test_remote_convert_overwrite_replaces_only_model_files(
    large: Path, s3: ObjectStore, capsys: pytest.CaptureFixture[str]
) -> None:
    s3.put("out/model-00001-of-00009.safetensors", b"old")
    s3.put("out/tokenizer.json", b"old")
    s3.put("out-2/stays", b"")
    before = s3.tree("out")
    s3.fail(status=403, method="POST", query="delete", times=1)  # of a _COMPLETE, which follows _INCOMPLETE
    assert convert(s3.url("src"), s3.url("new")) == 2 and s3.names("new/") == []
    assert "already exists" in refused(capsys, s3.url("src"), s3.url("out"))
    s3.fail(status=403, method="GET", key="src/model-00002")
    assert convert(s3.url("src"), s3.url("out"), "--overwrite") == 2
    s3.heal()
    assert s3.tree("out") == before  # a conversion that fails leaves the old files
    s3.fail(status=403, method="POST", query="delete", every=2, times=1)  # of the replaced files
    assert convert(s3.url("src"), s3.url("out"), "--overwrite") == 2
    assert {INCOMPLETE_MARKER, *before} == {*s3.names("out/")}, (
        "where not all could be deleted, nothing looks whole"
    )
    for _ in range(2):
        assert convert(s3.url("src"), s3.url("out"), "--overwrite", "--max-shard-size", TWO) == 0
        assert published(s3, "out") == tree(large)
    assert s3.names("out-2/") == ["stays"]
    s3.put("out/thesis.tex", b"dear")
    capsys.readouterr()
    assert "contains files that no conversion has written (thesis.tex)" in refused(
        capsys, s3.url("src"), s3.url("out"), "--overwrite"
    )
    assert s3.get("out/thesis.tex") == b"dear"


def convert_alone(log: Path, environment: dict[str, str], argv: list[str]) -> None:
    """Run the command in a separate process, with its output in ``log``."""
    os.environ.update(environment)
    scale_down(pytest.MonkeyPatch())
    with log.open("wb") as file:
        os.dup2(file.fileno(), 2)
    sys.exit(main(argv))


def start(s3: ObjectStore, folder: Path, *options: str) -> Any:
    """Begin a conversion in a fork of a process that has imported most of the modules."""
    argv = [s3.url("src"), s3.url("out"), *options]
    process = multiprocessing.get_context("forkserver").Process(
        target=convert_alone, args=(folder / "log", s3.environment, argv)
    )
    process.start()
    return process


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGTERM])
def test_killed_remote_convert_leaves_no_complete_folder(
    large: Path, s3: ObjectStore, tmp_path: Path, kill: signal.Signals
) -> None:
    s3.fail(delay=30, method="PUT", key=INCOMPLETE_MARKER)  # which follows the last part
    running = start(s3, tmp_path, "--quiet")
    wait_for(lambda: s3.count("PUT", "out/") >= 2)
    os.kill(running.pid, kill)
    running.join(60)
    assert running.exitcode and SECRET_KEY not in (tmp_path / "log").read_text()
    s3.heal()
    assert s3.names("out/") == []
    assert bool(s3.open_uploads()) == (kill == signal.SIGKILL)
    assert convert(s3.url("src"), s3.url("out"), "--max-shard-size", TWO) == 0
    assert published(s3, "out") == tree(large)


def test_killed_remote_convert_can_be_repeated_with_overwrite(
    large: Path, s3: ObjectStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    s3.fail(delay=30, method="PUT", key="index.json")
    running = start(s3, tmp_path, "--max-shard-size", TWO)
    wait_for(lambda: len(s3.names("out/model-")) == 2)
    time.sleep(0.3)
    running.kill()
    running.join()
    s3.heal()
    assert INCOMPLETE_MARKER in s3.names("out/") and COMPLETE_MARKER not in s3.names("out/")
    assert "_INCOMPLETE" in refused(capsys, s3.url("out"), tmp_path / "copy")
    assert "an unfinished conversion" in refused(capsys, s3.url("src"), s3.url("out"))
    assert convert(s3.url("src"), s3.url("out"), "--max-shard-size", TWO, "--overwrite") == 0
    assert published(s3, "out") == tree(large)


def test_remote_convert_keeps_companions_of_output(s3: ObjectStore) -> None:
    """The folder `model` next to SRC is searched for SRC's tokenizer, and may be an earlier OUT."""
    s3.put("run/step/model.safetensors", safetensors.numpy.save({"a": np.arange(4.0)}))
    s3.put("run/model/tokenizer.json", b"{}")
    s3.put("run/model/model-00001-of-00002.safetensors", b"")
    assert convert(s3.url("run/step"), s3.url("run/model"), "--overwrite") == 0
    assert published(s3, "run/model").keys() == {"model.safetensors", "tokenizer.json"}
    assert s3.get("run/model/tokenizer.json") == b"{}"


def test_remote_convert_verify_reads_store(
    large: Path, s3: ObjectStore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = FileUpload.write

    def damaging(upload: FileUpload, data: bytes) -> None:
        real(upload, bytes(data)[:-1] + b"?" if data and upload._written > 100_000 else data)

    monkeypatch.setattr(FileUpload, "write", damaging)
    said = refused(capsys, s3.url("src"), s3.url("out"), "--verify")
    assert "differs from the source" in said and s3.names("out/") == []


def test_remote_convert_prints_no_secrets(
    s3: ObjectStore, large: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "converters")
    s3.fail(status=503, every=3)
    for source, end in ((s3.url("src"), 0), (s3.url("missing"), 2), ("s3://nowhere-at-all/x", 2)):
        assert main([source, s3.url("out"), "--overwrite"]) == end
    assert SECRET_KEY not in "".join(capfd.readouterr()) + caplog.text
    assert "portable.converters.storage.object_store" in caplog.text
