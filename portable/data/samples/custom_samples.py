"""Samples from user-defined code. They are already tokenized and reach the model unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from portable import plugins
from portable.data.samples.base import Arrays, SampleRange, Samples
from portable.errors import UserError, to_one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from portable.data.samples.order import EpochIndex


class CustomSamples(Samples):
    """Dataset of samples from a user-defined object with ``__len__`` and ``__getitem__``.

    Each sample is a mapping with ``input_ids``, ``labels`` (aligned with the logits), and optional
    further arguments of the model or of ``train.loss``. The shape of ``input_ids`` is ``[tokens]``,
    or ``[sequences, tokens]`` if a sample consists of several sequences. The values are arrays of
    integers, booleans or floats, with the same shapes in all samples. They are converted to int64
    or float32. Samples may be requested in any order.

    Args:
        name: Import path of the object, such as ``my_package.my_module:samples``.
        records: Object that contains the samples.
        part: Range of the object's samples that belong to the dataset.
        vocabulary: Vocabulary size of the model, to check ``input_ids``. 0 if it is not known.

    Raises:
        UserError: If the first sample is not valid. Other samples are checked when they are loaded.
    """

    def __init__(self, name: str, records: Any, part: SampleRange, vocabulary: int = 0) -> None:
        self.num_samples = part.num_samples
        self._name = name
        self._records = records
        self._part = part
        self._length = len(records)
        self._vocabulary = vocabulary
        self._expected_layout: dict[str, tuple[list[int], np.dtype[Any]]] = {}
        first = self._load_sample(0)
        self._expected_layout = _get_shapes_and_dtypes(first)
        self.sequences_per_sample = first["input_ids"].shape[0] if first["input_ids"].ndim == 2 else 1
        self.tokens_per_sequence = int(first["input_ids"].shape[-1])
        """Number of tokens per sequence."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the import path instead of the object. A worker process then imports the object again."""
        return _rebuild_samples, (self._name, self._part, self._vocabulary, plugins.get_notebook_sources())

    def build_arrays(self, indices: Sequence[EpochIndex]) -> Arrays:
        """Load samples, and stack their values into one array per key, such as ``input_ids``."""
        samples = [self._load_sample(self._part(index)) for _, index in indices]
        return {key: np.stack([sample[key] for sample in samples]) for key in self._expected_layout}

    def list_document_numbers(self, index: int) -> range:
        """Return the document number of a sample, as a range of length 1.

        Each sample of the user-defined dataset counts as one document. Its document number is the
        index that is passed to the dataset's ``__getitem__``.
        """
        return self._part.get_document_range(index)

    def _load_sample(self, number: int) -> dict[str, npt.NDArray[Any]]:
        """Load a sample, and check its keys, shapes and tokens.

        The sample must contain ``input_ids`` and ``labels``, and have the same keys, shapes and
        dtypes as the first sample. The token ids must be in the vocabulary if its size is known.
        The length of the user-defined dataset must not have changed.

        Args:
            number: Index of the sample in the user-defined dataset.

        Returns:
            Arrays of int64 or float32, keyed by name.

        Raises:
            UserError: If the sample cannot be loaded or is not valid.
        """
        subject = f"data.source: {self._name}"
        with plugins.convert_user_errors(f"{subject}: sample {number}"):
            length = len(self._records)
            if length != self._length:
                raise UserError(
                    f"{subject}: __len__ returned {self._length:,} at first, but now returns {length:,}; "
                    "return the same length in every call"
                )
            sample = self._records[number]
            if not isinstance(sample, Mapping) or not {"input_ids", "labels"} <= sample.keys():
                raise UserError(
                    f"{subject}: sample {number} is not a mapping with input_ids and labels; return a dict "
                    "with input_ids and labels"
                )
            arrays = {str(key): _to_sample_array(value) for key, value in sample.items()}
        ids = arrays["input_ids"]
        if self._vocabulary and ids.size and not (ids.min() >= 0 and ids.max() < self._vocabulary):
            raise UserError(
                f"{subject}: sample {number} has token ids from {ids.min()} to {ids.max()}, but the "
                f"vocabulary has {self._vocabulary:,} tokens; correct the sample, or set data.tokenizer "
                "to the tokenizer that created the sample"
            )
        layout = _get_shapes_and_dtypes(arrays)
        if self._expected_layout and layout != self._expected_layout:
            key = next(
                name
                for name in {**self._expected_layout, **layout}
                if layout.get(name) != self._expected_layout.get(name)
            )
            layout_text = "missing" if key not in layout else "{1} {0}".format(*layout[key])
            expected_text = (
                "missing"
                if key not in self._expected_layout
                else "{1} {0}".format(*self._expected_layout[key])
            )
            raise UserError(
                f"{subject}: {key} is {layout_text} in sample {number}, but {expected_text} in the first "
                "sample; return the same keys, shapes and dtypes for all samples (pad shorter samples)"
            )
        return arrays


def _get_shapes_and_dtypes(
    sample: Mapping[str, npt.NDArray[Any]],
) -> dict[str, tuple[list[int], np.dtype[Any]]]:
    """Return the shape and dtype of each array in a sample."""
    return {key: (list(value.shape), value.dtype) for key, value in sample.items()}


def _to_sample_array(value: Any) -> npt.NDArray[Any]:
    """Convert a value of a sample to an array: int64 for integers and booleans, float32 for floats.

    Raises:
        TypeError: If the value has another data type.
    """
    array = np.asarray(value)
    if array.dtype.kind in "iub":
        return array.astype(np.int64)
    if array.dtype.kind == "f":
        return array.astype(np.float32)
    raise TypeError(
        f"the dtype {to_one_line(array.dtype)} is not supported; use integers, booleans or floats"
    )


def _rebuild_samples(
    name: str, part: SampleRange, vocabulary: int, sources: Mapping[str, str]
) -> CustomSamples:
    """Rebuild the dataset in a worker process, by importing the user's object again.

    The pickle of a dataset calls this function. See :meth:`CustomSamples.__reduce__`.

    Args:
        name: Import path of the user's object, which provides the samples.
        part: Range of the object's samples.
        vocabulary: Vocabulary size of the model. 0 if it is not known.
        sources: Source texts of modules defined in a notebook, from
            :func:`plugins.get_notebook_sources`.
    """
    plugins.install_notebook_modules(sources)
    return CustomSamples(name, plugins.load_plugin_value("data.source", name), part, vocabulary)
