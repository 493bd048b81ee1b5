"""The files of one DeepSpeed checkpoint folder: names, content, and whether they are from one run.

Source: deepspeed/runtime/engine.py (`_save_checkpoint`, `_save_zero_checkpoint`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.converters.checkpoint import Checkpoint
from portable.converters.config_and_tokenizer_files import find_companions, read_trainer_metadata
from portable.converters.containers.pickle_reader import (
    PickledInstance,
    build_getattr_standin,
    format_untrusted_value,
    to_json_value,
)
from portable.converters.containers.torchzip import StoredTensor, TorchZip
from portable.converters.containers.untrusted_values import (
    require_list,
    require_mapping,
    require_names,
    require_shape,
)
from portable.converters.errors import CheckpointError
from portable.converters.formats.deepspeed.flat_layout import (
    Fragment,
    Stage3GroupLayout,
    require_equal_dtypes,
    to_flat_piece,
)
from portable.converters.formats.torch_save.optimizer import to_lazy_tensor
from portable.converters.limits import MAX_COUNT
from portable.converters.names.canonical import strip_common_prefixes
from portable.converters.storage.folder_operations import list_entry_names, map_with_prefetch
from portable.converters.storage.safe_open import get_child_inside, read_small_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from portable.converters.checkpoint import Aliases, OptimizerState
    from portable.converters.containers.pickle_reader import Standin
    from portable.converters.formats.deepspeed.flat_layout import ParameterShapes
    from portable.converters.storage.folder import CheckpointFolder
    from portable.converters.storage.path_or_url import AnyPath
    from portable.converters.tensors.tensor import Tensor


_OPTIM = re.compile(
    r"(?P<prefix>bf16_|fp16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt"
)
TIED = "tied_modules."
"""Prefix of the parameters of a pipeline that several layers share."""
_MODEL = re.compile(r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt")
_EXPERT = re.compile(r"(?:layer_\d+_)?(?:expert_|expp_rank_).*\.pt")
_LAYER = re.compile(r"layer_\d+.*model_states\.pt")


def _rebuild_enum_as_integer(value: Any = 0) -> int:
    return int(value) if isinstance(value, int) else 0


# Classes that DeepSpeed and its common clients pickle; those of `deepspeed.` are inert too.
_STAGE = "deepspeed.runtime.zero.config.ZeroStageEnum"
_STAGES = ("disabled", "optimizer_states", "gradients", "weights")
STANDINS: Mapping[str, Standin | None] = {
    _STAGE: _rebuild_enum_as_integer,
    "builtins.getattr": build_getattr_standin({(_STAGE, name): stage for stage, name in enumerate(_STAGES)}),
}
PREFIXES = ("deepspeed.",)


@dataclass(frozen=True)
class RankFileNames:
    """The rank files of a folder, by tensor or pipeline parallel rank, then by data parallel rank.

    Attributes:
        optim: the files of optimizer states; empty where ZeRO is off.
        model: the files of model states; those of data parallel rank 0 alone below stage 3.
        experts, layers: the files of single experts, and of single layers of a pipeline.
    """

    optim: dict[int, dict[int, str]]
    model: dict[int, dict[int, str]]
    has_model_per_rank: bool
    experts: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()


def find_rank_files(path: AnyPath) -> RankFileNames | None:
    """The rank files in `path`; None if it holds none.

    Raises:
        CheckpointError: files of two runs.
    """
    optim, model, experts, layers = [], [], [], []
    for name in list_entry_names(path):
        if match := _OPTIM.fullmatch(name):
            optim.append((match, name))
        elif match := _MODEL.fullmatch(name):
            model.append((match, name))
        elif _EXPERT.fullmatch(name):
            experts.append(name)
        elif _LAYER.fullmatch(name):
            layers.append(name)
    if not optim and not model:
        return None
    if len({match["prefix"] for match, _ in optim}) > 1:
        raise CheckpointError(
            f"{path}: holds optimizer files with and without the prefix bf16_, from two runs"
        )
    if not optim and (path / "zero").is_dir():  # a universal checkpoint for all stages has both
        rank_independent = [(match, name) for match, name in model if match["rank"] is None]
        model = rank_independent or model
    if len({match["rank"] is None for match, _ in model}) > 1:
        raise CheckpointError(f"{path}: holds model files of stage 3 and of other stages, from two runs")
    has_model_per_rank = any(match["rank"] is not None for match, _ in model)
    return RankFileNames(
        _group_names_by_rank(path, optim),
        _group_names_by_rank(path, model),
        has_model_per_rank,
        tuple(experts),
        tuple(layers),
    )


def read_tag_file(path: AnyPath) -> str | None:
    """The content of a file that names a folder, such as `latest`; None where there is no such file."""
    try:
        return read_small_file(path, max_bytes=1024, truncate=True).decode("utf-8", "replace").strip()
    except OSError:
        return None


def find_tag_folder(
    path: AnyPath, tag: str | None, is_checkpoint: Callable[[AnyPath], bool]
) -> AnyPath | None:
    """The folder of a tag in `path`, if the tag is a plain name and the folder holds such a checkpoint."""
    if tag in (None, "", ".", "..") or any(mark in tag for mark in "/\\\0"):
        return None
    return get_child_inside(path, tag) if is_checkpoint(path / tag) else None


def _group_names_by_rank(path: AnyPath, files: list[tuple[re.Match[str], str]]) -> dict[int, dict[int, str]]:
    names_by_rank: dict[int, dict[int, str]] = {}
    for match, name in files:
        rank, ranks = int(match["rank"] or 0), names_by_rank.setdefault(int(match["mp"]), {})
        if rank in ranks:
            raise CheckpointError(f"{path}: {ranks[rank]} and {name} are both of rank {rank}")
        ranks[rank] = name
    return {mp: dict(sorted(ranks.items())) for mp, ranks in sorted(names_by_rank.items())}


def load_rank_file(folder: CheckpointFolder, name: str) -> dict[str, Any]:
    """The content of one rank file.

    Raises:
        CheckpointError: damaged, holds code, or was renamed (torch.save stores the original name).
    """
    file = folder.get_file(name)
    archive = TorchZip(file)
    archive.check_not_renamed()
    content = archive.load_object(STANDINS, PREFIXES)
    if not isinstance(content, dict):
        raise CheckpointError(f"{file.path}: not a DeepSpeed file")
    return content


class ParallelDegrees(NamedTuple):
    """The numbers of tensor-parallel ranks and of pipeline stages of a run."""

    tensor: int
    pipeline: int


@dataclass(frozen=True)
class ModelFile:
    """One `*_model_states.pt`.

    Attributes:
        module: the state dict; empty where a pipeline's layers have files of their own (`is_pipeline`).
        group_shapes: parameter name -> shape in the order of the flat group, per group (stage 3: sub-group).
        frozen_shapes: frozen parameter -> shape; None if not saved.
        frozen_fragments: frozen parameter -> the part in this file.
        tied_names: tied alias -> owner.
    """

    location: str
    content: dict[str, Any]
    module: dict[str, Any]
    buffers: list[str]
    group_shapes: list[ParameterShapes] | None
    frozen_shapes: ParameterShapes | None
    frozen_fragments: dict[str, StoredTensor]
    tied_names: dict[str, str]
    is_pipeline: bool

    @property
    def parallel_degrees(self) -> ParallelDegrees:
        """The numbers of tensor-parallel and of pipeline-parallel ranks.

        Raises:
            CheckpointError: damaged, or the file does not say which of the two.
        """
        dims, total = (
            self.content.get("checkpoint_parallel_dimensions"),
            self.get_counter("mp_world_size") or 1,
        )
        if not isinstance(dims, dict):
            dims = {"pp_degree" if self.is_pipeline else "tp_degree": total}
        degrees = dims.get("tp_degree", 1), dims.get("pp_degree", 1)
        if any(type(n) is not int or not 0 < n < MAX_COUNT for n in degrees) or prod(degrees) != total:
            raise CheckpointError(
                f"{self.location}: damaged, its tensor and pipeline parallel degrees are "
                f"{format_untrusted_value(degrees[0])} and {format_untrusted_value(degrees[1])} of {total}"
            )
        return ParallelDegrees(*degrees)

    def get_rank_independent_records(self) -> dict[str, Any]:
        """What the model states of all ranks of a run have alike, in comparable form."""
        counted = ("ds_version", "global_steps", "skipped_steps", "global_samples", "dp_world_size")
        return {
            **{record: self.content.get(record) for record in counted},
            "ds_config": to_json_value(self.content.get("ds_config")),
            "param_shapes": to_ordered_lists(self.group_shapes),
            "frozen_param_shapes": self.frozen_shapes,
            "frozen parameters": set(self.frozen_fragments),
            "buffer_names": self.buffers,
        }

    def get_counter(self, key: str) -> int | None:
        """A counter such as `global_steps`."""
        value = self.content.get(key)
        return value if type(value) is int else None

    def get_counters(self) -> dict[str, int]:
        """The engine's counters in the file."""
        counted = {key: self.get_counter(key) for key in ("global_steps", "global_samples", "skipped_steps")}
        return {key: value for key, value in counted.items() if value is not None}


def read_model_file(folder: CheckpointFolder, name: str) -> ModelFile:
    """Read one file of model states; CheckpointError if DeepSpeed could not have written it."""
    content = load_rank_file(folder, name)
    location = str(folder.path / name)
    module = content.get("module")
    if not isinstance(module, (dict, type(None))) or not {"module", "buffer_names"} <= content.keys():
        raise CheckpointError(f"{location}: not a DeepSpeed model states file")
    if any(content.get(key) is not None for key in ("autoep_layers", "ds_autoep_layers")):
        raise CheckpointError(f"{location}: expert parallel checkpoints of AutoEP are not supported")
    groups = content.get("param_shapes")
    if isinstance(groups, dict):
        groups = [groups]
    fragments = content.get("frozen_param_fragments")
    shared = content.get("shared_params")
    return ModelFile(
        location,
        content,
        module or {},
        require_names(content["buffer_names"], "buffer_names", location),
        None
        if groups is None
        else [_parse_shapes(group, location) for group in require_list(groups, "param_shapes", location)],
        None
        if content.get("frozen_param_shapes") is None
        else _parse_shapes(content["frozen_param_shapes"], location),
        {
            str(key): require_contiguous(value, f"{location}: {key!r}", any_shape=True)
            for key, value in require_mapping(fragments or {}, "frozen_param_fragments", location).items()
        },
        {
            str(alias): str(owner)
            for alias, owner in require_mapping(shared or {}, "shared_params", location).items()
        },
        module is None,
    )


def read_model_files(folder: CheckpointFolder, model: ModelFile, names: Iterable[str]) -> list[ModelFile]:
    """The model states of all ranks, `model` first; of the others, only the fragments are kept.

    Raises:
        CheckpointError: they are not of one run and step.
    """
    models, first = [model], model.get_rank_independent_records()
    for other in map_with_prefetch(folder.path, partial(read_model_file, folder), names):
        for record, value in other.get_rank_independent_records().items():
            check_equal_records(other.location, record, value, first[record])
        models.append(replace(other, module={}, content={}, group_shapes=None))
    return models


@dataclass(frozen=True)
class OptimFile:
    """One `*_optim_states.pt`: `state` is the ZeRO optimizer's own dict."""

    location: str
    state: dict[str, Any]
    version: Any
    config: dict[str, Any]

    def get_alignment_gaps(self, group: int, num_parameters: int) -> list[int]:
        """The elements after each of the `num_parameters` parameters of a group, for alignment."""
        gaps = self.state.get("param_alignment_paddings")
        if gaps is None:
            return [0] * num_parameters
        group_gaps = gaps[group] if isinstance(gaps, list) and group < len(gaps) else None
        if (
            not isinstance(group_gaps, list)
            or len(group_gaps) != num_parameters
            or any(type(n) is not int or n < 0 for n in group_gaps)
        ):
            raise CheckpointError(
                f"{self.location}: damaged, its param_alignment_paddings do not match the groups"
            )
        return group_gaps

    def get_slice_padding(self, group: int) -> int:
        """The elements at the end of this rank's slice of a group that belong to no parameter."""
        paddings = self.state.get("group_paddings")
        if not isinstance(paddings, list) or group >= len(paddings) or type(paddings[group]) is not int:
            raise CheckpointError(f"{self.location}: damaged, no group_paddings")
        return int(paddings[group])

    def get_rank_independent_records(self) -> dict[str, Any]:
        """What the optimizer states of all ranks of a run have alike."""
        record_names = (
            "zero_stage",
            "partition_count",
            "param_alignment_paddings",
            "ds_version",
            "clip_grad",
        )
        about = {record: self.state.get(record) for record in record_names}
        return {**about, "ds_version": self.version, "ds_config": to_json_value(self.config)}


def get_partition_counts(state: Mapping[str, Any], location: str) -> list[int]:
    """`partition_count` of ZeRO's optimizer: a number for each group, or one for all."""
    counts = state.get("partition_count")
    counts = counts if isinstance(counts, list) else [counts]
    if not counts or any(type(count) is not int or count < 1 for count in counts):
        raise CheckpointError(f"{location}: damaged, no partition_count")
    return counts


def read_optim_file(folder: CheckpointFolder, name: str) -> OptimFile:
    """Read one file of optimizer states."""
    content = load_rank_file(folder, name)
    location = str(folder.path / name)
    state = content.get("optimizer_state_dict")
    if not isinstance(state, dict):
        raise CheckpointError(f"{location}: not a DeepSpeed optimizer states file")
    if "ds_zero_partition_groups" in state:
        raise CheckpointError(f"{location}: expert parallel checkpoints are not supported")
    config = content.get("ds_config")
    return OptimFile(location, state, content.get("ds_version"), config if isinstance(config, dict) else {})


@dataclass(frozen=True)
class NamedWeights:
    """Masters, frozen parameters and buffers by name; alias -> owner."""

    tensors: dict[str, Tensor]
    aliases: dict[str, str]


def combine_with_model_states(
    masters: dict[str, Tensor],
    model_files: Sequence[ModelFile],
    module: Mapping[str, Any],
    stage: int,
    world: int,
) -> NamedWeights:
    """The masters, and what the model states alone hold: frozen parameters, ties and buffers.

    Args:
        model_files: of all ranks that have one.
        module: the pickled weights, by their names in the whole model.

    Raises:
        CheckpointError: a frozen parameter or a buffer is missing, or a tie contradicts the weights.
    """
    model = model_files[0]
    tensors = {**masters, **_build_frozen_parameters(model_files, stage, world)}
    aliases: dict[str, str] = {}
    # `exclude_frozen_parameters` leaves out a frozen parameter, but not the other names of a tied one.
    excluded = {
        alias for alias, owner in model.tied_names.items() if owner not in tensors and owner not in module
    }
    for alias, owner in model.tied_names.items():
        # Parameters without elements share an address without being tied.
        if owner not in tensors or not tensors[owner].numel:
            continue
        if alias in tensors:
            raise CheckpointError(f"{model.location}: {alias!r} is tied to {owner!r} and also stored")
        stored = model.module.get(alias)
        if stage < 3 and isinstance(stored, StoredTensor) and stored.shape != tensors[owner].shape:
            raise CheckpointError(
                f"{model.location}: {alias!r} is tied to {owner!r}, which has another shape"
            )
        aliases[alias] = owner
    for name, value in module.items():
        if name in tensors or name in aliases or not isinstance(value, StoredTensor):
            continue
        if stage == 3 and name not in model.buffers and not prod(value.shape):
            if name in excluded and model.frozen_shapes is None:
                continue
            raise CheckpointError(f"{model.location}: names {name!r}, whose values were not saved")
        tensors[name] = to_lazy_tensor(value, name)
    missing = next((name for name in model.buffers if name not in tensors and name not in aliases), None)
    if missing is not None:
        raise CheckpointError(f"{model.location}: the buffer {missing!r} is named but missing")
    return NamedWeights(tensors, aliases)


def _build_frozen_parameters(files: Sequence[ModelFile], stage: int, world: int) -> dict[str, Tensor]:
    """Parameters outside the optimizer: whole below stage 3, else one fragment per rank."""
    model = files[0]
    tensors: dict[str, Tensor] = {}
    frozen = model.frozen_shapes or {}
    for file in files:
        check_equal_records(file.location, "frozen parameters", set(file.frozen_fragments), set(frozen))
    for name, shape in frozen.items():
        location = f"{model.location}: {name!r}"
        if stage == 3:
            pieces = [
                to_flat_piece(require_contiguous(file.frozen_fragments[name], file.location))
                for file in files
            ]
            tensors |= Stage3GroupLayout({name: shape}, world, location).split_into_parameters(
                require_equal_dtypes(pieces, location)
            )
        elif (stored := model.frozen_fragments[name]).shape == shape:
            tensors[name] = to_lazy_tensor(stored, name)
        else:
            raise CheckpointError(f"{location}: is {list(stored.shape)}, recorded as {list(shape)}")
    return tensors


def build_deepspeed_checkpoint(
    format: str,
    root: AnyPath,
    folder: AnyPath,
    model: ModelFile,
    weights: NamedWeights,
    optimizer: Callable[[], OptimizerState | None],
    metadata: Mapping[str, Any],
) -> Checkpoint:
    """The checkpoint under plain names; `metadata` may hold values of any kind, of which some are kept."""
    plain = strip_common_prefixes(weights.tensors, location=str(folder))
    plain_names = dict(zip(weights.tensors, plain, strict=True))
    aliases = strip_common_prefixes(weights.aliases, location=str(folder))

    def open_renamed_optimizer(_: Aliases) -> OptimizerState | None:
        state = optimizer()
        return None if state is None else state.rename_parameters(plain_names.get)

    all_metadata = {"step": model.get_counter("global_steps"), "tag": folder.name, **metadata}
    return Checkpoint(
        format=format,
        root=root,
        tensors=plain,
        aliases={alias: plain_names[owner] for alias, owner in aliases.items()},
        optimizer=open_renamed_optimizer,
        metadata={
            **read_trainer_metadata(root),
            **{key: value for key, value in all_metadata.items() if isinstance(value, (int, str))},
        },
        companions=find_companions(folder),
        counters=model.get_counters,
    )


def to_ordered_lists(value: Any) -> Any:
    """Tables as lists, since their order is the layout."""
    if isinstance(value, dict):
        return list(value.items())
    return [to_ordered_lists(item) for item in value] if isinstance(value, list) else value


def check_equal_records(location: str, description: str, ours: Any, first: Any) -> None:
    """CheckpointError unless two files agree on a record that is equal on every rank of a run."""
    if ours != first:
        raise CheckpointError(
            f"{location}: its {description} differs from the first rank; files of two runs or steps"
        )


def require_contiguous(value: Any, location: str, *, any_shape: bool = False) -> StoredTensor:
    """`value` if it is a contiguous 1-d tensor (of any shape if `any_shape`); else CheckpointError."""
    if not isinstance(value, StoredTensor):
        raise CheckpointError(f"{location}: not a tensor")
    if not value.is_contiguous:
        raise CheckpointError(f"{location}: the tensor is not contiguous")
    if not any_shape and len(value.shape) != 1:
        raise CheckpointError(f"{location}: a flat tensor of {len(value.shape)} dimensions")
    return value


def parse_fragment_address(value: Any, location: str) -> Fragment:
    """Parse a pickled `fragment_address`."""
    state = value.state if isinstance(value, PickledInstance) else None
    if isinstance(value, PickledInstance) and len(value.args) == 2 and state is None:
        state = {"numel": value.args[0], "start": value.args[1]}
    if not isinstance(state, dict):
        raise CheckpointError(f"{location}: damaged param_slice_mappings")
    start, numel = state.get("start"), state.get("numel")
    if type(start) is not int or type(numel) is not int:
        raise CheckpointError(f"{location}: damaged param_slice_mappings")
    return Fragment(start, numel)


def _parse_shapes(value: Any, location: str) -> ParameterShapes:
    shapes: ParameterShapes = {}
    for name, shape in require_mapping(value or {}, "a table of shapes", location).items():
        shapes[str(name)] = require_shape(shape, f"the shape of {format_untrusted_value(name)}", location)
    return shapes
