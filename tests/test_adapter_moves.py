"""One run of an adapter moves through every engine, one step on each, and stores only the adapter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from portable.converters import open_checkpoint
from portable.converters.cli import main
from portable.errors import UserError
from portable.registry import create_backend
from portable.reporting.metrics import read_metrics
from portable.reporting.model_card import MODEL_CARD_FILE
from portable.run.prepare import prepare_run
from portable.run.rank import run_rank
from portable.run.resolve import resolve_run
from portable.run.restore import restore_run
from tests.engines import ENGINES, Engines
from tests.parity import opened
from tests.runs import TINY_MODEL, configured

BATCH = 12
ROUTE = [
    ("no_shard", 1),
    ("full_shard", 3),
    ("zero3", 2),
    ("xla", 2),
    ("zero1", 3),
    ("xla, shared", 4),
    ("hybrid_shard", 4),
    ("zero2, offload", 2),
    ("zero3, shared", 4),
    ("zero3, offload", 2),
    ("no_shard", 2),
]
"""An engine of each class writes for another engine and continues from another engine."""
DORA: dict[str, Any] = {"adapter__use_dora": True, "adapter__modules_to_save": ["lm_head"]}


@pytest.fixture(scope="module")
def base(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a run. Returns the folder of its model."""
    folder = tmp_path_factory.mktemp("base")
    untied = {**TINY_MODEL, "tie_word_embeddings": False}
    assert run_rank("cpu", configured(folder, corpus, train__steps=1, model__config=untied)) == 0
    return folder / "final"


def leg(folder: Path, corpus: Path, settings: dict[str, Any], until: int) -> int:
    common: dict[str, Any] = {
        "model__config": None,
        "adapter__type": "lora",
        "adapter__r": 4,
        "train__global_batch_size": BATCH,
        "train__micro_batch_size": 3,
        "train__steps": len(ROUTE),
        "train__stop_after": until,
        "train__learning_rate": 1e-2,
        "checkpoint__every_steps": 1,
        "checkpoint__keep": 1,
        "data__eval_fraction": 0,
        "log__sample_tokens": 0,
    }
    config = configured(folder, corpus, **{**common, **settings})
    return run_rank(config.backend, config)


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(folder) if "loss" in row]


def stored(folder: Path) -> dict[str, tuple[int, ...]]:
    (last,) = (folder / "checkpoints").iterdir()
    return {name: tuple(tensor.shape) for name, tensor in open_checkpoint(last).tensors.items()}


@pytest.mark.xla  # one of the route
def test_adapter_run_moves_through_every_engine(
    base: Path, engines: Engines, corpus: Path, tmp_path: Path
) -> None:
    settings = {"model__name_or_path": str(base), **DORA}
    assert engines.run("no_shard", 1, leg, tmp_path / "stays", corpus, settings, len(ROUTE)) == 0
    moving = tmp_path / "moves"
    for step, (name, size) in enumerate(ROUTE, 1):
        chosen = {**settings, **ENGINES[name].settings, "train__micro_batch_size": 1}
        assert engines.run(name, size, leg, moving, corpus, chosen, step) == 0
        assert stored(moving) == stored(tmp_path / "stays"), name
    assert losses(moving) == pytest.approx(losses(tmp_path / "stays"), rel=1e-5)
    assert losses(moving)[-1] < losses(moving)[0] - 0.2
    names = stored(moving)
    assert names and all(".lora_" in name or ".modules_to_save." in name for name in names)


@pytest.fixture(scope="module")
def trained(base: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    settings = {"model__name_or_path": str(base), **DORA, "data__eval_fraction": 0.1}
    assert leg(folder, corpus, {**settings, "train__eval_every": 5}, len(ROUTE)) == 0
    return folder


def logits_with_peft(base: Path, adapter: Path) -> torch.Tensor:
    import peft

    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(30)[None]).logits
    return found


def logits_in_training(base: Path, corpus: Path, folder: Path, **settings: Any) -> torch.Tensor:
    """Return the logits of the model in our engine after loading the adapter in ``folder``."""
    given = {"model__config": None, "model__name_or_path": str(base), "adapter__name_or_path": str(folder)}
    with opened(configured(folder.parent / "other", corpus, **{**given, **settings})) as trial:
        model = trial.engine.model.eval()
        with torch.no_grad():
            found: torch.Tensor = model(torch.arange(30)[None]).logits
        return found


def test_adapter_run_exports_adapter_that_peft_loads(base: Path, trained: Path, corpus: Path) -> None:
    final = trained / "final"
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", MODEL_CARD_FILE} <= {
        path.name for path in final.iterdir()
    }
    assert not (final / "config.json").exists()
    with_peft = logits_with_peft(base, final)
    assert torch.equal(with_peft, logits_in_training(base, corpus, final))
    plain = AutoModelForCausalLM.from_pretrained(base)(torch.arange(30)[None]).logits
    assert (with_peft - plain).abs().max() > 0.1
    card = (final / MODEL_CARD_FILE).read_text("utf-8")
    assert f"Base model: `{base.name}`" in card and str(base.parent) not in card
    assert "| `adapter.use_dora` | True |" in card and "| step | eval_loss |" in card


PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "what is left out is peft's": ({}, {"lora_alpha": None, "r": None, "target_modules": None}),
    "lists for many models": (
        {"target_modules": ["q_proj", "down_proj", "c_attn"], "modules_to_save": ["lm_head", "score"]},
        {"rank_pattern": None},
    ),
    "its own copy of the head": ({"target_modules": ["lm_head", "embed_tokens"], "lora_alpha": 3}, {}),
}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_adapter_run_continues_published_adapters(
    kind: str, base: Path, corpus: Path, tmp_path: Path
) -> None:
    import peft

    settings, changed = PUBLISHED[kind]
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), peft.LoraConfig(**settings))
    for number, (_, parameter) in enumerate(model.named_parameters()):
        torch.manual_seed(number)
        parameter.data += 0.05 * torch.randn_like(parameter) if parameter.requires_grad else 0
    folder = tmp_path / "adapter"
    model.save_pretrained(str(folder))
    path, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    document = {name: value for name, value in json.loads(path.read_text()).items() if name not in changed}
    path.write_text(json.dumps({**document, "loftq_config": {}, "revision": None}))
    given = logits_in_training(base, corpus, folder)
    assert torch.equal(given, logits_with_peft(base, folder))

    tensors = load_file(weights)
    for name in [name for name in tensors if "base_layer" in name][:1]:
        changed_head = {**tensors, name: tensors[name] * 1.5}
        save_file(changed_head, weights)
        with pytest.raises(
            UserError, match=r"^adapter.name_or_path: .* copy of lm_head.weight that differs .*--merge-into"
        ):
            logits_in_training(base, corpus, folder)
    first = next(name for name in tensors if "lora_" in name)
    for value, message in (
        (tensors[first] * float("nan"), "contains NaN or infinity"),
        (tensors[first].to(torch.float8_e4m3fn), "has shape .* and dtype F8_E4M3, but the model"),
        (torch.ones(5, 5), "factor A has shape .* which does not match"),
    ):
        save_file({**tensors, first: value}, weights)
        with pytest.raises(UserError, match=f"^adapter.name_or_path: .* {message}"):
            logits_in_training(base, corpus, folder)
    save_file({**tensors, "base_model.model.a\nb.lora_A.weight": torch.ones(2, 2)}, weights)
    with pytest.raises(
        UserError, match=r"^adapter.name_or_path: [^\n]*has lora_A, but no lora_B; copy the checkpoint again$"
    ):
        logits_in_training(base, corpus, folder)


def test_merged_export_of_adapter_run_computes_same_logits(
    base: Path, trained: Path, corpus: Path, tmp_path: Path
) -> None:
    """A checkpoint of the adapter is exported as a complete model, in a run with nothing left to train."""
    folder = shutil.copytree(trained, tmp_path / "run")
    settings = {"model__name_or_path": str(base), **DORA, "data__eval_fraction": 0.1}
    settings |= {"train__eval_every": 5, "checkpoint__export": "merged"}
    assert leg(folder, corpus, settings, len(ROUTE)) == 0
    assert "The weights of an adapter are merged into the base model." in (
        folder / "final" / MODEL_CARD_FILE
    ).read_text("utf-8")
    merged = AutoModelForCausalLM.from_pretrained(folder / "final")
    with torch.no_grad():
        logits = merged(torch.arange(30)[None]).logits
    torch.testing.assert_close(logits, logits_with_peft(base, trained / "final"), rtol=1e-5, atol=1e-5)


def test_adapter_run_rejects_another_base(
    base: Path, trained: Path, corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(trained, tmp_path / "run")
    other = shutil.copytree(base, tmp_path / "base")
    weights = load_file(other / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] += 0.01
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    moved = json.loads((folder / "checkpoints" / f"step-{len(ROUTE):06d}" / "trainer_state.json").read_text())
    assert moved["metadata"]["adapter"]["base"]
    # The same path on another machine, with other weights in it.
    shutil.move(base, tmp_path / "aside")
    shutil.copytree(other, base)
    settings = {"model__name_or_path": str(base), **DORA, "data__eval_fraction": 0.1}
    try:
        with pytest.raises(
            UserError,
            match=r"^checkpoint\.resume: the adapter in .* on a base model with different weights",
        ):
            leg(folder, corpus, {**settings, "train__eval_every": 5}, len(ROUTE))
    finally:
        shutil.rmtree(base)
        shutil.move(tmp_path / "aside", base)


def test_adapter_run_with_added_tokens_saves_tables(
    base: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base has no rows for the tokens, so the adapter must contain the full tables."""
    import peft

    settings: dict[str, Any] = {"model__name_or_path": str(base), "data__added_tokens": ["<one>", "<two>"]}
    with pytest.raises(UserError, match=r"^data\.added_tokens: .*_save: \[embed_tokens, lm_head\]"):
        leg(tmp_path / "run", corpus, settings, 1)
    settings |= {"adapter__modules_to_save": ["embed_tokens", "lm_head"], "train__steps": 2}
    for until in (1, 2):  # also after a resume
        assert leg(tmp_path / "run", corpus, settings, until) == 0
    final, merged, rows = tmp_path / "run" / "final", tmp_path / "merged", TINY_MODEL["vocab_size"] + 2
    assert main([str(final), str(merged), "--merge-into", str(base), "--quiet"]) == 0
    by_card: dict[str, Any] = {}
    code = (final / MODEL_CARD_FILE).read_text("utf-8").partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(base.parent)  # the card names only the folder of the base
    exec(code.replace("path/of/this/folder", str(final)), by_card)
    found = by_card["model"], peft.AutoPeftModelForCausalLM.from_pretrained(final)
    with torch.no_grad():
        wanted = AutoModelForCausalLM.from_pretrained(merged)(torch.arange(rows - 30, rows)[None]).logits
        for model in found:
            logits = model(torch.arange(rows - 30, rows)[None]).logits
            torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-5)
    assert wanted.shape[-1] == rows


class Contrast:
    """Custom loss with a pass of the base model."""

    needs = ("log_probs",)

    def before(self, forward: Any, batch: Any) -> Any:
        return {"base": forward(adapter=False).log_probs}

    def __call__(self, outputs: Any, batch: Any) -> Any:
        ours, valid = outputs.log_probs, batch["labels"] != -100
        moved = torch.where(valid, (ours - batch["base"]).square(), 0.0).sum()
        return 0.1 * moved - ours.sum(), valid.sum(), {"moved": moved}


class Writes:
    """Callback that generates text."""

    def on_evaluation(self, run: Any, values: Any) -> None:
        assert values["eval_loss/part0"] > 0
        assert len(run.generate("a line of", max_new_tokens=2)) >= 1
        names = [name for name, p in run.model.named_parameters() if p.requires_grad]
        assert all("lora_" in name or "modules_to_save" in name for name in names)


def test_adapter_run_combines_with_other_features(
    base: Path, engines: Engines, corpus: Path, tmp_path: Path
) -> None:
    """A mixture, a custom loss and callback, Muon, learning rates by group and evaluations, with a stop."""
    lines = corpus.read_text("utf-8").splitlines(keepends=True)
    for number in range(2):
        (tmp_path / f"part{number}.jsonl").write_text("".join(lines[number::2]))
    mixed = [
        {"name": f"part{n}", "source": str(tmp_path / f"part{n}.jsonl"), "weight": n + 1} for n in (0, 1)
    ]
    settings: dict[str, Any] = {
        "model__name_or_path": str(base),
        **DORA,
        "data__source": None,
        "data__sources": mixed,
        "data__packing": "documents",
        "data__eval_fraction": 0.1,
        "train__steps": 4,
        "train__eval_every": 2,
        "train__loss": f"{__name__}:Contrast",
        "train__callbacks": [f"{__name__}:Writes"],
        "train__optimizer": "muon",
        "train__parameter_groups": [{"pattern": "lora_B", "learning_rate": 3e-2}],
        "train__metrics": ["accuracy"],
    }
    assert engines.run("no_shard", 1, leg, tmp_path / "truth", corpus, settings, 4) == 0
    for until in (2, 4):
        chosen = {**settings, "strategy": "full_shard"}
        assert engines.run("full_shard", 2, leg, tmp_path / "run", corpus, chosen, until) == 0
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "truth"), rel=1e-5)
    evaluated = [
        [row["eval_loss/part1"] for row in read_metrics(folder) if "eval_loss/part1" in row]
        for folder in (tmp_path / "run", tmp_path / "truth")
    ]
    assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-5) and len(evaluated[0]) >= 2
    assert (tmp_path / "run" / "final" / "adapter_model.safetensors").exists()


def test_adapter_run_rejects_base_with_missing_weights(base: Path, corpus: Path, tmp_path: Path) -> None:
    other = shutil.copytree(base, tmp_path / "base")
    weights = load_file(other / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        UserError,
        match=r"^adapter: .* does not contain model\.norm\.weight, .*; add model\.norm to adapter\.mod",
    ):
        leg(tmp_path / "run", corpus, {"model__name_or_path": str(other)}, 1)
    settings = {"model__name_or_path": str(other), "adapter__modules_to_save": ["model.norm"]}
    assert leg(tmp_path / "again", corpus, settings, 1) == 0


def test_adapter_run_continues_trainer_checkpoint_with_peft(base: Path, corpus: Path, tmp_path: Path) -> None:
    """Each parameter gets the weights and moments in the files of the Trainer."""
    import peft

    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"], use_dora=True)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings)
    rows = [{"input_ids": list(range(i, i + 16)), "labels": list(range(i, i + 16))} for i in range(8)]
    theirs = str(tmp_path / "theirs")
    arguments = TrainingArguments(theirs, max_steps=2, save_steps=2, report_to=[], use_cpu=True)
    Trainer(model, arguments, train_dataset=rows).train()
    source = tmp_path / "theirs" / "checkpoint-2"
    given = {
        "model__config": None,
        "model__name_or_path": str(base),
        "adapter__config": str(source / "adapter_config.json"),
        "checkpoint__resume": str(source),
        "train__betas": [0.9, 0.999],
        "train__weight_decay": 0.0,
    }
    config = configured(tmp_path / "ours", corpus, **given)
    run = prepare_run(resolve_run(config, "cpu"), create_backend("cpu"))
    restored = restore_run(run, source)
    assert restored.progress.step == 2
    engine: Any = restored.engine
    ours = {name: p for name, p in engine.model.named_parameters() if p.requires_grad}
    trained = {
        name.removeprefix("base_model.model."): p for name, p in model.named_parameters() if p.requires_grad
    }
    assert ours.keys() == trained.keys()
    stored = torch.load(source / "optimizer.pt")["state"]
    order = {name: stored[index] for index, name in enumerate(trained)}
    for name, parameter in ours.items():
        assert torch.equal(parameter.detach(), trained[name].detach()), name
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(engine._optimizer.state[parameter][key], order[name][key]), (name, key)
    by_name = {"adapter__config": None, "adapter__type": "lora", "adapter__alpha": 8}
    by_name["adapter__use_dora"] = True
    same_modules = {"adapter__r": 8, "adapter__target_modules": ["q_proj", "up_proj"]}
    for changes, module in (({"adapter__r": 4}, "down_proj"), (same_modules, "up_proj")):
        other = configured(tmp_path / "other", corpus, **{**given, **by_name, **changes})
        message = rf"^checkpoint\.resume: .* different target_modules .*{module}.* differs.*; set adapter"
        with pytest.raises(UserError, match=message):
            restore_run(prepare_run(resolve_run(other, "cpu"), create_backend("cpu")), source)
