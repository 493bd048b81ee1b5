"""Data sets for masked language modeling, sequence-to-sequence and classification."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from portable.data.samples.base import IGNORED, Arrays, Part, Samples, cut, pad_rows
from portable.data.samples.classes import MULTI, SINGLE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portable.data.samples.classes import Classes
    from portable.data.tokens.cache import TokenCache
    from portable.data.tokens.tokenizer import PairFrame, Vocabulary

LabelShift = Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]]
_U64 = (1 << 64) - 1
MASKED_SHARE = 0.15
LAST_LABEL = -1
"""As ``decoder_start_token_id``: each row's own last label, as in mBART."""


class MaskedLM(Samples):
    """Masked language modeling (Devlin et al., "BERT", 2018).

    15% of the tokens that are not special are targets, at least one per sample. Of these, 80% are replaced by
    the mask token, 10% by a random token, and 10% stay. The choice depends only on (seed, epoch, sample).

    Args:
        mask: id of the mask token.
        shift: computes the decoder's input from the labels, for a model with a decoder.
    """

    def __init__(
        self,
        cache: TokenCache,
        part: Part,
        seq_len: int,
        vocabulary: Vocabulary,
        *,
        mask: int,
        suffix: Sequence[int],
        seed: int,
        packed: bool,
        shift: LabelShift | None = None,
    ) -> None:
        self._mask = mask
        self.num_samples = part.num_samples
        self._cache = cache
        self._part = part
        self._length = seq_len
        self._vocabulary = vocabulary
        self._suffix = tuple(suffix)
        self._seed = seed & _U64
        self._packed = packed
        self._shift = shift

    def arrays(self, places: Sequence[tuple[int, int]]) -> Arrays:
        pairs = [self._masked(epoch, self._part(index)) for epoch, index in places]
        inputs, mask = pad_rows([hidden for hidden, _ in pairs], self._length, self._vocabulary.pad)
        labels, _ = pad_rows([targets for _, targets in pairs], self._length, IGNORED)
        arrays = {"input_ids": inputs, "labels": labels}
        if not self._packed:
            arrays["attention_mask"] = mask
        if self._shift is not None:
            arrays["decoder_input_ids"] = self._shift(labels)
        return arrays

    def documents(self, index: int) -> range:
        if not self._packed:
            return self._part.document(index)
        at = self._part(index) * self._length
        return self._cache.documents_between("text", at, at + self._length)

    def _tokens(self, number: int) -> npt.NDArray[np.int64]:
        if not self._packed:
            return cut(self._cache.document("text", number), self._length, self._suffix)
        at = number * self._length
        return np.array(self._cache.tokens["text"][at : at + self._length], dtype=np.int64)

    def _masked(self, epoch: int, number: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        tokens = self._tokens(number)
        key = np.array([self._seed, epoch], dtype=np.uint64)
        counter = np.array([0, 0, 0, number], dtype=np.uint64)
        random = np.random.Generator(np.random.Philox(key=key, counter=counter))
        draw, kind = random.random(self._length)[: len(tokens)], random.random(self._length)[: len(tokens)]
        others = random.integers(0, self._vocabulary.size, self._length)[: len(tokens)]
        draw[np.isin(tokens, self._vocabulary.special)] = 1  # never chosen
        chosen = draw < MASKED_SHARE
        if not chosen.any() and (draw < 1).any():
            chosen[np.argmin(draw)] = True
        labels = np.where(chosen, tokens, IGNORED)
        hidden = np.where(chosen & (kind < 0.8), self._mask, tokens)
        hidden = np.where(chosen & (kind >= 0.9), others, hidden)
        return hidden, labels


class Seq2Seq(Samples):
    """Source and target texts, both padded. The decoder's input is its labels shifted right by one.

    Args:
        suffix: of the texts.
        decoder_start_token_id: the first decoder input, or ``LAST_LABEL``.
        target_suffix: of the targets, if different.
    """

    def __init__(
        self,
        cache: TokenCache,
        part: Part,
        seq_len: int,
        vocabulary: Vocabulary,
        *,
        suffix: Sequence[int],
        decoder_start_token_id: int,
        target_suffix: Sequence[int] | None = None,
        target_seq_len: int | None = None,
    ) -> None:
        self.num_samples = part.num_samples
        self._cache = cache
        self._part = part
        self._length = seq_len
        self._target_length = target_seq_len or seq_len
        self._pad = vocabulary.pad
        self._suffix = tuple(suffix)
        self._target_suffix = self._suffix if target_suffix is None else tuple(target_suffix)
        self._start = decoder_start_token_id

    def arrays(self, places: Sequence[tuple[int, int]]) -> Arrays:
        numbers = [self._part(index) for _, index in places]
        texts = self._field("text", numbers, self._length, self._suffix)
        inputs, mask = pad_rows(texts, self._length, self._pad)
        targets = self._field("target", numbers, self._target_length, self._target_suffix)
        labels, _ = pad_rows(targets, self._target_length, IGNORED)
        last = self._start == LAST_LABEL
        shifted: list[npt.NDArray[Any]] = [
            np.concatenate((row[-1:] if last else [self._start], row[:-1])) for row in targets
        ]
        decoder, _ = pad_rows(shifted, self._target_length, self._pad)
        return {"input_ids": inputs, "attention_mask": mask, "decoder_input_ids": decoder, "labels": labels}

    def documents(self, index: int) -> range:
        return self._part.document(index)

    def _field(
        self, field: str, numbers: Sequence[int], length: int, suffix: Sequence[int]
    ) -> list[npt.NDArray[np.int64]]:
        return [cut(self._cache.document(field, number), length, suffix) for number in numbers]


class Classification(Samples):
    """Texts or pairs of texts with labels.

    Labels are class ids, int64 ``[batch]``; for several classes per text, float32 ``[batch, classes]`` of 0
    and 1; for a regression, float32 ``[batch]`` or ``[batch, numbers]``.

    Args:
        classes: maps the cache's labels to the model's; None if they are equal.
        left: pad on the left, for a model that classifies at the last position, such as XLNet.
        pair: the special tokens around two texts, if the cache has pairs.
    """

    def __init__(
        self,
        cache: TokenCache,
        part: Part,
        seq_len: int,
        vocabulary: Vocabulary,
        *,
        suffix: Sequence[int],
        classes: Classes | None = None,
        left: bool = False,
        pair: PairFrame | None = None,
    ) -> None:
        self.num_samples = part.num_samples
        problem = SINGLE if classes is None else classes.problem
        self.valid_tokens = 1 if classes is None or problem == SINGLE else len(classes.names)
        self._cache = cache
        self._part = part
        self._length = seq_len
        self._pad = vocabulary.pad
        self._suffix = tuple(suffix)
        self._problem = problem
        self._outputs = self.valid_tokens
        # Maps the labels of the cache to the model's.
        self._ids: npt.NDArray[Any] | None = None
        if classes is not None and classes.numbers:
            self._ids = np.array(classes.numbers, dtype=np.float32)
        elif classes is not None:
            self._ids = np.array(classes.ids, dtype=np.int64)
        self._left = left
        self._pair = pair

    def arrays(self, places: Sequence[tuple[int, int]]) -> Arrays:
        numbers = [self._part(index) for _, index in places]
        if self._pair is None:
            texts = [cut(self._cache.document("text", at), self._length, self._suffix) for at in numbers]
        else:
            texts = [np.concatenate(self._parts(at, self._pair)) for at in numbers]
        inputs, mask = pad_rows(texts, self._length, self._pad)
        arrays = {"input_ids": inputs, "attention_mask": mask}
        if self._pair is not None and self._pair.types is not None:
            types = [_types(self._parts(at, self._pair), self._pair.types) for at in numbers]
            arrays["token_type_ids"], _ = pad_rows(types, self._length, self._pair.types[-1])
        if self._left:
            for values in arrays.values():
                for row, text in enumerate(texts):
                    values[row] = np.roll(values[row], self._length - len(text))
        return {**arrays, "labels": self._labels(numbers)}

    def _parts(self, number: int, frame: PairFrame) -> list[npt.NDArray[np.int64]]:
        """The five parts of a pair: before, first, between, second, after."""
        first, second = (self._cache.document(field, number) for field in ("text", "pair"))
        one, two = longest_first(len(first), len(second), self._length - frame.length)
        parts = (frame.before, first[:one], frame.between, second[:two], frame.after)
        return [np.array(part, dtype=np.int64) for part in parts]

    def _labels(self, numbers: Sequence[int]) -> npt.NDArray[Any]:
        cache = self._cache
        if cache.values is not None:
            values: npt.NDArray[np.float32] = cache.values[numbers].astype(np.float32)
            return values if self._problem == MULTI or self._outputs > 1 else values[:, 0]
        assert cache.labels is not None
        if cache.label_offsets is None:
            labels: npt.NDArray[np.int64] = cache.labels[numbers]
            return labels if self._ids is None else self._ids[labels]
        assert self._ids is not None
        several = np.zeros((len(numbers), self._outputs), dtype=np.float32)
        for row, number in enumerate(numbers):
            start, end = cache.label_offsets[number : number + 2].tolist()
            several[row, self._ids[cache.labels[start:end]]] = 1
        return several

    def documents(self, index: int) -> range:
        return self._part.document(index)


def longest_first(first: int, second: int, limit: int) -> tuple[int, int]:
    """Truncate two lengths to ``limit`` in total, the longer one first.

    Equals the tokenizers library's ``longest_first``.
    """
    if first + second <= limit:
        return first, second
    limit = max(0, limit)
    shorter, longer = sorted((first, second))
    shorter, longer = (shorter, limit - shorter) if 2 * shorter <= limit else (limit // 2, limit - limit // 2)
    return (shorter, longer) if first <= second else (longer, shorter)


def _types(parts: Sequence[npt.NDArray[np.int64]], types: tuple[Any, ...]) -> npt.NDArray[np.int64]:
    """The token types of a pair. ``types`` has one value per token or one per part."""
    kinds = (np.array(kind, dtype=np.int64) for kind in types[:5])
    return np.concatenate([np.broadcast_to(kind, len(part)) for part, kind in zip(parts, kinds, strict=True)])
