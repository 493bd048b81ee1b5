"""The manifest of a checkpoint of this project: every file of it, with its size and what it is checked by.

    {"version": 1, "step": 100, "run": "1f0c...", "files": {"config.json": {"bytes": 654, "crc32": 123},
     "__0_0.distcp": {"bytes": 9876}, "mp_rank_00_model_states.pt": {"bytes": 8765, "directory": 456}},
     "crc32": 789}

It holds a CRC32 of itself. No shard is read for it: a file of DCP items is sealed already, by a seal that
the manifest names (see :mod:`converters.formats.dcp.checksums`), and the directory of a torch.save file
holds the
CRC32s of what is in the file, as torch took them while it wrote. Whoever reads a tensor checks those.
"""

from __future__ import annotations

import json
import os
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from isal import isal_zlib

from converters.errors import CheckpointError, printable
from converters.storage.guarded import open_regular, read_small_text, real_path
from converters.storage.object_store import RemotePath

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from converters.storage.path_or_url import Place

MANIFEST = "checkpoint_manifest.json"
_VERSION = 1
_SEALED = ".distcp"
_ZIP = b"PK\x03\x04"
_CHUNK = 1 << 22

Entries = dict[str, dict[str, int]]


def manifest_entries(folder: Path) -> Entries:
    """What a manifest tells of the files below ``folder``, on this machine."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    entries: Entries = {}
    for path in paths:
        name = path.relative_to(folder).as_posix()
        entry = {"bytes": path.stat().st_size}
        if path.suffix != _SEALED:
            with path.open("rb") as file:
                zipped = file.read(len(_ZIP)) == _ZIP
            entry |= {"directory": _directory(folder, name)} if zipped else {"crc32": _crc32(path)}
        entries[name] = entry
    return entries


def manifest_text(entries: Mapping[str, Mapping[str, int]], **about: Any) -> str:
    """A manifest of these files.

    Args:
        entries: as :func:`manifest_entries` gives them, of all ranks.
        about: what else it tells: the step, the run.
    """
    document = {"version": _VERSION, **about, "files": dict(sorted(entries.items()))}
    return json.dumps({**document, "crc32": _own_crc32(document)}) + "\n"


def read_manifest(folder: Place) -> dict[str, Any] | None:
    """The manifest of a checkpoint; None where there is none; CheckpointError where it is damaged."""
    path = folder / MANIFEST
    try:
        found = json.loads(read_small_text(path, folder))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        raise CheckpointError(f"{path}: damaged") from None
    if not isinstance(found, dict) or not _whole(found):
        raise CheckpointError(f"{path}: damaged")
    if found.get("version") != _VERSION:
        raise CheckpointError(f"{path}: of a newer version than this program")
    return found


def check_manifest(folder: Place, only: Callable[[str], object] | None = None) -> dict[str, Any] | None:
    """Hold the files of a checkpoint against its manifest; None where it has none.

    Files that the manifest does not name are nobody's concern here.

    Args:
        folder: of the checkpoint.
        only: whether a file of that name is to be looked at; all are by default.

    Raises:
        CheckpointError: a file is missing, or another one than was written.
    """
    found = read_manifest(folder)
    if found is None:
        return None
    there = folder.files() if isinstance(folder, RemotePath) else None
    for name, told in found["files"].items():
        if only is not None and not only(name):
            continue
        path = folder / name
        try:
            if there is None:
                real_path(path, folder)  # type: ignore[arg-type]
            size = path.stat().st_size if there is None else there[name]
            if size != told["bytes"]:
                raise CheckpointError(
                    f"{printable(path)}: has {size:,} bytes, and {told['bytes']:,} were written"
                )
            if "crc32" in told and _crc32(path) != told["crc32"]:
                raise CheckpointError(f"{printable(path)}: damaged, or of another save")
            if "directory" in told and _directory(folder, name) != told["directory"]:
                raise CheckpointError(f"{printable(path)}: damaged, or of another save")
        except (KeyError, FileNotFoundError):
            raise CheckpointError(f"{printable(path)}: missing, and {MANIFEST} names it") from None
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror or error}") from None
    return found


def is_named(folder: Place, name: str) -> bool:
    """Whether a checkpoint has a manifest, and it names such a file."""
    found = read_manifest(folder)
    return found is not None and name in found["files"]


def _whole(found: dict[str, Any]) -> bool:
    """Whether a manifest is as it was written, and each of its entries is one."""
    rest = {key: value for key, value in found.items() if key != "crc32"}
    try:
        if found.get("crc32") != _own_crc32(rest):
            return False
    except RecursionError:  # as deep as can just be read
        return False
    files = found.get("files")
    return isinstance(files, dict) and all(map(_sound, files.items()))


def _sound(item: tuple[str, Any]) -> bool:
    """Whether an entry names a file below the folder, and tells numbers of it."""
    name, told = item
    path = PurePosixPath(name)
    return (
        _is_file_name(name)
        and not path.is_absolute()
        and ".." not in path.parts
        and isinstance(told, dict)
        and isinstance(told.get("bytes"), int)
        and all(isinstance(value, int) for value in told.values())
    )


def _is_file_name(name: str) -> bool:
    """Whether a file can have this name: it has no NUL in it, nor half of a surrogate pair."""
    try:
        return bool(name) and b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:
        return False


def _own_crc32(document: Mapping[str, Any]) -> int:
    return isal_zlib.crc32(json.dumps(document, sort_keys=True).encode())


def _crc32(path: Place) -> int:
    if isinstance(path, RemotePath):
        return isal_zlib.crc32(path.read_bytes())
    crc = 0
    with os.fdopen(open_regular(path), "rb") as file:
        while chunk := file.read(_CHUNK):
            crc = isal_zlib.crc32(chunk, crc)
    return crc


def _directory(folder: Place, name: str) -> int:
    from converters.containers.torchzip import TorchZip
    from converters.storage.folder import Folder

    return TorchZip(Folder(folder).file(name)).checksum
