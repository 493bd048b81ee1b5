"""Conversion of the command line of another trainer's script to the content of a config file."""

from __future__ import annotations

from typing import Any, NamedTuple

from portable.config.yaml_text import parse_yaml_value
from portable.errors import UserError, to_one_line

PROCESS_COUNT_OPTIONS = ("nproc_per_node", "num_processes", "num_gpus", "nproc")
"""Options of launchers for the number of processes on a machine."""


class LaunchedScript(NamedTuple):
    """A command line, separated into its launcher and its script.

    Attributes:
        num_processes: Number of processes per machine. None if the launcher does not specify it.
        words: The script and its arguments. All arguments if there is no script.
    """

    num_processes: int | None
    words: list[str]


def split_launcher_and_script(words: list[str]) -> LaunchedScript:
    """Separate a launcher from the script that it starts: ``torchrun --nproc_per_node 2 train.py --bf16``.

    Args:
        words: Words of the command line.

    Raises:
        UserError: If the script has no arguments.
    """
    script_index = next((position for position, word in enumerate(words) if word.endswith(".py")), None)
    if script_index is None:
        return LaunchedScript(None, words)
    if script_index + 1 == len(words):
        raise build_script_error(words[script_index], "command line: ")
    num_processes = None
    for position, word in enumerate(words[:script_index]):
        name, _, value = word.lstrip("-").replace("-", "_").partition("=")
        if name in PROCESS_COUNT_OPTIONS and (value or words[position + 1]).isdigit():
            num_processes = int(value or words[position + 1])
    return LaunchedScript(num_processes, words[script_index:])


def build_script_error(path: str, prefix: str = "") -> UserError:
    """Build the error for a Python script, because settings in its code cannot be read.

    Args:
        path: Path of the script.
        prefix: Beginning of the message.
    """
    return UserError(
        f"{prefix}{path}: a Python script, whose settings are not read; write its arguments after --, as in "
        f"portable-train import -- {path} --learning_rate 1e-5, or start from portable-train init and copy "
        "the values (docs/migrate.md names the setting of each argument)"
    )


def parse_script_arguments(words: list[str]) -> dict[str, Any]:
    """Parse the arguments of a script, such as ``--bf16 --learning_rate 1e-5``.

    Returns:
        Values by name, like the content of a config file. An argument without a value is True, and several
        values form a list.

    Raises:
        UserError: If there are no arguments.
    """
    values: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, text = word[2:].partition("=")
            name = name.replace("-", "_")
            values[name] = parse_yaml_value(text) if equals else True
        elif name:
            value, earlier = parse_yaml_value(word), values[name]
            if earlier is True:
                values[name] = value
            else:
                values[name] = [*(earlier if isinstance(earlier, list) else [earlier]), value]
    if not values:
        raise UserError(to_one_line(f"import: no arguments in {' '.join(words)!r}; give --name value"))
    return values
