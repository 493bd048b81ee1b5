from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from portable.schedule import Schedule


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
@given(steps=st.integers(1, 500), warmup=st.integers(0, 50), floor=st.floats(0, 1))
def test_every_rate_is_positive_and_none_exceeds_the_peak(
    kind: str, steps: int, warmup: int, floor: float
) -> None:
    schedule = Schedule(kind, 1e-3, floor * 1e-3, warmup, warmup + steps)
    rates = [schedule(step) for step in range(warmup + steps)]
    assert all(0 < rate <= 1e-3 * (1 + 1e-12) for rate in rates)
    assert rates[warmup] == 1e-3
    assert sorted(rates[:warmup]) == rates[:warmup]
    assert sorted(rates[warmup:], reverse=True) == rates[warmup:]


def test_the_shapes() -> None:
    cosine = Schedule("cosine", 1.0, 0.1, 2, 12)
    assert cosine(0) == 0.5
    assert cosine(2) == 1.0
    assert cosine(7) == pytest.approx(0.1 + 0.9 * 0.5)
    assert cosine(11) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(0.9 * math.pi)))
    assert Schedule("linear", 1.0, 0.0, 0, 4)(3) == 0.25
    assert Schedule("constant", 1.0, 0.0, 0, 4)(3) == 1.0
