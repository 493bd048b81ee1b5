"""Suggestions for misspelled names: keys, words, files, tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

SIMILARITY = 0.72
"""Lowest ratio of matching characters at which a name counts as similar, as in `difflib`."""
_MAX_LENGTH = 120
"""Characters of a misspelled name that are compared. A longer name is not a misspelling."""
_LAST_PART_PENALTY = 0.05
"""Disadvantage of a name if only its last part is similar."""


def find_similar_names(
    name: str, candidates: Iterable[str], *, max_results: int = 1, compare_last_parts: bool = False
) -> list[str]:
    """Find the candidates that are most similar to a misspelled name.

    Upper and lower case are the same, and so are dashes and underscores.

    Args:
        name: The misspelled name.
        candidates: The valid names.
        max_results: Largest number of names to return.
        compare_last_parts: Whether a dotted candidate is also similar if only its last part is:
            `learning_rat` is like `train.learning_rate`.

    Returns:
        Similar names, the most similar first, and equally similar names in the order of the candidates. Empty
        if no candidate is similar.
    """
    from difflib import SequenceMatcher  # only for an error, because it takes milliseconds

    full_matcher, last_part_matcher = SequenceMatcher(), SequenceMatcher()
    folded_name = _normalize_name(name)
    full_matcher.set_seq2(folded_name)
    last_part_matcher.set_seq2(folded_name.rpartition(".")[2])

    def compute_ratio(matcher: SequenceMatcher[str], text: str) -> float:
        matcher.set_seq1(text)
        # The first two ratios are upper bounds that cost less.
        if min(matcher.real_quick_ratio(), matcher.quick_ratio()) < SIMILARITY:
            return 0.0
        return matcher.ratio()

    scores: dict[str, float] = {}
    for candidate in candidates:
        folded = _normalize_name(candidate)
        score = compute_ratio(full_matcher, folded)
        if compare_last_parts:
            score = max(
                score, compute_ratio(last_part_matcher, folded.rpartition(".")[2]) - _LAST_PART_PENALTY
            )
        if score >= SIMILARITY:
            scores[candidate] = score
    return sorted(scores, key=lambda candidate: scores[candidate], reverse=True)[:max_results]


def format_name_suggestion(
    name: str, candidates: Iterable[str], prefix: str = "", *, compare_last_parts: bool = False
) -> str:
    """Return `"; did you mean X?"`, the end of an error message, or an empty string.

    Args:
        name: The misspelled name.
        candidates: The valid names.
        prefix: Text in front of the suggested name, such as `--`.
        compare_last_parts: See `find_similar_names`.
    """
    similar = find_similar_names(name, candidates, compare_last_parts=compare_last_parts)
    return f"; did you mean {prefix}{similar[0]}?" if similar else ""


def _normalize_name(name: str) -> str:
    return name.lower().replace("-", "_")[:_MAX_LENGTH]
