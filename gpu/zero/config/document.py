"""A DeepSpeed JSON as part of a run: read, checked, and reconciled with the run's own settings.

What both can say (batch sizes, precision, optimizer, schedule, clipping, offloading) is taken over into the
run's config, where a default yields to the JSON and a value that was set must agree with it. All else goes to
DeepSpeed as it stands.
"""

from __future__ import annotations

import json
import os
from copy import deepcopy
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu.zero.buckets import automatic
from gpu.zero.config.blocks import (
    adopt_optimizer,
    adopt_recompute,
    adopt_scheduler,
    check_optimizer_type,
    rate_of,
    recompute_notices,
)
from gpu.zero.config.known_keys import check_keys, models, replace_deprecated
from gpu.zero.config.value_checks import AUTO, check_values, shown
from portable.errors import UserError, one_line, require

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from portable.config import RunConfig

_MOST_BYTES = 1 << 20
_KEY = "deepspeed.config"


@dataclass(frozen=True)
class Document:
    """A DeepSpeed configuration whose keys are known to be right.

    Attributes:
        values: the configuration.
        name: the file, or the setting that holds the mapping, as error lines name it.
        notices: what was changed in it for the installed DeepSpeed, or means something else or nothing here,
            one line each.
    """

    values: dict[str, Any]
    name: str
    notices: tuple[str, ...]

    def get(self, path: str) -> Any:
        """The value at the dotted ``path``; None where there is none, or where it is ``auto``."""
        found: Any = self.values
        for part in path.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        return None if found == AUTO else found


def read(config: RunConfig) -> Document | None:
    """The JSON of ``deepspeed.config``, or None.

    Raises:
        UserError: if it cannot be read, or holds a key that DeepSpeed does not know.
    """
    given = config.deepspeed.config
    if given is None:
        return None
    values, name = (deepcopy(given), _KEY) if isinstance(given, dict) else (_load(Path(given)), str(given))
    values = _without_comments(values)
    notices = modernise(values, name)
    _refuse_removed(values, name)
    check_optimizer_type(values, name)
    check_keys(values, name)
    check_values(values, name)
    document = Document(values, name, ())
    notices += _without_effect(config, document)
    rate = rate_of(document)
    if rate is not None and document.get("optimizer.params.lr") is not None:
        notices.append(f"optimizer.params.lr has no effect: the scheduler sets the learning rate, by {rate}")
    notices += recompute_notices(document)
    gather = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    if document.get(gather) and document.get("zero_optimization.stage") == 3:
        notices.append(
            f"{gather}: final/ holds the whole weights without it, and in fp32 (in 16 bits, of any "
            "checkpoint: portable-convert --dtype)"
        )
    return replace(document, notices=tuple(notices))


def _load(path: Path) -> dict[str, Any]:
    try:
        text = path.read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(one_line(f"{_KEY}: {path} cannot be read: {reason}")) from error
    require(len(text) <= _MOST_BYTES, f"{_KEY}: {path} is no DeepSpeed JSON: larger than a megabyte")
    try:
        values = json.loads(text, object_pairs_hook=lambda pairs: _without_repeats(pairs, path))
    except (ValueError, RecursionError) as error:
        values = _load_relaxed(text, path)
        if values is None:
            raise UserError(one_line(f"{path}: not JSON: {error}")) from error
    require(isinstance(values, dict), f"{path}: a DeepSpeed JSON must be a mapping")
    found: dict[str, Any] = values
    return found


def _load_relaxed(text: bytes, path: Path) -> Any:
    """``text`` as Hjson, as DeepSpeed reads it, with comments and trailing commas; None if it is none."""
    import hjson

    try:
        found = hjson.loads(text.decode(), object_pairs_hook=lambda pairs: _without_repeats(pairs, path))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None  # a lone word is Hjson, too


def _without_repeats(pairs: list[tuple[str, Any]], path: Path) -> dict[str, Any]:
    keys = [key for key, _ in pairs if not _is_comment(key)]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    require(twice is None, f"{path}: the key {twice} stands there twice")
    return dict(pairs)


def _is_comment(key: Any) -> bool:
    return str(key).startswith(("_", "//"))


def _without_comments(values: dict[str, Any]) -> dict[str, Any]:
    """``values`` less the keys that are remarks, for which JSON has no other place."""
    return {
        key: _without_comments(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if not _is_comment(key)
    }


def modernise(values: dict[str, Any], name: str) -> list[str]:
    """Put what has an old name or place where DeepSpeed looks for it today.

    Args:
        values: the configuration, which is changed.
        name: the file or setting that it comes from, for messages.

    Returns:
        what was changed, one line each.

    Raises:
        UserError: for an old name beside the new one.
    """
    notices = []
    if isinstance(values.get("zero_optimization"), bool):  # as it was written before there were stages
        values["zero_optimization"] = {"stage": int(values["zero_optimization"])}
        size = values.pop("allgather_size", None)
        if size is not None and values["zero_optimization"]["stage"]:
            values["zero_optimization"]["allgather_bucket_size"] = size
        notices.append("zero_optimization true or false is called zero_optimization.stage 1 or 0 today")
    zero = values.get("zero_optimization", {})
    require(
        isinstance(zero, dict),
        f"{name}: zero_optimization must be a mapping, not {shown(zero)}; remove it, or set its stage in it",
    )
    stage = zero.get("stage")
    if isinstance(stage, float) and stage.is_integer():  # which DeepSpeed takes
        zero["stage"] = int(stage)
    for path, model in models().items():
        section: Any = values
        for part in path:
            section = section.get(part) if isinstance(section, dict) else None
        if isinstance(section, dict):
            notices += replace_deprecated(model, section, path, name)
    if "aio" in zero:
        aio = zero.pop("aio")
        values.setdefault("aio", aio)
        notices.append("aio stands at the top level today, and was moved there from zero_optimization")
    aio = values.get("aio")
    if isinstance(aio, dict) and "thread_count" in aio:
        aio.setdefault("intra_op_parallelism", aio.pop("thread_count"))
        notices.append("aio.thread_count is called aio.intra_op_parallelism today")
    if "bfloat16" in values:
        values.setdefault("bf16", values.pop("bfloat16"))
    return notices


_OFFLOADS = ("offload_optimizer", "offload_param")
# The sections that are the run's under any strategy.
_WITHOUT_ZERO = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "optimizer",
    "scheduler",
    "fp16",
    "bf16",
    "activation_checkpointing",
    "steps_per_print",
    "zero_allow_untested_optimizer",
)


def _without_effect(config: RunConfig, document: Document) -> list[str]:
    """Take out of ``document`` what DeepSpeed itself passes over at its stage, and say so."""
    strategy = _strategy(config, document)
    zero = document.values.get("zero_optimization")
    zero = zero if isinstance(zero, dict) else {}
    notices = []
    if strategy == "no_shard":
        for part in _OFFLOADS:
            zero.pop(part, None)
        idle = [key for key, value in document.values.items() if key not in _WITHOUT_ZERO and _asks(value)]
        notices.append(
            "no ZeRO stage: the run replicates the model (strategy no_shard), with torch's DDP in place of "
            "DeepSpeed's engine" + (f"; nothing comes of {', '.join(idle)}" if idle else "")
        )
        if document.get("fp16.loss_scale") and document.get("fp16.enabled"):
            notices.append("fp16.loss_scale has no effect without ZeRO: the scale is searched for")
        if document.get("activation_checkpointing.cpu_checkpointing"):
            notices.append(
                "activation_checkpointing.cpu_checkpointing without ZeRO: layers are recomputed from inputs "
                "that stay on the device"
            )
    elif strategy != "zero3":
        if document.get("zero_optimization.offload_param.device") not in (None, "none"):
            notices.append(
                f"zero_optimization.offload_param has no effect: parameters are whole on each rank at stage "
                f"{strategy[-1]}, and only stage 3 offloads them"
            )
        zero.pop("offload_param", None)
        if document.get("zero_optimization.offload_optimizer.device") == "nvme":
            zero["offload_optimizer"] = {**zero["offload_optimizer"], "device": "cpu"}
            notices.append(
                f"zero_optimization.offload_optimizer.device nvme means cpu at stage {strategy[-1]}: only "
                "stage 3 goes to a disk"
            )
    return notices


def _asks(value: Any) -> bool:
    """Whether a key's value asks for something."""
    if isinstance(value, dict):
        if "enabled" in value:
            return _asks(value["enabled"])
        return any(_asks(inside) for key, inside in value.items() if key != "stage")
    return value not in (None, False, 0, AUTO)


def _refuse_removed(values: Mapping[str, Any], name: str) -> None:
    from deepspeed.runtime.config import DeepSpeedConfigError, _reject_removed_config_keys

    try:
        _reject_removed_config_keys(values)
    except DeepSpeedConfigError as error:
        raise UserError(f"{name}: {one_line(error)}") from error


# -- taken over into the run's config --------------------------------------------------------------------


@dataclass(frozen=True)
class _Shared:
    """One setting that both files have.

    Attributes:
        path: its dotted place in the JSON.
        key: its dotted name in the run's config.
        convert: the JSON's value as the run's config has it.
    """

    path: str
    key: str
    convert: Callable[[Any], Any] = lambda value: value


SHARED = (
    _Shared("train_batch_size", "train.global_batch_size"),
    _Shared("train_micro_batch_size_per_gpu", "train.micro_batch_size"),
    _Shared("gradient_clipping", "train.max_grad_norm", lambda value: float(value) or None),
    _Shared("fp16.initial_scale_power", "fp16.initial_scale_power"),
    _Shared("fp16.loss_scale_window", "fp16.loss_scale_window"),
    _Shared("fp16.hysteresis", "fp16.hysteresis"),
    _Shared("fp16.min_loss_scale", "fp16.min_loss_scale"),
    _Shared("zero_optimization.offload_optimizer.device", "memory.offload_optimizer"),
    _Shared("zero_optimization.offload_param.device", "memory.offload_params"),
)


def adopt(config: RunConfig, document: Document, world_size: int) -> RunConfig:
    """The config with what the JSON says in place of defaults.

    Raises:
        UserError: where the JSON contradicts a setting of the run, or itself.
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
                f"{document.name}: {path} says {shown(value)} for {key}, which it has as "
                f"{shown(found[key])} elsewhere; make them agree"
            )
        found[key] = value

    strategy = _strategy(config, document)
    put("strategy", strategy, "zero_optimization.stage")
    precision = _precision(document)
    if precision is not None and not (precision == "fp32" and config.precision == "tf32"):
        put("precision", precision, f"{'bf16' if precision == 'bf16' else 'fp16'}.enabled")
    adopt_optimizer(document, put, put_default)
    adopt_scheduler(document, put, put_default)
    in_fp16 = (precision or config.precision) == "fp16"
    for shared in SHARED:
        value = document.get(shared.path)
        if value is not None and (in_fp16 or not shared.path.startswith("fp16.")):
            try:
                put(shared.key, shared.convert(value), shared.path)
            except (TypeError, ValueError) as error:
                raise UserError(f"{document.name}: {shared.path}: {one_line(error)}") from error
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
    if config.memory.activation_checkpointing != "selective":  # which recomputes as well
        adopt_recompute(document, put)
    _check_switches(document, strategy)
    _check_one_folder(document, world_size)
    try:
        return config.replaced({**defaults, **found})
    except UserError as error:
        line = str(error).replace("train.schedule_params", "scheduler.params")
        raise UserError(f"{document.name}: {line}") from error


NEEDED = {
    "bf16.check_grad_overflow": "an update that is not finite could not be told",
    "zero_optimization.compute_grad_norm": "the gradient norm could neither be bounded nor shown",
    "managed_gradient_accumulation": "the run tells where a step ends",
}

# What puts another engine, another layout or another computation in place of the ones that are driven here,
# with the value that changes nothing.
FOREIGN: dict[str, Any] = {
    "zero_optimization.zenflow": None,
    "zero_optimization.offload_optimizer.super_offload": False,
    "zero_optimization.offload_optimizer.ratio": 1.0,
    "tensor_parallel": None,
    "expert_parallel": None,
    "hybrid_engine.enabled": False,
    "compile.deepcompile": False,
    "checkpoint.writer": None,
    "datastates_ckpt": None,
    "fp16.fp16_master_weights_and_grads": False,
    "bf16.bf16_master_weights_and_grads": False,
    "torch_autocast.enabled": False,
    "data_efficiency.enabled": False,
    "weight_quantization": None,
    "gradient_allreduce_op": "mean",
}


def _check_switches(document: Document, strategy: str) -> None:
    """Raise UserError for a switch that the run depends on, or one to what is not driven here."""
    for path, reason in NEEDED.items():
        require(document.get(path) is not False, f"{document.name}: {path} false: {reason}; remove it")
    for path, harmless in FOREIGN.items():
        value = document.get(path)
        require(
            value in (None, False, harmless),
            f"{document.name}: {path} is not part of this version; remove it",
        )
    reduce_scatter = strategy != "no_shard" and document.get("zero_optimization.reduce_scatter") is not False
    for path, harmless in (("prescale_gradients", False), ("gradient_predivide_factor", 1)):
        value = document.get(path)
        require(
            value in (None, harmless) or not reduce_scatter,
            f"{document.name}: {path} {shown(value)} needs zero_optimization.reduce_scatter false under "
            "ZeRO; remove it, or set that",
        )
    if document.get("zero_optimization.stage") == 1 and document.get("bf16.enabled"):
        require(
            document.get("data_types.grad_accum_dtype") != "fp32",
            f"{document.name}: data_types.grad_accum_dtype fp32 is for stages 2 and 3 here, where gradients "
            "are accumulated in shares; use zero_optimization.stage 2",
        )


# What DeepSpeed reports to, if it is switched on, and the package that it imports for it.
_MONITORS = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}
# What of ZeRO++ is computed by kernels that only GPUs have.
_GPU_KERNELS = ("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights")


def check_installed(document: Document, device_type: str) -> None:
    """Raise UserError for what DeepSpeed would want in the first moments of a run and not find.

    Args:
        document: the JSON.
        device_type: that the run is on.
    """
    for monitor, package in _MONITORS.items():
        require(
            not document.get(f"{monitor}.enabled") or find_spec(package) is not None,
            f"{document.name}: {monitor}.enabled true: {package} is not installed; run: pip install "
            f"{package}, or set it to false (log.trackers reports by any tracker)",
        )
    for switch in _GPU_KERNELS:
        path = f"zero_optimization.{switch}"
        require(
            not document.get(path) or device_type != "cpu",
            f"{document.name}: {path} true: DeepSpeed quantises by kernels for GPUs, and this run is on the "
            "CPU; remove it, or use backend cuda",
        )


def _check_one_folder(document: Document, world_size: int) -> None:
    """Raise UserError where each node would keep files that only all of them together make a checkpoint."""
    several_nodes = world_size > int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    path = "checkpoint.use_node_local_storage"
    require(
        not (several_nodes and document.get(path)),
        f"{document.name}: {path} true: a checkpoint is read as a whole, for a resume on any ranks, so "
        "that it must lie where all nodes see it; remove it, and have output_dir on shared storage",
    )


def _strategy(config: RunConfig, document: Document) -> str:
    """What the JSON's stage is called here; without one, as in DeepSpeed, nothing is sharded."""
    zero = document.values.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, dict) else 0
    if stage in (0, AUTO) and config.is_set("strategy"):
        return config.strategy
    if stage not in (0, 1, 2, 3) or isinstance(stage, bool):
        raise UserError(
            f"{document.name}: zero_optimization.stage is {shown(stage)}; it must be 0, 1, 2 or 3"
            + (", or set strategy to zero1, zero2 or zero3" if stage == AUTO else "")
        )
    return f"zero{stage}" if stage else "no_shard"


def _precision(document: Document) -> str | None:
    """What the JSON says of the compute type; None where it leaves it to the run."""
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
    """Check that batch size = micro-batch x accumulation x ranks, and work out the one that is missing."""
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
            f"{document.name}: {key} must be a positive whole number or auto, not {shown(number)}",
        )
    if micro is None:
        micro = config.train.micro_batch_size
    if total is None and config.is_set("train.global_batch_size"):
        total = config.train.global_batch_size
    if micro == AUTO:
        micro = None  # follows from the other two, or is searched for
        total = config.train.global_batch_size if total is None else total
    named = document.get("train_micro_batch_size_per_gpu") is not None
    if steps is None:
        if named and total is None:  # DeepSpeed accumulates only where it is told to
            put("train.global_batch_size", micro * world_size, "train_micro_batch_size_per_gpu")
        elif _batch_alone(config, document) and total % world_size == 0:  # which it does not cut up either
            put("train.micro_batch_size", total // world_size, "train_batch_size")
        elif named and total % (micro * world_size):
            raise UserError(
                f"{document.name}: a batch of {total} cannot be cut into train_micro_batch_size_per_gpu "
                f"{micro} x {world_size} ranks; set one of them to auto"
            )
        return
    if total is None:
        put("train.global_batch_size", micro * steps * world_size, "gradient_accumulation_steps")
        put("train.micro_batch_size", micro, "gradient_accumulation_steps")
        return
    if total % (steps * world_size):
        raise UserError(
            f"{document.name}: a batch of {total} cannot be cut into gradient_accumulation_steps {steps} x "
            f"{world_size} ranks; set gradient_accumulation_steps to auto"
        )
    fitting = total // (steps * world_size)
    if (named or config.is_set("train.micro_batch_size")) and micro != fitting:
        raise UserError(
            f"{document.name}: a batch of {total} is not train_micro_batch_size_per_gpu {micro} x "
            f"gradient_accumulation_steps {steps} x {world_size} ranks; set one of them to auto"
        )
    put("train.micro_batch_size", fitting, "gradient_accumulation_steps")


def _batch_alone(config: RunConfig, document: Document) -> bool:
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


# -- handed to DeepSpeed ---------------------------------------------------------------------------------

# What the run decides by itself, through its optimizer, its schedule and its own batches.
_OURS = (
    "optimizer",
    "scheduler",
    "activation_checkpointing",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
)


def merged(base: Mapping[str, Any], document: Document, hidden_size: int) -> dict[str, Any]:
    """The configuration for DeepSpeed: the JSON's values over those of the run that both do not share.

    Args:
        base: what the run's own settings come to.
        document: the JSON, already reconciled with them.
        hidden_size: of the model, by which bucket sizes are ``auto``.
    """
    values = {key: value for key, value in document.values.items() if key not in _OURS}
    filled = _filled(values, {"zero_optimization": automatic(hidden_size)}, ())
    settings = _over(base, filled)
    for part in _OFFLOADS:  # the run's own folder on the disk
        ours = base["zero_optimization"].get(part, {})
        if "nvme_path" in ours:
            settings["zero_optimization"][part]["nvme_path"] = ours["nvme_path"]
    for kind in ("bf16", "fp16"):  # which of them is on has been settled with the run's precision
        if kind in settings:
            settings[kind] = {**settings[kind], "enabled": kind in base}
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        settings[key] = base[key]
    return settings


def _filled(values: Mapping[str, Any], sizes: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """Without ``auto``: those that have a value here get it, the others leave the key to the run."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            inside = sizes.get(key, {})
            found[key] = _filled(value, inside if isinstance(inside, dict) else {}, (*path, key))
        elif value != AUTO or (*path, key) == ("data_types", "keep_in_fp32_modules"):
            found[key] = value
        elif key in sizes:
            found[key] = sizes[key]
    return found


def _over(base: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with ``values`` put in, section by section."""
    found = dict(base)
    for key, value in values.items():
        inside = found.get(key)
        found[key] = _over(inside, value) if isinstance(value, dict) and isinstance(inside, dict) else value
    return found


SWAPPING = {
    "zero_optimization.offload_param.buffer_size": "to be as much as the largest parameter's share needs",
    "zero_optimization.stage3_max_reuse_distance": "to be 0, since parameters that stay gathered keep their "
    "swap buffers, and the run would end for want of one",
}
"""What the run decides where parameters are swapped to a disk, and why."""


def notes(config: RunConfig, document: Document) -> list[str]:
    """What a person should be told of the JSON, one line each.

    Args:
        config: the run's, with what the JSON says in it.
        document: the JSON.
    """
    swapped = config.memory.offload_params == "nvme"
    changed = [
        f"{path} {shown(document.get(path))} has no effect: the run chooses it, {why}"
        for path, why in SWAPPING.items()
        if swapped and document.get(path) is not None
    ]
    return [f"{document.name}: {notice}" for notice in (*document.notices, *changed)]
