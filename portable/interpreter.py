"""A new Python process that runs code of this project."""

from __future__ import annotations

import os
import sys


def command(code: str, *arguments: str) -> list[str]:
    """What runs ``code``, with ``arguments`` in ``sys.argv``, and looks for modules where this process does.

    By itself a new Python looks in the current folder first, which may hold modules of any name.
    """
    paths = [path or os.getcwd() for path in sys.path]  # noqa: PTH109 (a str, as the others)
    return [sys.executable, "-c", f"import sys; sys.path[:] = {paths!r}; import portable; {code}", *arguments]
