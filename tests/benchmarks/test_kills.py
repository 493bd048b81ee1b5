"""The kills at random moments still run, and see what is broken."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from benchmarks import kills
from benchmarks.chaos import KEEP, Launch
from benchmarks.kills import Conversions, Cycle, Killing, Tally
from portable.reporting.metrics import METRICS_FILE
from tests.runs import configured

if TYPE_CHECKING:
    from pathlib import Path

    from tests.zygote import Zygote


@pytest.mark.usefixtures("quick_python")
def test_a_few_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zygote: Zygote) -> None:
    for name, value in {
        "LAUNCHES": 1,
        "AFTER": 0,
        "CONVERTED": 3,
        "STEPS": 4,
        "FORKS": zygote.folder.name,
    }.items():
        monkeypatch.setattr(kills, name, value)
    monkeypatch.setitem(kills.ENGINES, "no_shard", (1,))
    report = tmp_path / "report.json"
    assert kills.main(["--runs", "1", "--engines", "no_shard", "--json", str(report)]) == 0
    told = json.loads(report.read_text())
    assert told["finished"] == 4
    assert not told["lost"] + told["left"] + told["other"]


@pytest.mark.exhaustive
def test_kills_of_every_phase(tmp_path: Path) -> None:
    """Launchers of two ranks, forked."""
    report = tmp_path / "report.json"
    assert kills.main(["--forks", "--runs", "2", "--engines", "zero2", "--json", str(report)]) == 0
    assert sum(times for _, _, times in json.loads(report.read_text())["kills"]) > 20


@pytest.mark.exhaustive
def test_kills_of_saves_strike_saves(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    flags = ["--forks", "--saves", "--runs", "1", "--engines", "full_shard", "--json", str(report)]
    assert kills.main(flags) == 0
    told = json.loads(report.read_text())
    assert told["halves"] >= 3 and told["finished"] == 1


@pytest.fixture
def cycle(tmp_path: Path, corpus: Path) -> Cycle:
    """A run that is complete."""
    from portable.run.rank import run_rank

    made = Cycle(tmp_path / "cycle", "no_shard", 1)
    made.cache.mkdir()
    settings = {"checkpoint__every_steps": 2, "checkpoint__keep": KEEP}
    assert run_rank("cpu", configured(made.folder, corpus, **settings)) == 0
    return made


@pytest.fixture
def killing(cycle: Cycle, monkeypatch: pytest.MonkeyPatch) -> Killing:
    """Of the complete run, whose last launch begins where it ended and does nothing."""
    steps = cycle.run.step()
    monkeypatch.setattr(kills, "STEPS", steps)
    monkeypatch.setattr(cycle, "alone", lambda: (0, f"resuming at step {steps} of {steps}\n"))
    monkeypatch.setattr(cycle.run, "processes", list)
    made = Killing(cycle, cycle.whole(), random.Random(0), Tally())
    made._look(Launch("no_shard", "launcher", code=-9), "export", "")
    made.finish()
    assert made._tally.broken == []
    return made


def test_what_is_lost_is_seen(cycle: Cycle, killing: Killing) -> None:
    lost, final = killing._tally.lost, cycle.folder / "final"
    killed = Launch("no_shard", "launcher", code=-9)
    killing._look(killed, "export", "resuming at step 2 of 8\n")
    assert "went on from ['2']" in lost.pop()
    (final / "model.safetensors").write_bytes(b"")
    killing._look(killed, "export", "")
    assert "final is not whole" in lost.pop()
    shutil.rmtree(final)
    killing._look(killed, "export", "")
    assert "final is gone" in lost.pop()
    newest = max((cycle.folder / "checkpoints").iterdir())
    shutil.rmtree(newest)
    killing._look(killed, "save", "")
    assert any("are gone" in line for line in lost)


def test_another_loss_or_a_name_too_many_is_seen(cycle: Cycle, killing: Killing) -> None:
    tally = killing._tally
    (cycle.folder / "checkpoints" / ".step-000010.partial").mkdir()
    (cycle.temporary / "pymp-left").mkdir()
    killing.finish()
    assert ".step-000010.partial" in tally.left[0]
    assert "pymp-left" in tally.left[0]
    assert tally.lost == []
    rows = [json.loads(line) for line in (cycle.folder / METRICS_FILE).read_text().splitlines()]
    rows[0]["loss"] += 1e-6
    (cycle.folder / METRICS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (cycle.folder / "config.yaml").unlink()
    killing.finish()
    assert "losses" in tally.lost[0]
    assert "config.yaml" in tally.lost[1]


@pytest.mark.usefixtures("quick_python")
def test_half_a_conversion_is_seen(
    tmp_path: Path, cycle: Cycle, monkeypatch: pytest.MonkeyPatch, zygote: Zygote
) -> None:
    monkeypatch.setattr(kills, "FORKS", zygote.folder.name)
    tally = Tally()
    conversions = Conversions(tmp_path / "conversions", cycle, random.Random(0), tally)
    conversions.finish()
    assert tally.broken == []
    monkeypatch.setattr(conversions, "_start", lambda *_: subprocess.Popen(["true"]))
    conversions.kill()
    assert tally.broken == []
    for folder in conversions._out.values():
        (folder / "config.json").unlink()
    conversions.kill()
    assert "neither the old nor the new" in tally.lost[0]
    (tmp_path / "conversions" / "converted" / ".dcp.old-1-abcdef").mkdir()
    monkeypatch.setattr(conversions, "_alone", lambda *_: None)
    conversions.finish()
    assert ".dcp.old-1-abcdef" in tally.left[0]
    assert "not what an undisturbed conversion wrote" in tally.lost[1]
