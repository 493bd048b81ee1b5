"""A DeepSpeed JSON as part of a run: read, checked, and reconciled with the run's own settings.

What both can say (batch sizes, precision, optimizer, schedule, clipping, offloading) is taken over into the
run's config, where a default yields to the JSON and a value that was set must agree with it. All else goes to
DeepSpeed as it stands.
"""

from __future__ import annotations

import json
import os
import sys
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu.deepspeed_blocks import (
    adopt_optimizer,
    adopt_recompute,
    adopt_scheduler,
    check_optimizer_type,
    rate_of,
    recompute_notices,
)
from gpu.deepspeed_keys import check_keys
from gpu.deepspeed_values import AUTO, check_values, shown
from gpu.zero_sizes import automatic
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
    notices = _modernise(values)
    _refuse_removed(values, name)
    check_optimizer_type(values, name)
    check_keys(values, name)
    check_values(values, name)
    document = Document(values, name, ())
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
        raise UserError(one_line(f"{path}: not JSON: {error}")) from error
    require(isinstance(values, dict), f"{path}: a DeepSpeed JSON must be a mapping")
    found: dict[str, Any] = values
    return found


def _without_repeats(pairs: list[tuple[str, Any]], path: Path) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    require(twice is None, f"{path}: the key {twice} stands there twice")
    return dict(pairs)


def _modernise(values: dict[str, Any]) -> list[str]:
    """Put what other projects' documentation has in old places where DeepSpeed looks for it today."""
    notices = []
    zero = values.get("zero_optimization")
    if isinstance(zero, dict) and "aio" in zero:
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


_SHARED = (
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

    put("strategy", _strategy(config, document), "zero_optimization.stage")
    precision = _precision(document)
    if precision is not None and not (precision == "fp32" and config.precision == "tf32"):
        put("precision", precision, f"{'bf16' if precision == 'bf16' else 'fp16'}.enabled")
    adopt_optimizer(document, put, put_default)
    adopt_scheduler(document, put, put_default)
    for shared in _SHARED:
        value = document.get(shared.path)
        if value is not None:
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
    _check_switches(document)
    _check_one_folder(document, world_size)
    try:
        return config.replaced({**defaults, **found})
    except UserError as error:
        line = str(error).replace("train.schedule_params", "scheduler.params")
        raise UserError(f"{document.name}: {line}") from error


_NEEDED = {
    "bf16.check_grad_overflow": "an update that is not finite could not be told",
    "zero_optimization.compute_grad_norm": "the gradient norm could neither be bounded nor shown",
    "managed_gradient_accumulation": "the run tells where a step ends",
}

# What puts another engine, another layout or another computation in place of the ones that are driven here,
# with the value that changes nothing.
_FOREIGN: dict[str, Any] = {
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


def _check_switches(document: Document) -> None:
    """Raise UserError for a switch that the run depends on, or one to what is not driven here."""
    for path, reason in _NEEDED.items():
        require(document.get(path) is not False, f"{document.name}: {path} false: {reason}; remove it")
    for path, harmless in _FOREIGN.items():
        value = document.get(path)
        require(
            value in (None, False, harmless),
            f"{document.name}: {path} is not part of this version; remove it",
        )
    reduce_scatter = document.get("zero_optimization.reduce_scatter") is not False
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
    stage = document.get("zero_optimization.stage")
    if stage is None and config.is_set("strategy"):
        return config.strategy
    if stage not in (1, 2, 3) or isinstance(stage, bool):
        raise UserError(
            f"{document.name}: zero_optimization.stage is {shown(stage)}; it must be 1, 2 or 3 (without "
            "ZeRO, remove deepspeed.config and use strategy no_shard)"
        )
    return f"zero{stage}"


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
    if micro is None:
        micro = config.train.micro_batch_size
    if total is None and config.is_set("train.global_batch_size"):
        total = config.train.global_batch_size
    if micro == AUTO:
        micro = None  # follows from the other two, or is searched for
        total = config.train.global_batch_size if total is None else total
    numbers = [number for number in (total, micro, steps) if number is not None]
    require(
        all(isinstance(number, int) and not isinstance(number, bool) and number > 0 for number in numbers),
        f"{document.name}: train_batch_size, train_micro_batch_size_per_gpu and gradient_accumulation_steps "
        "must be positive whole numbers or auto",
    )
    named = document.get("train_micro_batch_size_per_gpu") is not None
    if steps is None:
        if named and total is not None and total % (micro * world_size):
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
    for part in ("offload_optimizer", "offload_param"):  # the run's own folder on the disk
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


_SWAPPING = {
    "zero_optimization.offload_param.buffer_size": "as much as the largest parameter's share needs",
    "zero_optimization.stage3_max_reuse_distance": "parameters that stay gathered keep their swap buffers, "
    "and the run would end for want of one",
}
"""What the run decides where parameters are swapped to a disk, and why."""


def say_once(document: Document, settings: Mapping[str, Any], rank: int) -> None:
    """Tell the person what was changed in the JSON, on the first rank.

    Args:
        document: the JSON.
        settings: what it was merged into.
        rank: this one.
    """
    if rank != 0:
        return
    used = replace(document, values=dict(settings))
    changed = [
        f"{path}: {used.get(path)} in place of {document.get(path)}: {why}"
        for path, why in _SWAPPING.items()
        if document.get(path) not in (None, used.get(path))
    ]
    for notice in (*document.notices, *changed):
        print(f"note: {document.name}: {notice}", file=sys.stderr)
