"""The order of samples: a pure function of seed, epoch and index.

``get_epoch_permutation(n, seed, epoch)`` is a keyed bijection of ``range(n)``: a balanced Feistel network
over the smallest even number of bits that fits ``n``, with cycle walking to stay inside the range (Black and
Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). It needs no table. The position in the data is
therefore one integer, and a run resumes at once with any world size.

Its values are part of the checkpoint format: a change would alter every resumed run.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_ROUNDS = 8
_MIN_HALF_BITS = 3  # with fewer bits, the round functions mix tiny data sets poorly
_U64 = (1 << 64) - 1
_GOLDEN_RATIO = 0x9E3779B97F4A7C15


class EpochIndex(NamedTuple):
    """Epoch and index of a sample.

    Attributes:
        epoch: Number of the pass over the samples, from 0. It selects the random masking of the sample.
        sample_index: Index of the sample in its dataset.
    """

    epoch: int
    sample_index: int


def _mix_bits(value: int) -> int:
    """The splitmix64 finalizer (Steele, Lea and Flood, 2014): 64 bits in, 64 well-mixed bits out."""
    value &= _U64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _U64
    return value ^ (value >> 31)


def _mix_bits_of_array(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed


@dataclass(frozen=True)
class Permutation:
    """A bijection of ``range(n)``, keyed by seed and epoch; calling it costs O(1) time and no memory."""

    n: int
    seed: int
    epoch: int = 0
    _keys: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _half: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 1 <= self.n < 1 << 62:
            raise ValueError(f"a permutation needs 1 <= n < 2**62, not {self.n}")
        state = _mix_bits(_mix_bits(self.seed + _GOLDEN_RATIO) ^ _mix_bits(self.epoch + 2 * _GOLDEN_RATIO))
        keys = tuple(_mix_bits(state + (round_ + 1) * _GOLDEN_RATIO) for round_ in range(_ROUNDS))
        object.__setattr__(self, "_keys", keys)
        object.__setattr__(self, "_half", max(_MIN_HALF_BITS, ((self.n - 1).bit_length() + 1) // 2))

    def __len__(self) -> int:
        return self.n

    def __call__(self, index: int) -> int:
        """Permute ``index``. Both values are in ``range(n)``."""
        if not 0 <= index < self.n:
            raise IndexError(f"index {index} is outside range({self.n})")
        half, mask = self._half, (1 << self._half) - 1
        while True:
            left, right = index >> half, index & mask
            for key in self._keys:
                left, right = right, left ^ (_mix_bits(right + key) & mask)
            index = (left << half) | right
            if index < self.n:
                return index

    def permute_array(self, indices: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Permute an array of indices of any shape; returns int64 of the same shape."""
        index_array = np.asarray(indices, dtype=np.int64)
        if index_array.size and not (index_array.min() >= 0 and index_array.max() < self.n):
            raise IndexError(f"an index is outside range({self.n})")
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
    """The order of one epoch, cached."""
    return Permutation(n, seed, epoch)


def locate_sample(position: int, num_samples: int, seed: int) -> EpochIndex:
    """Return (epoch, data set index) of the sample at ``position`` of a run over ``num_samples`` samples."""
    epoch, index = divmod(position, num_samples)
    return EpochIndex(epoch, get_epoch_permutation(num_samples, seed, epoch)(index))


def derive_seed(name: str, seed: int) -> int:
    """The seed of a source, which no other source shares and no change of the list alters."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest(), "little")


def compute_first_sample_of_rank(global_batch_size: int, rank: int, world_size: int) -> int:
    """Return the first sample of a rank within the global batch. Shares of ranks differ by at most one."""
    return rank * global_batch_size // world_size


def count_accumulation_steps(global_batch_size: int, micro_batch_size: int, world_size: int) -> int:
    """Return the number of micro-batches per step, which is the same on all ranks."""
    largest_share = -(-global_batch_size // world_size)
    return -(-largest_share // micro_batch_size)
