"""The Dockerfile asks for what the project has. It is not built here: no Docker engine runs in the tests."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_it_installs_extras_that_exist_from_files_that_exist() -> None:
    text = (ROOT / "gpu" / "scripts" / "Dockerfile").read_text()
    extras = re.search(r"/opt/portable-trainer\[([a-z0-9,]+)\]", text)
    assert extras is not None
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras[1].split(",")) <= set(project["optional-dependencies"])
    constraints = re.search(r"-c /opt/portable-trainer/(\S+)", text)
    assert constraints is not None
    assert (ROOT / constraints[1]).is_file()
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert not {"constraints.txt", "pyproject.toml", "portable", "configs"} & set(ignored)
