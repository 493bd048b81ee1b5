"""Build the images that the planner uses to measure the memory of the image tower."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING

import torch

from portable.errors import UserError
from portable.terminal import print_status

if TYPE_CHECKING:
    from portable.batch import Batch
    from portable.config import RunConfig
    from portable.data.sizes import DataSizes
    from portable.data.tokens.image_processing import ImageProcessor


def build_largest_image_columns(config: RunConfig, sizes: DataSizes | None) -> Batch | None:
    """Build blank image inputs for the worst case: a sample whose images need the most memory.

    If the data is tokenized, the images have the sizes of the images in the conversation with the
    most image tokens. If documents are also packed, these images are repeated as often as they fit
    into a sample. If the data is not tokenized, there is one square image of about the largest size
    that ``data.image_max_pixels``, the model's processor and ``data.seq_len`` allow.

    Args:
        config: Resolved config of the run.
        sizes: Sizes of the data. None if the data is not on this machine.

    Returns:
        Tensors, keyed by the name of the argument of the model's ``forward``. None if the run has
        no images, if no image fits into a sample, or if the processor is not on this machine. In
        the last case, a note is printed.
    """
    if not config.data.images:
        return None
    processor = None if sizes is None else sizes.image_processor
    if processor is None:
        processor = _load_local_processor(config)
    if processor is None:
        _print_note_once(
            "note: the plan does not include the memory of the vision tower, because the image processor of "
            f"{config.model.name_or_path} is not on this machine"
        )
        return None
    if sizes is not None and sizes.images is not None:
        largest = list(sizes.images.largest)
        if sizes.packing == "documents" and largest:  # a sample may contain several such conversations
            largest *= max(1, sizes.seq_len // sizes.images.largest_tokens)
    else:
        square = processor.find_largest_square(config.data.seq_len, config.data.image_max_pixels)
        largest = [] if square is None else [square]
    if not largest:
        return None
    return {name: torch.from_numpy(values) for name, values in processor.build_blank_columns(largest).items()}


@cache
def _print_note_once(note: str) -> None:
    """Print a note, unless it was printed before."""
    print_status(note)


def _load_local_processor(config: RunConfig) -> ImageProcessor | None:
    """Load the model's image processor from this machine, or return None if it is not available."""
    from portable.data.tokens.image_processing import load_image_processor

    if config.model.name_or_path is None:
        return None
    with suppress(UserError):
        return load_image_processor(
            config.model.name_or_path, offline=True, trust_remote_code=config.model.trust_remote_code
        )
    return None
