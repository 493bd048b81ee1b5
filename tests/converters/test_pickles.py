"""The pickle reader: what it reads, and that nothing can make it run, hang or swell."""

from __future__ import annotations

import collections
import os
import pickle
import random
import struct
from typing import Any

import pytest

from converters import CheckpointError
from converters.pickles import Instance, plain, unpickle
from converters.torchzip import TORCH_STANDINS


def read(data: bytes, **more: Any) -> Any:
    return unpickle(data, where="f.pkl", standins=TORCH_STANDINS, **more)


VALUES: list[Any] = [
    None,
    [1, 255, 256, 65536, -1, 1 << 31, -(1 << 80), 1.5, float("inf"), True, False],
    {"a": (1,), "b": (1, 2), "c": (1, 2, 3), "d": (1, 2, 3, 4), "e": (), 5: {}, (1, "x"): []},
    "x" * 300 + "é\U0001f600",
    b"bytes" * 100,
    list(range(2000)),
    {i: str(i) for i in range(2000)},
    ["same"] * 3 + [["same"]] * 2,
]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("index", range(len(VALUES)))
def test_plain_values(protocol: int, index: int) -> None:
    assert read(pickle.dumps(VALUES[index], protocol)) == VALUES[index]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_containers_by_name(protocol: int) -> None:
    assert read(pickle.dumps(collections.OrderedDict(a=1, b=2), protocol)) == {"a": 1, "b": 2}
    assert read(pickle.dumps(collections.defaultdict(list, a=[1]), protocol)) == {"a": [1]}
    assert set(read(pickle.dumps({3, 4}, protocol))) == {3, 4}
    assert read(pickle.dumps(bytearray(b"ab"), 5)) == b"ab"


def test_cycles_and_depth() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    assert read(pickle.dumps(loop))[1][1][0] == 1
    assert plain(read(pickle.dumps(loop)))[0] == 1
    deep = read(b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".")
    assert isinstance(plain(deep), list)
    del deep


class Evil:
    def __init__(self, call: Any, *args: Any) -> None:
        self.call = call, args

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", [0, 1, 2, 4])
@pytest.mark.parametrize("call", [os.system, eval, exec, getattr, __import__, os.remove, pickle.loads])
def test_nothing_is_called(protocol: int, call: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(pickle.dumps({"x": [Evil(call, "false")]}, protocol))
    assert "f.pkl: " in str(caught.value)
    if protocol >= 1:
        assert call.__name__ in str(caught.value)
        assert "nothing was run" in str(caught.value)


def test_prefixes_make_inert_instances() -> None:
    data = pickle.dumps(Evil(collections.Counter, {"a": 1}))
    made = unpickle(data, where="f", standins={}, prefixes=("collections.",))
    assert isinstance(made, Instance)
    assert made.key == "collections.Counter"
    assert made.args == ({"a": 1},)


BOMBS = {
    "memo index": b"\x80\x02Nr\xff\xff\xff\xff.",
    "long string": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b"x.",
    "long bytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60) + b"x.",
    "long bytearray": b"\x80\x05\x96" + struct.pack("<Q", 1 << 62) + b".",
    "long frame": b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b"N.",
    "long int": b"\x80\x02\x8b" + struct.pack("<I", 1 << 30) + b"\xff" * 100 + b".",
    "bytearray of a size": b"\x80\x02cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R.",
    "hash of nested tuples": b"\x80\x02}K\x01" + b"2\x86" * 60 + b"Ns.",
    "unbalanced": b"\x80\x02NN.",
    "mark": b"\x80\x02(.",
    "empty stack": b"\x80\x02.",
    "empty": b"",
    "no stop": b"\x80\x02N",
    "protocol": b"\x80\x09N.",
    "extension": b"\x80\x02\x82\x01.",
    "buffer": b"\x80\x05\x97.",
    "unhashable": b"\x80\x02}]Ns.",
    "build on a list": b"\x80\x02]}b.",
    "call a string": b"\x80\x02X\x01\x00\x00\x00x)R.",
    "call a result": b"\x80\x02cbuiltins\ndict\n)R)R.",
    "append to a tuple": b"\x80\x02)Na.",
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_at_once(name: str) -> None:
    if name in ("memo index", "long frame"):
        assert read(BOMBS[name]) is None  # the memo is a dict and frames are skipped: neither costs anything
        return
    with pytest.raises(CheckpointError, match=r"^f\.pkl: "):
        read(BOMBS[name])


def test_shared_references_do_not_swell() -> None:
    value: list[Any] = []
    for _ in range(60):
        value = [value, value]
    assert len(str(plain(read(pickle.dumps(value)), limit=1000))) < 100_000


def test_random_mutations_never_escape() -> None:
    rng = random.Random(0)
    good = pickle.dumps([*VALUES[:4], collections.OrderedDict(a=1)], 4)
    for _ in range(3000):
        bad = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            bad[rng.randrange(len(bad))] = rng.randrange(256)
        try:
            read(bytes(bad[: rng.randrange(len(bad) + 1)] if rng.random() < 0.3 else bad))
        except CheckpointError as error:
            assert "\n" not in str(error)
