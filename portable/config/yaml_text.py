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


class ScalarRule(NamedTuple):
    """A rule that determines the type of a scalar without quotes.

    Attributes:
        tag: Tag of the type without the prefix, such as ``int``.
        pattern: Regular expression that matches the complete scalar.
        first_characters: Possible first characters of a matching scalar. PyYAML uses them to select the
            rules to try. An empty string in the list means that the rule also applies to an empty
            scalar.
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
    """PyYAML's safe loader with the scalar rules of YAML 1.2 instead of YAML 1.1."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


for _tag, _pattern, _first in CORE_SCHEMA:
    _CoreLoader.add_implicit_resolver(YAML_TAG_PREFIX + _tag, re.compile(rf"^(?:{_pattern})$"), _first)


@dataclass
class YamlDocument:
    """Content of a parsed YAML document, and the line numbers of its keys.

    Attributes:
        value: Content of the document as plain values. None if the document is empty.
        lines: Line numbers of all keys, from 1, keyed by path.
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
        if isinstance(error, FileNotFoundError):
            reason += format_path_suggestion(path)
        raise UserError(to_one_line(f"{message_prefix}{path}: cannot read the config: {reason}")) from error
    except ValueError as error:
        raise UserError(
            to_one_line(f"{message_prefix}{str(path)!r}: cannot read the config: {error}")
        ) from error
    if len(content) > MAX_CONFIG_BYTES:
        raise UserError(
            f"{message_prefix}{path}: is too large for a config (more than 1 MB); specify a config file"
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
        max_nodes: Maximum number of values. The values of an alias count each time it is used.

    Raises:
        UserError: If the document is not valid, or too large.
    """
    try:
        node = yaml.compose(text, Loader=_CoreLoader)
        converter = _NodeConverter(file_name, max_nodes)
        value = None if node is None else converter.convert_node(node, ())
    except _PARSER_FAULTS as error:
        raise UserError(_describe_parser_error(file_name, text, error)) from error
    return YamlDocument(value, converter.lines)


def parse_yaml_value(text: str) -> Any:
    """Parse the value of a flag as YAML. Returns it unchanged as a string if it is not valid YAML."""
    try:
        return parse_yaml(text, "value").value
    except UserError:
        return text


def parse_mapping_or_text(text: str, flag: str) -> Any:
    """Parse the value of a flag as YAML. A value that begins with a brace must be a valid mapping.

    Args:
        text: Value of the flag.
        flag: The flag, used in error messages.

    Raises:
        UserError: If the text begins with a brace and is not a valid mapping.
    """
    return parse_yaml(text, flag).value if text.startswith("{") else parse_yaml_value(text)


def _describe_parser_error(name: str, text: str, error: BaseException) -> str:
    """Return the error message for an exception of PyYAML.

    Args:
        name: Name of the file or flag.
        text: The document.
        error: The exception.
    """
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        fault = find_yaml_fault(error, text)
        return to_one_line(f"{name}:{fault.line_index + 1}: not valid YAML: {fault.reason}; {fault.remedy}")
    if isinstance(error, RecursionError):
        return f"{name}: is nested too deeply for a config; specify a config file"
    return to_one_line(f"{name}: not valid YAML: {to_one_line(error)}")


@dataclass
class _NodeConverter:
    """Converter from PyYAML's nodes to plain values. It also records the line numbers of keys.

    Attributes:
        name: Name of the file or flag, used in error messages.
        max_nodes: Maximum number of nodes to convert. The nodes of an alias count each time it is used.
        lines: Line numbers of all keys converted so far, from 1, keyed by path.
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
            UserError: If there are recursive aliases, too many nodes, or tags that are not supported.
        """
        self._num_nodes += 1
        # Count nodes, because nested aliases can expand a short file to more than fits in memory.
        if id(node) in self._open_node_ids or self._num_nodes > self.max_nodes:
            raise self._build_error(
                node,
                "the file contains a recursive alias, or is too large for a config; remove the alias, or "
                "specify a smaller file",
            )
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
                raise self._build_error(key_node, "a key is not a scalar; use a string as the key")
            # Keys are text as in JSON, for example the 0 in id2label: {0: no}.
            key = str(key_node.value)
            inner = (*path, key)
            line = key_node.start_mark.line + 1
            if key in result:
                first = f", first on line {self.lines[inner]}"
                raise self._build_error(
                    key_node, f"duplicate key {'.'.join(inner)}{first}; remove one of the two"
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
                f"{text[:40]!r} is not a valid {kind}; correct the value, or put it in quotes to make it a "
                "string",
            ) from None
        raise self._build_error(node, f"the tag {node.tag} is not allowed in a config; remove the tag")

    def _build_error(self, node: yaml.Node, message: str) -> UserError:
        """Build an error whose message contains the line number of the node."""
        return UserError(to_one_line(f"{self.name}:{node.start_mark.line + 1}: {message}"))
