"""Preference losses. They compare a chosen and a rejected answer to a prompt.

A sample consists of two sequences, first the chosen one (``data.format: preference``). Labels mark the tokens
of the answers. Each loss is a mean over pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.nn import functional

from portable.batch import IGNORED_LABEL

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor, nn

    from portable.batch import Batch
    from portable.model.training_loss import LossValue, Outputs, Statistic

REFERENCE_COLUMN = "reference_log_probs"


def _mark_pairs(batch: Batch) -> Tensor:
    """Return a mask of the samples that are pairs, bool ``[batch]``. Other samples only fill up the batch.

    Raises ValueError if the labels of the batch are not pairs.
    """
    labels = batch["labels"]
    if labels.dim() != 3 or labels.shape[1] != 2:
        raise ValueError("needs pairs; set data.format to preference")
    return (labels != IGNORED_LABEL).any(dim=-1).all(dim=-1)


class _PreferenceLoss:
    """Base class of preference losses, with the interface of :class:`portable.model.training_loss.Loss`."""

    needs: ClassVar[tuple[Statistic, ...]] = ("log_probs",)
    sequences: ClassVar[int] = 2
    dropout: ClassVar[bool] = False

    def weight(self, batch: Batch) -> float:
        """Return the number of pairs in a micro-batch."""
        return float(_mark_pairs(batch).sum())

    def __call__(self, outputs: Outputs, batch: Batch) -> LossValue:
        assert outputs.log_probs is not None
        pairs = _mark_pairs(batch)
        lengths = (batch["labels"] != IGNORED_LABEL).sum(dim=-1).clamp(min=1)
        log_probs = outputs.log_probs.sum(dim=-1)
        losses, rewards = self.losses(log_probs, lengths, batch)
        chosen, rejected = rewards.detach().unbind(dim=1)
        numbers = {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": chosen - rejected,
            "rewards/accuracies": (chosen > rejected).float(),
            "logps/chosen": log_probs[:, 0].detach(),
            "logps/rejected": log_probs[:, 1].detach(),
        }
        sums = {name: torch.where(pairs, value, 0.0).sum() for name, value in numbers.items()}
        return torch.where(pairs, losses, 0.0).sum(), pairs.sum(), sums

    def losses(self, log_probs: Tensor, lengths: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute the loss and the rewards of each pair. Implemented by subclasses.

        Args:
            log_probs: Log-probabilities of the answers, summed over their tokens, ``[batch, 2]``.
            lengths: Number of tokens of the answers, ``[batch, 2]``.
            batch: Columns of the micro-batch, on the device.

        Returns:
            Losses ``[batch]``, and rewards ``[batch, 2]``.
        """
        raise NotImplementedError


@dataclass
class DPO(_PreferenceLoss):
    """Direct preference optimization (Rafailov et al., 2023).

    Attributes:
        beta: Strength of the regularization toward the reference model.
        label_smoothing: Probability that a preference is reversed, as in cDPO and the loss type ``robust``.
        loss_type: Formula of the loss, by its name in TRL: one of ``LOSS_TYPES``.
        sft: Weight of the mean cross-entropy of the chosen answer, which is added to the loss.
        reference: Reference model. ``"adapter"`` is the base model, computed by a pass with the adapter
            disabled. For a folder or the name of a model on the Hub, each rank keeps a frozen copy. If None,
            the weights at the start of the run. Their log-probabilities are computed once and cached with the
            data.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    reference: str | None = None
    loss_type: str = "sigmoid"
    sft: float = 0.0
    _reference_model: Any = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.loss_type not in LOSS_TYPES:
            raise ValueError(f"loss_type {self.loss_type!r} is not one of {', '.join(LOSS_TYPES)}")
        max_smoothing = {"sigmoid": 1.0, "robust": 0.5}.get(self.loss_type, 0.0)
        if self.label_smoothing and not 0 < self.label_smoothing < max_smoothing:
            raise ValueError(
                f"label_smoothing {self.label_smoothing:g} does not work with loss_type {self.loss_type}"
            )
        # The log-probabilities of the reference are computed once for all samples, or before each step.
        self.once = _compute_reference_log_probs if self.reference is None else None
        self.before = None if self.reference is None else self._compute_reference_columns

    def losses(self, log_probs: Tensor, lengths: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute the loss and the rewards of each pair, from the log-ratios to the reference model.

        Args:
            log_probs: Log-probabilities of the answers, summed over their tokens, ``[batch, 2]``.
            lengths: Number of tokens of the answers, ``[batch, 2]``.
            batch: Columns of the micro-batch, including the log-probabilities of the reference model.

        Returns:
            Losses ``[batch]``, and rewards ``[batch, 2]``.
        """
        ratios = log_probs - batch[REFERENCE_COLUMN].to(log_probs.dtype)
        rewards = self.beta * ratios
        losses = self.compute_losses(ratios, lengths)
        return losses - self.sft * log_probs[:, 0] / lengths[:, 0] if self.sft else losses, rewards

    def compute_losses(self, ratios: Tensor, lengths: Tensor) -> Tensor:
        """Compute the loss of each pair from the log-ratios to the reference model.

        A custom loss can override this method.

        Args:
            ratios: Log-ratios of the answers, ``[batch, 2]``.
            lengths: Number of tokens of the answers, ``[batch, 2]``.

        Returns:
            Losses ``[batch]``.
        """
        return LOSS_TYPES[self.loss_type](self, self.beta * ratios, self.beta * ratios / lengths)

    def _compute_reference_columns(
        self, forward: Callable[..., Outputs], batch: Batch
    ) -> Mapping[str, Tensor]:
        """Compute the log-probabilities of the reference: the model without its adapter, or a separate model.

        The separate model is loaded at the first call, and kept.
        """
        if self.reference == "adapter":
            return _compute_reference_log_probs(lambda: forward(adapter=False), batch)
        if self._reference_model is None:
            self._reference_model = _load_frozen_model(str(self.reference), batch["labels"].device)
        return _compute_reference_log_probs(lambda: forward(self._reference_model), batch)


@dataclass
class IPO(DPO):
    """Identity preference optimization (Azar et al., 2023). Log-ratios are means over tokens, as in TRL."""

    loss_type: str = "ipo"


def _compute_reward_margin(rewards: Tensor) -> Tensor:
    """Return the reward of the chosen answer minus the reward of the rejected answer."""
    return rewards[:, 0] - rewards[:, 1]


def _compute_smoothed_loss(loss: DPO, rewards: Tensor, sign: float = 1.0) -> Tensor:
    """Mix the losses of a preference and of the reversed preference, weighted by ``label_smoothing``."""
    right, wrong = (
        -functional.logsigmoid(_compute_reward_margin(rewards)),
        -functional.logsigmoid(-_compute_reward_margin(rewards)),
    )
    return (1 - loss.label_smoothing) * right + sign * loss.label_smoothing * wrong


LOSS_TYPES: dict[str, Callable[[DPO, Tensor, Tensor], Tensor]] = {
    "sigmoid": lambda loss, rewards, _: _compute_smoothed_loss(loss, rewards),
    "robust": lambda loss, rewards, _: (
        _compute_smoothed_loss(loss, rewards, -1.0) / (1 - 2 * loss.label_smoothing)
    ),
    "hinge": lambda _, rewards, __: torch.relu(1 - _compute_reward_margin(rewards)),
    "ipo": lambda loss, _, means: ((_compute_reward_margin(means) - 0.5) / loss.beta).square(),
    "sigmoid_norm": lambda _, __, means: -functional.logsigmoid(_compute_reward_margin(means)),
    "apo_zero": lambda _, rewards, __: torch.sigmoid(-rewards[:, 0]) + torch.sigmoid(rewards[:, 1]),
    "apo_down": lambda _, rewards, __: (
        torch.sigmoid(rewards[:, 0]) + torch.sigmoid(-_compute_reward_margin(rewards))
    ),
}
"""Formulas of DPO by their names in TRL. Each is a function of the loss object, the rewards ``[batch, 2]``,
and the rewards divided by the number of tokens.
"""


@dataclass
class SimPO(_PreferenceLoss):
    """Simple preference optimization (Meng et al., 2024). Does not need a reference model.

    Attributes:
        beta: Scale of the mean log-probabilities.
        gamma: Target margin between the rewards of the chosen and the rejected answer.
    """

    beta: float = 2.0
    gamma: float = 1.0

    def losses(self, log_probs: Tensor, lengths: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute the loss and the rewards of each pair.

        Args:
            log_probs: Log-probabilities of the answers, summed over their tokens, ``[batch, 2]``.
            lengths: Number of tokens of the answers, ``[batch, 2]``.
            batch: Columns of the micro-batch. Not used.

        Returns:
            Losses ``[batch]``, and rewards ``[batch, 2]``.
        """
        rewards = self.beta * log_probs / lengths
        return -functional.logsigmoid(rewards[:, 0] - rewards[:, 1] - self.gamma), rewards


@dataclass
class ORPO(_PreferenceLoss):
    """Odds ratio preference optimization (Hong et al., 2024). Does not need a reference model.

    Attributes:
        beta: Weight of the odds ratio (lambda in the paper), relative to the mean loss of the chosen answer.
    """

    beta: float = 0.1

    def losses(self, log_probs: Tensor, lengths: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute the loss and the rewards of each pair.

        Args:
            log_probs: Log-probabilities of the answers, summed over their tokens, ``[batch, 2]``.
            lengths: Number of tokens of the answers, ``[batch, 2]``.
            batch: Columns of the micro-batch. Not used.

        Returns:
            Losses ``[batch]``, and rewards ``[batch, 2]``.
        """
        means = log_probs / lengths
        # Clamp the probability, because an answer with probability 1 has infinite odds.
        log_odds = means - torch.log1p(-means.exp().clamp(max=1 - 1e-7))
        ratio = functional.logsigmoid(log_odds[:, 0] - log_odds[:, 1])
        return -means[:, 0] - self.beta * ratio, self.beta * means


def _compute_reference_log_probs(forward: Callable[[], Outputs], batch: Batch) -> Mapping[str, Tensor]:
    """Run a forward pass of the reference, and return the log-probabilities of the answers as a column."""
    log_probs = forward().log_probs
    assert log_probs is not None
    return {REFERENCE_COLUMN: log_probs.float().sum(dim=-1)}


def _load_frozen_model(name: str, device: torch.device) -> nn.Module:
    """Load a frozen reference model onto a device.

    Args:
        name: Local folder, or name of a model on the Hub.
        device: Device of the batch.

    Raises:
        UserError: If the model cannot be loaded or is not causal. The message names ``train.loss``.
    """
    from portable.errors import UserError, to_one_line
    from portable.hub_requests import read_hub_once_per_node
    from portable.model.build import select_pretrained_class
    from portable.model.document_attention import check_causal_attention
    from portable.untrusted_settings import convert_library_errors

    key = f"train.loss: reference {name}"
    try:
        with convert_library_errors("model.name_or_path"):
            load = partial(select_pretrained_class(name).from_pretrained, name)
            model: Any = read_hub_once_per_node(name, "model", load)
    except UserError as error:
        raise UserError(f"{key}: {to_one_line(error).removeprefix('model.name_or_path: ')}") from error
    check_causal_attention(model, key)
    model.eval().requires_grad_(False).to(device)
    if device.type == "xla":  # moving a model to XLA unties its weights
        model.tie_weights()
    copy: nn.Module = model
    return copy
