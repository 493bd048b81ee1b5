"""Dequantize checkpoints according to the `quantization_config` in their `config.json`.

    floats = dequantize_checkpoint(open_checkpoint("gpt-oss-20b"), "bfloat16")

Weights are read and computed when they are used. An error is raised for an unknown method, for an
unknown key of `quantization_config` (unless its value is None, False, empty, or the default of the
method), and for codes or scales that do not belong to a weight. The error contains the name of the
method, key, or tensor.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.converters.errors import (
    CheckpointError,
    DamagedCheckpointError,
    UnsupportedQuantizationError,
    to_printable,
)
from portable.converters.limits import MAX_JSON_TENSOR
from portable.converters.names.code_names import is_quantized_code
from portable.converters.options import DTYPES, is_unset
from portable.converters.storage.safe_open import read_json_object_or_empty
from portable.converters.tensors import dequantization
from portable.converters.tensors.dequantization import BlockShape, NestedQuantization

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from portable.converters.checkpoint import Checkpoint
    from portable.converters.tensors.tensor import Tensor

CONFIG_KEY = "quantization_config"
"""Key of the quantization settings in `config.json`."""
# Files that repeat the quantization settings for other programs.
_REDUNDANT_CONFIG_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
# Names of tensors, such as the scales of activations or of the KV cache, that a floating-point model does not
# need.
ACTIVATION_TENSORS = re.compile(
    r"(.+[._])?(input|output|activation|prob_output|[kvq])_(scale|zero_point|global_scale|scale_ub)|.+\.g_idx"
)
_SCALE_TENSORS = re.compile(
    r".+(_scale(_inv|_2)?|_zero_point|_global_scale|_scales|_shape|\.(scales|qzeros|absmax|SCB|quant_map))"
)
_DEFAULTS = Path(__file__).parent / "default_settings.json"
_IGNORED_KEYS = frozenset(
    {"quant_method", "modules_to_not_convert", "modules_to_convert", "ignore", "ignored_layers", "dequantize"}
)


def _split_words(text: str) -> frozenset[str]:
    return frozenset(text.split())


class _NameAndStem(NamedTuple):
    """Name of a tensor, and the same name without its suffix."""

    name: str
    stem: str


class _QuantizedWeights:
    """Tensors of a checkpoint while it is being dequantized.

    Args:
        tensors: Tensors of the checkpoint, keyed by name.
        dtype: Safetensors dtype of the dequantized weights.

    Attributes:
        remaining: Tensors that have not yet been used to dequantize a weight, keyed by name.
        dequantized: Dequantized weights, keyed by name.
    """

    def __init__(self, tensors: Mapping[str, Tensor], dtype: str) -> None:
        self.remaining = dict(tensors)
        self.dequantized: dict[str, Tensor] = {}
        self.dtype = dtype

    def iter_by_suffix(self, *suffixes: str) -> Iterator[_NameAndStem]:
        """Yield the names of the tensors in `remaining` that end with one of the suffixes.

        Each name is yielded together with its stem, which is the name without the suffix.
        `remaining` contains the tensors that have not yet been used to dequantize a weight. The
        caller may remove tensors from it during the iteration.

        Args:
            *suffixes: Suffixes of tensor names.
        """
        for name in list(self.remaining):
            for end in suffixes:
                if name.endswith(end) and name in self.remaining:
                    yield _NameAndStem(name, name.removesuffix(end))

    def pop_tensor(self, name: str) -> Tensor | None:
        """Remove and return one of the remaining tensors, or return None if it does not exist."""
        return self.remaining.pop(name, None)

    def pop_required_tensor(self, name: str, required_by: str) -> Tensor:
        """Remove and return one of the remaining tensors. It must exist.

        Args:
            name: Name of the tensor.
            required_by: Name of the tensor that requires it, used in the error message.

        Raises:
            CheckpointError: If there is no such tensor.
        """
        tensor = self.remaining.pop(name, None)
        if tensor is None:
            raise DamagedCheckpointError(
                f"{to_printable(required_by)}: requires {to_printable(name)}, which is missing"
            )
        return tensor

    def dequantize_scaled_bytes(self, *scale_suffixes: str, block: BlockShape | None = None) -> None:
        """Dequantize all matrices that consist of 8-bit codes and a tensor of scales.

        The codes are FP8 or INT8. The dequantized weights are added to `dequantized`. Their codes,
        scales, and zero points are removed from `remaining`. Weights without scales and vectors stay
        in `remaining`.

        Args:
            scale_suffixes: Possible suffixes that turn the name of a weight into the name of its
                scales, such as `_scale`.
            block: Shape of the blocks that share a scale, from the quantization settings. If None,
                it is inferred from the shapes of the tensors.

        Raises:
            CheckpointError: If the shape of the scales or zero points does not match the weight.
        """
        for name, tensor in list(self.remaining.items()):
            if tensor.dtype not in ("F8_E4M3", "F8_E5M2", "I8") or len(tensor.shape) < 2:
                continue
            scale = next(
                (
                    candidate
                    for end in scale_suffixes
                    if (candidate := self.pop_tensor(name + end)) is not None
                ),
                None,
            )
            if scale is None:
                continue
            zero = self.pop_tensor(f"{name}_zero_point")
            weight = self.remaining.pop(name)
            self.dequantized[name] = dequantization.dequantize_bytes(
                name, self.dtype, weight, scale, block=block, zero_point=zero
            )


def dequantize_checkpoint(checkpoint: Checkpoint, dtype: str = "bfloat16") -> Checkpoint:
    """Dequantize a checkpoint. Weights are computed when they are read.

    Example:
        >>> floats = dequantize_checkpoint(open_checkpoint("gpt-oss-20b"))

    Args:
        checkpoint: Checkpoint with a `quantization_config` in its `config.json`, or with a
            `hf_quant_config.json`.
        dtype: Dtype of the dequantized weights: `bfloat16`, `float16`, or `float32`. Other tensors keep
            their dtypes.

    Returns:
        The checkpoint with dequantized weights. The quantization settings, the companion files that
        repeat them, and the scales of activations and of the KV cache are removed.

    Raises:
        CheckpointError: If `dtype` is not supported, if the checkpoint is not quantized, if its method
            or one of its settings is not supported, if scales are missing or do not match their
            weights, or if codes or scales do not belong to a weight.
    """
    target = DTYPES.get(dtype)
    if target is None or target not in ("BF16", "F16", "F32"):
        raise CheckpointError(f"dtype {dtype!r} is not supported; specify bfloat16, float16 or float32")
    settings = read_quantization_config(checkpoint)
    if settings is None:
        raise CheckpointError(
            f"{checkpoint.root}: config.json has no {CONFIG_KEY}, so there is nothing to dequantize; leave "
            "out --dequantize"
        )
    method = _get_quant_method(settings)
    if method not in METHODS:
        raise CheckpointError(
            f"{checkpoint.root}: {CONFIG_KEY}: quant_method {to_printable(repr(method))} is not one of "
            f"{', '.join(METHODS)}; dequantize the checkpoint with the program that wrote it"
        )
    dequantize, supported_keys = METHODS[method]
    location = f"{checkpoint.root}: {CONFIG_KEY} of {method}"
    defaults = _read_defaults()[method]
    used = {key for key, value in settings.items() if not is_unset(value) and value != defaults.get(key)}
    if unknown := sorted(used - supported_keys - _IGNORED_KEYS):
        raise UnsupportedQuantizationError(
            f"{location}: {to_printable(unknown[0])} is an unknown setting, which may change the weights"
        )
    weights = _QuantizedWeights(checkpoint.tensors, target)
    dequantize(weights, settings, location)
    unquantized = {
        name: tensor for name, tensor in weights.remaining.items() if not ACTIVATION_TENSORS.fullmatch(name)
    }
    for name, tensor in unquantized.items():
        codes = tensor.dtype in ("F8_E4M3", "F8_E5M2") or len(tensor.shape) > 1
        if (codes and is_quantized_code(name, tensor, checkpoint.tensors)) or _SCALE_TENSORS.fullmatch(name):
            raise UnsupportedQuantizationError(
                f"{location}: the tensor {to_printable(name)} does not belong to any weight that can be "
                "dequantized"
            )
    order = [*checkpoint.tensors, *weights.dequantized]
    tensors = {
        name: (weights.dequantized | unquantized)[name]
        for name in order
        if name in weights.dequantized or name in unquantized
    }
    files = {
        name: path for name, path in checkpoint.companions.items() if name not in _REDUNDANT_CONFIG_FILES
    }
    # DeepSeek V4 stores the dtype of its quantized experts (`expert_dtype`) outside of these settings.
    removed_settings = dict.fromkeys((CONFIG_KEY, "compression_config", "expert_dtype"))
    return checkpoint.with_tensors(tensors, removed_settings, files)


@cache
def _read_defaults() -> dict[str, dict[str, Any]]:
    """Read the default values of quantization settings, keyed by `quant_method` and setting.

    The quantization libraries also write settings that have their default values. A setting with
    its default value is accepted even if no other value of the setting is supported. The result is
    cached and must not be changed.
    """
    table: dict[str, dict[str, Any]] = json.loads(_DEFAULTS.read_bytes())
    return table


def read_quantization_config(checkpoint: Checkpoint) -> Mapping[str, Any] | None:
    """Read the quantization settings from a checkpoint's `config.json` or `hf_quant_config.json`.

    In the `config.json`, the settings are found by `find_quantization_config`. Settings in the
    `hf_quant_config.json` get the `quant_method` `modelopt`, unless they contain another method.

    Returns:
        The settings. None if the checkpoint is not quantized. Also None if the checkpoint has been
        quantized or dequantized in memory, because the settings in the files do not apply to its
        tensors. After quantization, `checkpoint.config` contains the new settings under the key
        `quantization_config`. After dequantization, the value of this key is None.
    """
    if CONFIG_KEY in checkpoint.config:
        return None
    settings = find_quantization_config(read_json_object_or_empty(checkpoint.companions.get("config.json")))
    if settings is None and "hf_quant_config.json" in checkpoint.companions:
        modelopt_settings = read_json_object_or_empty(checkpoint.companions["hf_quant_config.json"]).get(
            "quantization"
        )
        if isinstance(modelopt_settings, dict):
            settings = {"quant_method": "modelopt", **modelopt_settings}
    return settings


def find_quantization_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Find the quantization settings in a `config.json` or in one of its nested configs.

    The settings have the key `quantization_config` or `compression_config`. The top level is
    searched first, and then the configs directly below it. Empty settings are ignored.

    Returns:
        The quantization settings that are found first, or None if there are none.
    """
    for part in (config, *(part for part in config.values() if isinstance(part, dict))):
        for key in (CONFIG_KEY, "compression_config"):
            if isinstance(part.get(key), dict) and part[key]:
                settings: Mapping[str, Any] = part[key]
                return settings
    return None


def can_dequantize(settings: Mapping[str, Any]) -> bool:
    """Return whether `dequantize_checkpoint` supports the method of a `quantization_config`.

    The other settings are not checked, so `dequantize_checkpoint` may still raise an error.
    """
    return _get_quant_method(settings) in METHODS


def _get_quant_method(settings: Mapping[str, Any]) -> str:
    """Return the `quant_method` of quantization settings as a string, or `""` if it is missing.

    In transformers, the method may be an enum, whose value is returned. Settings of bitsandbytes
    may lack the method. If `load_in_8bit` or `load_in_4bit` is true, the result is then
    `"bitsandbytes"`.
    """
    has_bitsandbytes_setting = settings.get("load_in_8bit") or settings.get("load_in_4bit")
    method = settings.get("quant_method") or ("bitsandbytes" if has_bitsandbytes_setting else "")
    return str(getattr(method, "value", method))


def parse_block_shape(settings: Mapping[str, Any], location: str) -> BlockShape | None:
    """Return the `weight_block_size` of quantization settings, or None if it is missing.

    Args:
        settings: Quantization settings.
        location: Path of the checkpoint and name of the quantization method, used in error
            messages.

    Raises:
        CheckpointError: If the value is not a list of two positive integers.
    """
    block = settings.get("weight_block_size")
    if block is None:
        return None
    if (
        isinstance(block, list)
        and len(block) == 2
        and all(isinstance(n, int) and 0 < n < 1 << 30 for n in block)
    ):
        return BlockShape(block[0], block[1])
    raise UnsupportedQuantizationError(
        f"{location}: weight_block_size {to_printable(repr(block))} is not a list of two positive integers"
    )


def _check_setting(settings: Mapping[str, Any], key: str, allowed: tuple[Any, ...], location: str) -> None:
    """Check that a quantization setting has a supported value.

    With an unsupported value, the quantized weights would have to be decoded differently.

    Args:
        settings: Quantization settings, as in `quantization_config`.
        key: Name of the setting.
        allowed: Supported values.
        location: Prefix of the error message.

    Raises:
        CheckpointError: If the setting has a value that is not supported. A setting that is
            missing, None, False, or empty is accepted.
    """
    if not is_unset(settings.get(key)) and settings[key] not in allowed:
        values = ", ".join(str(value) for value in allowed)
        raise UnsupportedQuantizationError(
            f"{location}: {key} {to_printable(repr(settings[key]))} is not supported (supported: {values})"
        )


_COMPRESSED_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "dense",
)


# -- methods -------------------------------------------------------------------------------------------------


def _dequantize_fp8(weights: _QuantizedWeights, settings: Mapping[str, Any], location: str) -> None:
    """Dequantize transformers' FP8 weights, and FP4 experts in the same checkpoint.

    As in transformers (`Fp8Dequantize`), an I8 weight contains FP4 codes, two per byte, and the
    scales of `X.weight` may be named `X.scale` instead of `X.weight_scale_inv`. DeepSeek V4 has both.
    See `_Method.dequantize`.
    """
    block = parse_block_shape(settings, location)
    _check_setting(settings, "expert_dtype", ("fp8", "fp4"), location)
    for name, stem in weights.iter_by_suffix(".scale"):
        weight = weights.remaining.get(f"{stem}.weight")
        if weight is not None and weight.dtype in ("F8_E4M3", "F8_E5M2", "I8"):
            weights.remaining[f"{stem}.weight_scale_inv"] = weights.remaining.pop(name)
    for name, stem in weights.iter_by_suffix("_scale_inv"):
        if (packed := weights.remaining.get(stem)) is not None and packed.dtype == "I8":
            scale, packed = weights.remaining.pop(name), weights.remaining.pop(stem)
            weights.dequantized[stem] = dequantization.dequantize_fp4(stem, weights.dtype, packed, scale)
    weights.dequantize_scaled_bytes("_scale_inv", "_scale", block=block)


def _dequantize_mxfp4(weights: _QuantizedWeights, settings: Mapping[str, Any], location: str) -> None:
    """Dequantize GPT-OSS's MXFP4 weights. See `_Method.dequantize`."""
    for name, stem in weights.iter_by_suffix("_blocks"):
        scales = weights.pop_required_tensor(f"{stem}_scales", name)
        weights.dequantized[stem] = dequantization.dequantize_gpt_oss(
            stem, weights.dtype, weights.remaining.pop(name), scales
        )


def _dequantize_compressed_tensors(
    weights: _QuantizedWeights, settings: Mapping[str, Any], location: str
) -> None:
    """Dequantize weights in the format of the compressed-tensors library.

    The quantized values (codes) of a weight are packed, or stored as one byte each.

    Raises:
        CheckpointError: If a setting or a layout is not supported.
    """
    for key in ("sparsity_config", "transform_config"):
        setting = settings.get(key)
        if setting and not (isinstance(setting, dict) and setting.get("format") == "dense"):
            raise UnsupportedQuantizationError(f"{location}: weights with a {key} cannot be dequantized")
    groups = settings.get("config_groups")
    bits: set[int] = set()
    block = None
    for group in groups.values() if isinstance(groups, dict) else ():
        group = group if isinstance(group, dict) else {}
        if group.get("format") is not None:
            _check_setting(group, "format", _COMPRESSED_FORMATS, location)
        described = group.get("weights")
        for key, value in described.items() if isinstance(described, dict) else ():
            if key == "num_bits" and isinstance(value, int):
                bits.add(value)
            if key == "block_structure" and value is not None:
                block = parse_block_shape({"weight_block_size": value}, location)
    _check_setting(settings, "quantization_status", ("compressed", "frozen"), location)
    for name, stem in weights.iter_by_suffix(".weight_packed"):
        _dequantize_packed(weights, name, f"{stem}.weight", bits or {2, 4, 8})
    weights.dequantize_scaled_bytes("_scale", block=block)


def _dequantize_packed(
    weights: _QuantizedWeights, name: str, weight_name: str, possible_bits: set[int]
) -> None:
    """Dequantize a packed weight of compressed-tensors.

    Args:
        weights: Tensors of the checkpoint.
        name: Name of the tensor with the packed codes, which ends in `.weight_packed`.
        weight_name: Name of the dequantized weight.
        possible_bits: Numbers of bits per code that occur in the settings, for example 4 and 8. A
            weight does not store its number of bits, so the number is inferred: exactly one of
            these numbers must fit the shapes of the weight and of the packed codes. Ignored for FP4
            codes.

    Raises:
        CheckpointError: If a tensor is missing, or if the shapes do not determine the number of
            bits.
    """
    packed = weights.remaining.pop(name)
    scale = weights.pop_required_tensor(f"{weight_name}_scale", name)
    if packed.dtype == "U8":
        global_scale = weights.pop_tensor(f"{weight_name}_global_scale")
        weights.dequantized[weight_name] = dequantization.dequantize_fp4(
            weight_name, weights.dtype, packed, scale, global_scale_divisor=global_scale
        )
        return
    shape_tensor = weights.pop_required_tensor(f"{weight_name}_shape", name)
    if shape_tensor.dtype not in ("I64", "I32") or shape_tensor.shape != (2,):
        raise DamagedCheckpointError(
            f"{to_printable(shape_tensor.name)}: does not contain the shape of the weight as two integers"
        )
    rows, columns = (int(size) for size in shape_tensor.read())
    width = packed.shape[-1] if packed.shape else 0
    # The number of bits is not stored with the weight, so use the only number in the settings that fits the
    # shapes.
    fitting = [n for n in range(1, 9) if n in possible_bits and -(-columns * n // 32) == width]
    if len(fitting) != 1 or rows < 1 or columns < 1:
        raise UnsupportedQuantizationError(
            f"{to_printable(name)}: has shape {list(packed.shape)}, which does not match {rows} x {columns} "
            f"codes of {' or '.join(sorted(to_printable(str(n)) for n in possible_bits))} bits"
        )
    zero = weights.pop_tensor(f"{weight_name}_zero_point")
    groups = weights.pop_tensor(f"{weight_name}_g_idx")
    # All values are -1 if the groups are consecutive columns.
    if groups is not None and (groups.read() < 0).all():
        groups = None
    weights.dequantized[weight_name] = dequantization.dequantize_packed_rows(
        weight_name,
        weights.dtype,
        packed,
        scale,
        (rows, columns),
        fitting[0],
        zero_point=zero,
        column_groups=groups,
    )


def _dequantize_gptq(weights: _QuantizedWeights, settings: Mapping[str, Any], location: str) -> None:
    """Dequantize GPTQ weights with 2, 3, 4 or 8 bits. See `_Method.dequantize`."""
    _check_setting(settings, "pack_dtype", ("int32",), location)
    _check_setting(settings, "checkpoint_format", ("gptq", "gptq_v2"), location)
    _check_setting(settings, "format", ("gptq", "gptq_v2"), location)
    _check_setting(settings, "bits", (2, 3, 4, 8), location)
    storage_format = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    for name, stem in weights.iter_by_suffix(".qweight"):
        rest = ("qzeros", "scales", "g_idx")
        parts = {
            "qweight": weights.remaining.pop(name),
            **{k: weights.pop_required_tensor(f"{stem}.{k}", name) for k in rest},
        }
        weight = f"{stem}.weight"
        weights.dequantized[weight] = dequantization.dequantize_gptq(
            weight,
            weights.dtype,
            parts,
            settings.get("bits"),
            zero_point_offset=int(storage_format == "gptq"),
        )


def _dequantize_awq(weights: _QuantizedWeights, settings: Mapping[str, Any], location: str) -> None:
    """Dequantize 4-bit AWQ weights in the `gemm` layout. See `_Method.dequantize`."""
    _check_setting(settings, "version", ("gemm", "GEMM"), location)
    for key in ("bits", "w_bit"):
        _check_setting(settings, key, (4,), location)
    for name, stem in weights.iter_by_suffix(".qweight"):
        parts = {"qweight": weights.remaining.pop(name)}
        parts |= {key: weights.pop_required_tensor(f"{stem}.{key}", name) for key in ("qzeros", "scales")}
        weights.dequantized[f"{stem}.weight"] = dequantization.dequantize_awq(
            f"{stem}.weight", weights.dtype, parts
        )


def _dequantize_bitsandbytes(weights: _QuantizedWeights, settings: Mapping[str, Any], location: str) -> None:
    """Dequantize bitsandbytes' NF4, FP4, and LLM.int8 weights. See `_Method.dequantize`."""
    for name, weight in weights.iter_by_suffix(
        ".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4"
    ):
        state = _read_quant_state(weights.remaining.pop(name))
        keys, nested = ["absmax", "quant_map"], None
        if "nested_blocksize" in state:
            keys += ["nested_absmax", "nested_quant_map"]
            nested = NestedQuantization(int(state["nested_blocksize"]), float(state["nested_offset"]))
        parts = {key: weights.pop_required_tensor(f"{weight}.{key}", name) for key in keys}
        packed = weights.pop_required_tensor(weight, name)
        shape, block = tuple(int(size) for size in state["shape"]), int(state["blocksize"])
        weights.dequantized[weight] = dequantization.dequantize_bnb_4bit(
            weight, weights.dtype, packed, parts, shape, block, nested
        )
    for name, stem in weights.iter_by_suffix(".SCB"):
        weight = f"{stem}.weight"
        form = weights.pop_tensor(f"{weight}_format")
        if form is not None and (form.numel != 1 or form.read().reshape(-1)[0] != 0):
            raise UnsupportedQuantizationError(
                f"{to_printable(form.name)}: the weight has a GPU-specific 8-bit layout of bitsandbytes, "
                "which is not supported"
            )
        codes = weights.pop_required_tensor(weight, name)
        weights.dequantized[weight] = dequantization.dequantize_bnb_8bit(
            weight, weights.dtype, codes, weights.remaining.pop(name)
        )


def _read_quant_state(tensor: Tensor) -> dict[str, Any]:
    """Read the JSON state that bitsandbytes stores for a 4-bit weight.

    Raises:
        CheckpointError: If the tensor does not contain a valid state.
    """
    try:
        if tensor.dtype != "U8" or tensor.nbytes > MAX_JSON_TENSOR:
            raise ValueError
        state = json.loads(bytes(tensor.read()))
        sizes = [*state["shape"], state["blocksize"], state.get("nested_blocksize", 1)]
        if not state["shape"] or any(not isinstance(n, int) or not 0 < n < 1 << 40 for n in sizes):
            raise ValueError
        if "nested_blocksize" in state:
            float(state["nested_offset"])
        fields: dict[str, Any] = state
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError):
        raise UnsupportedQuantizationError(
            f"{to_printable(tensor.name)}: does not contain a valid quantization state of bitsandbytes"
        ) from None
    return fields


def _dequantize_modelopt(weights: _QuantizedWeights, settings: Mapping[str, Any], location: str) -> None:
    """Dequantize ModelOpt's NVFP4 and FP8 weights. See `_Method.dequantize`."""
    _check_setting(settings, "quant_algo", ("FP8", "NVFP4"), location)
    for name, stem in weights.iter_by_suffix(".weight_scale_2"):
        weight = f"{stem}.weight"
        packed, scale = (
            weights.pop_required_tensor(weight, name),
            weights.pop_required_tensor(f"{weight}_scale", name),
        )
        global_scale = weights.remaining.pop(name)
        weights.dequantized[weight] = dequantization.dequantize_fp4(
            weight, weights.dtype, packed, scale, global_scale=global_scale
        )
    weights.dequantize_scaled_bytes("_scale")


class _Method(NamedTuple):
    """Quantization method whose weights can be dequantized.

    Attributes:
        dequantize: Function that dequantizes all weights of a checkpoint. Its arguments are the
            tensors, the quantization settings, and the location to use in error messages. It moves
            the tensors that it uses out of `_QuantizedWeights.remaining`, and adds the weights to
            `_QuantizedWeights.dequantized`.
        supported_keys: Keys of `quantization_config` that the function reads, or that do not affect
            the weights.
    """

    dequantize: Callable[[_QuantizedWeights, Mapping[str, Any], str], None]
    supported_keys: frozenset[str]


METHODS: dict[str, _Method] = {
    "fp8": _Method(
        _dequantize_fp8, _split_words("activation_scheme expert_dtype fmt weight_block_size scale_fmt")
    ),
    "fbgemm_fp8": _Method(_dequantize_fp8, frozenset({"activation_scale_ub"})),
    "mxfp4": _Method(_dequantize_mxfp4, frozenset()),
    "compressed-tensors": _Method(
        _dequantize_compressed_tensors,
        _split_words(
            "config_groups format global_compression_ratio kv_cache_scheme quantization_status "
            "run_compressed sparsity_config transform_config version"
        ),
    ),
    "gptq": _Method(
        _dequantize_gptq,
        _split_words(
            "backend batch_size bits block_name_to_quantize cache_block_outputs checkpoint_format "
            "damp_percent dataset desc_act exllama_config format group_size is_marlin_format lm_head "
            "max_input_length meta model_file_base_name model_name_or_path modules_in_block_to_quantize "
            "module_name_preceding_first_block pack_dtype pad_token_id static_groups sym tokenizer "
            "true_sequential use_cuda_fp16 use_exllama"
        ),
    ),
    "awq": _Method(
        _dequantize_awq,
        _split_words(
            "backend bits do_fuse exllama_config fuse_max_seq_len group_size modules_to_fuse q_group_size "
            "version w_bit zero_point"
        ),
    ),
    "bitsandbytes": _Method(
        _dequantize_bitsandbytes,
        _split_words(
            "_load_in_4bit _load_in_8bit bnb_4bit_compute_dtype bnb_4bit_quant_storage bnb_4bit_quant_type "
            "bnb_4bit_use_double_quant llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight "
            "llm_int8_skip_modules llm_int8_threshold load_in_4bit load_in_8bit"
        ),
    ),
    "modelopt": _Method(
        _dequantize_modelopt,
        _split_words(
            "config_groups exclude_modules group_size kv_cache_quant_algo kv_cache_scheme producer quant_algo"
        ),
    ),
}
"""Supported methods, keyed by `quant_method`."""
