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
        elif self.kind.startswith("log "):
            run.log({self.kind.removeprefix("log "): 1.0})
        else:
            run.log({"x": "y"})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (
            "weights",
            "on_step: changes parameters of the model, but the changes do not reach the optimizer",
        ),
        ("exit", r"on_step: raises an error \(SystemExit: 3; test_callbacks\.py, line"),
        (
            "text",
            r"on_step: raises an error \(TypeError: log\({'x': 'y'}\): the name must be a string",
        ),
        *(
            (
                f"log {name}",
                rf"^train\.callbacks: logs a value under the name of the metric {name}, .*; rename",
            )
            for name in ("loss", "data_wait", "mfu", "mean_token_accuracy")
        ),
        ("nothing", r"Odd\(.*: on_save: raises an error \(OSError: disk full; test_callbacks"),
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
import functools
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

def uses_local_names(outputs, tensor):
    return [outputs + tensor for wrapped in (1, 2)] + [(lambda wrapped: wrapped)(outputs)]

class Holder:
    tensor = 3

    def __call__(self, outputs, batch):
        wrapped = outputs * batch
        return wrapped + self.tensor

class CopiesGlobal:
    SCALE = SCALE

    def __call__(self, outputs, batch):
        return self.SCALE

def nests_functions(outputs, batch):
    def inner():
        return scaled(outputs)
    return inner()

scaled_again = scaled

def uses_other_name(outputs, batch):
    return scaled_again(outputs) + scaled(batch)

def counts_down(number):
    return number and next_count(number - 1)

next_count = counts_down

def halves(number):
    return number if number < 1 else halves_later(number)

def halves_later(number):
    return other_halves(number / 2)

other_halves = halves

def keep_result(function):
    @functools.wraps(function)
    def wrapper(*values):
        return function(*values)
    return wrapper

wrapped = keep_result(scaled)

def uses_wrapped(outputs, batch):
    return wrapped(outputs)
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


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("uses_other_name", (2, 4), 3.0),
        ("counts_down", (3,), 0),
        ("halves", (4,), 0.5),
    ],
)
def test_notebook_source_defines_other_names_of_functions(
    notebook: Any, name: str, arguments: tuple[int, ...], result: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call_on_rank(getattr(notebook, name), arguments, monkeypatch) == result


@pytest.mark.parametrize(
    ("name", "result"),
    [
        ("uses_local_names", [6, 6, 2]),
        ("Holder", 11),
        ("CopiesGlobal", 0.5),
        ("nests_functions", 1.0),
    ],
)
def test_notebook_source_ignores_globals_with_names_of_local_variables(
    notebook: Any, name: str, result: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call_on_rank(getattr(notebook, name), (2, 4), monkeypatch) == result


def call_on_rank(function: Any, arguments: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Register a function of the notebook, load it again from its source code, and call it."""
    monkeypatch.setattr(plugins, "_objects", {})
    sources: dict[str, str] = {}
    name = plugins.register_object("loss", function, sources)
    plugins._objects.clear()
    plugins.install_notebook_modules(sources)
    try:
        return plugins.load_plugin("train.loss", name)(*arguments)
    finally:
        for module in sources:
            del sys.modules[module]


def test_notebook_objects_that_ranks_cannot_rebuild_are_rejected(
    notebook: Any, tmp_path: Path, corpus: Path
) -> None:
    config = configured(tmp_path, corpus)
    for loss, told in (
        (notebook.uses_a_tensor, "uses_a_tensor uses the variable tensor (type Tensor) of the notebook"),
        (notebook.uses_wrapped, "uses_wrapped uses the variable wrapped (type function) of the notebook"),
        (lambda outputs, batch: None, "is a lambda, which the ranks cannot import"),
        (
            notebook.Weighted(power=torch.ones(1)),
            "power is an object of type Tensor, which cannot be sent to the ranks",
        ),
        (
            functools.wraps(configured)(lambda outputs, batch: None),
            "cannot import the object as tests.runs:configured",
        ),
    ):
        with pytest.raises(UserError, match="loss: ") as caught:
            replace_settings_with_objects(config, loss=loss)
        assert told in str(caught.value)


@dataclass
class Pairs:
    beta: float = 0.1
    whole = True

    def __call__(self, outputs: Any, batch: Any) -> tuple[Any, Any]:
        return outputs, batch


def add_margin(outputs: Any, batch: Any, margin: float = 0.0) -> tuple[Any, Any]:
    return outputs + margin, batch


setattr(add_margin, "needs", ("log_probs",))  # noqa: B010


class FailingLoss:
    def __init__(self, beta: float) -> None:
        raise ValueError("beta is wrong")


@pytest.mark.parametrize(
    ("partial", "attribute"),
    [
        (functools.partial(Pairs, beta=0.2), "whole"),
        (functools.partial(Pairs, beta=0.2), "beta"),
        (functools.partial(add_margin, margin=1.0), "needs"),
    ],
)
def test_registered_partial_equals_object_of_ranks(
    partial: functools.partial[Any], attribute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugins, "_objects", {})
    name = plugins.register_object("loss", partial, {})
    registered = plugins.load_plugin("train.loss", name)
    plugins._objects.clear()
    imported = plugins.load_plugin("train.loss", name)
    assert type(registered) is type(imported)
    assert getattr(registered, attribute) == getattr(imported, attribute)
    assert registered(2.0, 3) == imported(2.0, 3)


@pytest.mark.parametrize(
    ("user_object", "message"),
    [
        (
            functools.partial(FailingLoss, beta=0.2),
            "loss: FailingLoss: cannot be created (ValueError: beta is wrong",
        ),
        (FailingLoss, "loss: FailingLoss: missing a required argument: 'beta'"),
        (functools.partial(Pairs(), batch=1), "loss: is a functools.partial of an object of type Pairs"),
    ],
)
def test_register_object_rejects_object_that_ranks_cannot_create(
    user_object: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugins, "_objects", {})
    with pytest.raises(UserError) as caught:
        plugins.register_object("loss", user_object, {})
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("arguments", ["(a=1)(b=2)", "(a=1).b()", "(a=1, a=2)", "(1)", "(**{})"])
def test_parse_plugin_spec_rejects_ambiguous_arguments(arguments: str) -> None:
    with pytest.raises(ValueError, match="the arguments cannot be read"):
        plugins.parse_plugin_spec(f"module:name{arguments}")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 17179869184 bytes."),
    ],
    ids=["host", "device", "allocator", "xla"],
)
def test_convert_user_errors_passes_memory_errors(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, plugins.convert_user_errors("train.loss"):
        raise error
    assert caught.value is error


def test_convert_user_errors_converts_value_error_about_memory() -> None:
    message = r"train\.loss: raises an error \(ValueError: out of memory;"
    with pytest.raises(UserError, match=message), plugins.convert_user_errors("train.loss"):
        raise ValueError("out of memory")


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
        UserError, match=r"the code of train\.loss has changed since .*step-000004 was saved; restore the"
    ):
        trained("FACTOR = 2\n" + text, 6)
    with pytest.raises(UserError, match=r"contains another run \(train\.loss"):
        trained("FACTOR = 1\n" + text, 6, train__loss=None)
