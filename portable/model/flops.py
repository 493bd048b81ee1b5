"""Parameter counts, FLOPs per token, and hints about matrix sizes that are inefficient on a device.

The hints follow the tensor core requirements in NVIDIA's guide to matrix multiplication
(https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/index.html).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from portable.model.layers import find_transformer_layers
from portable.model.parameters import get_token_embedding
from portable.model.quantized_linear import QuantizedLinear
from portable.model.unused_parameters import get_unreached_names

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel


def count_parameters(model: nn.Module) -> int:
    """Count the parameters of a model.

    A tied parameter is counted once. For a quantized weight, the elements before quantization are
    counted.
    """
    quantized_elements = _map_quantized_elements(model)
    return sum(quantized_elements.get(id(p), p.numel()) for p in model.parameters())


def format_parameter_counts(num_parameters: int, num_trained: int) -> str:
    """Format the number of parameters, such as "1,024 parameters, of which 512 are trained".

    Args:
        num_parameters: Number of parameters.
        num_trained: Number of trained parameters. Omitted from the text if all parameters are trained.
    """
    part = "" if num_trained == num_parameters else f", of which {num_trained:,} are trained"
    return f"{num_parameters:,} parameters{part}"


def count_trained_parameters(model: nn.Module) -> int:
    """Count the trained parameters. Tied parameters count once."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def compute_flops_per_token(model: PreTrainedModel, config: PretrainedConfig, seq_len: float) -> float:
    """Compute the floating-point operations per trained token in the forward and backward pass.

    As in appendix B of the PaLM paper, the result is a sum of two terms. The first is 6 for each
    parameter. The second is 12 x layers x hidden size x sequence length, for the attention scores.
    The small number of parameters outside of matrix products, such as norms, is included. The token
    embedding does not count, unless it is tied to the output head. If the experts of a mixture of
    experts are stored in stacked tensors, only the active experts count. Recomputation does not
    count.

    A frozen weight costs 4 instead of 6, because its gradient is not computed. It costs only 2
    if no earlier weight is trained, because the backward pass does not reach it. The attention
    scores of a layer that the backward pass does not reach cost a third of the above.
    Parameters that do not affect the loss (see :func:`get_unreached_names`) are excluded.

    Args:
        model: The model, on any device.
        config: Transformers config of the model.
        seq_len: Sequence length in tokens, or the mean document length if attention stays
            within documents.
    """
    text = config.get_text_config()
    embedding = get_token_embedding(model)
    head: Any = model.get_output_embeddings()
    tied = head is not None and head.weight is embedding
    unreached = get_unreached_names(model)  # for example the vision tower of a model that is trained on text
    layers = [
        {id(p) for p in layer.parameters()}
        for prefix, layer in find_transformer_layers(model)
        if not all(f"{prefix}.{name}" in unreached for name, _ in layer.named_parameters())
    ]
    hidden: int = getattr(text, "hidden_size", 0 if embedding is None else embedding.shape[1])
    active_expert_share = 1.0 - _compute_idle_expert_share(text)
    passes, flops, backward_ids, quantized_elements = 1, 0.0, set[int](), _map_quantized_elements(model)
    for name, parameter in model.named_parameters():
        if name in unreached:
            continue
        if parameter.requires_grad:
            passes = 2
        if passes == 2:
            backward_ids.add(id(parameter))
        if parameter is not embedding or tied:
            used_share = active_expert_share if _is_expert_parameter(name, parameter, text) else 1.0
            flops += (
                2.0
                * (passes + parameter.requires_grad)
                * used_share
                * quantized_elements.get(id(parameter), parameter.numel())
            )
    layers_with_backward = sum(bool(layer & backward_ids) for layer in layers)
    return flops + 4.0 * (len(layers) + 2 * layers_with_backward) * hidden * seq_len


def _map_quantized_elements(model: nn.Module) -> dict[int, int]:
    """Map the ``id`` of each packed quantized parameter to the number of weights in it."""
    return {id(m.bits): m.num_elements for m in model.modules() if isinstance(m, QuantizedLinear)}


_EXPERT_COUNT_NAMES = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN_NAMES = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k")


def _count_experts(text: PretrainedConfig) -> int:
    """Return the number of experts of a layer, or 0 if the model has none."""
    counts = (getattr(text, name, None) for name in _EXPERT_COUNT_NAMES)
    return next((int(count) for count in counts if count), 0)


def get_experts_per_token(text: PretrainedConfig) -> int | None:
    """Return the number of experts that each token uses. None if the config does not contain it."""
    counts = (getattr(text, name, None) for name in _EXPERTS_PER_TOKEN_NAMES)
    return next((int(count) for count in counts if count), None)


def _compute_idle_expert_share(text: PretrainedConfig) -> float:
    """Return the fraction of a layer's experts that a token does not use, or 0 without experts."""
    chosen, experts = get_experts_per_token(text), _count_experts(text)
    return 1.0 - chosen / experts if chosen and experts else 0.0


def _is_expert_parameter(name: str, parameter: nn.Parameter, text: PretrainedConfig) -> bool:
    """Return whether a parameter is a stack of expert weights, with one entry per expert."""
    return ".experts." in name and parameter.dim() > 1 and parameter.shape[0] == _count_experts(text)


HINTED_SIZES = ("vocab_size", "hidden_size", "intermediate_size")


def build_shape_hints(
    config: PretrainedConfig, *, micro_batch_tokens: int, shape_multiple: int | None, precision: str
) -> list[str]:
    """Build a hint for each checked matrix size that is not a multiple of ``shape_multiple``.

    The checked sizes are :data:`HINTED_SIZES` of the text config, and ``micro_batch_tokens``.
    Matrix products are slower if a size is not a multiple, because they cannot fully use the
    matrix units of the device.

    Args:
        config: Transformers config of the model.
        micro_batch_tokens: Number of tokens in a micro-batch, which is a dimension of each
            matrix product.
        shape_multiple: Result of :meth:`portable.backend.Backend.get_shape_multiple`. If None,
            the device has no preferred multiple, and there are no hints.
        precision: Precision of the matrix products, used in the text.

    Returns:
        Hints for the user, one line each.
    """
    if shape_multiple is None:
        return []
    text = config.get_text_config()
    sizes = {f"model.config.{name}": getattr(text, name, None) for name in HINTED_SIZES}
    sizes["train.micro_batch_size x data.seq_len"] = micro_batch_tokens
    return [
        f"hint: {name} is {size}, not a multiple of {shape_multiple}; matrix products in {precision} are "
        f"faster on this device with {size + -size % shape_multiple}"
        for name, size in sizes.items()
        if isinstance(size, int) and size % shape_multiple
    ]
