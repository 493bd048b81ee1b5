"""Restore a run: build the engine, and load its weights or a checkpoint."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

from portable.checkpoint.trainer_state import TrainerState
from portable.config import find_changes
from portable.config.changed_settings import is_allowed_in_new_folder
from portable.converters import CheckpointError, open_checkpoint
from portable.converters.storage.path_or_url import resolve_links
from portable.errors import DamagedError, RunError, UserError, to_one_line
from portable.evaluation.best_tracker import EvalHistory
from portable.model.freezing import set_frozen_dtypes
from portable.model.initialize import InitialWeights
from portable.model.unused_parameters import get_unreached_names
from portable.node_folder import remove_shared_files, write_once_per_node
from portable.paths import convert_storage_errors, read_json_file
from portable.progress import RunProgress
from portable.ranks.collectives import check_ranks_agree
from portable.run.checkpointing import ADAPTER_KEY, REFERENCE_DIGEST_KEY
from portable.run.custom_code import compare_custom_code, compute_custom_code_digests
from portable.run.stages import RestoredRun
from portable.terminal import print_status

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from portable.backend import Backend, Engine
    from portable.checkpoint.resume_external import AdoptedCheckpoint
    from portable.checkpoint.store import CheckpointStore
    from portable.config.changed_settings import SettingChange
    from portable.converters import Checkpoint
    from portable.converters.storage.path_or_url import AnyPath
    from portable.data.samples.base import Samples
    from portable.model.pretrained import PretrainedWeights
    from portable.model.weight_sources import ReadableTensor
    from portable.run.stages import PreparedRun


def restore_run(
    prepared: PreparedRun, source: AnyPath | None, checkpoints: CheckpointStore[Any] | None = None
) -> RestoredRun:
    """Build the engine and load its weights. A collective call.

    Args:
        prepared: The run.
        source: Checkpoint to resume from, possibly written by another program. None for a new run.
        checkpoints: Checkpoints in the output folder. If ``source`` is one of them and is damaged, it
            is renamed, and an older one is used. None to use only ``source``.

    Returns:
        The engine, and the position of the run to continue from.

    Raises:
        UserError: If ``source`` does not belong to this run.
        DamagedError: If ``source`` and all older checkpoints are damaged.
        RunError: If only another rank could not read ``source``.
    """
    try:
        restored = _build_and_load_engine(prepared, source, checkpoints)
        if source is not None:
            # Otherwise a fast rank would remove a file that a slow rank of its node has not opened, and the
            # slow rank would write the file again.
            prepared.backend.barrier()
        return restored
    finally:
        remove_shared_files()  # because they are large


def _build_and_load_engine(
    prepared: PreparedRun, source: AnyPath | None, checkpoints: CheckpointStore[Any] | None
) -> RestoredRun:
    """Build the engine, and load the newest checkpoint that all ranks can read. See :func:`restore_run`.

    A collective call. If ``source`` is None, the engine starts from the initial weights. If ``source``
    is a damaged checkpoint of this run, older checkpoints are tried, and rank 0 marks the damaged ones.

    Raises:
        DamagedError: If a checkpoint is damaged and no older one remains.
        RunError: If only other ranks could not read the checkpoint.
    """
    backend = prepared.backend
    if source is None and prepared.adapter is not None:
        prepared.adapter.check_source_adapter()
    samples_to_precompute = _find_samples_to_precompute(prepared)
    blueprint, pretrained = None, None
    if source is None or samples_to_precompute:
        blueprint = _build_blueprint(prepared)
        pretrained = _load_pretrained_weights(prepared, blueprint)
    if source is None:
        assert blueprint is not None
        engine = _build_engine(prepared, dict if pretrained is None else lambda: pretrained.tensors)
        _start_from_initial_weights(engine, blueprint, pretrained, prepared, samples_to_precompute)
        return RestoredRun(engine, RunProgress(0, 0))
    own_checkpoints = (
        [folder for _, folder in reversed(checkpoints.list_complete())] if checkpoints is not None else []
    )
    external = (
        None if source in own_checkpoints else _adopt_external(prepared, source)
    )  # before the engine is built, because it may raise
    candidates = own_checkpoints[own_checkpoints.index(source) :] if source in own_checkpoints else [source]
    read_stored_tensors = (
        partial(_read_newest_tensors, candidates, backend)
        if external is None
        else lambda: external.checkpoint.tensors
    )
    engine = _build_engine(prepared, read_stored_tensors)
    if blueprint is not None:
        _start_from_initial_weights(engine, blueprint, pretrained, prepared, samples_to_precompute)
    damaged: list[tuple[AnyPath, DamagedError | None]] = []
    for candidate in candidates:
        outcome: RunProgress | DamagedError
        try:
            # Compared as text, because one may be a folder and the other a URL.
            same_folder = str(resolve_links(candidate)).startswith(
                f"{resolve_links(prepared.resolved.output_place)}/"
            )
            outcome = load_checkpoint(engine, candidate, external, prepared, same_folder=same_folder)
        except DamagedError as error:
            outcome = error
        # A rank reads only its own shards, so it only notices damage of these.
        unreadable = backend.reduce_any(isinstance(outcome, DamagedError))
        if not unreadable and isinstance(outcome, RunProgress):
            if checkpoints is not None and backend.rank == 0:
                _set_damaged_aside(damaged, checkpoints, candidate)
            return RestoredRun(
                engine, outcome, candidate, external, _find_changed_settings(candidate, external, prepared)
            )
        damaged.append((candidate, outcome if isinstance(outcome, DamagedError) else None))
    raise damaged[0][1] or RunError(
        f"checkpoint.resume: another rank could not read {source}; read the error message of that rank"
    )


def _find_samples_to_precompute(prepared: PreparedRun) -> list[Samples]:
    """Find the datasets for which the loss's precomputed values are missing. A collective call.

    Empty if the loss has no precomputed values. See :mod:`portable.run.precompute`.
    """
    if prepared.config.train.loss is None:
        return []
    from portable.run.precompute import find_samples_to_precompute

    return find_samples_to_precompute(prepared)


def _start_from_initial_weights(
    engine: Engine,
    blueprint: InitialWeights,
    pretrained: PretrainedWeights | None,
    prepared: PreparedRun,
    samples_to_precompute: list[Samples],
) -> None:
    """Load the weights that the run starts from, and precompute the missing values that depend on them.

    Args:
        engine: Engine to fill.
        blueprint: Recorded initialization of the model.
        pretrained: Pretrained weights. If None, the weights are random.
        prepared: The run.
        samples_to_precompute: Samples whose values are missing. See :mod:`portable.run.precompute`.
    """
    _load_start_weights(engine, blueprint, pretrained, prepared)
    if prepared.adapter is not None:
        engine.load_weights(
            prepared.adapter.get_initial_values({} if pretrained is None else pretrained.tensors)
        )
    if samples_to_precompute:
        from portable.run.precompute import precompute_columns

        precompute_columns(prepared, engine, samples_to_precompute)


def _build_engine(prepared: PreparedRun, read_tensors: Callable[[], Mapping[str, Any]]) -> Engine:
    """Build the engine of the run. Frozen parameters keep the dtypes in which they are stored.

    Args:
        prepared: The run.
        read_tensors: Function that returns the stored tensors, keyed by name. Only called if parameters
            are frozen.
    """
    if prepared.config.train.has_frozen_patterns or (
        prepared.adapter is None and get_unreached_names(prepared.model)
    ):
        set_frozen_dtypes(prepared.model, read_tensors(), prepared.config.precision)
    return prepared.backend.build_engine(prepared.model, prepared.config)


def _read_newest_tensors(candidates: Sequence[AnyPath], backend: Backend) -> Mapping[str, Any]:
    """Return the tensors of the newest readable checkpoint, or an empty dict if there is none.

    The caller only needs the dtypes, which are the same in all checkpoints of a run.
    """
    for candidate in candidates:
        try:
            return _open_own_checkpoint(candidate, backend).tensors
        except CheckpointError:  # `load_checkpoint` reports it
            continue
    return {}


def _open_own_checkpoint(source: AnyPath, backend: Backend) -> Checkpoint:
    """Open a checkpoint of this program for reading this rank's part of it."""
    rank = backend.rank, backend.world_size
    return open_checkpoint(
        source, rank=rank, build_once=write_once_per_node if backend.world_size > 1 else None
    )


def _set_damaged_aside(
    damaged: list[tuple[AnyPath, DamagedError | None]],
    checkpoints: CheckpointStore[Any],
    used_checkpoint: AnyPath,
) -> None:
    """Rename the damaged checkpoints, and print a warning about each. Only called on rank 0.

    Args:
        damaged: Damaged checkpoints, each with the error of this rank. None if only another rank
            failed.
        checkpoints: Checkpoints of the run.
        used_checkpoint: Checkpoint that the run continues from.
    """
    for folder, reason in damaged:
        aside = checkpoints.mark_damaged(folder)
        why = to_one_line(reason or "another rank could not read it")
        print_status(f"warning: {why}; set aside as {aside}, continuing from {used_checkpoint}")


def _adopt_external(prepared: PreparedRun, source: AnyPath) -> AdoptedCheckpoint | None:
    """Open a checkpoint written by another program, and match it to the run. A collective call.

    Returns:
        The matched checkpoint, or None if this program wrote ``source``.
    """
    from portable.checkpoint.external import open_external_for_model
    from portable.checkpoint.resume_external import adopt_external_checkpoint

    backend, config = prepared.backend, prepared.config
    adopted, error = None, None
    try:
        build_file_once = write_once_per_node if backend.world_size > 1 else None
        external = open_external_for_model(
            source, prepared.model, prepared.adapter, build_once=build_file_once
        )
        if external is not None:
            adopted = adopt_external_checkpoint(external, config, prepared.model, prepared.schedule)
    except UserError as refusal:
        error = refusal
    if backend.reduce_any(error is not None):
        raise error or RunError(
            f"checkpoint.resume: another rank could not read {source}; read the error message of that rank"
        )
    if adopted is not None:
        check_ranks_agree(backend, {f"the position of {source.name}": [adopted.step, adopted.samples]})
        if backend.rank == 0:
            for warning in adopted.warnings:
                print_status(f"warning: {warning}")
    return adopted


def load_checkpoint(
    engine: Engine,
    source: AnyPath,
    adopted: AdoptedCheckpoint | None,
    prepared: PreparedRun,
    *,
    same_folder: bool = True,
) -> RunProgress:
    """Load a checkpoint into ``engine``.

    Args:
        engine: Engine to fill.
        source: The checkpoint.
        adopted: Contents of the checkpoint if another program wrote it, otherwise None.
        prepared: The run.
        same_folder: Whether the checkpoint belongs to the run in ``output_dir``. A run that continues a
            checkpoint from another folder may change more settings, and also the data.

    Returns:
        The position of the run to continue from.

    Raises:
        DamagedError: If a file of the checkpoint is damaged.
        UserError: If the checkpoint belongs to another run of this program.
    """
    try:
        with convert_storage_errors("checkpoint.resume"):  # such errors do not mean that it is damaged
            if adopted is not None:
                if prepared.adapter is not None:
                    blueprint = _build_blueprint(prepared)
                    _load_start_weights(
                        engine, blueprint, _load_pretrained_weights(prepared, blueprint), prepared
                    )
                engine.load_checkpoint(adopted.checkpoint)
                return RunProgress(adopted.step, adopted.samples)
            rank_and_world_size = prepared.backend.rank, prepared.backend.world_size
            checkpoint = _open_own_checkpoint(source, prepared.backend)
            state = TrainerState.read(checkpoint.root)
            warning = state.verify_files(checkpoint.root, *rank_and_world_size)
            if warning is not None and prepared.backend.rank == 0:
                print_status(f"warning: {warning}")
            changes = find_changes(state.run, prepared.config.fingerprint())
            for change in changes:
                if not (change.is_adjustable or (not same_folder and is_allowed_in_new_folder(change))):
                    raise UserError(
                        f"checkpoint.resume: {source} belongs to another run ({change}); set "
                        f"{change.setting} to the value of that run, or set checkpoint.resume: never"
                    )
            changed_loss = any(change.setting == "train.loss" for change in changes)
            _check_custom_code(source, state, prepared, changed_loss=changed_loss)
            same_data = state.data == prepared.data.fingerprint
            if not same_data and same_folder:
                raise UserError(
                    f"checkpoint.resume: {source} was trained on other tokens, or in other proportions, "
                    f"than {prepared.data.sizes.source} here; use the same files, tokenizer, template and "
                    "data.train_on, or choose another output_dir and start from this run with "
                    f"--checkpoint.resume {source}"
                )
            if not same_data:
                _check_vocabulary(source, prepared)
            if (
                not changed_loss
                and state.metadata.get(REFERENCE_DIGEST_KEY, prepared.reference_digest)
                != prepared.reference_digest
            ):
                raise UserError(
                    f"checkpoint.resume: {source} was trained with another reference model: the reference "
                    f"weights of {prepared.config.train.loss} have changed; restore these weights, or "
                    "choose another output_dir"
                )
            if prepared.adapter is not None:  # the checkpoint only contains the adapter
                prepared.adapter.check_stored_identity(state.metadata.get(ADAPTER_KEY), source)
                blueprint = _build_blueprint(prepared)
                _load_start_weights(
                    engine, blueprint, _load_pretrained_weights(prepared, blueprint), prepared
                )
            engine.load_checkpoint(checkpoint)
            prepared.published_names.adopt_recorded_rules(checkpoint)
            if prepared.data.stream_names and same_data:
                try:
                    prepared.data.train.load_state_dict(json.loads(state.metadata.get("streams", "{}")))
                except (TypeError, ValueError, AttributeError) as error:
                    raise DamagedError(
                        f"{source}: the manifest is damaged ({to_one_line(error)}); use an older checkpoint"
                    ) from error
    except CheckpointError as error:
        raise DamagedError(f"checkpoint.resume: {error}") from error
    if same_folder:
        return RunProgress(state.step, state.samples, state.skipped_steps, state.eval_history)
    return _compute_start_progress(
        source, state, prepared, is_changed=bool(changes) or not same_data, is_same_data=same_data
    )


def _compute_start_progress(
    source: AnyPath, state: TrainerState, prepared: PreparedRun, *, is_changed: bool, is_same_data: bool
) -> RunProgress:
    """Compute the start position of a run that continues from another run's checkpoint.

    Args:
        source: Checkpoint of the other run.
        state: Its trainer state.
        prepared: The run that starts from it.
        is_changed: Whether the runs differ in settings or data.
        is_same_data: Whether both runs have the same samples in the same order.

    Returns:
        The position. If the data differs, it is at the first sample, unless
        ``checkpoint.resume_samples`` is set.

    Raises:
        UserError: If the settings, the data or the start step differ, and no step is left to train.
    """
    settings = prepared.config.checkpoint
    step = state.step if settings.resume_step is None else settings.resume_step
    samples = state.samples if is_same_data else 0
    samples = samples if settings.resume_samples is None else settings.resume_samples
    if (is_changed or step != state.step) and step >= prepared.end_step:
        raise UserError(
            f"checkpoint.resume: {source} is at step {step}, but this run ends after step "
            f"{prepared.end_step}; raise train.steps (or train.stop_after), or set checkpoint.resume_step "
            "to 0 to restart the schedule"
        )
    return RunProgress(
        step, samples, state.skipped_steps, EvalHistory() if is_changed else state.eval_history
    )


def _find_changed_settings(
    source: AnyPath, external: AdoptedCheckpoint | None, prepared: PreparedRun
) -> tuple[SettingChange, ...]:
    """Find the settings of the run that differ from the settings of the checkpoint ``source``.

    Empty if another program wrote the checkpoint, and on ranks other than 0.
    """
    if external is not None or prepared.backend.rank != 0:
        return ()
    return tuple(find_changes(TrainerState.read(source).run, prepared.config.fingerprint()))


def _check_vocabulary(source: AnyPath, prepared: PreparedRun) -> None:
    """Raise UserError if the tokenizers of the checkpoint and the run assign different ids to tokens."""
    try:
        stored = read_json_file(source / "tokenizer.json")["model"]["vocab"]
        vocabulary = json.loads(prepared.data.tokenizer.backend_tokenizer.to_str())["model"]["vocab"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # not a fast tokenizer
        return
    if stored != json.loads(json.dumps(vocabulary)):
        raise UserError(
            f"checkpoint.resume: {source} was trained with another tokenizer, so its embeddings belong to "
            f"other tokens; set data.tokenizer: {source}"
        )


def _check_custom_code(
    source: AnyPath, state: TrainerState, prepared: PreparedRun, *, changed_loss: bool
) -> None:
    """Check that the custom code is the same as at the checkpoint. Harmless changes only print a note.

    Args:
        source: The checkpoint.
        state: Trainer state of the checkpoint.
        prepared: The run.
        changed_loss: Whether the setting ``train.loss`` itself has changed, so that its code may
            differ.

    Raises:
        UserError: If code that affects training has changed, such as the model or the loss.
    """
    affecting_training, harmless = compare_custom_code(
        state.metadata.get("code", {}), compute_custom_code_digests(prepared.config)
    )
    affecting_training = [key for key in affecting_training if key != "train.loss" or not changed_loss]
    if affecting_training:
        raise UserError(
            f"checkpoint.resume: {source} was trained with other code of {affecting_training[0]}; restore "
            "that code, or choose another output_dir"
        )
    if harmless and prepared.backend.rank == 0:
        print_status(f"note: the code of {', '.join(harmless)} has changed since {source}")


def _build_blueprint(prepared: PreparedRun) -> InitialWeights:
    """Return the recorded initialization of the model or, with an adapter, of its base model."""
    if prepared.adapter is not None:
        return prepared.adapter.blueprint
    return InitialWeights.from_model(prepared.model, prepared.config.model.function)


def _load_pretrained_weights(prepared: PreparedRun, blueprint: InitialWeights) -> PretrainedWeights | None:
    """Open the pretrained weights, or return None if the model starts from random weights."""
    settings = prepared.config.model
    if settings.from_scratch:
        return None
    from portable.model.pretrained import load_pretrained_weights

    return load_pretrained_weights(settings, blueprint.model, prepared.vocabulary_size_before_growth)


def _load_start_weights(
    engine: Engine, blueprint: InitialWeights, pretrained: PretrainedWeights | None, prepared: PreparedRun
) -> None:
    """Load the weights that the run starts from. With an adapter, load the base model's weights.

    Args:
        engine: Engine to fill.
        blueprint: Recorded initialization of the model or base model.
        pretrained: Pretrained weights. Missing ones, such as a new head, are initialized at random.
            None to initialize all weights at random.
        prepared: The run.
    """
    config, adapter = prepared.config, prepared.adapter

    def load_weights(weights: Mapping[str, ReadableTensor]) -> None:
        engine.load_weights(weights if adapter is None else adapter.map_base_weights(weights))

    def draw_weights() -> Mapping[str, ReadableTensor]:
        weights = blueprint.build_lazy_weights(config.seed)
        if blueprint.recording_failure is not None and prepared.backend.rank == 0:
            print_status(
                "note: every rank computes the initial weights of the complete model, because its "
                f"construction cannot be recorded ({blueprint.recording_failure})"
            )
        return weights

    if pretrained is None:
        load_weights(draw_weights())
        return
    if adapter is not None:
        adapter.check_missing_base_weights(pretrained.missing)
    if prepared.backend.rank == 0:
        names = prepared.published_names
        notes = [] if adapter is not None else names.build_base_tensor_notes(reported=pretrained.unexpected)
        for note in (*pretrained.build_notes(), *notes):
            print_status(note)
    if pretrained.missing:
        # If weights are missing, such as a new head, initialize them and then load the others.
        missing = set(pretrained.missing)
        load_weights({name: weight for name, weight in draw_weights().items() if name in missing})
    load_weights(pretrained.tensors)
