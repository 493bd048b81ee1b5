"""Write and check the manifest of a checkpoint: every file with its size and a checksum.

    {"version": 1, "step": 100, "run": "1f0c...", "files": {"config.json": {"bytes": 654, "crc32": 123},
     "__0_0.distcp": {"bytes": 9876}, "mp_rank_00_model_states.pt": {"bytes": 8765, "directory": 456}},
     "crc32": 789}

The last CRC32 is the checksum of the manifest itself. The checksums of `.distcp` and `.metadata` files
are in a separate file that the manifest lists, see
:mod:`portable.converters.formats.dcp.checksums`. For a torch.save file, `directory` is the checksum
of the zip directory, which contains the CRC32s that torch computed while writing. These CRC32s are
verified when a tensor is read. The tensor data in files of these two kinds is therefore not read
when a manifest is written. All other files are read completely.
"""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from isal import isal_zlib

from portable.converters.errors import CheckpointError, DamagedCheckpointError, to_printable
from portable.converters.storage.byte_sources import CRC_CHUNK_BYTES
from portable.converters.storage.folder import CheckpointFolder
from portable.converters.storage.folder_operations import list_names_below
from portable.converters.storage.safe_open import is_safe_relative_path, read_small_text_file

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from portable.converters.storage.byte_sources import CheckpointFile
    from portable.converters.storage.path_or_url import AnyPath

MANIFEST = "checkpoint_manifest.json"
_VERSION = 1
# Endings of DCP files, whose checksums are in a separate file. `Path(".metadata")` has no suffix, so the
# endings are compared with the name.
_SUFFIXES_CHECKED_ELSEWHERE = (".distcp", ".metadata")
_NUM_PARALLEL_READS = 16
"""Number of files that are read in parallel."""
_ZIP_SIGNATURE = b"PK\x03\x04"

ManifestEntries = dict[str, dict[str, int]]

# Files by which DCP and the universal format of DeepSpeed are recognized. If such a file were added to a ZeRO
# checkpoint, the checkpoint would be opened as the other format.
_OTHER_FORMAT_NAMES = re.compile(r"(.*/)?(\w*\.metadata|\w+\.distcp|latest_universal|zero/.*/fp32\.pt)")


def compute_manifest_entries(folder: Path) -> ManifestEntries:
    """Compute the manifest entries for all files in a folder, except for the manifest.

    Args:
        folder: Local folder of the checkpoint. Its subfolders are included.

    Returns:
        The entry of each file, keyed by the path relative to the folder. An entry consists of the
        size in bytes (`bytes`) and at most one checksum: of the zip directory (`directory`) for a
        zip archive, or of the content (`crc32`) for other files. The entry of a `.distcp` or
        `.metadata` file has no checksum.

    Raises:
        CheckpointError: If a zip archive was not written by torch.save, or is damaged.
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    entries: ManifestEntries = {}
    opened = CheckpointFolder(folder)
    for path in paths:
        name = path.relative_to(folder).as_posix()
        file = opened.get_file(name)
        entries[name] = {"bytes": file.nbytes}
        if not path.name.endswith(_SUFFIXES_CHECKED_ELSEWHERE):
            zipped = file.read_bytes(0, min(len(_ZIP_SIGNATURE), file.nbytes)) == _ZIP_SIGNATURE
            kind = "directory" if zipped else "crc32"
            entries[name][kind] = _CHECKSUMS[kind](file)
    return entries


def format_manifest(entries: Mapping[str, Mapping[str, int]], **about: Any) -> str:
    """Format the text of a manifest.

    Args:
        entries: Results of :func:`compute_manifest_entries`, merged from all ranks.
        about: Other fields, such as the step and the id of the run.

    Returns:
        The manifest as one line of JSON.
    """
    document = {"version": _VERSION, **about, "files": dict(sorted(entries.items()))}
    return json.dumps({**document, "crc32": _compute_own_crc32(document)}) + "\n"


def read_manifest(folder: AnyPath) -> dict[str, Any] | None:
    """Read the manifest of a checkpoint, and check that the manifest is valid.

    The files that the manifest lists are not checked.

    Args:
        folder: Folder or URL of the checkpoint.

    Returns:
        The manifest. None if the checkpoint does not have one.

    Raises:
        CheckpointError: If the manifest is damaged, cannot be read, or was written by a newer
            version of this program.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(read_small_text_file(path, folder))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        raise DamagedCheckpointError(f"{path}: is damaged") from None
    if not isinstance(manifest, dict) or not _is_valid_manifest(manifest):
        raise DamagedCheckpointError(f"{path}: is damaged")
    if manifest.get("version") != _VERSION:
        raise CheckpointError(
            f"{path}: was written by a newer version of this program; upgrade portable-trainer"
        )
    return manifest


def check_manifest(
    folder: AnyPath,
    only: Callable[[str], object] | None = None,
    *,
    reads: Callable[[str], bool] = lambda _: True,
) -> dict[str, Any] | None:
    """Check the files of a checkpoint against its manifest.

    Files that are not in the manifest are ignored, unless they would make the folder look like another
    format. Such files are found regardless of `only`. All sizes are compared before the first checksum
    is computed.

    Args:
        folder: Folder or URL of the checkpoint.
        only: Function that takes a file name, and returns whether to check the file. None to check all
            files.
        reads: Function that takes a file name, and returns whether to compute the checksum of the file
            and compare it. If it returns False, or if the manifest contains no checksum of the file,
            only the size is compared. By default, all checksums of the checked files are compared.

    Returns:
        The manifest. None if the checkpoint does not have one, in which case nothing was checked.

    Raises:
        CheckpointError: If a file is missing or has changed, if a file of another format was added, or
            if the manifest is damaged or was written by a newer version of this program.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        return None
    present_names = list_names_below(folder)
    for name in sorted(present_names):
        if name not in manifest["files"] and _OTHER_FORMAT_NAMES.fullmatch(name):
            raise CheckpointError(
                f"{to_printable(folder / name)}: is not listed in {MANIFEST}; move the file out of the "
                "checkpoint"
            )
    opened = CheckpointFolder(folder)
    checked = {name: entry for name, entry in manifest["files"].items() if only is None or only(name)}
    for name, entry in checked.items():
        path = to_printable(folder / name)
        if name not in present_names:
            raise DamagedCheckpointError(f"{path}: is missing, although {MANIFEST} lists this file")
        if (size := opened.get_file(name).nbytes) != entry["bytes"]:
            raise DamagedCheckpointError(
                f"{path}: has {size:,} bytes, but {entry['bytes']:,} bytes were written"
            )

    def is_intact(name: str) -> bool:
        file = opened.get_file(name)
        return all(
            compute(file) == checked[name][kind]
            for kind, compute in _CHECKSUMS.items()
            if kind in checked[name]
        )

    # Read files in parallel, because there may be thousands of them and a read from a store is a request.
    names = list(filter(reads, checked))
    with ThreadPoolExecutor(_NUM_PARALLEL_READS) as pool:
        for name, intact in zip(names, pool.map(is_intact, names), strict=True):
            if not intact:
                raise DamagedCheckpointError(
                    f"{to_printable(folder / name)}: is damaged or from another save"
                )
    return manifest


def is_listed_in_manifest(folder: AnyPath, name: str) -> bool:
    """Return whether a checkpoint has a manifest that lists a file.

    Args:
        folder: Folder or URL of the checkpoint.
        name: Path of the file, relative to the folder.

    Raises:
        CheckpointError: If the manifest is damaged, or was written by a newer version of this
            program.
    """
    manifest = read_manifest(folder)
    return manifest is not None and name in manifest["files"]


def _is_valid_manifest(manifest: dict[str, Any]) -> bool:
    """Return whether the manifest matches its CRC32 and all of its entries are well formed."""
    rest = {key: value for key, value in manifest.items() if key != "crc32"}
    try:
        if manifest.get("crc32") != _compute_own_crc32(rest):
            return False
    except RecursionError:  # nested almost as deeply as json.loads accepts
        return False
    files = manifest.get("files")
    return isinstance(files, dict) and all(
        is_safe_relative_path(name)
        and isinstance(entry, dict)
        and "bytes" in entry
        and all(isinstance(value, int) for value in entry.values())
        for name, entry in files.items()
    )


def _compute_own_crc32(document: Mapping[str, Any]) -> int:
    return isal_zlib.crc32(json.dumps(document, sort_keys=True).encode())


def _compute_crc32(file: CheckpointFile) -> int:
    crc = 0
    buffer = memoryview(bytearray(min(CRC_CHUNK_BYTES, file.nbytes)))
    for offset in range(0, file.nbytes, CRC_CHUNK_BYTES):
        part = buffer[: file.nbytes - offset]
        # Announce that the complete file will be read, so that an object in a store is read ahead.
        file.read_into(part, offset, file.nbytes, file.nbytes)
        crc = isal_zlib.crc32(part, crc)
    return crc


def _compute_directory_crc32(file: CheckpointFile) -> int:
    from portable.converters.containers.torchzip import TorchZip  # not at the top, because the import is slow

    return TorchZip(file).checksum


_CHECKSUMS = {"crc32": _compute_crc32, "directory": _compute_directory_crc32}
"""Functions that compute a checksum of a file, keyed by the name of the checksum in a manifest entry."""
