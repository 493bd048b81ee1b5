"""Rank files of Megatron-LM, compared with logits of Megatron-Core through transformers.

`make_megatron.py` writes the files with Megatron-Core's parallel modules on the CPU. Older layouts and
damaged files have other names or settings.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from portable.converters import CheckpointError, open_checkpoint, write_checkpoint
from portable.converters.formats.megatron.names import split_gate_and_up
from portable.converters.storage.byte_sources import InMemorySource
from portable.converters.tensors.tensor import Tensor
from tests.converters.compare import everything, rewrite

COMMON = {
    "vocab_size": 120,
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LLAMA = {**COMMON, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "rms_norm_eps": 1e-5}
CONFIGS: dict[str, transformers.PretrainedConfig] = {
    "llama-2x2": transformers.LlamaConfig(**LLAMA, head_dim=8, tie_word_embeddings=False),
    "llama-tied-2x1": transformers.Qwen2Config(**LLAMA, head_dim=12, tie_word_embeddings=True),
    "gpt-2x2": transformers.GPT2Config(
        vocab_size=120,
        n_embd=32,
        n_layer=4,
        n_head=4,
        n_inner=48,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
    ),
}


@pytest.mark.parametrize("run", [*CONFIGS, *(f"core-{run}" for run in CONFIGS)])
def test_megatron_logits_match_transformers(written_megatron: Path, tmp_path: Path, run: str) -> None:
    """The models have two tensor ranks, one or two stages, a padded vocabulary, and grouped queries."""
    shutil.copytree(written_megatron / run, tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text(json.dumps(CONFIGS[run.removeprefix("core-")].to_dict()))
    checkpoint = open_checkpoint(tmp_path / "run")
    assert checkpoint.format == ("megatron-core" if run.startswith("core-") else "megatron")
    assert checkpoint.metadata["step"] == 7
    write_checkpoint(checkpoint, tmp_path / "out", verify=True)
    model, loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(loaded.values())
    with torch.no_grad():
        found = model(torch.arange(3, 23)[None]).logits[0]
    theirs = torch.load(written_megatron / f"{run.removeprefix('core-')}.logits.pt")
    torch.testing.assert_close(found, theirs, rtol=1e-5, atol=2e-5)


Change = Any
"""A function of a file's content."""


@pytest.fixture
def changed(written_megatron: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that copies a run with other args in each file, or with other content."""

    def make(run: str = "llama-2x2", change: Change = lambda content: None, **args: Any) -> Path:
        copy = tmp_path / "run"
        shutil.copytree(written_megatron / run, copy)
        for path in copy.rglob("*.pt"):
            rewrite(path, lambda content: (vars(content["args"]).update(args), change(content)))
        return copy

    return make


def older(content: dict[str, Any]) -> None:
    """Rename tensors to the names before Megatron-Core."""
    names = {
        "self_attention.linear_qkv": "self_attention.query_key_value",
        "self_attention.linear_proj": "self_attention.dense",
        "mlp.linear_fc1": "mlp.dense_h_to_4h",
        "mlp.linear_fc2": "mlp.dense_4h_to_h",
        "pre_mlp_layernorm": "post_attention_norm",
        "input_layernorm": "input_norm",
        "final_layernorm": "final_norm",
    }
    held = {key: value for key, value in content["model"].items() if isinstance(value, torch.Tensor)}
    encoder = {key.removeprefix("decoder."): held[key] for key in held if key.startswith("decoder.")}
    for new, before in names.items():
        encoder = {key.replace(new, before): value for key, value in encoder.items()}
    embedding = {"word_embeddings": {"weight": held["embedding.word_embeddings.weight"]}}
    content["model"] = {"language_model": {"embedding": embedding, "encoder": encoder}}


def in_chunks(content: dict[str, Any]) -> None:
    """Split the layers into chunks of two, as in an interleaved schedule."""
    for number in range(2):
        content[f"model{number}"] = chunk = {}
        for key, value in content["model"].items():
            layer = int(key.split(".")[2]) if key.startswith("decoder.layers.") else None
            first = key.startswith("embedding.")
            if (number == 1 - first) if layer is None else (layer // 2 == number):
                chunk[key if layer is None else key.replace(f".{layer}.", f".{layer % 2}.", 1)] = value
    del content["model"]


@pytest.mark.parametrize("change", [older, in_chunks])
def test_megatron_layouts_have_same_values(
    change: Change, written_megatron: Path, changed: Callable[..., Path]
) -> None:
    whole = open_checkpoint(written_megatron / "llama-tied-2x1")
    run = changed("llama-tied-2x1", change)
    for path in (run, run / "iter_0000007" / "mp_rank_01"):
        checkpoint = open_checkpoint(path)
        assert checkpoint.metadata == whole.metadata == {"world_size": 2, "step": 7}
        assert everything(checkpoint) == everything(whole)


def test_megatron_vocabulary_size_follows_given_config(written_megatron: Path, tmp_path: Path) -> None:
    given = tmp_path / "config.json"
    given.write_text('{"model_type": "llama", "vocab_size": 110}')
    found = open_checkpoint(written_megatron / "llama-2x2", companions={"config.json": given})
    assert found.tensors["lm_head.weight"].shape[0] == 110 and "config.json" in found.companions


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}
ARGS: dict[str, Any] = {
    "rotary_base": 10000,
    "norm_epsilon": 1e-5,
    "untie_embeddings_and_output_weights": True,
}


@pytest.mark.parametrize(
    ("args", "config", "told"),
    [
        ({}, {}, None),
        ({"rotary_base": 500000, "use_rope_scaling": True}, {"rope_parameters": LLAMA3}, None),
        ({"window_size": (3, 0)}, {"sliding_window": 4}, None),
        ({"rotary_base": 500000}, {}, "rotary_base=500000, .* has rope_theta=10000.0"),
        ({}, {"rope_parameters": LLAMA3}, "use_rope_scaling='default', .*'llama3 with factor 8.0'"),
        ({}, {"sliding_window": 4}, "window_size=None, .* has sliding_window=4"),
        ({}, {"num_key_value_heads": 4}, "num_query_groups=2, .* has num_key_value_heads=4"),
        (
            {},
            {"tie_word_embeddings": True},
            "untie_embeddings_and_output_weights=True, .* has tie_word_embeddings=True",
        ),
        ({"window_size": (3, 0)}, {"sliding_window": 5}, r"window_size='\(3, 0\)', .* has sliding_window=5"),
        ({"swiglu": True}, {"hidden_act": "gelu"}, "swiglu=True, .* has hidden_act='gelu'"),
        (
            {"vocab_size": 120},
            {"vocab_size": 119},
            "vocab_size is 120 in the checkpoint's args, but only 119 in",
        ),
    ],
)
def test_megatron_config_must_match_args(
    changed: Callable[..., Path],
    tmp_path: Path,
    args: dict[str, Any],
    config: dict[str, Any],
    told: str | None,
) -> None:
    run, given = changed(**{**ARGS, **args}), tmp_path / "config.json"
    given.write_text(json.dumps({**CONFIGS["llama-2x2"].to_dict(), **config}))
    if told is None:
        open_checkpoint(run, companions={"config.json": given})
        return
    with pytest.raises(CheckpointError, match=told):
        open_checkpoint(run, companions={"config.json": given})


def test_megatron_rejects_odd_rows_of_gated_mlp(changed: Callable[..., Path]) -> None:
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    run = changed(change=lambda content: content["model"].update({name: torch.ones(5, 32)}))
    with pytest.raises(CheckpointError, match=r"has shape \[5, 32\], but a gated MLP needs an even number"):
        open_checkpoint(run)


def test_split_gate_and_up_rejects_scalar() -> None:
    scalar = Tensor.from_source("fc1", "F32", (), InMemorySource(bytes(4)))
    with pytest.raises(CheckpointError, match=r"run: fc1 has shape \[\], but a gated MLP needs an even"):
        split_gate_and_up(scalar, "run")


def test_megatron_default_settings_change_nothing(
    written_megatron: Path, changed: Callable[..., Path]
) -> None:
    config = pytest.importorskip("megatron.core.transformer.transformer_config")
    held = {each.name: each.default for each in dataclasses.fields(config.TransformerConfig)}
    plain = (int, float, str, bool, type(None))
    made = {name: value for name, value in held.items() if isinstance(value, plain)}
    run = changed(change=lambda content: [vars(content["args"]).setdefault(*one) for one in made.items()])
    whole = open_checkpoint(written_megatron / "llama-2x2")
    assert everything(open_checkpoint(run)) == everything(whole)
