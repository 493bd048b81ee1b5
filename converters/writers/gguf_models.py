"""Which models llama.cpp computes as transformers does, and with which settings of `config.json`.

Each setting is written to the GGUF file, may have certain values only, or has no effect on what is computed.
Any other is refused by its name, so that one which nobody has thought of cannot pass.

Source: transformers' `configuration_*.py`; https://github.com/ggml-org/llama.cpp, src/models.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from math import ceil, floor, log, pi, sqrt
from typing import TYPE_CHECKING, Any, NoReturn

from converters.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from converters.storage.path_or_url import Place

_LARGEST = 3e38  # of a float32, about
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
        own_head: whether the output matrix is written where it is tied, too.
    """

    arch: str
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    absent: Mapping[str, Any] = field(default_factory=dict)
    counts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    numbers: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: _RMS)
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
    own_head: bool = False


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
        absent={f"{key}_multiplier": 1.0 for key in ("attention", "embedding", "residual")}
        | {"logits_scaling": 1.0},
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
        own_head=True,
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
    "olmo2": Model("olmo2", absent={"rms_norm_eps": 1e-5}, square=True, own_head=True),
}


@dataclass
class Settings:
    """What a `config.json` says, in llama.cpp's terms.

    Attributes:
        values: what `GGUFWriter.add_*` writes -> the value.
        factors: what each frequency of the rotary embedding is divided by, if not by 1.
        query_scale: what queries are multiplied by beforehand.
        biases: the modules whose linear layers have biases.
        tied: whether the output matrix is the embedding.
    """

    values: dict[str, Any]
    factors: list[float] = field(default_factory=list)
    query_scale: float = 1.0
    biases: set[str] = field(default_factory=set)
    tied: bool = False


class _Table:
    """The settings of one table of `config.json`; each is taken by what understands it."""

    def __init__(
        self, values: Mapping[str, Any], absent: Mapping[str, Any], where: Place, path: str = ""
    ) -> None:
        self.values, self.absent, self.where, self.path = values, absent, where, path
        self.left = dict.fromkeys(values)

    def take(self, *names: str) -> Any:
        """The value of a setting that has several names, or its default."""
        found = [self.values[name] for name in names if name in self.values]
        for name in names:
            self.left.pop(name, None)
        if any(not _same(one, found[0]) for one in found):
            self.refuse(names[0], f"but {' or '.join(names[1:])} differs")
        return found[0] if found else self.absent.get(names[0])

    def number(self, *names: str, default: float | None = None) -> float:
        """A positive number; `default` for null."""
        found: Any = self.take(*names)
        found = default if found is None else found
        if found is None and names[0] not in self.values:
            raise CheckpointError(f"{self.where}: config.json has no {self.path}{names[0]}")
        if type(found) not in (int, float) or not 0 < found < _LARGEST:
            self.refuse(names[0], "it must be a positive number", found)
        return float(found)

    def count(self, *names: str, default: int | None = None) -> int:
        """A whole number from 1."""
        found = self.number(*names, default=default)
        given = next((self.values[name] for name in names if name in self.values), None)
        if type(given) is float or found >= 1 << 31:
            self.refuse(names[0], "it must be a count", given)
        return int(found)

    def only(self, name: str, allowed: Sequence[Any]) -> Any:
        """A setting that may have these values."""
        found = self.take(name)
        if found is None and name not in self.values and name not in self.absent:
            return allowed[0]
        if not any(_same(found, one) for one in allowed):
            told = " or ".join(_shown(one) for one in allowed)
            self.refuse(name, f"llama.cpp computes as with {told}", found)
        return found

    def refuse(self, name: str, why: str, value: Any = None) -> NoReturn:
        value = self.values.get(name, value)
        raise CheckpointError(f"{self.where}: config.json has {self.path}{name} {_shown(value)}: {why}")

    def finish(self, ignored: frozenset[str] = frozenset()) -> None:
        """Refuse what nothing has taken."""
        for name in self.left:
            if name not in ignored:
                self.refuse(name[:_SHOWN], "not known to --to gguf; remove it if it changes no logits")


def _same(left: Any, right: Any) -> bool:
    return isinstance(left, bool) == isinstance(right, bool) and bool(left == right)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def settings_of(config: Mapping[str, Any], model: Model, depth: int, where: Place) -> Settings:
    """What llama.cpp builds the model from.

    Args:
        depth: how many layers the tensors have.

    Raises:
        CheckpointError: a setting is missing, impossible, unknown, or not what llama.cpp computes.
    """
    table = _Table(config, {**_ABSENT, **model.absent}, where)
    if table.take("quantization_config"):
        table.refuse("quantization_config", "--to gguf takes no quantised weights; convert the original")
    only = {name: table.only(name, values) for name, values in (_ONLY | dict(model.only)).items()}
    values: dict[str, Any] = {
        key: table.count(*names) for key, names in (_COUNTS | dict(model.counts)).items()
    }
    layers, width, heads = (values[key] for key in ("block_count", "embedding_length", "head_count"))
    if layers != depth:
        table.refuse("num_hidden_layers", f"the tensors have {depth} layers", layers)
    values["feed_forward_length"] = table.count(
        "intermediate_size", "n_inner", default=4 * width if model.inputs_first else None
    )
    for key, names in model.numbers.items():
        values[key] = table.number(*names)
    if values.get("expert_used_count", 0) > values.get("expert_count", 0):
        table.refuse("num_experts_per_tok", "there are fewer experts")
    found = Settings(values, tied=table.take("tie_word_embeddings") is True)
    found.biases = {
        module for module, key in (("self_attn", "attention_bias"), ("mlp", "mlp_bias")) if only[key]
    }
    if model.scalings:
        key_heads = values["head_count_kv"] = table.count("num_key_value_heads", default=heads)
        head = table.count("head_dim", default=max(1, width // heads))
        if heads % key_heads:
            table.refuse("num_key_value_heads", f"{heads} heads cannot share them")
        if model.square and head * heads != width:
            table.refuse(
                "head_dim", f"llama.cpp's {model.arch} needs {heads} heads of {width} / {heads}", head
            )
        values["key_length"] = values["value_length"] = head
        _rotary(table, model, head, found)
        _windows(table, model, found)
        if model.scalar is not None:
            scaled_by = width // heads if layers == model.scalar else head
            found.query_scale = sqrt(scaled_by / table.number("query_pre_attn_scalar"))
    if model.no_rope:
        step = table.take("no_rope_layer_interval")
        wanted = [int((i + 1) % model.no_rope != 0) for i in range(layers)]
        if (rotated := table.take("no_rope_layers")) is None:
            if step not in (None, model.no_rope):
                table.refuse("no_rope_layer_interval", f"llama.cpp's {model.arch} has {model.no_rope}")
        elif rotated != wanted:
            table.refuse("no_rope_layers", f"llama.cpp's {model.arch} leaves out every {model.no_rope}th")
    table.finish(frozenset(_NO_EFFECT.split()))
    return found


def _windows(table: _Table, model: Model, found: Settings) -> None:
    """Which layers attend to a window."""
    layers, context = found.values["block_count"], found.values["context_length"]
    switch, types = table.take("use_sliding_window"), table.take("layer_types")
    pattern, size = (
        table.take("sliding_window_pattern", "_sliding_window_pattern"),
        table.take("sliding_window"),
    )
    every = model.window or 1
    if pattern not in (None, every):
        table.refuse("sliding_window_pattern", f"llama.cpp's {model.arch} has {every}", pattern)
    if types is not None:
        wanted = ["full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(layers)]
        if types != wanted:
            kind = (
                f"full attention in every {every}th layer"
                if model.window
                else "full attention in every layer"
            )
            table.refuse("layer_types", f"llama.cpp's {model.arch} has {kind}")
    if model.window:
        found.values["sliding_window"] = table.count("sliding_window")
    elif types is None and size is not None and switch is not False:
        size = table.count("sliding_window")
        if size < context:
            name, other = ("use_sliding_window", "false") if switch else ("sliding_window", "null")
            why = f"llama.cpp's {model.arch} has no windows; with {other}, texts longer than {size} differ"
            table.refuse(name, why)


def _rotary(table: _Table, model: Model, head: int, found: Settings) -> None:
    """The rotary embedding: of the layers that attend to everything, where there are two kinds."""
    new, old = table.take("rope_parameters"), table.take("rope_scaling")
    if new and old and new != old:
        table.refuse("rope_scaling", "but rope_parameters differs")
    name, given = ("rope_parameters", new) if new else ("rope_scaling", old)
    given, path = given or model.absent.get("rope_parameters", {}), f"{name}."
    theta, part = table.take("rope_theta"), table.take("partial_rotary_factor")
    context = table.take("original_max_position_embeddings", "initial_context_length")
    local = table.take("rope_local_base_freq")
    if not isinstance(given, dict):
        table.refuse(name, "it must be a table")
    if context is not None and given.get("original_max_position_embeddings", context) != context:
        table.refuse(
            "original_max_position_embeddings", f"but {path}original_max_position_embeddings differs"
        )
    if model.local_base is not None and given.keys() & {"full_attention", "sliding_attention"}:
        both = _Table(given, {}, table.where, path)
        given, sliding = both.take("full_attention"), both.take("sliding_attention")
        both.finish()
        for name, one in (("full_attention", given), ("sliding_attention", sliding)):
            if not isinstance(one, dict):
                both.refuse(name, "it must be a table")
        inner = _Table(sliding, {"rope_theta": model.local_base}, table.where, f"{path}sliding_attention.")
        inner.only("rope_type", ("default",))
        inner.only("rope_theta", (model.local_base,))
        inner.finish()
        path += "full_attention."
    elif local not in (None, model.local_base):
        table.refuse("rope_local_base_freq", f"llama.cpp's {model.arch} has {model.local_base}")
    absent = {
        "rope_theta": theta,
        "partial_rotary_factor": 1.0 if part is None else part,
        "original_max_position_embeddings": found.values["context_length"] if context is None else context,
        "truncate": True,
    }
    rope = _Table(given, absent, table.where, path)
    base, rotated = rope.number("rope_theta"), head * rope.number("partial_rotary_factor")
    kind = rope.take("rope_type", "type") or "default"
    if kind not in model.scalings:
        told = " or ".join(model.scalings)
        rope.refuse("rope_type", f"llama.cpp's {model.arch} computes {told}", kind)
    if (
        rotated != int(rotated)
        or int(rotated) % 2
        or not (rotated == head or (model.partial and rotated < head))
    ):
        rope.refuse("partial_rotary_factor", f"of {head} dimensions, llama.cpp cannot rotate these", part)
    values, size = found.values, int(rotated)
    values |= {"rope_freq_base": base, "rope_dimension_count": size}
    if kind in ("linear", "yarn"):
        values |= {"rope_scaling_type": kind, "rope_scaling_factor": rope.number("factor")}
    if kind == "yarn":
        _yarn(rope, base, size, values)
    elif kind == "llama3":
        found.factors = _llama3(rope, base, size)
    ignored = {"original_max_position_embeddings", "max_position_embeddings", "attention_factor"}
    rope.finish(frozenset(ignored) if kind in ("default", "linear") else frozenset())


def _yarn(rope: _Table, base: float, size: int, values: dict[str, Any]) -> None:
    factor, old = values["rope_scaling_factor"], rope.count("original_max_position_embeddings")
    fast, slow = rope.number("beta_fast", default=32), rope.number("beta_slow", default=1)
    own = 0.1 * log(factor) + 1 if factor > 1 else 1.0  # what llama.cpp multiplies by
    scale, both = rope.take("attention_factor"), (rope.take("mscale"), rope.take("mscale_all_dim"))
    if scale is not None:
        scale = rope.number("attention_factor")
    elif all(both):
        over, under = (rope.number(name) for name in ("mscale", "mscale_all_dim"))
        scale = (over * (own - 1) + 1) / (under * (own - 1) + 1)
    ends = [
        size * log(old / (turns * 2 * pi)) / (2 * log(base)) if base != 1 else 0.0 for turns in (fast, slow)
    ]
    whole = floor(ends[0]) == ends[0] and ceil(ends[1]) == ends[1]
    if not rope.take("truncate") and not whole:
        rope.refuse(
            "truncate", "llama.cpp computes as with true; with that, long texts differ a little", False
        )
    values |= {"rope_scaling_orig_ctx_len": old}
    if fast != 32 or slow != 1:
        values |= {"rope_scaling_yarn_beta_fast": fast, "rope_scaling_yarn_beta_slow": slow}
    if scale is not None and abs(scale / own - 1) > 1e-6:
        values["rope_scaling_attn_factors"] = scale / own


def _llama3(rope: _Table, base: float, size: int) -> list[float]:
    factor, low, high, old = (
        rope.number(key)
        for key in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    if not low < high:
        rope.refuse("high_freq_factor", "it must be above low_freq_factor")
    factors = []
    for i in range(0, size, 2):
        turns = old / (2 * pi * base ** (i / size))
        smooth = min(max((turns - low) / (high - low), 0), 1)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors
