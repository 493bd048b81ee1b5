"""Generate the reference page and the JSON Schema from the classes of the config.

``python -m portable.config.reference`` writes ``docs/config.md`` and ``configs/schema.json``. With
``--check``, it only checks that both files are up to date.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portable.config import keys
from portable.config.changed_settings import ADJUSTABLE_SETTINGS
from portable.config.derived_defaults import DEFAULT_DESCRIPTIONS, DEFAULTS_BY_TRAINING_KIND
from portable.config.help_text import EXPLAINED_VALUES, describe_default, split_at_explained_values
from portable.config.run_config import RunConfig
from portable.config.sections import SourceConfig
from portable.errors import to_one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

ROOT = Path(__file__).resolve().parents[2]
PAGE_PATH = ROOT / "docs" / "config.md"
"""Path of the reference page. The text before the first section of the page is written by hand."""
_LINE_WIDTH = 120
_MIN_OMITTED_BOUND = 1000
"""Smallest upper bound of a number that the page omits."""


def build_reference_page() -> str:
    """Build the text of ``docs/config.md``, which describes all settings in one list per section.

    The introduction is copied from the existing page. The lists are generated from the schema.
    """
    settings, section_descriptions = (
        keys.get_setting_fields(RunConfig),
        keys.get_section_descriptions(RunConfig),
    )
    introduction = PAGE_PATH.read_text("utf-8").partition("\n## ")[0]
    top_level = "- [Top level](#top-level): Hardware, sharding, precision and compilation."
    contents = ["## Sections", "", top_level]
    mark_code = _build_code_marker()
    for name, text in section_descriptions.items():
        contents += _wrap_item(f"[`{name}`](#{name}): {mark_code(text)}", "- ")
    parts = [introduction, "\n".join([*contents, ""])]
    parts.append(_format_section("Top level", "", [s for s in settings.values() if not s.section]))
    for name, text in section_descriptions.items():
        parts.append(_format_section(f"`{name}`", text, [s for s in settings.values() if s.section == name]))
    return "\n".join(parts)


def _format_section(title: str, description: str, settings: list[keys.SettingField]) -> str:
    """Format a heading, a description and a list of settings in Markdown.

    Args:
        title: Heading.
        description: Text below the heading. Empty if there is no text.
        settings: Settings in the list.
    """
    entries = [line for setting in settings for line in _format_entry(setting)]
    about = [_build_code_marker()(description), ""] if description else []
    return "\n".join([f"## {title}", "", *about, *entries, ""])


def _format_entry(setting: keys.SettingField) -> list[str]:
    """Format a list item with the name, the type, the default and the description of a setting.

    The name is followed by the mark from :func:`_format_identity_mark`, and by ``‡`` if a source in
    ``data.sources`` or ``data.eval`` can also contain the setting. Each value that the description
    explains becomes an item of a nested list.

    Returns:
        Lines of Markdown.
    """
    source_mark = " ‡" if setting.key in {f"data.{name}" for name in SourceConfig.model_fields} else ""
    name = f'<a id="{setting.key}" href="#{setting.key}">**`{setting.key}`**</a>'  # links to the entry itself
    kind, default = _format_type(setting), _format_default(setting)
    first, *details = split_at_explained_values(setting.markdown_description)
    if setting.key in DEFAULT_DESCRIPTIONS or setting.key == "model.config":
        details.append(f"Default: {default}.")
    else:
        kind += f"; default: {default}"
    mark_code = _build_code_marker(setting.choices)
    text = f"{name}{_format_identity_mark(setting)}{source_mark} ({mark_code(kind)}): {mark_code(first)}"
    lines = _wrap_item(text, "- ")
    for detail in details:
        lines += _wrap_item(mark_code(detail), "  - ")
    return lines


def _wrap_item(text: str, bullet: str) -> list[str]:
    """Wrap the text of a list item into lines.

    Args:
        text: Text in Markdown.
        bullet: Beginning of the first line. The other lines are indented by its length.
    """
    return textwrap.wrap(
        text,
        _LINE_WIDTH,
        initial_indent=bullet,
        subsequent_indent=" " * len(bullet),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _format_identity_mark(setting: keys.SettingField) -> str:
    """Return the footnote mark of a setting that must not change when a run is resumed.

    The mark is ``††`` if ``checkpoint.allow_changes`` permits the change, otherwise ``†``. A space
    precedes the mark. The result is empty for settings that may always change.
    """
    if not setting.is_identity:
        return ""
    return " ††" if setting.key in ADJUSTABLE_SETTINGS else " †"


def _format_type(setting: keys.SettingField) -> str:
    """Describe the allowed values of a setting in Markdown.

    Choices and the words true, false and null are formatted as code. Upper bounds of at least
    :data:`_MIN_OMITTED_BOUND` are omitted, because they do not matter in practice.
    """
    text = setting.allowed_values.replace(" (not empty)", "")
    text = re.sub(
        r" and <=? ([\d.e+]+)", lambda bound: bound[0] if float(bound[1]) < _MIN_OMITTED_BOUND else "", text
    )
    values = sorted([*setting.choices, "true", "false", "null"], key=len, reverse=True)
    text = re.sub(rf"(?<![\w-])(?:{'|'.join(map(re.escape, values))})(?![\w-])", r"`\g<0>`", text)
    return text.replace(">=", "≥").replace("<=", "≤")


def _build_code_marker(choices: Iterable[str] = ()) -> Callable[[str], str]:
    """Build a function that puts backticks around settings and values in a description.

    The function marks the keys of settings if they contain a dot or an underscore, and the choices
    of all settings if they contain a hyphen or an underscore. Ordinary words, such as the key
    ``seed``, are not marked. If the description begins with values and a colon, as in ``min, max:
    ...``, these values are marked as well. The function also escapes ``<`` and ``>`` for HTML, and
    turns paths of other pages into links. It does not change text that is already between
    backticks.

    Args:
        choices: Values of the described setting. Values with a digit are marked as well.
    """
    settings = keys.get_setting_fields(RunConfig)
    names = {name for name in settings if re.search("[._]", name)}
    names |= {value for setting in settings.values() for value in setting.choices if re.search("[_-]", value)}
    names |= {value for value in choices if re.search(r"\d", value)}
    words = "|".join(re.escape(name) for name in sorted(names, key=lambda name: (-len(name), name)))
    pattern = re.compile(rf"(?<![\w./`-])(?:{words})(?![\w./`-]*\w)")

    def mark(text: str) -> str:
        label = EXPLAINED_VALUES.match(text)
        values = "" if label is None else ", ".join(f"`{value}`" for value in label[1].split(", "))
        parts = re.split(r"(`[^`]*`)", text if label is None else text[label.end(1) :])
        for index in range(0, len(parts), 2):  # the other parts are code
            part = parts[index].replace("<", "&lt;").replace(">", "&gt;")
            part = pattern.sub(r"`\g<0>`", part)
            parts[index] = re.sub(r"docs/([\w-]+\.md)", lambda path: _format_page_link(path[1]), part)
        return values + "".join(parts)

    return mark


def _format_page_link(name: str) -> str:
    """Format a link to another page in ``docs``, with the title of the page as its text."""
    title = (PAGE_PATH.parent / name).read_text("utf-8").partition("\n")[0].removeprefix("# ")
    return f"[{title}]({name})"


def _format_default(setting: keys.SettingField) -> str:
    """Describe the default of a setting in Markdown. Abbreviates the default of ``model.config``."""
    if isinstance(setting.default, dict) and setting.default:
        return "the model of the quickstart, or `null` if model.name_or_path is set"
    return "an empty string" if setting.default == "" else describe_default(setting)


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
    """Simplify a JSON Schema in place: one-line descriptions in plain text, and no titles.

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
            node["description"] = to_one_line(about).replace("`", "")


def build_generated_files() -> dict[Path, str]:
    """Build the contents of all files that are generated from the config schema, keyed by path.

    The files are the reference page of the settings and ``configs/schema.json``.
    """
    return {
        PAGE_PATH: build_reference_page(),
        ROOT / "configs" / "schema.json": json.dumps(build_json_schema(), indent=2, ensure_ascii=False)
        + "\n",
    }


def main(argv: list[str]) -> int:
    """Write the generated files, or check that they are up to date.

    Args:
        argv: Command-line arguments, without the program name: ``--check`` or none.

    Returns:
        Exit code: 1 if ``--check`` finds a file that is out of date, 2 for invalid arguments,
        otherwise 0.
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
