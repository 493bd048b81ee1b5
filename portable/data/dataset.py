"""Build the tokenizer, the training set and the evaluation set from the ``data`` section of a config."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from portable.config.evaluation_sources import ALONE, HELD_OUT, evaluation_sources, key_of
from portable.data.reading import Opened, Reading, check_ends, parts, target_frame_of, vocabulary_of
from portable.data.samples.base import Part, split_documents
from portable.data.samples.classes import Classes, KnownClasses, Problem, classes_as, classes_of
from portable.data.samples.finished import FinishedSamples
from portable.data.settings import (
    CAUSAL,
    CLASSIFICATION,
    FINISHED,
    MASKED,
    cache_dir,
    converses,
    errors_under,
    languages_of,
    recognised,
    source_of,
)
from portable.data.sizes import DataSizes, sample_counts, sizes_of
from portable.data.tokens.tokenizer import (
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
    from portable.data.sources.opening import Source
    from portable.data.tokens.cache import TokenCache
    from portable.data.tokens.tokenize import Frame


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
    tokens: TokenCache | None = None
    """All tokens of the source of ``train``."""
    end_of_turn: int | None = None
    """For conversations, the token after which the assistant has said everything."""
    eval_fingerprints: Mapping[str, str] = field(default_factory=dict)
    """The same for each source of ``data.eval``. It may change between the launches of a run."""

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


def build_data(
    settings: DataConfig,
    *,
    task: str = CAUSAL,
    seed: int = 0,
    model_tokenizer: str | None = None,
    model_vocab_size: int | None = None,
    ends_texts: bool = False,
    decoder_start_token_id: int | Callable[[Any], int] | None = None,
    label_shift: Callable[[Any], LabelShift | None] | None = None,
    known_classes: KnownClasses | None = None,
    problem: Problem | None = None,
    pad_left: bool = False,
    trust_remote_code: bool = False,
    progress: bool = False,
) -> Data:
    """Open the data. Tokenizes it first if it is not cached.

    Every rank calls this with the same arguments. On each machine one rank builds what is missing in the
    cache and shows progress, while the others wait.

    Args:
        settings: the ``data`` section. task: one of ``TASKS``. seed: for the masking of a masked language
        model. model_tokenizer: the pretrained model's tokenizer, used if ``data.tokenizer`` is null; None
        trains one.
        model_vocab_size: the size of a trained tokenizer if ``data.vocab_size`` is null.
        ends_texts: every text must have an end token, because the model classifies there.
        decoder_start_token_id: the first decoder input of seq2seq, a function of the tokenizer that returns
            it, or ``LAST_LABEL``; None for the padding token.
        label_shift: a function of the tokenizer that returns the label shift of a masked language model with
            a decoder.
        known_classes: the classes of the model, if any.
        problem: ``problem_type`` of the model's config.
        pad_left: pad a classifier's texts on the left.
        trust_remote_code: run Python code of the tokenizer.
        progress: show progress on stderr if it takes more than a second.

    Raises:
        UserError: if the settings or the data cannot be used.
    """
    cache = cache_dir(settings)
    settings, source = recognised(settings, task, source_of(settings, task, cache))
    eval_sources = _eval_sources(settings, task, source)
    name = settings.tokenizer or model_tokenizer
    if name is not None:
        tokenizer = load_tokenizer(name, trust_remote_code=trust_remote_code, **languages_of(settings, task))
    elif settings.format == FINISHED:
        raise UserError("data.tokenizer: finished samples do not say which it was; set it")
    else:
        size = settings.vocab_size or model_vocab_size
        kind = {"mask": task == MASKED, "ends": ends_texts, "chat": converses(settings)}
        tokenizer = train_tokenizer(source, size, cache, **kind)
    add_tokens(tokenizer, settings.added_tokens)
    if settings.format == FINISHED:
        return _finished(settings, source, eval_sources, tokenizer, name or "")
    reading = Reading(
        task,
        tokenizer,
        vocabulary_of(tokenizer, task, ends_texts=ends_texts),
        seed=seed,
        decoder_start_token_id=decoder_start_token_id,
        label_shift=label_shift,
        pad_left=pad_left,
    )
    opened = reading.open(settings, source, progress=progress)
    check_ends(opened, tokenizer)
    classes: Classes | None = None
    if task == CLASSIFICATION:
        classes = classes_of(opened.tokens, source.class_names, known_classes, problem)
    train, held_out = parts(settings, task, opened.tokens, opened.truncated)
    evals = {}
    for key, (own, own_source) in eval_sources.items():
        with errors_under(key_of(key)):
            evals[key] = reading.open(own, own_source, progress=progress)
    samples = {name: _all_samples(name, reading, one, opened, classes) for name, one in evals.items()}
    if held_out.num_samples:
        samples[HELD_OUT if evals else ALONE] = reading.samples(opened, held_out, classes)
    sizes = sizes_of(settings, task, source, name, reading.vocabulary.size, opened.tokens, opened.truncated)
    return Data(
        tokenizer=tokenizer,
        train=reading.samples(opened, train, classes),
        evals=samples,
        sizes=replace(
            sizes,
            evals={key: (evals[key].source.name, len(samples[key])) for key in evals},
            trained_on=_trained_on(source, eval_sources),
        ),
        fingerprint=opened.tokens.fingerprint,
        vocab_size=reading.vocabulary.size,
        classes=classes,
        target_frame=target_frame_of(opened.framed, task),
        tokens=opened.tokens,
        end_of_turn=opened.tokens.meta.get("end_of_turn"),
        eval_fingerprints={key: one.tokens.fingerprint for key, one in evals.items()},
    )


def _finished(
    settings: DataConfig,
    source: Source,
    evals: Mapping[str, tuple[DataConfig, Source]],
    tokenizer: Any,
    name: str,
) -> Data:
    """The data of code of the user's that gives finished samples."""

    def samples(own: DataConfig, one: Source, part: Part | None = None) -> FinishedSamples:
        told, records = f"data.source: {one.name}", cast("Any", getattr(one, "records", None))
        if not hasattr(records, "__len__") or not hasattr(records, "__getitem__"):
            raise UserError(f"{told}: has no len() and no sample by number; give it both")
        if not isinstance(getattr(records, "fingerprint", None), str):
            raise UserError(f"{told}: has no fingerprint; give it a text that tells its content")
        found = FinishedSamples(one.name, records, part or Part(0, len(records)))
        if found.tokens != own.seq_len:
            raise UserError(
                f"data.seq_len: {own.seq_len}, but a sample has {found.tokens} tokens; set it to that"
            )
        return found

    everything = samples(settings, source)
    train, held_out = split_documents(len(everything), settings.eval_fraction)
    own = {}
    for key, (eval_settings, one) in evals.items():
        with errors_under(key_of(key)):
            own[key] = samples(eval_settings, one)
    shown: dict[str, Samples] = dict(own)
    if held_out.num_samples:
        shown[HELD_OUT if evals else ALONE] = samples(settings, source, held_out)
    vocabulary = vocabulary_of(tokenizer, CAUSAL)
    return Data(
        tokenizer=tokenizer,
        train=samples(settings, source, train),
        evals=shown,
        sizes=DataSizes(
            source=source.name,
            tokenizer=name,
            vocab_size=vocabulary.size,
            seq_len=settings.seq_len,
            packing=False,
            documents=len(everything),
            tokens=len(everything) * settings.seq_len * everything.sequences,
            train_samples=train.num_samples,
            eval_samples=held_out.num_samples,
            cached=cache_dir(settings),
            evals={key: (evals[key][1].name, len(one)) for key, one in own.items()},
        ),
        fingerprint=f"{source.key} {len(everything)}",
        vocab_size=vocabulary.size,
        eval_fingerprints={key: f"{evals[key][1].key} {len(one)}" for key, one in own.items()},
    )


def _eval_sources(
    settings: DataConfig, task: str, training: Source, *, remember: bool = True
) -> dict[str, tuple[DataConfig, Source]]:
    """The sources of ``data.eval`` with their settings, by name."""
    found = {}
    for name, own in evaluation_sources(settings).items():
        with errors_under(key_of(name)):
            source = source_of(own, task, cache_dir(own), remember=remember)
            if remember or not source.downloads:
                own, source = recognised(own, task, source, remember=remember)
            source.check()
        found[name] = own, source
        if (remember or not source.remote) and source.key == training.key:
            raise UserError(f"{key_of(name)}: is the training data itself; name other files or another split")
    return found


def _trained_on(training: Source, evals: Mapping[str, tuple[DataConfig, Source]]) -> tuple[str, ...]:
    """The names of the evaluation sources that have files of the training data."""
    return tuple(name for name, (_, source) in evals.items() if training.contents & source.contents)


def _all_samples(
    name: str, reading: Reading, opened: Opened, training: Opened, classes: Classes | None
) -> Samples:
    """All samples of an evaluation source."""
    with errors_under(key_of(name)):
        if classes is not None:
            declared = training.source.class_names
            classes = classes_as(classes, training.tokens, declared, opened.tokens, opened.source.class_names)
        part, _ = parts(opened.settings, reading.task, opened.tokens, opened.truncated)
        return reading.samples(opened, part, classes)


def inspect_data(
    settings: DataConfig,
    *,
    task: str = CAUSAL,
    model_tokenizer: str | None = None,
    model_vocab_size: int | None = None,
    trust_remote_code: bool = False,
    ends_texts: bool = False,
) -> DataSizes:
    """Return the sizes that ``build_data`` would, as far as possible without writing or downloading.

    Raises:
        UserError: for the errors of ``build_data`` that the first document reveals.
    """
    cache = cache_dir(settings)
    source = source_of(settings, task, cache, remember=False)
    if not source.downloads:
        settings, source = recognised(settings, task, source, remember=False)
    source.check()
    evals = _eval_sources(settings, task, source, remember=False)
    name = settings.tokenizer or model_tokenizer
    size: int | None = None
    folder: str | None = name
    opened: dict[str, Any] = {}
    if name is None:
        size = trained_vocab_size(settings.vocab_size or model_vocab_size, mask=task == MASKED)
        if not source.remote:
            kind = {"mask": task == MASKED, "ends": ends_texts, "chat": converses(settings)}
            trained = trained_tokenizer_folder(source, size, cache, **kind)
            folder = str(trained) if is_trained(trained) else None
    tokens = cut = None
    counted: dict[str, int] = {}
    if folder is not None:
        try:
            tokenizer = load_tokenizer(
                folder, offline=True, trust_remote_code=trust_remote_code, **languages_of(settings, task)
            )
        except UserError:
            if name is not None and Path(name).exists():
                raise
        else:
            add_tokens(tokenizer, settings.added_tokens)
            reading = Reading(task, tokenizer, vocabulary_of(tokenizer, task, ends_texts=ends_texts))
            size = reading.vocabulary.size
            target_frame = target_frame_of(reading.framed(settings), task)
            opened = {"opened": tokenizer, "target_frame": target_frame}
            if (cached := reading.cached(settings, source)) is not None:
                check_ends(cached, tokenizer)
                tokens, cut = cached.tokens, cached.truncated
            elif not source.downloads and (chat := reading.chat(settings)) is not None:
                chat.encode(list(islice(source.documents(), 1)))  # raises what the first record reveals
            for key, (own, own_source) in evals.items():
                if (found := reading.cached(own, own_source)) is not None:
                    with errors_under(key_of(key)):
                        counted[key] = sample_counts(found.settings, task, found.tokens, found.truncated)[0]
    sizes = sizes_of(settings, task, source, name, size, tokens, cut)
    return replace(
        sizes,
        evals={key: (one.name, counted.get(key)) for key, (_, one) in evals.items()},
        trained_on=_trained_on(source, evals),
        **opened,
    )
