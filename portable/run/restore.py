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
from portable.converters.storage.store_errors import RemoteError
from portable.errors import DamagedError, RunError, UserError, to_one_line
from portable.evaluation.best_tracker import EvalHistory
from portable.model.freezing import set_frozen_dtypes
from portable.model.initialize import InitialWeights
from portable.model.unused_parameters import get_unreached_names
from portable.node_folder import remove_shared_files, write_once_per_node
from portable.paths import convert_checkpoint_errors, convert_storage_errors, read_json_file
from portable.progress import RunProgress
from portable.ranks.collectives import check_ranks_agree, raise_if_any_rank_failed
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
    """Build the engine and load its weights. Must be called on all ranks.

    Args:
        prepared: Run to start or resume.
        source: Checkpoint to resume from, possibly written by another program. None for a new run.
        checkpoints: Checkpoints in the output folder. If ``source`` is one of these checkpoints and
            is damaged, it is renamed, and an older checkpoint is used. None to use only ``source``.

    Returns:
        The engine, and the position from which the run continues.

    Raises:
        UserError: If ``source`` does not belong to this run. Also raised if the object store
            reports an error.
        DamagedError: If ``source`` and all older checkpoints are damaged, and this rank found the
            damage in ``source``.
        RunError: If the object store is unavailable. Also raised if ``source`` and all older
            checkpoints are damaged, but only other ranks found the damage in ``source``.
        ReportedElsewhereError: If another rank raises a UserError or RunError for a checkpoint that
            is not damaged.
    """
    try:
        with convert_storage_errors("checkpoint.resume"):
            restored = _build_and_load_engine(prepared, source, checkpoints)
        if source is not None:
            # Wait for all ranks. Otherwise, a fast rank would remove a file that a slow rank of its node has
            # not opened yet, and the slow rank would write the file again.
            prepared.backend.barrier()
        return restored
    finally:
        remove_shared_files()  # because they are large


def _build_and_load_engine(
    prepared: PreparedRun, source: AnyPath | None, checkpoints: CheckpointStore[Any] | None
) -> RestoredRun:
    """Build the engine, and load the newest checkpoint that all ranks can read.

    Must be called on all ranks. See :func:`restore_run` for the arguments. If ``source`` is None,
    the engine starts from the initial weights. If ``source`` is a damaged checkpoint of this run,
    older checkpoints are tried. After an older checkpoint has been loaded, rank 0 marks the damaged
    checkpoints. See :func:`_set_damaged_aside`. If the loss needs precomputed values that are not
    in the data cache, the initial weights are loaded first to compute them, even if ``source`` is
    set.

    Raises:
        UserError: If ``source`` does not belong to this run. Also raised if the object store
            reports an error.
        DamagedError: If no checkpoint can be loaded, and this rank found damage in ``source``.
        RunError: If the object store is unavailable. Also raised if no checkpoint can be loaded, and
            only other ranks found damage in ``source``.
        ReportedElsewhereError: If another rank raises a UserError or RunError for a checkpoint that
            is not damaged.
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
        outcome: RunProgress | UserError | RunError
        try:
            # Compared as text, because one may be a folder and the other a URL.
            same_folder = str(resolve_links(candidate)).startswith(
                f"{resolve_links(prepared.resolved.output_place)}/"
            )
            outcome = load_checkpoint(engine, candidate, external, prepared, same_folder=same_folder)
        except (UserError, RunError) as error:
            outcome = error
        # An older checkpoint is only tried if this one is damaged, and not if, for example, the object store
        # is unavailable.
        raise_if_any_rank_failed(None if isinstance(outcome, DamagedError) else outcome)
        # Combine the outcomes of all ranks, because each rank reads only its own shards and does not notice
        # damage to others.
        unreadable = backend.reduce_any(isinstance(outcome, DamagedError))
        if not unreadable and isinstance(outcome, RunProgress):
            if checkpoints is not None and backend.rank == 0:
                _set_damaged_aside(damaged, checkpoints, candidate)
            return RestoredRun(
                engine, outcome, candidate, external, _find_changed_settings(candidate, external, prepared)
            )
        damaged.append((candidate, outcome if isinstance(outcome, DamagedError) else None))
    raise damaged[0][1] or RunError(
        f"checkpoint.resume: another rank could not read {source}; see the error message of that rank"
    )


def _find_samples_to_precompute(prepared: PreparedRun) -> list[Samples]:
    """Find the datasets that still lack the values which the loss precomputes.

    All ranks have to call this function, because it runs collectives. The list is empty if the loss
    does not precompute values. See :mod:`portable.run.precompute`.
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
    """Load the weights that the run starts from, and precompute values that its loss needs.

    A loss may need values that are computed only once for each sample with these weights, for
    example the log-probabilities of a reference model. This function computes the values that are
    not in the data cache yet. See :mod:`portable.run.precompute`.

    Args:
        engine: Engine into which the weights are loaded.
        blueprint: Model on the meta device from which random initial weights are computed.
        pretrained: Pretrained weights. If None, the weights are random.
        prepared: Run to start. It may also be a resumed run whose precomputed values are missing.
        samples_to_precompute: Datasets whose values are not in the data cache. Empty if the loss
            needs no such values.
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
    """Build the engine of the run. Frozen parameters are stored in dtypes that do not round them.

    A frozen parameter keeps the dtype of its stored tensor if this is the compute dtype of the
    run. Otherwise, it gets fp32.

    Args:
        prepared: The run. The dtypes of its model's frozen parameters are changed in place.
        read_tensors: Function that returns the stored tensors, keyed by name. Only called if
            the settings freeze parameters, or if the loss does not reach some parameters and
            the run has no adapter.
    """
    if prepared.config.train.has_frozen_patterns or (
        prepared.adapter is None and get_unreached_names(prepared.model)
    ):
        set_frozen_dtypes(prepared.model, read_tensors(), prepared.config.precision)
    return prepared.backend.build_engine(prepared.model, prepared.config)


def _read_newest_tensors(candidates: Sequence[AnyPath], backend: Backend) -> Mapping[str, Any]:
    """Return the tensors of the newest readable checkpoint, or an empty dict if there is none.

    The caller only needs the dtypes, which are the same in all checkpoints of a run.

    Raises:
        RemoteError: If a request to the object store fails.
    """
    for candidate in candidates:
        try:
            return _open_own_checkpoint(candidate, backend).tensors
        except RemoteError:  # without the dtypes, frozen parameters would be stored in fp32
            raise
        except CheckpointError:  # `load_checkpoint` reports it
            continue
    return {}


def _open_own_checkpoint(source: AnyPath, backend: Backend) -> Checkpoint:
    """Open a checkpoint that this program wrote, to read this rank's part of it."""
    rank = backend.rank, backend.world_size
    return open_checkpoint(
        source, rank=rank, build_once=write_once_per_node if backend.world_size > 1 else None
    )


def _set_damaged_aside(
    damaged: list[tuple[AnyPath, DamagedError | None]],
    checkpoints: CheckpointStore[Any],
    used_checkpoint: AnyPath,
) -> None:
    """Mark checkpoints as damaged, and print a warning about each. Only called on rank 0.

    On a disk, a marked checkpoint is renamed. In an object store, it receives a marker.

    Args:
        damaged: Pairs of a damaged checkpoint and this rank's error. The error is None if only
            another rank could not read the checkpoint.
        checkpoints: Checkpoints of the run.
        used_checkpoint: Checkpoint that the run continues from.
    """
    for folder, reason in damaged:
        aside = checkpoints.mark_damaged(folder)
        why = to_one_line(reason or f"another rank could not read {folder}")
        print_status(
            f"warning: {why}; the checkpoint was set aside as {aside}, and the run continues from "
            f"{used_checkpoint}"
        )


def _adopt_external(prepared: PreparedRun, source: AnyPath) -> AdoptedCheckpoint | None:
    """Open a checkpoint written by another program, and match it to the run. A collective call.

    Returns:
        The matched checkpoint, or None if this program wrote ``source``.

    Raises:
        UserError: If this rank cannot open the checkpoint or match it to the run. Also raised
            if the ranks read different steps or numbers of samples from it.
        RunError: If this rank cannot reach the object store after all retries.
        ReportedElsewhereError: If another rank raises the UserError or RunError.
    """
    from portable.checkpoint.external import open_external_for_model
    from portable.checkpoint.resume_external import adopt_external_checkpoint

    backend, config = prepared.backend, prepared.config
    outcome: AdoptedCheckpoint | UserError | RunError | None = None
    try:
        build_file_once = write_once_per_node if backend.world_size > 1 else None
        external = open_external_for_model(
            source, prepared.model, prepared.adapter, build_once=build_file_once
        )
        if external is not None:
            outcome = adopt_external_checkpoint(external, config, prepared.model, prepared.schedule)
    except (UserError, RunError) as error:
        outcome = error
    adopted = raise_if_any_rank_failed(outcome)
    if adopted is not None:
        check_ranks_agree(backend, {f"step and samples of {source.name}": [adopted.step, adopted.samples]})
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
        engine: Engine that receives the weights and the optimizer state.
        source: Folder or URL of the checkpoint.
        adopted: Contents of the checkpoint if another program wrote it, otherwise None.
        prepared: The run that continues from the checkpoint.
        same_folder: Whether the checkpoint is in the run's own ``output_dir``. If False, the data
            may have changed, and more settings may differ from the checkpoint.

    Returns:
        The progress from which the run continues, such as its step and its position in the data.

    Raises:
        DamagedError: If a file of the checkpoint is damaged.
        UserError: If the checkpoint does not match the run. For example, a setting that must not
            change is different, or custom code has changed. Also raised if the object store reports
            an error.
        RunError: If the object store is unavailable.
    """
    with convert_checkpoint_errors("checkpoint.resume", DamagedError):
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
                    f"checkpoint.resume: {change.key} is {change.before} in {source}, but "
                    f"{change.after} in this run; set {change.setting} to the value in the checkpoint, "
                    "or set checkpoint.resume: never"
                )
        changed_loss = any(change.setting == "train.loss" for change in changes)
        _check_custom_code(source, state, prepared, changed_loss=changed_loss)
        same_data = state.data == prepared.data.fingerprint
        if not same_data and same_folder:
            raise UserError(
                "checkpoint.resume: the tokens, or the proportions of the sources, have changed since "
                f"{source} was saved (this run reads {prepared.data.sizes.source}); use the same files, "
                "source weights, tokenizer, chat template and data.train_on, or choose another output_dir "
                f"and start from this checkpoint with --checkpoint.resume {source}"
            )
        if not same_data:
            _check_vocabulary(source, prepared)
        if (
            not changed_loss
            and state.metadata.get(REFERENCE_DIGEST_KEY, prepared.reference_digest)
            != prepared.reference_digest
        ):
            raise UserError(
                f"checkpoint.resume: the reference weights of {prepared.config.train.loss} have changed "
                f"since {source} was saved; restore the reference weights, or choose another output_dir"
            )
        if prepared.adapter is not None:  # the checkpoint only contains the adapter
            prepared.adapter.check_stored_identity(state.metadata.get(ADAPTER_KEY), source)
            blueprint = _build_blueprint(prepared)
            _load_start_weights(engine, blueprint, _load_pretrained_weights(prepared, blueprint), prepared)
        engine.load_checkpoint(checkpoint)
        prepared.published_names.adopt_recorded_rules(checkpoint)
        if prepared.data.stream_names and same_data:
            try:
                prepared.data.train.load_state_dict(json.loads(state.metadata.get("streams", "{}")))
            except (TypeError, ValueError, AttributeError) as error:
                raise DamagedError(
                    f"{source}: the manifest is damaged ({to_one_line(error)}); use an older checkpoint"
                ) from error
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
        state: Trainer state in ``source``.
        prepared: The run that starts from ``source``.
        is_changed: Whether the runs differ in settings or data.
        is_same_data: Whether both runs have the same samples in the same order.

    Returns:
        The step and the position in the data. The settings ``checkpoint.resume_step`` and
        ``checkpoint.resume_samples`` take precedence over the values in the checkpoint. If
        ``checkpoint.resume_samples`` is not set and the data differs, the run starts at the first
        sample. The evaluation history is empty if ``is_changed`` is True. The number of skipped
        steps is always copied from the checkpoint.

    Raises:
        UserError: If the run has no steps left to train. The error is only raised if settings or
            data have changed, or if ``checkpoint.resume_step`` differs from the step of the
            checkpoint.
    """
    settings = prepared.config.checkpoint
    step = state.step if settings.resume_step is None else settings.resume_step
    samples = state.samples if is_same_data else 0
    samples = samples if settings.resume_samples is None else settings.resume_samples
    if (is_changed or step != state.step) and step >= prepared.end_step:
        raise UserError(
            f"checkpoint.resume: this run starts from {source} at step {step}, but ends after step "
            f"{prepared.end_step}; raise train.steps, train.epochs or train.stop_after, or set "
            "checkpoint.resume_step to 0 to restart the schedule"
        )
    return RunProgress(
        step, samples, state.skipped_steps, EvalHistory() if is_changed else state.eval_history
    )


def _find_changed_settings(
    source: AnyPath, external: AdoptedCheckpoint | None, prepared: PreparedRun
) -> tuple[SettingChange, ...]:
    """Find the settings of the run that differ from the settings of the checkpoint ``source``.

    Returns:
        The changed settings. Always empty on ranks other than 0. Also empty if another program
        wrote the checkpoint.
    """
    if external is not None or prepared.backend.rank != 0:
        return ()
    return tuple(find_changes(TrainerState.read(source).run, prepared.config.fingerprint()))


def _check_vocabulary(source: AnyPath, prepared: PreparedRun) -> None:
    """Check that the tokenizers of the checkpoint and the run assign the same ids to tokens.

    The tokenizers are not compared if one of them is not a fast tokenizer, or if ``tokenizer.json``
    of the checkpoint cannot be read.

    Raises:
        UserError: If the ids differ.
    """
    try:
        stored = read_json_file(source / "tokenizer.json")["model"]["vocab"]
        vocabulary = json.loads(prepared.data.tokenizer.backend_tokenizer.to_str())["model"]["vocab"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # not a fast tokenizer
        return
    if stored != json.loads(json.dumps(vocabulary)):
        raise UserError(
            f"checkpoint.resume: {source} was trained with a different tokenizer, so its embeddings do not "
            f"match the tokens of this run; set data.tokenizer: {source}"
        )


def _check_custom_code(
    source: AnyPath, state: TrainerState, prepared: PreparedRun, *, changed_loss: bool
) -> None:
    """Check that the custom code has not changed since a checkpoint was saved.

    If only metrics or callbacks have changed, rank 0 prints a note.

    Args:
        source: The checkpoint.
        state: Trainer state of the checkpoint.
        prepared: The run.
        changed_loss: Whether the setting ``train.loss`` itself has changed. The code of the loss is
            then not compared.

    Raises:
        UserError: If code that affects training has changed, such as the model or the loss.
    """
    affecting_training, harmless = compare_custom_code(
        state.metadata.get("code", {}), compute_custom_code_digests(prepared.config)
    )
    affecting_training = [key for key in affecting_training if key != "train.loss" or not changed_loss]
    if affecting_training:
        raise UserError(
            f"checkpoint.resume: the code of {affecting_training[0]} has changed since {source} was saved; "
            "restore the code, or choose another output_dir"
        )
    if harmless and prepared.backend.rank == 0:
        print_status(f"note: the code of {', '.join(harmless)} has changed since {source} was saved")


def _build_blueprint(prepared: PreparedRun) -> InitialWeights:
    """Return the meta-device model from which the initial weights are computed.

    With an adapter, this is the base model without the adapter.
    """
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
    """Load the initial weights of the run. With an adapter, load the weights of the base model.

    Rank 0 prints notes, for example about missing weights.

    Args:
        engine: Engine to fill.
        blueprint: Recorded initialization of the model or base model.
        pretrained: Pretrained weights. Missing ones, such as a new head, are initialized at random.
            None to initialize all weights at random.
        prepared: The run.

    Raises:
        UserError: If the files of the base model lack a weight that the adapter would not save.
    """
    config, adapter = prepared.config, prepared.adapter

    def load_weights(weights: Mapping[str, ReadableTensor]) -> None:
        engine.load_weights(weights if adapter is None else adapter.map_base_weights(weights))

    def draw_weights() -> Mapping[str, ReadableTensor]:
        weights = blueprint.build_lazy_weights(config.seed)
        if blueprint.recording_failure is not None and prepared.backend.rank == 0:
            print_status(
                "note: every rank computes the initial weights of the complete model, because the "
                f"construction of the model cannot be recorded ({blueprint.recording_failure})"
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
        # If some weights are missing, such as a new head, initialize them first and then load the others.
        missing = set(pretrained.missing)
        load_weights({name: weight for name, weight in draw_weights().items() if name in missing})
    load_weights(pretrained.tensors)
