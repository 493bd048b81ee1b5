"""Sums for the planner: number of elements of weights, and bytes that a collective sends between nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from portable.planner.memory_model import Cluster
    from portable.planner.parameter_inventory import ParameterEntry


def sum_elements(weights: Iterable[ParameterEntry]) -> int:
    """Return the total number of elements of some weights of a model."""
    return sum(w.num_elements for w in weights)


def compute_internode_bytes(total_bytes: float, cluster: Cluster) -> float:
    """Compute the bytes that each device sends to other nodes in a collective over all devices.

    A ring that visits the nodes one after the other leaves each node only once. The devices of a node
    therefore share the traffic between nodes. Returns 0 for a single node.

    Args:
        total_bytes: Bytes that each device sends in the collective, to devices of any node.
        cluster: Number of nodes, and devices per node.
    """
    return 0.0 if cluster.nodes == 1 else total_bytes * (cluster.nodes - 1) / cluster.nodes / cluster.per_node
