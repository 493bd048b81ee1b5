"""Notify all ranks when a rank fails.

Each rank keeps a TCP connection to rank 0. When a process ends in any way, the kernel closes its
connection. Rank 0 therefore notices a killed rank immediately, and the other ranks notice the end
of rank 0. Rank 0 decides which rank failed first and notifies all ranks. There are no heartbeats:
nothing is sent while the run is healthy, and a connection stays open even if the process is not
active. A busy or suspended rank is therefore not mistaken for a dead rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from portable.converters.console import print_error
from portable.errors import (
    LAUNCHER_SECONDS,
    NOTICE_SECONDS,
    RUN_ERROR,
    ReportedElsewhereError,
    is_ended_by_launcher,
    to_one_line,
)
from portable.private import torch_internals
from portable.ranks import launch
from portable.terminal import print_status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Self

_STORE_KEY = "portable/peers"
_LOOPBACK = "127.0.0.1"
_CONNECT_SECONDS = 10.0
"""Timeout of a connection attempt in seconds."""
_CONSEQUENCE_SECONDS = 1.0
"""Number of seconds for which rank 0 waits for another failure if the reported failure may be a
consequence of it."""
_ANSWER_SECONDS = 5.0
"""Seconds that a failed rank waits for the answer of rank 0."""
_CLOSE_SECONDS = 60.0
"""Seconds that a main thread may take to close files and connections after it has noticed an error."""
_MAX_BYTES, _MAX_TEXT = 1 << 16, 4000  # bytes of a message, characters of an error
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""TCP keepalive settings: seconds and number of probes until the kernel considers a silent node dead."""


@dataclass(frozen=True)
class PeerFailure:
    """Failure of a rank. Ranks send it to each other as JSON.

    Attributes:
        rank: Rank that failed.
        host: Name of the rank's host.
        code: Exit code for all ranks.
        message: Error on one line. Empty if the process ended without reporting an error.
        certain: Whether the failure is known to originate from this rank. For example, an error in
            a collective is not certain, because the failure of another rank may have caused it.
    """

    rank: int
    host: str
    code: int
    message: str
    certain: bool = True

    def describe(self) -> str:
        """Format the failure as one line with the rank, its host, and its error."""
        message = (
            self.message
            or "the process was killed or has crashed; the log of its node may contain the reason"
        )
        return f"rank {self.rank} on {self.host} failed first: {message}"

    def to_error(self) -> ReportedElsewhereError:
        """Build the error to raise on a rank that did not fail first.

        The rank does not print this error, because the failure is already reported in another way.
        """
        return ReportedElsewhereError(self.message or self.describe(), self.code)


class PeerWatch:
    """Context that ends this process if another rank fails.

    The context has no effect until :meth:`start` is called, after the process group is initialized.
    If the ``with`` block raises an exception other than :class:`ReportedElsewhereError`, the other
    ranks are notified of a failure of this rank.

    After the failure of another rank, the main thread has a grace period to notice the failure
    itself and leave the context. If it does not leave in time, a background thread exits the
    process with the exit code in :class:`PeerFailure`. If the failed process could not print an
    error, the lowest of the remaining ranks prints which rank and host failed. No rank prints this
    if :func:`portable.ranks.launch.launch_ranks` started the ranks, because the launcher then
    prints it.

    Args:
        on_failure: Function that is called in a background thread with the first failure of another
            rank.
    """

    def __init__(self, on_failure: Callable[[PeerFailure], None] = lambda _: None) -> None:
        self._on_failure = on_failure
        self._host = socket.gethostname()
        self._rank = 0
        self._connection: socket.socket | None = None
        self._arbiter: _FailureArbiter | None = None
        self._first_failure: PeerFailure | None = None
        self._answered = threading.Event()
        self._has_left = threading.Event()
        self._main_thread_exits = False

    def start(self) -> Self:
        """Connect to rank 0, and start a thread that waits for the failure of another rank.

        All ranks have to call this method after the default process group is initialized. Rank 0
        also starts the :class:`_FailureArbiter` to which all ranks connect. With a single rank, the
        method does nothing. If rank 0 is not reachable, a warning is printed. This rank then cannot
        report its failures, and is not notified of other failures.

        Returns:
            This object.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return self
        self._rank = dist.get_rank()
        store = torch_internals.get_default_store()
        if self._rank == 0:
            self._arbiter = _FailureArbiter(self._host)
            store.set(_STORE_KEY, json.dumps([self._arbiter.addresses, self._arbiter.token]))
        addresses, token = json.loads(store.get(_STORE_KEY))
        self._connection = _connect_to_rank_0(addresses if self._rank else [[_LOOPBACK, addresses[0][1]]])
        if self._connection is None:
            print_status(
                f"warning: rank {self._rank} cannot connect to rank 0 at {addresses}, so only ranks that "
                "communicate with a failed rank notice its failure; check the firewall between the nodes"
            )
            return self
        hello = {"token": token, "rank": self._rank, "host": self._host}
        self._connection.sendall(_encode_message(hello))
        threading.Thread(target=self._wait_for_first_failure, name="peers", daemon=True).start()
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, ReportedElsewhereError):
            self.report_error(error)
        self.disconnect(others_can_continue=error is None or isinstance(error, Exception))

    def disconnect(self, *, others_can_continue: bool = True) -> None:
        """Close the connection to rank 0.

        Afterward, this rank no longer notices failures of other ranks. If this is rank 0, no rank
        notices failures any longer.

        Args:
            others_can_continue: Whether the other ranks can continue without this rank. If not,
                rank 0 treats the closed connection as a failure of this rank.
        """
        self._has_left.set()
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(OSError):
                if others_can_continue:
                    connection.sendall(_encode_message({"leaves": True}))
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        if self._arbiter is not None:
            self._arbiter.close(others_can_continue=others_can_continue)

    def announce_own_exit(self) -> None:
        """Give the main thread an additional minute to exit after a failure of another rank.

        Without this call, the background thread exits the process after the usual grace period.

        The main thread calls this method if it has noticed an error itself but still has to close
        files and connections.
        """
        self._main_thread_exits = True

    def report_error(self, error: Exception) -> PeerFailure | None:
        """Report an error of this rank to rank 0, and wait up to five seconds for its answer.

        Also calls :meth:`announce_own_exit`. The error is not sent if this rank has already been
        notified of the first failure. An error without the attribute ``exit_code`` may be a
        consequence of another failure, so it is sent with ``certain`` set to False.

        Returns:
            The first failure according to rank 0, possibly of another rank. None if rank 0 does not
            answer, or if there is no connection.
        """
        self.announce_own_exit()
        if self._connection is None or self._first_failure is not None:
            return self._first_failure
        code = getattr(error, "exit_code", RUN_ERROR)
        # Errors without an exit code include errors of collectives whose peer has died.
        certain = hasattr(error, "exit_code")
        name = "" if certain else f"{type(error).__name__}: "
        failure = PeerFailure(
            self._rank, self._host, code, f"{name}{to_one_line(error)[:_MAX_TEXT]}", certain
        )
        with contextlib.suppress(OSError):
            self._connection.sendall(_encode_message({"failure": asdict(failure)}))
        self._answered.wait(_ANSWER_SECONDS)
        return self._first_failure

    @property
    def failed_first(self) -> bool:
        """Whether rank 0 has decided that this rank failed first."""
        return self._first_failure is not None and self._first_failure.rank == self._rank

    def _wait_for_first_failure(self) -> None:
        """Wait until a rank fails. If another rank has failed, exit this process.

        This method runs in a thread. It returns without an exit if this rank failed first, or if
        rank 0 announces that it has finished. If the connection to rank 0 ends unexpectedly, rank 0
        counts as failed.

        Before the exit, the main thread has some time to leave the ``with`` block of this object or
        to call :meth:`disconnect`. If it does so, this method does not exit the process. The time
        is usually one second. It is five seconds if the launcher ends all ranks as soon as one rank
        exits. After a call of :meth:`announce_own_exit`, the main thread has an additional minute.
        """
        connection = self._connection
        assert connection is not None
        peer = "" if self._rank == 0 else connection.getpeername()[0]
        for message in _iter_messages(connection):
            if "host" in message:
                peer = message["host"]
            elif "leaves" in message:  # rank 0 has finished, and no longer needs the other ranks
                return
            elif "failure" in message:
                self._first_failure = PeerFailure(**message["failure"])
                break
        else:
            if self._has_left.is_set():
                return
            self._first_failure = PeerFailure(0, peer, RUN_ERROR, "")
        self._answered.set()
        if self._first_failure.rank == self._rank or self._has_left.is_set():
            return
        self._on_failure(self._first_failure)
        prints = (
            self._rank == (1 if self._first_failure.rank == 0 else 0) and not launch.is_launched_by_portable()
        )
        if prints and not self._first_failure.message:
            print_error(f"error: {self._first_failure.describe()}")
        # Let the failed rank exit first, so that launchers report that rank instead of this one.
        if self._has_left.wait(LAUNCHER_SECONDS if is_ended_by_launcher() else NOTICE_SECONDS):
            return
        # Wait longer for a main thread that has noticed an error, because it may still be closing the output
        # and the process group.
        if not (self._main_thread_exits and self._has_left.wait(_CLOSE_SECONDS)):
            if sys.stdout is not None:  # None if it was closed at start-up
                sys.stdout.flush()
            os._exit(self._first_failure.code)


class _FailureArbiter:
    """Thread of rank 0 that accepts connections and decides which rank failed first.

    The constructor opens a TCP port and starts the thread. Processes on other machines cannot
    connect if ``MASTER_ADDR`` is ``localhost``, ``127.0.0.1`` or ``::1``.

    Args:
        host: Name of rank 0's host.
    """

    def __init__(self, host: str) -> None:
        address = os.environ.get("MASTER_ADDR", host)
        local = address in ("localhost", _LOOPBACK, "::1")
        # If all ranks are local, listen only on the loopback address, so that other machines cannot connect.
        family = socket.AF_INET if local or not socket.has_dualstack_ipv6() else socket.AF_INET6
        self._listener = socket.create_server(
            (_LOOPBACK if local else "", 0),
            family=family,
            backlog=4096,
            dualstack_ipv6=family == socket.AF_INET6,
        )
        port = self._listener.getsockname()[1]
        names = [_LOOPBACK] if local else list(dict.fromkeys([address, host]))
        self.addresses: list[list[Any]] = [[name, port] for name in names]
        """Host and port pairs of rank 0, which the other ranks try in order."""
        self.token = secrets.token_hex(16)
        """Secret that each rank reads from the store and sends first. Connections without it are closed."""
        self._host = host
        self._ranks_and_hosts: dict[socket.socket, tuple[int, str]] = {}
        self._incomplete_lines: dict[socket.socket, bytes] = {}
        self._failures: list[PeerFailure] = []
        self._decide_at = float("inf")
        self._decided = False
        self._closed = False
        self._others_can_continue = True
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve_connections, name="peers-of-all", daemon=True)
        self._thread.start()

    def close(self, *, others_can_continue: bool) -> None:
        """Notify all ranks that rank 0 leaves, and stop the background thread of this object.

        Args:
            others_can_continue: Whether the other ranks can continue without rank 0. If not, they are
                notified of a failure of rank 0, unless another failure was announced before.
        """
        self._others_can_continue = others_can_continue
        self._closed = True
        with contextlib.suppress(OSError):
            self._wake_sender.send(b"\0")
        self._thread.join(timeout=5)

    def _serve_connections(self) -> None:
        """Accept connections and read messages until :meth:`close` is called.

        Runs in a thread. It also announces the first failure when the time for this decision has
        come. After :meth:`close`, it notifies the other ranks that rank 0 leaves, if they can
        continue. Otherwise, it announces a failure of rank 0, unless a failure was announced
        before. Finally, it closes all sockets.
        """
        while not self._closed:
            wait = None if self._decide_at == float("inf") else max(0.0, self._decide_at - time.monotonic())
            for key, _ in self._selector.select(wait):
                if key.fileobj is self._listener:
                    try:
                        connection, _ = self._listener.accept()
                        _enable_keepalive(connection)
                    except OSError:  # the other side has already closed the connection
                        continue
                    self._incomplete_lines[connection] = b""
                    self._selector.register(connection, selectors.EVENT_READ)
                elif key.fileobj is not self._wake_receiver:
                    self._read_messages(key.fileobj)  # type: ignore[arg-type]
            if time.monotonic() >= self._decide_at:
                self._decide_at = float("inf")
                self._announce_first_failure()
        if self._others_can_continue:
            self._send_to_all({"leaves": True})
        elif not self._decided:
            self._failures.append(PeerFailure(0, self._host, RUN_ERROR, ""))
            self._announce_first_failure()
        for connection in (*self._incomplete_lines, self._listener, self._wake_receiver, self._wake_sender):
            connection.close()
        self._selector.close()

    def _read_messages(self, connection: socket.socket) -> None:
        """Read and handle the available messages from a connection.

        The connection is closed if the rank has closed it or announces its exit, or if a message is
        invalid or too long. If an authenticated rank has not announced its exit, a closed
        connection is recorded as a failure of the rank.
        """
        try:
            data = connection.recv(_MAX_BYTES)
        except OSError:
            data = b""
        *lines, rest = (self._incomplete_lines[connection] + data).split(b"\n")
        self._incomplete_lines[connection] = rest
        for line in lines:
            if not self._handle_message(connection, line):
                data = b""
        if data and len(rest) < _MAX_BYTES:
            return
        self._selector.unregister(connection)
        del self._incomplete_lines[connection]
        connection.close()
        if (ended := self._ranks_and_hosts.pop(connection, None)) is not None:
            self._add_failure(PeerFailure(*ended, RUN_ERROR, ""))

    def _handle_message(self, connection: socket.socket, line: bytes) -> bool:
        """Handle a message from a rank.

        A rank's first message contains the secret ``token``, which authenticates the rank. Later
        messages report a failure, or announce that the rank exits.

        Args:
            connection: Connection from which the message was received.
            line: Message, as one line of JSON.

        Returns:
            Whether to keep the connection open. False if the message is invalid, or if the rank
            exits.
        """
        try:
            message = json.loads(line)
            return isinstance(message, dict) and self._handle_fields(connection, message)
        except (ValueError, TypeError, KeyError, RecursionError):  # anyone can send anything to the port
            return False

    def _handle_fields(self, connection: socket.socket, message: dict[str, Any]) -> bool:
        """Handle the fields of a message. See :meth:`_handle_message`.

        Raises:
            ValueError, TypeError, KeyError: If a field is missing or invalid.
        """
        if connection not in self._ranks_and_hosts:
            token = str(message.get("token", "")).encode(errors="replace")
            if not secrets.compare_digest(token, self.token.encode()):
                return False
            self._ranks_and_hosts[connection] = (int(message["rank"]), str(message["host"]))
            _send_message(connection, {"host": self._host})
        elif "leaves" in message:
            del self._ranks_and_hosts[connection]
            return False
        elif "failure" in message:
            self._add_failure(PeerFailure(**message["failure"]))
        return True

    def _add_failure(self, failure: PeerFailure) -> None:
        """Record a failure, and schedule the decision about which failure was first.

        If the failure is certain and has a message, the decision is made immediately. Otherwise,
        the decision is delayed by one second, because the failure may be a consequence of another
        failure. A failure after the decision is ignored.
        """
        if self._decided:
            return
        self._failures.append(failure)
        delay = 0.0 if failure.certain and failure.message else _CONSEQUENCE_SECONDS
        self._decide_at = min(self._decide_at, time.monotonic() + delay)

    def _announce_first_failure(self) -> None:
        """Decide which of the recorded failures was the first, and send it to all ranks.

        The first failure is the earliest one with ``certain`` set to True, because all other
        failures may be its consequences. If there is none, it is the earliest recorded failure.
        """
        first = min(self._failures, key=lambda failure: not failure.certain)
        self._decided = True
        self._send_to_all({"failure": asdict(first)})

    def _send_to_all(self, message: dict[str, Any]) -> None:
        for connection in self._ranks_and_hosts:
            _send_message(connection, message)


def _send_message(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send a message, and ignore errors.

    If the connection has ended, the code that reads from it handles this.
    """
    with contextlib.suppress(OSError):
        connection.sendall(_encode_message(message))


def _encode_message(message: dict[str, Any]) -> bytes:
    """Encode a message as one line of JSON."""
    return json.dumps(message).encode() + b"\n"


def _iter_messages(connection: socket.socket) -> Iterator[dict[str, Any]]:
    """Yield the messages that rank 0 sends, until the connection is closed or broken."""
    with contextlib.suppress(OSError, ValueError), connection.makefile("rb") as lines:
        for line in lines:
            yield json.loads(line)


def _connect_to_rank_0(addresses: Sequence[Sequence[Any]]) -> socket.socket | None:
    """Connect to rank 0 at the first of its addresses that can be reached.

    Args:
        addresses: Pairs of a host and a port, in the order in which they are tried.

    Returns:
        The connection. None if no address can be reached.
    """
    for address, port in addresses:
        with contextlib.suppress(OSError):
            connection = socket.create_connection((address, port), timeout=_CONNECT_SECONDS)
            connection.settimeout(None)
            _enable_keepalive(connection)
            return connection
    return None


def _enable_keepalive(connection: socket.socket) -> None:
    """Make the kernel close the connection if the other node stops responding, as after a power loss."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
