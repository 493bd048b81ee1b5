"""Compare the settings of two runs, and decide which settings a continued run may change.

When a run starts, its config is compared with the config in its output folder, and with the
fingerprint in the checkpoint that it resumes from. A fingerprint contains the settings that define
a run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.config import keys
from portable.config.derived_defaults import DEFAULTS_BY_TRAINING_KIND, REPLACED_SETTINGS
from portable.config.origins import format_short_value
from portable.config.run_config import RunConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

ADJUSTABLE_SETTINGS = frozenset({"fp8"}) | frozenset(
    f"train.{name}"
    for name in (
        "steps",
        "epochs",
        "global_batch_size",
        "label_smoothing",
        "z_loss",
        "neftune_noise_alpha",
        "dropout",
        "master_dtype",
        "muon_momentum",
        "muon_rate",
        "adafactor_rule",
        "betas",
        "eps",
        "learning_rate",
        "min_learning_rate_ratio",
        "schedule",
        "schedule_params",
        "warmup_steps",
        "warmup_ratio",
        "weight_decay",
        "parameter_groups",
        "max_grad_norm",
    )
)
"""Settings that define a run, but that a launch may change if ``checkpoint.allow_changes`` is set.

They are adjustable because weights, optimizer state and position in the data keep their meaning if one of
these settings changes."""
_TENSOR_SETTINGS = ("data.added_tokens", "train.optimizer", "train.trainable", "train.frozen")
"""Settings outside of the sections model and adapter that determine the tensors in a checkpoint."""
LENGTH_SETTINGS = ("train.steps", "train.epochs")
"""Settings for the length of a run. At most one of them may have a value."""
_ALTERNATIVE_GROUPS = (LENGTH_SETTINGS, *REPLACED_SETTINGS.items())
"""Groups of alternative settings. At most one setting of a group has an effect."""
_EVAL_FRACTION = "data.eval_fraction"
_INHERITED_SETTINGS = ADJUSTABLE_SETTINGS | {
    _EVAL_FRACTION,
    *DEFAULTS_BY_TRAINING_KIND,
    *REPLACED_SETTINGS.values(),
}
"""Settings that keep the value of the existing run if the command that continues the run does not set them.

Otherwise, their values could change by accident, because their defaults depend on other settings or on the
version of this program."""
_MISSING = object()
"""Placeholder for the value of a key that is missing in the fingerprint of a run."""


@dataclass(frozen=True)
class SettingChange:
    """A setting that differs between two runs.

    Attributes:
        key: Dotted key of the setting, or of an item in its mapping, such as
            ``model.config.hidden_size``.
        setting: Dotted key of the setting in the schema.
        before: Value in the first run, as text.
        after: Value in the second run, as text.
    """

    key: str
    setting: str
    before: str
    after: str

    @property
    def is_adjustable(self) -> bool:
        """Whether ``checkpoint.allow_changes`` allows a continued run to change the setting."""
        return self.setting in ADJUSTABLE_SETTINGS

    @property
    def arrow_text(self) -> str:
        """Text of the change for a log line, such as ``train.steps 200 → 300``."""
        return f"{self.key} {self.before} → {self.after}"

    def __str__(self) -> str:
        """Format the change for an error message, such as ``train.steps: 200 and 300``."""
        return f"{self.key}: {self.before} and {self.after}"


class _FlatValue(NamedTuple):
    """A value in a fingerprint, or one item of a mapping in it.

    Attributes:
        setting: Dotted key of the setting that contains the value. None if the value is missing.
        value: The value, or ``_MISSING`` if the fingerprint does not contain it.
    """

    setting: str | None
    value: Any


def find_changes(
    first_run: RunConfig | Mapping[str, Any], second_run: RunConfig | Mapping[str, Any]
) -> list[SettingChange]:
    """Find which of the settings that define a run differ between two runs.

    If a key is missing in a fingerprint, because an older release wrote it, the default of the setting
    is used. Mappings such as ``model.config`` are compared item by item.

    Args:
        first_run: Config of the first run, or its fingerprint.
        second_run: Config of the second run, or its fingerprint.

    Returns:
        The changes, in the order of the schema.
    """
    first_values, second_values = _flatten_fingerprint(first_run), _flatten_fingerprint(second_run)
    absent = _FlatValue(None, _MISSING)
    changes = []
    for key in dict.fromkeys([*first_values, *second_values]):
        before, after = first_values.get(key, absent), second_values.get(key, absent)
        if before.value != after.value:
            setting = before.setting or after.setting or key
            changes.append(
                SettingChange(
                    key, setting, _format_value_or_unset(before.value), _format_value_or_unset(after.value)
                )
            )
    return changes


def is_allowed_in_new_folder(change: SettingChange) -> bool:
    """Return whether a setting may change when a run continues in a new output folder.

    The settings of the model, its vocabulary, the trained parameters and the type of the optimizer must
    not change, because they determine the meaning of the checkpoint's tensors.
    """
    section = change.setting.partition(".")[0]
    return section not in ("model", "adapter") and change.setting not in _TENSOR_SETTINGS


def is_same_run_extended(existing: RunConfig, extended: RunConfig) -> bool:
    """Return whether ``extended`` differs from ``existing`` only in having more steps or epochs.

    Returns False if both have the same values in all settings that define a run.
    """
    changes = find_changes(existing, extended)
    if not changes or any(change.setting not in LENGTH_SETTINGS for change in changes):
        return False
    return all((extended.get(key) or 0) >= (existing.get(key) or 0) for key in LENGTH_SETTINGS)


def find_inherited_values(existing: RunConfig, launched: RunConfig, config: RunConfig) -> dict[str, Any]:
    """Find the settings that a continued run inherits, because the new command does not set them.

    :func:`portable.run.resolve.resolve_run` adds the result to the config of the continued run, so that
    these settings keep their previous values.

    Args:
        existing: Config of the existing run.
        launched: Config from the command that continues the run, without the defaults that depend on
            the model.
        config: Config from the same command, including the defaults that depend on the model.

    Returns:
        Values of the existing run, keyed by dotted key. A setting is not inherited if the command sets
        an alternative, such as ``train.epochs`` instead of ``train.steps``.
    """
    values = {}
    for key in sorted(_INHERITED_SETTINGS):
        alternatives = next((group for group in _ALTERNATIVE_GROUPS if key in group), (key,))
        if any(
            launched.is_set_or_put(other) and not _is_null_warmup(launched, other) for other in alternatives
        ):
            continue
        if key == _EVAL_FRACTION and config.get(key) is not None:
            continue  # because data.eval or data.stream has set the fraction to 0
        if any(config.get(other) != existing.get(other) for other in alternatives):
            values[key] = existing.get(key)
    return values


def _is_null_warmup(config: RunConfig, key: str) -> bool:
    """Return whether ``key`` is a warmup setting with value null, which selects the default warmup."""
    return key in ("train.warmup_steps", "train.warmup_ratio") and config.get(key) is None


def _flatten_fingerprint(run: RunConfig | Mapping[str, Any]) -> dict[str, _FlatValue]:
    """Flatten the mappings in a fingerprint, so that their items can be compared one by one.

    Args:
        run: Config of a run, or its fingerprint.

    Returns:
        The values and their settings, keyed by dotted key. Null values are omitted. If a setting is
        missing in the fingerprint, its default is used.
    """
    values = run.fingerprint() if isinstance(run, RunConfig) else dict(run)
    for key, setting in keys.get_setting_fields(RunConfig).items():
        if setting.is_identity:
            values.setdefault(key, keys.to_plain_value(setting.default))
    flat: dict[str, _FlatValue] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat.update({f"{key}.{name}": _FlatValue(key, item) for name, item in value.items()})
        elif value is not None:
            flat[key] = _FlatValue(key, value)
    return flat


def _format_value_or_unset(value: object) -> str:
    """Format a value for a message. ``_MISSING`` is formatted as ``not set``."""
    return "not set" if value is _MISSING else format_short_value(value)
