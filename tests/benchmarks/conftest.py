"""Fixtures for benchmarks that start processes."""

from __future__ import annotations

import gc
import sys

import pytest

from tests.zygote import Zygote


@pytest.fixture(autouse=True)
def little_to_collect() -> None:
    """Exclude all present objects from the garbage collections of benchmarks."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def quick_python(zygote: Zygote, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the Python processes of a benchmark start with all modules loaded. Their times are not checked."""
    monkeypatch.setattr(sys, "executable", str(zygote.folder / "python"))
