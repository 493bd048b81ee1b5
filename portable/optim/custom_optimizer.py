"""Support any ``torch.optim.Optimizer`` whose import path is given in ``train.optimizer``.

Torch optimizers create their state in the first step, but this trainer needs the state earlier: to
restore a checkpoint into it, and to compile a step for XLA.
:meth:`CustomOptimizer.build_initial_state` therefore takes a trial step with one parameter, records
the first value of each state entry, and undoes the step.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from contextlib import nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.overrides import TorchFunctionMode

from portable import plugins
from portable.errors import UserError, require
from portable.optim.local_shards import get_shard_group, to_local
from portable.optim.stored_state import Number, restore_custom_group_values
from portable.private import torch_internals

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from portable.config import RunConfig
    from portable.config.sections import TrainConfig
    from portable.converters.checkpoint import OptimizerState

KEY = "train.optimizer"


class MakesOptimizer(Protocol):
    """Interface of ``train.optimizer``: a class, such as ``torch.optim.NAdam``, or a function.

    The class or function is called with parameter groups, and returns a ``torch.optim.Optimizer``.
    The optimizer's ``step()`` updates, in place, every parameter that has a gradient. The trainer
    sets the learning rate ``group["lr"]`` before each step. The optimizer stores the state of a
    parameter in ``self.state[parameter]``, a dict of numbers and tensors of any shape. State that
    is common to a group is stored as a number in the group. Checkpoints contain the state of
    parameters and groups, but no other attributes of the optimizer.

    The trainer needs the state before the first step. It therefore takes a trial step with a zero
    gradient, records the first value of each state entry, and undoes the step. An entry that the
    optimizer creates only in a later step can be restored from a checkpoint if it is a number, a
    scalar tensor or a tensor with the shape of the parameter. On XLA, an entry that is created in a
    later step causes an error.

    Under FSDP2, parameters, gradients and ``torch.zeros_like(parameter)`` are DTensors, and
    operations between them act on complete tensors. On XLA, the step is traced, and learning rates
    and step counts are tensors on the device.

    The trainer skips updates that are not finite. With ZeRO and on XLA, the optimizer is not
    involved in this. Otherwise, the trainer computes an fp32 scalar on the device for each step: 1
    to skip the update, or 0. If the class of the optimizer has an attribute ``found_inf``, or if
    the optimizer is a fused optimizer of torch, the trainer sets the attribute ``found_inf`` of the
    optimizer to the scalar. The optimizer's ``step()`` must then not change anything if the scalar
    is 1. For other optimizers, the trainer reads the scalar on the host before each step, which is
    a host-device sync, and does not call ``step()`` if the scalar is 1.
    """

    def __call__(self, groups: list[dict[str, Any]], *, lr: float, **arguments: Any) -> torch.optim.Optimizer:
        """Create the optimizer.

        Args:
            groups: Parameter groups with ``params`` and ``param_names``. A group also has ``lr`` if
                its learning rate differs from the argument ``lr``. If this callable accepts
                ``weight_decay``, every group also has ``weight_decay``.
            lr: Learning rate, ``train.learning_rate``. The caller omits this argument if this
                callable does not accept it.
            arguments: Arguments given in ``train.optimizer``, such as ``gamma`` in
                ``package.module:name(gamma=2.0)``. If this callable accepts them, the caller also
                passes ``weight_decay`` (``train.weight_decay``) and, on XLA, ``capturable=True``.

        Returns:
            The optimizer.
        """


class CustomOptimizer:
    """Wrapper that lets engines use the custom optimizer in ``train.optimizer``.

    It implements the interface :class:`portable.optim.optimizers.EngineOptimizer`. If the
    parameters are sharded, the constructor compares updates of shards and of complete tensors in a
    trial. All ranks then have to create the wrapper.

    Args:
        settings: The ``train`` section. With :class:`_OptimizerSettings`, which trials use, shards
            and complete tensors are not compared.
        parameters: Parameters, keyed by name.
        groups: Parameter groups. See :func:`portable.optim.optimizers.build_parameter_groups`.
            Modified in place: ``param_names`` is added, and ``weight_decay`` is removed if the
            optimizer does not accept this argument.
        extra_arguments: Arguments to pass to the optimizer if it accepts them.

    Attributes:
        key: Setting and its value, used in error messages.
        inner: The custom optimizer.
        param_groups: Parameter groups of ``inner``.
        state: State of ``inner``, keyed by parameter.

    Raises:
        UserError: If the optimizer cannot be created, or if it updates shards and complete tensors
            differently.
    """

    found_inf: Tensor | None = None
    """Flag on the device of the parameters, an fp32 scalar. If it is 1, the step does not change anything."""

    def __init__(
        self,
        settings: TrainConfig | _OptimizerSettings,
        parameters: Mapping[str, nn.Parameter],
        groups: list[dict[str, Any]],
        **extra_arguments: Any,
    ) -> None:
        self.key = f"{KEY}: {settings.optimizer}"
        make = plugins.load_plugin_factory(KEY, settings.optimizer)
        accepted = _list_accepted_arguments(make)
        names: dict[Tensor, str] = {parameter: name for name, parameter in parameters.items()}
        for group in groups:
            group["param_names"] = [names[p] for p in group["params"]]
            if "weight_decay" not in accepted:
                del group["weight_decay"]
        arguments = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay, **extra_arguments}
        with plugins.convert_user_errors(self.key):
            self.inner: Any = make(
                groups, **{name: value for name, value in arguments.items() if name in accepted}
            )
        require(
            isinstance(self.inner, torch.optim.Optimizer),
            f"{self.key}: creates a {type(self.inner).__name__}, not a torch.optim.Optimizer; use a subclass "
            "of torch.optim.Optimizer, or a function that returns an optimizer",
        )
        supports = torch_internals.skips_non_finite_steps(self.inner)
        self.param_groups: list[dict[str, Any]] = self.inner.param_groups
        for group in self.param_groups:  # the optimizer may have divided the parameters into other groups
            group["param_names"] = [names[p] for p in group["params"]]
        self.state: Any = self.inner.state
        self._masks_steps = supports or hasattr(type(self.inner), "found_inf")
        self._names = names
        self._constructs_state = bool(self.inner.state)
        sharded = next((p for p in parameters.values() if isinstance(p, DTensor)), None)
        self._reduction_mode: Any = nullcontext() if sharded is None else _PartialReductionMode()
        if sharded is not None and not isinstance(settings, _OptimizerSettings):
            self._check_sharded_steps(_extract_settings(settings), sharded)

    def _check_sharded_steps(self, settings: _OptimizerSettings, parameter: DTensor) -> None:
        """Raise UserError if the optimizer updates shards and complete tensors differently.

        In a trial, the optimizer takes a few steps on small tensors, first as shards and then as
        complete tensors. The results are copied to the host. All ranks have to call this method.

        Args:
            settings: Settings of the optimizer.
            parameter: Model parameter that provides the mesh and the placements of the trial.
        """

        def shard(value: Tensor) -> Tensor:
            return distribute_tensor(value, parameter.device_mesh, parameter.placements)

        on_shards = [
            result.full_tensor().cpu() for result in _run_trial_steps(settings, _build_trial_values(), shard)
        ]
        pairs = zip(on_shards, _run_trial_steps(settings, _build_trial_values()), strict=True)
        require(
            all(torch.allclose(result, expected, rtol=1e-4, atol=1e-6) for result, expected in pairs),
            f"{self.key}: the results on shards (DTensors) differ from the results on complete tensors; use "
            "strategy no_shard",
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to None or zero, as ``torch.optim.Optimizer.zero_grad`` does."""
        self.inner.zero_grad(set_to_none=set_to_none)

    def step(self) -> None:
        """Update every parameter that has a gradient.

        Does nothing if ``found_inf`` is 1. If the optimizer does not support ``found_inf``, the host reads
        the flag, which is a host-device sync.

        Raises:
            UserError: If the optimizer fails.
        """
        with plugins.convert_user_errors(self.key):
            if self._masks_steps:
                self.inner.found_inf = self.found_inf
            elif self.found_inf is not None and bool(self.found_inf):
                return
            with self._reduction_mode:
                self.inner.step()

    def build_initial_state(self, parameter: Tensor) -> dict[str, Any]:
        """Return the state of a parameter before the first step. The parameter is not changed.

        This method takes a trial step. See :meth:`record_initial_state`. All ranks have to call it
        if the parameter is sharded, because operations on DTensors may run collectives.

        Returns:
            Tensors and numbers, keyed by name. If the parameter is sharded, tensors that the
            optimizer derives from it are DTensors. Other tensors, such as step counts, are plain
            tensors.

        Raises:
            UserError: If the optimizer fails in the trial step, or if a checkpoint cannot contain
                its state.
        """
        before = parameter.detach().clone()
        try:
            state = self.record_initial_state(parameter)
        finally:
            with torch.no_grad():
                to_local(parameter.detach()).copy_(to_local(before))
        return state

    def record_initial_state(self, parameter: Tensor) -> dict[str, Any]:
        """Take a trial step with one parameter, and return the initial state of the parameter.

        The initial value of a state entry is the value with which the optimizer creates it, before
        the first update of the entry. For a moment, for example, it is usually 0. The gradient in
        the trial step is zero, and weight decay is disabled. The step may change the parameter,
        and the caller has to restore it. This method restores the state, the gradients, the groups
        and the numeric attributes of the optimizer.

        Args:
            parameter: Parameter of the optimizer.

        Returns:
            Tensors and numbers, keyed by name.

        Raises:
            UserError: If the optimizer fails in the trial step, or if a checkpoint cannot contain
                its state.
        """
        inner, old_state = self.inner, self.inner.state
        gradients = [(p, p.grad) for group in inner.param_groups for p in group["params"]]
        groups = [
            {key: copy.deepcopy(value) for key, value in g.items() if key != "params"}
            for g in inner.param_groups
        ]
        numbers = {key: value for key, value in vars(inner).items() if isinstance(value, Number)}
        states = _RecordedStates()
        try:
            for member, _ in gradients:
                member.grad = None
            # Disable weight decay, because an optimizer may add it to the zero gradient before accumulating
            # the gradient.
            for group in inner.param_groups:
                group.update({"weight_decay": 0.0} if "weight_decay" in group else {})
            parameter.grad = torch.zeros_like(parameter)
            inner.state, inner.found_inf = states, None
            if old_state.get(parameter):  # the constructor created the state
                states[parameter] = {key: _copy_value(value) for key, value in old_state[parameter].items()}
            with plugins.convert_user_errors(self.key), self._reduction_mode:
                inner.step()
        finally:
            inner.state = old_state
            for member, gradient in gradients:
                member.grad = gradient
            for group, values in zip(inner.param_groups, groups, strict=True):
                for name in group.keys() - values.keys() - {"params"}:
                    del group[name]
                group.update(values)
            vars(inner).update(numbers)
        first = states[parameter].first_values if parameter in states else {}
        return self.to_plain_state(parameter, first)

    def to_plain_state(self, parameter: Tensor, state: Mapping[Any, Any]) -> dict[str, Any]:
        """Convert a parameter's state to values that a checkpoint can store: numbers, tensors and shards.

        Args:
            parameter: Parameter to which the state belongs.
            state: State, keyed by name. Entries that are None are dropped.

        Returns:
            The converted state. DTensors with pending reductions are replicated, other values are
            unchanged.

        Raises:
            UserError: If a value is neither a tensor nor a number, or if a name is not a string.
        """
        plain_state = {}
        for name, value in state.items():
            if value is None:
                continue
            if not isinstance(value, torch.Tensor | Number) or not isinstance(name, str):
                raise UserError(
                    f"{self.key}: a checkpoint cannot contain the state {name!r} of {self._names[parameter]} "
                    f"(type {type(value).__name__}); use a string as the name, and a tensor or number as the "
                    "value"
                )
            plain_state[name] = _reduce_partial(value) if isinstance(value, DTensor) else value
        return plain_state

    def collect_state(self) -> dict[str, dict[str, Any]]:
        """Return the optimizer state for a checkpoint, keyed by parameter name.

        Parameters without state are omitted. All ranks have to call this method if parameters are
        sharded.

        Raises:
            UserError: If the state cannot be stored in a checkpoint, or if replicated state differs
                between ranks.
        """
        for parameter in self.state:
            require(
                isinstance(parameter, torch.Tensor) and parameter in self._names,
                f"{self.key}: the optimizer's state has the key {parameter!r}, which is not a parameter of "
                "the model; store this value in the state of a parameter",
            )
        states = {p: self.to_plain_state(p, values) for p, values in self.state.items() if values}
        self._check_state_equal_across_ranks(states)
        return {self._names[p]: values for p, values in states.items()}

    def _check_state_equal_across_ranks(self, state: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Raise UserError if the replicated state of a sharded parameter differs between ranks.

        A state entry is replicated if it is not a DTensor, for example a step counter. Every rank
        then has its own copy. The ranks over which the parameter is sharded compare checksums of
        their copies.

        Args:
            state: Optimizer state of each parameter. The inner mapping is keyed by the name of the
                state entry, such as ``exp_avg``.
        """
        names, groups, numbers = [], set(), []
        for parameter, entries in state.items():
            group = get_shard_group(parameter)
            for key, value in entries.items():
                if group is not None and not isinstance(value, DTensor):
                    groups.add(group)
                    names.append(f"{key!r} of {self._names[parameter]}")
                    numbers.append(_summarize_value(value))
        for group in groups:
            gathered: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(gathered, numbers, group=group)
            for name, *values in zip(names, *gathered, strict=False):
                require(
                    all(value == values[0] for value in values),
                    f"{self.key}: the state {name} differs between the ranks that share the parameter; "
                    "compute the state only from the parameter and its gradient (DTensors), or use "
                    "strategy no_shard",
                )

    def reset_state(self, stored: OptimizerState | None) -> None:
        """Reset the state, and restore numbers in the parameter groups from a checkpoint.

        An example of such a number is a step count. Settings of the run, such as the learning rate,
        are not restored.

        All state is dropped, unless the optimizer's constructor has created state. In that case,
        all state is kept, and the caller later replaces it with the state in the checkpoint.

        Args:
            stored: Optimizer state of a checkpoint. None to leave the groups unchanged.
        """
        if not self._constructs_state:
            self.state.clear()
        restore_custom_group_values(self.param_groups, stored)

    def allocate_state(self, parameter: Tensor, values: Mapping[str, Any]) -> dict[str, Any]:
        """Allocate the tensors into which the state of a parameter is loaded from a checkpoint.

        The result contains the initial state. An optimizer may also create entries only after its
        first step. Such an entry exists in the checkpoint, but not in the initial state. It is
        added with the value zero.

        Args:
            parameter: Parameter to which the state belongs.
            values: State of the parameter in the checkpoint.

        Returns:
            Tensors and numbers, keyed by name.

        Raises:
            UserError: If an added tensor is not a scalar and does not have the shape of the
                parameter, because its sharding is then unknown. Also raised if the optimizer fails
                in the trial step of :meth:`build_initial_state`.
        """
        state = self.build_initial_state(parameter)
        for name in values.keys() - state.keys():
            shape = getattr(values[name], "shape", ())
            require(
                not shape or tuple(shape) == tuple(parameter.shape),
                f"{self.key}: creates the state {name!r} of {self._names[parameter]} (shape {list(shape)}) "
                "only after the first step, so its sharding is unknown; create the state in the first step",
            )
            state[name] = torch.zeros_like(parameter) if shape else 0.0
        return state


def _summarize_value(value: Tensor | Number) -> str:
    """Summarize a state entry as a text, to compare it between ranks. Equal NaNs have equal texts.

    Returns:
        Shape, dtype and two checksums of a tensor. For a number, the number.
    """
    if not isinstance(value, torch.Tensor):
        return repr(value)
    wide = value.detach().double().flatten()
    weights = torch.arange(1, wide.numel() + 1, dtype=wide.dtype, device=wide.device)
    checksums = float(wide.sum()), float((wide * weights).sum())
    return f"{tuple(value.shape)} {value.dtype} {checksums}"


def _copy_value(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


class _FirstValueRecorder(dict[Any, Any]):
    """Dict for a parameter's state that also keeps a copy of the first value of each entry.

    Attributes:
        first_values: The copies, keyed by entry name.
    """

    def __init__(self, values: Mapping[Any, Any]) -> None:
        super().__init__()
        self.first_values: dict[Any, Any] = {}
        self.update(values)

    def __setitem__(self, name: Any, value: Any) -> None:
        if name not in self.first_values:
            self.first_values[name] = _copy_value(value)
        super().__setitem__(name, value)

    def setdefault(self, name: Any, default: Any = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]

    def update(self, *given: Any, **named: Any) -> None:
        for name, value in dict(*given, **named).items():
            self[name] = value

    def __ior__(self, values: Any) -> Any:  # type: ignore[misc]
        self.update(values)
        return self


class _RecordedStates(defaultdict[Any, Any]):
    """Replacement for ``optimizer.state`` during a trial step. It keeps the first value of each entry.

    The state of each parameter is a :class:`_FirstValueRecorder`, which stores these first values.
    """

    def __init__(self) -> None:
        super().__init__(lambda: _FirstValueRecorder({}))

    def __setitem__(self, parameter: Any, values: Any) -> None:
        super().__setitem__(
            parameter, values if isinstance(values, _FirstValueRecorder) else _FirstValueRecorder(values)
        )


def _list_accepted_arguments(make: Any) -> frozenset[str]:
    """Return the names of the arguments that a callable accepts.

    ``lr`` and ``weight_decay`` are added if the callable has ``**kwargs`` or if its signature
    cannot be read, because it may accept them.
    """
    try:
        parameters = inspect.signature(make).parameters
    except (TypeError, ValueError):  # compiled callables have no signature
        return frozenset(("lr", "weight_decay"))
    has_var_keywords = any(
        parameter.kind == inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
    )
    return frozenset((*parameters, *(("lr", "weight_decay") if has_var_keywords else ())))


# -- before a run ------------------------------------------------------------------------------------------


class _OptimizerSettings(NamedTuple):
    """Settings in the ``train`` section that define a custom optimizer. Hashable, for use in caches."""

    optimizer: str
    learning_rate: float
    weight_decay: float


class _PartialReductionMode(TorchFunctionMode):
    """Torch function mode that immediately completes reductions over a sharded dimension.

    Without this mode, DTensor postpones such reductions, so that ``item()`` and in-place operations
    would use the partial result of one rank. The mode also corrects means, because DTensor averages the
    means of shards without weighting them by their sizes.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.mean, torch.Tensor.mean) and args and isinstance(args[0], DTensor):
            total = torch.sum(*args, **(kwargs or {}))
            return _reduce_partial(total) * (total.numel() / args[0].numel())  # type: ignore[arg-type]
        leaves, structure = torch_internals.tree_flatten(func(*args, **(kwargs or {})))
        completed = [_reduce_partial(leaf) if isinstance(leaf, DTensor) else leaf for leaf in leaves]
        return torch_internals.tree_unflatten(completed, structure)


def _reduce_partial(value: DTensor) -> DTensor:
    """Complete a DTensor's pending reduction over ranks. Return other DTensors unchanged."""
    if not any(place.is_partial() for place in value.placements):
        return value
    return value.redistribute(placements=[Replicate() if p.is_partial() else p for p in value.placements])


def _extract_settings(train: TrainConfig) -> _OptimizerSettings:
    return _OptimizerSettings(train.optimizer, train.learning_rate, train.weight_decay)


def check_custom_optimizer(config: RunConfig) -> None:
    """Check a custom ``train.optimizer`` with three trial steps on two small parameters.

    The trial runs on the CPU.

    Args:
        config: The config of the run.

    Raises:
        UserError: If the optimizer cannot be created, if it fails, or if a checkpoint cannot
            contain its state. Also raised if ``train.optimizer`` contains the argument ``lr`` or
            ``weight_decay``, if ``train.betas`` or ``train.eps`` is set, or if a nonzero
            ``train.weight_decay`` is set and the optimizer does not accept this argument.
    """
    train = config.train
    key, name = f"{KEY}: {train.optimizer}", plugins.parse_plugin_spec(train.optimizer).name
    make = plugins.load_plugin_factory(KEY, train.optimizer)
    accepted = _list_accepted_arguments(make)
    for argument, setting in (("lr", "learning_rate"), ("weight_decay", "weight_decay")):
        require(
            argument not in getattr(make, "keywords", {}),
            f"{key}: the argument {argument} conflicts with train.{setting}; remove the argument, and set "
            f"train.{setting}",
        )
    for setting in ("betas", "eps"):
        require(
            not config.is_set(f"train.{setting}"),
            f"train.{setting}: has no effect with {key}; remove train.{setting}, or pass the value as an "
            f"argument of the optimizer, for example {name}({setting}=...)",
        )
    require(
        "weight_decay" in accepted or not (config.is_set("train.weight_decay") and train.weight_decay),
        f"train.weight_decay: has no effect with {key}, which has no argument weight_decay; set "
        "train.weight_decay to 0",
    )
    _run_trial_steps(_extract_settings(train), _build_trial_values())


def _build_trial_values() -> list[Tensor]:
    """Return random values for two small parameters with which an optimizer is tried out.

    The values are the same on all ranks. The shapes are ``[4, 6]`` and ``[5]``.
    """
    draws = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=draws) for shape in ((4, 6), (5,))]


def _run_trial_steps(
    settings: _OptimizerSettings,
    values: Sequence[Tensor],
    convert_value: Callable[[Tensor], Any] = torch.clone,
    *,
    from_initial_state: bool = False,
) -> list[Any]:
    """Create an optimizer for trial parameters, and run three steps with random gradients.

    Args:
        settings: Settings of the optimizer.
        values: Initial values of the parameters.
        convert_value: Function that converts values and gradients, for example to shards.
        from_initial_state: Whether to start from :meth:`CustomOptimizer.build_initial_state`
            instead of an empty state.

    Returns:
        The values of the parameters after the steps.

    Raises:
        UserError: If the optimizer cannot be created, if it fails, or if a checkpoint cannot
            contain its state.
    """
    parameters = {f"{name}": nn.Parameter(convert_value(value)) for name, value in enumerate(values)}
    group: dict[str, Any] = {"params": list(parameters.values()), "weight_decay": settings.weight_decay}
    optimizer = CustomOptimizer(settings, parameters, [group])
    if from_initial_state:
        states = {p: optimizer.build_initial_state(p) for p in parameters.values()}
        optimizer.state.update(states)
    draws = torch.Generator().manual_seed(2)
    for _ in range(3):
        drawn = torch.randn(sum(value.numel() for value in values), generator=draws)
        gradients = drawn.split([value.numel() for value in values])
        for parameter, gradient in zip(parameters.values(), gradients, strict=True):
            parameter.grad = convert_value(gradient.view(parameter.shape))
        optimizer.step()
    optimizer.collect_state()
    return [p.detach() for p in parameters.values()]


def is_elementwise(train: TrainConfig) -> bool:
    """Return whether a custom optimizer updates each element separately.

    This function runs the optimizer on small tensors on the CPU. It returns True if the updates do
    not depend on how the elements are divided into parameters. It returns False if the optimizer
    rejects flattened parameters. The result is cached.

    Raises:
        UserError: If the optimizer cannot be created, or if it fails on parameters that are not
            flattened.
    """
    return _is_elementwise_in_trial(_extract_settings(train))


@lru_cache(maxsize=4)
def _is_elementwise_in_trial(settings: _OptimizerSettings) -> bool:
    """Return whether a trial shows that an optimizer's updates do not depend on parameter shapes.

    The trial runs the optimizer twice on the same values: first as two small parameters, and then
    as two flat parameters of other sizes. Returns False if the updated values differ, or if the
    optimizer rejects the flat parameters.
    """
    values = _build_trial_values()
    expected = torch.cat([value.flatten() for value in _run_trial_steps(settings, values)])
    flat = torch.cat([value.flatten() for value in values])
    try:
        results = torch.cat(_run_trial_steps(settings, flat.split([11, 18])))
    except UserError:
        return False
    return torch.allclose(expected, results, rtol=1e-5, atol=1e-7)


def _build_for_parameter(settings: _OptimizerSettings, parameter: nn.Parameter) -> CustomOptimizer:
    """Build a custom optimizer for a single parameter, to find out which state it creates."""
    group: dict[str, Any] = {"params": [parameter], "weight_decay": settings.weight_decay}
    return CustomOptimizer(settings, {"0": parameter}, [group])


def build_sample_state(train: TrainConfig) -> dict[str, Any]:
    """Return the initial state of a custom optimizer for a sample vector of two elements.

    The result shows the names and types of the state entries of a parameter.
    """
    parameter = nn.Parameter(torch.zeros(2))
    return _build_for_parameter(_extract_settings(train), parameter).build_initial_state(parameter)


def has_state_before_first_step(train: TrainConfig) -> bool:
    """Return whether the constructor of a custom optimizer already creates state, as in Adagrad."""
    return bool(_build_for_parameter(_extract_settings(train), nn.Parameter(torch.zeros(2))).state)


def has_neutral_initial_state(train: TrainConfig) -> bool:
    """Return whether an optimizer gives the same results if its state is created in advance.

    A trial takes three steps, once from an empty state and once from a state that exists before the
    first step. If the results differ, the optimizer recognizes its first step by the empty state.
    Its state must then not be created in advance.
    """
    settings = _extract_settings(train)
    pairs = zip(
        _run_trial_steps(settings, _build_trial_values()),
        _run_trial_steps(settings, _build_trial_values(), from_initial_state=True),
        strict=True,
    )
    return all(torch.allclose(value, other_value, rtol=1e-6, atol=1e-7) for value, other_value in pairs)


class StateTensorLayout(NamedTuple):
    """Shape and bytes per element of a tensor in the state of a parameter."""

    shape: tuple[int, ...]
    itemsize: int


def list_state_tensor_layouts(train: TrainConfig, shape: tuple[int, ...]) -> tuple[StateTensorLayout, ...]:
    """Return the shape and element size of each tensor in the state of a parameter.

    The planner uses the result. A trial step on the meta device creates the state. If this fails,
    for example because the optimizer reads values, the step runs on the CPU with a parameter of
    the complete shape. Results are cached per shape and optimizer settings.

    Args:
        train: The ``train`` section, with a custom optimizer.
        shape: Shape of the parameter.

    Raises:
        UserError: If the optimizer cannot be created, or if it fails in a trial step.
    """
    return _compute_state_tensor_layouts(_extract_settings(train), shape)


@lru_cache(maxsize=4096)
def _compute_state_tensor_layouts(
    settings: _OptimizerSettings, shape: tuple[int, ...]
) -> tuple[StateTensorLayout, ...]:
    states: dict[str, Any] = {}
    for device in ("meta", "cpu"):  # optimizers that read values fail on the meta device
        parameter = nn.Parameter(torch.zeros(shape, device=device))
        optimizer = _build_for_parameter(settings, parameter)
        try:
            states = optimizer.build_initial_state(parameter)
            break
        except UserError:
            if device == "cpu":
                raise
    return tuple(
        StateTensorLayout(tuple(v.shape), v.itemsize) for v in states.values() if isinstance(v, torch.Tensor)
    )
