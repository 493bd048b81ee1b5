"""Convert adapter settings between the section ``adapter``, files in peft's format, and peft's config.

:func:`resolve_adapter_config` reads a file in peft's format into the section ``adapter``.
:func:`build_peft_config` converts the section to peft's config.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portable.config.keys import to_plain_value
from portable.config.origins import format_short_value
from portable.errors import UserError, require, to_one_line
from portable.hub_requests import read_hub_once_per_node
from portable.paths import CONFIG_FILE as RUN_CONFIG
from portable.paths import FINAL_FOLDER, check_folder_files, open_file
from portable.untrusted_settings import describe_download_error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from portable.config import RunConfig

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILES = ("adapter_model.safetensors", "adapter_model.bin")
"""File names of peft's saved weights, the preferred name first."""
_DOCUMENT_KEY = "adapter"
"""Key of the parsed ``adapter_config.json`` in ``RunConfig.documents``."""
_MAX_BYTES = 1 << 24

PEFT_KEYS: dict[str, dict[str, str]] = {
    "lora": {
        "r": "r",
        "alpha": "lora_alpha",
        "dropout": "lora_dropout",
        "target_modules": "target_modules",
        "target_parameters": "target_parameters",
        "modules_to_save": "modules_to_save",
        "trainable_token_indices": "trainable_token_indices",
        "ensure_weight_tying": "ensure_weight_tying",
        "layers": "layers_to_transform",
        "bias": "bias",
        "init": "init_lora_weights",
        "use_dora": "use_dora",
        "use_rslora": "use_rslora",
    },
    "ia3": {"target_modules": "target_modules", "modules_to_save": "modules_to_save"},
}
"""For each adapter type, the keys of peft's config, keyed by the corresponding setting in the section
``adapter``."""

_EXTRA_KEYS: dict[str, tuple[str, ...]] = {
    "lora": (
        "exclude_modules",
        "fan_in_fan_out",
        "layers_pattern",
        "rank_pattern",
        "alpha_pattern",
        "lora_bias",
    ),
    "ia3": ("exclude_modules", "fan_in_fan_out", "feedforward_modules"),
}
"""For each adapter type, supported keys of peft's files that have no corresponding setting in the
section ``adapter``."""

_IGNORED_KEYS = (
    "peft_type",
    "task_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "runtime_config",
    "megatron_core",
    # These configure initializations and quantizations that are rejected, so the keys have no effect.
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "qalora_group_size",
)
"""Keys of peft's files that do not affect training."""

_TARGET_TABLES: dict[str, dict[str, str]] = {
    "lora": {"target_modules": "TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING"},
    "ia3": {
        "target_modules": "TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING",
        "feedforward_modules": "TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING",
    },
}
"""For each adapter type and setting, the name of peft's table of default modules per model type. peft uses
the default in the table if the setting is null.
"""

_SUPPORTED_INITS = (True, False, "gaussian", "orthogonal")
_PEFT_TASKS = {
    "causal-lm": "CAUSAL_LM",
    "seq2seq-lm": "SEQ_2_SEQ_LM",
    "sequence-classification": "SEQ_CLS",
    "masked-lm": None,
}


def resolve_adapter_config(config: RunConfig) -> RunConfig:
    """Read the config file of the adapter into the section ``adapter``.

    ``adapter.name_or_path`` or ``adapter.config`` refers to the file or its folder. First, folders
    of runs in the config are replaced by their exported models (:func:`replace_runs_by_exports`).
    If neither of the two settings is set, nothing else changes. An adapter on the Hub is
    downloaded. If the user has set a setting that has a counterpart in the file, both values must
    be equal. The exception is ``adapter.dropout``: the value of the user takes precedence.

    Returns:
        A new config. It also stores the content of the file, because some keys of the file have no
        counterpart in the section.

    Raises:
        UserError: If the file cannot be read, contradicts a setting of the user, or contains a
            setting that is not supported.
    """
    config = replace_runs_by_exports(config)
    adapter = config.adapter
    key = "adapter.config" if adapter.name_or_path is None else "adapter.name_or_path"
    if adapter.name_or_path is None and adapter.config is None:
        return config
    path = (
        Path(str(adapter.config))
        if adapter.name_or_path is None
        else resolve_adapter_folder(adapter.name_or_path)
    )
    folder = None if path.is_file() else path
    path = path if folder is None else folder / CONFIG_FILE
    document = _read_peft_config(path, key, folder)
    kind = str(document.get("peft_type", "")).lower()
    require(
        kind in PEFT_KEYS,
        f"{key}: {path}: peft_type {format_short_value(document.get('peft_type'))} is not supported; use an "
        f"adapter with peft_type {' or '.join(name.upper() for name in PEFT_KEYS)}",
    )
    if (init := document.get("init_lora_weights", True)) not in _SUPPORTED_INITS:
        # These initializations change the base weights or need data. An existing adapter that eva
        # initialized can be used, because eva changes only the initial values of the adapter.
        require(
            init is None or (init == "eva" and adapter.name_or_path is not None),
            f"{key}: {path}: init_lora_weights: {format_short_value(init)} is not supported; use true, "
            "gaussian or orthogonal, or an adapter that peft has converted to plain LoRA",
        )
        document = {**document, "init_lora_weights": init == "eva"}
    document = _add_default_targets(config, document, kind, path, key)
    defaults = _get_peft_defaults(kind)
    values: dict[str, Any] = {}
    for name, peft_key in {"type": "peft_type", **PEFT_KEYS[kind]}.items():
        value = document.get(peft_key)
        value = (
            kind
            if name == "type"
            else _to_setting_value(name, defaults[peft_key] if value is None else value)
        )
        setting_value = to_plain_value(getattr(adapter, name))
        if name == "dropout" and config.is_set("adapter.dropout"):
            continue
        if name == "target_modules" and value is None:  # the file has target_parameters instead
            value = []
        if config.is_set(f"adapter.{name}") and setting_value is not None:
            require(
                _to_setting_value(name, setting_value) == value,
                f"adapter.{name}: is {format_short_value(setting_value)}, but {path} has "
                f"{format_short_value(value)}; remove adapter.{name}",
            )
        else:
            values[f"adapter.{name}"] = value
    _check_supported_keys(document, kind, path, key)
    return config.with_document(_DOCUMENT_KEY, document).replaced(values)


def replace_runs_by_exports(config: RunConfig) -> RunConfig:
    """Replace runs that the config uses as model, tokenizer or adapter with their exported models.

    Returns:
        A changed config, or ``config`` itself if it does not refer to a run.

    Raises:
        UserError: If a run has no exported model, or if ``model.name_or_path`` is an adapter. The
            message states which settings or command to use.
    """
    changes = {}
    keys = ("model.name_or_path", "data.tokenizer", "adapter.name_or_path")
    for key, folder in ((key, Path(config.get(key))) for key in keys if config.get(key) is not None):
        if (folder / RUN_CONFIG).is_file() and not (folder / "config.json").is_file():
            require(
                (folder / FINAL_FOLDER).is_dir(),
                f"{key}: {folder} is the output folder of a run that has not exported a model to "
                f"{FINAL_FOLDER}/; complete the run, or export the model with portable-convert {folder} OUT "
                f"and set {key} to OUT",
            )
            changes[key] = str(folder / FINAL_FOLDER)
    config = config.replaced(changes) if changes else config
    folder = Path(config.model.name_or_path or CONFIG_FILE)
    if (folder / CONFIG_FILE).is_file() and not (folder / "config.json").is_file():
        document = _read_peft_config(folder / CONFIG_FILE, "model.name_or_path", folder)
        base = document.get("base_model_name_or_path") or "BASE"
        raise UserError(
            f"model.name_or_path: {folder} is an adapter; to continue its training, set model.name_or_path "
            f"to {base} and adapter.name_or_path to {folder}; to train all weights, merge the adapter with "
            f"portable-convert {folder} OUT --merge-into {base}, and set model.name_or_path to OUT"
        )
    return config


def _add_default_targets(
    config: RunConfig, document: dict[str, Any], kind: str, path: Path, key: str
) -> dict[str, Any]:
    """Add peft's default target modules to an adapter config that does not specify any.

    The defaults depend on the type of the model. For IA3, the feedforward modules also have a
    default.

    Args:
        config: Config of the run.
        document: Content of the adapter config file.
        kind: Type of the adapter, ``lora`` or ``ia3``.
        path: Path of the adapter config file, used in error messages.
        key: Setting that refers to the file, used in error messages.

    Returns:
        A copy of the content with the default modules, or ``document`` itself if nothing is
        missing.

    Raises:
        UserError: If peft has no default for the model. Target modules are not required if the file
            has ``target_parameters``.
    """
    missing_keys = [name for name in _TARGET_TABLES[kind] if document.get(name) is None]
    if not missing_keys:
        return document
    from portable.model.build import load_model_config
    from portable.private.peft_internals import get_default_target_modules

    model_type = load_model_config(config.model).model_type
    values = dict(document)
    for name in missing_keys:
        modules = get_default_target_modules(_TARGET_TABLES[kind][name], model_type)
        require(
            modules is not None or (name == "target_modules" and bool(document.get("target_parameters"))),
            f"{key}: {path}: has no {name}, and peft has no default {name} for models of type {model_type}; "
            f"add {name} to the file",
        )
        values[name] = modules
    return values


def _to_setting_value(name: str, value: Any) -> Any:
    """Normalize a setting's value, so that peft's file and the section ``adapter`` can be compared.

    ``layers`` becomes a list, or None if it is empty. Lists of modules and parameters are sorted. Other
    values are returned unchanged.

    Args:
        name: Name of the setting in the section ``adapter``.
        value: Value of the setting.
    """
    if name == "layers":
        return [value] if isinstance(value, int) else value or None
    return sorted(value) if name in ("target_modules", "target_parameters") and _is_list(value) else value


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple)


def _read_peft_config(path: Path, key: str, folder: Path | None) -> dict[str, Any]:
    """Read an ``adapter_config.json``.

    Args:
        path: Path of the file.
        key: Setting that refers to the file or its folder, used in error messages.
        folder: Folder that contains the file. Symbolic links must not point outside it. None if the
            setting is the path of the file.

    Raises:
        UserError: If the file does not exist, cannot be read, or does not contain a mapping.
    """
    try:
        with open_file(path, folder) as file:
            document = json.loads(file.read(_MAX_BYTES))
    except FileNotFoundError as error:
        raise UserError(
            f"{key}: {path}: no such file; use an adapter in peft's format, with {CONFIG_FILE}"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{key}: {path}: cannot be read ({to_one_line(error)}); restore the file, or use another adapter"
        ) from error
    require(
        isinstance(document, dict),
        f"{key}: {path}: does not contain a JSON object; use an {CONFIG_FILE} that peft wrote",
    )
    settings: dict[str, Any] = document
    return settings


def _check_supported_keys(document: Mapping[str, Any], kind: str, path: Path, key: str) -> None:
    """Check that a peft config does not use keys that this project does not support.

    An unsupported key is accepted only if its value is empty or peft's default.

    Args:
        document: Content of peft's config file.
        kind: Type of the adapter, ``lora`` or ``ia3``.
        path: Path of the file, used in error messages.
        key: Name of the setting that selects the file, used in error messages.

    Raises:
        UserError: If an unsupported key has another value.
    """
    supported = {*PEFT_KEYS[kind].values(), *_EXTRA_KEYS[kind], *_IGNORED_KEYS}
    defaults = _get_peft_defaults(kind)
    for name, value in document.items():
        if name not in supported and value not in (defaults.get(name, False), None, {}, []):
            raise UserError(
                f"{key}: {path}: {name}: {format_short_value(value)} is not supported; use an adapter "
                f"without {name}"
            )


def _get_peft_defaults(kind: str) -> dict[str, Any]:
    """Return peft's default for each key of an adapter config of type ``lora`` or ``ia3``."""
    return {
        field.name: field.default_factory() if field.default_factory is not MISSING else field.default
        for field in fields(_get_peft_config_class(kind))
    }


def _get_peft_config_class(kind: str) -> Any:
    from portable.private.peft_internals import peft

    return {"lora": peft.LoraConfig, "ia3": peft.IA3Config}[kind]


def resolve_adapter_folder(name_or_path: str) -> Path:
    """Return the local folder of an adapter. An adapter on the Hub is downloaded unless it is cached.

    Args:
        name_or_path: Path of a folder, or a name on the Hub (``organization/name``).

    Raises:
        UserError: If the folder does not exist or cannot be downloaded.
    """
    path = Path(name_or_path)
    check_folder_files("adapter.name_or_path", name_or_path)
    if path.is_dir():
        return path
    require(
        not (name_or_path.startswith(("/", ".")) or name_or_path.count("/") != 1),
        f"adapter.name_or_path: {name_or_path}: no such folder; use a folder in peft's format or the name "
        "of an adapter on the hub (organization/name)",
    )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        download = partial(snapshot_download, name_or_path, allow_patterns=[CONFIG_FILE, *WEIGHTS_FILES])
        return Path(read_hub_once_per_node(name_or_path, "adapter", download))
    except (OSError, ValueError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise UserError(f"adapter.name_or_path: {describe_download_error(name_or_path, error)}") from error


def find_adapter_weights(folder: Path) -> Path:
    """Return the path of the adapter weights in ``folder``, or ``folder`` itself if it has no such file."""
    return next((folder / name for name in WEIGHTS_FILES if (folder / name).is_file()), folder)


def build_peft_config(config: RunConfig, revision: str | None, modules_to_save: list[str]) -> Any:
    """Build peft's config from the section ``adapter``.

    The supported keys of a file in peft's format that have no counterpart in the section are also
    set. ``adapter.layers`` is omitted if ``target_modules`` is a string, because peft accepts
    layers only with a list of names; :func:`portable.adapters.adapter.inject_adapter` applies the
    layers later.

    Args:
        config: Config of the run, after :func:`resolve_adapter_config`.
        revision: Commit of the base model on the Hub, or None.
        modules_to_save: Names of modules to train in full, in addition to
            ``adapter.modules_to_save``.

    Raises:
        UserError: If peft rejects a value.
    """
    adapter, kind = config.adapter, config.adapter.type
    assert kind is not None
    values: dict[str, Any] = {
        peft_key: to_plain_value(getattr(adapter, name)) for name, peft_key in PEFT_KEYS[kind].items()
    }
    saved = dict.fromkeys([*(values["modules_to_save"] or []), *modules_to_save])
    values["modules_to_save"] = list(saved) or None
    if kind == "lora":
        if isinstance(adapter.target_modules, str):
            # peft accepts layer indices only together with a list of names. See `inject_adapter`.
            values["layers_to_transform"] = None
        alpha = values["lora_alpha"]
        values["lora_alpha"] = int(alpha) if alpha == int(alpha) else alpha
    else:
        values["feedforward_modules"] = []
    document = config.documents.get(_DOCUMENT_KEY, {})
    values |= {name: document[name] for name in _EXTRA_KEYS[kind] if document.get(name) is not None}
    try:
        return _get_peft_config_class(kind)(
            **values,
            task_type=_PEFT_TASKS[config.model.task],
            base_model_name_or_path=config.model.name_or_path,
            revision=revision,
        )
    except (ValueError, TypeError) as error:
        raise UserError(
            f"adapter: peft rejects the settings ({to_one_line(error)}); change the settings in the adapter "
            "section"
        ) from error


def to_peft_document(config: Any) -> dict[str, Any]:
    """Convert peft's config to the content of ``adapter_config.json``.

    Sets are sorted, so that the result is the same in every process. ``inference_mode`` is always
    True, as in the files that peft saves.
    """
    values = {**config.to_dict(), "inference_mode": True}
    values = {name: sorted(v) if isinstance(v, set) else v for name, v in values.items()}
    document: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return document
