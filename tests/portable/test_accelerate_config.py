"""Settings from an ``accelerate config`` file: mapped key by key, or refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from portable.config import parse_args
from portable.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    from portable.config import Invocation

# Hugging Face's guide to FSDP has this file.
GUIDE = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch_policy: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: false
  fsdp_offload_params: true
  fsdp_sharding_strategy: 1
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: BertLayer
  fsdp_use_orig_params: true
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
XLA = """\
xla: True
xla_fsdp_settings:
  compute_dtype: torch.bfloat16
  shard_param_on_dim_0: true
xla_fsdp_grad_ckpt: True
"""
DEEPSPEED = """\
compute_environment: LOCAL_MACHINE
deepspeed_config:
  gradient_accumulation_steps: 1
  gradient_clipping: 0.5
  offload_optimizer_device: cpu
  offload_param_device: none
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: 3
distributed_type: DEEPSPEED
fsdp_config: {}
mixed_precision: bf16
num_processes: 4
"""


def parsed(folder: Path, text: str, *arguments: str) -> Invocation:
    path = folder / "accelerate.yaml"
    path.write_text(text)
    return parse_args(["--accelerate-config", str(path), *arguments])


def settings(invocation: Invocation, *keys: str) -> list[Any]:
    return [invocation.config.get(key) for key in keys]


def test_the_guides_file(tmp_path: Path) -> None:
    invocation = parsed(tmp_path, GUIDE)
    assert invocation.nproc == 2
    config = invocation.config
    assert (config.backend, config.strategy, config.precision) == ("auto", "full_shard", "bf16")
    assert config.memory.offload_params == "cpu"
    assert config.fsdp.auto_wrap_policy == "transformer_based_wrap"
    assert config.fsdp.transformer_layer_cls_to_wrap == ("BertLayer",)
    assert config.fsdp.backward_prefetch == "backward_pre"
    assert config.fsdp.forward_prefetch is None


@pytest.mark.parametrize("inside", [True, False], ids=["in fsdp_config", "at the top"])
def test_the_guides_file_for_tpus(inside: bool, tmp_path: Path) -> None:
    text = GUIDE.replace("fsdp_offload_params: true", "fsdp_offload_params: false")
    if inside:
        lines = "".join(f"  {line}\n" for line in XLA.splitlines())
        text = text.replace("fsdp_config:\n", "fsdp_config:\n" + lines)
    else:
        text += XLA
    invocation = parsed(tmp_path, text)
    config = invocation.config
    assert invocation.nproc is None
    assert (config.backend, config.strategy) == ("xla", "full_shard")
    assert config.xla.compute_dtype == "bfloat16"
    assert config.xla.shard_param_on_dim_0 is True
    assert config.xla.xla_fsdp_grad_ckpt is True
    assert config.xla.auto_wrap_policy == "transformer_based_wrap"
    assert not any(value is not None for _, value in config.fsdp)


def test_deepspeed(tmp_path: Path) -> None:
    invocation = parsed(tmp_path, DEEPSPEED)
    keys = (
        "strategy",
        "precision",
        "train.max_grad_norm",
        "memory.offload_optimizer",
        "memory.offload_params",
    )
    assert settings(invocation, *keys) == ["zero3", "bf16", 0.5, "cpu", "none"]
    assert invocation.nproc == 4
    file = tmp_path / "ds.json"
    file.touch()
    text = f"distributed_type: DEEPSPEED\ndeepspeed_config: {{deepspeed_config_file: {file}}}\n"
    assert parsed(tmp_path, text).config.deepspeed.config == str(file)


@pytest.mark.parametrize(
    ("lines", "key", "value"),
    [
        *(
            (f"fsdp_sharding_strategy: {word}", "strategy", strategy)
            for number, strategy in enumerate(
                ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2"), 1
            )
            for word in (number, strategy.upper())
        ),
        ("{fsdp_version: 2, fsdp_reshard_after_forward: false}", "strategy", "shard_grad_op"),
        ("{reshard_after_forward: false, version: 2}", "strategy", "shard_grad_op"),
        ("fsdp_reshard_after_forward: false", "strategy", "full_shard"),
        ("{fsdp_version: 2, fsdp_sharding_strategy: SHARD_GRAD_OP}", "strategy", "full_shard"),
        ("fsdp_activation_checkpointing: true", "memory.activation_checkpointing", "full"),
        ("fsdp_forward_prefetch: true", "fsdp.forward_prefetch", True),
        ("fsdp_backward_prefetch: NO_PREFETCH", "fsdp.backward_prefetch", "no_prefetch"),
        ("fsdp_auto_wrap_policy: NO_WRAP", "fsdp.auto_wrap_policy", "no_wrap"),
        ("{fsdp_auto_wrap_policy: SIZE_BASED_WRAP, fsdp_min_num_params: 9}", "fsdp.min_num_params", 9),
        ("{fsdp_auto_wrap_policy: SIZE_BASED_WRAP, fsdp_min_num_params: '9'}", "fsdp.min_num_params", 9),
        ("{fsdp_auto_wrap_policy: NO_WRAP, fsdp_min_num_params: 9}", "fsdp.min_num_params", None),
        (
            "fsdp_transformer_layer_cls_to_wrap: A, B",
            "fsdp.transformer_layer_cls_to_wrap",
            ("A", "B"),
        ),
        ("fsdp_state_dict_type: FULL_STATE_DICT", "checkpoint.export", True),
    ],
)
def test_each_key_of_fsdp(lines: str, key: str, value: Any, tmp_path: Path) -> None:
    section = lines if lines.startswith("{") else f"{{{lines!s}}}"
    if "A, B" in lines:
        section = "{fsdp_transformer_layer_cls_to_wrap: 'A, B'}"
    assert parsed(tmp_path, f"distributed_type: FSDP\nfsdp_config: {section}\n").config.get(key) == value


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("distributed_type: 'NO'", "strategy", "no_shard"),
        ("distributed_type: MULTI_GPU", "backend", "cuda"),
        ("distributed_type: MULTI_CPU", "backend", "cpu"),
        ("distributed_type: FSDP", "strategy", "full_shard"),
        ("distributed_type: DEEPSPEED", "strategy", "zero2"),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config: {gradient_accumulation_steps: '8'}",
            "deepspeed.config",
            {"gradient_accumulation_steps": 8},
        ),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config: {gradient_clipping: '0.5'}",
            "train.max_grad_norm",
            0.5,
        ),
        ("dynamo_backend: AOT_EAGER", "compile_backend", "aot_eager"),
        ("dynamo_backend: 'NO'", "compile", False),
        ("dynamo_config: {backend: INDUCTOR}", "compile", True),
        ("fp16: true", "precision", "fp16"),
        ("mixed_precision: null", "precision", "auto"),
        ("mixed_precision: 'no'", "precision", "fp32"),
        ("use_cpu: true", "backend", "cpu"),
        ("use_cpu: true\ndistributed_type: MULTI_GPU", "backend", "cuda"),
        ("distributed_type: MULTI_GPU\nuse_cpu: true", "backend", "cuda"),
        ("dynamo_config: {dynamo_backend: INDUCTOR, dynamo_mode: default}", "compile", True),
        ("dynamo_config: {dynamo_backend: AOT_EAGER}", "compile_backend", "aot_eager"),
        (
            "dynamo_config: {dynamo_backend: INDUCTOR, dynamo_mode: max-autotune}",
            "compile_mode",
            "max-autotune",
        ),
    ],
)
def test_each_key_at_the_top(text: str, key: str, value: Any, tmp_path: Path) -> None:
    assert parsed(tmp_path, text).config.get(key) == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("distributed_type: MEGATRON_LM", ["distributed_type", "MEGATRON_LM", "FSDP"]),
        ("mixed_precision: fp8", ["mixed_precision", "fp8", "BF16"]),
        ("num_machines: 2", ["num_machines", "torchrun"]),
        ("num_processes: many", ["num_processes", "many"]),
        ("mixed_precison: bf16", ["mixed_precison", "did you mean mixed_precision?"]),
        ("compute_environment: AMAZON_SAGEMAKER", ["compute_environment", "LOCAL_MACHINE"]),
        ("distributed_type: XLA\ntpu_env: [A=1]", ["tpu_env", "docs/tpu.md"]),
        ("distributed_type: XLA\ndowncast_bf16: true", ["downcast_bf16", "mixed_precision"]),
        ("dynamo_config: {dynamo_mode: fastest}", ["dynamo_mode", "max-autotune"]),
        ("distributed_type: FSDP\nfsdp_config: 3", ["fsdp_config", "mapping"]),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: 6}", ["fsdp_sharding_strategy", "6"]),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_state_dict_type: LOCAL_STATE_DICT}", ["SHARDED_STATE"]),
        ("xla: true\nxla_fsdp_settings: {compute_typ: float32}", ["xla.compute_typ", "xla.compute_dtype"]),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config: {gradient_accumulation_steps: many}",
            ["gradient_accumulation_steps", "whole number", "many"],
        ),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: none.json",
            [":3: deepspeed_config_file", "none.json does not exist"],
        ),
        (
            f"distributed_type: DEEPSPEED\ndeepspeed_config: {{deepspeed_config_file: {__file__},\n"
            "  gradient_accumulation_steps: 4}",
            [":3: gradient_accumulation_steps", "deepspeed_config_file"],
        ),
        ("- a list", ["not an Accelerate config"]),
    ],
)
def test_refused_by_name(text: str, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        parsed(tmp_path, text)
    line = str(refused.value)
    assert line.startswith(str(tmp_path / "accelerate.yaml"))
    assert "\n" not in line
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gpu_ids: 0,1", [":1: gpu_ids", "CUDA_VISIBLE_DEVICES is set to 0,1"]),
        ("downcast_bf16: true", ["downcast_bf16", "for TPUs"]),
        ("tpu_name: a", ["tpu_name", "for TPUs"]),
        ("debug: true", ["debug", "no effect"]),
        ("use_cpu: true\ndistributed_type: MULTI_GPU", [":1: use_cpu", "MULTI_GPU"]),
        ("dynamo_config: {dynamo_use_dynamic: true}", ["dynamo_use_dynamic", "no effect"]),
        (
            "distributed_type: FSDP\nfsdp_config:\n  fsdp_use_orig_params: false",
            [":3: fsdp_use_orig_params", "FSDP2"],
        ),
        (
            "distributed_type: FSDP\nfsdp_config:\n  reshard_after_forward: false",
            [":3: fsdp_reshard_after_forward", "fsdp_sharding_strategy"],
        ),
        ("distributed_type: XLA", [":1: distributed_type", "replicates"]),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 2, offload_param_device: cpu}",
            ["offload_param_device", "zero_stage 2"],
        ),
        (
            "distributed_type: DEEPSPEED\n"
            "deepspeed_config: {offload_optimizer_device: nvme, offload_optimizer_nvme_path: /disk}",
            ["offload_optimizer_device", "means cpu at zero_stage 2"],
        ),
    ],
)
def test_noted_by_name(text: str, words: list[str], tmp_path: Path) -> None:
    (note,) = parsed(tmp_path, text).notes
    assert note.startswith(str(tmp_path / "accelerate.yaml"))
    for word in words:
        assert word in note


def test_beside_a_config_and_flags(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("strategy: full_shard\ntrain: {steps: 3}\n")
    both = ("--config", str(config))
    invocation = parsed(tmp_path, GUIDE, *both)
    assert settings(invocation, "strategy", "precision", "train.steps") == ["full_shard", "bf16", 3]
    assert parsed(tmp_path, GUIDE, *both, "--nproc", "3", "--precision", "fp32").nproc == 3
    assert parsed(tmp_path, GUIDE, *both, "--precision", "fp32").config.precision == "fp32"
    config.write_text("precision: fp32\n")
    with pytest.raises(
        UserError, match=r"accelerate.yaml:18: mixed_precision sets precision to 'bf16', but .*:1"
    ):
        parsed(tmp_path, GUIDE, *both)


def test_joined_ranks_are_the_launchers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    assert parsed(tmp_path, GUIDE.replace("num_machines: 1", "num_machines: 2")).nproc is None
