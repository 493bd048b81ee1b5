"""Composite models: the class that is built for a checkpoint and the parameters that stay frozen."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from portable.config import RunConfig
from portable.converters import open_checkpoint
from portable.engines.fsdp.units import find_fsdp_units
from portable.errors import UserError
from portable.model.build import build_and_freeze_model, build_model_on_meta, load_model_config
from portable.model.freezing import list_frozen_names
from portable.model.parameter_groups import assign_parameter_groups
from portable.model.unused_parameters import (
    find_unreached_names,
    get_unreached_names,
    summarize_as_outermost_modules,
)
from portable.registry import create_backend
from tests.composite import build_composite_config, write_composite
from tests.engines import ENGINES, Engines
from tests.parity import launched, opened
from tests.runs import checked, configured, losses

# -- the class ---------------------------------------------------------------------------------------------

PUBLISHED = {
    "gemma3": "Gemma3ForConditionalGeneration",
    "internvl": "InternVLForConditionalGeneration",
    "llama4": "Llama4ForConditionalGeneration",
    "llava": "LlavaForConditionalGeneration",
    "mistral4": "Mistral4ForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
}


def build_settings(folder: Path, **model: Any) -> RunConfig:
    model = {"name_or_path": str(folder), "config": None, **model}
    return checked(None, {"model": model, "data": {"source": "text.jsonl"}, "backend": "cpu"})


def build_class_name(folder: Path, **model: Any) -> str:
    settings = build_settings(folder, **model).model
    return type(build_model_on_meta(load_model_config(settings), settings)).__name__


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_composite_checkpoint_builds_class_in_architectures(model_type: str, tmp_path: Path) -> None:
    build_composite_config(model_type).save_pretrained(tmp_path)
    assert build_class_name(tmp_path) == PUBLISHED[model_type]


@pytest.mark.parametrize(
    ("model_type", "architectures", "expected"),
    [
        ("qwen3_vl", None, "Qwen3VLForConditionalGeneration"),
        ("qwen3_5", None, "Qwen3_5ForCausalLM"),
        ("qwen3_5", ["Qwen3_5ForCausalLM"], "Qwen3_5ForCausalLM"),
        ("llava", ["PixtralForConditionalGeneration"], "LlavaForConditionalGeneration"),
        ("gemma3", ["Gemma3Model"], "Gemma3ForConditionalGeneration"),
    ],
)
def test_composite_checkpoint_of_other_architectures_builds_class_of_type(
    model_type: str, architectures: list[str] | None, expected: str, tmp_path: Path
) -> None:
    config = build_composite_config(model_type, named=False)
    config.architectures = architectures
    config.save_pretrained(tmp_path)
    assert build_class_name(tmp_path) == expected


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("blip", r"BlipFor\w+ requires inputs other than text \(.*'pixel_values'\); choose"),
        ("kosmos-2", r"Kosmos2For\w+ requires inputs other than text \(.*`pixel_values`"),
        ("shieldgemma2", r"ShieldGemma2For\w+ does not generate text; choose"),
        (
            "kyutai_speech_to_text",
            r"KyutaiSpeechToTextFor\w+ does not run with only text \(.*33",
        ),
        ("t5gemma2", r"cannot build T5Gemma2ForConditionalGeneration .*; set model.task to seq2seq-lm"),
    ],
)
def test_composite_class_with_other_inputs_is_rejected(model_type: str, message: str, tmp_path: Path) -> None:
    build_composite_config(model_type).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"^model\.name_or_path: .*" + message) as refused:
        build_class_name(tmp_path)
    assert len(str(refused.value)) < 250


@pytest.mark.parametrize(
    ("model_type", "package"), [("gemma3n", "timm"), ("fast_vlm", "timm"), ("inkling_mm_model", "scipy")]
)
def test_composite_model_names_missing_package(model_type: str, package: str, tmp_path: Path) -> None:
    if find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    build_composite_config(model_type).save_pretrained(tmp_path)
    with pytest.raises(UserError) as refused:
        build_class_name(tmp_path)
    expected = f"model: {model_type} needs the package {package}; run: pip install {package}"
    assert str(refused.value) == expected


def test_composite_type_without_checkpoint_is_rejected() -> None:
    settings = checked(None, {"model.config": {"model_type": "qwen3_vl"}, "data.source": "text.jsonl"}).model
    with pytest.raises(UserError, match=r"set model\.config\.model_type to qwen3_vl_text") as refused:
        build_model_on_meta(load_model_config(settings), settings)
    assert len(str(refused.value)) < 250


# -- parameters reached by text
# -------------------------------------------------------------------------------------


def build_composite(config: RunConfig) -> Any:
    return build_and_freeze_model(load_model_config(config.model), config)


_GLOBAL = [f"encoder.layer.*.attention.self.{name}_global" for name in ("query", "key", "value")]


@pytest.mark.parametrize(
    ("model_type", "parts"),
    [
        ("gemma3", ["vision_tower", "multi_modal_projector"]),
        ("qwen3_5", ["visual"]),
        ("deepseek_v32", ["layers.*.self_attn.indexer"]),
        ("ernie4_5_moe", ["layers.*.mlp.gate.moe_statics"]),
        ("qwen3_moe", []),  # experts that no token of the trial chooses are reachable
        ("mixtral", []),
        ("llama", []),
        ("longformer", _GLOBAL),  # its control flow depends on values, so the trial has values
        ("reformer", ["lm_head.bias"]),  # its backward pass is not in the graph
    ],
)
def test_find_unreached_names_uses_graph(model_type: str, parts: list[str], tmp_path: Path) -> None:
    from tests.tiny_models import tiny_config

    if model_type in PUBLISHED:
        build_composite_config(model_type).save_pretrained(tmp_path)
        config = build_settings(tmp_path)
    else:
        task = "masked-lm" if model_type == "longformer" else "causal-lm"
        settings = {"model.config": tiny_config(model_type, task), "model.task": task, "data.seq_len": 32}
        config = checked(None, {**settings, "data.source": "text.jsonl"})
    model = build_composite(config)
    names = get_unreached_names(model)
    summary = summarize_as_outermost_modules(model, names)
    assert sorted(summary) == sorted(parts)
    # The order does not depend on the order of the set, because a resumed adapter run compares it.
    assert summary == summarize_as_outermost_modules(model, sorted(names, reverse=True))
    assert set(list_frozen_names(model)) == get_unreached_names(model)


def test_find_unreached_names_ignores_layer_dropout_and_kernels(tmp_path: Path) -> None:
    from tests.tiny_models import tiny_config

    drops = {**tiny_config("opt"), "layerdrop": 0.9, "dropout": 0.5}
    config = checked(None, {"model.config": drops, "data.source": "text.jsonl"})
    assert not list_frozen_names(build_composite(config))
    experts = tiny_config("qwen3_moe")
    eager = {"model.config": experts, "model.experts": "eager", "data.source": "text.jsonl"}
    model = build_model_on_meta(load_model_config(checked(None, eager).model), checked(None, eager).model)
    model.register_parameter("spare", torch.nn.Parameter(torch.empty(3, device="meta")))
    assert find_unreached_names(model) == {"spare"}


def test_trainable_vision_tower_has_no_weight_decay(tmp_path: Path) -> None:
    build_composite_config("gemma3").save_pretrained(tmp_path)
    config = build_settings(tmp_path).replaced({"train.trainable": ["vision_tower", "language_model"]})
    model = build_composite(config)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    tower = {name for name in trained if "vision_tower" in name}
    assert tower and not any("projector" in name for name in trained)
    groups = assign_parameter_groups(model, config.train)
    assert {groups[name].weight_decay for name in tower} == {0.0}
    assert {groups[name].weight_decay for name in trained - tower} == {0.0, config.train.weight_decay}


def test_vision_tower_layers_are_fsdp_units(tmp_path: Path) -> None:
    build_composite_config("gemma3").save_pretrained(tmp_path)
    config = build_settings(tmp_path).replaced({"strategy": "full_shard"})
    model = build_composite(config)
    names = {id(module): name for name, module in model.named_modules()}
    unit_names = [names[id(module)] for module in find_fsdp_units(model, config)]
    assert sum("vision_tower" in name for name in unit_names) == 2
    assert sum("language_model" in name for name in unit_names) == 2


PARITY_STEPS = 20
PARITY = {
    "no_shard": 1,
    "no_shard, 2": 2,
    "full_shard": 2,
    "zero1": 2,
    "zero2": 2,
    "zero3": 2,
    "xla": 2,
}


def create_text_run(folder: Path, source: Path, corpus: Path, **settings: Any) -> RunConfig:
    return configured(
        folder,
        corpus,
        **{
            "model__config": None,
            "model__name_or_path": str(source),
            "data__eval_fraction": 0,
            "train__steps": 4,
            "train__global_batch_size": 4,
            "train__weight_decay": 0.1,
            "checkpoint__every_steps": None,
            "log__sample_tokens": 0,
            **settings,
        },
    )


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    return write_composite(tmp_path_factory.mktemp("gemma3"), "gemma3", corpus)


@pytest.fixture(scope="module")
def alone(gemma3: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return losses and exported tensors of a run on one rank without sharding."""
    from portable.run.rank import run_rank

    folder = tmp_path_factory.mktemp("alone")
    config = create_text_run(folder, gemma3, corpus, strategy="no_shard", train__steps=PARITY_STEPS)
    assert run_rank("cpu", config) == 0
    return losses(folder), open_checkpoint(folder / "final").tensors


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.xla if name == "xla" else ()) for name in PARITY]
)
def test_vision_tower_is_unchanged_on_every_engine(
    name: str, gemma3: Path, alone: Any, corpus: Path, tmp_path: Path, engines: Engines
) -> None:
    engine = name.partition(",")[0]
    settings = {**ENGINES[engine].settings, "train__micro_batch_size": 2, "train__steps": PARITY_STEPS}
    config = create_text_run(tmp_path, gemma3, corpus, **settings)
    assert engines.run(engine, PARITY[name], launched, config) == 0
    expected, one_rank = alone
    assert losses(tmp_path) == pytest.approx(expected, abs=2e-5)
    source, ours = open_checkpoint(gemma3).tensors, open_checkpoint(tmp_path / "final").tensors
    names = {key: key for key in source} if source.keys() == ours.keys() else map_published_names(gemma3)
    assert len(names) == len(ours)
    for published, live in names.items():
        is_unchanged = ours[live].read().tobytes() == source[published].read().tobytes()
        frozen = "vision_tower" in published or "projector" in published
        assert is_unchanged == frozen, published
        if not frozen:
            difference = abs(ours[live].read() - one_rank[live].read()).max()
            assert difference < 2e-4, f"{published}: {difference}"


def map_published_names(folder: Path) -> dict[str, str]:
    """Map a checkpoint's published names to the names that transformers uses in memory."""
    from portable.private import transformers_internals

    settings = build_settings(folder).model
    model = build_model_on_meta(load_model_config(settings), settings)
    names, _ = transformers_internals.map_checkpoint_names(model, open_checkpoint(folder).tensors)
    return {published: live for published, live, _ in names}


def test_start_message_names_frozen_parameters(
    gemma3: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from portable.run.rank import run_rank

    assert (
        run_rank("cpu", create_text_run(tmp_path, gemma3, corpus, strategy="no_shard", train__steps=1)) == 0
    )
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("  frozen"))
    assert line.split(None, 1)[1].startswith("vision_tower, multi_modal_projector (")
    assert "parameters are not reached by text)" in line
    written = json.loads((tmp_path / "final" / "config.json").read_text("utf-8"))
    assert written["architectures"] == ["Gemma3ForConditionalGeneration"]


@pytest.mark.parametrize("engine", ["no_shard", "zero2"])
def test_checkpoint_with_optimizer_state_of_tower_resumes(
    engine: str, gemma3: Path, corpus: Path, tmp_path: Path, engines: Engines, monkeypatch: Any
) -> None:
    """Resume a checkpoint of an earlier version, which trained the vision tower with ZeRO."""
    settings = {"train__micro_batch_size": 2, "strategy": "zero2", "checkpoint__every_steps": 2}
    first = create_text_run(tmp_path, gemma3, corpus, **settings, train__stop_after=2)
    assert engines.run("zero2", 2, launch_without_reach, first) == 0
    state = open_checkpoint(tmp_path / "checkpoints" / "step-000002")
    assert state.optimizer is not None
    assert any("vision_tower" in name for name in state.optimizer.state)
    second = create_text_run(tmp_path, gemma3, corpus, **{**settings, **ENGINES[engine].settings})
    assert engines.run(engine, 2, launched, second) == 0
    assert sorted(losses(tmp_path)) == [1, 2, 3, 4]
    last = open_checkpoint(tmp_path / "checkpoints" / "step-000004").tensors
    for name, tensor in state.tensors.items():
        if "vision_tower" in name or "projector" in name:
            assert last[name].read().tobytes() == tensor.read().tobytes()


def test_checkpoint_of_text_part_continues_by_advice_of_error(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Earlier versions trained only the text part of Qwen3.5."""
    from portable.converters.cli import main as convert
    from portable.run.rank import run_rank

    source = write_composite(tmp_path / "source", "qwen3_5", corpus)
    file = source / "config.json"
    config = json.loads(file.read_text("utf-8"))
    file.write_text(json.dumps({**config, "architectures": ["Qwen3_5ForCausalLM"]}), "utf-8")
    settings = {"strategy": "no_shard", "train__steps": 2, "checkpoint__every_steps": 1}
    run = create_text_run(tmp_path / "run", source, corpus, **settings)
    assert run_rank("cpu", run.replaced({"train.stop_after": 1})) == 0
    file.write_text(json.dumps(config), "utf-8")
    with pytest.raises(
        UserError,
        match=r"convert this checkpoint with portable-convert \S+ OUT, and set model\.name_or_path to OUT",
    ):
        run_rank("cpu", run)
    out = tmp_path / "out"
    assert convert([str(tmp_path / "run" / "checkpoints" / "step-000001"), str(out), "--quiet"]) == 0
    assert run_rank("cpu", create_text_run(tmp_path / "new", out, corpus, **settings)) == 0
    assert sorted(losses(tmp_path / "new")) == [1, 2]


def launch_without_reach(config: RunConfig) -> int:
    """Run on one rank without freezing the parameters that text does not reach."""
    with patch("portable.model.build.find_unreached_names", lambda *_, **__: frozenset()):
        return launched(config)


# -- adapters ----------------------------------------------------------------------------------------------


def create_lora_run(folder: Path, source: Path, corpus: Path, **settings: Any) -> RunConfig:
    adapter = {"adapter__type": "lora", "adapter__r": 4, "train__learning_rate": 0.02, "strategy": "no_shard"}
    return create_text_run(folder, source, corpus, **{**adapter, **settings})


@pytest.mark.parametrize("model_type", ["gemma3", "qwen3_5", "qwen3_5_moe", "qwen3_vl"])
def test_adapter_of_composite_model_loads_into_published_class(
    model_type: str, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import peft
    import transformers

    from portable.run.rank import run_rank

    source = write_composite(tmp_path / "source", model_type, corpus)
    config = create_lora_run(tmp_path / "run", source, corpus)
    assert run_rank("cpu", config) == 0
    assert "all-linear excludes vi" in capsys.readouterr().err
    written = open_checkpoint(tmp_path / "run" / "final").tensors
    assert written and not any("vis" in name or "projector" in name for name in written)
    published: Any = getattr(transformers, build_composite_config(model_type).architectures[0])
    model = published.from_pretrained(source, dtype=torch.float32).eval()
    ids = torch.arange(5, 25).view(1, -1)
    with torch.no_grad():
        before = model(input_ids=ids).logits
        adapted = peft.PeftModel.from_pretrained(model, tmp_path / "run" / "final")
        after = adapted(input_ids=ids).logits
        assert float((after - before).abs().max()) > 1e-2
        with opened(config) as trial:
            trial.engine.load_checkpoint(open_checkpoint(tmp_path / "run" / "checkpoints" / "step-000004"))
            ours = trial.engine.model.eval()(input_ids=ids).logits
    assert float((after - ours).abs().max()) < 1e-5


_PEFT_REFUSES = "out_proj, because peft does not support these modules in models of type"
_NOT_LINEAR = "router, because LoRA cannot adapt these modules"
_PEFT_RENAMES = "shared_experts.up_proj, because peft cannot load adapters of these modules"


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("nemotron_h", _PEFT_REFUSES),
        ("falcon_h1", _PEFT_REFUSES),
        ("mamba2", _PEFT_REFUSES),
        ("llama4_text", _NOT_LINEAR),
        ("laguna", _PEFT_RENAMES),
    ],
)
def test_all_linear_excludes_unsupported_modules(
    model_type: str, reason: str, corpus: Path, tmp_path: Path
) -> None:
    from portable.run.prepare import prepare_run
    from portable.run.resolve import resolve_run
    from tests.tiny_models import tiny_config

    settings = {"adapter__type": "lora", "model__config": tiny_config(model_type), "data__packing": False}
    config = configured(tmp_path, corpus, **settings)
    run = prepare_run(resolve_run(config, "cpu"), create_backend("cpu"))
    (note,) = (note for note in run.notes if "all-linear excludes" in note)
    assert reason in note
    module = reason.split(",")[0]
    trained = [name for name, parameter in run.model.named_parameters() if parameter.requires_grad]
    assert trained and not any(f".{module}." in name for name in trained)


def test_all_linear_keeps_modules_if_peft_renames_all_of_them(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from portable.private import peft_internals
    from portable.run.prepare import prepare_run
    from portable.run.resolve import resolve_run
    from tests.tiny_models import tiny_config

    monkeypatch.setattr(
        peft_internals,
        "find_renamed_tensors",
        lambda settings, model, names: [name for name in names if ".router." not in name],
    )
    settings = {"adapter__type": "lora", "model__config": tiny_config("llama4_text"), "data__packing": False}
    run = prepare_run(resolve_run(configured(tmp_path, corpus, **settings), "cpu"), create_backend("cpu"))
    assert any("set checkpoint.export: merged" in note for note in run.notes)
    trained = [name for name, parameter in run.model.named_parameters() if parameter.requires_grad]
    assert any(".q_proj." in name for name in trained) and not any(".router." in name for name in trained)


def test_longformer_global_attention_is_unchanged_under_zero(
    corpus: Path, tmp_path: Path, engines: Engines
) -> None:
    from tests.architectures import Pair, build_plain
    from tests.exports import write_source

    model = build_plain(Pair("longformer", "masked-lm"))
    source = write_source(tmp_path / "source", model, corpus, "masked-lm")
    config = create_text_run(
        tmp_path / "run", source, corpus, strategy="zero2", model__task="masked-lm", data__packing=False
    )
    assert engines.run("zero2", 2, launched, config) == 0
    base, final = (open_checkpoint(path).tensors for path in (source, tmp_path / "run" / "final"))
    untouched = {name for name in base if base[name].read().tobytes() == final[name].read().tobytes()}
    weights = {name for name in base if "_global.weight" in name}
    assert weights and weights <= untouched
    assert not any(".query.weight" in name for name in untouched)


def test_adapter_in_vision_tower_is_unchanged_under_zero(
    gemma3: Path, corpus: Path, tmp_path: Path, engines: Engines
) -> None:
    named = {"strategy": "zero2", "train__micro_batch_size": 2, "checkpoint__every_steps": 2}
    config = create_lora_run(
        tmp_path, gemma3, corpus, **named, adapter__target_modules=["q_proj", "fc1"], train__learning_rate=0.1
    )
    assert engines.run("zero2", 2, launched, config) == 0
    first, last = (open_checkpoint(tmp_path / "checkpoints" / f"step-00000{step}").tensors for step in (2, 4))
    names = [name for name in first if "lora_A" in name]
    tower = {name for name in names if "vision_tower" in name}
    assert tower and tower != set(names)
    for name in names:
        assert (first[name].read().tobytes() == last[name].read().tobytes()) == (name in tower)


def test_adapter_of_text_part_merges_by_advice_of_error(corpus: Path, tmp_path: Path) -> None:
    """Earlier versions adapted only the text part of Qwen3.5."""
    from portable.converters.cli import main as convert
    from portable.run.rank import run_rank

    source = write_composite(tmp_path / "source", "qwen3_5", corpus)
    file = source / "config.json"
    config = json.loads(file.read_text("utf-8"))
    file.write_text(json.dumps({**config, "architectures": ["Qwen3_5ForCausalLM"]}), "utf-8")
    run = create_lora_run(tmp_path / "run", source, corpus, train__steps=2, checkpoint__every_steps=1)
    assert run_rank("cpu", run.replaced({"train.stop_after": 1})) == 0
    file.write_text(json.dumps(config), "utf-8")
    with pytest.raises(
        UserError, match=r"different values of these adapter settings: target_modules, exclude_modules; "
    ) as refused:
        run_rank("cpu", run)
    (command,) = re.findall("portable-convert ([^,]+),", str(refused.value))
    out = tmp_path / "out"
    assert convert([*command.replace("OUT", str(out)).split(), "--quiet"]) == 0
    merged, base = open_checkpoint(out).tensors, open_checkpoint(source).tensors
    assert set(merged) == set(base)
    changed = {name for name in base if merged[name].read().tobytes() != base[name].read().tobytes()}
    assert changed and all(name.startswith("model.language_model.layers.") for name in changed)


# -- packing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "packing", "note"),
    [
        ("qwen4_exp", False, "has layers of type"),
        ("qwen3_5", "documents", None),
        ("gemma3", "documents", None),
    ],
)
def test_default_packing_of_conversations_follows_model(
    model_type: str, packing: Any, note: str | None, conversations: Path, tmp_path: Path, corpus: Path
) -> None:
    from portable.run.prepare import prepare_run
    from portable.run.resolve import resolve_run

    source = write_composite(tmp_path / "source", model_type, corpus)
    settings: dict[str, Any] = {"data__chat_template": "chatml", "data__seq_len": 64}
    settings["data__added_tokens"] = ["<|im_start|>", "<|im_end|>"]
    config = create_text_run(
        tmp_path / "run", source, conversations, **settings, data__cache_dir=str(tmp_path)
    )
    resolved = resolve_run(config, "cpu")
    assert resolved.config.data.packing == packing
    notes = [line for line in prepare_run(resolved, create_backend("cpu")).notes if "data.packing" in line]
    assert len(notes) == (note is not None)
    assert note is None or (note in notes[0] and "set data.packing: true" in notes[0])
    with_true = create_text_run(tmp_path / "run", source, conversations, **settings, data__packing=True)
    assert resolve_run(with_true, "cpu").config.data.packing is True
