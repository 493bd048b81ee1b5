"""Runs that become longer or change their settings, in the same folder and in a new one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from portable.config import load_config
from portable.config.derived_defaults import DEFAULTS_BY_TRAINING_KIND
from portable.converters.storage.store_errors import RetriesExhaustedError
from portable.errors import RunError, UserError
from portable.optim.schedule import build_schedule
from portable.output import existing_run
from portable.reporting.html_report import write_report
from portable.reporting.metrics import EVENTS_FILE, read_metrics
from portable.run.rank import LaunchMode, run_rank
from tests.runs import (
    TINY_MODEL,
    configured,
    losses,
    weights,
    write_conversations,
    write_corpus,
    write_pretrained,
)

pytestmark = pytest.mark.usefixtures("brief_runs")

CONSTANT: dict[str, Any] = {"train__schedule": "constant", "train__warmup_steps": 0}


def train(folder: Path, corpus: Path, **settings: Any) -> None:
    assert run_rank("cpu", configured(folder, corpus, **settings)) == 0


def read_rates(folder: Path) -> dict[int, float]:
    return {row["step"]: row["learning_rate"] for row in read_metrics(folder) if "learning_rate" in row}


def read_last_start(folder: Path) -> dict[str, Any]:
    events = [json.loads(line) for line in (folder / EVENTS_FILE).read_text().splitlines()]
    last: dict[str, Any] = [event for event in events if event["event"] in ("start", "resume")][-1]
    return last


def read_report_events(page: Path) -> str:
    text = page.read_text("utf-8").partition('<script id="data" type="application/json">')[2]
    data, _ = json.JSONDecoder().raw_decode(text)
    return json.dumps(data["runs"][0]["events"], ensure_ascii=False)


def copy_run(finished: Path, folder: Path) -> Path:
    return Path(shutil.copytree(finished, folder))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """Train a run of eight steps with a constant learning rate."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    train(folder, corpus, **CONSTANT)
    return folder


def test_longer_run_equals_one_that_was_as_long_from_the_start(
    tmp_path: Path, corpus: Path, finished: Path
) -> None:
    longer = copy_run(finished, tmp_path / "longer")
    train(longer, corpus, **CONSTANT, train__steps=12)
    train(tmp_path / "uninterrupted", corpus, **CONSTANT, train__steps=12)
    assert losses(longer) == losses(tmp_path / "uninterrupted")
    assert weights(longer) == weights(tmp_path / "uninterrupted")
    assert read_last_start(longer)["changes"] == "train.steps 8 → 12"
    write_report([longer], tmp_path / "report.html")
    assert "changed: train.steps 8 → 12" in read_report_events(tmp_path / "report.html")


def test_longer_run_of_a_stream_equals_one_that_was_as_long_from_the_start(
    tmp_path: Path, corpus: Path
) -> None:
    settings: dict[str, Any] = {**CONSTANT, "data__stream": True, "data__eval_fraction": 0.0}
    train(tmp_path / "longer", corpus, **settings)
    train(tmp_path / "longer", corpus, **settings, train__steps=12)
    train(tmp_path / "uninterrupted", corpus, **settings, train__steps=12)
    assert losses(tmp_path / "longer") == losses(tmp_path / "uninterrupted")
    assert weights(tmp_path / "longer") == weights(tmp_path / "uninterrupted")


def test_changed_schedule_is_followed_and_unset_settings_are_kept(
    tmp_path: Path, corpus: Path, finished: Path
) -> None:
    folder = copy_run(finished, tmp_path / "run")
    settings: dict[str, Any] = {
        "train__steps": 14,
        "train__learning_rate": 1e-3,
        "train__schedule": "linear",
        "train__global_batch_size": 4,
        "checkpoint__allow_changes": True,
    }
    train(folder, corpus, **settings)
    stored = load_config(folder / "config.yaml")
    assert stored.train.warmup_steps == 0  # of the first launch; not set by the second
    schedule = build_schedule(stored.train, 14)
    assert [read_rates(folder)[step] for step in range(9, 15)] == pytest.approx(
        [schedule(step - 1) for step in range(9, 15)]
    )
    samples = {row["step"]: row["samples"] for row in read_metrics(folder) if "loss" in row}
    assert [samples[step] for step in (8, 9, 14)] == [48, 52, 72]
    # The same command continues, although it does not allow changes any more.
    assert run_rank("cpu", configured(folder, corpus, **settings | {"checkpoint__allow_changes": False})) == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"train__learning_rate": 1e-3},
            r"^output_dir: .*run contains a run with other settings \(train\.learning_rate: 0\.003 "
            r"there, 0\.001 here\); "
            r"add --allow-changes .*--checkpoint\.resume .*step-000008 to start .*$",
        ),
        ({"train__steps": 6}, r"train\.steps: 8 there, 6 here.*--allow-changes"),
        (
            {"train__steps": 6, "checkpoint__allow_changes": True},
            r"^train\.steps: .* is at step 8.*; set train.steps to 8",
        ),
        ({"seed": 5, "checkpoint__allow_changes": True}, r"\(seed: 0 there, 5 here\).*--checkpoint\.resume"),
        (
            {"model__config": {**TINY_MODEL, "hidden_size": 64}, "checkpoint__allow_changes": True},
            r"\(model\.config\.hidden_size: 48 there, 64 here\); choose another output_dir$",
        ),
        (
            {"train__optimizer": "sgd"},
            r"\(train\.optimizer: 'adamw' there, 'sgd' here\); choose another output_dir$",
        ),
        (
            {
                "train__steps": None,
                "train__epochs": 2.0,
                "train__global_batch_size": 3,
                "checkpoint__allow_changes": True,
            },
            r"^train\.epochs: train\.global_batch_size has changed, .*set train\.steps",
        ),
    ],
)
def test_rejected_change_leaves_run_and_suggests_fix(
    settings: dict[str, Any], message: str, corpus: Path, finished: Path
) -> None:
    before = sorted((path, path.stat().st_mtime_ns) for path in finished.rglob("*"))
    with pytest.raises(UserError, match=message) as caught:
        run_rank("cpu", configured(finished, corpus, **CONSTANT | settings))
    assert "delete" not in str(caught.value)
    assert sorted((path, path.stat().st_mtime_ns) for path in finished.rglob("*")) == before


def test_eval_only_and_replay_reject_other_data(tmp_path: Path, corpus: Path, finished: Path) -> None:
    (tmp_path / "text").mkdir()
    other = write_corpus(tmp_path / "text")
    other.write_text(other.read_text().replace("loss", "cost"))
    config = configured(finished, corpus, **CONSTANT, data__source=str(other))
    modes = (LaunchMode(eval_only=True), LaunchMode(replay=6))
    for mode in modes:
        with pytest.raises(UserError, match="the tokens, or the proportions of the sources, have changed"):
            run_rank("cpu", config, mode)


def test_run_without_a_checkpoint_is_replaced(tmp_path: Path, corpus: Path) -> None:
    folder = tmp_path / "run"
    train(folder, corpus, train__stop_after=1, checkpoint__every_steps=None)
    for path in (folder / "checkpoints").iterdir():
        path.rename(tmp_path / path.name)
    train(folder, corpus, seed=5, train__steps=2, train__warmup_steps=0)
    assert sorted(losses(folder)) == [1, 2]


def test_new_folder_continues_from_a_checkpoint_with_other_settings(
    tmp_path: Path, corpus: Path, finished: Path
) -> None:
    start = finished / "checkpoints" / "step-000004"
    (tmp_path / "text").mkdir()
    other = write_corpus(tmp_path / "text")
    other.write_text(other.read_text().replace("loss", "cost"))
    settings: dict[str, Any] = {
        "checkpoint__resume": str(start),
        "train__learning_rate": 1e-3,
        "train__ema": 0.9,
        "data__source": str(other),
        "data__seq_len": 16,
        "data__tokenizer": str(start),
        "precision": "bf16",
        "seed": 5,
    }
    folder = tmp_path / "run"
    train(folder, corpus, **CONSTANT | settings)
    assert [row["samples"] for row in read_metrics(folder) if "loss" in row] == [6, 12, 18, 24]
    assert set(read_rates(folder).values()) == {1e-3}
    changes = read_last_start(folder)["changes"].split("; ")
    assert [change.split()[0] for change in changes] == [
        "seed",
        "precision",
        "data.seq_len",
        "train.learning_rate",
        "train.ema",
    ]
    # The position may be set, as for a checkpoint of another program.
    position = {"checkpoint__resume_step": 0, "checkpoint__resume_samples": 12, "train__stop_after": 1}
    train(tmp_path / "position", corpus, **CONSTANT | settings | position)
    assert [row["samples"] for row in read_metrics(tmp_path / "position") if "loss" in row] == [18]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"model__config": {**TINY_MODEL, "rope_theta": 5e4}},
            r"model\.config\.rope_theta is not set in .*, but 50000\.0 in",
        ),
        (
            {"train__optimizer": "sgd"},
            r"train\.optimizer is 'adamw' in .*, but 'sgd' in this run; set train\.optimizer",
        ),
        ({"data__vocab_size": 300}, r"a different tokenizer.*; set data\.tokenizer: .*step-000004"),
        ({"train__learning_rate": 1e-3, "train__steps": 4}, r"at step 4, but ends after step 4"),
    ],
)
def test_new_folder_rejects_changed_model_and_optimizer(
    settings: dict[str, Any], message: str, tmp_path: Path, corpus: Path, finished: Path
) -> None:
    start = str(finished / "checkpoints" / "step-000004")
    with pytest.raises(UserError, match=message):
        run_rank("cpu", configured(tmp_path / "run", corpus, **CONSTANT | settings, checkpoint__resume=start))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("strategy", ["no_shard", "zero2"])
def test_changed_settings_reach_optimizer_of_each_engine(
    strategy: str, tmp_path: Path, corpus: Path, finished: Path
) -> None:
    settings: dict[str, Any] = {
        "train__steps": 12,
        "train__weight_decay": 0.5,
        "train__betas": (0.5, 0.7),
        "train__max_grad_norm": 0.1,
        "train__parameter_groups": [{"pattern": "embed_tokens", "learning_rate": 1e-2}],
        "checkpoint__allow_changes": True,
    }
    reference = copy_run(finished, tmp_path / "reference")
    train(reference, corpus, **CONSTANT | settings)
    folder = copy_run(finished, tmp_path / "run")
    train(folder, corpus, **CONSTANT | settings, strategy=strategy)
    assert losses(folder) == pytest.approx(losses(reference), rel=1e-5)
    unchanged = copy_run(finished, tmp_path / "unchanged")
    train(unchanged, corpus, **CONSTANT, train__steps=12)
    assert losses(folder)[12] != pytest.approx(losses(unchanged)[12], rel=1e-4)


TALK = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content + eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
LONG_MODEL: dict[str, Any] = {**TINY_MODEL, "max_position_embeddings": 512}
CHATS = ("model.name_or_path", "adapter.type", "data.source", "data.chat_template")
"""Settings of the command that started the run in earlier_config.yaml, without its length."""
COMMAND = [
    *("backend", "precision", "output_dir", "data.cache_dir", "train.global_batch_size"),
    *("log.trackers", "log.every_steps", "log.sample_tokens"),
]


@pytest.mark.parametrize(
    ("command", "settings"),
    [
        pytest.param((*CHATS, "train.epochs"), {}, id="adapter, epochs"),
        pytest.param(
            (*CHATS, "train.steps"),
            {"train.epochs": None, "train.steps": 25, "train.warmup_steps": 2},
            id="adapter, steps",
        ),
        pytest.param(
            ("model.config", "data.source", "train.steps"),
            {
                "model.name_or_path": None,
                "model.config": LONG_MODEL,
                "adapter.type": None,
                "data.source": "FOLDER/corpus.jsonl",
                "data.format": "text",
                "data.packing": True,
                "data.chat_template": None,
                "train.epochs": None,
                "train.steps": 25,
                "train.warmup_steps": 2,
            },
            id="pretraining",
        ),
    ],
)
def test_run_keeps_defaults_of_version_that_began_it(
    command: tuple[str, ...], settings: dict[str, Any], tmp_path: Path
) -> None:
    """The same command continues the run, although the defaults have changed since."""
    base = write_pretrained(tmp_path / "base", write_corpus(tmp_path)) / "config.json"
    base.write_text(json.dumps(json.loads(base.read_text()) | {"max_position_embeddings": 512}))
    (tmp_path / "talk.jinja").write_text(TALK)
    write_conversations(tmp_path)
    text = Path(__file__).with_name("earlier_config.yaml").read_text().replace("FOLDER", str(tmp_path))
    settings = {
        key: str(value).replace("FOLDER", str(tmp_path)) if key == "data.source" else value
        for key, value in settings.items()
    }
    (tmp_path / "earlier.yaml").write_text(text)
    earlier = load_config(tmp_path / "earlier.yaml", settings)
    uninterrupted = load_config(
        tmp_path / "earlier.yaml", settings | {"output_dir": str(tmp_path / "uninterrupted")}
    )
    assert run_rank("cpu", uninterrupted) == 0
    first = load_config(tmp_path / "earlier.yaml", settings | {"train.stop_after": 4})
    assert run_rank("cpu", first) == 0
    repeated = load_config(None, {key: earlier.get(key) for key in (*COMMAND, *command)})
    changed = {
        key
        for key in (*DEFAULTS_BY_TRAINING_KIND, "data.eval_fraction")
        if repeated.get(key) != earlier.get(key)
    }
    assert changed >= {"data.eval_fraction", "train.warmup_ratio"}
    assert run_rank("cpu", repeated) == 0
    assert load_config(tmp_path / "run" / "config.yaml") == earlier
    assert read_rates(tmp_path / "run") == read_rates(tmp_path / "uninterrupted")
    assert losses(tmp_path / "run") == losses(tmp_path / "uninterrupted")


def test_outage_while_changes_are_checked_is_run_error(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An outage is converted like in all other accesses to the output folder, instead of a traceback."""
    config = configured(tmp_path, corpus)

    class UnavailableCheckpoints:
        def find_latest(self) -> None:
            raise RetriesExhaustedError("s3://b/run: timeout after 60 s")

    monkeypatch.setattr(existing_run, "open_checkpoints", lambda _: UnavailableCheckpoints())
    existing = existing_run.ExistingRun(config.replaced({"train.steps": 3}), None)
    with pytest.raises(RunError, match="output_dir: s3://b/run: timeout"):
        existing_run.check_may_continue_run(tmp_path, existing, config)
