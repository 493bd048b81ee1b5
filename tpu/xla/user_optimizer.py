"""An optimizer of the user's as part of the compiled step."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from portable.converters import Tensor as StoredTensor
from portable.errors import require
from portable.model.groups import groups_of
from portable.optim.average import AVERAGE, keep_average
from portable.optim.optimizers import parameter_groups, rate_of
from portable.optim.stored_state import check_entry, number_like, plain_group, restore_groups
from portable.optim.user_optimizer import UserOptimizer
from portable.plugins import names_code
from portable.tpu.xla.layout import marked
from portable.tpu.xla.optim import Optimizer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from portable.config.sections import TrainConfig
    from portable.converters.checkpoint import OptimizerState
    from portable.tpu.xla.layout import Layout, Spec
    from portable.tpu.xla.parameters import Parameters


class OwnOnXla:
    """The interface of :class:`portable.tpu.xla.optim.Optimizer` for an optimizer of the user's.

    It acts on whole tensors, which the compiler spreads over the devices. State of a parameter's shape is
    sharded as it is, other state replicated. torch's own optimizers get ``capturable=True``, so that their
    step counts are on the device.

    Args:
        settings: the train section.
        model: on the meta device, for names.
        layout: where tensors lie.
        held: the parameters.

    Raises:
        UserError: if it cannot be made, or layers in a loop have different rates.
    """

    def __init__(self, settings: TrainConfig, model: nn.Module, layout: Layout, held: Parameters) -> None:
        self._layout, self._held, self._settings = layout, held, settings
        self._parameters = {name: p for name, p in held.by_name.items() if p.requires_grad}
        of = groups_of(model, settings)
        for first in self._parameters:
            require(
                len({of[one] for one in held.names(first)}) == 1,
                f"train.parameter_groups: treat {first} of one layer differently from that of the next, but "
                "xla.scan_layers runs both in one loop; set xla.scan_layers to false",
            )
        groups = parameter_groups(self._parameters, of, settings.learning_rate)
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
        state, found = self._optimizer.state, {}
        for name, parameter in self._parameters.items():
            kept, parameter.data = parameter.data, parameter.data.clone()
            found[name] = self._optimizer.trial(parameter)
            parameter.data = kept
        state.clear()
        for name, values in found.items():
            placed = {key: self._placed(name, value) for key, value in values.items()}
            state[self._parameters[name]] = placed
            self._host[name] = {key: copy.deepcopy(v) for key, v in placed.items() if not _on_device(v)}
        self._layout.execute(wait=True)

    def _placed(self, name: str, value: Any) -> Any:
        if not _on_device(value):
            return value
        return marked(value, self._layout.sharding(self._spec(name, value)))

    def _spec(self, name: str, value: Tensor) -> Spec:
        alike = value.shape == self._parameters[name].shape
        return self._held.spec(name, value.shape) if alike else self._layout.replicated(value.dim())

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], rate: Tensor, allowed: Tensor) -> None:
        """See :meth:`portable.tpu.xla.optim.Optimizer.step`.

        Raises:
            UserError: if it fails, or would compile again in each step.
        """
        state = self._state
        before = {name: (self._parameters[name].detach().clone(), _copies(state[name])) for name in gradients}
        rates = [group["lr"] for group in self._optimizer.param_groups]
        for group in self._optimizer.param_groups:
            group["lr"] = rate_of(group, rate, self._settings)
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
                if _on_device(value):
                    kept, values = old[key]
                    state[name][key] = kept.copy_(torch.where(allowed, value, values))

    def _check(self, name: str, key: str, value: Any, old: Mapping[str, Any]) -> None:
        if _on_device(value):
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
            name: {key: v for key, v in values.items() if _on_device(v) and v.dim()}
            for name, values in self._state.items()
        }

    def scalars(self) -> dict[str, dict[str, Any]]:
        """The scalars of every parameter, on the CPU."""
        every = self._state
        places = [(n, k) for n, values in every.items() for k, v in values.items() if _scalar(v)]
        copies = iter(self._layout.read([every[n][k] for n, k in places]) if places else ())
        found = {name: dict(self._host.get(name, {})) for name in every}
        for name, key in places:
            found[name][key] = next(copies)
        return {one: found[name] for name in every for one in self._held.names(name)}

    def groups(self, rate: float) -> list[dict[str, Any]]:
        """See :meth:`portable.tpu.xla.optim.Optimizer.groups`."""
        made = []
        for group in self._optimizer.param_groups:
            names = [one for name in group["param_names"] for one in self._held.names(name)]
            lr = rate_of(group, rate, self._settings)
            made.append({**plain_group({**group, "params": names}), "lr": lr})
        return made

    def load(
        self,
        stored: Mapping[str, Mapping[str, StoredTensor | float | bool]],
        groups: OptimizerState | None,
    ) -> None:
        """Restore the state of a checkpoint; parameters that it lacks keep their initial state."""
        restore_groups(self._optimizer.param_groups, groups)
        for name, state in self._state.items():
            names = self._held.names(name)
            if not all(one in stored for one in names):
                continue
            for key, value in state.items():
                found = {one: stored[one].get(key) for one in names}
                first = found[names[0]]
                if first is None and key == AVERAGE:
                    continue
                shape = tuple(getattr(value, "shape", ()))[name in self._held.stacks :]
                check_entry(first, shape, f"{key} of {name}")
                assert first is not None
                if shape:
                    self._held.fill(name, value, self._spec(name, value), found)  # type: ignore[arg-type]
                    continue
                number = first.read().item() if isinstance(first, StoredTensor) else first
                state[key] = self._number(value, number)
                if not _on_device(value):
                    self._host[name][key] = copy.deepcopy(state[key])

    def _number(self, like: Any, number: float) -> Any:
        if _on_device(like):
            return self._layout.whole(torch.full((), number, dtype=like.dtype))
        return number_like(like, number)


def optimizer_of(
    settings: TrainConfig, model: nn.Module, layout: Layout, held: Parameters, compute: torch.dtype
) -> Any:
    """Build a :class:`portable.tpu.xla.optim.Optimizer`, or :class:`OwnOnXla` for a custom one."""
    if names_code(settings.optimizer):
        return OwnOnXla(settings, model, layout, held)
    return Optimizer(settings, model, layout, held, compute)


def _on_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "xla"


def _scalar(value: Any) -> bool:
    return _on_device(value) and value.dim() == 0


def _copies(state: Mapping[str, Any]) -> dict[str, tuple[Tensor, Tensor]]:
    return {key: (value, value.clone()) for key, value in state.items() if _on_device(value)}


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
                    [one * scale for one in second] if isinstance(second, list | tuple) else second * scale
                )
                args = (args[0], scaled, *args[2:])
        return func(*args, **kwargs)
