"""Files of other programs: one table of their names, and one function from a file to settings and notes.

The table is read where there is such a file, and where a name is unknown, which may be another program's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portable import at_first_use

if TYPE_CHECKING:
    from portable.config.importing.accelerate import WERE_SETTINGS
    from portable.config.importing.importer import (
        PROGRAMS,
        command_line,
        program_of,
        read,
        read_accelerate,
        read_deepspeed,
        read_environment,
    )
    from portable.config.importing.rows import Imported
    from portable.config.importing.trainers import FAMILIES, IN_PLACE_OF_A_SECTION, TRAINERS, WORDS

__all__ = [
    "FAMILIES",
    "IN_PLACE_OF_A_SECTION",
    "LAUNCHED",
    "PROGRAMS",
    "TRAINERS",
    "WERE_SETTINGS",
    "WORDS",
    "Imported",
    "command_line",
    "program_of",
    "read",
    "read_accelerate",
    "read_deepspeed",
    "read_environment",
]

LAUNCHED = "ACCELERATE_MIXED_PRECISION"
"""The variable that every launcher of Accelerate sets."""
__getattr__ = at_first_use(
    __name__,
    {
        "portable.config.importing.accelerate": ("WERE_SETTINGS",),
        "portable.config.importing.importer": (
            "PROGRAMS",
            "command_line",
            "program_of",
            "read",
            "read_accelerate",
            "read_deepspeed",
            "read_environment",
        ),
        "portable.config.importing.rows": ("Imported",),
        "portable.config.importing.trainers": ("FAMILIES", "IN_PLACE_OF_A_SECTION", "TRAINERS", "WORDS"),
    },
)
