"""DeepSpeed's C++ ops for the tests: built where a test that was asked for needs one, and kept.

A test that needs one is marked ``@pytest.mark.ops("cpu_adam")`` or ``"async_io"``. Where such a test was
collected, the session starts ``python -m tests.ops`` beside the tests at once, and the test waits for it.
What is built is kept by the versions of torch, DeepSpeed and the compiler, in the user's cache or where
``TORCH_EXTENSIONS_DIR`` says.
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
"""What builds each, in order."""
COMPILER = Path(__file__).with_name("cxx")


def prepare_environment() -> None:
    """Have this process and its children build and look for ops in the folder of these versions."""
    os.environ.setdefault("CXX", str(COMPILER))
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(cache_folder()))


def cache_folder() -> Path:
    """Where ops built by these versions, for this processor, are kept."""
    try:
        parts = [version("torch"), version("deepspeed")]
    except PackageNotFoundError:
        parts = []
    try:
        compiler = subprocess.run(["c++", "--version"], capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        compiler = ""
    flags = "".join(line for line in _lines(Path("/proc/cpuinfo")) if line.startswith("flags"))[:4000]
    # Paths stand in what is built: another place of theirs would have it built anew, there.
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
    """Whether the system library that swapping to a disk needs is there."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return bool(AsyncIOBuilder().is_compatible(verbose=False))


def build_aside(names: list[str]) -> Callable[[], None]:
    """Start building ``names`` beside this process; returns what ends that, if it is not done by then.

    What goes wrong is reported by :func:`build`, when a test calls it.
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
        subprocess.CalledProcessError: with the compiler's messages as its output.
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
