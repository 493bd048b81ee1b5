"""Entry types for the tables of other trainers' keys. An entry converts the values of one key.

A table maps keys of another trainer to entries. A nested key is written with dots. A key that ends
with a star matches all keys with this prefix that have no separate entry::

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
"""Type of functions that convert the value of a key, given the file, to the value of a setting.

The setting is not set if the function returns None. The function may raise ``NoEffect`` or ``NoCounterpart``.
"""


def drop_unset_value(value: Any, _: ForeignFile) -> Any:
    """Return ``value`` unchanged, or None if it means "not set": ``auto`` or a negative number."""
    negative = isinstance(value, int | float) and not isinstance(value, bool) and value < 0
    return None if negative or value == "auto" else value


def parse_flag(value: Any) -> bool:
    """Convert a boolean, or a string such as ``yes``, to a boolean.

    Raises:
        NoCounterpart: If ``value`` is not a boolean.
    """
    flag = parse_boolean_word(value)
    if not isinstance(flag, bool):
        raise NoCounterpart(f"must be true or false, not {format_short_value(value)}")
    return flag


def parse_name_list(value: Any) -> list[str]:
    """Convert a list of names, or a comma-separated string, to a list without empty names."""
    names = value.split(",") if isinstance(value, str) else value
    return [name for name in (str(name).strip() for name in names) if name]


def translate_word(value: Any, meanings: Mapping[str, Any]) -> Any:
    """Look up the meaning of a word, ignoring case.

    Args:
        value: Word to look up, a boolean, or None.
        meanings: Meanings, keyed by word.

    Returns:
        The meaning. None if ``value`` is None and ``meanings`` has no key ``null``.

    Raises:
        NoCounterpart: If ``value`` is not a key of ``meanings``. The message lists the keys.
    """
    word = find_matching_word(value, meanings)
    if word is None and value is not None:
        raise NoCounterpart(f"{format_short_value(value)} is not supported; use one of {', '.join(meanings)}")
    return None if word is None else meanings[word]


def find_matching_word(value: Any, words: Mapping[str, Any]) -> str | None:
    """Find the key of ``words`` that equals ``value``, ignoring case. Return None if none matches.

    Booleans, and words such as ``yes`` or ``off``, also match the keys ``true`` and ``false``.
    """
    by_upper_case = {word.upper(): word for word in words}
    for item in (value, parse_boolean_word(value)):
        text = (item if isinstance(item, str) else format_short_value(item)).upper()
        if text in by_upper_case:
            return by_upper_case[text]
    return None


@dataclass(frozen=True)
class SingleTargetKey(ForeignKey):
    """Base class of entries that convert the values of a key to values of a single setting.

    Attributes:
        target: Dotted key of the setting.
    """

    target: str

    @property
    def targets(self) -> tuple[str, ...]:
        """Tuple that contains only the dotted key of the setting."""
        return (self.target,)

    @property
    def summary(self) -> str:
        """Dotted key of the setting. The hint is omitted, because it only explains the values."""
        return self.target


@dataclass(frozen=True)
class WordKey(ForeignKey):
    """Base class of entries for a key with a fixed set of values.

    Attributes:
        words: Meanings, keyed by the possible values of the key.
    """

    words: Mapping[str, Any]

    def has_no_effect(self, value: Any, file: ForeignFile) -> bool:
        """Return whether ``value`` is ignored. False for all keys of :attr:`words`, such as ``false``."""
        return find_matching_word(value, self.words) is None and super().has_no_effect(value, file)


@dataclass(frozen=True)
class SettingKey(SingleTargetKey):
    """Entry for a key that corresponds to one setting.

    Attributes:
        converter: Function that converts the value of the key to the value of the setting.
    """

    converter: ValueConverter = drop_unset_value

    def convert(self, value: Any, file: ForeignFile) -> ConvertedSettings:
        """Return the setting with its converted value, or no settings if :attr:`converter` returns None."""
        converted = self.converter(value, file)
        return {} if converted is None else {self.target: converted}


@dataclass(frozen=True)
class WordSettingKey(WordKey, SingleTargetKey):
    """Entry for a key with a fixed set of values that correspond to values of one setting.

    If the meaning of a value in :attr:`words` is None, the setting is not set.
    """

    def convert(self, value: Any, file: ForeignFile) -> ConvertedSettings:
        """Return the setting with the meaning of the value, or no settings if the meaning is None."""
        meaning = translate_word(value, self.words)
        return {} if meaning is None else {self.target: meaning}


@dataclass(frozen=True)
class PresetKey(WordKey):
    """Entry for a key with a fixed set of values, each of which sets several settings.

    The meanings in :attr:`words` are dicts that map dotted keys to values.
    """

    def convert(self, value: Any, file: ForeignFile) -> ConvertedSettings:
        """Return the settings that correspond to a value."""
        settings: ConvertedSettings = translate_word(value, self.words)
        return settings

    @property
    def targets(self) -> tuple[str, ...]:
        """Dotted keys of all settings that at least one value of the key sets."""
        return tuple(dict.fromkeys(key for settings in self.words.values() for key in settings))

    @property
    def remedy(self) -> str:
        """Hint of the entry, because the setting names by themselves do not show which values to write."""
        return self.hint


@dataclass(frozen=True)
class SwitchKey(ForeignKey):
    """Entry for a boolean key that sets settings if its value is true, ``auto`` or ``full``.

    Attributes:
        settings: Values to set if the key is true, keyed by dotted setting.
    """

    settings: Mapping[str, str]

    def convert(self, value: Any, file: ForeignFile) -> ConvertedSettings:
        """Return the settings if the value of the key is true, otherwise no settings."""
        settings_if_true = self.settings
        settings: ConvertedSettings = translate_word(
            value, {"true": settings_if_true, "auto": settings_if_true, "full": settings_if_true, "false": {}}
        )
        return settings

    @property
    def targets(self) -> tuple[str, ...]:
        """Dotted keys of the settings."""
        return tuple(self.settings)

    @property
    def remedy(self) -> str:
        """Instruction to set the settings, such as ``set data.packing to documents``."""
        return "set " + ", and ".join(f"{key} to {value}" for key, value in self.settings.items())

    @property
    def summary(self) -> str:
        """Instruction to set the settings, prefixed with the condition ``if true``."""
        return f"if true: {self.remedy}"


@dataclass(frozen=True)
class MultiSettingKey(ForeignKey):
    """Entry for a key whose converter chooses the settings and their values.

    Attributes:
        possible_settings: Dotted keys of the settings that the converter may return.
        converter: Function that converts the value, given the value and the file. It returns settings,
            or None for no settings.
    """

    possible_settings: tuple[str, ...]
    converter: Callable[[Any, ForeignFile], ConvertedSettings | None]

    def convert(self, value: Any, file: ForeignFile) -> ConvertedSettings:
        """Return the result of the converter."""
        return self.converter(value, file) or {}

    @property
    def targets(self) -> tuple[str, ...]:
        """Dotted keys of the settings that the converter may return."""
        return self.possible_settings


@dataclass(frozen=True)
class CompanionKey(ForeignKey):
    """Entry for a key that is not converted itself. The converter of another key reads its value.

    Attributes:
        advice: Replacement for the key in the config of a run: a setting, or a sentence with advice.
    """

    advice: str

    def convert(self, value: Any, file: ForeignFile) -> ConvertedSettings:
        """Return no settings, because the converter of the other key returns them."""
        return {}

    @property
    def remedy(self) -> str:
        """Replacement for the key in the config of a run."""
        return self.advice


@dataclass(frozen=True)
class CounterpartlessKey(ForeignKey):
    """Base class of entries for keys without an equivalent in a run.

    Values that turn the key off are ignored.
    """

    def has_no_effect(self, value: Any, file: ForeignFile) -> bool:
        """Return whether ``value`` is ignored because it turns the key off, such as zero or ``no``."""
        return value == 0 or is_off_or_empty(parse_boolean_word(value)) or super().has_no_effect(value, file)


@dataclass(frozen=True)
class IgnoredKey(CounterpartlessKey):
    """Entry for a key that has no effect in a run.

    Attributes:
        reason: Reason or advice for the note about the key. If it is empty, no note is added.
    """

    reason: str = ""

    def convert(self, value: Any, file: ForeignFile) -> ConvertedSettings:
        """Return no settings if :attr:`reason` is empty.

        Raises:
            NoEffect: If :attr:`reason` is not empty, so that a note is added.
        """
        if self.reason:
            raise NoEffect(f"{format_short_value(value)} has no effect: {self.reason}")
        return {}

    @property
    def remedy(self) -> str:
        """Reason or advice. Empty for a key that is ignored without a note."""
        return self.reason

    @property
    def summary(self) -> str:
        """Reason or advice, prefixed with ``no effect``. Empty for a key that is ignored without a note."""
        return self.reason and f"no effect: {self.reason}"


@dataclass(frozen=True)
class RefusedKey(CounterpartlessKey):
    """Entry for a key that has no counterpart. The key is an error unless its value turns it off.

    Attributes:
        advice: Advice at the end of the error message.
    """

    advice: str

    def convert(self, value: Any, file: ForeignFile) -> ConvertedSettings:
        """Raise ``NoCounterpart`` for every value that is not ignored."""
        raise NoCounterpart(f"{format_short_value(value)} is not supported: {self.advice}")

    @property
    def remedy(self) -> str:
        """Advice for the user."""
        return self.advice

    @property
    def summary(self) -> str:
        """Advice for the user, prefixed with ``refused``."""
        return f"refused: {self.advice}"


@dataclass(frozen=True)
class NeverFalseKey(ForeignKey):
    """Entry for a boolean key whose effect cannot be turned off in a run.

    Attributes:
        reason: Reason and advice for the error message if the value is false.
    """

    reason: str
    converts_empty_values: bool = field(default=True, kw_only=True)

    def convert(self, value: Any, file: ForeignFile) -> ConvertedSettings:
        """Return no settings if the value is true or not set.

        Raises:
            NoCounterpart: If the value is false or zero.
        """
        if value == 0 or parse_boolean_word(value) is False:
            raise NoCounterpart(f"cannot be false: {self.reason}")
        return {}

    @property
    def remedy(self) -> str:
        """Reason and advice, prefixed with ``never false``."""
        return self.summary

    @property
    def summary(self) -> str:
        """Reason and advice, prefixed with ``never false``."""
        return f"never false: {self.reason}"
