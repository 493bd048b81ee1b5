"""Select the tensors in a checkpoint that a model needs, before each rank loads its slices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portable.converters import CheckpointError
from portable.model.parameters import get_checkpointed_tensors, map_tied_names
from portable.model.unused_parameters import get_unreached_names

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from portable.converters import Checkpoint
    from portable.converters import Tensor as StoredTensor
    from portable.model.weight_sources import ReadableTensor


@dataclass(frozen=True)
class StoredState:
    """Weights and optimizer state of a model in a checkpoint, read lazily.

    Attributes:
        weights: Stored tensors of the model, keyed by name. Tied parameters have one entry.
        optimizer: Optimizer state of each trained parameter, keyed by parameter name and then by entry
            name (``exp_avg``, ``step``, ...). Parameters that have never had a gradient are missing.
    """

    weights: Mapping[str, ReadableTensor]
    optimizer: Mapping[str, Mapping[str, StoredTensor | float | bool]]


def match_checkpoint_to_model(checkpoint: Checkpoint, model: nn.Module) -> StoredState:
    """Select from a checkpoint the tensors and the optimizer state that a model needs.

    Args:
        checkpoint: Checkpoint whose tensors have the names of the model's parameters.
        model: Model with the parameters to load.

    Returns:
        The weights and the optimizer state of the model.

    Raises:
        CheckpointError: If a tensor of the model is missing, or if there is no optimizer state.
            Also raised if a trained parameter is neither in the optimizer state nor in its
            parameter groups, except if the parameter never receives a gradient
            (:func:`get_unreached_names`).
    """
    weights: dict[str, ReadableTensor] = dict(checkpoint.tensors)
    for name, others in map_tied_names(model).items():
        alias = next((other for other in others if other in weights), None)
        if name not in weights and alias is not None:
            weights[name] = weights[alias]
    model_tensors = get_checkpointed_tensors(model)
    missing = model_tensors.keys() - weights.keys()
    if missing:
        remedy = "use a checkpoint of this model"
        if "config.json" in checkpoint.companions and "adapter_config.json" not in checkpoint.companions:
            remedy += (
                ", or, to start from only the weights, convert this checkpoint with portable-convert "
                f"{checkpoint.root} OUT, and set model.name_or_path to OUT and output_dir to a new folder"
            )
        raise CheckpointError(
            f"{checkpoint.root}: has no tensor {min(missing)}, because the checkpoint is from another "
            f"model or from an earlier version of this program; {remedy}"
        )
    if checkpoint.optimizer is None:
        raise CheckpointError(
            f"{checkpoint.root}: has no optimizer state; use a checkpoint that contains the optimizer state"
        )
    names_in_optimizer = {name for group in checkpoint.optimizer.param_groups for name in group["params"]}
    optimizer, unreached = {}, get_unreached_names(model)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        state = checkpoint.optimizer.state.get(name)
        if state is not None:
            optimizer[name] = state
        elif name not in names_in_optimizer and name not in unreached:
            raise CheckpointError(
                f"{checkpoint.root}: has no optimizer state for {name}; use a checkpoint of a run that "
                "trained this parameter"
            )
    return StoredState({name: weights[name] for name in model_tensors}, optimizer)
