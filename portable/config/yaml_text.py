"""YAML 1.2 parser that reads config files and flag values as plain values with line numbers.

PyYAML implements YAML 1.1, in which ``3e-4`` is a string, ``no`` is false and ``2020-01-01`` is a
date. This module reads scalars according to the YAML 1.2 core schema instead
(https://yaml.org/spec/1.2.2/#103-core-schema). Duplicate keys, custom tags, and recursive or
exponentially growing aliases are errors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from portable.config.yaml_faults import find_yaml_fault
from portable.converters.storage.path_or_url import format_path_suggestion, is_in_store
from portable.errors import UserError, to_one_line

if TYPE_CHECKING:
    from portable.config.origins import KeyPath
    from portable.converters.storage.path_or_url import AnyPath

MAX_CONFIG_BYTES = 1 << 20
"""Maximum size of a config file, in bytes."""
_KIND_NAMES = {"int": "integer", "float": "number", "bool": "boolean"}
"""Names of the types of scalars in error messages, keyed by the tag of the type."""


class ScalarRule(NamedTuple):
    """Rule that determines the type of an unquoted YAML scalar.

    Attributes:
        tag: YAML tag of the type without the prefix ``tag:yaml.org,2002:``, such as ``int``.
        pattern: Regular expression that matches the complete scalar.
        first_characters: Possible first characters of a matching scalar. PyYAML uses them to select
            the rules to try. An empty string in the list means that the rule also applies to an
            empty scalar.
    """

    tag: str
    pattern: str
    first_characters: list[str]


CORE_SCHEMA = (
    ScalarRule("null", r"~|null|Null|NULL|", [*"~nN", ""]),
    ScalarRule("bool", r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    ScalarRule("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", [*"-+0123456789"]),
    ScalarRule("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", [*"-+.0123456789"]),
    ScalarRule("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", [*"-+."]),
)
"""Rules of the YAML 1.2 core schema. A scalar that does not match any rule is text."""

YAML_TAG_PREFIX = "tag:yaml.org,2002:"
"""Prefix of the tags in the core schema."""
_MAX_NODES = 100_000
"""Maximum number of values in a document. The values of an alias count each time that the alias is used."""
_MAX_DIGITS = 3500
"""Maximum number of digits of an integer, because Python refuses to print longer integers."""
_PARSER_FAULTS = (yaml.YAMLError, ValueError, ArithmeticError, LookupError, RecursionError)
"""Exceptions that PyYAML raises for invalid documents."""


class _CoreLoader(yaml.SafeLoader):
    """PyYAML's safe loader with the scalar rules of YAML 1.2 instead of YAML 1.1.

    Use it only with ``yaml.compose``, because its constructors still implement YAML 1.1.
    :class:`_NodeConverter` converts the composed nodes to values.
    """

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


for _tag, _pattern, _first in CORE_SCHEMA:
    _CoreLoader.add_implicit_resolver(YAML_TAG_PREFIX + _tag, re.compile(rf"^(?:{_pattern})$"), _first)


@dataclass
class YamlDocument:
    """Content of a parsed YAML document, and the line numbers of its keys.

    Attributes:
        value: Content of the document as plain values. All keys of mappings are strings. None if
            the document is empty.
        lines: Line number of each key, counted from 1. The mapping is keyed by the path of the key,
            such as ``("train", "steps")``. An item of a list has its index in the path, as in
            ``("data", "sources", "0", "name")``.
    """

    value: Any
    lines: dict[KeyPath, int]


def read_yaml_file(path: AnyPath) -> YamlDocument:
    """Read and parse a YAML file.

    Raises:
        UserError: If the file cannot be read or is not valid YAML.
    """
    return parse_yaml(read_config_text(path), str(path))


def read_config_text(path: AnyPath, key: str | None = None) -> str:
    """Read the text of a config file. The file size is limited to :data:`MAX_CONFIG_BYTES`.

    Args:
        path: The file, on disk or in an object store.
        key: Setting that refers to the file. Error messages begin with it. None if there is no such
            setting.

    Raises:
        UserError: If the file cannot be read, is too large, or is not UTF-8 text.
    """
    message_prefix = "" if key is None else f"{key}: "
    try:
        if is_in_store(path):
            content = path.read_bytes()
        else:
            with path.open("rb") as file:
                content = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        reason = f"{error.strerror or error}"
        remedy = "" if "; " in reason else "; check the path and its permissions"
        if isinstance(error, FileNotFoundError):
            remedy = format_path_suggestion(path) or "; check the path"
        raise UserError(
            to_one_line(f"{message_prefix}{path}: cannot read the config: {reason}{remedy}")
        ) from error
    except ValueError as error:
        raise UserError(
            to_one_line(f"{message_prefix}{str(path)!r}: cannot read the config: {error}; correct the path")
        ) from error
    if len(content) > MAX_CONFIG_BYTES:
        raise UserError(
            f"{message_prefix}{path}: is larger than 1 MB, the maximum for a config; specify a config file"
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{message_prefix}{path}: is not UTF-8 text; specify a config file, or save this file as UTF-8"
        ) from error


def parse_yaml(text: str, file_name: str, *, max_nodes: int = _MAX_NODES) -> YamlDocument:
    """Parse a YAML document.

    Args:
        text: The document.
        file_name: Name of the file or flag, used in error messages.
        max_nodes: Maximum number of values. The values of an alias count each time the alias is
            used.

    Raises:
        UserError: If the document is not valid YAML, or has more than ``max_nodes`` values. Also
            raised for duplicate keys, for custom tags, and for an alias inside the value to which
            it refers.
    """
    try:
        node = yaml.compose(text, Loader=_CoreLoader)
        converter = _NodeConverter(file_name, max_nodes)
        value = None if node is None else converter.convert_node(node, ())
    except _PARSER_FAULTS as error:
        raise UserError(_describe_parser_error(file_name, text, error)) from error
    return YamlDocument(value, converter.lines)


def parse_yaml_value(text: str) -> Any:
    """Parse the value of a flag as YAML.

    A value that is not valid YAML is returned as a string. The result is None if the text is empty.
    """
    try:
        return parse_yaml(text, "value").value
    except UserError:
        return text


def parse_mapping_or_text(text: str, flag: str) -> Any:
    """Parse the value of a flag as YAML. If it begins with a brace, it must be a valid mapping.

    Any other value that is not valid YAML is returned as a string.

    Args:
        text: Value of the flag.
        flag: The flag, used in error messages.

    Raises:
        UserError: If the text begins with a brace and is not a valid mapping.
    """
    return parse_yaml(text, flag).value if text.startswith("{") else parse_yaml_value(text)


def _describe_parser_error(name: str, text: str, error: BaseException) -> str:
    """Build the error message for an exception that PyYAML has raised.

    Args:
        name: Name of the file or flag.
        text: Text of the YAML document.
        error: The exception.
    """
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        fault = find_yaml_fault(error, text)
        return to_one_line(f"{name}:{fault.line_index + 1}: not valid YAML: {fault.reason}; {fault.remedy}")
    if isinstance(error, RecursionError):
        return f"{name}: has too many levels of nesting; use fewer levels"
    return to_one_line(f"{name}: not valid YAML: {to_one_line(error)}; correct the text")


@dataclass
class _NodeConverter:
    """Converter from PyYAML's nodes to plain values. It also records the line numbers of keys.

    Attributes:
        name: Name of the file or flag, used in error messages.
        max_nodes: Maximum number of nodes to convert. The nodes of an alias count each time the
            alias is used.
        lines: Line number of each key converted so far, keyed by the path of the key. The first
            line of the document has the number 1.
    """

    name: str
    max_nodes: int
    lines: dict[KeyPath, int] = field(default_factory=dict)
    _open_node_ids: set[int] = field(default_factory=set)
    _num_nodes: int = 0

    def convert_node(self, node: yaml.Node, path: KeyPath) -> Any:
        """Convert a node to plain values, recursively.

        Args:
            node: Node of PyYAML.
            path: Path of the node in the document.

        Raises:
            UserError: If there are recursive aliases, too many nodes, duplicate keys, keys that are
                not scalars, tags that are not supported, or scalars that are not valid for their
                tags.
        """
        self._num_nodes += 1
        # Count nodes, because nested aliases can expand a short file to more than fits in memory.
        if self._num_nodes > self.max_nodes:
            raise self._build_error(
                node,
                f"the file has more than {self.max_nodes:,} values, counting each use of an alias; specify a "
                "smaller file",
            )
        if id(node) in self._open_node_ids:
            raise self._build_error(node, "an alias refers to a value that contains it; remove the alias")
        self._open_node_ids.add(id(node))
        try:
            return self._convert_by_tag(node, path)
        finally:
            self._open_node_ids.discard(id(node))

    def _convert_by_tag(self, node: yaml.Node, path: KeyPath) -> Any:
        """Convert a mapping, a list or a scalar, depending on the type of the node.

        Raises ``UserError`` for a custom tag.
        """
        if isinstance(node, yaml.MappingNode) and node.tag == YAML_TAG_PREFIX + "map":
            return self._convert_mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and node.tag == YAML_TAG_PREFIX + "seq":
            return [self.convert_node(item, (*path, str(i))) for i, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode):
            return self._convert_scalar(node)
        raise self._build_error(node, f"the tag {node.tag} is not allowed in a config; remove the tag")

    def _convert_mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        """Convert a mapping, and record the line numbers of its keys.

        Raises ``UserError`` for a duplicate key, and for a key that is not a scalar.
        """
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise self._build_error(key_node, "a key is a list or a mapping; use a string as the key")
            # Keys are text as in JSON, for example the 0 in id2label: {0: no}.
            key = str(key_node.value)
            inner = (*path, key)
            line = key_node.start_mark.line + 1
            if key in result:
                first = f", first on line {self.lines[inner]}"
                raise self._build_error(
                    key_node, f"duplicate key {'.'.join(inner)}{first}; remove one of the two lines"
                )
            self.lines[inner] = line
            result[key] = self.convert_node(value_node, inner)
        return result

    def _convert_scalar(self, node: yaml.ScalarNode) -> Any:
        """Convert a scalar to the type of its tag.

        Raises ``UserError`` if the scalar is not valid for the type, or if the tag is not in the core
        schema.
        """
        kind, text = node.tag.removeprefix(YAML_TAG_PREFIX), str(node.value)
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
            raise self._build_error(
                node,
                f"{text[:40]!r} is not a valid {_KIND_NAMES.get(kind, kind)}; correct the value, or put it "
                "in quotes to make it a string",
            ) from None
        raise self._build_error(node, f"the tag {node.tag} is not allowed in a config; remove the tag")

    def _build_error(self, node: yaml.Node, message: str) -> UserError:
        """Build an error whose message contains the line number of the node."""
        return UserError(to_one_line(f"{self.name}:{node.start_mark.line + 1}: {message}"))
