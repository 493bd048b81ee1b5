"""Avoid host syncs in transformers."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def no_value_checks() -> Iterator[None]:
    """Keep transformers from reading masks and positions in a forward pass, which is a host sync.

    transformers looks for packed sequences, which our data does not have, and skips masks that mask nothing.
    Here, every mask that is given is used.
    """
    from transformers import masking_utils

    module: Any = masking_utils
    replaced = {
        "find_packed_sequence_indices": lambda _: _none,
        "_ignore_causal_mask_sdpa": _unless_given,
        "_ignore_bidirectional_mask_sdpa": _unless_given,
    }
    before = {name: getattr(module, name) for name in replaced if hasattr(module, name)}
    for name, function in before.items():
        setattr(module, name, replaced[name](function))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(module, name, function)


def _none(position_ids: Any) -> None:
    """No packed sequences."""


def _unless_given(may_skip: Callable[..., bool]) -> Callable[..., bool]:
    """Wrap ``may_skip``, the test whether a mask can be skipped, so that it never reads ``padding_mask``."""

    def skips(padding_mask: Any, *arguments: Any, **keywords: Any) -> bool:
        return padding_mask is None and may_skip(padding_mask, *arguments, **keywords)

    return skips
