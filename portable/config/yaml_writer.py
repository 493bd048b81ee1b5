"""Write configs as YAML that reads back as the same values."""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING, Any

import yaml

from portable.config import keys
from portable.config.yaml_text import CORE_SCHEMA, TAG

if TYPE_CHECKING:
    from portable.config.run_config import RunConfig

_WIDTH = 80


class _Dumper(yaml.SafeDumper):
    """PyYAML's writer, which quotes text that YAML 1.1 or 1.2 would read as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write equal values out, instead of as aliases."""
        return True


for _tag, _pattern, _first in CORE_SCHEMA:
    _Dumper.add_implicit_resolver(TAG + _tag, re.compile(rf"^(?:{_pattern})$"), _first)


def _represent_list(dumper: yaml.SafeDumper, items: list[Any]) -> yaml.Node:
    flat = not any(isinstance(item, dict | list) for item in items)
    return dumper.represent_sequence(TAG + "seq", items, flow_style=flat)


_Dumper.add_representer(list, _represent_list)


def dump_yaml(config: RunConfig) -> str:
    """Write every setting of ``config`` in schema order, with a comment per section.

    Sections whose defaults are all null contain only the settings that are not null.
    """
    tree, about = _nest(config), keys.get_sections(type(config))
    parts = []
    for name, value in tree.items():
        if name in about:
            comment = textwrap.wrap(about[name], _WIDTH - 2, break_on_hyphens=False)
            parts.append("".join(["\n", *(f"# {line}\n" for line in comment)]))
        parts.append(as_yaml({name: value}))
    return "".join(parts).lstrip("\n")


def _nest(config: RunConfig) -> dict[str, Any]:
    """Return the values nested as in the file: the top level, then every section."""
    table, sections = keys.get_settings(type(config)), keys.get_sections(type(config))
    tree: dict[str, Any] = {key: config.get(key) for key, setting in table.items() if not setting.section}
    for section in sections:
        inside = [setting for setting in table.values() if setting.section == section]
        optional = all(setting.default is None for setting in inside)
        values = {setting.name: config.get(setting.key) for setting in inside}
        tree[section] = {name: v for name, v in values.items() if not (optional and v is None)}
    plain: dict[str, Any] = keys.to_plain(tree)
    return plain


def as_yaml(value: dict[str, Any], width: float = _WIDTH) -> str:
    """Write plain values as YAML that reads back as the same values.

    Args:
        value: A mapping of plain values.
        width: Characters of a line at which it is folded.
    """
    return yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=width
    )
