"""Save and restore the optimizer state of DDP and FSDP2 engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from portable.converters import Tensor as StoredTensor
from portable.model.weight_sources import copy_into_tensor
from portable.optim.custom_optimizer import CustomOptimizer
from portable.optim.local_shards import list_shard_blocks
from portable.optim.stored_state import cast_number, check_state_entry, to_plain_group
from portable.optim.weight_average import AVERAGE_KEY

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from portable.checkpoint.match_to_model import StoredState
    from portable.converters.checkpoint import OptimizerState
    from portable.model.weight_sources import ReadableTensor


def restore_optimizer_state(
    optimizer: Any,
    trained_parameters: Mapping[str, Tensor],
    stored: StoredState,
    checkpoint_state: OptimizerState | None,
) -> None:
    """Restore the state of an optimizer from a checkpoint. Each rank reads only its shards.

    If the checkpoint has no moving average of the weights (``train.ema``), the average starts at
    the current weights.

    Args:
        optimizer: An :class:`portable.optim.optimizers.EngineOptimizer`. Its state is replaced.
        trained_parameters: Parameters of the optimizer, keyed by name. They must already be loaded
            from the checkpoint.
        stored: State of each parameter in the checkpoint, already matched to the parameters of the
            model.
        checkpoint_state: Optimizer state as it is in the checkpoint, including the parameter
            groups. Only a custom optimizer uses it. None if the checkpoint has no optimizer state.

    Raises:
        CheckpointError: If any other state is missing, or if state has the wrong shape.
    """
    custom_optimizer = optimizer if isinstance(optimizer, CustomOptimizer) else None
    if custom_optimizer is None:
        optimizer.state.clear()  # an earlier attempt may have loaded part of a damaged checkpoint
    else:
        custom_optimizer.reset_state(checkpoint_state)
    for name, values in stored.optimizer.items():
        parameter = trained_parameters[name]
        if custom_optimizer is None:
            state = optimizer.build_initial_state(parameter)
        else:
            state = custom_optimizer.allocate_state(parameter, values)
        for key, tensor in state.items():
            # If the checkpoint has no average of the weights, the average starts at the current weights.
            if key != AVERAGE_KEY or key in values:
                state[key] = _fill_state_entry(tensor, values.get(key), f"{key} of {name}")
        optimizer.state[parameter] = state


def build_optimizer_state_dict(optimizer: Any, trained_parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    """Build the state dict of an optimizer, in the format of torch's ``get_optimizer_state_dict``.

    With a custom optimizer, all ranks have to call this function if parameters are sharded.

    Args:
        optimizer: An :class:`portable.optim.optimizers.EngineOptimizer`.
        trained_parameters: Parameters of the optimizer, keyed by name.

    Returns:
        Dict with ``state``, which is keyed by parameter name, and ``param_groups``. The tensors
        are not copied, except that a custom optimizer's DTensors with pending reductions are
        replicated. The groups of a custom optimizer contain only the values that a checkpoint
        can store.

    Raises:
        UserError: If the state of a custom optimizer cannot be stored in a checkpoint, or if
            its replicated state differs between ranks.
    """
    names: dict[Tensor, str] = {parameter: name for name, parameter in trained_parameters.items()}
    groups = [{**group, "params": [names[p] for p in group["params"]]} for group in optimizer.param_groups]
    if isinstance(optimizer, CustomOptimizer):
        return {
            "state": optimizer.collect_state(),
            "param_groups": [to_plain_group(group) for group in groups],
        }
    state = {names[p]: dict(values) for p, values in optimizer.state.items()}
    return {"state": state, "param_groups": groups}


def _fill_state_entry(target: Any, value: Any, entry_name: str) -> Any:
    """Restore one entry of a parameter's optimizer state.

    Args:
        target: Current value of the entry. A tensor with dimensions is filled in place. For a number or
            a scalar tensor, only the type is used.
        value: Stored tensor or number. None if the checkpoint does not contain the entry.
        entry_name: Description of the entry, used in error messages.

    Returns:
        ``target`` if it has dimensions, otherwise the stored number, converted to the type of
        ``target``.

    Raises:
        CheckpointError: If the value is missing or has the wrong shape.
    """
    shape = getattr(target, "shape", ())
    check_state_entry(value, shape, entry_name)
    if len(shape) > 0:
        fill_local_shard(target, value)
        return target
    return cast_number(target, value.read().item() if isinstance(value, StoredTensor) else value)


def fill_local_shard(target: Tensor, source: ReadableTensor) -> None:
    """Read ``source`` into ``target``. If ``target`` is a DTensor, only its local shard is filled.

    Usually, only the values of the shard are read. If the shard consists of several blocks,
    complete rows are read.
    """
    if not isinstance(target, DTensor):
        copy_into_tensor(target, source)
        return
    shard = target.to_local()
    if not shard.numel():
        return
    blocks = list_shard_blocks(target)
    if len(blocks) == 1:
        copy_into_tensor(shard, source, blocks[0])
        return
    # Read complete rows of a LoRA factor once, because each block contains only a small part of every row.
    rows = shard.detach().new_empty(len(shard), target.shape[1])
    copy_into_tensor(rows, source, (blocks[0][0], slice(0, target.shape[1])))
    shard.detach().copy_(torch.cat([rows[:, columns] for _, columns in blocks], dim=1))
