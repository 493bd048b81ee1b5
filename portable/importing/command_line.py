"""Parse the command line of another trainer's script into the content of a config file."""

from __future__ import annotations

from typing import Any, NamedTuple

from portable.config.yaml_text import parse_yaml_value
from portable.errors import UserError, to_one_line

PROCESS_COUNT_OPTIONS = ("nproc_per_node", "num_processes", "num_gpus", "nproc")
"""Options with which launchers such as torchrun specify the number of processes on a machine."""


class LaunchedScript(NamedTuple):
    """Command line of a script, without the launcher and its options.

    Attributes:
        num_processes: Number of processes per machine. None if the launcher's options do not specify
            it.
        words: The script and its arguments. The complete command line if it does not contain a script.
    """

    num_processes: int | None
    words: list[str]


def split_launcher_and_script(words: list[str]) -> LaunchedScript:
    """Separate a launcher from its script, as in ``torchrun --nproc_per_node 2 train.py --bf16``.

    Args:
        words: Words of the command line. The script is the first word that ends in ``.py``.

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
    """Build the error for a Python script without arguments. Settings in its code cannot be read.

    Args:
        path: Path of the script.
        prefix: Beginning of the message.
    """
    return UserError(
        f"{prefix}{path}: is a Python script, whose settings cannot be read; write its arguments after --, "
        f"as in portable-train import -- {path} --learning_rate 1e-5, or start from portable-train init "
        "and copy the values (docs/migrate.md names the setting of each argument)"
    )


def parse_script_arguments(words: list[str]) -> dict[str, Any]:
    """Parse the arguments of a script, such as ``--bf16 --learning_rate 1e-5``.

    Args:
        words: Words of the command line. Words before the first argument, such as the script, are
            ignored.

    Returns:
        Values, keyed by argument name with underscores, as in a config file. An argument without a
        value is True, and an argument with several values is a list.

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
