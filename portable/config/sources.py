"""List the data sources of a run, and build a complete ``data`` section for each of them.

An entry of ``data.sources`` or ``data.eval`` inherits unset settings from the section ``data``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from portable.config.rules import SettingProblem
from portable.config.sections import DataConfig, MixedSource, SourceConfig
from portable.converters.similar_names import format_name_suggestion

if TYPE_CHECKING:
    from collections.abc import Iterator

ONLY_SOURCE = ""
"""Name of the training source or the evaluation source of a run if there is only one."""
HELD_OUT_SOURCE = "held_out"
"""Name of the held-out samples (``data.eval_fraction``) if ``data.eval`` has evaluation sources as well."""
_NOT_INHERITED = ("config_name", "split", "max_samples", "format")
"""Settings that an entry of ``data.sources`` or ``data.eval`` does not inherit if it sets ``source``."""
_WITHOUT_MIXTURE: dict[str, Any] = {"eval": None, "sources": (), "weight_schedule": ()}
"""Values that remove all other sources from the ``data`` section of a single source."""

RECORD_FIELDS = {
    *("text", "target", "label", "messages", "conversations", "prompt", "completion", "chosen"),
    *("rejected", "instruction", "input", "output", "history", "system", "system_prompt"),
    *("tools", "functions", "chat_template_kwargs", "images", "image"),
}
"""Names of the fields that the values of ``data.format`` expect in a record.

A key of ``data.columns`` with such a name renames a field. Any other key is an additional number column."""


def list_number_columns(data: SourceConfig) -> tuple[str, ...]:
    """Return the names of the numeric columns in ``data.columns``, which a custom loss can use.

    These are the names in the batch, such as ``weight`` for ``{weight: score}``. In a mapping, the
    names in :data:`RECORD_FIELDS` rename a field and are not included.
    """
    return tuple(
        name for name in data.columns if not isinstance(data.columns, dict) or name not in RECORD_FIELDS
    )


def list_renamed_fields(data: SourceConfig) -> tuple[tuple[str, str], ...]:
    """Return the entries of ``data.columns`` as pairs of an expected name and the record's field name.

    The result must stay a tuple of tuples. The key of the token cache contains its ``repr``, so
    another type would invalidate existing caches.

    Returns:
        The pairs. Empty if ``data.columns`` is a list.
    """
    return tuple(data.columns.items()) if isinstance(data.columns, dict) else ()


def format_training_source_key(name: str) -> str:
    """Return the dotted key of a training source, such as ``data.sources.web``.

    For :data:`ONLY_SOURCE`, this is ``data``.
    """
    return f"data.sources.{name}" if name else "data"


def format_eval_source_key(name: str) -> str:
    """Return the dotted key of an evaluation source, such as ``data.eval.news``.

    For :data:`ONLY_SOURCE`, this is ``data.eval``.
    """
    return f"data.eval.{name}" if name else "data.eval"


def list_training_source_names(data: DataConfig) -> tuple[str, ...]:
    """Return the names of the sources in ``data.sources``. Empty if the run does not train on a mixture."""
    return tuple(source.name for source in data.sources)


def get_training_sources(data: DataConfig) -> dict[str, DataConfig]:
    """Build a complete ``data`` section for each training source.

    Returns:
        Sections, keyed by source name. Without a mixture, the only key is :data:`ONLY_SOURCE`.
    """
    return {source.name: _build_source_section(data, source, {}) for source in data.sources} or {
        ONLY_SOURCE: data
    }


def get_weight_schedule(data: DataConfig) -> list[tuple[int, dict[str, float]]]:
    """Return the entries of ``data.weight_schedule`` as pairs.

    Do not change the types in the result: the fingerprint of a mixture contains its ``repr``.

    Returns:
        Pairs ``(step, weights)``. The weights are keyed by source name, and apply from this step
        on.
    """
    return [(phase.step, phase.weights) for phase in data.weight_schedule]


def get_evaluation_sources(data: DataConfig) -> dict[str, DataConfig]:
    """Build a complete ``data`` section for each source in ``data.eval``.

    The samples held out by ``data.eval_fraction`` are not included.

    Returns:
        Sections, keyed by source name. If ``data.eval`` is a single source, the only key is
        :data:`ONLY_SOURCE`. Empty if ``data.eval`` is not set.
    """
    sources = _get_evaluation_settings(data)
    return {
        name: _build_source_section(data, source, {"eval_fraction": 0.0}) for name, source in sources.items()
    }


def list_evaluation_source_names(data: DataConfig) -> list[str]:
    """Return the names of all evaluation sources.

    The sources in ``data.eval`` come first, then the held-out samples. If ``data.eval_fraction`` is
    0, no samples are held out. In a mixture, each training source has its own held-out samples,
    listed under the name of this source. Without ``data.sources``,
    :func:`get_held_out_source_name` returns the name of the held-out samples.
    """
    names = list(_get_evaluation_settings(data))
    if data.eval_fraction == 0:
        return names
    held_out = [name for name, section in get_training_sources(data).items() if not section.stream]
    return [*names, *(name or get_held_out_source_name(data) for name in held_out)]


def get_held_out_source_name(data: DataConfig) -> str:
    """Return the name of the held-out samples in a run that trains on a single source.

    This is :data:`ONLY_SOURCE` if there is no other evaluation data, otherwise :data:`HELD_OUT_SOURCE`.
    """
    return HELD_OUT_SOURCE if data.eval is not None else ONLY_SOURCE


def check_data_sources(data: DataConfig) -> Iterator[SettingProblem]:
    """Yield the problems with the training and evaluation sources and their weights.

    ``data.source`` and ``data.sources`` exclude each other. Training sources must have different
    names, and an evaluation source must not have the name of held-out samples. Each entry must
    specify its own data. A source cannot have both a weight and epochs, and a stream needs a
    weight. Either all sources of a mixture have weights, or no source has a weight. At least one
    weight must be positive. ``data.weight_schedule`` is checked as well.
    """
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
            yield SettingProblem((key,), f"{key}: has both a weight and epochs; remove weight or epochs")
        if _build_source_section(data, source, {}).stream and source.weight is None:
            yield SettingProblem(
                (key,),
                f"{key}: the length of a stream is unknown, so epochs cannot be counted; set {key}.weight to "
                "a number",
            )
    weighted = [source.name for source in data.sources if source.weight is not None]
    if weighted and len(weighted) < len(data.sources):
        unweighted = next(name for name in list_training_source_names(data) if name not in weighted)
        yield SettingProblem(
            ("data.sources",),
            f"data.sources: {weighted[0]} has a weight, but {unweighted} does not; set a weight for "
            "all sources, or replace all weights with epochs",
        )
    if weighted and not any(source.weight for source in data.sources):
        yield SettingProblem(("data.sources",), "data.sources: all weights are 0; raise at least one weight")
    for name, evaluated in _get_evaluation_settings(data).items():
        key = format_eval_source_key(name)
        yield from _check_names_data(key, evaluated)
        if name in (list_training_source_names(data) or (HELD_OUT_SOURCE,)) and data.eval_fraction != 0:
            yield SettingProblem(
                (key, "data.eval_fraction"),
                f"{key}: the data that data.eval_fraction holds out has the same name; choose another name, "
                "or set data.eval_fraction to 0",
            )
    yield from _check_weight_schedule(data)


def _check_weight_schedule(data: DataConfig) -> Iterator[SettingProblem]:
    """Yield the problems with ``data.weight_schedule``.

    The setting requires ``data.sources``. The steps of its entries must increase. Each entry must
    contain only sources of the mixture, and at least one positive weight.
    """
    key, names = "data.weight_schedule", list_training_source_names(data)
    if data.weight_schedule and not names:
        yield SettingProblem(
            (key, "data.sources"), f"{key}: has no effect without data.sources; remove {key}"
        )
        return
    previous = -1
    for number, phase in enumerate(data.weight_schedule, start=1):
        if phase.step <= previous:
            reason = f"step {phase.step} is not after step {previous}; sort the entries by step"
            yield SettingProblem((key,), f"{key}: entry {number}: {reason}")
        previous = phase.step
        for name in phase.weights.keys() - set(names):
            hint = format_name_suggestion(name, names) or f"; use one of {', '.join(names)}"
            yield SettingProblem((key,), f"{key}: entry {number}: unknown source {name}{hint}")
        if not any(phase.weights.values()):
            yield SettingProblem(
                (key,), f"{key}: entry {number}: all weights are 0; raise at least one weight"
            )


def _check_names_data(key: str, source: SourceConfig) -> Iterator[SettingProblem]:
    """Yield a problem if an entry does not specify its own data.

    An entry that sets none of ``source``, ``split`` and ``config_name`` inherits all three, so it
    would contain the same records as the section ``data``.

    Args:
        key: Dotted key of the entry.
        source: Entry of ``data.sources`` or ``data.eval``.
    """
    if not source.model_fields_set & {"source", "split", "config_name"}:
        reason = (
            f"{key}: would contain the same records as the data section; set {key}.source to other data or, "
            f"for a hub dataset, {key}.split to another split"
        )
        yield SettingProblem((key,), reason)


def _get_evaluation_settings(data: DataConfig) -> dict[str, SourceConfig]:
    """Return the entries of ``data.eval``, keyed by name, as they are in the config.

    Settings that an entry inherits from the section ``data`` are not filled in. If ``data.eval`` is
    a single source, its key is :data:`ONLY_SOURCE`. Empty if ``data.eval`` is not set.
    """
    if data.eval is None:
        return {}
    return {ONLY_SOURCE: data.eval} if isinstance(data.eval, SourceConfig) else data.eval


def _build_source_section(
    data: DataConfig, source: SourceConfig, extra_settings: dict[str, Any]
) -> DataConfig:
    """Build a complete ``data`` section for one source.

    The section does not contain ``data.sources``, ``data.weight_schedule`` or ``data.eval``. If the
    entry sets ``source``, it does not inherit the settings in :data:`_NOT_INHERITED`.

    Args:
        data: Section ``data`` of the run. The source inherits unset settings from it.
        source: Entry of ``data.sources`` or ``data.eval``.
        extra_settings: Settings that override inherited settings, but not the source's own
            settings.
    """
    mixture_only_names = MixedSource.model_fields.keys() - SourceConfig.model_fields.keys()
    values = {name: getattr(source, name) for name in source.model_fields_set - mixture_only_names}
    if "source" in values:
        values = {name: SourceConfig.model_fields[name].default for name in _NOT_INHERITED} | values
    return data.model_copy(update=_WITHOUT_MIXTURE | extra_settings | values)
