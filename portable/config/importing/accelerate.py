"""The keys of an ``accelerate config`` file, and of the environment that ``accelerate launch`` makes of one.

The file defines launch and sharding, not model, data or training. As in Accelerate, the sections for FSDP and
DeepSpeed apply only if ``distributed_type`` names them.
"""

from __future__ import annotations

import os
import pathlib
from typing import TYPE_CHECKING, Any

from portable.config.importing.deepspeed import clipping, nvme_path, offload
from portable.config.importing.rows import (
    EMPTY,
    NoCounterpart,
    NoEffect,
    Row,
    cells,
    choose,
    table,
)
from portable.config.origins import shown
from portable.config.types import truth
from portable.config.yaml_text import parse_value

if TYPE_CHECKING:
    from collections.abc import Mapping

    from portable.config.importing.rows import File, Keys

STRATEGIES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
"""In the order of Accelerate's numbers, from 1."""
_SHARDING = {word: name for n, name in enumerate(STRATEGIES, 1) for word in (str(n), name)}
_PRECISIONS = {"no": "fp32", "false": "fp32", "bf16": "bf16", "fp16": "fp16"}


def _kind(file: File) -> str:
    return str(file.values.get("distributed_type", "NO")).upper()


def _xla(file: File) -> bool:
    sections = (file.values, file.values.get("fsdp_config"))
    return _kind(file) in ("XLA", "TPU") or any(
        isinstance(s, dict) and s.get("xla") is True for s in sections
    )


def _stage(file: File) -> int:
    """The ZeRO stage; 3 if a DeepSpeed JSON decides, which is not read here."""
    stage = str(file.get("deepspeed_config.zero_stage", 2))
    return int(stage) if stage in "0123" and not _json(file) else 3


def _json(file: File) -> bool:
    return file.get("deepspeed_config.deepspeed_config_file") not in (*EMPTY, "none")


def _number(value: Any, file: File | None = None) -> Any:
    """Parse a quoted number, as Accelerate does, which reads them from environment variables."""
    try:
        number = float(value) if isinstance(value, str) else value
    except ValueError:
        return value
    return int(value) if isinstance(value, str) and value.strip().isdigit() else number


def _flag(value: Any) -> bool:
    if not isinstance(flag := truth(value), bool):
        raise NoCounterpart(f"must be true or false, not {shown(value)}")
    return flag


def _for_tpus(value: Any, file: File) -> None:
    """A key that launches TPU hosts; the launch here asks for none."""
    if truth(value) in (False, *EMPTY):
        return
    if _xla(file):
        raise NoCounterpart(f"{shown(value)} has no counterpart: {file.row.why}")
    raise NoEffect(f"{shown(value)} has no effect: it is for TPUs")


def _sharding(value: Any, file: File) -> Any:
    """One of the two keys for the sharding; each version of FSDP has its own."""
    found = str(file.get("fsdp_config.fsdp_version", file.get("fsdp_version", 1)))
    second = file.path[-1] == "fsdp_reshard_after_forward"
    if (found == "2") != second and not _xla(file):
        other = "fsdp_reshard_after_forward" if found == "2" else "fsdp_sharding_strategy"
        raise NoEffect(f"has no effect: with fsdp_version {found} Accelerate reads {other}")
    if second and isinstance(truth(value), bool):
        return "full_shard" if truth(value) else "shard_grad_op"
    return choose(value, _SHARDING)


def _original(value: Any, file: File) -> None:
    if truth(value) not in (True, *EMPTY):
        raise NoEffect(f"{shown(value)} has no effect: {file.row.why.partition(': ')[2]}")


def _more_than_one(value: Any, file: File) -> int | None:
    """The size of a group of ranks, if it is one."""
    size = _number(value)
    return None if size == 1 else size


def _use_cpu(value: Any, file: File) -> str | None:
    if not _flag(value):
        return None
    if _kind(file) == "MULTI_GPU":
        raise NoEffect("has no effect: with distributed_type MULTI_GPU Accelerate runs on GPUs")
    return "cpu"


def _dynamo(value: Any, file: File) -> dict[str, Any] | None:
    """``dynamo_backend``, at the top level in older files."""
    off = str(value).upper() in ("NO", "FALSE")
    if value is None or off:
        return None if value is None else {"compile": False}
    if _kind(file) == "DEEPSPEED":
        raise NoEffect("has no effect: Accelerate ignores it with DeepSpeed; set compile")
    return {"compile": True, "compile_backend": str(value).lower()}


def _gpus(value: Any, file: File) -> None:
    if value in (*EMPTY, "all"):
        return
    ids = ",".join(str(item) for item in value) if isinstance(value, list) else str(value)
    file.result.gpu_ids = ids.replace(" ", "")
    raise NoEffect(f"CUDA_VISIBLE_DEVICES is set to {file.result.gpu_ids}, unless it is set already")


def _old_fp16(value: Any, file: File) -> str | None:
    """The key before mixed_precision."""
    return None if file.get("mixed_precision") else "fp16" if _flag(value) else "fp32"


def _classes(value: Any, file: File) -> list[str] | None:
    names = value if isinstance(value, list) else str(value or "").split(",")
    return [str(name).strip() for name in names if str(name).strip()] or None


def _min_params(value: Any, file: File) -> Any:
    policy = str(file.get("fsdp_config.fsdp_auto_wrap_policy", "")).upper()
    return _number(value) if policy == "SIZE_BASED_WRAP" else None  # Accelerate writes it for others, too


def _wrap(value: Any, file: File) -> str | None:
    policy = choose(value, {w: w for w in ("transformer_based_wrap", "size_based_wrap", "no_wrap")})
    if _xla(file) and policy not in (None, "transformer_based_wrap"):
        raise NoCounterpart(f"{policy}: {_FILE['xla_fsdp_settings.auto_wrap_policy'].why}")
    return None if policy is None else str(policy)


def _sharding_of(file: File) -> Any:
    return file.get("fsdp_config.fsdp_sharding_strategy")


def _reshard(value: Any, file: File) -> str | None:
    """A second name of the strategy."""
    wanted, given = "full_shard" if _flag(value) else "shard_grad_op", _sharding_of(file)
    if given is None:
        return wanted
    if _flag(value) is (choose(given, _SHARDING) in ("shard_grad_op", "hybrid_shard_zero2")):
        raise NoCounterpart(
            f"{shown(value)} contradicts fsdp_sharding_strategy {given}; remove one of the two"
        )
    return None


def _compute(value: Any, file: File) -> str:
    """A second name of mixed_precision."""
    kinds = {"float32": "fp32", "bfloat16": "bf16"}
    precision = str(choose(str(value).removeprefix("torch."), kinds))
    mixed = file.get("mixed_precision")
    if mixed is not None and choose(mixed, _PRECISIONS) != precision:
        raise NoCounterpart(f"{value} contradicts mixed_precision {shown(mixed)}; remove one of the two")
    return precision


def _accumulation(value: Any, file: File) -> dict[str, Any] | None:
    """Used as if it were in a DeepSpeed JSON, for which this section is a shorthand."""
    steps = int(value) if isinstance(value, str) and value.isdigit() else value
    if steps in (None, 1, "auto"):  # Accelerate's default in every file
        return None
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise NoCounterpart(f"must be a positive whole number or auto, not {shown(value)}")
    if _json(file):
        raise NoCounterpart("Accelerate takes it from deepspeed_config_file; set it there, and remove it")
    return {"gradient_accumulation_steps": steps}


def _deepspeed_file(value: Any, file: File) -> Any:
    if not _json(file):
        return None
    if not pathlib.Path(os.path.expandvars(str(value))).expanduser().is_file():
        raise NoCounterpart(f"{value} does not exist; use the path of a DeepSpeed JSON")
    return value


_FILE = table(
    "Accelerate YAML",
    {
        "use_cpu": _use_cpu,
        "fp16": _old_fp16,
        "downcast_bf16 tpu_use_cluster tpu_use_sudo tpu_name tpu_zone tpu_vm tpu_env commands "
        "command_file": _for_tpus,
        "gpu_ids": _gpus,
        "dynamo_backend dynamo_config.dynamo_backend": _dynamo,
        "dynamo_config.dynamo_mode": lambda value, _: value or "default",
        "fsdp_config.fsdp_sharding_strategy fsdp_config.fsdp_reshard_after_forward": _sharding,
        "fsdp_config.fsdp_auto_wrap_policy": _wrap,
        "fsdp_config.fsdp_transformer_layer_cls_to_wrap": _classes,
        "fsdp_config.fsdp_min_num_params": _min_params,
        "fsdp_config.fsdp_use_orig_params": _original,
        "xla_fsdp_settings.compute_dtype": _compute,
        "xla_fsdp_settings.buffer_dtype": lambda value, _: str(value).removeprefix("torch."),
        "xla_fsdp_settings.reshard_after_forward": _reshard,
        "deepspeed_config.gradient_accumulation_steps": _accumulation,
        "deepspeed_config.gradient_clipping": clipping,
        "deepspeed_config.offload_optimizer_device": offload("optimizer", _stage),
        "deepspeed_config.offload_param_device": offload("params", _stage),
        "deepspeed_config.offload_optimizer_nvme_path": nvme_path(
            "deepspeed_config.offload_optimizer_device", _stage
        ),
        "deepspeed_config.offload_param_nvme_path": nvme_path(
            "deepspeed_config.offload_param_device", _stage
        ),
        "deepspeed_config.deepspeed_config_file": _deepspeed_file,
        "parallelism_config.parallelism_config_cp_size parallelism_config.parallelism_config_sp_size "
        "parallelism_config.parallelism_config_tp_size": _more_than_one,
    },
)
_XLA = {name: row for name, row in _FILE.items() if name.startswith("xla")}
"""At the top level in some guides, and in FSDP's section in the Trainer's."""
ROWS = _FILE | {f"fsdp_config.{name}": row for name, row in _XLA.items()}
_XLA_KEYS = {name.partition(".")[0] for name in _XLA}
WERE_SETTINGS = {
    f"xla.{name.removeprefix('xla_fsdp_settings.')}": row
    for name, row in _XLA.items()
    if name != "xla" and not row.to.startswith("xla.")
} | {"xla.xla_fsdp_v2": Row(why="sharding is always by SPMD; remove it", free=True)}
"""Settings of earlier releases that had one value, or another name besides."""


def prepare(file: File) -> None:
    """Leave out sections that Accelerate would not read, and put its prefixes at every key."""
    found = file.values
    for section, prefix in (("fsdp_config", "fsdp_"), ("dynamo_config", "dynamo_")):
        if isinstance(inside := found.get(section), dict):
            found[section] = {
                k if k in _XLA_KEYS or str(k).startswith(prefix[:-1]) else f"{prefix}{k}": v
                for k, v in inside.items()
            }
    wanted = {
        "fsdp_config": _kind(file) == "FSDP" or _xla(file),
        "deepspeed_config": _kind(file) == "DEEPSPEED",
    }
    for section in (*wanted, "megatron_lm_config"):  # Megatron-LM is refused as distributed_type
        if section in found and (found[section] in EMPTY or isinstance(found[section], dict)):
            if not wanted.get(section, False):
                del found[section]
            elif found[section] in EMPTY:
                found[section] = {}


def finish(file: File, devices: int) -> None:
    """Accelerate's defaults for the sharding, and the number of ranks.

    Args:
        file: whose keys were taken over.
        devices: not used: the file says how many.
    """
    kind, path, result = _kind(file), ("distributed_type",), file.result
    if kind == "FSDP" and "strategy" not in result.values:
        file.put(path, "strategy", "full_shard")
    if kind == "DEEPSPEED" and "strategy" not in result.values and not _json(file):
        file.put(path, "strategy", "zero2")
    if _xla(file):  # where nothing is wrapped or prefetched
        for key in [key for key in result.values if key.startswith("fsdp.")]:
            del result.values[key], result.origins[key]
    if _xla(file) and not (file.get("fsdp_config") or any(key in file.values for key in _XLA_KEYS)):
        file.note(path, "without fsdp_config Accelerate replicates the model; here it is sharded")
    if _xla(file) or "RANK" in os.environ:  # one process drives all devices, or a launcher sets the number
        return
    machines, processes = file.values.get("num_machines", 1), file.values.get("num_processes")
    if machines not in (None, 1):
        file.refuse(
            ("num_machines",),
            f"{shown(machines)} machines need accelerate launch or torchrun on each of them, which this "
            "process then joins; or set it to 1",
        )
    if processes is None and file.values.get("distributed_type") in ("NO", False):
        processes = 1
    if isinstance(processes, int) and processes > 0:
        result.processes = processes
    elif processes is not None and processes != -1:
        file.refuse(("num_processes",), f"must be an integer >= 1, not {shown(processes)}")


# -- the environment ---------------------------------------------------------------------------------------

_KINDS = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DEEPSPEED",
    "ACCELERATE_USE_MEGATRON_LM": "MEGATRON_LM",
}
_VARIABLES = [
    (variable.strip("`"), key.strip("`"), nothing.split(", "))
    for variable, key, nothing in cells("Variables of accelerate launch")
]


def _key_of(variable: str, text: str) -> str:
    """The key that a variable is; empty for one that asks for nothing, or is not Accelerate's."""
    for name, key, nothing in _VARIABLES:
        if name == variable:
            return "" if text.lower() in nothing else key
        if name.endswith("*") and variable.startswith(name[:-1]):
            return key[:-1] + variable.removeprefix(name[:-1]).lower()
    return ""


def of_environment(environment: Mapping[str, str]) -> tuple[dict[str, Any], dict[Keys, str]]:
    """Convert the variables of a launcher to the content of a config file.

    Args:
        environment: of a process that it has started.

    Returns:
        the content, and the variable of each key.
    """
    values: dict[str, Any] = {}
    variables: dict[Keys, str] = {}
    for variable, kind in _KINDS.items():
        if truth(environment.get(variable, "").replace("1", "true")) is True and not values:
            values["distributed_type"] = kind
            variables[("distributed_type",)] = variable
    # FSDP1 and FSDP2 have different keys for the sharding.
    unread = "sharding_strategy" if environment.get("FSDP_VERSION") == "2" else "reshard_after_forward"
    for variable, text in sorted(environment.items()):
        dotted = _key_of(variable, text)
        if not dotted or dotted.endswith(unread):
            continue
        around, _, name = dotted.rpartition(".")
        target = values.setdefault(around, {}) if around else values
        target[name] = None if text == "None" else parse_value(text)
        variables[tuple(dotted.split("."))] = variable
    return values, variables
