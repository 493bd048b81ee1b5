"""The config: values from a file, flags or Python, errors, and which settings identify a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import annotated_types
import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from portable.checks import check_config, iter_setting_problems
from portable.command_line import TrainOptions, parse_train_args
from portable.config import RunConfig, dump_yaml, find_changes, keys, load_config
from portable.config.changed_settings import ADJUSTABLE_SETTINGS
from portable.config.number_types import BoundsReason
from portable.config.sources import list_evaluation_source_names
from portable.config.yaml_text import parse_yaml
from portable.errors import UserError
from portable.optim.schedule import build_schedule
from tests.fuzz.configs import run_cases
from tests.runs import checked

TABLE = keys.get_setting_fields(RunConfig)
ROWS = yaml.safe_load(Path(__file__).with_name("config_rows.yaml").read_text("utf-8"))


def each(section: str, *names: str) -> pytest.MarkDecorator:
    """Parametrize by the rows of ``config_rows.yaml``."""
    return pytest.mark.parametrize(names, [[row[name] for name in names] for row in ROWS[section]])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "run.yaml"


def loaded(path: Path, text: str) -> RunConfig:
    path.write_text(text, "utf-8")
    return load_config(path)


def refusal(file: Path, call: Callable[[], Any]) -> str:
    """Return the one-line error about flags, a file, or values."""
    with pytest.raises(UserError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(f"{file.parent}/", "")


# Accepted values


@each("scalars", "text", "value")
def test_yaml_scalars_follow_version_1_2(text: str, value: Any) -> None:
    assert parse_yaml(text, "x").value == value
    assert type(parse_yaml(text, "x").value) is type(value)


@each("files", "text", "key", "value")
def test_config_file_sets_value(text: str, key: str, value: Any, file: Path) -> None:
    got = keys.to_plain_value(loaded(file, text).get(key))
    assert got == value
    assert type(got) is type(value)
    check_config(load_config(file))


@each("flags", "flags", "key", "value")
def test_flag_sets_value(flags: str, key: str, value: Any) -> None:
    # The brace argument is one word to the shell.
    config = parse_train_args(flags.split(" ", 1) if "{" in flags else flags.split()).config
    got = keys.to_plain_value(config.get(key))
    assert got == value
    assert type(got) is type(value)
    assert config.is_set(key)


@pytest.mark.parametrize("key", sorted(TABLE))
def test_every_setting_has_a_flag(key: str) -> None:
    """The default, written as a flag, gives the default."""
    default = RunConfig().get(key)
    text = "null" if default is None else str(keys.to_plain_value(default)).replace("'", "")
    text = text.replace("True", "true").replace("False", "false")
    if key == "model.config":
        assert parse_train_args([f"--{key}", text]).config == RunConfig()
    elif key not in ("train.steps", "model.name_or_path"):
        assert parse_train_args([f"--{key}", text]).config == RunConfig()
        assert parse_train_args([f"--{key.replace('_', '-')}={text}"]).config.is_set(key)


# Set keys, and defaults that follow other settings


@pytest.mark.parametrize(("steps", "warmup"), [(100, 1), (101, 2), (20_000, 200)])
def test_default_warmup_follows_steps(steps: int, warmup: int) -> None:
    for train in ({"steps": steps}, {"epochs": 2}, {"epochs": 2, "warmup_steps": None}):
        assert build_schedule(checked({"train": train}).train, steps).warmup_steps == warmup


FINETUNING = {"train.weight_decay": 0.0, "train.betas": (0.9, 0.999), "train.warmup_ratio": 0.03}
FINETUNING |= {"train.min_learning_rate_ratio": 0.0}
PRETRAINING = {"train.weight_decay": 0.1, "train.betas": (0.9, 0.95), "train.warmup_ratio": 0.01}
PRETRAINING |= {"train.min_learning_rate_ratio": 0.1}
CONTINUED = PRETRAINING | {"train.min_learning_rate_ratio": 0.0}
EACH_EPOCH = {"train.eval_every_epochs": 1.0, "train.eval_every": None}
EACH_EPOCH |= {"checkpoint.every_epochs": 1.0, "checkpoint.every_steps": None}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, PRETRAINING | {"train.eval_every": 100, "checkpoint.every_steps": 100}),
        ({"train.epochs": 2}, PRETRAINING | {"train.eval_every": 100, "checkpoint.every_steps": 100}),
        ({"model.name_or_path": "base", "model.init": "scratch"}, PRETRAINING),
        ({"model.name_or_path": "base", "data.format": "text"}, CONTINUED),
        ({"model.name_or_path": "base", "model.task": "masked-lm"}, CONTINUED),
        ({"model.name_or_path": "base", "model.task": "seq2seq-lm"}, FINETUNING),
        ({"model.name_or_path": "base", "model.task": "sequence-classification"}, FINETUNING),
        ({"adapter.type": "lora", "data.format": "text"}, FINETUNING),
        ({"adapter.name_or_path": "mine"}, FINETUNING),
        ({"data.format": "messages"}, FINETUNING | {"train.eval_every": 100, "checkpoint.every_steps": 100}),
        ({"data.format": "alpaca", "train.epochs": 3}, FINETUNING | EACH_EPOCH),
        ({"data.format": "preference", "train.epochs": 0.5}, FINETUNING | EACH_EPOCH),
        # Settings of the user take precedence.
        (
            {
                "adapter.type": "lora",
                "train.epochs": 3,
                "train.eval_every": None,
                "checkpoint.every_steps": 7,
            },
            {"train.eval_every_epochs": None, "checkpoint.every_epochs": None, "checkpoint.every_steps": 7},
        ),
        (
            {"adapter.type": "lora", "train.warmup_steps": 5, "train.betas": (0.8, 0.9)},
            {"train.warmup_steps": 5, "train.warmup_ratio": None, "train.betas": (0.8, 0.9)},
        ),
        ({"train.schedule": "OneCycle"}, {"train.warmup_ratio": None, "train.min_learning_rate_ratio": 0.0}),
    ],
)
def test_defaults_follow_task_and_length(settings: dict[str, Any], expected: dict[str, Any]) -> None:
    config = load_config(None, settings)
    assert {key: config.get(key) for key in expected} == expected
    assert not any(config.is_set(key) for key in expected.keys() - settings.keys())


def test_config_may_have_settings_for_every_backend() -> None:
    for backend in ("auto", "cpu", "cuda", "xla"):
        checked({"backend": backend, "xla": {"scan_layers": True}, "fsdp": {"forward_prefetch": True}})
    checked({"backend": "xla", "strategy": "full_shard", "deepspeed": {"config": "ds.json"}})  # ignored there


# Errors


@each("flags_refused", "flags", "line")
def test_flags_with_errors_are_rejected(flags: str, line: str, file: Path) -> None:
    assert refusal(file, lambda: check_config(parse_train_args(flags.split()).config)).startswith(line)


LARGE: list[tuple[bytes, str]] = [
    (b"seed: " + b"9" * 5000, "run.yaml:1: '99999"),
    (b"[" * 5000, "run.yaml"),
    (b"\xff\xfe\x00", "run.yaml: is not UTF-8 text; specify a config file"),
    (b"# " + b"x" * (1 << 20), "run.yaml: is larger than 1 MB, the maximum for a config"),
]


@pytest.mark.parametrize(
    ("content", "line"), [*((row["text"].encode(), row["line"]) for row in ROWS["files_refused"]), *LARGE]
)
def test_config_files_with_errors_are_rejected(content: bytes, line: str, file: Path) -> None:
    file.write_bytes(content)
    assert refusal(file, lambda: checked(file)).startswith(line)


@each("contradictions", "text", "words")
def test_contradicting_settings_are_named(text: str, words: list[str], file: Path) -> None:
    file.write_text(text)
    told = refusal(file, lambda: checked(file))
    assert all(word in told for word in words), told


@pytest.mark.parametrize("text", [row["text"] for row in ROWS["contradictions"]])
def test_setting_problems_name_existing_keys(text: str, file: Path) -> None:
    try:
        problems = list(iter_setting_problems(loaded(file, text)))
    except UserError:  # the schema refuses it
        return
    for problem in problems:
        assert problem.keys[0] in problem.reason
        for key in problem.keys:
            assert any(key == name or key.startswith(f"{name}.") for name in (*TABLE, "data")), key


def test_weight_schedule_without_sources_is_one_problem() -> None:
    config = load_config({"data": {"weight_schedule": [{"step": 5, "weights": {"web": 1}}]}})
    (problem,) = iter_setting_problems(config)
    assert problem.reason.startswith("data.weight_schedule: has no effect without data.sources")


@pytest.mark.parametrize("name", ["qlora", "QLoRA"])
def test_section_error_translates_word_in_any_case(name: str, file: Path) -> None:
    line = refusal(file, lambda: loaded(file, f"adapter: {name}"))
    assert "; write adapter: {type: lora, base: nf4};" in line


@pytest.mark.parametrize(
    ("data", "names"),
    [
        ({}, [""]),
        ({"eval_fraction": 0}, []),
        ({"stream": True}, []),
        ({"eval": {"source": "x"}, "eval_fraction": 0.1}, ["", "held_out"]),
        ({"sources": [{"name": "a"}, {"name": "b"}]}, ["a", "b"]),
        ({"sources": [{"name": "a", "stream": True}, {"name": "b"}]}, ["b"]),
        ({"sources": [{"name": "a"}, {"name": "b", "stream": False}], "stream": True}, ["b"]),
    ],
)
def test_list_evaluation_source_names_excludes_streams(data: dict[str, Any], names: list[str]) -> None:
    assert list_evaluation_source_names(load_config({"data": data}).data) == names


@pytest.mark.parametrize(
    ("settings", "saves"),
    [
        ({"checkpoint.every_steps": 5}, True),
        ({"checkpoint.every_steps": None}, False),
        ({"checkpoint.every_steps": None, "checkpoint.keep_best": 1}, True),
        ({"checkpoint.every_steps": None, "checkpoint.keep_best": 1, "train.eval_every": None}, False),
    ],
)
def test_saves_during_training_includes_best_checkpoints(settings: dict[str, Any], saves: bool) -> None:
    assert load_config(None, settings).saves_during_training is saves


def test_setting_problem_names_flag_before_line(file: Path) -> None:
    file.write_text("train:\n  epochs: 1\n")
    message = refusal(file, lambda: check_config(load_config(file, ["--train.steps", "5"])))
    assert message.startswith("--train.steps: train.epochs: 1 and train.steps: 5 both")


def test_yaml_aliases_cannot_expand_exponentially(file: Path) -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    file.write_text("\n".join(lines))
    assert "alias" in refusal(file, lambda: checked(file))


def test_load_config_rejects_missing_and_unreadable_files(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path, tmp_path / ("x" * 5000)):
        with pytest.raises(UserError, match="cannot read the config"):
            checked(path)
    with pytest.raises(UserError, match="cannot read the config"):
        checked("a\0b")


# Dumping


@pytest.mark.parametrize("values", ROWS["dumped"])
def test_dump_yaml_round_trips(file: Path, values: dict[str, Any]) -> None:
    config = load_config(values)
    if config.deepspeed.config is not None:
        config = config.replaced({"strategy": "zero3"})
    assert loaded(file, dump_yaml(config)) == config


# In Python, and help


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as caught:
        parse_train_args(argv)
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_help_prints_settings_of_section(capsys: pytest.CaptureFixture[str]) -> None:
    everything = printed(capsys, "--help", "all")
    assert all(f"--{key}" in everything for key in TABLE)
    section = printed(capsys, "--help", "train")
    assert "--train.steps" in section
    assert "--data.source" not in section


# Identity of a run


@pytest.mark.parametrize(("key", "value"), (ROWS["may_change"] | ROWS["another_run"]).items())
def test_find_changes_reports_identity_settings(key: str, value: Any) -> None:
    changes = find_changes(RunConfig(), load_config(None, {key: value}))
    expected = {key} if key in ROWS["another_run"] else set()
    if key == "train.warmup_steps":  # which replaces the default of another setting
        expected.add("train.warmup_ratio")
    assert {change.key for change in changes} == expected


def test_find_changes_reads_fingerprints_back_from_json() -> None:
    stored = json.loads(json.dumps(RunConfig().fingerprint()))
    assert find_changes(stored, RunConfig()) == []
    del stored["train.z_loss"]
    assert find_changes(stored, RunConfig()) == []
    stored["train.optimizer"] = "sgd"
    assert [str(change) for change in find_changes(stored, RunConfig())] == [
        "train.optimizer: 'sgd' there, 'adamw' here"
    ]


def test_adjustable_settings_are_identity_settings() -> None:
    assert {key for key, setting in TABLE.items() if setting.is_identity} >= ADJUSTABLE_SETTINGS


def iter_numbers(model: type[BaseModel]) -> Iterator[tuple[str, list[Any]]]:
    """Yield each number that the schema takes, also inside lists and groups, with its constraints."""
    for key, setting in keys.get_setting_fields(model).items():
        for kind, marks in keys.iter_type_parts(setting.field.annotation, tuple(setting.field.metadata)):
            if kind in (int, float):
                yield key, [inner for mark in marks for inner in getattr(mark, "metadata", None) or (mark,)]
            elif isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from ((f"{key}.{inner}", constraints) for inner, constraints in iter_numbers(kind))


def test_schema_numbers_have_bounds_with_reason() -> None:
    numbers = [*iter_numbers(RunConfig), *iter_numbers(TrainOptions)]
    assert len(numbers) > 60 and {key for key, _ in numbers} >= {
        "data.sources.weight",
        "xla.sharding",
        "nproc",
    }
    for key, constraints in numbers:
        kinds = {type(constraint) for constraint in constraints}
        assert kinds & {annotated_types.Ge, annotated_types.Gt}, f"{key} has no lower bound"
        assert kinds & {annotated_types.Le, annotated_types.Lt}, f"{key} has no upper bound"
        assert BoundsReason in kinds, f"the bounds of {key} have no reason"


# Any input gives at most a UserError

words = st.one_of(
    st.sampled_from([*keys.get_setting_fields(RunConfig), *keys.get_section_descriptions(RunConfig)]).map(
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
def test_load_config_of_random_bytes_has_no_traceback(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    try:
        config = load_config(file)
    except UserError as error:
        assert str(error).isprintable()
    else:
        assert load_config(config.model_dump(by_alias=True, exclude_unset=True)) == config


@QUIET
@given(key=st.sampled_from(sorted(keys.get_setting_fields(RunConfig))), value=trees)
@example(key="train.schedule_params", value={"\x1b": None})
def test_load_config_of_random_values_has_no_traceback(key: str, value: Any) -> None:
    try:
        load_config(keys.nest_dotted_keys({key: value}))
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
def test_parse_train_args_of_random_flags_has_no_traceback(argv: list[str]) -> None:
    try:
        parse_train_args(argv)
    except UserError as error:
        assert "\n" not in str(error)


def test_random_configs_keep_promises(tmp_path: Path) -> None:
    """The first cases of the weekly fuzz."""
    for number, case, outcome in run_cases(range(40), 0, tmp_path):
        assert not outcome.broken, f"case {number}: {case.changes}"
