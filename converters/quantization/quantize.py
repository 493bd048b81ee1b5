"""Quantize checkpoints to formats that inference servers can load.

    quantized = quantize_checkpoint(open_checkpoint("out"), "fp8-block")
    quantized = quantize_like_base(open_checkpoint("fine-tuned"), open_checkpoint("quantized-base"))

Scales are computed only from the weights, so methods that require calibration data (GPTQ, AWQ,
NVFP4) raise an error. Weights are read and quantized lazily, when they are used.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.converters.errors import CheckpointError, DamagedCheckpointError, to_printable
from portable.converters.quantization.dequantize import (
    ACTIVATION_TENSORS,
    CONFIG_KEY,
    parse_block_shape,
    read_quantization_config,
)
from portable.converters.storage.safe_open import read_json_object_or_empty
from portable.converters.tensors.casting import parse_target_dtype, select_written_dtype
from portable.converters.tensors.dequantization import BlockShape
from portable.converters.tensors.dtypes import CASTABLE_DTYPES, QUANTIZED_DTYPES
from portable.converters.tensors.edited_rows import AffineEdit, apply_edits
from portable.converters.tensors.quantization import (
    QuantizationScheme,
    quantize_to_bytes,
    quantize_to_fp4,
    quantize_to_gpt_oss,
    quantize_to_packed_rows,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from portable.converters.checkpoint import Checkpoint
    from portable.converters.tensors.tensor import Tensor

# Names of the weights of linear layers in transformers. Routers of experts, embeddings, and GPT-2's
# transposed layers (`c_*`) do not match.
_LINEAR_WEIGHT = re.compile(
    r"(?:.+\.)?\d+\.(?:.+\.)?"
    r"(?!c_)(?:(?:\w+_)?proj(?:_\w+)?|fc\d?|fc_(?:in|out)|lin\d|dense\w*|query(?:_key_value)?|key|value"
    r"|[qkvo]|w[io123](?:_\d)?|Wqkv|W[io]|o_proj)\.weight"
)


class _QuantizationFormat(NamedTuple):
    """Quantization format that a value of `--quantize` selects.

    Attributes:
        scheme: Scheme that defines the dtype of the codes, the shape of a block, and the scales.
        quantize_weight: Function that returns the tensors of a quantized weight, keyed by name.
        build_config: Function that takes the list of modules that are not quantized, and returns
            the `quantization_config`.
    """

    scheme: QuantizationScheme
    quantize_weight: Callable[[Tensor, QuantizationScheme], dict[str, Tensor]]
    build_config: Callable[[list[str]], dict[str, Any]]


def _make_byte_quantizer(suffix: str) -> Callable[[Tensor, QuantizationScheme], dict[str, Tensor]]:
    return lambda weight, scheme: quantize_to_bytes(weight, scheme, weight.name + suffix)


def _build_fp8_config(excluded_modules: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": excluded_modules,
    }


def _make_compressed_tensors_config_builder(
    form: str, bits: int, kind: str, strategy: str, *, group: int | None = None, tokens: bool = False
) -> Callable[[list[str]], dict[str, Any]]:
    """Create a function that builds the settings of a compressed-tensors preset.

    The presets are W8A8, W4A16, FP8_DYNAMIC, and MXFP4A16.

    Args:
        form: Compression format, such as `pack-quantized`.
        bits: Number of bits per code.
        kind: `int` or `float`.
        strategy: `channel` or `group`, for the scales of the weights.
        group: Number of columns per group. None if the strategy is `channel`.
        tokens: Whether activations are quantized with a dynamic scale per token.
    """
    weights: dict[str, Any] = {
        "num_bits": bits,
        "type": kind,
        "strategy": strategy,
        "symmetric": True,
        "dynamic": False,
    }
    if group is not None:
        weights["group_size"] = group
    if form.startswith("mxfp4"):
        weights |= {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
    activations = {"num_bits": bits, "type": kind, "strategy": "token", "symmetric": True, "dynamic": True}
    group_config: dict[str, Any] = {"targets": ["Linear"], "weights": weights, "format": form}
    group_config["input_activations"] = activations if tokens else None
    return lambda kept: {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group_config},
        "ignore": kept,
    }


_FORMATS = {
    "fp8-block": _QuantizationFormat(
        QuantizationScheme("F8_E4M3", 128, 128, "inverse", "F32"),
        _make_byte_quantizer("_scale_inv"),
        _build_fp8_config,
    ),
    "fp8": _QuantizationFormat(
        QuantizationScheme("F8_E4M3", 1, 0, "range"),
        _make_byte_quantizer("_scale"),
        _make_compressed_tensors_config_builder("float-quantized", 8, "float", "channel", tokens=True),
    ),
    "mxfp4": _QuantizationFormat(
        QuantizationScheme("FP4", 1, 32, "near", "U8"),
        quantize_to_fp4,
        _make_compressed_tensors_config_builder("mxfp4-pack-quantized", 4, "float", "group", group=32),
    ),
    "int8": _QuantizationFormat(
        QuantizationScheme("I8", 1, 0, "range"),
        _make_byte_quantizer("_scale"),
        _make_compressed_tensors_config_builder("int-quantized", 8, "int", "channel", tokens=True),
    ),
    "int4": _QuantizationFormat(
        QuantizationScheme("INT4", 1, 128, "range"),
        quantize_to_packed_rows,
        _make_compressed_tensors_config_builder("pack-quantized", 4, "int", "group", group=128),
    ),
}
"""Quantization formats, keyed by the values in `portable.converters.options.QUANTIZATION_FORMS`."""


def quantize_checkpoint(checkpoint: Checkpoint, form: str, *, dtype: str = "keep") -> Checkpoint:
    """Quantize the weights of a checkpoint's linear layers.

    Each weight is quantized lazily, when it is read. Linear layers are recognized by the usual
    names of their weights in transformers, such as `layers.0.self_attn.q_proj.weight`. All other
    tensors are not quantized, for example the output head, embeddings, routers, and GPT-2's
    transposed layers. As in the reference implementations, a weight is also not quantized if its
    shape is not divisible by the block shape of the format.

    Args:
        checkpoint: Unquantized checkpoint with a `config.json`.
        form: Name of the format:

            - `fp8-block`: FP8 of transformers (`fp8`), with one scale per block of 128 x 128
            - `fp8`: FP8 of compressed-tensors, with one scale per output
            - `mxfp4`: MXFP4 of compressed-tensors, with one scale per 32 inputs
            - `int8`: INT8 of compressed-tensors, with one scale per output
            - `int4`: INT4 of compressed-tensors, with one scale per 128 inputs
        dtype: Dtype of the tensors that are not quantized, and of the weights before they are
            quantized. `"keep"` keeps the stored dtypes.

    Returns:
        The quantized checkpoint. Its `quantization_config` lists the layers that are not quantized.

    Raises:
        CheckpointError: If `form` or `dtype` is unknown, or if the checkpoint is already quantized,
            has no `config.json`, or contains a stack of experts. Also raised if there is nothing to
            quantize, because no linear layer has a known name, or because none of their shapes is
            divisible by the block shape.
    """
    quantization_format = _FORMATS.get(form)
    if quantization_format is None:
        raise CheckpointError(f"format {form!r} is unknown; specify one of {', '.join(_FORMATS)}")
    floats = _cast_unquantized_tensors(checkpoint, dtype)
    if not read_json_object_or_empty(checkpoint.companions.get("config.json")):
        raise CheckpointError(
            f"{checkpoint.root}: has no config.json in which to record the quantization; add --config-from "
            "FOLDER_OR_ID"
        )
    tensors: dict[str, Tensor] = {}
    too_small: Tensor | None = None
    excluded_modules, changed = {"lm_head"}, False  # excluded even if it is tied and therefore not stored
    height, width = quantization_format.scheme.block_height or 1, quantization_format.scheme.block_width or 1
    for name, tensor in floats.items():
        is_divisible = len(tensor.shape) == 2 and not (tensor.shape[0] % height or tensor.shape[1] % width)
        if len(tensor.shape) == 2 and tensor.dtype in CASTABLE_DTYPES and _LINEAR_WEIGHT.fullmatch(name):
            if is_divisible:
                tensors |= quantization_format.quantize_weight(tensor, quantization_format.scheme)
                changed = True
                continue
            too_small = too_small or tensor
        if len(tensor.shape) > 2 and "expert" in name:
            raise CheckpointError(
                f"{to_printable(name)}: is a stack of experts, which --quantize {form} does not support; use "
                "--quantize-like with a model whose experts are quantized"
            )
        tensors[name] = tensor
        if len(tensor.shape) == 2 and name.endswith(".weight"):
            excluded_modules.add(name.removesuffix(".weight"))
    if not changed and too_small is not None:
        block = f"{height} x {width} elements" if height > 1 else f"{width} columns"
        raise CheckpointError(
            f"{checkpoint.root}: {form} divides weights into blocks of {block}, but no linear layer has a "
            f"shape that is divisible by these blocks (for example, {to_printable(too_small.name)} has "
            f"shape {list(too_small.shape)}); use --quantize fp8 or int8, which have a scale for each row"
        )
    if not changed:
        raise CheckpointError(
            f"{checkpoint.root}: no tensor has the name of a known linear layer, so there is nothing to "
            "quantize; leave out --quantize"
        )
    return checkpoint.with_tensors(
        tensors,
        {CONFIG_KEY: quantization_format.build_config(sorted(excluded_modules))},
        checkpoint.companions,
    )


def quantize_like_base(
    checkpoint: Checkpoint, base: Checkpoint, *, dtype: str = "keep", untouched: Collection[str] = ()
) -> Checkpoint:
    """Quantize a checkpoint with the same method, layout, and settings as another checkpoint.

    The supported methods are FP8 (with one scale per block, per output channel, or per tensor),
    MXFP4, and the symmetric integer formats of compressed-tensors. Activation scales are copied
    from `base`. Weights that are not quantized in `base` stay unquantized, and floating-point weights
    get the dtypes that they have there.

    Args:
        checkpoint: Unquantized checkpoint.
        base: Quantized checkpoint to imitate.
        dtype: Dtype of the weights before they are quantized. See `quantize_checkpoint`.
        untouched: Names of weights that have the same values in both checkpoints. Their quantized
            values are copied from `base`.

    Returns:
        The quantized checkpoint, with the `quantization_config` of `base`.

    Raises:
        CheckpointError: If `base` is not quantized with a supported method, if `checkpoint` is
            already quantized, if the checkpoints have different weights, or if `dtype` is unknown.
    """
    settings = read_writable_config(base)
    method = str(settings["quant_method"])
    floats = _cast_unquantized_tensors(checkpoint, dtype)
    tensors: dict[str, Tensor] = {}
    unmatched = dict(base.tensors)
    for name, tensor in floats.items():
        codes = _quantize_weight_like_base(
            name, tensor, unmatched, settings, f"{base.root}: {CONFIG_KEY} of {method}"
        )
        for key, value in codes.items():
            base_tensor = unmatched.pop(key, None)
            if base_tensor is None:
                raise CheckpointError(
                    f"{base.root}: {to_printable(key)} is missing; specify a quantized model with the same "
                    "weights"
                )
            if tuple(base_tensor.shape) != tuple(value.shape):
                raise CheckpointError(
                    f"{base.root}: {to_printable(key)} has shape {list(base_tensor.shape)}, but the "
                    f"quantized weight of {checkpoint.root} has shape {list(value.shape)}; specify a "
                    "quantized model with the same weights"
                )
            tensors[key] = base_tensor if name in untouched else value
    for name, tensor in unmatched.items():
        if not ACTIVATION_TENSORS.fullmatch(name):
            raise CheckpointError(
                f"{checkpoint.root}: has no {to_printable(name)}, which {base.root} has; specify a quantized "
                "model with the same weights"
            )
        tensors[name] = tensor
    return checkpoint.with_tensors(tensors, {CONFIG_KEY: dict(settings)}, checkpoint.companions)


def read_writable_config(base: Checkpoint) -> Mapping[str, Any]:
    """Read a checkpoint's quantization settings, and check that they can be used for new weights.

    The allowed methods are `fp8`, `fbgemm_fp8`, `mxfp4`, `compressed-tensors`, and `modelopt`. The
    other settings are not checked.

    Raises:
        CheckpointError: If the checkpoint is not quantized, or if its quantization method is not
            allowed. Other methods usually require calibration data.
    """
    settings = read_quantization_config(base)
    if settings is None:
        raise CheckpointError(
            f"{base.root}: is not quantized, because config.json has no {CONFIG_KEY}; specify a quantized "
            "model"
        )
    method = settings.get("quant_method")
    if method not in ("fp8", "fbgemm_fp8", "mxfp4", "compressed-tensors", "modelopt"):
        raise CheckpointError(
            f"{base.root}: {CONFIG_KEY}: new weights cannot be written with quant_method "
            f"{to_printable(str(method))}; quantize the model with a tool that supports this method"
        )
    return settings


def _quantize_weight_like_base(
    name: str, weight: Tensor, base: Mapping[str, Tensor], settings: Mapping[str, Any], location: str
) -> dict[str, Tensor]:
    """Quantize a weight in the layout that the same weight has in another checkpoint.

    Args:
        name: Name of the weight.
        weight: Floating-point weight.
        base: Tensors of the quantized checkpoint, keyed by name.
        settings: Quantization settings of the quantized checkpoint.
        location: Path and method of the quantized checkpoint, used in error messages.

    Returns:
        The codes and scales, keyed by their names in the quantized checkpoint. If the weight is not
        quantized there, only the weight. A floating-point weight is cast to its dtype in that
        checkpoint, and an integer or bool tensor is not changed. If the weight is missing there, the
        unchanged weight.

    Raises:
        CheckpointError: If the layout requires calibration data, if the codes are FP4 codes in an FP8
            checkpoint, if the shapes of the codes or scales do not match the weight, if a scale is
            missing, or if the block shape in the settings is not valid.
    """
    refused = [f"{name}_{suffix}" for suffix in ("zero_point", "g_idx", "global_scale", "scale_2")]
    if other := next((key for key in refused if key in base), None):
        raise CheckpointError(
            f"{location}: {to_printable(other)} may depend on calibration data; quantize the model with "
            "the tool that computed this tensor"
        )
    if (packed := base.get(f"{name}_packed")) is not None:
        group_scale = base.get(f"{name}_scale", packed)
        if any(len(tensor.shape) < 2 or not tensor.shape[-1] for tensor in (weight, packed, group_scale)):
            raise _build_shape_error(name, weight, packed, location)
        width = weight.shape[-1] // group_scale.shape[-1]
        bits = 4 if packed.dtype == "U8" else 32 * packed.shape[-1] // weight.shape[-1]
        if width < 1 or not 1 <= bits <= 8:
            raise _build_shape_error(name, weight, packed, location)
        if packed.dtype == "U8":
            return quantize_to_fp4(weight, QuantizationScheme("FP4", 1, width, "near", "U8"))
        tensors = quantize_to_packed_rows(
            weight, QuantizationScheme(f"INT{bits}", 1, width, "range", group_scale.dtype)
        )
        return {key: value for key, value in tensors.items() if key in base or not key.endswith("_shape")}
    if f"{name}_blocks" in base:
        return quantize_to_gpt_oss(weight, QuantizationScheme("FP4", 1, 32, "floor", "U8"))
    codes = base.get(name)
    if codes is None or codes.dtype in CASTABLE_DTYPES:
        return {name: weight if codes is None else _cast_tensor(weight, codes.dtype)}
    # transformers also reads scales that are named like in DeepSeek V4: `X.scale` for `X.weight`.
    other_scale_name = f"{name.removesuffix('weight')}scale" if name.endswith(".weight") else ""
    for scale_name, rule in (
        (f"{name}_scale_inv", "inverse"),
        (f"{name}_scale", "range"),
        (other_scale_name, "inverse"),
    ):
        if (scale := base.get(scale_name)) is not None and codes.dtype in ("F8_E4M3", "F8_E5M2", "I8"):
            if codes.dtype == "I8" and settings.get("quant_method") == "fp8":
                raise CheckpointError(
                    f"{location}: {to_printable(name)} contains FP4 codes, which --quantize-like cannot "
                    "write; use --quantize fp8-block, or --quantize-like with a model that has FP8 experts"
                )
            if len(weight.shape) < 2:
                raise _build_shape_error(name, weight, codes, location)
            rows, columns = weight.shape[-2:]
            block = parse_block_shape(settings, location)
            if scale.numel == 1:
                block = BlockShape(0, 0)
            elif block is None:
                grid = scale.shape[-2:] if len(scale.shape) == len(weight.shape) else (rows, 1)
                block = BlockShape(-(-rows // max(1, grid[0])), -(-columns // max(1, grid[1])))
            scheme = QuantizationScheme(codes.dtype, block.rows, block.columns, rule, scale.dtype)
            return quantize_to_bytes(weight, scheme, scale_name, tuple(scale.shape))
    if codes.dtype == weight.dtype or codes.dtype not in QUANTIZED_DTYPES:
        return {name: weight}
    raise DamagedCheckpointError(
        f"{location}: {to_printable(name)} has dtype {codes.dtype}, but the tensor with its scale is missing"
    )


def _build_shape_error(name: str, weight: Tensor, codes: Tensor, location: str) -> CheckpointError:
    return CheckpointError(
        f"{location}: the quantized values of {to_printable(name)} have shape {list(codes.shape)}, which "
        f"does not match the weight of shape {list(weight.shape)}; specify a quantized version of the same "
        "model"
    )


def _cast_unquantized_tensors(checkpoint: Checkpoint, dtype: str) -> dict[str, Tensor]:
    """Cast the tensors of an unquantized checkpoint, lazily.

    Args:
        checkpoint: Checkpoint whose tensors to cast.
        dtype: Target dtype for floating-point tensors, or `"keep"`. See `ContentOptions`.

    Returns:
        The tensors, keyed by name.

    Raises:
        CheckpointError: If the checkpoint is already quantized, or if the dtype is unknown or a block
            format of GGUF.
    """
    if read_quantization_config(checkpoint) is not None:
        raise CheckpointError(f"{checkpoint.root}: is already quantized; add --dequantize")
    target = parse_target_dtype(dtype)
    return {name: _cast_tensor(tensor, target) for name, tensor in checkpoint.tensors.items()}


def _cast_tensor(tensor: Tensor, dtype: str | None) -> Tensor:
    written = select_written_dtype(tensor, dtype)
    return tensor if written == tensor.dtype else apply_edits(tensor, written, 1, [AffineEdit()])
