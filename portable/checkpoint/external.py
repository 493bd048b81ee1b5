"""Open checkpoints written by other trainers: detect the trainer, and read its counts.

:mod:`portable.converters` opens the shards of every trainer. This module finds the step and
sample counts, which are stored in different places: by the Hugging Face Trainer in
``trainer_state.json``, and by DeepSpeed, torchtitan and some full state dicts in the
shards. Accelerate and PyTorch/XLA store only the step count of the optimizer. The scheduler
state (``scheduler.pt`` or ``scheduler.bin``) is not used to determine the step.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from portable.checkpoint.store import resolve_to_newest_checkpoint
from portable.checkpoint.trainer_state import STATE_FILE, TrainerState
from portable.converters import CheckpointError, open_checkpoint, read_pickled
from portable.converters import Tensor as StoredTensor
from portable.converters.naming import rename_to_live
from portable.converters.storage.store_errors import RemoteError
from portable.errors import DamagedError
from portable.model.published_names import build_name_rules
from portable.paths import convert_checkpoint_errors, path_exists, read_json_file

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import nn

    from portable.adapters.adapter import Adapter
    from portable.converters import Checkpoint, OptimizerState
    from portable.converters.storage.path_or_url import AnyPath

# Folder names of this program's checkpoints, including unfinished and damaged checkpoints.
_OWN_FOLDER_NAME = re.compile(r"\.?step-\d{6,}(\.partial|\.damaged)?")
# Names of subfolders that contain the shards. The other files of the checkpoint are in the parent folder.
_SHARD_FOLDER_NAME = re.compile(r"global_step\d+|pytorch_model(_\d+)?|pytorch_model_fsdp_0|optimizer_0")
_SCHEDULER_FILES = ("scheduler.pt", "scheduler.bin")
# Counters of optimizer steps in the shards. A checkpoint has at most one of them.
_STEP_COUNTERS = ("train_state.step", "global_steps", "step")
HALF_DTYPES = ("BF16", "F16")
"""Names of the 16-bit dtypes in the notation of checkpoint files."""


@dataclass(frozen=True)
class SourcedCount:
    """Number of steps or samples, and where it was found.

    Attributes:
        count: Number of steps or samples.
        source: Place in the checkpoint that contains the count, or the setting that determines it.
    """

    count: int
    source: str

    def __str__(self) -> str:
        return f"{self.count} ({self.source})"


@dataclass(frozen=True)
class ExternalCheckpoint:
    """Checkpoint written by another trainer.

    The contents of the shards, except the headers, are read lazily.

    Attributes:
        checkpoint: Contents of the shards.
        folder: Folder with the other files of the checkpoint. It may be the parent of the
            folder with the shards.
        hf_trainer_state: Contents of ``trainer_state.json`` of the Hugging Face Trainer. None
            if there is no such file, or if it is not valid.
    """

    checkpoint: Checkpoint
    folder: AnyPath
    hf_trainer_state: Mapping[str, Any] | None

    @property
    def root(self) -> AnyPath:
        """Path of the folder with the shards, or of the checkpoint file if there are no shards."""
        return self.checkpoint.root

    @property
    def writer_description(self) -> str:
        """Description of the program that wrote the checkpoint, such as ``DeepSpeed ZeRO-3, 8 ranks``."""
        checkpoint, facts = self.checkpoint, self.checkpoint.metadata
        if checkpoint.format.startswith("deepspeed"):
            universal = ", universal" if checkpoint.format.endswith("universal") else ""
            stage = f" ZeRO-{facts['zero_stage']}{universal}" if "zero_stage" in facts else ""
            engine = f"DeepSpeed{stage}"
        elif checkpoint.format == "dcp":
            titan = any(key.startswith("train_state.") for key in checkpoint.counters)
            engine = "torchtitan" if titan else "FSDP (torch.distributed.checkpoint)"
        elif checkpoint.format == "xla-fsdp":
            engine = "PyTorch/XLA FSDP"
        else:
            engine = f"a full state dict ({checkpoint.format})"
        if self.hf_trainer_state is not None:
            engine = f"the Hugging Face Trainer, {engine}"
        world = facts.get("world_size")
        return f"{engine}, {world} ranks" if isinstance(world, int) and world > 1 else engine

    @property
    def optimizer(self) -> OptimizerState | None:
        """Optimizer state, or None if the checkpoint has none."""
        return self.checkpoint.optimizer

    @cached_property
    def step_counts(self) -> list[SourcedCount]:
        """Step counts in ``trainer_state.json`` and in the shards, each with its source.

        Empty if neither contains a step count. The step counts in the optimizer state are not
        included: see :attr:`num_parameters_by_optimizer_step`.
        """
        counts = []
        if self.hf_trainer_state is not None:
            counts.append(SourcedCount(self.hf_trainer_state["global_step"], f"global_step of {STATE_FILE}"))
        for name in _STEP_COUNTERS:
            value = self.checkpoint.counters.get(name)
            if isinstance(value, int):
                counts.append(SourcedCount(value, f"{name} in the shards"))
        return counts

    @cached_property
    def num_parameters_by_optimizer_step(self) -> Counter[int]:
        """Number of parameters at each optimizer step, keyed by step.

        The step of a parameter is the entry ``step`` of its optimizer state. For example, the
        result is ``{100: 8, 90: 2}`` if eight parameters have taken 100 steps, and two have taken
        90. There is more than one key only if some parameters had no gradient in some steps. Empty
        if the checkpoint has no optimizer state, or if the optimizer does not count steps.
        """
        counts: Counter[int] = Counter()
        for values in self.optimizer.state.values() if self.optimizer is not None else ():
            if "step" in values:
                counts[int(to_float(values["step"]))] += 1
        return counts

    @property
    def sample_count(self) -> SourcedCount | None:
        """Number of sequences that the trainer has consumed. None if the checkpoint does not contain it."""
        counted = self.checkpoint.counters.get("global_samples")
        return SourcedCount(counted, "global_samples in the shards") if isinstance(counted, int) else None

    @cached_property
    def scheduler_state(self) -> Mapping[str, Any]:
        """State of the learning rate scheduler, as saved by the Trainer or Accelerate.

        Tensors and objects are replaced with the names of their classes. Empty if the checkpoint
        has no scheduler state, or if the file is damaged or contains a class that torch does not
        write.
        """
        for path in (self.folder / name for name in _SCHEDULER_FILES):
            if path.is_file():
                try:
                    state = read_pickled(path)
                except RemoteError:
                    raise
                except CheckpointError:
                    continue
                if isinstance(state, dict):
                    return state
        return {}

    def rename_to_model_names(self, model: Any) -> ExternalCheckpoint:
        """Return a copy of this checkpoint with the parameter names and the layout of a model.

        The names in the checkpoint can differ for two reasons. Checkpoints of torchtitan use
        torchtitan's own names. Many published models store their tensors under other names than the
        parameters have in memory. Some of these tensors also have another layout. For example, a
        tensor is split or transposed.

        Args:
            model: The transformers model.

        Raises:
            CheckpointError: If a tensor cannot be rearranged, for example because its shape does
                not fit. The shapes of other tensors are not compared with ``model``.
        """
        from portable.converters.formats.torchtitan import rename_from_torchtitan

        checkpoint = rename_from_torchtitan(self.checkpoint, model.config.to_dict())
        shapes_in_model = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        if not checkpoint.tensors.keys() <= shapes_in_model.keys():
            checkpoint = rename_to_live(checkpoint, build_name_rules(model), shapes_in_model)
        return replace(self, checkpoint=checkpoint)

    def build_info_rows(self) -> list[tuple[str, str]]:
        """Build the table that ``--resume-info`` prints, as (title, value) pairs."""
        tensors = self.checkpoint.tensors
        elements = sum(tensor.numel for tensor in tensors.values())
        rows = [
            ("checkpoint", str(self.root)),
            ("written by", self.writer_description),
            (
                "weights",
                f"{len(tensors)} tensors, {elements:,} elements, {_format_dtypes(list(tensors.values()))}",
            ),
            ("optimizer", self._describe_optimizer()),
            ("step", ", ".join(map(str, self.step_counts)) or "only the optimizer's step count"),
        ]
        if self.sample_count is not None:
            rows.append(("samples", str(self.sample_count)))
        rows += _build_optional_row(
            "trainer", self.hf_trainer_state or {}, ("epoch", "max_steps", "train_batch_size")
        )
        rows += _build_optional_row("scheduler", self.scheduler_state, ("last_epoch", "base_lrs"))
        return rows

    def _describe_optimizer(self) -> str:
        """Describe the optimizer state for ``--resume-info``: its tensors, dtypes and step counts.

        If the state is missing or cannot be read without the model, the description states the reason.
        """
        try:
            optimizer = self.optimizer
        except RemoteError:
            raise
        except CheckpointError as error:
            return f"cannot be assigned to parameters without the model ({error.reason})"
        if optimizer is None:
            return "none; a run can start from the weights (set model.name_or_path), but cannot resume"
        names = sorted({name for values in optimizer.state.values() for name in values})
        moments = [
            v for values in optimizer.state.values() for v in values.values() if _is_nonscalar_tensor(v)
        ]
        steps = (
            " or ".join(str(step) for step in sorted(self.num_parameters_by_optimizer_step))
            or "an unknown number of"
        )
        return (
            f"{', '.join(names)} for {len(optimizer.state)} parameters, {_format_dtypes(moments)}; {steps} "
            "steps"
            if optimizer.state
            else "no state, because the optimizer has not taken a step"
        )


def open_external_checkpoint(
    path: AnyPath,
    parameter_order: Sequence[str] = (),
    *,
    build_once: Callable[[str, Callable[[Path], None]], Path | None] | None = None,
) -> ExternalCheckpoint | None:
    """Open a checkpoint written by another trainer.

    Args:
        path: Value of ``checkpoint.resume``, a path or URL.
        parameter_order: Names of the model's parameters, in module order. Some formats identify a
            parameter only by its index in this order. Empty if the model is not known.
        build_once: Function ``build_once(key, write)`` that builds an index file once per node.
            Some formats need such a file. ``key`` identifies the content of the file. The function
            chooses the path of the file, calls ``write(path)`` in one process per node, and returns
            the path in every process. It returns None if the processes of the node cannot share
            files. Not needed if only one rank opens the checkpoint.

    Returns:
        The checkpoint. None if ``path`` does not exist, or if it is a checkpoint of this project,
        whether complete or not. Also None if it is the output folder of a run of this project with
        a complete checkpoint.

    Raises:
        DamagedError: If the checkpoint is damaged, incomplete or of an unknown format.
        RunError: If the object store is unavailable.
        UserError: For any other error of the object store.
    """
    with convert_checkpoint_errors("checkpoint.resume", DamagedError):
        if not path_exists(path) or is_run_checkpoint(resolve_to_newest_checkpoint(path)):
            return None
        checkpoint = open_checkpoint(path, order=parameter_order, build_once=build_once)
        root = checkpoint.root
        if is_run_checkpoint(root):
            return None
        folder = root if root.is_dir() else root.parent
        if _SHARD_FOLDER_NAME.fullmatch(folder.name) and not (folder / STATE_FILE).exists():
            folder = folder.parent
        return ExternalCheckpoint(checkpoint, folder, _read_hf_trainer_state(folder))


def open_external_for_model(
    path: AnyPath,
    model: nn.Module,
    adapter: Adapter | None,
    *,
    build_once: Callable[[str, Callable[[Path], None]], Path | None] | None = None,
) -> ExternalCheckpoint | None:
    """Open another trainer's checkpoint, to load it into ``model``.

    See :func:`open_external_checkpoint`.

    Args:
        path: Value of ``checkpoint.resume``, a path or URL.
        model: Model of the run.
        adapter: Adapter in ``model``, or None. The checkpoint must contain the same adapter.
        build_once: See :func:`open_external_checkpoint`.

    Returns:
        The checkpoint. None if ``path`` does not exist, or if it is a checkpoint of this project.
        For an adapter, the checkpoint contains only the adapter's tensors, under their names in
        ``model``.

    Raises:
        UserError: If ``adapter`` is set, but the checkpoint contains a different adapter or none.
            Also raised if the object store reports an error.
        DamagedError: If the checkpoint cannot be opened in any format.
        RunError: If the object store is unavailable.
    """
    names = [name for name, _ in model.named_parameters()] if adapter is None else adapter.saved_names
    external = open_external_checkpoint(path, names, build_once=build_once)
    if external is None or adapter is None:
        return external
    return replace(external, checkpoint=adapter.map_foreign_checkpoint(external.checkpoint))


def is_run_checkpoint(folder: AnyPath) -> bool:
    """Return whether this project wrote the checkpoint in ``folder``, even if it is incomplete.

    If ``trainer_state.json`` exists, return True unless it is a valid file of the Hugging Face
    Trainer. A damaged file therefore counts as a file of this project. Otherwise, the folder
    must contain a ``config.json`` and have a name such as ``step-000100``, possibly with the
    prefix or suffix that marks unfinished or damaged checkpoints.
    """
    if path_exists(folder / STATE_FILE):
        return _read_hf_trainer_state(folder) is None
    return _OWN_FOLDER_NAME.fullmatch(folder.name) is not None and (folder / "config.json").exists()


def read_run_state(path: AnyPath) -> TrainerState | None:
    """Read the ``trainer_state.json`` of a checkpoint that this project wrote.

    Args:
        path: Checkpoint folder, or the output folder of a run. In an output folder, the newest
            checkpoint is read.

    Returns:
        The state. None if another program wrote the checkpoint, or if ``path`` does not exist.

    Raises:
        DamagedError: If the file is damaged or cannot be read.
        UserError: If the file has a newer format, or if a checkpoint of this project does not
            contain it.
        RemoteError: If a request to the object store fails.
    """
    if not path_exists(path):
        return None
    folder = resolve_to_newest_checkpoint(path)
    return TrainerState.read(folder) if is_run_checkpoint(folder) else None


def read_step_of_any_checkpoint(path: AnyPath, external_step: int) -> int:
    """Return the step at which a checkpoint was saved.

    If this project wrote the checkpoint, the step is read from it. It counts all steps, including
    steps whose optimizer update was skipped.

    Args:
        path: Path of the checkpoint.
        external_step: Step to return if another program wrote the checkpoint.
    """
    state = read_run_state(path)
    return external_step if state is None else state.step


def _read_hf_trainer_state(folder: AnyPath) -> dict[str, Any] | None:
    """Read the Hugging Face Trainer's ``trainer_state.json``.

    Returns:
        The contents. None if there is no readable file with a JSON object, if the object has a key
        of this project's own format (``format_version`` or ``samples``), or if its ``global_step``
        is not a non-negative integer.
    """
    try:
        values = read_json_file(folder / STATE_FILE)
    except (OSError, ValueError):
        return None
    if not isinstance(values, dict) or "format_version" in values or "samples" in values:
        return None
    step = values.get("global_step")
    return values if type(step) is int and step >= 0 else None


def to_float(value: StoredTensor | float | bool) -> float:
    """Convert a number or a one-element tensor to a float."""
    return float(value.read().reshape(-1)[0]) if isinstance(value, StoredTensor) else float(value)


def _build_optional_row(title: str, values: Mapping[str, Any], keys: Sequence[str]) -> list[tuple[str, str]]:
    """Build a table row that lists the values of the given keys.

    Args:
        title: First cell of the row.
        values: Values, keyed by name.
        keys: Keys to list in the second cell. Keys that are missing or have the value None are
            omitted.

    Returns:
        List that contains the row, or an empty list if ``values`` has none of the keys.
    """
    parts = [f"{key} {values[key]}" for key in keys if values.get(key) is not None]
    return [(title, ", ".join(parts))] if parts else []


def _is_nonscalar_tensor(value: object) -> bool:
    """Return whether a stored value is a tensor with at least one dimension, such as a moment.

    In contrast, step counts are numbers or scalar tensors.
    """
    return isinstance(value, StoredTensor) and bool(value.shape)


def _format_dtypes(tensors: Sequence[Any]) -> str:
    return " and ".join(sorted({tensor.dtype for tensor in tensors})) or "no dtype"
