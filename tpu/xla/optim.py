"""Implement optimizers with formulas on lazy tensors, so that the update is part of the compiled step.

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
        counts_steps: Whether the state contains a step count.
    """

    counts_steps: bool

    def get_state_layouts(self, parameter: Tensor, spec: Spec, *, is_stacked: bool) -> StateLayouts:
        """Return the shape and spec of each state tensor. State tensors are initialized with zeros.

        Args:
            parameter: Parameter or stack of parameters.
            spec: Spec of the parameter.
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
        """Return the layouts of the two moments."""
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
        """Return the layouts of the second moments, which are factored for parameters with several dims."""
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
    """Compute the root mean square of a parameter-shaped tensor.

    Returns:
        A scalar. For stacked parameters, a tensor ``[parameters, 1, ...]``.
    """
    if not is_stacked:
        return tensor.square().mean().sqrt()
    return tensor.square().mean(dim=tuple(range(1, tensor.dim())), keepdim=True).sqrt()


class MuonUpdates(NamedTuple):
    """Orthogonalized updates and the new state, both keyed by parameter name."""

    updates: dict[str, Tensor]
    states: dict[str, State]


class XlaMuon:
    """Muon for matrices and stacks of matrices, like :class:`portable.optim.muon.Muon`.

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
        """Apply an update that :meth:`orthogonalize_updates` has computed.

        The caller passes the orthogonalized update as ``inputs.gradient``. ``inputs.state`` must already be
        the new state, and is returned unchanged.
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

        Matrices with the same shape and spec are concatenated and distributed over the devices, so that
        each device orthogonalizes a share of the complete matrices.

        Args:
            gradients: Gradients, keyed by parameter name.
            states: State tensors, keyed by parameter name.
            specs: Specs, keyed by parameter name.

        Returns:
            The updates in fp32, and the new state.
        """
        new_states: dict[str, State] = {}
        matrices_by_shape: dict[tuple[tuple[int, ...], Spec | None], dict[str, Tensor]] = {}
        for name, gradient in gradients.items():
            buffer = states[name]["momentum_buffer"].lerp(gradient, 1 - self._momentum)
            update = compute_nesterov_update(gradient, buffer, self._momentum, self._compute_dtype)
            shape = tuple(update.shape[-2:])
            *leading_dims, rows, columns = specs[name]
            # Experts may already be sharded along their first dim.
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
                # Annotate both shardings, so that one all-to-all leads back. Otherwise the compiler would
                # send four times the bytes.
                orthogonal = copy_with_sharding(
                    copy_with_sharding(orthogonal, spread_sharding), self._layout.to_op_sharding(matrix_spec)
                )
            for name, update in zip(matrices, orthogonal.split([*counts, *[1] * padding]), strict=False):
                updates[name] = update.reshape(gradients[name].shape).float()
        return MuonUpdates(updates, new_states)


def build_update_rule(settings: TrainConfig) -> UpdateRule:
    """Build the update rule for ``train.optimizer``.

    With Muon, this is the rule for parameters that are not matrices.
    """
    beta1, beta2 = settings.betas
    if settings.optimizer in ("adamw", "muon"):
        return XlaAdamW((beta1, beta2), settings.eps)
    if settings.optimizer == "adafactor":
        return XlaAdafactor(adafactor.ADAFACTOR_RULES[settings.adafactor_rule])
    return XlaSgd(beta1)


class _GroupFactors(NamedTuple):
    """Hyperparameters of a tensor, from the parameter groups of its parameters.

    Each value is a number, or a tensor ``[layers, 1, ...]`` for a stack whose layers have different
    values.
    """

    rate_share: Tensor | float
    """Learning rate of the group divided by ``train.learning_rate``."""
    weight_decay: Tensor | float


class XlaOptimizer:
    """Built-in optimizer, which applies an update rule to each parameter.

    The state of a parameter is sharded like the parameter. The step counts of all parameters are stored
    in one fp32 vector ``[parameters]``, so that the compiled step has a single argument for them
    instead of hundreds.

    Args:
        settings: Section ``train`` of the config.
        model: Model on the meta device. Its parameter names and shapes determine the parameter groups.
        layout: Placement of tensors on the devices.
        device_parameters: Parameters to update.
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

        Args:
            name: Name of the tensor.
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

        Args:
            gradients: Gradients, keyed by parameter name.
            learning_rate: Learning rate, as an fp32 scalar on the device.
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
        """Return the state tensors, keyed by the name of the parameter or stack and then by state name.

        Step counts are not included.
        """
        return self._state

    def initialize_state(self) -> None:
        """Initialize the weight averages of ``train.ema``. Call this method after loading the weights."""
        for name, state in self._state.items():
            if AVERAGE_KEY in state:
                state[AVERAGE_KEY].copy_(self._parameters[name].detach())

    def read_state_scalars(self) -> dict[str, dict[str, Tensor]]:
        """Read the step count of each parameter whose rule counts steps.

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

        Args:
            learning_rate: Learning rate of the last step.
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

        Parameters without state in the checkpoint keep their initial state.

        Args:
            stored: Stored state, keyed by parameter name and then by state name.
            stored_groups: Optimizer state with parameter groups. Ignored, because only custom optimizers
                have state in their groups.
        """
        steps = torch.zeros(len(self._names))
        for index, name in enumerate(self._names):
            sources: dict[str, dict[str, StoredTensor]] = {}
            for parameter_name in self._device_parameters.get_parameter_names(name):
                values = dict(stored.get(parameter_name, {}))
                step = values.pop("step", 0.0)
                steps[index] = float(step.read()) if isinstance(step, StoredTensor) else float(step)
                if not values and parameter_name not in stored:
                    continue
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

    The parameters in the groups are replaced with their names.
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
