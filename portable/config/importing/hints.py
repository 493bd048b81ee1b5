"""Names of other programs, as error messages about unknown keys and words need them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from portable.config.importing.accelerate import WERE_SETTINGS
from portable.config.importing.importer import program_of
from portable.config.importing.trainers import TRAINERS, WORDS
from portable.config.suggestions import ForeignNames

if TYPE_CHECKING:
    from collections.abc import Mapping


def _find_program(values: Mapping[str, object]) -> str:
    program = program_of(values)
    return "" if program is None else program.name


FOREIGN_NAMES = ForeignNames(
    keys={
        **{name: row.hint for name, row in TRAINERS.items() if "." not in name},
        **{name: row.hint for name, row in WERE_SETTINGS.items()},
    },
    words=WORDS,
    find_program=_find_program,
)
