"""Ranks that ``srun`` has started: its variables, in the names that torch.distributed knows.

Source of the variables: the sections on output environment variables of SLURM's ``srun`` page.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from portable.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

_FIRST_PORT, _PORTS = 20_000, 12_000  # below the range that Linux gives to outgoing connections


def rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """What torchrun would have set for this process, from what ``srun`` did.

    Args:
        environment: of the process. ``MASTER_ADDR`` and ``MASTER_PORT`` that are set there are kept.

    Returns:
        ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``;
        nothing where another launcher has set ranks, or ``srun`` has started one task only: that one, like
        the script of a batch job, starts the ranks of its node itself.

    Raises:
        UserError: if ``srun``'s variables are not what its documentation says.
    """
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
    if "RANK" in environment or tasks == "1":
        return {}
    try:
        return {
            "RANK": environment["SLURM_PROCID"],
            "WORLD_SIZE": tasks,
            "LOCAL_RANK": environment["SLURM_LOCALID"],
            "LOCAL_WORLD_SIZE": str(_tasks_of_node(environment)),
            # Every rank comes to the same address without asking: the first node of the step, and a port
            # that steps of other jobs on that node are unlikely to use.
            "MASTER_ADDR": environment.get("MASTER_ADDR") or first_host(environment["SLURM_STEP_NODELIST"]),
            "MASTER_PORT": environment.get("MASTER_PORT") or str(_port(environment)),
        }
    except (KeyError, ValueError, IndexError) as error:
        raise UserError(
            f"srun: its variables do not tell this task its rank ({type(error).__name__}: {error}); start "
            "one torchrun a node instead, as docs/gpu.md says"
        ) from error


def first_host(nodes: str) -> str:
    """The first host of a list in SLURM's notation: ``gpu007`` of ``gpu[007-009,12],big1``."""
    match = re.match(r"(?:[^,\[\]]|\[[^\]]*\])+", nodes)
    if match is None:
        raise ValueError(f"no host in {nodes!r}")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", match.group())


def _tasks_of_node(environment: Mapping[str, str]) -> int:
    """``4(x2),3`` stands for two nodes of four tasks and one of three."""
    counts: list[int] = []
    for part in environment["SLURM_STEP_TASKS_PER_NODE"].split(","):
        count, _, times = part.partition("(x")
        counts += [int(count)] * int(times.rstrip(")") or 1)
    return counts[int(environment["SLURM_NODEID"])]


def _port(environment: Mapping[str, str]) -> int:
    job, step = (int(environment.get(name, "0")) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return _FIRST_PORT + (job * 13 + step) % _PORTS
