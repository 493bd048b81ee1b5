"""The schema: defaults, types, what counts as set, rules between settings, identity."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from portable.checks import check
from portable.config import RunConfig, difference, keys, load_config
from portable.config.importing.trainers import WORDS
from portable.errors import UserError
from portable.optim.schedule import build_schedule
from tests.runs import checked

TABLE = keys.settings(RunConfig)
EVERY_KEY = sorted(TABLE)


def refusal(values: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        checked(values)
    text = str(caught.value)
    assert "\n" not in text
    return text


def accepted(**sections: Any) -> RunConfig:
    return checked(sections)


@pytest.mark.parametrize("key", EVERY_KEY)
def test_every_setting_is_described(key: str) -> None:
    setting = TABLE[key]
    assert len(setting.description) > 20
    assert setting.description.endswith(".")
    assert setting.allowed


def test_defaults_are_valid_when_given_in_full() -> None:
    spelled_out = keys.nested({key: keys.plain(setting.default) for key, setting in TABLE.items()})
    assert load_config(spelled_out) == RunConfig()


def test_async_is_shown_under_its_own_name() -> None:
    assert "checkpoint.async" in TABLE
    assert accepted(checkpoint={"async": False}).checkpoint.async_ is False
    assert "did you mean checkpoint.async?" in refusal({"checkpoint": {"async_": False}})


def test_a_config_cannot_be_changed() -> None:
    config = RunConfig()
    with pytest.raises(ValidationError):
        config.train.steps = 3


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("train", "steps", True),
        ("train", "steps", "8"),
        ("train", "steps", 8.0),
        ("train", "steps", 0),
        ("train", "learning_rate", "fast"),
        ("train", "learning_rate", True),
        ("train", "learning_rate", float("nan")),
        ("train", "learning_rate", float("inf")),
        ("train", "betas", [0.9]),
        ("train", "betas", [0.9, 1.0]),
        ("train", "betas", 0.9),
        ("train", "micro_batch_size", "largest"),
        ("train", "micro_batch_size", False),
        ("train", "schedule", "Cosine"),
        ("train", "min_learning_rate_ratio", 1.5),
        ("data", "source", 3),
        ("data", "source", []),
        ("data", "eval_fraction", 1.0),
        ("data", "eval_fraction", -0.1),
        ("data", "packing", 1),
        ("data", "seq_len", None),
        ("model", "config", "llama"),
        ("model", "config", {"model_type": "llama", "x": object()}),
        ("log", "trackers", ["tensorbord"]),
        ("checkpoint", "keep", 0),
        ("xla", "xla_fsdp_v2", False),
    ],
)
def test_wrong_values_are_refused_by_name(section: str, name: str, value: Any) -> None:
    assert refusal({section: {name: value}}).startswith(f"{section}.{name} ")


def test_words_for_truth_and_single_names_are_understood() -> None:
    config = accepted(compile="on", data={"packing": "no"}, log={"trackers": "wandb"})
    assert config.compile is True
    assert config.data.packing is False
    assert config.log.trackers == ("wandb",)


def test_accelerates_spelling_of_policies_is_understood() -> None:
    config = accepted(
        fsdp={"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "backward_prefetch": "BACKWARD_PRE"}
    )
    assert config.fsdp.auto_wrap_policy == "transformer_based_wrap"
    assert config.fsdp.backward_prefetch == "backward_pre"


def test_an_integer_is_a_number() -> None:
    assert accepted(train={"learning_rate": 1}).train.learning_rate == 1.0


def test_from_scratch() -> None:
    assert RunConfig().model.from_scratch
    assert not accepted(model={"name_or_path": "gpt2"}).model.from_scratch
    assert accepted(model={"name_or_path": "gpt2", "init": "scratch"}).model.from_scratch


# What counts as set, and defaults that follow other settings


def test_is_set() -> None:
    config = accepted(seed=0, train={"epochs": 2})
    assert config.is_set("seed")
    assert config.is_set("train")
    assert config.is_set("train.epochs")
    assert not config.is_set("train.steps")
    assert not config.is_set("data")
    with pytest.raises(KeyError):
        config.is_set("train.step")


def test_epochs_stand_in_for_default_steps() -> None:
    config = accepted(train={"epochs": 2})
    assert config.train.steps is None
    assert config.train.epochs == 2


@pytest.mark.parametrize(("steps", "warmup"), [(5, 0), (25, 2), (100, 10), (200, 20), (5000, 20)])
def test_default_warmup_follows_steps(steps: int, warmup: int) -> None:
    assert accepted(train={"steps": steps}).train.warmup_steps == warmup
    by_epochs = accepted(train={"epochs": 2})  # which come to as many
    assert build_schedule(by_epochs.train, steps).warmup_steps == warmup


@pytest.mark.parametrize(("batch", "micro"), [(8, 4), (6, 3), (7, 1), (2, 2), (64, 4)])
def test_default_micro_batch_divides_the_global_batch(batch: int, micro: int) -> None:
    config = accepted(train={"global_batch_size": batch})
    assert config.train.micro_batch_size == micro
    assert not config.is_set("train.micro_batch_size")


def test_tasks_that_pad_turn_default_packing_off() -> None:
    assert accepted(model={"task": "seq2seq-lm"}, data={"source": "pairs.jsonl"}).data.packing is False


def test_named_model_puts_the_default_config_aside() -> None:
    assert accepted(model={"name_or_path": "gpt2"}).model.config is None


def test_get_takes_dotted_keys() -> None:
    config = RunConfig()
    assert config.get("checkpoint.async") is True
    assert config.get("seed") == 0
    with pytest.raises(KeyError):
        config.get("nothing")


def test_replaced_checks_again_and_does_not_count_as_set() -> None:
    config = accepted(precision="tf32")
    on_gpu = config.replaced({"backend": "cuda"}).replaced({"train.micro_batch_size": 2})
    assert (on_gpu.backend, on_gpu.train.micro_batch_size) == ("cuda", 2)
    assert on_gpu.is_set("precision")
    assert not on_gpu.is_set("backend")
    assert config.backend == "auto"
    with pytest.raises(UserError, match="tf32"):
        check(config.replaced({"backend": "xla"}))


def test_replaced_keeps_defaults_following() -> None:
    assert RunConfig().replaced({"train.steps": 50}).train.warmup_steps == 5


# Contradictions

PAIRS = {"source": "pairs.jsonl"}
CONFLICTS: list[tuple[dict[str, Any], list[str]]] = [
    ({"train": {"steps": 5, "epochs": 1}}, ["train.steps", "train.epochs"]),
    ({"train": {"steps": None}}, ["train.steps", "train.epochs"]),
    ({"train": {"warmup_steps": 201}}, ["train.warmup_steps", "train.steps"]),
    ({"train": {"stop_after": 201}}, ["train.stop_after", "train.steps"]),
    (
        {"train": {"global_batch_size": 8, "micro_batch_size": 3}},
        ["train.global_batch_size", "train.micro_batch_size"],
    ),
    ({"train": {"micro_batch_size": 16}}, ["train.global_batch_size", "train.micro_batch_size"]),
    ({"strategy": "zero2", "train": {"optimizer": "adafactor"}}, ["train.optimizer", "strategy"]),
    (
        {"model": {"name_or_path": "gpt2", "config": {"model_type": "gpt2"}}},
        ["model.name_or_path", "model.config"],
    ),
    ({"model": {"config": None}}, ["model.name_or_path", "model.config"]),
    ({"model": {"config": {"hidden_size": 8}}}, ["model.config.model_type"]),
    (
        {"model": {"task": "sequence-classification"}, "data": {**PAIRS, "packing": True}},
        ["data.packing", "model.task"],
    ),
    ({"model": {"task": "seq2seq-lm"}, "data": {**PAIRS, "packing": True}}, ["data.packing", "model.task"]),
    (
        {"model": {"task": "seq2seq-lm"}, "data": {**PAIRS, "packing": "documents"}},
        ["data.packing", "model.task"],
    ),
    ({"model": {"task": "masked-lm"}, "data": {"packing": "documents"}}, ["data.packing", "model.task"]),
    ({"model": {"task": "seq2seq-lm"}}, ["data.source", "model.task"]),
    ({"data": {"tokenizer": "gpt2", "vocab_size": 500}}, ["data.vocab_size", "data.tokenizer"]),
    ({"backend": "cpu", "precision": "fp16", "strategy": "zero2"}, ["precision", "backend"]),
    ({"backend": "cpu", "precision": "tf32"}, ["precision", "backend"]),
    ({"backend": "xla", "precision": "tf32"}, ["precision", "backend"]),
    ({"backend": "xla", "strategy": "zero1"}, ["strategy", "backend"]),
    ({"backend": "xla", "model": {"attention": "flash_attention_2"}}, ["model.attention", "backend"]),
    ({"precision": "fp32", "model": {"attention": "flash_attention_2"}}, ["model.attention", "precision"]),
    ({"memory": {"offload_optimizer": "nvme"}}, ["memory.offload_optimizer", "memory.nvme_path"]),
    ({"memory": {"nvme_path": "/nvme"}}, ["memory.nvme_path", "memory.offload_params"]),
    ({"strategy": "zero2", "memory": {"offload_params": "cpu"}}, ["memory.offload_params", "strategy"]),
    (
        {"strategy": "zero1", "memory": {"offload_optimizer": "nvme", "nvme_path": "/nvme"}},
        ["memory.offload_optimizer", "zero3"],
    ),
    ({"strategy": "full_shard", "deepspeed": {"config": "ds.json"}}, ["deepspeed.config", "strategy"]),
    ({"strategy": "zero3", "fsdp": {"forward_prefetch": False}}, ["fsdp.forward_prefetch", "strategy"]),
    ({"fsdp": {"shard_group_size": 4}}, ["fsdp.shard_group_size", "hybrid_shard"]),
    ({"fsdp": {"auto_wrap_policy": "size_based_wrap"}}, ["fsdp.min_num_params"]),
    ({"fsdp": {"auto_wrap_policy": "no_wrap", "min_num_params": 9}}, ["fsdp.min_num_params"]),
    (
        {"fsdp": {"auto_wrap_policy": "no_wrap", "transformer_layer_cls_to_wrap": ["A"]}},
        ["fsdp.transformer_layer_cls_to_wrap"],
    ),
    (
        {
            "backend": "xla",
            "xla": {"xla_fsdp_grad_ckpt": False},
            "memory": {"activation_checkpointing": "full"},
        },
        ["xla.xla_fsdp_grad_ckpt", "memory.activation_checkpointing"],
    ),
]


@pytest.mark.parametrize(("values", "named"), CONFLICTS)
def test_contradictions_name_the_keys(values: dict[str, Any], named: list[str]) -> None:
    text = refusal(values)
    for key in named:
        assert key in text


def test_one_file_may_hold_settings_for_every_backend() -> None:
    for backend in ("auto", "cpu", "cuda", "xla"):
        accepted(backend=backend, xla={"xla_fsdp_grad_ckpt": True}, fsdp={"forward_prefetch": True})
    accepted(backend="xla", strategy="full_shard", deepspeed={"config": "ds.json"})  # ignored there


def test_a_default_strategy_yields_to_the_deepspeed_file() -> None:
    config = accepted(deepspeed={"config": {"zero_optimization": {"stage": 2}}})
    assert config.replaced({"strategy": "zero2"}).strategy == "zero2"


# Identity

FREE = {
    "backend": "cpu",
    "strategy": "no_shard",
    "output_dir": "elsewhere",
    "compile": True,
    "model.attention": "eager",
    "data.num_workers": 3,
    "data.cache_dir": "/cache",
    "train.stop_after": 10,
    "train.micro_batch_size": 2,
    "train.eval_every": 7,
    "memory.activation_checkpointing": "full",
    "checkpoint.every_steps": 9,
    "log.every_steps": 1,
}
BOUND = {
    "seed": 1,
    "precision": "bf16",
    "model.init": "scratch",
    "data.seq_len": 128,
    "data.eval_fraction": 0.5,
    "train.steps": 300,
    "train.global_batch_size": 16,
    "train.optimizer": "sgd",
    "train.betas": [0.9, 0.99],
    "train.learning_rate": 1e-3,
    "train.schedule": "linear",
    "train.warmup_steps": 5,
    "train.weight_decay": 0.0,
    "train.max_grad_norm": None,
}


@pytest.mark.parametrize("key", sorted(FREE))
def test_what_may_change_between_legs(key: str) -> None:
    assert difference(RunConfig(), load_config(None, {key: FREE[key]})) == []


@pytest.mark.parametrize("key", sorted(BOUND))
def test_what_defines_the_run(key: str) -> None:
    (line,) = difference(RunConfig(), load_config(None, {key: BOUND[key]}))
    assert line.startswith(f"{key}: ")


def test_difference_looks_inside_the_model_config() -> None:
    other = load_config(None, ["--model.config.hidden_size", "64"])
    assert difference(RunConfig(), other) == ["model.config.hidden_size: 256 and 64"]


def test_difference_reads_fingerprints_back_from_json() -> None:
    stored = json.loads(json.dumps(RunConfig().fingerprint()))
    assert difference(stored, RunConfig()) == []
    del stored["train.min_learning_rate_ratio"]
    assert difference(stored, RunConfig()) == []
    stored["train.optimizer"] = "sgd"
    assert difference(stored, RunConfig()) == ["train.optimizer: 'sgd' and 'adamw'"]


def test_difference_of_named_and_built_models() -> None:
    lines = difference(RunConfig(), load_config({"model": {"name_or_path": "gpt2"}}))
    assert "model.name_or_path: not set and 'gpt2'" in lines
    assert "model.config.model_type: 'llama' and not set" in lines


def test_words_of_other_trainers_lead_to_real_ones() -> None:
    for key, words in WORDS.items():
        for word, meant in words.items():
            assert word not in TABLE[key].choices
            assert {*re.split(r"\W+", meant)} & {*TABLE[key].choices, "", "list"}


def test_the_config_needs_no_framework() -> None:
    heavy = ("torch", "transformers", "numpy")
    code = f"import sys, portable.config; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("epochs", "steps"),
    [("train.eval_every_epochs", "train.eval_every"), ("checkpoint.every_epochs", "checkpoint.every_steps")],
)
def test_how_often_is_said_in_epochs_or_in_steps(epochs: str, steps: str) -> None:
    config = load_config(None, {epochs: 0.5})
    assert (config.get(epochs), config.get(steps)) == (0.5, None)
    assert load_config(config.model_dump(by_alias=True)) == config
    with pytest.raises(UserError, match=f"{epochs} 0.5 and {steps} 10 are both set"):
        checked(None, {epochs: 0.5, steps: 10})
