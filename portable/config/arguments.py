"""The command line of ``portable-train``, and the common part of all commands with a config."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from converters.commands import version_line
from converters.console import say
from portable.config import flags
from portable.config.foreign import load_accelerate_reader
from portable.config.load import assemble, parse_file
from portable.config.numbers import Reason
from portable.config.origins import Origin
from portable.config.problems import build
from portable.config.run_config import RunConfig
from portable.config.types import Flag, PathText, Section

if TYPE_CHECKING:
    from collections.abc import Sequence

USAGE = """\
usage: portable-train [--config FILE.yaml] [--KEY VALUE ...]
       portable-train init [FILE] [--task TASK] [--model NAME] [--device NAME]
       portable-train import | schema | completion | chat

Train a Hugging Face model on a CPU, GPUs or TPUs from one YAML file.

examples:
  portable-train                                    the quickstart, no download
  portable-train --config run.yaml --train.steps 9  a file, one setting changed
  portable-train --config run.yaml --backend xla    the same run on a TPU VM
"""

Count = Annotated[int, Field(ge=1, le=10**8), Reason("More ranks, samples or steps than anyone looks at.")]


class CommandOptions(Section):
    """What every command that takes a config has besides the settings; only what is given counts."""

    config: Annotated[tuple[PathText, ...], Field(strict=False)] = ()
    """YAML file of settings; without one, the quickstart. May be given more than once: the files are merged
    in order, setting by setting, and later files override earlier ones."""
    version: Flag = False
    """Print the version and stop."""


class TrainOptions(CommandOptions):
    """Those of ``portable-train``."""

    accelerate_config: PathText = ""
    """A file of accelerate config. Its settings and number of ranks are used; they must agree with --config;
    flags override both."""
    nproc: Count = 1
    """Ranks to start on this machine. By default one per GPU, and one on the CPU. Under torchrun, accelerate
    launch, deepspeed or srun, this process joins their ranks."""
    dry_run: Flag = False
    """Check everything and say what the run would do. Then stop."""
    show_data: Count = 1
    """Print the first N samples, trained tokens marked. Then stop."""
    eval_only: Flag = False
    """Evaluate the newest checkpoint. Without one, the untrained model. Prints the values, writes
    output_dir/evaluation.json, and stops."""
    json_: PathText = Field(default="", alias="json")
    """With --eval-only: also write the values to a file."""
    replay: Count = 1
    """Repeat step N to locate a NaN or infinity. Starts from the last checkpoint before it and names
    micro-batch, sample, module and parameters. Writes nothing."""
    resume_info: PathText = ""
    """Describe a checkpoint and a run that resumes from it."""
    allow_changes: Flag = False
    """Continue the run in output_dir with changed settings (checkpoint.allow_changes)."""
    profile: Flag = False
    """Write a trace of a few steps, for Perfetto. It goes into output_dir/profile."""
    quiet: Flag = False
    """Print warnings and errors only (log.quiet)."""


@dataclass(frozen=True)
class Invocation:
    """The parsed command line of ``portable-train``."""

    config: RunConfig
    config_files: tuple[Path, ...] = ()
    """The YAML files in merge order."""
    nproc: int | None = None
    """Local ranks to start; None for the backend's default."""
    dry_run: bool = False
    show_data: int | None = None
    """Samples to print."""
    eval_only: bool = False
    json: str | None = None
    """A file for the values of an evaluation."""
    resume_info: str | None = None
    """Path of a checkpoint to describe."""
    replay: int | None = None
    """A step to repeat, to find a non-finite value."""
    profile: bool = False
    gpu_ids: str | None = None
    """The GPUs of an Accelerate config file."""
    notes: tuple[str, ...] = ()
    """Keys of an Accelerate config file that are ignored or have another meaning here, one line each."""

    @property
    def from_elsewhere(self) -> bool:
        """Whether a YAML file lies outside the current folder."""
        return not all(path.resolve().is_relative_to(Path.cwd()) for path in self.config_files)


def parse_args(argv: Sequence[str] | None = None) -> Invocation:
    """Read the command line of ``portable-train`` (``sys.argv`` by default).

    Raises ``UserError`` for an invalid command line. ``--help`` and ``--version`` print and exit.
    """
    config, given = read_command(sys.argv[1:] if argv is None else argv, TrainOptions, USAGE)
    files = given.pop("config", ())
    notes = tuple(given.pop("notes"))
    return Invocation(config, tuple(map(Path, files)), notes=notes, **given)


def read_command(
    argv: Sequence[str], options: type[CommandOptions], usage: str
) -> tuple[RunConfig, dict[str, Any]]:
    """Read the command line of a command with a config and ``options``.

    Returns the config and the given options by name, with ``notes`` on an Accelerate config. Raises
    ``UserError``. ``--help`` and ``--version`` print and exit.
    """
    parsed = flags.parse(argv, RunConfig, options)
    if parsed.help is not None:
        from portable.config import help_text

        columns = shutil.get_terminal_size().columns
        say(help_text.render(parsed.help, RunConfig, options, usage, columns))
        raise SystemExit(0)
    origins: dict[tuple[str, ...], Origin] = {
        (name,): Origin(f"--{name.replace('_', '-')}", 0, flag=True) for name in parsed.options
    }
    given = build(options, parsed.options, origins).model_dump(exclude_unset=True, by_alias=True)
    if given.pop("version", False):
        say(version_line())
        raise SystemExit(0)
    for name, section, setting in (
        ("quiet", "log", "quiet"),
        ("allow_changes", "checkpoint", "allow_changes"),
    ):
        if given.pop(name, False):
            switch = f"--{name.replace('_', '-')}"
            parsed.overrides.append(flags.Override((section, setting), True, switch))
    accelerate = []
    if "ACCELERATE_MIXED_PRECISION" in os.environ:  # every launcher of Accelerate sets it
        accelerate.append(load_accelerate_reader().read_environment(os.environ))
    if (path := given.pop("accelerate_config", None)) is not None:
        accelerate.append(file := load_accelerate_reader().read_accelerate(parse_file(Path(path)), path))
        if file.processes is not None:
            given.setdefault("nproc", file.processes)
        if file.gpu_ids is not None:
            given["gpu_ids"] = file.gpu_ids
    given["notes"] = [note for settings in accelerate for note in settings.notes]
    return assemble(given.get("config", ()), parsed.overrides, accelerate), given
