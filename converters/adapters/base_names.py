"""Where a parameter of a model in memory lies in the files of its checkpoint.

transformers renames tensors while it loads them, and stacks the experts of a layer into one parameter. An
adapter has the names in memory, its base mostly has published names. `converters.names` holds the rules.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from converters.errors import CheckpointError
from converters.names.name_rules import possible_rules
from converters.names.published import are_live, to_files, to_memory
from converters.tensors.arranged import ZEROS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from converters.tensors.arranged import Arrangement, Tile
    from converters.tensors.tensor import Shape, Tensor

# Modules of a base model, which an adapter for a model with a head has in front, or the other way round.
_OUTER = re.compile(r"(model|transformer|bert|roberta|gpt_neox|decoder|encoder|base_model|backbone)\.")
_NEAREST = 20_000


@dataclass(frozen=True)
class Region:
    """Rows of a tensor in the files that hold rows of a parameter in memory.

    For a stack of experts, the first two dimensions together count as rows. Otherwise, only the first does.

    Attributes:
        name: Name of the tensor in the files.
        row: First row in this tensor.
        start: First row in the parameter.
        stop: Row after the last one in the parameter.
    """

    name: str
    row: int
    start: int
    stop: int


@dataclass(frozen=True)
class Found:
    """A parameter in memory.

    Attributes:
        shape: Its shape.
        regions: The regions of the files that hold its rows.
        whole: Name of the tensor in the files that is identical to it, or None.
    """

    shape: Shape
    regions: tuple[Region, ...]
    whole: str | None = None


class _Arranged(NamedTuple):
    """The parameters of the base as one class of models has them.

    Attributes:
        arranged: The arrangement of each parameter, by name.
        refused: Parameters that cannot be arranged, with the reason.
        base: Name of the base model's module.
    """

    arranged: Mapping[str, Arrangement]
    refused: Mapping[str, str]
    base: str


class BaseNames:
    """The tensors of a base model, found by their names in memory.

    Args:
        tensors: The tensors of the base.
        aliases: Other names of tied tensors.
        config: The base's `config.json`.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], aliases: Mapping[str, str], config: Mapping[str, Any]
    ) -> None:
        self.tensors = tensors
        self.aliases = aliases
        self._config = config
        self._arranged: list[_Arranged] = []

    def find(self, live: str) -> Found | None:
        """Return the parameter of this name in memory, or None if the files hold nothing like it.

        A tied alias is found under its own name.

        Raises:
            CheckpointError: The name could mean several tensors, or the parameter is stored in a form in
                which it cannot be changed.
        """
        names = [live, _OUTER.sub("", live, count=1)]
        for arranged, refused, base in self._arrangements():
            for name in dict.fromkeys([*names, f"{base}.{live}"]):
                if name in refused:
                    raise CheckpointError(f"{live!r}: {refused[name]}")
                if name in arranged:
                    return self._found(live, arranged[name])
        for name in names:
            if name in self._shapes:
                return self._whole(name)
        below = self._suffixes.get(live, ())
        if len(below) > 1:
            raise CheckpointError(f"{live!r} could be {below[0]!r} or {below[1]!r}")
        return self._whole(below[0]) if below else None

    @cached_property
    def _shapes(self) -> dict[str, Shape]:
        shapes = {name: tensor.shape for name, tensor in self.tensors.items()}
        return shapes | {alias: shapes[owner] for alias, owner in self.aliases.items() if owner in shapes}

    def _arrangements(self) -> Iterator[_Arranged]:
        """Yield the parameters in memory for each class that the base may be opened as.

        Each is computed when the ones before do not have a name.
        """
        yield from self._arranged
        for made in self._following:
            self._arranged.append(made)
            yield made

    @cached_property
    def _following(self) -> Iterator[_Arranged]:
        for rules in possible_rules(self._config):
            if are_live(self._shapes, rules):  # the adapter may have the names of the files
                yield _Arranged(to_files(self._shapes, rules), {}, rules.base)
                continue
            refused: dict[str, str] = {}
            arranged = to_memory(self._shapes, rules, refused=refused)
            yield _Arranged(arranged, refused, rules.base)

    def _whole(self, name: str) -> Found:
        shape = self._shapes[name]
        return Found(shape, (Region(name, 0, 0, _rows(shape)),), name)

    def _found(self, live: str, values: Arrangement) -> Found:
        whole = values.whole(self._shapes.__getitem__)
        if whole is not None:
            return self._whole(whole)
        regions = [region for tile in values.tiles for region in self._regions(live, values.shape, tile)]
        return Found(values.shape, tuple(sorted(regions, key=lambda region: region.start)))

    def _regions(self, live: str, shape: Shape, tile: Tile) -> Iterator[Region]:
        """Yield the rows of a tile."""
        stored = self._shapes.get(tile.source, ())
        rank = len(shape)
        inner = 2 if rank == 3 else 1  # number of dimensions that make up the rows
        outer = 2 if len(stored) == 3 else 1
        same = (
            tile.source != ZEROS
            and set(tile.steps) <= {1}
            and tile.sizes[inner:] == shape[inner:] == stored[outer:]
            and tile.dims[inner:] == tuple(range(outer, len(stored)))
            and tile.dims[inner - 1] == outer - 1
        )
        if not same:
            raise CheckpointError(
                f"{live!r} is stored in another order of its elements, in which it cannot be changed; merge "
                "into a base in the layout that transformers uses in memory (portable-convert --names live)"
            )
        count = tile.sizes[inner - 1]
        for i in range(tile.sizes[0] if inner == 2 else 1):
            start = (tile.at[0] + i) * shape[1] + tile.at[1] if inner == 2 else tile.at[0]
            row = tile.lows[outer - 1]
            if outer == 2:
                row += (tile.lows[0] + (i if inner == 2 and tile.dims[0] == 0 else 0)) * stored[1]
            yield Region(tile.source, row, start, start + count)

    def nearest(self, live: str) -> str:
        """The name in the files that is most like `live`; `""` if none is."""
        names = list(self.tensors)
        tail = live.split(".")[-2:]
        alike = [name for name in names if name.split(".")[-2:] == tail] or names
        return next(iter(get_close_matches(live, alike[:_NEAREST], 1, 0.3)), "")

    @cached_property
    def _suffixes(self) -> dict[str, list[str]]:
        """Live name -> the names that have one module more above it."""
        found: dict[str, list[str]] = {}
        for name in self.tensors:
            found.setdefault(name.partition(".")[2], []).append(name)
        return found


def _rows(shape: Sequence[int]) -> int:
    """The rows of a parameter: see `Region`."""
    return prod(shape[:-1]) if len(shape) == 3 else shape[0] if shape else 1
