"""Published Accelerate configs: the run has the settings that Accelerate's launcher and plugins derive."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from accelerate.utils.launch import (
    prepare_deepspeed_cmd_env,
    prepare_multi_gpu_env,
    prepare_simple_launcher_cmd_env,
)

from portable.command_line import Invocation, parse_train_args
from portable.config import RunConfig, keys
from portable.errors import UserError
from portable.importing.programs import convert_accelerate_environment
from tests.published import Shape, shapes

SHAPES = shapes("accelerate.json") + shapes("accelerate_keys.yaml")
PRECISIONS = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}


@pytest.fixture(autouse=True)
def beside_a_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')


def invoked(shape: Shape, folder: Path) -> Invocation:
    file = folder / "accelerate.yaml"
    file.write_text(yaml.safe_dump(shape.config, sort_keys=False))
    return parse_train_args(["--accelerate-config", str(file)])


def launched(folder: Path) -> tuple[Any, dict[str, str]]:
    """Return the arguments of ``accelerate launch`` for the file, and the environment of its ranks."""
    file, counted = str(folder / "accelerate.yaml"), []
    if yaml.safe_load((folder / "accelerate.yaml").read_text()).get("num_processes") in (None, -1):
        counted = ["--num_processes", "1"]  # required by the launcher
    given = launch_command_parser().parse_args(["--config_file", file, *counted, "train.py"])
    arguments, defaults, with_precision = _validate_launch_command(given)
    arguments.main_process_port = 0
    if arguments.use_deepspeed:
        named = [*defaults.deepspeed_config, *(["mixed_precision"] if with_precision else [])]
        arguments.deepspeed_fields_from_accelerate_config = ",".join(named)
        return arguments, prepare_deepspeed_cmd_env(arguments)[1]
    if arguments.use_fsdp or arguments.multi_gpu:
        return arguments, prepare_multi_gpu_env(arguments)
    return arguments, prepare_simple_launcher_cmd_env(arguments)[1]


def pairs(
    config: RunConfig, given: dict[str, Any], arguments: Any, environment: dict[str, str]
) -> Iterator[tuple[str, Any, Any]]:
    """Each setting, the run's value and Accelerate's."""
    sizes = (environment.get(f"PARALLELISM_CONFIG_{kind}_SIZE", "1") for kind in ("CP", "SP"))
    yield "context parallel", config.context_parallel_size, max(map(int, sizes))
    layers = int(environment.get("PARALLELISM_CONFIG_TP_SIZE", "1"))
    yield "tensor parallel", config.tensor_parallel_size, layers
    if config.precision != "auto":  # without the key, the run decides here, and the script there
        yield "precision", config.precision, PRECISIONS[environment["ACCELERATE_MIXED_PRECISION"]]
    # which Accelerate does not pass to DeepSpeed
    dynamo = environment.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    yield "compile", config.compile_backend if config.compile else "no", dynamo
    if arguments.use_deepspeed:
        yield from deepspeed(config)
    elif arguments.use_fsdp:
        yield from fsdp(config, given)
    elif not arguments.tpu:  # XLA's ranks share the batch, Accelerate's replicate it, as a note reports
        yield "strategy", config.strategy, "no_shard"


def fsdp(config: RunConfig, given: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    with pytest.MonkeyPatch.context() as patch:  # options of weight loading, which require a GPU
        patch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")
        patch.setenv("FSDP_SYNC_MODULE_STATES", "false")
        plugin = FullyShardedDataParallelPlugin()
    if plugin.fsdp_version == 2:
        yield "strategy", config.strategy, "full_shard" if plugin.reshard_after_forward else "shard_grad_op"
    else:
        names = {"_HYBRID_SHARD_ZERO2": "hybrid_shard_zero2"}
        name = plugin.sharding_strategy.name
        yield "strategy", config.strategy, names.get(name, name.lower())
        forward = config.fsdp.forward_prefetch or False
        yield "forward_prefetch", forward, plugin.forward_prefetch
        backward = plugin.backward_prefetch and plugin.backward_prefetch.name.lower()
        ours = config.fsdp.backward_prefetch
        if "fsdp_backward_prefetch_policy" not in given:  # its old name, which Accelerate ignores today
            yield "backward_prefetch", None if ours == "no_prefetch" else ours, backward
    offload = getattr(plugin.cpu_offload, "offload_params", plugin.cpu_offload)
    offload = bool(offload) and type(offload).__name__ != "OffloadPolicy"
    yield "offload", config.memory.offload_params == "cpu", offload
    recomputed = config.memory.activation_checkpointing != "none"
    yield "recompute", recomputed, plugin.activation_checkpointing
    policy = config.fsdp.auto_wrap_policy
    if policy == "transformer_based_wrap":
        theirs = tuple(name.strip() for name in plugin.transformer_cls_names_to_wrap or ())
        yield "classes", config.fsdp.transformer_layer_cls_to_wrap or (), theirs
    if policy == "size_based_wrap":
        yield "size", config.fsdp.min_num_params, plugin.min_num_params
    full = plugin.state_dict_type.name == "FULL_STATE_DICT"
    yield "state dict", not full or config.checkpoint.export, True


def deepspeed(config: RunConfig) -> Iterator[tuple[str, Any, Any]]:
    plugin = DeepSpeedPlugin()
    values = plugin.deepspeed_config
    if (
        plugin.hf_ds_config is not None
        and os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none") != "none"
    ):
        yield "file", config.deepspeed.config, os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"]
        return
    zero = values["zero_optimization"]
    stage = zero["stage"]
    yield "strategy", config.strategy, f"zero{stage}" if stage else "no_shard"
    optimizer, parameters = (str(zero[f"offload_{part}"]["device"]) for part in ("optimizer", "param"))
    yield "offload_optimizer", config.memory.offload_optimizer, optimizer if stage else "none"
    yield "offload_params", config.memory.offload_params, parameters if stage == 3 else "none"
    clipping = values.get("gradient_clipping", "auto")
    if clipping != "auto":
        yield "clipping", config.train.max_grad_norm, clipping
    given = config.deepspeed.config
    steps = given["gradient_accumulation_steps"] if isinstance(given, dict) else 1
    yield "accumulation", steps, max(1, int(str(values["gradient_accumulation_steps"]).replace("auto", "1")))


@pytest.mark.parametrize("shape", [s for s in SHAPES if not s.refused], ids=lambda shape: shape.name)
def test_published_accelerate_config_matches_accelerate(
    shape: Shape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    invocation = invoked(shape, tmp_path)
    with monkeypatch.context() as patch:
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        arguments, environment = launched(tmp_path)
        for name, value in environment.items():
            patch.setenv(name, value)
        given = shape.config.get("fsdp_config") or {}
        for name, ours, theirs in pairs(invocation.config, given, arguments, environment):
            assert (name, ours) == (name, theirs)
    assert {key: invocation.config.get(key) for key in shape.comes_to} == shape.comes_to
    by_launcher = convert_accelerate_environment(
        environment
    ).values  # of a rank that it starts, without the file
    assert by_launcher or not (arguments.use_deepspeed or given.get("fsdp_offload_params"))
    assert by_launcher == {key: keys.to_plain_value(invocation.config.get(key)) for key in by_launcher}
    assert invocation.gpu_ids == environment.get("CUDA_VISIBLE_DEVICES")
    if shape.config.get("num_processes", -1) != -1 and not arguments.tpu:
        assert invocation.nproc == arguments.num_processes
    assert len(invocation.notes) == len(shape.told), invocation.notes
    for words in shape.told:
        assert any(words in note for note in invocation.notes)


@pytest.mark.parametrize("shape", [s for s in SHAPES if s.refused], ids=lambda shape: shape.name)
def test_published_accelerate_config_is_rejected_with_reason(shape: Shape, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=shape.refused) as refused:
        invoked(shape, tmp_path)
    assert "\n" not in str(refused.value)
    assert shape.why
    if shape.why == "Accelerate":
        with pytest.raises(Exception):  # noqa: B017
            launched(tmp_path)
