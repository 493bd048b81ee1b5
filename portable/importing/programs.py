"""The programs whose files are read, for ``portable-train import`` and for a run that names such a file."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from portable.config.origins import Origin
from portable.errors import UserError
from portable.importing import accelerate, axolotl, deepspeed, llama_factory, ms_swift, torchtune, trl
from portable.importing.foreign_file import ForeignFile, ForeignProgram, ImportedRun

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from portable.config.yaml_text import YamlDocument
    from portable.importing.foreign_file import ForeignKeys, Path

TRAINER_KEYS: ForeignKeys = {**axolotl.KEYS, **llama_factory.KEYS, **trl.KEYS, **trl.FSDP_KEYS}
"""Keys of the Trainer and of the programs that are built on it.

They share one table, because their files mix the names: axolotl and LLaMA-Factory read the arguments of the
Trainer, and recipes for TRL bring names of axolotl along.
"""
TORCHTUNE = ForeignProgram(
    name="torchtune",
    keys=torchtune.KEYS,
    own_keys=("checkpointer",),
    usual_keys=("tokenizer", "dataset", "optimizer", "batch_size", "epochs"),
    defaults=torchtune.DEFAULTS,
    differences=torchtune.DIFFERENCES,
    finish=torchtune.finish,
)
AXOLOTL = ForeignProgram(
    name="axolotl",
    keys={**TRAINER_KEYS, **axolotl.KEYS},
    own_keys=("base_model",),
    usual_keys=("datasets", "sequence_len", "micro_batch_size", "val_set_size", "num_epochs"),
    defaults=axolotl.DEFAULTS,
    differences=axolotl.DIFFERENCES,
    finish=axolotl.finish,
)
LLAMA_FACTORY = ForeignProgram(
    name="LLaMA-Factory",
    keys=TRAINER_KEYS,
    own_keys=("finetuning_type", "cutoff_len"),
    usual_keys=("stage", "dataset_dir", "template"),
    defaults=llama_factory.DEFAULTS,
    differences=llama_factory.DIFFERENCES,
    finish=llama_factory.finish,
)
ACCELERATE = ForeignProgram(
    name="Accelerate",
    keys=accelerate.KEYS,
    own_keys=("compute_environment", "distributed_type"),
    usual_keys=(
        *("fsdp_config", "deepspeed_config", "num_processes", "num_machines"),
        *("main_training_function", "mixed_precision"),
    ),
    unknown="not a key of Accelerate's",
    prepare=accelerate.prepare,
    finish=accelerate.finish,
)
MS_SWIFT = ForeignProgram(
    name="ms-swift",
    keys={**trl.KEYS, **trl.FSDP_KEYS, **ms_swift.KEYS},
    own_keys=("tuner_type", "train_type", "split_dataset_ratio", "rlhf_type"),
    usual_keys=("model", "attn_impl", "target_modules", "load_from_cache_file", "lora_rank", "dataset"),
    defaults=ms_swift.DEFAULTS,
    differences=ms_swift.DIFFERENCES,
    finish=ms_swift.finish,
)
TRL = ForeignProgram(
    name="TRL",
    title="the Trainer or TRL",
    keys=TRAINER_KEYS,
    usual_keys=(
        *("model_name_or_path", "per_device_train_batch_size", "num_train_epochs", "dataset_mixture"),
        *("gradient_accumulation_steps", "logging_steps", "learning_rate", "dataset_name"),
        "lr_scheduler_type",
    ),
    defaults=trl.DEFAULTS,
    differences=trl.DIFFERENCES,
    finish=trl.finish,
)
DEEPSPEED = ForeignProgram(
    name="DeepSpeed",
    keys=deepspeed.KEYS,
    own_keys=("zero_optimization", "train_micro_batch_size_per_gpu"),
    usual_keys=(
        *("train_batch_size", "gradient_clipping", "steps_per_print", "wall_clock_breakdown"),
        "activation_checkpointing",
    ),
    unset=(deepspeed.AUTO,),
    convert_unknown=deepspeed.pass_on,
    prepare=deepspeed.prepare,
    finish=deepspeed.finish,
)
PROGRAMS = (TORCHTUNE, AXOLOTL, LLAMA_FACTORY, ACCELERATE, MS_SWIFT, TRL, DEEPSPEED)
"""In the order in which a file is compared with them."""


def find_program(values: Mapping[str, object], *, likely: bool = False) -> ForeignProgram | None:
    """Return the program that a file with the top-level keys ``values`` is from, or None.

    Args:
        values: Content of the file.
        likely: Whether the file is from one of the programs.
    """
    return next((program for program in PROGRAMS if program.has_written(values, likely=likely)), None)


def list_programs() -> str:
    """Return the names of the programs for a sentence."""
    return ", ".join(program.title or program.name for program in PROGRAMS)


def read_file(document: YamlDocument, name: str, *, devices: int = 1) -> ImportedRun:
    """Convert a file of any of the programs.

    Args:
        document: Content of the file, with the lines of its keys.
        name: Name of the file, used in messages.
        devices: Number of devices that a batch is spread over.

    Raises:
        UserError: If the file is from none of the programs.
    """
    program = find_program(document.value, likely=True) if isinstance(document.value, dict) else None
    if program is None:
        raise UserError(f"{name}: not a config of {list_programs()}; name one")
    file = _open(program, resolve_references(document.value), _find_origins(document, name))
    return _convert(file, devices=devices)


def read_accelerate(document: YamlDocument, name: str) -> ImportedRun:
    """Convert a file of ``accelerate config``.

    Args:
        document: Content of the file, with the lines of its keys.
        name: Name of the file, used in messages.

    Raises:
        UserError: For a key that is unknown or has no counterpart.
    """
    if not isinstance(document.value, dict):
        raise UserError(f"{name}: not an Accelerate config; accelerate config writes one")
    return _convert(_open(ACCELERATE, document.value, _find_origins(document, name))).require_all()


def read_environment(environment: Mapping[str, str]) -> ImportedRun:
    """Convert the environment of a process that ``accelerate launch`` has started.

    Args:
        environment: Environment variables.

    Raises:
        UserError: For a variable that has no counterpart.
    """
    values, variables = accelerate.read_variables(environment)

    def build_origin(path: Path) -> Origin:
        return Origin(f"accelerate launch: {variables.get(path, path[-1])}", 0)

    file = _open(ACCELERATE, values, build_origin)
    file.convert()
    return file.result.require_all()


def open_deepspeed(values: Mapping[str, Any], name: str) -> ForeignFile:
    """Rename the deprecated keys of a DeepSpeed JSON.

    Args:
        values: Content of the file.
        name: Name of the file, or of the setting that has the content, used in messages.
    """
    return _open(DEEPSPEED, values, lambda path: Origin(f"{name}: {'.'.join(path)}", 0))


def convert_deepspeed(file: ForeignFile) -> ImportedRun:
    """Convert a DeepSpeed JSON. A batch size that needs the number of ranks is not among the settings."""
    return _convert(file, devices=0)


def _find_origins(document: YamlDocument, name: str) -> Callable[[Path], Origin]:
    def build_origin(path: Path) -> Origin:
        line = document.lines.get(path) or document.lines.get((*path[:-1], path[-1].removeprefix("fsdp_")), 0)
        return Origin(f"{name}:{line}: {path[-1]}" if line else f"{name}: {path[-1]}", line)

    return build_origin


def _open(
    program: ForeignProgram, values: Mapping[str, Any], origin: Callable[[Path], Origin]
) -> ForeignFile:
    file = ForeignFile(program, dict(values), origin)
    program.prepare(file)
    return file


def _convert(file: ForeignFile, *, devices: int = 1) -> ImportedRun:
    file.convert()
    file.program.finish(file, devices)
    return file.result


def resolve_references(values: dict[str, Any]) -> dict[str, Any]:
    """Replace references to other values of a file, such as ``${output_dir}/logs``."""

    def resolve(value: Any, depth: int = 0) -> Any:
        if isinstance(value, dict):
            return {key: resolve(item) for key, item in value.items()}
        if isinstance(value, list):
            return [resolve(item) for item in value]
        if not isinstance(value, str) or "${" not in value or depth > len(values):
            return value
        if (alone := re.fullmatch(r"\$\{(\w+)\}", value)) is not None and alone[1] in values:
            return resolve(values[alone[1]], depth + 1)
        return re.sub(r"\$\{(\w+)\}", lambda m: str(resolve(values.get(m[1], m[0]), depth + 1)), value)

    return {key: resolve(value) for key, value in values.items()}
