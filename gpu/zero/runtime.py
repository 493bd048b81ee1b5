"""Import DeepSpeed, start it on the process group of a run, and stop it when the run ends."""

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

INSTALL_REMEDY = (
    "install DeepSpeed with: pip install 'portable-trainer[deepspeed]', or set strategy to full_shard"
)


def import_deepspeed(device_type: str) -> Any:
    """Import DeepSpeed, and select the device type that it uses.

    Sets the environment variables ``DS_ACCELERATOR`` and, if it is not set, ``DS_LOGGING_LEVEL``.
    Limits the log of DeepSpeed to errors.

    Args:
        device_type: Type of the run's devices, ``cuda`` or ``cpu``.

    Returns:
        The module ``deepspeed``.

    Raises:
        UserError: If DeepSpeed is not installed, has the wrong version, or cannot be imported.
    """
    os.environ["DS_ACCELERATOR"] = device_type
    os.environ.setdefault("DS_LOGGING_LEVEL", "error")  # at INFO, DeepSpeed logs every detail
    private_api.PACKAGE.check_installed("strategy", "deepspeed")
    try:
        with discard_native_stdout():
            import deepspeed
    except Exception as error:  # for example, it was built for another torch, or there is no CUDA toolkit
        raise UserError(
            f"strategy: deepspeed cannot be imported ({to_one_line(error)}); {INSTALL_REMEDY}"
        ) from error
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if device_type == "cpu":  # suppress a warning about missing CUDA, which is expected on a CPU
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    _switch_accelerator(device_type)
    return deepspeed


def _switch_accelerator(device_type: str) -> None:
    """Change DeepSpeed's device type if a previous run in this process used another type."""
    from deepspeed.accelerator import get_accelerator, set_accelerator

    if get_accelerator().device_name() == device_type:
        return
    if device_type == "cuda":
        from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator as Accelerator
    else:
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator as Accelerator
    set_accelerator(Accelerator())


def start_deepspeed(deepspeed: Any, device: torch.device, at_stop: ExitStack) -> None:
    """Start DeepSpeed on the process group of the run.

    In a single process, the group is created first. DeepSpeed requires the environment
    variables ``RANK``, ``LOCAL_RANK`` and ``WORLD_SIZE``. A missing variable is set to the value
    for a single process until ``at_stop`` is closed.

    Args:
        deepspeed: The module ``deepspeed``.
        device: Device of this rank.
        at_stop: Exit stack that stops DeepSpeed when the backend stops. The process group is then
            destroyed, even if this function has not created it.
    """
    at_stop.callback(_stop_deepspeed, deepspeed)
    # DeepSpeed requires these variables. Remove them at the end, because the next run in a notebook would
    # otherwise assume that a launcher has started it.
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
    """Release the cached models and destroy all process groups, so that another run can start.

    Does nothing if DeepSpeed was not started.
    """
    if not private_api.has_communicator(deepspeed):
        return
    private_api.release_cached_models(deepspeed)
    if dist.is_initialized():
        deepspeed.comm.destroy_process_group()
    private_api.drop_communicator(deepspeed)
