"""``portable-train init``: write a short commented config to begin with, or what starts it elsewhere."""

from __future__ import annotations

import math
import shlex
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from converters.commands import Parser
from converters.console import say
from portable.commands.machines import launch_file, targets, write_new
from portable.errors import UserError, require

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from importlib.resources.abc import Traversable


def configs() -> Traversable:
    """The folder ``configs``, which is no package: a module of that name is the user's."""
    return files("portable").joinpath("configs")


def schema(argv: Sequence[str]) -> int:
    """Print the JSON Schema of a config."""
    say(configs().joinpath("schema.json").read_text("utf-8").rstrip())
    return 0


def tasks() -> dict[str, str]:
    """The starters in ``configs/starters``, by task."""
    found = sorted(configs().joinpath("starters").iterdir(), key=lambda file: file.name)
    return {Path(file.name).stem: file.read_text("utf-8") for file in found if file.name.endswith(".yaml")}


def _parser(templates: Collection[str], tasks: Collection[str]) -> Parser:
    parser = Parser(
        prog="portable-train init",
        description="Write a short commented config to begin with. With --for: write the file that starts "
        "the run of a config on rented machines, beside it.",
    )
    parser.add_argument("file", nargs="?", default="run.yaml", type=Path, help="default: run.yaml")
    parser.add_argument("--for", dest="target", choices=templates, help="for which program")
    parser.add_argument(
        "--device",
        action="append",
        default=[],
        metavar="NAME:COUNT",
        help="devices by portable-plan's names, h100:8 or v5e:16; sky and dstack take the one that is there "
        "if given again",
    )
    parser.add_argument("--output_dir", metavar="URL", help="of the run, in place of the config's")
    parser.add_argument("--install", metavar="WHAT", help="what pip installs there; default: this version")
    parser.add_argument("--on-demand", action="store_true", help="no machines that may be preempted")
    parser.add_argument("--task", choices=tasks, help="default: pretrain")
    return parser


def init(argv: Sequence[str]) -> int:
    """Write the starter of a task, and say how to go on.

    Args:
        argv: the words after ``init``.

    Raises:
        UserError: if the file is there already, or cannot be written.
    """
    starters = tasks()
    templates = targets(machines := configs().joinpath("machines"))
    names = {"classify": "classification"} | {name: name for name in starters}
    given = _parser(templates, names).parse_args(argv)
    file: Path = given.file
    if file.suffix not in (".yaml", ".yml"):
        raise UserError(f"init: {file}: not the name of a YAML file; end it in .yaml")
    folder = yaml.safe_dump(f"runs/{file.stem}", allow_unicode=True, width=math.inf).splitlines()[0]
    for flag in ("--device", "--output_dir", "--install", "--on-demand") if given.target is None else ():
        asked = getattr(given, flag[2:].replace("-", "_"))
        require(not asked, f"{flag}: has an effect only with --for; name the program, --for sky")
    if given.target is not None:
        require(
            given.task is None, "--task: has no effect with --for, which takes the config as it is; remove it"
        )
        require(bool(given.device), "--device: missing; name the machine, such as --device h100:8")
        wrote = launch_file(
            machines,
            given.target,
            file,
            devices=given.device,
            output_dir=given.output_dir,
            install=given.install,
            spot=not given.on_demand,
        )
        say(f"wrote {wrote}; its first lines say how to start it, from its folder")
        return 0
    name = shlex.quote(str(file))
    # Comments stand in one column.
    text = starters[names[given.task or "pretrain"]].replace("{name}#", f"{folder:<25} #", 1)
    text = text.replace("{file}", name).replace("{name}", folder)
    text = f"# yaml-language-server: $schema={configs().joinpath('schema.json')}\n{text}"
    write_new(file, text, "give another name")
    command = f"  portable-train --config {name}"
    say(f"wrote {file}; edit it, then\n{command} --dry-run\n{command}")
    return 0
