"""Models: configs, initial weights as drawn by transformers, and pretrained weights."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, PreTrainedModel

from portable.config import load_config
from portable.errors import UserError
from portable.model import build as models
from portable.model import pretrained
from portable.model.deferred_init import InitializationRecording
from portable.model.initialize import InitialWeights
from portable.model.parameters import get_state_tensors
from portable.model.pretrained import PretrainedWeights, load_pretrained_weights
from tests.tiny_models import tiny_config

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
UNTIED = {**SMALL, "tie_word_embeddings": False}
MOE = {**SMALL, "num_key_value_heads": 2, "num_experts_per_tok": 2, "num_local_experts": 4}


def chosen(task: str = "causal-lm", **model: Any) -> Any:
    """Return the ``model`` section."""
    data = {} if task == "causal-lm" else {"data": {"source": "text.jsonl"}}
    return load_config({"model": {"task": task, **model}, **data}).model


def built(settings: Any) -> Any:
    return models.build_model_on_meta(models.load_model_config(settings), settings)


# -- initial weights ---------------------------------------------------------------------------------------

# Models with special initialization: in a constructor, in the parent model, by depth, or before a tie.
ARCHITECTURES = [
    ("llama", "causal-lm"),
    ("gpt2", "causal-lm"),
    ("openai-gpt", "causal-lm"),  # a layer's matrices are drawn by its constructor
    ("apertus", "causal-lm"),  # an activation with parameters
    ("falcon_h1", "causal-lm"),  # the model's rule depends on its layers
    ("mamba2", "causal-lm"),
    ("gpt_oss", "causal-lm"),
    ("zamba2", "causal-lm"),  # layers that share weights
    ("modernbert", "masked-lm"),  # the head has another rule than the table it is tied to
    ("roberta", "masked-lm"),  # a padding row
    ("funnel", "masked-lm"),
    ("t5", "seq2seq-lm"),
    ("bart", "seq2seq-lm"),
    ("bert", "sequence-classification"),
]


def blueprint(model_type: str, task: str) -> InitialWeights:
    return InitialWeights.from_model(built(chosen(task, config=tiny_config(model_type))))


def draw_all(ours: InitialWeights, **sizes: int) -> dict[str, torch.Tensor]:
    """Draw all weights by name."""
    weights = ours.build_lazy_weights(3, **sizes)
    assert ours.recording_failure is None
    return {name: torch.from_numpy(weight.read().copy()) for name, weight in weights.items()}


def draw_index(shape: tuple[int, ...], draws: torch.Generator) -> tuple[slice, ...]:
    """Draw a random slice of each dimension, which may be empty."""
    bounds = [sorted(torch.randint(0, size + 1, (2,), generator=draws).tolist()) for size in shape]
    return tuple(slice(*pair) for pair in bounds)


def reference(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    kind: Any = type(model)
    torch.manual_seed(3)
    return {n: t.detach() for n, t in get_state_tensors(kind._from_config(model.config)).items()}


def unlike(ours: torch.Tensor, theirs: torch.Tensor) -> str | None:
    """Describe the difference of two draws that should have one distribution, or return None.

    The tolerance is six standard errors.
    """
    if ours.shape != theirs.shape:
        return f"shape {list(ours.shape)} for {list(theirs.shape)}"
    ours, theirs, size = ours.double(), theirs.double(), max(theirs.numel(), 1)
    if size < 2 or float(theirs.std()) == 0:
        same = torch.allclose(ours, theirs, atol=0.1) if size < 2 else torch.equal(ours, theirs)
        return None if same else f"{ours.flatten()[:2].tolist()} for {theirs.flatten()[:2].tolist()}"
    if size < 16:  # too few for a spread
        return None if float(ours.std()) > 0 else "all the same"
    spread, mean = float(theirs.std()), float(theirs.mean())
    if abs(float(ours.std()) - spread) > 6 * spread / math.sqrt(size):
        return f"std {float(ours.std()):.4g} for {spread:.4g}"
    if abs(float(ours.mean()) - mean) > 6 * spread * math.sqrt(2 / size):
        return f"mean {float(ours.mean()):.4g} for {mean:.4g}"
    zeros = float((ours == 0).double().mean()), float((theirs == 0).double().mean())
    return None if abs(zeros[0] - zeros[1]) < 0.01 else f"{zeros[0]:.0%} zeros for {zeros[1]:.0%}"


@pytest.mark.parametrize(("model_type", "task"), ARCHITECTURES)
def test_initial_weights_match_from_config(model_type: str, task: str) -> None:
    ours = blueprint(model_type, task)
    theirs = reference(ours.model)
    at_once = draw_all(ours)
    assert at_once.keys() == theirs.keys()
    assert [name for name in theirs if not torch.equal(at_once[name], theirs[name])] == []
    in_slices = draw_all(ours, max_whole_bytes=0, min_recorded_elements=1)
    assert in_slices.keys() == theirs.keys()
    differences = {name: unlike(in_slices[name], tensor) for name, tensor in theirs.items()}
    assert {name: how for name, how in differences.items() if how} == {}
    draws = torch.Generator().manual_seed(0)
    for name, weight in ours.build_lazy_weights(3, max_whole_bytes=0, min_recorded_elements=1).items():
        index = draw_index(weight.shape, draws)
        assert torch.equal(torch.from_numpy(weight.read(index).copy()), in_slices[name][index]), (name, index)


def test_initial_weights_of_rank_draw_only_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"vocab_size": 4096, "hidden_size": 1024, "intermediate_size": 4096}
    model = built(chosen(config={"model_type": "llama", **SMALL, **sizes}))
    computed = []
    fill = InitializationRecording._apply_writes_to_tile

    def fill_tile(self: InitializationRecording, tile: torch.Tensor, *rest: Any) -> None:
        computed.append(tile.numel())
        fill(self, tile, *rest)

    monkeypatch.setattr(InitializationRecording, "_apply_writes_to_tile", fill_tile)
    weights = InitialWeights.from_model(model).build_lazy_weights(3, max_whole_bytes=0)
    for ranks in (1, 4, 64):
        computed.clear()
        for weight in weights.values():
            rows = slice(0, -(-weight.shape[0] // ranks))
            weight.read((rows, *(slice(0, size) for size in weight.shape[1:])))
        assert sum(computed) <= 1.02 * sum(p.numel() for p in model.parameters()) / ranks


def initialize_by_views(model: PreTrainedModel) -> None:
    """Initialize by operations on full tensors, views and copies."""
    first, second = model.model.layers
    torch.nn.init.orthogonal_(first.self_attn.q_proj.weight)
    torch.nn.init.sparse_(first.mlp.down_proj.weight, 0.5)
    with torch.no_grad():
        first.mlp.up_proj.weight[:, ::2] = 7.0
        first.mlp.up_proj.weight[3] *= 2
        second.mlp.up_proj.weight.copy_(first.mlp.up_proj.weight.clone() + 1)
        second.mlp.gate_proj.weight.data = first.mlp.down_proj.weight.new_full((32, 48), 3.0).T
        if float(second.mlp.down_proj.weight.abs().max()) > 0:  # depends on values
            second.mlp.down_proj.weight.fill_(5)


def fill_by_numpy(model: PreTrainedModel) -> None:
    if not model.lm_head.weight.is_meta:
        model.lm_head.weight.detach().numpy()[:] = 1


def test_initial_weights_of_any_operation_match_in_slices() -> None:
    settings = chosen(config={"model_type": "llama", **UNTIED})
    ours = InitialWeights.from_model(built(settings), f"{__name__}:initialize_by_views")
    weights = draw_all(ours, max_whole_bytes=0, min_recorded_elements=1)
    first, second = "model.layers.0.", "model.layers.1."
    q, up = weights[f"{first}self_attn.q_proj.weight"], weights[f"{first}mlp.up_proj.weight"]
    torch.testing.assert_close(q @ q.T, torch.eye(32))
    assert 0.4 < (weights[f"{first}mlp.down_proj.weight"] == 0).double().mean() < 0.6
    even, odd = up[:, ::2], up[:, 1::2]
    assert (even[3] == 14).all() and (even[4:] == 7).all() and 0 < odd.std() < 0.1
    assert torch.equal(weights[f"{second}mlp.up_proj.weight"], up + 1)
    assert (weights[f"{second}mlp.gate_proj.weight"] == 3).all()
    assert (weights[f"{second}mlp.down_proj.weight"] == 5).all()
    draws = torch.Generator().manual_seed(0)
    for name, weight in ours.build_lazy_weights(3, max_whole_bytes=0, min_recorded_elements=1).items():
        index = draw_index(weight.shape, draws)
        assert torch.equal(torch.from_numpy(weight.read(index).copy()), weights[name][index]), name


def test_sum_of_tensors_without_writes_is_computed() -> None:
    """The last tiles of the two storages have different sizes."""
    recording = InitializationRecording(0)
    with recording.record_operations():
        total = torch.zeros(100, 300).view(-1)[:30000] + torch.zeros(50, 700).view(-1)[:30000]
    assert not recording.build_deferred_tensor(total).read().any()


def test_initial_weights_fall_back_to_full_computation() -> None:
    ours = InitialWeights.from_model(
        built(chosen(config={"model_type": "llama", **UNTIED})), f"{__name__}:fill_by_numpy"
    )
    whole = draw_all(ours)
    assert (whole["lm_head.weight"] == 1).all()
    weights = ours.build_lazy_weights(3, max_whole_bytes=0, min_recorded_elements=1)
    assert ours.recording_failure is not None
    assert all(torch.equal(whole[name], torch.from_numpy(w.read())) for name, w in weights.items())


def test_large_buffers_are_computed() -> None:
    """GPT-Neo's masks have an element for each pair of positions."""
    sizes = {"max_position_embeddings": 2100, "hidden_size": 32, "num_layers": 2, "num_heads": 2}
    config = {**sizes, "vocab_size": 96, "attention_types": [[["global", "local"], 1]]}
    model = built(chosen(config={"model_type": "gpt_neo", **config}))
    theirs = dict(type(model)._from_config(model.config).named_buffers())
    ours = dict(model.named_buffers())
    assert ours.keys() == theirs.keys() and max(b.numel() for b in ours.values()) > 1 << 22
    assert all(torch.equal(ours[name], buffer) for name, buffer in theirs.items())


# -- configs -----------------------------------------------------------------------------------------------

PUBLISHED = {
    "architectures": ["T5ForConditionalGeneration"],
    "decoder_start_token_id": 0,
    "gradient_checkpointing": False,
    "n_positions": 512,
    "num_beams": 4,
    "output_past": True,
    "task_specific_params": {"summarization": {"prefix": "summarize: "}},
    "torch_dtype": "float32",
    "transformers_version": "4.6.0",
}


def test_model_config_accepts_published_keys(tmp_path: Path) -> None:
    """Keys for generation and for old programs have no effect."""
    settings = chosen("seq2seq-lm", config={"model_type": "t5", **PUBLISHED})
    config = models.load_model_config(settings)
    assert config.decoder_start_token_id == 0
    config.save_pretrained(tmp_path)
    models.build_model_on_meta(config, settings)


@pytest.mark.parametrize(
    ("task", "model", "told"),
    [
        ("seq2seq-lm", {"config": {"model_type": "gpt2"}}, "model.task: seq2seq-lm needs an encoder-decoder"),
        ("causal-lm", {"config": {"model_type": "musicgen"}}, "model.config: Multiple valid text configs"),
        (
            "seq2seq-lm",
            {"config": {"model_type": "t5", "numm_beams": 4}},
            r"model\.config\.numm_beams: T5Config has no such setting",
        ),
        (
            "causal-lm",
            {"config": {"model_type": "llama", **SMALL}, "experts": "eager"},
            "model.experts: LlamaForCausalLM has no experts in stacked tensors",
        ),
    ],
)
def test_build_model_rejects_model_of_other_task(task: str, model: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=f"^{told}"):
        built(chosen(task, **model))


# -- pretrained weights ------------------------------------------------------------------------------------

# Grouped by the conversion of transformers between the file and the model.
ARCHITECTURES_OF_FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neox": ("causal-lm", SMALL),  # another name for the head
    "mixtral": ("causal-lm", MOE),  # experts are stacked
    "llama": ("causal-lm", {**SMALL, "tie_word_embeddings": True}),
    "bert": ("masked-lm", SMALL),
    "t5": ("seq2seq-lm", {"vocab_size": 96, "d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 4}),
}


def saved(folder: Path, model_type: str, task: str, config: dict[str, Any]) -> Any:
    """Save random weights in the published layout of transformers."""
    import transformers

    auto: Any = getattr(transformers, models.AUTO_CLASSES[task])
    model = auto.from_config(AutoConfig.for_model(model_type, **config))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder, dtype=torch.float32)


def save_random(folder: Path, config: Any) -> Any:
    """Save a model of random numbers; return it as transformers loads it."""
    import transformers

    auto = (
        transformers.AutoModelForImageTextToText
        if "vl" in config.model_type
        else transformers.AutoModelForCausalLM
    )
    model: Any = auto.from_config(config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for tensor in get_state_tensors(model).values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder, dtype=torch.float32)


def read(weights: PretrainedWeights) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(weight.read().copy()) for name, weight in weights.tensors.items()}


@pytest.mark.parametrize(
    ("model_type", "translated"), [*((name, True) for name in ARCHITECTURES_OF_FILES), ("mixtral", False)]
)
def test_pretrained_weights_match_from_pretrained(
    model_type: str, translated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the conversion table of transformers cannot be read, transformers loads the weights."""
    task, config = ARCHITECTURES_OF_FILES[model_type]
    theirs = get_state_tensors(saved(tmp_path, model_type, task, config))
    settings = chosen(task, name_or_path=str(tmp_path))
    model = built(settings)

    def whole(*_: Any, **__: Any) -> None:
        raise AssertionError("the whole model was loaded into the host's memory")

    if translated:
        monkeypatch.setattr(type(model), "from_pretrained", whole)
    else:
        monkeypatch.setattr("portable.model.pretrained._translate_names", lambda *_: None)
    weights = load_pretrained_weights(settings, model)
    assert weights.build_notes() == []
    ours = read(weights)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    if model_type == "mixtral":
        name = "model.layers.1.mlp.experts.gate_up_proj"
        part = weights.tensors[name].read((slice(1, 3), slice(5, 9), slice(0, 32)))
        assert torch.equal(torch.from_numpy(part), theirs[name][1:3, 5:9])


ALL_MIXED: dict[str, Any] = {"first_k_dense_replace": 0, "n_routed_experts": 8, "n_group": 1, "topk_group": 1}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen3_moe": {},
    "gpt_oss": {},
    "qwen3_vl_moe": {},
    "jamba": {},
    "lfm2_moe": {},
    "deepseek_v3": ALL_MIXED,
    "glm4_moe": ALL_MIXED,
}


@pytest.mark.parametrize("model_type", MIXTURES)
def test_pretrained_weights_of_rank_read_only_its_experts(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP2 divides the experts. Shards of ZeRO-3 begin in the middle of an expert."""
    config: Any = AutoConfig.for_model(**{**tiny_config(model_type), **MIXTURES[model_type]})
    theirs = get_state_tensors(save_random(tmp_path, config))
    model = built(chosen(name_or_path=str(tmp_path)))
    read_elements: list[int] = []
    floats = pretrained._read_floats

    def count(*arguments: Any) -> torch.Tensor:
        values = floats(*arguments)
        read_elements.append(values.numel())
        return values

    monkeypatch.setattr(pretrained, "_read_floats", count)
    weights = load_pretrained_weights(chosen(name_or_path=str(tmp_path)), model)
    assert weights.missing == [] and weights.tensors.keys() == theirs.keys()
    draws = torch.Generator().manual_seed(0)
    stacked = 0
    for name, tensor in theirs.items():
        ours = weights.tensors[name]
        assert torch.equal(torch.from_numpy(ours.read().copy()), tensor), name
        for index in (draw_index(tuple(tensor.shape), draws), draw_index(tuple(tensor.shape), draws)):
            read_elements.clear()
            assert torch.equal(torch.from_numpy(ours.read(index).copy()), tensor[index]), (name, index)
            assert sum(read_elements) <= tensor[index].numel()
            stacked += bool(read_elements) and tensor.dim() == 3
    assert stacked or model_type in ("gpt_oss",)  # whose files contain stacked experts


def test_pretrained_base_model_loads_into_model_with_head(tmp_path: Path) -> None:
    """As in every fine-tuning, tensors that the checkpoint lacks are listed, and the others are loaded."""
    bert = built(chosen("masked-lm", config={"model_type": "bert", **SMALL}))
    base = AutoModel.from_config(bert.config)
    base.save_pretrained(tmp_path)
    weights = load_pretrained_weights(chosen("masked-lm", name_or_path=str(tmp_path)), bert)
    assert all(name.startswith("cls.") for name in weights.missing)
    key = "encoder.layer.0.attention.self.query.weight"
    assert torch.equal(torch.from_numpy(weights.tensors[f"bert.{key}"].read()), base.state_dict()[key])


def rewritten(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def replaced(tensors: dict[str, torch.Tensor]) -> None:
    tensors.clear()
    tensors["something.else"] = torch.ones(3)


def of_another_dtype(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.ones(48, 32, dtype=torch.int8)


def beheaded(tensors: dict[str, torch.Tensor]) -> None:
    tensors["a.head.of.old"] = tensors.pop("embed_out.weight")


Change = Callable[[dict[str, torch.Tensor]], object]
CANNOT_BE: list[tuple[str, Change, dict[str, Any], str]] = [
    ("gpt_neox", beheaded, {}, r"output head lm_head\.weight.* \(unused tensors: a\.head\.of\.old\)"),
    ("llama", replaced, {}, "none of the checkpoint's 1 tensors belongs to a LlamaForCausalLM"),
    ("llama", dict, {"hidden_size": 64}, "has shape .* in the checkpoint"),
    (
        "llama",
        dict,
        {"tie_word_embeddings": True},
        r"lm_head\.weight differ in the checkpoint, but config.json",
    ),
    ("llama", of_another_dtype, {}, r"up_proj\.weight is stored in .*use a checkpoint in float32"),
    (
        "llama",
        of_another_dtype,
        {"quantization_config": {"quant_method": "a new one"}},
        r"quantized \(a new one\)",
    ),
]
"""Checkpoints with other tensors or other settings, and the expected error."""


@pytest.mark.parametrize(("model_type", "change", "config", "told"), CANNOT_BE)
def test_load_pretrained_weights_rejects_other_tensors(
    model_type: str, change: Change, config: dict[str, Any], told: str, tmp_path: Path
) -> None:
    saved(tmp_path, model_type, "causal-lm", UNTIED)
    rewritten(tmp_path, change)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    settings = chosen(name_or_path=str(tmp_path))
    with pytest.raises(UserError, match=told):
        load_pretrained_weights(settings, built(settings))


# -- settings of published configs -------------------------------------------------------------------------


def test_model_config_accepts_published_rope_keys(tmp_path: Path) -> None:
    """transformers 5 stores rope_theta inside rope_parameters; published config.json files do not."""
    settings = {"model_type": "qwen3_moe", **MOE, "rope_theta": 5e5}
    config = models.load_model_config(chosen(config=settings))
    assert config.rope_parameters["rope_theta"] == 5e5
    AutoConfig.for_model("llama", **SMALL).save_pretrained(tmp_path)
    changed = models.load_model_config(chosen(name_or_path=str(tmp_path), config={"rope_theta": 7e5}))
    assert changed.rope_parameters["rope_theta"] == 7e5


YARN = {"factor": 4.0, "original_max_position_embeddings": 512}
BASE = {"rope_type": "default", "rope_theta": 3e4}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 3e4}
SCALED = {"rope_type": "yarn", **YARN, "rope_theta": 3e4}
BY_LAYER = {"full_attention": BASE, "sliding_attention": BASE}
TEXT: dict[str, Any] = {**UNTIED, "num_key_value_heads": 2, "head_dim": 8, "model_type": "qwen3"}
VISION = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def llava(**text: Any) -> dict[str, Any]:
    return {"text_config": {**TEXT, **text}, "vision_config": VISION}


MERGED: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ("qwen3", {"rope_parameters": BASE}, {"rope_scaling": {"rope_type": "yarn", **YARN}}, SCALED),
    ("qwen3", {"rope_parameters": BASE}, {"rope_scaling": {"type": "yarn", **YARN}}, SCALED),
    ("qwen3", {"rope_parameters": BASE}, {"rope_parameters": {"type": "yarn", **YARN}}, SCALED),
    (
        "qwen3",
        {"rope_parameters": BASE},
        {"rope_scaling": {"type": "yarn", **YARN}, "rope_theta": 7e4},
        {**SCALED, "rope_theta": 7e4},
    ),
    ("llama", {"rope_parameters": LINEAR}, {"rope_scaling": {"factor": 4.0}}, {**LINEAR, "factor": 4.0}),
    (
        "llama",
        {"rope_parameters": {**LINEAR, "type": "linear"}},
        {"rope_scaling": {"type": "yarn", **YARN}},
        SCALED,
    ),
    ("llama", {"rope_parameters": LINEAR}, {"rope_scaling": None}, {**LINEAR, "rope_type": "default"}),
    (
        "gemma3_text",
        {"rope_parameters": BY_LAYER},
        {"rope_parameters": {"full_attention": {"rope_type": "yarn", **YARN}}},
        {**BY_LAYER, "full_attention": SCALED},
    ),
    (
        "llava",
        llava(rope_parameters=BASE),
        {"text_config": {"rope_scaling": {"rope_type": "yarn", **YARN}}},
        SCALED,
    ),
    ("llava", llava(rope_parameters=BASE), {"text_config": {"rope_theta": 7e4}}, {**BASE, "rope_theta": 7e4}),
    (
        "llama",
        {"rope_parameters": LINEAR},
        {"rope_theta": 7e4, "rope_parameters": None},
        {**LINEAR, "rope_type": "default", "rope_theta": 7e4},
    ),
]
"""Settings of a pretrained model, overrides, and the expected RoPE parameters."""


@pytest.mark.parametrize(("model_type", "values", "changes", "expected"), MERGED)
def test_pretrained_rope_override_keeps_other_parameters(
    model_type: str, values: dict[str, Any], changes: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    small = {} if model_type == "llava" else {**tiny_config(model_type), "max_position_embeddings": 512}
    small.pop("model_type", None)
    AutoConfig.for_model(model_type, **{**small, **values}).save_pretrained(tmp_path)
    config = models.load_model_config(chosen(name_or_path=str(tmp_path), init="scratch", config=changes))
    assert config.get_text_config().rope_parameters == expected


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"rope_theta": 7e4, "rope_parameters": [1]}, "rope_parameters"),
        ({"rope_scaling": "yarn"}, "rope_scaling"),
        ({"text_config": {"rope_theta": 7e4, "rope_parameters": [1]}}, "text_config.rope_parameters"),
    ],
)
def test_model_config_rejects_rope_that_is_not_mapping(
    changes: dict[str, Any], key: str, tmp_path: Path
) -> None:
    model_type, values = ("llava", llava()) if "text_config" in changes else ("llama", SMALL)
    AutoConfig.for_model(model_type, **values).save_pretrained(tmp_path)
    for model in ({"name_or_path": str(tmp_path)}, {}):
        config = changes if model else {"model_type": model_type, **changes}
        with pytest.raises(UserError, match=rf"model\.config\.{key}: is .*, which is not a mapping"):
            models.load_model_config(chosen(**model, config=config))


def test_pretrained_rope_override_rejects_rope_scaling_of_layer_types(tmp_path: Path) -> None:
    AutoConfig.for_model("gemma4_text", **SMALL).save_pretrained(tmp_path)
    settings = chosen(name_or_path=str(tmp_path), init="scratch", config={"rope_scaling": YARN})
    message = "model.config: rope_scaling is set, but the layer types of Gemma4TextConfig have separate"
    with pytest.raises(UserError, match=message):
        models.load_model_config(settings)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("qwen3_moe", {"num_experts": 7}),  # another name of num_local_experts
        ("deepseek_v3", {"num_mtp_layers": 3}),
        ("bert", {"num_labels": 5}),
    ],
)
def test_pretrained_override_with_alias_has_effect(
    model_type: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    config = AutoConfig.for_model(model_type, num_labels=3)
    config.save_pretrained(tmp_path)
    changed = models.load_model_config(chosen(name_or_path=str(tmp_path), init="scratch", config=changes))
    assert {key: getattr(changed, key) for key in changes} == changes
    assert len(changed.id2label) == changed.num_labels == changes.get("num_labels", 3)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (
            {**tiny_config("gemma3_text"), "rope_parameters": BY_LAYER, "rope_theta": 5e5},
            r"model\.config\.rope_theta: has no effect on Gemma3TextConfig",
        ),
        (
            {
                "model_type": "gemma3",
                "text_config": {
                    **tiny_config("gemma3_text"),
                    "rope_parameters": BY_LAYER,
                    "rope_theta": 5e5,
                },
            },
            r"model\.config\.text_config\.rope_theta: has no effect on Gemma3TextConfig",
        ),
    ],
)
def test_model_config_rejects_rope_key_without_effect(values: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        models.load_model_config(chosen(config=values))


def set_norm_epsilon(model: PreTrainedModel) -> None:
    model.config.get_text_config().rms_norm_eps = 0.125


def test_model_function_changes_nested_config_that_is_saved(tmp_path: Path) -> None:
    base = AutoConfig.for_model("llava", **llava(), architectures=["LlavaForConditionalGeneration"])
    base.save_pretrained(tmp_path)
    settings = chosen(name_or_path=str(tmp_path), init="scratch", function=f"{__name__}:set_norm_epsilon")
    config = models.load_model_config(settings)
    models.build_model_on_meta(config, settings)
    assert config.get_text_config().rms_norm_eps == 0.125
    assert models.get_max_positions(config) is not None
    config.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).text_config.to_dict() == config.text_config.to_dict()


def test_saved_model_config_omits_router_loss_of_run(tmp_path: Path) -> None:
    AutoConfig.for_model("mixtral", **MOE).save_pretrained(tmp_path)
    settings = chosen(name_or_path=str(tmp_path))
    config = models.load_model_config(settings)
    assert models.build_model_on_meta(config, settings).config.output_router_logits is True
    assert config.output_router_logits is False


# -- memory ------------------------------------------------------------------------------------------------

BUILD_LARGE = """
import resource
from portable.config import load_config
from portable.model.build import build_model_on_meta, load_model_config

resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, 4 << 30))
settings = load_config({"model": {"config": {"model_type": "mixtral", "num_hidden_layers": 1}}}).model
settings.config["num_local_experts"] = 256
model = build_model_on_meta(load_model_config(settings), settings)
largest = max(model.parameters(), key=lambda parameter: parameter.numel())
print(4 * largest.numel() >> 30, all(not buffer.is_meta for buffer in model.buffers()))
"""


def test_parameter_larger_than_memory_is_built_on_meta() -> None:
    """The layer's stacked experts take up 112 GiB in fp32, but the process may allocate only 4 GiB."""
    process = subprocess.run([sys.executable, "-c", BUILD_LARGE], capture_output=True, text=True, check=False)
    assert process.stdout.split()[-2:] == ["112", "True"], process.stderr[-2000:]
