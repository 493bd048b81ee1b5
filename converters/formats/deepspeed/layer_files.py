"""Read the per-layer files that the stages of a `PipelineModule` write.

In the file of a layer, tensor names are relative to the layer. The master weights, whose names
are recorded in the stages' model states, have the same names with the layer index as a prefix.

A tied layer (`TiedLayerSpec`) is an exception. Its master weights have the prefix
`tied_modules.<key>` instead, and each stage that uses the layer has a copy. The layer's file
name contains only the layer index and not the key. This module therefore matches the files of
tied layers to their master weights by value.

`layer_<moe layer>_expert_<expert>_mp_rank_00_model_states.pt` contains the weights of one
expert of `deepspeed.moe.layer.MoE`. The names of these weights contain the index of the expert
in the complete model. The master weights of the experts are concatenated into flat groups. In
these groups, each rank numbers its own experts from 0. If several ranks have the same experts,
the group of these experts is partitioned over these ranks.

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
    """Tensors in the files of all pipeline layers.

    Args:
        folder: Checkpoint folder.
        files: Names of the files.

    Attributes:
        tensors: Tensors, keyed by `<layer>.<name>`.

    Raises:
        CheckpointError: If a file is damaged, was renamed, or belongs to a tensor-parallel rank, or if
            two files contain the same layer.
    """

    def __init__(self, folder: CheckpointFolder, files: Sequence[str]) -> None:
        self.location = str(folder.path)
        self.tensors: dict[str, StoredTensor] = {}
        name_error = "pipeline-parallel checkpoints with tensor parallelism are not supported"
        for location, number, key, value in iter_layer_tensors(folder, files, _LAYER_FILE, name_error):
            if self.tensors.setdefault(f"{number}.{key}", value) is not value:
                raise DamagedCheckpointError(f"{location}: layer {number} is stored in two files")

    def build_stage_module(self, model: ModelFile) -> dict[str, Any]:
        """Build the state dict of one pipeline stage from the files of its layers.

        Args:
            model: Model states of the stage, which list its trained parameters and its buffers.

        Returns:
            The tensors, keyed by their names in the stage. Frozen parameters, tied parameters, and
            tensors without a file are omitted.

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
        """List the tensors in layer files that may be copies of a tied module's parameter or buffer.

        Such a copy has the same name in its layer as the parameter has in the tied module. For
        example, `3.weight` may be a copy of `tied_modules.embed.weight`.

        Args:
            name: Name of the parameter or buffer. The list is empty if its module is not tied.
            candidates: Names of the tensors to search, in the form `<layer>.<name>`. If None, the
                tensors of all layers are searched.
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
        """Merge the weights of all pipeline stages into the complete model.

        The files of a stage contain the master weights of its trained parameters. The layer files
        contain all parameters in the compute dtype. A tensor in a layer file is a frozen parameter
        if it has no master weight in any stage.

        A layer file may also contain a copy of a tied parameter. A copy has the same name in its
        layer, the same shape, and the same rounded values in a sample. Copies are omitted.

        Args:
            runs: Files of each pipeline stage, in order.

        Raises:
            CheckpointError: If two stages store a parameter that is not tied, if the copies of a
                tied parameter differ between stages, or if the master weight of a tied parameter
                differs from all of its copies in the layer files.
        """
        tensors: dict[str, Tensor] = {}
        aliases: dict[str, str] = {}
        for stage in (run.build_weights() for run in runs):
            for name, tensor in stage.tensors.items():
                first = tensors.setdefault(name, tensor)
                if first is not tensor:
                    if _TIED.fullmatch(name) is None:
                        raise DamagedCheckpointError(
                            f"{self.location}: {name!r} is stored in two pipeline stages, but is not a tied "
                            "weight"
                        )
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
                raise MixedCheckpointError(
                    f"{self.location}: the weight {name!r} differs from its copies in the layer files"
                )
            for key in fitting:
                del unassigned[key]
        return NamedWeights({**tensors, **unassigned}, aliases)


def merge_stage_optimizers(runs: Sequence[SavedRun]) -> OptimizerState | None:
    """Merge the optimizer states of all pipeline stages.

    Parameter groups with the same index and settings become one group. Other groups are added to
    the result. If several stages have the state of a tied parameter, the state of the first stage
    is used.

    Args:
        runs: Files of each stage.

    Returns:
        The merged optimizer state, or None if a stage has no optimizer state.

    Raises:
        CheckpointError: If samples of a tied parameter's state tensors differ between stages.
            Python numbers are not compared.
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
