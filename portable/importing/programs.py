"""List the trainers whose config files can be imported, and detect and convert these files."""

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
    from portable.importing.foreign_file import ForeignKeys, KeyPath

TRAINER_KEYS: ForeignKeys = {**axolotl.KEYS, **llama_factory.KEYS, **trl.KEYS, **trl.FSDP_KEYS}
"""Table of the keys of the Trainer and of the programs that are built on the Trainer.

The programs share one table, because their files mix the names: axolotl and LLaMA-Factory accept the
arguments of the Trainer, and recipes for TRL contain names of axolotl."""
TORCHTUNE = ForeignProgram(
    name="torchtune",
    keys=torchtune.KEYS,
    unique_keys=("checkpointer",),
    usual_keys=("tokenizer", "dataset", "optimizer", "batch_size", "epochs"),
    defaults=torchtune.DEFAULTS,
    differences=torchtune.DIFFERENCES,
    complete_settings=torchtune.complete_torchtune_settings,
)
AXOLOTL = ForeignProgram(
    name="axolotl",
    keys={**TRAINER_KEYS, **axolotl.KEYS},
    unique_keys=("base_model",),
    usual_keys=("datasets", "sequence_len", "micro_batch_size", "val_set_size", "num_epochs"),
    defaults=axolotl.DEFAULTS,
    differences=axolotl.DIFFERENCES,
    complete_settings=axolotl.complete_axolotl_settings,
)
LLAMA_FACTORY = ForeignProgram(
    name="LLaMA-Factory",
    keys=TRAINER_KEYS,
    unique_keys=("finetuning_type", "cutoff_len"),
    usual_keys=("stage", "dataset_dir", "template"),
    defaults=llama_factory.DEFAULTS,
    differences=llama_factory.DIFFERENCES,
    complete_settings=llama_factory.complete_llama_factory_settings,
)
ACCELERATE = ForeignProgram(
    name="Accelerate",
    keys=accelerate.KEYS,
    unique_keys=("compute_environment", "distributed_type"),
    usual_keys=(
        *("fsdp_config", "deepspeed_config", "num_processes", "num_machines"),
        *("main_training_function", "mixed_precision"),
    ),
    unknown_key_message="not a key of Accelerate's",
    normalize_file=accelerate.normalize_accelerate_file,
    complete_settings=accelerate.complete_accelerate_settings,
)
MS_SWIFT = ForeignProgram(
    name="ms-swift",
    keys={**trl.KEYS, **trl.FSDP_KEYS, **ms_swift.KEYS},
    unique_keys=("tuner_type", "train_type", "split_dataset_ratio", "rlhf_type"),
    usual_keys=("model", "attn_impl", "target_modules", "load_from_cache_file", "lora_rank", "dataset"),
    defaults=ms_swift.DEFAULTS,
    differences=ms_swift.DIFFERENCES,
    complete_settings=ms_swift.complete_ms_swift_settings,
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
    complete_settings=trl.complete_trl_settings,
)
DEEPSPEED = ForeignProgram(
    name="DeepSpeed",
    keys=deepspeed.KEYS,
    unique_keys=("zero_optimization", "train_micro_batch_size_per_gpu"),
    usual_keys=(
        *("train_batch_size", "gradient_clipping", "steps_per_print", "wall_clock_breakdown"),
        "activation_checkpointing",
    ),
    unset_values=(deepspeed.AUTO,),
    convert_unknown_key=deepspeed.pass_key_to_deepspeed,
    normalize_file=deepspeed.normalize_deepspeed_file,
    complete_settings=deepspeed.complete_deepspeed_settings,
)
FOREIGN_PROGRAMS = (TORCHTUNE, AXOLOTL, LLAMA_FACTORY, ACCELERATE, MS_SWIFT, TRL, DEEPSPEED)
"""All programs, in the order in which :func:`detect_program` tries them."""


def detect_program(
    file_content: Mapping[str, object], *, is_foreign_file: bool = False
) -> ForeignProgram | None:
    """Find the trainer that a config file belongs to, based on the keys in the file.

    Args:
        file_content: Content of the file.
        is_foreign_file: Whether the file certainly belongs to one of the trainers. If so, fewer keys
            are sufficient to identify the trainer.

    Returns:
        The trainer. None if the file does not seem to belong to any of them.
    """
    return next(
        (
            program
            for program in FOREIGN_PROGRAMS
            if program.is_program_of(file_content, is_foreign_file=is_foreign_file)
        ),
        None,
    )


def format_program_names() -> str:
    """Return the names of all supported trainers, separated by commas, for a message."""
    return ", ".join(program.title or program.name for program in FOREIGN_PROGRAMS)


def convert_foreign_file(document: YamlDocument, file_name: str, *, num_devices: int = 1) -> ImportedRun:
    """Detect the trainer of a config file, and convert the file.

    Args:
        document: Content of the file, with the line numbers of its keys.
        file_name: Name of the file, used in messages.
        num_devices: Number of devices over which a batch is divided.

    Returns:
        Settings, notes and refusals. Keys without a counterpart become refusals and do not raise an
        error.

    Raises:
        UserError: If the file does not belong to any supported trainer.
    """
    program = (
        detect_program(document.value, is_foreign_file=True) if isinstance(document.value, dict) else None
    )
    if program is None:
        raise UserError(
            f"{file_name}: is not a config of {format_program_names()}; specify a config of one of these "
            "programs"
        )
    file = _build_normalized_file(
        program, resolve_references(document.value), _build_origin_finder(document, file_name)
    )
    return _convert_file(file, num_devices=num_devices)


def convert_accelerate_file(document: YamlDocument, file_name: str) -> ImportedRun:
    """Convert a file that was written by ``accelerate config``.

    Args:
        document: Content of the file, with the line numbers of its keys.
        file_name: Name of the file, used in messages.

    Raises:
        UserError: If a key is unknown or has no counterpart.
    """
    if not isinstance(document.value, dict):
        raise UserError(f"{file_name}: is not an Accelerate config; create one with accelerate config")
    return _convert_file(
        _build_normalized_file(ACCELERATE, document.value, _build_origin_finder(document, file_name))
    ).raise_first_refusal()


def convert_accelerate_environment(environment: Mapping[str, str]) -> ImportedRun:
    """Convert the environment variables that ``accelerate launch`` has set for this process.

    Args:
        environment: Environment variables of the process.

    Raises:
        UserError: If a variable has no counterpart.
    """
    values, variables = accelerate.parse_launch_variables(environment)

    def build_origin(path: KeyPath) -> Origin:
        return Origin(f"accelerate launch: {variables.get(path, path[-1])}", 0)

    file = _build_normalized_file(ACCELERATE, values, build_origin)
    file.convert_keys()
    return file.result.raise_first_refusal()


def build_deepspeed_file(values: Mapping[str, Any], name: str) -> ForeignFile:
    """Build the input of :func:`convert_deepspeed_file` from the content of a DeepSpeed JSON.

    Deprecated keys are already renamed in the returned file, so the caller can read its values before
    the conversion.

    Args:
        values: Content of the JSON.
        name: Name of the JSON file, or of the setting that contains the JSON, used in messages.
    """
    return _build_normalized_file(DEEPSPEED, values, lambda path: Origin(f"{name}: {'.'.join(path)}", 0))


def convert_deepspeed_file(file: ForeignFile) -> ImportedRun:
    """Convert a DeepSpeed JSON that was prepared by :func:`build_deepspeed_file`.

    The global batch size is only set if the JSON contains it, because the number of ranks is unknown.
    """
    return _convert_file(file, num_devices=0)


def _build_origin_finder(document: YamlDocument, file_name: str) -> Callable[[KeyPath], Origin]:
    """Return a function that maps the path of a key to its origin: the file and the line of the key.

    The function also finds keys to which :func:`accelerate.normalize_accelerate_file` has added the
    prefix ``fsdp_``.
    """

    def build_origin(path: KeyPath) -> Origin:
        line = document.lines.get(path) or document.lines.get((*path[:-1], path[-1].removeprefix("fsdp_")), 0)
        return Origin(f"{file_name}:{line}: {path[-1]}" if line else f"{file_name}: {path[-1]}", line)

    return build_origin


def _build_normalized_file(
    program: ForeignProgram, values: Mapping[str, Any], build_origin: Callable[[KeyPath], Origin]
) -> ForeignFile:
    """Build a file and normalize it to the layout that its trainer's table expects.

    Args:
        program: Trainer to which the file belongs.
        values: Content of the file.
        build_origin: Function that returns the origin of a key, given its path.
    """
    file = ForeignFile(program, dict(values), build_origin)
    program.normalize_file(file)
    return file


def _convert_file(file: ForeignFile, *, num_devices: int = 1) -> ImportedRun:
    """Convert all keys of a normalized file, and add the settings that depend on several keys."""
    file.convert_keys()
    file.program.complete_settings(file, num_devices)
    if file.result.differences:
        file.result.differing_programs.append(file.program.name)
    return file.result


def resolve_references(values: dict[str, Any]) -> dict[str, Any]:
    """Replace references to top-level values of the same file, such as ``${output_dir}/logs``.

    References to unknown values, such as environment variables, are not replaced.

    Args:
        values: Content of the file. Not modified.
    """

    def resolve_value(value: Any, depth: int = 0) -> Any:
        if isinstance(value, dict):
            return {key: resolve_value(item) for key, item in value.items()}
        if isinstance(value, list):
            return [resolve_value(item) for item in value]
        if not isinstance(value, str) or "${" not in value or depth > len(values):
            return value
        if (alone := re.fullmatch(r"\$\{(\w+)\}", value)) is not None and alone[1] in values:
            return resolve_value(values[alone[1]], depth + 1)
        return re.sub(r"\$\{(\w+)\}", lambda m: str(resolve_value(values.get(m[1], m[0]), depth + 1)), value)

    return {key: resolve_value(value) for key, value in values.items()}
