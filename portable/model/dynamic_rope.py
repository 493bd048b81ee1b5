"""Rotary embeddings whose frequencies depend on the length of each text.

LongRoPE uses different factors for short and long sequences, and dynamic NTK scaling changes the
base with the length. transformers derives the length from the largest position in a forward pass.
The result for a sequence would therefore depend on padding and on the other sequences in the
micro-batch. This module passes the length of each text to the rotary embeddings instead, so that a
text gets the same rotations as in a separate forward pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from portable.batch import TEXT_TOKENS_COLUMN
from portable.data.samples.base import compute_document_lengths
from portable.errors import UserError
from portable.model.forward import ForwardWrapper
from portable.private.transformers_internals import RotaryEmbedding, list_rope_types

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn
    from transformers import PretrainedConfig

    from portable.config import RunConfig
    from portable.model.forward import Model

_LENGTH_DEPENDENT_ROPE_TYPES = ("longrope", "dynamic")
_RENAMED_ROPE_TYPES = {"su": "longrope"}
"""Current names of RoPE types, keyed by the former names, which custom code may still use."""


def is_length_dependent(rope_type: str) -> bool:
    """Return whether the frequencies of a rope type depend on the sequence length.

    This applies to all rope types whose names contain ``longrope`` or ``dynamic``.
    """
    return any(name in rope_type for name in _LENGTH_DEPENDENT_ROPE_TYPES)


def _list_rope_settings(config: PretrainedConfig) -> list[Any]:
    """List the RoPE settings of a config: the common mapping, followed by the mapping of each layer type.

    The common mapping is empty if the model has no RoPE settings. Only some models have mappings per
    layer type.
    """
    text = config.get_text_config()
    # Custom code may still use the former name `rope_scaling`.
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    return [rope, *(value for value in rope.values() if isinstance(value, dict))]


def has_length_dependent_rope(config: PretrainedConfig) -> bool:
    """Return whether the rotary embeddings of a model depend on the length of the sequence."""
    types = [str(scope.get("rope_type") or scope.get("type", "")) for scope in _list_rope_settings(config)]
    return any(is_length_dependent(_RENAMED_ROPE_TYPES.get(rope_type, rope_type)) for rope_type in types)


def check_custom_rotary_layers(model: Any, config: RunConfig) -> None:
    """Check that padding does not affect length-dependent RoPE in a model's custom code.

    :func:`install_text_length_forward` supports only the rotary embeddings of transformers. The
    embeddings are custom code if the config has a length-dependent rope type, but no module has
    such a type in an attribute ``rope_type``. Custom code derives the length from the padded
    sequence, so padding may change the frequencies. There is no problem in two cases:

    - ``data.packing`` is true. Packed samples then have no padding.
    - ``data.seq_len`` is at most the original number of positions. This number is
      ``original_max_position_embeddings`` or, if it is not set, ``max_position_embeddings``.

    Args:
        model: The model, on any device.
        config: The config of the run.

    Raises:
        UserError: If padding may change the frequencies.
    """
    rope_types = (rope_type for module in model.modules() for rope_type in list_rope_types(module).values())
    if not has_length_dependent_rope(model.config) or any(map(is_length_dependent, rope_types)):
        return
    limits = [scope.get("original_max_position_embeddings") for scope in _list_rope_settings(model.config)]
    text: Any = model.config.get_text_config()
    names = "original_max_position_embeddings", "max_position_embeddings"
    limits += [getattr(text, name, None) for name in names]
    limit = next((limit for limit in limits if isinstance(limit, int)), 0)
    if config.data.packing is True or config.data.seq_len <= limit:
        return
    raise UserError(
        f"data.seq_len: the custom code of {type(model).__name__} computes RoPE from the length of the "
        f"sample including padding; set data.seq_len to at most {limit}, set data.packing to true, or set "
        "model.trust_remote_code to false to use the code of transformers"
    )


def check_length_dependent_rope(config: PretrainedConfig, task: str, key: str) -> None:
    """Check that the text lengths are known if the model's rotary embeddings depend on them.

    The lengths are unknown for the padded targets of encoder-decoder models, and for the compressed
    tokens of DeepSeek-V4.

    Args:
        config: Transformers config of the model.
        task: The task of the run.
        key: Setting that specifies the model, used in error messages.

    Raises:
        UserError: If the model has such embeddings and the lengths are unknown.
    """
    if not has_length_dependent_rope(config):
        return
    if task == "seq2seq-lm":
        reason = "which is unknown for padded targets"
    elif config.get_text_config().model_type == "deepseek_v4":
        reason = "which is unknown for compressed tokens"
    else:
        return
    raise UserError(
        f"{key}: {config.model_type} has a rope_type that depends on the text length, {reason}; use "
        "another rope_type in model.config.rope_parameters"
    )


class TextLengthForward(ForwardWrapper):
    """Forward method that passes the length of each text to the rotary embeddings of a model.

    The constructor replaces the ``forward`` of each rotary embedding whose frequencies depend on
    the sequence length.

    Args:
        model: A transformers model, not wrapped.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._layers = [
            _TextLengthRotaryForward.install(module, types)
            for module in model.modules()
            if (types := _find_length_dependent_types(module))
        ]

    def __call__(self, *arguments: Any, **inputs: Any) -> Any:
        """Run the wrapped forward pass, and give the length of each text to the rotary layers.

        Only rotary layers whose frequencies depend on the sequence length use the text lengths. The
        batch contains the lengths in the column ``text_tokens`` if context parallelism is used. If
        this column is missing, the lengths are computed from the position ids or, without position
        ids, from the attention mask.

        In training, the lengths remain set after the forward pass, because the backward pass may
        recompute layers. Without ``input_ids``, the wrapped forward pass runs unchanged.
        """
        if "input_ids" not in inputs:
            return self.__wrapped__(*arguments, **inputs)
        text_lengths = (
            inputs[TEXT_TOKENS_COLUMN] if TEXT_TOKENS_COLUMN in inputs else compute_document_lengths(inputs)
        )
        for layer in self._layers:
            layer.text_lengths, layer.in_forward = text_lengths, True
        try:
            return self.__wrapped__(*arguments, **inputs)
        finally:
            for layer in self._layers:
                layer.in_forward = False


def install_text_length_forward(model: Model) -> Model:
    """Make length-dependent rotary embeddings use the length of each text.

    transformers itself uses the largest position in the micro-batch for all texts in it. Does
    nothing if the model has no length-dependent embeddings.

    Call this function after :func:`portable.model.document_attention.install_document_forward`. The
    forward method that is installed last runs first, and
    :class:`portable.model.document_attention.DocumentForward` removes the column ``text_tokens``.

    Args:
        model: A transformers model, before it is wrapped, for example by DDP. Its ``forward`` and
            the ``forward`` of the length-dependent embeddings are replaced.

    Returns:
        The same model.
    """
    if any(map(_find_length_dependent_types, model.modules())):
        TextLengthForward.install(model)
    return model


def _find_length_dependent_types(module: nn.Module) -> dict[str | None, str]:
    """Map the layer types of a rotary embedding to their length-dependent rope types.

    The frequencies of a length-dependent rope type, such as ``longrope``, depend on the sequence
    length. Layer types with any other rope type are omitted. If all layers have the same rope type,
    the only key is None. The result is empty if ``module`` is not a rotary embedding of
    transformers, or if none of its rope types depends on the length.
    """
    return {
        name: rope_type
        for name, rope_type in list_rope_types(module).items()
        if is_length_dependent(rope_type)
    }


class _TextLengthRotaryForward:
    """Forward method of a rotary embedding that selects the frequencies by the length of each text.

    Args:
        module: The rotary embedding.
        types: Length-dependent rope types, keyed by layer type. The layer type is None if all
            layers have the same rope type.

    Attributes:
        text_lengths: Length of the text of each token, int64 ``[batch, tokens]`` or ``[batch,
            1]``. None before the first forward pass.
        in_forward: Whether a forward pass that uses ``text_lengths`` is running.
    """

    def __init__(self, module: nn.Module, types: Mapping[str | None, str]) -> None:
        self._layer = RotaryEmbedding(module)
        self._rope_types = types
        self.text_lengths: Tensor | None = None
        self.in_forward = False

    @classmethod
    def install(cls, module: Any, types: Mapping[str | None, str]) -> _TextLengthRotaryForward:
        """Replace the ``forward`` of a rotary embedding with an instance of this class.

        If an earlier call has already done so, the existing instance is kept.

        Args:
            module: The rotary embedding. Modified in place.
            types: Length-dependent rope types, keyed by layer type. The key is None if all layers
                have the same rope type.

        Returns:
            The new or existing instance.
        """
        present = vars(module).get("forward")
        if not isinstance(present, cls):
            present = module.forward = cls(module, types)
        return present

    def __call__(
        self, x: Tensor, position_ids: Tensor, layer_type: str | None = None, **keywords: Any
    ) -> Any:
        """Compute the rotary cosines and sines of the positions, based on text lengths.

        The frequencies for a token depend on the length of the text that contains the token. The
        module's original forward method runs instead in the following cases:

        - ``text_lengths`` is None.
        - The module is in eval mode, and no forward pass of :class:`TextLengthForward` is running.
        - The rope type of ``layer_type`` does not depend on the text length.
        - The last dimension of ``text_lengths`` is neither 1 nor the number of positions. In this
          case, ``position_ids`` are not the positions of the batch's tokens.

        Args:
            x: Hidden states. Only their device and dtype are used.
            position_ids: Positions, int64 ``[..., batch or 1, tokens]``.
            layer_type: Layer type in transformers. None if all layers have the same rope type.
            keywords: Further arguments of the module.
        """
        layer, text_lengths = self._layer, self.text_lengths
        if layer_type is not None:
            keywords["layer_type"] = layer_type
        in_use = text_lengths is not None and (self.in_forward or layer.module.training)
        if text_lengths is None or not in_use or layer_type not in self._rope_types:
            return layer.forward(x, position_ids, **keywords)
        # Positions that do not have the shape of the lengths are not positions of tokens.
        if text_lengths.shape[-1] not in (1, position_ids.shape[-1]):
            return layer.forward(x, position_ids, **keywords)
        shape = (text_lengths.shape[0], position_ids.shape[-1])
        text_lengths = text_lengths.expand(shape)
        positions = position_ids.expand(*position_ids.shape[:-2], *shape)
        with torch.no_grad():
            if "longrope" in self._rope_types[layer_type]:
                return self._rotate_with_longrope(x, positions, text_lengths, layer_type, keywords)
            return layer.compute_rotations_by_length(x, positions, text_lengths, layer_type)

    def _rotate_with_longrope(
        self,
        x: Tensor,
        positions: Tensor,
        text_lengths: Tensor,
        layer_type: str | None,
        keywords: dict[str, Any],
    ) -> Any:
        """Compute the LongRoPE rotations, with the short or the long factors for each token.

        A token gets the long factors if its text is longer than the model's original length. The
        rotary module of transformers uses the same factors for all tokens: the long ones if the
        largest position plus 1 is larger than the original length. The module is therefore called
        once for each kind of factors, and each token gets its values from one of the two results.

        One more position is appended in each call, and is dropped from the result. For the long
        factors, this position is equal to the original length. For the short factors, it is 0, and
        all other positions are clamped below the original length.

        Args:
            x: Hidden states. Only their device and dtype are used.
            positions: Positions of the tokens, int64 ``[..., batch, tokens]``.
            text_lengths: Length of the text of each token, int64 ``[batch, tokens]``.
            layer_type: Layer type in transformers, or None.
            keywords: Further arguments of the module.

        Returns:
            A tuple of tensors such as ``(cos, sin)``, or a single tensor if the module returns one.
        """
        limit = self._layer.get_original_length(layer_type)
        is_long = text_lengths > limit
        results = []
        for factors_are_long in (False, True):
            largest = torch.full_like(positions[..., :1], limit if factors_are_long else 0)
            # Clamp the positions, because the padding of short sequences may exceed the limit.
            clamped_positions = positions if factors_are_long else positions.clamp(max=limit - 1)
            result = self._layer.forward(x, torch.cat([clamped_positions, largest], dim=-1), **keywords)
            results.append(result if isinstance(result, tuple) else (result,))
        chosen = tuple(
            torch.where(is_long[..., None], long[..., :-1, :], short[..., :-1, :])
            for short, long in zip(*results, strict=True)
        )
        return chosen if len(chosen) > 1 else chosen[0]
