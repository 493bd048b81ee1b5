"""Kill a run a hundred times, and resume it on another engine each time.

``python -m benchmarks.chaos --docs docs/moving.md`` trains a tiny model. Each launch is ended by a blow:
SIGKILL of the launcher or of one rank (also during a save, or around the rename that publishes it),
SIGTERM, two of them at once, or a full disk. The next launch uses another engine. At the end the run is
compared with an undisturbed one; a shorter run on each single engine must equal its undisturbed twin byte
for byte. Exits with 1 if a promise was broken.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("USE_TORCH_XLA", "0")

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.inotify import CREATED, RENAMED, Watch
from benchmarks.machine import command_line, describe_machine, machine_in_words
from benchmarks.pages import put_into
from benchmarks.small_disk import SmallDisk, small_disk
from benchmarks.train_overhead import SMALL_MODEL
from converters import CheckpointError, open_checkpoint
from portable.checkpoint.store import Checkpoints
from portable.checkpoint.trainer_state import STATE_FILE, TrainerState
from portable.errors import DamagedError, UserError
from portable.reporting.metrics import METRICS_FILE, read_metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

ENGINES = ("full_shard", "zero2", "xla", "no_shard", "zero3")
RANKS = 2
EVERY, KEEP = 2, 2
STEPS_A_KILL = 5
MOST_LOST = 2 * EVERY
"""Steps that a kill may cost: one save may be under way when the next is due."""
LOSSES, WEIGHTS = 1e-5, 1e-4
"""Largest relative differences between a run on several engines and an undisturbed one."""
BEGIN, END = "<!-- benchmarks.chaos: begin -->", "<!-- benchmarks.chaos: end -->"
EXIT_STOPPED = 75
PATIENCE = 180.0  # seconds, for every wait

KINDS = {
    "starting": "SIGKILL of the launcher as the launch starts",
    "launcher": "SIGKILL of the launcher",
    "rank": "SIGKILL of one rank",
    "saving": "SIGKILL while shards are written",
    "before rename": "SIGKILL when all is written, ahead of the rename",
    "after rename": "SIGKILL at the rename",
    "removing": "SIGKILL while an old checkpoint is removed",
    "term": "SIGTERM",
    "two terms": "SIGTERM, and a second one at once",
    "full": "full disk, and a start on it",
    "full for a moment": "full disk that is freed as the run ends",
}
"""Every way to end a launch. Blows aimed at a moment count under ``aimed`` and, if they hit it, ``hit``."""
WITH_DISK = ("full", "full for a moment")
MOMENTS = ("saving", "before rename", "after rename", "removing")


@dataclass
class Launch:
    """One launch: the blow, and the result."""

    engine: str
    kind: str
    resumed: int = 0
    reached: int = 0
    """The last step in its metrics."""
    kept: int = 0
    """The newest complete checkpoint afterwards."""
    moment: str = "between saves"
    """The state of the folder at the SIGKILL."""
    code: int | None = None
    seconds: float = 0.0


@dataclass
class Outcome:
    """A run's launches, and the promises that they broke."""

    name: str
    launches: list[Launch] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    loss_difference: float = math.nan
    weight_difference: float = math.nan
    equal: bool = False
    refused_starts: int = 0

    @property
    def lost(self) -> int:
        """The most steps that a launch repeated."""
        return max((launch.reached - launch.kept for launch in self.launches), default=0)


class Run:
    """One run's folder, and the launches in it.

    Args:
        scratch: for the launchers' notes, the text and the token cache.
        folder: of the run.
        steps: of its schedule.
        ranks: ranks or devices of each launch; this module's default otherwise.
        temporary: folder for temporary files of all launches; by default each has its own.
        changes: settings that differ from this module's.
    """

    def __init__(
        self,
        scratch: Path,
        folder: Path,
        steps: int,
        *,
        ranks: int | None = None,
        temporary: Path | None = None,
        changes: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder = folder
        self.ranks_wanted = ranks or RANKS
        self._temporary = temporary
        self._changes = dict(changes or {})
        self.checkpoints = Checkpoints(folder / "checkpoints", keep=None)
        self._scratch = scratch
        self._steps = steps
        self._process: subprocess.Popen[str] | None = None
        self._notes = scratch / "notes"

    def start(self, engine: str, until: int | None = None) -> None:
        """Start a launch that ends at step ``until`` unless it is killed."""
        text = self._scratch / "text.txt"
        if not text.exists():
            text.write_text("\n".join(f"line {i} of a text with {i * i} words" for i in range(3000)))
        settings: dict[str, Any] = {
            "backend": "xla" if engine == "xla" else "cpu",
            "strategy": "full_shard" if engine == "xla" else engine,
            "precision": "fp32",
            "output_dir": str(self.folder),
            "model.config": SMALL_MODEL,
            "data.source": str(text),
            "data.cache_dir": str(self._scratch / "cache"),
            "data.seq_len": 32,
            "data.eval_fraction": 0,
            "train.steps": self._steps,
            "train.learning_rate": 1e-4,
            "train.global_batch_size": 4,
            "train.micro_batch_size": 2 if engine != "xla" else 1,
            "train.eval_every": None,
            "checkpoint.every_steps": EVERY,
            "checkpoint.keep": KEEP,
            "log.every_steps": 1,
            "log.trackers": [],
            "log.sample_tokens": 0,
        }
        settings |= self._changes
        if until is not None:
            settings["train.stop_after"] = min(until, self._steps)
        flags = [f"--{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in settings.items()]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if engine == "xla":
            environment |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(self.ranks_wanted)}
        else:
            flags += ["--nproc", str(self.ranks_wanted)]
        self._notes = Path(tempfile.mkdtemp(prefix="notes-", dir=self._scratch))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "portable.cli", *flags],
            env={**environment, "TMPDIR": str(self._temporary or self._notes)},
            stdout=subprocess.DEVNULL,
            stderr=(self._notes / "stderr").open("w"),
            text=True,
        )

    @property
    def pid(self) -> int:
        """The launch's first process."""
        assert self._process is not None
        return self._process.pid

    def wait(self) -> tuple[int, str]:
        """Wait until all processes have ended; return exit code and output."""
        assert self._process is not None
        pids = self.ranks()
        code = self._process.wait(PATIENCE)
        until(lambda: not any(map(_alive, pids)))
        return code, self.output()

    def output(self) -> str:
        return (self._notes / "stderr").read_text()

    def processes(self) -> list[int]:
        """The live processes of the launch: those that write to its output file."""
        output = str(self._notes / "stderr")
        found = []
        for process in Path("/proc").iterdir():
            with suppress(OSError):  # no process, or one that has ended
                if process.name.isdigit() and str((process / "fd" / "2").readlink()) == output:
                    found.append(int(process.name))
        return found

    def begun(self) -> bool:
        """Whether the launch has reported its start and is about to train."""
        return any(line.startswith(("resuming at step ", "starting")) for line in self.output().splitlines())

    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def ranks(self) -> list[int]:
        """The process of each rank that is running; for XLA the started process."""
        assert self._process is not None
        folder = self._temporary or self._notes
        names = [path.name.split(".") for path in folder.glob("portable-launch-*/rank*.*.pid")]
        names = [name for name in names if _alive(int(name[1]))]  # others belong to an earlier launch
        return [int(pid) for _, pid, _ in sorted(names)] or [self._process.pid]

    def signal(self, number: int) -> None:
        """Send a signal to the launcher."""
        assert self._process is not None
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, number)

    def kill_everything(self) -> None:
        """SIGKILL rank 0, which renames the folders, then the launcher, which takes all ranks with it."""
        with suppress(ProcessLookupError):
            os.kill(self.ranks()[0], signal.SIGKILL)
        self.signal(signal.SIGKILL)

    def step(self) -> int:
        """The last step in the metrics."""
        path = self.folder / METRICS_FILE
        return max((row["step"] for row in read_metrics(self.folder)), default=0) if path.exists() else 0

    def losses(self) -> dict[int, float]:
        return {row["step"]: row["loss"] for row in read_metrics(self.folder) if "loss" in row}

    def model(self) -> bytes:
        return (self.folder / "final" / "model.safetensors").read_bytes()


def until(condition: Callable[[], bool], seconds: float = PATIENCE, poll: float = 0.002) -> None:
    """Poll ``condition`` until it is true.

    Raises:
        TimeoutError: it does not become true.
    """
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("what was waited for did not happen")
        time.sleep(poll)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Chaos:
    """Launches of one run, each with its blow and a check of the folder after it."""

    def __init__(self, run: Run, disk: SmallDisk | None, dice: random.Random) -> None:
        self._run = run
        self._disk = disk
        self._dice = dice
        self._complete: list[int] = []

    def launch(self, engine: str, kind: str, outcome: Outcome) -> bool:
        """Resume with ``engine`` until the blow; False if the launch ended before it."""
        run, launch = self._run, Launch(engine, kind)
        begun = time.monotonic()
        at = self._newest()
        target = at + self._dice.randint(1, STEPS_A_KILL - 1)
        run.start(engine, until=at + 4 * STEPS_A_KILL)
        struck = self._strike(kind, at, target)
        launch.code, output = run.wait()
        # The launch drops rows after its first step, so only its own output says where it started.
        launch.resumed = _resumed(output)
        launch.reached = run.step()
        self._look(launch, output, outcome)
        if kind == "full" and self._disk is not None:
            self._start_on_full_disk(engine, outcome)
        if self._disk is not None:
            self._disk.free()
        launch.seconds = time.monotonic() - begun
        if launch.resumed != at and kind != "starting":
            outcome.broken.append(
                f"{engine}: went on from step {launch.resumed}, and {at} was there\n{output[-2000:]}"
            )
        if struck:
            outcome.launches.append(launch)
        return struck

    # -- blows -------------------------------------------------------------------------------------------

    def _strike(self, kind: str, at: int, target: int) -> bool:
        """End the running launch; False if it ended by itself."""
        run = self._run
        if kind == "starting":
            # Strike before training: a fast machine may otherwise reach the run's end.
            end = time.monotonic() + self._dice.uniform(0, 10)
            until(lambda: time.monotonic() > end or run.begun() or not run.running())
            run.signal(signal.SIGKILL)
            return True
        # It has dropped rows that the earlier launch logged after its last checkpoint.
        until(lambda: not run.running() or run.begun())
        until(lambda: not run.running() or run.step() > at)
        if kind in MOMENTS:
            return self._at_moment(kind)
        until(lambda: not run.running() or run.step() >= target)
        if not run.running():
            return False
        if kind == "launcher":
            run.signal(signal.SIGKILL)
        elif kind == "rank":
            with suppress(ProcessLookupError):
                os.kill(self._dice.choice(run.ranks()), signal.SIGKILL)
        elif kind in ("term", "two terms"):
            run.signal(signal.SIGTERM)
            if kind == "two terms":
                time.sleep(self._dice.choice((0, 0, 0.01, 0.1)))
                run.signal(signal.SIGTERM)
        elif self._disk is not None:
            self._disk.fill(leave=self._dice.choice((0, 16 << 10, 100 << 10, 300 << 10)))
        return True

    def _at_moment(self, kind: str) -> bool:
        """SIGKILL at a moment of the next save, which inotify reports."""
        run, folder = self._run, self._run.checkpoints.path
        with Watch() as watch:
            until(lambda: not run.running() or folder.exists())
            watch.add(folder)
            patience = self._dice.uniform(0, 0.02)
            for what, path in watch.events(run.running, PATIENCE):
                if what == CREATED and path.suffix == ".partial":
                    if kind == "saving":
                        time.sleep(patience)
                        break
                    if kind == "before rename":
                        watch.add(path)
                elif what == RENAMED and kind == _renamed(path):
                    break
            struck = run.running()
            run.kill_everything()
        return struck

    def _start_on_full_disk(self, engine: str, outcome: Outcome) -> None:
        """A start on a full disk must end with one line and change nothing."""
        assert self._disk is not None
        before = self._newest()
        self._disk.fill(leave=0)
        self._run.start(engine)
        code, output = self._run.wait()
        outcome.refused_starts += 1
        if code not in (1, 2) or not _one_error(output):
            outcome.broken.append(
                f"{engine}: a start on a full disk ended with {code} and output\n{output[-3000:]}"
            )
        if self._newest() != before:
            outcome.broken.append(f"{engine}: a start on a full disk cost the checkpoint of step {before}")

    # -- looking -----------------------------------------------------------------------------------------

    def _newest(self) -> int:
        return max((step for step, _ in self._run.checkpoints.complete()), default=0)

    def _look(self, launch: Launch, output: str, outcome: Outcome) -> None:
        """Check the promises on what a launch left."""
        broken = outcome.broken
        where = f"{launch.engine}, {KINDS[launch.kind]}, step {launch.reached}"
        complete = self._run.checkpoints.complete()
        steps = [step for step, _ in complete]
        launch.kept = max(steps, default=0)
        if lost := self._lost(steps):
            broken.append(f"{where}: the checkpoints of steps {lost} are gone")
        self._complete = steps
        for step, folder in complete:
            try:
                TrainerState.read(folder)
                _read_through(folder)
            except (UserError, DamagedError, CheckpointError) as error:
                broken.append(f"{where}: the checkpoint of step {step} is not whole: {error}")
        if launch.reached - launch.kept > MOST_LOST:
            broken.append(f"{where}: lost the steps since {launch.kept}")
        if launch.code == EXIT_STOPPED and launch.kept != launch.reached:
            broken.append(f"{where}: exit code 75, and the last checkpoint is of step {launch.kept}")
        allowed: dict[str, tuple[int, ...]] = {
            "starting": (-signal.SIGKILL,),
            "launcher": (-signal.SIGKILL,),
            # A rank may be the only process.
            "rank": (1, -signal.SIGKILL),
            "term": (EXIT_STOPPED,),
            "two terms": (EXIT_STOPPED, 1, -signal.SIGTERM),
            **dict.fromkeys(WITH_DISK, (1, 2)),
            # Rank 0 is killed first, so its launcher may report that before it is killed itself.
            **dict.fromkeys(MOMENTS, (1, -signal.SIGKILL)),
        }
        if launch.code not in (*allowed[launch.kind], 0):
            broken.append(f"{where}: exit code {launch.code}\n{output[-3000:]}")
        if launch.code in (1, 2) and not _one_error(output):
            broken.append(f"{where}: no one line about it\n{output[-3000:]}")
        launch.moment = self._moment(complete)

    def _lost(self, steps: list[int]) -> list[int]:
        """Complete checkpoints that are missing although fewer than ``KEEP`` newer ones exist."""
        gone = [step for step in self._complete if step not in steps]
        return [step for step in gone if sum(other > step for other in steps) < KEEP]

    def _moment(self, complete: list[tuple[int, Path]]) -> str:
        path = self._run.checkpoints.path
        names = [entry.name for entry in path.iterdir()] if path.exists() else []
        partial = [name for name in names if name.endswith(".partial")]
        if any(name.endswith(".old.partial") for name in partial):
            return "removing"
        if any((path / name / STATE_FILE).exists() for name in partial):
            return "before rename"
        if partial:
            return "saving"
        return "after rename" if len(complete) > KEEP else "between saves"


def _renamed(path: Path) -> str:
    """Time at which ``path`` was renamed."""
    if path.name == STATE_FILE:
        return "before rename"
    return "removing" if path.name.endswith(".old.partial") else "after rename"


def _read_through(folder: Path) -> None:
    """Read every byte of a checkpoint, checksums and all."""
    checkpoint = open_checkpoint(folder)
    for tensor in checkpoint.tensors.values():
        tensor.read()
    assert checkpoint.optimizer is not None
    for values in checkpoint.optimizer.state.values():
        for value in values.values():
            if not isinstance(value, (int, float)):
                value.read()


def _resumed(output: str) -> int:
    marks = [line.split()[3] for line in output.splitlines() if line.startswith("resuming at step ")]
    return int(marks[0]) if marks else 0


def _one_error(output: str) -> bool:
    return sum(line.startswith("error: ") for line in output.splitlines()) == 1 and "Traceback" not in output


def plan(dice: random.Random, engines: Sequence[str], kills: int, *, disk: bool) -> Iterator[tuple[str, str]]:
    """Engine and blow of each launch; every blow meets every engine before a pair repeats."""
    decks: dict[str, list[str]] = {engine: [] for engine in engines}
    for number in range(kills):
        engine = engines[number % len(engines)]
        if not decks[engine]:
            decks[engine] = [kind for kind in KINDS if disk or kind not in WITH_DISK]
            dice.shuffle(decks[engine])
        yield engine, decks[engine].pop()


def chaos(
    name: str,
    engines: Sequence[str],
    kills: int,
    scratch: Path,
    disk: SmallDisk | None,
    dice: random.Random,
    bar: tqdm[Any],
) -> Outcome:
    """Strike a run ``kills`` times, let it finish, and compare it with an undisturbed one."""
    steps = (kills + 1) * STEPS_A_KILL
    outcome = Outcome(name)
    whole = Run(scratch, scratch / f"{name}-whole", steps)
    whole.start(engines[0])
    code, output = whole.wait()
    if code:
        raise RuntimeError(f"the undisturbed run ended with {code}\n{output}")
    run = Run(scratch, (disk.path if disk is not None else scratch) / name, steps)
    struck = Chaos(run, disk, dice)
    for engine, kind in plan(dice, engines, kills, disk=disk is not None):
        for _ in range(3):
            if struck.launch(engine, kind, outcome):
                break
        else:
            outcome.broken.append(
                f"{engine}, {KINDS[kind]}: the launch ended three times before it was struck"
            )
        bar.set_postfix_str(f"{engine}, {kind}, step {run.step()}, broken {len(outcome.broken)}")
        bar.update()
    run.start(engines[0])
    code, output = run.wait()
    if code:
        outcome.broken.append(f"the last launch ended with {code}\n{output[-3000:]}")
        return outcome
    compare(outcome, run, whole, exact=len(engines) == 1)
    return outcome


def compare(outcome: Outcome, run: Run, whole: Run, *, exact: bool) -> None:
    """Compare a run with the undisturbed one."""
    ours, theirs = run.losses(), whole.losses()
    if list(ours) != list(theirs):
        outcome.broken.append(f"the metrics have steps {list(ours)[:5]}... and not each once")
        return
    outcome.loss_difference = max(abs(ours[step] - loss) / abs(loss) for step, loss in theirs.items())
    weights, others = _weights(run), _weights(whole)
    outcome.weight_difference = max(
        float(np.abs(weights[name] - other).max() / np.abs(other).max()) for name, other in others.items()
    )
    outcome.equal = run.model() == whole.model() and ours == theirs
    if exact and not outcome.equal:
        outcome.broken.append("losses or final weights are not those of the undisturbed run, byte for byte")
    if outcome.loss_difference > LOSSES or outcome.weight_difference > WEIGHTS:
        outcome.broken.append(
            f"losses differ by {outcome.loss_difference:.1e}, weights by {outcome.weight_difference:.1e}"
        )


def _weights(run: Run) -> Mapping[str, Any]:
    tensors = open_checkpoint(run.folder / "final").tensors
    return {name: tensor.read().astype("f8") for name, tensor in tensors.items()}


def tables(outcomes: Sequence[Outcome]) -> str:
    """Two Markdown tables: blows by kind, and the result of each run."""
    launches = [launch for outcome in outcomes for launch in outcome.launches]
    aimed = Counter(launch.kind for launch in launches)
    hit = Counter(launch.moment for launch in launches if launch.kind in MOMENTS)
    lines = [
        "| blow | times | of these in that very moment | steps lost, at most |",
        "| --- | ---: | ---: | ---: |",
    ]
    for kind, words in KINDS.items():
        if not aimed[kind]:
            continue
        lost = max(launch.reached - launch.kept for launch in launches if launch.kind == kind)
        exactly = (
            sum(launch.moment == kind for launch in launches if launch.kind == kind)
            if kind in MOMENTS
            else ""
        )
        lines.append(f"| {words} | {aimed[kind]} | {exactly} | {lost} |")
    lines.append(f"| **together** | **{len(launches)}** | | **{max(o.lost for o in outcomes)}** |")
    found = ", ".join(f"{moment}: {times}" for moment, times in sorted(hit.items()))
    lines += ["", f"What the kills aimed at a moment found the folder doing: {found}.", ""]
    lines += [
        "| run | launches ended by a blow | resumed | starts on a full disk | steps lost, at most "
        "| losses differ by | weights differ by |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for outcome in outcomes:
        resumed = sum(launch.resumed > 0 for launch in outcome.launches) + 1
        figures = (
            "0, byte for byte | 0, byte for byte"
            if outcome.equal
            else f"{outcome.loss_difference:.1e} | {outcome.weight_difference:.1e}"
        )
        lines.append(
            f"| {outcome.name} | {len(outcome.launches)} | {resumed} | {outcome.refused_starts} "
            f"| {outcome.lost} | {figures} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="in the run that moves")
    parser.add_argument("--each", type=int, default=10, help="in the run of each engine alone")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write everything there")
    parser.add_argument("--docs", type=Path, metavar="PAGE", help="put the tables into this page")
    given = parser.parse_args(argv)
    command = command_line("benchmarks.chaos", argv)
    machine = describe_machine(torch.device("cpu"), "deepspeed", "torch_xla")
    dice = random.Random(given.seed)
    begun = time.monotonic()
    outcomes: list[Outcome] = []
    runs = [("moving", tuple(given.engines), given.kills)] if given.kills else []
    runs += [(engine, (engine,), given.each) for engine in given.engines if given.each]
    bar: tqdm[Any] = tqdm(total=sum(kills for _, _, kills in runs), unit="kill", dynamic_ncols=True)
    with tempfile.TemporaryDirectory(prefix="chaos-") as scratch, small_disk(Path(scratch)) as disk, bar:
        if disk is None:
            print("no file system may be mounted here: no full disks", file=sys.stderr)
        for name, engines, kills in runs:
            outcomes.append(chaos(name, engines, kills, Path(scratch), disk, dice, bar))
            if given.json is not None:
                values = {"command": command, "machine": machine, "runs": [asdict(o) for o in outcomes]}
                given.json.write_text(json.dumps(values, indent=1) + "\n", "utf-8")
            for line in outcomes[-1].broken:
                tqdm.write(f"BROKEN: {name}: {line}")
    told = (
        f"{time.strftime('%Y-%m-%d')}, `{command}`, {(time.monotonic() - begun) / 60:.0f} minutes; "
        + machine_in_words(machine)
    )
    print(f"{tables(outcomes)}\n\n{told}")
    broken = [f"{outcome.name}: {line}" for outcome in outcomes for line in outcome.broken]
    checkpoints_lost = sum("are gone" in line or "is not whole" in line for line in broken)
    print(f"checkpoints lost: {checkpoints_lost}; promises broken: {len(broken)}")
    print("\n".join(broken))
    if given.docs is not None and not broken:
        put_into(given.docs, f"\n{tables(outcomes)}\n\n{told}\n", BEGIN, END)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
