"""Types of the entries in key tables, which describe how to convert another trainer's config keys.

A key table maps each key of the other trainer to an entry, and the entry converts the values of the
key. A nested key is written with dots. A key that ends with a star matches all keys with this
prefix that have no separate entry::

    KEYS: ForeignKeys = {
        "learning_rate": SettingKey("train.learning_rate"),
        "sample_packing": SwitchKey({"data.packing": "documents"}),
        "skip_memory_metrics": IgnoredKey(),
        "vllm_*": RefusedKey("reinforcement learning on generated answers is not available; remove the key"),
    }
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from portable.config.field_types import parse_boolean_word
from portable.config.origins import format_short_value
from portable.config.suggestions import format_advice
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
        NoCounterpart: If ``value`` is neither a boolean nor a word for a boolean. Numbers such as 1
            are not accepted.
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
    """Translate a value of another trainer with a table, ignoring case.

    Args:
        value: Value to translate: a string, a number, a boolean or None. A number matches the key
            that contains its digits, such as ``4``. True and strings such as ``yes`` match the key
            ``true``. False and strings such as ``off`` match the key ``false``. None matches the
            key ``null``.
        meanings: Translations, keyed by word.

    Returns:
        The translation. None if ``value`` is None and ``meanings`` has no key ``null``.

    Raises:
        NoCounterpart: If ``value`` does not match a key of ``meanings``. The message lists the
            keys.
    """
    word = find_matching_word(value, meanings)
    if word is None and value is not None:
        raise NoCounterpart(f"{format_short_value(value)} is not supported; use one of {', '.join(meanings)}")
    return None if word is None else meanings[word]


def find_matching_word(value: Any, words: Mapping[str, Any]) -> str | None:
    """Find the key of ``words`` that equals ``value``, ignoring case.

    A number matches the key that contains its digits, and None matches the key ``null``. Booleans,
    and words such as ``yes`` or ``off``, also match the keys ``true`` and ``false``. Returns None
    if no key matches.
    """
    by_upper_case = {word.upper(): word for word in words}
    for item in (value, parse_boolean_word(value)):
        text = (item if isinstance(item, str) else format_short_value(item)).upper()
        if text in by_upper_case:
            return by_upper_case[text]
    return None


@dataclass(frozen=True)
class SingleTargetKey(ForeignKey):
    """Base class of table entries for keys that correspond to a single setting.

    Each entry converts one key of another trainer's config, such as TRL's.

    Attributes:
        target: Dotted key of the setting, such as ``train.learning_rate``.
    """

    target: str

    @property
    def targets(self) -> tuple[str, ...]:
        """Tuple that contains only the dotted key of the setting."""
        return (self.target,)

    @property
    def summary(self) -> str:
        """Text that docs/keys.md shows for this key: the dotted key of the setting.

        The page shows neither :attr:`hint`, which only explains the values, nor :attr:`docs_text`.
        """
        return self.target


@dataclass(frozen=True)
class WordKey(ForeignKey):
    """Base class of table entries for keys that have a fixed set of values.

    Attributes:
        words: Mapping from each possible value of the key to its converted value, for example the
            value of a setting. Subclasses define the type of the converted values.
    """

    words: Mapping[str, Any]

    def has_no_effect(self, value: Any, file: ForeignFile) -> bool:
        """Return whether ``value`` can be dropped without a note, because it changes nothing.

        This is never the case for a value with a translation in :attr:`words`. For all other
        values, the rules of the base class apply.
        """
        return find_matching_word(value, self.words) is None and super().has_no_effect(value, file)


@dataclass(frozen=True)
class SettingKey(SingleTargetKey):
    """Entry for a key that corresponds to one setting.

    Attributes:
        converter: Function that converts the value of the key to the value of the setting. If it
            returns None, the setting is not set. The default, :func:`drop_unset_value`, drops
            ``auto`` and negative numbers.
    """

    converter: ValueConverter = drop_unset_value

    def convert(self, value: Any, file: ForeignFile) -> ConvertedSettings:
        """Convert ``value``, and return the result as the value of the setting :attr:`target`.

        Returns no settings if :attr:`converter` returns None.
        """
        converted = self.converter(value, file)
        return {} if converted is None else {self.target: converted}


@dataclass(frozen=True)
class WordSettingKey(WordKey, SingleTargetKey):
    """Conversion table entry for a key whose values are translated to values of one setting.

    The key belongs to the config of another trainer. If :attr:`words` maps a value to None, the
    setting is left unset.
    """

    def convert(self, value: Any, file: ForeignFile) -> ConvertedSettings:
        """Translate the value with :attr:`words`, and return a dict that sets :attr:`target` to it.

        The dict is empty if the translation is None.

        Raises:
            NoCounterpart: If :attr:`words` does not contain the value.
        """
        meaning = translate_word(value, self.words)
        return {} if meaning is None else {self.target: meaning}


@dataclass(frozen=True)
class PresetKey(WordKey):
    """Table entry for a key with a fixed set of values, each of which sets several settings.

    :attr:`words` maps each value of the key to a dict. The dict maps the dotted keys of the
    settings to their values.
    """

    def convert(self, value: Any, file: ForeignFile) -> ConvertedSettings:
        """Return the settings to which :attr:`words` maps a value of the key.

        Raises:
            NoCounterpart: If :attr:`words` does not contain the value.
        """
        settings: ConvertedSettings = translate_word(value, self.words)
        return settings

    @property
    def targets(self) -> tuple[str, ...]:
        """Dotted keys of all settings that this key can set.

        :attr:`words` maps each value of the key to the settings for this value. One value may set
        only some of the settings.
        """
        return tuple(dict.fromkeys(key for settings in self.words.values() for key in settings))

    @property
    def remedy(self) -> str:
        """Advice on the settings to use instead of this key, which is the text of :attr:`hint`.

        A list of setting names would not be enough. The hint also contains the values to set.
        """
        return self.hint


@dataclass(frozen=True)
class SwitchKey(ForeignKey):
    """Conversion table entry for a key that turns a feature on or off.

    The values true, ``auto`` and ``full`` turn the feature on. The value false sets nothing.

    Attributes:
        settings: Values of the settings to use if the feature is on, keyed by dotted key.
    """

    settings: Mapping[str, str]

    def convert(self, value: Any, file: ForeignFile) -> ConvertedSettings:
        """Return :attr:`settings` for true, ``auto`` and ``full``, and no settings for false.

        Raises:
            NoCounterpart: If ``value`` is any other value.
        """
        settings_if_true = self.settings
        settings: ConvertedSettings = translate_word(
            value, {"true": settings_if_true, "auto": settings_if_true, "full": settings_if_true, "false": {}}
        )
        return settings

    @property
    def targets(self) -> tuple[str, ...]:
        """Dotted keys of all settings in :attr:`settings`."""
        return tuple(self.settings)

    @property
    def remedy(self) -> str:
        """Advice on which settings to use instead, such as ``set data.packing to documents``."""
        return "set " + " and ".join(f"{key} to {value}" for key, value in self.settings.items())

    @property
    def summary(self) -> str:
        """Description of the key in docs/keys.md, such as ```data.packing: documents` if true``."""
        return " and ".join(f"`{key}: {value}`" for key, value in self.settings.items()) + " if true"


@dataclass(frozen=True)
class MultiSettingKey(ForeignKey):
    """Entry for a key whose converter chooses the settings and their values.

    Attributes:
        possible_settings: Dotted keys of the settings that the converter may return.
        converter: Function that takes the value of the key and the file that is being converted. It
            returns settings, or None for no settings.
    """

    possible_settings: tuple[str, ...]
    converter: Callable[[Any, ForeignFile], ConvertedSettings | None]

    def convert(self, value: Any, file: ForeignFile) -> ConvertedSettings:
        """Return the settings from :attr:`converter`, or no settings if it returns None."""
        return self.converter(value, file) or {}

    @property
    def targets(self) -> tuple[str, ...]:
        """Dotted keys of the settings that the converter may return."""
        return self.possible_settings


@dataclass(frozen=True)
class CompanionKey(ForeignKey):
    """Table entry for a key whose value is read by the converter of another key.

    The key does not have a separate converter.

    Attributes:
        advice: Dotted key of the setting to use instead, such as ``data.format``. If no single
            setting replaces the key, a sentence of advice, such as ``set data.format and
            data.columns to describe the records``.
    """

    advice: str

    def convert(self, value: Any, file: ForeignFile) -> ConvertedSettings:
        """Return no settings, because the converter of another key reads the value of this key."""
        return {}

    @property
    def remedy(self) -> str:
        """Advice on what to use instead of this key in the config of a run.

        This is the text of :attr:`advice`: the dotted key of a setting, or a sentence.
        """
        return self.advice


@dataclass(frozen=True)
class CounterpartlessKey(ForeignKey):
    """Base class of conversion table entries for keys without an equivalent setting in this project.

    The keys belong to the configs of other trainers. If the value of a key disables a feature, for
    example false or zero, the key is ignored. The values in :attr:`unless` are ignored as well.
    Subclasses handle all other values in :meth:`convert`.
    """

    def has_no_effect(self, value: Any, file: ForeignFile) -> bool:
        """Return whether ``value`` is ignored because it turns off the feature that the key controls.

        Examples of such values are zero and ``no``. The values that the base class ignores are also
        ignored here.
        """
        return value == 0 or is_off_or_empty(parse_boolean_word(value)) or super().has_no_effect(value, file)


@dataclass(frozen=True)
class IgnoredKey(CounterpartlessKey):
    """Entry for a key that has no effect in a run.

    Attributes:
        reason: Reason or advice for the note about the key. If it is empty, no note is added.
    """

    reason: str = ""

    def convert(self, value: Any, file: ForeignFile) -> ConvertedSettings:
        """Ignore the key, and return no settings.

        Raises:
            NoEffect: If :attr:`reason` is not empty. The caller then adds a note with the reason.
        """
        if self.reason:
            raise NoEffect(f"{format_short_value(value)} has no effect{format_advice(self.reason)}")
        return {}

    @property
    def remedy(self) -> str:
        """Why the key has no effect, or what to do instead. Empty if no note is added."""
        return self.reason

    @property
    def summary(self) -> str:
        """Text that docs/keys.md shows for this key.

        This is :attr:`reason`, prefixed with ``no effect``. Empty if no note is added.
        """
        if not self.reason:
            return ""
        return (
            f"no effect{'' if '; ' in self.reason else '; instead,'}{format_advice(self.reason).lstrip(';')}"
        )


@dataclass(frozen=True)
class RefusedKey(CounterpartlessKey):
    """Conversion table entry for a key that has no counterpart in this project.

    Converting the key raises :class:`NoCounterpart`, unless the value is ignored. The other keys of
    the file are still converted. The ignored values are the values that disable a feature, such as
    false and zero, and the values in :attr:`unless`.

    Attributes:
        advice: Advice at the end of the error message.
    """

    advice: str

    def convert(self, value: Any, file: ForeignFile) -> ConvertedSettings:
        """Raise ``NoCounterpart``, because the value turns on an unsupported feature.

        Values that turn the feature off never reach this method, because :meth:`has_no_effect`
        returns True for them.
        """
        raise NoCounterpart(f"{format_short_value(value)} is not supported{format_advice(self.advice)}")

    @property
    def remedy(self) -> str:
        """Advice on the refused key, such as ``FSDP shards every module; remove the key``."""
        return self.advice

    @property
    def summary(self) -> str:
        """Advice for the user, prefixed with ``not supported``."""
        return f"not supported{format_advice(self.advice)}"


@dataclass(frozen=True)
class NeverFalseKey(ForeignKey):
    """Table entry for a boolean key that must not be false.

    A run always does what the key enables, so this behavior cannot be turned off.

    Attributes:
        reason: Reason and advice for the error message if the value is false.
    """

    reason: str
    converts_empty_values: bool = field(default=True, kw_only=True)

    def convert(self, value: Any, file: ForeignFile) -> ConvertedSettings:
        """Accept the value if it is true or not set, and return no settings.

        No setting is needed, because a run always does what the key enables.

        Raises:
            NoCounterpart: If the value is false or zero.
        """
        if value == 0 or parse_boolean_word(value) is False:
            raise NoCounterpart(f"cannot be false: {self.reason}")
        return {}

    @property
    def remedy(self) -> str:
        """Text of :attr:`reason`: why the key must not be false, with advice."""
        return self.reason

    @property
    def summary(self) -> str:
        """Text for docs/keys.md: ``cannot be false``, followed by :attr:`reason`."""
        return f"cannot be false: {self.reason}"
