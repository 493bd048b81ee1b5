"""The command line of ``portable-train``, and the common part of all commands with a config."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converters.commands import version_line
from converters.console import say
from portable.config import flags
from portable.config.flags import Option
from portable.config.load import assemble, parse_file
from portable.config.run_config import RunConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

USAGE = """\
usage: portable-train [--config FILE.yaml] [--KEY VALUE ...]
       portable-train init [FILE] [--for PROGRAM], import, schema, completion

Train a Hugging Face model on a CPU, GPUs or TPUs from one YAML file.

examples:
  portable-train                                    the quickstart, no download
  portable-train --config run.yaml --train.steps 9  a file, one setting changed
  portable-train --config run.yaml --backend xla    the same run on a TPU VM
"""

CONFIG_OPTIONS = (
    Option(
        "config",
        "paths",
        "YAML file of settings; without one, the quickstart. May be given more than once: the files are "
        "merged in order, setting by setting, and later files override earlier ones.",
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
        "A file of accelerate config. Its settings and number of ranks are used; they must "
        "agree with --config; flags override both.",
        "FILE",
    ),
    Option(
        "nproc",
        "count",
        "Ranks to start on this machine. By default one per GPU, and one on the CPU. Under torchrun, "
        "accelerate launch, deepspeed or srun, this process joins their ranks.",
        "N",
    ),
    Option("dry-run", "switch", "Check everything and say what the run would do. Then stop."),
    Option(
        "show-data",
        "count",
        "Print the first N samples, trained tokens marked. Then stop.",
        "N",
    ),
    Option(
        "eval-only",
        "switch",
        "Evaluate the newest checkpoint. Without one, the untrained model. Prints the values, writes "
        "output_dir/evaluation.json, and stops.",
    ),
    Option("json", "path", "With --eval-only: also write the values to FILE.", "FILE"),
    Option(
        "replay",
        "count",
        "Repeat step N to locate a NaN or infinity. Starts from the last checkpoint before it "
        "and names micro-batch, sample, module and parameters. Writes nothing.",
        "N",
    ),
    Option("resume-info", "path", "Describe a checkpoint and a run that resumes from it.", "PATH"),
    Option(
        "profile", "switch", "Write a trace of a few steps, for Perfetto. It goes into output_dir/profile."
    ),
    Option("quiet", "switch", "Print warnings and errors only (log.quiet)."),
    CONFIG_OPTIONS[1],
)


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
    config, given = read_command(sys.argv[1:] if argv is None else argv, TRAIN_OPTIONS, USAGE)
    files = given.pop("config", ())
    notes = tuple(given.pop("notes"))
    return Invocation(config, tuple(map(Path, files)), notes=notes, **given)


def read_command(
    argv: Sequence[str], options: Sequence[Option], usage: str
) -> tuple[RunConfig, dict[str, Any]]:
    """Read the command line of a command with a config and ``options``.

    Returns the config and the given options by attribute name, with ``notes`` on an Accelerate config. Raises
    ``UserError``. ``--help`` and ``--version`` print and exit.
    """
    parsed = flags.parse(argv, RunConfig, options)
    if parsed.help is not None:
        from portable.config import help_text

        columns = shutil.get_terminal_size().columns
        say(help_text.render(parsed.help, RunConfig, options, usage, columns))
        raise SystemExit(0)
    if parsed.options.pop("version", False):
        say(version_line())
        raise SystemExit(0)
    if parsed.options.pop("quiet", False):
        parsed.overrides.append(flags.Override(("log", "quiet"), True, "--quiet"))
    accelerate = []
    if "ACCELERATE_MIXED_PRECISION" in os.environ:  # every launcher of Accelerate sets it
        from portable.config.importing.importer import read_environment

        accelerate.append(read_environment(os.environ))
    if (path := parsed.options.pop("accelerate_config", None)) is not None:
        from portable.config.importing.importer import read_accelerate

        accelerate.append(file := read_accelerate(parse_file(Path(path)), path))
        if file.processes is not None:
            parsed.options.setdefault("nproc", file.processes)
        if file.gpu_ids is not None:
            parsed.options["gpu_ids"] = file.gpu_ids
    parsed.options["notes"] = [note for settings in accelerate for note in settings.notes]
    files = parsed.options.get("config", ())
    return assemble(files, parsed.overrides, accelerate), parsed.options
