"""``portable-train completion``: print a shell script that completes the flags of all commands."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import shtab

from portable.command_line import TrainOptions
from portable.commands.chat import build_chat_parser
from portable.commands.data import DataOptions
from portable.config import keys
from portable.config.run_config import RunConfig
from portable.converters.cli import build_parser as convert_parser
from portable.converters.commands import CommandParser
from portable.converters.console import print_line
from portable.planner.cli import PlanOptions
from portable.reporting.html_report import build_parser as report_parser

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pydantic import BaseModel

_MAX_HELP_CHARACTERS = 90


def print_completion_script(argv: Sequence[str]) -> int:
    """Print a script for a shell, which shtab generates, that completes the flags of all commands.

    Args:
        argv: Words after ``completion`` on the command line, with the name of the shell.

    Returns:
        Exit code 0.
    """
    parser = CommandParser(
        prog="portable-train completion",
        description="Print a script that completes portable-train and the other commands in a shell.",
        epilog='In ~/.bashrc or ~/.zshrc:  eval "$(portable-train completion bash)"\n'
        "In ~/.config/fish/config.fish:  portable-train completion fish | source",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    shell: str = parser.parse_args(argv).shell
    programs = (
        _build_parser_for_completion("portable-train", TrainOptions),
        _build_parser_for_completion("portable-plan", PlanOptions),
        _build_parser_for_completion("portable-data", DataOptions),
        convert_parser(),
        report_parser(),
        build_chat_parser(),
    )
    print_line("\n".join(shtab.complete(program, shell) for program in programs))
    return 0


def _build_parser_for_completion(name: str, options: type[BaseModel]) -> argparse.ArgumentParser:
    """Build an argument parser with all settings and options of a command, from which shtab reads the flags.

    The parser is only used for this purpose, because the command itself parses its flags with
    :mod:`portable.config.flags`.

    Args:
        name: Name of the program.
        options: Schema of the options of the command.
    """
    parser = argparse.ArgumentParser(prog=name, allow_abbrev=False)
    command_options = {
        key.replace("_", "-"): setting for key, setting in keys.get_setting_fields(options).items()
    }
    for key, setting in (keys.get_setting_fields(RunConfig) | command_options).items():
        help_text = _format_argument_help(setting.description)
        if key in command_options and setting.accepts_type(bool):
            parser.add_argument(f"--{key}", action="store_true", help=help_text)
            continue
        choices = setting.choices or (("true", "false") if setting.accepts_type(bool) else None)
        action = parser.add_argument(f"--{key}", help=help_text, choices=choices)
        if setting.may_be_path:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    return parser


def _format_argument_help(text: str) -> str:
    """Return the first sentence of a description, truncated, with percent signs escaped for argparse."""
    first = " ".join(text.split()).split(". ")[0]
    return (first if len(first) <= _MAX_HELP_CHARACTERS else f"{first[:_MAX_HELP_CHARACTERS]}...").replace(
        "%", "%%"
    )
