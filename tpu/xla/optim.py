"""Optimizers that compute their updates on lazy tensors, as part of the compiled training step.

Names, hyperparameters and state match torch's classes, so that runs can move between backends.
torch's code would cause a transfer or a compilation in each step, because it reads step counts on
the host or treats learning rates as constants in the graph.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from portable.converters import Tensor as StoredTensor
from portable.model.parameter_groups import assign_parameter_groups
from portable.optim import adafactor
from portable.optim.muon import compute_learning_rate_factor, compute_nesterov_update, orthogonalize_matrices
from portable.optim.optimizers import build_muon, build_parameter_groups, compute_group_learning_rate
from portable.optim.stored_state import check_state_entry
from portable.optim.weight_average import AVERAGE_KEY
from portable.tpu.xla.layout import Spec, copy_with_sharding

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from portable.config.sections import TrainConfig
    from portable.converters.checkpoint import OptimizerState
    from portable.optim.optimizers import OptimizerGroup
    from portable.tpu.xla.layout import MeshLayout
    from portable.tpu.xla.parameters import DeviceParameters

State = dict[str, torch.Tensor]
StateLayouts = dict[str, tuple[tuple[int, ...], Spec]]
"""Shape and spec of each state tensor of a parameter."""


@dataclass(frozen=True)
class UpdateInputs:
    """Inputs for updating a parameter, in fp32.

    Attributes:
        parameter: Values of the parameter.
        gradient: Gradient with the shape of the parameter.
        state: State tensors, keyed by the names from :meth:`UpdateRule.get_state_layouts`.
        step: Step count, starting at 1, as a scalar on the device.
        learning_rate: Learning rate, as a scalar on the device. If ``is_stacked`` is set, it may be a
            tensor ``[parameters, 1, ...]``.
        weight_decay: Weight decay, as a number or a tensor ``[parameters, 1, ...]``.
        is_stacked: Whether the first dim stacks several parameters with the same shape, which are
            updated independently.
    """

    parameter: Tensor
    gradient: Tensor
    state: State
    step: Tensor
    learning_rate: Tensor
    weight_decay: Tensor | float
    is_stacked: bool


class UpdateResult(NamedTuple):
    """New parameter and state after an update, in fp32."""

    parameter: Tensor
    state: State


class UpdateRule(Protocol):
    """Protocol for optimizer formulas, which update one parameter or a stack of parameters.

    Attributes:
        counts_steps: Whether a checkpoint contains a step count for each parameter with this rule.
            During a run, :class:`XlaOptimizer` counts the steps of all parameters, and stores the
            counts separately from the state tensors.
    """

    counts_steps: bool

    def get_state_layouts(self, parameter: Tensor, spec: Spec, *, is_stacked: bool) -> StateLayouts:
        """Return the shape and the sharding of each state tensor. State tensors begin as zeros.

        Args:
            parameter: One parameter, or a stack of the same parameter of several layers.
            spec: Sharding of ``parameter``: for each dim, the mesh axes that it is sharded over.
            is_stacked: Whether the first dim stacks several parameters.
        """

    def compute_update(self, inputs: UpdateInputs) -> UpdateResult:
        """Compute the new parameter and the new state tensors. The inputs are not modified."""


class XlaAdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019), like ``torch.optim.AdamW``.

    Args:
        betas: Decay rates of the two moments.
        eps: Term added to the denominator.
    """

    counts_steps = True

    def __init__(self, betas: tuple[float, float], eps: float) -> None:
        self._betas, self._eps = betas, eps

    def get_state_layouts(self, parameter: Tensor, spec: Spec, *, is_stacked: bool) -> StateLayouts:
        """Return the shapes and specs of the two moments, ``exp_avg`` and ``exp_avg_sq``.

        Both moments have the shape and spec of the parameter, whether it is stacked or not.
        """
        return {name: (tuple(parameter.shape), spec) for name in ("exp_avg", "exp_avg_sq")}

    def compute_update(self, inputs: UpdateInputs) -> UpdateResult:
        """Compute the new parameter and moments."""
        (beta1, beta2), gradient = self._betas, inputs.gradient
        first = inputs.state["exp_avg"].lerp(gradient, 1 - beta1)
        second = inputs.state["exp_avg_sq"] * beta2 + gradient * gradient * (1 - beta2)
        root = (second / _compute_bias_correction(beta2, inputs.step)).sqrt() + self._eps
        decayed = inputs.parameter * (1 - inputs.learning_rate * inputs.weight_decay)
        new_parameter = decayed - inputs.learning_rate / _compute_bias_correction(beta1, inputs.step) * (
            first / root
        )
        return UpdateResult(new_parameter, {"exp_avg": first, "exp_avg_sq": second})


def _compute_bias_correction(beta: float, step: Tensor) -> Tensor:
    """Compute ``1 - beta ** step`` without cancellation.

    With beta 0.999, cancellation would cost four digits in fp32.
    """
    return -torch.expm1(step * math.log(beta)) if beta else torch.ones_like(step)


class XlaSgd:
    """SGD with momentum, like ``torch.optim.SGD``. The weight decay is added to the gradient.

    Args:
        momentum: Momentum factor. 0 for plain SGD.
    """

    counts_steps = False

    def __init__(self, momentum: float) -> None:
        self._momentum = momentum

    def get_state_layouts(self, parameter: Tensor, spec: Spec, *, is_stacked: bool) -> StateLayouts:
        """Return the layout of the momentum buffer. Empty if the momentum is 0."""
        return {"momentum_buffer": (tuple(parameter.shape), spec)} if self._momentum else {}

    def compute_update(self, inputs: UpdateInputs) -> UpdateResult:
        """Compute the new parameter and momentum buffer."""
        gradient = inputs.gradient + inputs.parameter * inputs.weight_decay
        if not self._momentum:
            return UpdateResult(inputs.parameter - inputs.learning_rate * gradient, {})
        buffer = inputs.state["momentum_buffer"] * self._momentum + gradient
        return UpdateResult(inputs.parameter - inputs.learning_rate * buffer, {"momentum_buffer": buffer})


class XlaAdafactor:
    """Adafactor with the formulas of :class:`portable.optim.adafactor.AdafactorRule`.

    Under SPMD, a sharded tensor is one logical tensor, so means over it are exact on any number of
    devices.

    Args:
        rule: Variant of Adafactor.
    """

    counts_steps = True

    def __init__(self, rule: adafactor.AdafactorRule) -> None:
        self._rule = rule

    def get_state_layouts(self, parameter: Tensor, spec: Spec, *, is_stacked: bool) -> StateLayouts:
        """Return the shapes and specs of a parameter's second moments.

        If the parameter has two or more dims, its second moments are factored into ``row_var`` with
        shape ``[..., rows, 1]`` and ``col_var`` with shape ``[..., 1, columns]``. Otherwise, they
        are one tensor ``variance`` with the shape of the parameter. If ``is_stacked`` is set, the
        first dim enumerates the parameters of a stack. It is not included in the number of dims,
        but in all shapes. The moments are sharded like the parameter, except that dims of size 1
        that replace rows or columns are not sharded.
        """
        shapes = adafactor.get_moment_shapes(parameter.shape, is_stacked)
        specs = {"variance": spec, "row_var": (*spec[:-1], None), "col_var": (*spec[:-2], None, *spec[-1:])}
        return {name: (shape, specs[name]) for name, shape in shapes.items()}

    def compute_update(self, inputs: UpdateInputs) -> UpdateResult:
        """Compute the new parameter and second moments."""
        rule, parameter, gradient, state = self._rule, inputs.parameter, inputs.gradient, inputs.state
        fresh, rate = (
            rule.compute_new_gradient_share(inputs.step),
            rule.limit_learning_rate(inputs.learning_rate, inputs.step),
        )
        if rule.scales_learning_rate:
            rate = rule.scale_learning_rate(rate, _compute_rms(parameter, inputs.is_stacked))
        squares = rule.square_gradient(gradient)
        if parameter.dim() - inputs.is_stacked < 2:
            new = {"variance": state["variance"].lerp(squares, fresh)}
            variance = new["variance"].clone()
        else:
            rows = state["row_var"].lerp(squares.mean(dim=-1, keepdim=True), fresh)
            columns = state["col_var"].lerp(squares.mean(dim=-2, keepdim=True), fresh)
            new = {"row_var": rows, "col_var": columns}
            variance = rule.estimate_second_moments(rows, columns, rows.mean(dim=-2, keepdim=True))
        change = gradient * rule.replace_by_inverse_root(variance)
        clipped = change / adafactor.compute_update_divisor(_compute_rms(change, inputs.is_stacked))
        return UpdateResult(
            parameter * (1 - inputs.learning_rate * inputs.weight_decay) - rate * clipped, new
        )


def _compute_rms(tensor: Tensor, is_stacked: bool) -> Tensor:
    """Compute the root mean square of a tensor that has the shape of a parameter.

    Args:
        tensor: Tensor with the shape of one parameter, or of several parameters that are stacked
            along the first dim.
        is_stacked: Whether ``tensor`` belongs to stacked parameters. The root mean square is then
            computed for each of them.

    Returns:
        A scalar. For stacked parameters, a tensor ``[parameters, 1, ...]``.
    """
    if not is_stacked:
        return tensor.square().mean().sqrt()
    if tensor.dim() == 1:  # a stack of scalars, whose mean without dims would be over all of them
        return tensor.abs()
    return tensor.square().mean(dim=tuple(range(1, tensor.dim())), keepdim=True).sqrt()


class MuonUpdates(NamedTuple):
    """Orthogonalized updates and the new state, both keyed by parameter name."""

    updates: dict[str, Tensor]
    states: dict[str, State]


class XlaMuon:
    """Muon for matrices and stacks of matrices, like :class:`portable.optim.muon.Muon`.

    An update has two parts. First, call :meth:`orthogonalize_updates` once per step with the
    gradients of all matrices. Then call :meth:`compute_update` for each parameter.

    Args:
        settings: Section ``train`` of the config.
        layout: Placement of tensors on the devices.
        compute_dtype: Dtype of the matrix products.
    """

    counts_steps = False

    def __init__(self, settings: TrainConfig, layout: MeshLayout, compute_dtype: torch.dtype) -> None:
        self._momentum, self._rate_rule = settings.muon_momentum, settings.muon_rate
        self._layout, self._compute_dtype = layout, compute_dtype

    def get_state_layouts(self, parameter: Tensor, spec: Spec, *, is_stacked: bool) -> StateLayouts:
        """Return the layout of the momentum buffer."""
        return {"momentum_buffer": (tuple(parameter.shape), spec)}

    def compute_update(self, inputs: UpdateInputs) -> UpdateResult:
        """Compute the new parameter from an update that :meth:`orthogonalize_updates` has computed.

        The caller passes the orthogonalized update as ``inputs.gradient``, and the state after this
        update as ``inputs.state``. The state is returned unchanged.
        """
        adjusted = inputs.learning_rate * compute_learning_rate_factor(
            self._rate_rule, inputs.parameter.shape
        )
        decayed = inputs.parameter * (1 - inputs.learning_rate * inputs.weight_decay)
        return UpdateResult(decayed - adjusted * inputs.gradient, inputs.state)

    def orthogonalize_updates(
        self, gradients: Mapping[str, Tensor], states: Mapping[str, State], specs: Mapping[str, Spec]
    ) -> MuonUpdates:
        """Compute the orthogonalized updates and the new momentum buffers.

        Matrices with the same shape and sharding are concatenated and distributed over the devices
        of a shard group, so that each device orthogonalizes a share of the complete matrices. If a
        parameter has more than two dims, the last two dims are the dims of its matrices.

        Args:
            gradients: Gradients in fp32, keyed by parameter name.
            states: State tensors, keyed by parameter name. They are not modified.
            specs: Sharding of each parameter, keyed by parameter name. A spec contains, for each
                dim, the mesh axes over which it is sharded, or None.

        Returns:
            The updates in fp32, with the shapes of the gradients, and the new state. Both contain
            only the parameters in ``gradients``.
        """
        new_states: dict[str, State] = {}
        matrices_by_shape: dict[tuple[tuple[int, ...], Spec | None], dict[str, Tensor]] = {}
        for name, gradient in gradients.items():
            buffer = states[name]["momentum_buffer"].lerp(gradient, 1 - self._momentum)
            update = compute_nesterov_update(gradient, buffer, self._momentum, self._compute_dtype)
            shape = tuple(update.shape[-2:])
            *leading_dims, rows, columns = specs[name]
            # Do not annotate experts that are sharded along their first dim, because one device already has
            # each complete matrix.
            matrix_spec: Spec | None = None if any(leading_dims) else (None, rows, columns)
            matrices_by_shape.setdefault((shape, matrix_spec), {})[name] = update.reshape(-1, *shape)
            new_states[name] = {"momentum_buffer": buffer}
        updates: dict[str, Tensor] = {}
        spread_sharding = self._layout.to_op_sharding((self._layout.shard_axes, None, None))
        for (_, matrix_spec), matrices in matrices_by_shape.items():
            counts = [len(update) for update in matrices.values()]
            padding = -sum(counts) % self._layout.shard_group_size
            parts = [*matrices.values(), *[torch.zeros_like(next(iter(matrices.values()))[:1])] * padding]
            stacked_matrices = torch.cat(parts)
            if matrix_spec is not None:
                stacked_matrices = copy_with_sharding(
                    stacked_matrices, self._layout.to_op_sharding(matrix_spec)
                )
            orthogonal = orthogonalize_matrices(
                copy_with_sharding(stacked_matrices, spread_sharding), self._compute_dtype
            )
            if matrix_spec is not None:
                # Annotate both shardings, so that one all-to-all restores the original sharding. Otherwise,
                # the compiler would send four times the bytes.
                orthogonal = copy_with_sharding(
                    copy_with_sharding(orthogonal, spread_sharding), self._layout.to_op_sharding(matrix_spec)
                )
            for name, update in zip(matrices, orthogonal.split([*counts, *[1] * padding]), strict=False):
                updates[name] = update.reshape(gradients[name].shape).float()
        return MuonUpdates(updates, new_states)


def build_update_rule(settings: TrainConfig) -> UpdateRule:
    """Build the update rule for the built-in optimizer ``train.optimizer``.

    With Muon, this is AdamW, for the parameters that Muon does not update.
    """
    beta1, beta2 = settings.betas
    if settings.optimizer in ("adamw", "muon"):
        return XlaAdamW((beta1, beta2), settings.eps)
    if settings.optimizer == "adafactor":
        return XlaAdafactor(adafactor.ADAFACTOR_RULES[settings.adafactor_rule])
    return XlaSgd(beta1)


class _GroupFactors(NamedTuple):
    """Optimizer hyperparameters of a parameter or a stack.

    A stack is one tensor that holds the same parameter of several layers. The values come from the
    parameter groups. Both values are numbers if all layers of the tensor have the same
    hyperparameters. If the layers differ in at least one of them, both values are tensors
    ``[layers, 1, ...]``.
    """

    rate_share: Tensor | float
    """Learning rate of the group divided by ``train.learning_rate``."""
    weight_decay: Tensor | float


class XlaOptimizer:
    """Built-in optimizer, which applies an update rule to each trained parameter.

    The state of a parameter is sharded like the parameter. Dims of size 1 in the factored moments
    of Adafactor are an exception: they are not sharded. If ``train.ema`` is set, the state also
    contains the average of the weights, under the name ``ema``. The step counts of all parameters
    are stored in one fp32 vector ``[parameters]``, so that the compiled step has a single argument
    for all step counts instead of hundreds of arguments.

    Args:
        settings: Section ``train`` of the config.
        model: Model whose parameter names and shapes determine the parameter groups. Its stacked
            parameters are on the meta device.
        layout: Placement of tensors on the devices.
        device_parameters: Parameters to update, and frozen parameters, which are ignored.
        compute: Dtype of Muon's matrix products.
    """

    def __init__(
        self,
        settings: TrainConfig,
        model: nn.Module,
        layout: MeshLayout,
        device_parameters: DeviceParameters,
        compute: torch.dtype,
    ) -> None:
        trained = {name: p for name, p in device_parameters.by_name.items() if p.requires_grad}
        self._names = list(trained)
        self._parameters = trained
        self._layout = layout
        self._device_parameters = device_parameters
        trained_in_model = {name: p for name, p in model.named_parameters() if p.requires_grad}
        named_groups = assign_parameter_groups(model, settings)
        self._groups = _build_torch_groups(settings, trained_in_model, named_groups)
        rule, self._muon = build_update_rule(settings), XlaMuon(settings, layout, compute)
        self._update_rules: dict[str, UpdateRule] = {
            name: self._muon if named_groups[name].uses_muon else rule for name in trained
        }
        self._settings, self._ema_decay = settings, settings.ema
        self._group_factors = {name: self._compute_group_factors(name, named_groups) for name in trained}
        self._step_counts = layout.replicate(torch.zeros(len(trained)))
        self._state: dict[str, State] = {}
        self._state_layouts: dict[str, StateLayouts] = {}
        for name, parameter in trained.items():
            spec = device_parameters.get_tensor_spec(name, parameter.shape)
            state_layouts = self._update_rules[name].get_state_layouts(
                parameter, spec, is_stacked=name in device_parameters.stacks
            )
            if settings.ema is not None:
                state_layouts[AVERAGE_KEY] = (tuple(parameter.shape), spec)
            self._state_layouts[name] = state_layouts
            self._state[name] = {
                key: layout.create_zeros(shape, torch.float32, state_spec)
                for key, (shape, state_spec) in state_layouts.items()
            }

    def _compute_group_factors(self, name: str, groups: Mapping[str, OptimizerGroup]) -> _GroupFactors:
        """Compute the learning rate factor and the weight decay for a parameter or a stack.

        A stack is one tensor that holds the same parameter of several layers. If the learning rate
        or the weight decay differs between these layers, both results are tensors with one entry
        per layer. Otherwise, both are numbers.

        Args:
            name: Name of the parameter or stack.
            groups: Parameter group of each parameter, keyed by parameter name.
        """
        member_groups = [groups[member] for member in self._device_parameters.get_parameter_names(name)]
        highest = self._settings.learning_rate
        pairs = [(group.learning_rate / highest, group.weight_decay) for group in member_groups]
        if len(set(pairs)) == 1:
            return _GroupFactors(*pairs[0])
        shape = (len(member_groups), *[1] * (self._parameters[name].dim() - 1))
        share, decay = (
            self._layout.replicate(torch.tensor(values).view(shape)) for values in zip(*pairs, strict=True)
        )
        return _GroupFactors(share, decay)

    def step(self, gradients: Mapping[str, Tensor], learning_rate: Tensor, is_allowed: Tensor) -> None:
        """Trace the update of every parameter that has a gradient.

        When the graph is executed, parameters, state and step counts are updated in place. If
        ``is_allowed`` is False, all of them keep their values. Parameters without a gradient are
        not updated, and their steps are not counted.

        Args:
            gradients: Gradients, keyed by parameter name.
            learning_rate: Learning rate of the run at this step, as an fp32 scalar on the device.
                It is scaled for parameter groups with a different learning rate.
            is_allowed: Whether to apply the update, as a bool scalar on the device.
        """
        with torch.no_grad():
            new_step_counts = self._step_counts + 1
            if len(gradients) < len(self._names):
                reached = torch.tensor([float(name in gradients) for name in self._names])
                new_step_counts = self._step_counts + self._layout.replicate(reached)
            muon_gradients = {
                n: g.float() for n, g in gradients.items() if self._update_rules[n] is self._muon
            }
            specs = {
                name: self._device_parameters.get_tensor_spec(name, gradient.shape)
                for name, gradient in muon_gradients.items()
            }
            updates, states = self._muon.orthogonalize_updates(muon_gradients, self._state, specs)
            for index, name in enumerate(self._names):
                if name not in gradients:
                    continue
                parameter, state = self._parameters[name], self._state[name]
                share, decay = self._group_factors[name]
                inputs = UpdateInputs(
                    parameter,
                    updates.get(name, gradients[name]).float(),
                    states.get(name, state),
                    new_step_counts[index],
                    learning_rate * share if isinstance(share, torch.Tensor) or share != 1 else learning_rate,
                    decay,
                    is_stacked=name in self._device_parameters.stacks,
                )
                new_parameter, new = self._update_rules[name].compute_update(inputs)
                if self._ema_decay is not None:
                    new = {**new, AVERAGE_KEY: state[AVERAGE_KEY].lerp(new_parameter, 1 - self._ema_decay)}
                parameter.copy_(torch.where(is_allowed, new_parameter, parameter))
                for key, value in new.items():
                    state[key].copy_(torch.where(is_allowed, value, state[key]))
            self._step_counts.copy_(torch.where(is_allowed, new_step_counts, self._step_counts))

    def get_state_tensors(self) -> dict[str, State]:
        """Return the optimizer's state tensors, including weight averages but not step counts.

        Returns:
            The tensors, keyed by parameter name and then by state name. They are not copies. If the
            same parameter of several layers is stacked in one tensor, for example all norm weights,
            the state of the stack is keyed by the name of the first of these parameters.
        """
        return self._state

    def initialize_state(self) -> None:
        """Initialize the weight averages of ``train.ema``. Call this method after loading the weights."""
        for name, state in self._state.items():
            if AVERAGE_KEY in state:
                state[AVERAGE_KEY].copy_(self._parameters[name].detach())

    def read_state_scalars(self) -> dict[str, dict[str, Tensor]]:
        """Read the step counts of the parameters.

        Only some optimizer algorithms count steps. AdamW and Adafactor do, for example, but SGD and
        Muon do not. Parameters without a step count are omitted.

        Returns:
            For each parameter name, a dict that maps ``step`` to an fp32 scalar on the CPU.
        """
        if not any(rule.counts_steps for rule in self._update_rules.values()):
            return {}
        counts = self._layout.copy_replicated_to_cpu(self._step_counts)
        return {
            parameter_name: {"step": counts[index].clone()}
            for index, name in enumerate(self._names)
            if self._update_rules[name].counts_steps
            for parameter_name in self._device_parameters.get_parameter_names(name)
        }

    def build_param_groups(self, learning_rate: float) -> list[dict[str, Any]]:
        """Build parameter groups with their hyperparameters, in the format of torch optimizers.

        The groups contain parameter names instead of parameters.

        Args:
            learning_rate: Learning rate of the run at the last step. ``lr`` of each group is
                computed from it.
        """
        return [
            {**group, "lr": compute_group_learning_rate(group, learning_rate, self._settings)}
            for group in self._groups
        ]

    def load_state(
        self,
        stored: Mapping[str, Mapping[str, StoredTensor | float | bool]],
        stored_groups: OptimizerState | None,
    ) -> None:
        """Restore the optimizer state from a checkpoint.

        Parameters without state in the checkpoint keep their initial state. If only the weight
        average of a parameter is missing, its current value is kept. All layers of a stack share
        one step count, which is read from the last layer with state.

        Args:
            stored: Stored state, keyed by parameter name and then by state name.
            stored_groups: Optimizer state with parameter groups. Ignored, because only custom
                optimizers have state in their groups.

        Raises:
            CheckpointError: If the state of a parameter in ``stored`` is incomplete, or if a tensor
                has the wrong shape.
        """
        steps = torch.zeros(len(self._names))
        for index, name in enumerate(self._names):
            sources: dict[str, dict[str, StoredTensor]] = {}
            for parameter_name in self._device_parameters.get_parameter_names(name):
                if parameter_name not in stored:
                    continue
                values = stored[parameter_name]
                if self._update_rules[name].counts_steps:
                    step = values.get("step")
                    check_state_entry(step, (), f"step of {parameter_name}")
                    assert step is not None
                    steps[index] = float(step.read()) if isinstance(step, StoredTensor) else float(step)
                for key, tensor in self._state[name].items():
                    value = values.get(key)
                    if value is None and key == AVERAGE_KEY:
                        continue  # without a stored value, the average begins at the weights
                    shape = tuple(tensor.shape)[name in self._device_parameters.stacks :]
                    source = value if isinstance(value, StoredTensor) else None
                    check_state_entry(source, shape, f"{key} of {parameter_name}")
                    assert source is not None
                    sources.setdefault(key, {})[parameter_name] = source
            for key, parts in sources.items():
                self._device_parameters.fill_tensor(
                    name, self._state[name][key], self._state_layouts[name][key][1], parts
                )
        self._step_counts = self._layout.replicate(steps)


def _build_torch_groups(
    settings: TrainConfig, trained: Mapping[str, nn.Parameter], named_groups: Mapping[str, OptimizerGroup]
) -> list[dict[str, Any]]:
    """Build the ``param_groups`` of the corresponding torch optimizer, for checkpoints in torch's format.

    The groups contain parameter names instead of parameters.
    """
    names = {id(parameter): name for name, parameter in trained.items()}
    groups = build_parameter_groups(trained, named_groups, settings.learning_rate)
    beta1, beta2 = settings.betas
    rate = settings.learning_rate
    optimizer: torch.optim.Optimizer
    if settings.optimizer == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=rate, betas=(beta1, beta2), eps=settings.eps)
    elif settings.optimizer == "muon":
        optimizer = build_muon(settings, groups, torch.float32)
    elif settings.optimizer == "adafactor":
        optimizer = torch.optim.Adafactor(groups, lr=rate)
    else:
        optimizer = torch.optim.SGD(groups, lr=rate, momentum=beta1)
    return [{**g, "params": [names[id(p)] for p in g["params"]]} for g in optimizer.param_groups]
