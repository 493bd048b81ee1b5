"""YAML files: what is read, what is refused and how, and that a dump reads back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from portable.config import RunConfig, dump_yaml, keys, load_config
from portable.config.yaml_text import parse, parse_value
from portable.errors import UserError
from tests.runs import checked

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return tmp_path / "run.yaml"


def loaded(path: Path, text: str) -> RunConfig:
    path.write_text(text, "utf-8")
    return load_config(path)


def refusal(path: Path, text: str | bytes) -> str:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError) as caught:
        checked(path)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(f"{path.parent}/", "")


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


def test_floats_without_a_point(run_file: Path) -> None:
    assert loaded(run_file, "train: {learning_rate: 3e-4}").train.learning_rate == 3e-4


def test_words_for_truth(run_file: Path) -> None:
    config = loaded(run_file, "compile: yes\ndata: {packing: off, text_field: on}")
    assert (config.compile, config.data.packing, config.data.text_field) == (True, False, "on")


def test_none_is_a_word_where_it_is_a_choice(run_file: Path) -> None:
    assert loaded(run_file, "memory: {offload_params: none}").memory.offload_params == "none"


def test_an_empty_section_and_a_byte_order_mark(run_file: Path) -> None:
    assert loaded(run_file, "\ufefftrain:\nfsdp: {}\n") == RunConfig()


def test_a_model_config_replaces_the_default(run_file: Path) -> None:
    config = loaded(run_file, "model:\n  config: {model_type: bert, hidden_size: 32, id2label: {0: no}}")
    assert config.model.config == {"model_type": "bert", "hidden_size": 32, "id2label": {"0": "no"}}


def test_anchors_work(run_file: Path) -> None:
    config = loaded(run_file, "train: {warmup_steps: &n 7, eval_every: *n}")
    assert config.train.eval_every == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
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
        ("seed: !!int abc", "run.yaml:1: cannot read 'abc' as int"),
        ("? [a, b]\n: 1", "run.yaml:1: a key must be a word"),
        ("model: &a {config: {model_type: x, b: *a}}", "run.yaml:1: "),
        ("'a\\nb': 1", "run.yaml:1: unknown key "),
        ('"\\e[31m": 1', "run.yaml:1: unknown key '\\x1b[31m'"),
        ("seed: " + "9" * 5000, "run.yaml:1: cannot read '99999"),
        ("[" * 5000, "run.yaml"),
        (b"\xff\xfe\x00", "run.yaml: not a config file: not UTF-8 text"),
        (b"\x00\x01", "run.yaml: not valid YAML: unacceptable character"),
        (b"# " + b"x" * (1 << 20), "run.yaml: not a config file: larger than a megabyte"),
    ],
)
def test_refusals(run_file: Path, text: str | bytes, message: str) -> None:
    assert refusal(run_file, text).startswith(message)


def test_the_first_of_several_problems_is_told(run_file: Path) -> None:
    text = "log:\n  every_steps: x\ntrain:\n  steps: x\nmodle: 1\n"
    assert refusal(run_file, text).startswith("run.yaml:2: log.every_steps")


def test_aliases_cannot_unfold_without_end(run_file: Path) -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    assert "alias" in refusal(run_file, "\n".join(lines))


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
def test_a_dump_reads_back(run_file: Path, values: dict[str, Any], comments: bool) -> None:
    config = load_config(values)
    if config.deepspeed.config is not None:
        config = config.replaced({"strategy": "zero3"})
    text = dump_yaml(config, comments=comments)
    assert loaded(run_file, text) == config
    assert ("#" in text.replace("# x", "")) == comments


def test_a_dump_is_also_yaml_1_1() -> None:
    config = load_config({"data": {"text_field": "no", "source": "3e-4"}})
    tree = yaml.safe_load(dump_yaml(config))
    assert tree["data"]["text_field"] == "no"
    assert tree["data"]["source"] == "3e-4"
    assert tree["train"]["eps"] == 1e-8


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
def test_no_bytes_bring_a_traceback(run_file: Path, content: bytes) -> None:
    only_user_errors(run_file, content)


@QUIET
@given(text=st.text(alphabet="aεtrain:seed \n-[]{}?&*!|>'\"%@`#,0129.~\t\\x\x85\ufeff", max_size=60))
def test_no_yaml_brings_a_traceback(run_file: Path, text: str) -> None:
    only_user_errors(run_file, text.encode())


@QUIET
@given(tree=st.dictionaries(words, trees, max_size=4))
def test_no_values_bring_a_traceback(run_file: Path, tree: dict[str, Any]) -> None:
    only_user_errors(run_file, yaml.safe_dump(tree).encode())


@QUIET
@given(key=st.sampled_from(sorted(keys.settings(RunConfig))), value=trees)
@example(key="train.schedule_params", value={"\x1b": None})
def test_no_value_of_any_setting_brings_a_traceback(key: str, value: Any) -> None:
    try:
        load_config(keys.nested({key: value}))
    except UserError as error:
        assert str(error).isprintable()
