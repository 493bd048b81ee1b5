"""What ``--help`` prints: usage, examples, options, and every setting with its default and purpose."""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING, Any

from portable.config import keys
from portable.config.suggest import did_you_mean
from portable.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pydantic import BaseModel

    from portable.config.flags import Option

_NARROWEST, _WIDEST = 60, 110
_INDENT = " " * 6


def render(topic: str, model: type[BaseModel], options: Sequence[Option], usage: str, columns: int) -> str:
    """Render the help on ``topic``, a section or key; if it is empty, on everything, after ``usage``."""
    width = min(max(columns, _NARROWEST), _WIDEST)
    topic = topic.lstrip("-").replace("-", "_").rstrip(".")
    table, about = keys.settings(model), keys.sections(model)
    if topic in table:
        return _setting(table[topic], width)
    if topic in about:
        return _section(topic, about[topic], table, width)
    if topic:
        raise UserError(f"--help: no setting named {topic!r}" + did_you_mean(topic, [*table, *about]))
    parts = [usage, "options:", *(_option(option, width) for option in options)]
    parts += [_option_text("--help [SECTION or KEY]", "Print this, or the part on one topic.", width)]
    note = (
        "settings: each is a flag and a key of the YAML file. Dashes and underscores are the same; a boolean "
        "needs no value (--compile, --no-compile); lists are written 0.9 0.95 or [0.9,0.95]; null is null; "
        "keys inside a mapping follow another dot (--model.config.hidden_size 512); paths expand ~ and "
        "${VAR} as a shell does. Marked *: must not change between launches of a run."
    )
    parts += ["", *textwrap.wrap(note, width), ""]
    parts += [_section(name, about.get(name, ""), table, width) for name in ["", *about]]
    return "\n".join(parts).rstrip()


def _option(option: Option, width: int) -> str:
    return _option_text(f"--{option.name} {option.metavar}".rstrip(), option.help, width)


def _option_text(left: str, text: str, width: int) -> str:
    lines = textwrap.wrap(text, width - 28)
    if len(left) > 24:
        return "\n".join([f"  {left}", *(" " * 28 + line for line in lines)])
    return "\n".join([f"  {left:<26}{lines[0]}", *(" " * 28 + line for line in lines[1:])])


def _section(name: str, about: str, table: dict[str, keys.Setting], width: int) -> str:
    heading = f"{name}: {' '.join(about.split())}" if name else "top level:"
    settings = [setting for setting in table.values() if setting.section == name]
    return "\n".join(
        [*textwrap.wrap(heading, width), *(_setting(setting, width) for setting in settings), ""]
    )


def _setting(setting: keys.Setting, width: int) -> str:
    head = f"  --{setting.key}{'*' if setting.identity else ''}  [{default_text(setting.default)}]"
    body = f"{setting.description} ({setting.allowed})"
    lines = textwrap.wrap(body, width, initial_indent=_INDENT, subsequent_indent=_INDENT)
    heads = textwrap.wrap(head, width, initial_indent="", subsequent_indent=_INDENT)
    return "\n".join([*("  " * (i == 0) + line for i, line in enumerate(heads)), *lines])


def default_text(value: Any) -> str:
    """Format a default as in a config file."""
    value = keys.plain(value)
    return value if isinstance(value, str) else json.dumps(value)
