"""Convert checkpoints with other libraries, for comparison in `benchmarks.convert`.

``python -m benchmarks.convert_peers deepseek|transformers|compressed FOLDER OUT`` converts fp8
weights with one scale per block to bfloat16, using the named library. ``peft FOLDER OUT`` merges an
adapter into the model in the folder ``base`` next to the adapter's folder. ``compare FOLDER
FOLDER`` prints the largest difference between the tensors in two results, in units in the last
place. Each command runs in a separate process.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open

if TYPE_CHECKING:
    from collections.abc import Iterator


def deepseek(source: Path, out: Path) -> None:
    """Convert fp8 weights to bfloat16 with the loop from DeepSeek's fp8_cast_bf16.py.

    The script's Triton kernel requires a GPU, so torch operations replace it.
    """
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
    """Convert fp8 weights to bfloat16 by loading the model with ``dequantize`` and saving it."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    described = json.loads((source / "config.json").read_text("utf-8"))["quantization_config"]
    given = FineGrainedFP8Config(**{**described, "dequantize": True})
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, quantization_config=given)
    model.save_pretrained(out)


def compressed(source: Path, out: Path) -> None:
    """Convert fp8 weights to bfloat16 with compressed-tensors' checkpoint converter.

    llm-compressor uses this library. The converter reads one tensor at a time, and does not load a
    model.
    """
    from compressed_tensors.entrypoints.convert import FP8BlockDequantizer, convert_checkpoint

    convert_checkpoint(source, out, FP8BlockDequantizer.from_pretrained(source))


def peft(source: Path, out: Path) -> None:
    """Merge an adapter into its base model with peft, as in peft's documentation."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source.parent / "base", dtype=torch.bfloat16)
    PeftModel.from_pretrained(model, str(source)).merge_and_unload().save_pretrained(out)


def tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and tensor of each entry in a weights file, in safetensors or ``torch.save`` format."""
    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  # not a dict
                yield name, file.get_tensor(name)
        return
    state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    while len(state) == 1:  # some tools wrap the state dict in another dict
        (state,) = state.values()
    yield from state.items()


def read_result(folder: Path) -> dict[str, torch.Tensor]:
    """Memory-map all tensors in the weight files of a folder."""
    suffixes = (".safetensors", ".bin", ".pt", ".pth")
    paths = [path for path in sorted(folder.iterdir()) if path.suffix in suffixes]
    return {name: tensor for path in paths for name, tensor in tensors(path)}


def compare(one: Path, two: Path) -> float:
    """Compute the largest difference between the tensors in two results.

    Returns:
        The difference in units in the last place, or infinity if the names, dtypes or shapes differ.
    """
    left, right = read_result(one), read_result(two)
    if {n: (t.dtype, t.shape) for n, t in left.items()} != {n: (t.dtype, t.shape) for n, t in right.items()}:
        return math.inf
    return max(_count_units(tensor, right[name]) for name, tensor in left.items())


def _count_units(one: torch.Tensor, two: torch.Tensor) -> int:
    """Compute the largest difference between two nonempty tensors, in units in the last place.

    The tensors must have the same shape and the same floating-point dtype of 1, 2 or 4 bytes.
    """
    if torch.equal(one.contiguous().view(torch.uint8), two.contiguous().view(torch.uint8)):
        return 0
    words = {1: torch.int8, 2: torch.int16, 4: torch.int32}[one.element_size()]
    ordered = []
    for tensor in (one, two):
        bits = tensor.contiguous().view(words).long()
        # Map the bits to integers in the order of the floats. The magnitude of a float grows with its bits,
        # and the sign is the first bit.
        ordered.append(torch.where(bits < 0, torch.iinfo(words).min - bits, bits))
    return int((ordered[0] - ordered[1]).abs().max())


if __name__ == "__main__":
    command, *folders = sys.argv[1], *map(Path, sys.argv[2:])
    functions = {
        "deepseek": deepseek,
        "transformers": transformers,
        "compressed": compressed,
        "peft": peft,
        "compare": compare,
    }
    result = functions[command](*folders)
    if result is not None:
        print(result)
