"""Letting a model in training continue a text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor, nn


@torch.no_grad()
def continue_text(
    model: nn.Module, prompt: Tensor, device: torch.device, *, max_new_tokens: int, seed: int, in_step: bool
) -> Tensor:
    """Sample up to ``max_new_tokens`` after ``prompt``, int64 ``[1, length]``; all ranks get the same text.

    Args:
        model: the transformers model, in evaluation mode.
        prompt: on the host.
        device: where the model computes.
        max_new_tokens: how much to add at most.
        seed: of the sampling.
        in_step: whether every forward pass is a collective (sharded parameters), so that a rank that has
            finished must go on for the others' sake.

    Returns:
        prompt and continuation, int64 ``[1, length + added]``, on the host.
    """
    torch.manual_seed(seed)  # the same on all ranks, so that all continue alike
    generate: Any = model.generate
    # Its shapes change with every token: nothing to compile for.
    with torch.compiler.set_stance("force_eager"):
        tokens: Tensor = generate(
            prompt.to(device),
            attention_mask=torch.ones_like(prompt, device=device),
            max_new_tokens=max_new_tokens,
            do_sample=True,
            temperature=0.8,
            top_k=50,
            use_cache=True,
            synced_gpus=in_step,
        )
    return tokens.cpu()
