"""Ctrl-C and SIGKILL at random moments: a clean end of each command, and no semaphore left behind.

    python -m tests.fuzz.interrupts [--count 100] [--seed 0] [--start 0]
    python -m tests.fuzz.interrupts --kill [--count 10]

Each case starts a command in a separate process group: a run of one or two ranks with data workers, a run
that tokenizes a long source in several processes, a conversion, a report, `portable-data` or `--resume-info`.
Its moment is an amount of processor time of the entire group, so that it does not depend on the load of the
machine. Then the group receives SIGINT one to five times within two seconds. The command must end with code
130, or 75 after it saved a checkpoint, without a traceback or a remaining process. A command that had
finished before the signal counts apart, and so does a command that is interrupted before Python runs its
first line.

With `--kill`, the group of a run receives SIGKILL, before its first batch or after it. Names of semaphores
that are left in `/dev/shm` must be gone once another run has started.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from tests.fuzz.folders import SMALL_MODEL, Scratch, run_flags, write_run, write_texts

if TYPE_CHECKING:
    from collections.abc import Sequence

LIMIT = 300.0
"""Seconds that a command may take to end."""
WITHIN = 2.0
"""Seconds between the first and the last signal."""
_SHARED_MEMORY = Path("/dev/shm")
_TICK = os.sysconf("SC_CLK_TCK")
_OURS = re.compile(r'File ".*/(portable|converters|gpu|tpu)/')
KINDS = {
    "train": 10.0,
    "train, 2 ranks": 18.0,
    "convert": 0.4,
    "report": 0.6,
    "data": 6.0,
    "tokenize": 12.0,
    "resume-info": 4.5,
}
"""Kinds of commands, and the most processor time, in seconds, after which the signal comes."""


def build_command(kind: str, scratch: Scratch) -> list[str]:
    """Return a command that runs longer than its signal takes to come, if it is a run."""
    trained, out = scratch.base / "trained", scratch.out
    programs = Path(sys.executable).parent
    train = [str(programs / "portable-train")]
    if kind.startswith("train"):
        flags = run_flags(
            scratch,
            **{
                "train.steps": 100_000,
                "train.global_batch_size": 4,
                "data.num_workers": 2,
                "data.tokenizer": scratch.base / "tokenizer",
                "checkpoint.every_steps": 50,
            },
        )
        return [*train, *flags, "--nproc", "2" if kind.endswith("2 ranks") else "1"]
    if kind == "tokenize":
        flags = run_flags(
            scratch,
            **{
                "data.source": write_many_texts(scratch),
                "data.cache_dir": out / "cache",
                "data.tokenizer": scratch.base / "tokenizer",
                "train.steps": 1,
            },
        )
        return [*train, *flags]
    if kind == "convert":
        checkpoint = max((trained / "checkpoints").iterdir())
        return [str(programs / "portable-convert"), str(checkpoint), str(out / "model")]
    if kind == "report":
        return [str(programs / "portable-report"), str(trained), "--out", str(out / "page.html")]
    if kind == "data":
        config = scratch.base / "prepare.yaml"
        tokenizer, source = scratch.base / "tokenizer", write_many_texts(scratch)
        data = {"source": str(source), "tokenizer": str(tokenizer), "seq_len": 32, "eval_fraction": 0}
        config.write_text(yaml.safe_dump({"model": {"config": SMALL_MODEL}, "data": data}))
        return [str(programs / "portable-data"), "--config", str(config), "--out", str(out / "tokens")]
    return [*train, "--resume-info", str(trained)]


def write_many_texts(scratch: Scratch) -> Path:
    """Write a file that takes seconds to tokenize, if it does not exist; return its path."""
    source = scratch.base / "many.jsonl"
    if not source.exists():
        write_texts(scratch.base / "text.jsonl")
        source.write_text((scratch.base / "text.jsonl").read_text() * 500)
    return source


def find_group(group: int) -> dict[int, float]:
    """Return the processes of a group that run, and the processor time of each, in seconds."""
    times = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group and fields[0] != "Z":
                times[int(path.parent.name)] = (int(fields[11]) + int(fields[12])) / _TICK
    return times


def find_names() -> set[str]:
    """Return the named semaphores of runs."""
    return {path.name for path in _SHARED_MEMORY.glob("sem.mp-*")}


class Case:
    """A command that runs in a separate process group.

    Args:
        command: The command.
        scratch: Folders; the output goes into a file there.
    """

    def __init__(self, command: Sequence[str], scratch: Scratch) -> None:
        shutil.rmtree(scratch.out, ignore_errors=True)
        scratch.out.mkdir()
        self._output = scratch.root / "printed"
        self.pids: set[int] = set()
        environment = {**os.environ, **scratch.environment(), "HF_HUB_OFFLINE": "1"}
        with self._output.open("w") as file:
            self.process = subprocess.Popen(
                command,
                stdout=file,
                stderr=file,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                cwd=scratch.current,
                env=environment,
            )

    def wait_for_time(self, seconds: float) -> None:
        """Wait until the group has used some processor time, or the command has ended."""
        while self.process.poll() is None:
            times = find_group(self.process.pid)
            self.pids |= set(times)
            if sum(times.values()) >= seconds:
                return
            time.sleep(0.02)

    def signal(self, number: int) -> None:
        """Signal the group."""
        self.pids |= set(find_group(self.process.pid))
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def end(self) -> tuple[int | str, str]:
        """Wait for the end. Returns the exit code, or the remaining processes, and the output."""
        code: int | str
        try:
            code = self.process.wait(LIMIT)
            deadline = time.monotonic() + 30
            while (left := find_group(self.process.pid)) and time.monotonic() < deadline:
                time.sleep(0.1)
            if left:
                code = f"{len(left)} processes went on after code {code}"
        except subprocess.TimeoutExpired:
            code = f"no end within {LIMIT:.0f} s"
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        return code, self._output.read_text("utf-8", "replace")[-4000:]

    def names_left(self) -> set[str]:
        """Return the semaphores that the processes of the group made and that still have their names."""
        return {
            name for name in find_names() if name.split("-")[3:4] and int(name.split("-")[3]) in self.pids
        }


def interrupt(kind: str, scratch: Scratch, dice: random.Random) -> tuple[str, str]:
    """Interrupt a command; return the outcome, and the output if the outcome is a fault."""
    moment, times = dice.uniform(0, KINDS[kind]), dice.choice([1, 1, 2, 3, 4, 5])
    delays = sorted([0.0, *(dice.uniform(0, WITHIN) for _ in range(times - 1))])
    case = Case(build_command(kind, scratch), scratch)
    case.wait_for_time(moment)
    finished = case.process.poll() is not None
    begun = time.monotonic()
    for delay in delays:
        time.sleep(max(0.0, begun + delay - time.monotonic()))
        if case.process.poll() is None:
            case.signal(signal.SIGINT)
    code, text = case.end()
    case_text = f"{kind}, {times} signals at {moment:.2f} s: {code}\n{text}"
    if finished and code == 0:
        return "finished before", ""
    traceback = "Traceback" in text or "KeyboardInterrupt" in text
    if (code == -signal.SIGINT or traceback) and not _OURS.search(text) and moment < 0.3:
        return "before Python's first line", ""
    if traceback or code not in (0, 130, 75):
        return "fault", case_text
    if names := case.names_left():
        return "fault", f"{len(names)} semaphores left; {case_text}"
    return f"exit code {code}", ""


def kill(number: int, scratch: Scratch) -> tuple[str, str]:
    """Kill a run, and start another; return the outcome, and the output if the outcome is a fault."""
    kind = ("train", "train, 2 ranks")[number % 2]
    early = number % 4 < 2
    before = find_names()
    case = Case(build_command(kind, scratch), scratch)
    checkpoint = scratch.out / "run" / "checkpoints" / "step-000050"
    while case.process.poll() is None:
        case.pids |= set(find_group(case.process.pid))
        if (case.names_left() and early) or checkpoint.exists():
            break
        time.sleep(0.001 if early else 0.05)
    case.signal(signal.SIGKILL)
    code, text = case.end()
    left = case.names_left()
    moment = "before" if early and not checkpoint.exists() else "after"
    outcome = f"{kind}, {moment} the first batch: {len(left)} names left"
    if code != -signal.SIGKILL:
        return "fault", f"{outcome}: {code}\n{text}"
    if left:
        following = [*build_command("train", scratch), "--train.steps=2"]
        code, text = Case(following, scratch).end()
        if code != 0 or left & find_names():
            return "fault", f"{outcome}, then {code} and {len(left & find_names())} left\n{text}"
        outcome += ", none after the next run"
    return f"{outcome}; new names of anyone: {len(find_names() - before)}", ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.interrupts", description=__doc__)
    parser.add_argument("--count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="number of the first case")
    parser.add_argument("--kind", choices=KINDS, help="one kind of command")
    parser.add_argument("--kill", action="store_true", help="SIGKILL instead of SIGINT")
    arguments = parser.parse_args(argv)
    # A shell starts background programs with SIGINT ignored, which the commands would inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    root = Path(tempfile.mkdtemp(prefix="fuzz-interrupts-"))
    scratch = Scratch(root / "scratch")
    write_run(scratch)
    outcomes: Counter[str] = Counter()
    faults = 0
    for number in range(
        arguments.start, arguments.start + (arguments.count or (10 if arguments.kill else 100))
    ):
        if arguments.kill:
            name = "kill"
            outcome, text = kill(number, scratch)
        else:
            dice = random.Random(f"{arguments.seed} {number}")
            name = arguments.kind or dice.choice(list(KINDS))
            outcome, text = interrupt(name, scratch, dice)
        outcomes[f"{name}: {outcome}"] += 1
        if text:
            faults += 1
            print(f"case {number}: {text}", flush=True)
        print(f"case {number}: {name}: {outcome}", flush=True)
    print(f"{sum(outcomes.values())} cases, {faults} faults")
    for outcome, count in sorted(outcomes.items()):
        print(f"    {count} {outcome}")
    shutil.rmtree(root, ignore_errors=True)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
