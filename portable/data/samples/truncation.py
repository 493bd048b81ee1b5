"""Truncate documents that are longer than a sample, and report the effect before training."""

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
"""Values of ``data.truncation``: remove the end or the start of a long document, exclude the document, or
raise an error.
"""
_CHUNK = 1 << 20  # documents or tokens that are processed at a time


@dataclass(frozen=True)
class TruncationStats:
    """Effect of truncation on the documents of a token cache.

    Attributes:
        mode: Value of ``data.truncation``.
        longest: Maximum number of tokens that a document keeps, including its last label.
        documents: Total number of documents.
        cut: Number of truncated documents.
        cut_tokens: Number of tokens removed by truncation.
        too_long: Number of documents excluded because they are too long, in mode ``drop``.
        unanswered: Number of documents excluded because none of their remaining tokens contributes to
            the loss.
        left_out: Sorted numbers of all excluded documents, int64 ``[excluded]``.

    If documents are concatenated, blocks are counted instead of documents.
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
        """Number of documents that are not excluded."""
        return self.documents - len(self.left_out)

    def __str__(self) -> str:
        """Describe how many documents are truncated or excluded. Empty if there are none."""
        end = "beginning" if self.mode == "start" else "end"
        parts = [
            (self.cut, f"{self.cut:,} of {self.documents:,} lose their {end}, {self.cut_tokens:,} tokens"),
            (self.too_long, f"{self.too_long:,} are left out as too long"),
            (self.unanswered, f"{self.unanswered:,} are left out: no trained token remains"),
        ]
        return "; ".join(text for count, text in parts if count)


def merge_truncation_stats(parts: Sequence[TruncationStats]) -> TruncationStats:
    """Add up the statistics of several token caches.

    The ``left_out`` of the result is only useful for counting, because its document numbers refer to
    different caches.
    """
    total = {
        name: sum(getattr(part, name) for part in parts)
        for name in ("documents", "cut", "cut_tokens", "too_long", "unanswered")
    }
    first = parts[0]
    left_out = np.concatenate([part.left_out for part in parts])
    return TruncationStats(mode=first.mode, longest=first.longest, left_out=left_out, **total)


def get_kept_slice(mode: Truncation, max_tokens: int) -> slice:
    """Return the slice of a document's tokens that remain after truncation.

    Args:
        mode: Value of ``data.truncation``. ``start`` keeps the last tokens, and other values keep the
            first.
        max_tokens: Maximum number of tokens to keep.
    """
    return slice(-max_tokens, None) if mode == "start" else slice(max_tokens)


def find_image_cut(tokens: TokenCache, number: int, num_inputs: int) -> int:
    """Return the number of a document's inputs to keep without splitting an image.

    An image that does not fit is removed completely, together with all tokens after it.

    Args:
        tokens: Token cache of the documents.
        number: Number of the document.
        num_inputs: Maximum number of inputs to keep. The token after them is only a label.
    """
    return next(
        (
            image.first_token
            for image in tokens.list_images(number)
            if image.first_token < num_inputs < image.first_token + image.num_tokens
        ),
        num_inputs,
    )


def compute_truncation_stats(
    tokens: TokenCache, mode: Truncation, seq_len: int, *, keep_last_input: bool = False
) -> TruncationStats:
    """Compute the effect of truncation on each document.

    Args:
        tokens: Token cache of the documents.
        mode: Value of ``data.truncation``.
        seq_len: Number of inputs per sample.
        keep_last_input: Whether the last token of a document is an input. If not, a document can have
            one more token, which is only a label.

    Raises:
        UserError: If a document is too long and ``mode`` is ``error``, or if all documents are
            excluded.
    """
    longest, left_out, cut, cut_tokens, too_long, unanswered = seq_len + (not keep_last_input), [], 0, 0, 0, 0
    total = tokens.num_documents
    for start in range(0, total, _CHUNK):
        offsets = tokens.offsets["text"][start : start + _CHUNK + 1].astype(np.int64)
        lengths = np.diff(offsets)
        is_longer = lengths > longest
        if mode == "error" and is_longer.any():
            modes = "end or drop" if tokens.has_images else "end, start or drop"
            raise UserError(
                f"data.truncation: the number of samples longer than data.seq_len ({seq_len}) is "
                f"{int(is_longer.sum()):,}, and the longest has {int(lengths.max()):,} tokens; raise "
                f"data.seq_len, or set data.truncation to {modes}"
            )
        is_left_out = is_longer if mode == "drop" else np.zeros(len(lengths), dtype=bool)
        too_long += int(is_left_out.sum())
        kept_lengths = np.minimum(lengths, longest)
        if tokens.trained_bits is not None:
            if tokens.has_images:
                for index in np.flatnonzero(is_longer).tolist():
                    num_inputs = find_image_cut(tokens, start + index, seq_len)
                    kept_lengths[index] = longest if num_inputs == seq_len else num_inputs
            first = offsets[1:] - kept_lengths if mode == "start" else offsets[:-1]
            # The first token of a sample is not a label.
            answered = _mark_ranges_with_trained_tokens(tokens, first + 1, first + kept_lengths)
            unanswered += int((~answered & ~is_left_out).sum())
            is_left_out |= ~answered
        is_cut = is_longer & ~is_left_out
        cut += int(is_cut.sum())
        cut_tokens += int((lengths - kept_lengths)[is_cut].sum())
        left_out.append(start + np.flatnonzero(is_left_out))
    stats = TruncationStats(
        mode, longest, total, cut, cut_tokens, too_long, unanswered, np.concatenate(left_out)
    )
    if not stats.num_kept:
        raise UserError(
            f"data.truncation: no sample is left ({stats}); raise data.seq_len ({seq_len}), or use another "
            "data.truncation"
        )
    return stats


def compute_block_truncation_stats(tokens: TokenCache, seq_len: int, num_blocks: int) -> TruncationStats:
    """Find the blocks of concatenated documents to exclude: all blocks without trained labels.

    Args:
        tokens: Token cache of the documents. It must have a loss mask.
        seq_len: Number of tokens per block.
        num_blocks: Number of blocks.

    Returns:
        Statistics about blocks instead of documents. ``left_out`` contains the numbers of excluded
        blocks.

    Raises:
        UserError: If all blocks are excluded.
    """
    starts = np.arange(num_blocks, dtype=np.int64) * seq_len + 1
    left_out = np.flatnonzero(~_mark_ranges_with_trained_tokens(tokens, starts, starts + seq_len))
    stats = TruncationStats("end", seq_len + 1, num_blocks, 0, 0, 0, len(left_out), left_out)
    if not stats.num_kept:
        raise UserError("data.train_on: no full sequence has a trained token; lower data.seq_len")
    return stats


def has_trained_end_token(tokens: TokenCache, stats: TruncationStats, end_token: int) -> bool:
    """Return whether ``end_token`` contributes to the loss in at least one document after truncation.

    Always True if truncation does not cut off the end of any document.

    Args:
        tokens: Token cache of the documents.
        stats: Effect of truncation on the documents.
        end_token: Token that ends an answer.
    """
    for number in range(tokens.num_documents) if stats.mode == "end" and stats.cut else ():
        labels, trained = tokens.read_document("text", number), tokens.read_trained_mask("text", number)
        counted = labels if trained is None else np.where(trained, labels, -1)
        num_kept = find_image_cut(tokens, number, stats.longest - 1) + 1
        if (counted[1:num_kept] == end_token).any():
            return True
    return not stats.cut or stats.mode != "end"


def _mark_ranges_with_trained_tokens(
    tokens: TokenCache, starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """Return, for each range of tokens, whether any of them contributes to the loss.

    Args:
        tokens: Token cache with a loss mask.
        starts: Start of each range, in increasing order, int64 ``[ranges]``.
        stops: Exclusive end of each range, int64 ``[ranges]``.

    Returns:
        Mask, bool ``[ranges]``.
    """
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
    """Order of the documents or blocks that are not excluded. It stores only the excluded numbers.

    Calling it with a position returns the number of the document at this position. The ``repr``
    contains a digest of the excluded numbers, because it is part of cache keys.

    Args:
        count: Number of documents that are not excluded.
        left_out: Sorted numbers of the excluded documents.
        shuffled: Whether to shuffle the documents. If not, they are ordered by number.
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
        """Return the number of the document at position ``index`` of the order."""
        position = index if self._order is None else self._order(index)
        return position + int(np.searchsorted(self._shifted, position, side="right"))

    def permute_array(self, indices: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return the numbers of the documents at several positions of the order.

        Args:
            indices: Positions in the order, an array of any shape.

        Returns:
            Document numbers, an int64 array with the shape of ``indices``.
        """
        positions = np.asarray(indices) if self._order is None else self._order.permute_array(indices)
        numbers: npt.NDArray[np.int64] = positions + np.searchsorted(self._shifted, positions, side="right")
        return numbers
