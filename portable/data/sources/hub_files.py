"""The files of a split of a data set, on the hub or in a local folder that is laid out as one.

On the hub they are read as a stream: no file is downloaded whole, or twice.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portable.config.yaml_text import parse
from portable.converters.storage.listed import Object
from portable.converters.storage.safe_open import read_small_text
from portable.data.sources.compression import FORMATS, format_of
from portable.data.sources.documents import listed
from portable.data.sources.library import cannot_load, datasets_library
from portable.data.sources.listing import local_files
from portable.errors import UserError, one_line
from portable.node_folder import compute_once
from portable.paths import check_folder, check_link, name_inside, open_file, storage_errors
from portable.untrusted_settings import check_values

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portable.converters.storage.path_or_url import Place

_HUB = "hf://"
_CARD, _STANDALONE = "README.md", ".huggingface.yaml"
_FRONT_MATTER = re.compile(r"\s*---[\r\n]+(.*?)[\r\n]+---(?:\r?\n|$)", re.DOTALL)
"""Settings at the start of a dataset card."""
_MAX_CARD_VALUES = 1_000_000
_AT_A_TIME = 500  # files that are asked for in a request
_SPLITS = (r"train|training", r"test|testing|eval|evaluation|validation|valid|dev|val")
"""Names of splits, as in test.jsonl or data/train-00000-of-00002.parquet."""


def hub_files(name: str, config_name: str | None, split: str) -> dict[Place, Object | None]:
    """The files of a split, in the order of the ``datasets`` library, at the newest revision.

    Raises:
        UserError: if there is no such data set or split, or its files cannot be read as a stream.
    """
    from portable.converters.storage.object_store import RemotePath  # a run on a disk does without

    key = f"files of dataset {(name, config_name, split)}"
    files: dict[Place, Object | None] = {}
    for repository, sizes in compute_once(key, lambda: _list_hub_files(name, config_name, split)).items():
        root = RemotePath.of_hub(repository)
        files |= {root / file: Object(size, "") for file, size in sizes.items()}
    return files  # without versions, because the name of the repository has the revision


def _list_hub_files(name: str, config_name: str | None, split: str) -> dict[str, dict[str, int]]:
    """Return the sizes of the files of a split in bytes, keyed by repository and path."""
    check_hub_card(name)
    with storage_errors("data.source"):
        wanted: dict[str, list[str]] = {}
        for url in _files_of_split(name, config_name, split):
            repository = "/".join(url.removeprefix(_HUB).split("/")[:3])  # datasets/owner/name@revision
            if not url.startswith(f"{_HUB}datasets/") or format_of(url) not in FORMATS:
                raise UserError(
                    f"data.source: {url}: cannot stream this kind of file (but {listed(FORMATS)}); "
                    "set data.stream to false"
                )
            wanted.setdefault(repository, []).append(url.removeprefix(f"{_HUB}{repository}/"))
        listed_files: dict[str, dict[str, int]] = {}
        for repository, files in wanted.items():
            sizes = _sizes(repository, files)
            listed_files[repository] = {file: sizes[file] for file in files}
    return listed_files


def _sizes(repository: str, files: list[str]) -> dict[str, int]:
    """The sizes of files of a repository on the hub, in bytes."""
    from huggingface_hub import HfApi

    name, _, revision = repository.removeprefix("datasets/").partition("@")
    sizes: dict[str, int] = {}
    for start in range(0, len(files), _AT_A_TIME):
        some = files[start : start + _AT_A_TIME]
        try:
            found = HfApi().get_paths_info(name, some, revision=revision or None, repo_type="dataset")
            sizes |= {entry.path: getattr(entry, "size", 0) for entry in found}
        except Exception as error:  # its own, and those of its HTTP client
            raise cannot_load((name, None), error) from error
    if missing := [file for file in files if file not in sizes]:
        raise UserError(f"data.source: {_HUB}{repository}/{missing[0]}: there is no such file")
    return sizes


def files_of_folder(name: str, config_name: str | None, split: str) -> list[Path] | None:
    """The files of a split of a local folder, as ``load_dataset`` finds them; None if it has no splits.

    It has some if its card has settings, as a copy of a data set of the hub has, or if its files are named
    by split. All files of such a folder together would be trained on and evaluated.

    Raises:
        UserError: if there is no such split, or it has files that cannot be read.
    """
    folder = Path(name)
    try:
        if not folder.is_dir():
            return None
    except (OSError, ValueError):  # no possible name
        return None
    if not (config_name or _has_settings(folder) or _named_by_split(folder)):
        return None
    check_folder("data.source", str(folder), most=None)
    _check_card(folder)
    found = [Path(file) for file in _files_of_split(str(folder), config_name, split)]
    for file in found:
        if format_of(file) not in FORMATS:
            raise UserError(f"data.source: {file}: cannot read this kind of file; use {listed(FORMATS)}")
    return found


def _has_settings(folder: Path) -> bool:
    check_link("data.source", folder / _CARD, folder)
    try:
        with open_file(folder / _CARD, folder) as file:
            return file.read(4).rstrip() == b"---"
    except OSError:
        return False


def check_hub_card(name: str) -> None:
    """Check that the settings of a dataset on the hub name only its own files.

    Raises:
        UserError: If they name another file.
    """
    from huggingface_hub import hf_hub_download

    for file in (_CARD, _STANDALONE):
        try:
            path = Path(hf_hub_download(name, file, repo_type="dataset"))
        except Exception:  # the library that reads the repository reports why it cannot
            continue
        _check_card_file(path)


def _check_card(folder: Path) -> None:
    """Check that the settings of a folder name only its own files.

    Raises:
        UserError: If they name another file.
    """
    for path in (folder / _CARD, folder / _STANDALONE):
        if path.is_file():
            _check_card_file(path)


def _check_card_file(path: Path) -> None:
    """Check the settings of a dataset. ``datasets`` would read any file or URL that they name."""
    try:
        text = read_small_text(path)
        if path.name == _CARD:
            block = _FRONT_MATTER.match(text)
            text = block[1] if block else ""
        settings = parse(text, path.name, most=_MAX_CARD_VALUES).value
        configs = settings.get("configs") if isinstance(settings, dict) else None
        for config in configs or ():
            for key in ("data_files", "data_dir"):
                for named in _texts_in(config.get(key)):
                    name_inside(named)
        check_values("configs", configs, path.parent)
    except Exception as error:  # a card may hold any values
        raise UserError(
            f"data.source: {path}: {one_line(error)[:200]}; correct it, or remove it to read all data files "
            "of the folder"
        ) from error


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts_in(inner)


def _named_by_split(folder: Path) -> bool:
    names = [str(file.relative_to(folder)).lower() for file in local_files(str(folder)) or ()]
    return all(any(re.search(rf"(?<![a-z])({words})(?![a-z])", name) for name in names) for words in _SPLITS)


def _files_of_split(name: str, config_name: str | None, split: str) -> list[str]:
    datasets = datasets_library(f"the data set {name!r}")
    try:
        files = datasets.load_dataset_builder(name, config_name).config.data_files or {}
    except Exception as error:
        raise cannot_load((name, config_name), error) from error
    if split not in files:
        known = listed(map(str, files)) or "none"
        raise UserError(f"data.split: {name} has no split {split!r} of files; it has {known}")
    return [str(file) for file in files[split]]
