"""Find the transformer layers of a model, and run trial forward passes on the meta device."""

from __future__ import annotations

import copy
from collections import defaultdict
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from portable.private import torch_internals
from portable.private.transformers_internals import list_no_split_layer_classes, skip_mask_value_checks

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from transformers import PreTrainedModel


def find_layers_without_hooks(model: nn.Module) -> set[str]:
    """Find the layers whose forward hooks never run.

    FSDP2 cannot shard a layer as a separate unit if the layer runs without its hooks. There are two
    such cases:

    * The parent of a layer calls ``layer.forward`` directly. A trial forward pass on the meta
      device detects this.
    * A custom autograd function calls the layers and computes their gradients, as in Reformer. Such
      layers are recognized by their method ``backward_pass``.

    The result also contains layers that do not run on text, such as the layers of a vision tower.
    FSDP2 can shard these layers, so the caller must exclude them (see
    :func:`portable.engines.fsdp.units.find_unreached_layers`).

    Args:
        model: The model, on the meta device. It is not modified.

    Returns:
        Names of the layers. If the trial forward pass fails, only the Reformer layers are returned.
    """
    kinds = list(group_layers_by_kind(model).values())
    uncalled_kinds = set(range(len(kinds)))
    reversible = {name for name, layer in find_transformer_layers(model) if hasattr(layer, "backward_pass")}

    def register_hooks(trial: nn.Module) -> None:
        for number, (_, layer) in enumerate(find_transformer_layers(trial)):
            layer.register_forward_pre_hook(lambda *_, number=number: uncalled_kinds.discard(number))

    try:
        run_trial_forward(model, register_hooks)
    except Exception:
        return reversible
    return reversible | {name for number in uncalled_kinds for name in kinds[number]}


def gives_all_parameters_gradients(model: nn.Module) -> bool:
    """Return whether every trainable parameter gets a gradient in each pass.

    The result is determined by a trial forward and backward pass on the meta device. If it is False,
    DDP needs ``find_unused_parameters``.

    Args:
        model: The model, on the meta device. It is not modified.

    Returns:
        True if every trainable parameter gets a gradient. False if a parameter gets none, if the config
        enables layer dropout, or if the trial fails, for example because control flow depends on tensor
        values.
    """
    settings = cast("PreTrainedModel", model).config.to_dict()
    if any(value for key, value in settings.items() if key.endswith("layerdrop")):
        return False
    tried: list[nn.Module] = []

    def watch(trial: nn.Module) -> None:
        tried.append(trial.to(torch.bfloat16))  # bf16 is the only dtype that every kernel supports

    try:
        output = run_trial_forward(model, watch, enable_gradients=True)
        output.logits.sum().backward()
    except Exception:
        return False
    return all(p.grad is not None for p in tried[0].parameters() if p.requires_grad)


def run_trial_forward(
    model: nn.Module, prepare: Callable[[nn.Module], None] = lambda _: None, *, enable_gradients: bool = False
) -> Any:
    """Run a reduced copy of a model on two tokens on the meta device.

    The copy has one layer of each kind (see :data:`LayerKinds`). It is in evaluation mode,
    unless ``prepare`` changes the mode.

    Args:
        model: The model, on the meta device, with buffers on any device. It is not modified.
        prepare: Function that is called with the copy before its forward pass.
        enable_gradients: Whether to build a graph for a backward pass.

    Returns:
        The output of the copy.

    Raises:
        Exception: Any error that the model raises, for example because its control flow depends
            on tensor values.
    """
    trial = copy_one_layer_per_kind(model)
    trial.to("meta").eval()
    prepare(trial)
    tokens = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    inputs = {"input_ids": tokens}
    if trial.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens
    with torch.set_grad_enabled(enable_gradients), skip_mask_value_checks():
        return trial(**inputs)


def find_modules_called_repeatedly(model: nn.Module, modules: Collection[nn.Module]) -> list[str]:
    """Find the modules that one forward pass calls more than once, such as a layer used at several depths.

    Args:
        model: The model on the meta device, with buffers on any device. It is not modified.
        modules: Modules of the model to check.

    Returns:
        Names of the modules that are called more than once. If the forward pass fails on the meta
        device, only calls before the failure count.
    """
    ids = {id(module) for module in modules}
    calls = dict.fromkeys((name for name, module in model.named_modules() if id(module) in ids), 0)
    trial: Any = copy.deepcopy(model).to("meta").eval()

    def count(name: str, *_: Any) -> None:
        calls[name] += 1

    for name in calls:
        trial.get_submodule(name).register_forward_pre_hook(partial(count, name))
    tokens = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    with suppress(Exception), torch.no_grad(), skip_mask_value_checks():  # control flow may depend on values
        trial(input_ids=tokens, **({"decoder_input_ids": tokens} if trial.config.is_encoder_decoder else {}))
    return [name for name, number in calls.items() if number > 1]


def find_transformer_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Find the transformer layers, which are the units of sharding, recomputation and initialization.

    The layers are those entries of ``nn.ModuleList`` objects whose class is in the model's
    ``_no_split_modules``. Layers inside other layers are omitted. If no entry has such a class, the
    layers are all entries of one ``nn.ModuleList``: the list that has the most parameters.

    Args:
        model: A transformers model.

    Returns:
        Names and modules, in the order of the model. Empty if the model has no module list.
    """
    classes = list_no_split_layer_classes(model)
    # Use only members of lists: some models also declare their embeddings, which may be tied to the head.
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)]
    members = [(f"{name}.{child}", m) for name, entries in lists for child, m in entries.named_children()]
    layers = [(name, m) for name, m in members if type(m).__name__ in classes]
    if not layers and lists:
        name, largest = max(lists, key=lambda item: sum(p.numel() for p in item[1].parameters()))
        layers = list(_iter_list_members(name, largest))
    names = {name for name, _ in layers}
    return [(name, m) for name, m in layers if not any(name.startswith(f"{n}.") for n in names)]


def _iter_list_members(name: str, entries: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the names and modules of the members of a module list.

    A nested list is replaced by its members, because a list itself is never called and cannot have hooks.
    """
    for child, module in entries.named_children():
        if type(module) is nn.ModuleList:
            yield from _iter_list_members(f"{name}.{child}", module)
        else:
            yield f"{name}.{child}", module


LayerKinds = dict[tuple[Any, ...], list[str]]
"""Layer names by kind. Layers of one kind have the same parent, class, shapes, plain attributes and frozen
parameters.
"""


def group_layers_by_kind(model: nn.Module) -> LayerKinds:
    """Group the names of the transformer layers by kind. See :data:`LayerKinds`."""
    kinds: LayerKinds = defaultdict(list)
    for name, layer in find_transformer_layers(model):
        parent, _, _ = name.rpartition(".")
        shapes = tuple((key, tuple(p.shape), p.requires_grad) for key, p in layer.named_parameters())
        plain = [
            (key, value)
            for module in layer.modules()
            for key, value in vars(module).items()
            if isinstance(value, bool | int | float | str) and "layer_idx" not in key and "idx" not in key
        ]
        kinds[(parent, type(layer), shapes, tuple(plain))].append(name)
    return dict(kinds)


def copy_one_layer_per_kind(model: nn.Module) -> Any:
    """Copy a model with only the first layer of each kind. The copied layers are renumbered from 0."""
    return copy_with_only_layers(model, {names[0] for names in group_layers_by_kind(model).values()})


def copy_with_only_layers(model: nn.Module, layer_names: Collection[str]) -> Any:
    """Copy a model with only some of its layers, renumbered from 0.

    Only the names of the layers are renumbered. The config, such as ``num_hidden_layers``, and the
    attribute ``layer_idx`` of the layers do not change.

    Args:
        model: The model, on the meta device. It is not modified.
        layer_names: Names of the layers to keep. See :func:`find_transformer_layers`.

    Returns:
        The copy.
    """
    memo: dict[int, Any] = {}
    lists: dict[str, list[str]] = defaultdict(list)
    for name, layer in find_transformer_layers(model):
        parent, _, child = name.rpartition(".")
        lists[parent].append(child)
        if name not in layer_names:
            memo[id(layer)] = None
    reduced = copy.deepcopy(model, memo)
    for parent, children in lists.items():
        holder = reduced.get_submodule(parent)
        members = torch_internals.get_submodules(holder)
        remaining = [m for child in children if (m := members[child]) is not None]
        members.clear()
        for i, layer in enumerate(remaining):
            holder.add_module(str(i), layer)
    return reduced
