"""The tokenizer: the one named, or a byte-level BPE trained once on the source.

The trained one is an ordinary ``PreTrainedTokenizerFast``: ``save_pretrained`` and ``AutoTokenizer`` carry
it with the model, and decoding gives back the text, byte for byte.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from converters import CheckpointError, check_manifest, manifest_entries, manifest_text
from converters.manifest import MANIFEST
from portable.data.cache import locked_folder
from portable.data.documents import listed
from portable.errors import UserError, one_line
from portable.temporary_folder import scratch_folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from portable.data.documents import Source

END, PAD, MASK = "<|endoftext|>", "<|pad|>", "<|mask|>"
DEFAULT_VOCAB_SIZE = 4096
MAX_VOCAB_SIZE = 1_000_000  # of a trained tokenizer
_FORMAT = 1
_TRAIN_CHARS = 16_000_000  # more text hardly changes the merges of a small vocabulary


def load_tokenizer(
    name_or_path: str,
    *,
    offline: bool = False,
    trust_remote_code: bool = False,
    source_language: str | None = None,
    target_language: str | None = None,
) -> Any:
    """A hub tokenizer, or one in a local folder; ``offline`` takes what is on this disk, or fails.

    Args:
        name_or_path: id or folder.
        offline: as above.
        trust_remote_code: run Python that comes with the tokenizer; else such a one is refused.
        source_language: of the texts, for a tokenizer of many languages.
        target_language: of the targets, for the same.

    Raises:
        UserError: it cannot be loaded.
    """
    from transformers import AutoTokenizer

    languages = {"src_lang": source_language, "tgt_lang": target_language}
    languages = {key: code for key, code in languages.items() if code is not None}
    try:
        # Always said: left out, transformers asks on the standard input whether to run what comes with it.
        return AutoTokenizer.from_pretrained(
            name_or_path, local_files_only=offline, trust_remote_code=bool(trust_remote_code), **languages
        )
    except ValueError as error:
        if "trust_remote_code" in str(error):
            raise UserError(
                f"data.tokenizer: {name_or_path!r} comes with Python of its own, which is not run unless "
                "model.trust_remote_code is true; set that if you trust it, or give another tokenizer"
            ) from error
        raise _unloadable(name_or_path, error) from error
    except Exception as error:  # what comes out depends on what is wrong with the files or the network
        raise _unloadable(name_or_path, error) from error


def _unloadable(name_or_path: str, error: Exception) -> UserError:
    reason = one_line(error)
    reason = reason if len(reason) <= 200 else reason[:197] + "..."
    return UserError(
        f"data.tokenizer: cannot load {name_or_path!r} ({reason}); give a folder with tokenizer files, a hub "
        "id, or null to train one on the source"
    )


def check_languages(tokenizer: Any, *, source: str | None, target: str | None) -> None:
    """Refuse languages that the tokenizer does not know, and one of many languages that was not told its own.

    Raises:
        UserError: for these.
    """
    several = hasattr(tokenizer, "src_lang") and hasattr(tokenizer, "tgt_lang")
    given = {"source": source, "target": target}
    for side, key in (("source", "src_lang"), ("target", "tgt_lang")):
        name, code = f"data.{side}_language", given[side]
        if not several:
            if code is not None:
                raise UserError(
                    f"{name}: {code!r} is for a tokenizer of many languages, and "
                    f"{type(tokenizer).__name__} is none; remove it"
                )
            continue
        told = code or tokenizer.init_kwargs.get(key) or (side == "target" and tokenizer.tgt_lang)
        if not told:
            raise UserError(
                f"{name}: missing; {type(tokenizer).__name__} marks texts with their language, so name the "
                f"{side}'s as it does ({listed(_languages(tokenizer))})"
            )
    if several and tokenizer.unk_token_id is not None:
        for side in ("source", "target"):
            told = Vocabulary.of(tokenizer, targets=side == "target")
            if tokenizer.unk_token_id in (*told.prefix, *told.suffix):
                codes = _languages(tokenizer)
                code = given[side] or ""
                near = get_close_matches(code, codes, n=1)
                hint = f"did you mean {near[0]}?" if near else f"it knows {listed(codes)}"
                raise UserError(f"data.{side}_language: {code!r} is no language of the tokenizer; {hint}")


def _languages(tokenizer: Any) -> list[str]:
    """The codes of the languages of a tokenizer, as far as it lists them."""
    known = getattr(tokenizer, "lang_code_to_id", None) or ()
    known = known or [str(token) for token in getattr(tokenizer, "extra_special_tokens", None) or ()]
    known = known or getattr(tokenizer, "additional_special_tokens", None) or ()
    return sorted(map(str, known))


def trained_vocab_size(vocab_size: int | None, *, mask: bool = False) -> int:
    """The size asked of a trained tokenizer.

    Raises:
        UserError: not even the bytes fit, or no training would end.
    """
    size = DEFAULT_VOCAB_SIZE if vocab_size is None else vocab_size
    least = 256 + 2 + mask
    if size < least:
        raise UserError(
            f"data.vocab_size: {size} is too small for a byte-level tokenizer; give at least {least} "
            "(256 bytes and the special tokens)"
        )
    if size > MAX_VOCAB_SIZE:
        raise UserError(
            f"data.vocab_size: {size} is too large for a tokenizer trained here; give at most "
            f"{MAX_VOCAB_SIZE} (left out, it is the model's vocab_size)"
        )
    return size


def trained_tokenizer_folder(
    source: Source, vocab_size: int, cache: Path, *, mask: bool = False, ends: bool = False
) -> Path:
    """Where the tokenizer trained on ``source`` lies, or would."""
    told = f"{_FORMAT} {vocab_size} {mask} {_TRAIN_CHARS} {source.key}{' ends' if ends else ''}"
    return cache / "tokenizers" / hashlib.blake2b(told.encode(), digest_size=16).hexdigest()


def is_trained(folder: Path) -> bool:
    """Whether a tokenizer lies there as it was saved: one with a wrong byte in it may open as well."""
    try:
        return check_manifest(folder) is not None
    except CheckpointError:
        return False


def train_tokenizer(
    source: Source, vocab_size: int | None, cache: Path, *, mask: bool = False, ends: bool = False
) -> Any:
    """Train a byte-level BPE on the head of ``source``, or load the one trained before.

    ``vocab_size`` counts the special tokens (end, padding and, with ``mask``, the mask); a small source may
    give fewer. With ``ends`` it puts the end token behind each text. Any number of processes may call this at
    once: one trains, the others wait for it.
    """
    size = trained_vocab_size(vocab_size, mask=mask)
    folder = trained_tokenizer_folder(source, size, cache, mask=mask, ends=ends)
    if tokenizer := _open(folder):
        return tokenizer
    with locked_folder(folder) as draft:
        if tokenizer := _open(folder):
            return tokenizer
        _train(source, size, mask, ends).save_pretrained(draft.path)
        (draft.path / MANIFEST).write_text(manifest_text(manifest_entries(draft.path)), "utf-8")
        draft.commit()
    return load_tokenizer(str(folder))


def _open(folder: Path) -> Any:
    if not is_trained(folder):
        return None
    try:
        return load_tokenizer(str(folder))
    except UserError:  # damaged: train it again
        return None


def _train(source: Source, vocab_size: int, mask: bool, ends: bool) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = [END, PAD, *([MASK] if mask else [])]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    with parallel_tokenizers():
        bpe.train_from_iterator(_head(source), trainer)
    if ends:
        bpe.post_processor = processors.TemplateProcessing(
            single=f"$A {END}",
            pair=f"$A {END} $B {END}",
            special_tokens=[(END, bpe.token_to_id(END))],
        )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call, unused-ignore]
        tokenizer_object=bpe,
        eos_token=END,
        bos_token=END,
        pad_token=PAD,
        mask_token=MASK if mask else None,
        clean_up_tokenization_spaces=False,
        model_max_length=1 << 30,
    )


def _head(source: Source) -> Iterator[str]:
    left = _TRAIN_CHARS
    found = False
    for document in source.documents():
        found = True
        for text in (document.text, document.target):
            if text and left > 0:
                yield text[:left]
                left -= len(text)
        if left <= 0:
            return
    if not found:
        raise UserError(
            f"data.source: {source.name} has no text in it; give a source with at least one document"
        )


_parallelism_is_ours = False


@contextmanager
def parallel_tokenizers() -> Iterator[None]:
    """Let the tokenizers library use its threads, and let no later fork of this process inherit them.

    It prints a warning in every process forked after its threads ran, unless told what to do.
    """
    global _parallelism_is_ours
    if "TOKENIZERS_PARALLELISM" in os.environ and not _parallelism_is_ours:
        yield
        return
    _parallelism_is_ours = True
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    try:
        yield
    finally:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"


@dataclass(frozen=True)
class Vocabulary:
    """What the data path needs to know of a tokenizer."""

    size: int
    """One more than its largest id: what a model's embedding must hold."""
    end: int | None
    """Ends a document: the end-of-sequence token, or the separator of a BERT."""
    pad: int
    mask: int | None
    special: tuple[int, ...]
    prefix: tuple[int, ...]
    """What the tokenizer itself puts before a text, such as ``[CLS]``."""
    suffix: tuple[int, ...]
    """What the tokenizer itself puts after a text, such as ``[SEP]``."""

    @staticmethod
    def of(tokenizer: Any, *, targets: bool = False) -> Vocabulary:
        """What ``tokenizer`` does to texts, or to the ``targets`` of a translation."""
        text = {"text_target" if targets else "text": "a"}
        bare: list[int] = tokenizer(**text, add_special_tokens=False)["input_ids"]
        framed: list[int] = tokenizer(**text, add_special_tokens=True)["input_ids"]
        places = (at for at in range(len(framed)) if framed[at : at + len(bare)] == bare)
        start = next(places, 0) if bare else 0
        end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
        pad = tokenizer.pad_token_id
        return Vocabulary(
            size=max(len(tokenizer), max(tokenizer.get_vocab().values(), default=-1) + 1),
            end=end,
            pad=pad if pad is not None else (end or 0),
            mask=tokenizer.mask_token_id,
            special=tuple(sorted(tokenizer.all_special_ids)),
            prefix=tuple(framed[:start]),
            suffix=tuple(framed[start + len(bare) :]) if bare else (),
        )


@dataclass(frozen=True)
class PairFrame:
    """What a tokenizer puts around two texts: what comes before, between and after them.

    Attributes:
        types: the token types of the five parts (before, first, between, second, after) and of the padding,
            where the tokenizer gives any: each a list of its part's, or one for all tokens of a text.
    """

    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]
    types: tuple[tuple[int, ...], int, tuple[int, ...], int, tuple[int, ...], int] | None

    @staticmethod
    def of(tokenizer: Any) -> PairFrame:
        """Find out by an example.

        Raises:
            UserError: it does not put one text behind the other.
        """
        first, second = "a", "b"
        one, two = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (first, second))
        typed = "token_type_ids" in tokenizer.model_input_names
        encoded = tokenizer(first, second, return_token_type_ids=typed)
        ids: list[int] = encoded["input_ids"]
        start = _find(ids, one, 0)
        following = _find(ids, two, start + len(one))
        if not one or not two or start < 0 or following < 0:
            raise UserError(
                "data.text_pair_field: this tokenizer does not put two texts one behind the other; join them "
                "into one field, and use another data.tokenizer or no pairs"
            )
        cuts = [0, start, start + len(one), following, following + len(two), len(ids)]
        types = None
        if typed:
            parts = [tuple(encoded["token_type_ids"][a:b]) for a, b in pairwise(cuts)]
            types = (parts[0], parts[1][0], parts[2], parts[3][0], parts[4], tokenizer.pad_token_type_id)
        return PairFrame(tuple(ids[:start]), tuple(ids[cuts[2] : following]), tuple(ids[cuts[4] :]), types)

    @property
    def length(self) -> int:
        """How many tokens it adds."""
        return len(self.before) + len(self.between) + len(self.after)


def _find(tokens: list[int], part: list[int], start: int) -> int:
    """Where ``part`` begins in ``tokens``, from ``start`` on; -1 where it does not."""
    return next((at for at in range(start, len(tokens)) if tokens[at : at + len(part)] == part), -1)


def tokenizer_digest(tokenizer: Any) -> str:
    """A digest of all that decides which ids a text gets."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        told = json.loads(backend.to_str())
        told["truncation"] = told["padding"] = None  # set and unset by every call; they never apply here
    else:
        told = {
            "class": type(tokenizer).__name__,
            "vocab": sorted(tokenizer.get_vocab().items()),
            "files": _files_digest(tokenizer),
        }
    ids = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.sep_token_id]
    content = json.dumps([told, ids], sort_keys=True)
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def _files_digest(tokenizer: Any) -> str:
    """A digest of the files of a tokenizer in Python, such as the two sentencepiece models of a Marian."""
    hasher = hashlib.blake2b(digest_size=16)
    with scratch_folder("portable-vocabulary") as folder:
        with suppress(NotImplementedError, OSError, ValueError):  # without one, the vocabulary tells all
            tokenizer.save_vocabulary(str(folder))
        for path in sorted(folder.iterdir()):
            hasher.update(path.name.encode() + b"\0" + path.read_bytes())
    return hasher.hexdigest()
