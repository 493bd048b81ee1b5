"""Write the checkpoints of `damages`, and each model without damage in each format."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import deepspeed
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.fsdp import fully_shard

from tests.converters.damages import DAMAGED, EMPTY, FORMATS, SAMPLED, DamagedCheckpoint
from tests.converters.make_dcp import launch, prepare
from tests.converters.make_deepspeed import start

TINY = {"vocab_size": 256, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}


def build_llama() -> Any:
    """Build a Llama of four layers with a separate output embedding."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(**TINY, intermediate_size=64, num_hidden_layers=4, tie_word_embeddings=False)
    )


def build_qwen3_moe() -> Any:
    """Build a mixture of experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**TINY, moe_intermediate_size=16, num_hidden_layers=2, num_experts=8, head_dim=8)
    )


def build_mixtral() -> Any:
    """Build a mixture of experts, which is saved with published names."""
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(**TINY, intermediate_size=16, num_hidden_layers=2, num_local_experts=4)
    )


def build_bert() -> Any:
    """Build an encoder."""
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=256, hidden_size=32, num_attention_heads=4, num_hidden_layers=2, intermediate_size=64
        )
    )


def build_t5() -> Any:
    """Build a model whose first layers have a position bias."""
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(vocab_size=256, d_model=32, d_kv=8, d_ff=64, num_heads=4, num_layers=2)
    )


def build_gpt2() -> Any:
    """Build a model whose matrices are transposed."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=256, n_embd=32, n_head=4, n_layer=2, n_positions=16))


def build_qwen2_vl() -> Any:
    """Build a language model with a vision tower."""
    from transformers import Qwen2VLForConditionalGeneration

    from tests.composite import build_composite_config

    return Qwen2VLForConditionalGeneration(build_composite_config("qwen2_vl"))


MODELS: dict[str, Callable[[], Any]] = {
    "llama": build_llama,
    "qwen3_moe": build_qwen3_moe,
    "mixtral": build_mixtral,
    "bert": build_bert,
    "t5": build_t5,
    "gpt2": build_gpt2,
    "qwen2_vl": build_qwen2_vl,
    "custom": build_llama,
}


@cache
def build_complete_state(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tensors of a model without aliases, and its config."""
    torch.manual_seed(0)
    model = MODELS[name]()
    config = {**json.loads(model.config.to_json_string()), "architectures": [type(model).__name__]}
    if name == "custom":
        config |= {"model_type": "custom", "architectures": ["CustomForCausalLM"]}
    aliases = set(model.all_tied_weights_keys)
    state = {key: value.detach().clone() for key, value in model.state_dict().items() if key not in aliases}
    if name == "mixtral":
        from transformers.core_model_loading import revert_weight_conversion

        state = {key: value.clone() for key, value in revert_weight_conversion(model, state).items()}
    return {key: value.contiguous() for key, value in state.items()}, config


def build_state(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return copies of the tensors of a model without aliases, and of its config."""
    state, config = build_complete_state(name)
    return {key: value.clone() for key, value in state.items()}, copy.deepcopy(config)


class Plain(nn.Module):
    """Module whose parameters have given names."""

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        for name, value in state.items():
            *path, leaf = name.split(".")
            module: nn.Module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module._modules[part]  # type: ignore[assignment]
            module.register_parameter(leaf, nn.Parameter(value.clone(memory_format=torch.contiguous_format)))

    def forward(self) -> torch.Tensor:
        """Return a loss that depends on all parameters."""
        return sum((p.sum() for p in self.parameters()), torch.zeros(()))


def write(folder: Path, format: str, state: dict[str, Any], config: Mapping[str, Any]) -> None:
    """Write a checkpoint."""
    folder.mkdir(parents=True)
    state = {name: value.contiguous() for name, value in state.items()}
    if format == "dcp":
        dcp_save({"model": state}, checkpoint_id=folder, no_dist=True)
    elif format == "safetensors":
        save_file(state, folder / "model.safetensors", {"format": "pt"})
    elif format == "torch":
        torch.save(state, folder / "pytorch_model.bin")
    elif format == "fsdp":
        model = Plain(state)
        fully_shard(model)
        torch.save(model.state_dict(), folder / "model_world_size_1_rank_0.pt")
    else:
        settings = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0, "torch_adam": True}},
            "zero_optimization": {"stage": int(format[-1])},
        }
        engine, *_ = deepspeed.initialize(model=Plain(state), config=settings)
        engine.save_checkpoint(str(folder))
        engine.destroy()
    (folder / "config.json").write_text(json.dumps(config))


def write_cases(out: Path, cases: Iterable[DamagedCheckpoint]) -> None:
    """Write damaged checkpoints."""
    for case in cases:
        state, config = build_state(case.model)
        write(out / case.folder, case.format, case.damage(state, config), config)


def write_sampled(rank: int, world: int, out: Path) -> None:
    """Write each damage in one format, and the complete models, from one rank."""
    start(rank, world)
    write_cases(out, SAMPLED)
    _, model, damage, _ = EMPTY
    state, config = build_state(model)
    write(out / "empty-tensors", "torch", damage(state, config), config)
    for model in MODELS:
        for format in FORMATS:
            state, config = build_state(model)
            write(out / f"complete-{model}-{format}", format, state, config)


def write_every(rank: int, world: int, out: Path) -> None:
    """Write the other formats of each damage from one rank."""
    start(rank, world)
    write_cases(out, (case for case in DAMAGED if case not in SAMPLED))


def main(out: Path) -> None:
    """Write each damage in one format, and the complete models, under `out`."""
    prepare()
    launch(1, out, write_sampled)


def every(out: Path) -> None:
    """Write the other formats of each damage under `out`."""
    prepare()
    launch(1, out, write_every)
