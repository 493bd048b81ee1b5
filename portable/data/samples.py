"""Map-style data sets over a token cache: sample *i* as tensors of a fixed shape.

Every sample is a dictionary of int64 tensors with ``labels`` among them, which are float32 where a
classifier learns numbers. Labels are aligned with the
logits: ``labels[t]`` is what ``logits[t]`` should predict, shifted here where the task shifts, so that a
loss never shifts; -100 marks a position that does not count. Shapes never vary, because a compiled step
needs them fixed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from portable.data.order import Permutation
from portable.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portable.data.cache import TokenCache

IGNORED = -100
Arrays = dict[str, npt.NDArray[Any]]
Batch = dict[str, torch.Tensor]


class Samples(ABC):
    """A data set with ``num_samples`` samples, which may differ from epoch to epoch in their masking only."""

    num_samples: int
    valid_tokens: int | None = None
    """How many labels count in each sample, where that is the same for all."""

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Batch:
        if not -self.num_samples <= index < self.num_samples:
            raise IndexError(f"sample {index} of {self.num_samples}")
        return {name: values[0] for name, values in self.batch([(0, index % self.num_samples)]).items()}

    def batch(self, places: Sequence[tuple[int, int]]) -> Batch:
        """The samples at these (epoch, index) places, stacked: tensors of shape ``[len(places), ...]``."""
        return {name: torch.from_numpy(values) for name, values in self.arrays(places).items()}

    @abstractmethod
    def documents(self, index: int) -> range:
        """The documents of the source that a sample is made of, counted from 0."""

    @abstractmethod
    def arrays(self, places: Sequence[tuple[int, int]]) -> Arrays:
        """The same in numpy."""


@dataclass(frozen=True)
class Part:
    """The stretch of the source's samples that a data set has: ``[start, start + num_samples)``."""

    start: int
    num_samples: int
    order: Permutation | None = None
    """Shuffles the source's samples first, so that the end of a sorted source is no biased evaluation set."""

    def __call__(self, index: int) -> int:
        at = self.start + index
        return at if self.order is None else self.order(at)

    def document(self, index: int) -> range:
        """The one document of a sample, where a sample is a document."""
        return range(self(index), self(index) + 1)


def packed_samples(tokens: int, seq_len: int, *, shifted: bool) -> int:
    """How many whole blocks ``tokens`` tokens make; ``shifted`` labels need one token more.

    Raises:
        UserError: not even one.
    """
    count = (tokens - shifted) // seq_len
    if count < 1:
        raise UserError(
            f"data.seq_len: the source has {tokens} tokens, too few for one sample of {seq_len}; "
            f"give at most {max(1, tokens - shifted)}, or more text"
        )
    return count


def split_blocks(blocks: int, eval_fraction: float) -> tuple[Part, Part]:
    """The training and the evaluation part of packed blocks: the evaluation is the end of the text."""
    held = _held_out(blocks, eval_fraction)
    return Part(0, blocks - held), Part(blocks - held, held)


def split_documents(documents: int, eval_fraction: float) -> tuple[Part, Part]:
    """The training and the evaluation part of documents, drawn alike whatever the run's seed."""
    held = _held_out(documents, eval_fraction)
    order = Permutation(documents, seed=0)
    return Part(0, documents - held, order), Part(documents - held, held, order)


def _held_out(samples: int, eval_fraction: float) -> int:
    if eval_fraction <= 0 or samples < 2:
        return 0
    return min(max(1, round(samples * eval_fraction)), samples - 1)


class PackedCausal(Samples):
    """Documents joined end to end and cut in blocks of ``seq_len``, every position a target.

    Sample *i* is ``input_ids = tokens[i*L : i*L+L]`` and ``labels = tokens[i*L+1 : i*L+L+1]``, so no token is
    a target twice, and no target of a training sample is one of an evaluation sample.
    """

    def __init__(self, cache: TokenCache, part: Part, seq_len: int) -> None:
        self.num_samples = part.num_samples
        self.valid_tokens = seq_len
        self._cache = cache
        self._part = part
        self._length = seq_len

    def arrays(self, places: Sequence[tuple[int, int]]) -> Arrays:
        length, tokens = self._length, self._cache.tokens["text"]
        inputs = np.empty((len(places), length), dtype=np.int64)
        labels = np.empty_like(inputs)
        for row, (_, index) in enumerate(places):
            at = self._part(index) * length
            block = tokens[at : at + length + 1]
            inputs[row] = block[:-1]
            labels[row] = block[1:]
        return {"input_ids": inputs, "labels": labels}

    def documents(self, index: int) -> range:
        at = self._part(index) * self._length
        return self._cache.documents_between("text", at, at + self._length)


class PaddedCausal(Samples):
    """One document a sample, cut to ``seq_len`` and padded on the right."""

    def __init__(self, cache: TokenCache, part: Part, seq_len: int, pad: int) -> None:
        self.num_samples = part.num_samples
        self._cache = cache
        self._part = part
        self._length = seq_len
        self._pad = pad

    def arrays(self, places: Sequence[tuple[int, int]]) -> Arrays:
        documents = [
            self._cache.document("text", self._part(index))[: self._length + 1] for _, index in places
        ]
        inputs, mask = pad_rows([tokens[:-1] for tokens in documents], self._length, self._pad)
        labels, _ = pad_rows([tokens[1:] for tokens in documents], self._length, IGNORED)
        return {"input_ids": inputs, "attention_mask": mask, "labels": labels}

    def documents(self, index: int) -> range:
        return self._part.document(index)


def pad_rows(
    rows: Sequence[npt.NDArray[Any]], length: int, pad: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The rows in one array, filled up on the right, and the attention mask.

    A mask has at least one 1 a row: an attention over nothing is not a number.
    """
    values = np.full((len(rows), length), pad, dtype=np.int64)
    mask = np.zeros((len(rows), length), dtype=np.int64)
    for number, row in enumerate(rows):
        values[number, : len(row)] = row
        mask[number, : max(1, len(row))] = 1
    return values, mask


def cut(tokens: npt.NDArray[Any], length: int, suffix: Sequence[int]) -> npt.NDArray[np.int64]:
    """The first ``length`` tokens; where the document is longer, it still ends in its special tokens."""
    out = np.array(tokens[:length], dtype=np.int64)
    if len(tokens) > length and 0 < len(suffix) < length:
        out[-len(suffix) :] = suffix
    return out
