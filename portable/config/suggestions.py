"""Suggestions for error messages about unknown keys and values, including names of other trainers.

The tables of these names are in :mod:`portable.importing`. Because they are large, this package
does not import them. Instead, :mod:`portable.command_line` registers a function that loads them
when an error message needs them.
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
        keys: Meanings of setting names. A name that ends with a star matches all names with this
            prefix.
        words: Translations of values, keyed by the setting's dotted key and then by the foreign value.
            A translation is either a valid value or a longer text for the error message.
        find_program: Function that detects from the top-level content which program a config file
            belongs to. It returns the name of the program, or an empty string if it is unknown.
    """

    keys: Mapping[str, ForeignNameMeaning] = field(default_factory=dict)
    words: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    find_program: Callable[[Mapping[str, object]], str] = _return_no_program


_loaders: list[Callable[[], ForeignVocabulary]] = []


def register_foreign_vocabulary(load: Callable[[], ForeignVocabulary]) -> None:
    """Register the function that loads the vocabulary of other trainers when an error message needs it."""
    _loaders.append(load)


@cache
def load_foreign_vocabulary() -> ForeignVocabulary:
    """Load the vocabulary of other trainers. Cached. Empty if no function is registered."""
    return _loaders[-1]() if _loaders else ForeignVocabulary()


def format_key_hint(name: str, candidates: Iterable[str], prefix: str = "") -> str:
    """Return a hint that ends an error message about an unknown key.

    Args:
        name: The unknown key.
        candidates: The valid keys.
        prefix: Text to put before a suggested key, such as ``--``.

    Returns:
        ``"; did you mean X?"``, advice for a name of another trainer, or an empty string.
    """
    candidates = list(candidates)
    meaning = _look_up_foreign_name(name)
    if meaning.advice:
        return f"; {meaning.advice}"
    if meaning.setting in candidates:
        return f"; did you mean {prefix}{meaning.setting}?"
    return format_name_suggestion(name, candidates, prefix, compare_last_parts=True)


def format_remedy_hint(name: str) -> str:
    """Return a hint that ends an error message about a name from another trainer.

    Returns:
        ``"; "`` followed by the advice. Empty if there is none.
    """
    advice = _look_up_foreign_name(name).advice
    return f"; {advice}" if advice else ""


def format_word_hint(key: str, word: str, words: Iterable[str]) -> str:
    """Return a hint that ends an error message about an invalid value of a setting with fixed values.

    Args:
        key: Dotted key of the setting.
        word: The invalid value.
        words: The valid values.

    Returns:
        ``"; did you mean X?"`` or an empty string.
    """
    translation = load_foreign_vocabulary().words.get(key, {}).get(word.lower())
    return format_name_suggestion(word, words) if translation is None else f"; did you mean {translation}?"


def _look_up_foreign_name(name: str) -> ForeignNameMeaning:
    """Find the meaning of a name from another trainer. Both fields are empty if the name is unknown.

    Looks up the complete name first, then the part after the last dot.
    """
    names = load_foreign_vocabulary().keys
    name = name.lower().replace("-", "_")
    last_part = name.rpartition(".")[2]
    for candidate in (name, last_part):
        if candidate in names:
            return names[candidate]
    beginnings = (key for key in names if key.endswith("*") and last_part.startswith(key[:-1]))
    return names.get(next(beginnings, ""), ForeignNameMeaning())
