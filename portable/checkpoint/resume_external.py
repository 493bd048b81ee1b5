"""Match a checkpoint from another program to a run, so that the run can resume from it.

The weights and the optimizer state are used unchanged. If an optimizer setting in the checkpoint
differs from a default of the run, the run stops with an error until the user sets it explicitly. If
the user has set it, the difference is only reported. The data order and the learning rate come from
the run, not from the checkpoint.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.checkpoint.external import HALF_DTYPES, ExternalCheckpoint, SourcedCount
from portable.config.origins import format_short_value
from portable.converters import Checkpoint, CheckpointError
from portable.converters import Tensor as StoredTensor
from portable.converters.checkpoint import OptimizerState
from portable.converters.errors import OptimizerStateError
from portable.errors import DamagedError, UserError
from portable.model.parameter_groups import assign_parameter_groups
from portable.model.parameters import get_checkpointed_tensors, list_embedding_weights, map_tied_names
from portable.model.unused_parameters import get_unreached_names
from portable.optim.optimizers import build_optimizer
from portable.private.transformers_internals import get_ignored_checkpoint_patterns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor, nn

    from portable.config import RunConfig

ParameterState = dict[str, "StoredTensor | float | bool"]
"""Optimizer state of one parameter, keyed by the name of the entry, such as ``exp_avg``."""
_MAX_NAMES_SHOWN = 3
# Settings of parameter groups that change the update rule, with the values of our optimizers.
_UPDATE_RULE_FLAGS: dict[str, dict[str, bool]] = {
    "adamw": {"amsgrad": False, "maximize": False, "decoupled_weight_decay": True},
    "adamw_8bit": {"amsgrad": False, "maximize": False, "decoupled_weight_decay": True},
    "sgd": {"nesterov": False, "maximize": False},
    "adafactor": {"maximize": False},
    "muon": {"nesterov": True, "amsgrad": False, "maximize": False},
}


@dataclass(frozen=True)
class AdoptedCheckpoint:
    """Checkpoint from another program, matched to the run.

    Attributes:
        checkpoint: Tensors and optimizer state of the model, for an engine to load.
        step: Step at which the run starts.
        samples: Number of sequences consumed before the run starts, which is its position in the data.
        summary_rows: Rows of a two-column table that describes the restored state to the user.
        warnings: Warnings for the user, for example about 16-bit weights.
    """

    checkpoint: Checkpoint
    step: int
    samples: int
    summary_rows: list[tuple[str, str]]
    warnings: list[str]

    def check_steps_remain(self, end_step: int) -> None:
        """Check that the checkpoint is before the last step of the run. Raises UserError if it is not.

        Args:
            end_step: Step after which the run ends.
        """
        if self.step >= end_step:
            raise UserError(
                f"checkpoint.resume: {self.checkpoint.root} is at step {self.step}, but this run ends "
                f"after step {end_step}; raise train.steps (or train.stop_after), or set "
                "checkpoint.resume_step to 0 to restart the schedule"
            )


def adopt_external_checkpoint(
    external: ExternalCheckpoint,
    config: RunConfig,
    model: nn.Module,
    learning_rate_at: Callable[[int], float],
) -> AdoptedCheckpoint:
    """Match a checkpoint from another program to the run.

    Args:
        external: Checkpoint, opened with the model's parameter order.
        config: Config of the run.
        model: Unsharded model on any device.
        learning_rate_at: Function that returns the run's learning rate at a step, for the summary.

    Returns:
        The matched checkpoint.

    Raises:
        UserError: If the checkpoint belongs to another model or optimizer, if the step is ambiguous, or
            if the user has to set a setting explicitly.
        DamagedError: If the checkpoint is damaged.
    """
    try:
        external = external.rename_to_model_names(model)
        weights = _match_weights_to_model(
            external, model
        )  # before the optimizer, because errors about weights are clearer
        if external.optimizer is None:
            raise _build_resume_error(external, "has no optimizer state", _suggest_weights_only(external))
        return _ResumeMatcher(external, external.optimizer, config, model).build_adopted_checkpoint(
            weights.tensors, weights.warnings, learning_rate_at
        )
    except OptimizerStateError as error:
        raise DamagedError(f"checkpoint.resume: {error.reason}; choose another checkpoint") from error
    except CheckpointError as error:
        raise DamagedError(f"checkpoint.resume: {error}") from error


def _build_resume_error(external: ExternalCheckpoint, reason: str, remedy: str) -> UserError:
    """Build the error for a checkpoint that does not fit the run.

    Args:
        external: The checkpoint.
        reason: Text that follows the path of the checkpoint, such as ``has no optimizer state``.
        remedy: Instruction for the user.
    """
    return UserError(f"checkpoint.resume: {external.root} {reason}; {remedy}")


def _suggest_weights_only(external: ExternalCheckpoint) -> str:
    """Describe how to start from only the weights of a checkpoint. Used in error messages."""
    checkpoint = external.checkpoint
    if checkpoint.format in ("safetensors", "torch") and "config.json" in checkpoint.companions:
        return f"to start from only its weights, set model.name_or_path to {external.root} instead"
    return (
        f"to start from only its weights, portable-convert {external.root} OUT and set model.name_or_path to "
        "OUT instead"
    )


class MatchedWeights(NamedTuple):
    """Weights in an external checkpoint, matched to a model."""

    tensors: dict[str, StoredTensor]
    """Stored tensors of the model, by the model's names. Tied parameters have one entry."""
    warnings: list[str]
    """Warnings for the user: at most one, if trained weights are stored in only 16 bits."""


def _match_weights_to_model(external: ExternalCheckpoint, model: nn.Module) -> MatchedWeights:
    """Select the tensors that a model needs. Each tied weight gets its first name in the model.

    Args:
        external: Checkpoint with the parameter names of the model.
        model: Unsharded model on any device.

    Raises:
        UserError: If a tensor is missing or unexpected, if its shape does not match, or if different
            weights are tied in the checkpoint and in the model.
    """
    model_tensors = get_checkpointed_tensors(model)
    tensors = dict(external.checkpoint.tensors)
    aliases = external.checkpoint.aliases
    for name, others in map_tied_names(model).items():
        stored = [other for other in (name, *others) if other in tensors]
        if len(stored) > 1:
            raise _build_resume_error(
                external,
                f"has separate tensors {stored[0]} and {stored[1]}, which the model ties",
                "set model.config.tie_word_embeddings to false",
            )
        if stored:
            tensors[name] = tensors.pop(stored[0])
    missing = [name for name in model_tensors if name not in tensors]
    ignored = get_ignored_checkpoint_patterns(model) or ()
    unexpected = [
        name
        for name in tensors
        if name not in model_tensors and not any(re.search(pattern, name) for pattern in ignored)
    ]
    remedy = "use the model that the checkpoint was trained with (model.name_or_path or model.config)"
    if missing and missing[0] in aliases:
        raise _build_resume_error(
            external,
            f"ties {missing[0]} to {aliases[missing[0]]}, but the model does not",
            "set model.config.tie_word_embeddings to true",
        )
    if missing:
        unexpected_text = f", but has {_shorten_names(unexpected)}" if unexpected else ""
        raise _build_resume_error(external, f"has no {_shorten_names(missing)}{unexpected_text}", remedy)
    if unexpected:
        raise _build_resume_error(
            external, f"has {_shorten_names(unexpected)}, which the model does not have", remedy
        )
    for name, tensor in model_tensors.items():
        if tensors[name].shape != tuple(tensor.shape):
            raise _build_resume_error(
                external,
                f"has {name} with shape {list(tensors[name].shape)}, but its shape in the model is "
                f"{list(tensor.shape)}",
                remedy,
            )
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    half_precision_names = [name for name in trained if tensors[name].dtype in HALF_DTYPES]
    warnings = []
    if half_precision_names:
        warnings.append(
            f"{external.root} has {len(half_precision_names)} of {len(trained)} weights only in "
            f"{tensors[half_precision_names[0]].dtype}, without 32-bit master weights; training continues "
            "from the rounded values"
        )
    return MatchedWeights({name: tensors[name] for name in model_tensors}, warnings)


class _ResumeMatcher:
    """Matcher of an external checkpoint, with its optimizer state, to a run.

    Args:
        external: Checkpoint with the parameter names of the model.
        optimizer: Optimizer state in the checkpoint.
        config: Config of the run.
        model: Unsharded model on any device.

    Attributes:
        trained: Trained parameters, keyed by name.
        notes: Differences between the checkpoint and the run, to report to the user.
    """

    def __init__(
        self, external: ExternalCheckpoint, optimizer: OptimizerState, config: RunConfig, model: nn.Module
    ) -> None:
        self.external = external
        self.optimizer = optimizer
        self.config = config
        self.model = model
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.notes: list[str] = []

    def build_adopted_checkpoint(
        self, tensors: dict[str, StoredTensor], warnings: list[str], learning_rate_at: Callable[[int], float]
    ) -> AdoptedCheckpoint:
        """Check the optimizer, and build the result of :func:`adopt_external_checkpoint`.

        Args:
            tensors: Weights, keyed by the names of the model.
            warnings: Warnings about the weights. This method may append one about the optimizer state.
            learning_rate_at: Function that returns the run's learning rate at a step.
        """
        self.check_update_rule()
        counted_steps = self.determine_step_count()
        step = counted_steps.count
        counted_samples = self.determine_sample_count(step)
        state = self.build_optimizer_state(step)
        self.check_optimizer_settings()
        moments = [value for values in state.values() for value in values.values()]
        moment_dtypes = sorted({v.dtype for v in moments if isinstance(v, StoredTensor) and v.shape})
        names = list(dict.fromkeys(name for values in state.values() for name in values))
        rows = [
            ("from", f"{self.external.root}, written by {self.external.writer_description}"),
            (
                "restored",
                f"{len(tensors)} weights and buffers; {', '.join(names)} of {len(state)} parameters",
            ),
            ("step", f"{step}: {counted_steps.source}"),
            (
                "samples",
                f"{counted_samples.count}: {counted_samples.source}; the data order is this run's own",
            ),
            ("rate", self._describe_learning_rate(step, learning_rate_at)),
            ("not restored", "data order, random number generators, loss scales"),
            *(("differs", note) for note in self.notes),
        ]
        half_dtypes = [kind for kind in moment_dtypes if kind in HALF_DTYPES]
        if half_dtypes:
            warnings.append(
                f"{self.external.root} has the optimizer state only in {' and '.join(half_dtypes)}; it is "
                "converted to 32 bits"
            )
        checkpoint = Checkpoint(
            format=self.external.checkpoint.format,
            root=self.external.root,
            tensors=tensors,
            optimizer=OptimizerState(state, [{"params": list(self.trained)}]),
            metadata={"step": step},
        )
        return AdoptedCheckpoint(checkpoint, step, counted_samples.count, rows, warnings)

    # -- the optimizer -----------------------------------------------------------------------------------

    def build_optimizer_state(self, step: int) -> dict[str, ParameterState]:
        """Select the stored entries that the run's optimizer needs, for every updated parameter.

        Stored entries that the optimizer does not use are listed in the notes.

        Args:
            step: Step count to use for parameters without a stored step count.

        Returns:
            Entries, keyed by parameter name and then by entry name. Parameters that never had a gradient
            are not included.

        Raises:
            UserError: If the state belongs to another optimizer, if the optimizer has not taken a step, or
                if a trained parameter has no state.
        """
        optimizer, kind = self.optimizer, self.config.train.optimizer
        tables = set(list_embedding_weights(self.model))
        run_optimizer = build_optimizer(
            self.config.train.model_copy(update={"ema": None}),  # the weight average starts with this run
            self.trained,
            assign_parameter_groups(self.model, self.config.train),
            embeddings={parameter for parameter in self.trained.values() if parameter in tables},
        )
        owners = {alias: name for name, others in map_tied_names(self.model).items() for alias in others}
        stored_state = {owners.get(name, name): values for name, values in optimizer.state.items()}
        groups = {owners.get(name, name): g for g in optimizer.param_groups for name in g.get("params", ())}
        unused, unreached = set[str](), get_unreached_names(self.model)
        state: dict[str, ParameterState] = {}
        for name, parameter in self.trained.items():
            wanted: Mapping[str, Tensor] = run_optimizer.build_initial_state(parameter)
            if name not in stored_state and name not in groups and name not in unreached:
                raise _build_resume_error(
                    self.external,
                    f"has no optimizer state for {name}, which this run trains",
                    f"the parameter may have been frozen; {_suggest_weights_only(self.external)}",
                )
            values = dict(stored_state.get(name, {}))
            if not values:
                continue  # the parameter has not had a gradient
            if "step" in wanted and "step" not in values:
                counted = groups.get(name, {}).get("step")
                values["step"] = counted if isinstance(counted, int) else step
            for key, tensor in wanted.items():
                value = values.get(key)
                shape = value.shape if isinstance(value, StoredTensor) else ()
                if value is None or (tensor.dim() and shape != tuple(tensor.shape)):
                    raise _build_resume_error(
                        self.external,
                        f"has {', '.join(sorted(values))} for {name}, but train.optimizer: {kind} needs "
                        f"{', '.join(sorted(wanted))}",
                        self._suggest_other_optimizer(values),
                    )
            unused |= values.keys() - wanted.keys()
            state[name] = {key: values[key] for key in wanted}
        if not state and any(
            run_optimizer.build_initial_state(parameter) for parameter in self.trained.values()
        ):
            raise _build_resume_error(
                self.external,
                "has an optimizer that has not taken a step",
                _suggest_weights_only(self.external),
            )
        if unused:
            self.notes.append(
                f"train.optimizer {kind} does not use {', '.join(sorted(unused))}: not restored"
            )
        return state

    def _suggest_other_optimizer(self, values: Mapping[str, object]) -> str:
        """Suggest an optimizer that fits the stored state of a parameter. Used in error messages.

        If none fits, suggest starting from only the weights.

        Args:
            values: Stored state of a parameter, keyed by entry name.
        """
        fits = {"adamw": {"exp_avg", "exp_avg_sq"}, "sgd": {"momentum_buffer"}}
        for name, needed in fits.items():
            if needed <= values.keys() and name != self.config.train.optimizer:
                return f"set train.optimizer to {name}"
        return _suggest_weights_only(self.external)

    def check_update_rule(self) -> None:
        """Check that no flag of the stored optimizer, such as ``amsgrad``, changes the update rule.

        Raises:
            UserError: If there is such a flag.
        """
        kind = self.config.train.optimizer
        for group in self.optimizer.param_groups:
            for name, ours in _UPDATE_RULE_FLAGS.get(kind, {}).items():
                theirs = group.get(name, ours)
                without_effect = name == "decoupled_weight_decay" and not group.get("weight_decay")
                if isinstance(theirs, bool | int) and bool(theirs) != ours and not without_effect:
                    raise _build_resume_error(
                        self.external,
                        f"was trained with {name}: {bool(theirs)}, which train.optimizer: {kind} does not "
                        "support",
                        _suggest_weights_only(self.external),
                    )

    def check_optimizer_settings(self) -> None:
        """Compare the settings of the stored optimizer with the settings of the run.

        Differences from values that the user has set explicitly are added to the notes.

        Raises:
            UserError: If a setting differs from a default of the run.
        """
        differing = [(key, theirs, self.config.get(key)) for key, theirs in self._iter_stored_settings()]
        differing = [(key, theirs, ours) for key, theirs, ours in differing if not _is_close(theirs, ours)]
        unset = [(key, theirs) for key, theirs, _ in differing if not self.config.is_set(key)]
        if unset:
            wanted = ", ".join(f"{key}: {format_short_value(value)}" for key, value in unset)
            raise _build_resume_error(
                self.external,
                f"was trained with {wanted}, but this run has other defaults",
                f"set {' and '.join(key for key, _ in unset)} to these values to continue as before",
            )
        self.notes += [
            f"{key}: {format_short_value(theirs)} in the checkpoint, {format_short_value(ours)} in this run"
            for key, theirs, ours in differing
        ]

    def _iter_stored_settings(self) -> Iterator[tuple[str, Any]]:
        """Yield the name of each optimizer setting of the run, and its value in the checkpoint.

        A setting whose value differs between parameter groups is not yielded. If it differs from the run,
        it is added to the notes.
        """
        kind = self.config.train.optimizer
        groups = [group for group in self.optimizer.param_groups if group.get("params")]
        decay: dict[str, set[float]] = {"matrices": set(), "vectors": set()}
        for group in groups:
            if not isinstance(group.get("weight_decay"), int | float):
                continue
            for name in group["params"]:
                if name in self.trained:
                    parameter_kind = "matrices" if self.trained[name].dim() >= 2 else "vectors"
                    decay[parameter_kind].add(float(group["weight_decay"]))
        if len(decay["matrices"]) == 1:
            yield "train.weight_decay", next(iter(decay["matrices"]))
        elif decay["matrices"]:
            self._note_group_differences("weight_decay", "train.weight_decay")
        if any(decay["vectors"]):
            value = max(decay["vectors"])
            self.notes.append(
                f"weight decay of biases and norms: {value:g} in the checkpoint, none in this run"
            )
        momenta = {float(group["momentum"]) for group in groups if "momentum" in group}
        if kind == "muon" and len(momenta) == 1:
            yield "train.muon_momentum", next(iter(momenta))
        elif kind == "sgd":
            if len(momenta) == 1:
                yield "train.betas", (next(iter(momenta)), self.config.train.betas[1])
        elif kind.startswith("adamw"):
            for key in ("betas", "eps"):
                values = {_to_hashable(group[key]) for group in groups if key in group}
                if len(values) == 1:
                    yield f"train.{key}", next(iter(values))
                elif values:
                    self.notes.append(
                        f"train.{key}: several values in the checkpoint, by group; one value in this run"
                    )
        peaks = {float(group["initial_lr"]) for group in groups if _is_number(group.get("initial_lr"))}
        if not peaks:
            bases = self.external.scheduler_state.get("base_lrs")
            peaks = {float(v) for v in bases if _is_number(v)} if isinstance(bases, list) else set()
        if len(peaks) == 1 and (peak := next(iter(peaks))) > 0:
            yield "train.learning_rate", peak
        elif peaks:
            self._note_group_differences("initial_lr", "train.learning_rate")

    def _note_group_differences(self, key: str, setting: str) -> None:
        """Compare a setting, parameter by parameter, between the stored parameter groups and the run.

        Used if the stored groups have different values. Adds a note if the value differs for any parameter.

        Args:
            key: Name of the setting in the stored parameter groups.
            setting: Name of the corresponding setting of the run, used in the note.
        """
        ours = assign_parameter_groups(self.model, self.config.train)
        theirs = {
            name: group[key]
            for group in self.optimizer.param_groups
            for name in group["params"]
            if name in ours and _is_number(group.get(key))
        }
        field = "learning_rate" if key == "initial_lr" else key
        others = [name for name, value in theirs.items() if not _is_close(value, getattr(ours[name], field))]
        if others:
            values = " and ".join(f"{value:g}" for value in sorted(set(theirs.values())))
            self.notes.append(
                f"{setting}: {values} in the checkpoint, by group; another value in this run for "
                f"{len(others)} of {len(theirs)} "
                "parameters (train.parameter_groups)"
            )

    def _describe_learning_rate(self, step: int, learning_rate_at: Callable[[int], float]) -> str:
        """Describe the learning rate of the next step, and mention the stored rate, which is not used."""
        train = self.config.train
        rates = [group["lr"] for group in self.optimizer.param_groups if _is_number(group.get("lr"))]
        last = f" of {float(rates[0]):.4g}" if rates else ""
        return (
            f"{learning_rate_at(step):.4g} in the next step, by this run's schedule ({train.schedule}, peak "
            f"{train.learning_rate:g}); the checkpoint's rate{last} is not used"
        )

    # -- step and samples --------------------------------------------------------------------------------

    def determine_step_count(self) -> SourcedCount:
        """Determine the step at which the run starts.

        The sources, in order of priority: ``checkpoint.resume_step``, the counts in the checkpoint, and the
        step count of the optimizer.

        Raises:
            UserError: If no source contains the step, or if the sources disagree.
        """
        counts, parameters_by_step = self.external.step_counts, self.external.num_parameters_by_optimizer_step
        most_optimizer_steps = max(parameters_by_step, default=0)
        resume_step = self.config.checkpoint.resume_step
        if resume_step is not None:
            others = [
                *map(str, counts),
                *([f"{most_optimizer_steps} (optimizer)"] if parameters_by_step else []),
            ]
            checkpoint_text = f"; the checkpoint has {', '.join(others)}" if others else ""
            return SourcedCount(resume_step, f"checkpoint.resume_step{checkpoint_text}")
        remedy = "set checkpoint.resume_step to the number of completed steps"
        if len({count.count for count in counts}) > 1:
            raise _build_resume_error(
                self.external, f"has several step counts: {', '.join(map(str, counts))}", remedy
            )
        if counts:
            done = counts[0].count
            if most_optimizer_steps > done:
                raise _build_resume_error(
                    self.external,
                    f"is at step {counts[0]}, but its optimizer has taken {most_optimizer_steps} steps",
                    remedy,
                )
            source = " and ".join(count.source for count in counts)
            if parameters_by_step and most_optimizer_steps < done:
                return SourcedCount(done, f"{source}; the optimizer has taken {most_optimizer_steps} of them")
            return SourcedCount(done, f"{source}{' and the optimizer' if parameters_by_step else ''}")
        if len(parameters_by_step) == 1:
            return SourcedCount(most_optimizer_steps, "the optimizer's step count")
        reason = (
            "has no step count, and the number of optimizer steps differs between parameters "
            f"({min(parameters_by_step)} to {most_optimizer_steps})"
            if parameters_by_step
            else "has no step count"
        )
        raise _build_resume_error(self.external, reason, remedy)

    def determine_sample_count(self, step: int) -> SourcedCount:
        """Determine the number of consumed sequences, which is the position in the data.

        Returns ``checkpoint.resume_samples`` if it is set, otherwise the count in the checkpoint. If there
        is none, or if ``checkpoint.resume_step`` is set, returns the step times the global batch size.
        """
        resume_samples, counted = self.config.checkpoint.resume_samples, self.external.sample_count
        if resume_samples is not None:
            checkpoint_text = f"; the checkpoint has {counted}" if counted is not None else ""
            return SourcedCount(resume_samples, f"checkpoint.resume_samples{checkpoint_text}")
        if counted is not None and self.config.checkpoint.resume_step is None:
            return counted
        batch = self.config.train.global_batch_size
        return SourcedCount(step * batch, f"step {step} x train.global_batch_size {batch}")


def _shorten_names(names: list[str]) -> str:
    """Format a list of names for an error message: the first three, and the number of the rest."""
    more = f" and {len(names) - _MAX_NAMES_SHOWN} more" if len(names) > _MAX_NAMES_SHOWN else ""
    return ", ".join(names[:_MAX_NAMES_SHOWN]) + more


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _to_hashable(value: Any) -> Any:
    """Convert a stored setting to a float or a tuple of floats, because lists are not hashable."""
    return tuple(float(item) for item in value) if isinstance(value, list | tuple) else float(value)


def _is_close(theirs: Any, ours: Any) -> bool:
    """Return whether two settings (numbers or tuples of numbers) are equal up to fp32 rounding."""
    if isinstance(theirs, tuple):
        return len(theirs) == len(ours) and all(map(_is_close, theirs, ours))
    return bool(abs(theirs - ours) <= 1e-6 * max(abs(theirs), abs(ours)))
