"""``budget.toml``: a bound that is exceeded is told, and one is raised only with a new, dated reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.budget import exceeded, lowered, measured, raised

BEFORE = "# bounds\n\n[portable]\nlines = 1_000\nnodes = 9_000 # 2026-01-02: the loop\n"


def changed(line: str) -> str:
    return BEFORE.replace("lines = 1_000", line)


@pytest.mark.parametrize(
    ("now", "told"),
    [
        (BEFORE, []),
        (changed("lines = 900"), []),
        (changed("lines = 1_200 # 2026-02-03: a third engine"), []),
        (changed("lines = 1_200"), ["portable.lines was raised from 1,000 to 1,200"]),
        (BEFORE.replace("9_000", "9_500"), ["portable.nodes was raised from 9,000 to 9,500"]),
        (BEFORE.replace("9_000 # 2026-01-02", "9_500 # 2026-02-03"), []),
    ],
)
def test_a_bound_is_raised_with_a_new_reason(now: str, told: list[str]) -> None:
    said = raised(BEFORE, now)
    assert len(said) == len(told)
    assert all(part in line for part, line in zip(told, said, strict=True))


def test_what_is_too_large_is_told_and_what_shrinks_lowers_the_bound(tmp_path: Path) -> None:
    package = tmp_path / "portable"
    package.mkdir()
    (package / "a.py").write_text('"""Text."""\n\n\ndef f(x):\n    """More."""\n    return x\n')
    sizes = measured(tmp_path, ["portable"])
    (line,) = exceeded({"portable": {"lines": 5, "nodes": 100}}, sizes)
    assert line.startswith("portable has 6 lines, 1 more than budget.toml allows")
    assert lowered("[portable]\nlines = 8 # 2026-01-02: why\nnodes = 1\n", sizes) == (
        "[portable]\nlines = 6\nnodes = 1\n"
    )
