"""Checkpoints of other programs: which program wrote one, and its step and sample counts.

:mod:`converters` opens the shards of every program. The counts are stored differently: the Trainer has its
own ``trainer_state.json`` and ``scheduler.pt``, DeepSpeed and torchtitan have counters in the shards,
Accelerate and PyTorch/XLA have only the optimizer's step count.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from portable.checkpoint.store import resolve_checkpoint
from portable.checkpoint.trainer_state import STATE_FILE, TrainerState
from portable.converters import CheckpointError, open_checkpoint, read_pickled
from portable.converters import Tensor as StoredTensor
from portable.converters.naming import rename_to_live
from portable.errors import DamagedError
from portable.model.published_names import build_name_rules
from portable.paths import convert_storage_errors, path_exists, read_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import nn

    from portable.adapters.adapter import Adapter
    from portable.converters import Checkpoint, OptimizerState
    from portable.converters.storage.path_or_url import Place

# The names of this program's checkpoints, including unfinished and damaged ones.
_OUR_FOLDERS = re.compile(r"\.?step-\d{6,}(\.partial|\.damaged)?")
# Subfolders with the shards. The program's other files are in the parent folder.
_PART = re.compile(r"global_step\d+|pytorch_model(_\d+)?|pytorch_model_fsdp_0|optimizer_0")
_SCHEDULERS = ("scheduler.pt", "scheduler.bin")
# Counters of optimizer steps in the shards. A checkpoint has at most one of them.
_STEP_COUNTERS = ("train_state.step", "global_steps", "step")
HALF_TYPES = ("BF16", "F16")


@dataclass(frozen=True)
class SourcedCount:
    """A number and its source."""

    number: int
    source: str

    def __str__(self) -> str:
        return f"{self.number} ({self.source})"


@dataclass(frozen=True)
class ExternalCheckpoint:
    """A checkpoint of another program. Everything except the headers is read lazily.

    Attributes:
        checkpoint: the contents of the shards.
        folder: the folder of the program's other files.
        trainer: the Trainer's ``trainer_state.json``, if there is one.
    """

    checkpoint: Checkpoint
    folder: Place
    trainer: Mapping[str, Any] | None

    @property
    def root(self) -> Place:
        return self.checkpoint.root

    @property
    def writer(self) -> str:
        """The program that wrote it, as far as it is known."""
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
        if self.trainer is not None:
            engine = f"the Hugging Face Trainer, {engine}"
        world = facts.get("world_size")
        return f"{engine}, {world} ranks" if isinstance(world, int) and world > 1 else engine

    @property
    def optimizer(self) -> OptimizerState | None:
        return self.checkpoint.optimizer

    @cached_property
    def steps(self) -> list[SourcedCount]:
        """The step counts of all sources except the optimizer."""
        counts = []
        if self.trainer is not None:
            counts.append(SourcedCount(self.trainer["global_step"], f"global_step of {STATE_FILE}"))
        for name in _STEP_COUNTERS:
            value = self.checkpoint.counters.get(name)
            if isinstance(value, int):
                counts.append(SourcedCount(value, f"{name} in the shards"))
        return counts

    @cached_property
    def optimizer_steps(self) -> Counter[int]:
        """The number of parameters by the optimizer's step count; empty if it does not count."""
        counts: Counter[int] = Counter()
        for values in self.optimizer.state.values() if self.optimizer is not None else ():
            if "step" in values:
                counts[int(to_float(values["step"]))] += 1
        return counts

    @property
    def samples(self) -> SourcedCount | None:
        """Sequences consumed, if they were counted."""
        counted = self.checkpoint.counters.get("global_samples")
        return SourcedCount(counted, "global_samples in the shards") if isinstance(counted, int) else None

    @cached_property
    def scheduler(self) -> Mapping[str, Any]:
        """The learning rate scheduler's state of the Trainer or Accelerate.

        Empty if there is none in plain data: nothing depends on it.
        """
        for path in (self.folder / name for name in _SCHEDULERS):
            if path.is_file():
                try:
                    state = read_pickled(path)
                except CheckpointError:
                    continue
                if isinstance(state, dict):
                    return state
        return {}

    def rename_for(self, model: Any) -> ExternalCheckpoint:
        """Return this checkpoint with the names that ``model`` uses in memory.

        torchtitan uses its own names, and the published names of many models differ from the names
        in memory.

        Raises:
            CheckpointError: if the sizes differ from those of ``model``.
        """
        from portable.converters.formats.torchtitan import rename_from_torchtitan

        checkpoint = rename_from_torchtitan(self.checkpoint, model.config.to_dict())
        live = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        if not checkpoint.tensors.keys() <= live.keys():
            checkpoint = rename_to_live(checkpoint, build_name_rules(model), live)
        return replace(self, checkpoint=checkpoint)

    def build_rows(self) -> list[tuple[str, str]]:
        """The output of ``--resume-info``."""
        tensors = self.checkpoint.tensors
        elements = sum(tensor.numel for tensor in tensors.values())
        rows = [
            ("checkpoint", str(self.root)),
            ("written by", self.writer),
            (
                "weights",
                f"{len(tensors)} tensors, {elements:,} elements, {_format_dtypes(list(tensors.values()))}",
            ),
            ("optimizer", self._describe_optimizer()),
            ("step", ", ".join(map(str, self.steps)) or "only the optimizer's step count"),
        ]
        if self.samples is not None:
            rows.append(("samples", str(self.samples)))
        rows += _build_row("trainer", self.trainer or {}, ("epoch", "max_steps", "train_batch_size"))
        rows += _build_row("scheduler", self.scheduler, ("last_epoch", "base_lrs"))
        return rows

    def _describe_optimizer(self) -> str:
        try:
            optimizer = self.optimizer
        except CheckpointError as error:
            return f"cannot be assigned to parameters without the model ({error})"
        if optimizer is None:
            return "none: a run can start from the weights (model.name_or_path), but not resume"
        names = sorted({name for values in optimizer.state.values() for name in values})
        moments = [v for values in optimizer.state.values() for v in values.values() if _is_moment(v)]
        steps = " or ".join(str(step) for step in sorted(self.optimizer_steps)) or "uncounted"
        return (
            f"{', '.join(names)} of {len(optimizer.state)} parameters, {_format_dtypes(moments)}; {steps} "
            "steps"
            if optimizer.state
            else "has not taken a step"
        )


def open_external(
    path: Place,
    order: Sequence[str] = (),
    *,
    build_once: Callable[[str, Callable[[Path], None]], Path | None] | None = None,
) -> ExternalCheckpoint | None:
    """Open the checkpoint of another program.

    Args:
        path: as given by the user.
        order: the model's parameter names in module order, if the model is known.
        build_once: Function that writes a file in one process of each node; None if only one rank opens
            the checkpoint.

    Returns:
        the checkpoint; None if it is this program's, even if incomplete, or if ``path`` does not exist.

    Raises:
        DamagedError: if it cannot be opened in any format.
    """
    try:
        with convert_storage_errors("checkpoint.resume"):
            if not path_exists(path) or is_run_checkpoint(resolve_checkpoint(path)):
                return None
            checkpoint = open_checkpoint(path, order=order, build_once=build_once)
    except CheckpointError as error:
        raise DamagedError(f"checkpoint.resume: {error}") from error
    root = checkpoint.root
    if is_run_checkpoint(root):
        return None
    folder = root if root.is_dir() else root.parent
    if _PART.fullmatch(folder.name) and not (folder / STATE_FILE).exists():
        folder = folder.parent
    return ExternalCheckpoint(checkpoint, folder, _read_hf_trainer_state(folder))


def open_for_model(
    path: Place,
    model: nn.Module,
    adapter: Adapter | None,
    *,
    build_once: Callable[[str, Callable[[Path], None]], Path | None] | None = None,
) -> ExternalCheckpoint | None:
    """Open the checkpoint of another program for ``model``; see :func:`open_external`.

    Args:
        path: as given by the user.
        model: of the run.
        adapter: in ``model``, if there is one; the checkpoint must then hold it.
        build_once: see :func:`open_external`.

    Raises:
        UserError: if it holds another adapter, or none.
    """
    names = [name for name, _ in model.named_parameters()] if adapter is None else adapter.files
    external = open_external(path, names, build_once=build_once)
    if external is None or adapter is None:
        return external
    return replace(external, checkpoint=adapter.adopt_checkpoint(external.checkpoint))


def is_run_checkpoint(folder: Place) -> bool:
    """Whether ``folder`` is a checkpoint of this program, complete or not.

    Any ``trainer_state.json`` except the Trainer's counts, even if damaged. Without that file, the folder's
    name and a ``config.json`` in it decide.
    """
    if path_exists(folder / STATE_FILE):
        return _read_hf_trainer_state(folder) is None
    return _OUR_FOLDERS.fullmatch(folder.name) is not None and (folder / "config.json").exists()


def read_run_state(path: Place) -> TrainerState | None:
    """Read the state of a checkpoint of this program; None for other programs, or if there is none."""
    if not path_exists(path):
        return None
    folder = resolve_checkpoint(path)
    return TrainerState.read(folder) if is_run_checkpoint(folder) else None


def read_run_step(path: Place, updates: int) -> int:
    """The step of a checkpoint, skipped ones counted; ``updates`` in one of another program."""
    state = read_run_state(path)
    return updates if state is None else state.step


def _read_hf_trainer_state(folder: Place) -> dict[str, Any] | None:
    """Read the Hugging Face Trainer's ``trainer_state.json``, or None. Its keys differ from ours."""
    try:
        values = read_json(folder / STATE_FILE)
    except (OSError, ValueError):
        return None
    if not isinstance(values, dict) or "format_version" in values or "samples" in values:
        return None
    step = values.get("global_step")
    return values if type(step) is int and step >= 0 else None


def to_float(value: StoredTensor | float | bool) -> float:
    """Convert a number or one-element tensor of a checkpoint to a float."""
    return float(value.read().reshape(-1)[0]) if isinstance(value, StoredTensor) else float(value)


def _build_row(title: str, values: Mapping[str, Any], keys: Sequence[str]) -> list[tuple[str, str]]:
    """A row of those ``keys`` that ``values`` has, or no row."""
    parts = [f"{key} {values[key]}" for key in keys if values.get(key) is not None]
    return [(title, ", ".join(parts))] if parts else []


def _is_moment(value: object) -> bool:
    return isinstance(value, StoredTensor) and bool(value.shape)


def _format_dtypes(tensors: Sequence[Any]) -> str:
    return " and ".join(sorted({tensor.dtype for tensor in tensors})) or "no type"
