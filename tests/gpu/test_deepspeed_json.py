"""DeepSpeed's own JSON: taken over, filled in, and never misread in silence."""

from __future__ import annotations

import json
import shutil
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
from pydantic import ValidationError

pytest.importorskip("deepspeed")

from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel

from gpu.zero import config as deepspeed_json
from gpu.zero import runtime as zero_runtime
from gpu.zero.config.schema import check, names_at, schema_of
from portable.batch_plan import plan_batches
from portable.config import RunConfig
from portable.config.yaml_text import parse
from portable.errors import UserError
from portable.run.rank import run_rank
from portable.run.resolve import resolve
from tests.gpu.test_parity import STEPS, Losses, assert_close, our_losses
from tests.gpu.test_zero_checkpoints import leg
from tests.ranks import RankPool
from tests.runs import configured, losses


def of(text: str) -> dict[str, Any]:
    """The keys of a flow mapping in YAML."""
    return dict(parse(f"{{{text}}}", "the guide").value)


FP16 = of(
    "enabled: auto, loss_scale: 0, loss_scale_window: 1000, initial_scale_power: 16, hysteresis: 2, "
    "min_loss_scale: 1"
)
ADAMW = of("type: AdamW, params: {lr: auto, betas: auto, eps: auto, weight_decay: auto}")
WARMUP = of("type: WarmupLR, params: {warmup_min_lr: auto, warmup_max_lr: auto, warmup_num_steps: auto}")
BATCHES = of(
    "gradient_accumulation_steps: auto, gradient_clipping: auto, steps_per_print: 2000, "
    "train_batch_size: auto, train_micro_batch_size_per_gpu: auto, wall_clock_breakdown: false"
)
STAGE3 = of(
    "stage: 3, overlap_comm: true, contiguous_gradients: true, sub_group_size: 1e9, "
    "reduce_bucket_size: auto, stage3_prefetch_bucket_size: auto, stage3_param_persistence_threshold: auto, "
    "stage3_max_live_parameters: 1e9, stage3_max_reuse_distance: 1e9, "
    "stage3_gather_16bit_weights_on_model_save: true"
)
PINNED = {"device": "cpu", "pin_memory": True}
COMMON = {"fp16": FP16, "optimizer": ADAMW, "scheduler": WARMUP, **BATCHES}
# Files of Hugging Face's DeepSpeed guide, as they stand there. What the others say: ``test_published_json``.
GUIDE: dict[str, dict[str, Any]] = {
    "zero2": of(
        "zero_optimization: {stage: 2, offload_optimizer: {device: cpu, pin_memory: true}, "
        "allgather_partitions: true, allgather_bucket_size: 5e8, overlap_comm: true, reduce_scatter: true, "
        "reduce_bucket_size: 5e8, contiguous_gradients: true, round_robin_gradients: true}"
    ),
    "zero3": {
        **COMMON,
        "zero_optimization": {**STAGE3, "offload_optimizer": PINNED, "offload_param": PINNED},
    },
    "nvme": {
        **COMMON,
        "zero_optimization": STAGE3
        | of(
            "offload_optimizer: {device: nvme, nvme_path: /local_nvme, pin_memory: true, buffer_count: 4, "
            "fast_init: false}, offload_param: {device: nvme, nvme_path: /local_nvme, pin_memory: true, "
            "buffer_count: 5, buffer_size: 1e8, max_in_cpu: 1e9}, aio: {block_size: 262144, "
            "queue_depth: 32, thread_count: 1, single_submit: false, overlap_events: true}"
        ),
    },
    "communication": of("zero_optimization: {stage: 2}, communication_data_type: fp32"),
}


@pytest.fixture(scope="module", autouse=True)
def deepspeed() -> Any:
    return zero_runtime.import_deepspeed("cpu")


def resolved(folder: Path, corpus: Path, document: Any, **settings: Any) -> RunConfig:
    config = configured(folder, corpus, deepspeed__config=document, **settings)
    return resolve(config, "cpu", 2).config


def from_guide(name: str, folder: Path) -> dict[str, Any]:
    """The guide's file; where it names a disk, one that is there."""
    document = deepcopy(GUIDE[name])
    for part in ("offload_optimizer", "offload_param"):
        block = document["zero_optimization"].get(part, {})
        if "nvme_path" in block:
            block["nvme_path"] = str(folder)
    return document


LEARNING: dict[str, Any] = {
    "train__global_batch_size": 4,
    "train__learning_rate": 0.006,
    "data__eval_fraction": 0,
}
"""Of a run that learns in spite of DeepSpeed's slow warm-up; each of two ranks takes two micro-batches."""


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Callable[[str], Losses]:
    """The losses of one rank without ZeRO, by schedule."""

    @cache
    def losses(schedule: str) -> Losses:
        folder = tmp_path_factory.mktemp("truth")
        settings = {**LEARNING, "strategy": "no_shard", "train__schedule": schedule}
        return our_losses(configured(folder, corpus, **settings))

    return losses


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.ops("async_io") if name == "nvme" else ()) for name in GUIDE],
)
def test_the_guides_files_train(
    name: str, truth: Callable[[str], Losses], tmp_path: Path, corpus: Path, ranks: RankPool
) -> None:
    document = from_guide(name, tmp_path)
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(document))
    schedule = "WarmupLR" if "scheduler" in document else "constant"
    settings: dict[str, Any] = {**LEARNING, "train__micro_batch_size": 1, "train__schedule": schedule}
    config = configured(tmp_path, corpus, deepspeed__config=str(file), **settings)
    assert_close(ranks.run(2, our_losses, config), truth(schedule), 1e-5, falls=0.2)
    assert not list(tmp_path.glob("portable-swap-*"))


def forced(folder: Path, corpus: Path, stage: int, **settings: Any) -> RunConfig:
    document = {
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}},
        "zero_force_ds_cpu_optimizer": True,
    }
    return configured(folder, corpus, deepspeed__config=document, train__micro_batch_size=1, **settings)


def forced_leg(folder: Path, corpus: Path, stage: int, stop: int | None, updates: int) -> int:
    """A leg, once it is certain that DeepSpeed's optimizer makes its updates."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    calls = 0
    own = DeepSpeedCPUAdam.step

    def counted(self: Any, closure: Any = None) -> Any:
        nonlocal calls
        calls += 1
        return own(self, closure)

    settings = {**SHORT, "train__stop_after": stop, "log__sample_tokens": 0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeepSpeedCPUAdam, "step", counted)
        status = run_rank("cpu", forced(folder, corpus, stage, **settings))
    assert calls >= updates
    return status


SHORT: dict[str, Any] = {**LEARNING, "train__steps": STEPS, "train__schedule": "constant"}


@pytest.mark.ops("cpu_adam")
def test_deepspeeds_cpu_optimizer_where_it_is_asked_for(
    truth: Callable[[str], Losses], tmp_path: Path, corpus: Path, ranks: RankPool
) -> None:
    """It follows torch's, goes on bit for bit, and moves."""
    stage = 3
    whole, run, moved = tmp_path / "whole", tmp_path / "run", tmp_path / "moved"
    assert ranks.run(2, forced_leg, whole, corpus, stage, None, STEPS) == 0
    plain = [loss for loss, _ in truth("constant")]
    assert list(losses(whole).values()) == pytest.approx(plain, rel=1e-5)
    assert plain[-1] < plain[0] - 0.3  # it is learning, so that equal losses mean equal updates
    assert ranks.run(2, forced_leg, run, corpus, stage, 2, 2) == 0
    shutil.copytree(run, moved)
    assert ranks.run(2, forced_leg, run, corpus, stage, None, STEPS - 2) == 0
    weights = [folder / "final" / "model.safetensors" for folder in (whole, run)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert ranks.run(4, leg, moved, corpus, {"strategy": "full_shard", **SHORT}) == 0
    assert losses(moved) == pytest.approx(losses(whole), rel=1e-5)


def test_an_op_that_cannot_be_built_is_one_line(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The missing compiler is pretended: this machine has one."""
    from deepspeed.ops.op_builder import CPUAdamBuilder

    def load(_: Any) -> None:
        raise RuntimeError("c++: not found\nninja: stopped")

    monkeypatch.setattr(CPUAdamBuilder, "load", load)
    with pytest.raises(
        UserError, match=r"zero_force_ds_cpu_optimizer true.*cpu_adam cannot be built.*compiler"
    ):
        resolve(forced(tmp_path, corpus, 2), "cpu", 2)


def test_what_both_files_say_is_taken_over(tmp_path: Path, corpus: Path) -> None:
    document = {
        "train_batch_size": 12,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "optimizer": {"type": "Adam", "params": {"lr": 0.002, "betas": [0.8, 0.9], "eps": 1e-7}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_max_lr": 0.002, "warmup_num_steps": 5, "total_num_steps": 20},
        },
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "activation_checkpointing": {"partition_activations": True},
    }
    settings = configured(tmp_path, corpus).model_dump()
    from portable.config import load_config

    given = {"model": {"config": settings["model"]["config"]}, "deepspeed": {"config": document}}
    config = resolve(load_config(given), "cpu", 2).config
    train = config.train  # what else is taken over: ``test_published_json``
    assert (train.learning_rate, train.betas, train.eps) == (0.002, (0.8, 0.9), 1e-7)
    assert train.weight_decay == 0  # DeepSpeed's default for what its block leaves out
    assert plan_batches(config, world_size=2, rank=0).accumulation_steps == 3
    from portable.config import dump_yaml

    written = tmp_path / "config.yaml"
    written.write_text(dump_yaml(config))
    again = resolve(load_config(written), "cpu", 2).config
    assert again == config  # a resolved config agrees with the JSON in it


CONFLICTS: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    ({"train_batch_size": 8}, {}, ["train_batch_size sets", "to 8", "train.global_batch_size is 6"]),
    ({"gradient_clipping": 0.5}, {"train__max_grad_norm": 1.0}, ["gradient_clipping", "train.max_grad_norm"]),
    ({"zero_optimization": {"stage": 4}}, {}, ["zero_optimization.stage", "4"]),
    ({"zero_optimization": {"stage": "auto"}}, {}, ["zero_optimization.stage is", "set strategy to zero1"]),
    ({}, {"strategy": "no_shard"}, ["zero_optimization.stage sets strategy", "strategy is", "no_shard"]),
    ({}, {"strategy": "full_shard"}, ["deepspeed.config has no effect", "full_shard"]),
    ({"zero_optimization": {"stage": 2, "cpu_offload": True, "offload_optimizer": {}}}, {}, ["cpu_offload"]),
    ({"bf16": {"enabled": True}}, {}, ["bf16.enabled", "precision is", "fp32"]),
    ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, {}, ["bfloat16 and fp16", "simultaneously"]),
    ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}, {}, ["optimizer.params.lr", "0.003"]),
    ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": 0}}}, {}, ["adam_w_mode", "remove it"]),
    ({"optimizer": {"type": "Lamb"}}, {}, ["optimizer.type: 'Lamb'", "flat partitions", "AdamW"]),
    (
        {"activation_checkpointing": {"cpu_checkpointing": True}},
        {"memory__activation_checkpointing": "none"},
        ["activation_checkpointing.cpu_checkpointing", "memory.activation_checkpointing is", "none"],
    ),
    ({"optimizer": {"type": "AdamW", "params": {"momentum": 0.9}}}, {}, ["unknown key optimizer.params.mom"]),
    ({"scheduler": {"type": "OneCycle"}}, {"train__warmup_steps": 0}, ["scheduler.params.cycle_min_lr"]),
    ({"scheduler": {"type": "CosineLR"}}, {}, ["scheduler.type: 'CosineLR'", "WarmupCosineLR"]),
    ({"scheduler": {"type": "WarmupLR"}}, {"train__schedule": "linear"}, ["WarmupLR", "train.schedule"]),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cubic"}}},
        {},
        ["scheduler.params.warmup_type"],
    ),
    (
        {"zero_allow_untested_optimizer": False},
        {"train__optimizer": "sgd"},
        ["zero_allow_untested_optimizer false", "sgd"],
    ),
    ({"prescale_gradients": True}, {}, ["prescale_gradients", "reduce_scatter"]),
    ({"gradient_allreduce_op": "sum"}, {}, ["gradient_allreduce_op"]),
    ({"train_micro_batch_size_per_gpu": 2}, {}, ["is not divisible", "2 x 2 ranks"]),
    ({"gradient_accumulation_steps": 4}, {}, ["gradient_accumulation_steps 4", "auto"]),
    ({"fp_16": 3, "a": 1, "fp16": {"b": 1}}, {}, ["keys fp16.b, fp_16 (did you mean fp16?), a"]),
    ({"zero_optimization": {"overlapp_comm": 1}}, {}, ["mean zero_optimization.overlap_comm?"]),
    ({"weight_quantization": {"enabled": 5}}, {}, ["WeightQuantConfig"]),
    ({"data_types": {"grad_accum_dtype": {}}}, {}, ["data_types.grad_accum_dtype", "no dtype"]),
    ({"wandb": {"enabled": True}}, {}, ["wandb is not installed", "log.trackers"]),
    (
        {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}},
        {},
        ["_weights", "for GPUs only"],
    ),
    ({"nebula": {"enabled": True}}, {}, ["removed"]),
    ({"bf16": {"check_grad_overflow": False}}, {"precision": "bf16"}, ["check_grad_overflow"]),
    ({"fp16": {"enabled": True}}, {"precision": "auto"}, ["fp16", "cpu"]),
]


@pytest.mark.parametrize(("document", "settings", "words"), CONFLICTS)
def test_contradictions_name_both_sides(
    document: dict[str, Any], settings: dict[str, Any], words: list[str], tmp_path: Path, corpus: Path
) -> None:
    document = {"zero_optimization": {"stage": 2}, **document}
    with pytest.raises(UserError) as caught:
        resolved(tmp_path, corpus, document, **settings)
    line = str(caught.value)
    assert "\n" not in line
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ["invalid JSON"]),
        ("[]", ["must be a mapping"]),
        ('{"fp16": {}, "fp16": {}}', ["duplicate key fp16"]),
        ('{"zero_optimization": 2}', ["zero_optimization must be a mapping, not 2"]),
    ],
)
def test_files_that_are_no_configuration(text: str, words: list[str], tmp_path: Path, corpus: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        resolved(tmp_path, corpus, str(file))
    for word in [str(file), *words]:
        assert word in str(caught.value)


def leaves(schema: type[BaseModel], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    names = names_at(schema, path)
    if path[-1:] == ("curriculum_metrics",) or (path and names == names_at(schema, path[:-1])):  # no section
        return []
    return [found for name in names for found in ((*path, name), *leaves(schema, (*path, name)))]


def nested(path: tuple[str, ...]) -> dict[str, Any]:
    value: Any = 1
    for key in reversed(path):
        value = {key: value}
    made: dict[str, Any] = value
    return made


def unknown(schema: type[BaseModel], path: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The keys of a document that the schema does not have: what `check` refuses first."""
    try:
        schema(**nested(path))
    except ValidationError as refused:
        return [detail["loc"] for detail in refused.errors() if detail["type"] == "extra_forbidden"]  # type: ignore[misc]
    except TypeError:  # DeepSpeed's word on the value
        pass
    return []


def test_every_key_is_known_and_every_misspelling_found() -> None:
    schema = schema_of({})
    paths = leaves(schema)
    assert len(paths) > 250
    for path in paths:
        assert unknown(schema, path) == []
        *around, name = path
        wrong = (*around, name[:-1] + "1" + name[-1])
        assert unknown(schema, wrong) == [wrong]
    with pytest.raises(UserError, match=f"unknown key {'.'.join(wrong)}"):
        check(nested(wrong), "ds.json")


WRONG_VALUES: dict[str, tuple[Any, str]] = {
    "zero_optimization.stage": ({"stage": "two"}, "0, 1, 2, 3"),
    "zero_optimization.overlap_comm": ({"overlap_comm": "maybe"}, "boolean"),
    "zero_optimization.offload_optimizer.device": ({"offload_optimizer": {"device": "disk"}}, "'nvme'"),
    "bf16": (True, "dictionary"),
    "fp16.loss_scale": ({"loss_scale": "dynamic"}, "number"),
    "gradient_clipping": (-1, "greater than or equal to 0"),
    "gradient_allreduce_op": ("max", "mean"),
    "communication_data_type": ("fp64", "bf16"),
    "zero_allow_untested_optimizer": ("true", "boolean"),
    "aio.block_size": ({"block_size": "1M"}, "number"),
    "checkpoint.tag_validation": ({"tag_validation": "Never"}, "'warn'"),
    "data_types.grad_accum_dtype": ({"grad_accum_dtype": "fp12"}, "fp12"),
    "optimizer": ("AdamW", "dictionary"),
    "optimizer.params.lr": ({"type": "AdamW", "params": {"lr": "fast"}}, "must be number > 0"),
    "optimizer.params.betas": ({"type": "AdamW", "params": {"betas": [0.9]}}, "must be two of"),
    "flops_profiler.profile_step": ({"profile_step": "first"}, "number"),
}


@pytest.mark.parametrize("path", WRONG_VALUES)
def test_a_value_that_deepspeed_would_not_take_is_named(path: str, tmp_path: Path, corpus: Path) -> None:
    value, expected = WRONG_VALUES[path]
    document = {"zero_optimization": {"stage": 2}, path.partition(".")[0]: value}
    with pytest.raises(UserError) as caught:
        resolved(tmp_path, corpus, document)
    line = str(caught.value)
    assert line.startswith(f"deepspeed.config: {path}")
    assert expected in line
    assert "\n" not in line


def test_values_are_read_as_deepspeed_reads_them(tmp_path: Path, corpus: Path) -> None:
    """Its parser takes 2.0, which some programs write."""
    document = {"zero_optimization": {"stage": 2.0, "overlap_comm": "no"}, "bf16": {"enabled": "true"}}
    config = resolved(tmp_path, corpus, document, precision="auto")
    assert (config.precision, config.strategy) == ("bf16", "zero2")


@pytest.mark.parametrize(
    ("more", "rate", "told"),
    [
        ({"optimizer": {"params": {"lr": 0.1}}}, 0.003, "params: has no effect without optimizer.type"),
        # As in DeepSpeed, where the scheduler writes over what the optimizer was given.
        (
            {
                "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
                "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.003}},
            },
            0.003,
            "params.lr: has no effect",
        ),
    ],
)
def test_a_rate_without_effect(
    more: dict[str, Any], rate: float, told: str, tmp_path: Path, corpus: Path
) -> None:
    config = resolved(tmp_path, corpus, {"zero_optimization": {"stage": 1}, **more})
    assert config.train.learning_rate == rate
    read = deepspeed_json.read(config)
    assert read is not None
    assert f"optimizer.{told}" in read.imported.notes[-1]


def test_old_places_are_mended_and_told(tmp_path: Path, corpus: Path) -> None:
    config = configured(tmp_path, corpus, deepspeed__config=from_guide("nvme", tmp_path))
    document = deepspeed_json.read(config)
    assert document is not None
    assert document.values["aio"]["intra_op_parallelism"] == 1
    assert "aio" not in document.values["zero_optimization"]
    moved = [notice for notice in document.imported.notes if notice.startswith("deepspeed.config: aio")]
    assert len(moved) == 2
