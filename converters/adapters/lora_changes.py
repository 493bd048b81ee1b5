"""LoRA, DoRA and LoRA on parameters, as changes of the base."""

from __future__ import annotations

from functools import lru_cache, partial
from itertools import permutations
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from converters.adapters.base_changes import KEPT, whole
from converters.adapters.edits import Add, ColumnMagnitude, LowRank
from converters.adapters.names import MAGNITUDE
from converters.errors import CheckpointError

if TYPE_CHECKING:
    from converters.adapters.adapter import Module, Pair
    from converters.adapters.base_changes import BaseChanges
    from converters.adapters.base_names import Found
    from converters.tensors.tensor import Array, Tensor

_STACKS_KEPT, _MAX_NESTED = 4, 4


class LoraChanges:
    """Adds the products of factors to what happens to the base."""

    def __init__(self, on: BaseChanges) -> None:
        self.on = on
        # A stack of experts has one pair of factors for all of them, from which each takes its own.
        self._whole = lru_cache(_STACKS_KEPT)(whole)
        self._factors = lru_cache(KEPT)(self._load_factors)

    def apply(self) -> None:
        """Add those of all modules."""
        on = self.on
        nested: dict[str, list[tuple[Module, Pair]]] = {}
        for module in on.adapter.modules:
            pair = module.pair()
            if pair is None:
                continue
            if on.config.target_parameters and self._target_parameters(module.path):
                nested.setdefault(module.path, []).append((module, pair))
            else:
                self._lora(module, pair)
        for path, modules in nested.items():
            self._parameters(path, modules)

    def _lora(self, module: Module, pair: Pair) -> None:
        left, right, embedding = pair
        live = f"{module.path}.weight"
        found = self.on.find(live)
        inputs, outputs = prod(left.shape[1:]), right.shape[0]
        convolution = len(left.shape) > 2
        if convolution:
            transposed = False
            fits = found.shape[:1] == (outputs,) and found.shape[1:] == left.shape[1:]
        else:
            transposed = embedding or found.shape != (outputs, inputs)
            if inputs == outputs and not embedding:
                transposed = self.on.inputs_first(live)
            fits = found.shape == ((inputs, outputs) if transposed else (outputs, inputs))
        if not fits:
            raise self.on.misfit(live, found.shape, left, right)
        scaling = self.on.config.scaling(module.path)
        factors = partial(self._factors, left, right, scaling, 1, 0, transposed)
        magnitude = module.find(MAGNITUDE)
        lengths = None if magnitude is None else partial(self.on.vector, magnitude, 1.0)
        if magnitude is not None and magnitude.numel != outputs:
            raise self.on.misfit(live, found.shape, magnitude)
        for change, region, count in self.on.regions(found, int(convolution)):
            count = found.shape[0] if convolution else count
            change.edits.append(
                LowRank(factors, region.row, region.start, count, None if transposed else lengths)
            )
            if lengths is not None and transposed:
                before = partial(self.on.edited, region.name, len(change.edits))
                change.edits.append(ColumnMagnitude(lengths, before))
        bias = module.tensors.get(("lora_B", "bias"))
        if bias is not None:
            self.on.on_bias(module.path, Add(partial(self.on.vector, bias, scaling)), bias)

    def _target_parameters(self, path: str) -> list[str]:
        """The parameters of a module that `target_parameters` names, in the order that peft wraps them."""
        found = []
        for target in self.on.config.target_parameters:
            leaf = target.rpartition(".")[2]
            live = f"{path}.{leaf}"
            if (live == target or live.endswith(f".{target}")) and self.on.names.find(live) is not None:
                found.append(leaf)
        return sorted(dict.fromkeys(found), key=lambda leaf: ("down" in leaf, leaf))

    def _parameters(self, path: str, modules: list[tuple[Module, Pair]]) -> None:
        """LoRA on parameters of one module: the innermost wrapper is that of the first."""
        pairs = [pair for _, pair in sorted(modules, key=lambda each: -each[0].wraps)]
        leaves = self._target_parameters(path)
        if len(leaves) > _MAX_NESTED or len(leaves) < len(pairs):
            raise CheckpointError(
                f"{self.on.adapter.root}: {path}: has {len(pairs)} adapters for the target_parameters "
                f"{leaves}"
            )
        founds = {leaf: self.on.find(f"{path}.{leaf}") for leaf in leaves}
        for order in permutations(leaves, len(pairs)):
            chosen = [
                (pair, leaf, self._stack_fits(path, leaf, founds[leaf], pair))
                for pair, leaf in zip(pairs, order, strict=True)
            ]
            if all(fit is not None for _, _, fit in chosen):
                break
        else:
            raise self.on.misfit(f"{path}.{leaves[0]}", founds[leaves[0]].shape, *pairs[0][:2])
        for pair, leaf, transposed in chosen:
            self._stacked(f"{path}.{leaf}", founds[leaf], pair, transposed=bool(transposed))

    def _stack_fits(self, path: str, leaf: str, found: Found, pair: Pair) -> bool | None:
        """Whether the factors fit with the parameter's inputs as rows; None if they do not fit at all."""
        left, right, _ = pair
        count = found.shape[0] if len(found.shape) == 3 else 1
        if len(found.shape) not in (2, 3) or left.shape[0] != self.on.config.rank(f"{path}.{leaf}") * count:
            return None
        inputs, outputs = left.shape[1], right.shape[0]
        if inputs == outputs and found.shape[-2:] == (inputs, outputs):
            return count > 1 and self.on.inputs_first(leaf)
        fits = {(outputs, inputs): False, (inputs, outputs): len(found.shape) == 3 or None}
        return fits.get((found.shape[-2], found.shape[-1]))

    def _stacked(self, live: str, found: Found, pair: Pair, *, transposed: bool) -> None:
        left, right, _ = pair
        count = found.shape[0] if len(found.shape) == 3 else 1
        height = found.shape[-2]
        scaling = self.on.config.scaling(live)
        for change, region, _ in self.on.regions(found):
            for expert in range(region.start // height, -(-region.stop // height)):
                low, high = max(region.start, expert * height), min(region.stop, (expert + 1) * height)
                factors = partial(self._factors, left, right, scaling, count, expert, transposed)
                row = region.row + low - region.start
                change.edits.append(LowRank(factors, row, low - expert * height, high - low))

    def _load_factors(
        self, left: Tensor, right: Tensor, scaling: float, count: int, expert: int, transposed: bool
    ) -> tuple[Array, Array]:
        """The factors of one expert's product, whose rows are the weight's: scaled left, and right."""
        read = self._whole if count > 1 else whole
        first = read(left).reshape(count, -1, prod(left.shape[1:]))[expert]
        # The ranks of all experts take turns along the columns.
        second = read(right).reshape(right.shape[0], -1, count)[:, :, expert]
        if transposed:
            first, second = second.T, first.T
        return np.ascontiguousarray(second) * np.float32(scaling), np.ascontiguousarray(first)
