"""Samples of full state dicts and safetensors files, as torch, transformers and this project write them."""

from __future__ import annotations

import json
from pathlib import Path

import safetensors.torch
import torch
from torch import nn

from portable.converters import open_checkpoint, write_safetensors
from tests.converters.make_dcp import trained
from tests.converters.samples import Sample, Span


def _model() -> tuple[nn.Module, torch.optim.Optimizer]:
    return trained(1, "plain")


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in model.state_dict().items()}


def one_file(folder: Path) -> None:
    model, optimizer = _model()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 2}, folder / "last.pt"
    )


def bare(folder: Path) -> None:
    model, optimizer = _model()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")


def sharded(folder: Path) -> None:
    state = _state(_model()[0])
    names = list(state)
    places = {}
    for at in range(3):
        file = f"pytorch_model-{at + 1:05d}-of-00003.bin"
        held = {name: state[name].clone() for name in names[at::3]}
        torch.save(held, folder / file)
        places.update(dict.fromkeys(held, file))
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def safetensors_file(folder: Path) -> None:
    state = _state(_model()[0])
    del state["lm_head.weight"]
    safetensors.torch.save_file(state, folder / "model.safetensors", {"format": "pt"})


def safetensors_shards(folder: Path) -> None:
    model, optimizer = _model()
    step = folder.parent / f"{folder.name}-source"
    step.mkdir()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, step / "last.pt")
    folder.rmdir()
    write_safetensors(open_checkpoint(step), folder, max_shard_size=300, optimizer=True, progress=False)


def no_checksum(path: Path) -> list[Span]:
    """Return all bytes of a file, because safetensors files have no checksum.

    The index and the table of parameter groups are plain text without a checksum.
    """
    return [(0, path.stat().st_size)]


SAMPLES = [
    Sample("torch-one-file", "torch", make=one_file),
    Sample("torch-bare", "torch", make=bare),
    Sample("torch-sharded", "torch", make=sharded),
    Sample("safetensors", "safetensors", make=safetensors_file, unchecked=no_checksum),
    Sample("safetensors-shards", "safetensors", make=safetensors_shards, unchecked=no_checksum),
]
