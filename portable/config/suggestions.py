"""Suggestions in error messages about unknown keys and values, including the names used by other trainers.

The names used by other trainers are in the tables of :mod:`portable.importing`. This package does not import
the tables, because they are large. Instead, :mod:`portable.command_line` registers a function that loads them
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
    """Return an empty string: the default of :attr:`ForeignVocabulary.find_program`."""
    return ""


class ForeignNameMeaning(NamedTuple):
    """Meaning of a name of a setting in another trainer, or in a previous release of this trainer.

    Attributes:
        setting: Dotted key of this trainer's setting with the same meaning. Empty if there is none.
        advice: Instruction for the user, used in error messages. Empty if ``setting`` can simply be used
            instead.
    """

    setting: str = ""
    advice: str = ""


@dataclass(frozen=True)
class ForeignVocabulary:
    """Names used by other trainers, and names of previous releases of this trainer.

    Attributes:
        keys: Meaning of each name of a setting. A name that ends with a star matches all names with this
            prefix.
        words: Translations of values, keyed by the dotted key of the setting and then by the foreign value. A
            translation is a value of this trainer, or a longer text for the error message.
        find_program: Function that takes the top-level content of a config file, and returns the name of the
            program whose config file it is. Returns an empty string for other content.
    """

    keys: Mapping[str, ForeignNameMeaning] = field(default_factory=dict)
    words: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    find_program: Callable[[Mapping[str, object]], str] = _return_no_program


_loaders: list[Callable[[], ForeignVocabulary]] = []


def register_foreign_vocabulary(load: Callable[[], ForeignVocabulary]) -> None:
    """Register the function that loads the names used by other trainers, when an error message needs them."""
    _loaders.append(load)


@cache
def load_foreign_vocabulary() -> ForeignVocabulary:
    """Load the names used by other trainers. The result is cached, and empty if no function is registered."""
    return _loaders[-1]() if _loaders else ForeignVocabulary()


def format_key_hint(name: str, candidates: Iterable[str], prefix: str = "") -> str:
    """Return the end of an error message about an unknown key.

    Args:
        name: The unknown key.
        candidates: The valid keys.
        prefix: Text before a suggested key, such as ``--``.

    Returns:
        ``"; did you mean X?"``, advice for a name used by another trainer, or an empty string.
    """
    candidates = list(candidates)
    meaning = _look_up_foreign_name(name)
    if meaning.advice:
        return f"; {meaning.advice}"
    if meaning.setting in candidates:
        return f"; did you mean {prefix}{meaning.setting}?"
    return format_name_suggestion(name, candidates, prefix, compare_last_parts=True)


def format_remedy_hint(name: str) -> str:
    """Return the end of an error message about a name used by another trainer.

    Returns:
        ``"; "`` and the advice for the name. Empty if there is no advice.
    """
    advice = _look_up_foreign_name(name).advice
    return f"; {advice}" if advice else ""


def format_word_hint(key: str, word: str, words: Iterable[str]) -> str:
    """Return the end of an error message about an invalid value of a setting that takes certain words.

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
    """Find the meaning of a name used by another trainer. Both fields are empty if the name is unknown.

    The complete name is looked up first, then the part after the last dot.
    """
    names = load_foreign_vocabulary().keys
    name = name.lower().replace("-", "_")
    last_part = name.rpartition(".")[2]
    for candidate in (name, last_part):
        if candidate in names:
            return names[candidate]
    beginnings = (key for key in names if key.endswith("*") and last_part.startswith(key[:-1]))
    return names.get(next(beginnings, ""), ForeignNameMeaning())
