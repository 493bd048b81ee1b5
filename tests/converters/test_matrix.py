"""Conversions from every format into every other one: the result opens as the same logical checkpoint.

Readers and writers share one logical view, so not every pair is needed: each source is converted into one
format, in turn, and each format gets all kinds of sources. ``--all`` runs every pair.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from portable.converters import Checkpoint, CheckpointError, Tensor, open_checkpoint, write_checkpoint
from portable.converters.options import WRITERS
from tests.converters.samples import all_samples, folder_of, parameters

# GGUF has llama.cpp's models only: test_gguf.py.
TARGETS = [name for name in WRITERS if name != "gguf"]


FULL = ("dcp", "deepspeed-zero3-fp32-2", "deepspeed-autotp-zero1-4")
"""Samples for every format: optimizer and counters, unusual shapes, tied names."""
PAIRS = [
    pytest.param(*parameter.values, to, marks=[*parameter.marks, *([] if now else [pytest.mark.exhaustive])])
    for at, parameter in enumerate(parameters(sample.name for sample in all_samples()))
    for number, to in enumerate(TARGETS)
    for now in [parameter.values[0] in FULL or at % len(TARGETS) == number]
]


@pytest.fixture(scope="module")
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(folder_of(request.param, request, tmp_path_factory.mktemp("source")))


def model(checkpoint: Checkpoint, *, masters: bool = False) -> dict[str, Any]:
    """Return every value by name, a tied one under each of its names; parameters in float32 if `masters`."""
    tensors = dict(checkpoint.tensors)
    tensors |= {alias: tensors[owner] for alias, owner in checkpoint.aliases.items()}
    made = {}
    for name, tensor in tensors.items():
        value = tensor.read()
        if masters and tensor.dtype in ("BF16", "F16"):
            value = value.astype("float32")
        made[name] = (str(value.dtype), value.shape, value.tobytes())
    return made


def state(checkpoint: Checkpoint) -> Any:
    """Return the state and groups of the optimizer, with numbers as 0-d tensors."""
    optimizer = checkpoint.optimizer
    assert optimizer is not None
    values = {
        name: {what: bits(value) for what, value in held.items()} for name, held in optimizer.state.items()
    }
    groups = [
        {key: list(value) if isinstance(value, tuple) else value for key, value in group.items()}
        for group in optimizer.param_groups
    ]
    return values, groups


def bits(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return float(value)
    return (value.dtype, value.shape, value.read().tobytes()) if value.shape else float(value.read())


@pytest.mark.parametrize(("source", "to"), PAIRS, indirect=["source"])
def test_convert_into_every_format(source: Checkpoint, tmp_path: Path, to: str) -> None:
    try:
        has_optimizer = source.optimizer is not None
    except CheckpointError:
        has_optimizer = False
    assert not (has_optimizer and source.format.startswith("megatron"))
    if to == "deepspeed-universal" and not has_optimizer:
        with pytest.raises(CheckpointError, match="optimizer"):
            write_checkpoint(source, tmp_path / "out", to, optimizer=True)
        assert not (tmp_path / "out").exists()
        return
    write_checkpoint(
        source, tmp_path / "out", to, optimizer=has_optimizer, verify=True, progress=False, expand=True
    )
    again = open_checkpoint(tmp_path / "out")
    masters = to == "deepspeed-universal"
    ours, theirs = model(source, masters=masters), model(again, masters=masters)
    # A tied alias is written if the format has a name for it.
    assert {name: ours[name] for name in theirs} == theirs
    assert source.tensors.keys() <= theirs.keys()
    if has_optimizer:
        assert state(again) == state(source)
