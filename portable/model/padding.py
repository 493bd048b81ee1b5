"""Warn about models whose output for a text depends on the padding of its sample."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from portable.config import RunConfig

_ANY_TASK = frozenset(
    {
        "big_bird",  # the padded length chooses between full and sparse attention
        "bigbird_pegasus",
        "canine",  # pools blocks of characters
        "convbert",  # convolutions
        "cpmant",  # counts the tokens other than 0
        "fnet",  # Fourier transforms over the sample
        "funnel",  # pools pairs of tokens
        "mobilebert",  # embeds each token with its neighbors
        "prophetnet",  # relative positions
        "yoso",  # hashes
    }
)
_CLASSIFICATION = frozenset({"t5gemma", "t5gemma2"})
"""Model types that classify at the token after the text, which exists only if there is padding."""


def explain_padding_dependence(config: PretrainedConfig, run: RunConfig) -> str | None:
    """Build a warning if padding changes the output of the model for a text.

    The list of such model types comes from ``python -m tests.alone``, which compares each model type of
    transformers with and without padding.

    Args:
        config: Transformers config of the model.
        run: The config of the run.

    Returns:
        The warning. None if the samples have no padding, or if padding does not change the output.
    """
    packs = run.model.task in ("causal-lm", "masked-lm") and run.data.packing is True
    classifies = run.model.task == "sequence-classification"
    depends = config.model_type in _ANY_TASK or (classifies and config.model_type in _CLASSIFICATION)
    if packs or not depends:
        return None
    return (
        f"data.seq_len: transformers computes {config.model_type} with the padding of a sample, so the "
        "result for a text depends on data.seq_len; set data.seq_len to the length with which the model "
        "will be used"
    )
