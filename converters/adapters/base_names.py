"""Locate a model's parameters in the files of its checkpoint.

When transformers loads a model, it renames tensors and stacks the experts of a layer into one
parameter. An adapter refers to the resulting names, the names in memory. The files of its base
model usually have the original names, as published on the Hub. `portable.converters.names` contains
the rules for both.
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

# Possible names of the module that contains the base model. The prefix is optional, because the adapter or
# the base may lack the head.
_OUTER = re.compile(r"(model|transformer|bert|roberta|gpt_neox|decoder|encoder|base_model|backbone)\.")
_MAX_CANDIDATES = 20_000


@dataclass(frozen=True)
class RowRegion:
    """Range of rows of a loaded parameter, and the position of these rows in a stored tensor.

    Rows are usually counted along the first dimension. In a stack of experts, rows are counted
    along the first two dimensions together. If each expert has `n` rows, row `i` of expert `e` has
    the index `e * n + i`.

    Attributes:
        tensor_name: Name of the stored tensor that contains the rows.
        tensor_row: Index of the range's first row in the stored tensor.
        start_row: Index of the range's first row in the parameter.
        stop_row: End of the range in the parameter, exclusive.
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
        identical_tensor: Name of the tensor in the files that is identical to the parameter, or an
            alias of this tensor if it is tied. None if there is none.
    """

    shape: Shape
    regions: tuple[RowRegion, ...]
    identical_tensor: str | None = None


class _LiveParameters(NamedTuple):
    """Parameters of the base model in memory, as one transformers model class would load them.

    The class matters because different classes may give different parameter names to the same
    tensors in the files.

    Attributes:
        arrangements: Arrangement of each parameter, keyed by the parameter's name. An arrangement
            lists the tensors in the files from which the parameter is assembled, and contains its
            shape.
        errors: Error message for each parameter that cannot be assembled, keyed by the parameter's
            name.
        base_module: Name of the module that contains the model without its head.
    """

    arrangements: Mapping[str, Arrangement]
    errors: Mapping[str, str]
    base_module: str


class BaseNameLookup:
    """Lookup of a base model's tensors by their names in memory.

    A name in memory is the name of a parameter after transformers has loaded the model. It may
    differ from the name in the files.

    Args:
        tensors: Tensors of the base model, keyed by their names in the files.
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

        The name is also found if its prefix differs from the name in the base model. For example,
        `layers.0.mlp.weight` finds `model.layers.0.mlp.weight`, because an adapter or a base model
        without a head may lack the prefix.

        Args:
            live_name: Name of the parameter in memory, or an alias of a tied tensor.

        Returns:
            The location, or None if the files do not contain the parameter.

        Raises:
            CheckpointError: If several tensors match the name, or if the parameter cannot be
                changed in the layout of the files.
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
        """Yield the base model's parameters for each model class that transformers may load.

        The class in `config.json` comes first, then the other classes of the model type, and then
        the classes of the nested text config. Classes with the same name rules are yielded once.
        The parameters of each class are computed on demand and cached. The caller stops at the
        first class that has a parameter with the required name.
        """
        yield from self._parameters_by_class
        for parameters in self._uncomputed_parameters:
            self._parameters_by_class.append(parameters)
            yield parameters

    @cached_property
    def _uncomputed_parameters(self) -> Iterator[_LiveParameters]:
        """Generator that yields the base model's parameters for each possible model class.

        The parameters have their names in memory. If the files already contain these names, they have
        published names instead, because the adapter may use published names.

        Classes with the same name rules share one item. An item is computed when it is requested.
        All calls of `_iter_parameters_by_class` share this generator, so each item is computed only
        once.
        """
        for rules in iter_possible_rules(self._config):
            # If the files already contain names in memory, convert them to published names, because the
            # adapter may have published names.
            if are_memory_names(self._shapes, rules):
                yield _LiveParameters(arrange_for_files(self._shapes, rules), {}, rules.base)
                continue
            errors: dict[str, str] = {}
            arrangements = arrange_for_memory(
                self._shapes, rules, errors=errors, adapted_shapes=self._adapted_shapes
            )
            yield _LiveParameters(arrangements, errors, rules.base)

    def _locate_tensor(self, name: str) -> ParameterLocation:
        """Return the location of a parameter that is stored as one complete tensor in the files.

        Args:
            name: Name of the tensor in the files, or an alias of a tied tensor.
        """
        shape = self._shapes[name]
        return ParameterLocation(shape, (RowRegion(name, 0, 0, _count_rows(shape)),), name)

    def _locate_arranged(self, live_name: str, arrangement: Arrangement) -> ParameterLocation:
        """Return the location of a parameter that is assembled from tensors in the files.

        For example, a stack of experts is assembled from one tensor per expert.

        Args:
            live_name: Name of the parameter in memory, used in error messages.
            arrangement: Shape of the parameter and the tensors that fill it.

        Raises:
            CheckpointError: If the files store the elements in an order in which rows are not
                contiguous.
        """
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
        """Yield a `RowRegion` for each range of parameter rows that a tile fills.

        A tile copies a region of one stored tensor to a region of the parameter. In a stack of
        experts, each expert is a separate range of rows.

        Args:
            live_name: Name of the parameter in memory, used in error messages.
            shape: Shape of the parameter in memory.
            tile: One of the tiles from which the parameter is assembled.

        Raises:
            CheckpointError: If the files store the elements in an order in which rows are not
                contiguous.
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
                f"{live_name!r}: cannot be merged, because the files of the base model store the elements "
                "of this weight in a different order; convert the base model with portable-convert --names "
                "live, and merge the adapter into the result"
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
        """Names in the files, grouped by the part of the name after its first component."""
        names_by_suffix: dict[str, list[str]] = {}
        for name in self.tensors:
            names_by_suffix.setdefault(name.partition(".")[2], []).append(name)
        return names_by_suffix


def _count_rows(shape: Sequence[int]) -> int:
    """Count the rows of a parameter, as defined in `RowRegion`."""
    return prod(shape[:-1]) if len(shape) == 3 else shape[0] if shape else 1
