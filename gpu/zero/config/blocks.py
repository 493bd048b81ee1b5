"""The ``optimizer``, ``scheduler`` and ``activation_checkpointing`` blocks of a DeepSpeed JSON as settings of
the run.

What one of the first two leaves out has the default that the installed DeepSpeed's class gives it;
what it has as ``auto`` is the run's.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from torch.optim import AdamW

from portable.config.suggest import did_you_mean
from portable.errors import UserError, require
from portable.optim.schedule import SCHEDULES, own_params

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from gpu.zero.config.document import Document

    Put = Callable[[str, Any, str], None]
    """Takes a setting's key, its value, and the place in the JSON that says so."""

OPTIMIZERS = {"adamw": "adamw", "adam": "adamw", "sgd": "sgd"}
# Ways to compute the same update.
_EQUIVALENT = ("torch_adam", "fused", "foreach", "set_grad_none", "capturable", "differentiable")
# Why DeepSpeed's others do not train under ZeRO here, where there is more to say than that.
_REFUSED = {
    "lamb": "is not part of this version, and cannot work with ZeRO: it scales each tensor's update by norms "
    "of the whole tensor, and ZeRO's flat slices have no tensors. DeepSpeed has it on CUDA "
    "only, for fp16 with dynamic loss scaling, and not "
    "among the optimizers that it supports with ZeRO",
}
# Settings of the run that a block's params stand for.
OPTIMIZER_KEYS = {
    "lr": "train.learning_rate",
    "betas": "train.betas",
    "eps": "train.eps",
    "weight_decay": "train.weight_decay",
}
SCHEDULE_KEYS = {
    "warmup_num_steps": "train.warmup_steps",
    "total_num_steps": "train.steps",
    "cos_min_ratio": "train.min_learning_rate_ratio",
    "warmup_max_lr": "train.learning_rate",
    "cycle_max_lr": "train.learning_rate",
    "lr_range_test_min_lr": "train.learning_rate",
}


def optimizer_defaults(kind: Any) -> dict[str, Any]:
    """What an optimizer's params may be, with the defaults of the classes that DeepSpeed has for it.

    Args:
        kind: ``optimizer.type``; for one that is not driven here, what any of them takes.
    """
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
    from deepspeed.runtime.config import ADAM_W_MODE, ADAM_W_MODE_DEFAULT, TORCH_ADAM_PARAM

    classes: dict[str, tuple[type, ...]] = {
        "adamw": (torch.optim.AdamW, DeepSpeedCPUAdam, FusedAdam),
        "sgd": (torch.optim.SGD,),
        "lamb": (FusedLamb,),
        "lion": (DeepSpeedCPULion, FusedLion),
        "adagrad": (torch.optim.Adagrad,),
    }
    named = OPTIMIZERS.get(str(kind).lower(), str(kind).lower())
    chosen = classes.get(named, tuple(one for several in classes.values() for one in several))
    found: dict[str, Any] = {}
    for one in chosen:  # the later ones are DeepSpeed's own, which it takes unless told otherwise
        found |= _defaults(one)
    if torch.optim.AdamW in chosen:
        found |= {TORCH_ADAM_PARAM: False, ADAM_W_MODE: ADAM_W_MODE_DEFAULT}
    return found


def scheduler_defaults(kind: Any) -> dict[str, Any] | None:
    """The same for ``scheduler.type``; None where that is no scheduler of DeepSpeed's."""
    from deepspeed.runtime import lr_schedules

    found = getattr(lr_schedules, kind, None) if isinstance(kind, str) else None
    return _defaults(found) if inspect.isclass(found) else None


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
    """Hand the ``optimizer`` block to ``put``, and its defaults to ``put_default``."""
    kind = document.get("optimizer.type")
    if kind is None:
        return
    ours = OPTIMIZERS.get(str(kind).lower())
    require(
        ours is not None,
        f"{document.name}: optimizer.type {kind} "
        + _REFUSED.get(str(kind).lower(), "is not part of this version")
        + "; use AdamW, Adam or SGD",
    )
    put("train.optimizer", ours, "optimizer.type")
    params, defaults = _params(document, "optimizer"), optimizer_defaults(kind)
    if params.get("torch_adam") is True:
        defaults |= _defaults(AdamW)
    for name, value in params.items():
        path = f"optimizer.params.{name}"
        adopted = name in OPTIMIZER_KEYS or name in _EQUIVALENT or (ours == "sgd" and name == "momentum")
        # DeepSpeed takes Adam for AdamW, and that alone, unless adam_w_mode is off.
        spared = name == "adam_w_mode" and str(kind).lower() == "adamw"
        require(
            adopted or spared or value in ("auto", defaults.get(name)),
            f"{document.name}: {path} {value!r} is not part of this version; remove it",
        )
    if document.get("scheduler.type") is not None and rate_of(document) is not None:
        params = {name: value for name, value in params.items() if name != "lr"}  # the scheduler sets it
        defaults.pop("lr")
    _put_all(params, defaults, OPTIMIZER_KEYS, "optimizer.params", put, put_default)
    if ours == "sgd":
        momentum = params.get("momentum", defaults["momentum"])
        if momentum != "auto":
            chosen = put if "momentum" in params else put_default
            chosen("train.betas", (momentum, 0.95), "optimizer.params.momentum")


def check_optimizer_type(values: Mapping[str, Any], where: str) -> None:
    """Raise UserError for an optimizer that the installed DeepSpeed lacks, as the 1-bit ones today."""
    import deepspeed
    import torch
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    block = values.get("optimizer")
    kind = block.get("type") if isinstance(block, dict) else None
    if isinstance(kind, str) and kind.lower() not in DEEPSPEED_OPTIMIZERS and not hasattr(torch.optim, kind):
        raise UserError(
            f"{where}: optimizer.type {kind}: DeepSpeed {deepspeed.__version__}, which is installed, has no "
            "such optimizer; use AdamW, Adam or SGD"
        )


def rate_of(document: Document) -> str | None:
    """The scheduler's param that sets the run's learning rate; None where the optimizer's counts."""
    defaults = scheduler_defaults(document.get("scheduler.type")) or {}
    name = next((name for name in defaults if SCHEDULE_KEYS.get(name) == "train.learning_rate"), None)
    if name is None or _params(document, "scheduler").get(name, defaults[name]) in (None, "auto"):
        return None
    return name


def adopt_scheduler(document: Document, put: Put, put_default: Put) -> None:
    """Hand the ``scheduler`` block to ``put``, and its defaults to ``put_default``."""
    kind = document.get("scheduler.type")
    if kind is None:
        return
    defaults = scheduler_defaults(kind)
    require(
        kind in SCHEDULES and defaults is not None,
        f"{document.name}: scheduler.type {kind} is not part of this version"
        + (
            did_you_mean(str(kind), filter(scheduler_defaults, SCHEDULES))
            or "; remove it and set train.schedule"
        ),
    )
    assert defaults is not None
    params = _params(document, "scheduler")
    lists = next((name for name, value in params.items() if isinstance(value, list)), None)
    require(
        lists is None,
        f"{document.name}: scheduler.params.{lists}: a value for each parameter group is not part of this "
        "version; give one number",
    )
    before = params.get("last_batch_iteration", -1)
    require(
        before == -1,
        f"{document.name}: scheduler.params.last_batch_iteration {before}: a run begins at its first "
        "step, and goes on where its checkpoint stands; remove it",
    )
    put("train.schedule", kind, "scheduler.type")
    _put_all(params, defaults, SCHEDULE_KEYS, "scheduler.params", put, put_default)
    own = {name: value for name, value in params.items() if name in own_params(kind) and value != "auto"}
    if "cycle_momentum" in defaults and not _moves_betas(document):
        own["cycle_momentum"] = False
    if own:
        put("train.schedule_params", own, "scheduler.params")


def _moves_betas(document: Document) -> bool:
    return str(document.get("optimizer.type") or "AdamW").lower() != "sgd"


# What asks for recomputation; the block's other keys only say how, if something is recomputed.
_RECOMPUTE = ("cpu_checkpointing", "partition_activations", "contiguous_memory_optimization")
# What DeepSpeed's own checkpointing would do besides, and why nothing comes of it here.
NO_EFFECT = {
    "partition_activations": "it divides what is kept among model-parallel ranks, of which there is one",
    "contiguous_memory_optimization": "it lays out what partition_activations has divided",
    "number_checkpoints": "it sizes the buffer of contiguous_memory_optimization; each layer is a checkpoint",
    "synchronize_checkpoint_boundary": "layers are recomputed without waiting for the device",
    "profile": "portable-train --profile records what each layer takes",
}


def adopt_recompute(document: Document, put: Put) -> None:
    """Hand ``put`` what the ``activation_checkpointing`` block asks for; one that is off asks for nothing."""
    asking = _asking(document, _RECOMPUTE)
    if asking:
        put("memory.activation_checkpointing", "full", f"activation_checkpointing.{asking[0]}")


def recompute_notices(document: Document) -> list[str]:
    """What of the ``activation_checkpointing`` block has no effect, and why."""
    return [
        f"activation_checkpointing.{name} has no effect: {NO_EFFECT[name]}"
        for name in _asking(document, NO_EFFECT)
    ]


def _asking(document: Document, names: Iterable[str]) -> list[str]:
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
