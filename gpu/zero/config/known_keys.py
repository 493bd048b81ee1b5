"""Check the keys of a DeepSpeed configuration against those that the installed DeepSpeed reads.

DeepSpeed reads some sections with pydantic models, which list their keys. The rest it reads from plain
dictionaries, where a misspelt key is silently ignored; those keys are listed here.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError

from gpu.zero import private_api
from gpu.zero.config.blocks import optimizer_defaults, scheduler_defaults
from portable.config.suggest import did_you_mean
from portable.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Known = dict[str, Any]
"""Each key with the keys inside it; None for a value, or a mapping with the user's own keys."""


def _names(*names: str) -> Known:
    return dict.fromkeys(names)


_SWITCH = _names("enabled")
_CURRICULUM_METRIC = _names(
    "index_to_sample_path",
    "index_to_metric_path",
    "difficulty_type",
    "clustering_type",
    "min_difficulty",
    "max_difficulty",
    "schedule_type",
    "schedule_config",
)

# Read from plain dictionaries: deepspeed/runtime/config.py and the constants.py beside each feature.
PLAIN: Known = {
    **_names(
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "managed_gradient_accumulation",
        "gradient_clipping",
        "prescale_gradients",
        "gradient_predivide_factor",
        "gradient_allreduce_op",
        "communication_data_type",
        "seq_parallel_communication_data_type",
        "steps_per_print",
        "wall_clock_breakdown",
        "memory_breakdown",
        "dump_state",
        "disable_allgather",
        "disable_python_gc",
        "dataloader_drop_last",
        "log_level",
        "use_data_before_expert_parallelism",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "weight_quantization",
        "expert_parallel",
        "datastates_ckpt",
    ),
    "optimizer": {"type": None, "params": None, "legacy_fusion": None},
    "scheduler": {"type": None, "params": None},
    "activation_checkpointing": _names(
        "partition_activations",
        "number_checkpoints",
        "contiguous_memory_optimization",
        "synchronize_checkpoint_boundary",
        "profile",
        "cpu_checkpointing",
    ),
    "aio": _names(
        "block_size",
        "queue_depth",
        "intra_op_parallelism",
        "thread_count",  # the name before 0.16, still found in other projects' documentation
        "single_submit",
        "overlap_events",
        "use_gds",
    ),
    "checkpoint": {
        **_names("tag_validation", "load_universal", "use_node_local_storage", "checkpoint_serialization"),
        "parallel_write": _names("pipeline_stage"),
        "writer": _names(
            "type",
            "io_buffer_size",
            "io_buffer_double",
            "io_multiplier",
            "show_statistics",
            "data_parallel",
            "decoupled",
        ),
    },
    "data_types": _names("grad_accum_dtype", "param_dtype", "buffer_dtype", "keep_in_fp32_modules"),
    "torch_autocast": _names("enabled", "dtype", "lower_precision_safe_modules"),
    "data_efficiency": {
        **_names("enabled", "seed"),
        "data_sampling": {
            **_names("enabled", "num_epochs", "num_workers", "pin_memory"),
            "curriculum_learning": {
                **_names("enabled", "data_cluster_path"),
                "curriculum_metrics": {"*": _CURRICULUM_METRIC},
            },
            "dynamic_batching": None,
        },
        "data_routing": {**_SWITCH, "random_ltd": None},
    },
    "pipeline": _names(
        "stages",
        "partition",
        "seed_layers",
        "activation_checkpoint_interval",
        "pipe_partitioned",
        "grad_partitioned",
    ),
    "elasticity": None,  # removed: DeepSpeed refuses it in its own words
}


def check_keys(document: Mapping[str, Any], where: str) -> None:
    """Raise UserError for all keys, at any depth, that the installed DeepSpeed does not read.

    Args:
        document: the configuration.
        where: its file or setting, for the message.
    """
    unknown = list(_unknown(document, known_keys(document), ()))
    if not unknown:
        return
    path, siblings = unknown[0]
    hints = [
        ".".join(path) + did_you_mean(path[-1], siblings, prefix=".".join((*path[:-1], "")))
        for path, siblings in unknown
    ]
    if len(unknown) > 1:
        listed = [f"{hint.replace('; ', ' (')})" if "; " in hint else hint for hint in hints]
        raise UserError(f"{where}: unknown keys {', '.join(listed)}")
    around = ".".join(path[:-1]) or "the top level"
    known = "" if hints[0] != ".".join(path) else f"; {around} has {', '.join(sorted(siblings))}"
    raise UserError(f"{where}: unknown key {hints[0]}{known}")


def replace_deprecated(
    model: type[BaseModel], section: dict[str, Any], path: tuple[str, ...], where: str
) -> list[str]:
    """Rename deprecated keys of ``section`` by the rules in DeepSpeed's model.

    Args:
        model: DeepSpeed's model of the section.
        section: changed in place.
        path: of the section.
        where: its file or setting, for messages.

    Returns:
        the changes, one line each.

    Raises:
        UserError: if a key has both its old and its new name.
    """
    notices = []
    for name, field in model.model_fields.items():
        rules: Any = field.json_schema_extra or {}
        key = next((key for key in (name, field.alias) if key in section), None)
        if key is None or not rules.get("deprecated"):
            continue
        annotation: Any = field.annotation
        try:
            value = TypeAdapter(annotation).validate_python(section[key])
        except ValidationError:  # reported by the check of values
            continue
        new = rules.get("new_param", "")
        old = ".".join((*path, key))
        del section[key]
        if not new or not rules.get("set_new_param", True):
            notices.append(
                f"{old} has no effect: DeepSpeed has removed it" + (f"; it is part of {new}" if new else "")
            )
            continue
        target = model.model_fields[new].alias or new
        if target in section or new in section:
            raise UserError(f"{where}: {old} is the old name of {target}, which is set as well; remove {old}")
        value = rules.get("new_param_fn", lambda value: value)(value)
        if isinstance(value, BaseModel):
            value = value.model_dump(mode="json", exclude_unset=True)
        if value is not None:
            section[target] = value
        notices.append(f"{old} is deprecated: read as {target}")
    return notices


def models() -> dict[tuple[str, ...], type[BaseModel]]:
    """The pydantic models of the installed DeepSpeed, by section."""
    monitors: dict[tuple[str, ...], type[BaseModel]] = {
        (name,): kind
        for name, field in private_api.monitor_model().model_fields.items()
        for kind in _types(field.annotation)
        if issubclass(kind, BaseModel)
    }
    return {**monitors, **private_api.config_models()}


def known_keys(document: Mapping[str, Any]) -> Known:
    """All keys; ``params`` of optimizer and scheduler depend on their types in ``document``."""
    read: Known = {}
    for path, model in models().items():
        inside = read
        for part in path[:-1]:
            inside = inside.setdefault(part, {})
        inside[path[-1]] = _fields(model)
    optimizer = _names(*optimizer_defaults(_type(document, "optimizer")))
    return {
        **PLAIN,
        **dict.fromkeys(private_api.removed_keys()),  # DeepSpeed refuses them in its own words
        **read,
        "bfloat16": read["bf16"],
        "zero_optimization": {**read["zero_optimization"], "aio": PLAIN["aio"]},
        **{
            section: _names("enabled", *vars(kind({})))
            for section, kind in private_api.config_classes().items()
        },
        "optimizer": {**PLAIN["optimizer"], "params": optimizer},
        "scheduler": {**PLAIN["scheduler"], "params": _scheduler_params(_type(document, "scheduler"))},
    }


def _type(document: Mapping[str, Any], block: str) -> Any:
    found = document.get(block)
    return found.get("type") if isinstance(found, dict) else None


def _unknown(
    document: Mapping[str, Any], known: Known, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    for key, value in document.items():
        inside = known.get(key, known.get("*", _MISSING))
        if inside is _MISSING:
            yield (*path, key), list(known)
        elif isinstance(value, dict) and inside is not None:
            yield from _unknown(value, inside, (*path, key))


_MISSING = object()


def _fields(model: type[BaseModel]) -> Known:
    found: Known = {}
    for name, field in model.model_fields.items():
        inside = next(
            (_fields(kind) for kind in _types(field.annotation) if issubclass(kind, BaseModel)), None
        )
        for key in {name, field.alias or name}:
            found[key] = inside
    return found


def _types(annotation: Any) -> Iterator[type]:
    if inspect.isclass(annotation):
        yield annotation
    for argument in get_args(annotation):
        yield from _types(argument)


def _scheduler_params(kind: Any) -> Known | None:
    """The arguments of the scheduler's class; None, which allows any, for an unknown scheduler."""
    defaults = scheduler_defaults(kind)
    return None if defaults is None else _names(*defaults)
