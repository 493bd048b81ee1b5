"""``portable-convert``: the command line of :mod:`portable.converters.cli`."""

from __future__ import annotations

from portable.converters.cli import main

__all__ = ["main"]
