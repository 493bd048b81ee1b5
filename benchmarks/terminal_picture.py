"""Draw docs/terminal.svg: a run that stops, moves to other ranks and another engine, and is converted.

The commands are run in a terminal of 100 columns, one after the other, and what they print is drawn as it
stands there in the end.
"""

from __future__ import annotations

import argparse
import fcntl
import html
import os
import pty
import shlex
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path
from typing import TYPE_CHECKING

import pyte

from portable.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

COLUMNS, ROW, MARGIN = 100, 17, 14
_ROWS, _LONGEST = 500, 2000  # none scrolls away, and none is broken
CHARACTER = 7.83
"""Pixels of a character of a 13 pixel monospace font."""
COMMANDS = (
    "portable-train --output_dir runs/demo --train.steps 60 --train.stop_after 30",
    "portable-train --output_dir runs/demo --train.steps 60 --strategy zero2 --nproc 2",
    "portable-convert runs/demo out --optimizer --verify",
)
MODULES = {"portable-train": "portable.cli", "portable-convert": "converters.cli"}


def recorded(
    command: Sequence[str],
    folder: Path,
    *,
    columns: int = COLUMNS,
    environment: Mapping[str, str] = os.environ,
    code: int = 0,
) -> list[str]:
    """Run ``command`` in ``folder`` in a terminal.

    Args:
        columns: of the terminal.
        environment: of the command.
        code: that the command ends with.

    Returns:
        the lines that stand there in the end, of any length: the terminal breaks them after each ``columns``.

    Raises:
        RunError: if it ends with another code.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, columns, 0, 0))
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**environment, "COLUMNS": str(columns), "TERM": "xterm"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    said = bytearray()
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        said += part
    os.close(ours)
    if process.wait() != code:
        end = said.decode(errors="replace")[-400:]
        raise RunError(f"{shlex.join(command)} ended with {process.returncode}: {end}")
    screen = pyte.Screen(_LONGEST, _ROWS)
    pyte.ByteStream(screen).feed(bytes(said))
    lines = [line.rstrip() for line in screen.display]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def drawn(lines: Sequence[str]) -> str:
    """``lines`` as a picture of a terminal; those that begin with ``$`` are commands."""
    rows = [line[at : at + COLUMNS] for line in lines for at in range(0, max(len(line), 1), COLUMNS)]
    width, height = round(COLUMNS * CHARACTER) + 2 * MARGIN, len(rows) * ROW + 2 * MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="ui-monospace, Menlo, Consolas, monospace" '
        'font-size="13">',
        f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>',
    ]
    for number, row in enumerate(rows):
        colour = "#7ee787" if row.startswith("$ ") else "#e6edf3"
        length = f'textLength="{len(row) * CHARACTER:.1f}"' if row else ""
        parts.append(
            f'<text x="{MARGIN}" y="{MARGIN + ROW * number + 12}" fill="{colour}" xml:space="preserve" '
            f"{length}>{html.escape(row)}</text>"
        )
    return "\n".join([*parts, "</svg>\n"])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/terminal.svg"))
    options = parser.parse_args(argv)
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for command in COMMANDS:
            program, *arguments = shlex.split(command)
            run = [sys.executable, "-m", MODULES[program], *arguments]
            lines += [f"$ {command}", *recorded(run, Path(folder)), ""]
    while lines and not lines[-1]:
        lines.pop()
    options.out.write_text(drawn(lines), "utf-8")
    print(f"wrote {options.out}: {len(lines)} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main())
