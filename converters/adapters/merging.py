"""Merge an adapter into a base model. The result is a checkpoint that is computed while it is read.

Tensors that the adapter does not change remain spans of the base model's files. The others are
computed block by block (`portable.converters.tensors.edited_rows`), so that memory only contains
the factors of a few modules and a few rows per thread.
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


def merge(adapter: StoredAdapter, base: Checkpoint, *, dtype: str = "keep") -> Checkpoint:
    """Merge an adapter into a base model.

    Args:
        adapter: Adapter to merge.
        base: Unquantized checkpoint of any format. Its tensors may have published names or names in
            memory.
        dtype: Dtype of the changed tensors: `float32`, `bfloat16`, `float16`, or `keep` for the dtype
            of the base model's tensor. Write the result with the same dtype.

    Returns:
        A checkpoint whose changed tensors are computed when they are read. Its documents include a
        record of the merged adapter.

    Raises:
        CheckpointError: If this type of adapter cannot be merged, or if the adapter was already merged
            or belongs to a different base model.
    """
    check_mergeable_settings(adapter)
    changes = BaseChanges(adapter, base, dtype)
    _check_base_model(changes)
    with ThreadPoolExecutor(1) as pool:  # hashing releases the GIL, so it runs in parallel
        digest_future = pool.submit(lambda: adapter.digest)
        _collect_changes(changes)
        digest = digest_future.result()
    earlier_records = _read_merge_records(base)
    if digest in {record.get("adapter") for record in earlier_records}:
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
    """Check that an adapter can be merged into a base model. Compares only names and shapes.

    Args:
        adapter: Adapter to merge.
        base: Base model.

    Raises:
        CheckpointError: If the adapter cannot be merged into the base model. See `merge`.
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
        CheckpointError: If a setting is not supported, or if the initialization changed the base model.
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
            f"{config.path}: init_lora_weights is {to_printable(initial)[:40]!r}, which also changes the "
            "weights of the base model; save the adapter with path_initial_model_for_weight_conversion"
        )


def _list_companions(adapter: StoredAdapter, base: Checkpoint) -> dict[str, AnyPath]:
    """List the companion files of the merged model, keyed by file name.

    They come from the base model. If the adapter has tokenizer files, they replace all tokenizer files
    of the base model. The adapter's generation config, if any, replaces the base model's generation
    config.
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
    """Check that the base model is unquantized, contains no adapter, and matches the adapter.

    If the adapter records a fingerprint of the weights that it was trained on, the base model must have
    the same fingerprint.

    Raises:
        CommandError: If the base model cannot be used.
    """
    base, adapter = changes.base_checkpoint, changes.adapter
    if any(name.startswith(PEFT_PREFIX) or parse_adapter_name(name) is not None for name in base.tensors):
        raise CommandError(f"{base.root}: contains an adapter; specify only the base model")
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

    Empty if there are none.
    """
    records = read_json_object_or_empty(base.companions.get(MERGED_ADAPTERS_FILE)).get("merged")
    return [record for record in records if isinstance(record, dict)] if isinstance(records, list) else []


def _build_merge_document(changes: BaseChanges, earlier: list[dict[str, Any]], digest: str) -> bytes:
    """Build the content of `merged_adapters.json`, which records all adapters merged into a model.

    Args:
        changes: Changes of the adapter.
        earlier: Records of previously merged adapters.
        digest: Digest of the adapter.

    Returns:
        The document as JSON.
    """
    about = {
        "adapter": digest,
        "name": changes.adapter.root.name,
        "type": changes.adapter_config.type,
        "base": changes.adapter_config.base_model,
    }
    document = {"version": 1, "merged": [*earlier, about]}
    return (json.dumps(document, indent=2) + "\n").encode()


def _add_token_edits(changes: BaseChanges) -> None:
    """Add the edits of all modules with trained tokens.

    A module that is tied to a module with trained tokens gets the same edits, because peft uses the
    trained rows in both. The biases of all these modules are set to zero. See
    `BaseChanges.add_zero_bias_edit`.
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
    """Add the edit that replaces the rows of a module's trained tokens.

    Returns:
        Name of the module's weight in the files.

    Raises:
        CheckpointError: If the settings do not list the tokens, or if the rows do not fit the weight.
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
            f"{changes.adapter_config.path}: lists no trainable tokens of {module.path}; use the "
            f"{ADAPTER_CONFIG} of this adapter"
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
    """Return the IDs of a module's trained tokens from the settings, or None if there are none."""
    token_settings = changes.adapter_config.token_indices.items()
    return next((rows for name, rows in token_settings if not name or f".{path}".endswith(f".{name}")), None)


def _load_token_matrix(changes: BaseChanges, tensor: Tensor) -> Array:
    """Load the rows of the trained tokens, float32 `[tokens, hidden]`."""
    return changes.load_vector(tensor, 1.0).reshape(tensor.shape)


def _add_ia3_edits(changes: BaseChanges, module: AdapterModule) -> None:
    """Add the edits for an (IA)^3 vector, which scales the inputs or the outputs of a linear layer.

    Raises:
        CheckpointError: If the vector does not fit a linear layer of the base model.
    """
    values = module.find_tensor("ia3_l")
    if values is None or len(values.shape) != 2:
        raise CheckpointError(
            f"{changes.adapter.root}: {module.path}: its (IA)^3 vector does not belong to a linear layer; "
            "load the adapter with peft instead"
        )
    live = f"{module.path}.weight"
    parameter = changes.locate_parameter(live)
    length = values.numel
    scales_inputs = changes.adapter_config.is_feedforward(module.path)
    if scales_inputs is None:  # peft uses its defaults for the model type; vectors of inputs are rows
        scales_inputs = values.shape[0] == 1
    if len(parameter.shape) != 2 or values.shape != ((1, length) if scales_inputs else (length, 1)):
        raise changes.build_shape_error(live, parameter.shape, values)
    # The rows of a weight are its outputs, unless only the number of columns fits the vector.
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
    """Replace a tensor of the base model with one of the adapter, or add it if the base model lacks it.

    A replaced embedding or head may have a different number of rows, which changes `vocab_size`.

    Raises:
        CheckpointError: If the shapes do not fit, or if the base model lacks a module that it must
            have.
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
    """Check that an adapter that resizes the vocabulary resizes all tables with one row per token.

    The tables are the input embedding and the output head. If they are tied, one of them may suffice.

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
                f"{changes.adapter.root}: contains {name!r} with {rows:,} rows, but not {other!r}, which has "
                f"{changes.get_base_shape(other)[0]:,} rows in {changes.base_checkpoint.root}; save the "
                "adapter with save_embedding_layers=True"
            )


def _is_module_to_save(changes: BaseChanges, module: str) -> bool:
    """Return whether the setting `modules_to_save` contains a module or one of its parent modules."""
    saved = changes.adapter_config.values.get("modules_to_save")
    names = [name for name in saved if isinstance(name, str)] if isinstance(saved, list) else []
    return any(f".{name}." in f".{module}." for name in names)


def _add_new_tensor(changes: BaseChanges, live_name: str, tensor: Tensor) -> None:
    """Add a tensor that the base model lacks, such as a head for another task.

    If it is the head of a classifier, the labels in `config.json` are also changed.
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
    """Builder of the LoRA edits of all modules.

    Args:
        changes: Changes that the edits are added to.
    """

    def __init__(self, changes: BaseChanges) -> None:
        self.changes = changes
        # A stack has one pair of factors for all experts, so cache the pair for the other experts.
        self._read_cached_stack = lru_cache(_MAX_CACHED_STACKS)(read_as_float32)
        self._load_cached_factors = lru_cache(MAX_CACHED_FACTORS)(self._load_factors)

    def add_all_edits(self) -> None:
        """Add the LoRA edits of all adapted modules to the changes."""
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
        """Add the edits of one linear layer, embedding or convolution.

        They include DoRA's rescaling and the LoRA bias, if the adapter has them.

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

        Args:
            path: Name of the module in the live model.

        Returns:
            Names of the parameters in the module, in the order in which peft wraps them.
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

        peft nests one wrapper per parameter, and the innermost wrapper belongs to the first parameter. The
        names of the factors do not reveal their parameter. This function therefore uses the first order of
        parameters in which all shapes fit.

        Args:
            path: Name of the module in the live model.
            modules: Wrappers of the module with their factors.

        Raises:
            CheckpointError: If no order fits, or if the number of wrappers does not match the settings.
        """
        pairs = [pair for _, pair in sorted(modules, key=lambda each: -each[0].num_wrappers)]
        leaves = self._list_target_parameters(path)
        if len(leaves) > _MAX_NESTED or len(leaves) < len(pairs):
            raise CheckpointError(
                f"{self.changes.adapter.root}: {path}: has {len(pairs)} adapters, which do not match the "
                f"target_parameters {leaves}; use the {ADAPTER_CONFIG} of this adapter"
            )
        locations = {leaf: self.changes.locate_parameter(f"{path}.{leaf}") for leaf in leaves}
        for order in permutations(leaves, len(pairs)):
            assignments = [
                (pair, leaf, self._find_stack_orientation(path, leaf, locations[leaf], pair))
                for pair, leaf in zip(pairs, order, strict=True)
            ]
            if all(fit is not None for _, _, fit in assignments):
                break
        else:
            raise self.changes.build_shape_error(
                f"{path}.{leaves[0]}", locations[leaves[0]].shape, *pairs[0][:2]
            )
        for pair, leaf, transposed in assignments:
            self._add_stack_edits(f"{path}.{leaf}", locations[leaf], pair, transposed=bool(transposed))

    def _find_stack_orientation(
        self, path: str, leaf: str, parameter: ParameterLocation, pair: LoraPair
    ) -> bool | None:
        """Determine whether the rows of a parameter are the inputs of its LoRA factors.

        Args:
            path: Name of the module in the live model.
            leaf: Name of the parameter in the module.
            parameter: Location of the parameter.
            pair: LoRA factors.

        Returns:
            True if the rows are inputs, and False if they are outputs. None if the factors do not fit the
            parameter.
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
        """Return whether the LoRA factors treat the rows of stacked square matrices as inputs.

        peft before 0.19 treats the second dimension of a stack as the inputs, for all models.

        Raises:
            CheckpointError: If the factors could have either layout.
        """
        inputs_first = self.changes.has_inputs_first(live_name.rpartition(".")[2])
        version = self.changes.adapter_config.peft_version
        if inputs_first or (version is not None and version < (0, 19)):
            return True
        if version is None:
            raise CheckpointError(
                f"{self.changes.adapter_config.path}: peft_version is not recorded, and the factors of "
                f"{live_name} fit in two ways, because peft before 0.19 stores them transposed; set "
                "peft_version to the version that wrote the adapter"
            )
        return False

    def _add_stack_edits(
        self, live_name: str, parameter: ParameterLocation, pair: LoraPair, *, transposed: bool
    ) -> None:
        """Add the edits for a parameter that is a stack of experts or a matrix.

        There is one edit per expert and region.

        Args:
            live_name: Name of the parameter in the live model.
            parameter: Location of the parameter in the files.
            pair: LoRA factors of all experts.
            transposed: Whether the rows of the parameter are inputs.
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
        """Load the factors of one expert's update, oriented so that their product has the weight's layout.

        Args:
            down: `lora_A`, with the ranks of all experts along dim 0.
            up: `lora_B`, whose columns alternate between the experts.
            scaling: Factor of the product.
            num_experts: Number of experts in the stack. 1 for a plain layer.
            expert: Index of the expert.
            transposed: Whether the rows of the weight are inputs.
        """
        read = self._read_cached_stack if num_experts > 1 else read_as_float32
        down_factor = read(down).reshape(num_experts, -1, prod(down.shape[1:]))[expert]
        # The columns alternate between the experts: rank 0 of each expert, then rank 1 of each expert.
        up_factor = read(up).reshape(up.shape[0], -1, num_experts)[:, :, expert]
        if transposed:
            down_factor, up_factor = up_factor.T, down_factor.T
        scaled = np.ascontiguousarray(up_factor) * np.float32(scaling)
        return LoraFactors(scaled, np.ascontiguousarray(down_factor))
