"""Training loops that take turns on one GPU, each in a process of its own.

All load their model while others do, compile one after another, and then take a few steps by turns, so that
whatever the card does falls on all of them alike. A process whose turn it is not keeps its state on the card
and gives back the rest.

A contestant reads its next order from its standard input, a line each, and answers with a line of JSON.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ANSWER = "answer: "


@dataclass(frozen=True)
class Plan:
    """How long the turns are.

    Attributes:
        warmup: steps of the first turn, in which a loop compiles.
        steps: counted ones of each later turn; one more before them fills the allocator again.
        rounds: turns of each loop that count.
        share: of the time; when the rest is over, loops that are not ready yet are left out.
    """

    warmup: int
    steps: int
    rounds: int
    share: float = 0.35

    @property
    def lengths(self) -> list[int]:
        """Of all turns in order, those that do not count included."""
        return [self.warmup, *(length for _ in range(self.rounds) for length in (1, self.steps))]


# -- the process that leads --------------------------------------------------------------------------------


class Contestant:
    """A process with one loop.

    Args:
        name: of the loop.
        command: starts it.
        errors: receives its standard error.
    """

    def __init__(self, name: str, command: list[str], errors: Path) -> None:
        self.name = name
        self._errors = errors
        with errors.open("wb") as file:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True
            )
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                self._answers.put(json.loads(line[len(ANSWER) :]))
        self._answers.put(None)

    def order(self) -> None:
        """Let it go on."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended; the answer tells
            self._process.stdin.write("go\n")
            self._process.stdin.flush()

    def answer(self, seconds: float) -> dict[str, Any]:
        """Its next answer, or what went wrong under ``failed``."""
        try:
            found = self._answers.get(timeout=max(0.1, seconds))
        except queue.Empty:
            return {"failed": "not ready in time"}
        if found is not None:
            return found
        self._process.wait()
        lines = self._errors.read_text("utf-8", errors="replace").strip().splitlines()
        return {"failed": lines[-1][-300:] if lines else f"ended with {self._process.returncode}"}

    def end(self) -> None:
        """Kill it."""
        assert self._process.stdin is not None
        self._process.kill()
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()


def take_turns(
    contestants: list[Contestant],
    plan: Plan,
    seconds: float,
    make: Callable[[], None],
    record: Callable[[dict[str, Any]], None],
) -> None:
    """Lead the loops through ``plan`` in at most ``seconds``.

    Args:
        contestants: started.
        plan: that each of them has as well.
        seconds: until all have ended.
        make: makes the model that they load, while they import.
        record: gets a row for each turn that counts, or for a loop that failed.
    """
    begun = time.monotonic()
    with _ended(contestants):
        make()
        for contestant in contestants:
            contestant.order()
        ready = []
        for contestant in contestants:
            left = begun + (1 - plan.share) * seconds - time.monotonic()
            for phase in ("load", "warm up"):
                if phase == "warm up":
                    contestant.order()
                found = contestant.answer(left)
                if "failed" in found:
                    record({"name": contestant.name, **found})
                    contestant.end()
                    break
            else:
                ready.append(contestant)
        for turn in range(plan.rounds):
            start = turn % max(1, len(ready))
            for contestant in ready[start:] + ready[:start]:
                contestant.order()
                found = contestant.answer(begun + seconds - time.monotonic())
                record({"name": contestant.name, "round": turn, **found})
                if "failed" in found:
                    ready = [other for other in ready if other is not contestant]
                    contestant.end()


class _ended:  # noqa: N801  (a context)
    """Kill all of them on the way out, also on SIGTERM."""

    def __init__(self, contestants: list[Contestant]) -> None:
        self._contestants = contestants

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))

    def __exit__(self, *_: object) -> None:
        for contestant in self._contestants:
            contestant.end()
        signal.signal(signal.SIGTERM, self._before)


# -- a contestant ------------------------------------------------------------------------------------------


class Orders:
    """The orders that a contestant gets, and its answers."""

    def __init__(self) -> None:
        self._in = os.fdopen(os.dup(0))
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what libraries print is no answer

    def wait(self) -> None:
        """Wait for the next order; exits where there is none any more."""
        if not self._in.readline():
            os._exit(0)

    def answer(self, **values: Any) -> None:
        print(ANSWER + json.dumps(values), file=self._out, flush=True)
