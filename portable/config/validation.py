"""Validate values against the schema, and convert pydantic's errors to messages for the user.

Each message is a single line with the origin of the value, the key and the allowed values. For a
misspelled name, it suggests the nearest valid one.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from portable.config import keys
from portable.config.origins import MAX_VALUE_CHARACTERS, KeyPath, Origin, format_short_value
from portable.config.sections import NAMED_EVAL_TAG, SINGLE_EVAL_TAG
from portable.config.suggestions import (
    format_key_hint,
    format_remedy_hint,
    format_word_hint,
    load_foreign_vocabulary,
)
from portable.config.yaml_text import parse_yaml_value
from portable.errors import MultipleMistakesError, UserError, to_one_line

if TYPE_CHECKING:
    from collections.abc import Mapping

Model = TypeVar("Model", bound=BaseModel)

_MAX_MESSAGE_LINES = 10


class _Mistake(NamedTuple):
    """An error in one setting.

    Attributes:
        message: The message without its origin.
        origin: Origin of the value, or None if it is not known.
        is_specific: Whether a custom validator raised the error. If a value fits no member of a
            union type, there is one error per member. The message of a custom validator is then the
            most helpful.
    """

    message: str
    origin: Origin | None
    is_specific: bool = False

    @property
    def message_with_origin(self) -> str:
        """One-line message that includes the origin of the value."""
        return to_one_line(self.message if self.origin is None else self.origin.add_to_message(self.message))

    @property
    def sort_key(self) -> tuple[int, bool]:
        """Sort key that orders errors by the position of their settings in the files and flags.

        At the same position, errors from custom validators come first, because they are more
        specific. Errors without a known origin come last.
        """
        return (self.origin.order if self.origin else sys.maxsize, not self.is_specific)


def validate_settings(
    model: type[Model], values: Mapping[str, Any], origins: Mapping[KeyPath, Origin] | None = None
) -> Model:
    """Validate nested values, and build a config or a command's options from them.

    Args:
        model: The schema.
        values: Values, nested as in the YAML file.
        origins: Origins of the values, keyed by path, used in error messages.

    Returns:
        An instance of ``model``.

    Raises:
        UserError: If there is one mistake.
        MultipleMistakesError: If there are several mistakes. There is one line per setting, sorted
            by origin. Lines after the first 10 are replaced by their number. Also raised for a
            single mistake if ``values`` are the content of another trainer's config file, because
            an additional first line then recommends ``portable-train import``.
    """
    origins = origins or {}
    try:
        return model.model_validate(values)
    except ValidationError as error:
        details = error.errors()
    explained = [
        (_get_setting_path(detail), _convert_pydantic_error(model, values, origins, detail))
        for detail in details
    ]
    # Keep one message per setting, because pydantic reports an error for each member of a union type.
    mistakes: dict[KeyPath, _Mistake] = {}
    for path, mistake in sorted(explained, key=lambda item: item[1].sort_key):
        mistakes.setdefault(path, mistake)
    raise _build_user_error(values, list(mistakes.values()))


def find_setting_mistake(model: type[BaseModel], key: str, value: Any) -> str | None:
    """Validate a value for a single setting. All other settings have their default values.

    Returns:
        The error message, or None if the value is valid.
    """
    try:
        validate_settings(model, keys.nest_dotted_keys({key: value}))
    except UserError as error:
        return str(error)
    return None


def describe_unknown_key(model: type[BaseModel], key: str) -> str:
    """Return the error message for an unknown key, with a suggestion or the list of valid keys."""
    section = key.rpartition(".")[0]
    table, sections = keys.get_setting_fields(model), keys.get_section_descriptions(model)
    hint = format_key_hint(key, [*table, *sections])
    if not hint and section in table:
        hint = f"; {section} must be {table[section].allowed_values}"
    elif not hint:
        parent_section = section if section in sections else ""
        hint = f"; use one of {_format_setting_names(model, parent_section)}"
    return f"unknown key {_format_key(key)}{hint}"


def _build_user_error(values: Mapping[str, Any], mistakes: list[_Mistake]) -> UserError:
    """Build the exception for one or more mistakes.

    If the values are the content of another trainer's config file, the first line recommends
    ``portable-train import``. Equal messages are merged. After the first :data:`_MAX_MESSAGE_LINES`
    lines, the remaining mistakes are only counted.

    Args:
        values: All values that were validated.
        mistakes: The mistakes, sorted by origin.
    """
    lines = list(dict.fromkeys(mistake.message_with_origin for mistake in mistakes))
    if program := load_foreign_vocabulary().find_program(values):
        origin = mistakes[0].origin
        file = "" if origin is None else origin.text.rpartition(":")[0] + ": "
        lines.insert(
            0, f"{file}this is a file of {program}; convert the file to a config with portable-train import"
        )
    if len(lines) > _MAX_MESSAGE_LINES:
        lines[_MAX_MESSAGE_LINES:] = [f"and {len(lines) - _MAX_MESSAGE_LINES} more mistakes"]
    return MultipleMistakesError(lines) if len(lines) > 1 else UserError(lines[0])


def _get_setting_path(pydantic_error: Any) -> KeyPath:
    """Return the path of the setting to which a pydantic error refers.

    The path has at most two names, the section and the setting. All errors within the value of one
    setting therefore have the same path. If an error has no location, its message is used as the
    path, so that errors with different messages are all reported.
    """
    return tuple(map(str, pydantic_error["loc"]))[:2] or (str(pydantic_error["msg"]),)


def _convert_pydantic_error(
    model: type[BaseModel], values: Mapping[str, Any], origins: Mapping[KeyPath, Origin], pydantic_error: Any
) -> _Mistake:
    """Convert a pydantic error to an error message for the user.

    Args:
        model: The schema.
        values: All values that were validated.
        origins: Origins of the values, keyed by path.
        pydantic_error: An item of ``ValidationError.errors()``.
    """
    path = _remove_pydantic_marks(tuple(map(str, pydantic_error["loc"])), pydantic_error["type"])
    target = _resolve_error_path(
        model, path, values, is_unknown_key=pydantic_error["type"] == "extra_forbidden"
    )
    origin = _find_origin(path, origins)
    cause = pydantic_error.get("ctx", {}).get("error")
    if pydantic_error["type"] in ("extra_forbidden", "invalid_key"):
        if target.schema is model:
            return _Mistake(_describe_extra_key(model, path), origin)
        takes = tuple(keys.get_setting_fields(target.schema))
        hint = format_word_hint(target.label, path[-1], takes) or f"; use one of {', '.join(takes)}"
        return _Mistake(f"unknown key {target.label}.{_format_key(path[-1])}{hint}", origin)
    if target.setting is not None:
        if pydantic_error["type"] == "missing" and target.schema is not model:
            group, _, name = target.label.rpartition(".")
            return _Mistake(
                f"{group}: {name} is missing; set {name} to {target.setting.allowed_values}", origin
            )
        if isinstance(cause, ValueError):
            return _Mistake(f"{target.label} {cause}", origin, is_specific=True)
        setting = replace(target.setting, key=target.label)
        return _Mistake(_describe_wrong_value(setting, target.value, origin), origin)
    if target.schema is not model:
        got = format_short_value(target.value)
        reason = f" {cause}" if isinstance(cause, ValueError) else f" must be a mapping, got {got}"
        return _Mistake(target.label + reason, origin)
    if path and path[0] in keys.get_section_descriptions(model):
        return _Mistake(_describe_wrong_section(model, path[0], values.get(path[0])), origin)
    return _Mistake(f"{'.'.join(path)}: {pydantic_error['msg']}", None)


def _remove_pydantic_marks(path: KeyPath, error_type: str) -> KeyPath:
    """Remove the parts of an error's path that are not keys in the config.

    For ``data.eval``, pydantic inserts a tag for the type of the value: one source or a
    mapping of sources. For an invalid key in a mapping, it appends ``[key]``.

    Args:
        path: Path from pydantic's error.
        error_type: Type of pydantic's error.
    """
    if path[2:3] in (
        (SINGLE_EVAL_TAG,),
        (NAMED_EVAL_TAG,),
    ):  # only at this depth, because a deeper part with the same text is the name of a source
        path = path[:2] + path[3:]
    return path[:-1] if path[1:] and path[-1] == "[key]" and error_type != "extra_forbidden" else path


class _ErrorTarget(NamedTuple):
    """The setting and value to which an error refers.

    Attributes:
        label: Dotted name of the value, used in error messages. It identifies an item of a list by
            the item's ``name``. An item without a name is identified by its position, counted from
            1.
        setting: The setting. None if the error is about an unknown key, about a section, or about
            an entire item of a list or mapping.
        schema: The schema that contains the setting: the config, or the schema of an item.
        value: The invalid value.
    """

    label: str
    setting: keys.SettingField | None
    schema: type[BaseModel]
    value: Any


def _resolve_error_path(
    schema: type[BaseModel], path: KeyPath, value: Any, *, is_unknown_key: bool
) -> _ErrorTarget:
    """Find the setting and the value that the path of an error refers to.

    Args:
        schema: The schema of the config.
        path: Path of the error, without the parts that pydantic adds.
        value: All values that were validated.
        is_unknown_key: Whether the path ends with a key that is not in the schema.
    """
    label = ""
    while True:
        table = keys.get_setting_fields(schema)
        length = next((n for n in range(1, len(path) + 1) if ".".join(path[:n]) in table), 0)
        if not length:
            return _ErrorTarget(label, None, schema, value)
        setting = table[".".join(path[:length])]
        label = f"{label}.{setting.key}" if label else setting.key
        for name in path[:length]:
            value = _get_item(value, name)
        path = path[length:]
        if setting.item_schema is None or not path:
            return _ErrorTarget(label, setting, schema, value)
        schema = setting.item_schema
        # Skip the index or name of an item, which precedes the setting's key if the value is a list or
        # mapping of groups of settings.
        while (
            path
            and path[0] not in keys.get_setting_fields(schema)
            and not (is_unknown_key and len(path) == 1)
        ):
            item = _get_item(value, path[0])
            item_name: object = path[0]
            if isinstance(value, list | tuple):
                item_name = item.get("name") if isinstance(item, dict) else None
            label += f".{_format_key(item_name) if isinstance(item_name, str) else int(path[0]) + 1}"
            value, path = item, path[1:]


def _get_item(values: object, name: str) -> Any:
    """Return an item of a list or mapping, or None if it is missing.

    Args:
        values: List or mapping. For any other value, the result is None.
        name: Key, or index as text.
    """
    if isinstance(values, list | tuple):
        return values[int(name)] if name.isdecimal() and int(name) < len(values) else None
    return values.get(name) if isinstance(values, dict) else None


def _describe_wrong_value(setting: keys.SettingField, value: object, origin: Origin | None) -> str:
    """Return the error message for a value with a wrong type or out of range.

    If the value is a common mistake, the message contains advice.
    """
    message = f"{setting.key} must be {setting.allowed_values}, got {format_short_value(value)}"
    words = [value] if isinstance(value, str) else value if isinstance(value, list | tuple) else []
    if isinstance(value, bool) and setting.choices:
        message += format_word_hint(setting.key, str(value).lower(), setting.choices)
    if setting.key == "train.warmup_steps" and isinstance(value, float) and 0 < value < 1:
        return f"{message}; for a share of all steps, set train.warmup_ratio to {value:g}"
    for word in words:
        if isinstance(word, str) and setting.choices and word not in setting.choices:
            return message + format_word_hint(setting.key, word, setting.choices)
    if (
        isinstance(value, bool | int | float)
        and setting.accepts_type(str)
        and not (origin and origin.is_flag)
    ):
        return message + "; put the value in quotes to make it a string"
    if (
        isinstance(value, str)
        and not setting.accepts_type(str)
        and isinstance(parse_yaml_value(value), int | float)
    ):
        return message + "; remove the quotes"
    return message


def _describe_wrong_section(model: type[BaseModel], section: str, value: object) -> str:
    """Return the error message for a section whose value is not a mapping.

    If the value is a string, the message may contain a correction, or an example of a valid value.
    """
    table = keys.get_setting_fields(model)
    message = (
        f"{section} must be a mapping of {_format_setting_names(model, section)}, got "
        f"{format_short_value(value)}"
    )
    if isinstance(value, str):
        name, _, rest = value.partition(" ")
        if rest and f"{section}.{name}" in table:
            return f"{section}: {format_short_value(value)} has no colon; write {name}: {rest[:60]}"
        usual = {"model": "name_or_path", "data": "source"}.get(section, "type")
        usual_key = next((name for name in (usual, "config") if f"{section}.{name}" in table), None)
        words = load_foreign_vocabulary().words.get(section, {})
        translation = words.get(value.lower(), f"{{{usual_key}: {format_short_value(value)}}}")
        message += "" if usual_key is None else f"; write {section}: {translation}"
    return message + format_remedy_hint(section)


def _describe_extra_key(model: type[BaseModel], path: KeyPath) -> str:
    """Return the error message for an unknown key in a file.

    If the key contains dots, the message explains that files use nested mappings instead.
    """
    *parents, name = path
    if "." not in name:
        return describe_unknown_key(model, ".".join(path))
    section, _, rest = name.partition(".")
    if not parents and name in keys.get_setting_fields(model):
        return f"unknown key '{name}'; in a file, write {section}: {{{rest}: ...}} instead of the dot"
    return f"unknown key {format_short_value(name)}; write nested keys instead of dots"


def _format_setting_names(model: type[BaseModel], section: str) -> str:
    """Return the names of a section's settings, separated by commas.

    If ``section`` is empty, returns the names of the top-level settings and of the sections.
    """
    settings = keys.get_setting_fields(model).values()
    names = [setting.name for setting in settings if setting.section == section]
    return ", ".join(names if section else [*names, *keys.get_section_descriptions(model)])


def _format_key(key: str) -> str:
    """Return a key unchanged if it is short and printable, otherwise quoted and truncated."""
    return key if key.isprintable() and 0 < len(key) <= MAX_VALUE_CHARACTERS else format_short_value(key)


def _find_origin(path: KeyPath, origins: Mapping[KeyPath, Origin]) -> Origin | None:
    """Return the origin of ``path`` or of its nearest ancestor. None if there is none."""
    for length in range(len(path), 0, -1):
        if path[:length] in origins:
            return origins[path[:length]]
    return None
