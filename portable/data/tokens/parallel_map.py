"""Parallel map: apply a function to batches in several processes, and yield the results in order.

Each batch is sent to the first free process. Results are yielded in the order of the batches, so
they do not depend on the number of processes. To bound the memory usage, only a few batches are
processed or queued at a time.

The workers are plain child processes that run :func:`serve`, because processes of
``multiprocessing`` would import the program's main module again. Each worker ends when its
connection closes, even if the parent process is killed.
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
_BATCHES_PER_PROCESS = 4
"""Maximum number of batches per process that are being processed, or whose results wait to be yielded."""
is_worker_process = False
"""Whether this process is a :class:`WorkerProcess`."""


def map_in_order(
    function: Callable[[T], R], items: Iterable[T], *, num_processes: int, num_local_items: int = 0
) -> Iterator[R]:
    """Yield ``function(item)`` for every item, in order.

    Args:
        function: Function to call. If it cannot be pickled, for example because it contains the
            tokenizer of a model with custom code, the current process maps all items.
        items: Items to map.
        num_processes: Number of processes to start. If it is less than two, the current process maps
            all items. A worker process also maps all items itself, because other workers use the other
            cores.
        num_local_items: Number of items that the current process maps before it starts other processes,
            because starting them takes seconds.

    Raises:
        UserError: If ``function`` raises a UserError.
        RunError: If a process has died, or if ``function`` has raised any other exception in a process.
    """
    rest = iter(items)
    is_local = is_worker_process or num_processes < 2
    yield from map(function, rest if is_local else islice(rest, num_local_items))
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
            if not busy:  # all items are done
                return
            for worker in cast("list[WorkerProcess]", ready(cast("Any", busy))):
                number = busy.pop(worker)
                try:
                    done[number] = worker.receive_result()
                    free.append(worker)
                except (UserError, RunError) as error:  # raised after the results of previous items
                    done[number] = error
            while turn in done:
                result = done.pop(turn)
                if isinstance(result, UserError | RunError):
                    raise result
                yield result
                turn += 1


def _is_picklable(work: object) -> bool:
    """Return whether a function can be sent to another process."""
    try:
        ForkingPickler.dumps(work)
    except Exception:  # objects may raise any exception
        return False
    return True


class WorkerProcess:
    """Child process that calls a function with one item at a time. It is killed when the context exits.

    Args:
        work: Picklable function with one argument.
    """

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
        """Return the file descriptor of the connection. It becomes readable when there is a result."""
        return self._connection.fileno()

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()

    def send_item(self, item: Any) -> None:
        """Send an item to the process. Call :meth:`receive_result` before sending the next item.

        Raises:
            RunError: If the process has died.
        """
        try:
            self._connection.send(item)
        except OSError as error:
            raise self._build_died_error() from error

    def receive_result(self) -> Any:
        """Wait for the result of the last item, and return it.

        Raises:
            UserError: If the function has raised a UserError.
            RunError: If the process has died, or if the function has raised any other exception.
        """
        try:
            result = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._build_died_error() from error
        if isinstance(result, UserError | RunError):
            raise result
        return result

    def _build_died_error(self) -> RunError:
        """Wait for the process to end, and build an error that contains its exit code."""
        code = self._process.wait()
        return RunError(
            f"data.source: a process that tokenizes ended with code {code}, most likely because memory ran "
            "out; free memory and run the same command again"
        )


def serve() -> None:
    """Run the loop of a worker process: receive the function, then receive items and send results.

    If the function raises an exception, a UserError or RunError is sent as the result. The process
    exits when the parent closes the connection.
    """
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
    except (EOFError, OSError):  # the parent process is done or dead
        os._exit(0)
