"""Entry point of ``portable-convert``, which :mod:`portable.converters.cli` implements."""

from __future__ import annotations

from portable.converters.cli import main

__all__ = ["main"]
