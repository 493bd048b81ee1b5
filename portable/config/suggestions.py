"""Suggestions for unknown keys and words, also for names of other programs.

The names of other programs are in the tables of the importer, which are large and which this package does not
import. :mod:`portable.command_line` registers a function that loads the names when an error message needs
them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from portable.converters.similar_names import format_name_suggestion

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


def _return_no_program(values: Mapping[str, object]) -> str:
    return ""


class ForeignNameMeaning(NamedTuple):
    """The meaning of a name of another program, or of an earlier release of this program.

    Attributes:
        setting: Our setting; empty if the name has none.
        advice: What to do instead; empty if the setting is enough.
    """

    setting: str = ""
    advice: str = ""


@dataclass(frozen=True)
class ForeignVocabulary:
    """Names of other programs, and names of earlier releases of this program.

    Attributes:
        keys: Meaning of a name of a setting. A name that ends with a star is the beginning of several names.
        words: Our word, or a sentence, by the other word for a value, by our dotted key.
        find_program: Function that returns the name of the program whose config file has these top-level
            keys, or an empty string.
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
    """Load the registered names. No names are known without a registered function."""
    return _loaders[-1]() if _loaders else ForeignVocabulary()


def format_key_hint(name: str, candidates: Iterable[str], prefix: str = "") -> str:
    """Return the end of a message about an unknown key: ``"; did you mean X?"``, a remedy, or nothing.

    Args:
        name: The unknown key.
        candidates: The valid keys.
        prefix: Text in front of a suggested key, such as ``--``.
    """
    candidates = list(candidates)
    meaning = _look_up_foreign_name(name)
    if meaning.advice:
        return f"; {meaning.advice}"
    if meaning.setting in candidates:
        return f"; did you mean {prefix}{meaning.setting}?"
    return format_name_suggestion(name, candidates, prefix, compare_last_parts=True)


def format_remedy_hint(name: str) -> str:
    """Return ``"; do this"`` for a name of another program if it takes more than another name, or nothing."""
    advice = _look_up_foreign_name(name).advice
    return f"; {advice}" if advice else ""


def format_word_hint(key: str, word: str, words: Iterable[str]) -> str:
    """Return the end of a message about an invalid word, as :func:`format_key_hint` does.

    Args:
        key: Dotted key of the setting.
        word: The invalid word.
        words: The valid words.
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
