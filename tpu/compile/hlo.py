"""Parse a compiled HLO module into computations and instructions, in the order of the schedule."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portable.tpu.compile.messages import xla_messages

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

HOST_MEMORY = 5
"""Number of the host's memory space. 0 is HBM, and 1 is the vector memory of a core."""
_PACKAGES = re.compile(r"^.*/(?:site|dist)-packages/")
_REPOSITORY_PREFIX = f"{Path(__file__).parents[3]}/"
# Name and number of bits of each element type, keyed by its number in xla_data.proto. Types without a size,
# such as tokens, are omitted.
_ELEMENT_TYPES = {
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
    23: ("f8e4m3b11fnuz", 8),
    24: ("f8e5m2fnuz", 8),
    25: ("f8e4m3fnuz", 8),
    26: ("s2", 2),
    27: ("u2", 2),
    28: ("f8e4m3", 8),
    29: ("f8e3m4", 8),
    30: ("s1", 1),
    31: ("u1", 1),
    32: ("f4e2m1fn", 4),
    33: ("f8e8m0fnu", 8),
}


@dataclass(frozen=True)
class HloArray:
    """Type, shape and memory space of an array.

    Attributes:
        element_type: Name of the element type, such as ``bf16``.
        dimensions: Size of each dim.
        element_bits: Number of bits per element.
        memory_space: Number of the memory space that contains the array. 0 is HBM.
    """

    element_type: str
    dimensions: tuple[int, ...]
    element_bits: int
    memory_space: int

    @property
    def num_elements(self) -> int:
        """Number of elements in the array."""
        return math.prod(self.dimensions)

    @property
    def size_bytes(self) -> int:
        """Size in bytes, without padding."""
        return -(-self.num_elements * self.element_bits // 8)

    def __str__(self) -> str:
        return f"{self.element_type}[{','.join(map(str, self.dimensions))}]"


class HloInstruction:
    """Instruction in a computation.

    Args:
        message: Underlying ``HloInstructionProto``. Its fields are attributes of this object.
    """

    def __init__(self, message: Any) -> None:
        self.message = message
        self.opcode: str = message.opcode

    def __getattr__(self, name: str) -> Any:
        return getattr(self.message, name)

    @cached_property
    def result_arrays(self) -> list[HloArray]:
        """Arrays in the instruction's result: usually one, several for a tuple, none for a token."""
        return list(_iter_shape_arrays(self.message.shape))

    @property
    def result_bytes(self) -> int:
        """Size of the result in bytes."""
        return sum(array.size_bytes for array in self.result_arrays)

    def get_constant_integer(self) -> int | None:
        """Return the value of a constant with one 32-bit or 64-bit integer.

        The result is None for other instructions and for other constants, such as 8-bit integers.
        """
        literal = self.message.literal
        numbers = [*literal.s32s, *literal.s64s, *literal.u32s, *literal.u64s]
        return int(numbers[0]) if self.opcode == "constant" and len(numbers) == 1 else None

    def get_operation_name(self) -> str:
        """Return the model operation that the instruction implements.

        Empty if the compiler did not keep the name.
        """
        return str(self.message.metadata.op_name)

    def get_source_location(self) -> str:
        """Return the source location of this operation, such as ``models/llama.py:12``.

        This is the line of the model's code that produced the operation. The result is an empty
        string if the compiler did not keep the location.
        """
        metadata = self.message.metadata
        return (
            f"{strip_package_prefix(metadata.source_file)}:{metadata.source_line}"
            if metadata.source_file
            else ""
        )

    def get_group_size(self, num_devices: int) -> int:
        """Return the number of devices in each group of a collective.

        Args:
            num_devices: Total number of devices, which is returned if the instruction does not define
                groups.
        """
        listed = self.message.device_list
        groups = (*self.message.replica_groups, *listed.replica_groups)
        first = len(groups[0].replica_ids) if groups else 0
        return listed.iota.num_devices_per_group or first or num_devices


class HloComputation:
    """Computation in a module, with its instructions in execution order.

    Args:
        message: ``HloComputationProto`` to parse.
        schedule: Scheduled order of the instruction IDs. None to keep the order in ``message``.

    Attributes:
        by_id: Instructions of the computation, keyed by ID.
        root: Instruction that computes the result of the computation.
        instructions: Instructions in execution order.
    """

    def __init__(self, message: Any, schedule: Sequence[int] | None) -> None:
        listed: dict[int, HloInstruction] = {
            instruction.id: HloInstruction(instruction) for instruction in message.instructions
        }
        self.by_id = listed
        self.root = listed[message.root_id]
        self.instructions = list(listed.values()) if schedule is None else [listed[i] for i in schedule]

    def get_operands(self, instruction: HloInstruction) -> list[HloInstruction]:
        """Return the instructions that compute the operands of ``instruction``."""
        return [self.by_id[operand] for operand in instruction.operand_ids]

    def count_operand_bytes(self, instruction: HloInstruction) -> int:
        """Return the total size of the operands of ``instruction`` in bytes."""
        return sum(operand.result_bytes for operand in self.get_operands(instruction))


class HloModule:
    """HLO module, parsed into computations.

    Args:
        data: Serialized ``HloModuleProto``.

    Attributes:
        computations: Computations of the module, keyed by ID.
        entry: Entry computation, with which execution begins.
    """

    def __init__(self, data: bytes) -> None:
        message = xla_messages.HloModuleProto.FromString(data)
        schedules = {
            schedule.computation_id: schedule.sequence.instruction_ids
            for schedule in message.schedule.sequences
        }
        self.computations: dict[int, HloComputation] = {
            computation.id: HloComputation(computation, schedules.get(computation.id))
            for computation in message.computations
        }
        self.entry = self.computations[message.entry_computation_id]

    def get_called_computations(self, instruction: HloInstruction) -> list[HloComputation]:
        """Return the computations that ``instruction`` calls.

        For a while loop, the result contains first its body and then its condition.
        """
        return [self.computations[number] for number in instruction.called_computation_ids]

    def find_trip_count(self, loop: HloInstruction, computation: HloComputation) -> int | None:
        """Find the number of iterations of a while loop.

        Supports loops with an integer counter that starts at a constant and is incremented by a
        constant. The loop must continue while the counter is less than a constant. Loops that count
        down or compare with ``<=`` are not supported.

        Args:
            loop: While instruction.
            computation: Computation that contains the loop.

        Returns:
            The number of iterations, or None for other loops.
        """
        body, condition = self.get_called_computations(loop)
        compare = condition.root
        scope = condition
        if compare.opcode == "fusion":
            (scope,) = self.get_called_computations(compare)
            outer = condition.get_operands(compare)
            compare = scope.root
        else:
            outer = []
        if compare.opcode != "compare":
            return None
        left_operand, right_operand = (
            self._resolve_fusion_parameter(side, scope, outer) for side in scope.get_operands(compare)
        )
        for counter, bound, direction in (
            (left_operand, right_operand, "LT"),
            (right_operand, left_operand, "GT"),
        ):
            if counter.opcode == "get-tuple-element" and compare.comparison_direction == direction:
                end = bound.get_constant_integer()
                start = _find_initial_integer(
                    computation, computation.get_operands(loop)[0], counter.tuple_index
                )
                step = _find_counter_step(body, counter.tuple_index)
                if end is not None and start is not None and step is not None and step > 0:
                    return max(0, -(-(end - start) // step))
        return None

    @staticmethod
    def _resolve_fusion_parameter(
        instruction: HloInstruction, scope: HloComputation, outer: list[HloInstruction]
    ) -> HloInstruction:
        """Resolve a parameter of a fused computation to the corresponding operand of the fusion.

        Other instructions are returned unchanged.

        Args:
            instruction: Instruction in ``scope``.
            scope: Fused computation.
            outer: Operands of the fusion. Empty if ``scope`` is not a fused computation.
        """
        if instruction.opcode == "parameter" and outer:
            instruction = outer[instruction.parameter_number]
        return instruction


def strip_package_prefix(file: str) -> str:
    """Return the path of a source file relative to ``site-packages`` or to this project's repository.

    Other paths are returned unchanged.
    """
    return _PACKAGES.sub("", file).removeprefix(_REPOSITORY_PREFIX)


def _find_initial_integer(scope: HloComputation, tuple_: HloInstruction, index: int) -> int | None:
    """Return the initial value of element ``index`` in a loop's tuple, or None if it is not a constant.

    Args:
        scope: Computation that contains the tuple.
        tuple_: Instruction that builds the initial tuple.
        index: Index of the element.
    """
    if tuple_.opcode != "tuple":
        return None
    value = scope.get_operands(tuple_)[index]
    while value.opcode in ("copy", "bitcast", "convert"):
        (value,) = scope.get_operands(value)
    return value.get_constant_integer()


def _find_counter_step(body: HloComputation, index: int) -> int | None:
    """Return the constant that a loop body adds to element ``index`` of its tuple.

    If the body adds several constants, for example because the compiler has unrolled the loop,
    returns their sum. Returns None if the new value of the element is not the sum of its previous
    value and constant integers.
    """
    if body.root.opcode != "tuple":
        return None
    value, step = body.get_operands(body.root)[index], 0
    while value.opcode in ("add", "copy", "bitcast"):
        terms = [(operand, operand.get_constant_integer()) for operand in body.get_operands(value)]
        step += sum(number for _, number in terms if number is not None)
        others = [operand for operand, number in terms if number is None]
        if len(others) != 1:
            return None
        (value,) = others
    if value.opcode != "get-tuple-element" or value.tuple_index != index:
        return None
    (source,) = body.get_operands(value)
    return step if source.opcode == "parameter" else None


def _iter_shape_arrays(shape: Any) -> Iterator[HloArray]:
    """Yield the arrays in a shape, which may be a nested tuple.

    Shapes whose element type is not in ``_ELEMENT_TYPES``, such as tokens, are omitted.
    """
    for tuple_shape in shape.tuple_shapes:
        yield from _iter_shape_arrays(tuple_shape)
    if shape.element_type in _ELEMENT_TYPES:
        name, bits = _ELEMENT_TYPES[shape.element_type]
        yield HloArray(name, tuple(shape.dimensions), bits, shape.layout.memory_space)
