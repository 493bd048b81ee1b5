"""What ``accelerate launch`` puts into the environment becomes settings, or is refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from accelerate.commands.launch import launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

from portable.config import load_config, parse_args
from portable.config.importing import read_environment
from portable.errors import UserError
from portable.reporting.metrics import read_metrics
from portable.run.rank import run_rank
from tests.ranks import free_port
from tests.runs import configured, flags, tiny

if TYPE_CHECKING:
    from pathlib import Path

    from portable.config import RunConfig
    from tests.zygote import Zygote


def launched(*arguments: str) -> dict[str, str]:
    """The environment that the installed Accelerate gives the ranks of a launch with ``arguments``."""
    given = launch_command_parser().parse_args([*arguments, "train.py"])
    given.num_processes, given.num_machines, given.main_process_port = 1, 1, free_port()
    given.mixed_precision = given.mixed_precision or "no"
    given.dynamo_backend = given.dynamo_backend or "no"
    given.num_cpu_threads_per_process = 1
    given.use_cpu = given.cpu
    if given.use_fsdp or given.multi_gpu:
        environment: dict[str, str] = prepare_multi_gpu_env(given)
    else:
        _, environment = prepare_simple_launcher_cmd_env(given)
    return environment


def config_of(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], *arguments: str) -> RunConfig:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return parse_args(list(arguments)).config


@pytest.mark.parametrize(
    "kind", [("--cpu",), ("--multi_gpu",), ("--use_fsdp",), ("--use_fsdp", "--fsdp_version", "2")]
)
def test_what_was_not_asked_for_changes_nothing(kind: tuple[str, ...]) -> None:
    settings = read_environment(launched(*kind))
    assert settings is None or not settings.notes
    expected = {"backend": "cpu"} if kind == ("--cpu",) else {}
    assert (settings.values if settings else {}) == expected


def test_without_the_launcher_nothing_is_read() -> None:
    assert read_environment({"FSDP_OFFLOAD_PARAMS": "true", "ACCELERATE_USE_FSDP": "true"}) is None


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        ("--mixed_precision bf16", "precision", "bf16"),
        ("--dynamo_backend inductor", "compile", True),
        ("--dynamo_backend eager", "compile_backend", "eager"),
        ("--use_fsdp --fsdp_sharding_strategy SHARD_GRAD_OP", "strategy", "shard_grad_op"),
        ("--use_fsdp --fsdp_sharding_strategy 4", "strategy", "hybrid_shard"),
        ("--use_fsdp --fsdp_version 2 --fsdp_reshard_after_forward false", "strategy", "shard_grad_op"),
        ("--use_fsdp --fsdp_offload_params true", "memory.offload_params", "cpu"),
        ("--use_fsdp --fsdp_activation_checkpointing true", "memory.activation_checkpointing", "full"),
        ("--use_fsdp --fsdp_forward_prefetch true", "fsdp.forward_prefetch", True),
        ("--use_fsdp --fsdp_backward_prefetch BACKWARD_PRE", "fsdp.backward_prefetch", "backward_pre"),
        (
            "--use_fsdp --fsdp_auto_wrap_policy SIZE_BASED_WRAP --fsdp_min_num_params 9",
            "fsdp.min_num_params",
            9,
        ),
        (
            "--use_fsdp --fsdp_transformer_layer_cls_to_wrap LlamaDecoderLayer",
            "fsdp.transformer_layer_cls_to_wrap",
            ("LlamaDecoderLayer",),
        ),
        ("--use_fsdp --fsdp_state_dict_type FULL_STATE_DICT", "checkpoint.export", True),
    ],
)
def test_each_setting(arguments: str, key: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert config_of(monkeypatch, launched(*arguments.split())).get(key) == value


@pytest.mark.parametrize(
    ("environment", "key", "value"),
    [
        ({"ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}, "strategy", "zero2"),
        ({"ACCELERATE_DEEPSPEED_CONFIG_FILE": __file__}, "deepspeed.config", __file__),
        (
            {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"},
            "deepspeed.config",
            {"gradient_accumulation_steps": 4},
        ),
        ({"ACCELERATE_GRADIENT_CLIPPING": "0.5"}, "train.max_grad_norm", 0.5),
        (
            {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
            "memory.offload_optimizer",
            "cpu",
        ),
    ],
)
def test_deepspeed(
    environment: dict[str, str], key: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = {
        "ACCELERATE_MIXED_PRECISION": "no",
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_CONFIG_DS_FIELDS": "zero_stage",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true",
        "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
    }
    assert config_of(monkeypatch, {**launcher, **environment}).get(key) == value


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            launched("--use_fsdp", "--fsdp_activation_checkpointing_offload", "true"),
            "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD: 'true' has no counterpart: stored activations",
        ),
        (launched("--use_fsdp") | {"FSDP_NEW_THING": "1"}, "FSDP_NEW_THING: not a key of Accelerate's"),
        (
            launched() | {"ACCELERATE_USE_MEGATRON_LM": "true"},
            "ACCELERATE_USE_MEGATRON_LM: 'MEGATRON_LM' has",
        ),
        (
            launched() | {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_TP_SIZE": "2"},
            "PARALLELISM_CONFIG_TP_SIZE: 2 has no counterpart: tensor parallelism is not part of this",
        ),
    ],
)
def test_refused_by_name(environment: dict[str, str], message: str) -> None:
    with pytest.raises(UserError) as refused:
        read_environment(environment)
    line = str(refused.value)
    assert line.startswith(f"accelerate launch: {message}")
    assert "\n" not in line


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (launched("--debug"), "ACCELERATE_DEBUG_MODE: 'true' has no effect: collectives"),
        (launched("--enable_cpu_affinity"), "ACCELERATE_CPU_AFFINITY: 1 has no effect: ranks are not bound"),
        (
            launched("--dynamo_backend", "inductor", "--dynamo_use_dynamic"),
            "ACCELERATE_DYNAMO_USE_DYNAMIC: ",
        ),
        (launched("--use_fsdp", "--fsdp_use_orig_params", "false"), "FSDP_USE_ORIG_PARAMS: 'false' has no"),
    ],
)
def test_noted_by_name(environment: dict[str, str], message: str) -> None:
    settings = read_environment(environment)
    assert settings is not None
    assert [note for note in settings.notes if note.startswith(f"accelerate launch: {message}")]


def test_it_must_agree_with_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("strategy: shard_grad_op\nprecision: fp32\n")
    config = ("--config", str(file))
    assert config_of(monkeypatch, launched("--use_fsdp"), *config).strategy == "shard_grad_op"
    environment = launched("--mixed_precision", "bf16")
    with pytest.raises(
        UserError, match=r"ACCELERATE_MIXED_PRECISION sets precision to 'bf16', but .*run.yaml:2"
    ):
        config_of(monkeypatch, environment, *config)
    assert config_of(monkeypatch, environment, "--precision", "fp32").precision == "fp32"  # a flag wins
    assert load_config(file).precision == "fp32"  # only the command line listens to a launcher


def test_two_ranks_that_it_starts(tmp_path: Path, corpus: Path, zygote: Zygote) -> None:
    settings = tiny(tmp_path / "run", corpus, train__steps=3, train__micro_batch_size=3)
    command = ["accelerate", "launch", "--num_processes", "2", "--main_process_port", "0"]
    command += ["--use_fsdp", "--fsdp_sharding_strategy", "SHARD_GRAD_OP", "--fsdp_offload_params", "true"]
    command += ["--fsdp_activation_checkpointing", "true", "--module", "portable.cli"]
    done = zygote.run(*command, *flags(settings))
    assert done.returncode == 0, done.stderr
    assert "2 on cpu, shard_grad_op, fp32" in done.stderr
    resolved = load_config(tmp_path / "run" / "config.yaml")
    assert resolved.memory.offload_params == "cpu"
    assert resolved.memory.activation_checkpointing == "full"
    assert run_rank("cpu", configured(tmp_path / "one", corpus, train__steps=3)) == 0
    ours, one = (
        [row["loss"] for row in read_metrics(tmp_path / name) if "loss" in row] for name in ("run", "one")
    )
    assert ours == pytest.approx(one, rel=1e-5)
