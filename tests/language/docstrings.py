"""The list of files whose docstrings ruff does not check yet.

``pyproject.toml`` extends the configuration in `LIST`, so that neither ``ruff check`` nor an editor reports
the docstrings of the listed files.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from tests.language.findings import Finding
from tests.language.sources import PRODUCT

LIST = "ruff-docstrings.toml"

_HEADER = """\
# Files that do not follow the D rules of ruff yet. pyproject.toml extends this file. Do not add files:
# `python -m tests.language` fails if the list grows, and `--write` removes the files that follow the rules.
[lint.extend-per-file-ignores]
"""


def read_list(root: Path) -> list[str]:
    """Read the paths of the listed files."""
    return list(tomllib.loads((root / LIST).read_text("utf-8"))["lint"]["extend-per-file-ignores"])


def write_list(root: Path, paths: Iterable[str]) -> None:
    """Write the list of files."""
    lines = [f'"{path}" = ["D"]\n' for path in sorted(paths)]
    (root / LIST).write_text(_HEADER + "".join(lines), "utf-8")


def run_ruff(root: Path) -> list[Finding]:
    """Check the docstrings of the product with ruff. The list is ignored."""
    lint = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["tool"]["ruff"]["lint"]
    options = [
        *(f"--select={rule}" for rule in lint["select"] if re.fullmatch(r"D\d*", rule)),
        *(f"--ignore={rule}" for rule in lint["ignore"] if re.fullmatch(r"D\d*", rule)),
        f"--config=lint.pydocstyle.convention='{lint['pydocstyle']['convention']}'",
    ]
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--exit-zero", "--output-format=json"]
    packages = [package for package in PRODUCT if (root / package).is_dir()]
    completed = subprocess.run(
        [*command, *options, *packages],
        cwd=root,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [
        Finding(
            path=Path(violation["filename"]).resolve().relative_to(root.resolve()).as_posix(),
            line=violation["location"]["row"],
            last_line=violation["end_location"]["row"],
            kind=violation["code"],
            text=violation["name"],
            advice=violation["message"],
        )
        for violation in json.loads(completed.stdout)
    ]


def shorten_list(
    listed: Iterable[str], unclean: Collection[str], previous_paths: Mapping[str, str]
) -> list[str]:
    """Remove files that follow the rules or no longer exist, and replace the paths of files that were moved.

    Args:
        listed: Paths of the listed files.
        unclean: Paths of the files that do not follow the rules.
        previous_paths: Previous paths of the files that were moved, by their current paths.

    Returns:
        Paths of the files that remain in the list.
    """
    return sorted(path for path in unclean if previous_paths.get(path, path) in set(listed))


def find_list_errors(root: Path, listed: Iterable[str], unclean: Collection[str]) -> list[str]:
    """Return an error message for each listed file that follows the rules or does not exist."""
    errors = []
    for path in sorted(set(listed).difference(unclean)):
        problem = "follows the D rules" if (root / path).is_file() else "does not exist"
        errors.append(f"{LIST}: {path} {problem}; remove it: python -m tests.language --write")
    return errors
