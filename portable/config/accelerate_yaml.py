"""Map the keys of an ``accelerate config`` file to settings, or refuse them with a reason.

The file defines launch and sharding, not model, data or training. As in Accelerate, the sections for FSDP and
DeepSpeed apply only if ``distributed_type`` names them. The environment variables of ``accelerate launch``
are read as if they were such a file.
"""

from __future__ import annotations

import os
import pathlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from portable.config import accelerate_environment, suggest
from portable.config.problems import Origin, shown
from portable.errors import UserError, one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from portable.config.yaml_text import Document

Path = tuple[str, ...]
Settings = dict[str, Any]

STRATEGIES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
"""In the order of Accelerate's numbers, from 1."""

_EMPTY: tuple[Any, ...] = (None, "", {}, [])
_EVERY_HOST = "start it on every host of the slice, as docs/tpu.md says"
_TPU_LAUNCH = ("tpu_name", "tpu_zone", "tpu_vm", "tpu_env", "commands", "command_file")
_FOR_TPUS = ("tpu_use_cluster", "tpu_use_sudo", *_TPU_LAUNCH)
_LAUNCHER = "the launcher's: start the ranks with it, and remove the key here"

# Keys for the launcher, or without effect here.
FREE = {
    "main_process_ip", "main_process_port", "machine_rank", "main_training_function", "rdzv_backend",
    "same_network", "num_processes", "num_machines",
    "fsdp_config.fsdp_version", "fsdp_config.fsdp_cpu_ram_efficient_loading",
    "fsdp_config.fsdp_sync_module_states",
    "deepspeed_config.zero3_init_flag", "deepspeed_config.zero3_save_16bit_model",
}  # fmt: skip

ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "compute_environment": (
        ("LOCAL_MACHINE", "TPU"),
        "runs are always local; set it to LOCAL_MACHINE",
    ),
    "tpu_use_cluster": (
        (False,),
        "start it on every host of the slice, as docs/tpu.md says; set it to false",
    ),
    "tpu_use_sudo": ((False,), "no command needs sudo; set it to false"),
    "mpirun_config": (_EMPTY, _LAUNCHER),
    "parallelism_config": (_EMPTY, "it shards by FSDP and ZeRO only; remove it"),
    **dict.fromkeys(_TPU_LAUNCH, (_EMPTY, f"{_EVERY_HOST}; remove it")),
    "fsdp_config.fsdp_activation_checkpointing_offload": (
        (False,),
        "stored activations stay on the device; set it to false",
    ),
    "fsdp_config.fsdp_ignored_modules": (_EMPTY, "every module is sharded; remove it"),
    "deepspeed_config.deepspeed_multinode_launcher": (("standard", *_EMPTY), _LAUNCHER),
    "deepspeed_config.deepspeed_hostfile": (_EMPTY, _LAUNCHER),
    "deepspeed_config.deepspeed_inclusion_filter": (_EMPTY, _LAUNCHER),
    "deepspeed_config.deepspeed_exclusion_filter": (_EMPTY, _LAUNCHER),
}
"""Keys with only some supported values: these values, and the reason."""

NOTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "debug": ((False, *_EMPTY), "collectives are not checked one by one"),
    "enable_cpu_affinity": ((False, *_EMPTY), "ranks are not bound to cores"),
    "fp8_config": (_EMPTY, "fp8 is not part of this version"),
    "fsdp_config.fsdp_use_orig_params": (
        (True, *_EMPTY),
        "FSDP2 always keeps the original parameters",
    ),
    "deepspeed_config.deepspeed_moe_layer_cls_names": (
        _EMPTY,
        "ZeRO-3 finds the expert blocks automatically",
    ),
}
"""Keys that do not change the result: values without effect, and the reason for a note on other values."""


@dataclass
class AccelerateSettings:
    """The settings of the file.

    Attributes:
        values: by dotted key of the run's config.
        origins: the line of each.
        processes: local ranks to start; None if a launcher or the backend decides.
    """

    values: Settings = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    processes: int | None = None
    gpu_ids: str | None = None
    """The value for ``CUDA_VISIBLE_DEVICES``; None to keep it."""
    notes: list[str] = field(default_factory=list)
    """Keys that are ignored or have another meaning here, one line each."""


def read(document: Document, name: str) -> AccelerateSettings:
    """Map the parsed file ``name``.

    Raises:
        UserError: for a key that is unknown or has no counterpart.
    """
    if not isinstance(document.value, dict):
        raise UserError(f"{name}: not an Accelerate config; accelerate config writes one")

    def origin(path: Path) -> Origin:
        line = document.lines.get(path) or document.lines.get((*path[:-1], _bare(path[-1])), 0)
        return Origin(f"{name}:{line}: {path[-1]}", line)

    return _Reader(document.value, origin).read()


def read_environment(environment: Mapping[str, str]) -> AccelerateSettings | None:
    """Map the environment variables of ``accelerate launch``; None if it has not started this process.

    Raises:
        UserError: for a variable that has no counterpart.
    """
    values, variables = accelerate_environment.values_of(environment)
    if not values:
        return None

    def origin(path: Path) -> Origin:
        return Origin(f"accelerate launch: {variables.get(path, path[-1])}", 0)

    return _Reader(values, origin).read(strategy_from_kind=False)


class _Reader:
    def __init__(self, values: Settings, origin: Callable[[Path], Origin]) -> None:
        self._values = {**values, "fsdp_config": _prefixed(values.get("fsdp_config"))}
        if "fsdp_config" not in values:
            del self._values["fsdp_config"]
        self._origin = origin
        self._result = AccelerateSettings()
        self._xla = self._on_xla()

    def read(self, *, strategy_from_kind: bool = True) -> AccelerateSettings:
        kind = str(self._values.get("distributed_type", "NO")).upper()
        sections = {
            "fsdp_config": kind == "FSDP" or self._xla,
            "deepspeed_config": kind == "DEEPSPEED",
            "megatron_lm_config": False,  # Megatron-LM is refused as distributed_type
        }
        for key, value in self._values.items():
            if key not in sections:
                self._take((key,), value)
            elif value not in _EMPTY and not isinstance(value, dict):
                raise self._refuse((key,), f"must be a mapping, not {shown(value)}")
            elif sections[key]:
                for inner, item in (value or {}).items():
                    self._take((key, inner), item)
        if strategy_from_kind:
            self._default_strategy(kind)
        self._count_processes()
        return self._result

    def _default_strategy(self, kind: str) -> None:
        """Apply Accelerate's defaults if the file does not define the sharding."""
        path, result = ("distributed_type",), self._result
        if kind == "FSDP" and "strategy" not in result.values:
            self._put(path, "strategy", "full_shard")
        if kind == "DEEPSPEED" and "strategy" not in result.values and not self._deepspeed_file():
            self._put(path, "strategy", "zero2")
        says = self._values.get("fsdp_config") or any(key in self._values for key in _XLA)
        if self._xla and not says:
            self._note(path, "without fsdp_config Accelerate replicates the model; here it is sharded")

    def _on_xla(self) -> bool:
        sections = [self._values, self._values.get("fsdp_config")]
        kind = str(self._values.get("distributed_type", "")).upper()
        return kind in ("XLA", "TPU") or any(isinstance(s, dict) and s.get("xla") is True for s in sections)

    def _count_processes(self) -> None:
        if self._xla or "RANK" in os.environ:  # one process drives all devices, or a launcher sets the number
            return
        machines, processes = self._values.get("num_machines", 1), self._values.get("num_processes")
        if machines not in (None, 1):
            raise self._refuse(
                ("num_machines",),
                f"{shown(machines)} machines need accelerate launch or torchrun on each of them, which this "
                "process then joins; or set it to 1",
            )
        if processes is None and self._values.get("distributed_type") in ("NO", False):
            processes = 1
        if isinstance(processes, int) and processes > 0:
            self._result.processes = processes
        elif processes is not None and processes != -1:
            raise self._refuse(("num_processes",), f"must be an integer >= 1, not {shown(processes)}")

    def _take(self, path: Path, value: Any) -> None:
        key = ".".join(path)
        # The three keys for XLA are at the top level in some guides, and in FSDP's section in the Trainer's.
        handler = MAPPED.get(key) or (_XLA.get(path[-1]) if path[0] in ("fsdp_config", *_XLA) else None)
        if handler is not None:
            handler(self, path, value)
        elif path[0] in _FOR_TPUS and not self._xla:
            if _truth(value) not in (False, *_EMPTY):
                self._note(path, f"{shown(value)} has no effect: it is for TPUs")
        elif key in NOTED:
            silent, reason = NOTED[key]
            if _truth(value) not in silent:
                self._note(path, f"{shown(value)} has no effect: {reason}")
        elif key in ONLY:
            allowed, reason = ONLY[key]
            if _truth(value) not in allowed:
                raise self._refuse(path, f"{shown(value)} has no counterpart: {reason}")
        elif key not in FREE:
            around = f"{path[0]}." if len(path) > 1 else ""
            every = (*MAPPED, *ONLY, *NOTED, *FREE)
            known = [k.removeprefix(around) for k in every if k.startswith(around)]
            near = suggest.nearest(path[-1], known)
            raise self._refuse(
                path, "not a key of Accelerate's" + (f"; did you mean {near}?" if near else "")
            )

    def _put(self, path: Path, key: str, value: Any) -> None:
        self._result.values[key] = value
        self._result.origins[key] = self._origin(path)

    def _note(self, path: Path, message: str) -> None:
        self._result.notes.append(one_line(f"{self._origin(path).text}: {message}"))

    def _refuse(self, path: Path, message: str) -> UserError:
        return UserError(one_line(f"{self._origin(path).text}: {message}"))

    def _choose(self, path: Path, value: Any, choices: dict[Any, Any]) -> Any:
        """Map ``value``, ignoring case."""
        wanted = value.upper() if isinstance(value, str) else value
        if isinstance(wanted, list | dict) or wanted not in choices:
            allowed = ", ".join(str(choice) for choice in choices)
            raise self._refuse(path, f"{shown(value)} has no counterpart; use one of {allowed}")
        return choices[wanted]

    # -- the keys that become settings -------------------------------------------------------------------

    def distributed_type(self, path: Path, value: Any) -> None:
        kinds = {
            "NO": {"strategy": "no_shard"},
            False: {"strategy": "no_shard"},  # unquoted NO in YAML 1.1
            "MULTI_GPU": {"strategy": "no_shard", "backend": "cuda"},
            "MULTI_CPU": {"strategy": "no_shard", "backend": "cpu"},
            "FSDP": {},
            "DEEPSPEED": {},
            "XLA": {"backend": "xla"},
            "TPU": {"backend": "xla"},
        }
        for key, setting in self._choose(path, value, kinds).items():
            self._put(path, key, setting)

    def mixed_precision(self, path: Path, value: Any) -> None:
        choices = {"NO": "fp32", False: "fp32", "BF16": "bf16", "FP16": "fp16"}
        if value is not None:
            self._put(path, "precision", self._choose(path, value, choices))

    def use_cpu(self, path: Path, value: Any) -> None:
        if not self._flag(path, value):
            return
        if str(self._values.get("distributed_type", "")).upper() == "MULTI_GPU":
            self._note(path, "has no effect: with distributed_type MULTI_GPU Accelerate runs on GPUs")
        else:
            self._put(path, "backend", "cpu")

    def dynamo_backend(self, path: Path, value: Any) -> None:
        """The key of older files, at the top level."""
        if value is not None:
            off = str(value).upper() in ("NO", "FALSE")
            if not off and str(self._values.get("distributed_type", "")).upper() == "DEEPSPEED":
                self._note(path, "has no effect: Accelerate ignores it with DeepSpeed; set compile")
                return
            self._put(path, "compile", not off)
            if not off:
                self._put(path, "compile_backend", str(value).lower())

    def dynamo(self, path: Path, value: Any) -> None:
        for given, item in (value or {}).items():
            name, inner = "dynamo_" + given.removeprefix("dynamo_"), (*path, given)
            if name == "dynamo_backend":
                self.dynamo_backend(inner, item)
            elif name == "dynamo_mode":
                self._put(inner, "compile_mode", item or "default")
            elif _truth(item) not in ("default", False, None):
                self._note(inner, f"{shown(item)} has no effect: each layer is compiled separately")

    def downcast_bf16(self, path: Path, value: Any) -> None:
        if _truth(value) in (False, *_EMPTY):
            return
        if self._xla:
            raise self._refuse(path, "mixed_precision sets the compute dtype; set it to no")
        self._note(path, f"{shown(value)} has no effect: it is for TPUs")

    def gpus(self, path: Path, value: Any) -> None:
        if value in (*_EMPTY, "all"):
            return
        ids = ",".join(str(item) for item in value) if isinstance(value, list) else str(value)
        self._result.gpu_ids = ids.replace(" ", "")
        self._note(path, f"CUDA_VISIBLE_DEVICES is set to {self._result.gpu_ids}, unless it is set already")

    def old_fp16(self, path: Path, value: Any) -> None:
        """The key before mixed_precision."""
        if self._values.get("mixed_precision") is None:
            self._put(path, "precision", "fp16" if self._flag(path, value) else "fp32")

    def _is_ignored(self, path: Path) -> bool:
        """Whether this FSDP version ignores the key. Each version has its own key for the sharding."""
        version = str((self._values.get("fsdp_config") or {}).get("fsdp_version", 1))
        read = "fsdp_reshard_after_forward" if version == "2" else "fsdp_sharding_strategy"
        if self._xla or path[-1] == read:
            return False
        self._note(path, f"has no effect: with fsdp_version {version} Accelerate reads {read}")
        return True

    def sharding_strategy(self, path: Path, value: Any) -> None:
        if not self._is_ignored(path):
            self._shard(path, value)

    def _shard(self, path: Path, value: Any) -> None:
        choices: dict[Any, str] = {}
        for number, name in enumerate(STRATEGIES, 1):
            choices |= {number: name, str(number): name, name.upper(): name}
        self._put(path, "strategy", self._choose(path, value, choices))

    def reshard_after_forward(self, path: Path, value: Any) -> None:
        if self._is_ignored(path):
            return
        if _truth(value) in (True, False):
            self._put(path, "strategy", "full_shard" if _truth(value) else "shard_grad_op")
        else:
            self._shard(path, value)

    def auto_wrap_policy(self, path: Path, value: Any) -> None:
        words = ("transformer_based_wrap", "size_based_wrap", "no_wrap")
        policy = self._choose(path, value, {word.upper(): word for word in words})
        self._put(path, "xla.auto_wrap_policy" if self._xla else "fsdp.auto_wrap_policy", policy)

    def layer_classes(self, path: Path, value: Any) -> None:
        names = value if isinstance(value, list) else str(value or "").split(",")
        names = [str(name).strip() for name in names if str(name).strip()]
        # On XLA nothing is wrapped, and each layer is recomputed separately.
        if names and not self._xla:
            self._put(path, "fsdp.transformer_layer_cls_to_wrap", names)

    def min_num_params(self, path: Path, value: Any) -> None:
        policy = str((self._values.get("fsdp_config") or {}).get("fsdp_auto_wrap_policy", "")).upper()
        if policy == "SIZE_BASED_WRAP" and not self._xla:  # Accelerate also writes it for other policies
            self._put(path, "fsdp.min_num_params", _number(value))

    def prefetch(self, path: Path, value: Any) -> None:
        name = path[-1].removeprefix("fsdp_").removesuffix("_policy")
        if name == "forward_prefetch":
            value = self._flag(path, value)
        else:
            words = ("backward_pre", "backward_post", "no_prefetch")
            value = self._choose(path, value, {None: None, **{word.upper(): word for word in words}})
        # On XLA the compiler decides. False and null are no-ops.
        if value not in (None, False) and not self._xla:
            self._put(path, f"fsdp.{name}", value)

    def state_dict_type(self, path: Path, value: Any) -> None:
        # Checkpoints are always sharded. The export at the end is a full state dict.
        if self._choose(path, value, {"SHARDED_STATE_DICT": False, "FULL_STATE_DICT": True}):
            self._put(path, "checkpoint.export", True)

    def offload_params(self, path: Path, value: Any) -> None:
        self._put(path, "memory.offload_params", "cpu" if self._flag(path, value) else "none")

    def recompute(self, path: Path, value: Any) -> None:
        self._put(path, "memory.activation_checkpointing", "full" if self._flag(path, value) else "none")

    def xla(self, path: Path, value: Any) -> None:
        if self._flag(path, value):
            self._put(path, "backend", "xla")

    def xla_settings(self, path: Path, value: Any) -> None:
        if value in _EMPTY:
            return
        if not isinstance(value, dict):
            raise self._refuse(path, f"must be a mapping with names of xla_fsdp_settings, not {shown(value)}")
        for name, item in value.items():
            item = item.removeprefix("torch.") if isinstance(item, str) else item
            self._put((*path, name), f"xla.{name}", item)

    def xla_recompute(self, path: Path, value: Any) -> None:
        self._put(path, "xla.xla_fsdp_grad_ckpt", self._flag(path, value))

    def zero_stage(self, path: Path, value: Any) -> None:
        stages = {0: "no_shard", 1: "zero1", 2: "zero2", 3: "zero3"}
        self._put(
            path, "strategy", self._choose(path, value, stages | {str(n): s for n, s in stages.items()})
        )

    def accumulation(self, path: Path, value: Any) -> None:
        """Used as if it were in a DeepSpeed JSON, for which this section is a shorthand."""
        steps = int(value) if isinstance(value, str) and value.isdigit() else value
        if steps in (None, 1, "auto"):  # Accelerate's default in every file
            return
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            raise self._refuse(path, f"must be a positive whole number or auto, not {shown(value)}")
        if self._deepspeed_file():
            raise self._refuse(
                path, "Accelerate takes it from deepspeed_config_file; set it there, and remove it"
            )
        self._put(path, "deepspeed.config", {"gradient_accumulation_steps": steps})

    def gradient_clipping(self, path: Path, value: Any) -> None:
        if value not in (None, "auto"):
            self._put(path, "train.max_grad_norm", _number(value) or None)

    def zero_offload(self, path: Path, value: Any) -> None:
        key = {"offload_optimizer_device": "offload_optimizer", "offload_param_device": "offload_params"}
        choices = {None: "none", "NONE": "none", "CPU": "cpu", "NVME": "nvme"}
        device, stage = self._choose(path, value, choices), self._stage()
        if device != "none" and (stage == 0 or (stage < 3 and path[-1] == "offload_param_device")):
            self._note(path, f"{shown(value)} has no effect at zero_stage {stage}, as in DeepSpeed")
            return
        if device == "nvme" and stage < 3:
            self._note(path, f"{shown(value)} means cpu at zero_stage {stage}: only stage 3 supports nvme")
            device = "cpu"
        self._put(path, f"memory.{key[path[-1]]}", device)

    def _stage(self) -> int:
        """Accelerate's ZeRO stage; 3 if a DeepSpeed JSON decides, which is not read here."""
        stage = str((self._values.get("deepspeed_config") or {}).get("zero_stage", 2))
        return int(stage) if stage in "0123" and not self._deepspeed_file() else 3

    def _deepspeed_file(self) -> bool:
        file = (self._values.get("deepspeed_config") or {}).get("deepspeed_config_file")
        return file not in (*_EMPTY, "none")

    def nvme_path(self, path: Path, value: Any) -> None:
        if value in _EMPTY or str(value).lower() == "none":
            return
        device = self._values["deepspeed_config"].get(path[-1].replace("nvme_path", "device"))
        if self._stage() < 3 or str(device).lower() != "nvme":
            return
        if self._result.values.get("memory.nvme_path", value) != value:
            raise self._refuse(path, "differs from the other nvme_path; use one folder for both")
        self._put(path, "memory.nvme_path", value)

    def deepspeed_file(self, path: Path, value: Any) -> None:
        if not self._deepspeed_file():
            return
        if not pathlib.Path(os.path.expandvars(str(value))).expanduser().is_file():
            raise self._refuse(path, f"{value} does not exist; use the path of a DeepSpeed JSON")
        self._put(path, "deepspeed.config", value)

    def _flag(self, path: Path, value: Any) -> bool:
        flag = _truth(value)
        if not isinstance(flag, bool):
            raise self._refuse(path, f"must be true or false, not {shown(value)}")
        return flag


_XLA: dict[str, Callable[[_Reader, Path, Any], None]] = {
    "xla": _Reader.xla,
    "xla_fsdp_settings": _Reader.xla_settings,
    "xla_fsdp_grad_ckpt": _Reader.xla_recompute,
}
MAPPED: dict[str, Callable[[_Reader, Path, Any], None]] = {
    "distributed_type": _Reader.distributed_type,
    "mixed_precision": _Reader.mixed_precision,
    "use_cpu": _Reader.use_cpu,
    "fp16": _Reader.old_fp16,
    "downcast_bf16": _Reader.downcast_bf16,
    "gpu_ids": _Reader.gpus,
    "dynamo_backend": _Reader.dynamo_backend,
    "dynamo_config": _Reader.dynamo,
    "fsdp_config.fsdp_sharding_strategy": _Reader.sharding_strategy,
    "fsdp_config.fsdp_reshard_after_forward": _Reader.reshard_after_forward,
    "fsdp_config.fsdp_auto_wrap_policy": _Reader.auto_wrap_policy,
    "fsdp_config.fsdp_transformer_layer_cls_to_wrap": _Reader.layer_classes,
    "fsdp_config.fsdp_min_num_params": _Reader.min_num_params,
    "fsdp_config.fsdp_forward_prefetch": _Reader.prefetch,
    "fsdp_config.fsdp_backward_prefetch": _Reader.prefetch,
    "fsdp_config.fsdp_backward_prefetch_policy": _Reader.prefetch,
    "fsdp_config.fsdp_state_dict_type": _Reader.state_dict_type,
    "fsdp_config.fsdp_offload_params": _Reader.offload_params,
    "fsdp_config.fsdp_activation_checkpointing": _Reader.recompute,
    "deepspeed_config.zero_stage": _Reader.zero_stage,
    "deepspeed_config.gradient_accumulation_steps": _Reader.accumulation,
    "deepspeed_config.gradient_clipping": _Reader.gradient_clipping,
    "deepspeed_config.offload_optimizer_device": _Reader.zero_offload,
    "deepspeed_config.offload_param_device": _Reader.zero_offload,
    "deepspeed_config.offload_optimizer_nvme_path": _Reader.nvme_path,
    "deepspeed_config.offload_param_nvme_path": _Reader.nvme_path,
    "deepspeed_config.deepspeed_config_file": _Reader.deepspeed_file,
}


def _bare(name: str) -> str:
    return name.removeprefix("fsdp_")


def _prefixed(section: Any) -> Any:
    """Add the prefix ``fsdp_`` to keys without it, as Accelerate does."""
    if not isinstance(section, dict):
        return section
    return {
        key if key in _XLA or str(key).startswith("fsdp") else f"fsdp_{key}": value
        for key, value in section.items()
    }


def _number(value: Any) -> Any:
    """Parse a quoted number, as Accelerate does, which reads them from environment variables."""
    try:
        number = float(value) if isinstance(value, str) else value
    except ValueError:
        return value
    return int(value) if isinstance(value, str) and value.strip().isdigit() else number


def _truth(value: Any) -> Any:
    """Parse the booleans of YAML 1.1, which Accelerate's files use."""
    words = {"yes": True, "on": True, "true": True, "no": False, "off": False, "false": False}
    return words.get(value.lower(), value) if isinstance(value, str) else value
