"""Merge an adapter into a base model. The result is a checkpoint that is computed while it is read.

Tensors that the adapter does not change are read directly from the base model's files. The others
are computed block by block (`portable.converters.tensors.edited_rows`). At any time, memory
contains only the factors of a few modules, and a few rows per thread.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from itertools import permutations
from math import prod
from typing import TYPE_CHECKING, Any

from portable.converters.adapters.base_changes import (
    MAX_CACHED_FACTORS,
    BaseChanges,
    TensorChange,
    read_as_float32,
)
from portable.converters.adapters.config import BASE_CHANGING_INITS
from portable.converters.adapters.edits import (
    AddVectorEdit,
    ColumnMagnitudeEdit,
    LoraFactors,
    LowRankEdit,
    ReplaceRowsEdit,
    ScaleEdit,
)
from portable.converters.adapters.names import MAGNITUDE, PEFT_PREFIX, TOKENS, parse_adapter_name
from portable.converters.checkpoint import Checkpoint
from portable.converters.config_and_tokenizer_files import (
    GENERATION_CONFIG_FILE,
    MERGED_ADAPTERS_FILE,
    TOKENIZER_NAMES,
)
from portable.converters.errors import CheckpointError, CommandError, prefix_checkpoint_errors, to_printable
from portable.converters.fingerprints import compute_fingerprint
from portable.converters.lazy_numpy import np
from portable.converters.names.tied_weights import EMBEDDING_NAMES, HEAD_NAMES, UNNAMED_HEAD, ends_with_name
from portable.converters.options import ADAPTER_CONFIG
from portable.converters.quantization.dequantize import read_quantization_config
from portable.converters.storage.safe_open import read_json_object_or_empty
from portable.converters.tensors.dtypes import CASTABLE_DTYPES
from portable.converters.tensors.edited_rows import append_zero_rows

if TYPE_CHECKING:
    from portable.converters.adapters.adapter import AdapterModule, LoraPair, StoredAdapter
    from portable.converters.adapters.base_names import ParameterLocation
    from portable.converters.storage.path_or_url import AnyPath
    from portable.converters.tensors.tensor import Array, Tensor

_LABEL_SETTINGS = ("id2label", "label2id", "num_labels", "problem_type")
_CLASSIFICATION_TASKS = ("SEQ_CLS", "TOKEN_CLS")
_MAX_CACHED_STACKS, _MAX_NESTED = 4, 4
# Parameters of transformers' experts. Their modules define them in the order of `_list_target_parameters`.
_ORDERED_PARAMETERS = frozenset({"gate_up_proj", "gate_proj", "up_proj", "down_proj"})


def merge(adapter: StoredAdapter, base: Checkpoint, *, dtype: str = "keep") -> Checkpoint:
    """Merge an adapter into a base model.

    All tensors of the adapter are read immediately, to compute the digest of the adapter.

    Args:
        adapter: Adapter to merge.
        base: Unquantized checkpoint of any format. Its tensors may have the names in published
            files or the names that transformers uses in memory.
        dtype: Dtype of the changed tensors: `float32`, `bfloat16`, `float16`, or `keep` for the
            dtype that each tensor has in the base model. Other tensors are not cast. To cast them
            too, specify the same dtype when you write the result.

    Returns:
        A checkpoint whose changed tensors are computed when they are read. Its `documents`, which
        are small files to write next to the weights, include a record of the merged adapter. Its
        `config` contains changed settings, such as `vocab_size` and `tie_word_embeddings`.

    Raises:
        CheckpointError: If this type of adapter cannot be merged, if the adapter was already merged
            or belongs to a different base model, or if its names or shapes do not match the base
            model. Also raised if an adapter tensor contains NaN or infinity, if the base model is
            quantized or contains an adapter, or if tied tensors cannot be untied.
    """
    check_mergeable_settings(adapter)
    changes = BaseChanges(adapter, base, dtype)
    _check_base_model(changes)
    with ThreadPoolExecutor(1) as pool:  # hashing releases the GIL, so it runs in parallel
        digest_future = pool.submit(lambda: adapter.digest)
        _collect_changes(changes)
        digest = digest_future.result()
    earlier_records = _read_merge_records(base)
    settings = adapter.target_settings
    # Records of adapters without such settings, and all records of earlier versions, have no "settings".
    if any(
        record.get("adapter") == digest and record.get("settings", settings) == settings
        for record in earlier_records
    ):
        raise CommandError(
            f"{base.root}: already contains the adapter {adapter.root} (see {MERGED_ADAPTERS_FILE}); specify "
            "the base model without this adapter"
        )
    untied = changes.untie_changed_names()
    tensors: dict[str, Tensor] = {}
    for name, tensor in base.tensors.items():
        for weight_name in (name, *(alias for alias in untied if changes.ties[alias] == name)):
            tensors[weight_name] = changes.build_merged_tensor(weight_name, tensor)
    return Checkpoint(
        format=base.format,
        root=base.root,
        tensors={**tensors, **changes.added_tensors},
        aliases={} if untied else {a: owner for a, owner in changes.ties.items() if a != UNNAMED_HEAD},
        metadata=base.metadata,
        companions=_list_companions(adapter, base),
        config={**base.config, **changes.config_changes},
        documents={MERGED_ADAPTERS_FILE: _build_merge_document(changes, earlier_records, digest)},
        ties=False,
    )


def check_mergeable_into(adapter: StoredAdapter, base: Checkpoint) -> None:
    """Check that the settings, names and shapes of an adapter allow merging into a base model.

    The values of the adapter are not read. `merge` makes further checks, for example of the
    fingerprint and the quantization of the base model.

    Args:
        adapter: Adapter to merge.
        base: Base model.

    Raises:
        CheckpointError: If a setting is not supported, or if the names or shapes do not match the base
            model.
    """
    check_mergeable_settings(adapter)
    _collect_changes(BaseChanges(adapter, base, "keep"))


def _collect_changes(changes: BaseChanges) -> None:
    """Collect in `changes` all changes that the adapter makes to the base model."""
    if changes.adapter_config.type == "IA3":
        for module in changes.adapter.modules:
            _add_ia3_edits(changes, module)
    else:
        _add_token_edits(changes)  # first, because LoRA wraps the layer with the trained tokens
    # Before LoRA, because peft saves the resized table inside the layer that LoRA wraps.
    for (module_name, leaf), tensor in changes.adapter.replacements.items():
        _add_replacement(changes, module_name, leaf, tensor)
    if changes.adapter_config.type != "IA3":
        _LoraEditBuilder(changes).add_all_edits()
    _check_resized_tables(changes)


def check_mergeable_settings(adapter: StoredAdapter) -> None:
    """Check that all settings of the adapter that affect the weights are supported.

    Raises:
        CheckpointError: If a setting is not supported, or if the adapter was initialized by a
            method that also changes the base model's weights, such as PiSSA.
    """
    config = adapter.config
    if (key := config.unsupported_setting) is not None:
        raise CheckpointError(
            f"{config.path}: {to_printable(key)[:60]} is set, but an adapter with this setting cannot be "
            "merged; load the adapter with peft instead"
        )
    initial = config.values.get("init_lora_weights")
    if isinstance(initial, str) and BASE_CHANGING_INITS.fullmatch(initial):
        raise CheckpointError(
            f"{config.path}: init_lora_weights is {to_printable(initial)[:40]!r}, which changes the weights "
            "of the base model; save the adapter again with save_pretrained(..., "
            "path_initial_model_for_weight_conversion=...)"
        )


def _list_companions(adapter: StoredAdapter, base: Checkpoint) -> dict[str, AnyPath]:
    """List the companion files of the merged model, keyed by file name.

    The files come from the base model. Its `merged_adapters.json` is omitted, because `merge` writes a
    new one. If the adapter has tokenizer files, they replace all tokenizer files of the base model. The
    adapter's generation config, if any, replaces the base model's generation config.
    """
    tokenizer_files = {
        name: path for name, path in adapter.checkpoint.companions.items() if TOKENIZER_NAMES.fullmatch(name)
    }
    companions = {
        name: path
        for name, path in base.companions.items()
        if name != MERGED_ADAPTERS_FILE and not (tokenizer_files and TOKENIZER_NAMES.fullmatch(name))
    }
    generation = adapter.checkpoint.companions.get(GENERATION_CONFIG_FILE)
    return companions | tokenizer_files | ({} if generation is None else {GENERATION_CONFIG_FILE: generation})


def _check_base_model(changes: BaseChanges) -> None:
    """Check that the base model is unquantized, has no adapter, and fits the fingerprint.

    If the adapter records a fingerprint of the weights that it was trained on, the base model must
    have the same fingerprint. Otherwise, the weights are not compared. Names and shapes are never
    compared.

    Raises:
        CommandError: If the base model cannot be used.
    """
    base, adapter = changes.base_checkpoint, changes.adapter
    if any(name.startswith(PEFT_PREFIX) or parse_adapter_name(name) is not None for name in base.tensors):
        raise CommandError(f"{base.root}: contains an adapter; specify a base model without an adapter")
    quantized = read_quantization_config(base)
    if quantized is not None:
        method = to_printable(quantized.get("quant_method"))[:40]
        raise CommandError(
            f"{base.root}: is quantized ({method}); specify the unquantized model, or add --dequantize"
        )
    recorded = adapter.base_fingerprint
    if recorded is not None and recorded != compute_fingerprint(base):
        raise CommandError(
            f"{base.root}: is not the base model of {adapter.root}, which was trained on other weights; "
            "specify the base model that the adapter was trained on"
        )


def _read_merge_records(base: Checkpoint) -> list[dict[str, Any]]:
    """Read the records of adapters that have already been merged into the base model.

    Empty if there are none, or if the file is damaged.
    """
    records = read_json_object_or_empty(base.companions.get(MERGED_ADAPTERS_FILE)).get("merged")
    return [record for record in records if isinstance(record, dict)] if isinstance(records, list) else []


def _build_merge_document(changes: BaseChanges, earlier: list[dict[str, Any]], digest: str) -> bytes:
    """Build the content of `merged_adapters.json`, which records all adapters merged into a model.

    Args:
        changes: Changes that the adapter makes to the base model.
        earlier: Records of the adapters that were merged previously.
        digest: Digest of the adapter.

    Returns:
        JSON document as UTF-8 bytes.
    """
    settings = changes.adapter.target_settings
    about = {
        "adapter": digest,
        **({"settings": settings} if settings else {}),
        "name": changes.adapter.root.name,
        "type": changes.adapter_config.type,
        "base": changes.adapter_config.base_model,
    }
    document = {"version": 1, "merged": [*earlier, about]}
    return (json.dumps(document, indent=2) + "\n").encode()


def _add_token_edits(changes: BaseChanges) -> None:
    """Add edits to `changes` that replace the weight rows of trained tokens.

    If such a weight is the owner of tied weights, its aliases without trained tokens get the same
    edits, because peft uses the owner's trained rows for them. Trained tokens of an alias do not
    change the owner. The biases of all edited modules are set to zero, because peft drops these
    biases. See `BaseChanges.add_zero_bias_edit`.
    """
    token_modules = {
        _add_token_edit_of_module(changes, module): module
        for module in changes.adapter.modules
        if module.find_tensor(TOKENS) is not None
    }
    paths = [module.path for module in token_modules.values()]
    for alias, owner in changes.ties.items():
        if owner in token_modules and alias not in token_modules:  # peft gives it the owner's rows
            changes.get_or_add_change(alias, 1).edits.extend(changes.changes[owner].edits)
            paths.append(alias.removesuffix(".weight"))
    for path in paths:
        changes.add_zero_bias_edit(path)


def _add_token_edit_of_module(changes: BaseChanges, module: AdapterModule) -> str:
    """Add an edit that replaces the rows of the trained tokens in a module's weight.

    If the adapter added tokens to the vocabulary, their rows are appended to the weight, and
    `vocab_size` in `changes.config_changes` is set. The IDs of the added tokens must follow the
    last row without gaps.

    Args:
        changes: Changes to which the edit is added.
        module: Adapter tensors of an embedding or output head.

    Returns:
        Name of the module's weight in the files of the base model.

    Raises:
        CheckpointError: If the adapter's settings do not list the trained tokens, or if the rows do
            not fit the weight.
    """
    values = module.find_tensor(TOKENS)
    assert values is not None
    live = f"{module.path}.weight"
    parameter = changes.locate_parameter(live)
    # The settings may name only one of the modules that share a weight.
    owner = changes.ties.get(parameter.identical_tensor or "", parameter.identical_tensor)
    tied_names = [name for name in (owner, *changes.ties) if name and changes.ties.get(name, name) == owner]
    paths = [module.path, *(name.removesuffix(".weight") for name in tied_names)]
    token_indices = next(
        (
            token_indices
            for path in paths
            if (token_indices := _find_token_indices(changes, path)) is not None
        ),
        None,
    )
    if token_indices is None:
        raise CheckpointError(
            f"{changes.adapter_config.path}: does not list the trainable tokens of {module.path}; "
            f"replace this file with the {ADAPTER_CONFIG} that was saved with these weights"
        )
    weight, num_base_rows = parameter.identical_tensor, parameter.shape[0]
    new_tokens = sorted(
        row for row in token_indices if row >= num_base_rows
    )  # rows of tokens that the base model does not have
    is_valid = values.shape == (len(token_indices), *parameter.shape[1:]) and new_tokens == list(
        range(num_base_rows, num_base_rows + len(new_tokens))
    )
    if weight is None or not is_valid:
        raise changes.build_shape_error(live, parameter.shape, values)
    change = changes.get_or_add_change(weight, 1)
    if new_tokens:
        change.source = append_zero_rows(
            changes.base_checkpoint.tensors[changes.ties.get(weight, weight)], num_base_rows + len(new_tokens)
        )
        changes.config_changes["vocab_size"] = num_base_rows + len(new_tokens)
    change.edits.append(ReplaceRowsEdit(token_indices, partial(_load_token_matrix, changes, values)))
    return weight


def _find_token_indices(changes: BaseChanges, path: str) -> tuple[int, ...] | None:
    """Return the IDs of a module's trained tokens, or None if the settings list none.

    An adapter can train individual rows of an embedding or output head, one row per token. The IDs
    of these tokens are in the adapter's settings (`StoredAdapterConfig.token_indices`). The first
    entry whose name matches the end of `path` is used. The empty name matches every path.

    Args:
        changes: Changes of the adapter.
        path: Name of the module in the live model, that is, in memory after transformers has loaded
            it.
    """
    token_settings = changes.adapter_config.token_indices.items()
    return next((rows for name, rows in token_settings if not name or f".{path}".endswith(f".{name}")), None)


def _load_token_matrix(changes: BaseChanges, tensor: Tensor) -> Array:
    """Load the adapter's rows for the trained tokens as a float32 array `[tokens, hidden]`.

    The array is taken from the cache of `changes` if it has been loaded before.
    """
    return changes.load_vector(tensor, 1.0).reshape(tensor.shape)


def _add_ia3_edits(changes: BaseChanges, module: AdapterModule) -> None:
    """Add the edits for an (IA)^3 vector, which scales the inputs or outputs of a linear layer.

    If the outputs are scaled, the bias of the layer is scaled as well. If the adapter's settings do
    not list the modules with scaled inputs, the shape of the vector is used: `[1, inputs]` or
    `[outputs, 1]`.

    Raises:
        CheckpointError: If the vector does not fit a linear layer of the base model.
    """
    values = module.find_tensor("ia3_l")
    if values is None or len(values.shape) != 2:
        raise CheckpointError(
            f"{changes.adapter.root}: {module.path}: has an (IA)^3 vector that does not belong to a linear "
            "layer; load the adapter with peft instead"
        )
    live = f"{module.path}.weight"
    parameter = changes.locate_parameter(live)
    length = values.numel
    scales_inputs = changes.adapter_config.is_feedforward(module.path)
    # Peft used its defaults for the model type, but the shape shows the direction: vectors for inputs are
    # rows.
    if scales_inputs is None:
        scales_inputs = values.shape[0] == 1
    if len(parameter.shape) != 2 or values.shape != ((1, length) if scales_inputs else (length, 1)):
        raise changes.build_shape_error(live, parameter.shape, values)
    # The dimension with the length of the vector reveals the layout. If both dimensions have this length,
    # look the layout up by model type.
    fits = [parameter.shape[1] == length, parameter.shape[0] == length]
    inputs_first = changes.has_inputs_first(live) if all(fits) else not fits[0 if scales_inputs else 1]
    if not any(fits):
        raise changes.build_shape_error(live, parameter.shape, values)
    vector = partial(changes.load_vector, values, 1.0)
    for change, region, count in changes.iter_changed_regions(parameter):
        change.edits.append(
            ScaleEdit(vector, region.tensor_row, region.start_row, count, scales_inputs != inputs_first)
        )
    if not scales_inputs and changes.base_names.find_parameter(f"{module.path}.bias") is not None:
        changes.add_bias_edit(module.path, ScaleEdit(vector, 0, 0, 1, scales_columns=True), values)


def _add_replacement(changes: BaseChanges, module: str, leaf: str, tensor: Tensor) -> None:
    """Replace a tensor of the base model with an adapter tensor, or add a new tensor.

    A tensor is new if the base model lacks it, such as the weight of a classification head. A new
    tensor is added only if its module is in `modules_to_save`. A replaced embedding or head may
    have a different number of rows, which changes `vocab_size`. With `ensure_weight_tying`, the
    bias of a tied head is set to zero if `modules_to_save` contains the head or the embedding. See
    `BaseChanges.add_zero_bias_edit`.

    Raises:
        CheckpointError: If the shapes do not fit, or if the tensor is new and its module is not in
            `modules_to_save`.
    """
    live = f"{module}.{leaf}" if module else leaf
    with prefix_checkpoint_errors(changes.base_checkpoint.root):
        parameter = changes.base_names.find_parameter(live)
    if parameter is None:
        if not _is_module_to_save(changes, module):
            changes.locate_parameter(live)  # raises the error
        _add_new_tensor(changes, live, tensor)
        return
    name = parameter.identical_tensor
    resized = (
        ends_with_name(live, (*EMBEDDING_NAMES, *HEAD_NAMES)) and parameter.shape[1:] == tensor.shape[1:]
    )
    if name is None or (parameter.shape != tensor.shape and not resized):
        raise changes.build_shape_error(live, parameter.shape, tensor)
    change = changes.changes.setdefault(name, TensorChange(1 if len(tensor.shape) > 1 else 0))
    change.source = tensor
    if parameter.shape != tensor.shape:
        changes.config_changes["vocab_size"] = tensor.shape[0]
    if leaf == "weight" and changes.adapter_config.ties_weights and name in changes.ties:
        owner = changes.ties[name].removesuffix(".weight")
        if _is_module_to_save(changes, module) or _is_module_to_save(changes, owner):
            changes.add_zero_bias_edit(module)


def _check_resized_tables(changes: BaseChanges) -> None:
    """Check that an adapter resizes either all or none of the tables that have one row per token.

    The tables are the input embedding and the output head. If they are tied, resizing one of them
    is usually enough, because peft saves a tied table once. It is not enough if the adapter
    contains a complete new table for a module in `modules_to_save`, and does not tie the two
    tables.

    Raises:
        CheckpointError: If only some tables are resized, and the others would keep their number of
            rows.
    """
    names = [*changes.base_checkpoint.tensors, *(alias for alias in changes.ties if alias != UNNAMED_HEAD)]
    tables = [name for name in names if ends_with_name(name, (*EMBEDDING_NAMES, *HEAD_NAMES))]
    resized = {name: rows for name in tables if (rows := changes.get_new_row_count(name)) is not None}
    for name, rows in resized.items():
        for other in tables:
            if other in resized or changes.get_base_shape(other)[0] != changes.get_base_shape(name)[0]:
                continue
            is_tied = changes.ties.get(other, other) == changes.ties.get(name, name)
            if is_tied and not _is_module_to_save(changes, name.removesuffix(".weight")):
                continue  # peft saves a tied table once
            if is_tied and (changes.adapter_config.ties_weights or not changes.is_replaced(name)):
                continue
            raise CheckpointError(
                f"{changes.adapter.root}: resizes {name!r} to {rows:,} rows, but does not contain "
                f"{other!r}, which has {changes.get_base_shape(other)[0]:,} rows in "
                f"{changes.base_checkpoint.root}; save the adapter again with save_pretrained(..., "
                "save_embedding_layers=True)"
            )


def _is_module_to_save(changes: BaseChanges, module: str) -> bool:
    """Return whether the setting `modules_to_save` contains a module or one of its parent modules."""
    saved = changes.adapter_config.values.get("modules_to_save")
    names = [name for name in saved if isinstance(name, str)] if isinstance(saved, list) else []
    return any(f".{name}." in f".{module}." for name in names)


def _add_new_tensor(changes: BaseChanges, live_name: str, tensor: Tensor) -> None:
    """Add a tensor that the base model lacks, such as a head for another task.

    The tensor is cast to the target dtype of the merge. If the dtypes are kept, it is cast to the
    most common dtype of the base model's floating-point tensors.

    The labels in `config.json` are taken from the config of the trained model. If that config has
    none, and the tensor is a classifier's head with a different number of labels than the base
    model, the labels become `LABEL_0`, `LABEL_1`, and so on.
    """
    sizes: dict[str, int] = {}
    for base_tensor in changes.base_checkpoint.tensors.values():
        if base_tensor.dtype in CASTABLE_DTYPES:
            sizes[base_tensor.dtype] = sizes.get(base_tensor.dtype, 0) + base_tensor.numel
    most_common_dtype = max(sizes, key=lambda name: sizes[name]) if sizes else tensor.dtype
    changes.added_tensors[live_name] = changes.cast_with_edits(
        tensor, changes.target_dtype or most_common_dtype
    )
    trained_config = read_json_object_or_empty(changes.adapter.trained_config)
    changes.config_changes |= {key: trained_config[key] for key in _LABEL_SETTINGS if key in trained_config}
    is_classifier = (
        changes.adapter_config.values.get("task_type") in _CLASSIFICATION_TASKS and len(tensor.shape) == 2
    )
    if (
        is_classifier
        and "id2label" not in trained_config
        and len(changes.base_config.get("id2label") or {}) != tensor.shape[0]
    ):
        changes.config_changes["id2label"] = {str(i): f"LABEL_{i}" for i in range(tensor.shape[0])}
        changes.config_changes["label2id"] = {f"LABEL_{i}": i for i in range(tensor.shape[0])}


class _LoraEditBuilder:
    """Builder that adds the LoRA update of each adapted module to the changes of the base model.

    An update is added as one or more edits, each of which changes rows of a base tensor.

    Args:
        changes: Changes to which the edits are added.
    """

    def __init__(self, changes: BaseChanges) -> None:
        self.changes = changes
        # Cache the factors of stacks, because all experts of a stack share one pair.
        self._read_cached_stack = lru_cache(_MAX_CACHED_STACKS)(read_as_float32)
        self._load_cached_factors = lru_cache(MAX_CACHED_FACTORS)(self._load_factors)

    def add_all_edits(self) -> None:
        """Add the LoRA update of each adapted module to `changes`, as edits of the base weights."""
        changes = self.changes
        nested: dict[str, list[tuple[AdapterModule, LoraPair]]] = {}
        for module in changes.adapter.modules:
            pair = module.get_lora_pair()
            if pair is None:
                continue
            if changes.adapter_config.target_parameters and self._list_target_parameters(module.path):
                nested.setdefault(module.path, []).append((module, pair))
            else:
                self._add_module_edits(module, pair)
        for path, modules in nested.items():
            self._add_parameter_edits(path, modules)

    def _add_module_edits(self, module: AdapterModule, pair: LoraPair) -> None:
        """Add edits that merge the LoRA factors of one linear layer, embedding or convolution.

        The edits are appended to the recorded changes of the base model's tensors. They include
        DoRA's rescaling and the LoRA bias, if the adapter has them.

        Args:
            module: Tensors of the adapter for the module.
            pair: LoRA factors of the module.

        Raises:
            CheckpointError: If the factors do not fit the weight.
        """
        down, up, embedding = pair
        live = f"{module.path}.weight"
        parameter = self.changes.locate_parameter(live)
        inputs, outputs = prod(down.shape[1:]), up.shape[0]
        convolution = len(down.shape) > 2
        if convolution:
            transposed = False
            fits = parameter.shape[:1] == (outputs,) and parameter.shape[1:] == down.shape[1:]
        else:
            transposed = embedding or parameter.shape != (outputs, inputs)
            if inputs == outputs and not embedding:
                transposed = self.changes.has_inputs_first(live)
            fits = parameter.shape == ((inputs, outputs) if transposed else (outputs, inputs))
        if not fits:
            raise self.changes.build_shape_error(live, parameter.shape, down, up)
        scaling = self.changes.adapter_config.compute_scaling(module.path)
        factors = partial(self._load_cached_factors, down, up, scaling, 1, 0, transposed)
        magnitude = module.find_tensor(MAGNITUDE)
        lengths = None if magnitude is None else partial(self.changes.load_vector, magnitude, 1.0)
        if magnitude is not None and magnitude.numel != outputs:
            raise self.changes.build_shape_error(live, parameter.shape, magnitude)
        for change, region, count in self.changes.iter_changed_regions(parameter, int(convolution)):
            count = parameter.shape[0] if convolution else count
            change.edits.append(
                LowRankEdit(
                    factors, region.tensor_row, region.start_row, count, None if transposed else lengths
                )
            )
            if lengths is not None and transposed:
                before = partial(self.changes.build_tensor_after_edits, region.tensor_name, len(change.edits))
                change.edits.append(ColumnMagnitudeEdit(lengths, before))
        bias = module.tensors.get(("lora_B", "bias"))
        if bias is not None:
            self.changes.add_bias_edit(
                module.path, AddVectorEdit(partial(self.changes.load_vector, bias, scaling)), bias
            )

    def _list_target_parameters(self, path: str) -> list[str]:
        """List the parameters of a module that `target_parameters` includes.

        Parameters that the base model does not contain are omitted.

        Args:
            path: Name of the module in the live model.

        Returns:
            Names of the parameters in the module, in the order in which peft usually wraps them: sorted by
            name, with down projections last.
        """
        parameters = []
        for target in self.changes.adapter_config.target_parameters:
            leaf = target.rpartition(".")[2]
            live = f"{path}.{leaf}"
            if (live == target or live.endswith(f".{target}")) and self.changes.base_names.find_parameter(
                live
            ) is not None:
                parameters.append(leaf)
        return sorted(dict.fromkeys(parameters), key=lambda leaf: ("down" in leaf, leaf))

    def _add_parameter_edits(self, path: str, modules: list[tuple[AdapterModule, LoraPair]]) -> None:
        """Add the edits for LoRA factors that target parameters of one module.

        peft nests one wrapper per parameter, and the innermost wrapper belongs to the first
        parameter. The names of the factors do not identify the parameter that a wrapper adapts.
        This method therefore tries the possible assignments of parameters to wrappers, beginning
        with the order in which peft wraps the parameters. It uses the first assignment in which the
        shapes of all factors fit. If several fit, it is only certain for parameters whose order is
        known.

        Args:
            path: Name of the module in the live model.
            modules: Wrappers of the module, each with its LoRA factors.

        Raises:
            CheckpointError: If no assignment fits, or several fit and the order of the parameters is
                not known. Also raised if the module has more wrappers than parameters in
                `target_parameters`, or if `target_parameters` includes more than `_MAX_NESTED`
                parameters of the module.
        """
        pairs = [pair for _, pair in sorted(modules, key=lambda each: -each[0].num_wrappers)]
        leaves = self._list_target_parameters(path)
        if len(leaves) > _MAX_NESTED or len(leaves) < len(pairs):
            raise CheckpointError(
                f"{self.changes.adapter.root}: {path}: the number of adapters ({len(pairs)}) does not fit "
                f"the target_parameters {leaves} in {self.changes.adapter_config.path} (at most "
                f"{_MAX_NESTED} are supported); replace this file with the {ADAPTER_CONFIG} that was saved "
                "with these weights"
            )
        locations = {leaf: self.changes.locate_parameter(f"{path}.{leaf}") for leaf in leaves}
        possible_assignments = [
            [
                (pair, leaf, self._find_stack_orientation(path, leaf, locations[leaf], pair))
                for pair, leaf in zip(pairs, order, strict=True)
            ]
            for order in permutations(leaves, len(pairs))
        ]
        fitting_assignments = [
            assignments
            for assignments in possible_assignments
            if all(fit is not None for _, _, fit in assignments)
        ]
        if not fitting_assignments:
            raise self.changes.build_shape_error(
                f"{path}.{leaves[0]}", locations[leaves[0]].shape, *pairs[0][:2]
            )
        if len(fitting_assignments) > 1 and not _ORDERED_PARAMETERS.issuperset(leaves):
            raise CheckpointError(
                f"{self.changes.adapter.root}: {path}: the adapters of {', '.join(leaves)} cannot be "
                "distinguished, because the shapes of the factors fit several of these parameters; "
                "merge the adapter with merge_and_unload() of peft"
            )
        for pair, leaf, transposed in fitting_assignments[0]:
            self._add_stack_edits(f"{path}.{leaf}", locations[leaf], pair, transposed=bool(transposed))

    def _find_stack_orientation(
        self, path: str, leaf: str, parameter: ParameterLocation, pair: LoraPair
    ) -> bool | None:
        """Determine whether LoRA factors treat a parameter as a stack of `[inputs, outputs]` matrices.

        The parameter is a single matrix, or a stack with one matrix per expert. Its shape is
        compared with the input and output sizes of its LoRA factors. These are not always the
        inputs and outputs of the model: peft before 0.19 treats the rows of every stack as inputs.

        Args:
            path: Name of the module in the model that transformers has loaded.
            leaf: Name of the parameter in the module.
            parameter: Location of the parameter in the files.
            pair: LoRA factors.

        Returns:
            True if the factors treat the parameter as a stack of `[inputs, outputs]` matrices.
            False if they treat its matrices as `[outputs, inputs]`, which is the only supported
            layout of a single matrix. None if the factors do not fit the parameter.

        Raises:
            CheckpointError: If the matrices of a stack are square and their layout is ambiguous.
        """
        down, up, _ = pair
        count = parameter.shape[0] if len(parameter.shape) == 3 else 1
        if (
            len(parameter.shape) not in (2, 3)
            or down.shape[0] != self.changes.adapter_config.get_rank(f"{path}.{leaf}") * count
        ):
            return None
        inputs, outputs = down.shape[1], up.shape[0]
        if inputs == outputs and parameter.shape[-2:] == (inputs, outputs):
            return len(parameter.shape) == 3 and self._has_inputs_first_in_stack(f"{path}.{leaf}")
        fits = {(outputs, inputs): False, (inputs, outputs): len(parameter.shape) == 3 or None}
        return fits.get((parameter.shape[-2], parameter.shape[-1]))

    def _has_inputs_first_in_stack(self, live_name: str) -> bool:
        """Return whether a stack's LoRA factors use the layout `[experts, inputs, outputs]`.

        A stack is a parameter with the shape `[experts, rows, columns]`. This method is called if
        the matrices of the stack are square. The shape then does not reveal whether the rows are
        inputs or outputs. The result is True if the model type stores the inputs first, or if the
        adapter was saved by peft before 0.19, which treats the rows of all stacks as inputs.

        Args:
            live_name: Name of the stack in the loaded model.

        Raises:
            CheckpointError: If the model type does not store the inputs first, and the version of
                peft is not recorded.
        """
        inputs_first = self.changes.has_inputs_first(live_name.rpartition(".")[2])
        version = self.changes.adapter_config.peft_version
        if inputs_first or (version is not None and version < (0, 19)):
            return True
        if version is None:
            raise CheckpointError(
                f"{self.changes.adapter_config.path}: peft_version is missing, and without peft_version the "
                f"layout of the LoRA factors of {live_name} is ambiguous, because peft before 0.19 stores "
                "the factors transposed; set peft_version to the version of peft that saved the adapter"
            )
        return False

    def _add_stack_edits(
        self, live_name: str, parameter: ParameterLocation, pair: LoraPair, *, transposed: bool
    ) -> None:
        """Add edits that merge LoRA factors into a matrix, or into a stack of the experts' matrices.

        A region is a range of the parameter's rows that is stored in one tensor of the files. For
        each region, one edit is added per expert whose rows it contains.

        Args:
            live_name: Name of the parameter in the live model, which transformers has loaded into
                memory.
            parameter: Location of the parameter in the files.
            pair: LoRA factors of all experts.
            transposed: Whether the LoRA factors treat each matrix as `[inputs, outputs]`. See
                `_find_stack_orientation`.
        """
        down, up, _ = pair
        count = parameter.shape[0] if len(parameter.shape) == 3 else 1
        height = parameter.shape[-2]
        scaling = self.changes.adapter_config.compute_scaling(live_name)
        for change, region, _ in self.changes.iter_changed_regions(parameter):
            for expert in range(region.start_row // height, -(-region.stop_row // height)):
                low, high = (
                    max(region.start_row, expert * height),
                    min(region.stop_row, (expert + 1) * height),
                )
                factors = partial(self._load_cached_factors, down, up, scaling, count, expert, transposed)
                row = region.tensor_row + low - region.start_row
                change.edits.append(LowRankEdit(factors, row, low - expert * height, high - low))

    def _load_factors(
        self, down: Tensor, up: Tensor, scaling: float, num_experts: int, expert: int, transposed: bool
    ) -> LoraFactors:
        """Load the LoRA factors of one expert.

        The product of the factors has the layout of the weight. The factors are float32 matrices.
        The kernel dimensions of a convolution are flattened.

        Args:
            down: `lora_A` of all experts, concatenated along dim 0: all rows of expert 0 come
                first.
            up: `lora_B` of all experts. Its columns alternate between the experts: rank 0 of each
                expert, then rank 1 of each expert.
            scaling: Factor by which the product is multiplied.
            num_experts: Number of experts in the stack. 1 for a plain layer.
            expert: Index of the expert.
            transposed: Whether the LoRA factors treat the weight as `[inputs, outputs]`.
        """
        read = self._read_cached_stack if num_experts > 1 else read_as_float32
        down_factor = read(down).reshape(num_experts, -1, prod(down.shape[1:]))[expert]
        # The columns alternate between the experts: rank 0 of each expert, then rank 1 of each expert.
        up_factor = read(up).reshape(up.shape[0], -1, num_experts)[:, :, expert]
        if transposed:
            down_factor, up_factor = up_factor.T, down_factor.T
        scaled = np.ascontiguousarray(up_factor) * np.float32(scaling)
        return LoraFactors(scaled, np.ascontiguousarray(down_factor))
