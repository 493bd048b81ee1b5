"""Names and values from other trainers, used in error messages about unknown keys and values in a config.

:mod:`portable.command_line` imports this module only when such an error occurs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from portable.config import keys
from portable.config.run_config import RunConfig
from portable.config.suggestions import ForeignNameMeaning, ForeignVocabulary
from portable.importing import accelerate, programs
from portable.importing.words import FOREIGN_WORDS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from portable.importing.foreign_file import ForeignKey


def _find_program_title(values: Mapping[str, object]) -> str:
    """Return the name of the trainer that a config file belongs to, or an empty string if it is unknown."""
    program = programs.detect_program(values)
    return "" if program is None else program.title or program.name


def _build_foreign_meaning(key: ForeignKey) -> ForeignNameMeaning:
    """Convert an entry of a key table to the explanation that error messages give for the key.

    The ``remedy`` of the entry is either the dotted key of a setting or advice for the user. The
    result contains a setting in its field ``setting``, or advice in its field ``advice``.
    """
    is_setting = key.remedy in keys.get_setting_fields(RunConfig)
    return ForeignNameMeaning(setting=key.remedy) if is_setting else ForeignNameMeaning(advice=key.remedy)


FOREIGN_VOCABULARY = ForeignVocabulary(
    keys={
        **{
            name: _build_foreign_meaning(key)
            for name, key in programs.TRAINER_KEYS.items()
            if "." not in name
        },
        **{name: _build_foreign_meaning(key) for name, key in accelerate.RENAMED_SETTINGS.items()},
    },
    words={
        key: {word: str(meaning) for word, meaning in words.items()} for key, words in FOREIGN_WORDS.items()
    },
    find_program=_find_program_title,
)
"""Names and values of other trainers that error messages explain. Passed to
:func:`portable.config.suggestions.register_foreign_vocabulary`."""
