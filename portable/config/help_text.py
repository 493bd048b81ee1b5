"""Text of ``--help``: usage, examples, options, and every setting with its default and description."""

from __future__ import annotations

import json
import re
import textwrap
from typing import TYPE_CHECKING, Any

from portable.config import keys
from portable.config.changed_settings import ADJUSTABLE
from portable.config.derived_defaults import BY_TRAINING, CONTINUED, FINETUNING, PRETRAINING
from portable.config.suggestions import suggest_key
from portable.converters.commands import format_exit_codes
from portable.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic import BaseModel

_NARROWEST, _WIDEST = 60, 110
_INDENT = " " * 6
_COLUMN = 28
EVERYTHING = "all"
"""The topic of ``--help`` that prints every setting."""
_SETTINGS = "settings, as flags and keys of the YAML file (more: --help SECTION, KEY or all):"
_NOTE = (
    "settings: each is a flag and a key of the YAML file. Dashes and underscores are the same; a boolean "
    "needs no value (--compile, --no-compile); lists are written 0.9 0.95 or [0.9,0.95]; null is null; "
    "keys inside a mapping follow another dot (--model.config.hidden_size 512); paths expand ~ and "
    "${VAR} as a shell does. Marked *: must not change between launches of a run; marked **: only with "
    "--allow-changes."
)


def render(topic: str, model: type[BaseModel], options: type[BaseModel], usage: str, columns: int) -> str:
    """Render the help on ``topic``: a section, a key, "all", or empty for a page on the command."""
    width = min(max(columns, _NARROWEST), _WIDEST)
    topic = topic.lstrip("-").replace("-", "_").rstrip(".")
    table, about = keys.get_settings(model), keys.get_sections(model)
    if topic in table:
        return _format_setting(table[topic], width)
    if (open_mapping := keys.find_open_mapping(model, topic)) is not None:
        return _format_setting(open_mapping, width)
    if topic in about:
        return _format_section(topic, about[topic], table, width)
    if topic and topic != EVERYTHING:
        hint = suggest_key(topic, [*table, *about]) or "; --help alone lists the sections"
        raise UserError(f"--help: no setting named {topic!r}{hint}")
    if not topic:
        return _format_overview(about, table, options, usage, width)
    parts = [
        usage,
        format_exit_codes(),
        "",
        "options:",
        *(
            _format_option(_format_flag(option), option.description, width)
            for option in keys.get_settings(options).values()
        ),
    ]
    parts += ["", *_wrap(_NOTE, width), ""]
    parts += [_format_section(name, about.get(name, ""), table, width) for name in ["", *about]]
    return "\n".join(parts).rstrip()


def _format_overview(
    about: Mapping[str, str],
    table: Mapping[str, keys.SettingField],
    options: type[BaseModel],
    usage: str,
    width: int,
) -> str:
    """Return the page of a command: usage, a line for each option, a line for each section of settings."""
    lines = [usage, "options:"]
    for option in keys.get_settings(options).values():
        lines.append(_format_summary(_format_flag(option), option.description, width))
    lines += ["", *_wrap(_SETTINGS, width)]
    top = [setting.name for setting in table.values() if not setting.section]
    lines.append(_format_summary("(top level)", ", ".join(top), width))
    lines += [_format_summary(name, text, width) for name, text in about.items()]
    return "\n".join(lines)


def _format_summary(label: str, text: str, width: int) -> str:
    """Return ``label`` and the first sentence of ``text``."""
    first = re.split("(?<=[^ ])[.] ", " ".join(text.split()), maxsplit=1)[0].rstrip(".")
    return _format_option(label, first, width)


def _wrap(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def _format_flag(option: keys.SettingField) -> str:
    return f"--{option.name.replace('_', '-')} {option.metavar}".rstrip()


def _format_option(label: str, text: str, width: int) -> str:
    lines = _wrap(text, width - _COLUMN)
    indented = [" " * _COLUMN + line for line in lines]
    if len(label) > _COLUMN - 4:
        return "\n".join([f"  {label}", *indented])
    return "\n".join([f"  {label:<{_COLUMN - 2}}{lines[0]}", *indented[1:]])


def _format_section(name: str, about: str, table: dict[str, keys.SettingField], width: int) -> str:
    heading = f"{name}: {about}" if name else "top level:"
    settings = [setting for setting in table.values() if setting.section == name]
    return "\n".join([*_wrap(heading, width), *(_format_setting(setting, width) for setting in settings), ""])


def _format_setting(setting: keys.SettingField, width: int) -> str:
    mark = ("**" if setting.key in ADJUSTABLE else "*") if setting.is_identity else ""
    head = f"  --{setting.key}{mark}  [{describe_default(setting)}]"
    body = f"{setting.description} ({setting.allowed_values})"
    first, *more = textwrap.wrap(
        head.strip(), width - 2, subsequent_indent=_INDENT[2:], break_on_hyphens=False
    )
    return "\n".join([f"  {first}", *(f"  {line}" for line in more), *_wrap(body, width, _INDENT)])


def describe_default(setting: keys.SettingField, quote: str = "") -> str:
    """Describe the default of a setting, or the defaults for each kind of training if they differ.

    Args:
        setting: The setting.
        quote: Quotation mark around values.
    """
    default = BY_TRAINING.get(setting.key)
    if default is None:
        return f"{quote}{format_default(setting.default)}{quote}"
    kinds: dict[str, list[str]] = {}
    for kind in (PRETRAINING, CONTINUED, FINETUNING):
        kinds.setdefault(format_default(default.get(kind)), []).append(kind)
    values = "; ".join(f"{', '.join(names)}: {quote}{text}{quote}" for text, names in kinds.items())
    return f"{values} ({default.condition})" if default.condition else values


def format_default(value: Any) -> str:
    """Format a default as in a config file."""
    value = keys.to_plain(value)
    return value if isinstance(value, str) else json.dumps(value)
