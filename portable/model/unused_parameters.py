"""Detect the parameters that do not affect the training loss.

Examples are the vision tower of a multimodal model that is trained on text, an indexer that
only selects positions, and a head that the task does not use. These parameters never
receive a gradient. They are frozen, because an optimizer with flat state, such as
DeepSpeed's, would otherwise apply weight decay to them.

The parameters are found in the autograd graph of a trial on the meta device, or on the CPU
if the trial fails there. The gradients of a batch are not sufficient, because experts to
which no token was routed have none. The result depends only on the model, the task and the
sequence length, so it is identical on all ranks, in resumed runs, and on every engine.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from portable.model.auxiliary_losses import AuxiliaryLosses
from portable.model.layers import copy_one_layer_per_kind, find_transformer_layers, group_layers_by_kind
from portable.model.regularization import remove_dropout
from portable.private import transformers_internals
from portable.private.transformers_internals import skip_mask_value_checks

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from torch import Tensor, nn
    from transformers import PreTrainedModel

_SHORT_TRIAL_TOKENS, _LONG_TRIAL_TOKENS, _MAX_TRIAL_TOKENS = 2, 512, 8192
"""Number of tokens of the first trial, and the minimum and maximum number of tokens of the second trial."""
_VALUE_TRIAL_TOKENS, _MAX_VALUE_TRIAL_PARAMETERS = 128, 1 << 29
"""Number of tokens of a trial with values, and maximum number of parameters for it (2 GiB in fp32)."""
_UNREACHED_ATTRIBUTE = "unreached_parameters"


def get_unreached_names(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters of a model that never receive a gradient.

    :func:`record_unreached_names` has stored these names on the model.

    Args:
        model: The model.

    Returns:
        The names. Empty if no names were stored.
    """
    names: frozenset[str] = vars(model).get(_UNREACHED_ATTRIBUTE, frozenset())
    return names


def record_unreached_names(model: nn.Module, names: frozenset[str]) -> None:
    """Record the names of the parameters that never receive a gradient.

    The names are stored in an attribute of ``model``, from which :func:`get_unreached_names` reads
    them.

    Args:
        model: The model.
        names: Names of the parameters. For a tied parameter, only its first name.
    """
    setattr(model, _UNREACHED_ATTRIBUTE, names)


def find_unreached_names(
    model: PreTrainedModel, *, seq_len: int = _LONG_TRIAL_TOKENS, whole_output: bool = False
) -> frozenset[str]:
    """Find the parameters that do not affect the loss.

    A first trial runs the complete model on two tokens. If it leaves parameters unreached, a
    second trial runs one layer of each kind on a long sequence, because some models skip
    modules on short sequences. The result contains the parameters that neither trial reaches. The
    auxiliary losses of the model are part of the loss.

    Args:
        model: The model on the meta device, without an adapter. It is not modified.
        seq_len: Sequence length of the run, in tokens. The second trial uses this length, but at
            least 512 and at most 8192 tokens. It may use fewer tokens if the model supports only
            a few positions.
        whole_output: Whether the loss may depend on every model output instead of only the
            logits.

    Returns:
        Names of the parameters. For tied parameters, only the first name. If the graph cannot
        be built on the meta device, for example because control flow depends on tensor values,
        the names come from a trial with random values on the CPU. A large model is then reduced
        to one layer of each kind. Empty if the reduced model is still too large, or if the
        trial on the CPU fails.
    """
    try:
        reached_in_full_model = _trace_reached_names(
            copy.deepcopy(model), _SHORT_TRIAL_TOKENS, whole_output=whole_output
        )
        unreached = {name for name, _ in model.named_parameters()} - reached_in_full_model
        if not unreached:
            return frozenset()
        length = max(_LONG_TRIAL_TOKENS, min(seq_len, _MAX_TRIAL_TOKENS))
        bound = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if isinstance(bound, int) and bound > 0:
            length = min(length, max(bound // 2, min(seq_len, bound)))
        reached = _trace_reached_names(copy_one_layer_per_kind(model), length, whole_output=whole_output)
    except Exception:  # a model that reads tensor values on the meta device may raise any exception
        return _find_unreached_names_by_values(model, seq_len=seq_len, whole_output=whole_output)
    return frozenset(unreached - _map_to_full_model(model, reached))


def _find_unreached_names_by_values(
    model: PreTrainedModel, *, seq_len: int, whole_output: bool
) -> frozenset[str]:
    """Find the parameters that do not affect the loss, by running the model on the CPU.

    The parameters get random values for this trial, with a fixed seed. The trial runs the complete
    model if the model has at most ``_MAX_VALUE_TRIAL_PARAMETERS`` parameters, otherwise a copy with
    one layer of each kind. If a parameter is reached, all parameters whose names differ only in
    numbers also count as reached. The reason is that the trial may route no token to some experts.

    Args:
        model: The model. It is not modified.
        seq_len: Number of tokens per sample in the run. The trial uses this number if it is at most
            512, otherwise 128.
        whole_output: Whether the loss may depend on every model output instead of only the logits.

    Returns:
        Names of the parameters. For tied parameters, only the first name. Empty if both the model
        and the copy are too large, or if the trial fails or reaches no parameter.
    """
    trial: Any = copy.deepcopy(model)
    if (is_reduced := _count_parameters(trial) > _MAX_VALUE_TRIAL_PARAMETERS) and _count_parameters(
        trial := copy_one_layer_per_kind(model)
    ) > _MAX_VALUE_TRIAL_PARAMETERS:
        return frozenset()
    # Use the sequence length of the run if it is short, because Reformer accepts no other length.
    length = seq_len if seq_len <= _LONG_TRIAL_TOKENS else _VALUE_TRIAL_TOKENS
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            _allocate_random_parameters(trial)
            reached = _trace_reached_names(trial, length, whole_output=whole_output, device="cpu")
    except Exception:  # the model may need inputs of another kind or length
        return frozenset()
    reached = _map_to_full_model(model, reached) if is_reduced else reached
    # Parameters of omitted layers, and of experts that no token chose, count as reached if a parameter of the
    # same kind was reached.
    kinds = {re.sub(r"\d+", "0", name) for name in reached}
    names = {name for name, _ in model.named_parameters() if re.sub(r"\d+", "0", name) not in kinds}
    return frozenset(names) if reached else frozenset()


def _count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _allocate_random_parameters(model: nn.Module) -> None:
    """Allocate the parameters of a model on the CPU with random values. Tied parameters stay tied."""
    drawn: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in drawn:
                drawn[id(parameter)] = torch.nn.Parameter(torch.randn(parameter.shape) * 0.02)
            setattr(module, name, drawn[id(parameter)])


def _trace_reached_names(
    trial: Any, num_tokens: int, *, whole_output: bool, device: str = "meta"
) -> set[str]:
    """Run a trial model and return the names of parameters in the autograd graph of its loss.

    The loss is the sum of the logits (with ``whole_output``, of all tensors in the output) and of
    the auxiliary losses. On the CPU, a backward pass also runs, because a custom backward function
    may reach more parameters.

    Args:
        trial: The model. It is modified in place: its dtype (only on the meta device), training
            mode, dropout, kernels, ``requires_grad`` and (only on the CPU) gradients.
        num_tokens: Number of tokens of the single input sequence.
        whole_output: Whether the loss may depend on every model output instead of only the
            logits.
        device: ``meta``, or ``cpu`` if the parameters have values.
    """
    if device == "meta":
        # Every kernel supports bfloat16, but not every kernel supports fp32.
        trial.to("meta").to(torch.bfloat16)
    trial.requires_grad_(True).train()
    remove_dropout(trial)  # layer dropout would skip layers at random
    _use_traceable_kernels(trial)
    tokens = torch.zeros(1, num_tokens, dtype=torch.int64, device=device)
    if device != "meta":
        tokens.random_(3, max(4, trial.config.get_text_config().vocab_size))
    inputs = {"input_ids": tokens}
    if trial.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens
    with torch.enable_grad(), skip_mask_value_checks():
        output, auxiliary_loss = AuxiliaryLosses(trial).run_forward(trial, inputs, tokens)
        tensors = [output.logits, *(_iter_tensors(output) if whole_output else ())]
        total = torch.zeros((), device=device)
        for tensor in tensors:
            if tensor.requires_grad:
                total = total + tensor.float().sum()
        loss = total if auxiliary_loss is None else total + auxiliary_loss
    # Do not run a backward pass on the meta device, because some of its kernels are missing there.
    leaves = _find_leaves(loss)
    if device != "meta":
        loss.backward()  # a custom backward pass, as in Reformer, may reach parameters outside of the graph
    return {
        name
        for name, parameter in trial.named_parameters()
        if id(parameter) in leaves or parameter.grad is not None
    }


def _find_leaves(loss: Tensor) -> set[int]:
    """Return the Python ids of the leaf tensors in the autograd graph of ``loss``, including parameters."""
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
    """Switch a trial model to attention and expert kernels that run on the meta device.

    The trial model is a copy whose forward pass shows which parameters receive no gradient. These
    parameters are then frozen. The result must not depend on the kernels of the run, because a
    resumed run may use other kernels.
    """
    if transformers_internals.get_attention_kernel(trial.config) not in ("sdpa", "eager"):
        trial.set_attn_implementation("sdpa")
    if "eager" in trial.get_experts_implementation().values():
        with suppress(Exception):  # raised by models that do not stack their experts in one tensor
            trial.set_experts_implementation("grouped_mm")


def _iter_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a model output, including tensors in nested mappings, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _iter_tensors(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _iter_tensors(entry)


def _map_to_full_model(model: nn.Module, names: set[str]) -> set[str]:
    """Convert parameter names of a reduced copy to parameter names of the complete model.

    The copy has only one layer of each kind. A parameter of this layer represents the same
    parameter in all layers of that kind. For example, ``layers.0.norm.weight`` becomes
    ``layers.0.norm.weight``, ``layers.1.norm.weight`` and so on.

    Args:
        model: The complete model.
        names: Parameter names in the result of :func:`copy_one_layer_per_kind`.

    Returns:
        The names in ``model``. Names of parameters outside of the layers are unchanged.
    """
    kinds = list(group_layers_by_kind(model).values())
    position = {name: number for number, (name, _) in enumerate(find_transformer_layers(model))}
    counts: dict[str, int] = defaultdict(int)
    prefixes: dict[str, list[str]] = {}
    for layers in sorted(kinds, key=lambda layers: position[layers[0]]):
        parent = layers[0].rpartition(".")[0]
        prefixes[f"{parent}.{counts[parent]}"] = layers
        counts[parent] += 1
    full_names = set()
    for name in names:
        prefix = next((p for p in prefixes if name.startswith(f"{p}.")), None)
        if prefix is None:
            full_names.add(name)
        else:
            full_names.update(layer + name.removeprefix(prefix) for layer in prefixes[prefix])
    return full_names


def summarize_as_outermost_modules(
    model: PreTrainedModel, names: Collection[str], *, keep_base_prefix: bool = False
) -> list[str]:
    """Shorten a set of parameter names by replacing them with module names where possible.

    If the set contains all parameters of a module, the module's name replaces their names. If this
    applies to nested modules, the name of the outermost module is used. For example, ``encoder``
    replaces all names that begin with ``encoder.``, if the set contains all parameters of the
    encoder.

    Args:
        model: The model.
        names: Names of the parameters. For a tied parameter, only its first name.
        keep_base_prefix: Whether to keep the prefix of the base model, such as ``model.``, in the
            result.

    Returns:
        Names of modules, and names of parameters whose own module also has parameters outside the
        set. Layer numbers are replaced by ``*``, and each resulting name appears once. The names have
        the order of the model's parameters.
    """
    parameter_names = [name for name, _ in model.named_parameters()]
    others = set(parameter_names) - set(names)
    summary: dict[str, None] = {}
    for name in filter(set(names).__contains__, parameter_names):
        pieces = name.split(".")
        ancestors = (".".join(pieces[:depth]) for depth in range(1, len(pieces) + 1))
        module_name = next(
            h for h in ancestors if h == name or not any(o.startswith(f"{h}.") for o in others)
        )
        module_name = (
            module_name if keep_base_prefix else module_name.removeprefix(f"{model.base_model_prefix}.")
        )
        summary[re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module_name)] = None
    return list(summary)
