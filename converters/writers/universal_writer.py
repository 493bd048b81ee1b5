"""Write DeepSpeed universal checkpoints, which ZeRO 1 to 3 can load at any world size.

`zero/<parameter>/` contains the fp32 master weights and each moment, and `zero/optimizer_state.pt`
contains the parameter groups. The model states are written to two files, because the ZeRO stages
read different file names: stages 1 and 2 read one file, and stage 3 reads the other, which contains
no tensors. `latest_universal` contains the name of the checkpoint's folder.

DeepSpeed's `load_checkpoint` with `checkpoint: {load_universal: true}` restores the optimizer's
parameters and state, and the counters. It does not restore buffers or frozen parameters.

Source: deepspeed/checkpoint/ds_to_universal.py, universal_checkpoint.py; runtime/engine.py,
zero/stage3.py.
"""

from __future__ import annotations

from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Any

from portable.converters.config_and_tokenizer_files import plan_companion_files
from portable.converters.errors import CheckpointError, CommandError, OptimizerStateError
from portable.converters.formats.deepspeed.universal import COMMON, LATEST, MASTER, NAME, ZERO
from portable.converters.tensors.casting import parse_target_dtype
from portable.converters.tensors.dtypes import CASTABLE_DTYPES
from portable.converters.tensors.entry import OutputTensor
from portable.converters.tensors.tensor import Tensor
from portable.converters.writers.conversion import (
    ContentOptions,
    convert_param_groups_to_plain,
    list_model_entries,
    require_optimizer_state,
)
from portable.converters.writers.plan import ConversionPlan, PlannedFile
from portable.converters.writers.torchzip_writer import build_torch_size, plan_torch_file, reopen_tensors

if TYPE_CHECKING:
    from portable.converters.checkpoint import Checkpoint, OptimizerState

_MODELS = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
# Version of DeepSpeed whose layout is written. DeepSpeed compares it with versions that have a different
# layout.
_VERSION = "0.19.8"
_STEP = "step"
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


def plan_universal(checkpoint: Checkpoint, choices: ContentOptions) -> ConversionPlan:
    """Plan the output of `--to deepspeed-universal`: several files for each parameter.

    Args:
        checkpoint: Checkpoint to convert.
        choices: Options for the content of the output. They must request the optimizer state.
            `max_shard_size` has no effect.

    Returns:
        The plan.

    Raises:
        CheckpointError: If the optimizer state is not requested or does not exist, if the requested
            dtype is neither `keep` nor `float32` (the dtype of the master weights), if the shape of
            a state other than `step` differs from its parameter, if the step counts differ, if the
            parameter groups are empty, repeat a parameter or list a parameter that is not in the
            model, or if a parameter name is not a valid folder name.
    """
    if not choices.optimizer:
        raise CommandError("--to deepspeed-universal: this format needs the optimizer state; add --optimizer")
    if parse_target_dtype(choices.dtype) not in (None, "F32"):
        raise CommandError(
            "--to deepspeed-universal: the master weights are always float32; leave out --dtype"
        )
    try:
        return _plan_with_optimizer(checkpoint, require_optimizer_state(checkpoint))
    except OptimizerStateError as error:  # without --optimizer, as its message suggests, there is no output
        raise CheckpointError(f"{error.reason}; convert to another format without --optimizer") from None


def _plan_with_optimizer(checkpoint: Checkpoint, optimizer: OptimizerState) -> ConversionPlan:
    """Plan the files of a universal checkpoint with weights and optimizer state.

    The weights of trained parameters are cast to float32.

    DeepSpeed loads each state other than `step` as a tensor with the shape of its parameter. Other
    scalars, such as `mu_product` of NAdam, can therefore not be written.

    Raises:
        OptimizerStateError: If the parameter groups are invalid, if the shape of a state other than
            `step` differs from its parameter, or if the step counts differ.
        CheckpointError: If a parameter name is not a valid folder name.
    """
    groups = convert_param_groups_to_plain(optimizer)
    group_names = [list(group.get("params", [])) for group in groups]
    model = {entry.name: entry for entry in list_model_entries(checkpoint, "keep")}
    _check_param_groups(checkpoint, group_names, model, optimizer)
    engine_step = _read_engine_step(checkpoint, optimizer)
    tag = f"global_step{engine_step}_universal"
    values: dict[str, Any] = {}
    step: Any = 0
    for name in (name for group in group_names for name in group):
        master = model[name].tensor
        master_dtype = "F32" if master.dtype in CASTABLE_DTYPES else master.dtype
        parameter_entries = {MASTER: OutputTensor(f"{name}.{MASTER}", master_dtype, master)}
        for state_name, value in optimizer.state.get(name, {}).items():
            if state_name == _STEP:
                # Keep the type of the step, because some optimizers store a number and others a tensor.
                saved_value = (
                    OutputTensor(f"{name}.{state_name}", value.dtype, value)
                    if isinstance(value, Tensor)
                    else value
                )
                values[f"{tag}/{ZERO}/{name}/{state_name}.pt"] = saved_value
                step = value
            elif not isinstance(value, Tensor) or value.shape != master.shape:
                raise OptimizerStateError(
                    f"{checkpoint.root}: {state_name} of {name!r} has a different shape from its parameter, "
                    "but a DeepSpeed universal checkpoint needs the same shape"
                )
            else:
                parameter_entries[state_name] = OutputTensor(f"{name}.{state_name}", value.dtype, value)
        for state_name, entry in parameter_entries.items():
            values[f"{tag}/{ZERO}/{name}/{state_name}.pt"] = {"param": entry, "cat_dim": 0, NAME: name}
    saved_value = OutputTensor(COMMON, step.dtype, step) if isinstance(step, Tensor) else step
    values[f"{tag}/{COMMON}"] = _build_optimizer_common_state(groups, group_names, saved_value)
    model_groups = [{name: model[name] for name in group} for group in group_names]
    trained = {name for group in group_names for name in group}
    rest = {name: entry for name, entry in model.items() if name not in trained}
    # The second file contains no tensors, because stage 3 opens it but reads no tensors from it.
    for file, tensors in zip(_MODELS, (rest, {}), strict=True):
        values[f"{tag}/{file}"] = _build_model_states(checkpoint, model_groups, tensors, engine_step)
    files = tuple(PlannedFile(name, tuple(plan_torch_file(value))) for name, value in values.items())
    written = [entry for file in files for entry in file.entries]
    documents, companions = plan_companion_files(checkpoint, written)
    return ConversionPlan(
        files, {LATEST: tag.encode(), **documents}, companions, partial(reopen_tensors, values)
    )


def _check_param_groups(
    checkpoint: Checkpoint,
    group_names: list[list[str]],
    model: dict[str, OutputTensor],
    optimizer: OptimizerState,
) -> None:
    """Check that the groups list parameters of the model once, under valid folder names.

    The groups do not have to contain parameters without optimizer state.

    Raises:
        CheckpointError: If a parameter name is not a valid folder name.
        OptimizerStateError: If the groups are empty or do not contain a parameter with optimizer
            state, or if a parameter is repeated or is not in the model.
    """
    location, names = checkpoint.root, [name for group in group_names for name in group]
    with_state = {name for name, values in optimizer.state.items() if values}
    if not names or len(set(names)) != len(names) or not with_state.issubset(names):
        raise OptimizerStateError(
            f"{location}: the optimizer's parameter groups must contain each parameter exactly once, but do "
            "not"
        )
    for name in names:
        if name not in model:
            raise OptimizerStateError(
                f"{location}: the optimizer's parameter groups contain {name!r}, which is not in the model"
            )
        if "/" in name or "\0" in name or name in (".", "..") or len(name.encode()) > 255:
            raise CheckpointError(
                f"{location}: the tensor name {name!r} cannot be used as the name of a folder; rename the "
                "tensor in the checkpoint"
            )


def _read_engine_step(checkpoint: Checkpoint, optimizer: OptimizerState) -> int:
    """Return the step to write to the engine's step counter.

    This is the maximum of the step in the checkpoint's metadata and the step in the optimizer state.
    A missing step counts as 0, as does a metadata step that is not a non-negative integer.

    Raises:
        OptimizerStateError: If the steps of two parameters differ, because DeepSpeed has one step
            for all parameters, or if a step is not a finite number.
    """
    common_step: float | None = None
    for name, values in optimizer.state.items():
        value = values.get(_STEP)
        if value is None:
            continue
        step = value.tolist() if isinstance(value, Tensor) and not value.shape else value
        if isinstance(step, Tensor) or not isfinite(step):
            raise OptimizerStateError(f"{checkpoint.root}: the step of {name!r} is not a finite number")
        common_step = step if common_step is None else common_step
        if step != common_step:
            raise OptimizerStateError(
                f"{checkpoint.root}: the step count of the optimizer is {step:g} for {name!r}, but "
                f"{common_step:g} for other parameters, and a DeepSpeed universal checkpoint needs equal "
                "counts"
            )
    recorded_step = checkpoint.metadata.get("step")
    return max(
        int(common_step or 0), recorded_step if type(recorded_step) is int and recorded_step >= 0 else 0
    )


def _build_optimizer_common_state(
    groups: list[dict[str, Any]], group_names: list[list[str]], step: Any
) -> dict[str, Any]:
    """Build the content of `optimizer_state.pt`.

    DeepSpeed trains each parameter group as one flat parameter. The entry `params` of a group is
    therefore the index of the group. With ZeRO stages 1 and 2, DeepSpeed reads the values at the
    top level. With stage 3, it reads the values under `optimizer_state_dict`.

    Args:
        groups: Parameter groups of the optimizer.
        group_names: Names of the parameters in each group.
        step: Number of steps, as a number or an `OutputTensor`.
    """
    indexed_groups = [{**group, "params": [i]} for i, group in enumerate(groups)]
    return {
        "zero_stage": 1,
        "partition_count": [1] * len(group_names),
        "ds_version": _VERSION,
        "param_groups": indexed_groups,
        "optimizer_state_dict": {"state": {0: {"step": step}}, "param_groups": indexed_groups},
    }


def _build_model_states(
    checkpoint: Checkpoint, groups: list[dict[str, OutputTensor]], rest: dict[str, OutputTensor], step: int
) -> dict[str, Any]:
    """Build the content of a DeepSpeed model states file.

    Args:
        checkpoint: Source of the names of tied tensors, and of counters such as the number of
            samples.
        groups: Tensors in each parameter group of the optimizer, keyed by name. Only their names
            and shapes are stored in this file.
        rest: Tensors that the optimizer does not update, keyed by name. Only these tensors are
            stored in this file. Can be empty.
        step: Step counter of the engine.
    """
    counters = {name: checkpoint.counters.get(name) for name in _COUNTERS}
    shapes = [
        {name: build_torch_size(entry.tensor.shape) for name, entry in group.items()} for group in groups
    ]
    return {
        "module": rest,
        "buffer_names": list(rest),
        "optimizer": None,
        "param_shapes": shapes,
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": dict(checkpoint.aliases),
        "lr_scheduler": {"last_batch_iteration": step, "last_epoch": step},
        "global_steps": step,
        "global_samples": counters["global_samples"] or 0,
        "skipped_steps": counters["skipped_steps"] or 0,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": _VERSION,
    }
