"""Write a checkpoint as a GGUF file, which llama.cpp runs.

`config.json` selects one of `_ARCHITECTURES`. Matrices are written as they are, or as `--dtype` says (also
q8_0); norms, biases and other vectors in float32, as llama.cpp wants them. The tokenizer is written where it
is a byte-level BPE that llama.cpp splits in exactly the same way (GPT-2's, Llama 3's, Qwen2's). Otherwise the
file says that it has none (`no_vocab`), and llama.cpp takes and gives token numbers only.

Source: https://github.com/ggml-org/ggml, docs/gguf.md; llama.cpp's conversion scripts; the `gguf` package.
"""

from __future__ import annotations

import logging
import re
import struct
from dataclasses import dataclass, field
from functools import partial
from math import pi
from typing import TYPE_CHECKING, Any

from converters.companions import GENERATION
from converters.containers.gguf_file import Described, Float, data_of, header, padded
from converters.errors import CheckpointError
from converters.storage.bytes import Memory
from converters.storage.folder import Folder
from converters.storage.guarded import read_small, read_small_table
from converters.tensors.casting import parse_dtype
from converters.tensors.computed import computed
from converters.tensors.dtypes import CASTABLE
from converters.tensors.quantised import BLOCK, q8_0
from converters.tensors.rearranged import permuted, transposed
from converters.tensors.tensor import Tensor
from converters.writers.conversion import Entry, Part, Plan, PlannedFile, model_entries
from converters.writers.targets import Target

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from converters.checkpoint import Checkpoint
    from converters.storage.path_or_url import Place
    from converters.tensors.tensor import Array
    from converters.writers.conversion import Choices

_log = logging.getLogger(__name__)

FILE = "model.gguf"
_FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}
_LARGEST = 3e38  # of a float32, about
_LAYER = re.compile(r"(?P<head>.+)\.(?P<number>\d+)\.(?P<tail>.+)\.(?P<kind>weight|bias)")

_ATTENTION = {f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"} | {
    "self_attn.o_proj": "attn_output"
}
_MLP = {f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}
_DECODER = {**_ATTENTION, **_MLP, "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
_QK_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
_FOUR_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_AROUND = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_GPT2 = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
_GPT2_AROUND = {
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "lm_head": "output",
}


@dataclass(frozen=True)
class _Architecture:
    """One of llama.cpp's architectures.

    Attributes:
        name: llama.cpp's.
        layer: the names of a layer's modules -> llama.cpp's.
        around: those of the others.
        pairs: whether the rotary embedding pairs adjacent rows of the query and key projections.
        norms_plus_one: whether the norms scale by 1 + weight.
        matrices_transposed: whether the linear layers hold (in, out) matrices.
    """

    name: str
    layer: Mapping[str, str] = field(default_factory=lambda: _DECODER)
    around: Mapping[str, str] = field(default_factory=lambda: _AROUND)
    pairs: bool = False
    norms_plus_one: bool = False
    matrices_transposed: bool = False


_ARCHITECTURES = {
    "llama": _Architecture("llama", pairs=True),
    "mistral": _Architecture("llama", pairs=True),
    "qwen2": _Architecture("qwen2"),
    "qwen3": _Architecture("qwen3", {**_DECODER, **_QK_NORMS}),
    "gemma": _Architecture("gemma", norms_plus_one=True),
    "gemma2": _Architecture("gemma2", {**_DECODER, **_FOUR_NORMS}, norms_plus_one=True),
    "gemma3_text": _Architecture("gemma3", {**_DECODER, **_QK_NORMS, **_FOUR_NORMS}, norms_plus_one=True),
    "gpt2": _Architecture("gpt2", _GPT2, _GPT2_AROUND, matrices_transposed=True),
}
MODEL_TYPES = tuple(_ARCHITECTURES)


class _PlusOne:
    """Adds 1 to every element."""

    def prepare(self, before: Callable[[Callable[[Array, int], None]], None]) -> None:
        """Nothing to see first."""

    def apply(self, block: Array, first: int) -> None:
        block += 1


def plan_gguf(checkpoint: Checkpoint, choices: Choices) -> Plan:
    """The plan of `--to gguf`: one file, whatever `max_shard_size`; the dtype is that of the matrices.

    Raises:
        CheckpointError: the optimizer is asked for; llama.cpp has no such architecture or setting, or a
            tensor is not in it.
    """
    if choices.optimizer:
        raise CheckpointError("--to gguf: holds no optimizer state; leave out --optimizer")
    config = _config(checkpoint)
    kind = config.get("model_type")
    found = _ARCHITECTURES.get(kind) if isinstance(kind, str) else None
    if found is None:
        known = ", ".join(MODEL_TYPES)
        raise CheckpointError(f"{checkpoint.root}: --to gguf knows the model types {known}, not {kind!r}")
    wanted = parse_dtype(choices.dtype, quantised=True)
    values = _settings(found, config, checkpoint.root)
    described: list[Described] = []
    entries: list[Entry] = []
    head = values.get(f"{found.name}.rope.dimension_count")
    extra = None if head is None else _rope_factors(config, head, checkpoint.root)
    named = [] if extra is None else [("rope_freqs.weight", extra)]
    for entry in model_entries(checkpoint, "keep"):
        name = _name(entry.name, found)
        if name is None:
            raise CheckpointError(
                f"{checkpoint.root}: {entry.name!r} has no place in llama.cpp's {found.name}"
            )
        named.append((name, _prepared(entry.name, entry.tensor, found, config)))
    for name, tensor in named:
        target = _type(name, tensor, wanted)
        if target == "Q8_0":
            entry = Entry(name, "U8", q8_0(tensor))
        else:
            entry = Entry(name, target, tensor)
        entries.append(entry)
        described.append(Described(name, target, tensor.shape, entry.nbytes))
    matrices = [one.kind for one in described if len(one.shape) > 1]
    values["general.file_type"] = _FILE_TYPES[max(matrices, key=matrices.count, default="F32")]
    values |= _tokenizer(checkpoint, config)
    start = header(values, described)
    parts: list[Part] = [start]
    for entry in entries:
        parts += [entry, bytes(padded(entry.nbytes) - entry.nbytes)]

    def reopen(folder: Place) -> dict[str, Tensor]:
        return data_of(Folder(folder).file(FILE), len(start), described)

    return Plan((PlannedFile(FILE, tuple(parts)),), {}, {}, reopen)


def _config(checkpoint: Checkpoint) -> dict[str, Any]:
    config = read_small_table(checkpoint.companions.get("config.json"))
    if not config:
        raise CheckpointError(
            f"{checkpoint.root}: --to gguf needs the model's config.json; give it with --config-from"
        )
    return {**config, **checkpoint.config}


def _number(config: Mapping[str, Any], where: Place, *keys: str, default: Any = None) -> Any:
    found = next((config[key] for key in keys if type(config.get(key)) in (int, float)), default)
    if found is None:
        raise CheckpointError(f"{where}: config.json has no {keys[0]}")
    if not abs(found) < _LARGEST:  # also NaN
        raise CheckpointError(f"{where}: config.json has {keys[0]} {found}, which cannot be")
    return found


def _count(config: Mapping[str, Any], where: Place, *keys: str, default: int | None = None) -> int:
    found = _number(config, where, *keys, default=default)
    if type(found) is not int or not 0 < found < 1 << 32:
        raise CheckpointError(f"{where}: config.json has {keys[0]} {found}, which cannot be")
    return found


def _settings(found: _Architecture, config: Mapping[str, Any], where: Place) -> dict[str, Any]:
    """The values that llama.cpp builds the model from."""

    number, count = partial(_number, config, where), partial(_count, config, where)

    if "quantization_config" in config:
        raise CheckpointError(f"{where}: its weights are quantised, which --to gguf does not take")
    heads = count("num_attention_heads", "n_head")
    width = count("hidden_size", "n_embd")
    values: dict[str, Any] = {
        "block_count": count("num_hidden_layers", "n_layer"),
        "context_length": count("max_position_embeddings", "n_positions", "n_ctx"),
        "embedding_length": width,
        "feed_forward_length": count("intermediate_size", "n_inner", default=4 * width),
        "attention.head_count": heads,
    }
    if found.name == "gpt2":
        if config.get("activation_function", "gelu_new") not in ("gelu_new", "gelu_pytorch_tanh"):
            raise CheckpointError(f"{where}: llama.cpp's gpt2 has no {config['activation_function']!r}")
        values["attention.layer_norm_epsilon"] = Float(number("layer_norm_epsilon", default=1e-5))
    else:
        gelu = found.name.startswith("gemma")
        acts = [config[key] for key in ("hidden_activation", "hidden_act") if config.get(key)]
        wanted = ("gelu_pytorch_tanh", "gelu") if gelu else ("silu",)
        if acts and acts[0] not in wanted:
            raise CheckpointError(f"{where}: llama.cpp's {found.name} has no {acts[0]!r}")
        head = count("head_dim", default=width // heads)
        values |= {
            "attention.head_count_kv": count("num_key_value_heads", default=heads),
            "attention.layer_norm_rms_epsilon": Float(number("rms_norm_eps", default=1e-6)),
            "attention.key_length": head,
            "attention.value_length": head,
            "rope.freq_base": Float(_rope(config, where)[0]),
            "rope.dimension_count": head,
            "vocab_size": count("vocab_size"),
        }
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            if found.name in ("gemma2", "gemma3") and config.get(key) is not None:
                values[key] = Float(number(key))
        if found.name in ("gemma2", "gemma3") and config.get("sliding_window") is not None:
            values["attention.sliding_window"] = count("sliding_window")
    made = {f"{found.name}.{key}": value for key, value in values.items()}
    about = {"general.architecture": found.name, "general.type": "model", "general.quantization_version": 2}
    return {**about, **made}


def _rope(config: Mapping[str, Any], where: Place) -> tuple[float, Mapping[str, Any]]:
    """(the base, the scaling) of the rotary embedding; of the global layers, where there are two kinds."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    scaling = found.get("full_attention", found) if isinstance(found, dict) else {}
    base = scaling.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise CheckpointError(f"{where}: the rotary embedding's scaling {kind!r} is not written to GGUF")
    if type(base) not in (int, float) or not 0 < base < _LARGEST:
        raise CheckpointError(f"{where}: config.json has no rope_theta")
    local = found.get("sliding_attention", {}) if isinstance(found, dict) else {}
    small = local.get("rope_theta", config.get("rope_local_base_freq", 10000.0))
    if config.get("model_type") == "gemma3_text" and small != 10000.0:
        raise CheckpointError(f"{where}: llama.cpp's gemma3 has no local rope_theta of {small}")
    return float(base), scaling if kind == "llama3" else {}


def _rope_factors(config: Mapping[str, Any], head: int, where: Place) -> Tensor | None:
    """Llama 3's scaling, as what each frequency of a head of `head` rows is divided by."""
    base, scaling = _rope(config, where)
    if not scaling:
        return None
    factor, low, high, old = (
        _number(scaling, where, key)
        for key in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    if not (factor > 0 and 0 < low < high and old > 0):
        raise CheckpointError(f"{where}: config.json has an impossible scaling of the rotary embedding")
    factors = []
    for i in range(0, head, 2):
        wave = 2 * pi * base ** (i / head)
        if wave < old / high:
            factors.append(1.0)
        elif wave > old / low:
            factors.append(float(factor))
        else:
            smooth = (old / wave - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return Tensor.contiguous(
        "rope", "F32", (len(factors),), Memory(struct.pack(f"<{len(factors)}f", *factors))
    )


def _name(name: str, found: _Architecture) -> str | None:
    """llama.cpp's name of a tensor, None where it has none."""
    match = _LAYER.fullmatch(name)
    if match is not None and match["head"] in ("model.layers", "transformer.h"):
        inner = found.layer.get(match["tail"])
        return None if inner is None else f"blk.{match['number']}.{inner}.{match['kind']}"
    module, _, kind = name.rpartition(".")
    outer = found.around.get(module)
    return None if outer is None else f"{outer}.{kind}"


def _prepared(name: str, tensor: Tensor, found: _Architecture, config: Mapping[str, Any]) -> Tensor:
    """The tensor with llama.cpp's order of rows and meaning of norms."""
    if found.pairs and (".self_attn.q_proj." in name or ".self_attn.k_proj." in name):
        every = config.get("num_attention_heads")
        heads = every if ".q_proj." in name else config.get("num_key_value_heads", every)
        rows, *rest = tensor.shape
        if type(heads) is not int or heads < 1 or rows % (2 * heads):
            raise CheckpointError(f"{name}: {rows} rows cannot be split into {heads} heads")
        split = (heads, 2, rows // heads // 2, *rest)
        return permuted(tensor, split, (0, 2, 1, *range(3, len(split))))
    if found.norms_plus_one and name.endswith("norm.weight"):
        return computed(tensor, "F32", 0, [_PlusOne()])
    linear = name.rpartition(".")[0].endswith(("c_attn", "c_fc", "c_proj"))
    if found.matrices_transposed and linear and len(tensor.shape) == 2:
        return transposed(tensor)
    return tensor


def _type(name: str, tensor: Tensor, wanted: str | None) -> str:
    """The type to write: vectors and position embeddings in F32, matrices as asked."""
    if tensor.dtype not in CASTABLE:
        raise CheckpointError(f"{name}: of the type {tensor.dtype}, which --to gguf does not take")
    if len(tensor.shape) < 2 or name.startswith("position_embd") or not name.endswith(".weight"):
        return "F32"
    if wanted == "Q8_0" and tensor.shape[-1] % BLOCK:
        return "F16"  # as llama.cpp does
    kept = "F32" if tensor.dtype == "F64" else tensor.dtype
    return wanted or kept


# The pre-tokenizers that llama.cpp knows by name, by their pattern in tokenizer.json.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_SPLITS = {_LLAMA3: "llama-bpe", _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"): "qwen2"}
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5


def _tokenizer(checkpoint: Checkpoint, config: Mapping[str, Any]) -> dict[str, Any]:
    """The tokenizer's tables; `no_vocab`, with a warning, where llama.cpp would not split in the same way."""
    path = checkpoint.companions.get("tokenizer.json")
    count = config.get("vocab_size")
    if isinstance(count, int) and all(count not in t.shape for t in checkpoint.tensors.values()):
        where = checkpoint.companions["config.json"]
        raise CheckpointError(f"{where}: vocab_size is {count:,}, and no tensor has as many rows; correct it")
    try:
        known, template = read_small_table(path), _chat_template(checkpoint)
        end = _end_of_answer(checkpoint, known, template)
        tables = _byte_level_bpe(known, config if end is None else {**config, "eos_token_id": end})
    except (AttributeError, KeyError, TypeError, ValueError, IndexError):  # not a tokenizer.json
        tables = None
    if tables is None:
        why = (
            "has no tokenizer.json"
            if path is None
            else "has a tokenizer that llama.cpp may split differently"
        )
        _log.warning("warning: %s: %s; the GGUF file has none and takes token numbers", checkpoint.root, why)
        return {"tokenizer.ggml.model": "no_vocab"}
    return {**tables, "tokenizer.chat_template": template} if template else tables


def _chat_template(checkpoint: Checkpoint) -> str:
    """The template that writes a conversation; empty where there is none."""
    path = checkpoint.companions.get("chat_template.jinja")
    if path is not None:
        return read_small(path).decode("utf-8", "replace")
    kept = read_small_table(checkpoint.companions.get("tokenizer_config.json")).get("chat_template")
    if isinstance(kept, list):
        kept = {one.get("name"): one.get("template") for one in kept}.get("default")
    return kept if isinstance(kept, str) else ""


def _end_of_answer(checkpoint: Checkpoint, known: Mapping[str, Any], template: str) -> int | None:
    """The end token of the generation config; of several, the one that the template writes.

    llama.cpp takes one. The tokenizer's own goes before others.
    """
    stops = read_small_table(checkpoint.companions.get(GENERATION)).get("eos_token_id")
    texts = {token["id"]: token["content"] for token in known.get("added_tokens", ())}
    own = read_small_table(checkpoint.companions.get("tokenizer_config.json")).get("eos_token")
    own = own.get("content") if isinstance(own, dict) else own
    ids = [one for one in (stops if isinstance(stops, list) else [stops]) if type(one) is int]
    order = {one: (texts.get(one, "\0") not in template, texts.get(one) != own) for one in ids}
    return min(ids, key=lambda one: order[one], default=None)


def _byte_level_bpe(known: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any] | None:
    model, split = known.get("model"), _splitting(known.get("pre_tokenizer"))
    if not isinstance(model, dict) or model.get("type") != "BPE" or split is None:
        return None
    if (normalizer := known.get("normalizer")) and (split != "qwen2" or normalizer.get("type") != "NFC"):
        return None
    if bool(model.get("ignore_merges")) != (split == "llama-bpe") or model.get("byte_fallback"):
        return None
    added = {token["id"]: token for token in known.get("added_tokens", ())}
    vocab = {number: text for text, number in model.get("vocab", {}).items()}
    vocab |= {number: token["content"] for number, token in added.items()}
    count = config.get("vocab_size")
    if type(count) is not int or not vocab or max(vocab) >= count:
        return None
    kinds = [
        (_CONTROL if added[i].get("special") else _USER_DEFINED)
        if i in added
        else _NORMAL
        if i in vocab
        else _UNUSED
        for i in range(count)
    ]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges", ())]
    special = {}
    for key in ("bos", "eos", "pad"):
        number = config.get(f"{key}_token_id")
        number = number[0] if isinstance(number, list) and number else number
        if type(number) is int and 0 <= number < count:
            special[f"tokenizer.ggml.{key}_token_id"] = number
    begins = _adds_bos(known.get("post_processor"), vocab, config)
    if begins is None:
        return None
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": split,
        "tokenizer.ggml.tokens": [vocab.get(i, f"[PAD{i}]") for i in range(count)],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        **special,
        "tokenizer.ggml.add_bos_token": begins,
    }


def _splitting(steps: Any) -> str | None:
    """llama.cpp's name of a pre-tokenizer."""
    if not isinstance(steps, dict):
        return None
    if steps.get("type") == "ByteLevel":
        plain = not steps.get("add_prefix_space") and steps.get("use_regex", True)
        return "gpt-2" if plain else None
    inner = steps.get("pretokenizers")
    if steps.get("type") != "Sequence" or not isinstance(inner, list) or len(inner) != 2:
        return None
    first, second = inner
    pattern = first.get("pattern", {}).get("Regex") if first.get("type") == "Split" else None
    plain = second.get("type") == "ByteLevel" and second.get("use_regex") is False
    isolated = first.get("behavior") == "Isolated" and not first.get("invert")
    return _SPLITS.get(str(pattern)) if plain and isolated and not second.get("add_prefix_space") else None


def _adds_bos(step: Any, vocab: Mapping[int, str], config: Mapping[str, Any]) -> bool | None:
    """Whether a text begins with the first token; None where it is changed in another way."""
    if step is None or step.get("type") == "ByteLevel":
        return False
    steps = step.get("processors", []) if step.get("type") == "Sequence" else [step]
    steps = [one for one in steps if one.get("type") != "ByteLevel"]
    if not steps:
        return False
    if len(steps) != 1 or steps[0].get("type") != "TemplateProcessing":
        return None
    single = steps[0].get("single", [])
    tokens = [one["SpecialToken"]["id"] for one in single if "SpecialToken" in one]
    if not tokens:
        return False
    begins = single and "SpecialToken" in single[0] and len(tokens) == 1
    bos = config.get("bos_token_id")
    return True if begins and isinstance(bos, int) and vocab.get(bos) == tokens[0] else None


TARGET = Target(plan_gguf, "llama.cpp", optimizer=False)
