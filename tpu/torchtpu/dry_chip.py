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
from portable.tpu.compile.messages import messages, place_on
from portable.tpu.compile.worker import measured

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
    def of(cls, kind: int, sizes: Sequence[int]) -> Buffer:
        return cls(kind, (ctypes.c_int64 * max(len(sizes), 1))(*sizes), len(sizes))

    @property
    def bytes(self) -> int:
        return -(-math.prod(list[int](self.shape[: self.rank])) * _BITS[self.kind - 1] // 8)


@dataclass
class Program:
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
        self.programs: dict[int, Program] = {}
        self.runs: Counter[int] = Counter()
        """How often each program has run."""
        self._held: dict[int, Buffer] = {}
        self.live = 0
        """Bytes of buffers."""
        self.peak = 0
        """The most bytes of buffers and of the program that ran beside them."""
        self._kept: list[Any] = []
        self._libc = ctypes.CDLL(None)
        self._libc.aligned_alloc.restype = ctypes.c_void_p
        self._handles = count(_ALIGNED, _ALIGNED)
        self._memory, self._event = (self._kept_at(*[0] * 8) for _ in range(2))
        allocator = self._kept_at(32, _HOST_ALLOCATOR, 0, self._callback(self._allocate))
        replaced = {position: self._callback(answer) for position, answer in self._answers().items()}
        topology.library.replace(replaced, extensions=allocator)

    def _callback(self, answer: Callable[[Any], Sequence[int] | None]) -> int:
        """A function of the table.

        Args:
            answer: from the fields after the two that all structs begin with; returns those from the second
                on, or has filled them in.
        """

        def called(address: int) -> None:
            size = ctypes.c_size_t.from_address(address).value
            try:
                given = (ctypes.c_uint64 * (-(-size // 8) - 2)).from_address(address + 16)
                fields: list[Any] = list(answer(given) or ())
                given[1 : 1 + len(fields)] = fields
            except CompileError as error:
                self._refuse(error)
            except BaseException:  # nothing may be raised into C code
                traceback.print_exc()
                os._exit(70)

        function = _FUNCTION(called)
        self._kept.append(function)
        return _address(function)

    def _kept_at(self, *values: int) -> int:
        """The address of ``values``, eight bytes each."""
        kept = (ctypes.c_uint64 * len(values))(*values)
        self._kept.append(kept)
        return ctypes.addressof(kept)

    def _text(self, text: bytes) -> tuple[int, int]:
        kept = ctypes.create_string_buffer(text)
        self._kept.append(kept)
        return ctypes.addressof(kept), len(text)

    def _answers(self) -> dict[int, Callable[[Any], Sequence[int] | None]]:
        """By position in PJRT's table, which only grows at its end. See pjrt_c_api.h for the structs."""
        topology, held, memory = self._topology, self._held, self._memory
        numbers = {chip: number for number, chip in topology.devices.items()}
        chips = list(numbers)
        here = _always(self._kept_at(chips[0]), 1)
        memories = _always(self._kept_at(memory), 1)
        kind = _always(*self._text(b"device"))

        def looked_up(given: Any) -> Sequence[int]:
            return given[1], topology.devices[given[1] & 0xFFFFFFFF]

        def copied(given: Any) -> Sequence[int]:
            return given[1], self._made(held[given[0]])

        return {
            # Events: all have happened.
            5: _always(),  # Event_Destroy
            6: _always(1),  # Event_IsReady
            7: _always(),  # Event_Error
            8: _always(),  # Event_Await
            9: lambda given: _WHEN_READY(given[1])(None, given[2]),  # Event_OnReady
            # The client, its devices and their memory.
            10: lambda given: [*given[1:6], topology.handle],  # Client_Create
            11: _always(),  # Client_Destroy
            12: _always(*self._text(b"tpu")),  # Client_PlatformName
            13: _always(0),  # Client_ProcessIndex
            14: _always(*self._text(topology.compiler.encode())),  # Client_PlatformVersion
            15: _always(self._kept_at(*chips), len(chips)),  # Client_Devices
            16: here,  # Client_AddressableDevices
            17: looked_up,  # Client_LookupDevice
            18: looked_up,  # Client_LookupAddressableDevice
            19: memories,  # Client_AddressableMemories
            24: lambda given: [numbers[given[0]]],  # DeviceDescription_ProcessIndex: a process a chip
            29: lambda given: [given[0]],  # Device_GetDescription
            30: lambda given: [given[0] == chips[0]],  # Device_IsAddressable
            31: _always(0),  # Device_LocalHardwareId
            32: memories,  # Device_AddressableMemories
            33: _always(memory),  # Device_DefaultMemory
            35: _always(0),  # Memory_Id
            36: kind,  # Memory_Kind
            37: kind,  # Memory_DebugString
            38: kind,  # Memory_ToString
            39: here,  # Memory_AddressableByDevices
            95: _always(topology.handle),  # Client_TopologyDescription
            97: _always(0),  # Memory_Kind_Id
            128: self._attributes,  # Device_GetAttributes
            # Programs.
            20: self._compile,  # Client_Compile
            40: _always(),  # Executable_Destroy
            50: _always(),  # LoadedExecutable_Destroy
            51: lambda given: [given[0]],  # LoadedExecutable_GetExecutable
            52: here,  # LoadedExecutable_AddressableDevices
            53: _always(),  # LoadedExecutable_Delete
            54: _always(0),  # LoadedExecutable_IsDeleted
            55: self._execute,  # LoadedExecutable_Execute
            117: lambda given: self.programs[given[0]].assignment,  # LoadedExecutable_GetDeviceAssignment
            130: _always(self._kept_at(0), 1),  # LoadedExecutable_AddressableDeviceLogicalIds
            # Buffers.
            22: self._from_host,  # Client_BufferFromHostBuffer
            58: self._destroy,  # Buffer_Destroy
            59: lambda given: [held[given[0]].kind],  # Buffer_ElementType
            60: self._shape,  # Buffer_Dimensions
            61: self._shape,  # Buffer_UnpaddedDimensions
            62: _always(0, 0),  # Buffer_DynamicDimensionIndices
            64: lambda given: [held[given[0]].bytes],  # Buffer_OnDeviceSizeInBytes
            65: _always(chips[0]),  # Buffer_Device
            66: _always(memory),  # Buffer_Memory
            67: _always(),  # Buffer_Delete
            68: _always(0),  # Buffer_IsDeleted
            69: copied,  # Buffer_CopyToDevice
            70: self._to_host,  # Buffer_ToHostBuffer
            71: _always(0),  # Buffer_IsOnCpu
            72: _always(self._event),  # Buffer_ReadyEvent
            92: copied,  # Buffer_CopyToMemory
        }

    # -- the client ---------------------------------------------------------------------------------------

    def _attributes(self, given: Any) -> Sequence[int]:
        _, size, array = self._topology.library.call("PJRT_DeviceDescription_Attributes", given[0])[:3]
        return array, size, array, _address(_FREES_NOTHING)

    def _allocate(self, given: Any) -> None:
        """Memory of the host, from which a chip can copy."""
        size = ctypes.c_size_t(-(-given[1] // _ALIGNED) * _ALIGNED)
        given[3:6] = self._libc.aligned_alloc(_ALIGNED, size) or 0, _address(self._libc.free), 0

    # -- programs -----------------------------------------------------------------------------------------

    def _compile(self, given: Any) -> None:
        program = (ctypes.c_uint64 * 4).from_address(given[1] + 16)
        code = ctypes.string_at(program[0], program[1])
        options = messages.CompileOptions.FromString(ctypes.string_at(given[2], given[3]))
        build = options.executable_build_options
        chips = build.num_partitions or 1
        place_on(build, self._topology.device_ids[:chips])
        start = time.monotonic()
        executable = self._topology.compile(code, form="mlir", options=options.SerializeToString())
        seconds = time.monotonic() - start
        assignment, size = self._text(build.device_assignment.SerializeToString())
        self.programs[executable.handle] = Program(
            measured(executable, "a program", chips, self._large, seconds),
            [Buffer.of(*result) for result in executable.results()],
            (assignment, size, assignment, _address(_FREES_NOTHING)),
        )
        given[4] = executable.handle

    def _execute(self, given: Any) -> None:
        program = self.programs[given[0]]
        self.runs[given[0]] += 1
        self.peak = max(self.peak, self.live + program.graph.working_bytes)
        values = b""
        if program.graph.collectives and given[4] == 1:  # what the others send is zero
            (argument,) = _row(given[2], 1)
            values = self._held[argument].values
        row = _row(given[5], len(program.outputs))
        for index, output in enumerate(program.outputs):
            row[index] = self._made(replace(output, values=values))
        if given[6]:
            ctypes.c_uint64.from_address(given[6]).value = self._event

    # -- buffers ------------------------------------------------------------------------------------------

    def _made(self, buffer: Buffer) -> int:
        handle = next(self._handles)
        self._held[handle] = buffer
        self.live += buffer.bytes
        self.peak = max(self.peak, self.live)
        return handle

    def _from_host(self, given: Any) -> None:
        sizes = (ctypes.c_int64 * given[4]).from_address(given[3]) if given[4] else ()
        buffer = Buffer.of(given[2] & 0xFFFFFFFF, sizes)
        if buffer.bytes <= _SMALL:
            buffer = replace(buffer, values=ctypes.string_at(given[1], buffer.bytes))
        given[11], given[12] = self._event, self._made(buffer)

    def _destroy(self, given: Any) -> None:
        self.live -= self._held.pop(given[0]).bytes

    def _shape(self, given: Any) -> Sequence[int]:
        buffer = self._held[given[0]]
        return ctypes.addressof(buffer.shape), buffer.rank

    def _to_host(self, given: Any) -> None:
        buffer = self._held[given[0]]
        if given[2]:
            ctypes.memset(given[2], 0, given[3])
            ctypes.memmove(given[2], buffer.values, min(given[3], len(buffer.values)))
            given[4] = self._event
        else:
            given[3] = buffer.bytes


def _always(*fields: int) -> Callable[[Any], Sequence[int]]:
    return lambda given: fields


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _row(addresses: int, length: int) -> Any:
    """What the first of the rows behind ``addresses``, a device's, holds."""
    return (ctypes.c_uint64 * length).from_address(ctypes.c_uint64.from_address(addresses).value)
