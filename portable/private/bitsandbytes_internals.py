"""Import bitsandbytes without loading torch's compiler.

Other modules must import bitsandbytes through :func:`import_bitsandbytes`.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

from portable.errors import UserError, to_one_line
from portable.private import GuardedPackage
from portable.private.torch_internals import disable_compiler


@cache
def import_bitsandbytes() -> Any:
    """Import bitsandbytes with ``torch.compile`` disabled. The result is cached.

    bitsandbytes compiles replacements for kernels that a device lacks. Its import would therefore
    load the compiler, which takes two seconds. On a CPU, it would later also compile a function for
    each shape, which takes longer than a small run. The function also disables log messages of
    bitsandbytes below the level ``ERROR``.

    Returns:
        The module ``bitsandbytes``.

    Raises:
        UserError: If the package is not installed, has an unsupported version, or cannot be imported.
    """
    _bitsandbytes.check_installed("adapter.base", "qlora")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        with disable_compiler():
            import bitsandbytes as package
    except ImportError as error:
        reason = f"bitsandbytes cannot be imported ({to_one_line(error)})"
        raise UserError(f"adapter.base: {reason}; run: pip install 'portable-trainer[qlora]'") from error
    return package


_bitsandbytes = GuardedPackage("bitsandbytes", "0.50.2")
