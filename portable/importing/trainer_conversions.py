"""Converters and messages shared by the tables of TRL, axolotl, LLaMA-Factory, ms-swift and torchtune."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from portable.config.field_types import parse_boolean_word
from portable.config.origins import Origin, format_short_value
from portable.importing.foreign_file import ForeignFile, ForeignProgram, NoCounterpart, NoEffect
from portable.importing.foreign_keys import parse_name_list

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from portable.importing.foreign_file import ForeignKeys

SET_EVAL = (
    "set data.eval to the evaluation data, such as {source: test.jsonl}, or set data.eval_fraction to hold "
    "out training data"
)
SET_EVAL_EVERY = (
    "set train.eval_every to a number of steps or train.eval_every_epochs to a number of epochs, or both to "
    "null to evaluate only at the end"
)
SET_PAIR_LOSS = "set train.loss to dpo, ipo, simpo or orpo"
SET_ADAPTER = (
    "set adapter.type to lora, and configure the adapter with adapter.r, adapter.alpha, adapter.dropout and "
    "adapter.target_modules"
)
SET_HUB = (
    "set hub.push to end or checkpoints, hub.repo to the name of the repository, and hub.private to true or "
    "false"
)
BETA_OF_LOSS = "specify beta as an argument of train.loss, such as dpo(beta=0.1)"
BETA_ARGUMENT = "the argument `beta` of train.loss, such as dpo(beta=0.1)"
GAMMA_OF_LOSS = "specify gamma as an argument of train.loss, such as simpo(gamma=0.5)"
GAMMA_ARGUMENT = "the argument `gamma` of train.loss, such as simpo(gamma=0.5)"
ADD_CROSS_ENTROPY = "set train.loss to a custom loss that adds the cross-entropy of the chosen answer"
SFT_OF_LOSS = "specify sft as an argument of train.loss, such as dpo(sft=1.0)"
SFT_ARGUMENT = "the argument `sft` of train.loss, such as dpo(sft=1.0)"
NO_VIDEO = "a run can train only on text and still images; remove the key"
TRAIN_TOWER = (
    "the image tower is frozen by default; set train.trainable to patterns that match the names of the "
    "parameters to train, such as [.] for all parameters"
)
TRAIN_ONLY_TOWER = (
    "set train.trainable to patterns that match the names of the parameters to train, such as [vision]"
)
SCALE_IMAGES = "images keep their aspect ratio; set data.image_max_pixels to the maximum number of pixels"
SET_FP8 = "in the run config, set fp8 to tensorwise or rowwise"
ONLY_FROZEN_QUANTIZED = "only frozen weights can be quantized; set adapter.base to nf4 or int8"
NO_REWARDS = "reinforcement learning on generated answers is not available; remove the key"
IS_AUTOMATIC = "a run handles this automatically; remove the key"
NO_SETTING = "there is no corresponding setting; remove the key"
TOKENIZED_ONCE = "texts are tokenized once, on all cores, and cached in data.cache_dir; remove the key"
NO_LIGER = (
    "these kernels are not used, but memory.loss_chunk_tokens reduces the memory used for the logits; remove "
    "the key"
)
SET_PROCESSOR = (
    "set the option in the processor_config.json of a local folder, and set model.name_or_path to the folder"
)
SET_RECORD_FORMAT = "set data.format and data.columns to describe the records"
ADD_SYSTEM_MESSAGE = "add a system message to each record"
EVALUATION_PACKED = (
    "evaluation samples are packed like training samples, as data.packing specifies; remove the key"
)
PADDED_WITHOUT_PACKING = "set data.packing to false to pad sequences to data.seq_len"
SHARED_BATCH_SIZE = "evaluations use train.micro_batch_size; remove the key"
ALWAYS_SHUFFLED = "samples are always shuffled; remove the key"
SET_BETAS = "set train.betas to a list of both values"
EPOCH_KEYS = ("num_train_epochs", "num_epochs", "max_epochs")
"""Names of the number of epochs in the files of the Trainer, of axolotl, and of ms-swift."""


def convert_module_names(value: Any, _: ForeignFile) -> Any:
    """Convert a list or comma-separated string of module names to an adapter setting's value.

    The setting is, for example, ``adapter.target_modules`` or ``adapter.modules_to_save``. If the
    only name is ``all`` or ``all-linear``, the result is the string ``all-linear``. Otherwise, the
    result is the list of names, or None if there are no names.
    """
    names = parse_name_list(value or ())
    return "all-linear" if names in (["all"], ["all-linear"]) else names or None


def convert_eval_fraction(value: Any, _: ForeignFile) -> Any:
    """Check the fraction of records to hold out for evaluation, and convert null to 0.

    Raises:
        NoCounterpart: If the value is 1 or more, because it is then a number of records.
    """
    if value and value >= 1:
        raise NoCounterpart(
            f"{format_short_value(value)} is a number of records; set data.eval_fraction to a fraction such "
            "as 0.01"
        )
    return value or 0.0


def convert_chat_template(value: Any, _: ForeignFile) -> str | None:
    """Convert the name of a chat template.

    Returns:
        ``chatml`` for ``chatml``. None for ``tokenizer_default``, because the tokenizer's template is
        the default.

    Raises:
        NoEffect: For any other name, because it refers to a template of the other trainer.
    """
    if value == "chatml":
        return "chatml"
    if value == "tokenizer_default":
        return None
    raise NoEffect(
        f"{format_short_value(value)} has no effect: the tokenizer's own template is used; to use another "
        "template, write it to a .jinja file, and set data.chat_template to this file"
    )


def build_interval_converter(
    steps_setting: str, epochs_setting: str, *unit_keys: str
) -> Callable[[Any, ForeignFile], dict[str, Any]]:
    """Build a converter for the Trainer's ``eval_steps`` or ``save_steps``.

    A value of 1 or more is a number of steps, and a value below 1 is a fraction of all steps. A
    fraction is converted to steps if ``max_steps`` is set, otherwise to epochs. The conversion to
    epochs uses ``num_train_epochs``, or 3 if this key is missing.

    Args:
        steps_setting: Setting for the interval in steps.
        epochs_setting: Setting for the interval in epochs.
        unit_keys: Names of the key that contains the unit of the interval. The first name in the file
            is used, and ``steps`` is the default. The interval is ignored if the unit is neither
            ``steps`` nor true.
    """

    def convert_interval(value: Any, file: ForeignFile) -> dict[str, Any]:
        unit = parse_boolean_word(get_first_value(file, unit_keys, "steps"))
        if unit not in ("steps", True):
            return {}
        if value >= 1:
            return {steps_setting: int(value)}
        length = file.get_value("max_steps", -1)
        if length > 0:
            return {steps_setting: max(1, math.ceil(value * length))}
        epochs = get_first_value(file, EPOCH_KEYS, file.program.defaults.get("train.epochs", 3))
        return {epochs_setting: value * epochs}

    return convert_interval


def get_first_value(file: ForeignFile, keys: Iterable[str], default: Any = None) -> Any:
    """Return the value of the first of several keys that the file sets, otherwise ``default``."""
    return next((file.get_value(key) for key in keys if file.get_value(key) is not None), default)


def convert_events_per_epoch(value: Any, _: ForeignFile) -> float | None:
    """Convert a count such as axolotl's ``saves_per_epoch`` to an interval in epochs.

    Returns None for 0 and null.
    """
    return 1 / value if value else None


def convert_push_time(value: Any, file: ForeignFile) -> str | None:
    """Convert ``push_to_hub`` to ``hub.push``, depending on ``hub_strategy`` in the same file.

    Args:
        value: Value of ``push_to_hub``.
        file: File of the other trainer, which may contain ``hub_strategy``.

    Returns:
        ``end`` if ``hub_strategy`` is ``end``, otherwise ``checkpoints``. None if ``push_to_hub``
        is not true.
    """
    if parse_boolean_word(value) is not True:
        return None
    return "end" if file.get_value("hub_strategy", "every_save") == "end" else "checkpoints"


def format_pair_loss(
    kind: Any, *, beta: Any = None, gamma: Any = None, label_smoothing: Any = None, sft: Any = None
) -> str:
    """Format the value of ``train.loss`` for a preference loss.

    Arguments that the loss does not have are left out.

    Args:
        kind: Name of the loss in other trainers: ``orpo``, ``simpo``, or a type of DPO loss. None for
            plain DPO.
        beta: Argument ``beta`` of the loss. None selects the default.
        gamma: Argument ``gamma`` of SimPO. None selects the default.
        label_smoothing: Argument ``label_smoothing`` of DPO. None or 0 for no smoothing.
        sft: Weight of an additional cross-entropy on the chosen answer, for DPO and IPO. None or 0 for
            no cross-entropy. See also :func:`note_missing_cross_entropy`.

    Returns:
        The value, such as ``dpo(beta=0.1, loss_type='hinge')``.
    """
    name = kind if kind in ("orpo", "simpo", "ipo") else "dpo"
    arguments: dict[str, Any] = {"beta": beta}
    if name == "simpo":
        arguments["gamma"] = gamma
    elif name != "orpo":
        arguments["beta"] = 0.1 if beta is None else beta
        arguments["loss_type"] = None if kind in (None, "sigmoid", name) else kind
        arguments |= {"label_smoothing": label_smoothing or None, "sft": sft or None}
    text = ", ".join(f"{key}={value!r}" for key, value in arguments.items() if value is not None)
    return f"{name}({text})" if text else name


def note_missing_cross_entropy(kind: Any, key: str, default_weight: float, file: ForeignFile) -> None:
    """Add a note if the other trainer adds a cross-entropy to ORPO or SimPO, because a run does not.

    Args:
        kind: Name of the loss. There is no note for other losses than ``orpo`` and ``simpo``.
        key: Key in the file that contains the weight of the cross-entropy of the chosen answer.
        default_weight: Weight if the file does not set ``key``.
        file: File that is being converted. ``file.path`` is the path of the key that selects the loss.
    """
    weight = file.get_value(key, default_weight)
    if kind in ("orpo", "simpo") and weight:
        file.add_note(
            file.path,
            f"{file.program.name} also adds the cross-entropy of the chosen answer ({key}: "
            f"{format_short_value(weight)}), which train.loss: {kind} does not; set train.loss "
            "to a custom loss to add this term",
        )


def read_loss_types(file: ForeignFile) -> tuple[str, Any]:
    """Read TRL's ``loss_type``, ``loss_weights`` and ``rpo_alpha``.

    Returns:
        Type of the preference loss, and the weight of the additional cross-entropy on the chosen
        answer, which is None without cross-entropy.

    Raises:
        NoCounterpart: If there is not exactly one preference loss with weight 1.
    """
    kinds, weights = file.get_value("loss_type", "sigmoid"), file.get_value("loss_weights")
    kinds = [str(kind) for kind in (kinds if isinstance(kinds, list) else [kinds])]
    weights = [1] * len(kinds) if weights is None else weights
    fits = isinstance(weights, list) and len(weights) == len(kinds)
    weight_of = dict(zip(kinds, weights, strict=True)) if fits else {}
    sft = weight_of.pop("sft", file.get_value("rpo_alpha"))
    if [*weight_of.values()] != [1]:
        raise NoCounterpart(
            f"{format_short_value(kinds)} is not supported: only one preference loss with weight 1 is "
            "possible, in addition to sft; set train.loss to dpo"
        )
    return next(iter(weight_of)), sft


def convert_dataset_entry(
    entry: Mapping[str, Any], keys: ForeignKeys, entry_number: int, file: ForeignFile
) -> dict[str, Any]:
    """Convert the keys of one entry in a list of datasets.

    Notes about the keys are added to ``file.result.notes``. If a key has no counterpart in this
    project, an error message is added to ``file.result.refusals``.

    Args:
        entry: Keys and values of the entry.
        keys: Table of the keys that such an entry may have.
        entry_number: One-based position of the entry in the list, used in messages.
        file: File that contains the list. ``file.path`` is the path of the list.

    Returns:
        Settings of the data source, keyed by name without the prefix ``data.``.
    """
    outer = file.build_origin(file.path)

    def build_origin(path: tuple[str, ...]) -> Origin:
        return Origin(f"{outer.text}: entry {entry_number}: {'.'.join(path)}", outer.order)

    inner = ForeignFile(ForeignProgram(file.program.name, keys), dict(entry), build_origin)
    inner.convert_keys()
    file.result.notes += inner.result.notes
    file.result.refusals += inner.result.refusals
    return {key.removeprefix("data."): value for key, value in inner.result.values.items()}


def build_source_settings(sources: list[dict[str, Any]]) -> dict[str, Any]:
    """Build the settings for a single source, or for a mixture of several sources.

    The sources of a mixture get no weights, so each source is read once per epoch. Each source is named
    after the last part of its path, with a number appended to duplicate names.

    Args:
        sources: Settings of each source, without the prefix ``data.``. Settings with the value None are
            skipped.

    Returns:
        Settings, keyed by dotted key. Empty if there are no sources.
    """
    sources = [{key: value for key, value in entry.items() if value is not None} for entry in sources]
    if len(sources) == 1:
        return {f"data.{key}": value for key, value in sources[0].items()}
    names: list[str] = []
    for entry in sources:
        last = str(entry.get("source")).rpartition("/")[2]
        name = re.sub(r"[^A-Za-z0-9_-]+", "-", last).strip("-_") or "source"
        numbered = (f"{name}-{number}" for number in itertools.count(len(names)))
        names.append(next(unused for unused in itertools.chain([name], numbered) if unused not in names))
    named_entries = [{"name": name, **entry} for name, entry in zip(names, sources, strict=True)]
    return {"data.sources": named_entries} if named_entries else {}


SOURCE_SETTINGS = (
    *("data.source", "data.sources", "data.split", "data.config_name", "data.format", "data.columns"),
    *("data.text_field", "data.train_on", "data.roles_to_train"),
)
"""Dotted keys of the settings to which a list of datasets may be converted."""
_EXCLUDED_BY = {
    "train.steps": "train.epochs",
    "train.eval_every_epochs": "train.eval_every",
    "checkpoint.every_epochs": "checkpoint.every_steps",
    "train.warmup_ratio": "train.warmup_steps",
}
"""Settings to remove, keyed by the setting that takes precedence if both are set."""


def complete_run_settings(file: ForeignFile, num_devices: int) -> None:
    """Add the original trainer's defaults to the settings, and remove settings without effect.

    The original trainer is the one for which the file was written. Its defaults are added only for
    settings that the file does not set. The function also adds the global batch size, and settings
    that another setting requires, such as ``data.format`` for a preference loss. Differences in
    behavior that remain between the original trainer and this one are described in
    ``file.result.differences``, one sentence each.

    The following settings are removed: ``adapter`` settings without an adapter, ``hub`` settings if
    nothing is pushed, evaluation intervals without evaluation data, and settings that another
    setting replaces.

    Args:
        file: File whose keys have been converted. Its ``result`` is modified in place.
        num_devices: Number of devices over which a batch is divided. 0 if it is unknown.
    """
    values, program = file.result.values, file.program
    _set_min_learning_rate_ratio(file)
    if "train.loss" in values:
        file.set_default_setting("data.format", "preference", "required by a preference loss")
        values.pop("data.packing", None)
    has_adapter = values.get("adapter.type") is not None
    pushes = values.get("hub.push") is not None
    for key in list(values):
        if (key.startswith("adapter.") and not has_adapter) or (key.startswith("hub.") and not pushes):
            del values[key]
    if values.get("model.name_or_path") is None:
        file.set_default_setting("train.min_learning_rate_ratio", 0.0, f"default of {program.name}")
    if values.get("expert_parallel_size") not in (None, 1):
        file.set_default_setting("strategy", "full_shard", "expert parallelism needs FSDP2")
    has_warmup = bool(values.keys() & {"train.warmup_ratio", "train.warmup_steps"})
    for key, value in program.defaults.items():
        is_replaced = (
            (key.startswith("train.warmup") and has_warmup)
            or (key.startswith("adapter.") and not has_adapter)
            or (key == "train.epochs" and "train.steps" in values)
        )
        if not is_replaced:
            file.set_default_setting(key, value, f"default of {program.name}")
    if values.get("train.warmup_steps"):
        values.pop("train.warmup_ratio", None)
    for key, excluded in _EXCLUDED_BY.items():
        if values.get(key) is not None:
            values.pop(excluded, None)
    file.set_global_batch_size(num_devices)
    for difference in program.differences:
        if not difference.setting or values.get(difference.setting):
            file.result.differences.append(difference.text)
    if values.get("data.eval_fraction") == 0:
        for key in ("train.eval_every", "train.eval_every_epochs"):
            values.pop(key, None)


def _set_min_learning_rate_ratio(file: ForeignFile) -> None:
    """Set ``train.min_learning_rate_ratio`` if ``lr_scheduler_kwargs`` contains ``min_lr``.

    The ratio is computed after the conversion of all keys, because the learning rate may be any of several
    keys, or a default of the trainer. If the learning rate is not positive, a message is added to
    ``file.result.refusals``.
    """
    arguments = file.get_value("lr_scheduler_kwargs")
    lowest = arguments.get("min_lr") if isinstance(arguments, Mapping) else None
    if not isinstance(lowest, int | float):
        return
    rate = file.result.values.get("train.learning_rate", file.program.defaults.get("train.learning_rate"))
    if isinstance(rate, int | float) and rate > 0:
        file.set_setting(("lr_scheduler_kwargs",), "train.min_learning_rate_ratio", lowest / rate)
    else:
        file.add_refusal(
            ("lr_scheduler_kwargs",),
            f"min_lr needs a positive learning rate, not {format_short_value(rate)}; set "
            "train.min_learning_rate_ratio to the lowest learning rate divided by the highest",
        )
