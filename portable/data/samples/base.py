"""Datasets over a token cache, with samples of a fixed shape.

A sample is a dictionary of tensors. The columns of the task are int64, except that
``labels`` are float32 for numeric targets. Additional columns and image tensors may have
floating-point dtypes. Labels of tokens are aligned with the logits: ``labels[t]`` is the
target of ``logits[t]``. The dataset shifts them if the task requires it, so a loss must not
shift them again. Positions with label -100 do not contribute to the loss. All samples have
the same shapes, so a step is compiled only once. Image tensors are an exception, and also
``document_lengths``, whose width may differ between the shards of a stream.
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
from portable.data.samples.truncation import KeptOrder, Truncation, find_image_cut, get_kept_slice
from portable.errors import UserError

if TYPE_CHECKING:
    from portable.batch import Batch
    from portable.data.images import ImageFile
    from portable.data.tokens.cache import CachedImage, TokenCache
    from portable.data.tokens.image_processing import ImageProcessor

LAST_LABEL = -1
"""Value of ``decoder_start_token_id`` for models such as mBART: the first input is the last label."""
HELD_OUT_SHARE, MIN_HELD_OUT = 0.01, 16
"""Share of held-out samples and their minimum number, if ``data.eval_fraction`` is null."""
Arrays = dict[str, npt.NDArray[Any]]
"""Arrays of a batch, keyed by column. The first dimension is the batch."""
ColumnFunction = Callable[[Sequence[int]], Arrays]
"""Function that computes additional columns from the indices of samples."""


class PromptImage(NamedTuple):
    """Image in a prompt, and the content of its file.

    A prompt consists of the first tokens of a sample.

    Attributes:
        image: Location, size and tokens of the image in the token cache.
        file: Content of the image file, and the size to which the image is scaled.
    """

    image: CachedImage
    file: ImageFile


class Samples(ABC):
    """Base class of datasets that also define the order of their samples in a run.

    Subclasses set :attr:`num_samples`, and implement :meth:`build_arrays` and
    :meth:`list_document_numbers`. The other methods have defaults for a single source without
    images, additional columns or streaming.

    Every epoch contains the same samples in a different order. In a mixture, this applies to the
    epochs of each source. The content of a sample does not depend on the epoch, except for the
    random masks in masked language modeling.
    """

    num_samples: int
    """Number of sample indices. For a stream, whose size is not known, it is an upper bound."""
    valid_labels_per_sample: int | None = None
    """Number of labels per sample that contribute to the loss. None if it differs between samples."""
    padding_share: float = 0.0
    """Share of positions that are padding if complete documents are packed. 0 for other samples."""
    sequences_per_sample: int = 1
    """Number of sequences per sample. If it is more than 1, tensors of a batch are ``[batch, sequences,
    tokens]``.
    """
    mean_context_length: float | None = None
    """Length of the document that contains a token, averaged over all tokens.

    None if attention is not limited to documents.
    """
    image_processor: ImageProcessor | None = None
    """Processor of the images in the samples. None if the run has no images."""
    compute_extra_columns: ColumnFunction | None = None
    """Function that returns additional columns that were computed with a model before training, such as
    log-probabilities of a reference model. None if there are no such columns.
    """

    def __len__(self) -> int:
        return self.num_samples

    @property
    def epoch_samples(self) -> int:
        """Number of samples in one epoch of the run.

        If ``train.epochs`` is set, this number determines the number of steps. If the data contains
        a stream, the number is only an upper bound.
        """
        return self.num_samples

    def locate_sample(self, position: int, seed: int) -> EpochIndex:
        """Return the epoch and index of the sample at a given position of the run.

        Args:
            position: Position in the run: the number of samples before this one.
            seed: Seed of the run.
        """
        return locate_sample(position, self.num_samples, seed)

    def get_source_name(self, index: int) -> str:
        """Return the name of a sample's source.

        Returns:
            For a mixture, the name of the source. For a stream, the name of the file. For a stream
            in a mixture, both names, separated by a space. Otherwise empty.
        """
        return ""

    def find_early_sample(self) -> EpochIndex:
        """Return the epoch and index of a sample that can be read quickly.

        Callers use the sample to inspect the columns of a batch.
        """
        return self.list_early_samples(1)[0]

    def list_early_samples(self, num_samples: int) -> list[EpochIndex]:
        """List the epochs and indices of ``num_samples`` samples that can be read quickly.

        If there are too few of them, they repeat.
        """
        return [EpochIndex(0, index % self.num_samples) for index in range(num_samples)]

    def list_trial_samples(self, num_samples: int) -> list[EpochIndex]:
        """List the samples of a batch that tests whether a training step fits in memory.

        If the data contains images, the sample with the most image tokens is listed ``num_samples``
        times, as the worst case. Otherwise, see :meth:`list_early_samples`.
        """
        image_tokens = self.count_image_tokens()
        if image_tokens is not None:
            return [EpochIndex(0, int(image_tokens.argmax()))] * num_samples
        return self.list_early_samples(num_samples)

    def count_image_tokens(self) -> npt.NDArray[np.int64] | None:
        """Count the image tokens in each sample.

        Returns:
            Counts, int64 ``[num_samples]``. None if the samples cannot contain images.
        """
        return None

    def count_epochs(self, num_samples: int) -> float | None:
        """Convert a number of consumed samples to epochs.

        Returns:
            Number of epochs, possibly fractional. None if the size of an epoch is not known yet.
        """
        return num_samples / self.num_samples

    def compute_progress_metrics(self, position: int) -> dict[str, float]:
        """Compute data metrics for the first ``position`` samples of a run.

        Returns:
            Values to log, keyed by metric name. Empty if the data is not a mixture.
        """
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint saves in addition to the position in the training data.

        Returns:
            Manifests of the streams, keyed by source name. Empty without streams.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state from a checkpoint. See :meth:`state_dict`.

        Raises:
            ValueError: If the state is invalid.
            RunError: If the data has changed since the checkpoint.
        """
        return

    def compute_consumed_digest(self, position: int) -> str:
        """Compute a digest of the streamed data that defines the samples before ``position``.

        A stream is read during training, so ranks may have read different data. All ranks therefore
        compare their digests before a checkpoint is saved.

        Returns:
            The digest. Empty if the dataset is not a stream. For a mixture, the digests of all
            sources, separated by spaces.
        """
        return ""

    def close(self) -> None:
        """Stop the background processes that tokenize streamed data, if there are any.

        The samples remain readable.
        """
        return

    def build_batch(self, indices: Sequence[EpochIndex]) -> Batch:
        """Build a batch of samples, with all columns.

        Args:
            indices: Epochs and indices of the samples.

        Returns:
            Tensors ``[len(indices), ...]``, keyed by column. The tensors of images have another
            first dimension. See :meth:`ImageProcessor.build_columns`.
        """
        arrays = self.build_arrays_with_columns(indices)
        if self.image_processor is not None:
            files = [file for _, index in indices for file in self.read_image_files(index)]
            arrays = {**arrays, **self.image_processor.build_columns(files, arrays["input_ids"])}
        if self.compute_extra_columns is not None:
            arrays = {**arrays, **self.compute_extra_columns([index for _, index in indices])}
        return {name: torch.from_numpy(values) for name, values in arrays.items()}

    def read_prompt_images(self, index: int, num_tokens: int) -> list[PromptImage]:
        """Read the images among the first ``num_tokens`` tokens of a sample.

        Args:
            index: Index of the sample.
            num_tokens: Number of tokens. They must belong to the first document of the sample.
        """
        return []

    @abstractmethod
    def list_document_numbers(self, index: int) -> Sequence[int]:
        """Return the indices of a sample's documents, counted from 0 in the sample's source."""

    @abstractmethod
    def build_arrays(self, indices: Sequence[EpochIndex]) -> Arrays:
        """Build the task's columns as numpy arrays.

        Args:
            indices: Epochs and indices of the samples.

        Returns:
            Arrays ``[len(indices), ...]``, keyed by column.
        """

    def read_image_files(self, index: int, num_inputs: int | None = None) -> list[ImageFile]:
        """Read the image files of a sample, in the order of their placeholder tokens.

        The list is empty if the sample has no images.

        Args:
            index: Index of the sample.
            num_inputs: Number of input tokens at the start of the sample. An image is read only if
                its placeholder tokens begin within these tokens. None reads all images.
        """
        return []

    def build_arrays_with_columns(self, indices: Sequence[EpochIndex]) -> Arrays:
        """Build the task's columns and the additional columns as numpy arrays.

        The additional columns are the numeric columns in ``data.columns``. This default
        implementation returns the result of :meth:`build_arrays`. :class:`CacheSamples` adds the
        additional columns.
        """
        return self.build_arrays(indices)


@dataclass(frozen=True)
class SampleRange:
    """Range of a source's samples that forms a dataset, for example the training part.

    The source's samples are first arranged in the order given by :attr:`order`. The dataset
    contains the samples at the positions ``[start, start + num_samples)`` of this order. Calling
    the object converts an index in the dataset to an index in the source.

    The ``repr`` of the object is part of the cache key of a packing plan.
    """

    start: int
    """Position of the first sample in ``order``."""
    num_samples: int
    """Number of samples of the dataset."""
    order: Permutation | KeptOrder | None = None
    """Order of the source's samples. None if they are in the order of the source.

    The order is shuffled if samples are documents, so that the held-out part of a sorted source is not
    biased.
    """

    def __call__(self, index: int) -> int:
        """Convert an index in the dataset to an index in the source.

        This method does not check whether ``index`` is less than :attr:`num_samples`. A larger
        index may refer to a sample of another range.
        """
        position = self.start + index
        return position if self.order is None else self.order(position)

    def list_numbers(self) -> npt.NDArray[np.int64]:
        """Return, for each sample of the dataset, its index in the source.

        Returns:
            Indices, int64 ``[num_samples]``.
        """
        positions = np.arange(self.start, self.start + self.num_samples)
        return positions if self.order is None else self.order.permute_array(positions)

    def get_document_range(self, index: int) -> range:
        """Return the document number of a sample as a range of length 1.

        This method is for datasets in which each sample is one document. The document number is
        then the sample's index in the source.
        """
        return range(self(index), self(index) + 1)


class PartArrays(NamedTuple):
    """Arrays of some rows of a batch.

    Attributes:
        rows: Row of the batch for each row of the arrays.
        arrays: Arrays ``[len(rows), ...]``, keyed by column.
    """

    rows: Sequence[int]
    arrays: Arrays


def merge_parts(
    parts: Sequence[PartArrays], num_rows: int, min_shapes: Mapping[str, tuple[int, ...]] | None = None
) -> Arrays:
    """Merge arrays of different rows into the arrays of a batch.

    If a column has different shapes in the parts, smaller arrays are padded with zeros at the end.
    For example, the number of columns of ``document_lengths`` differs between sources.

    Args:
        parts: Arrays with the same columns. Their rows are all rows of the batch.
        num_rows: Number of rows of the batch.
        min_shapes: Minimum shape of each column without the batch dimension. None if only the parts
            determine the shapes.
    """
    merged: Arrays = {}
    for column, first_values in parts[0].arrays.items():
        shapes = [part.arrays[column].shape[1:] for part in parts]
        if min_shapes is not None:
            shapes.append(min_shapes[column])
        shape = tuple(map(max, *shapes)) if len(shapes) > 1 else shapes[0]
        values = np.zeros((num_rows, *shape), dtype=first_values.dtype)
        for part in parts:
            region: tuple[Any, ...] = (
                np.array(part.rows),
                *map(slice, part.arrays[column].shape[1:]),
            )
            values[region] = part.arrays[column]
        merged[column] = values
    return merged


class TrainEvalSplit(NamedTuple):
    """Split of a source's samples into a training range and a held-out range."""

    train: SampleRange
    held_out: SampleRange


def count_packed_samples(num_tokens: int, seq_len: int, *, shifted: bool) -> int:
    """Count the complete blocks of ``seq_len`` tokens in concatenated documents.

    Args:
        num_tokens: Total number of tokens in the documents.
        seq_len: Number of tokens per sample.
        shifted: Whether the labels are shifted by one. If so, the last block needs one more token.

    Raises:
        UserError: If there is no complete block.
    """
    count = (num_tokens - shifted) // seq_len
    if count < 1:
        longest = num_tokens - shifted
        remedy = f"lower data.seq_len to at most {longest}, or add text" if longest >= 2 else "add text"
        raise UserError(
            f"data.seq_len: the source has {num_tokens} {'token' if num_tokens == 1 else 'tokens'}, but one "
            f"sample needs {seq_len + shifted}; {remedy}"
        )
    return count


def split_packed_blocks(
    num_blocks: int, eval_fraction: float | None, excluded_numbers: npt.NDArray[np.int64] | None = None
) -> TrainEvalSplit:
    """Split blocks of concatenated documents into a training range and a held-out range.

    The held-out range contains the last blocks, so the data is cut at only one place.

    Args:
        num_blocks: Number of blocks.
        eval_fraction: Share of held-out blocks. See :func:`_compute_num_held_out`.
        excluded_numbers: Sorted indices of the blocks to exclude from both ranges.
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
    """Shuffle documents, and split them into a training range and a held-out range.

    The order does not depend on the seed of the run, so all runs hold out the same documents.

    Args:
        num_documents: Number of documents.
        eval_fraction: Share of held-out documents. See :func:`_compute_num_held_out`.
        excluded_numbers: Sorted numbers of documents to exclude from both ranges.

    Raises:
        ValueError: If there are no documents, or if all documents are excluded.
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
    """Compute the number of held-out samples.

    The default is 1 % of the samples, with two limits. The number is at least
    :data:`MIN_HELD_OUT`, because the mean loss over fewer samples is not reliable. The number
    is at most a fifth of the samples (but at least 1), because a small dataset is mostly needed
    for training.

    Args:
        num_samples: Number of samples.
        eval_fraction: Value of ``data.eval_fraction``. None selects the default. A positive
            value holds out at least one sample, and leaves at least one sample for training.

    Returns:
        Number of held-out samples. 0 if ``eval_fraction`` is 0, or if there are fewer than two
        samples.
    """
    if eval_fraction == 0 or num_samples < 2:
        return 0
    if eval_fraction is None:
        return min(max(MIN_HELD_OUT, round(num_samples * HELD_OUT_SHARE)), max(1, num_samples // 5))
    return min(max(1, round(num_samples * eval_fraction)), num_samples - 1)


@dataclass(eq=False)
class CacheSamples(Samples):
    """Base class of datasets that read their samples from a token cache.

    Attributes:
        token_cache: Tokens of all documents of the source.
        sample_range: Range of the source's samples that belong to the dataset.
        seq_len: Number of tokens per sample.
        includes_columns: Whether batches contain the additional columns of ``data.columns``. If False,
            such columns in the cache are ignored.
    """

    token_cache: TokenCache
    sample_range: SampleRange
    seq_len: int
    includes_columns = False

    def __post_init__(self) -> None:
        self.num_samples = self.sample_range.num_samples

    def build_arrays_with_columns(self, indices: Sequence[EpochIndex]) -> Arrays:
        """Build the task's arrays, and the arrays of the additional columns in ``data.columns``.

        Each additional column is an int64 or float32 array ``[len(indices)]``. It contains the
        value of each sample's first document. There are no additional columns if
        ``includes_columns`` is False. See :meth:`Samples.build_arrays_with_columns`.
        """
        if not self.includes_columns:
            return self.build_arrays(indices)
        numbers = [int(self.list_document_numbers(index)[0]) for _, index in indices]
        return {**self.build_arrays(indices), **self.token_cache.read_extra_columns(numbers)}

    def read_prompt_images(self, index: int, num_tokens: int) -> list[PromptImage]:
        """Read the images whose placeholder tokens begin in the first tokens of a sample.

        See :meth:`Samples.read_prompt_images` for the arguments.
        """
        number = int(self.list_document_numbers(index)[0])
        files = self.token_cache.read_image_files(number, num_tokens)
        return list(map(PromptImage, self.token_cache.list_images(number), files))

    def list_document_numbers(self, index: int) -> range:
        """Return the range of documents in a sample. Here, a sample contains one document.

        Documents are counted from 0 in the source. Subclasses whose samples contain several
        documents override this method.
        """
        return self.sample_range.get_document_range(index)

    def _find_block_documents(self, index: int) -> range:
        """Return the range of documents that overlap a block of concatenated tokens."""
        start = self.sample_range(index) * self.seq_len
        return self.token_cache.find_documents_of_tokens("text", start, start + self.seq_len)


class PackedCausalSamples(CacheSamples):
    """Dataset of blocks of concatenated documents, for causal language modeling.

    Each block has ``L = seq_len`` tokens. Sample *i* is ``input_ids = tokens[i*L : i*L+L]`` and
    ``labels = tokens[i*L+1 : i*L+L+1]``. Each token is the label of at most one position. The
    blocks that are held out for evaluation therefore have no labels in common with the training
    blocks. Tokens that do not contribute to the loss have the label -100.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.valid_labels_per_sample = self.seq_len if self.token_cache.trained_bits is None else None

    def build_arrays(self, indices: Sequence[EpochIndex]) -> Arrays:
        """Build ``input_ids`` and ``labels``, int64 ``[len(indices), seq_len]``."""
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
        """Return the range of indices of the documents that overlap a block.

        Each sample is a block of consecutive tokens. Documents are counted from 0 in the source.
        """
        return self._find_block_documents(index)


class DocumentSamples(CacheSamples):
    """Base class of datasets that truncate each document of a sample separately.

    Subclasses get methods that count the inputs of a document, and that read its truncated tokens,
    its loss mask and its image files. A document with ``n`` tokens has ``min(n, seq_len)`` inputs
    if ``keep_last_input`` or ``keep_last_input_if_room`` is True, and otherwise
    ``min(n - 1, seq_len)``. If the inputs would end within an image, they end before the image.

    Attributes:
        truncation: Value of ``data.truncation``: how to truncate long documents.
        keep_last_input: Whether the last token of every document is also an input. This input has
            no label, because no token follows it. If True, documents are truncated to ``seq_len``
            tokens. If False, they are truncated to ``seq_len + 1`` tokens, and the last token is
            only a label.
        keep_last_input_if_room: Whether the last token is also an input in documents of at most
            ``seq_len`` tokens. Longer documents are truncated to ``seq_len + 1`` tokens, and the
            last token is only a label. Has no effect if ``keep_last_input`` is True.
    """

    truncation: Truncation
    keep_last_input = False
    keep_last_input_if_room = False

    @property
    def _kept_slice(self) -> slice:
        """Slice of a document's tokens that remain after truncation.

        It has at most ``seq_len`` tokens if :attr:`keep_last_input` is True. Otherwise, it has at
        most ``seq_len + 1`` tokens, because the last token can be only a label.
        """
        return get_kept_slice(self.truncation, self.seq_len + (not self.keep_last_input))

    def _read_kept_tokens(self, number: int) -> npt.NDArray[Any]:
        """Read the tokens of a document that remain after truncation."""
        return self.token_cache.read_document("text", number)[self._kept_slice]

    def _count_inputs(self, number: int, tokens: npt.NDArray[Any]) -> int:
        """Count the input tokens of a truncated document.

        The last token is not counted if it serves only as the label of the token before it. If the
        inputs would end within an image, only the tokens before the image are counted.

        Args:
            number: Index of the document in the token cache.
            tokens: Tokens of the document after truncation.
        """
        has_last_token = self.keep_last_input or self.keep_last_input_if_room
        count = min(len(tokens), self.seq_len) if has_last_token else max(0, len(tokens) - 1)
        return find_image_cut(self.token_cache, number, count)

    def _read_trained_mask(self, number: int, num_inputs: int) -> npt.NDArray[np.bool_] | None:
        """Read which labels of a document contribute to the loss.

        The label of an input token is the next token of the document. The last input may therefore
        have no label.

        Args:
            number: Index of the document in the token cache.
            num_inputs: Number of input tokens of the document, after truncation.

        Returns:
            Loss mask for the labels of these inputs, bool ``[labels]``. None if all labels
            contribute to the loss.
        """
        trained = self.token_cache.read_trained_mask("text", number)
        return None if trained is None else trained[self._kept_slice][1 : num_inputs + 1]

    def read_image_files(self, index: int, num_inputs: int | None = None) -> list[ImageFile]:
        """Read the image files of a sample's documents. See :meth:`Samples.read_image_files`."""
        files: list[ImageFile] = []
        remaining = self.seq_len if num_inputs is None else num_inputs
        for number in self.list_document_numbers(index):
            count = min(remaining, self._count_inputs(number, self._read_kept_tokens(number)))
            files += self.token_cache.read_image_files(number, count)
            remaining -= count
        return files


@dataclass(eq=False)
class PaddedCausalSamples(DocumentSamples):
    """Dataset with one document per sample, truncated and right-padded, for causal language modeling.

    Attributes:
        pad_token: Id of the padding token.
    """

    pad_token: int
    truncation: Truncation = "end"
    keep_last_input: bool = field(default=False, kw_only=True)
    keep_last_input_if_room: bool = field(default=False, kw_only=True)

    def build_arrays(self, indices: Sequence[EpochIndex]) -> Arrays:
        """Build ``input_ids``, ``attention_mask`` and ``labels``, int64 ``[len(indices), seq_len]``."""
        return self._build_document_arrays([self.sample_range(index) for _, index in indices])

    def _build_document_arrays(self, numbers: Sequence[int]) -> Arrays:
        """Build the arrays for the given documents, with one row per document.

        Args:
            numbers: Numbers of the documents in the token cache.
        """
        documents = [self._read_kept_tokens(number) for number in numbers]
        counts = [
            self._count_inputs(number, tokens) for number, tokens in zip(numbers, documents, strict=True)
        ]
        inputs, mask = pad_rows(
            [tokens[:count] for tokens, count in zip(documents, counts, strict=True)],
            self.seq_len,
            self.pad_token,
        )
        labels, _ = pad_rows(
            [tokens[1 : count + 1] for tokens, count in zip(documents, counts, strict=True)],
            self.seq_len,
            IGNORED_LABEL,
        )
        for row, number, count in zip(labels, numbers, counts, strict=True):
            if (trained := self._read_trained_mask(number, count)) is not None:
                row[: len(trained)][~trained] = IGNORED_LABEL
        return {"input_ids": inputs, "attention_mask": mask, "labels": labels}

    def count_image_tokens(self) -> npt.NDArray[np.int64] | None:
        """Count the image tokens in each sample. See :meth:`Samples.count_image_tokens`."""
        if not self.token_cache.has_images:
            return None
        return self.token_cache.count_image_tokens(self.seq_len)[self.sample_range.list_numbers()]


class PairSamples(PaddedCausalSamples):
    """Dataset of document pairs, for preference losses.

    The chosen and the rejected document of a pair are consecutive documents of the source. The
    arrays of tokens and labels have the shape ``[batch, 2, tokens]``, in which ``[:, 0]`` is
    chosen and ``[:, 1]`` is rejected. The additional columns of ``data.columns`` have the shape
    ``[batch]``.
    """

    sequences_per_sample = 2

    def build_arrays(self, indices: Sequence[EpochIndex]) -> Arrays:
        """Build ``input_ids``, ``attention_mask`` and ``labels`` of preference pairs.

        Each array is int64 ``[len(indices), 2, seq_len]``. ``[:, 0]`` contains the chosen
        sequences, and ``[:, 1]`` contains the rejected sequences.
        """
        numbers = [
            2 * self.sample_range(index) + is_rejected for _, index in indices for is_rejected in (0, 1)
        ]
        arrays = self._build_document_arrays(numbers)
        return {name: values.reshape(len(indices), 2, -1) for name, values in arrays.items()}

    def list_document_numbers(self, index: int) -> range:
        """Return the numbers of the two documents of a pair: the chosen one, then the rejected one."""
        first = 2 * self.sample_range(index)
        return range(first, first + 2)


def select_sequence_of_samples(batch: dict[str, Any], index: int) -> dict[str, Any]:
    """Select one sequence per sample, from a batch whose samples have several sequences.

    Args:
        batch: Batch with tensors ``[batch, sequences, tokens]``. Tensors with other numbers of
            dimensions are dropped.
        index: Index of the sequence in each sample.

    Returns:
        Tensors ``[batch, tokens]``, keyed by column.
    """
    return {name: values[:, index] for name, values in batch.items() if values.ndim == 3}


def compute_document_lengths(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Compute, for each token, the number of input tokens in its document.

    Args:
        inputs: Model inputs of a batch. They contain ``position_ids`` if complete documents are
            packed.

    Returns:
        Lengths, int64 ``[batch, tokens]`` if complete documents are packed. Each padding token then
        counts as a document of length 1. Otherwise ``[batch, 1]``: the number of tokens in each row
        without padding. A block of concatenated documents counts as a single document.
    """
    ids, positions, mask = inputs["input_ids"], inputs.get("position_ids"), inputs.get("attention_mask")
    if positions is None:
        return (torch.ones_like(ids) if mask is None else mask).sum(dim=-1, keepdim=True)
    documents = (positions == 0).long().cumsum(dim=-1)  # cumsum of booleans is boolean on XLA
    counts = torch.zeros_like(torch.nn.functional.pad(documents, (0, 1)))
    return counts.scatter_add(1, documents, torch.ones_like(documents)).gather(1, documents)


class PaddedRows(NamedTuple):
    """Rows padded to a common length.

    Attributes:
        values: Padded rows, int64 ``[rows, length]``.
        mask: Attention mask, int64 ``[rows, length]``: 1 for values, 0 for padding. For empty rows, see
            :func:`pad_rows`.
    """

    values: npt.NDArray[np.int64]
    mask: npt.NDArray[np.int64]


def pad_rows(rows: Sequence[npt.NDArray[Any]], length: int, pad_value: int) -> PaddedRows:
    """Pad rows on the right, and build their attention mask.

    The mask of an empty row contains a single 1, because attention over no positions gives NaN.

    Args:
        rows: Arrays with at most ``length`` values each.
        length: Number of values per padded row.
        pad_value: Padding value.
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
    """Truncate a document to ``max_length`` tokens, but keep its final special tokens.

    The special tokens ``suffix`` replace the last tokens of the truncated document. If ``suffix``
    has ``max_length`` or more tokens, the document is truncated without adding ``suffix``. The
    tokens of a document of at most ``max_length`` tokens do not change.
    """
    out = np.array(tokens[:max_length], dtype=np.int64)
    if len(tokens) > max_length and 0 < len(suffix) < max_length:
        out[-len(suffix) :] = suffix
    return out
