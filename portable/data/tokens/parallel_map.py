"""Parallel map: apply a function to items in several processes, and yield the results in order.

Each item is sent to the first free process. Results are yielded in the order of the items, so they
do not depend on the number of processes. To limit the memory usage, items are sent only while few
results are pending. A result is pending until it is yielded.

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
"""Maximum number of items per process that are being processed or whose results have not been yielded yet."""
is_worker_process = False
"""Whether this process is a :class:`WorkerProcess`."""


def map_in_order(
    function: Callable[[T], R], items: Iterable[T], *, num_processes: int, num_local_items: int = 0
) -> Iterator[R]:
    """Yield ``function(item)`` for every item, in order.

    The processes work ahead: up to :data:`_BATCHES_PER_PROCESS` items per process are taken from
    ``items`` before their results are yielded. The processes are killed when the iterator ends or
    is closed.

    Args:
        function: Function to call. If it cannot be pickled, for example because it contains the
            tokenizer of a model with custom code, the current process maps all items.
        items: Items to map.
        num_processes: Number of processes to start. If it is less than two, the current process
            maps all items. The current process also does so if it is itself a worker process,
            because the other workers already use the other cores.
        num_local_items: Number of items that the current process maps before it starts other
            processes, because starting them takes seconds.

    Raises:
        UserError: If ``function`` raises a UserError.
        RunError: If a process has died, or if ``function`` has raised any other exception in one
            of the started processes.
        Exception: If ``function`` has raised this exception in the current process.
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
            if not busy:  # there are no more items
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
    """Child process that calls a function with one item at a time.

    It is killed when the context exits. The constructor starts a new Python interpreter and sends
    the function to it. Items and results must be picklable. To wait for several processes, pass
    them to :func:`multiprocessing.connection.wait`.

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
        """Return the file descriptor of the connection.

        It becomes readable when there is a result, or when the process has ended.
        """
        return self._connection.fileno()

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()

    def send_item(self, item: Any) -> None:
        """Send an item to the worker process.

        Call :meth:`receive_result` before sending the next item.

        Raises:
            RunError: If the worker process has died.
        """
        try:
            self._connection.send(item)
        except OSError as error:
            raise self._build_died_error() from error

    def receive_result(self) -> Any:
        """Wait for the result of the item that was sent last, and return the result.

        The result is the return value of ``work``, the function that the process calls with each
        item.

        Raises:
            UserError: If ``work`` has raised a UserError.
            RunError: If the process has died, or if ``work`` has raised any other exception.
        """
        try:
            result = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._build_died_error() from error
        if isinstance(result, UserError | RunError):
            raise result
        return result

    def _build_died_error(self) -> RunError:
        """Wait for the process to end, and build the error that contains its exit code."""
        code = self._process.wait()
        return RunError(
            f"data.source: a tokenization process ended with exit code {code}, most likely because memory "
            "ran out; free memory and run the same command again"
        )


def serve() -> None:
    """Run the loop of a worker process.

    The process receives the function, and then receives items and sends results. The file
    descriptor of the connection is the first command-line argument. Sets :data:`is_worker_process`.
    If the function raises a UserError, the UserError is sent as the result. Any other ``Exception``
    is converted to a RunError, which is sent as the result. This function does not return. When the
    parent closes the connection, the process ends with ``os._exit``, which skips exit handlers.
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
            except (UserError, RunError) as error:
                result = error
            except Exception as error:
                said = f"{type(error).__name__}: {to_one_line(error)}"
                result = RunError(
                    f"data.source: a tokenization process failed ({said}); check the data and the tokenizer"
                )
            connection.send(result)
    except (EOFError, OSError):  # the parent process is finished or dead
        os._exit(0)
