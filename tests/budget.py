"""How large the project may be: ``python -m tests.budget [--lower]``, one of the static checks.

``budget.toml`` has an upper bound for each package's lines and syntax nodes, and for the words of the docs.
``--lower`` writes today's figures where they are smaller. A bound is raised by hand, with a dated reason on
its line::

    lines = 36_400 # 2026-12-01: attention for sequences that ranks share

Without an argument the exit code is 1 where a bound is exceeded, or was raised without a new reason.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUDGET = ROOT / "budget.toml"

_ENTRY = re.compile(r"^(?P<unit>[a-z]+) = (?P<bound>[\d_]+)(?: # (?P<reason>\d{4}-\d{2}-\d{2}: .+))?$")
_SKIPPED = (ast.expr_context,)
"""Load, Store and Del say nothing that their names do not."""

Figures = dict[str, dict[str, int]]
"""By package or ``docs``, by unit."""


def measured(root: Path, packages: list[str]) -> Figures:
    """The size of each of ``packages`` (folders of Python; ``docs`` of Markdown) under ``root``."""
    return {name: _docs(root / name) if name == "docs" else _python(root / name) for name in packages}


def _python(folder: Path) -> dict[str, int]:
    """Lines, and syntax nodes without docstrings: these depend on no formatting."""
    lines = nodes = 0
    for path in folder.rglob("*.py"):
        text = path.read_text("utf-8")
        lines += text.count("\n")
        for node in ast.walk(ast.parse(text)):
            is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            nodes += -1 if is_docstring else not isinstance(node, _SKIPPED)  # its constant is a node, too
    return {"lines": lines, "nodes": nodes}


def _docs(folder: Path) -> dict[str, int]:
    return {"words": sum(len(path.read_text("utf-8").split()) for path in folder.rglob("*.md"))}


def exceeded(bounds: Figures, sizes: Figures) -> list[str]:
    """A line for each bound that is exceeded."""
    return [
        f"{name} has {sizes[name][unit]:,} {unit}, {sizes[name][unit] - bound:,} more than budget.toml allows"
        "; take a mechanism out, or raise the bound with a dated reason on its line"
        for name, units in bounds.items()
        for unit, bound in units.items()
        if sizes[name][unit] > bound
    ]


def raised(before: str, now: str) -> list[str]:
    """A line for each bound of ``now`` that is higher than in ``before``, an older text, without a reason."""
    old, reasons = tomllib.loads(before), _reasons(now)
    known = _reasons(before).values()
    return [
        f"budget.toml: {name}.{unit} was raised from {old[name][unit]:,} to {bound:,} without a new reason; "
        f"end its line with  # {date.today()}: why"
        for name, units in tomllib.loads(now).items()
        for unit, bound in units.items()
        if bound > old.get(name, {}).get(unit, bound)
        and (reasons.get((name, unit)) is None or reasons[name, unit] in known)
    ]


def _reasons(text: str) -> dict[tuple[str, str], str | None]:
    name, reasons = "", {}
    for line in text.splitlines():
        if line.startswith("["):
            name = line.strip("[]")
        elif entry := _ENTRY.match(line):
            reasons[name, entry["unit"]] = entry["reason"]
    return reasons


def lowered(text: str, sizes: Figures) -> str:
    """``text`` of the file with each bound that is higher than the size set to it."""
    name, lines = "", []
    for line in text.splitlines():
        if line.startswith("["):
            name = line.strip("[]")
        elif (entry := _ENTRY.match(line)) and sizes[name][entry["unit"]] < int(entry["bound"]):
            line = f"{entry['unit']} = {sizes[name][entry['unit']]:_}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def _before(now: str) -> str:
    """The last committed text of the file that differs from ``now``; ``now`` where git knows none."""
    for revision in ("HEAD", "HEAD~1"):
        shown = subprocess.run(
            ["git", "show", f"{revision}:{BUDGET.name}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        if shown.returncode == 0 and shown.stdout != now:
            return shown.stdout
    return now


def main(arguments: list[str]) -> int:
    """See the module's text."""
    text = BUDGET.read_text("utf-8")
    bounds: Figures = tomllib.loads(text)
    sizes = measured(ROOT, list(bounds))
    if arguments == ["--lower"]:
        BUDGET.write_text(lowered(text, sizes), "utf-8")
        return 0
    problems = exceeded(bounds, sizes) + raised(_before(text), text)
    print("\n".join(problems) or "every package is within budget.toml")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
