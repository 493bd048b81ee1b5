"""Configurations of public repositories: their shapes, written anew, with what should become of each.

``deepspeed.json`` and ``accelerate.json`` hold the keys and values that matter, one shape a line. Blocks that
many have in common stand once: ``"<name>"`` is such a block, and ``"...": ["name"]`` puts its keys in.
The YAML files have keys that no published file shows, with what each must come to.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True)
class Shape:
    """The keys and values that matter of one published file, or of several alike.

    Attributes:
        name: of the shape.
        config: what the file says.
        seen: repository and file where the pattern was seen.
        beside: settings of the run, by dotted key.
        comes_to: some settings of the run that it becomes, beside what is compared with the other program.
        apart: what is not as the other program has it, as a note says.
        told: words of the notes that a person is given; none is left out.
        refused: a regular expression that the refusal's line matches; empty where the file is taken.
        why: the reason for the refusal. ``DeepSpeed`` or ``Accelerate``: its own parser refuses as well.
        ranks: that the run has.
    """

    name: str
    config: dict[str, Any]
    seen: str = ""
    beside: dict[str, Any] = field(default_factory=dict)
    comes_to: dict[str, Any] = field(default_factory=dict)
    apart: Sequence[str] = ()
    told: Sequence[str] = ()
    refused: str = ""
    why: str = ""
    ranks: int = 8


def shapes(name: str) -> list[Shape]:
    """Those of the file ``name`` in this folder."""
    text = (Path(__file__).parent / name).read_text()
    found = {"shapes": yaml.safe_load(text)} if name.endswith(".yaml") else json.loads(text)
    blocks = found.get("blocks", {})

    def whole(value: Any) -> Any:
        if isinstance(value, str) and value.startswith("<"):
            return whole(blocks[value.strip("<>")])
        if not isinstance(value, dict):
            return value
        around = {key: item for part in value.get("...", ()) for key, item in whole(blocks[part]).items()}
        return around | {key: whole(item) for key, item in value.items() if key != "..."}

    named = ({"name": json.dumps(shape["config"]), **shape} for shape in found["shapes"])
    return [Shape(**{**shape, "config": whole(shape["config"])}) for shape in named]


def tree(name: str, value: Any) -> dict[str, Any]:
    """The mappings around a key of which ``name`` is the dotted path."""
    for part in reversed(name.split(".")):
        value = {part: value}
    return dict(value)
