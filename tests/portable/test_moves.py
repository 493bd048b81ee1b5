"""A run moves from every engine to every other one and to other world sizes, with real engines on both sides.

The pairs follow by composition: each engine writes the state of a reference, and continues from the
reference. ``PORTABLE_WRITE_DOCS=1`` writes the table of ``docs/moving.md``.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from portable.checkpoint.trainer_state import TrainerState
from portable.node_folder import get_node_folder
from tests.converters.compare import remove_tables
from tests.engines import ENGINES, Engines, accumulated
from tests.promises import record
from tests.runs import leg, losses
from tests.views import assert_same_view, view

PAGE = Path(__file__).parents[2] / "docs" / "moving.md"
MOVES_AT, ENDS_AT = 2, 4  # steps: the last loss depends on the restored state
GLOBAL_BATCH = 12
LOSSES, VIEWS = 1e-5, 1e-3
"""Relative tolerance of losses, and tolerance of stored tensors relative to their largest elements."""


KINDS: dict[str, dict[str, Any]] = {
    "texts": {},
    # Conversations, packed as complete documents; the loss counts the answers.
    "packed": {"data__packing": "documents", "data__seq_len": 64},
    # A part of the model, with several learning rates.
    "part": {
        "train__frozen": ["norm", r"layers\.0\.mlp"],
        "train__parameter_groups": [
            {"pattern": r"layers\.1", "learning_rate": 1e-2},
            {"pattern": "q_proj", "weight_decay": 1.0},
        ],
    },
}
"""Trained parameters and data of each kind of run."""


def leg_with_opened_files(folder: Path, corpus: Path, settings: dict[str, Any]) -> int:
    """Continue a run, and record how often each rank opens each file of the checkpoint."""
    counts: Counter[str] = Counter()
    checkpoint = f"checkpoints/step-{MOVES_AT:06d}/"

    def count(event: str, arguments: Any) -> None:
        if event == "open" and checkpoint in str(arguments[0]):
            counts[str(arguments[0]).partition(checkpoint)[2]] += 1

    sys.addaudithook(count)
    code = leg(folder, corpus, settings)
    counts["shared files"] = sum(path.suffix != ".lock" for path in get_node_folder().glob("shared-*"))
    (folder / f"opened-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(counts))
    return code


Runner = Callable[..., list[float]]
Begun = Callable[..., tuple[Path, list[float]]]


@pytest.fixture(scope="module")
def runner(corpus: Path, conversations: Path, engines: Engines) -> Runner:
    """Run an engine on a number of ranks or devices until :data:`ENDS_AT`."""

    def run(
        name: str, size: int, folder: Path, kind: str = "texts", begin: Callable[..., int] = leg
    ) -> list[float]:
        """The losses of the steps after :data:`MOVES_AT`, on record in ``folder`` when it is done."""
        settings: dict[str, Any] = {
            **accumulated(ENGINES[name].sharers(size)),
            "train__global_batch_size": GLOBAL_BATCH,
            "train__stop_after": ENDS_AT,
            "checkpoint__every_steps": MOVES_AT,
            "data__eval_fraction": 0,
            **ENGINES[name].settings,
            **KINDS[kind],
        }
        data = conversations if kind == "packed" else corpus
        assert engines.run(name, size, begin, folder, data, settings) == 0
        rows = losses(folder)
        return [rows[step] for step in range(MOVES_AT + 1, ENDS_AT + 1)]

    return run


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory, runner: Runner) -> Begun:
    """Return a run at :data:`MOVES_AT`, and the losses of its uninterrupted continuation."""

    @cache
    def by(name: str, size: int, kind: str = "texts") -> tuple[Path, list[float]]:
        folder = tmp_path_factory.mktemp("begun") / "run"
        found = runner(name, size, folder, kind)
        return back_to_the_move(folder), found

    return by


@pytest.fixture(scope="module")
def reference(begun: Begun) -> tuple[Path, list[float]]:
    """Train the run on one rank."""
    return begun("no_shard", 1)


def back_to_the_move(folder: Path) -> Path:
    """Return ``folder`` as it was at :data:`MOVES_AT`, without metrics.

    All losses then belong to the next launch.
    """
    shutil.rmtree(folder / "checkpoints" / f"step-{ENDS_AT:06d}")
    (folder / "metrics.jsonl").unlink()
    return folder


def stored(folder: Path) -> Path:
    return folder / "checkpoints" / f"step-{MOVES_AT:06d}"


IMPLIED: tuple[str, ...] = ("shard_grad_op", "hybrid_shard", "zero1", "zero1, offload", "zero2, offload")
IMPLIED += ("full_shard, shared", "zero3, shared", "tpu, no_shard")
"""Other engines of their classes write here. Their saves are tested in test_engines, their loads below."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.exhaustive if n in IMPLIED else []) for n in ENGINES],
)
def test_move_writes_state_of_reference(
    name: str, reference: tuple[Path, list[float]], tmp_path: Path, runner: Runner
) -> None:
    """The engine also resumes its own checkpoint on the same ranks, bit for bit."""
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
    assert runner(name, size, begun, begin=leg_with_opened_files) == alone
    if name in OWN_FILES:
        expected = {rank: {file.format(rank) for file in OWN_FILES[name]} for rank in range(size)}
        assert list_opened_shards(begun) == expected


OWN_FILES = {
    "full_shard": ("__{}.metadata", "__{}_0.distcp"),
    "zero1": ("zero_pp_rank_{}_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"),
    "zero3": (
        "zero_pp_rank_{}_mp_rank_00_optim_states.pt",
        "zero_pp_rank_{}_mp_rank_00_model_states.pt",
        # the only file that records that two parameters are tied
        "zero_pp_rank_0_mp_rank_00_model_states.pt",
    ),
}
"""The files with tensors, or with their positions, that a rank of an unchanged world opens."""


def list_opened_shards(folder: Path) -> dict[int, set[str]]:
    """Return the files with tensors, or with their positions, that each rank has opened."""
    opened = {}
    for path in folder.glob("opened-*.json"):
        counts: dict[str, int] = json.loads(path.read_text())
        assert counts.get("shard_checksums.json", 0) <= 3 and counts["checkpoint_manifest.json"] <= 2
        shards = {name for name in counts if name.endswith((".metadata", ".distcp", ".pt"))}
        opened[int(path.stem.partition("-")[2])] = {Path(name).name for name in shards}
        assert all(counts[name] == 1 for name in shards if name.endswith(".metadata")), counts
    return opened


def test_move_to_half_the_ranks_opens_two_shards_each(begun: Begun, tmp_path: Path, runner: Runner) -> None:
    """Tables of two ranks would be larger than ``.metadata``, because the model is tiny."""
    source, alone = begun("full_shard", 4)
    folder = Path(shutil.copytree(source, tmp_path / "run"))
    assert runner("full_shard", 2, folder, begin=leg_with_opened_files) == pytest.approx(alone, rel=LOSSES)
    shards = {rank: {f"__{2 * rank}_0.distcp", f"__{2 * rank + 1}_0.distcp"} for rank in range(2)}
    opened = list_opened_shards(folder)
    parsing = [rank for rank, names in opened.items() if ".metadata" in names]
    assert len(parsing) == 1  # the other rank maps the index
    opened[parsing[0]].remove(".metadata")
    assert opened == {rank: shards[rank] | {f"__{2 * rank}.metadata"} for rank in range(2)}


def leg_from_foreign_checkpoint(folder: Path, corpus: Path, settings: dict[str, Any]) -> int:
    """Begin a run at a checkpoint of another program, and count the files that each rank opens."""
    source = folder.parent / "foreign" / "checkpoints" / stored(folder).name
    return leg_with_opened_files(folder, corpus, {**settings, "checkpoint__resume": str(source)})


@pytest.mark.parametrize("size", [4, 2])
@pytest.mark.parametrize("writer", ["an earlier version", "another program"])
def test_move_without_tables_parses_metadata_once_per_node(
    writer: str, size: int, begun: Begun, tmp_path: Path, runner: Runner
) -> None:
    """The other ranks map the index that this rank has written. The index is removed afterwards."""
    source, alone = begun("full_shard", 4)
    folder = Path(shutil.copytree(source, tmp_path / "run"))
    remove_tables(stored(folder))
    begin = leg_with_opened_files
    if writer == "another program":
        begin = leg_from_foreign_checkpoint
        foreign = tmp_path / "foreign" / "checkpoints"
        foreign.mkdir(parents=True)
        (foreign / stored(folder).name).mkdir()
        for path in stored(folder).iterdir():
            if path.name == ".metadata" or path.suffix == ".distcp":
                shutil.copy(path, foreign / stored(folder).name)
        shutil.rmtree(folder)
        folder.mkdir()
    assert runner("full_shard", size, folder, begin=begin) == pytest.approx(alone, rel=LOSSES)
    counts = [json.loads(path.read_text()) for path in folder.glob("opened-*.json")]
    assert len(counts) == size and not any(count["shared files"] for count in counts)
    assert sorted(count.get(".metadata", 0) for count in counts) == [0] * (size - 1) + [1]


NUMBERS = {"full_shard": 4, "tpu, no_shard": 0}
NUMBERS |= dict.fromkeys(("no_shard", "zero3", "xla"), 2)
"""Number of world sizes on which the first engine of each class continues. The other engines use one."""


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, size, marks=[] if at < NUMBERS.get(name, 1) else pytest.mark.exhaustive)
        for name, kind in ENGINES.items()
        for at, size in enumerate(kind.sizes)
    ],
)
def test_move_continues_from_reference(
    name: str, size: int, reference: tuple[Path, list[float]], tmp_path: Path, runner: Runner
) -> None:
    folder = Path(shutil.copytree(reference[0], tmp_path / "run"))
    found = runner(name, size, folder)
    assert found == pytest.approx(reference[1], rel=LOSSES)
    record(found, reference[1], LOSSES)


@pytest.mark.parametrize(
    ("kind", "name", "size"),
    [
        ("packed", "full_shard", 3),
        ("packed", "xla, shared", 4),
        ("part", "full_shard", 3),
        ("part", "zero3, offload", 2),
        ("part", "xla", 2),
    ],
)
def test_move_of_packed_conversations_and_frozen_model(
    kind: str, name: str, size: int, begun: Begun, tmp_path: Path, runner: Runner
) -> None:
    """The run moves from one rank to the engine, and back."""
    there, alone = begun("no_shard", 1, kind)
    folder = Path(shutil.copytree(there, tmp_path / "run"))
    assert runner(name, size, folder, kind) == pytest.approx(alone, rel=LOSSES)
    assert_same_view(view(stored(begun(name, size, kind)[0])), view(stored(there)), VIEWS)


def composed() -> Iterable[str]:
    """Yield the lines of the table in ``docs/moving.md``: every case that ``--all`` runs."""
    yield "| configuration | resumes its own run, bit for bit, on | resumes the reference run on |"
    yield "|---|---|---|"
    for name, (_, sizes) in ENGINES.items():
        label = name.replace("layers shared", "tensor parallel").replace("shared", "context parallel")
        yield f"| **{label}** | {sizes[0]} | {', '.join(map(str, sorted(sizes)))} |"


def test_moves_table_of_docs_is_up_to_date() -> None:
    begin, end = "<!-- composed: begin -->\n", "<!-- composed: end -->\n"
    head, rest = PAGE.read_text("utf-8").split(begin)
    page = head + begin + "".join(f"{row}\n" for row in composed()) + end + rest.split(end)[1]
    if os.environ.get("PORTABLE_WRITE_DOCS") == "1":
        PAGE.write_text(page, "utf-8")
    assert PAGE.read_text("utf-8") == page
