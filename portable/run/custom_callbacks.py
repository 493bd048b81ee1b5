"""Load the custom callbacks in ``train.callbacks``, and define the order of all callbacks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from portable import plugins
from portable.callbacks import Callback
from portable.errors import UserError
from portable.model.sharded_parameter_guard import ShardReadGuard
from portable.private import torch_internals

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from portable.callbacks import Run
    from portable.config import RunConfig

HOOKS = ("on_start", "on_step", "on_log", "on_evaluation", "on_save", "on_end")
"""Methods that a custom callback may have."""


def list_callback_names(config: RunConfig, *, profile: bool = False) -> list[str]:
    """List the names of all callbacks of a run except the progress bar, in call order.

    Custom callbacks come before the reporter, so that the log row of a step includes the values
    that they log. Evaluations run before saves, so that a checkpoint includes their results. The
    progress bar has no name and is called last.

    Args:
        config: Config of the run.
        profile: Whether the launch profiles some steps.
    """
    custom = [_format_callback_name(name) for name in config.train.callbacks]
    profiling, uploading = ["profile"] * profile, ["upload"] * (config.hub.push is not None)
    return [*custom, *profiling, "report", "evaluate", "save", *uploading]


def _format_callback_name(plugin_name: str) -> str:
    """Format the name of a custom callback, as used in error messages and :func:`list_callback_names`."""
    return f"train.callbacks: {plugin_name}"


class CustomCallback(Callback):
    """Callback that calls the methods of a user's object.

    The run ends with a one-line error if a method fails, changes parameters of the model in place,
    or reads the shard of a parameter.

    Args:
        name: Name of the callback, used in error messages.
        custom: The user's object. It may implement any subset of the methods in :data:`HOOKS`.
    """

    def __init__(self, name: str, custom: Any) -> None:
        self._name = name
        for hook in HOOKS:
            if (function := getattr(custom, hook, None)) is not None:
                setattr(self, hook, partial(self._call_hook, hook, function))

    def _call_hook(self, hook_name: str, function: Callable[..., None], run: Run, *values: Any) -> None:
        """Call a method of the user's callback, and check that it does not change the model.

        The version counters of the parameters reveal in-place changes of parameters. Changes
        through ``.data`` and changes of buffers are not detected.

        Args:
            hook_name: Name of the method, such as ``on_step``. It is used in error messages.
            function: The method, bound to the user's object.
            run: The run, passed to the method as its first argument.
            values: Additional arguments for the method, such as the metrics of an evaluation.

        Raises:
            UserError: If the method fails, changes parameters of the model, or reads the shard of a
                parameter (see :class:`ShardReadGuard`).
        """
        name, versions_before = f"{self._name}: {hook_name}", _get_parameter_versions(run.model)
        with plugins.convert_user_errors(name), ShardReadGuard(name, in_loss=False):
            function(run, *values)
        versions_after = _get_parameter_versions(run.model)
        if any(
            versions_before.get(parameter, version) != version
            for parameter, version in versions_after.items()
        ):
            raise UserError(
                f"{name}: changes parameters of the model, but the changes do not reach the optimizer or the "
                "other ranks; to change the model, use model.function, train.loss or train.optimizer"
            )


def load_custom_callbacks(names: Sequence[str]) -> dict[str, CustomCallback]:
    """Load the custom callbacks that ``train.callbacks`` lists.

    Args:
        names: Value of ``train.callbacks``.

    Returns:
        The callbacks, keyed by name, such as ``train.callbacks: my_module:MyCallback``.
        :func:`list_callback_names` returns the same names.

    Raises:
        UserError: If a name does not refer to a callback. A callback has at least one of the
            methods in ``HOOKS``, and no other method whose name begins with ``on_``.
    """
    callbacks = {}
    for name in names:
        custom = plugins.load_plugin("train.callbacks", name)
        if not any(hasattr(custom, hook) for hook in HOOKS):
            raise UserError(
                f"train.callbacks: {name}: has none of the methods {', '.join(HOOKS)}; define at least "
                "one of them"
            )
        unknown_hooks = [hook for hook in dir(custom) if hook.startswith("on_") and hook not in HOOKS]
        if unknown_hooks:
            raise UserError(
                f"train.callbacks: {name}: {unknown_hooks[0]} is not a hook; rename the method to one of "
                f"{', '.join(HOOKS)}"
            )
        callbacks[_format_callback_name(name)] = CustomCallback(_format_callback_name(name), custom)
    return callbacks


def _get_parameter_versions(model: nn.Module) -> dict[int, int]:
    """Return each parameter's version counter, keyed by ``id(parameter)``.

    Does not trigger a host-device sync. In-place changes increment the counter, except changes
    through ``.data``. The keys may change between calls, because a forward pass may replace
    parameters, for example with gathered ones.
    """
    return {id(parameter): torch_internals.get_tensor_version(parameter) for parameter in model.parameters()}
