"""Callbacks, and objects of a notebook that reach the ranks."""

from __future__ import annotations

import functools
import linecache
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from portable import UserError, plugins, train
from portable.api import replace_settings_with_objects
from portable.callbacks import Run
from portable.config import RunConfig
from portable.run.rank import run_rank
from tests.parity import launched
from tests.ranks import RankPool
from tests.runs import configured, losses

HERE = __name__


@dataclass
class Watching:
    """Notes every call, logs numbers, saves once, and stops."""

    stop_at: int = 6
    seen: list[str] = field(default_factory=list, init=False)

    def on_start(self, run: Run) -> None:
        self.seen.append(f"start {run.step}")

    def on_step(self, run: Run) -> None:
        assert run.world_size >= 1
        run.log({"twice": torch.tensor(2.0 * run.step), "rank": run.rank})
        if run.step == 3 and run.rank == run.world_size - 1:
            run.save()
        if run.step == self.stop_at and run.rank == run.world_size - 1:
            run.stop()

    def on_log(self, run: Run, values: Mapping[str, float]) -> None:
        assert values["loss"] > 0 and "learning_rate" in values
        self.seen.append(f"log {run.step}")

    def on_evaluation(self, run: Run, values: Mapping[str, Any]) -> None:
        self.seen.append(f"evaluation {run.step}: {sorted(values)[-1]}")

    def on_save(self, run: Run) -> None:
        self.seen.append(f"save {run.step}")
        assert len(run.generate("a line of", max_new_tokens=2)) >= 1

    def on_end(self, run: Run) -> None:
        self.seen.append(f"end {run.step}")


def test_callback_is_called_in_order_and_stops_run(tmp_path: Path, corpus: Path, brief_runs: None) -> None:
    """In the process of the caller, the run uses the given object itself."""
    watching = Watching()
    config = configured(tmp_path / "run", corpus, train__eval_every=4, log__every_steps=2)
    result = train(config, callbacks=[watching])
    assert watching.seen == [
        "start 0", "log 1", "log 2", "save 3", "log 4", "evaluation 4: eval_perplexity", "save 4",
        "log 6", "save 6", "end 6",
    ]  # fmt: skip
    rows = [(row["step"], row["twice"], row["rank"]) for row in result.metrics if "loss" in row]
    assert rows == [(1, 2.0, 0), (2, 4.0, 0), (4, 8.0, 0), (6, 12.0, 0)]
    assert result.final is not None and not result.stopped
    again = train(configured(tmp_path / "run", corpus, train__eval_every=4, log__every_steps=2))
    assert again.metrics[-1]["step"] == 8  # without the callback, nothing ends it


def test_measure_pause_reports_no_pause_that_failed() -> None:
    """A failed evaluation or save ends the run, so that no callback is called and its error is printed."""
    run = Mock()
    with pytest.raises(OSError, match="disk full"), Run.measure_pause(run):
        raise OSError("disk full")
    run.call_callbacks.assert_not_called()
    with Run.measure_pause(run):
        pass
    run.call_callbacks.assert_called_once_with("record_pause", pytest.approx(0, abs=1))


class Odd:
    """Callback that does something forbidden in a step."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def on_save(self, run: Run) -> None:
        raise OSError("disk\nfull")

    def on_step(self, run: Run) -> None:
        if self.kind == "nothing":
            return
        if self.kind == "weights":
            with torch.no_grad():
                next(run.model.parameters()).add_(1.0)
        elif self.kind == "exit":
            sys.exit(3)
        else:
            run.log({"x": "y"})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (
            "weights",
            "on_step: changes parameters of the model, but other ranks and the optimizer do not notice",
        ),
        ("exit", r"on_step: fails \(SystemExit: 3; test_callbacks\.py, line"),
        (
            "text",
            r"on_step: fails \(TypeError: log\({'x': 'y'}\): the name must be a string, and the value",
        ),
        ("nothing", r"Odd\(.*: on_save: fails \(OSError: disk full; test_callbacks"),
    ],
)
def test_callback_with_forbidden_side_effect_is_rejected(
    kind: str, told: str, tmp_path: Path, corpus: Path
) -> None:
    config = configured(tmp_path / "run", corpus, train__callbacks=f"{HERE}:Odd(kind={kind!r})")
    with pytest.raises(UserError, match=told) as caught:
        train(config)
    assert "\n" not in str(caught.value)


class Nothing:  # this and the next: ``command_line_refused.yaml``
    pass


class Misspelt:
    def on_start(self, run: Run) -> None: ...

    def on_stop(self, run: Run) -> None: ...


# -- objects of a notebook ---------------------------------------------------------------------------------

CELL = """
from dataclasses import dataclass
import torch

SCALE = 0.5

def scaled(x):
    return SCALE * x

class Base:
    needs = ("log_probs",)

@dataclass
class Weighted(Base):
    power: float = 1.0

    def __call__(self, outputs, batch):
        losses = scaled(-outputs.log_probs) ** self.power
        return losses.sum(), (batch["labels"] != -100).sum()

tensor = torch.ones(3)

def uses_a_tensor(outputs, batch):
    return tensor.sum(), 1
"""


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Define the objects of a cell in a ``__main__`` that has no file."""
    main = type(sys)("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    file = "/nowhere/cell-1.py"
    linecache.cache[file] = (len(CELL), None, CELL.splitlines(keepends=True), file)
    exec(compile(CELL, file, "exec"), vars(main))
    yield main
    del linecache.cache[file]


def test_notebook_objects_reach_ranks(
    notebook: Any, tmp_path: Path, corpus: Path, ranks: RankPool, brief_runs: None
) -> None:
    def config(name: str) -> RunConfig:
        given = configured(tmp_path / name, corpus, train__steps=2)
        return replace_settings_with_objects(given, loss=notebook.Weighted(power=2.0))

    assert ranks.run(2, launched, config("two")) == 0
    assert run_rank("cpu", config("one")) == 0
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"))


def test_notebook_objects_that_ranks_cannot_rebuild_are_rejected(
    notebook: Any, tmp_path: Path, corpus: Path
) -> None:
    config = configured(tmp_path, corpus)
    for loss, told in (
        (notebook.uses_a_tensor, "uses_a_tensor uses tensor, a Tensor of the notebook"),
        (lambda outputs, batch: None, "is defined within a function"),
        (
            notebook.Weighted(power=torch.ones(1)),
            "power is a Tensor, which cannot be sent to the ranks",
        ),
        (functools.wraps(configured)(lambda outputs, batch: None), "another object as tests.runs:configured"),
    ):
        with pytest.raises(UserError, match="loss: ") as caught:
            replace_settings_with_objects(config, loss=loss)
        assert told in str(caught.value)


# -- identity ----------------------------------------------------------------------------------------------


def test_resume_requires_same_custom_code(
    tmp_path: Path,
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    brief_runs: None,
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "code_of_mine.py"
    text = (
        "def loss(outputs, batch):\n"
        "    valid = batch['labels'] != -100\n"
        "    return -outputs.log_probs.sum() * FACTOR, valid.sum()\n"
        "loss.needs = ('log_probs',)\n"
        "class Idle:\n"
        "    def on_start(self, run): pass\n"
    )

    def trained(code: str, steps: int, **more: Any) -> None:
        file.write_text(code)
        sys.modules.pop("code_of_mine", None)
        linecache.checkcache()
        plugins._objects.clear()
        named = {"train__loss": "code_of_mine:loss", **more}
        train(configured(tmp_path / "run", corpus, train__stop_after=steps, **named))

    trained("FACTOR = 1\n" + text, 2)
    trained("# a comment\nFACTOR = 1\n" + text, 4, train__callbacks="code_of_mine:Idle")
    with pytest.raises(
        UserError, match=r"step-000004 was trained with other code of train\.loss; restore that"
    ):
        trained("FACTOR = 2\n" + text, 6)
    with pytest.raises(UserError, match=r"contains another run \(train\.loss"):
        trained("FACTOR = 1\n" + text, 6, train__loss=None)
