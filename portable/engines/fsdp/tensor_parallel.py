"""Layers that several ranks compute together: ``tensor_parallel_size``.

The matrices of a layer are cut over a group of ranks by the plan that transformers has for the architecture.
Every parameter is a DTensor on the group's mesh axis afterwards, cut or whole on each rank, so that optimizers,
norms and checkpoints take all of them alike. The table and the head stay whole.

Source: Shoeybi et al., "Megatron-LM", arXiv:1909.08053.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from portable.errors import require
from portable.optim.sharded import local
from portable.private import of_torch
from portable.private.of_transformers import parallel_plans, split_by_plans

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

KEY = "tensor_parallel_size"
_COMPARED = """
afmoe arcee aria_text axk1 axk2 beam codegen cohere cohere2 cohere2_moe cohere_compass_text cwm
deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 diffllama dory dots1 ernie4_5 ernie4_5_moe exaone exaone4
exaone_moe flex_olmo flint gemma gemma2 gemma3_text gemma3n_text glm glm4 glm4_moe glm4_moe_lite
glm_moe_dsa gpt_neox gpt_oss gptj granite granite_swa granitemoe granitemoe_swa granitemoeshared helium
hrm_text hunyuan_v1_dense hy_v3 hy_v4 hyperclovax internlm3 iquestcoder jais2 kolibri1 laguna lfm2 llama
mellum mimo_v2_flash minicpm3 minimax minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral
nanochat nemotron olmo olmo2 olmo3 olmoe phi phi3 phi4_multimodal phimoe qwen2 qwen2_moe qwen3 qwen3_moe
seed_oss smollm3 solar_open starcoder2 vaultgemma youtu
"""

COMPARED = frozenset(_COMPARED.split())
"""Model types whose layers, shared by ranks, have the loss and gradients of one rank, as a test compares."""

_USED_IN_PART = "replicated_with_grad_allreduce"
"""The plan's word for a whole parameter of which each rank uses a part, such as the norms of its heads."""


def split_layers(model: Any, mesh: DeviceMesh) -> None:
    """Cut the layers of ``model``, on the meta device, over the ranks of ``mesh``, which has one axis.

    Raises:
        UserError: if they cannot be divided.
    """
    plan, of_experts = plans(model, mesh.size())
    split_by_plans(model, mesh, {n: style for n, style in plan.items() if style != _USED_IN_PART}, of_experts)
    in_part = {name for name, style in plan.items() if style == _USED_IN_PART}
    whole: dict[nn.Parameter, nn.Parameter] = {}  # tied weights stay tied
    for prefix, module in model.named_modules():
        left = {
            name: parameter
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
            if not isinstance(parameter, DTensor)
        }
        for name, parameter in left.items():
            if parameter not in whole:
                one = DTensor.from_local(parameter.detach(), mesh, [Replicate()], run_check=False)
                whole[parameter] = nn.Parameter(one, parameter.requires_grad)
            setattr(module, name, whole[parameter])
        if left:
            _compute_with_local(module, list(left), Partial() if prefix in in_part else Replicate())


def plans(model: Any, size: int) -> tuple[dict[str, str], dict[str, str]]:
    """How transformers divides ``model``: the style of each module and parameter, of layers and of experts.

    Raises:
        UserError: if ``size`` ranks cannot divide it.
    """
    plan, of_experts = parallel_plans(model, size)
    ends = [module for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module]
    whole = {name for name, module in model.named_modules() if any(module is end for end in ends)}
    plan = {n: style for n, style in plan.items() if not {n, n.rpartition(".")[0]} & whole}
    return plan, of_experts


def _compute_with_local(module: nn.Module, names: Sequence[str], gradient: Any) -> None:
    """Let ``module`` compute with the local tensors of whole parameters, whose gradients are ``gradient``."""
    forward = module.forward

    def with_local(*arguments: Any, **keywords: Any) -> Any:
        held = of_torch.parameters(module)
        before = {name: held[name] for name in names}
        for name, parameter in before.items():
            if isinstance(parameter, DTensor):
                held[name] = parameter.to_local(grad_placements=[gradient])
        try:
            return forward(*arguments, **keywords)
        finally:
            held.update(before)

    module.forward = with_local  # type: ignore[method-assign]


def average_replicas(gradients: Sequence[Tensor]) -> None:
    """Average the gradients of parameters that each rank of a group has whole, so that they stay equal.

    They differ by rounding, where kernels add in no fixed order.

    Args:
        gradients: DTensors, of which the last mesh axis is that of the group.
    """
    whole = [g for g in gradients if isinstance(g, DTensor) and g.placements[-1].is_replicate()]
    if not whole:
        return
    group = whole[0].device_mesh.get_group(whole[0].device_mesh.ndim - 1)
    parts = [local(gradient) for gradient in whole]
    for work in [dist.all_reduce(part, group=group, async_op=True) for part in parts]:
        work.wait()
    for part in parts:
        part.div_(dist.get_world_size(group))
