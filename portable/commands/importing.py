"""``portable-train import``: convert the config files of other trainers to one config with comments."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from portable.checks import check_config
from portable.config import keys, load_config
from portable.config.run_config import RunConfig
from portable.config.validation import find_setting_mistake
from portable.config.yaml_text import YamlDocument, parse_yaml, read_config_text, read_yaml_file
from portable.config.yaml_writer import format_yaml
from portable.converters.commands import CommandParser
from portable.converters.console import print_error, print_line
from portable.data.sources.source_kinds import detect_run_format
from portable.errors import USER_ERROR, MultipleMistakesError, UserError, to_one_line
from portable.formatting import format_count
from portable.importing.command_line import (
    build_script_error,
    parse_script_arguments,
    split_launcher_and_script,
)
from portable.importing.deepspeed import parse_deepspeed_json
from portable.importing.foreign_file import ImportedRun
from portable.importing.programs import convert_foreign_file, format_program_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_DESCRIPTION = (
    f"Convert config files of {format_program_names()} to one config, and print it. Put the arguments of a "
    "script after --. Comments in the config show the origin of each setting, ignored keys and unsupported "
    "keys."
)
_REQUIRED_SETTINGS = {
    "model.name_or_path": "the files do not specify a model",
    "data.source": "the files do not specify data that can be read here",
}
"""Settings that every training config needs. The values are the reasons to report if the files do not
set them."""
_ALTERNATIVE_SETTINGS = {"model.name_or_path": "model.config", "data.source": "data.sources"}
"""For each setting in :data:`_REQUIRED_SETTINGS` that can be replaced, the setting that replaces it."""


def print_imported_config(argv: Sequence[str]) -> int:
    """Convert config files of other trainers to a single config of this trainer, and print it.

    If several files set the same setting, the last value is used. However, a value that is only
    assumed, such as a default of the other trainer, does not replace an explicit value. Files that
    set ``num_processes`` are converted first, because the global batch size depends on it.

    Args:
        argv: Arguments after ``import``: paths of files, optionally ``--devices N``, and, after
            ``--``, the command line of a script.

    Returns:
        Exit code: 0 if all keys were converted, ``USER_ERROR`` if some keys are not supported.

    Raises:
        UserError: If a file cannot be read or does not belong to a supported program, or if the
            converted config is not valid or lacks a required setting. A converted config is printed
            even if it causes an error.
    """
    files, script = list(argv), []
    if "--" in files:
        separator = files.index("--")
        files, script = files[:separator], files[separator + 1 :]
    parser = CommandParser(prog="portable-train import", description=_DESCRIPTION)
    parser.add_argument("files", nargs="*", metavar="FILE", type=Path)
    parser.add_argument(
        "--devices",
        type=int,
        default=0,
        help="number of devices on which the other program trains",
    )
    arguments = parser.parse_args(files)
    if not arguments.files and not script:
        raise UserError(
            "import: no file is specified; specify a file, or put the arguments of a script after --"
        )
    for path in arguments.files:
        if path.suffix == ".py":
            raise build_script_error(str(path))
    documents = [(str(path), _read_foreign_document(path)) for path in arguments.files]
    launched_processes = None
    if script:
        launched_processes, undefined_count, script = split_launcher_and_script(script)
        if undefined_count and not arguments.devices:
            raise UserError(
                f"command line: {undefined_count}: the number of devices is not fixed, and the global batch "
                "size depends on it; specify the number with --devices"
            )
        documents.append(("command line", YamlDocument(parse_script_arguments(script), {})))
    merged = ImportedRun()
    # Convert files with the number of processes first, because the global batch size depends on it.
    for name, document in sorted(
        documents, key=lambda named_document: "num_processes" not in (named_document[1].value or ())
    ):
        imported = convert_foreign_file(
            document, name, num_devices=arguments.devices or launched_processes or merged.num_processes or 1
        )
        merged.num_processes = imported.num_processes or merged.num_processes
        if imported.num_processes:
            count = f"num_processes: {imported.num_processes}"
            merged.notes.append(
                f"{name}: {count}: start the same number of ranks with portable-train --nproc "
                f"{imported.num_processes}"
            )
        merged.differing_programs += [
            program for program in imported.differing_programs if program not in merged.differing_programs
        ]
        merged.differences += [line for line in imported.differences if line not in merged.differences]
        for key, value in imported.values.items():
            if (
                key not in imported.assumed_keys
                or merged.values.keys().isdisjoint((key,))
                or key in merged.assumed_keys
            ):
                merged.values[key], merged.origins[key] = value, imported.origins[key]
                merged.assumed_keys = merged.assumed_keys - {key} | (imported.assumed_keys & {key})
        merged.notes += imported.notes
        merged.refusals += imported.refusals
    _remove_assumed_train_on(merged)
    text, mistakes = format_imported_config(merged)
    print_line(text.rstrip())
    if mistakes:
        raise MultipleMistakesError(mistakes) if len(mistakes) > 1 else UserError(mistakes[0])
    if merged.refusals:
        unsupported = format_count(len(merged.refusals), "unsupported key")
        print_error(f"note: {unsupported}; the comments at the end of the config explain what to do")
        return USER_ERROR
    return 0


def _remove_assumed_train_on(imported: ImportedRun) -> None:
    """Remove an assumed ``data.train_on`` if it does not suit the format of the data.

    The value was assumed because TRL trains on all tokens of a conversation by default. It is
    removed if the data consists of plain text, or of records with a prompt and a completion. The
    format of the data is detected from the first record. Does nothing if the format cannot be
    detected, for example because the data would have to be downloaded first.

    Args:
        imported: Imported settings. They are changed in place.
    """
    if "data.train_on" not in imported.assumed_keys:
        return
    source = {key: value for key, value in imported.values.items() if key.startswith("data.")}
    try:
        kind = detect_run_format(load_config(None, source).data, "causal-lm", downloads=False)
    except UserError:
        return
    if kind in ("text", "prompt_completion"):
        del imported.values["data.train_on"], imported.origins["data.train_on"]
        imported.differences = [line for line in imported.differences if "data.train_on" not in line]


def _read_foreign_document(path: Path) -> YamlDocument:
    """Read a YAML file, or a DeepSpeed JSON file that may contain comments and trailing commas."""
    try:
        return read_yaml_file(path)
    except UserError:
        if path.suffix != ".json" or not path.is_file():
            raise
    # Parse the file again, because JSON with tabs or comments is not valid YAML.
    return YamlDocument(parse_deepspeed_json(read_config_text(path), str(path)), {})


class ImportedConfig(NamedTuple):
    """Config converted from files of other trainers.

    Attributes:
        text: Content of the YAML file, with comments.
        mistakes: Messages about settings that the user must correct or add, one line each.
    """

    text: str
    mistakes: list[str]


def format_imported_config(imported: ImportedRun) -> ImportedConfig:
    """Format the settings as a YAML file with comments, and validate the resulting config.

    Mistakes in the config are returned, not raised. The checks of the backend are skipped, because
    they require the machine of the run.

    Args:
        imported: The imported settings, changed in place. Each setting with an invalid value is
            removed, and the reason is appended to ``refusals``, the list of settings that cannot be
            imported.
    """
    for key in list(imported.values):
        if (mistake := find_setting_mistake(RunConfig, key, imported.values[key])) is not None:
            imported.refusals.append(f"{imported.origins[key].text}: {mistake}")
            del imported.values[key]
    has_training_settings = "train.learning_rate" in imported.values and "train.schedule" in imported.values
    mistakes = [
        f"{key}: {reason}; set {key}"
        for key, reason in _REQUIRED_SETTINGS.items()
        if has_training_settings and not imported.values.keys() & {key, _ALTERNATIVE_SETTINGS[key]}
    ]
    parts = [*_iter_setting_lines(imported)]
    for title, lines in (
        ("Missing", mistakes),
        ("Not supported, and what to do instead", imported.refusals),
        ("Ignored, or with a different meaning here", imported.notes),
        (f"Differences from {' and '.join(imported.differing_programs)}", imported.differences),
    ):
        if lines:
            parts += ["", f"# {title}:", *(line for entry in lines for line in _wrap_comment_line(entry))]
    text = "\n".join(parts) + "\n"
    try:
        config = load_config(parse_yaml(text, "run.yaml").value or {})
        # Skip the checks of the backend, because they require the machine of the run.
        check_config(config.replaced({"backend": "auto"}))
    except MultipleMistakesError as error:
        mistakes += error.lines
    except UserError as error:
        mistakes.append(str(error))
    return ImportedConfig(text, mistakes)


def _iter_setting_lines(imported: ImportedRun) -> Iterator[str]:
    """Yield the lines of the YAML file, in the order of the schema.

    The comment at the end of each line states the origin of the value, such as the key from which
    it was converted.
    """
    current_section = ""
    for key, setting in keys.get_setting_fields(RunConfig).items():
        if key not in imported.values:
            continue
        if setting.section != current_section:
            current_section = setting.section
            yield f"\n{current_section}:"
        value = keys.to_plain_value(imported.values[key])
        nested = isinstance(value, list | dict)
        yaml_value = (
            json.dumps(value, ensure_ascii=False) if nested else format_yaml({"_": value})[3:].strip()
        )
        origin = to_one_line(imported.origins[key].text)
        yield f"{'  ' if current_section else ''}{setting.name}: {yaml_value}  # {origin}"


def _wrap_comment_line(line: str) -> Iterable[str]:
    """Wrap a line of text, and return it as YAML comment lines."""
    return textwrap.wrap(
        line,
        100,
        initial_indent="#   ",
        subsequent_indent="#     ",
        break_long_words=False,
        break_on_hyphens=False,
    )
