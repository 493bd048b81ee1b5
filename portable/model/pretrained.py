"""Map the tensors of a pretrained checkpoint to the names and shapes of a model.

transformers renames and reshapes tensors when it loads them. For example, it renames output
heads and stacks expert matrices. This module applies transformers' conversion table to
every tensor. Stacked or split tensors are computed when they are read, one group at a time,
so the complete model is never in memory. In two cases, transformers loads the complete
model into host memory instead: if the table cannot be applied lazily, or if only
transformers can dequantize the checkpoint.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from portable import converters
from portable.converters import open_checkpoint
from portable.converters.storage.path_or_url import format_path_suggestion
from portable.errors import UserError, to_one_line
from portable.hub_requests import read_hub_once_per_node
from portable.model.added_token_rows import TableWithAddedRows
from portable.model.build import pop_quantization_config
from portable.model.lazy_rearrangement import LazyTensor, NotTraceableError, trace_element_moves
from portable.model.parameters import get_state_tensors, list_embedding_weights, map_tied_names
from portable.model.weight_sources import ComputedTensor, ReadableTensor, SlicedTensor, to_torch
from portable.paths import convert_checkpoint_errors
from portable.private import transformers_internals
from portable.untrusted_settings import convert_library_errors, describe_download_error

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel

    from portable.config.sections import ModelConfig
    from portable.converters import Checkpoint
    from portable.converters import Tensor as StoredTensor
    from portable.model.weight_sources import Index

PLAIN_FLOATS = {"F64", "F32", "F16", "BF16"}
_MAX_SHOWN_NAMES = 8
_HUB_FILES = (
    "*.safetensors",
    "*.json",
    "*.jinja",
    "*.model",
    "*.spm",
    "*.tiktoken",
    "*.txt",
    "LICENSE*",
)
_ROWS_PER_COMPARISON = 1024


@dataclass(frozen=True)
class PretrainedWeights:
    """Weights of a checkpoint, mapped to a model.

    Attributes:
        tensors: Readable tensors, keyed by the model's names. They are read lazily from the
            files, unless transformers has loaded the complete model into host memory.
        missing: Names of model tensors that the checkpoint does not contain.
        unexpected: Names of checkpoint tensors that the model does not have.
    """

    tensors: Mapping[str, ReadableTensor]
    missing: list[str]
    unexpected: list[str] = field(default_factory=list)

    def build_notes(self) -> list[str]:
        """Build notes for the user about missing and unexpected tensors.

        Returns:
            At most two notes: one about the missing tensors, and one about the unexpected tensors.
        """
        notes = []
        if self.missing:
            notes.append("newly initialized: " + ", ".join(self.missing))
        if self.unexpected:
            notes.append("in the checkpoint but not used: " + _summarize_names(self.unexpected))
        return notes


def load_pretrained_weights(
    settings: ModelConfig, model: PreTrainedModel, base_vocabulary_size: int | None = None
) -> PretrainedWeights:
    """Map the tensors of the checkpoint ``model.name_or_path`` to a model, lazily if possible.

    As with ``from_pretrained``, the checkpoint may contain the base model without a head, or a
    model with a different head.

    Args:
        settings: The ``model`` section of the config.
        model: The model on the meta device.
        base_vocabulary_size: Vocabulary size before ``data.added_tokens`` enlarged it. None if
            it did not change. Ignored if transformers loads the complete model.

    Returns:
        The weights, and the names that only the model or only the checkpoint has.

    Raises:
        UserError: If the checkpoint cannot be read or dequantized, if its architecture or
            shapes do not match the model, if tied tensors are stored with different values, or
            if it lacks the output head of a language model.
    """
    assert settings.name_or_path is not None
    quantization_config = pop_quantization_config(_load_base_config(settings))
    if quantization_config is not None and not converters.can_dequantize(quantization_config):
        weights = _load_dequantized(settings, model, quantization_config)
    else:
        weights = _match_tensors(
            settings, model, open_pretrained_checkpoint(settings, "float32").tensors, base_vocabulary_size
        )
    if settings.task != "sequence-classification":
        _check_output_head_present(model, weights)
    return weights


# -- names ---------------------------------------------------------------------------------------------------


def _match_tensors(
    settings: ModelConfig,
    model: PreTrainedModel,
    tensors: Mapping[str, StoredTensor],
    base_vocabulary_size: int | None,
) -> PretrainedWeights:
    """Select the checkpoint tensors that belong to the model, and check their shapes and dtypes.

    The tensors are read lazily. If transformers' conversion of a tensor to the model's names and
    shapes cannot be lazy, transformers loads the complete model instead.

    Args:
        settings: The ``model`` section of the config.
        model: The model on the meta device.
        tensors: Tensors of the checkpoint, keyed by their names in its files.
        base_vocabulary_size: Vocabulary size before ``data.added_tokens`` enlarged it. Embedding
            tables and output biases with this number of rows are enlarged. None if the vocabulary
            size did not change.

    Raises:
        UserError: If no tensor belongs to the model, if a shape or dtype does not match, or if tied
            tensors are stored with different values.
    """
    model_tensors = get_state_tensors(model)
    translated = _translate_names(model, tensors)
    if translated is None:
        return _load_with_transformers(settings, model)
    sources = translated.sources
    if base_vocabulary_size is not None:
        sources = {
            name: TableWithAddedRows(source, model_tensors[name].shape[0], seed=base_vocabulary_size)
            if name in model_tensors
            and source.shape[:1] == (base_vocabulary_size,)
            and model_tensors[name].shape[0] > base_vocabulary_size
            else source
            for name, source in sources.items()
        }
    aliases = map_tied_names(model)
    targets = set(getattr(model, "all_tied_weights_keys", ()))
    weights: dict[str, ReadableTensor] = {}
    for name, tensor in model_tensors.items():
        # If a file has several copies of a tied tensor, transformers loads the copy that the others are tied
        # to.
        candidates = sorted(
            (n for n in [name, *aliases.get(name, [])] if n in sources), key=lambda n: n in targets
        )
        if not candidates:
            continue
        for candidate in candidates:
            _check_shape_and_dtype(candidate, sources[candidate], tensor)
        for duplicate in candidates[1:]:
            _check_tied_equal(candidates[0], sources[candidates[0]], duplicate, sources[duplicate])
        weights[name] = sources[candidates[0]]
    if not weights:
        raise UserError(
            f"model.name_or_path: none of the checkpoint's {len(tensors)} tensors belongs to a "
            f"{type(model).__name__}; specify a checkpoint of this architecture"
        )
    missing = [name for name in model_tensors if name not in weights]
    return PretrainedWeights(
        weights, missing, transformers_internals.find_unexpected_names(model, translated.unclaimed)
    )


Sources = dict[str, ReadableTensor]
"""Type of the converted tensors of a checkpoint, keyed by the model's names."""


class _TranslatedTensors(NamedTuple):
    """Tensors of a checkpoint, converted to the names of a model.

    Attributes:
        sources: Converted tensors, keyed by the model's names.
        unclaimed: Mapping from unused checkpoint names to the names that transformers gives them.
    """

    sources: Sources
    unclaimed: dict[str, str]


def _translate_names(
    model: PreTrainedModel, tensors: Mapping[str, StoredTensor]
) -> _TranslatedTensors | None:
    """Convert the checkpoint's tensors to the model's names and shapes, without reading their values.

    This follows ``convert_and_load_state_dict_in_model`` of transformers.

    Returns:
        The converted tensors and the unused names. None if a conversion depends on tensor
        values and therefore cannot be lazy.

    Raises:
        UserError: If a tensor to convert has a quantized dtype.
    """
    renamed, converters = transformers_internals.map_checkpoint_names(model, tensors)
    names = model.state_dict()
    sources: Sources = {}
    unclaimed: dict[str, str] = {}
    groups: dict[str, _ConversionGroup] = {}
    for key, name, pattern in renamed:
        if name not in names:
            unclaimed[key] = name
        elif pattern is None:
            sources[name] = tensors[key]
        else:
            group = groups.setdefault(name, _ConversionGroup(name, converters[pattern], model))
            group.add_member(key, pattern, tensors[key])
    try:
        for group in groups.values():
            sources.update(group.build_lazy_results())
    except (AttributeError, TypeError, NotImplementedError):  # the conversion needs the values of the tensors
        return None
    return _TranslatedTensors(sources, unclaimed)


class _ConversionMember(NamedTuple):
    """Tensor of a :class:`_ConversionGroup`.

    Attributes:
        key: Name in the checkpoint.
        pattern: Pattern in transformers' conversion table that matches the name.
        tensor: The stored tensor.
    """

    key: str
    pattern: str
    tensor: StoredTensor


class _ConversionGroup:
    """Checkpoint tensors that are converted together, such as the experts of a layer.

    Add the tensors with :meth:`add_member`, then call :meth:`build_lazy_results`. The tensors are
    converted in fp32.

    Args:
        name: Name of the first resulting tensor in the model.
        converter: Converter object of transformers. It is copied before each use.
        model: The model on the meta device.
    """

    # Cache the latest result, because the tensors of a group are usually read in sequence.
    _latest_result: tuple[_ConversionGroup, dict[str, torch.Tensor]] | None = None

    def __init__(self, name: str, converter: Any, model: PreTrainedModel) -> None:
        self._name = name
        self._converter = converter
        self._model = model
        self._members: list[_ConversionMember] = []

    def add_member(self, key: str, pattern: str, tensor: StoredTensor) -> None:
        self._members.append(_ConversionMember(key, pattern, tensor))

    @property
    def dtype(self) -> str:
        dtypes = {member.tensor.dtype for member in self._members}
        return dtypes.pop() if len(dtypes) == 1 else "F32"

    def build_lazy_results(self) -> dict[str, ReadableTensor]:
        """Return the results as lazily read tensors, keyed by their names in the model.

        If the conversion only moves elements, reading a slice reads only the stored elements that
        the slice needs. Otherwise, reading a slice reads and converts all checkpoint tensors of
        this group.

        Raises:
            UserError: If a checkpoint tensor has a quantized dtype.
            AttributeError, TypeError, NotImplementedError: If the conversion needs the values of
                the tensors, so that it cannot be lazy.
        """
        for member in self._members:
            _check_not_quantized(member.key, member.tensor)
        sources = [LazyTensor(m.tensor.shape, partial(_read_floats, m.tensor)) for m in self._members]
        try:
            moved = trace_element_moves(self._convert_members, sources)
        except NotTraceableError:
            shapes = self._convert_members([torch.empty(source.shape, device="meta") for source in sources])
            return {
                name: ComputedTensor(result.shape, partial(self._compute_result, name), self.dtype)
                for name, result in shapes.items()
            }
        return {
            name: SlicedTensor(result.shape, result.read_slice, self.dtype) for name, result in moved.items()
        }

    def _compute_result(self, name: str) -> torch.Tensor:
        """Convert the checkpoint tensors of this group, and return one of the results.

        A group consists of checkpoint tensors that are converted together, such as the experts of a
        layer. The results of the group that was converted last are cached for further calls. They
        are freed before a different group is converted.

        Args:
            name: Name of the result in the model.
        """
        if _ConversionGroup._latest_result is None or _ConversionGroup._latest_result[0] is not self:
            _ConversionGroup._latest_result = None  # frees its memory before the next conversion
            _ConversionGroup._latest_result = (
                self,
                self._convert_members([_read_floats(m.tensor) for m in self._members]),
            )
        return _ConversionGroup._latest_result[1][name]

    def _convert_members(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Convert the checkpoint tensors of this group to tensors of the model.

        Args:
            tensors: One tensor per member of the group, in the same order. To compute only shapes,
                pass meta or lazy tensors.

        Returns:
            Converted tensors, keyed by their names in the model.
        """
        converter = copy.deepcopy(self._converter)
        for member, tensor in zip(self._members, tensors, strict=True):
            converter.add_tensor(self._name, member.key, member.pattern, lambda tensor=tensor: tensor)
        with torch.no_grad():
            results = converter.convert(self._name, model=self._model, config=self._model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in results.items()}


def _read_floats(tensor: StoredTensor, index: Index | None = None) -> torch.Tensor:
    """Read a slice of a checkpoint tensor, or all of it if ``index`` is None, and convert it to fp32."""
    return to_torch(tensor.read(index)).to(torch.float32)


def _summarize_names(names: list[str]) -> str:
    """Format names for a message. Repeated layers are shown as one pattern with a count.

    At most eight names or patterns are listed, followed by the number of omitted entries.
    """
    names_by_pattern: dict[str, list[str]] = defaultdict(list)
    for name in names:
        names_by_pattern[re.sub(r"\.\d+(?=\.|$)", ".*", name)].append(name)
    shown = [
        layer_names[0] if len(layer_names) == 1 else f"{pattern} ({len(layer_names)})"
        for pattern, layer_names in names_by_pattern.items()
    ]
    num_hidden = len(shown) - _MAX_SHOWN_NAMES
    return ", ".join(shown[:_MAX_SHOWN_NAMES]) + (f" and {num_hidden} more" if num_hidden > 0 else "")


# -- checks --------------------------------------------------------------------------------------------------


def _check_shape_and_dtype(name: str, source: ReadableTensor, target: torch.Tensor) -> None:
    """Raise UserError if a checkpoint tensor has the wrong shape or a quantized dtype.

    Args:
        name: Name of the tensor, used in error messages.
        source: Tensor of the checkpoint.
        target: Tensor of the model, which must have the same shape. If its dtype is not a float
            dtype, the dtype of ``source`` is not checked.
    """
    if tuple(source.shape) != tuple(target.shape):
        raise UserError(
            f"model.name_or_path: {name} has shape {list(source.shape)} in the checkpoint, but "
            f"{list(target.shape)} in the model; check model.config and model.task"
        )
    if target.is_floating_point():
        _check_not_quantized(name, source)


def _check_not_quantized(name: str, source: ReadableTensor) -> None:
    """Raise UserError if the stored dtype of a tensor is not F64, F32, F16 or BF16.

    Any other dtype counts as quantized. If ``config.json`` described the quantization, the tensor
    would already have been dequantized.
    """
    dtype = getattr(source, "dtype", None)
    if isinstance(dtype, str) and dtype not in PLAIN_FLOATS:
        raise UserError(
            f"model.name_or_path: {name} is stored in the quantized dtype {dtype}, but config.json does not "
            "describe the quantization; use a checkpoint in float32, bfloat16 or float16"
        )


def _check_tied_equal(
    first_name: str, first_tensor: ReadableTensor, other_name: str, other_tensor: ReadableTensor
) -> None:
    """Raise UserError if two tensors that are tied in the model have different values in the checkpoint.

    Reads 1024 rows of both tensors at a time.
    """
    for start in range(0, first_tensor.shape[0] if first_tensor.shape else 1, _ROWS_PER_COMPARISON):
        index = None
        if first_tensor.shape:
            rows = slice(start, min(start + _ROWS_PER_COMPARISON, first_tensor.shape[0]))
            index = (rows, *(slice(0, size) for size in first_tensor.shape[1:]))
        if not np.array_equal(first_tensor.read(index), other_tensor.read(index)):
            raise UserError(
                f"model.name_or_path: {first_name} and {other_name} differ in the checkpoint, but "
                "config.json ties them; set tie_word_embeddings to false in config.json"
            )


def _check_output_head_present(model: PreTrainedModel, weights: PretrainedWeights) -> None:
    """Raise UserError if a language model's checkpoint does not contain the output head.

    The head would otherwise be randomly initialized.

    Args:
        model: The model on the meta device.
        weights: Weights of the checkpoint, including the names of missing tensors.
    """
    missing = set(weights.missing)
    matrix = getattr(model.get_output_embeddings(), "weight", None)
    tables = {id(table) for table in list_embedding_weights(model)}
    tieable = transformers_internals.get_tieable_parameter_names(model) or ()
    missing_heads = [
        name
        for name, parameter in model.named_parameters()
        if name in missing
        and (
            parameter is matrix
            or (name in tieable and name.endswith("weight") and id(parameter) not in tables)
        )
    ]
    if missing_heads:
        unused = f" (unused tensors: {_summarize_names(weights.unexpected)})" if weights.unexpected else ""
        raise UserError(
            f"model.name_or_path: the checkpoint does not contain the output head {missing_heads[0]}, so the "
            f"head would be randomly initialized{unused}; use a checkpoint of a language model, or set "
            "model.init: scratch"
        )


def open_pretrained_checkpoint(settings: ModelConfig, dtype: str) -> Checkpoint:
    """Open the checkpoint ``model.name_or_path``. Quantized weights are dequantized to floats.

    The files of a Hub model are downloaded if they are not cached. Weights are read and dequantized
    only when they are accessed.

    Args:
        settings: The ``model`` section of the config.
        dtype: Dtype of the dequantized weights.

    Raises:
        UserError: If the checkpoint cannot be read or dequantized.
    """
    with convert_checkpoint_errors("model.name_or_path"):
        checkpoint = open_checkpoint(fetch_model_folder(str(settings.name_or_path)))
        plain = converters.read_quantization_config(checkpoint) is None
        return checkpoint if plain else converters.dequantize_checkpoint(checkpoint, dtype)


def open_quantized_base(settings: ModelConfig) -> Checkpoint:
    """Open the checkpoint ``model.name_or_path`` without dequantizing its weights.

    ``checkpoint.export: like_base`` uses this checkpoint as the template for an export.

    Args:
        settings: The ``model`` section of the config.

    Raises:
        UserError: If the checkpoint cannot be read, if it is not quantized, or if the export
            cannot write its quantization format.
    """
    with convert_checkpoint_errors("checkpoint.export: like_base"):
        checkpoint = open_checkpoint(fetch_model_folder(str(settings.name_or_path)))
        converters.read_writable_config(checkpoint)
    return checkpoint


# -- quantized checkpoints -----------------------------------------------------------------------------------


def _load_base_config(settings: ModelConfig) -> PretrainedConfig:
    """Load the transformers config of ``model.name_or_path``, ignoring ``model.config``."""
    from transformers import AutoConfig

    name = str(settings.name_or_path)

    def load() -> PretrainedConfig:
        return AutoConfig.from_pretrained(name, trust_remote_code=settings.trust_remote_code)

    with convert_library_errors("model.name_or_path"):
        return read_hub_once_per_node(name, "config", load)


def _load_dequantized(
    settings: ModelConfig, model: PreTrainedModel, quantization_config: Mapping[str, Any]
) -> PretrainedWeights:
    """Load a quantized checkpoint into host memory as floats, using transformers' dequantization.

    Args:
        settings: The ``model`` section of the config.
        model: The model on the meta device. It is not modified.
        quantization_config: The ``quantization_config`` of the checkpoint.

    Raises:
        UserError: If transformers cannot dequantize the checkpoint on this machine, for example
            because a package is missing, or if a dequantized tensor does not fit the model.
    """
    method, changed_quantization = (
        quantization_config.get("quant_method", "unknown method"),
        dict(quantization_config),
    )
    method = getattr(method, "value", method)  # an enum member, or its value
    try:
        config = copy.deepcopy(model.config)
        if transformers_internals.can_dequantize_on_loading(changed_quantization):
            changed_quantization["dequantize"] = True  # dequantizes while loading
        config.quantization_config = changed_quantization
        loaded, info = _load_with_report(settings, model, config)
        if getattr(loaded, "hf_quantizer", None) is not None:
            loaded = loaded.dequantize(torch.float32)
        model_tensors, tensors = get_state_tensors(model), get_state_tensors(loaded)
        for name, target in model_tensors.items():
            if target.is_floating_point() and name in tensors:
                _check_dequantized(name, tensors[name], target)
        weights = _collect_loaded_weights(loaded, info)
    except Exception as error:  # each method raises its own errors if its package or device is missing
        raise UserError(
            f"model.name_or_path: the weights are quantized ({method}) and cannot be dequantized "
            f"({to_one_line(error)}); use a checkpoint in float32, bfloat16 or float16"
        ) from error
    return PretrainedWeights(
        {name: source for name, source in weights.tensors.items() if name in model_tensors},
        [name for name in model_tensors if name not in weights.tensors],
        weights.unexpected,
    )


def _check_dequantized(name: str, source: torch.Tensor, target: torch.Tensor) -> None:
    """Raise ValueError if a dequantized tensor is not a float tensor with the shape of ``target``."""
    if source.dtype not in (torch.float32, torch.bfloat16, torch.float16) or source.shape != target.shape:
        raise ValueError(
            f"{name} has dtype {source.dtype} and shape {list(source.shape)} after dequantization, but the "
            f"model needs floating-point values of shape {list(target.shape)}"
        )


def _load_with_transformers(settings: ModelConfig, model: PreTrainedModel) -> PretrainedWeights:
    """Load weights that cannot be mapped lazily into host memory, with ``from_pretrained``."""
    with convert_library_errors("model.name_or_path"):
        loaded, info = _load_with_report(settings, model, model.config)
    return _collect_loaded_weights(loaded, info)


class _LoadedModel(NamedTuple):
    """Model that transformers has loaded into host memory.

    Attributes:
        model: The model.
        info: Report of ``from_pretrained``, with ``missing_keys`` and ``unexpected_keys``.
    """

    model: Any
    info: Mapping[str, Any]


def _load_with_report(
    settings: ModelConfig, model: PreTrainedModel, config: PretrainedConfig
) -> _LoadedModel:
    """Load the checkpoint into host memory in fp32, using the class of ``model``.

    Args:
        settings: The ``model`` section of the config.
        model: The model on the meta device. Only its class is used.
        config: Transformers config for the loaded model.

    Returns:
        The loaded model, and the report of ``from_pretrained`` about missing and unexpected
        tensors.
    """
    load = partial(
        type(model).from_pretrained,
        settings.name_or_path,
        config=config,
        dtype=torch.float32,
        output_loading_info=True,
        trust_remote_code=settings.trust_remote_code,
    )
    loaded, info = read_hub_once_per_node(str(settings.name_or_path), "model", load)
    return _LoadedModel(loaded, info)


def _collect_loaded_weights(loaded: nn.Module, info: Mapping[str, Any]) -> PretrainedWeights:
    """Collect the weights of a model that was loaded by ``from_pretrained``.

    Args:
        loaded: The model.
        info: Report of ``from_pretrained``. Tensors in its ``missing_keys`` are reported as missing,
            because their values are random.
    """
    missing = set(info["missing_keys"])
    tensors = get_state_tensors(loaded)
    weights = {name: ComputedTensor.from_tensor(t) for name, t in tensors.items() if name not in missing}
    in_order = [name for name in tensors if name in missing]
    return PretrainedWeights(weights, in_order, sorted(info["unexpected_keys"]))


def fetch_model_folder(name_or_path: str, key: str = "model.name_or_path") -> Path:
    """Return the local folder of a pretrained model.

    If the files of a Hub model are not cached, one process per node downloads them. Only the
    files in :data:`_HUB_FILES` are downloaded: weights in safetensors format, configs and
    tokenizers, but no ``*.bin`` files and no Python code.

    Args:
        name_or_path: Local folder, or name of a model on the Hub.
        key: Setting that specifies the model, used in error messages.

    Raises:
        UserError: If ``name_or_path`` is neither a folder nor a model, or if the download fails.
    """
    if Path(name_or_path).is_dir():
        return Path(name_or_path)
    if name_or_path.startswith(("/", ".", "~")) or name_or_path.count("/") > 1:
        raise UserError(
            f"{key}: {name_or_path}: no such folder"
            + (
                format_path_suggestion(Path(name_or_path))
                or "; use a model folder or a model name on the hub (organization/name)"
            )
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        download = partial(snapshot_download, name_or_path, allow_patterns=[*_HUB_FILES])
        return Path(read_hub_once_per_node(name_or_path, "weights", download))
    except (OSError, ValueError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise UserError(f"{key}: {describe_download_error(name_or_path, error)}") from error
