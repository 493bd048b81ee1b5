"""Ctrl-C at any time: no traceback, the usual exit code, and no process or semaphore remains."""

from __future__ import annotations

import ast
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from portable.data.samples.loader import _SemaphoreNames
from tests.ranks import wait_for
from tests.runs import tiny

if TYPE_CHECKING:
    from collections.abc import Callable

AT_MOST = 120.0
INTERRUPTED, STOPPED = 130, 75


def start(tmp_path: Path, entry: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a command in a separate process group, as a terminal does."""
    code = f"import sys; from portable.entry_points import {entry}; sys.exit({entry}())"
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=(tmp_path / "errors").open("w"),
        text=True,
        start_new_session=True,
    )


def interrupt(process: subprocess.Popen[str], times: int) -> None:
    """Signal all processes of the group, as Ctrl-C does."""
    for _ in range(times):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(0.1)


def is_importing_torch(process: subprocess.Popen[str]) -> bool:
    """Return whether a command has begun to import torch. Before, Python itself handles interrupts."""
    try:
        return "libtorch" in Path(f"/proc/{process.pid}/maps").read_text()
    except OSError:
        return False


def semaphores() -> set[str]:
    """Return the named semaphores of the system."""
    return {path.name for path in Path("/dev/shm").glob("sem.mp-*")}


def mapped_semaphores(group: int) -> set[str]:
    """Return the named semaphores that a process group has open and that still have their names."""
    names = set()
    for path in Path("/proc").glob("[0-9]*/maps"):
        try:
            if os.getpgid(int(path.parent.name)) == group:
                names |= {line.split("/")[-1] for line in path.read_text().splitlines() if "sem.mp-" in line}
        except (OSError, ValueError):
            continue
    return {name for name in names if "(deleted)" not in name}


def flags_of(folder: Path, corpus: Path, **more: Any) -> list[str]:
    settings = tiny(folder, corpus, train__steps=100_000, data__num_workers=1, **more)
    return [
        f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in settings.items()
    ]


MOMENTS: dict[str, tuple[int, int, Callable[[Path, Path], bool]]] = {
    "imports": (1, 2, lambda run, errors: True),
    "imports of ranks": (2, 3, lambda run, errors: "starting" in errors.read_text() or run.exists()),
    "training": (1, 5, lambda run, errors: (run / "checkpoints" / "step-000004").exists()),
    "training of ranks": (2, 3, lambda run, errors: (run / "checkpoints" / "step-000004").exists()),
}
"""Ranks, the number of signals, and the condition that is waited for."""


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_repeated_ctrl_c_ends_without_traceback(moment: str, tmp_path: Path, corpus: Path) -> None:
    ranks, times, condition = MOMENTS[moment]
    run, errors = tmp_path / "run", tmp_path / "errors"
    process = start(tmp_path, "train", *flags_of(run, corpus), "--nproc", str(ranks))
    wait_for(lambda: process.poll() is not None or (is_importing_torch(process) and condition(run, errors)))
    time.sleep(0.3)
    interrupt(process, times)
    code = process.wait(AT_MOST)
    text = errors.read_text()
    assert code in (INTERRUPTED, STOPPED), text
    assert "Traceback" not in text and "KeyboardInterrupt" not in text
    wait_for(lambda: not mapped_semaphores(process.pid))
    if times > 1 and moment == "training":
        assert code == INTERRUPTED


@pytest.mark.slow
def test_killed_runs_leave_no_semaphore(tmp_path: Path, corpus: Path) -> None:
    """Neither the run nor the process that tracks its resources gets to remove them."""
    run = tmp_path / "run"
    process = start(tmp_path, "train", *flags_of(run, corpus))
    wait_for(lambda: (run / "checkpoints" / "step-000004").exists() or process.poll() is not None)
    assert process.poll() is None, (tmp_path / "errors").read_text()
    opened = mapped_semaphores(process.pid)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(AT_MOST)
    assert not opened & semaphores()


def test_next_run_removes_semaphores_of_killed_runs() -> None:
    """A run that is killed before its workers have opened them leaves their names."""
    names = _SemaphoreNames(multiprocessing.get_context("forkserver"))
    names.make_queue()
    created = {name for name in semaphores() if f"-{os.getpid()}-" in name}
    dead = subprocess.Popen(["true"])
    dead.wait()
    left = Path("/dev/shm") / min(created).replace(f"-{os.getpid()}-", f"-{dead.pid}-")
    left.touch()
    names.remove_leftovers()
    assert not left.exists()
    assert created <= semaphores()
    names.unlink_names()
    assert not created & semaphores()


# -- calls that pass an untrusted file to a library ----------------------------------------------------------

READERS = frozenset(
    [
        "from_pretrained",
        "load_dataset",
        "load_dataset_builder",
        "load_from_disk",
        "hf_hub_download",
        "snapshot_download",
        "for_model",
        "compile_chat_template",
        "read_generation_config",
        "memmap",
        "ParquetFile",
        "safe_open",
        "load_file",
        "import_module",
        "exec_module",
        "run_path",
        "run_module",
    ]
)
"""Functions of libraries that open files by the names in other files, or run code."""
_MODULES = frozenset({"yaml", "pickle", "torch", "Image", "np", "numpy"})
"""Modules whose `load`, `safe_load`, `open`, ... read a file of any content."""
_LOADERS = frozenset({"load", "loads", "safe_load", "unsafe_load", "compose", "full_load"})
DOORS: dict[str, str] = {
    "converters/config_and_tokenizer_files.py": "an ID of the Hub; the files are copied, not interpreted",
    "converters/formats/__init__.py": "names of this package's modules",
    "converters/formats/dcp/piece_index.py": "numbers that a rank of the same launch has written",
    "converters/lazy_imports.py": "names of this package's modules",
    "converters/storage/credentials.py": "names of libraries in the source",
    "converters/writers/targets.py": "names of this package's modules",
    "portable/adapters/settings.py": "check_folder_files; the JSON is read by this project",
    "portable/cli.py": "names of this package's modules",
    "portable/commands/chat.py": "check_downloaded_settings, also of the adapter; safetensors only, no "
    "custom code",
    "portable/config/yaml_text.py": "a loader without tags, which counts the values of aliases",
    "portable/data/images.py": "bytes of a record, or of a file that open_file has opened in a folder; "
    "few formats, and limits of bytes and pixels",
    "portable/data/sources/hub_dataset.py": "check_hub_card; saved datasets: check_folder_files",
    "portable/data/sources/hub_files.py": "check_folder_files, and the check of the card",
    "portable/data/sources/datasets_library.py": "one .csv file that open_file has opened; its name is "
    "escaped",
    "portable/data/sources/parquet_rows.py": "a file that open_file has opened",
    "portable/data/sources/sharded_tokens.py": "validate_relative_name of each file, and check_folder_files",
    "portable/data/sources/token_files.py": "open_file of the same path, with its size",
    "portable/data/tokens/cache.py": "files of the cache",
    "portable/data/tokens/image_processing.py": "check_downloaded_settings, also of the files of processors",
    "portable/data/tokens/rendering.py": "transformers' sandbox, in a process with limits",
    "portable/data/tokens/tokenizer.py": "check_downloaded_settings",
    "portable/importing/deepspeed.py": "names of libraries in the source",
    "portable/losses/preferences.py": "check_downloaded_settings, in select_pretrained_class",
    "portable/model/build.py": "check_downloaded_settings; model.config is the user's",
    "portable/model/pretrained.py": "check_downloaded_settings, in load_model_config, which runs before",
    "portable/model/special_tokens.py": "check_downloaded_settings, in load_model_config, which runs before",
    "portable/node_folder.py": "a file of another rank in a folder of mode 0700 that belongs to this user",
    "portable/planner/device_lookup.py": "a file of this package",
    "portable/planner/run_time.py": "names of libraries in the source",
    "portable/plugins.py": "an import path that the user's config names",
    "portable/private/__init__.py": "names of libraries in the source",
    "portable/private/transformers_internals.py": "check_downloaded_settings, in load_model_config, which "
    "runs before",
    "portable/registry.py": "names of this package's modules",
    "portable/untrusted_settings.py": "the check itself",
    "tpu/compile/child_process.py": "standard input, from the parent process",
}
"""Modules that may call them, and the check before the call."""


def find_readers(path: Path) -> set[str]:
    """Return the functions used in a source file that read a file of any content.

    A function may be called at once, or passed on, as in ``partial(snapshot_download, name)``.
    """
    readers = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            loads = node.attr in _LOADERS or (owner == "Image" and node.attr == "open")
            if node.attr in READERS or (owner in _MODULES and loads):
                readers.add(ast.unparse(node))
        elif isinstance(node, ast.Name) and node.id in READERS:
            readers.add(node.id)
    return readers


def test_only_checked_modules_pass_files_to_libraries() -> None:
    """A new use needs a row in DOORS that names its check."""
    root = Path(__file__).parents[2]
    sources = [
        path
        for package in ("portable", "converters", "gpu", "tpu")
        for path in (root / package).rglob("*.py")
    ]
    users = {str(path.relative_to(root)): readers for path in sources if (readers := find_readers(path))}
    assert {name: readers for name, readers in users.items() if name not in DOORS} == {}
    assert set(DOORS) - set(users) == set()
