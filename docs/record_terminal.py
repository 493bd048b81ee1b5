"""Record the terminal session of the documentation: ``python docs/record_terminal.py``.

The commands run in a temporary folder, on a terminal of 100 columns. ``terminal.svg`` shows the terminal at
the end of each command, without the lines that depend on the speed of the machine and without warnings of
torch. DeepSpeed must be installed. Takes about two minutes on two idle cores.
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path

COMMANDS = (
    "portable-train --output_dir runs/demo --train.steps 60 --train.stop_after 30",
    "portable-train --output_dir runs/demo --train.steps 60 --strategy zero2 --nproc 2",
    "portable-convert runs/demo out --optimizer --verify",
)
COLUMNS = 100
OMITTED_LINES = re.compile(r"W\d{4} |  (?:time|samples/s|tokens/s|peak memory) ")
"""Lines that depend on the speed of the machine, and warnings that torch writes only with some packages."""
OUTPUT = Path(__file__).with_name("terminal.svg")

_LINE_HEIGHT, _CHARACTER_WIDTH, _MARGIN = 17, 7.83, 14
_COMMAND_COLOR, _TEXT_COLOR, _BACKGROUND = "#7ee787", "#e6edf3", "#0d1117"
_TOKEN = re.compile(
    r"\x1b\[(?P<count>\d*)(?:;\d*)*(?P<action>[A-Za-z])|(?P<control>[\r\n])|(?P<text>[^\x1b\r\n]+)"
)


def render_screen(output: str) -> list[str]:
    """Compute the lines that a terminal shows after a program has written `output`.

    Progress bars overwrite their line with a carriage return, move the cursor up, and erase lines. Colors and
    other escape sequences are ignored. `OMITTED_LINES` are left out.
    """
    lines, row, column = [""], 0, 0
    for match in _TOKEN.finditer(output):
        count = int(match["count"] or 1)
        if match["control"] == "\r":
            column = 0
        elif match["control"] == "\n":
            row, column = row + 1, 0
        elif match["text"]:
            line = lines[row].ljust(column)
            lines[row] = line[:column] + match["text"] + line[column + len(match["text"]) :]
            column += len(match["text"])
        elif match["action"] == "A":
            row = max(0, row - count)
        elif match["action"] == "K":
            lines[row] = lines[row][:column]
        lines += [""] * (row + 1 - len(lines))
    lines = [line.rstrip() for line in lines if not OMITTED_LINES.match(line)]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def record_command(command: str, folder: Path) -> list[str]:
    """Run a command on a pseudo-terminal in `folder`, and return the lines that the terminal shows.

    Raises:
        SystemExit: If the command fails.
    """
    terminal, program = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "LINES": "50", "TERM": "xterm", "NO_COLOR": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    process = subprocess.Popen(
        command.split(), cwd=folder, env=environment, stdin=program, stdout=program, stderr=program
    )
    os.close(program)
    output = b""
    try:
        while data := os.read(terminal, 1 << 16):
            output += data
    except OSError:  # Linux raises EIO when the last process has closed the terminal.
        pass
    os.close(terminal)
    lines = render_screen(output.decode("utf-8", "replace"))
    if process.wait():
        raise SystemExit("\n".join([f"error: {command}: exit code {process.returncode}", *lines]))
    return lines


def format_svg(sessions: list[tuple[str, list[str]]]) -> str:
    """Format commands and their output as an SVG picture of a terminal."""
    rows: list[tuple[str, str]] = []
    for command, lines in sessions:
        rows += [("", _TEXT_COLOR)] if rows else []
        rows += [(f"$ {command}", _COMMAND_COLOR), *((line, _TEXT_COLOR) for line in lines)]
    width = round(2 * _MARGIN + _CHARACTER_WIDTH * max(len(text) for text, _ in rows))
    height = _LINE_HEIGHT * len(rows) + 24
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="ui-monospace, Menlo, Consolas, monospace" '
            'font-size="13">',
            f'<rect width="{width}" height="{height}" rx="8" fill="{_BACKGROUND}"/>',
            *(
                f'<text x="{_MARGIN}" y="{26 + _LINE_HEIGHT * number}" fill="{color}" xml:space="preserve" '
                f'textLength="{_CHARACTER_WIDTH * len(text):.1f}">{escape(text)}</text>'
                for number, (text, color) in enumerate(rows)
                if text
            ),
            "</svg>\n",
        ]
    )


def main() -> None:
    """Record all commands, and write the picture."""
    with tempfile.TemporaryDirectory() as folder:
        sessions = [(command, record_command(command, Path(folder))) for command in COMMANDS]
    OUTPUT.write_text(format_svg(sessions), "utf-8")


if __name__ == "__main__":
    main()
