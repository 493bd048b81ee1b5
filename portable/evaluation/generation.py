"""Metrics of generated text, for encoder-decoder models.

Texts are decoded greedily by fixed-point iteration, without a key-value cache. The input of each
forward pass is a guess of all target tokens. The pass predicts the token at every position, and
these predictions become the next guess. After ``n`` passes, the first ``n`` tokens are final, so at
most one pass per token is needed. Each pass has the shapes of an ordinary evaluation pass, so
generation works on every engine.
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
    """Return 1.0 if a generated text equals its target up to surrounding whitespace, otherwise 0.0."""
    return float(text.strip() == target.strip())


def compute_rouge_l(text: str, target: str) -> float:
    """Compute ROUGE-L (Lin, 2004), the F1 of the longest common subsequence of words.

    Case and punctuation are ignored.

    Args:
        text: Generated text.
        target: Target text.

    Returns:
        A value from 0 to 1. 0 if the texts have no word in common.
    """
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
"""Functions that score a generated text against its target text, keyed by the name of the metric.

The value of a metric is its mean score over all texts. Higher values are better.
"""


@dataclass(frozen=True)
class TextMetrics:
    """Metrics of text that the model generates during training.

    Attributes:
        names: Names of the metrics, which are keys of :data:`TEXT_METRICS`.
        tokenizer: Tokenizer that decodes the tokens.
    """

    names: Sequence[str]
    tokenizer: Any

    def compute_sums(
        self, backend: Backend, engine: Engine, batch: Batch, device_batch: Batch
    ) -> dict[str, float]:
        """Generate texts for a micro-batch, and sum their scores. Must be called on all ranks.

        Args:
            backend: Backend of the run.
            engine: Engine with the model.
            batch: Micro-batch on the host.
            device_batch: The same micro-batch on the device.

        Returns:
            The number of texts that have a target (key ``texts``), and for each metric, the sum of its
            scores (key: name of the metric).
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
        """Decode token ids to text, and leave out special tokens."""
        return decode(self.tokenizer, tokens, skip_special_tokens=True)


class _PredictionReader:
    """Measure that returns the predictions of a micro-batch instead of sums.

    The only entry of the result is ``guess``, the most likely token at each position. Implements
    :class:`portable.model.loss.MicroBatchMeasure`.
    """

    needs: Literal["logits", "predictions"] | None = "predictions"
    pass_name = "generation"

    def __call__(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        assert outputs.predictions is not None
        return {"guess": outputs.predictions}


def generate_greedily(
    backend: Backend, engine: Engine, batch: Batch, device_batch: Batch, end_token: int | None
) -> Tensor:
    """Generate a target text for each row of a micro-batch with greedy decoding.

    The decoder starts from the first token of ``decoder_input_ids``. Must be called on all ranks,
    because all of them run the same number of passes.

    This function is not supported on several XLA hosts. It requires that
    :meth:`portable.backend.Backend.read_to_host` returns only the rows of this rank, but on several
    XLA hosts that method returns the rows of all hosts. Backend ``xla`` therefore rejects metrics
    of generated text on several hosts.

    Args:
        backend: Backend of the run.
        engine: Engine with the model.
        batch: Micro-batch on the host.
        device_batch: The same micro-batch on the device.
        end_token: Id of the end-of-sequence token. When a row contains this token, all later
            positions of the row are filled with it. None if the tokenizer has no such token.

    Returns:
        Token ids with the shape of the labels, int64 ``[rows, tokens]`` on the host.
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
