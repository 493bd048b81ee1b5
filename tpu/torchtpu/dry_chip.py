"""A chip that compiles and computes nothing: torch_tpu's client is a topology of libtpu's compiler.

torch_tpu opens its chips through libtpu's table of functions (PJRT). Here those functions are replaced that
would need a chip. A program goes to the real compiler, for the slice. A buffer has a type, a shape and a
size, but no values, which read as zero, unless it is small. So the engines run as they are, and what they
would take of a chip's memory is counted, program for program.
"""

from __future__ import annotations

import ctypes
import math
import os
import time
import traceback
from collections import Counter
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any

from portable.tpu.compile.libtpu import CompileError
from portable.tpu.compile.messages import assign_devices, messages
from portable.tpu.compile.worker import measure_graph

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from portable.planner.compiled_graph import CompiledGraph
    from portable.tpu.compile.libtpu import Topology

_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
_WHEN_READY = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
_FREES_NOTHING = _FUNCTION(lambda address: None)
_HOST_ALLOCATOR = 23  # PJRT_Extension_Type_HostMemoryAllocator
_ALIGNED = 64  # bytes
# Bits of an element, by PJRT_Buffer_Type from PRED, its first: xla/pjrt/c/pjrt_c_api.h.
_BITS = (8, 8, 16, 32, 64, 8, 16, 32, 64, 16, 32, 64, 16, 64, 128, 8, 8, 8, 8, 8, 4, 4, 0, 2, 2, 8, 8, 8, 4)
_SMALL = 1 << 16  # bytes up to which a buffer that comes from the host keeps its values


@dataclass(frozen=True)
class Buffer:
    """Device memory."""

    kind: int
    shape: Any
    rank: int
    values: bytes = b""
    """Its first bytes; all others are zero."""

    @classmethod
    def from_sizes(cls, kind: int, sizes: Sequence[int]) -> Buffer:
        return cls(kind, (ctypes.c_int64 * max(len(sizes), 1))(*sizes), len(sizes))

    @property
    def bytes(self) -> int:
        return -(-math.prod(list[int](self.shape[: self.rank])) * _BITS[self.kind - 1] // 8)


@dataclass
class CompiledProgram:
    """A compiled program."""

    graph: CompiledGraph
    outputs: list[Buffer]
    assignment: tuple[int, ...]
    """As torch_tpu reads it: where it is, its size, and what frees it."""


class DryChip:
    """Takes the place of the chips in libtpu's table, which torch_tpu reads afterwards.

    Args:
        topology: the slice. This process is its first chip.
        large: elements from which a value of a program is listed.
        refuse: ends the process when libtpu does not compile a program.
    """

    def __init__(self, topology: Topology, large: int, refuse: Callable[[CompileError], None]) -> None:
        self._topology, self._large, self._refuse = topology, large, refuse
        self.programs: dict[int, CompiledProgram] = {}
        self.runs: Counter[int] = Counter()
        """How often each program has run."""
        self._live_buffers: dict[int, Buffer] = {}
        self.live = 0
        """Bytes of buffers."""
        self.peak = 0
        """The most bytes of buffers and of the program that ran beside them."""
        self._references: list[Any] = []
        self._libc = ctypes.CDLL(None)
        self._libc.aligned_alloc.restype = ctypes.c_void_p
        self._handles = count(_ALIGNED, _ALIGNED)
        self._memory, self._event = (self._store_values(*[0] * 8) for _ in range(2))
        allocator = self._store_values(32, _HOST_ALLOCATOR, 0, self._make_callback(self._allocate))
        replaced = {
            position: self._make_callback(answer) for position, answer in self._build_answers().items()
        }
        topology.library.replace(replaced, extensions=allocator)

    def _make_callback(self, answer: Callable[[Any], Sequence[int] | None]) -> int:
        """A function of the table.

        Args:
            answer: from the fields after the two that all structs begin with; returns those from the second
                on, or has filled them in.
        """

        def invoke(address: int) -> None:
            size = ctypes.c_size_t.from_address(address).value
            try:
                arguments = (ctypes.c_uint64 * (-(-size // 8) - 2)).from_address(address + 16)
                fields: list[Any] = list(answer(arguments) or ())
                arguments[1 : 1 + len(fields)] = fields
            except CompileError as error:
                self._refuse(error)
            except BaseException:  # nothing may be raised into C code
                traceback.print_exc()
                os._exit(70)

        function = _FUNCTION(invoke)
        self._references.append(function)
        return _get_address(function)

    def _store_values(self, *values: int) -> int:
        """The address of ``values``, eight bytes each."""
        array = (ctypes.c_uint64 * len(values))(*values)
        self._references.append(array)
        return ctypes.addressof(array)

    def _store_text(self, text: bytes) -> tuple[int, int]:
        buffer = ctypes.create_string_buffer(text)
        self._references.append(buffer)
        return ctypes.addressof(buffer), len(text)

    def _build_answers(self) -> dict[int, Callable[[Any], Sequence[int] | None]]:
        """By position in PJRT's table, which only grows at its end. See pjrt_c_api.h for the structs."""
        topology, buffers, memory = self._topology, self._live_buffers, self._memory
        numbers = {chip: number for number, chip in topology.devices.items()}
        chips = list(numbers)
        here = _make_constant_answer(self._store_values(chips[0]), 1)
        memories = _make_constant_answer(self._store_values(memory), 1)
        kind = _make_constant_answer(*self._store_text(b"device"))

        def look_up_device(arguments: Any) -> Sequence[int]:
            return arguments[1], topology.devices[arguments[1] & 0xFFFFFFFF]

        def copy_buffer(arguments: Any) -> Sequence[int]:
            return arguments[1], self._add_buffer(buffers[arguments[0]])

        return {
            # Events: all have happened.
            5: _make_constant_answer(),  # Event_Destroy
            6: _make_constant_answer(1),  # Event_IsReady
            7: _make_constant_answer(),  # Event_Error
            8: _make_constant_answer(),  # Event_Await
            9: lambda given: _WHEN_READY(given[1])(None, given[2]),  # Event_OnReady
            # The client, its devices and their memory.
            10: lambda given: [*given[1:6], topology.handle],  # Client_Create
            11: _make_constant_answer(),  # Client_Destroy
            12: _make_constant_answer(*self._store_text(b"tpu")),  # Client_PlatformName
            13: _make_constant_answer(0),  # Client_ProcessIndex
            14: _make_constant_answer(
                *self._store_text(topology.compiler.encode())
            ),  # Client_PlatformVersion
            15: _make_constant_answer(self._store_values(*chips), len(chips)),  # Client_Devices
            16: here,  # Client_AddressableDevices
            17: look_up_device,  # Client_LookupDevice
            18: look_up_device,  # Client_LookupAddressableDevice
            19: memories,  # Client_AddressableMemories
            24: lambda given: [numbers[given[0]]],  # DeviceDescription_ProcessIndex: a process a chip
            29: lambda given: [given[0]],  # Device_GetDescription
            30: lambda given: [given[0] == chips[0]],  # Device_IsAddressable
            31: _make_constant_answer(0),  # Device_LocalHardwareId
            32: memories,  # Device_AddressableMemories
            33: _make_constant_answer(memory),  # Device_DefaultMemory
            35: _make_constant_answer(0),  # Memory_Id
            36: kind,  # Memory_Kind
            37: kind,  # Memory_DebugString
            38: kind,  # Memory_ToString
            39: here,  # Memory_AddressableByDevices
            95: _make_constant_answer(topology.handle),  # Client_TopologyDescription
            97: _make_constant_answer(0),  # Memory_Kind_Id
            128: self._get_attributes,  # Device_GetAttributes
            # Programs.
            20: self._compile,  # Client_Compile
            40: _make_constant_answer(),  # Executable_Destroy
            50: _make_constant_answer(),  # LoadedExecutable_Destroy
            51: lambda given: [given[0]],  # LoadedExecutable_GetExecutable
            52: here,  # LoadedExecutable_AddressableDevices
            53: _make_constant_answer(),  # LoadedExecutable_Delete
            54: _make_constant_answer(0),  # LoadedExecutable_IsDeleted
            55: self._execute,  # LoadedExecutable_Execute
            117: lambda given: self.programs[given[0]].assignment,  # LoadedExecutable_GetDeviceAssignment
            130: _make_constant_answer(
                self._store_values(0), 1
            ),  # LoadedExecutable_AddressableDeviceLogicalIds
            # Buffers.
            22: self._copy_from_host,  # Client_BufferFromHostBuffer
            58: self._destroy,  # Buffer_Destroy
            59: lambda given: [buffers[given[0]].kind],  # Buffer_ElementType
            60: self._get_shape,  # Buffer_Dimensions
            61: self._get_shape,  # Buffer_UnpaddedDimensions
            62: _make_constant_answer(0, 0),  # Buffer_DynamicDimensionIndices
            64: lambda given: [buffers[given[0]].bytes],  # Buffer_OnDeviceSizeInBytes
            65: _make_constant_answer(chips[0]),  # Buffer_Device
            66: _make_constant_answer(memory),  # Buffer_Memory
            67: _make_constant_answer(),  # Buffer_Delete
            68: _make_constant_answer(0),  # Buffer_IsDeleted
            69: copy_buffer,  # Buffer_CopyToDevice
            70: self._copy_to_host,  # Buffer_ToHostBuffer
            71: _make_constant_answer(0),  # Buffer_IsOnCpu
            72: _make_constant_answer(self._event),  # Buffer_ReadyEvent
            92: copy_buffer,  # Buffer_CopyToMemory
        }

    # -- the client ---------------------------------------------------------------------------------------

    def _get_attributes(self, arguments: Any) -> Sequence[int]:
        _, size, array = self._topology.library.call("PJRT_DeviceDescription_Attributes", arguments[0])[:3]
        return array, size, array, _get_address(_FREES_NOTHING)

    def _allocate(self, arguments: Any) -> None:
        """Memory of the host, from which a chip can copy."""
        size = ctypes.c_size_t(-(-arguments[1] // _ALIGNED) * _ALIGNED)
        arguments[3:6] = self._libc.aligned_alloc(_ALIGNED, size) or 0, _get_address(self._libc.free), 0

    # -- programs -----------------------------------------------------------------------------------------

    def _compile(self, arguments: Any) -> None:
        program = (ctypes.c_uint64 * 4).from_address(arguments[1] + 16)
        code = ctypes.string_at(program[0], program[1])
        options = messages.CompileOptions.FromString(ctypes.string_at(arguments[2], arguments[3]))
        build = options.executable_build_options
        chips = build.num_partitions or 1
        assign_devices(build, self._topology.device_ids[:chips])
        start = time.monotonic()
        executable = self._topology.compile(code, form="mlir", options=options.SerializeToString())
        seconds = time.monotonic() - start
        assignment, size = self._store_text(build.device_assignment.SerializeToString())
        self.programs[executable.handle] = CompiledProgram(
            measure_graph(executable, "a program", chips, self._large, seconds),
            [Buffer.from_sizes(*result) for result in executable.read_result_types()],
            (assignment, size, assignment, _get_address(_FREES_NOTHING)),
        )
        arguments[4] = executable.handle

    def _execute(self, arguments: Any) -> None:
        program = self.programs[arguments[0]]
        self.runs[arguments[0]] += 1
        self.peak = max(self.peak, self.live + program.graph.working_bytes)
        values = b""
        if program.graph.collectives and arguments[4] == 1:  # what the others send is zero
            (argument,) = _read_first_row(arguments[2], 1)
            values = self._live_buffers[argument].values
        row = _read_first_row(arguments[5], len(program.outputs))
        for index, output in enumerate(program.outputs):
            row[index] = self._add_buffer(replace(output, values=values))
        if arguments[6]:
            ctypes.c_uint64.from_address(arguments[6]).value = self._event

    # -- buffers ------------------------------------------------------------------------------------------

    def _add_buffer(self, buffer: Buffer) -> int:
        handle = next(self._handles)
        self._live_buffers[handle] = buffer
        self.live += buffer.bytes
        self.peak = max(self.peak, self.live)
        return handle

    def _copy_from_host(self, arguments: Any) -> None:
        sizes = (ctypes.c_int64 * arguments[4]).from_address(arguments[3]) if arguments[4] else ()
        buffer = Buffer.from_sizes(arguments[2] & 0xFFFFFFFF, sizes)
        if buffer.bytes <= _SMALL:
            buffer = replace(buffer, values=ctypes.string_at(arguments[1], buffer.bytes))
        arguments[11], arguments[12] = self._event, self._add_buffer(buffer)

    def _destroy(self, arguments: Any) -> None:
        self.live -= self._live_buffers.pop(arguments[0]).bytes

    def _get_shape(self, arguments: Any) -> Sequence[int]:
        buffer = self._live_buffers[arguments[0]]
        return ctypes.addressof(buffer.shape), buffer.rank

    def _copy_to_host(self, arguments: Any) -> None:
        buffer = self._live_buffers[arguments[0]]
        if arguments[2]:
            ctypes.memset(arguments[2], 0, arguments[3])
            ctypes.memmove(arguments[2], buffer.values, min(arguments[3], len(buffer.values)))
            arguments[4] = self._event
        else:
            arguments[3] = buffer.bytes


def _make_constant_answer(*fields: int) -> Callable[[Any], Sequence[int]]:
    return lambda given: fields


def _get_address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _read_first_row(addresses: int, length: int) -> Any:
    """What the first of the rows behind ``addresses``, a device's, holds."""
    return (ctypes.c_uint64 * length).from_address(ctypes.c_uint64.from_address(addresses).value)
