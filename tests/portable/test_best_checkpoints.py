"""Evaluation on separate data, the best checkpoints and early stopping, in complete runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest

from portable.checkpoint.store import open_checkpoints
from portable.checkpoint.trainer_state import TrainerState
from portable.data.dataset import build_data
from portable.data.samples.order import EpochIndex
from portable.errors import UserError
from portable.evaluation.best_tracker import BestTracker, EvalDecision, EvalHistory
from portable.reporting.metrics import read_metrics
from portable.run import evaluation
from portable.run.rank import run_rank
from tests.parity import launched
from tests.portable.data_support import Settings, write_jsonl
from tests.ranks import RankPool
from tests.runs import configured

pytestmark = pytest.mark.usefixtures("brief_runs")

VALUES = {1: 5.0, 2: 3.0, 3: 2.0, 4: 2.5, 5: 2.4, 6: 1.9, 7: 1.95, 8: 1.99}
"""Evaluation loss after each step, in tests that use the fixture."""


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, float]]:
    """Let evaluations return ``VALUES``. Yields the number of evaluations of each step."""
    counted: dict[int, float] = {}
    real = evaluation.evaluate_all_sources

    def values(prepared: Any, engine: Any, over: Any = iter) -> Mapping[str, float]:
        real(prepared, engine, over)
        return {"eval_loss": VALUES[at[0]]}

    at = [0]
    call = evaluation.EvaluationCallback.__call__

    def called(self: Any, progress: Any, *, counts: bool) -> EvalDecision:
        at[0] = progress.step
        counted[progress.step] = counted.get(progress.step, 0) + 1
        return call(self, progress, counts=counts)

    monkeypatch.setattr(evaluation, "evaluate_all_sources", values)
    monkeypatch.setattr(evaluation.EvaluationCallback, "__call__", called)
    yield counted


def leg(folder: Path | str, corpus: Path, **overrides: Any) -> int:
    given = {"train__eval_every": 1, "checkpoint__every_steps": 4} | overrides
    return run_rank("cpu", configured(folder, corpus, **given))


def kept(folder: Any) -> list[int]:
    return [step for step, _ in open_checkpoints(folder).list_complete()]


# -- which checkpoints stay --------------------------------------------------------------------------------


def test_keep_best_keeps_best_and_last_checkpoints(told: Any, tmp_path: Path, corpus: Path) -> None:
    """Only `keep_best` saves steps 6 and 7. Step 3 was the best for a while.

    ``final`` is the best checkpoint.
    """
    from portable.converters.cli import main as convert

    given = {"checkpoint__keep": 1, "checkpoint__keep_best": 2, "checkpoint__export_best": True}
    assert leg(tmp_path, corpus, **given) == 0
    assert kept(tmp_path) == [6, 7, 8]
    best = TrainerState.read(tmp_path / "checkpoints" / "step-000008").eval_history.best
    assert best == [(6, 1.9), (7, 1.95)]
    assert convert([str(tmp_path / "checkpoints" / "step-000006"), str(tmp_path / "six"), "--quiet"]) == 0
    final, six = (tmp_path / name / "model.safetensors" for name in ("final", "six"))
    assert final.read_bytes() == six.read_bytes()


# -- early stopping ----------------------------------------------------------------------------------------

PATIENT: dict[str, Any] = {"train__early_stopping_patience": 2, "checkpoint__keep_best": 1}


def test_early_stopping_ends_run_after_patience(told: Any, tmp_path: Path, corpus: Path) -> None:
    """The run ends after steps 4 and 5, neither better than 3, and exports a model.

    A repeated command does nothing.
    """
    assert leg(tmp_path, corpus, **PATIENT) == 0
    assert kept(tmp_path)[-1] == 5 and (tmp_path / "final").exists()
    before = (tmp_path / "metrics.jsonl").read_text()
    assert leg(tmp_path, corpus, **PATIENT) == 0
    assert (tmp_path / "metrics.jsonl").read_text() == before and kept(tmp_path)[-1] == 5
    # With more patience, the run continues to step 8.
    assert leg(tmp_path, corpus, **PATIENT | {"train__early_stopping_patience": 3}) == 0
    assert kept(tmp_path)[-1] == 8 and set(told.values()) == {1}


def test_early_stopping_of_resumed_run_ends_at_same_step(told: Any, tmp_path: Path, corpus: Path) -> None:
    """A run resumed in another folder keeps its patience, but not the best checkpoints of the old folder."""
    assert leg(tmp_path, corpus, **PATIENT, train__stop_after=4) == 0
    assert told == dict.fromkeys(range(1, 5), 1)
    moved = PATIENT | {"checkpoint__resume": str(tmp_path / "checkpoints" / "step-000004")}
    assert leg(tmp_path / "two", corpus, **moved, checkpoint__export_best=True) == 0
    assert kept(tmp_path / "two") == [5] and (tmp_path / "two" / "final").exists()
    told.clear()
    assert leg(tmp_path, corpus, **PATIENT) == 0
    assert kept(tmp_path)[-1] == 5 and 3 in kept(tmp_path) and told == {5: 1}


def test_early_stopping_ignores_evaluation_at_end_of_launch(told: Any, tmp_path: Path, corpus: Path) -> None:
    """A run in one launch does not evaluate at step 3. If it counted, step 4 would not be an improvement."""
    given = PATIENT | {"train__early_stopping_patience": 1, "train__eval_every": 2}
    assert leg(tmp_path, corpus, **given, train__stop_after=3) == 0
    assert told == {2: 1, 3: 1}
    assert leg(tmp_path, corpus, **given) == 0
    assert kept(tmp_path)[-1] == 8
    assert TrainerState.read(tmp_path / "checkpoints" / "step-000008").eval_history.best == [(6, 1.9)]


@pytest.mark.parametrize("at", [3, 5])
def test_early_stopping_of_killed_run_ends_at_same_step(
    at: int, told: Any, tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kill follows the evaluation, before or during the write of its checkpoint."""
    with monkeypatch.context() as patched:
        real = evaluation.EvaluationCallback.__call__

        def evaluates(self: Any, progress: Any, *, counts: bool) -> EvalDecision:
            decision = real(self, progress, counts=counts)
            if progress.step == at:
                raise KeyboardInterrupt
            return decision

        patched.setattr(evaluation.EvaluationCallback, "__call__", evaluates)
        with pytest.raises(KeyboardInterrupt):
            leg(tmp_path, corpus, **PATIENT)
    assert leg(tmp_path, corpus, **PATIENT) == 0
    assert kept(tmp_path)[-1] == 5 and 3 in kept(tmp_path)
    rows = [row["step"] for row in read_metrics(tmp_path) if "eval_loss" in row]
    assert rows == [1, 2, 3, 4, 5]


def test_early_stopping_makes_up_for_evaluation_after_signal(
    told: Any, tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launch ends without the evaluation that was due. The next launch runs it, and it counts."""
    # The flag is read before and after the work of each step.
    asked = chain(repeat(False, 7), repeat(True))
    with monkeypatch.context() as patched:
        requested = property(lambda _: next(asked), lambda *_: None)
        patched.setattr("portable.loop.StopSignals.requested", requested, raising=False)
        assert leg(tmp_path, corpus, **PATIENT) == 75
    assert 4 not in told and kept(tmp_path)[-1] == 4
    assert leg(tmp_path, corpus, **PATIENT) == 0
    assert kept(tmp_path)[-1] == 5 and told == dict.fromkeys(range(1, 6), 1)


def test_best_tracker_applies_threshold_and_counts_patience() -> None:
    eval_history = EvalHistory()
    best_tracker = BestTracker("eval_loss", "min", keep_best=1, patience=2, threshold=0.1)
    for step, value in enumerate([3.0, 2.95, 2.86, 2.84, float("nan")], start=1):
        best_tracker(eval_history, step, {"eval_loss": value})
    assert (eval_history.best, eval_history.mark, eval_history.waited) == ([(4, 2.84)], 2.84, 4)


# -- separate evaluation data
# ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write a file with another field, and a file like the training data."""
    folder = tmp_path_factory.mktemp("sources")
    found = {"news": folder / "news.jsonl", "code": folder / "code.jsonl"}
    write_jsonl(found["news"], ({"body": f"line {i} of a small model that reads text"} for i in range(20)))
    write_jsonl(found["code"], ({"text": f"{i}: the loss falls while"} for i in range(30)))
    return found


def own(sources: dict[str, Path]) -> dict[str, Any]:
    return {
        "data__eval": {
            "news": {"source": str(sources["news"]), "text_field": "body"},
            "code": {"source": str(sources["code"])},
        }
    }


def test_best_metric_may_name_evaluation_source(
    sources: dict[str, Path], tmp_path: Path, corpus: Path
) -> None:
    given = own(sources) | {"data__eval_fraction": 0.1}
    best = {"checkpoint__keep_best": 1, "checkpoint__best_metric": "eval_accuracy/code"}
    assert leg(tmp_path, corpus, **given, **best, train__steps=2) == 0
    rows = [row for row in read_metrics(tmp_path) if "eval_loss/news" in row]
    names = {"loss", "perplexity", "accuracy"}
    assert {name for name in rows[-1] if name.startswith("eval_")} == {
        f"eval_{name}/{source}" for name in names for source in ("news", "code", "held_out")
    }
    state = TrainerState.read(open_checkpoints(tmp_path).find_latest() or tmp_path)
    assert state.metadata["evaluation_data"].keys() == {"news", "code"}
    assert (state.eval_history.metric, state.eval_history.mode) == ("eval_accuracy/code", "max")


def test_evaluation_source_uses_classes_of_training_data(tmp_path: Path) -> None:
    def written(name: str, labels: list[Any]) -> str:
        rows = ({"text": f"text {i} " * 3, "label": label} for i, label in enumerate(labels))
        return str(write_jsonl(tmp_path / name, rows))

    def evals(training: list[Any], labels: list[Any]) -> list[Any]:
        settings = Settings(
            source=written("train.jsonl", training),
            eval={"source": written("eval.jsonl", labels)},  # type: ignore[dict-item]
            cache_dir=tmp_path / "cache",
            packing=False,
            eval_fraction=0,
        )
        data = build_data(settings, task="sequence-classification")
        assert data.first_eval is not None
        found: list[Any] = data.first_eval.build_batch([EpochIndex(0, i) for i in range(len(labels))])[
            "labels"
        ].tolist()
        return sorted(found)

    assert evals(["a", "b", "c"] * 3, ["c", "c", "C"]) == [2, 2, 2]  # one class of three
    assert evals([3, 7, 9] * 3, [9, 7]) == [1, 2]
    assert evals([["a"], ["a", "b"], []] * 3, [["b"], []]) == [[0.0, 0.0], [0.0, 1.0]]
    with pytest.raises(UserError) as caught:
        evals(["a", "b"] * 3, ["a", "z"])
    assert str(caught.value).startswith(
        "data.eval.label_field: the label 'z' is not among the classes of the training data (a, b)"
    )


def test_best_checkpoints_and_early_stopping_match_on_two_ranks(
    sources: dict[str, Path], tmp_path: Path, corpus: Path, ranks: RankPool
) -> None:
    """Two ranks decide as one does, with real evaluations."""
    given = own(sources) | {"train__eval_every": 1, "train__steps": 6, "train__learning_rate": 3e-2}
    given |= {"checkpoint__keep": 1, "checkpoint__keep_best": 1, "checkpoint__best_metric": "eval_loss/code"}
    given |= {"train__early_stopping_patience": 1, "train__early_stopping_threshold": 0.3}
    found = []
    for size in (1, 2):
        folder = tmp_path / str(size)
        config = configured(folder, corpus, strategy="full_shard", train__micro_batch_size=1, **given)
        assert ranks.run(size, launched, config) == 0
        found.append((kept(folder), read_metrics(folder)[-1]["eval_loss/code"]))
    assert found[0][0] == found[1][0] and found[0][1] == pytest.approx(found[1][1], rel=1e-5)
    assert found[0][0][-1] < 6  # it ended early
