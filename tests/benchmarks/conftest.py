"""For benchmarks that start processes."""

from __future__ import annotations

import gc
import sys

import pytest

from tests.zygote import Zygote


@pytest.fixture(autouse=True)
def little_to_collect() -> None:
    """What is there by now is not looked through again whenever a benchmark collects garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def quick_python(zygote: Zygote, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of Python that a benchmark starts have everything loaded: what they take is not looked at."""
    monkeypatch.setattr(sys, "executable", str(zygote.folder / "python"))
