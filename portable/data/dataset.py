"""Build the tokenizer, the training set and the evaluation set from the ``data`` section of a config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, cast

from typing_extensions import Unpack

from portable.config.sources import ALONE, held_out_name, training_key, weight_schedule
from portable.data.samples.base import Part, split_documents
from portable.data.samples.classes import Classes, KnownClasses, Problem, classes_as, classes_of
from portable.data.sizes import DataSizes, sizes_of
from portable.data.sources.documents import digest_of
from portable.data.sources.opening import (
    StreamedFiles,
    evaluation_settings,
    open_source,
    training_settings,
)
from portable.data.sources.source import CAUSAL, CLASSIFICATION, FINISHED, MASKED
from portable.data.tokenization import TokenizationContext
from portable.data.tokens.tokenizer import (
    Vocabulary,
    add_tokens,
    is_trained,
    load_tokenizer,
    train_tokenizer,
    trained_tokenizer_folder,
    trained_vocab_size,
)
from portable.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from portable.config.sections import DataConfig
    from portable.data.samples.base import Samples
    from portable.data.samples.tasks import LabelShift
    from portable.data.sources.source import Source, SourceSettings
    from portable.data.stream import Stream
    from portable.data.tokenization import TokenizedSource
    from portable.data.tokens.cache import TokenCache
    from portable.data.tokens.frame import Frame


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


def _samples_of(
    settings: DataConfig, found: RunSources, classes: Classes | None
) -> tuple[dict[str, Samples], dict[str, Samples]]:
    """The samples of each source: to train on, and to evaluate on, with those held out at the end."""
    first = next(iter(found.tokenized.values()))
    train: dict[str, Samples] = {}
    held_out: dict[str, Samples] = {}
    for name, one in found.tokenized.items():
        with one.settings.errors():
            if name in found.streams:
                train[name] = found.streams[name]
                continue
            its_classes = classes if one is first else _classes_as(classes, first, one)
            to_train, held = one.parts()
            train[name] = one.samples(to_train, its_classes)
            if held.num_samples:
                held_out[name or held_out_name(settings)] = one.samples(held, its_classes)
    evals: dict[str, Samples] = {}
    for name, one in found.evaluated.items():
        with one.settings.errors():
            evals[name] = one.samples(classes=_classes_as(classes, first, one))
    return train, evals | held_out


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
    found = open_sources(settings, task, progress=progress, **hints)
    context = found.context
    assert context is not None
    if found.finished is not None:
        return _finished(settings, found, context, hints.get("model_vocab_size") or 0)
    opened, streams = found.tokenized, found.streams
    first = next(iter(opened.values()))
    classes: Classes | None = None
    if task == CLASSIFICATION:
        classes = classes_of(first.tokens, first.source.class_names, known_classes, problem)
    train, evals = _samples_of(settings, found, classes)
    prints = {
        name: streams[name].fingerprint if name in streams else one.tokens.fingerprint
        for name, one in opened.items()
    }
    mixed = _mixture(settings, train, global_batch_size, task) if ALONE not in train else None
    return Data(
        tokenizer=context.tokenizer,
        train=mixed or train[ALONE],
        evals=evals,
        sizes=found.sizes(),
        fingerprint=prints[ALONE] if mixed is None else _fingerprint(settings, prints),
        vocab_size=context.vocabulary.size,
        classes=classes,
        target_frame=context.target_frame(first.settings),
        opened=opened,
        end_of_turn=found.end_of_turn,
        streams=tuple(streams),
        eval_fingerprints={name: one.tokens.fingerprint for name, one in found.evaluated.items()},
    )


def inspect_data(settings: DataConfig, *, task: str = CAUSAL, **hints: Unpack[Hints]) -> DataSizes:
    """Return the sizes that ``build_data`` would, as far as possible without writing or downloading.

    Raises:
        UserError: for the errors of ``build_data`` that the first document reveals.
    """
    found = open_sources(settings, task, offline=True, **hints)
    if found.finished is not None and found.context is not None:
        return _finished(settings, found, found.context, hints.get("model_vocab_size") or 0).sizes
    return found.sizes()


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

    training: dict[str, Source]
    evals: dict[str, Source]
    tokenizer: str | None = None
    vocab_size: int | None = None
    context: TokenizationContext | None = None
    tokenized: dict[str, TokenizedSource] = field(default_factory=dict)
    evaluated: dict[str, TokenizedSource] = field(default_factory=dict)
    streams: dict[str, Stream] = field(default_factory=dict)
    end_of_turn: int | None = None

    @property
    def together(self) -> Source:
        """All that is trained on."""
        if ALONE in self.training:
            return self.training[ALONE]
        from portable.data.sources.joined import Joined

        return Joined(list(self.training.values()))

    @property
    def finished(self) -> Source | None:
        """The only source, if its records are finished samples."""
        for name, source in self.training.items():
            if source.settings.data.format == FINISHED:
                if name:
                    raise UserError(f"{training_key(name)}: finished samples cannot be a part of a mixture")
                return source
        return None

    def sizes(self) -> DataSizes:
        here = {name: one for name, one in self.tokenized.items() if name not in self.streams}
        counts = {name: one.counts()[0] for name, one in self.evaluated.items()}
        context, trained_on = self.context, self.together.contents if self.evals else frozenset()
        sizes = sizes_of(self.training, here, self.tokenizer, self.vocab_size)
        evaluated = (source.tokens.meta for source in self.evaluated.values())
        notes = [note for meta in evaluated for note in meta.get("notes", ())]
        return replace(
            sizes,
            notes=tuple(dict.fromkeys([*sizes.notes, *notes])),
            evals={name: (one.name, counts.get(name)) for name, one in self.evals.items()},
            trained_on=tuple(name for name, one in self.evals.items() if trained_on & one.contents),
            opened=None if context is None else context.tokenizer,
            end_of_turn=self.end_of_turn,
            target_frame=None
            if context is None
            else context.target_frame(next(iter(self.training.values())).settings),
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
    found = RunSources({}, {}, settings.tokenizer or hints.get("model_tokenizer"))
    _open_training(found.training, training_settings(settings, task, offline=offline))
    _open_evals(found, evaluation_settings(settings, task, offline=offline))
    if found.tokenizer is None and found.finished is not None and not offline:
        raise UserError("data.tokenizer: finished samples do not say which it was; set it")
    tokenizer = _tokenizer(found, settings, hints)
    if tokenizer is None:
        return found
    context = found.context = TokenizationContext(
        task,
        tokenizer,
        Vocabulary.of(tokenizer),
        seed=hints.get("seed", 0),
        decoder_start_token_id=hints.get("decoder_start_token_id"),
        label_shift=hints.get("label_shift"),
        pad_left=hints.get("pad_left", False),
        whole=hints.get("whole", False),
        with_last=hints.get("with_last", False),
    )
    context.check(ends_texts=hints.get("ends_texts", False))
    found.vocab_size = context.vocabulary.size
    if not tokenize or found.finished is not None:
        return found
    for name, source in found.training.items():
        with source.settings.errors():
            one = context.cached(source) if offline else None
            if not offline and isinstance(source, StreamedFiles):
                found.streams[name], one = context.stream(source, name)
            elif not offline:
                one = context.open(source, progress=progress)
            if one is not None:
                found.tokenized[name] = one
                if name not in found.streams:
                    one.check_ends()
            end = context.first_end(source) if one is None else one.end_of_turn
            found.end_of_turn = end if found.end_of_turn is None else found.end_of_turn
    for name, source in found.evals.items():
        with source.settings.errors():
            one = context.cached(source) if offline else context.open(source, progress=progress)
            if one is not None:
                found.evaluated[name] = one
            else:
                context.first_end(source)
    return found


def _opened(settings: SourceSettings) -> Source:
    source = open_source(settings)
    if not (settings.offline and source.downloads):
        source.recognise()
    return source


def _open_training(found: dict[str, Source], wanted: Mapping[str, SourceSettings]) -> None:
    keys: dict[str, str] = {}
    for name, settings in wanted.items():
        with settings.errors():
            source = found[name] = _opened(settings)
            if name or settings.offline:
                source.check()
            if name and not source.remote and (twin := keys.setdefault(source.key, name)) != name:
                raise UserError(
                    f"{training_key(name)}: has the same data as {training_key(twin)}; to repeat it, raise "
                    "the weight or epochs of one of them"
                )


def _open_evals(found: RunSources, wanted: Mapping[str, SourceSettings]) -> None:
    for name, settings in wanted.items():
        with settings.errors():
            source = found.evals[name] = _opened(settings)
            source.check()
        here = [one for one in (source, *found.training.values()) if not (settings.offline and one.remote)]
        if source in here and source.key in {one.key for one in here if one is not source}:
            raise UserError(f"{settings.key}: is the training data itself; name other files or another split")


def _tokenizer(found: RunSources, settings: DataConfig, hints: Hints) -> Any:
    """The tokenizer; without a name, that of tokens made ahead of time, or one trained on the sources.

    None if it would have to be trained or downloaded, and nothing may be.
    """
    sources, together = list(found.training.values()), found.together
    first = sources[0].settings
    name = found.tokenizer
    if name is None and not (first.offline and together.downloads):
        made_with = next((folder for one in sources if (folder := one.made_with()) is not None), None)
        name = found.tokenizer = None if made_with is None else str(made_with)
    path = name
    if name is None:
        size = settings.vocab_size or hints.get("model_vocab_size")
        chat = any(one.settings.converses for one in sources)
        kind = {"mask": first.task == MASKED, "ends": hints.get("ends_texts", False), "chat": chat}
        cache = replace(first, data=settings.model_copy(update={"stream": False})).cache
        found.vocab_size = trained_vocab_size(size, mask=kind["mask"])
        if not first.offline:
            tokenizer = train_tokenizer(together, size, cache, **kind)
        elif together.remote:
            return None
        elif is_trained(trained := trained_tokenizer_folder(together, found.vocab_size, cache, **kind)):
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


def _shares(settings: DataConfig) -> dict[str, tuple[float | None, float | None]]:
    """Weight and epochs of each source of a mixture; one without either is read once."""
    return {
        one.name: (one.weight, 1.0 if one.weight is None and one.epochs is None else one.epochs)
        for one in settings.sources
    }


def _mixture(settings: DataConfig, train: Mapping[str, Samples], step_samples: int, task: str) -> Samples:
    from portable.data.samples.mixture import Mixture, Share

    phases = [(step * step_samples, weights) for step, weights in weight_schedule(settings)]
    shares = {name: Share(*share) for name, share in _shares(settings).items()}
    return Mixture(train, shares, phases, marked=task != CLASSIFICATION)


def _fingerprint(settings: DataConfig, of_tokens: Mapping[str, str]) -> str:
    """A digest of the tokens of a mixture and of the order in which they come."""
    shares = [(name, *share) for name, share in _shares(settings).items()]
    return digest_of(repr((shares, list(of_tokens.items()), weight_schedule(settings))))


def _classes_as(classes: Classes | None, training: TokenizedSource, other: TokenizedSource) -> Classes | None:
    if classes is None:
        return None
    declared = training.source.class_names
    return classes_as(classes, training.tokens, declared, other.tokens, other.source.class_names)


def _finished(
    settings: DataConfig, found: RunSources, context: TokenizationContext, model_vocab_size: int
) -> Data:
    """The data of code of the user's that gives finished samples."""
    from portable.data.samples.finished import FinishedSamples

    known = max(context.vocabulary.size, model_vocab_size)

    def samples(one: Source, part: Part | None = None) -> FinishedSamples:
        told, records = f"data.source: {one.name}", cast("Any", getattr(one, "records", None))
        if not hasattr(records, "__len__") or not hasattr(records, "__getitem__"):
            raise UserError(f"{told}: has no len() and no sample by number; give it both")
        if not isinstance(getattr(records, "fingerprint", None), str):
            raise UserError(f"{told}: has no fingerprint; give it a text that tells its content")
        found = FinishedSamples(one.name, records, part or Part(0, len(records)), known)
        if found.tokens != (length := one.settings.data.seq_len):
            raise UserError(f"data.seq_len: {length}, but a sample has {found.tokens} tokens; set it to that")
        return found

    source = found.together
    everything = samples(source)
    train, held_out = split_documents(len(everything), settings.eval_fraction)
    own: dict[str, Samples] = {}
    for name, one in found.evals.items():
        with one.settings.errors():
            own[name] = samples(one)
            if own[name].sequences != everything.sequences:
                raise UserError(
                    f"data.source: its samples have {own[name].sequences} sequences, and those to train on "
                    f"{everything.sequences}; give samples of one kind"
                )
    sizes = replace(
        found.sizes(),
        packing=False,
        documents=len(everything),
        tokens=len(everything) * settings.seq_len * everything.sequences,
        train_samples=train.num_samples,
        eval_samples=held_out.num_samples,
        cached=source.settings.cache,
        evals={name: (found.evals[name].name, len(one)) for name, one in own.items()},
    )
    held = {held_out_name(settings): samples(source, held_out)} if held_out.num_samples else {}
    return Data(
        tokenizer=context.tokenizer,
        train=samples(source, train),
        evals=own | held,
        sizes=sizes,
        fingerprint=f"{source.key} {len(everything)}",
        vocab_size=context.vocabulary.size,
        eval_fingerprints={name: f"{found.evals[name].key} {len(one)}" for name, one in own.items()},
    )
