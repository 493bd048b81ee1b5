"""Map-style data sets over a token cache, with samples of a fixed shape.

A sample is a dictionary of int64 tensors. Its ``labels`` are float32 for numeric targets. Labels are aligned
with the logits: ``labels[t]`` is the target of ``logits[t]``. The data set shifts them if the task needs it,
so a loss never does. -100 marks positions that do not count. Shapes are fixed for compiled steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from portable.batch import IGNORED
from portable.data.samples.order import EpochIndex, Permutation, locate
from portable.data.samples.truncation import KeptOrder, Truncation, get_kept_slice
from portable.errors import UserError

if TYPE_CHECKING:
    from portable.batch import Batch
    from portable.data.tokens.cache import TokenCache

LAST_LABEL = -1
"""As ``decoder_start_token_id``: each row's own last label, as in mBART."""
HELD_OUT_SHARE, LEAST_HELD_OUT = 0.01, 16
"""Default share of held-out samples, and their smallest number."""
Arrays = dict[str, npt.NDArray[Any]]
Computed = Callable[[Sequence[int]], Arrays]
"""Returns columns of the samples with these numbers."""


class Samples(ABC):
    """A data set with ``num_samples`` samples. Only their masking may differ between epochs."""

    num_samples: int
    valid_tokens: int | None = None
    """The number of valid labels per sample, if it is the same for all."""
    waste: float = 0.0
    """The share of positions that packing leaves to padding."""
    sequences: int = 1
    """The number of sequences in a sample; several are ``[batch, sequences, tokens]``."""
    context: float | None = None
    """The mean length of the document that a token is in, where attention stays within it."""
    computed: Computed | None = None
    """Further columns, which are computed with the model before the training."""

    def __len__(self) -> int:
        return self.num_samples

    @property
    def epoch_samples(self) -> int:
        """The number of samples in one pass over the data, as ``train.epochs`` counts."""
        return self.num_samples

    def locate(self, position: int, seed: int) -> EpochIndex:
        """Return (epoch, index) of the sample at ``position`` of a run."""
        return locate(position, self.num_samples, seed)

    def get_source_name(self, index: int) -> str:
        """The name of the source of a sample in a mixture; empty without one."""
        return ""

    def find_example(self) -> EpochIndex:
        """The place of a sample that is soon there, to see the columns."""
        return EpochIndex(0, 0)

    def count_epochs(self, taken: int) -> float | None:
        """How many passes the first ``taken`` samples are; None if that is not known yet."""
        return taken / self.num_samples

    def compute_progress(self, position: int) -> dict[str, float]:
        """Numbers to log about the first ``position`` samples of a run, by name."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of the samples besides the position: the manifests of streams, by name."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the :meth:`state` of a checkpoint.

        Raises:
            ValueError: if it is none. RunError: if the data has changed since.
        """
        return

    def digest_consumed(self, position: int) -> str:
        """A digest of what decided the samples up to ``position``, where that is not known beforehand."""
        return ""

    def close(self) -> None:
        """End what runs beside the training: the processes of streams. The samples stay readable."""
        return

    def __getitem__(self, index: int) -> Batch:
        if not -self.num_samples <= index < self.num_samples:
            raise IndexError(f"sample {index} of {self.num_samples}")
        return {
            name: values[0]
            for name, values in self.build_batch([EpochIndex(0, index % self.num_samples)]).items()
        }

    def build_batch(self, indices: Sequence[EpochIndex]) -> Batch:
        """Stack the samples with these epochs and indices: tensors of shape ``[len(indices), ...]``."""
        arrays = self.build_columns(indices)
        if self.computed is not None:
            arrays = {**arrays, **self.computed([index for _, index in indices])}
        return {name: torch.from_numpy(values) for name, values in arrays.items()}

    @abstractmethod
    def list_documents(self, index: int) -> Sequence[int]:
        """The numbers of the source's documents in a sample, from 0."""

    @abstractmethod
    def build_arrays(self, indices: Sequence[EpochIndex]) -> Arrays:
        """The same as :meth:`build_batch` in numpy, without further columns."""

    def build_columns(self, indices: Sequence[EpochIndex]) -> Arrays:
        """The same with those that the data has."""
        return self.build_arrays(indices)


@dataclass(frozen=True)
class SampleRange:
    """The range of the source's samples in a data set: ``[start, start + num_samples)``."""

    start: int
    num_samples: int
    order: Permutation | KeptOrder | None = None
    """Shuffles the samples first, so that the evaluation part of a sorted source is not biased."""

    def __call__(self, index: int) -> int:
        position = self.start + index
        return position if self.order is None else self.order(position)

    def get_document_range(self, index: int) -> range:
        """The document of a sample, if each sample is one document."""
        return range(self(index), self(index) + 1)


class TrainEvalSplit(NamedTuple):
    """Samples of a source to train on, and samples held out for evaluation."""

    train: SampleRange
    held_out: SampleRange


def count_packed_samples(tokens: int, seq_len: int, *, shifted: bool) -> int:
    """Return the number of full blocks in ``tokens`` tokens. ``shifted`` labels need one more token.

    Raises:
        UserError: if there is none.
    """
    count = (tokens - shifted) // seq_len
    if count < 1:
        longest = tokens - shifted
        remedy = f"give at most {longest}, or more text" if longest >= 2 else "give more text"
        raise UserError(
            f"data.seq_len: the source has {tokens} tokens, too few for one sample of {seq_len}; {remedy}"
        )
    return count


def split_blocks(
    blocks: int, eval_fraction: float | None, left_out: npt.NDArray[np.int64] | None = None
) -> TrainEvalSplit:
    """Split packed blocks into training and evaluation. The evaluation part is the end of the text.

    Args:
        left_out: the numbers of blocks that are in neither, in order.
    """
    order: KeptOrder | None = None
    if left_out is not None and len(left_out):
        blocks -= len(left_out)
        order = KeptOrder(blocks, left_out, shuffled=False)
    num_held_out = _count_held_out(blocks, eval_fraction)
    return TrainEvalSplit(
        SampleRange(0, blocks - num_held_out, order), SampleRange(blocks - num_held_out, num_held_out, order)
    )


def split_documents(
    documents: int, eval_fraction: float | None, left_out: npt.NDArray[np.int64] | None = None
) -> TrainEvalSplit:
    """Split documents into training and evaluation at random, independently of the run's seed.

    Args:
        left_out: the numbers of documents that are in neither, in order.
    """
    order: Permutation | KeptOrder = Permutation(documents, seed=0)
    if left_out is not None and len(left_out):
        documents -= len(left_out)
        order = KeptOrder(documents, left_out)
    num_held_out = _count_held_out(documents, eval_fraction)
    return TrainEvalSplit(
        SampleRange(0, documents - num_held_out, order),
        SampleRange(documents - num_held_out, num_held_out, order),
    )


def _count_held_out(samples: int, eval_fraction: float | None) -> int:
    """Compute how many samples are held out.

    The default is 1 % of the samples, but at least :data:`LEAST_HELD_OUT`, because the mean loss of fewer
    samples is not reliable. It is at most a fifth, because most of a small dataset is needed for training.

    Args:
        samples: Number of samples.
        eval_fraction: Value of ``data.eval_fraction``. None means the default.
    """
    if eval_fraction == 0 or samples < 2:
        return 0
    if eval_fraction is None:
        return min(max(LEAST_HELD_OUT, round(samples * HELD_OUT_SHARE)), max(1, samples // 5))
    return min(max(1, round(samples * eval_fraction)), samples - 1)


@dataclass(eq=False)
class CacheSamples(Samples):
    """The samples of a part of a token cache.

    Attributes:
        cache: of the tokens.
        part: of its samples.
        seq_len: tokens of a sample.
        with_columns: whether batches have ``data.columns``; a cache may have columns that nobody asked for.
    """

    cache: TokenCache
    part: SampleRange
    seq_len: int
    with_columns = False

    def __post_init__(self) -> None:
        self.num_samples = self.part.num_samples

    def build_columns(self, indices: Sequence[EpochIndex]) -> Arrays:
        """With the further numbers, ``[batch]``, of the record that each sample is."""
        if not self.with_columns:
            return self.build_arrays(indices)
        numbers = [int(self.list_documents(index)[0]) for _, index in indices]
        return {**self.build_arrays(indices), **self.cache.read_columns(numbers)}

    def list_documents(self, index: int) -> range:
        return self.part.get_document_range(index)

    def _find_block_documents(self, index: int) -> range:
        start = self.part(index) * self.seq_len
        return self.cache.find_documents("text", start, start + self.seq_len)


class PackedCausal(CacheSamples):
    """Concatenated documents in blocks of ``seq_len``. Every position is a target, if its token is trained.

    Sample *i* is ``input_ids = tokens[i*L : i*L+L]`` and ``labels = tokens[i*L+1 : i*L+L+1]``. No token is a
    target twice, and training and evaluation share no target.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.valid_tokens = self.seq_len if self.cache.trained_bits is None else None

    def build_arrays(self, indices: Sequence[EpochIndex]) -> Arrays:
        length, tokens = self.seq_len, self.cache.tokens["text"]
        inputs = np.empty((len(indices), length), dtype=np.int64)
        labels = np.empty_like(inputs)
        for row, (_, index) in enumerate(indices):
            start = self.part(index) * length
            block = tokens[start : start + length + 1]
            inputs[row] = block[:-1]
            labels[row] = block[1:]
            trained = self.cache.read_trained_range(start + 1, start + length + 1)
            if trained is not None:
                labels[row][~trained] = IGNORED
        return {"input_ids": inputs, "labels": labels}

    def list_documents(self, index: int) -> range:
        return self._find_block_documents(index)


@dataclass(eq=False)
class PaddedCausal(CacheSamples):
    """One document per sample, truncated to ``seq_len`` and padded on the right.

    Attributes:
        pad: the padding token.
        whole: the last token is among the inputs, without a label; else it is a label only.
        with_last: the last token is among the inputs as well if there is room for it. Unlike with ``whole``,
            a longer document has ``seq_len`` labels.
    """

    pad: int
    truncation: Truncation = "end"
    whole: bool = field(default=False, kw_only=True)
    with_last: bool = field(default=False, kw_only=True)

    def build_arrays(self, indices: Sequence[EpochIndex]) -> Arrays:
        return self._build_arrays([self.part(index) for _, index in indices])

    def _build_arrays(self, numbers: Sequence[int]) -> Arrays:
        kept_slice = get_kept_slice(self.truncation, self.seq_len + (not self.whole))
        documents = [self.cache.read_document("text", number)[kept_slice] for number in numbers]
        has_last_token = self.whole or self.with_last
        input_tokens = [tokens[: self.seq_len] if has_last_token else tokens[:-1] for tokens in documents]
        inputs, mask = pad_rows(input_tokens, self.seq_len, self.pad)
        labels, _ = pad_rows([tokens[1:] for tokens in documents], self.seq_len, IGNORED)
        for row, number in zip(labels, numbers, strict=True):
            if (trained := self.cache.read_trained_mask("text", number)) is not None:
                targets = trained[kept_slice][1:]
                row[: len(targets)][~targets] = IGNORED
        return {"input_ids": inputs, "attention_mask": mask, "labels": labels}


class PairSamples(PaddedCausal):
    """Two documents per sample, one after the other in the source: what was chosen, and what was rejected."""

    sequences = 2

    def build_arrays(self, indices: Sequence[EpochIndex]) -> Arrays:
        numbers = [2 * self.part(index) + which for _, index in indices for which in (0, 1)]
        arrays = self._build_arrays(numbers)
        return {name: values.reshape(len(indices), 2, -1) for name, values in arrays.items()}

    def list_documents(self, index: int) -> range:
        first = 2 * self.part(index)
        return range(first, first + 2)


def select_sequence(batch: dict[str, Any], index: int) -> dict[str, Any]:
    """The tokens of one sequence of each sample, ``[batch, tokens]``, where samples have several."""
    return {name: values[:, index] for name, values in batch.items() if values.ndim == 3}


def count_text_tokens(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Count the inputs of the text that each token is in.

    Args:
        inputs: A batch, with ``position_ids`` if its samples are packed documents.

    Returns:
        The lengths, int64 ``[batch, tokens]`` or ``[batch, 1]``.
    """
    ids, positions, mask = inputs["input_ids"], inputs.get("position_ids"), inputs.get("attention_mask")
    if positions is None:
        return (torch.ones_like(ids) if mask is None else mask).sum(dim=-1, keepdim=True)
    documents = (positions == 0).long().cumsum(dim=-1)  # on XLA, cumsum of booleans is boolean
    counts = torch.zeros_like(torch.nn.functional.pad(documents, (0, 1)))
    return counts.scatter_add(1, documents, torch.ones_like(documents)).gather(1, documents)


class PaddedRows(NamedTuple):
    """Rows padded to one length.

    Attributes:
        values: Padded rows, int64 ``[rows, length]``.
        mask: Attention mask, int64 ``[rows, length]``: 1 for a value of a row, 0 for padding.
    """

    values: npt.NDArray[np.int64]
    mask: npt.NDArray[np.int64]


def pad_rows(rows: Sequence[npt.NDArray[Any]], length: int, pad: int) -> PaddedRows:
    """Pad rows on the right; return them and the attention mask.

    A mask has at least one 1 per row, because attention over no position is NaN.
    """
    values = np.full((len(rows), length), pad, dtype=np.int64)
    mask = np.zeros((len(rows), length), dtype=np.int64)
    for number, row in enumerate(rows):
        values[number, : len(row)] = row
        mask[number, : max(1, len(row))] = 1
    return PaddedRows(values, mask)


def cut(tokens: npt.NDArray[Any], length: int, suffix: Sequence[int]) -> npt.NDArray[np.int64]:
    """Truncate a document to ``length`` tokens. It still ends with ``suffix``."""
    out = np.array(tokens[:length], dtype=np.int64)
    if len(tokens) > length and 0 < len(suffix) < length:
        out[-len(suffix) :] = suffix
    return out
