"""Generate the reference page and the JSON Schema from the schema.

``python -m portable.config.reference`` writes ``docs/config.md``, ``docs/wild.md``, a copy of ``keys.md``,
and ``configs/schema.json``; ``--check`` only checks that they are up to date.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from portable.config import keys
from portable.config.help_text import default_text
from portable.config.importing.rows import TABLES
from portable.config.run_config import RunConfig
from portable.config.sections import SourceConfig
from portable.errors import one_line

ROOT = Path(__file__).resolve().parents[2]

_INTRODUCTION = """\
# Configuration

<!-- Written by `python -m portable.config.reference` from portable/config/*.py. Edit those, not this. -->

Each setting is a key of the YAML file and a flag with its dotted name: `--train.steps 20`. Flags override the
file, which overrides the defaults below, those of [the quickstart](../configs/quickstart.yaml). Several
`--config` files are merged in order, key by key; a `model.config` with another `model_type` replaces the
earlier one. `--dry-run` prints the origin of each setting.

- **Flags.** Dashes and underscores are the same. A boolean needs no value (`--compile`, `--no-compile`).
  Lists: `--train.betas 0.9 0.95` or `'[0.9, 0.95]'`; null: `null`; a key of a mapping:
  `--model.config.hidden_size 512`. `portable-train --help train` explains one section.
- **YAML** is read as YAML 1.2: `3e-4` is a number; `yes`, `no`, `on` and `off` are text, and accepted for
  booleans. Duplicate keys are an error.
- **Paths** expand `~`, `${VAR}` and `$VAR`; an undefined variable is an error.
- **Errors** end the run before any work, with one line that names the key, its line and the nearest name.
- **Editors** with a YAML language server complete and check a file whose first line is
  `# yaml-language-server: $schema=../configs/schema.json` (relative to the file).
- **†** marks what defines a run: it resumes only if these agree. **‡** marks what a source of `data.sources`
  or `data.eval` may set for itself.
"""


def reference_page() -> str:
    """The text of ``docs/config.md``."""
    table, about = keys.settings(RunConfig), keys.sections(RunConfig)
    parts = [_INTRODUCTION, _section("Top level", "", [s for s in table.values() if not s.section])]
    for name, text in about.items():
        parts.append(_section(f"`{name}`", text, [s for s in table.values() if s.section == name]))
    return "\n".join(parts)


def _section(title: str, about: str, settings: list[keys.Setting]) -> str:
    of_sources = {f"data.{name}" for name in SourceConfig.model_fields}
    # Two columns, which a phone can show. The link is to the row itself.
    rows = [
        f'| <a id="{s.key}" href="#{s.key}">`{s.key}`</a>{" †" * s.identity}{" ‡" * (s.key in of_sources)}'
        f"<br>{_cell(s.allowed)}<br>default: {_default(s)} "
        f"| {_cell(s.description)} |"
        for s in settings
    ]
    head = ["| setting | what it does |", "| --- | --- |"]
    return "\n".join([f"## {title}", "", *([about, ""] if about else []), *head, *rows, ""])


def _cell(text: str) -> str:
    # A bar would end the cell, so separate choices by commas. That a text is not empty goes without saying.
    text = (
        text.replace(" (not empty)", "")
        .replace(" | ", ", ")
        .replace("|", "\\|")
        .replace(">=", "≥")
        .replace("<=", "≤")
    )
    return text.replace("<", "&lt;").replace(">", "&gt;")


def _default(setting: keys.Setting) -> str:
    if isinstance(setting.default, dict) and setting.default:
        return "the quickstart's"
    return f"`{default_text(setting.default)}`"


def json_schema() -> dict[str, Any]:
    """The JSON Schema of the YAML file, with descriptions, for editors."""
    schema = RunConfig.model_json_schema(by_alias=True)
    _shorten(schema)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "portable-train config",
        **schema,
    }


def _shorten(node: Any) -> None:
    """Fold descriptions into one line, and remove the titles that pydantic derives from names.

    Editors would show a title before the description.
    """
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        _shorten(child)
    if isinstance(node, dict):
        if isinstance(node.get("title"), str):
            del node["title"]
        if isinstance(about := node.get("description"), str):
            node["description"] = one_line(about)


def pages() -> dict[Path, str]:
    """Every generated file with its text."""
    return {
        ROOT / "docs" / "config.md": reference_page(),
        ROOT / "docs" / "wild.md": TABLES.read_text("utf-8"),
        ROOT / "configs" / "schema.json": json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n",
    }


def main(argv: list[str]) -> int:
    """Write the pages, or check them. The exit code is 1 if one is out of date."""
    if argv not in ([], ["--check"]):
        print("usage: python -m portable.config.reference [--check]", file=sys.stderr)
        return 2
    stale = [path for path, text in pages().items() if not path.is_file() or path.read_text("utf-8") != text]
    for path in stale:
        name = path.relative_to(ROOT)
        if argv:
            print(f"{name} is out of date; run python -m portable.config.reference", file=sys.stderr)
        else:
            path.write_text(pages()[path], "utf-8")
            print(f"wrote {name}")
    return 1 if argv and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
