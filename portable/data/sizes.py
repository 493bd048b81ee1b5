"""Sizes of a run's data, shown in a plan and at the start of a run."""

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
MAX_TRUNCATED_SHARE = 0.05  # a larger share of truncated tokens causes a warning


class EvalSize(NamedTuple):
    """Name and size of an evaluation source.

    Attributes:
        source: Name of the source.
        num_samples: Number of samples. None if the source is not tokenized yet.
    """

    source: str
    num_samples: int | None


class ImageCounts(NamedTuple):
    """Image counts over all training sources.

    Attributes:
        images: Number of images.
        documents: Number of conversations with an image.
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
    """Sizes of a run's data. Those that require tokens are None if the data is not tokenized yet."""

    source: str
    """Names of the sources, with additional facts that are known without reading them."""
    tokenizer: str
    """Name of the tokenizer, or a description of the tokenizer to train."""
    vocab_size: int | None
    """Largest token id of the tokenizer plus one."""
    seq_len: int
    """Number of tokens per sample, ``data.seq_len``."""
    packing: bool | Literal["documents"]
    """Value of ``data.packing``. False if the task does not support packing."""
    documents: int | None = None
    """Number of documents of all training sources."""
    tokens: int | None = None
    """Number of tokens of all training sources."""
    train_samples: int | None = None
    """Number of samples to train on."""
    eval_samples: int | None = None
    """Number of samples of the training sources that are held out for evaluation."""
    held_out_records: int | None = None
    """Number of documents, pairs or blocks that are held out for evaluation.

    It is larger than ``eval_samples`` if complete documents are packed.
    """
    truncated_share: float = 0.0
    """Share of tokens that are cut off because their documents are longer than ``seq_len``."""
    padding_share: float | None = None
    """Share of padding in the positions of training samples. None if complete documents are not packed."""
    truncation_stats: TruncationStats | None = None
    """Effect of truncation. None for texts that are only cut off at the end (see ``truncated_share``), and
    for tasks other than causal language modeling.
    """
    trained_share: float | None = None
    """Share of tokens that contribute to the loss. None if all tokens contribute."""
    notes: tuple[str, ...] = ()
    """Unexpected effects of the chat template and numbers of blank records, one sentence each."""
    size_bytes: int | None = None
    """Size of the text of all training sources in bytes. None if it is not known, as for compressed files."""
    cache_folder: Path | None = None
    """Folder of the token cache. None if the tokens are not in the cache."""
    train_samples_by_source: Mapping[str, int] = field(default_factory=dict)
    """Number of samples to train on of each source of a mixture, keyed by name."""
    evals: Mapping[str, EvalSize] = field(default_factory=dict)
    """Description and number of samples of each source of ``data.eval``, keyed by name."""
    evals_in_training_data: tuple[str, ...] = ()
    """Names of the sources of ``data.eval`` that read a file which is also read for training."""
    images: ImageCounts | None = None
    """Counts of the images. None if conversations may not have images."""
    image_processor: ImageProcessor | None = field(default=None, compare=False, repr=False)
    """Processor of the model for images. None if conversations may not have images, or if the processor is
    not available without a download.
    """
    tokenizer_object: Any = field(default=None, compare=False, repr=False)
    """The tokenizer of transformers. None if it is not available without a download."""
    end_of_turn_token: int | None = field(default=None, compare=False, repr=False)
    """Token that ends an answer in conversations. None if it is not known."""
    target_frame: Frame | None = field(default=None, compare=False, repr=False)
    """Special tokens around a target text for seq2seq. None if the tokenizer is not available."""

    def __str__(self) -> str:
        """Format the sizes as one line.

        If the data is not tokenized yet, the line contains only the sources, the tokenizer and the sample
        length.
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
        """Describe the held-out data, such as ``2 to evaluate (16 documents)``."""
        packed = (
            f" ({format_count(self.held_out_records or 0, 'document')})"
            if self.packing == "documents"
            else ""
        )
        return f"{self.eval_samples:,} to evaluate{packed}"

    @property
    def warnings(self) -> list[str]:
        """Warnings about the data, one line each."""
        lines = []
        if self.truncation_stats is not None and (lost := str(self.truncation_stats)):
            lines.append(f"data.truncation: of the samples, {lost}")
        elif self.truncated_share > MAX_TRUNCATED_SHARE:
            lines.append(self._cut_warning)
        lines += [
            f"{format_eval_source_key(name)}: the run also trains on some of its files"
            for name in self.evals_in_training_data
        ]
        return [*lines, *self.notes]

    @property
    def _cut_warning(self) -> str:
        """Text of the warning that truncation removes many tokens, with remedies."""
        return (
            f"data.seq_len: {self.truncated_share:.0%} of the tokens are cut off, because documents are "
            f"truncated to {self.seq_len} tokens; raise data.seq_len, set data.packing to true (language "
            "models), or for .txt files set data.text_split to paragraph or line"
        )


def compute_data_sizes(
    sources: Mapping[str, DataSource],
    tokenized_sources: Mapping[str, TokenizedSource],
    tokenizer: str | None,
    vocab_size: int | None,
) -> DataSizes:
    """Compute the total sizes over all sources of a run.

    Args:
        sources: Training sources, keyed by name.
        tokenized_sources: Tokenized training sources, keyed by name. If a source is missing, the sizes
            that require tokens are None.
        tokenizer: Name of the tokenizer. None if the tokenizer is trained on the data.
        vocab_size: Largest token id of the tokenizer plus one. None if it is not known.
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
    masks = [source.num_trained_tokens for source in parts]
    trained = sum(
        source.tokens.num_tokens if mask is None else mask for source, mask in zip(parts, masks, strict=True)
    )
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
        trained_share=None if set(masks) == {None} else trained / max(1, tokens),
        notes=tuple(dict.fromkeys(note for source in parts for note in source.tokens.meta.get("notes", ()))),
        cache_folder=parts[0].tokens.folder,
        train_samples_by_source={name: count.train for name, count in counts.items() if name},
    )


def count_images(caches: Sequence[TokenCache], seq_len: int) -> ImageCounts | None:
    """Count the images in token caches.

    Args:
        caches: Token caches of the training sources.
        seq_len: Number of tokens per sample. ``largest`` considers only the images that fit into a
            sample.

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
