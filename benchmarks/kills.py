"""Kill runs and conversions, and check guarantees about the remaining files.

``python -m benchmarks.kills --kills 100 --each 10`` trains a tiny model in several runs. Each
launch of a run is stopped by a SIGKILL, by one or two SIGTERMs, or by a full disk. A SIGKILL is
sent to the launcher or to one rank, either at a random time or at a moment of a save that inotify
reports. The next launch resumes the run. The first run uses a different engine in every launch.
Each of the other runs uses one engine.

After every kill, each checkpoint is read completely, and its checksums are verified. All retained
checkpoints must exist, and errors must have one line. The last launch of a run is not killed, and
its result is compared with an undisturbed run. With several engines, losses may differ by 1e-5 and
weights by 1e-4. With one engine, the results must be equal byte for byte, and the file names in the
run folder, the token cache and the temporary folder must be equal.

``--bucket`` does the same with runs in a bucket on the tests' S3 server. ``--conversions N`` kills
N runs of ``portable-convert --overwrite``, each of which replaces the conversion of a different
step. ``--forks`` runs the commands as forks of one process that has imported all modules. Exits
with 1 if a guarantee is violated.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("USE_TORCH_XLA", "0")

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.harness import SMALL_MODEL
from benchmarks.inotify import CREATED, RENAMED, Watch
from benchmarks.machine import command_line, describe_machine, print_machine
from benchmarks.small_disk import SmallDisk, small_disk
from portable.checkpoint.store import CheckpointStore
from portable.checkpoint.trainer_state import STATE_FILE, TrainerState
from portable.converters import CheckpointError, open_checkpoint
from portable.converters.storage.folder_operations import list_files_below
from portable.converters.storage.path_or_url import is_in_store, parse_path_or_url
from portable.errors import DamagedError, UserError
from portable.output.export import EXPORT_MARKER_FILE
from portable.reporting.metrics import METRICS_FILE, read_metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from portable.converters.storage.path_or_url import AnyPath
    from tests.object_store import ObjectStore

ENGINES = ("full_shard", "zero2", "xla", "no_shard", "zero3")
RANKS = 2
EVERY, KEEP = 2, 2
STEPS_A_KILL = 5
MOST_LOST = 2 * EVERY
"""Maximum number of steps that a kill may lose.

It is two intervals between saves, because one save may still be running when the next save is due.
"""
LOSSES, WEIGHTS = 1e-5, 1e-4
"""Largest accepted relative differences of losses and weights between a killed and an undisturbed run."""
EXIT_STOPPED = 75
PATIENCE = 1800.0  # seconds, for every wait: saves to a bucket take a while
GONE = 10.0
"""Seconds after the end of the launcher within which every process of a launch must end."""
FORKS, FORKED = "forks", "for-"
"""Name of the folder that contains the executables of ``tests.zygote``, and prefix of their forks'
names.
"""

KINDS = {
    "starting": "SIGKILL of the launcher as the launch starts",
    "any": "SIGKILL of the launcher at any moment",
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
"""Description of each kind of kill, for the table."""
WITH_DISK = ("full", "full for a moment")
MOMENTS = ("saving", "before rename", "after rename", "removing")
"""Kinds of kills at a certain moment of a save. inotify reports the file names that mark the moment."""
ALLOWED: Mapping[str, tuple[int, ...]] = {
    "starting": (-signal.SIGKILL,),
    "any": (-signal.SIGKILL,),
    "rank": (1, -signal.SIGKILL),  # the rank may be the only process of the launch
    "term": (EXIT_STOPPED,),
    "two terms": (EXIT_STOPPED, 1, -signal.SIGTERM, 128 + signal.SIGTERM),
    **dict.fromkeys(WITH_DISK, (1, 2)),
    # Rank 0 is killed first, so the launcher may exit with an error before it is killed itself.
    **dict.fromkeys(MOMENTS, (1, -signal.SIGKILL)),
}
"""Allowed exit codes of each kind of kill. 0 means that the launch ended before the kill."""


@dataclass
class Launch:
    """One launch of a run, with its kill and its result."""

    engine: str
    kind: str
    """Kind of kill, a key of ``KINDS``."""
    resumed: int = 0
    """Step at which the launch resumed, or 0 for a new run."""
    reached: int = 0
    """Last step in the metrics."""
    kept: int = 0
    """Step of the newest complete checkpoint after the launch, or 0 if there is none."""
    moment: str = "between saves"
    """State of the checkpoint folder after the kill, such as ``saving``."""
    code: int | None = None
    """Exit code of the launch. None until it has ended."""
    seconds: float = 0.0


@dataclass
class Outcome:
    """Launches of one run, and the results of the checks.

    Attributes:
        name: Name of the run.
        launches: Killed launches.
        broken: Descriptions of violated guarantees.
        loss_difference: Largest relative difference between a loss and the undisturbed run.
        weight_difference: Largest relative difference between a weight and the undisturbed run.
        equal: Whether losses and exported files equal the undisturbed run.
        refused_starts: Number of launches that were attempted on a full disk.
    """

    name: str
    launches: list[Launch] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    loss_difference: float = math.nan
    weight_difference: float = math.nan
    equal: bool = False
    refused_starts: int = 0
    conversions: dict[str, int] = field(default_factory=dict)
    """Number of killed conversions, keyed by the phase of the conversion at the kill."""

    @property
    def lost(self) -> int:
        """Largest number of steps that were lost in a kill and had to be repeated."""
        return max((launch.reached - launch.kept for launch in self.launches), default=0)


class Run:
    """Run of ``portable-train`` in one folder, which is launched several times.

    Args:
        scratch: Folder for launcher output, the training text, the token cache and temporary files.
        folder: Folder of the run, on a disk or in a bucket.
        steps: Number of steps in the schedule.
        ranks: Number of ranks or devices per launch.
        changes: Settings that differ from this module's settings.
    """

    def __init__(
        self,
        scratch: Path,
        folder: AnyPath,
        steps: int,
        *,
        ranks: int | None = None,
        changes: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder = folder
        self.checkpoints: CheckpointStore[Any] = CheckpointStore(folder / "checkpoints", keep=None)
        self._ranks = ranks or RANKS
        self._changes = dict(changes or {})
        self.cache, self.temporary = scratch / "cache", scratch / "temporary"
        self.temporary.mkdir(parents=True, exist_ok=True)
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
            "data.cache_dir": str(self.cache),
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
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.temporary)}
        if engine == "xla":
            environment |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(self._ranks)}
        else:
            flags += ["--nproc", str(self._ranks)]
        self._notes = Path(tempfile.mkdtemp(prefix="notes-", dir=self._scratch))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "portable.cli", *flags],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=(self._notes / "stderr").open("w"),
            text=True,
        )
        wait_for_fork(self._process.pid)

    def wait(self) -> tuple[int, str]:
        """Wait until all ranks have ended, and return the exit code and the output."""
        assert self._process is not None
        pids = self.ranks()
        code = self._process.wait(PATIENCE)
        until(lambda: not any(map(_alive, pids)))
        return code, self.output()

    def alone(self, engine: str) -> tuple[int, str]:
        """Run a launch to its end without killing it, and return the exit code and the output."""
        self.start(engine)
        return self.wait()

    def output(self) -> str:
        return (self._notes / "stderr").read_text()

    def processes(self) -> list[int]:
        """Return the IDs of the launch's processes that are still alive."""
        return writing_to(self._notes / "stderr")

    def begun(self) -> bool:
        """Return whether the launch has printed that it starts or resumes."""
        return any(line.startswith(("resuming at step ", "starting")) for line in self.output().splitlines())

    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def ranks(self) -> list[int]:
        """Return the process ID of each running rank, in rank order.

        If the launcher has no child processes for ranks, as with XLA, its process ID is returned.
        """
        assert self._process is not None
        names = [path.name.split(".") for path in self.temporary.glob("portable-launch-*/rank*.*.pid")]
        names = [name for name in names if _alive(int(name[1]))]  # others belong to a previous launch
        return [int(pid) for _, pid, _ in sorted(names)] or [self._process.pid]

    def signal(self, number: int) -> None:
        """Send a signal to the launcher."""
        assert self._process is not None
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, number)

    def kill_everything(self) -> None:
        """Send SIGKILL to rank 0 and then to the launcher, which also ends the other ranks.

        Rank 0 is killed first, because it could otherwise still rename a checkpoint folder.
        """
        with suppress(ProcessLookupError):
            os.kill(self.ranks()[0], signal.SIGKILL)
        self.signal(signal.SIGKILL)

    def step(self) -> int:
        """Return the last step of the run, or 0 if no step has been logged.

        The step is read from the metrics or, for a run in a bucket, from the output of the launch.
        """
        if is_in_store(self.folder):
            return max(map(int, re.findall(r"^step +(\d+)/", self.output(), re.MULTILINE)), default=0)
        path = self.folder / METRICS_FILE
        return max((row["step"] for row in read_metrics(self.folder)), default=0) if path.exists() else 0

    @property
    def final(self) -> AnyPath:
        """Path of the exported model. It is created on each access, so it has no cached bucket listings."""
        return parse_path_or_url(str(self.folder / "final"))

    def losses(self) -> dict[int, float]:
        return {row["step"]: row["loss"] for row in read_metrics(self.folder) if "loss" in row}

    def names(self) -> set[str]:
        """Return the names of all files in the run folder, the token cache and the temporary folder.

        Logs of failed ranks and temporary upload files are not included.
        """
        found = {f"run/{name}" for name in list_files_below(self.folder) if not name.startswith("log.rank")}
        for folder in (self.cache, self.temporary):
            found |= {str(path.relative_to(folder.parent)) for path in folder.rglob("*")}
        # Ignore the temporary folder for uploads of the last launch, because its name depends on the URL of
        # the bucket.
        return {name for name in found if not name.startswith("temporary/portable-")}


def until(condition: Callable[[], bool], seconds: float = PATIENCE, poll: float = 0.002) -> None:
    """Poll ``condition`` every ``poll`` seconds until it returns True.

    Raises:
        TimeoutError: If ``condition`` does not return True within ``seconds``.
    """
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("what was waited for did not happen")
        time.sleep(poll)


def wait_for_fork(pid: int) -> None:
    """With ``--forks``, wait until the process ``pid`` is a fork or has ended. Otherwise, do nothing.

    Before this, the parent does not have the ID of the fork, and therefore cannot end it.
    """
    if Path(sys.executable).parent.name == FORKS:
        until(lambda: not _alive(pid) or Path(f"/proc/{pid}/comm").read_text().startswith(FORKED))


def writing_to(notes: Path) -> list[int]:
    """Return the IDs of live processes whose standard error is the file ``notes``."""
    found = []
    for process in Path("/proc").iterdir():
        with suppress(OSError):  # not a process, or it has ended
            if process.name.isdigit() and (process / "fd" / "2").readlink() == notes:
                found.append(int(process.name))
    return found


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def files_of(folder: AnyPath) -> dict[str, bytes]:
    """Return the content of each file in an export or a conversion, keyed by relative path.

    The completion marker is excluded, because it contains timestamps.
    """
    found = {name: (folder / name).read_bytes() for name in list_files_below(folder)}
    return {
        name: data
        for name, data in found.items()
        if name != EXPORT_MARKER_FILE and not name.startswith("_COMPLETE")
    }


class Attack:
    """Series of kills of one run. The run folder is checked after each kill.

    Args:
        run: Run to kill.
        disk: Disk that contains the run and can be filled, or None.
        dice: Random number generator that chooses the times of the kills.
        seconds: Approximate duration in seconds of a launch that trains a few steps.
    """

    def __init__(self, run: Run, disk: SmallDisk | None, dice: random.Random, seconds: float = 10.0) -> None:
        self._run = run
        self._disk = disk
        self._dice = dice
        self._seconds = seconds
        self._complete: list[int] = []

    def launch(self, engine: str, kind: str, outcome: Outcome) -> bool:
        """Launch the run, kill it, and check its folder.

        Args:
            engine: Strategy of the launch, or ``xla``.
            kind: Type of kill, a key in ``KINDS``.
            outcome: Outcome that collects the launch and violated guarantees.

        Returns:
            Whether the launch was killed before it ended.
        """
        run, launch = self._run, Launch(engine, kind)
        begun = time.monotonic()
        at = self._newest()
        target = at + self._dice.randint(1, STEPS_A_KILL - 1)
        run.start(engine, until=at + 4 * STEPS_A_KILL)
        struck = self._strike(kind, at, target)
        launch.code, output = run.wait()
        # The launch drops rows after its first step, so only its output shows the step at which it started.
        launch.resumed = _resumed(output)
        launch.reached = max(run.step(), launch.resumed)
        self.look(launch, output, outcome)
        if kind == "full" and self._disk is not None:
            self._start_on_full_disk(engine, outcome)
        if self._disk is not None:
            self._disk.free()
        launch.seconds = time.monotonic() - begun
        if launch.resumed != at and run.begun():
            outcome.broken.append(
                f"{engine}: went on from step {launch.resumed}, and {at} was there\n{output[-2000:]}"
            )
        if struck:
            outcome.launches.append(launch)
        return struck

    # -- blows -------------------------------------------------------------------------------------------

    def _strike(self, kind: str, at: int, target: int) -> bool:
        """Wait for the time of the kill, and kill the running launch.

        Args:
            kind: Type of kill.
            at: Step from which the launch resumes.
            target: Step after which to kill the launch, for types that do not depend on a save.

        Returns:
            Whether the launch was killed before it ended.
        """
        run = self._run
        if kind in ("starting", "any"):
            # Strike before training: a fast machine may otherwise reach the run's end.
            end = time.monotonic() + self._dice.uniform(0, self._seconds)
            until(lambda: time.monotonic() > end or (kind == "starting" and run.begun()) or not run.running())
            struck = run.running()
            run.signal(signal.SIGKILL)
            if not struck:  # the launch ended before the kill, so choose earlier times from now on
                self._seconds /= 2
            return struck
        # Wait for the start, because the launch then drops the rows that the previous launch logged after its
        # last checkpoint. Otherwise the step of such a row would be read.
        until(lambda: not run.running() or run.begun())
        until(lambda: not run.running() or run.step() > at)
        if kind in MOMENTS:
            return self._at_moment(kind)
        until(lambda: not run.running() or run.step() >= target)
        if not run.running():
            return False
        if kind == "rank":
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
        """Send SIGKILL at the moment ``kind`` of the next save.

        Returns False if the launch ended before the save.
        """
        run, folder = self._run, self._run.checkpoints.path
        assert isinstance(folder, Path)
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
        """Check that a start on a full disk fails with a one-line error and changes nothing."""
        assert self._disk is not None
        before = self._newest()
        self._disk.fill(leave=0)
        code, output = self._run.alone(engine)
        outcome.refused_starts += 1
        if code not in (1, 2) or not _one_error(output):
            outcome.broken.append(
                f"{engine}: a start on a full disk ended with {code} and output\n{output[-3000:]}"
            )
        if self._newest() != before:
            outcome.broken.append(f"{engine}: a start on a full disk cost the checkpoint of step {before}")

    # -- looking -----------------------------------------------------------------------------------------

    def _newest(self) -> int:
        return max((step for step, _ in self._run.checkpoints.list_complete()), default=0)

    def look(self, launch: Launch, output: str, outcome: Outcome) -> None:
        """Check the guarantees about files and processes after a launch, and add violations to ``outcome``.

        This sets ``kept`` and ``moment`` of the launch. Processes that have not ended are killed.
        """
        broken = outcome.broken
        where = f"{launch.engine}, {KINDS[launch.kind]}, step {launch.reached}"
        try:
            until(lambda: not self._run.processes(), GONE)
        except TimeoutError:
            broken.append(f"{where}: processes that do not end")
            for pid in self._run.processes():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        complete = self._run.checkpoints.list_complete()
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
        if launch.code not in (*ALLOWED[launch.kind], 0):
            broken.append(f"{where}: exit code {launch.code}\n{output[-3000:]}")
        if launch.code in (1, 2) and not _one_error(output):
            broken.append(f"{where}: no one line about it\n{output[-3000:]}")
        launch.moment = self._moment(complete)

    def _lost(self, steps: list[int]) -> list[int]:
        """Return the steps of complete checkpoints that have wrongly disappeared since the previous launch.

        A checkpoint may only be removed if at least ``KEEP`` newer checkpoints exist.

        Args:
            steps: Steps of the currently complete checkpoints.
        """
        gone = [step for step in self._complete if step not in steps]
        return [step for step in gone if sum(other > step for other in steps) < KEEP]

    def _moment(self, complete: Sequence[tuple[int, AnyPath]]) -> str:
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
    """Return the moment of a save, one of ``MOMENTS``, that a rename to ``path`` indicates."""
    if path.name == STATE_FILE:
        return "before rename"
    return "removing" if path.name.endswith(".old.partial") else "after rename"


def _read_through(folder: AnyPath) -> None:
    """Read a checkpoint completely, and verify its checksums."""
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


def plan(
    dice: random.Random, engines: Sequence[str], kills: int, kinds: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Yield the engine and the type of kill for each launch.

    The engines alternate. For each engine, all types of kills occur once, in random order, before any
    type is repeated.
    """
    decks: dict[str, list[str]] = {engine: [] for engine in engines}
    for number in range(kills):
        engine = engines[number % len(engines)]
        if not decks[engine]:
            decks[engine] = list(kinds)
            dice.shuffle(decks[engine])
        yield engine, decks[engine].pop()


def attack(
    name: str,
    engines: Sequence[str],
    kills: int,
    scratch: Path,
    where: AnyPath,
    disk: SmallDisk | None,
    dice: random.Random,
    bar: tqdm[Any],
) -> tuple[Outcome, Run]:
    """Kill a run several times, let it finish, and compare it with an undisturbed run.

    Args:
        name: Name of the run.
        engines: Engines of the launches, used in turns.
        kills: Number of kills.
        scratch: Folder for files outside the run.
        where: Folder or bucket that will contain the run.
        disk: Disk that contains ``where`` and can be filled, or None.
        dice: Random number generator.
        bar: Progress bar, which is advanced after each kill.

    Returns:
        The outcome, and the finished run.

    Raises:
        RuntimeError: If the undisturbed run fails.
    """
    steps = (kills + 1) * STEPS_A_KILL
    outcome = Outcome(name)
    whole = Run(scratch / f"{name}-whole", where / f"{name}-whole" / "run", steps)
    begun = time.monotonic()
    whole.start(engines[0])
    until(lambda: whole.begun() or not whole.running())
    seconds = 1.3 * (time.monotonic() - begun)  # a launch trains for a few steps only
    code, output = whole.wait()
    if code:
        raise RuntimeError(f"the undisturbed run ended with {code}\n{output}")
    run = Run(scratch / name, where / name / "run", steps)
    kinds = [kind for kind in KINDS if not (kind in WITH_DISK and disk is None)]
    if is_in_store(where):
        kinds = [kind for kind in kinds if kind not in MOMENTS]
    struck = Attack(run, disk, dice, seconds)
    for engine, kind in plan(dice, engines, kills, kinds):
        for _ in range(3):
            if struck.launch(engine, kind, outcome):
                break
        else:
            outcome.broken.append(
                f"{engine}, {KINDS[kind]}: the launch ended three times before it was struck"
            )
        bar.set_postfix_str(f"{engine}, {kind}, step {run.step()}, broken {len(outcome.broken)}")
        bar.update()
    code, output = run.alone(engines[0])
    if code:
        outcome.broken.append(f"the last launch ended with {code}\n{output[-3000:]}")
    else:
        compare(outcome, run, whole, exact=len(engines) == 1)
    return outcome, run


def compare(outcome: Outcome, run: Run, whole: Run, *, exact: bool) -> None:
    """Compare a run with the undisturbed run, and add differences to ``outcome``.

    Args:
        outcome: Outcome of the run.
        run: Run that was killed.
        whole: Undisturbed run.
        exact: Whether losses, files and file names must be equal. Otherwise, losses and weights may
            differ slightly.
    """
    ours, theirs = run.losses(), whole.losses()
    if list(ours) != list(theirs):
        outcome.broken.append(f"the metrics have steps {list(ours)[:5]}... and not each once")
        return
    outcome.loss_difference = max(abs(ours[step] - loss) / abs(loss) for step, loss in theirs.items())
    weights, others = _weights(run), _weights(whole)
    outcome.weight_difference = max(
        float(np.abs(weights[name] - other).max() / np.abs(other).max()) for name, other in others.items()
    )
    outcome.equal = ours == theirs and files_of(run.final) == files_of(whole.final)
    if exact and not outcome.equal:
        other = files_of(whole.final)
        files = [name for name, data in files_of(run.final).items() if other.get(name) != data]
        outcome.broken.append(f"not byte for byte those of the undisturbed run: losses, or {files}")
    if outcome.loss_difference > LOSSES or outcome.weight_difference > WEIGHTS:
        outcome.broken.append(
            f"losses differ by {outcome.loss_difference:.1e}, weights by {outcome.weight_difference:.1e}"
        )
    names, undisturbed = run.names(), whole.names()
    if exact and (more := sorted(names - undisturbed)):
        outcome.broken.append(f"left behind: {more[:9]}, {len(more)} in all")
    if exact and (fewer := sorted(undisturbed - names)):
        outcome.broken.append(f"not there: {fewer[:9]}, {len(fewer)} in all")


def _weights(run: Run) -> Mapping[str, Any]:
    tensors = open_checkpoint(run.final).tensors
    return {name: tensor.read().astype("f8") for name, tensor in tensors.items()}


def stay_away(seconds: Sequence[float], scratch: Path, store: ObjectStore, outcome: Outcome) -> None:
    """Train in a bucket whose store is temporarily unreachable, and check that the run continues.

    Args:
        seconds: Durations of the outages, in which the store drops every connection. Each outage begins
            with a save.
        scratch: Folder for files outside the run.
        store: Store that contains the bucket.
        outcome: Outcome that collects the launch and violated guarantees.
    """
    changes = {
        "checkpoint.every_steps": 50,
        "log.every_steps": 10,
        "data.seq_len": 256,
        "model.config": {**SMALL_MODEL, "max_position_embeddings": 256},
    }
    run = Run(scratch / "away", parse_path_or_url(store.url("away")), 1_000_000, changes=changes)
    run.start("no_shard")
    until(lambda: bool(run.checkpoints.list_complete()) or not run.running())
    for length in seconds:
        store.forget()
        until(lambda: store.count("PUT", "checkpoints/") > 0 or not run.running())
        store.fail(drop=True)
        time.sleep(length)
        store.heal()
        step, seen = run.step(), 0
        while run.running() and seen < step:
            # A slow listing may find that all checkpoints it began with have been replaced.
            seen = max((found for found, _ in run.checkpoints.list_complete()), default=0)
        if not run.running():
            outcome.broken.append(f"away for {length:.0f} s: the run ended\n{run.output()[-3000:]}")
            return
    run.signal(signal.SIGTERM)
    launch = Launch("no_shard", "term")
    launch.code, output = run.wait()
    launch.reached = max((step for step, _ in run.checkpoints.list_complete()), default=0)
    Attack(run, None, random.Random(0)).look(launch, output, outcome)
    kept = {folder.name for _, folder in run.checkpoints.list_complete()}
    there = {name.split("/")[0] for name in store.names("away/checkpoints/")}
    if there != kept or store.open_uploads():
        outcome.broken.append(f"left behind: {sorted(there - kept)}, uploads {store.open_uploads()}")
    outcome.launches.append(launch)


class Conversions:
    """Conversions that overwrite each other and are killed.

    Args:
        scratch: Folder for the outputs.
        run: Complete run, whose checkpoints are converted.
        dice: Random number generator.
        outcome: Outcome that collects kills and violated guarantees.
    """

    def __init__(self, scratch: Path, run: Run, dice: random.Random, outcome: Outcome) -> None:
        self._dice, self._outcome = dice, outcome
        self._notes, self._parent = scratch / "notes", scratch / "converted"
        self._parent.mkdir(parents=True)
        self._sources = [folder for _, folder in run.checkpoints.list_complete()]
        self._out = {to: self._parent / to for to in ("safetensors", "dcp")}
        self._results: dict[tuple[AnyPath, str], dict[str, bytes]] = {}
        self._there: dict[str, dict[str, bytes]] = {}
        self._seconds = 0.1
        for source in self._sources:
            for to in self._out:
                begun = time.monotonic()
                self._alone(source, to)
                self._seconds = time.monotonic() - begun
                self._results[source, to] = self._there[to] = files_of(self._out[to])

    def kill(self) -> None:
        """Start one conversion, kill it, and check that the output is either the old or the new conversion.

        The conversion may also end before the kill.
        """
        source, to = self._dice.choice(self._sources), self._dice.choice(list(self._out))
        old, new = self._there[to], self._results[source, to]
        with Watch() as watch:
            watch.add(self._parent)
            process = self._start(source, to)
            wait_for_fork(process.pid)
            if self._dice.random() < 0.75:  # usually kill it while it writes
                for what, path in watch.events(lambda: process.poll() is None, 60):
                    if what == CREATED and ".tmp-" in path.name:
                        break
                time.sleep(self._dice.uniform(0, self._seconds / 8))
            else:
                time.sleep(self._dice.uniform(0, self._seconds))
        struck = process.poll() is None
        process.kill()
        process.wait()
        until(lambda: not writing_to(self._notes))
        found = files_of(self._out[to]) if self._out[to].exists() else {}
        beside = [path for path in self._parent.iterdir() if path.name.startswith(f".{to}.tmp-")]
        if struck:
            whole = "replacing" if beside else "done"
            phase = whole if found == new != old else ("writing" if beside else "reading")
            kills = self._outcome.conversions
            kills[phase] = kills.get(phase, 0) + 1
        if found not in (old, new):
            self._outcome.broken.append(f"to {to}: OUT is neither the old nor the new ({sorted(found)})")
        self._there[to] = found

    def finish(self) -> None:
        """Run one conversion to each format without a kill, and check that no additional files remain."""
        for to in self._out:
            source = self._dice.choice(self._sources)
            self._alone(source, to)
            if files_of(self._out[to]) != self._results[source, to]:
                self._outcome.broken.append(f"{source} to {to}: not what an undisturbed conversion wrote")
        if left := sorted({path.name for path in self._parent.iterdir()} - set(self._out)):
            self._outcome.broken.append(f"conversions: left behind {left}")

    def _start(self, source: AnyPath, to: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "portable.converters.cli", str(source), str(self._out[to])]
        with self._notes.open("w") as notes:
            return subprocess.Popen(
                [*command, "--to", to, "--overwrite", "--quiet"], stdout=notes, stderr=notes
            )

    def _alone(self, source: AnyPath, to: str) -> None:
        if self._start(source, to).wait():
            raise RuntimeError(f"{source} to {to}: {self._notes.read_text()}")
        for tensor in open_checkpoint(self._out[to]).tensors.values():
            tensor.read()


def tables(outcomes: Sequence[Outcome]) -> str:
    """Format two Markdown tables: the kills by type, and the result of each run."""
    launches = [launch for outcome in outcomes for launch in outcome.launches]
    lines = [
        "| blow | times | of these in that very moment | steps lost, at most |",
        "| --- | ---: | ---: | ---: |",
    ]
    for kind, words in KINDS.items():
        if struck := [launch for launch in launches if launch.kind == kind]:
            exactly = sum(launch.moment == kind for launch in struck) if kind in MOMENTS else ""
            lost = max(launch.reached - launch.kept for launch in struck)
            lines.append(f"| {words} | {len(struck)} | {exactly} | {lost} |")
    lines.append(f"| **together** | **{len(launches)}** | | **{max(o.lost for o in outcomes)}** |")
    lines += [
        "",
        "| run | launches ended by a blow | resumed | starts on a full disk | steps lost, at most "
        "| losses differ by | weights differ by | kills of conversions |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for outcome in outcomes:
        resumed = sum(launch.resumed > 0 for launch in outcome.launches) + 1
        figures = (
            "0, byte for byte | 0, byte for byte"
            if outcome.equal
            else f"{outcome.loss_difference:.1e} | {outcome.weight_difference:.1e}"
        )
        converted = ", ".join(f"{phase}: {times}" for phase, times in sorted(outcome.conversions.items()))
        lines.append(
            f"| {outcome.name} | {len(outcome.launches)} | {resumed} | {outcome.refused_starts} "
            f"| {outcome.lost} | {figures} | {converted} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="in the run that moves between engines")
    parser.add_argument("--each", type=int, default=10, help="in the run of each engine alone")
    parser.add_argument("--conversions", type=int, default=0, help="kills of conversions after each run")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--bucket", action="store_true", help="runs in a bucket; needs the tests' folder")
    parser.add_argument(
        "--away", nargs="+", type=float, default=[], help="seconds without the bucket's store"
    )
    parser.add_argument("--forks", action="store_true", help="commands as forks; needs the tests' folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write everything there")
    given = parser.parse_args(argv)
    if given.away and not given.bucket:
        parser.error("--away needs --bucket")
    if given.bucket and given.forks:
        parser.error("a launcher that has used a store cannot fork its ranks: leave out --forks")
    command = command_line("benchmarks.kills", argv)
    machine = describe_machine(torch.device("cpu"), "deepspeed", "torch_xla")
    dice = random.Random(given.seed)
    begun = time.monotonic()
    outcomes: list[Outcome] = []
    runs = [("moving", tuple(given.engines), given.kills)] if given.kills else []
    runs += [(engine, (engine,), given.each) for engine in given.engines if given.each]
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kills-")))
        where: AnyPath = scratch
        disk = None
        if given.bucket:
            from tests.object_store import ObjectStore

            store = ObjectStore()
            stack.callback(store.close)
            store.renew()
            os.environ.update(store.environment)
            where = parse_path_or_url(store.url("runs"))
            if given.away:
                outcomes.append(Outcome(f"store away for {given.away} s"))
                stay_away(given.away, scratch, store, outcomes[-1])
        else:
            disk = stack.enter_context(small_disk(scratch))
            if disk is None:
                print("no file system may be mounted here: no full disks", file=sys.stderr)
            else:
                where = disk.path
        if given.forks:
            from tests.zygote import Zygote

            (scratch / FORKS).mkdir()
            zygote = Zygote(scratch / FORKS)
            stack.callback(zygote.close)
            stack.callback(setattr, sys, "executable", sys.executable)
            sys.executable = str(zygote.folder / "python")
        bar: tqdm[Any] = stack.enter_context(
            tqdm(total=sum(kills for _, _, kills in runs), unit="kill", dynamic_ncols=True)
        )
        for name, engines, kills in runs:
            outcome, run = attack(name, engines, kills, scratch, where, disk, dice, bar)
            outcomes.append(outcome)
            if given.conversions:
                conversions = Conversions(scratch / f"{name}-conversions", run, dice, outcome)
                for _ in range(given.conversions):
                    conversions.kill()
                conversions.finish()
            if given.json is not None:
                values = {"command": command, "machine": machine, "runs": list(map(asdict, outcomes))}
                given.json.write_text(json.dumps(values, indent=1) + "\n", "utf-8")
            for line in outcome.broken:
                tqdm.write(f"BROKEN: {name}: {line}")
    print(tables(outcomes))
    print(f"\n{time.strftime('%Y-%m-%d')}, {(time.monotonic() - begun) / 60:.0f} minutes")
    print_machine(command, machine)
    broken = [f"{outcome.name}: {line}" for outcome in outcomes for line in outcome.broken]
    checkpoints_lost = sum("are gone" in line or "is not whole" in line for line in broken)
    print(f"checkpoints lost: {checkpoints_lost}; promises broken: {len(broken)}")
    print("\n".join(broken))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
