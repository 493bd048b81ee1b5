from __future__ import annotations

import multiprocessing
import os
import signal
from typing import TYPE_CHECKING

import pytest

# Before anything imports transformers or accelerate, which would otherwise start torch_xla.
os.environ.setdefault("USE_TORCH_XLA", "0")

# A shell's background job ignores Ctrl-C, and so would every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from tests.object_store import ObjectStore
from tests.ranks import PRELOADED, RankPool
from tests.runs import write_corpus
from tests.xla import XlaPool

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Here, so that whoever starts the server first, ranks are forks of it.
multiprocessing.set_forkserver_preload(list(PRELOADED))


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


@pytest.fixture(scope="session")
def object_store() -> Iterator[ObjectStore]:
    """A real S3 server behind a proxy that counts and fails; tests take `s3`."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    store = ObjectStore()
    yield store
    store.close()


@pytest.fixture
def s3(object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """The server with an empty bucket; this process's environment leads to it, children inherit it."""
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)
    for name, value in object_store.environment.items():
        monkeypatch.setenv(name, value)
    object_store.renew()
    return object_store
