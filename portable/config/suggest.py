"""Suggestions for unknown names and words."""

from __future__ import annotations

from difflib import SequenceMatcher
from typing import TYPE_CHECKING

from portable.config.foreign import find_remedy, load_foreign_names

if TYPE_CHECKING:
    from collections.abc import Iterable

_NEAR = 0.72
_LONGEST = 120
_A_SETTING = "train.steps"  # if it is a candidate, all settings are


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate most similar to ``name`` or its last part, or None."""
    name = name.lower().replace("-", "_")[:_LONGEST]
    leaf = name.rpartition(".")[2]
    candidates = list(candidates)
    synonym = find_remedy(name)
    if synonym in candidates:
        return synonym
    best, score = None, _NEAR
    for candidate in candidates:
        # A full match outranks a match of the last part: train.step is train.steps, not log.every_steps.
        folded = candidate.lower()
        likeness = max(_ratio(name, folded), _ratio(leaf, folded.rpartition(".")[2]) - 0.05)
        if likeness >= score:
            best, score = candidate, likeness + 1e-9
    return best


def did_you_mean(name: str, candidates: Iterable[str], prefix: str = "") -> str:
    """Return ``"; did you mean X?"``, a remedy, or an empty string."""
    candidates = list(candidates)
    if (remedy := what_to_do(name)) and _A_SETTING in candidates:
        return remedy
    found = nearest(name, candidates)
    return f"; did you mean {prefix}{found}?" if found else ""


def what_to_do(name: str) -> str:
    """The remedy for ``name`` as ``"; do this"``, if it is more than another name."""
    remedy = find_remedy(name.lower().replace("-", "_"))
    return f"; {remedy}" if remedy is not None and " " in remedy else ""


def did_you_mean_word(key: str, word: str, words: Iterable[str]) -> str:
    """The same for an invalid ``word`` of the setting ``key``; ``words`` are valid."""
    known = load_foreign_names().WORDS.get(key, {}).get(word.lower())
    return f"; did you mean {known}?" if known is not None else did_you_mean(word, words)


def _ratio(a: str, b: str) -> float:
    return SequenceMatcher(None, a, b).ratio()
