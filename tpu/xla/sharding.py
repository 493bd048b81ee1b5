"""The dim along which each parameter is sharded over the devices."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from portable.errors import UserError
from portable.model.parameters import compile_pattern

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portable.config import RunConfig

HYBRID_STRATEGIES = ("hybrid_shard", "hybrid_shard_zero2")

# Lookup tables are sharded along the hidden dim, so that a lookup needs no rows of other devices.
_EMBEDDING_TABLES = re.compile(
    r"(^|\.)(embed_tokens|embed_positions|embed_in|embeddings|(word|position|token_type)_embeddings"
    r"|wte|wpe|shared|relative_attention_bias)(\.base_layer|\.original_module|\.modules_to_save\.default)?\.weight$"
)

_MAX_DIM_RATIO = 8
"""A dim is short beside one of this many times its size."""

LANES = 128
"""Values that a chip holds side by side: a row takes a multiple of them."""


def is_head_gradient_transposed(shard_width: int, shard_group_size: int) -> bool:
    """Whether the head's gradient is computed transposed, ``[hidden size, vocabulary]``.

    The compiler scatters along a major dim, but not along every minor one. But a turned gradient may cost
    memory: the update takes its layout, and then copies the state of all matrices of that shape.

    Args:
        shard_width: of a shard that is cut along the hidden dim.
        shard_group_size: devices that the head is sharded over.
    """
    return shard_group_size >= 8 or shard_width <= LANES


class ShardingRules:
    """The default rule of a run, and the exceptions of ``xla.sharding``.

    Args:
        config: strategy, ``xla.sharding`` and ``xla.shard_param_on_dim_0``.
        shard_group_size: number of devices that one copy of the state is sharded over.

    Raises:
        UserError: if a pattern of ``xla.sharding`` is not a regular expression.
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
        """The dim along which a parameter is sharded; None if it is replicated.

        Raises:
            UserError: if ``xla.sharding`` names a dim that is missing or not divisible by the group size.
        """
        if not self.is_sharding:
            return None
        for pattern, text, dim in self._rules:
            if pattern.search(name):
                self._unused_patterns.discard(text)
                if dim is not None and (dim >= len(shape) or shape[dim] % self._shard_group_size):
                    raise UserError(
                        f"xla.sharding: {text!r} cannot shard dim {dim} of {name}, of shape {list(shape)}, "
                        f"over {self._shard_group_size} devices; choose another dim, or null to replicate it"
                    )
                return dim
        divisible = [d for d, size in enumerate(shape) if size and size % self._shard_group_size == 0]
        # Vectors are too small for a collective to pay.
        if not divisible or len(shape) < 2:
            return None
        if self._prefers_first_dim and 0 in divisible:
            return 0
        if _EMBEDDING_TABLES.search(name) and len(shape) - 1 in divisible:
            self._table_dims[tuple(shape)] = len(shape) - 1
        # An untied head is sharded like the table before it. The compiler broadcasts a scalar of the update
        # once for all tensors of a shape; cut along two dims, it would send that from device to device.
        if tuple(shape) in self._table_dims:
            return self._table_dims[tuple(shape)]
        # The first dim, where it is no short one such as that of experts: a gradient is reduced to shards of
        # a major dim. Along a minor one, the compiler may add up whole matrices on every device.
        longest = max(shape[d] for d in divisible)
        return next(d for d in divisible if shape[d] * _MAX_DIM_RATIO >= longest)

    def check_unused_patterns(self) -> None:
        """Raise UserError for a pattern of ``xla.sharding`` that has matched no parameter so far."""
        if self._unused_patterns:
            raise UserError(
                f"xla.sharding: {min(self._unused_patterns)!r} matches no parameter, or only parameters that "
                "an earlier pattern matches; correct or remove it"
            )
