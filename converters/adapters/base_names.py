"""Locate a model's parameters in the files of its checkpoint.

transformers renames tensors when it loads a model, and stacks the experts of a layer into one
parameter. An adapter uses the names in memory, but its base model usually has published names.
`portable.converters.names` contains the rules.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.converters.errors import CheckpointError
from portable.converters.names.name_rules import iter_possible_rules
from portable.converters.names.published_names import are_memory_names, arrange_for_files, arrange_for_memory
from portable.converters.similar_names import find_similar_names
from portable.converters.tensors.arrangements import ZEROS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from portable.converters.tensors.arrangements import Arrangement, Tile
    from portable.converters.tensors.tensor import Shape, Tensor

# Names of the base model's module. They are optional, because the adapter or the base may lack the head.
_OUTER = re.compile(r"(model|transformer|bert|roberta|gpt_neox|decoder|encoder|base_model|backbone)\.")
_MAX_CANDIDATES = 20_000


@dataclass(frozen=True)
class RowRegion:
    """Range of rows of a parameter in memory, and their location in the files.

    The rows of a stack of experts are its first two dimensions, flattened. For other parameters, they
    are the first dimension.

    Attributes:
        tensor_name: Name of the tensor in the files.
        tensor_row: First row in this tensor.
        start_row: First row in the parameter.
        stop_row: End of the rows in the parameter, exclusive.
    """

    tensor_name: str
    tensor_row: int
    start_row: int
    stop_row: int


@dataclass(frozen=True)
class ParameterLocation:
    """Location of a parameter in the files.

    Attributes:
        shape: Shape of the parameter in memory.
        regions: Regions of the files that contain the rows of the parameter.
        identical_tensor: Name of the tensor in the files that is identical to the parameter. None if
            there is none.
    """

    shape: Shape
    regions: tuple[RowRegion, ...]
    identical_tensor: str | None = None


class _LiveParameters(NamedTuple):
    """Parameters of the base model when it is loaded with a specific class of transformers.

    Attributes:
        arrangements: Arrangement of each parameter, keyed by name.
        errors: Error message for each parameter that cannot be arranged, keyed by name.
        base_module: Name of the base model's module.
    """

    arrangements: Mapping[str, Arrangement]
    errors: Mapping[str, str]
    base_module: str


class BaseNameLookup:
    """Lookup of a base model's tensors by their names in memory.

    Args:
        tensors: Tensors of the base model, keyed by name.
        aliases: Tied tensors, as a mapping from alias to owner.
        config: The base model's `config.json`.
        adapted_shapes: Shapes of the parameters that the adapter changes, keyed by their names in
            memory.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        aliases: Mapping[str, str],
        config: Mapping[str, Any],
        adapted_shapes: Mapping[str, Shape],
    ) -> None:
        self.tensors = tensors
        self.aliases = aliases
        self._config = config
        self._adapted_shapes = adapted_shapes
        self._parameters_by_class: list[_LiveParameters] = []

    def find_parameter(self, live_name: str) -> ParameterLocation | None:
        """Find the location of a parameter in the files.

        Args:
            live_name: Name of the parameter in memory, or an alias of a tied tensor.

        Returns:
            The location, or None if the files do not contain the parameter.

        Raises:
            CheckpointError: If several tensors match the name, or if the parameter cannot be changed in the
                layout of the files.
        """
        names = [live_name, _OUTER.sub("", live_name, count=1)]
        for arrangements, errors, base in self._iter_parameters_by_class():
            for name in dict.fromkeys([*names, f"{base}.{live_name}"]):
                if name in errors:
                    raise CheckpointError(
                        f"{live_name!r}: {errors[name]}; load the adapter with peft instead"
                    )
                if name in arrangements:
                    return self._locate_arranged(live_name, arrangements[name])
        for name in names:
            if name in self._shapes:
                return self._locate_tensor(name)
        matches = self._names_by_suffix.get(live_name, ())
        if len(matches) > 1:
            raise CheckpointError(
                f"{live_name!r} is ambiguous: the base model contains {matches[0]!r} and {matches[1]!r}; "
                "load the adapter with peft instead"
            )
        return self._locate_tensor(matches[0]) if matches else None

    @cached_property
    def _shapes(self) -> dict[str, Shape]:
        shapes = {name: tensor.shape for name, tensor in self.tensors.items()}
        return shapes | {alias: shapes[owner] for alias, owner in self.aliases.items() if owner in shapes}

    def _iter_parameters_by_class(self) -> Iterator[_LiveParameters]:
        """Yield the parameters for each class that transformers may load the base model with.

        They are computed on demand and cached. The caller stops at the first class that has the required
        name.
        """
        yield from self._parameters_by_class
        for parameters in self._uncomputed_parameters:
            self._parameters_by_class.append(parameters)
            yield parameters

    @cached_property
    def _uncomputed_parameters(self) -> Iterator[_LiveParameters]:
        """Generator of the parameters for classes that have not been requested yet.

        All calls of `_iter_parameters_by_class` share the generator, so that each class is computed once.
        """
        for rules in iter_possible_rules(self._config):
            # If the base has names in memory, convert them to published names, because the adapter may have
            # published names.
            if are_memory_names(self._shapes, rules):
                yield _LiveParameters(arrange_for_files(self._shapes, rules), {}, rules.base)
                continue
            errors: dict[str, str] = {}
            arrangements = arrange_for_memory(
                self._shapes, rules, errors=errors, adapted_shapes=self._adapted_shapes
            )
            yield _LiveParameters(arrangements, errors, rules.base)

    def _locate_tensor(self, name: str) -> ParameterLocation:
        """Locate a parameter that is identical to a tensor in the files."""
        shape = self._shapes[name]
        return ParameterLocation(shape, (RowRegion(name, 0, 0, _count_rows(shape)),), name)

    def _locate_arranged(self, live_name: str, arrangement: Arrangement) -> ParameterLocation:
        """Locate a parameter that is arranged from tensors in the files."""
        identical = arrangement.find_identical_source(self._shapes.__getitem__)
        if identical is not None:
            return self._locate_tensor(identical)
        regions = [
            region
            for tile in arrangement.tiles
            for region in self._iter_tile_regions(live_name, arrangement.shape, tile)
        ]
        return ParameterLocation(
            arrangement.shape, tuple(sorted(regions, key=lambda region: region.start_row))
        )

    def _iter_tile_regions(self, live_name: str, shape: Shape, tile: Tile) -> Iterator[RowRegion]:
        """Yield the rows of a parameter that a tile fills, with their location in the files.

        Args:
            live_name: Name of the parameter in memory, used in error messages.
            shape: Shape of the parameter in memory.
            tile: Tile of the parameter's arrangement.

        Raises:
            CheckpointError: If the files store the elements in an order in which rows are not contiguous.
        """
        source_shape = self._shapes.get(tile.source, ())
        # Number of dimensions that are flattened to rows. See `RowRegion`.
        row_dims = 2 if len(shape) == 3 else 1
        source_row_dims = 2 if len(source_shape) == 3 else 1
        has_same_rows = (
            tile.source != ZEROS
            and set(tile.steps) <= {1}
            and tile.sizes[row_dims:] == shape[row_dims:] == source_shape[source_row_dims:]
            and tile.source_dims[row_dims:] == tuple(range(source_row_dims, len(source_shape)))
            and tile.source_dims[row_dims - 1] == source_row_dims - 1
        )
        if not has_same_rows:
            raise CheckpointError(
                f"{live_name!r}: cannot be merged, because the base stores its elements in a different "
                "order; convert the base with portable-convert --names live first"
            )
        count = tile.sizes[row_dims - 1]
        for i in range(tile.sizes[0] if row_dims == 2 else 1):
            start = (tile.starts[0] + i) * shape[1] + tile.starts[1] if row_dims == 2 else tile.starts[0]
            row = tile.source_starts[source_row_dims - 1]
            if source_row_dims == 2:
                expert = tile.source_starts[0] + (i if row_dims == 2 and tile.source_dims[0] == 0 else 0)
                row += expert * source_shape[1]
            yield RowRegion(tile.source, row, start, start + count)

    def find_similar_name(self, live_name: str) -> str:
        """Find the name in the files that is most similar to a name in memory.

        Args:
            live_name: Name of a parameter in memory.

        Returns:
            The name, or an empty string if none is similar.
        """
        names = list(self.tensors)
        suffix = live_name.split(".")[-2:]
        candidates = [name for name in names if name.split(".")[-2:] == suffix] or names
        return next(iter(find_similar_names(live_name, candidates[:_MAX_CANDIDATES])), "")

    @cached_property
    def _names_by_suffix(self) -> dict[str, list[str]]:
        """Lists of names in the files, keyed by the name without its first component."""
        names_by_suffix: dict[str, list[str]] = {}
        for name in self.tensors:
            names_by_suffix.setdefault(name.partition(".")[2], []).append(name)
        return names_by_suffix


def _count_rows(shape: Sequence[int]) -> int:
    """Count the rows of a parameter, as defined in `RowRegion`."""
    return prod(shape[:-1]) if len(shape) == 3 else shape[0] if shape else 1
