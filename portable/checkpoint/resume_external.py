"""Match a checkpoint from another program to a run, so that the run can resume from it.

The values of the weights and of the optimizer state are used unchanged. If an optimizer
setting has a single value in the checkpoint, and this value differs from a default of the
run, the run stops with an error until the user sets the setting explicitly. If the user has
set it, the difference is only reported. Differences are also only reported if a setting
varies between the stored parameter groups, and for the weight decay of biases and norms.
The data order and the learning rate schedule come from the run, not from the checkpoint.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.checkpoint.external import HALF_DTYPES, ExternalCheckpoint, SourcedCount
from portable.config.origins import format_short_value
from portable.converters import Checkpoint
from portable.converters import Tensor as StoredTensor
from portable.converters.checkpoint import OptimizerState
from portable.converters.errors import OptimizerStateError
from portable.errors import DamagedError, UserError
from portable.model.parameter_groups import assign_parameter_groups
from portable.model.parameters import get_checkpointed_tensors, list_embedding_weights, map_tied_names
from portable.model.unused_parameters import get_unreached_names
from portable.optim.optimizers import build_optimizer
from portable.paths import convert_checkpoint_errors
from portable.private.transformers_internals import get_ignored_checkpoint_patterns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor, nn

    from portable.config import RunConfig

ParameterState = dict[str, "StoredTensor | float | bool"]
"""Optimizer state of one parameter, keyed by the name of the entry, such as ``exp_avg``."""
_MAX_NAMES_SHOWN = 3
# Flags in stored parameter groups that change the update rule, with the values that this project's optimizers
# implement.
_UPDATE_RULE_FLAGS: dict[str, dict[str, bool]] = {
    "adamw": {"amsgrad": False, "maximize": False, "decoupled_weight_decay": True},
    "adamw_8bit": {"amsgrad": False, "maximize": False, "decoupled_weight_decay": True},
    "sgd": {"nesterov": False, "maximize": False},
    "adafactor": {"maximize": False},
    "muon": {"nesterov": True, "amsgrad": False, "maximize": False},
}


@dataclass(frozen=True)
class AdoptedCheckpoint:
    """Checkpoint from another program, converted so that the run can resume from it.

    Attributes:
        checkpoint: Tensors and optimizer state of the model, for an engine to load.
        step: Step at which the run starts.
        samples: Position in the data at which the run starts: the number of sequences already
            consumed.
        summary_rows: Rows of a two-column table that describes the restored state to the user.
        warnings: Warnings for the user, for example about 16-bit weights.
    """

    checkpoint: Checkpoint
    step: int
    samples: int
    summary_rows: list[tuple[str, str]]
    warnings: list[str]

    def check_steps_remain(self, end_step: int) -> None:
        """Check that the run has steps left after the step of the checkpoint.

        Args:
            end_step: Step after which the run ends.

        Raises:
            UserError: If the step of the checkpoint is ``end_step`` or later.
        """
        if self.step >= end_step:
            raise UserError(
                f"checkpoint.resume: {self.checkpoint.root} is at step {self.step}, but this run ends "
                f"after step {end_step}; raise train.steps, train.epochs or train.stop_after, or set "
                "checkpoint.resume_step to 0 to restart the schedule"
            )


def adopt_external_checkpoint(
    external: ExternalCheckpoint,
    config: RunConfig,
    model: nn.Module,
    learning_rate_at: Callable[[int], float],
) -> AdoptedCheckpoint:
    """Check that a checkpoint from another program fits the run, and convert it for resuming.

    Args:
        external: Checkpoint, opened with the model's parameter order.
        config: Config of the run.
        model: Unsharded model on any device.
        learning_rate_at: Function that returns the run's learning rate at a step, for the summary.

    Returns:
        The weights, the optimizer state and the position from which the run continues.

    Raises:
        UserError: If the checkpoint belongs to another model or optimizer, if it has no optimizer
            state, or if its step is missing or ambiguous. Also raised if the checkpoint's value of
            an optimizer setting differs from the run's value and the user has not set this setting.
            The user must then set it explicitly. Also raised for an error of the object store other
            than an outage.
        DamagedError: If the checkpoint is damaged, or if its tensors or its optimizer state cannot
            be read or rearranged for the model.
        RunError: If the object store is unavailable.
    """
    try:
        with convert_checkpoint_errors("checkpoint.resume", DamagedError):
            external = external.rename_to_model_names(model)
            weights = _match_weights_to_model(
                external, model
            )  # before the optimizer, because errors about weights are clearer
            if external.optimizer is None:
                raise UserError(
                    f"checkpoint.resume: {external.root} has no optimizer state; "
                    f"{_suggest_weights_only(external)}"
                )
            return _ResumeMatcher(external, external.optimizer, config, model).build_adopted_checkpoint(
                weights.tensors, weights.warnings, learning_rate_at
            )
    except DamagedError as error:
        # The remedy of an OptimizerStateError is an option of portable-convert.
        if not isinstance(error.__cause__, OptimizerStateError):
            raise
        raise DamagedError(
            f"checkpoint.resume: {error.__cause__.reason}; choose another checkpoint"
        ) from error.__cause__


def _suggest_weights_only(external: ExternalCheckpoint) -> str:
    """Describe how to start from only the weights of a checkpoint. Used in error messages."""
    checkpoint = external.checkpoint
    if checkpoint.format in ("safetensors", "torch") and "config.json" in checkpoint.companions:
        return (
            "to start from only the weights, remove checkpoint.resume, and set model.name_or_path to "
            f"{external.root}"
        )
    return (
        "to start from only the weights, remove checkpoint.resume, convert the checkpoint with "
        f"portable-convert {external.root} OUT, and set model.name_or_path to OUT"
    )


class MatchedWeights(NamedTuple):
    """Weights in an external checkpoint, matched to a model."""

    tensors: dict[str, StoredTensor]
    """Stored tensors of the model, keyed by their names in the model. Tied parameters have one entry."""
    warnings: list[str]
    """Warnings for the user. Contains one warning if trained weights are stored in only 16 bits,
    otherwise empty."""


def _match_weights_to_model(external: ExternalCheckpoint, model: nn.Module) -> MatchedWeights:
    """Select the tensors that a model needs, and check their names and shapes.

    A tied weight is listed under its first name in the model. Unexpected tensors are dropped if
    their names match a pattern in the model's ``_keys_to_ignore_on_load_unexpected``.

    Args:
        external: Checkpoint with the parameter names of the model.
        model: Unsharded model on any device.

    Raises:
        UserError: If a tensor is missing, if an unexpected tensor is not dropped, if a shape does
            not match, or if different weights are tied in the checkpoint and in the model.
    """
    model_tensors = get_checkpointed_tensors(model)
    tensors = dict(external.checkpoint.tensors)
    aliases, root = external.checkpoint.aliases, external.root
    for name, others in map_tied_names(model).items():
        stored = [other for other in (name, *others) if other in tensors]
        if len(stored) > 1:
            raise UserError(
                f"checkpoint.resume: {external.root} has separate tensors {stored[0]} and {stored[1]}, but "
                "the model ties them; set model.config.tie_word_embeddings to false"
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
        raise UserError(
            f"checkpoint.resume: {root} ties {missing[0]} to {aliases[missing[0]]}, but the model does not; "
            "set model.config.tie_word_embeddings to true"
        )
    if missing and unexpected:
        raise UserError(
            f"checkpoint.resume: {root} lacks tensors of the model ({_shorten_names(missing)}), and has "
            f"other tensors that the model lacks ({_shorten_names(unexpected)}); {remedy}"
        )
    if missing:
        raise UserError(
            f"checkpoint.resume: {root} lacks tensors of the model ({_shorten_names(missing)}); {remedy}"
        )
    if unexpected:
        raise UserError(
            f"checkpoint.resume: {root} has tensors that the model lacks ({_shorten_names(unexpected)}); "
            f"{remedy}"
        )
    for name, tensor in model_tensors.items():
        if tensors[name].shape != tuple(tensor.shape):
            raise UserError(
                f"checkpoint.resume: {root} has {name} with shape {list(tensors[name].shape)}, but the model "
                f"needs shape {list(tensor.shape)}; {remedy}"
            )
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    half_precision_names = [name for name in trained if tensors[name].dtype in HALF_DTYPES]
    warnings = []
    if half_precision_names:
        warnings.append(
            f"{external.root} stores {len(half_precision_names)} of {len(trained)} weights only in "
            f"{tensors[half_precision_names[0]].dtype}, without 32-bit master weights; training continues "
            "from the rounded values"
        )
    return MatchedWeights({name: tensors[name] for name in model_tensors}, warnings)


class _ResumeMatcher:
    """Matcher that checks an external checkpoint against a run, and determines the state to resume from.

    :meth:`build_adopted_checkpoint` renames and checks the optimizer state, determines the step and the
    number of consumed samples, and compares the optimizer's settings with the config. A setting that
    differs is an error if the user has not set it, and otherwise a note.

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
        """Build the result of :func:`adopt_external_checkpoint`.

        This method first checks that the stored optimizer fits the run.

        Args:
            tensors: Weights and buffers, keyed by the names of the model.
            warnings: Warnings about the weights. This method may append a warning about the
                optimizer state.
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
                f"{len(tensors)} weights and buffers; {', '.join(names)} for {len(state)} parameters",
            ),
            ("step", f"{step}: {counted_steps.source}"),
            (
                "samples",
                f"{counted_samples.count}: {counted_samples.source}; the data is in the order of this run",
            ),
            ("rate", self._describe_learning_rate(step, learning_rate_at)),
            ("not restored", "data order, random number generators, loss scales"),
            *(("differs", note) for note in self.notes),
        ]
        half_dtypes = [kind for kind in moment_dtypes if kind in HALF_DTYPES]
        if half_dtypes:
            warnings.append(
                f"{self.external.root} stores the optimizer state only in {' and '.join(half_dtypes)}; the "
                "state is converted to 32 bits"
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
        """Build the state of the run's optimizer from the values stored in the checkpoint.

        The checkpoint stores several entries for each parameter, such as ``exp_avg`` and ``step``.
        Entries that the run's optimizer does not use are left out and listed in :attr:`notes`.

        Args:
            step: Step count to use for parameters without a stored step count.

        Returns:
            Entries, keyed by parameter name and then by entry name. Parameters that never had a
            gradient are not included.

        Raises:
            UserError: If the entries belong to another optimizer, if the stored optimizer has not
                taken a step, or if it did not include a parameter that the run trains.
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
                raise UserError(
                    f"checkpoint.resume: {self.external.root} has no optimizer state for {name}, which this "
                    "run trains (the parameter may have been frozen); "
                    f"{_suggest_weights_only(self.external)}"
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
                if value is None:
                    raise UserError(
                        f"checkpoint.resume: {self.external.root} has the optimizer state "
                        f"{', '.join(sorted(values))} for {name}, but train.optimizer: {kind} needs "
                        f"{', '.join(sorted(wanted))}; {self._suggest_other_optimizer(values)}"
                    )
                if tensor.dim() and shape != tuple(tensor.shape):
                    raise UserError(
                        f"checkpoint.resume: {self.external.root} has the optimizer state {key} of shape "
                        f"{list(shape)} for {name}, but train.optimizer: {kind} needs shape "
                        f"{list(tensor.shape)}; {self._suggest_other_optimizer(values)}"
                    )
            unused |= values.keys() - wanted.keys()
            state[name] = {key: values[key] for key in wanted}
        if not state and any(
            run_optimizer.build_initial_state(parameter) for parameter in self.trained.values()
        ):
            raise UserError(
                f"checkpoint.resume: {self.external.root} has no optimizer state, because its optimizer has "
                f"not taken a step; {_suggest_weights_only(self.external)}"
            )
        if unused:
            self.notes.append(
                f"{', '.join(sorted(unused))} in the checkpoint, which train.optimizer: {kind} does not use"
            )
        return state

    def _suggest_other_optimizer(self, values: Mapping[str, object]) -> str:
        """Suggest ``adamw`` or ``sgd`` if it fits the stored state. Used in error messages.

        If neither fits, or if the run already uses it, suggest starting from only the weights.
        Other optimizers are never suggested.

        Args:
            values: Stored state of a parameter, keyed by entry name.
        """
        fits = {"adamw": {"exp_avg", "exp_avg_sq"}, "sgd": {"momentum_buffer"}}
        for name, needed in fits.items():
            if needed <= values.keys() and name != self.config.train.optimizer:
                return f"set train.optimizer to {name}"
        return _suggest_weights_only(self.external)

    def check_update_rule(self) -> None:
        """Check that the flags of the stored optimizer match the update rule of the run's optimizer.

        An example of such a flag is ``amsgrad``. A missing flag counts as equal. The flag
        ``decoupled_weight_decay`` is ignored for groups without weight decay.

        Raises:
            UserError: If a flag differs from the value that the run's optimizer implements.
        """
        kind = self.config.train.optimizer
        for group in self.optimizer.param_groups:
            for name, ours in _UPDATE_RULE_FLAGS.get(kind, {}).items():
                theirs = group.get(name, ours)
                without_effect = name == "decoupled_weight_decay" and not group.get("weight_decay")
                if isinstance(theirs, bool | int) and bool(theirs) != ours and not without_effect:
                    raise UserError(
                        f"checkpoint.resume: {self.external.root} was trained with {name}: {bool(theirs)}, "
                        f"which train.optimizer: {kind} does not support; "
                        f"{_suggest_weights_only(self.external)}"
                    )

    def check_optimizer_settings(self) -> None:
        """Check the settings of the stored optimizer against the settings of the run.

        Only the settings that :meth:`_iter_stored_settings` yields are checked. Such a setting may
        differ only if the user has set it explicitly. The run's value then applies, and the
        difference is added to the notes.

        Settings that vary between the stored parameter groups, and the weight decay of biases and
        norms, may also differ from defaults of the run. :meth:`_iter_stored_settings` notes these
        differences.

        Raises:
            UserError: If a checked setting differs, and the run only uses its default value.
        """
        differing = [(key, theirs, self.config.get(key)) for key, theirs in self._iter_stored_settings()]
        differing = [(key, theirs, ours) for key, theirs, ours in differing if not _is_close(theirs, ours)]
        unset = [(key, theirs) for key, theirs, _ in differing if not self.config.is_set(key)]
        if unset:
            wanted = ", ".join(f"{key}: {format_short_value(value)}" for key, value in unset)
            raise UserError(
                f"checkpoint.resume: {self.external.root} was trained with {wanted}, but the defaults of "
                f"this run differ; to continue as before, set {' and '.join(key for key, _ in unset)} as in "
                "the checkpoint"
            )
        self.notes += [
            f"{key}: {format_short_value(theirs)} in the checkpoint, {format_short_value(ours)} in this run"
            for key, theirs, ours in differing
        ]

    def _iter_stored_settings(self) -> Iterator[tuple[str, Any]]:
        """Yield the name of each optimizer setting to compare, and its value in the checkpoint.

        The settings are ``train.weight_decay``, ``train.learning_rate`` (the peak of the schedule),
        and the following settings of the run's optimizer:

        - AdamW: ``train.betas`` and ``train.eps``.
        - SGD: ``train.betas``, with the stored momentum as the first value.
        - Muon: ``train.muon_momentum``.

        A setting is skipped if the checkpoint does not contain it, or if the stored parameter
        groups have different values for it. In this case, the difference between these values and
        the run is added to the notes. The weight decay of biases and norms is not
        yielded, but is added to the notes if it is not 0.
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
        stored: list[tuple[str, set[Any]]] = []
        if kind in ("muon", "sgd"):
            momenta = {float(group["momentum"]) for group in groups if "momentum" in group}
            stored.append(
                ("train.muon_momentum", momenta)
                if kind == "muon"
                else ("train.betas", {(momentum, self.config.train.betas[1]) for momentum in momenta})
            )
        if kind == "muon" or kind.startswith("adamw"):
            # The groups that AdamW updates have betas. Muon's own groups have no betas, and another eps.
            adamw_groups = [group for group in groups if kind != "muon" or "betas" in group]
            stored += [
                (f"train.{key}", {_to_hashable(group[key]) for group in adamw_groups if key in group})
                for key in ("betas", "eps")
            ]
        for setting, values in stored:
            if len(values) == 1:
                yield setting, next(iter(values))
            elif values:
                self.notes.append(
                    f"{setting}: different values in the parameter groups of the checkpoint, one value in "
                    "this run"
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
        """Add a note to ``notes`` if a setting differs between checkpoint and run for any parameter.

        Call this method if the setting has several values in the checkpoint's parameter groups.
        Then the checkpoint has no single value to compare, so each parameter is compared
        separately.

        Args:
            key: Name of the setting in the checkpoint's parameter groups.
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
                f"{setting}: {values} in the parameter groups of the checkpoint, another value in this run "
                f"for {len(others)} of {len(theirs)} parameters (train.parameter_groups)"
            )

    def _describe_learning_rate(self, step: int, learning_rate_at: Callable[[int], float]) -> str:
        """Describe the learning rate of the next step after resuming.

        The text also explains that this run's schedule determines the rate, and that the learning
        rate in the checkpoint is not used.
        """
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

        The first of these that exists is used:

        1. The setting ``checkpoint.resume_step``.
        2. The count in ``trainer_state.json`` and in the shards. If several files contain a count,
           the counts must be equal. The optimizer may have counted fewer steps, but not more.
        3. The steps that the optimizer has counted, which must be equal for all parameters.

        Raises:
            UserError: If ``checkpoint.resume_step`` is not set, and either there are no counts or
                the counts contradict each other.
        """
        root, counts = self.external.root, self.external.step_counts
        parameters_by_step = self.external.num_parameters_by_optimizer_step
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
            raise UserError(
                f"checkpoint.resume: {root} has different step counts: {', '.join(map(str, counts))}; "
                f"{remedy}"
            )
        if counts:
            done = counts[0].count
            if most_optimizer_steps > done:
                raise UserError(
                    f"checkpoint.resume: {root} is at step {counts[0]}, but its optimizer has taken "
                    f"{most_optimizer_steps} steps; {remedy}"
                )
            source = " and ".join(count.source for count in counts)
            if parameters_by_step and most_optimizer_steps < done:
                return SourcedCount(done, f"{source}; the optimizer has taken {most_optimizer_steps} of them")
            return SourcedCount(done, f"{source}{' and the optimizer' if parameters_by_step else ''}")
        if len(parameters_by_step) == 1:
            return SourcedCount(most_optimizer_steps, "the optimizer's step count")
        if parameters_by_step:
            raise UserError(
                f"checkpoint.resume: {root} has no step count, and the number of optimizer steps differs "
                f"between parameters ({min(parameters_by_step)} to {most_optimizer_steps}); {remedy}"
            )
        raise UserError(f"checkpoint.resume: {root} has no step count; {remedy}")

    def determine_sample_count(self, step: int) -> SourcedCount:
        """Determine the number of consumed sequences, which is the position in the data.

        The first of these that exists is used:

        1. The setting ``checkpoint.resume_samples``.
        2. The count in the checkpoint, but only if ``checkpoint.resume_step`` is not set.
        3. The step times the global batch size.
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
    """Format a list of names for an error message: the first three, and the number of remaining names."""
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
