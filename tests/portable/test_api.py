"""Training from Python: return values of the functions, and the notebook of the docs."""

from __future__ import annotations

import doctest
import json
import os
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

import portable
from portable import Result, train
from portable.config.yaml_writer import dump_yaml
from portable.loop import train_step
from portable.progress import StepResult
from tests.runs import configured
from tests.zygote import Zygote

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs" / "notebook.ipynb"


def test_train_returns_checkpoint_metrics_and_final(tmp_path: Path, corpus: Path) -> None:
    half = train(configured(tmp_path / "run", corpus, train__stop_after=4))
    assert half.final is None and half.checkpoint is not None and half.checkpoint.name == "step-000004"
    whole = train(configured(tmp_path / "run", corpus))
    assert isinstance(whole, Result) and not whole.stopped
    assert [row["step"] for row in whole.metrics if "loss" in row] == list(range(1, 9))
    assert whole.final == tmp_path / "run" / "final" and (whole.final / "model.safetensors").is_file()


def test_train_saves_on_interrupt_and_resumes(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook's stop button sends SIGINT to the process of the notebook."""
    taken = 0

    def interrupted(*given: Any, **named: Any) -> StepResult:
        nonlocal taken
        taken += 1
        if taken == 3:
            os.kill(os.getpid(), 2)
        return train_step(*given, **named)

    with monkeypatch.context() as patch:
        patch.setattr("portable.loop.train_step", interrupted)
        first = train(configured(tmp_path / "run", corpus))
    assert first.stopped and first.final is None
    assert first.checkpoint is not None and first.checkpoint.name == "step-000003"
    assert not train(configured(tmp_path / "run", corpus)).stopped


def test_public_docstring_examples_run(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples run next to a ``run.yaml``, in the order in which a user would call the functions."""
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(dump_yaml(configured(Path("runs/quickstart"), corpus)))
    finder = doctest.DocTestFinder(recurse=False)
    names = ("load_config", "plan", "train", "open_checkpoint", "write_checkpoint", "convert")
    assert {name for name in portable.__all__ if name.islower()} == set(names)
    for name in names:
        (example,) = finder.find(getattr(portable, name), name, globs={})
        assert example.examples, f"the docstring of {name} has no example"
        assert doctest.DocTestRunner().run(example).failed == 0


@pytest.mark.slow
def test_docs_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zygote: Zygote) -> None:
    """All cells run in a real kernel, which is a fork of the zygote."""
    kernel = tmp_path / "jupyter" / "kernels" / "zygote" / "kernel.json"
    kernel.parent.mkdir(parents=True)
    started = [str(zygote.folder / "python"), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    kernel.write_text(json.dumps({"argv": started, "display_name": "Python", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    root = str(NOTEBOOK.parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook: Any = nbformat.reads(NOTEBOOK.read_text("utf-8"), as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "outputs are not kept in the repository"
    # Processes are started once, for the objects that the notebook defines.
    (moved,) = (
        cell for cell in notebook.cells if "train(load_config(None, settings), nproc=2)" in cell.source
    )
    moved.source = moved.source.replace(", nproc=2", "")
    NotebookClient(
        notebook, timeout=300, kernel_name="zygote", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("<iframe" in output.get("data", {}).get("text/html", "") for output in shown) == 2  # both legs
    printed = "".join(output.get("text", "") for output in shown if output.get("name") == "stdout")
    assert "did you mean train.learning_rate" in printed
    assert "eval_surprise" in printed  # a loss, a metric and records of the notebook, on two ranks
    assert "model.embed_tokens.weight" in printed
    assert (tmp_path / "converted" / "model.safetensors").is_file()
    assert (tmp_path / "runs" / "notebook" / "report.html").is_file()
