"""The tables of formats in docs/formats.md, generated from the registries.

`python -m converters.reference` writes them, in the repository. With `--check`, nothing is written, and the
exit code says whether the page is up to date.
"""

from __future__ import annotations

import sys
from pathlib import Path

from converters.formats import formats
from converters.options import WRITERS
from converters.writers.targets import target

PAGE = Path(__file__).parents[1] / "docs" / "formats.md"
_BEGIN, _END = "<!-- Written by `python -m converters.reference`. -->", "<!-- The end of what it writes. -->"


def tables() -> str:
    """What is read, what is written, and which goes into which."""
    read = ["| format | who writes it | recognized by |", "| --- | --- | --- |"]
    read += [f"| `{one.name}` | {one.written_by} | {one.recognized_by} |" for one in formats()]
    targets = {name: target(name) for name in WRITERS}
    written = ["| `--to` | opened by | optimizer |", "| --- | --- | --- |"]
    written += [
        f"| `{name}` | {one.opened_by} | {'yes' if one.optimizer else 'the format has none'} |"
        for name, one in targets.items()
    ]
    without = " and ".join(f"`{known.name}`" for known in formats() if not known.optimizer)
    needed = " and ".join(f"`{name}`" for name, one in targets.items() if one.needs_optimizer)
    into = (
        f"Each is read into each, with `--optimizer` also the optimizer, except from {without}. "
        f"{needed} needs it."
    )
    return "\n\n".join(("\n".join(read), "What can be written (`--to`):", "\n".join(written), into))


def page(text: str) -> str:
    """The page with the tables in place."""
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n\n{tables()}\n\n{_END}{after}"


def main() -> int:
    """Write the page, or check it; returns the exit code."""
    text = PAGE.read_text("utf-8")
    made = page(text)
    if "--check" in sys.argv[1:]:
        return int(made != text)
    PAGE.write_text(made, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
