"""Tests with the newest or the lowest versions that pyproject.toml allows.

    python -m tests.versions newest|lowest [--python VERSION]
    python -m tests.versions pin

The first command creates fresh environments without constraints, one for CPU, CUDA and ZeRO, one for XLA, and
one with the programs that write checkpoints. In them, it runs a user's first commands: the quick start, its
resume, the resulting model, LoRA, two ranks of ZeRO and of FSDP2, a conversion, the contract of the engines,
two steps on XLA, a plan by the TPU's compiler, and the conversion of checkpoints of each writer. ``--only``
selects environments. The second command writes ``constraints.txt`` and ``constraints-xla.txt`` with the
newest versions that are compatible. Both need ``uv``, which is part of the extra ``test``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]

TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
"""Packages that the tests of engines need, always in the newest version."""

Command = tuple[str, ...]


class World(NamedTuple):
    """An environment, and the commands that must work in it.

    Attributes:
        extras: Extras of the project.
        packages: Additional packages, in the newest version.
        variables: Environment variables of all commands.
        commands: Commands by description, run in an empty folder. The first word is a program of the
            environment.
    """

    extras: str
    variables: dict[str, str]
    commands: dict[str, Command]
    packages: tuple[str, ...] = ()


def read_written(*files: str, only: str = "") -> Command:
    """Return the command for tests of the converter in which a library writes the checkpoints."""
    paths = [f"{ROOT}/tests/converters/{file}" for file in files]
    return ("python", "-m", "pytest", "-q", *paths, *(("-k", only) if only else ()))


RUN = ("portable-train", "--log.trackers", "[]", "--train.steps", "12", "--train.warmup_steps", "2")
TUNED = (*RUN, "--model.name_or_path", "runs/quickstart/final", "--data.seq_len", "128")
MOVED = (*TUNED, "--output_dir", "moved", "--nproc", "2")

WORLDS = {
    "main": World(
        "deepspeed,qlora",
        {"DS_ACCELERATOR": "cpu"},
        {
            "quick start": (*RUN, "--train.stop_after", "6"),
            "resume": RUN,
            "pretrained": (*TUNED, "--output_dir", "tuned"),
            "LoRA": (*TUNED, "--output_dir", "lora", "--adapter.type", "lora"),
            "QLoRA": (*TUNED, "--output_dir", "qlora", "--adapter.type", "lora", "--adapter.base", "nf4"),
            "FSDP2": (*TUNED, "--output_dir", "fsdp", "--strategy", "full_shard", "--nproc", "2"),
            "ZeRO-2": (*MOVED, "--strategy", "zero2", "--train.stop_after", "6"),
            "ZeRO-2 resumed by FSDP2": (*MOVED, "--strategy", "full_shard"),
            "conversion": ("portable-convert", "moved", "out", "--optimizer", "--verify"),
            "its result": (
                *("python", "-c"),
                "import transformers; transformers.AutoModelForCausalLM.from_pretrained('out')",
            ),
            "engines": ("python", "-m", "pytest", "-q", f"{ROOT}/tests/test_engines.py", "-m", "not xla"),
        },
    ),
    "xla": World(
        "tpu-compile",
        {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2"},
        {
            "dry run": (*RUN, "--backend", "xla", "--dry-run"),
            "two steps": (*RUN, "--backend", "xla", "--train.stop_after", "2"),
            "conversion": ("portable-convert", "runs/quickstart", "out", "--optimizer", "--verify"),
            "plan": ("portable-plan", "--device", "v5e", "--devices", "4", "--compile"),
        },
    ),
    "writers": World(
        "test-tools",
        {"DS_ACCELERATOR": "cpu"},
        {
            "compressed-tensors, bitsandbytes": read_written("test_dequantize.py", only="not torchao"),
            "torchao": read_written("test_dequantize.py", only="torchao"),
            "peft": read_written("test_merging.py", only="every_kind_of_adapter"),
            "gguf": read_written("test_gguf.py"),
            "DeepSpeed": read_written("test_deepspeed.py"),
            "Accelerate, torch": read_written("test_dcp.py", "test_fsdp_ranks.py"),
            "Megatron": read_written("test_megatron.py"),
            "transformers": read_written("test_published_names.py"),
            "fp8": ("python", "-m", "pytest", "-n0", "-q", "tests/gpu/test_fp8.py"),
            "torch_checkpointing": read_written("test_formats.py", only="written_items"),
        },
        ("torchao", "torch-checkpointing"),
    ),
}


def environment(folder: Path, world: World, bound: str, python: str) -> Path:
    """Create an environment in ``folder`` with the project. Returns the folder of its programs."""
    uv = [sys.executable, "-m", "uv"]
    install = [*uv, "pip", "install", "--quiet", "--python", str(folder)]
    resolution = "highest" if bound == "newest" else "lowest-direct"
    subprocess.run([*uv, "venv", "--quiet", "--python", python, str(folder)], check=True)
    subprocess.run([*install, "--resolution", resolution, "-e", f"{ROOT}[{world.extras}]"], check=True)
    subprocess.run([*install, *TOOLS, *world.packages], check=True)
    subprocess.run([*uv, "pip", "list", "--python", str(folder)], check=True)
    return folder / "bin"


def look(bound: str, python: str, only: list[str]) -> int:
    """Run the commands of the selected :data:`WORLDS`. Returns 1 if one failed."""
    failed = []
    for name, world in WORLDS.items():
        if name not in only:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            programs = environment(Path(scratch, "env"), world, bound, python)
            variables = {**os.environ, **world.variables, "PATH": f"{programs}:{os.environ['PATH']}"}
            work = Path(scratch, "work")
            work.mkdir()
            for what, (program, *arguments) in world.commands.items():
                print(f"=== {name}, {bound}: {what}", flush=True)
                more = {"PYTHONPATH": str(ROOT)} if "pytest" in arguments else {}
                command = [str(programs / program), *arguments]
                if subprocess.run(command, cwd=work, env=variables | more, check=False).returncode:
                    failed.append(f"{name}: {what}")
    print(f"FAILED: {', '.join(failed)}" if failed else f"all works with the {bound} versions")
    return 1 if failed else 0


def pin() -> int:
    """Write the constraints of both environments, for the oldest Python that is supported."""
    for name, extra in {"constraints.txt": "test", "constraints-xla.txt": "test-xla"}.items():
        command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--upgrade", "--python-version"]
        command += ["3.11", "--no-annotate", "--no-header", "--no-emit-package", "portable-trainer"]
        command += ["--extra", extra, "pyproject.toml"]
        text = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        head = (
            "# The versions that the tests were run with: "
            f"pip install -c {name} -e '.[{extra}]'\n"
            "# Others within the bounds of pyproject.toml should work too: python -m tests.versions newest\n"
            "# Written by: python -m tests.versions pin\n"
        )
        (ROOT / name).write_text(head + text, "utf-8")
    return 0


def main(arguments: list[str]) -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.versions", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("what", choices=["newest", "lowest", "pin"])
    parser.add_argument("--python", default="3.11", help="version of the new environments (default 3.11)")
    parser.add_argument("--only", nargs="+", choices=list(WORLDS), default=list(WORLDS), help="environments")
    chosen = parser.parse_args(arguments)
    return pin() if chosen.what == "pin" else look(chosen.what, chosen.python, chosen.only)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
