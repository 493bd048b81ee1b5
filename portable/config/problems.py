"""Convert pydantic's validation errors to one line with the origin and the remedy."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from portable.config import keys
from portable.config.foreign import load_foreign_names
from portable.config.origins import MOST, Origin, shown
from portable.config.sections import ONE, SEVERAL
from portable.config.suggest import did_you_mean, did_you_mean_word, what_to_do
from portable.config.yaml_text import parse_value
from portable.errors import MistakesError, UserError, one_line

if TYPE_CHECKING:
    from collections.abc import Mapping

Model = TypeVar("Model", bound=BaseModel)
Path = tuple[str, ...]

_MOST = 10


@dataclass(frozen=True)
class _Problem:
    origin: Origin | None
    message: str
    specific: bool = False
    """Whether a validator of the value's type raised it. It then precedes errors of other alternatives."""

    @property
    def line(self) -> str:
        """The message with its origin."""
        return self.message if self.origin is None else self.origin.before(self.message)

    @property
    def order(self) -> int:
        return self.origin.order if self.origin else sys.maxsize


def build(
    model: type[Model], values: Mapping[str, Any], origins: Mapping[Path, Origin] | None = None
) -> Model:
    """Validate ``values`` (nested, as in the YAML file) into ``model``.

    Raises ``UserError``, or ``MistakesError`` with the problems in the order of their origins, one a key.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        details = error.errors()
    problems = [(_setting_of(detail), _problem(model, values, origins or {}, detail)) for detail in details]
    problems.sort(key=lambda one: (one[1].order, not one[1].specific))
    by_setting: dict[object, str] = {}  # the alternatives of a union each report the same value
    for setting, problem in problems:
        by_setting.setdefault(setting, one_line(problem.line))
    lines = list(dict.fromkeys(by_setting.values()))
    if (program := load_foreign_names().name_program(values)) is not None:
        written = problems[0][1].origin
        file = "" if written is None else written.text.rpartition(":")[0] + ": "
        lines.insert(0, f"{file}this is a file of {program}; portable-train import makes a config of it")
    if len(lines) > _MOST:
        lines[_MOST:] = [f"and {len(lines) - _MOST} more mistakes"]
    raise MistakesError(lines) if len(lines) > 1 else UserError(lines[0])


def mistake_in(model: type[BaseModel], key: str, value: Any) -> str | None:
    """What the schema says of one setting; None if it takes it."""
    try:
        build(model, keys.nested({key: value}))
    except UserError as error:
        return str(error)
    return None


def _setting_of(detail: Any) -> object:
    path = tuple(map(str, detail["loc"]))
    return path[:2] or str(detail["msg"])


def _problem(
    model: type[BaseModel], values: Mapping[str, Any], origins: Mapping[Path, Origin], detail: Any
) -> _Problem:
    path = _without_marks(tuple(map(str, detail["loc"])), detail["type"])
    cause = detail.get("ctx", {}).get("error")
    table = keys.settings(model)
    for length in range(1, len(path)):
        setting = table.get(".".join(path[:length]))
        if setting is not None and (group := setting.items) is not None:
            return _Problem(_origin(path, origins), _inside(group, values, path, length, detail))
    if detail["type"] in ("extra_forbidden", "invalid_key"):
        return _Problem(_origin(path, origins), _extra_key(model, path))
    for length in range(len(path), 0, -1):
        key, origin = ".".join(path[:length]), _origin(path[:length], origins)
        if key in table:
            if isinstance(cause, ValueError):
                return _Problem(origin, f"{key} {cause}", specific=True)
            return _Problem(origin, _wrong_value(table[key], _dig(values, path[:length]), origin))
        if key in keys.sections(model):
            inside = _names(model, key)
            given = _dig(values, path[:length])
            message = f"{key} must be a mapping of {inside}, got {shown(given)}"
            if isinstance(given, str):
                name, _, rest = given.partition(" ")
                if rest and f"{key}.{name}" in table:
                    return _Problem(origin, f"{key}: {shown(given)} has no colon; write {name}: {rest[:60]}")
                usual = {"model": "name_or_path", "data": "source"}.get(key, "type")
                inner = next((name for name in (usual, "config") if f"{key}.{name}" in table), None)
                written = load_foreign_names().WORDS.get(key, {}).get(given, f"{{{inner}: {shown(given)}}}")
                message += "" if inner is None else f"; write {key}: {written}"
            return _Problem(origin, message + what_to_do(key))
    return _Problem(None, f"{'.'.join(path)}: {detail['msg']}")


def _without_marks(path: Path, kind: str) -> Path:
    """The place of an error without what pydantic adds: the alternative of a union, the key of a mapping."""
    if path[2:3] in ((ONE,), (SEVERAL,)):  # of data.eval; further in, it is somebody's name
        path = path[:2] + path[3:]
    return path[:-1] if path[1:] and path[-1] == "[key]" and kind != "extra_forbidden" else path


def _inside(group: type[BaseModel], values: Mapping[str, Any], path: Path, length: int, detail: Any) -> str:
    """The message about a value in a list, or mapping, of groups of settings.

    Args:
        group: the settings of each.
        values: of the config.
        path: of the value.
        length: of the path to the list.
        detail: of the error.
    """
    table, label = keys.settings(group), ".".join(path[:length])
    for depth, name in enumerate(path[length:], start=length + 1):
        given = _dig(values, path[:depth])
        if name in table:
            if detail["type"] == "missing":
                return f"{label}: has no {name}; set {name}, {table[name].allowed}"
            cause = detail.get("ctx", {}).get("error")
            if isinstance(cause, ValueError):
                return f"{label}: {cause}"
            return _wrong_value(replace(table[name], key=f"{label}.{name}"), given, None)
        if detail["type"] == "extra_forbidden" and depth == len(path):
            hint = did_you_mean_word(label, name, tuple(table)) or f"; it takes {', '.join(table)}"
            return f"unknown key {label}.{_printable(name)}{hint}"
        called = given.get("name") if isinstance(given, dict) else None
        number = int(name) + 1 if name.isdecimal() and called is None else name
        label += f".{called if isinstance(called, str) else number}"
    cause = detail.get("ctx", {}).get("error")
    return f"{label}: {cause}" if isinstance(cause, ValueError) else f"{label} must be a mapping"


def _wrong_value(setting: keys.Setting, value: object, origin: Origin | None) -> str:
    message = f"{setting.key} must be {setting.allowed}, got {shown(value)}"
    words = [value] if isinstance(value, str) else value if isinstance(value, list | tuple) else []
    if isinstance(value, bool) and setting.choices:
        message += did_you_mean_word(setting.key, str(value).lower(), setting.choices)
    if setting.key == "train.warmup_steps" and isinstance(value, float) and 0 < value < 1:
        return f"{message}; for a share of all steps, set train.warmup_ratio to {value:g}"
    for word in words:
        if isinstance(word, str) and setting.choices and word not in setting.choices:
            return message + did_you_mean_word(setting.key, word, setting.choices)
    if isinstance(value, bool | int | float) and setting.takes(str) and not (origin and origin.flag):
        return message + "; quote text that looks like another type"
    if isinstance(value, str) and not setting.takes(str) and isinstance(parse_value(value), int | float):
        return message + "; leave out its quotes"
    return message


def _extra_key(model: type[BaseModel], path: Path) -> str:
    *around, name = path
    if "." not in name:
        return unknown_key(model, ".".join(path))
    section, _, rest = name.partition(".")
    if not around and name in keys.settings(model):
        return f"unknown key '{name}'; dots are for flags, in a file write {section}: {{{rest}: ...}}"
    return f"unknown key {shown(name)}; a key is one word without dots"


def unknown_key(model: type[BaseModel], key: str) -> str:
    """The error message for an unknown ``key``."""
    known = [*keys.settings(model), *keys.sections(model)]
    section = key.rpartition(".")[0]
    hint = did_you_mean(key, known)
    if not hint and section in keys.settings(model):
        hint = f"; {section} must be {keys.settings(model)[section].allowed}"
    elif not hint:
        around = section if section in keys.sections(model) else ""
        hint = f"; {around or 'the top level'} takes {_names(model, around)}"
    return f"unknown key {_printable(key)}{hint}"


def _names(model: type[BaseModel], section: str) -> str:
    settings = keys.settings(model).values()
    names = [setting.name for setting in settings if setting.section == section]
    return ", ".join(names if section else [*names, *keys.sections(model)])


def _printable(key: str) -> str:
    return key if key.isprintable() and 0 < len(key) <= MOST else shown(key)


def _origin(path: Path, origins: Mapping[Path, Origin]) -> Origin | None:
    """The origin of ``path``, or of its nearest parent."""
    for length in range(len(path), 0, -1):
        if path[:length] in origins:
            return origins[path[:length]]
    return None


def _dig(values: object, path: Path) -> object:
    for part in path:
        if isinstance(values, list | tuple):
            values = values[int(part)] if part.isdecimal() and int(part) < len(values) else None
        else:
            values = values.get(part) if isinstance(values, dict) else None
    return values
