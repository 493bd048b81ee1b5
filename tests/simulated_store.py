"""An object store of any size that holds nothing: ``simulated://100000x10e9/*.jsonl``.

A bucket ``<N>x<B>`` has N objects of B bytes. Every line is a record of 256 bytes that names its object and
its place, computed when it is read. The store counts requests and bytes, and answers after ``LATENCY``.
"""

from __future__ import annotations

import json
import time

from converters.storage.object_store import BUCKETS, Bucket, Object

LINE = 256
LATENCY = 0.0  # seconds of a request


class SimulatedStore(Bucket):
    requests = 0
    bytes_out = 0

    def _ask(self) -> None:
        SimulatedStore.requests += 1
        time.sleep(LATENCY)

    def below(self, key: str, where: object) -> dict[str, Object]:
        """All objects; stores list them a thousand at a time."""
        count = int(self.name.partition("x")[0])
        for _page in range(0, count, 1000):
            self._ask()
        return {f"{number:06}.jsonl": self._object(number) for number in range(count)}

    def entries(self, key: str, where: object) -> dict[str, tuple[bool, Object]]:
        return {} if key else {name: (False, found) for name, found in self.below(key, where).items()}

    def head(self, key: str, where: object) -> Object:
        self._ask()
        if not key.endswith(".jsonl"):
            raise FileNotFoundError(key)
        return self._object(int(key.removesuffix(".jsonl")))

    def _object(self, number: int) -> Object:
        size = int(float(self.name.partition("x")[2])) // LINE * LINE
        return Object(size, str(number))

    def range(self, key: str, start: int, stop: int, where: object) -> bytes:
        self._ask()
        number = int(key.removesuffix(".jsonl"))
        lines = (_line(number, at) for at in range(start // LINE, -(-stop // LINE)))
        SimulatedStore.bytes_out += stop - start
        return b"".join(lines)[start % LINE :][: stop - start]


def _line(number: int, at: int) -> bytes:
    return json.dumps({"text": f"object {number} line {at}"}).ljust(LINE - 1).encode() + b"\n"


BUCKETS["simulated"] = SimulatedStore
