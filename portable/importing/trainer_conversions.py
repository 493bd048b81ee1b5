"""Converters and messages shared by the tables of TRL, axolotl, LLaMA-Factory, ms-swift and torchtune."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from portable.config.field_types import parse_boolean_word
from portable.config.origins import Origin, format_short_value
from portable.importing.foreign_file import ForeignFile, ForeignProgram, NoCounterpart, NoEffect
from portable.importing.foreign_keys import parse_name_list

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from portable.importing.foreign_file import ForeignKeys

SET_EVAL = "set data.eval, such as {source: test.jsonl}, or set data.eval_fraction to hold out training data"
SET_EVAL_EVERY = "set train.eval_every (steps) or train.eval_every_epochs; null: only at the end"
SET_PAIR_LOSS = "set train.loss to dpo, ipo, simpo or orpo"
SET_ADAPTER = "set adapter.type to lora; r, alpha, dropout and target_modules are in the section adapter"
SET_HUB = "set hub.push to end or checkpoints, hub.repo and hub.private"
BETA_OF_LOSS = "an argument of the loss: train.loss: dpo(beta=0.1)"
SFT_OF_LOSS = "an argument of the loss: train.loss: dpo(sft=1.0)"
NO_VIDEO = "only text and still images are trained on; remove the key"
TRAIN_TOWER = (
    "image towers are frozen; set train.trainable to patterns of the parameters to train, such as [.] for all"
)
TRAIN_ONLY_TOWER = "set train.trainable to a pattern of the parameters to train, such as vision"
SCALE_IMAGES = "images keep their shape; set data.image_max_pixels to the largest number of pixels"
FP8_IS_A_SETTING = "products in fp8 are a setting of this program; remove the key, and set fp8: tensorwise"
ONLY_16_OR_32_BITS = "only 16-bit and 32-bit training is supported; remove the key"
NO_REWARDS = "training on rewards of generated answers is not supported; remove the key"
IS_AUTOMATIC = "handled automatically; remove the key"
TOKENIZED_ONCE = "texts are tokenized once, on all cores, and cached in data.cache_dir; remove the key"
NO_LIGER = "Liger kernels are not used; remove the key (memory.loss_chunk_tokens saves the logits' memory)"


def convert_module_names(value: Any, _: ForeignFile) -> Any:
    """Convert a list or comma-separated string of module names to ``adapter.target_modules``.

    The name ``all`` becomes ``all-linear``. Returns None if there are no names.
    """
    names = parse_name_list(value or ())
    return "all-linear" if names in (["all"], ["all-linear"]) else names or None


def convert_eval_fraction(value: Any, _: ForeignFile) -> Any:
    """Convert the fraction of records to hold out for evaluation. Null becomes 0.

    Raises:
        NoCounterpart: If the value is a number of records instead of a fraction.
    """
    if value and value >= 1:
        raise NoCounterpart(
            f"{format_short_value(value)} is a number of records; set data.eval_fraction to a share of 1"
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
        "has no effect: the tokenizer's own template is used; write another template to a .jinja file, "
        "and set data.chat_template to this file"
    )


def build_interval_converter(
    steps_setting: str, epochs_setting: str, unit_key: str
) -> Callable[[Any, ForeignFile], dict[str, Any]]:
    """Build a converter for the Trainer's ``eval_steps`` or ``save_steps``.

    The value is a number of steps or a fraction of all steps. A fraction is converted to steps if
    ``max_steps`` is set, otherwise to epochs.

    Args:
        steps_setting: Setting for the interval in steps.
        epochs_setting: Setting for the interval in epochs.
        unit_key: Key in the file that contains the unit of the interval. The interval is ignored if the
            unit is not ``steps``.
    """

    def convert_interval(value: Any, file: ForeignFile) -> dict[str, Any]:
        unit = parse_boolean_word(file.get_value(unit_key, file.get_value("evaluation_strategy", "steps")))
        if unit not in ("steps", True):
            return {}
        if value >= 1:
            return {steps_setting: int(value)}
        length = file.get_value("max_steps", -1)
        if length > 0:
            return {steps_setting: max(1, int(value * length))}
        return {epochs_setting: value * file.get_value("num_train_epochs", 3)}

    return convert_interval


def convert_events_per_epoch(value: Any, _: ForeignFile) -> float | None:
    """Convert a number of events per epoch to an interval in epochs. Return None for 0 and null."""
    return 1 / value if value else None


def convert_push_time(value: Any, file: ForeignFile) -> str | None:
    """Convert ``push_to_hub`` and ``hub_strategy`` to ``hub.push``.

    Returns None if ``push_to_hub`` is false.
    """
    if parse_boolean_word(value) is not True:
        return None
    return "end" if file.get_value("hub_strategy", "every_save") == "end" else "checkpoints"


def format_pair_loss(kind: Any, beta: Any, sft: Any = None) -> str:
    """Format the value of ``train.loss`` for a preference loss.

    Args:
        kind: Name of the loss in other trainers: ``orpo``, ``simpo``, or a type of DPO loss. None for
            plain DPO.
        beta: Argument ``beta`` of the loss. None selects the default. Ignored for ORPO.
        sft: Weight of an additional cross-entropy on the chosen answer. None or 0 for no cross-entropy.
            Ignored for ORPO and SimPO.

    Returns:
        The value, such as ``dpo(beta=0.1, loss_type='hinge')``.
    """
    if kind in ("orpo", "simpo"):
        return kind if beta is None or kind == "orpo" else f"{kind}(beta={beta})"
    name = "ipo" if kind == "ipo" else "dpo"
    formula = "" if kind in (None, "sigmoid", name) else f", loss_type={kind!r}"
    return f"{name}(beta={0.1 if beta is None else beta}{formula}{f', sft={sft}' if sft else ''})"


def convert_dataset_entry(
    entry: Mapping[str, Any], keys: ForeignKeys, entry_number: int, file: ForeignFile
) -> dict[str, Any]:
    """Convert the keys of one entry in a list of datasets.

    Notes and refusals about keys of the entry are added to the file.

    Args:
        entry: Keys and values of the entry.
        keys: Table of the keys of such an entry.
        entry_number: One-based position of the entry in the list, used in messages.
        file: File that contains the list. ``file.path`` is the path of the list.

    Returns:
        Settings of the source, without the prefix ``data.``.
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
        names.append(name if name not in names else f"{name}-{len(names)}")
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
"""Pairs of settings. If both settings of a pair are set, only the first setting is used."""


def complete_run_settings(file: ForeignFile, num_devices: int) -> None:
    """Add the trainer's defaults, the global batch size and the differences to the result of a file.

    Settings that would have no effect are removed. These are the section ``adapter`` without an
    adapter, the section ``hub`` if nothing is pushed, and evaluation intervals without evaluation data.
    Settings that another setting replaces are also removed.

    Args:
        file: File whose keys have been converted.
        num_devices: Number of devices over which a batch is divided. 0 if it is unknown.
    """
    values, program = file.result.values, file.program
    if "train.loss" in values:
        file.set_default_setting("data.format", "preference", "a loss of pairs")
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
