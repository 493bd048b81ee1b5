"""Which arrays a tree holds, and how they are stored, as each program records it.

Orbax lists them in `_METADATA`, EasyDeL in `tensorstore_index.json`. Levanter's `metadata.json` only says
that a checkpoint is complete; its arrays are found in the OCDBT database, or in the folders of zarr version 2
that older versions wrote. Newer versions list them in `manifest.json`, too.

Source: orbax/checkpoint/_src/metadata/tree.py; eformer/serialization/serialization.py, async_manager.py;
levanter/checkpoint.py, tensorstore_serialization.py, checkpoint_manifest.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from converters.containers.ocdbt import MANIFEST, read_ocdbt
from converters.containers.pickle_reader import shown
from converters.containers.shard_index import read_json
from converters.containers.zarr import V2, V3, element_type
from converters.errors import CheckpointError, blame
from converters.names.canonical import MAX_TENSOR_NAME
from converters.storage.guarded import read_small
from converters.storage.places import files_below

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from converters.storage.bytes import Source
    from converters.storage.folder import Folder
    from converters.storage.path_or_url import Place
    from converters.tensors.tensor import Shape

Path = tuple[str, ...]
METADATA, INDEX, COMMITTED = "_METADATA", "tensorstore_index.json", "metadata.json"
MARKS = (METADATA, INDEX, COMMITTED)
# What tells a file of that name from another program's; the first kilobytes hold it.
_CONTENT = {METADATA: b'"tree_metadata"', INDEX: b'"tensorstore"', COMMITTED: b'"is_temporary"'}
_LISTED = "manifest.json"
_OPTIMIZER = "opt_state"
_CHUNK = re.compile(r"\d+(?:\.\d+)*")
_MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class Leaves:
    """The arrays of a tree.

    Attributes:
        source: the file that marks or lists them, for messages.
        stored: path in the tree -> name of the array in the folder or the database.
        header: the name of an array's header, which tells the version of zarr.
        complete: whether chunks of zeros are stored, too: then none may be missing.
        database: the OCDBT database; None where arrays are folders.
        scalars: which are Python's numbers.
        described: the shapes and types that the list says.
    """

    source: str
    stored: Mapping[Path, str]
    header: str
    complete: bool
    database: Mapping[str, Source] | None
    scalars: frozenset[Path] = frozenset()
    described: Mapping[Path, tuple[Shape, str]] = field(default_factory=dict)


def mark(folder: Place) -> str | None:
    """The file that makes a folder a tree of arrays."""
    for name in MARKS:
        try:
            if _CONTENT[name] in read_small(folder / name, limit=4096, head=True):
                return name
        except (OSError, CheckpointError):
            continue
    return None


def read_leaves(folder: Folder) -> Leaves:
    """The arrays of a tree, of whichever program wrote it.

    Raises:
        CheckpointError: its list is damaged, or does not fit the database.
    """
    readers = {METADATA: _orbax, INDEX: _easydel, COMMITTED: _levanter}
    found = readers[mark(folder.path) or METADATA](folder)
    if found.database is not None:
        ending = f"/{found.header}"
        held = {key[: -len(ending)] for key in found.database if key.endswith(ending)}
        extra = min(held.difference(found.stored.values()), default=None)
        if extra is not None:
            raise CheckpointError(
                f"{folder.path}: damaged, holds {shown(extra)}, which {found.source} does not list"
            )
    return found


def _orbax(folder: Folder) -> Leaves:
    content = _table(folder, METADATA)
    where = f"{folder.path / METADATA}"
    ocdbt, zarr3, complete = (
        content.get(name) for name in ("use_ocdbt", "use_zarr3", "store_array_data_equal_to_fill_value")
    )
    if any(type(flag) not in (bool, type(None)) for flag in (ocdbt, zarr3, complete)):
        raise CheckpointError(f"{where}: damaged, does not say how the arrays are stored")
    tree = content.get("tree_metadata")
    if not isinstance(tree, dict):
        raise CheckpointError(f"{where}: damaged, holds no tree")
    paths = []
    scalars = set()
    for entry in tree.values():
        try:
            path = tuple(str(key["key"]) for key in entry["key_metadata"])
            value = entry["value_metadata"]
            kind, left_out = value["value_type"], value["skip_deserialize"]
        except (LookupError, TypeError):
            raise CheckpointError(f"{where}: damaged, describes a leaf without its path or type") from None
        if left_out is True or kind in ("string", "None"):
            continue
        paths.append(path)
        if kind == "scalar":
            scalars.add(path)
    _check_names(paths, where)
    in_database = (folder.path / MANIFEST).exists() if ocdbt is None else ocdbt
    return Leaves(
        METADATA,
        {path: ".".join(path) for path in paths},
        V3 if zarr3 else V2,
        complete=complete is True,  # older versions left out chunks of zeros
        database=read_ocdbt(folder) if in_database else None,
        scalars=frozenset(scalars),
    )


def _easydel(folder: Folder) -> Leaves:
    """EasyDeL keeps trees side by side: `model`, and the optimizer as `tx`."""
    content = _table(folder, INDEX)
    where = f"{folder.path / INDEX}"
    trees = content.get("prefixes")
    lists = [*(trees.values() if isinstance(trees, dict) else ()), content.get("arrays", [])]
    if not all(isinstance(entries, list) for entries in lists):
        raise CheckpointError(f"{where}: damaged, lists no arrays")
    entries = _entries([entry for listed in lists for entry in listed], where)
    if not entries:
        raise CheckpointError(f"{where}: damaged, lists no arrays")
    stored, described = {}, {}
    for name, saying in entries.items():
        path = tuple(name.split("/"))
        if path[0] == "tx":
            # Its leaves are flax's variables, whose value has a key of its own.
            path = (_OPTIMIZER, *(path[1:-1] if path[-1] in ("value", "raw_value") else path[1:]))
        stored[path] = name
        described[path] = saying
    _check_names(stored, where)
    return Leaves(INDEX, stored, V2, complete=False, database=None, described=described)


def _levanter(folder: Folder) -> Leaves:
    _table(folder, COMMITTED)
    database = read_ocdbt(folder) if (folder.path / MANIFEST).exists() else None
    header = V2 if database is None else V3
    keys = list(files_below(folder.path) if database is None else database)
    names = sorted(key[: -len(header) - 1] for key in keys if key.endswith(f"/{header}"))
    where = str(folder.path)
    if database is None:
        chunks = {above for above, _, last in (key.rpartition("/") for key in keys) if _CHUNK.fullmatch(last)}
        lost = min(chunks.difference(names, ("",)), default=None)
        if lost is not None:
            raise CheckpointError(f"{where}: damaged, {shown(lost)} has chunks and no {header}")
    if not names:
        raise CheckpointError(f"{where}: Levanter's {COMMITTED} lies here, and no arrays: it is incomplete")
    described = {}
    if (folder.path / _LISTED).exists():
        where = f"{folder.path / _LISTED}"
        listed = _table(folder, _LISTED).get("arrays")
        if not isinstance(listed, list):
            raise CheckpointError(f"{where}: damaged, lists no arrays")
        entries = _entries(listed, where)
        described = {tuple(name.split("/")): saying for name, saying in entries.items()}
        names = sorted(entries)
    stored = {tuple(name.split("/")): name for name in names}
    _check_names(stored, where)
    source = _LISTED if described else COMMITTED
    return Leaves(source, stored, header, complete=False, database=database, described=described)


def _entries(listed: list[Any], where: str) -> dict[str, tuple[Shape, str]]:
    """Name of an array -> the shape and the type that a list says."""
    found: dict[str, tuple[Shape, str]] = {}
    for entry in listed:
        try:
            name, shape, dtype = entry["path"], tuple(entry["shape"]), entry["dtype"]
        except (LookupError, TypeError):
            raise CheckpointError(f"{where}: damaged, describes an array without its path or shape") from None
        if not isinstance(name, str) or name in found:
            raise CheckpointError(f"{where}: damaged, lists {shown(name)} twice, or no name")
        with blame(where):
            found[name] = shape, element_type(dtype)
    return found


def _check_names(paths: Iterable[Path], where: str) -> None:
    names = set()
    for path in paths:
        name = ".".join(path)
        if not name or name in names or len(name) > MAX_TENSOR_NAME:
            raise CheckpointError(f"{where}: damaged, two leaves are called {shown(name)}, or none")
        names.add(name)


def _table(folder: Folder, name: str) -> dict[str, Any]:
    file = folder.file(name)
    if file.nbytes > _MAX_BYTES:
        raise CheckpointError(f"{file.path}: is too large ({file.nbytes:,} bytes)")
    content = read_json(file.path, file.read(0, file.nbytes))
    if not isinstance(content, dict):
        raise CheckpointError(f"{file.path}: damaged, holds no tree")
    return content
