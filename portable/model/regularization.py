"""Add noise to embeddings in training (NEFTune), and remove dropout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from portable.data.samples.base import compute_document_lengths

if TYPE_CHECKING:
    from torch import Tensor

    from portable.model.forward import Model


def install_embedding_noise(model: Model, alpha: float, *, extra_tokens: int = 0) -> Model:
    """Install hooks that add noise to a model's embeddings in training (Jain et al., "NEFTune", 2023).

    The noise is uniform in ±alpha / sqrt(tokens * hidden size). Like dropout, it is drawn from
    torch's default generator. ``tokens`` is the length of the document that contains the token,
    so the scale does not depend on padding or on other documents in the sample. In the decoder
    of an encoder-decoder model, ``tokens`` is the padded length instead.

    Args:
        model: A transformers model, not wrapped.
        alpha: Scale of the noise.
        extra_tokens: Number of tokens per document that are not inputs: 1 if the last token is
            only a label. It is added to the document length.

    Returns:
        The same model.
    """
    document_lengths: list[Tensor] = []

    def count_tokens(_: Any, __: Any, inputs: dict[str, Any]) -> None:
        document_lengths[:] = [compute_document_lengths(inputs)] if "input_ids" in inputs else []

    def add_noise_to_embeddings(module: Any, _: Any, embedded: Tensor) -> Tensor:
        if not module.training:
            return embedded
        # Use the document lengths only for the first embedding lookup. In an encoder-decoder, the second
        # lookup is the decoder's, whose inputs have no mask.
        tokens = document_lengths.pop().unsqueeze(-1) if document_lengths else embedded.shape[1]
        bound = alpha * ((tokens + extra_tokens) * embedded.shape[2]) ** -0.5
        return embedded + (torch.zeros_like(embedded).uniform_(-1, 1) * bound).to(embedded.dtype)

    changed: Any = model
    changed.register_forward_pre_hook(count_tokens, with_kwargs=True)
    changed.get_input_embeddings().register_forward_hook(add_noise_to_embeddings)
    return model


_DROPOUT_CLASSES = (
    torch.nn.Dropout,
    torch.nn.Dropout1d,
    torch.nn.Dropout2d,
    torch.nn.Dropout3d,
    torch.nn.AlphaDropout,
    torch.nn.FeatureAlphaDropout,
)


def remove_dropout(model: Model) -> Model:
    """Set all dropout probabilities to 0, in modules (including adapters) and in configs.

    These are the probabilities of torch's dropout modules, and all float attributes of a module or
    its config whose name contains ``drop``.

    Args:
        model: A transformers model, not wrapped. The model and the configs of its modules are
            modified in place.

    Returns:
        The same model.
    """
    for module in model.modules():
        if isinstance(module, _DROPOUT_CLASSES):
            module.p = 0.0
        # Models read some probabilities from their config.
        for owner in (module, getattr(module, "config", None)):
            for name, value in list(getattr(owner, "__dict__", {}).items()):
                if "drop" in name and isinstance(value, float):
                    setattr(owner, name, 0.0)
    return model
