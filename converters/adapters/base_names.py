"""Locations of a model's parameters in the files of its checkpoint.

transformers renames tensors when it loads a model, and stacks the experts of a layer into one parameter. An
adapter has the names in memory, but its base model usually has published names. `portable.converters.names`
contains the rules.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.converters.errors import CheckpointError
from portable.converters.names.name_rules import iterate_possible_rules
from portable.converters.names.published_names import are_live, arrange_for_files, arrange_for_memory
from portable.converters.similar_names import find_similar
from portable.converters.tensors.arrangements import ZEROS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from portable.converters.tensors.arrangements import Arrangement, Tile
    from portable.converters.tensors.tensor import Shape, Tensor

# Names of the base model's module. They are optional, because the adapter or the base may lack the head.
_OUTER = re.compile(r"(model|transformer|bert|roberta|gpt_neox|decoder|encoder|base_model|backbone)\.")
_MAX_CANDIDATES = 20_000


@dataclass(frozen=True)
class Region:
    """A range of rows of a parameter in memory, and their location in the files.

    The rows of a stack of experts are its first two dimensions, flattened. Otherwise, the rows are the first
    dimension.

    Attributes:
        name: Name of the tensor in the files.
        row: First row in this tensor.
        start: First row in the parameter.
        stop: End of the rows in the parameter, exclusive.
    """

    name: str
    row: int
    start: int
    stop: int


@dataclass(frozen=True)
class Found:
    """The location of a parameter in the files.

    Attributes:
        shape: Shape of the parameter in memory.
        regions: Regions of the files that contain the rows of the parameter.
        whole: Name of the tensor in the files that is identical to the parameter, or None.
    """

    shape: Shape
    regions: tuple[Region, ...]
    whole: str | None = None


class _LiveParameters(NamedTuple):
    """The parameters that the base has if it is loaded with one class of transformers.

    Attributes:
        arrangements: Arrangement of each parameter, keyed by name.
        errors: Error message for each parameter that cannot be arranged, keyed by name.
        base: Name of the base model's module.
    """

    arrangements: Mapping[str, Arrangement]
    errors: Mapping[str, str]
    base: str


class BaseNames:
    """Lookup of a base model's tensors by their names in memory.

    Args:
        tensors: Tensors of the base model, keyed by name.
        aliases: Tied tensors, as a mapping from alias to owner.
        config: The base model's `config.json`.
        adapted: Shapes of the parameters that the adapter changes, keyed by the name in memory.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        aliases: Mapping[str, str],
        config: Mapping[str, Any],
        adapted: Mapping[str, Shape],
    ) -> None:
        self.tensors = tensors
        self.aliases = aliases
        self._config = config
        self._adapted = adapted
        self._computed: list[_LiveParameters] = []

    def find(self, live: str) -> Found | None:
        """Find a parameter in the files.

        Args:
            live: Name of the parameter in memory. May be an alias of a tied tensor.

        Returns:
            The location of the parameter, or None if the files do not contain the parameter.

        Raises:
            CheckpointError: If several tensors match the name, or if the parameter cannot be changed in the
                layout of the files.
        """
        names = [live, _OUTER.sub("", live, count=1)]
        for arrangements, errors, base in self._iterate_parameters():
            for name in dict.fromkeys([*names, f"{base}.{live}"]):
                if name in errors:
                    raise CheckpointError(f"{live!r}: {errors[name]}")
                if name in arrangements:
                    return self._locate(live, arrangements[name])
        for name in names:
            if name in self._shapes:
                return self._locate_tensor(name)
        matches = self._names_by_suffix.get(live, ())
        if len(matches) > 1:
            raise CheckpointError(f"{live!r} could be {matches[0]!r} or {matches[1]!r}")
        return self._locate_tensor(matches[0]) if matches else None

    @cached_property
    def _shapes(self) -> dict[str, Shape]:
        shapes = {name: tensor.shape for name, tensor in self.tensors.items()}
        return shapes | {alias: shapes[owner] for alias, owner in self.aliases.items() if owner in shapes}

    def _iterate_parameters(self) -> Iterator[_LiveParameters]:
        """Yield the parameters for each class with which transformers may load the base.

        The parameters of a class are only computed if the previous classes do not have the name that is
        searched.
        """
        yield from self._computed
        for parameters in self._remaining:
            self._computed.append(parameters)
            yield parameters

    @cached_property
    def _remaining(self) -> Iterator[_LiveParameters]:
        for rules in iterate_possible_rules(self._config):
            # If the base has names in memory, convert them to published names, which the adapter may have.
            if are_live(self._shapes, rules):
                yield _LiveParameters(arrange_for_files(self._shapes, rules), {}, rules.base)
                continue
            errors: dict[str, str] = {}
            arrangements = arrange_for_memory(self._shapes, rules, errors=errors, adapted=self._adapted)
            yield _LiveParameters(arrangements, errors, rules.base)

    def _locate_tensor(self, name: str) -> Found:
        """Locate a parameter that is identical to a tensor in the files."""
        shape = self._shapes[name]
        return Found(shape, (Region(name, 0, 0, _count_rows(shape)),), name)

    def _locate(self, live: str, values: Arrangement) -> Found:
        """Locate a parameter that is arranged from tensors in the files."""
        identical = values.find_identical_source(self._shapes.__getitem__)
        if identical is not None:
            return self._locate_tensor(identical)
        regions = [region for tile in values.tiles for region in self._find_regions(live, values.shape, tile)]
        return Found(values.shape, tuple(sorted(regions, key=lambda region: region.start)))

    def _find_regions(self, live: str, shape: Shape, tile: Tile) -> Iterator[Region]:
        """Yield the regions of a tile.

        Raises:
            CheckpointError: If the files store the elements of a row in a different order.
        """
        source_shape = self._shapes.get(tile.source, ())
        # Number of dimensions that are flattened to rows, see `Region`.
        row_dims = 2 if len(shape) == 3 else 1
        source_row_dims = 2 if len(source_shape) == 3 else 1
        has_same_rows = (
            tile.source != ZEROS
            and set(tile.steps) <= {1}
            and tile.sizes[row_dims:] == shape[row_dims:] == source_shape[source_row_dims:]
            and tile.dims[row_dims:] == tuple(range(source_row_dims, len(source_shape)))
            and tile.dims[row_dims - 1] == source_row_dims - 1
        )
        if not has_same_rows:
            raise CheckpointError(
                f"{live!r}: cannot be merged, because the base stores its elements in a different order; "
                "convert the base with portable-convert --names live first"
            )
        count = tile.sizes[row_dims - 1]
        for i in range(tile.sizes[0] if row_dims == 2 else 1):
            start = (tile.at[0] + i) * shape[1] + tile.at[1] if row_dims == 2 else tile.at[0]
            row = tile.lows[source_row_dims - 1]
            if source_row_dims == 2:
                expert = tile.lows[0] + (i if row_dims == 2 and tile.dims[0] == 0 else 0)
                row += expert * source_shape[1]
            yield Region(tile.source, row, start, start + count)

    def find_similar_name(self, live: str) -> str:
        """Find the name in the files that is most similar to a name in memory.

        Args:
            live: Name of a parameter in memory.

        Returns:
            The most similar name, or an empty string if no name is similar.
        """
        names = list(self.tensors)
        suffix = live.split(".")[-2:]
        candidates = [name for name in names if name.split(".")[-2:] == suffix] or names
        return next(iter(find_similar(live, candidates[:_MAX_CANDIDATES])), "")

    @cached_property
    def _names_by_suffix(self) -> dict[str, list[str]]:
        """Names in the files, keyed by the name without its first module."""
        names_by_suffix: dict[str, list[str]] = {}
        for name in self.tensors:
            names_by_suffix.setdefault(name.partition(".")[2], []).append(name)
        return names_by_suffix


def _count_rows(shape: Sequence[int]) -> int:
    """Count the rows of a parameter, see `Region`."""
    return prod(shape[:-1]) if len(shape) == 3 else shape[0] if shape else 1
