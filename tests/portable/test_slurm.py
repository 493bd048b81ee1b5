"""Ranks from srun's variables.

There is no SLURM here: the variables are those that its documentation and its source name, set by hand.
"""

from __future__ import annotations

import pytest

from portable.errors import UserError
from portable.ranks.slurm import first_host, rank_variables

STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "11",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
    "SLURM_STEP_NODELIST": "gpu[007-008,12]",
    "SLURM_PROCID": "9",
    "SLURM_NODEID": "2",
    "SLURM_LOCALID": "1",
}


def test_a_task_of_srun_is_a_rank() -> None:
    variables = rank_variables(STEP)
    port = int(variables.pop("MASTER_PORT"))
    assert variables == {
        "RANK": "9",
        "WORLD_SIZE": "11",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "3",
        "MASTER_ADDR": "gpu007",
    }
    assert 20_000 <= port < 32_000
    other = rank_variables({**STEP, "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"})
    assert other["LOCAL_WORLD_SIZE"] == "4"
    assert (other["MASTER_ADDR"], other["MASTER_PORT"]) == ("gpu007", str(port))
    assert rank_variables({**STEP, "SLURM_STEP_ID": "1"})["MASTER_PORT"] != str(port)
    given = rank_variables({**STEP, "MASTER_ADDR": "ib0.head", "MASTER_PORT": "29500"})
    assert (given["MASTER_ADDR"], given["MASTER_PORT"]) == ("ib0.head", "29500")
    assert first_host("rack[2,5]n[10-12].example.org,x") == "rack2n10.example.org"


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {**STEP, "RANK": "0", "WORLD_SIZE": "2"},  # torchrun under srun
        {**STEP, "SLURM_STEP_NUM_TASKS": "1"},  # one task, which starts the ranks of its node
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},  # the script of a batch job
    ],
    ids=["no SLURM", "torchrun", "one task", "batch script"],
)
def test_other_processes_are_left_alone(environment: dict[str, str]) -> None:
    assert rank_variables(environment) == {}


@pytest.mark.parametrize("damage", [{"SLURM_STEP_TASKS_PER_NODE": "many"}, {"SLURM_NODEID": "7"}])
def test_unreadable_variables_are_refused(damage: dict[str, str]) -> None:
    with pytest.raises(UserError, match="srun: its variables do not define this task's rank"):
        rank_variables({**STEP, **damage})
