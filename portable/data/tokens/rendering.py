"""Conversations as the text that a template writes, with what is known of where each answer is.

A template is foreign code, in Jinja's sandbox. What is here runs within limits of time and memory: see
:mod:`portable.data.tokens.limited_calls`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from portable.data.sources.conversations import RARE_ROLES, SYSTEM_ROLES
from portable.data.sources.documents import (
    DEFAULT_TRAINED_ROLES,
    Conversation,
    RecordError,
    is_excluded_from_training,
    replace_surrogates,
)
from portable.errors import UserError, to_one_line
from portable.private import transformers_internals

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from portable.data.sources.documents import Document, Message

TrainOn = Literal["assistant", "completion", "last_assistant", "all"]
TEMPLATE_DATE = "2025-01-01"
"""The date in a prompt that tells today's, so that the tokens are the same on every day."""
_PROBE_TEXT = "What is shown of this?"
_THOUGHT_END = re.compile(r"</[\w:]*think[\w:]*>|\[/THINK\]", re.IGNORECASE)
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MAX_RENDERED_CHARS = 1 << 30  # characters written for one conversation
_UNCHECKED_CHARS, _MAX_EXPANSION = (
    1 << 20,
    64,
)  # characters that a template may write, or so many times those of a record
_Span = tuple[int, int]


class AnswerContext(NamedTuple):
    """The rendered conversation before an answer.

    Attributes:
        prompted: The conversation with the generation prompt.
        unprompted: The conversation without the generation prompt. None if it cannot be determined.
    """

    prompted: str
    unprompted: str | None


class AnswerWords(NamedTuple):
    """Number of a message, from 0, and its text without reasoning."""

    message_index: int
    text: str


@dataclass(frozen=True)
class RenderedConversation:
    """A rendered conversation before it is tokenized."""

    text: str
    conversation: Conversation | None
    """None for a completion of plain text."""
    trained_spans: tuple[_Span, ...] = ()
    searched_answers: tuple[int, ...] = ()
    """Messages whose spans follow from prefixes."""
    answer_starts: tuple[int | AnswerContext, ...] = ()
    """For each where it begins: how many characters of the text the conversation before it has, with the
    generation prompt; or that conversation, where the text does not begin with it."""
    answer_ends: tuple[int | str, ...] = ()
    """For each the conversation up to and with it, likewise."""
    trains_all: bool = False
    """Whether all tokens are trained."""
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    """Tokens before and after the text; the latter are trained."""
    reasoning_shown: tuple[bool, ...] = ()
    """For each trained answer with reasoning, whether the text has it."""
    separable_answers: tuple[int, ...] = ()
    """The trained answers, if each may become a sample of its own."""
    answer_words: tuple[AnswerWords, ...] = ()
    """Message number and own words of each trained answer. The trained text must contain them."""
    num_empty_answers: int = 0
    """Trained answers without words, calls and reasoning."""


class AnswerNotFoundError(RecordError):
    """The tokens of an answer cannot be told in the whole."""


def build_no_template_error() -> UserError:
    return UserError(
        "data.chat_template: the tokenizer has none; set it to a file with a template, or to chatml if the "
        "tokenizer has its tokens (<|im_start|> <|im_end|>)"
    )


@dataclass(frozen=True)
class TemplateRenderer:
    """Renders conversations.

    Attributes:
        templates: the text of a template, or those of a tokenizer with several; None for completions alone.
        variables: of the templates.
        train_on: which tokens are trained; None: the completion of a record with a prompt, else what the
            assistant says.
        split_turns: make a draft of each answer, with what was said before it.
        prefix, suffix: the special tokens around a completion.
        end_text: the text of the tokenizer's end token.
    """

    templates: str | dict[str, str] | None
    variables: Mapping[str, Any] = field(default_factory=dict)
    train_on: TrainOn | None = None
    split_turns: bool = False
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    end_text: str = ""
    _requires_parts_cache: dict[str, bool] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def render_documents(
        self, documents: Sequence[Document], *, collect: bool = False
    ) -> list[list[RenderedConversation] | RecordError]:
        """Render each conversation or completion.

        Args:
            documents: Conversations or completions.
            collect: Whether to return the error of a record instead of its drafts.

        Returns:
            Drafts of each document, or its error.

        Raises:
            RecordError: naming the record, if its template fails.
        """
        drafts: list[list[RenderedConversation] | RecordError] = []
        for document in documents:
            try:
                drafts.append(self._render_document(document))
            except RecordError as error:
                # A template that takes too much of one record has no time left for others.
                if not collect or isinstance(error.__cause__, TimeoutError | MemoryError):
                    raise
                drafts.append(RecordError(str(error)))
        return drafts

    def render_question(self, text: str, location: str) -> str:
        """What a user's ``text`` becomes, up to where the assistant begins."""
        return self.render_prompt([{"role": "user", "content": text}], location)

    def render_prompt(self, messages: Sequence[Message], location: str) -> str:
        """Render a conversation up to the point where the assistant begins.

        Args:
            messages: Messages of the conversation.
            location: Name of the conversation in error messages.
        """
        conversation = self._convert_to_text_parts(Conversation(tuple(messages), location))
        return self._render_messages(conversation, conversation.messages, prompted=True)

    def _render_document(self, document: Document) -> list[RenderedConversation]:
        conversation = document.conversation
        if conversation is None:
            return [self._build_completion_draft(document.text, document.num_prompt_chars or 0)]
        if not self.split_turns:
            return [self._build_draft(conversation, self.train_on)]
        begin = conversation.num_prompt_messages or 0
        return self.render_turns(
            conversation, [index for index in conversation.trained_message_indices if index >= begin]
        )

    def render_turns(self, conversation: Conversation, answers: Sequence[int]) -> list[RenderedConversation]:
        """Each of these answers with what was said before it."""
        without_prompt = replace(conversation, num_prompt_messages=None)
        parts = (replace(without_prompt, messages=without_prompt.messages[: index + 1]) for index in answers)
        return [self._build_draft(part, "last_assistant", is_single_turn=True) for part in parts]

    def _build_completion_draft(self, text: str, prompt: int) -> RenderedConversation:
        """A prompt and its completion without a template, ended by the tokenizer's end token."""
        trains_prompt = self.train_on == "all"
        suffix = () if text.endswith(self.end_text) else self.suffix
        return RenderedConversation(
            text, None, ((prompt, len(text)),), trains_all=trains_prompt, prefix=self.prefix, suffix=suffix
        )

    def _build_draft(
        self, conversation: Conversation, train_on: TrainOn | None, *, is_single_turn: bool = False
    ) -> RenderedConversation:
        if train_on is None:
            prompted = (
                conversation.num_prompt_messages is not None
                and conversation.trained_roles == DEFAULT_TRAINED_ROLES
            )
            train_on = "completion" if prompted else "assistant"
        plain, conversation = conversation, self._convert_tool_calls(conversation)
        messages = conversation.messages
        marked = train_on in ("assistant", "last_assistant") and _GENERATION_MARK.search(
            self._select_template(conversation)
        )
        text, spans = (
            self._render_marked(conversation, messages)
            if marked
            else (self._render_messages(conversation, messages), [])
        )
        _check_messages_shown(plain, text)
        begin = conversation.num_prompt_messages if train_on == "completion" else 0
        answers = tuple(number for number in conversation.trained_message_indices if number >= (begin or 0))
        answers = answers[-1:] if train_on == "last_assistant" else answers
        thoughts = [_extract_reasoning(plain.messages[number]) for number in answers]
        shown = tuple(replace_surrogates(thought) in text for thought in thoughts if thought)
        answer_texts = [(number, strip_reasoning(plain.messages[number])) for number in answers]
        words = tuple(
            AnswerWords(number, answer_text)
            for number, answer_text in answer_texts
            if answer_text or plain.messages[number].get("tool_calls")
        )
        empty = sum(
            not (answer_text or thought or plain.messages[number].get("tool_calls"))
            for (number, answer_text), thought in zip(answer_texts, thoughts, strict=True)
        )
        if train_on in ("all", "completion"):
            draft = self._build_whole_draft(conversation, text, begin, train_on, shown)
            return replace(draft, answer_words=words, num_empty_answers=empty)
        if not answers:
            raise RecordError(
                f"data.source: {conversation.location}: {conversation.trained_roles_text} says nothing; "
                "remove the record"
            )
        turns = () if is_single_turn else answers
        if marked:  # the assistant's; the others' are found by their prefixes
            marked_answers = [index for index in answers if messages[index]["role"] == "assistant"]
            if len(marked_answers) < sum(message["role"] == "assistant" for message in messages):
                ends = {end for index in marked_answers for end in (index, index + 1)}
                count = {end: len(self._render_marked(conversation, messages[:end])[1]) for end in ends}
                spans = [span for index in marked_answers for span in spans[count[index] : count[index + 1]]]
            if marked_answers and not spans:
                raise build_template_error(conversation, "{% generation %} marks nothing in it")
            answers = tuple(index for index in answers if index not in marked_answers)
        if 2 * len(answers) * len(text) > _MAX_RENDERED_CHARS:
            raise build_template_error(
                conversation,
                f"{len(answers):,} answers in {len(text):,} characters are too many to find by their "
                "prefixes; cut the record into shorter ones, or use a template with {% generation %}",
            )
        opened_at = tuple(
            self._find_answer_start(
                conversation,
                text,
                index,
                self._render_before_answer(conversation, text, index, prompted=True),
            )
            for index in answers
        )
        closed_at = tuple(
            len(text)
            if index + 1 == len(messages)
            else _measure_prefix(text, self._render_messages(conversation, messages[: index + 1]))
            for index in answers
        )
        return RenderedConversation(
            text,
            conversation,
            tuple(spans),
            answers,
            opened_at,
            closed_at,
            reasoning_shown=shown,
            separable_answers=turns,
            answer_words=words,
            num_empty_answers=empty,
        )

    def _build_whole_draft(
        self,
        conversation: Conversation,
        text: str,
        begin: int | None,
        train_on: TrainOn,
        shown: tuple[bool, ...],
    ) -> RenderedConversation:
        """A text that is trained from message ``begin`` to its end."""
        begin = _select_first_trained_message(conversation, begin, train_on)
        if train_on == "all":
            return RenderedConversation(text, conversation, trains_all=True, reasoning_shown=shown)
        opened = self._render_messages(conversation, conversation.messages[:begin], prompted=True)
        start = self._find_answer_start(conversation, text, begin, opened)
        return RenderedConversation(
            text, conversation, (), (begin,), (start,), (len(text),), reasoning_shown=shown
        )

    def _find_answer_start(
        self, conversation: Conversation, text: str, index: int, opened: str
    ) -> int | AnswerContext:
        prefix = _measure_prefix(text, opened)
        if isinstance(prefix, int):
            return prefix
        try:
            return AnswerContext(prefix, self._render_before_answer(conversation, text, index))
        except AnswerNotFoundError:  # which matters only if the answer is looked for
            return AnswerContext(prefix, None)

    def _render_before_answer(
        self, conversation: Conversation, text: str, index: int, *, prompted: bool = False
    ) -> str:
        """The conversation before an answer, as it stands in ``text``; before what another role says.

        No template takes an empty conversation as it takes others: it may write a system prompt only with the
        first message. So a first answer is found by the generation prompt, or what ``text`` has of it.
        """
        if (message := conversation.messages[index])["role"] != "assistant":
            other = self._convert_to_text_parts(
                replace(conversation, messages=({**message, "content": _PROBE_TEXT},))
            )
            shown = self._render_messages(conversation, [*conversation.messages[:index], *other.messages])
            if _PROBE_TEXT not in shown:
                raise build_answer_not_found_error(conversation, index)
            return shown[: shown.rindex(_PROBE_TEXT)]
        if index:
            return self._render_messages(conversation, conversation.messages[:index], prompted=prompted)
        probe = self._convert_to_text_parts(
            replace(conversation, messages=({"role": "user", "content": _PROBE_TEXT},))
        )
        question = self._render_messages(probe, probe.messages)
        header = self._render_messages(probe, probe.messages, prompted=True)
        header = header[len(commonprefix([question, header])) :]  # noqa: RUF071 - of characters
        header_start = next((header[:end] for end in range(len(header), 0, -1) if header[:end] in text), "")
        if not header_start:
            raise build_answer_not_found_error(conversation, index)
        return text[: text.index(header_start)] + (header if prompted else "")

    def _select_template(self, conversation: Conversation) -> str:
        if isinstance(self.templates, str):
            return self.templates
        if self.templates is None:
            raise build_no_template_error()
        name = "tool_use" if conversation.tools and "tool_use" in self.templates else "default"
        return self.templates[name]

    def _build_variables(self, conversation: Conversation) -> dict[str, Any]:
        kwargs = {**self.variables, **conversation.template_kwargs}
        day = datetime.fromisoformat(str(kwargs.pop("strftime_now", TEMPLATE_DATE)))
        return {
            "strftime_now": day.strftime,
            "tools": None if conversation.tools is None else list(conversation.tools),
            "documents": None,
            **kwargs,
        }

    def _render_messages(
        self, conversation: Conversation, messages: Sequence[Message], *, prompted: bool = False
    ) -> str:
        total = len(conversation.messages)
        context = "" if len(messages) == total else f" with the first {len(messages)} of {total} messages"
        with _convert_template_errors(conversation, context):
            text = _compile_template(self._select_template(conversation)).render(
                messages=list(messages), add_generation_prompt=prompted, **self._build_variables(conversation)
            )
            return _validate_length(conversation, text)

    def _render_marked(
        self, conversation: Conversation, messages: Sequence[Message]
    ) -> tuple[str, list[_Span]]:
        """The rendered text, and what the template marks in it; nothing without messages."""
        if not messages:
            return "", []
        with _convert_template_errors(conversation):
            text, spans = transformers_internals.render_chat_template(
                compiled_template=_compile_template(self._select_template(conversation)),
                messages=list(messages),
                add_generation_prompt=False,
                **self._build_variables(conversation),
            )
        return _validate_length(conversation, text), [(start, end) for start, end in spans if end > start]

    def _convert_to_text_parts(self, conversation: Conversation) -> Conversation:
        """The conversation with lists of parts for texts, if the template would pass over a string."""
        if not self._requires_parts(self._select_template(conversation)):
            return conversation
        messages = tuple(map(_to_text_parts, conversation.messages))
        return replace(conversation, messages=messages)

    def _requires_parts(self, template: str) -> bool:
        """Whether a template, such as that of a model for images, shows a text only in a list of parts."""
        if template not in self._requires_parts_cache:
            message = {"role": "user", "content": _PROBE_TEXT}
            self._requires_parts_cache[template] = not self._is_message_shown(
                template, message
            ) and self._is_message_shown(template, _to_text_parts(message))
        return self._requires_parts_cache[template]

    def _is_message_shown(self, template: str, message: Message) -> bool:
        probe = Conversation((message,), "")
        try:
            return _PROBE_TEXT in _compile_template(template).render(
                messages=[message], add_generation_prompt=False, **self._build_variables(probe)
            )
        except Exception:  # templates are foreign code; what they take is shown by the data
            return False

    def _convert_tool_calls(self, conversation: Conversation) -> Conversation:
        """Convert calls, and the content of a call without words, to the forms that the template writes.

        The content is an empty string. Some templates (DeepSeek R1) write a call only if it is null.
        """
        wordless = [
            "tool_calls" in message and not message["content"].strip() for message in conversation.messages
        ]
        try:
            prepared = self._convert_call_arguments(self._convert_to_text_parts(conversation))
            if any(wordless):
                _check_messages_shown(conversation, self._render_messages(prepared, prepared.messages))
            return prepared
        except RecordError:
            if not any(wordless):
                raise
            messages = tuple(
                {**message, "content": None} if silent else message
                for message, silent in zip(conversation.messages, wordless, strict=True)
            )
            try:
                prepared = self._convert_call_arguments(
                    self._convert_to_text_parts(replace(conversation, messages=messages))
                )
                _check_messages_shown(conversation, self._render_messages(prepared, prepared.messages))
            except RecordError:
                prepared = None
            if prepared is None:
                raise
            return prepared

    def _convert_call_arguments(self, conversation: Conversation) -> Conversation:
        """The conversation with its calls' arguments as a string, if the template cannot take objects.

        Raises:
            UserError: the template fails with both.
        """
        calls = [
            call["function"] for message in conversation.messages for call in message.get("tool_calls", ())
        ]
        if not calls:
            return conversation
        as_text = replace(conversation, messages=tuple(map(_to_text_arguments, conversation.messages)))
        try:
            text = self._render_messages(conversation, conversation.messages)
        except UserError as refusal:
            try:
                conversation, text = as_text, self._render_messages(as_text, as_text.messages)
            except UserError:
                raise refusal from None
        objects = [call["arguments"] for call in calls if isinstance(call["arguments"], dict)]
        if any(arguments and str(arguments) in text for arguments in objects):  # written as Python has it
            conversation = as_text
        return conversation


@contextmanager
def _convert_template_errors(conversation: Conversation, context: str = "") -> Iterator[None]:
    """Name the record with which a template fails, whatever it raises."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise build_template_error(
            conversation, f"the template fails{context} ({_describe_error(error)})"
        ) from error


def _compile_template(text: str) -> Any:
    try:
        return transformers_internals.compile_chat_template(text)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"data.chat_template: it is no valid template ({to_one_line(error)}); correct it"
        ) from error


def _validate_length(conversation: Conversation, text: str) -> str:
    """``text``, if a template may have written so much of a conversation."""
    if len(text) > _UNCHECKED_CHARS and len(text) > _MAX_EXPANSION * (
        num_characters := _count_characters(conversation)
    ):
        raise build_template_error(
            conversation, f"the template writes {len(text):,} characters of {num_characters:,}; use another"
        )
    return replace_surrogates(text)


def _check_messages_shown(conversation: Conversation, text: str) -> None:
    """Refuse a record with a call, or a message such as templates do not expect, that ``text`` lacks."""
    for index, message in enumerate(conversation.messages):
        names = [call["function"]["name"] for call in message.get("tool_calls", ())]
        parts = [(f"the call of {name!r}; use a template that writes calls", name) for name in names]
        if message["role"] in RARE_ROLES or (message["role"] in SYSTEM_ROLES and index):
            description = f"message {index + 1}, from {message['role']}; use one that writes it, or move it"
            parts.append((description, str(message.get("content", "")).strip()))
        for description, content in parts:
            if (
                replace_surrogates(content) not in text
                and json.dumps(content, ensure_ascii=False)[1:-1] not in text
            ):
                raise build_template_error(conversation, f"the template leaves out {description}")


def _select_first_trained_message(conversation: Conversation, begin: int | None, train_on: TrainOn) -> int:
    """The message that a whole text is trained from, if it can be."""
    if begin is None:
        raise RecordError(
            f"data.train_on: {conversation.location}: completion is for records with a prompt and a "
            "completion; use assistant or last_assistant"
        )
    if any(map(is_excluded_from_training, conversation.messages[begin:])):
        raise RecordError(
            f"data.train_on: {conversation.location}: a message is context only, but {train_on} trains "
            "whole texts; use assistant"
        )
    return begin


def build_template_error(conversation: Conversation, reason: str) -> RecordError:
    """Build the error for a record that a template cannot write."""
    return RecordError(f"data.chat_template: {conversation.location}: {reason}")


def build_answer_not_found_error(conversation: Conversation, index: int) -> AnswerNotFoundError:
    """The error for an answer whose tokens cannot be told in the whole."""
    role = conversation.messages[index]["role"]
    subject = "an answer" if role == "assistant" else f"from {role}"
    reason = f"where message {index + 1}, {subject}, begins and ends cannot be told from the text"
    remedy = "use one that marks answers with {% generation %}"
    if role != "assistant":
        remedy = f"use another, or leave {role} out of data.roles_to_train"
    elif not index:
        reason = "the assistant speaks first, where the template does not write what precedes other answers"
        remedy += ", or let a user speak first"
    return AnswerNotFoundError(f"data.chat_template: {conversation.location}: {reason}; {remedy}")


def _count_characters(conversation: Conversation) -> int:
    """How many characters a record has, at the least."""
    return len(str(conversation.messages)) + len(str(conversation.tools))


def _measure_prefix(text: str, part: str) -> int | str:
    """How much of ``text`` is ``part``, or ``part`` where it is not the beginning."""
    return len(part) if text.startswith(part) else part


def _extract_reasoning(message: Message) -> str:
    """What is thought before an answer; empty if it has no reasoning."""
    inline = str(message.get("content", "")).rpartition("</think>")[0].rpartition("<think>")[2]
    return str(message.get("reasoning_content") or inline).strip()


def strip_reasoning(message: Message) -> str:
    """Return the text of a message, without the reasoning in its text and without blanks around it."""
    content = str(message.get("content", ""))
    return replace_surrogates(
        content[max((match.end() for match in _THOUGHT_END.finditer(content)), default=0) :].strip()
    )


def check_answer_words(
    conversation: Conversation, answer_words: Sequence[AnswerWords], trained_text: str
) -> None:
    """Refuse a record if the trained text lacks the words or a call of an answer.

    Blanks and letter case may differ, because templates trim lines and may change case.

    Args:
        conversation: Record, used in the error message.
        answer_words: Message number and own words of each answer, in the order of the text.
        trained_text: Trained text.

    Raises:
        RecordError: naming the message.
    """
    names = Counter(
        call["function"]["name"]
        for number, _ in answer_words
        for call in conversation.messages[number].get("tool_calls", ())
    )
    for name, calls in names.items():
        spoken = sum(
            answer_text.count(replace_surrogates(name))
            for _, answer_text in answer_words
            if answer_text in trained_text
        )
        if trained_text.count(replace_surrogates(name)) < calls + spoken:
            raise build_template_error(
                conversation,
                f"the template leaves out the call of {name!r}; use a template that writes calls",
            )
    place = 0
    for _, answer_text in answer_words:
        place = trained_text.find(answer_text, place)
        if place < 0:
            break
        place += len(answer_text)
    else:
        return
    trained_text, place = _normalize_text(trained_text), 0
    for number, answer_text in answer_words:
        forms = [
            _normalize_text(answer_text),
            _normalize_text(json.dumps(answer_text, ensure_ascii=False)[1:-1]),
        ]
        places = [
            (trained_text.find(form, place), len(form))
            for form in forms
            if trained_text.find(form, place) >= 0
        ]
        if not places:
            keys = ", ".join(conversation.messages[number])
            raise build_template_error(
                conversation,
                f"the template leaves out the words of message {number + 1}, an answer, whose keys are "
                f"{keys}; use a template that writes them, or remove the key that is written instead",
            )
        place = sum(min(places))


def _normalize_text(text: str) -> str:
    return "".join(text.split()).casefold()


def _to_text_parts(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def _to_text_arguments(message: Message) -> Message:
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}


def _describe_error(error: BaseException) -> str:
    text = to_one_line(error) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."
