"""The config: what is understood, from a file, flags or Python; what is refused and how; what a run is."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from portable.checks import check
from portable.config import RunConfig, difference, dump_yaml, keys, load_config, parse_args
from portable.config.yaml_text import parse, parse_value
from portable.errors import UserError
from portable.optim.schedule import build_schedule
from tests.runs import checked

if TYPE_CHECKING:
    from pathlib import Path

TABLE = keys.settings(RunConfig)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "run.yaml"


def loaded(path: Path, text: str) -> RunConfig:
    path.write_text(text, "utf-8")
    return load_config(path)


def refusal(given: str | bytes | dict[str, Any], file: Path) -> str:
    """The one line about flags, the text of a file, or values."""
    with pytest.raises(UserError) as caught:
        if isinstance(given, dict):
            checked(given)
        elif given in FLAGS_REFUSED:
            check(parse_args(str(given).split()).config)
        else:
            file.write_bytes(given if isinstance(given, bytes) else given.encode())
            checked(file)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(f"{file.parent}/", "")


@pytest.mark.parametrize("key", sorted(TABLE))
def test_every_setting_is_described(key: str) -> None:
    setting = TABLE[key]
    assert len(setting.description) > 20
    assert setting.description.endswith(".")
    assert setting.allowed


def test_defaults_are_valid_when_given_in_full_and_cannot_be_changed() -> None:
    spelled_out = keys.nested({key: keys.plain(setting.default) for key, setting in TABLE.items()})
    config = load_config(spelled_out)
    assert config == RunConfig()
    with pytest.raises(ValidationError):
        config.train.steps = 3


# What is understood


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1.0e-8", 1e-8),
        ("1E3", 1000.0),
        (".5", 0.5),
        ("-.inf", float("-inf")),
        ("010", 10),
        ("0x1F", 31),
        ("0o17", 15),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("yes", "yes"),
        ("on", "on"),
        ("none", "none"),
        ("2020-01-01", "2020-01-01"),
        ("12:30:00", "12:30:00"),
        ("1_000", "1_000"),
        ("'8'", "8"),
        ("[1, a]", [1, "a"]),
        ("{a: 1}", {"a": 1}),
        ("{0: a}", {"0": "a"}),
        ("!!str 8", "8"),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: Any) -> None:
    assert parse(text, "x").value == value
    assert type(parse(text, "x").value) is type(value)


def test_a_flag_value_that_is_not_yaml_is_text() -> None:
    assert parse_value("[a") == "[a"
    assert parse_value("@x") == "@x"


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("train: {learning_rate: 3e-4}", "train.learning_rate", 3e-4),
        ("train: {learning_rate: 1}", "train.learning_rate", 1.0),
        ("train: {epochs: 2}", "train.epochs", 2.0),
        ("train: {epochs: 2}", "train.steps", None),
        ("train: {warmup_steps: &n 7, eval_every: *n}", "train.eval_every", 7),
        ("compile: yes", "compile", True),
        ("compile: on", "compile", True),
        ("data: {packing: off}", "data.packing", False),
        ("data: {packing: no}", "data.packing", False),
        ("data: {text_field: on}", "data.text_field", "on"),
        ("log: {trackers: wandb}", "log.trackers", ("wandb",)),
        ("memory: {offload_params: none}", "memory.offload_params", "none"),
        ("checkpoint: {async: false}", "checkpoint.async", False),
        (
            "fsdp: {auto_wrap_policy: TRANSFORMER_BASED_WRAP}",
            "fsdp.auto_wrap_policy",
            "transformer_based_wrap",
        ),
        ("fsdp: {backward_prefetch: BACKWARD_PRE}", "fsdp.backward_prefetch", "backward_pre"),
        ("{model: {task: seq2seq-lm}, data: {source: pairs.jsonl}}", "data.packing", False),
        ("model: {name_or_path: gpt2}", "model.config", None),
        (
            "model: {config: {model_type: bert, hidden_size: 32, id2label: {0: no}}}",
            "model.config",
            {"model_type": "bert", "hidden_size": 32, "id2label": {"0": "no"}},
        ),
        ("\ufefftrain:\nfsdp: {}\n", "train.steps", 200),
    ],
)
def test_files(text: str, key: str, value: Any, file: Path) -> None:
    got = loaded(file, text).get(key)
    assert got == value
    assert type(got) is type(value)
    check(load_config(file))


def test_from_scratch() -> None:
    assert RunConfig().model.from_scratch
    assert not load_config({"model": {"name_or_path": "gpt2"}}).model.from_scratch
    assert load_config({"model": {"name_or_path": "gpt2", "init": "scratch"}}).model.from_scratch


def test_nothing_is_the_quickstart() -> None:
    invocation = parse_args([])
    assert invocation.config == RunConfig()
    assert (invocation.config_files, invocation.nproc, invocation.resume_info) == ((), None, None)
    assert not (invocation.dry_run or invocation.eval_only or invocation.profile)


@pytest.mark.parametrize(
    ("argv", "key", "value"),
    [
        ("--train.steps 20", "train.steps", 20),
        ("--train.steps=20", "train.steps", 20),
        ("--train.global-batch-size 16", "train.global_batch_size", 16),
        ("--output-dir 123", "output_dir", "123"),
        ("--output_dir null", "output_dir", "null"),
        ("--train.learning_rate 1e-4", "train.learning_rate", 1e-4),
        ("--train.learning_rate 1", "train.learning_rate", 1.0),
        ("--train.max_grad_norm null", "train.max_grad_norm", None),
        ("--train.max_grad_norm none", "train.max_grad_norm", None),
        ("--train.micro_batch_size auto", "train.micro_batch_size", "auto"),
        ("--train.micro_batch_size 2", "train.micro_batch_size", 2),
        ("--train.betas 0.8 0.9", "train.betas", (0.8, 0.9)),
        ("--train.betas [0.8,0.9]", "train.betas", (0.8, 0.9)),
        ("--train.betas=0.8,0.9", "train.betas", (0.8, 0.9)),
        ("--compile", "compile", True),
        ("--compile true", "compile", True),
        ("--compile=no", "compile", False),
        ("--no-compile", "compile", False),
        ("--checkpoint.async false", "checkpoint.async", False),
        ("--no-checkpoint.async", "checkpoint.async", False),
        ("--fsdp.forward-prefetch null", "fsdp.forward_prefetch", None),
        ("--data.packing", "data.packing", True),
        ("--data.packing off", "data.packing", False),
        ("--data.packing Documents", "data.packing", "documents"),
        ("--log.trackers tensorboard wandb", "log.trackers", ("tensorboard", "wandb")),
        ("--log.trackers wandb,trackio", "log.trackers", ("wandb", "trackio")),
        ("--log.trackers []", "log.trackers", ()),
        ("--data.source a.txt b,c.txt", "data.source", ("a.txt", "b,c.txt")),
        ("--data.source null", "data.source", None),
        ("--memory.offload_params none", "memory.offload_params", "none"),
        ("--model.name_or_path 1e3", "model.name_or_path", "1e3"),
        ("--deepspeed.config ds.json", "deepspeed.config", "ds.json"),
        ("--deepspeed.config {a: {b: 1}}", "deepspeed.config", {"a": {"b": 1}}),
        (
            "--deepspeed.config.zero_optimization.stage 2",
            "deepspeed.config",
            {"zero_optimization": {"stage": 2}},
        ),
        ("--backend cpu", "backend", "cpu"),
        ("--seed 1 --seed 2", "seed", 2),
        ("--adapter.layers 0 1", "adapter.layers", (0, 1)),
        ("--adapter.layers 0,1", "adapter.layers", (0, 1)),
        ("--data.columns 1 2", "data.columns", ("1", "2")),
        ("--train.dropout no", "train.dropout", False),
    ],
)
def test_flags(argv: str, key: str, value: Any) -> None:
    # The brace argument is one word to the shell.
    words = argv.split(" ", 1) if "{" in argv else argv.split()
    config = parse_args(words).config
    got = config.get(key)
    assert got == value
    assert type(got) is type(value)
    assert config.is_set(key)


@pytest.mark.parametrize("key", sorted(TABLE))
def test_every_setting_has_a_flag(key: str) -> None:
    """The default, written as a flag, gives the default."""
    setting = TABLE[key]
    text = "null" if setting.default is None else str(keys.plain(setting.default)).replace("'", "")
    text = text.replace("True", "true").replace("False", "false")
    if key == "model.config":
        assert parse_args([f"--{key}", text]).config == RunConfig()
    elif key not in ("train.steps", "model.name_or_path"):
        assert parse_args([f"--{key}", text]).config == RunConfig()
        # Null stands for the default of the warm-up, which follows from the steps.
        is_set = parse_args([f"--{key.replace('_', '-')}={text}"]).config.is_set(key)
        assert is_set or key == "train.warmup_steps"


def test_keys_inside_a_mapping_change_the_default() -> None:
    config = parse_args(["--model.config.hidden-size", "64", "--model.config.rope.factor", "2.0"]).config
    assert config.model.config == {
        **TABLE["model.config"].default,
        "hidden_size": 64,
        "rope": {"factor": 2.0},
    }
    assert RunConfig().model.config == TABLE["model.config"].default


def test_keys_inside_a_mapping_change_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model:\n  config: {model_type: bert, hidden_size: 32}\n")
    config = parse_args(["--config", str(file), "--model.config.hidden_size", "64"]).config
    assert config.model.config == {"model_type": "bert", "hidden_size": 64}


def test_a_mapping_and_then_a_key_in_it() -> None:
    argv = ["--model.config", "{model_type: gpt2, n_embd: 8}", "--model.config.n_layer", "2"]
    assert parse_args(argv).config.model.config == {"model_type": "gpt2", "n_embd": 8, "n_layer": 2}


def test_flags_win_over_the_file_and_both_count_as_set(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("seed: 1\ntrain: {steps: 50, eval_every: 5}\n")
    invocation = parse_args(["--config", str(file), "--train.steps", "60"])
    assert invocation.config_files == (file,)
    assert (invocation.config.train.steps, invocation.config.train.eval_every) == (60, 5)
    for key in ("seed", "train.steps", "train.eval_every"):
        assert invocation.config.is_set(key)
    assert not invocation.config.is_set("train.betas")


def test_options_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("mixed_precision: bf16\n")
    files = ["--accelerate_config", str(tmp_path / "a.yaml"), "--resume-info", "ckpt"]
    invocation = parse_args([*files, "--nproc", "4", "--dry-run", "--eval-only", "--profile"])
    assert invocation.config.precision == "bf16"
    assert invocation.nproc == 4
    assert invocation.dry_run
    assert invocation.eval_only
    assert invocation.profile
    assert invocation.resume_info == "ckpt"


# What counts as set, and defaults that follow other settings


def test_is_set() -> None:
    config = checked({"seed": 0, "train": {"epochs": 2}})
    assert config.is_set("seed")
    assert config.is_set("train")
    assert config.is_set("train.epochs")
    assert not config.is_set("train.steps")
    assert not config.is_set("data")
    with pytest.raises(KeyError):
        config.is_set("train.step")
    with pytest.raises(KeyError):
        config.get("nothing")


@pytest.mark.parametrize(("steps", "warmup"), [(5, 0), (25, 2), (100, 10), (200, 20), (5000, 20)])
def test_default_warmup_follows_steps(steps: int, warmup: int) -> None:
    assert checked({"train": {"steps": steps}}).train.warmup_steps == warmup
    by_epochs = checked({"train": {"epochs": 2}})  # which come to as many
    assert build_schedule(by_epochs.train, steps).warmup_steps == warmup


@pytest.mark.parametrize(("batch", "micro"), [(8, 4), (6, 3), (7, 1), (2, 2), (64, 4)])
def test_default_micro_batch_divides_the_global_batch(batch: int, micro: int) -> None:
    config = checked({"train": {"global_batch_size": batch}})
    assert config.train.micro_batch_size == micro
    assert not config.is_set("train.micro_batch_size")


def test_replaced_checks_again_and_does_not_count_as_set() -> None:
    config = checked({"precision": "tf32"})
    on_gpu = config.replaced({"backend": "cuda"}).replaced({"train.micro_batch_size": 2})
    assert (on_gpu.backend, on_gpu.train.micro_batch_size) == ("cuda", 2)
    assert on_gpu.is_set("precision")
    assert not on_gpu.is_set("backend")
    assert config.backend == "auto"
    with pytest.raises(UserError, match="tf32"):
        check(config.replaced({"backend": "xla"}))


def test_replaced_keeps_defaults_following() -> None:
    assert RunConfig().replaced({"train.steps": 50}).train.warmup_steps == 5


def test_one_file_may_hold_settings_for_every_backend() -> None:
    for backend in ("auto", "cpu", "cuda", "xla"):
        checked({"backend": backend, "xla": {"scan_layers": True}, "fsdp": {"forward_prefetch": True}})
    checked({"backend": "xla", "strategy": "full_shard", "deepspeed": {"config": "ds.json"}})  # ignored there


def test_a_default_strategy_yields_to_the_deepspeed_file() -> None:
    config = checked({"deepspeed": {"config": {"zero_optimization": {"stage": 2}}}})
    assert config.replaced({"strategy": "zero2"}).strategy == "zero2"


# What is refused


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("train", "steps", True),
        ("train", "steps", "8"),
        ("train", "steps", 8.0),
        ("train", "steps", 0),
        ("train", "learning_rate", "fast"),
        ("train", "learning_rate", True),
        ("train", "learning_rate", float("nan")),
        ("train", "learning_rate", float("inf")),
        ("train", "betas", [0.9]),
        ("train", "betas", [0.9, 1.0]),
        ("train", "betas", 0.9),
        ("train", "micro_batch_size", "largest"),
        ("train", "micro_batch_size", False),
        ("train", "schedule", "Cosine"),
        ("train", "min_learning_rate_ratio", 1.5),
        ("data", "source", 3),
        ("data", "source", []),
        ("data", "eval_fraction", 1.0),
        ("data", "eval_fraction", -0.1),
        ("data", "packing", 1),
        ("data", "seq_len", None),
        ("model", "config", "llama"),
        ("model", "config", {"model_type": "llama", "x": object()}),
        ("log", "trackers", ["tensorbord"]),
        ("checkpoint", "keep", 0),
        ("xla", "attention_rows", 0),
        ("xla", "buffer_dtype", "float16"),
    ],
)
def test_wrong_values_are_refused_by_name(section: str, name: str, value: Any, file: Path) -> None:
    assert refusal({section: {name: value}}, file).startswith(f"{section}.{name} ")


FLAGS_REFUSED: dict[str | bytes, str] = {
    "--train.step 3": "unknown flag --train.step; did you mean --train.steps?",
    "--steps 3": "unknown flag --steps; did you mean --train.steps?",
    "--lr 3": "unknown flag --lr; did you mean --train.learning_rate?",
    "--dry-runn": "unknown flag --dry-runn; did you mean --dry-run?",
    "--qqqqqq 3": "unknown flag --qqqqqq; --help lists them",
    "--train.steps": "--train.steps needs a value: integer >= 1 or null",
    "--train.steps --compile": "--train.steps needs a value",
    "--train.steps=": "--train.steps needs a value: integer >= 1 or null",
    "--train.max_grad_norm= --seed 3": "--train.max_grad_norm needs a value",
    "--model.config.vocab_size=": "--model.config.vocab_size needs a value",
    "--compile=": "--compile needs a value: true | false",
    "--train.steps x": "--train.steps must be integer >= 1 or null, got 'x'",
    "--train.steps 2.5": "--train.steps must be integer >= 1 or null, got 2.5",
    "--train.steps true": "--train.steps must be integer >= 1 or null, got true",
    "--train.steps 1 2": "unexpected argument '2'",
    "--train.betas 0.9": "--train.betas must be two of: number >= 0 and < 1, got [0.9]",
    "--train.betas": "--train.betas needs a value",
    "--compile maybe": "--compile must be true | false, got 'maybe'",
    "--no-compile=true": "--no-compile takes no value",
    "--no-seed": "unknown flag --no-seed",
    "--log.trackers tensorbord": "--log.trackers must be list of: tensorboard",
    "--log.trackers wandb,wandb": "--log.trackers: wandb is named 2 times",
    "--model.config {hidden_size:": "--model.config:1: not valid YAML: ",
    "--model.config.rope_scaling {factor:": "--model.config.rope_scaling:1: not valid YAML: ",
    "--train 3": "--train is a section; set a key in it, such as --train.steps",
    "--train.warmup_steps 300": "--train.warmup_steps 300 exceeds train.steps 200",
    "--deepspeed.config a.json --deepspeed.config.x 1": "--deepspeed.config.x: ",
    "--nproc 0": "--nproc must be integer >= 1, got '0'",
    "--nproc two": "--nproc must be integer >= 1, got 'two'",
    "--nproc": "--nproc needs a value: N",
    "--config": "--config needs a value: FILE",
    "--config /nowhere.yaml": "/nowhere.yaml: cannot read the config",
    "run.yaml": "unexpected argument 'run.yaml'; use --config for a config file",
    "-x": "unknown flag -x; flags have two dashes",
    "--": "unexpected argument '--'",
    "--help train.stepz": "--help: no setting named 'train.stepz'; did you mean train.steps?",
    "--strategy fullshard": "--strategy must be no_shard | full_shard",
    "--accelerate-config a.yaml --accelerate-config=b.yaml": (
        "--accelerate-config is given twice, as a.yaml and as b.yaml"
    ),
}
FILES_REFUSED: list[tuple[str | bytes, str]] = [
    (
        "seed: 1\ntrain:\n  learning_rat: 1",
        "run.yaml:3: unknown key train.learning_rat; did you mean train.learning_rate?",
    ),
    ("lerning_rate: 1", "run.yaml:1: unknown key lerning_rate; did you mean train.learning_rate?"),
    ("trian:\n  steps: 1", "run.yaml:1: unknown key trian; did you mean train?"),
    ("log: {qqqq: 1}", "run.yaml:1: unknown key log.qqqq; log takes every_steps, hang_timeout, "),
    ("train:\n  steps: '8'", "run.yaml:2: train.steps must be integer >= 1 or null, got '8'"),
    (
        "data:\n  source: 12",
        "run.yaml:2: data.source must be text (not empty) or list of: text (not empty) or null, got 12; ",
    ),
    ("strategy: fulshard", "run.yaml:1: strategy must be no_shard | full_shard"),
    (
        "train.steps: 3",
        "run.yaml:1: unknown key 'train.steps'; dots are for flags, in a file write train: {",
    ),
    ('"\\e.": 3', "run.yaml:1: unknown key '\\x1b.'; a key is one word"),
    (
        'train: {steps: "3"}',
        "run.yaml:1: train.steps must be integer >= 1 or null, got '3'; leave out its quotes",
    ),
    ("train: 3", "run.yaml:1: train must be a mapping of steps, epochs, "),
    ("train: [1]", "run.yaml:1: train must be a mapping of "),
    ("train:\n  steps: 5\n  epochs: 1\n", "run.yaml:3: train.steps 5 and train.epochs 1 both "),
    ("seed: 1\nseed: 2", "run.yaml:2: duplicate key seed, first on line 1"),
    ("train: {steps: 1,\n steps: 2}", "run.yaml:2: duplicate key train.steps, first on line 1"),
    ("train: {steps: [}", "run.yaml:1: not valid YAML: "),
    ("a: b: c", "run.yaml:1: not valid YAML: mapping values are not allowed here; check"),
    (
        "\ttrain: 1",
        "run.yaml:1: not valid YAML: found character '\\t' that cannot start any token; indent",
    ),
    ("train: *nowhere", "run.yaml:1: not valid YAML: found undefined alias"),
    ("", "run.yaml: the config is empty"),
    ("# only a comment", "run.yaml: the config is empty"),
    ("- 1", "run.yaml: a config must be a mapping"),
    ("just words", "run.yaml: a config must be a mapping"),
    ("seed: 1\n---\nseed: 2", "run.yaml:2: not valid YAML: but found another document"),
    ("seed: !!python/object:os.system x", "run.yaml:1: the tag tag:yaml.org,2002:python/object"),
    ("seed: !mine {a: 1}", "run.yaml:1: the tag !mine is not allowed"),
    ("seed: !mine [1]", "run.yaml:1: the tag !mine is not allowed"),
    ("seed: !!int abc", "run.yaml:1: cannot read 'abc' as int"),
    ("? [a, b]\n: 1", "run.yaml:1: a key must be a word"),
    ("model: &a {config: {model_type: x, b: *a}}", "run.yaml:1: "),
    ("'a\\nb': 1", "run.yaml:1: unknown key "),
    ('"\\e[31m": 1', "run.yaml:1: unknown key '\\x1b[31m'"),
    ("seed: " + "9" * 5000, "run.yaml:1: cannot read '99999"),
    ("seed: 0x" + "f" * 5000, "run.yaml:1: cannot read '0xfff"),
    ("[" * 5000, "run.yaml"),
    (b"\xff\xfe\x00", "run.yaml: not a config file: not UTF-8 text"),
    (b"\x00\x01", "run.yaml: not valid YAML: unacceptable character"),
    (b"# " + b"x" * (1 << 20), "run.yaml: not a config file: larger than a megabyte"),
    (
        "checkpoint: {async_: false}",
        "run.yaml:1: unknown key checkpoint.async_; did you mean checkpoint.async?",
    ),
    ("log:\n  every_steps: x\ntrain:\n  steps: x\nmodle: 1\n", "run.yaml:2: log.every_steps"),
]


@pytest.mark.parametrize(("given", "message"), [*FLAGS_REFUSED.items(), *FILES_REFUSED])
def test_refusals(given: str | bytes, message: str, file: Path) -> None:
    assert refusal(given, file).startswith(message)


@pytest.mark.parametrize(
    ("flags", "meant"),
    [("--strategy fullshard", "full_shard"), ("--log.trackers wandb tensorbord", "tensorboard")],
)
def test_choices_come_with_the_nearest(flags: str, meant: str) -> None:
    with pytest.raises(UserError, match=rf"did you mean {meant}\?$"):
        parse_args(flags.split())


CONFLICTS = {
    "train: {steps: 5, epochs: 1}": "train.steps train.epochs",
    "train: {steps: null}": "train.steps train.epochs",
    "train: {warmup_steps: 201}": "train.warmup_steps train.steps",
    "train: {stop_after: 201}": "train.stop_after train.steps",
    "train: {global_batch_size: 8, micro_batch_size: 3}": "train.global_batch_size train.micro_batch_size",
    "train: {micro_batch_size: 16}": "train.global_batch_size train.micro_batch_size",
    "strategy: zero2\ntrain: {optimizer: adafactor}": "train.optimizer strategy",
    "model: {name_or_path: gpt2, config: {model_type: gpt2}}": "model.name_or_path model.config",
    "model: {config: null}": "model.name_or_path model.config",
    "model: {config: {hidden_size: 8}}": "model.config.model_type",
    "model: {task: sequence-classification}\ndata: {source: p.jsonl, packing: true}": (
        "data.packing model.task"
    ),
    "model: {task: seq2seq-lm}\ndata: {source: p.jsonl, packing: true}": "data.packing model.task",
    "model: {task: seq2seq-lm}\ndata: {source: p.jsonl, packing: documents}": "data.packing model.task",
    "model: {task: masked-lm}\ndata: {packing: documents}": "data.packing model.task",
    "model: {task: seq2seq-lm}": "data.source model.task",
    "data: {tokenizer: gpt2, vocab_size: 500}": "data.vocab_size data.tokenizer",
    "{backend: cpu, precision: fp16, strategy: zero2}": "precision backend",
    "{backend: cpu, precision: tf32}": "precision backend",
    "{backend: xla, precision: tf32}": "precision backend",
    "{backend: xla, strategy: zero1}": "strategy backend",
    "{backend: xla, model: {attention: flash_attention_2}}": "model.attention backend",
    "{precision: fp32, model: {attention: flash_attention_2}}": "model.attention precision",
    "{precision: fp32, model: {attention: kernels-community/flash-attn3}}": "model.attention precision",
    "{backend: cpu, model: {attention: flex_attention}}": "model.attention backend",
    "{backend: cpu, model: {attention: 'org/kernel@v1:function'}}": "model.attention backend",
    "memory: {offload_optimizer: nvme}": "memory.offload_optimizer memory.nvme_path",
    "memory: {nvme_path: /nvme}": "memory.nvme_path memory.offload_params",
    "{strategy: zero2, memory: {offload_params: cpu}}": "memory.offload_params strategy",
    "{strategy: zero1, memory: {offload_optimizer: nvme, nvme_path: /x}}": "memory.offload_optimizer zero3",
    "{strategy: full_shard, deepspeed: {config: ds.json}}": "deepspeed.config strategy",
    "{strategy: zero3, fsdp: {forward_prefetch: false}}": "fsdp.forward_prefetch strategy",
    "fsdp: {shard_group_size: 4}": "fsdp.shard_group_size hybrid_shard",
    "fsdp: {auto_wrap_policy: size_based_wrap}": "fsdp.min_num_params",
    "fsdp: {auto_wrap_policy: no_wrap, min_num_params: 9}": "fsdp.min_num_params",
    "fsdp: {auto_wrap_policy: no_wrap, transformer_layer_cls_to_wrap: [A]}": "transformer_layer_cls_to_wrap",
}


@pytest.mark.parametrize("text", CONFLICTS)
def test_contradictions_name_the_keys(text: str, file: Path) -> None:
    told = refusal(text, file)
    for key in CONFLICTS[text].split():
        assert key in told


def test_aliases_cannot_unfold_without_end(file: Path) -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    assert "alias" in refusal("\n".join(lines), file)


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path, tmp_path / ("x" * 5000)):
        with pytest.raises(UserError, match="cannot read the config"):
            checked(path)
    with pytest.raises(UserError, match="cannot read the config"):
        checked("a\0b")


# Dumping

VARIANTS: list[dict[str, Any]] = [
    {},
    {"train": {"epochs": 1.5}},
    {"model": {"task": "seq2seq-lm"}, "data": {"source": "pairs.jsonl"}},
    {"train": {"steps": 7, "global_batch_size": 6}},
    {"model": {"name_or_path": "null"}, "data": {"source": ["1e-3", "no", "a: b"], "text_field": "on"}},
    {"model": {"config": {"model_type": "t5", "x": {"y": [1, [2.5], "~"], "é": None}}}},
    {"strategy": "zero3", "deepspeed": {"config": {"fp16": {"enabled": "auto"}, "big": 5e8}}},
    {"deepspeed": {"config": "ds.json"}, "output_dir": "2020-01-01", "log": {"trackers": []}},
    {"memory": {"offload_params": "nvme", "nvme_path": "~"}, "train": {"max_grad_norm": None}},
    {"log": {"sample_prompt": "def f():\n\treturn '\u2603' # x \x1b"}, "seed": 2**32 - 1},
]


@pytest.mark.parametrize("values", VARIANTS)
@pytest.mark.parametrize("comments", [True, False])
def test_a_dump_reads_back(file: Path, values: dict[str, Any], comments: bool) -> None:
    config = load_config(values)
    if config.deepspeed.config is not None:
        config = config.replaced({"strategy": "zero3"})
    text = dump_yaml(config, comments=comments)
    assert loaded(file, text) == config
    assert ("#" in text.replace("# x", "")) == comments


def test_a_dump_is_also_yaml_1_1() -> None:
    config = load_config({"data": {"text_field": "no", "source": "3e-4"}})
    tree = yaml.safe_load(dump_yaml(config))
    assert tree["data"]["text_field"] == "no"
    assert tree["data"]["source"] == "3e-4"
    assert tree["train"]["eps"] == 1e-8


# In Python, and help


def test_python_overrides() -> None:
    config = load_config({"seed": 3}, {"train.steps": 5, "data": {"seq_len": 32}, "model.config.n": 1})
    assert (config.seed, config.train.steps, config.data.seq_len) == (3, 5, 32)
    assert config.model.config is not None
    assert config.model.config["n"] == 1
    with pytest.raises(UserError, match=r"^train\.steps must be integer"):
        checked(None, {"train.steps": "5"})
    with pytest.raises(UserError, match=r"^unknown key train\.step; did you mean train\.steps\?"):
        checked(None, {"train.step": 5})
    with pytest.raises(UserError, match=r"^unknown key seed\.x"):
        checked({"seed": 1}, {"seed.x": 5})


def test_a_mapping_passed_in_is_left_alone() -> None:
    values: dict[str, Any] = {"model": {"config": {"model_type": "gpt2"}}}
    load_config(values, {"model.config.n_layer": 2})
    assert values == {"model": {"config": {"model_type": "gpt2"}}}


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as caught:
        parse_args(argv)
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_help_lists_everything(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--help", "all")
    for key, setting in TABLE.items():
        assert f"--{key}" in text
        assert setting.description.split()[0] in text
    for option in ("--config FILE", "--nproc N", "--dry-run", "--resume-info PATH", "--version"):
        assert option in text
    assert max(map(len, text.splitlines())) <= 110


@pytest.mark.parametrize("columns", [80, 100])
def test_help_fits_a_screen(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = printed(capsys, "--help").splitlines()
    assert len(lines) <= 40
    for section in keys.sections(RunConfig):
        assert any(line.startswith(f"  {section} ") for line in lines)
    everything = printed(capsys, "--help", "all")
    assert max(map(len, [*lines, *everything.splitlines()])) <= columns
    monkeypatch.setenv("COLUMNS", "110")
    assert everything.split() == printed(capsys, "--help", "all").split()  # no word is broken


def test_help_on_one_thing(capsys: pytest.CaptureFixture[str]) -> None:
    section = printed(capsys, "--help", "train")
    assert "--train.steps" in section
    assert "--data.source" not in section
    assert printed(capsys, "--train.steps", "3", "-h", "--checkpoint.async").count("\n") < 8


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "--version").startswith("portable-trainer ")


# What a run is

FREE = {
    "backend": "cpu",
    "strategy": "no_shard",
    "output_dir": "elsewhere",
    "compile": True,
    "model.attention": "eager",
    "data.num_workers": 3,
    "data.cache_dir": "/cache",
    "train.stop_after": 10,
    "train.micro_batch_size": 2,
    "train.eval_every": 7,
    "memory.activation_checkpointing": "full",
    "checkpoint.every_steps": 9,
    "log.every_steps": 1,
}
BOUND = {
    "seed": 1,
    "precision": "bf16",
    "model.init": "scratch",
    "data.seq_len": 128,
    "data.eval_fraction": 0.5,
    "train.steps": 300,
    "train.global_batch_size": 16,
    "train.optimizer": "sgd",
    "train.betas": [0.9, 0.99],
    "train.learning_rate": 1e-3,
    "train.schedule": "linear",
    "train.warmup_steps": 5,
    "train.weight_decay": 0.0,
    "train.max_grad_norm": None,
}


@pytest.mark.parametrize("key", sorted(FREE))
def test_what_may_change_between_legs(key: str) -> None:
    assert difference(RunConfig(), load_config(None, {key: FREE[key]})) == []


@pytest.mark.parametrize("key", sorted(BOUND))
def test_what_defines_the_run(key: str) -> None:
    (line,) = difference(RunConfig(), load_config(None, {key: BOUND[key]}))
    assert line.startswith(f"{key}: ")


def test_difference_looks_inside_the_model_config() -> None:
    other = load_config(None, ["--model.config.hidden_size", "64"])
    assert difference(RunConfig(), other) == ["model.config.hidden_size: 256 and 64"]


def test_difference_reads_fingerprints_back_from_json() -> None:
    stored = json.loads(json.dumps(RunConfig().fingerprint()))
    assert difference(stored, RunConfig()) == []
    del stored["train.min_learning_rate_ratio"]
    assert difference(stored, RunConfig()) == []
    stored["train.optimizer"] = "sgd"
    assert difference(stored, RunConfig()) == ["train.optimizer: 'sgd' and 'adamw'"]


def test_difference_of_named_and_built_models() -> None:
    lines = difference(RunConfig(), load_config({"model": {"name_or_path": "gpt2"}}))
    assert "model.name_or_path: not set and 'gpt2'" in lines
    assert "model.config.model_type: 'llama' and not set" in lines


def test_the_config_needs_no_framework() -> None:
    heavy = ("torch", "transformers", "numpy")
    code = f"import sys, portable.config; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("epochs", "steps"),
    [("train.eval_every_epochs", "train.eval_every"), ("checkpoint.every_epochs", "checkpoint.every_steps")],
)
def test_how_often_is_said_in_epochs_or_in_steps(epochs: str, steps: str) -> None:
    config = load_config(None, {epochs: 0.5})
    assert (config.get(epochs), config.get(steps)) == (0.5, None)
    assert load_config(config.model_dump(by_alias=True)) == config
    with pytest.raises(UserError, match=f"{epochs} 0.5 and {steps} 10 are both set"):
        checked(None, {epochs: 0.5, steps: 10})


# Nothing but a UserError, whatever the input

words = st.one_of(
    st.sampled_from([*keys.settings(RunConfig), *keys.sections(RunConfig)]).map(
        lambda key: key.split(".")[-1]
    ),
    st.text(max_size=8),
)
trees = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=4),
    max_leaves=12,
)
QUIET = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


def only_user_errors(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    try:
        config = load_config(path)
    except UserError as error:
        assert str(error).isprintable()
    else:
        assert load_config(config.model_dump(by_alias=True, exclude_unset=True)) == config


@QUIET
@given(
    content=st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "replace"))
)
def test_no_bytes_bring_a_traceback(file: Path, content: bytes) -> None:
    only_user_errors(file, content)


@QUIET
@given(text=st.text(alphabet="aεtrain:seed \n-[]{}?&*!|>'\"%@`#,0129.~\t\\x\x85\ufeff", max_size=60))
def test_no_yaml_brings_a_traceback(file: Path, text: str) -> None:
    only_user_errors(file, text.encode())


@QUIET
@given(tree=st.dictionaries(words, trees, max_size=4))
def test_no_values_bring_a_traceback(file: Path, tree: dict[str, Any]) -> None:
    only_user_errors(file, yaml.safe_dump(tree).encode())


@QUIET
@given(key=st.sampled_from(sorted(keys.settings(RunConfig))), value=trees)
@example(key="train.schedule_params", value={"\x1b": None})
def test_no_value_of_any_setting_brings_a_traceback(key: str, value: Any) -> None:
    try:
        load_config(keys.nested({key: value}))
    except UserError as error:
        assert str(error).isprintable()


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.sampled_from(sorted(TABLE)).map(lambda key: f"--{key}"),
            st.sampled_from(
                ["1", "true", "null", "[1", "{a: 1}", "a=b", "--", "--=", "--.", "--model.config."]
            ),
            st.text(max_size=6).filter(lambda text: "help" not in text and text != "-h"),
        ),
        max_size=5,
    )
)
def test_no_command_line_brings_a_traceback(argv: list[str]) -> None:
    try:
        parse_args(argv)
    except UserError as error:
        assert "\n" not in str(error)
