"""Every private or experimental name of torch_tpu; its device is registered by hand, to do it once."""

from __future__ import annotations

import os
from contextlib import redirect_stderr
from io import StringIO
from itertools import count
from typing import TYPE_CHECKING, Any

from portable.private import GuardedPackage
from portable.tpu.compile.child_process import read_request, write_answer

if TYPE_CHECKING:
    from collections.abc import Callable

    from portable.tpu.compile.libtpu import TpuTopology

PACKAGE = GuardedPackage("torch-tpu", "0.2.0")
_FEATURE = "backend: tpu"


@PACKAGE.explain_missing_names(_FEATURE)
def register_tpu_device() -> None:
    """Import torch_tpu and register torch's device ``tpu``. Opens no chip."""
    os.environ.setdefault("ABSL_MIN_LOG_LEVEL", "2")
    with redirect_stderr(StringIO()):  # four lines of what it registers, and a warning about malloc
        from torch_tpu import _loader

        _loader._init_device("tpu")


@PACKAGE.explain_missing_names(_FEATURE)
def write_launch_environment() -> None:
    """The variables that the ranks of this host must share, which name their ports and how chips connect.

    See :func:`portable.tpu.compile.child_process.run_in_child_process`, which gives the number of ranks.
    """
    register_tpu_device()
    import torch

    torch.tpu.distributed.set_tpu_launch_env(nproc_per_node=read_request())  # type: ignore[attr-defined, unused-ignore]
    variables = {name: value for name, value in os.environ.items() if name.startswith("TORCH_TPU_")}
    write_answer({"environment": variables})


@PACKAGE.explain_missing_names("--compile on backend tpu")
def wait_without_gil() -> None:
    """Have all work in one stream, which is waited for where torch_tpu would: without Python's lock.

    Who changes the stream or records an event waits with it, for threads that may need it, so for ever.
    """
    import torch
    from torch_tpu._internal.device import _device_ops_backend
    from torch_tpu._internal.stream import streams

    def wait(result: Any, *_: Any) -> Any:
        torch.zeros((), device="tpu").cpu()  # waits in its place in the queue
        return result

    _device_ops_backend._set_current_stream_id = streams.TpuEvent.record = wait


@PACKAGE.explain_missing_names("--compile on backend tpu")
def start_simulated_process_group(topology: TpuTopology) -> None:
    """Start the process group of a slice in its rank 0, which is alone: a store has the others' answers.

    Of each group of ranks that FSDP and DDP make, all ranks of the slice must say to which one they belong.
    Ranks of a group are at equal distances, and the others of its kind are the same ranks, shifted.

    Args:
        topology: the slice; rank r has its r-th device.
    """
    import torch.distributed as dist
    from torch_tpu._internal.distributed import tpu_distributed

    store, ranks, groups = dist.HashStore(), len(topology.device_handles), count()  # type: ignore[attr-defined, unused-ignore]

    def write_entries_of_other_ranks(
        group_store: Any, key: str, build_answer: Callable[[int], tuple[Any, ...]]
    ) -> None:
        """Fill a list that all ranks read, to which each adds its name and its answer."""
        for rank in range(1, ranks):
            name, answer_text = f"{key}:{rank}", ",".join(map(str, build_answer(rank)))
            entry = f"{len(name)}:{name}{answer_text}"
            group_store.set(f"nlag:{key}:0:{ranks}:node:{rank - 1}", f"{len(entry)}:{entry}")
            group_store.add(f"nlag:{key}:0:{ranks}:count", 1)

    def describe_rank_location(rank: int) -> tuple[Any, ...]:
        attributes: Any = topology.read_device_attributes(rank)
        return rank, rank, *attributes["coords"], attributes["core_on_chip"], -1, topology.device_kind

    def create_process_group(options: Any, _: Any) -> Any:
        members = options.global_ranks_in_group or range(ranks)
        step = members[1] - members[0] if len(members) > 1 else 1

        def describe_group_position(rank: int) -> tuple[Any, ...]:
            block, offset_in_block = divmod(rank, step * len(members))
            group = block * step + offset_in_block % step
            return offset_in_block // step, f"{rank}:0//{options.group_id}//tpu/{group or ''}"

        if len(members) == ranks:
            write_entries_of_other_ranks(options.store, "world_topo", describe_rank_location)
        else:
            write_entries_of_other_ranks(store, f"pg_sub:{next(groups)}", describe_group_position)
        return tpu_distributed.create_process_group(
            options.store, options.group_rank, options.group_size, options.timeout
        )

    dist.Backend.register_backend("tpu_dist", create_process_group, extended_api=True, devices=["tpu"])
    # torch keeps one backend of a type, and both are of the same. gloo's own ranks would have to meet.
    dist.Backend.backend_type_map["fake"] = dist.ProcessGroup.BackendType.GLOO
    dist.init_process_group("cpu:fake,tpu:tpu_dist", store=store, rank=0, world_size=ranks)
