"""Configurations of public repositories: their shapes, in our own text, with the expected result of each.

``deepspeed.json`` and ``accelerate.json`` have the keys and values that matter, one shape per line. Blocks
that many shapes have in common are written once: ``"<name>"`` is such a block, and ``"...": ["name"]``
inserts its keys. The YAML files have keys that no published file has, with the expected result of each.
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
    """The relevant keys and values of one published file, or of several similar ones.

    Attributes:
        name: Name of the shape.
        config: Content of the file.
        seen: Repository and file with the pattern.
        beside: Additional settings of the run, by dotted key.
        comes_to: Expected settings of the run, in addition to the comparison with the other program.
        apart: Settings that differ from the other program, as reported by a note.
        told: Words of each expected note.
        refused: Regular expression of the expected error, or empty if the file is accepted.
        why: Reason for the error. With ``DeepSpeed`` or ``Accelerate``, that parser rejects the file as well.
        ranks: Number of ranks of the run.
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
    """Return the shapes of the file ``name`` in this folder."""
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
    """Return the nested mappings of a key with the dotted path ``name``."""
    for part in reversed(name.split(".")):
        value = {part: value}
    return dict(value)
