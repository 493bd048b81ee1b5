"""What the stages of a run make: values, which every later stage reads and none changes."""

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
    from portable.converters.storage.path_or_url import Place
    from portable.data.dataset import Data
    from portable.evaluation.best_tracker import BestTracker
    from portable.evaluation.metrics import MetricSet
    from portable.model.published_names import PublishedNames
    from portable.optim.schedule import Schedule
    from portable.output.existing_run import ExistingRun
    from portable.progress import Progress
    from portable.registry import World


@dataclass(frozen=True)
class Resolved:
    """A run as it will be trained.

    Attributes:
        config: with ``backend: auto`` and what a DeepSpeed JSON says resolved. ``precision`` stays ``auto``
            where only a rank may open the device to find out: see
            :func:`portable.run.resolve.resolve_precision`.
        place: what ``output_dir`` names.
        existing: the run that ``place`` held already.
        world: the ranks of this launch.
        unset: Settings that this launch does not set and takes from the existing run, by key. Only those that
            would otherwise differ.
    """

    config: RunConfig
    place: Place
    existing: ExistingRun
    world: World
    unset: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Prepared:
    """What every later stage reads.

    Attributes:
        resolved: what the launcher resolved.
        config: the same with the micro-batch that ``auto`` came to.
        backend: of this rank.
        model_config: as it is saved with the weights.
        data: tokenizer, samples and their order.
        model: on the meta device until an engine fills it.
        adapter: in ``model``; None if all of it is trained.
        names: Names and shapes of the tensors of ``model`` in published files.
        grown_from: the rows of its vocabulary before ``data.added_tokens``; None if it has not grown.
        architecture: class of ``model``, before anything wraps it.
        parameters: of ``model``, tied ones counted once.
        trained: how many of them are trained.
        frozen: Description of the parts that text does not reach. Empty if there are none.
        flops_per_token: forward and backward, as the PaLM paper counts.
        plan: how this rank goes through a global batch.
        steps: length of the schedule.
        until: the step at which this launch ends.
        schedule: learning rate by step.
        metrics: the metrics of an evaluation.
        best_tracker: compares evaluations; None if nothing follows from them.
        reference: a digest of the weights that the loss compares with; None without such.
        notes: what may surprise the user, one line each.
    """

    resolved: Resolved
    config: RunConfig
    backend: Backend
    model_config: PretrainedConfig
    data: Data
    model: PreTrainedModel
    adapter: Adapter | None
    names: PublishedNames
    grown_from: int | None
    architecture: str
    parameters: int
    trained: int
    frozen: str
    flops_per_token: float
    plan: BatchPlan
    steps: int
    until: int
    schedule: Schedule
    metrics: MetricSet
    best_tracker: BestTracker | None
    reference: str | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Restored:
    """A model ready to train.

    Attributes:
        engine: with its weights, and its optimizer's state where there is any.
        progress: the position of the run; the training loop moves it on.
        source: the checkpoint it comes from; None for a new run.
        external: what ``source`` holds, where another program wrote it.
        changes: Settings that differ from the checkpoint's.
    """

    engine: Engine
    progress: Progress
    source: Place | None = None
    external: AdoptedCheckpoint | None = None
    changes: tuple[SettingChange, ...] = ()
