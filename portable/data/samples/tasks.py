"""Datasets for masked language modeling, sequence-to-sequence tasks and classification."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from portable.batch import IGNORED_LABEL
from portable.data.samples.base import LAST_LABEL, Arrays, CacheSamples, pad_rows, truncate_keeping_suffix
from portable.data.samples.classes import MULTI_LABEL, SINGLE_LABEL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portable.data.samples.classes import LabelMapping
    from portable.data.samples.order import EpochIndex
    from portable.data.tokens.tokenizer import PairFrame, PairTokenTypes, Vocabulary

LabelShift = Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]]
"""Function that computes the decoder's inputs from the labels, both int64 ``[batch, tokens]``."""
_U64 = (1 << 64) - 1
MASKED_SHARE = 0.15
"""Share of tokens that a masked language model must predict."""


class _MaskedTokens(NamedTuple):
    """One masked sample.

    Attributes:
        inputs: Tokens of the sample, int64 ``[tokens]``. Most of the target tokens are replaced by
            the mask token, some by a random token, and some are unchanged.
        labels: Original tokens of the targets, and -100 at all other positions, int64 ``[tokens]``.
    """

    inputs: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]


@dataclass(eq=False)
class MaskedLMSamples(CacheSamples):
    """Dataset for masked language modeling (Devlin et al., "BERT", 2018).

    Each non-special token is a target with a probability of 15%. At least one token per sample
    is a target, unless the sample has only special tokens. On average, 80% of the targets are
    replaced by the mask token, 10% by a random token, and 10% are unchanged. For a given
    ``seq_len``, the random choice depends only on seed, epoch and sample.

    Attributes:
        vocabulary: Vocabulary size and special tokens of the tokenizer.
        mask_token: Id of the mask token.
        suffix: Special tokens that end each text.
        seed: Seed of the random masks.
        is_packed: Whether samples are blocks of concatenated texts. If not, each sample is one
            padded text.
        label_shift: Function that computes the decoder's inputs from the labels. None if the
            model has no decoder.
    """

    vocabulary: Vocabulary
    mask_token: int
    suffix: Sequence[int]
    seed: int
    is_packed: bool
    label_shift: LabelShift | None = None

    def build_arrays(self, indices: Sequence[EpochIndex]) -> Arrays:
        """Build ``input_ids`` and ``labels``, int64 ``[len(indices), seq_len]``.

        Also builds ``attention_mask`` if texts are padded, and ``decoder_input_ids`` if the model has a
        decoder.
        """
        masked_samples = [self._mask_tokens(epoch, self.sample_range(index)) for epoch, index in indices]
        inputs, mask = pad_rows(
            [sample.inputs for sample in masked_samples], self.seq_len, self.vocabulary.pad_token
        )
        labels, _ = pad_rows([sample.labels for sample in masked_samples], self.seq_len, IGNORED_LABEL)
        arrays = {"input_ids": inputs, "labels": labels}
        if not self.is_packed:
            arrays["attention_mask"] = mask
        if self.label_shift is not None:
            arrays["decoder_input_ids"] = self.label_shift(labels)
        return arrays

    def list_document_numbers(self, index: int) -> range:
        """Return the numbers of the documents in a sample, as a range.

        If samples are packed, the range contains the documents that overlap the sample's block.
        Otherwise, it contains one document.
        """
        return self._find_block_documents(index) if self.is_packed else super().list_document_numbers(index)

    def _read_sample_tokens(self, number: int) -> npt.NDArray[np.int64]:
        """Read the tokens of block ``number`` if samples are packed, otherwise of document ``number``.

        Documents are truncated.
        """
        if not self.is_packed:
            return truncate_keeping_suffix(
                self.token_cache.read_document("text", number), self.seq_len, self.suffix
            )
        start = number * self.seq_len
        return np.array(self.token_cache.tokens["text"][start : start + self.seq_len], dtype=np.int64)

    def _mask_tokens(self, epoch: int, number: int) -> _MaskedTokens:
        """Read the tokens of a sample, and randomly choose and mask the tokens to predict.

        Each token is chosen with probability :data:`MASKED_SHARE`. Special tokens are never chosen.
        If the sample has other tokens, at least one token is chosen. A chosen token is replaced
        with the mask token (probability 0.8) or a random token (0.1), or stays unchanged (0.1). The
        labels of all tokens that are not chosen are :data:`IGNORED_LABEL`.

        Args:
            epoch: Epoch of the sample. The random choice depends on the seed, ``epoch`` and
                ``number``.
            number: Index of the document in the token cache, or of the block if samples are packed.
        """
        tokens = self._read_sample_tokens(number)
        key = np.array([self.seed & _U64, epoch], dtype=np.uint64)
        counter = np.array([0, 0, 0, number], dtype=np.uint64)
        random = np.random.Generator(np.random.Philox(key=key, counter=counter))
        draw, kind = random.random(self.seq_len)[: len(tokens)], random.random(self.seq_len)[: len(tokens)]
        others = random.integers(0, self.vocabulary.size, self.seq_len)[: len(tokens)]
        draw[np.isin(tokens, self.vocabulary.special_tokens)] = 1  # special tokens are never chosen
        chosen = draw < MASKED_SHARE
        if not chosen.any() and (draw < 1).any():
            chosen[np.argmin(draw)] = True
        labels = np.where(chosen, tokens, IGNORED_LABEL)
        hidden = np.where(chosen & (kind < 0.8), self.mask_token, tokens)
        hidden = np.where(chosen & (kind >= 0.9), others, hidden)
        return _MaskedTokens(hidden, labels)


@dataclass(eq=False)
class Seq2SeqSamples(CacheSamples):
    """Dataset of source and target texts, both truncated and padded.

    The decoder's inputs are the labels, shifted right by one.

    Attributes:
        vocabulary: Vocabulary size and special tokens of the tokenizer.
        suffix: Special tokens that end each source text.
        decoder_start_token_id: First decoder input: a token id, or ``LAST_LABEL`` for the last
            label of the same row.
        target_suffix: Special tokens that end each target text. If None, ``suffix`` is used.
        target_seq_len: Length of target rows in tokens. If None, ``seq_len`` is used.
    """

    vocabulary: Vocabulary
    suffix: Sequence[int]
    decoder_start_token_id: int
    target_suffix: Sequence[int] | None = None
    target_seq_len: int | None = None

    def build_arrays(self, indices: Sequence[EpochIndex]) -> Arrays:
        """Build ``input_ids``, ``attention_mask``, ``decoder_input_ids`` and ``labels``.

        ``input_ids`` and ``attention_mask`` are int64 ``[len(indices), seq_len]``. ``decoder_input_ids``
        and ``labels`` are int64 ``[len(indices), target_seq_len]``.
        """
        numbers = [self.sample_range(index) for _, index in indices]
        pad, length = self.vocabulary.pad_token, self.target_seq_len or self.seq_len
        inputs, mask = pad_rows(
            self._read_truncated_field("text", numbers, self.seq_len, self.suffix), self.seq_len, pad
        )
        suffix = self.suffix if self.target_suffix is None else self.target_suffix
        targets = self._read_truncated_field("target", numbers, length, suffix)
        labels, _ = pad_rows(targets, length, IGNORED_LABEL)
        start = self.decoder_start_token_id
        shifted: list[npt.NDArray[Any]] = [
            np.concatenate((row[-1:] if start == LAST_LABEL else [start], row[:-1])) for row in targets
        ]
        decoder, _ = pad_rows(shifted, length, pad)
        return {"input_ids": inputs, "attention_mask": mask, "decoder_input_ids": decoder, "labels": labels}

    def _read_truncated_field(
        self, field: str, numbers: Sequence[int], length: int, suffix: Sequence[int]
    ) -> list[npt.NDArray[np.int64]]:
        """Read one field of several documents, each truncated to at most ``length`` tokens.

        Args:
            field: Name of the field: ``text`` or ``target``.
            numbers: Indices of the documents in the token cache.
            length: Maximum number of tokens, including ``suffix``.
            suffix: Special tokens at the end of the field, which truncation keeps.
        """
        return [
            truncate_keeping_suffix(self.token_cache.read_document(field, number), length, suffix)
            for number in numbers
        ]


@dataclass(eq=False)
class ClassificationSamples(CacheSamples):
    """Dataset of labeled texts or text pairs, truncated and padded.

    By default, labels are class ids, int64 ``[batch]``. If a text may have several classes, labels are
    scores from 0 to 1, float32 ``[batch, classes]``. For regression, labels are numbers, float32
    ``[batch]`` or ``[batch, numbers]``.

    Attributes:
        vocabulary: Vocabulary size and special tokens of the tokenizer.
        suffix: Special tokens that end each text.
        label_mapping: Mapping from the labels in the cache to the outputs of the model. None if the
            class numbers in the cache are already the class ids of the model.
        pad_left: Whether to pad on the left, for models that classify at the last position, such as
            XLNet.
        pair_frame: Special tokens before, between and after the two texts of a pair. None for single
            texts.
    """

    vocabulary: Vocabulary
    suffix: Sequence[int]
    label_mapping: LabelMapping | None = None
    pad_left: bool = False
    pair_frame: PairFrame | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        classes = self.label_mapping
        self._problem = SINGLE_LABEL if classes is None else classes.problem_type
        self.valid_labels_per_sample = (
            1 if classes is None or self._problem == SINGLE_LABEL else len(classes.output_names)
        )
        self._num_outputs = self.valid_labels_per_sample
        self._label_values: npt.NDArray[Any] | None = None
        """Class id or regression value of each class in the cache. None if ``label_mapping`` is None."""
        if classes is not None and classes.regression_values:
            self._label_values = np.array(classes.regression_values, dtype=np.float32)
        elif classes is not None:
            self._label_values = np.array(classes.output_ids, dtype=np.int64)

    def build_arrays(self, indices: Sequence[EpochIndex]) -> Arrays:
        """Build ``input_ids``, ``attention_mask`` and ``labels``.

        For text pairs, also builds ``token_type_ids`` if the model uses token types. All are int64
        ``[len(indices), seq_len]``, except for the labels, which the class docstring describes.
        """
        numbers = [self.sample_range(index) for _, index in indices]
        pair = self.pair_frame
        if pair is None:
            texts = [
                truncate_keeping_suffix(
                    self.token_cache.read_document("text", number), self.seq_len, self.suffix
                )
                for number in numbers
            ]
        else:
            texts = [np.concatenate(self._build_pair_parts(number, pair)) for number in numbers]
        inputs, mask = pad_rows(texts, self.seq_len, self.vocabulary.pad_token)
        arrays = {"input_ids": inputs, "attention_mask": mask}
        if pair is not None and pair.types is not None:
            types = [
                _build_token_types(self._build_pair_parts(number, pair), pair.types) for number in numbers
            ]
            arrays["token_type_ids"], _ = pad_rows(types, self.seq_len, pair.types.padding)
        if self.pad_left:
            for values in arrays.values():
                for row, text in enumerate(texts):
                    values[row] = np.roll(values[row], self.seq_len - len(text))
        return {**arrays, "labels": self._build_labels(numbers)}

    def _build_pair_parts(self, number: int, frame: PairFrame) -> list[npt.NDArray[np.int64]]:
        """Build the texts and special tokens of an encoded pair, truncated to ``seq_len`` tokens in total.

        Args:
            number: Number of the document.
            frame: Special tokens before, between and after the texts.

        Returns:
            The special tokens before the first text, the first text, the special tokens between the texts,
            the second text, and the special tokens after it. All are int64.
        """
        first, second = (self.token_cache.read_document(field, number) for field in ("text", "pair"))
        first_length, second_length = truncate_longer_text_first(
            len(first), len(second), self.seq_len - frame.num_special_tokens
        )
        parts = (frame.before, first[:first_length], frame.between, second[:second_length], frame.after)
        return [np.array(part, dtype=np.int64) for part in parts]

    def _build_labels(self, numbers: Sequence[int]) -> npt.NDArray[Any]:
        """Build the labels of documents: class ids, class scores, or regression targets.

        The class docstring describes their shapes and dtypes.

        Args:
            numbers: Indices of the documents in the token cache.
        """
        cache = self.token_cache
        if cache.label_values is not None:
            values: npt.NDArray[np.float32] = cache.label_values[numbers].astype(np.float32)
            return values if self._problem == MULTI_LABEL or self._num_outputs > 1 else values[:, 0]
        assert cache.labels is not None
        if cache.label_offsets is None:
            labels: npt.NDArray[np.int64] = cache.labels[numbers]
            return labels if self._label_values is None else self._label_values[labels]
        assert self._label_values is not None
        multi_hot = np.zeros((len(numbers), self._num_outputs), dtype=np.float32)
        for row, number in enumerate(numbers):
            start, end = cache.label_offsets[number : number + 2].tolist()
            multi_hot[row, self._label_values[cache.labels[start:end]]] = 1
        return multi_hot


class PairLengths(NamedTuple):
    """Lengths of the two texts in a pair, in tokens."""

    first: int
    second: int


def truncate_longer_text_first(first_length: int, second_length: int, max_total: int) -> PairLengths:
    """Compute the lengths to which the two texts of a pair are truncated.

    Tokens are removed from the longer text until both have the same length, then from both. This is the
    strategy ``longest_first`` of the tokenizers library.

    Args:
        first_length: Number of tokens in the first text.
        second_length: Number of tokens in the second text.
        max_total: Maximum total number of tokens in both texts.

    Returns:
        The new lengths. They are unchanged if their sum is at most ``max_total``.
    """
    if first_length + second_length <= max_total:
        return PairLengths(first_length, second_length)
    max_total = max(0, max_total)
    shorter, longer = sorted((first_length, second_length))
    shorter, longer = (
        (shorter, max_total - shorter)
        if 2 * shorter <= max_total
        else (max_total // 2, max_total - max_total // 2)
    )
    return PairLengths(shorter, longer) if first_length <= second_length else PairLengths(longer, shorter)


def _build_token_types(
    parts: Sequence[npt.NDArray[np.int64]], types: PairTokenTypes
) -> npt.NDArray[np.int64]:
    """Build the token types of an encoded text pair, int64 ``[tokens]``.

    Args:
        parts: The five parts from :meth:`ClassificationSamples._build_pair_parts`.
        types: Token types of the parts.
    """
    kinds = (np.array(kind, dtype=np.int64) for kind in types[:5])
    return np.concatenate([np.broadcast_to(kind, len(part)) for part, kind in zip(parts, kinds, strict=True)])
