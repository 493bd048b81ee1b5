"""Result types of the stages of a run. Later stages may read a result, but must not modify it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PretrainedConfig, PreTrainedModel

    from portable.adapters.adapter import Adapter
    from portable.backend import Backend, Engine
    from portable.batch_plan import BatchPlan
    from portable.checkpoint.resume_external import AdoptedCheckpoint
    from portable.config import RunConfig
    from portable.config.changed_settings import SettingChange
    from portable.converters.storage.path_or_url import AnyPath
    from portable.data.dataset import RunData
    from portable.evaluation.best_tracker import BestTracker
    from portable.evaluation.metrics import MetricSet
    from portable.model.published_names import PublishedNames
    from portable.optim.schedule import Schedule
    from portable.output.existing_run import ExistingRun
    from portable.progress import RunProgress
    from portable.registry import World


@dataclass(frozen=True)
class ResolvedRun:
    """Result of the first stage of a run, which resolves the config.

    Created by :func:`portable.run.resolve.resolve_run`.

    Attributes:
        config: Config in which ``backend: auto`` is resolved. The values of a DeepSpeed JSON, the
            detected ``data.format``, defaults that depend on the model, and the inherited settings
            are filled in. ``train.micro_batch_size`` may still be ``auto``. ``precision`` is still
            ``auto`` if its value depends on the device, because only a rank may open the device.
            See :func:`portable.run.resolve.resolve_precision`.
        output_place: Folder or URL of ``output_dir``.
        existing: Earlier run in ``output_dir``. Its ``config`` is None if the folder does not
            contain a run.
        world: Ranks and devices of this launch.
        inherited_settings: Values of settings that this launch does not set and takes from the
            existing run, keyed by setting. A setting is omitted if this launch has the same value
            anyway. If the setting has an alternative, such as ``train.epochs`` for ``train.steps``,
            the value of the alternative must also be the same.
    """

    config: RunConfig
    output_place: AnyPath
    existing: ExistingRun
    world: World
    inherited_settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PreparedRun:
    """Result of a run's second stage: everything that a rank builds before it loads weights.

    Created on each rank by :func:`portable.run.prepare.prepare_run`.

    Attributes:
        resolved: Result of the first stage.
        config: Config of the run. ``train.micro_batch_size: auto`` has been replaced with a number.
        backend: Backend of this rank.
        model_config: Config of the model, as it is saved with the weights.
        data: Tokenizer, samples, and their order.
        model: Model on the meta device. An engine fills it later.
        adapter: Adapter in ``model``, or None if the model itself is trained.
        published_names: Names and shapes that the tensors of ``model`` have in published
            checkpoints, such as the files of the base model.
        vocabulary_size_before_growth: Number of embedding rows before ``data.added_tokens``. None
            if no rows were added.
        architecture: Name of the class of ``model``, before a strategy wraps it.
        num_parameters: Number of parameters of ``model``. Tied parameters are counted once.
        num_trained_parameters: Number of trained parameters.
        frozen_description: Description of the frozen parameters that do not affect the loss on
            text. Empty if there are none, or if the run trains an adapter.
        flops_per_token: FLOPs of the forward and backward pass per token, counted as in the PaLM
            paper.
        batch_plan: Division of a global batch into the micro-batches of this rank.
        steps: Length of the schedule in optimizer steps.
        end_step: Last step of this launch.
        schedule: Function that returns the learning rate of a step, counted from 0.
        metrics: Metrics of an evaluation.
        best_tracker: Tracker for best checkpoints and early stopping, or None if both are off.
        reference_digest: Digest of the loss's reference weights, or None if it has none.
        notes: Notes and warnings for the user, one line each.
    """

    resolved: ResolvedRun
    config: RunConfig
    backend: Backend
    model_config: PretrainedConfig
    data: RunData
    model: PreTrainedModel
    adapter: Adapter | None
    published_names: PublishedNames
    vocabulary_size_before_growth: int | None
    architecture: str
    num_parameters: int
    num_trained_parameters: int
    frozen_description: str
    flops_per_token: float
    batch_plan: BatchPlan
    steps: int
    end_step: int
    schedule: Schedule
    metrics: MetricSet
    best_tracker: BestTracker | None
    reference_digest: str | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class RestoredRun:
    """Result of the third stage of a run: an engine that is ready to train.

    Created by :func:`portable.run.restore.restore_run`.

    Attributes:
        engine: Engine with its weights, and with the optimizer state if the run resumes.
        progress: Position of the run, which the training loop advances.
        source: Checkpoint to resume from. None if the run is new.
        adopted: Contents of ``source`` if another program wrote it, otherwise None.
        setting_changes: Settings that differ from the settings of the checkpoint. Always empty on
            ranks other than 0, and if another program wrote the checkpoint.
    """

    engine: Engine
    progress: RunProgress
    source: AnyPath | None = None
    adopted: AdoptedCheckpoint | None = None
    setting_changes: tuple[SettingChange, ...] = ()
