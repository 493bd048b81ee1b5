"""What the ``data`` section of a config says about one source."""

from __future__ import annotations

import re
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from portable.config.sections import DataConfig, SourceConfig
from portable.config.sources import eval_key, evaluation_sources, training_key, training_sources
from portable.data.sources.conversations import ANSWERING
from portable.data.sources.documents import BadRecords
from portable.data.sources.opening import Fields, Source, open_source
from portable.data.sources.shards import StreamedFiles, open_stream
from portable.errors import MissingDataError, UserError
from portable.paths import default_cache_dir

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portable.data.sources.conversations import Format

STREAMS = "streams"
"""The folder of the cache with the files and tokens of streams, of which old ones are removed."""
CAUSAL, MASKED, SEQ2SEQ, CLASSIFICATION = TASKS = (
    "causal-lm",
    "masked-lm",
    "seq2seq-lm",
    "sequence-classification",
)
PREFERENCE, FINISHED = "preference", "samples"


@contextmanager
def errors_under(key: str) -> Iterator[None]:
    """Within this context, errors about a setting of ``data`` name the same setting of ``key``."""
    if key == "data":
        yield
        return
    try:
        yield
    except UserError as error:
        own = "|".join(SourceConfig.model_fields)
        said = re.sub(rf"\bdata\.(?=({own})\b)", f"{key}.", str(error))
        kind = MissingDataError if isinstance(error, MissingDataError) else UserError
        raise kind(said if key in said else f"{key}: {said}") from error


def recognise_format(settings: DataConfig, task: str, *, downloads: bool = True) -> str:
    """The format of the records that ``data.format`` auto means; auto if that needs a download.

    Args:
        settings: the ``data`` section.
        task: one of ``TASKS``.
        downloads: whether a source may be downloaded.

    Raises:
        UserError: no format fits the first record, or several do; or only some sources have pairs.
    """
    found = {}
    for name, one in training_sources(settings).items():
        with errors_under(training_key(name)):
            found[training_key(name)] = _recognised_format(one.settings, task, downloads=downloads)
    # A run with conversations packs whole documents, and may have texts beside them.
    kinds = list(found.values())
    kind = next((kind for kind in kinds if kind not in ("auto", "text")), kinds[0])
    for name, own in evaluation_sources(settings).items():
        with errors_under(eval_key(name)):
            found[eval_key(name)] = _recognised_format(own, task, downloads=downloads)
    (first, of_first), *others = found.items()
    for key, other in others:
        if (of_first == PREFERENCE) != (other == PREFERENCE) and not {"auto", FINISHED} & {of_first, other}:
            raise UserError(
                f"{key}.source: has records of data.format {other}, and {first}.source of {of_first}; pairs "
                "go with pairs alone, so name other files"
            )
    return kind


def _recognised_format(settings: DataConfig, task: str, *, downloads: bool) -> str:
    """The format of one source."""
    if settings.format != "auto" or settings.source is None or task != CAUSAL:
        return "text" if task != CAUSAL or settings.source is None else settings.format
    source = source_of(settings, task, cache_dir(settings), remember=False)
    if source.downloads and not downloads:
        return "auto"
    kind = source.recognised(fields_of(settings, task))
    of_turns = settings.chat_template, settings.train_on, settings.roles_to_train, settings.split_turns
    if kind == "text" and any(of_turns):
        source.check()  # what the records lack comes before a setting that texts have no use for
    return kind


def recognised(
    settings: DataConfig, task: str, source: Source, *, remember: bool = True
) -> tuple[DataConfig, Source]:
    """The settings with the format of ``source``, and the source as one of that format."""
    kind = source.recognised(fields_of(settings, task))
    if kind == settings.format:
        return settings, source
    settings = settings.model_copy(update={"format": kind})
    if isinstance(source, StreamedFiles):
        return settings, source.reading(fields_of(settings, task))
    return settings, source_of(settings, task, cache_dir(settings), remember=remember)


def source_of(settings: DataConfig, task: str, cache: Path, *, remember: bool = True) -> Source:
    if task not in TASKS:
        raise UserError(f"model.task: {task!r} is not one of {', '.join(TASKS)}")
    if settings.seq_len < 1:
        raise UserError(f"data.seq_len: {settings.seq_len} is less than 1; give a positive number")
    if not 0 <= settings.eval_fraction < 1:
        raise UserError(f"data.eval_fraction: {settings.eval_fraction} is not in [0, 1); lower it")
    if settings.stream:
        cache = cache / STREAMS
        return open_stream(
            settings.source,
            fields_of(settings, task),
            config_name=settings.config_name,
            split=settings.split,
            downloads=cache / "downloads",
            digests=cache / "digests",
            remember=remember,
        )
    return open_source(
        settings.source,
        fields=fields_of(settings, task),
        config_name=settings.config_name,
        split=settings.split,
        max_samples=settings.max_samples,
        digests=cache / "digests",
        downloads=cache / "downloads",
        remember=remember,
    )


def fields_of(settings: DataConfig, task: str) -> Fields:
    return Fields(
        text=settings.text_field,
        target=settings.target_field if task == SEQ2SEQ else None,
        label=settings.label_field if task == CLASSIFICATION else None,
        text_split=settings.text_split,
        pair=settings.text_pair_field if task == CLASSIFICATION else None,
        prefix=settings.source_prefix if task == SEQ2SEQ else "",
        bad=BadRecords() if settings.on_bad_record == "skip" else None,
        columns=settings.columns,
        format=None if settings.format == "auto" and task == CAUSAL else _format(settings, task),
        roles=frozenset(settings.roles_to_train or ANSWERING),
    )


def _format(settings: DataConfig, task: str) -> Format:
    kind = settings.format
    return "text" if kind == "auto" or task != CAUSAL else kind


def converses(settings: DataConfig) -> bool:
    """Whether the records are conversations, or prompts with completions; asked once the format is known."""
    return settings.format not in ("auto", "text", "samples")


def packs(settings: DataConfig, task: str) -> bool | Literal["documents"]:
    return settings.packing if task in (CAUSAL, MASKED) else False


def cache_dir(settings: DataConfig) -> Path:
    return default_cache_dir() if settings.cache_dir is None else Path(settings.cache_dir)


def languages_of(settings: DataConfig, task: str) -> dict[str, Any]:
    if task != SEQ2SEQ:
        return {}
    return {"source_language": settings.source_language, "target_language": settings.target_language}
