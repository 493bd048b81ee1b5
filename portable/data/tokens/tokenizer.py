"""Load a run's tokenizer from the Hub or a folder, or train a byte-level BPE on the sources.

A trained tokenizer is an ordinary ``PreTrainedTokenizerFast``: ``save_pretrained`` saves it, and
``AutoTokenizer`` loads it. Decoding its tokens restores the text byte for byte.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.converters import CheckpointError, check_manifest, compute_manifest_entries, format_manifest
from portable.converters.errors import raise_unless_panic
from portable.converters.manifest import MANIFEST
from portable.converters.similar_names import find_similar_names
from portable.data.sources.documents import compute_text_digest, format_name_list
from portable.data.tokens.bounded_tokenizer import (
    convert_tokenizer_errors,
    decode,
    encode_targets,
    encode_text,
)
from portable.errors import UserError, to_one_line
from portable.hub_requests import read_hub_once_per_node
from portable.temporary_folder import create_scratch_folder, open_or_build_cache_folder
from portable.untrusted_settings import CONFIG_FILE, TOKENIZER_FILES, check_downloaded_settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from portable.data.sources.source import DataSource

END_TOKEN, PAD_TOKEN, MASK_TOKEN = "<|endoftext|>", "<|pad|>", "<|mask|>"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>\\n' }}"
    "{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
DEFAULT_VOCAB_SIZE = 4096
MAX_VOCAB_SIZE = 1_000_000  # maximum vocabulary size of a trained tokenizer
_FORMAT = 1
_TRAIN_CHARS = 16_000_000  # maximum characters to train on; more barely changes a small vocabulary's merges


def load_tokenizer(
    name_or_path: str,
    *,
    offline: bool = False,
    trust_remote_code: bool = False,
    source_language: str | None = None,
    target_language: str | None = None,
    key: str = "data.tokenizer",
) -> Any:
    """Load a tokenizer from the Hub or a local folder.

    The files are first checked with :func:`portable.untrusted_settings.check_downloaded_settings`,
    because they may be malicious. One rank of each node sends requests to the Hub, and the other
    ranks read the cached files.

    Args:
        name_or_path: Hub id or folder.
        offline: Whether to use only local files.
        trust_remote_code: Whether to run Python code that comes with the tokenizer. If False, a
            tokenizer that requires such code cannot be loaded.
        source_language: Language code of the input texts, for a multilingual tokenizer. For
            example, ``eng_Latn`` for NLLB.
        target_language: Language code of the target texts, for a multilingual tokenizer.
        key: Setting that refers to the tokenizer, used in error messages.

    Returns:
        The ``PreTrainedTokenizerBase``.

    Raises:
        UserError: If the tokenizer cannot be loaded or is not a text tokenizer, or if the check
            fails.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    languages = {"src_lang": source_language, "tgt_lang": target_language}
    languages = {key: code for key, code in languages.items() if code is not None}

    def load() -> Any:
        check_downloaded_settings(key, name_or_path, (*TOKENIZER_FILES, CONFIG_FILE), offline=offline)
        # Pass trust_remote_code even if it is false, because transformers would otherwise ask on stdin.
        return AutoTokenizer.from_pretrained(
            name_or_path, local_files_only=offline, trust_remote_code=bool(trust_remote_code), **languages
        )

    try:
        loaded = load() if offline else read_hub_once_per_node(name_or_path, "tokenizer", load)
        if not isinstance(loaded, PreTrainedTokenizerBase):  # for example the pair of tokenizers of RAG
            raise TypeError(f"{type(loaded).__name__} is not a text tokenizer")
        return loaded
    except UserError:
        raise
    except ValueError as error:
        if "trust_remote_code" in str(error):
            raise UserError(
                f"{key}: {name_or_path!r} contains Python code, which runs only if model.trust_remote_code "
                "is true; set model.trust_remote_code to true if you trust the code, or use another "
                "tokenizer"
            ) from error
        raise _build_load_error(key, name_or_path, error) from error
    except BaseException as error:  # damaged files and network failures raise exceptions of many classes
        raise_unless_panic(error)
        raise _build_load_error(key, name_or_path, error) from error


def add_tokens(tokenizer: Any, tokens: Sequence[str]) -> None:
    """Add special tokens to a tokenizer in place. Skips tokens that are already in its vocabulary."""
    from transformers import AddedToken

    vocabulary = tokenizer.get_vocab()
    new = [AddedToken(token, special=True, normalized=False) for token in tokens if token not in vocabulary]
    if new:
        tokenizer.add_tokens(new, special_tokens=True)


def _build_load_error(key: str, name_or_path: str, error: BaseException) -> UserError:
    """Build the error for a tokenizer that cannot be loaded."""
    reason = to_one_line(error)
    reason = reason if len(reason) <= 200 else reason[:197] + "..."
    remedy = "use a folder with tokenizer files"
    if key == "data.tokenizer":
        remedy += " or a hub id, or set data.tokenizer to null to train a tokenizer on the source"
    return UserError(f"{key}: cannot load {name_or_path!r} ({reason}); {remedy}")


def check_languages(tokenizer: Any, *, source: str | None, target: str | None) -> None:
    """Check the languages in the config against the tokenizer.

    A multilingual tokenizer has the attributes ``src_lang`` and ``tgt_lang``, as for NLLB. It needs
    a source and a target language. Each is taken from the config, or from the tokenizer's own
    settings. For any other tokenizer, no language may be set.

    The tokenizer must have been loaded with the languages in the config. A language is not
    supported if the tokenizer marks texts with its unknown token instead. If the tokenizer has no
    unknown token, unsupported languages are not detected.

    Args:
        tokenizer: Transformers tokenizer.
        source: Value of ``data.source_language``. None if it is not set.
        target: Value of ``data.target_language``. None if it is not set.

    Raises:
        UserError: If a multilingual tokenizer lacks a language or does not support it, or if a
            language is set for a tokenizer that is not multilingual.
    """
    is_multilingual = hasattr(tokenizer, "src_lang") and hasattr(tokenizer, "tgt_lang")
    codes_by_side = {"source": source, "target": target}
    languages = {}
    for side, key in (("source", "src_lang"), ("target", "tgt_lang")):
        name, code = f"data.{side}_language", codes_by_side[side]
        if not is_multilingual:
            if code is not None:
                raise UserError(
                    f"{name}: is {code!r}, but {type(tokenizer).__name__} does not mark texts with their "
                    f"language; remove {name}"
                )
            continue
        language = code or tokenizer.init_kwargs.get(key) or (side == "target" and tokenizer.tgt_lang)
        if not language:
            raise UserError(
                f"{name}: is missing, but {type(tokenizer).__name__} marks texts with their language; set "
                f"{name} to one of the language codes ({format_name_list(_list_languages(tokenizer))})"
            )
        languages[side] = str(language)
    if is_multilingual and tokenizer.unk_token_id is not None:
        for side in ("source", "target"):
            vocabulary = Vocabulary.from_tokenizer(tokenizer, targets=side == "target")
            if tokenizer.unk_token_id in (*vocabulary.prefix, *vocabulary.suffix):
                codes = _list_languages(tokenizer)
                near = find_similar_names(languages[side], codes)
                hint = f"did you mean {near[0]}?" if near else f"use one of {format_name_list(codes)}"
                raise UserError(
                    f"data.{side}_language: the tokenizer does not support the language "
                    f"{languages[side]!r}; {hint}"
                )


def _list_languages(tokenizer: Any) -> list[str]:
    """List the language codes of a multilingual tokenizer in sorted order."""
    codes = getattr(tokenizer, "lang_code_to_id", None) or ()
    codes = codes or [str(token) for token in getattr(tokenizer, "extra_special_tokens", None) or ()]
    codes = codes or getattr(tokenizer, "additional_special_tokens", None) or ()
    return sorted(map(str, codes))


def resolve_trained_vocab_size(vocab_size: int | None, *, mask: bool = False) -> int:
    """Return the vocabulary size with which to train a tokenizer.

    Args:
        vocab_size: Requested size. None selects :data:`DEFAULT_VOCAB_SIZE`.
        mask: Whether the tokenizer will have a mask token.

    Raises:
        UserError: If the size exceeds :data:`MAX_VOCAB_SIZE`, or is too small for all bytes and the
            special tokens. The minimum is 258, or 259 with a mask token. The tokens of the ChatML
            template are not counted.
    """
    size = DEFAULT_VOCAB_SIZE if vocab_size is None else vocab_size
    least = 256 + 2 + mask
    if size < least:
        raise UserError(
            f"data.vocab_size: {size} is too small for a byte-level tokenizer; use at least {least} "
            "(256 bytes and the special tokens)"
        )
    if size > MAX_VOCAB_SIZE:
        raise UserError(
            f"data.vocab_size: {size} is too large to train a tokenizer; use at most {MAX_VOCAB_SIZE} "
            "(the default is the model's vocab_size)"
        )
    return size


def get_trained_tokenizer_folder(
    source: DataSource,
    vocab_size: int,
    cache: Path,
    *,
    mask: bool = False,
    ends: bool = False,
    chat: bool = False,
) -> Path:
    """Return the cache folder for the tokenizer that is trained on ``source``. It may not exist yet.

    Its name is a digest of the source and of the training options. For the arguments, see
    :func:`train_tokenizer`.
    """
    content = f"{_FORMAT} {vocab_size} {mask} {_TRAIN_CHARS} {source.cache_key}{' ends' if ends else ''}"
    content += f" {CHATML}" if chat else ""
    return cache / "tokenizers" / compute_text_digest(content)


def has_trained_tokenizer(folder: Path) -> bool:
    """Return whether ``folder`` contains an intact trained tokenizer.

    Compares the files with the digests in the manifest, because a damaged tokenizer might load without
    an error.
    """
    try:
        return check_manifest(folder) is not None
    except CheckpointError:
        return False


def train_tokenizer(
    source: DataSource,
    vocab_size: int | None,
    cache: Path,
    *,
    mask: bool = False,
    ends: bool = False,
    chat: bool = False,
) -> Any:
    """Train a byte-level BPE tokenizer on the start of ``source``, or load it from the cache.

    The training text has at most :data:`_TRAIN_CHARS` characters.

    Args:
        source: Source of the training text.
        vocab_size: Vocabulary size, including special tokens. The result may be smaller if the
            source is small. None selects the default.
        cache: Cache folder.
        mask: Whether to add a mask token.
        ends: Whether the tokenizer appends the end token to each text.
        chat: Whether to add the ChatML template and its special tokens.

    Returns:
        The ``PreTrainedTokenizerFast``.

    Raises:
        UserError: If the vocabulary size is not supported, if the source contains no text or cannot
            be read, or if the cache is not writable.
    """
    size = resolve_trained_vocab_size(vocab_size, mask=mask)
    folder = get_trained_tokenizer_folder(source, size, cache, mask=mask, ends=ends, chat=chat)

    def write(draft: Path) -> None:
        _train_bpe(source, size, mask, ends, chat).save_pretrained(draft)
        (draft / MANIFEST).write_text(format_manifest(compute_manifest_entries(draft)), "utf-8")

    return open_or_build_cache_folder(folder, _load_trained_tokenizer, write)


def _load_trained_tokenizer(folder: Path) -> Any:
    """Load a trained tokenizer from the cache. Returns None if it is missing or damaged.

    Args:
        folder: Folder from :func:`get_trained_tokenizer_folder`.
    """
    if not has_trained_tokenizer(folder):
        return None
    try:
        return load_tokenizer(str(folder))
    except UserError:  # the tokenizer is damaged, so the caller trains it again
        return None


def _train_bpe(source: DataSource, vocab_size: int, mask: bool, ends: bool, chat: bool) -> Any:
    """Train a byte-level BPE tokenizer.

    The vocabulary always contains the end and padding tokens. ``mask`` adds a mask token, and
    ``chat`` adds the ChatML template and its special tokens. ``ends`` does not change the
    vocabulary: the tokenizer then appends the end token to each text. See :func:`train_tokenizer`.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = [END_TOKEN, PAD_TOKEN, *([MASK_TOKEN] if mask else []), *(CHATML_TOKENS if chat else ())]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    with enable_tokenizer_threads():
        bpe.train_from_iterator(_iter_training_texts(source), trainer)
    if ends:
        bpe.post_processor = processors.TemplateProcessing(
            single=f"$A {END_TOKEN}",
            pair=f"$A {END_TOKEN} $B {END_TOKEN}",
            special_tokens=[(END_TOKEN, bpe.token_to_id(END_TOKEN))],
        )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call, unused-ignore]
        tokenizer_object=bpe,
        eos_token=END_TOKEN,
        bos_token=END_TOKEN,
        pad_token=PAD_TOKEN,
        mask_token=MASK_TOKEN if mask else None,
        chat_template=CHATML if chat else None,
        clean_up_tokenization_spaces=False,
        model_max_length=1 << 30,
    )


def _iter_training_texts(source: DataSource) -> Iterator[str]:
    """Yield the texts and targets of the source, at most :data:`_TRAIN_CHARS` characters in total.

    The last text may be truncated.

    Raises:
        NoTextError: If the source contains no documents.
    """
    remaining = _TRAIN_CHARS
    has_documents = False
    for document in source.iter_documents():
        has_documents = True
        for text in (document.text, document.target):
            if text and remaining > 0:
                yield text[:remaining]
                remaining -= len(text)
        if remaining <= 0:
            return
    if not has_documents:
        raise source.build_no_text_error()


_parallelism_is_ours = False


@contextmanager
def enable_tokenizer_threads() -> Iterator[None]:
    """Enable the threads of the tokenizers library within this context.

    The threads are disabled on exit, because otherwise the library would print a warning in every
    process that is forked later. The setting is the environment variable ``TOKENIZERS_PARALLELISM``.
    Does nothing if the user has set it.
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
    """Vocabulary size and special tokens of a tokenizer. All tokens are given by their ids.

    Attributes:
        size: Minimum number of rows in a model's embedding. This is the largest token id plus
            one, or the length of the tokenizer if that is larger.
        end_token: Token that ends a document: the end-of-sequence token, or the separator if
            there is none, as in BERT. None if the tokenizer has neither.
        pad_token: Padding token. Falls back to the end token, and then to 0.
        mask_token: Mask token, or None if the tokenizer has none.
        special_tokens: All special tokens, sorted.
        prefix: Tokens that the tokenizer adds before a text, such as ``[CLS]``.
        suffix: Tokens that the tokenizer adds after a text, such as ``[SEP]``.
    """

    size: int
    end_token: int | None
    pad_token: int
    mask_token: int | None
    special_tokens: tuple[int, ...]
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]

    @staticmethod
    def from_tokenizer(tokenizer: Any, *, targets: bool = False) -> Vocabulary:
        """Determine the vocabulary size and special tokens of a tokenizer, by encoding a short text.

        Args:
            tokenizer: Transformers tokenizer.
            targets: Whether to encode the text as a seq2seq target, which may have different special
                tokens.

        Raises:
            UserError: If the tokenizer cannot encode or decode the text.
        """
        encode_texts = encode_targets if targets else encode_text
        bare: list[int] = encode_texts(tokenizer, "a", add_special_tokens=False)["input_ids"]
        framed: list[int] = encode_texts(tokenizer, "a", add_special_tokens=True)["input_ids"]
        decode(tokenizer, framed)  # a decoder that does not end raises an error now instead of after training
        starts = (index for index in range(len(framed)) if framed[index : index + len(bare)] == bare)
        start = next(starts, 0) if bare else 0
        end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
        pad = tokenizer.pad_token_id
        return Vocabulary(
            size=max(len(tokenizer), max(tokenizer.get_vocab().values(), default=-1) + 1),
            end_token=end,
            pad_token=pad if pad is not None else (end or 0),
            mask_token=tokenizer.mask_token_id,
            special_tokens=tuple(sorted(tokenizer.all_special_ids)),
            prefix=tuple(framed[:start]),
            suffix=tuple(framed[start + len(bare) :]) if bare else (),
        )


class PairTokenTypes(NamedTuple):
    """Token types (``token_type_ids``) of an encoded text pair.

    Attributes:
        before: Type of each special token before the first text.
        first: Type of all tokens in the first text.
        between: Type of each special token between the texts.
        second: Type of all tokens in the second text.
        after: Type of each special token after the second text.
        padding: Type of padding tokens.
    """

    before: tuple[int, ...]
    first: int
    between: tuple[int, ...]
    second: int
    after: tuple[int, ...]
    padding: int


@dataclass(frozen=True)
class PairFrame:
    """Special tokens that a tokenizer adds before, between and after the two texts of a pair.

    Attributes:
        before: Special tokens before the first text.
        between: Special tokens between the texts.
        after: Special tokens after the second text.
        types: Token types of the texts and special tokens. None if the model does not use token types.
    """

    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]
    types: PairTokenTypes | None

    @staticmethod
    def from_tokenizer(tokenizer: Any) -> PairFrame:
        """Determine the special tokens that a tokenizer adds to text pairs, by encoding a short pair.

        Raises:
            UserError: If the tokenizer does not simply concatenate the texts and its special tokens.
        """
        first, second = "a", "b"
        has_types = "token_type_ids" in tokenizer.model_input_names
        first_ids, second_ids = (
            encode_text(tokenizer, text, add_special_tokens=False)["input_ids"] for text in (first, second)
        )
        encoded = encode_text(tokenizer, first, second, return_token_type_ids=has_types)
        ids: list[int] = encoded["input_ids"]
        start = _find_subsequence(ids, first_ids, 0)
        following = _find_subsequence(ids, second_ids, start + len(first_ids))
        if not first_ids or not second_ids or start < 0 or following < 0:
            raise UserError(
                "data.text_pair_field: the tokenizer does not support pairs of texts; join the two texts in "
                "one field, or use another data.tokenizer"
            )
        cuts = [0, start, start + len(first_ids), following, following + len(second_ids), len(ids)]
        types = None
        if has_types:
            parts = [tuple(encoded["token_type_ids"][a:b]) for a, b in pairwise(cuts)]
            types = PairTokenTypes(
                parts[0], parts[1][0], parts[2], parts[3][0], parts[4], tokenizer.pad_token_type_id
            )
        return PairFrame(tuple(ids[:start]), tuple(ids[cuts[2] : following]), tuple(ids[cuts[4] :]), types)

    @property
    def num_special_tokens(self) -> int:
        """Number of special tokens that the tokenizer adds to a pair of texts."""
        return len(self.before) + len(self.between) + len(self.after)


def _find_subsequence(tokens: list[int], part: list[int], start: int) -> int:
    """Return the first index at or after ``start`` at which ``part`` occurs in ``tokens``, or -1."""
    return next(
        (index for index in range(start, len(tokens)) if tokens[index : index + len(part)] == part), -1
    )


def compute_tokenizer_digest(tokenizer: Any) -> str:
    """Compute a digest of all properties of a tokenizer that determine the token ids of a text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        state = json.loads(backend.to_str())
        state["truncation"] = state["padding"] = None  # changed by every call, but not used by this program
    else:
        state = {
            "class": type(tokenizer).__name__,
            "vocab": sorted(tokenizer.get_vocab().items()),
            "files": _compute_files_digest(tokenizer),
        }
    ids = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.sep_token_id]
    content = json.dumps([state, ids], sort_keys=True)
    return compute_text_digest(content)


def _compute_files_digest(tokenizer: Any) -> str:
    """Compute a digest of the vocabulary files of a slow (pure-Python) tokenizer.

    For example, a Marian tokenizer has two sentencepiece models. The tokenizer writes its files to
    a temporary folder. If it cannot write any files, the result is the digest of an empty input.
    """
    hasher = hashlib.blake2b(digest_size=16)
    with create_scratch_folder("portable-vocabulary") as folder:
        with (
            convert_tokenizer_errors(tokenizer, "write its vocabulary"),
            suppress(NotImplementedError, OSError, ValueError),  # without files, the vocabulary suffices
        ):
            # The argument is required by ESM's tokenizer, which has no default for it.
            tokenizer.save_vocabulary(str(folder), filename_prefix=None)
        for path in sorted(folder.iterdir()):
            hasher.update(path.name.encode() + b"\0" + path.read_bytes())
    return hasher.hexdigest()


def starts_with_prefix(ids: Sequence[int], prefix: Sequence[int]) -> bool:
    """Return whether a text already begins with the special tokens that would be prepended to it.

    For example, the chat template may already have written the BOS token. The result is always True
    if no tokens would be prepended.

    Args:
        ids: Tokens of the text.
        prefix: Special tokens to prepend to texts, such as the BOS token.
    """
    return tuple(ids[: len(prefix)]) == tuple(prefix)
