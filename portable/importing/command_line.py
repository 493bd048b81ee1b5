"""Parse the command line of another trainer's script into the content of a config file."""

from __future__ import annotations

from typing import Any, NamedTuple

from portable.config.yaml_text import parse_yaml_value
from portable.errors import UserError, to_one_line

LOCAL_COUNT_OPTIONS = ("nproc_per_node", "nproc", "num_gpus")
"""Launcher options of torchrun and deepspeed that set the number of processes per machine."""
MACHINE_COUNT_OPTIONS = ("nnodes", "num_nodes")
"""Launcher options of torchrun and deepspeed that set the number of machines."""
TOTAL_COUNT_OPTIONS = ("num_processes", "ntasks", "np", "n")
"""Launcher options of accelerate, srun and mpirun that set the number of processes on all machines."""


class LaunchedScript(NamedTuple):
    """Command line of a script, without the launcher and its options.

    Attributes:
        num_processes: Number of processes on all machines together. None if the launcher's options do
            not specify the number of processes.
        undefined_count: Launcher option whose value is not a number, such as ``--nproc_per_node gpu``
            or ``--nnodes 1:4``. Empty if there is none.
        words: Path of the script, followed by its arguments. If the command line contains no script,
            the complete command line.
    """

    num_processes: int | None
    undefined_count: str
    words: list[str]


def split_launcher_and_script(words: list[str]) -> LaunchedScript:
    """Separate a launcher from its script, as in ``torchrun --nproc_per_node 2 train.py --bf16``.

    Args:
        words: Words of the command line. The script is the first word that ends in ``.py``.

    Returns:
        The script with its arguments, and the number of processes that the launcher's options specify.

    Raises:
        UserError: If the script has no arguments.
    """
    script_index = next((position for position, word in enumerate(words) if word.endswith(".py")), None)
    if script_index is None:
        return LaunchedScript(None, "", words)
    if script_index + 1 == len(words):
        raise build_script_error(words[script_index], "command line: ")
    counts: dict[str, int] = {}
    undefined_count = ""
    options = (*LOCAL_COUNT_OPTIONS, *MACHINE_COUNT_OPTIONS, *TOTAL_COUNT_OPTIONS)
    for position, word in enumerate(words[:script_index]):
        flag, _, value = word.partition("=")
        name = flag.lstrip("-").replace("-", "_")
        if not flag.startswith("-") or name not in options:
            continue
        value = value or words[position + 1]
        machines = value.split(":")  # torchrun accepts a range such as 1:4
        if machines[0].isdigit() and set(machines) == {machines[0]}:
            counts[name] = int(machines[0])
        else:
            undefined_count = f"{flag} {value}"
    total = next((counts[name] for name in TOTAL_COUNT_OPTIONS if name in counts), None)
    per_machine = next((counts[name] for name in LOCAL_COUNT_OPTIONS if name in counts), None)
    if total is None and per_machine is not None:
        total = per_machine * next((counts[name] for name in MACHINE_COUNT_OPTIONS if name in counts), 1)
    return LaunchedScript(total, undefined_count, words[script_index:])


def build_script_error(path: str, prefix: str = "") -> UserError:
    """Build the error for a Python script that was specified without arguments.

    The settings in a script's code cannot be read, so the message asks for its arguments.

    Args:
        path: Path of the script.
        prefix: Text at the beginning of the message.
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
        Values, keyed by argument name with underscores, as in a config file. Values are parsed as
        YAML. An argument without a value is True, and an argument with several values is a list. If
        an argument is repeated, its last occurrence is used.

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
        raise UserError(
            to_one_line(f"import: there are no arguments in {' '.join(words)!r}; write them as --name value")
        )
    return values
