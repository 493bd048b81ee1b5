"""Rendering of conversations with a template, and the positions of the answers in the text.

A template is untrusted code that runs in Jinja's sandbox. The functions of this module run within limits of
time and memory. See :mod:`portable.data.tokens.limited_calls`.
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
    get_message_text,
    is_excluded_from_training,
    replace_surrogates,
)
from portable.errors import UserError, to_one_line
from portable.private import transformers_internals

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from portable.data.sources.documents import Document, Message

TrainOn = Literal["assistant", "completion", "last_assistant", "all"]
"""Values of ``data.train_on``."""
TEMPLATE_DATE = "2025-01-01"
"""Date for templates that write the current date, so that the tokens do not depend on the day."""
_PROBE_TEXT = "What is shown of this?"
_THOUGHT_END = re.compile(r"</[\w:]*think[\w:]*>|\[/THINK\]", re.IGNORECASE)
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MAX_RENDERED_CHARS = 1 << 30  # characters of all prefixes of one conversation
_UNCHECKED_CHARS, _MAX_EXPANSION = (
    1 << 20,
    64,
)  # limits: characters, and multiple of a record's characters
_Span = tuple[int, int]


class AnswerContext(NamedTuple):
    """Rendered conversation before an answer.

    Attributes:
        prompted: The conversation with the generation prompt.
        unprompted: The conversation without the generation prompt. None if it cannot be determined.
    """

    prompted: str
    unprompted: str | None


class AnswerWords(NamedTuple):
    """Index of a message, and its text without reasoning."""

    message_index: int
    text: str


@dataclass(frozen=True)
class RenderedConversation:
    """Text of a conversation before it is tokenized, with the positions of trained parts.

    Attributes:
        text: Rendered text.
        conversation: The conversation. None if the text is a plain completion.
        trained_spans: Start and end in characters of each trained part.
        searched_answers: Indices of messages whose positions follow from prefixes of the text.
        answer_starts: Start of each of these messages in characters. If the text does not begin with the
            rendered conversation before the message, this rendered conversation instead.
        answer_ends: End of each of these messages in characters, or the rendered conversation up to and
            including the message.
        trains_all: Whether all tokens contribute to the loss.
        prefix: Special tokens before the text, which are not trained unless ``trains_all`` is set.
        suffix: Special tokens after the text, which are trained.
        reasoning_shown: Whether the text contains the reasoning, for each trained answer with reasoning.
        separable_answers: Indices of the answers that contribute to the loss. Empty if they may not become
            separate samples.
        answer_words: Text of each trained answer. The trained text must contain it.
        num_empty_answers: Number of answers that contribute to the loss but have no words, calls or
            reasoning.
        image_spans: Start and end of the text of each image, in characters.
    """

    text: str
    conversation: Conversation | None
    trained_spans: tuple[_Span, ...] = ()
    searched_answers: tuple[int, ...] = ()
    answer_starts: tuple[int | AnswerContext, ...] = ()
    answer_ends: tuple[int | str, ...] = ()
    trains_all: bool = False
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    reasoning_shown: tuple[bool, ...] = ()
    separable_answers: tuple[int, ...] = ()
    answer_words: tuple[AnswerWords, ...] = ()
    num_empty_answers: int = 0
    image_spans: tuple[_Span, ...] = ()


class AnswerNotFoundError(RecordError):
    """Error for an answer whose tokens cannot be found in the complete text."""


def build_no_template_error() -> UserError:
    """Build the error for a tokenizer without a template."""
    return UserError(
        "data.chat_template: the tokenizer has no template; set data.chat_template to a file with a "
        "template, or to chatml if the tokenizer has its tokens (<|im_start|> <|im_end|>)"
    )


@dataclass(frozen=True)
class TemplateRenderer:
    """Renders conversations and determines the positions of trained parts. It can be pickled.

    Attributes:
        templates: Text of a template, or texts keyed by name. None if only completions of plain text are
            rendered.
        variables: Variables of the templates.
        train_on: Tokens to train, ``data.train_on``. None for the completion of a record with a prompt, and
            the assistant's messages of other records.
        split_turns: Whether each answer becomes a separate sample, with the messages before it.
        prefix: Special tokens before a completion of plain text.
        suffix: Special tokens after a completion of plain text.
        end_text: Text of the tokenizer's end token.
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
            collect: Whether to return the error of a record instead of raising it.

        Returns:
            Rendered samples of each document, or its error.

        Raises:
            RecordError: If the template fails for a record. The error names the record.
        """
        drafts: list[list[RenderedConversation] | RecordError] = []
        for document in documents:
            try:
                drafts.append(self._render_document(document))
            except RecordError as error:
                # If a template exceeds a limit for one record, no time is left for other records.
                if not collect or isinstance(error.__cause__, TimeoutError | MemoryError):
                    raise
                drafts.append(RecordError(str(error)))
        return drafts

    def render_question(self, text: str, location: str) -> str:
        """Render a single user message, followed by the generation prompt.

        Args:
            text: Content of the message.
            location: Name of the conversation in error messages.
        """
        return self.render_prompt([{"role": "user", "content": text}], location)

    def render_prompt(self, messages: Sequence[Message], location: str) -> str:
        """Render a conversation, followed by the generation prompt.

        Args:
            messages: Messages of the conversation.
            location: Name of the conversation in error messages.
        """
        conversation = self._convert_to_text_parts(Conversation(tuple(messages), location))
        return self._render_messages(conversation, conversation.messages, prompted=True)

    def _render_document(self, document: Document) -> list[RenderedConversation]:
        """Render the samples of one document: a completion, a conversation, or one sample per answer.

        A conversation has one sample per answer if ``split_turns`` is set.
        """
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
        """Render one sample per answer, with the messages before it.

        Args:
            conversation: The conversation.
            answers: Indices of the answers.
        """
        without_prompt = replace(conversation, num_prompt_messages=None)
        parts = (replace(without_prompt, messages=without_prompt.messages[: index + 1]) for index in answers)
        return [self._build_draft(part, "last_assistant", is_single_turn=True) for part in parts]

    def _build_completion_draft(self, text: str, prompt: int) -> RenderedConversation:
        """Build the sample of a prompt and its completion without a template.

        The end token is added after the text.

        Args:
            text: Prompt and completion.
            prompt: Number of characters of the prompt.
        """
        trains_prompt = self.train_on == "all"
        suffix = () if text.endswith(self.end_text) else self.suffix
        return RenderedConversation(
            text, None, ((prompt, len(text)),), trains_all=trains_prompt, prefix=self.prefix, suffix=suffix
        )

    def _build_draft(
        self, conversation: Conversation, train_on: TrainOn | None, *, is_single_turn: bool = False
    ) -> RenderedConversation:
        """Render a conversation and determine the positions of its answers.

        Args:
            conversation: The conversation.
            train_on: Tokens to train. None for the default, see the class.
            is_single_turn: Whether the conversation is already a part of a record, and must not be split
                again.

        Raises:
            RecordError: If the template drops a part of the conversation, or if no token contributes to the
                loss.
        """
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
                f"data.source: {conversation.location}: {conversation.trained_roles_text} has no text; "
                "remove the record"
            )
        turns = () if is_single_turn else answers
        if marked:  # only the assistant's messages are marked; messages of other roles are found by prefixes
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
        """Build the sample of a text whose tokens contribute to the loss from message ``begin`` to its end.

        If ``train_on`` is ``all``, all tokens contribute.
        """
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
        """Return the start of an answer in characters, or its context if the text begins differently."""
        prefix = _measure_prefix(text, opened)
        if isinstance(prefix, int):
            return prefix
        try:
            return AnswerContext(prefix, self._render_before_answer(conversation, text, index))
        except AnswerNotFoundError:  # only matters if the start is searched in the tokens
            return AnswerContext(prefix, None)

    def _render_before_answer(
        self, conversation: Conversation, text: str, index: int, *, prompted: bool = False
    ) -> str:
        """Render the conversation before a message as it appears in ``text``.

        Templates do not support an empty conversation. For example, they may write a system prompt only with
        the first message. If the assistant speaks first, the generation prompt, or the part of it in
        ``text``, therefore determines the start of the answer. For a message from another role, a known text
        is rendered instead of the message, and its position is the start.

        Args:
            conversation: The conversation.
            text: Its rendered text.
            index: Index of the message.
            prompted: Whether to add the generation prompt.

        Raises:
            AnswerNotFoundError: If the start cannot be determined.
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
        """Return the source of the template for a conversation. Raises UserError if there is no template.

        If there are several templates, ``tool_use`` is the template of conversations with tools.
        """
        if isinstance(self.templates, str):
            return self.templates
        if self.templates is None:
            raise build_no_template_error()
        name = "tool_use" if conversation.tools and "tool_use" in self.templates else "default"
        return self.templates[name]

    def _build_variables(self, conversation: Conversation) -> dict[str, Any]:
        """Build the variables of the template, with a fixed date."""
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
        """Render some messages of a conversation.

        Args:
            conversation: The conversation, with the tools and variables.
            messages: Messages to render.
            prompted: Whether to add the generation prompt.
        """
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
        """Render messages, and return the text with the spans that ``{% generation %}`` marks.

        Empty without messages.
        """
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
        """Convert texts to lists of parts if the template would ignore a string."""
        if not self._requires_parts(self._select_template(conversation)):
            return conversation
        messages = tuple(map(_to_text_parts, conversation.messages))
        return replace(conversation, messages=messages)

    def _requires_parts(self, template: str) -> bool:
        """Return whether a template writes text only from a list of parts, like templates of image models."""
        if template not in self._requires_parts_cache:
            message = {"role": "user", "content": _PROBE_TEXT}
            self._requires_parts_cache[template] = not self._is_message_shown(
                template, message
            ) and self._is_message_shown(template, _to_text_parts(message))
        return self._requires_parts_cache[template]

    def _is_message_shown(self, template: str, message: Message) -> bool:
        """Return whether a template writes the probe text of a message."""
        probe = Conversation((message,), "")
        try:
            return _PROBE_TEXT in _compile_template(template).render(
                messages=[message], add_generation_prompt=False, **self._build_variables(probe)
            )
        except Exception:  # a template may reject the probe; real data shows whether it works
            return False

    def _convert_tool_calls(self, conversation: Conversation) -> Conversation:
        """Convert tool calls, and the content of calls without words, to the forms that the template writes.

        This content is an empty string at first. Some templates, such as DeepSeek R1's, write a call only if
        the content is null.
        """
        wordless = [
            "tool_calls" in message and not get_message_text(message).strip()
            for message in conversation.messages
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
        """Convert the arguments of calls to strings if the template does not support objects.

        Raises:
            UserError: If the template fails with both.
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
        # The template has written Python's representation of a dict.
        if any(arguments and str(arguments) in text for arguments in objects):
            conversation = as_text
        return conversation


@contextmanager
def _convert_template_errors(conversation: Conversation, context: str = "") -> Iterator[None]:
    """Convert all errors of a template within this context to an error that names the record."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise build_template_error(
            conversation, f"the template fails{context} ({_describe_error(error)})"
        ) from error


def _compile_template(text: str) -> Any:
    """Compile a template.

    Raises:
        UserError: If the template is not valid.
    """
    try:
        return transformers_internals.compile_chat_template(text)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"data.chat_template: not a valid template ({to_one_line(error)}); correct it"
        ) from error


def _validate_length(conversation: Conversation, text: str) -> str:
    """Check that a text is not far longer than its conversation, and remove lone surrogates.

    Returns:
        The text.

    Raises:
        RecordError: If the text is too long.
    """
    if len(text) > _UNCHECKED_CHARS and len(text) > _MAX_EXPANSION * (
        num_characters := _count_characters(conversation)
    ):
        raise build_template_error(
            conversation, f"the template writes {len(text):,} characters of {num_characters:,}; use another"
        )
    return replace_surrogates(text)


def _check_messages_shown(conversation: Conversation, text: str) -> None:
    """Check that a text contains all messages that templates often drop.

    These are tool calls, messages with rare roles, and system messages after the first message.

    Raises:
        RecordError: If the template leaves one of them out.
    """
    for index, message in enumerate(conversation.messages):
        names = [call["function"]["name"] for call in message.get("tool_calls", ())]
        parts = [(f"the call of {name!r}; use a template that writes calls", name) for name in names]
        if message["role"] in RARE_ROLES or (message["role"] in SYSTEM_ROLES and index):
            description = (
                f"message {index + 1}, from {message['role']}; use a template that writes it, or move the "
                "message"
            )
            parts.append((description, get_message_text(message).strip()))
        for description, content in parts:
            if (
                replace_surrogates(content) not in text
                and json.dumps(content, ensure_ascii=False)[1:-1] not in text
            ):
                raise build_template_error(conversation, f"the template leaves out {description}")


def _select_first_trained_message(conversation: Conversation, begin: int | None, train_on: TrainOn) -> int:
    """Return the index of the first message that contributes to the loss if the text is used completely.

    Raises:
        RecordError: If the record has no prompt, or a later message is excluded from training.
    """
    if begin is None:
        raise RecordError(
            f"data.train_on: {conversation.location}: completion is for records with a prompt and a "
            "completion; use assistant or last_assistant"
        )
    if any(map(is_excluded_from_training, conversation.messages[begin:])):
        raise RecordError(
            f"data.train_on: {conversation.location}: a message is context only, but {train_on} trains "
            "complete texts; use assistant"
        )
    return begin


def build_template_error(conversation: Conversation, reason: str) -> RecordError:
    """Build the error for a record that a template cannot write."""
    return RecordError(f"data.chat_template: {conversation.location}: {reason}")


def build_answer_not_found_error(conversation: Conversation, index: int) -> AnswerNotFoundError:
    """Build the error for an answer whose tokens cannot be found in the complete text."""
    role = conversation.messages[index]["role"]
    subject = "an answer" if role == "assistant" else f"from {role}"
    reason = f"the beginning and the end of message {index + 1}, {subject}, cannot be found in the text"
    remedy = "use a template that marks answers with {% generation %}"
    if role != "assistant":
        remedy = f"use another template, or leave {role} out of data.roles_to_train"
    elif not index:
        reason = (
            "the assistant speaks first, and the template does not write there the text that precedes other "
            "answers"
        )
        remedy += ", or let a user speak first"
    return AnswerNotFoundError(f"data.chat_template: {conversation.location}: {reason}; {remedy}")


def _count_characters(conversation: Conversation) -> int:
    """Return a lower bound for the number of characters of a record."""
    return len(str(conversation.messages)) + len(str(conversation.tools))


def _measure_prefix(text: str, part: str) -> int | str:
    """Return the length of ``part`` if ``text`` begins with it, otherwise ``part`` itself."""
    return len(part) if text.startswith(part) else part


def _extract_reasoning(message: Message) -> str:
    """Return the reasoning before an answer. Empty if there is none."""
    inline = get_message_text(message).rpartition("</think>")[0].rpartition("<think>")[2]
    return str(message.get("reasoning_content") or inline).strip()


def strip_reasoning(message: Message) -> str:
    """Return the content of a message without reasoning and without whitespace around it."""
    content = get_message_text(message)
    return replace_surrogates(
        content[max((match.end() for match in _THOUGHT_END.finditer(content)), default=0) :].strip()
    )


def check_answer_words(
    conversation: Conversation, answer_words: Sequence[AnswerWords], trained_text: str
) -> None:
    """Check that the trained text contains the words and calls of all answers.

    Whitespace and letter case are ignored, because templates strip lines and may change the case.

    Args:
        conversation: The conversation, used in the error message.
        answer_words: Text of each answer, in the order of the conversation.
        trained_text: Trained parts of the rendered text.

    Raises:
        RecordError: If the words or the call of an answer are missing. The error names the message.
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
    """Remove whitespace and letter case."""
    return "".join(text.split()).casefold()


def _to_text_parts(message: Message) -> Message:
    """Replace the content of a message, if it is a string, by a list with one part."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def _to_text_arguments(message: Message) -> Message:
    """Return a message whose tool call arguments are JSON strings. Without tool calls, the message itself."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}


def _describe_error(error: BaseException) -> str:
    """Describe an error in at most 200 characters."""
    text = to_one_line(error) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."
