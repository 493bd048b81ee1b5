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
"""Number of elements of the smallest tensor that is recorded instead of allocated in host memory."""


@contextmanager
def create_parameters_on_meta() -> Iterator[InitializationRecording]:
    """Move each parameter to the meta device as soon as a module registers it, until the context ends.

    A constructor has to create a parameter before it registers it, and the stacked experts of one layer
    can take up tens of gigabytes. Large tensors are therefore created as fake tensors, without values.
    The operations on them are recorded, because a buffer may be computed from them.

    Yields:
        The recording, for :func:`assign_recorded_values`.
    """
    recording = InitializationRecording(0, min_elements=_MIN_RECORDED_ELEMENTS)
    hook = register_module_parameter_registration_hook(_move_to_meta)  # type: ignore[arg-type]
    try:
        with recording.record_operations():
            yield recording
    finally:
        hook.remove()


def _move_to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    """Replace a parameter by a copy on the meta device, as a parameter registration hook of torch.

    Returns:
        The copy, with the attributes that the model has set on the parameter. None to keep the
        parameter, if it is None or already on the meta device.
    """
    if parameter is None or parameter.is_meta:
        return None  # unchanged
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
    """Replace all fake tensors of a model, except its parameters, by tensors with the recorded values.

    The replaced tensors are buffers and plain attributes of modules. Buffers on the meta device are
    filled with zeros.

    Args:
        model: A model that was built within :func:`create_parameters_on_meta`. Modified in place.
        recording: The recording of this context.
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
