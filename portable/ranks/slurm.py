"""Translate the environment variables of SLURM's ``srun`` into the variables of torch.distributed.

Source: the section on output environment variables in the manual page of ``srun``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from portable.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

_LOWEST_PORT, _NUM_PORTS = 20_000, 12_000  # below Linux's range for outgoing connections


def read_slurm_rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torchrun would set, based on the variables of ``srun``.

    Args:
        environment: Environment of the process. Its values of ``MASTER_ADDR`` and ``MASTER_PORT``
            take precedence. The default address is the first node of the step, and the default port
            is derived from the ids of the job and the step.

    Returns:
        ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and
        ``MASTER_PORT``. Empty if another launcher has already set ``RANK``, or if ``srun`` has not
        started this process. Also empty if ``srun`` started a single task, which then launches the
        ranks of its node itself.

    Raises:
        UserError: If a variable of ``srun`` is missing or does not have the documented format.
    """
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
    if "RANK" in environment or tasks == "1":
        return {}
    try:
        return {
            "RANK": environment["SLURM_PROCID"],
            "WORLD_SIZE": tasks,
            "LOCAL_RANK": environment["SLURM_LOCALID"],
            "LOCAL_WORLD_SIZE": str(_count_tasks_of_node(environment)),
            # Every rank computes the same address: the first node of the step, and a port that other steps on
            # that node are unlikely to use.
            "MASTER_ADDR": environment.get("MASTER_ADDR")
            or parse_first_host(environment["SLURM_STEP_NODELIST"]),
            "MASTER_PORT": environment.get("MASTER_PORT") or str(_compute_port(environment)),
        }
    except (KeyError, ValueError, IndexError) as error:
        raise UserError(
            f"srun: the variables of srun do not define the rank of this task ({type(error).__name__}: "
            f"{error}); start one torchrun per node instead, as described in docs/machines.md"
        ) from error


def parse_first_host(nodes: str) -> str:
    """Parse the first host of a SLURM node list, such as ``gpu007`` for ``gpu[007-009,12],big1``.

    Raises:
        ValueError: If the list has no host.
    """
    match = re.match(r"(?:[^,\[\]]|\[[^\]]*\])+", nodes)
    if match is None:
        raise ValueError(f"SLURM_STEP_NODELIST={nodes!r} does not contain the name of a host")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", match.group())


def _count_tasks_of_node(environment: Mapping[str, str]) -> int:
    """Return the number of tasks on this node.

    SLURM lists the tasks per node in a compressed form: ``4(x2),3`` means four tasks on each of the
    first two nodes, and three on the third.
    """
    counts: list[int] = []
    for part in environment["SLURM_STEP_TASKS_PER_NODE"].split(","):
        count, _, times = part.partition("(x")
        counts += [int(count)] * int(times.rstrip(")") or 1)
    return counts[int(environment["SLURM_NODEID"])]


def _compute_port(environment: Mapping[str, str]) -> int:
    """Derive a port from the job id and the step id, so that all ranks choose the same one."""
    job, step = (int(environment.get(name, "0")) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return _LOWEST_PORT + (job * 13 + step) % _NUM_PORTS
