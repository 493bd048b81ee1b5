"""Merge an adapter into a base model: the merged model as a checkpoint that is computed while it is read.

The tensors that the adapter does not change stay spans of the base's files. The others are computed block by
block (`converters.tensors.computed`), so memory holds one module's factors and a few rows for each thread.
"""

from __future__ import annotations

import json
import re
from functools import partial
from typing import TYPE_CHECKING, Any

from converters.adapters.base_changes import OTHER_HEAD, BaseChanges, Change
from converters.adapters.config import CHANGES_BASE
from converters.adapters.edits import ReplaceRows, Scale
from converters.adapters.lora_changes import LoraChanges
from converters.adapters.names import PREFIX, TOKENS, part_of
from converters.checkpoint import Checkpoint
from converters.config_and_tokenizer_files import GENERATION, MERGED
from converters.errors import CheckpointError, blame, printable
from converters.fingerprints import fingerprint
from converters.names.tied_weights import EMBEDDINGS, HEADS, ends_with
from converters.quantization.dequantize import quantization_of
from converters.storage.safe_open import read_small_table
from converters.tensors.computed import grown
from converters.tensors.dtypes import CASTABLE

if TYPE_CHECKING:
    from converters.adapters.adapter import Adapter, Module
    from converters.storage.path_or_url import Place
    from converters.tensors.tensor import Array, Tensor

_TOKENIZER = re.compile(
    r"tokenizer.*|special_tokens_map\.json|added_tokens\.json|vocab\..+|merges\.txt|chat_template\..+|.+\.model"
)
_LABELS = ("id2label", "label2id", "num_labels", "problem_type")
_LABELLED = ("SEQ_CLS", "TOKEN_CLS")


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
    check_mergeable(adapter)
    on = BaseChanges(adapter, base, dtype)
    digest = adapter.digest
    _check_base(on, digest)
    if on.config.type == "IA3":
        for module in adapter.modules:
            _ia3(on, module)
    else:
        _train_tokens(on)  # first: LoRA's layer has the one with the tokens inside it
        LoraChanges(on).apply()
    for (module_name, leaf), tensor in adapter.replaced.items():
        _replace(on, module_name, leaf, tensor)
    untied = on.untied()
    tensors: dict[str, Tensor] = {}
    for name, tensor in base.tensors.items():
        for one in (name, *(alias for alias in untied if on.ties[alias] == name)):
            tensors[one] = on.merged(one, tensor)
    return Checkpoint(
        format=base.format,
        root=base.root,
        tensors={**tensors, **on.added},
        aliases={} if untied else {a: owner for a, owner in on.ties.items() if a != OTHER_HEAD},
        metadata=base.metadata,
        companions=_companions(adapter, base),
        config=on.config_changes,
        documents={MERGED: _record(on, digest)},
        ties=False,
    )


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


def _companions(adapter: Adapter, base: Checkpoint) -> dict[str, Place]:
    """The base's files beside its weights, with the adapter's tokenizer, and what ends an answer."""
    theirs = {
        name: path for name, path in adapter.checkpoint.companions.items() if _TOKENIZER.fullmatch(name)
    }
    kept = {
        name: path
        for name, path in base.companions.items()
        if name != MERGED and not (theirs and _TOKENIZER.fullmatch(name))
    }
    generation = adapter.checkpoint.companions.get(GENERATION)
    return kept | theirs | ({} if generation is None else {GENERATION: generation})


def _check_base(on: BaseChanges, digest: str) -> None:
    base, adapter = on.base, on.adapter
    if any(name.startswith(PREFIX) or part_of(name) is not None for name in base.tensors):
        raise CheckpointError(f"{base.root}: holds an adapter; give the base model alone")
    quantized = quantization_of(base)
    if quantized is not None:
        method = printable(quantized.get("quant_method"))[:40]
        raise CheckpointError(
            f"{base.root}: is quantized ({method}); give the model that it was made from, or --dequantize"
        )
    if digest in {known.get("adapter") for known in _merged_before(on)}:
        raise CheckpointError(f"{base.root}: {adapter.root} is merged into it already ({MERGED})")
    recorded = adapter.base_fingerprint
    if recorded is not None and recorded != fingerprint(base):
        raise CheckpointError(
            f"{base.root}: is not the base of {adapter.root}, which was trained on other weights"
        )


def _merged_before(on: BaseChanges) -> list[dict[str, Any]]:
    record = read_small_table(on.base.companions.get(MERGED)).get("merged")
    return [known for known in record if isinstance(known, dict)] if isinstance(record, list) else []


def _record(on: BaseChanges, digest: str) -> bytes:
    about = {
        "adapter": digest,
        "name": on.adapter.root.name,
        "type": on.config.type,
        "base": on.config.base,
    }
    document = {"version": 1, "merged": [*_merged_before(on), about]}
    return (json.dumps(document, indent=2) + "\n").encode()


def _train_tokens(on: BaseChanges) -> None:
    own = {_tokens(on, module): module for module in on.adapter.modules if module.find(TOKENS) is not None}
    paths = [module.path for module in own.values()]
    for alias, owner in on.ties.items():
        if owner in own and alias not in own:  # peft gives it the owner's
            on.change(alias, 1).edits.extend(on.changes[owner].edits)
            paths.append(alias.removesuffix(".weight"))
    for path in paths:
        on.without_bias(path)


def _tokens(on: BaseChanges, module: Module) -> str:
    """The trained tokens of a module; returns the name of its weight."""
    values = module.find(TOKENS)
    assert values is not None
    live = f"{module.path}.weight"
    found = on.find(live)
    # Of modules that share a weight, the settings may name one.
    owner = on.ties.get(found.whole or "", found.whole)
    sharing = [name for name in (owner, *on.ties) if name and on.ties.get(name, name) == owner]
    paths = [module.path, *(name.removesuffix(".weight") for name in sharing)]
    rows = next((rows for path in paths if (rows := _rows(on, path)) is not None), None)
    if rows is None:
        raise CheckpointError(f"{on.config.path}: names no trainable tokens of {module.path}")
    whole, old = found.whole, found.shape[0]
    new = sorted(row for row in rows if row >= old)  # of tokens that the base does not have
    fits = values.shape == (len(rows), *found.shape[1:]) and new == list(range(old, old + len(new)))
    if whole is None or not fits:
        raise on.misfit(live, found.shape, values)
    change = on.change(whole, 1)
    if new:
        change.source = grown(on.base.tensors[on.ties.get(whole, whole)], old + len(new))
        on.config_changes["vocab_size"] = old + len(new)
    change.edits.append(ReplaceRows(rows, partial(_matrix, on, values)))
    return whole


def _rows(on: BaseChanges, path: str) -> tuple[int, ...] | None:
    """The tokens that the settings name for a module."""
    named = on.config.tokens.items()
    return next((rows for name, rows in named if not name or f".{path}".endswith(f".{name}")), None)


def _matrix(on: BaseChanges, tensor: Tensor) -> Array:
    return on.vector(tensor, 1.0).reshape(tensor.shape)


def _ia3(on: BaseChanges, module: Module) -> None:
    values = module.find("ia3_l")
    if values is None or len(values.shape) != 2:
        raise CheckpointError(f"{on.adapter.root}: {module.path}: its (IA)^3 vector is of no linear layer")
    live = f"{module.path}.weight"
    found = on.find(live)
    length = values.numel
    inputs = on.config.is_feedforward(module.path)
    if inputs is None:  # peft then knows them by the type of the model; their vectors are rows
        inputs = values.shape[0] == 1
    if len(found.shape) != 2 or values.shape != ((1, length) if inputs else (length, 1)):
        raise on.misfit(live, found.shape, values)
    # Rows are outputs, unless only the columns fit.
    fits = [found.shape[1] == length, found.shape[0] == length]
    inputs_first = on.inputs_first(live) if all(fits) else not fits[0 if inputs else 1]
    if not any(fits):
        raise on.misfit(live, found.shape, values)
    vector = partial(on.vector, values, 1.0)
    for change, region, count in on.regions(found):
        change.edits.append(Scale(vector, region.row, region.start, count, inputs != inputs_first))
    if not inputs and on.names.find(f"{module.path}.bias") is not None:
        on.on_bias(module.path, Scale(vector, 0, 0, 1, columns=True), values)


def _replace(on: BaseChanges, module: str, leaf: str, tensor: Tensor) -> None:
    live = f"{module}.{leaf}" if module else leaf
    with blame(on.base.root):
        found = on.names.find(live)
    if found is None:
        if not _is_saved(on, module):
            on.find(live)  # says so
        _add(on, live, tensor)
        return
    name = found.whole
    resized = ends_with(live, (*EMBEDDINGS, *HEADS)) and found.shape[1:] == tensor.shape[1:]
    if name is None or (found.shape != tensor.shape and not resized):
        raise on.misfit(live, found.shape, tensor)
    change = on.changes.setdefault(name, Change(1 if len(tensor.shape) > 1 else 0))
    change.source = tensor
    if found.shape != tensor.shape:
        on.config_changes["vocab_size"] = tensor.shape[0]
    if leaf == "weight" and on.config.tie and name in on.ties:
        owner = on.ties[name].removesuffix(".weight")
        if _is_saved(on, module) or _is_saved(on, owner):
            on.without_bias(module)


def _is_saved(on: BaseChanges, module: str) -> bool:
    """Whether `modules_to_save` names this module, or one that it is in."""
    saved = on.config.values.get("modules_to_save")
    names = [name for name in saved if isinstance(name, str)] if isinstance(saved, list) else []
    return any(f".{name}." in f".{module}." for name in names)


def _add(on: BaseChanges, live: str, tensor: Tensor) -> None:
    """A tensor that the base lacks: a head for another task."""
    sizes: dict[str, int] = {}
    for held in on.base.tensors.values():
        if held.dtype in CASTABLE:
            sizes[held.dtype] = sizes.get(held.dtype, 0) + held.numel
    usual = max(sizes, key=lambda name: sizes[name]) if sizes else tensor.dtype
    on.added[live] = on.cast(tensor, on.target or usual)
    theirs = read_small_table(on.adapter.trained_config)
    on.config_changes |= {key: theirs[key] for key in _LABELS if key in theirs}
    labelled = on.config.values.get("task_type") in _LABELLED and len(tensor.shape) == 2
    if labelled and "id2label" not in theirs and len(on.base_config.get("id2label") or {}) != tensor.shape[0]:
        on.config_changes["id2label"] = {str(i): f"LABEL_{i}" for i in range(tensor.shape[0])}
        on.config_changes["label2id"] = {f"LABEL_{i}": i for i in range(tensor.shape[0])}
