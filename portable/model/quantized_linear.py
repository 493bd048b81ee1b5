"""Frozen linear layers whose weights have 4 or 8 bits, computed by bitsandbytes.

A weight and its scales are one parameter of raw bits, in words of the compute type: FSDP2 then gathers them
like any other parameter, and casts nothing.
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
"""Elements with one scale, and scales with one scale of their own: those of the QLoRA paper."""
_ELEMENTS_QUANTIZED_AT_ONCE = 1 << 20  # elements that are quantized at a time, a multiple of BLOCK
_ALIGNMENT_BYTES = 16


class QuantizedLinear(nn.Module):
    """A linear layer with a quantized weight. Its gradient goes to the input alone.

    Args:
        linear: in whose place it stands; its bias stays.
        kind: ``nf4`` (normal floats in blocks, with double quantization) or ``int8`` (rows; inputs are
            rounded to 8 bits as well, without a decomposition of outliers, which would wait for the device).
        dtype: the compute type.
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
        """Elements of the weight."""
        return self.in_features * self.out_features

    def _compute_part_sizes(self) -> list[int]:
        """The number of fp32 scales, then the bytes of what else there is."""
        if self.kind == "int8":
            return [self.out_features, self.num_elements]
        blocks = -(-self.num_elements // BLOCK_ELEMENTS)
        return [1 + -(-blocks // OUTER_BLOCK_SCALES), blocks, -(-self.num_elements // 2)]

    def _split_bits(self) -> tuple[Tensor, ...]:
        raw = self.bits.view(torch.uint8)
        first, *others = (raw[start:stop] for start, stop in self._byte_ranges)
        return first.view(torch.float32), *others

    def forward(self, inputs: Tensor) -> Tensor:
        """The layer's output, in the compute type."""
        if inputs.is_meta:  # a trial pass, which may have another compute type
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
        """The bits of ``weight``, fp32 ``[out_features, in_features]``: words of the compute type."""
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
    """What the product allocates, for a plan: the weight in the compute type, in each pass for itself."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.shape = layer.out_features, layer.in_features
        if layer.kind == "int8":
            ctx.save_for_backward(inputs)  # as bitsandbytes does
        return functional.linear(inputs, inputs.new_empty(ctx.shape))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] @ gradients[0].new_empty(ctx.shape), None


@cache  # a copy from the host in every layer would be a host sync
def _build_scale_levels(device: torch.device) -> Tensor:
    """The 256 levels of the scales, fp32."""
    levels: Tensor = import_bitsandbytes().functional.create_dynamic_map().to(device)
    return levels


def build_lazy_quantized_weight(source: ReadableTensor, layer: QuantizedLinear) -> ReadableTensor:
    """The bits of the weight ``source`` of ``layer`` as a tensor to read; each read quantizes all of it."""

    def compute_bits() -> Tensor:
        weight = to_torch(source.read()).float()
        # bitsandbytes is a hundred times faster there.
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else "cpu"
        return layer.quantize_weight(weight.to(device)).cpu()

    return ComputedTensor(layer.bits.shape, compute_bits)


def quantize_linear_layers(model: nn.Module, kind: str, dtype: torch.dtype) -> dict[str, QuantizedLinear]:
    """Quantize the frozen linear layers of ``model``, on the meta device, except the output head.

    Layers whose weights are tied, trained, or not of ``dtype`` (which transformers keeps in fp32) stay.

    Returns:
        the layers that stand in place of others, by the names of those.
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
