"""The command line: flags derived from the schema, their errors, and help."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from portable.checks import check
from portable.config import RunConfig, keys, load_config, parse_args
from portable.errors import UserError
from tests.runs import checked

if TYPE_CHECKING:
    from pathlib import Path

TABLE = keys.settings(RunConfig)


def refusal(*argv: str) -> str:
    with pytest.raises(UserError) as caught:
        check(parse_args(argv).config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


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
        ("--xla.xla_fsdp_v2 true", "xla.xla_fsdp_v2", True),
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


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--train.step 3", "unknown flag --train.step; did you mean --train.steps?"),
        ("--steps 3", "unknown flag --steps; did you mean --train.steps?"),
        ("--lr 3", "unknown flag --lr; did you mean --train.learning_rate?"),
        ("--dry-runn", "unknown flag --dry-runn; did you mean --dry-run?"),
        ("--qqqqqq 3", "unknown flag --qqqqqq; --help lists them"),
        ("--train.steps", "--train.steps needs a value: integer >= 1 or null"),
        ("--train.steps --compile", "--train.steps needs a value"),
        ("--train.steps x", "--train.steps must be integer >= 1 or null, got 'x'"),
        ("--train.steps 2.5", "--train.steps must be integer >= 1 or null, got 2.5"),
        ("--train.steps true", "--train.steps must be integer >= 1 or null, got true"),
        ("--train.steps 1 2", "unexpected argument '2'"),
        ("--train.betas 0.9", "--train.betas must be two of: number >= 0 and < 1, got [0.9]"),
        ("--train.betas", "--train.betas needs a value"),
        ("--compile maybe", "--compile must be true | false, got 'maybe'"),
        ("--no-compile=true", "--no-compile takes no value"),
        ("--no-seed", "unknown flag --no-seed"),
        ("--strategy fullshard", "--strategy must be no_shard"),
        ("--log.trackers tensorbord", "--log.trackers must be list of: tensorboard"),
        ("--train 3", "--train is a section; set a key in it, such as --train.steps"),
        (
            "--train.warmup_steps 300",
            "--train.warmup_steps 300 exceeds train.steps 200",
        ),
        ("--deepspeed.config a.json --deepspeed.config.x 1", "--deepspeed.config.x: "),
        ("--nproc 0", "--nproc must be integer >= 1, got '0'"),
        ("--nproc two", "--nproc must be integer >= 1, got 'two'"),
        ("--nproc", "--nproc needs a value: N"),
        ("--config", "--config needs a value: FILE"),
        ("--config /nowhere.yaml", "/nowhere.yaml: cannot read the config"),
        ("run.yaml", "unexpected argument 'run.yaml'; use --config for a config file"),
        ("-x", "unknown flag -x; flags have two dashes"),
        ("--", "unexpected argument '--'"),
        ("--help train.stepz", "--help: no setting named 'train.stepz'; did you mean train.steps?"),
    ],
)
def test_refusals(argv: str, message: str) -> None:
    assert refusal(*argv.split()).startswith(message)


def test_choices_come_with_the_nearest() -> None:
    assert refusal("--strategy", "fullshard").endswith("did you mean full_shard?")
    assert refusal("--log.trackers", "wandb", "tensorbord").endswith("did you mean tensorboard?")


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


def test_a_second_file_for_an_option_that_takes_one_is_refused() -> None:
    with pytest.raises(UserError, match=r"--accelerate-config is given twice, as a\.yaml and as b\.yaml"):
        parse_args(["--accelerate-config", "a.yaml", "--accelerate-config=b.yaml"])
