"""Read the metadata of an Orbax tree: the arrays that `_METADATA` lists, and how they are stored.

Source: orbax/checkpoint/_src/metadata/tree.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portable.converters.containers.ocdbt import MANIFEST, read_ocdbt_values
from portable.converters.containers.pickle_reader import format_untrusted_value
from portable.converters.containers.zarr import V2_HEADER_NAME, V3_HEADER_NAME
from portable.converters.errors import DamagedCheckpointError, UnsupportedCheckpointError
from portable.converters.limits import MAX_TENSOR_NAME, MAX_TREE_LIST
from portable.converters.storage.byte_sources import read_json_object
from portable.converters.storage.safe_open import header_contains

if TYPE_CHECKING:
    from collections.abc import Mapping

    from portable.converters.storage.byte_sources import ByteSource
    from portable.converters.storage.folder import CheckpointFolder
    from portable.converters.storage.path_or_url import AnyPath

Path = tuple[str, ...]
METADATA = "_METADATA"
# Programs that write arrays in unsupported formats: file name, bytes in this file, program, and its export to
# transformers.
_OTHER_PROGRAMS = (
    ("metadata.json", b'"is_temporary"', "Levanter", "python -m levanter.main.export_lm_to_hf"),
    ("tensorstore_index.json", b'"tensorstore"', "EasyDeL", "model.to_torch().save_pretrained(...)"),
)


@dataclass(frozen=True)
class TreeMetadata:
    """Arrays of an Orbax tree, and how they are stored.

    Attributes:
        array_names: Name of each array in the folder or the database, keyed by its path in the tree.
        header_name: File name of an array's header. Depends on the version of zarr.
        stores_all_chunks: Whether chunks of zeros are stored. If so, a missing chunk is an error.
        database: Values in the OCDBT database, keyed by database key. None if each array is a folder.
        scalar_paths: Paths in the tree whose values are Python numbers.
    """

    array_names: Mapping[Path, str]
    header_name: str
    stores_all_chunks: bool
    database: Mapping[str, ByteSource] | None
    scalar_paths: frozenset[Path] = frozenset()


def is_orbax_tree(folder: AnyPath) -> bool:
    """Return whether a folder contains an Orbax tree: arrays that are listed in a file `_METADATA`.

    Only the start of `_METADATA` is read.
    """
    return header_contains(folder / METADATA, b'"tree_metadata"')


def explain_foreign_tree(folder: AnyPath) -> str | None:
    """Explain how to export the checkpoint of a JAX trainer that is not supported.

    The checkpoints of Levanter and EasyDeL are recognized.

    Returns:
        One line that names the program and its export command. None if the folder does not contain
        such a checkpoint.
    """
    for name, content, program, export in _OTHER_PROGRAMS:
        if header_contains(folder / name, content):
            return (
                f"{folder}: is a checkpoint of {program}, which is not supported; export the model with "
                f"{export}"
            )
    return None


def read_tree_metadata(folder: CheckpointFolder) -> TreeMetadata:
    """Read the metadata of an Orbax tree: the names of its arrays, and how they are stored.

    Strings, None and entries with `skip_deserialize` are omitted. The function does not check
    whether each listed array is stored.

    Args:
        folder: Folder of the tree.

    Raises:
        CheckpointError: If the list of arrays is damaged or too large, if an array has an invalid
            name or two arrays have the same name, or if the folder's OCDBT database contains an
            array that is not listed.
    """
    file = folder.get_file(METADATA)
    location = f"{file.path}"
    if file.nbytes > MAX_TREE_LIST:
        raise UnsupportedCheckpointError(
            f"{location}: has {file.nbytes:,} bytes, but at most {MAX_TREE_LIST:,} are supported"
        )
    content = read_json_object(file)
    ocdbt, zarr3, complete = (
        content.get(name) for name in ("use_ocdbt", "use_zarr3", "store_array_data_equal_to_fill_value")
    )
    if any(type(flag) not in (bool, type(None)) for flag in (ocdbt, zarr3, complete)):
        raise DamagedCheckpointError(
            f"{location}: damaged: use_ocdbt, use_zarr3 or store_array_data_equal_to_fill_value is neither "
            "true nor false"
        )
    tree = content.get("tree_metadata")
    if not isinstance(tree, dict):
        raise DamagedCheckpointError(
            f"{location}: damaged: tree_metadata, the list of the arrays, is missing"
        )
    stored: dict[Path, str] = {}
    scalars, names = set(), set()
    for entry in tree.values():
        try:
            path = tuple(str(key["key"]) for key in entry["key_metadata"])
            value = entry["value_metadata"]
            kind, is_skipped = value["value_type"], value["skip_deserialize"]
        except (LookupError, TypeError):
            raise DamagedCheckpointError(
                f"{location}: damaged: an entry of tree_metadata has no path or type"
            ) from None
        if is_skipped is True or kind in ("string", "None"):
            continue
        name = stored[path] = ".".join(path)
        if not name or len(name) > MAX_TENSOR_NAME:
            raise DamagedCheckpointError(
                f"{location}: damaged: the array name {format_untrusted_value(name)} has {len(name):,} "
                f"characters, but 1 to {MAX_TENSOR_NAME:,} are allowed"
            )
        if name in names:
            raise DamagedCheckpointError(
                f"{location}: damaged: two arrays have the name {format_untrusted_value(name)}"
            )
        names.add(name)
        if kind == "scalar":
            scalars.add(path)
    in_database = (folder.path / MANIFEST).exists() if ocdbt is None else ocdbt
    header, database = (
        V3_HEADER_NAME if zarr3 else V2_HEADER_NAME,
        read_ocdbt_values(folder) if in_database else None,
    )
    if database is not None:
        keys = {key.removesuffix(f"/{header}") for key in database if key.endswith(f"/{header}")}
        extra = min(keys - names, default=None)
        if extra is not None:
            raise DamagedCheckpointError(
                f"{folder.path}: damaged: the array {format_untrusted_value(extra)} is stored, but is not "
                f"listed in {METADATA}"
            )
    # If `complete` is missing or False, chunks of zeros are not stored, as in older versions of Orbax.
    return TreeMetadata(stored, header, complete is True, database, frozenset(scalars))
