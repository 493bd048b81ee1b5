"""Write the final model with a group of processes, one on each node."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import torch.distributed as dist

from portable.converters.errors import CheckpointError
from portable.errors import to_one_line
from portable.ranks.collectives import gather_text, get_or_create_background_group

if TYPE_CHECKING:
    from collections.abc import Callable


class NodeWriters:
    """Group of ranks that write a model together: the first rank of each node.

    Implements the protocol :class:`portable.converters.writers.writer_group.WriterGroup`. Rank 0 is
    process 0 of the group.

    Args:
        group: Process group of these ranks. None if only rank 0 writes.
        number: Index of this process in the group.
        size: Number of processes.

    Attributes:
        has_lost_a_process: Whether another process of the group has died.
    """

    def __init__(self, group: dist.ProcessGroup | None, number: int, size: int) -> None:
        self._group = group
        self.number = number
        self.size = size
        self.has_lost_a_process = False

    def call_everywhere(self, function: Callable[[], str]) -> list[str]:
        """Call a function in every process of the group, and gather the results.

        All processes of the group have to call this method.

        Args:
            function: Function that returns a string.

        Returns:
            The results of all processes, ordered by their index in the group.

        Raises:
            CheckpointError: If the function fails in another process, or if a process has died. If
                the function fails in this process, its exception is raised instead.
        """
        if self._group is None:
            return [function()]
        result, failure = "", None
        try:
            result = function()
        except Exception as error:
            failure = error
        answer = json.dumps({"result": result, "failure": None if failure is None else to_one_line(failure)})
        try:
            answers = [json.loads(text) for text in gather_text(answer, self._group)]
        except RuntimeError as error:
            if failure is not None:
                raise failure from error
            self.has_lost_a_process = True
            raise CheckpointError(
                f"another node that writes the model has stopped ({to_one_line(error)[:200]}); read the "
                "error of that node, and run the command again"
            ) from error
        if failure is not None:
            raise failure
        for number, other in enumerate(answers):
            if other["failure"] is not None:
                raise CheckpointError(f"node {number}: {other['failure']}")
        return [other["result"] for other in answers]


def choose_node_writers(can_read_checkpoint: Callable[[], bool]) -> NodeWriters | None:
    """Choose the ranks that write the final model: the first rank of each node.

    All ranks have to call this function. There is only one writer per node, because its threads use
    all cores, and because every writer has to read the index of the complete checkpoint.

    Args:
        can_read_checkpoint: Function that returns whether this process can read the checkpoint.
            Nodes that do not share the file system of rank 0 cannot read it, and do not write.

    Returns:
        The writers, with the index of this rank among them. None on ranks that do not write.
    """
    if not dist.is_initialized():
        return NodeWriters(None, 0, 1)
    rank = dist.get_rank()
    writes = rank == 0 or (os.environ.get("LOCAL_RANK", "0") == "0" and can_read_checkpoint())
    answers = gather_text("writes" if writes else "")
    ranks = [number for number, answer in enumerate(answers) if answer]
    # The writers have a separate group, because the other ranks end before them.
    group = get_or_create_background_group(ranks) if len(ranks) > 1 else None
    return NodeWriters(group, ranks.index(rank), len(ranks)) if writes else None
