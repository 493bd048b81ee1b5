"""Every private or experimental name of torch_tpu; its device is registered by hand, to do it once."""

from __future__ import annotations

import os
import warnings
from contextlib import redirect_stderr
from io import StringIO
from typing import TYPE_CHECKING, Any

from portable.private import Package

if TYPE_CHECKING:
    from torch.distributed import HashStore  # type: ignore[attr-defined, unused-ignore]

    from tpu.compile.libtpu import Topology

PACKAGE = Package("torch-tpu", "0.2.0")
_FEATURE = "backend: tpu"
_SAID_AT_LOADING = r"<TorchTpu/Performance/TcMalloc/>"


@PACKAGE.needed_for(_FEATURE)
def load() -> None:
    """Import torch_tpu and register torch's device ``tpu``. Opens no chip."""
    os.environ.setdefault("ABSL_MIN_LOG_LEVEL", "2")
    with warnings.catch_warnings(), redirect_stderr(StringIO()):  # four lines, of what it registers
        warnings.filterwarnings("ignore", _SAID_AT_LOADING)
        from torch_tpu import _loader

        _loader._init_device("tpu")


@PACKAGE.needed_for(_FEATURE)
def launch_environment(ranks: int) -> dict[str, str]:
    """The variables that the ranks of this host must share, which name their ports and how chips connect."""
    load()
    import torch

    torch.tpu.distributed.set_tpu_launch_env(nproc_per_node=ranks)  # type: ignore[attr-defined, unused-ignore]
    return {name: value for name, value in os.environ.items() if name.startswith("TORCH_TPU_")}


@PACKAGE.needed_for("--compile on backend tpu")
def wait_without_the_lock() -> None:
    """Let programs end before streams change and events are recorded: these wait, with Python's lock.

    What compiles a program in Python would wait for that lock, for ever.
    """
    import torch
    from torch_tpu._internal.device import _device_module
    from torch_tpu._internal.stream import streams

    def after_all_programs(function: Any) -> Any:
        def called(*arguments: Any) -> Any:
            torch.zeros((), device="tpu").cpu()  # waits in its place in the queue, without the lock
            return function(*arguments)

        return called

    operations: Any = _device_module._device_ops_backend
    operations._set_current_stream_id = after_all_programs(operations._set_current_stream_id)
    streams.TpuEvent.record = after_all_programs(streams.TpuEvent.record)


@PACKAGE.needed_for("--compile on backend tpu")
def other_ranks(topology: Topology) -> HashStore:
    """A store in which the other ranks of a slice have said who they are, for rank 0 that is alone.

    Each rank adds an entry, its chip and its place, to a list that all of them read.

    Args:
        topology: the slice; rank r has its r-th device.
    """
    from torch.distributed import HashStore  # type: ignore[attr-defined, unused-ignore]

    store, ranks = HashStore(), len(topology.devices)
    listed = f"0//tpu//nlag:world_topo:0:{ranks}"
    for rank in range(1, ranks):
        place: Any = topology.attributes_of(rank)
        name, where = f"world_topo:{rank}", (*place["coords"], place["core_on_chip"], -1)
        entry = f"{len(name)}:{name}" + ",".join(map(str, (rank, rank, *where, topology.kind)))
        store.set(f"{listed}:node:{rank - 1}", f"{len(entry)}:{entry}")
        store.add(f"{listed}:count", 1)
    return store
