"""Kill runs and conversions at random moments, a thousand times.

``python -m benchmarks.kills --forks --minutes 20`` has each engine train a tiny model, from an empty cache
to ``final/``, again and again. Each launch is ended by a SIGKILL of the launcher or of one rank, at a
random moment of the launch or of one of its phases, and the next one resumes. The launch that may finish
must equal an undisturbed run byte for byte, and leave the same names and no others: in its folder, in the
cache and among temporary files. Between these, ``portable-convert --overwrite`` replaces the model of one
step by that of another, and is killed as often. ``--forks`` runs commands as forks of one process that has
imported everything. ``--saves`` has the runs save after each step, more than a disk takes at once, and
strikes nothing but saves: when a folder of shards appears, or a random time after, of about as long as the
saves before took. Exits with 1 if a promise was broken.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("USE_TORCH_XLA", "0")

import torch
from tqdm import tqdm

from benchmarks import chaos
from benchmarks.chaos import Chaos, Launch, Outcome, Run, _alive
from benchmarks.inotify import CREATED, RENAMED, Watch
from benchmarks.machine import command_line, describe_machine, machine_in_words
from benchmarks.train_overhead import SMALL_MODEL
from converters import open_checkpoint
from portable.output.export import MARKER

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

ENGINES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("no_shard", "full_shard", "zero1", "zero2", "zero3"), (2, 1)),
    "xla": (2,),
}
"""Each with the numbers of ranks, or devices, that take turns."""
STEPS = 10
LAUNCHES = 6
"""Kills before the run may finish."""
AFTER = 3
"""Kills of the same command on the complete run, which exports again."""
CONVERTED = 60
"""Kills of conversions after each run."""
PHASES = ("start", "tokenizing", "resume", "training", "save", "export")
CONVERSIONS = ("reading", "writing", "replacing", "done")
POLL = 0.005
FORKS, FORKED = "forks", "for "
"""The folder of programs that forks stand for (``tests.zygote``), and how the name of one then begins."""
SAVING: dict[str, Any] = {
    "model.config": {**SMALL_MODEL, "vocab_size": 16384, "hidden_size": 64},
    "checkpoint.every_steps": 1,
}
"""Of runs whose saves are struck: two million parameters that cost little to train, 25 MB a checkpoint."""
GONE = 10.0
"""Seconds within which every process of a launch must end."""
IN_A_PHASE = {"start": 0.3, "tokenizing": 0.15, "resume": 0.4, "training": 0.15, "save": 0.04, "export": 0.1}
"""Seconds that each about takes: a kill comes at a random moment of them, after the phase begins."""


until = functools.partial(chaos.until, poll=POLL)


@dataclass
class Tally:
    """Kills by phase, and broken promises."""

    kills: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By engine and phase."""
    lost: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)
    halves: int = 0
    """Kills that left a folder of shards under the name that it has while it is written."""
    finished: int = 0
    """Runs and conversions that were left alone in the end, and looked through."""
    slowest: float = 0.0
    """Seconds until the last process of a launch ended."""

    @property
    def broken(self) -> list[str]:
        return [*self.lost, *self.left, *self.other]


@dataclass(frozen=True)
class Whole:
    """The result of an undisturbed run."""

    losses: dict[int, float]
    names: frozenset[str]
    files: dict[str, bytes]
    seconds: float
    """From its start until it began to train, and until its end."""


def names_below(*folders: Path) -> frozenset[str]:
    """Everything below some folders, each name from its folder's own name on."""
    return frozenset(str(path.relative_to(folder.parent)) for folder in folders for path in folder.rglob("*"))


def files_of(folder: Path) -> dict[str, bytes]:
    """The files that an export or a conversion wrote; not the marker, which tells times."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != MARKER}


def begin(pid: int) -> None:
    """Where commands are forks, wait for the fork: what stands for it has to know of it to take it along."""
    if Path(sys.executable).parent.name == FORKS:
        until(lambda: not _alive(pid) or Path(f"/proc/{pid}/comm").read_text().startswith(FORKED))


class Cycle:
    """A run from an empty folder and cache to its export.

    Args:
        scratch: an empty folder for it, its cache and its temporary files.
        changes: to its settings.
    """

    def __init__(
        self, scratch: Path, engine: str, ranks: int, changes: Mapping[str, Any] | None = None
    ) -> None:
        self.engine = engine
        self.name = f"{engine}, {ranks}"
        self.folder, self.cache, self.temporary = scratch / "run", scratch / "cache", scratch / "temporary"
        self.temporary.mkdir(parents=True)
        self.run = Run(scratch, self.folder, STEPS, ranks=ranks, temporary=self.temporary, changes=changes)

    def alone(self) -> tuple[int, str]:
        """Run the command to its end."""
        self.run.start(self.engine)
        return self.run.wait()

    def whole(self) -> Whole:
        """What the run came to, now that it is over."""
        return Whole(self.run.losses(), self.names(), files_of(self.folder / "final"), 0.0)

    def names(self) -> frozenset[str]:
        return names_below(self.folder, self.cache, self.temporary)

    def state(self) -> dict[str, tuple[int, int]]:
        """What in the folders tells where a launch is; each with what changes when it is written anew."""
        found = {}
        for path in (
            *self.folder.glob(".*"),
            *self.folder.glob("checkpoints/*"),
            *self.folder.glob("checkpoints/.*"),
            *self.cache.glob("*/*"),
            *self.cache.glob("*/*/*"),
        ):
            with suppress(FileNotFoundError):
                status = path.lstat()
                found[str(path.relative_to(self.folder.parent))] = (status.st_ino, status.st_mtime_ns)
        return found


class Killing:
    """Kills in a cycle, and what they leave looked at.

    Args:
        whole: of a cycle that nothing disturbed.
    """

    def __init__(self, cycle: Cycle, whole: Whole, dice: random.Random, tally: Tally) -> None:
        self._cycle, self._whole, self._dice, self._tally = cycle, whole, dice, tally
        self._looking = Chaos(cycle.run, None, dice)
        self._kept = 0
        self._exported = False
        self._save_seconds = IN_A_PHASE["save"]

    def launch(self, aim: str) -> None:
        """One launch that a kill ends, or that ends before it comes."""
        cycle, run = self._cycle, self._cycle.run
        before = cycle.state()
        run.start(cycle.engine)
        begin(run.pid)
        self._wait_for(aim, before)
        struck = run.running()
        phase = self._phase(before)
        kind = self._dice.choice(("launcher",) * 4 + ("rank",))
        victims = run.ranks() if kind == "rank" else []
        if victims:
            with suppress(ProcessLookupError):
                os.kill(self._dice.choice(victims), signal.SIGKILL)
        else:
            run.signal(signal.SIGKILL)
        code, output = self._ended()
        if struck:
            self._tally.kills[cycle.engine, phase] += 1
            self._tally.halves += any(cycle.folder.glob("checkpoints/.step-*"))
        self._look(Launch(cycle.engine, kind, code=code), phase, output)

    def finish(self) -> None:
        """A launch that is left alone, and everything compared."""
        name, whole, tally = self._cycle.name, self._whole, self._tally
        code, output = self._cycle.alone()
        self._gone()
        if code:
            tally.lost.append(f"{name}: the undisturbed launch ended with {code}\n{output[-3000:]}")
            return
        self._resumed_right(output)
        tally.finished += 1
        ours = self._cycle.whole()
        if ours.losses != whole.losses:
            tally.lost.append(f"{name}: losses {ours.losses}, and undisturbed {whole.losses}")
        if ours.files != whole.files:
            tally.lost.append(f"{name}: final is not that of the undisturbed run")
        if more := sorted(ours.names - whole.names):
            tally.left.append(f"{name}: left behind {more[:9]}, {len(more)} in all")
        if fewer := sorted(whole.names - ours.names):
            tally.lost.append(f"{name}: not there {fewer[:9]}, {len(fewer)} in all")
        self._exported = True
        self._kept = STEPS

    # -- the moment --------------------------------------------------------------------------------------

    def _wait_for(self, aim: str, before: dict[str, tuple[int, int]]) -> None:
        run = self._cycle.run
        if aim == "any":
            end = time.monotonic() + self._dice.uniform(0, self._whole.seconds)
            until(lambda: not run.running() or time.monotonic() > end)
            return
        if aim == "save":
            self._wait_for_save()
            return
        if aim != "start":
            until(lambda: not run.running() or self._phase(before) == aim)
        end = time.monotonic() + self._dice.uniform(0, IN_A_PHASE[aim])
        until(lambda: not run.running() or time.monotonic() > end)

    def _wait_for_save(self) -> None:
        """Let some saves go by, and see how long they take; then wait for a moment of the next."""
        run, folder = self._cycle.run, self._cycle.folder / "checkpoints"
        until(lambda: not run.running() or folder.is_dir())
        left, begun = self._dice.randrange(3), time.monotonic()
        with Watch() as watch:
            watch.add(folder)
            for what, path in watch.events(run.running, chaos.PATIENCE):
                if what == CREATED and path.name.startswith(".step-"):
                    begun = time.monotonic()
                    if not left:
                        break
                    left -= 1
                elif what == RENAMED and path.name.startswith("step-"):
                    self._save_seconds = time.monotonic() - begun
        time.sleep(self._dice.uniform(0, self._save_seconds))

    def _phase(self, before: dict[str, tuple[int, int]]) -> str:
        """What the launch that began with ``before`` does."""
        now = self._cycle.state()
        new = {path for path, values in now.items() if before.get(path) != values}
        names = [path.rsplit("/", 1)[-1] for path in new]
        if any(name.startswith((".final.", "..final.")) for name in names):
            return "export"
        begun = self._cycle.run.begun()
        if begun and self._cycle.run.step() == STEPS and any("step" not in name for name in names):
            return "export" if f"run/checkpoints/step-{STEPS:06d}" in now else "save"
        if any(name.startswith(".step-") for name in names):
            return "save"
        if begun:
            return "training"
        if "run/.lock" in new:
            return "resume" if self._kept else "start"
        return "tokenizing" if any(path.startswith("cache/") for path in new) else "start"

    # -- looking -----------------------------------------------------------------------------------------

    def _ended(self) -> tuple[int, str]:
        code, output = self._cycle.run.wait()
        self._gone()
        return code, output

    def _gone(self) -> None:
        """Wait until no process of the launch is left."""
        begun, run = time.monotonic(), self._cycle.run
        try:
            until(lambda: not run.processes(), GONE)
        except TimeoutError:
            told = [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in run.processes()]
            self._tally.left.append(f"{self._cycle.name}: processes {told}")
            for pid in run.processes():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._tally.slowest = max(self._tally.slowest, time.monotonic() - begun)

    def _look(self, launch: Launch, phase: str, output: str) -> None:
        """Hold what a launch left to what is promised."""
        name, tally, outcome = f"{self._cycle.name}, {phase}", self._tally, Outcome(self._cycle.name)
        self._resumed_right(output)
        launch.reached = self._cycle.run.step() if self._cycle.folder.exists() else 0
        self._looking._look(launch, output, outcome)
        for line in outcome.broken:
            (tally.other if "exit code" in line or "no one line" in line else tally.lost).append(
                f"{name}: {line}"
            )
        self._kept = launch.kept
        final = self._cycle.folder / "final"
        if not final.exists():
            if self._exported:
                tally.lost.append(f"{name}: final is gone")
            return
        self._exported = True
        if files_of(final) != self._whole.files:
            tally.lost.append(f"{name}: final is not whole")

    def _resumed_right(self, output: str) -> None:
        marks = [line.split()[3] for line in output.splitlines() if line.startswith("resuming at step ")]
        begun = bool(marks) or any(line.startswith("starting") for line in output.splitlines())
        if begun and int(marks[0] if marks else 0) != self._kept:
            self._tally.lost.append(f"{self._cycle.name}: went on from {marks}, and {self._kept} was there")


def undisturbed(
    scratch: Path, engine: str, ranks: int, changes: Mapping[str, Any] | None = None
) -> tuple[Cycle, Whole]:
    """A cycle that nothing disturbs.

    Its command is given twice: the second launch exports again, as those do that are killed.
    """
    cycle = Cycle(scratch, engine, ranks, changes)
    begun = time.monotonic()
    code, output = cycle.alone()
    seconds = time.monotonic() - begun
    if code:
        raise RuntimeError(f"{engine}: the undisturbed run ended with {code}\n{output}")
    whole = cycle.whole()
    return cycle, Whole(whole.losses, whole.names, whole.files, seconds)


class Conversions:
    """Conversions over one another, each killed; and looked through every now and then.

    Args:
        cycle: a complete one, whose two last steps are converted by turns.
    """

    def __init__(self, scratch: Path, cycle: Cycle, dice: random.Random, tally: Tally) -> None:
        self._dice, self._tally = dice, tally
        self._notes, self._temporary = scratch / "notes", scratch / "temporary"
        self._parent = scratch / "converted"
        self._parent.mkdir(parents=True)
        self._temporary.mkdir()
        self._engine = cycle.engine
        self._sources = [folder for _, folder in cycle.run.checkpoints.complete()]
        self._out = {to: self._parent / to for to in ("safetensors", "dcp")}
        self._results: dict[tuple[Path, str], dict[str, bytes]] = {}
        self._there: dict[str, dict[str, bytes]] = {}
        self._seconds = 0.1
        for source in self._sources:
            for to in self._out:
                begun = time.monotonic()
                self._alone(source, to)
                self._seconds = time.monotonic() - begun
                self._results[source, to] = self._there[to] = files_of(self._out[to])

    def kill(self) -> None:
        """One conversion that a kill ends, or that ends before it comes."""
        engine, source = self._engine, self._dice.choice(self._sources)
        to = self._dice.choice(list(self._out))
        old, new = self._there[to], self._results[source, to]
        with Watch() as watch:
            watch.add(self._parent)
            process = self._start(source, to)
            begin(process.pid)
            if self._dice.random() < 0.75:  # while it writes
                for what, path in watch.events(lambda: process.poll() is None, 60):
                    if what == CREATED and ".tmp-" in path.name:
                        break
                time.sleep(self._dice.uniform(0, self._seconds / 8))
            else:
                time.sleep(self._dice.uniform(0, self._seconds))
        struck = process.poll() is None
        process.kill()
        process.wait()
        until(lambda: not self._processes())
        name = f"{engine} to {to}"
        found = files_of(self._out[to]) if self._out[to].exists() else {}
        beside = [path for path in self._parent.iterdir() if path.name.startswith(f".{to}.tmp-")]
        if struck:
            whole = "replacing" if beside else "done"
            phase = whole if found == new != old else ("writing" if beside else "reading")
            self._tally.kills[f"convert {engine}", phase] += 1
        if found not in (old, new):
            self._tally.lost.append(f"{name}: what is there is neither the old nor the new ({sorted(found)})")
        self._there[to] = found

    def finish(self) -> None:
        """Conversions that are left alone: the new is there, and nothing else."""
        for to in self._out:
            source = self._dice.choice(self._sources)
            self._alone(source, to)
            self._there[to] = files_of(self._out[to])
            self._tally.finished += 1
            if self._there[to] != self._results[source, to]:
                self._tally.lost.append(f"{source} to {to}: not what an undisturbed conversion wrote")
        left = sorted({path.name for path in self._parent.iterdir()} - set(self._out))
        left += sorted(path.name for path in self._temporary.iterdir())
        if left:
            self._tally.left.append(f"conversions: left behind {left}")

    def _start(self, source: Path, to: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "converters.cli", str(source), str(self._out[to])]
        with self._notes.open("w") as notes:
            return subprocess.Popen(
                [*command, "--to", to, "--overwrite", "--quiet"],
                env={**os.environ, "TMPDIR": str(self._temporary)},
                stdout=notes,
                stderr=notes,
            )

    def _alone(self, source: Path, to: str) -> None:
        if self._start(source, to).wait():
            raise RuntimeError(f"{source} to {to}: {self._notes.read_text()}")
        for tensor in open_checkpoint(self._out[to]).tensors.values():
            tensor.read()

    def _processes(self) -> list[int]:
        found = []
        for process in Path("/proc").iterdir():
            with suppress(OSError):
                if process.name.isdigit() and (process / "fd" / "2").readlink() == self._notes:
                    found.append(int(process.name))
        return found


def cycles(engines: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Engines and ranks, by turns, without an end."""
    for turn in itertools.count():
        for engine in engines:
            yield engine, ENGINES[engine][turn % len(ENGINES[engine])]


def table(tally: Tally) -> str:
    """A Markdown table for runs, and one for conversions."""
    parts = []
    for phases, head, converting in ((PHASES, "engine", False), (CONVERSIONS, "conversions of", True)):
        engines = sorted({engine for engine, _ in tally.kills if engine.startswith("convert ") == converting})
        rows = {engine: [tally.kills[engine, phase] for phase in phases] for engine in engines}
        rows["**together**"] = [sum(column) for column in zip(*rows.values(), strict=True)] or [0] * len(
            phases
        )
        lines = [f"| {head} | {' | '.join(phases)} | kills |", "| --- |" + " ---: |" * (len(phases) + 1)]
        lines += [
            f"| {engine.removeprefix('convert ')} | {' | '.join(map(str, row))} | {sum(row)} |"
            for engine, row in rows.items()
        ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def kill_for(
    minutes: float,
    engines: Sequence[str],
    scratch: Path,
    dice: random.Random,
    most: int | None = None,
    *,
    saves: bool = False,
) -> Tally:
    """Kill until the time is over, or ``most`` runs have been seen to their end.

    Args:
        saves: strike saves of runs, and nothing else.
    """
    changes = SAVING if saves else None
    tally, end = Tally(), time.monotonic() + 60 * minutes
    wholes: dict[tuple[str, int], Whole] = {}
    conversions: dict[tuple[str, int], Conversions] = {}
    bar: tqdm[Any] = tqdm(unit="kill", dynamic_ncols=True)
    told = 0
    for number, (engine, ranks) in enumerate(cycles(engines)):
        if time.monotonic() > end or number == most:
            break
        if (engine, ranks) not in wholes:
            cycle, wholes[engine, ranks] = undisturbed(
                scratch / f"whole-{engine}-{ranks}", engine, ranks, changes
            )
            if not saves:
                conversions[engine, ranks] = Conversions(
                    scratch / f"conversions-{number}", cycle, dice, tally
                )
        folder = scratch / f"cycle-{number}"
        killing = Killing(Cycle(folder, engine, ranks, changes), wholes[engine, ranks], dice, tally)
        aims = [*PHASES, "any", "any"]
        dice.shuffle(aims)
        aims.sort(key=lambda aim: (aim != "tokenizing", aim == "export"))  # as a run goes through them
        for aim in ["save"] * LAUNCHES if saves else aims[:LAUNCHES]:
            killing.launch(aim)
            bar.update()
        killing.finish()
        if not saves:
            for aim in ["resume", *["export"] * AFTER]:
                killing.launch(aim)
                bar.update()
            killing.finish()
            for _ in range(CONVERTED):
                conversions[engine, ranks].kill()
                bar.update()
            conversions[engine, ranks].finish()
        bar.set_postfix_str(f"{engine}, lost {len(tally.lost)}, left {len(tally.left)}, {len(tally.other)}")
        shutil.rmtree(folder)
        for line in tally.broken[told:]:
            tqdm.write(f"BROKEN: {line}")
        told = len(tally.broken)
    bar.close()
    return tally


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kills", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--runs", type=int, help="end after so many, if that is sooner")
    parser.add_argument("--engines", nargs="+", choices=[*ENGINES], default=[*ENGINES])
    parser.add_argument("--saves", action="store_true", help="strike saves, and nothing else")
    parser.add_argument("--forks", action="store_true", help="commands as forks; needs the tests' folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write everything there")
    given = parser.parse_args(argv)
    machine = describe_machine(torch.device("cpu"), "deepspeed", "torch_xla")
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kills-")))
        if given.forks:
            from tests.zygote import Zygote

            (scratch / FORKS).mkdir()
            zygote = Zygote(scratch / FORKS)
            stack.callback(zygote.close)
            stack.callback(setattr, sys, "executable", sys.executable)
            sys.executable = str(zygote.folder / "python")
        dice = random.Random(given.seed)
        tally = kill_for(given.minutes, given.engines, scratch, dice, given.runs, saves=given.saves)
    print(f"{table(tally)}\n\n`{command_line('benchmarks.kills', argv)}`; {machine_in_words(machine)}")
    print(
        f"kills: {tally.kills.total()}, of which {tally.halves} left half a checkpoint; "
        f"seen to their end: {tally.finished}; lost: {len(tally.lost)}; "
        f"left behind: {len(tally.left)}; other promises broken: {len(tally.other)}; "
        f"the last process gone after {tally.slowest:.1f} s at most"
    )
    print("\n".join(tally.broken))
    if given.json is not None:
        told = {**asdict(tally), "kills": [[*key, times] for key, times in tally.kills.items()]}
        given.json.write_text(json.dumps({"machine": machine, **told}, indent=1) + "\n", "utf-8")
    return 1 if tally.broken else 0


if __name__ == "__main__":
    sys.exit(main())
