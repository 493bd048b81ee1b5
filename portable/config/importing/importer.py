"""From a file of another program to settings and notes, for ``portable-train import`` and for a launch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from converters.similar_names import find_similar
from portable.config.importing import accelerate, deepspeed, trainers
from portable.config.importing.rows import File, Imported, Keys, NoCounterpart, Rows, nothing
from portable.config.origins import Origin, shown
from portable.config.types import truth
from portable.errors import UserError, one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from portable.config.yaml_text import Document


@dataclass(frozen=True)
class Program:
    """Another program whose files are read.

    Attributes:
        name: as a message has it.
        rows: its keys.
        sure: keys, separated by spaces, that no other program has.
        some: more keys of its files.
        finish: what several keys say together, once each is taken over; with the devices of the batch.
        prepare: what comes before.
    """

    name: str
    rows: Rows
    sure: str
    some: str
    finish: Callable[[File, int], None] = trainers.finish
    prepare: Callable[[File], None] = lambda file: None

    def reads(self, values: Mapping[str, object], *, likely: bool) -> bool:
        """Whether a file with the top-level keys ``values`` is its; if ``likely``, one sure key is enough."""
        found = {*self.sure.split(), *self.some.split()} & values.keys()
        return len(found) > 1 or (likely and not found.isdisjoint(self.sure.split()))


ACCELERATE = Program(
    "Accelerate",
    accelerate.ROWS,
    "compute_environment distributed_type",
    "fsdp_config deepspeed_config num_processes num_machines main_training_function mixed_precision",
    accelerate.finish,
    accelerate.prepare,
)
DEEPSPEED = Program(
    "DeepSpeed",
    deepspeed.ROWS,
    "zero_optimization train_micro_batch_size_per_gpu",
    "train_batch_size gradient_clipping steps_per_print wall_clock_breakdown activation_checkpointing",
    deepspeed.finish,
    deepspeed.prepare,
)
TRAINER = Program(
    "the Trainer or TRL",
    trainers.TRAINERS,
    "",
    "model_name_or_path per_device_train_batch_size num_train_epochs gradient_accumulation_steps "
    "logging_steps learning_rate dataset_name dataset_mixture lr_scheduler_type",
)
PROGRAMS = (
    Program("torchtune", trainers.TORCHTUNE, "checkpointer", "tokenizer dataset optimizer batch_size epochs"),
    Program(
        "axolotl",
        trainers.TRAINERS,
        "base_model",
        "datasets sequence_len micro_batch_size val_set_size num_epochs",
    ),
    Program("LLaMA-Factory", trainers.TRAINERS, "finetuning_type cutoff_len", "stage dataset_dir template"),
    ACCELERATE,
    TRAINER,
    DEEPSPEED,
)
"""In the order in which a file is asked for them."""


def program_of(values: Mapping[str, object], *, likely: bool = False) -> Program | None:
    """The program whose config file has the top-level keys ``values``, or None.

    Args:
        values: of the file.
        likely: whether the file is of one of them.
    """
    return next((program for program in PROGRAMS if program.reads(values, likely=likely)), None)


def read(document: Document, name: str, *, devices: int = 1) -> Imported:
    """What the parsed file ``name`` comes to.

    Args:
        document: its values, with their lines.
        name: for messages.
        devices: that a batch is spread over.

    Raises:
        UserError: if it is of no program that is known.
    """
    program = program_of(document.value, likely=True) if isinstance(document.value, dict) else None
    if program is None:
        known = ", ".join(program.name for program in PROGRAMS)
        raise UserError(f"{name}: not a config of {known}; name one")
    file = _opened(program, _resolved(document.value), _origin(document, name))
    return _read(program, file, devices=devices)


def read_accelerate(document: Document, name: str) -> Imported:
    """What the parsed file ``name`` of ``accelerate config`` comes to.

    Raises:
        UserError: for a key that is unknown or has no counterpart.
    """
    if not isinstance(document.value, dict):
        raise UserError(f"{name}: not an Accelerate config; accelerate config writes one")
    return _read(ACCELERATE, _opened(ACCELERATE, document.value, _origin(document, name))).demand()


def open_deepspeed(values: Mapping[str, Any], name: str) -> File:
    """The content of a DeepSpeed JSON in its present form; ``name`` is its file or setting, for messages."""
    return _opened(DEEPSPEED, values, lambda path: Origin(f"{name}: {'.'.join(path)}", 0))


def read_deepspeed(file: File) -> Imported:
    """What it comes to. A batch size that needs the number of ranks is not among the settings."""
    return _read(DEEPSPEED, file, devices=0)


def read_environment(environment: Mapping[str, str]) -> Imported:
    """What the variables of ``accelerate launch`` come to, which has started this process.

    Raises:
        UserError: for a variable that has no counterpart.
    """
    values, variables = accelerate.of_environment(environment)

    def origin(path: Keys) -> Origin:
        return Origin(f"accelerate launch: {variables.get(path, path[-1])}", 0)

    file = _opened(ACCELERATE, values, origin)
    file.take()
    return file.result.demand()


def _origin(document: Document, name: str) -> Callable[[Keys], Origin]:
    def origin(path: Keys) -> Origin:
        line = document.lines.get(path) or document.lines.get((*path[:-1], path[-1].removeprefix("fsdp_")), 0)
        return Origin(f"{name}:{line}: {path[-1]}" if line else f"{name}: {path[-1]}", line)

    return origin


def _opened(program: Program, values: Mapping[str, Any], origin: Callable[[Keys], Origin]) -> File:
    name = "TRL" if program is TRAINER else program.name
    unknown = deepspeed.passed_on if program is DEEPSPEED else _unknown
    file = File(name, dict(values), program.rows, origin, unknown)
    program.prepare(file)
    return file


def _read(program: Program, file: File, *, devices: int = 1) -> Imported:
    file.take()
    program.finish(file, devices)
    return file.result


def _unknown(file: File, value: Any) -> None:
    """Say what is known of a key that no row has."""
    path, accelerates = file.path, file.program == "Accelerate"
    around = ".".join((*path[:-1], ""))
    siblings = [key.removeprefix(around) for key in file.rows if key.startswith(around)]
    near = next(iter(find_similar(path[-1], siblings)), None)
    # A later release may have added a key that is off. A false key with a similar name is a misspelled one.
    if value is None or (nothing(truth(value)) and not near):
        return
    hint = f"; did you mean {near}?" if near else ""
    raise NoCounterpart(
        f"not a key of Accelerate's{hint}" if accelerates else f"{shown(value)} is not known here{hint}"
    )


def _resolved(values: dict[str, Any]) -> dict[str, Any]:
    """``values`` with those that name others, as ``${output_dir}/logs`` does, filled in."""

    def filled(value: Any, depth: int = 0) -> Any:
        if isinstance(value, dict):
            return {key: filled(item) for key, item in value.items()}
        if isinstance(value, list):
            return [filled(item) for item in value]
        if not isinstance(value, str) or "${" not in value or depth > len(values):
            return value
        if (whole := re.fullmatch(r"\$\{(\w+)\}", value)) is not None and whole[1] in values:
            return filled(values[whole[1]], depth + 1)
        return re.sub(r"\$\{(\w+)\}", lambda m: str(filled(values.get(m[1], m[0]), depth + 1)), value)

    return {key: filled(value) for key, value in values.items()}


_LAUNCHED = ("nproc_per_node", "num_processes", "num_gpus", "nproc")
"""Options of launchers with the number of processes on a machine."""


def split_launcher(words: list[str]) -> tuple[int | None, list[str]]:
    """Separate a launcher from the script that it starts: ``torchrun --nproc_per_node 2 train.py --bf16``.

    Returns:
        Number of processes if the launcher names one, and the words from the script on.

    Raises:
        UserError: if the script has no arguments.
    """
    script = next((position for position, word in enumerate(words) if word.endswith(".py")), None)
    if script is None:
        return None, words
    if script + 1 == len(words):
        raise python_script(words[script], "command line: ")
    processes = None
    for position, word in enumerate(words[:script]):
        name, _, value = word.lstrip("-").replace("-", "_").partition("=")
        if name in _LAUNCHED and (value or words[position + 1]).isdigit():
            processes = int(value or words[position + 1])
    return processes, words[script:]


def python_script(path: str, where: str = "") -> UserError:
    """Build the error for a Python script, whose settings are in its code."""
    return UserError(
        f"{where}{path}: a Python script, whose settings are not read; write its arguments after --, as in "
        f"portable-train import -- {path} --learning_rate 1e-5, or start from portable-train init and copy "
        "the values (docs/migrate.md names the setting of each argument)"
    )


def command_line(words: list[str]) -> dict[str, Any]:
    """The arguments of a script, as the file that they stand for: ``--bf16 --learning_rate 1e-5``."""
    from portable.config.yaml_text import parse_value

    found: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, text = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = parse_value(text) if equals else True
        elif name:
            value = parse_value(word)
            before = found[name]
            found[name] = (
                value if before is True else [*(before if isinstance(before, list) else [before]), value]
            )
    if not found:
        raise UserError(one_line(f"import: no arguments in {' '.join(words)!r}; give --name value"))
    return found
