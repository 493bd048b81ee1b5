"""Names and words of other programs, for messages about an unknown key or value in a run's config.

:mod:`portable.command_line` loads this module when there is such a message to write.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portable.config import keys
from portable.config.run_config import RunConfig
from portable.config.suggestions import ForeignName, ForeignNames
from portable.importing import accelerate, programs
from portable.importing.words import WORDS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from portable.importing.foreign_file import ForeignKey


def _find_program(values: Mapping[str, object]) -> str:
    program = programs.find_program(values)
    return "" if program is None else program.title or program.name


def _describe(key: ForeignKey) -> ForeignName:
    is_setting = key.remedy in keys.get_settings(RunConfig)
    return ForeignName(setting=key.remedy) if is_setting else ForeignName(advice=key.remedy)


FOREIGN_NAMES = ForeignNames(
    keys={
        **{name: _describe(key) for name, key in programs.TRAINER_KEYS.items() if "." not in name},
        **{name: _describe(key) for name, key in accelerate.OUR_OLD_SETTINGS.items()},
    },
    words={key: {word: str(meaning) for word, meaning in words.items()} for key, words in WORDS.items()},
    find_program=_find_program,
)
