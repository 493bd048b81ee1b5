"""Run ``portable-train`` as ``python -m portable``."""

from __future__ import annotations

import sys

from portable.cli import program

sys.exit(program())
