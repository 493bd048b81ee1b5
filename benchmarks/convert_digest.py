"""Digest every tensor of a converted checkpoint, read with safetensors and torch.

``python -m benchmarks.convert_digest FOLDER`` prints JSON: name -> [dtype, shape, digest].
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

if TYPE_CHECKING:
    from collections.abc import Iterator


def tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of one weights file, one at a time."""
    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  # not a dict
                yield name, file.get_tensor(name)
        return
    state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    while len(state) == 1:  # some tools leave the container that the weights were saved in
        (state,) = state.values()
    yield from state.items()


def digest(folder: Path) -> dict[str, list[Any]]:
    """Every tensor of the weight files in `folder`."""
    found: dict[str, list[Any]] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix in (".safetensors", ".bin", ".pt", ".pth"):
            for name, tensor in tensors(path):
                data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
                dtype = str(tensor.dtype).removeprefix("torch.")
                found[name] = [dtype, list(tensor.shape), hashlib.blake2b(data, digest_size=16).hexdigest()]
    return found


if __name__ == "__main__":
    json.dump(digest(Path(sys.argv[1])), sys.stdout)
