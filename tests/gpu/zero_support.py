"""ZeRO in processes that serve one test after the other."""

from __future__ import annotations


def renumber() -> None:
    """Have DeepSpeed number parameters and modules from 0 again.

    It counts over a process's life and has the ranks compare their numbers, so that ranks which did not share
    all of their past runs would seem to disagree.
    """
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init

    Init.param_id = 0
    DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0
