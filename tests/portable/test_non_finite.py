"""A loss or gradient that is not finite never reaches a weight or a checkpoint, on any engine.

For one sample, the model's first layer returns infinity or a gradient that is not finite, as a damaged record
or an overflow can. It occurs at a step at which nothing is logged.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from portable.checkpoint.trainer_state import TrainerState
from portable.config import RunConfig
from portable.data.samples.order import locate_sample
from portable.errors import ReportedElsewhereError, RunError
from portable.model import build as models
from portable.optim.non_finite_updates import (
    INITIAL_COUNTERS,
    MAX_STREAK,
    UpdateHealth,
    count_update_and_decide_skip,
)
from portable.registry import create_backend
from portable.reporting.metrics import read_events, read_metrics
from portable.run.prepare import prepare_run
from portable.run.rank import LaunchMode, run_rank
from portable.run.resolve import resolve_run
from tests.engines import Engines
from tests.runs import TINY_MODEL, configured
from tests.views import View, assert_same_bits, view

GLOBAL_BATCH, BAD_STEP, BAD_ROW = 8, 3, 6  # the row is the last rank's
BAD_SAMPLE = (BAD_STEP - 1) * GLOBAL_BATCH + BAD_ROW
ENGINES: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "fused backward": (
        1,
        {"train__fused_backward": True, "train__max_grad_norm": None, "train__micro_batch_size": 8},
    ),
    "full_shard": (2, {"strategy": "full_shard"}),
    "full_shard, offload": (2, {"strategy": "full_shard", "memory__offload_params": "cpu"}),
    "zero1, bf16": (2, {"strategy": "zero1", "precision": "bf16"}),
    "zero2, offload": (2, {"strategy": "zero2", "memory__offload_optimizer": "cpu"}),
    "zero3": (2, {"strategy": "zero3"}),
    "xla": (2, {"backend": "xla", "model__config": {**TINY_MODEL, "num_hidden_layers": 1}}),  # to compile
}


def settings(name: str, folder: Path, corpus: Path, **more: Any) -> RunConfig:
    common: dict[str, Any] = {
        "train__global_batch_size": GLOBAL_BATCH,
        "train__micro_batch_size": 2,
        "train__steps": 6,
        "checkpoint__every_steps": 2,
        "checkpoint__export": False,
        "checkpoint__keep": None,
        "log__every_steps": 5,
        "log__sample_tokens": 0,
    }
    return configured(folder, corpus, **{**common, **ENGINES[name][1], **more})


@pytest.fixture(scope="module")
def bad_tokens(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> list[int]:
    """Return the sample that breaks the model."""
    config = settings("one rank", tmp_path_factory.mktemp("data"), corpus)
    backend = create_backend("cpu")
    samples = prepare_run(resolve_run(config, backend.name), backend).data.train
    batch = samples.build_batch([locate_sample(BAD_SAMPLE, len(samples), config.seed)])
    tokens: list[int] = batch["input_ids"][0].tolist()
    return tokens


def leg(config: RunConfig, kind: str, bad_tokens: list[int], step: int | None = None) -> tuple[str, str]:
    """Return the output of a launch to stdout and stderr, and its error, if there was one.

    The model fails for ``bad_tokens``. If there are none, it fails for every sample.
    """
    build, out, err = models.build_model_on_meta, io.StringIO(), io.StringIO()

    def breaks(_: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        if kind == "none":
            return output
        tokens = inputs[0]
        wanted = torch.tensor(bad_tokens, device=tokens.device)
        bad = (tokens == wanted).all(dim=-1)[:, None, None] if bad_tokens else tokens[:, :, None] >= 0
        if kind == "loss":
            return output.masked_fill(bad, torch.inf)
        # The slope of the root is infinite at 0, and the root itself too small to be seen.
        return output + 1e-30 * (output - output.detach() + (~bad).to(output.dtype)).sqrt()

    def build_and_break(*arguments: Any) -> Any:
        built = build(*arguments)
        built.get_input_embeddings().register_forward_hook(breaks)
        return built

    with (
        patch.object(models, "build_model_on_meta", build_and_break),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            run_rank(config.backend, config, LaunchMode(replay=step))
        except (RunError, ReportedElsewhereError) as error:
            print(f"error: {error}", file=err)
    return out.getvalue(), err.getvalue()


Run = Callable[..., tuple[str, str]]


@pytest.fixture
def run(corpus: Path, engines: Engines, bad_tokens: list[int]) -> Run:
    """Run a launch of an engine over a dataset with one bad sample.

    ``test_engines`` checks on every engine that the weights do not change. The rest is checked on a few
    engines.
    """

    def one(
        name: str, folder: Path, kind: str, step: int | None = None, bad: Any = bad_tokens, **more: Any
    ) -> Any:
        config = settings(name, folder, corpus, **more)
        return engines.run(name, ENGINES[name][0], leg, config, kind, bad, step)

    return one


def stored(folder: Path, step: int) -> View:
    return view(folder / "checkpoints" / f"step-{step:06d}")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("one rank", "loss"),
        ("fused backward", "loss"),
        ("fused backward", "gradients"),
        ("full_shard, offload", "loss"),
        ("zero1, bf16", "loss"),
        ("full_shard", "gradients"),
        ("zero3", "gradients"),
        ("xla", "gradients"),
    ],
)
def test_non_finite_loss_or_gradient_stops_run(name: str, kind: str, run: Run, tmp_path: Path) -> None:
    _, err = run(name, tmp_path, kind)
    error = err.splitlines()[-1]
    first, last = (BAD_STEP - 1) * GLOBAL_BATCH, BAD_STEP * GLOBAL_BATCH - 1
    what = "loss is" if kind == "loss" else "gradients are"
    assert error.startswith(f"error: step {BAD_STEP} (samples {first} to {last}): the {what} not finite"), err
    assert f"last good checkpoint: {tmp_path}/checkpoints/step-000002;" in error
    assert f"portable-train --config {tmp_path}/config.yaml --replay {BAD_STEP}" in error
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000002"]
    assert all(np.isfinite(value).all() for value in stored(tmp_path, 2).values())

    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    out, _ = run(name, tmp_path, kind, BAD_STEP)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    told = out.splitlines()
    assert told[0].startswith(f"step {BAD_STEP}: samples {first} to {last}, learning rate ")
    rows = [line for line in told if ": loss " in line]
    assert sum(int(row.split(" over ")[1].split()[0]) for row in rows) == GLOBAL_BATCH * 32
    if kind == "loss":
        assert [("loss nan" in row) for row in rows].count(True) == 1
        (module,) = (line for line in told if "first non-finite output" in line)
        assert module.endswith(": model.embed_tokens (Embedding)")
        (sample,) = (line for line in told if line.startswith("sample "))
        assert sample.startswith(f"sample {BAD_SAMPLE}, from document ")
    else:
        assert not any("nan" in row or "inf" in row for row in rows)
        assert told[-1].startswith("1 of ")
        assert told[-1].endswith("the backward pass reaches model.embed_tokens.weight first")


def raise_rate(step: int, total_steps: int) -> float:
    """Multiply the rate beyond the bounds of the schema, as a custom schedule can by mistake."""
    return 1e35


@pytest.mark.parametrize("name", ENGINES)
def test_non_finite_weights_are_not_saved(name: str, run: Run, tmp_path: Path) -> None:
    """The loss and the gradients of that step are finite, because they come from the weights before it."""
    diverging: dict[str, Any] = {
        "train__learning_rate": 1e3,
        "train__weight_decay": 1e3,
        "train__schedule": f"{__name__}:raise_rate",
    }
    _, err = run(
        name,
        tmp_path,
        "none",
        train__max_grad_norm=None,
        checkpoint__every_steps=1,
        train__steps=2,
        **diverging,
    )
    error = err.splitlines()[-1]
    assert error.startswith("error: step 1: the optimizer state or the weights of model."), err
    assert "last good checkpoint: none yet; lower train.learning_rate" in error
    assert not list(tmp_path.glob("checkpoints/step-*"))


@pytest.mark.parametrize("name", ["full_shard, offload", "zero2, offload", "xla"])
def test_non_finite_update_is_skipped(name: str, run: Run, tmp_path: Path) -> None:
    whole, legs = tmp_path / "whole", tmp_path / "legs"
    skip: dict[str, Any] = {"train__on_non_finite": "skip"}
    _, err = run(name, whole, "loss", **skip)
    # On a busy machine there is another warning: steps wait for data.
    (warning,) = (line for line in err.splitlines() if line.startswith("warning: step "))
    assert warning.startswith(f"warning: step {BAD_STEP} (samples ")
    assert "error" not in err
    (skipped,) = (event for event in read_events(whole) if event["event"] == "skip")
    assert (skipped["step"], skipped["count"]) == (4, 1)  # the save that reads the counters of the device
    rows = read_metrics(whole)
    assert [(row["step"], row["skipped_steps"]) for row in rows if "loss" in row] == [(1, 0), (5, 1), (6, 1)]

    run(name, legs, "loss", **skip, train__stop_after=BAD_STEP - 1)
    run(name, legs, "loss", **skip, train__stop_after=BAD_STEP)
    before, after = stored(legs, BAD_STEP - 1), stored(legs, BAD_STEP)
    assert_same_bits(before, after)
    steps = {float(value) for name, value in after.items() if name.endswith(".step")}
    assert steps == {float(BAD_STEP - 1)}
    state = TrainerState.read(legs / "checkpoints" / f"step-{BAD_STEP:06d}")
    assert (state.step, state.samples, state.skipped_steps) == (BAD_STEP, BAD_STEP * GLOBAL_BATCH, 1)
    run(name, legs, "loss", **skip)
    assert_same_bits(stored(whole, 6), stored(legs, 6))
    assert [row["skipped_steps"] for row in read_metrics(legs) if row["step"] == 6 and "loss" in row] == [1]
    assert all(np.isfinite(value).all() for value in stored(whole, 6).values())
    assert any(not np.array_equal(value, after[name]) for name, value in stored(whole, 6).items())


@pytest.mark.parametrize("name", ["full_shard", "zero3", "xla"])
def test_non_finite_streak_ends_run(name: str, run: Run, tmp_path: Path) -> None:
    _, err = run(name, tmp_path, "loss", bad=[], train__on_non_finite="skip", train__steps=30)
    error = err.splitlines()[-1]
    assert error.startswith("error: step 1 (samples 0 to 7): the loss is not finite; ")
    assert "; the updates of this step and the next 9 steps were skipped; " in error
    newest = max(int(path.name[5:]) for path in (tmp_path / "checkpoints").iterdir())
    assert newest < MAX_STREAK


def test_count_update_and_decide_skip_tracks_streaks() -> None:
    """The counters follow from the values passed in."""
    account = torch.tensor(INITIAL_COUNTERS)
    losses = [1.0, torch.nan, 1.0, torch.inf, 1.0, 1.0, 1.0, 1.0]
    bad = [False, True, False, True, True, True, False, True]
    seen = []
    for loss, wrong in zip(losses, bad, strict=True):
        account, left_out = count_update_and_decide_skip(
            account, is_non_finite=torch.tensor(wrong), loss=torch.tensor(loss), max_streak=3
        )
        seen.append(bool(left_out))
    assert seen == [False, True, False, True, True, True, True, True]  # nothing is updated after the third
    assert UpdateHealth.from_counters(account.tolist(), 3) == UpdateHealth(6, 3, bad_loss=True, halted=3)
