"""A chip that compiles and computes nothing: torch_tpu's client is a topology of libtpu's compiler.

torch_tpu opens its chips through libtpu's table of functions (PJRT). Here those functions are replaced that
would need a chip. A program goes to the real compiler, for the slice. A buffer has a type, a shape and a
size, but no values, which read as zero. So the engines run as they are, and what they would take of a chip's
memory is counted, program for program.
"""

from __future__ import annotations

import ctypes
import math
import os
import traceback
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tpu.compile.libtpu import CompileError
from tpu.compile.messages import messages, partitions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tpu.compile.libtpu import Executable, Topology

_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
_WHEN_READY = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
_FREES_NOTHING = _FUNCTION(lambda address: None)
# Bits of an element, by PJRT_Buffer_Type from PRED, its first: xla/pjrt/c/pjrt_c_api.h.
_BITS = (8, 8, 16, 32, 64, 8, 16, 32, 64, 16, 32, 64, 16, 64, 128, 8, 8, 8, 8, 8, 4, 4, 0, 2, 2, 8, 8, 8, 4)
_HANDLE = 64  # bytes behind a handle, all zero


@dataclass(frozen=True)
class Buffer:
    """Device memory without values."""

    kind: int
    shape: Any
    rank: int

    @classmethod
    def of(cls, kind: int, sizes: Sequence[int]) -> Buffer:
        return cls(kind, (ctypes.c_int64 * max(len(sizes), 1))(*sizes), len(sizes))

    @property
    def bytes(self) -> int:
        return -(-math.prod(list[int](self.shape[: self.rank])) * _BITS[self.kind - 1] // 8)


@dataclass
class Program:
    """A compiled program."""

    executable: Executable
    outputs: list[Buffer]
    working: int
    """Bytes that it takes beside its arguments while it runs, its results among them."""
    code: int
    flops: float
    accessed: float
    partitions: int
    assignment: bytes
    runs: int = 0


class DryChip:
    """Takes the place of the chips in libtpu's table, which torch_tpu reads afterwards.

    Args:
        topology: the slice. This process is its first chip.
        refuse: ends the process when libtpu does not compile a program.
    """

    def __init__(self, topology: Topology, refuse: Callable[[CompileError], None]) -> None:
        self._topology = topology
        self._refuse = refuse
        self._library = topology.library
        self.programs: dict[int, Program] = {}
        self._held: dict[int, tuple[Buffer, Any]] = {}
        self.live = 0
        """Bytes of buffers."""
        self.peak = 0
        """The most bytes of buffers and of the program that ran beside them."""
        self._kept: list[Any] = []
        self._event_handle, self._memory_handle = self._handle(self._kept), self._handle(self._kept)
        self._chips = (ctypes.c_uint64 * len(topology.devices))(*topology.devices.values())
        self._numbers = dict(zip(topology.devices.values(), topology.devices, strict=True))
        self._first = (ctypes.c_uint64 * 1)(self._chips[0])
        self._memories = (ctypes.c_uint64 * 1)(self._memory_handle)
        self._logical = (ctypes.c_int * 2)(0, 0)  # the replica and the partition of this chip
        self._library.without_extensions()
        for position, function in _REPLACED.items():
            self._library.replace(position, self._callback(partial(function, self)))

    def _callback(self, function: Callable[[Any], int | None]) -> Any:
        def called(address: int) -> int | None:
            size = ctypes.c_size_t.from_address(address).value
            try:
                error: int | None = function(
                    (ctypes.c_uint64 * (-(-size // 8) - 2)).from_address(address + 16)
                )
                return error
            except BaseException:  # nothing may be raised into C code
                traceback.print_exc()
                os._exit(70)

        callback = _FUNCTION(called)
        self._kept.append(callback)
        return callback

    def _handle(self, kept: list[Any]) -> int:
        kept.append(ctypes.create_string_buffer(_HANDLE))
        return ctypes.addressof(kept[-1])

    def _text(self, given: Any, text: bytes) -> None:
        buffer = ctypes.create_string_buffer(text)
        self._kept.append(buffer)
        given[1], given[2] = ctypes.addressof(buffer), len(text)

    def runs(self) -> Counter[int]:
        """How often each program has run, by its handle."""
        return Counter({handle: program.runs for handle, program in self.programs.items()})

    # -- the client, its device and its memory: see the structs of pjrt_c_api.h for the fields -----------

    def _nothing(self, given: Any) -> None:
        pass

    def _client_create(self, given: Any) -> None:
        given[6] = self._topology.handle

    def _client_topology(self, given: Any) -> None:
        given[1] = self._topology.handle

    def _client_platform(self, given: Any) -> None:
        self._text(given, b"tpu")

    def _client_version(self, given: Any) -> None:
        self._text(given, self._topology.compiler.encode())

    def _zero(self, given: Any) -> None:
        given[1] = 0

    def _one(self, given: Any) -> None:
        given[1] = 1

    def _every_chip(self, given: Any) -> None:
        given[1], given[2] = ctypes.addressof(self._chips), len(self._chips)

    def _first_chip(self, given: Any) -> None:
        given[1], given[2] = ctypes.addressof(self._first), 1

    def _of_first_chip(self, given: Any) -> None:
        given[1] = self._first[0]

    def _is_first_chip(self, given: Any) -> None:
        given[1] = given[0] == self._first[0]

    def _number(self, given: Any) -> None:
        given[1] = self._numbers[given[0]]  # a process a chip

    def _looked_up(self, given: Any) -> None:
        given[2] = self._topology.devices[given[1] & 0xFFFFFFFF]

    def _same(self, given: Any) -> None:
        given[1] = given[0]

    def _attributes(self, given: Any) -> None:
        _, count, array = self._library.call("PJRT_DeviceDescription_Attributes", given[0])[:3]
        given[1], given[2], given[3] = array, count, array
        given[4] = ctypes.cast(_FREES_NOTHING, ctypes.c_void_p).value or 0

    def _memories_of(self, given: Any) -> None:
        given[1], given[2] = ctypes.addressof(self._memories), 1

    def _memory(self, given: Any) -> None:
        given[1] = self._memory_handle

    def _memory_kind(self, given: Any) -> None:
        self._text(given, b"device")

    # -- events: all have happened ------------------------------------------------------------------------

    def _when_ready(self, given: Any) -> None:
        _WHEN_READY(given[1])(None, given[2])

    def _event(self, given: Any) -> None:
        given[1] = self._event_handle

    # -- programs -----------------------------------------------------------------------------------------

    def _compile(self, given: Any) -> int | None:
        program = (ctypes.c_uint64 * 4).from_address(given[1] + 16)
        code = ctypes.string_at(program[0], program[1])
        options = messages.CompileOptions.FromString(ctypes.string_at(given[2], given[3]))
        build = options.executable_build_options
        count = build.num_partitions or 1
        place_on(options, self._topology.device_ids[:count])
        try:
            executable = self._topology.compile(code, form="mlir", options=options.SerializeToString())
        except CompileError as error:
            self._refuse(error)
            raise
        memory, (flops, accessed) = executable.memory(), executable.cost()
        self.programs[executable.handle] = Program(
            executable,
            [Buffer.of(*result) for result in executable.results()],
            memory.results - memory.aliased + memory.temporary,
            memory.code,
            flops,
            accessed,
            count,
            build.device_assignment.SerializeToString(),
        )
        given[4] = executable.handle
        return None

    def _one_partition(self, given: Any) -> None:
        given[1], given[2] = ctypes.addressof(self._logical), 1

    def _assignment(self, given: Any) -> None:
        assignment = self.programs[given[0]].assignment
        self._text(given, assignment)
        given[3], given[4] = given[1], ctypes.cast(_FREES_NOTHING, ctypes.c_void_p).value or 0

    def _execute(self, given: Any) -> None:
        program = self.programs[given[0]]
        program.runs += 1
        self.peak = max(self.peak, self.live + program.working)
        if given[3]:
            row = (ctypes.c_uint64 * len(program.outputs)).from_address(
                ctypes.c_uint64.from_address(given[5]).value
            )
            for index, output in enumerate(program.outputs):
                row[index] = self._made(output)
        if given[6]:
            ctypes.c_uint64.from_address(given[6]).value = self._event_handle

    # -- buffers ------------------------------------------------------------------------------------------

    def _made(self, buffer: Buffer) -> int:
        block = ctypes.create_string_buffer(_HANDLE)
        handle = ctypes.addressof(block)
        self._held[handle] = (buffer, block)
        self.live += buffer.bytes
        self.peak = max(self.peak, self.live)
        return handle

    def _from_host(self, given: Any) -> None:
        rank = given[4]
        shape = (ctypes.c_int64 * max(rank, 1))()
        if rank:
            ctypes.memmove(shape, given[3], 8 * rank)
        given[11], given[12] = self._event_handle, self._made(Buffer(given[2] & 0xFFFFFFFF, shape, rank))

    def _destroy(self, given: Any) -> None:
        self.live -= self._held.pop(given[0])[0].bytes

    def _kind(self, given: Any) -> None:
        given[1] = self._held[given[0]][0].kind

    def _shape(self, given: Any) -> None:
        buffer, _ = self._held[given[0]]
        given[1], given[2] = ctypes.addressof(buffer.shape), buffer.rank

    def _no_dynamic_sizes(self, given: Any) -> None:
        given[1], given[2] = 0, 0

    def _size(self, given: Any) -> None:
        given[1] = self._held[given[0]][0].bytes

    def _to_host(self, given: Any) -> None:
        if given[2]:
            ctypes.memset(given[2], 0, given[3])
            given[4] = self._event_handle
        else:
            given[3] = self._held[given[0]][0].bytes

    def _copied(self, given: Any) -> None:
        given[2] = self._made(self._held[given[0]][0])


def place_on(options: Any, chips: Sequence[int]) -> None:
    """Have ``options``, ``CompileOptions``, ask for one program, a partition on each of ``chips``."""
    build = options.executable_build_options
    build.ClearField("device_assignment")
    build.MergeFrom(messages.ExecutableBuildOptions(**partitions(chips)))


# By position in PJRT's table, which only grows at its end.
_REPLACED: dict[int, Callable[[DryChip, Any], Any]] = {
    5: DryChip._nothing,  # Event_Destroy
    6: DryChip._one,  # Event_IsReady
    7: DryChip._nothing,  # Event_Error
    8: DryChip._nothing,  # Event_Await
    9: DryChip._when_ready,
    10: DryChip._client_create,
    11: DryChip._nothing,  # Client_Destroy
    12: DryChip._client_platform,
    13: DryChip._zero,  # Client_ProcessIndex
    14: DryChip._client_version,
    15: DryChip._every_chip,  # Client_Devices
    16: DryChip._first_chip,  # Client_AddressableDevices
    17: DryChip._looked_up,  # Client_LookupDevice
    18: DryChip._looked_up,  # Client_LookupAddressableDevice
    19: DryChip._memories_of,  # Client_AddressableMemories
    20: DryChip._compile,
    22: DryChip._from_host,  # Client_BufferFromHostBuffer
    24: DryChip._number,  # DeviceDescription_ProcessIndex
    29: DryChip._same,  # Device_GetDescription
    30: DryChip._is_first_chip,  # Device_IsAddressable
    31: DryChip._zero,  # Device_LocalHardwareId
    32: DryChip._memories_of,  # Device_AddressableMemories
    33: DryChip._memory,  # Device_DefaultMemory
    35: DryChip._zero,  # Memory_Id
    36: DryChip._memory_kind,
    37: DryChip._memory_kind,  # Memory_DebugString
    38: DryChip._memory_kind,  # Memory_ToString
    39: DryChip._first_chip,  # Memory_AddressableByDevices
    40: DryChip._nothing,  # Executable_Destroy
    50: DryChip._nothing,  # LoadedExecutable_Destroy
    51: DryChip._same,  # LoadedExecutable_GetExecutable
    52: DryChip._first_chip,  # LoadedExecutable_AddressableDevices
    53: DryChip._nothing,  # LoadedExecutable_Delete
    54: DryChip._zero,  # LoadedExecutable_IsDeleted
    55: DryChip._execute,
    58: DryChip._destroy,
    59: DryChip._kind,
    60: DryChip._shape,
    61: DryChip._shape,  # Buffer_UnpaddedDimensions
    62: DryChip._no_dynamic_sizes,
    64: DryChip._size,
    65: DryChip._of_first_chip,
    66: DryChip._memory,
    67: DryChip._nothing,  # Buffer_Delete
    68: DryChip._zero,  # Buffer_IsDeleted
    69: DryChip._copied,  # Buffer_CopyToDevice
    70: DryChip._to_host,
    71: DryChip._zero,  # Buffer_IsOnCpu
    72: DryChip._event,  # Buffer_ReadyEvent
    117: DryChip._assignment,
    130: DryChip._one_partition,
    97: DryChip._zero,  # Memory_Kind_Id
    92: DryChip._copied,  # Buffer_CopyToMemory
    95: DryChip._client_topology,
    128: DryChip._attributes,  # Device_GetAttributes
}
