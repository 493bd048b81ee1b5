"""Call libtpu's compiler through its C interface, PJRT, for a topology without attached chips.

The functions and structs are defined in ``xla/pjrt/c/pjrt_c_api.h``. This module accesses the
functions and the fields of structs by index. Since version 0.57, new ones have only been appended,
so the indices are valid for every later release. libtpu can terminate the process on errors, so
call it in a child process (:mod:`portable.tpu.compile.worker`).
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from portable.tpu.compile.messages import assign_partitions_to_devices, xla_messages

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    OptionValue: TypeAlias = str | int | float | bool | list[int]

OLDEST_PJRT_VERSION = (0, 57)
"""First version of the interface with the current order of functions."""
# Index of each function in the struct that GetPjrtApi returns.
_FUNCTIONS = {
    "PJRT_Error_Destroy": 0,
    "PJRT_Error_Message": 1,
    "PJRT_Error_GetCode": 2,
    "PJRT_Plugin_Initialize": 3,
    "PJRT_DeviceDescription_Id": 23,
    "PJRT_DeviceDescription_Attributes": 25,
    "PJRT_DeviceDescription_Kind": 26,
    "PJRT_Executable_Destroy": 40,
    "PJRT_Executable_GetCostAnalysis": 46,
    "PJRT_Executable_OptimizedProgram": 48,
    "PJRT_TopologyDescription_Create": 82,
    "PJRT_TopologyDescription_PlatformVersion": 85,
    "PJRT_TopologyDescription_GetDeviceDescriptions": 86,
    "PJRT_Compile": 89,
    "PJRT_Executable_OutputElementTypes": 90,
    "PJRT_Executable_OutputDimensions": 91,
    "PJRT_Executable_GetCompiledMemoryStats": 96,
}
_STRING, _INT64, _INT64_LIST, _FLOAT, _BOOL = range(5)
_SPARE_FIELDS = 24
"""Number of fields that are reserved after the input fields of a struct.

These fields are for the outputs of the function, and for fields that later releases append. A
struct may be longer than the library expects, but not shorter.
"""


class LibtpuError(Exception):
    """Error returned by a libtpu function. The text is libtpu's message.

    Args:
        message: Message from libtpu, often with many lines.
        status_code: Numeric ``absl::StatusCode``. 8 is RESOURCE_EXHAUSTED.
    """

    def __init__(self, message: str, status_code: int) -> None:
        super().__init__(message)
        self.status_code = status_code


class LibtpuInterfaceError(Exception):
    """Error raised if a library is not libtpu, or if its interface is not supported."""


class _PjrtApi(ctypes.Structure):
    """First fields of the struct ``PJRT_Api``. The function pointers follow them."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extensions", ctypes.c_void_p),
        ("version_size", ctypes.c_size_t),
        ("version_extensions", ctypes.c_void_p),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
    )


class _PjrtNamedValue(ctypes.Structure):
    """Struct ``PJRT_NamedValue``."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extensions", ctypes.c_void_p),
        ("name", ctypes.c_void_p),
        ("name_size", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("value", ctypes.c_uint64),
        ("value_size", ctypes.c_size_t),
    )


class _PjrtProgram(ctypes.Structure):
    """Struct ``PJRT_Program``."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extensions", ctypes.c_void_p),
        ("code", ctypes.c_void_p),
        ("code_size", ctypes.c_size_t),
        ("format", ctypes.c_void_p),
        ("format_size", ctypes.c_size_t),
    )


@dataclass(frozen=True)
class ExecutableMemory:
    """High-bandwidth memory that an executable requires on one device, in bytes.

    The attributes have the same order as the fields of ``PJRT_Executable_GetCompiledMemoryStats``.

    Attributes:
        code_bytes: Size of the code.
        argument_bytes: Size of the arguments.
        result_bytes: Size of the results.
        aliased_bytes: Size of the arguments whose buffers are reused for results.
        temporary_bytes: Size of the temporary values.
    """

    code_bytes: int
    argument_bytes: int
    result_bytes: int
    aliased_bytes: int
    temporary_bytes: int


class CostEstimate(NamedTuple):
    """Compiler's estimate of the FLOPs and memory accesses of an executable on one device.

    Values that the compiler does not report are 0.

    Attributes:
        flops: Number of floating-point operations.
        bytes_accessed: Number of bytes that are read and written.
    """

    flops: float
    bytes_accessed: float


class ResultType(NamedTuple):
    """Element type and shape of an executable's result."""

    element_type: int
    """A ``PJRT_Buffer_Type``."""
    shape: list[int]


class Libtpu:
    """libtpu library, loaded into this process.

    The library can terminate the process if an error occurs, so load it in a child process.

    Args:
        path: Path of ``libtpu.so``.

    Raises:
        LibtpuInterfaceError: If the library is not libtpu, or if its PJRT version is not supported.
            Versions from ``OLDEST_PJRT_VERSION`` to below the next major version are supported.
        LibtpuError: If libtpu fails to start.
    """

    def __init__(self, path: Path) -> None:
        try:
            library = ctypes.CDLL(str(path))
            get = library.GetPjrtApi
        except (OSError, AttributeError) as error:
            raise LibtpuInterfaceError(
                f"{path} is not a libtpu library ({error}); set TPU_LIBRARY_PATH to the path of libtpu.so"
            ) from None
        get.restype = ctypes.c_void_p
        self._table: int = get()
        address = self._table
        api = _PjrtApi.from_address(address)
        version = (api.major, api.minor)
        needed = ctypes.sizeof(_PjrtApi) + ctypes.sizeof(ctypes.c_void_p) * (max(_FUNCTIONS.values()) + 1)
        if version[0] != OLDEST_PJRT_VERSION[0] or version < OLDEST_PJRT_VERSION or api.struct_size < needed:
            raise LibtpuInterfaceError(
                f"{path} has PJRT version {version[0]}.{version[1]}, but only versions from "
                f"{OLDEST_PJRT_VERSION[0]}.{OLDEST_PJRT_VERSION[1]} to below {OLDEST_PJRT_VERSION[0] + 1}.0 "
                "are supported; install another version of libtpu"
            )
        self._num_functions = (api.struct_size - ctypes.sizeof(_PjrtApi)) // ctypes.sizeof(ctypes.c_void_p)
        self.interface_version = f"{version[0]}.{version[1]}"
        kind = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
        self._functions = {
            name: kind(
                ctypes.c_void_p.from_address(
                    address + ctypes.sizeof(_PjrtApi) + index * ctypes.sizeof(ctypes.c_void_p)
                ).value
                or 0
            )
            for name, index in _FUNCTIONS.items()
        }
        self.call_function("PJRT_Plugin_Initialize")

    def call_function(self, function: str, *fields: int) -> list[int]:
        """Call a PJRT function, and return the fields of its struct after the call.

        Args:
            function: Name of the function, which must be a key of ``_FUNCTIONS``.
            *fields: Input fields in the order of the struct. Each field occupies eight bytes.

        Returns:
            The input fields, followed by the output fields and by unused fields. The two fields at
            the beginning of every struct are omitted.

        Raises:
            LibtpuError: If the function returns an error.
        """
        filled, error = self._call_raw(function, *fields)
        if not error:
            return filled
        # Ignore errors of these functions. Only the first of them returns an error handle, because the last
        # two return void.
        code = self._call_raw("PJRT_Error_GetCode", error)[0][1] & 0xFFFFFFFF
        _, text, size = self._call_raw("PJRT_Error_Message", error)[0][:3]
        message = _read_string(text, size)
        self._call_raw("PJRT_Error_Destroy", error)
        raise LibtpuError(message, code)

    def _call_raw(self, function: str, *fields: int) -> tuple[list[int], int]:
        """Call a PJRT function, and return its error handle instead of raising an error.

        Each PJRT function receives one struct, from which it reads its inputs and to which it
        writes its outputs.

        Args:
            function: Name of the function.
            *fields: Input fields in the order of the struct. Each field occupies eight bytes.

        Returns:
            A pair. The first value contains the fields of the struct after the call, except the two
            fields at the beginning of every struct. The second value is the error handle, which is
            0 if the function succeeded.
        """
        slots = (ctypes.c_uint64 * (2 + len(fields) + _SPARE_FIELDS))()
        slots[0] = ctypes.sizeof(slots)
        slots[2 : 2 + len(fields)] = [value & (1 << 64) - 1 for value in fields]
        error = self._functions[function](ctypes.addressof(slots))
        return list(slots[2:]), error or 0

    def replace_functions(self, addresses_by_index: Mapping[int, int], *, extension_address: int) -> None:
        """Replace functions in libtpu's table for all other users of the library in this process.

        This object itself still calls the original functions.

        Args:
            addresses_by_index: Address of each new function, keyed by its index in the table. Indices that
                this libtpu release does not support are ignored.
            extension_address: Address of an extension that replaces all of libtpu's extensions, because
                their functions cannot be replaced individually.
        """
        _PjrtApi.from_address(self._table).extensions = extension_address
        for position, function in addresses_by_index.items():
            if position < self._num_functions:
                slot_address = (
                    self._table + ctypes.sizeof(_PjrtApi) + position * ctypes.sizeof(ctypes.c_void_p)
                )
                ctypes.c_void_p.from_address(slot_address).value = function

    def open_topology(self, name: str, **options: OptionValue) -> TpuTopology:
        """Open the topology of a slice by its libtpu name, such as ``v5e:4x4``.

        The machine does not need a TPU.

        Args:
            name: Generation, and number of chips along each axis.
            **options: Topology options, such as ``chips_per_host_bounds`` (three numbers) and
                ``chip_config_name``.

        Raises:
            LibtpuError: If libtpu does not support the slice.
        """
        buffers: list[Any] = []  # keeps the buffers alive during the call
        values = (_PjrtNamedValue * max(1, len(options)))()
        for value, (key, option) in zip(values, options.items(), strict=False):
            _fill_named_value(value, key, option, buffers)
        encoded = name.encode()
        buffer = ctypes.create_string_buffer(encoded)
        filled = self.call_function(
            "PJRT_TopologyDescription_Create",
            ctypes.addressof(buffer),
            len(encoded),
            ctypes.addressof(values),
            len(options),
        )
        return TpuTopology(self, name, filled[4])


class TpuTopology:
    """Topology of a slice to compile for. The topology is never freed.

    Args:
        library: Libtpu library that created the topology.
        name: Name of the slice.
        handle: Address of the topology description.
    """

    def __init__(self, library: Libtpu, name: str, handle: int) -> None:
        self.library = library
        self.name = name
        self.handle = handle
        _, array, count = library.call_function("PJRT_TopologyDescription_GetDeviceDescriptions", handle)[:3]
        self._description_handles = list((ctypes.c_uint64 * count).from_address(array))

    @cached_property
    def device_handles(self) -> dict[int, int]:
        """Handle of each device, keyed by device ID in ascending order.

        A handle is the address of the device's description in libtpu. torch_xla numbers the devices
        by ascending device ID.
        """
        handles = {
            self.library.call_function("PJRT_DeviceDescription_Id", device)[1] & 0xFFFFFFFF: device
            for device in self._description_handles
        }
        return dict(sorted(handles.items()))

    @property
    def device_ids(self) -> list[int]:
        """Device IDs in ascending order."""
        return list(self.device_handles)

    @cached_property
    def device_kind(self) -> str:
        """Libtpu's name for the device type, such as ``TPU v5 lite``."""
        _, text, size = self.library.call_function(
            "PJRT_DeviceDescription_Kind", self._description_handles[0]
        )[:3]
        return _read_string(text, size)

    def read_device_attributes(self, device_id: int) -> dict[str, OptionValue]:
        """Read the attributes of a device, keyed by name.

        Examples are ``coords``, ``num_cores`` and, since 2026, the memory size of the device.
        """
        device = self.device_handles[device_id]
        _, count, array = self.library.call_function("PJRT_DeviceDescription_Attributes", device)[:3]
        return _read_named_values(array, count)

    @cached_property
    def compiler_version(self) -> str:
        """Version of the compiler, including its build date."""
        _, text, size = self.library.call_function("PJRT_TopologyDescription_PlatformVersion", self.handle)[
            :3
        ]
        return _read_string(text, size)

    def compile_module(
        self, module: bytes, *, module_format: str = "hlo", options: bytes | None = None
    ) -> LibtpuExecutable:
        """Compile a module for devices in the slice.

        Args:
            module: Module with its shardings and donated buffers, serialized in ``module_format``.
            module_format: ``hlo`` for an ``HloModuleProto``, or ``mlir`` for StableHLO bytecode
                from torch_tpu.
            options: Serialized ``CompileOptionsProto``. The default is torch_xla's options for a
                graph on all devices in the slice. The options are required if ``module_format`` is
                ``mlir``.

        Returns:
            The executable. It is not freed until the caller calls :meth:`LibtpuExecutable.destroy`.

        Raises:
            LibtpuError: If the module does not compile, or requires more memory than a device has.
        """
        if options is None:
            options = build_compile_options(self.device_ids, is_tupled=_has_tuple_parameter(module))
        program = _PjrtProgram(ctypes.sizeof(_PjrtProgram))
        buffers = [
            ctypes.create_string_buffer(data, len(data)) for data in (module, module_format.encode(), options)
        ]
        program.code, program.code_size = ctypes.addressof(buffers[0]), len(module)
        program.format, program.format_size = ctypes.addressof(buffers[1]), len(module_format)
        filled = self.library.call_function(
            "PJRT_Compile",
            self.handle,
            ctypes.addressof(program),
            ctypes.addressof(buffers[2]),
            len(options),
            0,  # no client
        )
        return LibtpuExecutable(self.library, filled[5])


class LibtpuExecutable:
    """Executable that libtpu has compiled from an HLO or StableHLO module.

    Its methods read its memory, its cost, the types of its results and its scheduled module. Call
    :meth:`destroy` to free the executable, because Python does not free it automatically.

    Args:
        library: Libtpu library that compiled the module.
        handle: Address of the executable.
    """

    def __init__(self, library: Libtpu, handle: int) -> None:
        self._library = library
        self.handle = handle

    def read_memory_usage(self) -> ExecutableMemory:
        """Read the compiler's estimate of the device memory that the executable requires."""
        return ExecutableMemory(
            *self._library.call_function("PJRT_Executable_GetCompiledMemoryStats", self.handle)[1:6]
        )

    def read_cost_estimate(self) -> CostEstimate:
        """Read the compiler's cost analysis of this program, for one device.

        The compiler counts the body of each loop only once. A number that it does not report is 0.
        """
        _, count, array = self._library.call_function("PJRT_Executable_GetCostAnalysis", self.handle)[:3]
        analysis = _read_named_values(array, count)
        numbers = (analysis.get("flops"), analysis.get("bytes accessed"))
        flops, accessed = (float(number) if isinstance(number, int | float) else 0.0 for number in numbers)
        return CostEstimate(flops, accessed)

    def read_result_types(self) -> list[ResultType]:
        """Read the element type and the shape of each result."""
        _, kinds, count = self._library.call_function("PJRT_Executable_OutputElementTypes", self.handle)[:3]
        _, _, sizes, ranks = self._library.call_function("PJRT_Executable_OutputDimensions", self.handle)[:4]
        if not count:
            return []
        dim_counts = (ctypes.c_size_t * count).from_address(ranks)
        dimensions = iter((ctypes.c_int64 * sum(dim_counts)).from_address(sizes))
        return [
            ResultType(kind, [next(dimensions) for _ in range(rank)])
            for kind, rank in zip((ctypes.c_int * count).from_address(kinds), dim_counts, strict=True)
        ]

    def read_scheduled_module(self) -> bytes:
        """Read the scheduled module as a serialized ``HloModuleProto``.

        Raises:
            LibtpuInterfaceError: If libtpu returns the module in another format.
        """
        program = _PjrtProgram(ctypes.sizeof(_PjrtProgram))
        self._library.call_function(
            "PJRT_Executable_OptimizedProgram", self.handle, ctypes.addressof(program)
        )
        buffer = ctypes.create_string_buffer(program.code_size)
        program.code = ctypes.addressof(buffer)
        self._library.call_function(
            "PJRT_Executable_OptimizedProgram", self.handle, ctypes.addressof(program)
        )
        kind = _read_string(program.format, program.format_size)
        if kind == "hlo_with_config":
            return bytes(xla_messages.HloModuleWithConfig.FromString(buffer.raw).hlo_module)
        if kind == "hlo":
            return buffer.raw
        raise LibtpuInterfaceError(
            f"libtpu returns programs in the format {kind}, not as HLO; install another version of libtpu"
        )

    def destroy(self) -> None:
        """Free the executable."""
        self._library.call_function("PJRT_Executable_Destroy", self.handle)


def build_compile_options(device_ids: Sequence[int], *, is_tupled: bool) -> bytes:
    """Build the serialized ``CompileOptionsProto`` that torch_xla uses for an SPMD graph.

    Args:
        device_ids: Device IDs. Each device receives one partition.
        is_tupled: Whether the parameters of the graph are combined in one tuple.
    """
    build = xla_messages.ExecutableBuildOptions(
        device_ordinal=-1,
        use_spmd_partitioning=True,
        # Allow the compiler to propagate shardings to the results, because otherwise each result is
        # replicated.
        allow_spmd_sharding_propagation_to_output=[True],
    )
    assign_partitions_to_devices(build, device_ids)
    options = xla_messages.CompileOptions(
        parameter_is_tupled_arguments=is_tupled, executable_build_options=build
    )
    return bytes(options.SerializeToString())


def _has_tuple_parameter(module: bytes) -> bool:
    """Return whether a serialized ``HloModuleProto`` takes all parameters as one tuple."""
    parameters = xla_messages.HloModuleProto.FromString(module).host_program_shape.parameters
    return len(parameters) == 1 and bool(parameters[0].tuple_shapes)


def _fill_named_value(target: _PjrtNamedValue, name: str, value: OptionValue, buffers: list[Any]) -> None:
    """Fill a ``PJRT_NamedValue`` in place.

    Supports strings, integers and lists of integers. A bool is passed as an integer.

    The struct contains pointers. The memory that they refer to is appended to ``buffers``, which
    must be kept alive while the struct is in use.
    """
    buffer = ctypes.create_string_buffer(name.encode())
    target.struct_size = ctypes.sizeof(_PjrtNamedValue)
    target.name, target.name_size = ctypes.addressof(buffer), len(name.encode())
    buffers.append(buffer)
    if isinstance(value, list):
        numbers = (ctypes.c_int64 * len(value))(*value)
        target.type, target.value, target.value_size = _INT64_LIST, ctypes.addressof(numbers), len(value)
        buffers.append(numbers)
    elif isinstance(value, str):
        text = ctypes.create_string_buffer(value.encode())
        target.type, target.value, target.value_size = _STRING, ctypes.addressof(text), len(value.encode())
        buffers.append(text)
    else:
        assert isinstance(value, int)
        target.type, target.value, target.value_size = _INT64, value, 1


def _read_named_values(address: int, count: int) -> dict[str, OptionValue]:
    """Convert an array of ``PJRT_NamedValue`` structs to a dict."""
    if not count:
        return {}
    values = (_PjrtNamedValue * count).from_address(address)
    return {_read_string(value.name, value.name_size): _read_named_value(value) for value in values}


def _read_named_value(value: _PjrtNamedValue) -> OptionValue:
    """Convert the value in a ``PJRT_NamedValue`` to a Python object."""
    raw = int(value.value)
    if value.type == _STRING:
        return _read_string(raw, value.value_size)
    if value.type == _INT64:
        return ctypes.c_int64(raw).value
    if value.type == _INT64_LIST:
        return list((ctypes.c_int64 * value.value_size).from_address(raw)) if value.value_size else []
    if value.type == _FLOAT:
        return float(struct.unpack("<f", struct.pack("<I", raw & 0xFFFFFFFF))[0])
    return bool(raw & 0xFF)


def _read_string(address: int | None, size: int) -> str:
    return ctypes.string_at(address, size).decode("utf-8", "replace") if address and size else ""
