"""Configurations of public repositories: their shapes, written anew, with what should become of each.

``deepspeed.json`` and ``accelerate.json`` hold the keys and values that matter, one shape a line. Blocks that
many have in common stand once: ``"<name>"`` is such a block, and ``"...": ["name"]`` puts its keys in.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Shape:
    """The keys and values that matter of one published file, or of several alike.

    Attributes:
        name: of the shape.
        seen: repository and file where the pattern was seen.
        config: what the file says.
        told: words of the notes that a person is given; none is left out.
        refused: a regular expression that the refusal's line matches; empty where the file is taken.
        why: the reason for the refusal. ``DeepSpeed`` or ``Accelerate``: its own parser refuses as well.
        ranks: that the run has.
    """

    name: str
    seen: str
    config: dict[str, Any]
    told: tuple[str, ...] = ()
    refused: str = ""
    why: str = ""
    ranks: int = 8


def shapes(name: str) -> list[Shape]:
    """Those of the file ``name`` in this folder."""
    found = json.loads((Path(__file__).parent / name).read_text())
    blocks = found.get("blocks", {})

    def whole(value: Any) -> Any:
        if isinstance(value, str) and value.startswith("<"):
            return whole(blocks[value.strip("<>")])
        if not isinstance(value, dict):
            return value
        around = {key: item for part in value.get("...", ()) for key, item in whole(blocks[part]).items()}
        return around | {key: whole(item) for key, item in value.items() if key != "..."}

    return [
        Shape(**{**shape, "config": whole(shape["config"]), "told": tuple(shape.get("told", ()))})
        for shape in found["shapes"]
    ]
