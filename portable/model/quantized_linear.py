"""Frozen linear layers with 4-bit or 8-bit weights, based on bitsandbytes kernels.

A quantized weight and its scales are stored together as raw bytes in one parameter, whose nominal
dtype is the compute dtype. FSDP2 therefore shards and gathers it like any other parameter, without
a cast that would change the bytes.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from portable.model.weight_sources import ComputedTensor, to_torch
from portable.private import torch_internals
from portable.private.bitsandbytes_internals import import_bitsandbytes

if TYPE_CHECKING:
    from torch import Tensor

    from portable.model.weight_sources import ReadableTensor

QUANTIZATION_KINDS = ("nf4", "int8")
BLOCK_ELEMENTS, OUTER_BLOCK_SCALES = 64, 256
"""Number of weights that share a scale, and number of scales that share a second-level scale, as in
the QLoRA paper."""
_ELEMENTS_QUANTIZED_AT_ONCE = 1 << 20  # elements per quantization call, a multiple of BLOCK_ELEMENTS
_ALIGNMENT_BYTES = 16


class QuantizedLinear(nn.Module):
    """Linear layer with a quantized, frozen weight.

    Gradients flow only to the input and, if it is trained, to the bias. The bits of a new layer
    are uninitialized. :func:`build_lazy_quantized_weight` computes them from a float weight.

    Args:
        linear: Layer to replace. Its bias is kept.
        kind: ``nf4`` (normal floats in blocks, with double quantization) or ``int8`` (one scale
            per row). With ``int8``, the inputs are also rounded to 8 bits. Unlike in
            ``LLM.int8()``, outliers are not computed separately, because the host would have to
            wait for the device.
        dtype: Compute dtype.

    Attributes:
        bits: The scales and the quantized weight as raw bytes, viewed in the compute dtype.
    """

    def __init__(self, linear: nn.Linear, kind: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.out_features, self.kind = linear.in_features, linear.out_features, kind
        sizes = [4 * n if i == 0 else n for i, n in enumerate(self._compute_part_sizes())]
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)
        self._byte_ranges = [(start, start + size) for start, size in zip(starts, sizes, strict=False)]
        words = torch.empty(starts[-1] // dtype.itemsize, dtype=dtype, device=linear.weight.device)
        self.bits = nn.Parameter(words, requires_grad=False)
        self.bias = linear.bias

    @property
    def num_elements(self) -> int:
        """Number of elements of the weight before quantization."""
        return self.in_features * self.out_features

    def _compute_part_sizes(self) -> list[int]:
        """Return the sizes of the sections of ``bits``, which stores the quantized weight.

        The first section contains fp32 values, and its size is the number of values. The other
        sections contain bytes, and their sizes are in bytes. The codes are the quantized weight
        elements.

        Returns:
            For ``int8``, two sizes: scales (fp32) and codes. For ``nf4``, three sizes: second-level
            quantization of the scales (fp32, one offset and the second-level scales), quantized
            scales, and codes.
        """
        if self.kind == "int8":
            return [self.out_features, self.num_elements]
        blocks = -(-self.num_elements // BLOCK_ELEMENTS)
        return [1 + -(-blocks // OUTER_BLOCK_SCALES), blocks, -(-self.num_elements // 2)]

    def _split_bits(self) -> tuple[Tensor, ...]:
        """Return views of the sections of ``bits``. See :meth:`_compute_part_sizes`.

        Returns:
            An fp32 tensor, followed by one or two uint8 tensors.
        """
        raw = self.bits.view(torch.uint8)
        first, *others = (raw[start:stop] for start, stop in self._byte_ranges)
        return first.view(torch.float32), *others

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute the output of the layer in the compute dtype.

        For meta and fake inputs, as in trial passes and the planner, only the output shape is
        computed, without bitsandbytes. The output for meta inputs has the dtype of the inputs.

        Args:
            inputs: Inputs of any float dtype, ``[..., in_features]``.
        """
        if inputs.is_meta:  # a trial pass, whose compute dtype may differ
            return functional.linear(inputs, inputs.new_empty(self.out_features, self.in_features), None)
        inputs = inputs.to(self.bits.dtype)
        if torch_internals.is_fake_tensor(inputs):
            planned: Tensor = _PlannedMatmul.apply(inputs, self)  # type: ignore[no-untyped-call, unused-ignore]
            return planned
        bias = None if self.bias is None else self.bias.to(inputs.dtype)
        package = import_bitsandbytes()
        with torch.autocast(inputs.device.type, enabled=False):
            if self.kind == "int8":
                scales, codes = self._split_bits()
                state = package.MatmulLtState()
                state.CB, state.SCB = codes.view(torch.int8).view(self.out_features, self.in_features), scales
                state.has_fp16_weights, state.is_training = False, self.training
                output: Tensor = package.matmul(inputs, state.CB, bias=bias, state=state)
            else:
                state = self._build_quant_state(package)
                output = package.matmul_4bit(inputs, self._split_bits()[2], bias=bias, quant_state=state)
        return output

    def _build_quant_state(self, package: Any) -> Any:
        """Build the ``QuantState`` with which bitsandbytes dequantizes the nf4 weight.

        The result shares memory with ``bits``, the layer's parameter that stores the scales and the
        quantized weight.

        Args:
            package: The module ``bitsandbytes``.
        """
        outer, scales, codes = self._split_bits()
        state = package.functional.QuantState
        return state(
            absmax=scales,
            shape=torch.Size((self.out_features, self.in_features)),
            dtype=self.bits.dtype,
            blocksize=BLOCK_ELEMENTS,
            quant_type="nf4",
            offset=outer[0],
            state2=state(
                absmax=outer[1:],
                blocksize=OUTER_BLOCK_SCALES,
                code=_build_scale_levels(codes.device),
                dtype=torch.float32,
            ),
        )

    def quantize_weight(self, weight: Tensor) -> Tensor:
        """Quantize a weight to the format of :attr:`bits`, the parameter with this layer's weight.

        The layer itself is not modified.

        Args:
            weight: Weight, fp32 ``[out_features, in_features]``. It is quantized on its own device.

        Returns:
            The scales and the quantized weight as bytes, viewed in the compute dtype, on the device
            of ``weight``.
        """
        kernels = import_bitsandbytes().functional
        if self.kind == "int8":
            codes, scales, _ = kernels.int8_vectorwise_quant(weight.half())
            parts = [scales.float(), codes]
        else:
            chunks = [
                torch.ops.bitsandbytes.quantize_4bit.default(chunk, BLOCK_ELEMENTS, "nf4", torch.uint8)
                for chunk in weight.flatten().split(_ELEMENTS_QUANTIZED_AT_ONCE)
            ]
            largest = torch.cat([scales for _, scales in chunks])
            offset = largest.mean()
            scales, outer = kernels.quantize_blockwise(largest - offset, blocksize=OUTER_BLOCK_SCALES)
            parts = [
                torch.cat([offset[None], outer.absmax]),
                scales,
                torch.cat([codes for codes, _ in chunks]),
            ]
        raw = weight.new_zeros(self.bits.numel() * self.bits.itemsize, dtype=torch.uint8)
        for part, (start, stop) in zip(parts, self._byte_ranges, strict=True):
            raw[start:stop] = part.contiguous().flatten().view(torch.uint8)
        return raw.view(self.bits.dtype)


class _PlannedMatmul(torch.autograd.Function):
    """Substitute for bitsandbytes' matrix product, used for memory planning with fake tensors.

    It allocates the same memory as the original. The forward pass and the backward pass each create
    the dequantized weight in the compute dtype. With ``int8``, the inputs are also saved for the
    backward pass.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.shape = layer.out_features, layer.in_features
        if layer.kind == "int8":
            ctx.save_for_backward(inputs)  # bitsandbytes saves the inputs as well
        return functional.linear(inputs, inputs.new_empty(ctx.shape))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] @ gradients[0].new_empty(ctx.shape), None


@cache  # cached, because a copy from the host in every layer would be a host sync
def _build_scale_levels(device: torch.device) -> Tensor:
    """Return the lookup table from 8-bit codes of quantization scales to fp32. Cached per device.

    With nf4, the scales of a weight are themselves quantized to 8 bits.
    """
    levels: Tensor = import_bitsandbytes().functional.create_dynamic_map().to(device)
    return levels


def build_lazy_quantized_weight(source: ReadableTensor, layer: QuantizedLinear) -> ReadableTensor:
    """Build a layer's quantized weight as a lazy tensor, which is computed from a float weight.

    The lazy tensor contains the values of the layer's parameter ``bits``: the scales and the
    quantized weight as raw bytes. Each read quantizes the complete weight, on the current GPU if
    CUDA is initialized in this process.

    Args:
        source: Float weight, ``[out_features, in_features]``.
        layer: Quantized layer that determines the format. It is not modified.
    """

    def compute_bits() -> Tensor:
        weight = to_torch(source.read()).float()
        # bitsandbytes is a hundred times faster on a GPU.
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else "cpu"
        return layer.quantize_weight(weight.to(device)).cpu()

    return ComputedTensor(layer.bits.shape, compute_bits)


def quantize_linear_layers(model: nn.Module, kind: str, dtype: torch.dtype) -> dict[str, QuantizedLinear]:
    """Replace a model's frozen linear layers, except the output head, with quantized layers.

    A layer is not replaced if its weight is tied or trained, if its class is a subclass of
    ``nn.Linear``, or if peft trains a copy of the layer (``modules_to_save``). Weights with a dtype
    other than ``dtype`` are not quantized either. For example, transformers keeps some weights in
    fp32, because their layers need this precision.

    Args:
        model: The model, on the meta device. Modified in place.
        kind: ``nf4`` or ``int8``.
        dtype: Compute dtype.

    Returns:
        The quantized layers, keyed by the names of the replaced layers.
    """
    owners: dict[nn.Parameter, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        owners[parameter] = owners.get(parameter, 0) + 1
    untyped_model: Any = model
    head = untyped_model.get_output_embeddings()
    layers: dict[str, QuantizedLinear] = {}
    for name, module in list(model.named_modules()):
        if type(module) is not nn.Linear or module is head or name.endswith(".original_module"):
            continue
        weight: Any = module.weight
        if weight.requires_grad or owners[weight] > 1 or weight.dtype != dtype:
            continue
        parent, _, child = name.rpartition(".")
        layers[name] = QuantizedLinear(module, kind, dtype)
        model.get_submodule(parent).add_module(child, layers[name])
    return layers
