"""Sources that a run trains and evaluates on, each with a complete ``data`` section.

An entry of ``data.sources`` or ``data.eval`` inherits the settings that it does not set from section
``data``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from portable.config.rules import SettingProblem
from portable.config.sections import DataConfig, MixedSource, SourceConfig
from portable.converters.similar_names import format_name_suggestion

if TYPE_CHECKING:
    from collections.abc import Iterator

ONLY_SOURCE = ""
"""Name of a source that is the only source of a run."""
HELD_OUT_SOURCE = "held_out"
"""Name of the samples that ``data.eval_fraction`` holds out, if ``data.eval`` has sources as well."""
_NOT_INHERITED = ("config_name", "split", "max_samples", "format")
"""Settings that a source of an evaluation or a mixture does not inherit if it names its own data."""
_WITHOUT_MIXTURE: dict[str, Any] = {"eval": None, "sources": (), "weight_schedule": ()}
"""Settings of a ``data`` section for a single source."""

RECORD_FIELDS = {
    *("text", "target", "label", "messages", "conversations", "prompt", "completion", "chosen"),
    *("rejected", "instruction", "input", "output", "history", "system", "system_prompt"),
    *("tools", "functions", "chat_template_kwargs"),
}
"""Fields of records that the formats read by these names. ``data.columns`` may rename them."""


def list_number_columns(data: SourceConfig) -> tuple[str, ...]:
    """Return the number columns in ``data.columns`` that are added to the batch for a custom loss."""
    return tuple(
        name for name in data.columns if not isinstance(data.columns, dict) or name not in RECORD_FIELDS
    )


def list_renamed_fields(data: SourceConfig) -> tuple[tuple[str, str], ...]:
    """Return the entries of ``data.columns`` as pairs of two names.

    Returns:
        Name that a format reads, and the field of a record that has the value. Empty if ``data.columns`` is a
        list. The token cache depends on the ``repr`` of the result.
    """
    return tuple(data.columns.items()) if isinstance(data.columns, dict) else ()


def format_training_source_key(name: str) -> str:
    """Return the dotted key of the training source ``name``, or ``data`` for the only source of a run."""
    return f"data.sources.{name}" if name else "data"


def format_eval_source_key(name: str) -> str:
    """Return the dotted key of the evaluation source ``name``, or ``data.eval`` for the only source."""
    return f"data.eval.{name}" if name else "data.eval"


def list_training_source_names(data: DataConfig) -> tuple[str, ...]:
    """Return the names of the sources of a mixture. Empty without ``data.sources``."""
    return tuple(source.name for source in data.sources)


def get_training_sources(data: DataConfig) -> dict[str, DataConfig]:
    """Return the ``data`` section of each training source by name.

    The only source has the name :data:`ONLY_SOURCE`.
    """
    return {source.name: _build_source_section(data, source, {}) for source in data.sources} or {
        ONLY_SOURCE: data
    }


def get_weight_schedule(data: DataConfig) -> list[tuple[int, dict[str, float]]]:
    """Return the entries of ``data.weight_schedule`` as pairs.

    Returns:
        First step with the weights, and the weights by the name of the source. The fingerprint of a mixture
        depends on the ``repr`` of the result.
    """
    return [(phase.step, phase.weights) for phase in data.weight_schedule]


def get_evaluation_sources(data: DataConfig) -> dict[str, DataConfig]:
    """Return the ``data`` section of each source in ``data.eval`` by name.

    The only source has the name :data:`ONLY_SOURCE`. Samples that ``data.eval_fraction`` holds out are not
    included.
    """
    sources = _get_evaluation_settings(data)
    return {
        name: _build_source_section(data, source, {"eval_fraction": 0.0}) for name, source in sources.items()
    }


def list_evaluation_source_names(data: DataConfig) -> list[str]:
    """Return the names of all data that a run evaluates on: evaluation sources, then held-out samples.

    Each source of a mixture has held-out samples, unless ``data.eval_fraction`` is 0.
    """
    names = list(_get_evaluation_settings(data))
    return (
        names
        if data.eval_fraction == 0
        else [*names, *(list_training_source_names(data) or [get_held_out_source_name(data)])]
    )


def get_held_out_source_name(data: DataConfig) -> str:
    """Return the name of the samples that are held out of the only training source.

    The name is empty if there is no other evaluation data.
    """
    return HELD_OUT_SOURCE if data.eval is not None else ONLY_SOURCE


def check_data_sources(data: DataConfig) -> Iterator[SettingProblem]:
    """Yield the problems of the names, weights and epochs of the sources, for training and for evaluation."""
    names: set[str] = set()
    if data.sources and data.source is not None:
        yield SettingProblem(
            ("data.source", "data.sources"),
            "data.source: has no effect with data.sources; remove data.source, or add the source to "
            "data.sources",
        )
    for source in data.sources:
        key = format_training_source_key(source.name)
        if source.name in names:
            reason = f"data.sources: two sources have the name {source.name}; rename one of the sources"
            yield SettingProblem(("data.sources",), reason)
        names.add(source.name)
        yield from _check_names_data(key, source)
        if source.weight is not None and source.epochs is not None:
            yield SettingProblem((key,), f"{key}: has both a weight and epochs; remove one of the two")
        if _build_source_section(data, source, {}).stream and source.weight is None:
            yield SettingProblem(
                (key,), f"{key}: the length of a stream is unknown, so epochs cannot be counted; set a weight"
            )
    weighted = [source.name for source in data.sources if source.weight is not None]
    if weighted and len(weighted) < len(data.sources):
        unweighted = next(name for name in list_training_source_names(data) if name not in weighted)
        yield SettingProblem(
            ("data.sources",),
            f"data.sources: {weighted[0]} has a weight and {unweighted} has none; set a weight, or "
            "epochs, for all sources",
        )
    if weighted and not any(source.weight for source in data.sources):
        yield SettingProblem(("data.sources",), "data.sources: all weights are 0; raise one of the weights")
    for name, evaluated in _get_evaluation_settings(data).items():
        key = format_eval_source_key(name)
        yield from _check_names_data(key, evaluated)
        if name in (list_training_source_names(data) or (HELD_OUT_SOURCE,)) and data.eval_fraction != 0:
            yield SettingProblem(
                (key, "data.eval_fraction"),
                f"{key}: the part that data.eval_fraction holds out has this name; choose another name, or "
                "set data.eval_fraction to 0",
            )
    yield from _check_weight_schedule(data)


def _check_weight_schedule(data: DataConfig) -> Iterator[SettingProblem]:
    """Yield the problems of ``data.weight_schedule``."""
    key, names = "data.weight_schedule", list_training_source_names(data)
    if data.weight_schedule and not names:
        yield SettingProblem(
            (key, "data.sources"), f"{key}: has no effect without data.sources; remove {key}"
        )
    previous = -1
    for number, phase in enumerate(data.weight_schedule, start=1):
        if phase.step <= previous:
            reason = f"step {phase.step} is not after step {previous}; sort the entries"
            yield SettingProblem((key,), f"{key}: entry {number}: {reason}")
        previous = phase.step
        for name in phase.weights.keys() - set(names):
            hint = format_name_suggestion(name, names) or f"; use one of {', '.join(names)}"
            yield SettingProblem((key,), f"{key}: entry {number}: there is no source {name}{hint}")
        if not any(phase.weights.values()):
            yield SettingProblem(
                (key,), f"{key}: entry {number}: all weights are 0; raise one of the weights"
            )


def _check_names_data(key: str, source: SourceConfig) -> Iterator[SettingProblem]:
    """Yield a problem if a source sets neither ``source`` nor ``split`` nor ``config_name``."""
    if not source.model_fields_set & {"source", "split", "config_name"}:
        reason = f"{key}: does not specify separate data; set source, or set split for a hub dataset"
        yield SettingProblem((key,), reason)


def _get_evaluation_settings(data: DataConfig) -> dict[str, SourceConfig]:
    """Return the settings of each source in ``data.eval`` by name, without inherited settings."""
    if data.eval is None:
        return {}
    return {ONLY_SOURCE: data.eval} if isinstance(data.eval, SourceConfig) else data.eval


def _build_source_section(
    data: DataConfig, source: SourceConfig, extra_settings: dict[str, Any]
) -> DataConfig:
    """Build the ``data`` section of one source.

    Args:
        data: Section that provides the settings that the source does not set.
        source: Settings of the source.
        extra_settings: Further settings. The source may override them.
    """
    mixture_only_names = MixedSource.model_fields.keys() - SourceConfig.model_fields.keys()
    values = {name: getattr(source, name) for name in source.model_fields_set - mixture_only_names}
    if "source" in values:
        values = {name: SourceConfig.model_fields[name].default for name in _NOT_INHERITED} | values
    return data.model_copy(update=_WITHOUT_MIXTURE | extra_settings | values)
