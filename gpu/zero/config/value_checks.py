"""Check the values of a DeepSpeed configuration against the installed DeepSpeed.

Its pydantic models validate their sections. For sections read from plain dictionaries, the type of the
default decides: DeepSpeed's constants come in pairs, such as ``GRADIENT_CLIPPING`` and
``GRADIENT_CLIPPING_DEFAULT``. DeepSpeed's own parser checks the rest.
"""

from __future__ import annotations

import importlib
import inspect
import re
from functools import cache
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from gpu.zero import private_api
from gpu.zero.config.blocks import optimizer_defaults, scheduler_defaults
from gpu.zero.config.document import AUTO, shown
from gpu.zero.config.known_keys import PLAIN, models
from portable.errors import UserError, one_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic import BaseModel

_BATCHES = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def without_auto(values: dict[str, Any], path: tuple[str, ...] = ()) -> dict[str, Any]:
    """``values`` without those that are ``auto``."""
    return {
        key: without_auto(value, (*path, key)) if isinstance(value, dict) else value
        for key, value in values.items()
        if value != AUTO or (*path, key) == ("data_types", "keep_in_fp32_modules")
    }


def check_values(document: dict[str, Any], where: str) -> None:
    """Raise UserError for the first value that the installed DeepSpeed does not accept.

    Strings and numbers that its models parse as booleans are replaced by booleans in ``document``.

    Args:
        document: the configuration, its keys already checked.
        where: its file or setting, for the message.
    """
    for path, model in models().items():
        values = _at(document, path)
        if isinstance(values, dict):
            _check_model(model, values, path, where)
    for path, value, default in _plain_values(document):
        expected = _expected(default, value)
        if expected is not None:
            raise UserError(f"{where}: {'.'.join(path)} must be {expected}, not {shown(value)}")
    if (reason := _refusal(without_auto(document))) is not None:
        place, reason = _culprit(without_auto(document), reason)
        raise UserError(one_line(f"{where}: {place}: {reason}"))


def _at(document: dict[str, Any], path: tuple[str, ...]) -> Any:
    found: Any = document
    for part in path:
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _check_model(model: type[BaseModel], values: dict[str, Any], path: tuple[str, ...], where: str) -> None:
    given = without_auto(values, path)
    try:
        read = model(**given)
    except (ValidationError, ValueError, AssertionError) as error:
        if not isinstance(error, ValidationError):
            raise UserError(one_line(f"{where}: {'.'.join(path)}: {error}")) from error
        first = error.errors()[0]
        inside = [str(part) for part in first["loc"] if str(part) in _names_in(given)]
        got = f", not {shown(first['input'])}" if inside and not isinstance(first["input"], dict) else ""
        told = re.sub(r", (\w+) or \1$", r", \1", first["msg"])  # of an enum with two names for a value
        raise UserError(one_line(f"{where}: {'.'.join((*path, *inside))}: {told}{got}")) from error
    for name, field in model.model_fields.items():
        key = name if name in given else field.alias or name
        value, old = getattr(read, name, None), given.get(key)
        words = str | int if isinstance(value, bool) else str
        if isinstance(value, bool | int | float) and isinstance(old, words):
            values[key] = value


def _refusal(document: dict[str, Any]) -> str | None:
    """DeepSpeed's own error for ``document``; None if it accepts it."""
    ours = ("optimizer", "scheduler", "train_batch_size", *_BATCHES)
    rest = {key: value for key, value in document.items() if key not in ours}
    try:
        private_api.parse({**rest, **dict.fromkeys(_BATCHES, 1)})
    except Exception as error:
        return f"{error}" or type(error).__name__
    return None


def _culprit(document: dict[str, Any], reason: str) -> tuple[str, str]:
    """The smallest part of ``document`` that DeepSpeed refuses by itself: its path, and the reason."""
    rest = dict(document)
    for key in document:
        without = {other: value for other, value in rest.items() if other != key}
        if (still := _refusal(without)) is not None:
            rest, reason = without, still
    (key, inside), *more = rest.items()
    if more or not isinstance(inside, dict):
        return ", ".join(rest), reason
    for name, value in inside.items():
        if (alone := _refusal({key: {name: value}})) is not None:
            return f"{key}.{name}", alone
    return key, reason


def _names_in(values: dict[str, Any]) -> set[str]:
    """All keys at any depth: a pydantic location also names members of unions."""
    found = set(values)
    for value in values.values():
        if isinstance(value, dict):
            found |= _names_in(value)
    return found


def _plain_values(document: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Each value that no model reads, with its path and its default."""
    known: dict[tuple[str, ...], Any] = dict(_plain_defaults())
    for block, defaults in (("optimizer", optimizer_defaults), ("scheduler", scheduler_defaults)):
        kind = _at(document, (block, "type"))
        for name, default in (defaults(kind) or {}).items():
            known[block, "params", name] = default
    for name, made in private_api.config_classes().items():
        known |= {(name, key): default for key, default in vars(made({})).items()}
    around = {path[:-1] for path in known if len(path) > 1}
    for section in sorted({*around, *models(), *(path[:1] for path in models())}):
        if (inside := _at(document, section)) is not None and section != ("zero_optimization",):
            yield section, inside, {}
    for path, default in known.items():
        value = _at(document, path)
        if value is not None and value != AUTO:
            yield path, value, default


@cache
def _plain_defaults() -> tuple[tuple[tuple[str, ...], Any], ...]:
    defaults: dict[str, list[Any]] = {}
    for module in map(importlib.import_module, private_api.CONSTANTS):
        for name, key in vars(module).items():
            default = getattr(module, f"{name}_DEFAULT", None)
            if isinstance(key, str) and default is not None:
                defaults.setdefault(key, []).append(default)

    def walk(known: dict[str, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
        for key, inside in known.items():
            if isinstance(inside, dict):
                yield from walk(inside, (*path, key))
            elif key in defaults and len({type(default) for default in defaults[key]}) == 1:
                yield (*path, key), defaults[key][0]

    return tuple(walk(PLAIN, ()))


def _expected(default: Any, value: Any) -> str | None:
    """The kind of value that ``default`` implies; None if ``value`` is of that kind."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(default, bool):
        return None if isinstance(value, bool) else "true or false"
    if isinstance(default, dict):
        return None if isinstance(value, dict) else "a mapping"
    if isinstance(default, int | float):
        several = isinstance(value, list) and all(isinstance(one, int | float) for one in value)
        least = min(0, default)
        return None if (number and value >= least) or several else f"a number of at least {least}"
    if isinstance(default, tuple):
        pair = isinstance(value, list) and len(value) == len(default)
        good = pair and all(isinstance(one, int | float) and 0 <= one < 1 for one in value)
        return None if good else f"{len(default)} numbers from 0 to below 1"
    if default is inspect.Parameter.empty:
        return None if number or isinstance(value, list) else "a number"
    return None
