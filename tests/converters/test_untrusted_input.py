"""Malicious checkpoints: links, pipes, names and views that must be neither followed nor waited for."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from portable.converters import CheckpointError, compute_fingerprint, open_checkpoint, write_safetensors
from portable.converters.adapters.adapter import find_adapter
from portable.converters.cli import main
from portable.converters.names.canonical import strip_common_prefixes
from portable.converters.storage.path_or_url import parse_path_or_url
from portable.converters.writers import replace_folder as exchange_module
from portable.converters.writers.atomic_output import FolderOutput, open_atomic_output, validate_output_path
from tests.converters.compare import error_of

ROOT = Path(__file__).parents[2]


def model(folder: Path, **more: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file({"a": torch.arange(6.0), **more}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "odd"}')
    return folder


# -- links ---------------------------------------------------------------------------------------------------


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "elsewhere" / "secret.txt"
    path.parent.mkdir()
    path.write_text("the password")
    return path


@pytest.mark.parametrize(
    "name", ["a\ud800.weight", "base_model.model.a\ud800.lora_A.weight"], ids=["model", "adapter"]
)
def test_digest_accepts_surrogates_in_tensor_names(name: str, tmp_path: Path) -> None:
    names = [name, name.replace("lora_A", "lora_B")]
    header = {
        key: {"dtype": "F32", "shape": [1, 1], "data_offsets": [4 * i, 4 * i + 4]}
        for i, key in enumerate(dict.fromkeys(names))
    }
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(
        len(text).to_bytes(8, "little") + text + bytes(4 * len(header))
    )
    settings = {"peft_type": "LORA", "r": 1, "lora_alpha": 1}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    checkpoint = open_checkpoint(tmp_path)
    assert compute_fingerprint(checkpoint)
    adapter = find_adapter(checkpoint)
    assert adapter is None or adapter.digest


def test_convert_does_not_copy_companions_through_links(
    tmp_path: Path, secret: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = model(tmp_path / "in")
    (source / "vocab.txt").symlink_to(secret)
    (source / "merges.txt").symlink_to("config.json")  # inside the folder: may stay
    (source / "tokenizer").symlink_to(secret.parent)
    (secret.parent / "tokenizer.model").write_text("also secret")
    write_safetensors(open_checkpoint(source), tmp_path / "out", progress=False)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"model.safetensors", "config.json", "merges.txt"}
    assert (tmp_path / "out" / "merges.txt").read_text() == (source / "config.json").read_text()
    assert not (tmp_path / "out" / "merges.txt").is_symlink()
    assert "vocab.txt: a link points outside of" in caplog.text
    assert "in/tokenizer: a link points outside of" in caplog.text
    assert "tokenizer.model" not in caplog.text  # nor is the folder outside listed


@pytest.mark.parametrize("name", ["model.safetensors", "trainer_state.json"])
def test_convert_does_not_read_files_through_links(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, other = model(tmp_path / "in"), model(tmp_path / "other")
    (other / "trainer_state.json").write_text('{"step": 3}')
    (source / name).unlink(missing_ok=True)
    (source / name).symlink_to(other / name)
    assert "is not followed" in error_of(capsys, source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_convert_does_not_select_step_behind_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = model(tmp_path / "other")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "step-000002").symlink_to(other)
    assert "is not followed" in error_of(capsys, tmp_path / "run", tmp_path / "out")
    (tmp_path / "link").symlink_to(other)  # a link that the user names is followed
    assert main([str(tmp_path / "link"), str(tmp_path / "out"), "--quiet"]) == 0


def test_convert_follows_links_to_hub_blobs(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--org--name"
    made = model(tmp_path / "made")
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for path in made.iterdir():
        path.rename(repository / "blobs" / f"{path.name}-hash")
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}-hash")
    (snapshot / "vocab.txt").symlink_to("../../refs")  # in the repository, but not a blob
    (repository / "refs").write_text("main")
    write_safetensors(open_checkpoint(snapshot), tmp_path / "out", progress=False)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"model.safetensors", "config.json"}


def test_convert_does_not_replace_output_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, mine = model(tmp_path / "in"), tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("years")
    (tmp_path / "out").symlink_to(mine)
    assert "is a link" in error_of(capsys, source, tmp_path / "out", "--overwrite")
    assert (mine / "thesis.tex").read_text() == "years"


# -- pipes and devices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["trainer_state.json", "latest", "config.json", "latest_universal"])
def test_open_checkpoint_does_not_wait_for_pipe(name: str, tmp_path: Path) -> None:
    source = model(tmp_path / "in")
    (source / name).unlink(missing_ok=True)
    os.mkfifo(source / name)
    done: list[object] = []
    thread = threading.Thread(target=lambda: done.append(dict(open_checkpoint(source).tensors)), daemon=True)
    thread.start()
    thread.join(20)
    assert done


# -- values in files ----------------------------------------------------------------------------------------


def test_convert_rejects_views_that_repeat_storage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a stride of 0, or with many views of one storage, a few kilobytes expand to 256 MB."""
    bomb = {"a": torch.zeros(1).expand(8192, 8192)}
    torch.save(bomb, tmp_path / "one.pt")
    storage = torch.zeros(1 << 10)
    torch.save({f"a{i}": storage[i:].expand(1 << 10, -1) for i in range(100)}, tmp_path / "many.pt")
    for name in ("one.pt", "many.pt"):
        line = error_of(capsys, tmp_path / name, tmp_path / "out")
        assert "more than 8 times as much" in line and "--expand" in line
        error_of(capsys, tmp_path / name, tmp_path / "out", "--dry-run")
    assert not (tmp_path / "out").exists()
    assert main([str(tmp_path / "many.pt"), str(tmp_path / "out"), "--expand", "--quiet"]) == 0
    torch.save({"a": torch.zeros(1).expand(16, 16)}, tmp_path / "small.pt")  # nothing to refuse it for
    assert main([str(tmp_path / "small.pt"), str(tmp_path / "small"), "--quiet"]) == 0


def test_convert_rejects_large_sparse_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file uses 4 kB on the disk, but is 2 GiB long."""
    header = json.dumps({"a": {"dtype": "F32", "shape": [1 << 29], "data_offsets": [0, 1 << 31]}}).encode()
    source = model(tmp_path / "in")
    with (source / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + (1 << 31))
    assert "more than 8 times as much" in error_of(capsys, source, tmp_path / "out")


def test_convert_rejects_invalid_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The names belong to shards, to parameters in a pickle, or to the groups of an optimizer."""
    source = model(tmp_path / "in")
    index = source / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "\ud800"}}))
    assert "is not valid Unicode" in error_of(capsys, source, tmp_path / "out")
    index.unlink()
    with pytest.raises(CheckpointError, match="is not a string"):
        strip_common_prefixes({("a", 1): 0, "b": 1}, location="f")  # type: ignore[dict-item]
    safetensors.torch.save_file({"a.exp_avg": torch.zeros(6)}, source / "optimizer.safetensors")
    for groups in ([{"params": None}], [{"params": "a"}], [{"params": ["a"], "lr": "\ud800"}]):
        (source / "optimizer.json").write_text(json.dumps({"param_groups": groups}))
        error_of(capsys, source, tmp_path / "out", "--optimizer")
    assert not (tmp_path / "out").exists()


def test_convert_escapes_names_on_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "a\x1b[2J\x1b]0;title\x07\nerror: your disk is full"
    source = model(tmp_path / "in", **{evil: torch.zeros(3)})
    assert main([str(source), str(tmp_path / "out"), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert all(line.isprintable() for line in shown.split("\n"))
    assert not any(line.startswith("error") for line in shown.split("\n"))
    index = {"weight_map": {evil: "model.safetensors"}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    error_of(capsys, source, tmp_path / "out")


@pytest.mark.parametrize(
    "url", ["s3:/AKIAKEY:SECRETSECRET@bucket/run", "s3:KEY:SECRETSECRET@bucket", "gs:/b/c"]
)
def test_convert_rejects_url_with_one_slash(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for argv in ((url, tmp_path / "out"), (model(tmp_path / "in"), url)):
        line = error_of(capsys, *argv)
        assert "two slashes" in line and "SECRET" not in line
    assert not Path("s3:").exists() and not Path("gs:").exists()
    (tmp_path / "a:").mkdir()
    assert parse_path_or_url(str(tmp_path / "a:")) == tmp_path / "a:"


# -- closed standard output ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("redirect", "code", "error"),
    [("> /dev/full", 1, "error: standard output: "), ("| true", 141, ""), (">&-", 0, "")],
)
def test_convert_survives_closed_standard_output(
    redirect: str, code: int, error: str, tmp_path: Path
) -> None:
    source = model(tmp_path / "in")
    convert = f"{sys.executable} -m portable.converters.cli {source} {tmp_path / 'out'}"
    command = f"set -o pipefail; {convert} {redirect}"
    made = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (made.returncode, made.stdout) == (code, "")
    assert made.stderr.startswith(error) and made.stderr.count("\n") == bool(error)
    assert (tmp_path / "out" / "model.safetensors").exists()


# -- the source by another name ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "out"),
    [
        ("{}", "file://{}"),
        ("file://{}", "{}"),
        ("file://{}", "local://{}"),
        ("{}", "file://{}/out"),
        ("{}/sub", "file://{}"),
        ("link", "file://{}"),
        ("{}", "file://link"),
    ],
)
def test_convert_rejects_output_that_is_source(
    source: str, out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "src"
    for where in (folder, folder / "sub"):
        where.mkdir()
        safetensors.torch.save_file({"a": torch.arange(4.0)}, where / "model.safetensors")
    (tmp_path / "link").symlink_to(folder)
    names = [
        text.replace("link", "{}").format(tmp_path / "link" if "link" in text else folder)
        for text in (source, out)
    ]
    told = error_of(capsys, "--overwrite", *names)
    assert "is the checkpoint itself" in told or "is inside" in told or "contains" in told
    assert sorted(path.name for path in folder.iterdir()) == ["model.safetensors", "sub"]


# -- replacing a folder --------------------------------------------------------------------------------------


def replace(target: Path, content: str) -> None:
    with open_atomic_output(target, needed_bytes=0, overwrite=True) as output:
        assert isinstance(output, FolderOutput)
        (output.folder / "config.json").write_text(content)


def test_output_is_replaced_or_restored_without_atomic_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange_module, "exchange_paths", lambda *_: False)
    target = tmp_path / "out"
    for content in ("old", "new"):
        replace(target, content)
        assert (target / "config.json").read_text() == content
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    # Killed between the two steps.
    target.rename(tmp_path / ".out.old-1234-abcdef")
    validate_output_path(target, [], overwrite=True)
    assert (target / "config.json").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_output_cleanup_removes_only_leftovers_of_dead_processes(tmp_path: Path) -> None:
    target, living = tmp_path / "out", tmp_path / ".out.tmp-77-abcdef"
    strangers = [".out.tmp-mine", ".out.tmp-1-abcdeg", ".other.tmp-1-abcdef", ".out.tmp-1-abcdefg"]
    for name in [".out.tmp-1-abcdef", ".out.old-2-abcdef", living.name, *strangers]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("x")
    target.mkdir()
    (tmp_path / ".out.tmp-3-abcdef").symlink_to(target)
    descriptor = os.open(living, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        validate_output_path(target, [], overwrite=True)
    finally:
        os.close(descriptor)
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == {"out", living.name, ".out.tmp-3-abcdef", *strangers}


def test_killed_replacement_of_output_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "out"
    replace(target, "whole")

    for attempt in range(30):
        if attempt == 15:
            monkeypatch.setattr(exchange_module, "exchange_paths", lambda *_: False)
        pid = os.fork()
        if not pid:
            for _ in range(1000):
                replace(target, "whole")
            os._exit(0)
        time.sleep(0.0005 + (os.getpid() * 7919 + pid) % 40 / 10_000)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        validate_output_path(target, [], overwrite=True)
        assert (target / "config.json").read_text() == "whole"
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
