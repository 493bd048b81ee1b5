"""Converted checkpoints have the names, shapes and values of transformers' ``save_pretrained``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from portable.converters import Checkpoint, OptimizerState, open_checkpoint, write_safetensors
from portable.converters.cli import main
from portable.converters.errors import CheckpointError
from portable.converters.formats.torchtitan import rename_from_torchtitan
from portable.converters.names.known_words import find_unknown_names
from portable.converters.names.name_rules import get_default_rules, select_used_rules, sort_naturally
from portable.converters.names.published_names import are_memory_names, arrange_for_files, arrange_for_memory
from portable.converters.naming import rename_to_live
from portable.converters.storage.byte_sources import InMemorySource
from portable.converters.tensors.arrangements import (
    arrange_source,
    build_arranged_tensor,
    chunk_arrangement,
    concat_arrangements,
)
from portable.converters.tensors.tensor import Box, Tensor, View, compute_row_major_strides
from tests import published_names
from tests.converters.compare import error_of
from tests.converters.making import written_by
from tests.tiny_models import tiny_config, tiny_model

transformers: Any = pytest.importorskip("transformers")

# One model type for each kind of conversion.
SOME = [
    "deepseek_v3",  # stacked experts
    "gpt_neox",  # a rule that only applies to one class
    "hy_v3",  # renamed shared experts
    "kimi_linear",  # convolutions that are concatenated in memory
    "lara_mini",  # projections that are split into unequal parts
    "mixtral",  # other expert names
    "nemotron_h",  # another prefix and experts without gates
    "qwen3_5_moe_text",  # a prefix that only some files use
]
DENSE_LAYERS = (r"block_sparse_moe(\.(gate|up|down)_proj)", r"mlp\1")
"""Renaming of the layers without experts of Kimi Linear, which transformers saves as ``block_sparse_moe``."""
TOWER = (r"vision_tower\.(?!vision_model\.)", "vision_tower.vision_model.")
"""Renaming of the vision towers, whose names of transformers 5 neither transformers 4 nor servers find."""
CANNOT_BE_SMALL = ("dots3_note", "musicgen", "musicgen_melody", "qwen4_exp_text")
COMPOSITE = [("gemma3", "AutoModelForImageTextToText"), ("qwen3_vl_moe", "AutoModelForImageTextToText")]


def list_all_types() -> list[str]:
    """Return the causal model types whose names or tensors are converted."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    table = json.loads(published_names.FILE.read_bytes())
    changed = {name.split()[0] for name in table["classes"]} | table["keys"].keys()
    # transformers saves dory with other names than it loads.
    excluded = {*SOME, *CANNOT_BE_SMALL, "dory"}
    return [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in changed - excluded]


def split_among_ranks(name: str, tensor: torch.Tensor) -> Tensor:
    """Return a tensor that is split along its first dimension, as three ranks would save it."""
    tensor = tensor.detach().contiguous()
    values = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    kinds = {torch.float32: "F32", torch.int64: "I64", torch.bool: "BOOL"}
    strides, shape = compute_row_major_strides(tensor.shape, tensor.element_size()), tuple(tensor.shape)
    if not shape or shape[0] < 3:
        return Tensor.from_source(name, kinds[tensor.dtype], shape, InMemorySource(values))
    boxes, low = [], 0
    for size in (1, 1, shape[0] - 2):
        data = values[low * strides[0] : (low + size) * strides[0]]
        boxes.append(
            Box((low, *(0 for _ in shape[1:])), (size, *shape[1:]), View(InMemorySource(data), 0, strides))
        )
        low += size
    return Tensor(name, kinds[tensor.dtype], shape, boxes)


def check_like_transformers(model: Any) -> None:
    """Compare both directions with the conversion of the state dict by transformers."""
    from transformers.core_model_loading import revert_weight_conversion

    state = {
        name: torch.randn(t.shape) if t.is_floating_point() else t for name, t in model.state_dict().items()
    }
    wanted = {
        re.sub(*TOWER, re.sub(*DENSE_LAYERS, name)): value
        for name, value in revert_weight_conversion(model, dict(state)).items()
    }
    rules = get_default_rules({**model.config.to_dict(), "architectures": [type(model).__name__]})
    assert rules is not None
    live, files = ({name: tuple(t.shape) for name, t in tensors.items()} for tensors in (state, wanted))
    stored = {name: split_among_ranks(name, tensor) for name, tensor in state.items()}
    written = {
        name: build_arranged_tensor(name, values, stored)
        for name, values in arrange_for_files(live, rules).items()
    }
    assert written.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert np.array_equal(written[name].read(), tensor.numpy()), name
    assert find_unknown_names([*live, *files], rules.config) == []
    assert are_memory_names(live, rules) == (live != files)
    assert not are_memory_names(files, rules)
    stored = {name: split_among_ranks(name, tensor) for name, tensor in wanted.items()}
    loaded = {
        name: build_arranged_tensor(name, values, stored)
        for name, values in arrange_for_memory(files, rules, live).items()
    }
    assert loaded.keys() == state.keys()
    for name, tensor in state.items():
        assert np.array_equal(loaded[name].read(), tensor.numpy()), name


@pytest.mark.parametrize(
    "model_type", [*SOME, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in list_all_types())]
)
def test_published_names_and_values_match_save_pretrained(model_type: str) -> None:
    check_like_transformers(tiny_model(model_type))


def test_published_names_of_layers_without_experts_follow_base() -> None:
    """transformers renames the layers without experts of Kimi Linear, unlike published files and servers."""
    model = tiny_model("kimi_linear")
    rules = get_default_rules({**model.config.to_dict(), "architectures": [type(model).__name__]})
    assert rules is not None
    live = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    published = [*arrange_for_files(live, rules)]
    saved = [name.replace("layers.0.mlp.", "layers.0.block_sparse_moe.") for name in published]
    assert "model.layers.0.mlp.up_proj.weight" in published
    assert any(name.startswith("model.layers.1.block_sparse_moe.experts.0.") for name in published)
    for base in (published, saved):
        assert [*arrange_for_files(live, select_used_rules(rules, base))] == base


@pytest.mark.parametrize("maker", ["some", pytest.param("every", marks=pytest.mark.exhaustive)])
def test_converted_sharded_checkpoints_match_save_pretrained(
    maker: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """DCP, FSDP rank files, ZeRO-2 and ZeRO-3 get the names, shapes, and values of ``save_pretrained``."""
    pytest.importorskip("deepspeed")
    folder = written_by(f"make_types.{maker}", tmp_path_factory)
    for model in sorted(folder.iterdir()):
        saved = load_file(model / "pretrained" / "model.safetensors")
        wanted = {re.sub(*DENSE_LAYERS, name): value for name, value in saved.items()}
        for form in ("dcp", "fsdp-ranks", "zero2", "zero3"):
            out = tmp_path / model.name / form
            assert main([str(model / form), str(out), "--quiet"]) == 0
            converted = load_file(out / "model.safetensors")
            assert converted.keys() == wanted.keys(), (model.name, form)
            for name, tensor in wanted.items():
                assert torch.equal(converted[name], tensor), (model.name, form, name)


@pytest.mark.parametrize(("model_type", "head"), COMPOSITE)
def test_published_names_of_composite_models_match_save_pretrained(model_type: str, head: str) -> None:
    settings = tiny_config(model_type)
    settings["vision_config"] |= {"depth": 1, "num_hidden_layers": 1, "deepstack_visual_indexes": [0]}
    settings.pop("model_type")
    config = transformers.AutoConfig.for_model(model_type, **settings)
    with torch.device("meta"):
        model = getattr(transformers, head).from_config(config)
    check_like_transformers(model.to_empty(device="cpu"))


def test_published_name_rules_match_transformers() -> None:
    from transformers import conversion_mapping

    table = json.loads(published_names.FILE.read_bytes())
    rules: list[dict[str, Any]] = []
    keys = {
        key: published_names.number_rules(transforms, rules, {})
        for key, transforms in conversion_mapping._build_checkpoint_conversion_mapping().items()
    }
    wanted = {key: [rules[i] for i in numbers] for key, numbers in keys.items()}
    stored = {key: [table["rules"][i] for i in numbers] for key, numbers in table["keys"].items()}
    assert stored == json.loads(json.dumps(wanted)), "run python -m tests.published_names"
    for name in ("gemma3 Gemma3ForConditionalGeneration", "gpt_neox GPTNeoXForCausalLM"):
        model_type, named = name.split()
        assert table["classes"][name]["parts"] == published_names.find_submodels(
            getattr(transformers, named), model_type
        )


@pytest.mark.exhaustive
def test_published_name_table_matches_transformers() -> None:
    assert json.loads(json.dumps(published_names.build_table())) == json.loads(
        published_names.FILE.read_bytes()
    )


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a DCP checkpoint with optimizer state, and with the output of ``save_pretrained``."""
    folder = tmp_path_factory.mktemp("mixtral")
    model = tiny_model("mixtral", tie_word_embeddings=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    optimizer.step()
    state, moments = get_state_dict(model, optimizer)
    dcp_save({"model": state, "optimizer": moments}, checkpoint_id=folder / "dcp")
    model.config.save_pretrained(folder / "dcp")
    model.save_pretrained(folder / "pretrained")
    torch.save(moments, folder / "moments.pt")
    return folder


def test_dcp_checkpoint_gets_published_names(mixtral: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main([str(mixtral / "dcp"), str(out), "--optimizer", "--verify", "--quiet"]) == 0
    converted, wanted = (load_file(folder / "model.safetensors") for folder in (out, mixtral / "pretrained"))
    assert converted.keys() == wanted.keys()
    assert all(torch.equal(converted[name], tensor) for name, tensor in wanted.items())
    moments = torch.load(mixtral / "moments.pt", weights_only=True)["state"]
    written = load_file(out / "optimizer.safetensors")
    stacked = moments["model.layers.1.mlp.experts.gate_up_proj"]["exp_avg_sq"]
    half = stacked.shape[1] // 2
    name = "model.layers.1.block_sparse_moe.experts.2.{}.weight"
    assert torch.equal(written[name.format("w1") + ".exp_avg_sq"], stacked[2, :half])
    assert torch.equal(written[name.format("w3") + ".exp_avg_sq"], stacked[2, half:])
    assert float(written[name.format("w3") + ".step"]) == 1
    (group,) = json.loads((out / "optimizer.json").read_text())["param_groups"]
    assert set(group["params"]) == wanted.keys()


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ({}, "w1.weight has no optimizer state"),
        ({"step": 1}, "have different kinds of optimizer state"),
    ],
)
def test_names_live_needs_equal_kinds_of_optimizer_state(
    state: dict[str, Any], why: str, mixtral: Path
) -> None:
    source = open_checkpoint(mixtral / "pretrained")
    states: dict[str, Any] = {name: {"step": 1, "exp_avg": value} for name, value in source.tensors.items()}
    damaged = next(name for name in states if name.endswith("experts.1.w1.weight"))
    states = {name: state if name == damaged else value for name, value in states.items()}
    if not state:
        del states[damaged]
    optimizer = OptimizerState(states, [{"params": list(source.tensors)}])
    checkpoint = source.with_names("stored", source.tensors, source.aliases, lambda _: optimizer)
    with pytest.raises(CheckpointError, match=rf"{why}; leave out --names live to keep"):
        _ = rename_to_live(checkpoint).optimizer


def test_convert_names_live_restores_names_in_memory(mixtral: Path, tmp_path: Path) -> None:
    live = {name: tensor.read() for name, tensor in open_checkpoint(mixtral / "dcp").tensors.items()}
    for source in ("dcp", "pretrained"):
        out = tmp_path / source
        assert main([str(mixtral / source), str(out), "--names", "live", "--quiet"]) == 0
        converted = load_file(out / "model.safetensors")
        assert converted.keys() == live.keys()
        assert all(np.array_equal(converted[name].numpy(), values) for name, values in live.items())
    write_safetensors(open_checkpoint(mixtral / "dcp"), tmp_path / "api")
    assert load_file(tmp_path / "api" / "model.safetensors").keys() != live.keys()
    write_safetensors(open_checkpoint(mixtral / "dcp"), tmp_path / "stored", names="stored")
    assert load_file(tmp_path / "stored" / "model.safetensors").keys() == live.keys()


def test_diff_compares_live_and_published_names(mixtral: Path, tmp_path: Path) -> None:
    assert main(["diff", str(mixtral / "dcp"), str(mixtral / "pretrained")]) == 0
    (tmp_path / "dcp").mkdir()
    for path in (mixtral / "dcp").iterdir():
        if path.name != "config.json":  # The other checkpoint has the config.
            (tmp_path / "dcp" / path.name).write_bytes(path.read_bytes())
    assert main(["diff", str(mixtral / "pretrained"), str(tmp_path / "dcp")]) == 0


def test_convert_keeps_published_names(mixtral: Path, tmp_path: Path) -> None:
    assert main([str(mixtral / "pretrained"), str(tmp_path / "out"), "--quiet"]) == 0
    before, after = (
        (folder / "model.safetensors").read_bytes() for folder in (mixtral / "pretrained", tmp_path / "out")
    )
    assert len(before) == len(after)
    assert (
        load_file(tmp_path / "out" / "model.safetensors").keys()
        == load_file(mixtral / "pretrained" / "model.safetensors").keys()
    )


def test_config_from_keeps_old_names(tmp_path: Path) -> None:
    """The files in the folder of the config use the parameter names of an older release."""
    model = tiny_model("bert", "AutoModelForMaskedLM")
    model.save_pretrained(tmp_path / "base")
    path = tmp_path / "base" / "model.safetensors"
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in load_file(path).items()
    }
    save_file(old, path, {"format": "pt"})
    dcp_save({"model": get_model_state_dict(model)}, checkpoint_id=tmp_path / "dcp")
    argv = [str(tmp_path / "dcp"), str(tmp_path / "out"), "--config-from", str(tmp_path / "base"), "--quiet"]
    assert main(argv) == 0
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == old.keys()


TORCHTITAN = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "model.layers": "layers",
    "self_attn.q_proj": "attention.qkv_linear.wq",
    "self_attn.k_proj": "attention.qkv_linear.wk",
    "self_attn.v_proj": "attention.qkv_linear.wv",
    "self_attn.o_proj": "attention.wo",
    "self_attn": "attention",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate.": "moe.router.gate.",
    "mlp.router.": "moe.router.gate.",
    "mlp.experts.gate_proj.weight": "moe.routed_experts.inner_experts.w1_EFD",
    "mlp.experts.down_proj.weight": "moe.routed_experts.inner_experts.w2_EDF",
    "mlp.experts.up_proj.weight": "moe.routed_experts.inner_experts.w3_EFD",
    "mlp.experts.gate_up_proj_bias": "moe.routed_experts.inner_experts.mlp1_bias_EG",
    "mlp.experts.down_proj_bias": "moe.routed_experts.inner_experts.mlp2_bias_ED",
    "mlp.experts.gate_up_proj": "moe.routed_experts.inner_experts.mlp1_weight_EGD",
    "mlp.experts.down_proj": "moe.routed_experts.inner_experts.mlp2_weight_EDF",
}
META = {**TORCHTITAN, "lm_head": "output", "attention.qkv_linear.": "attention."}


def convert_to_torchtitan(
    tensors: dict[str, torch.Tensor], config: Any, table: dict[str, str]
) -> dict[str, torch.Tensor]:
    """Convert published tensors as the ``from_hf`` methods of torchtitan's adapters do."""
    stacks: dict[str, list[torch.Tensor]] = {}
    for name, tensor in sort_layers(tensors):
        if config.model_type == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            pairs = tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2)
            tensor = pairs.reshape(tensor.shape)
        if config.model_type == "gpt_oss" and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensor = tensor.transpose(1, 2)
        stack_name = re.sub(r"experts\.\d+\.", "experts.", name)
        for old, new in table.items():
            stack_name = stack_name.replace(old, new)
        stacks.setdefault(stack_name, []).append(tensor)
    return {
        name: torch.stack(parts) if "w1_" in name or "w2_" in name or "w3_" in name else parts[0].contiguous()
        for name, parts in stacks.items()
    }


def sort_layers(tensors: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """Return tensors in the natural order of their names."""
    return [(name, tensors[name]) for name in sort_naturally(tensors)]


@pytest.mark.parametrize(
    ("model_type", "table", "form"),
    [
        ("llama", TORCHTITAN, "dcp"),
        ("llama", META, "consolidated.00.pth"),
        ("qwen3", TORCHTITAN, "dcp"),
        ("qwen3_moe", TORCHTITAN, "dcp"),
        ("gpt_oss", TORCHTITAN, "dcp"),
    ],
)
def test_convert_of_torchtitan_and_meta_names_gives_published_names(
    model_type: str, table: dict[str, str], form: str, tmp_path: Path
) -> None:
    model = tiny_model(model_type)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(tmp_path / "base")
    wanted = load_file(tmp_path / "base" / "model.safetensors")
    stored = convert_to_torchtitan(wanted, model.config, table)
    source = tmp_path / "source"
    if form == "dcp":
        optimizer: dict[str, Any] = {}
        for name, tensor in stored.items():
            optimizer |= {f"state.{name}.step": torch.tensor(3.0), f"state.{name}.exp_avg": tensor * 2}
            optimizer |= {f"param_groups.{name}.lr": 0.5}
        dcp_save({**stored, "optimizer": optimizer}, checkpoint_id=source, no_dist=True)
    else:
        source.mkdir()
        torch.save({**stored, "rope.freqs": torch.ones(4)}, source / form)
    argv = ["--config-from", str(tmp_path / "base"), "--quiet", "--verify"]
    argv += ["--optimizer"] if form == "dcp" else []
    for target in ("safetensors", "torch"):
        out = tmp_path / target
        assert main([str(source), str(out), "--to", target, *argv]) == 0
        converted = {name: torch.from_numpy(t.read()) for name, t in open_checkpoint(out).tensors.items()}
        assert converted.keys() == wanted.keys()
        assert all(torch.equal(converted[name], tensor) for name, tensor in wanted.items())
    live = tmp_path / "live"
    assert main([str(source), str(live), "--names", "live", *argv]) == 0
    assert load_file(live / "model.safetensors").keys() == model.state_dict().keys()
    if form == "dcp":
        states = load_file(tmp_path / "safetensors" / "optimizer.safetensors")
        assert all(torch.equal(states[f"{name}.exp_avg"], tensor * 2) for name, tensor in wanted.items())
        assert all(states[f"{name}.step"] == 3 for name in wanted)
        groups = json.loads((tmp_path / "safetensors" / "optimizer.json").read_text())["param_groups"]
        assert {name for group in groups for name in group["params"]} == wanted.keys()
    if model_type == "llama":
        argv = [*argv[:3], "--to", "gguf"]
        assert main([str(source), str(tmp_path / "x.gguf"), *argv]) == 0
        assert main([str(tmp_path / "base"), str(tmp_path / "y.gguf"), *argv]) == 0
        x, y = (read_gguf(tmp_path / name) for name in ("x.gguf", "y.gguf"))
        assert x.keys() == y.keys() and all(np.array_equal(x[name], y[name]) for name in x)


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ({"layers.0.attention.wq.bias": range(8)}, [0, 2, 1, 3, 4, 6, 5, 7]),
        ({"layers.0.attention.wk.bias": range(4)}, [0, 2, 1, 3]),
        ({"layers.0.attention.wv.bias": range(4)}, [0, 1, 2, 3]),
        ({"output.weight": [1], "lm_head.weight": [2]}, "output.weight and lm_head.weight would both get"),
    ],
)
def test_rename_from_torchtitan_permutes_biases_and_rejects_equal_names(
    stored: dict[str, Any], expected: list[int] | str, tmp_path: Path
) -> None:
    config = {"model_type": "llama", "num_attention_heads": 2, "num_key_value_heads": 1}
    tensors = {name: torch.tensor([*values], dtype=torch.float32) for name, values in stored.items()}
    torch.save({"tok_embeddings.weight": torch.zeros(2, 2), **tensors}, tmp_path / "m.pt")
    checkpoint = open_checkpoint(tmp_path / "m.pt")
    if isinstance(expected, str):
        with pytest.raises(CheckpointError, match=expected):
            rename_from_torchtitan(checkpoint, config)
        return
    renamed = rename_from_torchtitan(checkpoint, config)
    ((_, bias),) = [(name, t) for name, t in renamed.tensors.items() if name.endswith(".bias")]
    assert bias.read().tolist() == expected


def test_rename_from_torchtitan_of_tied_names_keeps_every_tensor(tmp_path: Path) -> None:
    embedding, head = torch.zeros(2, 2), torch.ones(2, 2)

    def rename(**tensors: torch.Tensor) -> Checkpoint:
        torch.save({name.replace("_weight", ".weight"): t for name, t in tensors.items()}, tmp_path / "m.pt")
        return rename_from_torchtitan(open_checkpoint(tmp_path / "m.pt"), {"model_type": "llama"})

    two_heads = rename(tok_embeddings_weight=embedding, output_weight=head, lm_head_weight=head)
    assert two_heads.tensors.keys() == {"model.embed_tokens.weight", "lm_head.weight"}
    three_names = rename(tok_embeddings_weight=embedding, output_weight=embedding, lm_head_weight=embedding)
    assert three_names.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    with pytest.raises(CheckpointError, match=r"output.weight and lm_head.weight would both get the name"):
        rename(tok_embeddings_weight=embedding, output_weight=head, lm_head_weight=embedding)


@pytest.mark.parametrize(
    ("prefix", "layer"),
    [
        ("transformer.h", "attn.qkv"),  # litgpt
        ("blocks", "attention.w_q"),  # OLMo-core
        ("model.decoder", "pp_block.attn.qkv_proj"),  # nanotron
        ("policy.model.layers", "self_attn.q_proj"),
    ],
)
def test_convert_reports_names_of_other_programs(
    prefix: str, layer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "source").mkdir()
    tiny_model("llama").config.save_pretrained(tmp_path / "source")
    stored = {f"{prefix}.{i}.{layer}.weight": torch.ones(8, 8) for i in range(2)}
    torch.save(stored, tmp_path / "source" / "pytorch_model.bin")
    argv = [str(tmp_path / "source"), str(tmp_path / "out")]
    assert main(argv) == 0
    printed = capsys.readouterr()
    assert "load it with" not in printed.out
    assert printed.err.startswith("warning: ") and "'llama'" in printed.err
    line = error_of(capsys, argv[0], tmp_path / "x.gguf", "--to", "gguf")
    assert "the transformers model type llama has no tensor with the name" in line


@pytest.mark.exhaustive
def test_module_words_match_transformers() -> None:
    from tests import module_words

    words = json.loads(module_words.FILE.read_bytes())
    for model_type in (*SOME, "llama", "bert", "gemma3", "whisper", "gpt_oss"):
        assert set(words[model_type].split()) == module_words.find_words(model_type)


def read_gguf(file: Path) -> dict[str, Any]:
    import gguf

    return {tensor.name: tensor.data for tensor in gguf.GGUFReader(file).tensors}


@pytest.mark.parametrize(
    ("shape", "name", "problem"),
    [
        ((1 << 30, 1, 1), "down_proj", "experts, but at most"),
        ((), "down_proj", "does not have the shape"),
        ((), "gate_up_proj", r"shape \[\] has no dimension 1"),
        ((4,), "gate_up_proj", r"shape \[4\] has no dimension 1"),
    ],
)
def test_experts_of_another_shape_are_an_error(shape: tuple[int, ...], name: str, problem: str) -> None:
    config = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
    rules = get_default_rules(config)
    assert rules is not None
    with pytest.raises(CheckpointError, match=problem):
        arrange_for_files({f"model.layers.0.mlp.experts.{name}": shape}, rules)


@pytest.mark.parametrize("dim", [-3, 1, 2])
def test_arrangements_of_other_shapes_are_an_error(dim: int) -> None:
    matrix, row = arrange_source("a", (2, 3)), arrange_source("b", (2,))
    with pytest.raises(CheckpointError, match=r"cannot concatenate|no dimension"):
        concat_arrangements([matrix, row], dim)


@pytest.mark.parametrize(("length", "count"), [(0, 2), (1, 2), (5, 4)])
def test_chunks_that_torch_would_omit_are_an_error(length: int, count: int) -> None:
    with pytest.raises(CheckpointError, match=f"into {count} chunks"):
        chunk_arrangement(arrange_source("a", (length, 3)), 0, count)


def test_error_names_optimizer_state_of_another_shape(
    mixtral: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    optimizer = torch.load(mixtral / "moments.pt", weights_only=True)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    optimizer["state"][name]["exp_avg"] = torch.zeros(3)
    state = {
        key: torch.from_numpy(value.read().copy())
        for key, value in open_checkpoint(mixtral / "dcp").tensors.items()
    }
    dcp_save({"model": state, "optimizer": optimizer}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    (tmp_path / "dcp" / "config.json").write_text((mixtral / "dcp" / "config.json").read_text())
    line = error_of(capsys, tmp_path / "dcp", tmp_path / "out", "--optimizer")
    assert "exp_avg" in line and "has shape [3]" in line


STACK, EXPERT = "mlp.experts.down_proj", "block_sparse_moe.experts.0.w2.weight"


@pytest.mark.parametrize(
    ("arrange", "model_type", "shapes", "reason"),
    [
        (arrange_for_files, "mixtral", {STACK: (1, 4, 6), EXPERT: (4, 6)}, "several tensors would get"),
        (arrange_for_memory, "mixtral", {STACK: (1, 4, 6), EXPERT: (4, 6)}, "would get the same name"),
        (
            arrange_for_files,
            "ernie4_5_vl_moe",
            {"mlp.text_moe.experts.down_proj": (1, 4, 6)},
            "'vision_moe.experts.down_proj', which are missing",
        ),
    ],
    ids=["twice in files", "twice in memory", "missing"],
)
def test_duplicate_or_missing_experts_are_errors(
    arrange: Callable[..., Any], model_type: str, shapes: dict[str, tuple[int, ...]], reason: str
) -> None:
    rules = get_default_rules({"model_type": model_type})
    assert rules is not None
    with pytest.raises(CheckpointError, match=reason):
        arrange({f"model.layers.0.{name}": shape for name, shape in shapes.items()}, rules)
