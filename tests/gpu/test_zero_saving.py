"""Background saves under ZeRO: the files have the state of the saved step, and failures end the run."""

from __future__ import annotations

import threading
from typing import Any

import pytest

pytest.importorskip("deepspeed")

from pathlib import Path

from portable.config import RunConfig
from portable.errors import ReportedElsewhereError, RunError
from portable.gpu.zero import saving as zero_saving
from tests.gpu.test_zero_checkpoints import leg
from tests.parity import opened
from tests.ranks import RankPool
from tests.runs import configured


def save_both_ways(config: RunConfig, folder: Path) -> list[str]:
    """Save a step in the foreground, and in the background with a delay of two steps.

    Returns:
        Files of this rank whose bytes differ.
    """
    import torch.distributed as dist

    go = threading.Event()
    write = zero_saving._CheckpointFile.write

    def held_up(file: Any) -> None:
        assert go.wait(60)
        write(file)

    one, other = folder / "foreground", folder / "background"
    with opened(config) as trial, pytest.MonkeyPatch.context() as patch:
        trial.step(3e-3)
        for path in (one, other):
            path.mkdir(exist_ok=True)
        trial.engine.save_shards(one, background=False).wait()
        patch.setattr(zero_saving._CheckpointFile, "write", held_up)
        handle = trial.engine.save_shards(other, background=True)
        for _ in range(2):
            assert not handle.is_done()
            trial.step(3e-3)
        go.set()
        handle.wait()
        dist.barrier()
        files = sorted(path.relative_to(one) for path in one.rglob("*.pt"))
        ranks = dist.get_world_size()
        # Optimizer shards, and model states.
        assert len(files) == ranks + (ranks if config.strategy == "zero3" else 1)
        return [str(file) for file in files if different(one / file, other / file)]


def different(one: Path, other: Path) -> bool:
    """Return whether two files of torch have other tensors or values. Their names are part of zip files."""
    import torch
    from torch.utils._pytree import tree_flatten

    found = [tree_flatten(torch.load(path, weights_only=False))[0] for path in (one, other)]
    same = [
        torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(*found, strict=True)
        if isinstance(a, torch.Tensor | int | float | str | None)
    ]
    return len(same) < 10 or not all(same)


@pytest.mark.parametrize(("strategy", "offload"), [("zero1", "none"), ("zero2", "cpu"), ("zero3", "none")])
def test_zero_background_save_has_state_of_its_step(
    strategy: str, offload: str, tmp_path: Path, corpus: Path, ranks: RankPool
) -> None:
    settings: dict[str, Any] = {"strategy": strategy, "memory__offload_optimizer": offload}
    config = configured(tmp_path, corpus, precision="bf16", train__micro_batch_size=1, **settings)
    assert ranks.run(2, save_both_ways, config, tmp_path) == []


def leg_with_a_full_disk(
    folder: Path, corpus: Path, settings: dict[str, Any], full_rank: int, error: Exception
) -> str:
    """Train while ``error`` is raised for ``full_rank``'s second checkpoint. Returns this rank's error."""
    import os

    write, written = zero_saving._CheckpointFile.write, 0

    def failing(file: Any) -> None:
        nonlocal written
        written += "step-000002" not in str(file.path)
        if written and int(os.environ["RANK"]) == full_rank:
            raise error
        write(file)

    # The second rank to end may find that the first has already ended and reported the error.
    ended = pytest.raises((RunError, ReportedElsewhereError))
    with pytest.MonkeyPatch.context() as patch, ended as caught:
        patch.setattr(zero_saving._CheckpointFile, "write", failing)
        leg(folder, corpus, settings)
    return str(caught.value)


@pytest.mark.parametrize(
    ("full_rank", "error", "words", "background"),
    [
        (0, OSError(28, "No space left on device"), "No space left", True),
        (1, MemoryError(), "MemoryError); last", True),
        (1, OSError(28, "No space left on device"), "No space left", False),
    ],
)
def test_zero_failed_save_ends_run(
    full_rank: int,
    error: Exception,
    words: str,
    background: bool,
    tmp_path: Path,
    corpus: Path,
    ranks: RankPool,
) -> None:
    """One rank cannot write. All ranks get the reason, and the error names the last good checkpoint."""
    settings = {"strategy": "zero2", "checkpoint__every_steps": 2, "checkpoint__async": background}
    told = ranks.run(2, leg_with_a_full_disk, tmp_path / "run", corpus, settings, full_rank, error)
    assert "step-000004: could not be written" in told
    assert words in told
    assert f"last good checkpoint: {tmp_path}/run/checkpoints/step-000002; correct the cause" in told
    names = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert "step-000002" in names
    assert "step-000004" not in names
