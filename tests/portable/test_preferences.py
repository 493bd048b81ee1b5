"""Preference losses: compared with TRL, with their formulas, and on every engine."""

from __future__ import annotations

import copy
import math
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from portable import UserError
from portable.batch import IGNORED_LABEL
from portable.config import RunConfig
from portable.data.sources.conversations import detect_record_format, parse_preference
from portable.data.sources.documents import Conversation
from portable.losses import DPO, IPO, ORPO, SimPO
from portable.model.training_loss import Outputs
from portable.reporting.metrics import read_metrics
from portable.run.rank import run_rank
from portable.run.resolve import resolve_run
from tests.engines import ENGINES, Engines
from tests.parity import opened
from tests.portable.chat_support import tokenizer
from tests.portable.data_support import write_jsonl
from tests.promises import record
from tests.ranks import RankPool
from tests.runs import SENTENCE, TINY_MODEL, configured

WORDS = SENTENCE.split()
LN_2 = math.log(2)
"""DPO loss of a model that equals its reference."""


def said(start: int, count: int) -> str:
    return " ".join(WORDS[(start + at) % len(WORDS)] for at in range(count))


def pairs(count: int) -> list[dict[str, Any]]:
    """Return preferences of different lengths."""
    return [
        {
            "prompt": [{"role": "user", "content": f"{said(i, 1 + i % 4)}?"}],
            "chosen": [{"role": "assistant", "content": f"falls {said(i * 3, i % 5)}."}],
            "rejected": [{"role": "assistant", "content": f"reads {said(i * 5, (i * 7) % 6)}."}],
        }
        for i in range(count)
    ]


PAIRS: dict[str, Any] = {
    "data__seq_len": 48,
    "data__chat_template": "chatml",
    "data__eval_fraction": 0.1,
    "train__global_batch_size": 4,
    "train__micro_batch_size": 1,
    "train__steps": 4,
    "train__learning_rate": 1e-2,
    "train__loss": "dpo",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", pairs(60))


# -- comparison with TRL
# --------------------------------------------------------------------------------------------

STEPS = 10
RATE = 1e-3
"""At ten times as much each step multiplies the rounding of those before it."""
AS_OURS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": STEPS,
    "learning_rate": RATE,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "max_length": 64,
    "logging_steps": 1,
    "save_strategy": "no",
    "gradient_checkpointing": False,
    "report_to": "none",
    "use_cpu": True,
    "disable_tqdm": True,
    "bf16": False,
}
"""TRL's settings for :func:`beside_trl`."""


def test_dpo_run_matches_trl(tmp_path: Path, brief_runs: None) -> None:
    """Ten steps of two micro-batches use the same rows in the same order. The reference is the initial model.

    The model has dropout, which is off.
    """
    trl: Any = pytest.importorskip("trl")
    import transformers
    from datasets import Dataset

    rows, tokens = pairs(40), tokenizer("chatml")
    tokens.save_pretrained(tmp_path / "tokenizer")
    gpt2 = {"model_type": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64}
    settings: dict[str, Any] = {
        "model__config": {**gpt2, "vocab_size": len(tokens)},
        "data__tokenizer": str(tmp_path / "tokenizer"),
        "data__seq_len": 63,
        "data__eval_fraction": 0,
        "train__loss": "dpo(beta=0.1)",
        "train__global_batch_size": 4,
        "train__micro_batch_size": 2,
        "train__steps": STEPS,
        "train__learning_rate": RATE,
        "train__betas": [0.9, 0.999],
        "train__weight_decay": 0.0,
        "train__schedule": "linear",
    }
    config = configured(tmp_path / "run", write_jsonl(tmp_path / "p.jsonl", rows), **settings)
    run_rank("cpu", config)
    ours = [row for row in read_metrics(tmp_path / "run") if "loss" in row]
    with opened(config.replaced({"output_dir": str(tmp_path / "again")})) as trial:
        train = trial.run.data.train
        order = [
            train.list_document_numbers(train.locate_sample(at, config.seed)[1])[0] // 2
            for at in range(4 * STEPS)
        ]
        model = transformers.AutoModelForCausalLM.from_config(trial.run.model_config)
        model.load_state_dict(trial.engine.model.state_dict())

    class InOrder(trl.DPOTrainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return list(range(len(order)))

    trainer = InOrder(
        model=model,
        ref_model=copy.deepcopy(model),
        args=trl.DPOConfig(output_dir=str(tmp_path / "theirs"), beta=0.1, **AS_OURS),
        train_dataset=Dataset.from_list([rows[index] for index in order]),
        processing_class=tokens,
    )
    trainer.train()
    logged = [row for row in trainer.state.log_history if "loss" in row]
    for one, other in zip(ours, logged, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5), (one, other)
        record([one["loss"]], [other["loss"]], 1e-5)
        for name in ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"):
            assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-5), name
    assert ours[0]["loss"] - ours[-1]["loss"] > 0.1  # it is learning, so that equal losses mean equal updates


VARIANTS: list[tuple[DPO, dict[str, float]]] = [
    (DPO(0.3, label_smoothing=0.2), {"aot": 1.0}),  # of one pair; TRL's sigmoid has no smoothing
    (DPO(0.3, loss_type="hinge"), {"hinge": 1.0}),
    (DPO(0.3, 0.2, loss_type="robust"), {"robust": 1.0}),
    (IPO(0.3), {"ipo": 1.0}),
    (DPO(0.3, loss_type="sigmoid_norm"), {"sigmoid_norm": 1.0}),
    (DPO(0.3, loss_type="apo_zero"), {"apo_zero": 1.0}),
    (DPO(0.3, loss_type="apo_down"), {"apo_down": 1.0}),
    (DPO(0.3, loss_type="hinge", sft=0.7), {"hinge": 1.0, "sft": 0.7}),
]
"""A loss, and its parts in TRL with their weights."""


def test_dpo_variants_match_trl(tmp_path: Path) -> None:
    """The loss of each pair is compared, with a policy that differs from its reference."""
    trl: Any = pytest.importorskip("trl")
    import transformers
    from datasets import Dataset

    tokens = tokenizer("chatml")
    config = transformers.LlamaConfig(**{**TINY_MODEL, "vocab_size": len(tokens), "initializer_range": 0.3})
    torch.manual_seed(0)
    model, reference = (transformers.AutoModelForCausalLM.from_config(config).eval() for _ in range(2))
    settings = {**AS_OURS, "per_device_train_batch_size": 1}
    trainer = trl.DPOTrainer(
        model=model,
        ref_model=reference,
        args=trl.DPOConfig(output_dir=str(tmp_path), beta=0.3, **settings),
        train_dataset=Dataset.from_list(pairs(6)),
        processing_class=tokens,
    )
    batches = list(trainer.get_train_dataloader())
    assert len(batches) == 6

    def log_probs(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            found = model(input_ids=ids, attention_mask=mask).logits[:, :-1].log_softmax(-1)
        return torch.as_tensor(found.gather(-1, ids[:, 1:, None])[..., 0])

    for loss, parts in VARIANTS:
        trainer.loss_types, trainer.loss_weights = list(parts), list(parts.values())
        trainer.label_smoothing = loss.label_smoothing
        for batch in batches:
            ids, mask = batch["input_ids"], batch["attention_mask"]
            valid = batch["completion_mask"][:, 1:] == 1
            labels = torch.where(valid, ids[:, 1:], IGNORED_LABEL)
            ours, theirs = (
                torch.where(valid, log_probs(one, ids, mask), 0.0)[None] for one in (model, reference)
            )
            # The second pair only fills up.
            filled, none = (
                torch.stack([labels, torch.full_like(labels, IGNORED_LABEL)]),
                torch.zeros_like(ours),
            )
            given = {"labels": filled, "reference_log_probs": torch.cat([theirs, none]).sum(-1)}
            with torch.no_grad():
                wanted = trainer.compute_loss(trainer.model, batch)
            total, weight, *_ = loss(Outputs(log_probs=torch.cat([ours, none])), given)
            assert float(total) == pytest.approx(float(wanted), rel=2e-5, abs=1e-6), loss
            assert float(weight) == 1 == loss.weight(given)


@pytest.mark.parametrize("kind", ["simpo", "orpo"])
def test_losses_without_reference_match_trl(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log-probabilities are equal. ORPO's first term covers only the answer, as in the paper."""
    pytest.importorskip("trl")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental import cpo, orpo

    torch.manual_seed(0)
    log_probs = -torch.rand(5, 2, 9)
    valid = torch.arange(9) < torch.randint(1, 10, (5, 2, 1))
    batch = {"labels": torch.where(valid, 7, IGNORED_LABEL)}
    log_probs = torch.where(valid, log_probs, 0.0)
    chosen, rejected = (log_probs.sum(-1) / valid.sum(-1)).unbind(-1)
    theirs: Any = SimpleNamespace(accelerator=torch.zeros(()), alpha=0.0, label_smoothing=0.0)
    theirs.beta, theirs.simpo_gamma, theirs.loss_type = 0.7, 1.4, "simpo"
    of_trl: Any = cpo.CPOTrainer.cpo_loss if kind == "simpo" else orpo.ORPOTrainer.odds_ratio_loss
    losses, *rewards = of_trl(theirs, chosen, rejected)
    loss = SimPO(beta=0.7, gamma=1.4) if kind == "simpo" else ORPO(beta=0.7)
    wanted = losses if kind == "simpo" else -chosen - losses
    found: Any = loss(Outputs(log_probs=log_probs), batch)
    total, weight, numbers = found
    assert float(weight) == 5 and float(total) == pytest.approx(float(wanted.sum()), rel=1e-5)
    for name, reward in zip(("chosen", "rejected"), rewards, strict=False):
        assert float(numbers[f"rewards/{name}"]) == pytest.approx(float(reward.sum()), rel=1e-5)


# -- on engines --------------------------------------------------------------------------------------------


def losses(config: RunConfig) -> list[dict[str, float]]:
    with opened(config) as trial:
        results = [trial.step() for _ in range(config.train.steps or 0)]
        return [{"loss": float(result.loss), **trial.read_metrics(result)} for result in results]


LORA: dict[str, Any] = {
    **PAIRS,
    "adapter__type": "lora",
    "adapter__r": 4,
    "adapter__dropout": 0.5,  # which is off
    "train__learning_rate": 5e-3,
    "train__steps": 6,
}
KINDS = {
    "start": ({**PAIRS, "train__micro_batch_size": 4}, PAIRS),
    "adapter": ({**LORA, "adapter__dropout": 0.0}, {**LORA, "train__loss": "dpo(reference='adapter')"}),
}
"""By reference: settings of the expected run, whose reference is its initial model, and of the other run."""


@pytest.fixture(scope="module")
def truth(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, float]]]:
    """Return a function that returns the logged values of each step of a kind of run on one rank."""

    @cache
    def of(kind: str) -> list[dict[str, float]]:
        found = losses(configured(tmp_path_factory.mktemp("truth"), data, **KINDS[kind][0]))
        assert found[0]["loss"] == pytest.approx(LN_2, rel=1e-6)  # no step yet: the reference is the model
        assert found[-1]["loss"] < found[0]["loss"] - 0.01
        return found

    return of


CUT: dict[str, Any] = {"memory__loss_chunk_tokens": 16}


@pytest.mark.parametrize(
    ("kind", "name", "more"),
    [
        ("start", "full_shard", CUT),
        ("start", "zero2", {}),
        ("start", "xla", {}),
        ("adapter", "full_shard", {}),
        ("adapter", "zero3", {}),
        ("adapter", "xla", {}),
    ],
)
def test_preference_losses_match_on_every_engine(
    kind: str, name: str, more: dict[str, Any], truth: Any, data: Path, tmp_path: Path, engines: Engines
) -> None:
    settings = {
        **KINDS[kind][1],
        **ENGINES[name].settings,
        **more,
        "data__cache_dir": str(tmp_path / "cache"),
    }
    found = engines.run(name, 2, losses, configured(tmp_path, data, **settings))
    for one, other in zip(found, truth(kind), strict=True):
        if more or name == "xla":  # the entropy needs all logits, and XLA has none
            other = {key: value for key, value in other.items() if key != "entropy"}
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5)  # rewards are differences of sums
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)


def losses_of_a_host(config: RunConfig) -> list[dict[str, float]]:
    """Train on the only rank of a host. The hosts exchange precomputed values in several parts."""
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    with patch("portable.run.precompute._MICRO_BATCHES_PER_EXCHANGE", 4):
        return losses(config)


def test_hosts_with_shared_cache_do_not_deadlock(
    truth: Any, data: Path, tmp_path: Path, ranks: RankPool
) -> None:
    """If a rank held the lock of the cache while it waits for the other rank, both would wait forever."""
    shared = {"strategy": "full_shard", "data__cache_dir": str(tmp_path / "cache")}
    found = ranks.run(2, losses_of_a_host, configured(tmp_path, data, **PAIRS, **shared), timeout=90)
    expected = [one["loss"] for one in truth("start")]
    assert [one["loss"] for one in found] == pytest.approx(expected, rel=1e-5)


def test_resumed_run_keeps_reference_of_its_start(data: Path, tmp_path: Path, brief_runs: None) -> None:
    """The reference is also kept if the cache is deleted, or if an exported copy replaces the model."""

    def run(name: str, **more: Any) -> list[Any]:
        settings = {**PAIRS, "data__cache_dir": str(tmp_path / "cache"), "train__eval_every": 2, **more}
        run_rank("cpu", configured(tmp_path / name, data, **settings))
        return [row for row in read_metrics(tmp_path / name) if "loss" in row or "eval_loss" in row]

    whole = run("whole")
    assert {"eval_loss", "eval_rewards/accuracies"} <= whole[-1].keys()
    run("halves", train__stop_after=2)
    shutil.rmtree(tmp_path / "cache" / "computed")
    resumed = run("halves")
    wanted = ("loss", "eval_loss", "rewards/margins", "eval_rewards/margins")
    for one, other in zip(resumed, whole, strict=True):
        assert [one.get(name) for name in wanted] == [other.get(name) for name in wanted]


class Teacher:
    """Custom loss that receives the outputs of the initial model, and weights samples."""

    needs = ("log_probs",)

    def once(self, forward: Any, batch: Any) -> Any:
        return {"teacher": forward().log_probs.float().sum(-1)}

    def weight(self, batch: Any) -> float:
        return float((batch["labels"] != IGNORED_LABEL).any(-1).sum())

    def __call__(self, outputs: Outputs, batch: Any) -> Any:
        assert outputs.log_probs is not None
        valid = (batch["labels"] != IGNORED_LABEL).any(-1)
        losses = (outputs.log_probs.sum(-1) - batch["teacher"] - 1).square()
        return torch.where(valid, losses, 0.0).sum(), valid.sum()


@pytest.mark.parametrize("loss", ["simpo", f"{__name__}:Teacher"])
def test_preference_losses_of_mixture_are_logged_by_source(
    loss: str, tmp_path: Path, brief_runs: None
) -> None:
    """Shares count labels, evaluations are logged by source, and precomputed values are available."""
    rows = pairs(40)
    if loss != "simpo":  # a custom loss weights samples, not labels
        rows = [{"messages": row["prompt"] + row["chosen"]} for row in rows]
    sources = [
        {"name": name, "source": str(write_jsonl(tmp_path / f"{name}.jsonl", part)), "weight": 1}
        for name, part in (("one", rows[:20]), ("two", rows[20:]))
    ]
    own = {"data__source": None, "data__sources": sources, "data__packing": False, "train__loss": loss}
    config = configured(tmp_path / "run", tmp_path / "none", **{**PAIRS, **own, "train__eval_every": 2})
    assert run_rank("cpu", config) == 0
    found = read_metrics(tmp_path / "run")
    assert all(row["share/one"] + row["share/two"] == pytest.approx(1) for row in found if "loss" in row)
    assert {"eval_loss/one", "eval_loss/two"} <= {name for row in found for name in row}


class Whole(Teacher):
    whole = True


@pytest.mark.parametrize(
    ("training", "evaluated", "loss", "told"),
    [
        ("pairs", "chats", "dpo", r"^data\.eval\.source: has records of data\.format messages, but data\."),
        ("chats", "pairs", None, r"^data\.eval\.source: has records of data\.format preference, but data\."),
        ("chats", None, "simpo", r"train\.loss: simpo: needs preference pairs, but data\.format is messages"),
        ("chats", None, f"{__name__}:Whole", r"Whole: needs complete sequences; set data\.packing to false"),
        ("stream", None, "dpo", r"train\.loss: dpo: needs all samples before training"),
        ("pairs", None, None, r"data\.format: preference needs a preference loss; set train\.loss to dpo"),
        ("pairs", None, "simpro", r"unknown name; .* did you mean simpo\?"),
        (
            "pairs",
            None,
            "dpo(loss_type='hing')",
            r"loss_type 'hing' is not supported; use one of sigmoid, robust, hinge",
        ),
    ],
)
def test_preference_run_rejects_incompatible_settings(
    training: str, evaluated: str | None, loss: str | None, told: str, tmp_path: Path
) -> None:
    """Pairs need pairs for evaluation, and precomputed values need all samples.

    A dry run raises the same errors.
    """
    chats = [{"messages": row["prompt"] + row["chosen"]} for row in pairs(20)]
    files = {
        "pairs": str(write_jsonl(tmp_path / "pairs.jsonl", pairs(20))),
        "chats": str(write_jsonl(tmp_path / "chats.jsonl", chats)),
    }
    own: dict[str, Any] = {"data__source": files.get(training), "train__loss": loss, "data__eval_fraction": 0}
    own |= {"data__source": files["pairs"], "data__stream": True} if training == "stream" else {}
    own |= {"data__eval": {"source": files[evaluated]}} if evaluated else {}
    own |= {"data__packing": "documents"} if "Whole" in str(loss) else {}
    config = configured(tmp_path / "run", tmp_path, **{**PAIRS, **own})
    for writes in (False, True):
        with pytest.raises(UserError, match=told):
            resolve_run(config, "cpu", writes_output=writes)


def trained_again(folder: Path) -> None:
    """Write other weights into the same files."""
    for file in folder.glob("*.safetensors"):
        tensors = {name: value * 1.5 for name, value in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def sft(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a run whose ``base/final`` is a model, and whose ``lora/final`` is an adapter of the model."""
    folder = tmp_path_factory.mktemp("sft")
    brief = {**PAIRS, "train__loss": "simpo", "train__steps": 2, "checkpoint__async": False}
    run_rank("cpu", configured(folder / "base", data, **brief))
    lora = {"adapter__type": "lora", "model__config": None, "model__name_or_path": f"{folder}/base/final"}
    run_rank("cpu", configured(folder / "lora", data, **{**brief, **lora}))
    return folder


@pytest.mark.parametrize("changed", ["adapter", "base", "seed"])
def test_reference_follows_weights_and_seed(
    changed: str, sft: Path, data: Path, tmp_path: Path, brief_runs: None
) -> None:
    """If a model is retrained in the same folder, a new run begins at ln 2 and a resumed run is rejected."""
    shutil.copytree(sft, tmp_path, dirs_exist_ok=True)
    settings: dict[str, Any] = {
        **PAIRS,
        "model__config": None,
        "model__name_or_path": f"{tmp_path}/base/final",
        "data__cache_dir": str(tmp_path / "cache"),
        "train__steps": 2,
    }
    if changed == "adapter":
        settings |= {"adapter__type": "lora", "adapter__name_or_path": f"{tmp_path}/lora/final"}
    if changed == "seed":
        settings |= {"adapter__type": "lora", "adapter__init": False}

    def run(name: str, **more: Any) -> None:
        run_rank("cpu", configured(tmp_path / name, data, **settings, **more))
        first = next(row for row in read_metrics(tmp_path / name) if "loss" in row)
        assert first["loss"] == pytest.approx(LN_2, rel=1e-6)

    run("one", train__stop_after=1)
    if changed == "seed":
        run("two", seed=1)
        return
    trained_again(tmp_path / ("base" if changed == "base" else "lora") / "final")
    run("two")
    with pytest.raises(UserError, match=r"the reference weights of dpo have changed since"):
        run("one")


def test_frozen_copy_equals_initial_model_as_reference(sft: Path, data: Path, tmp_path: Path) -> None:
    base = f"{sft}/base/final"
    settings = {**PAIRS, "model__config": None, "model__name_or_path": base}
    start, copied = (
        losses(configured(tmp_path, data, **{**settings, "train__loss": loss}))
        for loss in ("dpo", f"dpo(reference='{base}')")
    )
    for one, other in zip(start, copied, strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("adapter", [False, True])
def test_reference_computes_in_precision_of_policy(
    adapter: bool, precision: str, sft: Path, data: Path, tmp_path: Path
) -> None:
    """The files of published models are in bf16."""
    import transformers

    base = tmp_path / "base"
    shutil.copytree(sft / "base" / "final", base)
    model = transformers.AutoModelForCausalLM.from_pretrained(base).to(torch.bfloat16)
    model.save_pretrained(base)
    settings = {**PAIRS, "model__config": None, "model__name_or_path": str(base), "precision": precision}
    settings |= {"adapter__type": "lora", "adapter__r": 4} if adapter else {}
    settings |= {"train__steps": 1, "train__loss": f"dpo(beta=1.0, reference='{base}')"}
    first = losses(configured(tmp_path / "run", data, **settings))[0]
    assert first["loss"] == pytest.approx(LN_2, rel=1e-6)
    assert first["rewards/margins"] == first["rewards/chosen"] == first["rewards/accuracies"] == 0.0


def test_reference_that_sees_its_labels_is_rejected(data: Path, tmp_path: Path) -> None:
    """BERT without ``is_decoder`` attends in both directions."""
    import transformers

    config = transformers.BertConfig(**{**TINY_MODEL, "model_type": "bert", "tie_word_embeddings": True})
    transformers.AutoModelForMaskedLM.from_config(config).save_pretrained(tmp_path / "bert")
    settings = {**PAIRS, "train__steps": 1}
    loss = f"dpo(reference='{tmp_path / 'bert'}')"
    with pytest.raises(UserError, match=r"^train.loss: reference .*bert: .*attends in both directions"):
        losses(configured(tmp_path / "run", data, **{**settings, "train__loss": loss}))


def test_missing_reference_is_named_by_loss(data: Path, tmp_path: Path) -> None:
    settings = {**PAIRS, "train__steps": 1, "train__loss": f"dpo(reference='{tmp_path}/nothing')"}
    with pytest.raises(
        UserError, match=r"^train.loss: dpo.*reference: .*/nothing: no such folder; use a model"
    ):
        losses(configured(tmp_path / "run", data, **settings))


@pytest.mark.parametrize("loss", ["ipo(beta=0.1, ", "dpo(loss_type='hinge', "])
def test_first_loss_with_16_bit_reference_is_exact(loss: str, sft: Path, data: Path, tmp_path: Path) -> None:
    """A reference that equals the policy has the loss of ratios of 0 in every formula."""
    import transformers

    base = tmp_path / "base"
    shutil.copytree(sft / "base" / "final", base)
    model = transformers.AutoModelForCausalLM.from_pretrained(base).to(torch.bfloat16)
    model.save_pretrained(base)
    settings = {**PAIRS, "model__config": None, "model__name_or_path": str(base), "train__steps": 1}
    settings |= {"train__loss": f"{loss}reference='{base}')"}
    first = losses(configured(tmp_path / "run", data, **settings))[0]
    assert first["loss"] == pytest.approx({"i": (0.5 / 0.1) ** 2, "d": 1.0}[loss[0]], rel=1e-6)


@pytest.mark.parametrize("name", ["full_shard", "zero3"])
def test_ranks_cast_reference_like_policy(
    name: str, sft: Path, data: Path, tmp_path: Path, engines: Engines
) -> None:
    import transformers

    base = tmp_path / "base"
    shutil.copytree(sft / "base" / "final", base)
    model = transformers.AutoModelForCausalLM.from_pretrained(base).to(torch.bfloat16)
    model.save_pretrained(base)
    settings = {**PAIRS, "model__config": None, "model__name_or_path": str(base), "precision": "bf16"}
    settings |= {"train__loss": f"dpo(beta=1.0, reference='{base}')", "train__steps": 1}
    config = configured(tmp_path / "run", data, **settings, **ENGINES[name].settings)
    first = engines.run(name, 2, losses, config)[0]
    assert first["loss"] == pytest.approx(LN_2, rel=1e-6) and first["rewards/margins"] == 0.0


def test_adapter_reference_requires_adapter(data: Path, tmp_path: Path) -> None:
    config = configured(tmp_path, data, **{**PAIRS, "train__loss": "dpo(reference='adapter')"})
    with pytest.raises(UserError, match="the model has no adapter to disable; set adapter"):
        losses(config)


# -- data --------------------------------------------------------------------------------------------------


def test_parse_preference_finds_shared_prompt() -> None:
    question = {"role": "user", "content": "why?"}
    one, other = ({"role": "assistant", "content": text} for text in ("so", "no"))
    row = {"prompt": "why?", "chosen": [question, one], "rejected": [question, other]}
    assert detect_record_format(row, "text", "x") == "preference"
    explicit = parse_preference({"prompt": [question], "chosen": [one], "rejected": [other]}, "x")
    assert parse_preference(row, "x") == explicit
    first, second = explicit
    assert isinstance(first, Conversation) and isinstance(second, Conversation)
    assert (first.num_prompt_messages, len(first.messages)) == (1, 2)
    assert second.messages[-1]["content"] == "no"


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"prompt": "a", "chosen": 3, "rejected": "b"}, "chosen is of type int"),
        ({"prompt": "a", "chosen": "b"}, "there is no field rejected"),
        ({"chosen": [{"role": "user", "content": "a"}], "rejected": []}, "have no prompt in common"),
    ],
)
def test_parse_preference_rejects_bad_records(row: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told) as caught:
        parse_preference(row, "file: line 3")
    said = str(caught.value)
    assert "file: line 3" in said and "(example for data.format: preference: " in said
