"""Output of commands in a terminal of 80 columns."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.zygote import Zygote

COLUMNS = 80
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
"""Text of warnings of libraries."""


class Screen(NamedTuple):
    """A command, its exit code, and a part of its output."""

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
    "another run": Screen((*RUN, "--seed", "8"), "another run (seed", 2),
}


def recorded(command: list[str], folder: Path, environment: Mapping[str, str], code: int) -> list[str]:
    """Return the lines of any length in the terminal after the end of ``command``."""
    import pyte

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 500, COLUMNS, 0, 0))
    terminal = {**environment, "COLUMNS": str(COLUMNS), "TERM": "xterm"}
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
def shown(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Return the lines of each screen."""
    pytest.importorskip("deepspeed")
    pytest.importorskip("pyte")
    folder, found = tmp_path_factory.mktemp("screens"), {}
    for name, (command, _, code) in SCREENS.items():
        whole = [str(zygote.folder / command[0]), *command[1:]]
        found[name] = recorded(whole, folder, zygote.environment, code)
    return found


@pytest.mark.parametrize("name", SCREENS)
def test_command_output_breaks_no_word_and_has_no_library_warnings(
    name: str, shown: dict[str, list[str]]
) -> None:
    lines = shown[name]
    assert any(SCREENS[name].shows in line for line in lines), "\n".join(lines)
    broken = [
        line
        for line in lines
        for end in range(COLUMNS, len(line), COLUMNS)
        if line[end - 1] != " " and line[end] != " "
    ]
    assert broken == []
    assert [line for line in lines if FOREIGN.search(line)] == []
