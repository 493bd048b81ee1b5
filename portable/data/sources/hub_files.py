"""The files of a hub data set, to be read as a stream: no file is downloaded whole, or twice."""

from __future__ import annotations

from converters.storage.object_store import Object, RemotePath
from portable.data.sources.compression import format_of
from portable.data.sources.documents import listed
from portable.data.sources.files import FORMATS
from portable.data.sources.library import cannot_load, datasets_library
from portable.errors import UserError
from portable.paths import storage_errors

_HUB = "hf://"


def hub_files(name: str, config_name: str | None, split: str) -> dict[RemotePath, Object]:
    """The files of a split, in the order of the ``datasets`` library, at the newest revision.

    Raises:
        UserError: if there is no such data set or split, or its files cannot be read as a stream.
    """
    datasets = datasets_library(f"the hub data set {name!r}")
    try:
        files = datasets.load_dataset_builder(name, config_name).config.data_files or {}
    except Exception as error:
        raise cannot_load((name, config_name), error) from error
    if split not in files:
        known = listed(map(str, files)) or "none"
        raise UserError(f"data.split: {name} has no split {split!r} of files; it has {known}")
    found: dict[RemotePath, Object] = {}
    with storage_errors("data.source"):
        roots: dict[str, RemotePath] = {}
        for url in map(str, files[split]):
            repository = "/".join(url.removeprefix(_HUB).split("/")[:3])  # datasets/owner/name@revision
            if not url.startswith(f"{_HUB}datasets/") or format_of(url) not in FORMATS:
                raise UserError(
                    f"data.source: {url}: cannot stream this kind of file (but {listed(FORMATS)}); "
                    "set data.stream to false"
                )
            root = roots.setdefault(repository, RemotePath.of(_HUB + repository))
            path = root / url.removeprefix(f"{_HUB}{repository}/")
            found[path] = Object(path.stat().st_size, "")  # the revision is the version
    return found
