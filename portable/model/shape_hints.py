"""Hints about model sizes that do not suit a device's matrix units.

Source: NVIDIA's guide to matrix multiplication, requirements to use tensor cores
(https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/index.html).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SIZES = ("vocab_size", "hidden_size", "intermediate_size")


def shape_hints(config: PretrainedConfig, *, tokens: int, multiple: int | None, precision: str) -> list[str]:
    """Return a hint for each matrix dimension that is not a multiple of ``multiple``.

    Args:
        config: the model's config.
        tokens: per micro-batch; the third dimension of the products.
        multiple: elements, from :meth:`portable.backend.Backend.shape_multiple`; None returns no hints.
        precision: of the products, for the text.
    """
    if multiple is None:
        return []
    text = config.get_text_config()
    sizes = {f"model.config.{name}": getattr(text, name, None) for name in SIZES}
    sizes["train.micro_batch_size x data.seq_len"] = tokens
    return [
        f"hint: {name} is {size}, not a multiple of {multiple}; this device multiplies {precision} "
        f"faster with {size + -size % multiple}"
        for name, size in sizes.items()
        if isinstance(size, int) and size % multiple
    ]
