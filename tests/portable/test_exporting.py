"""An export replaces what an export wrote, in one step, and keeps everything else."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest

from converters.writers.replace_folder import exchange
from portable.output import export as exporting
from portable.output.export import MARKER, export, recover_export
from portable.run.rank import run_rank
from tests.runs import configured

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    folder = tmp_path_factory.mktemp("exporting") / "run"
    settings = {"train__steps": 1, "data__eval_fraction": 0, "checkpoint__export": False}
    assert run_rank("cpu", configured(folder, corpus, **settings)) == 0
    return folder / "checkpoints" / "step-000001"


def test_it_replaces_its_own(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    final = tmp_path / "final"
    export(checkpoint, final)
    first = (final / "model.safetensors").stat().st_ino
    export(checkpoint, final)
    assert (final / "model.safetensors").stat().st_ino != first
    assert [path.name for path in tmp_path.iterdir()] == ["final"]
    assert not capsys.readouterr().err


def test_it_keeps_what_a_person_put_there(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    final = tmp_path / "final"
    export(checkpoint, final)
    (final / "README.md").write_text("mine")
    export(checkpoint, final)
    assert (tmp_path / "final.kept" / "README.md").read_text() == "mine"
    assert "README.md was put there by no export" in capsys.readouterr().err
    (final / "config.json").write_text("{}")
    export(checkpoint, final)
    assert (tmp_path / "final.kept-2" / "config.json").read_text() == "{}"
    (final / MARKER).unlink()  # as in a folder of a version before there were any, or anybody's
    export(checkpoint, final)
    assert (tmp_path / "final.kept-3" / "model.safetensors").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "final",
        "final.kept",
        "final.kept-2",
        "final.kept-3",
    ]


def test_a_link_is_not_followed(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "thesis.txt").write_text("mine")
    (tmp_path / "final").symlink_to("elsewhere")
    export(checkpoint, tmp_path / "final")
    assert not (tmp_path / "final").is_symlink()
    assert (tmp_path / "final" / "model.safetensors").exists()
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["thesis.txt"]
    assert (tmp_path / "final.kept").readlink().name == "elsewhere"


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("survived", range(8))
def test_a_kill_at_any_moment_loses_nothing(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, atomic: bool, survived: int
) -> None:
    """It is emulated: nothing that changes a name or deletes happens from then on."""
    from pathlib import Path

    final = tmp_path / "final"
    export(checkpoint, final)
    (final / "README.md").write_text("mine")
    left = survived

    def counted() -> None:
        nonlocal left
        if left <= 0:
            raise MemoryError("killed")
        left -= 1

    rename, rmtree = Path.rename, shutil.rmtree

    def renamed(path: Path, target: Path) -> Path:
        counted()
        return rename(path, target)

    def removed(path: Path, **_: object) -> None:
        if os.path.lexists(path):
            counted()
            rmtree(path)

    def exchanged(one: Path, other: Path) -> bool:
        counted()
        return atomic and exchange(one, other)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", renamed)
        patch.setattr(shutil, "rmtree", removed)
        patch.setattr(exporting, "exchange", exchanged)
        try:
            export(checkpoint, final)
        except MemoryError:
            assert not atomic or (final / "model.safetensors").exists()
    recover_export(final)
    assert (final / "model.safetensors").exists()
    assert [path.read_text() for path in tmp_path.glob("final*/README.md")] == ["mine"]
    export(checkpoint, final)
    left_over = {path.name for path in tmp_path.iterdir()} - {"final", "final.kept"}
    # The converter's own, whose lock this process, which is not dead, still holds.
    assert all(name.startswith("..final.new.tmp-") for name in left_over)
