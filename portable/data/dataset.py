"""Build the tokenizer, the training set and the evaluation set from the ``data`` section of a config."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from portable.config.sources import (
    ALONE,
    eval_key,
    evaluation_sources,
    held_out_name,
    training_key,
    training_sources,
    weight_schedule,
)
from portable.data.reading import Opened, Reading, check_ends, parts, target_frame_of, vocabulary_of
from portable.data.samples.base import Part, split_documents
from portable.data.samples.classes import Classes, KnownClasses, Problem, classes_as, classes_of
from portable.data.samples.finished import FinishedSamples
from portable.data.samples.mixture import Mixture, Share
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
from portable.data.sizes import DataSizes, combined, sample_counts, sizes_of
from portable.data.sources.joined import Joined
from portable.data.sources.shards import StreamedFiles
from portable.data.tokens.tokenize import end_in_first_batch
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
    from portable.data.samples.truncation import Truncated
    from portable.data.sources.opening import Source
    from portable.data.stream import Stream
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
    opened: Mapping[str, Opened] = field(default_factory=dict)
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
    whole: bool = False,
    global_batch_size: int = 1,
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
        whole: a causal model gets every token of a sample, not all but the last.
        global_batch_size: samples of a step, for ``data.weight_schedule``.
        progress: show progress on stderr if it takes more than a second.

    Raises:
        UserError: if the settings or the data cannot be used.
    """
    sources = _training_sources(settings, task)
    training = _as_one(sources)
    eval_sources = _eval_sources(settings, task, sources)
    finished = _settings_of_finished(sources)
    name = settings.tokenizer or model_tokenizer
    if name is None and finished is not None:
        raise UserError("data.tokenizer: finished samples do not say which it was; set it")
    name = name or _tokenizer_of_tokens(settings, sources)
    tokenizer = _tokenizer(
        settings,
        sources,
        name,
        model_vocab_size,
        task=task,
        ends_texts=ends_texts,
        trust_remote_code=trust_remote_code,
    )
    if finished is not None:
        return _finished(finished, training, eval_sources, tokenizer, name or "", model_vocab_size or 0)
    reading = Reading(
        task,
        tokenizer,
        vocabulary_of(tokenizer, task, ends_texts=ends_texts),
        seed=seed,
        decoder_start_token_id=decoder_start_token_id,
        label_shift=label_shift,
        pad_left=pad_left,
        whole=whole,
    )
    opened = {}
    streams: dict[str, Stream] = {}
    for key, (own, source) in sources.items():
        with errors_under(training_key(key)):
            if isinstance(source, StreamedFiles):
                streams[key], opened[key] = reading.stream(own, source, key, progress=progress)
                continue
            opened[key] = reading.open(own, source, progress=progress)
            check_ends(opened[key], tokenizer)
    first = next(iter(opened.values()))
    classes: Classes | None = None
    if task == CLASSIFICATION:
        classes = classes_of(first.tokens, first.source.class_names, known_classes, problem)
    train: dict[str, Samples] = {}
    held_out: dict[str, Samples] = {}
    for key, one in opened.items():
        with errors_under(training_key(key)):
            if key in streams:
                train[key] = streams[key]
                continue
            own_classes = classes if one is first else _classes_as(classes, first, one)
            to_train, held = parts(one.settings, task, one.tokens, one.truncated)
            train[key] = reading.samples(one, to_train, own_classes)
            if held.num_samples:
                held_out[key or held_out_name(settings)] = reading.samples(one, held, own_classes)
    evals = {}
    for key, (own, source) in eval_sources.items():
        with errors_under(eval_key(key)):
            evals[key] = reading.open(own, source, progress=progress)
    samples = {
        name: _all_samples(name, reading, one, first, classes) for name, one in evals.items()
    } | held_out
    sizes = combined(
        {
            key: sizes_of(
                one.settings,
                task,
                sources[key][1],
                name,
                reading.vocabulary.size,
                *(_tokens_of(None if key in streams else one)),
            )
            for key, one in opened.items()
        }
    )
    fingerprints = {
        key: streams[key].fingerprint if key in streams else one.tokens.fingerprint
        for key, one in opened.items()
    }
    return Data(
        tokenizer=tokenizer,
        train=train[ALONE] if ALONE in train else _mixture(settings, train, global_batch_size, task),
        evals=samples,
        sizes=replace(
            sizes,
            evals={key: (evals[key].source.name, len(samples[key])) for key in evals},
            trained_on=_trained_on(training, eval_sources),
        ),
        fingerprint=fingerprints[ALONE] if ALONE in train else _fingerprint(settings, fingerprints),
        vocab_size=reading.vocabulary.size,
        classes=classes,
        target_frame=target_frame_of(first.framed, task),
        opened=opened,
        end_of_turn=next(
            (end for one in opened.values() if (end := one.tokens.meta.get("end_of_turn")) is not None), None
        ),
        streams=tuple(streams),
        eval_fingerprints={key: one.tokens.fingerprint for key, one in evals.items()},
    )


def _tokenizer_of_tokens(
    settings: DataConfig, sources: Mapping[str, tuple[DataConfig, Source]]
) -> str | None:
    """The folder of the tokenizer of tokens that were made ahead of time, if a source has such."""
    for _, source in sources.values():
        if isinstance(source, StreamedFiles) and source.tokenizer is not None:
            return str(source.tokenizer(cache_dir(settings)))
    return None


def _tokenizer(
    settings: DataConfig,
    sources: Mapping[str, tuple[DataConfig, Source]],
    name: str | None,
    model_vocab_size: int | None,
    *,
    task: str,
    ends_texts: bool,
    trust_remote_code: bool,
) -> Any:
    """The tokenizer ``name``; without one, one that is trained on the sources."""
    if name is not None:
        tokenizer = load_tokenizer(name, trust_remote_code=trust_remote_code, **languages_of(settings, task))
    else:
        size = settings.vocab_size or model_vocab_size
        kind = _kind_to_train(sources, task, ends_texts=ends_texts)
        tokenizer = train_tokenizer(_as_one(sources), size, cache_dir(settings), **kind)
    add_tokens(tokenizer, settings.added_tokens)
    return tokenizer


def _kind_to_train(
    sources: Mapping[str, tuple[DataConfig, Source]], task: str, *, ends_texts: bool
) -> dict[str, bool]:
    """What a tokenizer that is trained on the sources has to have."""
    chat = any(converses(own) for own, _ in sources.values())
    return {"mask": task == MASKED, "ends": ends_texts, "chat": chat}


def open_for_making(
    settings: DataConfig,
    *,
    task: str,
    model_tokenizer: str | None,
    model_vocab_size: int | None,
    trust_remote_code: bool = False,
) -> tuple[Reading, dict[str, tuple[DataConfig, StreamedFiles]]]:
    """The training sources as lists of shards, by name, and what turns them into tokens.

    Raises:
        UserError: if a source has no files.
    """
    listed = tuple(one.model_copy(update={"stream": True}) for one in settings.sources)
    settings = settings.model_copy(update={"sources": listed, "stream": not listed})
    sources = _training_sources(settings, task)
    name = settings.tokenizer or model_tokenizer
    tokenizer = _tokenizer(
        settings,
        sources,
        name,
        model_vocab_size,
        task=task,
        ends_texts=False,
        trust_remote_code=trust_remote_code,
    )
    found = {key: (own, cast("StreamedFiles", source)) for key, (own, source) in sources.items()}
    return Reading(task, tokenizer, vocabulary_of(tokenizer, task)), found


def _training_sources(
    settings: DataConfig, task: str, *, remember: bool = True
) -> dict[str, tuple[DataConfig, Source]]:
    """The sources of ``data.sources`` with their settings, by name, or the only one."""
    found: dict[str, tuple[DataConfig, Source]] = {}
    keys: dict[str, str] = {}
    for name, one in training_sources(settings).items():
        with errors_under(training_key(name)):
            own, source = one.settings, source_of(one.settings, task, cache_dir(settings), remember=remember)
            if remember or not source.downloads:
                own, source = recognised(own, task, source, remember=remember)
            if name or not remember:
                source.check()
            if name and not source.remote and (twin := keys.setdefault(source.key, name)) != name:
                raise UserError(
                    f"{training_key(name)}: has the same data as {training_key(twin)}; to repeat it, raise "
                    "the weight or epochs of one of them"
                )
        found[name] = own, source
    return found


def _as_one(sources: Mapping[str, tuple[DataConfig, Source]]) -> Source:
    all_of_them = [source for _, source in sources.values()]
    return all_of_them[0] if len(all_of_them) == 1 and ALONE in sources else Joined(all_of_them)


def _mixture(settings: DataConfig, train: Mapping[str, Samples], step_samples: int, task: str) -> Mixture:
    shares = {name: Share(one.weight, one.epochs) for name, one in training_sources(settings).items()}
    phases = [(step * step_samples, weights) for step, weights in weight_schedule(settings)]
    return Mixture(train, shares, phases, marked=task != CLASSIFICATION)


def _fingerprint(settings: DataConfig, of_tokens: Mapping[str, str]) -> str:
    """A digest of the tokens of a mixture and of the order in which they come."""
    shares = [(name, one.weight, one.epochs) for name, one in training_sources(settings).items()]
    content = repr((shares, list(of_tokens.items()), weight_schedule(settings)))
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def _classes_as(classes: Classes | None, training: Opened, opened: Opened) -> Classes | None:
    if classes is None:
        return None
    declared = training.source.class_names
    return classes_as(classes, training.tokens, declared, opened.tokens, opened.source.class_names)


def _settings_of_finished(sources: Mapping[str, tuple[DataConfig, Source]]) -> DataConfig | None:
    """The settings of the only source, if its records are finished samples."""
    found = {name: own for name, (own, _) in sources.items() if own.format == FINISHED}
    if found and len(sources) > 1:
        raise UserError(f"{training_key(next(iter(found)))}: finished samples cannot be a part of a mixture")
    return next(iter(found.values()), None)


def _finished(
    settings: DataConfig,
    source: Source,
    evals: Mapping[str, tuple[DataConfig, Source]],
    tokenizer: Any,
    name: str,
    model_vocab_size: int,
) -> Data:
    """The data of code of the user's that gives finished samples."""

    def samples(own: DataConfig, one: Source, part: Part | None = None) -> FinishedSamples:
        told, records = f"data.source: {one.name}", cast("Any", getattr(one, "records", None))
        if not hasattr(records, "__len__") or not hasattr(records, "__getitem__"):
            raise UserError(f"{told}: has no len() and no sample by number; give it both")
        if not isinstance(getattr(records, "fingerprint", None), str):
            raise UserError(f"{told}: has no fingerprint; give it a text that tells its content")
        known = max(vocabulary.size, model_vocab_size)
        found = FinishedSamples(one.name, records, part or Part(0, len(records)), known)
        if found.tokens != own.seq_len:
            raise UserError(
                f"data.seq_len: {own.seq_len}, but a sample has {found.tokens} tokens; set it to that"
            )
        return found

    vocabulary = vocabulary_of(tokenizer, CAUSAL)
    everything = samples(settings, source)
    train, held_out = split_documents(len(everything), settings.eval_fraction)
    own = {}
    for key, (eval_settings, one) in evals.items():
        with errors_under(eval_key(key)):
            own[key] = samples(eval_settings, one)
            if own[key].sequences != everything.sequences:
                raise UserError(
                    f"data.source: its samples have {own[key].sequences} sequences, and those to train on "
                    f"{everything.sequences}; give samples of one kind"
                )
    shown: dict[str, Samples] = dict(own)
    if held_out.num_samples:
        shown[held_out_name(settings)] = samples(settings, source, held_out)
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
    settings: DataConfig,
    task: str,
    training: Mapping[str, tuple[DataConfig, Source]],
    *,
    remember: bool = True,
) -> dict[str, tuple[DataConfig, Source]]:
    """The sources of ``data.eval`` with their settings, by name."""
    found = {}
    for name, own in evaluation_sources(settings).items():
        with errors_under(eval_key(name)):
            source = source_of(own, task, cache_dir(own), remember=remember)
            if remember or not source.downloads:
                own, source = recognised(own, task, source, remember=remember)
            source.check()
        found[name] = own, source
        trained = [one for _, one in training.values() if remember or not one.remote]
        if (remember or not source.remote) and source.key in {one.key for one in trained}:
            raise UserError(
                f"{eval_key(name)}: is the training data itself; name other files or another split"
            )
    return found


def _trained_on(training: Source, evals: Mapping[str, tuple[DataConfig, Source]]) -> tuple[str, ...]:
    """The names of the evaluation sources that have files of the training data."""
    return tuple(name for name, (_, source) in evals.items() if training.contents & source.contents)


def _all_samples(
    name: str, reading: Reading, opened: Opened, training: Opened, classes: Classes | None
) -> Samples:
    """All samples of an evaluation source."""
    with errors_under(eval_key(name)):
        classes = _classes_as(classes, training, opened)
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
    whole: bool = False,
) -> DataSizes:
    """Return the sizes that ``build_data`` would, as far as possible without writing or downloading.

    Raises:
        UserError: for the errors of ``build_data`` that the first document reveals.
    """
    sources = _training_sources(settings, task, remember=False)
    training = _as_one(sources)
    evals = _eval_sources(settings, task, sources, remember=False)
    name = settings.tokenizer or model_tokenizer
    if name is None and not training.downloads:
        name = _tokenizer_of_tokens(settings, sources)
    size: int | None = None
    folder: str | None = name
    opened: dict[str, Any] = {}
    if name is None:
        size = trained_vocab_size(settings.vocab_size or model_vocab_size, mask=task == MASKED)
        if not training.remote:
            kind = _kind_to_train(sources, task, ends_texts=ends_texts)
            trained = trained_tokenizer_folder(training, size, cache_dir(settings), **kind)
            folder = str(trained) if is_trained(trained) else None
    cached: dict[str, Opened] = {}
    ends: list[int | None] = []
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
            vocabulary = vocabulary_of(tokenizer, task, ends_texts=ends_texts)
            reading = Reading(task, tokenizer, vocabulary, whole=whole)
            size = reading.vocabulary.size
            target_frame = target_frame_of(reading.framed(settings), task)
            opened = {"opened": tokenizer, "target_frame": target_frame}
            for key, (own, source) in sources.items():
                with errors_under(training_key(key)):
                    if isinstance(source, StreamedFiles):
                        ends.append(None if source.tokenizer else _end_of_first(reading, own, source))
                        continue
                    if (found := reading.cached(own, source)) is not None:
                        check_ends(found, tokenizer)
                        cached[key] = found
                        ends.append(found.tokens.meta.get("end_of_turn"))
                    else:
                        ends.append(_end_of_first(reading, own, source))
            for key, (own, source) in evals.items():
                with errors_under(eval_key(key)):
                    if (found := reading.cached(own, source)) is not None:
                        counted[key] = sample_counts(found.settings, task, found.tokens, found.truncated)[0]
                    else:
                        _end_of_first(reading, own, source)
            opened["end_of_turn"] = next((end for end in ends if end is not None), None)
    sizes = combined(
        {
            key: sizes_of(own, task, source, name, size, *_tokens_of(cached.get(key)))
            for key, (own, source) in sources.items()
        }
    )
    return replace(
        sizes,
        evals={key: (one.name, counted.get(key)) for key, (_, one) in evals.items()},
        trained_on=_trained_on(training, evals),
        **opened,
    )


def _end_of_first(reading: Reading, settings: DataConfig, source: Source) -> int | None:
    """The token that ends an answer; raises UserError for what the first conversations reveal."""
    chat = None if source.downloads else reading.chat(settings)
    return None if chat is None else end_in_first_batch(source, chat)


def _tokens_of(opened: Opened | None) -> tuple[TokenCache | None, Truncated | None]:
    return (None, None) if opened is None else (opened.tokens, opened.truncated)
