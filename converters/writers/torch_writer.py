"""Write state dicts in the format of `torch.save`, without torch.

`pytorch_model.bin` contains the model's state dict, including aliases of tied tensors, which share
their storage. `optimizer.pt` contains `optimizer.state_dict()`. Its parameters are numbered group
by group, and `param_names` contains their names. `torch.load(weights_only=True)` can open both
files.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from portable.converters.config_and_tokenizer_files import plan_companion_files
from portable.converters.errors import OptimizerStateError
from portable.converters.tensors.entry import OutputTensor
from portable.converters.tensors.tensor import Tensor
from portable.converters.writers.conversion import (
    ContentOptions,
    convert_param_groups_to_plain,
    list_model_entries,
    list_optimizer_entries,
    require_optimizer_state,
)
from portable.converters.writers.plan import ConversionPlan, PlannedFile
from portable.converters.writers.torchzip_writer import plan_torch_file, reopen_tensors

if TYPE_CHECKING:
    from portable.converters.checkpoint import Checkpoint, OptimizerState
    from portable.converters.storage.path_or_url import AnyPath

MODEL, OPTIMIZER = "pytorch_model.bin", "optimizer.pt"


def plan_torch(checkpoint: Checkpoint, choices: ContentOptions) -> ConversionPlan:
    """Plan the output of `--to torch`: `pytorch_model.bin` and, if requested, `optimizer.pt`.

    The model is one file, regardless of `max_shard_size`. It also contains the aliases of tied
    tensors.

    Args:
        checkpoint: Checkpoint to convert.
        choices: Options for the content of the output.

    Returns:
        The plan.

    Raises:
        CheckpointError: If the checkpoint has no tensors, if the dtype is unknown, or if the
            requested optimizer state is missing or does not match its parameter groups.
    """
    entries = list_model_entries(checkpoint, choices.dtype)
    state = {entry.name: entry for entry in entries}
    state |= {alias: state[owner] for alias, owner in checkpoint.aliases.items()}
    values: dict[str, Any] = {MODEL: state}
    if choices.optimizer:
        optimizer = require_optimizer_state(checkpoint)
        values[OPTIMIZER] = _build_optimizer_state_dict(optimizer, checkpoint.root)
    files = tuple(PlannedFile(name, tuple(plan_torch_file(value))) for name, value in values.items())
    return ConversionPlan(files, *plan_companion_files(checkpoint, entries), partial(reopen_tensors, values))


def _build_optimizer_state_dict(optimizer: OptimizerState, root: AnyPath) -> dict[str, Any]:
    """Build an `optimizer.state_dict()` with `OutputTensor` objects instead of tensors.

    The parameters are numbered group by group. In each group, `param_names` contains their names.

    Raises:
        CheckpointError: If the groups list a parameter more than once, or if a parameter with state
            is not in a group.
    """
    groups = convert_param_groups_to_plain(optimizer)
    names = [name for group in groups for name in group.get("params", [])]
    numbers = {name: number for number, name in enumerate(names)}
    if len(numbers) != len(names) or not optimizer.state.keys() <= numbers.keys():
        raise OptimizerStateError(
            f"{root}: the optimizer's parameter groups must contain each parameter that has state exactly "
            "once, but do not"
        )
    state: dict[int, dict[str, Any]] = {}
    for name, state_name, entry in list_optimizer_entries(optimizer, root):
        value = optimizer.state[name][state_name]
        renamed_entry = OutputTensor(f"{OPTIMIZER}: {entry.name}", entry.dtype, entry.tensor)
        state.setdefault(numbers[name], {})[state_name] = (
            renamed_entry if isinstance(value, Tensor) else value
        )
    listed = [
        {**group, "params": [numbers[name] for name in group["params"]], "param_names": group["params"]}
        for group in groups
    ]
    return {"state": dict(sorted(state.items())), "param_groups": listed}
