"""Processes of their own, whose answer is a file: what traces and compiles may end its process."""

from __future__ import annotations

import json
import pickle
import subprocess
from typing import TYPE_CHECKING, Any

from portable import interpreter
from portable.errors import UserError, one_line

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_DIES_WITH_US = "from portable.ranks.parent_death import die_with_parent; die_with_parent(); "


def ask(
    code: str, answer: Path, *arguments: str, given: Any, environment: Mapping[str, str], failure: str
) -> dict[str, Any]:
    """Run ``code`` in another process, which dies with this one, and read what it :func:`answers`.

    Args:
        code: finds the path of its answer and ``arguments`` in ``sys.argv``.
        answer: does not exist.
        given: it unpickles this from its standard input.
        environment: of the process.
        failure: what to say if it leaves no answer.

    Raises:
        UserError: it left none, or ``refused``.
    """
    done = subprocess.run(
        interpreter.command(_DIES_WITH_US + code, str(answer), *arguments),
        input=pickle.dumps(given),
        env=dict(environment),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        check=False,
    )
    if not answer.exists():
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        why = one_line(lines[-1]) if lines else f"its process ended with {done.returncode}"
        raise UserError(f"{failure} ({why})")
    found: dict[str, Any] = json.loads(answer.read_text("utf-8"))
    if "refused" in found:
        raise UserError(found["refused"])
    return found


def answers(answer: Path, found: Mapping[str, Any]) -> None:
    """Leave ``found`` as the answer of this process, whole or not at all."""
    partial = answer.with_name(f"{answer.name}.partial")
    partial.write_text(json.dumps(found), "utf-8")
    partial.rename(answer)
