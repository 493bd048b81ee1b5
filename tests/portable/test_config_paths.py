"""Paths in the config, and several config files."""

from __future__ import annotations

from itertools import chain, permutations
from pathlib import Path
from typing import Any

import pytest

from portable.cli import main
from portable.command_line import parse_train_args
from portable.config import RunConfig, keys, load_config
from portable.errors import UserError
from tests.runs import checked

PLACES = {key for key, setting in keys.get_setting_fields(RunConfig).items() if setting.may_be_path}


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SCRATCH", "/scratch")
    monkeypatch.delenv("NOT_SET", raising=False)


def given(key: str, value: object) -> object:
    """Return the resolved `value`, with the other settings that it requires."""
    around: dict[str, object] = {}
    if key == "memory.nvme_path":
        around = {"memory.offload_optimizer": "nvme"}
    return load_config(None, {**around, key: value}).get(key)


@pytest.mark.parametrize(
    "key", sorted(PLACES | {"output_dir", "model.name_or_path", "deepspeed.config", "checkpoint.resume"})
)
def test_path_setting_expands_home_and_variables(key: str, tmp_path: Path) -> None:
    assert given(key, "~/x") == f"{tmp_path}/home/x"
    assert given(key, "${SCRATCH}/x") == "/scratch/x"
    with pytest.raises(UserError, match=r"NOT_SET is not set") as caught:
        given(key, "${NOT_SET}/x")
    assert str(caught.value).startswith(f"{key} ")
    flags = [f"--{key}=~/y", "--memory.offload_optimizer", "nvme", "--memory.nvme_path", "/x"]
    if key.startswith("memory."):
        flags = [*flags[1:3], flags[0]]
    found = load_config(None, flags).get(key)
    assert (found[0] if isinstance(found, tuple) else found) == f"{tmp_path}/home/y"


def test_text_setting_is_not_expanded() -> None:
    assert load_config(None, {"log.sample_prompt": "~ ${SCRATCH}"}).log.sample_prompt == "~ ${SCRATCH}"


def test_path_option_expands_home_and_variables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "run.yaml").write_text("seed: 5")
    assert parse_train_args(["--config=~/run.yaml"]).config.seed == 5
    assert load_config("~/run.yaml").seed == 5
    assert parse_train_args(["--resume-info", "${SCRATCH}/x"]).resume_info == "/scratch/x"
    assert main(["--config", "$NOT_SET/run.yaml"]) == 2
    assert "the environment variable NOT_SET is not set" in capsys.readouterr().err


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    (tmp_path / "base.yaml").write_text(
        "seed: 1\n"
        "fsdp:\n"
        "train:\n"
        "  steps: 100\n"
        "  learning_rate: 1.0e-3\n"
        "  betas: [0.5, 0.6]\n"
        "model: {config: {model_type: llama, hidden_size: 64, num_hidden_layers: 2}}\n"
    )
    (tmp_path / "more.yaml").write_text(
        "train:\n  steps: 50\n  betas: [0.7, 0.8]\nfsdp: {min_num_params: 5}\n"
        "model: {config: {hidden_size: 32}}\n"
    )
    return str(tmp_path / "base.yaml"), str(tmp_path / "more.yaml")


def test_config_files_are_merged_in_order(files: tuple[str, str]) -> None:
    base, more = files
    config = parse_train_args(["--config", base, f"--config={more}", "--train.steps", "10"]).config
    assert (config.seed, config.train.steps, config.train.learning_rate) == (1, 10, 1e-3)
    assert config.train.betas == (0.7, 0.8)
    assert config.fsdp.min_num_params == 5
    assert config.model.config == {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2}
    assert config == load_config([base, Path(more)], {"train.steps": 10})
    back = parse_train_args(["--config", more, "--config", base]).config
    assert (back.train.steps, back.train.betas, back.fsdp.min_num_params) == (100, (0.5, 0.6), 5)
    assert config.came_from == {
        "seed": f"{base}:1",
        "train.learning_rate": f"{base}:5",
        "train.steps": f"--train.steps (over {more}:2, {base}:4)",
        "train.betas": f"{more}:3 (over {base}:6)",
        "fsdp.min_num_params": f"{more}:4",
        "model.config.model_type": f"{base}:7",
        "model.config.num_hidden_layers": f"{base}:7",
        "model.config.hidden_size": f"{more}:5 (over {base}:7)",
    }


def test_config_files_do_not_mix_model_types(files: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "gpt.yaml").write_text("model: {config: {model_type: gpt2}}")
    config = load_config([files[0], tmp_path / "gpt.yaml"])
    assert config.model.config == {"model_type": "gpt2"}
    assert "model.config.hidden_size" not in config.came_from


def test_config_files_replace_data_source_with_its_origins(tmp_path: Path) -> None:
    mixed, single = tmp_path / "mixed.yaml", tmp_path / "single.yaml"
    mixed.write_text("data:\n  sources:\n    - {name: a, source: x}\n    - {name: b, source: y}\n")
    single.write_text("data:\n  source: z\n")
    replaced = load_config([mixed, single])
    assert (replaced.data.source, replaced.data.sources) == ("z", ())
    assert replaced.came_from == {"data.source": f"{single}:2"}
    assert load_config([mixed, {"data": {"source": "z"}}]).came_from == {}
    assert "data.source" not in load_config([single, mixed]).came_from


@pytest.mark.parametrize(
    ("name", "default_keys"),
    [(None, RunConfig().model.config), ("gpt2", {})],
)
def test_override_of_model_config_key_does_not_depend_on_order(
    name: str | None, default_keys: dict[str, Any]
) -> None:
    """The other keys come from the pretrained model or, without one, from the default model."""
    file = {} if name else {"model": {"name_or_path": "other"}}
    flags = {"--model.name_or_path": name or "null", "--model.config.hidden_size": "512"}
    for pairs in permutations(flags.items()):
        config = load_config(file, [*chain(*pairs)])
        assert config.model.config == {**default_keys, "hidden_size": 512}
    sections: dict[str, Any] = {"model.config.hidden_size": 512, "model": {"name_or_path": name}}
    for items in permutations(sections.items()):
        assert load_config(file, dict(items)).model.config == config.model.config


def test_config_error_names_file_of_setting(files: tuple[str, str], tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("\ntrain:\n  epochs: 2\n")
    with pytest.raises(UserError, match=r"wrong.yaml:3: train.epochs: 2 and train.steps: 100"):
        checked([files[0], wrong])
    wrong.write_text("train: {learning_rat: 2}")
    with pytest.raises(UserError, match=r"wrong.yaml:1: unknown key train.learning_rat"):
        checked([files[0], wrong, files[1]])
