"""Initial weights that are computed lazily, one slice at a time.

While a model is built, :class:`InitializationRecording` creates large tensors without values
(torch's fake tensors) and records the operations that initialize them. Constructors,
``_init_weights`` and custom code run unchanged. Afterwards, each rank computes only the elements of
its shards. Every tensor is divided into fixed tiles, and each tile has a separate random seed, so
an element depends only on the seed and its position, not on the sharding.

Operations that need complete tensors, such as the QR decomposition of an orthogonal initialization,
are an exception. Whenever a slice of their result is read, the complete result is computed.

Values are recorded per storage: a storage has a list of writes, each of which changes a range of
its elements. To compute a tile, the writes that overlap it are replayed in order.
"""

from __future__ import annotations

import hashlib
import math
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from portable.model.weight_sources import ComputedTensor, SlicedTensor
from portable.private import torch_internals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from portable.model.weight_sources import Index, ReadableTensor

MIN_RECORDED_ELEMENTS = 1 << 14
"""Minimum number of elements of a recorded tensor. Smaller tensors are created with values."""
_MAX_TILE_ELEMENTS = 1 << 12
"""Maximum number of elements of a tile. A tile is a part of one row, or consists of several complete rows."""


class RecordingError(Exception):
    """Error raised if a model's constructor uses an operation that cannot be recorded."""


@dataclass(frozen=True, eq=False)
class _RecordedWrite:
    """Recorded operation that changes the elements ``start`` to ``stop`` of a storage.

    A storage is divided into tiles, which are blocks of consecutive elements. When elements of the
    storage are read, most recorded operations are computed tile by tile. An operation of the kind
    ``"complete"`` needs complete tensors instead.

    Attributes:
        previous: Preceding write to the storage. None if all elements were zero before, or if this
            write replaces all elements.
        start: Index in the storage of the first changed element.
        stop: Index in the storage after the last changed element.
        operation: ATen operation, or a function with the same interface.
        arguments: Positional arguments of the operation, with a :class:`_RecordedView` for each
            recorded tensor.
        keywords: Keyword arguments of the operation, with a :class:`_RecordedView` for each
            recorded tensor.
        kind: ``"elementwise"``, ``"in place"`` (elementwise on its first argument), ``"random"``
            (in place, with a generator) or ``"complete"`` (on complete tensors).
        first_tile: Number of the storage's first tile in this write. The following tiles have the
            following numbers. Random seeds are derived from these numbers. Used only for the kinds
            ``"random"`` and ``"complete"``, whose tile numbers are not used by any other such write of
            the recording.
        result_index: Source of the values that this write stores. ``i`` means output ``i`` of the
            operation. ``-1 - i`` means tensor argument ``i``, which the operation changes in place.
            Used only for the kind ``"complete"``.
        shape: Shape of the output. Used only for the kind ``"complete"``.
        stride: Strides of the output in the storage. Used only for the kind ``"complete"``.
        storage_size: Number of elements of the storage.
    """

    previous: _RecordedWrite | None
    start: int
    stop: int
    operation: Any
    arguments: tuple[Any, ...] = ()
    keywords: dict[str, Any] | None = None
    kind: str = "in place"
    first_tile: int = 0
    result_index: int = 0
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    storage_size: int = 0


class _TileRange(NamedTuple):
    """Tile of a storage: its number, and its range of elements from ``start`` to ``stop``.

    A tile is a block of consecutive elements. Every storage is divided into tiles, and its values
    are computed tile by tile.
    """

    number: int
    start: int
    stop: int


@dataclass(eq=False)
class _RecordedStorage:
    """Storage of a fake tensor, with the writes that determine its values.

    Attributes:
        storage: Untyped torch storage. Keeping the reference ensures that no other storage gets the
            same id.
        columns: Row length, in elements. This is the last dimension of the tensor that created the
            storage. If that tensor is not contiguous or has fewer than two dimensions, the complete
            storage is one row.
        size: Number of elements.
        dtype: Dtype of the elements.
        last_write: Latest write, which refers to the earlier writes. None if nothing was written
            yet. All elements are then zero.
    """

    storage: Any
    columns: int
    size: int
    dtype: torch.dtype
    last_write: _RecordedWrite | None = None

    def iter_tiles(self, start: int, stop: int) -> Iterator[_TileRange]:
        """Yield the tiles that overlap the elements ``start`` to ``stop``, in order.

        If a row is larger than the tile size, a tile is a part of one row. Otherwise, it consists
        of one or more complete rows. The first and the last tile may extend beyond the range.
        """
        while start < stop:
            if self.columns >= _MAX_TILE_ELEMENTS:
                per_row = -(-self.columns // _MAX_TILE_ELEMENTS)
                row, column = divmod(start, self.columns)
                index = column // _MAX_TILE_ELEMENTS
                first = row * self.columns + index * _MAX_TILE_ELEMENTS
                last = min(first + _MAX_TILE_ELEMENTS, (row + 1) * self.columns)
                yield _TileRange(row * per_row + index, first, last)
            else:
                length = _MAX_TILE_ELEMENTS // self.columns * self.columns
                number = start // length
                first, last = number * length, min((number + 1) * length, self.size)
                yield _TileRange(number, first, last)
            start = last

    def count_tiles(self) -> int:
        """Return the number of tiles into which the storage is divided, including incomplete tiles.

        A tile consists of several complete rows or of a part of one row. See :meth:`iter_tiles`.
        """
        if self.columns >= _MAX_TILE_ELEMENTS:
            return self.size // self.columns * -(-self.columns // _MAX_TILE_ELEMENTS)
        return -(-self.size // (_MAX_TILE_ELEMENTS // self.columns * self.columns))


@dataclass(frozen=True, eq=False)
class _RecordedView:
    """Reference to a recorded tensor at one point in the recording, such as the call of an operation.

    Attributes:
        storage: Storage of the tensor.
        last_write: Latest write to the storage at this point. Later writes do not affect the
            view. None if nothing was written yet. All elements are then zero.
        shape: Shape of the tensor.
        stride: Strides of the tensor in elements.
        offset: Index of the tensor's first element in the storage.
    """

    storage: _RecordedStorage
    last_write: _RecordedWrite | None
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class InitializationRecording:
    """Recording of the operations that initialize the large tensors of a model.

    The model is built within :meth:`record_operations`. Then :meth:`build_deferred_tensor` returns
    the values of a tensor, which are computed when they are read.

    Args:
        seed: Random seed.
        min_elements: Minimum number of elements of a new tensor that is recorded. Such a tensor
            must be created on the CPU, without a generator, by a function such as ``torch.empty``
            or ``torch.randn``. Results of operations on recorded tensors are recorded regardless of
            their size.
    """

    def __init__(self, seed: int, *, min_elements: int = MIN_RECORDED_ELEMENTS) -> None:
        self._min_elements = min_elements
        digest = hashlib.sha256(str(seed).encode()).digest()
        self._seed_keys = [int.from_bytes(digest[i : i + 4], "little") for i in range(0, 12, 4)]
        self._storages: dict[int, _RecordedStorage] = {}
        self._num_tiles = 0
        self._generator = torch.Generator()

    @cached_property
    def _fake_tensors(self) -> Any:
        """Torch's fake tensor mode, in which operations compute only shapes.

        The mode is created on first access, because importing it takes a second.
        """
        return torch_internals.create_fake_tensor_mode(allow_non_fake_inputs=True)

    @contextmanager
    def record_operations(self) -> Iterator[None]:
        """Create large tensors without values, and record the operations on them.

        The recording ends with the context. In the context, a torch dispatch mode intercepts all
        ATen operations, and ``torch.nn.init.trunc_normal_`` is patched.

        Raises:
            RecordingError: If an operation in the context cannot be recorded.
        """
        with (
            torch_internals.replace_truncated_normal(self._record_truncated_normal),
            torch_internals.intercept_operations(self._run_and_record),
        ):
            yield

    def is_recorded(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a fake tensor of this recording, which has no values yet."""
        return self._find_storage(tensor) is not None

    def build_deferred_tensor(self, tensor: Tensor) -> ReadableTensor:
        """Return a tensor whose elements are computed only when they are read.

        They are the current values of ``tensor``: operations that are recorded later do not change
        them.

        Args:
            tensor: Recorded tensor. An ordinary tensor, which already has values, is wrapped
                without a copy.

        Raises:
            RecordingError: If the tensor is on the meta device but not recorded, or if it
                reinterprets a recorded tensor as a different dtype.
        """
        storage = self._find_storage(tensor)
        if storage is None:
            if tensor.is_meta:
                raise RecordingError(
                    "the model creates a tensor on the meta device, which is not supported; remove the "
                    "device argument"
                )
            return ComputedTensor.from_tensor(tensor)
        view = self._build_view(tensor, storage)
        return SlicedTensor(tensor.shape, partial(self._compute_slice, view))

    # -- recording ---------------------------------------------------------------------------------------

    def _find_storage(self, tensor: Tensor) -> _RecordedStorage | None:
        """Return the recorded storage of a tensor, or None if the tensor is not recorded."""
        if not self._storages or not torch_internals.is_fake_tensor(tensor):
            return None
        return self._storages.get(torch_internals.get_storage_id(tensor.untyped_storage()))

    def _build_view(self, tensor: Tensor, storage: _RecordedStorage) -> _RecordedView:
        """Return a reference to the current values of a recorded tensor.

        Args:
            tensor: Recorded tensor.
            storage: Storage of the tensor, as returned by :meth:`_find_storage`.

        Raises:
            RecordingError: If the tensor reinterprets the storage as a different dtype.
        """
        if tensor.dtype != storage.dtype:
            raise RecordingError(
                "the model views a tensor as another dtype, which is not supported; convert the tensor with "
                "to()"
            )
        return _RecordedView(
            storage, storage.last_write, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        )

    def _add_storage(self, tensor: Tensor) -> _RecordedStorage:
        """Start recording the storage of a new fake tensor. Its elements are zero until the first write."""
        storage = tensor.untyped_storage()
        size = storage.nbytes() // tensor.element_size()
        plain = tensor.is_contiguous() and tensor.dim() > 1 and size == tensor.numel() > 0
        added = _RecordedStorage(storage, tensor.shape[-1] if plain else max(size, 1), size, tensor.dtype)
        self._storages[torch_internals.get_storage_id(storage)] = added
        return added

    def _run_and_record(self, operation: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Run an intercepted operation, and record it if it involves a recorded tensor.

        There are three cases:

        - An operation without recorded tensors as arguments runs normally. However, if a factory
          function such as ``empty`` creates a large tensor, the result is a fake tensor and is
          recorded.
        - Some operations on recorded tensors need values. For example, the result of ``item()``
          depends on them. The values of the recorded arguments are then computed first, and the
          operation runs on them.
        - All other operations on recorded tensors run in fake tensor mode, which computes only
          shapes.

        Args:
            operation: ATen operation.
            arguments: Positional arguments of the operation.
            keywords: Keyword arguments of the operation.

        Returns:
            The result of the operation, with fake tensors for recorded results.

        Raises:
            RecordingError: If the operation has an ``out`` argument, or changes a recorded tensor
                in a way that cannot be replayed.
        """
        leaves, _ = torch_internals.tree_flatten((arguments, keywords))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        name = torch_internals.get_operation_schema(operation).name.removeprefix("aten::")
        recorded = [tensor for tensor in tensors if self._find_storage(tensor) is not None]
        if not recorded:
            if tensors or name not in _FACTORY_FUNCTIONS or not self._is_large(arguments, keywords):
                return operation(*arguments, **keywords)
            with self._fake_tensors:
                result = operation(*arguments, **keywords)
            self._record_creation(name, result, arguments[1:2])
            return result
        if "out" in keywords:
            raise RecordingError(
                f"the model calls {operation} with the argument out, which is not supported; call the "
                "operation without out"
            )
        written = [tensors[i] for i in _find_written_positions(operation, arguments, tensors)]
        if (
            _VALUE_READING_TAGS & {*operation.tags}
            or keywords.get("generator") is not None
            or any(self._find_storage(tensor) is None for tensor in written)
        ):
            return self._run_with_values(operation, arguments, keywords, written)
        with self._fake_tensors:
            results = operation(*arguments, **keywords)
        if torch.Tag.inplace_view in operation.tags:
            return results
        outputs = [leaf for leaf in torch_internals.tree_leaves(results) if isinstance(leaf, torch.Tensor)]
        fresh = [output for output in outputs if self._find_storage(output) is None]
        if written or fresh:
            self._record_operation(name, operation, arguments, keywords, tensors, written, fresh)
        return results

    def _is_large(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
        """Return whether a factory function creates a tensor that is large enough to be recorded.

        An example of a factory function is ``torch.empty``. Only CPU tensors that are created
        without a generator are recorded. Returns False for all other tensors.

        Args:
            arguments: Positional arguments of the factory function. The first one is the shape.
            keywords: Keyword arguments of the factory function.
        """
        size, device = arguments[0] if arguments else (), keywords.get("device")
        on_host = device is None or torch.device(device).type == "cpu"
        return on_host and keywords.get("generator") is None and math.prod(size) >= self._min_elements

    def _record_creation(self, name: str, tensor: Tensor, fill_values: tuple[Any, ...]) -> None:
        """Record a tensor that a factory function has created, and the write that fills it.

        For ``empty`` and ``zeros``, no write is recorded, because the elements are zero by default.

        Args:
            name: Name of the factory function, one of :data:`_FACTORY_FUNCTIONS`.
            tensor: The new fake tensor.
            fill_values: For ``full``, a tuple with the fill value. Ignored for other functions.
        """
        storage = self._add_storage(tensor)
        aten = torch.ops.aten
        fills: dict[str, tuple[Any, tuple[Any, ...], str]] = {
            "ones": (aten.fill_.Scalar, (1,), "in place"),
            "full": (aten.fill_.Scalar, fill_values, "in place"),
            "rand": (aten.uniform_.default, (), "random"),
            "randn": (aten.normal_.default, (), "random"),
        }
        if name in fills:
            operation, values, kind = fills[name]
            self._append_write(storage, 0, storage.size, operation, (None, *values), {}, kind)

    def _append_write(
        self,
        storage: _RecordedStorage,
        start: int,
        stop: int,
        operation: Any,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        kind: str,
        result: int = 0,
        layout: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
    ) -> None:
        """Append a write to the recorded writes of a storage.

        A full-tensor operation cannot be computed tile by tile (kind ``"complete"``). Random and
        full-tensor operations may draw random numbers. A write by such an operation gives each tile
        of the storage a number that is unique in the recording. The random seed of the tile is
        derived from this number.

        Args:
            storage: Storage that the operation changes.
            start: Index in the storage of the first changed element.
            stop: Index in the storage after the last changed element.
            operation: ATen operation, or a function with the same interface.
            arguments: Positional arguments, with references instead of recorded tensors.
            keywords: Keyword arguments, with references instead of recorded tensors.
            kind: Kind of the operation. See :class:`_RecordedWrite`.
            result: ``result_index`` of a full-tensor operation. See :class:`_RecordedWrite`.
            layout: Shape and strides of the result of a full-tensor operation.
        """
        overwrites = kind != "in place" or operation in _OVERWRITING_OPERATIONS
        previous = None if overwrites and stop - start == storage.size else storage.last_write
        storage.last_write = _RecordedWrite(
            previous,
            start,
            stop,
            operation,
            arguments,
            keywords,
            kind,
            self._num_tiles,
            result,
            layout[0],
            layout[1],
            storage.size,
        )
        if kind in ("random", "complete"):
            self._num_tiles += storage.count_tiles()

    def _record_operation(
        self,
        name: str,
        operation: Any,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        tensors: list[Tensor],
        written: list[Tensor],
        fresh: list[Tensor],
    ) -> None:
        """Record an operation, after it has run in fake tensor mode.

        The values of a tensor are computed later, in tiles. A tile is a block of consecutive
        elements. Elementwise and random operations on contiguous tensors are recorded so that each
        tile can be computed separately. All other operations are recorded as full-tensor
        operations.

        Args:
            name: Name of the operation without namespace, such as ``normal_``.
            operation: ATen operation.
            arguments: Positional arguments.
            keywords: Keyword arguments.
            tensors: Tensors among the arguments, in order.
            written: Arguments that the operation changes in place.
            fresh: New tensors that the operation returns.
        """
        family = name.removeprefix("new_").removesuffix("_like")
        if family != name and family in _FACTORY_FUNCTIONS:
            self._record_creation(
                family, fresh[0], arguments[2:3] if name.startswith("new_") else arguments[1:2]
            )
            return
        targets = [*written, *fresh]
        target = targets[0]
        is_in_place = bool(written) and target is tensors[0]
        values = tensors[1:] if is_in_place else tensors
        is_plain = len(targets) == 1 and target.is_contiguous() and (is_in_place or not written)
        matches = all(
            (value.numel() == 1 and self._find_storage(value) is None)
            or (value.shape == target.shape and value.is_contiguous())
            for value in values
        )
        kind = "complete"
        if is_plain and matches and (torch.Tag.pointwise in operation.tags or name in _UNTAGGED_ELEMENTWISE):
            kind = "in place" if is_in_place else "elementwise"
        elif is_plain and is_in_place and not values and torch.Tag.nondeterministic_seeded in operation.tags:
            kind = "random"
        arguments, keywords = _map_tensors((arguments, keywords), self._to_reference)
        if kind == "complete":
            for output in fresh:
                self._add_storage(output)
            positions = {id(tensor): position for position, tensor in enumerate(tensors)}
            for index, changed in enumerate(targets):
                storage = self._find_storage(changed)
                assert storage is not None
                result = index if not written else -1 - positions[id(changed)]
                layout = (tuple(changed.shape), changed.stride())
                self._append_write(
                    storage, 0, storage.size, operation, arguments, keywords, kind, result, layout
                )
            return
        storage = self._find_storage(target) or self._add_storage(target)
        start = int(target.storage_offset())
        self._append_write(storage, start, start + target.numel(), operation, arguments, keywords, kind)

    def _record_truncated_normal(
        self, function: Callable[..., Tensor], tensor: Tensor, *arguments: Any
    ) -> Tensor:
        """Record ``trunc_normal_`` as a single random operation.

        The values are drawn later, separately for each tile. A tile is a block of consecutive
        elements. torch implements ``trunc_normal_`` by rejection sampling, so the number of its
        operations depends on the values. These operations therefore cannot be recorded one by one.
        ``function`` is called instead if the tensor is not recorded or not contiguous, or if there
        is a generator.

        Args:
            function: The original torch function.
            tensor: Tensor to fill.
            arguments: Mean, standard deviation, bounds, and the generator, which may be None.

        Returns:
            ``tensor``.
        """
        storage = self._find_storage(tensor)
        *settings, generator = arguments
        if storage is None or generator is not None or not tensor.is_contiguous():
            return function(tensor, *arguments)
        start = int(tensor.storage_offset())

        def draw_values(target: Tensor, *, generator: torch.Generator) -> None:
            function(target, *settings, generator)

        self._append_write(storage, start, start + tensor.numel(), draw_values, (), {}, "random")
        return tensor

    def _to_reference(self, tensor: Tensor) -> Any:
        """Return a :class:`_RecordedView` of a recorded tensor, or a copy of an ordinary tensor."""
        storage = self._find_storage(tensor)
        return tensor.detach().clone() if storage is None else self._build_view(tensor, storage)

    def _run_with_values(
        self, operation: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], written: list[Tensor]
    ) -> Any:
        """Run an operation immediately instead of recording it.

        This is necessary if the operation reads tensor values, uses a custom generator, or changes
        a tensor that already has values. If an argument is a recorded tensor, its values are
        computed first.

        Args:
            operation: ATen operation.
            arguments: Positional arguments. Tensors may be recorded tensors, which have no values
                yet.
            keywords: Keyword arguments. Tensors may be recorded tensors, which have no values yet.
            written: Tensors among the arguments that the operation changes in place.

        Returns:
            The result of the operation, with real tensors.

        Raises:
            RecordingError: If the operation would change a recorded tensor.
        """
        storages = [self._find_storage(tensor) for tensor in written]
        if any(storage is not None for storage in storages):
            raise RecordingError(
                f"the model changes a large tensor with {operation}, which is not supported, because the "
                "result depends on values or on a custom random generator"
            )

        def compute_argument(tensor: Tensor) -> Tensor:
            storage = self._find_storage(tensor)
            return tensor if storage is None else self._compute_view(self._build_view(tensor, storage), {})

        real_arguments, real_keywords = _map_tensors((arguments, keywords), compute_argument)
        return operation(*real_arguments, **real_keywords)

    # -- computing ---------------------------------------------------------------------------------------

    def _derive_tile_seed(self, tile_number: int) -> int:
        """Derive the random seed of a tile from its number and the seed of the recording.

        A tile is a block of consecutive elements that is drawn with its own seed. torch uses only
        32 bits of a seed, so independent random seeds of many tiles could collide. A permutation of
        the 32-bit integers therefore maps the tile numbers to the seeds. As a result, no two tiles
        of a model have the same seed.
        """
        for key in self._seed_keys:
            tile_number = (tile_number ^ key) * 0x9E3779B1 & 0xFFFFFFFF
            tile_number ^= tile_number >> 15
        return tile_number

    def _compute_slice(self, view: _RecordedView, index: Index) -> Tensor:
        """Compute a slice of a recorded tensor.

        The values of a storage are computed in tiles, which are blocks of consecutive elements. For
        a contiguous tensor, only the tiles that overlap the slice are computed. For any other
        tensor, the complete storage is computed first.

        Args:
            view: Reference to the tensor.
            index: One slice per dimension, with unit steps.
        """
        cache: dict[Any, Any] = {}
        shape = view.shape
        if view.stride != torch.empty(shape, device="meta").stride():
            return self._compute_view(view, cache)[index]
        # Find contiguous runs. They begin at the first dimension after which all dimensions are read
        # completely.
        dim = len(shape)
        while dim > 0 and index[dim - 1] == slice(0, shape[dim - 1]):
            dim -= 1
        dim = max(dim - 1, 0)
        row = math.prod(shape[dim + 1 :])
        runs = []
        for outer in product(*(range(part.start, part.stop) for part in index[:dim])):
            position = 0
            for value, size in zip(outer, shape[:dim], strict=True):
                position = position * size + value
            position = view.offset + position * math.prod(shape[dim:])
            first, last = (index[dim].start * row, index[dim].stop * row) if shape else (0, 1)
            runs.append(
                self._compute_elements(
                    view.storage, view.last_write, position + first, position + last, cache
                )
            )
        values = torch.cat(runs) if len(runs) != 1 else runs[0]
        return values.reshape([part.stop - part.start for part in index])

    def _compute_view(self, view: _RecordedView, cache: dict[Any, Any]) -> Tensor:
        """Compute all elements of a recorded tensor, by computing its complete storage.

        Args:
            view: Reference to the tensor.
            cache: Intermediate results of the current read, which are reused. See
                :meth:`_compute_elements`.
        """
        values = self._compute_elements(view.storage, view.last_write, 0, view.storage.size, cache)
        return torch.as_strided(values, view.shape, view.stride, view.offset)

    def _compute_elements(
        self,
        storage: _RecordedStorage,
        last_write: _RecordedWrite | None,
        start: int,
        stop: int,
        cache: dict[Any, Any],
    ) -> Tensor:
        """Compute the elements ``start`` to ``stop`` of a storage, tile by tile.

        Args:
            storage: Storage to compute.
            last_write: Latest write to apply. Later writes are ignored.
            start: Index of the first element.
            stop: Index after the last element.
            cache: Intermediate results that are reused while one slice is read. Modified in place.
                It contains the results of operations on complete tensors. For each storage and
                value of ``last_write``, it also contains the most recently computed tile that
                extends beyond the requested elements.

        Returns:
            1-D tensor of ``stop - start`` elements.
        """
        values = torch.zeros(stop - start, dtype=storage.dtype)
        writes = []
        while last_write is not None:
            writes.append(last_write)
            last_write = last_write.previous
        writes.reverse()
        for number, first, end in storage.iter_tiles(start, stop):
            inside = first >= start and end <= stop
            if inside:
                tile = values[first - start : end - start]
                self._apply_writes_to_tile(tile, number, first, end, writes, cache)
                continue
            key = ("tile", id(storage), writes[-1] if writes else None)
            if cache.get(key, (None,))[0] != number:
                tile = torch.zeros(end - first, dtype=storage.dtype)
                self._apply_writes_to_tile(tile, number, first, end, writes, cache)
                cache[key] = (number, tile)
            tile = cache[key][1]
            low, high = max(first, start), min(end, stop)
            values[low - start : high - start] = tile[low - first : high - first]
        return values

    def _apply_writes_to_tile(
        self,
        tile: Tensor,
        number: int,
        start: int,
        stop: int,
        writes: Sequence[_RecordedWrite],
        cache: dict[Any, Any],
    ) -> None:
        """Compute the elements of a tile by applying the recorded writes that overlap it.

        A tile is a block of consecutive elements of a storage. A recorded write is an operation
        that changes elements of the storage.

        Args:
            tile: 1-D tensor with the elements of the tile. They are initially zero and are changed
                in place.
            number: Index of the tile among the tiles of its storage.
            start: Index of the tile's first element in the storage.
            stop: Index after the tile's last element in the storage.
            writes: Recorded writes to the storage, in the order of recording.
            cache: See :meth:`_compute_elements`.
        """
        for write in writes:
            low, high = max(start, write.start), min(stop, write.stop)
            if low >= high:
                continue
            target = tile if high - low == stop - start else tile[low - start : high - start]
            if write.kind == "random":
                self._generator.manual_seed(self._derive_tile_seed(write.first_tile + number))
                keywords = {**(write.keywords or {}), "generator": self._generator}
                write.operation(target, *write.arguments[1:], **keywords)
                continue
            if write.kind == "complete":
                if write not in cache:
                    cache[write] = self._compute_complete_result(write, cache)
                target.copy_(cache[write][low:high])
                continue

            def slice_argument(
                value: Any, low: int = low - write.start, high: int = high - write.start
            ) -> Any:
                if isinstance(value, _RecordedView):
                    start, stop = value.offset + low, value.offset + high
                    return self._compute_elements(value.storage, value.last_write, start, stop, cache)
                is_single = not isinstance(value, torch.Tensor) or value.numel() == 1
                return value if is_single else value.reshape(-1)[low:high]

            if write.kind == "in place":
                arguments, keywords = _map_leaves((write.arguments[1:], write.keywords or {}), slice_argument)
                write.operation(target, *arguments, **keywords)
            else:
                arguments, keywords = _map_leaves((write.arguments, write.keywords or {}), slice_argument)
                target.copy_(write.operation(*arguments, **keywords))

    def _compute_complete_result(self, write: _RecordedWrite, cache: dict[Any, Any]) -> Tensor:
        """Run a recorded operation on complete tensors, and return the storage that it writes.

        An operation such as a QR decomposition needs complete tensors and cannot be computed tile
        by tile. While it runs, torch's default generator has a seed that is derived from
        ``write.first_tile``. The state of the generator is restored afterwards.

        Args:
            write: Recorded operation of the kind ``"complete"``.
            cache: Intermediate results of the current read. See :meth:`_compute_elements`.

        Returns:
            1-D tensor with all elements of the storage. An operation that returns a new tensor may
            cover only a part of the storage. The other elements are then 0.
        """
        argument_tensors: list[Tensor] = []

        def compute_argument(value: Any) -> Any:
            if isinstance(value, _RecordedView):
                tensor = self._compute_view(value, {**cache})
                argument_tensors.append(tensor)
                return tensor
            if isinstance(value, torch.Tensor):
                argument_tensors.append(value)
            return value

        arguments, keywords = _map_leaves((write.arguments, write.keywords or {}), compute_argument)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self._derive_tile_seed(write.first_tile))
            results = write.operation(*arguments, **keywords)
        if write.result_index < 0:
            tensor = argument_tensors[-1 - write.result_index]
            return torch.as_strided(
                tensor, [tensor.untyped_storage().nbytes() // tensor.element_size()], [1], 0
            )
        outputs = [leaf for leaf in torch_internals.tree_leaves(results) if isinstance(leaf, torch.Tensor)]
        output = outputs[write.result_index]
        values = torch.zeros(write.storage_size, dtype=output.dtype)
        torch.as_strided(values, write.shape, write.stride).copy_(output)
        return values


_FACTORY_FUNCTIONS = ("empty", "zeros", "ones", "full", "rand", "randn")
_VALUE_READING_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Tags of operations, such as ``item``, whose Python result or output shape depends on tensor values."""
_OVERWRITING_OPERATIONS = {
    operation
    for family in (torch.ops.aten.fill_, torch.ops.aten.zero_, torch.ops.aten.copy_)
    for operation in (getattr(family, name) for name in family.overloads())
}
_UNTAGGED_ELEMENTWISE = ("fill_", "zero_", "copy_", "_to_copy", "clone")
"""Elementwise operations that torch does not tag as pointwise."""


def _find_written_positions(operation: Any, arguments: tuple[Any, ...], tensors: list[Tensor]) -> list[int]:
    """Find the tensor arguments that an operation changes in place, according to its schema.

    Args:
        operation: ATen operation.
        arguments: Positional arguments of the operation.
        tensors: Tensors among all arguments, in order.

    Returns:
        Indices in ``tensors``.
    """
    changed = [
        value
        for argument, value in zip(
            torch_internals.get_operation_schema(operation).arguments, arguments, strict=False
        )
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    leaves = torch_internals.tree_leaves(changed)
    return [i for i, tensor in enumerate(tensors) if any(tensor is leaf for leaf in leaves)]


def _map_leaves(tree: Any, replace: Any) -> Any:
    """Copy a nested structure of arguments, replacing each leaf by ``replace(leaf)``."""
    leaves, structure = torch_internals.tree_flatten(tree)
    return torch_internals.tree_unflatten([replace(leaf) for leaf in leaves], structure)


def _map_tensors(tree: Any, replace: Any) -> Any:
    """Copy a nested structure of arguments, replacing each tensor by ``replace(tensor)``."""
    return _map_leaves(tree, lambda leaf: replace(leaf) if isinstance(leaf, torch.Tensor) else leaf)
