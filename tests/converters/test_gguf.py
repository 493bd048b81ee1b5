"""GGUF files, read again by the `gguf` package, and run by llama.cpp, which `xllamacpp` brings as a wheel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from converters import CheckpointError, open_checkpoint, write_checkpoint
from converters.cli import main
from converters.tensors.quantised import q8_0
from converters.writers.gguf_models import MODELS
from converters.writers.gguf_tokenizer import _LLAMA3, byte_level_bpe

VOCAB = 320
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SLIDING = {"head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16, "tie_word_embeddings": True}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**SHAPE, "attention_bias": True}),
    "llama3": ("llama", {**SHAPE, "rope_parameters": SCALED}),
    "mistral": ("mistral", {**SHAPE, "sliding_window": None, "head_dim": 16}),
    "qwen2": ("qwen2", {**SHAPE, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {**SHAPE, "head_dim": 32}),
    "gemma": ("gemma", {**SHAPE, "head_dim": 16, "tie_word_embeddings": True}),
    "gemma2": ("gemma2", {**SHAPE, **SLIDING}),
    "gemma3_text": ("gemma3_text", {**SHAPE, **SLIDING}),
    "gpt2": ("gpt2", {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}),
}
SPLITS = {"llama3": _LLAMA3, "qwen2": _LLAMA3.replace("{1,3}", ""), "qwen3": _LLAMA3.replace("{1,3}", "")}


def tokenizer(name: str) -> Tokenizer:
    made = Tokenizer(models.BPE(ignore_merges=name == "llama3"))
    bytes_: Any = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=name not in SPLITS)
    if name in SPLITS:
        bytes_ = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLITS[name]), "isolated"), bytes_])
    made.pre_tokenizer = bytes_
    every = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=310, special_tokens=["<|end|>"], initial_alphabet=every)
    made.train_from_iterator([Path(__file__).read_text()], trainer)
    return made


def saved(folder: Path, name: str) -> torch.nn.Module:
    kind, values = CONFIGS[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **values))
    with torch.no_grad():
        for value in model.parameters():  # or norms would be all ones and biases zeros
            value.add_(torch.randn_like(value) * 0.05)
    model.float().eval().save_pretrained(folder)
    tokenizer(name).save(str(folder / "tokenizer.json"))
    return model  # type: ignore[no-any-return]


def test_every_architecture_has_its_test() -> None:
    assert {kind for kind, _ in CONFIGS.values()} == set(MODELS)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_tensor_where_llama_cpp_looks_for_it(tmp_path: Path, name: str) -> None:
    """Names by the maps of the `gguf` package; values bit for bit where nothing is reordered or computed."""
    state = saved(tmp_path / "in", name).state_dict()
    argv = [str(tmp_path / "in"), str(tmp_path / "out"), "--to", "gguf", "--verify", "--quiet"]
    assert main(argv) == 0
    reader = gguf.GGUFReader(tmp_path / "out" / "model.gguf")
    held = {tensor.name: tensor for tensor in reader.tensors}
    arch = bytes(reader.fields["general.architecture"].parts[-1]).decode()
    numbers = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[arch], 2)
    wanted: dict[str, Any] = {key: names.get_name(key, (".weight", ".bias")) for key in state}
    if CONFIGS[name][1].get("tie_word_embeddings", name == "gpt2"):
        del wanted["lm_head.weight"]
    assert held.keys() - {"rope_freqs.weight"} == set(wanted.values())
    assert ("rope_freqs.weight" in held) == (name == "llama3")
    for key, place in wanted.items():
        value = state[key].numpy()
        if place.endswith("norm.weight") and name.startswith("gemma"):
            value = value + 1
        if name == "gpt2" and any(part in key for part in ("c_attn", "c_fc", "c_proj")) and value.ndim == 2:
            value = value.T
        if (".q_proj" in key or ".k_proj" in key) and arch == "llama":
            heads = 4 if ".q_proj" in key else 2
            value = value.reshape(heads, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
        assert np.array_equal(held[place].data, value), key
    tokens = reader.fields["tokenizer.ggml.tokens"]
    assert len(tokens.data) == VOCAB
    pre = bytes(reader.fields["tokenizer.ggml.pre"].parts[-1]).decode()
    assert pre == {"llama3": "llama-bpe", "qwen2": "qwen2", "qwen3": "qwen2"}.get(name, "gpt-2")


@pytest.mark.parametrize(("dtype", "kind"), [("bfloat16", "BF16"), ("fp16", "F16"), ("q8_0", "Q8_0")])
def test_types_are_those_of_the_gguf_package(tmp_path: Path, dtype: str, kind: str) -> None:
    state = saved(tmp_path / "in", "qwen2").state_dict()
    write_checkpoint(open_checkpoint(tmp_path / "in"), tmp_path / "out", "gguf", dtype=dtype, verify=True)
    reader = gguf.GGUFReader(tmp_path / "out" / "model.gguf")
    for tensor in reader.tensors:
        if tensor.name == "blk.1.ffn_down.weight":
            assert tensor.tensor_type.name == kind
            value = state["model.layers.1.mlp.down_proj.weight"].numpy()
            theirs = gguf.quants.quantize(value, tensor.tensor_type)
            assert np.array_equal(tensor.data.view(np.uint8), theirs.view(np.uint8))
        elif len(tensor.shape) == 1:
            assert tensor.tensor_type.name == "F32"


def test_q8_0_is_ggmls() -> None:
    values = np.random.default_rng(0).standard_normal((64, 96)).astype(np.float32)
    values[3, :32] = 0
    values[4, :32] = 1e30  # its scale is infinite in float16
    values[5, :5] = [0.5, 1.5, -0.5, 127, -127]
    theirs = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    assert np.array_equal(quantise(values.reshape(-1)).reshape(theirs.shape), theirs)


def test_a_tokenizer_that_might_split_differently_is_left_out(tmp_path: Path) -> None:
    known = json.loads(tokenizer("llama").to_str())
    config = {"vocab_size": VOCAB, "bos_token_id": 0}
    assert byte_level_bpe(known, config, [0]) is not None
    changes: list[dict[str, Any]] = [
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}},
        {"model": {**known["model"], "type": "Unigram"}},
        {"model": {**known["model"], "byte_fallback": True}},
        {"post_processor": {"type": "BertProcessing"}},
    ]
    for change in changes:
        assert byte_level_bpe({**known, **change}, config, [0]) is None, change
    saved(tmp_path / "in", "llama")
    for damaged in (True, False):
        file = tmp_path / "in" / "tokenizer.json"
        file.write_text("{") if damaged else file.unlink()
        checkpoint = open_checkpoint(tmp_path / "in")
        write_checkpoint(checkpoint, tmp_path / "out", "gguf", overwrite=True)
    reader = gguf.GGUFReader(tmp_path / "out" / "model.gguf")
    assert bytes(reader.fields["tokenizer.ggml.model"].parts[-1]) == b"no_vocab"
    assert "tokenizer.ggml.tokens" not in reader.fields


@pytest.mark.parametrize(
    ("stops", "own", "template", "end"),
    [
        (None, "a", "", 9),  # the model's own
        (2, "a", "", 2),
        ([0, 1], "a", "{{ m + 'b' }}", 1),  # a base whose turns end with b
        ([0, 1, 2], "c", "{{ 'b' if calls else 'c' }}", 2),  # Llama 3.1 has several ends in its template
        ([0, 1], "b", "{{ m }}", 1),
    ],
)
def test_the_end_of_an_answer_and_the_template(
    tmp_path: Path, stops: Any, own: str, template: str, end: int
) -> None:
    saved(tmp_path / "in", "llama")
    made = tokenizer("llama")
    made.add_special_tokens(["a", "b", "c"])
    ids = [made.token_to_id(text) for text in "abc"]
    made.save(str(tmp_path / "in" / "tokenizer.json"))
    (tmp_path / "in" / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": own}, "chat_template": [{"name": "default", "template": "old"}]})
    )
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    (tmp_path / "in" / "config.json").write_text(json.dumps({**config, "eos_token_id": 9}))
    if template:
        (tmp_path / "in" / "chat_template.jinja").write_text(template)
    told = [ids[at] for at in stops] if isinstance(stops, list) else None if stops is None else ids[stops]
    (tmp_path / "in" / "generation_config.json").write_text(json.dumps({"eos_token_id": told}))
    write_checkpoint(open_checkpoint(tmp_path / "in"), tmp_path / "out", "gguf")
    fields = gguf.GGUFReader(tmp_path / "out" / "model.gguf").fields
    assert fields["tokenizer.ggml.eos_token_id"].contents() == (9 if stops is None else ids[end])
    assert fields["tokenizer.chat_template"].contents() == (template or "old")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model_type": "bert"}, "not 'bert'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "'yarn' is not written"),
        ({"hidden_act": "relu"}, "has no 'relu'"),
        ({"quantization_config": {}}, "quantised"),
        ({"num_attention_heads": None}, "has no num_attention_heads"),
        ({"num_attention_heads": 0}, "has num_attention_heads 0, which cannot be"),
        ({"hidden_size": 64.0}, "has hidden_size 64.0, which cannot be"),
        ({"rms_norm_eps": 1e60}, r"has rms_norm_eps 1e\+60, which cannot be"),
        ({"rope_scaling": {**SCALED, "high_freq_factor": 1.0}}, "impossible scaling"),
    ],
)
def test_what_llama_cpp_would_compute_differently_is_refused(
    tmp_path: Path, change: dict[str, Any], told: str
) -> None:
    saved(tmp_path / "in", "llama")
    path = tmp_path / "in" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_parameters": None, **change}))
    with pytest.raises(CheckpointError, match=told):
        write_checkpoint(open_checkpoint(tmp_path / "in"), tmp_path / "out", "gguf")
    assert not (tmp_path / "out").exists()


RUN = """
import json, os, sys
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.warmup, params.n_parallel = sys.argv[1], 64, False, 1
params.cpuparams.n_threads = 1
ask = {"prompt": json.loads(sys.argv[2]), "n_predict": 2, "n_probs": 320, "temperature": 0.0}
told = xllamacpp.Server(params).handle_completions(ask)
told = told if isinstance(told, dict) else json.loads(told)
first = told["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
print("LOGPROBS" + json.dumps({one["id"]: one["logprob"] for one in first}), flush=True)
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_llama_cpp_computes_the_same(tmp_path: Path, name: str) -> None:
    model = saved(tmp_path / "in", name)
    write_checkpoint(open_checkpoint(tmp_path / "in"), tmp_path / "out", "gguf")
    tokens = tokenizer(name)
    ids = tokens.encode("The checkpoint of 2026 goes   on\n\nto 12345 TPUs, it's fine.").ids[:40]
    with torch.no_grad():
        every = torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)
    # The server reports a token once its text is whole, so the likeliest one must be a character.
    best = [tokens.decode([int(one)]) for one in every.argmax(-1)]
    length = max(i + 1 for i, text in enumerate(best) if text and text.isascii())
    ids, wanted = ids[:length], every[length - 1]
    ran = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path / "out" / "model.gguf"), json.dumps(ids)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    line = next(line for line in ran.stdout.splitlines() if "LOGPROBS" in line)
    found = json.loads(line.partition("LOGPROBS")[2])
    assert len(found) == VOCAB
    # llama.cpp keeps keys and values in float16.
    assert max(abs(value - wanted[int(i)].item()) for i, value in found.items()) < 5e-3
