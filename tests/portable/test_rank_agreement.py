"""Ranks that were started differently end with the difference named, instead of waiting for each other."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from portable.errors import RUN_ERROR, ReportedElsewhereError, RunError, UserError
from portable.run.rank import run_rank
from tests.ranks import RankPool
from tests.runs import configured

COMMON: dict[str, Any] = {"train__micro_batch_size": 1, "checkpoint__every_steps": 1}


def leg(folder: Path, corpus: Path, settings: dict[str, Any]) -> int:
    return run_rank("cpu", configured(folder, corpus, **COMMON, **settings))


def refusal(folder: Path, corpus: Path, differ: Callable[[Path, Path], dict[str, Any]]) -> str:
    """Return the error of a run whose other ranks use the settings that ``differ`` returns."""
    settings = differ(folder, corpus) if os.environ["RANK"] != "0" else {}
    with pytest.raises((UserError, ReportedElsewhereError)) as refused:
        leg(folder, corpus, settings)
    said = str(refused.value)
    if os.environ["RANK"] == "1":
        (folder.parent / "rank 1 says").write_text(said)
    return said


def another_rate(_: Path, __: Path) -> dict[str, Any]:
    return {"train__learning_rate": 1e-4}


def another_text(_: Path, corpus: Path) -> dict[str, Any]:
    text = corpus.with_name("other") / corpus.name
    text.parent.mkdir(exist_ok=True)
    text.write_text(corpus.read_text().replace("learns", "forgets"))
    return {"data__source": str(text)}


def another_checkpoint(folder: Path, corpus: Path) -> dict[str, Any]:
    """Give this host an older state of the run, as hosts without a common disk may have."""
    own = folder.with_name("of this host")
    shutil.copytree(folder, own)
    shutil.rmtree(max((own / "checkpoints").iterdir()))
    return {"output_dir": str(own)}


@pytest.mark.parametrize(
    ("differ", "named"),
    [
        (another_rate, "train.learning_rate: the value is 0.003 on rank 0, but 0.0001 on rank 1"),
        (another_text, "data.source (fingerprint of the text): "),
    ],
)
def test_start_check_names_difference_between_ranks(
    differ: Callable[[Path, Path], dict[str, Any]], named: str, tmp_path: Path, corpus: Path, ranks: RankPool
) -> None:
    said = ranks.run(2, refusal, tmp_path / "run", corpus, differ)
    assert named in said
    assert (tmp_path / "rank 1 says").read_text() == said
    assert not (tmp_path / "run").exists()


def test_start_check_names_different_checkpoints_of_hosts(
    tmp_path: Path, corpus: Path, ranks: RankPool
) -> None:
    assert ranks.run(2, leg, tmp_path / "run", corpus, {"train__stop_after": 2}) == 0
    said = ranks.run(2, refusal, tmp_path / "run", corpus, another_checkpoint)
    assert (
        "the checkpoint to continue from: the value is 'step-000002' on rank 0, but 'step-000001' on rank 1"
        in said
    )
    assert ranks.run(2, leg, tmp_path / "run", corpus, {"train__stop_after": 3}) == 0


def end_with_outage_on_rank_1(folder: Path, corpus: Path, function: str, settings: dict[str, Any]) -> str:
    """Return the error of a run in which a function raises RunError on rank 1, as in an outage of a store."""

    def raise_run_error(*_: object, **__: object) -> None:
        raise RunError("s3://bucket: the store is away")

    with pytest.MonkeyPatch.context() as patched:
        if os.environ["RANK"] == "1":
            patched.setattr(function, raise_run_error)
            with pytest.raises(RunError) as raised:
                leg(folder, corpus, settings)
            return str(raised.value)
        if function.endswith("open_external_for_model"):
            patched.setattr(function, lambda *_, **__: None)
        with pytest.raises(ReportedElsewhereError) as reported:
            leg(folder, corpus, settings)
        assert reported.value.exit_code == RUN_ERROR
        return str(reported.value)


@pytest.mark.parametrize(
    "function",
    [
        "portable.run.rank.prepare_run",
        "portable.run.restore.TrainerState.verify_files",
        "portable.checkpoint.external.open_external_for_model",
    ],
)
def test_outage_on_one_rank_ends_all_ranks(
    function: str, tmp_path: Path, corpus: Path, ranks: RankPool
) -> None:
    settings: dict[str, Any] = {}
    if function.endswith("verify_files"):
        assert ranks.run(2, leg, tmp_path / "run", corpus, {"train__stop_after": 1}) == 0
    if function.endswith("open_external_for_model"):
        (tmp_path / "external").mkdir()
        settings["checkpoint__resume"] = str(tmp_path / "external")
    said = ranks.run(2, end_with_outage_on_rank_1, tmp_path / "run", corpus, function, settings, timeout=90)
    assert "s3://bucket: the store is away" in said
    assert not list(tmp_path.rglob("*damaged*"))
