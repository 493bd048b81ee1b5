"""torch tensors against what the converters read, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from converters import Checkpoint, Tensor
from converters.tensors.dtypes import FROM_TORCH

if TYPE_CHECKING:
    from collections.abc import Mapping


def bits(value: torch.Tensor) -> bytes:
    """The tensor's elements, row-major."""
    return bytes(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def assert_same(ours: Tensor, theirs: torch.Tensor) -> None:
    assert ours.shape == tuple(theirs.shape)
    assert ours.dtype == FROM_TORCH[str(theirs.dtype).removeprefix("torch.")]
    assert ours.nbytes == theirs.numel() * theirs.element_size()
    array = ours.read()
    assert array.shape == ours.shape
    assert array.tobytes() == bits(theirs), ours.name


def assert_model(checkpoint: Checkpoint, weights: Mapping[str, torch.Tensor]) -> None:
    """Every weight is there, as itself or as the alias of an equal one, and nothing else."""
    assert set(checkpoint.tensors) | set(checkpoint.aliases) == set(weights)
    for name, value in weights.items():
        assert_same(checkpoint.tensors[checkpoint.aliases.get(name, name)], value)


def assert_optimizer(checkpoint: Checkpoint, reference: Mapping[str, Any]) -> None:
    """`reference` is `{"optim": {name: {state name: value}}, "groups": [...]}`."""
    state = checkpoint.optimizer
    assert state is not None
    assert set(state.state) == set(reference["optim"])
    for name, values in reference["optim"].items():
        assert set(state.state[name]) == set(values)
        for what, value in values.items():
            ours = state.state[name][what]
            if isinstance(value, torch.Tensor):
                assert isinstance(ours, Tensor)
                assert_same(ours, value)
            else:
                assert ours == value
    for ours_group, theirs in zip(state.param_groups, reference["groups"], strict=True):
        assert {k: list(v) if isinstance(v, tuple) else v for k, v in theirs.items()} == ours_group
