"""Build models whose parameters are on the meta device and whose buffers have values."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from portable.model.deferred_init import InitializationRecording
from portable.model.weight_sources import to_torch

if TYPE_CHECKING:
    from collections.abc import Iterator

_MIN_RECORDED_ELEMENTS = 1 << 22
"""Minimum number of elements of a tensor that is recorded instead of allocated in host memory."""


@contextmanager
def create_parameters_on_meta() -> Iterator[InitializationRecording]:
    """Move each parameter to the meta device when a module registers it in this context.

    A constructor creates a parameter before a module can register it, so the hook comes too late to
    save memory. The stacked experts of one layer can take up tens of gigabytes. Tensors with at
    least 4 million elements (:data:`_MIN_RECORDED_ELEMENTS`) are therefore created as fake tensors,
    without values. The operations on the fake tensors are recorded, because a buffer may be
    computed from them.

    Yields:
        The recorded operations, to be passed to :func:`assign_recorded_values`.
    """
    recording = InitializationRecording(0, min_elements=_MIN_RECORDED_ELEMENTS)
    hook = register_module_parameter_registration_hook(_move_to_meta)  # type: ignore[arg-type]
    try:
        with recording.record_operations():
            yield recording
    finally:
        hook.remove()


def _move_to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    """Move a parameter to the meta device when a module registers it.

    torch calls this function as a parameter registration hook. A returned parameter is registered
    instead of the original one. If the function returns None, the original one is registered.

    Args:
        module: Module that registers the parameter. Not used.
        name: Name of the parameter in the module. Not used.
        parameter: The parameter. May be None.

    Returns:
        A copy on the meta device, with the attributes that the model has set on the parameter. None
        if ``parameter`` is None or already on the meta device.
    """
    if parameter is None or parameter.is_meta:
        return None  # keeps the parameter unchanged
    moved = nn.Parameter(
        torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"),
        requires_grad=parameter.requires_grad,
    )
    # Copy only attributes that the model has set. A fake tensor also has internal attributes.
    attributes = vars(parameter).keys() - vars(parameter.detach()).keys() - {"_is_param"}
    for key in attributes:
        setattr(moved, key, vars(parameter)[key])
    return moved


def assign_recorded_values(model: nn.Module, recording: InitializationRecording) -> None:
    """Replace a model's fake tensors, except its parameters, with tensors that have values.

    The replaced tensors are buffers and plain attributes of modules. They receive the values that
    the recorded operations compute. A buffer that is on the meta device was created as a parameter
    and became a buffer later, so its values were not recorded. Such a buffer is replaced with zeros
    on the CPU.

    Args:
        model: A model that was built within :func:`create_parameters_on_meta`. Modified in place.
        recording: Recording that :func:`create_parameters_on_meta` yielded when the model was
            built.
    """
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if recording.is_recorded(buffer):
                setattr(module, name, to_torch(recording.build_deferred_tensor(buffer).read()))
            elif buffer.is_meta:  # created as a parameter, so its values are undefined
                setattr(module, name, torch.zeros_like(buffer, device="cpu"))
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor) and recording.is_recorded(value):
                setattr(module, name, to_torch(recording.build_deferred_tensor(value).read()))
