"""Find the parameters that the training loss does not depend on.

Text does not reach the vision tower of a multimodal model, an indexer that only chooses positions, or a head
that the task leaves unused. Such parameters never get a gradient. They are frozen, because an optimizer with
flat state, such as DeepSpeed's, would otherwise apply weight decay to them.

The autograd graph of a trial on the meta device decides, not the gradients of a batch: experts that no token
has chosen yet are part of the graph. The result depends on the model and the task only, so that it is the
same on all ranks, in a resumed run, and on every engine.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from portable.model.layers import layer_kinds, one_layer_per_kind, transformer_layers
from portable.model.loss import without_dropout
from portable.model.model_terms import ModelTerms
from portable.private import of_transformers
from portable.private.of_transformers import no_value_checks

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from torch import Tensor, nn
    from transformers import PreTrainedModel

_SHORT, _LONG, _LONGEST = 2, 512, 8192
"""Tokens of the two trials; the second one has between ``_LONG`` and ``_LONGEST``, by the run's sequences."""
_UNREACHED = "unreached_parameters"


def unreached_names(model: nn.Module) -> frozenset[str]:
    """Return the names that :func:`mark_unreached` has recorded; empty if none were recorded."""
    names: frozenset[str] = vars(model).get(_UNREACHED, frozenset())
    return names


def mark_unreached(model: nn.Module, names: frozenset[str]) -> None:
    """Record on ``model`` which of its parameters never get a gradient."""
    setattr(model, _UNREACHED, names)


def find_unreached(
    model: PreTrainedModel, *, seq_len: int = _LONG, whole_output: bool = False
) -> frozenset[str]:
    """Find the parameters that no gradient of the loss can reach.

    A first trial runs the complete model on two tokens. If it leaves parameters unreached, a second trial
    runs one layer of each kind on a long sequence, because some models skip modules for short sequences.

    Args:
        model: The model on the meta device, without an adapter; not changed.
        seq_len: The number of tokens in a sequence of the run.
        whole_output: Whether a custom loss may use every output of the model, and not only its logits.

    Returns:
        The first names of the parameters. Empty if the graph cannot be built on the meta device, because the
        control flow depends on tensor values.
    """
    try:
        full = _reached(copy.deepcopy(model), _SHORT, whole_output=whole_output)
        unreached = {name for name, _ in model.named_parameters()} - full
        if not unreached:
            return frozenset()
        length = max(_LONG, min(seq_len, _LONGEST))
        bound = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if isinstance(bound, int) and bound > 0:
            length = min(length, max(bound // 2, min(seq_len, bound)))
        reached = _reached(one_layer_per_kind(model), length, whole_output=whole_output)
    except Exception:  # models raise exceptions of any class for values that the meta device does not have
        return frozenset()
    return frozenset(unreached - _in_full_model(model, reached))


def _reached(trial: Any, length: int, *, whole_output: bool) -> set[str]:
    """Return the names of the parameters of ``trial`` in the graph of its loss. Changes ``trial``."""
    trial.to("meta").to(torch.bfloat16)  # the only dtype that every kernel supports
    trial.requires_grad_(True).train()
    without_dropout(trial)  # layer dropout would leave out layers by chance
    _use_traceable_kernels(trial)
    tokens = torch.zeros(1, length, dtype=torch.int64, device="meta")
    inputs = {"input_ids": tokens}
    if trial.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens
    terms = ModelTerms(trial)
    with torch.enable_grad(), no_value_checks(), terms.requested(tokens) as more:
        output = trial(**inputs, **more)
        tensors = [output.logits, *(_tensors(output) if whole_output else ())]
        total = torch.zeros((), device="meta")
        for tensor in tensors:
            if tensor.requires_grad:
                total = total + tensor.float().sum()
        loss = terms.added(total, output, share=1.0)
    # No backward pass: some of its kernels are missing on the meta device.
    leaves = _leaves(loss)
    return {name for name, parameter in trial.named_parameters() if id(parameter) in leaves}


def _leaves(loss: Tensor) -> set[int]:
    """Return the ids of the leaf tensors in the autograd graph of ``loss``."""
    nodes, seen, leaves = [loss.grad_fn], set(), set()
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        nodes += [following for following, _ in node.next_functions]
    return leaves


def _use_traceable_kernels(trial: Any) -> None:
    """Replace attention and expert kernels that do not run on the meta device.

    The kernels of a run may change on resume, and must not change which parameters are frozen.
    """
    if of_transformers.attention_kernel(trial.config) not in ("sdpa", "eager"):
        trial.set_attn_implementation("sdpa")
    if "eager" in trial.get_experts_implementation().values():
        with suppress(Exception):  # raised by models without experts in one tensor
            trial.set_experts_implementation("grouped_mm")


def _tensors(value: Any) -> Iterator[Tensor]:
    """Iterate over the tensors in nested outputs of a model."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _tensors(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _tensors(entry)


def _in_full_model(model: nn.Module, names: set[str]) -> set[str]:
    """Map parameter names of :func:`one_layer_per_kind` to the names in ``model``."""
    kinds = list(layer_kinds(model).values())
    position = {name: number for number, (name, _) in enumerate(transformer_layers(model))}
    kept: dict[str, int] = defaultdict(int)
    prefixes: dict[str, list[str]] = {}
    for layers in sorted(kinds, key=lambda layers: position[layers[0]]):
        parent = layers[0].rpartition(".")[0]
        prefixes[f"{parent}.{kept[parent]}"] = layers
        kept[parent] += 1
    found = set()
    for name in names:
        prefix = next((p for p in prefixes if name.startswith(f"{p}.")), None)
        if prefix is None:
            found.add(name)
        else:
            found.update(layer + name.removeprefix(prefix) for layer in prefixes[prefix])
    return found


def name_parts(model: PreTrainedModel, names: Collection[str], *, full: bool = False) -> list[str]:
    """Describe parameters by the outermost modules that contain no others.

    Args:
        model: The model that has the parameters.
        names: First names of its parameters.
        full: Whether to keep the prefix of the base model.

    Returns:
        The names of the modules or parameters. Repeated layers appear once, with ``*`` for the layer number.
    """
    others = {name for name, _ in model.named_parameters()} - set(names)
    parts: dict[str, None] = {}
    for name in names:
        pieces = name.split(".")
        heads = (".".join(pieces[:depth]) for depth in range(1, len(pieces) + 1))
        head = next(h for h in heads if h == name or not any(o.startswith(f"{h}.") for o in others))
        head = head if full else head.removeprefix(f"{model.base_model_prefix}.")
        parts[re.sub(r"(?<=\.)\d+(?=\.|$)", "*", head)] = None
    return list(parts)
