"""A compiled HLO module: its computations in the order of the schedule, as far as a report needs them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portable.tpu.compile.messages import messages

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

HOST_MEMORY = 5
"""The memory space of a shape's layout that is the host's. 0 is HBM, 1 a core's vector memory."""
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
    """One instruction of a computation.

    Args:
        message: an ``HloInstructionProto``, whose fields it has.
    """

    def __init__(self, message: Any) -> None:
        self.message = message
        self.opcode: str = message.opcode

    def __getattr__(self, name: str) -> Any:
        return getattr(self.message, name)

    @cached_property
    def arrays(self) -> list[Array]:
        """The arrays of its result; several if that is a tuple."""
        return list(_iter_arrays(self.message.shape))

    @property
    def bytes(self) -> int:
        return sum(array.bytes for array in self.arrays)

    def get_integer(self) -> int | None:
        """The value of a constant that is one integer; None for any other instruction."""
        literal = self.message.literal
        numbers = [*literal.s32s, *literal.s64s, *literal.u32s, *literal.u64s]
        return int(numbers[0]) if self.opcode == "constant" and len(numbers) == 1 else None

    def operation(self) -> str:
        """The operation of the model that it comes from; empty where the compiler has not kept it."""
        return str(self.message.metadata.op_name)

    def source(self) -> str:
        """The place in the model's code: ``models/llama.py:12``; empty as above."""
        metadata = self.message.metadata
        return f"{shorten_path(metadata.source_file)}:{metadata.source_line}" if metadata.source_file else ""

    def group_size(self, devices: int) -> int:
        """The devices that take part in a collective with each other."""
        listed = self.message.device_list
        groups = (*self.message.replica_groups, *listed.replica_groups)
        first = len(groups[0].replica_ids) if groups else 0
        return listed.iota.num_devices_per_group or first or devices


class Computation:
    """Instructions in the order in which they run."""

    def __init__(self, message: Any, schedule: Sequence[int] | None) -> None:
        listed: dict[int, Instruction] = {
            instruction.id: Instruction(instruction) for instruction in message.instructions
        }
        self.by_id = listed
        self.root = listed[message.root_id]
        self.instructions = list(listed.values()) if schedule is None else [listed[i] for i in schedule]

    def get_operands(self, instruction: Instruction) -> list[Instruction]:
        """The instructions whose results ``instruction`` takes."""
        return [self.by_id[operand] for operand in instruction.operand_ids]

    def count_operand_bytes(self, instruction: Instruction) -> int:
        """Bytes of all operands of ``instruction``."""
        return sum(operand.bytes for operand in self.get_operands(instruction))


class HloModule:
    """A module of HLO.

    Args:
        data: a serialized ``HloModuleProto``.
    """

    def __init__(self, data: bytes) -> None:
        message = messages.HloModuleProto.FromString(data)
        schedules = {
            schedule.computation_id: schedule.sequence.instruction_ids
            for schedule in message.schedule.sequences
        }
        self.computations: dict[int, Computation] = {
            computation.id: Computation(computation, schedules.get(computation.id))
            for computation in message.computations
        }
        self.entry = self.computations[message.entry_computation_id]

    def get_callees(self, instruction: Instruction) -> list[Computation]:
        """The computations that ``instruction`` calls."""
        return [self.computations[number] for number in instruction.called_computation_ids]

    def count_trips(self, loop: Instruction, within: Computation) -> int | None:
        """How often the body of a while runs; None where that is not written in the module.

        Counters that start at a constant, grow by a constant and are compared with one are understood.
        """
        body, condition = self.get_callees(loop)
        compare = condition.root
        scope = condition
        if compare.opcode == "fusion":
            (scope,) = self.get_callees(compare)
            outer = condition.get_operands(compare)
            compare = scope.root
        else:
            outer = []
        if compare.opcode != "compare":
            return None
        left, right = (self._resolve_parameter(side, scope, outer) for side in scope.get_operands(compare))
        for counter, bound, direction in ((left, right, "LT"), (right, left, "GT")):
            if counter.opcode == "get-tuple-element" and compare.comparison_direction == direction:
                end = bound.get_integer()
                start = _find_initial_integer(within, within.get_operands(loop)[0], counter.tuple_index)
                step = _step(body, counter.tuple_index)
                if end is not None and start is not None and step:
                    return max(0, -(-(end - start) // step))
        return None

    @staticmethod
    def _resolve_parameter(
        instruction: Instruction, scope: Computation, outer: list[Instruction]
    ) -> Instruction:
        """``instruction``, or what a fusion's parameter stands for."""
        if instruction.opcode == "parameter" and outer:
            instruction = outer[instruction.parameter_number]
        return instruction


def shorten_path(file: str) -> str:
    """The path of a source file from its package on."""
    return _PACKAGES.sub("", file).removeprefix(_HERE)


def _find_initial_integer(scope: Computation, tuple_: Instruction, index: int) -> int | None:
    """The integer that an element of a tuple holds from the start."""
    if tuple_.opcode != "tuple":
        return None
    value = scope.get_operands(tuple_)[index]
    while value.opcode in ("copy", "bitcast", "convert"):
        (value,) = scope.get_operands(value)
    return value.get_integer()


def _step(body: Computation, index: int) -> int | None:
    """The constant that a loop's body adds to an element of its tuple."""
    if body.root.opcode != "tuple":
        return None
    added = body.get_operands(body.root)[index]
    while added.opcode in ("copy", "bitcast"):
        (added,) = body.get_operands(added)
    if added.opcode != "add":
        return None
    return next(
        (v for v in (operand.get_integer() for operand in body.get_operands(added)) if v is not None), None
    )


def _iter_arrays(shape: Any) -> Iterator[Array]:
    for part in shape.tuple_shapes:
        yield from _iter_arrays(part)
    if shape.element_type in _TYPES:
        name, bits = _TYPES[shape.element_type]
        yield Array(name, tuple(shape.dimensions), bits, shape.layout.memory_space)
