"""Build the tokenizer, training samples and evaluation samples from the ``data`` section.

Training calls :func:`build_data`. The plan of a run needs only the numbers of documents, tokens and
samples. :func:`inspect_data_sizes` computes these numbers without writing or downloading anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, cast

from typing_extensions import Unpack

from portable.config.sources import (
    ONLY_SOURCE,
    format_training_source_key,
    get_held_out_source_name,
    get_weight_schedule,
)
from portable.data.samples.base import SampleRange, split_documents
from portable.data.samples.classes import (
    LabelMapping,
    ModelClasses,
    ProblemType,
    map_eval_labels_to_outputs,
    map_labels_to_outputs,
)
from portable.data.sizes import DataSizes, EvalSize, compute_data_sizes
from portable.data.sources.documents import compute_text_digest
from portable.data.sources.source import CAUSAL, CLASSIFICATION, CUSTOM_SAMPLES, MASKED
from portable.data.sources.source_kinds import (
    StreamSource,
    build_evaluation_settings,
    build_training_settings,
    open_source,
)
from portable.data.tokenization import TokenizationContext
from portable.data.tokens.tokenizer import (
    Vocabulary,
    add_tokens,
    get_trained_tokenizer_folder,
    has_trained_tokenizer,
    load_tokenizer,
    resolve_trained_vocab_size,
    train_tokenizer,
)
from portable.errors import UserError
from portable.formatting import format_count

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from portable.config.sections import DataConfig
    from portable.data.samples.base import Samples
    from portable.data.samples.mixture import MixtureShare
    from portable.data.samples.tasks import LabelShift
    from portable.data.sources.source import DataSource, SourceSettings
    from portable.data.stream import StreamSamples
    from portable.data.tokenization import TokenizedSource
    from portable.data.tokens.cache import TokenCache
    from portable.data.tokens.image_processing import ImageProcessor
    from portable.data.tokens.special_tokens import Frame


@dataclass(frozen=True)
class RunData:
    """Tokenizer, training samples and evaluation samples of a run, with statistics of the data."""

    tokenizer: Any
    """Tokenizer of transformers."""
    train: Samples
    """Samples to train on. A :class:`MixtureSamples` if ``data.sources`` has several sources."""
    evals: Mapping[str, Samples]
    """Samples to evaluate on, keyed by source name. The key is empty if there is only one source."""
    sizes: DataSizes
    """Numbers of documents, tokens and samples, for the first lines of the run and for the plan."""
    fingerprint: str
    """Digest of all training tokens and labels. It is equal on all machines with the same text and
    tokenizer.
    """
    vocab_size: int
    """Minimum number of rows of the model's embedding: the number of tokens of the tokenizer, or its largest
    token id plus one if that is larger.
    """
    classes: LabelMapping | None = None
    """Mapping from the labels to the outputs of a classifier. None if the task is not classification."""
    target_frame: Frame | None = None
    """Special tokens around each target text. None if the task is not seq2seq."""
    tokenized_sources: Mapping[str, TokenizedSource] = field(default_factory=dict)
    """Tokenized sources of ``train``, keyed by name. A single source has the empty name."""
    end_of_turn_token: int | None = None
    """Token that ends an answer in conversations. None if no source has conversations."""
    stream_names: tuple[str, ...] = ()
    """Names of the sources that are tokenized during training. ``tokenized_sources`` contains only the first
    shard of each stream.
    """
    eval_fingerprints: Mapping[str, str] = field(default_factory=dict)
    """Fingerprint of each source of ``data.eval``, keyed by name.

    Unlike ``fingerprint``, these may change when a run resumes, because evaluation data does not affect the
    training.
    """

    @property
    def first_tokens(self) -> TokenCache:
        """Token cache of the first training source.

        For a stream, this is the token cache of a single shard. Raises ``StopIteration`` if the
        samples come from user-defined code, because they have no token cache.
        """
        return next(iter(self.tokenized_sources.values())).tokens

    @property
    def first_eval(self) -> Samples | None:
        """Samples of the first evaluation source. None if there is no evaluation data."""
        return next(iter(self.evals.values()), None)

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of the classifier's outputs, in the order of their ids. Empty for other tasks."""
        return () if self.classes is None else self.classes.output_names

    @property
    def num_labels(self) -> int | None:
        """Number of outputs of the classifier. None for other tasks."""
        return len(self.label_names) or None

    @property
    def description(self) -> str:
        """One-line summary of the data: its sources, tokenizer, and numbers of tokens and samples."""
        return str(self.sizes)


class ModelDataHints(TypedDict, total=False):
    """Properties of the model and its loss that :func:`build_data` uses. All keys are optional."""

    model_tokenizer: str | None
    """Hub id or folder of the pretrained model's tokenizer, used if ``data.tokenizer`` is null.

    If this is None as well, a tokenizer is trained on the sources.
    """
    model_vocab_size: int | None
    """Vocabulary size of a trained tokenizer if ``data.vocab_size`` is null."""
    trust_remote_code: bool
    """Whether Python code of the tokenizer may run."""
    ends_texts: bool
    """Whether every text must end with the end token, because the model classifies at this token."""
    seed: int
    """Seed of the random masks of a masked language model, and of the sample order of a stream."""
    decoder_start_token_id: int | Callable[[Any], int] | None
    """First decoder input of seq2seq. None means the padding token.

    It is a token id, a function that computes the token id from the tokenizer, or ``LAST_LABEL``.
    """
    label_shift: Callable[[Any], LabelShift | None] | None
    """Function that takes a tokenizer and returns the :data:`LabelShift` of a masked language model.

    None if the model does not have a decoder.
    """
    pad_left: bool
    """Whether a classifier's texts are padded on the left."""
    whole: bool
    """Whether the inputs of a causal model include the last token of a padded sample.

    By default, the last token is only a label.
    """
    with_last: bool
    """Whether the inputs of a causal model include the last token of a text if the text fits into
    ``data.seq_len``. The last token of a longer text is only a label.
    """


class _RunSamples(NamedTuple):
    """Training and evaluation samples, each keyed by source name."""

    train: dict[str, Samples]
    evals: dict[str, Samples]


def _build_run_samples(
    settings: DataConfig, sources: RunSources, classes: LabelMapping | None
) -> _RunSamples:
    """Build the training and evaluation samples of each source.

    Samples that are held out from a training source become evaluation samples.

    Args:
        settings: The ``data`` section of the config.
        sources: Opened sources of the run, with their tokens.
        classes: Mapping from the labels of the first training source to the outputs of the
            classifier. None for other tasks.
    """
    first = next(iter(sources.tokenized_training_sources.values()))
    train: dict[str, Samples] = {}
    held_out: dict[str, Samples] = {}
    for name, tokenized in sources.tokenized_training_sources.items():
        with tokenized.settings.convert_errors():
            if name in sources.streams:
                train[name] = sources.streams[name]
                continue
            source_classes = classes if tokenized is first else _map_eval_classes(classes, first, tokenized)
            to_train, held_out_part = tokenized.split_samples()
            train[name] = tokenized.build_samples(to_train, source_classes)
            if held_out_part.num_samples:
                held_out[name or get_held_out_source_name(settings)] = tokenized.build_samples(
                    held_out_part, source_classes
                )
    evals: dict[str, Samples] = {}
    for name, tokenized in sources.tokenized_eval_sources.items():
        with tokenized.settings.convert_errors():
            evals[name] = tokenized.build_samples(classes=_map_eval_classes(classes, first, tokenized))
    return _RunSamples(train, evals | held_out)


def build_data(
    settings: DataConfig,
    *,
    task: str = CAUSAL,
    model_classes: ModelClasses | None = None,
    problem_type: ProblemType | None = None,
    global_batch_size: int = 1,
    progress: bool = False,
    **hints: Unpack[ModelDataHints],
) -> RunData:
    """Open the data of a run, and tokenize the sources that are not in the token cache.

    Must be called on all ranks with the same arguments. On each machine, one rank writes missing
    caches and shows progress, and the other ranks wait.

    Args:
        settings: The ``data`` section of the config.
        task: Task of the model, one of ``TASKS``.
        model_classes: Label names that a classifier's trained head or ``model.config`` defines. If
            None, a classifier takes its classes from the labels in the data. Other tasks ignore
            this argument.
        problem_type: ``problem_type`` in the model's config. If None, it is regression if
            ``model_classes`` contains a single output. Otherwise, it is determined from the labels.
        global_batch_size: Number of samples per step, used to convert the steps of
            ``data.weight_schedule`` to samples.
        progress: Whether to show a progress bar on stderr if tokenizing takes more than a second.
        **hints: Properties of the model. See :class:`ModelDataHints`.

    Returns:
        The tokenizer, the samples to train and evaluate on, and their sizes.

    Raises:
        UserError: If the settings or the data cannot be used.
    """
    sources = open_sources(settings, task, progress=progress, **hints)
    context = sources.context
    assert context is not None
    if sources.custom_samples_source is not None:
        return _build_custom_sample_data(settings, sources, context, hints.get("model_vocab_size") or 0)
    opened, streams = sources.tokenized_training_sources, sources.streams
    first = next(iter(opened.values()))
    classes: LabelMapping | None = None
    if task == CLASSIFICATION:
        classes = map_labels_to_outputs(first.tokens, first.source.class_names, model_classes, problem_type)
    train, evals = _build_run_samples(settings, sources, classes)
    prints = {
        name: streams[name].fingerprint if name in streams else source.tokens.fingerprint
        for name, source in opened.items()
    }
    mixed = _build_mixture(settings, train, global_batch_size, task) if ONLY_SOURCE not in train else None
    return RunData(
        tokenizer=context.tokenizer,
        train=mixed or train[ONLY_SOURCE],
        evals=evals,
        sizes=sources.compute_sizes(),
        fingerprint=prints[ONLY_SOURCE] if mixed is None else _compute_mixture_fingerprint(settings, prints),
        vocab_size=context.vocabulary.size,
        classes=classes,
        target_frame=context.build_target_frame(first.settings),
        tokenized_sources=opened,
        end_of_turn_token=sources.end_of_turn_token,
        stream_names=tuple(streams),
        eval_fingerprints={
            name: source.tokens.fingerprint for name, source in sources.tokenized_eval_sources.items()
        },
    )


def inspect_data_sizes(
    settings: DataConfig, *, task: str = CAUSAL, **hints: Unpack[ModelDataHints]
) -> DataSizes:
    """Compute the sizes of the data without writing or downloading anything.

    A size is None if its computation requires a download. A size that requires tokens is also None
    if the data has not been tokenized yet, or if a training source is a stream.

    There is one exception to the rule that nothing is written: if image files have new modification
    times but the same contents, the token cache records this.

    Args:
        settings: The ``data`` section of the config.
        task: Task of the model, one of ``TASKS``.
        **hints: Properties of the model. See :class:`ModelDataHints`.

    Raises:
        UserError: If ``build_data`` would reject the settings or the first document of a source.
            Documents that require a download are not checked.
        MissingDataError: If a path of a source does not exist, or if its pattern matches no file.
    """
    sources = open_sources(settings, task, offline=True, **hints)
    if sources.custom_samples_source is not None and sources.context is not None:
        return _build_custom_sample_data(
            settings, sources, sources.context, hints.get("model_vocab_size") or 0
        ).sizes
    return sources.compute_sizes()


@dataclass
class RunSources:
    """Opened sources of a run, with their tokens if they are available.

    :func:`open_sources` sets the attributes. With ``offline=True``, attributes that would require a
    write or a download keep their defaults. With ``tokenize=False``, or if the samples come from
    user-defined code, the attributes after ``context`` also keep their defaults.

    Attributes:
        training_sources: Sources to train on, keyed by name. A single source has the empty
            name.
        eval_sources: Sources to evaluate on, keyed by name.
        tokenizer_name: Hub id or folder of the tokenizer. None if the tokenizer is trained on
            the data.
        vocab_size: Number of tokens of the tokenizer, or its largest token id plus one if that is
            larger. The requested size if the tokenizer is not trained yet. None if neither is
            known.
        context: Tokenizer and task. None if the tokenizer or the image processor is not
            available offline.
        tokenized_training_sources: Tokenized training sources, keyed by name. For a stream,
            only the first shard.
        tokenized_eval_sources: Tokenized evaluation sources, keyed by name.
        streams: Samples of the streams, keyed by source name.
        end_of_turn_token: Token that ends an answer in conversations. None if it is not known.
    """

    training_sources: dict[str, DataSource]
    eval_sources: dict[str, DataSource]
    tokenizer_name: str | None = None
    vocab_size: int | None = None
    context: TokenizationContext | None = None
    tokenized_training_sources: dict[str, TokenizedSource] = field(default_factory=dict)
    tokenized_eval_sources: dict[str, TokenizedSource] = field(default_factory=dict)
    streams: dict[str, StreamSamples] = field(default_factory=dict)
    end_of_turn_token: int | None = None

    @property
    def joined_training_source(self) -> DataSource:
        """Source with the documents of all training sources, to train a tokenizer on.

        If there is only one training source, the result is this source.
        """
        if ONLY_SOURCE in self.training_sources:
            return self.training_sources[ONLY_SOURCE]
        from portable.data.sources.joined_sources import InterleavedSource

        return InterleavedSource(list(self.training_sources.values()))

    @property
    def custom_samples_source(self) -> DataSource | None:
        """The single training source if its samples come from user-defined code, otherwise None.

        Raises:
            UserError: If such a source is part of a mixture.
        """
        for name, source in self.training_sources.items():
            if source.settings.data.format == CUSTOM_SAMPLES:
                if name:
                    raise UserError(
                        f"{format_training_source_key(name)}: finished samples (data.format: samples) cannot "
                        "be part of a mixture; use a source that contains text, or train only on this "
                        "source with data.source"
                    )
                return source
        return None

    def compute_sizes(self) -> DataSizes:
        """Compute the total sizes over all sources.

        Sizes that require tokens, such as the number of documents, are None if a training source
        has not been tokenized or is a stream.

        Raises:
            UserError: If the samples of a tokenized source cannot be counted, for example because
                it has too few tokens for one sample, or if the tokenizer does not fit the settings.
        """
        local_sources = {
            name: source
            for name, source in self.tokenized_training_sources.items()
            if name not in self.streams
        }
        counts = {name: source.count_samples().train for name, source in self.tokenized_eval_sources.items()}
        context, trained_on = (
            self.context,
            self.joined_training_source.content_digests if self.eval_sources else frozenset(),
        )
        sizes = compute_data_sizes(self.training_sources, local_sources, self.tokenizer_name, self.vocab_size)
        evaluated = (source.tokens.meta for source in self.tokenized_eval_sources.values())
        notes = [note for meta in evaluated for note in meta.get("notes", ())]
        return replace(
            sizes,
            notes=tuple(dict.fromkeys([*sizes.notes, *notes])),
            evals={
                name: EvalSize(source.name, counts.get(name)) for name, source in self.eval_sources.items()
            },
            evals_in_training_data=tuple(
                name for name, source in self.eval_sources.items() if trained_on & source.content_digests
            ),
            image_processor=None if context is None else context.image_processor,
            tokenizer_object=None if context is None else context.tokenizer,
            end_of_turn_token=self.end_of_turn_token,
            target_frame=None
            if context is None
            else context.build_target_frame(next(iter(self.training_sources.values())).settings),
        )


def open_sources(
    settings: DataConfig,
    task: str,
    *,
    offline: bool = False,
    tokenize: bool = True,
    progress: bool = False,
    **hints: Unpack[ModelDataHints],
) -> RunSources:
    """Open the sources, load or train the tokenizer, and open or build the token caches.

    A token cache contains the tokenized documents of one source.

    Args:
        settings: The ``data`` section of the config.
        task: Task of the model, one of ``TASKS``.
        offline: Whether to avoid all writes and downloads. Attributes of the result that require a
            write or a download are not set.
        tokenize: Whether to open or build the token caches.
        progress: Whether to show a progress bar.
        **hints: Properties of the model. See :class:`ModelDataHints`.

    Raises:
        UserError: If the settings or the data cannot be used.
    """
    sources = RunSources({}, {}, settings.tokenizer or hints.get("model_tokenizer"))
    _open_training_sources(sources.training_sources, build_training_settings(settings, task, offline=offline))
    _open_eval_sources(sources, build_evaluation_settings(settings, task, offline=offline))
    if sources.tokenizer_name is None and sources.custom_samples_source is not None:
        raise UserError(
            "data.tokenizer: is required for finished samples (data.format: samples); set data.tokenizer to "
            "the tokenizer that created the samples"
        )
    tokenizer = _load_or_train_tokenizer(sources, settings, hints)
    if tokenizer is None:
        return sources
    image_processor = None
    if settings.images:
        image_processor = _load_image_processor(tokenizer, settings, hints, offline=offline)
        if image_processor is None:
            return sources
    context = sources.context = TokenizationContext(
        task,
        tokenizer,
        Vocabulary.from_tokenizer(tokenizer),
        seed=hints.get("seed", 0),
        decoder_start_token_id=hints.get("decoder_start_token_id"),
        label_shift=hints.get("label_shift"),
        pad_left=hints.get("pad_left", False),
        keep_last_input=hints.get("whole", False),
        keep_last_input_if_room=hints.get("with_last", False),
        image_processor=image_processor,
    )
    context.check_special_tokens(ends_texts=hints.get("ends_texts", False))
    sources.vocab_size = context.vocabulary.size
    if not tokenize or sources.custom_samples_source is not None:
        return sources
    for name, source in sources.training_sources.items():
        with source.settings.convert_errors():
            tokenized = context.open_cached_source(source) if offline else None
            if not offline and isinstance(source, StreamSource):
                sources.streams[name], tokenized = context.open_stream_source(source, name)
            elif not offline:
                tokenized = context.tokenize_source(source, progress=progress)
            if tokenized is not None:
                sources.tokenized_training_sources[name] = tokenized
                if name not in sources.streams:
                    tokenized.check_end_of_turn_kept()
            end = context.find_end_of_turn(source) if tokenized is None else tokenized.end_of_turn_token
            sources.end_of_turn_token = (
                end if sources.end_of_turn_token is None else sources.end_of_turn_token
            )
    for name, source in sources.eval_sources.items():
        with source.settings.convert_errors():
            tokenized = (
                context.open_cached_source(source)
                if offline
                else context.tokenize_source(source, progress=progress)
            )
            if tokenized is not None:
                sources.tokenized_eval_sources[name] = tokenized
            else:
                context.find_end_of_turn(source)
    return sources


def _open_and_detect_format(settings: SourceSettings) -> DataSource:
    """Open a source, and detect and set the format of its records.

    Skips the detection if it requires a download and ``settings.offline`` is set.
    """
    source = open_source(settings)
    if not (settings.offline and source.downloads_to_read):
        source.detect_and_set_format()
    return source


def _open_training_sources(
    sources_by_name: dict[str, DataSource], settings_by_name: Mapping[str, SourceSettings]
) -> None:
    """Open the training sources, and add them to ``sources_by_name``.

    In a mixture, or if ``offline`` is set, also checks that the first document of each source can
    be read, unless reading it requires a download.

    Args:
        sources_by_name: Opened sources, keyed by name. Modified in place.
        settings_by_name: Settings of the sources, keyed by name.

    Raises:
        UserError: If a source cannot be used, or if two sources have the same data. Sources that
            may download data when they are opened are not compared.
    """
    readable_sources: dict[str, DataSource] = {}
    for name, settings in settings_by_name.items():
        with settings.convert_errors():
            source = sources_by_name[name] = _open_and_detect_format(settings)
            if name or settings.offline:
                source.check_readable()
            if not name or source.downloads_to_open:
                continue
            twin = next(
                (other for other, data in readable_sources.items() if _have_same_data(source, data)), None
            )
            if twin is not None:
                raise UserError(
                    f"{format_training_source_key(name)}: has the same data as "
                    f"{format_training_source_key(twin)}; remove one of the two sources (to repeat the data, "
                    "raise the weight or epochs of the remaining source)"
                )
            readable_sources[name] = source


def _have_same_data(source: DataSource, other: DataSource) -> bool:
    """Return whether two sources have the same data and read it with the same settings."""
    if isinstance(source, StreamSource):
        return source.has_same_data(other)
    if isinstance(other, StreamSource):
        return other.has_same_data(source)
    return source.cache_key == other.cache_key


def _open_eval_sources(sources: RunSources, settings_by_name: Mapping[str, SourceSettings]) -> None:
    """Open the evaluation sources, and add them to ``sources.eval_sources``.

    Also checks that the first document of each source can be read, unless reading it requires a
    download.

    Args:
        sources: Sources of the run. Modified in place.
        settings_by_name: Settings of the evaluation sources, keyed by name.

    Raises:
        UserError: If a source cannot be used, or if it has the same data as a training source. If
            ``offline`` is set, sources that may download data when they are opened are not
            compared.
    """
    for name, settings in settings_by_name.items():
        with settings.convert_errors():
            source = sources.eval_sources[name] = _open_and_detect_format(settings)
            source.check_readable()
        readable_sources = [
            other
            for other in (source, *sources.training_sources.values())
            if not (settings.offline and other.downloads_to_open)
        ]
        if source in readable_sources and any(
            _have_same_data(source, other) for other in readable_sources if other is not source
        ):
            raise UserError(
                f"{settings.config_key}: contains the same data as the training data; specify other files "
                "or another split"
            )


def _load_or_train_tokenizer(run_sources: RunSources, settings: DataConfig, hints: ModelDataHints) -> Any:
    """Load the tokenizer of a run, or train it on the sources.

    Uses ``data.tokenizer`` or, if it is not set, the tokenizer of the pretrained model. If there is
    no pretrained model either, uses the tokenizer of pretokenized data. Otherwise, trains a
    tokenizer, or loads the trained tokenizer from the cache. Adds the tokens in
    ``data.added_tokens``.

    Updates ``run_sources.tokenizer_name``. If the tokenizer is trained, also sets
    ``run_sources.vocab_size`` to the requested size.

    Args:
        run_sources: Sources of the run, including the name of the tokenizer if it is known.
        settings: The ``data`` section of the config.
        hints: Properties of the model.

    Returns:
        The tokenizer. None if it would have to be trained or downloaded, but the sources forbid
        writing and downloading (``offline``).
    """
    sources, combined_source = list(run_sources.training_sources.values()), run_sources.joined_training_source
    first = sources[0].settings
    name = run_sources.tokenizer_name
    if name is None and not (first.offline and combined_source.downloads_to_read):
        tokenizer_folder = next(
            (folder for source in sources if (folder := source.find_tokenizer_folder()) is not None), None
        )
        name = run_sources.tokenizer_name = None if tokenizer_folder is None else str(tokenizer_folder)
    path = name
    if name is None:
        size = settings.vocab_size or hints.get("model_vocab_size")
        chat = any(source.settings.has_conversations for source in sources)
        options = {"mask": first.task == MASKED, "ends": hints.get("ends_texts", False), "chat": chat}
        cache = replace(first, data=settings.model_copy(update={"stream": False})).cache_folder
        run_sources.vocab_size = resolve_trained_vocab_size(size, mask=options["mask"])
        if not first.offline:
            tokenizer = train_tokenizer(combined_source, size, cache, **options)
        elif combined_source.downloads_to_open:
            return None
        elif has_trained_tokenizer(
            trained := get_trained_tokenizer_folder(combined_source, run_sources.vocab_size, cache, **options)
        ):
            path = str(trained)
    if path is not None:
        try:
            tokenizer = load_tokenizer(
                path,
                offline=first.offline,
                trust_remote_code=hints.get("trust_remote_code", False),
                **first.tokenizer_languages,
            )
        except UserError:
            if not first.offline or (name is not None and Path(name).exists()):
                raise
            return None
    elif first.offline:
        return None
    add_tokens(tokenizer, settings.added_tokens)
    return tokenizer


def _load_image_processor(
    tokenizer: Any, settings: DataConfig, hints: ModelDataHints, *, offline: bool
) -> ImageProcessor | None:
    """Load the model's image processor.

    If neither ``data.chat_template`` nor the tokenizer has a chat template, the tokenizer gets
    the template of the processor.

    Returns:
        The processor. None if ``offline`` is set, the model is not a local folder, and the
        processor cannot be loaded without a download.

    Raises:
        UserError: If the model is built from scratch or has no image processor, if the
            processor cannot be loaded, or if its image tokens are not in the tokenizer.
    """
    from portable.data.tokens.image_processing import load_image_processor

    name = hints.get("model_tokenizer")
    if name is None:
        raise UserError(
            "data.images: a model that is built from scratch has no image processor; set model.name_or_path "
            "to a model that accepts images, or set data.images: false to train on text"
        )
    try:
        processor = load_image_processor(
            name, offline=offline, trust_remote_code=hints.get("trust_remote_code", False)
        )
    except UserError:
        if not offline or Path(name).exists():
            raise
        return None
    if processor is None:
        raise UserError(
            f"data.images: {name} has no image processor; set model.name_or_path to a model that accepts "
            "images, or set data.images: false to train on text"
        )
    if missing := processor.list_missing_tokens(tokenizer):
        raise UserError(
            f"data.tokenizer: the tokenizer does not have the token {missing[0]!r}, which the model uses for "
            "images; remove data.tokenizer to use the model's tokenizer"
        )
    if settings.chat_template is None and not getattr(tokenizer, "chat_template", None):
        tokenizer.chat_template = processor.chat_template
    return processor


def _read_mixture_shares(settings: DataConfig) -> dict[str, MixtureShare]:
    """Read the weight or the number of epochs of each source in a mixture, keyed by source name.

    A source for which neither is set gets one epoch.
    """
    from portable.data.samples.mixture import MixtureShare

    return {
        source.name: MixtureShare(
            source.weight,
            1.0 if source.weight is None and source.epochs is None else source.epochs,
        )
        for source in settings.sources
    }


def _build_mixture(
    settings: DataConfig, train: Mapping[str, Samples], step_samples: int, task: str
) -> Samples:
    """Build the mixture of all training sources.

    Args:
        settings: The ``data`` section of the config.
        train: Samples of each source, keyed by name.
        step_samples: Number of samples per step, used to convert the steps of
            ``data.weight_schedule`` to samples.
        task: Task of the model, one of ``TASKS``.

    Raises:
        UserError: If the samples of the sources have different columns.
    """
    from portable.data.samples.mixture import MixtureSamples

    phases = [(step * step_samples, weights) for step, weights in get_weight_schedule(settings)]
    return MixtureSamples(
        train, _read_mixture_shares(settings), phases, with_source_column=task != CLASSIFICATION
    )


def _compute_mixture_fingerprint(settings: DataConfig, token_fingerprints: Mapping[str, str]) -> str:
    """Compute a digest of the tokens and shares of all sources, and of the weight schedule."""
    shares = [(name, share.weight, share.epochs) for name, share in _read_mixture_shares(settings).items()]
    return compute_text_digest(
        repr((shares, list(token_fingerprints.items()), get_weight_schedule(settings)))
    )


def _map_eval_classes(
    classes: LabelMapping | None, training: TokenizedSource, other: TokenizedSource
) -> LabelMapping | None:
    """Map the labels of a source to the outputs of the classifier.

    Args:
        classes: Mapping from the training source's labels to the outputs. None if the task is
            not classification.
        training: Training source from which ``classes`` was computed.
        other: Source whose labels to map.

    Returns:
        The mapping for ``other``. None if ``classes`` is None.

    Raises:
        UserError: If a label of ``other`` corresponds neither to a label of ``training`` nor to the
            name of an output, or if the labels do not fit the problem type or the number of
            outputs.
    """
    if classes is None:
        return None
    declared = training.source.class_names
    return map_eval_labels_to_outputs(
        classes, training.tokens, declared, other.tokens, other.source.class_names
    )


def _build_custom_sample_data(
    settings: DataConfig, sources: RunSources, context: TokenizationContext, model_vocab_size: int
) -> RunData:
    """Build the data of a run from the samples of a user-defined object, without tokenizing.

    ``data.source`` is the import path of the object. In the result, ``tokenized_sources`` is empty.

    Args:
        settings: The ``data`` section of the config.
        sources: Opened sources of the run.
        context: Tokenizer and task.
        model_vocab_size: Vocabulary size of the model. 0 if it is not known.

    Raises:
        UserError: If a user-defined object lacks ``__len__``, ``__getitem__`` or a string
            ``fingerprint``, if its first sample is not valid, or if its samples do not have
            ``data.seq_len`` tokens. Also raised if evaluation samples and training samples have
            different numbers of sequences.
    """
    from portable.data.samples.custom_samples import CustomSamples

    vocab_size = max(context.vocabulary.size, model_vocab_size)

    def build_samples(data_source: DataSource, part: SampleRange | None = None) -> CustomSamples:
        subject, records = (
            f"data.source: {data_source.name}",
            cast("Any", getattr(data_source, "records", None)),
        )
        if not hasattr(records, "__len__") or not hasattr(records, "__getitem__"):
            raise UserError(f"{subject}: lacks __len__ or __getitem__; define both methods")
        if not isinstance(getattr(records, "fingerprint", None), str):
            raise UserError(
                f"{subject}: the attribute fingerprint is missing or not a string; set fingerprint to a "
                "string that identifies the content"
            )
        samples = CustomSamples(data_source.name, records, part or SampleRange(0, len(records)), vocab_size)
        if samples.tokens_per_sequence != (length := data_source.settings.data.seq_len):
            raise UserError(
                f"data.seq_len: is {length}, but the samples have {samples.tokens_per_sequence} tokens; set "
                f"data.seq_len to {samples.tokens_per_sequence}"
            )
        return samples

    source = sources.joined_training_source
    all_samples = build_samples(source)
    train, held_out = split_documents(len(all_samples), settings.eval_fraction)
    eval_samples: dict[str, Samples] = {}
    for name, eval_source in sources.eval_sources.items():
        with eval_source.settings.convert_errors():
            eval_samples[name] = build_samples(eval_source)
            if eval_samples[name].sequences_per_sample != all_samples.sequences_per_sample:
                raise UserError(
                    "data.source: each evaluation sample consists of "
                    f"{format_count(eval_samples[name].sequences_per_sample, 'sequence')}, but each training "
                    f"sample consists of {format_count(all_samples.sequences_per_sample, 'sequence')}; use "
                    "the same number of sequences for both"
                )
    sizes = replace(
        sources.compute_sizes(),
        packing=False,
        documents=len(all_samples),
        tokens=len(all_samples) * settings.seq_len * all_samples.sequences_per_sample,
        train_samples=train.num_samples,
        eval_samples=held_out.num_samples,
        cache_folder=source.settings.cache_folder,
        evals={
            name: EvalSize(sources.eval_sources[name].name, len(samples))
            for name, samples in eval_samples.items()
        },
    )
    held_out_samples = (
        {get_held_out_source_name(settings): build_samples(source, held_out)} if held_out.num_samples else {}
    )
    return RunData(
        tokenizer=context.tokenizer,
        train=build_samples(source, train),
        evals=eval_samples | held_out_samples,
        sizes=sizes,
        fingerprint=f"{source.cache_key} {len(all_samples)}",
        vocab_size=context.vocabulary.size,
        eval_fingerprints={
            name: f"{sources.eval_sources[name].cache_key} {len(samples)}"
            for name, samples in eval_samples.items()
        },
    )
