"""The contract of every engine, compared with a loop in plain torch.

There is one exercise per kind of engine: train on padded samples with accumulation, evaluate, generate, save,
skip an update that is not finite, and release all memory. ``portable/test_moves.py`` tests moves.
"""

from __future__ import annotations

import functools
import gc
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from portable.config import RunConfig
from portable.converters import open_checkpoint
from portable.evaluation.metrics import evaluate
from portable.run.batches import build_eval_loader
from tests.engines import ENGINES, Engines, accumulated
from tests.gpu.test_parity import LONG, STEPS, plain_losses
from tests.parity import opened, take_steps
from tests.promises import record
from tests.ranks import RankPool
from tests.runs import TINY_MODEL, configured, write_pretrained
from tests.views import assert_same_bits, assert_same_view, view

COMMON: dict[str, Any] = {
    "data__packing": False,
    "train__global_batch_size": 12,
    "train__steps": STEPS,
}
LOSSES, VIEWS = 1e-5, 1e-3
"""Relative tolerance of losses, and tolerance of stored tensors relative to their largest elements."""


@dataclass(frozen=True)
class Seen:
    """Results of an exercise.

    Attributes:
        losses: Loss of each step.
        norms: Gradient norm of each step.
        evaluated: Metrics on the held-out samples, after the last step.
        continued: Tokens of a generated text, with the prompt.
        skipped: Updates that the engine has skipped, after an update whose loss was not finite.
        models: Number of models in this process before and after the exercise.
    """

    losses: list[float]
    norms: list[float]
    evaluated: dict[str, float]
    continued: list[int]
    skipped: int
    models: tuple[int, int]


def models_present() -> int:
    gc.collect()
    return sum(issubclass(type(thing), PreTrainedModel) for thing in gc.get_objects())


def exercise(config: RunConfig, folder: Path) -> Seen:
    """On a rank, train and save into ``folder / "trained"`` and, after a bad loss, ``folder / "masked"``."""
    before = models_present()
    seen = _exercise(config, folder)
    return Seen(*seen, models=(before, models_present()))


def _exercise(
    config: RunConfig, folder: Path
) -> tuple[list[float], list[float], dict[str, float], list[int], int]:
    with opened(config) as trial:
        backend, engine, run = trial.backend, trial.engine, trial.run
        results = [trial.step() for _ in range(run.steps)]
        losses = backend.read_to_host([result.loss for result in results])
        norms = backend.read_to_host([result.grad_norm for result in results])
        assert run.data.first_eval is not None
        evaluated = evaluate(backend, engine, build_eval_loader(run, run.data.first_eval), run.metrics)
        prompt = torch.arange(8)[None]
        continued = engine.generate(prompt, max_new_tokens=4, seed=0)[0].tolist()
        save(engine, folder / "trained")
        parts, valid = [], backend.sum_host_numbers(run.batch_plan.global_batch_size)
        embeddings: Any = engine.model.get_submodule("model.embed_tokens")
        embeddings.register_forward_hook(lambda *call: call[-1] * torch.nan)
        for index in range(run.batch_plan.accumulation_steps):
            last = index == run.batch_plan.accumulation_steps - 1
            parts.append(
                engine.accumulate_gradients(
                    backend.copy_to_device(next(trial.batches)), valid, is_last_micro_batch=last
                ).values[0]
            )
        engine.take_optimizer_step(
            run.schedule(1), 1.0, backend.sum_tensor_over_ranks(torch.stack(parts).sum())
        )
        skipped = engine.read_update_health().skipped_updates
        save(engine, folder / "masked")
        return losses, norms, evaluated, continued, skipped


def save(engine: Any, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    engine.save_shards(folder, background=False).wait()


@pytest.fixture(scope="module")
def exercised(
    engines: Engines, corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Seen, Path]]:
    """Return the results of an exercise of a kind of engine, run once, and the folder of its saves."""
    done: dict[str, tuple[Seen, Path]] = {}

    def of(name: str) -> tuple[Seen, Path]:
        if name not in done:
            folder = tmp_path_factory.mktemp("exercise")
            size = ENGINES[name].sizes[0]
            settings = {**COMMON, **accumulated(ENGINES[name].sharers(size)), **ENGINES[name].settings}
            config = configured(folder / "run", corpus, **settings)
            done[name] = engines.run(name, size, exercise, config, folder), folder
        return done[name]

    return of


@pytest.fixture(scope="module")
def one(exercised: Callable[[str], tuple[Seen, Path]]) -> tuple[Seen, Path]:
    """Return the results of the engine that is closest to plain torch."""
    return exercised("no_shard")


@pytest.fixture(scope="module")
def truth(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, float]]:
    """Return loss and gradient norm of each step in plain torch."""
    return plain_losses(configured(tmp_path_factory.mktemp("truth"), corpus, **COMMON))


each = pytest.mark.parametrize("name", ENGINES)


def once_of(*names: str) -> pytest.MarkDecorator:
    """Parametrize by engines that represent all classes, for choices that do not depend on the engine."""
    return pytest.mark.parametrize("name", names)


@each
def test_engine_losses_match_plain_torch(
    name: str, exercised: Callable[[str], tuple[Seen, Path]], truth: list[tuple[float, float]]
) -> None:
    seen, _ = exercised(name)
    assert seen.losses == pytest.approx([loss for loss, _ in truth], rel=LOSSES)
    record(seen.losses, [loss for loss, _ in truth], LOSSES)
    assert seen.norms == pytest.approx([norm for _, norm in truth], rel=1e-4)
    assert seen.losses[-1] < seen.losses[0] - 0.3  # it is learning, so that equal losses mean equal updates


@each
def test_engine_evaluates_generates_saves_and_releases_memory(
    name: str, exercised: Callable[[str], tuple[Seen, Path]], one: tuple[Seen, Path]
) -> None:
    seen, folder = exercised(name)
    assert seen.evaluated == pytest.approx(one[0].evaluated, rel=LOSSES)
    assert 0 < seen.evaluated["accuracy"] < 1
    assert seen.continued[:8] == list(range(8)) and len(seen.continued) == 12
    if not name.startswith(("xla", "tpu")):  # which have separate random generators
        assert seen.continued == one[0].continued
    ours = view(folder / "trained")
    assert_same_view(ours, view(one[1] / "trained"), VIEWS)
    assert {float(value) for key, value in ours.items() if key.endswith(".step")} == {float(STEPS)}
    # Otherwise, a search for the micro-batch size and a second run in a notebook would have less memory.
    before, after = seen.models
    assert after == before


@each
def test_engine_skips_update_that_is_not_finite(
    name: str, exercised: Callable[[str], tuple[Seen, Path]]
) -> None:
    seen, folder = exercised(name)
    assert seen.skipped == 1
    assert_same_bits(view(folder / "masked"), view(folder / "trained"))


# -- conversations, packed as complete documents or padded
# -----------------------------------------------------

CONVERSATIONS: dict[str, Any] = {
    "data__format": "messages",
    "data__seq_len": 64,
    "train__global_batch_size": 12,
    "train__steps": STEPS,
}
CASES = [
    ("full_shard", 1, "documents"),
    ("full_shard", 3, "documents"),
    ("zero2", 2, "documents"),
    ("zero3", 2, "documents"),
    ("xla", 4, "documents"),
    ("full_shard", 3, False),
    ("zero3", 3, False),
    ("xla", 2, False),
]
"""The other sizes follow from these and from texts on each."""


def losses_and_norms(config: RunConfig) -> list[tuple[float, float]]:
    taken = take_steps(config, STEPS)
    assert all(count == 1 for count in taken.graphs.values()), taken.graphs  # the shapes never change
    return list(zip(taken.losses, taken.norms, strict=True))


@pytest.fixture(scope="module")
def answered(
    conversations: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Any], list[tuple[float, float]]]:
    """Return the losses of the answers of each single conversation in plain torch."""

    @functools.cache
    def losses(packing: Any) -> list[tuple[float, float]]:
        folder = tmp_path_factory.mktemp("truth")
        return plain_losses(configured(folder, conversations, **CONVERSATIONS, data__packing=packing))

    return losses


@pytest.mark.parametrize(("name", "size", "packing"), CASES)
def test_engine_losses_of_conversations_match_plain_torch(
    name: str,
    size: int,
    packing: Any,
    answered: Callable[[Any], list[tuple[float, float]]],
    engines: Engines,
    conversations: Path,
    tmp_path: Path,
) -> None:
    settings = {**CONVERSATIONS, **accumulated(size), **ENGINES[name].settings, "data__packing": packing}
    seen = engines.run(name, size, losses_and_norms, configured(tmp_path, conversations, **settings))
    expected = answered(packing)
    assert [loss for loss, _ in seen] == pytest.approx([loss for loss, _ in expected], rel=LOSSES)
    assert [norm for _, norm in seen] == pytest.approx([norm for _, norm in expected], rel=1e-4)


# -- one long witness for each kind ------------------------------------------------------------------------

LONG_RUN: dict[str, Any] = {"train__micro_batch_size": 3, "train__global_batch_size": 6, "train__steps": LONG}
WITNESSES = ("no_shard", "full_shard", "zero1", "zero3", "xla")


@pytest.fixture(scope="module")
def long_truth(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    config = configured(tmp_path_factory.mktemp("truth"), corpus, **LONG_RUN)
    return [loss for loss, _ in plain_losses(config, LONG)]


@pytest.mark.parametrize("name", WITNESSES)
def test_engine_losses_match_over_thirty_steps(
    name: str, long_truth: list[float], engines: Engines, corpus: Path, tmp_path: Path
) -> None:
    config = configured(tmp_path, corpus, **LONG_RUN, **ENGINES[name].settings)
    assert engines.run(name, 2, take_steps, config, LONG).losses == pytest.approx(long_truth, rel=LOSSES)


# -- a part of the model is trained, at several rates ------------------------------------------------------

PART: dict[str, Any] = {
    "train__frozen": [r"embed_tokens", r"layers\.0\.mlp"],
    "train__global_batch_size": 12,
    "train__steps": STEPS,
    "data__packing": False,
}
GROUPS: dict[str, Any] = {
    "train__min_learning_rate_ratio": 0.0,
    "model__config": {**TINY_MODEL, "tie_word_embeddings": False, "num_hidden_layers": 3},
    "train__learning_rate": 1e-3,
    "train__parameter_groups": [
        {"pattern": "lm_head|layers.2", "learning_rate": 1e-2},
        {"pattern": r"mlp|layers\.2", "weight_decay": 3.0},
        {"pattern": "q_proj", "learning_rate": 2e-4, "weight_decay": 0.0},
    ],
}


def by_hand(model: Any) -> list[dict[str, Any]]:
    """Return the same parameter groups, written one by one."""
    model.model.embed_tokens.requires_grad_(False)
    first, second, last = model.model.layers
    first.mlp.requires_grad_(False)
    fast = [p for p in last.parameters() if p.ndim == 2]
    slow = [first.self_attn.q_proj.weight, second.self_attn.q_proj.weight]
    decaying = list(second.mlp.parameters())
    taken = {id(p) for p in (model.lm_head.weight, *last.parameters(), *slow, *decaying)}
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in taken]
    return [
        {"params": [p for p in rest if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in rest if p.ndim == 1], "weight_decay": 0.0},
        {"params": [model.lm_head.weight, *fast], "factor": 10, "weight_decay": 0.1},
        {"params": [p for p in last.parameters() if p.ndim == 1], "factor": 10, "weight_decay": 0.0},
        {"params": decaying, "weight_decay": 3.0},
        {"params": slow, "factor": 0.2, "weight_decay": 0.0},
    ]


@pytest.fixture(scope="module")
def in_groups(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, float]]:
    config = configured(tmp_path_factory.mktemp("truth"), corpus, **PART, **GROUPS)
    return plain_losses(config, prepared=by_hand)


@once_of("no_shard", "zero2", "zero3", "xla", "full_shard, layers shared")
def test_engine_uses_parameter_groups(
    name: str, in_groups: list[tuple[float, float]], engines: Engines, corpus: Path, tmp_path: Path
) -> None:
    size = ENGINES[name].sizes[0]
    settings = {**PART, **GROUPS, **accumulated(ENGINES[name].sharers(size)), **ENGINES[name].settings}
    config = configured(tmp_path, corpus, **settings)
    seen = engines.run(name, size, stored, config, tmp_path / "saved")
    tolerance = 1e-6 if name == "no_shard" else LOSSES
    assert seen == pytest.approx([loss for loss, _ in in_groups], rel=tolerance)
    state = open_checkpoint(tmp_path / "saved").optimizer
    assert state is not None
    last = config.train.learning_rate * 0.5 * (1 + math.cos(math.pi * (STEPS - 1) / STEPS))
    found = {n: g for g in state.param_groups for n in g["params"]}
    assert found["lm_head.weight"]["lr"] == pytest.approx(10 * last)
    assert found["model.layers.1.self_attn.q_proj.weight"]["lr"] == pytest.approx(0.2 * last)
    assert found["model.norm.weight"]["lr"] == pytest.approx(last)
    assert {g["weight_decay"] for g in state.param_groups} == {0.0, 0.1, 3.0}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    return write_pretrained(tmp_path_factory.mktemp("pretrained"), corpus)


def stored(config: RunConfig, folder: Path) -> list[float]:
    with opened(config) as trial:
        results = [trial.step() for _ in range(trial.run.steps)]
        losses = trial.backend.read_to_host([result.loss for result in results])
        save(trial.engine, folder)
        return losses


@once_of("full_shard", "zero1", "zero3, offload", "xla")
def test_engine_keeps_frozen_parameters_bit_for_bit(
    name: str, pretrained: Path, engines: Engines, corpus: Path, tmp_path: Path
) -> None:
    """This also holds in 16 bits, and if the engine has only a rounded copy."""
    chosen = {"train__frozen": ["embed_tokens", r"layers\.0\."], "precision": "bf16", "model__config": None}
    size = ENGINES[name].sizes[0]
    settings = {**PART, **accumulated(size), **ENGINES[name].settings, **chosen}
    config = configured(tmp_path, corpus, **settings, model__name_or_path=str(pretrained))
    losses = engines.run(name, size, stored, config, tmp_path / "saved")
    assert losses[-1] < losses[0] - 0.3
    ours, theirs = open_checkpoint(tmp_path / "saved"), open_checkpoint(pretrained)
    frozen = [n for n in theirs.tensors if re.search(r"embed_tokens|layers\.0\.", n)]
    for one, tensor in theirs.tensors.items():
        same = np.array_equal(ours.tensors[one].read().astype(np.float32), tensor.read().astype(np.float32))
        assert same == (one in frozen), one
        assert ours.tensors[one].dtype == (tensor.dtype if one in frozen else "F32"), one
    assert ours.optimizer is not None
    assert set(ours.optimizer.state) == set(theirs.tensors) - set(frozen)
    assert {n for group in ours.optimizer.param_groups for n in group["params"]} == set(ours.optimizer.state)


def generate_until_end_token(config: RunConfig) -> list[int]:
    """Generate four tokens on rank 0. Rank 1 begins with an end-of-sequence token."""
    import torch.distributed as dist

    with opened(config) as trial:
        engine = trial.engine
        engine.model.generation_config.eos_token_id = 1
        logits = torch.zeros(engine.model.config.vocab_size)
        logits[1] = 1e4 if dist.get_rank() == 1 else -1e4

        def change_logits(module: Any, arguments: Any, output: Any) -> None:
            output.logits += logits

        engine.model.register_forward_hook(change_logits)
        length = engine.generate(torch.tensor([[5, 6]]), max_new_tokens=4, seed=0).shape[1]
        return [int(text) for text in trial.backend.gather_text(str(length))]


@pytest.mark.parametrize("strategy", ["no_shard", "full_shard"])
def test_ranks_generate_texts_of_different_lengths(
    strategy: str, corpus: Path, tmp_path: Path, ranks: RankPool
) -> None:
    config = configured(tmp_path, corpus, strategy=strategy)
    assert ranks.run(2, generate_until_end_token, config, timeout=60) == [6, 3]
