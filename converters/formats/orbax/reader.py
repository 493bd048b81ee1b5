"""Read Orbax checkpoints of JAX programs (MaxText, Flax). JAX does not have to be installed.

A folder contains a tree of arrays (`leaves.py`). Each array is a zarr array, in an OCDBT database
that all arrays share (`manifest.ocdbt`, `d/`) or in a separate folder. Orbax's `CheckpointManager`
writes `<step>/<item>/`. Tensors are named by their path in the tree (`params.decoder.norm.scale`).
Tensors of MaxText are renamed to their transformers names if the model's `config.json` is known
(`maxtext.py`). The moments of optax's Adam are found by their paths in the tree.

Source: https://orbax.readthedocs.io, orbax/checkpoint/_src/metadata/tree.py, _src/serialization/.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from portable.converters.checkpoint import Checkpoint, OptimizerState
from portable.converters.config_and_tokenizer_files import find_companions
from portable.converters.containers.ocdbt import MANIFEST
from portable.converters.containers.pickle_reader import format_untrusted_value
from portable.converters.containers.zarr import V3_HEADER_NAME, ChunkBudget, build_zarr_tensor
from portable.converters.errors import (
    DamagedCheckpointError,
    OptimizerStateError,
    prefix_checkpoint_errors,
    to_printable,
)
from portable.converters.formats import CheckpointPath, Format
from portable.converters.formats.orbax.leaves import (
    METADATA,
    explain_foreign_tree,
    is_orbax_tree,
    read_tree_metadata,
)
from portable.converters.formats.orbax.maxtext import MaxTextLayout, build_maxtext_layout, build_named_layout
from portable.converters.lazy_numpy import np
from portable.converters.limits import MAX_ARRAY_HEADER, MAX_CHUNKS, MAX_CHUNKS_BEYOND
from portable.converters.names.canonical import is_parameter_index
from portable.converters.storage.folder import CheckpointFolder
from portable.converters.storage.folder_operations import list_entry_names
from portable.converters.storage.path_or_url import make_absolute
from portable.converters.storage.safe_open import get_child_inside, read_json_object_or_empty

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from portable.converters.checkpoint import Aliases, Scalar
    from portable.converters.storage import byte_sources as stored_bytes
    from portable.converters.storage.path_or_url import AnyPath
    from portable.converters.tensors.tensor import Tensor

_log = logging.getLogger(__name__)

Path = tuple[str, ...]
_STEP_METADATA = "_CHECKPOINT_METADATA"
_TEMPORARY = ".orbax-checkpoint-tmp"
_ITEMS = ("items", "default", "pytree", "state", "params", "model_params")
_OPTIMIZERS = frozenset({"opt_state", "optimizer_state"})
# Dtypes that a count, such as the step, may have. Floats are excluded, because a float may be a parameter.
_COUNTS = ("I32", "I64", "U32")
_AUXILIARY = frozenset({"nnx_aux"})  # MaxText's random states
_MOMENTS = {"mu": "exp_avg", "nu": "exp_avg_sq"}
_ADAM_STATES = frozenset(_MOMENTS.values())


def _find_tree_folder(path: AnyPath) -> AnyPath | None:
    """Find the folder of the Orbax tree that a path refers to.

    The path may be this folder, or the `_METADATA` or manifest file in it. It may also be a step
    folder in which the tree is one of the items, for example `params`. If the step folder contains
    several trees, the first name in `_ITEMS` that it contains is selected.

    Returns:
        The folder of the tree. None if no tree exists, if there are several trees but none of them
        has a name in `_ITEMS`, or if the save did not finish.

    Raises:
        CheckpointError: If the selected item is a link to a folder outside the step folder.
    """
    folder = path.parent if path.is_file() and path.name in (METADATA, MANIFEST) else path
    if _TEMPORARY in folder.name or not folder.is_dir():
        return None
    if is_orbax_tree(folder):
        return folder
    items = _list_item_trees(folder)
    item = next((name for name in _ITEMS if name in items), items[0] if len(items) == 1 else None)
    return None if item is None else get_child_inside(folder, item)


def _list_item_trees(folder: AnyPath) -> list[str]:
    """List the names of the Orbax trees in a step folder.

    If the folder contains Orbax's step metadata, every entry of the folder is checked for a tree.
    Otherwise, only entries with common names, such as `params`, are checked.
    """
    listed = list_entry_names(folder)
    names = listed if _STEP_METADATA in listed else [name for name in listed if name in _ITEMS]
    return [name for name in names if is_orbax_tree(folder / name)]


def _explain_incomplete(source: CheckpointPath) -> str | None:
    """Explain why an Orbax checkpoint cannot be opened, for example because its save did not finish.

    The checkpoints of Levanter and EasyDeL, which are not supported, are also recognized.

    Returns:
        The reason as one line. None if the path does not look like any of these checkpoints.
    """
    path = source.path
    if _TEMPORARY in path.name:
        return f"{path}: is an unfinished Orbax checkpoint; choose another step"
    listed = list_entry_names(path)
    if (why := explain_foreign_tree(path)) is not None:
        return why
    if MANIFEST in listed or any(name.startswith("ocdbt.process_") for name in listed):
        return (
            f"{path}: is an incomplete Orbax checkpoint, because {METADATA}, the list of its tensors, is "
            "missing; copy the checkpoint again"
        )
    if len(items := _list_item_trees(path)) > 1:
        return (
            f"{path}: contains several Orbax checkpoints; specify one of these folders: "
            f"{', '.join(items[:8])}"
        )
    if METADATA in listed:
        return (
            f"{path}: {METADATA} is damaged: it is not the list of tensors of an Orbax checkpoint; copy the "
            "checkpoint again"
        )
    return None


def _open_orbax_checkpoint(source: CheckpointPath, path: AnyPath) -> Checkpoint:
    """Open an Orbax tree as a checkpoint.

    Args:
        source: Path that the user specified, with options.
        path: Folder of the Orbax tree. It may differ from the path in `source`. For example, if the
            user specified a step folder, this may be its subfolder `params`.
    """
    return _OrbaxTree(CheckpointFolder(path)).build_checkpoint(source)


class _OrbaxTree:
    """Arrays of an Orbax tree, keyed by path.

    The constructor opens all arrays, and reads their headers but not their elements. TensorStore may
    omit chunks of zeros. Unless the metadata excludes this, missing chunks are read as zeros. If
    chunks are files, the constructor logs a warning about missing chunks.

    Args:
        folder: Folder of the tree.

    Raises:
        CheckpointError: If the metadata, a header or a chunk is damaged or missing.

    Attributes:
        metadata: Metadata of the tree.
        num_absent_chunks: Number of missing chunk files that are read as zeros. Chunks of scalars and
            random states, and chunks in a database, are not counted.
        arrays: Lazy tensors, keyed by path in the tree.
        scalar_paths: Paths of the numbers that are not model parameters, such as the step.
    """

    def __init__(self, folder: CheckpointFolder) -> None:
        self.folder = folder
        self.location = str(folder.path)
        self.metadata = read_tree_metadata(folder)
        self.chunk_budget = ChunkBudget(MAX_CHUNKS_BEYOND)
        self.num_absent_chunks = 0
        self.arrays = {path: self._open_array(path, name) for path, name in self.metadata.array_names.items()}
        if self.num_absent_chunks:
            _log.warning(
                "warning: %s: chunks that have no file (%s in total) are read as zeros, because TensorStore "
                "does not write chunks of zeros; if files may be missing, copy the checkpoint again",
                to_printable(self.location),
                f"{self.num_absent_chunks:,}",
            )
        self.scalar_paths = {
            path
            for path, array in self.arrays.items()
            if array.shape in ((), (1,))
            and "params" not in path
            and (path in self.metadata.scalar_paths or array.dtype in _COUNTS)
        }

    def _open_array(self, path: Path, stored_name: str) -> Tensor:
        """Open one array as a lazy tensor.

        TensorStore may omit chunks that contain only zeros. If the metadata allows this, a missing
        chunk is read as zeros.

        The chunks of an array are files in a folder, or entries of a database (OCDBT) that all
        arrays share. A file may also be missing because the checkpoint was not copied completely.
        `num_absent_chunks` therefore counts the missing files, and the caller warns about them.
        Scalars and random states are not counted.

        Args:
            path: Path of the array in the saved tree.
            stored_name: Name of the array in the folder or the database.

        Raises:
            CheckpointError: If the header is missing or damaged, if a chunk is damaged, or if a
                chunk is missing although the metadata requires that all chunks are stored.
        """
        leaves, name = self.metadata, ".".join(path)
        raw = self._open_stored_bytes(f"{stored_name}/{leaves.header_name}")
        if raw.nbytes > MAX_ARRAY_HEADER:
            raise DamagedCheckpointError(
                f"{self.location}: {name}: damaged: the header has {raw.nbytes:,} bytes, but at most "
                f"{MAX_ARRAY_HEADER:,} are allowed"
            )
        content = bytearray(raw.nbytes)
        raw.read_into(memoryview(content), 0, set())
        absent_chunks: list[str] = []
        limit = MAX_CHUNKS if leaves.database is None else len(leaves.database) + MAX_CHUNKS_BEYOND

        def open_chunk(key: str) -> stored_bytes.ByteSource | None:
            key = f"{stored_name}/{key}"
            if leaves.stores_all_chunks or self._has_stored_bytes(key):
                return self._open_stored_bytes(key)
            absent_chunks.append(key)
            return None

        version = 3 if leaves.header_name == V3_HEADER_NAME else 2
        array = build_zarr_tensor(
            name, bytes(content), version, open_chunk, self.location, limit, self.chunk_budget
        )
        # Count absent chunks only if arrays are folders, because a database lists its chunks. Skip 0-d
        # arrays, because they are often zero.
        if leaves.database is None and array.shape and path[0] not in _AUXILIARY:
            self.num_absent_chunks += len(absent_chunks)
        return array

    def _has_stored_bytes(self, key: str) -> bool:
        """Return whether a header or chunk of an array is stored.

        Args:
            key: Path of the header or chunk relative to the tree's folder. It is looked up in the
                OCDBT database if the tree has one, otherwise in the folder.
        """
        database = self.metadata.database
        return (self.folder.path / key).exists() if database is None else key in database

    def _open_stored_bytes(self, key: str) -> stored_bytes.ByteSource:
        """Return a byte source for a header or chunk in its stored form.

        Args:
            key: Path of the header or chunk, relative to the folder of the Orbax tree. If the tree
                has an OCDBT database, the key is looked up there. Otherwise, it is a file in the
                folder.

        Raises:
            CheckpointError: If the key is missing.
        """
        database = self.metadata.database
        if database is None:
            file = self.folder.get_file(key)
            return file.get_span(0, file.nbytes)
        if key not in database:
            raise DamagedCheckpointError(
                f"{self.location}: damaged: {format_untrusted_value(key)} is missing from the OCDBT database"
            )
        return database[key]

    def read_scalar(self, path: Path) -> Scalar:
        """Read an array with one element as a Python number."""
        value: Scalar = np.asarray(self.arrays[path].read()).reshape(()).item()
        return value

    def build_checkpoint(self, source: CheckpointPath) -> Checkpoint:
        """Build a checkpoint from the arrays of this tree, without reading the tensors' data.

        The tensors of a MaxText model get the names that transformers uses, if the model's
        `config.json` is known. Other tensors are named by their paths in the tree.

        The array `step` in the tree contains the training step. If there is no such array, the step
        is the number that is the name of the step folder.

        Args:
            source: Path that the user specified, with options.

        Raises:
            CheckpointError: If the tree contradicts `config.json`, if two parameters get the same
                name, or if the array `step` is damaged.
        """
        folder = self.folder.path
        companions = find_companions(folder)
        config = read_json_object_or_empty(source.config_file or companions.get("config.json"))
        optimizer_paths = {path for path in self.arrays if not _OPTIMIZERS.isdisjoint(path)}
        non_model_paths = (
            optimizer_paths | self.scalar_paths | {path for path in self.arrays if path[0] in _AUXILIARY}
        )
        model = {path: array for path, array in self.arrays.items() if path not in non_model_paths}
        shapes = {path: array.shape for path, array in model.items()}
        layout = build_maxtext_layout(shapes, config, self.location) or build_named_layout(
            shapes, self.location
        )
        tensors: dict[str, Tensor] = {}
        with prefix_checkpoint_errors(folder):
            for path, array in model.items():
                tensors |= layout.convert_weight(path, array)
        step = self.read_scalar(("step",)) if ("step",) in self.scalar_paths else None
        name = folder.name if is_parameter_index(folder.name) else make_absolute(folder).parent.name
        if type(step) is not int and is_parameter_index(name):
            step = int(name)
        counters = sorted(self.scalar_paths - optimizer_paths)
        # Skip other numbers in the optimizer, because they are settings.
        moments = sorted(
            path
            for path in optimizer_paths - self.scalar_paths
            if self.arrays[path].shape or not _MOMENTS.keys().isdisjoint(path)
        )

        # Both functions keep a reference to this tree, because they read its arrays later.
        def open_optimizer(aliases: Aliases) -> OptimizerState | None:
            return self._build_adam_state(moments, model, layout)

        def read_counters() -> Mapping[str, Scalar]:
            with prefix_checkpoint_errors(folder):
                return {".".join(path): self.read_scalar(path) for path in counters}

        return Checkpoint(
            format="orbax",
            root=source.path,
            tensors=tensors,
            optimizer=open_optimizer if moments else None,
            metadata={"step": step} if type(step) is int else {},
            companions=companions,
            counters=read_counters,
        )

    def _build_adam_state(
        self, moments: Sequence[Path], model: Mapping[Path, Tensor], layout: MaxTextLayout
    ) -> OptimizerState | None:
        """Build Adam's state of each parameter: both moments, and the step count (`step`).

        If the tree does not record the step count, `step` is missing. Parameters without moments are
        omitted.

        Args:
            moments: Paths of the optimizer's arrays in the tree.
            model: Arrays of the model, keyed by path in the tree.
            layout: Mapping that converts the moments to transformers' names and layout.

        Returns:
            The optimizer state. It has one parameter group, which contains no hyperparameters.

        Raises:
            OptimizerStateError: If an array is not a moment of exactly one parameter, if its shape
                differs from the parameter's shape, or if a parameter has only one moment.
        """
        # Parameters by the ends of their paths, because the optimizer may omit the first keys, such as the
        # name of the model.
        paths_by_suffix: dict[Path, list[Path]] = {}
        for path in model:
            for first in range(3):
                paths_by_suffix.setdefault(path[first:], []).append(path)
        state: dict[str, dict[str, Tensor | Scalar]] = {}
        for path in moments:
            optimizer_index = next(i for i, key in enumerate(path) if key in _OPTIMIZERS)
            moment_index = next(
                (i for i, key in enumerate(path) if key in _MOMENTS and i > optimizer_index), 0
            )
            prefix, suffix = path[:optimizer_index], path[moment_index + 1 :]
            preferred_owners = [
                owner for owner in ((*prefix, "params", *suffix), (*prefix, *suffix)) if owner in model
            ]
            owners = preferred_owners[:1] or paths_by_suffix.get(suffix, [])
            if not moment_index or len(owners) != 1:
                raise OptimizerStateError(
                    f"{self.location}: the optimizer state {format_untrusted_value('.'.join(path))} is not "
                    "a moment (mu or nu) of optax's Adam for one parameter"
                )
            owner = owners[0]
            moment, array = path[moment_index], self.arrays[path]
            if array.shape != model[owner].shape:
                raise OptimizerStateError(
                    f"{self.location}: {'.'.join(path)} has shape {list(array.shape)}, but the parameter "
                    f"has shape {list(model[owner].shape)}"
                )
            with prefix_checkpoint_errors(self.folder.path):
                moments_by_name = layout.convert_moment(owner, array, moment)
                count = (*path[:moment_index], "count")
                step = self.read_scalar(count) if count in self.scalar_paths else None
            for name, tensor in moments_by_name.items():
                values = state.setdefault(name, {})
                if _MOMENTS[moment] in values:
                    raise OptimizerStateError(
                        f"{self.location}: the optimizer has two first moments or two second moments of "
                        f"{name}"
                    )
                values[_MOMENTS[moment]] = tensor
                if step is not None:
                    values["step"] = step
        incomplete_name = next(
            (name for name, values in state.items() if not values.keys() >= _ADAM_STATES), None
        )
        if incomplete_name is not None:
            raise OptimizerStateError(
                f"{self.location}: the optimizer has only one moment of {incomplete_name}, but Adam has two"
            )
        return OptimizerState(state, [{"params": list(state)}])


FORMAT = Format(
    "orbax",
    lambda source: _find_tree_folder(source.path),
    _open_orbax_checkpoint,
    _explain_incomplete,
)
