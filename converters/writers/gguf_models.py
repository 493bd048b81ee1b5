"""Which models llama.cpp computes as transformers does, and with which settings of `config.json`.

Each setting is written to the GGUF file, may have certain values only, or has no effect on what is computed.
Any other is refused by its name, so that one which nobody has thought of cannot pass.

Source: transformers' `configuration_*.py`; https://github.com/ggml-org/llama.cpp, src/models.
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

    from portable.converters.storage.path_or_url import Place

_LARGEST = (3e38, 1 << 24)  # of a float32, about, and of a count
_SHOWN = 60

# Of training, generation, the tokenizer, or how the program runs.
_NO_EFFECT = """
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
# What `GGUFWriter.add_*` writes: a setting and its other names.
_COUNTS = {
    "block_count": ("num_hidden_layers", "n_layer"),
    "context_length": ("max_position_embeddings", "n_positions"),
    "embedding_length": ("hidden_size", "n_embd"),
    "head_count": ("num_attention_heads", "n_head"),
    "vocab_size": ("vocab_size",),
}
_RMS = {"layer_norm_rms_eps": ("rms_norm_eps",)}
_EXPERTS = {
    "expert_count": ("num_local_experts", "num_experts"),
    "expert_used_count": ("num_experts_per_tok", "experts_per_token"),
}
_ABSENT: dict[str, Any] = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False}
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "pruned_heads": (None, {}),
    "quantization_config": (None,),
}
_WITH_BIASES = {"attention_bias": (False, True), "mlp_bias": (False, True)}
_GEMMA = {
    "hidden_act": ("gelu_pytorch_tanh", "gelu"),  # Gemma 1's "gelu" was the tanh's, too
    "hidden_activation": (None, "gelu_pytorch_tanh"),
    "use_bidirectional_attention": (None, False),
}
_SCALINGS = ("default", "linear", "yarn")
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}


@dataclass(frozen=True)
class Model:
    """A model type of transformers, as llama.cpp has it.

    Attributes:
        arch: llama.cpp's name.
        only: setting -> the values with which both compute the same; the first where the setting is absent.
        absent: setting -> its value where it is absent, which is transformers' default.
        counts: what `GGUFWriter.add_*` writes -> a count and its other names.
        numbers: likewise, positive numbers.
        scalings: those of the rotary embedding; none where there is no rotary embedding.
        partial: whether the rotary embedding may leave out a part of each head.
        window: every `window`-th layer attends to everything and the others to a window; 0: no windows.
        local_base: of the rotary embedding of layers with a window, where it differs.
        no_rope: every `no_rope`-th layer has no rotary embedding.
        scalar: number of layers with which llama.cpp scales queries by hidden_size / heads, not by the
            size of a head; None where there is no `query_pre_attn_scalar`.
        square: whether the heads together must be as wide as the model.
        pairs: whether the rotary embedding pairs adjacent rows of the query and key projections.
        plus_one: whether norms scale by 1 + weight.
        inputs_first: whether the linear layers hold (in, out) matrices.
        writes_tied_head: whether the output matrix is written where it is tied, too.
    """

    arch: str
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    absent: Mapping[str, Any] = field(default_factory=dict)
    counts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    numbers: Mapping[str, tuple[str, ...]] = field(default_factory=_RMS.copy)
    scalings: tuple[str, ...] = _SCALINGS
    partial: bool = False
    window: int = 0
    local_base: float | None = None
    no_rope: int = 0
    scalar: int | None = None
    square: bool = False
    pairs: bool = False
    plus_one: bool = False
    inputs_first: bool = False
    writes_tied_head: bool = False


MODELS = {
    "llama": Model("llama", _WITH_BIASES, pairs=True, scalings=(*_SCALINGS, "llama3")),
    "mistral": Model("llama", absent={"sliding_window": 4096}, pairs=True, scalings=(*_SCALINGS, "llama3")),
    "mixtral": Model(
        "llama",
        absent={"rms_norm_eps": 1e-5, "rope_theta": 1e6},
        counts=_EXPERTS,
        pairs=True,
        scalings=(*_SCALINGS, "llama3"),
    ),
    "granite": Model(
        "granite",
        _WITH_BIASES,
        numbers={
            **_RMS,
            "attention_scale": ("attention_multiplier",),
            "embedding_scale": ("embedding_multiplier",),
            "residual_scale": ("residual_multiplier",),
            "logit_scale": ("logits_scaling",),
        },
        absent=dict.fromkeys(
            ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"), 1.0
        ),
        pairs=True,
        scalings=(*_SCALINGS, "llama3"),
    ),
    "smollm3": Model(
        "smollm3",
        absent={"rope_theta": 2e6, "tie_word_embeddings": True, "use_sliding_window": False},
        pairs=True,
        no_rope=4,
    ),
    "qwen2": Model(
        "qwen2",
        {"attention_bias": (True,), "use_mrope": (None, False)},
        {"use_sliding_window": False},
    ),
    "qwen3": Model("qwen3", absent={"use_sliding_window": False}),
    "qwen3_moe": Model(
        "qwen3moe",
        {"norm_topk_prob": (True,), "decoder_sparse_step": (1,), "mlp_only_layers": (None, [])},
        {"norm_topk_prob": False, "use_sliding_window": False},
        {**_EXPERTS, "expert_feed_forward_length": ("moe_intermediate_size",)},
    ),
    "gemma": Model("gemma", _GEMMA, {"tie_word_embeddings": True}, plus_one=True),
    "gemma2": Model(
        "gemma2",
        _GEMMA,
        {
            "tie_word_embeddings": True,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
        },
        numbers={
            **_RMS,
            "attn_logit_softcapping": ("attn_logit_softcapping",),
            "final_logit_softcapping": ("final_logit_softcapping",),
        },
        scalings=("default", "linear"),
        window=2,
        scalar=46,
        plus_one=True,
    ),
    "gemma3_text": Model(
        "gemma3",
        {**_GEMMA, "attn_logit_softcapping": (None,), "final_logit_softcapping": (None,)},
        {
            "tie_word_embeddings": True,
            "rope_theta": 1e6,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
        },
        scalings=("default", "linear"),
        window=6,
        local_base=10000.0,
        scalar=62,
        plus_one=True,
    ),
    "phi3": Model(
        "phi3",
        {"lm_head_bias": (None, False), "full_attn_mod": (None, 1), "interpolate_factor": (None, 1)},
        {"rms_norm_eps": 1e-5},
        scalings=("default",),  # "yarn" is another name of longrope here
        partial=True,
        square=True,
    ),
    "gpt2": Model(
        "gpt2",
        {
            "attention_bias": (True,),
            "mlp_bias": (True,),
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
        },
        {"tie_word_embeddings": True, "layer_norm_epsilon": 1e-5},
        numbers={"layer_norm_eps": ("layer_norm_epsilon",)},
        scalings=(),
        inputs_first=True,
    ),
    "gpt_oss": Model(
        "gpt-oss",
        {"attention_bias": (True,), "mlp_bias": (True,), "swiglu_limit": (7.0,), "swiglu_alpha": (1.702,)},
        {
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "sliding_window": 128,
            "rope_parameters": _GPT_OSS_ROPE,
        },
        {**_EXPERTS, "expert_feed_forward_length": ("intermediate_size",)},
        window=2,
        writes_tied_head=True,
    ),
    "glm4": Model("glm4", _WITH_BIASES, {"rms_norm_eps": 1.5625e-07}, partial=True, square=True),
    "cohere2": Model(
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
        numbers={"layer_norm_eps": ("layer_norm_eps",), "logit_scale": ("logit_scale",)},
        window=4,
        square=True,
    ),
    "olmo2": Model("olmo2", absent={"rms_norm_eps": 1e-5}, square=True, writes_tied_head=True),
}


@dataclass
class Settings:
    """What a `config.json` says, in llama.cpp's terms.

    Attributes:
        values: what `GGUFWriter.add_*` writes -> the value.
        tied: whether the output matrix is the embedding.
        biases: the modules whose linear layers have biases.
        query_scale: what queries are multiplied by beforehand.
        factors: what each frequency of the rotary embedding is divided by, if not by 1.
    """

    values: dict[str, Any]
    tied: bool
    biases: set[str]
    query_scale: float = 1.0
    factors: list[float] = field(default_factory=list)


class _ConfigTable:
    """A table of `config.json`; each of its settings is taken by what understands it."""

    def __init__(self, values: Any, absent: Mapping[str, Any], location: str) -> None:
        if not isinstance(values, dict):
            raise CheckpointError(f"{location[:-1]} {_format_value(values)}: it must be a table")
        self.values, self.absent, self.where = values, absent, location
        self._left = set(values)

    def take_setting(self, *names: str) -> Any:
        """The value of a setting that has several names, or its default."""
        values = [self.values[name] for name in names if self.values.get(name) is not None]
        if any(not _is_same(value, values[0]) for value in values):
            self.refuse(names[0], f"{' or '.join(names[1:])} differs")
        there = self._left.intersection(names)
        self._left -= there
        return values[0] if values else None if there else self.absent.get(names[0])

    def take_number(self, *names: str, default: float | None = None, whole: bool = False) -> Any:
        """A positive number, or a count; `default` for null."""
        number: Any = self.take_setting(*names)
        number = default if number is None else number
        if type(number) not in ((int,) if whole else (int, float)) or not 0 < number < _LARGEST[whole]:
            self.refuse(names[0], "it must be a count" if whole else "it must be a positive number")
        return number

    def take_allowed(self, name: str, *allowed: Any) -> Any:
        """A setting with one of these values; the first where it is absent and has no other default."""
        is_set = name in self.values or name in self.absent
        value = self.take_setting(name) if is_set else allowed[0]
        if not any(_is_same(value, choice) for choice in allowed):
            self.refuse(name, f"llama.cpp computes as with {' or '.join(map(_format_value, allowed))} only")
        return value

    def take_table(self, *names: str, absent: Mapping[str, Any]) -> _ConfigTable:
        """A table in this one; empty where there is none."""
        name = next((name for name in names if self.values.get(name)), names[0])
        return _ConfigTable(
            self.take_setting(*names) or self.absent.get(name, {}), absent, f"{self.where}{name}."
        )

    def refuse(self, name: str, why: str) -> NoReturn:
        value = self.values.get(name, self.absent.get(name))
        raise CheckpointError(f"{self.where}{name[:_SHOWN]} {_format_value(value)}: {why}")

    def finish(self, ignored: Container[str] = ()) -> None:
        """Refuse what nothing has taken."""
        for name in sorted(self._left):
            if name not in ignored and not is_unset(self.values.get(name)):
                self.refuse(name, "not known to --to gguf; remove it if it changes no logits")


def _is_same(left: Any, right: Any) -> bool:
    return isinstance(left, bool) == isinstance(right, bool) and bool(left == right)


def _format_value(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def read_settings(config: Mapping[str, Any], model: Model, location: Place) -> Settings:
    """What llama.cpp builds the model from.

    Raises:
        CheckpointError: a setting is missing, impossible, unknown, or not what llama.cpp computes.
    """
    config = remove_earlier_keys(config)
    table = _ConfigTable(config, {**_ABSENT, **model.absent}, f"{location}: config.json has ")
    only = {name: table.take_allowed(name, *allowed) for name, allowed in {**_ONLY, **model.only}.items()}
    values = {
        key: table.take_number(*names, whole=True) for key, names in {**_COUNTS, **model.counts}.items()
    }
    values |= {key: table.take_number(*names) for key, names in model.numbers.items()}
    layers, width, heads = (values[key] for key in ("block_count", "embedding_length", "head_count"))
    wide = 4 * width if model.inputs_first else None
    values["feed_forward_length"] = table.take_number(
        "intermediate_size", "n_inner", default=wide, whole=True
    )
    if values.get("expert_used_count", 0) > values.get("expert_count", 0):
        table.refuse("num_experts_per_tok", "there are fewer experts")
    biased = {"self_attn": "attention_bias", "mlp": "mlp_bias"}
    biases = {module for module, name in biased.items() if only[name]}
    settings = Settings(values, table.take_setting("tie_word_embeddings") is True, biases)
    if model.scalings:
        values["head_count_kv"] = table.take_number("num_key_value_heads", default=heads, whole=True)
        head = table.take_number("head_dim", default=width // heads, whole=True)
        values["key_length"] = values["value_length"] = head
        if model.square and head * heads != width:
            table.refuse("head_dim", f"llama.cpp's {model.arch} needs {width} / {heads}")
        _add_rope_settings(table, model, settings)
        _add_layer_settings(table, model, settings)
        if model.scalar is not None:
            scaled_by = width // heads if layers == model.scalar else head
            settings.query_scale = sqrt(scaled_by / table.take_number("query_pre_attn_scalar"))
    table.finish(_NO_EFFECT.split())
    return settings


def _add_layer_settings(table: _ConfigTable, model: Model, settings: Settings) -> None:
    """In which layers attention differs."""
    numbers, every = range(1, settings.values["block_count"] + 1), model.window or 1
    windows = table.take_setting("use_sliding_window") is not False and "layer_types" not in table.values
    kinds = ["sliding_attention" if number % every else "full_attention" for number in numbers]
    table.take_allowed("layer_types", None, kinds)
    for name in ("sliding_window_pattern", "_sliding_window_pattern"):
        table.take_allowed(name, None, every)
    if model.no_rope:
        table.take_allowed("no_rope_layer_interval", None, model.no_rope)
        table.take_allowed("no_rope_layers", None, [int(number % model.no_rope > 0) for number in numbers])
    context = settings.values["context_length"]
    size = table.take_number("sliding_window", default=None if model.window else context, whole=True)
    if model.window:
        settings.values["sliding_window"] = size
    elif windows and size < context:
        why = f"llama.cpp's {model.arch} has no windows; with null, texts of more than {size} tokens differ"
        table.refuse("sliding_window", why)


def _add_rope_settings(table: _ConfigTable, model: Model, settings: Settings) -> None:
    """The rotary embedding: of the layers that attend to everything, where there are two kinds."""
    values, old = settings.values, "original_max_position_embeddings"
    part, context = (
        table.take_setting("partial_rotary_factor"),
        table.take_setting(old, "initial_context_length"),
    )
    absent = {
        "rope_theta": table.take_setting("rope_theta"),
        "partial_rotary_factor": 1.0 if part is None else part,
        old: values["context_length"] if context is None else context,
    }
    table.take_allowed("rope_local_base_freq", None, model.local_base)
    rope = table.take_table("rope_parameters", "rope_scaling", absent=absent)
    if model.local_base and "full_attention" in rope.values:
        local = rope.take_table("sliding_attention", absent={})
        local.take_allowed("rope_type", "default")
        local.take_allowed("rope_theta", model.local_base)
        local.finish()
        both, rope = rope, rope.take_table("full_attention", absent=absent)
        both.finish()
    if context not in (None, rope.values.get(old, context)):
        table.refuse(old, f"that of {_format_value(rope.values)} differs")
    kind = rope.take_setting("rope_type", "type") or "default"
    if kind not in model.scalings:
        rope.refuse("rope_type", f"llama.cpp's {model.arch} computes {' or '.join(model.scalings)}")
    base, head = rope.take_number("rope_theta"), values["key_length"]
    size = head * rope.take_number("partial_rotary_factor")
    if size % 2 or size > head or (size < head and not model.partial):
        rope.refuse("partial_rotary_factor", f"llama.cpp's {model.arch} cannot rotate {size} of {head}")
    values |= {"rope_freq_base": float(base), "rope_dimension_count": int(size)}
    if kind in ("linear", "yarn"):
        values |= {"rope_scaling_type": kind, "rope_scaling_factor": rope.take_number("factor")}
    if kind == "yarn":
        values["rope_scaling_orig_ctx_len"] = rope.take_number(old, whole=True)
        rope.take_allowed("beta_fast", None, 32)
        rope.take_allowed("beta_slow", None, 1)
        # llama.cpp always rounds the bounds of YaRN's ramp, although the config of GPT-OSS disables rounding.
        # Accept GPT-OSS, because the converter of llama.cpp also does and the frequencies hardly differ.
        rope.take_allowed("truncate", *((True, False) if model.arch == "gpt-oss" else (True,)))
    elif kind == "llama3":
        settings.factors = _compute_llama3_factors(rope, base, size)
    rope.finish((old, "max_position_embeddings"))


def _compute_llama3_factors(rope: _ConfigTable, base: float, size: float) -> list[float]:
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    factor, low, high, old = map(rope.take_number, names)
    if not low < high:
        rope.refuse("high_freq_factor", "it must be above low_freq_factor")
    turns = [old / (2 * pi * base ** (i / size)) for i in range(0, int(size), 2)]
    smooth = [min(max((each - low) / (high - low), 0), 1) for each in turns]
    return [1 / ((1 - each) / factor + each) for each in smooth]
