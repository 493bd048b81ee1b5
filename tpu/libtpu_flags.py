"""Set TPU compiler flags, which libtpu reads from ``LIBTPU_INIT_ARGS`` when it is loaded."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

LIBTPU_FLAGS_VARIABLE = "LIBTPU_INIT_ARGS"
# The state of a step is donated. libtpu first copies all of it, and then removes each copy that it can prove
# to be unnecessary, up to a total of 150,000 units of work. This is not enough for a model with 32 separate
# layers, where copies of a third of the state remained. Compilation stays short with a higher total, because
# each copy also has a separate limit.
ADDED_LIBTPU_FLAGS = ("xla_tpu_copy_elision_analysis_allowance=1000000000",)
"""Flags that a run adds to the flags of torch_xla."""


def add_missing_libtpu_flags(current_flags: str, flags: Iterable[str]) -> str:
    """Append flags to a ``LIBTPU_INIT_ARGS`` value, except flags that it already sets.

    Args:
        current_flags: Value of ``LIBTPU_INIT_ARGS``.
        flags: Flags to add, in the form ``name=value``. They are added with the prefix ``--``.

    Returns:
        The new value, with a space between flags.
    """
    arguments = current_flags.split()
    present = {re.sub("^-*", "", flag).partition("=")[0] for flag in arguments}
    missing = [f"--{flag}" for flag in flags if flag.partition("=")[0] not in present]
    return " ".join([*arguments, *missing])
