"""Converted checkpoints: transformers loads them and computes the same logits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from portable.converters.cli import main
from portable.converters.names.earlier_keys import remove_earlier_keys
from tests.converters.compare import error_of
from tests.tiny_models import tiny_model

transformers: Any = pytest.importorskip("transformers")


@pytest.mark.parametrize("kind", ["llama", "gpt2", "t5"])
@pytest.mark.parametrize("tied", [True, False])
def test_converted_model_has_names_and_logits_of_save_pretrained(
    tmp_path: Path, kind: str, tied: bool
) -> None:
    head = "AutoModelForSeq2SeqLM" if kind == "t5" else "AutoModelForCausalLM"
    model = tiny_model(kind, head, tie_word_embeddings=tied)
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
    with safetensors.safe_open(tmp_path / "theirs" / "model.safetensors", "pt") as theirs:
        assert set(index["weight_map"]) == set(theirs.keys())
    tokens = torch.arange(10)[None]
    more = {"decoder_input_ids": tokens} if kind == "t5" else {}
    with torch.no_grad():
        assert torch.equal(model(tokens, **more).logits, loaded.eval()(tokens, **more).logits)


@pytest.mark.parametrize(
    ("asked", "stored", "key"),
    [
        ("bfloat16", "bfloat16", "dtype"),
        ("fp16", "float16", "torch_dtype"),
        ("keep", "", "dtype"),
        ("bf16", "bfloat16", None),
    ],
)
def test_convert_dtype_is_written_to_config(tmp_path: Path, asked: str, stored: str, key: str | None) -> None:
    """``from_pretrained`` uses the type in ``config.json``, regardless of the tensors."""
    tiny_model("llama").save_pretrained(tmp_path / "in")
    path = tmp_path / "in" / "config.json"
    config = {k: v for k, v in json.loads(path.read_text()).items() if k != "dtype"}
    # The config has bfloat16 for fp32 weights, as next to the masters of a ZeRO run.
    path.write_text(json.dumps({**config, **({key: "bfloat16"} if key else {})}))
    assert main([str(tmp_path / "in"), str(tmp_path / "out"), "--dtype", asked, "--quiet"]) == 0
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == getattr(torch, stored or "float32")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {written[name] for name in ("dtype", "torch_dtype") if name in written} == {stored or "float32"}
    assert remove_earlier_keys({k: v for k, v in written.items() if k not in ("dtype", "torch_dtype")}) == {
        k: v for k, v in config.items() if k != "torch_dtype"
    }


def test_convert_dtype_is_written_to_nested_configs(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "in")
    path = tmp_path / "in" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "text_config": {"dtype": "float32", "a": 1}}))
    assert main([str(tmp_path / "in"), str(tmp_path / "out"), "--dtype", "bf16", "--to", "dcp"]) == 0
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["text_config"] == {"dtype": "bfloat16", "a": 1}


def test_config_from_completes_folder_without_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A note reports that the folder of shards has no config. The config is read from its base model."""
    model = tiny_model("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "base")
    (tmp_path / "in").mkdir()
    torch.save(model.state_dict(), tmp_path / "in" / "pytorch_model.bin")
    argv = [str(tmp_path / "in"), str(tmp_path / "out"), "--overwrite"]
    assert main(argv) == 0
    said = capsys.readouterr().err.rpartition("note: ")[2]
    assert "config.json" in said and "--config-from" in said
    for named in (tmp_path / "base", tmp_path / "base" / "config.json"):
        assert main([*argv, "--config-from", str(named), "--dtype", "bf16"]) == 0
        assert "note" not in capsys.readouterr().err
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert loaded.dtype == torch.bfloat16
        assert torch.equal(loaded.lm_head.weight, model.lm_head.weight.bfloat16())
    path = tmp_path / "base" / "config.json"
    right = json.loads(path.read_text())
    for key in ("vocab_size", "num_hidden_layers"):
        path.write_text(json.dumps({**right, key: right[key] + 1}))
        said = error_of(capsys, *argv, "--config-from", path)
        assert f"--config-from {path}: {key} is {right[key] + 1:,}, but " in said


def test_config_from_accepts_hub_id_in_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    tiny_model("llama").save_pretrained(tmp_path / "in")
    config = (tmp_path / "in" / "config.json").read_bytes()
    (tmp_path / "in" / "config.json").unlink()
    revision = "0123456789abcdef0123456789abcdef01234567"
    cached = tmp_path / "hub" / "models--someone--tiny"
    (cached / "snapshots" / revision).mkdir(parents=True)
    (cached / "snapshots" / revision / "config.json").write_bytes(config)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(revision)
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    argv = [str(tmp_path / "in"), str(tmp_path / "out"), "--quiet", "--config-from"]
    assert main([*argv, "someone/tiny"]) == 0
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.float32
    said = error_of(capsys, argv[0], tmp_path / "out2", *argv[2:], "someone/other")
    assert said.startswith("error: --config-from someone/other: is neither")
    # As SRC, a hub id is the complete model.
    tiny_model("llama").save_pretrained(cached / "snapshots" / revision)
    assert main(["someone/tiny", str(tmp_path / "copy"), "--quiet"]) == 0
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "copy").dtype == torch.float32
    said = error_of(capsys, "someone/other", tmp_path / "none")
    assert "error: someone/other: is neither" in said and "hf download someone/other" in said
    # A Hub ID also works as BASE of --merge-into.
    peft = pytest.importorskip("peft")
    lora = peft.get_peft_model(tiny_model("llama"), peft.LoraConfig(target_modules=["q_proj"]))
    lora.save_pretrained(tmp_path / "lora")
    argv = [str(tmp_path / "lora"), str(tmp_path / "merged"), "--quiet", "--merge-into"]
    assert main([*argv, "someone/tiny"]) == 0
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").dtype == torch.float32
    assert "error: someone/other: is neither" in error_of(
        capsys, argv[0], tmp_path / "none", *argv[2:], "someone/other"
    )
