"""Merge an adapter into a base model: the merged model as a checkpoint that is computed while it is read.

The tensors that the adapter does not change stay spans of the base's files. The others are computed block by
block (`portable.converters.tensors.edited_rows`), so memory holds one module's factors and a few rows for
each thread.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from itertools import permutations
from math import prod
from typing import TYPE_CHECKING, Any

from portable.converters.adapters.base_changes import KEPT, BaseChanges, TensorChange, read_float32
from portable.converters.adapters.config import CHANGES_BASE
from portable.converters.adapters.edits import Add, ColumnMagnitude, LoraFactors, LowRank, ReplaceRows, Scale
from portable.converters.adapters.names import MAGNITUDE, PREFIX, TOKENS, parse_name
from portable.converters.checkpoint import Checkpoint
from portable.converters.config_and_tokenizer_files import GENERATION, MERGED, TOKENIZER
from portable.converters.errors import CheckpointError, CommandError, prefix_errors, to_printable
from portable.converters.fingerprints import compute_fingerprint
from portable.converters.lazy_numpy import np
from portable.converters.names.tied_weights import EMBEDDINGS, HEADS, OTHER_HEAD, has_ending
from portable.converters.quantization.dequantize import read_quantization_config
from portable.converters.storage.safe_open import read_small_table
from portable.converters.tensors.dtypes import CASTABLE
from portable.converters.tensors.edited_rows import append_zero_rows

if TYPE_CHECKING:
    from portable.converters.adapters.adapter import AdapterModule, LoraPair, StoredAdapter
    from portable.converters.adapters.base_names import Found
    from portable.converters.storage.path_or_url import Place
    from portable.converters.tensors.tensor import Array, Tensor

_LABELS = ("id2label", "label2id", "num_labels", "problem_type")
_LABELLED = ("SEQ_CLS", "TOKEN_CLS")
_STACKS_KEPT, _MAX_NESTED = 4, 4


def merge(adapter: StoredAdapter, base: Checkpoint, *, dtype: str = "keep") -> Checkpoint:
    """Merge an adapter into a base model.

    Args:
        adapter: Adapter to merge.
        base: Checkpoint of any format that is not quantized. Its tensors may have published names or names in
            memory.
        dtype: Dtype of the changed tensors: `float32`, `bfloat16`, `float16`, or `keep` for the dtype of the
            base's tensor. Write the result with the same dtype.

    Returns:
        A checkpoint whose changed tensors are computed when they are read. Its documents include a record of
        the merged adapter.

    Raises:
        CheckpointError: If this type of adapter cannot be merged, or if the adapter was already merged or
            belongs to another base.
    """
    check_mergeable(adapter)
    on = BaseChanges(adapter, base, dtype)
    _check_base(on)
    with ThreadPoolExecutor(1) as pool:  # hashing releases the GIL, so the two run in parallel
        hashing = pool.submit(lambda: adapter.digest)
        _apply(on)
        digest = hashing.result()
    earlier = _list_merged(base)
    if digest in {record.get("adapter") for record in earlier}:
        raise CommandError(f"{base.root}: already contains the adapter {adapter.root} (see {MERGED})")
    untied = on.find_untied_names()
    tensors: dict[str, Tensor] = {}
    for name, tensor in base.tensors.items():
        for weight_name in (name, *(alias for alias in untied if on.ties[alias] == name)):
            tensors[weight_name] = on.merge_tensor(weight_name, tensor)
    return Checkpoint(
        format=base.format,
        root=base.root,
        tensors={**tensors, **on.added},
        aliases={} if untied else {a: owner for a, owner in on.ties.items() if a != OTHER_HEAD},
        metadata=base.metadata,
        companions=_list_companions(adapter, base),
        config={**base.config, **on.config_changes},
        documents={MERGED: _build_record(on, earlier, digest)},
        ties=False,
    )


def check_base(adapter: StoredAdapter, base: Checkpoint) -> None:
    """Check that an adapter can be merged into a base model, comparing only names and shapes.

    Args:
        adapter: Adapter to merge.
        base: Base model.

    Raises:
        CheckpointError: If the adapter cannot be merged into the base, see `merge`.
    """
    check_mergeable(adapter)
    _apply(BaseChanges(adapter, base, "keep"))


def _apply(on: BaseChanges) -> None:
    """Collect the changes of the adapter to all tensors."""
    if on.config.type == "IA3":
        for module in on.adapter.modules:
            _apply_ia3(on, module)
    else:
        _train_tokens(on)  # first: LoRA's layer has the one with the tokens inside it
    # Before LoRA, because peft saves the resized table inside the layer that LoRA wraps.
    for (module_name, leaf), tensor in on.adapter.replacements.items():
        _replace(on, module_name, leaf, tensor)
    if on.config.type != "IA3":
        _LoraChanges(on).apply()
    _check_resized_tables(on)


def check_mergeable(adapter: StoredAdapter) -> None:
    """Refuse an adapter whose settings change what is added to a weight in ways not supported here."""
    config = adapter.config
    if (key := config.unsupported_setting) is not None:
        raise CheckpointError(f"{config.path}: {to_printable(key)[:60]} is set, which cannot be merged here")
    initial = config.values.get("init_lora_weights")
    if isinstance(initial, str) and CHANGES_BASE.fullmatch(initial):
        raise CheckpointError(
            f"{config.path}: init_lora_weights is {to_printable(initial)[:40]!r}, which changes the base's "
            "weights too; save the adapter with path_initial_model_for_weight_conversion"
        )


def _list_companions(adapter: StoredAdapter, base: Checkpoint) -> dict[str, Place]:
    """The base's files beside its weights, with the adapter's tokenizer, and what ends an answer."""
    theirs = {name: path for name, path in adapter.checkpoint.companions.items() if TOKENIZER.fullmatch(name)}
    companions = {
        name: path
        for name, path in base.companions.items()
        if name != MERGED and not (theirs and TOKENIZER.fullmatch(name))
    }
    generation = adapter.checkpoint.companions.get(GENERATION)
    return companions | theirs | ({} if generation is None else {GENERATION: generation})


def _check_base(on: BaseChanges) -> None:
    base, adapter = on.base, on.adapter
    if any(name.startswith(PREFIX) or parse_name(name) is not None for name in base.tensors):
        raise CommandError(f"{base.root}: contains an adapter; give only the base model")
    quantized = read_quantization_config(base)
    if quantized is not None:
        method = to_printable(quantized.get("quant_method"))[:40]
        raise CommandError(
            f"{base.root}: is quantized ({method}); give the model before quantization, or add --dequantize"
        )
    recorded = adapter.base_fingerprint
    if recorded is not None and recorded != compute_fingerprint(base):
        raise CommandError(
            f"{base.root}: is not the base of {adapter.root}, which was trained on other weights"
        )


def _list_merged(base: Checkpoint) -> list[dict[str, Any]]:
    """Return the records of the adapters that were merged into the base earlier."""
    records = read_small_table(base.companions.get(MERGED)).get("merged")
    return [record for record in records if isinstance(record, dict)] if isinstance(records, list) else []


def _build_record(on: BaseChanges, earlier: list[dict[str, Any]], digest: str) -> bytes:
    about = {
        "adapter": digest,
        "name": on.adapter.root.name,
        "type": on.config.type,
        "base": on.config.base_model,
    }
    document = {"version": 1, "merged": [*earlier, about]}
    return (json.dumps(document, indent=2) + "\n").encode()


def _train_tokens(on: BaseChanges) -> None:
    token_modules = {
        _replace_token_rows(on, module): module
        for module in on.adapter.modules
        if module.find(TOKENS) is not None
    }
    paths = [module.path for module in token_modules.values()]
    for alias, owner in on.ties.items():
        if owner in token_modules and alias not in token_modules:  # peft gives it the owner's
            on.change(alias, 1).edits.extend(on.changes[owner].edits)
            paths.append(alias.removesuffix(".weight"))
    for path in paths:
        on.zero_bias(path)


def _replace_token_rows(on: BaseChanges, module: AdapterModule) -> str:
    """The trained tokens of a module; returns the name of its weight."""
    values = module.find(TOKENS)
    assert values is not None
    live = f"{module.path}.weight"
    parameter = on.find(live)
    # Of modules that share a weight, the settings may name one.
    owner = on.ties.get(parameter.whole or "", parameter.whole)
    sharing = [name for name in (owner, *on.ties) if name and on.ties.get(name, name) == owner]
    paths = [module.path, *(name.removesuffix(".weight") for name in sharing)]
    rows = next((rows for path in paths if (rows := _find_trained_tokens(on, path)) is not None), None)
    if rows is None:
        raise CheckpointError(f"{on.config.path}: names no trainable tokens of {module.path}")
    weight, old = parameter.whole, parameter.shape[0]
    new = sorted(row for row in rows if row >= old)  # of tokens that the base does not have
    fits = values.shape == (len(rows), *parameter.shape[1:]) and new == list(range(old, old + len(new)))
    if weight is None or not fits:
        raise on.build_shape_error(live, parameter.shape, values)
    change = on.change(weight, 1)
    if new:
        change.source = append_zero_rows(on.base.tensors[on.ties.get(weight, weight)], old + len(new))
        on.config_changes["vocab_size"] = old + len(new)
    change.edits.append(ReplaceRows(rows, partial(_read_matrix, on, values)))
    return weight


def _find_trained_tokens(on: BaseChanges, path: str) -> tuple[int, ...] | None:
    """The tokens that the settings name for a module."""
    token_settings = on.config.tokens.items()
    return next((rows for name, rows in token_settings if not name or f".{path}".endswith(f".{name}")), None)


def _read_matrix(on: BaseChanges, tensor: Tensor) -> Array:
    return on.vector(tensor, 1.0).reshape(tensor.shape)


def _apply_ia3(on: BaseChanges, module: AdapterModule) -> None:
    values = module.find("ia3_l")
    if values is None or len(values.shape) != 2:
        raise CheckpointError(f"{on.adapter.root}: {module.path}: its (IA)^3 vector is of no linear layer")
    live = f"{module.path}.weight"
    parameter = on.find(live)
    length = values.numel
    inputs = on.config.is_feedforward(module.path)
    if inputs is None:  # peft then knows them by the type of the model; their vectors are rows
        inputs = values.shape[0] == 1
    if len(parameter.shape) != 2 or values.shape != ((1, length) if inputs else (length, 1)):
        raise on.build_shape_error(live, parameter.shape, values)
    # Rows are outputs, unless only the columns fit.
    fits = [parameter.shape[1] == length, parameter.shape[0] == length]
    inputs_first = on.has_inputs_first(live) if all(fits) else not fits[0 if inputs else 1]
    if not any(fits):
        raise on.build_shape_error(live, parameter.shape, values)
    vector = partial(on.vector, values, 1.0)
    for change, region, count in on.iter_changed_regions(parameter):
        change.edits.append(Scale(vector, region.row, region.start, count, inputs != inputs_first))
    if not inputs and on.names.find(f"{module.path}.bias") is not None:
        on.add_bias_edit(module.path, Scale(vector, 0, 0, 1, columns=True), values)


def _replace(on: BaseChanges, module: str, leaf: str, tensor: Tensor) -> None:
    live = f"{module}.{leaf}" if module else leaf
    with prefix_errors(on.base.root):
        parameter = on.names.find(live)
    if parameter is None:
        if not _is_saved(on, module):
            on.find(live)  # says so
        _add(on, live, tensor)
        return
    name = parameter.whole
    resized = has_ending(live, (*EMBEDDINGS, *HEADS)) and parameter.shape[1:] == tensor.shape[1:]
    if name is None or (parameter.shape != tensor.shape and not resized):
        raise on.build_shape_error(live, parameter.shape, tensor)
    change = on.changes.setdefault(name, TensorChange(1 if len(tensor.shape) > 1 else 0))
    change.source = tensor
    if parameter.shape != tensor.shape:
        on.config_changes["vocab_size"] = tensor.shape[0]
    if leaf == "weight" and on.config.tie and name in on.ties:
        owner = on.ties[name].removesuffix(".weight")
        if _is_saved(on, module) or _is_saved(on, owner):
            on.zero_bias(module)


def _check_resized_tables(on: BaseChanges) -> None:
    """Refuse an adapter that contains one of the tables of a resized vocabulary, but not the other.

    Raises:
        CheckpointError: If the embedding or the head keeps the number of rows of the base.
    """
    names = [*on.base.tensors, *(alias for alias in on.ties if alias != OTHER_HEAD)]
    tables = [name for name in names if has_ending(name, (*EMBEDDINGS, *HEADS))]
    resized = {name: rows for name in tables if (rows := on.count_new_rows(name)) is not None}
    for name, rows in resized.items():
        for other in tables:
            if other in resized or on.get_shape(other)[0] != on.get_shape(name)[0]:
                continue
            is_tied = on.ties.get(other, other) == on.ties.get(name, name)
            if is_tied and not _is_saved(on, name.removesuffix(".weight")):
                continue  # peft saves a tied table once
            if is_tied and (on.config.tie or not on.is_replaced(name)):
                continue
            raise CheckpointError(
                f"{on.adapter.root}: contains {name!r} with {rows:,} rows, but not {other!r}, which has "
                f"{on.get_shape(other)[0]:,} rows in {on.base.root}; save the adapter with "
                "save_embedding_layers=True"
            )


def _is_saved(on: BaseChanges, module: str) -> bool:
    """Whether `modules_to_save` names this module, or one that it is in."""
    saved = on.config.values.get("modules_to_save")
    names = [name for name in saved if isinstance(name, str)] if isinstance(saved, list) else []
    return any(f".{name}." in f".{module}." for name in names)


def _add(on: BaseChanges, live: str, tensor: Tensor) -> None:
    """A tensor that the base lacks: a head for another task."""
    sizes: dict[str, int] = {}
    for base_tensor in on.base.tensors.values():
        if base_tensor.dtype in CASTABLE:
            sizes[base_tensor.dtype] = sizes.get(base_tensor.dtype, 0) + base_tensor.numel
    usual = max(sizes, key=lambda name: sizes[name]) if sizes else tensor.dtype
    on.added[live] = on.cast(tensor, on.target or usual)
    theirs = read_small_table(on.adapter.trained_config)
    on.config_changes |= {key: theirs[key] for key in _LABELS if key in theirs}
    labelled = on.config.values.get("task_type") in _LABELLED and len(tensor.shape) == 2
    if labelled and "id2label" not in theirs and len(on.base_config.get("id2label") or {}) != tensor.shape[0]:
        on.config_changes["id2label"] = {str(i): f"LABEL_{i}" for i in range(tensor.shape[0])}
        on.config_changes["label2id"] = {f"LABEL_{i}": i for i in range(tensor.shape[0])}


class _LoraChanges:
    """Adds the products of factors to what happens to the base."""

    def __init__(self, on: BaseChanges) -> None:
        self.on = on
        # A stack of experts has one pair of factors for all of them, from which each takes its own.
        self._whole = lru_cache(_STACKS_KEPT)(read_float32)
        self._factors = lru_cache(KEPT)(self._load_factors)

    def apply(self) -> None:
        """Add those of all modules."""
        on = self.on
        nested: dict[str, list[tuple[AdapterModule, LoraPair]]] = {}
        for module in on.adapter.modules:
            pair = module.get_lora_pair()
            if pair is None:
                continue
            if on.config.target_parameters and self._list_target_parameters(module.path):
                nested.setdefault(module.path, []).append((module, pair))
            else:
                self._apply_lora(module, pair)
        for path, modules in nested.items():
            self._apply_to_parameters(path, modules)

    def _apply_lora(self, module: AdapterModule, pair: LoraPair) -> None:
        left, right, embedding = pair
        live = f"{module.path}.weight"
        parameter = self.on.find(live)
        inputs, outputs = prod(left.shape[1:]), right.shape[0]
        convolution = len(left.shape) > 2
        if convolution:
            transposed = False
            fits = parameter.shape[:1] == (outputs,) and parameter.shape[1:] == left.shape[1:]
        else:
            transposed = embedding or parameter.shape != (outputs, inputs)
            if inputs == outputs and not embedding:
                transposed = self.on.has_inputs_first(live)
            fits = parameter.shape == ((inputs, outputs) if transposed else (outputs, inputs))
        if not fits:
            raise self.on.build_shape_error(live, parameter.shape, left, right)
        scaling = self.on.config.compute_scaling(module.path)
        factors = partial(self._factors, left, right, scaling, 1, 0, transposed)
        magnitude = module.find(MAGNITUDE)
        lengths = None if magnitude is None else partial(self.on.vector, magnitude, 1.0)
        if magnitude is not None and magnitude.numel != outputs:
            raise self.on.build_shape_error(live, parameter.shape, magnitude)
        for change, region, count in self.on.iter_changed_regions(parameter, int(convolution)):
            count = parameter.shape[0] if convolution else count
            change.edits.append(
                LowRank(factors, region.row, region.start, count, None if transposed else lengths)
            )
            if lengths is not None and transposed:
                before = partial(self.on.apply_first_edits, region.name, len(change.edits))
                change.edits.append(ColumnMagnitude(lengths, before))
        bias = module.tensors.get(("lora_B", "bias"))
        if bias is not None:
            self.on.add_bias_edit(module.path, Add(partial(self.on.vector, bias, scaling)), bias)

    def _list_target_parameters(self, path: str) -> list[str]:
        """The parameters of a module that `target_parameters` names, in the order that peft wraps them."""
        parameters = []
        for target in self.on.config.target_parameters:
            leaf = target.rpartition(".")[2]
            live = f"{path}.{leaf}"
            if (live == target or live.endswith(f".{target}")) and self.on.names.find(live) is not None:
                parameters.append(leaf)
        return sorted(dict.fromkeys(parameters), key=lambda leaf: ("down" in leaf, leaf))

    def _apply_to_parameters(self, path: str, modules: list[tuple[AdapterModule, LoraPair]]) -> None:
        """LoRA on parameters of one module: the innermost wrapper is that of the first."""
        pairs = [pair for _, pair in sorted(modules, key=lambda each: -each[0].wraps)]
        leaves = self._list_target_parameters(path)
        if len(leaves) > _MAX_NESTED or len(leaves) < len(pairs):
            raise CheckpointError(
                f"{self.on.adapter.root}: {path}: has {len(pairs)} adapters for the target_parameters "
                f"{leaves}"
            )
        founds = {leaf: self.on.find(f"{path}.{leaf}") for leaf in leaves}
        for order in permutations(leaves, len(pairs)):
            chosen = [
                (pair, leaf, self._fits_stack(path, leaf, founds[leaf], pair))
                for pair, leaf in zip(pairs, order, strict=True)
            ]
            if all(fit is not None for _, _, fit in chosen):
                break
        else:
            raise self.on.build_shape_error(f"{path}.{leaves[0]}", founds[leaves[0]].shape, *pairs[0][:2])
        for pair, leaf, transposed in chosen:
            self._apply_to_stack(f"{path}.{leaf}", founds[leaf], pair, transposed=bool(transposed))

    def _fits_stack(self, path: str, leaf: str, parameter: Found, pair: LoraPair) -> bool | None:
        """Whether the factors fit with the parameter's inputs as rows; None if they do not fit at all."""
        left, right, _ = pair
        count = parameter.shape[0] if len(parameter.shape) == 3 else 1
        if (
            len(parameter.shape) not in (2, 3)
            or left.shape[0] != self.on.config.rank(f"{path}.{leaf}") * count
        ):
            return None
        inputs, outputs = left.shape[1], right.shape[0]
        if inputs == outputs and parameter.shape[-2:] == (inputs, outputs):
            return len(parameter.shape) == 3 and self._has_inputs_first(f"{path}.{leaf}")
        fits = {(outputs, inputs): False, (inputs, outputs): len(parameter.shape) == 3 or None}
        return fits.get((parameter.shape[-2], parameter.shape[-1]))

    def _has_inputs_first(self, live: str) -> bool:
        """Return whether the factors of a stack of square matrices have the inputs as rows.

        peft before 0.19 takes the second dimension of a stack as the inputs, in all models.

        Raises:
            CheckpointError: If the factors could be of either layout.
        """
        inputs_first = self.on.has_inputs_first(live.rpartition(".")[2])
        version = self.on.config.peft_version
        if inputs_first or (version is not None and version < (0, 19)):
            return True
        if version is None:
            raise CheckpointError(
                f"{self.on.config.path}: peft_version is not recorded, and the factors of {live} fit in two "
                "ways, because peft before 0.19 stores them the other way round; add the peft_version that "
                "wrote the adapter"
            )
        return False

    def _apply_to_stack(self, live: str, parameter: Found, pair: LoraPair, *, transposed: bool) -> None:
        left, right, _ = pair
        count = parameter.shape[0] if len(parameter.shape) == 3 else 1
        height = parameter.shape[-2]
        scaling = self.on.config.compute_scaling(live)
        for change, region, _ in self.on.iter_changed_regions(parameter):
            for expert in range(region.start // height, -(-region.stop // height)):
                low, high = max(region.start, expert * height), min(region.stop, (expert + 1) * height)
                factors = partial(self._factors, left, right, scaling, count, expert, transposed)
                row = region.row + low - region.start
                change.edits.append(LowRank(factors, row, low - expert * height, high - low))

    def _load_factors(
        self, left: Tensor, right: Tensor, scaling: float, count: int, expert: int, transposed: bool
    ) -> LoraFactors:
        """The factors of one expert's product, whose rows are the weight's: scaled left, and right."""
        read = self._whole if count > 1 else read_float32
        first = read(left).reshape(count, -1, prod(left.shape[1:]))[expert]
        # The ranks of all experts take turns along the columns.
        second = read(right).reshape(right.shape[0], -1, count)[:, :, expert]
        if transposed:
            first, second = second.T, first.T
        scaled = np.ascontiguousarray(second) * np.float32(scaling)
        return LoraFactors(scaled, np.ascontiguousarray(first))
