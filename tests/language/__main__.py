"""Check the project's language: ``python -m tests.language [--write] [--list KIND [PATH ...]]``.

Without an option, the command prints the figures of all packages and compares them with ``baseline.json``.
All figures should fall. The exit code is 1 if a figure got worse. A rate, such as marks per 10,000 words, is
only worse if the number of findings rose too, because the removal of good prose raises the rate of the
remaining prose.

``--write`` stores the current figures in ``baseline.json``, unless a figure of a package got worse.
``--list`` prints all findings of one kind. If you change a measure, delete ``baseline.json`` before
``--write``.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.language.baseline import Baseline, Regression, find_file_regressions, find_package_regressions
from tests.language.changes import read_changes
from tests.language.marks import MARKS
from tests.language.measures import MEASURES, Report, measure_sources
from tests.language.sources import PACKAGES, SourceError, load_sources

ROOT = Path(__file__).resolve().parents[2]
BASELINE = Path("tests", "language", "baseline.json")
MAX_FINDINGS = 20
"""Maximum number of findings to print for a figure that got worse."""


def check_language(root: Path) -> int:
    """Print the figures, and an error for each figure that got worse.

    Returns:
        Exit code: 1 if there are errors, otherwise 0.
    """
    report = measure_sources(load_sources(root))
    print(format_table(report))
    errors: list[str] = []
    if (root / BASELINE).is_file():
        baseline, changes = Baseline.load(root / BASELINE), read_changes(root, BASELINE)
        for find_regressions in (find_package_regressions, find_file_regressions):
            errors += map(format_regression, find_regressions(report, baseline, changes))
    else:
        errors.append(f"{BASELINE} does not exist; create it: python -m tests.language --write")
    print("\n".join(errors) or "No figure got worse.")
    return 1 if errors else 0


def write_baseline(root: Path) -> int:
    """Store the current figures, unless a figure of a package got worse.

    Returns:
        Exit code: 1 if a figure got worse, otherwise 0.
    """
    changes = read_changes(root, BASELINE)
    report = measure_sources(load_sources(root))
    print(format_table(report))
    if (root / BASELINE).is_file():
        regressions = list(find_package_regressions(report, Baseline.load(root / BASELINE), changes))
        if regressions:
            print("\n".join(map(format_regression, regressions)))
            print(f"{BASELINE} was not written, because these figures got worse.")
            return 1
    Baseline.from_report(report).save(root / BASELINE)
    print(f"Wrote {BASELINE}.")
    return 0


def list_findings(root: Path, kind: str, paths: Sequence[str]) -> None:
    """Print all findings of one kind.

    Args:
        root: Root of the project.
        kind: Name of a measure or of a mark.
        paths: Files and folders to print, relative to the root. If there are none, all files are printed.
    """
    for finding in measure_sources(load_sources(root)).select_findings(kind):
        if not paths or any(Path(finding.path).is_relative_to(path) for path in paths):
            print(finding)


def format_table(report: Report) -> str:
    """Format the figures as a table with a row for each measure and a column for each package."""
    figures = report.compute_figures()
    packages = [package for package in PACKAGES if package in figures]
    width = max(len(measure.title) for measure in MEASURES)
    rows = [" " * width + "".join(f"{package:>12}" for package in packages)]
    for measure in MEASURES:
        cells = [str(figures[package].get(measure.name, "-")) for package in packages]
        rows.append(f"{measure.title:{width}}" + "".join(f"{cell:>12}" for cell in cells))
    return "\n".join(rows)


def format_regression(regression: Regression) -> str:
    """Format a figure that got worse and its first findings."""
    lines = [f"\n{regression.description}"]
    lines += [f"  {finding}" for finding in regression.findings[:MAX_FINDINGS]]
    if len(regression.findings) > MAX_FINDINGS:
        lines.append(f"  and {len(regression.findings) - MAX_FINDINGS:,} more")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Run the command line.

    Returns:
        Exit code: 0 if no figure got worse, 1 if a figure got worse or a file cannot be parsed.
    """
    kinds = [*(measure.name for measure in MEASURES), *(mark.name for mark in MARKS)]
    parser = argparse.ArgumentParser("python -m tests.language", description="Check the project's language.")
    parser.add_argument(
        "--write", action="store_true", help="store the current figures, unless one of a package got worse"
    )
    parser.add_argument(
        "--list",
        nargs="+",
        metavar=("KIND", "PATH"),
        help=f"print all findings of a kind, in all files or in PATH. Kinds: {', '.join(kinds)}",
    )
    options = parser.parse_args(arguments)
    if options.list and options.list[0] not in kinds:
        parser.error(f"--list: unknown kind {options.list[0]}; use one of {', '.join(kinds)}")
    # The syntax trees are kept until the end. Looking for garbage among them would double the run time.
    gc.disable()
    try:
        if options.list:
            list_findings(ROOT, options.list[0], options.list[1:])
            return 0
        return write_baseline(ROOT) if options.write else check_language(ROOT)
    except SourceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
