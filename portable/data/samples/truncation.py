"""What happens to documents that are longer than a sample, said before the first step."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from portable.data.samples.order import Permutation
from portable.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portable.data.tokens.cache import TokenCache

Truncation = Literal["end", "start", "drop", "error"]
_CHUNK = 1 << 20  # documents, or tokens where their masks are counted


@dataclass(frozen=True)
class TruncationStats:
    """The documents of a cache after truncation to ``seq_len + 1`` tokens: inputs and shifted labels.

    Attributes:
        mode: ``data.truncation``.
        longest: tokens that are kept of a document.
        documents: all of them.
        cut: documents that lose tokens, and stay.
        cut_tokens: how many they lose.
        too_long: documents that are left out because they are longer, with ``drop``.
        unanswered: documents that are left out because none of the tokens kept is trained.
        left_out: the numbers of all that are left out, in order.
    """

    mode: Truncation
    longest: int
    documents: int
    cut: int
    cut_tokens: int
    too_long: int
    unanswered: int
    left_out: npt.NDArray[np.int64]

    @property
    def num_kept(self) -> int:
        return self.documents - len(self.left_out)

    def __str__(self) -> str:
        """What is lost, in words; empty if nothing is."""
        end = "beginning" if self.mode == "start" else "end"
        parts = [
            (self.cut, f"{self.cut:,} of {self.documents:,} lose their {end}, {self.cut_tokens:,} tokens"),
            (self.too_long, f"{self.too_long:,} are left out as too long"),
            (self.unanswered, f"{self.unanswered:,} are left out: no trained token remains"),
        ]
        return "; ".join(text for count, text in parts if count)


def merge_truncation_stats(parts: Sequence[TruncationStats]) -> TruncationStats:
    """The same of several caches together. ``left_out`` then only tells how many."""
    total = {
        name: sum(getattr(part, name) for part in parts)
        for name in ("documents", "cut", "cut_tokens", "too_long", "unanswered")
    }
    first = parts[0]
    left_out = np.concatenate([part.left_out for part in parts])
    return TruncationStats(mode=first.mode, longest=first.longest, left_out=left_out, **total)


def get_kept_slice(mode: Truncation, max_tokens: int) -> slice:
    """The tokens of a document that are kept."""
    return slice(-max_tokens, None) if mode == "start" else slice(max_tokens)


def compute_truncation_stats(
    tokens: TokenCache, mode: Truncation, seq_len: int, *, keep_last_input: bool = False
) -> TruncationStats:
    """Count what truncation does to each document.

    Args:
        keep_last_input: the last token is among the ``seq_len`` inputs, and not one more that is a label
        only.

    Raises:
        UserError: a document is longer with ``error``, or none is left.
    """
    longest, left_out, cut, cut_tokens, too_long, unanswered = seq_len + (not keep_last_input), [], 0, 0, 0, 0
    total = tokens.num_documents
    for start in range(0, total, _CHUNK):
        offsets = tokens.offsets["text"][start : start + _CHUNK + 1].astype(np.int64)
        lengths = np.diff(offsets)
        is_longer = lengths > longest
        if mode == "error" and is_longer.any():
            raise UserError(
                f"data.truncation: {int(is_longer.sum()):,} samples are longer than data.seq_len {seq_len}, "
                f"the longest has {int(lengths.max()):,} tokens; raise data.seq_len, or set data.truncation "
                "to end, start or drop"
            )
        is_left_out = is_longer if mode == "drop" else np.zeros(len(lengths), dtype=bool)
        too_long += int(is_left_out.sum())
        if tokens.trained_bits is not None:
            kept_lengths = np.minimum(lengths, longest)
            first = offsets[1:] - kept_lengths if mode == "start" else offsets[:-1]
            # The first token of a sample is no label.
            answered = _mark_ranges_with_trained_tokens(tokens, first + 1, first + kept_lengths)
            unanswered += int((~answered & ~is_left_out).sum())
            is_left_out |= ~answered
        is_cut = is_longer & ~is_left_out
        cut += int(is_cut.sum())
        cut_tokens += int((lengths[is_cut] - longest).sum())
        left_out.append(start + np.flatnonzero(is_left_out))
    stats = TruncationStats(
        mode, longest, total, cut, cut_tokens, too_long, unanswered, np.concatenate(left_out)
    )
    if not stats.num_kept:
        raise UserError(
            f"data.truncation: no sample is left ({stats}); raise data.seq_len, which is {seq_len}, or use "
            "another data.truncation"
        )
    return stats


def compute_block_truncation_stats(tokens: TokenCache, seq_len: int, num_blocks: int) -> TruncationStats:
    """The same for blocks of ``seq_len`` tokens of all documents: those without a trained label are left out.

    Raises:
        UserError: none is left.
    """
    starts = np.arange(num_blocks, dtype=np.int64) * seq_len + 1
    left_out = np.flatnonzero(~_mark_ranges_with_trained_tokens(tokens, starts, starts + seq_len))
    stats = TruncationStats("end", seq_len + 1, num_blocks, 0, 0, 0, len(left_out), left_out)
    if not stats.num_kept:
        raise UserError("data.train_on: no full sequence has a trained token; lower data.seq_len")
    return stats


def has_trained_end_token(tokens: TokenCache, stats: TruncationStats, end_token: int) -> bool:
    """Whether any document still has the token ``end_token`` as a trained label."""
    for number in range(tokens.num_documents) if stats.mode == "end" and stats.cut else ():
        labels, trained = tokens.read_document("text", number), tokens.read_trained_mask("text", number)
        counted = labels if trained is None else np.where(trained, labels, -1)
        if (counted[1 : stats.longest] == end_token).any():
            return True
    return not stats.cut or stats.mode != "end"


def _mark_ranges_with_trained_tokens(
    tokens: TokenCache, starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """Whether any token in each of the ranges is trained. The ranges are in order."""
    has_trained = np.zeros(len(starts), dtype=bool)
    index = 0
    while index < len(starts):
        begin = int(starts[index])
        last = max(index + 1, int(np.searchsorted(stops, begin + _CHUNK)))
        bits: Any = tokens.read_trained_range(begin, max(begin, int(stops[last - 1])))
        counts = np.concatenate(([0], np.cumsum(bits, dtype=np.int64)))
        ends = np.maximum(stops[index:last], starts[index:last])
        has_trained[index:last] = (
            counts[np.minimum(ends - begin, len(bits))]
            > counts[np.minimum(starts[index:last] - begin, len(bits))]
        )
        index = last
    return has_trained


class KeptOrder:
    """A shuffle of the documents that are not left out; takes memory only for those that are.

    Args:
        count: how many are not.
        left_out: the numbers of the others, in order.
        shuffled: False keeps the order.
    """

    def __init__(self, count: int, left_out: npt.NDArray[np.int64], *, shuffled: bool = True) -> None:
        self._order = Permutation(count, seed=0) if shuffled else None
        self._count = count
        self._shifted = left_out - np.arange(len(left_out))
        self._digest = hashlib.blake2b(left_out.tobytes(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"KeptOrder({len(self)}, {self._digest})"

    def __call__(self, index: int) -> int:
        """The number of the document at ``index`` of the shuffle."""
        position = index if self._order is None else self._order(index)
        return position + int(np.searchsorted(self._shifted, position, side="right"))

    def permute_array(self, indices: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """The same for an array of any shape."""
        positions = np.asarray(indices) if self._order is None else self._order.permute_array(indices)
        numbers: npt.NDArray[np.int64] = positions + np.searchsorted(self._shifted, positions, side="right")
        return numbers
