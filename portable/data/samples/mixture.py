"""Mix several sources in fixed proportions.

This module maps each position of a run to a source, and to a position in that source. The sources
are the leaves of a binary tree. Each node divides its positions between its two children, in
proportion to the total weights of their sources. The left child gets ``n * left / total`` of the
node's first ``n`` positions, rounded to the nearest integer.

To locate a position, it is sufficient to follow one path from the root to a leaf. This requires
neither a table nor a loop over previous positions. After any number of samples, the count of a
source differs from its exact share by at most half of the tree's depth. The depth is
``ceil(log2(sources))``.

The mapping must not change in later versions, because a resumed run would then read different
samples.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from math import lcm
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from portable.batch import SOURCE_COLUMN
from portable.data.samples.base import Arrays, PartArrays, PromptImage, Samples, merge_parts
from portable.data.samples.order import EpochIndex, derive_seed
from portable.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from portable.data.images import ImageFile


class SourceIndex(NamedTuple):
    """Source of a sample in a mixture, and the sample's place within the source.

    Attributes:
        source: Index of the source in the mixture.
        sample_index: Index of the sample within the source. In the results of
            :class:`WeightedInterleaving` and :class:`MixtureSchedule`, it is instead the number
            of previous positions with the same source, over all epochs.
    """

    source: int
    sample_index: int


class WeightedInterleaving:
    """Assignment of positions 0, 1, 2 ... to sources, in proportion to the sources' weights.

    Calling the object with a position returns a :class:`SourceIndex`.

    Args:
        weights: Weight of each source, at least 0. The sum of the weights must be positive. A float
            such as ``0.1`` is interpreted as the exact decimal number.

    Raises:
        ValueError: If the weights are not valid.
    """

    def __init__(self, weights: Sequence[float | int | Fraction]) -> None:
        shares = [Fraction(repr(weight) if isinstance(weight, float) else weight) for weight in weights]
        if not shares or min(shares) < 0 or sum(shares) <= 0:
            raise ValueError(
                f"the weights {list(weights)} are invalid; use weights of 0 or more, and make at least one "
                "of them greater than 0"
            )
        scale = lcm(*(share.denominator for share in shares))
        self._sums = [0, *accumulate(int(share * scale) for share in shares)]

    def __len__(self) -> int:
        return len(self._sums) - 1

    def _split_at_middle_source(self, first: int, last: int, positions: int) -> tuple[int, int]:
        """Split a node of the binary tree, and divide positions between the two halves.

        A node is a range of consecutive sources. It is split at its middle source, which becomes
        the first source of the right half. The node's first ``positions`` positions are divided as
        follows: the left half gets a share proportional to its weight, rounded to the nearest
        integer, and the right half gets the rest.

        Args:
            first: Index of the first source of the node.
            last: Index after the last source of the node.
            positions: Number of positions to divide, counted from the node's first position.

        Returns:
            Index of the first source of the right half, and number of positions of the left half.
        """
        middle = (first + last) // 2
        left_weight, total = self._sums[middle] - self._sums[first], self._sums[last] - self._sums[first]
        return middle, (2 * positions * left_weight + total) // (2 * total) if total else 0

    def __call__(self, position: int) -> SourceIndex:
        """Return the source at a position, and the position within the source.

        The position within the source is the number of previous positions with the same source.
        """
        first, last = 0, len(self)
        while last - first > 1:
            middle, before = self._split_at_middle_source(first, last, position)
            _, after = self._split_at_middle_source(first, last, position + 1)
            if after > before:
                last, position = middle, before
            else:
                first, position = middle, position - before
        return SourceIndex(first, position)

    def count_per_source(self, num_positions: int) -> list[int]:
        """Count how many of the first ``num_positions`` positions belong to each source."""
        counts = [0] * len(self)

        def count_range(first: int, last: int, positions: int) -> None:
            if last - first == 1:
                counts[first] = positions
                return
            middle, num_left = self._split_at_middle_source(first, last, positions)
            count_range(first, middle, num_left)
            count_range(middle, last, positions - num_left)

        count_range(0, len(self), num_positions)
        return counts


class MixtureSchedule:
    """Assignment of a run's samples to sources, with weights that can change during the run.

    A position is the index of a sample in the run. Calling the object with a position returns a
    :class:`SourceIndex`. When the weights change, each source continues after its previous sample.

    Args:
        phases: Phases of the run. Each phase has its first position, and the weight of each source.
            The first positions must start at 0 and increase.

    Raises:
        ValueError: If the first positions or the weights of a phase are not valid.
    """

    def __init__(self, phases: Sequence[tuple[int, Sequence[float | int | Fraction]]]) -> None:
        self._starts = [start for start, _ in phases]
        if self._starts[:1] != [0] or any(
            a >= b for a, b in zip(self._starts, self._starts[1:], strict=False)
        ):
            raise ValueError(
                f"the start positions {self._starts} of the phases are invalid; start the first phase at 0, "
                "and each other phase after the previous phase"
            )
        self._phases = [WeightedInterleaving(weights) for _, weights in phases]
        self._before = [[0] * len(self._phases[0])]
        for phase, start, end in zip(self._phases, self._starts, self._starts[1:], strict=False):
            counted = phase.count_per_source(end - start)
            self._before.append([a + b for a, b in zip(self._before[-1], counted, strict=True)])

    def __call__(self, position: int) -> SourceIndex:
        """Return the source of a sample, and the position of the sample within this source.

        The position within the source is the number of earlier samples of the run from the same
        source. Samples of earlier phases of the weight schedule are counted too.

        Args:
            position: Position of the sample in the run.
        """
        phase = bisect_right(self._starts, position) - 1
        source, index = self._phases[phase](position - self._starts[phase])
        return SourceIndex(source, self._before[phase][source] + index)

    def count_per_source(self, num_positions: int) -> list[int]:
        """Count how many of the first ``num_positions`` positions of the run belong to each source."""
        phase = max(0, bisect_right(self._starts, num_positions) - 1)
        phase_counts = self._phases[phase].count_per_source(num_positions - self._starts[phase])
        return [a + b for a, b in zip(self._before[phase], phase_counts, strict=True)]


@dataclass(frozen=True)
class MixtureShare:
    """Share of a source in a mixture. Exactly one of the attributes is set.

    Attributes:
        weight: Weight, relative to the weights of the other sources.
        epochs: Number of epochs of the source per epoch of the mixture.
    """

    weight: float | None = None
    epochs: float | None = None


class MixtureSamples(Samples):
    """Dataset that mixes the samples of several sources.

    Sample indices are consecutive: all samples of the first source, then all samples of the second,
    and so on.

    Each source has its own epochs. An epoch contains every sample of the source once, in a new
    order. A source with a larger weight starts its next epoch sooner.

    Args:
        sources: Samples of each source, keyed by name.
        shares: Share of each source, keyed by name. Either all shares are weights, or all are
            numbers of epochs.
        phases: First position and weights (keyed by source name) of each phase of the weight
            schedule. A source without a weight in a phase has the weight 0. Before the first phase,
            ``shares`` applies.
        with_source_column: Whether batches have a column ``source`` with the index of the source.

    Attributes:
        source_names: Names of the sources.
        source_samples: Samples of each source, in the order of ``source_names``.
        schedule: Schedule that maps each position of the run to a source.

    Raises:
        UserError: If the sources have different columns.
    """

    def __init__(
        self,
        sources: Mapping[str, Samples],
        shares: Mapping[str, MixtureShare],
        phases: Sequence[tuple[int, Mapping[str, float]]] = (),
        *,
        with_source_column: bool = True,
    ) -> None:
        self._with_source_column = with_source_column
        self.source_names = tuple(sources)
        self.source_samples = tuple(sources.values())
        self._starts = [0, *accumulate(map(len, self.source_samples))]
        self.num_samples = self._starts[-1]
        weights: list[float | int | Fraction] = []
        for name, part in sources.items():
            share = shares[name]
            weights.append(share.weight if share.epochs is None else round(share.epochs * len(part)))  # type: ignore[arg-type]
        by_epochs = all(share.epochs is not None for share in shares.values())
        self._epoch_samples = int(sum(weights)) if by_epochs else self.num_samples
        changes = [(start, [later.get(name, 0.0) for name in self.source_names]) for start, later in phases]
        self.schedule = MixtureSchedule([(0, weights), *changes] if not changes or changes[0][0] else changes)
        kinds = {part.valid_labels_per_sample for part in self.source_samples}
        self.valid_labels_per_sample = kinds.pop() if len(kinds) == 1 else None
        taken = WeightedInterleaving(weights).count_per_source(1 << 20)
        self.padding_share = sum(
            n * part.padding_share for n, part in zip(taken, self.source_samples, strict=True)
        ) / sum(taken)
        contexts = [(n, part.mean_context_length) for n, part in zip(taken, self.source_samples, strict=True)]
        self.mean_context_length = (
            sum(n * (context or 0.0) for n, context in contexts) / sum(taken)
            if all(context is not None for _, context in contexts)
            else None
        )
        self.sequences_per_sample = self.source_samples[0].sequences_per_sample
        self._shapes = self._compute_max_column_shapes()
        self.image_processor = self.source_samples[0].image_processor  # all sources use the same processor

    def _compute_max_column_shapes(self) -> dict[str, tuple[int, ...]]:
        """Compute the largest shape of each column over all sources, without batch dimension.

        The maximum is computed separately for each dimension. One sample of each source is read.

        Raises:
            UserError: If the sources have different columns.
        """
        shapes: dict[str, tuple[int, ...]] = {}
        first: set[str] = set()
        for name, part in zip(self.source_names, self.source_samples, strict=True):
            arrays = part.build_arrays_with_columns([part.find_early_sample()])
            first = first or set(arrays)
            if first != set(arrays):
                raise UserError(
                    f"data.sources.{name}: the samples have the columns {', '.join(sorted(arrays))}, but the "
                    f"samples of {self.source_names[0]} have {', '.join(sorted(first))}; use the same kind "
                    "of records in all sources"
                )
            for column, values in arrays.items():
                shape = shapes.get(column, values.shape[1:])
                shapes[column] = tuple(map(max, shape, values.shape[1:]))
        return shapes

    @property
    def epoch_samples(self) -> int:
        """Number of samples in one epoch of the mixture.

        If the mixture is defined by epochs, each source contributes its number of samples times its
        number of epochs. If the mixture is defined by weights, each source contributes its number
        of samples.
        """
        return self._epoch_samples

    def locate_sample(self, position: int, seed: int) -> EpochIndex:
        """Return the epoch and index of the sample at a given position of a run.

        The epoch is the epoch of the sample's source, not of the mixture. The index counts the
        samples of all sources, concatenated in the order of the sources.

        Args:
            position: Position in the run: the number of samples before this one.
            seed: Seed of the run.
        """
        source, source_position = self.schedule(position)
        epoch, index = self.source_samples[source].locate_sample(
            source_position, derive_seed(self.source_names[source], seed)
        )
        return EpochIndex(epoch, self._starts[source] + index)

    def locate_in_source(self, index: int) -> SourceIndex:
        """Return the source of a sample, and the sample's index within the source."""
        source = bisect_right(self._starts, index) - 1
        return SourceIndex(source, index - self._starts[source])

    def get_source_name(self, index: int) -> str:
        """Return the name of a sample's source. For a stream, the file name is appended to this name."""
        source, source_index = self.locate_in_source(index)
        return (
            f"{self.source_names[source]} {self.source_samples[source].get_source_name(source_index)}".strip()
        )

    def build_arrays(self, indices: Sequence[EpochIndex]) -> Arrays:
        """Build the arrays of the given samples, keyed by column, such as ``input_ids``.

        The columns include the additional columns of ``data.columns`` and, if the mixture has it, the
        column ``source``. Each array has the shape ``[len(indices), ...]``. If a column has different
        shapes in different sources, or in different files of a stream, smaller arrays are padded with
        zeros at the end.
        """
        rows: dict[int, list[int]] = {}
        owners = [self.locate_in_source(index) for _, index in indices]
        for row, (source, _) in enumerate(owners):
            rows.setdefault(source, []).append(row)
        parts = [
            PartArrays(
                taken,
                self.source_samples[source].build_arrays_with_columns(
                    [EpochIndex(indices[row].epoch, owners[row].sample_index) for row in taken]
                ),
            )
            for source, taken in rows.items()
        ]
        arrays = merge_parts(parts, len(indices), self._shapes)
        if self._with_source_column:
            arrays = {SOURCE_COLUMN: np.array([source for source, _ in owners], dtype=np.int64), **arrays}
        return arrays

    def read_image_files(self, index: int, num_inputs: int | None = None) -> list[ImageFile]:
        """Read the image files of a sample from its source. See :meth:`Samples.read_image_files`."""
        source, sample_index = self.locate_in_source(index)
        return self.source_samples[source].read_image_files(sample_index, num_inputs)

    def count_image_tokens(self) -> npt.NDArray[np.int64] | None:
        """Count the image tokens in each sample. None if no source can contain images."""
        counts = [part.count_image_tokens() for part in self.source_samples]
        if all(count is None for count in counts):
            return None
        return np.concatenate(
            [
                np.zeros(len(part), dtype=np.int64) if count is None else count
                for part, count in zip(self.source_samples, counts, strict=True)
            ]
        )

    def read_prompt_images(self, index: int, num_tokens: int) -> list[PromptImage]:
        """Read the images whose tokens are among the first ``num_tokens`` tokens of a sample.

        See :meth:`Samples.read_prompt_images`.
        """
        source, source_index = self.locate_in_source(index)
        return self.source_samples[source].read_prompt_images(source_index, num_tokens)

    def list_early_samples(self, num_samples: int) -> list[EpochIndex]:
        """List samples of the first source. See :meth:`Samples.list_early_samples`."""
        return self.source_samples[0].list_early_samples(num_samples)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all sources."""
        return {name: value for part in self.source_samples for name, value in part.state_dict().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the states of all sources. See :meth:`Samples.load_state_dict`."""
        for part in self.source_samples:
            part.load_state_dict(state)

    def close(self) -> None:
        """Stop the background processes of all sources."""
        for part in self.source_samples:
            part.close()

    def compute_consumed_digest(self, position: int) -> str:
        """Compute a digest of each source's consumed data, and join the digests with spaces.

        The digest of a source covers its share of the first ``position`` samples of the run. It is
        empty if the source is not a stream.
        """
        taken = zip(self.source_samples, self.schedule.count_per_source(position), strict=True)
        return " ".join(part.compute_consumed_digest(count) for part, count in taken)

    def list_document_numbers(self, index: int) -> Sequence[int]:
        """Return the indices of a sample's documents, counted from 0 in the sample's source."""
        source, source_index = self.locate_in_source(index)
        return self.source_samples[source].list_document_numbers(source_index)

    def compute_progress_metrics(self, position: int) -> dict[str, float]:
        """Compute metrics per source for the first ``position`` samples of a run.

        Returns:
            Numbers of samples, epochs and label tokens of each source, with the keys
            ``samples/NAME``, ``epoch/NAME`` and ``tokens/NAME``. The epochs of a source are omitted
            if the size of its epoch is not known yet. The label tokens are omitted if their number
            differs between the samples of the source.
        """
        metrics: dict[str, float] = {}
        for name, part, taken in zip(
            self.source_names, self.source_samples, self.schedule.count_per_source(position), strict=True
        ):
            metrics[f"samples/{name}"] = taken
            if (epochs := part.count_epochs(taken)) is not None:
                metrics[f"epoch/{name}"] = epochs
            if part.valid_labels_per_sample is not None:
                metrics[f"tokens/{name}"] = taken * part.valid_labels_per_sample
        return metrics
