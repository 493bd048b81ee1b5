"""What a checkpoint of a run holds beside the shards: the trainer state and the model's own files."""

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
"""The key in a checkpoint's metadata of what the adapter belongs to."""
REFERENCE = "reference"
"""The key of a digest of the weights that the loss compares with."""


def save(prepared: Prepared, checkpoints: Checkpoints[Any], engine: Engine, progress: Progress) -> None:
    """Save a checkpoint, in the background where the config says so; all ranks call it."""
    config, backend = prepared.config, prepared.backend
    background = config.checkpoint.async_
    train = prepared.data.train
    if prepared.data.streams:  # every rank has read up to the last step
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
        run.checkpoints.finish_if_written()

    def save_step(self, run: Run) -> None:
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
        run.checkpoints.finish(last=True)
        run.backend.barrier()  # no rank ends before rank 0 has renamed the checkpoint's folder


def write_model_files(prepared: Prepared, folder: Path) -> None:
    """Write what ``from_pretrained`` needs besides the weights."""
    if prepared.adapter is not None:
        prepared.adapter.write_config(folder)
    else:
        config = prepared.model_config
        config.architectures = [prepared.architecture]
        config.dtype = torch.float32  # of the weights beside it, whatever they were loaded from
        config.save_pretrained(folder)
        prepared.names.write_record(folder)
    generation = getattr(prepared.model, "generation_config", None)
    if generation is not None:
        try:
            generation.save_pretrained(folder)
        except ValueError:  # it contradicts itself, as it did where it came from
            generation.to_json_file(folder / "generation_config.json")
    prepared.data.tokenizer.save_pretrained(folder)
    if prepared.adapter is None:
        data = prepared.config.data
        copies_tokenizer = data.tokenizer is None and data.chat_template is None and not data.added_tokens
        prepared.names.write_small_files(folder, tokenizer=copies_tokenizer)
