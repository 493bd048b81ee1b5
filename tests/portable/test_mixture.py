"""Mixtures: the order of samples of all sources, checked by the ids in the batches of real ranks."""

from __future__ import annotations

import math
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from portable.config.sections import DataConfig
from portable.data.dataset import build_data
from portable.data.samples.base import PackedCausalSamples, SampleRange, Samples
from portable.data.samples.mixture import MixtureSamples, MixtureSchedule, MixtureShare, WeightedInterleaving
from portable.data.samples.order import derive_seed
from portable.errors import UserError
from portable.reporting.metrics import read_metrics
from portable.run.rank import run_rank
from tests.portable.data_support import token_cache, write_jsonl
from tests.portable.order_support import BATCH, SOURCES, settings, steps, write_sources
from tests.runs import configured, write_conversations, write_corpus

WEIGHTS: list[Sequence[float]] = [
    (3, 1),
    (0.7, 0.2, 0.1),
    (5, 0, 1),
    (0.995, 0.004, 0.001),
    tuple(range(1, 34)),
]


# -- the interleave -----------------------------------------------------------------------------------------


def test_derive_seed_differs_by_source() -> None:
    assert len({derive_seed(name, seed) for name in ("a", "b") for seed in (0, 1)}) == 4


def dealt(deal: WeightedInterleaving | MixtureSchedule, sources: int, count: int) -> Iterator[list[int]]:
    """Check that each position has one source, which counts up by one; yield how often each came so far."""
    seen = [0] * sources
    for position in range(count):
        assert deal.count_per_source(position) == seen
        source, number = deal(position)
        assert number == seen[source]
        seen[source] += 1
        yield seen


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_weighted_interleaving_follows_weights(weights: Sequence[float]) -> None:
    """In no prefix does a count differ by more than the documented bound."""
    deal = WeightedInterleaving(weights)
    shares = [Fraction(repr(weight)) / sum(Fraction(repr(w)) for w in weights) for weight in weights]
    bound = Fraction(math.ceil(math.log2(len(weights))), 2)
    for at, seen in enumerate(dealt(deal, len(weights), 4000), 1):
        assert max(abs(n - share * at) for n, share in zip(seen, shares, strict=True)) <= bound
    far = 10**15 + 7
    counts = deal.count_per_source(far)
    source, number = deal(far)
    assert sum(counts) == far and number == counts[source]


def test_mixture_schedule_changes_weights() -> None:
    deal = MixtureSchedule([(0, (1, 1)), (100, (0, 1)), (1000, (3, 1))])
    *_, seen = dealt(deal, 2, 2000)
    assert (
        deal.count_per_source(100) == [50, 50]
        and deal.count_per_source(1000) == [50, 950]
        and seen == [800, 1200]
    )


# -- the order of samples -----------------------------------------------------------------------------------


def mixture(folder: Path, shares: Sequence[MixtureShare]) -> MixtureSamples:
    """Build sources with distinguishable tokens: the first token of sample s of source j is 3 s + j."""
    parts: dict[str, Samples] = {}
    for number, (name, count) in enumerate((("web", 300), ("code", 120), ("books", 7))):
        tokens = [3 * at + number for at in range(count) for _ in range(4)]
        cache = token_cache(folder / name, [[*tokens, 0]])
        parts[name] = PackedCausalSamples(cache, SampleRange(0, count), 4)
    return MixtureSamples(parts, dict(zip(parts, shares, strict=True)))


def test_mixture_epochs_are_exact(tmp_path: Path) -> None:
    mixed = mixture(tmp_path, [MixtureShare(epochs=1.0), MixtureShare(epochs=2.0), MixtureShare(epochs=10.0)])
    assert mixed.epoch_samples == 300 + 240 + 70
    taken = [mixed.locate_sample(position, 7) for position in range(mixed.epoch_samples)]
    assert sorted(taken) == sorted(
        [(0, n) for n in range(300)]
        + [(epoch, 300 + n) for epoch in range(2) for n in range(120)]
        + [(epoch, 420 + n) for epoch in range(10) for n in range(7)]
    )


# -- settings and complete runs
# --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("second", "told"),
    [
        ({}, r"data.sources.b: has the same data as data.sources.a"),
        ({"text_field": "txt"}, r"^data.sources.b.text_field: .* no field 'txt'"),
    ],
)
def test_mixture_error_names_source(second: dict[str, str], told: str, tmp_path: Path) -> None:
    source = str(write_jsonl(tmp_path / "web.jsonl", ({"text": f"text {i} of many"} for i in range(80))))
    sources: Any = [{"name": "a", "source": source}, {"name": "b", "source": source, **second}]
    with pytest.raises(UserError, match=told):
        build_data(DataConfig(seq_len=16, vocab_size=300, cache_dir=str(tmp_path), sources=sources))


@pytest.mark.usefixtures("brief_runs")
def test_mixture_of_texts_and_conversations_trains(tmp_path: Path) -> None:
    """Loss, tokens, epoch and evaluation are logged by source. ``test_data_contract.py`` stops such a run."""
    texts, chats = write_corpus(tmp_path), write_conversations(tmp_path)
    sources = [
        {"name": "texts", "source": str(texts), "weight": 1},
        {"name": "chats", "source": str(chats), "weight": 1},
    ]
    given: dict[str, Any] = {
        "data__source": None,
        "data__sources": sources,
        "data__weight_schedule": [{"step": 3, "weights": {"texts": 1, "chats": 3}}],
        "train__eval_every": 4,
        "log__every_steps": 1,
        "checkpoint__export": False,
    }
    folder = tmp_path / "whole"
    config = configured(folder, texts, **given)
    assert run_rank("cpu", config) == 0
    rows = [row for row in read_metrics(folder) if "loss" in row]
    assert all(row["share/texts"] + row["share/chats"] == pytest.approx(1) for row in rows)
    for row in rows:
        both = sum(row[f"loss/{name}"] * row[f"share/{name}"] for name in ("texts", "chats"))
        assert both == pytest.approx(row["loss"], rel=1e-5)
    batch = config.train.global_batch_size
    assert [row["samples/chats"] for row in rows[:4]] == [
        batch // 2, batch, batch // 2 * 3, batch // 2 * 3 + 3 * batch // 4
    ]  # fmt: skip
    evaluated = next(row for row in read_metrics(folder) if "eval_loss/texts" in row)
    assert {"eval_loss/chats", "eval_accuracy/texts"} <= evaluated.keys()
    heavier = [{**sources[0], "weight": 2}, sources[1]]
    changes: tuple[dict[str, Any], ...] = ({"data__sources": heavier}, {"data__weight_schedule": []})
    for changed in changes:
        with pytest.raises(UserError, match="the tokens, or the proportions of the sources, have changed"):
            run_rank("cpu", configured(folder, texts, **{**given, **changed}))


# -- from the batches of ranks ---------------------------------------------------------------------------


def order(folder: Path, count: int, world_size: int = 1, workers: int = 0) -> npt.NDArray[np.int64]:
    data = build_data(settings(folder), seed=5)
    taken = steps(data, world_size, workers)
    found = np.stack(list(islice(taken, count)))
    taken.close()
    return found


def check_epochs(samples: npt.NDArray[np.int64], expected: dict[str, npt.NDArray[np.int64]]) -> list[int]:
    """Check that each epoch of each source has every sample once; return the number of epochs by source."""
    source, number = np.divmod(samples.ravel(), 10**6)
    counted = []
    for name, at in SOURCES.items():
        of, size = number[source == at], len(expected[name])
        whole = len(of) // size
        epochs = of[: whole * size].reshape(-1, size)
        assert (np.sort(epochs, axis=1) == expected[name]).all()
        rest = of[whole * size :]
        assert len(np.unique(rest)) == len(rest)
        assert size < 10 or len({epoch.tobytes() for epoch in epochs}) == whole  # a different order
        counted.append(whole)
    return counted


def samples_of(folder: Path) -> dict[str, npt.NDArray[np.int64]]:
    """Return the samples of each source.

    The last record of a file has no next token, so it is not a sample.
    """
    found = {}
    for name in SOURCES:
        first, known = 0, []
        for path in sorted((folder / name).iterdir()) if name == "web" else [folder / f"{name}.jsonl"]:
            count = len(path.read_text().splitlines())
            known.append(np.arange(first, first + count - 1))
            first += count
        found[name] = np.concatenate(known)
    return found


# -- the quick part -----------------------------------------------------------------------------------------


def test_mixture_order_does_not_depend_on_number_of_ranks(tmp_path: Path) -> None:
    """The order is exact over two epochs. A resume with the manifest and an empty cache continues it."""
    write_sources(tmp_path, shards=7, records=60)
    whole = order(tmp_path, 20)
    web, code, books = check_epochs(whole, samples_of(tmp_path))
    assert web >= 2 and code >= 1 and books > 50
    for world_size in (2, 3, 7):
        assert (order(tmp_path, 20, world_size) == whole).all()
    data = build_data(settings(tmp_path), seed=5)
    state = data.train.state_dict()
    shutil.rmtree(tmp_path / "cache")
    resumed = build_data(settings(tmp_path), seed=5)
    resumed.train.load_state_dict(state)
    taken = steps(resumed, 3, 0, 13 * BATCH)
    assert (np.stack(list(islice(taken, 7))) == whole[13:]).all()
    taken.close()


# -- the full check ----------------------------------------------------------------------------------------

STEPS = 1200
"""More than 10^5 samples."""


@pytest.mark.exhaustive
def test_mixture_order_survives_random_kills_and_moves(tmp_path: Path) -> None:
    """Each launch uses other numbers of ranks and workers, and some launches start with an empty cache."""
    folder = tmp_path / "data"
    write_sources(folder)
    whole = order(folder, STEPS)
    assert whole.size > 100_000
    web, code, books = check_epochs(whole, samples_of(folder))
    assert web >= 3 and code >= 10 and books > 3000
    chance = random.Random(7)
    launches = 0
    while launches < 40:
        world_size, workers = chance.choice([1, 2, 3, 4, 7]), chance.choice([0, 0, 1, 2])
        if chance.random() < 0.4:
            shutil.rmtree(folder / "cache", ignore_errors=True)
        process = launch(folder, world_size, workers, STEPS)
        launches += 1
        try:
            process.wait(chance.uniform(4, 20))
            assert process.returncode == 0
            break
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    else:
        launch(folder, 1, 0, STEPS).wait(timeout=300)
    rows = np.fromfile(folder / "taken", dtype="<i8").reshape(-1, 1 + BATCH)
    assert launches > 3 and set(rows[:, 0]) == set(range(STEPS))
    assert (rows[:, 1:] == whole[rows[:, 0]]).all()


def launch(folder: Path, world_size: int, workers: int, steps: int) -> subprocess.Popen[bytes]:
    """Start a process in a separate group that takes batches until it is killed."""
    given = [str(folder), str(world_size), str(workers), str(steps)]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.portable.order_support", *given], start_new_session=True
    )
