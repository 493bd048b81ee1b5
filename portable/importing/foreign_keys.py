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

from portable.config.field_types import parse_truth
from portable.config.origins import format_short_value
from portable.importing.foreign_file import (
    ForeignFile,
    ForeignKey,
    NoCounterpart,
    NoEffect,
    Settings,
    is_off,
)

Convert = Callable[[Any, "ForeignFile"], Any]
"""Converts the value of a key, given the other values of its file. None leaves the setting out."""


def read_value(value: Any, _: ForeignFile) -> Any:
    """Return ``value`` as it is; None for ``auto`` and for the negative numbers that mean "not set"."""
    negative = isinstance(value, int | float) and not isinstance(value, bool) and value < 0
    return None if negative or value == "auto" else value


def read_flag(value: Any) -> bool:
    """Return a boolean, which may be one of YAML's words.

    Raises:
        NoCounterpart: If ``value`` is not a boolean.
    """
    flag = parse_truth(value)
    if not isinstance(flag, bool):
        raise NoCounterpart(f"must be true or false, not {format_short_value(value)}")
    return flag


def split_names(value: Any) -> list[str]:
    """Read names: a list, or text with commas."""
    names = value.split(",") if isinstance(value, str) else value
    return [name for name in (str(name).strip() for name in names) if name]


def choose(value: Any, words: Mapping[str, Any]) -> Any:
    """Look up ``value`` among ``words``, ignoring case. Null is None.

    Raises:
        NoCounterpart: If ``value`` is not among the words, which are listed.
    """
    word = find_word(value, words)
    if word is None and value is not None:
        raise NoCounterpart(f"{format_short_value(value)} has no counterpart; use one of {', '.join(words)}")
    return None if word is None else words[word]


def find_word(value: Any, words: Mapping[str, Any]) -> str | None:
    """Return the key of ``words`` that is written like ``value``, ignoring case, or None."""
    by_upper_case = {word.upper(): word for word in words}
    for item in (value, parse_truth(value)):
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
        return find_word(value, self.words) is None and super().has_no_effect(value, file)


@dataclass(frozen=True)
class SettingKey(SingleTargetKey):
    """A key that becomes one setting.

    Attributes:
        read: Converts the value.
    """

    read: Convert = read_value

    def convert(self, value: Any, file: ForeignFile) -> Settings:
        """Return the setting, unless :attr:`read` leaves it out."""
        converted = self.read(value, file)
        return {} if converted is None else {self.target: converted}


@dataclass(frozen=True)
class WordSettingKey(WordKey, SingleTargetKey):
    """A key whose words are translated to values of one setting; a word for None leaves the setting out."""

    def convert(self, value: Any, file: ForeignFile) -> Settings:
        """Return the setting for a word."""
        meaning = choose(value, self.words)
        return {} if meaning is None else {self.target: meaning}


@dataclass(frozen=True)
class PresetKey(WordKey):
    """A key with words that each become several settings."""

    def convert(self, value: Any, file: ForeignFile) -> Settings:
        """Return the settings for a word."""
        settings: Settings = choose(value, self.words)
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

    def convert(self, value: Any, file: ForeignFile) -> Settings:
        """Return the settings of a switch that is on."""
        on = self.settings
        settings: Settings = choose(value, {"true": on, "auto": on, "full": on, "false": {}})
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
        sets: The settings that values may become, as dotted keys.
        read: Converts the value to some of these settings.
    """

    sets: tuple[str, ...]
    read: Callable[[Any, ForeignFile], Settings | None]

    def convert(self, value: Any, file: ForeignFile) -> Settings:
        """Return the settings for the value."""
        return self.read(value, file) or {}

    @property
    def targets(self) -> tuple[str, ...]:
        """The settings."""
        return self.sets


@dataclass(frozen=True)
class CompanionKey(ForeignKey):
    """A key that is only read by the conversion of another key.

    Attributes:
        instead: Advice: a setting, or a sentence.
    """

    instead: str

    def convert(self, value: Any, file: ForeignFile) -> Settings:
        """Return nothing: the other key's conversion returns the settings."""
        return {}

    @property
    def remedy(self) -> str:
        """Advice for the message."""
        return self.instead


@dataclass(frozen=True)
class UnmatchedKey(ForeignKey):
    """A key that cannot be expressed here."""

    def has_no_effect(self, value: Any, file: ForeignFile) -> bool:
        """Return whether ``value`` leaves everything as it is, as zero and ``no`` do."""
        return value == 0 or is_off(parse_truth(value)) or super().has_no_effect(value, file)


@dataclass(frozen=True)
class IgnoredKey(UnmatchedKey):
    """A key without an effect.

    Attributes:
        reason: Why, or what to do instead. Without a reason, the key is passed over in silence.
    """

    reason: str = ""

    def convert(self, value: Any, file: ForeignFile) -> Settings:
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
class RefusedKey(UnmatchedKey):
    """A key that has no counterpart, unless its value means nothing.

    Attributes:
        instead: Advice for the message.
    """

    instead: str

    def convert(self, value: Any, file: ForeignFile) -> Settings:
        """Refuse the value."""
        raise NoCounterpart(f"{format_short_value(value)} has no counterpart: {self.instead}")

    @property
    def remedy(self) -> str:
        """Advice for the message."""
        return self.instead

    @property
    def summary(self) -> str:
        """Advice for the message."""
        return f"refused: {self.instead}"


@dataclass(frozen=True)
class NeverFalseKey(ForeignKey):
    """A switch that cannot be turned off.

    Attributes:
        reason: Why, and what to do.
    """

    reason: str
    reads_every_value: bool = field(default=True, kw_only=True)

    def convert(self, value: Any, file: ForeignFile) -> Settings:
        """Refuse false and zero."""
        if value == 0 or parse_truth(value) is False:
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
