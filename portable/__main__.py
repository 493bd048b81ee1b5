"""``python -m portable`` is ``portable-train``."""

from __future__ import annotations

import sys

from portable.cli import program

sys.exit(program())
