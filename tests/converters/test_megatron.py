"""Megatron-LM's rank files against Megatron-Core's own logits, through transformers.

The files are written by `make_megatron.py`, by Megatron-Core's parallel modules on the CPU. The damage is
done to files of the same layout that this module writes itself: an independent splitter
(`megatron_layout.py`), whose inverse is checked bit for bit.
"""

from __future__ import annotations

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
        ({"apply_layernorm_1p": True}, "apply_layernorm_1p=True"),
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
    given.write_text('{"model_type": "llama", "vocab_size": 9}')
    found = open_checkpoint(tmp_path / "run", companions={"config.json": given})
    assert found.tensors["lm_head.weight"].shape[0] == 9 and "config.json" in found.companions


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
