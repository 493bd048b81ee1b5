"""What a rank leaves behind. Loads nothing, so that real processes of it start at once."""

from __future__ import annotations

import atexit
import os
import sys
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable


class Left:
    """What aborts the process if the interpreter frees it, as threads of gloo do now and then."""

    def __del__(self, abort: Callable[[], NoReturn] = os.abort) -> None:  # whose module may be gone by then
        abort()


def leave() -> int:
    """The function of a rank, or a part of one."""
    sys.left = Left()  # type: ignore[attr-defined]
    atexit.register(os.write, 1, b"handlers run\n")
    return 0
