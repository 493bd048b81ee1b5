"""Regular expressions that users give for parameters, searched in their names."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING

from portable.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence


def compiled(key: str, pattern: str) -> re.Pattern[str]:
    """Compile ``pattern``; raise UserError, for the setting ``key``, if it is not a regular expression."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise UserError(f"{key}: {pattern!r} is not a regular expression ({error})") from error


def matching(key: str, pattern: str, names: Mapping[str, Sequence[str]]) -> set[str]:
    """The parameters that ``pattern`` matches.

    Args:
        key: of the setting, for messages.
        pattern: searched in names.
        names: all names of each parameter, by its first one.

    Raises:
        UserError: if it is not a regular expression or matches nothing.
    """
    expression = compiled(key, pattern)
    found = {first for first, every in names.items() if any(expression.search(one) for one in every)}
    if not found:
        raise UserError(f"{key}: {pattern!r} matches no parameter{_nearest(pattern, names)}")
    return found


def _nearest(pattern: str, names: Collection[str]) -> str:
    """The end of a message: the parts of ``names`` that are most like ``pattern``."""
    words = dict.fromkeys(word for name in names for word in name.split(".") if not word.isdigit())
    wanted = re.findall(r"\w*[a-z]\w*", pattern, re.IGNORECASE)
    near = [near for word in wanted for near in difflib.get_close_matches(word, words, n=2) if near != word]
    if near:
        return f"; did you mean {' or '.join(dict.fromkeys(near))}?"
    alike = [name for name in names if set(wanted) & set(name.split("."))]
    return f"; parameters are named like {(alike or list(names))[-1]}"
