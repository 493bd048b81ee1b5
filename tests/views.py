"""The logical view of a checkpoint of any format, in memory, for comparisons."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from portable.converters import open_checkpoint

View = dict[str, np.ndarray]
"""Weights by name, and optimizer state by ``name.key``, with step counts."""


def view(folder: Path) -> View:
    checkpoint = open_checkpoint(folder)
    found = {name: np.array(tensor.read()) for name, tensor in checkpoint.tensors.items()}
    assert checkpoint.optimizer is not None
    for name, state in checkpoint.optimizer.state.items():
        for key, value in state.items():
            found[f"{name}.{key}"] = np.array(value.read() if hasattr(value, "read") else value)
    return found


def assert_same_bits(ours: View, theirs: View) -> None:
    assert ours.keys() == theirs.keys()
    assert not [name for name in ours if not np.array_equal(ours[name], theirs[name])]


def assert_same_view(ours: View, theirs: View, tolerance: float) -> None:
    """Check that views are equal up to ``tolerance``, relative to the largest element of each tensor.

    Step counts must be equal.
    """
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert value.shape == theirs[name].shape, name
        bound = 0.0 if name.endswith(".step") else tolerance * float(np.abs(theirs[name]).max())
        worst = float(np.abs(value.astype(np.float64) - theirs[name]).max(initial=0.0))
        assert worst <= bound, f"{name}: differs by {worst:.1e}, more than {bound:.1e}"
