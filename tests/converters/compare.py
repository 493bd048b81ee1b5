"""Compare torch tensors with tensors read by the converters, bit for bit, and change files to damage them."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from portable.converters import (
    Checkpoint,
    CheckpointError,
    OptimizerState,
    Tensor,
    compute_manifest_entries,
    format_manifest,
    open_checkpoint,
    write_shard_checksums,
)
from portable.converters.cli import main
from portable.converters.formats.dcp.checksums import CHECKSUMS
from portable.converters.formats.dcp.metadata import TensorEntry, read_folder_metadata
from portable.converters.manifest import MANIFEST, read_manifest
from portable.converters.storage.folder import CheckpointFolder
from portable.converters.tensors.dtypes import FROM_TORCH


def load(path: Path) -> Any:
    """Load a file that torch has just written, with all its classes."""
    return torch.load(path, weights_only=False)


def content(value: Any) -> Any:
    return (value.dtype, value.shape, value.read().tobytes()) if isinstance(value, Tensor) else value


def everything(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return all values that a conversion with `--optimizer` writes, with tied weights under each name."""
    tensors, aliases = checkpoint.tensors, checkpoint.aliases
    found = {name: content(tensor) for name, tensor in tensors.items()}
    found |= {alias: found[owner] for alias, owner in aliases.items()}
    optimizer = checkpoint.optimizer
    for name, state in optimizer.state.items() if optimizer else ():
        found[f"state of {name}"] = {what: content(value) for what, value in state.items()}
    found["groups"] = optimizer.param_groups if optimizer else None
    return found


def refused(folder: Path) -> str:
    """Return the one-line error of a checkpoint, which names its folder."""
    with pytest.raises(CheckpointError) as caught:
        everything(open_checkpoint(folder))
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)
    return str(caught.value)


def tree(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all files in a folder, keyed by path."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


REFUSALS = (2, 65)
"""Exit codes for an error in the command and for a checkpoint that is damaged or not supported."""


def error_of(capsys: pytest.CaptureFixture[str], *argv: object, code: int | None = None) -> str:
    """Return the one-line error of a command, which prints nothing else."""
    capsys.readouterr()
    returned = main([str(arg) for arg in argv])
    assert returned in (REFUSALS if code is None else [code])
    said = capsys.readouterr()
    assert said.out == "" and said.err.endswith("\n")
    (line,) = said.err.splitlines()
    assert line.startswith("error: ") and line.isprintable()
    return line


def rewrite(path: Path, change: Callable[[Any], Any]) -> None:
    """Change the content of a file, and save it as torch or Orbax would."""
    if path.name in (".metadata", "metadata.pkl"):
        value = pickle.loads(path.read_bytes())  # noqa: S301 - written by torch in this test
        change(value)
        path.write_bytes(pickle.dumps(value))
        return
    if path.name == "_METADATA":
        value = json.loads(path.read_text())
        change(value)
        path.write_text(json.dumps(value))
        return
    value = load(path)
    change(value)
    torch.save(value, path)


def bits(value: torch.Tensor) -> bytes:
    """Return the bytes of the tensor's elements, row-major."""
    return bytes(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def assert_same(ours: Tensor, theirs: torch.Tensor) -> None:
    assert ours.shape == tuple(theirs.shape)
    assert ours.dtype == FROM_TORCH[str(theirs.dtype).removeprefix("torch.")]
    assert ours.nbytes == theirs.numel() * theirs.element_size()
    array = ours.read()
    assert array.shape == ours.shape
    assert array.tobytes() == bits(theirs), ours.name


def assert_model(checkpoint: Checkpoint, weights: Mapping[str, torch.Tensor]) -> None:
    """Check that every weight exists, itself or as an alias of an equal weight, and nothing else."""
    assert set(checkpoint.tensors) | set(checkpoint.aliases) == set(weights)
    for name, value in weights.items():
        assert_same(checkpoint.tensors[checkpoint.aliases.get(name, name)], value)


def assert_state(
    checkpoint: Checkpoint, reference: Mapping[str, Mapping[str, Any]], step: int | None = None
) -> OptimizerState:
    """Check that the optimizer state equals `reference`: `{name: {state name: value}}`.

    Args:
        checkpoint: The checkpoint.
        reference: Expected values by parameter and state name.
        step: Step of all parameters, if `reference` does not contain it.
    """
    state = checkpoint.optimizer
    assert state is not None
    assert set(state.state) == set(reference)
    for name, values in reference.items():
        expected = values if step is None else {"step": step, **values}
        assert set(state.state[name]) == set(expected)
        for what, value in expected.items():
            ours = state.state[name][what]
            if isinstance(value, torch.Tensor) and (value.ndim or step is None):
                assert isinstance(ours, Tensor)
                assert_same(ours, value)
            else:
                assert (ours.read().item() if isinstance(ours, Tensor) else ours) == value
    return state


def assert_optimizer(checkpoint: Checkpoint, reference: Mapping[str, Any], step: int | None = None) -> None:
    """Check the optimizer state and its groups.

    Args:
        checkpoint: The checkpoint.
        reference: `{"optim": {name: {state name: value}}, "groups": [...]}`.
        step: Step of all parameters, if `reference` does not contain it. The groups of `reference` are then
            not compared.
    """
    state = assert_state(checkpoint, reference["optim"], step)
    if step is not None:
        assert sorted(name for group in state.param_groups for name in group["params"]) == sorted(state.state)
        if all(group.keys() == {"params"} for group in state.param_groups):  # DeepSpeed's elastic form
            return
    for ours_group, theirs in zip(state.param_groups, reference["groups"], strict=True):
        listed = {"params": ours_group["params"]} if step is not None else {}
        plain = {key: list(value) if isinstance(value, tuple) else value for key, value in theirs.items()}
        assert {**plain, **listed} == ours_group


def live(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of a live optimizer by parameter name, as `assert_optimizer` expects it."""
    names: dict[Any, str] = {value: name for name, value in model.named_parameters()}
    groups = [
        {
            **{key: value for key, value in group.items() if key != "param_names"},
            "params": [names[value] for value in group["params"]],
        }
        for group in optimizer.param_groups
    ]
    return {"optim": {names[value]: held for value, held in optimizer.state.items()}, "groups": groups}


class FileCache:
    """A folder of files by key, as the processes of one node share it.

    Args:
        folder: An existing folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, key: str, write: Callable[[Path], None]) -> Path:
        """Return the file of a key, which is written first if it is missing."""
        path = self._folder / hashlib.sha256(key.encode()).hexdigest()
        if not path.exists():
            write(path)
        return path


def remove_tables(folder: Path) -> None:
    """Turn a DCP folder of this project into a folder as earlier versions wrote it, without tables."""
    items: dict[str, dict[str, int]] = {}
    for entry in read_folder_metadata(CheckpointFolder(folder)).values():
        for item in entry.items.values() if isinstance(entry, TensorEntry) else (entry.item,):
            assert item.checksum is not None
            items.setdefault(item.file, {})[str(item.offset)] = item.checksum
    for name in (CHECKSUMS, *(path.name for path in folder.glob("__*.metadata"))):
        (folder / name).unlink()
    write_shard_checksums(folder, items)
    if (manifest := read_manifest(folder)) is not None:
        facts = {name: manifest[name] for name in ("step", "run")}
        (folder / MANIFEST).write_text(format_manifest(compute_manifest_entries(folder), **facts))
