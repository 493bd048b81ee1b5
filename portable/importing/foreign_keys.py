"""Types of entries in the key tables of other trainers. An entry converts the values of one key.

A table is a mapping from a key of the other program (dotted, if it is nested) to an entry. A key that ends in
a star matches all keys with this beginning that have no separate entry::

    KEYS: ForeignKeys = {
        "learning_rate": SettingKey("train.learning_rate"),
        "sample_packing": SwitchKey({"data.packing": "documents"}),
        "skip_memory_metrics": IgnoredKey(),
        "vllm_*": RefusedKey("training on rewards of generated answers is not supported; leave it out"),
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
"""Function from the value of a key and its file to the value of a setting. None leaves the setting out."""


def drop_unset_value(value: Any, _: ForeignFile) -> Any:
    """Return ``value`` unchanged. None if it is ``auto`` or a negative number that means "not set"."""
    negative = isinstance(value, int | float) and not isinstance(value, bool) and value < 0
    return None if negative or value == "auto" else value


def parse_flag(value: Any) -> bool:
    """Return a boolean. The value may be a string such as ``yes``.

    Raises:
        NoCounterpart: If ``value`` is not a boolean.
    """
    flag = parse_boolean_word(value)
    if not isinstance(flag, bool):
        raise NoCounterpart(f"must be true or false, not {format_short_value(value)}")
    return flag


def parse_name_list(value: Any) -> list[str]:
    """Parse a list of names. The value may also be a single string with commas."""
    names = value.split(",") if isinstance(value, str) else value
    return [name for name in (str(name).strip() for name in names) if name]


def translate_word(value: Any, meanings: Mapping[str, Any]) -> Any:
    """Return the translation of a value, ignoring case.

    Args:
        value: The word, or a boolean. None has the meaning None.
        meanings: Meanings by word.

    Raises:
        NoCounterpart: If ``value`` is not a key of ``words``. The message lists them.
    """
    word = find_matching_word(value, meanings)
    if word is None and value is not None:
        raise NoCounterpart(
            f"{format_short_value(value)} has no counterpart; use one of {', '.join(meanings)}"
        )
    return None if word is None else meanings[word]


def find_matching_word(value: Any, words: Mapping[str, Any]) -> str | None:
    """Return the key of ``words`` that equals ``value`` ignoring case, or None.

    The words ``yes``, ``no``, ``on`` and ``off`` also match ``true`` and ``false``.
    """
    by_upper_case = {word.upper(): word for word in words}
    for item in (value, parse_boolean_word(value)):
        text = (item if isinstance(item, str) else format_short_value(item)).upper()
        if text in by_upper_case:
            return by_upper_case[text]
    return None


@dataclass(frozen=True)
class SingleTargetKey(ForeignKey):
    """A key whose values become values of one setting.

    Attributes:
        target: Dotted key of the setting.
    """

    target: str

    @property
    def targets(self) -> tuple[str, ...]:
        """The setting."""
        return (self.target,)

    @property
    def summary(self) -> str:
        """The setting without the hint, because the hint only explains its values."""
        return self.target


@dataclass(frozen=True)
class WordKey(ForeignKey):
    """Key with a fixed set of string values.

    Attributes:
        words: Meaning of each word.
    """

    words: Mapping[str, Any]

    def has_no_effect(self, value: Any, file: ForeignFile) -> bool:
        """Return whether ``value`` is ignored. A value in :attr:`words` is never ignored."""
        return find_matching_word(value, self.words) is None and super().has_no_effect(value, file)


@dataclass(frozen=True)
class SettingKey(SingleTargetKey):
    """A key that corresponds to one setting.

    Attributes:
        converter: Function that converts the value.
    """

    converter: ValueConverter = drop_unset_value

    def convert(self, value: Any, file: ForeignFile) -> ConvertedSettings:
        """Return the setting. The result is empty if :attr:`converter` returns None."""
        converted = self.converter(value, file)
        return {} if converted is None else {self.target: converted}


@dataclass(frozen=True)
class WordSettingKey(WordKey, SingleTargetKey):
    """Key whose values are translated to values of one setting.

    A word with the meaning None leaves the setting out.
    """

    def convert(self, value: Any, file: ForeignFile) -> ConvertedSettings:
        """Return the setting for a value."""
        meaning = translate_word(value, self.words)
        return {} if meaning is None else {self.target: meaning}


@dataclass(frozen=True)
class PresetKey(WordKey):
    """Key whose values each select values of several settings."""

    def convert(self, value: Any, file: ForeignFile) -> ConvertedSettings:
        """Return the settings for a value."""
        settings: ConvertedSettings = translate_word(value, self.words)
        return settings

    @property
    def targets(self) -> tuple[str, ...]:
        """All settings of all values."""
        return tuple(dict.fromkeys(key for settings in self.words.values() for key in settings))

    @property
    def remedy(self) -> str:
        """The hint, because the names of the settings do not determine which value to write."""
        return self.hint


@dataclass(frozen=True)
class SwitchKey(ForeignKey):
    """A switch that selects values of settings if it is true. The values ``auto`` and ``full`` count as true.

    Attributes:
        settings: Values by dotted key if the switch is true.
    """

    settings: Mapping[str, str]

    def convert(self, value: Any, file: ForeignFile) -> ConvertedSettings:
        """Return the settings if the switch is true."""
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
        """Instruction to set the settings."""
        return "set " + ", and ".join(f"{key} to {value}" for key, value in self.settings.items())

    @property
    def summary(self) -> str:
        """Instruction to set the settings, with the condition."""
        return f"if true: {self.remedy}"


@dataclass(frozen=True)
class MultiSettingKey(ForeignKey):
    """A key whose value determines which settings are set.

    Attributes:
        possible_settings: Settings that values may be converted to, as dotted keys.
        converter: Function that converts the value to some of these settings. None means no settings.
    """

    possible_settings: tuple[str, ...]
    converter: Callable[[Any, ForeignFile], ConvertedSettings | None]

    def convert(self, value: Any, file: ForeignFile) -> ConvertedSettings:
        """Return the settings for the value."""
        return self.converter(value, file) or {}

    @property
    def targets(self) -> tuple[str, ...]:
        """The settings that values may be converted to."""
        return self.possible_settings


@dataclass(frozen=True)
class CompanionKey(ForeignKey):
    """A key that only the conversion of another key reads.

    Attributes:
        advice: Replacement for the key: a setting, or a sentence.
    """

    advice: str

    def convert(self, value: Any, file: ForeignFile) -> ConvertedSettings:
        """Return no settings, because the conversion of the other key returns them."""
        return {}

    @property
    def remedy(self) -> str:
        """The replacement for the key."""
        return self.advice


@dataclass(frozen=True)
class CounterpartlessKey(ForeignKey):
    """A key that has no equivalent in a run."""

    def has_no_effect(self, value: Any, file: ForeignFile) -> bool:
        """Return whether ``value`` is ignored, like zero and ``no``."""
        return value == 0 or is_off_or_empty(parse_boolean_word(value)) or super().has_no_effect(value, file)


@dataclass(frozen=True)
class IgnoredKey(CounterpartlessKey):
    """A key that has no effect in a run.

    Attributes:
        reason: Reason, or advice. The key is ignored without a note if it is empty.
    """

    reason: str = ""

    def convert(self, value: Any, file: ForeignFile) -> ConvertedSettings:
        """Return no settings.

        Raises:
            NoEffect: If there is a reason.
        """
        if self.reason:
            raise NoEffect(f"{format_short_value(value)} has no effect: {self.reason}")
        return {}

    @property
    def remedy(self) -> str:
        """The reason."""
        return self.reason

    @property
    def summary(self) -> str:
        """The reason. Empty for a key that is ignored without a note, so that it is not listed."""
        return self.reason and f"no effect: {self.reason}"


@dataclass(frozen=True)
class RefusedKey(CounterpartlessKey):
    """A key that has no counterpart and is refused, unless its value is off.

    Attributes:
        advice: End of the error message.
    """

    advice: str

    def convert(self, value: Any, file: ForeignFile) -> ConvertedSettings:
        """Raise ``NoCounterpart``."""
        raise NoCounterpart(f"{format_short_value(value)} has no counterpart: {self.advice}")

    @property
    def remedy(self) -> str:
        """The advice."""
        return self.advice

    @property
    def summary(self) -> str:
        """The advice, marked as a refusal."""
        return f"refused: {self.advice}"


@dataclass(frozen=True)
class NeverFalseKey(ForeignKey):
    """A switch whose effect cannot be turned off in a run.

    Attributes:
        reason: Reason and advice, for the error message.
    """

    reason: str
    converts_empty_values: bool = field(default=True, kw_only=True)

    def convert(self, value: Any, file: ForeignFile) -> ConvertedSettings:
        """Return no settings for a switch that is on.

        Raises:
            NoCounterpart: If the value is false or zero.
        """
        if value == 0 or parse_boolean_word(value) is False:
            raise NoCounterpart(f"false has no counterpart: {self.reason}")
        return {}

    @property
    def remedy(self) -> str:
        """The reason and advice."""
        return self.summary

    @property
    def summary(self) -> str:
        """The reason and advice."""
        return f"never false: {self.reason}"
