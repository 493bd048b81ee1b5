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
"""Number of weights that share a scale, and number of scales that share a second-level scale. The values are
taken from the QLoRA paper.
"""
_ELEMENTS_QUANTIZED_AT_ONCE = 1 << 20  # elements that are quantized at a time, a multiple of BLOCK_ELEMENTS
_ALIGNMENT_BYTES = 16


class QuantizedLinear(nn.Module):
    """Linear layer with a quantized, frozen weight. Gradients flow only to the input.

    The bits of a new layer are uninitialized. :func:`build_lazy_quantized_weight` computes them from a
    float weight.

    Args:
        linear: Layer to replace. Its bias is kept.
        kind: ``nf4`` (normal floats in blocks, with double quantization) or ``int8`` (one scale per
            row). With ``int8``, the inputs are also rounded to 8 bits. Unlike in ``LLM.int8()``,
            outliers are not computed separately, because the host would have to wait for the device.
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
        """Return the size of each section of ``bits``.

        The size of the first section is its number of fp32 values. The other sizes are in bytes.

        Returns:
            For ``int8``, the number of scales and the bytes of the codes. For ``nf4``, the number of
            second-level scales including their offset, the bytes of the scales, and the bytes of the codes.
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

        For meta and fake inputs, as in trial passes and the planner, only the output shape is computed,
        without bitsandbytes.

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
        """Build the ``QuantState`` that describes the nf4 weight to bitsandbytes.

        It shares memory with ``bits``.

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
        """Quantize a weight into the format of ``bits``. The layer itself does not change.

        Args:
            weight: Weight, fp32 ``[out_features, in_features]``, on the device that computes the
                quantization.

        Returns:
            The raw bytes, viewed in the compute dtype, on the device of ``weight``.
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
    """Substitute for the bitsandbytes matrix product that runs on fake tensors, for memory planning.

    It allocates the same memory: the forward and the backward pass each create the dequantized weight
    in the compute dtype, and ``int8`` also saves the inputs.
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


@cache  # otherwise, a copy from the host in every layer would be a host sync
def _build_scale_levels(device: torch.device) -> Tensor:
    """Return a lookup table with the fp32 value of each 8-bit code of a scale. Cached per device."""
    levels: Tensor = import_bitsandbytes().functional.create_dynamic_map().to(device)
    return levels


def build_lazy_quantized_weight(source: ReadableTensor, layer: QuantizedLinear) -> ReadableTensor:
    """Return the ``bits`` of a quantized layer as a lazy tensor that is computed from a float weight.

    Each read quantizes the complete weight, on the current GPU if CUDA is initialized in this process.

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
    """Replace the frozen linear layers of a model, except the output head, by quantized layers.

    Layers whose weights are tied or trained are not replaced. Neither are layers whose weights do not
    have ``dtype``, because transformers keeps them in fp32.

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
