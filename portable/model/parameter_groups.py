"""Assign a model's parameters to the groups of its optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from portable.errors import require
from portable.model.parameters import match_parameters
from portable.model.unused_parameters import get_unreached_names
from portable.optim.optimizers import OptimizerGroup
from portable.private import transformers_internals

if TYPE_CHECKING:
    from portable.config.sections import TrainConfig

_UNDECAYED_PATTERN = r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)"


def list_decayed_names(model: nn.Module) -> set[str]:
    """List the names of the parameters with weight decay: all parameters except norms and biases.

    As in ``get_decay_parameter_names`` of transformers' Trainer, the parameter name and the class of
    its module determine whether a parameter is a norm or a bias. The number of dimensions is not used,
    because some biases are tables and some weights are vectors.
    """
    return set(
        transformers_internals.list_parameter_names_except(model, [nn.LayerNorm], [_UNDECAYED_PATTERN])
    )


CONVOLUTION_CLASSES = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


def list_layer_matrix_names(model: nn.Module) -> set[str]:
    """List the names of the layer matrices that the Muon optimizer updates.

    Only parameters inside an ``nn.ModuleList`` are considered. 3D parameters, which are stacked
    expert matrices, are included. Embeddings, convolutions, norms, biases and matrices with a
    single row or column are excluded. Frozen matrices are included, although Muon does not
    update them.
    """
    decays = list_decayed_names(model)
    lists = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
    matrices = set()
    for prefix, module in model.named_modules():
        if not prefix.startswith(lists) or isinstance(module, (nn.Embedding, *CONVOLUTION_CLASSES)):
            continue
        for name, parameter in module.named_parameters(prefix, recurse=False):
            if 2 <= parameter.dim() <= 3 and min(parameter.shape[-2:]) > 1 and name in decays:
                matrices.add(name)
    return matrices


def assign_parameter_groups(model: nn.Module, settings: TrainConfig) -> dict[str, OptimizerGroup]:
    """Assign each trained parameter of a model to a group of the optimizer.

    A parameter belongs to the first group in ``train.parameter_groups`` whose pattern matches its
    name. The pattern may match any name of a tied parameter, which has several names. Without a
    match, the parameter belongs to the default group.

    A group may override the learning rate and the weight decay of the ``train`` section. The weight
    decay is always 0 for norms, for biases, and for parameters that never receive a gradient.

    Args:
        model: The model. Its frozen parameters do not require gradients.
        settings: The ``train`` section.

    Returns:
        The group of each trained parameter. The keys are the names in ``model.named_parameters()``,
        which lists only the first name of a tied parameter.

    Raises:
        UserError: If a pattern is not a regular expression, if a group would contain no trained
            parameter, if nothing is trained, or if Muon is used and no trained parameter is a
            matrix.
    """
    decays = list_decayed_names(model)
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    aliases = {first: [first, *others] for first, *others in names.values()}
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    responsible_key = "train.trainable" if settings.has_frozen_patterns else "model.function"
    require(
        bool(trained),
        f"{responsible_key}: no parameter is left to train; change {responsible_key} so that at least one "
        "parameter is trained",
    )
    pattern_numbers: dict[str, int] = {}
    key = "train.parameter_groups"
    for pattern_number, group in enumerate(settings.parameter_groups, start=1):
        matches = match_parameters(key, group.pattern, aliases)
        new_names = (matches & trained) - pattern_numbers.keys()
        reason = "an earlier pattern matches" if matches & trained else "are frozen"
        require(
            bool(new_names),
            f"{key}: {group.pattern!r} matches only parameters that {reason}; correct or remove this pattern",
        )
        pattern_numbers.update(dict.fromkeys(new_names, pattern_number))
    matrices = list_layer_matrix_names(model) if settings.optimizer == "muon" else set()
    require(
        settings.optimizer != "muon" or bool(matrices & trained),
        "train.optimizer: muon needs a trained weight matrix with at least two rows and columns in the "
        "transformer layers, but there is none; set train.optimizer to adamw",
    )
    groups, unreached = {}, get_unreached_names(model)
    for name in aliases:
        if name in trained:
            # Exclude parameters without a gradient from weight decay, because ZeRO gives them a gradient of
            # zeros and would decay them.
            pattern_number, is_undecayed = (
                pattern_numbers.get(name, 0),
                name not in decays or name in unreached,
            )
            rate, decay = settings.learning_rate, settings.weight_decay
            if pattern_number:
                overrides = settings.parameter_groups[pattern_number - 1]
                rate = rate if overrides.learning_rate is None else overrides.learning_rate
                decay = decay if overrides.weight_decay is None else overrides.weight_decay
            groups[name] = OptimizerGroup(
                pattern_number, is_undecayed, rate, 0.0 if is_undecayed else decay, name in matrices
            )
    return groups
