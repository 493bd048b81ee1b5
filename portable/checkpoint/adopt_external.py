"""Beginning a run at another program's checkpoint: what is taken, what is asked for, what is said.

Weights and the optimizer's state are taken as they are. Which of the program's settings the run keeps is the
person's to say: an optimizer's setting that differs from a default of ours is refused until it is set, one
that differs from a value that was set is told. The order of the data and the learning rate are the run's own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from converters import Checkpoint, CheckpointError
from converters import Tensor as StoredTensor
from converters.checkpoint import OptimizerState
from portable.checkpoint.external import HALF_TYPES, ExternalCheckpoint
from portable.config.problems import shown
from portable.errors import DamagedError, UserError
from portable.model.parameters import embeddings, state_tensors, tied_names
from portable.optim.build import build_optimizer, decaying

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor, nn

    from portable.config import RunConfig

State = dict[str, "StoredTensor | float | bool"]
_SHOWN = 3
# Settings of an optimizer's groups that change its rule, with the value that ours go by.
_RULES: dict[str, dict[str, bool]] = {
    "adamw": {"amsgrad": False, "maximize": False, "decoupled_weight_decay": True},
    "adamw_8bit": {"amsgrad": False, "maximize": False, "decoupled_weight_decay": True},
    "sgd": {"nesterov": False, "maximize": False},
    "adafactor": {"maximize": False},
}


@dataclass(frozen=True)
class AdoptedCheckpoint:
    """Where a run begins.

    Attributes:
        checkpoint: what an engine loads: the model's tensors, and what the run's optimizer keeps of them.
        step: optimizer steps that count as done.
        samples: sequences that count as consumed.
        rows: what a person is told, as two columns.
        warnings: what a person must not miss.
    """

    checkpoint: Checkpoint
    step: int
    samples: int
    rows: list[tuple[str, str]]
    warnings: list[str]

    def check_length(self, until: int) -> None:
        """Refuse a run that would end before it takes a step."""
        if self.step >= until:
            raise UserError(
                f"checkpoint.resume: {self.checkpoint.root} is of step {self.step}, and this run ends after "
                f"step {until}; raise train.steps (or train.stop_after), or set checkpoint.resume_step to 0 "
                "to begin the schedule anew"
            )


def refuse_resume_step(config: RunConfig) -> None:
    """Refuse to be told where a checkpoint of this program stands, which says so itself."""
    for name in ("resume_step", "resume_samples"):
        if getattr(config.checkpoint, name) is not None:
            raise UserError(
                f"checkpoint.{name}: {config.checkpoint.resume} is a checkpoint of this program and says "
                "itself where it stands; remove it"
            )


def adopt_checkpoint(
    foreign: ExternalCheckpoint, config: RunConfig, model: nn.Module, rate: Callable[[int], float]
) -> AdoptedCheckpoint:
    """Match a checkpoint with the run that is to go on from it.

    Args:
        foreign: opened with the order of the model's parameters.
        config: of the run.
        model: its model, whole, on any device.
        rate: the run's learning rate by step.

    Raises:
        UserError: if it is of another model or optimizer, or what has to be known is said nowhere.
        DamagedError: if something in it is not as it was written.
    """
    try:
        return _Matching(foreign, config, model).takeover(rate)
    except CheckpointError as error:
        told = str(error).replace("convert without --optimizer", "it cannot be gone on from")
        raise DamagedError(f"checkpoint.resume: {told}") from error


class _Matching:
    """One checkpoint beside one run."""

    def __init__(self, foreign: ExternalCheckpoint, config: RunConfig, model: nn.Module) -> None:
        self.foreign = foreign.named_for(model)
        self.config = config
        self.model = model
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.notes: list[str] = []
        self.warnings: list[str] = []

    def refusal(self, reason: str, remedy: str) -> UserError:
        return UserError(f"checkpoint.resume: {self.foreign.root} {reason}; {remedy}")

    def takeover(self, rate: Callable[[int], float]) -> AdoptedCheckpoint:
        tensors = self.weights()
        if self.foreign.optimizer is None:
            raise self.refusal("holds no optimizer state to go on with", self._weights_alone())
        self.check_rule()
        step, step_said = self.step()
        samples, samples_said = self.samples(step)
        state = self.state(step)
        self.compare_settings()
        moments = [value for values in state.values() for value in values.values()]
        kinds = sorted({v.dtype for v in moments if isinstance(v, StoredTensor) and v.shape})
        names = list(dict.fromkeys(name for values in state.values() for name in values))
        rows = [
            ("from", f"{self.foreign.root}, written by {self.foreign.writer}"),
            ("taken", f"{len(tensors)} weights and buffers; {', '.join(names)} of {len(state)} parameters"),
            ("step", f"{step}: {step_said}"),
            ("samples", f"{samples}: {samples_said}; the order of the data is this run's own"),
            ("rate", self._rates(step, rate)),
            ("not taken", "the order of the data, random number generators, loss scales"),
            *(("differs", note) for note in self.notes),
        ]
        narrow = [kind for kind in kinds if kind in HALF_TYPES]
        if narrow:
            self.warnings.append(
                f"{self.foreign.root} holds the optimizer's state in {' and '.join(narrow)} only; it goes on "
                "in 32 bits"
            )
        checkpoint = Checkpoint(
            format=self.foreign.checkpoint.format,
            root=self.foreign.root,
            tensors=tensors,
            optimizer=OptimizerState(state, [{"params": list(self.trained)}]),
            metadata={"step": step},
        )
        return AdoptedCheckpoint(checkpoint, step, samples, rows, self.warnings)

    # -- the model ---------------------------------------------------------------------------------------

    def weights(self) -> dict[str, StoredTensor]:
        """Every tensor of the model, under the name that the model lists it by.

        Raises:
            UserError: for one that is missing, of another shape, or that the model does not have.
        """
        wanted = state_tensors(self.model)
        held = dict(self.foreign.checkpoint.tensors)
        aliases = self.foreign.checkpoint.aliases
        for name, others in tied_names(self.model).items():
            stored = [other for other in (name, *others) if other in held]
            if len(stored) > 1:
                raise self.refusal(
                    f"holds {stored[0]} and {stored[1]} apart, which the model ties to each other",
                    "set model.config.tie_word_embeddings to false",
                )
            if stored:
                held[name] = held.pop(stored[0])
        missing = [name for name in wanted if name not in held]
        ignored = getattr(self.model, "_keys_to_ignore_on_load_unexpected", None) or ()
        unexpected = [
            name
            for name in held
            if name not in wanted and not any(re.search(pattern, name) for pattern in ignored)
        ]
        remedy = "give the model that it was trained with (model.name_or_path or model.config)"
        if missing and missing[0] in aliases:
            raise self.refusal(
                f"ties {missing[0]} to {aliases[missing[0]]}, and the model does not",
                "set model.config.tie_word_embeddings to true",
            )
        if missing:
            beside = f", but has {_some(unexpected)}" if unexpected else ""
            raise self.refusal(f"holds no {_some(missing)}{beside}", remedy)
        if unexpected:
            raise self.refusal(f"holds {_some(unexpected)}, which the model does not have", remedy)
        for name, tensor in wanted.items():
            if held[name].shape != tuple(tensor.shape):
                raise self.refusal(
                    f"holds {name} in the shape {list(held[name].shape)}, the model in {list(tensor.shape)}",
                    remedy,
                )
        half = [name for name in self.trained if held[name].dtype in HALF_TYPES]
        if half:
            self.warnings.append(
                f"{self.foreign.root} holds {len(half)} of {len(self.trained)} weights in "
                f"{held[half[0]].dtype} only, without the 32-bit ones that it may have been trained with; "
                "they go on from the rounded values"
            )
        return {name: held[name] for name in wanted}

    def _weights_alone(self) -> str:
        loadable = self.foreign.checkpoint.format in ("safetensors", "torch") and (
            "config.json" in self.foreign.checkpoint.companions
        )
        if loadable:
            return f"to start from its weights alone, set model.name_or_path to {self.foreign.root} instead"
        return (
            f"to start from its weights alone, portable-convert {self.foreign.root} OUT and set "
            "model.name_or_path to OUT instead"
        )

    # -- the optimizer -----------------------------------------------------------------------------------

    def state(self, step: int) -> dict[str, State]:
        """What the run's optimizer keeps, of every trained parameter that has been stepped.

        Raises:
            UserError: for another optimizer's state, or none of a parameter that is trained.
        """
        optimizer = self.foreign.optimizer
        assert optimizer is not None
        kind = self.config.train.optimizer
        tables = set(embeddings(self.model))
        ours = build_optimizer(
            self.config.train,
            self.trained,
            decaying(self.model),
            embeddings={parameter for parameter in self.trained.values() if parameter in tables},
        )
        owners = {alias: name for name, others in tied_names(self.model).items() for alias in others}
        theirs = {owners.get(name, name): values for name, values in optimizer.state.items()}
        groups = {owners.get(name, name): g for g in optimizer.param_groups for name in g.get("params", ())}
        left: set[str] = set()
        state: dict[str, State] = {}
        for name, parameter in self.trained.items():
            wanted: Mapping[str, Tensor] = ours.initial_state(parameter)
            if name not in theirs and name not in groups:
                raise self.refusal(
                    f"holds no optimizer state of {name}, which is trained here",
                    f"it may have been frozen there; {self._weights_alone()}",
                )
            values = dict(theirs.get(name, {}))
            if not values:
                continue  # no gradient has reached it
            if "step" in wanted and "step" not in values:
                counted = groups.get(name, {}).get("step")
                values["step"] = counted if isinstance(counted, int) else step
            for key, tensor in wanted.items():
                value = values.get(key)
                shape = value.shape if isinstance(value, StoredTensor) else ()
                if value is None or (tensor.dim() and shape != tuple(tensor.shape)):
                    raise self.refusal(
                        f"holds {', '.join(sorted(values))} of {name}, and train.optimizer {kind} keeps "
                        f"{', '.join(sorted(wanted))}",
                        self._other_optimizer(values),
                    )
            left |= values.keys() - wanted.keys()
            state[name] = {key: values[key] for key in wanted}
        if self.trained and not state and any(self.wanted_of(ours)):
            raise self.refusal("holds an optimizer that has not taken a step", self._weights_alone())
        if left:
            self.notes.append(f"train.optimizer {kind} has no use for {', '.join(sorted(left))}: left out")
        return state

    def wanted_of(self, optimizer: Any) -> Iterator[str]:
        """Names of what ``optimizer`` keeps of any parameter."""
        for parameter in self.trained.values():
            yield from optimizer.initial_state(parameter)

    def _other_optimizer(self, values: Mapping[str, object]) -> str:
        fits = {"adamw": {"exp_avg", "exp_avg_sq"}, "sgd": {"momentum_buffer"}}
        for name, needed in fits.items():
            if needed <= values.keys() and name != self.config.train.optimizer:
                return f"set train.optimizer to {name}"
        return self._weights_alone()

    def check_rule(self) -> None:
        """Refuse an optimizer of the same state that goes by another rule."""
        optimizer, kind = self.foreign.optimizer, self.config.train.optimizer
        for group in optimizer.param_groups if optimizer is not None else ():
            for name, ours in _RULES[kind].items():
                theirs = group.get(name, ours)
                without_effect = name == "decoupled_weight_decay" and not group.get("weight_decay")
                if isinstance(theirs, bool | int) and bool(theirs) != ours and not without_effect:
                    raise self.refusal(
                        f"was trained with {name} {bool(theirs)}, which train.optimizer {kind} does not do",
                        self._weights_alone(),
                    )

    def compare_settings(self) -> None:
        """Hold the settings of the optimizer's groups against the run's.

        Raises:
            UserError: for those that differ from what is a mere default here.
        """
        differing = [(key, theirs, self.config.get(key)) for key, theirs in self._settings()]
        differing = [(key, theirs, ours) for key, theirs, ours in differing if not _same(theirs, ours)]
        unset = [(key, theirs) for key, theirs, _ in differing if not self.config.is_set(key)]
        if unset:
            wanted = ", ".join(f"{key} {shown(value)}" for key, value in unset)
            raise self.refusal(
                f"was trained with {wanted}, and this run's are defaults",
                f"set {' and '.join(key for key, _ in unset)}, to these values to go on as before",
            )
        self.notes += [f"{key}: {shown(theirs)} there, {shown(ours)} here" for key, theirs, ours in differing]

    def _settings(self) -> Iterator[tuple[str, Any]]:
        """The optimizer's settings as far as the checkpoint has one value for the run's one, by our keys."""
        optimizer, kind = self.foreign.optimizer, self.config.train.optimizer
        groups = [group for group in optimizer.param_groups if group.get("params")] if optimizer else []
        decay: dict[str, set[float]] = {"matrices": set(), "vectors": set()}
        for group in groups:
            if not isinstance(group.get("weight_decay"), int | float):
                continue
            for name in group["params"]:
                if name in self.trained:
                    which = "matrices" if self.trained[name].dim() >= 2 else "vectors"
                    decay[which].add(float(group["weight_decay"]))
        if len(decay["matrices"]) == 1:
            yield "train.weight_decay", next(iter(decay["matrices"]))
        elif decay["matrices"]:
            values = " and ".join(f"{value:g}" for value in sorted(decay["matrices"]))
            self.notes.append(f"train.weight_decay: {values} there, by matrix; one value here")
        if any(decay["vectors"]):
            value = max(decay["vectors"])
            self.notes.append(f"weight decay of biases and norms: {value:g} there, none here")
        if kind == "sgd":
            momenta = {float(group["momentum"]) for group in groups if "momentum" in group}
            if len(momenta) == 1:
                yield "train.betas", (next(iter(momenta)), self.config.train.betas[1])
        elif kind.startswith("adamw"):
            for key in ("betas", "eps"):
                kept = {_plain(group[key]) for group in groups if key in group}
                if len(kept) == 1:
                    yield f"train.{key}", next(iter(kept))
                elif kept:
                    self.notes.append(f"train.{key}: several values there, by group; one here")
        peaks = {float(group["initial_lr"]) for group in groups if _is_number(group.get("initial_lr"))}
        if not peaks:
            bases = self.foreign.scheduler.get("base_lrs")
            peaks = {float(v) for v in bases if _is_number(v)} if isinstance(bases, list) else set()
        if len(peaks) == 1 and (peak := next(iter(peaks))) > 0:
            yield "train.learning_rate", peak

    def _rates(self, step: int, rate: Callable[[int], float]) -> str:
        optimizer, train = self.foreign.optimizer, self.config.train
        rates = [g["lr"] for g in optimizer.param_groups if _is_number(g.get("lr"))] if optimizer else []
        stood = f" stood at {float(rates[0]):.4g} and" if rates else ""
        return (
            f"{rate(step):.4g} in the next step, by this run's schedule ({train.schedule}, peak "
            f"{train.learning_rate:g}); the checkpoint's own{stood} is not taken"
        )

    # -- where it stands ---------------------------------------------------------------------------------

    def step(self) -> tuple[int, str]:
        """Steps done, and who says so.

        Raises:
            UserError: where nothing does, or not all agree.
        """
        told, stepped = self.foreign.steps, self.foreign.optimizer_steps
        most = max(stepped, default=0)
        given = self.config.checkpoint.resume_step
        if given is not None:
            others = [*map(str, told), *([f"{most} (the optimizer's own count)"] if stepped else [])]
            aside = f"; the checkpoint says {', '.join(others)}" if others else ""
            return given, f"checkpoint.resume_step{aside}"
        remedy = "set checkpoint.resume_step to the number of steps done"
        if len({count.number for count in told}) > 1:
            raise self.refusal(f"says different numbers of steps: {', '.join(map(str, told))}", remedy)
        if told:
            done = told[0].number
            if most > done:
                raise self.refusal(f"is of step {told[0]}, but its optimizer has counted {most}", remedy)
            said = f"by {' and '.join(count.said_by for count in told)}"
            if stepped and most < done:
                return done, f"{said}; the optimizer has taken {most} of them"
            return done, f"{said}{', as the optimizer counts' if stepped else ''}"
        if len(stepped) == 1:
            return most, "by the optimizer's own count, for want of another"
        reason = (
            f"does not say its step, and its optimizer has counted {min(stepped)} to {most}, by parameter"
            if stepped
            else "does not say how many steps were taken"
        )
        raise self.refusal(reason, remedy)

    def samples(self, step: int) -> tuple[int, str]:
        given, counted = self.config.checkpoint.resume_samples, self.foreign.samples
        if given is not None:
            aside = f"; the checkpoint says {counted}" if counted is not None else ""
            return given, f"checkpoint.resume_samples{aside}"
        if counted is not None and self.config.checkpoint.resume_step is None:
            return counted.number, f"by {counted.said_by}"
        batch = self.config.train.global_batch_size
        return step * batch, f"step {step} x train.global_batch_size {batch}"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _plain(value: Any) -> Any:
    """A value that can be compared and counted."""
    return tuple(float(item) for item in value) if isinstance(value, list | tuple) else float(value)


def _same(theirs: Any, ours: Any) -> bool:
    """Whether two settings are one, but for a rounding to 32 bits on the way."""
    if isinstance(theirs, tuple):
        return len(theirs) == len(ours) and all(map(_same, theirs, ours))
    return bool(abs(theirs - ours) <= 1e-6 * max(abs(theirs), abs(ours)))
