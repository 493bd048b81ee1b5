"""Validate values by the schema, and convert pydantic's errors to messages.

A message is one line with the origin of the value, the key, the allowed values and, for a misspelled name,
the nearest valid name.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from portable.config import keys
from portable.config.origins import MAX_SHOWN, Origin, Path, format_short_value
from portable.config.sections import ONE, SEVERAL
from portable.config.suggestions import find_remedy, load_foreign_names, suggest_key, suggest_word
from portable.config.yaml_text import parse_value
from portable.errors import MistakesError, UserError, to_one_line

if TYPE_CHECKING:
    from collections.abc import Mapping

Model = TypeVar("Model", bound=BaseModel)

_MAX_LINES = 10


class _Mistake(NamedTuple):
    """A message about one setting.

    Attributes:
        message: The message without its origin.
        origin: Origin of the value, or None if it is not known.
        specific: Whether a validator of the value's type raised the error, which then precedes errors of the
            other alternatives of a union.
    """

    message: str
    origin: Origin | None
    specific: bool = False

    @property
    def line(self) -> str:
        """The message with its origin."""
        return to_one_line(self.message if self.origin is None else self.origin.prefix_message(self.message))

    @property
    def order(self) -> tuple[int, bool]:
        """Position among all messages."""
        return (self.origin.order if self.origin else sys.maxsize, not self.specific)


def validate(
    model: type[Model], values: Mapping[str, Any], origins: Mapping[Path, Origin] | None = None
) -> Model:
    """Build a config or the options of a command from nested values.

    Args:
        model: The schema.
        values: Values as in the YAML file.
        origins: Origins of values by their path.

    Raises:
        UserError: If there is one mistake.
        MistakesError: If there are several mistakes. The lines are in the order of their origins, one for
            each setting.
    """
    origins = origins or {}
    try:
        return model.model_validate(values)
    except ValidationError as error:
        details = error.errors()
    explained = [(_get_setting_path(detail), _explain(model, values, origins, detail)) for detail in details]
    # One line for each setting, because every alternative of a union reports the same value.
    mistakes: dict[Path, _Mistake] = {}
    for path, mistake in sorted(explained, key=lambda item: item[1].order):
        mistakes.setdefault(path, mistake)
    raise _build_error(values, list(mistakes.values()))


def find_mistake(model: type[BaseModel], key: str, value: Any) -> str | None:
    """Return the error message for a value of one setting, or None if the value is valid."""
    try:
        validate(model, keys.nest_keys({key: value}))
    except UserError as error:
        return str(error)
    return None


def describe_unknown_key(model: type[BaseModel], key: str) -> str:
    """Return the error message for a key that the schema does not have."""
    section = key.rpartition(".")[0]
    table, sections = keys.get_settings(model), keys.get_sections(model)
    hint = suggest_key(key, [*table, *sections])
    if not hint and section in table:
        hint = f"; {section} must be {table[section].allowed_values}"
    elif not hint:
        around = section if section in sections else ""
        hint = f"; {around or 'the top level'} takes {_list_names(model, around)}"
    return f"unknown key {_format_key(key)}{hint}"


def _build_error(values: Mapping[str, Any], mistakes: list[_Mistake]) -> UserError:
    """Build the exception for mistakes, which are in the order of their origins."""
    lines = list(dict.fromkeys(mistake.line for mistake in mistakes))
    if program := load_foreign_names().find_program(values):
        origin = mistakes[0].origin
        file = "" if origin is None else origin.text.rpartition(":")[0] + ": "
        lines.insert(0, f"{file}this is a file of {program}; portable-train import makes a config of it")
    if len(lines) > _MAX_LINES:
        lines[_MAX_LINES:] = [f"and {len(lines) - _MAX_LINES} more mistakes"]
    return MistakesError(lines) if len(lines) > 1 else UserError(lines[0])


def _get_setting_path(detail: Any) -> Path:
    """Return the path of the setting that an error of pydantic is about."""
    return tuple(map(str, detail["loc"]))[:2] or (str(detail["msg"]),)


def _explain(
    model: type[BaseModel], values: Mapping[str, Any], origins: Mapping[Path, Origin], detail: Any
) -> _Mistake:
    """Convert one error of pydantic to a message.

    Args:
        model: The schema.
        values: All values.
        origins: Origins of values by their path.
        detail: The error, an item of ``ValidationError.errors()``.
    """
    path = _remove_marks(tuple(map(str, detail["loc"])), detail["type"])
    target = _follow(model, path, values, unknown=detail["type"] == "extra_forbidden")
    origin = _find_origin(path, origins)
    cause = detail.get("ctx", {}).get("error")
    if detail["type"] in ("extra_forbidden", "invalid_key"):
        if target.group is model:
            return _Mistake(_describe_extra_key(model, path), origin)
        takes = tuple(keys.get_settings(target.group))
        hint = suggest_word(target.label, path[-1], takes) or f"; it takes {', '.join(takes)}"
        return _Mistake(f"unknown key {target.label}.{_format_key(path[-1])}{hint}", origin)
    if target.setting is not None:
        if detail["type"] == "missing" and target.group is not model:
            group, _, name = target.label.rpartition(".")
            return _Mistake(f"{group}: has no {name}; set {name}, {target.setting.allowed_values}", origin)
        if isinstance(cause, ValueError):
            return _Mistake(f"{target.label} {cause}", origin, specific=True)
        setting = replace(target.setting, key=target.label)
        return _Mistake(_describe_wrong_value(setting, target.value, origin), origin)
    if target.group is not model:
        reason = f" {cause}" if isinstance(cause, ValueError) else " must be a mapping"
        return _Mistake(target.label + reason, origin)
    if path and path[0] in keys.get_sections(model):
        return _Mistake(_describe_wrong_section(model, path[0], values.get(path[0])), origin)
    return _Mistake(f"{'.'.join(path)}: {detail['msg']}", None)


def _remove_marks(path: Path, kind: str) -> Path:
    """Remove parts that pydantic adds to the path of an error: alternatives of a union, keys of a mapping."""
    if path[2:3] in ((ONE,), (SEVERAL,)):  # of data.eval; further in, it is the name of a source
        path = path[:2] + path[3:]
    return path[:-1] if path[1:] and path[-1] == "[key]" and kind != "extra_forbidden" else path


class _Target(NamedTuple):
    """The part of the schema that an error is about.

    Attributes:
        label: Dotted name of the value in messages. Items of a list have their name, or a number from 1.
        setting: The setting, or None for an unknown key, a section, or a group of settings in a list.
        group: The schema that has the setting: the config, or the group of settings of an item.
        value: The value of the setting.
    """

    label: str
    setting: keys.SettingField | None
    group: type[BaseModel]
    value: Any


def _follow(group: type[BaseModel], path: Path, value: Any, *, unknown: bool) -> _Target:
    """Follow the path of an error through the schema and the values.

    Args:
        group: The schema of the config.
        path: Path of the error.
        value: All values.
        unknown: Whether the last part of the path is a key that the schema does not have.
    """
    label = ""
    while True:
        table = keys.get_settings(group)
        length = next((n for n in range(1, len(path) + 1) if ".".join(path[:n]) in table), 0)
        if not length:
            return _Target(label, None, group, value)
        setting = table[".".join(path[:length])]
        label = f"{label}.{setting.key}" if label else setting.key
        for name in path[:length]:
            value = _get_item(value, name)
        path = path[length:]
        if setting.items is None or not path:
            return _Target(label, setting, group, value)
        group = setting.items
        # A list or a mapping of groups of settings: the next part is a number or a name.
        while path and path[0] not in keys.get_settings(group) and not (unknown and len(path) == 1):
            item = _get_item(value, path[0])
            item_name: object = path[0]
            if isinstance(value, list | tuple):
                item_name = item.get("name") if isinstance(item, dict) else None
            label += f".{_format_key(item_name) if isinstance(item_name, str) else int(path[0]) + 1}"
            value, path = item, path[1:]


def _get_item(values: object, name: str) -> Any:
    if isinstance(values, list | tuple):
        return values[int(name)] if name.isdecimal() and int(name) < len(values) else None
    return values.get(name) if isinstance(values, dict) else None


def _describe_wrong_value(setting: keys.SettingField, value: object, origin: Origin | None) -> str:
    message = f"{setting.key} must be {setting.allowed_values}, got {format_short_value(value)}"
    words = [value] if isinstance(value, str) else value if isinstance(value, list | tuple) else []
    if isinstance(value, bool) and setting.choices:
        message += suggest_word(setting.key, str(value).lower(), setting.choices)
    if setting.key == "train.warmup_steps" and isinstance(value, float) and 0 < value < 1:
        return f"{message}; for a share of all steps, set train.warmup_ratio to {value:g}"
    for word in words:
        if isinstance(word, str) and setting.choices and word not in setting.choices:
            return message + suggest_word(setting.key, word, setting.choices)
    if isinstance(value, bool | int | float) and setting.accepts_type(str) and not (origin and origin.flag):
        return message + "; quote text that looks like another type"
    if (
        isinstance(value, str)
        and not setting.accepts_type(str)
        and isinstance(parse_value(value), int | float)
    ):
        return message + "; leave out its quotes"
    return message


def _describe_wrong_section(model: type[BaseModel], section: str, value: object) -> str:
    table = keys.get_settings(model)
    message = f"{section} must be a mapping of {_list_names(model, section)}, got {format_short_value(value)}"
    if isinstance(value, str):
        name, _, rest = value.partition(" ")
        if rest and f"{section}.{name}" in table:
            return f"{section}: {format_short_value(value)} has no colon; write {name}: {rest[:60]}"
        usual = {"model": "name_or_path", "data": "source"}.get(section, "type")
        inner = next((name for name in (usual, "config") if f"{section}.{name}" in table), None)
        words = load_foreign_names().words.get(section, {})
        translation = words.get(value, f"{{{inner}: {format_short_value(value)}}}")
        message += "" if inner is None else f"; write {section}: {translation}"
    return message + find_remedy(section)


def _describe_extra_key(model: type[BaseModel], path: Path) -> str:
    *around, name = path
    if "." not in name:
        return describe_unknown_key(model, ".".join(path))
    section, _, rest = name.partition(".")
    if not around and name in keys.get_settings(model):
        return f"unknown key '{name}'; dots are for flags, in a file write {section}: {{{rest}: ...}}"
    return f"unknown key {format_short_value(name)}; a key is one word without dots"


def _list_names(model: type[BaseModel], section: str) -> str:
    settings = keys.get_settings(model).values()
    names = [setting.name for setting in settings if setting.section == section]
    return ", ".join(names if section else [*names, *keys.get_sections(model)])


def _format_key(key: str) -> str:
    return key if key.isprintable() and 0 < len(key) <= MAX_SHOWN else format_short_value(key)


def _find_origin(path: Path, origins: Mapping[Path, Origin]) -> Origin | None:
    """Return the origin of ``path``, or of its nearest parent."""
    for length in range(len(path), 0, -1):
        if path[:length] in origins:
            return origins[path[:length]]
    return None
