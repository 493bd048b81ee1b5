"""The committed figures, and their comparison with a report."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from tests.language.changes import Changes
from tests.language.findings import Finding
from tests.language.measures import MEASURES, Figure, Report


@dataclass(frozen=True)
class Baseline:
    """Figures that may not get worse.

    Attributes:
        figures: Figures by package and by `Measure.name`.
        counts: Number of findings by path and by `Finding.kind`.
    """

    figures: dict[str, dict[str, Figure]]
    counts: dict[str, dict[str, int]]

    @classmethod
    def from_report(cls, report: Report) -> Baseline:
        """Build the baseline that a report corresponds to."""
        counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for tallies in report.tallies.values():
            for tally in tallies.values():
                for finding in tally.findings:
                    counts[finding.path][finding.kind] += 1
        return cls(report.compute_figures(), {path: dict(kinds) for path, kinds in counts.items()})

    @classmethod
    def load(cls, path: Path) -> Baseline:
        """Read a baseline from a file."""
        content = json.loads(path.read_text("utf-8"))
        figures: defaultdict[str, dict[str, Figure]] = defaultdict(dict)
        for key, values in content["figures"].items():
            package, name = key.split()
            figures[package][name] = Figure(**values)
        return cls(dict(figures), content["counts"])

    def save(self, path: Path) -> None:
        """Write the baseline to a file, with one line per figure and per measured file."""
        figures = {
            f"{package} {name}": asdict(figure)
            for package, figures in self.figures.items()
            for name, figure in figures.items()
        }
        sections = [_format_section("figures", figures), _format_section("counts", self.counts)]
        path.write_text("{\n" + ",\n".join(sections) + "\n}\n", "utf-8")


@dataclass(frozen=True)
class Regression:
    """A figure that got worse.

    Attributes:
        description: Package or path, title of the measure, and the two figures.
        findings: Findings that explain the regression.
    """

    description: str
    findings: list[Finding]


def find_package_regressions(report: Report, baseline: Baseline, changes: Changes) -> Iterator[Regression]:
    """Yield the figures of packages that got worse.

    Args:
        report: Current report.
        baseline: Figures to compare with.
        changes: Changes since the baseline was committed. They narrow down the findings.
    """
    for package, figures in sorted(report.compute_figures().items()):
        for measure in MEASURES:
            figure = figures.get(measure.name)
            previous = baseline.figures.get(package, {}).get(measure.name, Figure(0))
            if figure and figure.is_worse_than(previous):
                description = f"{package}: {measure.title}: {figure}, previously {previous}"
                if figure.rate is not None:
                    description += f" ({figure.count:,} findings, previously {previous.count:,})"
                findings = report.tallies[package][measure.name].findings
                yield Regression(description, _select_new(findings, baseline, changes))


def find_file_regressions(report: Report, baseline: Baseline, changes: Changes) -> Iterator[Regression]:
    """Yield the files with new findings of a measure for which `Measure.is_per_file` is set.

    Args:
        report: Current report.
        baseline: Figures to compare with. A file that was moved is compared with its previous path.
        changes: Changes since the baseline was committed. They narrow down the findings.
    """
    for measure in MEASURES:
        if measure.is_per_file:
            new = _select_new(report.select_findings(measure.name), baseline, changes)
            for path, findings in groupby(new, key=attrgetter("path")):
                yield Regression(f"{path}: {measure.title}: more than before", list(findings))


def _select_new(findings: Iterable[Finding], baseline: Baseline, changes: Changes) -> list[Finding]:
    """Select the findings of the kinds whose number rose in a file.

    If some of these findings are on changed lines, only they are selected.
    """
    groups: defaultdict[tuple[str, str], list[Finding]] = defaultdict(list)
    for finding in sorted(findings):
        groups[finding.path, finding.kind].append(finding)
    new = []
    for (path, kind), group in groups.items():
        if len(group) > baseline.counts.get(changes.get_previous_path(path), {}).get(kind, 0):
            new += changes.select_changed(group) or group
    return new


def _format_section(name: str, values: Mapping[str, Any]) -> str:
    lines = [
        f"{json.dumps(key)}: {json.dumps(value, sort_keys=True)}" for key, value in sorted(values.items())
    ]
    return f"{json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n}"
