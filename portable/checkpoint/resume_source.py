"""Find the checkpoints of a run and the one to resume from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from portable.checkpoint.store import Checkpoints
from portable.errors import UserError
from portable.paths import exists, place_of, storage_errors

if TYPE_CHECKING:
    from portable.config import RunConfig
    from portable.paths import Place


def resume_source(config: RunConfig, checkpoints: Checkpoints[Any]) -> Place | None:
    """Return the checkpoint to resume from, or None to start at step 0.

    Raises:
        UserError: if ``checkpoint.resume`` is ``never`` and there are checkpoints, or if its path cannot be
            resumed.
    """
    with storage_errors("output_dir"):
        latest: Place | None = checkpoints.latest()
    resume = config.checkpoint.resume
    if resume == "auto":
        return latest
    if resume == "never":
        if latest is not None:
            raise UserError(
                f"checkpoint.resume: never, but {checkpoints.path} has checkpoints; "
                "set it to auto to resume, or choose another output_dir"
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
            "choose another output_dir to resume from the older one"
        )
    return latest  # the run started from `path`, which may be gone, and has newer checkpoints since


def checkpoints_of(run: Place) -> Checkpoints[Any]:
    """The checkpoints of a run, read-only."""
    return Checkpoints(run / "checkpoints")


def checkpoint_of(path: Place) -> Place:
    """Return the newest checkpoint if ``path`` is a run's folder, else ``path`` itself."""
    newest: Place | None = checkpoints_of(path).latest()
    return path if newest is None else newest
