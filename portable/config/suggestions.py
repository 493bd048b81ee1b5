"""Suggestions for unknown keys and words, also for names of other programs.

The names of other programs are in the tables of the importer, which are large and which this package does not
import. :mod:`portable.command_line` registers a function that loads the names when an error message needs
them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from converters.similar_names import suggest_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


def _find_no_program(values: Mapping[str, object]) -> str:
    return ""


@dataclass(frozen=True)
class ForeignNames:
    """Names of other programs, and names of earlier releases of this program.

    Attributes:
        keys: Our setting, or a sentence with a remedy, by the name of a setting. A name that ends with
            a star is the beginning of several names.
        words: Our word, or a sentence, by the other word for a value, by our dotted key.
        find_program: Function that returns the name of the program whose config file has these top-level
            keys, or an empty string.
    """

    keys: Mapping[str, str] = field(default_factory=dict)
    words: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    find_program: Callable[[Mapping[str, object]], str] = _find_no_program


_loaders: list[Callable[[], ForeignNames]] = []


def register_foreign_names(load: Callable[[], ForeignNames]) -> None:
    """Register the function that loads the names of other programs for an error message."""
    _loaders.append(load)


@cache
def load_foreign_names() -> ForeignNames:
    """Load the registered names. No names are known without a registered function."""
    return _loaders[-1]() if _loaders else ForeignNames()


def suggest_key(name: str, candidates: Iterable[str], prefix: str = "") -> str:
    """Return the end of a message about an unknown key: ``"; did you mean X?"``, a remedy, or nothing.

    Args:
        name: The unknown key.
        candidates: The valid keys.
        prefix: Text in front of a suggested key, such as ``--``.
    """
    candidates = list(candidates)
    hint = _find_hint(name)
    if " " in hint:
        return f"; {hint}"
    if hint in candidates:
        return f"; did you mean {prefix}{hint}?"
    return suggest_name(name, candidates, prefix, compare_last_parts=True)


def find_remedy(name: str) -> str:
    """Return ``"; do this"`` for a name of another program if it takes more than another name, or nothing."""
    hint = _find_hint(name)
    return f"; {hint}" if " " in hint else ""


def suggest_word(key: str, word: str, words: Iterable[str]) -> str:
    """Return the end of a message about an invalid word, as :func:`suggest_key` does.

    Args:
        key: Dotted key of the setting.
        word: The invalid word.
        words: The valid words.
    """
    translation = load_foreign_names().words.get(key, {}).get(word.lower())
    return suggest_name(word, words) if translation is None else f"; did you mean {translation}?"


def _find_hint(name: str) -> str:
    """Return our setting, or a sentence, for a name of another program. Empty if the name is unknown."""
    names = load_foreign_names().keys
    name = name.lower().replace("-", "_")
    last_part = name.rpartition(".")[2]
    for candidate in (name, last_part):
        if candidate in names:
            return names[candidate]
    beginnings = (key for key in names if key.endswith("*") and last_part.startswith(key[:-1]))
    return names.get(next(beginnings, ""), "")
