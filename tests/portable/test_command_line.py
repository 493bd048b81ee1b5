"""``portable-train`` as a person types it: bad input, dry runs, questions about checkpoints."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from portable.checkpoint.trainer_state import TrainerState
from portable.cli import main
from portable.commands.init import read_starter_configs
from portable.config import load_config
from portable.errors import UserError
from portable.model import build as models
from portable.registry import import_engine_module, load_backend_package
from tests.runs import TINY_MODEL, flags, tiny
from tests.tiny_models import tiny_config

pytestmark = pytest.mark.usefixtures("brief_runs")


def refusal(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    """Run, and return the one line of the refusal."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line]
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("error: ")
    assert captured.out == ""
    return lines[0]


def snapshot(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): p.stat().st_mtime_ns for p in sorted(folder.rglob("*"))}


@pytest.mark.parametrize(
    ("module", "arguments", "code"),
    [
        ("portable.cli", ["--help"], 0),
        ("portable.cli", ["--train.learning_rat", "1"], 2),
        ("portable.planner.cli", ["--help"], 0),
        ("portable.reporting.html_report", ["--help"], 0),
        ("portable.reporting.html_report", ["no/such/run"], 2),
    ],
)
def test_help_and_errors_do_not_import_torch(module: str, arguments: list[str], code: int) -> None:
    call = (
        f"import sys, {module} as program\n"
        f"try: code = program.main({arguments!r})\n"
        "except SystemExit as left: code = left.code\n"
        "print(code or 0, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == f"{code} False", done.stderr


@pytest.mark.parametrize(
    "statement",
    [
        "import portable.config",
        "from portable.config import load_config; load_config(None, {'train.steps': 3})",
        "from portable.command_line import parse_train_args; parse_train_args(['--train.steps', '3'])",
    ],
)
def test_config_does_not_import_tables_of_other_programs(statement: str) -> None:
    call = f"import sys\n{statement}\nprint([name for name in sys.modules if 'portable.importing' in name])"
    done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_command_line_names_several_mistakes_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("train:\n  steps: many\n  learning_rat: 1\ndata: {seq_len: -3}\n")
    assert main(["--config", str(file), "--train.epochs", "x"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" must ")[0].partition(";")[0] for line in lines] == [
        f"error: {file}:2: train.steps",
        f"error: {file}:3: unknown key train.learning_rat",
        f"error: {file}:4: data.seq_len",
        "error: --train.epochs",
    ]
    for program, text in (
        ("axolotl", "{base_model: x, datasets: [{path: a.jsonl}], sequence_len: 8}"),
        ("LLaMA-Factory", "{model_name_or_path: x, stage: sft, cutoff_len: 8}"),
        ("the Trainer or TRL", "{output_dir: x, per_device_train_batch_size: 1, logging_steps: 1}"),
    ):
        file.write_text(text)
        assert main(["--config", str(file)]) == 2
        first = capsys.readouterr().err.splitlines()[0]
        assert (
            f"this is a file of {program}; convert the file to a config with portable-train import" in first
        )


@pytest.mark.parametrize("task", read_starter_configs())
def test_init_writes_starter_config(
    task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "mine.yaml", "--task", task]) == 0
    assert load_config(Path("mine.yaml")).output_dir == "runs/mine"
    assert "portable-train --config mine.yaml" in capsys.readouterr().out
    (tmp_path / "mine.yaml").write_text("seed: 3")
    assert main(["init", "mine.yaml"]) == 2
    assert "already exists" in capsys.readouterr().err
    assert (tmp_path / "mine.yaml").read_text() == "seed: 3"
    name = "it's: #1" + " long" * 20  # quoted for YAML and for the shell
    assert main(["init", f"{name}.yaml", "--task", task]) == 0
    assert load_config(Path(f"{name}.yaml")).output_dir == f"runs/{name}"
    assert shlex.split(capsys.readouterr().out.splitlines()[-1])[-1] == f"{name}.yaml"


REFUSED = yaml.safe_load(Path(__file__).with_name("command_line_refused.yaml").read_text("utf-8"))
REFUSED += [
    {"settings": {"data.source": "x" * 300}, "words": ["data.source", "too long"]},
    {
        "settings": {"data.tokenizer": "\u00e9" * 300},
        "words": ["data.tokenizer", "is too long: the path has"],
    },
    {"settings": {"output_dir": "a/" * 2100}, "words": ["output_dir", "is too long: the path has"]},
    {
        "flags": f"--eval-only --json {__file__}",
        "words": ["--json", "does not contain evaluation results; specify another file"],
    },
]


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: "".join(row["words"]))
def test_command_line_rejects_bad_settings_before_writing(
    row: dict[str, Any],
    tmp_path: Path,
    corpus: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    settings = tiny(tmp_path / "out", corpus) | row.get("settings", {})
    if "type" in row:
        task = settings.get("model.task", "causal-lm")
        settings["model.config"] = {**tiny_config(row["type"], task), **row.get("config", {})}
    if "llama" in row:
        settings["model.config"] = {**TINY_MODEL, **row["llama"]}
    if "flags" in row:
        del settings["backend"]
    line = refusal(capsys, [*flags(settings), *row.get("flags", "").split()])
    for word in row["words"]:
        assert word in line
    assert not (tmp_path / "out").exists()


def test_command_line_rejects_folder_of_another_run(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags(tiny(tmp_path, corpus, train__steps=3, train__stop_after=2))) == 0
    capsys.readouterr()
    before = snapshot(tmp_path)
    line = refusal(capsys, flags(tiny(tmp_path, corpus, train__steps=3, seed=1)))
    assert str(tmp_path) in line and "seed: 0 there, 1 here" in line
    assert snapshot(tmp_path) == before
    assert main(flags(tiny(tmp_path, corpus, train__steps=3, train__stop_after=1))) == 0  # has been passed
    assert "stopped at step 2 of 3, as train.stop_after requires" in capsys.readouterr().err


def test_dry_run_prints_plan_and_writes_nothing(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.chdir(tmp_path)
    settings = tiny(tmp_path / "out", corpus, data__cache_dir=str(cache))
    assert main([*flags(settings), "--dry-run", "--nproc", "2"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for told in ("model_type: llama", "2 ranks x 1 accumulation step x 3", "KiB", "memory, planned"):
        assert told in printed
    monkeypatch.setenv("RANK", "0")  # nor if a launcher started it
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([*flags(settings), "--dry-run"]) == 0
    assert "2 ranks x 1 accumulation step x 3" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_command_line_rejects_partial_launcher_environment(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for rank, size, told in (
        (
            "",
            "4",
            "the environment contains WORLD_SIZE, but not RANK; run `unset ",
        ),
        ("4", "4", "but ranks go from 0 to WORLD_SIZE - 1; "),
        ("0", "2", "but not MASTER_ADDR or MASTER_PORT; run `unset RANK WORLD_SIZE`"),
    ):
        monkeypatch.setenv("WORLD_SIZE", size)
        if rank:
            monkeypatch.setenv("RANK", rank)
        assert told in refusal(capsys, flags(tiny(tmp_path / "out", corpus)))
    assert not (tmp_path / "out").exists()


def test_eval_only_and_resume_info_leave_run_unchanged(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A repeated command reports that nothing is left to train, without rates."""
    settings = flags(tiny(tmp_path, corpus, train__steps=2))
    assert main(settings) == 0
    said = capsys.readouterr().err
    assert "tokens/s" in said and "nothing left to train" not in said
    recorded = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    before = snapshot(tmp_path)
    values = tmp_path.parent / "values.json"
    assert main([*settings, "--eval-only", "--json", str(values)]) == 0
    assert f"{recorded[-1]['eval_loss']:.6f}" in capsys.readouterr().out
    written = json.loads((tmp_path / "evaluation.json").read_text())
    assert written == {"step": 2, **{name: recorded[-1][name] for name in written if name != "step"}}
    assert written["eval_loss"] == recorded[-1]["eval_loss"]
    assert values.read_text() == (tmp_path / "evaluation.json").read_text()
    (tmp_path / "evaluation.json").unlink()
    assert main(["--resume-info", str(tmp_path)]) == 0
    assert "2 of 2" in capsys.readouterr().out
    assert snapshot(tmp_path) == before
    assert "does not exist" in refusal(capsys, ["--resume-info", str(tmp_path / "nowhere")])
    assert main([*settings, "--eval-only", "--output_dir", str(tmp_path / "nowhere")]) == 0
    assert "has no checkpoint; evaluating the model that a run would start with" in capsys.readouterr().err
    assert main(settings) == 0
    said = capsys.readouterr().err
    assert "tokens/s" not in said and "nothing left to train" in said


def test_resume_info_lists_strategies_that_can_resume(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = flags(tiny(tmp_path, corpus, train__steps=2, train__optimizer="adafactor"))
    assert main(settings) == 0
    capsys.readouterr()
    assert main(["--resume-info", str(tmp_path), "--backend", "cpu"]) == 0
    told = capsys.readouterr().out.splitlines()
    rows = {name: value.strip() for name, _, value in (line.strip().partition("  ") for line in told)}
    assert (rows["step"], rows["samples"], rows["tokens"]) == ("2 of 2", "12", "384")
    assert (rows["optimizer"], rows["written by"]) == ("adafactor", "1 rank, cpu, full_shard")
    # Its line for a strategy equals the error of a run with that strategy.
    assert rows["full_shard"] == "on 1, 2, 3, 6 ranks"
    refused = refusal(capsys, [*settings, "--strategy", "zero1", "--dry-run"])
    assert rows["zero1"] == "no: " + refused.removeprefix("error: --").strip()  # the flag's name


# Models and folders that cannot be


def test_attention_auto_selects_eager_without_sdpa() -> None:
    """An explicit `sdpa` is rejected: ``command_line_refused.yaml``."""
    config = load_config(None, {"model.config": tiny_config("bloom")}).model
    assert (
        models.build_model_on_meta(models.load_model_config(config), config).config._attn_implementation
        == "eager"
    )


STATE = asdict(TrainerState(4, 24, 0, {"total_steps": 8}, {}, "digest", "cpu", "full_shard", world_size=1))


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "[]",
        "{}",
        "",
        *(json.dumps(STATE | {key: "a"}) for key in ("samples", "schedule", "run", "format_version")),
        *(json.dumps(STATE | {"step": step}) for step in (-1, True, 1.5, None)),
        json.dumps({key: value for key, value in STATE.items() if key != "samples"}),
        json.dumps(STATE | {"schedule": {}}),
    ],
    ids=lambda text: text[-40:],
)
def test_resume_info_names_damaged_trainer_state(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trainer_state.json").write_text(text)
    line = refusal(capsys, ["--resume-info", str(tmp_path)])
    assert "trainer_state.json: is damaged (" in line and "older checkpoint" in line


def test_command_line_rejects_unwritable_output_folder(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    assert "output_dir" in refusal(capsys, flags(tiny(file / "out", corpus)))
    (tmp_path / "run" / ".lock").mkdir(parents=True)
    line = refusal(capsys, flags(tiny(tmp_path / "run", corpus)))
    assert "output_dir" in line and "is a directory" in line.lower()


@pytest.mark.parametrize("folder", ["tpu", "gpu"])
def test_missing_backend_folder_is_reported_in_one_line(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = f"portable.{folder}"
    for name in [name for name in sys.modules if f"{name}.".startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)  # makes the import raise ModuleNotFoundError
    with pytest.raises(UserError, match=r"^backend: \w+ is not part of this version; use one of cpu, "):
        load_backend_package({"tpu": "xla", "gpu": "cuda"}[folder])
    if folder == "gpu":
        with pytest.raises(UserError, match=r"^strategy: zero2 is not part of this version; use one of no_"):
            import_engine_module("zero2", "engine")
