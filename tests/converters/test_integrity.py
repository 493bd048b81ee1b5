"""Compare the verdict on complete and damaged checkpoints with the models of transformers."""

from __future__ import annotations

import copy
import json
import math
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from portable.converters.checkpoint import Checkpoint
from portable.converters.cli import main as cli
from portable.converters.integrity import find_model_problems
from portable.converters.naming import rename_to_published
from portable.converters.opening import open_checkpoint
from portable.converters.storage.byte_sources import InMemorySource
from portable.converters.tensors.tensor import Tensor
from tests import architectures
from tests.converters.compare import REFUSALS, error_of
from tests.converters.damages import DAMAGED, EMPTY, FORMATS, SAMPLED, DamagedCheckpoint
from tests.converters.samples import all_samples, folder_of, parameters
from tests.expected_tensors import (
    FILE,
    UNDESCRIBED,
    create_config,
    decode_table,
    describe_class,
    find_class,
    find_class_name,
    list_pairs,
)
from tests.object_store import ObjectStore

FEW_PAIRS = (
    ("llama", "causal-lm"),
    ("qwen3_moe", "causal-lm"),
    ("mixtral", "causal-lm"),
    ("deepseek_v3", "causal-lm"),
    ("qwen3_next", "causal-lm"),
    ("nemotron_h", "causal-lm"),
    ("zamba2", "causal-lm"),
    ("gemma3n_text", "causal-lm"),
    ("t5", "seq2seq-lm"),
    ("bert", "masked-lm"),
    ("albert", "masked-lm"),
    ("gpt2", "sequence-classification"),
    ("qwen2_vl", "composite"),
)


REPEATED = next(case for case in SAMPLED if case.name == "repeated expert")


def build_checkpoint(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> Checkpoint:
    """Build a checkpoint whose tensors have shapes, but no values, with a config file."""
    empty = InMemorySource(b"")
    tensors = {name: Tensor.from_source(name, "F32", tuple(shape), empty) for name, shape in shapes.items()}
    file = Path(create_folder().name) / "config.json"
    file.write_text(json.dumps(config))
    companions: dict[str, Any] = {"config.json": file}
    return Checkpoint(format="dcp", root=Path("model"), tensors=tensors, companions=companions, ties=False)


@cache
def create_folder() -> tempfile.TemporaryDirectory[str]:
    """Create a folder that is removed at the end of the process."""
    return tempfile.TemporaryDirectory()


def build_shapes(config: Any, model_class: Any) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
    """Return the shapes that `save_pretrained` would write for a model in memory, and its config."""
    import torch

    with torch.device("meta"):
        model = model_class(copy.deepcopy(config))
    aliases = set(getattr(model, "all_tied_weights_keys", None) or {})
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items() if name not in aliases}
    content = json.loads(model.config.to_json_string())
    return shapes, {**content, "architectures": [model_class.__name__]}


def iterate_verdicts(
    model_type: str, task: str, *, full_size: bool = False
) -> Iterator[tuple[str, list[str]]]:
    """Yield the problems of a model with the names in memory, and with the names in published files."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type) if full_size else create_config(model_type, task)
    shapes, content = build_shapes(config, find_class(model_type, task))
    checkpoint = build_checkpoint(shapes, content)
    yield "live", list(map(str, find_model_problems(checkpoint, read_values=False)))
    published = rename_to_published(checkpoint)
    if published.tensors.keys() != checkpoint.tensors.keys():
        yield "published", list(map(str, find_model_problems(published, read_values=False)))


@pytest.mark.parametrize("pair", FEW_PAIRS, ids=lambda pair: pair[0])
def test_find_model_problems_accepts_complete_models(pair: tuple[str, str]) -> None:
    assert not {names: problems for names, problems in iterate_verdicts(*pair) if problems}


@pytest.mark.parametrize(
    ("case", "maker"),
    [
        pytest.param(
            case,
            "damaged" if case in SAMPLED else "every_damaged",
            marks=[] if case in SAMPLED else pytest.mark.exhaustive,
            id=case.folder,
        )
        for case in DAMAGED
    ],
)
def test_convert_rejects_damaged_checkpoints(
    case: DamagedCheckpoint,
    maker: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = request.getfixturevalue(maker) / case.folder
    assert case.reason in error_of(capsys, folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert cli(["inspect", str(folder), "--json"]) == 1
    assert case.reason in "".join(
        problem["text"] for problem in json.loads(capsys.readouterr().out)["problems"]
    )


def test_convert_partial_accepts_damaged_checkpoint(
    damaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli([str(damaged / "first-layer-dcp"), str(tmp_path / "out"), "--partial"]) == 0
    assert (
        "--partial: config.json has num_hidden_layers 4, but some layers are missing"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("target", ["dcp", "gguf", "merge"])
def test_convert_to_other_targets_compares_experts(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import save_file

    from tests.converters.damages import repeat_experts
    from tests.converters.make_damaged import build_state, write

    state, config = build_state("mixtral")
    base = tmp_path / "base"
    write(base, "safetensors", repeat_experts(0, 2)(state, config), config)
    if target == "merge":
        module = "base_model.model.model.layers.0.self_attn.q_proj"
        weight = state["model.layers.0.self_attn.q_proj.weight"]
        factors = {f"{module}.lora_A.weight": weight[:2], f"{module}.lora_B.weight": weight[:, :2]}
        (tmp_path / "adapter").mkdir()
        save_file(
            {name: factor.contiguous() for name, factor in factors.items()},
            tmp_path / "adapter" / "adapter_model.safetensors",
        )
        settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
        (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
        argv = [tmp_path / "adapter", tmp_path / "out", "--merge-into", base]
    else:
        argv = [base, tmp_path / "out", "--to", target]
    assert "6 expert weights equal to the weight of another expert" in error_of(capsys, *argv)
    assert not (tmp_path / "out").exists()
    assert cli([*map(str, argv), "--partial", "--quiet"]) == 0


@pytest.mark.parametrize("name", ["repeated expert", "repeated experts of a published layout"])
def test_convert_from_object_store_compares_experts(
    name: str, s3: ObjectStore, damaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (case,) = [case for case in SAMPLED if case.name == name]
    s3.put_tree(damaged / case.folder, "model")
    assert case.reason in error_of(capsys, s3.url("model"), tmp_path / "out")


@pytest.mark.parametrize(
    ("shapes", "cause"),
    [
        (((4, 32), (16, 8)), "with only the shard of one rank"),
        (((4, 32), (16, 4), (0,)), "without gathering the partitions of ZeRO-3"),
    ],
)
def test_inspect_names_cause_of_damaged_adapters(
    shapes: tuple[tuple[int, ...], ...], cause: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch
    from safetensors.torch import save_file

    module = "base_model.model.model.layers.0.self_attn.q_proj"
    names = (f"{module}.lora_A.weight", f"{module}.lora_B.weight", f"{module[:-6]}k_proj.lora_A.weight")
    tensors = {name: torch.ones(shape) for name, shape in zip(names, shapes, strict=False)}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "k_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    assert cli(["inspect", str(tmp_path)]) == 1
    assert cause in capsys.readouterr().out


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("complete-qwen3_moe-safetensors", "transformers 4, vLLM, SGLang and others skip the experts"),
        (REPEATED.folder, "gathered the experts of only one rank"),
        ({"tie_word_embeddings": True}, "a conversion writes tie_word_embeddings: false"),
        ({"quantization_config": {"quant_method": "fp8"}}, "a conversion removes the key"),
    ],
    ids=["stacked experts", "repeated experts", "split tie", "stale quantization"],
)
def test_inspect_names_known_causes_of_problems(
    source: str | dict[str, Any],
    cause: str,
    damaged: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = damaged / source if isinstance(source, str) else write_folder(tmp_path / "source", **source)
    assert cli(["inspect", str(folder)]) == 1
    assert cause in capsys.readouterr().out
    assert cli(["inspect", str(folder), "--json"]) == 1
    assert cause in capsys.readouterr().out


def test_convert_names_cause_of_empty_tensors(
    damaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert EMPTY[3] in error_of(capsys, damaged / "empty-tensors", tmp_path / "out")


@pytest.mark.parametrize("format", FORMATS)
def test_find_model_problems_accepts_complete_checkpoints(format: str, damaged: Path) -> None:
    folders = sorted(damaged.glob(f"complete-*-{format}"))
    assert len(folders) == 8
    problems = {folder.name: find_model_problems(open_checkpoint(folder)) for folder in folders}
    kinds = {name: [problem.kind for problem in values] for name, values in problems.items() if values}
    # This file has the stacks of experts that transformers has in memory.
    in_memory = {"complete-qwen3_moe-safetensors": ["names in memory"]}
    assert kinds == (in_memory if format == "safetensors" else {})


def write_folder(folder: Path, **settings: Any) -> Path:
    """Write a complete Llama in bfloat16 whose config has other settings."""
    import torch
    from safetensors.torch import save_file

    from tests.converters.make_damaged import build_state

    state, config = build_state("llama")
    folder.mkdir()
    save_file({name: value.to(torch.bfloat16) for name, value in state.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16", **settings}))
    return folder


def read_config(out: Path) -> dict[str, Any]:
    """Read the config of a converted model."""
    config: dict[str, Any] = json.loads((out / "config.json").read_text())
    return config


DESCRIBED_PAIRS = (
    ("llama", "causal-lm"),
    ("gemma3_text", "causal-lm"),
    ("gpt2", "sequence-classification"),
    ("qwen3_moe", "causal-lm"),
    ("deepseek_v3", "causal-lm"),
    ("qwen3_next", "causal-lm"),
    ("nemotron_h", "causal-lm"),
    ("zamba2", "causal-lm"),
    ("bert", "masked-lm"),
    ("t5", "seq2seq-lm"),
)


def sort_facts(description: Mapping[str, Any]) -> dict[str, Any]:
    """Return a description of a class whose facts can be compared."""
    stacks = {
        stack: {**layers, "always": set(layers["always"]), "groups": set(map(frozenset, layers["groups"]))}
        for stack, layers in description["stacks"].items()
    }
    names = {key: set(description[key]) for key in ("required", "untied")}
    return {**names, "stacks": stacks, "shapes": description["shapes"], "tied": description["tied"]}


def check_descriptions(pairs: Iterable[tuple[str, str]]) -> None:
    """Compare descriptions in the table with models of transformers."""
    stored = decode_table(json.loads(FILE.read_bytes()))
    for model_type, task in pairs:
        if f"{model_type} {find_class_name(model_type, task)}" in UNDESCRIBED:
            continue
        described = describe_class(model_type, task)
        if described is not None:
            name, description = described
            assert sort_facts(stored[f"{model_type} {name}"]) == sort_facts(description), (model_type, task)


def test_expected_tensors_describe_every_class() -> None:
    classes = {f"{pair.model_type} {find_class_name(pair.model_type, pair.task)}" for pair in list_pairs()}
    described = json.loads(FILE.read_bytes())["classes"].keys()
    assert classes - described == UNDESCRIBED.keys()
    assert described <= classes


@pytest.mark.parametrize("pair", DESCRIBED_PAIRS, ids=lambda pair: pair[0])
def test_expected_tensors_match_transformers(pair: tuple[str, str]) -> None:
    check_descriptions([pair])


@pytest.mark.exhaustive
def test_all_expected_tensors_match_transformers() -> None:
    check_descriptions(list_pairs())


def builds_same_model(config: dict[str, Any], state: Mapping[str, Any]) -> bool:
    """Return whether transformers builds a model from a config whose tensors have the shapes of a state."""
    import torch
    import transformers

    try:
        model_class = getattr(transformers, config["architectures"][0])
        with torch.device("meta"):
            model = model_class(model_class.config_class.from_dict(copy.deepcopy(config)))
    except Exception:
        return False
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    return all(shapes.get(name) == tensor.shape for name, tensor in state.items())


INVALID: dict[str, tuple[Any, ...]] = {
    "num_hidden_layers": (1e9, -1, 0, "4", math.nan, math.inf, 4.0, True, [4], {}),
    "vocab_size": (-1, 10**30, "256", math.nan, 256.0, [256, "x"]),
    "hidden_size": (-1, 0, 10**30, 32.0),
    "num_attention_heads": (0, -4, 4.0, {}),
    "head_dim": (10**30, -1, 0, math.nan, "8", 8.0),
    "num_local_experts": (math.inf, math.nan, -8, 0, 10**30, True, "8", [8, "x"], 8.0, {}),
    "tie_word_embeddings": ("false", 1, []),
    "quantization_config": ([], "fp8", 3),
    "text_config": ([], "x", 3),
    "id2label": ([], 3),
    "layer_types": ("x", [1, 2], [[], {}], 10**9),
    "rope_parameters": ([], "x", 3),
}


@pytest.mark.parametrize("key", INVALID)
def test_find_model_problems_rejects_settings_like_transformers(key: str) -> None:
    from tests.converters.make_damaged import build_state

    state, config = build_state("qwen3_moe")
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    assert builds_same_model(config, state)
    for value in INVALID[key]:
        changed = {**config, key: value}
        assert not builds_same_model(changed, state)
        problems = find_model_problems(build_checkpoint(shapes, changed), read_values=False)
        assert any(key in str(problem) or "experts, but" in str(problem) for problem in problems), value


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers 1,000,000,000, but some layers are missing"),
        ({"model_type": ["llama"]}, 'model_type is ["llama"], but must be a string; correct config.json'),
        ({"architectures": "LlamaForCausalLM"}, 'architectures is "LlamaForCausalLM", but must be a list'),
        ({"num_hidden_layers": math.nan}, "num_hidden_layers is NaN, but must be a whole number"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_convert_rejects_invalid_settings(
    settings: dict[str, Any], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_folder(tmp_path / "source", **settings)
    assert reason in error_of(capsys, source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1.5,
    10**400,
    "",
    "x",
    [],
    ["x"],
    [[1]],
    [{}],
    {},
    {"x": 1},
    {"1": {}},
)
FUZZED: dict[str, tuple[str, list[tuple[str, ...]]]] = {
    "model": ("config.json", [(), ("--to", "gguf"), ("--names", "live", "--dry-run")]),
    "codes": ("config.json", [("--dequantize",), ("--dtype", "bfloat16")]),
    "adapter": (
        "adapter_config.json",
        [("--merge-into", "{model}"), ("--to", "gguf", "--config-from", "{model}")],
    ),
    "tokenizer": ("tokenizer_config.json", [("--to", "gguf"), ()]),
    "generation": ("generation_config.json", [("--to", "gguf"), ()]),
    "shards": ("model.safetensors.index.json", [()]),
}
"""File whose values are replaced by values of other types, and options with which the folder is converted."""
PYTHON_WORDS = re.compile(
    r"unhashable|object (has no|is not)|indices must|NoneType|unsupported operand|'\w+' object"
)


def write_fuzzed_folder(kind: str, folder: Path) -> Path:
    """Write a model, a quantized model, or an adapter."""
    from tests.converters import test_dequantize, test_merging
    from tests.tiny_models import tiny_model

    if kind == "codes":
        settings, tensors, _ = test_dequantize.CASES["int4, symmetric True"]()
        return test_dequantize.written(folder / kind, settings, tensors)
    if kind == "adapter":
        config = test_merging.lora(use_rslora=True, rank_pattern={"layers.0.self_attn.q_proj": 6})
        return test_merging.Pair(folder, test_merging.UNTIED(), config).adapter
    tiny_model("llama").save_pretrained(folder / kind, max_shard_size="20KB" if kind == "shards" else "1GB")
    return folder / kind


def iterate_changes(table: dict[str, Any], step: int) -> Iterator[dict[str, Any]]:
    """Yield copies of a table in which one value is replaced by every `step`-th of `VALUES`.

    The value is at the top or one level below. Each key begins at another of `VALUES`.
    """
    for index, (key, value) in enumerate(table.items()):
        values = VALUES[index % step :: step]
        yield from ({**table, key: other} for other in values)
        for inner in list(value)[:3] if isinstance(value, dict) else ():
            yield from ({**table, key: {**value, inner: other}} for other in values)


@pytest.mark.parametrize(
    "kind",
    [
        "model",
        "codes",
        "adapter",
        *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ("tokenizer", "generation", "shards")),
    ],
)
def test_convert_rejects_settings_of_other_types_in_one_line(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    source, (name, templates) = write_fuzzed_folder(kind, tmp_path), FUZZED[kind]
    file, out = source / name, tmp_path / "out"
    table = {"chat_template": "x", "eos_token": "y"} if kind == "tokenizer" else json.loads(file.read_bytes())
    step = 1 if request.config.getoption("--all") else 5
    conversions = [[part.format(model=tmp_path / "base") for part in each] for each in templates]
    for changed in (*iterate_changes(table, step), [], "x", 3):
        file.write_text(json.dumps(changed))
        for options in conversions:
            code = cli([str(source), str(out), "--quiet", "--overwrite", *options])
            lines = capsys.readouterr().err.splitlines()
            assert code in (0, *REFUSALS), (changed, options)
            assert not code or lines[-1].startswith("error: "), (changed, options)
            assert not any(map(PYTHON_WORDS.search, lines)), (changed, lines)
        shutil.rmtree(out, ignore_errors=True)


def test_convert_unties_embeddings_that_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_folder(tmp_path / "source", tie_word_embeddings=True)
    assert cli(["inspect", str(source)]) == 1
    assert cli([str(source), str(tmp_path / "out")]) == 0
    assert "config.json ties the embeddings, but lm_head.weight differs" in capsys.readouterr().err
    assert read_config(tmp_path / "out")["tie_word_embeddings"] is False


def test_convert_unties_text_config_like_complete_model(tmp_path: Path) -> None:
    """transformers 5 saves configs of Qwen3-VL-MoE whose text part has the default of its class."""
    settings = {"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}}
    source = write_folder(tmp_path / "source", **settings)
    assert cli([str(source), str(tmp_path / "out")]) == 0
    assert read_config(tmp_path / "out")["text_config"] == {"tie_word_embeddings": False}


def test_convert_removes_stale_quantization_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_folder(tmp_path / "source", quantization_config={"quant_method": "fp8"})
    assert cli([str(source), str(tmp_path / "out"), "--dtype", "float32"]) == 0
    assert "no tensor is quantized" in capsys.readouterr().err
    config = read_config(tmp_path / "out")
    assert "quantization_config" not in config
    assert config["dtype"] == "float32"


def test_find_model_problems_accepts_packed_embeddings_of_unknown_class() -> None:
    shapes = {
        f"model.{module}.{name}": (32, columns)
        for module in ("embed_tokens", "layers.0.mlp")
        for name, columns in (("weight", 8), ("scales", 2), ("biases", 2))
    }
    config = {"model_type": "custom", "architectures": ["CustomForCausalLM"], "num_hidden_layers": 1}
    quantization = {"bits": 4, "group_size": 32}
    config |= {"hidden_size": 64, "vocab_size": 32, "quantization_config": quantization}
    checkpoint = build_checkpoint(shapes, config)
    for name, tensor in checkpoint.tensors.items():
        if name.endswith(".weight"):
            tensor.dtype = "U32"
    assert not find_model_problems(checkpoint)


@pytest.mark.parametrize("name", parameters(sample.name for sample in all_samples()))
def test_find_model_problems_accepts_samples(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    assert not list(
        map(str, find_model_problems(open_checkpoint(folder_of(name, request, tmp_path / "made"))))
    )


def main() -> int:
    """Check all models of transformers: tiny models, and models with the default config of each type."""
    import sys

    import transformers

    transformers.logging.set_verbosity_error()
    count = 0
    alarms = 0
    for full_size in (False, True):
        for pair in architectures.pairs():
            try:
                verdicts = list(iterate_verdicts(*pair, full_size=full_size))
            except Exception as error:
                print(f"{pair.model_type} {pair.task}: not built: {type(error).__name__}: {str(error)[:80]}")
                continue
            for names, problems in verdicts:
                count += 1
                if problems:
                    alarms += 1
                    size = "full size" if full_size else "tiny"
                    print(f"{pair.model_type} {pair.task} {size} {names}: {problems[0][:300]}")
        print(f"{alarms} alarms of {count} complete checkpoints", flush=True)
    sys.stdout.flush()
    return 1 if alarms else 0


if __name__ == "__main__":
    raise SystemExit(main())
