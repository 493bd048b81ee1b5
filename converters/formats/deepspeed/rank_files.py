"""Find, read, and cross-check the files in a DeepSpeed checkpoint folder.

Source: `_save_checkpoint` and `_save_zero_checkpoint` in deepspeed/runtime/engine.py.
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
from portable.converters.errors import (
    CheckpointError,
    DamagedCheckpointError,
    MixedCheckpointError,
    UnsupportedCheckpointError,
)
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
"""Name prefix of pipeline parameters that several layers share."""
_MODEL = re.compile(r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt")
_EXPERT = re.compile(r"(?:layer_\d+_)?(?:expert_|expp_rank_).*\.pt")
_LAYER = re.compile(r"layer_\d+.*model_states\.pt")


def _rebuild_enum_as_integer(value: Any = 0) -> int:
    """Return the integer value of a pickled ZeRO stage enum, or 0 if the value is not an integer."""
    return int(value) if isinstance(value, int) else 0


# Classes that DeepSpeed and its common clients pickle. All classes of `deepspeed` become inert records too.
_STAGE = "deepspeed.runtime.zero.config.ZeroStageEnum"
_STAGES = ("disabled", "optimizer_states", "gradients", "weights")
STANDINS: Mapping[str, Standin | None] = {
    _STAGE: _rebuild_enum_as_integer,
    "builtins.getattr": build_getattr_standin({(_STAGE, name): stage for stage, name in enumerate(_STAGES)}),
}
PREFIXES = ("deepspeed.",)


@dataclass(frozen=True)
class RankFileNames:
    """Names of the files that the ranks of a DeepSpeed run have saved.

    The names in `optim` and `model` are keyed by model-parallel rank and then by data-parallel
    rank. For example, `optim[0][1]` is `zero_pp_rank_1_mp_rank_00_optim_states.pt`. The
    model-parallel rank is the pipeline stage if the run has a pipeline, and the tensor-parallel
    rank otherwise.

    Attributes:
        optim: Files of optimizer states. Empty without ZeRO.
        model: Files of model states. Below stage 3, only data-parallel rank 0 has such a file.
        has_model_per_rank: Whether each data-parallel rank has a file of model states, as in stage
            3.
        experts: Files that each contain one expert.
        layers: Files that each contain one pipeline layer.
    """

    optim: dict[int, dict[int, str]]
    model: dict[int, dict[int, str]]
    has_model_per_rank: bool
    experts: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()


def find_rank_files(path: AnyPath) -> RankFileNames | None:
    """Find the rank files in a folder.

    A universal checkpoint has a folder `zero` and no optimizer files. If some of its model files
    have no data-parallel rank in their names, the other model files are ignored.

    Returns:
        Names of the files. None if there are neither optimizer states nor model states.

    Raises:
        CheckpointError: If two files belong to the same rank, or if the files are from two runs.
            Files are considered to be from two runs if the optimizer files have different prefixes
            (`bf16_`, `fp16_` or none), or if only some of the model files have a data-parallel rank
            in their names.
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
            f"{path}: contains optimizer files with different prefixes (bf16_, fp16_ or none), so they are "
            "from different runs; remove the files of the runs that you do not need"
        )
    # A universal checkpoint for all stages has model files with and without a rank in their names.
    if not optim and (path / "zero").is_dir():
        rank_independent = [(match, name) for match, name in model if match["rank"] is None]
        model = rank_independent or model
    if len({match["rank"] is None for match, _ in model}) > 1:
        raise CheckpointError(
            f"{path}: contains model files of ZeRO stage 3 and of other ZeRO stages, so they are from two "
            "runs; remove the files of the run that you do not need"
        )
    has_model_per_rank = any(match["rank"] is not None for match, _ in model)
    return RankFileNames(
        _group_names_by_rank(path, optim),
        _group_names_by_rank(path, model),
        has_model_per_rank,
        tuple(experts),
        tuple(layers),
    )


def read_tag_file(path: AnyPath) -> str | None:
    """Return the folder name in a tag file such as `latest`, or None if it cannot be read."""
    try:
        return read_small_file(path, max_bytes=1024, truncate=True).decode("utf-8", "replace").strip()
    except OSError:
        return None


def find_tag_folder(
    path: AnyPath, tag: str | None, is_checkpoint: Callable[[AnyPath], bool]
) -> AnyPath | None:
    """Find the step folder that a tag names.

    Args:
        path: Folder that contains the step folders.
        tag: Name of the step folder. It must be a plain file name.
        is_checkpoint: Function that returns whether a folder contains a checkpoint of the format.

    Returns:
        The step folder. None if `tag` is None or is not a plain file name, or if `is_checkpoint`
        rejects the folder.
    """
    if tag in (None, "", ".", "..") or any(mark in tag for mark in "/\\\0"):
        return None
    return get_child_inside(path, tag) if is_checkpoint(path / tag) else None


def _group_names_by_rank(path: AnyPath, files: list[tuple[re.Match[str], str]]) -> dict[int, dict[int, str]]:
    """Group file names by model-parallel rank, and sort each group by data-parallel rank.

    The model-parallel rank is the number after `mp_rank_` in the name: the pipeline stage or the
    tensor-parallel rank.

    Args:
        path: Checkpoint folder, used in error messages.
        files: Name of each file, with the match that contains its ranks in the groups `mp` and
            `rank`. A missing data-parallel rank counts as 0.

    Returns:
        File names, keyed by model-parallel rank and then by data-parallel rank.

    Raises:
        CheckpointError: If two files have the same pair of ranks.
    """
    names_by_rank: dict[int, dict[int, str]] = {}
    for match, name in files:
        rank, ranks = int(match["rank"] or 0), names_by_rank.setdefault(int(match["mp"]), {})
        if rank in ranks:
            raise DamagedCheckpointError(f"{path}: {ranks[rank]} and {name} both belong to rank {rank}")
        ranks[rank] = name
    return {mp: dict(sorted(ranks.items())) for mp, ranks in sorted(names_by_rank.items())}


def load_rank_file(folder: CheckpointFolder, name: str) -> dict[str, Any]:
    """Load a rank file. Tensors become `StoredTensor`s.

    Raises:
        CheckpointError: If the file is damaged, contains code, or was renamed (torch.save stores the
            original name).
    """
    file = folder.get_file(name)
    archive = TorchZip(file)
    archive.check_not_renamed()
    content = archive.load_object(STANDINS, PREFIXES)
    if not isinstance(content, dict):
        raise DamagedCheckpointError(
            f"{file.path}: is not a DeepSpeed file, because the file does not contain a dict"
        )
    return content


class ParallelDegrees(NamedTuple):
    """Degrees of tensor and pipeline parallelism of a run.

    Attributes:
        tensor: Number of tensor-parallel ranks.
        pipeline: Number of pipeline stages.
    """

    tensor: int
    pipeline: int


@dataclass(frozen=True)
class ModelFile:
    """Content of a `*_model_states.pt` file.

    In results of `build_deferred_model_file`, and in results of `read_model_files` for ranks
    other than the first, `content` and `module` are empty, and `group_shapes` is None.

    Attributes:
        location: Path of the file, used in error messages.
        content: The complete content.
        module: Model state dict. Empty if the layers of a pipeline have separate files, until the
            reader replaces it with the result of `LayerFiles.build_stage_module`.
        buffers: Names of the buffers.
        group_shapes: Shapes of the parameters in each flat group (in stage 3, sub-group), in
            the order of the group. None without ZeRO.
        frozen_shapes: Shapes of the frozen parameters. None if they are not saved.
        frozen_fragments: This file's part of each frozen parameter, keyed by name.
        tied_names: For each alias of a tied parameter, the name of the stored parameter.
        is_pipeline: Whether the layers of a pipeline have separate files.
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
        """Numbers of tensor-parallel ranks and pipeline stages.

        If the file does not record the two numbers, all model-parallel ranks are pipeline stages in
        a pipeline-parallel run, and tensor-parallel ranks in any other run.

        Raises:
            CheckpointError: If the recorded numbers are invalid, or if their product is not the
                number of model-parallel ranks.
        """
        dims, total = (
            self.content.get("checkpoint_parallel_dimensions"),
            self.get_counter("mp_world_size") or 1,
        )
        if not isinstance(dims, dict):
            dims = {"pp_degree" if self.is_pipeline else "tp_degree": total}
        degrees = dims.get("tp_degree", 1), dims.get("pp_degree", 1)
        if any(type(n) is not int or not 0 < n < MAX_COUNT for n in degrees) or prod(degrees) != total:
            raise DamagedCheckpointError(
                f"{self.location}: damaged: the degrees of tensor parallelism "
                f"({format_untrusted_value(degrees[0])}) and pipeline parallelism "
                f"({format_untrusted_value(degrees[1])}) do not match the number of "
                f"model-parallel ranks ({total:,})"
            )
        return ParallelDegrees(*degrees)

    def get_rank_independent_records(self) -> dict[str, Any]:
        """Return the values that must be equal in the model states of all ranks, keyed by name.

        Examples are the number of steps and the shapes of the parameters.
        """
        counted = ("ds_version", "global_steps", "skipped_steps", "global_samples", "dp_world_size")
        return {
            **{record: self.content.get(record) for record in counted},
            "ds_config": to_json_value(self.content.get("ds_config")),
            "param_shapes": to_ordered_lists(self.group_shapes),
            "frozen_param_shapes": self.frozen_shapes,
            "the set of frozen parameters": set(self.frozen_fragments),
            "buffer_names": self.buffers,
        }

    def get_counter(self, key: str) -> int | None:
        """Return a counter such as `global_steps`, or None if it is not recorded."""
        value = self.content.get(key)
        return value if type(value) is int else None

    def get_counters(self) -> dict[str, int]:
        """Return the engine's counters that the file records, keyed by name.

        The counters are `global_steps`, `global_samples` and `skipped_steps`.
        """
        counted = {key: self.get_counter(key) for key in ("global_steps", "global_samples", "skipped_steps")}
        return {key: value for key, value in counted.items() if value is not None}


def read_model_file(folder: CheckpointFolder, name: str) -> ModelFile:
    """Read one file of model states.

    Raises:
        CheckpointError: If the file is damaged or was renamed, if it is not a file of model states, if
            a frozen parameter is not contiguous, or if the run used expert parallelism of AutoEP.
    """
    content = load_rank_file(folder, name)
    location = str(folder.path / name)
    module = content.get("module")
    if not isinstance(module, (dict, type(None))) or not {"module", "buffer_names"} <= content.keys():
        raise DamagedCheckpointError(
            f"{location}: is not a DeepSpeed model states file, because module or buffer_names is missing "
            "or invalid"
        )
    if any(content.get(key) is not None for key in ("autoep_layers", "ds_autoep_layers")):
        raise UnsupportedCheckpointError(
            f"{location}: expert-parallel checkpoints of DeepSpeed AutoEP are not supported"
        )
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
    """Read the model states of all ranks.

    The first rank's file is kept unchanged. The other files are compared with it in the values that
    must be equal on all ranks, such as the number of steps. The weights and the complete content of
    the other files are then dropped, because only their parts of the frozen parameters are needed.

    Args:
        folder: Checkpoint folder.
        model: File of the first rank, already read.
        names: Names of the other ranks' files.

    Returns:
        Files of all ranks, beginning with `model`.

    Raises:
        CheckpointError: If the files are not from the same run and step.
    """
    models, first = [model], model.get_rank_independent_records()
    for other in map_with_prefetch(folder.path, partial(read_model_file, folder), names):
        for record, value in other.get_rank_independent_records().items():
            check_equal_records(other.location, record, value, first[record])
        models.append(replace(other, module={}, content={}, group_shapes=None))
    return models


@dataclass(frozen=True)
class OptimFile:
    """Content of an `*_optim_states.pt` file.

    Attributes:
        location: Path of the file, used in error messages.
        state: State dict of the ZeRO optimizer.
        version: Version of DeepSpeed. None if it is not recorded.
        config: DeepSpeed config of the run. Empty if it is not recorded.
    """

    location: str
    state: dict[str, Any]
    version: Any
    config: dict[str, Any]

    def get_alignment_gaps(self, group: int, num_parameters: int) -> list[int]:
        """Return the number of padding elements that follow each parameter of a group.

        DeepSpeed inserts these elements to align the parameters in the flat buffer. All numbers are
        0 if the file does not record any.

        Args:
            group: Index of the group.
            num_parameters: Number of parameters in the group.

        Raises:
            CheckpointError: If the record `param_alignment_paddings` does not fit the group.
        """
        gaps = self.state.get("param_alignment_paddings")
        if gaps is None:
            return [0] * num_parameters
        group_gaps = gaps[group] if isinstance(gaps, list) and group < len(gaps) else None
        if (
            not isinstance(group_gaps, list)
            or len(group_gaps) != num_parameters
            or any(type(n) is not int or n < 0 for n in group_gaps)
        ):
            raise DamagedCheckpointError(
                f"{self.location}: damaged: param_alignment_paddings does not match the parameter groups"
            )
        return group_gaps

    def get_slice_padding(self, group: int) -> int:
        """Return the number of padding elements at the end of this rank's slice of a group.

        Raises:
            CheckpointError: If the number is not recorded.
        """
        paddings = self.state.get("group_paddings")
        if not isinstance(paddings, list) or group >= len(paddings) or type(paddings[group]) is not int:
            raise DamagedCheckpointError(f"{self.location}: damaged: group_paddings is missing or incomplete")
        return int(paddings[group])

    def get_rank_independent_records(self) -> dict[str, Any]:
        """Return the values that must be equal in the optimizer states of all ranks, keyed by name.

        Examples are the ZeRO stage and the DeepSpeed version.
        """
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
    """Return ZeRO's `partition_count` as a list.

    `partition_count` is the number of ranks across which a parameter group is partitioned. The list
    has one number per group, or a single number for all groups.

    Raises:
        CheckpointError: If `partition_count` is not a positive number or a list of positive
            numbers.
    """
    counts = state.get("partition_count")
    counts = counts if isinstance(counts, list) else [counts]
    if not counts or any(type(count) is not int or count < 1 for count in counts):
        raise DamagedCheckpointError(
            f"{location}: damaged: partition_count is not a positive integer or a list of positive integers"
        )
    return counts


def read_optim_file(folder: CheckpointFolder, name: str) -> OptimFile:
    """Read one file of optimizer states, without reading the data of its tensors.

    Raises:
        CheckpointError: If the file is damaged or was renamed, or if it is from an expert-parallel run
            that records `ds_zero_partition_groups`. Other expert-parallel runs are accepted.
    """
    content = load_rank_file(folder, name)
    location = str(folder.path / name)
    state = content.get("optimizer_state_dict")
    if not isinstance(state, dict):
        raise DamagedCheckpointError(
            f"{location}: is not a DeepSpeed optimizer states file, because optimizer_state_dict is missing "
            "or invalid"
        )
    if "ds_zero_partition_groups" in state:
        raise UnsupportedCheckpointError(
            f"{location}: expert-parallel checkpoints with ds_zero_partition_groups are not supported"
        )
    config = content.get("ds_config")
    return OptimFile(location, state, content.get("ds_version"), config if isinstance(config, dict) else {})


@dataclass(frozen=True)
class NamedWeights:
    """Named master weights, frozen parameters and buffers of a model.

    Attributes:
        tensors: Tensors, keyed by name.
        aliases: For each alias of a tied parameter, the name of the stored parameter.
    """

    tensors: dict[str, Tensor]
    aliases: dict[str, str]


def combine_with_model_states(
    masters: dict[str, Tensor],
    model_files: Sequence[ModelFile],
    module: Mapping[str, Any],
    stage: int,
    world: int,
) -> NamedWeights:
    """Add the frozen parameters and buffers from the model states to the master weights.

    The model states are the `*_model_states.pt` files. A run has one file, or one per rank.

    Args:
        masters: The fp32 master weights, keyed by name.
        model_files: Contents of the `*_model_states.pt` files, in rank order. They record which
            parameters are frozen or tied, and the names of the buffers.
        module: Unpickled model weights, keyed by their names in the complete model. They are from
            the model states and, if the run has such files, from the files of layers or experts.
        stage: ZeRO stage.
        world: Number of data-parallel ranks.

    Returns:
        The master weights, frozen parameters and buffers, and the aliases of tied parameters.

    Raises:
        CheckpointError: If a frozen parameter or a buffer is missing. Also raised if a tied
            parameter is stored separately, or has a different shape than the parameter to which it
            is tied.
    """
    model = model_files[0]
    tensors = {**masters, **_build_frozen_parameters(model_files, stage, world)}
    aliases: dict[str, str] = {}
    # `exclude_frozen_parameters` leaves out a frozen parameter, but not the aliases of a tied parameter.
    excluded = {
        alias for alias, owner in model.tied_names.items() if owner not in tensors and owner not in module
    }
    for alias, owner in model.tied_names.items():
        # Parameters without elements share an address without being tied.
        if owner not in tensors or not tensors[owner].numel:
            continue
        if alias in tensors:
            raise CheckpointError(
                f"{model.location}: {alias!r} is tied to {owner!r}, but is also stored separately; save the "
                "checkpoint again with the program that wrote the checkpoint"
            )
        stored = model.module.get(alias)
        if stage < 3 and isinstance(stored, StoredTensor) and stored.shape != tensors[owner].shape:
            raise DamagedCheckpointError(
                f"{model.location}: {alias!r} is tied to {owner!r}, but has a different shape"
            )
        aliases[alias] = owner
    for name, value in module.items():
        if name in tensors or name in aliases or not isinstance(value, StoredTensor):
            continue
        if stage == 3 and name not in model.buffers and not prod(value.shape):
            if name in excluded and model.frozen_shapes is None:
                continue
            raise UnsupportedCheckpointError(f"{model.location}: the values of {name!r} were not saved")
        tensors[name] = to_lazy_tensor(value, name)
    missing = next((name for name in model.buffers if name not in tensors and name not in aliases), None)
    if missing is not None:
        raise DamagedCheckpointError(
            f"{model.location}: the buffer {missing!r} is in buffer_names, but its values are missing"
        )
    return NamedWeights(tensors, aliases)


def _build_frozen_parameters(files: Sequence[ModelFile], stage: int, world: int) -> dict[str, Tensor]:
    """Build the frozen parameters, which are not part of the optimizer.

    Below ZeRO stage 3, the model states contain each frozen parameter completely. In stage 3, each
    rank has a fragment of it.

    Args:
        files: Model states of the ranks that saved a file.
        stage: ZeRO stage.
        world: Number of data-parallel ranks.

    Returns:
        The parameters, keyed by name.

    Raises:
        CheckpointError: If a parameter or fragment does not match the shape recorded in the model
            states, or if a file does not contain exactly the recorded frozen parameters.
    """
    model = files[0]
    tensors: dict[str, Tensor] = {}
    frozen = model.frozen_shapes or {}
    for file in files:
        check_equal_records(
            file.location, "the set of frozen parameters", set(file.frozen_fragments), set(frozen)
        )
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
            raise DamagedCheckpointError(
                f"{location}: has shape {list(stored.shape)}, but the recorded shape is {list(shape)}"
            )
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
    """Build the `Checkpoint` of a DeepSpeed run from its weights and optimizer state.

    Common prefixes of the names, such as `module.`, are removed.

    Args:
        format: Value of `Checkpoint.format`.
        root: Requested path. It may be a parent of `folder`, or a file.
        folder: Folder that contains the DeepSpeed files. Its name becomes the tag in the metadata.
        model: Content of the first `*_model_states.pt` file, which contains the step counters.
        weights: Weights of the complete model.
        optimizer: Function that builds the optimizer state. It is called when the state is needed.
            The state must be keyed by the names in `weights`, and its parameters are then renamed.
        metadata: Additional metadata. Only strings and integers are used.
    """
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
    """Convert dicts to lists of items, so that a comparison also checks the order of the items.

    The value contains the shapes of the parameters, in the order in which a flat buffer stores the
    parameters. Two dicts with a different order therefore describe different layouts.
    """
    if isinstance(value, dict):
        return list(value.items())
    return [to_ordered_lists(item) for item in value] if isinstance(value, list) else value


def check_equal_records(location: str, description: str, ours: Any, first: Any) -> None:
    """Check that a value in one rank's file equals the value in the first rank's file.

    Args:
        location: Path of the file, used in the error message.
        description: Name of the value, used in the error message.
        ours: Value in this rank's file.
        first: Value in the first rank's file.

    Raises:
        CheckpointError: If the values differ. The files are then from different runs or steps.
    """
    if ours != first:
        raise MixedCheckpointError(f"{location}: {description} differs from the value on the first rank")


def require_contiguous(value: Any, location: str, *, any_shape: bool = False) -> StoredTensor:
    """Check that a value is a contiguous tensor, and return it.

    Args:
        value: Unpickled value.
        location: Name of the value, used in error messages.
        any_shape: Whether the tensor may have any shape. If False, it must have one dimension.

    Raises:
        CheckpointError: If the value is not such a tensor.
    """
    if not isinstance(value, StoredTensor):
        raise DamagedCheckpointError(f"{location}: the value is not a tensor")
    if not value.is_contiguous:
        raise CheckpointError(
            f"{location}: the tensor is not contiguous; call contiguous() on the tensor, and save the "
            "checkpoint again"
        )
    if not any_shape and len(value.shape) != 1:
        raise DamagedCheckpointError(
            f"{location}: the tensor has {len(value.shape)} dimensions, but must have one"
        )
    return value


def parse_fragment_address(value: Any, location: str) -> Fragment:
    """Parse an unpickled `fragment_address`, which locates a fragment of a parameter.

    In ZeRO stages 1 and 2, the flat buffer of a parameter group is divided into slices, one per
    rank. A slice may contain only a fragment of a parameter. A `fragment_address` contains the
    start and the length of the fragment within the slice.

    Args:
        value: Unpickled `fragment_address`.
        location: Path of the file, used in error messages.

    Raises:
        CheckpointError: If the value is not a valid `fragment_address`.
    """
    state = value.state if isinstance(value, PickledInstance) else None
    if isinstance(value, PickledInstance) and len(value.args) == 2 and state is None:
        state = {"numel": value.args[0], "start": value.args[1]}
    if not isinstance(state, dict):
        raise DamagedCheckpointError(
            f"{location}: damaged: an entry of param_slice_mappings is not a fragment_address"
        )
    start, numel = state.get("start"), state.get("numel")
    if type(start) is not int or type(numel) is not int:
        raise DamagedCheckpointError(
            f"{location}: damaged: start or numel of an entry of param_slice_mappings is not an integer"
        )
    return Fragment(start, numel)


def _parse_shapes(value: Any, location: str) -> ParameterShapes:
    """Parse and check a pickled dict of shapes, keyed by parameter name."""
    shapes: ParameterShapes = {}
    for name, shape in require_mapping(
        value or {}, "an entry of param_shapes or frozen_param_shapes", location
    ).items():
        shapes[str(name)] = require_shape(shape, f"the shape of {format_untrusted_value(name)}", location)
    return shapes
