"""Parse YAML 1.2 to plain values with line numbers, and single values from flags; write configs.

PyYAML implements YAML 1.1, where ``3e-4`` is text, ``no`` is false and ``2020-01-01`` is a date. Scalars here
follow the YAML 1.2 core schema (https://yaml.org/spec/1.2.2/#103-core-schema). Duplicate keys, tags and
recursive or exploding aliases are refused. What is written reads back as the same.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import yaml

from portable.config import keys
from portable.config.yaml_faults import explain_fault
from portable.errors import UserError, one_line

if TYPE_CHECKING:
    from portable.config.run_config import RunConfig

_CORE_SCHEMA: tuple[tuple[str, str, list[str]], ...] = (
    ("null", r"~|null|Null|NULL|", [*"~nN", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", [*"-+0123456789"]),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", [*"-+.0123456789"]),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", [*"-+."]),
)
"""Tag, pattern and possible first characters."""

_TAG = "tag:yaml.org,2002:"
_MAX_NODES = 100_000
_MAX_DIGITS = 3500  # of more, also hexadecimal ones, Python prints none
_PARSER_FAULTS = (yaml.YAMLError, ValueError, ArithmeticError, LookupError, RecursionError)

Path = tuple[str, ...]


class _CoreLoader(yaml.SafeLoader):
    """PyYAML's parser with the scalar rules of YAML 1.2."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or 1.2 would read as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, _pattern, _first in _CORE_SCHEMA:
    for _kind in (_CoreLoader, _Dumper):
        _kind.add_implicit_resolver(_TAG + _tag, re.compile(rf"^(?:{_pattern})$"), _first)


@dataclass
class Document:
    """A parsed document: plain values, and the line of every key, from 1."""

    value: Any
    lines: dict[Path, int]


def parse(text: str, name: str, *, most: int = _MAX_NODES) -> Document:
    """Parse a document of at most ``most`` values. ``name`` is the file for ``UserError`` messages."""
    try:
        node = yaml.compose(text, Loader=_CoreLoader)
        reader = _Reader(name, most)
        value = None if node is None else reader.read(node, ())
    except _PARSER_FAULTS as error:
        raise UserError(_describe_error(name, text, error)) from error
    return Document(value, reader.lines)


def parse_value(text: str) -> Any:
    """Parse the value of a flag as YAML. Invalid YAML is text."""
    try:
        return parse(text, "value").value
    except UserError:
        return text


def parse_mapping(text: str, flag: str) -> Any:
    """The same of a flag that takes a mapping.

    Raises:
        UserError: if the text begins as a mapping does, and is not valid.
    """
    return parse(text, flag).value if text.startswith("{") else parse_value(text)


def _describe_error(name: str, text: str, error: BaseException) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        fault = explain_fault(error, text)
        return one_line(f"{name}:{fault.line + 1}: not valid YAML: {fault.reason}; {fault.remedy}")
    if isinstance(error, RecursionError):
        return f"{name}: not a config file: nested too deeply"
    return one_line(f"{name}: not valid YAML: {one_line(error)}")


@dataclass
class _Reader:
    """Converts nodes to values and records line numbers."""

    name: str
    most: int
    lines: dict[Path, int] = field(default_factory=dict)
    _open: set[int] = field(default_factory=set)
    _nodes: int = 0

    def read(self, node: yaml.Node, path: Path) -> Any:
        self._nodes += 1
        # Nested aliases can expand a short file to more than fits in memory.
        if id(node) in self._open or self._nodes > self.most:
            raise self._refuse(node, "a recursive alias, or a file too large for a config")
        self._open.add(id(node))
        try:
            return self._dispatch(node, path)
        finally:
            self._open.discard(id(node))

    def _dispatch(self, node: yaml.Node, path: Path) -> Any:
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            return [self.read(item, (*path, str(i))) for i, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        raise self._refuse(node, f"the tag {node.tag} is not allowed in a config")

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise self._refuse(key_node, "a key must be a word")
            # As in JSON, keys are text, including the 0 of id2label: {0: no}.
            key = str(key_node.value)
            inner = (*path, key)
            line = key_node.start_mark.line + 1
            if key in result:
                first = f", first on line {self.lines[inner]}"
                raise self._refuse(key_node, f"duplicate key {'.'.join(inner)}{first}")
            self.lines[inner] = line
            result[key] = self.read(value_node, inner)
        return result

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        kind, text = node.tag.removeprefix(_TAG), str(node.value)
        try:
            if kind == "str":
                return text
            if kind == "null":
                return None
            if kind == "bool" and text.lower() in ("true", "false"):
                return text.lower() == "true"
            if kind == "int":
                if len(text) > _MAX_DIGITS:
                    raise ValueError
                return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
            if kind == "float":
                return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        except ValueError:
            raise self._refuse(node, f"cannot read {text[:40]!r} as {kind}") from None
        raise self._refuse(node, f"the tag {node.tag} is not allowed in a config")

    def _refuse(self, node: yaml.Node, message: str) -> UserError:
        return UserError(one_line(f"{self.name}:{node.start_mark.line + 1}: {message}"))


_WIDTH = 80


def _list(dumper: yaml.SafeDumper, items: list[Any]) -> yaml.Node:
    flat = not any(isinstance(item, dict | list) for item in items)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=flat)


_Dumper.add_representer(list, _list)


def dump_yaml(config: RunConfig) -> str:
    """Write every setting of ``config`` in schema order, with a comment per section.

    Sections whose defaults are all null contain only the settings that are not null.
    """
    tree, about = _tree(config), keys.sections(type(config))
    parts = []
    for name, value in tree.items():
        if name in about:
            comment = textwrap.wrap(about[name], _WIDTH - 2, break_on_hyphens=False)
            parts.append("".join(["\n", *(f"# {line}\n" for line in comment)]))
        parts.append(as_yaml({name: value}))
    return "".join(parts).lstrip("\n")


def _tree(config: RunConfig) -> dict[str, Any]:
    """The values nested as in the file: the top level, then every section."""
    table, sections = keys.settings(type(config)), keys.sections(type(config))
    tree: dict[str, Any] = {key: config.get(key) for key, setting in table.items() if not setting.section}
    for section in sections:
        inside = [setting for setting in table.values() if setting.section == section]
        optional = all(setting.default is None for setting in inside)
        values = {setting.name: config.get(setting.key) for setting in inside}
        tree[section] = {name: v for name, v in values.items() if not (optional and v is None)}
    plain: dict[str, Any] = keys.plain(tree)
    return plain


def as_yaml(value: dict[str, Any], width: float = _WIDTH) -> str:
    """``value``, of plain values, as YAML that this program reads back as the same."""
    return yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=width
    )
