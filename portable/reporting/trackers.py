"""Open experiment trackers, which receive the same metrics as ``metrics.jsonl``.

A tracker is one of Accelerate's classes, or a custom class with the same methods.
"""

from __future__ import annotations

import importlib.util
import os
import re
from typing import TYPE_CHECKING, Any, Protocol

from portable import plugins
from portable.errors import UserError
from portable.paths import prepare_path_inside
from portable.private.accelerate_internals import get_tracker_classes
from portable.reporting.metrics import read_events

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from portable.config.sections import LogConfig

TRACKERS_KEY = "log.trackers"
_TRACKER_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "tensorboard": ("purge_step",),
    "wandb": ("name", "id", "resume"),
    "swanlab": ("name", "id", "resume"),
    "trackio": ("name", "resume"),
    "mlflow": ("run_name",),
    "comet_ml": ("experiment_key",),
    "clearml": ("task_name",),
}
"""Constructor arguments that identify the run, for each tracker of Accelerate.

If the library of a tracker supports it, all launches of a run then appear as one run.
"""


class Tracker(Protocol):
    """Interface of an experiment tracker that has been opened.

    It has the methods of ``accelerate.tracking.GeneralTracker`` that a run calls after
    :func:`open_trackers`. The methods ``start`` and ``store_init_configuration`` are not included,
    because only :func:`open_trackers` calls them.
    """

    name: str

    def log(self, values: dict[str, float], step: int) -> None:
        """Log the metrics of a step."""

    def finish(self) -> None:
        """Send all pending values, and close the tracker."""


def open_trackers(log: LogConfig, folder: Path, config: dict[str, Any], *, from_step: int) -> list[Tracker]:
    """Open the trackers that ``log.trackers`` lists.

    Call this function only on rank 0.

    Args:
        log: Settings of the section ``log``.
        folder: Output folder of the run. The start of the run must be recorded in its ``events.jsonl``.
        config: Settings of the run, which the trackers show.
        from_step: Step that the launch continues from.

    Returns:
        The trackers, in the order of the setting.

    Raises:
        UserError: If a tracker cannot be opened.
    """
    lasting, name = _build_stable_run_id(folder), log.name or folder.name
    facts = {
        "name": name,
        "run_name": name,
        "task_name": name,
        "id": lasting,
        "experiment_key": re.sub("[^A-Za-z0-9]", "", lasting).ljust(32, "0")[-50:],
        "resume": "allow",
        "purge_step": from_step + 1,
    }
    return [_open_tracker(tracker, log, folder, config, facts) for tracker in log.trackers]


def _open_tracker(
    tracker_name: str, log: LogConfig, folder: Path, config: Mapping[str, Any], run_facts: Mapping[str, Any]
) -> Tracker:
    """Open one tracker, and send it the settings of the run.

    The first argument of the constructor is the name of the project: ``log.project``, or else the
    value of an environment variable such as ``WANDB_PROJECT``, or else the name of the folder that
    contains the output folder. A tracker that writes files into the output folder receives
    ``tracker_name`` instead, and the output folder as ``logging_dir``. Such a tracker does not
    receive the settings, because the folder already contains ``config.yaml``.

    Args:
        tracker_name: Name of a tracker of Accelerate, or import path of a custom class.
        log: Settings of the section ``log``.
        folder: Output folder of the run.
        config: Settings of the run.
        run_facts: Values that identify the run, such as its name and ID, keyed by constructor
            argument. Each tracker of Accelerate receives the arguments that ``_TRACKER_ARGUMENTS``
            lists for it. A custom class receives none.

    Raises:
        UserError: If the tracker cannot be loaded or opened.
    """
    classes = get_tracker_classes()
    kind: Any = (
        classes[tracker_name]
        if tracker_name in classes
        else plugins.load_plugin_factory(TRACKERS_KEY, tracker_name)
    )
    keywords = {name: run_facts[name] for name in _TRACKER_ARGUMENTS.get(tracker_name, ())}
    writes_files = getattr(getattr(kind, "func", kind), "requires_logging_directory", False)
    if writes_files:  # the settings are already in config.yaml of the same folder
        keywords["logging_dir"] = str(prepare_path_inside(folder, tracker_name, "events").parent.parent)
    project = (
        log.project or os.environ.get(f"{tracker_name.upper()}_PROJECT") or folder.parent.name or "portable"
    )
    with plugins.convert_user_errors(f"{TRACKERS_KEY}: {tracker_name}"):
        opened = kind(tracker_name if writes_files else project, **keywords)
        opened.main_process_only = False  # only rank 0 opens trackers
        opened.start()
        if not writes_files:
            plain = (bool, int, float, str)
            values = {key: value if isinstance(value, plain) else str(value) for key, value in config.items()}
            opened.store_init_configuration(values)
    instance: Tracker = opened
    return instance


def _build_stable_run_id(folder: Path) -> str:
    """Build an id that is the same in every launch of a run.

    The id consists of the folder name and the time of the run's first event.
    """
    began = next((event["time"] for event in read_events(folder)), 0)
    return f"{re.sub('[^A-Za-z0-9_-]', '-', folder.name)[:40]}-{int(began * 1000):x}"


def check_trackers_available(names: Sequence[str]) -> None:
    """Check that the package or the custom class of each tracker can be imported.

    Args:
        names: Names of trackers, as in ``log.trackers``.

    Raises:
        UserError: If a package is not installed, or a custom class cannot be loaded.
    """
    for name in names:
        if plugins.is_plugin_name(name):
            plugins.load_plugin_factory(TRACKERS_KEY, name)
        elif importlib.util.find_spec(name) is None:
            raise UserError(
                f"{TRACKERS_KEY}: {name} is not installed; run: pip install {name.replace('_', '-')}"
            )
