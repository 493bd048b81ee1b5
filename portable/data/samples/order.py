"""Compute the order of a run's samples, as a pure function of seed, epoch and index.

:class:`Permutation` is a keyed bijection of ``range(n)``: a balanced Feistel network over
the smallest even number of bits that fits ``n`` (at least 6), with cycle walking to stay in
the range (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). No table of
shuffled indices is needed. The data position of a run is therefore a single integer, and a
run resumes immediately with any world size.

The order must not change in later versions, because a resumed run would then read different
samples.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_ROUNDS = 8
_MIN_HALF_BITS = 3  # with fewer bits, the round functions mix tiny datasets poorly
_U64 = (1 << 64) - 1
_GOLDEN_RATIO = 0x9E3779B97F4A7C15


class EpochIndex(NamedTuple):
    """Epoch and index of a sample.

    Attributes:
        epoch: Epoch, counted from 0. It selects the random masks of the sample. Evaluation samples
            have the fixed epoch :data:`~portable.data.samples.loader.EVAL_EPOCH`.
        sample_index: Index of the sample in its dataset. In the indices of a batch, ``~i`` marks a
            filler row that copies sample ``i``.
    """

    epoch: int
    sample_index: int


def _mix_bits(value: int) -> int:
    """Mix the bits of a 64-bit integer with the splitmix64 finalizer (Steele, Lea and Flood, 2014)."""
    value &= _U64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _U64
    return value ^ (value >> 31)


def _mix_bits_of_array(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Mix the bits of each element like :func:`_mix_bits`."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed


@dataclass(frozen=True)
class Permutation:
    """Shuffled order of ``range(n)``, determined by seed and epoch.

    Calling the object with a position returns the element of ``range(n)`` at this position in the
    shuffled order. This takes O(1) time and needs no table.

    Attributes:
        n: Number of indices.
        seed: Seed of the order.
        epoch: Epoch, counted from 0. Each epoch has a different order.

    Raises:
        ValueError: If ``n`` is less than 1, or ``2**62`` or more.
    """

    n: int
    seed: int
    epoch: int = 0
    _keys: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _half: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 1 <= self.n < 1 << 62:
            raise ValueError(f"n must be at least 1 and less than 2**62, not {self.n}")
        state = _mix_bits(_mix_bits(self.seed + _GOLDEN_RATIO) ^ _mix_bits(self.epoch + 2 * _GOLDEN_RATIO))
        keys = tuple(_mix_bits(state + (round_ + 1) * _GOLDEN_RATIO) for round_ in range(_ROUNDS))
        object.__setattr__(self, "_keys", keys)
        object.__setattr__(self, "_half", max(_MIN_HALF_BITS, ((self.n - 1).bit_length() + 1) // 2))

    def __len__(self) -> int:
        return self.n

    def __call__(self, index: int) -> int:
        """Return the element of ``range(n)`` at position ``index`` of the shuffled order.

        Raises:
            IndexError: If ``index`` is not in ``range(n)``.
        """
        if not 0 <= index < self.n:
            raise IndexError(f"index {index} is out of range; use an index from 0 to {self.n - 1}")
        half, mask = self._half, (1 << self._half) - 1
        while True:
            left, right = index >> half, index & mask
            for key in self._keys:
                left, right = right, left ^ (_mix_bits(right + key) & mask)
            index = (left << half) | right
            if index < self.n:
                return index

    def permute_array(self, indices: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return the elements at the given positions of the shuffled ``range(n)``.

        Args:
            indices: Positions in the shuffled order, an array of any shape.

        Returns:
            Elements, an int64 array with the shape of ``indices``.

        Raises:
            IndexError: If an index is not in ``range(n)``.
        """
        index_array = np.asarray(indices, dtype=np.int64)
        if index_array.size and not (index_array.min() >= 0 and index_array.max() < self.n):
            raise IndexError(f"an index is out of range; use indices from 0 to {self.n - 1}")
        flat = index_array.reshape(-1).astype(np.uint64)
        half, mask = np.uint64(self._half), np.uint64((1 << self._half) - 1)
        todo = np.arange(flat.size)
        while todo.size:
            values = flat[todo]
            left, right = values >> half, values & mask
            for key in self._keys:
                left, right = right, left ^ (_mix_bits_of_array(right + np.uint64(key)) & mask)
            values = (left << half) | right
            flat[todo] = values
            todo = todo[values >= self.n]
        return flat.astype(np.int64).reshape(index_array.shape)


@lru_cache(maxsize=16)
def get_epoch_permutation(n: int, seed: int, epoch: int) -> Permutation:
    """Return the shuffled order of ``n`` samples or shards in an epoch. Caches the last 16 orders."""
    return Permutation(n, seed, epoch)


def locate_sample(position: int, num_samples: int, seed: int) -> EpochIndex:
    """Return the epoch and index of the sample at a position of a run.

    Every epoch contains each sample once. :func:`get_epoch_permutation` determines the order of the
    samples in an epoch.

    Args:
        position: Position in the run: the number of samples before this one.
        num_samples: Number of samples of the dataset.
        seed: Seed of the run.
    """
    epoch, index = divmod(position, num_samples)
    return EpochIndex(epoch, get_epoch_permutation(num_samples, seed, epoch)(index))


def derive_seed(name: str, seed: int) -> int:
    """Derive a seed from a name and another seed.

    The name identifies a source of a mixture, or a window of a stream. Different names give
    different seeds. The seed of a source therefore does not depend on the other sources of the
    mixture.
    """
    return int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest(), "little")


def compute_first_sample_of_rank(global_batch_size: int, rank: int, world_size: int) -> int:
    """Compute the index of a rank's first sample within the global batch.

    Each rank gets consecutive samples, and the numbers of samples of any two ranks differ by at
    most one. For example, with 8 samples and 3 ranks, the ranks start at samples 0, 2 and 5.

    The samples of ``rank`` end before the first sample of ``rank + 1``. For this purpose, ``rank``
    may also be ``world_size``.
    """
    return rank * global_batch_size // world_size


def count_accumulation_steps(global_batch_size: int, micro_batch_size: int, world_size: int) -> int:
    """Count the micro-batches per step on each rank.

    The count is the same on all ranks. A rank with fewer samples completes its micro-batches with
    filler rows, which do not contribute to the loss.
    """
    largest_share = -(-global_batch_size // world_size)
    return -(-largest_share // micro_batch_size)
