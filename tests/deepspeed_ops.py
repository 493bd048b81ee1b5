"""DeepSpeed's C++ ops that the tests need: ``python -m tests.deepspeed_ops`` takes minutes to build them.

They are kept. A test that finds one unbuilt builds it itself; built ahead, they do not take the time of tests
that have a limit.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

PATIENCE = 540.0  # seconds that a test may take for it
PATIENCE_AHEAD = 1800.0  # seconds until a build ahead of the tests is given up: it waits for a lock


@cache
def require_async_io(patience: float = PATIENCE) -> None:
    """Skip where the system library is missing; else have DeepSpeed build its op for swapping to disks."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        pytest.skip("the system has no libaio")
    _build("AsyncIOBuilder", patience)
    _build("PinMemoryBuilder", patience)  # of the buffers that it swaps through


@cache
def require_cpu_adam(patience: float = PATIENCE) -> None:
    """Have DeepSpeed build its optimizer for the CPU."""
    _build("CPUAdamBuilder", patience)


def _build(builder: str, patience: float) -> None:
    program = f"from deepspeed.ops.op_builder import {builder}; {builder}().load()"
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-c", program]
    subprocess.run(command, check=True, capture_output=True, timeout=patience, env=environment)


def main() -> int:
    try:
        import deepspeed  # noqa: F401
        from torch.utils.cpp_extension import get_default_build_root
    except ImportError:
        print("deepspeed is not installed")
        return 0
    # A build that was killed leaves its lock, for which the next one waits without end.
    for lock in Path(os.environ.get("TORCH_EXTENSIONS_DIR", get_default_build_root())).rglob("lock"):
        print(f"{lock} is there; if nothing is being built, remove it", flush=True)
    for require in (require_async_io, require_cpu_adam):
        try:
            require(PATIENCE_AHEAD)
        except pytest.skip.Exception as skipped:
            print(f"left out: {skipped}")
        except subprocess.TimeoutExpired as late:
            print(f"given up: {late}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
