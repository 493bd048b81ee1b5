"""Published DeepSpeed JSONs: the engine gets the values of DeepSpeed's parser, leaf by leaf."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import pytest
import yaml

pytest.importorskip("deepspeed")

from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from portable.batch_plan import compute_batch_plan
from portable.config import RunConfig, load_config
from portable.errors import UserError
from portable.gpu.zero import config as deepspeed_json
from portable.gpu.zero import runtime as zero_runtime
from portable.gpu.zero.buckets import compute_auto_bucket_sizes
from portable.gpu.zero.settings import ModelElementCounts, build_deepspeed_config
from portable.optim.schedule import SCHEDULES
from tests import published
from tests.published import Shape, shapes

HIDDEN = 64
SIZES = ModelElementCounts(HIDDEN, 4 * HIDDEN * HIDDEN)

LEAVES = yaml.safe_load((Path(published.__file__).parent / "deepspeed_leaves.yaml").read_text())


@pytest.fixture(scope="module", autouse=True)
def deepspeed() -> Any:
    return zero_runtime.import_deepspeed("cpu")


@pytest.fixture(scope="module")
def read(deepspeed: Any) -> Any:
    """Return DeepSpeed's parser, for any number of ranks."""
    from deepspeed.runtime import config

    def read(values: dict[str, Any], ranks: int) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(config.dist, "get_rank", lambda: 0)
            patch.setattr(config.dist, "get_world_size", lambda *_: ranks)
            return config.DeepSpeedConfig(deepcopy(values))

    return read


def understood(shape: Shape, folder: Path) -> tuple[RunConfig, deepspeed_json.DeepSpeedDocument]:
    """Return the config of a run on GPUs with the JSON of a shape, and the parsed document."""
    file = folder / "ds.json"
    file.write_text(json.dumps(shape.config))
    config = load_config(None, {"deepspeed.config": str(file), **shape.beside})
    document = deepspeed_json.read_deepspeed_document(config)
    assert document is not None
    adopted = deepspeed_json.apply_document(config, document, shape.ranks)
    if adopted.precision == "auto":
        adopted = adopted.replaced({"precision": "bf16"})
    if adopted.strategy != "no_shard":
        deepspeed_json.check_installed(document, "cuda")
    compute_batch_plan(adopted, world_size=shape.ranks, rank=0)
    return adopted, document


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, BaseModel):
        value = {name: getattr(value, name, None) for name in type(value).model_fields}
    elif hasattr(value, "__dict__") and type(value).__module__.startswith("deepspeed"):
        value = vars(value)
    if isinstance(value, dict) and value:
        for name, inside in value.items():
            if not str(name).startswith("_"):
                yield from leaves(inside, f"{path}.{name}" if path else str(name))
    else:
        yield path, str(value) if type(value).__module__ == "torch" else value


def filled(values: dict[str, Any], config: RunConfig, plan: Any) -> dict[str, Any]:
    """Fill `auto` and missing values of a JSON with the run's values, as the Trainer does."""
    found = {k: v for k, v in values.items() if not str(k).startswith(("_", "//"))}
    if not any(
        isinstance(found.get(key), int) for key in ("train_batch_size", "train_micro_batch_size_per_gpu")
    ):
        found |= {"train_micro_batch_size_per_gpu": plan.micro_batch_size}
        if not isinstance(found.get("gradient_accumulation_steps"), int):
            found |= {"gradient_accumulation_steps": plan.accumulation_steps}
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        if found.get(key) in ("auto", None):
            found.pop(key, None)
    if found.get("gradient_clipping", "auto") == "auto":
        found["gradient_clipping"] = config.train.max_grad_norm
    kinds = ("bf16", "bfloat16", "fp16")
    for kind in kinds:
        if isinstance(found.get(kind), dict) and found[kind].get("enabled", "auto") == "auto":
            found[kind] = {**found[kind], "enabled": config.precision in kind}
    if config.precision not in found and config.precision != "fp32" and "bfloat16" not in found:
        found[config.precision] = {"enabled": True}
    zero = found.get("zero_optimization")
    if isinstance(zero, dict):
        zero = {k: v for k, v in zero.items() if not str(k).startswith(("_", "//"))}
        if "aio" in zero:  # its old place
            found["aio"] = zero.pop("aio")
        sizes = compute_auto_bucket_sizes(HIDDEN)
        found["zero_optimization"] = {k: sizes.get(k, v) if v == "auto" else v for k, v in zero.items()}
    return {k: v for k, v in found.items() if v != "auto"}


def different(
    shape: Shape, config: RunConfig, document: deepspeed_json.DeepSpeedDocument, read: Any
) -> dict[str, tuple[Any, Any]]:
    plan = compute_batch_plan(config, world_size=shape.ranks, rank=0)
    theirs = read(filled(shape.config, config, plan), shape.ranks)
    found = dict(adopted(config, plan, theirs, shape))
    if config.strategy != "no_shard":
        settings = build_deepspeed_config(config, plan, SIZES, document, "cuda")
        ours = dict(leaves(read(settings, shape.ranks)))
        other = dict(leaves(theirs))
        for path in ours.keys() | other.keys():
            if any(path == key or path.startswith(f"{key}.") for key in LEAVES["ours"]):
                continue
            text = json.dumps(shape.config)
            if any(
                path.startswith(leaf) and f'"{key}"' not in text for leaf, key in LEAVES["left_out"].items()
            ):
                continue
            if config.strategy != "zero3" and path.startswith("zero_config.offload_param"):
                continue  # which DeepSpeed does not read there
            if ours.get(path) != other.get(path):
                found[path] = (ours.get(path), other.get(path))
    return found


def adopted(config: RunConfig, plan: Any, theirs: Any, shape: Shape) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield the settings of the run that differ from DeepSpeed's."""
    zero = theirs.zero_config
    stage = int(zero.stage)
    pairs: dict[str, tuple[Any, Any]] = {
        "strategy": (config.strategy, f"zero{stage}" if stage else "no_shard"),
        "batch": (plan.global_batch_size, theirs.train_batch_size),
        "micro-batch": (plan.micro_batch_size, theirs.train_micro_batch_size_per_gpu),
        "accumulation": (plan.accumulation_steps, theirs.gradient_accumulation_steps),
        "clipping": (config.train.max_grad_norm or 0, theirs.gradient_clipping),
        "bf16": (config.precision == "bf16", theirs.bfloat16_config.enabled),
        "fp16": (config.precision == "fp16", theirs.float16_config.enabled),
    }
    if stage:
        optimizer = zero.offload_optimizer and zero.offload_optimizer.device
        optimizer = "cpu" if optimizer == "nvme" and stage < 3 else optimizer
        parameters = zero.offload_param and zero.offload_param.device
        pairs["offload_optimizer"] = (config.memory.offload_optimizer, optimizer or "none")
        pairs["offload_params"] = (config.memory.offload_params, (stage == 3 and parameters) or "none")
    if config.precision == "fp16" and theirs.float16_config.loss_scale == 0:
        for name in ("initial_scale_power", "loss_scale_window", "hysteresis"):
            pairs[name] = (getattr(config.fp16, name), getattr(theirs.float16_config, name))
    params = theirs.optimizer_params or {}
    train = config.train
    given = {
        "lr": train.learning_rate,
        "betas": list(train.betas),
        "eps": train.eps,
        "weight_decay": train.weight_decay,
    }
    for name, ours in given.items():
        scheduled = name == "lr" and theirs.scheduler_name in SCHEDULES
        if params.get(name, "auto") != "auto" and not scheduled:
            pairs[f"optimizer.{name}"] = (ours, params[name])
    if theirs.scheduler_name:
        pairs["scheduler"] = (train.schedule, theirs.scheduler_name)
        rates = {
            "warmup_num_steps": train.warmup_steps,
            "total_num_steps": train.steps,
            "warmup_max_lr": train.learning_rate,
        }
        for name, ours in rates.items():
            value = (theirs.scheduler_params or {}).get(name, "auto")
            if value != "auto":
                pairs[f"scheduler.{name}"] = (ours, value)
    for name, (ours, other) in pairs.items():
        if ours != other:
            yield name, (ours, other)


SHAPES = shapes("deepspeed.json") + shapes("deepspeed_keys.yaml")
TAKEN = [shape for shape in SHAPES if not shape.refused]


@pytest.mark.parametrize("shape", TAKEN, ids=lambda shape: shape.name)
def test_published_deepspeed_json_matches_deepspeed(shape: Shape, tmp_path: Path, read: Any) -> None:
    """Notes list the keys without an effect."""
    config, document = understood(shape, tmp_path)
    apart = different(shape, config, document, read)
    assert apart.keys() == {*shape.apart}, apart
    assert {key: config.get(key) for key in shape.comes_to} == shape.comes_to
    notes = deepspeed_json.build_document_notes(config, document)
    assert len(notes) == len(shape.told)
    for words in shape.told:
        assert any(words in note for note in notes)


@pytest.mark.parametrize("shape", [s for s in SHAPES if s.refused], ids=lambda shape: shape.name)
def test_published_deepspeed_json_is_rejected_with_reason(shape: Shape, tmp_path: Path, read: Any) -> None:
    with pytest.raises(UserError, match=shape.refused) as refused:
        understood(shape, tmp_path)
    assert "\n" not in str(refused.value)
    assert shape.why
    if shape.why == "DeepSpeed":
        batches = {"train_micro_batch_size_per_gpu": 1}
        with pytest.raises(Exception):  # noqa: B017
            read({k: v for k, v in {**batches, **shape.config}.items() if v != "auto"}, shape.ranks)
