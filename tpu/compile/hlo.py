"""A compiled HLO module: its computations in the order of the schedule, as far as a report needs them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from tpu.compile.protobuf import Message

if TYPE_CHECKING:
    from collections.abc import Iterator

HOST_MEMORY = 5
"""The memory space of a shape's layout that is the host's. 0 is HBM, 1 a core's vector memory."""
_TUPLE = 13
_PACKAGES = re.compile(r"^.*/(?:site|dist)-packages/")
_HERE = f"{Path(__file__).parents[2]}/"
# Element type -> its name and bits (xla_data.proto). Types without a size, such as tokens, are left out.
_TYPES = {
    1: ("pred", 8),
    2: ("s8", 8),
    3: ("s16", 16),
    4: ("s32", 32),
    5: ("s64", 64),
    6: ("u8", 8),
    7: ("u16", 16),
    8: ("u32", 32),
    9: ("u64", 64),
    10: ("f16", 16),
    11: ("f32", 32),
    12: ("f64", 64),
    15: ("c64", 64),
    16: ("bf16", 16),
    18: ("c128", 128),
    19: ("f8e5m2", 8),
    20: ("f8e4m3fn", 8),
    21: ("s4", 4),
    22: ("u4", 4),
}


@dataclass(frozen=True)
class Array:
    """The shape of an array."""

    type: str
    dimensions: tuple[int, ...]
    bits: int
    memory: int
    """The memory space in which it lies."""

    @property
    def elements(self) -> int:
        return math.prod(self.dimensions)

    @property
    def bytes(self) -> int:
        return -(-self.elements * self.bits // 8)

    def __str__(self) -> str:
        return f"{self.type}[{','.join(map(str, self.dimensions))}]"


class Instruction:
    """One instruction of a computation."""

    def __init__(self, message: Message) -> None:
        self._message = message
        self.id = message.number(35)
        self.name = message.text(1)
        self.opcode = message.text(2)

    @cached_property
    def operands(self) -> list[int]:
        """The ids of its operands."""
        return self._message.numbers(36)

    @cached_property
    def called(self) -> list[int]:
        """The ids of the computations that it calls."""
        return self._message.numbers(38)

    @cached_property
    def arrays(self) -> list[Array]:
        """The arrays of its result; several if that is a tuple."""
        return list(_arrays(self._message.message(3)))

    @property
    def bytes(self) -> int:
        return sum(array.bytes for array in self.arrays)

    @property
    def channel(self) -> int:
        return self._message.number(26)

    @property
    def target(self) -> str:
        """What a custom call calls."""
        return self._message.text(28)

    @property
    def crosses_to_host(self) -> bool:
        """Whether a send or receive is one with the host."""
        return bool(self._message.number(47))

    @property
    def config(self) -> memoryview:
        """What the backend notes, as JSON."""
        return self._message.bytes(43)

    @property
    def index(self) -> int:
        """Which element of a tuple a get-tuple-element takes."""
        return self._message.number(13)

    @property
    def parameter(self) -> int:
        """Which parameter of its computation this is."""
        return self._message.number(9)

    @property
    def direction(self) -> str:
        """LT, GE, ... of a comparison."""
        return self._message.text(63)

    def integer(self) -> int | None:
        """The value of a constant that is one integer; None for any other instruction."""
        if self.opcode != "constant":
            return None
        literal = self._message.message(8)
        found = [*literal.numbers(4), *literal.numbers(5), *literal.numbers(6), *literal.numbers(7)]
        if len(found) != 1:
            return None
        return found[0] - (1 << 64) if found[0] >> 63 else found[0]

    @property
    def window(self) -> Message:
        """The window of a convolution."""
        return self._message.message(15)

    @property
    def axes(self) -> Message:
        """The dimension numbers of a convolution."""
        return self._message.message(16)

    def operation(self) -> str:
        """The operation of the model that it comes from; empty where the compiler has not kept it."""
        return self._message.message(7).text(2)

    def source(self) -> str:
        """The place in the model's code: ``models/llama.py:12``; empty as above."""
        metadata = self._message.message(7)
        file, line = metadata.text(3), metadata.number(4)
        return f"{short(file)}:{line}" if file else ""

    def group_size(self, devices: int) -> int:
        """The devices that take part in a collective with each other."""
        listed = self._message.message(87)
        iota = listed.message(2)
        if size := iota.number(2):
            return size
        for group in (*self._message.messages(49), *listed.messages(1)):
            return len(group.numbers(1)) or devices
        return devices


class Computation:
    """Instructions in the order in which they run."""

    def __init__(self, message: Message, schedule: list[int] | None) -> None:
        self.name = message.text(1)
        self.fused = bool(message.number(7))
        listed = {found.id: found for found in map(Instruction, message.messages(2))}
        self.by_id = listed
        self.root = listed[message.number(6)]
        self.instructions = list(listed.values()) if schedule is None else [listed[i] for i in schedule]

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """The instructions whose results ``instruction`` takes."""
        return [self.by_id[operand] for operand in instruction.operands]

    def operand_bytes(self, instruction: Instruction) -> int:
        """Bytes of all operands of ``instruction``."""
        return sum(operand.bytes for operand in self.operands(instruction))


class Module:
    """A module of HLO.

    Args:
        data: a serialized ``HloModuleProto``.
    """

    def __init__(self, data: bytes) -> None:
        message = Message(data)
        schedules = {entry.number(1): entry.message(2).numbers(1) for entry in message.message(7).messages(1)}
        self.computations: dict[int, Computation] = {}
        for found in message.messages(3):
            number = found.number(5)
            self.computations[number] = Computation(found, schedules.get(number))
        self.entry = self.computations[message.number(6)]

    def called(self, instruction: Instruction) -> list[Computation]:
        """The computations that ``instruction`` calls."""
        return [self.computations[number] for number in instruction.called]

    def trips(self, loop: Instruction, within: Computation) -> int | None:
        """How often the body of a while runs; None where that is not written in the module.

        Counters that start at a constant, grow by a constant and are compared with one are understood.
        """
        body, condition = self.called(loop)
        compare = condition.root
        scope = condition
        if compare.opcode == "fusion":
            (scope,) = self.called(compare)
            outer = condition.operands(compare)
            compare = scope.root
        else:
            outer = []
        if compare.opcode != "compare":
            return None
        left, right = (self._behind(side, scope, outer) for side in scope.operands(compare))
        for counter, bound, direction in ((left, right, "LT"), (right, left, "GT")):
            if counter.opcode == "get-tuple-element" and compare.direction == direction:
                end = bound.integer()
                start = _element(within, within.operands(loop)[0], counter.index)
                step = _step(body, counter.index)
                if end is not None and start is not None and step:
                    return max(0, -(-(end - start) // step))
        return None

    @staticmethod
    def _behind(found: Instruction, scope: Computation, outer: list[Instruction]) -> Instruction:
        """``found``, or what a fusion's parameter stands for."""
        if found.opcode == "parameter" and outer:
            return outer[found.parameter]
        return found


def short(file: str) -> str:
    """The path of a source file from its package on."""
    return _PACKAGES.sub("", file).removeprefix(_HERE)


def _element(scope: Computation, tuple_: Instruction, index: int) -> int | None:
    """The integer that an element of a tuple holds from the start."""
    if tuple_.opcode != "tuple":
        return None
    found = scope.operands(tuple_)[index]
    while found.opcode in ("copy", "bitcast", "convert"):
        (found,) = scope.operands(found)
    return found.integer()


def _step(body: Computation, index: int) -> int | None:
    """The constant that a loop's body adds to an element of its tuple."""
    if body.root.opcode != "tuple":
        return None
    added = body.operands(body.root)[index]
    while added.opcode in ("copy", "bitcast"):
        (added,) = body.operands(added)
    if added.opcode != "add":
        return None
    return next((v for v in (operand.integer() for operand in body.operands(added)) if v is not None), None)


def _arrays(shape: Message) -> Iterator[Array]:
    kind = shape.number(2)
    if kind == _TUPLE:
        for part in shape.messages(4):
            yield from _arrays(part)
    elif kind in _TYPES:
        name, bits = _TYPES[kind]
        yield Array(name, tuple(shape.numbers(3)), bits, shape.message(5).number(8))
