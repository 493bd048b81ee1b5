"""Run the forward pass of a model on batches with images.

For a micro-batch without images, the model still runs its image tower, on a blank image whose
features are multiplied by 0. Otherwise, engines that gather the tower's parameters on all ranks
would wait for the ranks without images.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, cast

import torch

from portable.batch import BLANK_PREFIX
from portable.errors import UserError
from portable.model.forward import ForwardWrapper

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor, nn

    from portable.model.forward import Model


_UNUSED_OUTPUTS = ("last_hidden_state", "hidden_states", "attentions")
"""Outputs of image towers that models do not use if there are other outputs."""


class ImageForward(ForwardWrapper):
    """Forward method that can also run the model's image tower on a blank image.

    Engines that gather the tower's parameters require that all ranks run the tower. A micro-batch
    without images therefore contains a blank image, in columns with the prefix ``blank_``. The
    blank image has no effect on the model's output.

    Some models have several position axes for images, and a method ``get_rope_index``. In such a
    model, the ``position_ids`` of packed documents are replaced by the positions on all axes.

    Args:
        model: An unwrapped transformers model that accepts images.

    Raises:
        UserError: If the model does not accept images.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._model: Any = model
        get_image_features: Any = getattr(model, "get_image_features", None)
        if not callable(get_image_features):
            raise UserError(
                f"data.images: {type(model).__name__} does not accept images; set model.name_or_path to a "
                "model that accepts images, or set data.images: false and remove the images from the data"
            )
        body = next((part for part in (model, model.base_model) if hasattr(part, "get_rope_index")), None)
        self._get_rope_index: Any = None if body is None else body.get_rope_index
        self._feature_inputs = inspect.signature(get_image_features).parameters.keys()

    def __call__(self, *arguments: Any, **inputs: Any) -> Any:
        """Run the forward pass and, for inputs with a blank image, also the image tower.

        A micro-batch without images contains a blank image, because all ranks must run the tower.
        Otherwise, engines that gather the tower's parameters on all ranks would wait for this rank.
        The features of the blank image are multiplied by 0 and have no effect on the output.

        If the model has a method ``get_rope_index``, ``position_ids`` in the inputs are replaced by
        the result of :meth:`_compute_packed_positions`.

        Args:
            arguments: Positional arguments of the model.
            inputs: Keyword arguments of the model. The names of a blank image's columns begin with
                ``blank_``.
        """
        if inputs.get("position_ids") is not None and self._get_rope_index is not None:
            inputs["position_ids"] = self._compute_packed_positions(inputs)
        blank = {
            name.removeprefix(BLANK_PREFIX): inputs.pop(name)
            for name in list(inputs)
            if name.startswith(BLANK_PREFIX)
        }
        if not blank:
            return self.__wrapped__(*arguments, **inputs)
        features = {name: tensor for name, tensor in blank.items() if name in self._feature_inputs}

        def add_blank_features(module: nn.Module, _: Any, embeddings: Tensor) -> Tensor:
            # Models run the tower after they have looked up the embeddings of the tokens. All ranks must run
            # the modules in the same order, because the engines gather the parameters and reduce the
            # gradients in this order.
            output = _select_used_outputs(self._model.get_image_features(**features))
            zero = sum(tensor.float().sum() * 0 for tensor in _iter_tensors(output))
            return embeddings + torch.as_tensor(zero, dtype=embeddings.dtype, device=embeddings.device)

        hook = _find_last_embedding(self._model).register_forward_hook(add_blank_features)
        try:
            return self.__wrapped__(*arguments, **inputs)
        finally:
            hook.remove()

    def _compute_packed_positions(self, inputs: Mapping[str, Any]) -> Tensor:
        """Compute the positions of packed documents for a model with three position axes.

        The model's own function computes the positions of each document that contains images. In
        all other documents, a token has the same position on all axes. The host waits for the
        device, because the positions are computed on the host.

        Args:
            inputs: Arguments of the model. ``position_ids`` begin at 0 in each document, int64
                ``[batch, tokens]``.

        Returns:
            Text positions, followed by the positions in time, height and width, int64 ``[4, batch,
            tokens]``.
        """
        positions = inputs["position_ids"]
        on_host = positions.cpu()
        ids, types = inputs["input_ids"].cpu(), inputs["mm_token_type_ids"].cpu()
        computed = on_host[None].repeat(4, 1, 1)
        starts = (on_host == 0).long().cumsum(dim=1)
        documents = [
            (row, torch.nonzero(starts[row] == number)[:, 0])
            for row in range(len(ids))
            for number in starts[row][types[row] > 0].unique().tolist()
        ]
        if not documents:
            return cast("Tensor", computed.to(positions.device))
        length = max(len(places) for _, places in documents)
        padded = {
            name: torch.zeros(len(documents), length, dtype=torch.long) for name in ("ids", "types", "mask")
        }
        for index, (row, places) in enumerate(documents):
            padded["ids"][index, : len(places)] = ids[row, places]
            padded["types"][index, : len(places)] = types[row, places]
            padded["mask"][index, : len(places)] = 1
        result, _ = self._get_rope_index(
            input_ids=padded["ids"],
            mm_token_type_ids=padded["types"],
            image_grid_thw=inputs["image_grid_thw"].cpu(),
            attention_mask=padded["mask"],
        )
        for index, (row, places) in enumerate(documents):
            computed[1:, row, places] = result[:, index, : len(places)]
        return cast("Tensor", computed.to(positions.device))


def _find_last_embedding(model: Any) -> nn.Module:
    """Find the token embedding that a model looks up last before it runs the image tower.

    This is the input embedding, except in models such as Gemma 4. They have a second token
    embedding, ``embed_tokens_per_layer``, with one part for each layer.
    """
    embedding: nn.Module = model.get_input_embeddings()
    for module in model.modules():
        children = dict(module.named_children())
        if embedding in children.values():
            last: nn.Module = children.get("embed_tokens_per_layer", embedding)
            return last
    return embedding


def _select_used_outputs(output: Any) -> Any:
    """Select the outputs of ``get_image_features`` that the model's forward method uses.

    Removes ``last_hidden_state``, ``hidden_states`` and ``attentions`` if at least one other output
    remains, such as ``pooler_output``. The selection makes all ranks use the same outputs,
    including ranks without images. ZeRO-3 gathers a module's parameters for each output that has a
    gradient, and all ranks must take part.
    """
    if not isinstance(output, dict):
        return output
    return {name: value for name, value in output.items() if name not in _UNUSED_OUTPUTS} or output


def _iter_tensors(output: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors in the output of a module."""
    if isinstance(output, torch.Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _iter_tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _iter_tensors(value)


def has_image_forward(model: nn.Module) -> bool:
    """Return whether :func:`install_image_forward` has changed the model."""
    forward: Any = model.forward
    while isinstance(forward, ForwardWrapper):
        if isinstance(forward, ImageForward):
            return True
        forward = forward.__wrapped__
    return False


def install_image_forward(model: Model) -> Model:
    """Make a model run its image tower for every micro-batch, even without images.

    Engines that gather the tower's parameters require that all ranks run the tower. A micro-batch
    without images therefore contains a blank image, in columns with the prefix ``blank_``. The
    tower runs on the blank image, but its features do not affect the model's output. See
    :class:`ImageForward`.

    Args:
        model: An unwrapped transformers model that accepts images.

    Returns:
        The same model.

    Raises:
        UserError: If the model does not accept images.
    """
    return ImageForward.install(model)
