"""The existing run in an output folder."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from converters.storage.safe_open import LinkError, read_small
from portable.config import difference, load_config
from portable.config.load import MAX_BYTES
from portable.errors import UserError, one_line
from portable.paths import CONFIG_FILE, exists, storage_errors

if TYPE_CHECKING:
    from converters.storage.path_or_url import Place
    from portable.config import RunConfig

PREVIEW_FILE = "data_samples.json"
"""Samples to look at."""


@dataclass(frozen=True)
class ExistingRun:
    """The existing run in an output folder.

    Attributes:
        config: its resolved config; None if there is no run.
        digest: of the config file, for :func:`check_unchanged`.
    """

    config: RunConfig | None
    digest: str | None


def existing_run(folder: Place) -> ExistingRun:
    """Read the config of the run in ``folder``.

    Raises:
        UserError: if ``folder`` cannot be used, or its config is damaged.
    """
    try:
        with storage_errors("output_dir"):
            occupied = folder.exists() and not folder.is_dir()
    except (OSError, ValueError) as error:  # the name is too long, contains a NUL, or a parent is a file
        raise UserError(f"output_dir: {one_line(error)}; choose another folder") from error
    if occupied:
        raise UserError(f"output_dir: {folder} is a file; choose another folder")
    digest = _digest(folder / CONFIG_FILE)
    with storage_errors("output_dir"):
        return ExistingRun(None if digest is None else load_config(folder / CONFIG_FILE), digest)


def check_unchanged(folder: Place, existing: ExistingRun) -> None:
    """Raise UserError if another run started in ``folder`` after ``existing`` was read.

    Call it while holding the lock.
    """
    if _digest(folder / CONFIG_FILE) != existing.digest:
        raise UserError(
            f"output_dir: another run changed {folder / CONFIG_FILE} while this one started; run the same "
            "command again"
        )


def _digest(path: Place) -> str | None:
    with storage_errors("output_dir"):
        if not exists(path):  # also for an invalid name
            return None
        try:
            content = read_small(path, limit=MAX_BYTES + 1, head=True)
        except LinkError as error:
            raise UserError(f"output_dir: {error}") from error
        except OSError as error:
            reason = one_line(error.strerror or error)
            raise UserError(f"output_dir: {path}: {reason}; choose another folder") from error
        return hashlib.blake2b(content).hexdigest()


def check_same_run(folder: Place, existing: ExistingRun, config: RunConfig) -> None:
    """Raise UserError if the existing run differs from ``config`` in a setting that defines the run."""
    if existing.config is not None and (changed := difference(existing.config, config)):
        others = len(changed) - 1
        more = f"; {others} more {'settings differ' if others > 1 else 'setting differs'}" if others else ""
        raise UserError(
            f"output_dir: {folder} has another run ({changed[0]}{more}); "
            "choose another folder, or delete this one to start over"
        )
