"""Last import of the process whose forks are ranks, with slow first calls made once for all of them.

They take half of the processor time of a short run under ZeRO: DeepSpeed's first engine imports compilers,
and engines collect garbage among all imported modules.
"""

from __future__ import annotations

import gc
from contextlib import suppress
from functools import cache
from importlib import import_module

import torch

with suppress(ImportError):
    for name in (
        "deepspeed.module_inject.auto_ep_config",
        "deepspeed.runtime.zero.muon.original_muon",
        "pytest",
        "setuptools",
        "torch._inductor.compile_fx",
    ):
        import_module(name)

with suppress(ImportError):
    # Each call starts a process: one for each op that DeepSpeed loads, the other for each bucket of gradients
    # that ZeRO reduces on a CPU.
    for path, function in (("cpuinfo", "get_cpu_info"), ("deepspeed.utils.numa", "get_numa_cores")):
        module = import_module(path)
        setattr(module, function, cache(getattr(module, function)))
        getattr(module, function)()

if not torch.cuda.is_available():
    # Optimizers and sharded tensors ask all the time, and each time the driver's library is looked for.
    torch.cuda._cached_device_count = 0

gc.collect()
gc.freeze()
gc.enable()
