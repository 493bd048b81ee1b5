"""A shard of a stream: a file, a part of one, or tokens made ahead of time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from portable.data.sources.documents import Fields, Source


@dataclass(frozen=True)
class Shard:
    """One shard of a list.

    Attributes:
        open: its documents, as they are now, so that a change is seen.
        identity: what tells, without reading it, that it is the same on another machine.
        bytes: its length.
        tokens, fingerprint: of its tokens, where they are known beforehand.
    """

    open: Callable[[Fields], Source]
    identity: str
    bytes: int
    tokens: int | None = None
    fingerprint: str = ""
