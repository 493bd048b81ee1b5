"""Parse the command lines of ``portable-train`` and of all other commands that take a config.

Settings can also come from Accelerate's config file or environment. Importing this module registers
a function that loads the setting names of other programs, such as Axolotl. If the user enters such
a name, the error message suggests the corresponding setting.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import Field

from portable.config import flags
from portable.config.field_types import Flag, PathText, Section
from portable.config.load import build_run_config, load_config
from portable.config.number_types import BoundsReason
from portable.config.origins import Assignment, Origin
from portable.config.run_config import RunConfig
from portable.config.suggestions import ForeignVocabulary, register_foreign_vocabulary
from portable.config.validation import validate_settings
from portable.config.yaml_text import read_yaml_file
from portable.converters.commands import format_version
from portable.converters.console import print_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portable.config.origins import KeyPath as SettingPath
    from portable.importing.foreign_file import ImportedRun

__all__ = [
    "CommandOptions",
    "Invocation",
    "PositiveCount",
    "TrainOptions",
    "load_config",
    "parse_command_line",
    "parse_train_args",
]

USAGE = """\
usage: portable-train [--config FILE.yaml] [--KEY VALUE ...]
       portable-train init [FILE] [--task TASK] [--model NAME] [--device NAME]
       portable-train import | schema | completion | chat

Train a Hugging Face model on a CPU, GPUs or TPUs from one YAML file.

examples:
  portable-train                                    run the quickstart
  portable-train --config run.yaml --train.steps 9  change one setting
  portable-train --config run.yaml --backend xla    train on a TPU VM
"""

PositiveCount = Annotated[
    int, Field(ge=1, le=10**8), BoundsReason("A larger number of ranks, samples or steps is a mistake.")
]
"""Type of a number of ranks, samples or steps on the command line."""


def _load_foreign_names() -> ForeignVocabulary:
    """Import the setting names of other programs. Called only to build an error message."""
    from portable.importing.hints import FOREIGN_VOCABULARY

    return FOREIGN_VOCABULARY


register_foreign_vocabulary(_load_foreign_names)


class CommandOptions(Section):
    """Options of every command that takes a config.

    This class only declares the options. :func:`parse_command_line` returns just the options that
    are given on the command line, so the default values of the fields are never used.
    """

    config: Annotated[tuple[PathText, ...], Field(strict=False)] = ()
    """YAML file of settings. Without a file, the quickstart runs. Several files are merged in order, setting
    by setting, and later files override earlier files."""
    version: Flag = False
    """Print the version and stop."""


class TrainOptions(CommandOptions):
    """Options of ``portable-train``."""

    accelerate_config: PathText = ""
    """Config file of Accelerate, whose settings and number of ranks apply to the run. They must agree with
    --config; flags override both."""
    nproc: PositiveCount = 1
    """Number of ranks to start on this machine. The default is one per GPU, or one on the CPU. Under
    torchrun, accelerate launch, deepspeed or srun, this process joins the ranks of the launcher."""
    dry_run: Flag = False
    """Check the config, the model and the data, describe the run, and stop."""
    show_data: PositiveCount = 1
    """Print the first N samples with their trained tokens marked, and stop."""
    eval_only: Flag = False
    """Evaluate the newest checkpoint, or the untrained model if there is none. Prints the values, writes
    output_dir/evaluation.json, and stops."""
    json_: PathText = Field(default="", alias="json")
    """File to write the values of --eval-only to, in addition to output_dir/evaluation.json."""
    replay: PositiveCount = 1
    """Repeat step N to locate a NaN or infinity. Starts from the last checkpoint before the step, and prints
    the micro-batch, sample, module and parameters. Writes nothing."""
    resume_info: PathText = ""
    """Describe a checkpoint and the run that would resume from it."""
    allow_changes: Flag = False
    """Continue the run in output_dir with changed settings (checkpoint.allow_changes)."""
    profile: Flag = False
    """Write a trace of a few steps into output_dir/profile, for Perfetto."""
    quiet: Flag = False
    """Print only warnings and errors (log.quiet)."""


@dataclass(frozen=True)
class Invocation:
    """Parsed command line of ``portable-train``. Most attributes are options of the same name.

    Attributes:
        config: Config of the run.
        config_files: YAML files, in merge order.
        nproc: Number of local ranks to start. None uses the backend's default.
        dry_run: Whether to check everything without training.
        show_data: Number of samples to print. None if the option is not set.
        eval_only: Whether to evaluate without training.
        json: Path of a file for the evaluation results. None if the option is not set.
        resume_info: Path of a checkpoint to describe. None if the option is not set.
        replay: Step to replay to locate non-finite values. None if the option is not set.
        profile: Whether to write a trace of a few steps.
        gpu_ids: GPUs selected in an Accelerate config file, in the format of ``CUDA_VISIBLE_DEVICES``.
            None if there is no such file, or if it does not select GPUs.
        notes: Notes about Accelerate keys that are ignored or have a different meaning here, one line
            each.
    """

    config: RunConfig
    config_files: tuple[Path, ...] = ()
    nproc: int | None = None
    dry_run: bool = False
    show_data: int | None = None
    eval_only: bool = False
    json: str | None = None
    resume_info: str | None = None
    replay: int | None = None
    profile: bool = False
    gpu_ids: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def is_from_elsewhere(self) -> bool:
        """Whether a config file is outside the current folder and may come from someone else."""
        return not all(path.resolve().is_relative_to(Path.cwd()) for path in self.config_files)


def parse_train_args(argv: Sequence[str] | None = None) -> Invocation:
    """Parse the command line of ``portable-train``.

    Args:
        argv: Command-line arguments. Defaults to ``sys.argv``.

    Raises:
        UserError: If the command line or one of its config files is not valid.
        SystemExit: After ``--help`` or ``--version``, which print and exit.
    """
    config, options = parse_command_line(sys.argv[1:] if argv is None else argv, TrainOptions, USAGE)
    files = options.pop("config", ())
    notes = tuple(options.pop("notes"))
    return Invocation(config, tuple(map(Path, files)), notes=notes, **options)


class ParsedCommand(NamedTuple):
    """Parsed command line of a command that takes a config."""

    config: RunConfig
    options: dict[str, Any]
    """Values of the options on the command line, keyed by name.

    The key ``notes`` contains a list of strings, one for each Accelerate key that is ignored or has a
    different meaning in this project.
    """


def parse_command_line(argv: Sequence[str], options: type[CommandOptions], usage: str) -> ParsedCommand:
    """Parse the command line of a command that takes a config.

    The config also contains the settings from the environment of ``accelerate launch`` and from the
    file in ``--accelerate-config``. ``--quiet`` and ``--allow-changes`` are converted to settings.

    Args:
        argv: Arguments, without the name of the program.
        options: Schema of the command's options.
        usage: First part of the help text.

    Returns:
        The config and the options. The number of ranks and the GPUs in the Accelerate file are
        added to the options as ``nproc`` and ``gpu_ids``. If ``--nproc`` is given, it takes
        precedence.

    Raises:
        UserError: If the command line or one of its config files is not valid.
        SystemExit: After ``--help`` or ``--version``, which print and exit.
    """
    command_line = flags.parse_flags(argv, RunConfig, options)
    if command_line.help is not None:
        from portable.config import help_text

        columns = shutil.get_terminal_size().columns
        print_line(help_text.render_help(command_line.help, RunConfig, options, usage, columns))
        raise SystemExit(0)
    origins: dict[SettingPath, Origin] = {
        (name,): Origin(f"--{name.replace('_', '-')}", 0, is_flag=True) for name in command_line.options
    }
    validated = validate_settings(options, command_line.options, origins)
    values = validated.model_dump(exclude_unset=True, by_alias=True)
    if values.pop("version", False):
        print_line(format_version())
        raise SystemExit(0)
    for name, key in (("quiet", "log.quiet"), ("allow_changes", "checkpoint.allow_changes")):
        if values.pop(name, False):
            command_line.add_setting(key, True, f"--{name.replace('_', '-')}")
    settings_of_accelerate = _read_accelerate_settings(values)
    values["notes"] = [note for settings in settings_of_accelerate for note in settings.notes]
    imported = [
        Assignment(tuple(key.split(".")), value, settings.origins[key], key in settings.assumed_keys)
        for settings in settings_of_accelerate
        for key, value in settings.values.items()
    ]
    return ParsedCommand(build_run_config(values.get("config", ()), command_line.settings, imported), values)


def _read_accelerate_settings(values: dict[str, Any]) -> list[ImportedRun]:
    """Read settings from the environment of ``accelerate launch`` and the file in ``--accelerate-config``.

    Args:
        values: Options on the command line, changed in place. ``accelerate_config`` is removed. The
            number of ranks in the file is added as ``nproc`` unless it is already set, and the GPUs in
            the file are added as ``gpu_ids``.

    Returns:
        The settings from the environment and from the file, in this order. Empty if there is neither.

    Raises:
        UserError: If a key of Accelerate is unknown or has no counterpart.
    """
    settings = []
    if "ACCELERATE_MIXED_PRECISION" in os.environ:  # every launcher of Accelerate sets it
        from portable.importing.programs import convert_accelerate_environment

        settings.append(convert_accelerate_environment(os.environ))
    if (path := values.pop("accelerate_config", None)) is not None:
        from portable.importing.programs import convert_accelerate_file

        settings.append(file := convert_accelerate_file(read_yaml_file(Path(path)), path))
        if file.num_processes is not None:
            values.setdefault("nproc", file.num_processes)
        if file.gpu_ids is not None:
            values["gpu_ids"] = file.gpu_ids
    return settings
