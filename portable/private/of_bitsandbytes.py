"""bitsandbytes, imported without torch's compiler: import it from here."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

from portable.errors import UserError
from portable.private.of_torch import no_compiler


@cache
def bitsandbytes() -> Any:
    """The package.

    It compiles what stands in for kernels that a device lacks. That imports the compiler, which takes two
    seconds, and on a CPU compiles a function for each shape, which takes longer than a small run.

    Raises:
        UserError: if it is not installed.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        with no_compiler():
            import bitsandbytes as package
    except ImportError as error:
        raise UserError(
            "adapter.base: nf4 and int8 need bitsandbytes; pip install 'portable-trainer[qlora]'"
        ) from error
    return package
