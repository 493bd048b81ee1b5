"""Read Megatron-Core's `torch_dist` format: DCP shards with Megatron's keys, and `common.pt`.

A key such as `decoder.layers.mlp.linear_fc2.weight` refers to the same module in all
layers, which are stacked along the first dimension of the tensor. Tensor and pipeline
parallelism do not affect the keys, and affect the shapes only through the padding of the
vocabulary. `common.pt` contains all other values. The result has transformers' names
(`names.py`). The optimizer state is not converted.

This module also detects the format with one file per rank, which `reader.py` reads.

Source: Megatron-LM's megatron/core/dist_checkpointing/strategies/torch.py,
`apply_swiglu_sharded_factory` in megatron/core/transformer/mlp.py, `sharded_state_dict` in
transformer_block.py.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from portable.converters.checkpoint import Checkpoint
from portable.converters.config_and_tokenizer_files import find_companions
from portable.converters.containers.torchzip import TorchZip
from portable.converters.errors import DamagedCheckpointError, OptimizerStateError, prefix_checkpoint_errors
from portable.converters.formats import CheckpointPath, Format
from portable.converters.formats.dcp.checksums import list_metadata_files
from portable.converters.formats.dcp.reader import MEGATRON_COMMON_FILE, is_megatron_folder, open_tensors
from portable.converters.formats.megatron import FILE, RANK, list_rank_folders
from portable.converters.storage.folder import CheckpointFolder
from portable.converters.storage.path_or_url import make_absolute

if TYPE_CHECKING:
    from portable.converters.checkpoint import Aliases, OptimizerState
    from portable.converters.storage.path_or_url import AnyPath
    from portable.converters.tensors.tensor import Tensor

_LAYERS = re.compile(r"decoder\.layers\.(?!\d)(.+)")
_OTHER = re.compile(r"optimizer\..*|rng_state.*|rerun_state.*|.*\._extra_state.*")


def _find_torch_dist_folder(path: AnyPath) -> AnyPath | None:
    """Find the folder of a `torch_dist` checkpoint.

    The folder must contain DCP metadata. It must also contain `common.pt`, or a `metadata.json`
    that names the format.

    Args:
        path: The folder, or the file `common.pt` in it.

    Returns:
        The folder. None if the path has a different format.
    """
    folder = path.parent if path.is_file() and path.name == MEGATRON_COMMON_FILE else path
    return folder if list_metadata_files(folder) and is_megatron_folder(folder) else None


def _open_torch_dist_checkpoint(source: CheckpointPath, path: AnyPath) -> Checkpoint:
    """Open a `torch_dist` checkpoint and expose its tensors under their transformers names.

    If the checkpoint contains optimizer state, accessing it in the result raises an error.

    Raises:
        CheckpointError: If the checkpoint is damaged or its model is not supported.
    """
    from portable.converters.formats.megatron.names import (
        convert_to_transformers,
        get_megatron_args,
        read_model_shape,
        to_local_module_key,
    )
    from portable.converters.formats.megatron.reader import PREFIXES, STANDINS
    from portable.converters.tensors.tensor_ops import select_index

    location = str(path)
    common_state = TorchZip(CheckpointFolder(path).get_file(MEGATRON_COMMON_FILE)).load_object(
        STANDINS, PREFIXES
    )
    if not isinstance(common_state, dict):
        raise DamagedCheckpointError(
            f"{path / MEGATRON_COMMON_FILE}: is not the common state of a Megatron-Core checkpoint, because "
            "the file does not contain a dict"
        )
    companions = find_companions(path)
    shape = read_model_shape(
        get_megatron_args(common_state), source.config_file or companions.get("config.json"), location
    )
    stored = open_tensors(path, source.build_once)
    merged: dict[str, Tensor] = {}
    with prefix_checkpoint_errors(path):
        for key, tensor in stored.items():
            name = to_local_module_key(key.removeprefix("model.").removeprefix("module."))
            match = _LAYERS.fullmatch(name)
            if _OTHER.fullmatch(key) or _OTHER.fullmatch(name):
                continue
            if match is None:
                merged[name] = tensor
                continue
            if not tensor.shape or tensor.shape[0] != shape.num_layers:
                raise DamagedCheckpointError(
                    f"{location}: {key} has shape {list(tensor.shape)}, but the first dimension must be "
                    f"num_layers, which is {shape.num_layers} in the checkpoint's args"
                )
            for layer in range(shape.num_layers):
                merged[f"decoder.layers.{layer}.{match[1]}"] = select_index(tensor, 0, layer)
        tensors = convert_to_transformers(merged, shape, location)
    has_optimizer = any(key.startswith("optimizer.") for key in stored)

    def refuse_optimizer(aliases: Aliases) -> OptimizerState | None:
        raise OptimizerStateError(f"{location}: the optimizer state of Megatron-Core cannot be converted")

    step = common_state.get("iteration")
    return Checkpoint(
        format="megatron-core",
        root=source.path,
        tensors=tensors,
        optimizer=refuse_optimizer if has_optimizer else None,
        metadata={"step": step} if type(step) is int else {},
        companions=companions,
    )


FORMAT = Format(
    "megatron-core",
    lambda source: _find_torch_dist_folder(source.path),
    _open_torch_dist_checkpoint,
)


# -- the second format: one file per rank --------------------------------------------------------------------


def _find_ranks_folder(path: AnyPath) -> AnyPath | None:
    """Find the folder that contains one folder per rank, such as `mp_rank_00`.

    Args:
        path: The folder itself, the folder of one rank, or the file in the folder of one rank.

    Returns:
        The folder. None if `path` is none of these.
    """
    if path.is_file():
        return path.parent.parent if path.name == FILE and RANK.fullmatch(path.parent.name) else None
    if RANK.fullmatch(path.name) and (path / FILE).is_file():
        return make_absolute(path).parent
    return path if list_rank_folders(path) else None


def _open_rank_folders(source: CheckpointPath, path: AnyPath) -> Checkpoint:
    """Open the files of all ranks as one checkpoint."""
    from portable.converters.formats.megatron.reader import MegatronRankFiles

    return MegatronRankFiles(CheckpointFolder(path)).build_checkpoint(source)


RANKS = Format(
    "megatron",
    lambda source: _find_ranks_folder(source.path),
    _open_rank_folders,
)
