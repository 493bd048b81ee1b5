"""A run moves from every strategy to every other and to other world sizes, real engines on both sides.

``PORTABLE_WRITE_DOCS=1`` has the tests write their table into ``docs/moving.md``.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from portable.metrics import read_metrics
from portable.run import train_leg
from tests.runs import configured

pytest.importorskip("deepspeed")
pytest.importorskip("torch_xla")

if TYPE_CHECKING:
    from tests.ranks import RankPool
    from tests.xla import XlaPool

PAGE = Path(__file__).parents[2] / "docs" / "moving.md"
MARKS = ("<!-- moves: begin -->\n", "<!-- moves: end -->\n")
MOVES_AT, ENDS_AT = 3, 6  # steps
TOLERANCE = 1e-5

OFFLOADED: dict[str, Any] = {"memory__offload_optimizer": "cpu"}
# What a person changes, and the world sizes to begin and go on with; a run begins on the first.
ENGINES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "no_shard": ({"strategy": "no_shard"}, (2, 1, 3, 4)),
    "full_shard": ({"strategy": "full_shard"}, (3, 2, 4, 1)),
    "shard_grad_op": ({"strategy": "shard_grad_op"}, (4, 3, 1, 2)),
    "hybrid_shard": ({"strategy": "hybrid_shard", "fsdp__shard_group_size": 2}, (4, 2)),
    "zero1": ({"strategy": "zero1"}, (3, 2, 1, 4)),
    "zero1, offload": ({"strategy": "zero1", **OFFLOADED}, (1, 2, 4, 3)),
    "zero2": ({"strategy": "zero2"}, (2, 3, 4, 1)),
    "zero2, offload": ({"strategy": "zero2", **OFFLOADED}, (3, 1, 2, 4)),
    "zero3": ({"strategy": "zero3"}, (3, 4, 2, 1)),
    "zero3, offload": ({"strategy": "zero3", **OFFLOADED, "memory__offload_params": "cpu"}, (2, 4, 3, 1)),
    "xla": ({"backend": "xla"}, (2, 4)),
}


def leg(folder: Path, corpus: Path, settings: dict[str, Any]) -> int:
    common = {
        "train__micro_batch_size": 1,
        "train__global_batch_size": 12,
        "checkpoint__every_steps": MOVES_AT,
        "data__eval_fraction": 0,
    }
    config = configured(folder, corpus, **common, **settings)
    return train_leg(config.backend, config)


class Runner:
    """Runs an engine on a number of ranks or devices until :data:`ENDS_AT`."""

    def __init__(self, corpus: Path, ranks: RankPool, xla: XlaPool) -> None:
        self._corpus = corpus
        self._ranks = ranks
        self._xla = xla

    def __call__(self, name: str, size: int, folder: Path) -> list[float]:
        """The losses of the steps after :data:`MOVES_AT`, on record in ``folder`` when it is done."""
        settings = ENGINES[name][0] | {"train__stop_after": ENDS_AT}
        pool = self._xla if name == "xla" else self._ranks
        assert pool.run(size, leg, folder, self._corpus, settings) == 0
        rows = {row["step"]: row["loss"] for row in read_metrics(folder) if "loss" in row}
        return [rows[step] for step in range(MOVES_AT + 1, ENDS_AT + 1)]


@pytest.fixture(scope="module")
def runner(corpus: Path, ranks: RankPool, xla: XlaPool) -> Runner:
    return Runner(corpus, ranks, xla)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, runner: Runner) -> list[float]:
    """The losses on one rank that nothing interrupts."""
    return runner("no_shard", 1, tmp_path_factory.mktemp("undisturbed") / "run")


@pytest.fixture(scope="module")
def table() -> dict[tuple[str, str], str]:
    """What the moves that have been tried showed."""
    return {}


@pytest.mark.parametrize("source", ENGINES)
def test_from(
    source: str, undisturbed: list[float], table: dict[tuple[str, str], str], tmp_path: Path, runner: Runner
) -> None:
    begun = tmp_path / "begun"
    size = ENGINES[source][1][0]
    alone = runner(source, size, begun)
    assert alone == pytest.approx(undisturbed, rel=TOLERANCE)
    shutil.rmtree(begun / "checkpoints" / f"step-{ENDS_AT:06d}")
    (begun / "metrics.jsonl").unlink()  # so that every loss below is of the leg after the move
    for at, target in enumerate(ENGINES):
        sizes = ENGINES[target][1]
        goes_on = size if target == source else sizes[(at + list(ENGINES).index(source)) % len(sizes)]
        folder = tmp_path / "goes on"
        shutil.copytree(begun, folder)
        losses = runner(target, goes_on, folder)
        if target == source:
            assert losses == alone, f"{source} on {size}"
        else:
            assert losses == pytest.approx(undisturbed, rel=TOLERANCE), f"to {target} on {goes_on}"
        shutil.rmtree(folder)
        table[source, target] = f"{size} → {goes_on}" + (" =" if target == source else "")


def test_the_table_of_the_page(table: dict[tuple[str, str], str]) -> None:
    if len(table) < len(ENGINES) ** 2:
        pytest.skip("not all moves were tried")
    head, rest = PAGE.read_text("utf-8").split(MARKS[0])
    rows = ["| from \\ to |" + "".join(f" {name} |" for name in ENGINES), "|---|" + "---|" * len(ENGINES)]
    rows += [
        f"| **{source}** |" + "".join(f" {table[source, target]} |" for target in ENGINES)
        for source in ENGINES
    ]
    page = head + MARKS[0] + "\n".join(rows) + "\n" + MARKS[1] + rest.split(MARKS[1])[1]
    if os.environ.get("PORTABLE_WRITE_DOCS") == "1":
        PAGE.write_text(page, "utf-8")
    assert PAGE.read_text("utf-8") == page
