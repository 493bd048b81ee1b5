"""What this package uses of :mod:`portable.importing`, which reads the files of other programs.

:mod:`portable.importing` is built on this package. So this package names its modules as text, and loads them
only for a message about an unknown name or word, and for the settings of Accelerate.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from collections.abc import Mapping

    from portable.config.yaml_text import Document
    from portable.importing.foreign_file import ImportedRun


class ForeignNames(Protocol):
    """The module :mod:`portable.importing.hints`."""

    KEYS: Mapping[str, str]
    """Our setting, or a remedy, for each name of another program. A name that ends in a star is for all names
    that begin like it."""
    WORDS: Mapping[str, Mapping[str, str]]
    """Our word for each word of another program, by our setting or section."""

    def name_program(self, values: Mapping[str, object]) -> str | None:
        """Return the name of the program that a file with the top-level keys ``values`` is from, or None."""


class AccelerateReader(Protocol):
    """The part of :mod:`portable.importing.programs` that is for Accelerate."""

    def read_accelerate(self, document: Document, name: str) -> ImportedRun:
        """Convert a file of ``accelerate config``."""

    def read_environment(self, environment: Mapping[str, str]) -> ImportedRun:
        """Convert the environment of a process that ``accelerate launch`` has started."""


def load_foreign_names() -> ForeignNames:
    """Load the names and words of other programs."""
    return cast("ForeignNames", importlib.import_module("portable.importing.hints"))


def load_accelerate_reader() -> AccelerateReader:
    """Load the reader of Accelerate's files and environment."""
    return cast("AccelerateReader", importlib.import_module("portable.importing.programs"))


def find_remedy(name: str) -> str | None:
    """Return our setting, or a remedy, for a name of another program or of an earlier release, or None.

    Args:
        name: The unknown key, with or without its section.
    """
    remedies = load_foreign_names().KEYS
    last = name.rpartition(".")[2]
    if name in remedies or last in remedies:
        return remedies.get(name) or remedies.get(last) or None
    starred = (
        text for start, text in remedies.items() if start.endswith("*") and last.startswith(start[:-1])
    )
    return next(starred, None)
