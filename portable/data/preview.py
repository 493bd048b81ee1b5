"""Preview the data of a run: statistics, and the first samples with their trained tokens marked."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from portable.batch import IGNORED_LABEL
from portable.converters.console import escape_control_characters
from portable.data.images import build_thumbnail
from portable.data.samples.base import select_sequence_of_samples
from portable.data.samples.order import EpochIndex
from portable.data.sizes import compute_trained_share
from portable.data.tokens.bounded_tokenizer import decode
from portable.formatting import format_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from portable.data.dataset import RunData
    from portable.data.tokens.cache import CachedImage

REPORT_SAMPLES = 3
"""Number of samples in the preview that a run saves in its output folder for the HTML report."""
_NUM_NARROW_BINS = 12
_CHUNK = 1 << 20  # number of documents to process at a time
_MAX_CHARS = 20_000
"""Maximum number of characters of a sequence in the preview."""
_MAX_THUMBNAILS = 8
"""Maximum number of thumbnails of a document in the preview."""


class TextPiece(NamedTuple):
    """Part of the text of a sample, or an image.

    Attributes:
        text: The text. For an image, its size and number of tokens.
        is_trained: Whether the tokens are labels that contribute to the loss. The same for all tokens
            of a piece.
        thumbnail: Data URL of the image's thumbnail. Empty for text, or if there is no thumbnail.
    """

    text: str
    is_trained: bool
    thumbnail: str = ""


class _ImagePiece(NamedTuple):
    """Image in the token sequence of a document.

    Attributes:
        tokens: Range of the image's tokens in the document.
        piece: Text and thumbnail that the preview shows for the image.
    """

    tokens: range
    piece: TextPiece


class LengthBin(NamedTuple):
    """Bin of the histogram of document lengths.

    Attributes:
        low: Inclusive lower bound of the lengths, in tokens.
        high: Exclusive upper bound of the lengths. None if the bin has no upper bound, which
            only occurs for extremely long documents.
        num_documents: Number of documents in the bin.
    """

    low: int
    high: int | None
    num_documents: int


class _LengthHistogram(NamedTuple):
    """Histogram of document lengths.

    Attributes:
        bins: Consecutive bins. The first and the last bin are not empty.
        num_filled: Number of positions that would not be padding if each document had its own
            sample. A document of *n* tokens fills *n* - 1 positions, but at most one sample.
            Documents that truncation excludes do not count.
    """

    bins: list[LengthBin]
    num_filled: int


class _SequenceText(NamedTuple):
    """Text and token counts of a sequence.

    Attributes:
        num_tokens: Number of tokens without padding.
        num_trained: Number of labels that contribute to the loss.
        pieces: Pieces of the sequence's text.
    """

    num_tokens: int
    num_trained: int
    pieces: list[TextPiece]


@dataclass(frozen=True)
class SamplePreview:
    """One sample of a run, as text.

    Attributes:
        position: Position of the sample in the run, counted from 0.
        documents: Indices of the sample's documents, counted from 0 in their source. For a stream,
            counted from 0 in their shard.
        tokens: Number of tokens without padding.
        trained: Number of tokens that contribute to the loss as labels.
        pieces: Text of the sample, split at images and at changes of the loss mask. The text of
            each sequence is truncated to :data:`_MAX_CHARS` characters.
        source: For a mixture, the name of the sample's source. For a stream, the name of the file.
            For a stream in a mixture, both names, separated by a space. Otherwise empty.
    """

    position: int
    documents: list[int]
    tokens: int
    trained: int
    pieces: list[TextPiece]
    source: str = ""


@dataclass(frozen=True)
class DataPreview:
    """Statistics and first samples of the data of a run.

    Attributes:
        facts: Statistics as text, keyed by name.
        lengths: Histogram of the documents' lengths in tokens.
        samples: First samples of the run. If complete documents are packed, one item for each
            of the first documents.
    """

    facts: dict[str, str]
    lengths: list[LengthBin]
    samples: list[SamplePreview]

    def to_json_dict(self) -> dict[str, Any]:
        """Convert the preview to JSON-serializable values."""
        return asdict(self)


def build_preview(
    data: RunData, num_samples: int, seed: int, *, with_thumbnails: bool = False
) -> DataPreview:
    """Compute statistics of a run's data, and decode its first samples.

    The statistics of a stream cover only its first part, because the other parts are not tokenized
    yet.

    For a stream, the numbers of documents and tokens and the histogram cover only one shard.

    Args:
        data: Data of a causal language model. It must have tokenized sources, so samples from
            user-defined code are not supported.
        num_samples: Number of samples to include. If complete documents are packed, number of
            documents to include.
        seed: Seed of the run, which determines the order of the samples.
        with_thumbnails: Whether to include thumbnails of images.
    """
    length = data.sizes.seq_len
    caches = [source.tokens for source in data.tokenized_sources.values()]
    total, documents = sum(cache.num_tokens for cache in caches), sum(cache.num_documents for cache in caches)
    lengths, num_filled = _compute_length_histogram(data)
    samples = list(islice(_iter_sample_previews(data, seed, with_thumbnails), num_samples))
    mean = total / max(1, documents)
    has_streams = bool(data.stream_names)
    num_samples_text = "an unknown number" if has_streams else f"{len(data.train):,}"
    part_text = " (only the first part of each stream)" if has_streams else ""
    trained_share = compute_trained_share(list(data.tokenized_sources.values()))
    facts = {
        "source": data.sizes.source,
        "documents": f"{documents:,}{part_text}",
        "samples": f"{num_samples_text} for training, {length:,} tokens each",
        "tokens": f"{total:,}, {mean:,.1f} per document{part_text}",
        "trained": "all" if trained_share is None else f"{trained_share:.1%} of the tokens{part_text}",
    }
    if any(cache.has_images for cache in caches):
        num_images = sum(cache.num_images for cache in caches)
        mean = sum(cache.num_image_tokens for cache in caches) / max(1, num_images)
        facts["images"] = f"{num_images:,}, {mean:,.1f} tokens per image"
    if data.sizes.truncation_stats is not None and (lost := str(data.sizes.truncation_stats)):
        facts["truncated"] = lost
    padded = data.sizes.packing is False
    left_out = sum(
        0 if source.truncation_stats is None else len(source.truncation_stats.left_out)
        for source in data.tokenized_sources.values()
    )
    num_kept = documents - left_out
    waste = 1 - num_filled / max(1, num_kept * length) if padded else data.train.padding_share
    facts["padding"] = f"{waste:.1%} of the positions"
    if data.end_of_turn_token is not None:
        facts["an answer ends with"] = decode(data.tokenizer, [data.end_of_turn_token])
    return DataPreview(facts, lengths, samples)


def _compute_length_histogram(data: RunData) -> _LengthHistogram:
    """Compute the histogram of document lengths, and the number of filled token positions.

    A filled position contains a token of a document, not padding. The number is counted without
    packing, as if each sample contained one document. Excluded documents have no filled positions.
    """
    length = data.sizes.seq_len
    step = max(1, -(-length // (_NUM_NARROW_BINS - 4)))
    # Bins are equally wide up to about the length of a sample. After that, each bin is twice as wide as the
    # previous one.
    edges = step * np.append(np.arange(_NUM_NARROW_BINS), _NUM_NARROW_BINS << np.arange(32, dtype=np.int64))
    counts = np.zeros(len(edges), dtype=np.int64)
    num_filled = 0
    for source in data.tokenized_sources.values():
        left_out = (
            np.zeros(0, dtype=np.int64)
            if source.truncation_stats is None
            else source.truncation_stats.left_out
        )
        for start in range(0, source.tokens.num_documents, _CHUNK):
            sizes = np.diff(source.tokens.offsets["text"][start : start + _CHUNK + 1].astype(np.int64))
            counts += np.bincount(np.searchsorted(edges, sizes, "right") - 1, minlength=len(edges))
            filled = np.clip(sizes - 1, 0, length)
            filled[left_out[(left_out >= start) & (left_out < start + len(sizes))] - start] = 0
            num_filled += int(filled.sum())
    used = np.flatnonzero(counts)
    bins = [
        LengthBin(
            int(edges[index]), int(edges[index + 1]) if index + 1 < len(edges) else None, int(counts[index])
        )
        for index in range(int(used[0]), int(used[-1]) + 1)
    ]
    return _LengthHistogram(bins, num_filled)


def _iter_sample_previews(data: RunData, seed: int, with_thumbnails: bool) -> Iterator[SamplePreview]:
    """Yield previews of the samples of a run, in the order in which the run trains on them.

    If complete documents are packed, each document gets its own preview. The two sequences of a
    preference pair share one preview. Images are separate pieces only if the preview has a single
    document and the source is not a stream. Otherwise, their tokens are decoded as text.

    Args:
        data: Data of the run.
        seed: Seed of the run, which determines the order.
        with_thumbnails: Whether to include thumbnails of images.
    """
    for position in range(len(data.train)):
        epoch, index = data.train.locate_sample(position, seed)
        arrays = data.train.build_arrays([EpochIndex(epoch, index)])
        documents = [int(number) for number in data.train.list_document_numbers(index)]
        source = data.train.get_source_name(index)
        if "document_lengths" in arrays:
            start = 0
            for number, length in zip(documents, arrays["document_lengths"][0].tolist(), strict=False):
                part = {name: arrays[name][:, start : start + length] for name in ("input_ids", "labels")}
                images = _list_image_pieces(data, source, number, length, with_thumbnails)
                yield SamplePreview(position, [number], *_decode_sequence(data, part, images), source)
                start += length
            continue
        num_sequences = data.train.sequences_per_sample  # sequences of a pair are shown one after the other
        parts = (
            [select_sequence_of_samples(arrays, index) for index in range(num_sequences)]
            if num_sequences > 1
            else [arrays]
        )
        images = (
            _list_image_pieces(data, source, documents[0], data.sizes.seq_len, with_thumbnails)
            if len(documents) == 1
            else []
        )
        sequences = [_decode_sequence(data, part, images) for part in parts]
        pieces = sequences[0].pieces
        for sequence in sequences[1:]:
            pieces = [*pieces, TextPiece("\n", False), *sequence.pieces]
        tokens = sum(sequence.num_tokens for sequence in sequences)
        trained = sum(sequence.num_trained for sequence in sequences)
        yield SamplePreview(position, documents, tokens, trained, pieces, source)


def format_image(image: CachedImage) -> str:
    """Format an image as text, such as ``[image 448x336, 192 tokens]``."""
    size = f"{image.size.width}x{image.size.height}"
    return f"[image {size}, {format_count(image.num_tokens, 'token')}]"


def _list_image_pieces(
    data: RunData, source: str, number: int, num_tokens: int, with_thumbnails: bool
) -> list[_ImagePiece]:
    """List the images of a document.

    Args:
        data: Data of the run.
        source: Name of the source in a mixture. Empty without a mixture.
        number: Index of the document in the source.
        num_tokens: Number of tokens to consider at the start of the document. Images that begin
            after these tokens are omitted.
        with_thumbnails: Whether to include thumbnails of the first :data:`_MAX_THUMBNAILS` images.

    Returns:
        The images, in token order. Empty if the source contains no images or is a stream.
    """
    tokens = data.tokenized_sources[source].tokens if source in data.tokenized_sources else None
    if tokens is None or not tokens.has_images:
        return []
    images = [image for image in tokens.list_images(number) if image.first_token < num_tokens]
    files = tokens.read_image_files(number, num_tokens)[:_MAX_THUMBNAILS] if with_thumbnails else []
    thumbnails = [build_thumbnail(file.data) for file in files] + [""] * (len(images) - len(files))
    return [
        _ImagePiece(
            range(image.first_token, image.first_token + image.num_tokens),
            TextPiece(format_image(image), False, thumbnail),
        )
        for image, thumbnail in zip(images, thumbnails, strict=True)
    ]


class _TokenRun(NamedTuple):
    """Consecutive tokens of a sample that become one :class:`TextPiece` of its preview.

    Attributes:
        tokens: Token ids.
        is_trained: Whether the tokens are labels that contribute to the loss.
        image: Preview of the image that the tokens represent. None if the tokens are text.
    """

    tokens: list[int]
    is_trained: bool
    image: TextPiece | None = None


def _decode_sequence(data: RunData, arrays: Any, images: Sequence[_ImagePiece] = ()) -> _SequenceText:
    """Decode a sequence into pieces of text, split at images and where the loss mask changes.

    The text is truncated to :data:`_MAX_CHARS` characters, but the token counts cover the complete
    sequence. A label that is not also the next input, such as the last token of a document, is
    decoded and counted as well.

    Args:
        data: Data of the run, including the tokenizer.
        arrays: Batch of one sequence, with ``input_ids``, ``labels`` and optionally
            ``attention_mask``. Without ``attention_mask``, no position is padding.
        images: Images of the sequence.
    """
    inputs, labels = arrays["input_ids"][0].tolist(), arrays["labels"][0].tolist()
    filled = len(inputs)
    if "attention_mask" in arrays:
        filled = int(arrays["attention_mask"][0].sum())
    runs: list[_TokenRun] = []
    image_by_token = {token: image for image in images for token in image.tokens}

    def add(token: int, trained: bool) -> None:
        if not runs or runs[-1].is_trained != trained or runs[-1].image is not None:
            runs.append(_TokenRun([], trained))
        runs[-1].tokens.append(token)

    for index in range(filled):
        if (image := image_by_token.get(index)) is None:
            add(inputs[index], index > 0 and labels[index - 1] == inputs[index])
        elif index == image.tokens.start:
            runs.append(_TokenRun(inputs[index : image.tokens.stop], False, image.piece))
        # Add the last token of a document here, because it is only a label and not an input.
        if labels[index] != IGNORED_LABEL and (index + 1 == filled or inputs[index + 1] != labels[index]):
            add(labels[index], True)
    pieces, remaining = [], _MAX_CHARS
    for ids, trained, image_piece in runs:
        if image_piece is not None:
            pieces.append(image_piece)
            continue
        text = decode(data.tokenizer, ids)
        pieces.append(TextPiece(text[:remaining] + ("..." if len(text) > remaining else ""), trained))
        remaining -= len(text)
        if remaining <= 0:
            break
    counted = sum(label != IGNORED_LABEL for label in labels)
    return _SequenceText(sum(len(run.tokens) for run in runs), counted, pieces)


def format_preview(preview: DataPreview, *, color: bool) -> str:
    """Format a preview for the terminal.

    Args:
        preview: Preview from :func:`build_preview`.
        color: Whether to print in green the text that contributes to the loss. If not, this text is
            enclosed in double brackets.
    """
    from portable.formatting import format_table

    most = max((count for *_, count in preview.lengths), default=1) or 1
    rows = [
        (f"{low:,} to {high - 1:,}" if high is not None else f"{low:,} or more", count)
        for low, high, count in preview.lengths
    ]
    bars = [(name, f"{'#' * -(-40 * count // most):<40} {count:,}") for name, count in rows]
    parts = [format_table(list(preview.facts.items())), "tokens per document", format_table(bars)]
    for sample in preview.samples:
        which = _format_documents(sample.documents) + (f" of {sample.source}" if sample.source else "")
        head = (
            f"--- sample {sample.position}, from {which}: {sample.tokens:,} tokens, "
            f"{sample.trained:,} trained"
        )
        parts.append(f"{head}\n{_mark_trained_pieces(sample.pieces, color)}")
    return "\n".join(parts)


def _format_documents(documents: Sequence[int]) -> str:
    """Format the document numbers of a sample, such as ``documents 3 to 5``.

    The numbers must be consecutive, because the text contains only the first and the last number.
    """
    several = f" to {documents[-1]}" if len(documents) > 1 else ""
    return f"document{'s' if several else ''} {documents[0] if documents else '?'}{several}"


def _mark_trained_pieces(pieces: list[TextPiece], color: bool) -> str:
    """Join the pieces of a sample, and mark trained pieces with color or double brackets.

    Control characters in the text are escaped, because a terminal would execute them.
    """
    opening, closing = ("\x1b[32m", "\x1b[0m") if color else ("[[", "]]")
    return "".join(
        f"{opening}{escape_control_characters(text)}{closing}" if trained else escape_control_characters(text)
        for text, trained, _ in pieces
    )
