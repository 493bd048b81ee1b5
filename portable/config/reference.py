"""Generate the reference page and the JSON Schema from the classes of the config.

``python -m portable.config.reference`` writes ``docs/config.md`` and ``configs/schema.json``. With
``--check``, it only checks that both files are up to date.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from portable.config import keys
from portable.config.changed_settings import ADJUSTABLE_SETTINGS
from portable.config.derived_defaults import DEFAULTS_BY_TRAINING_KIND
from portable.config.help_text import describe_default
from portable.config.run_config import RunConfig
from portable.config.sections import SourceConfig
from portable.errors import to_one_line

ROOT = Path(__file__).resolve().parents[2]
PAGE_PATH = ROOT / "docs" / "config.md"
"""Path of the reference page. The text before the first section of the page is written by hand."""


def build_reference_page() -> str:
    """Build the text of ``docs/config.md``: the introduction of the existing page, followed by new tables."""
    settings, section_descriptions = (
        keys.get_setting_fields(RunConfig),
        keys.get_section_descriptions(RunConfig),
    )
    introduction = PAGE_PATH.read_text("utf-8").partition("\n## ")[0]
    parts = [introduction, _format_section("Top level", "", [s for s in settings.values() if not s.section])]
    for name, text in section_descriptions.items():
        parts.append(_format_section(f"`{name}`", text, [s for s in settings.values() if s.section == name]))
    return "\n".join(parts)


def _format_section(title: str, description: str, settings: list[keys.SettingField]) -> str:
    """Format a heading, a description and a table of settings in Markdown.

    Args:
        title: Heading.
        description: Text below the heading. Empty if there is no text.
        settings: Settings in the table.
    """
    source_keys = {f"data.{name}" for name in SourceConfig.model_fields}
    # Use two columns, because more do not fit on a phone. Each key links to its own row.
    rows = [
        f'| <a id="{s.key}" '
        f'href="#{s.key}">`{s.key}`</a>{_format_identity_mark(s)}{" ‡" * (s.key in source_keys)}'
        f"<br>{_format_cell(s.allowed_values)}<br>default: {_format_default(s)} "
        f"| {_mark_code(_format_cell(s.description), s.allowed_values)} |"
        for s in settings
    ]
    head = ["| setting | what it does |", "| --- | --- |"]
    return "\n".join([f"## {title}", "", *([description, ""] if description else []), *head, *rows, ""])


def _format_identity_mark(setting: keys.SettingField) -> str:
    """Return the footnote mark of a setting that defines the run. Empty for other settings.

    Settings that may be changed with ``checkpoint.allow_changes`` have a different mark from settings
    that must never change.
    """
    if not setting.is_identity:
        return ""
    return " ††" if setting.key in ADJUSTABLE_SETTINGS else " †"


def _format_cell(text: str) -> str:
    """Escape a string for use in a cell of a Markdown table."""
    # Separate choices by commas, because a bar would end the cell. Omit "(not empty)", because it is obvious.
    text = (
        text.replace(" (not empty)", "")
        .replace(" | ", ", ")
        .replace("|", "\\|")
        .replace(">=", "≥")
        .replace("<=", "≤")
    )
    return text.replace("<", "&lt;").replace(">", "&gt;")


def _mark_code(description: str, allowed_values: str) -> str:
    """Format the settings and values in a description as code.

    Args:
        description: Description of a setting.
        allowed_values: Allowed values of the setting, separated by bars.

    Returns:
        The description in Markdown. Values that are ordinary words are only formatted at the start of a
        sentence and in front of a colon.
    """
    values = [re.escape(value) for value in re.findall(r"[^\W\d][\w.-]*", allowed_values)]
    names = [re.escape(key) for key in keys.get_setting_fields(RunConfig) if "." in key]
    unusual_values = [value for value in values if re.search(r"[_\d-]", value)]
    labels = [rf"(?:^|(?<=[.;] )){value}(?=: )" for value in values]
    pattern = "|".join(sorted([*names, *unusual_values, *labels], key=len, reverse=True))
    return re.sub(rf"(?<![\w./`-])(?:{pattern})(?![\w./`-]*\w)", r"`\g<0>`", description)


def _format_default(setting: keys.SettingField) -> str:
    """Format the default of a setting for a table cell. Abbreviates the default of ``model.config``."""
    if isinstance(setting.default, dict) and setting.default:
        return "the quickstart's"
    return describe_default(setting, "`")


def build_json_schema() -> dict[str, Any]:
    """Build the JSON Schema of the YAML file, which editors use for completion and validation."""
    schema = RunConfig.model_json_schema(by_alias=True)
    for key in DEFAULTS_BY_TRAINING_KIND:  # the default of most runs differs from the schema
        section, _, name = key.partition(".")
        setting = schema["$defs"][type(getattr(RunConfig(), section)).__name__]["properties"][name]
        del setting["default"]
        setting["description"] += f" Default: {describe_default(keys.get_setting_fields(RunConfig)[key])}."
    _simplify_descriptions(schema)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "portable-train config",
        **schema,
    }


def _simplify_descriptions(node: Any) -> None:
    """Simplify a JSON Schema in place: make each description a single line, and remove all titles.

    pydantic generates titles from names, and editors would show them before the descriptions.

    Args:
        node: The schema, or a value in it.
    """
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        _simplify_descriptions(child)
    if isinstance(node, dict):
        if isinstance(node.get("title"), str):
            del node["title"]
        if isinstance(about := node.get("description"), str):
            node["description"] = to_one_line(about)


def build_generated_files() -> dict[Path, str]:
    """Build the texts of all generated files, keyed by path."""
    return {
        PAGE_PATH: build_reference_page(),
        ROOT / "configs" / "schema.json": json.dumps(build_json_schema(), indent=2, ensure_ascii=False)
        + "\n",
    }


def main(argv: list[str]) -> int:
    """Write the generated files, or check that they are up to date.

    Args:
        argv: Command-line arguments, without the program name.

    Returns:
        Exit code: 1 if a file is out of date, 2 for invalid arguments, otherwise 0.
    """
    if argv not in ([], ["--check"]):
        print("usage: python -m portable.config.reference [--check]", file=sys.stderr)
        return 2
    outdated_paths = [
        path
        for path, text in build_generated_files().items()
        if not path.is_file() or path.read_text("utf-8") != text
    ]
    for path in outdated_paths:
        name = path.relative_to(ROOT)
        if argv:
            print(f"{name} is out of date; run python -m portable.config.reference", file=sys.stderr)
        else:
            path.write_text(build_generated_files()[path], "utf-8")
            print(f"wrote {name}")
    return 1 if argv and outdated_paths else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
