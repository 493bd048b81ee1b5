"""Truncate documents that are longer than a sample, and report the effect before training."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from portable.data.samples.order import Permutation
from portable.errors import UserError
from portable.formatting import format_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portable.data.tokens.cache import TokenCache

Truncation = Literal["end", "start", "drop", "error"]
"""Values of ``data.truncation``: how to treat a document that is too long.

``end`` and ``start`` remove the end or the start of the document, ``drop`` excludes the document,
and ``error`` raises an error.
"""
_CHUNK = 1 << 20  # documents or tokens processed at a time


class NoSampleLeftError(UserError):
    """Raised if truncation or the loss mask excludes all samples of a source."""


@dataclass(frozen=True)
class TruncationStats:
    """Effect of truncation on the documents of a token cache.

    If documents are concatenated, all attributes refer to blocks instead of documents.

    Attributes:
        mode: Value of ``data.truncation``.
        longest: Maximum number of tokens that truncation keeps of a document. It includes the last
            token, even if this token is only a label.
        documents: Total number of documents.
        cut: Number of truncated documents, without the excluded documents.
        cut_tokens: Number of tokens that truncation removes from these documents.
        too_long: Number of documents that mode ``drop`` excludes because they are too long.
        unanswered: Number of documents excluded because none of their remaining tokens contributes
            to the loss.
        left_out: Sorted indices of all excluded documents, int64 ``[excluded]``.
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
        """Describe how many documents are truncated or excluded. Empty if none are."""
        end = "beginning" if self.mode == "start" else "end"
        parts = [
            (
                self.cut,
                f"truncated at the {end} ({format_count(self.cut_tokens, 'token')} cut off in total)",
            ),
            (self.too_long, "left out because of their length"),
            (self.unanswered, "left out because no trained token remains"),
        ]
        return "; ".join(
            f"{count:,} of {self.documents:,} samples {'is' if count == 1 else 'are'} {text}"
            for count, text in parts
            if count
        )


def merge_truncation_stats(parts: Sequence[TruncationStats]) -> TruncationStats:
    """Add up the truncation statistics of several token caches, at least one.

    ``mode`` and ``longest`` are taken from the first cache, because all caches of a run are
    truncated with the same settings.

    In the result, ``left_out`` contains the indices of the excluded documents of all caches, one
    cache after the other. Only the length of this array is meaningful, because the indices refer to
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
    """Return the slice that selects the tokens of a document to keep.

    Args:
        mode: Value of ``data.truncation``. ``start`` removes tokens at the start of the document,
            so the last tokens are kept. With any other value, the first tokens are kept.
        max_tokens: Maximum number of tokens to keep.
    """
    return slice(-max_tokens, None) if mode == "start" else slice(max_tokens)


def find_image_cut(tokens: TokenCache, number: int, num_inputs: int) -> int:
    """Return how many input tokens of a document to keep, so that truncation does not split an image.

    An image that does not fit is removed completely, together with all tokens after it.

    Args:
        tokens: Token cache that contains the document.
        number: Number of the document.
        num_inputs: Maximum number of input tokens to keep. The next token is not included, because
            it is used only as a label.
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
    """Compute how many documents are truncated, and which documents are excluded.

    A document is excluded if none of its remaining tokens contributes to the loss. If ``mode`` is
    ``drop``, a document is also excluded if it is too long.

    Args:
        tokens: Token cache of the documents.
        mode: Value of ``data.truncation``.
        seq_len: Number of inputs per sample.
        keep_last_input: Whether the last token of every document is also an input of the model. If
            True, a document is too long if it has more than ``seq_len`` tokens. If False, the last
            token is only a label, so a document may have ``seq_len + 1`` tokens.

    Raises:
        UserError: If a document is too long and ``mode`` is ``error``.
        NoSampleLeftError: If all documents are excluded.
    """
    longest, left_out, cut, cut_tokens, too_long, unanswered = seq_len + (not keep_last_input), [], 0, 0, 0, 0
    total = tokens.num_documents
    for start in range(0, total, _CHUNK):
        offsets = tokens.offsets["text"][start : start + _CHUNK + 1].astype(np.int64)
        lengths = np.diff(offsets)
        is_longer = lengths > longest
        if mode == "error" and is_longer.any():
            modes = "end or drop" if tokens.has_images else "end, start or drop"
            num_longer = int(is_longer.sum())
            raise UserError(
                f"data.truncation: {num_longer:,} of {start + len(lengths):,} samples "
                f"{'is' if num_longer == 1 else 'are'} longer than "
                f"data.seq_len ({seq_len}), and the longest has {int(lengths.max()):,} tokens; raise "
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
            # Skip the first token of each document, because it is never a label.
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
        raise NoSampleLeftError(
            f"data.truncation: no sample is left ({stats}); raise data.seq_len (now {seq_len}), or change "
            "data.truncation"
        )
    return stats


def compute_block_truncation_stats(tokens: TokenCache, seq_len: int, num_blocks: int) -> TruncationStats:
    """Find the blocks that contain no trained label, and return statistics that exclude them.

    A block is a part of the concatenated documents. Its labels are trained if they contribute to
    the loss.

    Args:
        tokens: Token cache of the documents. It must have a loss mask.
        seq_len: Number of tokens per block.
        num_blocks: Number of blocks.

    Returns:
        Statistics about blocks instead of documents. ``left_out`` contains the indices of the
        excluded blocks.

    Raises:
        NoSampleLeftError: If all blocks are excluded.
    """
    starts = np.arange(num_blocks, dtype=np.int64) * seq_len + 1
    left_out = np.flatnonzero(~_mark_ranges_with_trained_tokens(tokens, starts, starts + seq_len))
    stats = TruncationStats("end", seq_len + 1, num_blocks, 0, 0, 0, len(left_out), left_out)
    if not stats.num_kept:
        raise NoSampleLeftError(
            f"data.train_on: no complete sequence of {seq_len} tokens contains a token that counts toward "
            "the loss; lower data.seq_len"
        )
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
    """Return, for each range of tokens, whether any token in the range contributes to the loss.

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
    """Order of the documents that remain after some were excluded.

    If documents are concatenated, the order consists of blocks instead of documents. Calling the
    object with a position returns the number of the document at this position. The object stores
    only the numbers of the excluded documents. Its ``repr`` is part of cache keys, so the ``repr``
    contains a digest of these numbers.

    Args:
        count: Number of documents that are not excluded.
        left_out: Sorted numbers of the excluded documents.
        shuffled: Whether to shuffle the documents, with the same seed in all runs. If not, they are
            ordered by number.
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
        """Return the number of the document at position ``index`` of this order.

        Excluded documents have no position.
        """
        position = index if self._order is None else self._order(index)
        return position + int(np.searchsorted(self._shifted, position, side="right"))

    def permute_array(self, indices: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return the number of the document at each of the given positions in this order.

        A document number is the index of the document among all documents. Excluded documents do
        not occur in the order.

        Args:
            indices: Positions in the order, an array of any shape.

        Returns:
            Document numbers, an int64 array with the shape of ``indices``.
        """
        positions = np.asarray(indices) if self._order is None else self._order.permute_array(indices)
        numbers: npt.NDArray[np.int64] = positions + np.searchsorted(self._shifted, positions, side="right")
        return numbers
