"""Read DeepSpeed checkpoints of ZeRO stages 1 to 3, BF16_Optimizer, and runs without ZeRO.

The file `latest` contains the name of a folder. The folder has one file of optimizer states per
rank. It also has a file of model states, or in stage 3 one such file per rank. Values that are
stored in several files must be equal. The recorded layout is compared with the layout that follows
from the parameter shapes. Each tensor-parallel rank or pipeline stage is read as a separate run
(`zero_run.py`), and the runs are merged afterward.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from portable.converters.containers.pickle_reader import format_untrusted_value
from portable.converters.errors import (
    CheckpointError,
    DamagedCheckpointError,
    MixedCheckpointError,
    UnsupportedCheckpointError,
)
from portable.converters.formats import CheckpointPath, Format
from portable.converters.formats.deepspeed.expert_files import ExpertFiles
from portable.converters.formats.deepspeed.layer_files import LayerFiles, merge_stage_optimizers
from portable.converters.formats.deepspeed.rank_files import (
    build_deepspeed_checkpoint,
    find_rank_files,
    find_tag_folder,
    read_model_file,
    read_tag_file,
)
from portable.converters.formats.deepspeed.tensor_parallel import (
    INFO,
    AutoTpLayout,
    merge_rank_optimizers,
    merge_rank_weights,
)
from portable.converters.formats.deepspeed.unsharded import open_unsharded_checkpoint
from portable.converters.formats.deepspeed.zero_run import SavedRun, check_ranks_of_one_run
from portable.converters.storage.folder import CheckpointFolder
from portable.converters.storage.folder_operations import list_subfolder_names
from portable.converters.storage.safe_open import get_child_inside

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from portable.converters.checkpoint import Checkpoint, OptimizerState
    from portable.converters.formats.deepspeed.rank_files import ModelFile, NamedWeights, RankFileNames
    from portable.converters.storage.path_or_url import AnyPath

LATEST = "latest"
_ACCELERATE_MODEL = "pytorch_model"


def _find_rank_file_folder(source: CheckpointPath) -> AnyPath | None:
    """Find the folder that contains the rank files of a checkpoint.

    Rank files are the `*_model_states.pt` and `*_optim_states.pt` files that the ranks wrote. If
    the path is a rank file, the result is its folder. If a tag is requested, the result is the
    subfolder with the name `<tag>` or `global_step<tag>`. Otherwise, the result is the path itself
    if it contains rank files, or else the step folder in it that the file `latest` names. Without a
    readable `latest`, there must be exactly one step folder.

    Returns:
        The folder, or None if there is no such folder with rank files.

    Raises:
        CheckpointError: If the file `latest` refers to a folder without rank files, although other
            step folders contain some.
    """
    path = source.path
    if path.is_file():
        return path.parent if path.name.endswith(("_model_states.pt", "_optim_states.pt")) else None
    if source.tag is not None:
        tagged_folder = find_tag_folder(path, source.tag, _has_rank_files)
        return tagged_folder or find_tag_folder(path, f"global_step{source.tag}", _has_rank_files)
    if _has_rank_files(path):
        return path
    tag, tags = read_tag_file(path / LATEST), _list_tag_folders(path)
    if tag is None:
        return get_child_inside(path, tags[0]) if len(tags) == 1 else None
    folder = find_tag_folder(path, tag, _has_rank_files)
    if folder is None and tags:
        # Do not choose another tag, because it is another step.
        raise CheckpointError(
            f"{path / LATEST}: refers to {format_untrusted_value(tag)}, which contains no DeepSpeed "
            "files; choose a step with --tag: " + ", ".join(map(format_untrusted_value, tags[:8]))
        )
    return folder


def _list_tag_folders(path: AnyPath) -> list[str]:
    """List the folders in `path` that contain rank files."""
    return [name for name in list_subfolder_names(path) if _has_rank_files(path / name)]


def _has_rank_files(path: AnyPath) -> bool:
    """Return whether a folder contains the per-rank files of a DeepSpeed run.

    The result is False for a universal checkpoint. It also contains `*_model_states.pt` files, but
    its optimizer state is in the folder `zero` and not in per-rank files.
    """
    names = find_rank_files(path)
    return names is not None and bool(names.optim or not (path / "zero").is_dir())


def _explain_incomplete(source: CheckpointPath) -> str | None:
    """Explain that the folder named in the file `latest` contains no DeepSpeed files.

    The folder is not checked. Call this function only if the checkpoint could not be opened.

    Returns:
        The reason as one line. None if the file `latest` does not exist.
    """
    tag = read_tag_file(source.path / LATEST)
    if tag is not None:
        return (
            f"{source.path / LATEST}: refers to {format_untrusted_value(tag)}, which contains no "
            "DeepSpeed files; copy the checkpoint again"
        )
    return None


def _check_one_accelerate_model(path: AnyPath, tag_folder: AnyPath) -> None:
    """Check that Accelerate did not save several models.

    Accelerate saves each model to a separate folder, but `latest` contains only the name of the last
    folder. If `path` is the folder of one model, nothing is checked.

    Raises:
        CheckpointError: If `path` contains several models.
    """
    if path == tag_folder or not tag_folder.name.startswith(_ACCELERATE_MODEL):
        return
    if sum(name.startswith(_ACCELERATE_MODEL) for name in _list_tag_folders(path)) > 1:
        raise CheckpointError(
            f"{path}: contains several models; specify one of the {_ACCELERATE_MODEL}* folders"
        )


def _open_deepspeed_checkpoint(source: CheckpointPath, path: AnyPath) -> Checkpoint:
    """Open the DeepSpeed checkpoint whose rank files are in the folder `path`.

    If there are no optimizer files, only a run without ZeRO and without any parallelism other than
    data parallelism is supported. Its file of model states also contains the optimizer.

    Args:
        source: Requested path, with options. It may be a parent of `path`, or a rank file.
        path: Folder that contains the rank files.

    Raises:
        CheckpointError: If files are missing or damaged, or if the parallelism is not supported.
    """
    names = find_rank_files(path)
    assert names is not None
    _check_one_accelerate_model(source.path, path)
    if not names.model.get(0):
        raise DamagedCheckpointError(f"{path}: contains optimizer states, but no model states")
    folder = CheckpointFolder(path)
    own_rank = _find_own_rank(source, names)
    model = _read_own_model(folder, names.model[0], own_rank or 0)
    num_runs = _read_parallel_degree(path, names, model)
    if not names.optim:
        if names.has_model_per_rank or num_runs > 1 or model.is_pipeline or names.experts:
            if model.group_shapes is None:
                raise UnsupportedCheckpointError(
                    f"{path}: tensor-parallel, pipeline-parallel and expert-parallel checkpoints are only "
                    "supported with ZeRO"
                )
            raise DamagedCheckpointError(f"{path}: the optimizer states of all ranks are missing")
        return open_unsharded_checkpoint(folder, model, source.path)
    models = [
        model,
        *(read_model_file(folder, next(iter(names.model[rank].values()))) for rank in range(1, num_runs)),
    ]
    layers = LayerFiles(folder, names.layers) if model.is_pipeline else None
    if layers is not None:
        models = [replace(stage, module=layers.build_stage_module(stage)) for stage in models]
    runs = [
        SavedRun(
            folder,
            names.optim[rank],
            names.model[rank],
            # Use the ties of the first model, because only the first process records them.
            replace(rank_models, tied_names=model.tied_names),
            per_rank_model=names.has_model_per_rank,
            expert_files=ExpertFiles(folder, names.experts) if names.experts else None,
            rank=own_rank,
        )
        for rank, rank_models in enumerate(models)
    ]
    check_ranks_of_one_run(runs)
    if layers is not None:
        weights = layers.merge_stage_weights(runs)
        return _build_run_checkpoint(source.path, runs, weights, lambda: merge_stage_optimizers(runs))
    if num_runs > 1:
        layout = AutoTpLayout(model.content.get(INFO), num_runs, str(path))
        weights = merge_rank_weights(runs, layout)
        return _build_run_checkpoint(source.path, runs, weights, lambda: merge_rank_optimizers(runs, layout))
    return _build_run_checkpoint(source.path, runs, runs[0].build_weights(), runs[0].build_optimizer)


def _find_own_rank(source: CheckpointPath, names: RankFileNames) -> int | None:
    """Return this process's rank if its own files contain everything that it has to read.

    This is the case if the world size is unchanged, and the run used only data parallelism.

    Returns:
        The data-parallel rank. None if the files of all ranks must be read.
    """
    if source.rank is None or len(names.optim) != 1 or names.experts or names.layers:
        return None
    rank, world_size = source.rank
    is_same_world = list(names.optim.get(0, ())) == list(range(world_size))
    return rank if is_same_world and world_size > 1 else None


def _read_own_model(folder: CheckpointFolder, names: Mapping[int, str], rank: int) -> ModelFile:
    """Read the model states of a rank. If the rank has no file, read the first file.

    Only the first file records the names of tied parameters. If the rank's file contains a tensor
    that is neither a buffer nor a parameter with a recorded shape, this tensor may be tied. The
    names of tied parameters are then copied from the first file.

    Args:
        folder: Checkpoint folder.
        names: Names of the model-state files, keyed by data-parallel rank.
        rank: Data-parallel rank of this process.
    """
    first = next(iter(names.values()))
    model = read_model_file(folder, names.get(rank, first))
    described = {
        *model.buffers,
        *(model.frozen_shapes or ()),
        *(name for group in model.group_shapes or () for name in group),
    }
    if names.get(rank, first) == first or model.module.keys() <= described:
        return model
    return replace(model, tied_names=read_model_file(folder, first).tied_names)


def _read_parallel_degree(path: AnyPath, names: RankFileNames, model: ModelFile) -> int:
    """Return the number of model-parallel parts of a run.

    In a pipeline-parallel run, this is the number of pipeline stages. In any other run, it is the
    number of tensor-parallel ranks, which is 1 without tensor parallelism.

    Args:
        path: Checkpoint folder.
        names: Names of the rank files. There must be a file for each stage or tensor-parallel rank.
        model: File of model states that records the degrees of parallelism.

    Raises:
        CheckpointError: If the files of a rank or stage are missing, if files belong to a different
            run, or if more than one of tensor, pipeline and expert parallelism was used.
    """
    tensor_ranks, stages = model.parallel_degrees
    if names.experts and not model.content.get("num_experts"):
        raise MixedCheckpointError(
            f"{path / names.experts[0]}: contains the weights of an expert, but {model.location} records no "
            "experts"
        )
    if names.layers and not model.is_pipeline:
        raise MixedCheckpointError(
            f"{path / names.layers[0]}: belongs to a run with pipeline parallelism, but {model.location} "
            "does not"
        )
    if bool(names.experts) + (tensor_ranks > 1) + model.is_pipeline > 1:
        raise UnsupportedCheckpointError(
            f"{path}: checkpoints with more than one of tensor, pipeline and expert parallelism are not "
            "supported"
        )
    kind, degree = ("pipeline", stages) if model.is_pipeline else ("tensor", tensor_ranks)
    for files in (names.model, names.optim) if names.optim else (names.model,):
        missing = next((rank for rank in range(degree) if rank not in files), None)
        if missing is not None:
            raise DamagedCheckpointError(
                f"{path}: the files of {kind}-parallel rank {missing} are missing, although the degree of "
                f"{kind} parallelism is {degree}"
            )
        for rank, rank_files in files.items():
            if rank >= degree:
                name = next(iter(rank_files.values()))
                raise CheckpointError(
                    f"{path / name}: belongs to {kind}-parallel rank {rank}, but the degree of "
                    f"{kind} parallelism is {degree}; remove the files of other runs"
                )
    return degree


def _build_run_checkpoint(
    root: AnyPath,
    runs: Sequence[SavedRun],
    weights: NamedWeights,
    optimizer: Callable[[], OptimizerState | None],
) -> Checkpoint:
    """Build a checkpoint from the merged weights of all pipeline stages or tensor-parallel ranks.

    Args:
        root: Path that was opened.
        runs: Files of each pipeline stage or tensor-parallel rank. A single element if there was
            only data parallelism.
        weights: Merged weights of the complete model.
        optimizer: Function that builds the optimizer state when it is needed. It returns None if
            the files do not contain any.
    """
    run = runs[0]
    metadata = {
        "world_size": run.world_size * len(runs),
        "ds_version": run.optim_files[0].version,
        "zero_stage": run.stage,
    }
    return build_deepspeed_checkpoint(
        "deepspeed", root, run.folder.path, run.first_model_file, weights, optimizer, metadata
    )


FORMAT = Format(
    "deepspeed",
    _find_rank_file_folder,
    _open_deepspeed_checkpoint,
    _explain_incomplete,
    selects_tag=True,
)
