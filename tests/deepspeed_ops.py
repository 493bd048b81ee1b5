"""DeepSpeed's C++ ops that the tests need: ``python -m tests.deepspeed_ops`` takes minutes to build them.

They are kept. A test that finds one unbuilt builds it itself; built ahead, they do not take the time of tests
that have a limit.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache

import pytest

PATIENCE = 540.0  # seconds that a test may take for it


@cache
def require_async_io(patience: float | None = PATIENCE) -> None:
    """Skip where the system library is missing; else have DeepSpeed build its op for swapping to disks."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        pytest.skip("the system has no libaio")
    _build("AsyncIOBuilder", patience)


@cache
def require_cpu_adam(patience: float | None = PATIENCE) -> None:
    """Have DeepSpeed build its optimizer for the CPU."""
    _build("CPUAdamBuilder", patience)


def _build(builder: str, patience: float | None) -> None:
    program = f"from deepspeed.ops.op_builder import {builder}; {builder}().load()"
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-c", program]
    subprocess.run(command, check=True, capture_output=True, timeout=patience, env=environment)


def main() -> int:
    try:
        import deepspeed  # noqa: F401
    except ImportError:
        print("deepspeed is not installed")
        return 0
    for require in (require_async_io, require_cpu_adam):
        try:
            require(None)
        except pytest.skip.Exception as skipped:
            print(f"left out: {skipped}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
