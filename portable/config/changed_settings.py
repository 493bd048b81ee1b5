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
        """Format the change for an error message, such as ``train.steps: 200 there, 300 here``."""
        return f"{self.key}: {self.before} there, {self.after} here"


class _FlatValue(NamedTuple):
    """Value of a setting, or of one key in a setting that is a mapping.

    Attributes:
        setting: Dotted key of the setting. For the key ``model.config.hidden_size``, this is
            ``model.config``. None if ``value`` is ``_MISSING``.
        value: The value. When two runs are compared and only one of them has the setting or key,
            this is ``_MISSING`` for the other run.
    """

    setting: str | None
    value: Any


def find_changes(
    first_run: RunConfig | Mapping[str, Any], second_run: RunConfig | Mapping[str, Any]
) -> list[SettingChange]:
    """Compare the settings that define two runs, and list the differences.

    A fingerprint from an older release may lack keys. For a missing key, the default of the setting
    is used. Mappings such as ``model.config`` are compared item by item.

    Args:
        first_run: Config of the first run, or its fingerprint.
        second_run: Config of the second run, or its fingerprint.

    Returns:
        The changes, in the order of the settings of the first run. Settings and keys that have a
        value only in the second run are last.
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

    The settings in the sections ``model`` and ``adapter`` and in :data:`_TENSOR_SETTINGS` must not
    change, because they determine the meaning of the checkpoint's tensors. All other settings may
    change.
    """
    section = change.setting.partition(".")[0]
    return section not in ("model", "adapter") and change.setting not in _TENSOR_SETTINGS


def is_same_run_extended(existing: RunConfig, extended: RunConfig) -> bool:
    """Return whether ``extended`` differs from ``existing`` only in having more steps or epochs.

    Only settings that define a run are compared. Returns False if all of them are equal, because
    the run is then not extended.
    """
    changes = find_changes(existing, extended)
    if not changes or any(change.setting not in LENGTH_SETTINGS for change in changes):
        return False
    return all((extended.get(key) or 0) >= (existing.get(key) or 0) for key in LENGTH_SETTINGS)


def find_inherited_values(existing: RunConfig, launched: RunConfig, config: RunConfig) -> dict[str, Any]:
    """Find the settings that a continued run inherits from the existing run.

    A setting is inherited if it is in :data:`_INHERITED_SETTINGS` and the new command does not set
    it. :func:`portable.run.resolve.resolve_run` adds the result to the config of the continued run,
    so that these settings keep their previous values.

    Args:
        existing: Config of the existing run.
        launched: Config from the command that continues the run, without the defaults that depend
            on the model.
        config: Config from the same command, including the defaults that depend on the model.

    Returns:
        Values of the existing run, keyed by dotted key. A setting is not inherited if the command
        sets the setting or an alternative, such as ``train.epochs`` instead of ``train.steps``. A
        warmup setting that the command sets to null counts as not set. ``data.eval_fraction`` is
        not inherited if ``data.eval`` or ``data.stream`` determines it. Settings that do not differ
        between the existing run and ``config`` are omitted.
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
    """Flatten the fingerprint of a run, so that the items of its mappings can be compared one by one.

    The fingerprint contains the settings that define the run. For example, if a setting ``s`` is a
    mapping with the keys ``a`` and ``b``, the result has the two keys ``s.a`` and ``s.b``. Both
    entries name ``s`` as their setting.

    Args:
        run: Config of a run, or its fingerprint.

    Returns:
        Value and setting of each entry, keyed by dotted key. Null values of settings are omitted.
        If a setting is missing in the fingerprint, its default is used.
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
