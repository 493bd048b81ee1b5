"""Optimizers by their config names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from portable.config import TrainConfig


def parameter_groups(parameters: Mapping[str, nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices decay, vectors (biases and the scales of norms) do not."""
    trained = [p for p in parameters.values() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(settings: TrainConfig, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that ``train.optimizer`` names, in its fused form.

    The fused kernels take the whole step in one launch, and leave everything as it is when a device-side flag
    (``found_inf``) says that the gradients are not finite.
    """
    groups = parameter_groups(parameters, settings.weight_decay)
    beta1, beta2 = settings.betas
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(
            groups, lr=settings.learning_rate, betas=(beta1, beta2), eps=settings.eps, fused=True
        )
    assert settings.optimizer == "sgd", settings.optimizer
    return torch.optim.SGD(groups, lr=settings.learning_rate, momentum=beta1, fused=True)
