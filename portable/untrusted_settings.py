"""Check the settings in a downloaded model folder before a library uses them.

``from_pretrained`` of transformers passes every key of ``tokenizer_config.json`` and
``special_tokens_map.json`` to the tokenizer's constructor, which opens some of them as files. A
malicious folder could therefore refer to any file of the user, such as a private key, and the
contents of that file would be copied into checkpoints.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portable.converters.names.contradictions import describe_invalid_settings
from portable.converters.storage.safe_open import is_safe_relative_path
from portable.errors import UserError, to_one_line
from portable.paths import check_folder_files, read_json_file

if TYPE_CHECKING:
    from collections.abc import Iterator

TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json")
"""Files whose keys ``AutoTokenizer.from_pretrained`` passes to the constructor of the tokenizer."""
CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"
INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
"""Files that list the weight files of a model, which ``from_pretrained`` then opens."""
TEXT_KEYS = frozenset(
    {
        "_name_or_path",
        "architectures",
        "auto_map",
        "base_model_name_or_path",
        "chat_template",
        "content",
        "name_or_path",
        "special",
        "template",
        "tokenizer_class",
        "additional_special_tokens",
        "extra_special_tokens",
    }
)
"""Keys whose values no library opens as files, so the values may be any text.

The same is true for keys that end in ``_token`` or ``_tokens``. See :func:`_is_text`.
"""
MAX_MODEL_LAYERS = 4096
"""Maximum number of layers of a model.

Each layer costs milliseconds and kilobytes, even on the meta device.
"""
_SPECIAL_FILE_SYSTEMS = ("/proc/", "/sys/", "/dev/")


def check_downloaded_settings(
    key: str, name_or_path: str, files: tuple[str, ...], *, offline: bool = False
) -> None:
    """Check a local folder or a repository on the hub before a library reads it.

    Files of a repository are downloaded to the cache of the hub. A file that does not exist or cannot be
    parsed is skipped, because the library reports it.

    Args:
        key: Setting that names the folder, used in error messages.
        name_or_path: Hub ID or folder.
        files: Names of the JSON files whose values the library uses.
        offline: Whether to use only cached files of the hub.

    Raises:
        UserError: If a link leaves the folder, a name is not a regular file, a value of ``files`` names a
            file outside the folder, a size is out of bounds, or a value of ``config.json`` has the wrong
            type.
    """
    check_folder_files(key, name_or_path)
    for path in _fetch_settings_files(name_or_path, files, offline=offline):
        try:
            settings = read_json_file(path)
        except (OSError, ValueError):  # the library reports a file that it cannot read
            continue
        check_setting_values(f"{key}: {path}", settings, path.parent)
        if path.name == CONFIG_FILE and isinstance(settings, dict):
            invalid = describe_invalid_settings(settings, ())
            if invalid:
                raise UserError(f"{key}: {path}: {to_one_line(invalid[0])}; correct the file")


def check_setting_values(location: str, settings: Any, folder: Path) -> None:
    """Check the values of a JSON or YAML file.

    Args:
        location: Beginning of the error message.
        settings: Values of the file.
        folder: Folder whose files the values may name.

    Raises:
        UserError: If a string names a file outside the folder, or a number of layers is too large.
    """
    for key, value in _iter_values(settings, ""):
        if isinstance(value, str) and not _is_text(key) and _names_file_outside(value, folder):
            raise UserError(
                f"{location}: {key}: {to_one_line(repr(value[:200]))} names a file outside the folder; "
                "remove the key, or use another folder"
            )
        if _is_layer_count(key) and isinstance(value, int) and value > MAX_MODEL_LAYERS:
            raise UserError(f"{location}: {key}: {value} is too large; use at most {MAX_MODEL_LAYERS}")


@contextmanager
def convert_library_errors(key: str) -> Iterator[None]:
    """Convert exceptions of a library that reads a downloaded folder to UserError within this context.

    Almost all types are converted, because libraries raise various exceptions for wrong values in
    files. A MemoryError propagates unchanged.

    Args:
        key: Setting that names the folder, used in error messages.

    Raises:
        UserError: If the library raises an exception.
    """
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        reason = to_one_line(error)[:500] or type(error).__name__
        raise UserError(f"{key}: {reason}") from error


def describe_download_error(name: str, error: BaseException) -> str:
    """Describe why a model, tokenizer or adapter could not be loaded from the hub.

    Args:
        name: Name of the repository on the hub.
        error: Exception of transformers or huggingface_hub.

    Returns:
        One line, with a remedy if the files are not cached.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError

    if not any(isinstance(cause, LocalEntryNotFoundError) for cause in (error, error.__cause__)):
        return to_one_line(error)
    if constants.HF_HUB_OFFLINE:
        return f"{name}: is not cached on this machine; unset HF_HUB_OFFLINE, or use a folder"
    return (
        f"{name}: is not cached on this machine, and the hub cannot be reached; use a folder, or run hf "
        f"download {name} on another machine and copy its cache"
    )


def _fetch_settings_files(name_or_path: str, files: tuple[str, ...], *, offline: bool) -> list[Path]:
    """Return the local paths of the settings files that exist in a folder or hub repository.

    Files of a repository are downloaded to the cache. A file that cannot be downloaded is skipped,
    because the library that reads the repository reports the error.

    Args:
        name_or_path: Hub ID or folder.
        files: Names of the files.
        offline: Whether to use only cached files of the hub.

    Returns:
        The paths. Empty if ``name_or_path`` is neither a folder nor a possible repository.
    """
    folder = Path(name_or_path)
    try:
        if folder.is_dir():
            return [folder / file for file in files if (folder / file).is_file()]
    except (OSError, ValueError):  # not a possible path
        return []
    if name_or_path.startswith(("/", ".", "~")) or name_or_path.count("/") > 1:
        return []
    from huggingface_hub import hf_hub_download

    paths = []
    for file in files:
        try:
            paths.append(Path(hf_hub_download(name_or_path, file, local_files_only=offline)))
        except Exception:  # the library that reads the repository reports why it cannot
            continue
    return paths


def _iter_values(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yield each scalar in nested dicts and lists, with the key of the innermost dict around it.

    Args:
        value: Parsed JSON or YAML.
        key: Key of the scalars that are not in a dictionary.

    Yields:
        Pairs of a key and a scalar, in no particular order.
    """
    pending = [(key, value)]
    while pending:
        key, value = pending.pop()
        if isinstance(value, dict):
            pending.extend((str(name), inner) for name, inner in value.items())
        elif isinstance(value, list | tuple):
            pending.extend((key, inner) for inner in value)
        else:
            yield key, value


def _is_text(key: str) -> bool:
    """Return whether the values of a key are plain text, which no library opens as files."""
    return key in TEXT_KEYS or key.endswith(("_token", "_tokens"))


def _is_layer_count(key: str) -> bool:
    """Return whether a key of a model's config specifies a number of layers."""
    return key in {"n_layer", "n_layers", "depth"} or key.endswith(("_layers", "_blocks"))


def _names_file_outside(value: str, folder: Path) -> bool:
    """Return whether opening ``value`` as a path would read a file outside the folder.

    The path can be relative to the current folder, the home folder, or ``folder``. A path that does not
    exist is harmless and returns False. Published settings contain many of them, such as the author's
    cache. A single word that matches the name of a folder also returns False.
    """
    try:
        encoded = os.fsencode(value)
    except UnicodeEncodeError:  # The value contains a lone surrogate, which a path cannot contain.
        return False
    if b"\0" in encoded or len(encoded) > os.pathconf("/", "PC_PATH_MAX"):
        return False
    if value.startswith(_SPECIAL_FILE_SYSTEMS):
        return True
    candidates = {value, os.path.expanduser(value)}  # noqa: PTH111 (it may not be a possible path)
    if not is_safe_relative_path(value):
        candidates.add(os.path.join(folder, value))  # noqa: PTH118
    root = os.path.realpath(folder)
    for path in candidates:
        real = os.path.realpath(path)
        if os.path.commonpath([root, real]) == root or not os.path.exists(real):  # noqa: PTH110
            continue
        is_path = os.sep in value and value.strip("./") != ""  # otherwise it is a word or only a separator
        if is_path or not os.path.isdir(real):  # noqa: PTH112
            return True
    return False
