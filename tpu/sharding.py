"""Along which dim a parameter is cut over the devices."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from portable.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portable.config import RunConfig

HYBRID = ("hybrid_shard", "hybrid_shard_zero2")

# Lookup tables are cut along the hidden dim, so that looking a token up needs no other device's rows.
_TABLES = re.compile(
    r"(^|\.)(embed_tokens|embed_positions|embed_in|embeddings|(word|position|token_type)_embeddings"
    r"|wte|wpe|shared|relative_attention_bias)\.weight$"
)


class Cuts:
    """The rule of a run, with the exceptions that ``xla.sharding`` makes.

    Args:
        config: strategy, ``xla.sharding`` and ``xla.shard_param_on_dim_0``.
        group: devices that share one copy of the state.

    Raises:
        UserError: if a pattern of ``xla.sharding`` is no regular expression.
    """

    def __init__(self, config: RunConfig, group: int) -> None:
        self._group = group
        self.sharded = config.strategy != "no_shard"
        self._first_dim = bool(config.xla.shard_param_on_dim_0)
        self._rules = [(_compiled(p), p, dim) for p, dim in (config.xla.sharding or {}).items()]
        self._unused = {pattern for _, pattern, _ in self._rules}

    def dim(self, name: str, shape: Sequence[int]) -> int | None:
        """The dim of a parameter that is cut; None: it is whole on every device.

        Raises:
            UserError: if ``xla.sharding`` names a dim that the parameter lacks or that does not divide.
        """
        if not self.sharded:
            return None
        for pattern, text, dim in self._rules:
            if pattern.search(name):
                self._unused.discard(text)
                if dim is not None and (dim >= len(shape) or shape[dim] % self._group):
                    raise UserError(
                        f"xla.sharding: {text!r} wants dim {dim} of {name} cut into {self._group}, and its "
                        f"shape is {list(shape)}; choose another dim, or null to keep it whole"
                    )
                return dim
        divisible = [d for d, size in enumerate(shape) if size and size % self._group == 0]
        # A vector is too small to be worth a collective.
        if not divisible or len(shape) < 2:
            return None
        if self._first_dim and 0 in divisible:
            return 0
        if _TABLES.search(name) and len(shape) - 1 in divisible:
            return len(shape) - 1
        return max(divisible, key=lambda d: shape[d])

    def check_rules(self) -> None:
        """Raise UserError for a pattern of ``xla.sharding`` that no parameter so far has matched."""
        if self._unused:
            raise UserError(
                f"xla.sharding: {min(self._unused)!r} is found in no parameter's name, or only where an "
                "earlier pattern is; correct or remove it"
            )


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise UserError(f"xla.sharding: {pattern!r} is no regular expression ({error})") from error
