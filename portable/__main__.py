"""Run ``portable-train`` as ``python -m portable``."""

from __future__ import annotations

import sys

from portable.cli import run_as_process

sys.exit(run_as_process())
