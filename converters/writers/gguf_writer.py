"""Write GGUF files for llama.cpp.

`portable.converters.writers.gguf_models` defines the supported models and settings. Matrices keep
their dtype or are cast to the value of `--dtype`, which may also be q8_0, q4_0 or mxfp4. Norms,
biases and other vectors are written in float32, because llama.cpp requires it. The package `gguf`
defines the names, keys and types. Tensors are streamed as in all other formats.

Source: https://github.com/ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.converters.errors import CheckpointError, CommandError, to_printable
from portable.converters.lazy_numpy import np
from portable.converters.names.known_words import find_unknown_names
from portable.converters.names.model_config import check_config_fits_tensors
from portable.converters.storage.byte_sources import InMemorySource
from portable.converters.storage.folder import CheckpointFolder
from portable.converters.tensors.casting import parse_target_dtype
from portable.converters.tensors.dtypes import CASTABLE_DTYPES
from portable.converters.tensors.edited_rows import AffineEdit, apply_edits
from portable.converters.tensors.entry import OutputTensor
from portable.converters.tensors.ggml import BLOCK_ELEMENTS, GGML_KINDS, quantize_to_ggml
from portable.converters.tensors.tensor import Tensor
from portable.converters.tensors.tensor_ops import (
    concat_tensors,
    permute_split_dims,
    reshape_tensor,
    select_index,
    slice_tensor,
    transpose_matrix,
)
from portable.converters.writers.conversion import list_model_entries
from portable.converters.writers.gguf_models import MODEL_TYPES, parse_gguf_settings
from portable.converters.writers.gguf_tokenizer import add_tokenizer_to_writer
from portable.converters.writers.plan import ConversionPlan, FilePart, PlannedFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from portable.converters.adapters.adapter import StoredAdapter
    from portable.converters.checkpoint import Checkpoint
    from portable.converters.storage.path_or_url import AnyPath
    from portable.converters.writers.conversion import ContentOptions
    from portable.converters.writers.gguf_models import GGUFModelType, GGUFSettings

FILE = "model.gguf"
_FILE_TYPES = {"F32": "ALL_F32", "MXFP4": "MOSTLY_MXFP4_MOE"}
_LAYER = re.compile(r"((?:.+\.)?(?:layers|h))\.(\d{1,6})\.(.+)")
_EXPERT = re.compile(r"(.+\.experts)\.(\d{1,6})\.(.+)")
# Attention masks and rotary frequencies that old versions of transformers saved.
_BUFFER = re.compile(r".+\.attn\.(masked_)?bias|.+\.rotary_emb\.inv_freq")
_BIAS = re.compile(r".+\.(self_attn|mlp)\.\w+_proj\.bias")


def plan_gguf(checkpoint: Checkpoint, choices: ContentOptions) -> ConversionPlan:
    """Plan the output of `--to gguf`: one file, regardless of `max_shard_size`.

    Args:
        checkpoint: Checkpoint to convert.
        choices: Options for the content of the output. The dtype applies to most matrices. See
            `_choose_ggml_type` for the types of the other tensors.

    Returns:
        The plan.

    Raises:
        CheckpointError: If the optimizer state is requested, if the dtype is unknown, if the dtype
            is `mxfp4` but the model has no experts, if `config.json` does not match the tensors, or
            if llama.cpp does not support the model type, a setting in `config.json`, or a tensor.
    """
    import gguf  # not at the top, because the import is slow

    root, matrix_type = checkpoint.root, _parse_matrix_type(choices)
    config = checkpoint.read_config()
    model = _get_gguf_model_type(config, root, "convert_hf_to_gguf.py")
    tensors = {entry.name: entry.tensor for entry in list_model_entries(checkpoint, "keep")}
    if unknown := [name for name in find_unknown_names(tensors, config) if not _BUFFER.fullmatch(name)]:
        raise CheckpointError(
            f"{root}: the transformers model type {config['model_type']} has no tensor with the name "
            f"{to_printable(unknown[0])}, so the order of the tensor's rows is unknown; export the model to "
            "transformers' format with the program that wrote the checkpoint"
        )
    check_config_fits_tensors(tensors, config, f"{root}: config.json")
    settings = parse_gguf_settings(config, model, root)
    if matrix_type == "MXFP4" and "expert_count" not in settings.values:
        raise CheckpointError(
            f"{root}: --dtype mxfp4 is only for experts, but this model has no experts; use --dtype q4_0"
        )
    writer, entries = gguf.GGUFWriter(None, model.arch), []
    for name, tensor in _rename_tensors_to_gguf(tensors, model, settings, root).items():
        converted_tensor = _convert_tensor_layout(name, tensor, model, settings)
        entries.append(
            _add_tensor_info(
                writer,
                name,
                converted_tensor,
                _choose_ggml_type(name, tensor.dtype, converted_tensor.shape, matrix_type),
            )
        )
    title = str(config.get("_name_or_path") or root.name)
    writer.add_name(title.rstrip("/").rpartition("/")[2].encode("utf-8", "replace").decode())
    writer.add_type("model")
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    kinds = [info.dtype.name for info in writer.tensors[0].values() if len(info.shape) > 1]
    file_type = "MXFP4" if "MXFP4" in kinds else max(kinds, key=kinds.count)
    writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES.get(file_type, f"MOSTLY_{file_type}")])
    for key, value in settings.values.items():
        getattr(writer, f"add_{key}")(gguf.RopeScalingType(value) if isinstance(value, str) else value)
    add_tokenizer_to_writer(writer, checkpoint, config)
    return _build_gguf_plan(writer, entries)


class _LoraFactors(NamedTuple):
    """LoRA factors of one linear layer. The weight update is `scaling * lora_b @ lora_a`."""

    lora_a: Tensor
    lora_b: Tensor
    scaling: float


def plan_gguf_adapter(
    adapter: StoredAdapter, config: Mapping[str, Any], choices: ContentOptions
) -> ConversionPlan:
    """Plan the output of `--to gguf` for a LoRA adapter.

    `llama-server --lora FILE` can load this output.

    Source: https://github.com/ggml-org/llama.cpp, convert_lora_to_gguf.py, src/llama-adapter.cpp.

    Args:
        adapter: Adapter to convert.
        config: Content of the base model's `config.json`.
        choices: Options for the content of the output.

    Returns:
        The plan.

    Raises:
        CheckpointError: If the optimizer state is requested, if the adapter is not plain LoRA on
            linear layers outside of experts, or if llama.cpp does not support the base model.
    """
    import gguf  # not at the top, because the import is slow

    root, matrix_type, lora = adapter.root, _parse_matrix_type(choices), adapter.config
    model = _get_gguf_model_type(config, root, "convert_lora_to_gguf.py")
    settings = parse_gguf_settings(config, model, root)
    if (
        lora.type != "LORA"
        or lora.dora
        or lora.unsupported_setting
        or adapter.replacements
        or lora.target_parameters
    ):
        raise CheckpointError(
            f"{root}: --to gguf supports only plain LoRA adapters of linear layers; write the merged model "
            "with --merge-into"
        )
    factors: dict[str, _LoraFactors] = {}
    for module in adapter.modules:
        pair = module.get_lora_pair()
        if pair is None or pair[2] or ".experts." in module.path:
            raise CheckpointError(
                f"{root}: {module.path}: --to gguf supports only LoRA adapters of linear layers; write the "
                "merged model with --merge-into"
            )
        scaling = lora.compute_scaling(module.path)
        factors[f"{module.path}.weight"] = _LoraFactors(pair[0], pair[1], scaling)
    writer, entries = gguf.GGUFWriter(None, model.arch), []
    writer.add_type("adapter")
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    alpha = lora.alpha or 1.0
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    # LoRA factors are not transposed, even if the weights of the model are.
    untransposed_model = replace(model, has_transposed_linear=False)
    for name, key in _map_gguf_names_to_names(factors, model, settings, root).items():
        lora_a, lora_b, scaling = factors[key]
        scaled_lora_b = _convert_tensor_layout(name, lora_b, untransposed_model, settings)
        share = scaling * lora_a.shape[0] / alpha  # llama.cpp multiplies by alpha / rank
        if share != 1:
            scaled_lora_b = apply_edits(scaled_lora_b, "F32", 1, [AffineEdit(share)])
        for end, factor in (("lora_a", lora_a), ("lora_b", scaled_lora_b)):
            target = _choose_ggml_type(name, factor.dtype, factor.shape, matrix_type)
            entries.append(_add_tensor_info(writer, f"{name}.{end}", factor, target))
    return _build_gguf_plan(writer, entries)


def _parse_matrix_type(choices: ContentOptions) -> str | None:
    """Return the requested GGML type of the matrices, or None if they keep their dtypes.

    Raises:
        CheckpointError: If the dtype is unknown.
        CommandError: If the optimizer state is requested, which GGUF cannot contain.
    """
    if choices.optimizer:
        raise CommandError("--to gguf: this format cannot contain the optimizer state; leave out --optimizer")
    return parse_target_dtype(choices.dtype, allow_ggml=True)


def _get_gguf_model_type(config: Mapping[str, Any], root: AnyPath, script: str) -> GGUFModelType:
    """Return the description of the model type in a config.

    Args:
        config: Content of the model's `config.json`.
        root: Path of the checkpoint, used in error messages.
        script: Script from llama.cpp that converts such a checkpoint, used in error messages.

    Raises:
        CheckpointError: If the config is missing, or the model type is not supported.
    """
    kind = config.get("model_type", "")
    if not kind:
        raise CheckpointError(
            f"{root}: --to gguf needs the model's config.json; add --config-from FOLDER_OR_ID"
        )
    if not isinstance(kind, str) or kind not in MODEL_TYPES:
        raise CheckpointError(
            f"{root}: --to gguf does not support the model type {kind!r} (supported types: "
            f"{', '.join(MODEL_TYPES)}); write OUT without --to gguf, and then run llama.cpp's own "
            f"converter: {script} OUT"
        )
    return MODEL_TYPES[kind]


def _add_tensor_info(writer: Any, name: str, tensor: Tensor, ggml_type: str) -> OutputTensor:
    """Add a tensor to the header of a GGUF file, and return the output tensor for its data.

    Args:
        writer: Writer of the `gguf` package, to which the tensor's name, shape and type are added.
        name: Name of the tensor in the file.
        tensor: Tensor to store.
        ggml_type: GGML type in which the data is stored. For a block type, the output tensor
            consists of quantized bytes.
    """
    import gguf

    blocks = ggml_type in GGML_KINDS
    entry = (
        OutputTensor(name, "U8", quantize_to_ggml(tensor, ggml_type))
        if blocks
        else OutputTensor(name, ggml_type, tensor)
    )
    number = gguf.GGMLQuantizationType[ggml_type]
    writer.add_tensor_info(name, tensor.shape, np.dtype(np.float32), entry.nbytes, number)
    return entry


def _build_gguf_plan(writer: Any, entries: Sequence[OutputTensor]) -> ConversionPlan:
    """Build the plan of a GGUF file, which consists of the writer's header and the padded tensors.

    Args:
        writer: The `gguf.GGUFWriter`, to which all keys and tensor infos have been added.
        entries: Tensors, in the order in which their infos were added.
    """
    import gguf

    parts: list[FilePart] = [_encode_header(writer)]
    for entry in entries:
        parts += [entry, bytes(-entry.nbytes % gguf.GGUF_DEFAULT_ALIGNMENT)]

    def reopen_tensors(place: AnyPath) -> dict[str, Tensor]:
        path = place if place.is_file() else place / FILE
        written, offset, tensors = CheckpointFolder(path.parent).get_file(path.name), 0, {}
        for each in parts:
            nbytes = len(each) if isinstance(each, bytes) else each.nbytes
            if isinstance(each, OutputTensor):
                span = written.get_span(offset, nbytes, description=repr(each.name))
                tensors[each.name] = Tensor.from_source(each.name, each.dtype, each.tensor.shape, span)
            offset += nbytes
        return tensors

    return ConversionPlan((PlannedFile(FILE, tuple(parts)),), {}, {}, reopen_tensors)


def _encode_header(writer: Any) -> bytes:
    """Encode the file header, including the padding before the tensor data."""
    from gguf.gguf_writer import WriterState

    buffer = BytesIO()
    writer.fout, writer.state = [buffer], WriterState.EMPTY
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.write_padding(buffer, buffer.tell())
    return buffer.getvalue()


def _rename_tensors_to_gguf(
    tensors: Mapping[str, Tensor], model_type: GGUFModelType, settings: GGUFSettings, root: AnyPath
) -> dict[str, Tensor]:
    """Rename the tensors for llama.cpp, and stack the experts of each layer.

    If llama.cpp needs them, the divisors of the rotary frequencies and a tied output matrix are added.

    Raises:
        CheckpointError: If an untied output matrix is missing, or if llama.cpp does not support a
            tensor.
    """
    renamed: dict[str, Tensor] = {}
    if settings.rope_factors:
        data = struct.pack(f"<{len(settings.rope_factors)}f", *settings.rope_factors)
        renamed["rope_freqs.weight"] = Tensor.from_source(
            "rope", "F32", (len(settings.rope_factors),), InMemorySource(data)
        )
    stacked = dict(_iter_stacked_experts(_iter_split_experts(tensors), settings, root))
    renamed |= {
        gguf_name: stacked[name]
        for gguf_name, name in _map_gguf_names_to_names(stacked, model_type, settings, root).items()
    }
    if "output.weight" not in renamed and not settings.ties_embeddings:
        raise CheckpointError(
            f"{root}: has no lm_head.weight, but tie_word_embeddings is not true; specify the config.json of "
            "this model with --config-from"
        )
    if model_type.writes_tied_head:
        renamed.setdefault("output.weight", renamed["token_embd.weight"])
    return renamed


def _map_gguf_names_to_names(
    names: Iterable[str], model_type: GGUFModelType, settings: GGUFSettings, root: AnyPath
) -> dict[str, str]:
    """Map llama.cpp's names to the parameter names in transformers.

    Args:
        names: Parameter names in transformers.
        model_type: Description of the model type.
        settings: Settings of the model, which determine the modules that may have biases.
        root: Path of the checkpoint, used in error messages.

    Returns:
        The parameter names in transformers, keyed by the names in llama.cpp.

    Raises:
        CheckpointError: If llama.cpp has no name for a parameter, if two parameters would have the
            same name, or if there is a bias although the config disables it.
    """
    import gguf

    arch = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == model_type.arch)
    # The names of one layer are enough, because all layers have the same names.
    name_map = gguf.get_tensor_name_map(arch, 1)
    names_by_gguf: dict[str, str] = {}
    for name in names:
        full = name if name.endswith((".weight", ".bias")) else f"{name}.weight"
        match, bias = _LAYER.fullmatch(full), _BIAS.fullmatch(full)
        gguf_name = name_map.get_name(f"{match[1]}.0.{match[3]}" if match else full, (".weight", ".bias"))
        gguf_name = gguf_name and gguf_name.replace("blk.0.", f"blk.{match[2]}." if match else "")
        if (
            gguf_name is None
            or gguf_name in names_by_gguf
            or (bias and bias[1] not in settings.biased_modules)
        ):
            raise CheckpointError(
                f"{root}: the tensor {name!r} does not belong to the architecture {model_type.arch} of "
                "llama.cpp; convert without --to gguf"
            )
        names_by_gguf[gguf_name] = name
    return names_by_gguf


def _iter_split_experts(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Split stacked expert tensors into one tensor per expert and projection, and yield all tensors.

    A stacked tensor (experts, ...) is split into the experts, and `gate_up_proj` into `gate_proj` and
    `up_proj`. The results are named as in `mlp.experts.0.up_proj.weight`, and matrices have the shape
    (out, in). If the experts have biases, the stacked matrices have the shape (in, out) instead, so they
    are transposed, and the columns of `gate_proj` and `up_proj` alternate. Other tensors are yielded
    unchanged, except for buffers, which are dropped.

    Yields:
        The name and the tensor of each result.
    """
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        if not module.endswith(".experts"):
            if not _BUFFER.fullmatch(name):
                yield name, tensor
            continue
        is_transposed = f"{module}.down_proj_bias" in tensors
        stem, kind = leaf.removesuffix("_bias"), "bias" if leaf.endswith("_bias") else "weight"
        for i in range(tensor.shape[0]):
            expert = select_index(tensor, 0, i)
            halves = [(stem, expert)]
            if stem == "gate_up_proj" and is_transposed:
                pairs = reshape_tensor(expert, (*expert.shape[:-1], expert.shape[-1] // 2, 2))
                halves = [("gate_proj", select_index(pairs, len(expert.shape), 0))]
                halves += [("up_proj", select_index(pairs, len(expert.shape), 1))]
            elif stem == "gate_up_proj":
                size = expert.shape[0] // 2
                halves = [
                    ("gate_proj", slice_tensor(expert, 0, 0, size)),
                    ("up_proj", slice_tensor(expert, 0, size, size)),
                ]
            for half_name, half_tensor in halves:
                weight = transpose_matrix(half_tensor) if is_transposed and kind == "weight" else half_tensor
                yield f"{module}.{i}.{half_name}.{kind}", weight


def _iter_stacked_experts(
    tensors: Iterable[tuple[str, Tensor]], settings: GGUFSettings, root: AnyPath
) -> Iterator[tuple[str, Tensor]]:
    """Stack the experts of each layer and projection into one tensor, and yield all tensors.

    Tensors that do not belong to an expert are yielded unchanged.

    Yields:
        The name and the tensor of each result. A stacked tensor is named like its experts, but
        without the expert index.

    Raises:
        CheckpointError: If the number of experts differs from the config, if an expert is missing,
            or if the experts have different shapes.
    """
    stacks: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors:
        match = _EXPERT.fullmatch(name)
        if match is None:
            yield name, tensor
        else:
            stacks.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = tensor
    count = settings.values.get("expert_count", 0)
    for name, stack in stacks.items():
        experts = [reshape_tensor(stack[i], (1, *stack[i].shape)) for i in sorted(stack)]
        if sorted(stack) != list(range(count)):
            raise CheckpointError(
                f"{root}: {name!r} has {len(stack)} experts, but config.json specifies {count} (numbers 0 "
                f"to {count - 1}); specify the config.json of this model with --config-from"
            )
        if len({expert.shape for expert in experts}) > 1:
            raise CheckpointError(
                f"{root}: the experts of {name!r} have different shapes; convert without --to gguf"
            )
        yield name, concat_tensors(name, experts, 0)


def _convert_tensor_layout(
    gguf_name: str, tensor: Tensor, model_type: GGUFModelType, settings: GGUFSettings
) -> Tensor:
    """Convert a tensor lazily to the layout and the values that llama.cpp expects.

    Depending on the model type, this function permutes the rows of the query and key projections
    for the rotary embedding, transposes linear layers, adds 1 to the weights of norms, or scales
    the queries.

    Args:
        gguf_name: Name of the tensor in llama.cpp.
        tensor: Tensor from the checkpoint.
        model_type: Description of the model type.
        settings: Settings of the model.

    Returns:
        The converted tensor, or `tensor` itself if nothing changes. If values change, the dtype of
        the result is F32.

    Raises:
        CheckpointError: If the number of rows does not match the heads in the config.
    """
    values, layer_name = settings.values, re.sub(r"blk\.\d+\.", "", gguf_name)
    if layer_name.startswith(("attn_q.", "attn_k.")):
        heads = values["head_count" if layer_name.startswith("attn_q.") else "head_count_kv"]
        size, (rows, *rest) = values["key_length"], tensor.shape
        if rows != heads * size:
            raise CheckpointError(
                f"{tensor.name}: has {rows} rows, but config.json has {heads} heads of size {size}; specify "
                "the config.json of this model with --config-from"
            )
        if model_type.interleaves_rope:
            split = (heads, 2, size // 2, *rest)
            return permute_split_dims(tensor, split, (0, 2, 1, *range(3, len(split))))
    if (
        model_type.has_transposed_linear
        and len(tensor.shape) == 2
        and layer_name.startswith(("attn_", "ffn_"))
    ):
        return transpose_matrix(tensor)
    # If queries are normalized, scale the weight of the norm, because the norm would undo a scaling of its
    # input.
    scaled = "attn_q_norm.weight" if model_type.local_rope_base else "attn_q.weight"
    factor = settings.query_scale if layer_name == scaled else 1.0
    term = factor if model_type.norms_add_one and layer_name.endswith("norm.weight") else 0.0
    if (factor, term) == (1.0, 0.0):
        return tensor
    return apply_edits(tensor, "F32", len(tensor.shape) - 1, [AffineEdit(factor, term=term)])


def _choose_ggml_type(gguf_name: str, dtype: str, shape: Sequence[int], matrix_type: str | None) -> str:
    """Choose the GGML type of a tensor.

    Args:
        gguf_name: Name of the tensor in llama.cpp.
        dtype: Safetensors dtype of the tensor.
        shape: Shape of the tensor.
        matrix_type: Requested GGML type of matrices. None to keep their dtypes.

    Returns:
        `F32` for vectors, biases, position embeddings and routers. For other matrices,
        `matrix_type` with two exceptions: `F16` if the rows cannot be divided into the blocks of a
        quantized type, and `Q8_0` instead of `MXFP4` for matrices that are not experts. If
        `matrix_type` is None, the other matrices keep their dtypes, except that `F64` becomes
        `F32`.

    Raises:
        CheckpointError: If the dtype is not supported.
    """
    if dtype not in CASTABLE_DTYPES:
        raise CheckpointError(
            f"{gguf_name}: has dtype {dtype}, which --to gguf does not support; convert without --to gguf"
        )
    needs_f32 = (
        gguf_name.startswith("position_embd")
        or ".ffn_gate_inp." in gguf_name
        or not gguf_name.endswith(".weight")
    )
    if len(shape) < 2 or needs_f32:
        return "F32"
    if matrix_type in GGML_KINDS and shape[-1] % BLOCK_ELEMENTS:
        return "F16"  # llama.cpp does the same if a row is not divisible into blocks
    if matrix_type == "MXFP4" and len(shape) < 3:
        return "Q8_0"  # only experts have the type MXFP4 in llama.cpp
    return matrix_type or ("F32" if dtype == "F64" else dtype)
