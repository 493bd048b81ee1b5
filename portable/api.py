"""Training from Python: a script or a notebook in place of a command line."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portable import plugins
from portable.checkpoint.store import checkpoints_of
from portable.data.sources.user_records import written_records
from portable.errors import RunError
from portable.paths import REPORT_FILE, default_cache_dir, place_of
from portable.reporting.metrics import read_metrics

if TYPE_CHECKING:
    from converters.storage.path_or_url import Place
    from portable.config import RunConfig


@dataclass(frozen=True)
class Result:
    """The result of :func:`train`. A notebook shows its report.

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

    def _repr_html_(self) -> str | None:
        """The run's report, for a notebook, in a frame whose styles and script are its own."""
        path = self.folder / REPORT_FILE
        if not path.exists():
            return None
        page = html.escape(path.read_bytes().decode())
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 40em; border: 0"></iframe>'


def with_objects(
    config: RunConfig,
    *,
    loss: Any = None,
    metrics: Sequence[Any] = (),
    callbacks: Sequence[Any] = (),
    data: Any = None,
    model: Any = None,
    schedule: Any = None,
    optimizer: Any = None,
) -> RunConfig:
    """``config`` with names in place of objects, and the source text that ranks need to make them.

    Raises:
        UserError: for an object that ranks could not make.
    """
    sources: dict[str, str] = {}
    values: dict[str, Any] = {}
    for name, key, one in (
        ("loss", "train.loss", loss),
        ("data", "data.source", data),
        ("model", "model.function", model),
        ("schedule", "train.schedule", schedule),
        ("optimizer", "train.optimizer", optimizer),
    ):
        if name == "data" and isinstance(one, Sequence) and not isinstance(one, str):
            folder = config.data.cache_dir
            cache = default_cache_dir() if folder is None else Path(folder)
            values[key] = str(written_records(one, cache / "records"))
        elif one is not None:
            values[key] = plugins.name_of(name, one, sources, make=name != "optimizer")
    for key, given in (("metrics", metrics), ("callbacks", callbacks)):
        if given:
            names = tuple(plugins.name_of(key, one, sources) for one in given)
            values[f"train.{key}"] = (*(config.get(f"train.{key}") or ()), *names)
    if not values:
        return config
    return config.with_document(plugins.SOURCES, sources).replaced(values)


def train(
    config: RunConfig,
    *,
    nproc: int | None = None,
    loss: Any = None,
    metrics: Sequence[Any] = (),
    callbacks: Sequence[Any] = (),
    data: Any = None,
    model: Any = None,
    schedule: Any = None,
    optimizer: Any = None,
) -> Result:
    """Train ``config``, or resume its run, as ``portable-train`` does.

    Objects stand for the settings of the same name. They are functions or classes, partials of these with
    arguments of plain values, or objects of dataclasses with such fields. Ranks that are started make their
    own: by import, or, for what this script or notebook defines, from its source text with all that it uses.
    A single rank is this process, and uses the objects themselves.

    Args:
        config: from :func:`portable.load_config`.
        nproc: processes to start; by default one a GPU, and on CPU this one alone. XLA runs in this process.
        loss: in place of ``train.loss``.
        metrics: besides ``train.metrics``.
        callbacks: besides ``train.callbacks``.
        data: in place of ``data.source``: a function or class that gives records, or a list of records.
        model: in place of ``model.function``.
        schedule: in place of ``train.schedule``: what to multiply the rate by, of step and total steps.
        optimizer: in place of ``train.optimizer``: a class of optimizers, a partial of one, or a function
            that makes one.

    Raises:
        UserError: for refused input; nothing was done.
        RunError: if the run failed.
    """
    from portable.cli import run

    config = with_objects(
        config,
        loss=loss,
        metrics=metrics,
        callbacks=callbacks,
        data=data,
        model=model,
        schedule=schedule,
        optimizer=optimizer,
    )
    from portable.command_line import Invocation
    from portable.run.train import EXIT_DONE, EXIT_STOPPED

    code = run(Invocation(config, nproc=nproc))
    if code not in (EXIT_DONE, EXIT_STOPPED):
        raise RunError(f"{config.output_dir}: the run ended with exit code {code}")
    return Result(place_of("output_dir", config.output_dir), stopped=code == EXIT_STOPPED)
