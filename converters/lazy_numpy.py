"""NumPy and ml_dtypes, imported when the program first uses them.

Most conversions copy bytes without looking at their values. Importing NumPy takes longer than the rest of
such a conversion of a small checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ml_dtypes
    import numpy as np
else:
    from portable.converters.lazy_imports import DeferredModule

    ml_dtypes = DeferredModule("ml_dtypes")
    np = DeferredModule("numpy")

__all__ = ["ml_dtypes", "np"]
