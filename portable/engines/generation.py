"""Sample a continuation of a prompt from a model during training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor, nn

    from portable.batch import Batch


@torch.no_grad()
def sample_continuation(
    model: nn.Module,
    prompt: Tensor,
    device: torch.device,
    *,
    max_new_tokens: int,
    seed: int,
    is_collective: bool,
    image_columns: Batch,
) -> Tensor:
    """Sample up to ``max_new_tokens`` tokens after ``prompt``.

    All ranks return the same tokens if their devices compute the same logits. The temperature is
    0.8, and only the 50 most likely tokens are considered. The model runs without
    ``torch.compile``. The seed of torch's default generators is set and not restored.

    Args:
        model: The transformers model, in evaluation mode.
        prompt: Token ids, int64 ``[1, length]``, on the host.
        device: Device of the model.
        max_new_tokens: Maximum number of tokens to sample.
        seed: Sampling seed.
        is_collective: Whether a forward pass runs collectives. If True, a rank that has sampled an
            end-of-sequence token continues to run forward passes until all ranks have sampled one.
            The ranks may sample different tokens if their devices round differently.
        image_columns: Additional model inputs for the images of the prompt, on the host, keyed by
            argument name.

    Returns:
        Token ids of the prompt and its continuation, int64 ``[1, length + added]``, on the host.
    """
    torch.manual_seed(seed)  # all ranks must sample the same tokens
    generate: Any = model.generate
    # Do not compile, because the shapes change with every token, so each token would need its own graph.
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
            **{name: values.to(device) for name, values in image_columns.items()},
        )
    return tokens.cpu()
