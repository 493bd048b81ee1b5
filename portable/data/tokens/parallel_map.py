"""Map a function over batches in several processes, in order.

A batch goes to whichever process is free, and results come in the order of the batches, so that they do not
depend on how many processes there are. Only a few batches are at work or wait for their turn, which bounds
the memory.

The processes are plain children that run this file, so the program's main module is not imported again, as
``multiprocessing`` would. Each ends when its connection closes, also if this process is killed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from itertools import chain, islice
from multiprocessing.connection import Connection, Pipe
from multiprocessing.connection import wait as ready
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, TypeVar, cast

from portable.converters.interrupts import block_interrupts_in_children
from portable.errors import RunError, UserError, to_one_line
from portable.plugins import build_python_command

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

T = TypeVar("T")
R = TypeVar("R")
_BATCHES_PER_PROCESS = 4  # batches for each process
is_worker_process = False
"""Whether this process is a :class:`WorkerProcess`."""


def map_in_order(
    function: Callable[[T], R], items: Iterable[T], *, num_processes: int, num_local_items: int = 0
) -> Iterator[R]:
    """Yield ``function(item)`` for every item, in order.

    Args:
        function: a function, which this process calls for all items if it cannot be pickled, such as the
            tokenizer of a model with code of its own. A ``UserError`` of it is raised here.
        num_processes: how many to start; with less than two, this process does all.
        num_local_items: items that this process does itself before it starts others, which takes seconds.

    Raises:
        RunError: a process died, or ``function`` failed in it.
    """
    rest = iter(items)
    yield from map(function, rest if num_processes < 2 else islice(rest, num_local_items))
    first = next(rest, None)
    if first is None:
        return
    if not _is_picklable(function):
        yield from map(function, chain((first,), rest))
        return
    numbered = enumerate(chain((first,), rest))
    done: dict[int, R | UserError | RunError] = {}
    turn, has_items = 0, True
    with ExitStack() as stack:
        free = [stack.enter_context(WorkerProcess(function)) for _ in range(num_processes)]
        busy: dict[WorkerProcess, int] = {}
        while True:
            while has_items and free and len(busy) + len(done) < _BATCHES_PER_PROCESS * num_processes:
                number, item = next(numbered, (-1, first))
                if has_items := number >= 0:
                    worker = free.pop()
                    worker.send_item(item)
                    busy[worker] = number
            if not busy:  # each may have been done before the last item was known to be the last
                return
            for worker in cast("list[WorkerProcess]", ready(cast("Any", busy))):
                number = busy.pop(worker)
                try:
                    done[number] = worker.receive_result()
                    free.append(worker)
                except (UserError, RunError) as error:  # raised when its turn has come
                    done[number] = error
            while turn in done:
                result = done.pop(turn)
                if isinstance(result, UserError | RunError):
                    raise result
                yield result
                turn += 1


def _is_picklable(work: object) -> bool:
    try:
        ForkingPickler.dumps(work)
    except Exception:  # of any kind, from any object inside
        return False
    return True


class WorkerProcess:
    """A process that does ``work`` for one item at a time."""

    def __init__(self, work: Callable[[Any], Any]) -> None:
        ours, theirs = Pipe()
        serving = "from portable.data.tokens.parallel_map import serve; serve()"
        with block_interrupts_in_children():
            self._process = subprocess.Popen(
                build_python_command(serving, str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
                stdin=subprocess.DEVNULL,
            )
        theirs.close()
        self._connection = ours
        self._connection.send(work)

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def fileno(self) -> int:
        """Readable once there is a result."""
        return self._connection.fileno()

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def kill(self) -> None:
        self._process.kill()

    def send_item(self, item: Any) -> None:
        try:
            self._connection.send(item)
        except OSError as error:
            raise self._build_died_error() from error

    def receive_result(self) -> Any:
        try:
            result = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._build_died_error() from error
        if isinstance(result, UserError | RunError):
            raise result
        return result

    def _build_died_error(self) -> RunError:
        code = self._process.wait()
        return RunError(
            f"data.source: a process that tokenizes ended with code {code}, most likely for lack of memory; "
            "free some and run the same command again"
        )


def serve() -> None:
    """The loop of a process."""
    global is_worker_process
    is_worker_process = True
    connection = Connection(int(sys.argv[1]))
    try:
        work = connection.recv()
        while True:
            item = connection.recv()
            try:
                result = work(item)
            except UserError as error:
                result = error
            except Exception as error:
                said = f"{type(error).__name__}: {to_one_line(error)}"
                result = RunError(f"data.source: a process that tokenizes failed ({said})")
            connection.send(result)
    except (EOFError, OSError):  # the other side is done, or dead
        os._exit(0)
