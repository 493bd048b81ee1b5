"""The end of the road: transformers loads what comes out and computes the same logits."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from converters.cli import main

if TYPE_CHECKING:
    from pathlib import Path

transformers: Any = pytest.importorskip("transformers")


@pytest.mark.parametrize("kind", ["llama", "gpt2", "t5"])
@pytest.mark.parametrize("tied", [True, False])
def test_same_names_and_logits_as_save_pretrained(tmp_path: Path, kind: str, tied: bool) -> None:
    torch.manual_seed(0)
    if kind == "llama":
        config = transformers.LlamaConfig(
            vocab_size=97,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            tie_word_embeddings=tied,
        )
        model = transformers.LlamaForCausalLM(config)
    elif kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=97, n_embd=16, n_layer=2, n_head=2, n_positions=32, tie_word_embeddings=tied
        )
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.T5Config(
            vocab_size=97, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, tie_word_embeddings=tied
        )
        model = transformers.T5ForConditionalGeneration(config)
    model.eval()
    step = tmp_path / "run" / "checkpoints" / "step-000001"
    step.mkdir(parents=True)
    dcp_save({"model": get_model_state_dict(model)}, checkpoint_id=step)
    model.config.save_pretrained(step / "model")
    model.save_pretrained(tmp_path / "theirs")
    assert main([str(tmp_path / "run"), str(tmp_path / "out"), "--max-shard-size", "8KB", "--verify"]) == 0
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    shutil.rmtree(tmp_path / "run")
    loaded, report = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with transformers_safe_open(tmp_path / "theirs" / "model.safetensors") as theirs:
        assert set(index["weight_map"]) == set(theirs.keys())
    tokens = torch.arange(10)[None]
    more = {"decoder_input_ids": tokens} if kind == "t5" else {}
    with torch.no_grad():
        assert torch.equal(model(tokens, **more).logits, loaded.eval()(tokens, **more).logits)


def test_what_the_trainer_saves_on_xla(written_xla: Path, tmp_path: Path) -> None:
    reference = torch.load(written_xla / "llama.ref.pt")
    assert main([str(written_xla / "llama"), str(tmp_path / "out"), "--verify", "--quiet"]) == 0
    loaded, report = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    state = loaded.state_dict()
    assert state.keys() == reference.keys()
    assert all(torch.equal(state[name], value) for name, value in reference.items())


def transformers_safe_open(path: Path) -> Any:
    import safetensors

    return safetensors.safe_open(path, "pt")
