"""Parameter counts and FLOPs per token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from portable.model.layers import transformer_layers
from portable.model.parameters import token_embedding

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel


def parameter_count(model: nn.Module) -> int:
    """Number of parameters. Tied parameters count once."""
    return sum(p.numel() for p in model.parameters())


def trained_count(model: nn.Module) -> int:
    """Number of parameters that are trained. Tied parameters count once."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def counted(parameters: int, trained: int) -> str:
    """Both counts in words."""
    part = "" if trained == parameters else f", {trained:,} of them trained"
    return f"{parameters:,} parameters{part}"


def flops_per_token(model: PreTrainedModel, config: PretrainedConfig, seq_len: float) -> float:
    """Floating-point operations per trained token, forward and backward.

    Follows the PaLM paper (appendix B): 6 for each weight in a matrix product, 4 if it is frozen and has no
    gradient, plus 12 x layers x hidden size x sequence length for the attention scores. Embedding lookups do
    not count, a tied output head does. Of a mixture of experts, only the active experts count. Recomputation
    does not count.
    """
    text = config.get_text_config()
    embedding = token_embedding(model)
    head: Any = model.get_output_embeddings()
    tied = head is not None and head.weight is embedding
    looked_up = 0 if embedding is None or tied else embedding.numel()
    layers = len(transformer_layers(model))
    hidden: int = getattr(text, "hidden_size", 0 if embedding is None else embedding.shape[1])
    weights = parameter_count(model) - looked_up - _idle_experts(model, text)
    frozen = weights * (1.0 - trained_count(model) / parameter_count(model))
    return 6.0 * weights - 2.0 * frozen + 12.0 * layers * hidden * seq_len


def _idle_experts(model: nn.Module, text: PretrainedConfig) -> float:
    """Parameters of the experts that a token does not use, averaged over the layers."""
    chosen = getattr(text, "num_experts_per_tok", None)
    counts = (getattr(text, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts"))
    experts = next((count for count in counts if count), None)
    if not chosen or not experts:
        return 0.0
    # transformers stacks the experts of a layer along the first dim.
    stacked = [
        parameter.numel()
        for name, parameter in model.named_parameters()
        if ".experts." in name and parameter.dim() > 1 and parameter.shape[0] == experts
    ]
    return sum(stacked) * (1.0 - float(chosen / experts))
