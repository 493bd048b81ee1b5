"""Sample a continuation of a text from a model in training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor, nn


@torch.no_grad()
def sample_continuation(
    model: nn.Module,
    prompt: Tensor,
    device: torch.device,
    *,
    max_new_tokens: int,
    seed: int,
    is_collective: bool,
) -> Tensor:
    """Sample up to ``max_new_tokens`` tokens after ``prompt``; all ranks get the same text.

    Args:
        model: the transformers model, in evaluation mode.
        prompt: int64 ``[1, length]``, on the host.
        device: of the model.
        max_new_tokens: the limit.
        seed: of the sampling.
        is_collective: whether each forward pass gathers parameters, so that a rank that has finished must
        keep
            running until the others have.

    Returns:
        prompt and continuation, int64 ``[1, length + added]``, on the host.
    """
    torch.manual_seed(seed)  # the same on all ranks
    generate: Any = model.generate
    # Shapes change with every token, so compiling would not pay.
    with torch.compiler.set_stance("force_eager"):
        tokens: Tensor = generate(
            prompt.to(device),
            attention_mask=torch.ones_like(prompt, device=device),
            max_new_tokens=max_new_tokens,
            do_sample=True,
            temperature=0.8,
            top_k=50,
            use_cache=True,
            synced_gpus=is_collective,
        )
    return tokens.cpu()
