"""Transforms that a run applies to its transformers model before an engine shards it.

:data:`TRANSFORMS` lists all transforms in the order in which :func:`apply_transforms` applies them.
Each transform modifies the model in place, but leaves the names, shapes and values of its
parameters unchanged. Freezing parameters, quantizing them, and adding an adapter are not
transforms. They are part of building the model
(:func:`portable.adapters.adapter.build_training_model`), because the planner needs their result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from portable.engines.compiling import compile_layers
from portable.engines.experts import find_modules_with_unused_parameters, register_zero_gradient_hooks
from portable.model.activation_checkpointing import enable_activation_checkpointing
from portable.model.activation_offloading import offload_activations
from portable.model.auxiliary_losses import needs_last_token_as_input
from portable.model.chunked_loss import find_chunked_head, install_chunked_head
from portable.model.document_attention import install_document_forward
from portable.model.document_states import find_stateful_layers, install_document_states
from portable.model.dynamic_rope import has_length_dependent_rope, install_text_length_forward
from portable.model.expert_exchange import install_expert_exchange
from portable.model.freezing import COMPUTE_DTYPES
from portable.model.image_forward import install_image_forward
from portable.model.loss import TrainingObjective, install_loss_forward
from portable.model.regularization import install_embedding_noise, remove_dropout
from portable.model.training_loss import build_training_loss

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack

    from torch import nn
    from transformers import PreTrainedModel

    from portable.config import RunConfig


@dataclass(frozen=True)
class TransformInputs:
    """Inputs of a transform in addition to the model.

    Attributes:
        config: Config of the run.
        at_stop: Exit stack for cleanup. The backend closes it before it destroys the process group.
        recompute_inputs_on_host: Whether activation checkpointing stores the inputs of layers in
            host memory. Ignored if ``memory.offload_activations`` is set.
    """

    config: RunConfig
    at_stop: ExitStack
    recompute_inputs_on_host: bool = False


@dataclass(frozen=True)
class Transform:
    """Change that a run makes to a transformers model.

    Attributes:
        name: Name that ``--dry-run`` prints.
        is_needed: Function that returns whether a run needs the transform. Its arguments are the model
            and the config.
        apply: Function that changes the model in place. Its result is ignored.
    """

    name: str
    is_needed: Callable[[PreTrainedModel, RunConfig], bool]
    apply: Callable[[PreTrainedModel, TransformInputs], Any]


def _is_on_xla(config: RunConfig) -> bool:
    return config.backend == "xla"


def _needs_context_parallelism(_: PreTrainedModel, config: RunConfig) -> bool:
    # On XLA, the compiler exchanges tokens for heads, because of annotations.
    return config.context_parallel_size > 1 and not _is_on_xla(config)


def _apply_context_parallelism(model: PreTrainedModel, context: TransformInputs) -> None:
    from portable.engines.context_parallel import enable_context_parallelism

    enable_context_parallelism(model, context.config, context.at_stop)


def _needs_chunked_loss(_: PreTrainedModel, config: RunConfig) -> bool:
    # DeepSpeed would gather the head again each time its weight is used, and XLA stores the logits only once
    # anyway.
    gathers = config.strategy.startswith("zero")
    return config.memory.loss_chunk_tokens != 0 and not gathers and not _is_on_xla(config)


def _needs_zero_expert_gradients(model: PreTrainedModel, config: RunConfig) -> bool:
    # Not needed for ZeRO-3, which gathers the experts of a layer as one unit, or for XLA, which computes
    # every expert for every token.
    return (
        config.strategy != "zero3"
        and not _is_on_xla(config)
        and bool(find_modules_with_unused_parameters(model))
    )


def _needs_recomputation(_: PreTrainedModel, config: RunConfig) -> bool:
    return config.memory.activation_checkpointing != "none" and not _is_on_xla(config)


def _apply_recomputation(model: PreTrainedModel, context: TransformInputs) -> None:
    kind, on_host = context.config.memory.activation_checkpointing, context.recompute_inputs_on_host
    on_host = on_host and not context.config.memory.offload_activations
    enable_activation_checkpointing(model, kind, inputs_on_host=on_host)


def _apply_noise(model: PreTrainedModel, context: TransformInputs) -> None:
    config, loss = context.config, build_training_loss(context.config)
    last_is_label_only = config.model.task == "causal-lm" and not (loss is not None and loss.whole)
    last_is_label_only = last_is_label_only and not needs_last_token_as_input(model.config, config.model)
    install_embedding_noise(model, config.train.neftune_noise_alpha, extra_tokens=int(last_is_label_only))


def _needs_no_dropout(_: PreTrainedModel, config: RunConfig) -> bool:
    if config.train.dropout is not None:
        return not config.train.dropout
    loss = build_training_loss(config)
    return loss is not None and not loss.dropout


def _needs_document_attention(_: PreTrainedModel, config: RunConfig) -> bool:
    # With context parallelism, a rank receives the positions of its part of a sequence as an additional
    # column.
    return config.data.packing == "documents" or config.context_parallel_size > 1


def _needs_document_states(model: PreTrainedModel, config: RunConfig) -> bool:
    return config.data.packing == "documents" and bool(find_stateful_layers(model))


def _apply_fp8(model: PreTrainedModel, context: TransformInputs) -> None:
    from portable.model.fp8_layers import install_fp8_layers

    install_fp8_layers(model, context.config.fp8, context.config.backend)


TRANSFORMS: tuple[Transform, ...] = (
    # Must be first, because it replaces modules.
    Transform("fp8 layers", lambda _, config: config.fp8 != "none", _apply_fp8),
    Transform("shared sequences", _needs_context_parallelism, _apply_context_parallelism),
    Transform(
        "exchanged tokens of experts",
        lambda _, config: config.expert_parallel_size > 1,
        lambda model, _: install_expert_exchange(model),
    ),
    Transform(
        "chunked loss",
        _needs_chunked_loss,
        lambda model, context: install_chunked_head(model, context.config.memory.loss_chunk_tokens),
    ),
    Transform(
        "gradients of unused experts",
        _needs_zero_expert_gradients,
        lambda model, _: register_zero_gradient_hooks(model),
    ),
    Transform("recomputed activations", _needs_recomputation, _apply_recomputation),
    Transform(
        "offloaded activations",
        lambda _, config: config.memory.offload_activations,
        lambda model, context: offload_activations(model, context.config.memory.activation_checkpointing),
    ),
    Transform(  # must follow the chunked loss, whose functions are also compiled
        "compiled layers",
        lambda _, config: config.compile,
        lambda model, context: compile_layers(model, context.config),
    ),
    Transform("noise", lambda _, config: config.train.neftune_noise_alpha > 0, _apply_noise),
    Transform("no dropout", _needs_no_dropout, lambda model, _: remove_dropout(model)),
    # The next transforms each wrap model.forward, so the last one is called first.
    Transform(
        "blank images",
        lambda _, config: bool(config.data.images),
        lambda model, _: install_image_forward(model),
    ),
    Transform(
        "document attention", _needs_document_attention, lambda model, _: install_document_forward(model)
    ),
    Transform("document states", _needs_document_states, lambda model, _: install_document_states(model)),
    Transform(
        "rotations by text",
        lambda model, _: has_length_dependent_rope(model.config),
        lambda model, _: install_text_length_forward(model),
    ),
    Transform("loss parts", lambda *_: True, lambda model, _: install_loss_forward(model)),
)
"""All transforms, in the order of application."""


def list_needed_transforms(model: nn.Module, config: RunConfig) -> list[Transform]:
    """List the transforms that a run needs, in the order of application.

    Args:
        model: The transformers model. It is not modified.
        config: Config of the run.
    """
    checked = cast("PreTrainedModel", model)
    return [transform for transform in TRANSFORMS if transform.is_needed(checked, config)]


def describe_transforms(model: PreTrainedModel, config: RunConfig) -> list[str]:
    """List the changes that a run makes to its model, for ``--dry-run``.

    Args:
        model: The transformers model with its adapter, on the meta device.
        config: Config of the run.

    Returns:
        Names of the changes in the order of application: first ``frozen parameters`` and
        ``adapter``, if they apply, then the transforms. Quantization is not listed.
    """
    built = {
        "frozen parameters": any(not parameter.requires_grad for parameter in model.parameters()),
        "adapter": config.adapter.type is not None,
    }
    names = [name for name, applies in built.items() if applies]
    return names + [transform.name for transform in list_needed_transforms(model, config)]


def apply_transforms(
    model: nn.Module, config: RunConfig, at_stop: ExitStack, *, recompute_inputs_on_host: bool = False
) -> None:
    """Apply the transforms that a run needs, such as activation checkpointing, to its model.

    Args:
        model: The transformers model, on any device, not wrapped or sharded. It is changed in
            place.
        config: Config of the run.
        at_stop: Exit stack for cleanup. The backend closes it before it destroys the process group.
        recompute_inputs_on_host: Whether activation checkpointing stores the inputs of layers in
            host memory. Ignored if ``memory.offload_activations`` is set.
    """
    context = TransformInputs(config, at_stop, recompute_inputs_on_host)
    for transform in list_needed_transforms(model, config):
        transform.apply(cast("PreTrainedModel", model), context)


def build_objective(model: nn.Module, config: RunConfig) -> TrainingObjective:
    """Build the training objective of a run.

    Args:
        model: The transformers model, after :func:`apply_transforms`.
        config: Config of the run.
    """
    return TrainingObjective(
        model,
        config.train.global_batch_size,
        find_chunked_head(model),
        build_training_loss(config),
        COMPUTE_DTYPES.get(config.precision),
    )
