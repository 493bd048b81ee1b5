"""Represent problems with settings, and provide helpers for the checks that find them.

A check is a function ``check_...(config)`` that yields a :class:`SettingProblem` for each
unsupported setting. Most checks are in :mod:`portable.checks`. Backends, engines and optimizers add
their own checks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from portable.config import keys
from portable.config.derived_defaults import ZERO_STRATEGIES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portable.config.origins import Origin
    from portable.config.run_config import RunConfig


@dataclass(frozen=True)
class SettingProblem:
    """Setting that is not supported, or combination of settings that does not work.

    Attributes:
        keys: Dotted keys of the settings. The first key is the setting to change.
        reason: Error message, which usually begins with the first key. It does not name the file or
            flag that contains the settings.
    """

    keys: tuple[str, ...]
    reason: str


def format_problem(problem: SettingProblem, config: RunConfig) -> str:
    """Return the error message of a problem, with the origin of one of its settings.

    The origin is a file and line, or a flag. If several settings are involved, a flag is preferred
    to a file, because the user most likely changed the flag last. If neither a file nor a flag has
    set them, the message has no origin.
    """
    origins = [origin for key in problem.keys for origin in _iter_origins(key, config)]
    origin = next((origin for origin in origins if origin.is_flag), origins[0] if origins else None)
    return problem.reason if origin is None else origin.add_to_message(problem.reason)


def _iter_origins(key: str, config: RunConfig) -> Iterator[Origin]:
    """Yield the origins of a key and of the settings that contain it, innermost first.

    For example, if ``data.sources.web`` has no origin, the first result is the origin of
    ``data.sources``. Origins of sections, such as ``data``, are not yielded.
    """
    names = tuple(key.split("."))
    for length in range(len(names), 0, -1):
        path = names[:length]
        if path in config.origins and ".".join(path) not in keys.get_section_descriptions(type(config)):
            yield config.origins[path]


def format_value(value: Any) -> str:
    """Format a scalar as YAML for an error message, such as ``null``, ``true`` or ``0.1``.

    Floats are rounded to six significant digits. Lists and mappings are not supported.
    """
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def format_setting_with_value(config: RunConfig, key: str) -> str:
    """Format a key with its value, such as ``train.steps: 20``.

    The value is included if it is a string or a number. Otherwise, the result is the key with a
    colon, such as ``compile:``.
    """
    value = config.get(key)
    is_word_or_number = isinstance(value, str | int | float) and not isinstance(value, bool)
    return f"{key}: {format_value(value)}" if is_word_or_number else f"{key}:"


def is_not_default(config: RunConfig, key: str) -> bool:
    """Return whether the value of a setting differs from its default in the schema.

    The result can be True for a setting that the user has not set, because some defaults depend on
    other settings.
    """
    return bool(config.get(key) != keys.get_setting_fields(type(config))[key].default)


def uses_zero_strategy(config: RunConfig) -> bool:
    """Return whether DeepSpeed's engine trains the model (strategy zero1, zero2 or zero3)."""
    return config.strategy in ZERO_STRATEGIES


def has_adapter(config: RunConfig) -> bool:
    """Return whether the run trains an adapter, either a new or an existing one."""
    adapter = config.adapter
    return adapter.type is not None or adapter.name_or_path is not None or adapter.config is not None
