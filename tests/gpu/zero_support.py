"""ZeRO in processes that serve one test after the other."""

from __future__ import annotations

import sys


def renumber() -> None:
    """Have DeepSpeed number modules from 0 again.

    It counts over a process's life and has the ranks compare their numbers, so that ranks which did not share
    all of their past runs would seem to disagree.
    """
    if "deepspeed" in sys.modules:
        from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

        DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0
