"""Reconcile a DeepSpeed JSON with the run's config.

What both can express (batch sizes, precision, optimizer, schedule, clipping, offloading) goes into the run's
config: a default yields to the JSON, a value that the user set must agree with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpu.zero.config.blocks import adopt_optimizer, adopt_recompute, adopt_scheduler
from gpu.zero.config.document import AUTO, KEY, Document, shown
from gpu.zero.config.reading import strategy_of
from gpu.zero.config.unsupported_keys import check_one_folder, check_switches
from portable.checks import check
from portable.config.importing.deepspeed import SHARED
from portable.errors import UserError, require

if TYPE_CHECKING:
    from collections.abc import Callable

    from portable.config import RunConfig


def adopt(config: RunConfig, document: Document, world_size: int) -> RunConfig:
    """The config with the JSON's values in place of defaults.

    Raises:
        UserError: if the JSON contradicts a setting of the run, or itself.
    """
    found: dict[str, Any] = {}
    defaults: dict[str, Any] = {}

    def put_default(key: str, value: Any, _: str) -> None:
        if not config.is_set(key):
            defaults[key] = value

    def put(key: str, value: Any, path: str) -> None:
        ours = config.get(key)
        if config.is_set(key) and ours != AUTO and not _same(ours, value):
            raise UserError(
                f"{document.name}: {path} is {shown(value)} and {key} is {shown(ours)}; "
                f"set one of the two, or {path} to auto"
            )
        if key in found and not _same(found[key], value):
            raise UserError(
                f"{document.name}: {path} sets {key} to {shown(value)}, and another key sets it to "
                f"{shown(found[key])}; make them agree"
            )
        found[key] = value

    strategy = strategy_of(config, document)
    put("strategy", strategy, "zero_optimization.stage")
    precision = _precision(document)
    if precision is not None and not (precision == "fp32" and config.precision == "tf32"):
        put("precision", precision, f"{'bf16' if precision == 'bf16' else 'fp16'}.enabled")
    adopt_optimizer(document, put, put_default)
    adopt_scheduler(document, put, put_default)
    in_fp16 = (precision or config.precision) == "fp16"
    for path, key in SHARED.items():
        value = document.get(path)
        if value is not None and (in_fp16 or not path.startswith("fp16.")):
            put(key, float(value) or None if path == "gradient_clipping" else value, path)
    _batch(config, document, world_size, put)
    nvme = next(
        (
            path
            for part in ("offload_optimizer", "offload_param")
            if (path := document.get(f"zero_optimization.{part}.nvme_path")) is not None
            and document.get(f"zero_optimization.{part}.device") == "nvme"
        ),
        None,
    )
    if nvme is not None and not config.is_set("memory.nvme_path"):
        found["memory.nvme_path"] = str(nvme)
    if config.memory.activation_checkpointing != "selective":  # selective recomputes as well
        adopt_recompute(document, put)
    check_switches(document, strategy)
    check_one_folder(document, world_size)
    try:
        adopted = config.replaced({**defaults, **found})
        check(adopted, where=False)
        return adopted.with_document(KEY, document)
    except UserError as error:
        line = str(error).replace("train.schedule_params", "scheduler.params")
        raise UserError(f"{document.name}: {line}") from error


def _precision(document: Document) -> str | None:
    """The precision that the JSON sets; None if it leaves it to the run."""
    switches = {kind: document.values.get(kind, {}) for kind in ("bf16", "fp16")}
    enabled = {kind: block.get("enabled") for kind, block in switches.items() if isinstance(block, dict)}
    on = [kind for kind, value in enabled.items() if value is True]
    require(len(on) < 2, f"{document.name}: bf16.enabled and fp16.enabled are both true; choose one")
    if on:
        return on[0]
    return "fp32" if False in enabled.values() and AUTO not in enabled.values() else None


def _batch(
    config: RunConfig, document: Document, world_size: int, put: Callable[[str, Any, str], None]
) -> None:
    """Check that batch size = micro-batch x accumulation x ranks; compute the one that is missing."""
    total = document.get("train_batch_size")
    micro = document.get("train_micro_batch_size_per_gpu")
    steps = document.get("gradient_accumulation_steps")
    for key, number in (
        ("train_batch_size", total),
        ("train_micro_batch_size_per_gpu", micro),
        ("gradient_accumulation_steps", steps),
    ):
        whole = isinstance(number, int) and not isinstance(number, bool) and number > 0
        require(
            number is None or whole,
            f"{document.name}: {key} must be a positive integer or auto, not {shown(number)}",
        )
    if micro is None:
        micro = config.train.micro_batch_size
    if total is None and config.is_set("train.global_batch_size"):
        total = config.train.global_batch_size
    if micro == AUTO:
        micro = None  # computed from the other two, or searched
        total = config.train.global_batch_size if total is None else total
    named = document.get("train_micro_batch_size_per_gpu") is not None
    if steps is None:
        if named and total is None:  # DeepSpeed accumulates only if asked to
            put("train.global_batch_size", micro * world_size, "train_micro_batch_size_per_gpu")
        elif _only_batch_size(config, document) and total % world_size == 0:  # nor does it split a batch
            put("train.micro_batch_size", total // world_size, "train_batch_size")
        elif named and total % (micro * world_size):
            raise UserError(
                f"{document.name}: a batch of {total} is not divisible by train_micro_batch_size_per_gpu "
                f"{micro} x {world_size} ranks; set one of them to auto"
            )
        return
    if total is None:
        put("train.global_batch_size", micro * steps * world_size, "gradient_accumulation_steps")
        put("train.micro_batch_size", micro, "gradient_accumulation_steps")
        return
    if total % (steps * world_size):
        raise UserError(
            f"{document.name}: a batch of {total} is not divisible by gradient_accumulation_steps {steps} x "
            f"{world_size} ranks; set gradient_accumulation_steps to auto"
        )
    fitting = total // (steps * world_size)
    if (named or config.is_set("train.micro_batch_size")) and micro != fitting:
        raise UserError(
            f"{document.name}: a batch of {total} is not train_micro_batch_size_per_gpu {micro} x "
            f"gradient_accumulation_steps {steps} x {world_size} ranks; set one of them to auto"
        )
    put("train.micro_batch_size", fitting, "gradient_accumulation_steps")


def _only_batch_size(config: RunConfig, document: Document) -> bool:
    others = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    return (
        document.get("train_batch_size") is not None
        and not any(key in document.values for key in others)
        and not config.is_set("train.micro_batch_size")
    )


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, tuple) and isinstance(theirs, list | tuple):
        return list(ours) == list(theirs)
    return bool(ours == theirs)
