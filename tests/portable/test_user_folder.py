"""A folder of the user's with modules that are named like packages of ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from portable import SIBLINGS, UserError, plugins
from tests.ranks import free_port
from tests.runs import flags, tiny

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NAMES = ("gpu.py", "tpu/__init__.py", "converters.py", "configs/__init__.py")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder in which each of :data:`NAMES` leaves a mark when it is run."""
    home = tmp_path / "home"
    for name in NAMES:
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(f"open({str(tmp_path / 'run')!r}, 'a').write(__file__ + '\\n')\n")
    return home


def run(folder: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command in the folder, where none of its modules may be run."""
    found = os.environ["PATH"]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{found}", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not (folder.parent / "run").exists(), (folder.parent / "run").read_text()
    return done


@pytest.mark.slow
def test_ranks_have_our_packages(folder: Path, corpus: Path) -> None:
    settings = tiny(folder / "out", corpus, train__steps=1, data__eval_fraction=0)
    by_torchrun = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    by_torchrun |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = run(folder, sys.executable, "-m", "portable.cli", *flags(settings), **by_torchrun)
    assert done.returncode == 0, done.stderr
    state = json.loads((folder / "out" / "checkpoints" / "step-000001" / "trainer_state.json").read_text())
    assert state["world_size"] == 1


@pytest.mark.parametrize("name", PROJECT["project"]["scripts"])
def test_commands_have_our_packages(folder: Path, name: str) -> None:
    module, function = PROJECT["project"]["scripts"][name].split(":")
    script = f"import sys; sys.argv[0] = {name!r}; from {module} import {function}; sys.exit({function}())"
    done = run(folder, sys.executable, "-c", script, "--help", PYTHONPATH=str(folder))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {name.removesuffix('er')}")


def test_a_new_process_finds_what_this_one_does(folder: Path) -> None:
    (folder / "portable.py").write_text((folder / "gpu.py").read_text())
    code = f"import sys, {', '.join(SIBLINGS)}; print(sys.argv[1:], gpu.__file__, portable.__file__)"
    done = run(folder, *plugins.new_python(code, "a b"))
    assert done.stdout.split("] ")[1].split() == [
        str(ROOT / name / "__init__.py") for name in ("gpu", "portable")
    ]
    assert done.stdout.startswith("['a b']")


@pytest.mark.parametrize(
    ("setting", "text", "hidden"),
    [
        ("plugged:loss", "from configs import VALUE\ndef loss(): return VALUE\n", False),
        ("gpu:kernel", "", True),
        ("plugged:loss", "from gpu import kernel\ndef loss(): pass\n", True),
        ("plugged:loss", "import gpu\nloss = gpu.kernel\n", True),
    ],
)
def test_a_plug_in_has_its_own_configs_and_what_ours_hides_is_named(
    setting: str, text: str, hidden: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a current folder with a ``gpu.py`` and a package ``configs``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("configs").mkdir()
    Path("configs/__init__.py").write_text("VALUE = 7\n")
    Path("gpu.py").write_text("def kernel(): pass\n")
    Path("plugged.py").write_text(text)
    for name in ("plugged", "configs"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    if hidden:
        with pytest.raises(UserError) as refused:
            plugins.load("train.loss", setting)
        remedy = f"gpu is a package of portable-trainer, which hides {tmp_path / 'gpu.py'}; rename yours"
        assert str(refused.value).startswith(f"train.loss: {setting}: ")
        assert str(refused.value).endswith(remedy)
    else:
        assert plugins.load("train.loss", setting)() == 7
        monkeypatch.delitem(sys.modules, "configs")


def test_what_is_installed_claims_no_other_name() -> None:
    setuptools = pytest.importorskip("setuptools")
    settings = PROJECT["tool"]["setuptools"]
    found = setuptools.find_namespace_packages(str(ROOT), include=settings["packages"]["find"]["include"])
    assert {name.partition(".")[0] for name in found} == {"portable", *SIBLINGS}
    assert {"portable.configs", "portable.configs.starters"} <= set(found)
    shipped = {
        file
        for line in settings["package-data"]["portable.configs"]
        for file in (ROOT / "configs").glob(line)
    }
    assert shipped == {file for file in (ROOT / "configs").rglob("*") if file.is_file()}
