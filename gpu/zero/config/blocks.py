"""Translate ``optimizer``, ``scheduler`` and ``activation_checkpointing`` of a DeepSpeed JSON into settings.

Params that an optimizer or scheduler block omits have the defaults of the installed DeepSpeed's class;
``auto`` means the run's value.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from torch.optim import AdamW

from gpu.zero import private_api
from portable.config.importing.deepspeed import NO_EFFECT, OPTIMIZER, OPTIMIZERS, RECOMPUTE, SCHEDULER
from portable.config.suggest import did_you_mean
from portable.errors import UserError, require
from portable.optim.schedule import SCHEDULES, own_params

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from gpu.zero.config.document import Document

    Put = Callable[[str, Any, str], None]
    """Takes a setting's key, its value, and its path in the JSON."""

# Params that select another implementation of the same update.
_EQUIVALENT = ("torch_adam", "fused", "foreach", "set_grad_none", "capturable", "differentiable")
# Why DeepSpeed's other optimizers are not supported, where there is a reason to give.
_REFUSED = {
    "lamb": "is not supported: it scales updates by norms of whole tensors, which ZeRO's flat partitions "
    "do not have",
}


def optimizer_defaults(kind: Any) -> dict[str, Any]:
    """The params of an optimizer, with the defaults of DeepSpeed's classes for it.

    Args:
        kind: ``optimizer.type``; for an unsupported one, the params of all optimizers.
    """
    classes = private_api.optimizer_classes()
    named = OPTIMIZERS.get(str(kind).lower(), str(kind).lower())
    chosen = classes.get(named, tuple(one for several in classes.values() for one in several))
    found: dict[str, Any] = {}
    for one in chosen:  # DeepSpeed's own classes come last and win
        found |= _defaults(one)
    if AdamW in chosen:
        found |= private_api.adam_switches()
    return found


def scheduler_defaults(kind: Any) -> dict[str, Any] | None:
    """The same for ``scheduler.type``; None if DeepSpeed has no such scheduler."""
    found = private_api.scheduler_class(kind)
    return None if found is None else _defaults(found)


def _defaults(kind: type) -> dict[str, Any]:
    parameters = inspect.signature(kind.__init__).parameters  # type: ignore[misc]
    return {
        name: parameter.default
        for name, parameter in parameters.items()
        if name not in ("self", "params", "model_params", "optimizer")
        and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }


def _params(document: Document, block: str) -> dict[str, Any]:
    params = document.values[block].get("params") or {}
    require(isinstance(params, dict), f"{document.name}: {block}.params must be a mapping")
    found: dict[str, Any] = params
    return found


def adopt_optimizer(document: Document, put: Put, put_default: Put) -> None:
    """Pass the ``optimizer`` block's values to ``put``, and its defaults to ``put_default``."""
    kind = document.get("optimizer.type")
    if kind is None:
        return
    ours = OPTIMIZERS.get(str(kind).lower())
    require(
        ours is not None,
        f"{document.name}: optimizer.type {kind} "
        + _REFUSED.get(str(kind).lower(), "is not supported")
        + "; use AdamW, Adam or SGD",
    )
    put("train.optimizer", ours, "optimizer.type")
    params, defaults = _params(document, "optimizer"), optimizer_defaults(kind)
    if params.get("torch_adam") is True:
        defaults |= _defaults(AdamW)
    for name, value in params.items():
        path = f"optimizer.params.{name}"
        adopted = name in OPTIMIZER or name in _EQUIVALENT or (ours == "sgd" and name == "momentum")
        # DeepSpeed treats Adam as AdamW unless adam_w_mode is off.
        spared = name == "adam_w_mode" and str(kind).lower() == "adamw"
        require(
            adopted or spared or value in ("auto", defaults.get(name)),
            f"{document.name}: {path} {value!r} is not supported; remove it",
        )
    if document.get("scheduler.type") is not None and rate_of(document) is not None:
        params = {name: value for name, value in params.items() if name != "lr"}  # the scheduler sets it
        defaults.pop("lr")
    _put_all(params, defaults, OPTIMIZER, "optimizer.params", put, put_default)
    if ours == "sgd":
        momentum = params.get("momentum", defaults["momentum"])
        if momentum != "auto":
            chosen = put if "momentum" in params else put_default
            chosen("train.betas", (momentum, 0.95), "optimizer.params.momentum")


def check_optimizer_type(values: Mapping[str, Any], where: str) -> None:
    """Raise UserError for an optimizer that the installed DeepSpeed lacks, such as the 1-bit ones."""
    import deepspeed
    import torch

    block = values.get("optimizer")
    kind = block.get("type") if isinstance(block, dict) else None
    if (
        isinstance(kind, str)
        and kind.lower() not in private_api.optimizer_names()
        and not hasattr(torch.optim, kind)
    ):
        raise UserError(
            f"{where}: optimizer.type {kind}: DeepSpeed {deepspeed.__version__} has no such optimizer; use "
            "AdamW, Adam or SGD"
        )


def rate_of(document: Document) -> str | None:
    """The scheduler's param that sets the learning rate; None if the optimizer sets it."""
    defaults = scheduler_defaults(document.get("scheduler.type")) or {}
    name = next((name for name in defaults if SCHEDULER.get(name) == "train.learning_rate"), None)
    if name is None or _params(document, "scheduler").get(name, defaults[name]) in (None, "auto"):
        return None
    return name


def adopt_scheduler(document: Document, put: Put, put_default: Put) -> None:
    """Pass the ``scheduler`` block's values to ``put``, and its defaults to ``put_default``."""
    kind = document.get("scheduler.type")
    if kind is None:
        return
    defaults = scheduler_defaults(kind)
    if kind not in SCHEDULES or defaults is None:
        nearest = did_you_mean(str(kind), filter(scheduler_defaults, SCHEDULES))
        raise UserError(
            f"{document.name}: scheduler.type {kind} is not supported"
            + (nearest or "; remove it and set train.schedule")
        )
    params = _params(document, "scheduler")
    lists = next((name for name, value in params.items() if isinstance(value, list)), None)
    require(
        lists is None,
        f"{document.name}: scheduler.params.{lists}: a list with a value per parameter group is not "
        "supported; give one number",
    )
    before = params.get("last_batch_iteration", -1)
    require(
        before == -1,
        f"{document.name}: scheduler.params.last_batch_iteration {before}: a run starts at its first "
        "step, and resumes at its checkpoint's; remove it",
    )
    put("train.schedule", kind, "scheduler.type")
    _put_all(params, defaults, SCHEDULER, "scheduler.params", put, put_default)
    own = {name: value for name, value in params.items() if name in own_params(kind) and value != "auto"}
    if "cycle_momentum" in defaults and not _moves_betas(document):
        own["cycle_momentum"] = False
    if own:
        put("train.schedule_params", own, "scheduler.params")


def _moves_betas(document: Document) -> bool:
    return str(document.get("optimizer.type") or "AdamW").lower() != "sgd"


def adopt_recompute(document: Document, put: Put) -> None:
    """Pass the ``activation_checkpointing`` block to ``put``, if it enables recomputation."""
    enabled = _enabled(document, RECOMPUTE)
    if enabled:
        put("memory.activation_checkpointing", "full", f"activation_checkpointing.{enabled[0]}")


def recompute_notices(document: Document) -> list[str]:
    """A note for each key of ``activation_checkpointing`` that has no effect."""
    return [
        f"activation_checkpointing.{name} has no effect: {NO_EFFECT[name]}"
        for name in _enabled(document, NO_EFFECT)
    ]


def _enabled(document: Document, names: Iterable[str]) -> list[str]:
    return [name for name in names if document.get(f"activation_checkpointing.{name}")]


def _put_all(
    params: Mapping[str, Any],
    defaults: Mapping[str, Any],
    keys: Mapping[str, str],
    place: str,
    put: Put,
    put_default: Put,
) -> None:
    for name, key in keys.items():
        value = params.get(name, defaults.get(name))
        if name not in defaults or value in (None, "auto", inspect.Parameter.empty):
            continue
        value = tuple(value) if isinstance(value, list) else value
        (put if name in params else put_default)(key, value, f"{place}.{name}")
