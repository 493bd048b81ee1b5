"""Preference losses, which compare a chosen and a rejected answer to the same prompt.

A sample is a pair of sequences (``data.format: preference``): first the prompt with the chosen answer, then
the prompt with the rejected answer. Only the tokens of the answers have labels. The loss of a step is the
mean over all pairs of the global batch.
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
    """Return a mask of the samples whose two answers both have labels, bool ``[batch]``.

    The other samples are padding and must not count in the loss.

    Raises:
        ValueError: If the labels do not have the shape ``[batch, 2, tokens]``.
    """
    labels = batch["labels"]
    if labels.dim() != 3 or labels.shape[1] != 2:
        raise ValueError("needs pairs of a chosen and a rejected answer; set data.format: preference")
    return (labels != IGNORED_LABEL).any(dim=-1).all(dim=-1)


class _PreferenceLoss:
    """Base class of preference losses. Implements :class:`portable.model.training_loss.Loss`.

    Subclasses implement :meth:`losses`. This class sums the losses over the pairs and computes the
    values to log.
    """

    needs: ClassVar[tuple[Statistic, ...]] = ("log_probs",)
    sequences: ClassVar[int] = 2
    dropout: ClassVar[bool] = False

    def weight(self, batch: Batch) -> float:
        """Return the weight of a micro-batch in the mean loss, which is its number of pairs.

        Padding pairs do not count. In a padding pair, at least one answer has no labels.
        """
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
        """Compute the loss and the rewards of each pair. Subclasses implement this method.

        In all tensors of shape ``[batch, 2]``, index 0 is the chosen and index 1 the rejected answer.

        Args:
            log_probs: Log-probabilities of the answers, summed over their tokens, ``[batch, 2]``.
            lengths: Number of tokens of the answers, ``[batch, 2]``.
            batch: Columns of the micro-batch, on the device.

        Returns:
            Losses ``[batch]``, and rewards ``[batch, 2]``. The rewards are only logged.
        """
        raise NotImplementedError


@dataclass
class DPO(_PreferenceLoss):
    """Direct preference optimization (Rafailov et al., 2023).

    Attributes:
        beta: Strength of the regularization toward the reference model.
        label_smoothing: Assumed probability that the two answers of a pair are swapped in the data.
            The value must be less than 1 for the loss type ``sigmoid`` (then called cDPO), less
            than 0.5 for ``robust``, and 0 for all other loss types.
        loss_type: Name of the loss formula in TRL, a key of :data:`LOSS_TYPES`.
        sft: Weight of the chosen answer's mean cross-entropy, which is added to the loss.
        reference: Reference model: None, ``"adapter"``, a local folder, or the name of a model on
            the Hub. None selects the model with its weights at the start of the run. Its
            log-probabilities are computed once and cached with the data. ``"adapter"`` selects the
            trained model without its adapter, which runs in an additional forward pass before each
            step. For any other model, each rank keeps a frozen copy.

    Raises:
        ValueError: If ``loss_type`` is unknown, or does not support the value of
            ``label_smoothing``.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    reference: str | None = None
    loss_type: str = "sigmoid"
    sft: float = 0.0
    _reference_model: Any = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.loss_type not in LOSS_TYPES:
            raise ValueError(
                f"loss_type {self.loss_type!r} is not supported; use one of {', '.join(LOSS_TYPES)}"
            )
        max_smoothing = {"sigmoid": 1.0, "robust": 0.5}.get(self.loss_type, 0.0)
        if self.label_smoothing and not 0 < self.label_smoothing < max_smoothing:
            if not max_smoothing:
                raise ValueError(
                    f"loss_type {self.loss_type} does not support label_smoothing; remove label_smoothing"
                )
            raise ValueError(
                f"label_smoothing is {self.label_smoothing:g}, but loss_type {self.loss_type} needs a number "
                f"of at least 0 and less than {max_smoothing:g}; change label_smoothing"
            )
        # The trainer calls `once` to compute reference log-probabilities for all samples before training, and
        # `before` to compute them for the batch of each step.
        self.once = _compute_reference_log_probs if self.reference is None else None
        self.before = None if self.reference is None else self._compute_reference_columns

    def losses(self, log_probs: Tensor, lengths: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute the loss and the rewards of each pair from the log-ratios to the reference model.

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

        A custom subclass can override this method to implement another formula.

        Args:
            ratios: Log-probability of each answer under the model minus its log-probability under the
                reference model, ``[batch, 2]``.
            lengths: Number of tokens of the answers, ``[batch, 2]``.

        Returns:
            Losses ``[batch]``.
        """
        return LOSS_TYPES[self.loss_type](self, self.beta * ratios, self.beta * ratios / lengths)

    def _compute_reference_columns(
        self, forward: Callable[..., Outputs], batch: Batch
    ) -> Mapping[str, Tensor]:
        """Compute the log-probabilities of the answers under the reference model.

        If the reference is a separate model, the first call loads it, and later calls reuse it.

        Args:
            forward: Function that runs a forward pass on the batch. Without arguments, it runs the trained
                model; with ``adapter=False``, the trained model without its adapter; with a model as
                argument, that model.
            batch: Columns of the micro-batch, on the device.

        Returns:
            Columns to add to the batch, keyed by name.
        """
        if self.reference == "adapter":
            return _compute_reference_log_probs(lambda: forward(adapter=False), batch)
        if self._reference_model is None:
            self._reference_model = _load_frozen_model(str(self.reference), batch["labels"].device)
        return _compute_reference_log_probs(lambda: forward(self._reference_model), batch)


@dataclass
class IPO(DPO):
    """Identity preference optimization (Azar et al., 2023): DPO with ``loss_type="ipo"``.

    As in TRL, the log-ratio of an answer is the mean over its tokens instead of the sum.
    """

    loss_type: str = "ipo"


def _compute_reward_margin(rewards: Tensor) -> Tensor:
    """Return the reward of the chosen answer minus the reward of the rejected answer, ``[batch]``.

    Args:
        rewards: Rewards of the chosen and the rejected answer, ``[batch, 2]``.
    """
    return rewards[:, 0] - rewards[:, 1]


def _compute_smoothed_loss(loss: DPO, rewards: Tensor, sign: float = 1.0) -> Tensor:
    """Combine the sigmoid loss of each pair with the loss of the same pair with swapped answers.

    With ``e = loss.label_smoothing``, the result is ``(1 - e) * original + sign * e * swapped``, with
    shape ``[batch]``.

    Args:
        loss: Loss that defines the label smoothing.
        rewards: Rewards of the chosen and the rejected answer, ``[batch, 2]``.
        sign: Sign of the second term: 1 for cDPO, and -1 for robust DPO.
    """
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
"""Formulas of DPO, keyed by their names in TRL.

Each formula is a function that returns the loss of each pair, ``[batch]``. Its arguments are the loss object,
the rewards ``[batch, 2]``, and the rewards divided by the number of tokens of the answers, ``[batch, 2]``.
"""


@dataclass
class SimPO(_PreferenceLoss):
    """Simple preference optimization (Meng et al., 2024). Does not need a reference model.

    Attributes:
        beta: Scale of the rewards. The reward of an answer is beta times its mean log-probability per token.
        gamma: Target margin between the rewards of the chosen and the rejected answer.
    """

    beta: float = 2.0
    gamma: float = 1.0

    def losses(self, log_probs: Tensor, lengths: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute the loss and the rewards of each pair.

        Args:
            log_probs: Log-probabilities of the chosen and the rejected answer, summed over the
                tokens of each answer, ``[batch, 2]``.
            lengths: Number of tokens of the chosen and the rejected answer, ``[batch, 2]``.
            batch: Columns of the micro-batch. Not used.

        Returns:
            Losses ``[batch]``, and rewards of the chosen and the rejected answer, ``[batch, 2]``.
        """
        rewards = self.beta * log_probs / lengths
        return -functional.logsigmoid(rewards[:, 0] - rewards[:, 1] - self.gamma), rewards


@dataclass
class ORPO(_PreferenceLoss):
    """Odds ratio preference optimization (Hong et al., 2024). Does not need a reference model.

    Attributes:
        beta: Weight of the odds-ratio term (lambda in the paper). The other term of the loss, with
            weight 1, is the mean cross-entropy per token of the chosen answer.
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
    """Run the reference model, and return its log-probabilities as a column of the batch.

    Args:
        forward: Function that runs the reference model on the batch.
        batch: Columns of the micro-batch. Not used.

    Returns:
        Column ``REFERENCE_COLUMN``: log-probabilities of the answers, summed over their tokens, fp32
        ``[batch, 2]``.
    """
    log_probs = forward().log_probs
    assert log_probs is not None
    return {REFERENCE_COLUMN: log_probs.float().sum(dim=-1)}


def _load_frozen_model(name: str, device: torch.device) -> nn.Module:
    """Load a frozen reference model onto a device.

    Args:
        name: Local folder, or name of a model on the Hub.
        device: Device to load the model onto. It is the device of the batch.

    Raises:
        UserError: If the model cannot be loaded, or if its attention is not causal. The message
            names ``train.loss``.
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
