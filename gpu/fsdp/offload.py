"""``memory.offload_optimizer: cpu``: the optimizer's state and its step in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from portable.optim.sharded import local

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor


class HostCopies:
    """A copy in host memory of what this rank holds of each parameter, for an optimizer to work on.

    Sharded parameters have sharded copies, so that optimizers which know shards, and checkpoints, find what
    they would find on the device.

    Args:
        parameters: by name, on the device.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self.copies = {name: nn.Parameter(_on_host(p)) for name, p in self._parameters.items()}
        self._gradients: dict[str, Tensor] = {}

    def original(self) -> dict[Tensor, nn.Parameter]:
        """The parameter on the device that each copy is of."""
        return {self.copies[name]: parameter for name, parameter in self._parameters.items()}

    @torch.no_grad()
    def refresh(self, names: Iterable[str]) -> None:
        """Copy the values of the parameters that are among ``names`` from the device."""
        for name in self._parameters.keys() & set(names):
            local(self.copies[name]).copy_(local(self._parameters[name]))

    @torch.no_grad()
    def fetch_gradients(self) -> None:
        """Move all gradients from the device to the copies."""
        for name, parameter in self._parameters.items():
            if parameter.grad is None:
                self.copies[name].grad = None
                continue
            if name not in self._gradients:
                self._gradients[name] = _on_host(parameter.grad)
            local(self._gradients[name]).copy_(local(parameter.grad), non_blocking=True)
            self.copies[name].grad = self._gradients[name]
            parameter.grad = None
        _wait(self._parameters)

    @torch.no_grad()
    def give_back(self) -> None:
        """Copy the values back to the device, ahead of whatever it does next."""
        for name, parameter in self._parameters.items():
            local(parameter).copy_(local(self.copies[name]), non_blocking=True)


def _wait(parameters: Mapping[str, nn.Parameter]) -> None:
    device = next(iter(parameters.values())).device
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _on_host(tensor: Tensor) -> Tensor:
    """Room for ``tensor`` in host memory, page-locked where a GPU copies to it; sharded as it is."""
    part = local(tensor.detach())
    room = torch.empty_like(part, device="cpu", pin_memory=part.device.type == "cuda")
    if not isinstance(tensor, DTensor):
        return room
    # Not from_local, which would move it to the devices of the mesh.
    return DTensor(room, tensor._spec, requires_grad=False)
