"""``portable-train init``: write a short commented config to begin with."""

from __future__ import annotations

import math
import shlex
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from converters.commands import Parser
from converters.console import say
from portable.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.resources.abc import Traversable

INIT = "init"
"""The first word of the command line."""


def configs() -> Traversable:
    """The folder ``configs``, which is no package: a module of that name is the user's."""
    return files("portable").joinpath("configs")


def tasks() -> dict[str, str]:
    """The starters in ``configs/starters``, by task."""
    found = sorted(configs().joinpath("starters").iterdir(), key=lambda file: file.name)
    return {Path(file.name).stem: file.read_text("utf-8") for file in found if file.name.endswith(".yaml")}


def init(argv: Sequence[str]) -> int:
    """Write the starter of a task, and say how to go on.

    Args:
        argv: the words after ``init``.

    Raises:
        UserError: if the file is there already, or cannot be written.
    """
    starters = tasks()
    parser = Parser(prog="portable-train init", description="Write a short commented config to begin with.")
    parser.add_argument("file", nargs="?", default="run.yaml", type=Path, help="default: run.yaml")
    names = {"classify": "classification"} | {name: name for name in starters}
    parser.add_argument("--task", choices=names, default="pretrain", help="default: pretrain")
    given = parser.parse_args(argv)
    file: Path = given.file
    if file.suffix not in (".yaml", ".yml"):
        raise UserError(f"init: {file}: not the name of a YAML file; end it in .yaml")
    folder = yaml.safe_dump(f"runs/{file.stem}", allow_unicode=True, width=math.inf).splitlines()[0]
    name = shlex.quote(str(file))
    # Comments stand in one column.
    text = starters[names[given.task]].replace("{name}#", f"{folder:<25} #", 1)
    text = text.replace("{file}", name).replace("{name}", folder)
    text = f"# yaml-language-server: $schema={configs().joinpath('schema.json')}\n{text}"
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(text)
    except FileExistsError as error:
        raise UserError(f"init: {file} is there already; give another name") from error
    except OSError as error:
        raise UserError(f"init: {file}: cannot write it: {error.strerror or error}") from error
    command = f"  portable-train --config {name}"
    say(f"wrote {file}; edit it, then\n{command} --dry-run\n{command}")
    return 0
