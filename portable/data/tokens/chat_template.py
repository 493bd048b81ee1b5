"""Encoding of conversations with a chat template: tokens and the loss mask.

The template renders a conversation as one text. The part of the text that the assistant wrote is determined
in one of two ways:

- The template marks it with ``{% generation %}``.
- Otherwise, prefixes determine it. The conversation before an answer, with the generation prompt, ends at the
  start of the answer. The conversation up to and including the answer ends at the end of the answer. Both are
  rendered and must be prefixes of the complete text. Some templates render previous turns differently from
  the last turn. For example, Qwen3 removes their reasoning. Then there are no such prefixes, and each answer
  becomes a separate sample, in the context that the model sees at inference.

After the last answer, a template may write tokens that it writes at no other position, such as Phi-3's end of
text, or GPT-OSS's return token instead of its end token. A prefix may therefore differ from the complete text
in special tokens at its end.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from portable.data.sources.documents import RecordError, format_name_list
from portable.data.tokens import bounded_tokenizer, limited_calls
from portable.data.tokens.rendering import (
    TEMPLATE_DATE,
    AnswerContext,
    AnswerNotFoundError,
    RenderedConversation,
    TemplateRenderer,
    TrainOn,
    build_answer_not_found_error,
    build_no_template_error,
    build_template_error,
    check_answer_words,
)
from portable.data.tokens.tokenizer import CHATML, starts_with_prefix
from portable.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from portable.data.sources.documents import Conversation, Document
    from portable.data.tokens.special_tokens import Frame

BUILT_IN_TEMPLATES = {"chatml": CHATML}
CONVERSION_VERSION = 4  # version of the conversion to tokens and masks; a change rebuilds the caches
_SPECIAL_TOKEN_PATTERN = re.compile(r"<\|[^\s<>|'\"]+\|>")


@dataclass
class EncodedConversations:
    """Tokens of several conversations, sample after sample, and counts for notes and checks.

    Attributes:
        tokens: Tokens of each sample, int64 ``[tokens]``.
        trained_masks: Loss mask of each sample, bool ``[tokens]``.
        num_stopping: Number of samples whose loss mask includes the token that ends the last answer.
        end_token_counts: Number of last answers that each token ends.
        unstopped_example: Last tokens in the loss mask of a sample that excludes the end token, and the
            tokens after them, as text.
        unmatched_prompt: Text that the generation prompt has but the conversations do not have before
            answers. Empty if there is none.
        samples_per_document: Number of samples of each document.
        refused_records: Errors of the records that the template cannot write. They have no samples.
        counts: Counts by name. ``records``: all records. ``apart``: records whose previous turns the template
            changes, and ``turns``: their samples. ``think``: records with reasoning, ``thoughts``: their
            parts of reasoning, and ``lost``: parts that the template drops. ``empty``: answers without words,
            calls and reasoning.
    """

    tokens: list[npt.NDArray[np.int64]] = field(default_factory=list)
    trained_masks: list[npt.NDArray[np.bool_]] = field(default_factory=list)
    num_stopping: int = 0
    end_token_counts: Counter[int] = field(default_factory=Counter)
    unstopped_example: str = ""
    unmatched_prompt: str = ""
    samples_per_document: list[int] = field(default_factory=list)
    refused_records: list[RecordError] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


def load_chat_template(tokenizer: Any, setting: str | None) -> str | dict[str, str]:
    """Load the template that ``data.chat_template`` selects.

    Args:
        tokenizer: Tokenizer of transformers.
        setting: Path of a file, name of one of the tokenizer's templates, or name of a built-in template. If
            None, the template of the tokenizer.

    Returns:
        Text of the template. If the tokenizer has several templates, their texts keyed by name. Only
        ``default`` and ``tool_use`` are used.

    Raises:
        UserError: If there is no such template.
    """
    tokenizer_templates = getattr(tokenizer, "chat_template", None)
    if setting is None:
        if not tokenizer_templates:
            raise build_no_template_error()
        if isinstance(tokenizer_templates, dict) and "default" not in tokenizer_templates:
            raise UserError(
                "data.chat_template: the tokenizer has several templates "
                f"({format_name_list(tokenizer_templates)}); set data.chat_template to one of them"
            )
        return tokenizer_templates  # type: ignore[no-any-return]
    if isinstance(tokenizer_templates, dict) and setting in tokenizer_templates:
        return str(tokenizer_templates[setting])
    path = Path(setting)
    if path.suffix in (".jinja", ".jinja2", ".j2", ".txt") or path.is_file():
        try:
            return path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8"
            raise UserError(
                f"data.chat_template: {setting}: cannot be read ({reason}); check the path"
            ) from error
    if setting in BUILT_IN_TEMPLATES:
        return BUILT_IN_TEMPLATES[setting]
    names = [*(tokenizer_templates if isinstance(tokenizer_templates, dict) else ()), *BUILT_IN_TEMPLATES]
    raise UserError(
        f"data.chat_template: {setting!r} is neither a file nor a template of this tokenizer; use the "
        f"path of a template file, {', '.join(names)}, or null for the template of the tokenizer"
    )


class _MaskedDrafts(NamedTuple):
    """Rendered samples of one document, their encodings, and their loss masks."""

    drafts: list[RenderedConversation]
    encodings: Sequence[Any]
    masks: list[npt.NDArray[np.bool_]]


class _TokenMatch(NamedTuple):
    """Comparison of the tokens of a text with the first tokens of another text.

    Attributes:
        num_equal: Number of equal tokens at the start.
        rest: Remaining tokens of the text.
    """

    num_equal: int
    rest: list[int]


class ConversationEncoder:
    """Renders, tokenizes and masks conversations.

    Args:
        tokenizer: Fast tokenizer of transformers, because the positions of its tokens in the text are needed.
        templates: Templates from :func:`load_chat_template`. None if there is no template, which is only
            possible for completions of plain text.
        frame: Special tokens around a completion of plain text.
        train_on: Tokens to train, ``data.train_on``. None for the completion of a record with a prompt, and
            the assistant's messages of other records.
        split_turns: Whether each answer becomes a separate sample, with the messages before it.
        pairs: Whether documents are pairs of completions of one prompt. Both are then trained from the same
            token on.
        kwargs: Additional variables of the template.

    Raises:
        UserError: If the template or the tokenizer cannot be used.
    """

    def __init__(
        self,
        tokenizer: Any,
        templates: str | dict[str, str] | None,
        frame: Frame,
        *,
        train_on: TrainOn | None = None,
        split_turns: bool = False,
        pairs: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise UserError(
                f"data.tokenizer: {type(tokenizer).__name__} is not a fast tokenizer, which conversations "
                "need; use a tokenizer with a tokenizer.json"
            )
        self._tokenizer = tokenizer
        self._pairs = pairs
        self._renderer = TemplateRenderer(
            templates,
            {**tokenizer.special_tokens_map, **(kwargs or {})},
            train_on,
            split_turns,
            frame.prefix,
            frame.suffix,
            str(tokenizer.eos_token),
        )

    @property
    def cache_key(self) -> str:
        """Text that contains all settings that determine the tokens, except the source and the tokenizer."""
        renderer = self._renderer
        content = [
            CONVERSION_VERSION,
            renderer.templates,
            renderer.train_on,
            renderer.split_turns,
            self._pairs,
            renderer.variables,
            TEMPLATE_DATE,
        ]
        return json.dumps(content, sort_keys=True, default=str)

    @property
    def missing_tokens(self) -> list[str]:
        """Tokens such as ``<|im_start|>`` that the template writes but the tokenizer does not have."""
        templates = self._renderer.templates
        texts = templates.values() if isinstance(templates, dict) else [templates or ""]
        written = dict.fromkeys(_SPECIAL_TOKEN_PATTERN.findall(" ".join(texts)))
        vocabulary = self._tokenizer.get_vocab()
        return [token for token in written if token not in vocabulary]

    def encode_documents(
        self, documents: Sequence[Document], *, collect: bool = False
    ) -> EncodedConversations:
        """Tokenize conversations and completions.

        Args:
            documents: Conversations and completions. With pairs, two documents per record.
            collect: Whether to skip records that the template cannot render, and collect their errors.

        Raises:
            RecordError: If the template fails for a record, or its mask cannot be determined. The error names
                the record.
        """
        drafts: list[list[RenderedConversation] | RecordError] = limited_calls.call_within_limits(
            partial(self._renderer.render_documents, collect=collect), documents
        )
        rendered = [
            document_drafts for document_drafts in drafts if not isinstance(document_drafts, RecordError)
        ]
        encodings = iter(
            self._encode_texts([draft.text for document_drafts in rendered for draft in document_drafts])
        )
        encoded = EncodedConversations()
        size = 2 if self._pairs else 1
        for first in range(0, len(documents), size):
            samples: list[_MaskedDrafts] = []
            refusal: RecordError | None = None
            for document, document_drafts in zip(
                documents[first : first + size], drafts[first : first + size], strict=True
            ):
                if isinstance(document_drafts, RecordError):
                    refusal = refusal or document_drafts
                    continue
                draft_encodings = [next(encodings) for _ in document_drafts]
                try:
                    samples.append(self._compute_masks(document, document_drafts, draft_encodings, encoded))
                except RecordError as error:
                    if not collect:
                        raise
                    refusal = refusal or error
            if refusal is not None:
                encoded.refused_records.append(refusal)
                encoded.samples_per_document += [0] * len(documents[first : first + size])
                continue
            for sample in samples:
                self._append_samples(*sample, encoded)
        if self._pairs:  # both completions are trained from the same token on
            for chosen_mask, rejected_mask in zip(
                encoded.trained_masks[::2], encoded.trained_masks[1::2], strict=True
            ):
                first, second = int(chosen_mask.argmax()), int(rejected_mask.argmax())
                chosen_mask[second:first] = rejected_mask[first:second] = True
        return encoded

    def _compute_masks(
        self,
        document: Document,
        drafts: list[RenderedConversation],
        encodings: Sequence[Any],
        encoded: EncodedConversations,
    ) -> _MaskedDrafts:
        """Compute the loss masks of a document's rendered samples. Updates ``encoded.counts``.

        Returns:
            Rendered samples, encodings and masks. If the answers cannot be found in one text, there is one
            sample per answer.

        Raises:
            AnswerNotFoundError: If an answer cannot be found even then.
        """
        try:
            return _MaskedDrafts(drafts, encodings, self._build_masks(drafts, encodings, encoded))
        except AnswerNotFoundError:
            if document.conversation is None or not drafts[0].separable_answers:
                raise
        drafts = limited_calls.call_within_limits(
            self._renderer.render_turns, document.conversation, drafts[0].separable_answers
        )
        encodings = self._encode_texts([draft.text for draft in drafts])
        masks = self._build_masks(drafts, encodings, encoded)
        encoded.counts.update(apart=1, turns=len(drafts))
        return _MaskedDrafts(drafts, encodings, masks)

    def _append_samples(
        self,
        drafts: Sequence[RenderedConversation],
        encodings: Sequence[Any],
        masks: Sequence[npt.NDArray[np.bool_]],
        encoded: EncodedConversations,
    ) -> None:
        """Append the samples of a document to ``encoded``, with special tokens of completions."""
        for draft, encoding, within in zip(drafts, encodings, masks, strict=True):
            prefix = () if starts_with_prefix(encoding.ids, draft.prefix) else draft.prefix
            tokens = np.array([*prefix, *encoding.ids, *draft.suffix], dtype=np.int64)
            ends = np.full(len(prefix), draft.trains_all), within, np.ones(len(draft.suffix), dtype=bool)
            encoded.tokens.append(tokens)
            encoded.trained_masks.append(np.concatenate(ends))
            self._count_end_token(draft, tokens, encoded.trained_masks[-1], encoded)
        shown = [shown for draft in drafts for shown in draft.reasoning_shown]
        encoded.samples_per_document.append(len(drafts))
        encoded.counts.update(
            records=1,
            think=bool(shown),
            thoughts=len(shown),
            lost=shown.count(False),
            empty=sum(draft.num_empty_answers for draft in drafts),
        )

    # -- masks ----------------------------------------------------------------------------------------------

    def _encode_texts(self, texts: list[str]) -> Any:
        """Encode texts without special tokens. Returns encodings of the tokenizers library."""
        if not texts:
            return []
        encoded = bounded_tokenizer.encode_text(
            self._tokenizer,
            texts,
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return encoded.encodings

    def _build_masks(
        self, drafts: list[RenderedConversation], encodings: Sequence[Any], encoded: EncodedConversations
    ) -> list[npt.NDArray[np.bool_]]:
        """Build the mask of each rendered sample."""
        return [
            self._build_mask(draft, encoding, encoded)
            for draft, encoding in zip(drafts, encodings, strict=True)
        ]

    def _build_mask(
        self, draft: RenderedConversation, encoding: Any, encoded: EncodedConversations
    ) -> npt.NDArray[np.bool_]:
        """Build the loss mask of a rendered sample, bool ``[tokens]``.

        Raises:
            AnswerNotFoundError: If the start or end of an answer cannot be determined.
            RecordError: If the template drops a part of an answer.
        """
        if draft.separable_answers and len(set(draft.reasoning_shown)) > 1 and draft.conversation is not None:
            # Use one sample per answer, because the template drops the reasoning of previous answers.
            raise build_answer_not_found_error(draft.conversation, draft.separable_answers[0])
        trained = np.zeros(len(encoding.ids), dtype=bool)
        if draft.trains_all:
            trained[:] = True
        for start, end in draft.trained_spans:
            trained[
                _find_token_at_char(encoding, start) : _find_token_after_char(encoding, end, len(draft.text))
            ] = True
        for index, opened, closed in zip(
            draft.searched_answers, draft.answer_starts, draft.answer_ends, strict=True
        ):
            assert draft.conversation is not None
            first = self._find_first_token(draft, draft.conversation, encoding, index, opened, encoded)
            last = self._find_stop_token(draft, draft.conversation, encoding, index, closed)
            if last <= first:
                raise build_template_error(
                    draft.conversation, f"the template writes nothing for message {index + 1}, an answer"
                )
            trained[first:last] = True
        if draft.answer_words and draft.conversation is not None:
            check_answer_words(
                draft.conversation, draft.answer_words, _join_trained_text(draft.text, encoding, trained)
            )
        return trained

    def _find_first_token(
        self,
        draft: RenderedConversation,
        conversation: Conversation,
        encoding: Any,
        index: int,
        opened: int | AnswerContext,
        encoded: EncodedConversations,
    ) -> int:
        """Return the index of the first token of an answer.

        Args:
            draft: Rendered conversation.
            conversation: The same conversation. Never None.
            encoding: Tokens of the text.
            index: Index of the message.
            opened: Start of the answer in characters, or the rendered conversation before the answer.
            encoded: Result. Modified in place: the unmatched part of the generation prompt is recorded.

        Raises:
            AnswerNotFoundError: If the start of the answer cannot be determined.
        """
        if isinstance(opened, int):
            return _find_token_at_char(encoding, opened)
        if conversation.messages[index]["role"] != "assistant":
            raise build_answer_not_found_error(conversation, index)
        # The generation prompt may contain the beginning of the answer, such as "<think>".
        prompted, before = opened
        if before is None:
            raise build_answer_not_found_error(conversation, index)
        context, rest = self._match_tokens(encoding, before)
        first, prompt_rest = self._match_tokens(encoding, prompted)
        ids = encoding.ids
        # A header ends with an added token or whitespace. Other equal tokens are equal by chance.
        while first > context and not (ids[first - 1] in self._added_ids or self._is_blank(ids[first - 1])):
            first -= 1
            prompt_rest.insert(0, ids[first])
        # The start is valid only if it is after a part of the generation prompt.
        is_within_prompt = first > context or prompted == before
        if not self._has_only_special(rest) or not is_within_prompt or first < context or first == len(ids):
            raise build_answer_not_found_error(conversation, index)
        encoded.unmatched_prompt = encoded.unmatched_prompt or bounded_tokenizer.decode(
            self._tokenizer, prompt_rest
        )
        return first

    def _find_stop_token(
        self,
        draft: RenderedConversation,
        conversation: Conversation,
        encoding: Any,
        index: int,
        closed: int | str,
    ) -> int:
        """Return the index of the token after an answer.

        Raises AnswerNotFoundError if the text after the answer has more than special tokens.
        """
        if isinstance(closed, int):
            return _find_token_after_char(encoding, closed, len(draft.text))
        last, rest = self._match_tokens(encoding, closed)
        if not self._has_only_special(rest):
            raise build_answer_not_found_error(conversation, index)
        return last

    def _match_tokens(self, encoding: Any, text: str) -> _TokenMatch:
        """Compare the tokens of ``text`` with the first tokens of the complete conversation."""
        ids: list[int] = self._encode_texts([text])[0].ids
        count = next(
            (
                index
                for index, (token, whole_token) in enumerate(zip(ids, encoding.ids, strict=False))
                if token != whole_token
            ),
            min(len(ids), len(encoding.ids)),
        )
        return _TokenMatch(count, ids[count:])

    # -- the token that ends a turn --------------------------------------------------------------------------

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        """Ids of all special tokens."""
        return frozenset(self._tokenizer.all_special_ids) | {
            number for number, token in self._tokenizer.added_tokens_decoder.items() if token.special
        }

    @cached_property
    def _added_ids(self) -> frozenset[int]:
        """Ids of all special tokens and other added tokens."""
        return self._special_ids | frozenset(self._tokenizer.get_added_vocab().values())

    @cached_property
    def _blank_tokens(self) -> dict[int, bool]:
        """Cache of the results of :meth:`_is_blank`, empty at first."""
        return {}

    def _is_blank(self, token: int) -> bool:
        """Return whether a token consists of whitespace."""
        if token not in self._blank_tokens:
            self._blank_tokens[token] = not bounded_tokenizer.decode(self._tokenizer, [token]).strip()
        return self._blank_tokens[token]

    def _has_only_special(self, tokens: list[int]) -> bool:
        """Return whether all tokens are special tokens or whitespace."""
        return all(token in self._special_ids or self._is_blank(token) for token in tokens)

    def _count_end_token(
        self,
        draft: RenderedConversation,
        tokens: npt.NDArray[np.int64],
        trained: npt.NDArray[np.bool_],
        encoded: EncodedConversations,
    ) -> None:
        """Count the token that ends the last answer, and whether it contributes to the loss.

        Updates ``encoded``.

        It is the first of the special tokens after the last words, or an added token after them.
        """
        last = int(np.flatnonzero(trained)[-1]) if trained.any() else -1
        untrained = np.flatnonzero(~trained[: last + 1])
        begin = int(untrained[-1]) + 1 if len(untrained) else 0
        conversation = draft.conversation
        spoke_last = (
            conversation is None or len(conversation.messages) - 1 in conversation.trained_message_indices
        )
        index = (len(tokens) if spoke_last else last + 1) - 1
        while index >= begin and self._is_blank(int(tokens[index])) and tokens[index] not in self._added_ids:
            index -= 1
        end = index if index >= begin and tokens[index] in self._added_ids else None
        while index >= begin and (tokens[index] in self._special_ids or self._is_blank(int(tokens[index]))):
            end = index if tokens[index] in self._special_ids else end
            index -= 1
        if end is not None:
            encoded.end_token_counts[int(tokens[end])] += 1
        if end is not None and trained[end]:
            encoded.num_stopping += 1
        elif not encoded.unstopped_example:
            decode = partial(bounded_tokenizer.decode, self._tokenizer)
            trained_end, rest = (
                decode(tokens[trained][-8:].tolist()),
                decode(tokens[last + 1 : last + 9].tolist()),
            )
            encoded.unstopped_example = f"{trained_end!r}" + (f", and then comes {rest!r}" if rest else "")


def build_template_notes(counts: Counter[str], unmatched_prompt: str) -> list[str]:
    """Build notes about unexpected effects of a template, one line each.

    Args:
        counts: Counts of all records. See :class:`EncodedConversations`.
        unmatched_prompt: Text that only the generation prompt has.

    Raises:
        UserError: If the template drops all reasoning, and most records have some.
    """
    template_notes = []
    if unmatched_prompt:
        template_notes.append(
            f"the generation prompt ends in {unmatched_prompt!r}, which the template does not write "
            "before the answers of the data, so the model is trained without this text"
        )
    if counts["apart"]:
        template_notes.append(
            f"the template renders earlier answers differently from the last answer: {counts['apart']:,} "
            f"of {counts['records']:,} conversations became {counts['turns']:,} samples, one for each "
            "answer"
        )
    if counts["lost"]:
        template_notes.append(
            f"the template leaves out the reasoning of {counts['lost']:,} of {counts['thoughts']:,} "
            "answers with reasoning, so the model is trained without this reasoning"
        )
    if counts["lost"] and counts["lost"] == counts["thoughts"] and 2 * counts["think"] > counts["records"]:
        raise UserError(
            f"data.chat_template: the template leaves out all reasoning, which {counts['think']:,} of "
            f"{counts['records']:,} records have; use a template that writes the reasoning, or remove the "
            "reasoning"
        )
    lines = [f"data.chat_template: {line}" for line in template_notes]
    if counts["empty"]:
        lines.append(
            f"data.source: {counts['empty']:,} answers are empty, so the model is trained to end its turn "
            "without text; remove these records, or set weight: 0 in these messages"
        )
    return lines


def _join_trained_text(text: str, encoding: Any, trained: npt.NDArray[np.bool_]) -> str:
    """Join the parts of a text whose tokens contribute to the loss with line breaks.

    Returns the text itself if all tokens contribute.
    """
    if trained.all():
        return text
    edges = np.flatnonzero(np.diff(trained, prepend=False, append=False)).tolist()
    parts = []
    for first, stop in zip(edges[::2], edges[1::2], strict=True):
        parts.append(text[encoding.token_to_chars(first)[0] : encoding.token_to_chars(stop - 1)[1]])
    return "\n".join(parts)


def _find_token_at_char(encoding: Any, char: int) -> int:
    """Return the index of the token that contains a character, or of the next token if there is none."""
    # The tokenizer removes some characters, such as spaces.
    if (token_index := encoding.char_to_token(char)) is None:
        starts = ((index, span[0]) for index, span in enumerate(encoding.offsets))
        token_index = next((index for index, start in starts if start >= char), len(encoding.ids))
    return int(token_index)


def _find_token_after_char(encoding: Any, char: int, length: int) -> int:
    """Return the index of the first token that begins at a character or later."""
    if char >= length:
        return len(encoding.ids)
    token_index = _find_token_at_char(encoding, char)
    starts_earlier = token_index < len(encoding.ids) and encoding.token_to_chars(token_index)[0] < char
    return token_index + 1 if starts_earlier else token_index
