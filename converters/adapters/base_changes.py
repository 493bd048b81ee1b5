"""What an adapter does to each tensor of the base that it is merged into."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.converters.adapters.base_names import BaseNames, Found, Region
from portable.converters.adapters.edits import Scale, is_same_edit
from portable.converters.errors import CheckpointError, prefix_errors
from portable.converters.lazy_numpy import np
from portable.converters.names.tied_weights import OTHER_HEAD, find_implied_ties, has_same_values
from portable.converters.storage.safe_open import read_small_table
from portable.converters.tensors.casting import cast_dtype, parse_dtype
from portable.converters.tensors.dtypes import CASTABLE
from portable.converters.tensors.edited_rows import apply_edits

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from portable.converters.adapters.adapter import StoredAdapter
    from portable.converters.checkpoint import Checkpoint
    from portable.converters.tensors.edited_rows import Edit
    from portable.converters.tensors.tensor import Array, Shape, Tensor

# Modules of transformers whose weights have inputs as rows (`Conv1D`), and parameters of stacked experts that
# have (`is_transposed`), by model type. It matters where a matrix is square.
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
# Modules whose factors are kept, for a few threads: those that are written now, and those that come next.
KEPT = 16


@dataclass
class TensorChange:
    """What happens to one tensor of the base.

    Attributes:
        lead: how many of its dimensions are rows.
        source: the tensor to start from where it is not the base's own.
    """

    lead: int = 1
    edits: list[Edit] = field(default_factory=list)
    source: Tensor | None = None

    def has_same_effect(self, other: TensorChange) -> bool:
        """Whether equal tensors are equal after both."""
        mine, theirs = self.source, other.source
        if mine is None or theirs is None or mine is theirs:
            sources = mine is theirs
        else:
            sources = has_same_values(mine, theirs)
        return (
            sources
            and len(self.edits) == len(other.edits)
            and all(map(is_same_edit, self.edits, other.edits))
        )


class ChangedRegion(NamedTuple):
    """Rows of one base tensor that a parameter changes.

    Attributes:
        change: Change of the tensor.
        region: The rows, in the tensor and in the parameter.
        num_rows: Number of rows.
    """

    change: TensorChange
    region: Region
    num_rows: int


class BaseChanges:
    """The base, and what happens to each of its tensors.

    Attributes:
        ties: names that are one tensor in the live model: alias -> owner.
        changes: by the name of a tensor.
        added: tensors that the base lacks.
        config_changes: keys of config.json that change with the tensors.
    """

    def __init__(self, adapter: StoredAdapter, base: Checkpoint, dtype: str) -> None:
        self.adapter = adapter
        self.config = adapter.config
        self.base = base
        self.target = parse_dtype(dtype)
        self.base_config = read_small_table(base.companions.get("config.json"))
        self.ties = {**base.aliases, **self._find_implied_ties()}
        self.names = BaseNames(base.tensors, self.ties, self.base_config, adapter.linear_shapes)
        self.changes: dict[str, TensorChange] = {}
        self.added: dict[str, Tensor] = {}
        self.config_changes: dict[str, Any] = {}
        self.vector = lru_cache(KEPT)(_load_vector)

    def _find_implied_ties(self) -> dict[str, str]:
        """Names that the files lack, of modules that share the only embedding's weights: alias -> owner."""
        return find_implied_ties(self.base.tensors, self.base.aliases, self.base_config)

    def find(self, live: str) -> Found:
        with prefix_errors(self.base.root):
            match = self.names.find(live)
        if match is None:
            near = self.names.find_similar_name(live)
            hint = f"; the nearest is {near!r}" if near else ""
            if near not in (None, live) and re.sub(r"\d+", "0", near) == re.sub(r"\d+", "0", live):
                # Zamba's layers share one block. Adapters of its layers differ, so no merged block has them.
                raise CheckpointError(
                    f"{self.base.root}: holds no {live!r}, which {self.adapter.root} changes, but {near!r}; "
                    "if the layers share this weight, their adapters cannot be merged"
                )
            raise CheckpointError(
                f"{self.base.root}: holds no {live!r}, which {self.adapter.root} changes{hint}; give the "
                "base that the adapter was trained on"
            )
        grown = self.changes.get(match.whole or "")
        if grown is not None and grown.source is not None and len(grown.source.shape) == len(match.shape):
            shape = grown.source.shape
            if shape != match.shape and match.whole is not None:
                return Found(shape, (Region(match.whole, 0, 0, shape[0]),), match.whole)
        return match

    def get_shape(self, name: str) -> Shape:
        """Return the shape of a tensor in the base."""
        return self.base.tensors[self.ties.get(name, name)].shape

    def count_new_rows(self, name: str) -> int | None:
        """Return the new number of rows of a tensor, or None if the adapter does not change the number."""
        source = self.changes.get(name, TensorChange()).source
        rows = None if source is None else source.shape[0]
        return rows if rows != self.get_shape(name)[0] else None

    def is_replaced(self, name: str) -> bool:
        """Return whether the adapter contains the complete tensor."""
        source = self.changes.get(name, TensorChange()).source
        return source is not None and any(source is tensor for tensor in self.adapter.replacements.values())

    def build_shape_error(self, live: str, shape: Sequence[int], *theirs: Tensor) -> CheckpointError:
        shapes = " and ".join(str(list(tensor.shape)) for tensor in theirs)
        return CheckpointError(
            f"{self.base.root}: {live!r} has shape {list(shape)}, which {shapes} in {self.adapter.root} do "
            "not fit; give the base that the adapter was trained on"
        )

    def change(self, name: str, lead: int) -> TensorChange:
        change = self.changes.setdefault(name, TensorChange(lead))
        if change.lead != lead:
            raise CheckpointError(f"{self.adapter.root}: changes {name!r} in two ways; this cannot be merged")
        return change

    def has_inputs_first(self, live: str) -> bool:
        """Whether a square weight has its inputs as rows."""
        kind = self.base_config.get("model_type")
        leaf = live.removesuffix(".weight").rpartition(".")[2]
        if isinstance(kind, str):
            return leaf in INPUTS_FIRST.get(kind, ())
        return self.config.fan_in_fan_out

    def apply_first_edits(self, name: str, count: int) -> Tensor:
        """A tensor after the first edits of its change."""
        change = self.changes[name]
        tensor = self.base.tensors[self.ties.get(name, name)] if change.source is None else change.source
        return apply_edits(
            tensor, "F64" if tensor.dtype == "F64" else "F32", change.lead, change.edits[:count]
        )

    def iter_changed_regions(self, parameter: Found, lead: int = 0) -> Iterator[ChangedRegion]:
        """The change of each tensor that holds rows of a parameter, the region, and its number of rows."""
        for region in parameter.regions:
            stack = len(self.base.tensors[self.ties.get(region.name, region.name)].shape) == 3
            change = self.change(region.name, lead or (2 if stack else 1))
            yield ChangedRegion(change, region, region.stop - region.start)

    def zero_bias(self, module: str) -> None:
        """With trained tokens, or tied to a saved embedding, peft's head leaves out the base's bias."""
        parameter = self.names.find(f"{module}.bias")
        if parameter is not None and parameter.whole is not None:
            zeros = partial(np.zeros, parameter.shape, np.float32)
            self.change(parameter.whole, 0).edits.append(Scale(zeros, 0, 0, 1, columns=True))

    def add_bias_edit(self, module: str, edit: Edit, vector: Tensor) -> None:
        live = f"{module}.bias"
        weight = self.names.find(f"{module}.weight")
        if weight is not None and self.names.find(live) is None:
            raise CheckpointError(
                f"{self.base.root}: {module} has no bias, and {self.adapter.root} adds one (lora_bias); no "
                "model of this architecture holds it"
            )
        parameter = self.find(live)
        if parameter.whole is None or parameter.shape != (vector.numel,):
            raise self.build_shape_error(live, parameter.shape, vector)
        self.change(parameter.whole, 0).edits.append(edit)

    def find_untied_names(self) -> list[str]:
        """The tied names that need tensors of their own; all, or none.

        An adapter on an embedding does not change the head that shares its weights, nor the other way round,
        unless the files hold the same change of both.
        """
        apart = next((alias for alias, owner in self.ties.items() if not self._stays_tied(alias, owner)), "")
        if not apart:
            return []
        if self.base_config.get("is_encoder_decoder") or OTHER_HEAD in self.ties:
            raise CheckpointError(
                f"{self.base.root}: {self.ties[apart]!r} and {apart!r} are one parameter, of which "
                f"{self.adapter.root} changes one use only; in this architecture they cannot be untied"
            )
        self.config_changes["tie_word_embeddings"] = False
        return list(self.ties)

    def _stays_tied(self, alias: str, owner: str) -> bool:
        theirs = self.changes.get(owner, TensorChange())
        resized = theirs.source is not None and theirs.source.shape[0] != self.base.tensors[owner].shape[0]
        if resized and self.changes.setdefault(alias, TensorChange(theirs.lead)).source is None:
            self.changes[alias].source = theirs.source  # both have a row for each token
        return self.changes.get(alias, TensorChange()).has_same_effect(theirs)

    def merge_tensor(self, name: str, tensor: Tensor) -> Tensor:
        change = self.changes.get(name)
        if change is None:
            return tensor
        if tensor.dtype not in CASTABLE:
            raise CheckpointError(
                f"{self.base.root}: {name!r} is {tensor.dtype}, quantized; give the model that it was made "
                "from"
            )
        source = change.source if change.source is not None else tensor
        if change.edits and source.shape != tensor.shape and len(source.shape) != len(tensor.shape):
            raise self.build_shape_error(name, tensor.shape, source)
        return self.cast(source, cast_dtype(tensor, self.target), change.lead, change.edits)

    def cast(self, tensor: Tensor, dtype: str, lead: int = 1, edits: Sequence[Edit] = ()) -> Tensor:
        if not edits and (tensor.dtype == dtype or tensor.dtype not in CASTABLE):
            return tensor
        return apply_edits(tensor, dtype, min(lead, len(tensor.shape)), edits)


def read_float32(tensor: Tensor) -> Array:
    """The values of a tensor, in float32."""
    values: Array = tensor.read().astype(np.float32)
    return values


def _load_vector(tensor: Tensor, scaling: float) -> Array:
    values: Array = read_float32(tensor).reshape(-1) * np.float32(scaling)
    return values
