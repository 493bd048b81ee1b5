"""Exclude long-lived objects from Python's garbage collection, and free memory after an error.

A full collection visits every tracked object. The model and the imported libraries consist of
hundreds of thousands of objects. These objects live until the run ends, so visiting them during
training is a waste of time. They are excluded from collection before the first step.

After a rank runs out of memory, a collection frees unreachable objects such as the engine.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def freeze_existing_objects() -> Iterator[None]:
    """Collect garbage once, then exempt all existing objects from collection within this context.

    The objects are unfrozen when the context ends.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def free_unreachable_objects() -> None:
    """Free unreachable objects in reference cycles, such as the engine after an out-of-memory error.

    The caller must drop its own references first. A search for a smaller micro-batch can then use the
    memory.
    """
    gc.collect()
