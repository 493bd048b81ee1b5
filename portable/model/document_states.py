"""Reset the states of recurrent layers at the start of each document of a packed sample.

Gated delta rules, state space models and causal convolutions carry a state or a window along the
sequence. In transformers, their layers call the functions in :data:`STATE_FUNCTIONS`.
:class:`DocumentStatesForward` replaces these functions while such a layer runs on packed documents:

* A fused kernel of fla, mamba_ssm or causal_conv1d receives the document boundaries, if it accepts
  them.
* Any other function runs on one document at a time. This is exact, because each call starts without
  a state.

The projections of a layer still run once on the complete micro-batch. All ranks therefore gather
parameters the same number of times, although their numbers of documents differ.
"""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from portable.batch import read_host_copy
from portable.model.forward import ForwardWrapper
from portable.private.transformers_internals import (
    get_module_namespace,
    is_fused_kernel,
    replace_mapping_entry,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor, nn

    from portable.model.forward import Model


@dataclass(frozen=True)
class StateFunction:
    """Function of transformers that carries a state along the sequence.

    Attributes:
        token_arguments: Names of the arguments with a value for each token. Empty for a function that
            exists only as a fused kernel, which replaces the other functions of a layer.
        token_dim: Token dimension in these arguments and in the result.
        boundaries: Argument of the fused kernel that receives the document boundaries. None if it has
            no such argument.
    """

    token_arguments: tuple[str, ...]
    token_dim: int = 1
    boundaries: str | None = None


_DELTA_RULE = StateFunction(("query", "key", "value", "g", "beta"), boundaries="cu_seqlens")
STATE_FUNCTIONS: Mapping[str, StateFunction] = {
    "causal_conv1d_fn": StateFunction(("hidden_states",), token_dim=2, boundaries="seq_idx"),
    "torch_chunk_gated_delta_rule": _DELTA_RULE,
    "chunk_kimi_delta_attention": _DELTA_RULE,
    "mamba2_chunk_scan": StateFunction(("hidden_states", "dt", "B", "C"), boundaries="seq_idx"),
    "mamba2_split_conv1d_scan_combined": StateFunction((), boundaries="seq_idx"),
    "mamba_selective_scan": StateFunction(("hidden_states", "dt", "B", "C", "z"), token_dim=2),
    "mamba_inner_fn": StateFunction(()),
}
"""Functions that the modeling files of transformers define, by name."""

STATE_SEPARATING_TYPES = frozenset(
    {
        "bailing_hybrid",
        "bamba",
        "falcon_h1",
        "falcon_mamba",
        "granitemoehybrid",
        "jamba",
        "kimi_linear",
        "lara_mini",
        "lfm2",
        "lfm2_moe",
        "lfm2_vl",
        "lfm3",
        "lfm3_vl",
        "mamba",
        "mamba2",
        "nemotron_h",
        "olmo_hybrid",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
        "zamba",
        "zamba2",
    }
)
"""Model types with states for which a test has shown that packed documents have the loss and gradients of
separate documents.
"""

_BOUNDARY_ARGUMENTS = ("cu_seqlens", "cu_seqlens_cpu", "seq_idx")


class DocumentOffsets(NamedTuple):
    """Offsets of all documents in the concatenated samples of a micro-batch, int64 ``[documents + 1]``.

    Attributes:
        device: Offsets on the device.
        host: The same offsets on the host.
    """

    device: Tensor
    host: Tensor


class PackedDocuments:
    """Document boundaries of a micro-batch.

    Args:
        lengths: Number of positions of each document of each sample, on the host. Each row sums to the
            number of tokens of a sample.
        positions: Position of each token in its document, int64 ``[batch, tokens]``.
    """

    def __init__(self, lengths: list[list[int]], positions: Tensor) -> None:
        # A document of length 0 would shift the indices of the following documents in fla.
        self.lengths = [[length for length in row if length] for row in lengths]
        self._positions = positions

    @cached_property
    def indices(self) -> Tensor:
        """Document index of each token in its sample, int32 ``[batch, tokens]``."""
        return ((self._positions == 0).cumsum(-1) - 1).to(torch.int32)

    @cached_property
    def offsets(self) -> DocumentOffsets:
        """Document offsets, which are copied to the device without a host-device sync."""
        lengths, device = [0, *(length for row in self.lengths for length in row)], self._positions.device
        host = torch.tensor(lengths).cumsum(0)
        host = host.pin_memory() if device.type == "cuda" else host
        return DocumentOffsets(host.to(device, non_blocking=True), host)

    def compute(self, name: str, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Call a function of :data:`STATE_FUNCTIONS` without carrying states across document boundaries.

        Args:
            name: Name of the function.
            function: Function from a modeling file of transformers.
            arguments: Positional arguments of the function.
            keywords: Keyword arguments of the function.

        Returns:
            The result of the function. None if the layer must call its other functions instead.
        """
        kind = STATE_FUNCTIONS[name]
        for argument in _BOUNDARY_ARGUMENTS:  # flash attention has boundaries with empty documents
            keywords.pop(argument, None)
        if kind.boundaries is None or not is_fused_kernel(function):
            return self._compute_per_document(kind, function, arguments, keywords)
        if kind.boundaries == "seq_idx":
            return function(*arguments, **keywords, seq_idx=self.indices)
        return self._compute_concatenated(kind, function, arguments, keywords)

    def _compute_per_document(
        self,
        kind: StateFunction,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> Any:
        """Call ``function`` for one document at a time."""
        if not kind.token_arguments:
            return None
        tokens = _find_token_arguments(kind, function, arguments, keywords)
        # Use split, because its gradients are concatenated. Gradients of slices would be padded and added.
        samples = zip(*(tensor.split(1) for tensor in tokens.values()), strict=True)
        results: list[Any] = []
        for lengths, sample in zip(self.lengths, samples, strict=True):
            for part in zip(*(tensor.split(lengths, kind.token_dim) for tensor in sample), strict=True):
                replaced = _replace_arguments(arguments, keywords, dict(zip(tokens, part, strict=True)))
                results.append(function(*replaced.arguments, **replaced.keywords))
        outputs = iter(map(_get_output, results))
        rows = [torch.cat([next(outputs) for _ in row], kind.token_dim) for row in self.lengths]
        return _replace_output(results[0], torch.cat(rows))

    def _compute_concatenated(
        self,
        kind: StateFunction,
        kernel: Callable[..., Any],
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> Any:
        """Call a kernel that accepts concatenated documents as one sequence, together with their offsets."""
        tokens = _find_token_arguments(kind, kernel, arguments, keywords)
        concatenated = {key: tensor.flatten(0, 1).unsqueeze(0) for key, tensor in tokens.items()}
        replaced = _replace_arguments(arguments, keywords, concatenated)
        # With the offsets on the host, fla does not read them from the device.
        result = kernel(
            *replaced.arguments,
            **replaced.keywords,
            cu_seqlens=self.offsets.device,
            cu_seqlens_cpu=self.offsets.host,
        )
        return _replace_output(result, _get_output(result).squeeze(0).unflatten(0, self._positions.shape))


class _Arguments(NamedTuple):
    """Positional and keyword arguments of a call."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


def _find_token_arguments(
    kind: StateFunction, function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> dict[int | str, Tensor]:
    """Return the arguments with a value for each token, keyed by position or keyword."""
    names = inspect.signature(function).parameters
    values: dict[int | str, Any] = {
        index: value
        for index, (name, value) in enumerate(zip(names, arguments, strict=False))
        if name in kind.token_arguments
    }
    values |= {name: value for name, value in keywords.items() if name in kind.token_arguments}
    return {key: value for key, value in values.items() if value is not None}


def _replace_arguments(
    arguments: tuple[Any, ...], keywords: dict[str, Any], values: Mapping[int | str, Any]
) -> _Arguments:
    """Return the arguments of a call, with the given positions and keywords replaced by other values."""
    replaced = tuple(values.get(index, value) for index, value in enumerate(arguments))
    return _Arguments(replaced, {name: values.get(name, value) for name, value in keywords.items()})


def _get_output(result: Any) -> Tensor:
    """Return the output of a state function from its result, which may also contain a state."""
    output: Tensor = result[0] if isinstance(result, tuple) else result
    return output


def _replace_output(result: Any, output: Tensor) -> Any:
    """Return a result with another output. Its state becomes None, because training does not use it."""
    return (output, *(None for _ in result[1:])) if isinstance(result, tuple) else output


class _StatefulLayerForward(ForwardWrapper):
    """Forward method of a stateful layer that resets the states at the start of each document.

    Args:
        layer: Layer whose forward method calls functions of :data:`STATE_FUNCTIONS`.

    Attributes:
        documents: Documents of the micro-batch. None if its samples are not packed.
        in_forward: Whether a forward pass on ``documents`` is running.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self.layer = layer
        self.documents: PackedDocuments | None = None
        self.in_forward = False
        # torch.compile would compile every combination of lengths.
        self._run = torch.compiler.disable(_run_stateful_layer)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Run the layer. In training and evaluation, states do not cross document boundaries."""
        return self._run(self, arguments, keywords)


def _run_stateful_layer(
    forward: _StatefulLayerForward, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> Any:
    """Run the forward method of a layer with state functions that keep documents separate."""
    documents = forward.documents
    # Outside of a forward pass, only layers in training are run, when their activations are recomputed.
    if documents is None or not (forward.in_forward or forward.layer.training):
        return forward.__wrapped__(*arguments, **keywords)
    if "cache" in keywords:
        keywords["cache"] = None  # a cache would store one state for all documents
    namespace = get_module_namespace(forward.layer)
    with ExitStack() as stack:
        for name in STATE_FUNCTIONS.keys() & namespace.keys():
            compute = partial(documents.compute, name, namespace[name])
            stack.enter_context(replace_mapping_entry(namespace, name, compute))
        return forward.__wrapped__(*arguments, **keywords)


class DocumentStatesForward(ForwardWrapper):
    """Forward method of a model that resets the states of its layers at the start of each document.

    Args:
        model: A transformers model, not wrapped.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._layers = []
        for layer in find_stateful_layers(model):
            _StatefulLayerForward.install(layer)
            self._layers.append(layer)

    def __call__(self, *arguments: Any, **inputs: Any) -> Any:
        """Run the forward pass, and pass the documents in ``inputs`` to the layers.

        In training, the documents remain set after the forward pass, because the backward pass may recompute
        layers.
        """
        lengths, documents = inputs.get("document_lengths"), None
        if lengths is not None:
            documents = PackedDocuments(read_host_copy(lengths), inputs["position_ids"])
        forwards: list[Any] = [layer.forward for layer in self._layers]
        for forward in forwards:
            forward.documents, forward.in_forward = documents, True
        try:
            return self.__wrapped__(*arguments, **inputs)
        finally:
            for forward in forwards:
                forward.in_forward = False


def install_document_states(model: Model) -> Model:
    """Make the stateful layers of a model reset their states at the start of each packed document.

    Does nothing if the model has no such layers. Call this function after
    :func:`install_document_forward`.

    Args:
        model: A transformers model, not wrapped.

    Returns:
        The same model.
    """
    if find_stateful_layers(model):
        DocumentStatesForward.install(model)
    return model


def find_stateful_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model whose forward methods call functions of :data:`STATE_FUNCTIONS`."""
    classes = {type(module) for module in model.modules()}
    stateful_classes = {layer_class for layer_class in classes if _calls_state_function(layer_class)}
    return [module for module in model.modules() if type(module) in stateful_classes]


def _calls_state_function(layer_class: type[nn.Module]) -> bool:
    """Return whether the forward method of a class calls a function of :data:`STATE_FUNCTIONS`."""
    code = getattr(inspect.unwrap(layer_class.forward), "__code__", None)
    return code is not None and not STATE_FUNCTIONS.keys().isdisjoint(code.co_names)
