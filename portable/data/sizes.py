"""Compute the sizes of a run's data, which are shown in a plan and at the start of a run."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from portable.config.sources import format_eval_source_key
from portable.data.samples.truncation import merge_truncation_stats
from portable.formatting import format_count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from portable.data.images import ImageSize
    from portable.data.samples.truncation import TruncationStats
    from portable.data.sources.source import DataSource
    from portable.data.tokenization import TokenizedSource
    from portable.data.tokens.cache import TokenCache
    from portable.data.tokens.image_processing import ImageProcessor
    from portable.data.tokens.special_tokens import Frame

_COMPRESSED = r"\.(parquet|arrow|gz|zst)\b"
MAX_TRUNCATED_SHARE = 0.05  # a larger fraction of truncated tokens causes a warning


class EvalSize(NamedTuple):
    """Name and size of an evaluation source.

    Attributes:
        source: Name of the source, such as the path of its data.
        num_samples: Number of samples. None if the source is not tokenized yet.
    """

    source: str
    num_samples: int | None


class ImageCounts(NamedTuple):
    """Image counts over all training sources.

    Images that do not fit into a sample are included in ``images`` and ``tokens``, but ignored
    in the other attributes.

    Attributes:
        images: Number of images.
        documents: Number of conversations that contain an image.
        tokens: Number of image tokens.
        largest: Sizes of the images in the conversation with the most image tokens.
        largest_tokens: Number of image tokens in this conversation.
    """

    images: int
    documents: int
    tokens: int
    largest: tuple[ImageSize, ...]
    largest_tokens: int

    def __str__(self) -> str:
        """Format the counts as one line."""
        mean = self.tokens / max(1, self.images)
        images, documents = format_count(self.images, "image"), format_count(self.documents, "conversation")
        return f"{images} in {documents}, {mean:,.1f} tokens per image"


@dataclass(frozen=True)
class DataSizes:
    """Sizes of a run's data, which are shown in a plan and at the start of a run.

    Sizes that require tokens are None if a training source is not tokenized yet or is a stream. In
    this case, ``truncated_share`` is 0, ``train_samples_by_source`` is empty, and ``notes``
    contains only notes about evaluation sources.
    """

    source: str
    """Description of the training sources: their names, with facts that are known without reading them."""
    tokenizer: str
    """Name of the tokenizer, or a description of the tokenizer to train."""
    vocab_size: int | None
    """Vocabulary size: the number of tokens, or the largest token id plus one if that is larger.

    The requested size if the tokenizer is not trained yet. None if neither is known.
    """
    seq_len: int
    """Number of tokens per sample, ``data.seq_len``."""
    packing: bool | Literal["documents"]
    """Value of ``data.packing``. False if the task does not support packing."""
    documents: int | None = None
    """Total number of documents in all training sources."""
    tokens: int | None = None
    """Total number of tokens in all training sources."""
    train_samples: int | None = None
    """Number of samples to train on."""
    eval_samples: int | None = None
    """Number of samples held out from the training sources for evaluation."""
    held_out_records: int | None = None
    """Number of documents, pairs or blocks that are held out for evaluation.

    It is larger than ``eval_samples`` if complete documents are packed.
    """
    truncated_share: float = 0.0
    """Fraction of tokens that are cut off because their documents are longer than ``seq_len``."""
    padding_share: float | None = None
    """Fraction of the positions in training samples that are padding. None if complete documents are
    not packed."""
    truncation_stats: TruncationStats | None = None
    """Effect of truncation. None for tasks other than causal language modeling, and for texts that are only
    truncated at the end (see ``truncated_share``).
    """
    trained_share: float | None = None
    """Fraction of tokens that contribute to the loss. None if all tokens contribute, or if the data is not
    tokenized yet.
    """
    notes: tuple[str, ...] = ()
    """Notes to the user, one sentence each: unexpected effects of the chat template, and counts of
    blank records."""
    size_bytes: int | None = None
    """Total size of the text in all training sources, in bytes. None if unknown, for example for
    compressed files."""
    cache_folder: Path | None = None
    """Folder of the token cache. None if the tokens are not in the cache."""
    train_samples_by_source: Mapping[str, int] = field(default_factory=dict)
    """Number of training samples from each source of a mixture, keyed by source name."""
    evals: Mapping[str, EvalSize] = field(default_factory=dict)
    """Name and size of each evaluation source, keyed by its name in ``data.eval``."""
    evals_in_training_data: tuple[str, ...] = ()
    """Names of the sources of ``data.eval`` that share a file with the training data."""
    images: ImageCounts | None = None
    """Image counts. None if the data cannot contain images."""
    image_processor: ImageProcessor | None = field(default=None, compare=False, repr=False)
    """Image processor of the model. None if the data cannot contain images, or if the processor has to be
    downloaded.
    """
    tokenizer_object: Any = field(default=None, compare=False, repr=False)
    """Transformers tokenizer. None if it is not available without a download."""
    end_of_turn_token: int | None = field(default=None, compare=False, repr=False)
    """Id of the token that ends an answer in conversations. None if it is not known."""
    target_frame: Frame | None = field(default=None, compare=False, repr=False)
    """Special tokens to put around each target text for seq2seq. None if the tokenizer is not available."""

    def __str__(self) -> str:
        """Format the sizes as one line.

        If the data is not tokenized yet or is a stream, the line contains only the sources, the
        tokenizer, its vocabulary size, the length and kind of the samples, and the evaluation
        sources.
        """
        vocabulary = "" if self.vocab_size is None else f" ({self.vocab_size:,} tokens)"
        packed = "complete documents packed" if self.packing == "documents" else "packed"
        samples_text = f"samples of {self.seq_len} tokens, {packed if self.packing else 'padded'}"
        method_text = f"{self.tokenizer}{vocabulary}; {samples_text}"
        evals_text = "".join(
            f"; evaluation{f' {name}' if name else ''}: {source}"
            + ("" if samples is None else f", {samples:,} samples")
            for name, (source, samples) in self.evals.items()
        )
        if self.cache_folder is None:
            return f"{self.source}: not tokenized yet; tokenizer: {method_text}{evals_text}"
        held_out = f", {self.describe_held_out()}" if self.eval_samples or not self.evals else ""
        text = (
            f"{self.source}: {self.documents:,} documents, {self.tokens:,} tokens; tokenizer: {method_text}: "
            f"{self.train_samples:,} to train{held_out}{evals_text}"
        )
        text += "".join(
            f"; {name}: {samples:,} samples" for name, samples in self.train_samples_by_source.items()
        )
        text += "" if self.trained_share is None else f"; {self.trained_share:.1%} of the tokens are trained"
        if self.padding_share is not None:
            text += f"; {self.padding_share:.2%} of the positions are padding"
        return (
            text
            if self.truncated_share <= MAX_TRUNCATED_SHARE
            else f"{text}; {self.truncated_share:.0%} of the tokens are cut off"
        )

    def describe_held_out(self) -> str:
        """Return a description of the held-out data, such as ``2 to evaluate (16 documents)``.

        The first number counts samples. If :attr:`packing` is not ``documents``, the parentheses
        are omitted. :attr:`eval_samples` must not be None.
        """
        packed = (
            f" ({format_count(self.held_out_records or 0, 'document')})"
            if self.packing == "documents"
            else ""
        )
        return f"{self.eval_samples:,} to evaluate{packed}"

    @property
    def warnings(self) -> list[str]:
        """Warnings about the data, one line each. Empty if there are none.

        A warning is added if documents are truncated or excluded according to
        :attr:`truncation_stats`. Otherwise, a warning is added if :attr:`truncated_share` exceeds
        ``MAX_TRUNCATED_SHARE``. There is also a warning for each evaluation source that shares a
        file with the training data. All :attr:`notes` are included.
        """
        lines = []
        if self.truncation_stats is not None and (lost := str(self.truncation_stats)):
            lines.append(f"data.truncation: {lost}")
        elif self.truncated_share > MAX_TRUNCATED_SHARE:
            lines.append(self._cut_warning)
        lines += [
            f"{format_eval_source_key(name)}: some of its files are also training data; evaluate on other "
            "files"
            for name in self.evals_in_training_data
        ]
        return [*lines, *self.notes]

    @property
    def _cut_warning(self) -> str:
        """Warning that truncation removes many tokens, with ways to avoid it.

        The text is returned even if few tokens are removed, so the caller must compare
        :attr:`truncated_share` with ``MAX_TRUNCATED_SHARE``.
        """
        return (
            f"data.seq_len: {self.truncated_share:.0%} of the tokens are cut off, because documents are "
            f"truncated to {self.seq_len} tokens; raise data.seq_len, set data.packing to true (language "
            "models), or for .txt files set data.text_split to paragraph or line"
        )


def compute_trained_share(sources: Sequence[TokenizedSource]) -> float | None:
    """Compute the fraction of tokens that contribute to the loss.

    Returns:
        The fraction. None if all tokens of all sources contribute.
    """
    counts = [source.num_trained_tokens for source in sources]
    if all(count is None for count in counts):
        return None
    totals = [source.tokens.num_tokens for source in sources]
    trained = sum(total if count is None else count for total, count in zip(totals, counts, strict=True))
    return trained / max(1, sum(totals))


def compute_data_sizes(
    sources: Mapping[str, DataSource],
    tokenized_sources: Mapping[str, TokenizedSource],
    tokenizer: str | None,
    vocab_size: int | None,
) -> DataSizes:
    """Compute the total sizes over all training sources of a run.

    ``seq_len`` and ``packing`` are taken from the first source. The following fields keep their
    defaults, so the caller must set them: ``evals``, ``evals_in_training_data``,
    ``image_processor``, ``tokenizer_object``, ``end_of_turn_token`` and ``target_frame``.

    Args:
        sources: Training sources, keyed by name.
        tokenized_sources: Tokenized training sources, keyed by name. If a source is missing, the
            sizes that require tokens keep their defaults. See :class:`DataSizes`.
        tokenizer: Name of the tokenizer. None if the tokenizer is trained on the data.
        vocab_size: Vocabulary size of the tokenizer, as in ``Vocabulary.size``. None if it is not
            known.

    Raises:
        UserError: If a source has too few tokens for one sample, if a document is too long for
            ``data.truncation: error``, or if truncation or the loss mask excludes all samples.
    """
    first = next(iter(sources.values()))
    lengths = [
        None if re.search(_COMPRESSED, source.description) else source.size_bytes
        for source in sources.values()
    ]
    sizes = DataSizes(
        source=", ".join(
            f"{name} ({source.description})" if name else source.description
            for name, source in sources.items()
        ),
        tokenizer=tokenizer or "byte-pair encoding trained on this data",
        vocab_size=vocab_size,
        seq_len=first.settings.data.seq_len,
        packing=first.settings.packing,
        size_bytes=None if None in lengths else sum(length or 0 for length in lengths),
    )
    if tokenized_sources.keys() != sources.keys():
        return sizes
    parts = list(tokenized_sources.values())
    counts = {name: source.count_samples() for name, source in tokenized_sources.items()}
    samples = sum(count.train for count in counts.values())
    padding = [
        count.train * count.padding_share for count in counts.values() if count.padding_share is not None
    ]
    tokens = sum(source.tokens.num_tokens for source in parts)
    truncated = [source.truncation_stats for source in parts if source.truncation_stats is not None]
    return replace(
        sizes,
        documents=sum(source.tokens.num_documents for source in parts),
        tokens=tokens,
        train_samples=samples,
        eval_samples=sum(count.held_out for count in counts.values()),
        held_out_records=sum(source.split_samples().held_out.num_samples for source in parts),
        truncated_share=sum(source.count_truncated_tokens() for source in parts) / max(1, tokens),
        padding_share=sum(padding) / max(1, samples) if padding else None,
        truncation_stats=merge_truncation_stats(truncated)
        if len(truncated) > 1
        else next(iter(truncated), None),
        images=count_images([source.tokens for source in parts], sizes.seq_len),
        trained_share=compute_trained_share(parts),
        notes=tuple(dict.fromkeys(note for source in parts for note in source.tokens.meta.get("notes", ()))),
        cache_folder=parts[0].tokens.folder,
        train_samples_by_source={name: count.train for name, count in counts.items() if name},
    )


def count_images(caches: Sequence[TokenCache], seq_len: int) -> ImageCounts | None:
    """Count the images in token caches.

    Args:
        caches: Token caches of the training sources.
        seq_len: Number of tokens per sample. Images that do not fit into a sample are ignored in
            the fields ``documents``, ``largest`` and ``largest_tokens`` of the result.

    Returns:
        The counts. None if no cache can contain images.
    """
    caches = [cache for cache in caches if cache.has_images]
    if not caches:
        return None
    largest: tuple[ImageSize, ...] = ()
    most = documents = 0
    for cache in caches:
        image_tokens = cache.count_image_tokens(seq_len)
        documents += int((image_tokens > 0).sum())
        if len(image_tokens) and image_tokens.max() > most:
            most, number = int(image_tokens.max()), int(image_tokens.argmax())
            largest = tuple(
                image.size
                for image in cache.list_images(number)
                if image.first_token + image.num_tokens <= seq_len
            )
    return ImageCounts(
        sum(cache.num_images for cache in caches),
        documents,
        sum(cache.num_image_tokens for cache in caches),
        largest,
        most,
    )
