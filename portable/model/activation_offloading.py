"""Activation offloading: saved tensors of layers are in host memory between the forward and backward pass.

On a GPU, the copies run on a separate stream, while the default stream computes the next layer. Each layer
has a group of saved tensors. Their device memory is released when the next layer has been computed, because
the default stream then waits for the copies of the group. In the backward pass, the first saved tensor that a
layer needs starts the copies of the previous layer to the device. The device therefore holds the saved
tensors of about two layers.

Copies do not change any values, so the gradients have the same bits as without offloading.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.autograd.graph import saved_tensors_hooks

from portable.model.forward import ForwardWrapper
from portable.model.layers import find_transformer_layers
from portable.private import torch_internals, transformers_internals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor, nn

MIN_OFFLOADED_BYTES = 1024
"""Size of the smallest tensors that are offloaded, because copies of smaller tensors take more time."""
_MAX_WAITING_GROUPS = 1
"""Number of groups whose copies may still run while the next layer is computed."""


class TensorCopier(Protocol):
    """Interface of the copies between a device and its host."""

    def copy_to_host(self, tensor: Tensor) -> Any:
        """Start copying a tensor to the host, and return the copy."""

    def copy_to_device(self, copies: list[Any]) -> list[Tensor]:
        """Start copying tensors to their devices, and return the tensors on the devices."""

    def record_copies(self) -> Any:
        """Return an event that occurs when all copies that have been started are complete."""

    def wait_for_copies(self, event: Any) -> None:
        """Make the current stream wait for an event of :meth:`record_copies`, without a host sync."""


class StreamCopier:
    """Copies tensors from a GPU to page-locked host memory and back, on a separate stream.

    On a CPU, a tensor is copied to other host memory, and there is no stream. The same is true on the meta
    device, on which trial passes run.
    """

    def __init__(self) -> None:
        self._stream: torch.Stream | None = None

    def copy_to_host(self, tensor: Tensor) -> tuple[Tensor, torch.device]:
        """Start copying a tensor to the host. The caller keeps the tensor until the copy is complete.

        Args:
            tensor: Tensor on a device.

        Returns:
            The copy, and the device of the tensor.
        """
        if tensor.device.type in ("cpu", "meta"):
            return tensor.clone(), tensor.device
        if self._stream is None:
            self._stream = torch.Stream(tensor.device)
        self._stream.wait_stream(torch.accelerator.current_stream(tensor.device))
        host_copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
        with self._stream:
            host_copy.copy_(tensor, non_blocking=True)
        return host_copy, tensor.device

    def copy_to_device(self, copies: list[tuple[Tensor, torch.device]]) -> list[Tensor]:
        """Start copying tensors back to their devices.

        Args:
            copies: Results of :meth:`copy_to_host`.

        Returns:
            The tensors. Their memory belongs to the current stream, which has to wait for the copies.
        """
        if self._stream is None:
            return [host_copy for host_copy, _ in copies]
        tensors = [torch.empty_like(host_copy, device=device) for host_copy, device in copies]
        # Earlier operations of the current stream may still use the memory of the new tensors.
        self._stream.wait_stream(torch.accelerator.current_stream(self._stream.device))
        with self._stream:
            for tensor, (host_copy, _) in zip(tensors, copies, strict=True):
                tensor.copy_(host_copy, non_blocking=True)
        return tensors

    def record_copies(self) -> torch.Event | None:
        """Return an event after all copies that have been started. None on a CPU."""
        return None if self._stream is None else self._stream.record_event()

    def wait_for_copies(self, event: torch.Event | None) -> None:
        """Make the current stream wait for an event. Does nothing on a CPU."""
        if event is not None:
            assert self._stream is not None
            torch.accelerator.current_stream(self._stream.device).wait_event(event)


class ActivationOffloader:
    """Offloading of the saved tensors of consecutive layers.

    Args:
        copier: Copies between the device and the host.
    """

    def __init__(self, copier: TensorCopier | None = None) -> None:
        self.copier: TensorCopier = StreamCopier() if copier is None else copier
        self._waiting_groups: deque[_SavedTensorGroup] = deque()
        self._get_latest_group: Callable[[], _SavedTensorGroup | None] = lambda: None

    def __deepcopy__(self, _: Any) -> ActivationOffloader:
        """Return a new object, because a copy of a model shares no saved tensors with the model."""
        return ActivationOffloader(self.copier)

    def run_layer(self, function: Callable[[], Any], resident_tensors: Iterable[Tensor]) -> Any:
        """Run the forward pass of a layer, and offload the tensors that it saves for the backward pass.

        Args:
            function: Function that runs the forward pass.
            resident_tensors: Tensors that remain on the device, because other layers use them as well.

        Returns:
            The result of ``function``.
        """
        if not torch.is_grad_enabled():
            return function()
        while len(self._waiting_groups) > _MAX_WAITING_GROUPS:
            self._waiting_groups.popleft().release_device_tensors()
        group = _SavedTensorGroup(self, {_get_storage_id(tensor) for tensor in resident_tensors})
        with saved_tensors_hooks(group.pack, group.unpack):
            result = function()
        group.end_forward(self._get_latest_group)
        self._get_latest_group = weakref.ref(group)
        self._waiting_groups.append(group)
        # Otherwise autocast would keep its copies of the layer's weights until the end of the forward pass.
        torch.clear_autocast_cache()
        return result

    def begin_backward(self) -> None:
        """Wait for the copies of the last layers, whose tensors are still on the device."""
        while self._waiting_groups:
            self.copier.wait_for_copies(self._waiting_groups.popleft().copied)


class _SavedTensorGroup:
    """Saved tensors of a layer, which are copied together.

    Args:
        offloader: Offloader of the model.
        resident_storages: Identifiers of the storages that remain on the device.
    """

    def __init__(self, offloader: ActivationOffloader, resident_storages: set[int]) -> None:
        self.copied: Any = None
        self._offloader = offloader
        self._resident_storages = resident_storages
        self._indices: dict[Any, int] = {}
        self._copies: list[Any] = []
        self._device_tensors: list[Tensor] | None = []
        self._loaded: Any = None
        self._is_used = False
        self._get_previous_group: Callable[[], _SavedTensorGroup | None] = lambda: None

    def pack(self, tensor: Tensor) -> Tensor | int:
        """Start copying a saved tensor to the host. This is a hook of autograd.

        Returns:
            Index of the tensor in the group. ``tensor`` itself if it remains on the device.
        """
        storage = _get_storage_id(tensor) if _can_offload(tensor) else None
        if storage is None or storage in self._resident_storages:
            return tensor
        assert self._device_tensors is not None
        # Operations often save the same tensor, for example the input of several projections.
        version = torch_internals.get_version(tensor)
        key = (storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, version)
        if key not in self._indices:
            self._indices[key] = len(self._copies)
            self._copies.append(self._offloader.copier.copy_to_host(tensor))
            self._device_tensors.append(tensor)
        return self._indices[key]

    def end_forward(self, get_previous_group: Callable[[], _SavedTensorGroup | None]) -> None:
        """End the forward pass of the layer.

        Args:
            get_previous_group: Function that returns the group of the previous layer, which the backward pass
                needs next, or None.
        """
        self._indices.clear()
        self._get_previous_group = get_previous_group
        self.copied = self._offloader.copier.record_copies()

    def release_device_tensors(self) -> None:
        """Make the current stream wait for the copies, and release the device memory of the tensors."""
        self._offloader.copier.wait_for_copies(self.copied)
        self._device_tensors = None

    def load(self) -> None:
        """Start copying the tensors to the device, unless they are there."""
        if self._device_tensors is None:
            self._device_tensors = self._offloader.copier.copy_to_device(self._copies)
            self._loaded = self._offloader.copier.record_copies()

    def unpack(self, packed: Tensor | int) -> Tensor:
        """Return a saved tensor, on the device. This is a hook of autograd.

        The first call for a layer waits for the copies of the layer, and starts the copies of the previous
        layer.
        """
        if isinstance(packed, torch.Tensor):
            return packed
        if not self._is_used:
            self._is_used = True
            self._offloader.begin_backward()
            self.load()
            self._offloader.copier.wait_for_copies(self._loaded)
            if (previous_group := self._get_previous_group()) is not None:
                previous_group.load()
        assert self._device_tensors is not None
        return self._device_tensors[packed]

    def __del__(self) -> None:
        """Wait for copies that no operation needed, before their memory is used again."""
        if self._loaded is not None and not self._is_used:
            self._offloader.copier.wait_for_copies(self._loaded)


def _can_offload(tensor: Tensor) -> bool:
    """Return whether a saved tensor is a plain tensor that is large enough, without repeated elements."""
    if type(tensor) is not torch.Tensor and not torch_internals.is_fake_tensor(tensor):
        return False
    num_bytes = tensor.numel() * tensor.element_size()
    return tensor.layout == torch.strided and num_bytes >= MIN_OFFLOADED_BYTES and 0 not in tensor.stride()


def _get_storage_id(tensor: Tensor) -> int:
    """Return the identifier of a tensor's storage, which is unique while the storage exists."""
    identifier: int = torch_internals.get_storage_id(tensor.untyped_storage())
    return identifier


class _OffloadedForward(ForwardWrapper):
    """Forward method of a layer whose saved tensors are offloaded.

    Args:
        layer: Transformer layer.
        offloader: Offloader of the model.
    """

    def __init__(self, layer: nn.Module, offloader: ActivationOffloader) -> None:
        super().__init__(layer)
        self._layer = layer
        self._offloader = offloader

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Run the wrapped forward pass. Only the first argument, the hidden states, may be offloaded."""
        shared_inputs = [
            value
            for value in torch_internals.tree_leaves((arguments[1:], keywords))
            if isinstance(value, torch.Tensor) and type(value) is torch.Tensor
        ]
        weights = [p for p in self._layer.parameters() if type(p) is torch.nn.Parameter]
        return self._offloader.run_layer(
            lambda: self.__wrapped__(*arguments, **keywords),
            [*weights, *self._layer.buffers(), *shared_inputs],
        )


def offload_activations(model: nn.Module, recompute: str, copier: TensorCopier | None = None) -> None:
    """Offload the activations of transformer layers.

    Without activation checkpointing, these are the tensors that a layer saves for the backward pass. Weights,
    masks and other tensors that several layers use remain on the device. With activation checkpointing, these
    are the inputs of the layers. The hooks of checkpointing inside of a layer handle the other tensors.

    Args:
        model: A transformers model, after activation checkpointing has been enabled. It is changed in place.
        recompute: Value of ``memory.activation_checkpointing``.
        copier: Copies between the device and the host. None for :class:`StreamCopier`.
    """
    offloader = ActivationOffloader(copier)
    if recompute == "none":
        for _, layer in find_transformer_layers(model):
            changed: Any = layer
            changed.forward = _OffloadedForward(layer, offloader)
        return

    def wrap_checkpoint(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        def checkpoint_with_offloaded_inputs(*arguments: Any, **keywords: Any) -> Any:
            return offloader.run_layer(lambda: checkpoint(*arguments, **keywords), ())

        return checkpoint_with_offloaded_inputs

    transformers_internals.wrap_activation_checkpointing(model, wrap_checkpoint)
