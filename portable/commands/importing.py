"""``portable-train import``: a config from files of other programs, with comments on its origins."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from portable.checks import check
from portable.config import keys, load_config
from portable.config.run_config import RunConfig
from portable.config.validation import find_mistake
from portable.config.yaml_text import YamlDocument, parse, parse_file, read_text
from portable.config.yaml_writer import as_yaml
from portable.converters.commands import Parser
from portable.converters.console import print_error, print_line
from portable.data.sources.source_kinds import detect_run_format
from portable.errors import USER_ERROR, MistakesError, UserError, to_one_line
from portable.formatting import format_count
from portable.importing.command_line import build_script_error, parse_arguments, split_launcher
from portable.importing.deepspeed import parse_json
from portable.importing.foreign_file import ImportedRun
from portable.importing.programs import list_programs, read_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_ABOUT = (
    f"Print a config made from files of {list_programs()}, and from the "
    "arguments of their scripts, after --. Comments say where each setting is from, what has no effect here, "
    "and what has no counterpart."
)
_MISSING = {
    "model.name_or_path": "the files name no model",
    "data.source": "the files name no data that can be read here",
}
_OTHERWISE = {"model.name_or_path": "model.config", "data.source": "data.sources"}


def print_imported_config(argv: Sequence[str]) -> int:
    """Print a config made from files of other programs.

    Args:
        argv: the words after ``import``.

    Returns:
        the exit code: 0 if the config can be used as it is.

    Raises:
        UserError: if a file cannot be read, or is of no program that is known.
    """
    files, script = list(argv), []
    if "--" in files:
        separator = files.index("--")
        files, script = files[:separator], files[separator + 1 :]
    parser = Parser(prog="portable-train import", description=_ABOUT)
    parser.add_argument("files", nargs="*", metavar="FILE", type=Path)
    parser.add_argument("--devices", type=int, default=0, help="that the batch was spread over")
    arguments = parser.parse_args(files)
    if not arguments.files and not script:
        raise UserError("import: no file; name one, or arguments after --")
    for path in arguments.files:
        if path.suffix == ".py":
            raise build_script_error(str(path))
    documents = [(str(path), _read_document(path)) for path in arguments.files]
    launched = None
    if script:
        launched, script = split_launcher(script)
        documents.append(("command line", YamlDocument(parse_arguments(script), {})))
    merged = ImportedRun()
    # The number of devices comes first: the global batch follows from it.
    for name, document in sorted(
        documents, key=lambda named_document: "num_processes" not in (named_document[1].value or ())
    ):
        imported = read_file(document, name, devices=arguments.devices or launched or merged.processes or 1)
        merged.processes = imported.processes or merged.processes
        if imported.processes:
            count = f"num_processes: {imported.processes}"
            merged.notes.append(
                f"{name}: {count}: start the same number of ranks: portable-train --nproc "
                f"{imported.processes}"
            )
        merged.differences += [line for line in imported.differences if line not in merged.differences]
        for key, value in imported.values.items():
            if (
                key not in imported.assumed
                or merged.values.keys().isdisjoint((key,))
                or key in merged.assumed
            ):
                merged.values[key], merged.origins[key] = value, imported.origins[key]
                merged.assumed = merged.assumed - {key} | (imported.assumed & {key})
        merged.notes += imported.notes
        merged.refused += imported.refused
    _drop_assumed_mask(merged)
    text, mistakes = format_config(merged)
    print_line(text.rstrip())
    if mistakes:
        raise MistakesError(mistakes) if len(mistakes) > 1 else UserError(mistakes[0])
    if merged.refused:
        without = format_count(len(merged.refused), "key")
        print_error(f"note: {without} without a counterpart; comments at the end say what to do")
        return USER_ERROR
    return 0


def _drop_assumed_mask(imported: ImportedRun) -> None:
    """Leave out ``data.train_on`` that is a default for conversations if the records have prompts or texts.

    Records of a dataset that has to be downloaded are not read.
    """
    if "data.train_on" not in imported.assumed:
        return
    source = {key: value for key, value in imported.values.items() if key.startswith("data.")}
    try:
        kind = detect_run_format(load_config(None, source).data, "causal-lm", downloads=False)
    except UserError:
        return
    if kind in ("text", "prompt_completion"):
        del imported.values["data.train_on"], imported.origins["data.train_on"]
        imported.differences = [line for line in imported.differences if "data.train_on" not in line]


def _read_document(path: Path) -> YamlDocument:
    try:
        return parse_file(path)
    except UserError:
        if path.suffix != ".json" or not path.is_file():
            raise
    return YamlDocument(parse_json(read_text(path), str(path)), {})  # with tabs or comments


class ImportedConfig(NamedTuple):
    """A config that was made from files of other programs.

    Attributes:
        text: The YAML file with comments.
        mistakes: What must be corrected before the config can be used, one line each. Empty if nothing.
    """

    text: str
    mistakes: list[str]


def format_config(imported: ImportedRun) -> ImportedConfig:
    """Format the settings as a YAML file with comments, and check that a run accepts them."""
    for key in list(imported.values):
        if (mistake := find_mistake(RunConfig, key, imported.values[key])) is not None:
            imported.refused.append(f"{imported.origins[key].text}: {mistake}")
            del imported.values[key]
    trains = "train.learning_rate" in imported.values and "train.schedule" in imported.values
    missing = [
        f"{key}: {reason}; set it"
        for key, reason in _MISSING.items()
        if trains and not imported.values.keys() & {key, _OTHERWISE[key]}
    ]
    parts = [*_format_settings(imported)]
    for title, lines in (
        ("Missing", missing),
        ("No counterpart, and what to do instead", imported.refused),
        ("No effect here, or another meaning", imported.notes),
        ("What will differ from there", imported.differences),
    ):
        if lines:
            parts += ["", f"# {title}:", *(line for entry in lines for line in _wrap_comment(entry))]
    text = "\n".join(parts) + "\n"
    try:
        config = load_config(parse(text, "run.yaml").value or {})
        check(config.replaced({"backend": "auto"}))  # a backend's own rows are asked where it is
    except MistakesError as error:
        missing += error.lines
    except UserError as error:
        missing.append(str(error))
    return ImportedConfig(text, missing)


def _format_settings(imported: ImportedRun) -> Iterator[str]:
    """The lines of the settings, in the order of the schema."""
    around = ""
    for key, setting in keys.get_settings(RunConfig).items():
        if key not in imported.values:
            continue
        if setting.section != around:
            around = setting.section
            yield f"\n{around}:"
        value = keys.to_plain(imported.values[key])
        nested = isinstance(value, list | dict)
        written = json.dumps(value, ensure_ascii=False) if nested else as_yaml({"_": value})[3:].strip()
        origin = to_one_line(imported.origins[key].text)
        yield f"{'  ' if around else ''}{setting.name}: {written}  # {origin}"


def _wrap_comment(line: str) -> Iterable[str]:
    return textwrap.wrap(
        line,
        100,
        initial_indent="#   ",
        subsequent_indent="#     ",
        break_long_words=False,
        break_on_hyphens=False,
    )
