"""Input that nobody means to give: each is refused in one line that names the key."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from portable.checkpoint.store import Checkpoints
from portable.checkpoint.trainer_state import TrainerState
from portable.cli import main
from portable.config import load_config
from portable.errors import RunError, UserError
from portable.model import build as models
from portable.output.lock import locked
from tests.runs import TINY_MODEL, flags, tiny

if TYPE_CHECKING:
    from pathlib import Path


def refusal(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    """Run, and return the one line of the refusal."""
    assert main(arguments) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, lines
    return lines[0]


def llama(**keys: Any) -> dict[str, Any]:
    return {"model.config": {**TINY_MODEL, **keys}}


def settings_of(config: dict[str, Any], task: str = "causal-lm", **model: Any) -> Any:
    values: dict[str, Any] = {"model": {"config": config, "task": task, **model}}
    return load_config(values | {"data": {"source": "text.jsonl"}}).model


BAD_SETTINGS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("no width", llama(hidden_size=0), ["model.config", "hidden_size is 0"]),
    ("negative width", llama(hidden_size=-8), ["model.config", "hidden_size is -8"]),
    ("no heads", llama(num_attention_heads=0), ["model.config", "num_attention_heads is 0"]),
    ("negative feed-forward", llama(intermediate_size=-1), ["model.config"]),
    ("activation", llama(hidden_act="nonsense"), ["model.config", "hidden_act", "nonsense"]),
    ("grouped heads", llama(num_key_value_heads=3), ["model.config", "heads"]),
    ("odd heads", llama(hidden_size=20), ["model.config", "head_dim"]),
    ("no layers", llama(num_hidden_layers=0), ["model.config", "num_hidden_layers is 0"]),
    ("huge vocabulary", llama(vocab_size=10**12), ["data.vocab_size", "1000000"]),
    ("long name", {"data.source": "x" * 300}, ["data.source", "too long"]),
    ("long path", {"data.source": "/tmp/" + "x" * 300 + ".txt"}, ["data.source", "too long"]),
    ("NUL in the source", {"data.source": "a\0b.txt"}, ["data.source", "NUL"]),
    ("epochs", {"train.epochs": 1e308, "train.steps": None}, ["train.epochs", "1e+308"]),
    ("NUL in the folder", {"output_dir": "a\0b"}, ["output_dir"]),
    ("no GPU", {"backend": "cuda"}, ["backend: cuda needs a GPU", "--backend cpu"]),
]


@pytest.mark.parametrize(
    ("settings", "words"), [c[1:] for c in BAD_SETTINGS], ids=[c[0] for c in BAD_SETTINGS]
)
def test_bad_settings(
    settings: dict[str, Any],
    words: list[str],
    tmp_path: Path,
    corpus: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    line = refusal(capsys, flags(tiny(tmp_path / "out", corpus) | settings))
    for word in words:
        assert word in line
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_an_architecture_without_sdpa() -> None:
    config = {"model_type": "bloom", "vocab_size": 300, "hidden_size": 32, "n_layer": 1, "n_head": 4}
    chosen = settings_of(config, attention="sdpa")
    with pytest.raises(
        UserError, match=r"^model\.attention: BloomForCausalLM has no sdpa kernel; use eager$"
    ):
        models.build_model(models.model_config(chosen), chosen)
    default = settings_of(config)
    model = models.build_model(models.model_config(default), default)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize(("family", "usable"), [("roberta", 62), ("xlm-roberta", 62), ("bert", 64)])
def test_positions_that_are_reserved_for_padding(family: str, usable: int) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    given = {"model_type": family, "max_position_embeddings": 64, **sizes}
    config = models.model_config(settings_of(given, "masked-lm"))
    around = {"model.config": given, "model.task": "masked-lm"}
    model = models.build_model(config, settings_of(given, "masked-lm"))
    models.check_length(config, load_config(None, {**around, "data.seq_len": usable}), model)
    with pytest.raises(UserError, match=rf"data\.seq_len: {usable + 1} .* {usable} positions"):
        models.check_length(config, load_config(None, {**around, "data.seq_len": usable + 1}), model)


STATE: dict[str, Any] = {
    "step": 4,
    "samples": 24,
    "seed": 0,
    "schedule": {"total_steps": 8},
    "run": {"precision": "fp32"},
    "data": "digest",
    "backend": "cpu",
    "strategy": "full_shard",
    "world_size": 1,
    "metadata": {},
    "format_version": 1,
}


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "[]",
        "{}",
        "",
        *(json.dumps(STATE | {key: "a"}) for key in ("step", "samples", "schedule", "run", "world_size")),
        *(json.dumps(STATE | {"format_version": version}) for version in ("a", None, 0, True)),
        *(json.dumps(STATE | {key: -1}) for key in ("step", "samples", "world_size", "data")),
        *(json.dumps(STATE | {"step": step}) for step in (True, 1.5, None)),
        json.dumps({key: value for key, value in STATE.items() if key != "samples"}),
        json.dumps(STATE | {"another": 1}),
    ],
    ids=lambda text: text[-40:],
)
def test_a_damaged_trainer_state(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "trainer_state.json").write_text(text)
    line = refusal(capsys, ["--resume-info", str(tmp_path)])
    assert "trainer_state.json: damaged (" in line and "older checkpoint" in line


def test_a_sound_trainer_state(tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text(json.dumps(STATE))
    assert TrainerState.read(tmp_path) == TrainerState(**STATE)


def test_an_output_folder_that_cannot_be_written_to(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    assert "output_dir" in refusal(capsys, flags(tiny(file / "out", corpus)))
    (tmp_path / "run" / ".lock").mkdir(parents=True)
    line = refusal(capsys, flags(tiny(tmp_path / "run", corpus)))
    assert "output_dir" in line and "is a directory" in line.lower()
    for folder in (tmp_path / ("x" * 300), tmp_path / "a\0b"):
        with pytest.raises(UserError, match="output_dir"), locked(folder):
            raise AssertionError("the lock was given")


def test_a_checkpoint_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").touch()
    folder = Checkpoints(tmp_path / "checkpoints", keep=None)
    unused: Any = None
    with pytest.raises(RunError, match=r"step-000004: could not be written .*last good checkpoint: none"):
        folder.begin(unused, TrainerState(**STATE), unused, unused)
