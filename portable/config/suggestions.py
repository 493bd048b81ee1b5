"""Suggestions for unknown keys and words, including names of other programs.

The names of other programs are in the tables of :mod:`portable.importing`, which this package does not import
because they are large. :mod:`portable.command_line` registers a function that loads the names when an error
message needs them.
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
    """The meaning of a name of another program, or of an earlier release of this program.

    Attributes:
        setting: Dotted key of the setting with the same meaning. Empty if there is none.
        advice: Instruction for the user. Empty if the setting has the same meaning.
    """

    setting: str = ""
    advice: str = ""


@dataclass(frozen=True)
class ForeignVocabulary:
    """Names of other programs, and names of earlier releases of this program.

    Attributes:
        keys: Meaning of each name of a setting. A name that ends with a star matches all names with this
            beginning.
        words: Translations of words for values, by dotted key and word. A translation is a word or a
            sentence.
        find_program: Function that receives the top-level content of a config file and returns the name of
            the program that it is for, or an empty string.
    """

    keys: Mapping[str, ForeignNameMeaning] = field(default_factory=dict)
    words: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    find_program: Callable[[Mapping[str, object]], str] = _return_no_program


_loaders: list[Callable[[], ForeignVocabulary]] = []


def register_foreign_vocabulary(load: Callable[[], ForeignVocabulary]) -> None:
    """Register the function that loads the names of other programs for an error message."""
    _loaders.append(load)


@cache
def load_foreign_vocabulary() -> ForeignVocabulary:
    """Load the registered names. The result is empty if no function is registered."""
    return _loaders[-1]() if _loaders else ForeignVocabulary()


def format_key_hint(name: str, candidates: Iterable[str], prefix: str = "") -> str:
    """Return the end of an error message about an unknown key.

    Args:
        name: The unknown key.
        candidates: The valid keys.
        prefix: Text before a suggested key, such as ``--``.

    Returns:
        ``"; did you mean X?"``, advice for a name of another program, or an empty string.
    """
    candidates = list(candidates)
    meaning = _look_up_foreign_name(name)
    if meaning.advice:
        return f"; {meaning.advice}"
    if meaning.setting in candidates:
        return f"; did you mean {prefix}{meaning.setting}?"
    return format_name_suggestion(name, candidates, prefix, compare_last_parts=True)


def format_remedy_hint(name: str) -> str:
    """Return ``"; "`` and the advice for a name of another program, or an empty string if there is none."""
    advice = _look_up_foreign_name(name).advice
    return f"; {advice}" if advice else ""


def format_word_hint(key: str, word: str, words: Iterable[str]) -> str:
    """Return the end of an error message about an invalid word.

    Args:
        key: Dotted key of the setting.
        word: The invalid word.
        words: The valid words.

    Returns:
        ``"; did you mean X?"`` or an empty string.
    """
    translation = load_foreign_vocabulary().words.get(key, {}).get(word.lower())
    return format_name_suggestion(word, words) if translation is None else f"; did you mean {translation}?"


def _look_up_foreign_name(name: str) -> ForeignNameMeaning:
    """Return the meaning of a name of another program. Both fields are empty if the name is unknown."""
    names = load_foreign_vocabulary().keys
    name = name.lower().replace("-", "_")
    last_part = name.rpartition(".")[2]
    for candidate in (name, last_part):
        if candidate in names:
            return names[candidate]
    beginnings = (key for key in names if key.endswith("*") and last_part.startswith(key[:-1]))
    return names.get(next(beginnings, ""), ForeignNameMeaning())
