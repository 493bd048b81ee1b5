"""Wrappers for private functions and attributes of transformers that this project uses.

The module also patches some functions of transformers.
"""

from __future__ import annotations

import inspect
import os
import sys
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from portable.converters.names.name_rules import EXCEPT_DENSE
from portable.private import GuardedPackage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor, nn
    from transformers import PretrainedConfig, PreTrainedModel

_transformers = GuardedPackage("transformers", "5.24.0")

# -- masks -------------------------------------------------------------------------------------------------


def skip_mask_value_checks() -> AbstractContextManager[None]:
    """Return a context in which transformers does not read the values of masks and positions.

    Reading these values is a host-device sync. By default, transformers reads them for two checks,
    except while a model is being traced. It searches the positions for packed sequences, and it
    omits masks that mask nothing. In this context, transformers keeps every mask and does not
    search for packed sequences. Instead, :mod:`portable.model.document_attention` handles packed
    sequences.
    """
    return _replace_masking_functions(find_packed_sequence_indices=lambda _: None, is_tracing=lambda *_: True)


def ignore_packed_sequences() -> AbstractContextManager[None]:
    """Return a context in which transformers does not search ``position_ids`` for packed sequences."""
    return _replace_masking_functions(find_packed_sequence_indices=lambda _: None)


@contextmanager
def _replace_masking_functions(**functions: Callable[..., Any]) -> Iterator[None]:
    """Replace functions in ``transformers.masking_utils`` within this context.

    Args:
        functions: Replacements, keyed by the names of the functions.
    """
    module = _import_masking_module()
    before = {name: getattr(module, name) for name in functions}
    for name, function in functions.items():
        setattr(module, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(module, name, function)


@cache
@_transformers.explain_missing_names("training")
def _import_masking_module() -> Any:
    """Import ``transformers.masking_utils``, and check that the functions to replace exist."""
    from transformers import masking_utils

    module: Any = masking_utils
    _ = module.find_packed_sequence_indices, module.is_tracing
    return module


get_attention_kernel = _transformers.wrap_private_attribute("_attn_implementation", "model.attention")
"""Return the name of the attention kernel in a config, such as ``sdpa`` or ``eager``."""


@contextmanager
def replace_mapping_entry(functions: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Replace an entry of a mapping of functions within this context.

    Args:
        functions: Mapping of functions, keyed by name.
        name: Key of the entry.
        function: Replacement.
    """
    before = functions[name]
    functions[name] = function
    try:
        yield
    finally:
        functions[name] = before


@contextmanager
@_transformers.explain_missing_names("data.packing: documents")
def wrap_mask_function(
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]], kernel: str
) -> Iterator[None]:
    """Wrap transformers' mask function for an attention kernel within this context.

    Args:
        wrap: Function that wraps the original function.
        kernel: Name of the attention kernel, such as ``sdpa``.
    """
    functions = get_mask_functions()
    with replace_mapping_entry(functions, kernel, wrap(functions[kernel])):
        yield


@_transformers.explain_missing_names("context_parallel_size")
def get_attention_functions() -> Any:
    """Return transformers' global mapping from attention kernel names to attention functions."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS


@_transformers.explain_missing_names("data.packing: documents")
def get_mask_functions() -> Any:
    """Return transformers' global mapping from attention kernel names to functions that build masks."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    return ALL_MASK_ATTENTION_FUNCTIONS


def get_module_namespace(model: Any) -> dict[str, Any]:
    """Return the globals of the module that defines the class of ``model``.

    The result is the module's own dict, so changes to the dict affect the module. FSDP2 replaces
    the class of a model with a subclass that is defined inside the ``torch`` package. Such a
    subclass is skipped, so the result is the namespace of the original class.
    """
    module_names = (each.__module__ for each in type(model).__mro__)
    return vars(sys.modules[next(name for name in module_names if not name.startswith("torch."))])


def is_fused_kernel(function: Callable[..., Any]) -> bool:
    """Return whether a function in a transformers modeling file is replaced by a fused kernel.

    The kernel comes from another package, such as fla. Returns False if the reference
    implementation in torch is used, or if the installed version of transformers does not provide
    the information.

    Args:
        function: Function that transformers defines with
            ``use_kernel_func_from_hub_with_fallback``.
    """
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    values = dict(zip(getattr(code, "co_freevars", ()), cells, strict=False))
    return "is_new_implementation" in values and bool(values["is_new_implementation"].cell_contents)


def enable_sdpa_grouped_queries() -> None:
    """Make transformers use sdpa's grouped-query attention even if there is a mask.

    By default, transformers may repeat the key and value heads for each query head if there is a
    mask. This function sets the environment variable ``TRANSFORMERS_SDPA_FORCE_GQA`` to 1, unless
    the user has set it.
    """
    os.environ.setdefault("TRANSFORMERS_SDPA_FORCE_GQA", "1")


@_transformers.explain_missing_names("tensor_parallel_size")
def build_tensor_parallel_plan(model: Any, num_ranks: int) -> dict[str, str]:
    """Build the tensor-parallel plan that transformers defines for a model.

    Args:
        model: Transformers model.
        num_ranks: Number of tensor-parallel ranks.

    Returns:
        Tensor-parallel style of each module or parameter in the plan, such as ``colwise``, keyed by
        its name. If transformers has an expert-parallel plan for the model, the result contains
        this plan for the experts, so that each rank holds complete experts.

    Raises:
        ValueError: If transformers has no plan for the model, or if the plan is not valid.
    """
    from transformers.distributed import DistributedConfig
    from transformers.utils import logging

    # Shard by experts, because a checkpoint cannot describe shards of a fused gate and up projection.
    config = DistributedConfig(tp_size=num_ranks, ep_size=num_ranks if model.ep_plan else 1)
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # it warns about rules for layers that this model does not have
    try:
        layers, experts, _ = model._resolve_parallel_plans(config)
    finally:
        logging.set_verbosity(level)
    return {**layers, **experts}


@_transformers.explain_missing_names("tensor_parallel_size")
def apply_tensor_parallel_plan(model: Any, mesh: Any, plan: Mapping[str, str]) -> None:
    """Shard a model according to a tensor-parallel plan, using transformers' functions.

    Depending on its style, a parameter becomes a DTensor, and the forward method of a module is
    replaced.

    Args:
        model: The model. Modified in place.
        mesh: Device mesh of the tensor-parallel ranks.
        plan: Tensor-parallel styles, keyed by module or parameter name, such as the result of
            :func:`build_tensor_parallel_plan`.
    """
    from transformers.distributed.expert_parallel import apply_expert_parallelism
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    experts = {
        name: style for name, style in plan.items() if style in ("grouped_gemm", "ep_dispatch_experts")
    }
    apply_tensor_parallelism(model, mesh, {name: plan[name] for name in plan if name not in experts})
    apply_expert_parallelism(model, mesh, mesh, experts, ep_implementation="all_reduce")


# -- rotary embeddings -------------------------------------------------------------------------------------


def list_rope_types(module: nn.Module) -> dict[str | None, str]:
    """List the rope types of a rotary embedding.

    Args:
        module: Any module.

    Returns:
        Rope types, keyed by layer type. If all layers share one rope type, the only key is None.
        Empty if ``module`` has no attribute ``rope_type``. Rotary embeddings in custom code may
        lack this attribute.
    """
    types: Any = getattr(module, "rope_type", None)
    if isinstance(types, str):
        return {None: types}
    return dict(types) if isinstance(types, dict) else {}


class RotaryEmbedding:
    """Wrapper around a transformers rotary embedding whose frequencies depend on the sequence length.

    Args:
        module: The rotary embedding.

    Attributes:
        module: The rotary embedding.
        forward: Forward method that the module's class defines, bound to the module. It is the
            original method even if ``module.forward`` has been replaced.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self.forward = type(module).forward.__get__(module)
        self._forward_as_is = inspect.unwrap(type(module).forward).__get__(module)

    @_transformers.explain_missing_names("model.config.rope_parameters")
    def get_original_length(self, layer_type: str | None) -> int:
        """Return the largest sequence length for which LongRoPE uses its short factors.

        Args:
            layer_type: Layer type, or None if all layers share one rope type.
        """
        rope = self.module.config.rope_parameters
        length: int = (rope if layer_type is None else rope[layer_type])["original_max_position_embeddings"]
        return length

    @_transformers.explain_missing_names("model.config.rope_parameters")
    def compute_rotations_by_length(
        self, x: Tensor, positions: Tensor, text_lengths: Tensor, layer_type: str | None
    ) -> Any:
        """Compute rotations with dynamic NTK scaling, based on the length of each token's text.

        Does not trigger a host-device sync.

        Args:
            x: Tensor with the device and dtype of the result.
            positions: Positions, int64 ``[..., batch, tokens]``.
            text_lengths: Length of the text that contains each token, int64 ``[batch, tokens]``.
            layer_type: Layer type, or None if all layers share one rope type.

        Returns:
            The tensors that the wrapped rotary embedding returns, such as ``(cos, sin)``. Each has
            the shape ``[batch, tokens, head size]``.
        """
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        module, prefix = self.module, "" if layer_type is None else f"{layer_type}_"
        rope_type = list_rope_types(module)[layer_type]
        by_layer = {} if layer_type is None else {"layer_type": layer_type}

        def compute(length: Tensor) -> Any:
            return ROPE_INIT_FUNCTIONS[rope_type](module.config, x.device, seq_len=length, **by_layer)[0]

        lengths = text_lengths.flatten()
        original = getattr(module, f"{prefix}original_inv_freq").to(x.device)
        is_longer = (lengths > module.original_max_seq_len)[:, None]
        frequencies = torch.where(is_longer, torch.vmap(compute)(lengths), original)
        name = f"{prefix}inv_freq"
        before = getattr(module, name)

        def rotate(frequency: Tensor, position: Tensor) -> Any:
            setattr(module, name, frequency)
            return self._forward_as_is(x, position[..., None, None], **by_layer)

        try:
            result = torch.vmap(rotate, in_dims=(0, -1))(frequencies, positions.flatten(-2))
        finally:
            setattr(module, name, before)
        shape = text_lengths.shape
        if isinstance(result, tuple):
            return tuple(part.reshape(*shape, part.shape[-1]) for part in result)
        return result.reshape(*shape, result.shape[-1])


# -- models ------------------------------------------------------------------------------------------------

build_model_from_config = _transformers.wrap_private_attribute("_from_config", "model.init: scratch")
"""Build a model of the given class from a config, with initial weights.

The public method of an Auto class might choose another class for the config.
"""


@_transformers.explain_missing_names("model.task")
def get_model_class(auto_class: Any, config: PretrainedConfig) -> Any:
    """Return the class that an Auto class builds for ``config``.

    Args:
        auto_class: Auto class in transformers, such as ``AutoModelForCausalLM``.
        config: Config of the model.

    Returns:
        The class. For a few model types, a tuple of classes.

    Raises:
        KeyError: If the Auto class has no class for the config.
    """
    return auto_class._model_mapping[type(config)]


def find_model_class(auto_class: Any, config: PretrainedConfig) -> Any:
    """Return the class that an Auto class builds for ``config``, or None if it does not support the config.

    If transformers lists several classes, the result is the class in the config's ``architectures``. If
    ``architectures`` contains none of these classes, the result is the first class.

    Args:
        auto_class: Auto class in transformers, such as ``AutoModelForCausalLM``.
        config: Config of the model.
    """
    try:
        classes = get_model_class(auto_class, config)
    except KeyError:
        return None
    if isinstance(classes, list | tuple):  # several classes for the model type
        architectures = getattr(config, "architectures", None) or ()
        return next((entry for entry in classes if entry.__name__ in architectures), classes[0])
    return classes


def patch_llama4() -> None:
    """Add a missing field to an output class of transformers, so that Llama 4 models run.

    In transformers 5.24, ``Llama4ForConditionalGeneration`` reads a field that its output lacks.
    This function adds the field ``image_outputs`` with the value None to the class
    ``MoeCausalLMOutputWithPast``, for all models in this process. An existing field is kept.
    """
    from transformers.modeling_outputs import MoeCausalLMOutputWithPast

    if not hasattr(MoeCausalLMOutputWithPast, "image_outputs"):
        output: Any = MoeCausalLMOutputWithPast
        output.image_outputs = None


@_transformers.explain_missing_names("model.config.model_type")
def list_model_types() -> list[str]:
    """List the names of all model types in transformers."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return list(CONFIG_MAPPING_NAMES)


def find_causal_lm_class(model_type: str) -> str | None:
    """Return the class name that ``AutoModelForCausalLM`` uses for a model type, or None if it has none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    return name if isinstance(name, str) else None


def list_no_split_layer_classes(model: nn.Module) -> set[str]:
    """List the class names of layers that must stay on one device (``_no_split_modules``)."""
    return {name for m in model.modules() for name in (getattr(m, "_no_split_modules", None) or ())}


get_tieable_parameter_names = _transformers.wrap_private_attribute(
    "_tied_weights_keys", "model.name_or_path", None
)
"""Return the names of a model class's parameters that may be tied, including the head, or None."""
get_ignored_checkpoint_patterns = _transformers.wrap_private_attribute(
    "_keys_to_ignore_on_load_unexpected", "checkpoint.resume", None
)
"""Return patterns that match the names of checkpoint tensors that a model class ignores on purpose, or
None."""
get_unsaved_tensor_names = _transformers.wrap_private_attribute(
    "_keys_to_ignore_on_save", "checkpoint.export", None
)
"""Return patterns that match the names of tensors that ``save_pretrained`` omits, or None. An example
is a table of fixed positions."""


def list_fp32_name_parts(model: PreTrainedModel, *, fp16: bool) -> set[str]:
    """List the name components that identify the parameters kept in fp32.

    A parameter of the model stays in fp32 if its dotted name contains one of these components, such
    as ``wo`` in T5.

    Args:
        model: The model.
        fp16: Whether the model is in fp16. If False, the result contains the components in
            ``_keep_in_fp32_modules_strict``, which apply to all dtypes. If True, it also contains
            the components in ``_keep_in_fp32_modules``, which apply only to fp16.
    """
    names = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    return names | (set(getattr(model, "_keep_in_fp32_modules", None) or ()) if fp16 else set())


get_commit_hash = _transformers.wrap_private_attribute("_commit_hash", "adapter", None)
"""Return the commit on the Hub from which a config was loaded, or None if it was loaded from a folder."""


def wrap_activation_checkpointing(
    model: nn.Module, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Wrap the activation checkpointing function of a model's layers.

    Args:
        model: Model with activation checkpointing enabled. Modified in place.
        wrap: Function that wraps the checkpoint function of each layer.
    """
    name = "_gradient_checkpointing_func"
    for module in model.modules():
        if hasattr(module, name):
            setattr(module, name, wrap(getattr(module, name)))


def require_reformer_input_gradients(model: PreTrainedModel) -> None:
    """Make Reformer's embeddings require gradients, so that adapters in its layers are trained.

    Does nothing for other models. Reformer runs its layers in an autograd function that does not take
    their parameters as inputs. With frozen embeddings, no input of the function would require a
    gradient, and its backward pass would not run.
    """
    if "_ReversibleFunction" in get_module_namespace(model):
        model.enable_input_require_grads()


# -- weights -----------------------------------------------------------------------------------------------


class MappedName(NamedTuple):
    """Name of a checkpoint tensor, and the name of the model tensor to which it contributes."""

    stored_name: str
    model_name: str
    pattern: str | None
    """Key of the tensor's converter in :attr:`MappedNames.converters`. None if the tensor is only renamed."""


class MappedNames(NamedTuple):
    """Map from tensor names in a checkpoint to tensor names in a model, with the necessary converters."""

    names: list[MappedName]
    converters: dict[str, Any]
    """Transformers objects that each convert several tensors together, such as experts, keyed by pattern."""


@_transformers.explain_missing_names("model.name_or_path")
def map_checkpoint_names(model: PreTrainedModel, keys: Iterable[str]) -> MappedNames:
    """Map checkpoint tensor names to model names, as transformers does when it loads weights.

    Args:
        model: Model into which the checkpoint is loaded.
        keys: Names of the tensors in the checkpoint.

    Returns:
        The pairs of checkpoint name and model name, sorted by checkpoint name, and the converters
        that some of the tensors need. Tensors that the model does not use are included. Their model
        names are not in the state dict of the model.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    mapping: list[Any] = get_model_conversion_mapping(model)
    state, prefix = model.state_dict(), model.base_model_prefix
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    mapped_names = []
    for key in sorted(keys, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], prefix, state)
        mapped_names.append(MappedName(key, name, pattern))
    converters_by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    return MappedNames(mapped_names, converters_by_pattern)


@_transformers.explain_missing_names("model.name_or_path")
def find_unexpected_names(model: PreTrainedModel, model_names_by_stored_name: Mapping[str, str]) -> list[str]:
    """Find the checkpoint tensors that the model unexpectedly does not use.

    Some architectures list tensors that they ignore on purpose. These tensors are not included.

    Args:
        model: The model.
        model_names_by_stored_name: Names of the checkpoint tensors that the model does not use. The
            keys are the names in the checkpoint, and the values are the names after transformers'
            renaming.

    Returns:
        Names of the unexpected tensors in the checkpoint.
    """
    info = SimpleNamespace(missing_keys=set[str](), unexpected_keys=set(model_names_by_stored_name.values()))
    model._adjust_missing_and_unexpected_keys(info)
    return [key for key, name in model_names_by_stored_name.items() if name in info.unexpected_keys]


@_transformers.explain_missing_names("checkpoint.export")
def list_name_rules(model: PreTrainedModel) -> list[dict[str, Any]]:
    """List the rules by which transformers renames and converts the tensors in a model's published files.

    Rules that apply only to legacy files are omitted.

    Args:
        model: The model.

    Returns:
        The rules, in the format of ``converters/names/published_names.json``.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    return [
        convert_name_rule(transform) for transform in get_model_conversion_mapping(model, add_legacy=False)
    ]


_RULE_KINDS = {
    "WeightRenaming": "rename",
    "WeightConverter": "convert",
    "PrefixChange": "prefix",
    "GroupWeightRename": "group",
    "Inkling2IndexOffsetWeightRename": "shift",
    "LayerPairCollapse": "pairs",
}
_OPERATIONS: dict[str, Callable[[Any], list[Any]]] = {
    "MergeModulelist": lambda op: ["stack", op.dim],
    "SplitModulelist": lambda op: ["unstack", op.dim],
    "Concatenate": lambda op: ["cat", op.dim, op.num_shards_attribute],
    "Chunk": lambda op: ["chunk", op.dim, op.num_shards_attribute],
    "Split": lambda op: ["split", op.dim],
    "Transpose": lambda op: ["transpose", op.dim0, op.dim1, op.check_dims],
    "Interleave": lambda op: ["interleave", op.dim, op.inverse],
    "PermuteForRope": lambda op: ["rope", op.subconfig_key, op.permute_layer_names, op.inverse],
    "ErnieFuseAndSplitTextVisionExperts": lambda op: ["fuse_experts", op.stack_dim, op.concat_dim],
    "ErnieSplitAndDecoupleTextVisionExperts": lambda op: ["part_experts", op.stack_dim, op.concat_dim],
    "Inkling2LoopMergeMessageQueries": lambda op: ["merge_queries", op.inverse],
    "Inkling2UnpadVocab": lambda op: ["unpad", op.inverse],
    "Inkling2LoopDequantizeExperts": lambda op: ["plain_experts"],
}


def convert_name_rule(transform: Any) -> dict[str, Any]:
    """Convert a weight transform of transformers to a JSON-compatible name rule.

    The rule that saves names with ``.block_sparse_moe.`` excludes the projections of dense layers.
    See :data:`portable.converters.names.name_rules.EXCEPT_DENSE`.

    Args:
        transform: Weight transform from ``transformers.core_model_loading``.

    Returns:
        The rule, with its transform for loading (``read``) and the reverse transform for saving
        (``write``), in the format of ``converters/names/published_names.json``.

    Raises:
        KeyError: If the class of the transform is not supported, as with a class that a newer
            version of transformers adds.
    """
    rule: dict[str, Any] = {
        "kind": _RULE_KINDS[type(transform).__name__],
        "read": _convert_direction(transform),
        "write": _convert_direction(transform.reverse_transform()),
    }
    if rule["write"]["targets"] == [_MIXTURE_NAME_PART]:
        rule["write"]["find"] = rule["write"]["find"].removesuffix(")") + f"{EXCEPT_DENSE})"
    if transform.scope_prefix is not None:
        rule |= {"scope": transform.scope_prefix, "base": transform.base_model_prefix}
    return rule


_MIXTURE_NAME_PART = ".block_sparse_moe."


def _convert_direction(transform: Any) -> dict[str, Any]:
    """Convert one direction of a name rule, loading or saving, to a JSON-compatible dict.

    The dict contains the patterns of the names to convert, the patterns of the resulting names, and
    the operations on the tensors.

    Args:
        transform: Weight transform of transformers for this direction.
    """
    direction: dict[str, Any] = {
        "find": transform.compiled_sources.pattern,
        "sources": list(transform.source_patterns),
        "targets": list(transform.target_patterns),
    }
    if operations := getattr(transform, "operations", None):
        by_class = [(type(op).__name__, op) for op in operations]
        direction["ops"] = [_OPERATIONS.get(name, lambda _, name=name: [name])(op) for name, op in by_class]
    if offset := getattr(transform, "offset", 0):
        direction["offset"] = offset
    return direction


@_transformers.explain_missing_names("model.name_or_path: a quantized checkpoint")
def can_dequantize_on_loading(quantization: Mapping[str, Any]) -> bool:
    """Return whether a quantization config supports ``dequantize``, which loads the weights as floats."""
    from transformers.quantizers.auto import AutoQuantizationConfig

    return hasattr(AutoQuantizationConfig.from_dict(dict(quantization)), "dequantize")


@_transformers.explain_missing_names("model.name_or_path")
def read_generation_config(name: str) -> Any:
    """Build a generation config from the generation settings in a model's ``config.json``.

    Args:
        name: Local folder, or name of a model on the Hub.
    """
    from transformers import GenerationConfig

    return GenerationConfig.from_pretrained(name, config_file_name="config.json", _from_model_config=True)


# -- chat templates ----------------------------------------------------------------------------------------

compile_chat_template = _transformers.wrap_private_function(
    "transformers.utils.chat_template_utils:_compile_jinja_template", "data.chat_template"
)
"""Compile a chat template in the Jinja sandbox of transformers, which supports the tag ``generation``."""
render_chat_template = _transformers.wrap_private_function(
    "transformers.utils.chat_template_utils:_render_with_assistant_indices", "data.chat_template"
)
"""Render messages with a compiled chat template.

Returns the text, and the spans of the text that the template marks as generated by the assistant.
"""

# -- mixtures of experts -----------------------------------------------------------------------------------


@_transformers.explain_missing_names("backend: xla")
def set_experts_function(model: Any, name: str, function: Callable[..., Any]) -> None:
    """Register a transformers experts implementation, and select it in ``model``.

    The registration applies to the entire process, and replaces an earlier registration of the same
    name.

    Args:
        model: Model with mixture-of-experts layers.
        name: Name of the implementation.
        function: Function that computes the experts of a layer. Its arguments are the experts
            module, the hidden states, the ids of the chosen experts, and their weights.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(name, function)
    model.set_experts_implementation(name)


apply_expert_gate = _transformers.wrap_private_attribute("_apply_gate", "backend: xla")
"""Apply the activation and the gate of an expert layer to the result of its first matrix product."""

# -- weight decay ------------------------------------------------------------------------------------------

list_parameter_names_except = _transformers.wrap_private_function(
    "transformers.trainer_pt_utils:get_parameter_names", "train.weight_decay"
)
"""List the names of a model's parameters, except those in modules of the given classes and those that
match the given patterns."""
