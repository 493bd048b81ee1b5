"""When a run saves a checkpoint, and what the checkpoint contains besides the shards.

:meth:`portable.callbacks.Run.finish_step` requests a save after a step if ``checkpoint.every_steps`` or
``checkpoint.every_epochs`` is due (:attr:`portable.callbacks.Run.save_is_due`), if a callback or an
evaluation requests it, and after the last step of a launch. The callback in this module then writes the
trainer state and the files of the model. :mod:`portable.checkpoint.store` completes the checkpoint and
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
from portable.ranks.collectives import agree
from portable.run.custom_code import compute_code_digests

if TYPE_CHECKING:
    from pathlib import Path

    from portable.backend import Engine
    from portable.callbacks import Run
    from portable.checkpoint.store import Checkpoints
    from portable.progress import Progress
    from portable.ranks.watchdog import Watchdog
    from portable.run.stages import Prepared


ADAPTER = "adapter"
"""Key in the metadata of a checkpoint for the identity of the adapter."""
REFERENCE = "reference"
"""Key in the metadata of a checkpoint for the digest of the weights that the loss compares with."""


def save(prepared: Prepared, checkpoints: Checkpoints[Any], engine: Engine, progress: Progress) -> None:
    """Save a checkpoint. Must be called on all ranks.

    If ``checkpoint.async`` is set, training continues while the files are written in the background.

    Args:
        prepared: The run.
        checkpoints: Checkpoints of the run.
        engine: Engine of this rank.
        progress: Position of the run, which is saved with the checkpoint.

    Raises:
        UserError: If the ranks have read different parts of ``data.stream``.
        RunError: If this or the previous save fails.
    """
    config, backend = prepared.config, prepared.backend
    background = config.checkpoint.async_
    train = prepared.data.train
    if prepared.data.streams:  # every rank has read the samples before the last step
        consumed = train.digest_consumed(max(0, progress.samples - config.train.global_batch_size))
        agree(backend, {"the parts of data.stream that were read": consumed})
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
            "skipped_steps": progress.skipped,
            "code": compute_code_digests(config),
            "standing": progress.eval_history.to_json(),
            "evaluation_data": dict(prepared.data.eval_fingerprints),
            **({} if prepared.reference is None else {REFERENCE: prepared.reference}),
            **({"streams": json.dumps(train.state_dict())} if prepared.data.streams else {}),
            **({} if prepared.adapter is None else {ADAPTER: prepared.adapter.identity}),
        },
    )
    checkpoints.begin(
        backend,
        state,
        lambda folder: engine.save(folder, background=background),
        partial(write_model_files, prepared),
    )
    if not background:
        checkpoints.finish()


class Saving(Callback):
    """Callback that saves checkpoints.

    Args:
        run: The run that owns this callback.
        watchdog: Watchdog, which is paused during a save.
    """

    def __init__(self, run: Run, watchdog: Watchdog) -> None:
        self._saved = run.step
        self._watchdog = watchdog
        run.checkpoints.on_complete = partial(run.call, "handle_completed_checkpoint")

    def log_step(self, run: Run) -> None:
        """Finish a background save that has ended, so that its failure is reported soon."""
        run.checkpoints.finish_if_written()

    def save_step(self, run: Run) -> None:
        """Save a checkpoint, unless this step is already saved or has values that are not finite.

        Raises:
            RunError: If the weights are not finite, too many updates were skipped, or the save fails.
        """
        run.health.check(run)
        if run.step <= self._saved:
            return
        run.health.check_state(run)
        with run.pause():
            with self._watchdog.pause():
                save(run.prepared, run.checkpoints, run.engine, run.progress)
            run.call("on_save")
        self._saved = run.step

    def on_end(self, run: Run) -> None:
        """Wait for the last save, and retry it if the object store is unavailable."""
        run.checkpoints.finish(last=True)
        run.backend.barrier()  # no rank ends before rank 0 has renamed the checkpoint's folder


def write_model_files(prepared: Prepared, folder: Path) -> None:
    """Write the files that ``from_pretrained`` needs besides the weights. Only called on rank 0.

    Args:
        prepared: The run.
        folder: Folder of the checkpoint.
    """
    if prepared.adapter is not None:
        prepared.adapter.write_config(folder)
    else:
        config = prepared.model_config
        config.architectures = [prepared.architecture]
        config.dtype = torch.float32  # dtype of the saved weights
        config.save_pretrained(folder)
        prepared.names.write_record(folder)
    generation = getattr(prepared.model, "generation_config", None)
    if generation is not None:
        try:
            generation.save_pretrained(folder)
        except ValueError:  # the config of the base model has settings that contradict each other
            generation.to_json_file(folder / "generation_config.json")
    prepared.data.tokenizer.save_pretrained(folder)
    if prepared.adapter is None:
        data = prepared.config.data
        copies_tokenizer = data.tokenizer is None and data.chat_template is None and not data.added_tokens
        prepared.names.write_small_files(folder, tokenizer=copies_tokenizer)
