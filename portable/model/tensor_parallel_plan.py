"""Tensor-parallel plan of a model (``tensor_parallel_size``), based on transformers' plan.

A plan assigns a style to modules and parameters. ``colwise`` shards a matrix along its outputs.
``rowwise`` shards it along its inputs, and the ranks all-reduce the results. Experts are not split:
each rank gets some of them. The token embedding and the output head are not sharded.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from portable.errors import UserError, require, to_one_line
from portable.model.parameters import has_peft_adapter, replace_tensors
from portable.private.transformers_internals import build_tensor_parallel_plan

KEY = "tensor_parallel_size"

_COMPARED = """
afmoe arcee aria_text axk1 axk2 beam codegen cohere cohere2 cohere2_moe cohere_compass_text cwm
deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 dots1 ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe
flex_olmo flint gemma gemma2 gemma3_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt_neox gpt_oss gptj
granite granite_swa granitemoe granitemoe_swa granitemoeshared helium hrm_text hy_v3 hy_v4 hyperclovax
internlm3 iquestcoder jais2 kolibri1 laguna llama mellum mimo_v2_flash minicpm3 minimax minimax_m2
minimax_m3_vl_text ministral ministral3 mistral mixtral nanochat nemotron olmo olmo2 olmo3 olmoe phi phi3
phi4_multimodal phimoe qwen2 qwen2_moe qwen3 qwen3_moe sarvam_moe seed_oss smollm3 solar_open starcoder2
vaultgemma youtu
"""

TENSOR_PARALLEL_TYPES = frozenset(_COMPARED.split())
"""Model types for which a test has shown that tensor parallelism preserves the loss and the gradients."""

PARTLY_USED_STYLE = "replicated_with_grad_allreduce"
"""Style of a replicated parameter that a rank uses only in part or only for its own heads, such as a
norm of heads. Its gradients must be all-reduced."""
_COLUMN_STYLES = ("colwise", "colwise_gather_output")
_ROW_STYLES = ("rowwise", "rowwise_split_input")
_EXPERT_STYLE = "grouped_gemm"
_UNSHARDED_STYLES = (PARTLY_USED_STYLE, "local_params", "mla_kv_a_proj", "ep_dispatch_experts")
"""Styles that do not shard parameters."""
_KEY_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value")
_HEAD_NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm")
"""Names of the norms of query and key heads, which follow matrices that are sharded by head. Some plans of
transformers omit such norms if they exist only with a certain model setting, so this module adds them.
"""


def check_tensor_parallel_support(model: Any, num_ranks: int) -> None:
    """Check that the layers of a model can be sharded over tensor-parallel ranks.

    The model type must be in :data:`TENSOR_PARALLEL_TYPES`. Models whose config contains a separate
    text config, such as multimodal models, are not supported.

    Args:
        model: The model, on the meta device.
        num_ranks: Number of tensor-parallel ranks, at least 2.

    Raises:
        UserError: If the model type or its tensor-parallel plan is not supported, if no layer
            can be sharded, if an adapter trains parameters other than LoRA matrices, or if a
            sharded dimension or a number of heads is not divisible by ``num_ranks``.
    """
    config, name = model.config, type(model).__name__
    text = config.get_text_config()
    require(
        text is config and config.model_type in TENSOR_PARALLEL_TYPES,
        f"{KEY}: {name} has not been tested with tensor parallelism; set {KEY} to 1",
    )
    for parameter, value in model.named_parameters() if has_peft_adapter(model) else ():
        require(
            not value.requires_grad or ".lora_A." in parameter or ".lora_B." in parameter,
            f"{KEY}: with an adapter, only LoRA matrices may be trained, but {parameter} is trained; set "
            f"{KEY} to 1",
        )
    sharded_dims = map_sharded_dims(model, num_ranks)
    require(bool(sharded_dims), f"{KEY}: {name} has no layers that can be sharded; set {KEY} to 1")
    head_counts = {"attention heads": text.num_attention_heads}
    if any(part in _KEY_PROJECTIONS for parameter in sharded_dims for part in parameter.split(".")):
        for config_key in ("num_key_value_heads", "num_global_key_value_heads"):
            head_counts[f"key-value heads ({config_key})"] = getattr(text, config_key, None) or num_ranks
    shapes = {parameter: tuple(model.get_parameter(parameter).shape) for parameter in sharded_dims}
    sizes = head_counts | {
        f"rows or columns of {parameter}": shapes[parameter][dim] for parameter, dim in sharded_dims.items()
    }
    for description, number in sizes.items():
        require(
            number % num_ranks == 0,
            f"{KEY}: {name} cannot be divided evenly among {num_ranks} ranks, because its number of "
            f"{description} is {number}; set {KEY} to a divisor of {number}",
        )


def map_sharded_dims(model: Any, num_ranks: int) -> dict[str, int]:
    """Map the name of each sharded parameter to the index of its sharded dimension.

    Args:
        model: The model, on any device.
        num_ranks: Number of tensor-parallel ranks.

    Returns:
        Dimensions, keyed by parameter name. Empty for one rank.

    Raises:
        UserError: If the model has no tensor-parallel plan, if the plan contains a style that is
            not supported, or if the model has a separate norm for each head.
    """
    plan, dims = map_parallel_styles(model, num_ranks), {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        style = plan.get(name)
        if style in _COLUMN_STYLES:
            dims[name] = max(0, parameter.dim() - 2)
        elif style in _ROW_STYLES and not name.endswith(".bias"):
            dims[name] = parameter.dim() - 1
        elif style == _EXPERT_STYLE:
            dims[name] = 0
    return dims


def shrink_to_one_rank(model: Any, num_ranks: int) -> None:
    """Shrink a model to the shards of one tensor-parallel rank.

    This makes it possible to measure the memory of a rank in a single process. Parameters with the
    styles ``colwise_gather_output`` and ``rowwise_split_input`` keep their shapes, because the
    neighboring modules expect complete outputs or pass complete inputs. The attribute
    ``num_experts`` of sharded experts is also divided. The sharded sizes must be divisible by
    ``num_ranks``. This function does not check them. See :func:`check_tensor_parallel_support`.

    Args:
        model: The model, on the meta device. Modified in place.
        num_ranks: Number of tensor-parallel ranks.

    Raises:
        UserError: If the model has no tensor-parallel plan, or if the plan is not supported.
    """
    plan, sharded_dims = map_parallel_styles(model, num_ranks), map_sharded_dims(model, num_ranks)

    def shard_parameter(name: str, parameter: nn.Parameter) -> nn.Parameter:
        if name not in sharded_dims or plan[name] in (_COLUMN_STYLES[1], _ROW_STYLES[1]):
            return parameter
        shard = parameter.detach().narrow(
            sharded_dims[name], 0, parameter.shape[sharded_dims[name]] // num_ranks
        )
        return nn.Parameter(shard, parameter.requires_grad)

    replace_tensors(model, shard_parameter, lambda _, buffer: buffer)
    for name, style in plan.items():
        if style == "ep_dispatch_experts":
            model.get_submodule(name).num_experts //= num_ranks


def map_parallel_styles(model: Any, num_ranks: int) -> dict[str, str]:
    """Build the complete tensor-parallel plan of a model.

    The plan contains the style of each module and parameter. A style, such as ``colwise``, defines
    how a module or parameter is sharded. The plan is transformers' plan with the following changes:

    - The token embedding and the output head are removed.
    - Styles of query and key norms, such as ``q_norm``, are added if transformers' plan lacks them.
    - The style of the query projection is added for models with latent attention if transformers'
      plan lacks it.
    - A style that shards a module with LoRA is moved to the base layer of the module. ``colwise``
      is also assigned to the matrix ``lora_B``, and ``rowwise`` to the matrix ``lora_A``.

    Args:
        model: The model, on any device.
        num_ranks: Number of tensor-parallel ranks.

    Returns:
        Styles, keyed by module or parameter name. Empty for one rank.

    Raises:
        UserError: If the model has no plan, if its plan contains a style that is not supported, or
            if the model has a separate norm for each head.
    """
    if num_ranks == 1:
        return {}
    try:
        plan = build_tensor_parallel_plan(model, num_ranks)
    except ValueError as error:
        raise UserError(f"{KEY}: {type(model).__name__}: {to_one_line(error)}; set {KEY} to 1") from error
    modules = dict(model.named_modules())
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    end_names = {name for name, module in modules.items() if any(module is end for end in ends)}
    plan = {name: style for name, style in plan.items() if not {name, name.rpartition(".")[0]} & end_names}
    for name, style in plan.items():
        require(
            style in (*_COLUMN_STYLES, *_ROW_STYLES, _EXPERT_STYLE, *_UNSHARDED_STYLES),
            f"{KEY}: the tensor-parallel plan of {type(model).__name__} uses the unsupported style {style} "
            f"for {name}; set {KEY} to 1",
        )
    for name, module in modules.items():
        layer, _, child = name.rpartition(".")
        if child in _HEAD_NORMS and plan.get(f"{layer}.q_proj") == "colwise":
            require(
                all(parameter.dim() == 1 for parameter in module.parameters()),
                f"{KEY}: {type(model).__name__} has a norm for each head ({name}), but the tensor-parallel "
                f"plan does not shard these norms; set {KEY} to 1",
            )
            plan.setdefault(name, PARTLY_USED_STYLE)
        if child == "q_proj" and plan.get(f"{layer}.kv_b_proj") == "colwise":  # models without q_lora_rank
            plan.setdefault(name, "colwise")
    for name in [name for name in plan if hasattr(modules.get(name), "base_layer")]:
        # Shard only the LoRA matrix that shards LoRA's results in the same way as the results of the module.
        if (style := plan[name]) in (*_COLUMN_STYLES, *_ROW_STYLES):
            sharded_matrix = {"colwise": "lora_B", "rowwise": "lora_A"}.get(style)
            adapters = getattr(modules[name], sharded_matrix) if sharded_matrix else ()
            del plan[name]
            plan |= dict.fromkeys(
                (f"{name}.base_layer", *(f"{name}.{sharded_matrix}.{adapter}" for adapter in adapters)), style
            )
    for name in [name for name in plan if name in modules]:
        for parameter, _ in modules[name].named_parameters(recurse=False):
            plan.setdefault(f"{name}.{parameter}", plan[name])
    return plan
