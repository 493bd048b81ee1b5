"""Convert MaxText's models to the tensor names and row order of transformers.

MaxText stores kernels as [in, heads, head size] or [in, out]. It stacks the parameters of scanned
layers along dim 1. Some stored weights also include operations that transformers performs in the
forward pass. This depends on the model type:

- The query kernel is divided by the square root of the head size.
- Each norm of Gemma is stored as 1 + the weight in transformers.
- The embedding of Gemma is multiplied by the square root of its width.

A rotary embedding rotates the elements of a head in pairs. In MaxText's models with the rotary
embedding of Llama 3.1, adjacent elements form a pair. In other models, the first half of a head is
paired with the second half, as in transformers.

The checkpoint does not record any of these differences, so the model's `config.json` is required.

Source: MaxText's src/MaxText/utils/ckpt_conversion/utils/param_mapping.py,
llama_mistral_mixtral_orbax_to_hf.py, convert_gemma_chkpt.py, convert_gemma2_chkpt.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from portable.converters.containers.pickle_reader import format_untrusted_value
from portable.converters.errors import CheckpointError, DamagedCheckpointError
from portable.converters.lazy_numpy import np
from portable.converters.limits import MAX_COUNT
from portable.converters.names.canonical import strip_common_prefixes
from portable.converters.names.model_config import parse_llama_sizes
from portable.converters.tensors.edited_rows import AffineEdit, apply_edits
from portable.converters.tensors.tensor_ops import permute_dims, reshape_tensor, select_index, slice_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from portable.converters.tensors.tensor import Shape, Tensor

Path = tuple[str, ...]

_LAYER = re.compile(r"layers(?:_(\d{1,6}))?")
_KERNELS = {
    "self_attention{}.query.kernel": "self_attn.q_proj",
    "self_attention{}.key.kernel": "self_attn.k_proj",
    "self_attention{}.value.kernel": "self_attn.v_proj",
    "self_attention{}.out.kernel": "self_attn.o_proj",
    "mlp{}.wi_0.kernel": "mlp.gate_proj",
    "mlp{}.wi_1.kernel": "mlp.up_proj",
    "mlp{}.wo.kernel": "mlp.down_proj",
}
_LLAMA_NORMS = {
    "pre_self_attention_layer_norm.scale": "input_layernorm",
    "post_self_attention_layer_norm.scale": "post_attention_layernorm",
}
_QWEN_NORMS = {
    "self_attention.query_norm.scale": "self_attn.q_norm",
    "self_attention.key_norm.scale": "self_attn.k_norm",
}
_GEMMA_NORMS = {
    "pre_self_attention_norm.scale": "input_layernorm",
    "pre_ffw_norm.scale": "post_attention_layernorm",
}
_GEMMA2_NORMS = {
    "pre_self_attention_norm{}.scale": "input_layernorm",
    "post_self_attention_norm{}.scale": "post_attention_layernorm",
    "pre_ffw_norm{}.scale": "pre_feedforward_layernorm",
    "post_ffw_norm{}.scale": "post_feedforward_layernorm",
}
# Sizes of each parameter in MaxText. D is the head size, H and K are the numbers of query and key heads, E is
# the width of the model, and M is the width of the MLP.
_SHAPES = {
    "self_attn.q_proj": "EHD",
    "self_attn.k_proj": "EKD",
    "self_attn.v_proj": "EKD",
    "self_attn.o_proj": "HDE",
    "mlp.gate_proj": "EM",
    "mlp.up_proj": "EM",
    "mlp.down_proj": "ME",
    "self_attn.q_norm": "D",
    "self_attn.k_norm": "D",
}


@dataclass(frozen=True)
class _MaxTextFamily:
    """Differences between MaxText and transformers for one `model_type` of transformers.

    Attributes:
        norms: transformers' names of the norms in a layer, keyed by MaxText's names.
        scales_query: Whether MaxText divides the query kernel by the square root of the head size.
        is_gemma: Whether MaxText stores each norm as 1 + the weight in transformers, and multiplies
            the embedding by the square root of its width.
        has_paired_layers: Whether one layer of MaxText contains two layers of transformers: one
            with local attention and one with global attention.
        may_tie: Whether models with tied embeddings can be converted. This requires that MaxText
            computes their logits in the same way as transformers.
    """

    norms: Mapping[str, str]
    scales_query: bool = True
    is_gemma: bool = False
    has_paired_layers: bool = False
    may_tie: bool = False


_FAMILIES = {
    "llama": _MaxTextFamily(_LLAMA_NORMS),
    "mistral": _MaxTextFamily(_LLAMA_NORMS),
    "qwen3": _MaxTextFamily({**_LLAMA_NORMS, **_QWEN_NORMS}, scales_query=False, may_tie=True),
    "gemma": _MaxTextFamily(_GEMMA_NORMS, is_gemma=True, may_tie=True),
    "gemma2": _MaxTextFamily(_GEMMA2_NORMS, is_gemma=True, has_paired_layers=True, may_tie=True),
}


@dataclass(frozen=True)
class ParameterDestination:
    """Names and layout that transformers uses for a MaxText parameter.

    A weight is converted to `weight * factor / divisor + term`.

    Attributes:
        names: Names in transformers, one for each layer if the parameter contains several layers.
        layer_dim: Dimension along which layers are stacked, or None if the parameter belongs to one
            layer.
        has_inputs_first: Whether the first dimension of the MaxText parameter is the input
            dimension, as in MaxText's kernels. transformers stores it last.
        pairs_adjacent: Whether MaxText's rotary embedding pairs adjacent elements of a head.
            transformers pairs the first half of a head with the second half.
        num_rows: Number of rows to keep, because further rows are padding. None to keep all rows.
        factor: Number by which the weights are multiplied.
        divisor: Number by which the weights are divided.
        term: Number that is then added to the weights.
    """

    names: tuple[str, ...]
    layer_dim: int | None = None
    has_inputs_first: bool = False
    pairs_adjacent: bool = False
    num_rows: int | None = None
    factor: float = 1.0
    divisor: float = 1.0
    term: float = 0.0


@dataclass
class MaxTextLayout:
    """Conversion of the parameters in a checkpoint to the parameters of the opened model.

    The layout converts weights and Adam's moments without reading data. For a MaxText checkpoint
    with a known `config.json`, the results are the parameters of the transformers model. For other
    checkpoints, only the names change (`build_named_layout`).

    Attributes:
        destinations: New names, layout and scaling of each parameter, keyed by the parameter's path
            in the checkpoint's tree.
    """

    destinations: dict[Path, ParameterDestination] = field(default_factory=dict)

    def convert_weight(self, path: Path, tensor: Tensor) -> dict[str, Tensor]:
        """Convert one parameter in the checkpoint to parameters of the opened model, without reading data.

        A parameter with stacked layers of MaxText is split into one parameter per layer.

        Returns:
            The parameters, keyed by their names in the opened model.
        """
        target = self.destinations[path]
        edit = AffineEdit(target.factor, target.divisor, target.term)
        return dict(self._iter_converted(target, tensor, edit))

    def convert_moment(self, path: Path, tensor: Tensor, moment: str) -> dict[str, Tensor]:
        """Convert one of Adam's moments of a parameter to transformers' layout.

        If the conversion multiplies the weight by a factor, it must divide the gradient by the same
        factor. The first moment is therefore divided by the factor, and the second moment by its
        square.

        Args:
            path: Path of the parameter in the checkpoint's tree.
            tensor: The moment.
            moment: `mu` for the first moment, or `nu` for the second.

        Returns:
            Moments, keyed by transformers' names of the parameters.
        """
        target = self.destinations[path]
        factor, divisor = (
            (target.divisor, target.factor) if moment == "mu" else (target.divisor**2, target.factor**2)
        )
        return dict(self._iter_converted(target, tensor, AffineEdit(factor, divisor)))

    def _iter_converted(
        self, target: ParameterDestination, tensor: Tensor, edit: AffineEdit
    ) -> Iterator[tuple[str, Tensor]]:
        """Convert one MaxText parameter or moment, and yield the name and tensor of each layer.

        Args:
            target: Destination of the parameter.
            tensor: Parameter or moment in MaxText's layout. It may contain several layers.
            edit: Scaling to apply to the values.
        """
        for number, name in enumerate(target.names):
            layer = tensor if target.layer_dim is None else select_index(tensor, target.layer_dim, number)
            if target.has_inputs_first:
                layer = _move_outputs_first(layer, target, name)
            if target.num_rows is not None and target.num_rows < layer.shape[0]:
                layer = slice_tensor(layer, 0, 0, target.num_rows)
            if (float(edit.factor), float(edit.divisor), float(edit.term)) != (1, 1, 0):
                layer = apply_edits(layer, layer.dtype, 1, [edit])
            yield name, layer


def _move_outputs_first(tensor: Tensor, target: ParameterDestination, name: str) -> Tensor:
    """Convert a kernel to transformers' layout `[out, in]`, without reading data.

    An attention kernel has one dimension for the heads and another for the elements of a head. The
    two dimensions are merged into one. If `target.pairs_adjacent` is True, the elements of each
    head are also reordered for transformers' rotary embedding.

    Args:
        tensor: MaxText's kernel of one layer.
        target: Destination of the kernel.
        name: Name of the weight in transformers. In the kernel of an `o_proj`, the heads are
            inputs. In other attention kernels, they are outputs.
    """
    shape = tensor.shape
    if len(shape) == 2:
        return permute_dims(tensor, (1, 0))
    if name.endswith("o_proj.weight"):
        return reshape_tensor(permute_dims(tensor, (2, 0, 1)), (shape[2], shape[0] * shape[1]))
    if target.pairs_adjacent:
        pairs = reshape_tensor(tensor, (*shape[:2], shape[2] // 2, 2))
        return reshape_tensor(permute_dims(pairs, (1, 3, 2, 0)), (shape[1] * shape[2], shape[0]))
    return reshape_tensor(permute_dims(tensor, (1, 2, 0)), (shape[1] * shape[2], shape[0]))


def build_maxtext_layout(
    shapes: Mapping[Path, Shape], config: Mapping[str, Any], location: str
) -> MaxTextLayout | None:
    """Build a layout that maps the parameters of a MaxText model to the tensors of transformers.

    Args:
        shapes: Shapes of the arrays outside the optimizer, keyed by path.
        config: Content of the model's `config.json`. Empty if it is not known.
        location: Path of the checkpoint, used in error messages.

    Returns:
        The layout. None if MaxText did not write the checkpoint, or if there is no `config.json`.

    Raises:
        CheckpointError: If the type of the model is not supported, or if the paths or shapes of the
            arrays contradict `config.json`.
    """
    prefix = next((path[: path.index("decoder")] for path in shapes if "decoder" in path), None)
    if prefix is None or (*prefix, "token_embedder", "embedding") not in shapes or not config:
        return None
    return _MaxTextModel(config, location).build_layout(shapes, prefix)


def build_named_layout(shapes: Mapping[Path, Shape], location: str) -> MaxTextLayout:
    """Build a layout that changes only the names of the parameters, and keeps their values.

    It is used if MaxText did not write the checkpoint, or if the model's `config.json` is not
    known. The name of a parameter consists of the keys of its path in the tree, joined with dots.
    The parts that module wrappers add are removed (`strip_common_prefixes`).

    Args:
        shapes: Shape of each parameter, keyed by its path in the tree.
        location: Path of the checkpoint, used in error messages.

    Raises:
        CheckpointError: If two parameters get the same name, or if a name is too long.
    """
    plain = strip_common_prefixes({".".join(path): path for path in shapes}, location=location)
    return MaxTextLayout({path: ParameterDestination((name,)) for name, path in plain.items()})


class _MaxTextModel:
    """MaxText model whose type and sizes come from its `config.json`.

    Args:
        config: Content of `config.json`.
        location: Path of the checkpoint, used in error messages.

    Raises:
        CheckpointError: If the type of the model or of its rotary embedding is not supported, or if a
            size in `config.json` is missing or invalid.
    """

    def __init__(self, config: Mapping[str, Any], location: str) -> None:
        self.config = config
        self.location = location
        kind = config.get("model_type")
        family = _FAMILIES.get(kind) if isinstance(kind, str) else None
        if family is None:
            raise CheckpointError(
                f"{location}: MaxText models of type {format_untrusted_value(kind)} are not supported; "
                "export the model with MaxText's to_huggingface, or convert without config.json to keep "
                "MaxText's names"
            )
        self.family = family
        self.sizes = parse_llama_sizes(config, location)
        self.num_layers, self.vocab_size = self.sizes["L"], self.sizes["V"]
        self.pairs_adjacent = self._get_rope_type() == "llama3"
        if self.pairs_adjacent and self.sizes["D"] % 2:
            raise CheckpointError(
                f"{location}: head_dim is {self.sizes['D']} in config.json, but rotary embeddings need an "
                "even number; specify the config.json of this model with --config-from"
            )

    def _get_rope_type(self) -> str:
        """Return the type of the rotary embedding. If the config does not specify one, return `"None"`.

        Raises:
            CheckpointError: If the type is not supported.
        """
        rope = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, dict) else rope
        if kind not in (None, "default", "llama3") or (
            kind == "llama3" and self.config["model_type"] != "llama"
        ):
            raise CheckpointError(
                f"{self.location}: MaxText models with the rope type {format_untrusted_value(kind)} are not "
                "supported; convert without config.json to keep MaxText's names"
            )
        return str(kind)

    def build_layout(self, shapes: Mapping[Path, Shape], prefix: Path) -> MaxTextLayout:
        """Build the layout of all parameters, and check that no parameter is missing.

        Args:
            shapes: Shapes of the arrays, keyed by path.
            prefix: Keys before `decoder` in the paths of the parameters.

        Raises:
            CheckpointError: If a parameter is missing, occurs twice, has an unexpected shape, or does
                not belong to the model. Also raised if the embeddings of a Llama or Mistral model are
                tied, because the checkpoint does not record how MaxText scales their logits.
        """
        layout = MaxTextLayout()
        for path, shape in shapes.items():
            target = (
                self._find_destination(path[len(prefix) :], shape) if path[: len(prefix)] == prefix else None
            )
            if target is None:
                raise CheckpointError(
                    f"{self.location}: the parameter {format_untrusted_value('.'.join(path))} does not "
                    f"belong to a model of type {self.config['model_type']}; convert without config.json to "
                    "keep MaxText's names"
                )
            layout.destinations[path] = target
        self._check_all_parameters(layout)
        return layout

    def _find_destination(self, path: Path, shape: Shape) -> ParameterDestination | None:
        """Find the names and layout that transformers uses for a MaxText parameter.

        Args:
            path: Path of the parameter in MaxText's tree, such as `("decoder", "decoder_norm",
                "scale")`.
            shape: Shape of the parameter in the checkpoint.

        Returns:
            The names and layout, or None if the model does not have the parameter.

        Raises:
            CheckpointError: If the shape does not fit `config.json`, or if `config.json` has too few
                layers. A padded vocabulary fits.
        """
        gemma = self.family.is_gemma
        width = float(np.sqrt(np.float32(self.sizes["E"]))) if gemma else 1.0
        if path == ("token_embedder", "embedding"):
            self._check_vocabulary_shape(path, shape, 0)
            return ParameterDestination(
                ("model.embed_tokens.weight",), num_rows=self.vocab_size, divisor=width
            )
        if path == ("decoder", "decoder_norm", "scale"):
            self._check_shape(path, shape, "E")
            return ParameterDestination(("model.norm.weight",), term=-1.0 if gemma else 0.0)
        if path == ("decoder", "logits_dense", "kernel") and not gemma:
            self._check_vocabulary_shape(path, shape, 1)
            return ParameterDestination(("lm_head.weight",), has_inputs_first=True, num_rows=self.vocab_size)
        match = _LAYER.fullmatch(path[1]) if len(path) > 2 and path[0] == "decoder" else None
        return None if match is None else self._find_layer_destination(path, shape, match[1])

    def _find_layer_destination(
        self, path: Path, shape: Shape, layer_number: str | None
    ) -> ParameterDestination | None:
        """Find the destination of a parameter of the decoder layers.

        Args:
            path: Path of the parameter in MaxText's tree. It starts with `decoder` and the key of the
                layer, such as `layers` or `layers_0`.
            shape: Shape of the stored array.
            layer_number: Layer number in the path. None if the array stacks this parameter across
                layers.

        Returns:
            The destination, or None if the layers do not have the parameter.

        Raises:
            CheckpointError: If `config.json` implies a different shape, or has too few layers.
        """
        name_in_layer = ".".join(path[2:])
        names = {**_KERNELS, **self.family.norms}
        variants = ("_local", "_global") if self.family.has_paired_layers else ("",)
        destinations = {
            key.format(suffix): (name, place)
            for place, suffix in enumerate(variants)
            for key, name in names.items()
        }
        if name_in_layer not in destinations:
            return None
        destination, variant = destinations[name_in_layer]
        count = len(variants)
        if layer_number is None:
            layers = range(variant, self.num_layers, count)
        else:
            layers = range(int(layer_number) * count + variant, int(layer_number) * count + variant + 1)
            if layers[0] >= self.num_layers:
                raise CheckpointError(
                    f"{self.location}: contains a layer with index {layers[0]}, but "
                    f"num_hidden_layers is {self.num_layers} in config.json; specify the config.json of "
                    "this model with --config-from"
                )
        kernel = destination in _SHAPES and len(_SHAPES[destination]) > 1
        self._check_shape(
            path, shape, _SHAPES.get(destination, "E"), None if layer_number is not None else len(layers)
        )
        query = destination == "self_attn.q_proj"
        rotary = query or destination == "self_attn.k_proj"
        return ParameterDestination(
            tuple(f"model.layers.{layer}.{destination}.weight" for layer in layers),
            layer_dim=1 if layer_number is None else None,
            has_inputs_first=kernel,
            pairs_adjacent=rotary and self.pairs_adjacent,
            factor=self._compute_query_scale() if query and self.family.scales_query else 1.0,
            term=-1.0 if self.family.is_gemma and not kernel else 0.0,
        )

    def _compute_query_scale(self) -> float:
        """Compute the factor that restores the query kernel, which MaxText stores divided by it.

        The factor is the square root of `query_pre_attn_scalar` in the config or, if the config
        does not contain this key, of the head size.

        Raises:
            CheckpointError: If the config contains an invalid number.
        """
        scalar = self.config.get("query_pre_attn_scalar", self.sizes["D"])
        if not isinstance(scalar, int | float) or not 0 < scalar < MAX_COUNT:
            raise CheckpointError(
                f"{self.location}: config.json has a query_pre_attn_scalar that is not a positive number; "
                "correct config.json"
            )
        return float(np.sqrt(np.float32(scalar)))

    def _check_shape(self, path: Path, shape: Shape, sizes: str, layers: int | None = None) -> None:
        """Check the shape of a parameter.

        Args:
            path: Path of the parameter.
            shape: Shape of the parameter.
            sizes: Expected sizes, as one letter per dimension. The letters are keys of `self.sizes`.
            layers: Number of layers that are stacked along dim 1, or None if the parameter belongs to
                one layer.

        Raises:
            CheckpointError: If the shape differs.
        """
        expected_shape = [self.sizes[size] for size in sizes]
        if layers is not None:
            expected_shape.insert(1, layers)
        if list(shape) != expected_shape:
            raise CheckpointError(
                f"{self.location}: {'.'.join(path)} has shape {list(shape)}, but config.json requires "
                f"{expected_shape}; specify the config.json of this model with --config-from"
            )

    def _check_vocabulary_shape(self, path: Path, shape: Shape, dim: int) -> None:
        """Check the shape of the embedding or the output head. Its vocabulary dimension may be padded.

        Args:
            path: Path of the parameter.
            shape: Shape of the parameter.
            dim: Index of the vocabulary dimension, 0 or 1. The size of the other dimension must
                equal the hidden size.

        Raises:
            CheckpointError: If the shape does not fit `config.json`.
        """
        if len(shape) != 2 or shape[1 - dim] != self.sizes["E"] or shape[dim] < self.vocab_size:
            raise CheckpointError(
                f"{self.location}: {'.'.join(path)} has shape {list(shape)}, but config.json requires at "
                f"least {self.vocab_size} tokens in dimension {dim} and the hidden size {self.sizes['E']} "
                f"in dimension {1 - dim}; specify the config.json of this model with --config-from"
            )

    def _check_all_parameters(self, layout: MaxTextLayout) -> None:
        """Check that the layout contains each parameter of the model exactly once.

        The output head may be missing if the family supports tied embeddings and
        `tie_word_embeddings` in the config is not False.

        Raises:
            CheckpointError: If a parameter is missing or occurs twice.
        """
        names = [name for target in layout.destinations.values() for name in target.names]
        expected_names = ["model.norm.weight"]
        for module in (*_KERNELS.values(), *self.family.norms.values()):
            expected_names += [f"model.layers.{layer}.{module}.weight" for layer in range(self.num_layers)]
        if not self.family.may_tie or self.config.get("tie_word_embeddings") is False:
            expected_names.append("lm_head.weight")
        actual_names = set(names)
        missing_name = next((name for name in expected_names if name not in actual_names), None)
        if missing_name == "lm_head.weight" and not self.family.may_tie:
            raise CheckpointError(
                f"{self.location}: contains no decoder.logits_dense, so the embeddings are tied, but the "
                "checkpoint does not record whether MaxText divides the logits "
                "(normalize_embedding_logits); convert without config.json to keep MaxText's names"
            )
        if missing_name is not None:
            raise DamagedCheckpointError(
                f"{self.location}: damaged: the parameter for {missing_name} is missing"
            )
        if len(names) != len(actual_names):
            raise DamagedCheckpointError(f"{self.location}: damaged: a parameter is stored twice")
