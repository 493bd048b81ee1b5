"""Wrap the private and experimental torch_tpu APIs that this package uses.

Importing torch registers the device ``tpu``, unless ``TORCH_DEVICE_BACKEND_AUTOLOAD`` is 0.
``portable`` sets the variable to 0, so this module registers the device explicitly.
"""

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
    """Import torch_tpu and register torch's device ``tpu``. Does not open a chip."""
    os.environ.setdefault("ABSL_MIN_LOG_LEVEL", "2")
    with redirect_stderr(StringIO()):  # torch_tpu prints four lines, and a warning about malloc
        from torch_tpu import _loader

        _loader._init_device("tpu")


@PACKAGE.explain_missing_names(_FEATURE)
def write_launch_environment() -> None:
    """Compute the environment variables that this host's ranks share, and send them to the parent.

    The variables contain the rank ports and the chip topology. This is the main function of a child
    process, which :func:`portable.tpu.compile.child_process.run_in_child_process` starts. The
    parent process sends the number of ranks on this host as the request, and receives the variables
    as the answer.
    """
    register_tpu_device()
    import torch

    torch.tpu.distributed.set_tpu_launch_env(nproc_per_node=read_request())  # type: ignore[attr-defined, unused-ignore]
    variables = {name: value for name, value in os.environ.items() if name.startswith("TORCH_TPU_")}
    write_answer({"environment": variables})


@PACKAGE.explain_missing_names("--compile on backend tpu")
def wait_without_gil() -> None:
    """Patch torch_tpu to use a single stream, and to wait for it without holding the GIL.

    When the stream is changed or an event is recorded, torch_tpu waits for the stream while holding
    the GIL. In a simulated run, other threads need the GIL to complete the work, so torch_tpu would
    wait forever. This function therefore replaces torch_tpu's functions ``_set_current_stream_id``
    and ``TpuEvent.record`` for the entire process.
    """
    import torch
    from torch_tpu._internal.device import _device_ops_backend
    from torch_tpu._internal.stream import streams

    def wait(result: Any, *_: Any) -> Any:
        """Wait until all work in the queue is complete, and return ``result``."""
        torch.zeros((), device="tpu").cpu()  # waits for the work that is queued before it
        return result

    _device_ops_backend._set_current_stream_id = streams.TpuEvent.record = wait


@PACKAGE.explain_missing_names("--compile on backend tpu")
def start_simulated_process_group(topology: TpuTopology) -> None:
    """Start the process group of a slice in a single process, which acts as rank 0.

    This initializes the default process group of torch.distributed. For tensors on the CPU, the
    group uses torch's ``fake`` backend, which does not communicate.

    torch_tpu's ranks exchange their locations through a store. The other ranks do not run, so this
    function writes their entries to the store.

    When FSDP or DDP creates a subgroup, each rank in the slice writes another entry, which names
    its subgroup. This function derives the entries of the other ranks from the subgroup of rank 0.
    It assumes that the ranks in this subgroup are equally spaced. All other subgroups are assumed
    to have the same spacing, but different first ranks.

    Args:
        topology: TPU slice. Rank r has the r-th device.
    """
    import torch.distributed as dist
    from torch_tpu._internal.distributed import tpu_distributed

    store, ranks, groups = dist.HashStore(), len(topology.device_handles), count()  # type: ignore[attr-defined, unused-ignore]

    def write_entries_of_other_ranks(
        group_store: Any, key: str, build_answer: Callable[[int], tuple[Any, ...]]
    ) -> None:
        """Add an entry for every other rank to a list in the store.

        Only rank 0 exists, but torch_tpu waits for the entries of all ranks before it starts the
        group.

        Args:
            group_store: Store of the group.
            key: Name of the list.
            build_answer: Function that takes a rank and returns the values in its entry.
        """
        for rank in range(1, ranks):
            name, answer_text = f"{key}:{rank}", ",".join(map(str, build_answer(rank)))
            entry = f"{len(name)}:{name}{answer_text}"
            group_store.set(f"nlag:{key}:0:{ranks}:node:{rank - 1}", f"{len(entry)}:{entry}")
            group_store.add(f"nlag:{key}:0:{ranks}:count", 1)

    def describe_rank_location(rank: int) -> tuple[Any, ...]:
        """Return a rank's entry of the list ``world_topo``, which is the location of its device.

        The location includes the rank, the coordinates of the chip in the TPU slice, the core on
        the chip, and the type of the device.
        """
        attributes: Any = topology.read_device_attributes(rank)
        return rank, rank, *attributes["coords"], attributes["core_on_chip"], -1, topology.device_kind

    def create_process_group(options: Any, _: Any) -> Any:
        """Create torch_tpu's process group in a single process, without the other ranks.

        torch_tpu's ranks exchange entries through the store. The other ranks do not run, so this
        function first writes their entries. For the group of all ranks, an entry contains the
        location of the rank's device. For a subgroup, an entry contains the subgroup to which the
        rank belongs.
        """
        members = options.global_ranks_in_group or range(ranks)
        step = members[1] - members[0] if len(members) > 1 else 1

        def describe_group_position(rank: int) -> tuple[Any, ...]:
            """Return the values that a rank writes to the store when a subgroup is created.

            torch_tpu's ranks exchange these entries. Only rank 0 runs here, so the entries of the
            other ranks must be computed.

            Args:
                rank: Global rank.

            Returns:
                Position of the rank in its subgroup, and a string that contains the rank and
                identifies the subgroup.
            """
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
    # torch keeps one backend per type, and "fake" and "tpu_dist" have the same type. Therefore, register
    # "fake" with the type of gloo. A real gloo backend would wait for the other ranks.
    dist.Backend.backend_type_map["fake"] = dist.ProcessGroup.BackendType.GLOO
    dist.init_process_group("cpu:fake,tpu:tpu_dist", store=store, rank=0, world_size=ranks)
