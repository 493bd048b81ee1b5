"""The sources that a run trains and evaluates on, each with the whole ``data`` section as it has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from portable.config.sections import DataConfig, MixedSource, SourceConfig
from portable.config.suggest import did_you_mean_word

if TYPE_CHECKING:
    from collections.abc import Iterator

ALONE = ""
"""The name of a source that is the only one."""
HELD_OUT = "held_out"
"""The name of the share that ``data.eval_fraction`` holds out, beside sources of ``data.eval``."""
_OF_ONE_SOURCE = ("config_name", "split", "max_samples", "format")
"""Not taken over by a source of its own: which part of the training's source is read, and as what."""
_ALONE: dict[str, Any] = {"eval": None, "sources": (), "weight_schedule": ()}

RECORD_FIELDS = {
    *("text", "target", "label", "messages", "conversations", "prompt", "completion", "chosen"),
    *("rejected", "instruction", "input", "output", "history", "system", "system_prompt"),
    *("tools", "functions", "chat_template_kwargs"),
}
"""Fields that a format of records reads by these names."""


def number_columns(data: SourceConfig) -> tuple[str, ...]:
    """Return the names of the columns of numbers in ``data.columns``."""
    return tuple(
        name for name in data.columns if not isinstance(data.columns, dict) or name not in RECORD_FIELDS
    )


def renamed_fields(data: SourceConfig) -> tuple[tuple[str, str], ...]:
    """Return pairs of a name that is read and the field of a record that has its value."""
    return tuple(data.columns.items()) if isinstance(data.columns, dict) else ()


def training_key(name: str) -> str:
    """The dotted key of the source ``name``; of the ``data`` section for the only source of a run."""
    return f"data.sources.{name}" if name else "data"


def eval_key(name: str) -> str:
    """The dotted key of the evaluation source ``name``."""
    return f"data.eval.{name}" if name else "data.eval"


def training_names(data: DataConfig) -> tuple[str, ...]:
    """The names of the sources of a mixture, none without ``data.sources``."""
    return tuple(one.name for one in data.sources)


def training_sources(data: DataConfig) -> dict[str, DataConfig]:
    """The settings of each source to train on, by name; ``ALONE`` for one without ``data.sources``."""
    return {one.name: _settings(data, one, {}) for one in data.sources} or {ALONE: data}


def weight_schedule(data: DataConfig) -> list[tuple[int, dict[str, float]]]:
    """The steps from which ``data.weight_schedule`` gives other weights, with these by name."""
    return [(phase.step, phase.weights) for phase in data.weight_schedule]


def evaluation_sources(data: DataConfig) -> dict[str, DataConfig]:
    """The settings of each evaluation source, by name; ``ALONE`` for a single one, empty without any."""
    return {name: _settings(data, one, {"eval_fraction": 0.0}) for name, one in _evaluated(data).items()}


def evaluation_names(data: DataConfig) -> list[str]:
    """The names of all that a run evaluates on."""
    names = list(_evaluated(data))
    return names if data.eval_fraction == 0 else [*names, *(training_names(data) or [held_out_name(data)])]


def held_out_name(data: DataConfig) -> str:
    """The name of what the only source of a run holds out."""
    return HELD_OUT if data.eval is not None else ALONE


def mistakes_of_sources(data: DataConfig) -> Iterator[str]:
    """What is wrong with the sources together, in one line each."""
    names: set[str] = set()
    if data.sources and data.source is not None:
        yield "data.source: has no effect with data.sources; remove it, or make it one of data.sources"
    for one in data.sources:
        key = training_key(one.name)
        if one.name in names:
            yield f"data.sources: two sources are named {one.name}; rename one"
        names.add(one.name)
        yield from _nameless(key, one)
        if one.weight is not None and one.epochs is not None:
            yield f"{key}: has a weight and epochs; remove one of the two"
        settings = _settings(data, one, {})
        if settings.stream and one.weight is None:
            yield f"{key}: a stream has no epochs that are known; give it a weight"
    weighed = [one.name for one in data.sources if one.weight is not None]
    if weighed and len(weighed) < len(data.sources):
        other = next(name for name in training_names(data) if name not in weighed)
        yield f"data.sources: {weighed[0]} has a weight and {other} has none; give a weight to all, or epochs"
    if weighed and not any(one.weight for one in data.sources):
        yield "data.sources: all weights are 0; raise one"
    for name, evaluated in _evaluated(data).items():
        key = eval_key(name)
        yield from _nameless(key, evaluated)
        if name in (training_names(data) or (HELD_OUT,)) and data.eval_fraction != 0:
            reason = "the share of data.eval_fraction has this name; choose another, or set "
            yield f"{key}: {reason}data.eval_fraction to 0"
    yield from _of_schedule(data)


def _of_schedule(data: DataConfig) -> Iterator[str]:
    key, names = "data.weight_schedule", training_names(data)
    if data.weight_schedule and not names:
        yield f"{key}: has no effect without data.sources"
    before = -1
    for number, phase in enumerate(data.weight_schedule, start=1):
        if phase.step <= before:
            yield f"{key}: entry {number}: step {phase.step} does not come after step {before}; sort them"
        before = phase.step
        for name in phase.weights.keys() - set(names):
            hint = did_you_mean_word("data.sources", name, names) or f"; there are {', '.join(names)}"
            yield f"{key}: entry {number}: there is no source {name}{hint}"
        if not any(phase.weights.values()):
            yield f"{key}: entry {number}: all weights are 0; raise one"


def _nameless(key: str, one: SourceConfig) -> Iterator[str]:
    if not one.model_fields_set & {"source", "split", "config_name"}:
        yield f"{key}: names no data of its own; set source, or split of a hub dataset"


def _evaluated(data: DataConfig) -> dict[str, SourceConfig]:
    if data.eval is None:
        return {}
    return {ALONE: data.eval} if isinstance(data.eval, SourceConfig) else data.eval


def _settings(data: DataConfig, one: SourceConfig, more: dict[str, Any]) -> DataConfig:
    """The ``data`` section as a source has it: what ``one`` leaves out is as there."""
    own = MixedSource.model_fields.keys() - SourceConfig.model_fields.keys()
    given = {name: getattr(one, name) for name in one.model_fields_set - own}
    if "source" in given:
        given = {name: SourceConfig.model_fields[name].default for name in _OF_ONE_SOURCE} | given
    return data.model_copy(update=_ALONE | more | given)
