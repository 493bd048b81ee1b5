"""DeepSpeed's process-wide state: imported for the right device, started on our process group, put back."""

from __future__ import annotations

import inspect
import logging
import os
import shutil
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from portable.errors import UserError, one_line
from portable.terminal import native_stdout_closed

if TYPE_CHECKING:
    from pathlib import Path

    import torch

REMEDY = "install it with: pip install 'portable-trainer[deepspeed]', or use strategy full_shard"


def import_deepspeed(device_type: str) -> Any:
    """The deepspeed package, told which kind of device it will run on.

    Raises:
        UserError: if it is not installed, or cannot be imported here.
    """
    os.environ["DS_ACCELERATOR"] = device_type
    # Its logger speaks at INFO of everything it does; our own lines say what the run does.
    os.environ.setdefault("DS_LOGGING_LEVEL", "error")
    try:
        with native_stdout_closed():
            import deepspeed
    except ModuleNotFoundError as error:
        if error.name != "deepspeed":
            raise
        raise UserError(f"strategy: zero1, zero2 and zero3 need the package deepspeed; {REMEDY}") from error
    except Exception as error:  # built for another torch, or a CUDA toolkit that it looks for in vain
        raise UserError(f"strategy: deepspeed cannot be imported ({one_line(error)}); {REMEDY}") from error
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if device_type == "cpu":  # that there is no CUDA is as it should be
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    _choose_accelerator(device_type)
    return deepspeed


def _choose_accelerator(device_type: str) -> None:
    """Change its idea of the device where it was imported before, as in a notebook."""
    from deepspeed.accelerator import get_accelerator, set_accelerator

    if get_accelerator()._name == device_type:
        return
    if device_type == "cuda":
        from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator as Accelerator
    else:
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator as Accelerator
    set_accelerator(Accelerator())


def start(deepspeed: Any, device: torch.device) -> None:
    """Put DeepSpeed on the process group of this run; a single process gets a group of its own."""
    # What DeepSpeed reads without asking whether it is there.
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        if name not in os.environ:
            os.environ[name] = value
            _variables.append(name)
    # Shared-memory collectives for CPU ranks are C++ that it would compile at its start, for a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not dist.is_initialized():
        transport = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        with native_stdout_closed():
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(transport, store=store, rank=0, world_size=1)
    # It numbers parameters and modules over a process's life. Swap files are named by the numbers, so that a
    # second run in the process would leave checkpoints that nobody can tell; and the ranks compare them, so
    # that ranks which did not share all of their past would seem to disagree.
    deepspeed.zero.Init.param_id = 0
    offload = deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload
    offload._register_deepspeed_module.__defaults__[0][0] = 0
    with native_stdout_closed():
        deepspeed.init_distributed(verbose=False, auto_mpi_discovery=False)


def empty_until_stop(folder: Path) -> None:
    """Make ``folder`` anew, and remove it when :func:`stop` is called."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    _scratch.append(folder)


def keep_until_stop(engine: Any) -> None:
    """Have :func:`stop` take a DeepSpeed engine apart, which holds on to itself and all its memory else."""
    _engines.append(engine)


_engines: list[Any] = []
_scratch: list[Path] = []
_variables: list[str] = []


def stop() -> None:
    """Leave the process group, so that another run in this process can start on a new one."""
    while _engines:
        with suppress(Exception):  # of a device that has failed; what has, is being raised already
            _engines.pop().destroy()
    while _scratch:
        shutil.rmtree(_scratch.pop(), ignore_errors=True)
    while _variables:  # a notebook's next run would take itself for a rank of some launcher
        os.environ.pop(_variables.pop(), None)
    deepspeed = sys.modules.get("deepspeed")
    if deepspeed is None or deepspeed.comm.comm.cdb is None:
        return
    _forget_models(deepspeed)
    if dist.is_initialized():
        deepspeed.comm.destroy_process_group()
    deepspeed.comm.comm.cdb = None


def _forget_models(deepspeed: Any) -> None:
    """Let go of what stage 3 keeps for the life of a process: each model, and with it all its memory."""
    zero = deepspeed.runtime.zero
    # Another release may have none of these: what stays behind is no reason for a run to fail at its end.
    with suppress(AttributeError, KeyError):
        zero.parameter_offload.FWD_MODULE_STACK.clear()
        # A method with a cache has it in common with all instances, and it holds them and their modules.
        coordinator = zero.partitioned_param_coordinator.PartitionedParameterCoordinator
        cached = coordinator._PartitionedParameterCoordinator__params_to_release
        inspect.getclosurevars(cached).nonlocals["func"].cache_clear()
