"""What `benchmarks.convert` runs as processes of their own, with other libraries than ours.

``python -m benchmarks.convert_peers deepseek|transformers|compressed FOLDER OUT``: others' ways from fp8
weights with a scale for each block to bfloat16. ``digest FOLDER`` prints JSON of a result: name -> [dtype,
shape, digest].
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


def deepseek(source: Path, out: Path) -> None:
    """The loop of DeepSeek's fp8_cast_bf16.py; its Triton kernel, which needs a GPU, as torch's formula."""
    from safetensors.torch import load_file, save_file

    for path in sorted(source.glob("*.safetensors")):
        tensors, found = load_file(path), {}
        for name, value in tensors.items():
            if name.endswith("_scale_inv"):
                continue
            if value.element_size() == 1:
                scales = tensors[f"{name}_scale_inv"]
                wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
                value = (value.float() * wide[: value.shape[0], : value.shape[1]]).bfloat16()
            found[name] = value
        save_file(found, out / path.name)


def transformers(source: Path, out: Path) -> None:
    """Load with ``dequantize``, and save."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    described = json.loads((source / "config.json").read_text("utf-8"))["quantization_config"]
    given = FineGrainedFP8Config(**{**described, "dequantize": True})
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, quantization_config=given)
    model.save_pretrained(out)


def compressed(source: Path, out: Path) -> None:
    """The way of llm-compressor without a model, which compressed-tensors holds."""
    from compressed_tensors.entrypoints.convert import FP8BlockDequantizer, convert_checkpoint

    convert_checkpoint(source, out, FP8BlockDequantizer.from_pretrained(source))


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
    what, *folders = sys.argv[1], *map(Path, sys.argv[2:])
    if what == "digest":
        json.dump(digest(*folders), sys.stdout)
    else:
        {"deepseek": deepseek, "transformers": transformers, "compressed": compressed}[what](*folders)
