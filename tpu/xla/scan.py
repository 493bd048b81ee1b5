"""Loop over the leading dim of tensors with a single compiled XLA ``While``, and compute its gradient.

torch_xla's scan cannot be used here. Its backward pass imports JAX under SPMD, and it stacks values
that AOTAutograd derives from the weights. This module instead lets autograd record the loop body
once, on placeholders. The tensors that autograd saves are stacked over the iterations, each storage
once. Saved views and saved loop inputs are not stacked, but taken from existing tensors. The
gradient is computed by a second loop, which runs backwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from portable.private.torch_internals import find_view_origin, get_tensor_version
from portable.tpu.xla.layout import constrain_with_gradient, copy_without_sharding
from portable.tpu.xla.runtime import xb
from portable.tpu.xla.torch_xla_internals import lowering_context, xla

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from torch import Tensor

Tensors = tuple[torch.Tensor, ...]
Shardings = tuple[Any, Any] | None
"""Shardings of a slice and of its gradient, as torch_xla's bindings expect them. None if not annotated."""

_DEVICE = "xla:0"
_TRACING_SEED = 12345
"""Seed while a body is recorded. It is not 0 or 1, because these would become constants of the graph.

When the loop runs, each iteration gets a different seed.
"""
_recorded_seeds: list[list[torch.Tensor]] = []
"""Seeds of the random numbers of each body that is being recorded. The innermost body is last."""


class ScanResult(NamedTuple):
    """Final carry and stacked results of a loop."""

    carry: Tensors
    """Carry after the last iteration."""
    stacked_results: Tensors
    """Results of the body, each of shape ``[iterations, ...]``."""


class _InputCounts(NamedTuple):
    """Number of carry, stacked, and shared inputs of a loop."""

    carry: int
    stacked: int
    shared: int


class Scan:
    """Loop over a body function, which is traced once per combination of input shapes, dtypes and keys.

    Args:
        body: Function of the carry, one slice of each stacked tensor, and the shared tensors. It
            returns the new carry, with the same shapes and dtypes, and results to stack. It must not
            read any other values that change. Its autograd functions must save tensors with
            ``save_for_backward``.
        recompute: Whether to save only the carry of each iteration and recompute the body in the
            backward pass.
    """

    def __init__(self, body: Any, *, recompute: bool) -> None:
        self._body = body
        self._recompute = recompute
        self._loops_by_signature: dict[Hashable, _TracedLoops] = {}

    def __call__(
        self,
        carry: Sequence[Tensor],
        stacked: Sequence[Tensor],
        shared: Sequence[Tensor] = (),
        *,
        shardings: Sequence[Shardings] = (),
        key: Hashable = (),
    ) -> ScanResult:
        """Run one iteration for each slice of the stacked tensors.

        The result is differentiable with respect to ``carry``, ``stacked`` and ``shared``.

        Args:
            carry: Initial carry.
            stacked: One or more tensors ``[iterations, ...]``. Each iteration receives one slice of each
                tensor.
            shared: Tensors that are passed unchanged to every iteration.
            shardings: Shardings for the slices of ``stacked``, in the same order.
            key: Other values that the body depends on, such as its training mode.

        Returns:
            The final carry, and the stacked results.
        """
        inputs = (*carry, *stacked, *shared)
        counts = _InputCounts(len(carry), len(stacked), len(shared))
        needs_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
        signature = (
            key,
            counts,
            needs_gradient,
            *((tuple(t.shape), t.dtype, t.requires_grad) for t in inputs),
        )
        # The random numbers of the body have separate seeds, so that tracing does not change the state of the
        # run's generator.
        seed = xla.rng_seed(_DEVICE)
        if signature not in self._loops_by_signature:
            trace = _BodyTracer(self._body, counts, inputs, tuple(shardings) or (None,) * len(stacked))
            self._loops_by_signature[signature] = trace.build_loops(needs_gradient, self._recompute)
        _set_seed_and_record(seed)
        traced = self._loops_by_signature[signature]
        shape = (len(stacked[0]),)
        seeds = tuple(
            torch.randint(0, 2**62, shape, dtype=torch.int64, device=_DEVICE) for _ in range(traced.num_seeds)
        )
        if not needs_gradient:
            carried, results = traced.forward(carry, stacked, shared, seeds)
            return ScanResult(tuple(carried), tuple(results))
        outputs: Any = _ScanFunction.apply(traced, counts, *inputs, *seeds)  # type: ignore[no-untyped-call, unused-ignore]
        return ScanResult(outputs[: len(carry)], outputs[len(carry) :])


class _ScanFunction(torch.autograd.Function):
    """Autograd function whose forward and backward passes run the corresponding loops."""

    @staticmethod
    def forward(ctx: Any, traced: _TracedLoops, counts: _InputCounts, *inputs: Tensor) -> Tensors:
        carry, stacked, shared, seeds = _split_by_lengths(inputs, *counts)
        carried, results = traced.forward(carry, stacked, shared, seeds)
        outputs, saved = _split_by_lengths(results, len(results) - traced.num_saved)
        ctx.traced, ctx.counts = traced, counts
        ctx.save_for_backward(*stacked, *shared, *seeds, *saved)
        ctx.set_materialize_grads(False)
        return *carried, *outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        traced: _TracedLoops = ctx.traced
        carries, stacks, shares = ctx.counts
        stacked, shared, seeds, saved = _split_by_lengths(
            ctx.saved_tensors, stacks, shares, len(ctx.saved_tensors) - stacks - shares - traced.num_saved
        )
        output_gradients = [
            torch.zeros(shape, dtype=dtype, device=_DEVICE) if gradient is None else gradient
            for gradient, (shape, dtype) in zip(gradients, traced.output_types, strict=True)
        ]
        carry_gradients, result_gradients = output_gradients[:carries], output_gradients[carries:]
        into_shared = [torch.zeros_like(shared[i]) for i in traced.trained_shared_indices]
        carried, stacked_gradients = traced.backward(
            (*carry_gradients, *into_shared), (*result_gradients, *stacked, *saved), shared, seeds
        )
        input_gradients: list[Any] = [*carried[:carries], *[None] * (stacks + shares)]
        for index, gradient in zip(traced.trained_stacked_indices, stacked_gradients, strict=True):
            input_gradients[carries + index] = gradient
        for index, gradient in zip(traced.trained_shared_indices, carried[carries:], strict=True):
            input_gradients[carries + stacks + index] = gradient
        return None, None, *input_gradients, *[None] * len(seeds)


@dataclass
class _TracedLoops:
    """Forward and backward loops for one combination of input shapes, dtypes and keys.

    Attributes:
        forward: Loop that computes the carry, the results and the saved tensors from the carry, stacked
            and shared inputs.
        backward: Loop that computes gradients. Its carry consists of the carry gradient and the
            accumulated gradients of the shared tensors. Its stacked inputs are the gradients of the
            results, the stacked tensors and the saved tensors. None if no input requires a gradient.
        num_saved: Number of tensors that are saved for the backward loop.
        output_types: Shape and dtype of the carry and of the stacked results.
        trained_stacked_indices: Indices of the stacked tensors with gradients.
        trained_shared_indices: Indices of the shared tensors with gradients.
        num_seeds: Number of seeds per iteration. 0 if the body draws no random numbers.
    """

    forward: _CompiledLoop
    backward: Any
    num_saved: int
    output_types: list[tuple[tuple[int, ...], torch.dtype]]
    trained_stacked_indices: list[int]
    trained_shared_indices: list[int]
    num_seeds: int


class _BodyTracer:
    """Tracer that calls a loop body on placeholders, and builds the loops from the recorded operations.

    Args:
        body: Body of the loop.
        counts: Numbers of carry, stacked, and shared inputs.
        inputs: Inputs of the loop, which determine the shapes and dtypes of the placeholders.
        shardings: Shardings for each stacked input.
    """

    def __init__(self, body: Any, counts: _InputCounts, inputs: Sequence[Tensor], shardings: Any) -> None:
        self._body, self._counts, self._shardings = body, counts, shardings
        carry, stacked, shared = _split_by_lengths(inputs, *counts[:2])
        self._iterations = len(stacked[0])
        self._shapes = [
            *((t.shape, t.dtype, t.is_floating_point()) for t in carry),
            *((t.shape[1:], t.dtype, t.requires_grad) for t in stacked),
            *((t.shape, t.dtype, t.requires_grad) for t in shared),
        ]

    def build_loops(self, needs_gradient: bool, recompute: bool) -> _TracedLoops:
        """Trace the body and build the forward loop. Also build the backward loop if it is needed."""
        if not needs_gradient:
            with torch.no_grad():
                outputs, _ = self._call_body(placeholders := self._create_placeholders())
            loop = self._build_loop(placeholders, outputs)
            return _TracedLoops(loop, None, 0, self._describe_outputs(outputs), [], [], loop.num_seeds)
        return self._trace_with_recompute() if recompute else self._trace_with_saving()

    def _create_placeholders(self) -> list[Tensor]:
        return [
            xb.create_placeholder_tensor(shape, dtype).requires_grad_(learns)
            for shape, dtype, learns in self._shapes
        ]

    def _constrain_placeholders(self, placeholders: Sequence[Tensor]) -> list[Tensor]:
        """Copy the placeholders, and annotate the copies with their shardings.

        The body is called on copies, because an annotation would replace the placeholder with a tensor that
        is not an input of the computation.
        """
        carry, stacked, shared = _split_by_lengths(placeholders, *self._counts[:2])
        slices = [
            copy_without_sharding(tensor) if sharding is None else constrain_with_gradient(tensor, *sharding)
            for tensor, sharding in zip(stacked, self._shardings, strict=True)
        ]
        return [*map(copy_without_sharding, carry), *slices, *map(copy_without_sharding, shared)]

    def _call_body(
        self, placeholders: Sequence[Tensor], on_inputs: Callable[[Sequence[Tensor]], None] = lambda _: None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Call the body on copies of the placeholders.

        Args:
            placeholders: Placeholders of all inputs.
            on_inputs: Callback that receives the copies before the body runs.

        Returns:
            The outputs of the body, and the copies of the placeholders.
        """
        _recorded_seeds.append([])
        try:
            _set_seed_and_record(_TRACING_SEED)
            on_inputs(body_inputs := self._constrain_placeholders(placeholders))
            carried, results = self._body(*_split_by_lengths(body_inputs, *self._counts[:2]))
        finally:
            self._body_seeds = _recorded_seeds.pop()
        for before, after in zip(body_inputs, carried, strict=False):
            assert (before.shape, before.dtype) == (after.shape, after.dtype), "the carry changes its shape"
        # Copy the outputs, because an input may also be an output.
        return [copy_without_sharding(t) for t in (*carried, *results)], body_inputs

    def _trace_with_recompute(self) -> _TracedLoops:
        """Build a forward loop that only saves its carries, and a backward loop that recomputes the body."""
        with torch.no_grad():
            outputs, body_inputs = self._call_body(placeholders := self._create_placeholders())
        forward = self._build_loop(placeholders, [*outputs, *body_inputs[: self._counts[0]]])
        placeholders = self._create_placeholders()
        # Hide the tensors that are saved here from the hooks of an enclosing loop.
        with torch.enable_grad(), saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor):
            outputs, _ = self._call_body(placeholders)
        return self._trace_backward(
            forward, outputs, placeholders, placeholders, placeholders[: self._counts[0]]
        )

    def _trace_with_saving(self) -> _TracedLoops:
        """Build a forward loop that stacks autograd's saved tensors, and a backward loop that uses them."""
        placeholders = self._create_placeholders()
        input_indices: dict[int, int] = {}
        roots: dict[int, tuple[Tensor, int]] = {}
        backward_values: list[Tensor] = []  # tensors of the backward loop with the same indices

        def note_inputs(body_inputs: Sequence[Tensor]) -> None:
            for index, tensor in enumerate(body_inputs):
                if index >= self._counts[0]:
                    input_indices[xla.tensor_id(tensor)] = index

        def pack(tensor: Tensor) -> tuple[int, Callable[[Tensor], Tensor] | None]:
            root, view = find_view_origin(tensor)
            name = xla.tensor_id(root)
            if name in input_indices:
                return input_indices[name], view
            roots.setdefault(name, (root, get_tensor_version(root)))
            return len(placeholders) + list(roots).index(name), view

        def unpack(packed: tuple[int, Callable[[Tensor], Tensor] | None]) -> Tensor:
            index, view = packed
            if view is None:
                return backward_values[index]
            return view(backward_values[index])

        with torch.enable_grad(), saved_tensors_hooks(pack, unpack):
            outputs, _ = self._call_body(placeholders, note_inputs)
        assert all(get_tensor_version(root) == version for root, version in roots.values()), (
            "a saved tensor was changed"
        )
        saved_roots = [root.detach() for root, _ in roots.values()]
        forward = self._build_loop(placeholders, [*outputs, *saved_roots])
        backward_placeholders = self._create_placeholders()
        saved = [xb.create_placeholder_tensor(tensor.shape, tensor.dtype) for tensor in saved_roots]
        with torch.no_grad():
            backward_values += [
                *self._constrain_placeholders(backward_placeholders),
                *map(copy_without_sharding, saved),
            ]
        traced = self._trace_backward(forward, outputs, placeholders, backward_placeholders, saved)
        assert not traced.backward.reads(placeholders), "a function keeps tensors without save_for_backward"
        return traced

    def _trace_backward(
        self,
        forward: _CompiledLoop,
        outputs: Sequence[Tensor],
        leaves: Sequence[Tensor],
        placeholders: Sequence[Tensor],
        saved: Sequence[Tensor],
    ) -> _TracedLoops:
        """Record the gradient of ``outputs`` with respect to ``leaves``, and build the backward loop.

        Args:
            forward: Forward loop.
            outputs: Outputs of the traced body.
            leaves: Placeholders that the outputs were computed from.
            placeholders: Placeholders for the inputs of the backward loop.
            saved: Placeholders for the saved tensors.
        """
        carries, stacks, _ = self._counts
        incoming_gradients = [xb.create_placeholder_tensor(tensor.shape, tensor.dtype) for tensor in outputs]
        trained_indices = [index for index, leaf in enumerate(leaves) if leaf.requires_grad]
        pairs = [
            (o, copy_without_sharding(g))
            for o, g in zip(outputs, incoming_gradients, strict=True)
            if o.requires_grad
        ]
        leaf_gradients = torch.autograd.grad(
            [output for output, _ in pairs],
            [leaves[index] for index in trained_indices],
            [gradient for _, gradient in pairs],
            allow_unused=True,
        )
        gradients = {
            index: g for index, g in zip(trained_indices, leaf_gradients, strict=True) if g is not None
        }
        carry_gradients = [
            gradients[index] if index in gradients else torch.zeros_like(incoming_gradients[index])
            for index in range(carries)
        ]
        stacked_gradients = {p - carries: g for p, g in gradients.items() if carries <= p < carries + stacks}
        shared_gradients = {p - carries - stacks: g for p, g in gradients.items() if p >= carries + stacks}
        sum_placeholders = [xb.create_placeholder_tensor(g.shape, g.dtype) for g in shared_gradients.values()]
        new_sums = [
            total + gradient
            for total, gradient in zip(sum_placeholders, shared_gradients.values(), strict=True)
        ]
        backward = _CompiledLoop(
            [*incoming_gradients[:carries], *sum_placeholders],
            [*incoming_gradients[carries:], *placeholders[carries : carries + stacks], *saved],
            placeholders[carries + stacks :],
            [*carry_gradients, *new_sums, *stacked_gradients.values()],
            self._iterations,
            self._body_seeds,
            reverse=True,
        )
        output_shapes = self._describe_outputs(outputs)
        return _TracedLoops(
            forward,
            backward,
            len(saved),
            output_shapes,
            list(stacked_gradients),
            list(shared_gradients),
            forward.num_seeds,
        )

    def _describe_outputs(self, outputs: Sequence[Tensor]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        carries = self._counts[0]
        return [
            (tuple(t.shape) if index < carries else (self._iterations, *t.shape), t.dtype)
            for index, t in enumerate(outputs)
        ]

    def _build_loop(self, placeholders: Sequence[Tensor], outputs: Sequence[Tensor]) -> _CompiledLoop:
        carry, slices, shared = _split_by_lengths(placeholders, *self._counts[:2])
        return _CompiledLoop(
            carry, slices, shared, outputs, self._iterations, self._body_seeds, reverse=False
        )


class _CompiledLoop:
    """XLA ``While`` loop around a traced body ``(carry, slices, shared) -> (carry, results)``.

    The constructor builds the computation, and each call runs it.

    Args:
        carry: Placeholders for the carry.
        slices: Placeholders for slices of the stacked tensors.
        shared: Placeholders for the shared tensors.
        outputs: New carry, and the results to stack, computed from the placeholders.
        iterations: Number of iterations.
        seeds: Seeds from which the body has drawn random numbers.
        reverse: Whether to iterate from the last slice to the first. The results are still in the order
            of the slices.

    Attributes:
        num_seeds: Number of seeds per iteration. 0 if the body draws no random numbers.
    """

    def __init__(
        self,
        carry: Sequence[Tensor],
        slices: Sequence[Tensor],
        shared: Sequence[Tensor],
        outputs: Sequence[Tensor],
        iterations: int,
        seeds: Sequence[Tensor],
        *,
        reverse: bool,
    ) -> None:
        self._num_carries = len(carry)
        self._lowered = lowered = lowering_context("scan")
        lowered.set_name_string("scan")
        lowered.build(list(outputs))
        # Constants that the body creates are arguments of its computation as well, and so are the seeds.
        constants = dict(lowered.device_parameter_id_tensor_mapping())
        self.num_seeds = len(seeds) if self.reads(seeds) else 0
        arguments: dict[int, tuple[str, int]] = {}
        groups = (("carry", carry), ("slices", slices), ("shared", shared), ("seeds", seeds))
        for group, tensors in groups:
            for index, tensor in enumerate(tensors):
                arguments[lowered.tensor_parameter_id(tensor)] = (group, index)
        arguments.pop(-1, None)
        constants = {place: value for place, value in constants.items() if place not in arguments}
        self._constants = list(constants.values())
        arguments |= {place: ("constants", index) for index, place in enumerate(constants)}
        self._computation = self._build_computation(
            xb.computation_from_module_proto("scan_body", lowered.hlo()),
            [arguments[place] for place in range(len(arguments))],
            {"carry": carry, "slices": slices, "shared": shared, "constants": self._constants},
            outputs[len(carry) :],
            iterations,
            reverse,
        )

    def reads(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether the body depends on any of ``tensors``."""
        return any(self._lowered.tensor_parameter_id(tensor) != -1 for tensor in tensors)

    def _build_computation(
        self,
        body: Any,
        arguments: Sequence[tuple[str, int]],
        groups: dict[str, Sequence[Tensor]],
        results: Sequence[Tensor],
        iterations: int,
        reverse: bool,
    ) -> Any:
        """Build the XLA computation of the loop from the computation of its body."""
        builder = xb.create_builder("scan")
        state: list[Any] = []

        def add_parameter(shape: Sequence[int], dtype: torch.dtype) -> None:
            parameter_shape = xb.mkshape(xb.Op.from_torch_type(dtype), tuple(shape))
            state.append(xb.mkparam(builder, len(state), parameter_shape))

        group_starts: dict[str, int] = {}
        for group in ("carry", "slices", "shared", "seeds", "constants"):
            group_starts[group] = len(state)
            for _ in range(self.num_seeds if group == "seeds" else 0):
                add_parameter((iterations,), torch.int64)
            for tensor in groups.get(group, ()):
                add_parameter(
                    (iterations, *tensor.shape) if group == "slices" else tensor.shape, tensor.dtype
                )
        first = len(state)
        for tensor in results:
            zero = xb.Op.scalar(builder, 0, dtype=xb.Op.from_torch_type(tensor.dtype))
            state.append(zero.broadcast((iterations, *tensor.shape)))
        state.append(xb.Op.scalar(builder, 0, dtype=xb.Type.S32))

        def has_more(*state: Any) -> Any:
            return state[-1] < xb.Op.scalar(state[-1].builder(), iterations, dtype=xb.Type.S32)

        def step(*state: Any) -> tuple[Any, ...]:
            new, count = list(state), state[-1]

            def make_scalar(value: int) -> Any:
                return xb.Op.scalar(count.builder(), value, dtype=xb.Type.S32)

            position = make_scalar(iterations - 1) - count if reverse else count
            call_arguments = []
            for group, index in arguments:
                value = state[group_starts[group] + index]
                call_arguments.append(
                    _build_slice_read(value, position) if group in ("slices", "seeds") else value
                )
            outputs = xb.Op.call(body, call_arguments, builder=count.builder())
            for index in range(self._num_carries):
                new[index] = outputs.get_tuple_element(index)
            for index in range(len(results)):
                value = outputs.get_tuple_element(self._num_carries + index)
                new[first + index] = _build_slice_write(state[first + index], value, position)
            new[-1] = count + make_scalar(1)
            return tuple(new)

        final_state = xb.Op.mkwhile(state, has_more, step)
        output_indices = [*range(self._num_carries), *range(first, first + len(results))]
        return xb.Op.tuple([final_state.get_tuple_element(place) for place in output_indices]).build("scan")

    def __call__(
        self,
        carry: Sequence[Tensor],
        stacked: Sequence[Tensor],
        shared: Sequence[Tensor],
        seeds: Sequence[Tensor],
    ) -> tuple[list[Tensor], list[Tensor]]:
        inputs = [*carry, *stacked, *shared, *seeds[: self.num_seeds], *self._constants]
        outputs = xla.user_computation("portable::scan", inputs, self._computation)
        return outputs[: self._num_carries], outputs[self._num_carries :]


def _set_seed_and_record(seed: int) -> None:
    """Set the seed of the random number generator.

    While a body is being traced, the seed is also added to the seeds of the innermost body. These seeds
    become inputs of the loop's body.
    """
    xla.set_rng_seed(seed, _DEVICE)
    if _recorded_seeds:
        # The seed becomes an input of graphs when a random number is drawn.
        _, inputs = xla.device_data([torch.rand((), device=_DEVICE)])
        _recorded_seeds[-1] += [tensor for tensor in inputs if tensor.dtype == torch.int64]


def _build_slice_read(stack: Any, index: Any) -> Any:
    """Build the operation that reads slice ``index`` of ``stack``."""
    sizes = list(stack.shape().sizes)
    zero = index.zeros_like()
    return stack.dynamic_slice([index, *[zero] * (len(sizes) - 1)], [1, *sizes[1:]]).reshape(sizes[1:])


def _build_slice_write(stack: Any, value: Any, index: Any) -> Any:
    """Build the operation that writes ``value`` as slice ``index`` of ``stack``."""
    zero = index.zeros_like()
    indices = [index, *[zero] * (stack.shape().rank - 1)]
    return stack.dynamic_update_slice(value.broadcast([1]), indices)


def _split_by_lengths(tensors: Sequence[Any], *lengths: int) -> tuple[tuple[Any, ...], ...]:
    """Split a sequence into parts with the given lengths, and a last part with the remaining elements."""
    parts, start = [], 0
    for length in lengths:
        parts.append(tuple(tensors[start : start + length]))
        start += length
    return (*parts, tuple(tensors[start:]))
