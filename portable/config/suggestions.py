"""Suggest corrections for unknown keys and values in error messages.

Setting names and values of other trainers are also recognized. For these, the suggestion is the
equivalent setting or value of this project.

The tables of foreign names and values are in :mod:`portable.importing`. They are large, so this
package does not import them. Instead, :mod:`portable.command_line` registers a function that loads
the tables when an error message needs them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from portable.converters.similar_names import format_name_suggestion

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


def _return_no_program(values: Mapping[str, object]) -> str:
    """Return an empty string. Default of :attr:`ForeignVocabulary.find_program`."""
    return ""


class ForeignNameMeaning(NamedTuple):
    """Meaning of a setting name from another trainer, or from a previous release of this project.

    Attributes:
        setting: Dotted key of the setting with the same meaning. Empty if there is none.
        advice: Instruction for the user, used in error messages. Empty if it is sufficient to use
            ``setting`` instead.
    """

    setting: str = ""
    advice: str = ""


@dataclass(frozen=True)
class ForeignVocabulary:
    """Names of settings and values in other trainers, and in previous releases of this project.

    Attributes:
        keys: Mapping from a foreign setting name to its meaning: the equivalent setting, or advice.
            Names are in lower case, with underscores instead of hyphens. A name that ends with a
            star matches all names with this prefix.
        words: Translations of foreign values, keyed by the dotted key of the setting or by the name
            of the section, and then by the foreign value in lower case. A translation is the text
            to suggest: a valid value, or a longer text, such as ``lora, with adapter.base: nf4`` or
            ``zero1, zero2 or zero3``.
        find_program: Function that takes the top-level content of a config file. It returns the
            name of the trainer that the file belongs to, or an empty string if it does not
            recognize the file.
    """

    keys: Mapping[str, ForeignNameMeaning] = field(default_factory=dict)
    words: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    find_program: Callable[[Mapping[str, object]], str] = _return_no_program


_loaders: list[Callable[[], ForeignVocabulary]] = []


def register_foreign_vocabulary(load: Callable[[], ForeignVocabulary]) -> None:
    """Register the function that loads the setting names and values of other trainers.

    Replaces a function that was registered earlier. The function is called at most once, when an
    error message first needs these names. Functions that are registered later have no effect.
    """
    _loaders.append(load)


@cache
def load_foreign_vocabulary() -> ForeignVocabulary:
    """Load the names of settings and values that other trainers use.

    The function registered last with :func:`register_foreign_vocabulary` loads them, and the result
    is cached. The vocabulary is empty if no function is registered.
    """
    return _loaders[-1]() if _loaders else ForeignVocabulary()


def format_key_hint(name: str, candidates: Iterable[str], prefix: str = "") -> str:
    """Return a hint to append to an error message about an unknown key.

    Args:
        name: The unknown key.
        candidates: The valid keys.
        prefix: Text to put before a suggested key, such as ``--``.

    Returns:
        Advice, formatted by :func:`format_advice`, if the key is known from another trainer, such
        as TRL, and there is advice for it. If there is none, ``"; did you mean X?"`` for a valid
        key with the same meaning or a similar name. An empty string if neither applies.
    """
    candidates = list(candidates)
    meaning = _look_up_foreign_name(name)
    if meaning.advice:
        return format_advice(meaning.advice)
    if meaning.setting in candidates:
        return f"; did you mean {prefix}{meaning.setting}?"
    return format_name_suggestion(name, candidates, prefix, compare_last_parts=True)


def format_advice(advice: str) -> str:
    """Format advice, with leading punctuation, so that it can be appended to a message.

    Args:
        advice: A remedy, or a reason and a remedy in the form ``reason; remedy``.

    Returns:
        ``"; remedy"`` or ``": reason; remedy"``.
    """
    return f"{':' if '; ' in advice else ';'} {advice}"


def format_remedy_hint(name: str) -> str:
    """Return the advice for a name from another trainer, to append to an error message.

    Returns:
        The advice, formatted by :func:`format_advice`. An empty string if there is none for this
        name.
    """
    advice = _look_up_foreign_name(name).advice
    return format_advice(advice) if advice else ""


def format_word_hint(key: str, word: str, words: Iterable[str]) -> str:
    """Return a hint to append to an error message about a value that a setting does not allow.

    The setting has a fixed set of valid words. It may also accept other types, such as numbers.

    Args:
        key: Dotted key of the setting.
        word: The invalid value.
        words: The valid words.

    Returns:
        ``"; did you mean X?"`` if the value is known from another trainer or similar to a valid
        word. Otherwise an empty string.
    """
    translation = load_foreign_vocabulary().words.get(key, {}).get(word.lower())
    return format_name_suggestion(word, words) if translation is None else f"; did you mean {translation}?"


def _look_up_foreign_name(name: str) -> ForeignNameMeaning:
    """Find the meaning of a name from another trainer.

    Case is ignored, and hyphens count as underscores. Looks up the complete name first, then the
    part after the last dot. If both are missing, looks for a name with a star that matches the last
    part. If the name is unknown, both fields of the result are empty.
    """
    names = load_foreign_vocabulary().keys
    name = name.lower().replace("-", "_")
    last_part = name.rpartition(".")[2]
    for candidate in (name, last_part):
        if candidate in names:
            return names[candidate]
    beginnings = (key for key in names if key.endswith("*") and last_part.startswith(key[:-1]))
    return names.get(next(beginnings, ""), ForeignNameMeaning())
