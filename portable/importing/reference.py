"""Generate docs/keys.md, the page about other trainers' keys, from the tables of keys.

``python -m portable.importing.reference`` writes the page. With ``--check``, it only checks that
the page is up to date.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from portable.importing import accelerate, axolotl, deepspeed, llama_factory, ms_swift, torchtune, trl

if TYPE_CHECKING:
    from portable.importing.foreign_file import ForeignKeys

PAGE_PATH = Path(__file__).resolve().parents[2] / "docs" / "keys.md"
"""Path of the page. The text above each table of the page is written by hand."""
TABLE_BY_CHAPTER: dict[str, ForeignKeys] = {
    "DeepSpeed JSON": deepspeed.KEYS,
    "Accelerate YAML": {name: key for name, key in accelerate.KEYS.items() if ".xla" not in name},
    "Trainer and TRL": trl.KEYS,
    "axolotl": axolotl.KEYS,
    "LLaMA-Factory": llama_factory.KEYS,
    "ms-swift": ms_swift.KEYS,
    "Entries of axolotl's datasets": axolotl.ENTRY_KEYS,
    "Entries of TRL's dataset_mixture": trl.MIXTURE_ENTRY_KEYS,
    "torchtune": {name: key for name, key in torchtune.KEYS.items() if not name.endswith("*")},
}
"""Tables of keys, by the title of the chapter of the page that lists the keys."""


def build_foreign_keys_page() -> str:
    """Build the text of docs/keys.md by replacing the rows of all tables in the existing page."""
    head, *chapters = PAGE_PATH.read_text("utf-8").split("\n## ")
    parts = [head]
    for chapter in chapters:
        title = chapter.partition("\n")[0]
        above = chapter.partition("\n| their keys | here |\n")[0]
        rows = build_table_rows(TABLE_BY_CHAPTER[title])
        parts.append("\n".join([above, "| their keys | here |", "| --- | --- |", *rows, ""]))
    return "\n## ".join(parts)


def build_table_rows(keys: ForeignKeys) -> list[str]:
    """Build the rows of a Markdown table. Keys with the same meaning share a row.

    Two kinds of keys are skipped: keys that have the same name as their setting (without sections), and
    keys that have no effect and need no replacement.
    """
    names_by_text: dict[str, list[str]] = {}
    for name, key in keys.items():
        text = key.summary.removesuffix("; remove the key")
        if text and name.rpartition(".")[2] != text.rpartition(".")[2]:
            names_by_text.setdefault(text if " " in text else f"`{text}`", []).append(name)
    return [
        f"| {', '.join(f'`{name}`' for name in names)} | {text} |" for text, names in names_by_text.items()
    ]


def main(argv: list[str]) -> int:
    """Write the page, or check that it is up to date.

    Args:
        argv: Command-line arguments, without the program name.

    Returns:
        Exit code: 1 if the page is out of date, 2 for invalid arguments, otherwise 0.
    """
    if argv not in ([], ["--check"]):
        print("usage: python -m portable.importing.reference [--check]", file=sys.stderr)
        return 2
    text = build_foreign_keys_page()
    if text == PAGE_PATH.read_text("utf-8"):
        return 0
    if argv:
        print("docs/keys.md is out of date; run python -m portable.importing.reference", file=sys.stderr)
        return 1
    PAGE_PATH.write_text(text, "utf-8")
    print("wrote docs/keys.md")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
