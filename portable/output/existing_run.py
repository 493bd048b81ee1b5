"""Check the existing run in an output folder before a new launch continues or replaces it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from portable.checkpoint.store import open_checkpoints
from portable.checkpoint.trainer_state import TrainerState
from portable.config import find_changes, load_config
from portable.config.changed_settings import LENGTH_SETTINGS, is_allowed_in_new_folder, is_same_run_extended
from portable.config.yaml_text import MAX_CONFIG_BYTES
from portable.converters.storage.safe_open import LinkError, read_small_file
from portable.errors import UserError, to_one_line
from portable.paths import CONFIG_FILE, FINAL_FOLDER, convert_storage_errors, path_exists

if TYPE_CHECKING:
    from portable.config import RunConfig
    from portable.config.changed_settings import SettingChange
    from portable.converters.storage.path_or_url import AnyPath

_MAX_SHOWN_CHANGES = 3
"""Maximum number of changed settings that an error message lists."""
DATA_SAMPLES_FILE = "data_samples.json"
"""Name of the file in an output folder that contains samples of the training data, for the HTML report."""


@dataclass(frozen=True)
class ExistingRun:
    """Config that an earlier launch left in an output folder, if any.

    Attributes:
        config: Resolved config of the run in the folder. None if the folder does not contain a run.
        config_digest: Digest of the config file, for :func:`check_config_unchanged`. None if the
            file does not exist.
    """

    config: RunConfig | None
    config_digest: str | None


def read_config_of_existing_run(folder: AnyPath) -> ExistingRun:
    """Read the config of the run in an output folder.

    Args:
        folder: Output folder or URL. It does not have to exist.

    Returns:
        The run. Its config is None if the folder does not contain a run.

    Raises:
        UserError: If the folder cannot be used, for example because it is a file, or if the config
            is damaged.
        RunError: If the object store is unavailable.
    """
    try:
        with convert_storage_errors("output_dir"):
            occupied = folder.exists() and not folder.is_dir()
    except (OSError, ValueError) as error:  # the name is too long, contains a NUL, or a parent is a file
        raise UserError(f"output_dir: {to_one_line(error)}; choose another folder") from error
    if occupied:
        raise UserError(f"output_dir: {folder} is a file; choose another folder")
    digest = _compute_config_digest(folder / CONFIG_FILE)
    with convert_storage_errors("output_dir"):
        return ExistingRun(None if digest is None else load_config(folder / CONFIG_FILE), digest)


def check_config_unchanged(folder: AnyPath, existing: ExistingRun) -> None:
    """Check that no other run has started in a folder since its config was read.

    The caller must hold the lock of the folder.

    Args:
        folder: Output folder or URL.
        existing: The run that was read before the lock was taken.

    Raises:
        UserError: If the config file has changed, is a link to a file outside of the folder, or
            cannot be read.
        RunError: If the object store is unavailable.
    """
    if _compute_config_digest(folder / CONFIG_FILE) != existing.config_digest:
        raise UserError(
            f"output_dir: another run changed {folder / CONFIG_FILE} while this run was starting; run the "
            "same command again"
        )


def _compute_config_digest(path: AnyPath) -> str | None:
    """Compute the digest of a config file, or return None if the file does not exist.

    Raises:
        UserError: If the file cannot be read, or is a link to a file outside of its folder.
        RunError: If the object store is unavailable.
    """
    with convert_storage_errors("output_dir"):
        if not path_exists(path):  # an invalid name does not exist either
            return None
        try:
            content = read_small_file(path, max_bytes=MAX_CONFIG_BYTES + 1, truncate=True)
        except LinkError as error:
            raise UserError(f"output_dir: {error}") from error
        except OSError as error:
            reason = to_one_line(error.strerror or error)
            raise UserError(f"output_dir: {path}: {reason}; choose another folder") from error
        return hashlib.blake2b(content).hexdigest()


def check_may_continue_run(folder: AnyPath, existing: ExistingRun, config: RunConfig) -> None:
    """Check that the settings of a launch are compatible with the run in its output folder.

    A run may always be extended. With ``checkpoint.allow_changes``, other settings of the
    optimizer and the schedule may also change. If the existing run has written neither a
    checkpoint nor a model, any other run may replace it.

    Args:
        folder: Output folder or URL.
        existing: The run in the folder.
        config: Resolved config of the launch.

    Raises:
        UserError: If a setting has changed that must not change, or if the run is already
            past the end of the new schedule. Also if the schedule's length is given in epochs
            and ``train.global_batch_size`` has changed, or if access to the object store is denied.
        RunError: If the object store is unavailable.
    """
    if existing.config is None:
        return
    changes = find_changes(existing.config, config)
    if not changes:
        return
    with convert_storage_errors("output_dir"):
        newest = open_checkpoints(folder).find_latest()
        if newest is None and not (folder / FINAL_FOLDER).exists():
            return
    if fixed := [change for change in changes if not change.is_adjustable]:
        raise UserError(
            f"output_dir: {folder} contains another run ({_format_changes(fixed)}); choose another "
            "output_dir" + _format_branch_hint(fixed, newest)
        )
    if not (config.checkpoint.allow_changes or is_same_run_extended(existing.config, config)):
        raise UserError(
            f"output_dir: {folder} contains a run with other settings ({_format_changes(changes)}); add "
            "--allow-changes to continue the run with the new settings, or choose another output_dir"
            + _format_branch_hint(changes, newest)
        )
    if newest is not None:
        _check_schedule_reaches_step(newest, changes, config)


def _format_changes(changes: list[SettingChange]) -> str:
    """Format up to three changed settings and the number of further changes, for an error message."""
    # List changed length settings last, because they need no permission and do not cause an error.
    ordered = sorted(changes, key=lambda change: change.setting in LENGTH_SETTINGS)
    others = len(changes) - _MAX_SHOWN_CHANGES
    more = [f"{others} more {'settings differ' if others > 1 else 'setting differs'}"] if others > 0 else []
    return "; ".join([*map(str, ordered[:_MAX_SHOWN_CHANGES]), *more])


def _format_branch_hint(changes: list[SettingChange], newest: AnyPath | None) -> str:
    """Format a suggestion to start a new run from the newest checkpoint.

    The suggestion is the end of an error message.

    Args:
        changes: Settings that differ from the existing run.
        newest: Newest checkpoint of the existing run. None if it has none.

    Returns:
        The text. Empty if there is no checkpoint, or if a new run from the checkpoint would also
        reject one of the changes, such as another model.
    """
    if newest is None or not all(is_allowed_in_new_folder(change) for change in changes):
        return ""
    return f", and add --checkpoint.resume {newest} to start the new run from this checkpoint"


def _check_schedule_reaches_step(newest: AnyPath, changes: list[SettingChange], config: RunConfig) -> None:
    """Check that the new schedule does not end before the newest checkpoint.

    If the schedule's length is given in epochs, its end is not checked, because the number of steps
    is not known yet. Instead, this function checks that ``train.global_batch_size`` has not
    changed. After such a change, the epochs of the run could not be counted.

    Raises:
        UserError: If the newest checkpoint is past ``train.steps``, or if the length is given in
            epochs and ``train.global_batch_size`` has changed.
        RunError: If the object store is unavailable.
    """
    with convert_storage_errors("output_dir"):
        state = TrainerState.read(newest)
    train = config.train
    if train.epochs is None:
        assert train.steps is not None  # the schema requires one of the two
        if train.steps < state.step:
            raise UserError(
                f"train.steps: {newest} is at step {state.step}, which is after the last step, "
                f"{train.steps}; set train.steps to {state.step} to end the run at this step, or to a "
                "higher step"
            )
    elif any(change.key == "train.global_batch_size" for change in changes):
        raise UserError(
            "train.epochs: train.global_batch_size has changed, so the epochs of this run cannot be counted; "
            "set train.steps instead, which counts from the start of the run "
            f"({newest} is at step {state.step})"
        )
