"""Host copies of the trained parameters, for an optimizer that runs on the CPU.

The optimizer updates these copies, so its state is also in host memory. This module is part of
``memory.offload_optimizer: cpu``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from portable.optim.local_shards import to_local
from portable.private import torch_internals

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor


class HostParameterCopies:
    """Host copies of this rank's shards of the trained parameters. The optimizer updates the copies.

    Each step calls :meth:`move_gradients_to_host`, then the optimizer, then :meth:`copy_to_device`. The
    copy of a DTensor is also a DTensor, so that optimizers and checkpoints need no special case. The
    copies are uninitialized until :meth:`copy_from_device` is called.

    Args:
        parameters: Parameters on the device, keyed by name. Frozen parameters are ignored.

    Attributes:
        copies: Host copies, keyed by parameter name.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self.copies = {name: nn.Parameter(_allocate_host_tensor(p)) for name, p in self._parameters.items()}
        self._gradients: dict[str, Tensor] = {}

    def map_copies_to_parameters(self) -> dict[Tensor, nn.Parameter]:
        """Return a dict that maps each host copy to its parameter on the device."""
        return {self.copies[name]: parameter for name, parameter in self._parameters.items()}

    @torch.no_grad()
    def copy_from_device(self, names: Iterable[str]) -> None:
        """Copy the values of some parameters from the device to host memory.

        Args:
            names: Names of the parameters. Names without a host copy are ignored.
        """
        for name in self._parameters.keys() & set(names):
            to_local(self.copies[name]).copy_(to_local(self._parameters[name]))

    @torch.no_grad()
    def move_gradients_to_host(self) -> None:
        """Move all gradients to the ``grad`` attributes of the host copies, and wait for the transfer.

        The parameters on the device have no gradients afterwards.
        """
        for name, parameter in self._parameters.items():
            if parameter.grad is None:
                self.copies[name].grad = None
                continue
            if name not in self._gradients:
                self._gradients[name] = _allocate_host_tensor(parameter.grad)
            to_local(self._gradients[name]).copy_(to_local(parameter.grad), non_blocking=True)
            self.copies[name].grad = self._gradients[name]
            parameter.grad = None
        _wait_for_device(self._parameters)

    @torch.no_grad()
    def copy_to_device(self) -> None:
        """Enqueue copies of all parameters from host memory to the device, on its current stream."""
        for name, parameter in self._parameters.items():
            to_local(parameter).copy_(to_local(self.copies[name]), non_blocking=True)


def _wait_for_device(parameters: Mapping[str, nn.Parameter]) -> None:
    device = next(iter(parameters.values())).device
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()


def _allocate_host_tensor(tensor: Tensor) -> Tensor:
    """Allocate uninitialized host memory for a tensor.

    The memory is pinned if the tensor is on a GPU. For a DTensor, the result is a DTensor with the same
    sharding.
    """
    part = to_local(tensor.detach())
    memory = torch.empty_like(part, device="cpu", pin_memory=part.device.type != "cpu")
    return torch_internals.build_dtensor_like(tensor, memory) if isinstance(tensor, DTensor) else memory
