"""Where a parameter of a live model lies in the files of its checkpoint.

transformers renames tensors while it loads them, and stacks the experts of a layer into one parameter. It
renames them back when it saves. An adapter has the live names, a checkpoint either. A name of the files is
accepted only if the checkpoint holds it, so rules of other architectures do no harm.

Source: transformers/conversion_mapping.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

from converters.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from converters.tensors.tensor import Shape, Tensor

# (in a live name, in a file): each is tried alone and after others.
_RENAMED: tuple[tuple[str, str], ...] = (
    # A model of a task has its base model below a name of its own; a file may lack it, or have it.
    (r"^(model|transformer|bert|roberta|gpt_neox|decoder|encoder|base_model|backbone)\.", ""),
    # Vision-language models.
    (r"^model\.language_model\.", "language_model.model."),
    (r"^model\.language_model\.", "model."),
    (r"^lm_head\.", "language_model.lm_head."),
    (r"^model\.(vision_tower|visual|audio_tower|multi_modal_projector|vision_model)\.", r"\1."),
    # Mixtures of experts.
    (r"\.mlp\.", ".block_sparse_moe."),
    (r"\.router\.", ".gate."),
    (r"\.block_sparse_moe\.router\.weight$", ".block_sparse_moe.router.layer.weight"),
    (r"\.experts\.gate_up_proj$", ".input_linear.weight"),
    (r"\.experts\.down_proj$", ".output_linear.weight"),
    (r"\.experts\.gate_up_proj$", ".experts.fc1.weight"),
    (r"\.experts\.down_proj$", ".experts.fc2.weight"),
    (r"\.mlp\.gate\.e_score_correction_bias$", ".mlp.e_score_correction_bias"),
    # Vision transformers.
    (r"\.layers\.", ".encoder.layer."),
    (r"\.attention\.q_proj\.", ".attention.attention.query."),
    (r"\.attention\.k_proj\.", ".attention.attention.key."),
    (r"\.attention\.v_proj\.", ".attention.attention.value."),
    (r"\.attention\.o_proj\.", ".attention.output.dense."),
    (r"\.mlp\.fc1\.", ".intermediate.dense."),
    (r"\.mlp\.fc2\.", ".output.dense."),
    # Heads and norms.
    (r"^lm_head\.", "embed_out."),
    (r"LayerNorm\.weight$", "LayerNorm.gamma"),
    (r"LayerNorm\.bias$", "LayerNorm.beta"),
)
_RULES = tuple((re.compile(live), file) for live, file in _RENAMED)
_MOST_RULES = 3
# The parts of one expert, by the stacked parameter that they form; the parts lie along its rows.
_STACKED: dict[str, tuple[tuple[str, ...], ...]] = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}
_EXPERT = re.compile(r"(.+\.experts)\.(\d{1,6})\.(\w+)\.weight")
_NEAREST = 20_000


@dataclass(frozen=True)
class Region:
    """Rows of a tensor in the files that hold rows of a live parameter.

    All dimensions but the last are taken together as rows, for a stack of experts; else the first alone.

    Attributes:
        name: of the tensor.
        row: the first row there.
        start, stop: the rows of the live parameter.
    """

    name: str
    row: int
    start: int
    stop: int


@dataclass(frozen=True)
class Found:
    """A live parameter: its shape, the regions that hold its rows, and the tensor that it is, if any."""

    shape: Shape
    regions: tuple[Region, ...]
    whole: str | None = None


class BaseNames:
    """The tensors of a base model, found by the names of the live model."""

    def __init__(self, tensors: Mapping[str, Tensor], aliases: Mapping[str, str]) -> None:
        self.tensors = tensors
        self.aliases = aliases

    def find(self, live: str) -> Found | None:
        """The parameter of that live name; None if the files hold nothing like it.

        A tied alias is found under its own name.

        Raises:
            CheckpointError: the name could mean several tensors, or an expert is missing.
        """
        for candidates in _variants(live):
            found = [name for name in candidates if name in self.tensors or name in self.aliases]
            if len(found) > 1:
                raise CheckpointError(f"{live!r} could be {found[0]!r} or {found[1]!r}")
            if found:
                return self._whole(found[0])
            for name in candidates:
                stacked = self._from_experts(name) or self._in_stack(name)
                if stacked is not None:
                    return stacked
        below = self._suffixes.get(live, ())
        return self._whole(below[0]) if len(below) == 1 else None

    def _whole(self, name: str) -> Found:
        shape = self.tensors[self.aliases.get(name, name)].shape
        return Found(shape, (Region(name, 0, 0, _rows(shape)),), name)

    def nearest(self, live: str) -> str:
        """The name in the files that is most like `live`; `""` if none is."""
        names = list(self.tensors)
        tail = live.split(".")[-2:]
        alike = [name for name in names if name.split(".")[-2:] == tail] or names
        return next(iter(get_close_matches(live, alike[:_NEAREST], 1, 0.3)), "")

    def _from_experts(self, live: str) -> Found | None:
        """A stacked parameter, from files with a tensor for each expert."""
        above, _, leaf = live.rpartition(".")
        if not above.endswith(".experts"):
            return None
        for parts in _STACKED.get(leaf, ()):
            first = [self.tensors.get(f"{above}.0.{part}.weight") for part in parts]
            shapes = [tensor.shape for tensor in first if tensor is not None]
            if len(shapes) != len(parts) or any(len(shape) != 2 for shape in shapes):
                continue
            regions: list[Region] = []
            row = 0
            count = 0
            while f"{above}.{count}.{parts[0]}.weight" in self.tensors:
                for part, shape in zip(parts, shapes, strict=True):
                    name = f"{above}.{count}.{part}.weight"
                    if name not in self.tensors or self.tensors[name].shape != shape:
                        raise CheckpointError(f"{name!r} is missing, or has another shape than expert 0")
                    regions.append(Region(name, 0, row, row + shape[0]))
                    row += shape[0]
                count += 1
            return Found((count, row // count, shapes[0][1]), tuple(regions))
        return None

    def _in_stack(self, live: str) -> Found | None:
        """The weight of one expert, in files with stacked parameters."""
        match = _EXPERT.fullmatch(live)
        if match is None:
            return None
        above, expert, part = match[1], int(match[2]), match[3]
        for leaf, layouts in _STACKED.items():
            for parts in layouts:
                stack = self.tensors.get(f"{above}.{leaf}")
                if part not in parts or stack is None or len(stack.shape) != 3:
                    continue
                experts, rows, columns = stack.shape
                if expert >= experts or rows % len(parts):
                    continue
                height = rows // len(parts)
                row = expert * rows + parts.index(part) * height
                return Found((height, columns), (Region(f"{above}.{leaf}", row, 0, height),))
        return None

    @cached_property
    def _suffixes(self) -> dict[str, list[str]]:
        """Live name -> the names that have one module more above it."""
        found: dict[str, list[str]] = {}
        for name in self.tensors:
            found.setdefault(name.partition(".")[2], []).append(name)
        return found


def _variants(live: str) -> Iterator[list[str]]:
    """The names that a live name may have in a file: itself, after one rule, after two ..."""
    seen = {live}
    current = [live]
    for _ in range(_MOST_RULES + 1):
        yield current
        following: list[str] = []
        for name in current:
            for pattern, file in _RULES:
                other = pattern.sub(file, name, count=1)
                if other not in seen:
                    seen.add(other)
                    following.append(other)
        current = following


def _rows(shape: Sequence[int]) -> int:
    """The rows of a parameter: see `Region`."""
    return prod(shape[:-1]) if len(shape) == 3 else shape[0] if shape else 1
