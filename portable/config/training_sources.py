"""The sources of ``data.sources``: each is the ``data`` section with settings of its own, and a share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from portable.config.evaluation_sources import ALONE, SOURCE_NAME, SourceError, settings_of
from portable.config.suggest import did_you_mean_word

if TYPE_CHECKING:
    from portable.config.sections import DataConfig

_OWN = ("name", "weight", "epochs")


@dataclass(frozen=True)
class TrainingSource:
    """A source to train on, with its share of a mixture.

    Attributes:
        settings: the ``data`` section as this source has it.
        weight: in proportion to those of the others; None where epochs are given.
        epochs: passes over it in one pass over the mixture; None where a weight is given.
    """

    settings: DataConfig
    weight: float | None = None
    epochs: float | None = None


def training_key(name: str) -> str:
    """The dotted key of the source ``name``; of the ``data`` section for the only source of a run."""
    return f"data.sources.{name}" if name else "data"


def training_names(data: DataConfig) -> tuple[str, ...]:
    """The names of the sources of a mixture, none without ``data.sources``."""
    return tuple(str(given.get("name")) for given in data.sources)


def training_sources(data: DataConfig) -> dict[str, TrainingSource]:
    """The sources of a run by name; ``ALONE`` for one without ``data.sources``.

    Raises:
        SourceError: if they cannot be used.
    """
    if not data.sources:
        return {ALONE: TrainingSource(data)}
    found: dict[str, TrainingSource] = {}
    for number, given in enumerate(data.sources, start=1):
        name = given.get("name")
        if not isinstance(name, str) or SOURCE_NAME.fullmatch(name) is None:
            said = (
                "has no name" if name is None else f"the name {name!r} may only have letters, digits, - and _"
            )
            raise SourceError("data.sources", f"data.sources: source {number}: {said}; set name, such as web")
        if name in found:
            raise SourceError("data.sources", f"data.sources: two sources are named {name}; rename one")
        found[name] = _source(data, name, given)
    weighed = [name for name, one in found.items() if one.weight is not None]
    if weighed and len(weighed) < len(found):
        other = next(name for name in found if name not in weighed)
        raise SourceError(
            "data.sources",
            f"data.sources: {weighed[0]} has a weight and {other} has none; give a weight to all, or epochs",
        )
    if weighed and not any(one.weight for one in found.values()):
        raise SourceError("data.sources", "data.sources: all weights are 0; raise one")
    return found


def _source(data: DataConfig, name: str, given: dict[str, Any]) -> TrainingSource:
    key = training_key(name)
    shares: dict[str, float] = {}
    for share in ("weight", "epochs"):
        value = given.get(share)
        if value is None:
            continue
        least = 0 if share == "weight" else 1e-9
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= least:
            wanted = "a number that is at least 0" if share == "weight" else "a number above 0"
            raise SourceError("data.sources", f"{key}.{share}: {value!r} is not {wanted}")
        shares[share] = float(value)
    if len(shares) == 2:
        raise SourceError("data.sources", f"{key}: has a weight and epochs; remove one of the two")
    inside = {name: value for name, value in given.items() if name not in _OWN}
    settings = settings_of(data, key, inside, eval_fraction=data.eval_fraction, own=_OWN)
    if settings.stream and "weight" not in shares:
        raise SourceError("data.sources", f"{key}: a stream has no epochs that are known; give it a weight")
    if settings.stream and settings.max_samples is not None:
        raise SourceError("data.sources", f"{key}.max_samples has no effect on a stream; remove it")
    return TrainingSource(settings, **(shares or {"epochs": 1.0}))


def weight_schedule(data: DataConfig) -> list[tuple[int, dict[str, float]]]:
    """The steps from which ``data.weight_schedule`` gives other weights, with these by name.

    Raises:
        SourceError: if it cannot be used.
    """

    def refuse(number: int, reason: str) -> SourceError:
        return SourceError("data.weight_schedule", f"data.weight_schedule: entry {number}: {reason}")

    names = training_names(data)
    if data.weight_schedule and not names:
        raise SourceError("data.weight_schedule", "data.weight_schedule: has no effect without data.sources")
    found: list[tuple[int, dict[str, float]]] = []
    for number, given in enumerate(data.weight_schedule, start=1):
        step, weights = given.get("step"), given.get("weights")
        if given.keys() != {"step", "weights"} or not isinstance(weights, dict):
            raise refuse(number, "give it step and weights, as in {step: 9000, weights: {web: 1, code: 4}}")
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise refuse(number, f"step is {step!r}, not an integer that is at least 0")
        if found and step <= found[-1][0]:
            raise refuse(number, f"step {step} does not come after step {found[-1][0]}; sort them")
        for name, weight in weights.items():
            if name not in names:
                hint = did_you_mean_word("data.sources", name, names) or f"; there are {', '.join(names)}"
                raise refuse(number, f"there is no source {name}{hint}")
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not weight >= 0:
                raise refuse(number, f"the weight of {name} is {weight!r}, not a number that is at least 0")
        if not any(weights.values()):
            raise refuse(number, "all weights are 0; raise one")
        found.append((step, {name: float(weight) for name, weight in weights.items()}))
    return found
