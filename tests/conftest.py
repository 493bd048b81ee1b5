from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

# Before anything imports transformers or accelerate, which would otherwise start torch_xla.
os.environ.setdefault("USE_TORCH_XLA", "0")
# Tests share the cores already, so threads of one test would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell's background job ignores Ctrl-C, and so would every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import tests.no_collections  # noqa: F401  (first; until the tests are collected)
from tests import forkserver, ops, order
from tests.engines import Engines
from tests.object_store import ObjectStore
from tests.ranks import PRELOADED, RankPool
from tests.runs import write_conversations, write_corpus
from tests.torchtpu.pool import TpuPool
from tests.xla import NEEDS_XLA, XlaPool, needs_xla
from tests.zygote import Zygote

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.parity import Beside

ops.prepare_environment()

# Set it here, so that ranks are forks of the server regardless of the process that starts it.
multiprocessing.set_forkserver_preload(list(PRELOADED))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all",
        action="store_true",
        help="also the tests marked exhaustive, which others imply",
    )


STARTS = {"brief_runs", "engines", "quick_legs", "ranks", "s3", "zygote"}
"""Fixtures that start processes or train complete runs, also for samples. A test that uses one is slow."""
STARTS |= {
    "adapters",
    "damaged",
    "every_damaged",
    "deepspeed_parallel",
    "deepspeed_written",
    "universal_loads",
}
STARTS |= {"written_items", "written_megatron", "written_ranks", "written_universal"}
"""Fixtures that start processes or train complete runs, also for samples. A test that uses one is slow."""
SLOW = frozenset((Path(__file__).parent / "slow.txt").read_text("utf-8").split())
"""Other functions whose cases together took more than a second, by ``--durations=0``."""

LARGE = "large(*packages): needs packages too large for the extra `test`; left out where one is not installed"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", LARGE)
    if hasattr(config, "workerinput"):
        forkserver.connect(config.workerinput["forkserver"])


def pytest_itemcollected(item: pytest.Item) -> None:
    if needs_xla(item):
        item.add_marker("xla")
    if STARTS.intersection(getattr(item, "fixturenames", ())) or item.nodeid.partition("[")[0] in SLOW:
        item.add_marker("slow")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Pass the address of the fork server to each test process. Called by the controller of xdist."""
    node.workerinput["forkserver"] = forkserver.start()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> order.InGroups:
    return order.InGroups(config, log)


def is_left_out(item: pytest.Item) -> bool:
    if item.get_closest_marker("exhaustive") and not item.config.getoption("--all"):
        return True
    return not all(find_spec(package) for mark in item.iter_markers("large") for package in mark.args)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    out = {item: is_left_out(item) for item in items}
    config.hook.pytest_deselected(items=[item for item in items if out[item]])
    items[:] = [item for item in items if not out[item]]
    if hasattr(config, "workerinput"):
        items[:] = order.ordered(items)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start to build the DeepSpeed ops that tests will need, while other tests run."""
    gc.freeze()
    gc.enable()
    if train := sys.modules.get("portable.run.train"):
        # A run in this process would examine all frozen objects, which takes half of the time of a short run.
        setattr(train, "freeze_existing_objects", nullcontext)  # noqa: B010
    wanted = {mark.args[0] for item in session.items for mark in item.iter_markers("ops")}
    worker = getattr(session.config, "workerinput", {"workerid": "gw0"})["workerid"]
    if wanted and worker == "gw0" and not session.config.getoption("collectonly"):
        session.config.add_cleanup(ops.build_aside(sorted(wanted)))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("xla") and find_spec("torch_xla") is None:  # its import would start it
        pytest.skip(NEEDS_XLA)
    for mark in item.iter_markers("ops"):
        pytest.importorskip("deepspeed")
        if mark.args[0] == "async_io" and not ops.libaio():
            pytest.skip("the system has no libaio")
        ops.build(mark.args[0])


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Return processes that run functions as ranks of a process group."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def torch_xla() -> None:
    """Check that torch_xla exists, for every test of torch_xla or libtpu.

    Such tests have the marker ``xla``.
    """
    assert find_spec("torch_xla"), "give the test the marker xla"


@pytest.fixture(scope="session")
def xla(torch_xla: None) -> Iterator[XlaPool]:
    """Return processes with virtual XLA devices."""
    pool = XlaPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def tpus() -> Iterator[TpuPool]:
    """Return ranks with one chip each of an emulated TPU; :mod:`tests.torchtpu.stand_in` has its limits."""
    pool = TpuPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """Return commands that start without their imports, which take seconds."""
    process = Zygote(tmp_path_factory.mktemp("bin"))
    yield process
    process.close()


@pytest.fixture
def traces_in_forks(zygote: Zygote, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the process that traces the graphs of a run be a fork, without its imports."""
    python = str(zygote.folder / "python")
    monkeypatch.setattr(
        "portable.tpu.compile.child_process.build_python_command",
        lambda code, *arguments: [python, "-c", code, *arguments],
    )


@pytest.fixture(scope="session")
def engines(request: pytest.FixtureRequest) -> Engines:
    """Return the runner of functions on each engine."""
    return Engines(request)


@pytest.fixture(scope="session")
def beside(engines: Engines, conversations: Path, tmp_path_factory: pytest.TempPathFactory) -> Beside:
    """Return the runner of short runs on several ranks, compared with one rank."""
    from tests.parity import Beside  # which imports torch

    return Beside(engines, conversations, tmp_path_factory.mktemp)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a small text dataset. Its folder also has the token cache of all tiny runs."""
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write short conversations of very different lengths."""
    return write_conversations(tmp_path_factory.mktemp("conversations"))


@pytest.fixture(scope="session")
def object_store() -> Iterator[ObjectStore]:
    """Start a real S3 server behind a proxy that counts and fails requests. Tests use `s3`."""
    pytest.importorskip("moto")
    store = ObjectStore()
    yield store
    store.close()


@pytest.fixture
def s3(object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """Return the server with an empty bucket.

    The environment of this process and of its children leads to it.
    """
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)
    for name, value in object_store.environment.items():
        monkeypatch.setenv(name, value)
    object_store.renew()
    return object_store
