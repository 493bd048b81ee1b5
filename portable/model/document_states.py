"""Reset the states of recurrent layers at the start of each document of a packed sample.

Gated delta rules, state space models and causal convolutions carry a state or a window
along the sequence. In transformers, their layers call the functions in
:data:`STATE_FUNCTIONS`. :class:`DocumentStatesForward` replaces these functions while such
a layer runs on packed documents:

* A fused kernel of fla, mamba_ssm or causal_conv1d receives the document boundaries, if it
  accepts them.
* A fused kernel that combines several functions of a layer, but does not accept boundaries,
  is skipped. The layer then calls the functions one by one.
* Any other function runs on one document at a time. This is exact, because each call starts
  without a state.

The projections of a layer still run once on the complete micro-batch. All ranks therefore
gather parameters the same number of times, although their numbers of documents differ.
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
    """Description of a function in transformers that carries a state along the sequence.

    Such a function is, for example, a scan or a causal convolution. It may have a fused kernel and
    an unfused version. Some functions combine several steps of a layer, such as a convolution and a
    scan, and have only a fused kernel.

    Attributes:
        token_arguments: Names of the arguments that have one value per token. Empty if the function
            has only a fused kernel.
        token_dim: Token dimension in these arguments and in the result.
        boundaries: Name of the argument through which the fused kernel receives the document
            boundaries. None if the kernel has no such argument.
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
"""State functions in the modeling files of transformers, keyed by name."""

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

    The method :meth:`compute` calls a state function, such as a scan, so that no state crosses
    these boundaries.

    Args:
        lengths: Lengths of the documents in tokens, on the host. There is one list per sample, and
            its sum is the number of tokens of the sample. Lengths of 0 are ignored.
        positions: Position of each token in its document, int64 ``[batch, tokens]``.
    """

    def __init__(self, lengths: list[list[int]], positions: Tensor) -> None:
        # A document of length 0 would shift the indices of the following documents in fla.
        self.lengths = [[length for length in row if length] for row in lengths]
        self._positions = positions

    @cached_property
    def indices(self) -> Tensor:
        """Index of each token's document in the sample, int32 ``[batch, tokens]``.

        The first document of each sample has the index 0.
        """
        return ((self._positions == 0).cumsum(-1) - 1).to(torch.int32)

    @cached_property
    def offsets(self) -> DocumentOffsets:
        """Offsets of all documents, on the device and on the host.

        The copy to the device does not cause a host-device sync.
        """
        lengths, device = [0, *(length for row in self.lengths for length in row)], self._positions.device
        host = torch.tensor(lengths).cumsum(0)
        host = host.pin_memory() if device.type == "cuda" else host
        return DocumentOffsets(host.to(device, non_blocking=True), host)

    def compute(self, name: str, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Call a state function so that no state crosses a document boundary.

        Args:
            name: Name of the function in :data:`STATE_FUNCTIONS`.
            function: Function from a modeling file of transformers.
            arguments: Positional arguments of the function.
            keywords: Keyword arguments of the function. Document boundaries for flash attention,
                such as ``cu_seqlens``, are ignored, because they include empty documents.

        Returns:
            The result of the function. None if ``function`` is a kernel that combines several
            functions of the layer but cannot separate documents. The layer then calls these
            functions one by one.
        """
        kind = STATE_FUNCTIONS[name]
        # These boundaries, which are for flash attention, include empty documents.
        for argument in _BOUNDARY_ARGUMENTS:
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
        """Call ``function`` on one document at a time, and concatenate the outputs.

        Args:
            kind: Description of the function, which names its per-token arguments.
            function: Function from a modeling file of transformers.
            arguments: Positional arguments for the complete batch.
            keywords: Keyword arguments for the complete batch.

        Returns:
            The concatenated output. If ``function`` returns a tuple, the result is a tuple of the
            concatenated output and None for each further element. None if ``kind`` names no
            per-token arguments, because the function is then a fused kernel that cannot run on
            separate documents.
        """
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
        """Call a fused kernel once on the concatenated documents of all samples.

        The kernel receives the document offsets, so that it resets its state at each document. The
        output is reshaped to the batch. If the kernel returns a tuple, the result contains None
        for each element after the output.

        Args:
            kind: Description of the function, which names its per-token arguments.
            kernel: Fused kernel that accepts document offsets.
            arguments: Positional arguments for the complete batch.
            keywords: Keyword arguments for the complete batch.
        """
        tokens = _find_token_arguments(kind, kernel, arguments, keywords)
        concatenated = {key: tensor.flatten(0, 1).unsqueeze(0) for key, tensor in tokens.items()}
        replaced = _replace_arguments(arguments, keywords, concatenated)
        # Also pass the offsets on the host, because fla would otherwise read them from the device.
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
    """Return the arguments that have a value for each token, keyed by position or keyword."""
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
    """Return the arguments of a call after replacing some of them.

    Args:
        arguments: Positional arguments.
        keywords: Keyword arguments.
        values: New values, keyed by the position or the keyword of the argument.
    """
    replaced = tuple(values.get(index, value) for index, value in enumerate(arguments))
    return _Arguments(replaced, {name: values.get(name, value) for name, value in keywords.items()})


def _get_output(result: Any) -> Tensor:
    """Return the output tensor in the result of a state function, such as a scan.

    A state function carries a state along the sequence. Its result is either the output, or a tuple
    of the output and the final state.
    """
    output: Tensor = result[0] if isinstance(result, tuple) else result
    return output


def _replace_output(result: Any, output: Tensor) -> Any:
    """Replace the output in the result of a function that carries a state along the sequence.

    An example of such a function is a scan. It returns either only the output, or a tuple of the
    output and the final state. In the returned tuple, the final state is None, because training
    does not use it.
    """
    return (output, *(None for _ in result[1:])) if isinstance(result, tuple) else output


class _StatefulLayerForward(ForwardWrapper):
    """Forward method of a stateful layer that resets the states at the start of each document.

    The layer is excluded from ``torch.compile``, which would compile every combination of lengths.

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
        # Exclude the layer from torch.compile, which would compile every combination of lengths.
        self._run = torch.compiler.disable(_run_stateful_layer)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Run the layer so that no state crosses a document boundary.

        See :func:`_run_stateful_layer` for the exceptions.
        """
        return self._run(self, arguments, keywords)


def _run_stateful_layer(
    forward: _StatefulLayerForward, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> Any:
    """Run the forward method of a layer so that no state crosses a document boundary.

    During the call, each function of :data:`STATE_FUNCTIONS` in the layer's module is replaced by
    :meth:`PackedDocuments.compute`. A keyword argument ``cache`` is replaced with None, because a
    cache would store one state for all documents. The forward method runs unchanged if the samples
    are not packed, or if a layer in eval mode is called outside of the model's forward pass.

    Args:
        forward: Wrapper of the layer's forward method, with the documents of the micro-batch.
        arguments: Positional arguments of the forward method.
        keywords: Keyword arguments of the forward method.
    """
    documents = forward.documents
    # Outside of a forward pass, a layer in training mode runs only to recompute its activations.
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
    """Forward method of a model that resets the states of layers at each document start.

    This method passes the document boundaries to the stateful layers, which reset their states. The
    constructor replaces the ``forward`` of these layers (see :func:`find_stateful_layers`).

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
        """Run the forward pass, and give the layers the document boundaries of the micro-batch.

        The boundaries come from ``document_lengths`` and ``position_ids`` in ``inputs``. Without
        ``document_lengths``, the layers do not reset their states. With
        ``document_lengths``, ``position_ids`` is required. The layers keep the boundaries after the
        forward pass, because the backward pass may recompute layers. During the forward pass, their
        flag ``in_forward`` is set.
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
    """Make stateful layers of a model reset their states at the start of each packed document.

    Does nothing if the model has no such layers. Call this function after
    :func:`install_document_forward`. The forward method that is installed last runs first, and
    :class:`portable.model.document_attention.DocumentForward` removes ``document_lengths``.

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
    """Return whether the forward method of a class calls a function of :data:`STATE_FUNCTIONS`.

    The functions are recognized by their names in the bytecode of the method. Calls inside helper
    methods are not found.
    """
    code = getattr(inspect.unwrap(layer_class.forward), "__code__", None)
    return code is not None and not STATE_FUNCTIONS.keys().isdisjoint(code.co_names)
