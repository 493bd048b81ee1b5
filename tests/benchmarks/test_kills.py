"""The kill benchmark still runs and detects faults. Its page has the results."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from benchmarks import kills
from benchmarks.kills import KEEP, Attack, Launch, Outcome, Run
from portable.reporting.metrics import METRICS_FILE
from tests.runs import configured
from tests.zygote import Zygote


def kill_forks(run: Run) -> None:
    """Send SIGKILL to the process of the launch, and to its fork, which would otherwise outlive it."""
    # now, because an ending process shows no files, but still has the lock of the folder
    forks = run.processes()
    run.signal(signal.SIGKILL)
    for pid in forks:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    kills.until(lambda: not any(map(kills._alive, forks)))


@pytest.mark.usefixtures("quick_python")
def test_kills_program_kills_during_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zygote: Zygote
) -> None:
    """The rank is a fork without a launcher. Other kinds of kills need both, and real processes."""
    monkeypatch.setattr(kills, "KINDS", {"saving": kills.KINDS["saving"]})
    monkeypatch.setattr(kills, "FORKS", zygote.folder.name)
    monkeypatch.setattr(kills, "RANKS", 1)
    monkeypatch.setattr(Run, "kill_everything", kill_forks)
    report = tmp_path / "report.json"
    flags = ["--kills", "0", "--each", "1", "--conversions", "3", "--engines", "no_shard"]
    assert kills.main([*flags, "--json", str(report)]) == 0
    (outcome,) = json.loads(report.read_text())["runs"]
    assert [launch["kind"] for launch in outcome["launches"]] == ["saving"]
    assert outcome["equal"] and not outcome["broken"]


@pytest.fixture
def run(tmp_path: Path, corpus: Path) -> Run:
    """Train a complete run with two checkpoints."""
    from portable.run.rank import run_rank

    settings: dict[str, Any] = {"checkpoint__every_steps": 2, "checkpoint__keep": KEEP}
    assert run_rank("cpu", configured(tmp_path / "a" / "run", corpus, **settings)) == 0
    made = Run(tmp_path / "a", tmp_path / "a" / "run", 8)
    made.cache.mkdir(exist_ok=True)
    return made


def look(run: Run, launch: Launch, before: list[int], output: str = "") -> list[str]:
    """Return the faults found in the folder of a launch."""
    looking, outcome = Attack(run, None, random.Random(0)), Outcome("tried")
    looking._complete = before
    looking.look(launch, output, outcome)
    return outcome.broken


def test_kills_program_detects_faults_of_launch(tmp_path: Path, run: Run) -> None:
    killed = Launch("no_shard", "any", reached=9, code=-9)
    assert look(run, killed, [4, 6]) == []
    assert "steps [7] are gone" in look(run, killed, [6, 7])[0]
    assert "lost the steps since 8" in look(run, Launch("no_shard", "any", reached=13, code=-9), [6, 8])[0]
    stopped = Launch("no_shard", "term", reached=9, code=75)
    assert "exit code 75" in look(run, stopped, [6, 8])[0]
    full = Launch("no_shard", "full", reached=9, code=1)
    assert look(run, full, [6, 8], "error: no space\n") == []
    assert "no one line" in look(run, full, [6, 8], "Traceback ...\nerror: no space\n")[0]
    assert "exit code 0" not in "".join(look(run, Launch("no_shard", "term", reached=8, code=0), [6, 8]))
    shard = next((tmp_path / "a" / "run" / "checkpoints" / "step-000008").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1000])
    assert "step 8 is not whole" in look(run, killed, [6, 8])[0]


def test_kills_program_detects_other_losses_and_files(tmp_path: Path, run: Run) -> None:
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    whole = Run(tmp_path / "b", tmp_path / "b" / "run", 8)

    def compared() -> str:
        outcome = Outcome("tried")
        kills.compare(outcome, run, whole, exact=True)
        return " ".join(outcome.broken)

    assert compared() == ""
    (run.temporary / "pymp-left").mkdir()
    folder = tmp_path / "a" / "run"
    (folder / "config.yaml").unlink()
    assert "left behind: ['temporary/pymp-left']" in compared()
    assert "not there: ['run/config.yaml']" in compared()
    (folder / "final" / "config.json").write_bytes(b"{}")
    assert "byte for byte" in compared()
    rows = [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]
    rows[0]["loss"] *= 1.001
    (folder / METRICS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "losses differ by" in compared()
