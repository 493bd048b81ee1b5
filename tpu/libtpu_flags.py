"""Flags of the TPU's compiler. libtpu reads them from ``LIBTPU_INIT_ARGS`` as it is loaded."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

LIBTPU_FLAGS_VARIABLE = "LIBTPU_INIT_ARGS"
# The state of a step is donated, and libtpu first copies all of it. It then removes each copy that it can
# show to be useless, and gives up after a total of 150,000 units of work. 32 layers, one by one, need more,
# and copies of a third of their state stayed. Each copy has a limit of its own, so compilation stays short.
ADDED_LIBTPU_FLAGS = ("xla_tpu_copy_elision_analysis_allowance=1000000000",)
"""What a run adds to the flags of torch_xla."""


def add_missing_libtpu_flags(current_flags: str, flags: Iterable[str]) -> str:
    """Add to ``current_flags`` the ``flags`` that it does not set.

    Args:
        current_flags: a value of ``LIBTPU_INIT_ARGS``.
        flags: each ``name=value``.
    """
    arguments = current_flags.split()
    present = {re.sub("^-*", "", flag).partition("=")[0] for flag in arguments}
    missing = [f"--{flag}" for flag in flags if flag.partition("=")[0] not in present]
    return " ".join([*arguments, *missing])
