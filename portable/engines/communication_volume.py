"""Planner helpers that count the elements of weights and compute the traffic between nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from portable.planner.memory_model import Cluster
    from portable.planner.parameter_inventory import ParameterEntry


def sum_elements(weights: Iterable[ParameterEntry]) -> int:
    """Return the total number of elements of the given weights."""
    return sum(w.num_elements for w in weights)


def compute_internode_bytes(total_bytes: float, cluster: Cluster) -> float:
    """Compute the average number of bytes that a device sends to other nodes in a collective.

    The collective is a ring over all devices, which visits all devices of a node before the next
    node. Only one device per node therefore sends to another node, and sends as much as each of the
    other devices. The result is this traffic, divided evenly among the devices of the node. It is 0
    for a single node.

    Args:
        total_bytes: Bytes that each device sends in the collective, within and between nodes.
        cluster: Number of nodes, and devices per node.
    """
    return 0.0 if cluster.nodes == 1 else total_bytes / cluster.per_node
