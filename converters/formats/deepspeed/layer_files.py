"""Read the per-layer files that the stages of a `PipelineModule` write.

In the file of a layer, the tensors have their names within the layer. The master weights have the
same names with the layer index as a prefix. A tied layer (`TiedLayerSpec`) is an exception: its
masters have the prefix `tied_modules.<key>`, and each stage that uses the layer has a copy. The
files of tied layers are numbered like any others, so this module matches them to the masters by
comparing values.

`layer_<moe layer>_expert_<expert>_mp_rank_00_model_states.pt` contains the weights of one expert of
`deepspeed.moe.layer.MoE`. In the names of these weights, the expert index counts the experts of the
complete model. In the flat groups of their masters, each rank numbers its experts from 0. Each of
these groups is partitioned over the ranks that have the same experts.

Source: `_build` and `save_state_dict` in deepspeed/runtime/pipe/module.py, topology.py;
`_save_moe_checkpoint` in deepspeed/runtime/engine.py, deepspeed/utils/groups.py.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from portable.converters.checkpoint import OptimizerState
from portable.converters.errors import DamagedCheckpointError, MixedCheckpointError
from portable.converters.formats.deepspeed.checks import check_equal_copies, has_equal_rounded_sample
from portable.converters.formats.deepspeed.expert_files import iter_layer_tensors
from portable.converters.formats.deepspeed.rank_files import NamedWeights
from portable.converters.formats.torch_save.optimizer import to_lazy_tensor
from portable.converters.tensors.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from portable.converters.checkpoint import Scalar
    from portable.converters.containers.torchzip import StoredTensor
    from portable.converters.formats.deepspeed.rank_files import ModelFile
    from portable.converters.formats.deepspeed.zero_run import SavedRun
    from portable.converters.storage.folder import CheckpointFolder

_LAYER_FILE = re.compile(r"layer_(\d{2,9})-(?:model_00-)?model_states\.pt")
_UNTIED_CAUSE = "the weight is not in tied_weight_attr of its layer, or the files are from two runs or steps"
_TIED = re.compile(r"tied_modules\.[^.]+\.(.+)")


class LayerFiles:
    """Tensors in the files of all layers, keyed by `<layer>.<name>`.

    Args:
        folder: Checkpoint folder.
        files: Names of the files.

    Raises:
        CheckpointError: If a file is damaged, was renamed, or belongs to a tensor-parallel rank.
    """

    def __init__(self, folder: CheckpointFolder, files: Sequence[str]) -> None:
        self.location = str(folder.path)
        self.tensors: dict[str, StoredTensor] = {}
        name_error = "pipeline parallel checkpoints with tensor parallel ranks are not supported"
        for location, number, key, value in iter_layer_tensors(folder, files, _LAYER_FILE, name_error):
            if self.tensors.setdefault(f"{number}.{key}", value) is not value:
                raise DamagedCheckpointError(f"{location}: the layer is also in another file")

    def build_stage_module(self, model: ModelFile) -> dict[str, Any]:
        """Build the state dict of one pipeline stage from the files of its layers.

        Args:
            model: Model states of the stage, which list its parameters and buffers.

        Returns:
            The tensors, keyed by their names in the stage. Tensors without a file are omitted.

        Raises:
            CheckpointError: If the copies of a tied buffer differ.
        """
        parameters = [name for group in model.group_shapes or () for name in group]
        module = {name: self.tensors[name] for name in (*parameters, *model.buffers) if name in self.tensors}
        for name in model.buffers:
            copies = [] if name in module else self._list_tied_copies(name)
            if copies:
                check_equal_copies(
                    [to_lazy_tensor(self.tensors[copy], copy) for copy in copies],
                    f"{self.location}: {name!r}",
                )
                module[name] = self.tensors[copies[0]]
        return module

    def _list_tied_copies(self, name: str, candidates: Iterable[str] | None = None) -> list[str]:
        """List the layer tensors that may be copies of a tied module's parameter or buffer.

        Args:
            name: Name of the parameter or buffer. The list is empty if its module is not tied.
            candidates: Names of tensors to search. If None, all layers are searched.
        """
        match = _TIED.fullmatch(name)
        if match is None:
            return []
        return [
            key
            for key in (self.tensors if candidates is None else candidates)
            if key.partition(".")[2] == match[1]
        ]

    def merge_stage_weights(self, runs: Sequence[SavedRun]) -> NamedWeights:
        """Merge the weights of all stages into the complete model.

        Copies of tied parameters must agree. Layer tensors that no stage trains are frozen parameters.

        Raises:
            CheckpointError: If two stages have different copies of a parameter, or if a layer file has a
                different value.
        """
        tensors: dict[str, Tensor] = {}
        aliases: dict[str, str] = {}
        for stage in (run.build_weights() for run in runs):
            for name, tensor in stage.tensors.items():
                first = tensors.setdefault(name, tensor)
                if first is not tensor:
                    if _TIED.fullmatch(name) is None:
                        raise DamagedCheckpointError(f"{self.location}: {name!r} is in two pipeline stages")
                    check_equal_copies([first, tensor], f"{self.location}: {name!r}", _UNTIED_CAUSE)
            aliases |= stage.aliases
        buffers = {name for run in runs for name in run.first_model_file.buffers}
        unassigned = {
            name: to_lazy_tensor(value, name) for name, value in self.tensors.items() if name not in tensors
        }
        for name, tensor in tensors.items():
            copies = [
                key
                for key in self._list_tied_copies(name, unassigned)
                if unassigned[key].shape == tensor.shape
            ]
            fitting = [
                key for key in copies if name in buffers or has_equal_rounded_sample(tensor, unassigned[key])
            ]
            if copies and not fitting:
                raise MixedCheckpointError(f"{self.location}: {name!r} differs from the files of the layers")
            for key in fitting:
                del unassigned[key]
        return NamedWeights({**tensors, **unassigned}, aliases)


def merge_stage_optimizers(runs: Sequence[SavedRun]) -> OptimizerState | None:
    """Merge the optimizers of all stages. Groups with the same index and settings become one group.

    Returns:
        The optimizer state, or None if it is missing in a stage.

    Raises:
        CheckpointError: If two stages have different states of a tied parameter.
    """
    stages = [run.build_optimizer() for run in runs]
    state: dict[str, Mapping[str, Tensor | Scalar]] = {}
    groups: list[dict[str, Any]] = []
    for run, optimizer in zip(runs, stages, strict=True):
        if optimizer is None:
            return None
        for name, values in optimizer.state.items():
            previous = state.setdefault(name, values)
            for state_name, value in values.items() if previous is not values else ():
                copy = previous.get(state_name)
                if isinstance(value, Tensor) and isinstance(copy, Tensor):
                    check_equal_copies([copy, value], f"{run.location}: {state_name} of {name!r}")
        for number, group in enumerate(optimizer.param_groups):
            settings = {key: value for key, value in group.items() if key != "params"}
            if number < len(groups) and settings.items() <= groups[number].items():
                groups[number]["params"] = list(dict.fromkeys([*groups[number]["params"], *group["params"]]))
            else:
                groups.append(dict(group))
    return OptimizerState(state, groups)
