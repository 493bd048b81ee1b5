"""The order is a bijection for every size, is the same on every machine, and appears random."""

from __future__ import annotations

import numpy as np
import pytest

from portable.data.samples.order import Permutation, locate_sample


@pytest.mark.parametrize("seed", [0, 2**63, -5])
def test_permutation_is_bijection_for_every_small_n(seed: int) -> None:
    for n in range(1, 100):
        for epoch in (0, 7):
            order = Permutation(n, seed, epoch).permute_array(np.arange(n))
            assert np.array_equal(np.sort(order), np.arange(n)), (n, seed, epoch)


@pytest.mark.parametrize("n", [1, 2, 3, 17, 1000, 10**6 + 3, 2**40 + 9, 2**61])
def test_permutation_of_scalar_and_array_agree(n: int) -> None:
    order = Permutation(n, 11, 4)
    indices = np.unique(np.linspace(0, n - 1, num=50, dtype=np.int64).clip(0, n - 1))
    assert [order(int(i)) for i in indices] == order.permute_array(indices).tolist()


GOLDEN_10 = [6, 8, 4, 7, 0, 9, 1, 3, 2, 5]
GOLDEN_BIG = [(0, 262543658), (0, 777627447), (0, 863938572), (1, 190983117)]


def test_permutation_never_changes() -> None:
    """These numbers may never change, because a resumed run must find the order of its first launch."""
    assert Permutation(10, 0, 0).permute_array(np.arange(10)).tolist() == GOLDEN_10
    assert [locate_sample(p, 1_000_000_007, 42) for p in (0, 1, 1_000_000_006, 1_000_000_007)] == GOLDEN_BIG
