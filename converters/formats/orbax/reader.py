"""Orbax: the checkpoints of JAX programs (MaxText, EasyDeL, Flax), read without JAX.

A folder holds a tree of arrays: `_METADATA` lists its leaves, and each is a zarr array, in one OCDBT database
(`manifest.ocdbt`, `d/`) or in a folder of its own. A `CheckpointManager` writes `<step>/<item>/`. Tensors
have the keys of the tree (`params.decoder.norm.scale`); those of MaxText get transformers' names where the
model's config.json is known (`maxtext.py`). The moments of optax's Adam are found by their place in the tree.

Source: https://orbax.readthedocs.io, orbax/checkpoint/_src/metadata/tree.py, _src/serialization/.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from converters.checkpoint import Checkpoint, OptimizerState
from converters.companions import find_companions
from converters.containers.ocdbt import MANIFEST, read_ocdbt
from converters.containers.pickle_reader import shown
from converters.containers.shard_index import read_json
from converters.containers.zarr import V2, V3, Budget, read_zarr
from converters.errors import CheckpointError, OptimizerStateError, blame
from converters.formats import Format, Source
from converters.formats.orbax.maxtext import Layout, maxtext_layout
from converters.names.canonical import MAX_TENSOR_NAME, is_number
from converters.storage.folder import Folder
from converters.storage.guarded import child, read_small, read_small_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from converters.checkpoint import Aliases, Scalar
    from converters.storage import bytes as stored
    from converters.storage.path_or_url import Place
    from converters.tensors.tensor import Tensor

Path = tuple[str, ...]
_METADATA, _TREE = "_METADATA", b'"tree_metadata"'
_STEP_METADATA = "_CHECKPOINT_METADATA"
_TEMPORARY = ".orbax-checkpoint-tmp"
_EASYDEL = "tensorstore_index.json"
_ITEMS = ("items", "default", "pytree", "state", "params", "model_params")
_OPTIMIZERS = frozenset({"opt_state", "optimizer_state"})
# A count may be an array; a float may be a parameter.
_COUNTS = ("I32", "I64", "U32")
# MaxText's random states.
_AUXILIARY = "nnx_aux"
_MOMENTS = {"mu": "exp_avg", "nu": "exp_avg_sq"}
_BOTH = frozenset(_MOMENTS.values())
# Chunks of an array that are files; chunks of all arrays that lie within others, or are not stored.
_MAX_CHUNKS, _MAX_BEYOND = 1 << 22, 1 << 18
_MAX_METADATA = 64 << 20
_MAX_HEADER = 1 << 20


def _has_tree(path: Place) -> bool:
    try:
        return _TREE in read_small(path / _METADATA, limit=4096, head=True)
    except (OSError, CheckpointError):
        return False


def _folder(path: Place) -> Place | None:
    """The folder of the tree for a path: of it, of a file in it, or of the step that holds it as an item."""
    folder = path.parent if path.is_file() and path.name in (_METADATA, MANIFEST) else path
    if _TEMPORARY in folder.name or not folder.is_dir():
        return None
    if _has_tree(folder):
        return folder
    items = _items(folder)
    found = next((name for name in _ITEMS if name in items), items[0] if len(items) == 1 else None)
    return None if found is None else child(folder, found)


def _items(folder: Place) -> list[str]:
    """The names of the trees in the folder of a step; only the usual ones where Orbax's mark is missing."""
    try:
        listed = {entry.name for entry in folder.iterdir()}
    except OSError:
        return []
    names = listed if _STEP_METADATA in listed else listed.intersection(_ITEMS)
    return sorted(name for name in names if _has_tree(folder / name))


def _detect(source: Source) -> bool:
    return _folder(source.path) is not None


def _incomplete(source: Source) -> str | None:
    path = source.path
    if _TEMPORARY in path.name:
        return f"{path}: an Orbax checkpoint that was not finished; choose another step"
    try:
        listed = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
    except OSError:
        return None
    if _EASYDEL in listed:
        return (
            f"{path}: TensorStore arrays of EasyDeL are not read; export the model with "
            "model.to_torch().save_pretrained(...)"
        )
    if MANIFEST in listed or any(name.startswith("ocdbt.process_") for name in listed):
        return f"{path}: an Orbax checkpoint without {_METADATA}, which lists its tensors: it is incomplete"
    if len(items := _items(path)) > 1:
        return f"{path}: holds several Orbax checkpoints, {', '.join(items[:8])}: name one of these folders"
    if _METADATA in listed:
        return f"{path}: {_METADATA} is not the tree of an Orbax checkpoint: it is damaged"
    return None


def _open(source: Source) -> Checkpoint:
    path = _folder(source.path)
    assert path is not None
    return _Tree(Folder(path, verify=source.verify)).checkpoint(source)


class _Tree:
    """The leaves of a tree: path of keys -> array."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.where = str(folder.path)
        file = folder.file(_METADATA)
        if file.nbytes > _MAX_METADATA:
            raise CheckpointError(f"{file.path}: is too large ({file.nbytes:,} bytes)")
        content = read_json(file.path, file.read(0, file.nbytes))
        if not isinstance(content, dict):
            raise CheckpointError(f"{file.path}: damaged, holds no tree")
        ocdbt, zarr3, complete = (
            content.get(name) for name in ("use_ocdbt", "use_zarr3", "store_array_data_equal_to_fill_value")
        )
        if any(type(flag) not in (bool, type(None)) for flag in (ocdbt, zarr3, complete)):
            raise CheckpointError(f"{file.path}: damaged, does not say how the arrays are stored")
        described = _leaves(content.get("tree_metadata"), str(file.path))
        in_database = (folder.path / MANIFEST).exists() if ocdbt is None else ocdbt
        self.database = read_ocdbt(folder) if in_database else None
        # Older versions of Orbax left out chunks of zeros.
        self.complete = complete is True
        self.budget = Budget(_MAX_BEYOND)
        header = V3 if zarr3 else V2
        listed = {key.rpartition("/")[0] for key in self.database or () if key.endswith(f"/{header}")}
        extra = next(iter(listed - {".".join(path) for path in described}), None)
        if extra is not None:
            raise CheckpointError(
                f"{self.where}: damaged, holds {shown(extra)}, which {_METADATA} does not list"
            )
        self.arrays = {path: self._array(".".join(path), header) for path in described}
        self.scalars = {
            path
            for path, array in self.arrays.items()
            if array.shape in ((), (1,))
            and "params" not in path
            and (described[path] == "scalar" or array.dtype in _COUNTS)
        }

    def _array(self, name: str, header: str) -> Tensor:
        raw = self._value(f"{name}/{header}")
        if raw.nbytes > _MAX_HEADER:
            raise CheckpointError(f"{self.where}: {name}: damaged, its header has {raw.nbytes:,} bytes")
        content = bytearray(raw.nbytes)
        raw.read_into(memoryview(content), 0, set())
        limit = _MAX_CHUNKS if self.database is None else len(self.database) + _MAX_BEYOND

        def chunk(key: str) -> stored.Source | None:
            key = f"{name}/{key}"
            return self._value(key) if self.complete or self._has(key) else None

        return read_zarr(
            name, bytes(content), 3 if header == V3 else 2, chunk, self.where, limit, self.budget
        )

    def _has(self, key: str) -> bool:
        return (self.folder.path / key).exists() if self.database is None else key in self.database

    def _value(self, key: str) -> stored.Source:
        if self.database is None:
            file = self.folder.file(key)
            return file.span(0, file.nbytes)
        if key not in self.database:
            raise CheckpointError(f"{self.where}: damaged, {shown(key)} is missing from the database")
        return self.database[key]

    def number(self, path: Path) -> Scalar:
        value: Scalar = np.asarray(self.arrays[path].read()).reshape(()).item()
        return value

    def checkpoint(self, source: Source) -> Checkpoint:
        folder = self.folder.path
        companions = find_companions(folder)
        config = read_small_table(source.config or companions.get("config.json"))
        inside = {path for path in self.arrays if not _OPTIMIZERS.isdisjoint(path)}
        beside = inside | self.scalars | {path for path in self.arrays if path[0] == _AUXILIARY}
        model = {path: array for path, array in self.arrays.items() if path not in beside}
        layout = maxtext_layout({path: array.shape for path, array in model.items()}, config, self.where)
        tensors: dict[str, Tensor] = {}
        with blame(folder):
            for path, array in model.items():
                tensors |= layout.weights(path, array) if layout else {".".join(path): array}
        step = self.number(("step",)) if ("step",) in self.scalars else None
        name = folder.name if is_number(folder.name) else folder.absolute().parent.name
        if type(step) is not int and is_number(name):
            step = int(name)
        counters = sorted(self.scalars - inside)
        # Other numbers in it are the optimizer's settings.
        moments = sorted(
            path
            for path in inside - self.scalars
            if self.arrays[path].shape or not _MOMENTS.keys().isdisjoint(path)
        )

        # The tree outlives this call in both of these.
        def optimizer(aliases: Aliases) -> OptimizerState | None:
            return self._optimizer(moments, model, layout)

        def read_counters() -> Mapping[str, Scalar]:
            with blame(folder):
                return {".".join(path): self.number(path) for path in counters}

        return Checkpoint(
            format="orbax",
            root=source.path,
            tensors=tensors,
            optimizer=optimizer if moments else None,
            metadata={"step": step} if type(step) is int else {},
            companions=companions,
            counters=read_counters,
        )

    def _optimizer(
        self, moments: Sequence[Path], model: Mapping[Path, Tensor], layout: Layout | None
    ) -> OptimizerState | None:
        """The moments of Adam by parameter, and its count as `step`."""
        # A parameter without the first keys of its path, such as the name of the model.
        short: dict[Path, list[Path]] = {}
        for path in model:
            for first in range(3):
                short.setdefault(path[first:], []).append(path)
        state: dict[str, dict[str, Tensor | Scalar]] = {}
        for path in moments:
            top = next(i for i, key in enumerate(path) if key in _OPTIMIZERS)
            at = next((i for i, key in enumerate(path) if key in _MOMENTS and i > top), 0)
            before, rest = path[:top], path[at + 1 :]
            likely = [owner for owner in ((*before, "params", *rest), (*before, *rest)) if owner in model]
            owners = likely[:1] or short.get(rest, [])
            if not at or len(owners) != 1:
                raise OptimizerStateError(
                    f"{self.where}: the optimizer's {shown('.'.join(path))} is no moment of optax's Adam"
                )
            owner = owners[0]
            moment, array = path[at], self.arrays[path]
            if array.shape != model[owner].shape:
                raise OptimizerStateError(
                    f"{self.where}: {'.'.join(path)} is {list(array.shape)}, its parameter "
                    f"{list(model[owner].shape)}"
                )
            with blame(self.folder.path):
                made = layout.moments(owner, array, moment) if layout else {".".join(owner): array}
                count = (*path[:at], "count")
                step = self.number(count) if count in self.scalars else None
            for name, tensor in made.items():
                values = state.setdefault(name, {})
                if _MOMENTS[moment] in values:
                    raise OptimizerStateError(f"{self.where}: {name} has two first or second moments")
                values[_MOMENTS[moment]] = tensor
                if step is not None:
                    values["step"] = step
        alone = next((name for name, values in state.items() if not values.keys() >= _BOTH), None)
        if alone is not None:
            raise OptimizerStateError(f"{self.where}: the optimizer has one moment of {alone}, Adam has two")
        return OptimizerState(state, [{"params": list(state)}])


def _leaves(tree: Any, where: str) -> dict[Path, str]:
    """The leaves that are arrays, with their types."""
    if not isinstance(tree, dict):
        raise CheckpointError(f"{where}: damaged, holds no tree")
    found: dict[Path, str] = {}
    names: set[str] = set()
    for entry in tree.values():
        try:
            path = tuple(str(key["key"]) for key in entry["key_metadata"])
            value = entry["value_metadata"]
            kind, left_out = value["value_type"], value["skip_deserialize"]
        except (LookupError, TypeError):
            raise CheckpointError(f"{where}: damaged, describes a leaf without its path or type") from None
        if left_out is True or kind in ("string", "None"):
            continue
        name = ".".join(path)
        if not name or name in names or len(name) > MAX_TENSOR_NAME:
            raise CheckpointError(f"{where}: damaged, two leaves are called {shown(name)}, or none")
        names.add(name)
        found[path] = str(kind)
    return found


FORMAT = Format(
    "orbax",
    _detect,
    _open,
    _incomplete,
    written_by="Orbax, with OCDBT or without, zarr 2 or 3: MaxText (Llama, Mistral, Qwen3, Gemma 1 and 2 "
    "get transformers' names), Flax",
    recognised_by="`_METADATA` with a tree, there or in `<step>/items/`, `<step>/default/`",
)
