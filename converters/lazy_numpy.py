"""Import NumPy and ml_dtypes when they are first used.

Most conversions copy bytes without reading their values. For a small checkpoint, importing NumPy
would take longer than the rest of the conversion.
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
