"""Render the HTML report of one or several runs. Implements the command ``portable-report``.

The page contains all data and scripts. It makes no network requests, so it can be opened from a
disk or an email.
"""

from __future__ import annotations

import argparse
import html
import json
import re
import sys
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from portable.config.flags import expand_path
from portable.config.yaml_text import parse_yaml
from portable.converters.commands import (
    DONE,
    FAILED,
    REFUSED,
    CommandParser,
    ShowVersion,
    exit_without_traceback,
    format_exit_codes,
)
from portable.converters.console import print_error, print_line
from portable.converters.containers.pickle_reader import to_json_value
from portable.converters.errors import redact_credentials, to_printable
from portable.converters.storage.path_or_url import is_in_store, resolve_links
from portable.converters.storage.safe_open import LinkError, read_small_file
from portable.errors import RunError, UserError, to_one_line
from portable.formatting import format_bytes, format_count, format_time
from portable.output.existing_run import DATA_SAMPLES_FILE
from portable.paths import (
    CONFIG_FILE,
    REPORT_FILE,
    convert_storage_errors,
    parse_place_setting,
    write_durably,
)
from portable.reporting.json_lines import MAX_SAFE_INTEGER, LogRows, is_number, is_valid_count, read_log_rows
from portable.reporting.metrics import EVENTS_FILE, METRICS_FILE, is_evaluation_metric
from portable.reporting.run_log import LOG_FILE

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

    from portable.converters.storage.path_or_url import AnyPath

_Point = TypeVar("_Point", bound=tuple[Any, ...])
TARGET_NUM_POINTS = 2000
"""Approximate number of points of a curve. A curve is a few hundred pixels wide."""


class CurvePoint(NamedTuple):
    """Logged value and its position on each x axis.

    Attributes:
        step: Training step.
        num_tokens: Number of tokens seen so far. None if unknown.
        hours: Hours of training so far. None if unknown.
        value: Logged value.
    """

    step: int
    num_tokens: int | None
    hours: float | None
    value: float


class _LaunchStart(NamedTuple):
    """Start time of a launch, and the total duration of the previous launches.

    Attributes:
        time: Start time in seconds since 1970.
        worked_seconds: Total duration of all previous launches of the run in seconds.
    """

    time: float
    worked_seconds: float


class _RunSettings(NamedTuple):
    """Settings of a run, or the reason why they cannot be read.

    Attributes:
        values: Values of the settings, keyed by dotted key.
        error: Reason why ``config.yaml`` cannot be read. Empty if the file was read or does not exist.
    """

    values: dict[str, Any]
    error: str


@dataclass(frozen=True)
class Chart:
    """Chart on the report page.

    Attributes:
        title: Title of the chart.
        series: Metrics of ``metrics.jsonl`` to draw as curves.
        unit: Unit of the values: ``"bytes"``, ``"fraction"``, or ``""`` for plain numbers.
        hint: Description of the values, shown in a corner of the chart.
        wide: Whether the chart has the full width of the page.
        smooth: Whether the smoothing that the reader selects applies to the chart.
        log: Whether the logarithmic scale that the reader selects applies to the chart.
        zero: Whether the y axis begins at 0.
    """

    title: str
    series: tuple[str, ...]
    unit: str = ""
    hint: str = ""
    wide: bool = False
    smooth: bool = False
    log: bool = False
    zero: bool = False


CHARTS = (
    Chart(
        "Loss",
        ("loss", "eval_loss"),
        hint="nats per token; dashed: evaluation",
        wide=True,
        smooth=True,
        log=True,
    ),
    Chart("Learning rate", ("learning_rate",), zero=True),
    Chart("Gradient norm", ("grad_norm",), hint="before clipping", smooth=True, zero=True),
    Chart("Throughput", ("tokens_per_second",), hint="tokens per second, all ranks", smooth=True, zero=True),
    Chart("Memory", ("memory",), unit="bytes", hint="per rank", zero=True),
    Chart("MFU", ("mfu",), unit="fraction", hint="of the devices' peak FLOP/s", smooth=True, zero=True),
    Chart("Data wait", ("data_wait",), unit="fraction", hint="share of the step time", zero=True),
)
_HINTS = {
    "skipped_steps": "non-finite updates so far",
    "graphs_compiled": "in this launch so far",
    "transfers_from_device": "in this launch so far",
}
# Limits for files, because they are untrusted. The files that a run writes are far below the limits.
_MAX_MATRICES = 8
_MAX_CHARTS, _MAX_NAME_LENGTH, _MAX_PATH_LENGTH, _MAX_TEXT_LENGTH = 60, 100, 500, 10_000
_RELOAD_SECONDS = 30
_MAX_LOG_BYTES = 16 << 20
_THUMBNAIL_URL = re.compile(r"data:image/jpeg;base64,[A-Za-z0-9+/=]{1,40000}")  # an image of 96 x 96 pixels
_MAX_CONFIG_BYTES, _MAX_SETTINGS = 512 << 10, 20_000
_METRICS_WITHOUT_CHART = {"step", "samples", "time", "samples_per_second"}


@dataclass(frozen=True)
class ReportedRun:
    """Contents of a run's output folder, prepared for the report.

    Attributes:
        folder: Output folder or URL of the run.
        rows: Rows of ``metrics.jsonl``.
        events: Rows of ``events.jsonl``.
        settings: Settings in ``config.yaml``, keyed by dotted key. Empty if the file does not exist
            or cannot be read.
        unreadable_parts: Description of invalid lines in the two logs and of an unreadable
            ``config.yaml``. Empty if there are none.
    """

    folder: AnyPath
    rows: list[dict[str, Any]]
    events: list[dict[str, Any]]
    settings: dict[str, Any]
    unreadable_parts: str = ""
    preview: dict[str, Any] | None = None
    """Statistics, lengths and samples of the training data. None if the run has not written a preview."""
    log: str = ""
    """Last lines of ``log.txt``."""

    @classmethod
    def read(cls, folder: AnyPath) -> ReportedRun:
        """Read the files of a run.

        Args:
            folder: Output folder or URL of the run.

        Returns:
            The contents. Parts that cannot be read are empty, and invalid lines of logs are
            skipped. ``unreadable_parts`` lists the number of invalid lines and an unreadable
            ``config.yaml``, but no other unreadable file.

        Raises:
            UserError: If the folder does not contain a run with a logged step, or if
                ``metrics.jsonl`` cannot be read or is a link to a file outside of the folder.
        """
        try:
            if not folder.is_dir():
                raise UserError(f"{folder}: is not a folder; specify the output_dir of a run")
        except (OSError, ValueError) as error:  # for example, the name is too long
            raise UserError(f"{folder}: {to_one_line(error)}; specify the output_dir of a run") from error
        try:
            rows, bad_rows = read_log_rows(folder / METRICS_FILE)
            events, bad_events = _read_events(folder)
            settings, bad_settings = _read_settings(folder / CONFIG_FILE)
            preview = read_data_preview(folder / DATA_SAMPLES_FILE)
            log = _read_log_end(folder / LOG_FILE)
        except FileNotFoundError:
            raise UserError(f"{folder}: has no {METRICS_FILE}; specify the output_dir of a run") from None
        except OSError as error:
            reason = to_one_line(error.strerror or error)
            raise UserError(f"{folder / METRICS_FILE}: cannot be read ({reason}); check the file") from error
        except LinkError as error:
            raise UserError(to_one_line(error)) from error
        if not rows:
            raise UserError(
                f"{folder / METRICS_FILE}: no step has been logged yet; wait for the first logged step"
            )
        unreadable = [
            f"{format_count(number, 'line')} of {name}"
            for number, name in ((bad_rows, METRICS_FILE), (bad_events, EVENTS_FILE))
            if number
        ] + ([f"{CONFIG_FILE} ({bad_settings})"] if bad_settings else [])
        return cls(folder, rows, events, settings, ", ".join(unreadable), preview, log)

    # -- x axes ---------------------------------------------------------------------------------------------

    def compute_token_count(self, samples: Any) -> int | None:
        """Convert a number of samples to a number of tokens.

        Args:
            samples: Value of ``samples`` in a row of ``metrics.jsonl`` or ``events.jsonl``. It may
                be None or invalid.

        Returns:
            The number of samples times ``data.seq_len``, so padding is included. None if one of the
            factors is missing or invalid. Also None if the product is at least 2**53, because
            JavaScript cannot represent all larger integers exactly.
        """
        length = self.settings.get("data.seq_len")
        return (
            samples * length
            if is_valid_count(samples) and is_valid_count(length) and samples * length < MAX_SAFE_INTEGER
            else None
        )

    def list_launch_events(self) -> list[dict[str, Any]]:
        """Return the events that record the start of a launch, in the order of the file.

        These are the ``start`` and ``resume`` events.
        """
        return [event for event in self.events if event["event"] in ("start", "resume")]

    @cached_property
    def _launch_starts(self) -> list[_LaunchStart]:
        """Start of each launch of the run, in chronological order.

        A run has several launches if it was resumed from a checkpoint, or started again without
        one. A launch lasts until the last row or event before the next launch starts. Launches
        without a valid start time are omitted.
        """
        starts = sorted(float(launch["time"]) for launch in self.list_launch_events() if "time" in launch)
        times = sorted(row["time"] for row in (*self.rows, *self.events) if "time" in row)
        launch_starts: list[_LaunchStart] = []
        worked = 0.0
        for start, end in zip(starts, [*starts, float("inf")][1:], strict=True):
            launch_starts.append(_LaunchStart(start, worked))
            within = times[: bisect_left(times, end)]
            worked += max(0.0, within[-1] - start) if within else 0.0
        return launch_starts

    def compute_worked_hours(self, unix_time: Any) -> float | None:
        """Compute how many hours the run had trained by a given time.

        Pauses between launches are not included.

        Args:
            unix_time: Time in seconds since 1970, which may be None or invalid.

        Returns:
            The hours, at least 0. None if ``unix_time`` is not a number, or if no launch has a
            valid start time.
        """
        if not is_number(unix_time) or not self._launch_starts:
            return None
        launch = max(0, bisect_right(self._launch_starts, (unix_time, float("inf"))) - 1)
        start, worked = self._launch_starts[launch]
        return round((worked + max(0.0, float(unix_time) - start)) / 3600, 5)

    def build_series(self, name: str) -> list[CurvePoint]:
        """Build the points of a curve, downsampled by :func:`downsample_points`.

        Rows without a number for the metric are skipped.

        Args:
            name: Name of the metric.
        """
        points = [
            CurvePoint(
                row["step"],
                self.compute_token_count(row.get("samples")),
                self.compute_worked_hours(row.get("time")),
                float(row[name]),
            )
            for row in self.rows
            if is_number(row.get(name))
        ]
        return downsample_points(points)

    # -- text of the page -----------------------------------------------------------------------------------

    def describe_events(self) -> list[dict[str, Any]]:
        """Describe the events of the run, with their positions on the x axes of the charts.

        Returns:
            One JSON object per event, with the keys ``kind``, ``step``, ``when`` (time in UTC as
            text), ``text`` (description) and ``at`` (step, tokens and hours; unknown values are
            None). ``kind`` determines the mark in the charts. It is ``"change"`` for a launch with
            changed settings. For any other launch, it is ``"move"`` if the backend, the strategy,
            the number of ranks or the devices per rank differ from the previous launch. All other
            events keep their kind from the events file, such as ``"save"``.
        """
        described: list[dict[str, Any]] = []
        machine: str | None = None
        for event in self.events:
            kind, text = str(event["event"]), str(event["event"])
            if kind in ("start", "resume"):
                now = _format_devices(event)
                text = _format_launch(event)
                if machine is not None and now != machine:
                    kind = "move"
                    text += f" (was {machine})"
                machine = now
                if event.get("changes"):
                    kind = "change"
                    text += f"; changed: {event['changes']}"
            elif kind == "save":
                text = f"saved {event.get('checkpoint', 'a checkpoint')}"
            elif kind == "skip":
                text = f"{event.get('count')} non-finite updates skipped"
            elif kind == "stop":
                text = "stopped by a signal; checkpoint saved"
            elif kind == "end":
                text = "ended" if event.get("complete") else "stopped at train.stop_after"
            moment = event.get("time")
            when = "" if moment is None else time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(moment))
            axis_values = [
                event["step"],
                self.compute_token_count(event.get("samples")),
                self.compute_worked_hours(moment),
            ]
            described.append(
                {"kind": kind, "step": event["step"], "when": when, "text": text, "at": axis_values}
            )
        return described

    def collect_facts(self) -> dict[str, str]:
        """Collect the key numbers of the run, such as the last loss and the median speed.

        Returns:
            Formatted values, keyed by label. Values that the run has not recorded are omitted.
        """
        last = self.rows[-1]
        losses = self._list_numbers("loss")
        evaluated = dict.fromkeys(n for row in self.rows for n in row if n.partition("/")[0] == "eval_loss")
        rates = sorted(rate for rate in self._list_numbers("tokens_per_second") if rate)
        memory = [used for used in self._list_numbers("memory") if used]
        launches = self.list_launch_events()
        facts = {"folder": str(self.folder), "step": f"{last['step']:,}"}
        steps = self.settings.get("train.steps") or (launches[-1].get("steps") if launches else None)
        if is_valid_count(steps):
            facts["step"] += f" of {steps:,}"
        if launches and is_valid_count(launches[-1].get("parameters")):
            facts["model"] = f"{launches[-1].get('model', '')}, {launches[-1]['parameters']:,} parameters"
        if losses:
            facts["training loss"] = f"{losses[-1]:.4f} (first {losses[0]:.4f})"
        for name in list(evaluated)[:_MAX_CHARTS]:
            if evaluations := self._list_numbers(name):
                best = f"{evaluations[-1]:.4f} (best {min(evaluations):.4f})"
                facts[_format_metric_name(name).lower()[:_MAX_NAME_LENGTH]] = best
        if (tokens := self.compute_token_count(last.get("samples"))) is not None:
            facts["tokens"] = f"{tokens:,}"
        if rates:
            facts["tokens/s"] = f"{rates[len(rates) // 2]:,.0f} (median)"
        if memory:
            facts["memory of a rank"] = format_bytes(max(memory))
        if (hours := self.compute_worked_hours(last.get("time"))) is not None:
            facts["time"] = format_time(hours * 3600)
        if launches:
            machines = Counter(_format_devices(launch) for launch in launches)
            facts["ran on"] = "; ".join(
                name + (f" ({times} times)" if times > 1 else "") for name, times in machines.items()
            )
        if self.unreadable_parts:
            facts["unreadable"] = self.unreadable_parts
        return facts

    def list_confusion_matrices(self) -> list[dict[str, Any]]:
        """Return the most recent confusion matrix of each evaluation source.

        Returns:
            One JSON-compatible dict per matrix, with the keys ``name``, ``step``, ``classes`` and
            ``counts``. The list contains at most ``_MAX_MATRICES`` matrices.
        """
        last = {
            key: (row["step"], row[key]) for row in self.rows for key in row if isinstance(row[key], dict)
        }
        shown = list(last.items())[:_MAX_MATRICES]
        return [
            {"name": _format_metric_name(key)[:_MAX_NAME_LENGTH], "step": step, **matrix}
            for key, (step, matrix) in shown
        ]

    def _list_numbers(self, name: str) -> list[float]:
        return [row[name] for row in self.rows if is_number(row.get(name))]


def downsample_points(points: list[_Point]) -> list[_Point]:
    """Downsample a curve to about :data:`TARGET_NUM_POINTS` points without losing spikes.

    The curve is divided into segments of equal length. Each segment keeps its lowest and its highest
    point. The last point of the curve is always kept.

    Args:
        points: Points of the curve, as tuples whose last element is the value.

    Returns:
        The remaining points, in their original order.
    """
    if len(points) <= TARGET_NUM_POINTS:
        return points
    stretch_length = -(-2 * len(points) // TARGET_NUM_POINTS)
    extreme_points = []
    for start in range(0, len(points), stretch_length):
        stretch = range(start, min(start + stretch_length, len(points)))
        extremes = {min(stretch, key=lambda i: points[i][-1]), max(stretch, key=lambda i: points[i][-1])}
        extreme_points += [points[i] for i in sorted(extremes | ({len(points) - 1} & set(stretch)))]
    return extreme_points


def build_report_html(runs: Sequence[ReportedRun], *, reloads: bool = False) -> str:
    """Build the complete HTML page.

    The page has the charts in :data:`CHARTS` and additional charts for at most ``_MAX_CHARTS``
    other numeric metrics. The x axis can show tokens or hours if they are known for all points.

    Args:
        runs: Runs to show. Each run has at least one row.
        reloads: Whether the page reloads itself in the browser. Set during training, when the page
            is rewritten regularly.

    Returns:
        The page. Credentials in strings are replaced by ``***``.
    """
    names = _list_short_names([run.folder for run in runs])
    all_rows = [row for run in runs for row in run.rows]
    charted_names = {name for metric in CHARTS for name in metric.series}
    # Also draw the numbers that have no predefined chart, in the order of the file, up to a limit.
    numeric_names = dict.fromkeys(key for row in all_rows for key in row if is_number(row[key]))
    uncharted_names = [
        key
        for key in numeric_names
        if key not in charted_names | _METRICS_WITHOUT_CHART and len(key) <= _MAX_NAME_LENGTH
    ][:_MAX_CHARTS]
    keys = [key for key in numeric_names if key in charted_names or key in uncharted_names]
    # Draw the evaluations on all sources in one chart, and the F1 scores of all classes in another.
    charts: dict[str, tuple[str, ...]] = {}
    sources = {key.partition("/")[2] for key in numeric_names if key.startswith("eval_loss/")}
    for key in uncharted_names:
        chart = _choose_chart_name(key, sources)
        charts[chart] = (*charts.get(chart, ()), key)
    losses = charts.pop("eval_loss", ())
    other_charts = [
        Chart(
            _format_metric_name(chart),
            series,
            hint=_HINTS.get(chart, ""),
            zero=not is_evaluation_metric(chart),
        )
        for chart, series in charts.items()
    ]
    loss_names = dict.fromkeys(loss for run in runs if (loss := run.settings.get("train.loss")))
    hint = f"{', '.join(loss_names)}; dashed: evaluation" if loss_names else CHARTS[0].hint
    main_charts = [replace(CHARTS[0], series=CHARTS[0].series + losses, hint=hint), *CHARTS[1:]]
    shown_charts = [
        metric
        for metric in main_charts + other_charts
        if any(name in numeric_names for name in metric.series)
    ]
    series = [
        {name: run.build_series(name) for metric in shown_charts for name in metric.series} for run in runs
    ]
    points = [point for curves in series for curve in curves.values() for point in curve]
    facts = [run.collect_facts() for run in runs]
    settings = list(dict.fromkeys(key for run in runs for key in run.settings))
    title = " · ".join(names)
    data = {
        "title": title,
        "reloadSeconds": _RELOAD_SECONDS if reloads else 0,
        "metrics": [vars(metric) for metric in shown_charts],
        "names": {name: _format_metric_name(name).lower() for name in keys},
        "axes": ["step"]
        + (["tokens"] if all(point.num_tokens is not None for point in points) else [])
        + (["hours"] if all(point.hours is not None for point in points) else []),
        "facts": list(dict.fromkeys(name for run_facts in facts for name in run_facts)),
        "runs": [
            {
                "name": name,
                "series": curves,
                "events": run.describe_events(),
                "facts": fact,
                "data": run.preview,
                "log": run.log,
                "confusions": run.list_confusion_matrices(),
            }
            for name, curves, run, fact in zip(names, series, runs, facts, strict=True)
        ],
        "settings": [
            [key, *(_format_setting_value(run.settings.get(key)) for run in runs)] for key in settings
        ],
    }
    # Escape "<", because "</" and "<!" could end the script element that contains the data.
    text = json.dumps(_redact_nested(data), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    template = Path(__file__).with_name("report_template.html").read_text("utf-8")
    # Split the template before inserting values, because the name of a folder may equal a placeholder.
    head, rest = template.split("__TITLE__", 1)
    middle, tail = rest.split("__DATA__", 1)
    shown = html.escape(_redact_nested(title)).encode("utf-8", "replace").decode("utf-8")
    return head + shown + middle + text + tail


def _redact_nested(value: Any) -> Any:
    """Return a copy of nested lists and dicts with the credentials in strings redacted.

    Keys of dicts and the contents of tuples are not redacted.
    """
    if isinstance(value, dict):
        return {key: _redact_nested(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_redact_nested(inner) for inner in value]
    return redact_credentials(value) if isinstance(value, str) else value


def _choose_chart_name(name: str, source_names: Container[str]) -> str:
    """Return the name of the chart to draw a metric in.

    Most metrics have their own chart. Evaluations on several sources share a chart, and so do the F1
    scores of all classes.

    Args:
        name: Name of the metric.
        source_names: Names of the evaluation sources.
    """
    value, _, source = name.rpartition("/")
    chart = value if is_evaluation_metric(name) and source in source_names else name
    return "eval_f1 of each class" if chart.startswith("eval_f1.") else chart


def _format_metric_name(name: str) -> str:
    """Format the name of a metric for display, such as "Evaluation loss, news" for ``eval_loss/news``."""
    value, _, source = name.partition("/") if is_evaluation_metric(name) else (name, "", "")
    words = value.replace("eval_", "evaluation ").replace("_", " ").capitalize()
    return f"{words}, {source}" if source else words


def write_report(folders: Sequence[AnyPath], page_path: Path, *, reloads: bool = False) -> list[str]:
    """Write the HTML page for one or several runs. An existing page is replaced atomically.

    Args:
        folders: Output folders or URLs of the runs.
        page_path: Path of the page.
        reloads: Whether the page reloads itself in the browser. Set during training, when the page
            is rewritten regularly.

    Returns:
        A warning for each run with unreadable parts.

    Raises:
        UserError: If a folder does not contain a run with a logged step, or the page cannot be
            written.
    """
    runs = [ReportedRun.read(folder) for folder in folders]
    text = build_report_html(runs, reloads=reloads)
    try:
        write_durably(page_path, text)
    except OSError as error:
        raise UserError(
            f"--out: {page_path} cannot be written ({error.strerror}); use another path"
        ) from error
    return [
        f"{run.folder}: the report lacks parts that are unreadable: {run.unreadable_parts}"
        for run in runs
        if run.unreadable_parts
    ]


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser of ``portable-report``."""
    parser = CommandParser(
        prog="portable-report",
        description="Write one self-contained HTML page about one run or about several runs:\n"
        "loss, learning rate, gradient norm, throughput, memory, MFU, events, settings.",
        epilog=format_exit_codes(DONE, FAILED, REFUSED),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=ShowVersion, help="print the version and exit")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="output_dir of a run: a folder or URL")
    parser.add_argument(
        "--out",
        metavar="FILE",
        help=f"path of the page (default: {REPORT_FILE} in the run's folder, or in the current folder for "
        "several runs or a URL)",
    )
    return parser


@exit_without_traceback
def main(argv: Sequence[str] | None = None) -> int:
    """Run ``portable-report``.

    Args:
        argv: Command-line arguments. If None, the arguments of the process.

    Returns:
        The exit code. See :data:`portable.converters.commands.EXIT_CODES`.
    """
    arguments = build_parser().parse_args(argv)
    try:
        folders = [parse_place_setting("RUN", run) for run in arguments.runs]
        default_folder = next(
            (folder for folder in folders if len(folders) == 1 and not is_in_store(folder)), Path()
        )
        out = Path(expand_path("--out", arguments.out)) if arguments.out else default_folder / REPORT_FILE
        with convert_storage_errors("RUN"):
            warnings = write_report(folders, out)
        for line in warnings:
            print_error(f"warning: {to_printable(line)}")
        print_line(to_printable(out))
    except (UserError, RunError) as error:
        print_error(f"error: {to_printable(error)}")
        return REFUSED if isinstance(error, UserError) else FAILED
    return DONE


def _read_events(folder: AnyPath) -> LogRows:
    """Read the events of a run. Return no events if the file does not exist or cannot be read.

    Raises:
        CheckpointError: If a request to the object store fails.
    """
    try:
        return read_log_rows(folder / EVENTS_FILE, "event")
    except (OSError, LinkError):
        return LogRows([], 0)


def _read_log_end(path: AnyPath) -> str:
    """Read the end of a text log, at most ``_MAX_TEXT_LENGTH`` characters.

    Returns:
        The last complete lines. Empty if the file does not exist, cannot be read, or is larger than
        ``_MAX_LOG_BYTES``. A log that is written by a run is far smaller.

    Raises:
        CheckpointError: If a request to the object store fails.
    """
    try:
        text = read_small_file(path, max_bytes=_MAX_LOG_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError, LinkError):
        return ""
    return text[-_MAX_TEXT_LENGTH:].partition("\n")[2] if len(text) > _MAX_TEXT_LENGTH else text


def read_data_preview(path: AnyPath) -> dict[str, Any] | None:
    """Read the preview of the training data that a run has written.

    The result has the form that the page shows.

    Args:
        path: Path or URL of the file.

    Returns:
        Dict with the keys ``facts`` (pairs of a name and a text), ``lengths`` (lower limit, upper
        limit or None, and number of documents), and ``samples`` (title and pieces, see
        :func:`_read_piece`). Long lists and texts of facts are truncated. None if the file does not
        exist or is invalid.

    Raises:
        CheckpointError: If a request to the object store fails.
    """
    try:
        preview = json.loads(read_small_file(path, max_bytes=_MAX_CONFIG_BYTES))
        facts, lengths, samples = preview["facts"], preview["lengths"], preview["samples"]
        return {
            "facts": [
                [str(name)[:_MAX_NAME_LENGTH], str(fact)[:_MAX_PATH_LENGTH]] for name, fact in facts.items()
            ][:20],
            "lengths": [
                [low, high, many]
                for low, high, many in lengths[:100]
                if is_valid_count(low) and is_valid_count(many) and (high is None or is_valid_count(high))
            ],
            "samples": [
                {
                    "title": f"sample {int(sample['position'])}: {int(sample['tokens'])} tokens, "
                    f"{int(sample['trained'])} trained",
                    "pieces": [_read_piece(*piece) for piece in sample["pieces"]],
                }
                for sample in samples[:10]
            ],
        }
    except (
        OSError,
        LinkError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
        OverflowError,
    ):
        return None


def _read_piece(text: Any, trained: Any, thumbnail: Any = "") -> list[Any]:
    """Return one piece of a sample: its text, whether it is trained on, and its thumbnail URL.

    The arguments are read from the preview file of a run, so they may have any type. A thumbnail
    that is not the data URL of a small JPEG image is replaced by an empty string.

    Args:
        text: Text of the piece. It is converted to a string.
        trained: Whether the model is trained on the piece. Any value other than True is read as
            False.
        thumbnail: Data URL of an image. Empty if the piece has no image.
    """
    is_thumbnail = isinstance(thumbnail, str) and _THUMBNAIL_URL.fullmatch(thumbnail) is not None
    return [str(text), trained is True, thumbnail if is_thumbnail else ""]


def _read_settings(path: AnyPath) -> _RunSettings:
    """Read the settings in a ``config.yaml``.

    The settings are empty if the file does not exist or cannot be read. If it exists but cannot be
    read, ``error`` contains the reason.

    Raises:
        CheckpointError: If a request to the object store fails.
    """
    try:
        text = read_small_file(path, max_bytes=_MAX_CONFIG_BYTES).decode("utf-8")
        tree = parse_yaml(text, path.name, max_nodes=_MAX_SETTINGS).value
        return _RunSettings(dict(_iter_dotted_settings("", tree)) if isinstance(tree, dict) else {}, "")
    except FileNotFoundError:
        return _RunSettings({}, "")
    except OSError as error:
        return _RunSettings({}, to_one_line(error.strerror or error))
    except LinkError:
        return _RunSettings({}, "a link to a file outside of the folder")
    except (UserError, ValueError) as error:
        is_too_deep = isinstance(error.__cause__, RecursionError)
        return _RunSettings({}, "nested too deeply" if is_too_deep else "not readable")


def _iter_dotted_settings(prefix: str, tree: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    """Yield the dotted key and the value of each nested setting. ``prefix`` is prepended to each key."""
    for key, value in tree.items():
        # Truncate long names, because each nested setting repeats the key.
        name = f"{prefix}{key}"[:_MAX_PATH_LENGTH]
        if isinstance(value, dict) and value:
            yield from _iter_dotted_settings(f"{name}.", value)
        else:
            yield name, value


def _format_setting_value(value: Any) -> str:
    """Format the value of a setting.

    The text is cut to ``_MAX_TEXT_LENGTH`` characters, without an ellipsis. Strings are returned
    without quotes, and None becomes an empty string. All other values are formatted as JSON.
    """
    if value is None or isinstance(value, str):
        return (value or "")[:_MAX_TEXT_LENGTH]
    return json.dumps(to_json_value(value), default=str)[:_MAX_TEXT_LENGTH]


def _format_devices(launch: dict[str, Any]) -> str:
    """Format the backend, the strategy, and the number of ranks of a launch.

    The number of devices per rank is added if it is not 1.

    Args:
        launch: Event that started the launch.
    """
    ranks = launch.get("world_size")
    text = f"{launch.get('backend')}, {launch.get('strategy')}, {ranks} rank{'' if ranks == 1 else 's'}"
    devices = launch.get("devices_per_rank")
    return text if devices in (None, 1) else f"{text} of {devices} devices"


def _format_launch(launch: dict[str, Any]) -> str:
    """Format a launch event as one line, such as ``resumed on cuda, fsdp, 8 ranks``."""
    text = f"{'started' if launch['event'] == 'start' else 'resumed'} on {_format_devices(launch)}"
    for name in ("device", "precision"):
        if launch.get(name) not in (None, launch.get("backend")):
            text += f", {launch[name]}"
    return text + (f", from {launch['source']}" if launch.get("source") else "")


def _list_short_names(folders: Sequence[AnyPath]) -> list[str]:
    """Return a short unique name for each run.

    This is the name of its folder. If two folders have the same name, all runs are named by their
    paths, and equal paths are numbered.
    """
    names = [resolve_links(folder).name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    return [f"{name} ({i + 1})" if names.count(name) > 1 else name for i, name in enumerate(names)]


if __name__ == "__main__":
    sys.exit(main())
