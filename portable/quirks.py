"""Where transformers would wait for the device to learn what is known."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def one_sequence_a_row() -> Iterator[None]:
    """Around a forward pass: spare transformers the look for rows that hold several sequences.

    Without a mask it reads the positions, once a forward pass, and on a GPU that waits for all that is
    queued. The data never gives positions, and those that a model counts itself are of one sequence.
    """
    from transformers import masking_utils

    module: Any = masking_utils
    look = getattr(module, "find_packed_sequence_indices", None)
    if look is None:
        yield
        return
    module.find_packed_sequence_indices = _none
    try:
        yield
    finally:
        module.find_packed_sequence_indices = look


def _none(position_ids: Any) -> None:
    """No packed sequences."""
