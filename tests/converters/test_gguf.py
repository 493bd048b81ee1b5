"""GGUF files, read again by the `gguf` package, and run by llama.cpp from the `xllamacpp` wheel.

The results of llama.cpp are compared with transformers, for every model type and every setting with an
effect. They are equal, or an error names the setting.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from portable.converters import open_checkpoint, write_checkpoint
from portable.converters.cli import main
from portable.converters.errors import CheckpointError
from portable.converters.storage.byte_sources import InMemorySource
from portable.converters.storage.object_store import RemotePath
from portable.converters.tensors.ggml import GGML_KINDS, quantize_to_ggml
from portable.converters.tensors.tensor import Tensor
from portable.converters.writers.gguf_models import MODEL_TYPES, parse_gguf_settings
from portable.converters.writers.gguf_tokenizer import _LLAMA3, convert_byte_level_bpe_to_gguf
from tests.converters.compare import REFUSALS, error_of
from tests.converters.fuzz import blind
from tests.object_store import ObjectStore

VOCAB = 320
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
PLAIN: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "mixtral": EXPERTS,
    "granite": {
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "logits_scaling": 2.0,
    },
    "smollm3": {"num_hidden_layers": 5},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {**EXPERTS, "head_dim": 32, "moe_intermediate_size": 32, "norm_topk_prob": True},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16},
    "gemma3_text": {"head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16},
    "phi3": {},
    "gpt2": {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_oss": {
        **EXPERTS,
        "head_dim": 16,
        "sliding_window": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "glm4": {"head_dim": 16},
    "cohere2": {"num_hidden_layers": 5, "sliding_window": 16},
    "olmo2": {},
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16}
TWO_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
}
FULL, WINDOW = "full_attention", "sliding_attention"
# (model type, settings in addition to PLAIN, name in the error or None if llama.cpp computes the same)
SETTINGS: list[tuple[str, dict[str, Any], str | None]] = [
    ("llama", {"rope_parameters": LLAMA3}, None),
    ("llama", {"rope_parameters": LINEAR}, None),
    ("llama", {"rope_parameters": YARN}, None),
    ("llama", {"rope_parameters": {**YARN, "beta_fast": 32.0, "beta_slow": 1}}, None),
    ("llama", {"rope_parameters": {**YARN, "beta_fast": 1.5}}, "rope_parameters.beta_fast"),
    ("llama", {"rope_parameters": {**YARN, "truncate": False}}, "rope_parameters.truncate"),
    ("llama", {"rope_parameters": {**LINEAR, "rope_type": "dynamic"}}, "rope_parameters.rope_type"),
    (
        "llama",
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "partial_rotary_factor",
    ),
    ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}, None),
    ("llama", {"tie_word_embeddings": True, "pretraining_tp": 2}, None),
    ("llama", {"hidden_act": "gelu"}, "hidden_act"),
    ("mistral", {"sliding_window": 8}, "sliding_window"),
    ("mistral", {"sliding_window": 64, "rope_parameters": YARN}, None),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "layer_types"),
    ("qwen2", {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1}, None),
    ("qwen2", {"rope_parameters": YARN}, None),
    ("qwen3", {"attention_bias": True}, "attention_bias"),
    ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob"),
    ("qwen3_moe", {"mlp_only_layers": [1]}, "mlp_only_layers"),
    ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gemma2", {"query_pre_attn_scalar": 100}, None),
    ("gemma2", {"layer_types": [FULL, WINDOW, FULL]}, "layer_types"),
    ("gemma2", {"final_logit_softcapping": 5.0, "attn_logit_softcapping": 2.0}, None),
    ("gemma2", {"final_logit_softcapping": None}, "final_logit_softcapping"),
    ("gemma2", {"tie_word_embeddings": False}, "lm_head.weight"),
    ("gemma3_text", {"query_pre_attn_scalar": 64}, None),
    ("gemma3_text", {"rope_parameters": TWO_ROPES, "num_hidden_layers": 7}, None),
    ("gemma3_text", {"num_hidden_layers": 62, "head_dim": 32}, None),
    ("phi3", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, None),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ("gpt2", {"tie_word_embeddings": False, "n_inner": 96}, None),
    ("gpt_oss", {"rope_parameters": YARN}, None),
    ("gpt_oss", {"rope_parameters": {**YARN, "truncate": False}}, None),
    ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit"),
    ("gpt_oss", {"attention_bias": False}, "attention_bias"),
    ("glm4", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}}, None),
    ("glm4", {"attention_bias": False, "head_dim": 16}, None),
    ("glm4", {"head_dim": 32}, "head_dim"),
    ("cohere2", {"logit_scale": 0.5}, None),
    ("granite", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3}, None),
    ("smollm3", {"no_rope_layers": [1, 0, 1, 0, 1]}, "no_rope_layers"),
]
CASES = [*((kind, {}, None) for kind in PLAIN), *SETTINGS]
SPLITS = {"smollm3": _LLAMA3, "qwen2": _LLAMA3.replace("{1,3}", "")}


@cache
def tokenizer(kind: str) -> Tokenizer:
    made = Tokenizer(models.BPE(ignore_merges=kind == "smollm3"))
    bytes_: Any = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind not in SPLITS)
    if kind in SPLITS:
        bytes_ = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLITS[kind]), "isolated"), bytes_])
    made.pre_tokenizer = bytes_
    every = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=310, special_tokens=["<|end|>"], initial_alphabet=every)
    text = (Path(__file__).parents[2] / "LICENSE").read_text()  # which is not changed
    made.train_from_iterator([text], trainer)
    return made


def saved(folder: Path, kind: str, changed: dict[str, Any] | None = None) -> torch.nn.Module:
    torch.manual_seed(0)
    values = PLAIN[kind] if kind == "gpt2" else {**SHAPE, **PLAIN[kind]}
    config = transformers.AutoConfig.for_model(kind, **{**values, **(changed or {})})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for value in model.parameters():  # otherwise, norms would be all ones and biases zeros
            value.add_(torch.randn_like(value) * 0.03)
    model.float().eval().save_pretrained(folder)
    tokenizer(kind).save(str(folder / "tokenizer.json"))
    return model  # type: ignore[no-any-return]


RUN = """
import json, os, sys
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.warmup, params.n_parallel = sys.argv[1], 64, False, 1
params.cpuparams.n_threads, params.cache_type_k, params.cache_type_v = 1, 0, 0  # float32
params.flash_attn_type = 0
if len(sys.argv) > 3:
    lora = xllamacpp.CommonAdapterLoraInfo()
    lora.path, lora.scale = sys.argv[3], 1.0
    params.lora_adapters = [lora]
server = xllamacpp.Server(params)
for ask in json.loads(sys.argv[2]):
    told = server.handle_completions({"n_predict": 2, "temperature": 0.0, **ask})
    print("TOLD" + (told if isinstance(told, str) else json.dumps(told)), flush=True)
os._exit(0)
"""


def asked(file: Path, *asks: dict[str, Any], lora: Path | None = None) -> list[dict[str, Any]]:
    """Return the answers of llama.cpp's server to requests for completions."""
    ran = subprocess.run(
        [sys.executable, "-c", RUN, str(file), json.dumps(asks), *([] if lora is None else [str(lora)])],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    told = [json.loads(line.partition("TOLD")[2]) for line in ran.stdout.splitlines() if "TOLD" in line]
    assert len(told) == len(asks), ran.stdout[-500:] + ran.stderr[-3000:]
    return told


def distance(file: Path, model: torch.nn.Module, tokens: Tokenizer, lora: Path | None = None) -> float:
    """Return the largest difference of a log probability, after a prompt longer than the windows."""
    ids = tokens.encode("The checkpoint of 2026 goes   on\n\nto 12345 TPUs, it's fine. And so on, " * 2).ids[
        :60
    ]
    with torch.no_grad():
        wanted = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1], -1)
    # The server reports a token once its text is complete; the probabilities are those before the bias.
    letter = tokens.token_to_id("a")
    ask = {"prompt": ids, "n_probs": VOCAB, "logit_bias": [[letter, 1000]]}
    (told,) = asked(file, ask, lora=lora)
    first = told["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    found = {one["id"]: one["logprob"] for one in first}
    assert len(found) == VOCAB
    return float(max(abs(value - wanted[int(i)].item()) for i, value in found.items()))


@pytest.mark.parametrize(
    ("kind", "changed", "refused"), CASES, ids=[f"{a}-{'-'.join(b)}" for a, b, _ in CASES]
)
def test_gguf_setting_matches_transformers_or_is_rejected(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], kind: str, changed: dict[str, Any], refused: str | None
) -> None:
    model = saved(tmp_path / "in", kind, changed)
    file = tmp_path / "out.gguf"
    argv = [str(tmp_path / "in"), str(file), "--to", "gguf", "--quiet", "--overwrite", "--verify"]
    if refused is not None:
        assert main(argv) == 65 and not file.exists()
        error = capfd.readouterr().err.splitlines()[-1]
        assert error.startswith("error: ") and refused in error
        return
    limits = {"keep": 2e-3}  # its GELU is a table of float16
    if "truncate" in changed.get("rope_parameters", {}):
        limits = {"keep": 5e-2}  # llama.cpp rounds the bounds of YaRN's ramp, in a head with few frequencies
    limits |= {} if changed else {"q8_0": 6e-2, "q4_0": 1.0}
    limits |= {"mxfp4": 1.0} if not changed and kind in ("mixtral", "gpt_oss") else {}
    for dtype, most in limits.items():
        assert main([*argv, "--dtype", dtype]) == 0
        found = distance(file, model, tokenizer(kind))
        assert found < most, dtype


# (model type, settings, text of the error or None if llama.cpp computes the same)
LORA: list[tuple[str, dict[str, Any], str | None]] = [
    ("llama", {"target_modules": "all-linear"}, None),  # rows in pairs
    (
        "llama",
        {
            "target_modules": ["q_proj", "v_proj", "down_proj"],
            "use_rslora": True,
            "rank_pattern": {"q_proj": 2},
            "alpha_pattern": {"v_proj": 3},
        },
        None,
    ),
    ("gemma2", {"target_modules": ["q_proj", "o_proj"]}, None),  # scaled queries
    ("gpt2", {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}, None),  # transposed layers
    ("llama", {"target_modules": ["q_proj"], "use_dora": True}, "plain LoRA"),
    ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "plain LoRA"),
]


@pytest.mark.parametrize(("kind", "settings", "refused"), LORA)
def test_gguf_adapter_matches_peft_or_is_rejected(
    kind: str,
    settings: dict[str, Any],
    refused: str | None,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    from peft import LoraConfig, get_peft_model

    model = saved(tmp_path / "base", kind)
    tuned = get_peft_model(model, LoraConfig(r=4, lora_alpha=12, init_lora_weights=False, **settings))
    tuned.save_pretrained(str(tmp_path / "lora"))
    base, lora = tmp_path / "base.gguf", tmp_path / "lora.gguf"
    argv = [str(tmp_path / "lora"), str(lora), "--to", "gguf", "--config-from", str(tmp_path / "base")]
    if refused is not None:
        assert main([*argv, "--quiet"]) == 65
        line = capfd.readouterr().err.splitlines()[-1]
        assert line.startswith("error: ") and refused in line and "--merge-into" in line
        return
    assert main([str(tmp_path / "base"), str(base), "--to", "gguf", "--quiet"]) == 0
    assert main([*argv, "--quiet", "--verify"]) == 0
    assert distance(base, tuned.eval(), tokenizer(kind)) > 0.1  # without the adapter
    assert distance(base, tuned, tokenizer(kind), lora) < 2e-3


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    saved(folder, "llama")
    return folder


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"new_switch": 1}, "new_switch=1, but --to gguf does not support"),
        ({"new_switch": None, "new_list": [], "new_flag": False}, ""),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_scaling, another name of this setting"),
        (
            {"rope_parameters": {**LLAMA3, "high_freq_factor": 1.0}},
            "factor=1.0, but the value must be greater than low_freq_factor",
        ),
        ({"rope_parameters": {**LINEAR, "factor": -4}}, "factor=-4, but --to gguf needs a positive number"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0, but must be a whole number from 1"),
        ({"num_hidden_layers": 1 << 40}, "num_hidden_layers is 1099511627776, but must be a whole number"),
        ({"max_position_embeddings": 1 << 40}, "1099511627776, but --to gguf needs a positive integer below"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=NaN"),
        ({"vocab_size": 100}, "instead of [100, 64]"),
        ({"rope_scaling": None, "rope_theta": 5.0, "num_key_value_heads": 2}, ""),
        ({"unsloth_version": "1", "_name_or_path": "a/b"}, ""),
        ({"model_type": "bloom"}, "llama.cpp's own converter: convert_hf_to_gguf.py OUT"),
    ],
)
def test_gguf_rejects_unknown_or_invalid_setting_in_one_line(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], told: str
) -> None:
    folder = Path(shutil.copytree(llama, tmp_path / "in"))
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    argv = [folder, tmp_path / "x.gguf", "--to", "gguf"]
    if told:
        assert told in error_of(capsys, *argv)
    else:
        assert main([*map(str, argv), "--quiet"]) == 0 and capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("kind", "form"),
    [("llama", "fp8"), ("llama", "int8"), ("llama", "int4"), ("qwen3_moe", "mxfp4"), ("gpt_oss", "base")],
)
def test_gguf_dequantizes_weights(kind: str, form: str, tmp_path: Path) -> None:
    """The file is the same as from the dequantized checkpoint, for which transformers and llama.cpp agree."""
    wide = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
    saved(tmp_path / "floats", kind, wide if form == "int4" else None)
    argv = [str(tmp_path / "floats"), str(tmp_path / "codes"), "--quiet"]
    if form == "base":
        write_mxfp4_experts(tmp_path / "floats", tmp_path / "codes")
    else:
        assert main([*argv, "--quantize", form]) == 0
    codes = str(tmp_path / "codes")
    assert main([codes, str(tmp_path / "x.gguf"), "--to", "gguf", "--dequantize", "float32", "--quiet"]) == 0
    assert main([codes, str(tmp_path / "back"), "--dequantize", "float32", "--quiet"]) == 0
    assert main([str(tmp_path / "back"), str(tmp_path / "y.gguf"), "--to", "gguf", "--quiet"]) == 0
    assert contents(tmp_path / "x.gguf") == contents(tmp_path / "y.gguf")
    if form == "base":
        back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
        assert distance(tmp_path / "x.gguf", back.eval(), tokenizer(kind)) < 2e-3


def contents(file: Path) -> dict[str, bytes]:
    return {tensor.name: tensor.data.tobytes() for tensor in gguf.GGUFReader(file).tensors}


def write_mxfp4_experts(source: Path, out: Path) -> None:
    """Write a model with the experts in MXFP4, as OpenAI publishes GPT-OSS."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, out)
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_blocks"] = blocks
        tensors[f"{name}_scales"] = torch.full((experts, outputs, inputs // 32), 122, dtype=torch.uint8)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (out / "config.json").write_text(json.dumps(config))


DIFFERENT: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "qwen3_moe": {"norm_topk_prob": True},
}
"""Settings of types whose default in transformers is not supported by llama.cpp."""


def test_gguf_setting_defaults_match_transformers() -> None:
    known = {"query_pre_attn_scalar", "rope_parameters"}
    for kind, model in MODEL_TYPES.items():
        config = transformers.AutoConfig.for_model(kind)
        written_out = {**config.to_dict(), **DIFFERENT.get(kind, {})}
        parse_gguf_settings(json.loads(json.dumps(written_out, default=str)), model, Path("model"))
        ropes: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
        values = {**config.to_dict(), **ropes.get("full_attention", ropes)}
        for key, value in {
            **model.defaults,
            "rms_norm_eps": model.defaults.get("rms_norm_eps", 1e-6),
        }.items():
            if key in values and key not in known:
                assert values[key] == value, (kind, key)
        for key, allowed in model.allowed_values.items():
            if key in values and key not in model.defaults:
                assert values[key] == allowed[0] or values[key] in allowed, (kind, key)
        rotated = values.get("partial_rotary_factor", 1.0)
        assert model.defaults.get("partial_rotary_factor", 1.0) == rotated, kind


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_gguf_reads_stacked_experts(tmp_path: Path, kind: str) -> None:
    """The checkpoint has the names of a live model, like checkpoints of a training run."""
    model = saved(tmp_path / "in", kind)
    live = {name: value.contiguous() for name, value in model.state_dict().items()}
    assert any(name.endswith("experts.gate_up_proj") for name in live)
    (tmp_path / "live").mkdir()
    shutil.copy(tmp_path / "in" / "config.json", tmp_path / "live")
    torch.save(live, tmp_path / "live" / "pytorch_model.bin")
    files = []
    for name in ("in", "live"):
        write_checkpoint(open_checkpoint(tmp_path / name), tmp_path / f"{name}.gguf", "gguf", verify=True)
        reader = gguf.GGUFReader(tmp_path / f"{name}.gguf")
        files.append({tensor.name: tensor.data.tobytes() for tensor in reader.tensors})
    assert files[0] == files[1]


@pytest.mark.parametrize("kind", sorted(GGML_KINDS))
def test_gguf_quantization_in_pieces_matches_gguf_package(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).standard_normal((3, 20, 96)).astype(np.float32)
    values[0, 3, :32] = 0
    values[1, 4, :32] = 1e30  # its scale is infinite in float16
    monkeypatch.setattr("portable.converters.tensors.computed_rows.BLOCK_ELEMENTS", 200)
    tensor = quantize_to_ggml(
        Tensor.from_source("x", "F32", values.shape, InMemorySource(values.tobytes())), kind
    )
    with np.errstate(all="ignore"):
        theirs = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    assert tensor.read().tobytes() == theirs.tobytes()
    assert b"".join(block.tobytes() for block in tensor.iter_blocks(77, set())) == theirs.tobytes()


def test_gguf_output_may_be_file_or_folder(
    llama: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a" / "m.gguf"
    to = ["--to", "gguf", "--quiet"]
    assert main([str(llama), str(tmp_path / "out"), *to]) == 0
    assert main([str(llama), str(file), *to, "--verify"]) == 0
    assert file.read_bytes() == (tmp_path / "out" / "model.gguf").read_bytes()
    assert [one.name for one in file.parent.iterdir()] == ["m.gguf"]
    assert main([str(llama), str(file), "--to", "gguf", "--dry-run", "--overwrite"]) == 0
    assert f"{file}: " in capfd.readouterr().out
    assert main([str(llama), str(file), *to]) == 2
    assert "choose another file, or add --overwrite" in capfd.readouterr().err
    assert main([str(llama), str(file), *to, "--overwrite", "--dtype", "fp16"]) == 0
    assert file.stat().st_size < (tmp_path / "out" / "model.gguf").stat().st_size


def test_gguf_output_may_be_object_in_store(
    llama: Path, s3: ObjectStore, capfd: pytest.CaptureFixture[str]
) -> None:
    scale = ["--to", "gguf", "--quiet", "--verify"]
    assert main([str(llama), s3.url("b/m.gguf"), *scale]) == 0
    assert main([str(llama), s3.url("b/m.gguf"), *scale]) == 2
    assert "already exists" in capfd.readouterr().err
    assert main([str(llama), s3.url("b/m.gguf"), *scale, "--overwrite"]) == 0
    assert list(RemotePath.from_url(s3.url("b")).list_objects()) == ["m.gguf"]


def gguf_tensors(file: Path) -> dict[str, Any]:
    """Read the tensors of a GGUF file with the package `gguf`."""
    return {
        tensor.name: {
            "dtype": tensor.tensor_type.name,
            "shape": [int(size) for size in reversed(tensor.shape)],
            "bytes": int(tensor.n_bytes),
            "pieces": 1,
        }
        for tensor in gguf.GGUFReader(file).tensors
    }


@pytest.mark.parametrize("dtype", ["fp16", "q4_0"])
def test_inspect_of_gguf_file_matches_gguf_package(
    dtype: str, llama: Path, tmp_path: Path, s3: ObjectStore, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "m.gguf"
    assert main([str(llama), str(file), "--to", "gguf", "--quiet", "--dtype", dtype]) == 0
    s3.put("b/m.gguf", file.read_bytes())
    for path in (str(file), s3.url("b/m.gguf")):
        assert main(["inspect", path, "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["tensors"] == gguf_tensors(file)
        assert document["settings"]["llama.block_count"] == SHAPE["num_hidden_layers"]
        assert main(["inspect", path]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == f"{path} (gguf), version 3, architecture llama"
        counts = ", ".join(f"{count:,} {name}" for name, count in document["elements"].items())
        assert lines[-1] == f"{len(lines) - 2} tensors, {counts} elements, {document['bytes']:,} bytes"


def test_inspect_of_big_endian_gguf_file_matches_gguf_package(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file has all types of settings and many types of tensors."""
    file = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(file, "llama", endianess=gguf.GGUFEndian.BIG)
    values = {"int8": -1, "uint16": 2, "int16": -3, "uint64": 4, "int64": -5, "float32": 0.5, "float64": 0.25}
    for name, value in values.items():
        getattr(writer, f"add_{name}")(f"some.{name}", value)
    writer.add_bool("some.bool", True)
    for items in ([1, 2], ["a", "b\n"], [0.5], [True]):
        writer.add_array(f"some.array.{items[0]}", items)
    for dtype in (np.float64, np.float16, np.int8, np.int32):
        writer.add_tensor(np.dtype(dtype).name, np.ones((3, 2), dtype))
    writer.add_tensor("blocks", np.zeros((4, 210), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q6_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert main(["inspect", str(file), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["tensors"] == gguf_tensors(file)
    expected = {f"some.{name}": value for name, value in values.items()}
    assert document["settings"] == {"general.architecture": "llama", **expected, "some.bool": True}


def test_gguf_file_as_source_is_rejected_in_one_line(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    assert main([str(llama), str(folder), "--to", "gguf", "--quiet"]) == 0
    file = folder / "model.gguf"
    remedy = f"list the tensors of this file with: portable-convert inspect {file}"
    end = f"{file}: GGUF files can be written, but not read; {remedy}"
    for arguments in ([str(file), str(tmp_path / "b")], ["diff", str(file), str(llama)]):
        assert error_of(capsys, *arguments).endswith(end)
    for arguments in ([str(folder), str(tmp_path / "b")], ["inspect", str(folder)]):
        assert error_of(capsys, *arguments).endswith(end)
    for option in ("--stats", "--optimizer", "--tag=1"):
        line = error_of(capsys, "inspect", str(file), option)
        assert line.endswith(f"leave out {option.partition('=')[0]}")


def test_damaged_gguf_file_is_rejected_in_one_line(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "m.gguf"
    assert main([str(llama), str(file), "--to", "gguf", "--quiet"]) == 0
    content, rng, num_rejected = file.read_bytes(), random.Random(0), 0
    for _ in range(300):
        file.write_bytes(blind(rng, content))
        code = main(["inspect", str(file), "--json"])
        assert code in (0, *REFUSALS)
        printed = capsys.readouterr()
        num_rejected += code != 0
        assert code == 0 or (printed.err.count("\n") == 1 and "Traceback" not in printed.err)
    assert num_rejected > 50
    for damaged, said in {
        b"GGUF": "truncated or damaged",
        b"GGML" + content[4:]: "is not a GGUF file",
        content[:4] + struct.pack("<I", 1) + content[8:]: "GGUF version 1",
        content[:8] + struct.pack("<Q", 1 << 60) + content[16:]: "truncated or damaged",
        content[:-64]: "truncated or damaged",
    }.items():
        file.write_bytes(damaged)
        assert said in error_of(capsys, "inspect", file)


def test_gguf_omits_unsupported_tokenizer(llama: Path, tmp_path: Path) -> None:
    known = json.loads(tokenizer("llama").to_str())
    config = {"vocab_size": VOCAB, "bos_token_id": 0}
    assert convert_byte_level_bpe_to_gguf(known, config, [0]) is not None
    changes: list[dict[str, Any]] = [
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}},
        {"model": {**known["model"], "type": "Unigram"}},
        {"model": {**known["model"], "byte_fallback": True}},
        {"post_processor": {"type": "BertProcessing"}},
    ]
    for change in changes:
        assert convert_byte_level_bpe_to_gguf({**known, **change}, config, [0]) is None, change
    shutil.copytree(llama, tmp_path / "in")
    (tmp_path / "in" / "tokenizer.json").write_text("{")
    write_checkpoint(open_checkpoint(tmp_path / "in"), tmp_path / "x.gguf", "gguf")
    fields = gguf.GGUFReader(tmp_path / "x.gguf").fields
    assert fields["tokenizer.ggml.model"].contents() == "no_vocab"
    assert "tokenizer.ggml.tokens" not in fields


@pytest.mark.parametrize(
    ("stops", "own", "template", "ends"),
    [
        (None, "a", "", [9]),  # the model's own
        (2, "a", "", ["c"]),
        ([0, 1], "a", "{{ m + 'b' }}", ["b", "a"]),  # a base whose turns end with b
        ([0, 1, 2], "c", "{{ 'b' if calls else 'c' }}", ["c", "a", "b"]),  # Llama 3.1 has several ends
    ],
)
def test_gguf_end_tokens_match_transformers(
    llama: Path, tmp_path: Path, stops: Any, own: str, template: str, ends: list[Any]
) -> None:
    folder = tmp_path / "in"
    shutil.copytree(llama, folder)
    made = Tokenizer.from_str(tokenizer("llama").to_str())
    made.add_special_tokens(["a", "b", "c"])
    ids = [made.token_to_id(text) for text in "abc"]
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": own}, "chat_template": [{"name": "default", "template": "old"}]})
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 9}))
    if template:
        (folder / "chat_template.jinja").write_text(template)
    told = [ids[at] for at in stops] if isinstance(stops, list) else None if stops is None else ids[stops]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": told}))
    write_checkpoint(open_checkpoint(folder), tmp_path / "x.gguf", "gguf")
    fields = gguf.GGUFReader(tmp_path / "x.gguf").fields
    wanted = [one if isinstance(one, int) else made.token_to_id(one) for one in ends]
    written = [fields.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    assert [field.contents() for field in written if field] == wanted
    assert fields["tokenizer.chat_template"].contents() == (template or "old")
    others = [one for one in (*ids, 9, 10) if one not in wanted]
    bodies = [{"prompt": [5, 6], "logit_bias": [[one, 1000]]} for one in (*wanted, *others)]
    answers = asked(tmp_path / "x.gguf", *bodies)
    reasons = [answer["choices"][0]["finish_reason"] for answer in answers]
    assert reasons == ["stop"] * len(wanted) + ["length"] * len(others)


def test_gguf_window_with_null_layer_types_is_rejected() -> None:
    """Null means the same as a missing key, and llama.cpp has no sliding windows for this architecture."""
    config = transformers.Qwen2Config(num_hidden_layers=2).to_dict()
    config |= {"use_sliding_window": True, "sliding_window": 100, "layer_types": None}
    with pytest.raises(CheckpointError, match="sliding_window"):
        parse_gguf_settings(json.loads(json.dumps(config, default=str)), MODEL_TYPES["qwen2"], Path("model"))
