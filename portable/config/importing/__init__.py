"""Files of other programs: one table of their names, and one function from a file to settings and notes."""

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

__all__ = [
    "PROGRAMS",
    "Imported",
    "command_line",
    "program_of",
    "read",
    "read_accelerate",
    "read_deepspeed",
    "read_environment",
]
