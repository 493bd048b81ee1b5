"""lm-evaluation-harness, if installed, on ``final`` and in a callback, with a custom task."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from portable.reporting.metrics import read_metrics
from portable.run.rank import run_rank
from tests.runs import configured

pytestmark = pytest.mark.large("lm_eval")  # 300 MB, with scikit-learn, scipy and more
PAIRS = [("the loss", "falls", "zebra"), ("a small", "text", "model"), ("one line of", "text", "a")]


def task_in(folder: Path) -> Path:
    records = folder / "words.jsonl"
    with records.open("w") as file:
        for question, first, second in PAIRS:
            print(json.dumps({"question": question, "choices": [first, second], "answer": 0}), file=file)
    (folder / "tasks").mkdir()
    task = {
        "task": "words",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(records)}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}],
    }
    (folder / "tasks" / "words.yaml").write_text(yaml.safe_dump(task))
    return folder / "tasks"


def test_eval_harness_callback_matches_command(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    tasks = task_in(tmp_path)
    callback = f"eval_harness:EvalHarness(tasks=['words'], include_path='{tasks}')"
    config = configured(
        tmp_path / "run", corpus, train__steps=4, train__eval_every=2, train__callbacks=callback
    )
    assert run_rank("cpu", config) == 0
    logged = [
        row["harness/words/acc"] for row in read_metrics(tmp_path / "run") if "harness/words/acc" in row
    ]

    from eval_harness import EvalHarness
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    final = tmp_path / "run" / "final"
    found = simple_evaluate(
        model="hf",
        model_args=f"pretrained={final}",
        device="cpu",
        tasks=["words"],
        task_manager=TaskManager(include_path=str(tasks)),
        bootstrap_iters=0,
    )
    assert found is not None
    # The evaluation after the last step saw the weights of the export; step 4 is logged before it.
    assert len(logged) == 1 and 0 <= logged[0] <= 1
    model, tokens = AutoModelForCausalLM.from_pretrained(final), AutoTokenizer.from_pretrained(final)
    scores = EvalHarness(["words"], str(tasks)).scores(model, tokens)
    assert scores == {"words/acc": pytest.approx(found["results"]["words"]["acc,none"])}
