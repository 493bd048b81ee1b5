"""Megatron's layout without Megatron: an independent splitter of a small Llama, for samples and damage."""

from __future__ import annotations

import argparse
import json
import shutil
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from tests.converters.samples import Sample

if TYPE_CHECKING:
    from pathlib import Path


def llama() -> dict[str, torch.Tensor]:
    """A Llama's weights: 2 layers, 4 heads in 2 groups, heads of 6, 10 tokens."""
    torch.manual_seed(0)
    made = {"model.embed_tokens.weight": (10, 8), "model.norm.weight": (8,), "lm_head.weight": (10, 8)}
    for i in range(2):
        sizes = {
            "self_attn.q_proj": (24, 8),
            "self_attn.k_proj": (12, 8),
            "self_attn.v_proj": (12, 8),
            "self_attn.o_proj": (8, 24),
            "mlp.gate_proj": (6, 8),
            "mlp.up_proj": (6, 8),
            "mlp.down_proj": (8, 6),
            "input_layernorm": (8,),
            "post_attention_layernorm": (8,),
        }
        made |= {f"model.layers.{i}.{name}.weight": size for name, size in sizes.items()}
    return {name: torch.randn(size).bfloat16() for name, size in made.items()}


def split(
    folder: Path, old: bool = False, chunks: bool = False, optimizer: bool = False, **more: Any
) -> None:
    """Two tensor ranks of `llama()`; with the old names, or in chunks of an interleaved schedule."""
    weights = llama()
    pad = torch.zeros(2, 8, dtype=torch.bfloat16)
    args = argparse.Namespace(
        **{
            "num_layers": 2,
            "hidden_size": 8,
            "num_attention_heads": 4,
            "group_query_attention": True,
            "num_query_groups": 2,
            "kv_channels": 6,
            "swiglu": True,
            "normalization": "RMSNorm",
            "position_embedding_type": "rope",
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 1,
            "vocab_size": 10,
            **more,
        }
    )
    for tp in range(2):
        half = slice(tp * 6, tp * 6 + 6)
        layers: list[dict[str, torch.Tensor]] = []
        for i in range(2):
            at = {name.split(f"layers.{i}.")[1]: w for name, w in weights.items() if f"layers.{i}." in name}
            q, k, v = (at[f"self_attn.{what}_proj.weight"] for what in "qkv")
            up = slice(tp * 3, tp * 3 + 3)
            gated = [at[f"mlp.{what}_proj.weight"][up] for what in ("gate", "up")]
            layers.append(
                {
                    "input_layernorm.weight": at["input_layernorm.weight"],
                    "self_attention.linear_qkv.weight": torch.cat(
                        [q[tp * 12 : tp * 12 + 12], k[half], v[half]]
                    ),
                    "self_attention.linear_proj.weight": at["self_attn.o_proj.weight"][
                        :, tp * 12 : tp * 12 + 12
                    ],
                    "pre_mlp_layernorm.weight": at["post_attention_layernorm.weight"],
                    "mlp.linear_fc1.weight": torch.cat(gated),
                    "mlp.linear_fc2.weight": at["mlp.down_proj.weight"][:, up],
                }
            )
        words = torch.cat([weights["model.embed_tokens.weight"], pad])[half]
        head = torch.cat([weights["lm_head.weight"], pad])[half]
        first = {"embedding.word_embeddings.weight": words}
        last = {"decoder.final_layernorm.weight": weights["model.norm.weight"], "output_layer.weight": head}
        every = [{f"decoder.layers.{i}.{k}": v for k, v in layer.items()} for i, layer in enumerate(layers)]
        state: dict[str, Any] = {"args": args, "checkpoint_version": 3.0, "iteration": 5}
        if optimizer:
            state["optimizer"] = {}
        if chunks:
            state |= {"model0": {**first, **every[0]}}
            second = {f"decoder.layers.0.{k}": v for k, v in layers[1].items()}
            state |= {"model1": {**second, **last}}
        elif old:
            names = {
                "self_attention.linear_qkv": "self_attention.query_key_value",
                "self_attention.linear_proj": "self_attention.dense",
                "mlp.linear_fc1": "mlp.dense_h_to_4h",
                "mlp.linear_fc2": "mlp.dense_4h_to_h",
                "pre_mlp_layernorm": "post_attention_norm",
                "input_layernorm": "input_norm",
            }
            encoder = {f"layers.{i}.{k}": v for i, layer in enumerate(layers) for k, v in layer.items()}
            for new, before in names.items():
                encoder = {key.replace(new, before): value for key, value in encoder.items()}
            encoder["final_norm.weight"] = weights["model.norm.weight"]
            language = {
                "embedding": {"word_embeddings": {"weight": words}},
                "encoder": encoder,
                "output_layer": {"weight": head},
            }
            state["model"] = {"language_model": language}
        else:
            state["model"] = {**first, **every[0], **every[1], **last}
        place = folder / f"mp_rank_{tp:02d}"
        place.mkdir(parents=True)
        torch.save(state, place / "model_optim_rng.pt")


def core(folder: Path) -> None:
    """The same model as Megatron-Core's `torch_dist` has it: all layers of a module in one tensor."""
    split(folder / "split")
    ranks = [torch.load(path, weights_only=False) for path in sorted((folder / "split").glob("*/*.pt"))]
    state: dict[str, torch.Tensor] = {}
    for key in ranks[0]["model"]:
        parts = [rank["model"][key] for rank in ranks]
        if "linear_fc1" in key:
            whole = torch.cat([part[:3] for part in parts] + [part[3:] for part in parts])
        elif "linear_proj" in key or "linear_fc2" in key:
            whole = torch.cat(parts, dim=1)
        else:
            whole = parts[0] if "layernorm" in key else torch.cat(parts)
        state[key] = whole
    for key in [key for key in state if ".layers.0." in key]:
        both = torch.stack([state.pop(key), state.pop(key.replace(".0.", ".1."))])
        state[key.replace("layers.0.", "layers.")] = both
    shutil.rmtree(folder / "split")
    dcp_save(state, checkpoint_id=folder, no_dist=True)
    torch.save({"args": ranks[0]["args"], "iteration": 5}, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))


def _swapped(left: Path, right: Path) -> bool:
    """The splitter's files do not record which process wrote them."""
    return left.name == right.name == "model_optim_rng.pt"


SAMPLES = [
    Sample("megatron", "megatron", split, same_layout=_swapped),
    Sample("megatron-core", "megatron-core", core, untouched=("metadata.json",)),
]
