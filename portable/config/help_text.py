"""Format the text of ``--help``: usage, options, and settings with their descriptions."""

from __future__ import annotations

import json
import re
import textwrap
from typing import TYPE_CHECKING, Any

from portable.config import keys
from portable.config.changed_settings import ADJUSTABLE_SETTINGS
from portable.config.derived_defaults import (
    CONTINUED_PRETRAINING,
    DEFAULTS_BY_TRAINING_KIND,
    FINETUNING,
    PRETRAINING,
)
from portable.config.suggestions import format_key_hint
from portable.converters.commands import format_exit_codes
from portable.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic import BaseModel

_MIN_WIDTH, _MAX_WIDTH = 60, 110
_INDENT = " " * 6
_DESCRIPTION_COLUMN = 28
"""Column in which the descriptions of options begin, counted from 0."""
ALL_SETTINGS_TOPIC = "all"
"""Topic of ``--help`` that prints every setting."""
_SETTINGS_HEADING = "settings, as flags and keys of the YAML file (more: --help SECTION, KEY or all):"
_SETTINGS_NOTE = (
    "settings: each is a flag and a key of the YAML file. Dashes and underscores are the same; a boolean "
    "needs no value (--compile, --no-compile); lists are written 0.9 0.95 or [0.9,0.95]; null is null; "
    "keys inside a mapping follow another dot (--model.config.hidden_size 512); paths expand ~ and "
    "${VAR} as a shell does. Marked *: must not change between launches of a run; marked **: only with "
    "--allow-changes."
)


def render_help(
    topic: str, schema: type[BaseModel], options_schema: type[BaseModel], usage: str, terminal_columns: int
) -> str:
    """Build the text that ``--help TOPIC`` prints.

    Args:
        topic: Section, key or ``all``. An empty string selects an overview of the command.
        schema: The schema of the config.
        options_schema: Schema of the options of the command.
        usage: Usage and examples of the command.
        terminal_columns: Width of the terminal, in characters.

    Raises:
        UserError: If the topic is unknown.
    """
    width = min(max(terminal_columns, _MIN_WIDTH), _MAX_WIDTH)
    topic = topic.lstrip("-").replace("-", "_").rstrip(".")
    settings, section_descriptions = keys.get_setting_fields(schema), keys.get_section_descriptions(schema)
    if topic in settings:
        return _format_setting(settings[topic], width)
    if (open_mapping := keys.find_open_mapping(schema, topic)) is not None:
        return _format_setting(open_mapping, width)
    if topic in section_descriptions:
        return _format_section(topic, section_descriptions[topic], settings, width)
    if topic and topic != ALL_SETTINGS_TOPIC:
        hint = (
            format_key_hint(topic, [*settings, *section_descriptions])
            or "; run --help without a name to list the sections"
        )
        raise UserError(f"--help: there is no setting {topic!r}{hint}")
    if not topic:
        return _format_command_overview(section_descriptions, settings, options_schema, usage, width)
    parts = [
        usage,
        format_exit_codes(),
        "",
        "options:",
        *(
            _format_option(_format_flag(option), option.description, width)
            for option in keys.get_setting_fields(options_schema).values()
        ),
    ]
    parts += ["", *_wrap_text(_SETTINGS_NOTE, width), ""]
    parts += [
        _format_section(name, section_descriptions.get(name, ""), settings, width)
        for name in ["", *section_descriptions]
    ]
    return "\n".join(parts).rstrip()


def _format_command_overview(
    section_descriptions: Mapping[str, str],
    settings: Mapping[str, keys.SettingField],
    options_schema: type[BaseModel],
    usage: str,
    width: int,
) -> str:
    """Format the overview of a command: usage, one line per option, and one line per section.

    Args:
        section_descriptions: Descriptions of the sections, keyed by name.
        settings: All settings, keyed by dotted key.
        options_schema: Schema of the command's options.
        usage: Usage and examples of the command.
        width: Line width, in characters.
    """
    lines = [usage, "options:"]
    for option in keys.get_setting_fields(options_schema).values():
        lines.append(_format_first_sentence(_format_flag(option), option.description, width))
    lines += ["", *_wrap_text(_SETTINGS_HEADING, width)]
    top_level_names = [setting.name for setting in settings.values() if not setting.section]
    lines.append(_format_first_sentence("(top level)", ", ".join(top_level_names), width))
    lines += [_format_first_sentence(name, text, width) for name, text in section_descriptions.items()]
    return "\n".join(lines)


def _format_first_sentence(label: str, text: str, width: int) -> str:
    """Format a label and the first sentence of its description, without the period, in two columns."""
    first = re.split("(?<=[^ ])[.] ", " ".join(text.split()), maxsplit=1)[0].rstrip(".")
    return _format_option(label, first, width)


def _wrap_text(text: str, width: int, indent: str = "") -> list[str]:
    """Wrap text into lines of at most ``width`` characters, each beginning with ``indent``."""
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def _format_flag(option: keys.SettingField) -> str:
    """Format the flag of an option with a placeholder for its value, such as ``--nproc N``."""
    return f"--{option.name.replace('_', '-')} {option.value_placeholder}".rstrip()


def _format_option(label: str, text: str, width: int) -> str:
    """Format a label and its description in two columns.

    If the label is too long for its column, the description starts on the next line.
    """
    lines = _wrap_text(text, width - _DESCRIPTION_COLUMN)
    indented = [" " * _DESCRIPTION_COLUMN + line for line in lines]
    if len(label) > _DESCRIPTION_COLUMN - 4:
        return "\n".join([f"  {label}", *indented])
    return "\n".join([f"  {label:<{_DESCRIPTION_COLUMN - 2}}{lines[0]}", *indented[1:]])


def _format_section(
    name: str, description: str, settings_by_key: dict[str, keys.SettingField], width: int
) -> str:
    """Format the heading and the settings of a section. An empty ``name`` selects the top-level settings."""
    heading = f"{name}: {description}" if name else "top level:"
    settings = [setting for setting in settings_by_key.values() if setting.section == name]
    return "\n".join(
        [*_wrap_text(heading, width), *(_format_setting(setting, width) for setting in settings), ""]
    )


def _format_setting(setting: keys.SettingField, width: int) -> str:
    """Format the flag, the default, the description and the allowed values of a setting."""
    mark = ("**" if setting.key in ADJUSTABLE_SETTINGS else "*") if setting.is_identity else ""
    head = f"  --{setting.key}{mark}  [{describe_default(setting)}]"
    body = f"{setting.description} ({setting.allowed_values})"
    first, *more_lines = textwrap.wrap(
        head.strip(), width - 2, subsequent_indent=_INDENT[2:], break_on_hyphens=False
    )
    return "\n".join([f"  {first}", *(f"  {line}" for line in more_lines), *_wrap_text(body, width, _INDENT)])


def describe_default(setting: keys.SettingField, quote: str = "") -> str:
    """Describe the default of a setting. If it depends on the kind of training, describe all defaults.

    Args:
        setting: The setting.
        quote: Quotation mark to put around values, such as a backquote for Markdown.
    """
    default = DEFAULTS_BY_TRAINING_KIND.get(setting.key)
    if default is None:
        return f"{quote}{format_default(setting.default)}{quote}"
    kinds: dict[str, list[str]] = {}
    for kind in (PRETRAINING, CONTINUED_PRETRAINING, FINETUNING):
        kinds.setdefault(format_default(default.get_default(kind)), []).append(kind)
    values = "; ".join(f"{', '.join(names)}: {quote}{text}{quote}" for text, names in kinds.items())
    return f"{values} ({default.condition})" if default.condition else values


def format_default(value: Any) -> str:
    """Format a default as in a config file: strings without quotes, and other values as JSON."""
    value = keys.to_plain_value(value)
    return value if isinstance(value, str) else json.dumps(value)
