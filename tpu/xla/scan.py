"""Loop over the leading dim of tensors in one compiled XLA ``While``, with support for gradients.

torch_xla's scan cannot be used here. Its backward pass imports JAX under SPMD. It also stacks
values that AOTAutograd derives from the weights, which takes additional memory. This module instead
lets autograd record the loop body once, on placeholders. The tensors that autograd saves are
stacked over the iterations. Tensors that share a storage are stacked only once. Saved views and
saved loop inputs are not stacked, but taken from existing tensors. A second loop computes the
gradient in reverse order.
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
"""Seed that is set while a body is recorded. It is neither 0 nor 1, because these would become
constants in the graph.

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
    """Numbers of carry, stacked, and shared inputs of a loop."""

    carry: int
    stacked: int
    shared: int


class Scan:
    """Loop over slices of stacked tensors, like ``jax.lax.scan``.

    The body function is traced separately for each combination of input shapes, input dtypes,
    inputs that require gradients, and the argument ``key`` of the call. Calls with and without
    gradients are also traced separately.

    Args:
        body: Function for one iteration. Its arguments are the carry (the tensors that each
            iteration passes to the next one), one slice of each stacked tensor, and the shared
            tensors. It returns the new carry, with the same shapes and dtypes, and results to
            stack. If it depends on other values that change between calls, the argument ``key``
            must change with these values. It may draw random numbers, which differ between
            iterations. If ``recompute`` is False, its autograd functions must save tensors with
            ``save_for_backward``.
        recompute: Whether to save only the carry of each iteration and recompute the body in the
            backward pass. The recomputation draws the same random numbers.
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
            stacked: One or more tensors ``[iterations, ...]``. Each iteration receives one slice of
                each tensor.
            shared: Tensors that are passed unchanged to every iteration.
            shardings: Shardings for the slices of ``stacked``, in the same order. If empty, no
                slice is annotated. Only the call that traces the body reads the shardings, so later
                calls must pass the same values.
            key: Other values that the body function depends on, such as its training mode. The
                function is traced again for each new key.

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
    """Autograd function that runs the forward loop and, in its backward pass, the backward loop.

    :class:`_TracedLoops` contains both compiled loops.
    """

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
    """Compiled forward and backward loops of a :class:`Scan`.

    Each combination of input shapes, dtypes, required gradients and ``key`` has its own loops. Both
    loops also take the stacked seeds of the body's random numbers.

    Attributes:
        forward: Loop that takes the initial carry, the stacked tensors and the shared tensors. It
            returns the final carry, the stacked results, and the tensors that are saved for the
            backward loop.
        backward: Loop that computes gradients. Its carry consists of the carry gradient and the
            accumulated gradients of the shared tensors. Its stacked inputs are the gradients of the
            results, the stacked tensors and the saved tensors. Its stacked results are the
            gradients of the stacked tensors. None if gradients are disabled, or if no input
            requires a gradient.
        num_saved: Number of tensors that are saved for the backward loop.
        output_types: Shape and dtype of each tensor in the final carry, and of each stacked result.
        trained_stacked_indices: Indices of the stacked tensors for which the backward loop computes
            gradients. A tensor that the body does not use is not included.
        trained_shared_indices: Indices of the shared tensors for which the backward loop computes
            gradients.
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
    """Tracer that calls a loop body on placeholders, and builds loops from the recorded operations.

    It builds the forward loop and, if a gradient is needed, the backward loop.

    Args:
        body: Body of the loop, as in :class:`Scan`.
        counts: Number of tensors of each kind in ``inputs``: carry, stacked and shared.
        inputs: Inputs of the loop, which determine the shapes and dtypes of the placeholders.
        shardings: Pair of shardings for each stacked input. The first applies to a slice of the
            input, and the second to the gradient of the slice. An input has None instead of a pair
            if it is not annotated.
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
        """Trace the loop body, and build the forward loop and, if needed, the backward loop.

        Args:
            needs_gradient: Whether to build the backward loop.
            recompute: Whether the backward loop recomputes the body. If not, the forward loop saves
                the tensors that the backward loop needs.
        """
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

        The loop body is called on copies, because an annotation would replace the placeholder with
        a tensor that is not an input of the computation.
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
        """Call the loop body on copies of the placeholders.

        The random seeds that the body uses are stored in ``_body_seeds``. Loops that are built
        before the next call of this method read this attribute.

        Args:
            placeholders: Placeholders of all inputs.
            on_inputs: Callback that receives the copies before the body runs.

        Returns:
            Copies of the body's outputs (the new carry and the results), and the copies of the
            placeholders.
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
        """Build a forward loop that saves only carries, and a backward loop that recomputes the rest.

        The forward loop saves the carry at the start of each iteration. From this carry, the
        backward loop computes the loop body of the iteration again.
        """
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
        """Build a forward loop that saves tensors, and a backward loop that reads them.

        Autograd determines which tensors are needed. The tensors that an iteration saves are
        stacked along a new leading dim, with one slice per iteration. There are two exceptions:
        stacked and shared inputs are passed to the backward loop again, and views are recreated
        from their base tensors.
        """
        placeholders = self._create_placeholders()
        input_indices: dict[int, int] = {}
        roots: dict[int, tuple[Tensor, int]] = {}
        backward_values: list[Tensor] = []  # values for the indices that `pack` returns

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
        """Trace the gradient of the loop body, and build the backward loop from it.

        Computes the gradient of ``outputs`` with respect to ``leaves``. The backward loop passes
        the gradients of the carry from each iteration to the next, sums the gradients of shared
        inputs over the iterations, and stacks the gradients of stacked inputs.

        Args:
            forward: Forward loop.
            outputs: Outputs of the traced loop body.
            leaves: Placeholders for the inputs of the traced loop body. Gradients are computed for
                the placeholders that require them.
            placeholders: Placeholders for the loop body's inputs in the backward loop, in the order
                of ``leaves``. They may be the same tensors as ``leaves``.
            saved: Placeholders for the tensors that the forward loop saves for the backward loop.
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
        # The arguments of the computation also include constants that the body creates, and the seeds.
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
        """Return whether the loop's body depends on any of ``tensors``.

        The loop's body is the traced computation of one iteration.

        Args:
            tensors: Inputs of a traced body, such as placeholders or random seeds.
        """
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
        """Build the XLA computation of the loop from the computation of its body.

        The loop has five groups of inputs, in this order:

        - ``carry``: Initial values of the tensors that each iteration passes to the next one.
        - ``slices``: Stacked tensors, with one slice per iteration.
        - ``shared``: Tensors that are the same in all iterations.
        - ``seeds``: Tensors of random seeds, with one seed per iteration.
        - ``constants``: Constants that the body creates.

        Args:
            body: XLA computation of one iteration.
            arguments: Input group and index in this group, for each argument of the body.
            groups: Tensors that one iteration receives, keyed by input group, without ``seeds``.
                They determine the shapes and dtypes of the loop's inputs.
            results: Results of the body other than the carry. The loop stacks the results of all
                iterations.
            iterations: Number of iterations.
            reverse: Whether to iterate from the last slice to the first.

        Returns:
            The computation. Its outputs are the final carry and the stacked results.
        """
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
    """Set the seed of the device's random number generator.

    If the body of a loop is being traced, the seed is also recorded, so that it becomes an input of
    the body. If loops are nested, the seed becomes an input of only the innermost of these bodies.
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
