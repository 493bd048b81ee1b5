"""Build the tokenizer, the training set and the evaluation set from the ``data`` section of a config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, cast

from typing_extensions import Unpack

from portable.config.sources import ALONE, format_training_key, get_held_out_name, get_weight_schedule
from portable.data.samples.base import SampleRange, split_documents
from portable.data.samples.classes import Classes, KnownClasses, Problem, map_classes, map_eval_classes
from portable.data.sizes import DataSizes, EvalSize, compute_sizes
from portable.data.sources.documents import compute_digest
from portable.data.sources.source import CAUSAL, CLASSIFICATION, FINISHED, MASKED
from portable.data.sources.source_kinds import (
    StreamedFiles,
    get_evaluation_settings,
    get_training_settings,
    open_source,
)
from portable.data.tokenization import TokenizationContext
from portable.data.tokens.tokenizer import (
    Vocabulary,
    add_tokens,
    get_trained_tokenizer_folder,
    get_trained_vocab_size,
    is_trained,
    load_tokenizer,
    train_tokenizer,
)
from portable.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from portable.config.sections import DataConfig
    from portable.data.samples.base import Samples
    from portable.data.samples.mixture import MixtureShare
    from portable.data.samples.tasks import LabelShift
    from portable.data.sources.source import DataSource, SourceSettings
    from portable.data.stream import Stream
    from portable.data.tokenization import TokenizedSource
    from portable.data.tokens.cache import TokenCache
    from portable.data.tokens.special_tokens import Frame


@dataclass(frozen=True)
class Data:
    """The data of a run."""

    tokenizer: Any
    train: Samples
    evals: Mapping[str, Samples]
    """To evaluate on, by name; a single source has the empty name."""
    sizes: DataSizes
    fingerprint: str
    """A digest of every token and label; equal on all machines with the same text and tokenizer."""
    vocab_size: int
    """One more than the tokenizer's largest id: the minimum size of the model's embedding."""
    classes: Classes | None = None
    """For classification, the outputs of the model."""
    target_frame: Frame | None = None
    """For seq2seq, the special tokens around each target."""
    opened: Mapping[str, TokenizedSource] = field(default_factory=dict)
    """The sources of ``train`` as tokens, by name; the only one has the empty name."""
    end_of_turn: int | None = None
    """For conversations, the token after which the assistant has said everything."""
    streams: tuple[str, ...] = ()
    """The names of the sources that are read while the run trains; ``opened`` has the first part of each."""
    eval_fingerprints: Mapping[str, str] = field(default_factory=dict)
    """The same for each source of ``data.eval``. It may change between the launches of a run."""

    @property
    def tokens(self) -> TokenCache:
        """All tokens of the first source of ``train``."""
        return next(iter(self.opened.values())).tokens

    @property
    def eval(self) -> Samples | None:
        """The first of ``evals``."""
        return next(iter(self.evals.values()), None)

    @property
    def label_names(self) -> tuple[str, ...]:
        """For classification, the classes in the order of their ids."""
        return () if self.classes is None else self.classes.names

    @property
    def num_labels(self) -> int | None:
        return len(self.label_names) or None

    @property
    def description(self) -> str:
        return str(self.sizes)


class Hints(TypedDict, total=False):
    """What a model and its loss say about their data."""

    model_tokenizer: str | None
    """The pretrained model's tokenizer, used if ``data.tokenizer`` is null; None trains one."""
    model_vocab_size: int | None
    """The size of a trained tokenizer if ``data.vocab_size`` is null."""
    trust_remote_code: bool
    """Run Python code of the tokenizer."""
    ends_texts: bool
    """Every text must have an end token, because the model classifies there."""
    seed: int
    """For the masking of a masked language model."""
    decoder_start_token_id: int | Callable[[Any], int] | None
    """The first decoder input of seq2seq, a function of the tokenizer that returns it, or ``LAST_LABEL``;
    None for the padding token."""
    label_shift: Callable[[Any], LabelShift | None] | None
    """A function of the tokenizer that returns the label shift of a masked language model with a decoder."""
    pad_left: bool
    """Pad a classifier's texts on the left."""
    whole: bool
    """A causal model gets every token of a sample, not all but the last."""
    with_last: bool
    """A causal model gets the last token of a text as well if there is room for it."""


class _RunSamples(NamedTuple):
    """Samples to train on and to evaluate on, keyed by source name."""

    train: dict[str, Samples]
    evals: dict[str, Samples]


def _build_samples(settings: DataConfig, sources: RunSources, classes: Classes | None) -> _RunSamples:
    """The samples of each source: to train on, and to evaluate on, with those held out at the end."""
    first = next(iter(sources.tokenized.values()))
    train: dict[str, Samples] = {}
    held_out: dict[str, Samples] = {}
    for name, tokenized in sources.tokenized.items():
        with tokenized.settings.convert_errors():
            if name in sources.streams:
                train[name] = sources.streams[name]
                continue
            source_classes = classes if tokenized is first else _map_eval_classes(classes, first, tokenized)
            to_train, held_out_part = tokenized.split_parts()
            train[name] = tokenized.build_samples(to_train, source_classes)
            if held_out_part.num_samples:
                held_out[name or get_held_out_name(settings)] = tokenized.build_samples(
                    held_out_part, source_classes
                )
    evals: dict[str, Samples] = {}
    for name, tokenized in sources.evaluated.items():
        with tokenized.settings.convert_errors():
            evals[name] = tokenized.build_samples(classes=_map_eval_classes(classes, first, tokenized))
    return _RunSamples(train, evals | held_out)


def build_data(
    settings: DataConfig,
    *,
    task: str = CAUSAL,
    known_classes: KnownClasses | None = None,
    problem: Problem | None = None,
    global_batch_size: int = 1,
    progress: bool = False,
    **hints: Unpack[Hints],
) -> Data:
    """Open the data. Tokenizes it first if it is not cached.

    Every rank calls this with the same arguments. On each machine one rank builds what is missing in the
    cache and shows progress, while the others wait.

    Args:
        settings: the ``data`` section.
        task: one of ``TASKS``.
        known_classes: the classes of the model, if any.
        problem: ``problem_type`` of the model's config.
        global_batch_size: samples of a step, for ``data.weight_schedule``.
        progress: show progress on stderr if it takes more than a second.

    Raises:
        UserError: if the settings or the data cannot be used.
    """
    sources = open_sources(settings, task, progress=progress, **hints)
    context = sources.context
    assert context is not None
    if sources.finished_source is not None:
        return _build_finished_data(settings, sources, context, hints.get("model_vocab_size") or 0)
    opened, streams = sources.tokenized, sources.streams
    first = next(iter(opened.values()))
    classes: Classes | None = None
    if task == CLASSIFICATION:
        classes = map_classes(first.tokens, first.source.class_names, known_classes, problem)
    train, evals = _build_samples(settings, sources, classes)
    prints = {
        name: streams[name].fingerprint if name in streams else source.tokens.fingerprint
        for name, source in opened.items()
    }
    mixed = _build_mixture(settings, train, global_batch_size, task) if ALONE not in train else None
    return Data(
        tokenizer=context.tokenizer,
        train=mixed or train[ALONE],
        evals=evals,
        sizes=sources.compute_sizes(),
        fingerprint=prints[ALONE] if mixed is None else _compute_fingerprint(settings, prints),
        vocab_size=context.vocabulary.size,
        classes=classes,
        target_frame=context.build_target_frame(first.settings),
        opened=opened,
        end_of_turn=sources.end_of_turn,
        streams=tuple(streams),
        eval_fingerprints={name: source.tokens.fingerprint for name, source in sources.evaluated.items()},
    )


def inspect_data(settings: DataConfig, *, task: str = CAUSAL, **hints: Unpack[Hints]) -> DataSizes:
    """Return the sizes that ``build_data`` would, as far as possible without writing or downloading.

    Raises:
        UserError: for the errors of ``build_data`` that the first document reveals.
    """
    sources = open_sources(settings, task, offline=True, **hints)
    if sources.finished_source is not None and sources.context is not None:
        return _build_finished_data(
            settings, sources, sources.context, hints.get("model_vocab_size") or 0
        ).sizes
    return sources.compute_sizes()


@dataclass
class RunSources:
    """The sources of a run, and what is known of their tokens.

    Attributes:
        training, evals: by name; the only one has the empty name.
        tokenizer: its name, if it is not trained.
        vocab_size: one more than the tokenizer's largest id.
        context: what tokenizes; None while the tokenizer is not here.
        tokenized, evaluated: those whose tokens are here; of a stream, the first part.
        streams: the samples of streams.
        end_of_turn: for conversations, the token that ends an answer, as far as it is known.
    """

    training: dict[str, DataSource]
    evals: dict[str, DataSource]
    tokenizer: str | None = None
    vocab_size: int | None = None
    context: TokenizationContext | None = None
    tokenized: dict[str, TokenizedSource] = field(default_factory=dict)
    evaluated: dict[str, TokenizedSource] = field(default_factory=dict)
    streams: dict[str, Stream] = field(default_factory=dict)
    end_of_turn: int | None = None

    @property
    def combined_source(self) -> DataSource:
        """All that is trained on."""
        if ALONE in self.training:
            return self.training[ALONE]
        from portable.data.sources.joined_sources import JoinedSource

        return JoinedSource(list(self.training.values()))

    @property
    def finished_source(self) -> DataSource | None:
        """The only source, if its records are finished samples."""
        for name, source in self.training.items():
            if source.settings.data.format == FINISHED:
                if name:
                    raise UserError(
                        f"{format_training_key(name)}: finished samples cannot be a part of a mixture"
                    )
                return source
        return None

    def compute_sizes(self) -> DataSizes:
        local_sources = {name: source for name, source in self.tokenized.items() if name not in self.streams}
        counts = {name: source.count_samples().train for name, source in self.evaluated.items()}
        context, trained_on = self.context, self.combined_source.contents if self.evals else frozenset()
        sizes = compute_sizes(self.training, local_sources, self.tokenizer, self.vocab_size)
        evaluated = (source.tokens.meta for source in self.evaluated.values())
        notes = [note for meta in evaluated for note in meta.get("notes", ())]
        return replace(
            sizes,
            notes=tuple(dict.fromkeys([*sizes.notes, *notes])),
            evals={name: EvalSize(source.name, counts.get(name)) for name, source in self.evals.items()},
            trained_on=tuple(name for name, source in self.evals.items() if trained_on & source.contents),
            opened=None if context is None else context.tokenizer,
            end_of_turn=self.end_of_turn,
            target_frame=None
            if context is None
            else context.build_target_frame(next(iter(self.training.values())).settings),
        )


def open_sources(
    settings: DataConfig,
    task: str,
    *,
    offline: bool = False,
    tokenize: bool = True,
    progress: bool = False,
    **hints: Unpack[Hints],
) -> RunSources:
    """Open the sources, then their tokenizer, then their tokens; what is not cached is made.

    Args:
        offline: stop before anything would be written or downloaded.
        tokenize: make tokens.
    """
    sources = RunSources({}, {}, settings.tokenizer or hints.get("model_tokenizer"))
    _open_training(sources.training, get_training_settings(settings, task, offline=offline))
    _open_evals(sources, get_evaluation_settings(settings, task, offline=offline))
    if sources.tokenizer is None and sources.finished_source is not None and not offline:
        raise UserError("data.tokenizer: finished samples do not say which it was; set it")
    tokenizer = _open_tokenizer(sources, settings, hints)
    if tokenizer is None:
        return sources
    context = sources.context = TokenizationContext(
        task,
        tokenizer,
        Vocabulary.from_tokenizer(tokenizer),
        seed=hints.get("seed", 0),
        decoder_start_token_id=hints.get("decoder_start_token_id"),
        label_shift=hints.get("label_shift"),
        pad_left=hints.get("pad_left", False),
        whole=hints.get("whole", False),
        with_last=hints.get("with_last", False),
    )
    context.check(ends_texts=hints.get("ends_texts", False))
    sources.vocab_size = context.vocabulary.size
    if not tokenize or sources.finished_source is not None:
        return sources
    for name, source in sources.training.items():
        with source.settings.convert_errors():
            tokenized = context.open_cached(source) if offline else None
            if not offline and isinstance(source, StreamedFiles):
                sources.streams[name], tokenized = context.open_stream(source, name)
            elif not offline:
                tokenized = context.open(source, progress=progress)
            if tokenized is not None:
                sources.tokenized[name] = tokenized
                if name not in sources.streams:
                    tokenized.check_ends()
            end = context.find_end_of_turn(source) if tokenized is None else tokenized.end_of_turn
            sources.end_of_turn = end if sources.end_of_turn is None else sources.end_of_turn
    for name, source in sources.evals.items():
        with source.settings.convert_errors():
            tokenized = context.open_cached(source) if offline else context.open(source, progress=progress)
            if tokenized is not None:
                sources.evaluated[name] = tokenized
            else:
                context.find_end_of_turn(source)
    return sources


def _open_source(settings: SourceSettings) -> DataSource:
    source = open_source(settings)
    if not (settings.offline and source.downloads):
        source.detect_format()
    return source


def _open_training(opened: dict[str, DataSource], settings_by_name: Mapping[str, SourceSettings]) -> None:
    keys: dict[str, str] = {}
    for name, settings in settings_by_name.items():
        with settings.convert_errors():
            source = opened[name] = _open_source(settings)
            if name or settings.offline:
                source.check()
            if name and not source.remote and (twin := keys.setdefault(source.key, name)) != name:
                raise UserError(
                    f"{format_training_key(name)}: has the same data as {format_training_key(twin)}; to "
                    "repeat it, raise the weight or epochs of one of them"
                )


def _open_evals(sources: RunSources, settings_by_name: Mapping[str, SourceSettings]) -> None:
    for name, settings in settings_by_name.items():
        with settings.convert_errors():
            source = sources.evals[name] = _open_source(settings)
            source.check()
        readable_sources = [
            other for other in (source, *sources.training.values()) if not (settings.offline and other.remote)
        ]
        if source in readable_sources and source.key in {
            other.key for other in readable_sources if other is not source
        }:
            raise UserError(f"{settings.key}: is the training data itself; name other files or another split")


def _open_tokenizer(run_sources: RunSources, settings: DataConfig, hints: Hints) -> Any:
    """The tokenizer; without a name, that of tokens made ahead of time, or one trained on the sources.

    None if it would have to be trained or downloaded, and nothing may be.
    """
    sources, combined_source = list(run_sources.training.values()), run_sources.combined_source
    first = sources[0].settings
    name = run_sources.tokenizer
    if name is None and not (first.offline and combined_source.downloads):
        tokenizer_folder = next(
            (folder for source in sources if (folder := source.find_tokenizer_folder()) is not None), None
        )
        name = run_sources.tokenizer = None if tokenizer_folder is None else str(tokenizer_folder)
    path = name
    if name is None:
        size = settings.vocab_size or hints.get("model_vocab_size")
        chat = any(source.settings.has_conversations for source in sources)
        options = {"mask": first.task == MASKED, "ends": hints.get("ends_texts", False), "chat": chat}
        cache = replace(first, data=settings.model_copy(update={"stream": False})).cache
        run_sources.vocab_size = get_trained_vocab_size(size, mask=options["mask"])
        if not first.offline:
            tokenizer = train_tokenizer(combined_source, size, cache, **options)
        elif combined_source.remote:
            return None
        elif is_trained(
            trained := get_trained_tokenizer_folder(combined_source, run_sources.vocab_size, cache, **options)
        ):
            path = str(trained)
    if path is not None:
        try:
            tokenizer = load_tokenizer(
                path,
                offline=first.offline,
                trust_remote_code=hints.get("trust_remote_code", False),
                **first.languages,
            )
        except UserError:
            if not first.offline or (name is not None and Path(name).exists()):
                raise
            return None
    elif first.offline:
        return None
    add_tokens(tokenizer, settings.added_tokens)
    return tokenizer


def _list_shares(settings: DataConfig) -> dict[str, MixtureShare]:
    """Weight and epochs of each source of a mixture; one without either is read once."""
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
    from portable.data.samples.mixture import Mixture

    phases = [(step * step_samples, weights) for step, weights in get_weight_schedule(settings)]
    return Mixture(train, _list_shares(settings), phases, marked=task != CLASSIFICATION)


def _compute_fingerprint(settings: DataConfig, token_fingerprints: Mapping[str, str]) -> str:
    """A digest of the tokens of a mixture and of the order in which they come."""
    shares = [(name, share.weight, share.epochs) for name, share in _list_shares(settings).items()]
    return compute_digest(repr((shares, list(token_fingerprints.items()), get_weight_schedule(settings))))


def _map_eval_classes(
    classes: Classes | None, training: TokenizedSource, other: TokenizedSource
) -> Classes | None:
    if classes is None:
        return None
    declared = training.source.class_names
    return map_eval_classes(classes, training.tokens, declared, other.tokens, other.source.class_names)


def _build_finished_data(
    settings: DataConfig, sources: RunSources, context: TokenizationContext, model_vocab_size: int
) -> Data:
    """The data of code of the user's that gives finished samples."""
    from portable.data.samples.custom_samples import FinishedSamples

    vocab_size = max(context.vocabulary.size, model_vocab_size)

    def build_samples(data_source: DataSource, part: SampleRange | None = None) -> FinishedSamples:
        subject, records = (
            f"data.source: {data_source.name}",
            cast("Any", getattr(data_source, "records", None)),
        )
        if not hasattr(records, "__len__") or not hasattr(records, "__getitem__"):
            raise UserError(f"{subject}: has no len() and no sample by number; give it both")
        if not isinstance(getattr(records, "fingerprint", None), str):
            raise UserError(f"{subject}: has no fingerprint; give it a text that tells its content")
        samples = FinishedSamples(data_source.name, records, part or SampleRange(0, len(records)), vocab_size)
        if samples.tokens != (length := data_source.settings.data.seq_len):
            raise UserError(
                f"data.seq_len: {length}, but a sample has {samples.tokens} tokens; set it to that"
            )
        return samples

    source = sources.combined_source
    all_samples = build_samples(source)
    train, held_out = split_documents(len(all_samples), settings.eval_fraction)
    eval_samples: dict[str, Samples] = {}
    for name, eval_source in sources.evals.items():
        with eval_source.settings.convert_errors():
            eval_samples[name] = build_samples(eval_source)
            if eval_samples[name].sequences != all_samples.sequences:
                raise UserError(
                    f"data.source: its samples have {eval_samples[name].sequences} sequences, and those to "
                    f"train on {all_samples.sequences}; give samples of one kind"
                )
    sizes = replace(
        sources.compute_sizes(),
        packing=False,
        documents=len(all_samples),
        tokens=len(all_samples) * settings.seq_len * all_samples.sequences,
        train_samples=train.num_samples,
        eval_samples=held_out.num_samples,
        cached=source.settings.cache,
        evals={
            name: EvalSize(sources.evals[name].name, len(samples)) for name, samples in eval_samples.items()
        },
    )
    held_out_samples = (
        {get_held_out_name(settings): build_samples(source, held_out)} if held_out.num_samples else {}
    )
    return Data(
        tokenizer=context.tokenizer,
        train=build_samples(source, train),
        evals=eval_samples | held_out_samples,
        sizes=sizes,
        fingerprint=f"{source.key} {len(all_samples)}",
        vocab_size=context.vocabulary.size,
        eval_fingerprints={
            name: f"{sources.evals[name].key} {len(samples)}" for name, samples in eval_samples.items()
        },
    )
