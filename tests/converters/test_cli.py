"""`portable-convert` from the user's point of view."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch

from benchmarks.convert import sparse_checkpoint
from portable.converters.cli import main
from portable.converters.console import print_line
from portable.converters.errors import CheckpointError
from portable.converters.opening import open_checkpoint
from portable.converters.storage.path_or_url import expand_user_and_variables, parse_path_or_url
from portable.terminal import TerminalHandler, shows_progress_bars
from tests.converters.compare import bits, error_of, load, tree


@pytest.fixture
def run(written: Path, tmp_path: Path) -> Path:
    """Write a run folder of this project's trainer: a step of 3 ranks, config and tokenizer in `model/`."""
    folder = tmp_path / "run"
    step = folder / "checkpoints" / "step-000002"
    shutil.copytree(written / "fsdp3-ours", step)
    (step / "trainer_state.json").write_text('{"step": 2}')
    (step / "model").mkdir()
    (step / "model" / "config.json").write_text('{"model_type": "odd", "tie_word_embeddings": true}')
    (step / "model" / "tokenizer.json").write_text("{}")
    (folder / "generation_config.json").write_text("{}")
    (folder / "config.yaml").write_text("a: 1")
    return folder


def test_convert_writes_model_and_optimizer_of_run(
    run: Path, written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(run)
    out = tmp_path / "a" / "b" / "out"
    assert main([str(run), str(out), "--optimizer", "--verify"]) == 0
    assert "compared with the source" in capsys.readouterr().out
    assert tree(run) == before
    companions = {"config.json", "generation_config.json", "tokenizer.json"}
    assert tree(out).keys() == companions | {"model.safetensors", "optimizer.json", "optimizer.safetensors"}
    reference = load(written / "fsdp3-ours.ref.pt")
    stored = safetensors.torch.load_file(out / "model.safetensors")
    assert set(stored) == set(reference["model"]) - {"lm_head.weight"}
    assert all(bits(value) == bits(reference["model"][name]) for name, value in stored.items())
    moments = safetensors.torch.load_file(out / "optimizer.safetensors")
    for name, state in reference["optim"].items():
        for what, value in state.items():
            assert bits(moments[f"{name}.{what}"]) == bits(value)
    groups = json.loads((out / "optimizer.json").read_text())["param_groups"]
    assert groups[0]["lr"] == 0.01
    assert set(groups[0]["params"]) == set(reference["optim"])


def test_convert_dry_run_writes_nothing(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(tmp_path)
    assert (
        main([str(run), str(tmp_path / "out"), "--dry-run", "--dtype", "bfloat16", "--max-shard-size", "200"])
        == 0
    )
    said = capsys.readouterr().out
    for what in ("step 2", "lm_head.weight", "F32 -> BF16", "model-00001-of-", "peak buffer", "config.json"):
        assert what in said
    assert tree(tmp_path) == before


def test_convert_works_without_stderr(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", None)  # closed at start-up
    assert main([str(tmp_path / "missing"), str(tmp_path / "out"), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]
    assert main([str(run), str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["written"]
    TerminalHandler().emit(logging.makeLogRecord({"msg": "a status line"}))
    assert not shows_progress_bars()
    assert capsys.readouterr().out == ""


def test_print_line_escapes_characters_outside_of_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    for encoding, expected in (("latin-1", b"a \\u2192 b\n"), ("utf-8", "a → b\n".encode())):
        stream = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(stream, encoding))
        print_line("a → b")
        assert stream.getvalue() == expected


@pytest.mark.parametrize("size", ["9" * 400, "9" * 300 + "TB", "0", "5XB"], ids=len)
def test_convert_rejects_shard_size(size: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = error_of(capsys, tmp_path, tmp_path / "out", "--max-shard-size", size)
    assert "is not a size such as 5GB, 500MB or 2GiB" in error


def test_convert_errors_are_one_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = run / "checkpoints" / "step-000002"
    out = tmp_path / "out"
    os.mkfifo(tmp_path / "pipe")
    before = tree(tmp_path)

    def refuse(*argv: object) -> str:
        return error_of(capsys, *argv, code=2)

    assert "neither a file nor a folder" in refuse(tmp_path / "pipe", out)
    assert "no such file" in refuse(tmp_path / "missing", out)
    assert "known format" in error_of(capsys, step / "model", out, code=65)
    assert "inside" in refuse(run, run / "final")
    assert "contains" in refuse(step, run, "--overwrite")
    assert "--overwrite" in refuse(step, run / "config.yaml")
    assert "not a folder" in refuse(step, run / "config.yaml", "--overwrite")
    assert "step-000002" in refuse(run, out, "--tag", "9")
    assert "dcp" in refuse(step, out, "--to", "pickle")
    assert "--dtype" in refuse(step, out, "--dtype", "int8")
    assert "cannot be created" in refuse(step, "/proc/nope/out")
    assert tree(tmp_path) == before


LONG = "x" * 300


def test_open_checkpoint_converts_os_errors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="choose a shorter name"):
        open_checkpoint(tmp_path / LONG)


@pytest.mark.parametrize(
    "arguments",
    [
        [LONG, "out"],
        ["run", LONG],
        *[["run", "out", option, LONG] for option in ("--config-from", "--merge-into")],
    ],
    ids=["source", "output", "config", "base"],
)
def test_path_that_is_too_long_is_one_line(
    arguments: list[str], run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = {"run": str(run), "out": str(tmp_path / "out"), LONG: str(tmp_path / LONG)}
    line = error_of(capsys, *[paths.get(argument, argument) for argument in arguments])
    assert LONG in line and line.endswith("; choose a shorter name")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda shard: os.truncate(shard, shard.stat().st_size - 200),
    "missing": lambda shard: shard.unlink(),
    "empty": lambda shard: shard.write_bytes(b""),
    "another file": lambda shard: shard.write_text("not a shard"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_convert_exit_codes_distinguish_damage_from_mistakes(
    damage: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(run / "checkpoints" / "step-000002", damaged)
    shard = min(damaged.glob("*.distcp"))
    DAMAGES[damage](shard)
    capsys.readouterr()
    for command, code in (
        ([damaged, tmp_path / "out"], 65),
        (["inspect", damaged, "--stats"], 65),
        (["diff", damaged, run], 65),
        ([tmp_path / "damged", tmp_path / "out"], 2),
        (["inspect", tmp_path / "damged"], 2),
        ([damaged, tmp_path / "out", "--too", "dcp"], 2),
    ):
        assert main([*map(str, command), "--json"]) == code
        printed = capsys.readouterr()
        report = json.loads(printed.out)
        assert report == {"error": printed.err.removeprefix("error: ").strip(), "exit_code": code}
        assert code == 2 or shard.name in report["error"]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", ["{", "[" * 100_000, "\0"])
def test_convert_damaged_config_error_suggests_remedy(
    content: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step, intact = run / "checkpoints" / "step-000002", tmp_path / "intact"
    shutil.copytree(step / "model", intact)
    (step / "model" / "config.json").write_text(content)
    error = error_of(capsys, step, tmp_path / "out", code=65)
    assert "config.json: is not valid JSON; restore the file, or remove the file and add" in error
    (step / "model" / "config.json").unlink()
    assert main([str(step), str(tmp_path / "out"), "--config-from", str(intact), "--quiet"]) == 0


def test_convert_checks_free_disk_space_first(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    told = error_of(capsys, run, tmp_path / "out", "--dtype", "bfloat16")
    assert "bytes, but only 10 bytes are free on the disk" in told and not (tmp_path / "out").exists()


def test_convert_json_describes_conversion(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for out, more in (("dry", ["--dry-run"]), ("out", ["--verify"])):
        assert main([str(run), str(tmp_path / out), "--json", *more]) == 0
        document = json.loads(capsys.readouterr().out)
        about = {key: document[key] for key in ("format", "step", "tag", "world_size", "to", "written")}
        assert about == {
            "format": "dcp",
            "step": 2,
            "tag": "step-000002",
            "world_size": 3,
            "to": "safetensors",
            "written": out == "out",
        }
        assert document["verified"] == document["written"]
    assert set(document["files"]) == {path.name for path in (tmp_path / "out").iterdir()}
    stored = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert {name: tensor["shape"] for name, tensor in document["tensors"].items()} == {
        name: list(value.shape) for name, value in stored.items()
    }


def test_convert_rejects_ambiguous_steps(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = run / "checkpoints"
    shutil.copytree(steps / "step-000002", steps / "step-000001")
    (run / "epoch-9").mkdir()  # no checkpoint
    assert main([str(run), str(tmp_path / "out"), "--quiet"]) == 0
    shutil.copytree(steps / "step-000002", run / "checkpoint-500")
    said = error_of(capsys, run, tmp_path / "two")
    assert "steps with 2 kinds of names, such as checkpoint-500 and step-000002; choose a step" in said
    assert main([str(run), str(tmp_path / "two"), "--tag", "step-000001", "--quiet"]) == 0


def test_convert_overwrite_replaces_only_model_files(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    mine = ["model-00001-of-00002.safetensors", "merges.txt", "global_step2_universal/zero/a/fp32.pt"]
    for name in mine:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("old")
    assert "exists" in error_of(capsys, run, out)
    for other in (".git/HEAD", "runs/a/step-1/model.safetensors", "thesis.tex"):
        (out / other).parent.mkdir(parents=True, exist_ok=True)
        (out / other).write_text("dear")
        before = tree(out)
        found = other.partition("/")
        assert f"contains files that no conversion has written ({found[0]}{found[1]})" in error_of(
            capsys, run, out, "--overwrite"
        )
        assert tree(out) == before
        shutil.rmtree(out / found[0]) if found[1] else (out / other).unlink()
    assert main([str(run), str(out), "--overwrite", "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    assert not set(mine) & set(tree(out))
    assert "model.safetensors" in tree(out)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out", "run"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_failed_convert_leaves_folder_unchanged(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    overwrite: bool,
) -> None:
    out = tmp_path / "new" / "out"
    if overwrite:
        out.mkdir(parents=True)
        (out / "model.safetensors").write_text("old")
    before = sorted(tmp_path.rglob("*"))
    written = [0]
    real = os.pwrite

    def write(fd: int, data: Any, at: int) -> int:
        written[0] += len(data)
        if written[0] > 3000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, at)

    monkeypatch.setattr(os, "pwrite", write)
    assert "No space left" in error_of(capsys, run, out, "--optimizer", *["--overwrite"] * overwrite)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_convert_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    sparse_checkpoint(tmp_path / "in", 250)
    argv = [str(tmp_path / "in"), str(tmp_path / "out"), "--dtype", "bfloat16"]
    child = subprocess.Popen([sys.executable, "-m", "portable.converters.cli", *argv], stderr=subprocess.PIPE)
    try:
        while not any(path.stat().st_size > 1 << 20 for path in tmp_path.glob(".out.tmp-*/*.safetensors")):
            assert child.poll() is None
            time.sleep(0.005)
        child.send_signal(number)
        said = child.communicate(timeout=30)[1]
    finally:
        child.kill()
    assert child.returncode == 128 + number
    assert b"Traceback" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_convert_memory_does_not_grow_with_model(tmp_path: Path) -> None:
    """Measure the additional peak memory of a conversion of 160 MB, with a cast and verification."""
    (tmp_path / "in").mkdir()
    weights = {f"w{i}": torch.zeros(10_000_000) for i in range(4)}
    safetensors.torch.save_file(weights, tmp_path / "in" / "model.safetensors")
    code = (
        "import resource, sys; from portable.converters.cli import main;"
        "base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        "assert main(sys.argv[1:]) == 0;"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base)"
    )
    argv = [str(tmp_path / "in"), str(tmp_path / "out"), "--dtype", "bfloat16", "--verify", "--quiet"]
    said = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, check=True)
    assert int(said.stdout) < 24 * 1024  # KiB


# -- places: `~`, `${VAR}`, URLs -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("~/runs/x", "/home/her/runs/x"),
        ("${SCRATCH}/runs", "/scratch/x/runs"),
        ("a/$SCRATCH", "a//scratch/x"),
        ("s3://b${SCRATCH}/c//d", "s3://b/scratch/x/c//d"),
        ("org/model-1.0", "org/model-1.0"),
        ("${NOT_SET}/x", None),
        ("~nobody-of-that-name/x", None),
    ],
)
def test_convert_paths_expand_home_and_variables(
    written: str, meant: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/her")
    monkeypatch.setenv("SCRATCH", "/scratch/x")
    monkeypatch.delenv("NOT_SET", raising=False)
    if meant is None:
        with pytest.raises(CheckpointError, match=r"NOT_SET is not set|home folder of ~nobody"):
            parse_path_or_url(written)
    else:
        assert expand_user_and_variables(written) == expand_user_and_variables(meant) == meant
