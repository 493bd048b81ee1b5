"""The config: what is understood, from a file, flags or Python; what is refused and how; what a run is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from portable.checks import check
from portable.config import RunConfig, difference, dump_yaml, keys, load_config, parse_args
from portable.config.yaml_text import parse
from portable.errors import UserError
from portable.optim.schedule import build_schedule
from tests.runs import checked

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


# What is understood


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        (".5", 0.5),
        ("010", 10),
        ("0o17", 15),
        ("true", True),
        ("~", None),
        ("yes", "yes"),
        ("2020-01-01", "2020-01-01"),
        ("12:30:00", "12:30:00"),
        ("'8'", "8"),
        ("{0: a}", {"0": "a"}),
        ("!!str 8", "8"),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: Any) -> None:
    assert parse(text, "x").value == value
    assert type(parse(text, "x").value) is type(value)


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("train: {learning_rate: 3e-4}", "train.learning_rate", 3e-4),
        ("train: {learning_rate: 1}", "train.learning_rate", 1.0),
        ("train: {epochs: 2}", "train.steps", None),
        ("train: {warmup_steps: &n 7, eval_every: *n}", "train.eval_every", 7),
        ("data: {packing: off}", "data.packing", False),
        ("data: {text_field: on}", "data.text_field", "on"),
        ("log: {trackers: wandb}", "log.trackers", ("wandb",)),
        ("checkpoint: {async: false}", "checkpoint.async", False),
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


@pytest.mark.parametrize(
    ("argv", "key", "value"),
    [
        ("--train.steps 20", "train.steps", 20),
        ("--train.global-batch-size 16", "train.global_batch_size", 16),
        ("--output-dir 123", "output_dir", "123"),
        ("--output_dir null", "output_dir", "null"),
        ("--train.max_grad_norm null", "train.max_grad_norm", None),
        ("--train.micro_batch_size auto", "train.micro_batch_size", "auto"),
        ("--train.betas 0.8 0.9", "train.betas", (0.8, 0.9)),
        ("--train.betas=0.8,0.9", "train.betas", (0.8, 0.9)),
        ("--compile", "compile", True),
        ("--compile=no", "compile", False),
        ("--no-checkpoint.async", "checkpoint.async", False),
        ("--data.packing", "data.packing", True),
        ("--data.packing Documents", "data.packing", "documents"),
        ("--log.trackers tensorboard wandb", "log.trackers", ("tensorboard", "wandb")),
        ("--log.trackers []", "log.trackers", ()),
        ("--data.source a.txt b,c.txt", "data.source", ("a.txt", "b,c.txt")),
        ("--data.source null", "data.source", None),
        ("--deepspeed.config {a: {b: 1}}", "deepspeed.config", {"a": {"b": 1}}),
        (
            "--deepspeed.config.zero_optimization.stage 2",
            "deepspeed.config",
            {"zero_optimization": {"stage": 2}},
        ),
        ("--seed 1 --seed 2", "seed", 2),
        ("--adapter.layers 0,1", "adapter.layers", (0, 1)),
        ("--data.columns 1 2", "data.columns", ("1", "2")),
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


# What counts as set, and defaults that follow other settings


@pytest.mark.parametrize(("steps", "warmup"), [(5, 0), (25, 2), (100, 10), (200, 20), (5000, 20)])
def test_default_warmup_follows_steps(steps: int, warmup: int) -> None:
    assert checked({"train": {"steps": steps}}).train.warmup_steps == warmup
    by_epochs = checked({"train": {"epochs": 2}})  # which come to as many
    assert build_schedule(by_epochs.train, steps).warmup_steps == warmup


def test_replaced_checks_again_and_does_not_count_as_set() -> None:
    config = checked({"precision": "tf32"})
    on_gpu = config.replaced({"backend": "cuda"}).replaced({"train.micro_batch_size": 2})
    assert (on_gpu.backend, on_gpu.train.micro_batch_size) == ("cuda", 2)
    assert on_gpu.is_set("precision")
    assert not on_gpu.is_set("backend")
    assert config.backend == "auto"
    with pytest.raises(UserError, match="tf32"):
        check(config.replaced({"backend": "xla"}))
    assert RunConfig().replaced({"train.steps": 50}).train.warmup_steps == 5  # a default that follows


def test_one_file_may_hold_settings_for_every_backend() -> None:
    for backend in ("auto", "cpu", "cuda", "xla"):
        checked({"backend": backend, "xla": {"scan_layers": True}, "fsdp": {"forward_prefetch": True}})
    checked({"backend": "xla", "strategy": "full_shard", "deepspeed": {"config": "ds.json"}})  # ignored there


# What is refused


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("train", "steps", True),
        ("train", "steps", 8.0),
        ("train", "steps", 0),
        ("train", "learning_rate", float("nan")),
        ("train", "betas", [0.9, 1.0]),
        ("train", "schedule", "Cosine"),
        ("model", "config", {"model_type": "llama", "x": object()}),
    ],
)
def test_wrong_values_are_refused_by_name(section: str, name: str, value: Any, file: Path) -> None:
    assert refusal({section: {name: value}}, file).startswith(f"{section}.{name} ")


FLAGS_REFUSED: dict[str | bytes, str] = {
    "--train.step 3": "unknown flag --train.step; did you mean --train.steps?",
    "--steps 3": "unknown flag --steps; did you mean --train.steps?",
    "--dry-runn": "unknown flag --dry-runn; did you mean --dry-run?",
    "--qqqqqq 3": "unknown flag --qqqqqq; --help lists them",
    "--train.steps": "--train.steps needs a value: integer >= 1 or null",
    "--train.steps x": "--train.steps must be integer >= 1 or null, got 'x'",
    "--train.steps 1 2": "unexpected argument '2'",
    "--train.betas 0.9": "--train.betas must be two of: number >= 0 and < 1, got [0.9]",
    "--compile maybe": "--compile must be true | false, got 'maybe'",
    "--no-compile=true": "--no-compile takes no value",
    "--no-seed": "unknown flag --no-seed",
    "--xla.xla_fsdp_v2 true": "unknown flag --xla.xla_fsdp_v2; sharding is always by SPMD; remove it",
    "--log.trackers wandb,wandb": "--log.trackers: wandb is named 2 times",
    "--model.config {hidden_size:": "--model.config:1: not valid YAML: ",
    "--train 3": "--train is a section; set a key in it, such as --train.steps",
    "--deepspeed.config a.json --deepspeed.config.x 1": "--deepspeed.config.x: ",
    "--nproc 0": "--nproc must be integer >= 1 and <= 100000000, got 0",
    "--config /nowhere.yaml": "/nowhere.yaml: cannot read the config",
    "run.yaml": "unexpected argument 'run.yaml'; use --config for a config file",
    "-x": "unknown flag -x; flags have two dashes",
    "--help train.stepz": "--help: no setting named 'train.stepz'; did you mean train.steps?",
    "--accelerate-config a.yaml --accelerate-config=b.yaml": "--accelerate-config is given twice, as a",
}
FILES_REFUSED: list[tuple[str | bytes, str]] = [
    ("seed: 1\ntrain:\n  learning_rat: 1", "run.yaml:3: unknown key train.learning_rat; did you mean train"),
    ("lerning_rate: 1", "run.yaml:1: unknown key lerning_rate; did you mean train.learning_rate?"),
    ("log: {qqqq: 1}", "run.yaml:1: unknown key log.qqqq; log takes every_steps, hang_timeout, "),
    ("data:\n  source: 12", "run.yaml:2: data.source must be text (not empty) or list of: text (not empty)"),
    ("train.steps: 3", "run.yaml:1: unknown key 'train.steps'; dots are for flags, in a file write train"),
    ('train: {steps: "3"}', "run.yaml:1: train.steps must be integer >= 1 or null, got '3'; leave out its"),
    ("xla: {xla_fsdp_v2: true}", "run.yaml:1: unknown key xla.xla_fsdp_v2; sharding is always by SPMD"),
    ("train: 3", "run.yaml:1: train must be a mapping of steps, epochs, "),
    ("train:\n  steps: 5\n  epochs: 1\n", "run.yaml:3: train.epochs 1 and train.steps 5 both "),
    ("seed: 1\nseed: 2", "run.yaml:2: duplicate key seed, first on line 1"),
    ("train: {steps: [}", "run.yaml:1: not valid YAML: "),
    ("\ttrain: 1", "run.yaml:1: not valid YAML: found character '\\t' that cannot start any token; indent"),
    ("", "run.yaml: the config is empty"),
    ("- 1", "run.yaml: a config must be a mapping"),
    ("seed: !!python/object:os.system x", "run.yaml:1: the tag tag:yaml.org,2002:python/object"),
    ("data: {source: !mine [a]}", "run.yaml:1: the tag !mine is not allowed"),
    ("? [a, b]\n: 1", "run.yaml:1: a key must be a word"),
    ("model: &a {config: {model_type: x, b: *a}}", "run.yaml:1: "),
    ('"\\e[31m": 1', "run.yaml:1: unknown key '\\x1b[31m'"),
    ("seed: " + "9" * 5000, "run.yaml:1: cannot read '99999"),
    ("[" * 5000, "run.yaml"),
    (b"\xff\xfe\x00", "run.yaml: not a config file: not UTF-8 text"),
    (b"# " + b"x" * (1 << 20), "run.yaml: not a config file: larger than a megabyte"),
]


@pytest.mark.parametrize(("given", "message"), [*FLAGS_REFUSED.items(), *FILES_REFUSED])
def test_refusals(given: str | bytes, message: str, file: Path) -> None:
    assert refusal(given, file).startswith(message)


CONFLICTS = {
    "train: {steps: 5, epochs: 1}": "train.steps train.epochs",
    "train: {steps: null}": "train.steps train.epochs",
    "train: {epochs: 2, eval_every: 10, eval_every_epochs: 0.5}": "train.eval_every train.eval_every_epochs",
    "train: {warmup_steps: 201}": "train.warmup_steps train.steps",
    "train: {stop_after: 201}": "train.stop_after train.steps",
    "train: {global_batch_size: 8, micro_batch_size: 3}": "train.global_batch_size train.micro_batch_size",
    "{backend: cpu, strategy: zero2, train: {optimizer: adafactor}}": "train.optimizer ZeRO",
    "model: {config: null}": "model.name_or_path model.config",
    "model: {config: {hidden_size: 8}}": "model.config.model_type",
    "model: {task: masked-lm}\ndata: {packing: documents}": "data.packing model.task",
    "data: {tokenizer: gpt2, vocab_size: 500}": "data.vocab_size data.tokenizer",
    "{backend: cpu, precision: fp16, strategy: zero2}": "precision backend",
    "{backend: xla, precision: tf32}": "precision backend",
    "{backend: xla, strategy: zero1}": "strategy backend",
    "{backend: xla, model: {attention: flash_attention_2}}": "model.attention backend",
    "{precision: fp32, model: {attention: flash_attention_2}}": "model.attention precision",
    "{backend: cpu, model: {attention: flex_attention}}": "model.attention backend",
    "memory: {offload_optimizer: nvme}": "memory.offload_optimizer memory.nvme_path",
    "memory: {nvme_path: /nvme}": "memory.nvme_path memory.offload_params",
    "{strategy: zero2, memory: {offload_params: cpu}}": "memory.offload_params strategy",
    "{strategy: zero1, memory: {offload_optimizer: nvme, nvme_path: /x}}": "memory.offload_optimizer zero3",
    "{strategy: full_shard, deepspeed: {config: ds.json}}": "deepspeed.config strategy",
    "{strategy: zero3, fsdp: {forward_prefetch: false}}": "fsdp.forward_prefetch strategy",
    "fsdp: {shard_group_size: 4}": "fsdp.shard_group_size hybrid_shard",
    "fsdp: {auto_wrap_policy: size_based_wrap}": "fsdp.min_num_params",
    "fsdp: {auto_wrap_policy: no_wrap, min_num_params: 9}": "fsdp.min_num_params",
    "{model: {task: masked-lm}, data: {source: x, format: messages}}": "data.format causal-lm",
    "data: {format: text, train_on: all}": "data.train_on conversations",
    "data: {roles_to_train: [user, gpt]}": "data.roles_to_train 'gpt'",
    "data: {format: text, truncation: drop}": "no|effect|with|data.packing",
    "{data: {stream: true, source: x.jsonl}, train: {epochs: 1}}": "train.epochs needs|the|length",
    "{data: {stream: true, source: x.jsonl}, model: {task: masked-lm}}": "causal-lm|alone",
    "data: {stream: true, source: x.jsonl, eval_fraction: 0.1}": "holds|nothing|out",
    "data: {stream: true, source: x.jsonl, max_samples: 5}": "max_samples|does|not|work",
    "data: {sources: [{name: a, source: x, stream: true}]}": "give|it|a|weight",
    "data: {sources: [{name: a/b, source: x}]}": "the|name|'a/b'",
    "data: {sources: [{name: a, source: x}, {name: a, source: y}]}": "two|sources|are|named|a",
    "data: {sources: [{name: a, source: x, weight: 1}, {name: b, source: y}]}": "and|b|has|none",
    "data: {sources: [{name: a, source: x, weight: 0}]}": "all|weights|are|0",
    "data: {sources: [{name: a, source: x, weight: 1, epochs: 1}]}": "has|a|weight|and|epochs",
    "data: {sources: [{name: a, weight: 1}]}": "names|no|data|of|its|own",
    "data: {sources: [{name: a, source: x}], weight_schedule: [{step: 5, weights: {b: 1}}]}": "no|source|b",
    "data: {sources: [{name: a, source: x}], weight_schedule: [{at: 5}]}": "data.weight_schedule.1 no|step",
    "{data: {source: x, text_pair_field: y}}": "data.text_pair_field model.task not|causal-lm",
    "{data: {source: x, source_prefix: y}, model: {task: masked-lm}}": "data.source_prefix model.task",
    "data: {eval: {sourc: x}}": "unknown|key|data.eval.sourc did|you|mean|source?",
    "data: {eval: {max_samples: 3}}": "data.eval names|no|data|of|its|own",
    "data: {eval: {a/b: {source: x}}}": "data.eval.a/b",
    "data: {eval: {a: {source: x, seq_len: 3}}}": "unknown|key|data.eval.a.seq_len",
    "data: {eval: {held_out: {source: x}}, eval_fraction: 0.1}": "data.eval.held_out data.eval_fraction",
    "{data: {eval_fraction: 0}, checkpoint: {keep_best: 1}}": "checkpoint.keep_best needs|an|evaluation",
    "checkpoint: {best_metric: eval_loss}": "checkpoint.best_metric has|no|effect",
    "train: {early_stopping_patience: 1, eval_every: null}": "train.early_stopping_patience train.eval_every",
    "checkpoint: {export_ema: true}": "checkpoint.export_ema train.ema",
    "hub: {repo: me/mine}": "hub.repo hub.push",
    "{hub: {push: end}, checkpoint: {export: false}}": "hub.push checkpoint.export",
    "train: {schedule_params: {warmup_type: log}}": "unknown|key|train.schedule_params.warmup_type",
    "train: {schedule: WarmupLR, schedule_params: {warmup_tpye: log}}": "did|you|mean|warmup_type",
    "{strategy: zero2, train: {schedule: OneCycle}}": "needs|train.schedule_params.cycle_min_lr",
    "{strategy: zero2, train: {schedule: LRRangeTest, warmup_steps: 5}}": "train.warmup_steps|5|has|no",
    "train: {schedule: wsd, schedule_params: {decay_type: sqrt}}": "decay_type 'linear'",
    "train: {schedule: warmuplr}": "did|you|mean|WarmupLR",
    "train: {warmup_ratio: 0.1, warmup_steps: 30}": "train.warmup_ratio train.warmup_steps both",
    "{strategy: zero2, train: {warmup_ratio: 0.1, schedule: LRRangeTest}}": "train.warmup_ratio|0.1|has|no",
}


@pytest.mark.parametrize("text", CONFLICTS)
def test_contradictions_name_the_keys(text: str, file: Path) -> None:
    told = refusal(text, file)
    for words in CONFLICTS[text].split():
        assert words.replace("|", " ") in told


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
    {"model": {"name_or_path": "null"}, "data": {"source": ["1e-3", "no", "a: b"], "text_field": "on"}},
    {"model": {"config": {"model_type": "t5", "x": {"y": [1, [2.5], "~"], "é": None}}}},
    {"deepspeed": {"config": "ds.json"}, "output_dir": "2020-01-01", "log": {"trackers": []}},
    {"memory": {"offload_params": "nvme", "nvme_path": "~"}, "train": {"max_grad_norm": None}},
    {"log": {"sample_prompt": "def f():\n\treturn '\u2603' # x \x1b"}, "seed": 2**32 - 1},
]


@pytest.mark.parametrize("values", VARIANTS)
def test_a_dump_reads_back(file: Path, values: dict[str, Any]) -> None:
    config = load_config(values)
    if config.deepspeed.config is not None:
        config = config.replaced({"strategy": "zero3"})
    assert loaded(file, dump_yaml(config)) == config


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


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as caught:
        parse_args(argv)
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    everything = printed(capsys, "--help", "all")
    assert all(f"--{key}" in everything for key in TABLE)
    section = printed(capsys, "--help", "train")
    assert "--train.steps" in section
    assert "--data.source" not in section
    assert printed(capsys, "--train.steps", "3", "-h", "--checkpoint.async").count("\n") < 8


# What a run is

FREE = {
    "backend": "cpu",
    "strategy": "no_shard",
    "output_dir": "elsewhere",
    "compile": True,
    "data.cache_dir": "/cache",
    "train.stop_after": 10,
    "train.micro_batch_size": 2,
    "memory.activation_checkpointing": "full",
}
BOUND = {
    "seed": 1,
    "precision": "bf16",
    "model.init": "scratch",
    "data.seq_len": 128,
    "data.eval_fraction": 0.5,
    "train.steps": 300,
    "train.global_batch_size": 16,
    "model.config.hidden_size": 64,
    "train.optimizer": "sgd",
    "train.betas": [0.9, 0.99],
    "train.learning_rate": 1e-3,
    "train.schedule": "linear",
    "train.warmup_steps": 5,
    "train.weight_decay": 0.0,
    "train.max_grad_norm": None,
}


@pytest.mark.parametrize(("key", "value"), (FREE | BOUND).items())
def test_what_defines_the_run_and_what_may_change_between_legs(key: str, value: Any) -> None:
    found = difference(RunConfig(), load_config(None, {key: value}))
    assert [line.partition(":")[0] for line in found] == [key] * (key in BOUND)


def test_difference_reads_fingerprints_back_from_json() -> None:
    stored = json.loads(json.dumps(RunConfig().fingerprint()))
    assert difference(stored, RunConfig()) == []
    del stored["train.min_learning_rate_ratio"]
    assert difference(stored, RunConfig()) == []
    stored["train.optimizer"] = "sgd"
    assert difference(stored, RunConfig()) == ["train.optimizer: 'sgd' and 'adamw'"]


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
QUIET = settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))


@QUIET
@given(
    content=st.binary(max_size=200)
    | st.text(alphabet="aεtrain:seed \n-[]{}?&*!|>'\"%@`#,0129.~\t\\x\x85\ufeff", max_size=60).map(str.encode)
)
def test_no_bytes_bring_a_traceback(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    try:
        config = load_config(file)
    except UserError as error:
        assert str(error).isprintable()
    else:
        assert load_config(config.model_dump(by_alias=True, exclude_unset=True)) == config


@QUIET
@given(key=st.sampled_from(sorted(keys.settings(RunConfig))), value=trees)
@example(key="train.schedule_params", value={"\x1b": None})
def test_no_value_of_any_setting_brings_a_traceback(key: str, value: Any) -> None:
    try:
        load_config(keys.nested({key: value}))
    except UserError as error:
        assert str(error).isprintable()


@settings(max_examples=100, deadline=None)
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
