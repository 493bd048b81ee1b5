"""Files of single layers: the stages of `PipelineModule`, and the experts of `deepspeed.moe.layer.MoE`.

A pipeline's layer has a file with the names within the layer; the masters have the layer's number before
them. A tied layer (`TiedLayerSpec`) is called `tied_modules.<key>` instead, and each stage that uses it has a
copy. Its files have the numbers of the layers, so they are found by their values.

`layer_<moe layer>_expert_<expert>_mp_rank_00_model_states.pt` holds one expert's weights, with the expert's
number in the whole model in their names. The ranks number their own experts from 0 instead. So do the flat
groups of their masters, each of which is partitioned over the ranks that have the same experts.

Source: deepspeed/runtime/pipe/module.py (`_build`, `save_state_dict`), topology.py;
deepspeed/runtime/engine.py (`_save_moe_checkpoint`), deepspeed/utils/groups.py.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from portable.converters.checkpoint import OptimizerState
from portable.converters.errors import CheckpointError
from portable.converters.formats.deepspeed.checks import check_copies, rounds_to_copy
from portable.converters.formats.deepspeed.expert_files import iter_layer_tensors
from portable.converters.formats.deepspeed.rank_files import Weights
from portable.converters.formats.torch_save.optimizer import as_tensor
from portable.converters.tensors.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from portable.converters.checkpoint import Scalar
    from portable.converters.containers.torchzip import StoredTensor
    from portable.converters.formats.deepspeed.rank_files import ModelFile
    from portable.converters.formats.deepspeed.zero_run import SavedRun
    from portable.converters.storage.folder import Folder

_LAYER_FILE = re.compile(r"layer_(\d{2,9})-(?:model_00-)?model_states\.pt")
_UNTIED = "it is not among the tied_weight_attr of its layer, or the files are of two runs or steps"
_TIED = re.compile(r"tied_modules\.[^.]+\.(.+)")


class LayerFiles:
    """The tensors of all layer files, as `<layer>.<name>`.

    Raises:
        CheckpointError: a file is damaged, renamed or of a tensor parallel rank.
    """

    def __init__(self, folder: Folder, files: Sequence[str]) -> None:
        self.where = str(folder.path)
        self.stored: dict[str, StoredTensor] = {}
        other = "pipeline parallel checkpoints with tensor parallel ranks are not supported"
        for location, number, key, value in iter_layer_tensors(folder, files, _LAYER_FILE, other):
            if self.stored.setdefault(f"{number}.{key}", value) is not value:
                raise CheckpointError(f"{location}: its layer is in another file too")

    def build_module(self, model: ModelFile) -> dict[str, Any]:
        """What the layers' files hold of the parameters and buffers of one stage, by its names."""
        parameters = [name for group in model.groups or () for name in group]
        module = {name: self.stored[name] for name in (*parameters, *model.buffers) if name in self.stored}
        for name in model.buffers:
            copies = [] if name in module else self._find_copies(name)
            if copies:
                check_copies(
                    [as_tensor(self.stored[copy], copy) for copy in copies], f"{self.where}: {name!r}"
                )
                module[name] = self.stored[copies[0]]
        return module

    def _find_copies(self, name: str, among: Iterable[str] | None = None) -> list[str]:
        """The tensors of layers that may be the parameter or buffer `name` of a tied module."""
        match = _TIED.fullmatch(name)
        if match is None:
            return []
        return [key for key in (self.stored if among is None else among) if key.partition(".")[2] == match[1]]

    def merge_stages(self, runs: Sequence[SavedRun]) -> Weights:
        """The whole model; tied parameters are compared, and frozen ones are those that no stage trains.

        Raises:
            CheckpointError: stages have different copies of a parameter, or a layer has another value.
        """
        tensors: dict[str, Tensor] = {}
        aliases: dict[str, str] = {}
        for stage in (run.build_weights() for run in runs):
            for name, tensor in stage.tensors.items():
                first = tensors.setdefault(name, tensor)
                if first is not tensor:
                    if _TIED.fullmatch(name) is None:
                        raise CheckpointError(f"{self.where}: {name!r} is in two pipeline stages")
                    check_copies([first, tensor], f"{self.where}: {name!r}", _UNTIED)
            aliases |= stage.aliases
        buffers = {name for run in runs for name in run.model.buffers}
        free = {name: as_tensor(value, name) for name, value in self.stored.items() if name not in tensors}
        for name, tensor in tensors.items():
            copies = [key for key in self._find_copies(name, free) if free[key].shape == tensor.shape]
            fitting = [key for key in copies if name in buffers or rounds_to_copy(tensor, free[key])]
            if copies and not fitting:
                raise CheckpointError(
                    f"{self.where}: {name!r} differs from the files of its layers; files of two runs or steps"
                )
            for key in fitting:
                del free[key]
        return Weights({**tensors, **free}, aliases)


def merge_stage_optimizers(runs: Sequence[SavedRun]) -> OptimizerState | None:
    """The optimizer of all stages; groups of the same number and settings are one."""
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
                    check_copies([copy, value], f"{run.where}: {state_name} of {name!r}")
        for number, group in enumerate(optimizer.param_groups):
            settings = {key: value for key, value in group.items() if key != "params"}
            if number < len(groups) and settings.items() <= groups[number].items():
                groups[number]["params"] = list(dict.fromkeys([*groups[number]["params"], *group["params"]]))
            else:
                groups.append(dict(group))
    return OptimizerState(state, groups)
