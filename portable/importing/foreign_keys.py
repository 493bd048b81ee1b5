"""Kinds of entries in the table of another program: what becomes of the values of one of its keys.

A table is a plain mapping from a key of the other program, dotted if it is nested, to an entry. A key that
ends in a star is for all keys that begin like it and have no entry of their own::

    KEYS: ForeignKeys = {
        "learning_rate": Setting("train.learning_rate"),
        "sample_packing": Switch({"data.packing": "documents"}),
        "skip_memory_metrics": Ignored(),
        "vllm_*": Refused("training on rewards of generated answers is not supported; leave it out"),
    }
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from portable.config.field_types import parse_boolean_word
from portable.config.origins import format_short_value
from portable.importing.foreign_file import (
    ConvertedSettings,
    ForeignFile,
    ForeignKey,
    NoCounterpart,
    NoEffect,
    is_off_or_empty,
)

ValueConverter = Callable[[Any, "ForeignFile"], Any]
"""Converts the value of a key, given the other values of its file. None leaves the setting out."""


def drop_unset_value(value: Any, _: ForeignFile) -> Any:
    """Return ``value`` as it is; None for ``auto`` and for the negative numbers that mean "not set"."""
    negative = isinstance(value, int | float) and not isinstance(value, bool) and value < 0
    return None if negative or value == "auto" else value


def parse_flag(value: Any) -> bool:
    """Return a boolean, which may be one of YAML's words.

    Raises:
        NoCounterpart: If ``value`` is not a boolean.
    """
    flag = parse_boolean_word(value)
    if not isinstance(flag, bool):
        raise NoCounterpart(f"must be true or false, not {format_short_value(value)}")
    return flag


def parse_name_list(value: Any) -> list[str]:
    """Read names: a list, or text with commas."""
    names = value.split(",") if isinstance(value, str) else value
    return [name for name in (str(name).strip() for name in names) if name]


def translate_word(value: Any, meanings: Mapping[str, Any]) -> Any:
    """Look up ``value`` among ``meanings``, ignoring case. Null is None.

    Raises:
        NoCounterpart: If ``value`` is not among the words, which are listed.
    """
    word = find_matching_word(value, meanings)
    if word is None and value is not None:
        raise NoCounterpart(
            f"{format_short_value(value)} has no counterpart; use one of {', '.join(meanings)}"
        )
    return None if word is None else meanings[word]


def find_matching_word(value: Any, words: Mapping[str, Any]) -> str | None:
    """Return the key of ``words`` that is written like ``value``, ignoring case, or None."""
    by_upper_case = {word.upper(): word for word in words}
    for item in (value, parse_boolean_word(value)):
        text = (item if isinstance(item, str) else format_short_value(item)).upper()
        if text in by_upper_case:
            return by_upper_case[text]
    return None


@dataclass(frozen=True)
class SingleTargetKey(ForeignKey):
    """A key whose values become one setting.

    Attributes:
        target: The setting, as a dotted key.
    """

    target: str

    @property
    def targets(self) -> tuple[str, ...]:
        """The setting."""
        return (self.target,)

    @property
    def summary(self) -> str:
        """The setting: the hint only adds how to write it."""
        return self.target


@dataclass(frozen=True)
class WordKey(ForeignKey):
    """A key whose values are words.

    Attributes:
        words: The meaning of each word.
    """

    words: Mapping[str, Any]

    def has_no_effect(self, value: Any, file: ForeignFile) -> bool:
        """Return whether ``value`` leaves everything as it is. A word for it comes first."""
        return find_matching_word(value, self.words) is None and super().has_no_effect(value, file)


@dataclass(frozen=True)
class SettingKey(SingleTargetKey):
    """A key that becomes one setting.

    Attributes:
        converter: Converts the value.
    """

    converter: ValueConverter = drop_unset_value

    def convert(self, value: Any, file: ForeignFile) -> ConvertedSettings:
        """Return the setting, unless :attr:`converter` leaves it out."""
        converted = self.converter(value, file)
        return {} if converted is None else {self.target: converted}


@dataclass(frozen=True)
class WordSettingKey(WordKey, SingleTargetKey):
    """A key whose words are translated to values of one setting; a word for None leaves the setting out."""

    def convert(self, value: Any, file: ForeignFile) -> ConvertedSettings:
        """Return the setting for a word."""
        meaning = translate_word(value, self.words)
        return {} if meaning is None else {self.target: meaning}


@dataclass(frozen=True)
class PresetKey(WordKey):
    """A key with words that each become several settings."""

    def convert(self, value: Any, file: ForeignFile) -> ConvertedSettings:
        """Return the settings for a word."""
        settings: ConvertedSettings = translate_word(value, self.words)
        return settings

    @property
    def targets(self) -> tuple[str, ...]:
        """All settings of all words."""
        return tuple(dict.fromkeys(key for settings in self.words.values() for key in settings))

    @property
    def remedy(self) -> str:
        """The hint, because the settings do not determine which value to write."""
        return self.hint


@dataclass(frozen=True)
class SwitchKey(ForeignKey):
    """A key that sets something if it is true. ``auto`` and ``full`` count as true.

    Attributes:
        settings: Settings if it is true.
    """

    settings: Mapping[str, str]

    def convert(self, value: Any, file: ForeignFile) -> ConvertedSettings:
        """Return the settings of a switch that is on."""
        settings_if_true = self.settings
        settings: ConvertedSettings = translate_word(
            value, {"true": settings_if_true, "auto": settings_if_true, "full": settings_if_true, "false": {}}
        )
        return settings

    @property
    def targets(self) -> tuple[str, ...]:
        """The settings."""
        return tuple(self.settings)

    @property
    def remedy(self) -> str:
        """The settings with their values."""
        return "set " + ", and ".join(f"{key} to {value}" for key, value in self.settings.items())

    @property
    def summary(self) -> str:
        """The settings with their values, and the condition."""
        return f"if true: {self.remedy}"


@dataclass(frozen=True)
class MultiSettingKey(ForeignKey):
    """A key that becomes settings which depend on its value.

    Attributes:
        possible_settings: The settings that values may become, as dotted keys.
        converter: Converts the value to some of these settings.
    """

    possible_settings: tuple[str, ...]
    converter: Callable[[Any, ForeignFile], ConvertedSettings | None]

    def convert(self, value: Any, file: ForeignFile) -> ConvertedSettings:
        """Return the settings for the value."""
        return self.converter(value, file) or {}

    @property
    def targets(self) -> tuple[str, ...]:
        """The settings."""
        return self.possible_settings


@dataclass(frozen=True)
class CompanionKey(ForeignKey):
    """A key that is only read by the conversion of another key.

    Attributes:
        advice: Advice: a setting, or a sentence.
    """

    advice: str

    def convert(self, value: Any, file: ForeignFile) -> ConvertedSettings:
        """Return nothing: the other key's conversion returns the settings."""
        return {}

    @property
    def remedy(self) -> str:
        """Advice for the message."""
        return self.advice


@dataclass(frozen=True)
class CounterpartlessKey(ForeignKey):
    """A key that cannot be expressed here."""

    def has_no_effect(self, value: Any, file: ForeignFile) -> bool:
        """Return whether ``value`` leaves everything as it is, as zero and ``no`` do."""
        return value == 0 or is_off_or_empty(parse_boolean_word(value)) or super().has_no_effect(value, file)


@dataclass(frozen=True)
class IgnoredKey(CounterpartlessKey):
    """A key without an effect.

    Attributes:
        reason: Why, or what to do instead. Without a reason, the key is passed over in silence.
    """

    reason: str = ""

    def convert(self, value: Any, file: ForeignFile) -> ConvertedSettings:
        """Return nothing, with a note if there is a reason."""
        if self.reason:
            raise NoEffect(f"{format_short_value(value)} has no effect: {self.reason}")
        return {}

    @property
    def remedy(self) -> str:
        """The reason."""
        return self.reason

    @property
    def summary(self) -> str:
        """The reason; a key that is passed over in silence is not listed."""
        return self.reason and f"no effect: {self.reason}"


@dataclass(frozen=True)
class RefusedKey(CounterpartlessKey):
    """A key that has no counterpart, unless its value means nothing.

    Attributes:
        advice: Advice for the message.
    """

    advice: str

    def convert(self, value: Any, file: ForeignFile) -> ConvertedSettings:
        """Refuse the value."""
        raise NoCounterpart(f"{format_short_value(value)} has no counterpart: {self.advice}")

    @property
    def remedy(self) -> str:
        """Advice for the message."""
        return self.advice

    @property
    def summary(self) -> str:
        """Advice for the message."""
        return f"refused: {self.advice}"


@dataclass(frozen=True)
class NeverFalseKey(ForeignKey):
    """A switch that cannot be turned off.

    Attributes:
        reason: Why, and what to do.
    """

    reason: str
    converts_empty_values: bool = field(default=True, kw_only=True)

    def convert(self, value: Any, file: ForeignFile) -> ConvertedSettings:
        """Refuse false and zero."""
        if value == 0 or parse_boolean_word(value) is False:
            raise NoCounterpart(f"false has no counterpart: {self.reason}")
        return {}

    @property
    def remedy(self) -> str:
        """The reason."""
        return self.summary

    @property
    def summary(self) -> str:
        """The reason."""
        return f"never false: {self.reason}"
