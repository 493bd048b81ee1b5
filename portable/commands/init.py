"""``portable-train init``: write a short config, or a file that launches a run on rented machines.

A starter config is a commented YAML file for one task. The starter configs are in
``configs/starters``.
"""

from __future__ import annotations

import argparse
import math
import re
import shlex
import textwrap
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.commands.machines import list_launch_templates, write_launch_file, write_new_file
from portable.config import load_config
from portable.config.yaml_text import parse_yaml
from portable.config.yaml_writer import format_yaml
from portable.converters.commands import CommandParser
from portable.converters.console import print_line
from portable.errors import UserError, require

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from importlib.resources.abc import Traversable

    from portable.config import RunConfig

_EXAMPLES = """\
examples:
  portable-train init chat.yaml --task chat
  portable-train init --task lora --model Qwen/Qwen3-8B --data chats.jsonl --device 4090
  portable-train init --task lora --model Qwen/Qwen3-8B --device h100:8
  portable-train init run.yaml --for sky --device h100:8 --output_dir s3://bucket/run

With --device, the planner chooses settings with which the run fits into memory: a 16-bit or 4-bit base model,
the micro-batch size, activation checkpointing, the strategy, and (with --data) packing. The comments in the
file describe the plan. The weights of the model are not downloaded.
"""
_CHEAPER_TASKS = {"chat": ("lora",)}
"""For each task, the tasks that need less memory. They are suggested if a run does not fit on a device."""
_COMMENT_WIDTH = 100
"""Maximum width of a comment line, in characters."""


def get_config_folder() -> Traversable:
    """Return the folder ``configs`` with the starter configs, the JSON Schema and the launch templates.

    The folder is not a package, because users may have a module with this name.
    """
    return files("portable").joinpath("configs")


def print_schema(argv: Sequence[str]) -> int:
    """Print the JSON Schema of a config.

    Args:
        argv: Arguments after ``schema``. They are ignored.

    Returns:
        Exit code 0.
    """
    print_line(get_config_folder().joinpath("schema.json").read_text("utf-8").rstrip())
    return 0


def read_starter_configs() -> dict[str, str]:
    """Read all starter configs. Returns their texts, keyed by task."""
    files = sorted(get_config_folder().joinpath("starters").iterdir(), key=lambda file: file.name)
    return {Path(file.name).stem: file.read_text("utf-8") for file in files if file.name.endswith(".yaml")}


def _build_init_parser(
    templates: Collection[str], starters: Mapping[str, str], names: Collection[str]
) -> CommandParser:
    """Build the argument parser of ``portable-train init``.

    Args:
        templates: Valid values of ``--for``: names of programs that start runs on rented machines.
        starters: Texts of the starter configs, keyed by task. The help text lists the tasks.
        names: Valid values of ``--task``: tasks and their aliases.
    """
    task_lines = (
        f"  {task:<22} {text.partition(': portable-train')[0].removeprefix('# ').partition('. ')[0]}"
        for task, text in starters.items()
    )
    parser = CommandParser(
        prog="portable-train init",
        description="Write a short config with comments. With --for: write a file next to the config that\n"
        "starts the run on rented machines.",
        epilog="tasks:\n" + "\n".join(task_lines) + "\n\n" + _EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "file", nargs="?", default="run.yaml", type=Path, help="path of the config; default: run.yaml"
    )
    parser.add_argument(
        "--task", choices=names, metavar="TASK", help="one of the tasks below; default: pretrain"
    )
    parser.add_argument("--model", metavar="NAME", help="hub id or folder of the model")
    parser.add_argument("--data", metavar="SOURCE", help="file, glob or hub dataset to train on")
    parser.add_argument(
        "--device",
        action="append",
        default=[],
        metavar="NAME[:COUNT]",
        help="devices on which the run must fit: 4090, a100-80gb, h100:8, v5e:8, or cpu for the CPU of this "
        "machine. With --for: machines to rent; if the option is repeated, sky and dstack choose one of them",
    )
    parser.add_argument(
        "--for", dest="target", choices=templates, help="program that starts the run on rented machines"
    )
    parser.add_argument(
        "--output_dir", metavar="URL", help="output_dir of the run, instead of the value in the config"
    )
    parser.add_argument(
        "--install",
        metavar="WHAT",
        help="package that pip installs on the machines; default: this version of portable-trainer",
    )
    parser.add_argument("--on-demand", action="store_true", help="do not rent machines that may be preempted")
    return parser


def write_starter_config(argv: Sequence[str]) -> int:
    """Write a starter config, or a launch file if ``--for`` is set, and print the next steps.

    With ``--for``, the config must already exist, and it is not changed. With ``--device`` but
    without ``--for``, settings with which the run fits on the device are written into the starter
    config.

    Args:
        argv: Arguments after ``init``.

    Returns:
        Exit code 0.

    Raises:
        UserError: If an argument is invalid or has no effect, if the file already exists or cannot
            be written, or if the run does not fit on the device.
        SystemExit: If the arguments cannot be parsed. Also raised after ``--help``.
    """
    starters = read_starter_configs()
    templates = list_launch_templates(machines := get_config_folder().joinpath("machines"))
    names = {"classify": "classification"} | {name: name for name in starters}
    options = _build_init_parser(templates, starters, names).parse_args(argv)
    file: Path = options.file
    if file.suffix not in (".yaml", ".yml"):
        raise UserError(f"init: {file}: is not the name of a YAML file; use a name that ends in .yaml")
    for flag in ("--output_dir", "--install", "--on-demand") if options.target is None else ():
        value = getattr(options, flag[2:].replace("-", "_"))
        require(
            not value, f"{flag}: has no effect without --for; add --for and a program, for example --for sky"
        )
    if options.target is not None:
        for flag in ("task", "model", "data"):
            require(
                getattr(options, flag) is None,
                f"--{flag}: has no effect with --for, which uses the config unchanged; remove --{flag}",
            )
        require(
            bool(options.device), "--device: is missing; specify the machine, for example --device h100:8"
        )
        launch_file = write_launch_file(
            machines,
            options.target,
            file,
            devices=options.device,
            output_dir=options.output_dir,
            install=options.install,
            spot=not options.on_demand,
        )
        print_line(
            f"wrote {launch_file}; to start the run, run the command in the first lines of this file, in its "
            "folder"
        )
        return 0
    require(len(options.device) < 2, "--device: is specified more than once; specify one kind of device")
    require(not file.exists(), f"init: {file} already exists; use another name")
    for argument, value in (("FILE", str(file)), ("--model", options.model), ("--data", options.data)):
        require(
            value is None or (value.isprintable() and value != ""),
            f"{argument}: {value!r} is empty or contains a line break or a control character; use "
            "another name",
        )
    task = names[options.task or "pretrain"]
    text = _fill_starter(starters[task], file, options.model, options.data)
    size_note = ""
    if options.device:
        cheaper = {
            f"--task {other}": _fill_starter(starters[other], file, options.model, options.data)
            for other in _CHEAPER_TASKS.get(task, ())
        }
        text, size_note = _fit_to_device(text, options.device[0], cheaper, has_data=options.data is not None)
    text = f"# yaml-language-server: $schema={get_config_folder().joinpath('schema.json')}\n{text}"
    write_new_file(file, text, "use another name")
    command = f"  portable-train --config {shlex.quote(str(file))}"
    print_line(f"wrote {file}{size_note}; edit the file, then run\n{command} --dry-run\n{command}")
    if options.model is not None and not size_note:
        print_line(
            "to write settings with which the run fits on a device, add --device and a device, such as 4090, "
            "h100:8, v5e:8 or cpu"
        )
    return 0


def _fill_starter(starter: str, file: Path, model: str | None, data: str | None) -> str:
    """Fill in the names of the file, run, model and data in the text of a starter config.

    Args:
        starter: Text of the starter config.
        file: Path of the config to write. Its stem becomes the name of the run.
        model: Hub id or folder of the model. None keeps the starter's model. If the starter has
            ``model.config``, only the architecture of the model is used, with random weights.
        data: File, glob or Hub dataset. None keeps the starter's data.
    """
    folder = _format_yaml_value(f"runs/{file.stem}")
    # Pad the name of the run, so that the comments stay in one column.
    names = {"{name}#": f"{folder:<25} #", "{name}": folder, "{file}": shlex.quote(str(file))}
    text = re.sub(r"\{name\}#|\{name\}|\{file\}", lambda match: names[match[0]], starter)
    if model is not None:
        architecture = (
            "  name_or_path: null                  # only the architecture is used, with random weights\n"
        )
        text = re.sub(r"(?s)  config: \{.*?\}[^\n]*\n", architecture + "  init: scratch\n", text, count=1)
        text = set_yaml_values(text, {"model.name_or_path": model})
    return text if data is None else set_yaml_values(text, {"data.source": data})


def set_yaml_values(text: str, values: Mapping[str, Any]) -> str:
    """Set values in the text of a starter config, and keep its comments aligned.

    Args:
        text: Text of the starter config, with one line per setting.
        values: Values, keyed by dotted key. A missing key is added at the start of its section, or
            below ``output_dir`` if it has no section.

    Returns:
        The new text.
    """
    lines = text.splitlines()
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        line_start = f"{'  ' if section else ''}{name}:"
        start = next(
            i for i, other_line in enumerate(lines) if other_line.startswith(f"{section or 'output_dir'}:")
        )
        end = next((i for i in range(start, len(lines)) if section and not lines[i]), len(lines))
        number = next(
            (i for i in range(start if section else 0, end) if lines[i].startswith(line_start)), None
        )
        if number is None:
            number = start + 1
            lines.insert(number, line_start)
        before, mark, comment = lines[number].partition(" #")
        setting = f"{line_start} {_format_yaml_value(value)}"
        lines[number] = f"{setting:<{len(before)}}{mark}{comment}"
    return "\n".join(lines) + "\n"


def _format_yaml_value(value: object) -> str:
    """Format a value as a single line of YAML."""
    return format_yaml({"value": value}, width=math.inf).removeprefix("value: ").rstrip("\n")


class _SizedConfig(NamedTuple):
    """Config of a run that fits on the chosen devices, and a note about the memory.

    Attributes:
        text: Text of the YAML file.
        size_note: Devices and planned memory, appended to the message that the file was written.
            For example ``, sized for 1 x 4090: about 18.4 GiB of 24.0 GiB``.
    """

    text: str
    size_note: str


def _fit_to_device(text: str, device: str, cheaper: Mapping[str, str], *, has_data: bool) -> _SizedConfig:
    """Choose settings with which the run fits on a device, and describe the memory plan in comments.

    Args:
        text: Text of the config.
        device: Value of ``--device``, such as ``h100:8``.
        cheaper: Texts of alternative configs that need less memory. The key of each config is the
            flag that selects its task, such as ``--task lora``. If the run does not fit, the error
            message suggests the flags of the configs that fit.
        has_data: Whether the user has set ``--data``. If so, the size of the data is estimated.

    Returns:
        The text of the config with the chosen settings and the comments, and a note about the
        planned memory.

    Raises:
        UserError: If the run does not fit with any combination of settings.
    """
    from portable.commands.recipe import describe_recipe, estimate_dataset_size, find_recipe
    from portable.planner.device_lookup import parse_devices

    def parse_config(text: str) -> RunConfig:
        return load_config(parse_yaml(text, "starter").value)

    kind, count = parse_devices(device)
    config = parse_config(text)
    records = estimate_dataset_size(config) if has_data else None
    cheaper_configs = {flag: parse_config(other) for flag, other in cheaper.items()}
    recipe = find_recipe(config, kind, count, records, cheaper_configs)
    comments = [
        line
        for sentence in describe_recipe(recipe)
        for line in textwrap.wrap(
            sentence, _COMMENT_WIDTH - 2, break_on_hyphens=False, break_long_words=False
        )
    ]
    title, rest = set_yaml_values(text, recipe.settings).split("\n", 1)
    phrase = f", sized for {count} x {kind.name}: {recipe.memory_summary}"
    return _SizedConfig("\n".join([title, "#", *(f"# {line}" for line in comments), rest]), phrase)
