"""Findings of the measures."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, order=True)
class Finding:
    """A place in a file whose language can be improved.

    Attributes:
        path: Path of the file, relative to the root of the project.
        line: Number of the first line.
        last_line: Number of the last line.
        kind: Kind of the finding. The baseline counts the findings of each kind in each file.
        text: Excerpt from the file.
        advice: How to improve the language.
    """

    path: str
    line: int
    last_line: int
    kind: str
    text: str
    advice: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}  ({self.kind}: {self.advice})"


@dataclass
class Tally:
    """Findings of a measure in a file or a package.

    Attributes:
        findings: The findings.
        examined: Number of places that were examined, for example words or functions.
    """

    findings: list[Finding] = field(default_factory=list)
    examined: int = 0

    def add(self, other: Tally) -> None:
        """Add the findings and the examined places of another tally."""
        self.findings += other.findings
        self.examined += other.examined
