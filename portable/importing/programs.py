"""List the trainers whose config files can be imported, and detect and convert these files."""

from __future__ import annotations

import re
from functools import partial
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
"""Table of the keys of transformers' Trainer and of the trainers that are built on it.

The trainers share one table, because their files mix the names: axolotl and LLaMA-Factory accept the
arguments of the Trainer, and recipes for TRL contain names of axolotl.
"""
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
    normalize_file=partial(trl.drop_overridden_precision_keys, is_bf16_default=True),
    complete_settings=axolotl.complete_axolotl_settings,
)
LLAMA_FACTORY = ForeignProgram(
    name="LLaMA-Factory",
    keys=TRAINER_KEYS,
    unique_keys=("finetuning_type", "cutoff_len"),
    usual_keys=("stage", "dataset_dir", "template"),
    defaults=llama_factory.DEFAULTS,
    differences=llama_factory.DIFFERENCES,
    normalize_file=trl.drop_overridden_precision_keys,
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
    normalize_file=trl.drop_overridden_precision_keys,
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
    normalize_file=trl.drop_overridden_keys,
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
"""All supported trainers, in the order in which :func:`detect_program` tries them."""


def detect_program(
    file_content: Mapping[str, object], *, is_foreign_file: bool = False
) -> ForeignProgram | None:
    """Find the trainer that a config file belongs to, based on its top-level keys.

    Args:
        file_content: Content of the file.
        is_foreign_file: Whether the file is known to belong to one of the trainers. If so, a single
            key that only one trainer has is enough to identify it. Otherwise, at least two typical
            keys of the trainer are required.

    Returns:
        The trainer. If several trainers match, the first match in :data:`FOREIGN_PROGRAMS`. None if
        no trainer matches.
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

    References to other values of the file, such as ``${output_dir}``, are replaced before the
    conversion (see :func:`resolve_references`).

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
        UserError: If the content is not a mapping, or if a key is unknown or has no counterpart.
            The message describes only the first such key.
    """
    if not isinstance(document.value, dict):
        raise UserError(f"{file_name}: is not an Accelerate config; create a config with: accelerate config")
    return _convert_file(
        _build_normalized_file(ACCELERATE, document.value, _build_origin_finder(document, file_name))
    ).raise_first_refusal()


def convert_accelerate_environment(environment: Mapping[str, str]) -> ImportedRun:
    """Convert the environment variables of ``accelerate launch`` to the settings of a run.

    In contrast to :func:`convert_accelerate_file`, Accelerate's default strategy and the number of
    ranks are not added.

    Args:
        environment: Environment variables of this process, including the variables that the
            launcher has set.

    Raises:
        UserError: If a variable has no counterpart in this project.
    """
    values, variables = accelerate.parse_launch_variables(environment)

    def build_origin(path: KeyPath) -> Origin:
        return Origin(f"accelerate launch: {variables.get(path, path[-1])}", 0)

    file = _build_normalized_file(ACCELERATE, values, build_origin)
    file.convert_keys()
    return file.result.raise_first_refusal()


def build_deepspeed_file(values: Mapping[str, Any], name: str) -> ForeignFile:
    """Build the input of :func:`convert_deepspeed_file` from the content of a DeepSpeed config.

    Deprecated keys are already renamed in the returned file. Before the conversion, the caller can
    therefore read values under the current keys.

    Args:
        values: Content of the DeepSpeed config.
        name: Name of the config file, or of the setting that contains the config, used in messages.
    """
    return _build_normalized_file(DEEPSPEED, values, lambda path: Origin(f"{name}: {'.'.join(path)}", 0))


def convert_deepspeed_file(file: ForeignFile) -> ImportedRun:
    """Convert a DeepSpeed JSON that was prepared by :func:`build_deepspeed_file`.

    The global batch size is only set if the JSON contains it, because the number of ranks is
    unknown. Keys without a counterpart become refusals in the result, and do not raise an error.
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
    """Build a :class:`ForeignFile` in the layout that the trainer's table of keys expects.

    For example, deprecated keys of a DeepSpeed config are renamed.

    Args:
        program: Trainer to which the file belongs.
        values: Content of the file.
        build_origin: Function that returns the origin of a key, given its path.
    """
    file = ForeignFile(program, dict(values), build_origin)
    program.normalize_file(file)
    return file


def _convert_file(file: ForeignFile, *, num_devices: int = 1) -> ImportedRun:
    """Convert all keys of a file, and then add the settings that depend on several keys.

    If the result contains differences, the program's name is added to its ``differing_programs``.

    Args:
        file: File from :func:`_build_normalized_file`, in the layout that the trainer's key table
            expects.
        num_devices: Number of devices over which a batch is divided. 0 if it is unknown.

    Returns:
        The ``result`` of ``file``.
    """
    file.convert_keys()
    file.program.complete_settings(file, num_devices)
    if file.result.differences:
        file.result.differing_programs.append(file.program.name)
    return file.result


def resolve_references(values: dict[str, Any]) -> dict[str, Any]:
    """Replace references to top-level values of the same file, such as ``${output_dir}/logs``.

    If a value consists of a single reference, the result has the type of the referenced value, for
    example a list. Within a longer string, the referenced value is converted to a string.
    References to unknown values, such as environment variables, are not replaced. A reference to the
    value that contains the reference, directly or through other references, is not replaced either.

    Args:
        values: Content of the file. Not modified.
    """
    resolved: dict[str, Any] = {}
    unfinished: set[str] = set()

    def resolve_key(name: str, reference: str) -> Any:
        if name not in values or name in unfinished:
            return reference
        if name not in resolved:
            unfinished.add(name)
            resolved[name] = resolve_value(values[name])
            unfinished.remove(name)
        return resolved[name]

    def resolve_value(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: resolve_value(item) for key, item in value.items()}
        if isinstance(value, list):
            return [resolve_value(item) for item in value]
        if not isinstance(value, str):
            return value
        if (reference := re.fullmatch(r"\$\{(\w+)\}", value)) is not None:
            return resolve_key(reference[1], value)
        return re.sub(r"\$\{(\w+)\}", lambda match: str(resolve_key(match[1], match[0])), value)

    return {key: resolve_key(key, "") for key in values}
