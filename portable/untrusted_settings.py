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
    """Check that a library can safely read a local folder or a repository on the hub.

    A local folder must not contain links to files outside it. The values in the JSON files must not
    name files outside the folder. Numbers of layers must not be too large, and the values in
    ``config.json`` must have valid types and sizes. Files of a repository are downloaded to the
    cache of the hub. A file that does not exist or cannot be parsed is skipped, because the library
    reports it.

    Args:
        key: Setting that names the folder, used in error messages.
        name_or_path: Hub ID or folder.
        files: Names of the JSON files whose values the library uses.
        offline: Whether to use only cached files of the hub.

    Raises:
        UserError: If a link or a value in one of the ``files`` leads outside the folder. Also
            raised if an entry of the folder is not a regular file, if the folder has too many
            files, if a size in the settings is out of bounds, or if a value in ``config.json`` has
            the wrong type.
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
    """Check that the settings in a JSON or YAML file do not name files outside ``folder``.

    Also check that numbers of layers are at most :data:`MAX_MODEL_LAYERS`. All nested values are
    checked, except strings whose key is in :data:`TEXT_KEYS` or ends in ``_token`` or ``_tokens``.
    A path that does not exist is accepted, except in ``/proc``, ``/sys`` and ``/dev``.

    Args:
        location: Beginning of the error message, such as the path of the file.
        settings: Content of the file.
        folder: Folder that contains all files which the settings may name.

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
    """Convert exceptions that are raised within this context to UserError.

    The context is meant for a library that reads a downloaded folder. Almost all exception types
    are converted, because libraries raise various exceptions for wrong values in files. A UserError
    or a MemoryError propagates unchanged.

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
        return f"{name}: is not cached on this machine; unset HF_HUB_OFFLINE, or specify a local folder"
    return (
        f"{name}: is not cached on this machine, and the hub cannot be reached; specify a local folder, or "
        f"run hf download {name} on another machine and copy its cache to this one"
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
    """Yield each scalar in nested dicts and lists, with its key in the innermost dict around it.

    For example, ``{"a": {"b": [1, 2]}}`` yields ``("b", 2)`` and ``("b", 1)``.

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
    """Return whether the values of a key are plain text, not file paths.

    No library opens such a value as a file, so the value is safe even if it looks like a path.
    Examples of such keys are ``chat_template`` and ``eos_token``.
    """
    return key in TEXT_KEYS or key.endswith(("_token", "_tokens"))


def _is_layer_count(key: str) -> bool:
    """Return whether a key of a model's config specifies a number of layers.

    Examples of such keys are ``num_hidden_layers``, ``n_layer`` and ``depth``.
    """
    return key in {"n_layer", "n_layers", "depth"} or key.endswith(("_layers", "_blocks"))


def _names_file_outside(value: str, folder: Path) -> bool:
    """Return whether opening ``value`` as a path would read a file outside the folder.

    A relative path is resolved in the current folder and in ``folder``. A leading ``~`` is expanded
    to the home folder. The result is False for a path that does not exist, because such a path is
    harmless. Published settings contain many of them, for example paths in the author's cache. The
    result is also False for a single word that happens to be the name of a folder. It is True for
    all paths in ``/proc``, ``/sys`` and ``/dev``.
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
