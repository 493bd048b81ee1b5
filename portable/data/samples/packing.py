"""Pack complete documents into samples of a fixed length.

A packing plan assigns documents to samples. For given settings, it depends only on the
lengths and the order of the documents, so all ranks and machines compute the same plan. The
plan is computed once and stored next to the token cache, in the same format: a sample is
stored like a document, and its document numbers are stored like tokens.

Documents are packed by best fit, longest first, within windows of :data:`WINDOW`
consecutive documents in the dataset's shuffled order. Windows bound the memory usage, and
are large enough to cause almost no additional padding.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from portable.batch import IGNORED_LABEL
from portable.data.samples.base import Arrays, DocumentSamples, SampleRange
from portable.data.samples.truncation import NoSampleLeftError
from portable.data.sources.documents import compute_text_digest
from portable.data.tokens.cache import CACHE_FORMAT, TokenCache, TokenCacheWriter
from portable.temporary_folder import open_or_build_cache_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from portable.data.samples.order import EpochIndex
    from portable.data.samples.truncation import Truncation

Integers = npt.NDArray[np.int64]
"""Array of int64."""
WINDOW = 1 << 20
"""Number of documents in a packing window."""
_PLAN_VERSION = 1  # version of the plans; a change would alter the samples of every resumed run
_FIELD = "documents"


class PackedWindow(NamedTuple):
    """Packed samples of one window of documents.

    Attributes:
        documents: Document numbers, ordered by sample, int64 ``[documents]``.
        lengths: Number of positions that each document occupies, int64 ``[documents]``.
        document_counts: Number of documents in each sample, int64 ``[samples]``.
    """

    documents: Integers
    lengths: Integers
    document_counts: Integers


class PackedBins(NamedTuple):
    """Result of packing items into bins.

    Attributes:
        items: Item indices, ordered by bin, int64 ``[items]``.
        item_counts: Number of items in each bin, int64 ``[bins]``.
    """

    items: Integers
    item_counts: Integers


@dataclass(eq=False)
class PackedDocumentSamples(DocumentSamples):
    """Dataset that packs several complete documents into each sample, for causal language modeling.

    A document of *n* tokens occupies *n* - 1 positions. Every token except the last is an input,
    and its label is the next token of the same document. The labels are therefore the same as
    without packing. A document that needs more than ``seq_len`` positions is truncated. Padding
    fills up the sample.

    ``position_ids`` start at 0 in each document and are 0 in the padding. ``document_lengths`` is
    int64 ``[batch, maximum number of documents per sample + 1]``. A row contains the number of
    positions of each document, then the number of padding positions, then zeros. Its sum is
    ``seq_len``.

    Attributes:
        plan: Plan from :func:`load_or_build_packing_plan`.
        pad_token: Id of the padding token.
        truncation: Value of ``data.truncation``: how to truncate long documents.
        keep_last_input_if_room: Whether the last token of a document is also an input, without a
            label. This applies only to documents of at most ``seq_len`` tokens. Such a document
            occupies *n* positions instead of *n* - 1.
    """

    plan: TokenCache
    pad_token: int
    truncation: Truncation = "end"
    keep_last_input_if_room: bool = False

    def __post_init__(self) -> None:
        sizes = PackingStats(**self.plan.meta["sizes"])
        self.num_samples, self.padding_share, self._most = sizes.samples, sizes.padding_share, sizes.most
        self.mean_context_length = sizes.seen / sizes.filled

    def build_arrays(self, indices: Sequence[EpochIndex]) -> Arrays:
        """Build ``input_ids``, ``labels``, ``position_ids`` and ``document_lengths``.

        The first three are int64 ``[len(indices), seq_len]``. The class docstring describes
        ``document_lengths``.
        """
        shape = (len(indices), self.seq_len)
        inputs, labels = np.full(shape, self.pad_token), np.full(shape, IGNORED_LABEL)
        positions, lengths = np.empty(shape, np.int64), np.zeros((len(indices), self._most + 1), np.int64)
        for row, (_, index) in enumerate(indices):
            start = 0
            for count, number in enumerate(self.list_document_numbers(index)):
                tokens = self._read_kept_tokens(number)
                size = self._count_inputs(number, tokens)
                targets = tokens[1 : size + 1]
                end, end_of_labels = start + size, start + len(targets)
                inputs[row, start:end], labels[row, start:end_of_labels] = tokens[:size], targets
                if (trained := self._read_trained_mask(number, size)) is not None:
                    labels[row, start:end_of_labels][~trained] = IGNORED_LABEL
                positions[row, start:end] = np.arange(end - start)
                lengths[row, count] = end - start
                start = end
            positions[row, start:] = 0
            lengths[row, count + 1] = self.seq_len - start
        return {
            "input_ids": inputs,
            "labels": labels,
            "position_ids": positions,
            "document_lengths": lengths,
        }

    def count_image_tokens(self) -> Integers | None:
        """Count the image tokens in each sample. See :meth:`Samples.count_image_tokens`."""
        if not self.token_cache.has_images:
            return None
        counts = self.token_cache.count_image_tokens(self.seq_len)[self.plan.tokens[_FIELD][:]]
        return np.add.reduceat(counts, self.plan.offsets[_FIELD][:-1].astype(np.int64))

    def list_document_numbers(self, index: int) -> Sequence[int]:  # type: ignore[override]
        """Return the indices of a sample's documents in the token cache, in order."""
        numbers: list[int] = self.plan.read_document(_FIELD, index).tolist()
        return numbers


def load_or_build_packing_plan(
    tokens: TokenCache, part: SampleRange, seq_len: int, *, keep_last_input_if_room: bool = False
) -> TokenCache:
    """Open the packing plan for a range of documents. A missing plan is computed and stored.

    The plan assigns the documents to samples. If several processes call this function, one of them
    computes the plan, and the others wait.

    Args:
        tokens: Token cache of the documents.
        part: Range of the documents to pack.
        seq_len: Number of positions per sample.
        keep_last_input_if_room: Whether the last token of a document is also an input. By default,
            it is only a label. If True, a document of at most ``seq_len`` tokens occupies one more
            position. Longer documents do not change.

    Returns:
        Token cache whose field ``documents`` contains the document numbers of each sample. Its
        metadata contains the :class:`PackingStats` of the plan under ``sizes``.

    Raises:
        NoSampleLeftError: If every document has fewer than two tokens.
        UserError: If the cache is not writable.
    """

    def write(folder: Path) -> None:
        sizes = PackingStats(seq_len)
        with closing(TokenCacheWriter(folder, [_FIELD], tokens.num_documents)) as writer:
            for numbers, lengths, counts in _iter_packed_windows(
                tokens, part, seq_len, keep_last_input_if_room
            ):
                writer.add_documents(_FIELD, numbers, counts)
                sizes.add_samples(lengths, counts)
            if not sizes.samples:
                raise NoSampleLeftError(
                    "data.source: every text has fewer than two tokens, so there is no token to predict; "
                    "add longer texts"
                )
            writer.write_metadata(sizes=asdict(sizes))

    return open_or_build_cache_folder(
        _get_plan_folder(tokens, part, seq_len, keep_last_input_if_room), TokenCache.open_if_intact, write
    )


@dataclass
class PackingStats:
    """Statistics of packed samples. A packing plan stores all attributes in its metadata.

    Attributes:
        seq_len: Number of positions per sample.
        samples: Number of samples.
        filled: Total number of positions with a token.
        seen: Sum of the squared document lengths. ``seen / filled`` is the document length averaged
            over tokens.
        most: Maximum number of documents per sample.
    """

    seq_len: int
    samples: int = 0
    filled: int = 0
    seen: int = 0
    most: int = 0

    def add_samples(self, lengths: Integers, counts: Integers) -> None:
        """Add samples to the statistics.

        Args:
            lengths: Number of positions that each document occupies, int64 ``[documents]``.
            counts: Number of documents in each sample, int64 ``[samples]``.
        """
        self.samples += len(counts)
        self.filled += int(lengths.sum())
        self.seen += int(np.dot(lengths, lengths))
        self.most = max(self.most, int(counts.max()))

    @property
    def padding_share(self) -> float:
        """Fraction of positions that are padding."""
        return 1 - self.filled / max(1, self.samples * self.seq_len)


def compute_packing_stats(
    tokens: TokenCache, part: SampleRange, seq_len: int, *, keep_last_input_if_room: bool = False
) -> PackingStats:
    """Compute the statistics of a packing plan, without storing the plan.

    If the cache already contains the plan, the statistics are read from the plan. If every document
    has fewer than two tokens, the result has no samples, and no error is raised. See
    :func:`load_or_build_packing_plan` for the arguments.
    """
    sizes = PackingStats(seq_len)
    if (
        plan := TokenCache.open_if_intact(_get_plan_folder(tokens, part, seq_len, keep_last_input_if_room))
    ) is not None:
        return PackingStats(**plan.meta["sizes"])
    for _, lengths, counts in _iter_packed_windows(tokens, part, seq_len, keep_last_input_if_room):
        sizes.add_samples(lengths, counts)
    return sizes


def _get_plan_folder(
    tokens: TokenCache, part: SampleRange, seq_len: int, keep_last_input_if_room: bool
) -> Path:
    """Return the cache folder of a packing plan. It may not exist yet."""
    content = (
        f"{_PLAN_VERSION} {CACHE_FORMAT} {tokens.fingerprint} {seq_len} {part}"
        f"{' with_last' * keep_last_input_if_room}"
    )
    return tokens.folder.with_name(compute_text_digest(content))


def _iter_packed_windows(
    tokens: TokenCache, part: SampleRange, seq_len: int, keep_last_input_if_room: bool
) -> Iterator[PackedWindow]:
    """Pack the documents window by window, and yield the packed samples of each window.

    A window consists of up to :data:`WINDOW` consecutive documents, in the order of ``part``. Only
    documents of the same window can share a sample. Documents that are too short to have a label
    are omitted. See :func:`load_or_build_packing_plan` for the arguments.
    """
    lengths = np.empty(tokens.num_documents, np.uint32)
    for start in range(0, tokens.num_documents, WINDOW):
        offsets = tokens.offsets["text"][start : start + WINDOW + 1].astype(np.int64)
        sizes = np.diff(offsets)
        positions = np.where(sizes > 1, sizes, 0) if keep_last_input_if_room else sizes - 1
        lengths[start : start + WINDOW] = np.clip(positions, 0, seq_len)
    for start in range(part.start, part.start + part.num_samples, WINDOW):
        numbers = np.arange(start, min(start + WINDOW, part.start + part.num_samples))
        if part.order is not None:
            numbers = part.order.permute_array(numbers)
        sizes = lengths[numbers].astype(np.int64)
        numbers, sizes = numbers[sizes > 0], sizes[sizes > 0]
        if len(numbers):
            order, counts = pack_best_fit(sizes, seq_len)
            yield PackedWindow(numbers[order], sizes[order], counts)


def pack_best_fit(lengths: Integers, capacity: int) -> PackedBins:
    """Pack items into bins by best fit: longest first, each into the fullest bin with enough room.

    Items of equal length, and bins with equal room, are handled together. The number of loop
    iterations therefore depends mainly on the number of distinct lengths instead of the number
    of items.

    Args:
        lengths: Lengths of the items, from 1 to ``capacity``, int64 ``[items]``.
        capacity: Size of a bin.

    Returns:
        The item indices, ordered by bin, and the number of items in each bin.
    """
    bin_of = np.empty(len(lengths), np.int64)  # bin of each item, from the longest to the shortest item
    # Ranges of bins, keyed by their remaining room.
    bins_by_room: dict[int, list[tuple[int, int]]] = defaultdict(list)
    room_bits = 0  # bit r is set if a bin has room for exactly r more positions
    bins = num_packed = 0
    counts = np.bincount(lengths, minlength=capacity + 1)
    for length in np.flatnonzero(counts)[::-1].tolist():
        remaining = int(counts[length])
        while remaining:
            if fitting := room_bits >> length:
                room = length + (fitting & -fitting).bit_length() - 1
                start, stop = bins_by_room[room].pop()
                room_bits ^= (not bins_by_room[room]) << room
            else:
                room, start = capacity, bins
                stop = bins = bins - (-remaining // (capacity // length))
            # Put as many items as possible into each bin, because a bin remains the fullest bin with enough
            # room until no further item fits.
            items_per_bin = room // length
            num_full_bins = min(stop - start, remaining // items_per_bin)
            items_in_last_bin = (
                remaining - num_full_bins * items_per_bin if num_full_bins < stop - start else 0
            )
            num_taken = num_full_bins * items_per_bin + items_in_last_bin
            bin_of[num_packed : num_packed + num_taken] = start + np.arange(num_taken) // items_per_bin
            num_packed, remaining = num_packed + num_taken, remaining - num_taken
            ends = (start, start + num_full_bins, start + num_full_bins + (items_in_last_bin > 0), stop)
            for (first, last), used in zip(
                pairwise(ends), (items_per_bin, items_in_last_bin, 0), strict=True
            ):
                rest = room - used * length
                if first < last and rest:
                    bins_by_room[rest].append((first, last))
                    room_bits |= 1 << rest
    longest_first = np.argsort(-lengths, kind="stable")
    return PackedBins(longest_first[np.argsort(bin_of, kind="stable")], np.bincount(bin_of))
