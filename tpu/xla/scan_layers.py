"""Compile layers with the same structure once, and run them in a loop (``xla.scan_layers``).

A segment is a sequence of layers in which a group of layers repeats. All layers of a segment run in
one loop. The model's code still calls them one after the other, and does not need to be changed.
All layers except the last one only record their arguments and return their input. The last layer
runs the loop.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from portable.errors import UserError, require, to_one_line
from portable.model.layers import find_transformer_layers, group_layers_by_kind, run_trial_forward
from portable.model.parameters import map_tied_names
from portable.model.weight_sources import to_numpy
from portable.private.torch_internals import tree_flatten, tree_flatten_with_path, tree_unflatten
from portable.tpu.xla.functional_call import FunctionalCaller
from portable.tpu.xla.scan import Scan

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from portable.tpu.xla.scan import Shardings

MAX_PERIOD = 16
HIDDEN_STATES = object()
DISABLE_REMEDY = "set xla.scan_layers: false"


@dataclass(frozen=True)
class LayerSegment:
    """Consecutive layers whose structure repeats every ``period`` layers.

    The layers within one period may differ.

    Attributes:
        layer_names: Names of the layers, in order. The number of names is a multiple of ``period``.
        period: Number of layers after which the structure repeats. It is 1 if all layers have the
            same structure.
        return_forms: Structure of the result of each layer in the period.
    """

    layer_names: tuple[str, ...]
    period: int
    return_forms: tuple[LayerOutputForm, ...]

    def list_parameter_names(self, model: nn.Module) -> list[list[str]]:
        """List the names of the parameters in each stack.

        A stack is one tensor that combines the values of a parameter from several layers. A segment
        is a sequence of layers in which a pattern of ``period`` layers repeats. Each parameter of
        the pattern has one stack, over all repetitions.

        Args:
            model: Model that contains the layers.

        Returns:
            One list per stack, with the names of its parameters in order. For two layers with a
            period of 1, a list is for example ``["layers.0.norm.weight", "layers.1.norm.weight"]``.
        """
        return [
            [f"{name}.{suffix}" for name in self.layer_names[phase :: self.period]]
            for phase in range(self.period)
            for suffix, _ in model.get_submodule(self.layer_names[phase]).named_parameters()
        ]


@dataclass(frozen=True)
class LayerOutputForm:
    """Structure of the output of a layer that computes only the hidden states.

    Every other leaf of the output is a constant, or an argument that the layer returns unchanged.

    Attributes:
        structure: Pytree structure of the output.
        leaves: One entry per leaf: HIDDEN_STATES for the hidden states, the path of a returned
            argument, or a constant.
    """

    structure: Any
    leaves: tuple[Any, ...]


def find_layer_segments(model: nn.Module) -> list[LayerSegment]:
    """Find the layer segments of a model that can run as loops.

    All other layers run separately. A segment consists of consecutive layers with the same parent
    module, in which a group of one or more layers repeats. The repetitions differ only in the
    values of their parameters. Layers with tied parameters are not part of any segment.

    Args:
        model: Transformers model on the meta device. It is not modified.

    Raises:
        UserError: If there are no segments. Also raised if a loop cannot give the same results as
            the layers, for example because ``output_hidden_states`` is set in the model's config.
    """
    kind = str(getattr(model.config, "model_type", type(model).__name__))
    config: Any = model.config
    for key, value in config.to_dict().items():
        skips = key.endswith("layerdrop") and bool(value)
        shows = key in ("output_hidden_states", "output_attentions") and bool(value)
        require(
            not skips and not shows,
            f"xla.scan_layers: {key} is set in the model's config, so layers are skipped at random, but a "
            f"loop runs every layer; {DISABLE_REMEDY}"
            if skips
            else f"xla.scan_layers: {key} is set in the model's config to return the outputs of each "
            f"layer, but a loop returns only the last output; {DISABLE_REMEDY}",
        )
    layers = find_transformer_layers(model)
    layers_by_parent: dict[str, list[tuple[str, nn.Module]]] = {}
    for name, layer in layers:
        layers_by_parent.setdefault(name.rpartition(".")[0], []).append((name, layer))
    shared = {name for first, others in map_tied_names(model).items() if others for name in (first, *others)}
    segments, returned = [], None
    for members in layers_by_parent.values():
        likeness_keys = [
            None if any(n.startswith(f"{name}.") for n in shared) else _build_equivalence_key(m)
            for name, m in members
        ]
        start = 0
        while start < len(members):
            period, num_layers = _find_longest_repetition(likeness_keys[start:])
            if num_layers:
                returned = returned or _record_output_forms(model, kind)
                names = tuple(name for name, _ in members[start : start + num_layers])
                for name in names[:period]:
                    require(
                        name in returned,
                        f"xla.scan_layers: {name} of {kind} returns other values in addition to the hidden "
                        f"states, but a loop returns only the hidden states; {DISABLE_REMEDY}",
                    )
                forms = tuple(returned[name] for name in names[:period])
                segments.append(LayerSegment(names, period, forms))
            start += num_layers or 1
    if not segments:
        raise UserError(
            f"xla.scan_layers: {kind} has no two consecutive layers that are identical; {DISABLE_REMEDY}"
        )
    return segments


class _Repetition(NamedTuple):
    """Group of layers that repeats at the beginning of a list of layers.

    ``period`` is the number of layers in the group, and ``num_layers`` is the number of layers in
    all its repetitions. Both are 0 if no layers repeat. For example, ``period`` is 2 and
    ``num_layers`` is 6 for the layers ``a b a b a b c``.
    """

    period: int
    num_layers: int
    """Number of layers in all repetitions together, a multiple of the period."""


def _find_longest_repetition(likes: Sequence[Any]) -> _Repetition:
    """Find the longest run of a repeated group of layers at the beginning of a sequence.

    A group consists of at most ``MAX_PERIOD`` consecutive layers. If several groups cover equally
    many layers, the smallest group is chosen. For example, the keys ``a, b, a, b, c`` begin with a
    group of two layers that occurs twice. The period, which is the size of the group, is then 2,
    and the repetitions cover four layers.

    Args:
        likes: Key of each layer. Layers with equal keys are equivalent. None for a layer that must
            not repeat.
    """
    best = _Repetition(0, 0)
    for period in range(1, min(MAX_PERIOD, len(likes) // 2) + 1):
        if None in likes[:period]:
            break
        length = period
        while likes[length : length + period] == likes[:period]:
            length += period
        if length > max(period, best.num_layers):
            best = _Repetition(period, length)
    return best


def _build_equivalence_key(layer: nn.Module) -> Any:
    """Build a key that is equal for two layers if they compute the same function.

    The parameter values do not affect the key. The key contains the names and classes of all
    submodules, their attributes that are numbers, strings or None, the shapes, dtypes and
    ``requires_grad`` of the parameters, and the buffers. Other attributes are not compared.
    Attributes with ``idx`` in their name, such as ``layer_idx``, are also ignored. Buffers on the
    meta device have equal keys if their names, shapes and dtypes are equal.
    """
    constant_types = (bool, int, float, str, type(None))
    return (
        [(name, type(module)) for name, module in layer.named_modules()],
        [(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in layer.named_parameters()],
        [
            (name, key, value)
            for name, module in layer.named_modules()
            for key, value in vars(module).items()
            if isinstance(value, constant_types) and "idx" not in key
        ],
        [
            (name, tuple(b.shape), b.dtype, b.device.type == "meta" or _hash_buffer(b))
            for name, b in layer.named_buffers()
        ],
    )


def _hash_buffer(buffer: Tensor) -> bytes:
    return hashlib.sha256(to_numpy(buffer).tobytes()).digest()


def _record_output_forms(model: nn.Module, kind: str) -> dict[str, LayerOutputForm]:
    """Record the structure of each layer's result in a trial pass on the meta device.

    Args:
        model: Model whose layers are examined.
        kind: Description of the model, used in error messages.

    Returns:
        Structure of each layer's result, keyed by layer name. The dict contains only layers whose
        result includes exactly one new tensor, the hidden states. All other tensors in the result
        must be arguments that the layer returns unchanged.

    Raises:
        UserError: If the trial pass fails.
    """
    kinds = list(group_layers_by_kind(model).values())
    forms_by_name: dict[str, LayerOutputForm] = {}

    def register_hooks(trial: nn.Module) -> None:
        for names, (_, layer) in zip(kinds, find_transformer_layers(trial), strict=True):
            layer.register_forward_hook(partial(record_output_form, names), with_kwargs=True)

    def record_output_form(names: list[str], _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        argument_paths = {
            id(leaf): path
            for path, leaf in _flatten_arguments(args, kwargs)
            if isinstance(leaf, torch.Tensor)
        }
        leaves, structure = tree_flatten(output)
        forms: list[Any] = [
            argument_paths.get(id(leaf), HIDDEN_STATES) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in leaves
        ]
        if forms.count(HIDDEN_STATES) == 1:
            forms_by_name.update(dict.fromkeys(names, LayerOutputForm(structure, tuple(forms))))

    try:
        run_trial_forward(model, register_hooks)
    except Exception as error:
        reason = to_one_line(error)
        raise UserError(
            f"xla.scan_layers: {kind} cannot be traced without tensor values ({reason}); {DISABLE_REMEDY}"
        ) from error
    return forms_by_name


def _flatten_arguments(args: Any, kwargs: Any) -> list[tuple[Any, Any]]:
    leaves: list[tuple[Any, Any]] = tree_flatten_with_path((tuple(args), dict(kwargs)))[0]
    return leaves


class LoopedLayers:
    """Loop that replaces the separate calls of the layers in a segment.

    The model still calls each layer. The call of the last layer runs the complete loop. All earlier
    calls return the hidden states unchanged. A call raises UserError if the model does not call the
    layers in order, each directly on the output of the previous layer, or if the repetitions
    receive different arguments.

    Args:
        model: Model that contains the layers. Their ``forward`` is replaced.
        segment: Consecutive layers whose structure repeats every ``period`` layers. Each iteration
            of the loop runs ``period`` layers.
        stacks: Pairs of a function and shardings, one pair for each list in
            ``segment.list_parameter_names(model)``. Each list contains the names that one parameter
            has in the different repetitions. The function returns these parameters as one tensor
            ``[repetitions, ...]``. The shardings apply to the slice of one repetition and to its
            gradient.
        constrain: Function to apply to the hidden states before and after each layer.
        recompute: Whether to recompute the layers in the backward pass.
    """

    def __init__(
        self,
        model: nn.Module,
        segment: LayerSegment,
        stacks: Sequence[tuple[Callable[[], Tensor], Shardings]],
        constrain: Callable[[Any], Any],
        *,
        recompute: bool,
    ) -> None:
        self._segment, self._stacks, self._constrain = segment, stacks, constrain
        self._layers = [model.get_submodule(name) for name in segment.layer_names]
        # All repetitions call the layers of the first repetition, and replace the parameters with slices of
        # the stacks.
        templates = self._layers[: segment.period]
        self._caller = FunctionalCaller(nn.ModuleList(templates))
        self._forwards = [layer.forward for layer in templates]
        self._names = [
            f"module.{phase}.{parameter_name}"
            for phase, layer in enumerate(templates)
            for parameter_name, _ in layer.named_parameters()
        ]
        self._calls: list[_LayerCall] = []
        self._scan = Scan(self._run_period, recompute=recompute)
        for number, layer in enumerate(self._layers):
            layer.forward = self._build_layer_forward(number)

    def _build_layer_forward(self, layer_index: int) -> Callable[..., Any]:
        """Build the new forward method of one of the layers that run as a loop.

        The method records the arguments of its call. The method of the last layer then runs the
        loop over all layers of the segment. The methods of all earlier layers return the hidden
        states unchanged. A method raises UserError if its input is not the output of the previous
        layer, or if its arguments differ from the arguments of the first repetition.
        """

        def forward(*args: Any, **kwargs: Any) -> Any:
            call = _LayerCall(args, kwargs)
            if layer_index != len(self._calls) or (layer_index and call.hidden is not self._calls[-1].hidden):
                self._raise_unsupported(
                    layer_index, "is not called directly on the output of the previous layer"
                )
            if layer_index >= self._segment.period:
                self._check_same_arguments(layer_index, call, self._calls[layer_index % self._segment.period])
            self._calls.append(call)
            hidden = call.hidden
            if layer_index == len(self._layers) - 1:
                hidden = self._run_loop()
                self._calls = []
            form = self._segment.return_forms[layer_index % self._segment.period]
            passed_arguments = dict(call.leaves_by_path)
            leaves = [
                hidden if leaf is HIDDEN_STATES else passed_arguments.get(leaf, leaf) for leaf in form.leaves
            ]
            return tree_unflatten(leaves, form.structure)

        return forward

    def _check_same_arguments(self, layer_index: int, call: _LayerCall, first_call: _LayerCall) -> None:
        """Raise UserError if a layer's arguments differ from the first repetition.

        A segment is a sequence of layers in which a group of layers repeats. A loop runs all
        repetitions, and passes the arguments of the first repetition to each of them. Tensor
        arguments must therefore be the same objects, and other arguments must be equal. Hidden
        states are not compared.

        Args:
            layer_index: Index of the layer in the segment.
            call: Arguments of the layer.
            first_call: Arguments of the corresponding layer in the first repetition.
        """
        has_same_arguments = call.structure == first_call.structure and all(
            leaf is other or (not isinstance(leaf, torch.Tensor) and bool(leaf == other))
            for index, (leaf, other) in enumerate(zip(call.leaves, first_call.leaves, strict=True))
            if index != call.hidden_index
        )
        if not has_same_arguments:
            self._raise_unsupported(
                layer_index, "is called with different arguments from the previous layers"
            )

    def _raise_unsupported(self, layer_index: int, reason: str) -> None:
        raise UserError(
            f"xla.scan_layers: layer {self._segment.layer_names[layer_index]} {reason}; {DISABLE_REMEDY}"
        )

    def _run_loop(self) -> Tensor:
        """Run all layers of the segment as one loop, and return the last hidden states.

        The structure of the layers repeats every ``period`` layers, and each iteration runs the
        next ``period`` layers. They receive the hidden states of the previous iteration. All
        other arguments are reused from the model's calls to the first ``period`` layers.
        """
        calls = self._calls[: self._segment.period]
        shared: dict[int, Tensor] = {}
        for call in calls:
            for index, leaf in enumerate(call.leaves):
                if isinstance(leaf, torch.Tensor) and index != call.hidden_index:
                    shared.setdefault(id(leaf), leaf)
        buffers = dict(self._caller.named_buffers())
        self._shared_order = list(shared), list(buffers)
        constant_arguments = [
            [None if isinstance(x, torch.Tensor) else repr(x) for x in call.leaves] for call in calls
        ]
        (hidden,), _ = self._scan(
            (calls[0].hidden,),
            [stack() for stack, _ in self._stacks],
            (*shared.values(), *buffers.values()),
            shardings=[sharding for _, sharding in self._stacks],
            key=(
                repr(constant_arguments),
                repr([call.structure for call in calls]),
                self._layers[0].training,
            ),
        )
        return hidden

    def _run_period(
        self, carry: Sequence[Tensor], slices: Sequence[Tensor], shared: Sequence[Tensor]
    ) -> tuple[tuple[Tensor], tuple[()]]:
        """Run one repetition of the segment's layers, as the body of the scan.

        A segment is a sequence of layers in which a group of layers repeats. The scan is the loop
        over the repetitions.

        Args:
            carry: Hidden states before the repetition.
            slices: Parameters of the layers in this repetition.
            shared: Other tensor arguments, and the layers' buffers.

        Returns:
            The hidden states after the repetition, and an empty tuple. The tuple would contain
            results for the scan to stack, but the layers have none.
        """
        arguments, buffers = self._shared_order
        shared_values = dict(zip(arguments, shared, strict=False))
        values = dict(zip(self._names, slices, strict=True))
        values |= dict(zip(buffers, shared[len(arguments) :], strict=True))

        def run_layers() -> Tensor:
            hidden = carry[0]
            for call, forward, form in zip(
                self._calls, self._forwards, self._segment.return_forms, strict=False
            ):
                leaves = [shared_values.get(id(leaf), leaf) for leaf in call.leaves]
                leaves[call.hidden_index] = self._constrain(hidden)
                args, kwargs = tree_unflatten(leaves, call.structure)
                results, _ = tree_flatten(forward(*args, **kwargs))
                hidden = self._constrain(results[form.leaves.index(HIDDEN_STATES)])
            return hidden

        result: Tensor = torch.func.functional_call(self._caller, values, (run_layers,))
        return (result,), ()


class _LayerCall:
    """Arguments of one call to a layer.

    The hidden states are the first positional argument, or the keyword argument ``hidden_states``
    if there are no positional arguments.

    Attributes:
        leaves: Leaves of the pytree ``(args, kwargs)``.
        structure: Structure of this pytree.
        leaves_by_path: Pairs of a path in this pytree and the leaf.
        hidden: Hidden states.
        hidden_index: Index of the hidden states in ``leaves``.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.leaves_by_path = _flatten_arguments(args, kwargs)
        self.leaves, self.structure = tree_flatten((tuple(args), dict(kwargs)))
        self.hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        self.hidden_index = next(index for index, leaf in enumerate(self.leaves) if leaf is self.hidden)
