"""Measures of the project's language, and their figures for each package."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from tests.language.findings import Finding, Tally
from tests.language.marks import tally_marks
from tests.language.names import tally_function_names, tally_locals
from tests.language.parameters import tally_descriptions
from tests.language.prose import iter_passages
from tests.language.sources import Source, find_error_callables


@dataclass(frozen=True)
class Measure:
    """A measure of the language, with figures that should fall.

    Attributes:
        name: Name of the measure, which the baseline and ``--list`` use.
        title: Description of the figure.
        scale: Number of examined places that a rate refers to. None if the figure is the number of findings.
        is_per_file: Whether the number of findings may not rise in any file either.
    """

    name: str
    title: str
    scale: int | None = None
    is_per_file: bool = False


MARKS = Measure("marks", "marks of unidiomatic prose per 10,000 words", scale=10_000)
CLAUSES = Measure("clauses", "% of parameter descriptions that are clauses", scale=100)
NOUNS = Measure("nouns", "% of function names without a leading verb", scale=100)
PARTICIPLES = Measure("participles", "% of function names that are participles", scale=100)
LOCALS = Measure("locals", "local variables with vague names", is_per_file=True)
MEASURES = (MARKS, CLAUSES, NOUNS, PARTICIPLES, LOCALS)


@dataclass(frozen=True)
class Figure:
    """Figure of a measure for a package.

    Attributes:
        count: Number of findings.
        rate: Number of findings per `Measure.scale` examined places. None if the measure has no scale.
    """

    count: int
    rate: float | None = None

    def is_worse_than(self, other: Figure) -> bool:
        """Return whether the number of findings is higher and, if there is a rate, the rate is higher too.

        The removal of good prose raises only the rate, and the growth of a package raises only the number of
        findings. Neither makes the language worse.
        """
        is_rate_higher = self.rate is None or other.rate is None or self.rate > other.rate
        return self.count > other.count and is_rate_higher

    def __str__(self) -> str:
        return f"{self.count:,}" if self.rate is None else f"{self.rate:.2f}"


class Report:
    """Tallies of all measures.

    Attributes:
        tallies: Tallies by package and by `Measure.name`. A package has no tally of a measure that does not
            apply to it.
    """

    def __init__(self) -> None:
        self.tallies: defaultdict[str, defaultdict[str, Tally]] = defaultdict(lambda: defaultdict(Tally))

    def add(self, package: str, measure: Measure, tally: Tally) -> None:
        """Add the tally of a file."""
        self.tallies[package][measure.name].add(tally)

    def compute_figures(self) -> dict[str, dict[str, Figure]]:
        """Compute the figures by package and by `Measure.name`."""
        return {
            package: {
                measure.name: _compute_figure(measure, tallies[measure.name])
                for measure in MEASURES
                if measure.name in tallies
            }
            for package, tallies in self.tallies.items()
        }

    def select_findings(self, kind: str) -> list[Finding]:
        """Select the findings of a measure or of a kind, sorted by path and line.

        Args:
            kind: A `Measure.name` or a `Finding.kind`.
        """
        return sorted(
            finding
            for tallies in self.tallies.values()
            for name, tally in tallies.items()
            for finding in tally.findings
            if kind in (name, finding.kind)
        )


def measure_sources(sources: Sequence[Source]) -> Report:
    """Measure the language of all packages.

    Args:
        sources: Sources of all packages.
    """
    report = Report()
    error_callables = find_error_callables(sources)
    for source in sources:
        package = source.package
        report.add(package, MARKS, tally_marks(source.path, iter_passages(source, error_callables)))
        if source.nodes:
            nouns, participles = tally_function_names(source.path, source.nodes)
            report.add(package, NOUNS, nouns)
            report.add(package, PARTICIPLES, participles)
            report.add(package, CLAUSES, tally_descriptions(source.path, source.nodes))
            report.add(package, LOCALS, tally_locals(source.path, source.nodes))
    return report


def _compute_figure(measure: Measure, tally: Tally) -> Figure:
    count = len(tally.findings)
    if measure.scale is None:
        return Figure(count)
    return Figure(count, round(measure.scale * count / max(1, tally.examined), 2))
