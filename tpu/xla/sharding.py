"""Choose the dim along which each parameter is sharded over the devices."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from portable.errors import UserError
from portable.model.parameters import compile_pattern

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portable.config import RunConfig

HYBRID_STRATEGIES = ("hybrid_shard", "hybrid_shard_zero2")

# Embedding tables are sharded along the hidden dim, so that a lookup does not need rows of other devices.
_EMBEDDING_TABLES = re.compile(
    r"(^|\.)(embed_tokens|embed_positions|embed_in|embeddings|(word|position|token_type)_embeddings"
    r"|wte|wpe|shared|relative_attention_bias)(\.base_layer|\.original_module|\.modules_to_save\.default)?\.weight$"
)

_MAX_DIM_RATIO = 8
"""Maximum ratio of the longest divisible dim to the sharded dim. Shorter dims are not sharded."""

LANES = 128
"""Number of values that a chip stores in a row.

The last dim of a tensor is padded to a multiple of this number.
"""


def is_head_gradient_transposed(shard_width: int, shard_group_size: int) -> bool:
    """Return whether the LM head's gradient is computed transposed, as ``[hidden size, vocabulary]``.

    This only applies to a head that is sharded along the hidden dim. Its gradient is transposed if
    the head is sharded over at least 8 devices, or if a shard has at most :data:`LANES` columns.
    The compiler can reduce-scatter a result along a major dim, but not always along a minor dim.
    Transposition makes the hidden dim the major dim. However, it may cost memory: the update is
    also computed in the transposed layout, so the optimizer state of every matrix with this shape
    is copied to that layout.

    Args:
        shard_width: Number of columns per shard.
        shard_group_size: Number of devices over which the head is sharded.
    """
    return shard_group_size >= 8 or shard_width <= LANES


class ShardingRules:
    """Rules that choose the dim along which each parameter is sharded.

    The patterns in ``xla.sharding`` have priority over the default rule, which
    :meth:`choose_shard_dim` describes.

    Args:
        config: Config of the run. The rules depend on ``strategy``, ``xla.sharding`` and
            ``xla.shard_param_on_dim_0``.
        shard_group_size: Number of devices over which one copy of the parameters is sharded.

    Attributes:
        is_sharding: Whether parameters may be sharded. False if ``strategy`` is ``no_shard``.

    Raises:
        UserError: If a pattern in ``xla.sharding`` is not a valid regular expression.
    """

    def __init__(self, config: RunConfig, shard_group_size: int) -> None:
        self._shard_group_size = shard_group_size
        self.is_sharding = config.strategy != "no_shard"
        self._prefers_first_dim = bool(config.xla.shard_param_on_dim_0)
        self._rules = [
            (compile_pattern("xla.sharding", p), p, dim) for p, dim in (config.xla.sharding or {}).items()
        ]
        self._unused_patterns = {pattern for _, pattern, _ in self._rules}
        self._table_dims: dict[tuple[int, ...], int] = {}

    def choose_shard_dim(self, name: str, shape: Sequence[int]) -> int | None:
        """Return the dim along which a parameter is sharded, or None if it is replicated.

        With the strategy ``no_shard``, all parameters are replicated. Otherwise, the first matching
        pattern in ``xla.sharding`` determines the dim. Matching patterns count as used in
        :meth:`check_unused_patterns`. If no pattern matches, the first applicable default rule
        determines the dim:

        1. Parameters with fewer than two dims are replicated, and so are parameters without a dim
           that is divisible by the shard group size.
        2. If ``xla.shard_param_on_dim_0`` is set, dim 0 is chosen if it is divisible.
        3. For an embedding table, the last dim is chosen if it is divisible. Parameters of the same
           shape in later calls are sharded along the same dim.
        4. The first divisible dim is chosen, except for dims that are more than ``_MAX_DIM_RATIO``
           times shorter than the longest divisible dim.

        Args:
            name: Name of the parameter.
            shape: Shape of the parameter.

        Raises:
            UserError: If ``xla.sharding`` specifies a dim that does not exist or is not divisible
                by the shard group size.
        """
        if not self.is_sharding:
            return None
        for pattern, text, dim in self._rules:
            if pattern.search(name):
                self._unused_patterns.discard(text)
                if dim is not None and (dim >= len(shape) or shape[dim] % self._shard_group_size):
                    raise UserError(
                        f"xla.sharding: {text!r} cannot shard dim {dim} of {name}, which has shape "
                        f"{list(shape)}, over {self._shard_group_size} devices; choose another dim, or "
                        "null to replicate the parameter"
                    )
                return dim
        divisible = [d for d, size in enumerate(shape) if size and size % self._shard_group_size == 0]
        # Replicate vectors: they are so small that gathering them would cost more than it saves.
        if not divisible or len(shape) < 2:
            return None
        if self._prefers_first_dim and 0 in divisible:
            return 0
        if _EMBEDDING_TABLES.search(name) and len(shape) - 1 in divisible:
            self._table_dims[tuple(shape)] = len(shape) - 1
        # Shard an untied head like the embedding table. The compiler broadcasts a scalar of the update once
        # for all tensors of a shape. If these were sharded along different dims, it would send the broadcast
        # scalar between devices.
        if tuple(shape) in self._table_dims:
            return self._table_dims[tuple(shape)]
        # Prefer the first dim unless it is short, like the dim of experts. The compiler reduces a gradient to
        # shards along a major dim. Along a minor dim, it may sum unsharded matrices on every device.
        longest = max(shape[d] for d in divisible)
        return next(d for d in divisible if shape[d] * _MAX_DIM_RATIO >= longest)

    def check_unused_patterns(self) -> None:
        """Raise UserError if a pattern in ``xla.sharding`` has not matched any parameter so far."""
        if self._unused_patterns:
            raise UserError(
                f"xla.sharding: {min(self._unused_patterns)!r} matches no parameter, or only parameters "
                "that an earlier pattern matches; correct or remove this pattern"
            )
