"""The manifest of a checkpoint: it refers to no other folder, and damage does not cause a traceback."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from portable.converters import CheckpointError, check_manifest, compute_manifest_entries, format_manifest
from portable.converters.cli import main
from portable.converters.manifest import MANIFEST


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "step-000004"
    made.mkdir()
    save_file({"a": torch.arange(4.0)}, made / "model.safetensors")
    (made / "config.json").write_text('{"model_type": "llama"}')
    (made / "tokenizer.json").write_text('{"version": "1.0"}')
    (made / MANIFEST).write_text(format_manifest(compute_manifest_entries(made), step=4))
    return made


@pytest.mark.parametrize(
    "files",
    [
        {"../outside": {"bytes": 1, "crc32": 0}},
        {"/dev/zero": {"bytes": 0, "crc32": 0}},
        {"config.json": {"bytes": "23"}},
        {"config.json": {}},
        {"config.json": [23]},
        {"config\0.json": {"bytes": 23}},
        {"config\ud800.json": {"bytes": 23}},
    ],
)
def test_check_manifest_rejects_invalid_files(folder: Path, files: Any) -> None:
    (folder / MANIFEST).write_text(format_manifest(files, step=4))
    with pytest.raises(CheckpointError, match="damaged"):
        check_manifest(folder)


def test_check_manifest_does_not_follow_link(folder: Path, tmp_path: Path) -> None:
    (folder / "config.json").rename(tmp_path / "elsewhere.json")
    (folder / "config.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(CheckpointError, match="points outside"):
        check_manifest(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_convert_checks_companions_against_manifest(
    name: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(folder), str(tmp_path / "out")]) == 0
    text = (folder / name).read_text()
    (folder / name).write_text(text.replace("l", "m").replace("1", "2"))  # of the same length
    assert main([str(folder), str(tmp_path / "other")]) == 65
    assert f"{name}: is damaged or from another save" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    "name", [".metadata", "__5.metadata", "__0_7.distcp", "latest_universal", "zero/a.weight/fp32.pt"]
)
def test_check_manifest_rejects_file_of_another_format(name: str, folder: Path) -> None:
    """The additional file would be opened instead of the saved files."""
    (folder / "notes.txt").write_text("a person's own file may stay")
    assert check_manifest(folder) is not None
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(b"")
    with pytest.raises(
        CheckpointError,
        match=f"{re.escape(name)}: is not listed in checkpoint_manifest.json; move the file out",
    ):
        check_manifest(folder)
