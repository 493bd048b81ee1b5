"""Merge an adapter into a base model: the merged model as a checkpoint that is computed while it is read.

The tensors that the adapter does not change stay spans of the base's files. The others are computed block by
block (`converters.tensors.computed`), so memory holds one module's factors and a few rows for each thread.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import permutations
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from converters.adapters.base_names import BaseNames, Found, Region
from converters.adapters.config import CHANGES_BASE
from converters.adapters.edits import Add, ColumnMagnitude, LowRank, ReplaceRows, Scale, same
from converters.adapters.names import MAGNITUDE, PREFIX, TOKENS, part_of
from converters.checkpoint import Checkpoint
from converters.config_and_tokenizer_files import GENERATION, MERGED
from converters.errors import CheckpointError, blame, printable
from converters.fingerprints import fingerprint
from converters.names.tied_weights import EMBEDDINGS, HEADS, ends_with, same_values
from converters.quantization.dequantize import quantization_of
from converters.storage.safe_open import read_small_table
from converters.tensors.casting import cast_dtype, parse_dtype
from converters.tensors.computed import computed, grown
from converters.tensors.dtypes import CASTABLE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from converters.adapters.adapter import Adapter, Module, Pair
    from converters.tensors.computed import Edit
    from converters.tensors.tensor import Array, Tensor

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
_TOKENIZER = re.compile(
    r"tokenizer.*|special_tokens_map\.json|added_tokens\.json|vocab\..+|merges\.txt|chat_template\..+|.+\.model"
)
_WITH_HEAD = re.compile(r".*(ForCausalLM|LMHeadModel|ForConditionalGeneration|ForMaskedLM|ForPreTraining)")
_OF_ENCODERS = ("embeddings.word_embeddings.weight", "embeddings.tok_embeddings.weight")
_OTHER_HEAD = "the head over the vocabulary"
_OF_BOTH = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
_LABELS = ("id2label", "label2id", "num_labels", "problem_type")
_LABELLED = ("SEQ_CLS", "TOKEN_CLS")
# Modules whose factors are kept, for a few threads: those that are written now, and those that come next.
_KEPT, _STACKS_KEPT = 16, 4
_MAX_NESTED = 4


@dataclass
class _Change:
    """What happens to one tensor of the base.

    Attributes:
        lead: how many of its dimensions are rows.
        source: the tensor to start from where it is not the base's own.
    """

    lead: int = 1
    edits: list[Edit] = field(default_factory=list)
    source: Tensor | None = None

    def same(self, other: _Change) -> bool:
        """Whether equal tensors are equal after both."""
        mine, theirs = self.source, other.source
        if mine is None or theirs is None or mine is theirs:
            sources = mine is theirs
        else:
            sources = same_values(mine, theirs)
        return sources and len(self.edits) == len(other.edits) and all(map(same, self.edits, other.edits))


def merge(adapter: Adapter, base: Checkpoint, *, dtype: str = "keep") -> Checkpoint:
    """The base model with an adapter merged into it.

    Args:
        base: a checkpoint of any format, under live names or those of the files; not quantized.
        dtype: keep (that of the base's tensor), float32, bfloat16 or float16, for tensors that change. Write
            the result with the same dtype.

    Returns:
        A checkpoint whose changed tensors are computed while they are read. Its documents record what was
        merged.

    Raises:
        CheckpointError: the adapter is of a kind that cannot be merged, was merged before, or belongs to
            another base.
    """
    return _Merge(adapter, base, dtype).result()


def check_mergeable(adapter: Adapter) -> None:
    """Refuse an adapter whose settings change what is added to a weight in ways not supported here."""
    config = adapter.config
    if (key := config.unsupported) is not None:
        raise CheckpointError(f"{config.path}: {printable(key)[:60]} is set, which cannot be merged here")
    initial = config.values.get("init_lora_weights")
    if isinstance(initial, str) and CHANGES_BASE.fullmatch(initial):
        raise CheckpointError(
            f"{config.path}: init_lora_weights is {printable(initial)[:40]!r}, which changes the base's "
            "weights too; save the adapter with path_initial_model_for_weight_conversion"
        )


class _Merge:
    """An adapter, the base that it is merged into, and what happens to each of the base's tensors."""

    def __init__(self, adapter: Adapter, base: Checkpoint, dtype: str) -> None:
        self.adapter = adapter
        self.config = adapter.config
        self.base = base
        self.target = parse_dtype(dtype)
        self.base_config = read_small_table(base.companions.get("config.json"))
        self.ties = {**base.aliases, **self._implied_ties()}
        self.names = BaseNames(base.tensors, self.ties)
        self.changes: dict[str, _Change] = {}
        self.added: dict[str, Tensor] = {}
        self.config_changes: dict[str, Any] = {}
        # A stack of experts has one pair of factors for all of them, from which each takes its own.
        self._whole = lru_cache(_STACKS_KEPT)(_whole)
        self._factors = lru_cache(_KEPT)(self._load_factors)
        self._vector = lru_cache(_KEPT)(_load_vector)

    def _implied_ties(self) -> dict[str, str]:
        """Names that the files lack, of modules that share the only embedding's weights: alias -> owner."""
        architectures = self.base_config.get("architectures")
        named = architectures[0] if isinstance(architectures, list) and architectures else None
        names = list(self.base.tensors)
        embeddings = [name for name in names if ends_with(name, EMBEDDINGS)]
        if not isinstance(named, str) or len(embeddings) != 1:
            return {}
        owner = embeddings[0]
        ties = dict.fromkeys(_OF_BOTH if ends_with(owner, ("shared.weight",)) else (), owner)
        headed = any(ends_with(name, HEADS) for name in [*names, *self.base.aliases])
        if (
            not headed
            and _WITH_HEAD.fullmatch(named)
            and self.base_config.get("tie_word_embeddings") is not False
        ):
            # BERT's kind calls its head by other names.
            ties[_OTHER_HEAD if ends_with(owner, _OF_ENCODERS) else "lm_head.weight"] = owner
        return ties

    def _find(self, live: str) -> Found:
        with blame(self.base.root):
            found = self.names.find(live)
        if found is None:
            near = self.names.nearest(live)
            hint = f"; the nearest is {near!r}" if near else ""
            raise CheckpointError(
                f"{self.base.root}: holds no {live!r}, which {self.adapter.root} changes{hint}; give the "
                "base that the adapter was trained on"
            )
        return found

    def _misfit(self, live: str, shape: Sequence[int], *theirs: Tensor) -> CheckpointError:
        shapes = " and ".join(str(list(tensor.shape)) for tensor in theirs)
        return CheckpointError(
            f"{self.base.root}: {live!r} has shape {list(shape)}, which {shapes} in {self.adapter.root} do "
            "not fit; give the base that the adapter was trained on"
        )

    def _change(self, name: str, lead: int) -> _Change:
        change = self.changes.setdefault(name, _Change(lead))
        if change.lead != lead:
            raise CheckpointError(f"{self.adapter.root}: changes {name!r} in two ways; this cannot be merged")
        return change

    def _inputs_first(self, live: str) -> bool:
        """Whether a square weight has its inputs as rows."""
        kind = self.base_config.get("model_type")
        leaf = live.removesuffix(".weight").rpartition(".")[2]
        if isinstance(kind, str):
            return leaf in INPUTS_FIRST.get(kind, ())
        return self.config.fan_in_fan_out

    def _edited(self, name: str, count: int) -> Tensor:
        """A tensor after the first edits of its change."""
        change = self.changes[name]
        tensor = self.base.tensors[self.ties.get(name, name)] if change.source is None else change.source
        return computed(tensor, "F64" if tensor.dtype == "F64" else "F32", change.lead, change.edits[:count])

    def _regions(self, found: Found, lead: int = 0) -> Iterator[tuple[_Change, Region, int]]:
        """The change of each tensor that holds rows of a parameter, the region, and its number of rows."""
        for region in found.regions:
            stack = len(self.base.tensors[self.ties.get(region.name, region.name)].shape) == 3
            change = self._change(region.name, lead or (2 if stack else 1))
            yield change, region, region.stop - region.start

    def _without_bias(self, module: str) -> None:
        """With trained tokens, or tied to a saved embedding, peft's head leaves out the base's bias."""
        found = self.names.find(f"{module}.bias")
        if found is not None and found.whole is not None:
            zeros = partial(np.zeros, found.shape, np.float32)
            self._change(found.whole, 0).edits.append(Scale(zeros, 0, 0, 1, columns=True))

    def _untied(self) -> list[str]:
        """The tied names that need tensors of their own; all, or none.

        An adapter on an embedding does not change the head that shares its weights, nor the other way round,
        unless the files hold the same change of both.
        """
        apart = next((alias for alias, owner in self.ties.items() if not self._stay_tied(alias, owner)), "")
        if not apart:
            return []
        if self.base_config.get("is_encoder_decoder") or _OTHER_HEAD in self.ties:
            raise CheckpointError(
                f"{self.base.root}: {self.ties[apart]!r} and {apart!r} are one parameter, of which "
                f"{self.adapter.root} changes one use only; in this architecture they cannot be untied"
            )
        self.config_changes["tie_word_embeddings"] = False
        return list(self.ties)

    def _stay_tied(self, alias: str, owner: str) -> bool:
        theirs = self.changes.get(owner, _Change())
        resized = theirs.source is not None and theirs.source.shape[0] != self.base.tensors[owner].shape[0]
        if resized and self.changes.setdefault(alias, _Change(theirs.lead)).source is None:
            self.changes[alias].source = theirs.source  # both have a row for each token
        return self.changes.get(alias, _Change()).same(theirs)

    def _merged(self, name: str, tensor: Tensor) -> Tensor:
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
            raise self._misfit(name, tensor.shape, source)
        return self._as(source, cast_dtype(tensor, self.target), change.lead, change.edits)

    def _as(self, tensor: Tensor, dtype: str, lead: int = 1, edits: Sequence[Edit] = ()) -> Tensor:
        if not edits and (tensor.dtype == dtype or tensor.dtype not in CASTABLE):
            return tensor
        return computed(tensor, dtype, min(lead, len(tensor.shape)), edits)

    def _check_base(self, digest: str) -> None:
        base, adapter = self.base, self.adapter
        if any(name.startswith(PREFIX) or part_of(name) is not None for name in base.tensors):
            raise CheckpointError(f"{base.root}: holds an adapter; give the base model alone")
        quantized = quantization_of(base)
        if quantized is not None:
            method = printable(quantized.get("quant_method"))[:40]
            raise CheckpointError(
                f"{base.root}: is quantized ({method}); give the model that it was made from, or --dequantize"
            )
        if digest in {known.get("adapter") for known in self._merged_before()}:
            raise CheckpointError(f"{base.root}: {adapter.root} is merged into it already ({MERGED})")
        recorded = adapter.base_fingerprint
        if recorded is not None and recorded != fingerprint(base):
            raise CheckpointError(
                f"{base.root}: is not the base of {adapter.root}, which was trained on other weights"
            )

    def _merged_before(self) -> list[dict[str, Any]]:
        record = read_small_table(self.base.companions.get(MERGED)).get("merged")
        return [known for known in record if isinstance(known, dict)] if isinstance(record, list) else []

    def _record(self, digest: str) -> bytes:
        about = {
            "adapter": digest,
            "name": self.adapter.root.name,
            "type": self.config.type,
            "base": self.config.base,
        }
        document = {"version": 1, "merged": [*self._merged_before(), about]}
        return (json.dumps(document, indent=2) + "\n").encode()

    def _on_bias(self, module: str, edit: Edit, vector: Tensor) -> None:
        live = f"{module}.bias"
        weight = self.names.find(f"{module}.weight")
        if weight is not None and self.names.find(live) is None:
            raise CheckpointError(
                f"{self.base.root}: {module} has no bias, and {self.adapter.root} adds one (lora_bias); no "
                "model of this architecture holds it"
            )
        found = self._find(live)
        if found.whole is None or found.shape != (vector.numel,):
            raise self._misfit(live, found.shape, vector)
        self._change(found.whole, 0).edits.append(edit)

    def _load_factors(
        self, left: Tensor, right: Tensor, scaling: float, count: int, expert: int, transposed: bool
    ) -> tuple[Array, Array]:
        """The factors of one expert's product, whose rows are the weight's: scaled left, and right."""
        read = self._whole if count > 1 else _whole
        first = read(left).reshape(count, -1, prod(left.shape[1:]))[expert]
        # The ranks of all experts take turns along the columns.
        second = read(right).reshape(right.shape[0], -1, count)[:, :, expert]
        if transposed:
            first, second = second.T, first.T
        return np.ascontiguousarray(second) * np.float32(scaling), np.ascontiguousarray(first)

    def _is_saved(self, module: str) -> bool:
        """Whether `modules_to_save` names this module, or one that it is in."""
        saved = self.config.values.get("modules_to_save")
        names = [name for name in saved if isinstance(name, str)] if isinstance(saved, list) else []
        return any(f".{name}." in f".{module}." for name in names)

    def result(self) -> Checkpoint:
        check_mergeable(self.adapter)
        digest = self.adapter.digest
        self._check_base(digest)
        if self.config.type == "IA3":
            for module in self.adapter.modules:
                self._ia3(module)
        else:
            self._lora_and_tokens()
        for (module_name, leaf), tensor in self.adapter.replaced.items():
            self._replace(module_name, leaf, tensor)
        untied = self._untied()
        tensors: dict[str, Tensor] = {}
        for name, tensor in self.base.tensors.items():
            tensors[name] = self._merged(name, tensor)
            for alias in untied if self.ties and name in self.ties.values() else ():
                if self.ties[alias] == name:
                    tensors[alias] = self._merged(alias, tensor)
        tensors.update(self.added)
        companions = {name: path for name, path in self.base.companions.items() if name != MERGED}
        theirs = {n: p for n, p in self.adapter.checkpoint.companions.items() if _TOKENIZER.fullmatch(n)}
        if theirs:
            companions = {n: p for n, p in companions.items() if not _TOKENIZER.fullmatch(n)} | theirs
        if (generation := self.adapter.checkpoint.companions.get(GENERATION)) is not None:
            companions[GENERATION] = generation  # which token ends an answer
        return Checkpoint(
            format=self.base.format,
            root=self.base.root,
            tensors=tensors,
            aliases={} if untied else {a: owner for a, owner in self.ties.items() if a != _OTHER_HEAD},
            metadata=self.base.metadata,
            companions=companions,
            config=self.config_changes,
            documents={MERGED: self._record(digest)},
            ties=False,
        )

    # -- LoRA ------------------------------------------------------------------------------------------------

    def _lora_and_tokens(self) -> None:
        # Tokens first: LoRA's layer has the one with the tokens inside it.
        own = {
            self._tokens(module): module for module in self.adapter.modules if module.find(TOKENS) is not None
        }
        paths = [module.path for module in own.values()]
        for alias, owner in self.ties.items():
            if owner in own and alias not in own:  # peft gives it the owner's
                self._change(alias, 1).edits.extend(self.changes[owner].edits)
                paths.append(alias.removesuffix(".weight"))
        for path in paths:
            self._without_bias(path)
        nested: dict[str, list[tuple[Module, Pair]]] = {}
        for module in self.adapter.modules:
            pair = module.pair()
            if pair is None:
                continue
            if self.config.target_parameters and self._target_parameters(module.path):
                nested.setdefault(module.path, []).append((module, pair))
            else:
                self._lora(module, pair)
        for path, modules in nested.items():
            self._parameters(path, modules)

    def _lora(self, module: Module, pair: Pair) -> None:
        left, right, embedding = pair
        live = f"{module.path}.weight"
        found = self._find(live)
        inputs, outputs = prod(left.shape[1:]), right.shape[0]
        convolution = len(left.shape) > 2
        if convolution:
            transposed = False
            fits = found.shape[:1] == (outputs,) and found.shape[1:] == left.shape[1:]
        else:
            transposed = embedding or found.shape != (outputs, inputs)
            if inputs == outputs and not embedding:
                transposed = self._inputs_first(live)
            fits = found.shape == ((inputs, outputs) if transposed else (outputs, inputs))
        if not fits:
            raise self._misfit(live, found.shape, left, right)
        scaling = self.config.scaling(module.path)
        factors = partial(self._factors, left, right, scaling, 1, 0, transposed)
        magnitude = module.find(MAGNITUDE)
        lengths = None if magnitude is None else partial(self._vector, magnitude, 1.0)
        if magnitude is not None and magnitude.numel != outputs:
            raise self._misfit(live, found.shape, magnitude)
        for change, region, count in self._regions(found, int(convolution)):
            count = found.shape[0] if convolution else count
            change.edits.append(
                LowRank(factors, region.row, region.start, count, None if transposed else lengths)
            )
            if lengths is not None and transposed:
                before = partial(self._edited, region.name, len(change.edits))
                change.edits.append(ColumnMagnitude(lengths, before))
        bias = module.tensors.get(("lora_B", "bias"))
        if bias is not None:
            self._on_bias(module.path, Add(partial(self._vector, bias, scaling)), bias)

    def _target_parameters(self, path: str) -> list[str]:
        """The parameters of a module that `target_parameters` names, in the order that peft wraps them."""
        found = []
        for target in self.config.target_parameters:
            leaf = target.rpartition(".")[2]
            live = f"{path}.{leaf}"
            if (live == target or live.endswith(f".{target}")) and self.names.find(live) is not None:
                found.append(leaf)
        return sorted(dict.fromkeys(found), key=lambda leaf: ("down" in leaf, leaf))

    def _parameters(self, path: str, modules: list[tuple[Module, Pair]]) -> None:
        """LoRA on parameters of one module: the innermost wrapper is that of the first."""
        pairs = [pair for _, pair in sorted(modules, key=lambda each: -each[0].wraps)]
        leaves = self._target_parameters(path)
        if len(leaves) > _MAX_NESTED or len(leaves) < len(pairs):
            raise CheckpointError(
                f"{self.adapter.root}: {path}: has {len(pairs)} adapters for the target_parameters {leaves}"
            )
        founds = {leaf: self._find(f"{path}.{leaf}") for leaf in leaves}
        for order in permutations(leaves, len(pairs)):
            chosen = [
                (pair, leaf, self._stack_fits(path, leaf, founds[leaf], pair))
                for pair, leaf in zip(pairs, order, strict=True)
            ]
            if all(fit is not None for _, _, fit in chosen):
                break
        else:
            raise self._misfit(f"{path}.{leaves[0]}", founds[leaves[0]].shape, *pairs[0][:2])
        for pair, leaf, transposed in chosen:
            self._stacked(f"{path}.{leaf}", founds[leaf], pair, transposed=bool(transposed))

    def _stack_fits(self, path: str, leaf: str, found: Found, pair: Pair) -> bool | None:
        """Whether the factors fit with the parameter's inputs as rows; None if they do not fit at all."""
        left, right, _ = pair
        count = found.shape[0] if len(found.shape) == 3 else 1
        if len(found.shape) not in (2, 3) or left.shape[0] != self.config.rank(f"{path}.{leaf}") * count:
            return None
        inputs, outputs = left.shape[1], right.shape[0]
        if inputs == outputs and found.shape[-2:] == (inputs, outputs):
            return count > 1 and self._inputs_first(leaf)
        fits = {(outputs, inputs): False, (inputs, outputs): len(found.shape) == 3 or None}
        return fits.get((found.shape[-2], found.shape[-1]))

    def _stacked(self, live: str, found: Found, pair: Pair, *, transposed: bool) -> None:
        left, right, _ = pair
        count = found.shape[0] if len(found.shape) == 3 else 1
        height = found.shape[-2]
        scaling = self.config.scaling(live)
        for change, region, _ in self._regions(found):
            for expert in range(region.start // height, -(-region.stop // height)):
                low, high = max(region.start, expert * height), min(region.stop, (expert + 1) * height)
                factors = partial(self._factors, left, right, scaling, count, expert, transposed)
                row = region.row + low - region.start
                change.edits.append(LowRank(factors, row, low - expert * height, high - low))

    # -- the others ------------------------------------------------------------------------------------------

    def _tokens(self, module: Module) -> str:
        """The trained tokens of a module; returns the name of its weight."""
        values = module.find(TOKENS)
        assert values is not None
        live = f"{module.path}.weight"
        found = self._find(live)
        # Of modules that share a weight, the settings may name one.
        owner = self.ties.get(found.whole or "", found.whole)
        sharing = [name for name in (owner, *self.ties) if name and self.ties.get(name, name) == owner]
        paths = [module.path, *(name.removesuffix(".weight") for name in sharing)]
        rows = next((rows for path in paths if (rows := self._rows(path)) is not None), None)
        if rows is None:
            raise CheckpointError(f"{self.config.path}: names no trainable tokens of {module.path}")
        whole, old = found.whole, found.shape[0]
        new = sorted(row for row in rows if row >= old)  # of tokens that the base does not have
        fits = values.shape == (len(rows), *found.shape[1:]) and new == list(range(old, old + len(new)))
        if whole is None or not fits:
            raise self._misfit(live, found.shape, values)
        change = self._change(whole, 1)
        if new:
            change.source = grown(self.base.tensors[self.ties.get(whole, whole)], old + len(new))
            self.config_changes["vocab_size"] = old + len(new)
        change.edits.append(ReplaceRows(rows, partial(self._matrix, values)))
        return whole

    def _rows(self, path: str) -> tuple[int, ...] | None:
        """The tokens that the settings name for a module."""
        named = self.config.tokens.items()
        return next((rows for name, rows in named if not name or f".{path}".endswith(f".{name}")), None)

    def _matrix(self, tensor: Tensor) -> Array:
        return self._vector(tensor, 1.0).reshape(tensor.shape)

    def _ia3(self, module: Module) -> None:
        values = module.find("ia3_l")
        if values is None or len(values.shape) != 2:
            raise CheckpointError(
                f"{self.adapter.root}: {module.path}: its (IA)^3 vector is of no linear layer"
            )
        live = f"{module.path}.weight"
        found = self._find(live)
        length = values.numel
        inputs = self.config.is_feedforward(module.path)
        if inputs is None:  # peft then knows them by the type of the model; their vectors are rows
            inputs = values.shape[0] == 1
        if len(found.shape) != 2 or values.shape != ((1, length) if inputs else (length, 1)):
            raise self._misfit(live, found.shape, values)
        # Rows are outputs, unless only the columns fit.
        fits = [found.shape[1] == length, found.shape[0] == length]
        inputs_first = self._inputs_first(live) if all(fits) else not fits[0 if inputs else 1]
        if not any(fits):
            raise self._misfit(live, found.shape, values)
        vector = partial(self._vector, values, 1.0)
        for change, region, count in self._regions(found):
            change.edits.append(Scale(vector, region.row, region.start, count, inputs != inputs_first))
        if not inputs and self.names.find(f"{module.path}.bias") is not None:
            self._on_bias(module.path, Scale(vector, 0, 0, 1, columns=True), values)

    def _replace(self, module: str, leaf: str, tensor: Tensor) -> None:
        live = f"{module}.{leaf}" if module else leaf
        with blame(self.base.root):
            found = self.names.find(live)
        if found is None:
            if not self._is_saved(module):
                self._find(live)  # says so
            self._add(live, tensor)
            return
        name = found.whole
        resized = ends_with(live, (*EMBEDDINGS, *HEADS)) and found.shape[1:] == tensor.shape[1:]
        if name is None or (found.shape != tensor.shape and not resized):
            raise self._misfit(live, found.shape, tensor)
        change = self.changes.setdefault(name, _Change(1 if len(tensor.shape) > 1 else 0))
        change.source = tensor
        if found.shape != tensor.shape:
            self.config_changes["vocab_size"] = tensor.shape[0]
        if leaf == "weight" and self.config.tie and name in self.ties:
            owner = self.ties[name].removesuffix(".weight")
            if self._is_saved(module) or self._is_saved(owner):
                self._without_bias(module)

    def _add(self, live: str, tensor: Tensor) -> None:
        """A tensor that the base lacks: a head for another task."""
        sizes: dict[str, int] = {}
        for held in self.base.tensors.values():
            if held.dtype in CASTABLE:
                sizes[held.dtype] = sizes.get(held.dtype, 0) + held.numel
        usual = max(sizes, key=lambda name: sizes[name]) if sizes else tensor.dtype
        self.added[live] = self._as(tensor, self.target or usual)
        theirs = read_small_table(self.adapter.trained_config)
        self.config_changes |= {key: theirs[key] for key in _LABELS if key in theirs}
        labelled = self.config.values.get("task_type") in _LABELLED and len(tensor.shape) == 2
        if (
            labelled
            and "id2label" not in theirs
            and len(self.base_config.get("id2label") or {}) != tensor.shape[0]
        ):
            self.config_changes["id2label"] = {str(i): f"LABEL_{i}" for i in range(tensor.shape[0])}
            self.config_changes["label2id"] = {f"LABEL_{i}": i for i in range(tensor.shape[0])}


def _load_vector(tensor: Tensor, scaling: float) -> Array:
    values: Array = _whole(tensor).reshape(-1) * np.float32(scaling)
    return values


def _whole(tensor: Tensor) -> Array:
    values: Array = tensor.read().astype(np.float32)
    return values
