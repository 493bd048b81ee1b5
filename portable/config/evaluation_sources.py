"""The sources of ``data.eval``: each is the ``data`` section with some settings of its own."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from portable.config import keys
from portable.config.suggest import did_you_mean_word

if TYPE_CHECKING:
    from portable.config.sections import DataConfig

ALONE = ""
"""The name of a source that is the only one."""
HELD_OUT = "held_out"
"""The name of the share that ``data.eval_fraction`` holds out, beside sources of ``data.eval``."""
SOURCE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_OF_ONE_SOURCE = ("config_name", "split", "max_samples", "format")
"""Not taken over by a source of its own: which part of the training's source is read, and as what."""


class SourceError(ValueError):
    """One line about a source. ``key`` is the setting in question."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


def evaluation_sources(data: DataConfig) -> dict[str, DataConfig]:
    """The settings of each evaluation source, by name; ``ALONE`` for a single one, empty without any.

    Raises:
        SourceError: if they cannot be used.
    """
    if data.eval is None:
        return {}
    known = of_source(type(data))
    several = bool(data.eval) and all(
        isinstance(inside, dict) and name not in known for name, inside in data.eval.items()
    )
    given = data.eval if several else {ALONE: data.eval}
    for name in data.eval if several else ():
        if SOURCE_NAME.fullmatch(name) is None:
            reason = f"data.eval: the name {name!r} may only have letters, digits, - and _"
            raise SourceError(f"data.eval.{name}", reason)
    of_shares = [one.get("name") for one in data.sources] or [HELD_OUT]
    if (taken := next((name for name in of_shares if name in given), None)) and data.eval_fraction > 0:
        raise SourceError(
            f"data.eval.{taken}",
            f"data.eval.{taken}: the share of data.eval_fraction has this name; choose another, or set "
            "data.eval_fraction to 0",
        )
    return {name: settings_of(data, key_of(name), inside) for name, inside in given.items()}


def evaluation_names(data: DataConfig) -> list[str]:
    """The names of all that a run evaluates on."""
    names = list(evaluation_sources(data))
    if data.eval_fraction == 0:
        return names
    return [*names, *([str(one.get("name")) for one in data.sources] or [held_out_name(data)])]


def held_out_name(data: DataConfig) -> str:
    """The name of what the only source of a run holds out."""
    return HELD_OUT if data.eval is not None else ALONE


def key_of(name: str) -> str:
    """The dotted key of the source ``name``."""
    return f"data.eval.{name}" if name else "data.eval"


def of_source(section: type[DataConfig]) -> dict[str, keys.Setting]:
    """The settings that describe a source."""
    return {name: setting for name, setting in keys.settings(section).items() if setting.of_source}


def settings_of(
    data: DataConfig,
    key: str,
    inside: dict[str, Any],
    *,
    eval_fraction: float = 0.0,
    own: tuple[str, ...] = (),
) -> DataConfig:
    """The ``data`` section as a source has it that sets ``inside`` for itself.

    Args:
        key: the dotted key of the source.
        eval_fraction: of the source.
        own: keys that it may have besides those of a source, for messages.

    Raises:
        SourceError: if it cannot be used.
    """
    known = of_source(type(data))
    for name in inside:
        if name not in known:
            takes = (*own, *known)
            hint = did_you_mean_word(key, name, takes) or f"; it takes {', '.join(takes)}"
            raise SourceError(f"{key}.{name}", f"unknown key {key}.{name}{hint}")
    if not inside.keys() & {"source", "split", "config_name"}:
        reason = f"{key}: names no data of its own; set source, or split of a hub dataset"
        raise SourceError(key, reason)
    values = {name: getattr(data, name) for name in type(data).model_fields}
    if "source" in inside:
        values |= {name: known[name].default for name in _OF_ONE_SOURCE}
    alone = {"eval": None, "eval_fraction": eval_fraction, "sources": (), "weight_schedule": ()}
    try:
        return type(data).model_validate({**values, **inside, **alone})
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        message = f"{key}.{name} must be {known[name].allowed}, got {inside.get(name)!r}"
        raise SourceError(f"{key}.{name}", message) from None
