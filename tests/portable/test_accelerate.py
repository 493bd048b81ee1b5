"""Settings from an ``accelerate config`` file and from the environment of ``accelerate launch``.

``test_published_accelerate`` compares the resulting settings with Accelerate itself. The installed Accelerate
creates the environments of these tests.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import ComputeEnvironment
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

from portable.command_line import Invocation, parse_train_args
from portable.config import RunConfig, load_config
from portable.errors import UserError
from portable.importing.programs import convert_accelerate_environment
from portable.run.rank import run_rank
from tests.ranks import free_port
from tests.runs import configured, flags, losses, tiny
from tests.zygote import Zygote

FSDP = "distributed_type: FSDP\nnum_processes: 2\nmixed_precision: bf16\nfsdp_config: {fsdp_version: 2}\n"
# From Hugging Face's guide for TPUs. It is not compared with Accelerate, because Accelerate's launcher
# rejects it.
XLA = """\
distributed_type: FSDP
num_processes: 2
fsdp_config:
  fsdp_backward_prefetch_policy: BACKWARD_PRE
  xla: True
  xla_fsdp_settings: {compute_dtype: torch.bfloat16, shard_param_on_dim_0: true}
  xla_fsdp_grad_ckpt: True
"""


def parsed(folder: Path, text: str, *arguments: str) -> Invocation:
    path = folder / "accelerate.yaml"
    path.write_text(text)
    return parse_train_args(["--accelerate-config", str(path), *arguments])


def launched(words: str = "") -> dict[str, str]:
    """Return the environment that the installed Accelerate gives the ranks of a launch with these flags."""
    given = launch_command_parser().parse_args([*words.split(), "train.py"])
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
    return parse_train_args(list(arguments)).config


def test_accelerate_file_of_tpu_guide_is_converted(tmp_path: Path) -> None:
    invocation = parsed(tmp_path, XLA)
    run = invocation.config
    assert (run.backend, run.strategy, run.precision) == ("xla", "full_shard", "bf16")
    assert (run.xla.shard_param_on_dim_0, run.memory.activation_checkpointing) == (True, "full")
    assert invocation.nproc is None and not any(value is not None for _, value in run.fsdp)


def test_accelerate_unknown_keys_that_are_off_have_no_effect(tmp_path: Path) -> None:
    off = "new_thing: false\nnew_name: ''\nnew_table: {}\nnone: null\n"
    run = parsed(
        tmp_path, f"{FSDP}{off}".replace("fsdp_version: 2", "fsdp_version: 2, fsdp_new_thing: false")
    )
    assert run.config == parsed(tmp_path, FSDP).config
    for line, hint in (
        ("new_thing: true\n", ".*; remove the key"),
        ("mixed_precisio: false\n", ".*; did you mean mixed_precision[?]"),
        ("deepspeed_confg: {zero_stage: 2}\n", ".*; did you mean deepspeed_config[?]"),
    ):
        with pytest.raises(UserError, match=f"unknown key of Accelerate{hint}$"):
            parsed(tmp_path, FSDP + line)


def test_accelerate_default_file_is_converted(tmp_path: Path) -> None:
    path = str(tmp_path / "default.yaml")
    ClusterConfig(ComputeEnvironment.LOCAL_MACHINE, "NO", "no", False, False).to_yaml_file(path)
    run = parsed(tmp_path, Path(path).read_text()).config
    assert (run.strategy, run.precision) == ("no_shard", "fp32")


def test_accelerate_file_is_merged_with_config_and_flags(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("strategy: full_shard\ntrain: {steps: 3}\n")
    both = ("--config", str(file))
    run = parsed(tmp_path, FSDP, *both).config
    assert (run.strategy, run.precision, run.train.steps) == ("full_shard", "bf16", 3)
    wins = parsed(tmp_path, FSDP, *both, "--nproc", "3", "--precision", "fp32")
    assert (wins.nproc, wins.config.precision) == (3, "fp32")
    file.write_text("precision: fp32\n")
    blamed = r"accelerate.yaml:3: mixed_precision sets precision to 'bf16', but .*:1"
    with pytest.raises(UserError, match=blamed):
        parsed(tmp_path, FSDP, *both)


# -- the launcher's environment ----------------------------------------------------------------------------


def test_accelerate_file_folder_for_swapping_gives_way_to_config(tmp_path: Path) -> None:
    text = (
        "distributed_type: DEEPSPEED\nnum_processes: 1\nmixed_precision: bf16\ndeepspeed_config:\n"
        "  {zero_stage: 3, offload_optimizer_device: nvme, offload_optimizer_nvme_path: /b}\n"
    )
    assert parsed(tmp_path, text).config.memory.nvme_path == "/b"
    (tmp_path / "run.yaml").write_text("memory: {nvme_path: /a}\n")
    own = parsed(tmp_path, text, "--config", str(tmp_path / "run.yaml")).config
    assert (own.memory.nvme_path, own.memory.offload_optimizer) == ("/a", "nvme")


@pytest.mark.parametrize("kind", ["--cpu", "--multi_gpu", "--use_fsdp", "--use_fsdp --fsdp_version 2"])
def test_accelerate_environment_defaults_change_nothing(kind: str) -> None:
    found = convert_accelerate_environment(launched(kind))
    assert not found.notes
    assert found.values == ({"backend": "cpu"} if kind == "--cpu" else {})


def test_accelerate_environment_reports_unsupported_variables() -> None:
    with pytest.raises(UserError, match=r"^accelerate launch: FSDP_NEW_THING: unknown key of Accelerate"):
        convert_accelerate_environment(launched("--use_fsdp") | {"FSDP_NEW_THING": "1"})
    (note,) = convert_accelerate_environment(launched("--use_fsdp --fsdp_use_orig_params false")).notes
    assert note.startswith("accelerate launch: FSDP_USE_ORIG_PARAMS: false has no")


def test_accelerate_environment_must_agree_with_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("strategy: shard_grad_op\nprecision: fp32\n")
    config = ("--config", str(file))
    assert config_of(monkeypatch, launched("--use_fsdp"), *config).strategy == "shard_grad_op"
    environment = launched("--mixed_precision bf16")
    blamed = r"ACCELERATE_MIXED_PRECISION sets precision to 'bf16', but .*run.yaml:2"
    with pytest.raises(UserError, match=blamed):
        config_of(monkeypatch, environment, *config)
    assert config_of(monkeypatch, environment, "--precision", "fp32").precision == "fp32"  # a flag wins
    assert load_config(file).precision == "fp32"  # only the command line listens to a launcher


def test_accelerate_launch_trains_on_two_ranks(tmp_path: Path, corpus: Path, zygote: Zygote) -> None:
    given = tiny(tmp_path / "run", corpus, train__steps=3, train__micro_batch_size=3)
    command = ["accelerate", "launch", "--num_processes", "2", "--main_process_port", "0"]
    command += ["--use_fsdp", "--fsdp_sharding_strategy", "SHARD_GRAD_OP", "--fsdp_offload_params", "true"]
    command += ["--fsdp_activation_checkpointing", "true", "--module", "portable.cli"]
    done = zygote.run(*command, *flags(given))
    assert done.returncode == 0, done.stderr
    assert "2 on cpu, shard_grad_op, fp32" in done.stderr
    resolved = load_config(tmp_path / "run" / "config.yaml").memory
    assert (resolved.offload_params, resolved.activation_checkpointing) == ("cpu", "full")
    assert run_rank("cpu", configured(tmp_path / "one", corpus, train__steps=3)) == 0
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
