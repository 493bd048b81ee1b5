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

from portable.model.loss import IGNORED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from portable.backend import Backend, Batch, Engine
    from portable.model.loss import Outputs

_WORD = re.compile(r"[^\W_]+")


def exact_match(text: str, target: str) -> float:
    """1 if the texts are equal, apart from space around them."""
    return float(text.strip() == target.strip())


def rouge_l(text: str, target: str) -> float:
    """ROUGE-L (Lin, 2004): F1 of the longest common subsequence of words, without case and punctuation."""
    ours, wanted = _WORD.findall(text.lower()), _WORD.findall(target.lower())
    row = [0] * (len(wanted) + 1)
    for word in ours:
        before = 0
        for at, other in enumerate(wanted, start=1):
            before, row[at] = row[at], before + 1 if word == other else max(row[at], row[at - 1])
    return 2 * row[-1] / (len(ours) + len(wanted)) if row[-1] else 0.0


TEXT_METRICS: dict[str, Callable[[str, str], float]] = {"exact_match": exact_match, "rouge_l": rouge_l}
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

    def sums(self, backend: Backend, engine: Engine, placed: Batch, labels: Tensor) -> dict[str, float]:
        """Generate for a micro-batch, and add up its metrics; all ranks call it.

        Args:
            placed: the micro-batch on the device. labels: the same on the host, int64 ``[rows, tokens]``.
        """
        end = self.tokenizer.eos_token_id
        tokens = torch.tensor(backend.read([greedy(backend, engine, placed, labels, end)]), dtype=torch.int64)
        found = dict.fromkeys(("texts", *self.names), 0.0)
        for row, wanted in zip(tokens.view(labels.shape).tolist(), labels, strict=True):
            if target := wanted[wanted != IGNORED].tolist():
                text = self._text(row[: row.index(end)] if end in row else row)
                found["texts"] += 1
                for name in self.names:
                    found[name] += TEXT_METRICS[name](text, self._text(target))
        return found

    def _text(self, tokens: list[int]) -> str:
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return text


class _Guess:
    """Reads what a pass predicts; see :class:`portable.model.loss.Measure`."""

    needs: Literal["logits", "predictions"] | None = "predictions"
    kind = "generation"

    def __init__(self, end: int | None) -> None:
        self._end = end

    def __call__(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        guess = outputs.predictions
        assert guess is not None
        if self._end is not None:  # nothing follows the end
            ends = (guess == self._end).long()
            guess = torch.where(ends.cumsum(dim=-1) - ends > 0, self._end, guess)
        return {"guess": guess, "changed": (guess != batch["guess"]).sum()}


def greedy(backend: Backend, engine: Engine, batch: Batch, labels: Tensor, end: int | None) -> Tensor:
    """The most likely tokens after each row's first decoder input, int64 ``[rows, tokens]`` on the device.

    Args:
        batch: on the device. labels: the same on the host. end: the token after which nothing follows.
    """
    # Any guess will do; a tensor of its own, as later ones are.
    guess = backend.place({"guess": torch.zeros_like(labels)})["guess"]
    measure = _Guess(end)
    for _ in range(labels.shape[1]):
        # The same operations on the same tensors in each pass: on XLA, they are part of one graph.
        inputs = torch.cat([batch["decoder_input_ids"][:, :1], guess[:, :-1]], dim=1)
        found = engine.evaluate({**batch, "decoder_input_ids": inputs, "guess": guess}, measure, {})
        guess = found["guess"]
        (changed,) = backend.read([backend.sum(found["changed"])])
        if not changed:
            break
    return guess
