"""Settings from an ``accelerate config`` file and from the environment of ``accelerate launch``.

Each key is mapped, noted or refused by name. What whole published files come to is held against Accelerate
itself in ``test_published_yaml``; the environments here are those that the installed Accelerate makes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.launch import launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

from portable.config import Invocation, RunConfig, load_config, parse_args
from portable.config.importing.importer import read_environment
from portable.errors import UserError
from portable.reporting.metrics import read_metrics
from portable.run.rank import run_rank
from tests.ranks import free_port
from tests.runs import configured, flags, tiny
from tests.zygote import Zygote

# Hugging Face's guide to FSDP has this file, with more that changes nothing.
GUIDE = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch_policy: BACKWARD_PRE
  fsdp_offload_params: true
  fsdp_sharding_strategy: 1
  fsdp_transformer_layer_cls_to_wrap: BertLayer
mixed_precision: bf16
num_processes: 2
tpu_env: []
"""
XLA = """\
xla: True
xla_fsdp_settings:
  compute_dtype: torch.bfloat16
  shard_param_on_dim_0: true
xla_fsdp_grad_ckpt: True
"""


def parsed(folder: Path, text: str, *arguments: str) -> Invocation:
    path = folder / "accelerate.yaml"
    path.write_text(text)
    return parse_args(["--accelerate-config", str(path), *arguments])


def settings(invocation: Invocation, keys: str) -> list[Any]:
    return [invocation.config.get(key) for key in keys.split()]


def launched(words: str = "") -> dict[str, str]:
    """The environment that the installed Accelerate gives the ranks of a launch with these flags."""
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
    return parse_args(list(arguments)).config


def test_the_guides_file(tmp_path: Path) -> None:
    invocation = parsed(tmp_path, GUIDE)
    keys = (
        "strategy precision memory.offload_params fsdp.backward_prefetch fsdp.transformer_layer_cls_to_wrap"
    )
    assert settings(invocation, keys) == ["full_shard", "bf16", "cpu", "backward_pre", ("BertLayer",)]
    assert invocation.nproc == 2


@pytest.mark.parametrize("inside", [True, False], ids=["in fsdp_config", "at the top"])
def test_the_guides_file_for_tpus(inside: bool, tmp_path: Path) -> None:
    text = GUIDE.replace("fsdp_offload_params: true", "fsdp_offload_params: false")
    lines = "".join(f"  {line}\n" for line in XLA.splitlines())
    text = text.replace("fsdp_config:\n", "fsdp_config:\n" + lines) if inside else text + XLA
    invocation = parsed(tmp_path, text)
    keys = "backend strategy precision xla.shard_param_on_dim_0 memory.activation_checkpointing"
    assert settings(invocation, keys) == ["xla", "full_shard", "bf16", True, "full"]
    assert invocation.nproc is None
    assert not any(value is not None for _, value in invocation.config.fsdp)


FSDP, ZERO = "distributed_type: FSDP\nfsdp_config: ", "distributed_type: DEEPSPEED\ndeepspeed_config: "
WRAP = "fsdp_auto_wrap_policy"
MAPPED: list[tuple[str, str, Any]] = [
    (f"{FSDP}{{fsdp_sharding_strategy: 4}}", "strategy", "hybrid_shard"),
    (f"{FSDP}{{fsdp_sharding_strategy: HYBRID_SHARD_ZERO2}}", "strategy", "hybrid_shard_zero2"),
    (f"{FSDP}{{fsdp_version: 2, fsdp_reshard_after_forward: false}}", "strategy", "shard_grad_op"),
    (f"{FSDP}{{reshard_after_forward: false, version: 2}}", "strategy", "shard_grad_op"),
    (f"{FSDP}{{fsdp_reshard_after_forward: false}}", "strategy", "full_shard"),
    (f"{FSDP}{{fsdp_version: 2, fsdp_sharding_strategy: SHARD_GRAD_OP}}", "strategy", "full_shard"),
    (f"{FSDP}{{fsdp_activation_checkpointing: true}}", "memory.activation_checkpointing", "full"),
    (f"{FSDP}{{fsdp_forward_prefetch: true}}", "fsdp.forward_prefetch", True),
    (f"{FSDP}{{fsdp_backward_prefetch: NO_PREFETCH}}", "fsdp.backward_prefetch", "no_prefetch"),
    (f"{FSDP}{{{WRAP}: NO_WRAP}}", "fsdp.auto_wrap_policy", "no_wrap"),
    (f"{FSDP}{{{WRAP}: SIZE_BASED_WRAP, fsdp_min_num_params: 9}}", "fsdp.min_num_params", 9),
    (f"{FSDP}{{{WRAP}: NO_WRAP, fsdp_min_num_params: 9}}", "fsdp.min_num_params", None),
    (f"{FSDP}{{fsdp_state_dict_type: FULL_STATE_DICT}}", "checkpoint.export", True),
    ("distributed_type: 'NO'", "strategy", "no_shard"),
    ("distributed_type: MULTI_GPU", "backend", "cuda"),
    (f"{ZERO}{{zero_stage: 3, offload_param_device: none}}", "strategy", "zero3"),
    (f"{ZERO}{{zero_stage: 3, offload_optimizer_device: cpu}}", "memory.offload_optimizer", "cpu"),
    (f"{ZERO}{{deepspeed_config_file: {__file__}}}", "deepspeed.config", __file__),
    (f"{ZERO}{{gradient_accumulation_steps: '8'}}", "deepspeed.config", {"gradient_accumulation_steps": 8}),
    (f"{ZERO}{{gradient_clipping: '0.5'}}", "train.max_grad_norm", 0.5),
    ("dynamo_backend: AOT_EAGER", "compile_backend", "aot_eager"),
    ("dynamo_backend: 'NO'", "compile", False),
    ("dynamo_config: {dynamo_mode: max-autotune}", "compile_mode", "max-autotune"),
    ("fp16: true", "precision", "fp16"),
    ("use_cpu: true", "backend", "cpu"),
    ("distributed_type: MULTI_GPU\nuse_cpu: true", "backend", "cuda"),
]


@pytest.mark.parametrize(("text", "key", "value"), MAPPED)
def test_each_key_of_the_file(text: str, key: str, value: Any, tmp_path: Path) -> None:
    assert parsed(tmp_path, text).config.get(key) == value


REFUSED = [
    ("distributed_type: MEGATRON_LM", "distributed_type MEGATRON_LM FSDP"),
    ("mixed_precision: fp8", "mixed_precision fp8 bf16"),
    ("num_machines: 2", "num_machines torchrun"),
    ("mixed_precison: bf16", "mixed_precison mixed_precision?"),
    ("compute_environment: AMAZON_SAGEMAKER", "compute_environment LOCAL_MACHINE"),
    ("distributed_type: XLA\ntpu_env: [A=1]", "tpu_env docs/tpu.md"),
    ("distributed_type: XLA\ndowncast_bf16: true", "downcast_bf16 mixed_precision"),
    (f"{FSDP}3", "fsdp_config mapping"),
    (f"{FSDP}{{fsdp_state_dict_type: LOCAL_STATE_DICT}}", "SHARDED_STATE"),
    *(
        (f"distributed_type: XLA\n{more}xla_fsdp_settings: {{{given}}}", told)
        for more, given, told in (
            ("", "flatten_parameters: true", ":2: flatten_parameters SPMD"),
            ("", "execute_sharding_on_init: false", "execute_sharding_on_init always sharded"),
            ("", "fp32_reduce_scatter: true", "fp32_reduce_scatter compute type"),
            ("mixed_precision: bf16\n", "compute_dtype: float32", "compute_dtype mixed_precision"),
        )
    ),
    ("distributed_type: XLA\nfsdp_config: {fsdp_auto_wrap_policy: NO_WRAP}", "nothing is wrapped"),
    (f"{ZERO}\n  deepspeed_config_file: none.json", ":3: deepspeed_config_file none.json does not exist"),
    (
        f"{ZERO}{{deepspeed_config_file: {__file__},\n  gradient_accumulation_steps: 4}}",
        ":3: gradient_accumulation_steps deepspeed_config_file",
    ),
    ("distributed_type: NO\nmixed_precision: fp8", ":2: mixed_precision fp8 one|of|no,|false,|bf16,|fp16"),
    (f"{FSDP}\n  fsdp_version: 3", ":3: fsdp_version one|of|1,|2"),
    ("- a list", "not an Accelerate config"),
]
NOTED = [
    ("gpu_ids: 0,1", ":1: gpu_ids CUDA_VISIBLE_DEVICES 0,1"),
    ("downcast_bf16: true", "downcast_bf16 for TPUs"),
    ("tpu_name: a", "tpu_name for TPUs"),
    ("debug: true", "debug no effect"),
    ("use_cpu: true\ndistributed_type: MULTI_GPU", ":1: use_cpu MULTI_GPU"),
    ("dynamo_config: {dynamo_use_dynamic: true}", "dynamo_use_dynamic no effect"),
    (f"{FSDP}\n  fsdp_use_orig_params: false", ":3: fsdp_use_orig_params FSDP2"),
    (f"{FSDP}\n  reshard_after_forward: false", ":3: fsdp_reshard_after_forward fsdp_sharding_strategy"),
    ("distributed_type: XLA", ":1: distributed_type replicates"),
    (f"{ZERO}{{zero_stage: 2, offload_param_device: cpu}}", "offload_param_device ZeRO stage 2"),
]


@pytest.mark.parametrize(
    ("text", "words", "refused"), [(*row, rows is REFUSED) for rows in (REFUSED, NOTED) for row in rows]
)
def test_the_rest_of_the_file_is_refused_or_noted(
    text: str, words: str, refused: bool, tmp_path: Path
) -> None:
    if refused:
        with pytest.raises(UserError) as caught:
            parsed(tmp_path, text)
        line = str(caught.value)
    else:
        (line,) = parsed(tmp_path, text).notes
    assert line.startswith(str(tmp_path / "accelerate.yaml")) and "\n" not in line
    assert all(word.replace("|", " ") in line for word in words.split())


def test_beside_a_config_and_flags(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("strategy: full_shard\ntrain: {steps: 3}\n")
    both = ("--config", str(config))
    invocation = parsed(tmp_path, GUIDE, *both)
    assert settings(invocation, "strategy precision train.steps") == ["full_shard", "bf16", 3]
    wins = parsed(tmp_path, GUIDE, *both, "--nproc", "3", "--precision", "fp32")
    assert (wins.nproc, wins.config.precision) == (3, "fp32")
    config.write_text("precision: fp32\n")
    blamed = r"accelerate.yaml:9: mixed_precision sets precision to 'bf16', but .*:1"
    with pytest.raises(UserError, match=blamed):
        parsed(tmp_path, GUIDE, *both)


# -- the launcher's environment ----------------------------------------------------------------------------

OFFLOADED = {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}
ACCUMULATED = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"}
BY_DEEPSPEED = {
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_CONFIG_DS_FIELDS": "zero_stage",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true",
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
}


@pytest.mark.parametrize("kind", ["--cpu", "--multi_gpu", "--use_fsdp", "--use_fsdp --fsdp_version 2"])
def test_what_was_not_asked_for_changes_nothing(kind: str) -> None:
    found = read_environment(launched(kind))
    assert not found.notes
    assert found.values == ({"backend": "cpu"} if kind == "--cpu" else {})


def test_variables_without_a_launch_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert parse_args([]).config == load_config()


@pytest.mark.parametrize(
    ("given", "key", "value"),
    [
        ("--use_fsdp --fsdp_sharding_strategy SHARD_GRAD_OP", "strategy", "shard_grad_op"),
        ({"ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}, "strategy", "zero2"),
        (ACCUMULATED, "deepspeed.config", {"gradient_accumulation_steps": 4}),
        ({"ACCELERATE_GRADIENT_CLIPPING": "0.5"}, "train.max_grad_norm", 0.5),
        (OFFLOADED, "memory.offload_optimizer", "cpu"),
    ],
)
def test_each_setting_of_the_launcher(
    given: Any, key: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = launched(given) if isinstance(given, str) else {**BY_DEEPSPEED, **given}
    assert config_of(monkeypatch, environment).get(key) == value


def test_the_rest_of_the_launcher_is_refused_or_noted() -> None:
    with pytest.raises(UserError, match=r"^accelerate launch: FSDP_NEW_THING: not a key of Accelerate's"):
        read_environment(launched("--use_fsdp") | {"FSDP_NEW_THING": "1"})
    (note,) = read_environment(launched("--use_fsdp --fsdp_use_orig_params false")).notes
    assert note.startswith("accelerate launch: FSDP_USE_ORIG_PARAMS: false has no")


def test_the_launcher_must_agree_with_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_two_ranks_that_it_starts(tmp_path: Path, corpus: Path, zygote: Zygote) -> None:
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
    rows = {name: read_metrics(tmp_path / name) for name in ("run", "one")}
    ours, one = ([row["loss"] for row in rows[name] if "loss" in row] for name in rows)
    assert ours == pytest.approx(one, rel=1e-5)
