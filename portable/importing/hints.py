"""Names and words of other programs, for messages about an unknown key or value in a run's config.

:mod:`portable.config.foreign_names` loads this module when there is such a message to write.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portable.importing import accelerate, programs
from portable.importing.words import WORDS

if TYPE_CHECKING:
    from collections.abc import Mapping

KEYS: dict[str, str] = {
    **{name: key.remedy for name, key in programs.TRAINER_KEYS.items() if "." not in name},
    **{name: key.remedy for name, key in accelerate.OUR_OLD_SETTINGS.items()},
}
"""Our setting, or a remedy, for a name of other trainers or of an earlier release. A star is any end."""

__all__ = ["KEYS", "WORDS", "name_program"]


def name_program(values: Mapping[str, object]) -> str | None:
    """Return the name of the program that a file with the top-level keys ``values`` is from, or None."""
    program = programs.find_program(values)
    return None if program is None else program.title or program.name
