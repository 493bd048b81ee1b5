"""Avoid host syncs in transformers."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def no_value_checks() -> Iterator[None]:
    """Keep transformers from reading masks and positions in a forward pass, which is a host sync.

    transformers looks for packed sequences, and skips masks that mask nothing, unless it is being traced. Here,
    every mask that is given is used. :mod:`portable.model.document_attention` says where the documents of a
    packed sample are.
    """
    with replaced(find_packed_sequence_indices=_none, is_tracing=_always):
        yield


@contextmanager
def replaced(**functions: Callable[..., Any]) -> Iterator[None]:
    """Replace functions of ``transformers.masking_utils`` by name."""
    from transformers import masking_utils

    module: Any = masking_utils
    before = {name: getattr(module, name) for name in functions}
    for name, function in functions.items():
        setattr(module, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(module, name, function)


def _none(position_ids: Any) -> None:
    """No packed sequences."""


def _always(tensor: Any = None) -> bool:
    """Values must not be read."""
    return True
