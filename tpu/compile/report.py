"""Analyze a compiled module: its collectives, its largest values, and its transfers to the host."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from portable.planner.compiled_graph import CollectiveStatistics, LargeValue
from portable.tpu.compile.hlo import HOST_MEMORY, HloModule

if TYPE_CHECKING:
    from collections.abc import Set

    from portable.tpu.compile.hlo import HloComputation, HloInstruction

COLLECTIVE_OPCODES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
# Instructions whose results reuse existing memory.
_OPCODES_WITHOUT_MEMORY = {
    "parameter",
    "bitcast",
    "get-tuple-element",
    "tuple",
    "while",
    "conditional",
    "call",
}
_HOST_OPCODES = {"infeed", "outfeed"}
"""Opcodes that exchange data with the host."""
_HOST_PLACEMENT_TARGETS = {"MoveToHost", "MoveToDevice", "annotate_device_placement"}
"""Custom call targets that move a value between the host and a device."""
_COMPUTE_OPCODES = {"convolution", "dot", "while", "sort", "scatter", "gather", "reduce", "reduce-window"}
"""Opcodes that are counted as overlapping computation if they run while a collective is in
progress.
"""
_CYCLES = re.compile(rb'"estimated_cycles":"(\d+)"')


@dataclass
class ModuleReport:
    """Results of the analysis of a module, for one device.

    Attributes:
        collectives: Number, bytes and overlap of collectives, keyed by type.
        large_values: Values with at least the requested number of elements, in descending order of
            their total bytes: the size of the value times its count.
        custom_calls: Number of custom calls, keyed by target. A call in a loop counts once per
            iteration.
        host_transfers: Operations that exchange data with the host, without duplicates. Each entry
            consists of the opcode, the operation's name and the source location.
        matrix_flops: FLOPs of all matrix products, including all loop iterations.
        looped_flops: FLOPs of matrix products in loops after the first iteration. These FLOPs must
            be added to the compiler's cost analysis, which counts each loop body only once.
        looped_bytes: Bytes that loops access after the first iteration. These bytes must also be
            added to the cost analysis.
        loops_of_unknown_length: Number of loops whose trip count is unknown. They are counted as
            one iteration.
    """

    collectives: dict[str, CollectiveStatistics] = field(default_factory=dict)
    large_values: tuple[LargeValue, ...] = ()
    custom_calls: dict[str, int] = field(default_factory=dict)
    host_transfers: tuple[str, ...] = ()
    matrix_flops: float = 0.0
    looped_flops: float = 0.0
    looped_bytes: float = 0.0
    loops_of_unknown_length: int = 0


@dataclass
class _MeasuredCollective:
    """Statistics of one collective, updated while the compiler's instruction schedule is analyzed.

    Attributes:
        kind: Type of the collective, for example ``all-gather``.
        collective: Totals of this collective. The bytes that each device sends are known from the
            start. The cycles of the computation that overlaps with the collective are added up,
            from its start instruction to its end instruction.
    """

    kind: str
    collective: CollectiveStatistics


def analyze_module(program: bytes, num_devices: int, large_value_elements: int) -> ModuleReport:
    """Analyze an HLO module that the compiler has scheduled.

    The report contains collectives, large values, custom calls, host transfers, and the FLOPs and
    bytes in loops. See :class:`ModuleReport`.

    Args:
        program: Serialized ``HloModuleProto``.
        num_devices: Number of devices over which the module is partitioned.
        large_value_elements: Minimum number of elements for a value to be reported as large.
    """
    reader = _ModuleAnalyzer(HloModule(program), num_devices, large_value_elements)
    reader.analyze_computation(reader.module.entry, 1)
    return reader.build_report()


class _ModuleAnalyzer:
    """Analyzer that visits the computations of an HLO module one by one, and sums up the results.

    Call :meth:`analyze_computation` for the entry computation, and then :meth:`build_report`.

    Args:
        module: Scheduled HLO module.
        devices: Number of devices over which the module is partitioned.
        large: Minimum number of elements for a value to be reported as large.
    """

    def __init__(self, module: HloModule, devices: int, large: int) -> None:
        self.module = module
        self._num_devices = devices
        self._large_value_elements = large
        self._collectives: dict[str, CollectiveStatistics] = {}
        self._values: Counter[LargeValue] = Counter()
        self._custom_calls: Counter[str] = Counter()
        self._host_transfers: dict[str, None] = {}
        self._looped_flops = self._looped_bytes = 0.0
        self._loops_of_unknown_length = 0

    def build_report(self) -> ModuleReport:
        """Build the report from the results of :meth:`analyze_computation`."""
        values = [replace(value, count=count) for value, count in self._values.items()]
        return ModuleReport(
            self._collectives,
            tuple(sorted(values, key=lambda value: -value.bytes * value.count)),
            dict(self._custom_calls),
            tuple(self._host_transfers),
            self._count_matrix_flops(self.module.entry) + self._looped_flops,
            self._looped_flops,
            self._looped_bytes,
            self._loops_of_unknown_length,
        )

    def analyze_computation(
        self,
        computation: HloComputation,
        num_runs: int,
        enclosing_collectives: Set[tuple[str, int]] = frozenset(),
    ) -> None:
        """Add the instructions of a computation to the report, in the order of the schedule.

        The computations of calls, conditionals and loop bodies are also added. All branches of a
        conditional are added, although only one branch runs. The instructions inside fusions are
        not added, except for collectives.

        Args:
            computation: Computation to analyze. It must not be the body of a fusion.
            num_runs: Number of times that the computation runs.
            enclosing_collectives: Keys of the collectives that are in progress when the computation
                is called. Fusions in the computation may continue these collectives.
        """
        open_collectives: dict[tuple[str, int], _MeasuredCollective] = {}
        for instruction in computation.instructions:
            self._add_large_results(instruction, num_runs)
            self._record_host_use(instruction, num_runs)
            if self._track_collective(
                computation, instruction, open_collectives, num_runs, enclosing_collectives
            ):
                continue
            cycles = _read_estimated_cycles(instruction)
            if cycles or instruction.opcode in _COMPUTE_OPCODES or instruction.opcode == "fusion":
                for open_collective in open_collectives.values():
                    open_collective.collective = replace(
                        open_collective.collective,
                        overlapped=1,
                        compute_cycles=open_collective.collective.compute_cycles + cycles,
                    )
            self._analyze_called_computations(
                computation, instruction, num_runs, enclosing_collectives | open_collectives.keys()
            )
        for open_collective in open_collectives.values():
            self._add_collective(open_collective, num_runs)

    def _analyze_called_computations(
        self,
        computation: HloComputation,
        instruction: HloInstruction,
        num_runs: int,
        active_collectives: Set[tuple[str, int]],
    ) -> None:
        """Analyze the computations that a loop, call or conditional instruction calls.

        Other instructions are ignored. The compiler's cost analysis counts the body of a loop only
        once. Therefore, the FLOPs and bytes of all further iterations are added to the totals.

        Args:
            computation: Computation that contains the instruction.
            instruction: Instruction to analyze.
            num_runs: Number of times that the instruction runs.
            active_collectives: Keys of the collectives that are in progress when the instruction
                runs.
        """
        if instruction.opcode == "while":
            trips = self.module.find_trip_count(instruction, computation)
            if trips is None:
                self._loops_of_unknown_length += 1
                trips = 1
            body, _ = self.module.get_called_computations(instruction)
            self._looped_flops += num_runs * (trips - 1) * self._count_matrix_flops(body)
            self._looped_bytes += num_runs * (trips - 1) * self._count_accessed_bytes(body)
            self.analyze_computation(body, num_runs * trips, active_collectives)
        elif instruction.opcode in ("call", "conditional"):
            for called in self.module.get_called_computations(instruction):
                self.analyze_computation(called, num_runs, active_collectives)

    # -- collectives ---------------------------------------------------------------------------------------

    def _track_collective(
        self,
        computation: HloComputation,
        instruction: HloInstruction,
        open_collectives: dict[tuple[str, int], _MeasuredCollective],
        num_runs: int,
        enclosing_collectives: Set[tuple[str, int]],
    ) -> bool:
        """Record the start or end of a collective, if the instruction is part of one.

        An asynchronous collective is added to ``open_collectives`` when it starts, and removed when
        it ends.

        Args:
            computation: Computation that contains the instruction.
            instruction: Instruction to examine.
            open_collectives: Collectives that this computation has started and not yet ended, keyed
                by ``("id", instruction ID)`` or ``("channel", channel ID)``.
            num_runs: Number of times that the computation runs.
            enclosing_collectives: Keys of the collectives that were in progress when the
                computation was called.

        Returns:
            True if the instruction starts, ends or completely runs a collective. Also True for all
            other instructions whose opcode is ``async-start`` or ends with ``-done``. False for all
            other instructions, including a fusion that continues a collective and computes something
            else at the same time.
        """
        opcode = instruction.opcode
        if opcode.removesuffix("-start") in COLLECTIVE_OPCODES:
            starts = opcode.endswith("-start")
            open_collective = self._measure_collective(
                computation, instruction, opcode.removesuffix("-start"), is_async=starts
            )
            if starts:
                open_collectives["id", instruction.id] = open_collective
            else:
                self._add_collective(open_collective, num_runs)
            return True
        if opcode == "async-start":
            for called in self.module.get_called_computations(instruction):
                inner = called.root
                if inner.opcode in COLLECTIVE_OPCODES:
                    open_collectives["id", instruction.id] = self._measure_collective(
                        called, inner, inner.opcode, is_async=True
                    )
            return True
        if opcode.endswith("-done"):
            start_id = instruction.operand_ids[0]
            while start_id in computation.by_id and computation.by_id[start_id].opcode == "async-update":
                start_id = computation.by_id[start_id].operand_ids[0]
            if ("id", start_id) in open_collectives:
                self._add_collective(open_collectives.pop(("id", start_id)), num_runs)
            return True
        return opcode == "fusion" and self._track_fused_collective(
            instruction, open_collectives, num_runs, enclosing_collectives
        )

    def _track_fused_collective(
        self,
        instruction: HloInstruction,
        open_collectives: dict[tuple[str, int], _MeasuredCollective],
        num_runs: int,
        enclosing_collectives: Set[tuple[str, int]],
    ) -> bool:
        """Record the start or the end of a collective that the compiler has placed in fusions.

        Only TPUs use this form. One fusion starts the collective, later fusions continue it while
        they compute, and another fusion ends it. All of these fusions have the same channel ID. A
        synchronous collective is complete in one fusion. See :meth:`_track_collective` for the
        arguments.

        Returns:
            True if ``instruction`` is a fusion that only starts or ends a collective, or runs a
            synchronous one. False if it contains no collective, or if it computes while the
            collective is in progress.
        """
        (fused,) = self.module.get_called_computations(instruction)[:1] or (None,)
        inner = [] if fused is None else [i for i in fused.instructions if i.opcode in COLLECTIVE_OPCODES]
        if fused is None or not inner:
            return False
        targets = {i.custom_call_target for i in fused.instructions if i.opcode == "custom-call"}
        collective = inner[0]
        key = "channel", collective.channel_id
        if "AsyncCollectiveStart" in targets:
            open_collectives[key] = self._measure_collective(
                fused, collective, _classify_fused_collective(fused, collective), is_async=True
            )
        elif "AsyncCollectiveDone" in targets:
            if key in open_collectives:
                self._add_collective(open_collectives.pop(key), num_runs)
        elif key in open_collectives or key in enclosing_collectives:
            return False  # the fusion continues the collective, and also computes
        else:
            self._add_collective(
                self._measure_collective(
                    fused, collective, _classify_fused_collective(fused, collective), is_async=False
                ),
                num_runs,
            )
        return True

    def _measure_collective(
        self, computation: HloComputation, instruction: HloInstruction, kind: str, *, is_async: bool
    ) -> _MeasuredCollective:
        """Measure the bytes that each device sends in a collective.

        The bytes are calculated from the operands and the group size, for ring algorithms.

        Args:
            computation: Computation that contains the instruction.
            instruction: Instruction of the collective.
            kind: Type of the collective. It differs from the opcode if a fusion combines an
                all-reduce with a slice.
            is_async: Whether separate instructions start and end the collective.
        """
        group = instruction.get_group_size(self._num_devices)
        size = computation.count_operand_bytes(instruction)
        sent = {
            "all-gather": size * (group - 1),
            "all-reduce": 2 * size * (group - 1) // group,
            "collective-permute": size,
            "collective-broadcast": size,
        }.get(kind, size * (group - 1) // group)
        return _MeasuredCollective(kind, CollectiveStatistics(1, sent, int(is_async)))

    def _add_collective(self, measured: _MeasuredCollective, num_runs: int) -> None:
        """Add a finished collective to the totals of its type.

        Args:
            measured: Statistics of the collective.
            num_runs: Number of times that the collective runs. Its statistics are multiplied by it.
        """
        self._collectives[measured.kind] = (
            self._collectives.get(measured.kind, CollectiveStatistics()) + measured.collective * num_runs
        )

    # -- values, calls and the host ------------------------------------------------------------------------

    def _add_large_results(self, instruction: HloInstruction, num_runs: int) -> None:
        """Record the large results that an instruction stores in HBM.

        A result is large if it has at least as many elements as the argument ``large`` of this
        class. Each result is counted ``num_runs`` times.
        """
        if instruction.opcode in _OPCODES_WITHOUT_MEMORY or instruction.opcode.endswith("-done"):
            return
        for array in instruction.result_arrays:
            if array.memory_space == 0 and array.num_elements >= self._large_value_elements:
                value = LargeValue(
                    str(array),
                    array.size_bytes,
                    instruction.get_operation_name(),
                    instruction.get_source_location(),
                )
                self._values[value] += num_runs

    def _record_host_use(self, instruction: HloInstruction, num_runs: int) -> None:
        """Record the instruction if it is a custom call or exchanges data with the host."""
        if instruction.opcode == "custom-call":
            self._custom_calls[instruction.custom_call_target] += num_runs
        crosses = instruction.opcode in ("send", "recv") and instruction.is_host_transfer
        moves = instruction.custom_call_target in _HOST_PLACEMENT_TARGETS or (
            instruction.opcode == "copy-start"
            and any(a.memory_space == HOST_MEMORY for a in instruction.result_arrays)
        )
        if instruction.opcode in _HOST_OPCODES or crosses or moves:
            operation_and_source = instruction.get_operation_name(), instruction.get_source_location()
            self._host_transfers[" ".join(filter(None, (instruction.opcode, *operation_and_source)))] = None

    # -- loops ---------------------------------------------------------------------------------------------

    def _count_matrix_flops(self, computation: HloComputation) -> float:
        """Count the FLOPs of matrix products in a computation and in the computations it calls.

        Only convolutions are counted, because the TPU compiler converts matrix products to
        convolutions. Matrix products in custom calls are therefore missing. Loops inside the
        computation count as one iteration, and all branches of a conditional are counted.
        """
        total = 0.0
        for instruction in computation.instructions:
            if instruction.opcode == "convolution":
                total += count_convolution_flops(computation, instruction)
            elif instruction.opcode in ("fusion", "call", "while", "conditional"):
                total += sum(map(self._count_matrix_flops, self.module.get_called_computations(instruction)))
        return total

    def _count_accessed_bytes(self, computation: HloComputation) -> int:
        """Count the bytes that a computation and the computations it calls read and write.

        A fusion accesses only its operands and its result. Loops inside the computation count as
        one iteration, and all branches of a conditional are counted.
        """
        total = 0
        for instruction in computation.instructions:
            if instruction.opcode in ("call", "while", "conditional"):
                total += sum(
                    map(self._count_accessed_bytes, self.module.get_called_computations(instruction))
                )
            elif instruction.opcode not in _OPCODES_WITHOUT_MEMORY and not instruction.opcode.endswith(
                "-done"
            ):
                total += instruction.result_bytes + computation.count_operand_bytes(instruction)
        return total


def count_convolution_flops(computation: HloComputation, instruction: HloInstruction) -> float:
    """Count the FLOPs of a convolution.

    The TPU compiler converts every matrix product to a convolution. It represents a batch dim of a
    product as a window dim with dilation. Many window positions are then in padding or in the gaps
    of the dilation, and require no computation. Only positions that read an input element are
    counted.

    Args:
        computation: Computation that contains the instruction.
        instruction: Convolution instruction.
    """
    axes = instruction.convolution_axes
    input_dims, kernel_dims = (
        operand.result_arrays[0].dimensions for operand in computation.get_operands(instruction)[:2]
    )
    result = instruction.result_arrays[0].dimensions
    windows = instruction.window.dimensions
    positions = 1
    for window, source, target in zip(windows, axes.input_spatial, axes.output_spatial, strict=True):
        positions *= _count_valid_window_positions(window, input_dims[source], result[target])
    depth: int = kernel_dims[axes.kernel_input_feature]
    batch, features = result[axes.output_batch], result[axes.output_feature]
    return 2.0 * float(positions * depth * batch * features)


def _count_valid_window_positions(window: Any, input_size: int, output_size: int) -> int:
    """Count the multiplications with real input elements along one dim of a convolution.

    Each multiplication belongs to one pair of an output position and a kernel position. A pair is
    not counted if it reads padding, or a zero that base dilation inserts between input elements.
    The number of FLOPs of a convolution is proportional to the product of these counts over all
    spatial dims.

    Args:
        window: HLO ``WindowDimension`` for one spatial dim of the convolution.
        input_size: Size of the input along this dim.
        output_size: Size of the output along this dim.
    """
    size, stride, padding = window.size or 1, window.stride or 1, window.padding_low
    holes, gaps = window.window_dilation or 1, window.base_dilation or 1
    extent = (input_size - 1) * gaps + 1
    valid = 0
    for step in range(size):
        # Count the output positions o with 0 <= o * stride + step * holes - padding < extent that do not read
        # a gap.
        offset = step * holes - padding
        if gaps == 1:
            first = max(0, -(offset // stride)) if offset < 0 else 0
            last = min(output_size - 1, (extent - 1 - offset) // stride)
            valid += max(0, last - first + 1)
        else:
            period = gaps // math.gcd(stride, gaps)
            start = next((o for o in range(period) if (o * stride + offset) % gaps == 0), None)
            if start is None:
                continue
            low = 0 if offset >= 0 else -(offset // stride)
            first = start + max(0, -(-(low - start) // period)) * period
            last = min(output_size - 1, (extent - 1 - offset) // stride)
            valid += max(0, (last - first) // period + 1) if last >= first else 0
    return valid


def _classify_fused_collective(fused: HloComputation, collective: HloInstruction) -> str:
    """Return the type of a collective in a fusion.

    An all-reduce that is fused with a slice for the current device is a reduce-scatter.
    """
    opcodes = {instruction.opcode for instruction in fused.instructions}
    if collective.opcode == "all-reduce" and {"dynamic-slice", "partition-id"} <= opcodes:
        return "reduce-scatter"
    return collective.opcode


def _read_estimated_cycles(instruction: HloInstruction) -> int:
    """Return the compiler's estimate of an instruction's cycles, or 0 if there is no estimate."""
    match = _CYCLES.search(instruction.backend_config)
    return int(match[1]) if match else 0
