"""What a compiled module does: its collectives, its largest values, what it asks of the host."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from portable.planner.compiled_graph import Collective, LargeValue
from portable.tpu.compile.hlo import HOST_MEMORY, HloModule

if TYPE_CHECKING:
    from collections.abc import Set

    from portable.tpu.compile.hlo import Computation, Instruction

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
# Instructions that give a name to memory that is there already.
_NO_MEMORY = {"parameter", "bitcast", "get-tuple-element", "tuple", "while", "conditional", "call"}
_HOST = {"infeed", "outfeed"}
_TO_HOST = {"MoveToHost", "MoveToDevice", "annotate_device_placement"}
_COMPUTES = {"convolution", "dot", "while", "sort", "scatter", "gather", "reduce", "reduce-window"}
_CYCLES = re.compile(rb'"estimated_cycles":"(\d+)"')


@dataclass
class Report:
    """What a module does, on one device."""

    collectives: dict[str, Collective] = field(default_factory=dict)
    large_values: tuple[LargeValue, ...] = ()
    custom_calls: dict[str, int] = field(default_factory=dict)
    host_transfers: tuple[str, ...] = ()
    matrix_flops: float = 0.0
    """Of all matrix products, those of loops as often as they run."""
    looped_flops: float = 0.0
    """Matrix FLOPs of loops after their first pass: the compiler's cost analysis counts a body once."""
    looped_bytes: float = 0.0
    """Bytes that they access."""
    unknown_loops: int = 0
    """Loops of unknown length, counted as one pass."""


@dataclass
class _OpenCollective:
    """A collective between its start and its end."""

    kind: str
    collective: Collective


def analyze_module(program: bytes, devices: int, large: int) -> Report:
    """Read a scheduled module.

    Args:
        program: a serialized ``HloModuleProto``.
        devices: that the module is partitioned for.
        large: elements from which a value is listed.
    """
    reader = _ModuleReader(HloModule(program), devices, large)
    reader.read(reader.module.entry, 1)
    return reader.report()


class _ModuleReader:
    def __init__(self, module: HloModule, devices: int, large: int) -> None:
        self.module = module
        self._devices = devices
        self._large = large
        self._sums: dict[str, Collective] = {}
        self._values: Counter[LargeValue] = Counter()
        self._calls: Counter[str] = Counter()
        self._host: dict[str, None] = {}
        self._flops = self._bytes = 0.0
        self._unknown = 0

    def report(self) -> Report:
        values = [replace(value, count=count) for value, count in self._values.items()]
        return Report(
            self._sums,
            tuple(sorted(values, key=lambda value: -value.bytes * value.count)),
            dict(self._calls),
            tuple(self._host),
            self._count_matrix_flops(self.module.entry) + self._flops,
            self._flops,
            self._bytes,
            self._unknown,
        )

    def read(self, computation: Computation, times: int, around: Set[tuple[str, int]] = frozenset()) -> None:
        """Go through a computation in the order of its schedule.

        Args:
            computation: not one of a fusion.
            times: how often it runs.
            around: collectives that are under way where it is called; it may carry them on.
        """
        opened: dict[tuple[str, int], _OpenCollective] = {}
        for instruction in computation.instructions:
            self._count_large_results(instruction, times)
            self._record_host_use(instruction, times)
            if self._read_collective(computation, instruction, opened, times, around):
                continue
            cycles = _read_cycles(instruction)
            if cycles or instruction.opcode in _COMPUTES or instruction.opcode == "fusion":
                for going in opened.values():
                    going.collective = replace(
                        going.collective,
                        overlapped=1,
                        compute_cycles=going.collective.compute_cycles + cycles,
                    )
            self._enter(computation, instruction, times, around | opened.keys())
        for going in opened.values():
            self._add(going, times)

    def _enter(
        self,
        computation: Computation,
        instruction: Instruction,
        times: int,
        around: Set[tuple[str, int]],
    ) -> None:
        if instruction.opcode == "while":
            trips = self.module.count_trips(instruction, computation)
            if trips is None:
                self._unknown += 1
                trips = 1
            body, _ = self.module.get_callees(instruction)
            self._flops += times * (trips - 1) * self._count_matrix_flops(body)
            self._bytes += times * (trips - 1) * _count_accessed_bytes(body)
            self.read(body, times * trips, around)
        elif instruction.opcode in ("call", "conditional"):
            for called in self.module.get_callees(instruction):
                self.read(called, times, around)

    # -- collectives ---------------------------------------------------------------------------------------

    def _read_collective(
        self,
        computation: Computation,
        instruction: Instruction,
        opened: dict[tuple[str, int], _OpenCollective],
        times: int,
        around: Set[tuple[str, int]],
    ) -> bool:
        """Whether an instruction is a collective or a part of one; it may compute beside it."""
        opcode = instruction.opcode
        if opcode.removesuffix("-start") in KINDS:
            starts = opcode.endswith("-start")
            going = self._open_collective(
                computation, instruction, opcode.removesuffix("-start"), asynchronous=starts
            )
            if starts:
                opened["id", instruction.id] = going
            else:
                self._add(going, times)
            return True
        if opcode == "async-start":
            for called in self.module.get_callees(instruction):
                inner = called.root
                if inner.opcode in KINDS:
                    opened["id", instruction.id] = self._open_collective(
                        called, inner, inner.opcode, asynchronous=True
                    )
            return True
        if opcode.endswith("-done"):
            begun = instruction.operand_ids[0]
            while begun in computation.by_id and computation.by_id[begun].opcode == "async-update":
                begun = computation.by_id[begun].operand_ids[0]
            if ("id", begun) in opened:
                self._add(opened.pop(("id", begun)), times)
            return True
        return opcode == "fusion" and self._read_fused_collective(instruction, opened, times, around)

    def _read_fused_collective(
        self,
        instruction: Instruction,
        opened: dict[tuple[str, int], _OpenCollective],
        times: int,
        around: Set[tuple[str, int]],
    ) -> bool:
        """A TPU's own form: one fusion starts a collective, others carry it on beside their computation, one
        ends it. They share the channel."""
        (fused,) = self.module.get_callees(instruction)[:1] or (None,)
        inner = [] if fused is None else [i for i in fused.instructions if i.opcode in KINDS]
        if fused is None or not inner:
            return False
        targets = {i.custom_call_target for i in fused.instructions if i.opcode == "custom-call"}
        collective = inner[0]
        key = "channel", collective.channel_id
        if "AsyncCollectiveStart" in targets:
            opened[key] = self._open_collective(
                fused, collective, _classify_collective(fused, collective), asynchronous=True
            )
        elif "AsyncCollectiveDone" in targets:
            if key in opened:
                self._add(opened.pop(key), times)
        elif key in opened or key in around:
            return False  # carries it on, and computes
        else:
            self._add(
                self._open_collective(
                    fused, collective, _classify_collective(fused, collective), asynchronous=False
                ),
                times,
            )
        return True

    def _open_collective(
        self, computation: Computation, instruction: Instruction, kind: str, *, asynchronous: bool
    ) -> _OpenCollective:
        group = instruction.group_size(self._devices)
        size = computation.count_operand_bytes(instruction)
        sent = {
            "all-gather": size * (group - 1),
            "all-reduce": 2 * size * (group - 1) // group,
            "collective-permute": size,
            "collective-broadcast": size,
        }.get(kind, size * (group - 1) // group)
        return _OpenCollective(kind, Collective(1, sent, int(asynchronous)))

    def _add(self, going: _OpenCollective, times: int) -> None:
        self._sums[going.kind] = self._sums.get(going.kind, Collective()) + going.collective * times

    # -- values, calls and the host ------------------------------------------------------------------------

    def _count_large_results(self, instruction: Instruction, times: int) -> None:
        if instruction.opcode in _NO_MEMORY or instruction.opcode.endswith("-done"):
            return
        for array in instruction.arrays:
            if array.memory == 0 and array.elements >= self._large:
                value = LargeValue(str(array), array.bytes, instruction.operation(), instruction.source())
                self._values[value] += times

    def _record_host_use(self, instruction: Instruction, times: int) -> None:
        if instruction.opcode == "custom-call":
            self._calls[instruction.custom_call_target] += times
        crosses = instruction.opcode in ("send", "recv") and instruction.is_host_transfer
        moves = instruction.custom_call_target in _TO_HOST or (
            instruction.opcode == "copy-start" and any(a.memory == HOST_MEMORY for a in instruction.arrays)
        )
        if instruction.opcode in _HOST or crosses or moves:
            places = instruction.operation(), instruction.source()
            self._host[" ".join(filter(None, (instruction.opcode, *places)))] = None

    # -- loops ---------------------------------------------------------------------------------------------

    def _count_matrix_flops(self, computation: Computation) -> float:
        """FLOPs of the matrix products of a computation and of what it calls, one pass of inner loops."""
        total = 0.0
        for instruction in computation.instructions:
            if instruction.opcode == "convolution":
                total += count_convolution_flops(computation, instruction)
            elif instruction.opcode in ("fusion", "call", "while", "conditional"):
                total += sum(map(self._count_matrix_flops, self.module.get_callees(instruction)))
        return total


def count_convolution_flops(computation: Computation, instruction: Instruction) -> float:
    """FLOPs of a convolution, which is what a TPU's compiler makes of every matrix product.

    Batch dims become windows with holes, whose empty positions take no work.
    """
    axes = instruction.convolution_axes
    left, right = (operand.arrays[0].dimensions for operand in computation.get_operands(instruction)[:2])
    result = instruction.arrays[0].dimensions
    windows = instruction.window.dimensions
    positions = 1
    for window, source, target in zip(windows, axes.input_spatial, axes.output_spatial, strict=True):
        positions *= _count_valid_positions(window, left[source], result[target])
    depth: int = right[axes.kernel_input_feature]
    batch, features = result[axes.output_batch], result[axes.output_feature]
    return 2.0 * float(positions * depth * batch * features)


def _count_valid_positions(window: Any, source: int, target: int) -> int:
    """How many pairs of an output position and a window position meet an element of the input."""
    size, stride, padding = window.size or 1, window.stride or 1, window.padding_low
    holes, gaps = window.window_dilation or 1, window.base_dilation or 1
    extent = (source - 1) * gaps + 1
    valid = 0
    for step in range(size):
        # Output positions o with 0 <= o * stride + step * holes - padding < extent that meet no gap.
        offset = step * holes - padding
        if gaps == 1:
            first = max(0, -(offset // stride)) if offset < 0 else 0
            last = min(target - 1, (extent - 1 - offset) // stride)
            valid += max(0, last - first + 1)
        else:
            period = gaps // math.gcd(stride, gaps)
            start = next((o for o in range(period) if (o * stride + offset) % gaps == 0), None)
            if start is None:
                continue
            low = 0 if offset >= 0 else -(offset // stride)
            first = start + max(0, -(-(low - start) // period)) * period
            last = min(target - 1, (extent - 1 - offset) // stride)
            valid += max(0, (last - first) // period + 1) if last >= first else 0
    return valid


def _count_accessed_bytes(computation: Computation) -> int:
    """Bytes that the instructions of a loop's body read and write."""
    return sum(
        instruction.bytes + computation.count_operand_bytes(instruction)
        for instruction in computation.instructions
        if instruction.opcode not in _NO_MEMORY and not instruction.opcode.endswith("-done")
    )


def _classify_collective(fused: Computation, collective: Instruction) -> str:
    """A fusion of an all-reduce with the slice that a device keeps is a reduce-scatter."""
    opcodes = {instruction.opcode for instruction in fused.instructions}
    if collective.opcode == "all-reduce" and {"dynamic-slice", "partition-id"} <= opcodes:
        return "reduce-scatter"
    return collective.opcode


def _read_cycles(instruction: Instruction) -> int:
    """The compiler's estimate of the cycles of an instruction; 0 where it makes none."""
    match = _CYCLES.search(instruction.backend_config)
    return int(match[1]) if match else 0
