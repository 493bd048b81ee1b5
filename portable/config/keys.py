"""Table of all settings, keyed by dotted key and derived from the schema classes.

Flags, help, error messages, the reference page and the comparison of runs use this table instead of
iterating over the fields of the schema.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel

from portable.config.field_types import PathMarker
from portable.errors import to_one_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic.fields import FieldInfo

_PLAIN_WORDS = {str: "a string", int: "an integer", float: "a number"}
_PLURAL_WORDS = {
    "a string": "strings",
    "an integer": "integers",
    "a number": "numbers",
    "a mapping": "mappings",
}
_NUMBER_WORDS = {2: "two", 3: "three"}
_MIN_EXPONENT_BOUND = 1e15
"""Whole numbers of at least this size are written with an exponent, such as ``1e+18``."""


class TypePart(NamedTuple):
    """A type in an annotation, such as a member of a union, separated from its metadata.

    Attributes:
        kind: The type without ``Annotated``, such as ``int`` or ``tuple[str, ...]``.
        constraints: Metadata from ``Annotated``, such as bounds and markers.
    """

    kind: Any
    constraints: tuple[Any, ...]


@dataclass(frozen=True)
class SettingField:
    """A setting, which is a field of the schema.

    Attributes:
        key: Dotted key, such as ``checkpoint.async``.
        attribute: Name of the attribute in the section's class, such as ``async_``.
        field: pydantic's metadata of the field: type, constraints, default and description.
    """

    key: str
    attribute: str
    field: FieldInfo

    @property
    def section(self) -> str:
        """Name of the section that contains the setting. Empty for a setting at the top level."""
        return self.key.rpartition(".")[0]

    @property
    def name(self) -> str:
        """Name of the setting within its section, such as ``steps``."""
        return self.key.rpartition(".")[2]

    @property
    def description(self) -> str:
        """One-line description of the setting as plain text, from the docstring below the field."""
        return self.markdown_description.replace("`", "")

    @property
    def markdown_description(self) -> str:
        """One-line description of the setting in Markdown. Some names and values are in backticks."""
        return to_one_line(self.field.description or "").replace("``", "`")

    @property
    def default(self) -> Any:
        """Default value in the schema.

        Some defaults depend on other settings. A config then replaces the value in the schema.
        """
        return self.field.get_default(call_default_factory=True, validated_data={})

    @property
    def is_identity(self) -> bool:
        """Whether the setting defines the run and must not change between launches.

        :data:`portable.config.changed_settings.ADJUSTABLE_SETTINGS` lists the exceptions, which may
        change if ``checkpoint.allow_changes`` is set.
        """
        extra = self.field.json_schema_extra
        return isinstance(extra, dict) and bool(extra.get("identity"))

    @property
    def allowed_values(self) -> str:
        """Description of the allowed values, such as ``an integer >= 1 or null``.

        Values that a validator accepts in addition to the type are not included, such as the import
        path of custom code.
        """
        return _describe_type(self.field.annotation, tuple(self.field.metadata))

    @property
    def is_text(self) -> bool:
        """Whether flag values, or the items of a list, are text that is not parsed as YAML.

        If True, the flag value ``123`` remains a string. False if the type also allows a boolean or
        a number. For a list, the type of its items is checked. The result can also be True for a
        type that allows null, a list or a mapping. The flag parser recognizes these values by the
        word ``null`` or by the opening bracket or brace.
        """
        kinds = [kind for kind, _ in _iter_union_members(self.field.annotation)]
        items = [kind for kind in kinds if get_origin(kind) is tuple]
        kinds += [
            kind for item in items for inner in get_args(item) for kind, _ in _iter_union_members(inner)
        ]
        return not any(
            kind in (bool, int, float)
            or (get_origin(kind) is Literal and any(word is True for word in get_args(kind)))
            for kind in kinds
        )

    @property
    def choices(self) -> tuple[str, ...]:
        """Allowed strings for the value or its items, from each ``Literal`` in the type.

        Empty if the type does not contain a ``Literal``. The setting may allow other values as
        well, such as numbers or import paths of custom code.
        """
        words = (
            word
            for kind, _ in iter_type_parts(self.field.annotation)
            if get_origin(kind) is Literal
            for word in get_args(kind)
        )
        return tuple(dict.fromkeys(word for word in words if isinstance(word, str)))

    @property
    def may_be_path(self) -> bool:
        """Whether the value may be a path or a URL."""
        kinds = iter_type_parts(self.field.annotation, tuple(self.field.metadata))
        return any(isinstance(mark, PathMarker) for _, marks in kinds for mark in marks)

    @property
    def item_schema(self) -> type[BaseModel] | None:
        """Pydantic model of the value's items, if they are groups of settings as in ``data.sources``.

        None for all other settings.
        """
        kinds = (kind for kind, _ in iter_type_parts(self.field.annotation))
        return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)

    @property
    def value_placeholder(self) -> str:
        """Placeholder for the value in ``--help``: ``PATH``, ``N`` or ``TEXT``. Empty for booleans."""
        return (
            ""
            if self.accepts_type(bool)
            else "PATH"
            if self.may_be_path
            else "N"
            if self.accepts_type(int)
            else "TEXT"
        )

    def accepts_type(self, kind: type) -> bool:
        """Return whether the setting's type is ``kind`` or a union that contains it.

        Args:
            kind: Type without parameters, such as ``bool``, ``dict``, ``tuple`` or ``type(None)``.
        """
        return any(
            kind in (member, get_origin(member)) for member, _ in _iter_union_members(self.field.annotation)
        )


@cache
def get_setting_fields(model: type[BaseModel]) -> dict[str, SettingField]:
    """Return all settings of a schema, keyed by dotted key, in the order of the schema.

    The result is cached, so callers must not change it.
    """
    return {setting.key: setting for setting in _iter_settings(model, "")}


def find_open_mapping(model: type[BaseModel], key: str) -> SettingField | None:
    """Find the mapping setting to which a dotted key belongs.

    A mapping setting accepts arbitrary keys. For example, ``model.config.hidden_size`` belongs to
    ``model.config``.

    Returns:
        The mapping setting. None if ``key`` is not inside a mapping setting. The result is
        also None if ``key`` is the key of the mapping setting itself, such as ``model.config``.
    """
    settings = get_setting_fields(model)
    parts_of_key = key.split(".")
    for length in range(len(parts_of_key) - 1, 0, -1):
        setting = settings.get(".".join(parts_of_key[:length]))
        if setting is not None:
            return setting if setting.accepts_type(dict) else None
    return None


@cache
def get_section_descriptions(model: type[BaseModel]) -> dict[str, str]:
    """Return the descriptions of all sections of a schema, keyed by name.

    The sections are in the order of the schema. The result is cached, so callers must not change
    it.
    """
    return {
        field.alias or name: to_one_line(field.annotation.__doc__ or "")
        for name, field in model.model_fields.items()
        if _is_section(field)
    }


def _iter_settings(model: type[BaseModel], prefix: str) -> Iterator[SettingField]:
    """Yield the settings of a schema and of its sections.

    Args:
        model: The schema.
        prefix: Prefix of the keys: empty, or the name of a section followed by a dot.
    """
    for name, field in model.model_fields.items():
        key = prefix + (field.alias or name)
        if _is_section(field):
            assert isinstance(field.annotation, type)
            yield from _iter_settings(field.annotation, f"{key}.")
        else:
            yield SettingField(key, name, field)


def _is_section(field: FieldInfo) -> bool:
    """Return whether a field is a section, which means that its type is a pydantic model.

    A field with a union type or a list type is a setting, even if it contains models, such as
    ``data.eval`` and ``data.sources``.
    """
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def to_plain_value(value: Any) -> Any:
    """Convert a value of the schema to types that JSON supports.

    Tuples become lists. A group of settings becomes a mapping of only those settings that the user has
    set. Other values are returned unchanged.
    """
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_unset=True)
    if isinstance(value, dict):
        return {key: to_plain_value(item) for key, item in value.items()}
    return [to_plain_value(item) for item in value] if isinstance(value, list | tuple) else value


def nest_dotted_keys(values: dict[str, Any]) -> dict[str, Any]:
    """Convert dotted keys to nested mappings, one per section, as in YAML.

    Keys inside a mapping setting, such as ``model.config.hidden_size``, are not supported.
    """
    tree: dict[str, Any] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[name] = value
    return tree


def _iter_union_members(annotation: Any, metadata: tuple[Any, ...] = ()) -> Iterator[TypePart]:
    """Yield the members of a union with their constraints, or the type itself if it is not a union.

    Args:
        annotation: Type annotation.
        metadata: Metadata from an enclosing ``Annotated``.
    """
    if get_origin(annotation) is Annotated:
        inner, *constraints = get_args(annotation)
        yield from _iter_union_members(inner, (*metadata, *constraints))
    elif get_origin(annotation) in (Union, UnionType):
        for member in get_args(annotation):
            yield from _iter_union_members(member, metadata)
    else:
        yield TypePart(annotation, metadata)


def iter_type_parts(annotation: Any, metadata: tuple[Any, ...] = ()) -> Iterator[TypePart]:
    """Yield all types in an annotation, including the item types of lists and mappings.

    For a union, each member is yielded, otherwise the type itself. A list or mapping is followed by
    the types of its items. The schema must declare a list as a ``tuple``, because the items of
    ``list`` are not yielded. For ``tuple[str, ...]``, ``Ellipsis`` is yielded as well. For example,
    the types from ``int | dict[str, float]`` are ``int``, ``dict[str, float]``, ``str`` and
    ``float``.

    Args:
        annotation: Type annotation.
        metadata: Metadata from an enclosing ``Annotated``.
    """
    for alternative in _iter_union_members(annotation, metadata):
        yield alternative
        if get_origin(alternative.kind) in (tuple, dict):
            for item in get_args(alternative.kind):
                yield from iter_type_parts(item)


def _describe_type(annotation: Any, metadata: tuple[Any, ...]) -> str:
    """Describe the values that an annotation allows, such as ``an integer >= 1 or null``."""
    descriptions = [
        text
        for kind, constraints in _iter_union_members(annotation, metadata)
        for text in _describe_alternatives(kind, constraints)
    ]
    *others, last = dict.fromkeys(descriptions)
    # Add a comma before "or" if a description itself contains commas. Otherwise, the last alternative would
    # seem to belong to that description.
    conjunction = ", or " if any(", " in text for text in others) else " or "
    return f"{', '.join(others)}{conjunction}{last}" if others else last


def _describe_alternatives(kind: Any, constraints: tuple[Any, ...]) -> list[str]:
    """Describe the values that one member of a union type allows, such as ``an integer >= 1``.

    Returns:
        One description per value for a boolean or a ``Literal``, such as ``true`` and ``false``. A
        single description for any other type.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is type(None):
        return ["null"]
    if kind is bool:
        return ["true", "false"]
    if origin is Literal:
        return ["true" if value is True else str(value) for value in arguments]
    if origin is tuple:
        number = "" if arguments[-1] is Ellipsis else f"{_NUMBER_WORDS[len(arguments)]} "
        return [f"a list of {number}{_describe_items(arguments[0])}"]
    if kind is dict or origin is dict or issubclass(kind, BaseModel):
        return ["a mapping"]
    return [" ".join([_PLAIN_WORDS[kind], *filter(None, _iter_constraint_texts(constraints))])]


def _describe_items(annotation: Any) -> str:
    """Describe the items of a list, such as ``integers >= 1``."""
    description = _describe_type(annotation, ())
    for singular, plural in _PLURAL_WORDS.items():
        if description.startswith(singular):
            return plural + description.removeprefix(singular)
    return f"any of {description}"


def _iter_constraint_texts(metadata: tuple[Any, ...]) -> Iterator[str]:
    """Yield descriptions of the constraints in a type's metadata.

    The first strings are ``(not empty)`` for each minimum length. The last string describes the
    tightest lower and upper bounds, such as ``>= 1 and < 64``. It is empty if there are no bounds.
    """
    lower: list[tuple[Any, str]] = []
    upper: list[tuple[Any, str]] = []
    for constraint in _iter_constraints(metadata):
        match constraint:
            case annotated_types.MinLen():
                yield "(not empty)"
            case annotated_types.Ge(ge=bound):
                lower.append((bound, f">= {_format_bound(bound)}"))
            case annotated_types.Gt(gt=bound):
                lower.append((bound, f"> {_format_bound(bound)}"))
            case annotated_types.Le(le=bound):
                upper.append((bound, f"<= {_format_bound(bound)}"))
            case annotated_types.Lt(lt=bound):
                upper.append((bound, f"< {_format_bound(bound)}"))
    bounds = [*([max(lower)] if lower else []), *([min(upper)] if upper else [])]
    yield " and ".join(text for _, text in bounds)


def _format_bound(bound: Any) -> str:
    """Format a bound, such as ``0.5``, ``1`` for 1.0, or ``1e+18`` for a large float."""
    is_whole = isinstance(bound, float) and bound.is_integer() and bound < _MIN_EXPONENT_BOUND
    return f"{bound:g}" if isinstance(bound, float) and not is_whole else str(int(bound))


def _iter_constraints(metadata: tuple[Any, ...]) -> Iterator[Any]:
    """Yield the constraints in the metadata of an annotation.

    If the metadata contains a ``FieldInfo``, yields the constraints in it.
    """
    for item in metadata:
        # pydantic wraps the constraints inside an Annotated in a FieldInfo.
        yield from getattr(item, "metadata", None) or (item,)
