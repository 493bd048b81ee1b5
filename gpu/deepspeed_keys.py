"""Every key that the installed DeepSpeed understands, and a check of a configuration against them.

DeepSpeed reads part of its configuration through pydantic models, and asks there; the rest it takes from
plain dictionaries, where a misspelt key changes nothing. So those are written down here.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel

from portable.config.suggest import did_you_mean
from portable.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Known = dict[str, Any]
"""A key to the keys inside it; None for a value, or for a mapping whose keys are the user's own."""


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
_PLAIN: Known = {
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
        "thread_count",  # as it was called before 0.16, and still is in other projects' documentation
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
    "elasticity": None,  # removed, as DeepSpeed says itself
}

_OPTIMIZER_PARAMS = (
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "bias_correction",
    "amsgrad",
    "torch_adam",
    "adam_w_mode",
    "fp32_optimizer_states",
    "foreach",
    "fused",
    "set_grad_none",
    "max_coeff",
    "min_coeff",
    "freeze_step",
    "cuda_aware",
    "comm_backend_name",
    "coeff_beta",
    "factor_max",
    "factor_min",
    "factor_threshold",
    "var_freeze_step",
    "var_update_scaler",
    "local_step_scaler",
    "local_step_clipper",
    "momentum",
    "dampening",
    "nesterov",
    "ns_method",
    "muon_lr",
    "adam_lr",
    "lr_decay",
    "initial_accumulator_value",
)


def check_keys(document: Mapping[str, Any], where: str) -> None:
    """Raise UserError for the first key that the installed DeepSpeed does not know, at any depth.

    Args:
        document: the configuration.
        where: the file or setting that it comes from, for the message.
    """
    for path, siblings in _unknown(document, known_keys(document), ()):
        hint = did_you_mean(path[-1], siblings, prefix=".".join((*path[:-1], "")))
        around = ".".join(path[:-1]) or "its top level"
        hint = hint or f"; {around} takes {', '.join(sorted(siblings))}"
        raise UserError(f"{where}: unknown key {'.'.join(path)}{hint}")


def known_keys(document: Mapping[str, Any]) -> Known:
    """All keys, the ``params`` of optimizer and scheduler as their types in ``document`` take them."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.monitor.config import DeepSpeedMonitorConfig
    from deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
    from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS, HybridEngineConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    bf16 = _fields(DeepSpeedBF16Config)
    return {
        **_PLAIN,
        **dict.fromkeys(_REMOVED_TOP_LEVEL_CONFIG_KEYS),  # which DeepSpeed refuses in its own words
        **_fields(DeepSpeedMonitorConfig),
        "bf16": bf16,
        "bfloat16": bf16,
        "fp16": _fields(DeepSpeedFP16Config),
        "zero_optimization": {**_fields(DeepSpeedZeroConfig), "aio": _PLAIN["aio"]},
        "comms_logger": _fields(CommsLoggerConfig),
        "compile": _fields(CompileConfig),
        "flops_profiler": _attributes(DeepSpeedFlopsProfilerConfig({})) | _SWITCH,
        "hybrid_engine": _fields(HybridEngineConfig),
        "tensor_parallel": _fields(TPTrainingConfig),
        "timers": {"throughput": _fields(DeepSpeedThroughputTimerConfig)},
        "autotuning": _autotuning(),
        "optimizer": {**_PLAIN["optimizer"], "params": _names(*_OPTIMIZER_PARAMS)},
        "scheduler": {**_PLAIN["scheduler"], "params": _scheduler_params(document.get("scheduler"))},
    }


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


def _attributes(settings: object) -> Known:
    return _names(*vars(settings))


def _autotuning() -> Known:
    from deepspeed.autotuning.config import DeepSpeedAutotuningConfig

    return _attributes(DeepSpeedAutotuningConfig({})) | _SWITCH


def _scheduler_params(scheduler: Any) -> Known | None:
    """What the scheduler's class takes; None, for any, where the type is no scheduler."""
    from deepspeed.runtime import lr_schedules

    kind = scheduler.get("type") if isinstance(scheduler, dict) else None
    found = getattr(lr_schedules, kind, None) if isinstance(kind, str) else None
    if not inspect.isclass(found):
        return None
    names = inspect.signature(found.__init__).parameters
    return _names(*(name for name in names if name not in ("self", "optimizer")))
