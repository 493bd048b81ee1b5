"""What a person sees in a terminal of 80 and of 100 columns."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.zygote import Zygote

WIDTHS = (80, 100)
SMALL = {
    "model.config.hidden_size": 64,
    "model.config.intermediate_size": 128,
    "data.seq_len": 64,
    "data.max_samples": 20,
    "train.steps": 4,
    "train.eval_every": 4,
    "log.sample_tokens": 16,
}
RUN = ("portable-train", "--output_dir", "runs/demo", *(f"--{key}={value}" for key, value in SMALL.items()))
FOREIGN = re.compile(r"site-packages|Warning\b|WARNING|warnings\.warn|^\[?[IWE]\d{4}|\[rank\d|deprecated")
"""How warnings of libraries look."""


class Screen(NamedTuple):
    """A command, how it ends, and a part of what it shows."""

    command: tuple[str, ...]
    shows: str
    code: int = 0


SCREENS = {
    "dry run": Screen((*RUN, "--dry-run"), "# What this run will do"),
    "quickstart": Screen((*RUN, "--train.stop_after", "2"), "starting"),
    "resume": Screen(
        (*RUN, "--strategy", "zero2", "--nproc", "2"), "cpu full_shard x 1 → cpu zero2 x 2, at step 2"
    ),
    "conversion": Screen(("portable-convert", "runs/demo", "out", "--optimizer", "--verify"), "→ out"),
    "plan": Screen(("portable-plan", "--device", "h100", "--devices", "8"), "full_shard"),
    "an unknown key": Screen(("portable-train", "--train.learning_rat", "1"), "did you mean", 2),
    "another run": Screen((*RUN, "--seed", "8"), "choose another", 2),
    "no checkpoint": Screen(("portable-convert", "configs", "out2"), "error: ", 2),
}


def recorded(
    command: list[str], folder: Path, columns: int, environment: Mapping[str, str], code: int
) -> list[str]:
    """The lines of any length that stand in a terminal of ``columns`` when ``command`` has ended."""
    import pyte

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 500, columns, 0, 0))
    terminal = {**environment, "COLUMNS": str(columns), "TERM": "xterm"}
    process = subprocess.Popen(command, cwd=folder, env=terminal, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    with os.fdopen(ours, "rb", buffering=0) as file, suppress(OSError):  # the other end is closed
        screen = pyte.Screen(2000, 500)
        stream = pyte.ByteStream(screen)
        while part := file.read(1 << 16):
            stream.feed(part)
    assert process.wait() == code, screen.display
    return "\n".join(line.rstrip() for line in screen.display).rstrip().split("\n")


@pytest.fixture(scope="module")
def shown(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], list[str]]:
    """The lines of each screen in each width; both widths at the same time."""
    pytest.importorskip("deepspeed")
    pytest.importorskip("pyte")

    def of(columns: int) -> dict[tuple[str, int], list[str]]:
        folder, found = tmp_path_factory.mktemp(f"columns{columns}"), {}
        for name, (command, _, code) in SCREENS.items():
            whole = [str(zygote.folder / command[0]), *command[1:]]
            found[name, columns] = recorded(whole, folder, columns, zygote.environment, code)
        return found

    with ThreadPoolExecutor() as pool:
        return {place: lines for found in pool.map(of, WIDTHS) for place, lines in found.items()}


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("name", SCREENS)
def test_no_word_is_broken_and_no_library_warns(
    name: str, columns: int, shown: dict[tuple[str, int], list[str]]
) -> None:
    lines = shown[name, columns]
    assert any(SCREENS[name].shows in line for line in lines), "\n".join(lines)
    broken = [
        line
        for line in lines
        for end in range(columns, len(line), columns)
        if line[end - 1] != " " and line[end] != " "
    ]
    assert broken == []
    assert [line for line in lines if FOREIGN.search(line)] == []
