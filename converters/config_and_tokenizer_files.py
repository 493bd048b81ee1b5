"""The small files of a model: config.json, the tokenizer, processors, chat templates, a license, ...

Everything small in the folder of a model's config.json comes along, except weights, optimizer states, logs
and custom code. Above that folder, only files with well-known names are taken, since it may hold anything.
"""

from __future__ import annotations

import json
import logging
import re
from typing import TYPE_CHECKING, Any

from converters.errors import CheckpointError, printable
from converters.limits import MAX_TOKENIZER_FILE
from converters.manifest import check_manifest
from converters.storage.path_or_url import place
from converters.storage.places import inside
from converters.storage.safe_open import LinkError, read_small, read_small_table
from converters.storage.store_errors import AccessDeniedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from converters.checkpoint import Checkpoint
    from converters.storage.path_or_url import Place
    from converters.writers.conversion import Entry

_log = logging.getLogger(__name__)

# The files of a tokenizer and its chat templates.
TOKENIZER = re.compile(
    r"tokenizer.*|special_tokens_map\.json|added_tokens\.json|vocab\..+|merges\.txt|chat_template\..+"
    r"|additional_chat_templates/.+|.+\.(model|spm|tiktoken)"
)
# What was merged into a model: see `converters.adapters.merging`.
MERGED = "merged_adapters.json"
GENERATION = "generation_config.json"
COMPANIONS = re.compile(
    r"config\.json|generation_config\.json|tokenizer.*\.json|tokenizer\.model|special_tokens_map\.json"
    r"|added_tokens\.json|vocab\..+|merges\.txt|chat_template\..+|[\w.-]+\.(model|spm|tiktoken)"
    r"|(video_)?preprocessor_config\.json|processor_config\.json|merged_adapters\.json|hf_quant_config\.json"
    r"|modules\.json|(config_)?sentence_\w+\.json|LICENSE(\.\w+)?|NOTICE"
)
# What does not come along: why, and the names.
_EXCLUDED: tuple[tuple[str, re.Pattern[str]], ...] = (
    (
        "weights",
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
    ("custom code", re.compile(r".+\.(py|so|sh|ipynb)")),
)
CODE = "custom code"
_TEMPLATES = "additional_chat_templates"
MAX_SMALL_FILE, _MAX_SMALL_FILES = 32 << 20, 200
_HUB_ID = re.compile(r"[\w.-]+(?:/[\w.-]+)?")
_HUB_FILES = ("*.json", "*.model", "merges.txt", "vocab.*", "chat_template.*")
_MODEL_FILES = (*_HUB_FILES, "*.safetensors", "*.bin")
_SUBFOLDERS = ("model", "hf", "huggingface", "tokenizer")
_RUN_CHECKPOINTS = "checkpoints"
_DTYPE_KEYS = ("dtype", "torch_dtype")  # transformers before 4.56 reads the second


def find_companions(root: Place) -> dict[str, Place]:
    """Files to copy beside converted weights: name -> path.

    Searches `root` (or the folder of a file), its `model/`, `hf/`, `huggingface/` and `tokenizer/`, then its
    parent, and the run folder where `root` lies in `<run>/checkpoints/`. The nearest file of a name wins. A
    link that leaves the folder it was found in is skipped with a warning.
    """
    folder, *above = _upwards(root)
    # From a checkpoint of this project, copy only what was saved with it.
    manifest = check_manifest(folder, only=lambda name: name == "trainer_state.json" or is_companion(name))
    found = {**_small_files_of_model(folder)[0], **_companions_in([folder, *above])}
    if manifest is None or not any(is_companion(name) for name in manifest["files"]):
        return found
    for name in sorted(found.keys() - manifest["files"].keys()):
        _log.warning("warning: %s: was not saved with %s; not copied", printable(found[name]), folder)
        del found[name]
    return found


def is_companion(name: str) -> bool:
    """Whether a file of this name comes along with a model, if it is small."""
    return bool(COMPANIONS.fullmatch(name)) or _excluded(name) is None


def small_files_of(root: Place) -> dict[str, Place]:
    """Return the small files in the folder of a model, without searching above it: name -> path."""
    return _small_files_of_model(root if root.is_dir() else root.parent)[0]


def companion_names(root: Place) -> set[str]:
    """Return the names of the small files and the code in the folder of a model."""
    found, left = _small_files_of_model(root if root.is_dir() else root.parent)
    return {*found, *(name for name, why in left.items() if why == CODE)}


def left_out(root: Place) -> dict[str, str]:
    """Return the files in the folder of a model that do not come along, with the reason."""
    return _small_files_of_model(root if root.is_dir() else root.parent)[1]


def custom_code(root: Place) -> dict[str, Place]:
    """Return the Python files of a model with code of its own: name -> path."""
    folder = root if root.is_dir() else root.parent
    names = [name for name, why in left_out(root).items() if why == CODE and name.endswith(".py")]
    return _companions_in([folder], re.compile("|".join(map(re.escape, names)))) if names else {}


def _excluded(name: str) -> str | None:
    """Return why a file is not a companion, or None if it is one."""
    if name.startswith("."):
        return "hidden"
    return next((why for why, names in _EXCLUDED if names.fullmatch(name)), None)


def _small_files_of_model(folder: Place) -> tuple[dict[str, Place], dict[str, str]]:
    """Return the small files beside the config.json in a folder, and the others with the reason.

    Names contain a folder for named chat templates and for the modules of sentence-transformers.
    """
    found: dict[str, Place] = {}
    left: dict[str, str] = {}
    listed = _entries(folder)
    by_name = {entry.name: entry for entry in listed}
    if "config.json" not in by_name or not _usable(by_name["config.json"], "config.json"):
        return found, left
    inner = [_TEMPLATES, *_sentence_modules(by_name.get("modules.json"), folder)]
    below = [entry for name in inner if name in by_name for entry in _entries(by_name[name])]
    for entry in (*listed, *below):
        name = entry.name if entry in listed else f"{entry.parent.name}/{entry.name}"
        try:
            if not entry.is_file():
                continue
            why = None if COMPANIONS.fullmatch(entry.name) else _excluded(entry.name)
            if why is None and entry.stat().st_size > _limit(entry.name):
                why = f"larger than {_limit(entry.name) >> 20} MiB"
            if why is None and len(found) >= _MAX_SMALL_FILES:
                why = f"there are more than {_MAX_SMALL_FILES} files"
            if why is None:
                found[name] = inside(entry, folder)
                continue
        except OSError:
            why = "unreadable"
        except LinkError:
            why = "a link that leaves the folder"
        left[name] = why
    return found, left


def _limit(name: str) -> int:
    return MAX_TOKENIZER_FILE if COMPANIONS.fullmatch(name) else MAX_SMALL_FILE


def _sentence_modules(file: Place | None, folder: Place) -> list[str]:
    """Return the folders of the modules that sentence-transformers lists in `modules.json`."""
    if file is None or not _usable(file, file.name):
        return []
    try:
        modules = json.loads(read_small(file, folder))
    except (OSError, ValueError, RecursionError, CheckpointError):
        return []
    listed = modules if isinstance(modules, list) else []
    paths = [module.get("path") for module in listed if isinstance(module, dict)]
    return [path for path in paths if isinstance(path, str) and re.fullmatch(r"[\w-]+", path)]


def find_beside(root: Place, name: str) -> Place | None:
    """The nearest file `name` where `find_companions` searches; only one that was saved with a checkpoint of
    this project, where `root` is one."""
    folder, *above = _upwards(root)
    manifest = check_manifest(folder, only=lambda file: file == name)
    if manifest is not None and name not in manifest["files"]:
        return None
    return _companions_in([folder, *above], re.compile(re.escape(name))).get(name)


def _upwards(root: Place) -> list[Place]:
    """The folder of a checkpoint, and those above it that may hold its companions."""
    folder = root if root.is_dir() else root.parent
    folder = folder.absolute()
    upwards = [folder, folder.parent]
    if folder.parent.name == _RUN_CHECKPOINTS:
        upwards.append(folder.parent.parent)
    elif folder.parent.parent.name == _RUN_CHECKPOINTS:
        upwards += [folder.parent.parent, folder.parent.parent.parent]
    return upwards


def check_one_model(folder: Place, name: str) -> None:
    """Refuse a folder where Accelerate's `save_state` wrote several models, of which `name` is the first."""
    stem, _, suffix = name.partition(".")
    for second in (f"{stem}_1.{suffix}", f"{stem}_1.{suffix.removesuffix('.index.json')}"):
        if (folder / second).is_file():
            raise CheckpointError(
                f"{folder}: holds several models, {name} and {second}; give the file of one of them"
            )


def companions_from(named: str) -> dict[str, Place]:
    """The files (name -> path) of a model given by its folder, its `config.json` or its hub id.

    Raises:
        CheckpointError: there is no model config.
    """
    folder = place(named)
    if folder.is_file():
        folder = folder.parent
    elif not folder.exists() and _HUB_ID.fullmatch(named):
        folder = from_hub(named, f"--config-from {named}", _HUB_FILES)
    found = {**_small_files_of_model(folder)[0], **_companions_in([folder])}
    if "config.json" not in found:
        raise CheckpointError(f"--config-from {named}: holds no config.json of a model")
    return found


def model_from(named: str) -> Place:
    """A checkpoint given by its path or its hub id, which is downloaded.

    Raises:
        CheckpointError: there is no such path, and the hub has no such model or cannot be reached.
    """
    path = place(named)
    if not path.exists() and named.count("/") == 1 and _HUB_ID.fullmatch(named):
        return from_hub(named, named, _MODEL_FILES)
    return path


def from_hub(name: str, what: str, files: tuple[str, ...]) -> Place:
    """The folder in the hub's own cache with those files of a model.

    Args:
        what: how the model was given, for the message.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise CheckpointError(
            f"{what}: no such file or folder, and the hub needs the package huggingface_hub"
        ) from None
    try:
        return place(snapshot_download(name, allow_patterns=list(files)))
    except Exception as error:  # its own, and those of its HTTP client
        why = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(
            f"{what}: neither a local file or folder nor available from the hub ({why[:200]}); with a "
            f"network, hf download {name} --local-dir FOLDER, and give FOLDER"
        ) from None


def _companions_in(folders: Iterable[Place], names: re.Pattern[str] = COMPANIONS) -> dict[str, Place]:
    found: dict[str, Place] = {}
    for folder in folders:
        listed = _entries(folder)
        names_there = {entry.name for entry in listed}
        below = [_entries(folder / name) for name in _SUBFOLDERS if name in names_there]
        for entries in (listed, *below):
            for entry in entries:
                if entry.name in found or not names.fullmatch(entry.name):
                    continue
                try:
                    path = inside(entry, folder)  # so that the file copied is the file checked
                except LinkError as error:
                    _log.warning("warning: %s; not copied", printable(error))
                    continue
                if _usable(path, entry.name):
                    found[entry.name] = path
    return found


def _entries(folder: Place) -> list[Place]:
    """What lies in a folder, by name; nothing where it cannot be listed."""
    try:
        entries: list[Place] = list(folder.iterdir())
    except (OSError, AccessDeniedError):  # credentials may not cover folders above the checkpoint
        return []
    return sorted(entries, key=lambda path: path.name)


def trainer_metadata(folder: Place) -> dict[str, Any]:
    """The content and step of a `trainer_state.json` in `folder` (ours, or the Trainer's)."""
    state = read_small_table(folder / "trainer_state.json")
    if not state:
        return {}
    step = state.get("step", state.get("global_step"))
    return {"trainer_state": state, **({"step": step} if isinstance(step, int) else {})}


def _usable(path: Place, name: str) -> bool:
    try:
        if not path.is_file() or path.stat().st_size > MAX_TOKENIZER_FILE:
            return False
    except OSError:
        return False
    # Other tools write a config.json too; a model's names its type.
    return name != "config.json" or not {"model_type", "architectures"}.isdisjoint(read_small_table(path))


def small_files(
    checkpoint: Checkpoint, entries: Iterable[Entry]
) -> tuple[dict[str, bytes], dict[str, Place]]:
    """The files to write beside the tensors (name -> content), and those to copy unchanged (name -> path).

    `config.json` gets the dtype of `entries` and the checkpoint's own settings, each also in the part of the
    config that has it. `from_pretrained` loads in the dtype that the config names, whatever the weights have.
    """
    changed, copied = _with_dtype(checkpoint, entries)
    return {**changed, **checkpoint.documents}, copied


def _with_dtype(
    checkpoint: Checkpoint, entries: Iterable[Entry]
) -> tuple[dict[str, bytes], dict[str, Place]]:
    from converters.tensors.dtypes import CASTABLE, TO_TORCH  # not at the top: numpy is slow to import

    copied = dict(checkpoint.companions)
    config = read_small_table(copied.get("config.json"))
    # In a config of quantized weights the dtype means something else.
    if not config or ("quantization_config" in config and "quantization_config" not in checkpoint.config):
        return {}, copied
    sizes: dict[str, int] = {}
    for entry in entries:
        if entry.dtype in CASTABLE and entry.tensor.shape:
            sizes[TO_TORCH[entry.dtype]] = sizes.get(TO_TORCH[entry.dtype], 0) + entry.nbytes
    named = next((config[key] for key in _DTYPE_KEYS if isinstance(config.get(key), str)), "")
    # With several dtypes, the one that the config names already is as good as any.
    fits = not sizes or named.removeprefix("torch.") in sizes
    if fits and not checkpoint.config:
        return {}, copied
    if not fits:
        _set_dtype(config, max(sizes, key=lambda name: sizes[name]))
    for key, value in checkpoint.config.items():
        parts = [part for part in config.values() if isinstance(part, dict) and key in part]
        for part in [part for part in (config, *parts) if key in part] or [config]:
            part[key] = value
            if value is None:
                del part[key]
    del copied["config.json"]
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    try:
        return {"config.json": text.encode()}, copied
    except UnicodeEncodeError:  # a lone surrogate, which JSON can only escape
        return {"config.json": (json.dumps(config, indent=2) + "\n").encode()}, copied


def _set_dtype(config: dict[str, Any], name: str) -> None:
    present = [key for key in _DTYPE_KEYS if key in config]
    config.update(dict.fromkeys(present or _DTYPE_KEYS[:1], name))
    for key, part in config.items():
        if key.endswith("_config") and isinstance(part, dict) and not part.keys().isdisjoint(_DTYPE_KEYS):
            _set_dtype(part, name)
