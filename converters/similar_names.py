"""Suggest corrections for misspelled keys, values, file names, and tensor names in error messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

SIMILARITY = 0.72
"""Lowest ratio of matching characters at which a name counts as similar, as in `difflib`."""
_MAX_LENGTH = 120
"""Maximum number of characters to compare, because longer names are not misspellings."""
_LAST_PART_PENALTY = 0.05
"""Amount by which the similarity is reduced if only the last part of a candidate is similar."""


def find_similar_names(
    name: str, candidates: Iterable[str], *, max_results: int = 1, compare_last_parts: bool = False
) -> list[str]:
    """Find the candidates that are most similar to a misspelled name.

    A candidate is similar if its `difflib` ratio is at least `SIMILARITY`. Case is ignored, dashes
    count as underscores, and only the first `_MAX_LENGTH` characters are compared.

    Args:
        name: Misspelled name.
        candidates: Valid names.
        max_results: Maximum number of names to return.
        compare_last_parts: Whether a dotted candidate is also similar if only its last component is
            similar to the last component of `name`. For example, `learning_rat` is then similar to
            `train.learning_rate`. Its ratio is reduced by `_LAST_PART_PENALTY`.

    Returns:
        Similar names, most similar first. Equally similar names are in the order of the candidates.
        Empty if no candidate is similar.
    """
    from difflib import SequenceMatcher  # not at the top, because the import takes milliseconds

    full_matcher, last_part_matcher = SequenceMatcher(), SequenceMatcher()
    folded_name = _normalize_and_truncate_name(name)
    full_matcher.set_seq2(folded_name)
    last_part_matcher.set_seq2(folded_name.rpartition(".")[2])

    def compute_ratio(matcher: SequenceMatcher[str], text: str) -> float:
        matcher.set_seq1(text)
        # The first two ratios are upper bounds on `ratio` that are cheaper to compute.
        if min(matcher.real_quick_ratio(), matcher.quick_ratio()) < SIMILARITY:
            return 0.0
        return matcher.ratio()

    scores: dict[str, float] = {}
    for candidate in candidates:
        folded = _normalize_and_truncate_name(candidate)
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
    """Format the end of an error message that suggests a similar name.

    Args:
        name: Misspelled name.
        candidates: Valid names.
        prefix: Text before the suggested name, such as `--`.
        compare_last_parts: Whether a dotted candidate is also similar if only its last component is
            similar. See `find_similar_names`.

    Returns:
        A text such as `"; did you mean X?"`, or an empty string if no candidate is similar.
    """
    similar = find_similar_names(name, candidates, compare_last_parts=compare_last_parts)
    return f"; did you mean {prefix}{similar[0]}?" if similar else ""


def _normalize_and_truncate_name(name: str) -> str:
    return name.lower().replace("-", "_")[:_MAX_LENGTH]
