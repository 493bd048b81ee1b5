"""Build the special tokens to put around a document."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from portable.errors import UserError

if TYPE_CHECKING:
    from portable.data.tokens.tokenizer import Vocabulary


@dataclass(frozen=True)
class Frame:
    """Special tokens to put around each document.

    The ``repr`` of this class is part of cache keys.

    Attributes:
        prefix: Tokens before a document. Omitted if the document already begins with these tokens.
        suffix: Tokens after a document.
        target: Special tokens to put around the target texts of an encoder-decoder model. None if
            they are the same as for other texts, or if there are no target texts.
        once: Whether to omit the suffix after a text that already ends with it.
    """

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    target: Frame | None = field(default=None, repr=False)
    once: bool = field(default=False, compare=False)


def build_special_token_frame(task: str, vocabulary: Vocabulary, target: Vocabulary | None = None) -> Frame:
    """Build the special tokens that a task puts around a document.

    A document of a causal model starts with the tokenizer's prefix and ends with one end token. Other
    tasks use the tokenizer's prefix and suffix. If the tokenizer has no suffix, they use the end token,
    except for classification.

    Args:
        task: One of ``TASKS``.
        vocabulary: Special tokens that the tokenizer adds to texts.
        target: Special tokens that the tokenizer adds to targets. None if the task has no targets.

    Raises:
        UserError: If a document must end with an end token, but the tokenizer has none.
    """
    if target is not None:
        text_frame, target_frame = (
            build_special_token_frame(task, vocabulary),
            build_special_token_frame(task, target),
        )
        return text_frame if target_frame == text_frame else replace(text_frame, target=target_frame)
    if task == "sequence-classification":
        return Frame(vocabulary.prefix, vocabulary.suffix)
    if task != "causal-lm" and vocabulary.suffix:
        return Frame(vocabulary.prefix, vocabulary.suffix)
    if vocabulary.end_token is None:
        raise UserError(
            "data.tokenizer: the tokenizer has no eos_token to mark the end of a document; set an eos_token "
            "in its tokenizer_config.json, or use another tokenizer"
        )
    return Frame(vocabulary.prefix, (vocabulary.end_token,), once=task == "causal-lm")
