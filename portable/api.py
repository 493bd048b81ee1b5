"""Training from Python: a script or a notebook in place of a command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from portable.checkpoint.resume_source import checkpoints_of
from portable.errors import RunError
from portable.paths import place_of
from portable.reporting.metrics import read_metrics

if TYPE_CHECKING:
    from portable.config import RunConfig
    from portable.paths import Place


@dataclass(frozen=True)
class Result:
    """The result of :func:`train`. A notebook shows it as the loss curve.

    Attributes:
        folder: of the run, or its URL.
        stopped: whether a signal (Ctrl-C, the notebook's stop button) ended it early. Its checkpoint is
            saved; the same call resumes from it.
    """

    folder: Place
    stopped: bool

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of ``metrics.jsonl``, for example for ``pandas.DataFrame``."""
        return read_metrics(self.folder)

    @property
    def checkpoint(self) -> Place | None:
        """The newest complete checkpoint."""
        newest: Place | None = checkpoints_of(self.folder).latest()
        return newest

    @property
    def final(self) -> Place | None:
        """The folder for ``from_pretrained``; None before the schedule is complete."""
        folder = self.folder / "final"
        return folder if folder.is_dir() else None

    def _repr_svg_(self) -> str | None:
        path = self.folder / "loss.svg"
        return path.read_text("utf-8") if path.exists() else None


def train(config: RunConfig, *, nproc: int | None = None) -> Result:
    """Train ``config``, or resume its run, as ``portable-train`` does.

    Args:
        config: from :func:`portable.load_config`.
        nproc: processes to start; by default one a GPU, and on CPU this one alone. XLA runs in this process.

    Raises:
        UserError: for refused input; nothing was done.
        RunError: if the run failed.
    """
    from portable.cli import run
    from portable.config import Invocation
    from portable.run.train import EXIT_DONE, EXIT_STOPPED

    code = run(Invocation(config, nproc=nproc))
    if code not in (EXIT_DONE, EXIT_STOPPED):
        raise RunError(f"{config.output_dir}: the run ended with exit code {code}")
    return Result(place_of("output_dir", config.output_dir), stopped=code == EXIT_STOPPED)
