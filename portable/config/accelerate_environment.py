"""The environment variables that ``accelerate launch`` sets for its ranks.

Each variable corresponds to a key of an Accelerate config file, which :mod:`portable.config.accelerate_yaml`
interprets.

The launcher always sets most of them, so default values are ignored. ``--mixed_precision no`` is the same as
no ``--mixed_precision``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

Path = tuple[str, ...]

_SECTIONS = {
    "FSDP_": "fsdp_config",
    "ACCELERATE_DYNAMO_": "dynamo_config",
    "ACCELERATE_DEEPSPEED_": "deepspeed_config",
    "PARALLELISM_CONFIG_": "parallelism_config",
    "MEGATRON_LM_": "megatron_lm_config",
}
_KINDS = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DEEPSPEED",
    "ACCELERATE_USE_MEGATRON_LM": "MEGATRON_LM",
}
# Where a variable's name is not its key's.
_NAMED: dict[str, Path] = {
    "ACCELERATE_MIXED_PRECISION": ("mixed_precision",),
    "ACCELERATE_USE_CPU": ("use_cpu",),
    "ACCELERATE_DEBUG_MODE": ("debug",),
    "ACCELERATE_CPU_AFFINITY": ("enable_cpu_affinity",),
    "ACCELERATE_USE_PARALLELISM_CONFIG": ("parallelism_config",),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": ("deepspeed_config", "gradient_accumulation_steps"),
    "ACCELERATE_GRADIENT_CLIPPING": ("deepspeed_config", "gradient_clipping"),
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": ("deepspeed_config", "deepspeed_config_file"),
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": ("deepspeed_config", "zero3_init_flag"),
    "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": ("deepspeed_config", "deepspeed_moe_layer_cls_names"),
    "FSDP_TRANSFORMER_CLS_TO_WRAP": ("fsdp_config", "fsdp_transformer_layer_cls_to_wrap"),
    **dict.fromkeys(_KINDS, ("distributed_type",)),
}
_DEFAULTS: dict[Path, tuple[str, ...]] = {
    ("mixed_precision",): ("no",),
    ("use_cpu",): ("false",),
    ("dynamo_config", "dynamo_backend"): ("no",),
    ("dynamo_config", "dynamo_mode"): ("default",),
    ("fsdp_config", "fsdp_sharding_strategy"): ("full_shard", "1"),
    ("fsdp_config", "fsdp_reshard_after_forward"): ("true",),
    ("fsdp_config", "fsdp_offload_params"): ("false",),
    ("fsdp_config", "fsdp_activation_checkpointing"): ("false",),
}


def values_of(environment: Mapping[str, str]) -> tuple[dict[str, Any], dict[Path, str]]:
    """Convert the variables of a launcher to the content of a config file.

    Args:
        environment: of a process.

    Returns:
        the content, empty if ``accelerate launch`` is not the launcher, and the variable of each key.
    """
    values: dict[str, Any] = {}
    variables: dict[Path, str] = {}
    if "ACCELERATE_MIXED_PRECISION" not in environment:  # every launcher of Accelerate sets it
        return values, variables
    kind = next((k for variable, k in _KINDS.items() if _on(environment, variable)), None)
    for variable, text in sorted(environment.items()):
        path = _path_of(variable)
        if path is None or not _counts(path, kind, environment):
            continue
        if variable in _KINDS:
            if kind != _KINDS[variable]:
                continue
            value: Any = kind
        elif text.lower() in _DEFAULTS.get(path, ()):
            continue
        else:
            value = _scalar(text)
        section = values.setdefault(path[0], {}) if len(path) > 1 else values
        section[path[-1]] = value
        variables[path] = variable
    return values, variables


def _path_of(variable: str) -> Path | None:
    if variable in _NAMED:
        return _NAMED[variable]
    for prefix, section in _SECTIONS.items():
        if variable.startswith(prefix):
            bare = variable.removeprefix(prefix).lower()
            words = {"fsdp_config": f"fsdp_{bare}", "dynamo_config": f"dynamo_{bare}"}
            return (section, words.get(section, bare))
    return None


def _counts(path: Path, kind: str | None, environment: Mapping[str, str]) -> bool:
    """Whether Accelerate itself would read this key."""
    wanted = {"fsdp_config": "FSDP", "deepspeed_config": "DEEPSPEED", "megatron_lm_config": "MEGATRON_LM"}
    if path[0] == "parallelism_config":
        # The switch represents the section, which is refused as a whole.
        return len(path) == 1 and _on(environment, "ACCELERATE_USE_PARALLELISM_CONFIG")
    # FSDP1 and FSDP2 have different keys for the sharding.
    unread = "sharding_strategy" if environment.get("FSDP_VERSION") == "2" else "reshard_after_forward"
    return wanted.get(path[0], kind) == kind and path[-1] != f"fsdp_{unread}"


def _on(environment: Mapping[str, str], variable: str) -> bool:
    return environment.get(variable, "").lower() in ("1", "true", "yes", "on")


def _scalar(text: str) -> Any:
    """Parse numbers as in YAML. Other words depend on the key."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None if text == "None" else text
