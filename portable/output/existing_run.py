"""What stands in a run's output folder already: whose it is, and where it goes on from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converters.storage.object_store import RemotePath
from portable.checkpoint.store import CheckpointFolder
from portable.config import difference, load_config
from portable.errors import UserError, one_line
from portable.paths import place_of, storage_errors

if TYPE_CHECKING:
    from portable.checkpoint.store import Checkpoints
    from portable.config import RunConfig
    from portable.paths import Place

CONFIG_FILE = "config.yaml"
FINAL = "final"
"""Folder of the exported model."""


def check_same_run(folder: Place, config: RunConfig) -> None:
    """Raise UserError if ``folder`` holds a run that differs from ``config`` in what makes a run."""
    try:
        with storage_errors("output_dir"):
            occupied = folder.exists() and not folder.is_dir()
    except (OSError, ValueError) as error:  # too long a name, a part of it that is a file, a NUL
        raise UserError(f"output_dir: {one_line(error)}; choose another folder") from error
    if occupied:
        raise UserError(f"output_dir: {folder} is a file; choose another folder")
    earlier = earlier_config(folder)
    if earlier is not None and (changed := difference(earlier, config)):
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise UserError(
            f"output_dir: {folder} holds another run ({changed[0]}{more}); "
            "choose another folder, or remove this one to start over"
        )


def earlier_config(folder: Place) -> RunConfig | None:
    path = folder / CONFIG_FILE
    with storage_errors("output_dir"):
        return load_config(path) if exists(path) else None  # a name that cannot be is refused as output_dir


def resume_source(config: RunConfig, checkpoints: Checkpoints[Any]) -> Place | None:
    """The checkpoint to go on from, or None to start at step 0.

    Raises:
        UserError: if ``checkpoint.resume`` is ``never`` and there are checkpoints, or a path that cannot be
            gone on from.
    """
    with storage_errors("output_dir"):
        latest: Place | None = checkpoints.latest()
    resume = config.checkpoint.resume
    if resume == "auto":
        return latest
    if resume == "never":
        if latest is not None:
            raise UserError(
                f"checkpoint.resume: never, but {checkpoints.path} holds checkpoints; "
                "set it to auto to go on, or choose another output_dir"
            )
        return None
    path = place_of("checkpoint.resume", resume)
    with storage_errors("checkpoint.resume"):
        if latest is None and not exists(path):
            name = resume if len(resume) <= 200 else f"{resume[:197]}..."
            raise UserError(
                f"checkpoint.resume: {name} does not exist; give auto, never or a checkpoint's path"
            )
    if latest is None or path.resolve() == latest.resolve():
        return path
    if path.resolve().is_relative_to(checkpoints.path.resolve()):
        raise UserError(
            f"checkpoint.resume: {latest} is newer than {path} in the same run; "
            "choose another output_dir to go on from the older one"
        )
    return latest  # the path is where the run began, and may be gone: it has come further since


def exists(path: Place) -> bool:
    """Whether there is a ``path``; there is none of a name that cannot be."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def checkpoints_of(run: Place) -> Checkpoints[Any]:
    """The checkpoints of a run, for reading."""
    folder = run / "checkpoints"
    if isinstance(folder, RemotePath):
        # Not above: it brings torch, and portable-report, which reads this module, answers without.
        from portable.checkpoint.remote_store import RemoteCheckpoints

        return RemoteCheckpoints(folder)
    return CheckpointFolder(folder)


def checkpoint_of(path: Place) -> Place:
    """``path`` itself, or the newest checkpoint where it is a run's folder."""
    newest: Place | None = checkpoints_of(path).latest()
    return path if newest is None else newest
