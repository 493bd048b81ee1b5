"""Load converted folders with programs of other projects, which tests/owners.py installs.

`portable-convert` writes each folder from a checkpoint with the names that transformers 5 has in memory. Each
program must find every tensor, and compute the same as transformers 5.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from transformers import AutoModelForCausalLM

from portable.adapters.adapter import inject_adapter
from portable.converters.cli import main
from portable.converters.names.earlier_keys import add_earlier_keys_to_config
from portable.data.dataset import build_data
from portable.model.build import build_and_freeze_model, load_model_config
from portable.private import transformers_internals
from tests import earlier_keys
from tests.composite import build_composite, build_composite_config, write_composite
from tests.converters.test_gguf import VOCAB, distance, tokenizer
from tests.converters.test_server_names import iterate_wrong_names
from tests.owners import NEEDS_OWNERS, ROOT, VARIABLE, build_process_environment, run_judge, run_script
from tests.owners_judge import TOKENS
from tests.runs import configured, leg, write_corpus
from tests.server_names import Server
from tests.tiny_models import VOCABULARY, tiny_config, tiny_model

pytestmark = [
    pytest.mark.owners,
    pytest.mark.skipif(VARIABLE not in os.environ, reason=NEEDS_OWNERS),
]
COMPOSITE = ("gemma3", "llama4", "llava", "paligemma", "qwen3_vl")
EXPERTS_AS_PUBLISHED = "qwen3_vl_moe"
"""Type whose published experts have the shape `[experts, inputs, outputs]`, unlike in transformers 5."""
TYPES: dict[str, list[str]] = {
    "transformers4": [
        "cohere2",
        "deepseek_v3",
        "dots1",
        "ernie4_5",
        "ernie4_5_moe",
        "exaone4",
        "gemma2",
        "gemma3_text",
        "glm4",
        "glm4_moe",
        "gpt_neox",
        "gpt_oss",
        "granite",
        "granitemoe",
        "hunyuan_v1_dense",
        "lfm2",
        "llama",
        "minimax",
        "mixtral",
        "nemotron",
        "olmo3",
        "olmoe",
        "phi3",
        "phimoe",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "qwen3_next",
        "seed_oss",
        "smollm3",
        "starcoder2",
        *COMPOSITE,
    ],
    "mlx": [
        "cohere2",
        "deepseek_v3",
        "dots1",
        "gemma2",
        "gemma3_text",
        "glm4",
        "glm4_moe",
        "gpt_neox",
        "granite",
        "granitemoe",
        "hunyuan_v1_dense",
        "llama",
        "mixtral",
        "nemotron",
        "olmo3",
        "olmoe",
        "phi3",
        "qwen3",
        "qwen3_moe",
        "qwen3_next",
        "seed_oss",
    ],
    "llama_cpp": [
        "apertus",
        "deepseek_v3",
        "ernie4_5",
        "glm4_moe",
        "gpt_neox",
        "gpt_oss",
        "granitemoe",
        "hunyuan_v1_dense",
        "llama",
        "mixtral",
        "nemotron",
        "olmo3",
        "olmoe",
        "qwen2_moe",
        "qwen3_moe",
        "seed_oss",
        "starcoder2",
    ],
}
"""Model types that each program has, and whose folder from `save_pretrained` it accepts."""
TOLERANCES = {"transformers4": 1e-5, "mlx": 1e-4, "llama_cpp": 2e-3}
"""Largest difference from transformers 5. The GELU of llama.cpp is a table of float16."""
READ_NAMES_IN_MEMORY = {("llama_cpp", "gpt_neox")}
"""Programs that also read the names in memory of a type."""
TOLERANCE_OF_FLOAT16 = 2e-2
"""The command of llama.cpp's converter writes float16 by default."""
LIVE = ("mixtral", "gpt_neox")
"""Types that are also written with the names in memory, which a program that has the type rejects."""
ADAPTER = {"adapter__type": "lora", "adapter__r": 4}
TRAINED: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "mixtral-from-scratch": ("mixtral", {}, ("transformers4", "mlx")),
    "gemma3-trained": ("gemma3", {}, ("transformers4",)),
    "llava-trained": ("llava", {}, ("transformers4",)),
    "llama4-trained": ("llama4", {}, ("transformers4",)),
    "qwen3_vl-trained": ("qwen3_vl", {}, ("transformers4",)),
    "qwen3_vl_moe-trained": (EXPERTS_AS_PUBLISHED, {}, ("transformers4",)),
    "qwen3_moe-merged": ("qwen3_moe", {**ADAPTER, "checkpoint__export": "merged"}, ("transformers4", "mlx")),
    "llama-adapter": ("llama", ADAPTER, ("transformers4",)),
    "mixtral-adapter": (
        "mixtral",
        {**ADAPTER, "adapter__target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
        ("transformers4",),
    ),
}
"""Model type and settings of runs, and the programs that load the folder ``final`` of each run."""


SETTINGS: dict[str, dict[str, Any]] = {
    "cohere2": {"num_hidden_layers": 4, "layer_types": [*["sliding_attention"] * 3, "full_attention"]},
    "deepseek_v3": {"n_group": 2, "topk_group": 1},
    "dots1": {"num_key_value_heads": 4},
    "ernie4_5_moe": {"moe_intermediate_size": 32, "intermediate_size": 64},
    "exaone4": {
        "head_dim": 8,
        "num_hidden_layers": 4,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"],
    },
    "gemma3_text": {"num_hidden_layers": 6, "layer_types": [*["sliding_attention"] * 5, "full_attention"]},
    "glm4_moe": {"head_dim": 8},
    "gpt_neox": {"intermediate_size": 128},
    "olmoe": {"num_key_value_heads": 4},
    "qwen3_moe": {"head_dim": 8, "norm_topk_prob": True},
    "qwen3_next": {
        "num_hidden_layers": 4,
        "layer_types": [*["linear_attention"] * 3, "full_attention"],
    },
}
"""Settings of published models that the programs need in addition to `tiny_config`."""


class Sample(NamedTuple):
    """A tiny model and the folder that `portable-convert` wrote from it."""

    folder: Path
    model: Any


def write_sample(folder: Path, model_type: str, names: str = "published") -> Sample:
    """Write a checkpoint as `torch.distributed.checkpoint` saves it during training, and convert it."""
    if model_type in COMPOSITE:
        transformers_internals.patch_llama4()
        model = build_composite(model_type).eval()
    else:
        model = tiny_model(model_type, vocab_size=VOCAB, **SETTINGS.get(model_type, {}))
    with torch.no_grad():  # Otherwise norms are ones, and biases are zeros.
        for value in model.parameters():
            value.add_(torch.randn_like(value) * 0.03)
    source, out = folder / "checkpoint", folder / "converted"
    dcp_save({"model": model.state_dict()}, checkpoint_id=source, no_dist=True)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(source)
    assert main([str(source), str(out), "--names", names, "--quiet"]) == 0
    tokenizer("llama").save(str(out / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (out / "tokenizer_config.json").write_text(json.dumps(settings))
    return Sample(out, model)


def write_base(folder: Path, model_type: str, corpus: Path) -> Path:
    """Write a model and a tokenizer, with the names of published files, as the base of a run."""
    if model_type in (*COMPOSITE, EXPERTS_AS_PUBLISHED):
        write_composite(folder, model_type, corpus)
        file = folder / "model.safetensors"
        tower = "vision_tower."  # transformers 5 does not save the prefix that published files have.
        tensors = {
            name.replace(tower, f"{tower}vision_model."): tensor
            for name, tensor in load_file(file).items()
            if ".head." not in name
        }
        if model_type == EXPERTS_AS_PUBLISHED:
            experts = [
                name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))
            ]
            tensors |= {name: tensors[name].transpose(1, 2).contiguous() for name in experts}
        save_file(tensors, file, {"format": "pt"})
    else:
        tiny_model(model_type, **SETTINGS.get(model_type, {})).save_pretrained(folder)
        data = build_data(configured(folder, corpus).data, model_vocab_size=VOCABULARY)
        data.tokenizer.save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        add_earlier_keys_to_config(config)
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def train_sample(folder: Path, case: str) -> Sample:
    """Train a model or an adapter for two steps, and return the folder that the run ends with."""
    folder.mkdir()
    model_type, more, _ = TRAINED[case]
    corpus = write_corpus(folder)
    settings = {**more, "train__steps": 2, "data__eval_fraction": 0, "train__learning_rate": 0.01}
    if case.endswith("from-scratch"):
        settings["model__config"] = tiny_config(model_type)
    else:
        base = write_base(folder / "base", model_type, corpus)
        settings |= {"model__config": None, "model__name_or_path": str(base)}
    assert leg(folder / "run", corpus, settings) == 0
    out = folder / "run" / "final"
    if case.endswith("adapter"):
        model = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32), out
        )
    else:
        (architecture,) = json.loads((out / "config.json").read_text())["architectures"]
        model = getattr(transformers, architecture).from_pretrained(out, dtype=torch.float32)
    return Sample(out, model.eval())


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Sample]:
    """Write samples of all types with published names, some with names in memory, and trained ones."""
    folder = tmp_path_factory.mktemp("owners")
    types = sorted({model_type for names in TYPES.values() for model_type in names})
    published = {name: write_sample(folder / name, name) for name in types}
    live = {f"{name}-live": write_sample(folder / f"{name}-live", name, "live") for name in LIVE}
    return {**published, **live, **{case: train_sample(folder / case, case) for case in TRAINED}}


def list_cases(program: str) -> list[str]:
    """Return the cases that a program loads completely."""
    return [*TYPES[program], *(case for case, (_, _, programs) in TRAINED.items() if program in programs)]


@pytest.fixture(scope="module", params=TYPES)
def verdicts(request: pytest.FixtureRequest, samples: dict[str, Sample]) -> tuple[str, dict[str, Any]]:
    """Return a program and its verdict on each sample."""
    program: str = request.param
    cases = [*list_cases(program), *(f"{name}-live" for name in LIVE)]
    return program, run_judge(program, {case: samples[case].folder for case in cases})


def compare_with_transformers(verdict: dict[str, Any], model: Any) -> float:
    """Return the largest difference of a logit, or of a log probability in llama.cpp."""
    if "gguf" in verdict:
        return distance(Path(verdict["gguf"]), model, tokenizer("llama"))
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS])).logits[0].float().numpy()
    return float(np.abs(np.load(verdict["logits"]) - logits).max())


def test_converted_folders_compute_the_same_in_other_programs(
    verdicts: tuple[str, dict[str, Any]], samples: dict[str, Sample]
) -> None:
    program, of_case = verdicts
    problems = {}
    for case in list_cases(program):
        verdict = of_case[case]
        if verdict["error"] or verdict["missing"] or verdict["unexpected"]:
            problems[case] = verdict
            continue
        difference = compare_with_transformers(verdict, samples[case].model)
        if not difference < TOLERANCES[program]:
            problems[case] = {"difference": difference}
    assert not problems


@pytest.mark.parametrize("case", [case for case in TRAINED if case.endswith("adapter")])
def test_trained_adapters_change_logits(case: str, samples: dict[str, Sample]) -> None:
    """Otherwise, a program that ignores the adapter would pass."""
    model, tokens = samples[case].model, torch.tensor([TOKENS])
    with torch.no_grad(), model.disable_adapter():
        base = model(tokens).logits
    with torch.no_grad():
        assert (model(tokens).logits - base).abs().max() > 1e-2


@pytest.mark.parametrize("model_type", LIVE)
def test_other_programs_reject_names_in_memory(verdicts: tuple[str, dict[str, Any]], model_type: str) -> None:
    program, of_case = verdicts
    if model_type not in TYPES[program] or (program, model_type) in READ_NAMES_IN_MEMORY:
        pytest.skip(f"{program} does not distinguish the names of {model_type}")
    verdict = of_case[f"{model_type}-live"]
    assert verdict["error"] or verdict["missing"]


def test_transformers_4_reads_added_earlier_keys() -> None:
    types: dict[str, dict[str, str]] = json.loads(earlier_keys.FILE.read_bytes())["types"]
    configs = [earlier_keys.build_probed_config(name, paths) for name, paths in types.items()]
    for config in configs:
        assert add_earlier_keys_to_config(config)
    problems = {}
    for config, read in zip(configs, earlier_keys.read_with_transformers_4(configs), strict=True):
        name = config["model_type"]
        wanted = {key: config[key] for key in types[name]}
        if not isinstance(read, dict) or {key: read.get(key) for key in wanted} != wanted:
            problems[name] = read if isinstance(read, str) else {key: read.get(key) for key in wanted}
    assert not problems


def test_gguf_error_suggests_working_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tokenizer is one of SentencePiece, because the command only accepts known byte-level tokenizers."""
    folder, model = write_sample(tmp_path, "granitemoe")
    source = tmp_path / "checkpoint"
    assert main([str(source), str(tmp_path / "x.gguf"), "--to", "gguf"]) == 65
    advice = capsys.readouterr().err.splitlines()[-1].rpartition("llama.cpp's own converter: ")[2]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    (folder / "corpus.txt").write_text((ROOT / "LICENSE").read_text())
    assert run_judge("llama_cpp", {"tokenizer": folder}, "train_sentencepiece")["tokenizer"] == {"error": ""}
    assert advice.split()[-1] == "OUT"
    run_script("llama_cpp", advice.replace("OUT", str(folder)))
    (file,) = folder.glob("*.gguf")
    assert distance(file, model, tokenizer("llama")) < TOLERANCE_OF_FLOAT16


def test_torchao_trains_in_fp8_and_its_weights_are_read() -> None:
    """These tests are skipped in the main environment, which does not contain torchao."""
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "-p", "no:cacheprovider", "-k", "fp8 or torchao"]
    process = subprocess.run(
        [*command, "tests/gpu/test_fp8.py", "tests/converters/test_dequantize.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=build_process_environment("torchao"),
    )
    summary = [line for line in process.stdout.splitlines() if " passed" in line]
    assert process.returncode == 0 and summary and "skipped" not in summary[-1], process.stdout[-3000:]


# -- names of adapters ---------------------------------------------------------------------------------------

_COMPOSITE_ADAPTED = ("gemma3", "llama4", "qwen3_5", "qwen3_5_moe", "qwen3_vl")
ADAPTED = ("deepseek_v3", "nemotron_h", "qwen3", "qwen3_moe", *_COMPOSITE_ADAPTED)
"""Types of popular adapters. In models of `_COMPOSITE_ADAPTED`, the towers are not adapted by default."""
SERVERS = Path(os.environ.get(VARIABLE, ""), "servers")


def list_adapter_names(model_type: str, folder: Path) -> tuple[str, list[str]]:
    """Return the class of a model, and the names in the files of an adapter with the default settings."""
    settings: dict[str, Any] = {"model__config": tiny_config(model_type)}
    if model_type in _COMPOSITE_ADAPTED:
        build_composite_config(model_type).save_pretrained(folder)
        settings = {"model__config": None, "model__name_or_path": str(folder)}
    config = configured(folder, folder / "text.txt", **ADAPTER, **settings)
    model = build_and_freeze_model(load_model_config(config.model), config)
    return type(model).__name__, inject_adapter(model, load_model_config(config.model), config).saved_names


@pytest.mark.skipif(not SERVERS.is_dir(), reason=NEEDS_OWNERS)
@pytest.mark.parametrize("model_type", ADAPTED)
def test_vllm_finds_module_for_each_adapter_tensor(model_type: str, tmp_path: Path) -> None:
    architecture, names = list_adapter_names(model_type, tmp_path)
    server = Server(SERVERS, "vllm")
    assert names and server.find_unused(architecture, names) == []
    wrong = [name for name in iterate_wrong_names(names) if "x_weight" in name or ".x_" in name]
    assert wrong and server.find_unused(architecture, wrong) == wrong


@pytest.mark.skipif(not SERVERS.is_dir(), reason=NEEDS_OWNERS)
def test_vllm_has_options_for_adapters_of_stacked_experts() -> None:
    folder = SERVERS / "vllm"
    options = (folder / "engine" / "arg_utils.py").read_text("utf-8")
    assert all(f'"{name}"' in options for name in ("--enable-lora", "--enable-mixed-moe-lora-format"))
    modules = (folder / "entrypoints" / "openai" / "models" / "protocol.py").read_text("utf-8")
    assert "is_3d_lora_weight: bool = False" in modules
