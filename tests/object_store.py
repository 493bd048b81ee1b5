"""A real S3 server on loopback, behind a proxy that counts requests and fails on demand.

The server is moto's; the client is the real one (obstore), over HTTP. `AWS_ENDPOINT_URL` is the address of
the proxy, so a test sees every request and can answer some of them with errors:

    def test_x(s3: ObjectStore) -> None:
        s3.fail(status=503, method="PUT", every=3)
        run(["portable-convert", s3.url("src"), s3.url("out")], env={**os.environ, **s3.environment})
        assert s3.bytes_out("src/model.safetensors") < 1_000_000
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.answers import Answers, serving

# Recognizable, so that a test can look for them in everything that was printed.
ACCESS_KEY, SECRET_KEY = "AKIAOBJECTSTORE00001", "wJalrXUtnFEMI-recognizable-secret-Key0"
LEAST_PART = (5 << 20) // 16
"""Minimum size of a part, scaled down like in `scale_down`. S3 needs 5 MiB per part except for the last."""
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "content-length"}
_ERRORS = {400: "BadRequest", 403: "AccessDenied", 500: "InternalError", 503: "SlowDown"}


def scale_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scale the sizes of the converter down to a sixteenth, like `LEAST_PART`, and shorten its waits.

    2 MB then need the same number of requests, parts, runs and blocks as 32 MB do otherwise.
    """
    from portable.converters.storage import object_store as remote
    from portable.converters.storage import range_reader as remote_file
    from portable.converters.tensors import casting
    from portable.converters.writers import conversion as writing

    sizes = {
        remote: ["PART_BYTES"],
        remote_file: ["RUN_BYTES", "DATA_BYTES", "HEADER_BYTES", "CACHE_BYTES"],
        writing: ["BLOCK_BYTES", "FLUSH_BYTES"],
    }
    for module, names in sizes.items():
        for name in names:
            monkeypatch.setattr(module, name, getattr(module, name) // 16)
    monkeypatch.setattr(remote, "FIRST_RETRY_WAIT", remote.FIRST_RETRY_WAIT / 16)
    assert casting.iter_cast_blocks.__defaults__ == (casting.BLOCK_BYTES,)
    monkeypatch.setattr(casting.iter_cast_blocks, "__defaults__", (casting.BLOCK_BYTES // 16,))


class Request(NamedTuple):
    """One request that reached the proxy.

    Attributes:
        method: HTTP method.
        key: Bucket and object, percent-decoded: `bucket/a/b`.
        query: Query string.
        span: The `Range` header, or an empty string.
        sent: Bytes of the body of the request.
        received: Bytes of the body of the answer that were passed to the client.
        status: Status of the answer, or 0 if the connection was dropped.
    """

    method: str
    key: str
    query: str
    span: str
    sent: int
    received: int
    status: int


@dataclass
class Fault:
    """A fault of every `every`-th request that matches, at most `times` times.

    Attributes:
        status: Status of an answer without the server, or 0 for none.
        drop: Whether to close the connection without an answer.
        cut: Whether to close the connection after the first half of the answer's body.
        delay: Seconds to wait before the answer.
        after: Whether the server handles the request before the failure, so that the answer is lost.
    """

    status: int = 0
    drop: bool = False
    cut: bool = False
    delay: float = 0.0
    after: bool = False
    method: str = ""
    key: str = ""
    query: str = ""
    every: int = 1
    times: int = 1 << 60
    seen: int = field(default=0, init=False)
    done: int = field(default=0, init=False)

    def applies(self, method: str, key: str, query: str) -> bool:
        if (self.method and method != self.method) or self.key not in key or self.query not in query:
            return False
        self.seen += 1
        if self.seen % self.every or self.done >= self.times:
            return False
        self.done += 1
        return True


class ObjectStore:
    """The server, its proxy, and the bucket of the running test."""

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import create_backend_app
        from werkzeug.test import Client

        _share_values()
        # Called as a function: a server behind the proxy would pass each byte through two more sockets, and
        # moto's would look through its folders for each request to find out that it is one of S3.
        self._moto: Any = Client(create_backend_app("s3"), use_cookies=False)
        store = self

        class Handler(_Handler):
            owner = store

        self._serving = serving(Handler)
        self._url = self._serving.__enter__()
        self._lock = threading.Lock()
        self._buckets = 0
        self.bucket = ""
        self.requests: list[Request] = []
        self._running: dict[int, bool] = {}
        self.most_at_once = 0
        self.count_alone = 0
        self.rounds = 0
        self.faults: list[Fault] = []

    def close(self) -> None:
        self._serving.__exit__(None, None, None)

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables with which a process reaches the store."""
        return {
            "AWS_ENDPOINT_URL": self._url,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def renew(self) -> None:
        """Create an empty bucket, and reset faults and counts."""
        from moto.moto_api._internal.models import moto_api_backend

        self.faults.clear()
        moto_api_backend.reset()  # it stores all uploads in memory
        self.least_part(LEAST_PART)
        self._buckets += 1
        self.bucket = f"test-{os.getpid()}-{self._buckets}"  # runs in it have folders of that name here
        self._backend.create_bucket(self.bucket, "us-east-1")
        self.requests.clear()

    def least_part(self, nbytes: int) -> None:
        """Set the minimum size of a part of an upload, except for the last part, in this test."""
        from moto.s3 import models

        known: Any = models
        known.S3_UPLOAD_PART_MIN_SIZE = nbytes

    def url(self, path: str = "") -> str:
        """Return the URL of a place in the bucket."""
        return f"s3://{self.bucket}/{path}".rstrip("/")

    def fail(self, **how: Any) -> Fault:
        """Fail from now on as `Fault` describes."""
        fault = Fault(**how)
        with self._lock:
            self.faults.append(fault)
        return fault

    def heal(self) -> None:
        """Remove all faults."""
        with self._lock:
            self.faults.clear()

    def forget(self) -> None:
        """Reset the counts."""
        with self._lock:
            self.requests.clear()
            self.most_at_once = self.count_alone = self.rounds = 0

    @contextmanager
    def counting_overlaps(self) -> Iterator[None]:
        """Count the requests that overlap, the requests that do not overlap, and the rounds.

        The number of rounds is the length of the longest chain in which each request begins after the
        previous request has ended. Any client waits at least this number of times for an answer.
        """
        number = threading.get_ident()
        with self._lock:
            rounds = self.rounds + 1
            overlaps = bool(self._running)
            self._running = {**dict.fromkeys(self._running, True), number: overlaps}
            self.most_at_once = max(self.most_at_once, len(self._running))
        try:
            yield
        finally:
            with self._lock:
                self.count_alone += not self._running.pop(number)
                self.rounds = max(self.rounds, rounds)

    def count(self, method: str = "", key: str = "", query: str = "") -> int:
        """Count the requests since `forget`, by method, and by parts of their key and query."""
        return len(self._matching(method, key, query))

    def bytes_out(self, key: str = "", method: str = "GET") -> int:
        """Return the number of downloaded bytes."""
        return sum(request.received for request in self._matching(method, key, ""))

    def bytes_in(self, key: str = "", method: str = "PUT") -> int:
        """Return the number of uploaded bytes."""
        return sum(request.sent for request in self._matching(method, key, ""))

    def _matching(self, method: str, key: str, query: str) -> list[Request]:
        with self._lock:
            return [
                request
                for request in self.requests
                if (not method or request.method == method) and key in request.key and query in request.query
            ]

    # Straight to the server, neither counted nor failed.

    @property
    def _backend(self) -> Any:
        from moto.core import DEFAULT_ACCOUNT_ID
        from moto.s3.models import s3_backends

        return s3_backends[DEFAULT_ACCOUNT_ID]["aws"]

    def put(self, name: str, data: bytes) -> None:
        self._backend.put_object(self.bucket, name, data)

    def put_tree(self, folder: Path, name: str) -> None:
        """Copy a local folder into the bucket."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.put(f"{name}/{path.relative_to(folder).as_posix()}", path.read_bytes())

    def get(self, name: str) -> bytes:
        return bytes(self._backend.get_object(self.bucket, name).value)

    def delete(self, name: str) -> None:
        self._backend.delete_object(self.bucket, name)

    def names(self, prefix: str = "") -> list[str]:
        """Return the objects whose names begin with `prefix`, without the prefix."""
        known = list(self._backend.get_bucket(self.bucket).keys)
        return sorted(name.removeprefix(prefix) for name in known if name.startswith(prefix))

    def tree(self, prefix: str) -> dict[str, bytes]:
        """Return the content of every object below `prefix`, by relative name."""
        return {name: self.get(f"{prefix}/{name}") for name in self.names(f"{prefix}/")}

    def open_uploads(self) -> list[str]:
        """Return the objects that have an unfinished multipart upload."""
        return sorted(one.key_name for one in self._backend.list_multipart_uploads(self.bucket).values())

    def forward(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        """Let the server answer, through WSGI."""
        passed = {name: value for name, value in headers.items() if name.lower() not in _HOP_BY_HOP}
        answer = self._moto.open(path, method=method, headers=passed, data=body)
        return answer.status_code, list(answer.headers), answer.get_data()

    def note(self, request: Request) -> None:
        with self._lock:
            self.requests.append(request)

    def fault(self, method: str, key: str, query: str) -> Fault | None:
        with self._lock:
            return next((fault for fault in self.faults if fault.applies(method, key, query)), None)


def _share_values() -> None:
    """Keep objects in memory, so that a read of a range copies only this range.

    By default, moto writes objects longer than 5 MB to a temporary file, and reads all of it for each
    request.
    """
    from moto.s3 import models

    key_type: Any = models.FakeKey
    os.environ["MOTO_S3_DEFAULT_KEY_BUFFER_SIZE"] = str(1 << 40)

    def shared(key: Any) -> bytes:
        with key.lock:
            value: bytes = key._value_buffer._file.getvalue()  # no copy, unless it is modified
            return value

    key_type.value = property(shared, key_type.value.fset)


class _Handler(Answers):
    owner: ObjectStore

    def _serve(self) -> None:
        with self.owner.counting_overlaps():
            self._answer()

    def _answer(self) -> None:
        body = self.body()
        path, _, query = self.path.partition("?")
        key = urllib.parse.unquote(path).lstrip("/")
        fault = self.owner.fault(self.command, key, query)
        if fault and fault.delay:
            time.sleep(fault.delay)
            if self._is_left():  # its sender was killed: no part of it may arrive in a later request
                self.close_connection = True
                return
        status, data = 0, b""
        headers: list[tuple[str, str]] = []
        if fault is None or fault.after or not (fault.status or fault.drop):
            status, headers, data = self.owner.forward(self.command, self.path, dict(self.headers), body)
        if fault and fault.status:
            code = _ERRORS.get(fault.status, "InternalError")
            status, headers = fault.status, [("Content-Type", "application/xml")]
            data = f"<Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
        if fault and fault.drop:
            status, data = 0, b""
        cut = bool(fault and fault.cut and data)
        passed = b"" if self.command == "HEAD" else data[: len(data) // 2] if cut else data
        span = self.headers.get("Range") or ""
        self.owner.note(Request(self.command, key, query, span, len(body), len(passed), status))
        self.close_connection = self.close_connection or cut or not status
        if not status:
            return
        try:
            self.send_response_only(status)
            for name, value in headers:
                if name.lower() not in _HOP_BY_HOP:
                    self.send_header(name, value)
            length = {name.lower(): value for name, value in headers}.get("content-length")
            self.send_header(
                "Content-Length", length if self.command == "HEAD" and length else str(len(data))
            )
            self.end_headers()
            self.wfile.write(passed)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _is_left(self) -> bool:
        """Return whether the client has closed its connection."""
        try:
            return bool(select.select([self.connection], [], [], 0)[0]) and not self.connection.recv(
                1, socket.MSG_PEEK
            )
        except ConnectionResetError:
            return True

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve  # noqa: N815
