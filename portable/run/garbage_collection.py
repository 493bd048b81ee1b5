"""Garbage collection of a run: before its first step, and after a rank has run out of memory.

Python's garbage collector visits every object that it tracks. The model and the imported libraries consist of
hundreds of thousands of objects that live until the run ends, so visiting them during training only costs
time.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def freeze_existing_objects() -> Iterator[None]:
    """Collect garbage once, and exclude the remaining objects from later collections within this context.

    The objects are unfrozen when the context ends.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def free_unreachable_objects() -> None:
    """Free objects in reference cycles, such as the engine of a rank that has run out of device memory.

    The caller must drop its own references before. A search for a smaller micro-batch can then use the
    memory.
    """
    gc.collect()
