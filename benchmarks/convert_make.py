"""Write checkpoints for `benchmarks.convert` with each framework.

``python -m benchmarks.convert_make KIND FOLDER --gigabytes N`` writes one type of checkpoint. For
training frameworks, it trains a Llama with about N GB of weights for one step, on two CPU ranks of
this machine, and saves it. Each type requires a separate process, because the frameworks cannot be
imported into the same process.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

WORLD = 2
KINDS = ("dcp", "zero2", "zero3", "xla", "fp8", "merge")
RANK = 16
"""LoRA rank of the adapter that the kind `merge` writes."""


def model_config(gigabytes: float) -> dict[str, Any]:
    """Return the config of a Llama with about ``gigabytes`` GB of fp32 weights.

    The embeddings are not tied to the LM head, because some of the compared programs cannot write tied
    weights.
    """
    hidden, vocabulary = (1024, 32_000) if gigabytes >= 0.5 else (64, 512)
    inner = hidden * 11 // 4
    layer = 4 * hidden * hidden + 3 * hidden * inner
    layers = max(1, round((gigabytes * 1e9 / 4 - 2 * hidden * vocabulary) / layer))
    return llama_config(hidden, vocabulary, layers, hidden // 32)


def llama_config(hidden: int, vocabulary: int, layers: int, heads: int) -> dict[str, Any]:
    """Return the config of a Llama with untied embeddings."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": hidden * 11 // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }


def _model(config: dict[str, Any]) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**config))


def _tokens(rank: int) -> Any:
    import torch

    return torch.arange(rank, rank + 16)[None]


def dcp(rank: int, folder: Path, config: dict[str, Any]) -> None:
    """Train one step with FSDP2 in fp32, and save with torch's DCP in Accelerate's layout."""
    import torch
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.fsdp import fully_shard

    model = _model(config)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(input_ids=_tokens(rank), labels=_tokens(rank)).loss.backward()
    optimizer.step()
    save({"model": get_model_state_dict(model)}, checkpoint_id=folder / "pytorch_model_fsdp_0")
    save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder / "optimizer_0")


def zero(rank: int, folder: Path, config: dict[str, Any], stage: int) -> None:
    """Train one step with DeepSpeed ZeRO in bf16 with fp32 master weights, and save a checkpoint."""
    import deepspeed

    model = _model(config)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "wall_clock_breakdown": False,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    engine.backward(engine(input_ids=_tokens(rank), labels=_tokens(rank)).loss)
    engine.step()
    engine.save_checkpoint(str(folder), tag="global_step1")


def xla(folder: Path, config: dict[str, Any]) -> None:
    """Wrap a model in PyTorch/XLA FSDP v1, and write the files of all ranks one after the other."""
    os.environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(WORLD)}
    import torch_xla
    import torch_xla.core.xla_model as xm
    from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel

    for rank in range(WORLD):
        model = XlaFullyShardedDataParallel(
            _model(config),
            sharding_groups=[list(range(WORLD))],
            sharding_rank=rank,
            sharding_world_size=WORLD,
        )
        torch_xla.sync()
        state = {"model": model.state_dict(), "shard_metadata": model.get_shard_metadata()}
        xm.save(state, str(folder / f"rank-{rank:08d}-of-{WORLD:08d}.pth"), master_only=False)
        del model, state


def fp8(folder: Path, config: dict[str, Any]) -> None:
    """Write weights in DeepSeek's published format: e4m3 with one scale per block of 128 x 128."""
    import torch
    from safetensors.torch import save_file

    tensors = {}
    for name, value in _model(config).to(torch.bfloat16).state_dict().items():
        if "_proj" not in name:
            tensors[name] = value
            continue
        rows, columns = (-(-size // 128) for size in value.shape)
        whole = torch.zeros(128 * rows, 128 * columns)
        whole[: value.shape[0], : value.shape[1]] = value
        scales = whole.abs().reshape(rows, 128, columns, 128).amax((1, 3)) / 448
        wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        codes = (whole / wide).nan_to_num()[: value.shape[0], : value.shape[1]]
        tensors[name] = codes.to(torch.float8_e4m3fn).contiguous()
        tensors[f"{name}_scale_inv"] = scales
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    described = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    whole_config = {**config, "dtype": "bfloat16", "quantization_config": described}
    (folder / "config.json").write_text(json.dumps(whole_config))


def merge(folder: Path, config: dict[str, Any]) -> None:
    """Write a bfloat16 model, and a LoRA adapter on all its linear layers in peft's format."""
    import torch
    from peft import LoraConfig, get_peft_model

    model = _model(config).to(torch.bfloat16)
    model.save_pretrained(folder / "base")
    settings = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted: Any = get_peft_model(model, settings)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:  # lora_B is initialized with zeros, so the adapter would have no effect
            torch.nn.init.normal_(parameter, std=0.02)
    adapted.save_pretrained(folder / "adapter")


def _launch(body: Callable[[int], None]) -> None:
    """Run `body(rank)` in `WORLD` forked processes with a gloo process group, and wait for them.

    Raises:
        RuntimeError: If a rank fails.
    """
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
    for rank in range(WORLD):
        pid = os.fork()
        if pid == 0:
            os.environ |= {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(WORLD),
            }
            code = 1
            try:
                dist.init_process_group("gloo", rank=rank, world_size=WORLD)
                body(rank)
                dist.barrier()
                code = 0
            except BaseException:
                traceback.print_exc()
            os._exit(code)
        children.append(pid)
    failed = [pid for pid in children if os.waitpid(pid, 0)[1]]  # waits for all
    if failed:
        raise RuntimeError("a rank failed")


def make(kind: str, folder: Path, gigabytes: float) -> None:
    """Write one checkpoint of the type `kind` to `folder`, with about `gigabytes` GB of fp32 weights."""
    os.environ |= {"USE_TORCH_XLA": "0", "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false"}
    config = model_config(gigabytes)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    if (
        kind == "fp8" and config["intermediate_size"] % 128
    ):  # transformers would infer a smaller block size from incomplete blocks
        config = llama_config(512, 512, 1, 16)
    if kind == "xla":
        xla(folder, config)
    elif kind == "fp8":
        fp8(folder, config)
    elif kind == "merge":
        merge(folder, model_config(2 * gigabytes))
    elif kind == "dcp":
        import transformers  # noqa: F401  # once here, not once a rank

        _launch(lambda rank: dcp(rank, folder, config))
    else:
        import deepspeed  # noqa: F401

        _launch(lambda rank: zero(rank, folder, config, int(kind.removeprefix("zero"))))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.convert_make", description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=1.4, help="of the result")
    options = parser.parse_args(argv)
    make(options.kind, options.folder, options.gigabytes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
