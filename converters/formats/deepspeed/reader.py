"""DeepSpeed: ZeRO stages 1 to 3, BF16_Optimizer, and runs without ZeRO.

`latest` names a folder with one file of optimizer states per rank and one file of model states (stage 3: one
per rank). Redundant records are compared, and the layout computed from the parameters' shapes must match all
records of it. With tensor parallel ranks or pipeline stages, each of them is a run of its own (`run.py`), and
they are put together as the files say.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from portable.converters.containers.pickle_reader import format_value
from portable.converters.errors import CheckpointError
from portable.converters.formats import CheckpointPath, Format
from portable.converters.formats.deepspeed.expert_files import Experts
from portable.converters.formats.deepspeed.layer_files import LayerFiles, merge_stage_optimizers
from portable.converters.formats.deepspeed.rank_files import (
    build_checkpoint,
    find_names,
    find_tag_folder,
    read_model,
    read_tag,
)
from portable.converters.formats.deepspeed.tensor_parallel import (
    INFO,
    AutoTpLayout,
    merge_optimizer,
    merge_weights,
)
from portable.converters.formats.deepspeed.unsharded import open_unsharded
from portable.converters.formats.deepspeed.zero_run import SavedRun, check_same_run
from portable.converters.storage.folder import Folder
from portable.converters.storage.folder_operations import folders_inside
from portable.converters.storage.safe_open import child

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from portable.converters.checkpoint import Checkpoint, OptimizerState
    from portable.converters.formats.deepspeed.rank_files import ModelFile, Names, Weights
    from portable.converters.storage.path_or_url import Place

LATEST = "latest"
_ACCELERATE_MODEL = "pytorch_model"


def _find_shard_folder(source: CheckpointPath) -> Place | None:
    """The folder of rank files to open for `source`."""
    path = source.path
    if path.is_file():
        return path.parent if path.name.endswith(("_model_states.pt", "_optim_states.pt")) else None
    if source.tag is not None:
        tagged_folder = find_tag_folder(path, source.tag, _has_rank_files)
        return tagged_folder or find_tag_folder(path, f"global_step{source.tag}", _has_rank_files)
    if _has_rank_files(path):
        return path
    tag, tags = read_tag(path / LATEST), _list_tags(path)
    if tag is None:
        return child(path, tags[0]) if len(tags) == 1 else None
    folder = find_tag_folder(path, tag, _has_rank_files)
    if folder is None and tags:
        # Another tag is another step; do not guess.
        raise CheckpointError(
            f"{path / LATEST}: names {format_value(tag)}, which holds no DeepSpeed files; choose with --tag: "
            + ", ".join(map(format_value, tags[:8]))
        )
    return folder


def _list_tags(path: Place) -> list[str]:
    """The folders with rank files in `path`."""
    return [name for name in folders_inside(path) if _has_rank_files(path / name)]


def _has_rank_files(path: Place) -> bool:
    """Whether `path` has rank files. A universal checkpoint has model files too, beside its `zero/`."""
    names = find_names(path)
    return names is not None and bool(names.optim or not (path / "zero").is_dir())


def _explain_incomplete(source: CheckpointPath) -> str | None:
    tag = read_tag(source.path / LATEST)
    if tag is not None:
        return f"{source.path / LATEST}: names {format_value(tag)}, which holds no DeepSpeed files"
    return None


_NO_ZERO = "tensor, pipeline and expert parallel checkpoints of runs without ZeRO are not supported"
_NO_STATES = "the optimizer states of all ranks are missing"


def _refuse_several_models(path: Place, folders: Place) -> None:
    """Accelerate saves several models into folders side by side; `latest` names only the last."""
    if path == folders or not folders.name.startswith(_ACCELERATE_MODEL):
        return
    if sum(name.startswith(_ACCELERATE_MODEL) for name in _list_tags(path)) > 1:
        raise CheckpointError(f"{path}: holds several models; give one of its {_ACCELERATE_MODEL}* folders")


def _open(source: CheckpointPath, path: Place) -> Checkpoint:
    names = find_names(path)
    assert names is not None
    _refuse_several_models(source.path, path)
    if not names.model.get(0):
        raise CheckpointError(f"{path}: the model states are missing, only optimizer states were found")
    folder = Folder(path)
    own_rank = _find_own_rank(source, names)
    model = _read_own_model(folder, names.model[0], own_rank or 0)
    degree = _read_degree(path, names, model)
    if not names.optim:
        if names.per_rank_model or degree > 1 or model.pipeline or names.experts:
            raise CheckpointError(f"{path}: {_NO_ZERO if model.groups is None else _NO_STATES}")
        return open_unsharded(folder, model, source.path)
    models = [
        model,
        *(read_model(folder, next(iter(names.model[rank].values()))) for rank in range(1, degree)),
    ]
    layers = LayerFiles(folder, names.layers) if model.pipeline else None
    if layers is not None:
        models = [replace(stage, module=layers.build_module(stage)) for stage in models]
    runs = [
        SavedRun(
            folder,
            names.optim[rank],
            names.model[rank],
            # The first process alone records the ties.
            replace(rank_models, shared=model.shared),
            per_rank_model=names.per_rank_model,
            experts=Experts(folder, names.experts) if names.experts else None,
            rank=own_rank,
        )
        for rank, rank_models in enumerate(models)
    ]
    check_same_run(runs)
    if layers is not None:
        weights = layers.merge_stages(runs)
        return _build_checkpoint(source.path, runs, weights, lambda: merge_stage_optimizers(runs))
    if degree > 1:
        layout = AutoTpLayout(model.content.get(INFO), degree, str(path))
        weights = merge_weights(runs, layout)
        return _build_checkpoint(source.path, runs, weights, lambda: merge_optimizer(runs, layout))
    return _build_checkpoint(source.path, runs, runs[0].build_weights(), runs[0].build_optimizer)


def _find_own_rank(source: CheckpointPath, names: Names) -> int | None:
    """Return the reader's rank if it needs only its own files: the world is the one that wrote them."""
    if source.rank is None or len(names.optim) != 1 or names.experts or names.layers:
        return None
    rank, world_size = source.rank
    is_same_world = list(names.optim.get(0, ())) == list(range(world_size))
    return rank if is_same_world and world_size > 1 else None


def _read_own_model(folder: Folder, names: Mapping[int, str], rank: int) -> ModelFile:
    """Read a rank's model states, or the first ones if the rank has none.

    Only the first file records tied parameters. A file that names no parameters without values has no ties.
    """
    first = next(iter(names.values()))
    model = read_model(folder, names.get(rank, first))
    described = {
        *model.buffers,
        *(model.frozen or ()),
        *(name for group in model.groups or () for name in group),
    }
    if names.get(rank, first) == first or model.module.keys() <= described:
        return model
    return replace(model, shared=read_model(folder, first).shared)


def _read_degree(path: Place, names: Names, model: ModelFile) -> int:
    """The number of tensor parallel ranks, or of pipeline stages; every one must have its files."""
    tensor_ranks, stages = model.degrees
    if names.experts and not model.content.get("num_experts"):
        raise CheckpointError(f"{path / names.experts[0]}: expert parallel, unlike {model.where}")
    if names.layers and not model.pipeline:
        raise CheckpointError(f"{path / names.layers[0]}: pipeline parallel, unlike {model.where}")
    if bool(names.experts) + (tensor_ranks > 1) + model.pipeline > 1:
        raise CheckpointError(
            f"{path}: checkpoints with two of tensor, pipeline and expert parallel ranks are not supported"
        )
    kind, degree = ("pipeline", stages) if model.pipeline else ("tensor", tensor_ranks)
    for files in (names.model, names.optim) if names.optim else (names.model,):
        missing = next((rank for rank in range(degree) if rank not in files), None)
        if missing is not None:
            raise CheckpointError(
                f"{path}: the files of {kind} parallel rank {missing} are missing, of {degree} ranks"
            )
        for rank, rank_files in files.items():
            if rank >= degree:
                name = next(iter(rank_files.values()))
                raise CheckpointError(f"{path / name}: of {kind} parallel rank {rank}, the run had {degree}")
    return degree


def _build_checkpoint(
    root: Place, runs: Sequence[SavedRun], weights: Weights, optimizer: Callable[[], OptimizerState | None]
) -> Checkpoint:
    run = runs[0]
    about = {
        "world_size": run.world * len(runs),
        "ds_version": run.optim[0].version,
        "zero_stage": run.stage,
    }
    return build_checkpoint("deepspeed", root, run.folder.path, run.model, weights, optimizer, about)


FORMAT = Format(
    "deepspeed",
    _find_shard_folder,
    _open,
    _explain_incomplete,
    tags=True,
)
