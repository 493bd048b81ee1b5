"""Metrics of generated texts, for models with an encoder and a decoder.

The texts are the greedy ones. A pass of the model predicts every position from a guess of those before it;
its predictions are the next guess. After n passes the first n tokens are right, so the guess stops changing
at the greedy text, at the latest after a pass for each token. Every pass is that of an evaluation: the same
shapes, no cache, on every engine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from portable.batch import IGNORED_LABEL
from portable.data.tokens.bounded_tokenizer import decode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from portable.backend import Backend, Engine
    from portable.batch import Batch
    from portable.model.training_loss import Outputs

_WORD = re.compile(r"[^\W_]+")


def compute_exact_match(text: str, target: str) -> float:
    """1 if the texts are equal, apart from space around them."""
    return float(text.strip() == target.strip())


def compute_rouge_l(text: str, target: str) -> float:
    """ROUGE-L (Lin, 2004): F1 of the longest common subsequence of words, without case and punctuation."""
    words, target_words = _WORD.findall(text.lower()), _WORD.findall(target.lower())
    row = [0] * (len(target_words) + 1)
    for word in words:
        diagonal = 0
        for column, target_word in enumerate(target_words, start=1):
            diagonal, row[column] = (
                row[column],
                diagonal + 1 if word == target_word else max(row[column], row[column - 1]),
            )
    return 2 * row[-1] / (len(words) + len(target_words)) if row[-1] else 0.0


TEXT_METRICS: dict[str, Callable[[str, str], float]] = {
    "exact_match": compute_exact_match,
    "rouge_l": compute_rouge_l,
}
"""A number for a generated text and its target; the metric is the mean over texts. Higher is better."""


@dataclass(frozen=True)
class TextMetrics:
    """The metrics of generated texts of a run.

    Attributes:
        names: keys of ``TEXT_METRICS``.
        tokenizer: turns tokens into texts.
    """

    names: Sequence[str]
    tokenizer: Any

    def compute_sums(
        self, backend: Backend, engine: Engine, batch: Batch, device_batch: Batch
    ) -> dict[str, float]:
        """Generate for a micro-batch, and add up its metrics; all ranks call it.

        Args:
            batch: on the host. placed: the same on the device.
        """
        end = self.tokenizer.eos_token_id
        tokens = generate_greedily(backend, engine, batch, device_batch, end)
        totals = dict.fromkeys(("texts", *self.names), 0.0)
        for row, labels in zip(tokens.tolist(), batch["labels"], strict=True):
            if target := labels[labels != IGNORED_LABEL].tolist():
                text = self._decode_tokens(row[: row.index(end)] if end in row else row)
                totals["texts"] += 1
                for name in self.names:
                    totals[name] += TEXT_METRICS[name](text, self._decode_tokens(target))
        return totals

    def _decode_tokens(self, tokens: list[int]) -> str:
        return decode(self.tokenizer, tokens, skip_special_tokens=True)


class _PredictionReader:
    """Reads what a pass predicts; see :class:`portable.model.loss.MicroBatchMeasure`."""

    needs: Literal["logits", "predictions"] | None = "predictions"
    pass_name = "generation"

    def __call__(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        assert outputs.predictions is not None
        return {"guess": outputs.predictions}


def generate_greedily(
    backend: Backend, engine: Engine, batch: Batch, device_batch: Batch, end_token: int | None
) -> Tensor:
    """The most likely tokens after each row's first decoder input, int64 ``[rows, tokens]`` on the host.

    Args:
        batch: on the host. placed: the same on the device. end: the token after which nothing follows.
    """
    guess = torch.zeros_like(batch["labels"])
    for _ in range(guess.shape[1]):
        inputs = torch.cat([batch["decoder_input_ids"][:, :1], guess[:, :-1]], dim=1)
        device_inputs = {**device_batch, **backend.copy_to_device({"decoder_input_ids": inputs})}
        device_guess = engine.evaluate_batch(device_inputs, _PredictionReader(), {})["guess"]
        previous_guess, guess = (
            guess,
            torch.tensor(backend.read_to_host([device_guess]), dtype=torch.int64).view_as(guess),
        )
        if end_token is not None:
            ends = (guess == end_token).long()
            guess = guess.where(ends.cumsum(dim=-1) - ends == 0, end_token)
        if not backend.reduce_any(not torch.equal(previous_guess, guess)):
            break
    return guess
