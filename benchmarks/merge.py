"""`portable-convert --merge-into` beside `cp` and peft's own merge.

``python -m benchmarks.merge`` writes a Llama in bfloat16 and a LoRA of rank 16 on all its linear layers, then
times whole processes, in turns, with a warm page cache. The results are compared: no value may differ by more
than one unit in the last place. ``--memory`` measures our peak memory as the base grows.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.convert import (
    COPY,
    COPY_SYNCED,
    Contestant,
    Result,
    copies,
    last_line,
    measure,
    medians,
    python,
    take_turns,
)
from benchmarks.convert_make import llama_config
from converters import open_checkpoint

if TYPE_CHECKING:
    from collections.abc import Sequence

RANK = 16
OURS, DORA, PEFT = (
    "portable-convert --merge-into",
    "portable-convert --merge-into, DoRA",
    "peft merge_and_unload",
)
_PEFT = """\
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
base, adapter, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(out)
"""


def shapes(gigabytes: float) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """A Llama whose bfloat16 weights take about that many gigabytes: its config, and its tensors."""
    hidden, vocabulary = (2048, 32_000) if gigabytes >= 0.3 else (256, 1024)
    inner = hidden * 11 // 4
    layer = 4 * hidden * hidden + 3 * hidden * inner
    layers = max(1, round((gigabytes * 1e9 / 2 - 2 * hidden * vocabulary) / layer))
    config = {**llama_config(hidden, vocabulary, layers, hidden // 64), "dtype": "bfloat16"}
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "lm_head.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
    }
    for i in range(layers):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            found[f"model.layers.{i}.self_attn.{name}.weight"] = (hidden, hidden)
        found[f"model.layers.{i}.mlp.gate_proj.weight"] = (inner, hidden)
        found[f"model.layers.{i}.mlp.up_proj.weight"] = (inner, hidden)
        found[f"model.layers.{i}.mlp.down_proj.weight"] = (hidden, inner)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"model.layers.{i}.{name}.weight"] = (hidden,)
    return config, found


def write_base(folder: Path, gigabytes: float) -> None:
    """The model, of random values; the same few megabytes over and over."""
    config, tensors = shapes(gigabytes)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    header, at = {}, 0
    for name, shape in tensors.items():
        end = at + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    values = (np.random.default_rng(0).standard_normal(1 << 22) * 0.02).astype(np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for start in range(0, at, len(bits)):
            file.write(bits[: at - start])


def write_adapter(folder: Path, gigabytes: float, *, dora: bool) -> None:
    """A LoRA on every linear layer but the head, in peft's files."""
    from safetensors.numpy import save_file

    rng = np.random.default_rng(1)
    tensors = {}
    for name, shape in shapes(gigabytes)[1].items():
        if len(shape) != 2 or ".layers." not in name:
            continue
        key = "base_model.model." + name.removesuffix(".weight")
        for kind, size in (("lora_A", (RANK, shape[1])), ("lora_B", (shape[0], RANK))):
            tensors[f"{key}.{kind}.weight"] = (rng.standard_normal(size) * 0.02).astype(np.float32)
        if dora:
            tensors[f"{key}.lora_magnitude_vector"] = np.ones(shape[0], np.float32)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({name.split(".")[-3] for name in tensors if ".lora_A." in name})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 32,
        "use_dora": dora,
        "target_modules": targets,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def ours(work: Path, adapter: str, out: Path) -> list[str]:
    """Our command line."""
    into = ["--merge-into", str(work / "base"), "--quiet"]
    return python("-m", "converters.cli", str(work / adapter), str(out), *into)


def contestants(work: Path) -> list[Contestant]:
    weights = work / "base" / "model.safetensors"
    return [
        *copies(weights),
        Contestant(OURS, lambda _, out: ours(work, "adapter", out)),
        Contestant(DORA, lambda _, out: ours(work, "dora", out)),
        Contestant(PEFT, lambda base, out: python("-c", _PEFT, str(base), str(work / "adapter"), str(out))),
    ]


def compete(work: Path, rounds: int) -> list[Result]:
    """Every contestant in turn; AssertionError where ours and peft's differ by more than one unit."""

    def keep(contestant: Contestant, out: Path) -> None:
        if contestant.name in (OURS, PEFT):
            shutil.rmtree(work / contestant.name, ignore_errors=True)
            out.rename(work / contestant.name)

    results = take_turns(contestants(work), work / "base", work, rounds, keep)
    if (work / PEFT).exists():
        same(work / OURS, work / PEFT)
    return results


def same(left: Path, right: Path) -> None:
    """Whether two models hold the same values but for one unit in the last place."""
    one, two = open_checkpoint(left).tensors, open_checkpoint(right).tensors
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        a, b = (ordered(t.read()) for t in (tensor, two[name]))
        assert int(np.abs(a - b).max()) <= 1, name


def ordered(values: Any) -> Any:
    bits = values.view(np.int16).astype(np.int32)
    return np.where(bits < 0, -(bits & 0x7FFF), bits)


def table(results: Sequence[Result]) -> str:
    """The medians as a Markdown table."""
    measured = {result.name: result for result in results if result.runs}
    return medians(results, {"x cp": measured[COPY], "x cp+fsync": measured[COPY_SYNCED]})


def memory(work: Path, sizes: Sequence[float]) -> str:
    """Our peak memory as the base grows."""
    lines = [
        "| GB | adapter MiB | wall s | peak MiB | anonymous MiB |",
        "| ---: | ---: | ---: | ---: | ---: |",
    ]
    for size in sizes:
        prepare(work, size)
        run, code = measure(ours(work, "adapter", work / "out"), work / "log")
        if code:
            raise RuntimeError(last_line(work / "log"))
        held = (work / "adapter" / "adapter_model.safetensors").stat().st_size / 2**20
        lines.append(f"| {size:g} | {held:.0f} | {run.wall:.2f} | {run.rss:.0f} | {run.anonymous:.0f} |")
        shutil.rmtree(work / "out")
    return "\n".join(lines) + "\n"


def prepare(work: Path, gigabytes: float) -> None:
    for name in ("base", "adapter", "dora"):
        shutil.rmtree(work / name, ignore_errors=True)
    write_base(work / "base", gigabytes)
    write_adapter(work / "adapter", gigabytes, dora=False)
    write_adapter(work / "dora", gigabytes, dora=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0 unless two tools differ."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.merge", description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of bfloat16 weights")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", action="store_true", help="our memory from 0.1 to 4 GB instead")
    parser.add_argument("--small", action="store_true", help="3 MB and one round: does it run?")
    parser.add_argument("--json", type=Path, help="also write every run to this file")
    options = parser.parse_args(argv)
    if options.small:
        options.gigabytes, options.rounds = 0.003, 1
    work = Path(tempfile.mkdtemp(prefix="merge-", dir=Path.cwd()))
    try:
        if options.memory:
            print(memory(work, (0.003, 0.01) if options.small else (0.1, 1, 4)))
            return 0
        prepare(work, options.gigabytes)
        results = compete(work, options.rounds)
        print(f"{os.cpu_count()} cores, {options.gigabytes:g} GB in bfloat16, LoRA of rank {RANK}\n")
        print(table(results))
        if options.json:
            options.json.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")
    finally:
        shutil.rmtree(work)
    return 0


if __name__ == "__main__":
    sys.exit(main())
