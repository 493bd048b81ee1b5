"""Tests of the archives of a release: their metadata and contents, and commands of the installed wheel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.metadata import Metadata

ROOT = Path(__file__).resolve().parents[1]
UV = (sys.executable, "-m", "uv")
BUILD = (*UV, "build", "--no-build-isolation", "--python", sys.executable)
URL, TAG = "https://code.example/portable/trainer", "v9.9.9"


def run(*words: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        list(map(str, words)), cwd=cwd, env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the archives of a release with the installed setuptools, which needs no network."""
    folder = tmp_path_factory.mktemp("package")
    checkout = folder / "checkout"
    files = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).split("\0")
    for name in filter(None, files):
        if (ROOT / name).is_symlink() or (ROOT / name).is_file():
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, checkout / name, follow_symlinks=False)
    run(sys.executable, ".ci/prepare_release.py", URL, TAG, cwd=checkout)
    run(*BUILD, "-o", folder, cwd=checkout)
    shutil.rmtree(checkout)
    return folder


def find_wheel(folder: Path) -> Path:
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_package_metadata_is_complete(built: Path) -> None:
    with zipfile.ZipFile(find_wheel(built)) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Metadata.from_email(archive.read(name))  # raises an exception if a field is invalid
        names = set(archive.namelist())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (metadata.name, str(metadata.version)) == (project["name"], project["version"])
    assert metadata.summary
    assert metadata.license_expression == "Apache-2.0"
    assert metadata.description_content_type == "text/markdown"
    assert {"Repository", "Documentation", "Issues", "Changelog"} <= set(metadata.project_urls or {})
    links = re.findall(r"\]\(([^)\s]+)\)", str(metadata.description))
    assert any(link.startswith(f"{URL}/blob/{TAG}/docs/") for link in links)
    assert f"{URL}/raw/{TAG}/docs/report.png" in links
    assert all(re.match(r"[a-z]+:|#", link) for link in links)
    tracked = run("git", "ls-files", "configs", cwd=ROOT).split()
    assert {f"portable/{name}" for name in tracked} <= names
    assert {name.partition("/")[0] for name in names if not name.startswith("portable_trainer-")} == {
        "portable"
    }


def test_source_archive_builds_same_wheel(built: Path, tmp_path: Path) -> None:
    (source,) = built.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        assert not [name for name in archive.getnames() if "/tests/" in name]
        archive.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    run(*BUILD, "--wheel", "-o", tmp_path, cwd=folder)
    with zipfile.ZipFile(find_wheel(tmp_path)) as second, zipfile.ZipFile(find_wheel(built)) as first:
        assert sorted(second.namelist()) == sorted(first.namelist())


def test_wheel_runs_outside_of_checkout(built: Path, tmp_path: Path) -> None:
    installed, work = tmp_path / "installed", tmp_path / "work"
    work.mkdir()
    install = (*UV, "pip", "install", "-q", "--no-deps", "--python", sys.executable, "--target", installed)
    run(*install, find_wheel(built), cwd=work)
    shown = {"PYTHONPATH": str(installed), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    code = "import portable, portable.converters; print(portable.__file__, portable.converters.__file__)"
    files = run(sys.executable, "-c", code, cwd=work, **shown).split()
    assert all(Path(file).is_relative_to(installed) for file in files)
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    for script in scripts:
        assert "usage" in run(installed / "bin" / script, "--help", cwd=work, **shown)
    train = installed / "bin" / "portable-train"
    run(train, "init", "chat.yaml", "--task", "chat", cwd=work, **shown)
    assert yaml.safe_load((work / "chat.yaml").read_text())["train"]["epochs"] == 3
    run(
        train,
        "--train.steps",
        "2",
        "--backend",
        "cpu",
        "--data.cache_dir",
        tmp_path / "cache",
        cwd=work,
        **shown,
    )
    assert (work / "runs" / "quickstart" / "final" / "model.safetensors").is_file()
