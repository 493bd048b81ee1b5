"""Convert the config of a supported model type to the settings of a GGUF file.

A model type is supported if llama.cpp and transformers compute the same outputs for it. Each
setting in `config.json` is either written to the GGUF file, only allowed to have certain values, or
irrelevant to the outputs. Any other setting causes an error that names it, so that an unknown
setting cannot silently change the outputs.

Source: `configuration_*.py` of transformers; https://github.com/ggml-org/llama.cpp, src/models.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from math import pi, sqrt
from typing import TYPE_CHECKING, Any, NoReturn

from portable.converters.errors import CheckpointError
from portable.converters.names.earlier_keys import remove_earlier_keys
from portable.converters.options import is_unset

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    from portable.converters.storage.path_or_url import AnyPath

_MAX_NUMBERS = (3e38, 1 << 24)  # upper bounds on a float32 number and on a count
_MAX_SHOWN_LENGTH = 60

# Settings that affect only training, generation, the tokenizer, or how a program runs.
_SETTINGS_WITHOUT_EFFECT = """
_attn_implementation _name_or_path architectures attention_dropout attn_implementation attn_pdrop auto_map
bos_token_id cache_implementation chunk_size_feed_forward decoder_start_token_id do_sample dtype
early_stopping embd_pdrop eos_token_id finetuning_task gradient_checkpointing id2label initializer_range
is_decoder label2id length_penalty max_length max_window_layers min_length model_type n_ctx
no_repeat_ngram_size num_beams num_labels num_return_sequences output_attentions output_hidden_states
output_router_logits pad_token_id prefix pretraining_tp problem_type remove_invalid_values
reorder_and_upcast_attn repetition_penalty resid_pdrop return_dict return_dict_in_generate
router_aux_loss_coef router_jitter_noise sep_token_id summary_activation summary_first_dropout
summary_proj_to_labels summary_type summary_use_proj task_specific_params temperature tokenizer_class
top_k top_p torch_dtype torchscript transformers.js_config transformers_version unk_token_id
unsloth_fixed unsloth_version use_bfloat16 use_cache
"""
# Names of a setting in `config.json`, keyed by the method `GGUFWriter.add_<key>` that writes it.
_COUNT_SETTINGS = {
    "block_count": ("num_hidden_layers", "n_layer"),
    "context_length": ("max_position_embeddings", "n_positions"),
    "embedding_length": ("hidden_size", "n_embd"),
    "head_count": ("num_attention_heads", "n_head"),
    "vocab_size": ("vocab_size",),
}
_RMS_NORM_SETTINGS = {"layer_norm_rms_eps": ("rms_norm_eps",)}
_EXPERT_SETTINGS = {
    "expert_count": ("num_local_experts", "num_experts"),
    "expert_used_count": ("num_experts_per_tok", "experts_per_token"),
}
_DEFAULTS: dict[str, Any] = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False}
_ALLOWED_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "pruned_heads": (None, {}),
    "quantization_config": (None,),
}
_ALLOWED_BIASES = {"attention_bias": (False, True), "mlp_bias": (False, True)}
_GEMMA_ALLOWED_VALUES = {
    "hidden_act": ("gelu_pytorch_tanh", "gelu"),  # Gemma 1 computed the tanh approximation for "gelu" too
    "hidden_activation": (None, "gelu_pytorch_tanh"),
    "use_bidirectional_attention": (None, False),
}
_ROPE_SCALINGS = ("default", "linear", "yarn")
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}


@dataclass(frozen=True)
class GGUFModelType:
    """Transformers model type that llama.cpp supports.

    `parse_gguf_settings` adds `allowed_values`, `defaults`, and `count_settings` to the tables
    `_ALLOWED_VALUES`, `_DEFAULTS`, and `_COUNT_SETTINGS`, which apply to all model types. The
    entries of the model type have priority.

    Attributes:
        arch: Name of the architecture in llama.cpp.
        allowed_values: Allowed values of settings, keyed by the name of the setting. With these
            values, both libraries compute the same outputs. If a setting is missing in the config,
            its value in `defaults` is assumed, or else the first allowed value.
        defaults: Transformers' default values for settings that are missing in the config.
        count_settings: Integer settings to write, in the form `{key: names}`.
            `GGUFWriter.add_<key>` is the method that writes the setting, and `names` are the
            possible names of the setting in the config. For example, `{"expert_count":
            ("num_local_experts", "num_experts")}`.
        number_settings: Settings to write whose values are positive numbers, in the same form as
            `count_settings`.
        rope_scalings: Types of rotary embedding scaling that llama.cpp supports. Empty if the model
            has no rotary embedding.
        allows_partial_rope: Whether the rotary embedding may rotate only a part of each head.
        window_period: Period of the layers with full attention, for example 2 if every second layer
            has full attention and the other layers have a sliding window. 0 if there are no
            windows.
        local_rope_base: Base of the rotary embedding in layers with a sliding window. None if all
            layers have the same base.
        no_rope_period: Period of the layers without a rotary embedding. 0 if all layers have a
            rotary embedding.
        num_layers_with_hidden_scale: Number of layers that makes llama.cpp scale the queries by
            `hidden_size / num_heads` instead of the head size, such as 46 for Gemma 2 27B.
            llama.cpp recognizes this model size by its number of layers. None if the model has no
            `query_pre_attn_scalar`.
        heads_span_hidden_size: Whether the total size of all heads must equal the hidden size.
        interleaves_rope: Whether llama.cpp's rotary embedding pairs adjacent rows of the query and
            key projections, which requires a permutation of the rows.
        norms_add_one: Whether norms scale by 1 + weight.
        has_transposed_linear: Whether the weights of linear layers have the shape (in, out).
        writes_tied_head: Whether the output matrix is written even if it is tied to the embedding.
    """

    arch: str
    allowed_values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    count_settings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    number_settings: Mapping[str, tuple[str, ...]] = field(default_factory=_RMS_NORM_SETTINGS.copy)
    rope_scalings: tuple[str, ...] = _ROPE_SCALINGS
    allows_partial_rope: bool = False
    window_period: int = 0
    local_rope_base: float | None = None
    no_rope_period: int = 0
    num_layers_with_hidden_scale: int | None = None
    heads_span_hidden_size: bool = False
    interleaves_rope: bool = False
    norms_add_one: bool = False
    has_transposed_linear: bool = False
    writes_tied_head: bool = False


MODEL_TYPES = {
    "llama": GGUFModelType(
        "llama", _ALLOWED_BIASES, interleaves_rope=True, rope_scalings=(*_ROPE_SCALINGS, "llama3")
    ),
    "mistral": GGUFModelType(
        "llama",
        defaults={"sliding_window": 4096},
        interleaves_rope=True,
        rope_scalings=(*_ROPE_SCALINGS, "llama3"),
    ),
    "mixtral": GGUFModelType(
        "llama",
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6},
        count_settings=_EXPERT_SETTINGS,
        interleaves_rope=True,
        rope_scalings=(*_ROPE_SCALINGS, "llama3"),
    ),
    "granite": GGUFModelType(
        "granite",
        _ALLOWED_BIASES,
        number_settings={
            **_RMS_NORM_SETTINGS,
            "attention_scale": ("attention_multiplier",),
            "embedding_scale": ("embedding_multiplier",),
            "residual_scale": ("residual_multiplier",),
            "logit_scale": ("logits_scaling",),
        },
        defaults=dict.fromkeys(
            ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"), 1.0
        ),
        interleaves_rope=True,
        rope_scalings=(*_ROPE_SCALINGS, "llama3"),
    ),
    "smollm3": GGUFModelType(
        "smollm3",
        defaults={"rope_theta": 2e6, "tie_word_embeddings": True, "use_sliding_window": False},
        interleaves_rope=True,
        no_rope_period=4,
    ),
    "qwen2": GGUFModelType(
        "qwen2",
        {"attention_bias": (True,), "use_mrope": (None, False)},
        {"use_sliding_window": False},
    ),
    "qwen3": GGUFModelType("qwen3", defaults={"use_sliding_window": False}),
    "qwen3_moe": GGUFModelType(
        "qwen3moe",
        {"norm_topk_prob": (True,), "decoder_sparse_step": (1,), "mlp_only_layers": (None, [])},
        {"norm_topk_prob": False, "use_sliding_window": False},
        {**_EXPERT_SETTINGS, "expert_feed_forward_length": ("moe_intermediate_size",)},
    ),
    "gemma": GGUFModelType("gemma", _GEMMA_ALLOWED_VALUES, {"tie_word_embeddings": True}, norms_add_one=True),
    "gemma2": GGUFModelType(
        "gemma2",
        _GEMMA_ALLOWED_VALUES,
        {
            "tie_word_embeddings": True,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
        },
        number_settings={
            **_RMS_NORM_SETTINGS,
            "attn_logit_softcapping": ("attn_logit_softcapping",),
            "final_logit_softcapping": ("final_logit_softcapping",),
        },
        rope_scalings=("default", "linear"),
        window_period=2,
        num_layers_with_hidden_scale=46,
        norms_add_one=True,
    ),
    "gemma3_text": GGUFModelType(
        "gemma3",
        {**_GEMMA_ALLOWED_VALUES, "attn_logit_softcapping": (None,), "final_logit_softcapping": (None,)},
        {
            "tie_word_embeddings": True,
            "rope_theta": 1e6,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
        },
        rope_scalings=("default", "linear"),
        window_period=6,
        local_rope_base=10000.0,
        num_layers_with_hidden_scale=62,
        norms_add_one=True,
    ),
    "phi3": GGUFModelType(
        "phi3",
        {"lm_head_bias": (None, False), "full_attn_mod": (None, 1), "interpolate_factor": (None, 1)},
        {"rms_norm_eps": 1e-5},
        rope_scalings=("default",),  # in this model type, "yarn" is another name of longrope
        allows_partial_rope=True,
        heads_span_hidden_size=True,
    ),
    "gpt2": GGUFModelType(
        "gpt2",
        {
            "attention_bias": (True,),
            "mlp_bias": (True,),
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
        },
        {"tie_word_embeddings": True, "layer_norm_epsilon": 1e-5},
        number_settings={"layer_norm_eps": ("layer_norm_epsilon",)},
        rope_scalings=(),
        has_transposed_linear=True,
    ),
    "gpt_oss": GGUFModelType(
        "gpt-oss",
        {"attention_bias": (True,), "mlp_bias": (True,), "swiglu_limit": (7.0,), "swiglu_alpha": (1.702,)},
        {
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "sliding_window": 128,
            "rope_parameters": _GPT_OSS_ROPE,
        },
        {**_EXPERT_SETTINGS, "expert_feed_forward_length": ("intermediate_size",)},
        window_period=2,
        writes_tied_head=True,
    ),
    "glm4": GGUFModelType(
        "glm4",
        _ALLOWED_BIASES,
        {"rms_norm_eps": 1.5625e-07, "attention_bias": True, "partial_rotary_factor": 0.5},
        allows_partial_rope=True,
        heads_span_hidden_size=True,
    ),
    "cohere2": GGUFModelType(
        "cohere2",
        {
            "use_parallel_block": (None, True),
            "use_gated_activation": (None, True),
            "use_embedding_sharing": (None, True),
            "position_embedding_type": (None, "rope_gptj"),
            "order_of_interleaved_layers": (None, "local_attn_first"),
            "layer_switch": (None, 4),
            "rotary_pct": (None, 1.0),
        },
        {"layer_norm_eps": 1e-5, "tie_word_embeddings": True, "logit_scale": 0.0625, "sliding_window": 4096},
        number_settings={"layer_norm_eps": ("layer_norm_eps",), "logit_scale": ("logit_scale",)},
        window_period=4,
        heads_span_hidden_size=True,
    ),
    "olmo2": GGUFModelType(
        "olmo2", defaults={"rms_norm_eps": 1e-5}, heads_span_hidden_size=True, writes_tied_head=True
    ),
}


@dataclass
class GGUFSettings:
    """Settings of a `config.json`, converted for llama.cpp.

    Attributes:
        values: Values to write, keyed by the `<key>` in `GGUFWriter.add_<key>`.
        ties_embeddings: Whether the output matrix is tied to the embedding.
        biased_modules: Names of the modules whose linear layers have biases. The set contains
            `self_attn`, `mlp`, both or neither.
        query_scale: Factor for the query weights, or for the weights of the query norm if there is
            one.
        rope_factors: Divisor of each frequency of the rotary embedding. Empty if all divisors are
            1.
    """

    values: dict[str, Any]
    ties_embeddings: bool
    biased_modules: set[str]
    query_scale: float = 1.0
    rope_factors: list[float] = field(default_factory=list)


class _ConfigTable:
    """Table from a `config.json`, which records the settings that have been used.

    Each `take_` method returns a setting and marks it as used. `check_all_settings_taken` rejects
    settings that have never been used, because they are unknown.

    Args:
        values: The table, as parsed from JSON.
        defaults: Default values of settings that the table does not contain.
        location: Prefix of error messages.

    Raises:
        CheckpointError: If `values` is not a dict.
    """

    def __init__(self, values: Any, defaults: Mapping[str, Any], location: str) -> None:
        if not isinstance(values, dict):
            raise CheckpointError(
                f"{location[:-1]}={_format_short_json(values)}, but the value must be a JSON object; correct "
                "config.json"
            )
        self.values, self.defaults, self.location = values, defaults, location
        self._untaken_names = set(values)

    def take_setting(self, *names: str) -> Any:
        """Return the value of a setting, and mark all of its names as used.

        Args:
            names: Name of the setting, followed by its alternative names.

        Returns:
            The first value that is not null. None if the table contains the setting, but only as
            null. If the table does not contain the setting, the result is the default of the first
            name, or None if this name has no default.

        Raises:
            CheckpointError: If two names have different values.
        """
        values = {name: self.values[name] for name in names if self.values.get(name) is not None}
        first_name = next(iter(values), names[0])
        for name, value in values.items():
            if not _equals_with_bool(value, values[first_name]):
                self.raise_unsupported(
                    first_name,
                    f"{name}, another name of this setting, has the value {_format_short_json(value)}; "
                    "remove the key with the wrong value from config.json",
                )
        present_names = self._untaken_names.intersection(names)
        self._untaken_names -= present_names
        if values:
            return values[first_name]
        return None if present_names else self.defaults.get(names[0])

    def take_positive_number(self, *names: str, default: float | None = None, is_count: bool = False) -> Any:
        """Return a setting that is a positive number, and mark it as used.

        Args:
            names: Name of the setting, followed by its other names.
            default: Value if the setting is null, or if it is missing and the table has no default
                for it.
            is_count: Whether the number must be an integer.

        Raises:
            CheckpointError: If the value is not a positive number below 3e38, or if the setting is
                missing or null and has no default. If `is_count` is True, the value must be an
                integer below 2^24.
        """
        number: Any = self.take_setting(*names)
        number = default if number is None else number
        if (
            type(number) not in ((int,) if is_count else (int, float))
            or not 0 < number < _MAX_NUMBERS[is_count]
        ):
            kind = f"a positive integer below {_MAX_NUMBERS[True]:,}" if is_count else "a positive number"
            self.raise_unsupported(
                names[0],
                f"--to gguf needs {kind}; correct {names[0]} in config.json, or convert without --to gguf",
            )
        return number

    def take_allowed_setting(self, name: str, *allowed: Any) -> Any:
        """Return a setting that is only allowed to have certain values, and mark it as used.

        Args:
            name: Name of the setting.
            allowed: Allowed values. The first value is returned if the setting is missing in the
                config and has no value in `defaults`.

        Raises:
            CheckpointError: If the setting has a different value. Null is only allowed if `allowed`
                contains None.
        """
        is_set = name in self.values or name in self.defaults
        value = self.take_setting(name) if is_set else allowed[0]
        if not any(_equals_with_bool(value, choice) for choice in allowed):
            self.raise_unsupported(
                name,
                f"llama.cpp supports only the value {' or '.join(map(_format_short_json, allowed))}; convert "
                "without --to gguf",
            )
        return value

    def take_nested_table(self, *names: str, defaults: Mapping[str, Any]) -> _ConfigTable:
        """Return a nested table, and mark it as used.

        A missing or empty table is replaced by its default value in this (outer) table. Without
        such a default, the result is an empty table.

        Args:
            names: Name of the nested table, followed by its alternative names. The first name with
                a value is used.
            defaults: Default values of the settings inside the nested table, keyed by name.

        Raises:
            CheckpointError: If two names have different values, or if the value is not a JSON
                object.
        """
        name = next((name for name in names if self.values.get(name)), names[0])
        return _ConfigTable(
            self.take_setting(*names) or self.defaults.get(name, {}), defaults, f"{self.location}{name}."
        )

    def raise_unsupported(self, name: str, reason: str) -> NoReturn:
        """Raise an error that explains why the value of a setting is not supported.

        Args:
            name: Name of the setting.
            reason: Reason and remedy, separated by a semicolon. For example, "llama.cpp supports
                only the value 1; convert without --to gguf".

        Raises:
            CheckpointError: Always.
        """
        value = self.values.get(name, self.defaults.get(name))
        raise CheckpointError(
            f"{self.location}{name[:_MAX_SHOWN_LENGTH]}={_format_short_json(value)}, but {reason}"
        )

    def check_all_settings_taken(self, ignored: Container[str] = ()) -> None:
        """Check that all settings have been used.

        Args:
            ignored: Names of settings to ignore. Settings that are null, false, or empty are also ignored.

        Raises:
            CheckpointError: If a setting has not been used.
        """
        for name in sorted(self._untaken_names):
            if name not in ignored and not is_unset(self.values.get(name)):
                self.raise_unsupported(
                    name,
                    "--to gguf does not support this key; remove the key if it does not change the logits, "
                    "or convert without --to gguf",
                )


def _equals_with_bool(first: Any, second: Any) -> bool:
    """Return whether two values are equal. A bool is not equal to a number."""
    return isinstance(first, bool) == isinstance(second, bool) and bool(first == second)


def _format_short_json(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _MAX_SHOWN_LENGTH else text[:_MAX_SHOWN_LENGTH] + "..."


def parse_gguf_settings(
    config: Mapping[str, Any], model_type: GGUFModelType, location: AnyPath
) -> GGUFSettings:
    """Convert a `config.json` to the settings that llama.cpp requires.

    Args:
        config: Content of the `config.json`.
        model_type: Description of the model type.
        location: Path of the checkpoint, used in error messages.

    Returns:
        The settings.

    Raises:
        CheckpointError: If a setting is missing, invalid, or unknown, or if llama.cpp does not support
            its value.
    """
    config = remove_earlier_keys(config)
    table = _ConfigTable(config, {**_DEFAULTS, **model_type.defaults}, f"{location}: config.json has ")
    checked_values = {
        name: table.take_allowed_setting(name, *allowed)
        for name, allowed in {**_ALLOWED_VALUES, **model_type.allowed_values}.items()
    }
    values = {
        key: table.take_positive_number(*names, is_count=True)
        for key, names in {**_COUNT_SETTINGS, **model_type.count_settings}.items()
    }
    values |= {key: table.take_positive_number(*names) for key, names in model_type.number_settings.items()}
    num_layers, hidden_size, num_heads = (
        values[key] for key in ("block_count", "embedding_length", "head_count")
    )
    default_feed_forward = 4 * hidden_size if model_type.has_transposed_linear else None
    values["feed_forward_length"] = table.take_positive_number(
        "intermediate_size", "n_inner", default=default_feed_forward, is_count=True
    )
    if values.get("expert_used_count", 0) > values.get("expert_count", 0):
        table.raise_unsupported(
            "num_experts_per_tok",
            (
                f"the number of experts is only {values.get('expert_count', 0)}; correct the wrong value in "
                "config.json"
            ),
        )
    bias_settings = {"self_attn": "attention_bias", "mlp": "mlp_bias"}
    biases = {module for module, name in bias_settings.items() if checked_values[name]}
    settings = GGUFSettings(values, table.take_setting("tie_word_embeddings") is True, biases)
    if model_type.rope_scalings:
        values["head_count_kv"] = table.take_positive_number(
            "num_key_value_heads", default=num_heads, is_count=True
        )
        head_size = table.take_positive_number("head_dim", default=hidden_size // num_heads, is_count=True)
        values["key_length"] = values["value_length"] = head_size
        if model_type.heads_span_hidden_size and head_size * num_heads != hidden_size:
            table.raise_unsupported(
                "head_dim",
                (
                    f"llama.cpp's architecture {model_type.arch} needs hidden_size / num_attention_heads "
                    f"({hidden_size} / {num_heads}); convert without --to gguf"
                ),
            )
        _add_rope_settings(table, model_type, settings)
        _add_window_settings(table, model_type, settings)
        if model_type.num_layers_with_hidden_scale is not None:
            scaled_by = (
                hidden_size // num_heads
                if num_layers == model_type.num_layers_with_hidden_scale
                else head_size
            )
            settings.query_scale = sqrt(scaled_by / table.take_positive_number("query_pre_attn_scalar"))
    table.check_all_settings_taken(_SETTINGS_WITHOUT_EFFECT.split())
    return settings


def _add_window_settings(table: _ConfigTable, model_type: GGUFModelType, settings: GGUFSettings) -> None:
    """Check the sliding windows of a config, and add their size to `settings`.

    llama.cpp determines the layers with sliding windows, and the layers with rotary embeddings, by
    its own rules for each architecture. The config must specify the same layers. The window size is
    only added if llama.cpp's architecture has sliding windows.

    Args:
        table: Config, whose settings are marked as used.
        model_type: Model type of the config.
        settings: Settings for llama.cpp. Modified in place.

    Raises:
        CheckpointError: If llama.cpp would use different windows, or rotary embeddings in different
            layers.
    """
    layer_numbers, window_period = range(1, settings.values["block_count"] + 1), model_type.window_period or 1
    has_layer_types = table.values.get("layer_types") is not None
    uses_windows = table.take_setting("use_sliding_window") is not False and not has_layer_types
    kinds = ["sliding_attention" if number % window_period else "full_attention" for number in layer_numbers]
    table.take_allowed_setting("layer_types", None, kinds)
    for name in ("sliding_window_pattern", "_sliding_window_pattern"):
        table.take_allowed_setting(name, None, window_period)
    if model_type.no_rope_period:
        table.take_allowed_setting("no_rope_layer_interval", None, model_type.no_rope_period)
        table.take_allowed_setting(
            "no_rope_layers", None, [int(number % model_type.no_rope_period > 0) for number in layer_numbers]
        )
    context_length = settings.values["context_length"]
    window_size = table.take_positive_number(
        "sliding_window", default=None if model_type.window_period else context_length, is_count=True
    )
    if model_type.window_period:
        settings.values["sliding_window"] = window_size
    elif uses_windows and window_size < context_length:
        table.raise_unsupported(
            "sliding_window",
            f"llama.cpp's architecture {model_type.arch} does not support sliding windows; convert without "
            "--to gguf, or set sliding_window to null in config.json, which changes the results beyond "
            f"{window_size} tokens",
        )


def _add_rope_settings(table: _ConfigTable, model_type: GGUFModelType, settings: GGUFSettings) -> None:
    """Add the settings of the rotary embedding to `settings`.

    The added settings are the base, the number of rotated dimensions per head, and the scaling. If
    a config has separate rotary settings for layers with full attention and layers with a sliding
    window, only the settings for full attention are added. The settings for the sliding window are
    checked, because llama.cpp uses fixed values for these layers.

    `settings` is modified in place, and the rotary settings of `table` are marked as used.

    Raises:
        CheckpointError: If llama.cpp would compute a different rotary embedding. For GPT-OSS, the
            small difference that `truncate=False` causes is accepted.
    """
    values, original_length_key = settings.values, "original_max_position_embeddings"
    partial_factor, original_length = (
        table.take_setting("partial_rotary_factor"),
        table.take_setting(original_length_key, "initial_context_length"),
    )
    absent = {
        "rope_theta": table.take_setting("rope_theta"),
        "partial_rotary_factor": 1.0 if partial_factor is None else partial_factor,
        original_length_key: values["context_length"] if original_length is None else original_length,
    }
    table.take_allowed_setting("rope_local_base_freq", None, model_type.local_rope_base)
    rope = table.take_nested_table("rope_parameters", "rope_scaling", defaults=absent)
    if model_type.local_rope_base and "full_attention" in rope.values:
        local = rope.take_nested_table("sliding_attention", defaults={})
        local.take_allowed_setting("rope_type", "default")
        local.take_allowed_setting("rope_theta", model_type.local_rope_base)
        local.check_all_settings_taken()
        rope_by_layer_type, rope = rope, rope.take_nested_table("full_attention", defaults=absent)
        rope_by_layer_type.check_all_settings_taken()
    if original_length not in (None, rope.values.get(original_length_key, original_length)):
        table.raise_unsupported(
            original_length_key,
            (
                f"the rotary settings in config.json ({_format_short_json(rope.values)}) have a different "
                f"{original_length_key}; remove the wrong value"
            ),
        )
    rope_type = rope.take_setting("rope_type", "type") or "default"
    if rope_type not in model_type.rope_scalings:
        rope.raise_unsupported(
            "rope_type",
            f"llama.cpp's architecture {model_type.arch} supports only the RoPE scaling types "
            f"{', '.join(model_type.rope_scalings)}; convert without --to gguf",
        )
    base, head_size = rope.take_positive_number("rope_theta"), values["key_length"]
    rotated_size = head_size * rope.take_positive_number("partial_rotary_factor")
    if (
        rotated_size % 2
        or rotated_size > head_size
        or (rotated_size < head_size and not model_type.allows_partial_rope)
    ):
        rope.raise_unsupported(
            "partial_rotary_factor",
            f"llama.cpp's architecture {model_type.arch} cannot apply the rotary embedding to "
            f"{rotated_size:g} of the {head_size} elements of a head; convert without --to gguf",
        )
    values |= {"rope_freq_base": float(base), "rope_dimension_count": int(rotated_size)}
    if rope_type in ("linear", "yarn"):
        values |= {"rope_scaling_type": rope_type, "rope_scaling_factor": rope.take_positive_number("factor")}
    if rope_type == "yarn":
        values["rope_scaling_orig_ctx_len"] = rope.take_positive_number(original_length_key, is_count=True)
        rope.take_allowed_setting("beta_fast", None, 32)
        rope.take_allowed_setting("beta_slow", None, 1)
        # llama.cpp always rounds the bounds of YaRN's ramp, although the config of GPT-OSS disables rounding.
        # Accept GPT-OSS, because the converter of llama.cpp also does and the frequencies hardly differ.
        rope.take_allowed_setting("truncate", *((True, False) if model_type.arch == "gpt-oss" else (True,)))
    elif rope_type == "llama3":
        settings.rope_factors = _compute_llama3_factors(rope, base, rotated_size)
    rope.check_all_settings_taken((original_length_key, "max_position_embeddings"))


def _compute_llama3_factors(rope: _ConfigTable, base: float, rotated_size: float) -> list[float]:
    """Compute the divisor of each rotary frequency for the scaling type `llama3`.

    Args:
        rope: Rotary settings of the config. The settings of `llama3` scaling are marked as used.
        base: Base of the rotary embedding (theta).
        rotated_size: Number of rotated elements per head.

    Returns:
        The divisors of the `rotated_size / 2` frequencies, from the highest frequency to the
        lowest.

    Raises:
        CheckpointError: If a setting is missing or not a positive number, or if `high_freq_factor`
            is not above `low_freq_factor`.
    """
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    factor, low, high, old = map(rope.take_positive_number, names)
    if not low < high:
        rope.raise_unsupported(
            "high_freq_factor",
            f"the value must be greater than low_freq_factor, which is {low}; correct the wrong value in "
            "config.json",
        )
    rotations = [old / (2 * pi * base ** (i / rotated_size)) for i in range(0, int(rotated_size), 2)]
    smooth_factors = [min(max((each - low) / (high - low), 0), 1) for each in rotations]
    return [1 / ((1 - each) / factor + each) for each in smooth_factors]
