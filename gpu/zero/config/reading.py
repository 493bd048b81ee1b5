"""Read a DeepSpeed JSON: parse it, rename deprecated keys, check keys and values, collect notes."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu.zero import private_api
from gpu.zero.config.blocks import check_optimizer_type, rate_of, recompute_notices
from gpu.zero.config.document import AUTO, KEY, Document, shown
from gpu.zero.config.merging import OFFLOADS
from gpu.zero.config.schema import check, models, replace_deprecated
from portable.errors import UserError, one_line, require

if TYPE_CHECKING:
    from collections.abc import Mapping

    from portable.config import RunConfig

_MOST_BYTES = 1 << 20


def read(config: RunConfig) -> Document | None:
    """Read and check the JSON of ``deepspeed.config``; None if it is not set.

    The file is read once: :func:`gpu.zero.config.reconcile.adopt` leaves the document in the config.

    Raises:
        UserError: if it cannot be read, or has a key or value that DeepSpeed does not accept.
    """
    given = config.deepspeed.config
    if given is None:
        return None
    if (known := config.documents.get(KEY)) is not None:
        return known  # type: ignore[no-any-return]
    values, name = (deepcopy(given), KEY) if isinstance(given, dict) else (_load(Path(given)), str(given))
    values = _without_comments(values)
    notices = modernise(values, name)
    _refuse_removed(values, name)
    check_optimizer_type(values, name)
    check(values, name)
    document = Document(values, name, ())
    notices += _without_effect(config, document)
    rate = rate_of(document)
    if rate is not None and document.get("optimizer.params.lr") is not None:
        notices.append(f"optimizer.params.lr has no effect: scheduler.params.{rate} sets the learning rate")
    notices += recompute_notices(document)
    gather = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    if document.get(gather) and document.get("zero_optimization.stage") == 3:
        notices.append(
            f"{gather} has no effect: final/ always has the full weights, in fp32 (16 bits: portable-convert "
            "--dtype)"
        )
    return replace(document, notices=tuple(notices))


def _load(path: Path) -> dict[str, Any]:
    try:
        text = path.read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(one_line(f"{KEY}: {path} cannot be read: {reason}")) from error
    require(len(text) <= _MOST_BYTES, f"{KEY}: {path} is larger than 1 MiB; name a DeepSpeed JSON")
    try:
        values = json.loads(text, object_pairs_hook=lambda pairs: _without_repeats(pairs, path))
    except (ValueError, RecursionError) as error:
        values = _load_relaxed(text, path)
        if values is None:
            raise UserError(one_line(f"{path}: invalid JSON: {error}")) from error
    require(isinstance(values, dict), f"{path}: a DeepSpeed JSON must be a mapping")
    found: dict[str, Any] = values
    return found


def _load_relaxed(text: bytes, path: Path) -> Any:
    """Parse ``text`` as Hjson, as DeepSpeed does: comments, trailing commas. None if it is invalid."""
    import hjson

    try:
        found = hjson.loads(text.decode(), object_pairs_hook=lambda pairs: _without_repeats(pairs, path))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None  # a single word is valid Hjson, too


def _without_repeats(pairs: list[tuple[str, Any]], path: Path) -> dict[str, Any]:
    keys = [key for key, _ in pairs if not _is_comment(key)]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    require(twice is None, f"{path}: duplicate key {twice}; remove one")
    return dict(pairs)


def _is_comment(key: Any) -> bool:
    return str(key).startswith(("_", "//"))


def _without_comments(values: dict[str, Any]) -> dict[str, Any]:
    """``values`` without the keys that serve as comments."""
    return {
        key: _without_comments(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if not _is_comment(key)
    }


def modernise(values: dict[str, Any], name: str) -> list[str]:
    """Move deprecated keys to their present names and places.

    Args:
        values: the configuration, changed in place.
        name: its file or setting, for error messages.

    Returns:
        the changes, one line each.

    Raises:
        UserError: if a key has both its old and its new name.
    """
    notices = []
    if isinstance(values.get("zero_optimization"), bool):  # the form before stages existed
        values["zero_optimization"] = {"stage": int(values["zero_optimization"])}
        size = values.pop("allgather_size", None)
        if size is not None and values["zero_optimization"]["stage"]:
            values["zero_optimization"]["allgather_bucket_size"] = size
        notices.append(
            "zero_optimization true or false is deprecated: read as zero_optimization.stage 1 or 0"
        )
    zero = values.get("zero_optimization", {})
    require(
        isinstance(zero, dict),
        f"{name}: zero_optimization must be a mapping, not {shown(zero)}; remove it, or set its stage in it",
    )
    stage = zero.get("stage")
    if isinstance(stage, float) and stage.is_integer():  # DeepSpeed accepts it
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
        notices.append("aio in zero_optimization is deprecated: moved to the top level")
    aio = values.get("aio")
    if isinstance(aio, dict):
        for old in ("thread_count", "num_threads"):  # DeepSpeed 0.16's name, and the one ds_nvme_tune prints
            if old in aio:
                aio.setdefault("intra_op_parallelism", aio.pop(old))
                notices.append(f"aio.{old} is deprecated: read as aio.intra_op_parallelism")
        for switch in (
            "single_submit",
            "overlap_events",
        ):  # ds_nvme_tune prints strings, all of which are truthy
            if aio.get(switch) in ("true", "false"):
                aio[switch] = aio[switch] == "true"
    if "bfloat16" in values:
        values.setdefault("bf16", values.pop("bfloat16"))
    return notices


# Sections that count under any strategy.
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
    """Remove what DeepSpeed ignores at the document's stage; return a note on each removal."""
    strategy = strategy_of(config, document)
    zero = document.values.get("zero_optimization")
    zero = zero if isinstance(zero, dict) else {}
    notices = []
    if strategy == "no_shard":
        for part in OFFLOADS:
            zero.pop(part, None)
        idle = [key for key, value in document.values.items() if key not in _WITHOUT_ZERO and _asks(value)]
        notices.append(
            "no ZeRO stage: the run uses torch's DDP (strategy no_shard) instead of DeepSpeed's engine"
            + (f"; no effect: {', '.join(idle)}" if idle else "")
        )
        if document.get("fp16.loss_scale") and document.get("fp16.enabled"):
            notices.append("fp16.loss_scale has no effect without ZeRO: the loss scale is dynamic")
        if document.get("activation_checkpointing.cpu_checkpointing"):
            notices.append(
                "activation_checkpointing.cpu_checkpointing has no effect without ZeRO: the inputs of "
                "recomputed layers stay on the device"
            )
    elif strategy != "zero3":
        if document.get("zero_optimization.offload_param.device") not in (None, "none"):
            notices.append(
                f"zero_optimization.offload_param has no effect at stage {strategy[-1]}: only stage 3 "
                "offloads parameters"
            )
        zero.pop("offload_param", None)
        if document.get("zero_optimization.offload_optimizer.device") == "nvme":
            zero["offload_optimizer"] = {**zero["offload_optimizer"], "device": "cpu"}
            notices.append(
                f"zero_optimization.offload_optimizer.device nvme is read as cpu at stage {strategy[-1]}: "
                "only stage 3 offloads to disk"
            )
    return notices


def _asks(value: Any) -> bool:
    """Whether a value enables something."""
    if isinstance(value, dict):
        if "enabled" in value:
            return _asks(value["enabled"])
        return any(_asks(inside) for key, inside in value.items() if key != "stage")
    return value not in (None, False, 0, AUTO)


def _refuse_removed(values: Mapping[str, Any], name: str) -> None:
    error = private_api.removed_key_error(values)
    if error is not None:
        raise UserError(f"{name}: {one_line(error)}") from error


def strategy_of(config: RunConfig, document: Document) -> str:
    """The strategy of the JSON's stage; without a stage, as in DeepSpeed, nothing is sharded."""
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
