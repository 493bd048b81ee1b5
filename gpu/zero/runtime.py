"""DeepSpeed's process-wide state: import it for a device, start it on our process group, undo both."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from portable.engines.engine_interface import get_dist_backend
from portable.errors import UserError, to_one_line
from portable.gpu.zero import private_api
from portable.terminal import discard_native_stdout

if TYPE_CHECKING:
    from contextlib import ExitStack

    import torch

INSTALL_REMEDY = "install it with: pip install 'portable-trainer[deepspeed]', or use strategy full_shard"


def import_deepspeed(device_type: str) -> Any:
    """Import deepspeed for ``device_type``.

    Raises:
        UserError: if it is not installed, too old, or its import fails.
    """
    os.environ["DS_ACCELERATOR"] = device_type
    os.environ.setdefault("DS_LOGGING_LEVEL", "error")  # it logs every detail at INFO
    private_api.PACKAGE.check_installed("strategy: zero1, zero2 and zero3", "deepspeed")
    try:
        with discard_native_stdout():
            import deepspeed
    except Exception as error:  # built for another torch, or a CUDA toolkit is missing
        raise UserError(
            f"strategy: deepspeed cannot be imported ({to_one_line(error)}); {INSTALL_REMEDY}"
        ) from error
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if device_type == "cpu":  # its warning about a missing CUDA is expected here
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    _switch_accelerator(device_type)
    return deepspeed


def _switch_accelerator(device_type: str) -> None:
    """Switch DeepSpeed's device if it was imported for another, as in a notebook."""
    from deepspeed.accelerator import get_accelerator, set_accelerator

    if get_accelerator().device_name() == device_type:
        return
    if device_type == "cuda":
        from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator as Accelerator
    else:
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator as Accelerator
    set_accelerator(Accelerator())


def start_deepspeed(deepspeed: Any, device: torch.device, at_stop: ExitStack) -> None:
    """Start DeepSpeed on the run's process group; a single process gets a group of its own."""
    at_stop.callback(_stop_deepspeed, deepspeed)
    # DeepSpeed requires these variables. Left behind, they would make a notebook's next run a launcher's
    # rank.
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        if name not in os.environ:
            os.environ[name] = value
            at_stop.callback(os.environ.pop, name, None)
    private_api.disable_shared_memory_collectives(deepspeed)
    if not dist.is_initialized():
        with discard_native_stdout():
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(get_dist_backend(device), store=store, rank=0, world_size=1)
    private_api.reset_parameter_numbering(deepspeed)
    with discard_native_stdout():
        deepspeed.init_distributed(verbose=False, auto_mpi_discovery=False)


def _stop_deepspeed(deepspeed: Any) -> None:
    """Make DeepSpeed forget the models and the process group, so that this process can start another run."""
    if not private_api.has_communicator(deepspeed):
        return
    private_api.release_cached_models(deepspeed)
    if dist.is_initialized():
        deepspeed.comm.destroy_process_group()
    private_api.drop_communicator(deepspeed)
