"""Checkpoints of other programs: whose a checkpoint is, and what it says of where its run stood.

The shards open through :mod:`converters`, whoever wrote them. What a program notes beside them differs: the
Trainer its own ``trainer_state.json`` and ``scheduler.pt``, DeepSpeed and torchtitan counters in the shards,
Accelerate and PyTorch/XLA nothing but the optimizer's own count of steps.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from converters import CheckpointError, open_checkpoint, read_pickled
from converters import Tensor as StoredTensor
from converters.names.torchtitan import as_transformers_llama, is_torchtitan_llama
from portable.checkpoint.find import checkpoint_of
from portable.checkpoint.trainer_state import STATE_FILE, TrainerState
from portable.errors import DamagedError
from portable.paths import exists, storage_errors

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from converters import Checkpoint, OptimizerState
    from portable.paths import Place

# The names that this program gives a checkpoint, also one that is unfinished or was set aside.
_OUR_FOLDERS = re.compile(r"\.?step-\d{6,}(\.partial|\.damaged)?")
# Folders inside a checkpoint, beside which the trainer's own files lie.
_PART = re.compile(r"global_step\d+|pytorch_model(_\d+)?|pytorch_model_fsdp_0|optimizer_0")
_SCHEDULERS = ("scheduler.pt", "scheduler.bin")
# Counters in the shards that stand for steps of the optimizer, of which a checkpoint has at most one kind.
_STEP_COUNTERS = ("train_state.step", "global_steps", "step")
HALF_TYPES = ("BF16", "F16")


@dataclass(frozen=True)
class Count:
    """A number, and what says so."""

    number: int
    said_by: str

    def __str__(self) -> str:
        return f"{self.number} ({self.said_by})"


@dataclass(frozen=True)
class ExternalCheckpoint:
    """A checkpoint that another program wrote. Everything but the headers is read when it is asked for.

    Attributes:
        checkpoint: what its shards hold.
        folder: where the program that wrote it keeps its small files.
        trainer: the ``trainer_state.json`` of the Trainer, where there is one.
    """

    checkpoint: Checkpoint
    folder: Place
    trainer: Mapping[str, Any] | None

    @property
    def root(self) -> Place:
        return self.checkpoint.root

    @property
    def writer(self) -> str:
        """Who wrote it, as far as can be told."""
        checkpoint, told = self.checkpoint, self.checkpoint.metadata
        if checkpoint.format.startswith("deepspeed"):
            universal = ", universal" if checkpoint.format.endswith("universal") else ""
            engine = (
                f"DeepSpeed ZeRO-{told['zero_stage']}{universal}" if "zero_stage" in told else "DeepSpeed"
            )
        elif checkpoint.format == "dcp":
            titan = any(key.startswith("train_state.") for key in checkpoint.counters)
            engine = "torchtitan" if titan else "FSDP (torch.distributed.checkpoint)"
        elif checkpoint.format == "xla-fsdp":
            engine = "PyTorch/XLA FSDP"
        else:
            engine = f"a whole state dict ({checkpoint.format})"
        if self.trainer is not None:
            engine = f"the Hugging Face Trainer, {engine}"
        world = told.get("world_size")
        return f"{engine}, {world} ranks" if isinstance(world, int) and world > 1 else engine

    @property
    def optimizer(self) -> OptimizerState | None:
        return self.checkpoint.optimizer

    @cached_property
    def steps(self) -> list[Count]:
        """What the programs involved say of the steps done; the optimizer's own count is not among it."""
        found = []
        if self.trainer is not None:
            found.append(Count(self.trainer["global_step"], f"global_step of {STATE_FILE}"))
        for name in _STEP_COUNTERS:
            value = self.checkpoint.counters.get(name)
            if isinstance(value, int):
                found.append(Count(value, f"{name} in the shards"))
        return found

    @cached_property
    def optimizer_steps(self) -> Counter[int]:
        """How many parameters the optimizer has stepped how often; empty where it does not count."""
        counts: Counter[int] = Counter()
        for values in self.optimizer.state.values() if self.optimizer is not None else ():
            if "step" in values:
                counts[int(number(values["step"]))] += 1
        return counts

    @property
    def samples(self) -> Count | None:
        """Sequences consumed, where they were counted."""
        counted = self.checkpoint.counters.get("global_samples")
        return Count(counted, "global_samples in the shards") if isinstance(counted, int) else None

    @cached_property
    def scheduler(self) -> Mapping[str, Any]:
        """The learning-rate scheduler's state, as the Trainer and Accelerate keep it.

        Empty where there is none that consists of plain data: nothing depends on it.
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

    def named_for(self, model: Any) -> ExternalCheckpoint:
        """The same under the names of ``model``, where torchtitan has others: for Llama.

        Raises:
            CheckpointError: if its sizes are not those of ``model``.
        """
        config = model.config
        if config.model_type != "llama" or not is_torchtitan_llama(self.checkpoint):
            return self
        named = as_transformers_llama(
            self.checkpoint, heads=config.num_attention_heads, key_value_heads=config.num_key_value_heads
        )
        return replace(self, checkpoint=named)

    def rows(self) -> list[tuple[str, str]]:
        """What ``--resume-info`` prints."""
        tensors = self.checkpoint.tensors
        elements = sum(tensor.numel for tensor in tensors.values())
        rows = [
            ("checkpoint", str(self.root)),
            ("written by", self.writer),
            ("weights", f"{len(tensors)} tensors, {elements:,} elements, {_types(list(tensors.values()))}"),
            ("optimizer", self._optimizer_in_words()),
            ("step", ", ".join(map(str, self.steps)) or "said by nothing but the optimizer"),
        ]
        if self.samples is not None:
            rows.append(("samples", str(self.samples)))
        rows += _said("trainer", self.trainer or {}, ("epoch", "max_steps", "train_batch_size"))
        rows += _said("scheduler", self.scheduler, ("last_epoch", "base_lrs"))
        return rows

    def _optimizer_in_words(self) -> str:
        try:
            optimizer = self.optimizer
        except CheckpointError as error:
            return f"cannot be assigned to parameters by itself ({error})"
        if optimizer is None:
            return "none: the weights can be where a run starts (model.name_or_path), not where it goes on"
        names = sorted({name for values in optimizer.state.values() for name in values})
        moments = [v for values in optimizer.state.values() for v in values.values() if _is_moment(v)]
        steps = " or ".join(str(step) for step in sorted(self.optimizer_steps)) or "uncounted"
        return (
            f"{', '.join(names)} of {len(optimizer.state)} parameters, {_types(moments)}; {steps} steps"
            if optimizer.state
            else "has not taken a step"
        )


def open_external(path: Place, order: Sequence[str] = ()) -> ExternalCheckpoint | None:
    """Open the checkpoint of another program.

    Args:
        path: as the person gave it.
        order: the names of the model's parameters as its modules define them, where the model is known.

    Returns:
        None for what is, or was meant to be, a checkpoint of this program.

    Raises:
        DamagedError: if it can be opened by no format.
    """
    try:
        with storage_errors("checkpoint.resume"):
            if not exists(path) or is_own_checkpoint(checkpoint_of(path)):
                return None
            checkpoint = open_checkpoint(path, order=order)
    except CheckpointError as error:
        raise DamagedError(f"checkpoint.resume: {error}") from error
    root = checkpoint.root
    if is_own_checkpoint(root):
        return None
    folder = root if root.is_dir() else root.parent
    if _PART.fullmatch(folder.name) and not (folder / STATE_FILE).exists():
        folder = folder.parent
    return ExternalCheckpoint(checkpoint, folder, _trainer_state(folder))


def is_own_checkpoint(folder: Place) -> bool:
    """Whether a checkpoint's folder is one of this program's, whole or not.

    A ``trainer_state.json`` that is not the Trainer's counts as ours, also a damaged one; without that file,
    the name that this program gives its folders, beside the model's config that it puts there.
    """
    if exists(folder / STATE_FILE):
        return _trainer_state(folder) is None
    return _OUR_FOLDERS.fullmatch(folder.name) is not None and (folder / "config.json").exists()


def own_state(path: Place) -> TrainerState | None:
    """Where a checkpoint of this program stood; None for another's, and where there is none."""
    if not exists(path):
        return None
    folder = checkpoint_of(path)
    return TrainerState.read(folder) if is_own_checkpoint(folder) else None


def _trainer_state(folder: Place) -> dict[str, Any] | None:
    """The Hugging Face Trainer's ``trainer_state.json`` in ``folder``, told apart from ours by its keys."""
    try:
        values = json.loads((folder / STATE_FILE).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(values, dict) or "format_version" in values or "samples" in values:
        return None
    step = values.get("global_step")
    return values if type(step) is int and step >= 0 else None


def number(value: StoredTensor | float | bool) -> float:
    """A number that a checkpoint keeps as such, or as a tensor of one element."""
    return float(value.read().reshape(-1)[0]) if isinstance(value, StoredTensor) else float(value)


def _said(who: str, values: Mapping[str, Any], keys: Sequence[str]) -> list[tuple[str, str]]:
    """A row with those of ``keys`` that there are; none without."""
    said = [f"{key} {values[key]}" for key in keys if values.get(key) is not None]
    return [(who, ", ".join(said))] if said else []


def _is_moment(value: object) -> bool:
    return isinstance(value, StoredTensor) and bool(value.shape)


def _types(tensors: Sequence[Any]) -> str:
    return " and ".join(sorted({tensor.dtype for tensor in tensors})) or "no type"
