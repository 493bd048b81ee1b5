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

from portable.batch import IGNORED_LABEL
from portable.data.samples.order import EpochIndex, Permutation, locate_sample
from portable.data.samples.truncation import KeptOrder, Truncation, get_kept_slice
from portable.errors import UserError

if TYPE_CHECKING:
    from portable.batch import Batch
    from portable.data.tokens.cache import TokenCache

LAST_LABEL = -1
"""As ``decoder_start_token_id``: each row's own last label, as in mBART."""
HELD_OUT_SHARE, MIN_HELD_OUT = 0.01, 16
"""Default share of held-out samples, and their smallest number."""
Arrays = dict[str, npt.NDArray[Any]]
ColumnFunction = Callable[[Sequence[int]], Arrays]
"""Returns columns of the samples with these numbers."""


class Samples(ABC):
    """A data set with ``num_samples`` samples. Only their masking may differ between epochs."""

    num_samples: int
    valid_labels_per_sample: int | None = None
    """The number of valid labels per sample, if it is the same for all."""
    padding_share: float = 0.0
    """The share of positions that packing leaves to padding."""
    sequences_per_sample: int = 1
    """The number of sequences in a sample; several are ``[batch, sequences, tokens]``."""
    mean_context_length: float | None = None
    """The mean length of the document that a token is in, where attention stays within it."""
    compute_extra_columns: ColumnFunction | None = None
    """Further columns, which are computed with the model before the training."""

    def __len__(self) -> int:
        return self.num_samples

    @property
    def epoch_samples(self) -> int:
        """The number of samples in one pass over the data, as ``train.epochs`` counts."""
        return self.num_samples

    def locate_sample(self, position: int, seed: int) -> EpochIndex:
        """Return (epoch, index) of the sample at ``position`` of a run."""
        return locate_sample(position, self.num_samples, seed)

    def get_source_name(self, index: int) -> str:
        """The name of the source of a sample in a mixture; empty without one."""
        return ""

    def find_early_sample(self) -> EpochIndex:
        """The place of a sample that is soon there, to see the columns."""
        return EpochIndex(0, 0)

    def count_epochs(self, num_samples: int) -> float | None:
        """How many passes the first ``num_samples`` samples are; None if that is not known yet."""
        return num_samples / self.num_samples

    def compute_progress_metrics(self, position: int) -> dict[str, float]:
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

    def compute_consumed_digest(self, position: int) -> str:
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
        arrays = self.build_arrays_with_columns(indices)
        if self.compute_extra_columns is not None:
            arrays = {**arrays, **self.compute_extra_columns([index for _, index in indices])}
        return {name: torch.from_numpy(values) for name, values in arrays.items()}

    @abstractmethod
    def list_document_numbers(self, index: int) -> Sequence[int]:
        """The numbers of the source's documents in a sample, from 0."""

    @abstractmethod
    def build_arrays(self, indices: Sequence[EpochIndex]) -> Arrays:
        """The same as :meth:`build_batch` in numpy, without further columns."""

    def build_arrays_with_columns(self, indices: Sequence[EpochIndex]) -> Arrays:
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


def count_packed_samples(num_tokens: int, seq_len: int, *, shifted: bool) -> int:
    """Return the number of full blocks in ``num_tokens`` tokens. ``shifted`` labels need one more token.

    Raises:
        UserError: if there is none.
    """
    count = (num_tokens - shifted) // seq_len
    if count < 1:
        longest = num_tokens - shifted
        remedy = f"give at most {longest}, or more text" if longest >= 2 else "give more text"
        raise UserError(
            f"data.seq_len: the source has {num_tokens} tokens, too few for one sample of {seq_len}; {remedy}"
        )
    return count


def split_packed_blocks(
    num_blocks: int, eval_fraction: float | None, excluded_numbers: npt.NDArray[np.int64] | None = None
) -> TrainEvalSplit:
    """Split packed blocks into training and evaluation. The evaluation part is the end of the text.

    Args:
        excluded_numbers: the numbers of blocks that are in neither, in order.
    """
    order: KeptOrder | None = None
    if excluded_numbers is not None and len(excluded_numbers):
        num_blocks -= len(excluded_numbers)
        order = KeptOrder(num_blocks, excluded_numbers, shuffled=False)
    num_held_out = _compute_num_held_out(num_blocks, eval_fraction)
    return TrainEvalSplit(
        SampleRange(0, num_blocks - num_held_out, order),
        SampleRange(num_blocks - num_held_out, num_held_out, order),
    )


def split_documents(
    num_documents: int, eval_fraction: float | None, excluded_numbers: npt.NDArray[np.int64] | None = None
) -> TrainEvalSplit:
    """Split documents into training and evaluation at random, independently of the run's seed.

    Args:
        excluded_numbers: the numbers of documents that are in neither, in order.
    """
    order: Permutation | KeptOrder = Permutation(num_documents, seed=0)
    if excluded_numbers is not None and len(excluded_numbers):
        num_documents -= len(excluded_numbers)
        order = KeptOrder(num_documents, excluded_numbers)
    num_held_out = _compute_num_held_out(num_documents, eval_fraction)
    return TrainEvalSplit(
        SampleRange(0, num_documents - num_held_out, order),
        SampleRange(num_documents - num_held_out, num_held_out, order),
    )


def _compute_num_held_out(num_samples: int, eval_fraction: float | None) -> int:
    """Compute how many samples are held out.

    The default is 1 % of the samples, but at least :data:`MIN_HELD_OUT`, because the mean loss of fewer
    samples is not reliable. It is at most a fifth, because most of a small dataset is needed for training.

    Args:
        num_samples: Number of samples.
        eval_fraction: Value of ``data.eval_fraction``. None means the default.
    """
    if eval_fraction == 0 or num_samples < 2:
        return 0
    if eval_fraction is None:
        return min(max(MIN_HELD_OUT, round(num_samples * HELD_OUT_SHARE)), max(1, num_samples // 5))
    return min(max(1, round(num_samples * eval_fraction)), num_samples - 1)


@dataclass(eq=False)
class CacheSamples(Samples):
    """The samples of a part of a token cache.

    Attributes:
        token_cache: of the tokens.
        sample_range: of its samples.
        seq_len: tokens of a sample.
        includes_columns: whether batches have ``data.columns``; a cache may have columns that nobody asked
        for.
    """

    token_cache: TokenCache
    sample_range: SampleRange
    seq_len: int
    includes_columns = False

    def __post_init__(self) -> None:
        self.num_samples = self.sample_range.num_samples

    def build_arrays_with_columns(self, indices: Sequence[EpochIndex]) -> Arrays:
        """With the further numbers, ``[batch]``, of the record that each sample is."""
        if not self.includes_columns:
            return self.build_arrays(indices)
        numbers = [int(self.list_document_numbers(index)[0]) for _, index in indices]
        return {**self.build_arrays(indices), **self.token_cache.read_extra_columns(numbers)}

    def list_document_numbers(self, index: int) -> range:
        return self.sample_range.get_document_range(index)

    def _find_block_documents(self, index: int) -> range:
        start = self.sample_range(index) * self.seq_len
        return self.token_cache.find_documents_of_tokens("text", start, start + self.seq_len)


class PackedCausalSamples(CacheSamples):
    """Concatenated documents in blocks of ``seq_len``. Every position is a target, if its token is trained.

    Sample *i* is ``input_ids = tokens[i*L : i*L+L]`` and ``labels = tokens[i*L+1 : i*L+L+1]``. No token is a
    target twice, and training and evaluation share no target.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.valid_labels_per_sample = self.seq_len if self.token_cache.trained_bits is None else None

    def build_arrays(self, indices: Sequence[EpochIndex]) -> Arrays:
        length, tokens = self.seq_len, self.token_cache.tokens["text"]
        inputs = np.empty((len(indices), length), dtype=np.int64)
        labels = np.empty_like(inputs)
        for row, (_, index) in enumerate(indices):
            start = self.sample_range(index) * length
            block = tokens[start : start + length + 1]
            inputs[row] = block[:-1]
            labels[row] = block[1:]
            trained = self.token_cache.read_trained_range(start + 1, start + length + 1)
            if trained is not None:
                labels[row][~trained] = IGNORED_LABEL
        return {"input_ids": inputs, "labels": labels}

    def list_document_numbers(self, index: int) -> range:
        return self._find_block_documents(index)


@dataclass(eq=False)
class PaddedCausalSamples(CacheSamples):
    """One document per sample, truncated to ``seq_len`` and padded on the right.

    Attributes:
        pad_token: the padding token.
        keep_last_input: the last token is among the inputs, without a label; else it is a label only.
        keep_last_input_if_room: the last token is among the inputs as well if there is room for it. Unlike
        with ``keep_last_input``,
            a longer document has ``seq_len`` labels.
    """

    pad_token: int
    truncation: Truncation = "end"
    keep_last_input: bool = field(default=False, kw_only=True)
    keep_last_input_if_room: bool = field(default=False, kw_only=True)

    def build_arrays(self, indices: Sequence[EpochIndex]) -> Arrays:
        return self._build_document_arrays([self.sample_range(index) for _, index in indices])

    def _build_document_arrays(self, numbers: Sequence[int]) -> Arrays:
        kept_slice = get_kept_slice(self.truncation, self.seq_len + (not self.keep_last_input))
        documents = [self.token_cache.read_document("text", number)[kept_slice] for number in numbers]
        has_last_token = self.keep_last_input or self.keep_last_input_if_room
        input_tokens = [tokens[: self.seq_len] if has_last_token else tokens[:-1] for tokens in documents]
        inputs, mask = pad_rows(input_tokens, self.seq_len, self.pad_token)
        labels, _ = pad_rows([tokens[1:] for tokens in documents], self.seq_len, IGNORED_LABEL)
        for row, number in zip(labels, numbers, strict=True):
            if (trained := self.token_cache.read_trained_mask("text", number)) is not None:
                targets = trained[kept_slice][1:]
                row[: len(targets)][~targets] = IGNORED_LABEL
        return {"input_ids": inputs, "attention_mask": mask, "labels": labels}


class PairSamples(PaddedCausalSamples):
    """Two documents per sample, one after the other in the source: what was chosen, and what was rejected."""

    sequences_per_sample = 2

    def build_arrays(self, indices: Sequence[EpochIndex]) -> Arrays:
        numbers = [
            2 * self.sample_range(index) + is_rejected for _, index in indices for is_rejected in (0, 1)
        ]
        arrays = self._build_document_arrays(numbers)
        return {name: values.reshape(len(indices), 2, -1) for name, values in arrays.items()}

    def list_document_numbers(self, index: int) -> range:
        first = 2 * self.sample_range(index)
        return range(first, first + 2)


def select_sequence_of_samples(batch: dict[str, Any], index: int) -> dict[str, Any]:
    """The tokens of one sequence of each sample, ``[batch, tokens]``, where samples have several."""
    return {name: values[:, index] for name, values in batch.items() if values.ndim == 3}


def compute_document_lengths(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
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


def pad_rows(rows: Sequence[npt.NDArray[Any]], length: int, pad_value: int) -> PaddedRows:
    """Pad rows on the right; return them and the attention mask.

    A mask has at least one 1 per row, because attention over no position is NaN.
    """
    values = np.full((len(rows), length), pad_value, dtype=np.int64)
    mask = np.zeros((len(rows), length), dtype=np.int64)
    for number, row in enumerate(rows):
        values[number, : len(row)] = row
        mask[number, : max(1, len(row))] = 1
    return PaddedRows(values, mask)


def truncate_keeping_suffix(
    tokens: npt.NDArray[Any], max_length: int, suffix: Sequence[int]
) -> npt.NDArray[np.int64]:
    """Truncate a document to ``max_length`` tokens. It still ends with ``suffix``."""
    out = np.array(tokens[:max_length], dtype=np.int64)
    if len(tokens) > max_length and 0 < len(suffix) < max_length:
        out[-len(suffix) :] = suffix
    return out
