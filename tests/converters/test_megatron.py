"""Megatron-LM's rank files against Megatron-Core's own logits, through transformers.

The files are written by `make_megatron.py`, by Megatron-Core's parallel modules on the CPU. The damage is
done to files of the same layout that this module writes itself: an independent splitter
(`megatron_layout.py`), whose inverse is checked bit for bit.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from converters import CheckpointError, open_checkpoint, write_checkpoint
from tests.converters.compare import assert_model
from tests.converters.making import written_by
from tests.converters.megatron_layout import core, llama, split

if TYPE_CHECKING:
    from pathlib import Path

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


@pytest.fixture(scope="session")
def written_megatron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written_by("make_megatron", tmp_path_factory)


@pytest.mark.parametrize("run", [*CONFIGS, *(f"core-{run}" for run in CONFIGS)])
def test_transformers_computes_what_megatron_computed(
    written_megatron: Path, tmp_path: Path, run: str
) -> None:
    """Two tensor ranks, and two stages but for one; padded vocabulary, grouped queries, tied and not."""
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


# -- an independent splitter ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [{}, {"old": True}, {"chunks": True}])
def test_every_layout_bit_for_bit(tmp_path: Path, kind: dict[str, bool]) -> None:
    split(tmp_path / "iter_0000005", optimizer=True, **kind)
    for path in (tmp_path, tmp_path / "iter_0000005" / "mp_rank_01"):
        checkpoint = open_checkpoint(path)
        assert checkpoint.metadata == {"world_size": 2, "step": 5}
        assert_model(checkpoint, llama())
        with pytest.raises(CheckpointError, match="holds no names of parameters"):
            _ = checkpoint.optimizer


def test_all_layers_in_one_tensor_bit_for_bit(tmp_path: Path) -> None:
    (tmp_path / "iter_0000005").mkdir()
    core(tmp_path / "iter_0000005")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.format == "megatron-core" and checkpoint.metadata == {"step": 5}
    assert_model(checkpoint, llama())
    (tmp_path / "iter_0000005" / "common.pt").unlink()
    with pytest.raises(CheckpointError, match=r"common\.pt: No such file"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"num_experts": 8}, "num_experts=8 is not supported"),
        ({"rotary_interleaved": True}, "rotary_interleaved=True"),
        ({"no_rope_freq": [0, 1]}, "no_rope_freq=a list"),
        ({"activation_func_clamp_value": 0.2}, "activation_func_clamp_value=0.2"),
        ({"softmax_type": "off-by-one"}, "softmax_type='off-by-one'"),
        ({"window_size": (4, 0)}, "window_size=5, no config.json says so"),
        ({"use_rope_scaling": True}, "use_rope_scaling='llama3 of factor 8.0', no config"),
        ({"rotary_seq_len_interpolation_factor": 4}, "rotary_seq_len_interpolation_factor=4"),
        ({"rotary_percent": 0.5}, "rotary_percent=0.5"),
        ({"a_setting_of_tomorrow": "on"}, "a_setting_of_tomorrow='on' is not supported"),
        ({"position_embedding_type": "none"}, "neither Llama- nor GPT-2-shaped"),
        ({"num_layers": 3}, "layer 2 are missing"),
        ({"num_layers": 1}, "holds layer 1, its args say 1"),
        ({"num_query_groups": 1}, "not of 4 heads of 6 rows in 1 groups"),
        ({"tensor_model_parallel_size": 4}, "tensor rank 2, pipeline rank 0 is missing"),
        ({"pipeline_model_parallel_size": 2}, "tensor rank 0, pipeline rank 1 is missing"),
        ({"vocab_size": 13}, "has 12 rows for 13 tokens"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, more: dict[str, Any], told: str) -> None:
    split(tmp_path, **more)
    with pytest.raises(CheckpointError, match=told):
        open_checkpoint(tmp_path)


def test_the_vocabulary_of_a_config_that_is_given(tmp_path: Path) -> None:
    split(tmp_path / "run")
    given = tmp_path / "config.json"
    given.write_text('{"model_type": "llama", "vocab_size": 11}')
    found = open_checkpoint(tmp_path / "run", companions={"config.json": given})
    assert found.tensors["lm_head.weight"].shape[0] == 11 and "config.json" in found.companions


def llama_config(**changes: Any) -> dict[str, Any]:
    """The config.json of `megatron_layout.llama`."""
    sizes = {"hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "head_dim": 6, "vocab_size": 10, "tie_word_embeddings": False}
    made = transformers.LlamaConfig(**sizes, **more, rms_norm_eps=1e-5).to_dict()
    return {**made, **changes}


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
        ({}, {"rope_parameters": LLAMA3}, "use_rope_scaling='default', .*'llama3 of factor 8.0'"),
        ({}, {"sliding_window": 4}, "window_size=None, .* has sliding_window=4"),
        ({}, {"rms_norm_eps": 1e-3}, "norm_epsilon=1e-05, .* has rms_norm_eps=0.001"),
        ({}, {"num_key_value_heads": 4}, "num_query_groups=2, .* has num_key_value_heads=4"),
        ({}, {"hidden_size": 16}, "hidden_size=8, .* has hidden_size=16"),
        ({}, {"tie_word_embeddings": True}, "untie_embeddings_and_output_weights=True, .*=False"),
        ({}, {"hidden_act": "gelu"}, "swiglu='silu', .* has hidden_act='gelu'"),
        ({}, {"vocab_size": 9}, "vocab_size=10 in its args, vocab_size=9"),
    ],
)
def test_the_config_says_what_the_args_say(
    tmp_path: Path, args: dict[str, Any], config: dict[str, Any], told: str | None
) -> None:
    split(tmp_path / "run", **{**ARGS, **args})
    given = tmp_path / "config.json"
    given.write_text(json.dumps(llama_config(**config)))
    if told is None:
        assert_model(open_checkpoint(tmp_path / "run", companions={"config.json": given}), llama())
        return
    with pytest.raises(CheckpointError, match=told):
        open_checkpoint(tmp_path / "run", companions={"config.json": given})


def test_megatron_s_own_defaults_are_known_to_change_nothing(tmp_path: Path) -> None:
    config = pytest.importorskip("megatron.core.transformer.transformer_config")
    held = {each.name: each.default for each in dataclasses.fields(config.TransformerConfig)}
    plain = (int, float, str, bool, type(None))
    made = {name: value for name, value in held.items() if isinstance(value, plain)}
    split(tmp_path / "plain", **ARGS)
    args = torch.load(tmp_path / "plain" / "mp_rank_00" / "model_optim_rng.pt", weights_only=False)["args"]
    split(tmp_path / "run", **{**made, **vars(args)})
    assert_model(open_checkpoint(tmp_path / "run"), llama())


def test_a_rank_in_the_folder_of_another_is_refused(tmp_path: Path) -> None:
    """The args of a file hold the rank of the process that wrote it."""
    split(tmp_path, world_size=2)
    paths = [tmp_path / f"mp_rank_0{tp}" / "model_optim_rng.pt" for tp in range(2)]
    states = [torch.load(path, weights_only=False) for path in paths]
    for tp, state in enumerate(states):
        state["args"].rank = tp
        torch.save(state, paths[tp])
    assert_model(open_checkpoint(tmp_path), llama())
    for path, state in zip(paths, reversed(states), strict=True):
        torch.save(state, path)
    with pytest.raises(CheckpointError, match="was written by rank 1, whose folder is another"):
        open_checkpoint(tmp_path)


@pytest.mark.timeout(60)
def test_a_hostile_number_of_layers_is_refused_at_once(tmp_path: Path) -> None:
    split(tmp_path / "split")
    args = torch.load(tmp_path / "split" / "mp_rank_00" / "model_optim_rng.pt", weights_only=False)["args"]
    args.num_layers, folder = 1 << 39, tmp_path / "core"
    dcp_save({"decoder.layers.x.weight": torch.empty(1 << 39, 0)}, checkpoint_id=folder, no_dist=True)
    torch.save({"args": args}, folder / "common.pt")
    with pytest.raises(CheckpointError, match="its args have no num_layers"):
        open_checkpoint(folder)


def test_a_rank_of_another_step_or_value_is_refused(tmp_path: Path) -> None:
    split(tmp_path)
    path = tmp_path / "mp_rank_01" / "model_optim_rng.pt"
    good = torch.load(path, weights_only=False)
    for change, told in (
        ("iteration", "its iteration differs"),
        ("norm", "differs between the tensor ranks"),
    ):
        bad = {**good, "iteration": 6} if change == "iteration" else {**good, "model": dict(good["model"])}
        if change == "norm":
            bad["model"]["decoder.final_layernorm.weight"] = torch.zeros(8, dtype=torch.bfloat16)
        torch.save(bad, path)
        with pytest.raises(CheckpointError, match=told):
            open_checkpoint(tmp_path)
