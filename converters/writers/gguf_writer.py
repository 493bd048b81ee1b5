"""Write a checkpoint as a GGUF file, which llama.cpp runs.

`converters.writers.gguf_models` says which models and settings. Matrices are written as they are, or as
`--dtype` says (also q8_0); norms, biases and other vectors in float32, as llama.cpp wants them. Names, keys
and types are those of the package `gguf`; the tensors are streamed as in every other format.

Source: https://github.com/ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import re
import struct
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np

from converters.errors import CheckpointError
from converters.storage.bytes import Memory
from converters.storage.folder import Folder
from converters.storage.guarded import read_small_table
from converters.tensors.casting import parse_dtype
from converters.tensors.computed import computed
from converters.tensors.dtypes import CASTABLE
from converters.tensors.quantised import BLOCK, q8_0
from converters.tensors.rearranged import joined, part, permuted, reshaped, selected, transposed
from converters.tensors.tensor import Tensor
from converters.writers.conversion import Entry, Part, Plan, PlannedFile, model_entries
from converters.writers.gguf_models import MODELS, settings_of
from converters.writers.gguf_tokenizer import add_tokenizer
from converters.writers.targets import Target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from converters.checkpoint import Checkpoint
    from converters.storage.path_or_url import Place
    from converters.tensors.tensor import Array
    from converters.writers.conversion import Choices
    from converters.writers.gguf_models import Model, Settings

FILE = "model.gguf"
_TYPES = {"F32": "ALL_F32", "F16": "MOSTLY_F16", "BF16": "MOSTLY_BF16", "Q8_0": "MOSTLY_Q8_0"}
_LAYER = re.compile(r"((?:.+\.)?(?:layers|h))\.(\d{1,6})\.(.+)")
_EXPERT = re.compile(r"(.+\.experts)\.(\d{1,6})\.(.+)")
# Masks and frequencies that old versions of transformers saved.
_BUFFER = re.compile(r".+\.attn\.(masked_)?bias|.+\.rotary_emb\.inv_freq")
_BIAS = re.compile(r".+\.(self_attn|mlp)\.\w+_proj\.bias")


class _Affine:
    """Adds to every element, and multiplies."""

    def __init__(self, added: float, factor: float) -> None:
        self.added, self.factor = added, factor

    def prepare(self, before: Callable[[Callable[[Array, int], None]], None]) -> None:
        """Nothing to see first."""

    def apply(self, block: Array, first: int) -> None:
        block += self.added
        block *= self.factor


def plan_gguf(checkpoint: Checkpoint, choices: Choices) -> Plan:
    """The plan of `--to gguf`: one file, whatever `max_shard_size`; the dtype is that of the matrices.

    Raises:
        CheckpointError: the optimizer is asked for; llama.cpp has no such model or setting, or a tensor is
            not in it.
    """
    import gguf  # not at the top: slow to import

    root = checkpoint.root
    if choices.optimizer:
        raise CheckpointError("--to gguf: holds no optimizer state; leave out --optimizer")
    config = read_small_table(checkpoint.companions.get("config.json"))
    if not config:
        raise CheckpointError(f"{root}: --to gguf needs the model's config.json; give it with --config-from")
    config |= checkpoint.config
    kind = config.get("model_type")
    model = MODELS.get(kind) if isinstance(kind, str) else None
    if model is None:
        raise CheckpointError(f"{root}: --to gguf knows the model types {', '.join(MODELS)}, not {kind!r}")
    wanted = parse_dtype(choices.dtype, quantised=True)
    tensors = {entry.name: entry.tensor for entry in model_entries(checkpoint, "keep")}
    numbers = [int(match[2]) for name in tensors if (match := _LAYER.fullmatch(name))]
    settings = settings_of(config, model, 1 + max(numbers, default=-1), root)
    entries: list[Entry] = []
    writer = gguf.GGUFWriter(None, model.arch)
    for name, tensor in _named(tensors, model, settings, root).items():
        ready = _prepared(name, tensor, model, settings)
        target = _type(name, tensor.dtype, ready.shape, wanted)
        entry = Entry(name, "U8", q8_0(ready)) if target == "Q8_0" else Entry(name, target, ready)
        entries.append(entry)
        number = gguf.GGMLQuantizationType[target]
        writer.add_tensor_info(name, ready.shape, np.dtype(np.float32), entry.nbytes, number)
    _add_settings(writer, config, settings, root)
    add_tokenizer(writer, checkpoint, config)
    start = _header(writer)
    parts: list[Part] = [start]
    for entry in entries:
        parts += [entry, bytes(-entry.nbytes % gguf.GGUF_DEFAULT_ALIGNMENT)]
    file = PlannedFile(FILE, tuple(parts))

    def reopen(place: Place) -> dict[str, Tensor]:
        path = place if place.is_file() else place / FILE
        written = Folder(path.parent).file(path.name)
        if written.nbytes != file.nbytes:
            raise CheckpointError(f"{path}: is {written.nbytes} bytes long, not {file.nbytes}")
        found, at = {}, len(start)
        for entry in entries:
            span = written.span(at, entry.nbytes, what=repr(entry.name))
            found[entry.name] = Tensor.contiguous(entry.name, entry.dtype, entry.tensor.shape, span)
            at += entry.nbytes + -entry.nbytes % gguf.GGUF_DEFAULT_ALIGNMENT
        return found

    return Plan((file,), {}, {}, reopen)


def _add_settings(writer: Any, config: Mapping[str, Any], settings: Settings, root: Place) -> None:
    import gguf

    tensors = writer.tensors[0]
    name = config.get("_name_or_path")
    writer.add_type("model")
    writer.add_name((name if isinstance(name, str) else "").rstrip("/").rpartition("/")[2] or root.name)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    kinds = [info.dtype.name for info in tensors.values() if len(info.shape) > 1]
    most = max(kinds, key=kinds.count, default="F32")
    writer.add_file_type(gguf.LlamaFileType[_TYPES.get(most, "GUESSED")])
    for key, value in settings.values.items():
        given = gguf.RopeScalingType(value) if key == "rope_scaling_type" else value
        getattr(writer, f"add_{key}")(given)


def _header(writer: Any) -> bytes:
    """Everything before the data, up to where it begins."""
    from gguf.gguf_writer import WriterState

    made = BytesIO()
    writer.fout, writer.state = [made], WriterState.EMPTY
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.write_padding(made, made.tell())
    return made.getvalue()


def _named(tensors: Mapping[str, Tensor], model: Model, settings: Settings, root: Place) -> dict[str, Tensor]:
    """The tensors under llama.cpp's names."""
    import gguf

    arch = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == model.arch)
    names = gguf.get_tensor_name_map(arch, 1)  # the layers are alike
    found: dict[str, Tensor] = {}
    if settings.factors:
        data = struct.pack(f"<{len(settings.factors)}f", *settings.factors)
        found["rope_freqs.weight"] = Tensor.contiguous("rope", "F32", (len(settings.factors),), Memory(data))
    for name, tensor in _stacked(_separated(tensors), settings, root):
        match = _LAYER.fullmatch(name)
        known = f"{match[1]}.0.{match[3]}" if match else name
        made = names.get_name(known, (".weight", ".bias"))
        bias = _BIAS.fullmatch(name)
        if made is None or (bias and bias[1] not in settings.biases):
            raise CheckpointError(f"{root}: {name!r} has no place in llama.cpp's {model.arch}")
        made = made.replace("blk.0.", f"blk.{match[2]}.") if match else made
        if made in found:
            raise CheckpointError(f"{root}: {name!r} and another tensor would be {made!r}")
        found[made] = tensor
    _check_shapes(found, model, settings, root)
    if "output.weight" not in found:
        if not settings.tied:
            raise CheckpointError(
                f"{root}: config.json has tie_word_embeddings false, but there is no lm_head.weight"
            )
        if model.own_head:
            found["output.weight"] = found["token_embd.weight"]
    return found


def _check_shapes(found: Mapping[str, Tensor], model: Model, settings: Settings, root: Place) -> None:
    """Refuse a config of another model; llama.cpp would not load it."""
    values = settings.values
    width = values["embedding_length"]
    sizes = {"token_embd.weight": ("vocab_size", values["vocab_size"])}
    if model.scalings:
        for one, key in (("q", "head_count"), ("k", "head_count_kv")):
            setting = "num_attention_heads" if one == "q" else "num_key_value_heads"
            sizes[f"blk.0.attn_{one}.weight"] = (setting, values[key] * values["key_length"])
    for name, (setting, rows) in sizes.items():
        if name in found and found[name].shape != (rows, width):
            raise CheckpointError(
                f"{root}: config.json says that {name} is {[rows, width]}, and it is "
                f"{list(found[name].shape)}: see {setting}, hidden_size and head_dim"
            )
    if "token_embd.weight" not in found:
        raise CheckpointError(f"{root}: has no embedding")


def _separated(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors under names that end in weight or bias; gates apart from what they gate.

    Experts as one tensor are (experts, out, in), or (experts, in, out) where they have biases.
    """
    for name, tensor in tensors.items():
        if _BUFFER.fullmatch(name):
            continue
        module, _, leaf = name.rpartition(".")
        if leaf in ("weight", "bias") or not module.endswith(".experts"):
            yield name if leaf in ("weight", "bias") else f"{name}.weight", tensor
            continue
        stem, kind = leaf.removesuffix("_bias"), "bias" if leaf.endswith("_bias") else "weight"
        inputs_first = f"{module}.{stem}_bias" in tensors
        if stem != "gate_up_proj":
            yield (
                f"{module}.{stem}.{kind}",
                _outputs_first(tensor) if inputs_first and kind == "weight" else tensor,
            )
            continue
        size = tensor.shape[-1 if inputs_first else 1] // 2
        for i, half in enumerate(("gate_proj", "up_proj")):
            if not inputs_first:
                made = part(tensor, 1, i * size, size)
            else:
                split = reshaped(tensor, (*tensor.shape[:-1], size, 2))
                made = selected(split, len(split.shape) - 1, i)
                made = _outputs_first(made) if kind == "weight" else made
            yield f"{module}.{half}.{kind}", made


def _outputs_first(tensor: Tensor) -> Tensor:
    """`tensor.transpose(1, 2)`, one matrix after the other."""
    experts = [transposed(selected(tensor, 0, i)) for i in range(tensor.shape[0])]
    return joined(tensor.name, [reshaped(one, (1, *one.shape)) for one in experts], 0)


def _stacked(
    tensors: Iterable[tuple[str, Tensor]], settings: Settings, root: Place
) -> Iterator[tuple[str, Tensor]]:
    """The tensors, those of single experts as one."""
    stacks: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors:
        match = _EXPERT.fullmatch(name)
        if match is None:
            yield name, tensor
        else:
            stacks.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = tensor
    count = settings.values.get("expert_count", 0)
    for name, stack in stacks.items():
        experts = [stack[i] for i in sorted(stack)]
        if sorted(stack) != list(range(count)) or len({one.shape for one in experts}) > 1:
            raise CheckpointError(f"{root}: {name!r} is not of the {count} experts that config.json tells of")
        yield name, joined(name, [reshaped(one, (1, *one.shape)) for one in experts], 0)


def _prepared(name: str, tensor: Tensor, model: Model, settings: Settings) -> Tensor:
    """The tensor with llama.cpp's order of rows, meaning of norms and scale of queries."""
    leaf = name.split(".", 2)[-1] if name.startswith("blk.") else name
    module = leaf.rpartition(".")[0]
    if model.pairs and module in ("attn_q", "attn_k"):
        heads = settings.values["head_count" if module == "attn_q" else "head_count_kv"]
        rows, *rest = tensor.shape
        if rows % (2 * heads):
            raise CheckpointError(f"{tensor.name}: {rows} rows cannot be split into {heads} heads")
        split = (heads, 2, rows // heads // 2, *rest)
        return permuted(tensor, split, (0, 2, 1, *range(3, len(split))))
    if (
        model.inputs_first
        and module.startswith(("attn_qkv", "attn_output", "ffn_"))
        and len(tensor.shape) == 2
    ):
        return transposed(tensor)
    added = 1.0 if model.plus_one and module.endswith("norm") else 0.0
    scaled = "attn_q_norm" if model.local_base else "attn_q"  # where queries are normalised, after that
    factor = settings.query_scale if module == scaled else 1.0
    if (added, factor) == (0.0, 1.0):
        return tensor
    return computed(tensor, "F32", len(tensor.shape) - 1, [_Affine(added, factor)])


def _type(name: str, dtype: str, shape: Sequence[int], wanted: str | None) -> str:
    """The type to write: vectors, position embeddings and routers in F32, other matrices as asked."""
    if dtype not in CASTABLE:
        raise CheckpointError(f"{name}: of the type {dtype}, which --to gguf does not take")
    single = name.startswith("position_embd") or ".ffn_gate_inp." in name or not name.endswith(".weight")
    if len(shape) < 2 or single:
        return "F32"
    if wanted == "Q8_0" and shape[-1] % BLOCK:
        return "F16"  # as llama.cpp does
    return wanted or ("F32" if dtype == "F64" else dtype)


TARGET = Target(plan_gguf, "llama.cpp", optimizer=False, suffix=".gguf")
