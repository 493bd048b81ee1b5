"""Count the features and FLOPs of a model's image tower.

The tower runs once on fake tensors, which have shapes but no memory.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from portable.batch import BLANK_PREFIX
from portable.data.images import ImageSize
from portable.errors import UserError
from portable.model.parameters import replace_by_fake_tensors
from portable.model.unused_parameters import get_unreached_names
from portable.private import torch_internals

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import nn

    from portable.batch import Batch
    from portable.data.tokens.image_processing import ImageProcessor

_TRIAL_SIZES = (ImageSize(96, 64), ImageSize(64, 160))
"""Sizes of the test images of :func:`check_image_features`. Their aspect ratios differ, because some
processors divide an image into a number of parts that depends on its aspect ratio."""
_TOKEN_ATTRIBUTES = ("image_token_id", "image_token_index")
"""Config attributes that may contain the id of the image token, which a model replaces by an image
feature."""


def check_image_features(model: nn.Module, processor: ImageProcessor) -> None:
    """Check that a model accepts the tokens and tensors that a processor creates from images.

    For two test images, the number of features that the model computes must equal the number of
    image tokens that the processor creates. The two numbers are not compared in these cases:

    - The model has no method ``get_image_features``.
    - This method does not run on fake tensors. The model itself then compares the numbers in each
      step.
    - The features in the output of this method cannot be counted (see :func:`_count_features`).

    Args:
        model: A transformers model on the meta device. It is not modified.
        processor: Processor of the model.

    Raises:
        UserError: If the number of features differs from the number of tokens, or if the
            processor's tokens for an image depend on the other images of the batch.
    """
    name = type(model).__name__
    if not processor.is_independent_of_other_images(_TRIAL_SIZES):
        raise UserError(
            f"data.images: {name} is not supported, because its processor produces different tokens for an "
            "image if the batch contains other images; use another model"
        )
    if not callable(getattr(model, "get_image_features", None)):
        return
    columns = {
        column: torch.from_numpy(values)
        for column, values in processor.build_blank_columns(_TRIAL_SIZES).items()
    }
    try:
        num_features = _count_features(run_image_tower(model, columns))
    except Exception:  # the code of a model may raise any error on tensors without values
        return
    config: Any = model.config
    token = next(
        (value for key in _TOKEN_ATTRIBUTES if (value := getattr(config, key, None)) is not None), None
    )
    num_tokens = processor.count_tokens(_TRIAL_SIZES, None if token is None else int(token))
    if num_features is not None and num_features != num_tokens:
        raise UserError(
            f"data.images: for two images, {name} produces {num_features} features, but its processor "
            f"produces {num_tokens} tokens; correct the files of the processor, or use another model"
        )


def compute_flops_per_feature(model: nn.Module, columns: Batch) -> float:
    """Compute the FLOPs of the image tower per image feature, in the forward and backward pass.

    An image feature is one output vector of the tower. As in
    :func:`portable.model.flops.compute_flops_per_token`, the forward FLOPs of a weight count three
    times if the weight is trained, twice if only an earlier weight is trained, and once otherwise.
    Recomputation does not count. The parameters in :func:`get_unreached_names` count as the weights
    of the tower, because they affect the loss only through images.

    Args:
        model: A transformers model on the meta device. It is not modified.
        columns: Columns of a batch with images, keyed by name. Other columns are ignored.

    Returns:
        FLOPs per feature. 0 if the tower does not run on fake tensors, if its features cannot be
        counted, or if there are no unreached parameters.
    """
    counter = FlopCounterMode(display=False)
    try:
        num_features = _count_features(run_image_tower(model, columns, counter))
    except Exception:  # the code of a model may raise any error on tensors without values
        return 0.0
    if not num_features:
        return 0.0
    passes, forward_weights, weights = 1, 0, 0
    unreached = get_unreached_names(model)  # parameters that affect the loss only through images
    for name, parameter in model.named_parameters():
        if name in unreached:
            passes = 2 if parameter.requires_grad else passes
            forward_weights += parameter.numel()
            weights += (passes + parameter.requires_grad) * parameter.numel()
    return counter.get_total_flops() / num_features * weights / max(1, forward_weights)


def run_image_tower(model: nn.Module, columns: Batch, mode: AbstractContextManager[Any] | None = None) -> Any:
    """Run the image tower of a model on fake tensors.

    Only the parameters and buffers, and tensors computed from them, are fake. Other tensors
    have values, because the control flow of a tower depends on the sizes of its images.

    Args:
        model: A transformers model on the meta device. It is not modified.
        columns: Columns of a batch with images, real tensors keyed by name. Other columns are
            ignored.
        mode: Dispatch mode that intercepts the operations of the tower. None for no mode.

    Returns:
        The output of ``get_image_features``.

    Raises:
        Exception: Any error that the model raises.
    """
    tower: Any = copy.deepcopy(model)
    with torch_internals.create_fake_tensor_mode(allow_non_fake_inputs=True), ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # ignore warnings about fake tensors
        replace_by_fake_tensors(tower, None)
        # Make only tensors that depend on parameters fake, because the control flow of a tower depends on the
        # sizes of its images.
        stack.enter_context(torch_internals.compute_real_tensors())
        stack.enter_context(torch.no_grad())
        if mode is not None:
            stack.enter_context(mode)
        return tower.get_image_features(**select_tower_arguments(tower, columns))


def select_tower_arguments(model: Any, columns: Batch) -> Batch:
    """Select the columns of a batch that are arguments of ``get_image_features``.

    The result is keyed by argument name.

    Args:
        model: A transformers model that accepts images.
        columns: Columns of a batch, keyed by name. In a batch without images, a blank image
            provides these columns. Their names then begin with ``blank_``. This prefix is removed
            in the result.
    """
    parameters = inspect.signature(model.get_image_features).parameters
    return {
        argument: values
        for name, values in columns.items()
        if (argument := name.removeprefix(BLANK_PREFIX)) in parameters
    }


def _count_features(output: Any) -> int | None:
    """Count the image feature vectors in the output of ``get_image_features``.

    Returns None if the output is not a tensor, a sequence of tensors, or a dict that contains
    either as ``pooler_output``.
    """
    if isinstance(output, dict):
        output = output.get("pooler_output")
    tensors: list[Any] = list(output) if isinstance(output, list | tuple) else [output]
    if not tensors or not all(isinstance(tensor, torch.Tensor) and tensor.dim() for tensor in tensors):
        return None
    return sum(int(tensor.numel() // tensor.shape[-1]) for tensor in tensors)
