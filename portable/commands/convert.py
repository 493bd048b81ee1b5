"""``portable-convert``: :mod:`converters.cli` of the package beside this one, whatever PYTHONPATH has."""

from __future__ import annotations

from converters.cli import main

__all__ = ["main"]
