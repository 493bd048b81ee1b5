"""A run moves from every engine to every other and to other world sizes, real engines on both sides.

Every resume reads one logical checkpoint, so the pairs follow by composition: each engine writes what a
reference holds, and each goes on from the reference: full_shard and zero3 on every number of ranks, the
others on one or two. ``--all`` has all on every number, and runs the pairs themselves.

``PORTABLE_WRITE_DOCS=1`` has the tests write their table into ``docs/moving.md``.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from portable.checkpoint.trainer_state import TrainerState
from portable.reporting.metrics import read_metrics
from portable.run.rank import run_rank
from tests.engines import ENGINES, Engines
from tests.promises import record
from tests.runs import configured
from tests.views import assert_same_view, view

if TYPE_CHECKING:
    from collections.abc import Iterable

PAGE = Path(__file__).parents[2] / "docs" / "moving.md"
MOVES_AT, ENDS_AT = 3, 6  # steps
GLOBAL_BATCH = 12
LOSSES, VIEWS = 1e-5, 1e-3
"""Relative tolerance of losses, and of what is stored, as a share of each tensor's largest element."""


def leg(folder: Path, corpus: Path, settings: dict[str, Any], size: int) -> int:
    common: dict[str, Any] = {
        "train__micro_batch_size": GLOBAL_BATCH // (2 * size),  # accumulated twice, on 4 ranks three times
        "train__global_batch_size": GLOBAL_BATCH,
        "train__stop_after": ENDS_AT,
        "checkpoint__every_steps": MOVES_AT,
        "data__eval_fraction": 0,
    }
    config = configured(folder, corpus, **{**common, **settings})
    return run_rank(config.backend, config)


class Runner:
    """Runs an engine on a number of ranks or devices until :data:`ENDS_AT`."""

    def __init__(self, corpus: Path, engines: Engines, **settings: Any) -> None:
        self._corpus = corpus
        self._engines = engines
        self._settings = settings

    def __call__(self, name: str, size: int, folder: Path) -> list[float]:
        """The losses of the steps after :data:`MOVES_AT`, on record in ``folder`` when it is done."""
        settings = {**ENGINES[name].settings, **self._settings}
        assert self._engines.run(name, size, leg, folder, self._corpus, settings, size) == 0
        rows = {row["step"]: row["loss"] for row in read_metrics(folder) if "loss" in row}
        return [rows[step] for step in range(MOVES_AT + 1, ENDS_AT + 1)]


@pytest.fixture(scope="module")
def runner(corpus: Path, engines: Engines) -> Runner:
    return Runner(corpus, engines)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, runner: Runner) -> tuple[Path, list[float]]:
    """A run on one rank as it stood at :data:`MOVES_AT`, and the losses with which it went on undisturbed."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    losses = runner("no_shard", 1, folder)
    return back_to_the_move(folder), losses


def back_to_the_move(folder: Path) -> Path:
    """``folder`` as it was at :data:`MOVES_AT`, without metrics: all losses to come are the next leg's."""
    shutil.rmtree(folder / "checkpoints" / f"step-{ENDS_AT:06d}")
    (folder / "metrics.jsonl").unlink()
    return folder


def stored(folder: Path) -> Path:
    return folder / "checkpoints" / f"step-{MOVES_AT:06d}"


IMPLIED: tuple[str, ...] = ("shard_grad_op", "zero1, offload", "zero2, offload", "tpu, no_shard")
IMPLIED += ("full_shard, shared", "zero3, shared")
"""Of their classes, others write; what these save is held in test_engines, what they load below."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.exhaustive if n in IMPLIED else []) for n in ENGINES],
)
def test_writes_what_the_reference_holds(
    name: str, reference: tuple[Path, list[float]], tmp_path: Path, runner: Runner
) -> None:
    """And goes on from it on the same ranks as if nothing had interrupted it, bit for bit."""
    begun, size = tmp_path / "begun", ENGINES[name].sizes[0]
    alone = runner(name, size, begun)
    assert alone == pytest.approx(reference[1], rel=LOSSES)
    record(alone, reference[1], LOSSES)
    back_to_the_move(begun)
    assert_same_view(view(stored(begun)), view(stored(reference[0])), VIEWS)
    ours, theirs = (TrainerState.read(stored(folder)) for folder in (begun, reference[0]))
    assert (ours.step, ours.samples, ours.data) == (MOVES_AT, MOVES_AT * GLOBAL_BATCH, theirs.data)
    assert (ours.run, ours.schedule, ours.seed) == (theirs.run, theirs.schedule, theirs.seed)
    if name.startswith("zero"):
        counted = {"global_steps": MOVES_AT, "global_samples": MOVES_AT * GLOBAL_BATCH, "skipped_steps": 0}
        for states in sorted(stored(begun).glob("*/*mp_rank_00_model_states.pt")):
            state = torch.load(states, weights_only=False)
            assert {key: state[key] for key in counted} == counted
    assert runner(name, size, begun) == alone


NUMBERS = {"full_shard": 4, "zero3": 4, "tpu, no_shard": 0}
NUMBERS |= dict.fromkeys(("no_shard", "hybrid_shard", "zero1", "full_shard, layers shared", "xla"), 2)
"""How many numbers of ranks one of each class of engines goes on on; the others have one."""


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, size, marks=[] if at < NUMBERS.get(name, 1) else pytest.mark.exhaustive)
        for name, kind in ENGINES.items()
        for at, size in enumerate(kind.sizes)
    ],
)
def test_goes_on_from_the_reference(
    name: str, size: int, reference: tuple[Path, list[float]], tmp_path: Path, runner: Runner
) -> None:
    folder = Path(shutil.copytree(reference[0], tmp_path / "run"))
    losses = runner(name, size, folder)
    assert losses == pytest.approx(reference[1], rel=LOSSES)
    record(losses, reference[1], LOSSES)


@pytest.fixture(scope="module")
def packing(conversations: Path, engines: Engines) -> Runner:
    """Of runs on conversations, which are packed as whole documents; the loss counts the answers."""
    return Runner(conversations, engines, data__packing="documents", data__seq_len=64)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, packing: Runner) -> tuple[Path, list[float]]:
    folder = tmp_path_factory.mktemp("packed") / "run"
    losses = packing("no_shard", 1, folder)
    return back_to_the_move(folder), losses


PACKED = [("full_shard", 3), ("zero2", 2), ("zero3", 3), ("xla", 2), ("xla, shared", 4)]


@pytest.mark.parametrize(("name", "size"), PACKED)
def test_goes_on_with_packed_conversations(
    name: str, size: int, packed: tuple[Path, list[float]], tmp_path: Path, packing: Runner
) -> None:
    folder = Path(shutil.copytree(packed[0], tmp_path / "run"))
    assert packing(name, size, folder) == pytest.approx(packed[1], rel=LOSSES)


@pytest.fixture(scope="module")
def partly(corpus: Path, engines: Engines) -> Runner:
    """Of runs that train a part of the model, at several rates."""
    groups = [{"pattern": r"layers\.1", "learning_rate": 1e-2}, {"pattern": "q_proj", "weight_decay": 1.0}]
    return Runner(corpus, engines, train__frozen=["norm", r"layers\.0\.mlp"], train__parameter_groups=groups)


@pytest.fixture(scope="module")
def part(tmp_path_factory: pytest.TempPathFactory, partly: Runner) -> tuple[Path, list[float]]:
    folder = tmp_path_factory.mktemp("part") / "run"
    losses = partly("no_shard", 1, folder)
    return back_to_the_move(folder), losses


@pytest.mark.parametrize("name", ["full_shard", "zero1", "zero3, offload", "xla"])
def test_goes_on_with_a_part(
    name: str, part: tuple[Path, list[float]], tmp_path: Path, partly: Runner
) -> None:
    """And from there back to one rank."""
    size, folder = ENGINES[name].sizes[0], Path(shutil.copytree(part[0], tmp_path / "run"))
    assert partly(name, size, folder) == pytest.approx(part[1], rel=LOSSES)
    begun = tmp_path / "begun"
    partly(name, size, begun)
    assert_same_view(view(stored(back_to_the_move(begun))), view(stored(part[0])), VIEWS)


def goes_on_with(source: str, target: str) -> int:
    """The world size with which ``target`` goes on from where ``source`` stopped."""
    if target == source:
        return ENGINES[source].sizes[0]
    sizes, names = ENGINES[target].sizes, list(ENGINES)
    return sizes[(names.index(target) + names.index(source)) % len(sizes)]


Begun = Callable[[str], tuple[Path, list[float]]]


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory, runner: Runner) -> Begun:
    """What ``reference`` is, of the engine that is named."""

    @cache
    def by(name: str) -> tuple[Path, list[float]]:
        folder = tmp_path_factory.mktemp("begun") / "run"
        losses = runner(name, ENGINES[name].sizes[0], folder)
        return back_to_the_move(folder), losses

    return by


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", ENGINES)
@pytest.mark.parametrize("source", ENGINES)
def test_every_pair(
    source: str,
    target: str,
    begun: Begun,
    reference: tuple[Path, list[float]],
    tmp_path: Path,
    runner: Runner,
) -> None:
    stopped, alone = begun(source)
    folder = Path(shutil.copytree(stopped, tmp_path / "run"))
    expected = alone if target == source else pytest.approx(reference[1], rel=LOSSES)
    assert runner(target, goes_on_with(source, target), folder) == expected


def composed() -> Iterable[str]:
    """What ``--all`` runs."""
    yield "| engine | writes the reference, and goes on bit for bit, on | goes on from the reference on |"
    yield "|---|---|---|"
    for name, (_, sizes) in ENGINES.items():
        yield f"| **{name}** | {sizes[0]} | {', '.join(map(str, sorted(sizes)))} |"


def test_the_table_of_the_page() -> None:
    begin, end = "<!-- composed: begin -->\n", "<!-- composed: end -->\n"
    head, rest = PAGE.read_text("utf-8").split(begin)
    page = head + begin + "".join(f"{row}\n" for row in composed()) + end + rest.split(end)[1]
    if os.environ.get("PORTABLE_WRITE_DOCS") == "1":
        PAGE.write_text(page, "utf-8")
    assert PAGE.read_text("utf-8") == page
