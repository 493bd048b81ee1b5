"""Warn about models whose output for a text changes if the text is padded."""

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
        "cpmant",  # counts the token ids other than 0
        "fnet",  # Fourier transforms over the sample
        "funnel",  # pools pairs of tokens
        "mobilebert",  # embeds each token with its neighbors
        "prophetnet",  # relative positions
        "yoso",  # hashing attention
    }
)
_CLASSIFICATION = frozenset({"t5gemma", "t5gemma2"})
"""Model types that classify at the token after the text, which exists only if there is padding."""


def explain_padding_dependence(config: PretrainedConfig, run: RunConfig) -> str | None:
    """Return a warning if the model's output for a text depends on the padding.

    The list of affected model types comes from ``python -m tests.alone``, which compares the
    outputs of each model type of transformers with and without padding.

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
        f"data.seq_len: padding changes the output of {config.model_type} models in transformers, so the "
        "result for a text depends on data.seq_len; set data.seq_len to the length with which the model "
        "will be used"
    )
