"""Run a custom optimizer as part of the compiled step."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from portable.converters import Tensor as StoredTensor
from portable.errors import require
from portable.model.parameter_groups import assign_parameter_groups
from portable.optim.custom_optimizer import CustomOptimizer
from portable.optim.optimizers import build_parameter_groups, compute_group_learning_rate
from portable.optim.stored_state import (
    cast_number,
    check_state_entry,
    restore_custom_group_values,
    to_plain_group,
)
from portable.optim.weight_average import AVERAGE_KEY, install_weight_average
from portable.plugins import is_plugin_name
from portable.tpu.xla.layout import copy_with_sharding
from portable.tpu.xla.optim import XlaOptimizer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from portable.config.sections import TrainConfig
    from portable.converters.checkpoint import OptimizerState
    from portable.tpu.xla.layout import MeshLayout, Spec
    from portable.tpu.xla.parameters import DeviceParameters


class XlaCustomOptimizer:
    """Custom optimizer with the interface of :class:`portable.tpu.xla.optim.XlaOptimizer`.

    The optimizer updates logical tensors, which the compiler partitions over the devices. State tensors
    with the shape of their parameter are sharded like the parameter. Other state is replicated. torch
    optimizers are created with ``capturable=True``, which keeps their step counts on the device.

    Args:
        settings: Section ``train`` of the config.
        model: Model on the meta device. Its parameter names determine the parameter groups.
        layout: Placement of tensors on the devices.
        device_parameters: Parameters to update.

    Raises:
        UserError: If the optimizer cannot be created, or if layers in a loop are in different parameter
            groups.
    """

    def __init__(
        self, settings: TrainConfig, model: nn.Module, layout: MeshLayout, device_parameters: DeviceParameters
    ) -> None:
        self._layout, self._device_parameters, self._settings = layout, device_parameters, settings
        self._parameters = {name: p for name, p in device_parameters.by_name.items() if p.requires_grad}
        named_groups = assign_parameter_groups(model, settings)
        for first in self._parameters:
            require(
                len(
                    {
                        named_groups[parameter_name]
                        for parameter_name in device_parameters.get_parameter_names(first)
                    }
                )
                == 1,
                f"train.parameter_groups: {first} and the same parameter of another layer are in different "
                "groups, but xla.scan_layers runs these layers in one loop; set xla.scan_layers to false",
            )
        groups = build_parameter_groups(self._parameters, named_groups, settings.learning_rate)
        self._optimizer = CustomOptimizer(settings, self._parameters, groups, capturable=True)
        if settings.ema is not None:
            install_weight_average(self._optimizer, settings.ema)
        self._key = self._optimizer.key
        self._host_state: dict[str, dict[str, Any]] = {}

    @property
    def _state_by_name(self) -> dict[str, dict[str, Any]]:
        """State of each parameter with optimizer state, keyed by parameter name."""
        state = self._optimizer.state
        return {name: state[p] for name, p in self._parameters.items() if p in state}

    def initialize_state(self) -> None:
        """Create the initial optimizer state on the devices, and wait until it is created.

        A trial step on copies of the parameters makes the optimizer create its state. The
        parameters are not changed. Call this method after loading the weights, because the averages
        of ``train.ema`` begin with the current weights. Call it before :meth:`step` and
        :meth:`load_state`.

        Raises:
            UserError: If the optimizer fails in the trial step, or if a checkpoint cannot contain
                its state.
        """
        state, initial_states = self._optimizer.state, {}
        for name, parameter in self._parameters.items():
            saved_data, parameter.data = parameter.data, parameter.data.clone()
            initial_states[name] = self._optimizer.record_initial_state(parameter)
            parameter.data = saved_data
        state.clear()
        for name, values in initial_states.items():
            placed = {key: self._shard_state_value(name, value) for key, value in values.items()}
            state[self._parameters[name]] = placed
            self._host_state[name] = {
                key: copy.deepcopy(v) for key, v in placed.items() if not _is_on_device(v)
            }
        self._layout.cut_graph(wait=True)

    def _shard_state_value(self, name: str, value: Any) -> Any:
        if not _is_on_device(value):
            return value
        return copy_with_sharding(value, self._layout.to_op_sharding(self._get_state_spec(name, value)))

    def _get_state_spec(self, name: str, value: Tensor) -> Spec:
        """Return the spec of a state tensor.

        The state tensor is sharded like the parameter if both have the same shape. Otherwise, it is
        replicated.
        """
        has_parameter_shape = value.shape == self._parameters[name].shape
        return (
            self._device_parameters.get_tensor_spec(name, value.shape)
            if has_parameter_shape
            else self._layout.get_replicated_spec(value.dim())
        )

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], learning_rate: Tensor, is_allowed: Tensor) -> None:
        """Trace the update of the parameters. See :meth:`portable.tpu.xla.optim.XlaOptimizer.step`.

        Args:
            gradients: Gradients, keyed by parameter name.
            learning_rate: Learning rate, as an fp32 scalar on the device.
            is_allowed: Whether to apply the update, as a bool scalar on the device.

        Raises:
            UserError: If the optimizer fails, or if its state would make XLA compile the graph
                again. This is the case if state is created after the first step, or if state
                changes on the host.
        """
        state = self._state_by_name
        values_before = {
            name: (self._parameters[name].detach().clone(), _copy_device_tensors(state[name]))
            for name in gradients
        }
        rates = [group["lr"] for group in self._optimizer.param_groups]
        for group in self._optimizer.param_groups:
            group["lr"] = compute_group_learning_rate(group, learning_rate, self._settings)
        for name, gradient in gradients.items():
            self._parameters[name].grad = gradient.float()
        with _TensorScaleMode():
            self._optimizer.step()
        for group, number in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = number
        state = self._state_by_name
        for name, (parameter, old) in values_before.items():
            self._parameters[name].grad = None
            self._parameters[name].copy_(torch.where(is_allowed, self._parameters[name], parameter))
            for key, value in state[name].items():
                self._check_state_entry(name, key, value, old)
                if _is_on_device(value):
                    buffer, values = old[key]
                    state[name][key] = buffer.copy_(torch.where(is_allowed, value, values))

    def _check_state_entry(self, name: str, key: str, value: Any, previous_state: Mapping[str, Any]) -> None:
        """Raise UserError if a change of a state entry would make XLA compile the graph again.

        This is the case if the entry was created after the first step, or if it is on the host and
        its value changes. Entries that are None are ignored, as in the initial state.

        Args:
            name: Name of the parameter.
            key: Name of the state entry.
            value: Value of the entry after the step.
            previous_state: State entries of the parameter that were on the device before the step,
                keyed by name. Only the names are used.
        """
        if value is None:
            return
        require(
            key in (previous_state if _is_on_device(value) else self._host_state[name]),
            f"{self._key}: creates the state {key!r} of {name} after its first step, but XLA compiles "
            "the first step; create this state in the first step",
        )
        if _is_on_device(value):
            return
        first_value = self._host_state[name][key]
        is_unchanged = (
            torch.equal(value, first_value) if isinstance(value, torch.Tensor) else value == first_value
        )
        require(
            is_unchanged,
            f"{self._key}: the state {key!r} of {name} changes on the host, so XLA would compile every "
            "step again; store the state in a tensor on parameter.device",
        )

    def get_state_tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return the state tensors, keyed by tensor name and then by state name.

        The tensor name is the name of a parameter or of a stack, which is one tensor that holds the
        same parameter of several layers. Scalars are not included. See :meth:`read_state_scalars`.
        """
        return {
            name: {key: v for key, v in values.items() if _is_on_device(v) and v.dim()}
            for name, values in self._state_by_name.items()
        }

    def read_state_scalars(self) -> dict[str, dict[str, Any]]:
        """Read the scalars in the optimizer state. Device scalars are copied to the CPU.

        Returns:
            Scalars, keyed by parameter name and then by state name.
        """
        state_by_name = self._state_by_name
        scalar_keys = [
            (n, k) for n, values in state_by_name.items() for k, v in values.items() if _is_device_scalar(v)
        ]
        copies = iter(
            self._layout.read_to_cpu([state_by_name[n][k] for n, k in scalar_keys]) if scalar_keys else ()
        )
        scalars = {name: dict(self._host_state.get(name, {})) for name in state_by_name}
        for name, key in scalar_keys:
            scalars[name][key] = next(copies)
        return {
            parameter_name: scalars[name]
            for name in state_by_name
            for parameter_name in self._device_parameters.get_parameter_names(name)
        }

    def build_param_groups(self, learning_rate: float) -> list[dict[str, Any]]:
        """Build the parameter groups for a checkpoint. See :meth:`XlaOptimizer.build_param_groups`.

        Args:
            learning_rate: Learning rate of the last step.
        """
        groups = []
        for group in self._optimizer.param_groups:
            names = [
                parameter_name
                for name in group["param_names"]
                for parameter_name in self._device_parameters.get_parameter_names(name)
            ]
            lr = compute_group_learning_rate(group, learning_rate, self._settings)
            groups.append({**to_plain_group({**group, "params": names}), "lr": lr})
        return groups

    def load_state(
        self,
        stored: Mapping[str, Mapping[str, StoredTensor | float | bool]],
        stored_groups: OptimizerState | None,
    ) -> None:
        """Restore the optimizer state from a checkpoint.

        Parameters without state in the checkpoint keep their initial state. If the same parameter
        of several layers is stored in one tensor, its state is only restored if the checkpoint has
        state for all these layers. Numbers are then restored from the first layer. If the
        checkpoint has no weight averages for ``train.ema``, the initial averages are kept.

        Args:
            stored: Stored state, keyed by parameter name and then by state name.
            stored_groups: Stored parameter groups, from which numbers such as a step count are
                restored. Settings of the run, such as the learning rate, are not restored. None to
                leave the groups unchanged.

        Raises:
            CheckpointError: If a state entry other than an average is missing, or if an entry has a
                different shape.
        """
        restore_custom_group_values(self._optimizer.param_groups, stored_groups)
        for name, state in self._state_by_name.items():
            names = self._device_parameters.get_parameter_names(name)
            if not all(parameter_name in stored for parameter_name in names):
                continue
            for key, value in state.items():
                sources = {parameter_name: stored[parameter_name].get(key) for parameter_name in names}
                first = sources[names[0]]
                if key == AVERAGE_KEY and None in sources.values():
                    continue
                shape = tuple(getattr(value, "shape", ()))[name in self._device_parameters.stacks :]
                for parameter_name, source in sources.items():
                    check_state_entry(source, shape, f"{key} of {parameter_name}")
                assert first is not None
                if shape:
                    spec = self._get_state_spec(name, value)
                    self._device_parameters.fill_tensor(name, value, spec, sources)  # type: ignore[arg-type]
                    continue
                number = first.read().item() if isinstance(first, StoredTensor) else first
                state[key] = self._convert_to_scalar(value, number)
                if not _is_on_device(value):
                    self._host_state[name][key] = copy.deepcopy(state[key])

    def _convert_to_scalar(self, like: Any, number: float) -> Any:
        if _is_on_device(like):
            return self._layout.replicate(torch.full((), number, dtype=like.dtype))
        return cast_number(like, number)


def build_xla_optimizer(
    settings: TrainConfig,
    model: nn.Module,
    layout: MeshLayout,
    device_parameters: DeviceParameters,
    compute: torch.dtype,
) -> XlaOptimizer | XlaCustomOptimizer:
    """Build the optimizer of a run.

    The result is an :class:`XlaCustomOptimizer` if ``train.optimizer`` has the form
    ``package.module:name``. Otherwise, it is an ``XlaOptimizer`` for a built-in optimizer.

    Args:
        settings: Section ``train`` of the config.
        model: Model on the meta device.
        layout: Placement of tensors on the devices.
        device_parameters: Parameters to update.
        compute: Dtype of Muon's matrix products. Ignored for a custom optimizer.
    """
    if is_plugin_name(settings.optimizer):
        return XlaCustomOptimizer(settings, model, layout, device_parameters)
    return XlaOptimizer(settings, model, layout, device_parameters, compute)


def _is_on_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "xla"


def _is_device_scalar(value: Any) -> bool:
    return _is_on_device(value) and value.dim() == 0


def _copy_device_tensors(state: Mapping[str, Any]) -> dict[str, tuple[Tensor, Tensor]]:
    return {key: (value, value.clone()) for key, value in state.items() if _is_on_device(value)}


_FUNCTIONS_WITH_SCALE = {
    "add", "addbmm", "addcdiv", "addcmul", "addmm", "addmv", "addr", "baddbmm", "sub", "subtract"
}  # fmt: skip
"""Functions whose ``alpha`` or ``value`` is a factor of the second argument, without underscores and the
prefix ``foreach``.
"""


class _TensorScaleMode(TorchFunctionMode):
    """Torch function mode that supports tensors as ``alpha`` and ``value``.

    These keyword arguments scale an operand of functions such as ``torch.add`` and
    ``torch.addcdiv``. torch would read the value of such a tensor, for example the learning rate,
    on the host. This mode multiplies the second positional argument by the tensor on the device
    instead. If this argument is a list, as in ``torch._foreach_add_``, each of its tensors is
    multiplied. Functions that are not in :data:`_FUNCTIONS_WITH_SCALE`, such as
    ``torch.masked_fill``, are called unchanged.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        function_name = getattr(func, "__name__", "").strip("_").removeprefix("foreach_")
        for name in ("alpha", "value") if function_name in _FUNCTIONS_WITH_SCALE else ():
            if isinstance(scale := kwargs.get(name), torch.Tensor) and len(args) > 1:
                del kwargs[name]
                second = args[1]
                scaled = (
                    [tensor * scale for tensor in second]
                    if isinstance(second, list | tuple)
                    else second * scale
                )
                args = (args[0], scaled, *args[2:])
        return func(*args, **kwargs)
