"""Collect the changes that an adapter makes to each tensor of its base model."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.converters.adapters.base_names import BaseNameLookup, ParameterLocation, RowRegion
from portable.converters.adapters.edits import ScaleEdit, are_equal_edits
from portable.converters.errors import CheckpointError, prefix_checkpoint_errors
from portable.converters.lazy_numpy import np
from portable.converters.names.tied_weights import UNNAMED_HEAD, are_tensors_equal, find_implied_ties
from portable.converters.storage.safe_open import read_json_object_or_empty
from portable.converters.tensors.casting import parse_target_dtype, select_written_dtype
from portable.converters.tensors.dtypes import CASTABLE_DTYPES
from portable.converters.tensors.edited_rows import apply_edits

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from portable.converters.adapters.adapter import StoredAdapter
    from portable.converters.checkpoint import Checkpoint
    from portable.converters.tensors.edited_rows import RowEdit
    from portable.converters.tensors.tensor import Array, Shape, Tensor

INPUTS_FIRST = {
    **dict.fromkeys(
        ("clvp", "clvp_decoder", "decision_transformer", "gpt2", "imagegpt", "openai-gpt"),
        ("c_attn", "q_attn", "c_fc", "c_proj"),
    ),
    **dict.fromkeys(
        ("aria", "aria_text", "gpt_oss", "openai_privacy_filter"),
        ("gate_up_proj", "down_proj"),
    ),
}
"""Names of modules and parameters whose weights are stored as `[inputs, outputs]`, keyed by model
type.

They are modules of transformers' class `Conv1D`, and parameters of stacked experts with
`is_transposed`. The table is used only for square matrices, because the shape of any other matrix
reveals its layout.
"""
MAX_CACHED_FACTORS = 16
"""Number of modules whose LoRA factors are cached.

It is larger than 1, because several threads write different modules at the same time, and the
factors of the next modules are loaded in advance.
"""


@dataclass
class TensorChange:
    """Changes that an adapter makes to one tensor of the base model.

    Attributes:
        num_row_dims: Number of leading dimensions that are flattened to rows. 0 if the entire
            tensor is one row, as for a bias.
        edits: Edits of rows, in order. They are applied to `source` if it is not None.
        source: Tensor to start from instead of the base model's tensor, or None.
    """

    num_row_dims: int = 1
    edits: list[RowEdit] = field(default_factory=list)
    source: Tensor | None = None

    def has_same_effect(self, other: TensorChange) -> bool:
        """Return whether this change and `other` produce the same tensor from the same base tensor.

        If necessary, reads the replacement tensors (`source`) of both changes, and the arrays that
        their edits use.
        """
        own_source, other_source = self.source, other.source
        if own_source is None or other_source is None or own_source is other_source:
            sources = own_source is other_source
        else:
            sources = are_tensors_equal(own_source, other_source)
        return (
            sources
            and len(self.edits) == len(other.edits)
            and all(map(are_equal_edits, self.edits, other.edits))
        )


class ChangedRegion(NamedTuple):
    """Region of a base tensor that contains rows of an adapted parameter.

    Attributes:
        change: Record of all edits that the adapter makes to the base tensor. The caller adds an
            edit to this record in order to change the rows in the region.
        region: Range of rows in the parameter, and the location of these rows in the base tensor.
        num_rows: Number of rows in the region.
    """

    change: TensorChange
    region: RowRegion
    num_rows: int


class BaseChanges:
    """Collection of the changes that an adapter makes to the tensors of its base model.

    The collection is empty at first. The functions in `portable.converters.adapters.merging` add
    the changes.

    Args:
        adapter: Adapter to merge.
        base: Checkpoint of the base model.
        dtype: Dtype of the changed tensors, as in `merge`.

    Attributes:
        ties: Names of tied tensors, as a mapping from alias to owner. The loaded model has one
            tensor for both names.
        base_names: Lookup of the base model's tensors by their names in the loaded model.
        changes: Changes, keyed by the name of the tensor in the files.
        added_tensors: Tensors that the base model lacks.
        config_changes: New values in `config.json`, keyed by name.
        load_vector: Cached function that reads a tensor as a float32 vector and multiplies the
            vector by a scaling factor.
    """

    def __init__(self, adapter: StoredAdapter, base: Checkpoint, dtype: str) -> None:
        self.adapter = adapter
        self.adapter_config = adapter.config
        self.base_checkpoint = base
        self.target_dtype = parse_target_dtype(dtype)
        self.base_config = read_json_object_or_empty(base.companions.get("config.json"))
        self.ties = {**base.aliases, **self._find_implied_ties()}
        self.base_names = BaseNameLookup(base.tensors, self.ties, self.base_config, adapter.linear_shapes)
        self.changes: dict[str, TensorChange] = {}
        self.added_tensors: dict[str, Tensor] = {}
        self.config_changes: dict[str, Any] = {}
        self.load_vector = lru_cache(MAX_CACHED_FACTORS)(_load_scaled_vector)

    def _find_implied_ties(self) -> dict[str, str]:
        """Find parameters that the files omit because they share the weights of the embedding.

        Returns:
            Name of the stored embedding (the owner), keyed by the name of the omitted parameter
            (the alias). For the head of an encoder such as BERT, whose name depends on the model,
            the key is `UNNAMED_HEAD`.
        """
        return find_implied_ties(self.base_checkpoint.tensors, self.base_checkpoint.aliases, self.base_config)

    def locate_parameter(self, live_name: str) -> ParameterLocation:
        """Locate a parameter of the live model in the files of the base model.

        The live model is the base model in memory, after transformers has loaded it. The adapter
        may already have replaced the parameter with a tensor of another shape, for example to add
        tokens. The returned location then has the new shape.

        Args:
            live_name: Name of the parameter in the live model.

        Raises:
            CheckpointError: If the base model does not contain the parameter, if several of its
                tensors match the name, or if the layout of the files does not allow changes to the
                parameter.
        """
        with prefix_checkpoint_errors(self.base_checkpoint.root):
            match = self.base_names.find_parameter(live_name)
        if match is None:
            similar_name = self.base_names.find_similar_name(live_name)
            hint = f" (the most similar name is {similar_name!r})" if similar_name else ""
            if similar_name not in (None, live_name) and re.sub(r"\d+", "0", similar_name) == re.sub(
                r"\d+", "0", live_name
            ):
                # This happens for Zamba, whose layers share one block although each layer has a separate
                # adapter.
                raise CheckpointError(
                    f"{self.base_checkpoint.root}: contains {similar_name!r}, but not {live_name!r}, which "
                    f"{self.adapter.root} changes; specify the base model that the adapter was trained on, "
                    "or, if the layers share this weight, load the adapter with peft instead"
                )
            raise CheckpointError(
                f"{self.base_checkpoint.root}: does not contain the tensor {live_name!r}, which "
                f"{self.adapter.root} changes{hint}; specify the base model that the adapter was trained on"
            )
        change = self.changes.get(match.identical_tensor or "")
        if change is not None and change.source is not None and len(change.source.shape) == len(match.shape):
            shape = change.source.shape
            if shape != match.shape and match.identical_tensor is not None:
                return ParameterLocation(
                    shape, (RowRegion(match.identical_tensor, 0, 0, shape[0]),), match.identical_tensor
                )
        return match

    def get_base_shape(self, name: str) -> Shape:
        """Return the shape of a tensor in the base model. `name` may be the alias of a tied tensor."""
        return self.base_checkpoint.tensors[self.ties.get(name, name)].shape

    def get_new_row_count(self, name: str) -> int | None:
        """Return the new number of rows of a tensor, or None if the number does not change.

        Only the changes that have already been recorded are considered.
        """
        source = self.changes.get(name, TensorChange()).source
        rows = None if source is None else source.shape[0]
        return rows if rows != self.get_base_shape(name)[0] else None

    def is_replaced(self, name: str) -> bool:
        """Return whether the adapter replaces a tensor of the base model completely."""
        source = self.changes.get(name, TensorChange()).source
        return source is not None and any(source is tensor for tensor in self.adapter.replacements.values())

    def build_shape_error(
        self, live_name: str, base_shape: Sequence[int], *adapter_tensors: Tensor
    ) -> CheckpointError:
        """Build (but do not raise) the error for adapter tensors that do not fit the shape of a parameter."""
        shapes = " and ".join(str(list(tensor.shape)) for tensor in adapter_tensors)
        return CheckpointError(
            f"{self.base_checkpoint.root}: {live_name!r} has shape {list(base_shape)}, which does not "
            f"match {shapes} in {self.adapter.root}; specify the base model that the adapter was trained "
            "on"
        )

    def get_or_add_change(self, name: str, num_row_dims: int) -> TensorChange:
        """Return the recorded change of a tensor. Record an empty change if there is none.

        Args:
            name: Name of the tensor in the files.
            num_row_dims: Number of leading dimensions that are flattened to rows.

        Raises:
            CheckpointError: If a previous change has a different number of row dimensions.
        """
        change = self.changes.setdefault(name, TensorChange(num_row_dims))
        if change.num_row_dims != num_row_dims:
            raise CheckpointError(
                f"{self.adapter.root}: contains two changes of the tensor {name!r} that cannot be combined; "
                "load the adapter with peft instead"
            )
        return change

    def has_inputs_first(self, live_name: str) -> bool:
        """Return whether a square weight is stored as `[inputs, outputs]`.

        The shape of a square weight does not reveal its layout, so the layout is looked up by model
        type in `INPUTS_FIRST`. If the config has no model type, the adapter's `fan_in_fan_out` is
        returned.

        Args:
            live_name: Name of the weight in the live model, that is, the model in memory after
                transformers has loaded it.
        """
        kind = self.base_config.get("model_type")
        leaf = live_name.removesuffix(".weight").rpartition(".")[2]
        if isinstance(kind, str):
            return leaf in INPUTS_FIRST.get(kind, ())
        return self.adapter_config.fan_in_fan_out

    def build_tensor_after_edits(self, name: str, num_edits: int) -> Tensor:
        """Build a base model's tensor as it is after its first `num_edits` edits.

        `changes` lists the edits of each tensor in the order in which they are applied.

        Args:
            name: Name of the tensor in the files of the base model. It must be a key of `changes`.
            num_edits: Number of edits to apply.

        Returns:
            A lazy tensor in float32, or in float64 if the tensor is float64.
        """
        change = self.changes[name]
        tensor = (
            self.base_checkpoint.tensors[self.ties.get(name, name)]
            if change.source is None
            else change.source
        )
        return apply_edits(
            tensor, "F64" if tensor.dtype == "F64" else "F32", change.num_row_dims, change.edits[:num_edits]
        )

    def iter_changed_regions(
        self, parameter: ParameterLocation, num_row_dims: int = 0
    ) -> Iterator[ChangedRegion]:
        """Yield each region of the base model's tensors that stores rows of a parameter.

        Each item also contains the recorded change of the region's tensor. The caller appends edits
        to this change. If no change has been recorded for the tensor, an empty `TensorChange` is
        recorded first.

        Args:
            parameter: Location of the parameter.
            num_row_dims: Number of leading dimensions that are flattened into one row dimension. 0
                selects the default for each tensor: 2 for a tensor with three dimensions (a stack
                of experts), 1 otherwise.

        Raises:
            CheckpointError: If the recorded change of a tensor has a different number of row
                dimensions.
        """
        for region in parameter.regions:
            is_stack = (
                len(self.base_checkpoint.tensors[self.ties.get(region.tensor_name, region.tensor_name)].shape)
                == 3
            )
            change = self.get_or_add_change(region.tensor_name, num_row_dims or (2 if is_stack else 1))
            yield ChangedRegion(change, region, region.stop_row - region.start_row)

    def add_zero_bias_edit(self, module: str) -> None:
        """Add an edit that sets the bias of a module to zero.

        Does nothing if the base model has no such bias. peft drops the bias of an output head if
        the head has trained tokens or is tied to a saved embedding. The merged model must therefore
        have a zero bias.
        """
        parameter = self.base_names.find_parameter(f"{module}.bias")
        if parameter is not None and parameter.identical_tensor is not None:
            zeros = partial(np.zeros, parameter.shape, np.float32)
            self.get_or_add_change(parameter.identical_tensor, 0).edits.append(
                ScaleEdit(zeros, 0, 0, 1, scales_columns=True)
            )

    def add_bias_edit(self, module: str, edit: RowEdit, vector: Tensor) -> None:
        """Record an edit that the adapter makes to the bias of a module.

        The edit is applied later, when the merged tensor is read.

        Args:
            module: Name of the module in the live model.
            edit: Change to the values of the bias.
            vector: Adapter tensor that the edit uses. It must have the size of the bias.

        Raises:
            CheckpointError: If the base model has no such bias, or if the sizes differ.
        """
        live = f"{module}.bias"
        weight = self.base_names.find_parameter(f"{module}.weight")
        if weight is not None and self.base_names.find_parameter(live) is None:
            raise CheckpointError(
                f"{self.base_checkpoint.root}: {module} has no bias, but "
                f"{self.adapter.root} adds one (lora_bias); load the adapter with peft instead"
            )
        parameter = self.locate_parameter(live)
        if parameter.identical_tensor is None or parameter.shape != (vector.numel,):
            raise self.build_shape_error(live, parameter.shape, vector)
        self.get_or_add_change(parameter.identical_tensor, 0).edits.append(edit)

    def untie_changed_names(self) -> list[str]:
        """Untie tied tensors if the adapter changes them differently, and return their names.

        Two tied tensors, such as the embedding and the head, share their weights in the base model.
        Only one of them, the owner, is in the `tensors` of the base checkpoint, even if its files
        contain both. The other is called its alias. An adapter on one of the two does not change the
        other, so they stay tied only if the adapter changes both in the same way. If the changes differ
        for one alias, all aliases are untied: `tie_word_embeddings` is set to false in
        `config_changes`, and every alias needs a separate tensor.

        Returns:
            Names of all aliases, or an empty list if the tensors stay tied.

        Raises:
            CheckpointError: If the tensors must be untied, but the architecture does not support
                separate tensors.
        """
        untied_alias = next(
            (alias for alias, owner in self.ties.items() if not self._has_same_changes(alias, owner)), ""
        )
        if not untied_alias:
            return []
        if self.base_config.get("is_encoder_decoder") or UNNAMED_HEAD in self.ties:
            raise CheckpointError(
                f"{self.base_checkpoint.root}: {self.ties[untied_alias]!r} and {untied_alias!r} are tied, "
                f"but {self.adapter.root} does not change both in the same way, and models of this "
                "architecture cannot untie them; load the adapter with peft instead"
            )
        self.config_changes["tie_word_embeddings"] = False
        return list(self.ties)

    def _has_same_changes(self, alias: str, owner: str) -> bool:
        """Return whether the adapter changes an alias in the same way as its owner.

        The owner is the tensor to which the alias is tied. Both have one row per token. If the
        adapter resizes the owner but does not replace the alias, this method therefore first
        records the owner's new tensor as the replacement of the alias as well.
        """
        owner_change = self.changes.get(owner, TensorChange())
        resized = (
            owner_change.source is not None
            and owner_change.source.shape[0] != self.base_checkpoint.tensors[owner].shape[0]
        )
        if resized and self.changes.setdefault(alias, TensorChange(owner_change.num_row_dims)).source is None:
            self.changes[alias].source = owner_change.source  # both tables have a row for each token
        return self.changes.get(alias, TensorChange()).has_same_effect(owner_change)

    def build_merged_tensor(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor of the base model with the adapter merged in.

        The merged values are computed when the returned tensor is read.

        Args:
            name: Name of the tensor in the files.
            tensor: Tensor of the base model.

        Returns:
            The merged tensor, or `tensor` itself if the adapter does not change it.

        Raises:
            CheckpointError: If the adapter changes a quantized tensor. Also raised if the adapter
                edits a tensor that it also replaces, and the replacement has more or fewer
                dimensions than `tensor`.
        """
        change = self.changes.get(name)
        if change is None:
            return tensor
        if tensor.dtype not in CASTABLE_DTYPES:
            raise CheckpointError(
                f"{self.base_checkpoint.root}: {name!r} is quantized ({tensor.dtype}); specify the "
                "unquantized model"
            )
        source = change.source if change.source is not None else tensor
        if change.edits and source.shape != tensor.shape and len(source.shape) != len(tensor.shape):
            raise self.build_shape_error(name, tensor.shape, source)
        return self.cast_with_edits(
            source, select_written_dtype(tensor, self.target_dtype), change.num_row_dims, change.edits
        )

    def cast_with_edits(
        self, tensor: Tensor, dtype: str, num_row_dims: int = 1, edits: Sequence[RowEdit] = ()
    ) -> Tensor:
        """Apply edits to a tensor and cast the result.

        Args:
            tensor: Tensor to change.
            dtype: Safetensors dtype of the result. If there are no edits, only F64, F32, F16 and BF16
                tensors are cast.
            num_row_dims: Number of leading dimensions that are flattened to rows.
            edits: Edits of the rows, in order.

        Returns:
            A tensor that is computed when it is read, or `tensor` itself if it is neither edited nor
            cast.
        """
        if not edits and (tensor.dtype == dtype or tensor.dtype not in CASTABLE_DTYPES):
            return tensor
        return apply_edits(tensor, dtype, min(num_row_dims, len(tensor.shape)), edits)


def read_as_float32(tensor: Tensor) -> Array:
    """Read a tensor and convert it to float32."""
    values: Array = tensor.read().astype(np.float32)
    return values


def _load_scaled_vector(tensor: Tensor, scaling: float) -> Array:
    """Read a tensor as a float32 vector, multiplied by `scaling`."""
    values: Array = read_as_float32(tensor).reshape(-1) * np.float32(scaling)
    return values
