"""Sample from a model, with the same graph for every token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from portable.tpu.xla.torch_xla_internals import xla

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from portable.tpu.xla.graphs import GraphRunner
    from portable.tpu.xla.layout import MeshLayout


def sample_continuation(
    prompt: Tensor,
    max_new_tokens: int,
    seed: int,
    compute_logits: Callable[[Tensor], Tensor],
    layout: MeshLayout,
    graphs: GraphRunner,
) -> Tensor:
    """Sample tokens after a prompt, with temperature 0.8 and top-k 50.

    Sampling does not stop at an end-of-sequence token. The tokens are padded with zeros to their final
    length, so that the compiled graph is the same at each position. Nothing is cached: the logits
    of all positions are computed for each new token.

    Args:
        prompt: Token ids ``[1, length]`` on the CPU.
        max_new_tokens: Number of tokens to sample.
        seed: Random seed for sampling.
        compute_logits: Function that computes logits ``[rows, total, vocabulary]`` from token IDs
            ``[rows, total]``, where total is ``length + max_new_tokens``. It must be causal, because
            the positions that are not sampled yet contain zeros.
        layout: Placement of tensors on the devices.
        graphs: Runner of the compiled graphs.

    Returns:
        Token IDs ``[rows, length + max_new_tokens]``, int64 on the devices. There is one row per
        batch shard, because activations are sharded along the batch dim. All rows are equal.
    """
    start = prompt.shape[1]
    padded = torch.nn.functional.pad(prompt, (0, max_new_tokens))
    tokens = layout.replicate(padded.repeat(layout.num_batch_shards, 1))
    draws = torch.Generator().manual_seed(seed)
    for position in range(start, start + max_new_tokens):
        noise = -torch.log(-torch.log(torch.rand(1, 50, generator=draws).clamp(1e-9, 1 - 1e-7)))
        tokens = _sample_token_at(
            tokens, layout.replicate(torch.tensor([position])), noise, compute_logits, layout
        )
        graphs.run("sampled token", [tokens])
    return tokens


def _sample_token_at(
    tokens: Tensor,
    position: Tensor,
    noise: Tensor,
    compute_logits: Callable[[Tensor], Tensor],
    layout: MeshLayout,
) -> Tensor:
    """Sample the token at ``position`` with temperature 0.8 and top-k 50, and return the new ``tokens``.

    Args:
        tokens: Token ids ``[rows, length]``.
        position: Position to sample, as an integer tensor ``[1]`` on the device.
        noise: Gumbel noise ``[1, 50]``, which replaces the random draw.
        compute_logits: Function that computes logits from token IDs.
        layout: Placement of tensors on the devices.
    """
    logits = compute_logits(tokens).index_select(1, position - 1).squeeze(1).float()
    top = torch.topk(logits, min(noise.shape[1], logits.shape[1]))
    sampled_rank = (top.values / 0.8 + layout.replicate(noise)[:, : top.values.shape[1]]).argmax(
        dim=1, keepdim=True
    )
    drawn = top.indices.gather(1, sampled_rank)
    is_position = torch.arange(tokens.shape[1], device=tokens.device)[None, :] == position
    extended = torch.where(is_position, drawn, tokens)
    xla.mark_sharding(extended, layout.to_op_sharding(layout.get_replicated_spec(2)))
    return extended
