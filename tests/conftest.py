from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

# Before anything imports transformers or accelerate, which would otherwise start torch_xla.
os.environ.setdefault("USE_TORCH_XLA", "0")

# A shell's background job ignores Ctrl-C, and so would every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from tests.ranks import RankPool
from tests.runs import write_corpus
from tests.xla import XlaPool

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Processes that run functions as ranks of a process group."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def xla() -> Iterator[XlaPool]:
    """Processes with virtual XLA devices."""
    pytest.importorskip("torch_xla")
    pool = XlaPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small text data set; its folder also holds the token cache of all tiny runs."""
    return write_corpus(tmp_path_factory.mktemp("corpus"))
