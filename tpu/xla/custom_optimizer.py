"""An optimizer of the user's as part of the compiled step."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from portable.converters import Tensor as StoredTensor
from portable.errors import require
from portable.model.parameter_groups import assign_groups
from portable.optim.custom_optimizer import UserOptimizer
from portable.optim.optimizers import build_parameter_groups, compute_group_rate
from portable.optim.stored_state import cast_number, check_entry, restore_groups, to_plain_group
from portable.optim.weight_average import AVERAGE, keep_average
from portable.plugins import names_code
from portable.tpu.xla.layout import copy_with_sharding
from portable.tpu.xla.optim import XlaOptimizer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from portable.config.sections import TrainConfig
    from portable.converters.checkpoint import OptimizerState
    from portable.tpu.xla.layout import MeshLayout, Spec
    from portable.tpu.xla.parameters import Parameters


class XlaUserOptimizer:
    """The interface of :class:`portable.tpu.xla.optim.XlaOptimizer` for an optimizer of the user's.

    It acts on whole tensors, which the compiler spreads over the devices. State of a parameter's shape is
    sharded as it is, other state replicated. torch's own optimizers get ``capturable=True``, so that their
    step counts are on the device.

    Args:
        settings: the train section.
        model: on the meta device, for names.
        layout: where tensors lie.
        device_parameters: the parameters.

    Raises:
        UserError: if it cannot be made, or layers in a loop have different rates.
    """

    def __init__(
        self, settings: TrainConfig, model: nn.Module, layout: MeshLayout, device_parameters: Parameters
    ) -> None:
        self._layout, self._device_parameters, self._settings = layout, device_parameters, settings
        self._parameters = {name: p for name, p in device_parameters.by_name.items() if p.requires_grad}
        named_groups = assign_groups(model, settings)
        for first in self._parameters:
            require(
                len({named_groups[parameter_name] for parameter_name in device_parameters.get_names(first)})
                == 1,
                f"train.parameter_groups: treat {first} of one layer differently from that of the next, but "
                "xla.scan_layers runs both in one loop; set xla.scan_layers to false",
            )
        groups = build_parameter_groups(self._parameters, named_groups, settings.learning_rate)
        self._optimizer = UserOptimizer(settings, self._parameters, groups, capturable=True)
        if settings.ema is not None:
            keep_average(self._optimizer, settings.ema)
        self._key = self._optimizer.key
        self._host: dict[str, dict[str, Any]] = {}

    @property
    def _state(self) -> dict[str, dict[str, Any]]:
        state = self._optimizer.state
        return {name: state[p] for name, p in self._parameters.items() if p in state}

    def begin(self) -> None:
        """Make the initial state, on the devices."""
        state, initial_states = self._optimizer.state, {}
        for name, parameter in self._parameters.items():
            saved_data, parameter.data = parameter.data, parameter.data.clone()
            initial_states[name] = self._optimizer.run_trial_step(parameter)
            parameter.data = saved_data
        state.clear()
        for name, values in initial_states.items():
            placed = {key: self._place_value(name, value) for key, value in values.items()}
            state[self._parameters[name]] = placed
            self._host[name] = {key: copy.deepcopy(v) for key, v in placed.items() if not _is_on_device(v)}
        self._layout.execute(wait=True)

    def _place_value(self, name: str, value: Any) -> Any:
        if not _is_on_device(value):
            return value
        return copy_with_sharding(value, self._layout.to_op_sharding(self._get_spec(name, value)))

    def _get_spec(self, name: str, value: Tensor) -> Spec:
        alike = value.shape == self._parameters[name].shape
        return (
            self._device_parameters.get_spec(name, value.shape)
            if alike
            else self._layout.get_replicated_spec(value.dim())
        )

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], rate: Tensor, allowed: Tensor) -> None:
        """See :meth:`portable.tpu.xla.optim.XlaOptimizer.step`.

        Raises:
            UserError: if it fails, or would compile again in each step.
        """
        state = self._state
        before = {
            name: (self._parameters[name].detach().clone(), _copy_tensors(state[name])) for name in gradients
        }
        rates = [group["lr"] for group in self._optimizer.param_groups]
        for group in self._optimizer.param_groups:
            group["lr"] = compute_group_rate(group, rate, self._settings)
        for name, gradient in gradients.items():
            self._parameters[name].grad = gradient.float()
        with _TensorScalars():
            self._optimizer.step()
        for group, number in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = number
        state = self._state
        for name, (parameter, old) in before.items():
            self._parameters[name].grad = None
            self._parameters[name].copy_(torch.where(allowed, self._parameters[name], parameter))
            for key, value in state[name].items():
                self._check(name, key, value, old)
                if _is_on_device(value):
                    buffer, values = old[key]
                    state[name][key] = buffer.copy_(torch.where(allowed, value, values))

    def _check(self, name: str, key: str, value: Any, old: Mapping[str, Any]) -> None:
        if _is_on_device(value):
            require(
                key in old,
                f"{self._key}: creates the state {key!r} of {name} after its first step, but XLA compiles "
                "the first; create it there",
            )
            return
        before = self._host[name].get(key, value)
        same = torch.equal(value, before) if isinstance(value, torch.Tensor) else value == before
        require(
            same,
            f"{self._key}: the state {key!r} of {name} changes on the host, so that XLA would compile "
            "each step anew; make it a tensor on parameter.device",
        )

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """The state of every parameter, by name, without scalars."""
        return {
            name: {key: v for key, v in values.items() if _is_on_device(v) and v.dim()}
            for name, values in self._state.items()
        }

    def scalars(self) -> dict[str, dict[str, Any]]:
        """The scalars of every parameter, on the CPU."""
        every = self._state
        places = [(n, k) for n, values in every.items() for k, v in values.items() if _is_scalar(v)]
        copies = iter(self._layout.read([every[n][k] for n, k in places]) if places else ())
        scalars = {name: dict(self._host.get(name, {})) for name in every}
        for name, key in places:
            scalars[name][key] = next(copies)
        return {
            parameter_name: scalars[name]
            for name in every
            for parameter_name in self._device_parameters.get_names(name)
        }

    def groups(self, rate: float) -> list[dict[str, Any]]:
        """See :meth:`portable.tpu.xla.optim.XlaOptimizer.groups`."""
        groups = []
        for group in self._optimizer.param_groups:
            names = [
                parameter_name
                for name in group["param_names"]
                for parameter_name in self._device_parameters.get_names(name)
            ]
            lr = compute_group_rate(group, rate, self._settings)
            groups.append({**to_plain_group({**group, "params": names}), "lr": lr})
        return groups

    def load(
        self,
        stored: Mapping[str, Mapping[str, StoredTensor | float | bool]],
        groups: OptimizerState | None,
    ) -> None:
        """Restore the state of a checkpoint; parameters that it lacks keep their initial state."""
        restore_groups(self._optimizer.param_groups, groups)
        for name, state in self._state.items():
            names = self._device_parameters.get_names(name)
            if not all(parameter_name in stored for parameter_name in names):
                continue
            for key, value in state.items():
                sources = {parameter_name: stored[parameter_name].get(key) for parameter_name in names}
                first = sources[names[0]]
                if first is None and key == AVERAGE:
                    continue
                shape = tuple(getattr(value, "shape", ()))[name in self._device_parameters.stacks :]
                check_entry(first, shape, f"{key} of {name}")
                assert first is not None
                if shape:
                    self._device_parameters.fill(name, value, self._get_spec(name, value), sources)  # type: ignore[arg-type]
                    continue
                number = first.read().item() if isinstance(first, StoredTensor) else first
                state[key] = self._to_number(value, number)
                if not _is_on_device(value):
                    self._host[name][key] = copy.deepcopy(state[key])

    def _to_number(self, like: Any, number: float) -> Any:
        if _is_on_device(like):
            return self._layout.replicate(torch.full((), number, dtype=like.dtype))
        return cast_number(like, number)


def build_xla_optimizer(
    settings: TrainConfig,
    model: nn.Module,
    layout: MeshLayout,
    device_parameters: Parameters,
    compute: torch.dtype,
) -> XlaOptimizer | XlaUserOptimizer:
    """Build a :class:`portable.tpu.xla.optim.XlaOptimizer`, or :class:`XlaUserOptimizer` for a custom one."""
    if names_code(settings.optimizer):
        return XlaUserOptimizer(settings, model, layout, device_parameters)
    return XlaOptimizer(settings, model, layout, device_parameters, compute)


def _is_on_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "xla"


def _is_scalar(value: Any) -> bool:
    return _is_on_device(value) and value.dim() == 0


def _copy_tensors(state: Mapping[str, Any]) -> dict[str, tuple[Tensor, Tensor]]:
    return {key: (value, value.clone()) for key, value in state.items() if _is_on_device(value)}


class _TensorScalars(TorchFunctionMode):
    """Multiplies by ``alpha`` and ``value`` where they are tensors, such as the rate; torch reads these."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        for name in ("alpha", "value"):
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
