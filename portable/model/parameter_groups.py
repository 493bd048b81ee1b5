"""Which parameters of a model form a group of its optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from portable.errors import require
from portable.model.parameters import find_matching_parameters
from portable.model.unused_parameters import get_unreached_names
from portable.optim.optimizers import Group
from portable.private import transformers_internals

if TYPE_CHECKING:
    from portable.config.sections import TrainConfig

_SPARED = r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)"


def find_decaying_names(model: nn.Module) -> set[str]:
    """The names of the parameters with weight decay: all except norms and biases.

    As in the Trainer's ``get_decay_parameter_names``, the parameter's name or its module's class decides. The
    number of dims does not: a bias may be a table and a weight may be a vector.
    """
    return set(transformers_internals.list_parameter_names(model, [nn.LayerNorm], [_SPARED]))


CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def find_layer_matrices(model: nn.Module) -> set[str]:
    """The names of the matrices of the layers, which are in module lists, and of their experts' stacks.

    Not of embeddings, convolutions, norms and biases, nor of vectors that are stored as matrices.
    """
    decays = find_decaying_names(model)
    lists = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
    matrices = set()
    for prefix, module in model.named_modules():
        if not prefix.startswith(lists) or isinstance(module, (nn.Embedding, *CONVOLUTIONS)):
            continue
        for name, parameter in module.named_parameters(prefix, recurse=False):
            if 2 <= parameter.dim() <= 3 and min(parameter.shape[-2:]) > 1 and name in decays:
                matrices.add(name)
    return matrices


def assign_groups(model: nn.Module, settings: TrainConfig) -> dict[str, Group]:
    """The group of each trained parameter of ``model``, by its first name.

    Raises:
        UserError: if a pattern is not a regular expression or decides nothing.
    """
    decays = find_decaying_names(model)
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    every = {first: [first, *others] for first, *others in names.values()}
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    left_by = "train.trainable" if settings.freezes else "model.function"
    require(bool(trained), f"{left_by}: nothing is left to train; let at least one parameter be trained")
    number: dict[str, int] = {}
    key = "train.parameter_groups"
    for place, group in enumerate(settings.parameter_groups, start=1):
        matches = find_matching_parameters(key, group.pattern, every)
        new = (matches & trained) - number.keys()
        why = "an earlier pattern matches" if matches & trained else "are frozen"
        require(
            bool(new), f"{key}: {group.pattern!r} matches only parameters that {why}; correct or remove it"
        )
        number.update(dict.fromkeys(new, place))
    matrices = find_layer_matrices(model) if settings.optimizer == "muon" else set()
    require(
        settings.optimizer != "muon" or bool(matrices & trained),
        "train.optimizer: muon is for the matrices of transformer layers, and none is trained; use adamw",
    )
    groups, unreached = {}, get_unreached_names(model)
    for name in every:
        if name in trained:
            # A parameter without a gradient must keep its value, but ZeRO gives it a gradient of zeros.
            place, spared = number.get(name, 0), name not in decays or name in unreached
            rate, decay = settings.learning_rate, settings.weight_decay
            if place:
                overrides = settings.parameter_groups[place - 1]
                rate = rate if overrides.learning_rate is None else overrides.learning_rate
                decay = decay if overrides.weight_decay is None else overrides.weight_decay
            groups[name] = Group(place, spared, rate, 0.0 if spared else decay, name in matrices)
    return groups
