"""Activation offloading, which keeps tensors saved for the backward pass in host memory.

The tensors that one layer saves form a group. On a GPU, a group is copied to the host on a separate
stream, while the default stream computes the next layer. Then the default stream waits for the
copies, and the device memory of the group is released.

In the backward pass, each group is prefetched. When the backward pass of a layer first reads a
saved tensor, the copy of the preceding layer's group back to the device starts, because that group
is needed next. The device therefore holds the saved tensors of about two layers.

Copies do not change any values, so the gradients are bit-identical with and without offloading.
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
"""Minimum size of an offloaded tensor, in bytes. For smaller tensors, the overhead of a copy is too large."""
_MAX_WAITING_GROUPS = 1
"""Number of layers whose copies to the host may still run while the next layer is computed."""


class TensorCopier(Protocol):
    """Interface for asynchronous copies between a device and its host."""

    def copy_to_host(self, tensor: Tensor) -> Any:
        """Start copying a tensor to the host, and return a handle for :meth:`copy_to_device`."""

    def copy_to_device(self, copies: list[Any]) -> list[Tensor]:
        """Start copying tensors back to their devices, and return the device tensors.

        Args:
            copies: Results of :meth:`copy_to_host`.
        """

    def record_copies(self) -> Any:
        """Record and return an event that completes when all copies started so far are done."""

    def wait_for_copies(self, event: Any) -> None:
        """Make the current stream wait for an event from :meth:`record_copies`.

        The host does not wait.
        """


class StreamCopier:
    """Copier that moves tensors between a GPU and page-locked host memory on a separate stream.

    On the CPU and on the meta device, which is used for trial passes, no stream is used. A tensor
    is copied to new memory on the same device, and copying it back returns that copy.
    """

    def __init__(self) -> None:
        self._stream: torch.Stream | None = None

    def copy_to_host(self, tensor: Tensor) -> tuple[Tensor, torch.device]:
        """Start copying a tensor to the host.

        The caller must keep a reference to the tensor until the copy is complete.

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
            The device tensors. They are allocated on the current stream. Before this stream uses
            them, the caller must make it wait for the copies.
        """
        if self._stream is None:
            return [host_copy for host_copy, _ in copies]
        tensors = [torch.empty_like(host_copy, device=device) for host_copy, device in copies]
        # Earlier operations of the current stream may still use the memory that was reused for the new
        # tensors.
        self._stream.wait_stream(torch.accelerator.current_stream(self._stream.device))
        with self._stream:
            for tensor, (host_copy, _) in zip(tensors, copies, strict=True):
                tensor.copy_(host_copy, non_blocking=True)
        return tensors

    def record_copies(self) -> torch.Event | None:
        """Record and return an event that completes when all copies started so far are done.

        Returns None if no stream is used, as on a CPU.
        """
        return None if self._stream is None else self._stream.record_event()

    def wait_for_copies(self, event: torch.Event | None) -> None:
        """Make the current stream wait for an event. Does nothing on a CPU."""
        if event is not None:
            assert self._stream is not None
            torch.accelerator.current_stream(self._stream.device).wait_event(event)


class ActivationOffloader:
    """Offloader that keeps tensors saved for the backward pass in host memory.

    The offloader runs the layers of a model. In the forward pass, it copies the tensors that each
    layer saves to the host. In the backward pass, it copies them back. The tensors of the last
    layers also stay on the device, because the backward pass needs them first.

    Args:
        copier: Object that copies tensors between the device and the host. If it is None, a new
            :class:`StreamCopier` is used.
    """

    def __init__(self, copier: TensorCopier | None = None) -> None:
        self.copier: TensorCopier = StreamCopier() if copier is None else copier
        self._waiting_groups: deque[_SavedTensorGroup] = deque()
        self._get_latest_group: Callable[[], _SavedTensorGroup | None] = lambda: None

    def __deepcopy__(self, _: Any) -> ActivationOffloader:
        """Return a new offloader, because a copied model does not share saved tensors with the original."""
        return ActivationOffloader(self.copier)

    def run_layer(self, function: Callable[[], Any], resident_tensors: Iterable[Tensor]) -> Any:
        """Run the forward pass of a layer, and offload the tensors that it saves for the backward pass.

        If gradients are disabled, nothing is offloaded.

        Args:
            function: Function that runs the forward pass.
            resident_tensors: Tensors that remain on the device, such as the weights and buffers of
                the layer, and inputs that other layers use as well.

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
        """Make the current stream wait for the unfinished copies to the host.

        These are the copies of the last layers. The backward pass starts with these layers, and
        uses their saved tensors that are still on the device. The wait ensures that the memory of
        these tensors is not reused while they are still being copied.
        """
        while self._waiting_groups:
            self.copier.wait_for_copies(self._waiting_groups.popleft().copied)


class _SavedTensorGroup:
    """Group of the offloaded saved tensors of a layer, which are copied back together.

    :meth:`pack` and :meth:`unpack` are the saved-tensor hooks of the layer.

    Args:
        offloader: Offloader of the model.
        resident_storages: Identifiers of the storages that remain on the device.

    Attributes:
        copied: Event from :meth:`TensorCopier.record_copies` for the copies to the host. None
            before :meth:`end_forward`.
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
        """Start copying a saved tensor to the host. This is autograd's pack hook.

        A tensor remains on the device if other layers use it as well, or if it is not suitable for
        offloading, for example because it is too small or has expanded dimensions (see
        :func:`_can_offload`). A tensor that several operations save is copied only once.

        Returns:
            Index of the tensor in this group, for :meth:`unpack`. ``tensor`` itself if it remains
            on the device.
        """
        storage = _get_storage_id(tensor) if _can_offload(tensor) else None
        if storage is None or storage in self._resident_storages:
            return tensor
        assert self._device_tensors is not None
        # Copy a tensor only once if several operations save it, such as the input of several projections.
        version = torch_internals.get_version(tensor)
        key = (storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, version)
        if key not in self._indices:
            self._indices[key] = len(self._copies)
            self._copies.append(self._offloader.copier.copy_to_host(tensor))
            self._device_tensors.append(tensor)
        return self._indices[key]

    def end_forward(self, get_previous_group: Callable[[], _SavedTensorGroup | None]) -> None:
        """Finish recording the saved tensors of a layer after its forward pass.

        Records an event that completes when the copies of these tensors to the host are done.

        Args:
            get_previous_group: Function that returns the group of the previous layer, which the
                backward pass prefetches when it first uses this group. It returns None if there is
                no such group.
        """
        self._indices.clear()
        self._get_previous_group = get_previous_group
        self.copied = self._offloader.copier.record_copies()

    def release_device_tensors(self) -> None:
        """Release the device memory of the saved tensors after their copies to the host are complete.

        The current stream waits for the copies, without a host sync.
        """
        self._offloader.copier.wait_for_copies(self.copied)
        self._device_tensors = None

    def load(self) -> None:
        """Start copying the tensors to the device, unless they are already there."""
        if self._device_tensors is None:
            self._device_tensors = self._offloader.copier.copy_to_device(self._copies)
            self._loaded = self._offloader.copier.record_copies()

    def unpack(self, packed: Tensor | int) -> Tensor:
        """Return a saved tensor on the device. This is autograd's unpack hook.

        The first call for a layer calls :meth:`ActivationOffloader.begin_backward` and
        :meth:`load`, and makes the current stream wait for the copies to the device. Then it starts
        copying the saved tensors of the previous layer to the device.
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
        """Make the current stream wait for the copies to the device if they were never used.

        This is the case if the backward pass does not reach the layer. Without the wait, the device
        memory could be reused while a copy is still running.
        """
        if self._loaded is not None and not self._is_used:
            self._offloader.copier.wait_for_copies(self._loaded)


def _can_offload(tensor: Tensor) -> bool:
    """Return whether a saved tensor is suitable for offloading.

    A suitable tensor is strided, has at least :data:`MIN_OFFLOADED_BYTES` bytes, and has no
    expanded dimensions. Tensor subclasses, such as parameters, are not suitable, except for fake
    tensors.
    """
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
        """Run the wrapped forward pass and offload the tensors that it saves.

        Of the layer's inputs, only the first positional argument, the hidden states, may be
        offloaded. Weights and buffers remain on the device.
        """
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
    """Offload the activations of transformer layers to host memory.

    Without activation checkpointing, the activations are the tensors that a layer saves for the
    backward pass. Weights, masks and other tensors that several layers use remain on the device.
    With activation checkpointing, only the inputs of the layers are offloaded. The other tensors
    are handled by activation checkpointing, which recomputes them or, in the mode ``selective``,
    keeps some of them on the device.

    Args:
        model: A transformers model, after activation checkpointing has been enabled. Modified in
            place.
        recompute: Value of ``memory.activation_checkpointing``.
        copier: Object that copies tensors between the device and the host. None for
            :class:`StreamCopier`.
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
