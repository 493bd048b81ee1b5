"""DeepSpeed's C++ ops for the tests: built if a collected test needs one, and kept.

A test that needs an op is marked ``@pytest.mark.ops("cpu_adam")`` or ``"async_io"``. If such a test was
collected, the session starts ``python -m tests.ops`` in the background, and the test waits for it. The built
ops are kept by the versions of torch, DeepSpeed and the compiler, in the user's cache or in
``TORCH_EXTENSIONS_DIR``.
"""

from __future__ import annotations

import hashlib
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

OPS = {"cpu_adam": ("CPUAdamBuilder",), "async_io": ("PinMemoryBuilder", "AsyncIOBuilder")}
"""Builders of each op, in order."""
COMPILER = Path(__file__).with_name("cxx")


def prepare_environment() -> None:
    """Let this process and its children build and find ops in the folder of these versions."""
    os.environ.setdefault("CXX", str(COMPILER))
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(cache_folder()))


def cache_folder() -> Path:
    """Return the folder of ops built by these versions for this processor."""
    try:
        parts = [version("torch"), version("deepspeed")]
    except PackageNotFoundError:
        parts = []
    try:
        compiler = subprocess.run(["c++", "--version"], capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        compiler = ""
    flags = "".join(line for line in _lines(Path("/proc/cpuinfo")) if line.startswith("flags"))[:4000]
    # The built files contain paths, so files in another folder would be built again.
    ours = [sys.prefix, str(COMPILER), COMPILER.read_text("utf-8")]
    text = "\n".join([*parts, sys.version, compiler, flags, platform.machine(), *ours])
    root = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return root / "portable-trainer" / "ops" / hashlib.sha256(text.encode()).hexdigest()[:16]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8").splitlines()[:40]
    except OSError:
        return []


def libaio() -> bool:
    """Return whether the system library for swapping to a disk is installed."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return bool(AsyncIOBuilder().is_compatible(verbose=False))


def build_aside(names: list[str]) -> Callable[[], None]:
    """Start to build ``names`` in the background. Returns a function that ends the build if it is not done.

    :func:`build` reports errors when a test calls it.
    """
    running = subprocess.Popen(
        [sys.executable, "-m", "tests.ops", *names],
        cwd=Path(__file__).resolve().parents[2],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )

    def end() -> None:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)  # the compilers, too

    return end


def build(op: str) -> None:
    """Wait until ``op`` is built, by this process or by another.

    Raises:
        subprocess.CalledProcessError: If the build failed, with the compiler's messages as its output.
    """
    from filelock import FileLock

    folder = Path(os.environ["TORCH_EXTENSIONS_DIR"])
    folder.mkdir(parents=True, exist_ok=True)
    done = folder / f"{op}.done"
    with FileLock(folder / f"{op}.lock"):
        if done.exists():
            return
        # torch's own lock outlives a build that was killed, and the next build would wait for it without end.
        for stale in folder.glob("*/lock"):
            stale.unlink()
        builders = OPS[op]
        loads = "; ".join(f"{builder}().load()" for builder in builders)
        subprocess.run(
            [sys.executable, "-c", f"from deepspeed.ops.op_builder import {', '.join(builders)}; {loads}"],
            check=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "DS_ACCELERATOR": "cpu"},
        )
        done.touch()
