"""List the files of a dataset's split, on the Hub or in a local folder with the same layout.

Only the metadata of the dataset is downloaded, not its data files.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portable.config.yaml_text import parse_yaml
from portable.converters.storage.listed_file import ListedFile
from portable.converters.storage.safe_open import read_small_text_file
from portable.data.sources.compression import FILE_FORMATS, get_file_format
from portable.data.sources.datasets_library import build_dataset_load_error, import_datasets
from portable.data.sources.documents import format_name_list
from portable.data.sources.listing import list_local_files
from portable.errors import UserError, to_one_line
from portable.node_folder import compute_once_per_node
from portable.paths import (
    check_folder_files,
    check_link_stays_inside,
    convert_storage_errors,
    open_file,
    validate_relative_name,
)
from portable.untrusted_settings import check_setting_values

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portable.converters.storage.path_or_url import AnyPath

_HUB = "hf://"
_CARD_FILE, _SETTINGS_FILE = "README.md", ".huggingface.yaml"
_FRONT_MATTER = re.compile(r"\s*---[\r\n]+(.*?)[\r\n]+---(?:\r?\n|$)", re.DOTALL)
"""Pattern of the YAML settings block at the start of a dataset card, as in the ``datasets`` library."""
_MAX_CARD_START = 1 << 16  # maximum number of bytes that are searched for the start of the settings block
_FRONT_MATTER_START = re.compile(r"\s*---[\r\n]")
_MAX_CARD_VALUES = 1_000_000
_FILES_PER_REQUEST = 500  # number of files whose sizes one request fetches
_SPLIT_NAME_PATTERNS = (r"train|training", r"test|testing|eval|evaluation|validation|valid|dev|val")
"""Patterns that match the names of training splits and of evaluation splits in a path.

Examples of such paths are test.jsonl and data/train-00000-of-00002.parquet.
"""


def list_hub_split_files(name: str, config_name: str | None, split: str) -> dict[AnyPath, ListedFile | None]:
    """List the files of a dataset's split at the newest revision.

    Args:
        name: Name of the dataset on the Hub.
        config_name: Configuration of the dataset. None selects the default.
        split: Name of the split.

    Returns:
        A :class:`ListedFile` with the size of each file, keyed by URL. The files are in the order
        in which the ``datasets`` library reads them. Every file has a value, so None does not
        occur. The version in each value is empty, because the URL already contains the revision.

    Raises:
        UserError: If the dataset or the split does not exist, or if its files cannot be streamed.
            A file can be streamed if it is in a dataset repository on the Hub and has one of the
            formats in :data:`portable.data.sources.compression.FILE_FORMATS`.
    """
    from portable.converters.storage.object_store import RemotePath  # not needed for local files

    key = f"files of dataset {(name, config_name, split)}"
    files: dict[AnyPath, ListedFile | None] = {}
    for repository, sizes in compute_once_per_node(
        key, lambda: _list_hub_files(name, config_name, split)
    ).items():
        root = RemotePath.from_hub_repository(repository)
        files |= {root / file: ListedFile(size, "") for file, size in sizes.items()}
    return files  # versions are empty, because the repository's name contains the revision


def _list_hub_files(name: str, config_name: str | None, split: str) -> dict[str, dict[str, int]]:
    """List the files of a Hub dataset's split, with their sizes.

    Returns:
        For each repository, such as ``datasets/owner/name@revision``, the size of each file in bytes,
        keyed by path.

    Raises:
        UserError: If the dataset cannot be loaded, does not have the split, or has files that cannot be
            streamed.
    """
    check_hub_card(name)
    with convert_storage_errors("data.source"):
        files_by_repository: dict[str, list[str]] = {}
        for url in _list_split_files(name, config_name, split):
            repository = "/".join(url.removeprefix(_HUB).split("/")[:3])  # datasets/owner/name@revision
            if not url.startswith(f"{_HUB}datasets/") or get_file_format(url) not in FILE_FORMATS:
                raise UserError(
                    f"data.source: {url}: only {format_name_list(FILE_FORMATS)} files can be streamed; set "
                    "data.stream: false to download the dataset"
                )
            files_by_repository.setdefault(repository, []).append(url.removeprefix(f"{_HUB}{repository}/"))
        listed_files: dict[str, dict[str, int]] = {}
        for repository, files in files_by_repository.items():
            sizes = _fetch_file_sizes(repository, files)
            listed_files[repository] = {file: sizes[file] for file in files}
    return listed_files


def _fetch_file_sizes(repository: str, files: list[str]) -> dict[str, int]:
    """Fetch the sizes of files in a Hub repository.

    Args:
        repository: Repository and revision, such as ``datasets/owner/name@revision``.
        files: Paths of files in the repository.

    Returns:
        Sizes in bytes, keyed by path.

    Raises:
        UserError: If a file is missing, or if the Hub cannot be reached.
    """
    from huggingface_hub import HfApi

    name, _, revision = repository.removeprefix("datasets/").partition("@")
    sizes: dict[str, int] = {}
    for start in range(0, len(files), _FILES_PER_REQUEST):
        requested = files[start : start + _FILES_PER_REQUEST]
        try:
            entries = HfApi().get_paths_info(name, requested, revision=revision or None, repo_type="dataset")
            sizes |= {entry.path: getattr(entry, "size", 0) for entry in entries}
        except Exception as error:  # the library and its HTTP client raise exceptions of many classes
            raise build_dataset_load_error((name, None), error) from error
    if missing := [file for file in files if file not in sizes]:
        raise UserError(
            f"data.source: {_HUB}{repository}/{missing[0]}: the dataset has no such file; check the name"
        )
    return sizes


def find_split_files_of_folder(name: str, config_name: str | None, split: str) -> list[Path] | None:
    """List the files of a split in a local folder, as ``load_dataset`` would find them.

    A folder is treated as a folder with splits in three cases:

    - ``config_name`` is set.
    - The dataset card of the folder begins with YAML settings, as in a copy of a Hub dataset, or the
      folder contains ``.huggingface.yaml``.
    - The files are named after splits, for example ``train.jsonl`` and ``test.jsonl``.

    Without this function, all files of such a folder would be used for training, including the test
    split.

    Args:
        name: Path of the folder.
        config_name: Configuration of the dataset. None selects the default.
        split: Name of the split.

    Returns:
        Files of the split. None if ``name`` is not a folder with splits.

    Raises:
        UserError: If the split does not exist, or if one of its files has an unsupported format.
            Also raised if the dataset card refers to a file outside the folder, if a link in the
            folder has a target that is not allowed, or if the ``datasets`` library is not
            installed.
    """
    folder = Path(name)
    try:
        if not folder.is_dir():
            return None
    except (OSError, ValueError):  # the name is not a valid path
        return None
    if not (config_name or _has_card_settings(folder) or _has_split_names(folder)):
        return None
    check_folder_files("data.source", str(folder), max_files=None)
    _check_folder_card(folder)
    files = [Path(file) for file in _list_split_files(str(folder), config_name, split)]
    for file in files:
        if get_file_format(file) not in FILE_FORMATS:
            raise UserError(
                f"data.source: {file}: this kind of file is not supported; use "
                f"{format_name_list(FILE_FORMATS)}"
            )
    return files


def _has_card_settings(folder: Path) -> bool:
    """Return whether a folder contains settings of a dataset, as a copy of a Hub dataset does.

    The settings are a block of YAML at the start of the dataset card, or a file ``.huggingface.yaml``.

    Raises:
        UserError: If one of these files is a link that leaves the folder.
    """
    for name in (_CARD_FILE, _SETTINGS_FILE):
        check_link_stays_inside("data.source", folder / name, folder)
    if (folder / _SETTINGS_FILE).is_file():
        return True
    try:
        with open_file(folder / _CARD_FILE, folder) as file:
            start = file.read(_MAX_CARD_START).decode("utf-8", "replace")
    except OSError:
        return False
    return _FRONT_MATTER_START.match(start) is not None


def check_hub_card(name: str) -> None:
    """Check that the settings in a Hub dataset refer only to files of this dataset.

    A dataset may list its data files in its card (``README.md``) and in ``.huggingface.yaml``. Both
    files are downloaded and checked. A file that cannot be downloaded is skipped: it may not exist,
    and any other problem is reported when the dataset is loaded.

    Raises:
        UserError: If the settings refer to a file outside the dataset, or cannot be parsed.
    """
    from huggingface_hub import hf_hub_download

    for file in (_CARD_FILE, _SETTINGS_FILE):
        try:
            path = Path(hf_hub_download(name, file, repo_type="dataset"))
        except Exception:  # if the repository cannot be read, the library that loads it reports the reason
            continue
        _check_card_file(path)


def _check_folder_card(folder: Path) -> None:
    """Check that the dataset card in a local folder refers only to files in this folder.

    The settings file ``.huggingface.yaml`` is also checked, if it exists.

    Raises:
        UserError: If the card or the settings file refers to another file, or cannot be parsed.
    """
    for path in (folder / _CARD_FILE, folder / _SETTINGS_FILE):
        if path.is_file():
            _check_card_file(path)


def _check_card_file(path: Path) -> None:
    """Check that a dataset card or settings file refers only to files of the dataset.

    Without this check, the ``datasets`` library would read any local file or URL that the card or
    settings file names.

    Raises:
        UserError: If the file refers to a file outside the dataset, or cannot be parsed.
    """
    try:
        text = read_small_text_file(path)
        if path.name == _CARD_FILE:
            block = _FRONT_MATTER.match(text)
            text = block[1] if block else ""
        settings = parse_yaml(text, path.name, max_nodes=_MAX_CARD_VALUES).value
        configs = settings.get("configs") if isinstance(settings, dict) else None
        for config in configs or ():
            for key in ("data_files", "data_dir"):
                for data_file in _iter_strings(config.get(key)):
                    validate_relative_name(data_file)
        check_setting_values("configs", configs, path.parent)
    except Exception as error:  # a card may contain any values
        reason = to_one_line(error).partition("; ")[0].removeprefix(path.name).lstrip(": ")
        raise UserError(
            f"data.source: {path}: {reason[:200]}; correct the file, or use a local folder with only the "
            "data files"
        ) from error


def _iter_strings(value: Any) -> Iterator[str]:
    """Yield all strings in nested lists and mappings."""
    if isinstance(value, str):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _iter_strings(inner)


def _has_split_names(folder: Path) -> bool:
    """Return whether the paths in a folder indicate both a training and an evaluation split.

    For example, ``train.jsonl`` and ``test.jsonl`` do, and also files in subfolders with the names
    ``train`` and ``test``.

    Raises:
        UserError: If the folder has no files with a supported format, or if a link leaves the
            folder.
    """
    names = [str(file.relative_to(folder)).lower() for file in list_local_files(str(folder)) or ()]
    return all(
        any(re.search(rf"(?<![a-z])({words})(?![a-z])", name) for name in names)
        for words in _SPLIT_NAME_PATTERNS
    )


def _list_split_files(name: str, config_name: str | None, split: str) -> list[str]:
    """List the files of a split with the ``datasets`` library.

    The library follows any path or URL in the dataset card, so the caller must check the card
    first. See :func:`check_hub_card` and :func:`_check_folder_card`.

    Args:
        name: Name of the dataset on the Hub, or path of its folder.
        config_name: Configuration of the dataset. None selects the default.
        split: Name of the split.

    Returns:
        Paths of local files, or URLs.

    Raises:
        UserError: If the dataset cannot be loaded or does not have the split.
    """
    datasets = import_datasets(f"the dataset {name!r}")
    try:
        files = datasets.load_dataset_builder(name, config_name).config.data_files or {}
    except Exception as error:
        raise build_dataset_load_error((name, config_name), error) from error
    if split not in files:
        split_names = format_name_list(map(str, files)) or "none"
        raise UserError(
            f"data.split: {name} has no files for the split {split!r}; choose another split (the splits are: "
            f"{split_names})"
        )
    return [str(file) for file in files[split]]
