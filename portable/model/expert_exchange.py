"""Expert parallelism (``expert_parallel_size``): ranks exchange the tokens of experts.

transformers keeps the experts of a layer as stacked tensors ``[experts, ...]``. A rank has a part of the
stacks. It sorts its tokens by their experts, sends each token to the rank of each of its experts, runs the
forward pass of the experts on the tokens that it receives, and sends the results back. No token is dropped.

peft adapts a stack with a ``ParamWrapper`` around the module (``adapter.target_parameters``), and nests the
wrappers of several stacks. Its LoRA factors are stacks as well, and a rank has the factors of its experts.

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
"""End of the name of a module that peft has wrapped."""
_FORWARD_ARGUMENTS = ("tokens", "experts of each token", "weights of the experts")
"""Arguments of the ``forward`` of an expert module. Their names differ between models."""


def find_expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Find the modules whose experts can be distributed over ranks, keyed by name.

    These modules have transformers' common layout for experts: each parameter is a stack with one entry
    per expert, and ``forward`` takes the tokens, the experts of each token, and their weights.
    """
    return {name: module for name, module in model.named_modules() if _is_expert_module(module)}


def _is_expert_module(module: nn.Module) -> bool:
    """Return whether the experts of a module can be distributed over ranks."""
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
        UserError: If the model has no experts in stacked tensors, if the adapter changes them in a way that
            ranks cannot divide or the optimizer cannot update, or if their number is not a multiple of
            ``num_ranks``.
    """
    modules, name = find_expert_modules(model), type(model).__name__
    require(
        bool(modules),
        f"{KEY}: {name} has no experts in stacked tensors that ranks can divide; set {KEY} to 1",
    )
    require(
        optimizer != "muon" or not list_expert_factors(model),
        "train.optimizer: muon updates complete matrices, but expert-parallel ranks divide the LoRA factors "
        f"of experts; use adamw or sgd, or set {KEY} to 1",
    )
    for module_name, module in modules.items():
        count: Any = module.num_experts
        require(
            count % num_ranks == 0,
            f"{KEY}: the {count} experts of {name} cannot be divided among {num_ranks} ranks; use a divisor "
            f"of {count}",
        )
        for wrapper in find_parameter_wrappers(model, module_name):
            stack = getattr(wrapper, "parameter_name", None)
            require(
                stack is not None and getattr(module, stack).dim() == 3,
                f"{KEY}: the adapter changes {stack or 'the experts'} of {name}, which are not matrices of "
                f"experts; list only matrices of experts in adapter.target_parameters, or set {KEY} to 1",
            )


def find_parameter_wrappers(model: nn.Module, module_name: str) -> list[nn.Module]:
    """Return the wrappers of peft around an expert module, from the outermost to the innermost.

    Args:
        model: The model with its adapter.
        module_name: Name of the expert module in ``model``.
    """
    wrappers: list[nn.Module] = []
    while module_name.endswith(_BASE_LAYER):
        module_name = module_name.removesuffix(_BASE_LAYER)
        wrappers.insert(0, model.get_submodule(module_name))
    return wrappers


def list_expert_factors(model: nn.Module) -> dict[nn.Parameter, int]:
    """List the LoRA factors of experts, each with the dimension that has one entry or block per expert."""
    return {
        layer.weight: dim
        for name in find_expert_modules(model)
        for wrapper in find_parameter_wrappers(model, name)
        if hasattr(wrapper, "parameter_name")
        for dim, layers in enumerate((wrapper.lora_A, wrapper.lora_B))
        for layer in layers.values()  # type: ignore[operator]
    }


def install_expert_exchange(model: nn.Module) -> None:
    """Make the expert modules of a model exchange tokens as soon as their process group is set."""
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
    """Call the module inside of a wrapper of peft."""
    return wrapper.base_layer(*arguments, **keywords)


def map_expert_exchanges(model: nn.Module) -> dict[nn.Module, ExpertExchange]:
    """Return a dict from each module changed by :func:`install_expert_exchange` to its exchange."""
    modules: Any = model.modules()
    return {module: module.expert_exchange for module in modules if hasattr(module, "expert_exchange")}


class ExpertExchange:
    """Forward pass of an expert module whose experts are distributed over ranks.

    Args:
        module: The expert module.
        wrappers: Wrappers of peft that adapt stacks of the module, from the outermost to the innermost.

    Attributes:
        group: Expert-parallel process group of this rank. None if this rank has all experts.
        wrappers: Wrappers of peft, see above.
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

        Takes the arguments of the module: tokens ``[tokens, hidden]``, and the indices and weights of each
        token's experts, ``[tokens, experts per token]`` each.

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
            # Run on an empty token. Otherwise, some ranks would have gradients and others would not.
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
    """Proxy of an expert module that has only the experts of this rank, as plain tensors with LoRA updates.

    Args:
        module: The module. The proxy returns its other attributes.
        wrappers: Wrappers of peft that adapt stacks of the module.
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
    """Add the LoRA updates of some experts to their stack, as ``ParamWrapper`` of peft does for all experts.

    The rows of ``lora_A`` are sorted by expert. The columns of ``lora_B`` are sorted by rank, and the columns
    of a rank by expert.

    Args:
        stack: Matrices of the experts, ``[experts, out, in]``, or ``[experts, in, out]`` if transposed.
        wrapper: ``ParamWrapper`` of the stack, with the factors of the same experts.
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
    """Rows that this rank sends and receives. A row is a pair of a token and one of its experts.

    Attributes:
        group: Expert-parallel process group.
        num_tokens: Number of tokens of this rank.
        experts_per_token: Number of rows of each token.
        order: Index of each sent row among all rows of this rank. Sent rows are sorted by expert. Rows
            without an expert are not sent.
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
    """Plan the exchange of rows: exchange the row counts between all ranks.

    Waits for the device, because the host needs the row counts.

    Args:
        experts: Experts of each token, ``[tokens, experts per token]``. Indices from ``num_experts`` on
            mean "no expert".
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
    """Autograd function that sends this rank's rows, with their weights, to the ranks of their experts."""

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
    """Autograd function that returns results to the ranks of their tokens, and sums them per token."""

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
    """Send received rows back to the ranks of their tokens. Inverse of :func:`_send_rows`."""
    returned = rows.new_empty(sum(plan.sent_sizes), *rows.shape[1:])
    dist.all_to_all_single(
        returned, rows.contiguous(), plan.sent_sizes, plan.received_sizes, group=plan.group
    )
    return returned


def _scatter_rows(plan: _ExchangePlan, rows: Tensor) -> Tensor:
    """Restore the token order of sorted rows. Rows that were not sent are zeros."""
    unsorted = rows.new_zeros(plan.num_tokens * plan.experts_per_token, *rows.shape[1:])
    return unsorted.index_copy_(0, plan.order, rows)


def _sum_rows(plan: _ExchangePlan, rows: Tensor) -> Tensor:
    """Sum the sorted rows of each token. The order of summation does not depend on the number of ranks."""
    by_token = _scatter_rows(plan, rows).view(plan.num_tokens, plan.experts_per_token, *rows.shape[1:])
    return by_token.sum(1)
