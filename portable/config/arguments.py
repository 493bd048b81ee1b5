"""The command line of ``portable-train``, and what every command with a config has in common."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converters.commands import exit_codes, version_line
from converters.console import say
from portable.config import flags, help_text
from portable.config.accelerate_yaml import read_environment
from portable.config.flags import Option
from portable.config.load import assemble, read_accelerate_config
from portable.config.schema import RunConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

USAGE = f"""\
usage: portable-train [--config FILE.yaml] [--backend auto|cpu|cuda|xla] [--nproc N] [--SECTION.KEY VALUE ...]

Train a Hugging Face model on a CPU, on GPUs or on TPUs from one YAML file, and go on elsewhere.

examples:
  portable-train                                        the quickstart: a small Llama, nothing to download
  portable-train --config run.yaml --train.steps 1000   a file, with one setting changed
  portable-train --config run.yaml --backend xla        the same run on a TPU VM

{exit_codes()}
"""

CONFIG_OPTIONS = (
    Option(
        "config",
        "paths",
        "YAML file with settings; without it, the defaults: the quickstart. May be given more than once: the "
        "files are merged in order, setting by setting, and the later one wins.",
        "FILE",
    ),
    Option("version", "switch", "Print the version and stop."),
)
"""Options of every command that takes a config."""

TRAIN_OPTIONS = (
    CONFIG_OPTIONS[0],
    Option(
        "accelerate-config",
        "path",
        "An Accelerate config file (accelerate config writes it) to take settings and the number of ranks "
        "from. What --config sets too must agree with it; flags win over both.",
        "FILE",
    ),
    Option(
        "nproc",
        "count",
        "Ranks to start on this machine; by default one for each GPU, and one on the CPU. Under torchrun, "
        "accelerate launch, deepspeed or srun it joins what they started.",
        "N",
    ),
    Option("dry-run", "switch", "Check everything, print the resolved config and the plan, and stop."),
    Option("eval-only", "switch", "Evaluate the newest checkpoint, or the model as it is, and stop."),
    Option(
        "replay",
        "count",
        "Take the run's step N once more, from the last checkpoint before it, and say where a loss or "
        "gradient stops being finite: micro-batch, sample, module, parameters. Writes nothing.",
        "N",
    ),
    Option("resume-info", "path", "Say what a checkpoint holds and what a run from it would do.", "PATH"),
    Option("profile", "switch", "Write a trace of a few steps into output_dir/profile, for Perfetto."),
    CONFIG_OPTIONS[1],
)


@dataclass(frozen=True)
class Invocation:
    """What one call of ``portable-train`` asks for."""

    config: RunConfig
    config_files: tuple[Path, ...] = ()
    """The YAML files, in the order in which they were merged."""
    nproc: int | None = None
    """Local ranks to start; None: the backend's choice."""
    dry_run: bool = False
    eval_only: bool = False
    resume_info: str | None = None
    """Path of a checkpoint to describe."""
    replay: int | None = None
    """A step to take once more, for finding out what went wrong in it."""
    profile: bool = False
    gpu_ids: str | None = None
    """The GPUs that an Accelerate config file chooses."""
    notes: tuple[str, ...] = ()
    """What of an Accelerate config file is passed over or means something else here, one line each."""


def parse_args(argv: Sequence[str] | None = None) -> Invocation:
    """Read the command line of ``portable-train`` (``sys.argv`` by default).

    Raises ``UserError`` for what cannot be understood. ``--help`` and ``--version`` print and exit.
    """
    config, given = read_command(sys.argv[1:] if argv is None else argv, TRAIN_OPTIONS, USAGE)
    files = given.pop("config", ())
    notes = tuple(given.pop("notes"))
    return Invocation(config, tuple(map(Path, files)), notes=notes, **given)


def read_command(
    argv: Sequence[str], options: Sequence[Option], usage: str
) -> tuple[RunConfig, dict[str, Any]]:
    """Read the command line of any command that takes a config and ``options`` of its own.

    Returns the config, and the options that were given by attribute name (with ``notes``, what to tell of an
    Accelerate config). Raises ``UserError``; ``--help``
    and ``--version`` print and exit.
    """
    parsed = flags.parse(argv, RunConfig, options)
    if parsed.help is not None:
        columns = shutil.get_terminal_size().columns
        say(help_text.render(parsed.help, RunConfig, options, usage, columns))
        raise SystemExit(0)
    if parsed.options.pop("version", False):
        say(version_line())
        raise SystemExit(0)
    accelerate = [] if (launched := read_environment(os.environ)) is None else [launched]
    if (path := parsed.options.pop("accelerate_config", None)) is not None:
        accelerate.append(file := read_accelerate_config(Path(path)))
        if file.processes is not None:
            parsed.options.setdefault("nproc", file.processes)
        if file.gpu_ids is not None:
            parsed.options["gpu_ids"] = file.gpu_ids
    parsed.options["notes"] = [note for settings in accelerate for note in settings.notes]
    files = parsed.options.get("config", ())
    return assemble(files, parsed.overrides, accelerate), parsed.options
