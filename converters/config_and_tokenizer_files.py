"""Find and update the companion files of a model: config, tokenizer, chat templates, license, etc.

In the folder of a model's config.json, all small files are companions, except hidden files,
weights, training state, logs, and custom code. The weights of sentence-transformers modules are
companions too. Parent folders may also contain unrelated files, so only files with well-known names
are companions there.
"""

from __future__ import annotations

import json
import logging
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.converters.errors import CheckpointError, CommandError, to_printable
from portable.converters.limits import MAX_TOKENIZER_FILE
from portable.converters.manifest import check_manifest
from portable.converters.names.earlier_keys import add_earlier_keys_to_config
from portable.converters.names.model_config import override_config_settings
from portable.converters.storage.folder_operations import resolve_path_inside
from portable.converters.storage.path_or_url import get_file_size, make_absolute, parse_path_or_url
from portable.converters.storage.safe_open import (
    LinkError,
    read_json_object_or_empty,
    read_small_file,
    read_small_text_file,
)
from portable.converters.storage.store_errors import AccessDeniedError, RemoteError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from portable.converters.checkpoint import Checkpoint
    from portable.converters.storage.path_or_url import AnyPath
    from portable.converters.tensors.entry import OutputTensor

_log = logging.getLogger(__name__)

TOKENIZER_NAMES = re.compile(
    r"tokenizer.*|special_tokens_map\.json|added_tokens\.json|vocab\..+|merges\.txt|chat_template\..+"
    r"|additional_chat_templates/.+|.+\.(model|spm|tiktoken)"
)
"""Names of tokenizer files and chat templates."""
MERGED_ADAPTERS_FILE = "merged_adapters.json"
"""Record of the adapters that were merged into a model. See `portable.converters.adapters.merging`."""
GENERATION_CONFIG_FILE = "generation_config.json"
COMPANION_NAMES = re.compile(
    r"config\.json|generation_config\.json|tokenizer.*\.json|tokenizer\.model|special_tokens_map\.json"
    r"|added_tokens\.json|vocab\..+|merges\.txt|chat_template\..+|[\w.-]+\.(model|spm|tiktoken)"
    r"|(video_)?preprocessor_config\.json|processor_config\.json|merged_adapters\.json|hf_quant_config\.json"
    r"|modules\.json|(config_)?sentence_\w+\.json|LICENSE(\.\w+)?|NOTICE"
)
CUSTOM_CODE = "custom code"
_WEIGHTS = "weights"
# Patterns of file names that are not companions, each with the reason.
_EXCLUSION_REASONS: tuple[tuple[str, re.Pattern[str]], ...] = (
    (
        _WEIGHTS,
        re.compile(
            r".+\.(safetensors|bin|pt|pth|ckpt|gguf|ggml|distcp|h5|msgpack|onnx|onnx_data|np[yz]|tflite|ot|pkl"
            r"|pickle|nemo|engine|pb|zip|tar|[gx]z|zst|7z|parquet|arrow)|.+\.index\.json|\.metadata"
        ),
    ),
    (
        "training state",
        re.compile(
            r"(optimizer|optim|scheduler|scaler|rng_state|random_states?|trainer_state|training_args"
            r"|checkpoint_manifest|published_names|latest|adapter_config|adapter_model|step_)\b.*"
            r"|latest.*|zero_to_fp32\.py|\w*checksums?\.json|metadata\.json|run_config\.yaml|_.+"
            r"|.*\.(crc32|lock|tmp|ocdbt)"
        ),
    ),
    (
        "a log",
        re.compile(
            r".+\.(log|out|err|jsonl|csv|html)|log\.txt|events\..+|.*tfevents.*|metrics\..+"
            r"|(all|train|eval)_results\.json"
        ),
    ),
    (CUSTOM_CODE, re.compile(r".+\.(py|so|sh|ipynb)")),
)
OTHER_WEIGHTS = "weights that do not belong to the tensors of the model"
# Names of the weight files of the model, of copies in other formats, and of training state.
_OWN_WEIGHTS = re.compile(
    r".*(model|adapter|consolidated|weights|shard|rank|states?|optim|ckpt|checkpoint|step|layer|zero|scheduler"
    r"|scaler|training_args|metric).*"
)
_TORCH_FILE = re.compile(r".+\.(safetensors|bin|pt|pth)")
_TEMPLATES = "additional_chat_templates"
_GENERATION_CODE = "custom_generate"
# Folders with copies of the model, with other checkpoints, and with logs.
_EXPECTED_FOLDERS = re.compile(
    r"model|hf|huggingface|tokenizer|original|onnx|openvino|gguf|coreml|metal|tf|flax|checkpoints?|runs?|logs?"
    r"|wandb|tensorboard|assets|images|figures|eval.*|checkpoint-\d+|global_?step.*|step[-_]?\d+|_.*|\..*"
    r"|(pytorch_model|optimizer|model|optim|sampler|scheduler|dataloader|dist|shard|iter).*"
)
MAX_SMALL_FILE, _MAX_SMALL_FILES = 32 << 20, 200
_HUB_ID = re.compile(r"[\w.-]+(?:/[\w.-]+)?")
_HUB_FILES = ("*.json", "*.model", "merges.txt", "vocab.*", "chat_template.*")
_MODEL_FILES = (*_HUB_FILES, "*.safetensors", "*.bin")
_SUBFOLDERS = ("model", "hf", "huggingface", "tokenizer")
_RUN_CHECKPOINTS = "checkpoints"
_DTYPE_KEYS = ("dtype", "torch_dtype")  # transformers before 4.56 only reads torch_dtype


def find_companions(root: AnyPath) -> dict[str, AnyPath]:
    """Find the companion files of a checkpoint, such as the model's config and the tokenizer.

    These folders are searched: the checkpoint's folder, the parent folder, and the run folder if
    the checkpoint is in `<run>/checkpoints`; and in each of them, the subfolders `model`, `hf`,
    `huggingface`, and `tokenizer`. If several folders contain the same file, the nearest one takes
    precedence. Parent folders and subfolders provide only files with well-known names. The
    checkpoint's folder also provides other small files if it contains the `config.json` of a
    model.

    A symlink that points outside its folder is skipped, unless it is the checkpoint's
    `config.json`. If the checkpoint's manifest lists companions, companions that are not listed
    are skipped with a warning, because they were not saved with the checkpoint.

    Args:
        root: Folder or file of the checkpoint.

    Returns:
        Paths of the files, keyed by file name.

    Raises:
        CheckpointError: If a file differs from the manifest, if a `config.json` is damaged, or if
            the checkpoint's `config.json` is a link to a file outside its folder.
    """
    folder, *parents = _list_searched_folders(root)
    # From a checkpoint of this project, copy only files that were saved with the checkpoint.
    manifest = check_manifest(folder, only=lambda name: name == "trainer_state.json" or is_companion(name))
    companions = {**_classify_files(folder).companions, **_find_files_in_folders([folder, *parents])}
    if manifest is None or not any(is_companion(name) for name in manifest["files"]):
        return companions
    for name in sorted(companions.keys() - manifest["files"].keys()):
        _log.warning(
            "warning: %s: not copied, because the file was not saved with the checkpoint %s",
            to_printable(companions[name]),
            folder,
        )
        del companions[name]
    return companions


def is_companion(name: str) -> bool:
    """Return whether a file with this name is a companion file, to be copied with the weights.

    All names are accepted, except names of hidden files, weights, training state, logs, and custom
    code. Exceptions to these rules are listed in `COMPANION_NAMES`. Only the name is checked. A
    file that is too large is not copied despite its name.
    """
    return bool(COMPANION_NAMES.fullmatch(name)) or _get_exclusion_reason(name) is None


def find_companions_in_folder(root: AnyPath) -> dict[str, AnyPath]:
    """Find the companion files of a model in its folder, without searching parent folders.

    Companion files belong to the model but are not its weights, for example the config and the
    tokenizer.

    Args:
        root: Folder or file of the model.

    Returns:
        Paths of the companion files, keyed by file name. Empty if the folder does not contain the
        `config.json` of a model.
    """
    return _classify_files(_get_checkpoint_folder(root)).companions


def list_companion_names(root: AnyPath) -> set[str]:
    """Return the names of all companion files and custom code files in a model's folder.

    Empty if the folder does not contain the `config.json` of a model.
    """
    companions, excluded = _classify_files(_get_checkpoint_folder(root))
    return {*companions, *(name for name, reason in excluded.items() if reason == CUSTOM_CODE)}


def find_excluded_files(root: AnyPath) -> dict[str, str]:
    """Find the files in a model's folder that are not companion files.

    Companion files, such as the tokenizer, are copied along with the weights.

    Args:
        root: Folder or file of the model.

    Returns:
        The reason why each file is not a companion file, keyed by file name. The name of a folder
        ends with a slash. Folders with well-known names are omitted. Empty if the folder does not
        contain the `config.json` of a model.
    """
    excluded = _classify_files(_get_checkpoint_folder(root)).excluded
    if excluded.get(root.name) == OTHER_WEIGHTS and not root.is_dir():
        excluded[root.name] = _WEIGHTS  # the weights of the model
    return excluded


def find_custom_code(root: AnyPath) -> dict[str, AnyPath]:
    """Find the Python files of a model with custom code, and all files in `custom_generate`.

    A symlink that points outside the model's folder is skipped with a warning.

    Args:
        root: Folder or file of the model.

    Returns:
        Paths of the files, keyed by their path relative to the model's folder. Empty if the folder does
        not contain the `config.json` of a model.
    """
    folder = _get_checkpoint_folder(root)
    files: dict[str, AnyPath] = {}
    for name, reason in find_excluded_files(root).items():
        if reason == CUSTOM_CODE and (name.endswith(".py") or name.startswith(f"{_GENERATION_CODE}/")):
            try:
                files[name] = resolve_path_inside(folder / name, folder)
            except LinkError as error:
                _log.warning("warning: a file was not copied: %s", to_printable(error))
    return files


def _get_checkpoint_folder(root: AnyPath) -> AnyPath:
    return root if root.is_dir() else root.parent


def _get_exclusion_reason(name: str) -> str | None:
    """Return the reason why a file name excludes the file from the companions, or None.

    A companion file is copied along with the weights. The reason is a short text, such as
    `"hidden"` or `"weights"`. The exceptions in `COMPANION_NAMES` are not considered, so callers
    must check this pattern first.
    """
    if name.startswith("."):
        return "hidden"
    return next((reason for reason, names in _EXCLUSION_REASONS if names.fullmatch(name)), None)


class _ClassifiedFiles(NamedTuple):
    """Files in a model's folder, divided into companion files and excluded files.

    Companion files, such as the config and the tokenizer, are copied with the model.

    Attributes:
        companions: Paths of the companion files, keyed by file name.
        excluded: Reason why each other file or folder is not copied, keyed by its name. The name of
            a folder ends with a slash. Folders with well-known names, such as `onnx` and
            `checkpoints`, are omitted.
    """

    companions: dict[str, AnyPath]
    excluded: dict[str, str]


def _classify_files(folder: AnyPath) -> _ClassifiedFiles:
    """Divide the files in a model's folder into companions and excluded files.

    Companions, such as the config and the tokenizer, are copied with the weights. Excluded files
    are all other files, such as the model's own weights and custom code.

    Subfolders with named chat templates, custom generation code, or sentence-transformers modules
    are also searched. A file in a subfolder is named by its path relative to the model's folder.
    The weights of sentence-transformers modules are companions, because the model's own files do
    not contain them. Files that are too large, and links that point outside the folder, are
    excluded. If there are `_MAX_SMALL_FILES` companions, only files with well-known names are added.

    Returns:
        The companions and the excluded files. Both are empty if the folder does not contain the
        `config.json` of a model.

    Raises:
        CheckpointError: If the `config.json` is damaged, or if it is a link to a file outside its
            folder.
    """
    companions: dict[str, AnyPath] = {}
    excluded: dict[str, str] = {}
    entries = _list_entries(folder)
    by_name = {entry.name: entry for entry in entries}
    if "config.json" not in by_name or not _is_usable_companion(by_name["config.json"], "config.json"):
        return _ClassifiedFiles(companions, excluded)
    modules = _read_sentence_modules(by_name.get("modules.json"), folder)
    subfolders = [_TEMPLATES, _GENERATION_CODE, *modules]
    nested = []
    for name in subfolders:
        if name in by_name:
            try:
                nested += [
                    (name, entry) for entry in _list_entries(resolve_path_inside(by_name[name], folder))
                ]
            except LinkError:
                excluded[f"{name}/"] = "a link to a path outside the folder"
    for parent, entry in (*(("", entry) for entry in entries), *nested):
        name = f"{parent}/{entry.name}" if parent else entry.name
        try:
            if not entry.is_file():
                is_expected = parent or name in subfolders or _EXPECTED_FOLDERS.fullmatch(name)
                if not is_expected and entry.is_dir():
                    excluded[f"{name}/"] = "a folder"
                continue
            reason = None if COMPANION_NAMES.fullmatch(entry.name) else _get_exclusion_reason(entry.name)
            limit = _get_size_limit(entry.name)
            if parent == _GENERATION_CODE:
                reason = CUSTOM_CODE
            elif reason == _WEIGHTS and parent in modules:
                reason, limit = None, MAX_TOKENIZER_FILE
            elif reason == _WEIGHTS and _TORCH_FILE.fullmatch(name) and not _OWN_WEIGHTS.fullmatch(name):
                reason = OTHER_WEIGHTS
            if reason is None and get_file_size(entry) > limit:
                reason = f"larger than {limit >> 20} MiB"
            is_well_known = COMPANION_NAMES.fullmatch(entry.name) is not None
            if reason is None and not is_well_known and len(companions) >= _MAX_SMALL_FILES:
                reason = f"at most {_MAX_SMALL_FILES} files are copied"
            if reason is None:
                companions[name] = resolve_path_inside(entry, folder)
                continue
        except OSError:
            reason = "unreadable"
        except LinkError:
            reason = "a link to a path outside the folder"
        excluded[name] = reason
    return _ClassifiedFiles(companions, excluded)


def _get_size_limit(name: str) -> int:
    return MAX_TOKENIZER_FILE if COMPANION_NAMES.fullmatch(name) else MAX_SMALL_FILE


def _read_sentence_modules(file: AnyPath | None, folder: AnyPath) -> list[str]:
    """Read the module folders that sentence-transformers lists in `modules.json`.

    Returns:
        The folder names. Empty if the file is missing, damaged, or too large. Names with
        characters other than letters, digits, underscores, and hyphens are omitted, such as paths with
        several components.

    Raises:
        RemoteError: If a request to an object store fails.
    """
    if file is None or not _is_usable_companion(file, file.name):
        return []
    try:
        modules = json.loads(read_small_file(file, folder))
    except RemoteError:  # the store failed, so the error does not describe the file
        raise
    except (OSError, ValueError, RecursionError, CheckpointError):
        return []
    paths = [
        module.get("path")
        for module in (modules if isinstance(modules, list) else [])
        if isinstance(module, dict)
    ]
    return [path for path in paths if isinstance(path, str) and re.fullmatch(r"[\w-]+", path)]


def find_companion_file(root: AnyPath, name: str) -> AnyPath | None:
    """Find one file that accompanies a checkpoint, such as the tokenizer.

    Searches the same folders as `find_companions`. If several folders contain the file, the file
    in the folder nearest to the checkpoint is returned. If the checkpoint has a manifest, a file
    that the manifest does not list is ignored, because it was not saved with the checkpoint.

    Args:
        root: Folder or file of the checkpoint.
        name: Name of the file.

    Returns:
        Path of the file, or None if no such file exists. Also None if the file is too large, or if
        it is a `config.json` that does not describe a model.

    Raises:
        CheckpointError: If the file differs from the manifest, or if it is a damaged
            `config.json`.
    """
    folder, *parents = _list_searched_folders(root)
    manifest = check_manifest(folder, only=lambda file: file == name)
    if manifest is not None and name not in manifest["files"]:
        return None
    return _find_files_in_folders([folder, *parents], re.compile(re.escape(name))).get(name)


def _list_searched_folders(root: AnyPath) -> list[AnyPath]:
    """Return the folders to search for the companion files of a checkpoint, nearest first.

    Companion files are, for example, the config and the tokenizer. For a checkpoint in
    `run/checkpoints/step`, the folders are `step`, `checkpoints`, and `run`. For a checkpoint in a
    subfolder of `step`, this subfolder is searched first. In other locations, the folders are the
    checkpoint's folder and its parent. All paths are absolute.
    """
    folder = make_absolute(_get_checkpoint_folder(root))
    folders = [folder, folder.parent]
    if folder.parent.name == _RUN_CHECKPOINTS:
        folders.append(folder.parent.parent)
    elif folder.parent.parent.name == _RUN_CHECKPOINTS:
        folders += [folder.parent.parent, folder.parent.parent.parent]
    return folders


def check_single_model(folder: AnyPath, first_file: str) -> None:
    """Check that a folder contains only one model. Accelerate's `save_state` may write several.

    The name of a second model ends with `_1`, for example `model_1.safetensors`.

    Args:
        folder: Folder of the checkpoint.
        first_file: Name of the first model's file.

    Raises:
        CheckpointError: If the folder contains a second model.
    """
    stem, _, suffix = first_file.partition(".")
    for second in (f"{stem}_1.{suffix}", f"{stem}_1.{suffix.removesuffix('.index.json')}"):
        if (folder / second).is_file():
            raise CommandError(
                f"{folder}: contains several models, {first_file} and {second}; specify the path of one file"
            )


def find_or_download_companions(name_or_path: str) -> dict[str, AnyPath]:
    """Find the companion files of the `--config-from` model. Download them if it is on the Hub.

    Companion files are copied with the weights. Examples are `config.json` and the tokenizer
    files.

    Args:
        name_or_path: Folder or URL, path of the `config.json`, or Hub ID of a model. An existing
            path takes precedence over a Hub ID.

    Returns:
        Paths of the files, keyed by file name.

    Raises:
        CheckpointError: If the folder does not contain the `config.json` of a model, or if the
            model cannot be downloaded.
    """
    folder = parse_path_or_url(name_or_path)
    if folder.is_file():
        folder = folder.parent
    elif not folder.exists() and _HUB_ID.fullmatch(name_or_path):
        folder = download_from_hub(name_or_path, f"--config-from {name_or_path}", _HUB_FILES)
    companions = {**_classify_files(folder).companions, **_find_files_in_folders([folder])}
    if "config.json" not in companions:
        raise CommandError(
            f"--config-from {name_or_path}: does not contain the config.json of a model; specify a folder or "
            "Hub ID that contains this file"
        )
    return companions


def locate_or_download_model(name_or_path: str) -> AnyPath:
    """Return the path of a checkpoint. Download it first if it is on the Hub.

    An existing path takes precedence over a Hub ID. The download is limited to the weights in
    safetensors and `.bin` files, the JSON files, and the tokenizer.

    Args:
        name_or_path: Path, URL, or Hub ID of the form `owner/name`. A name without a slash is
            always a path.

    Returns:
        The path, which may not exist.

    Raises:
        CheckpointError: If the model cannot be downloaded.
    """
    path = parse_path_or_url(name_or_path)
    if not path.exists() and name_or_path.count("/") == 1 and _HUB_ID.fullmatch(name_or_path):
        return download_from_hub(name_or_path, name_or_path, _MODEL_FILES)
    return path


def download_from_hub(hub_id: str, option: str, file_patterns: tuple[str, ...]) -> AnyPath:
    """Download files of a model to the Hub cache.

    Args:
        hub_id: Hub ID of the model.
        option: Option or argument that specified the model, used in error messages.
        file_patterns: Patterns of the file names.

    Returns:
        Path of the model's folder in the cache.

    Raises:
        CheckpointError: If the model cannot be downloaded.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise CommandError(
            f"{option}: no such file or folder; check the path, or run pip install huggingface_hub to "
            "download from the Hub"
        ) from None
    try:
        return parse_path_or_url(snapshot_download(hub_id, allow_patterns=list(file_patterns)))
    except Exception as error:  # The HTTP client raises its own exceptions.
        reason = " ".join(str(error).split()) or type(error).__name__
        # Keep only the first sentence, because the others are advice about the Python API.
        reason = re.split(r"(?<=[.!?])\s", reason)[0].rstrip(".")
        raise CommandError(
            f"{option}: is neither a local path nor available from the Hub ({reason}); check the path or "
            f"Hub ID, or run hf download {hub_id} --local-dir FOLDER on a machine that can access this "
            "model, and specify FOLDER"
        ) from None


def _find_files_in_folders(
    folders: Iterable[AnyPath], name_pattern: re.Pattern[str] = COMPANION_NAMES
) -> dict[str, AnyPath]:
    """Search folders and some of their subfolders for files with matching names.

    The subfolders are `model`, `hf`, `huggingface`, and `tokenizer`. Files that are too large are
    skipped, and so is a `config.json` that does not describe a model.

    Args:
        folders: Folders to search. If several contain a file of the same name, the first one takes
            precedence.
        name_pattern: Regular expression for the file names.

    Returns:
        Resolved paths, keyed by file name. Symlinks that point outside their folder are skipped
        with a warning.

    Raises:
        CheckpointError: If a `config.json` is damaged.
    """
    files: dict[str, AnyPath] = {}
    for folder in folders:
        direct_entries = _list_entries(folder)
        entry_names = {entry.name for entry in direct_entries}
        nested_entries = []
        for name in _SUBFOLDERS:
            if name in entry_names:
                try:
                    nested_entries.append(_list_entries(resolve_path_inside(folder / name, folder)))
                except LinkError as error:
                    _log.warning("warning: the files of a folder were not copied: %s", to_printable(error))
        for entries in (direct_entries, *nested_entries):
            for entry in entries:
                if entry.name in files or not name_pattern.fullmatch(entry.name):
                    continue
                try:
                    # Resolve links now, because a link could be changed before the file is copied.
                    path = resolve_path_inside(entry, folder)
                except LinkError as error:
                    _log.warning("warning: a file was not copied: %s", to_printable(error))
                    continue
                if _is_usable_companion(path, entry.name):
                    files[entry.name] = path
    return files


def _list_entries(folder: AnyPath) -> list[AnyPath]:
    """Return the entries of a folder, sorted by name. Empty if the folder cannot be listed."""
    try:
        entries: list[AnyPath] = list(folder.iterdir())
    except (OSError, AccessDeniedError):  # The credentials may not cover the parent folders.
        return []
    return sorted(entries, key=lambda path: path.name)


def read_trainer_metadata(folder: AnyPath) -> dict[str, Any]:
    """Read the `trainer_state.json` of this project or of transformers' Trainer.

    Args:
        folder: Folder of the checkpoint.

    Returns:
        A dict with the key `trainer_state`, for the complete content of the file, and the key
        `step`, for the number of steps. `step` is omitted if the file does not record it as an
        integer. The dict is empty if the file does not exist or is damaged.
    """
    state = read_json_object_or_empty(folder / "trainer_state.json")
    if not state:
        return {}
    step = state.get("step", state.get("global_step"))
    return {"trainer_state": state, **({"step": step} if isinstance(step, int) else {})}


def _is_usable_companion(path: AnyPath, name: str) -> bool:
    """Return whether a companion file exists and has at most `MAX_TOKENIZER_FILE` bytes.

    A companion file is copied along with the weights. If its name is `config.json`, it must also
    describe a model, because other tools write files with this name too. A config describes a
    model if it contains `model_type` or `architectures`.

    Args:
        path: Path of the file.
        name: Name of the file, before links are resolved.

    Raises:
        CheckpointError: If a `config.json` is damaged, or if it is a link to a file outside its
            folder.
    """
    try:
        if not path.is_file() or get_file_size(path) > MAX_TOKENIZER_FILE:
            return False
    except OSError:
        return False
    if name != "config.json":
        return True
    try:
        values = json.loads(read_small_text_file(path))
    except OSError:
        return False
    except (ValueError, RecursionError):
        raise CheckpointError(
            f"{path}: is not valid JSON; restore the file, or remove the file and add --config-from "
            "FOLDER_OR_ID"
        ) from None
    # Other tools also write a config.json. The config of a model contains its type or class.
    return isinstance(values, dict) and not {"model_type", "architectures"}.isdisjoint(values)


class OutputCompanions(NamedTuple):
    """Companion files to write along with the tensors of an output.

    Attributes:
        documents: Contents of the files to write, keyed by file name.
        copied: Paths of the files to copy unchanged, keyed by their file name in the output.
    """

    documents: dict[str, bytes]
    copied: dict[str, AnyPath]


def plan_companion_files(checkpoint: Checkpoint, written_tensors: Iterable[OutputTensor]) -> OutputCompanions:
    """Plan the companion files of an output, such as `config.json` and the tokenizer.

    If `config.json` contradicts the written tensors, it is corrected. For example, its dtype is
    updated, because `from_pretrained` converts the weights to this dtype. The checkpoint's
    settings override values in `config.json` and its nested configs. Legacy keys that transformers
    no longer writes are added for other programs that still read them. Without a valid
    `config.json`, the checkpoint's settings are not written.

    Args:
        checkpoint: Checkpoint to write.
        written_tensors: Tensors to write.

    Returns:
        The files to write, including `checkpoint.documents`, and the files to copy.
    """
    updated, copied = _build_updated_config(checkpoint, written_tensors)
    return OutputCompanions({**updated, **checkpoint.documents}, copied)


def _build_updated_config(
    checkpoint: Checkpoint, written_tensors: Iterable[OutputTensor]
) -> OutputCompanions:
    """Build the `config.json` for an output, and list the other companion files.

    If all casts of tensors have the same target dtype, the config receives this dtype. Otherwise,
    the dtype in the config is kept if a written tensor has this dtype, or if the weights are
    quantized and no tensor is cast. In all other cases, the config receives the dtype with the
    most bytes. Settings that contradict the tensors are corrected, and the settings in
    `checkpoint.config` are applied. No file is written. See `plan_companion_files`.

    Returns:
        The content of the updated `config.json`, and the companion files to copy unchanged, such
        as the tokenizer. If `config.json` needs no update or is damaged, it is one of the files to
        copy.
    """
    # Imported here, because importing numpy is slow.
    from portable.converters.tensors.dtypes import CASTABLE_DTYPES, TO_TORCH

    copied = dict(checkpoint.companions)
    config = read_json_object_or_empty(copied.get("config.json"))
    if not config:
        return OutputCompanions({}, copied)
    settings = {**_find_config_corrections(checkpoint), **checkpoint.config}
    written_tensors = list(written_tensors)
    casts = {TO_TORCH[entry.dtype] for entry in written_tensors if entry.dtype != entry.tensor.dtype}
    sizes: dict[str, int] = {}
    for entry in written_tensors:
        if entry.dtype in CASTABLE_DTYPES and entry.tensor.shape:
            sizes[TO_TORCH[entry.dtype]] = sizes.get(TO_TORCH[entry.dtype], 0) + entry.nbytes
    dtype = next((config[key] for key in _DTYPE_KEYS if isinstance(config.get(key), str)), "")
    # Keep the dtype of the config if at least one tensor has it. If the weights are quantized, the dtype in
    # the config does not describe the stored tensors, unless --dtype casts the others.
    is_quantized = "quantization_config" in config and "quantization_config" not in settings
    keeps_dtype = not sizes or dtype.removeprefix("torch.") in sizes or (is_quantized and not casts)
    if len(casts) == 1 and casts <= sizes.keys():
        (cast,) = casts
        keeps_dtype = dtype.removeprefix("torch.") == cast
        sizes = {cast: 1}
    if not keeps_dtype:
        _set_config_dtype(config, max(sizes, key=lambda name: sizes[name]))
    override_config_settings(config, settings)
    if not add_earlier_keys_to_config(config) and keeps_dtype and not settings:
        return OutputCompanions({}, copied)
    del copied["config.json"]
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    try:
        return OutputCompanions({"config.json": text.encode()}, copied)
    except UnicodeEncodeError:  # A lone surrogate cannot be encoded as UTF-8, but JSON can escape it.
        escaped = json.dumps(config, indent=2) + "\n"
        return OutputCompanions({"config.json": escaped.encode()}, copied)


def _find_config_corrections(checkpoint: Checkpoint) -> dict[str, Any]:
    """Find the settings of a config that contradict the tensors.

    `tie_word_embeddings` is set to False if the config ties embeddings that are stored separately,
    and `quantization_config` is removed if the tensors are not quantized.

    Returns:
        The corrected values, keyed by config key. None removes the setting.
    """
    from portable.converters.names.contradictions import (
        find_contradicted_tie,
        has_contradicted_text_tie,
        has_stale_quantization,
    )

    corrections: dict[str, Any] = {}
    config = checkpoint.read_config()
    is_split = find_contradicted_tie(checkpoint.tensors, config) is not None
    if is_split or has_contradicted_text_tie(checkpoint.tensors, config):
        corrections["tie_word_embeddings"] = False
    if has_stale_quantization(checkpoint.tensors, config):
        corrections["quantization_config"] = None
    return corrections


def _set_config_dtype(config: dict[str, Any], dtype: str) -> None:
    """Set the dtype of a config in place, and of nested configs that already contain a dtype."""
    present = [key for key in _DTYPE_KEYS if key in config]
    config.update(dict.fromkeys(present or _DTYPE_KEYS[:1], dtype))
    for key, nested_config in config.items():
        if (
            key.endswith("_config")
            and isinstance(nested_config, dict)
            and not nested_config.keys().isdisjoint(_DTYPE_KEYS)
        ):
            _set_config_dtype(nested_config, dtype)
