"""Changes of the work tree since the baseline was committed, according to git."""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.language.findings import Finding

_HUNK = re.compile(r"@@ -\S+ \+(?P<start>\d+)(?:,(?P<count>\d+))? @@")


@dataclass
class Changes:
    """Changed lines and moved files. Without git there are none.

    Attributes:
        lines: Numbers of the changed lines, by path.
        previous_paths: Previous paths of the files that were moved, by their current paths.
    """

    lines: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    previous_paths: dict[str, str] = field(default_factory=dict)

    def get_previous_path(self, path: str) -> str:
        """Return the path that a file had before it was moved, or the same path if it was not moved."""
        return self.previous_paths.get(path, path)

    def select_changed(self, findings: Iterable[Finding]) -> list[Finding]:
        """Select the findings on changed lines."""
        return [
            finding
            for finding in findings
            if not self.lines[finding.path].isdisjoint(range(finding.line, finding.last_line + 1))
        ]


def read_changes(root: Path, baseline: Path) -> Changes:
    """Read the changes since the last commit that changed the baseline.

    Args:
        root: Root of the project.
        baseline: Path of the baseline, relative to the root.

    Returns:
        The changes. There are none if git is not installed or the baseline was never committed.
    """
    commit = _run_git(root, "log", "-1", "--format=%H", "--", str(baseline)).strip()
    if not commit:
        return Changes()
    options = (
        "--unified=0",
        "--find-renames",
        "--relative",
        "--no-color",
        "--no-ext-diff",
        "--dst-prefix=b/",
    )
    return parse_diff(_run_git(root, "diff", *options, commit))


def parse_diff(diff: str) -> Changes:
    """Parse the output of ``git diff --unified=0``."""
    changes = Changes()
    path = previous_path = ""
    for line in diff.splitlines():
        if line.startswith("rename from "):
            previous_path = line.removeprefix("rename from ")
        elif line.startswith("rename to "):
            changes.previous_paths[line.removeprefix("rename to ")] = previous_path
        elif line.startswith("+++ b/"):
            path = line.removeprefix("+++ b/")
        elif hunk := _HUNK.match(line):
            start, count = int(hunk["start"]), int(hunk["count"] or 1)
            changes.lines[path].update(range(start, start + count))
    return changes


def _run_git(root: Path, *arguments: str) -> str:
    """Run git, and return its output. If git fails, the output is empty."""
    command = ["git", "-c", "core.quotePath=false", *arguments]
    try:
        completed = subprocess.run(
            command, cwd=root, capture_output=True, text=True, encoding="utf-8", check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return completed.stdout
