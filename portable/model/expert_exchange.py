"""Expert parallelism (``expert_parallel_size``), which distributes the experts of a layer over ranks.

transformers stores the experts of a layer as stacked tensors ``[experts, ...]``. Each rank holds a
slice of these stacks. It sorts its tokens by expert, and sends each token to the ranks that hold
the token's experts. Then it runs its own experts on the tokens that it receives, and sends the
results back. No token is dropped.

peft adapts a stack with a ``ParamWrapper`` around the module (``adapter.target_parameters``), and
nests the wrappers of several stacks. The LoRA factors are stacks as well, and each rank has the
factors of its own experts.

Source: Lepikhin et al., "GShard", arXiv:2006.16668.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from portable.errors import require
from portable.optim.local_shards import to_local

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

KEY = "expert_parallel_size"
_BASE_LAYER = ".base_layer"
"""Suffix of the name of a module that peft has wrapped."""
_FORWARD_ARGUMENTS = ("tokens", "experts of each token", "weights of the experts")
"""Descriptions of the arguments of an expert module's ``forward``. Their names differ between models."""


def find_expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Find the modules whose experts can be distributed over ranks, keyed by name.

    These modules have transformers' common layout for experts: each parameter is a stack with one entry
    per expert, and ``forward`` takes the tokens, the experts of each token, and their weights.
    """
    return {name: module for name, module in model.named_modules() if _is_expert_module(module)}


def _is_expert_module(module: nn.Module) -> bool:
    """Return whether the experts of a module can be distributed over ranks.

    The module must have transformers' common layout for experts (see :func:`find_expert_modules`).
    The layout is recognized by the attributes ``is_transposed`` and ``has_bias``, by the shapes of
    the parameters, and by the number of arguments of ``forward``.
    """
    has_common_layout = hasattr(module, "is_transposed") and hasattr(module, "has_bias")
    stacks = list(module.parameters(recurse=False))
    return (
        has_common_layout
        and bool(stacks)
        and all(stack.dim() > 1 and stack.shape[0] == module.num_experts for stack in stacks)
        and len(stacks) == len(list(module.parameters()))
        and len(inspect.signature(type(module).forward).parameters) == len(("self", *_FORWARD_ARGUMENTS))
    )


def check_expert_parallel_support(model: nn.Module, num_ranks: int, optimizer: str = "adamw") -> None:
    """Check that the experts of a model can be distributed over ranks.

    Args:
        model: The model with its adapter, on any device.
        num_ranks: Number of expert-parallel ranks.
        optimizer: Value of ``train.optimizer``.

    Raises:
        UserError: If the model does not store its experts in stacked tensors. Also raised if the
            number of experts is not a multiple of ``num_ranks``, if the adapter changes anything in
            the expert modules other than stacked weight matrices, or if ``muon`` would update LoRA
            factors of experts.
    """
    modules, name = find_expert_modules(model), type(model).__name__
    require(
        bool(modules),
        f"{KEY}: {name} has no experts in stacked tensors that can be distributed over ranks; set {KEY} to 1",
    )
    require(
        optimizer != "muon" or not list_expert_factors(model),
        "train.optimizer: muon needs complete matrices, but expert parallelism shards the LoRA factors of "
        f"the experts across ranks; set train.optimizer to adamw or sgd, or set {KEY} to 1",
    )
    for module_name, module in modules.items():
        count: Any = module.num_experts
        require(
            count % num_ranks == 0,
            f"{KEY}: the {count} experts of {name} cannot be divided evenly among {num_ranks} ranks; set "
            f"{KEY} to a divisor of {count}",
        )
        for wrapper in find_parameter_wrappers(model, module_name):
            stack = getattr(wrapper, "parameter_name", None)
            require(
                stack is not None and getattr(module, stack).dim() == 3,
                f"{KEY}: the adapter changes {stack or 'the experts'} of {name} in a way that does not work "
                "with expert parallelism; list only weight matrices of experts in "
                f"adapter.target_parameters, or set {KEY} to 1",
            )


def find_parameter_wrappers(model: nn.Module, module_name: str) -> list[nn.Module]:
    """Return the peft wrappers around an expert module, from the outermost to the innermost.

    Each ``.base_layer`` at the end of the name means one wrapper. The list is empty without
    wrappers.

    Args:
        model: The model with its adapter.
        module_name: Name of the expert module in ``model``, such as ``mlp.experts.base_layer``.
    """
    wrappers: list[nn.Module] = []
    while module_name.endswith(_BASE_LAYER):
        module_name = module_name.removesuffix(_BASE_LAYER)
        wrappers.insert(0, model.get_submodule(module_name))
    return wrappers


def list_expert_factors(model: nn.Module) -> dict[nn.Parameter, int]:
    """Map each LoRA factor of a stack of experts to the index of its expert dimension.

    The index is 0 for ``lora_A`` and 1 for ``lora_B``. Along this dimension, each expert has one or
    more entries.
    """
    return {
        layer.weight: dim
        for name in find_expert_modules(model)
        for wrapper in find_parameter_wrappers(model, name)
        if hasattr(wrapper, "parameter_name")
        for dim, layers in enumerate((wrapper.lora_A, wrapper.lora_B))
        for layer in layers.values()  # type: ignore[operator]
    }


def install_expert_exchange(model: nn.Module) -> None:
    """Change the expert modules of a model so that they can exchange tokens between ranks.

    The ``forward`` of each expert module is replaced by :meth:`ExpertExchange.run`, and excluded
    from ``torch.compile``. Peft wrappers around the module no longer add their LoRA updates,
    because the exchange adds them. The :class:`ExpertExchange` becomes the attribute
    ``expert_exchange`` of the module.

    A module exchanges tokens only if the attribute ``group`` of its exchange is set. Until then,
    the module runs all experts on this rank.
    """
    for name, module in find_expert_modules(model).items():
        wrappers = find_parameter_wrappers(model, name)
        exchange: Any = ExpertExchange(module, wrappers)
        module.expert_exchange = exchange
        # The number of received tokens differs in each pass, and the compiler would treat it as a constant.
        module.forward = torch.compiler.disable(exchange.run)
        for wrapper in wrappers:
            # The exchange adds the LoRA updates itself: the method of peft needs all experts of a stack.
            wrapper.forward = partial(_call_base_layer, wrapper)


def _call_base_layer(wrapper: Any, *arguments: Any, **keywords: Any) -> Any:
    """Call the module that a peft wrapper wraps, bypassing peft's own ``forward`` method.

    This function replaces the ``forward`` method of the wrapper. Peft's method would add the LoRA
    update, which :class:`ExpertExchange` adds itself.
    """
    return wrapper.base_layer(*arguments, **keywords)


def map_expert_exchanges(model: nn.Module) -> dict[nn.Module, ExpertExchange]:
    """Map each expert module to the :class:`ExpertExchange` that runs its forward pass.

    Only modules that :func:`install_expert_exchange` has changed are included.
    """
    modules: Any = model.modules()
    return {module: module.expert_exchange for module in modules if hasattr(module, "expert_exchange")}


class ExpertExchange:
    """Forward pass of an expert module whose experts are distributed over ranks.

    Args:
        module: The expert module.
        wrappers: ``ParamWrapper`` modules of peft around ``module``. Each has the LoRA factors of
            one stacked weight. They are ordered from the outermost to the innermost.

    Attributes:
        group: Expert-parallel process group of this rank. None if this rank has all experts.
        wrappers: The argument ``wrappers``.
        outermost: The outermost wrapper, or the expert module if there are no wrappers.
    """

    def __init__(self, module: nn.Module, wrappers: Sequence[nn.Module] = ()) -> None:
        self._module: Any = module
        self.wrappers: list[Any] = list(wrappers)
        self.outermost = self.wrappers[0] if self.wrappers else module
        self._signature = inspect.signature(module.forward)
        self.group: Any = None

    def run(self, *arguments: Any, **keywords: Any) -> Tensor:
        """Run the experts of all ranks on the tokens of this rank.

        The tokens are sent to the ranks of their experts, and the results are sent back. All ranks
        of the process group must therefore call this method the same number of times. Without a
        process group, this rank runs all experts.

        The arguments are the arguments of the module: tokens ``[tokens, hidden]``, and the indices
        and weights of each token's experts, ``[tokens, experts per token]`` each.

        Returns:
            The weighted sum of the results of each token's experts, ``[tokens, hidden]``.
        """
        module_class: Any = type(self._module)
        if self.group is None:
            experts_of_all_ranks = _LocalExperts(self._module, self.wrappers, self._module.num_experts)
            output: Tensor = module_class.forward(experts_of_all_ranks, *arguments, **keywords)
            return output
        hidden, experts, weights = self._signature.bind(*arguments, **keywords).args
        plan = _plan_exchange(experts, self._module.num_experts, self.group)
        received, received_weights = _Dispatch.apply(plan, hidden, weights)
        local_experts, num_received = plan.received_experts, received.shape[0]
        if num_received == 0:
            # Run the experts on a zero token, because otherwise only some ranks would have gradients.
            received, received_weights, local_experts = (
                torch.cat([tensor, tensor.new_zeros(1, *tensor.shape[1:])])
                for tensor in (received, received_weights, local_experts)
            )
        results = module_class.forward(
            _LocalExperts(self._module, self.wrappers, plan.num_local_experts),
            received,
            local_experts[:, None],
            received_weights[:, None],
        )
        combined: Tensor = _Combine.apply(plan, results[:num_received])
        return combined


class _LocalExperts:
    """Proxy for an expert module, restricted to this rank's experts.

    :meth:`ExpertExchange.run` passes the proxy as ``self`` to the forward method of the module's
    class. The proxy has its own ``num_experts`` and stacked weights. The weights are plain tensors
    of this rank's experts, with the LoRA updates added. All other attributes are read from the
    module.

    Args:
        module: The expert module.
        wrappers: ``ParamWrapper`` modules of peft around ``module``. Each has the LoRA factors of
            one stacked weight.
        num_experts: Number of experts of this rank.
    """

    def __init__(self, module: Any, wrappers: Sequence[Any], num_experts: int) -> None:
        self._module = module
        self.num_experts = num_experts
        stacks = {name: to_local(stack) for name, stack in module.named_parameters(recurse=False)}
        for wrapper in wrappers:
            if not wrapper.disable_adapters:
                stack = stacks[wrapper.parameter_name]
                stacks[wrapper.parameter_name] = _add_lora_update(stack, wrapper, module.is_transposed)
        self.__dict__.update(stacks)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _add_lora_update(stack: Tensor, wrapper: Any, is_transposed: bool) -> Tensor:
    """Add the LoRA updates of this rank's experts to their stacked weight matrices.

    ``ParamWrapper`` of peft does this for the complete stack. The rows of ``lora_A`` are ordered as
    ``[experts, rank]``, and the columns of ``lora_B`` as ``[rank, experts]``, where ``rank`` is the
    LoRA rank.

    Args:
        stack: Weight matrices of this rank's experts, ``[experts, out, in]``, or ``[experts, in,
            out]`` if transposed. Not modified.
        wrapper: ``ParamWrapper`` of the stack. On this rank, its ``lora_A`` and ``lora_B`` contain
            only the same experts.
        is_transposed: Whether the matrices are transposed.
    """
    for adapter in wrapper.active_adapters:
        down, up = to_local(wrapper.lora_A[adapter].weight), to_local(wrapper.lora_B[adapter].weight)
        down = down.reshape(len(stack), -1, down.shape[-1])  # [experts, rank, in]
        up = up.reshape(len(up), -1, len(stack)).permute(2, 0, 1)  # [experts, out, rank]
        left, right = (down.transpose(1, 2), up.transpose(1, 2)) if is_transposed else (up, down)
        with torch.autocast(stack.device.type, enabled=False):
            stack = torch.baddbmm(
                stack, left.to(stack.dtype), right.to(stack.dtype), alpha=wrapper.scaling[adapter]
            )
    return stack


@dataclass(frozen=True)
class _ExchangePlan:
    """Rows that this rank sends to the ranks of their experts, and rows that it receives.

    A row is a pair of a token and one of the experts chosen for it. Each token has
    ``experts_per_token`` rows. If fewer experts are chosen for a token, its remaining rows have no
    expert and are not sent.

    Attributes:
        group: Expert-parallel process group.
        num_tokens: Number of tokens of this rank.
        experts_per_token: Number of rows of each token.
        order: Index of each sent row among all rows of this rank. Sent rows are sorted by expert.
        sent_sizes: Number of rows that this rank sends to each rank.
        received_sizes: Number of rows that this rank receives from each rank.
        num_local_experts: Number of experts on this rank.
        received_experts: Expert of each received row, as an index into the experts on this rank.
    """

    group: Any
    num_tokens: int
    experts_per_token: int
    order: Tensor
    sent_sizes: list[int]
    received_sizes: list[int]
    num_local_experts: int
    received_experts: Tensor


@torch.no_grad()
def _plan_exchange(experts: Tensor, num_experts: int, group: Any) -> _ExchangePlan:
    """Plan which rows this rank sends to the other ranks and receives from them.

    A row belongs to one token and one of its experts. To plan the exchange, the ranks exchange the
    number of rows that they will send for each expert. The host waits for the device, because it
    needs these numbers.

    Args:
        experts: Experts of each token, ``[tokens, experts per token]``. Indices from
            ``num_experts`` on mean "no expert".
        num_experts: Number of experts on all ranks.
        group: Expert-parallel process group.
    """
    size = dist.get_world_size(group)
    num_local, flat = num_experts // size, experts.flatten().clamp(max=num_experts)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, flat.long(), torch.ones_like(flat, dtype=torch.int64))
    sent = counts[:num_experts].view(size, num_local)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    sent_sizes, received_sizes = torch.stack([sent.sum(1), received.sum(1)]).tolist()
    return _ExchangePlan(
        group=group,
        num_tokens=experts.shape[0],
        experts_per_token=experts.shape[1],
        order=flat.argsort(stable=True)[: sum(sent_sizes)],
        sent_sizes=sent_sizes,
        received_sizes=received_sizes,
        num_local_experts=num_local,
        received_experts=torch.arange(num_local, device=flat.device)
        .repeat(size)
        .repeat_interleave(received.flatten(), output_size=sum(received_sizes)),
    )


class _Dispatch(torch.autograd.Function):
    """Autograd function that sends tokens to the ranks of their experts.

    For each of a token's experts, the hidden state of the token and the routing weight of this
    expert are sent once.
    """

    @staticmethod
    def forward(ctx: Any, plan: _ExchangePlan, hidden: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        # Recomputation ends at the last saved tensor. Save one here, otherwise a rank whose experts save
        # nothing would end before this exchange, and the other ranks would wait for it.
        ctx.save_for_backward(plan.order)
        ctx.plan, ctx.weight_shape = plan, weights.shape
        return (
            _send_rows(plan, hidden.index_select(0, plan.order // plan.experts_per_token)),
            _send_rows(plan, weights.flatten().index_select(0, plan.order)),
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor | None, Tensor | None]:
        plan: _ExchangePlan = ctx.plan
        hidden_gradient = weight_gradient = None
        if ctx.needs_input_grad[1]:
            hidden_gradient = _sum_rows(plan, _return_rows(plan, gradients[0]))
        if ctx.needs_input_grad[2]:
            rows = _scatter_rows(plan, _return_rows(plan, gradients[1]))
            weight_gradient = rows.view(ctx.weight_shape)
        return None, hidden_gradient, weight_gradient


class _Combine(torch.autograd.Function):
    """Autograd function that sends expert outputs back to the ranks of their tokens.

    For each token, it sums the outputs of the token's experts.
    """

    @staticmethod
    def forward(ctx: Any, plan: _ExchangePlan, results: Tensor) -> Tensor:
        ctx.plan = plan
        return _sum_rows(plan, _return_rows(plan, results))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        plan: _ExchangePlan = ctx.plan
        return None, _send_rows(plan, gradients[0].index_select(0, plan.order // plan.experts_per_token))


def _send_rows(plan: _ExchangePlan, rows: Tensor) -> Tensor:
    """Send sorted rows to the ranks of their experts, and return the rows that this rank receives."""
    received = rows.new_empty(sum(plan.received_sizes), *rows.shape[1:])
    dist.all_to_all_single(received, rows, plan.received_sizes, plan.sent_sizes, group=plan.group)
    return received


def _return_rows(plan: _ExchangePlan, rows: Tensor) -> Tensor:
    """Send received rows back to the ranks that they came from. Inverse of :func:`_send_rows`.

    The rows may have new values, such as the outputs of the experts. Their order must be the order
    in which they were received.
    """
    returned = rows.new_empty(sum(plan.sent_sizes), *rows.shape[1:])
    dist.all_to_all_single(
        returned, rows.contiguous(), plan.sent_sizes, plan.received_sizes, group=plan.group
    )
    return returned


def _scatter_rows(plan: _ExchangePlan, rows: Tensor) -> Tensor:
    """Move rows that are sorted by expert back to the order of the tokens.

    Rows that were not sent to an expert are zeros.
    """
    unsorted = rows.new_zeros(plan.num_tokens * plan.experts_per_token, *rows.shape[1:])
    return unsorted.index_copy_(0, plan.order, rows)


def _sum_rows(plan: _ExchangePlan, rows: Tensor) -> Tensor:
    """Sum the rows that belong to the same token. The input rows are sorted by expert.

    The order of summation does not depend on the number of ranks.
    """
    by_token = _scatter_rows(plan, rows).view(plan.num_tokens, plan.experts_per_token, *rows.shape[1:])
    return by_token.sum(1)
