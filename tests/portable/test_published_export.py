"""Names, shapes, and untrained tensors of ``final/`` compared with the run's base model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from portable.converters.cli import main as convert
from portable.data.dataset import build_data
from portable.errors import UserError
from portable.registry import create_backend
from portable.run.prepare import prepare_run
from portable.run.rank import run_rank
from portable.run.resolve import resolve_run
from tests.composite import write_composite
from tests.runs import configured
from tests.tiny_models import VOCABULARY, tiny_config, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
STEPS: dict[str, Any] = {
    "train__steps": 1,
    "checkpoint__every_steps": 1,
    "data__eval_fraction": 0,
    "data__packing": True,
}
# Tensors that transformers ignores on loading, keyed by model type.
NOT_LOADED = {
    "mixtral": {},
    "gpt_neox": {},
    "qwen3_next": {"mtp.fc.weight": torch.randn(32, 64), "mtp.norm.weight": torch.ones(32)},
}


SMALL_FILES = (
    "LICENSE",
    "additional_chat_templates/tool_use.jinja",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)


@pytest.fixture(scope="module")
def bases(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with published checkpoints in bfloat16, each with a tokenizer."""
    folder = tmp_path_factory.mktemp("published")
    tokenizer = build_data(configured(folder, corpus).data, model_vocab_size=VOCABULARY).tokenizer
    for name, more in NOT_LOADED.items():
        model = tiny_model(name).bfloat16()
        model.config.dtype = torch.bfloat16
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        (folder / name / "additional_chat_templates").mkdir()
        for file in (*SMALL_FILES, "modeling_own.py", "training_args.bin"):
            (folder / name / file).write_text("{}")
        path = folder / name / "model.safetensors"
        save_file({**load_file(path), **{k: t.bfloat16() for k, t in more.items()}}, path, {"format": "pt"})
    return folder


def configure_run(base: Path, run: Path, corpus: Path, **more: Any) -> Any:
    settings = {**STEPS, "model__config": None, "model__name_or_path": str(base)}
    return configured(run, corpus, **settings, **more)


def list_final_files(run: Path) -> list[Path]:
    return [path for path in (run / "final").rglob("*") if path.is_file()]


@pytest.mark.parametrize("name", NOT_LOADED)
def test_final_has_names_of_base(
    name: str, bases: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configure_run(
        bases / name, tmp_path / "run", corpus, train__frozen=["embed"], train__learning_rate=0.01
    )
    assert run_rank("cpu", config) == 0
    base = load_file(bases / name / "model.safetensors")
    final = load_file(tmp_path / "run" / "final" / "model.safetensors")
    assert {key: tensor.shape for key, tensor in final.items()} == {k: t.shape for k, t in base.items()}
    frozen = [key for key in base if key.startswith(("mtp.", "model.embed", "gpt_neox.embed"))]
    assert frozen and all(final[key].dtype == torch.bfloat16 for key in frozen)
    assert all(torch.equal(final[key], base[key]) for key in frozen)
    trained = [key for key in base if "layernorm" in key or "experts.1." in key]
    assert trained and not any(torch.equal(final[key].bfloat16(), base[key]) for key in trained[:1])
    card = (tmp_path / "run" / "final" / "README.md").read_text()
    assert ("copied from the base model without training: `mtp.fc.weight`" in card) == (name == "qwen3_next")
    files = {
        path.relative_to(tmp_path / "run" / "final").as_posix() for path in list_final_files(tmp_path / "run")
    }
    assert files >= {*SMALL_FILES} and not files & {
        "modeling_own.py",
        "training_args.bin",
        "published_names.json",
    }
    output = capsys.readouterr().err
    assert "files of the base model were not copied: modeling_own.py (custom code)" in output
    assert ("copies them into the export: mtp.fc.weight, mtp.norm.weight" in output) == (name == "qwen3_next")
    # The checkpoint records the name rules, so it can be converted without the base model.
    assert convert([str(tmp_path / "run"), str(tmp_path / "out"), "--quiet"]) == 0
    converted = load_file(tmp_path / "out" / "model.safetensors")
    assert converted.keys() == base.keys() - NOT_LOADED[name].keys()


def test_base_tensors_without_counterpart_are_listed(bases: Path, corpus: Path, tmp_path: Path) -> None:
    labels = {"data__label_field": "label", "model__task": "sequence-classification", "data__packing": False}
    records = tmp_path / "labels.jsonl"
    lines = [json.dumps({"text": f"some text {i}", "label": f"LABEL_{i % 2}"}) for i in range(20)]
    records.write_text("\n".join(lines))
    config = configure_run(bases / "qwen3_next", tmp_path / "run", records).replaced(
        {key.replace("__", "."): value for key, value in labels.items()}
    )
    names = prepare_run(resolve_run(config, "cpu"), create_backend("cpu")).published_names
    (note,) = names.build_base_tensor_notes(reported=["lm_head.weight"])
    assert "Qwen3NextForSequenceClassification does not have these tensors" in note
    assert note.endswith("mtp.fc.weight, mtp.norm.weight")


def test_export_without_base_uses_recorded_names(
    bases: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The base model's weights are missing when the run ends; the lost tensors are listed."""
    shutil.copytree(bases / "qwen3_next", tmp_path / "base")
    config = configure_run(tmp_path / "base", tmp_path / "run", corpus)
    stopped = config.replaced({"train.steps": 2, "train.stop_after": 1})
    assert run_rank("cpu", stopped) == 0
    wanted = load_file(bases / "qwen3_next" / "model.safetensors").keys() - {
        "mtp.fc.weight",
        "mtp.norm.weight",
    }
    (tmp_path / "base" / "model.safetensors").unlink()
    capsys.readouterr()
    assert run_rank("cpu", config.replaced({"train.steps": 2})) == 0
    assert load_file(tmp_path / "run" / "final" / "model.safetensors").keys() == wanted
    assert (
        "lacks these tensors, which transformers does not load: mtp.fc.weight, mtp.norm.weight"
        in capsys.readouterr().err
    )
    assert (
        "of the base model are missing: `mtp.fc.weight`"
        in (tmp_path / "run" / "final" / "README.md").read_text()
    )


def test_final_has_expert_layout_of_base(corpus: Path, tmp_path: Path) -> None:
    """Published experts of Qwen3-VL-MoE are transposed, but have the names in memory."""
    base, run = write_composite(tmp_path / "base", "qwen3_vl_moe", corpus), tmp_path / "run"
    path = base / "model.safetensors"
    in_memory = load_file(path)
    experts = [name for name in in_memory if ".experts." in name]
    published = {
        name: tensor.transpose(1, 2).contiguous() if name in experts else tensor
        for name, tensor in in_memory.items()
    }
    shapes = {name: tensor.shape for name, tensor in published.items()}
    assert experts and all(in_memory[name].shape != shapes[name] for name in experts)
    save_file(published, path, {"format": "pt"})
    assert run_rank("cpu", configure_run(base, run, corpus, train__learning_rate=1e-4)) == 0
    final = load_file(run / "final" / "model.safetensors")
    assert {name: tensor.shape for name, tensor in final.items()} == shapes
    for name, tensor in published.items():
        torch.testing.assert_close(final[name], tensor.float(), rtol=0, atol=1e-3)
    # Conversions read the layout from the record, or from the model given with --config-from.
    step = run / "checkpoints" / "step-000001"
    assert convert([str(step), str(tmp_path / "recorded"), "--quiet"]) == 0
    for file in ("published_names.json", "checkpoint_manifest.json"):
        (step / file).unlink()
    assert convert([str(step), str(tmp_path / "given"), "--config-from", str(base), "--quiet"]) == 0
    # The layout of a published model is kept.
    assert convert([str(run / "final"), str(tmp_path / "kept"), "--config-from", str(base), "--quiet"]) == 0
    for folder in ("recorded", "given", "kept"):
        converted = load_file(tmp_path / folder / "model.safetensors")
        assert converted.keys() == final.keys()
        assert all(torch.equal(converted[name], final[name]) for name in final)


def test_final_has_shard_files_of_base(bases: Path, corpus: Path, tmp_path: Path) -> None:
    base, final = tmp_path / "base", tmp_path / "run" / "final"
    shutil.copytree(bases / "mixtral", base)
    (base / "model.safetensors").unlink()
    tiny_model("mixtral").bfloat16().save_pretrained(base, max_shard_size="60KB")
    assert run_rank("cpu", configure_run(base, tmp_path / "run", corpus)) == 0
    index, base_index = (
        json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        for folder in (final, base)
    )
    assert index == base_index and len(set(index.values())) > 2
    first = min(index.values())
    assert load_file(final / first).keys() == load_file(base / first).keys()


def test_final_of_run_from_scratch_matches_save_pretrained(corpus: Path, tmp_path: Path) -> None:
    config = configured(tmp_path / "run", corpus, **STEPS, model__config=tiny_config("mixtral"))
    assert run_rank("cpu", config) == 0
    tiny_model("mixtral").save_pretrained(tmp_path / "theirs")
    ours, theirs = (
        load_file(folder / "model.safetensors")
        for folder in (tmp_path / "run" / "final", tmp_path / "theirs")
    )
    assert ours.keys() == theirs.keys()


def test_convert_rejects_modified_name_rules(bases: Path, corpus: Path, tmp_path: Path, capsys: Any) -> None:
    """A regular expression that transformers does not contain is never compiled."""
    step = tmp_path / "step"
    config = configure_run(bases / "mixtral", tmp_path / "run", corpus)
    assert run_rank("cpu", config) == 0
    shutil.copytree(tmp_path / "run" / "checkpoints" / "step-000001", step)
    (step / "checkpoint_manifest.json").unlink()
    record = json.loads((step / "published_names.json").read_text())
    record["rules"][0]["read"]["find"] = "(?P<g0>(a+)+$)"
    (step / "published_names.json").write_text(json.dumps(record))
    capsys.readouterr()
    assert convert([str(step), str(tmp_path / "out")]) == 65
    assert "does not support" in capsys.readouterr().err


def test_merged_export_that_would_fail_is_rejected_before_training(
    bases: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure_run(
        bases / "mixtral", tmp_path / "run", corpus, adapter__type="lora", checkpoint__export="merged"
    )
    monkeypatch.setattr(
        "portable.converters.adapters.base_names.BaseNameLookup.find_parameter", lambda *_: None
    )
    with pytest.raises(UserError, match=r"checkpoint\.export: .* specify the base"):
        prepare_run(resolve_run(config, "cpu"), create_backend("cpu"))


def test_run_resumes_from_conversion_with_published_names(corpus: Path, tmp_path: Path) -> None:
    """The experts' weights and optimizer state are stacked again."""
    settings: dict[str, Any] = {**STEPS, "model__config": tiny_config("mixtral"), "train__steps": 2}
    assert run_rank("cpu", configured(tmp_path / "whole", corpus, **settings)) == 0
    stopped = configured(tmp_path / "half", corpus, **settings, train__stop_after=1)
    assert run_rank("cpu", stopped) == 0
    converted = tmp_path / "converted"
    assert convert([str(tmp_path / "half"), str(converted), "--optimizer", "--quiet"]) == 0
    config = configured(tmp_path / "resumed", corpus, **settings, checkpoint__resume=str(converted))
    assert run_rank("cpu", config) == 0
    resumed, whole = (
        load_file(tmp_path / name / "final" / "model.safetensors") for name in ("resumed", "whole")
    )
    assert resumed.keys() == whole.keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(resumed[name], tensor, rtol=0, atol=1e-7)
