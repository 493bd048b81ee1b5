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
from converters.console import complain, say
from converters.containers.pickle_reader import plain
from converters.errors import printable
from converters.storage.guarded import LinkError, read_small
from portable.checkpoint.store import write_durably
from portable.config.flags import path_given
from portable.errors import RunError, UserError, one_line
from portable.output.existing_run import CONFIG_FILE
from portable.paths import place_of, storage_errors
from portable.reporting.events import EVENTS_FILE
from portable.reporting.json_lines import MOST, count, number, read_rows
from portable.reporting.metrics import METRICS_FILE, human_bytes, human_count, human_time
from portable.reporting.svg import thinned

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from portable.paths import Place

REPORT_FILE = "report.html"
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
# What a page can bear of a file that nobody vouches for; a run's own stays far below.
_MOST_CHARTS, _MOST_NAME, _MOST_PATH, _MOST_TEXT = 60, 100, 500, 10_000
_MOST_CONFIG, _MOST_SETTINGS = 512 << 10, 20_000
_NOT_DRAWN = {"step", "samples", "time", "samples_per_second"}


@dataclass(frozen=True)
class Run:
    """What a run's folder tells.

    Attributes:
        folder: of the run.
        rows: of ``metrics.jsonl``.
        events: of ``events.jsonl``.
        settings: by dotted key, as ``config.yaml`` has them; empty where there is none.
        passed_over: what could not be read, in words; empty where everything could.
    """

    folder: Place
    rows: list[dict[str, Any]]
    events: list[dict[str, Any]]
    settings: dict[str, Any]
    passed_over: str = ""

    @classmethod
    def read(cls, folder: Place) -> Run:
        """Read the run in ``folder``.

        Raises:
            UserError: if it holds none.
        """
        try:
            if not folder.is_dir():
                raise UserError(f"{folder}: is not a folder; give the output_dir of a run")
        except (OSError, ValueError) as error:  # too long a name
            raise UserError(f"{folder}: {one_line(error)}; give the output_dir of a run") from error
        try:
            rows, bad_rows = read_rows(folder / METRICS_FILE)
            events, bad_events = _events(folder)
            settings, bad_settings = _settings(folder / CONFIG_FILE)
        except FileNotFoundError:
            raise UserError(f"{folder}: holds no {METRICS_FILE}; give the output_dir of a run") from None
        except OSError as error:
            reason = one_line(error.strerror or error)
            raise UserError(f"{folder / METRICS_FILE}: cannot be read ({reason})") from error
        except LinkError as error:
            raise UserError(one_line(error)) from error
        if not rows:
            raise UserError(f"{folder / METRICS_FILE}: holds no step yet; wait until the run has logged one")
        told = [
            f"{human_count(number, 'line')} of {name}"
            for number, name in ((bad_rows, METRICS_FILE), (bad_events, EVENTS_FILE))
            if number
        ] + ([f"{CONFIG_FILE} ({bad_settings})"] if bad_settings else [])
        return cls(folder, rows, events, settings, ", ".join(told))

    # -- what the points of a curve lie over -------------------------------------------------------------

    def tokens(self, samples: Any) -> int | None:
        """Tokens seen after so many samples."""
        length = self.settings.get("data.seq_len")
        return samples * length if count(samples) and count(length) and samples * length < MOST else None

    def legs(self) -> list[dict[str, Any]]:
        """The events that began a leg of the run."""
        return [event for event in self.events if event["event"] in ("start", "resume")]

    @cached_property
    def _clock(self) -> list[tuple[float, float]]:
        """Of each leg its beginning in seconds since 1970, and the seconds that the legs before it worked."""
        starts = sorted(float(leg["time"]) for leg in self.legs() if "time" in leg)
        known = sorted(row["time"] for row in (*self.rows, *self.events) if "time" in row)
        clock: list[tuple[float, float]] = []
        worked = 0.0
        for start, end in zip(starts, [*starts, float("inf")][1:], strict=True):
            clock.append((start, worked))
            within = known[: bisect_left(known, end)]
            worked += max(0.0, within[-1] - start) if within else 0.0
        return clock

    def hours(self, moment: Any) -> float | None:
        """Hours of work done at ``moment`` (seconds since 1970): the time between two legs does not count."""
        if not number(moment) or not self._clock:
            return None
        leg = max(0, bisect_right(self._clock, (moment, float("inf"))) - 1)
        start, worked = self._clock[leg]
        return round((worked + max(0.0, float(moment) - start)) / 3600, 5)

    def series(self, name: str) -> list[Point]:
        """The values of ``name``, thinned where a curve could not show them all."""
        points = [
            (row["step"], self.tokens(row.get("samples")), self.hours(row.get("time")), float(row[name]))
            for row in self.rows
            if number(row.get(name))
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
            when = "" if moment is None else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(moment))
            at = [event["step"], self.tokens(event.get("samples")), self.hours(moment)]
            told.append({"kind": kind, "step": event["step"], "when": when, "text": text, "at": at})
        return told

    def facts(self) -> dict[str, str]:
        """The run in a few numbers."""
        last = self.rows[-1]
        losses, evaluations = self._numbers("loss"), self._numbers("eval_loss")
        rates = sorted(rate for rate in self._numbers("tokens_per_second") if rate)
        memory = [used for used in self._numbers("memory") if used]
        legs = self.legs()
        facts = {"folder": str(self.folder), "step": f"{last['step']:,}"}
        if count(self.settings.get("train.steps")):
            facts["step"] += f" of {self.settings['train.steps']:,}"
        if legs and count(legs[-1].get("parameters")):
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
        if self.passed_over:
            facts["passed over"] = self.passed_over
        return facts

    def _numbers(self, name: str) -> list[float]:
        return [row[name] for row in self.rows if number(row.get(name))]


def page(runs: Sequence[Run]) -> str:
    """The whole page."""
    names = _short_names([run.folder for run in runs])
    all_rows = [row for run in runs for row in run.rows]
    known = {name for metric in METRICS for name in metric.series}
    # What no METRICS names is drawn too, in the order in which it comes; a page of a thousand charts is none.
    numbers = dict.fromkeys(key for row in all_rows for key in row if number(row[key]))
    more = [key for key in numbers if key not in known | _NOT_DRAWN and len(key) <= _MOST_NAME][:_MOST_CHARTS]
    keys = [key for key in numbers if key in known or key in more]
    others = tuple(Metric(key.replace("_", " ").capitalize(), (key,), zero=True) for key in more)
    drawn = [metric for metric in METRICS + others if any(name in numbers for name in metric.series)]
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
    # Cut before anything is put in: a run's folder may be called like a mark of the template.
    head, rest = template.split("__TITLE__", 1)
    middle, tail = rest.split("__DATA__", 1)
    shown = html.escape(title).encode("utf-8", "replace").decode("utf-8")
    return head + shown + middle + text + tail


def write_report(folders: Sequence[Place], out: Path) -> list[str]:
    """Write the page on the runs in ``folders``; it replaces ``out`` as a whole.

    Returns:
        A line on each run of which not everything could be read.

    Raises:
        UserError: if one of them holds no run, or ``out`` cannot be written.
    """
    runs = [Run.read(folder) for folder in folders]
    text = page(runs)
    try:
        write_durably(out, text)
    except OSError as error:
        raise UserError(f"--out: {out} cannot be written ({error.strerror}); give another path") from error
    return [f"{run.folder}: passed over: {run.passed_over}" for run in runs if run.passed_over]


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
            told = write_report(folders, out)
        for line in told:
            complain(f"warning: {printable(line)}")
        say(printable(out))
    except (UserError, RunError) as error:
        complain(f"error: {printable(error)}")
        return REFUSED if isinstance(error, UserError) else FAILED
    return DONE


def _events(folder: Place) -> tuple[list[dict[str, Any]], int]:
    """The events of a run, none where it kept no record of them, and how many lines were none."""
    try:
        return read_rows(folder / EVENTS_FILE, "event")
    except OSError:
        return [], 0


class _Loader(yaml.SafeLoader):
    """Reads what YAML can say in few words only where it comes to few values."""

    def get_single_node(self) -> Any:
        node = super().get_single_node()
        sizes: dict[int, int] = {}

        def size(node: Any) -> int:
            # Aliases are one node in many places: each place counts, and a node within itself has no end.
            if id(node) not in sizes:
                if isinstance(node, yaml.ScalarNode) and len(node.value) > _MOST_NAME:
                    # No number or date; YAML's 1:1:1:... grows with each part, and JSON shows no long one.
                    node.tag = yaml.resolver.BaseResolver.DEFAULT_SCALAR_TAG
                sizes[id(node)] = _MOST_SETTINGS
                parts = node.value if isinstance(node, yaml.CollectionNode) else ()
                flat = (part for pair in parts for part in (pair if isinstance(pair, tuple) else (pair,)))
                sizes[id(node)] = 1 + sum(map(size, flat))
            return sizes[id(node)]

        if node is not None and size(node) > _MOST_SETTINGS:
            raise yaml.YAMLError("too many values")
        return node


def _settings(path: Place) -> tuple[dict[str, Any], str]:
    """The settings of a run by dotted key, and why there are none, if it is not that there is no file."""
    try:
        tree = yaml.load(read_small(path, limit=_MOST_CONFIG), _Loader)
        return dict(_flat("", tree)) if isinstance(tree, dict) else {}, ""
    except FileNotFoundError:
        return {}, ""
    except RecursionError:
        return {}, "nested too deeply"
    except OSError as error:
        return {}, one_line(error.strerror or error)
    # What PyYAML raises for a bad `!!int`, `!!bool` or `!!timestamp` is whatever Python did.
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
        return {}, "not readable"


def _flat(prefix: str, tree: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    for key, value in tree.items():
        # Each setting below a long key would repeat it.
        name = f"{prefix}{key}"[:_MOST_PATH]
        if isinstance(value, dict) and value:
            yield from _flat(f"{name}.", value)
        else:
            yield name, value


def _plain(value: Any) -> str:
    if value is None or isinstance(value, str):
        return (value or "")[:_MOST_TEXT]
    return json.dumps(plain(value), default=str)[:_MOST_TEXT]


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
