"""A slice of TPU chips for torch_tpu on a machine without one, with one process per chip.

torch_tpu opens its device through a PJRT plugin. This module replaces the plugin by XLA's for the CPU, and
some functions in its table: each process has all chips of the slice and owns one. A program with collectives
runs on all of them in every process, on inputs that the processes exchange through files. So torch_tpu's
front end, its process group and its collectives are the same as on a TPU, but the arithmetic is a CPU's.
Speed, memory and the links between chips are not emulated. Such a test is valid for the program, not for the
chip.

Limits: no custom call (flash attention: use eager), no statistics of memory, and ``cumsum`` is computed on
the host, because XLA's CPU compiler ends the process on torch_tpu's form of it. A process runs its own
program for all chips: if torch_tpu fuses a collective with a computation that differs between ranks, such as
a broadcast under Muon and no_shard, results are wrong here, which does not imply an error on a TPU.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from portable.tpu.compile.messages import assign_partitions_to_devices, xla_messages

PATIENCE = 120.0  # seconds that a chip waits for the others, when a TPU would hang
POINTER, SIZE, INT, INT64 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int64
FUNCTION = ctypes.CFUNCTYPE(POINTER, POINTER)
COLLECTIVE = re.compile(
    rb"all_reduce|all_gather|reduce_scatter|all_to_all|collective_permute|collective_broadcast"
)

# The position of a function in PJRT's table, and its arguments after the size and the extensions. The table
# only grows at its end: openxla/xla, xla/pjrt/c/pjrt_c_api.h.
TABLE: dict[str, tuple[int, list[tuple[str, Any]]]] = {
    "Error_Message": (1, [("error", POINTER), ("text", POINTER), ("size", SIZE)]),
    "Event_Destroy": (5, [("event", POINTER)]),
    "Event_Await": (8, [("event", POINTER)]),
    "Client_Create": (10, [("options", POINTER), ("count", SIZE)]),
    "Client_PlatformName": (12, [("client", POINTER), ("name", POINTER), ("size", SIZE)]),
    "Client_ProcessIndex": (13, [("client", POINTER), ("index", INT)]),
    "Client_Devices": (15, [("client", POINTER), ("devices", ctypes.POINTER(POINTER)), ("count", SIZE)]),
    "Client_AddressableDevices": (16, [("client", POINTER), ("devices", POINTER), ("count", SIZE)]),
    "Client_Compile": (
        20,
        [("client", POINTER), ("program", POINTER), ("options", POINTER), ("size", SIZE), ("made", POINTER)],
    ),
    "Client_BufferFromHostBuffer": (
        22,
        [
            *(("client", POINTER), ("data", POINTER), ("kind", INT), ("shape", POINTER), ("rank", SIZE)),
            *(("strides", POINTER), ("stride_count", SIZE), ("semantics", INT), ("device", POINTER)),
            *(("memory", POINTER), ("layout", POINTER), ("copied", POINTER), ("buffer", POINTER)),
        ],
    ),
    "DeviceDescription_Id": (23, [("description", POINTER), ("id", INT)]),
    "DeviceDescription_ProcessIndex": (24, [("description", POINTER), ("index", INT)]),
    "Device_GetDescription": (29, [("device", POINTER), ("description", POINTER)]),
    "Device_IsAddressable": (30, [("device", POINTER), ("addressable", ctypes.c_bool)]),
    "Executable_Destroy": (40, [("executable", POINTER)]),
    "Executable_NumOutputs": (44, [("executable", POINTER), ("count", SIZE)]),
    "Executable_OutputMemoryKinds": (
        47,
        [("executable", POINTER), ("count", SIZE), ("kinds", POINTER), ("sizes", POINTER)],
    ),
    "LoadedExecutable_GetExecutable": (51, [("loaded", POINTER), ("executable", POINTER)]),
    "LoadedExecutable_AddressableDevices": (
        52,
        [("loaded", POINTER), ("devices", POINTER), ("count", SIZE)],
    ),
    "LoadedExecutable_Execute": (
        55,
        [
            *(("loaded", POINTER), ("options", POINTER), ("inputs", ctypes.POINTER(ctypes.POINTER(POINTER)))),
            *(("devices", SIZE), ("input_count", SIZE)),
            *(("outputs", ctypes.POINTER(ctypes.POINTER(POINTER))), ("events", ctypes.POINTER(POINTER))),
            ("device", POINTER),
        ],
    ),
    "Buffer_Destroy": (58, [("buffer", POINTER)]),
    "Buffer_ElementType": (59, [("buffer", POINTER), ("kind", INT)]),
    "Buffer_Dimensions": (60, [("buffer", POINTER), ("shape", ctypes.POINTER(INT64)), ("rank", SIZE)]),
    "Buffer_ToHostBuffer": (
        70,
        [("buffer", POINTER), ("layout", POINTER), ("to", POINTER), ("size", SIZE), ("event", POINTER)],
    ),
}
_HEADER: Any = [("struct_size", SIZE), ("extensions", POINTER)]
ARGUMENTS: dict[str, Any] = {
    name: type(name, (ctypes.Structure,), {"_fields_": [*_HEADER, *fields]})
    for name, (_, fields) in TABLE.items()
}


class NamedValue(ctypes.Structure):
    """An option of a client."""

    _fields_ = (
        *_HEADER,
        *(("name", POINTER), ("name_size", SIZE), ("kind", INT), ("value", INT64), ("value_size", SIZE)),
    )


class Program(ctypes.Structure):
    """The program to compile."""

    _fields_ = (*_HEADER, ("code", POINTER), ("size", SIZE), ("format", POINTER), ("format_size", SIZE))


class HostAllocation(ctypes.Structure):
    """The arguments of the extension that allocates pinned host memory."""

    _fields_ = (
        *_HEADER,
        *(("client", POINTER), ("size", SIZE), ("numa", INT)),
        *(("memory", POINTER), ("free", POINTER), ("argument", POINTER)),
    )


class Extension(ctypes.Structure):
    """The extension for pinned host memory in the list of extensions."""

    _fields_ = (("struct_size", SIZE), ("kind", INT), ("next", POINTER), ("allocate", POINTER))


HOST_ALLOCATOR = 23  # PJRT_Extension_Type_HostMemoryAllocator


# -- CompileOptionsProto ---------------------------------------------------------------------------------


def for_cpu(options: bytes, chip: int | None = None) -> bytes:
    """Return the options without the options of libtpu; with a ``chip``, only for this chip."""
    found = xla_messages.CompileOptions.FromString(options)
    kept = [one for one in found.env_option_overrides if b"xla_tpu" not in one]
    del found.env_option_overrides[:]
    found.env_option_overrides.extend(kept)
    if chip is not None:
        assign_partitions_to_devices(found.executable_build_options, [chip])
    return bytes(found.SerializeToString())


def chips_of(options: bytes) -> list[int]:
    """Return the chip of each partition."""
    assignment = xla_messages.CompileOptions.FromString(options).executable_build_options.device_assignment
    return [chip for part in assignment.computation_devices for chip in part.replica_device_ids]


# -- the slice -------------------------------------------------------------------------------------------


class Slice:
    """The plugin with a changed table. Replaced functions are methods with lower-case names."""

    def __init__(self, plugin: Path, room: Path) -> None:
        self._room = room
        self._rank, self._chips = 0, 1
        library = ctypes.CDLL(str(plugin))
        library.GetPjrtApi.restype = POINTER
        table: int = library.GetPjrtApi()
        self._slots = {name: POINTER.from_address(table + 40 + 8 * at) for name, (at, _) in TABLE.items()}
        self._plugin: dict[str, Any] = {name: FUNCTION(slot.value or 0) for name, slot in self._slots.items()}
        self._kept: list[Any] = []  # objects that C code has pointers to
        self._devices: list[int] = []
        self._client: int | None = None
        self._mine = (POINTER * 1)()
        self._collectives: dict[int, list[int]] = {}
        """The chips of each loaded program with collectives."""
        self._turn = 0
        for name in TABLE:
            if hasattr(self, name.lower()):
                self._replace(name)
        self._allocate_on_host(table)

    def _replace(self, name: str) -> None:
        method, kind = getattr(self, name.lower()), ARGUMENTS[name]

        def called(address: int) -> int | None:
            try:
                answer: int | None = method(kind.from_address(address), address)
            except BaseException:  # nothing may be raised into C code
                traceback.print_exc()
                os._exit(70)
            return answer

        callback = FUNCTION(called)
        self._kept.append(callback)
        self._slots[name].value = ctypes.cast(callback, POINTER).value

    def _call(self, name: str, **values: Any) -> Any:
        """Call the plugin's function. Returns its arguments, which have the results."""
        given = ARGUMENTS[name](**values)
        given.struct_size = ctypes.sizeof(given)
        error = self._plugin[name](ctypes.addressof(given))
        if error:
            told = self._call("Error_Message", error=error)
            raise RuntimeError(f"{name}: {ctypes.string_at(told.text, told.size).decode(errors='replace')}")
        return given

    def _as_it_is(self, name: str, address: int) -> int | None:
        """Call the plugin's function with unchanged arguments. Returns its error."""
        error: int | None = self._plugin[name](address)
        return error

    def _allocate_on_host(self, table: int) -> None:
        libc = ctypes.CDLL(None)

        def allocate(address: int) -> None:
            wanted, memory = HostAllocation.from_address(address), POINTER()
            libc.posix_memalign(ctypes.byref(memory), SIZE(64), SIZE(max(wanted.size, 1)))
            wanted.memory, wanted.free = memory.value, ctypes.cast(libc.free, POINTER).value
            wanted.argument = None

        first = POINTER.from_address(table + 8)
        callback = FUNCTION(allocate)
        extension = Extension(
            ctypes.sizeof(Extension), HOST_ALLOCATOR, first.value, ctypes.cast(callback, POINTER).value
        )
        self._kept += [callback, extension, libc]
        first.value = ctypes.addressof(extension)

    def client_create(self, given: Any, address: int) -> int | None:
        # Only now: a launcher may set them after the process has started.
        self._rank, self._chips = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        options = ctypes.cast(given.options, ctypes.POINTER(NamedValue))
        kept = [options[index] for index in range(given.count)]
        of_tpu = b"premapped_buffer_size"
        kept = [option for option in kept if ctypes.string_at(option.name, option.name_size) != of_tpu]
        name = ctypes.create_string_buffer(b"cpu_device_count")
        kept.append(
            NamedValue(ctypes.sizeof(NamedValue), None, ctypes.addressof(name), 16, 1, self._chips, 1)
        )
        array = (NamedValue * len(kept))(*kept)
        self._kept += [name, array]
        given.options, given.count = ctypes.addressof(array), len(kept)
        return self._as_it_is("Client_Create", address)

    def client_platformname(self, given: Any, address: int) -> None:
        name = ctypes.create_string_buffer(b"tpu")
        self._kept.append(name)
        given.name, given.size = ctypes.addressof(name), 3

    def client_processindex(self, given: Any, address: int) -> None:
        given.index = self._rank

    def client_addressabledevices(self, given: Any, address: int) -> None:
        every = self._call("Client_Devices", client=given.client)
        self._devices, self._client = [every.devices[index] for index in range(every.count)], given.client
        self._mine[0] = self._devices[self._rank]
        given.devices, given.count = ctypes.addressof(self._mine), 1

    def loadedexecutable_addressabledevices(self, given: Any, address: int) -> None:
        given.devices, given.count = ctypes.addressof(self._mine), 1

    def devicedescription_processindex(self, given: Any, address: int) -> None:
        given.index = self._call("DeviceDescription_Id", description=given.description).id

    def device_isaddressable(self, given: Any, address: int) -> None:
        description = self._call("Device_GetDescription", device=given.device).description
        given.addressable = self._call("DeviceDescription_Id", description=description).id == self._rank

    def executable_outputmemorykinds(self, given: Any, address: int) -> None:
        count = self._call("Executable_NumOutputs", executable=given.executable).count
        name = ctypes.create_string_buffer(b"device")
        kinds = (POINTER * max(count, 1))(*[ctypes.addressof(name)] * count)
        sizes = (SIZE * max(count, 1))(*[len(b"device")] * count)
        self._kept += [name, kinds, sizes]
        given.count, given.kinds, given.sizes = count, ctypes.addressof(kinds), ctypes.addressof(sizes)

    def client_compile(self, given: Any, address: int) -> int | None:
        program = Program.from_address(given.program)
        code = ctypes.string_at(program.code, program.size)
        options = ctypes.string_at(given.options, given.size)
        together = self._chips > 1 and COLLECTIVE.search(code) is not None
        changed = for_cpu(options, None if together or self._chips == 1 else self._rank)
        buffer, before = ctypes.create_string_buffer(changed, len(changed)), (given.options, given.size)
        given.options, given.size = ctypes.addressof(buffer), len(changed)
        error = self._as_it_is("Client_Compile", address)
        given.options, given.size = before
        if not error:
            self._collectives.pop(given.made, None)
            if together:
                self._collectives[given.made] = chips_of(options)
        return error

    def loadedexecutable_execute(self, given: Any, address: int) -> int | None:
        chips = self._collectives.get(given.loaded)
        if chips is None:
            return self._as_it_is("LoadedExecutable_Execute", address)
        self._run_on_all(given, chips)
        return None

    def _run_on_all(self, given: Any, chips: list[int]) -> None:
        mine = [given.inputs[0][index] for index in range(given.input_count)]
        data = [self._to_host(buffer) for buffer in mine]
        every = self._exchange(b"".join(data))
        inputs, made, alive = [], [], []
        for chip in chips:
            row = mine
            if chip != self._rank:
                assert len(every[chip]) == sum(map(len, data)), (
                    f"chips {self._rank} and {chip} run other programs"
                )
                row, at = [], 0
                for buffer, part in zip(mine, data, strict=True):
                    copy = ctypes.create_string_buffer(every[chip][at : at + len(part)], max(len(part), 1))
                    at += len(part)
                    alive.append(copy)
                    row.append(self._to_chip(buffer, copy, chip))
                made += row
            inputs.append((POINTER * max(len(row), 1))(*row))
        executable = self._call("LoadedExecutable_GetExecutable", loaded=given.loaded).executable
        count = self._call("Executable_NumOutputs", executable=executable).count
        self._call("Executable_Destroy", executable=executable)
        outputs = [(POINTER * max(count, 1))() for _ in chips]
        events = (POINTER * len(chips))()
        rows = ctypes.POINTER(POINTER) * len(chips)
        self._call(
            "LoadedExecutable_Execute",
            loaded=given.loaded,
            options=given.options,
            inputs=rows(*(ctypes.cast(row, ctypes.POINTER(POINTER)) for row in inputs)),
            devices=len(chips),
            input_count=given.input_count,
            outputs=rows(*(ctypes.cast(row, ctypes.POINTER(POINTER)) for row in outputs)),
            events=ctypes.cast(events, ctypes.POINTER(POINTER)),
        )
        here = chips.index(self._rank)
        for index, event in enumerate(events):
            self._wait(event, destroy=not (index == here and given.events))
        for index, row in enumerate(outputs):
            for output in range(count):
                if index == here:
                    given.outputs[0][output] = row[output]
                else:
                    self._call("Buffer_Destroy", buffer=row[output])
        for buffer in made:
            self._call("Buffer_Destroy", buffer=buffer)
        if given.events:
            given.events[0] = events[here]

    def _wait(self, event: int | None, *, destroy: bool = True) -> None:
        if event:
            self._call("Event_Await", event=event)
            if destroy:
                self._call("Event_Destroy", event=event)

    def _to_host(self, buffer: int) -> bytes:
        size = self._call("Buffer_ToHostBuffer", buffer=buffer).size
        data = ctypes.create_string_buffer(max(size, 1))
        copied = self._call("Buffer_ToHostBuffer", buffer=buffer, to=ctypes.addressof(data), size=size)
        self._wait(copied.event)
        return data.raw[:size]

    def _to_chip(self, like: int, data: Any, chip: int) -> int:
        """Return a buffer on another chip, of the kind and shape of ``like``."""
        shape = self._call("Buffer_Dimensions", buffer=like)
        sizes = (INT64 * max(shape.rank, 1))(*shape.shape[: shape.rank])
        made = self._call(
            "Client_BufferFromHostBuffer",
            client=self._client,
            data=ctypes.addressof(data),
            kind=self._call("Buffer_ElementType", buffer=like).kind,
            shape=ctypes.addressof(sizes),
            rank=shape.rank,
            device=self._devices[chip],
        )
        self._wait(made.copied)
        buffer: int = made.buffer
        return buffer

    def _exchange(self, data: bytes) -> list[bytes]:
        """Return the data of each chip for this collective."""

        def file(chip: int, turn: int) -> Path:
            return self._room / f"{turn}.{chip}"

        turn, self._turn = self._turn, self._turn + 1
        partial = self._room / f"{turn}.{self._rank}.partial"
        partial.write_bytes(data)
        partial.rename(file(self._rank, turn))
        end, every = time.monotonic() + PATIENCE, []
        for chip in range(self._chips):
            while not file(chip, turn).exists():
                if time.monotonic() > end:
                    raise TimeoutError(f"chip {self._rank} waits for chip {chip} at collective {turn}")
                time.sleep(0.0005)
            every.append(file(chip, turn).read_bytes())
        # all chips have read the file of the previous turn
        file(self._rank, turn - 2).unlink(missing_ok=True)
        return every


# -- in a process of a test --------------------------------------------------------------------------------


def plugin() -> Path:
    """Return the path of XLA's PJRT plugin for the CPU, from a package without other content."""
    import fastatomstruct_xla_cpu  # type: ignore[import-not-found, unused-ignore]

    (found,) = Path(fastatomstruct_xla_cpu.__file__).parent.rglob("*pjrt*cpu*.so")
    return found


def _count_on_host(loader: Any) -> None:
    """Change ``torch_tpu._loader``, such that ``cumsum`` is computed on the host."""
    start = loader._init_device

    def started(name: str) -> Any:
        import torch

        device = start(name)
        library = torch.library.Library("aten", "IMPL")
        KEPT.append(library)

        def cumsum(values: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
            return values.cpu().cumsum(dim, dtype=dtype).to(values.device)

        library.impl("cumsum", cumsum, "PrivateUse1", allow_override=True)
        return device

    loader._init_device = started


def _pretend_chips(device_specs: Any) -> None:
    device_specs.PCI_DEVICES = Path(os.environ["STAND_IN_ROOM"]) / "pci"


AFTER: dict[str, Callable[[ModuleType], None]] = {
    "torch_tpu._loader": _count_on_host,
    "portable.tpu.device_specs": _pretend_chips,
}
KEPT: list[Any] = []


def _changed(run: Callable[[ModuleType], None], module: ModuleType) -> None:
    run(module)
    AFTER[module.__name__](module)


class Finder:
    """Changes modules when they are imported: the slice exists before torch_tpu searches for chips."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> ModuleSpec | None:
        if name == "torch_tpu" and not KEPT:
            os.environ["TPU_LIBRARY_PATH"] = str(plugin())
            KEPT.append(Slice(plugin(), Path(os.environ["STAND_IN_ROOM"])))
        if name not in AFTER:
            return None
        others: list[Any] = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(name, path, None) for finder in others)
        spec: ModuleSpec | None = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            change: Any = partial(_changed, spec.loader.exec_module)
            spec.loader.exec_module = change  # type: ignore[method-assign]
        return spec


def find_chips() -> None:
    """Let this process use the emulated chips, if the variables of :func:`environment` are set."""
    sys.meta_path.insert(0, Finder())


def environment(room: Path, chips: int) -> dict[str, str]:
    """Return a launcher's variables for ``chips`` chips, which meet in the empty folder ``room``."""
    from tests.ranks import free_port

    project = Path(__file__).resolve().parents[2]
    for chip in range(chips):
        (room / "pci" / str(chip)).mkdir(parents=True)
        (room / "pci" / str(chip) / "vendor").write_text("0x1ae0")
        (room / "pci" / str(chip) / "device").write_text("0x006f")
    return {
        "STAND_IN_ROOM": str(room),
        "STAND_IN_PROJECT": str(project),
        "PYTHONPATH": str(Path(__file__).parent / "site"),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "TORCH_TPU_TIER2_COMPILATION_CACHE": "disabled",  # it would hand a chip the program of another
        "TORCH_TPU_SLICEBUILDER_ADDRESSES": ",".join(f"localhost:{free_port()}" for _ in range(chips)),
        "TORCH_TPU_TOPOLOGY": {1: "1,1,1", 2: "1,2,1", 4: "2,2,1"}[chips],
        "TPU_SKIP_MDS_QUERY": "1",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",  # LLVM's, which takes longer than a run
        "PYTHONWARNINGS": "ignore",
    }
