"""Write configs and other values as YAML."""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING, Any

import yaml

from portable.config import keys
from portable.config.yaml_text import CORE_SCHEMA, YAML_TAG_PREFIX

if TYPE_CHECKING:
    from portable.config.run_config import RunConfig

_LINE_WIDTH = 80
"""Maximum line width before folding, in characters."""
_ESCAPED_LINE_BREAKS = "\x85\u2028\u2029"
"""Next line, line separator and paragraph separator, which are line breaks in YAML 1.1."""


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper, which also quotes strings that YAML 1.2 would read as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        """Return True, so that an object that occurs several times is written in full each time."""
        return True


for _tag, _pattern, _first in CORE_SCHEMA:
    _Dumper.add_implicit_resolver(YAML_TAG_PREFIX + _tag, re.compile(rf"^(?:{_pattern})$"), _first)


def _represent_list(dumper: yaml.SafeDumper, items: list[Any]) -> yaml.Node:
    """Represent a list in brackets, unless it contains lists or mappings.

    A list in brackets is on one line if it fits into the line width.
    """
    flat = not any(isinstance(item, dict | list) for item in items)
    return dumper.represent_sequence(YAML_TAG_PREFIX + "seq", items, flow_style=flat)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    """Represent a string, in double quotes if it contains a line break of YAML 1.1 other than a newline.

    PyYAML escapes these characters only in double quotes. In other styles, a reader would convert them
    to newlines or spaces.
    """
    style = '"' if any(character in text for character in _ESCAPED_LINE_BREAKS) else None
    return dumper.represent_scalar(YAML_TAG_PREFIX + "str", text, style=style)


_Dumper.add_representer(list, _represent_list)
_Dumper.add_representer(str, _represent_text)


def dump_yaml(config: RunConfig) -> str:
    """Format all settings of a config as YAML, with a comment for each section.

    The settings are in the order of the schema. Null settings are written as well, except in
    sections whose settings all default to null.
    """
    tree, section_descriptions = _nest_settings(config), keys.get_section_descriptions(type(config))
    parts = []
    for name, value in tree.items():
        if name in section_descriptions:
            comment = textwrap.wrap(section_descriptions[name], _LINE_WIDTH - 2, break_on_hyphens=False)
            parts.append("".join(["\n", *(f"# {line}\n" for line in comment)]))
        parts.append(format_yaml({name: value}))
    return "".join(parts).lstrip("\n")


def _nest_settings(config: RunConfig) -> dict[str, Any]:
    """Convert a config to the nested mappings of plain values that :func:`dump_yaml` writes.

    Top-level settings come first, then the sections. If all settings of a section default to null,
    its null settings are omitted.
    """
    settings, sections = keys.get_setting_fields(type(config)), keys.get_section_descriptions(type(config))
    tree: dict[str, Any] = {key: config.get(key) for key, setting in settings.items() if not setting.section}
    for section in sections:
        section_settings = [setting for setting in settings.values() if setting.section == section]
        has_only_null_defaults = all(setting.default is None for setting in section_settings)
        values = {setting.name: config.get(setting.key) for setting in section_settings}
        tree[section] = {name: v for name, v in values.items() if not (has_only_null_defaults and v is None)}
    plain: dict[str, Any] = keys.to_plain_value(tree)
    return plain


def format_yaml(value: dict[str, Any], width: float = _LINE_WIDTH) -> str:
    """Format plain values as YAML that reads back as the same values.

    Args:
        value: A mapping of plain values.
        width: Maximum line width before folding, in characters.
    """
    return yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=width
    )
