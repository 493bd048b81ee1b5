"""Simulate a TPU chip that compiles programs but does not execute them.

torch_tpu accesses chips through libtpu's function table (PJRT). This module replaces the
functions in the table that require a chip, so the trainer's code runs unchanged. libtpu's real
compiler compiles each program for the topology of the slice. The simulated chip counts the
memory that each program would use.

A simulated buffer has a type, a shape and a size. Values are only stored for small buffers that
are copied from the host. Copies of these buffers, and the results of a collective with a single
argument, have the same values. All other buffers are read as zeros.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
import time
import traceback
from collections import Counter
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any

from portable.tpu.compile.libtpu import LibtpuError
from portable.tpu.compile.messages import assign_partitions_to_devices, xla_messages
from portable.tpu.compile.worker import build_compiled_graph

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from portable.planner.compiled_graph import CompiledGraph
    from portable.tpu.compile.libtpu import TpuTopology

_PJRT_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
_READY_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
_NO_OP_DELETER = _PJRT_FUNCTION(lambda address: None)
_HOST_ALLOCATOR = 23  # PJRT_Extension_Type_HostMemoryAllocator
_ALIGNMENT = 64  # bytes
# Number of bits per element for each PJRT_Buffer_Type, beginning with PRED, as in xla/pjrt/c/pjrt_c_api.h.
_ELEMENT_BITS = (
    8,
    8,
    16,
    32,
    64,
    8,
    16,
    32,
    64,
    16,
    32,
    64,
    16,
    64,
    128,
    8,
    8,
    8,
    8,
    8,
    4,
    4,
    0,
    2,
    2,
    8,
    8,
    8,
    4,
)
# Maximum size in bytes of a buffer whose values are kept when they are copied from the host.
_MAX_STORED_BYTES = 1 << 16


@dataclass(frozen=True)
class DryBuffer:
    """Buffer in the simulated chip's memory.

    Attributes:
        element_type: Element type, as a ``PJRT_Buffer_Type``.
        shape: Size of each dim, as a ctypes array. For a scalar, it has one unused element.
        num_dims: Number of dims.
        first_bytes: First bytes of the content. All other bytes are zero.
    """

    element_type: int
    shape: Any
    num_dims: int
    first_bytes: bytes = b""

    @classmethod
    def from_sizes(cls, element_type: int, sizes: Sequence[int]) -> DryBuffer:
        """Create a buffer of zeros.

        Args:
            element_type: Element type, as a ``PJRT_Buffer_Type``.
            sizes: Size of each dim.
        """
        return cls(element_type, (ctypes.c_int64 * max(len(sizes), 1))(*sizes), len(sizes))

    @property
    def size_bytes(self) -> int:
        """Size of the content in bytes."""
        return -(
            -math.prod(list[int](self.shape[: self.num_dims])) * _ELEMENT_BITS[self.element_type - 1] // 8
        )


@dataclass
class DryProgram:
    """Compiled program that the simulated chip can run.

    Attributes:
        graph: Memory and operations of the program.
        outputs: Templates for the output buffers. Each run of the program adds copies of them to
            the chip.
        device_assignment_fields: Device assignment in the form in which torch_tpu reads it. The
            four fields are the address and the size of the serialized assignment, the handle of its
            owner, and the address of a function that frees the owner.
    """

    graph: CompiledGraph
    outputs: list[DryBuffer]
    device_assignment_fields: tuple[int, ...]


class DryMemory:
    """Memory of the simulated chip, which several threads of torch_tpu change at the same time.

    Each buffer has a handle. Indexing with a handle, as in ``memory[handle]``, returns the buffer.

    Attributes:
        live_bytes: Size of all existing buffers in bytes.
        peak_bytes: Peak size of the existing buffers and the running program in bytes.
    """

    def __init__(self) -> None:
        self.live_bytes = 0
        """Size of all existing buffers in bytes."""
        self.peak_bytes = 0
        """Peak size of the existing buffers and the running program in bytes."""
        self._buffer_by_handle: dict[int, DryBuffer] = {}
        self._handles = count(_ALIGNMENT, _ALIGNMENT)
        self._lock = threading.Lock()

    def __getitem__(self, handle: int) -> DryBuffer:
        return self._buffer_by_handle[handle]

    def add(self, buffer: DryBuffer) -> int:
        """Add a buffer, and return its handle."""
        with self._lock:
            handle = next(self._handles)
            self._buffer_by_handle[handle] = buffer
            self.live_bytes += buffer.size_bytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return handle

    def remove(self, handle: int) -> None:
        """Remove a buffer."""
        with self._lock:
            self.live_bytes -= self._buffer_by_handle.pop(handle).size_bytes

    def update_peak(self, working_bytes: int) -> None:
        """Update the peak for a program that needs ``working_bytes`` in addition to the existing buffers."""
        with self._lock:
            self.peak_bytes = max(self.peak_bytes, self.live_bytes + working_bytes)


class DryChip:
    """Simulated chip. The constructor replaces the functions of libtpu that require a chip.

    The functions are replaced in libtpu's PJRT function table. Create this object before torch_tpu
    reads the table. Keep the object alive until the process ends, because it owns the new
    functions.

    Args:
        topology: TPU slice. This process uses its first chip.
        large_value_elements: Minimum number of elements for a value in a program to be reported as
            large.
        on_compile_error: Callback that receives the error if a program does not compile. It must
            end the process.

    Attributes:
        programs: Compiled programs, keyed by handle.
        run_counts: Number of runs of each program, keyed by handle.
        memory: Buffers of the chip, and their sizes.
    """

    def __init__(
        self,
        topology: TpuTopology,
        large_value_elements: int,
        on_compile_error: Callable[[LibtpuError], None],
    ) -> None:
        self._topology, self._large_value_elements, self._on_compile_error = (
            topology,
            large_value_elements,
            on_compile_error,
        )
        self.programs: dict[int, DryProgram] = {}
        self.run_counts: Counter[int] = Counter()
        """Number of runs of each program, keyed by handle."""
        self.memory = DryMemory()
        """Buffers of the chip, and their sizes."""
        self._kept_alive: list[Any] = []
        self._libc = ctypes.CDLL(None)
        self._libc.aligned_alloc.restype = ctypes.c_void_p
        self._memory_handle, self._event = (self._store_words(*[0] * 8) for _ in range(2))
        allocator = self._store_words(
            32, _HOST_ALLOCATOR, 0, self._make_c_function(self._allocate_host_memory)
        )
        replaced = {
            position: self._make_c_function(answer)
            for position, answer in self._build_function_table().items()
        }
        topology.library.replace_functions(replaced, extension_address=allocator)

    def _make_c_function(self, handler: Callable[[Any], Sequence[int] | None]) -> int:
        """Make a C function for libtpu's function table, and return its address.

        A PJRT function has one argument, a struct of 64-bit fields. The first two fields are the
        same in all structs, and are not passed to the handler.

        If the handler raises a :class:`LibtpuError`, the error is passed to ``on_compile_error``.
        Any other exception is printed and ends the process with exit code 70.

        Args:
            handler: Python function that receives the remaining fields as an array. The first field
                in the array is always an input. The handler either returns new values for the
                fields that follow this input, or it sets fields of the array in place and returns
                None.
        """

        def call_handler(address: int) -> None:
            size = ctypes.c_size_t.from_address(address).value
            try:
                arguments = (ctypes.c_uint64 * (-(-size // 8) - 2)).from_address(address + 16)
                fields: list[Any] = list(handler(arguments) or ())
                arguments[1 : 1 + len(fields)] = fields
            except LibtpuError as error:
                self._on_compile_error(error)
            except BaseException:  # an exception must not propagate into C code
                traceback.print_exc()
                os._exit(70)

        function = _PJRT_FUNCTION(call_handler)
        self._kept_alive.append(function)
        return _get_function_address(function)

    def _store_words(self, *values: int) -> int:
        """Store 64-bit values for the lifetime of this object.

        Returns:
            The address of the first value.
        """
        array = (ctypes.c_uint64 * len(values))(*values)
        self._kept_alive.append(array)
        return ctypes.addressof(array)

    def _store_bytes(self, text: bytes) -> tuple[int, int]:
        """Store a byte string for the lifetime of this object, and return its address and length."""
        buffer = ctypes.create_string_buffer(text)
        self._kept_alive.append(buffer)
        return ctypes.addressof(buffer), len(text)

    def _build_function_table(self) -> dict[int, Callable[[Any], Sequence[int] | None]]:
        """Build the functions that replace libtpu's functions, keyed by their index in PJRT's table.

        An index is valid for all releases, because new functions are only appended to the table. The
        structs are defined in pjrt_c_api.h.
        """
        topology, buffers, memory = self._topology, self.memory, self._memory_handle
        device_numbers = {chip: number for number, chip in topology.device_handles.items()}
        chips = list(device_numbers)
        this_device = _make_constant_handler(self._store_words(chips[0]), 1)
        memories = _make_constant_handler(self._store_words(memory), 1)
        kind = _make_constant_handler(*self._store_bytes(b"device"))

        def look_up_device(arguments: Any) -> Sequence[int]:
            return arguments[1], topology.device_handles[arguments[1] & 0xFFFFFFFF]

        def copy_buffer(arguments: Any) -> Sequence[int]:
            return arguments[1], buffers.add(buffers[arguments[0]])

        return {
            # Events, which are always complete.
            5: _make_constant_handler(),  # Event_Destroy
            6: _make_constant_handler(1),  # Event_IsReady
            7: _make_constant_handler(),  # Event_Error
            8: _make_constant_handler(),  # Event_Await
            9: lambda given: _READY_CALLBACK(given[1])(None, given[2]),  # Event_OnReady
            # The client, its devices and their memory.
            10: lambda given: [*given[1:6], topology.handle],  # Client_Create
            11: _make_constant_handler(),  # Client_Destroy
            12: _make_constant_handler(*self._store_bytes(b"tpu")),  # Client_PlatformName
            13: _make_constant_handler(0),  # Client_ProcessIndex
            14: _make_constant_handler(
                *self._store_bytes(topology.compiler_version.encode())
            ),  # Client_PlatformVersion
            15: _make_constant_handler(self._store_words(*chips), len(chips)),  # Client_Devices
            16: this_device,  # Client_AddressableDevices
            17: look_up_device,  # Client_LookupDevice
            18: look_up_device,  # Client_LookupAddressableDevice
            19: memories,  # Client_AddressableMemories
            # DeviceDescription_ProcessIndex: one process per chip.
            24: lambda given: [device_numbers[given[0]]],
            29: lambda given: [given[0]],  # Device_GetDescription
            30: lambda given: [given[0] == chips[0]],  # Device_IsAddressable
            31: _make_constant_handler(0),  # Device_LocalHardwareId
            32: memories,  # Device_AddressableMemories
            33: _make_constant_handler(memory),  # Device_DefaultMemory
            35: _make_constant_handler(0),  # Memory_Id
            36: kind,  # Memory_Kind
            37: kind,  # Memory_DebugString
            38: kind,  # Memory_ToString
            39: this_device,  # Memory_AddressableByDevices
            95: _make_constant_handler(topology.handle),  # Client_TopologyDescription
            97: _make_constant_handler(0),  # Memory_Kind_Id
            128: self._get_device_attributes,  # Device_GetAttributes
            # Programs.
            20: self._compile_program,  # Client_Compile
            40: _make_constant_handler(),  # Executable_Destroy
            50: _make_constant_handler(),  # LoadedExecutable_Destroy
            51: lambda given: [given[0]],  # LoadedExecutable_GetExecutable
            52: this_device,  # LoadedExecutable_AddressableDevices
            53: _make_constant_handler(),  # LoadedExecutable_Delete
            54: _make_constant_handler(0),  # LoadedExecutable_IsDeleted
            55: self._execute_program,  # LoadedExecutable_Execute
            117: lambda given: (
                self.programs[given[0]].device_assignment_fields
            ),  # LoadedExecutable_GetDeviceAssignment
            130: _make_constant_handler(
                self._store_words(0), 1
            ),  # LoadedExecutable_AddressableDeviceLogicalIds
            # Buffers.
            22: self._copy_buffer_from_host,  # Client_BufferFromHostBuffer
            58: self._destroy_buffer,  # Buffer_Destroy
            59: lambda given: [buffers[given[0]].element_type],  # Buffer_ElementType
            60: self._get_buffer_shape,  # Buffer_Dimensions
            61: self._get_buffer_shape,  # Buffer_UnpaddedDimensions
            62: _make_constant_handler(0, 0),  # Buffer_DynamicDimensionIndices
            64: lambda given: [buffers[given[0]].size_bytes],  # Buffer_OnDeviceSizeInBytes
            65: _make_constant_handler(chips[0]),  # Buffer_Device
            66: _make_constant_handler(memory),  # Buffer_Memory
            67: _make_constant_handler(),  # Buffer_Delete
            68: _make_constant_handler(0),  # Buffer_IsDeleted
            69: copy_buffer,  # Buffer_CopyToDevice
            70: self._copy_buffer_to_host,  # Buffer_ToHostBuffer
            71: _make_constant_handler(0),  # Buffer_IsOnCpu
            72: _make_constant_handler(self._event),  # Buffer_ReadyEvent
            92: copy_buffer,  # Buffer_CopyToMemory
        }

    # -- the client ---------------------------------------------------------------------------------------

    def _get_device_attributes(self, arguments: Any) -> Sequence[int]:
        _, size, array = self._topology.library.call_function(
            "PJRT_DeviceDescription_Attributes", arguments[0]
        )[:3]
        return array, size, array, _get_function_address(_NO_OP_DELETER)

    def _allocate_host_memory(self, arguments: Any) -> None:
        """Allocate aligned host memory for transfers.

        The address and the function that frees the memory are written to ``arguments``.
        """
        size = ctypes.c_size_t(-(-arguments[1] // _ALIGNMENT) * _ALIGNMENT)
        arguments[3:6] = (
            self._libc.aligned_alloc(_ALIGNMENT, size) or 0,
            _get_function_address(self._libc.free),
            0,
        )

    # -- programs -----------------------------------------------------------------------------------------

    def _compile_program(self, arguments: Any) -> None:
        """Compile a StableHLO program, and add it to :attr:`programs`.

        The compile options in ``arguments`` contain the number of partitions. The program is
        compiled for this many chips, which are the first chips in the slice.

        Args:
            arguments: Fields of PJRT's struct for the call, as in :meth:`_make_c_function`. The
                field for the result is set to the handle of the compiled program.
        """
        program = (ctypes.c_uint64 * 4).from_address(arguments[1] + 16)
        code = ctypes.string_at(program[0], program[1])
        options = xla_messages.CompileOptions.FromString(ctypes.string_at(arguments[2], arguments[3]))
        build = options.executable_build_options
        chips = build.num_partitions or 1
        assign_partitions_to_devices(build, self._topology.device_ids[:chips])
        start = time.monotonic()
        executable = self._topology.compile_module(
            code, module_format="mlir", options=options.SerializeToString()
        )
        seconds = time.monotonic() - start
        assignment, size = self._store_bytes(build.device_assignment.SerializeToString())
        self.programs[executable.handle] = DryProgram(
            build_compiled_graph(executable, "a program", chips, self._large_value_elements, seconds),
            [DryBuffer.from_sizes(*result) for result in executable.read_result_types()],
            (assignment, size, assignment, _get_function_address(_NO_OP_DELETER)),
        )
        arguments[4] = executable.handle

    def _execute_program(self, arguments: Any) -> None:
        """Simulate the execution of a program, without computing its outputs.

        Counts the run, updates the peak memory, and creates the output buffers. The outputs are
        zeros, except for a collective program with a single argument. Its outputs begin with the
        same bytes as the argument, as if all other ranks contributed zeros to the collective.
        """
        program = self.programs[arguments[0]]
        self.run_counts[arguments[0]] += 1
        self.memory.update_peak(program.graph.working_bytes)
        values = b""
        if program.graph.collectives and arguments[4] == 1:  # the other ranks send zeros
            (argument,) = _read_first_device_row(arguments[2], 1)
            values = self.memory[argument].first_bytes
        row = _read_first_device_row(arguments[5], len(program.outputs))
        for index, output in enumerate(program.outputs):
            row[index] = self.memory.add(replace(output, first_bytes=values))
        if arguments[6]:
            ctypes.c_uint64.from_address(arguments[6]).value = self._event

    # -- buffers ------------------------------------------------------------------------------------------

    def _copy_buffer_from_host(self, arguments: Any) -> None:
        sizes = (ctypes.c_int64 * arguments[4]).from_address(arguments[3]) if arguments[4] else ()
        buffer = DryBuffer.from_sizes(arguments[2] & 0xFFFFFFFF, sizes)
        if buffer.size_bytes <= _MAX_STORED_BYTES:
            buffer = replace(buffer, first_bytes=ctypes.string_at(arguments[1], buffer.size_bytes))
        arguments[11], arguments[12] = self._event, self.memory.add(buffer)

    def _destroy_buffer(self, arguments: Any) -> None:
        self.memory.remove(arguments[0])

    def _get_buffer_shape(self, arguments: Any) -> Sequence[int]:
        buffer = self.memory[arguments[0]]
        return ctypes.addressof(buffer.shape), buffer.num_dims

    def _copy_buffer_to_host(self, arguments: Any) -> None:
        """Copy the content of a buffer to host memory, or report the size of the buffer.

        Only the stored first bytes of the buffer are copied. The remaining bytes of the destination
        become zero. If the caller passes no host address in ``arguments``, nothing is copied. Only the
        size of the buffer in bytes is then stored in ``arguments``.
        """
        buffer = self.memory[arguments[0]]
        if arguments[2]:
            ctypes.memset(arguments[2], 0, arguments[3])
            ctypes.memmove(arguments[2], buffer.first_bytes, min(arguments[3], len(buffer.first_bytes)))
            arguments[4] = self._event
        else:
            arguments[3] = buffer.size_bytes


def _make_constant_handler(*fields: int) -> Callable[[Any], Sequence[int]]:
    """Make a handler that returns ``fields`` for any arguments."""
    return lambda given: fields


def _get_function_address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _read_first_device_row(addresses: int, length: int) -> Any:
    """Return the first device's handles from a C array that contains one array of handles per device.

    The result is a view of the C memory. Assignments to its elements change the array of the
    caller.

    Args:
        addresses: Address of an array of pointers to the arrays of handles.
        length: Number of handles in the first device's array.
    """
    return (ctypes.c_uint64 * length).from_address(ctypes.c_uint64.from_address(addresses).value)
