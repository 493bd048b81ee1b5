"""What the process that ranks are forks of imports last.

Half of the processor time of a short run under ZeRO: DeepSpeed's first engine imports what compiles, and
engines look for garbage among all that was imported.
"""

from __future__ import annotations

import gc
from contextlib import suppress
from importlib import import_module

with suppress(ImportError):
    for name in ("deepspeed.runtime.zero.muon.original_muon", "setuptools", "torch._inductor.compile_fx"):
        import_module(name)

gc.collect()
gc.freeze()
