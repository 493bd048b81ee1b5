"""Trackers: where metrics go besides ``metrics.jsonl``."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from typing import TYPE_CHECKING, Any, Protocol

from portable.durable import own_path
from portable.errors import UserError
from portable.reporting.events import read_events

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from portable.config.sections import LogConfig


class Tracker(Protocol):
    """A destination of metrics besides ``metrics.jsonl``."""

    def log(self, values: Mapping[str, float], step: int) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class _TensorBoard:
    def __init__(self, folder: Path, *, from_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        inside = own_path(folder, "tensorboard", "events").parent
        self._writer = SummaryWriter(str(inside), purge_step=from_step + 1)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _WandbLike:
    """wandb, and libraries with the same functions (trackio, swanlab): one run for all launches."""

    def __init__(self, library: str, folder: Path, log: LogConfig, config: dict[str, Any]) -> None:
        self._module: Any = importlib.import_module(library)
        project = log.project or os.environ.get(f"{library.upper()}_PROJECT") or folder.parent.name
        known = {} if library == "trackio" else {"id": _lasting_id(folder)}  # trackio knows runs by name
        self._module.init(
            project=project or "portable",
            name=log.name or folder.name,
            config=config,
            resume="allow",
            **known,
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._module.log(dict(values), step=step)

    def flush(self) -> None:
        """A no-op: they send in the background."""

    def close(self) -> None:
        self._module.finish()


def open_trackers(log: LogConfig, folder: Path, config: dict[str, Any], *, from_step: int) -> list[Tracker]:
    """The trackers that ``log.trackers`` names.

    Args:
        log: the settings.
        folder: of the run, whose start is recorded.
        config: what the trackers show as the run's settings.
        from_step: the step that the launch goes on from.
    """
    return [
        _TensorBoard(folder, from_step=from_step)
        if tracker == "tensorboard"
        else _WandbLike(tracker, folder, log, config)
        for tracker in log.trackers
    ]


def _lasting_id(folder: Path) -> str:
    """The same in every launch of a run: its folder's name, and when it first started."""
    began = next((event["time"] for event in read_events(folder)), 0)
    return f"{re.sub('[^A-Za-z0-9_-]', '-', folder.name)[:40]}-{int(began * 1000):x}"


def check_trackers(names: Sequence[str]) -> None:
    """Raise UserError if the package of a tracker is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UserError(f"log.trackers: {name} is not installed; run: pip install {name}")
