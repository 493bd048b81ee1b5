"""An object store of any size that holds nothing: ``simulated://100000x10e9/*.jsonl``.

A folder ``<N>x<B>`` has N objects of B bytes. Every line is a record of 256 bytes that names its object and
its place, computed when it is read. The store counts requests and bytes, and answers after ``LATENCY``.
"""

from __future__ import annotations

import json
import time
from typing import Any

import fsspec
from fsspec import AbstractFileSystem

LINE = 256
LATENCY = 0.0  # seconds of a request


class SimulatedStore(AbstractFileSystem):  # type: ignore[misc]
    protocol = "simulated"
    requests = 0
    bytes_out = 0

    def _ask(self) -> None:
        SimulatedStore.requests += 1
        time.sleep(LATENCY)

    def _entry(self, folder: str, number: int) -> dict[str, Any]:
        size = int(float(folder.partition("x")[2])) // LINE * LINE
        return {"name": f"{folder}/{number:06}.jsonl", "size": size, "type": "file", "ETag": str(number)}

    def find(self, path: str, **_: Any) -> dict[str, dict[str, Any]]:
        """All objects; stores list them a thousand at a time."""
        folder = path.partition("/")[0]
        count = int(folder.partition("x")[0])
        for _page in range(0, count, 1000):
            self._ask()
        entries = (self._entry(folder, number) for number in range(count))
        return {entry["name"]: entry for entry in entries}

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        self._ask()
        folder, *names = path.split("/", 1)
        if not names:
            return {"name": folder, "size": 0, "type": "directory"}
        return self._entry(folder, int(names[0].removesuffix(".jsonl")))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        self._ask()
        begin = start or 0
        stop = int(self.info(path)["size"]) if end is None else end
        number = int(path[-12:].removesuffix(".jsonl"))
        lines = (_line(number, at) for at in range(begin // LINE, -(-stop // LINE)))
        SimulatedStore.bytes_out += stop - begin
        return b"".join(lines)[begin % LINE :][: stop - begin]


def _line(number: int, at: int) -> bytes:
    return json.dumps({"text": f"object {number} line {at}"}).ljust(LINE - 1).encode() + b"\n"


fsspec.register_implementation("simulated", SimulatedStore, clobber=True)
