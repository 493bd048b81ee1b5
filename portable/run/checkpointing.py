"""Save checkpoints: save when a step requires it, and write the model files.

:meth:`portable.callbacks.Run.finish_step` requests a save in three cases:
``checkpoint.every_steps`` or ``checkpoint.every_epochs`` is due
(:attr:`portable.callbacks.Run.is_save_due`), a callback or an evaluation requests a save
or the end of the run, or the launch ends after this step, for example because of a
signal. :class:`CheckpointCallback` then saves. The engine writes the shards, and this
module builds the trainer state and writes the model files. Finally,
:mod:`portable.checkpoint.store` writes the trainer state, completes the checkpoint and
deletes old ones.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from portable.callbacks import Callback
from portable.checkpoint.trainer_state import TrainerState
from portable.model.freezing import COMPUTE_DTYPES
from portable.ranks.collectives import check_ranks_agree
from portable.run.custom_code import compute_custom_code_digests

if TYPE_CHECKING:
    from pathlib import Path

    from portable.backend import Engine
    from portable.callbacks import Run
    from portable.checkpoint.store import CheckpointStore
    from portable.progress import RunProgress
    from portable.ranks.watchdog import Watchdog
    from portable.run.stages import PreparedRun


ADAPTER_KEY = "adapter"
"""Key in the metadata of a checkpoint for the identity of the adapter."""
REFERENCE_DIGEST_KEY = "reference"
"""Key in the metadata of a checkpoint for the digest of the loss's reference weights."""


def save_checkpoint(
    prepared: PreparedRun, checkpoints: CheckpointStore[Any], engine: Engine, progress: RunProgress
) -> None:
    """Save a checkpoint. Must be called on all ranks.

    If ``checkpoint.async`` is set, training continues while the files are written in the
    background. An error in the background is raised by a later call that finishes the save.

    Args:
        prepared: The run.
        checkpoints: Checkpoints of the run.
        engine: Engine of this rank.
        progress: Position of the run, which is saved with the checkpoint.

    Raises:
        UserError: If the ranks have read different parts of ``data.stream``.
        RunError: If the previous save failed, or if this save fails before this function
            returns.
    """
    config, backend = prepared.config, prepared.backend
    background = config.checkpoint.async_
    train = prepared.data.train
    # Some ranks may have read further, but each rank has read the samples before the last step.
    if prepared.data.stream_names:
        consumed = train.compute_consumed_digest(max(0, progress.samples - config.train.global_batch_size))
        check_ranks_agree(backend, {"the parts of data.stream that were read": consumed})
    state = TrainerState(
        step=progress.step,
        samples=progress.samples,
        seed=config.seed,
        schedule={"kind": config.train.schedule, **asdict(prepared.schedule)},
        run=config.fingerprint(),
        backend=backend.name,
        strategy=config.strategy,
        world_size=backend.world_size,
        data=prepared.data.fingerprint,
        metadata={
            "skipped_steps": progress.skipped_updates,
            "code": compute_custom_code_digests(config),
            "standing": progress.eval_history.to_json(),
            "evaluation_data": dict(prepared.data.eval_fingerprints),
            **(
                {} if prepared.reference_digest is None else {REFERENCE_DIGEST_KEY: prepared.reference_digest}
            ),
            **({"streams": json.dumps(train.state_dict())} if prepared.data.stream_names else {}),
            **({} if prepared.adapter is None else {ADAPTER_KEY: prepared.adapter.identity}),
        },
    )
    checkpoints.begin_save(
        backend,
        state,
        lambda folder: engine.save_shards(folder, background=background),
        partial(write_model_files, prepared),
    )
    if not background:
        checkpoints.finish_save()


class CheckpointCallback(Callback):
    """Callback that saves checkpoints.

    The constructor sets ``run.checkpoints.on_complete``. As a result, rank 0 passes each completed
    checkpoint to ``handle_completed_checkpoint`` of all callbacks.

    Args:
        run: The run that owns this callback.
        watchdog: Watchdog to pause during a save.
    """

    def __init__(self, run: Run, watchdog: Watchdog) -> None:
        self._last_saved_step = run.step
        self._watchdog = watchdog
        run.checkpoints.on_complete = partial(run.call_callbacks, "handle_completed_checkpoint")

    def log_step(self, run: Run) -> None:
        """Finish the background save if it has ended, without waiting for it.

        This hook runs at each logged step. Otherwise, a failed save would be reported only when the
        next save begins or the run ends.

        Raises:
            RunError: If the save failed.
        """
        run.checkpoints.finish_save_if_written()

    def save_step(self, run: Run) -> None:
        """Save a checkpoint of the current step, unless this step is already saved.

        After the save has begun, ``on_save`` of all callbacks is called. Skipped updates are
        reported even if the step is already saved. The step at which the launch started counts as
        saved.

        Raises:
            RunError: If the weights or optimizer values are not finite, too many updates were
                skipped, or the save fails.
            UserError: If the ranks have read different parts of ``data.stream``, or if a custom
                callback fails.
        """
        run.health.report_skipped_updates(run)
        if run.step <= self._last_saved_step:
            return
        run.health.check_state_is_finite(run)
        with run.measure_pause():
            with self._watchdog.pause():
                save_checkpoint(run.prepared, run.checkpoints, run.engine, run.progress)
            run.call_callbacks("on_save")
        self._last_saved_step = run.step

    def on_end(self, run: Run) -> None:
        """Wait for all ranks and the last save. If the object store is unavailable, retry the save.

        Raises:
            RunError: If the save failed, or if the object store was unavailable for too long.
        """
        run.checkpoints.finish_save(is_last_save=True)
        run.backend.barrier()  # no rank ends before rank 0 has renamed the checkpoint's folder


def write_model_files(prepared: PreparedRun, folder: Path) -> None:
    """Write the files that ``from_pretrained`` needs in addition to the weights.

    The files are the model config, the generation config, the tokenizer, and files copied from the
    base model. If the run trains an adapter, the config of the adapter is written instead of the
    model config, and no files are copied. Otherwise, ``architectures`` and ``dtype`` of
    ``prepared.model_config`` are set in place. Only called on rank 0. During a save, this function
    runs in the background thread.

    Args:
        prepared: The run.
        folder: Folder of the checkpoint.
    """
    if prepared.adapter is not None:
        prepared.adapter.write_config(folder)
    else:
        model_config = prepared.model_config
        model_config.architectures = [prepared.architecture]
        # dtype of the saved weights
        model_config.dtype = COMPUTE_DTYPES.get(prepared.config.train.master_dtype, torch.float32)
        model_config.save_pretrained(folder)
        prepared.published_names.write_name_record(folder)
    generation = getattr(prepared.model, "generation_config", None)
    if generation is not None:
        try:
            generation.save_pretrained(folder)
        except ValueError:  # the config of the base model has settings that contradict each other
            generation.to_json_file(folder / "generation_config.json")
    prepared.data.tokenizer.save_pretrained(folder)
    if prepared.adapter is None:
        data_settings = prepared.config.data
        copies_tokenizer = (
            data_settings.tokenizer is None
            and data_settings.chat_template is None
            and not data_settings.added_tokens
        )
        prepared.published_names.copy_base_files(folder, tokenizer=copies_tokenizer)
