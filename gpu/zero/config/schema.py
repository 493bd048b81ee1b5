"""The keys and types of a DeepSpeed configuration, as one pydantic model.

DeepSpeed reads some sections with pydantic models, which are used as they are. The rest it reads from plain
dictionaries, where a misspelt key is silently ignored; those have their types in
``portable/config/importing/keys.md``, from ``deepspeed/runtime/config.py`` and the ``constants.py`` beside
each feature.
"""

from __future__ import annotations

import inspect
import re
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
)

from gpu.zero import private_api
from portable.config import keys
from portable.config.origins import shown
from portable.config.suggest import did_you_mean
from portable.errors import UserError, one_line
from portable.importing.deepspeed import AUTO, OPTIMIZERS, REFUSED_SECTIONS, SCHEDULERS
from portable.importing.foreign_keys import is_off

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_STRICT = ConfigDict(extra="forbid", strict=True)


def _number(least: float) -> Any:
    return Annotated[float, Field(ge=least)]


_Number = _number(0)
_Whole = Annotated[int, Field(gt=0)]
_Lower = BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value)
_Known = dict[str, Any]
"""Types by key; a mapping of these for a section."""


def _dtype(value: Any) -> Any:
    if not private_api.is_dtype(value):
        raise ValueError(f"{shown(value)} is no dtype that DeepSpeed knows")
    return value


_KINDS = {
    "anything": Any,
    "true or false": bool,
    "a number": _Number,
    "a whole number from 1": Annotated[int, Field(gt=0)],
    "a dtype": Annotated[Any, AfterValidator(_dtype)],
}


def _model(name: str, known: _Known) -> type[BaseModel]:
    """A strict model; each key may be missing or null."""
    fields: _Known = {
        key: ((_model(key, kind) if isinstance(kind, dict) else kind) | None, None)
        for key, kind in known.items()
    }
    return create_model(name, __config__=_STRICT, **fields)


@cache
def _plain() -> _Known:
    """What DeepSpeed reads from plain dictionaries."""
    found: _Known = {}
    for names, value in cells("Values in a DeepSpeed JSON"):
        kind = _KINDS.get(value) or Annotated[Literal[tuple(value.split(", "))], _Lower]
        for name in re.findall("`(.+?)`", names):
            *around, last = name.split(".")
            inside = found
            for part in around:
                inside = inside.setdefault(part, {})
            inside[last] = kind
    return found


def schema_of(document: Mapping[str, Any]) -> type[BaseModel]:
    """The model of ``document``; ``params`` of optimizer and scheduler depend on their types in it."""
    known = {
        **_plain(),
        **{
            section: {"enabled": bool, **{name: _type_of(value) for name, value in vars(made({})).items()}}
            for section, made in private_api.config_classes().items()
        },
        "optimizer": {
            **dict.fromkeys(("type", "legacy_fusion"), Any),
            "params": _params(document, "optimizer", OPTIMIZERS),
        },
        "scheduler": {"type": Any, "params": _params(document, "scheduler", SCHEDULERS)},
    }
    return _model("DeepSpeed", {**known, **private_api.config_models()})


def drop_unset(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Remove the keys of ``document`` that the installed DeepSpeed does not read and that are off.

    A later release may have added such a key: with false or an empty value it has no effect. A key that
    resembles a known one stays, because it may be misspelled. So do the sections that cannot be used here,
    except for the values that DeepSpeed would assume without them.

    Args:
        document: the configuration, which is changed.

    Returns:
        the path of each unknown key that was removed.
    """
    models = private_api.config_models()
    for section in REFUSED_SECTIONS & models.keys():
        if isinstance(inside := document.get(section), dict):
            defaults = models[section]().model_dump(exclude_none=True)
            left = {k: v for k, v in inside.items() if k not in defaults or not _is_default(v, defaults[k])}
            document.pop(section) if not left else document.update({section: left})
    schema = schema_of(document)
    removed: list[tuple[str, ...]] = []
    try:
        schema(**without_auto(document))
    except ValidationError as error:
        for detail in error.errors():
            *around, name = map(str, detail["loc"])
            inside = _inside(document, around)
            if detail["type"] != "extra_forbidden" or not is_off(detail["input"]) or name not in inside:
                continue
            if not did_you_mean(name, names_at(schema, tuple(around))):
                del inside[name]
                removed.append((*around, name))
    except Exception:  # of one of its validators; check reports it
        return []
    return removed


def _inside(values: dict[str, Any], path: Iterable[str]) -> dict[str, Any]:
    """Return the section at ``path``; an empty one if there is none."""
    for part in path:
        inside = values.get(part)
        values = inside if isinstance(inside, dict) else {}
    return values


def _is_default(value: Any, default: Any) -> bool:
    """Whether the JSON value ``value`` is the ``default`` of a model."""
    return bool(value == default) or str(value) == str(default)


def check(document: dict[str, Any], where: str) -> None:
    """Raise UserError for all keys that the installed DeepSpeed does not read, or the first wrong value.

    Args:
        document: the configuration.
        where: its file or setting, for the message.
    """
    schema, given = schema_of(document), without_auto(document)
    try:
        schema(**given)
    except ValidationError as error:
        details = error.errors()
        unknown = [
            tuple(map(str, detail["loc"])) for detail in details if detail["type"] == "extra_forbidden"
        ]
        if unknown:
            raise UserError(f"{where}: {_unknown(schema, unknown)}") from error
        first = details[0]
        # A place also names members of unions.
        path = [str(part) for part in first["loc"] if str(part) in _names_in(given)]
        got = "" if isinstance(first["input"], dict) else f", not {shown(first['input'])}"
        told = re.sub(r", (\w+) or \1$", r", \1", first["msg"])  # of an enum with two names for a value
        told = re.sub(r" or instance of \w+$", "", told)
        raise UserError(one_line(f"{where}: {'.'.join(path)}: {told}{got}")) from error
    except Exception as error:  # of one of its validators
        raise UserError(one_line(f"{where}: {error or type(error).__name__}")) from error
    try:
        private_api.parse({key: value for key, value in given.items() if key not in _OURS} | _ONE)
    except Exception as error:  # its sections do not say where in the file they are
        raise UserError(one_line(f"{where}: {error or type(error).__name__}")) from error


_ONE = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
_OURS = ("optimizer", "scheduler", "train_batch_size")


def without_auto(values: dict[str, Any], path: tuple[str, ...] = ()) -> dict[str, Any]:
    """``values`` without those that are ``auto``."""
    return {
        key: without_auto(value, (*path, key)) if isinstance(value, dict) else value
        for key, value in values.items()
        if value != AUTO or (*path, key) == ("data_types", "keep_in_fp32_modules")
    }


def _names_in(values: dict[str, Any]) -> set[str]:
    """All keys at any depth."""
    inside = (_names_in(value) for value in values.values() if isinstance(value, dict))
    return set(values).union(*inside)


def _unknown(schema: type[BaseModel], paths: list[tuple[str, ...]]) -> str:
    """What to say of the unknown keys at ``paths``."""
    hints = []
    for path in paths:
        siblings = names_at(schema, path[:-1])
        hints.append(".".join(path) + did_you_mean(path[-1], siblings, prefix=".".join((*path[:-1], ""))))
    if len(paths) > 1:
        listed = [f"{hint.replace('; ', ' (')})" if "; " in hint else hint for hint in hints]
        return f"unknown keys {', '.join(listed)}"
    around = ".".join(paths[0][:-1]) or "the top level"
    known = "" if hints[0] != ".".join(paths[0]) else f"; {around} has {', '.join(sorted(siblings))}"
    return f"unknown key {hints[0]}{known}"


def names_at(schema: type[BaseModel], path: tuple[str, ...]) -> list[str]:
    """The keys of the section at ``path``."""
    for part in path:
        fields = {key: field for name, field in schema.model_fields.items() for key in (name, field.alias)}
        inside = keys.parts(fields[part].annotation) if part in fields else ()
        groups = (kind for kind, _ in inside if inspect.isclass(kind) and issubclass(kind, BaseModel))
        schema = next(groups, schema)  # the names of a mapping of groups are the user's
    return [key for name, field in schema.model_fields.items() for key in {name, field.alias or name}]


def _params(document: Mapping[str, Any], block: str, kinds: Iterable[str]) -> Any:
    """The params of an optimizer or scheduler; any for one that is not supported."""
    inside = document.get(block)
    kind = inside.get("type") if isinstance(inside, dict) else None
    named = {str(kind), str(kind).lower()}
    names = [name for one in kinds if kind is None or one in named for name in private_api.params(one)]
    return dict.fromkeys(names, Any) or Any


def _type_of(default: Any) -> Any:
    """The type of values that ``default`` implies."""
    if isinstance(default, bool | dict):
        return type(default)
    return _number(min(0, default)) if isinstance(default, int | float) else Any
