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


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper, which also quotes strings that YAML 1.2 would read as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        """Return True: an object that occurs several times is written each time, without an alias."""
        return True


for _tag, _pattern, _first in CORE_SCHEMA:
    _Dumper.add_implicit_resolver(YAML_TAG_PREFIX + _tag, re.compile(rf"^(?:{_pattern})$"), _first)


def _represent_list(dumper: yaml.SafeDumper, items: list[Any]) -> yaml.Node:
    """Represent a list on one line in brackets, unless it contains lists or mappings."""
    flat = not any(isinstance(item, dict | list) for item in items)
    return dumper.represent_sequence(YAML_TAG_PREFIX + "seq", items, flow_style=flat)


_Dumper.add_representer(list, _represent_list)


def dump_yaml(config: RunConfig) -> str:
    """Format all settings of a config as YAML in the order of the schema, with a comment for each section.

    If the defaults in a section are all null, its null settings are omitted.
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
    """Convert a config to nested mappings of plain values, in the order of the YAML file."""
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
