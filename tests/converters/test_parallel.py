"""Jobs on threads: each once, all ended by the first error and by Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from converters import CheckpointError
from converters.writers import parallel
from converters.writers.parallel import in_parallel, interleaved

if TYPE_CHECKING:
    from collections.abc import Iterator

    from converters.writers.parallel import Job, Progress


@pytest.fixture(autouse=True)
def several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "threads", lambda: 3)


def forever(progress: Progress) -> None:
    while True:
        progress(0)
        time.sleep(0.001)


@pytest.mark.parametrize("where", ["in a job", "while drawing"])
def test_the_first_error_ends_all(where: str) -> None:
    def fails(progress: Progress) -> None:
        raise CheckpointError("damaged")

    def jobs() -> Iterator[Job]:
        yield forever
        yield forever
        if where == "in a job":
            yield fails
        raise CheckpointError("damaged")

    before = threading.active_count()
    with pytest.raises(CheckpointError, match="damaged"):
        in_parallel(jobs(), lambda _: None)
    assert threading.active_count() <= before  # threads of earlier tests may end meanwhile


def test_ctrl_c_ends_all() -> None:
    before = threading.active_count()
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        in_parallel(iter([forever] * 5), lambda _: None)
    timer.join()
    assert threading.active_count() <= before  # threads of earlier tests may end meanwhile


def test_groups_take_turns() -> None:
    """A group is a file, in which one thread can write at a time."""
    groups: Any = map(iter, ("abc", "d", "efg"))
    assert "".join(map(str, interleaved(groups, 2))) == "adbcefg"
