"""Build transformers models on the meta device.

The parameters have no values, so models of any size can be built. A backend then shards and
allocates the parameters, and their values are loaded tensor by tensor.
"""

from __future__ import annotations

import copy
import inspect
import re
import textwrap
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from portable import plugins
from portable.config.derived_defaults import DEFAULTS_BY_TRAINING_KIND, classify_training_kind
from portable.converters.similar_names import format_name_suggestion
from portable.converters.storage.path_or_url import format_path_suggestion
from portable.errors import UserError, require, to_one_line
from portable.hub_requests import read_hub_once_per_node
from portable.model.auxiliary_losses import enables_router_loss_by_default
from portable.model.config_values import check_config_values, iter_config_values
from portable.model.dynamic_rope import check_length_dependent_rope
from portable.model.freezing import COMPUTE_DTYPES, freeze_untrained_parameters, set_trained_dtype
from portable.model.layers import run_trial_forward
from portable.model.meta_device import assign_recorded_values, create_parameters_on_meta
from portable.model.parameters import get_state_tensors, get_token_embedding, map_tied_names
from portable.model.unused_parameters import find_unreached_names, record_unreached_names
from portable.private import transformers_internals
from portable.untrusted_settings import (
    CONFIG_FILE,
    GENERATION_FILE,
    INDEX_FILES,
    check_downloaded_settings,
    convert_library_errors,
    describe_download_error,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PretrainedConfig, PreTrainedModel

    from portable.config import RunConfig
    from portable.config.sections import ModelConfig

AUTO_CLASSES = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "sequence-classification": "AutoModelForSequenceClassification",
}


def _build_config_from_settings(settings: ModelConfig) -> PretrainedConfig:
    """Build the transformers config that ``model.config`` describes.

    Raises:
        UserError: If ``model_type`` is missing or unknown, if a key is unknown or has no effect, or if a
            value is invalid.
    """
    from transformers import AutoConfig

    values = dict(settings.config or {})
    model_type = values.pop("model_type", None)
    if not isinstance(model_type, str):
        raise UserError(
            "model.config.model_type: is missing; set model.config.model_type to a transformers model "
            "type, such as llama"
        )
    try:
        defaults = AutoConfig.for_model(model_type)
    except ValueError as error:
        suggestion = format_name_suggestion(model_type, transformers_internals.list_model_types())
        raise UserError(
            "model.config.model_type: transformers has no model type "
            f"{model_type!r}{suggestion or '; change model.config.model_type'}; for a custom "
            "model type, set model.function to a function in the module that registers the type"
        ) from error
    except Exception as error:  # some config classes have invalid defaults
        raise UserError(
            f"model.config.model_type: the default config of {model_type} is invalid ({to_one_line(error)}); "
            "choose another model type"
        ) from error
    _check_config_keys(defaults, values)
    check_config_values("model.config", values)
    _check_rope_is_mapping(values)
    try:
        config = AutoConfig.for_model(model_type, **values)
        _check_rope_has_effect(config, values)
        return config
    except UserError:
        raise
    except ZeroDivisionError as error:
        zeros = (key for key, value in values.items() if value == 0)
        zero = next((key for key in zeros if _fixes_zero_division(key, model_type, values)), None)
        if zero is None:
            raise UserError(
                "model.config: a setting is 0, but is used as a divisor; set all sizes to positive numbers"
            ) from error
        raise UserError(
            f"model.config: {zero} is 0, but is used as a divisor; set {zero} to a positive number"
        ) from error
    except Exception as error:
        raise UserError(f"model.config: {_extract_reason(error)}; correct model.config") from error


def _extract_reason(error: Exception) -> str:
    """Return the message of an exception without the "Validation error for ..." prefix of transformers."""
    return re.sub(r"^(Class v|V)alidation error for \w+ '\w+': \w+: ", "", to_one_line(error))


def _load_pretrained_config(settings: ModelConfig, name_or_path: str) -> PretrainedConfig:
    """Load the config of a local folder or Hub model, and apply the overrides in ``model.config``.

    On several ranks, only one process per node downloads the files.

    Raises:
        UserError: If the model cannot be found or downloaded, if its config is invalid, or if
            an override cannot be applied (see :func:`_apply_config_changes`).
    """
    from transformers import AutoConfig, PretrainedConfig

    if Path(name_or_path).is_file():
        raise UserError(
            f"model.name_or_path: {name_or_path}: is a file; use the folder of a model, with config.json "
            "and safetensors files"
        )
    if (name_or_path.startswith(("/", ".")) or name_or_path.count("/") > 1) and not Path(
        name_or_path
    ).is_dir():
        raise UserError(
            f"model.name_or_path: {name_or_path}: no such folder"
            + (
                format_path_suggestion(Path(name_or_path))
                or "; use a model folder or a model name on the hub (organization/name)"
            )
        )

    def load() -> PretrainedConfig:
        check_downloaded_settings(
            "model.name_or_path", name_or_path, (CONFIG_FILE, GENERATION_FILE, *INDEX_FILES)
        )
        values, _ = PretrainedConfig.get_config_dict(name_or_path)
        check_config_values(f"model.name_or_path: {name_or_path}/{CONFIG_FILE}", values)
        return AutoConfig.from_pretrained(name_or_path, trust_remote_code=settings.trust_remote_code)

    try:
        config = read_hub_once_per_node(name_or_path, "config", load)
    except (UserError, MemoryError):
        raise
    except OSError as error:
        raise UserError(f"model.name_or_path: {describe_download_error(name_or_path, error)}") from error
    except Exception as error:  # inconsistent sizes raise other exception types
        raise UserError(
            f"model.name_or_path: {name_or_path}: {_extract_reason(error)}; correct or restore config.json"
        ) from error
    return _apply_config_changes(config, settings)


def load_model_config(settings: ModelConfig) -> PretrainedConfig:
    """Build or load the transformers config of a model.

    If ``model.name_or_path`` is None, the config is built from ``model.config``. Otherwise, it is
    loaded, and ``model.config`` contains overrides.

    If ``model.function`` is set, its module is imported first, because it may register a model
    type.

    Args:
        settings: The ``model`` section of the config.

    Returns:
        The config without its ``quantization_config``.

    Raises:
        UserError: If ``model.function`` cannot be loaded, if ``model_type`` or another key is
            unknown, if ``model.name_or_path`` is neither a local folder nor a model on the
            Hub, if the config is invalid, if a setting in ``model.config`` has no effect, if the
            task is ``seq2seq-lm`` but the model is not an encoder-decoder model, or if the rotary
            embeddings do not fit the task (see
            :func:`portable.model.dynamic_rope.check_length_dependent_rope`). Other tasks are
            checked when the model is built.
    """
    if settings.function is not None:  # importing it may register a model type
        plugins.load_plugin("model.function", settings.function)
    config = (
        _build_config_from_settings(settings)
        if settings.name_or_path is None
        else _load_pretrained_config(settings, settings.name_or_path)
    )
    try:
        text: object = config.get_text_config()
    except ValueError as error:  # the config contains several text models
        raise UserError(f"{settings.setting_key}: {to_one_line(error)}; choose another model") from error
    if isinstance(text, dict):  # the config class does not support the key text_config of config.json
        raise UserError(
            f"{settings.setting_key}: config.json has the key text_config, but models of type "
            f"{config.model_type} have no separate text config; remove the key from config.json"
        )
    if settings.task == "seq2seq-lm" and not getattr(config, "is_encoder_decoder", False):
        raise UserError(
            f"model.task: seq2seq-lm needs an encoder-decoder model, but {config.model_type} is not an "
            "encoder-decoder model; set model.task to causal-lm"
        )
    check_length_dependent_rope(config, settings.task, settings.setting_key)
    pop_quantization_config(config)  # weights are loaded and saved as floats
    return config


def _apply_config_changes(config: PretrainedConfig, settings: ModelConfig) -> PretrainedConfig:
    """Return a copy of a pretrained model's config with the overrides in ``model.config``.

    A nested dict in ``model.config`` is merged into the dict of the same name in ``config``, so
    the other keys of this dict keep their values. Only one level of dicts is merged. A top-level
    ``rope_theta`` or ``partial_rotary_factor`` is merged into ``rope_parameters``, unless each
    layer type has separate parameters.

    Returns ``config`` itself if ``model.config`` is empty.

    Args:
        config: Transformers config of the pretrained model.
        settings: The ``model`` section of the config.

    Raises:
        UserError: If an override has an unknown key or an invalid value, or has no effect. If the
            run loads pretrained weights, the model is built with both configs. The error is then
            also raised if one of the models cannot be built, or if the overrides change the shapes
            of the weights or change which weights are tied.
    """
    if not settings.config:
        return config
    _check_config_keys(config, settings.config)
    check_config_values("model.config", settings.config)
    _check_rope_is_mapping(settings.config)
    values = _merge_config_values(config, config.to_dict(), settings.config)
    try:
        changed_config = type(config).from_dict(values)
        _check_rope_has_effect(changed_config, settings.config)
    except UserError:
        raise
    except Exception as error:  # the checks of the config class may raise any exception
        raise UserError(f"model.config: {to_one_line(error)}; correct model.config") from error
    if not settings.from_scratch:
        before = build_model_on_meta(copy.deepcopy(config), settings)
        after = build_model_on_meta(copy.deepcopy(changed_config), settings)
        if _get_state_shapes(before) != _get_state_shapes(after) or map_tied_names(before) != map_tied_names(
            after
        ):
            raise UserError(
                f"model.config: {', '.join(settings.config)} would change the shapes or the tying of the "
                f"weights of {settings.name_or_path}; remove the keys from model.config, or set model.init "
                "to scratch"
            )
    return changed_config


def _merge_config_values(
    config: Any, values: Mapping[str, Any], changes: Mapping[str, Any]
) -> dict[str, Any]:
    """Merge overrides into the values of a config, and into its nested configs and other dicts.

    An override may have another name of a setting, such as ``num_experts`` for ``num_local_experts``.
    It is renamed, because transformers would reset related settings or ignore the override:

    - Names in the ``attribute_map`` of the config class.
    - ``rope_scaling`` and :data:`_ROPE_KEYS`, which are merged into ``rope_parameters``. If the
      mapping is null or empty, the scaling is removed. These names do not change if each layer type
      has separate RoPE parameters.

    ``num_labels`` replaces class names of another number.

    Args:
        config: The config or nested config. Any other object for the values of another dict.
        values: Keys and values of the config.
        changes: Keys and values of the overrides.

    Raises:
        UserError: If ``rope_scaling`` is set, but each layer type has separate RoPE parameters.
            Config classes apply it to different layer types, or reset other parameters.
    """
    names = getattr(config, "attribute_map", {})
    changes = {names.get(key, key): value for key, value in changes.items()}
    rope = values.get("rope_parameters")
    if "rope_scaling" in changes and isinstance(rope, dict) and _list_rope_per_layer_type(rope):
        raise UserError(
            f"model.config: rope_scaling is set, but the layer types of {type(config).__name__} have "
            f"separate RoPE parameters; set rope_parameters for {' and '.join(rope)} instead"
        )
    if isinstance(rope, dict) and not _list_rope_per_layer_type(rope):
        former = {key: changes[key] for key in _ROPE_KEYS if key in changes}
        changes = {key: value for key, value in changes.items() if key not in former or key in values}
        if parts := [changes.pop(key) for key in ("rope_scaling", "rope_parameters") if key in changes]:
            former |= {key: value for part in parts if part for key, value in part.items()} or {
                "rope_type": "default"
            }
        if former:
            changes["rope_parameters"] = former
    merged = dict(values)
    if changes.get("num_labels", len(class_names := values.get("id2label") or ())) != len(class_names):
        merged |= {"id2label": None, "label2id": None}
    for key, change in changes.items():
        value = values.get(key)
        if isinstance(value, dict) and isinstance(change, dict):
            if "rope_type" in value:
                value = {name: part for name, part in value.items() if name != "type"}
                change = _rename_rope_type(change)
            nested_config = getattr(config, "__dict__", {}).get(key)
            change = _merge_config_values(nested_config, value, change)
        merged[key] = change
    return merged


def _rename_rope_type(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the key ``type`` of RoPE parameters to ``rope_type``, which transformers prefers."""
    return {"rope_type" if key == "type" else key: value for key, value in rope.items()}


def _get_state_shapes(model: PreTrainedModel) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in get_state_tensors(model).items()}


def _fixes_zero_division(key: str, model_type: str, values: Mapping[str, Any]) -> bool:
    """Return whether changing ``key`` from 0 to 1 avoids a division by zero in a config class.

    The result is also True if the config with the changed value cannot be built because of another
    error, such as inconsistent sizes.

    Args:
        key: Key of ``values`` whose value is 0.
        model_type: Model type in transformers.
        values: Keys and values of the config.
    """
    from transformers import AutoConfig

    try:
        AutoConfig.for_model(model_type, **{**values, key: 1})
    except Exception as error:  # other errors, such as inconsistent sizes, are not divisions by zero
        return not isinstance(error, ZeroDivisionError)
    return True


# Keys in published config.json files that no current config class has. They have no effect.
_IGNORED_PUBLISHED_KEYS = {
    "auto_map",
    "n_ctx",
    "n_positions",
    "output_past",
    "prefix",
    "task_specific_params",
}


_ROPE_KEYS = ("rope_theta", "partial_rotary_factor")
"""RoPE keys at the top level of published config.json files, which transformers 5 stores inside
``rope_parameters``."""


def _list_rope_per_layer_type(rope: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """List the rope parameters of each layer type.

    Args:
        rope: Value of ``rope_parameters`` in a config.

    Returns:
        One mapping per layer type. Empty if all layers share one mapping.
    """
    return [value for value in rope.values() if isinstance(value, dict)]


def _check_rope_is_mapping(values: Mapping[str, Any], setting_key: str = "model.config") -> None:
    """Check the types of ``rope_parameters`` and ``rope_scaling``, also in nested configs.

    Args:
        values: Keys and values of ``model.config``, or of a nested config.
        setting_key: Key of ``values`` in the run config.

    Raises:
        UserError: If a value is neither a mapping nor None.
    """
    for key, value in values.items():
        if key in ("rope_parameters", "rope_scaling") and not isinstance(value, dict | None):
            raise UserError(
                f"{setting_key}.{key}: is {to_one_line(str(value))[:100]}, which is not a mapping; use a "
                "mapping with rope_type"
            )
        if isinstance(value, dict):
            _check_rope_is_mapping(value, f"{setting_key}.{key}")


def _check_rope_has_effect(
    config: PretrainedConfig, values: Mapping[str, Any], setting_key: str = "model.config"
) -> None:
    """Check that the RoPE settings outside of ``rope_parameters`` have an effect.

    The settings of nested configs, such as ``text_config``, are also checked.

    The settings are ``rope_theta`` and ``partial_rotary_factor``. They have an effect if the config
    class copies their values into ``rope_parameters``. Configs without ``rope_parameters`` are not
    checked.

    Args:
        config: The config that was built from the settings.
        values: The settings of ``model.config``, or of a nested config.
        setting_key: Key of ``values`` in the run config.

    Raises:
        UserError: If ``values`` contains one of the two settings, but ``rope_parameters`` does not
            contain its value.
    """
    from transformers import PretrainedConfig

    for key, nested_values in values.items():
        if isinstance(nested_values, dict) and isinstance(
            nested_config := getattr(config, key, None), PretrainedConfig
        ):
            _check_rope_has_effect(nested_config, nested_values, f"{setting_key}.{key}")
    rope = getattr(config, "rope_parameters", None) or {}
    scopes = (rope, *_list_rope_per_layer_type(rope))
    for key in _ROPE_KEYS:
        if key in values and rope and not any(scope.get(key) == values[key] for scope in scopes):
            raise UserError(
                f"{setting_key}.{key}: has no effect on {type(config).__name__}; set {key} in "
                f"{setting_key}.rope_parameters"
            )


def _check_config_keys(config: PretrainedConfig, values: Mapping[str, Any]) -> None:
    """Check that the config class or the model code uses each key of ``model.config``.

    Only the keys at the top level are checked. Generation settings and some keys without an effect
    are accepted, because they are common in published config files.

    Args:
        config: Config of the model type. Its attributes are the known keys.
        values: Keys and values of ``model.config``.

    Raises:
        UserError: If a key is neither used nor accepted.
    """
    for key in values:
        # transformers stores unknown keywords silently, so a misspelled key would have no effect.
        is_known = _has_config_attribute(config, key) or (
            key in _ROPE_KEYS and hasattr(config, "rope_parameters")
        )
        is_known = is_known or _is_ignored_published_key(key, values[key]) or _is_generation_setting(key)
        if not (is_known or _is_read_by_model_code(config, key)):
            suggestion = format_name_suggestion(key, config.to_dict())
            raise UserError(
                f"model.config.{key}: {type(config).__name__} has no such "
                f"setting{suggestion or '; remove the key'}"
            )


def _has_config_attribute(config: PretrainedConfig, key: str) -> bool:
    """Return whether a config has the attribute ``key``.

    An attribute with one value per layer type also counts. It is recognized by the error that
    transformers raises when such an attribute is read as a single value.
    """
    try:
        return hasattr(config, key)
    except Exception:  # reading a per-layer setting as one value raises
        return True


def _is_read_by_model_code(config: PretrainedConfig, key: str) -> bool:
    """Return whether the modeling code reads an optional key that the config class does not define.

    An example is ``head_dim``, which some models read with ``getattr(config, "head_dim", ...)``. This
    function searches the source code of the modeling module for this pattern.
    """
    spec = find_spec(type(config).__module__.replace("configuration_", "modeling_"))
    if spec is None or spec.origin is None:
        return False
    return f'getattr(config, "{key}"' in Path(spec.origin).read_text("utf-8")


def _is_ignored_published_key(key: str, value: Any) -> bool:
    return key in _IGNORED_PUBLISHED_KEYS or (key == "gradient_checkpointing" and not value)


def _is_generation_setting(key: str) -> bool:
    """Return whether ``key`` is a field of ``GenerationConfig``. Old config.json files contain such keys."""
    from transformers import GenerationConfig

    return not key.startswith("_") and key in vars(GenerationConfig())


def pop_quantization_config(config: PretrainedConfig) -> dict[str, Any] | None:
    """Remove the quantization config from ``config`` and its text configs.

    Args:
        config: The transformers config. Modified in place.

    Returns:
        The quantization config as a dict. None if the config has none.
    """
    raw_config: Any = None
    for part in (config, config.get_text_config(), config.get_text_config(decoder=True)):
        if "quantization_config" in vars(part):
            raw_config = raw_config or part.quantization_config
            del part.quantization_config
    quantization: dict[str, Any] | None = (
        raw_config.to_dict() if hasattr(raw_config, "to_dict") else raw_config
    )
    return quantization


_BUILT_IN_ATTENTION = ("sdpa", "eager")


def build_model_on_meta(config: PretrainedConfig, settings: ModelConfig) -> PreTrainedModel:
    """Build the model on the meta device, and check it with a trial forward pass.

    The trial forward pass is skipped if ``model.attention`` is neither ``sdpa`` nor ``eager``.
    The parameters are fp32 on the meta device, but the buffers have values. Weights are tied
    as the config requires, and ``model.function`` is applied. The KV cache is disabled, and a hook
    adds token types to the inputs if the model requires them in training. If the user has not set
    ``model.attention``, architectures without an ``sdpa`` implementation use ``eager``.

    Args:
        config: Transformers config of the model. If ``model.function`` changes the config of
            the model, the changes are also applied to ``config``.
        settings: The ``model`` section of the config.

    Returns:
        The model.

    Raises:
        UserError: If the model cannot be built, for example because of inconsistent sizes, if
            it does not run on text, if the attention implementation is not available or its
            code may not run, or if ``model.experts`` is set but the experts are not stacked.
    """
    key, text = settings.setting_key, config.get_text_config()
    if "/" in settings.attention:  # a name with a slash loads code from the Hub
        plugins.check_code_may_run(f"model.attention: {settings.attention}", settings.attention)
    for name in ("hidden_size", "num_hidden_layers", "vocab_size"):
        size = getattr(text, name, None)
        if isinstance(size, int) and size < 1:
            raise UserError(f"{key}: {name} is {size}; set {name} to at least 1")
    try:
        model = _build_unchecked_model(config, settings, settings.attention)
    except Exception as error:  # invalid sizes and names raise exceptions of any class
        if settings.attention not in _BUILT_IN_ATTENTION and re.search(
            "attention|kernel|attn", str(error), re.IGNORECASE
        ):
            raise UserError(
                f"model.attention: {settings.attention} is not available ({to_one_line(error)}); set "
                "model.attention to sdpa"
            ) from error
        lacks_sdpa = settings.attention == "sdpa" and "scaled_dot_product_attention" in str(error)
        if not lacks_sdpa:
            raise UserError(_explain_build_error(config, key, error)) from error
        if "attention" in settings.model_fields_set:
            architecture = str(error).split()[0]
            raise UserError(
                f"model.attention: {architecture} does not support sdpa; set model.attention to eager"
            ) from error
        try:
            model = _build_unchecked_model(config, settings, "eager")
        except Exception as fallback_error:
            raise UserError(_explain_build_error(config, key, fallback_error)) from fallback_error
    model.tie_weights()
    if settings.experts is not None:
        stacked = any(parameter.dim() == 3 for parameter in model.parameters())
        require(
            stacked,
            f"model.experts: {type(model).__name__} has no experts in stacked tensors; remove model.experts",
        )
        model.set_experts_implementation(settings.experts)
    _prepare_for_training(model)
    if settings.attention in _BUILT_IN_ATTENTION:  # other kernels are not implemented on the meta device
        _check_trial_forward(model, key)
    return model


def build_and_freeze_model(config: PretrainedConfig, run: RunConfig) -> PreTrainedModel:
    """Build the model of a run on the meta device, and freeze the untrained parameters.

    Parameters that the loss does not depend on are recorded; see
    :mod:`portable.model.unused_parameters`. They are frozen as well, unless ``train.trainable``
    matches them or ``memory.offload_params`` is ``nvme``.

    Trained parameters are fp32, or bf16 if ``train.master_dtype`` is ``bf16``. Frozen parameters
    have the compute dtype if pretrained weights are loaded and ``config`` has this dtype. In all
    other cases, frozen parameters are fp32.

    Args:
        config: Transformers config of the model.
        run: The config of the run.

    Returns:
        The model on the meta device.

    Raises:
        UserError: If the model cannot be built (see :func:`build_model_on_meta`), if a pattern
            of ``train.trainable`` or ``train.frozen`` is invalid or matches no parameter, if no
            parameter is trained, or if the attention kernel would ignore the model's dropout.
    """
    model = build_model_on_meta(config, run.model)
    _check_attention_dropout(config, run)
    compute_dtype = COMPUTE_DTYPES.get(run.precision, torch.float32)
    # Loading the weights corrects this dtype if the dtype of the files differs from the config.
    checkpoint_dtype = torch.float32 if run.model.from_scratch else getattr(config, "dtype", None)
    whole_output = run.train.loss is not None
    unreached = find_unreached_names(model, seq_len=run.data.max_sequence_length, whole_output=whole_output)
    record_unreached_names(model, unreached)
    if run.memory.offload_params == "nvme":
        # DeepSpeed does not save frozen parameters that are offloaded to nvme. Unreached parameters have no
        # gradient, so they keep their values even if they are not frozen.
        unreached = frozenset()
    if run.train.has_frozen_patterns or unreached:
        freeze_untrained_parameters(
            model, run.train, compute_dtype if checkpoint_dtype == compute_dtype else torch.float32, unreached
        )
    if run.train.master_dtype == "bf16":
        set_trained_dtype(model, torch.bfloat16)
    return model


_KERNELS_WITHOUT_DROPOUT = re.compile("flash_attention_[34]|flash-attn[34]")
_ATTENTION_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


def _check_attention_dropout(config: PretrainedConfig, run: RunConfig) -> None:
    """Check that the attention kernel supports the dropout of the model.

    transformers silently ignores the dropout if the kernel does not support it.

    Args:
        config: Transformers config of the model.
        run: The config of the run.

    Raises:
        UserError: If the model has attention dropout, but FlashAttention 3 or 4 computes the
            attention. Not raised if ``train.dropout`` is false.
    """
    attention = run.model.attention
    if run.train.dropout is False or _KERNELS_WITHOUT_DROPOUT.search(attention) is None:
        return
    text = config.get_text_config()
    for name in _ATTENTION_DROPOUTS:
        if getattr(text, name, 0.0):
            raise UserError(
                f"model.attention: {attention} does not support dropout, but {name} of the model is "
                f"{getattr(text, name)}; set train.dropout to false, or set model.attention to sdpa"
            )


def _prepare_for_training(model: PreTrainedModel) -> None:
    """Disable the KV cache and the padding warning of a model in place.

    ``use_cache`` is set to False in the config of the model and of each transformers model inside
    it. The method ``warn_if_padding_and_no_attention_mask`` is replaced with a function that does
    nothing, because the check for padding causes a host sync. If the model requires token types in
    training, the forward pre-hook :func:`_add_token_types` is registered.
    """
    from transformers import PreTrainedModel

    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            # Training needs no KV cache. Encoders and decoders have separate configs.
            module.config.use_cache = False
            # Disable the warning, because checking every batch for padding causes a host sync. It is not
            # needed, because padded data always has a mask.
            module.__dict__["warn_if_padding_and_no_attention_mask"] = _skip_warning
    if _TOKEN_TYPES in inspect.signature(model.forward).parameters and _requires_token_types(model):
        model.register_forward_pre_hook(_add_token_types, with_kwargs=True)


_TOKEN_TYPES = "mm_token_type_ids"
"""Name of the model argument with the type of each token: 0 for text, other values for images. Molmo 2
requires it for training."""


def _requires_token_types(model: PreTrainedModel) -> bool:
    """Return whether a trial forward pass in training mode raises an error about missing token types."""
    try:
        run_trial_forward(model, _set_train_mode)
    except ValueError as error:
        return _TOKEN_TYPES in str(error)
    except Exception:  # `_check_trial_forward` reports other errors
        return False
    return False


def _set_train_mode(model: nn.Module) -> None:
    model.train()


def _add_token_types(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Add token types, which mark all tokens as text, to the inputs. This is a forward pre-hook.

    Existing token types are left unchanged.

    Returns:
        The positional and keyword arguments of the forward method.
    """
    ids = arguments[0] if arguments else keywords.get("input_ids")
    if ids is not None and keywords.get(_TOKEN_TYPES) is None:
        keywords = {**keywords, _TOKEN_TYPES: torch.zeros_like(ids)}
    return arguments, keywords


def _skip_warning(*_: Any) -> None:
    pass


def _select_model_class(config: PretrainedConfig, settings: ModelConfig) -> Any:
    """Select the model class to build for ``config``.

    This is usually the Auto class of the task. For a pretrained ``causal-lm`` model, another class
    is selected in three cases:

    - The model is loaded with its own code (``model.trust_remote_code``), and this code has a class
      for a multimodal Auto class, but not for the Auto class of the task. The multimodal Auto class
      is selected.
    - The checkpoint is multimodal: its ``architectures`` contain the multimodal class of the model
      type. This multimodal class is selected.
    - The Auto class does not support the model type. The multimodal class of the model type is
      selected. If there is none, the class in ``architectures`` is selected, provided that it
      generates text.

    The second and the third case do not apply to encoder-decoder models.

    Args:
        config: Transformers config of the model.
        settings: The ``model`` section of the config.

    Returns:
        A transformers model class, or an Auto class.

    Raises:
        UserError: If transformers has no class for this model type and task. Also raised for
            ``causal-lm`` if the Auto class does not support the model type, and the class in
            ``architectures`` does not generate text.
    """
    import transformers

    auto_class = getattr(transformers, AUTO_CLASSES[settings.task])
    remote_classes = getattr(config, "auto_map", None) if settings.trust_remote_code else None
    if remote_classes and auto_class.__name__ in remote_classes:
        return auto_class
    task_class = transformers_internals.find_model_class(auto_class, config)
    if settings.task != "causal-lm":
        if task_class is None:
            raise UserError(_explain_missing_class(config, settings))
        return auto_class
    composite = None
    if settings.name_or_path is not None:
        remote_class = next((name for name in _COMPOSITE_CLASSES if name in (remote_classes or ())), None)
        if remote_class is not None:
            return getattr(transformers, remote_class)
        composite = None if getattr(config, "is_encoder_decoder", False) else _find_composite_class(config)
        transformers_internals.patch_llama4()
        if composite is not None and composite.__name__ in (config.architectures or ()):
            return composite
    if task_class is not None:
        return auto_class
    _check_architecture_generates_text(config, settings)
    model_class = _find_architecture_class(config) if composite is None else composite
    if model_class is None:
        raise UserError(_explain_missing_class(config, settings))
    return model_class


def _check_architecture_generates_text(config: PretrainedConfig, settings: ModelConfig) -> None:
    """Raise UserError if the first class in ``architectures`` has a head that does not generate text.

    Base models without a head, and classes unknown to transformers, are accepted.
    """
    import transformers

    name = (config.architectures or [""])[0]
    architecture = getattr(transformers, name, None)
    if (
        name.endswith("Model")
        or not isinstance(architecture, type)
        or not hasattr(architecture, "can_generate")
    ):
        return
    if not architecture.can_generate():
        raise UserError(
            f"{settings.setting_key}: {name} does not generate text; choose a model that generates text"
        )


def _find_architecture_class(config: PretrainedConfig) -> Any:
    """Return the first class in ``architectures`` if it is a decoder that generates text.

    Returns None if transformers does not have the class, if the class has another config type, if it
    does not generate text, or if the model is an encoder-decoder.
    """
    import transformers

    architecture = getattr(transformers, (config.architectures or [""])[0], None)
    if not isinstance(architecture, type) or not issubclass(architecture, transformers.PreTrainedModel):
        return None
    model_class: Any = architecture
    fits = model_class.config_class is type(config) and model_class.can_generate()
    return architecture if fits and not getattr(config, "is_encoder_decoder", False) else None


def select_pretrained_class(name: str) -> Any:
    """Select the class that a run with default settings builds for a pretrained causal language model.

    The config of a Hub model is downloaded unless it is cached.

    Args:
        name: Local folder, or name of a model on the Hub.

    Returns:
        A transformers model class, or an Auto class.

    Raises:
        UserError: If the config cannot be loaded, if transformers has no class for it, or if
            the class in ``architectures`` does not generate text.
    """
    from transformers import AutoConfig

    from portable.config.sections import ModelConfig

    def load() -> PretrainedConfig:
        check_downloaded_settings("model.name_or_path", name, (CONFIG_FILE, GENERATION_FILE, *INDEX_FILES))
        with convert_library_errors("model.name_or_path"):
            return AutoConfig.from_pretrained(name)

    settings = ModelConfig(name_or_path=name, config=None)
    return _select_model_class(read_hub_once_per_node(name, "config", load), settings)


def _find_composite_class(config: PretrainedConfig) -> Any:
    """Return the multimodal class for the model type of ``config``, or None if transformers has none.

    A multimodal class accepts text and other inputs.
    """
    import transformers

    autos = (getattr(transformers, name, None) for name in _COMPOSITE_CLASSES)
    classes = (transformers_internals.find_model_class(auto, config) for auto in autos if auto is not None)
    return next((model_class for model_class in classes if model_class is not None), None)


_COMPOSITE_CLASSES = ("AutoModelForMultimodalLM", "AutoModelForImageTextToText")
"""Names of the Auto classes of multimodal models that generate text, in order of preference."""


def _explain_missing_class(config: PretrainedConfig, settings: ModelConfig) -> str:
    """Build the error message, including a remedy, for a model type that has no class for the task."""
    import transformers

    name = (config.architectures or [f"a model of type {config.model_type}"])[0]
    tasks = [
        task
        for task, auto in AUTO_CLASSES.items()
        if transformers_internals.find_model_class(getattr(transformers, auto), config) is not None
    ]
    text = config.get_text_config()
    if tasks:
        remedy = f"set model.task to {' or '.join(tasks)}"
    elif settings.name_or_path is None and text is not config:
        remedy = (
            f"set model.config.model_type to {text.model_type}, or set model.name_or_path to a pretrained "
            "model"
        )
    else:
        remedy = "choose another model"
    return (
        f"{settings.setting_key}: transformers cannot build {name} for model.task {settings.task}; {remedy}"
    )


def _build_unchecked_model(
    config: PretrainedConfig, settings: ModelConfig, attention: str
) -> PreTrainedModel:
    """Build the model of the selected class on the meta device, and apply ``model.function``.

    Weights are not tied yet, and no trial forward pass is run. Exceptions of transformers propagate
    unchanged.

    Args:
        config: Transformers config. The model receives a copy. In the copy, the router loss may be
            enabled (see :func:`enables_router_loss_by_default`), and a default padding id outside
            of the vocabulary is removed. If ``model.function`` changes the copy, its changes are
            also applied to ``config``.
        settings: The ``model`` section of the config.
        attention: Attention implementation, which may differ from ``model.attention``.
    """
    model_class = _select_model_class(config, settings)
    saved_config, config = config, copy.deepcopy(config)
    text = config.get_text_config()
    if settings.name_or_path is not None and enables_router_loss_by_default(config, settings):
        text.output_router_logits = True  # only in this copy, not in the saved config
    vocabulary, padding = getattr(text, "vocab_size", None), getattr(text, "pad_token_id", None)
    sets_padding = settings.name_or_path is not None or "pad_token_id" in (settings.config or {})
    if (
        not sets_padding
        and isinstance(vocabulary, int)
        and isinstance(padding, int)
        and padding >= vocabulary
    ):
        text.pad_token_id = None  # this default id exceeds the vocabulary; the tokenizer sets another
    with create_parameters_on_meta() as recording:
        if hasattr(model_class, "from_config"):  # an Auto class
            model: PreTrainedModel = model_class.from_config(
                config,
                attn_implementation=attention,
                dtype=torch.float32,
                trust_remote_code=settings.trust_remote_code,
            )
        else:
            model = transformers_internals.build_model_from_config(
                model_class, config, attn_implementation=attention, dtype=torch.float32
            )
        if settings.function is not None:
            model = apply_model_function(model, settings.function, saved_config)
    assign_recorded_values(model, recording)
    return model


def apply_model_function(
    model: PreTrainedModel, import_path: str, saved_config: PretrainedConfig | None = None
) -> PreTrainedModel:
    """Call the custom function ``model.function``, which may change or replace a model.

    Args:
        model: Model whose modules the function may change.
        import_path: Value of ``model.function``.
        saved_config: Config that is saved with the weights. The function's changes to the model
            config are copied into it. None to copy no changes.

    Returns:
        The model that the function returns, or ``model`` if it returns None.

    Raises:
        UserError: If the function cannot be loaded or fails, if it returns neither a
            transformers model nor None, or if it adds a scalar parameter.
    """
    from transformers import PreTrainedModel

    context = f"model.function: {import_path}"
    before, names = model.config.to_dict(), {name for name, _ in model.named_parameters()}
    with plugins.convert_user_errors(context):
        result = plugins.load_plugin("model.function", import_path)(model)
    result = model if result is None else result
    if not isinstance(result, PreTrainedModel):
        raise UserError(
            f"{context}: returns a {type(result).__name__}, not a transformers model or None; return the "
            "model, or None"
        )
    scalars = [name for name, p in result.named_parameters() if p.dim() == 0 and name not in names]
    require(
        not scalars,
        f"{context}: the parameter {next(iter(scalars), '')} is a scalar, which cannot be sharded; use a "
        "vector with one element, for example torch.ones(1)",
    )
    if saved_config is not None:
        _copy_config_changes(result.config, before, saved_config)
    return result


def _copy_config_changes(
    config: PretrainedConfig, before: Mapping[str, Any], saved_config: PretrainedConfig
) -> None:
    """Copy the changes of a config, and of its nested configs, into another config.

    Args:
        config: The changed config.
        before: Keys and values of ``config`` before the changes.
        saved_config: Config to modify in place.
    """
    from transformers import PretrainedConfig

    for key, value in config.to_dict().items():
        if value == before.get(key):
            continue
        # The attribute may be a nested config or a dtype, which to_dict() converts.
        attribute, saved_attribute = vars(config).get(key, value), vars(saved_config).get(key)
        if isinstance(attribute, PretrainedConfig) and type(attribute) is type(saved_attribute):
            _copy_config_changes(attribute, before.get(key) or {}, saved_attribute)
        else:
            setattr(saved_config, key, copy.deepcopy(attribute))


_PIP_ADVICE = re.compile(r"`pip install ([\w.\[\]-]+)`")
"""Pattern of the ``pip install`` commands in transformers' error messages. Its group captures the package."""


def _explain_build_error(config: PretrainedConfig, key: str, error: Exception) -> str:
    """Build the user-facing error message for an exception during the construction of a model.

    The message of a UserError is returned unchanged. For an import error, the message begins with
    ``model:`` and names the package to install, if it is known. All other messages begin with
    ``key``. If a value in the model config is a name that transformers does not support, such as an
    unknown activation function, the message names the entry with this value. For any other error,
    the message contains the text of the error.

    Args:
        config: Transformers config of the model.
        key: Setting that describes the model.
        error: The exception.
    """
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        return f"model: {config.model_type} needs the package {package}; run: pip install {package}"
    if isinstance(error, ImportError):
        packages = _PIP_ADVICE.findall(to_one_line(error))
        if not packages:
            return f"model: {to_one_line(error)}"
        needed = f"the package {' and the package '.join(packages)}"
        return f"model: {config.model_type} needs {needed}; run: pip install {' '.join(packages)}"
    if isinstance(error, KeyError) and error.args:
        for path, value in iter_config_values(config.to_dict()):
            if isinstance(value, str) and value == error.args[0]:
                name = ".".join(path)
                return f"{key}: {name} is {value!r}, which transformers does not support; change {name}"
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return f"{key}: building the model failed ({kind}{to_one_line(error)}); check its sizes and names"


# torch's messages for incompatible shapes. Other errors on the meta device, such as control flow that depends
# on values, do not indicate a wrong config.
_SHAPES_DISAGREE = re.compile(
    r"must match|cannot be multiplied|is invalid for input of size|Expected size|Mismatching argument"
)


def _check_trial_forward(model: PreTrainedModel, key: str) -> None:
    """Check a model by a trial forward pass on the meta device.

    The trial shows whether the sizes in the config are consistent, and whether the model predicts
    tokens from text only. Errors with other causes are ignored, because some models cannot run on
    the meta device.

    Args:
        model: The model, on the meta device.
        key: Setting that describes the model, used in error messages.

    Raises:
        UserError: If the sizes are inconsistent, or if the model does not predict tokens from text
            only.
    """
    try:
        output = run_trial_forward(model)
    except UserError:
        raise
    except Exception as error:
        name = type(model).__name__
        is_composite = type(model) is _find_composite_class(model.config)
        if isinstance(error, TypeError | ValueError) and (
            is_composite or _mentions_forward_argument(model, error)
        ):
            raise UserError(
                f"{key}: {name} requires inputs other than text ({to_one_line(error)}); choose a text model"
            ) from error
        if isinstance(error, RuntimeError) and is_composite and _SHAPES_DISAGREE.search(str(error)):
            reason = textwrap.shorten(to_one_line(error), 100, placeholder=" ...")
            raise UserError(
                f"{key}: {name} does not run with only text ({reason}); choose a text model"
            ) from error
        if isinstance(error, RuntimeError) and _SHAPES_DISAGREE.search(str(error)):
            raise UserError(
                f"{key}: the sizes of the model are inconsistent ({to_one_line(error)}); check the "
                "hidden size, the head sizes and the numbers of heads"
            ) from error
        return
    logits = getattr(output, "logits", None)
    if type(model) is _find_composite_class(model.config) and logits is not None and logits.shape[1] != 2:
        raise UserError(
            f"{key}: {type(model).__name__} does not predict the next token of a text: for 2 tokens, the "
            f"number of predictions is {logits.shape[1]}; choose a causal language model"
        )


def _mentions_forward_argument(model: PreTrainedModel, error: Exception) -> bool:
    """Return whether an error message contains the name of an argument of ``forward``.

    Such an error indicates that the model needs further inputs. ``input_ids`` and ``labels`` do not
    count.
    """
    arguments = inspect.signature(model.forward).parameters.keys() - {"input_ids", "labels"}
    return not arguments.isdisjoint(re.findall(r"\w+", str(error)))


def enlarge_vocabulary(config: PretrainedConfig, tokenizer_size: int, run: RunConfig) -> int | None:
    """Enlarge the vocabulary size in ``config`` if it is too small for ``data.added_tokens``.

    Does nothing if ``data.added_tokens`` is empty.

    Args:
        config: The transformers config. Modified in place.
        tokenizer_size: Number of tokens in the tokenizer, including the added tokens.
        run: The config of the run.

    Returns:
        The former vocabulary size. None if it does not change.
    """
    text = config.get_text_config()
    former_size = getattr(text, "vocab_size", None)
    if not run.data.added_tokens or not isinstance(former_size, int) or tokenizer_size <= former_size:
        return None
    text.vocab_size = tokenizer_size
    return former_size


def check_vocabulary_size(model: PreTrainedModel, tokenizer_size: int, run: RunConfig) -> None:
    """Check that the embedding has a row for each token id of the tokenizer.

    Args:
        model: The model, on any device.
        tokenizer_size: Number of tokens in the tokenizer.
        run: The config of the run.

    Raises:
        UserError: If the tokenizer has more tokens than the embedding has rows.
    """
    embedding = get_token_embedding(model)
    if embedding is not None and tokenizer_size > (vocabulary_size := embedding.shape[0]):
        remedy = f"set model.config.vocab_size to at least {tokenizer_size}"
        if run.model.name_or_path is not None:  # the vocabulary size of a pretrained model cannot be changed
            num_added = tokenizer_size - vocabulary_size
            last_tokens = "last token" if num_added == 1 else f"last {num_added} tokens"
            remedy = f"list the {last_tokens} of the tokenizer in data.added_tokens"
        raise UserError(
            f"data.tokenizer: the tokenizer has {tokenizer_size} tokens, but the model's vocabulary has "
            f"{vocabulary_size}; {remedy}, or choose another tokenizer"
        )


def get_max_positions(config: PretrainedConfig) -> int | None:
    """Return the maximum number of positions (``max_position_embeddings``), or None if it is unlimited."""
    bound = getattr(config.get_text_config(), "max_position_embeddings", None)
    return bound if isinstance(bound, int) and bound > 0 else None


def apply_default_seq_len(config: RunConfig) -> RunConfig:
    """Set the default of ``data.seq_len`` for a causal-lm run.

    The default depends on the kind of training, such as fine-tuning, and is listed in
    :data:`portable.config.derived_defaults.DEFAULTS_BY_TRAINING_KIND`. The default for
    pretraining equals the default in ``RunConfig``, and applies even if the model has fewer
    positions. The other defaults are limited to the number of positions of the model, and rounded
    down to a multiple of 8 times the context-parallel size. A value that the user has set does not
    change. Runs with the data format ``samples`` do not change either.

    Args:
        config: Config of the run, in which the data format is already set.

    Returns:
        The updated config, or ``config`` itself if nothing changes or the model config cannot
        be loaded.
    """
    length = DEFAULTS_BY_TRAINING_KIND["data.seq_len"].get_default(classify_training_kind(config))
    has_fixed_default = config.model.task != "causal-lm" or config.data.format == "samples"
    if has_fixed_default or config.is_set_or_put("data.seq_len") or length == config.data.seq_len:
        return config
    try:
        bound = get_max_positions(load_model_config(config.model))
    except UserError:  # raised again when the model is built
        return config
    multiple = 8 * config.context_parallel_size
    return config.replaced({"data.seq_len": limit_seq_len(length, bound, multiple)})


def limit_seq_len(seq_len: int, max_positions: int | None, multiple: int = 8) -> int:
    """Limit a sequence length to the maximum of a model, and round it down to a multiple.

    Some models reserve a few of their positions. For example, RoBERTa has 514 positions, but a
    sequence may use only 512 of them. Because of the rounding, the result does not exceed 512.

    Args:
        seq_len: Sequence length before limiting, in tokens.
        max_positions: Maximum number of positions of the model, as returned by
            :func:`get_max_positions`. None for no maximum.
        multiple: Number that the result should be a multiple of.

    Returns:
        The length in tokens. It is not rounded if it is smaller than ``multiple``.
    """
    seq_len = seq_len if max_positions is None else min(seq_len, max_positions)
    return seq_len // multiple * multiple or seq_len


def check_seq_len(config: PretrainedConfig, run: RunConfig, model: nn.Module | None = None) -> None:
    """Check that the sequence length does not exceed the number of positions of the model.

    Args:
        config: Transformers config of the model.
        run: Config of the run.
        model: Model, if it is already built. Some models, such as RoBERTa, reserve the first rows
            of their position table, and these rows are not counted as positions. If ``model`` is
            None, all rows are counted.

    Raises:
        UserError: If ``data.seq_len`` or ``data.target_seq_len`` exceeds the number of positions.
    """
    seq_len = run.data.max_sequence_length
    bound = get_max_positions(config)
    if bound is None:
        return
    bound -= 0 if model is None else _count_reserved_positions(model)
    if bound < seq_len:
        key = "data.seq_len" if seq_len == run.data.seq_len else "data.target_seq_len"
        if run.model.name_or_path is None:
            remedy = "or raise model.config.max_position_embeddings"
        else:  # a pretrained position table has a fixed size
            remedy = "or set model.name_or_path to a model with more positions"
        raise UserError(
            f"{key}: {seq_len} tokens exceed the model's {bound} positions; lower {key}, {remedy}"
        )


def _count_reserved_positions(model: nn.Module) -> int:
    """Count the leading rows of a model's position table that no token uses.

    For example, RoBERTa's positions start after its padding id. Returns 0 for other models.
    """
    reserved = 0
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and "position" in name and module.padding_idx is not None:
            reserved = max(reserved, module.padding_idx + 1)
    return reserved
