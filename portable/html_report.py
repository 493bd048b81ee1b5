"""``portable-report``: what became of one run, or of several beside each other, as one page of HTML.

The page holds its data and its script: it opens from a disk or a mail, and asks the network for nothing.
"""

from __future__ import annotations

import argparse
import html
import json
import sys
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from converters.commands import DONE, FAILED, REFUSED, ShowVersion, command, exit_codes
from portable.checkpointing import write_durably
from portable.config.flags import path_given
from portable.errors import RunError, UserError, one_line
from portable.history import read_events
from portable.metrics import METRICS_FILE, human_bytes, human_time, read_metrics
from portable.places import place_of, storage_errors
from portable.run_folder import CONFIG_FILE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from portable.places import Place

REPORT_FILE = "report.html"
POINTS = 2000
"""About as many points of a curve go into the page: a curve is a few hundred pixels wide."""

Point = tuple[int, "int | None", "float | None", float]
"""step, tokens, hours, value."""


@dataclass(frozen=True)
class Metric:
    """A chart of the page.

    Attributes:
        title: of the chart.
        series: the keys of ``metrics.jsonl`` drawn in it.
        unit: bytes, fraction, or a plain number.
        hint: what the numbers are, for the corner.
        wide: over the page's whole width.
        smooth: whether the page's smoothing applies.
        log: whether the page's logarithmic scale applies.
        zero: whether the axis begins at 0.
    """

    title: str
    series: tuple[str, ...]
    unit: str = ""
    hint: str = ""
    wide: bool = False
    smooth: bool = False
    log: bool = False
    zero: bool = False


METRICS = (
    Metric(
        "Loss",
        ("loss", "eval_loss"),
        hint="nats a token; dashed: evaluation",
        wide=True,
        smooth=True,
        log=True,
    ),
    Metric("Learning rate", ("learning_rate",), zero=True),
    Metric("Gradient norm", ("grad_norm",), hint="before clipping", smooth=True, zero=True),
    Metric("Throughput", ("tokens_per_second",), hint="tokens a second, all ranks", smooth=True, zero=True),
    Metric("Memory", ("memory",), unit="bytes", hint="of a rank", zero=True),
    Metric("MFU", ("mfu",), unit="fraction", hint="of the devices' peak FLOP/s", smooth=True, zero=True),
)
_NOT_DRAWN = {"step", "samples", "time", "samples_per_second"}


@dataclass(frozen=True)
class Run:
    """What a run's folder tells.

    Attributes:
        folder: of the run.
        rows: of ``metrics.jsonl``.
        events: of ``events.jsonl``.
        settings: by dotted key, as ``config.yaml`` has them; empty where there is none.
    """

    folder: Place
    rows: list[dict[str, Any]]
    events: list[dict[str, Any]]
    settings: dict[str, Any]

    @classmethod
    def read(cls, folder: Place) -> Run:
        """Read the run in ``folder``.

        Raises:
            UserError: if it holds none.
        """
        if not folder.is_dir():
            raise UserError(f"{folder}: is not a folder; give the output_dir of a run")
        try:
            rows = read_metrics(folder)
        except FileNotFoundError:
            raise UserError(f"{folder}: holds no {METRICS_FILE}; give the output_dir of a run") from None
        except (OSError, ValueError) as error:
            raise UserError(f"{folder / METRICS_FILE}: cannot be read ({one_line(error)})") from error
        if not rows:
            raise UserError(f"{folder / METRICS_FILE}: holds no step yet; wait until the run has logged one")
        return cls(folder, rows, read_events(folder), _settings(folder / CONFIG_FILE))

    # -- what the points of a curve lie over -------------------------------------------------------------

    def tokens(self, samples: Any) -> int | None:
        """Tokens seen after so many samples."""
        length = self.settings.get("data.seq_len")
        return samples * length if isinstance(samples, int) and isinstance(length, int) else None

    def legs(self) -> list[dict[str, Any]]:
        """The events that began a leg of the run."""
        return [event for event in self.events if event["event"] in ("start", "resume")]

    @cached_property
    def _clock(self) -> list[tuple[float, float]]:
        """Of each leg its beginning in seconds since 1970, and the seconds that the legs before it worked."""
        starts = [float(leg["time"]) for leg in self.legs()]
        known = sorted(
            row["time"] for row in (*self.rows, *self.events) if isinstance(row.get("time"), int | float)
        )
        clock, worked = [], 0.0
        for start, end in zip(starts, [*starts[1:], float("inf")], strict=True):
            clock.append((start, worked))
            within = known[: bisect_left(known, end)]
            worked += max(0.0, within[-1] - start) if within else 0.0
        return clock

    def hours(self, moment: Any) -> float | None:
        """Hours of work done at ``moment`` (seconds since 1970): the time between two legs does not count."""
        if not isinstance(moment, int | float) or not self._clock:
            return None
        leg = max(0, bisect_right(self._clock, (moment, float("inf"))) - 1)
        start, worked = self._clock[leg]
        return round((worked + max(0.0, moment - start)) / 3600, 5)

    def series(self, name: str) -> list[Point]:
        """The values of ``name``, thinned where a curve could not show them all."""
        points = [
            (row["step"], self.tokens(row.get("samples")), self.hours(row.get("time")), float(row[name]))
            for row in self.rows
            if isinstance(row.get(name), int | float)
        ]
        return thinned(points)

    # -- what the page says ------------------------------------------------------------------------------

    def described(self) -> list[dict[str, Any]]:
        """The events with what to call them, and where they lie on each axis."""
        told: list[dict[str, Any]] = []
        machine: str | None = None
        for event in self.events:
            kind, text = str(event["event"]), str(event["event"])
            if kind in ("start", "resume"):
                now = _machine(event)
                text = _in_words(event)
                if machine is not None and now != machine:
                    kind = "move"
                    text += f" (was {machine})"
                machine = now
            elif kind == "save":
                text = f"saved {event.get('checkpoint', 'a checkpoint')}"
            elif kind == "skip":
                text = f"{event.get('count')} updates left out, as they were not finite"
            elif kind == "stop":
                text = "stopped by a signal, checkpoint saved"
            elif kind == "end":
                text = "ended" if event.get("complete") else "stopped where train.stop_after says"
            moment = event.get("time")
            when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(moment)) if moment else ""
            at = [event["step"], self.tokens(event.get("samples")), self.hours(moment)]
            told.append({"kind": kind, "step": event["step"], "when": when, "text": text, "at": at})
        return told

    def facts(self) -> dict[str, str]:
        """The run in a few numbers."""
        last = self.rows[-1]
        losses = [row["loss"] for row in self.rows if isinstance(row.get("loss"), int | float)]
        evaluations = [row["eval_loss"] for row in self.rows if isinstance(row.get("eval_loss"), int | float)]
        rates = sorted(row["tokens_per_second"] for row in self.rows if row.get("tokens_per_second"))
        memory = [row["memory"] for row in self.rows if row.get("memory")]
        legs = self.legs()
        facts = {"folder": str(self.folder), "step": f"{last['step']:,}"}
        if self.settings.get("train.steps"):
            facts["step"] += f" of {self.settings['train.steps']:,}"
        if legs and legs[-1].get("parameters"):
            facts["model"] = f"{legs[-1].get('model', '')}, {legs[-1]['parameters']:,} parameters"
        if losses:
            facts["training loss"] = f"{losses[-1]:.4f} (began at {losses[0]:.4f})"
        if evaluations:
            facts["evaluation loss"] = f"{evaluations[-1]:.4f} (best {min(evaluations):.4f})"
        if (tokens := self.tokens(last.get("samples"))) is not None:
            facts["tokens"] = f"{tokens:,}"
        if rates:
            facts["tokens/s"] = f"{rates[len(rates) // 2]:,.0f} (median)"
        if memory:
            facts["memory of a rank"] = human_bytes(max(memory))
        if (hours := self.hours(last.get("time"))) is not None:
            facts["time"] = human_time(hours * 3600)
        if legs:
            machines = Counter(_machine(leg) for leg in legs)
            facts["ran on"] = "; ".join(
                name + (f" ({times} times)" if times > 1 else "") for name, times in machines.items()
            )
        return facts


def page(runs: Sequence[Run]) -> str:
    """The whole page."""
    names = _short_names([run.folder for run in runs])
    all_rows = [row for run in runs for row in run.rows]
    keys = list(dict.fromkeys(key for row in all_rows for key in row))
    known = {name for metric in METRICS for name in metric.series}
    others = tuple(
        Metric(key.replace("_", " ").capitalize(), (key,), zero=True)
        for key in keys
        if key not in known | _NOT_DRAWN
    )
    drawn = [
        metric
        for metric in METRICS + others
        if any(isinstance(row.get(name), int | float) for row in all_rows for name in metric.series)
    ]
    series = [{name: run.series(name) for metric in drawn for name in metric.series} for run in runs]
    points = [point for one in series for curve in one.values() for point in curve]
    facts = [run.facts() for run in runs]
    settings = list(dict.fromkeys(key for run in runs for key in run.settings))
    title = " · ".join(names)
    data = {
        "title": title,
        "metrics": [vars(metric) for metric in drawn],
        "names": {name: name.replace("eval_", "evaluation ").replace("_", " ") for name in keys},
        "axes": ["step"]
        + (["tokens"] if all(point[1] is not None for point in points) else [])
        + (["hours"] if all(point[2] is not None for point in points) else []),
        "facts": list(dict.fromkeys(name for each in facts for name in each)),
        "runs": [
            {"name": name, "series": curves, "events": run.described(), "facts": fact}
            for name, curves, run, fact in zip(names, series, runs, facts, strict=True)
        ],
        "settings": [[key, *(_plain(run.settings.get(key)) for run in runs)] for key in settings],
    }
    # Inside a script element only "</" and "<!" could end the data; JSON may write "<" as an escape.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    template = Path(__file__).with_name("html_report.html").read_text("utf-8")
    before, rest = template.replace("__TITLE__", html.escape(title), 1).split("__DATA__", 1)
    return before + text + rest


def write_report(folders: Sequence[Place], out: Path) -> None:
    """Write the page on the runs in ``folders``; it replaces ``out`` as a whole.

    Raises:
        UserError: if one of them holds no run, or ``out`` cannot be written.
    """
    text = page([Run.read(folder) for folder in folders])
    try:
        write_durably(out, text)
    except OSError as error:
        raise UserError(f"--out: {out} cannot be written ({error.strerror}); give another path") from error


def thinned(points: list[Point]) -> list[Point]:
    """About ``POINTS`` of ``points``: the lowest and highest of each stretch, so that no spike is lost."""
    if len(points) <= POINTS:
        return points
    size = -(-2 * len(points) // POINTS)
    kept = []
    for start in range(0, len(points), size):
        stretch = range(start, min(start + size, len(points)))
        extremes = {min(stretch, key=lambda i: points[i][3]), max(stretch, key=lambda i: points[i][3])}
        kept += [points[i] for i in sorted(extremes | ({len(points) - 1} & set(stretch)))]
    return kept


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run ``portable-report``; the exit code is as :data:`converters.commands.EXIT_CODES` has it."""
    parser = argparse.ArgumentParser(
        prog="portable-report",
        description="Write one self-contained HTML page on a run, or on several beside each other: loss, "
        "learning rate, gradient norm, throughput, memory, MFU, events, settings.",
        epilog=exit_codes(DONE, FAILED, REFUSED),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=ShowVersion, help="print the version and stop")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="output_dir of a run, or its URL")
    parser.add_argument(
        "--out",
        metavar="FILE",
        help=f"the page (default: {REPORT_FILE} in the run's folder; of several runs, or of one in an object "
        "store, in the current folder)",
    )
    arguments = parser.parse_args(argv)
    try:
        folders = [place_of("RUN", run) for run in arguments.runs]
        beside = folders[0] if len(folders) == 1 and isinstance(folders[0], Path) else Path()
        out = Path(path_given("--out", arguments.out)) if arguments.out else beside / REPORT_FILE
        with storage_errors("RUN"):
            write_report(folders, out)
    except (UserError, RunError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return REFUSED if isinstance(error, UserError) else FAILED
    print(out)
    return DONE


def _settings(path: Place) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return dict(_flat("", tree)) if isinstance(tree, dict) else {}


def _flat(prefix: str, tree: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}", value


def _plain(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value, default=str)


def _machine(leg: dict[str, Any]) -> str:
    ranks = leg.get("world_size")
    told = f"{leg.get('backend')}, {leg.get('strategy')}, {ranks} rank{'' if ranks == 1 else 's'}"
    devices = leg.get("devices_per_rank")
    return told if devices in (None, 1) else f"{told} of {devices} devices"


def _in_words(leg: dict[str, Any]) -> str:
    text = f"{'started' if leg['event'] == 'start' else 'resumed'} on {_machine(leg)}"
    for name in ("device", "precision"):
        if leg.get(name) not in (None, leg.get("backend")):
            text += f", {leg[name]}"
    return text + (f", from {leg['source']}" if leg.get("source") else "")


def _short_names(folders: Sequence[Place]) -> list[str]:
    """The folders' own names, or the whole paths where two are called the same."""
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    return [f"{name} ({i + 1})" if names.count(name) > 1 else name for i, name in enumerate(names)]


if __name__ == "__main__":
    sys.exit(main())
