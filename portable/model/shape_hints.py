"""Sizes of a model that a device's matrix units do not like.

Source: NVIDIA's guide to matrix multiplication, requirements to use tensor cores
(https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/index.html).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SIZES = ("vocab_size", "hidden_size", "intermediate_size")


def shape_hints(config: PretrainedConfig, *, tokens: int, multiple: int | None, precision: str) -> list[str]:
    """A line for each size of the matrix products that is no multiple of what the device works in.

    Args:
        config: of the model.
        tokens: of a micro-batch, the products' third size.
        multiple: elements, from :meth:`portable.backend.Backend.shape_multiple`; None gives no hints.
        precision: that they are multiplied in, for the text.
    """
    if multiple is None:
        return []
    text = config.get_text_config()
    sizes = {f"model.config.{name}": getattr(text, name, None) for name in SIZES}
    sizes["train.micro_batch_size x data.seq_len"] = tokens
    return [
        f"hint: {name} is {size}, no multiple of {multiple}, in which this device multiplies {precision} "
        f"fastest; {size + -size % multiple} is"
        for name, size in sizes.items()
        if isinstance(size, int) and size % multiple
    ]
