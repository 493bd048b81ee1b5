"""Generate the tables in docs/keys.md, which list the settings that replace other trainers' keys.

The rows come from the tables that the importers use. ``python -m portable.importing.reference``
writes the page. With ``--check``, it only checks that the page is up to date.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from portable.config import RunConfig
from portable.config.keys import get_setting_fields
from portable.importing import accelerate, axolotl, deepspeed, llama_factory, ms_swift, torchtune, trl

if TYPE_CHECKING:
    from portable.importing.foreign_file import ForeignKeys

PAGE_PATH = Path(__file__).resolve().parents[2] / "docs" / "keys.md"
"""Path of docs/keys.md. Only its table rows are generated; the text above each table is written by hand."""
TABLE_BY_HEADING: dict[str, ForeignKeys] = {
    "DeepSpeed JSON": deepspeed.KEYS,
    "Accelerate YAML": {name: key for name, key in accelerate.KEYS.items() if ".xla" not in name},
    **trl.KEYS_BY_TOPIC,
    "Entries of dataset_mixture": trl.MIXTURE_ENTRY_KEYS,
    "axolotl": axolotl.KEYS,
    "Entries of datasets": axolotl.ENTRY_KEYS,
    "LLaMA-Factory": llama_factory.KEYS,
    "ms-swift": ms_swift.KEYS,
    "torchtune": {name: key for name, key in torchtune.KEYS.items() if not name.endswith("*")},
}
"""Tables of keys, keyed by the heading of the section of docs/keys.md that lists them."""
_TABLE_HEAD = ["| key | setting in portable-trainer |", "| --- | --- |"]
_WORD_LIST = r"(?:[\w-]+, )*[\w-]+ or [\w-]+"
_VALUES = (
    "true|false|null|no|none|documents|bf16|fp32|nf4|int8|lora|dpo|ipo|muon|adamw|sequence-classification"
)
_CODE = re.compile(
    r"(?P<kept>`[^`]*`|docs/tpu\.md)"
    # Values with brackets, such as [.] and dpo(beta=0.1), and whole commands and key-value pairs.
    r"|[\w.]*\[[^\]]*\]|\{[^}]*\}|\w+\(\S*\)|<\w+>|portable-train --\w+|weight: 0"
    # Values of settings, and lists of values.
    rf"|(?<=\bto )(?:{_VALUES})\b(?! or)"
    rf"|(?<=\bto )(?P<values>{_WORD_LIST})|(?<=\bkey )(?P<names>{_WORD_LIST})"
    r"|(?<=\bfor )(?:bfd|wrapped)\b|(?<=\bsuch as )(?:adamw|sequence-classification)\b"
    # Settings without a section, and words with a dot, a slash, a colon or an underscore.
    r"|(?<=\bset )\w+(?= to |,)|(?<=\bsection )\w+|\bstrategy\b|--[\w-]+"
    r"|(?P<word>(?<![\w.])\.?[A-Za-z]\w*(?:[._/:-]+[A-Za-z*]\w*)*/?)"
)
"""Pattern of the parts of a text that are possibly code, such as settings, values and file names."""


def build_foreign_keys_page() -> str:
    """Build the text of docs/keys.md by replacing the rows of all tables in the existing page."""
    lines: list[str] = []
    heading, is_row = "", False
    for line in PAGE_PATH.read_text("utf-8").split("\n"):
        is_row = is_row and line.startswith("|")
        if line.startswith("#"):
            heading = line.lstrip("# ").replace("`", "")
        if line == _TABLE_HEAD[0]:
            is_row = True
            lines += [*_TABLE_HEAD, *build_table_rows(TABLE_BY_HEADING[heading])]
        if not is_row:
            lines.append(line)
    return "\n".join(lines)


def build_table_rows(keys: ForeignKeys) -> list[str]:
    """Build the rows of a Markdown table that shows the replacement for each key of another trainer.

    The replacement is the name of a setting, or advice. Keys with the same replacement share a row.

    Two kinds of keys are left out:

    - Keys that have the same name as their setting, apart from the section. For example, a key
      ``learning_rate`` for the setting ``train.learning_rate`` needs no row.
    - Keys that have no effect and need no replacement.
    """
    names_by_text: dict[str, list[str]] = {}
    for name, key in keys.items():
        text = key.summary.removesuffix("; remove the key")
        if text and name.rpartition(".")[2] != text.rpartition(".")[2]:
            names_by_text.setdefault(mark_code(text), []).append(name)
    return [
        f"| {', '.join(f'`{name}`' for name in names)} | {text} |" for text, names in names_by_text.items()
    ]


def mark_code(text: str) -> str:
    """Mark the settings, values and file names in a description of a key as code, in Markdown.

    The description may also be the name of a setting, or a list of such names.
    """
    names = text.split(", ")
    if " " not in text or all(name in get_setting_fields(RunConfig) for name in names):
        return ", ".join(f"`{name}`" for name in names)
    return _CODE.sub(_mark_match, text)


def _mark_match(match: re.Match[str]) -> str:
    """Mark a match of :data:`_CODE` as code, unless it is an ordinary word or already marked.

    The items of a list of values or names are marked separately. ``docs/tpu.md`` becomes a link.
    """
    text = match[0]
    if match["kept"]:
        return "[TPUs](tpu.md)" if text.startswith("docs/") else text
    if listed := match["values"] or match["names"]:
        return re.sub(r"[\w-]+", lambda word: word[0] if word[0] == "or" else f"`{word[0]}`", listed)
    is_code = match["word"] is None or re.search("[_./:]", text) is not None
    return f"`{text}`" if is_code else text


def main(argv: list[str]) -> int:
    """Write docs/keys.md, which describes the keys of other trainers, or check that it is up to date.

    Args:
        argv: Command-line arguments, without the program name. An empty list to write the page, or
            ``["--check"]`` to check it.

    Returns:
        Exit code: 1 if the check finds that the page is out of date, 2 for invalid arguments,
        otherwise 0.
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
