"""Samples written by a `make_*.py`, once per session, in a fork of the process that has imported torch."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path

import pytest
from filelock import FileLock


def once(name: str, tmp_path_factory: pytest.TempPathFactory, fill: Callable[[Path], None]) -> Path:
    """Return the folder ``name`` after ``fill`` has filled it.

    All workers of a session share the folder, so no test may change it.
    """
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    out, done = base / name, base / f"{name}.done"
    with FileLock(f"{out}.lock"):
        if not done.exists():
            shutil.rmtree(out, ignore_errors=True)  # remains of a killed worker
            out.mkdir()
            fill(out)
            done.touch()
    return out


def written_by(maker: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that `make` writes, once for all workers."""
    return once(maker, tmp_path_factory, partial(make, maker))


def make(maker: str, out: Path) -> None:
    """Call `main(out)` of the module `tests.converters.<maker>`, or the function that `maker` names."""
    log = out.with_name(f"{out.name}.log")
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=write, args=(maker, out, log))
    process.start()
    process.join()
    assert process.exitcode == 0, log.read_text(errors="replace")[-20_000:]


def write(maker: str, out: Path, log: Path) -> None:
    """Write the samples. The output of the function and its forks goes to `log`."""
    module, _, function = maker.partition(".")
    with log.open("w", buffering=1) as file, redirect_stdout(file), redirect_stderr(file):
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        getattr(importlib.import_module(f"tests.converters.{module}"), function or "main")(out)
