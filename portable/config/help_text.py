"""Format the text of ``--help``: usage, options, and settings with their descriptions."""

from __future__ import annotations

import json
import re
import textwrap
from typing import TYPE_CHECKING, Any

from portable.config import keys
from portable.config.changed_settings import ADJUSTABLE_SETTINGS
from portable.config.derived_defaults import DEFAULT_DESCRIPTIONS, DEFAULTS_BY_TRAINING_KIND
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
EXPLAINED_VALUES = re.compile(r"(?:^|(?<=\. ))([a-z0-9\[][^\s,:]*(?:, [a-z0-9\[][^\s,:]*)*)(?=: )")
"""Matches one or more values that begin a sentence and are followed by a colon and their explanation."""
ALL_SETTINGS_TOPIC = "all"
"""Topic of ``--help`` that prints every setting."""
_SETTINGS_HEADING = (
    "settings, which are flags and keys of the YAML file (for details: --help with a section, a key or all):"
)
_SETTINGS_NOTE = (
    "settings: each setting is a flag and a key of the YAML file. In flags, dashes and underscores are "
    "equivalent, and a boolean needs no value (--compile, --no-compile). Write a list as 0.9 0.95 or as "
    "[0.9,0.95], and a key inside a mapping after another dot (--model.config.hidden_size 512). In paths, ~ "
    "and ${VAR} are expanded as in a shell. A setting marked * must not change between launches of a run. A "
    "setting marked ** may only change with --allow-changes."
)


def render_help(
    topic: str, schema: type[BaseModel], options_schema: type[BaseModel], usage: str, terminal_columns: int
) -> str:
    """Build the text that ``--help TOPIC`` prints.

    Args:
        topic: Section, key or ``all``. Leading dashes are ignored, and all other dashes are
            equivalent to underscores. A key inside a mapping, such as ``model.config.hidden_size``,
            selects the mapping. An empty string selects an overview of the command.
        schema: The schema of the config.
        options_schema: Schema of the options of the command.
        usage: Usage and examples of the command.
        terminal_columns: Width of the terminal, in characters. Descriptions are wrapped at this
            width, limited to the range from 60 to 110.

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
        raise UserError(f"--help: unknown setting {topic!r}{hint}")
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
    """Format the overview of a command: usage, options and sections.

    Each description is reduced to its first sentence. Top-level settings are listed without
    descriptions.

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
    """Format the heading and the settings of a section, or of the top level.

    ``settings_by_key`` contains the settings of all sections. ``name`` is empty for the settings at
    the top level, which belong to no section. ``description`` is then ignored.
    """
    heading = f"{name}: {description}" if name else "top level:"
    settings = [setting for setting in settings_by_key.values() if setting.section == name]
    return "\n".join(
        [*_wrap_text(heading, width), *(_format_setting(setting, width) for setting in settings), ""]
    )


def _format_setting(setting: keys.SettingField, width: int) -> str:
    """Format the flag, the default, the description and the allowed values of a setting.

    The flag is followed by ``*`` if the setting must not change between launches of a run, or by
    ``**`` if ``--allow-changes`` permits the change.
    """
    mark = ("**" if setting.key in ADJUSTABLE_SETTINGS else "*") if setting.is_identity else ""
    default = describe_default(setting).replace("`", "")
    head = f"  --{setting.key}{mark}  [{default}]"
    body = [*split_at_explained_values(setting.description), f"Values: {setting.allowed_values}"]
    first, *more_lines = textwrap.wrap(
        head.strip(), width - 2, subsequent_indent=_INDENT[2:], break_on_hyphens=False
    )
    wrapped = [line for text in body for line in _wrap_text(text, width, _INDENT)]
    return "\n".join([f"  {first}", *(f"  {line}" for line in more_lines), *wrapped])


def split_at_explained_values(description: str) -> list[str]:
    """Split the description of a setting into lines, so that each explained value begins a new line.

    An explained value begins a sentence and is followed by a colon and its explanation. For
    example, ``cosine: decay along a cosine. linear: decay linearly.`` becomes two lines. Values
    with a common explanation, as in ``min, max: ...``, share a line. Text before the first value is
    a separate line.
    """
    lines = EXPLAINED_VALUES.sub(r"\n\g<0>", description).split("\n")
    return [line.strip() for line in lines if line.strip()]


def describe_default(setting: keys.SettingField) -> str:
    """Describe the default of a setting. If it depends on other settings, describe all cases.

    Values in the description are enclosed in backticks.
    """
    description = DEFAULT_DESCRIPTIONS.get(setting.key, "`{schema}`")
    values = {"schema": format_default(setting.default)}
    if (default := DEFAULTS_BY_TRAINING_KIND.get(setting.key)) is not None:
        values["pretraining"] = format_default(default.pretraining)
        values["finetuning"] = format_default(default.finetuning)
    return description.format_map(values)


def format_default(value: Any) -> str:
    """Format a default as in a config file: strings without quotes, and other values as JSON."""
    value = keys.to_plain_value(value)
    return value if isinstance(value, str) else json.dumps(value)
