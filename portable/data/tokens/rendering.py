"""Render conversations with a chat template, and find the answers in the rendered text.

A template is untrusted code that runs in Jinja's sandbox. Therefore, the functions of this module
must be called with time and memory limits. See :mod:`portable.data.tokens.limited_calls`.
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
"""Values of ``data.train_on``, which select the parts of a conversation that contribute to the loss."""
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
    """Rendered messages before an answer, used to find the first token of the answer.

    Attributes:
        prompted: Rendered messages, followed by the generation prompt.
        unprompted: Rendered messages without the generation prompt. None if they cannot be determined.
    """

    prompted: str
    unprompted: str | None


class AnswerWords(NamedTuple):
    """Words of an answer, which the rendered text must contain.

    Attributes:
        message_index: Index of the message in the conversation.
        text: Content of the message without reasoning. May be empty if the message has tool calls.
    """

    message_index: int
    text: str


@dataclass(frozen=True)
class RenderedConversation:
    """Text of a sample before tokenization, with the positions of the parts that contribute to the loss.

    Attributes:
        text: Rendered text.
        conversation: The conversation. None if the text is a plain completion.
        trained_spans: Start and end, in characters, of each part that contributes to the loss and whose
            position is known.
        searched_answers: Indices of the answers that the template does not mark. They are located by
            comparing the text with rendered prefixes of the conversation.
        answer_starts: Start of each of ``searched_answers``, in characters. If the text does not begin
            with the rendered messages before the answer, an :class:`AnswerContext` instead.
        answer_ends: End of each of ``searched_answers``, in characters. If the text does not begin with
            the rendered messages up to and including the answer, these messages instead.
        trains_all: Whether all tokens contribute to the loss.
        prefix: Special tokens before the text. They contribute to the loss only if ``trains_all`` is
            set.
        suffix: Special tokens after the text. They contribute to the loss.
        reasoning_shown: For each trained answer with reasoning, whether the text contains it.
        separable_answers: Indices of the answers that contribute to the loss. Empty if they must not
            become separate samples.
        answer_words: Words of each trained answer. The parts that contribute to the loss must contain
            them.
        num_empty_answers: Number of trained answers without words, calls and reasoning.
        image_spans: Start and end of each image's text, in characters.
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
    """Raised if the tokens of an answer cannot be found in the tokens of the complete conversation."""


def build_no_template_error() -> UserError:
    """Build the error for a tokenizer without a chat template."""
    return UserError(
        "data.chat_template: the tokenizer has no template; set data.chat_template to a file with a "
        "template, or to chatml if the tokenizer has its tokens (<|im_start|> <|im_end|>)"
    )


@dataclass(frozen=True)
class TemplateRenderer:
    """Picklable renderer for conversations, which also determines the parts that contribute to the loss.

    Attributes:
        templates: Text of a template, or texts keyed by name. None if only plain-text completions are
            rendered.
        variables: Variables for the templates.
        train_on: Value of ``data.train_on``, which selects the tokens that contribute to the loss. None
            selects the completion if a record has a prompt, and otherwise the assistant's messages.
        split_turns: Whether each answer becomes a separate sample, with the messages before it.
        prefix: Special tokens before a plain-text completion.
        suffix: Special tokens after a plain-text completion.
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
        """Render conversations or completions.

        Args:
            documents: Conversations or completions.
            collect: Whether to return the error of a record instead of raising it.

        Returns:
            The rendered samples, or the error, of each document.

        Raises:
            RecordError: If the template fails for a record and ``collect`` is False, or if it exceeds the
                time or memory limit. The message contains the location of the record.
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
            location: Name of the conversation, used in error messages.
        """
        return self.render_prompt([{"role": "user", "content": text}], location)

    def render_prompt(self, messages: Sequence[Message], location: str) -> str:
        """Render a conversation, followed by the generation prompt.

        Args:
            messages: Messages of the conversation.
            location: Name of the conversation, used in error messages.
        """
        conversation = self._convert_to_text_parts(Conversation(tuple(messages), location))
        return self._render_messages(conversation, conversation.messages, prompted=True)

    def _render_document(self, document: Document) -> list[RenderedConversation]:
        """Render the samples of a document.

        Returns:
            One sample, or one per answer of a conversation if ``split_turns`` is set.
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
        """Render one sample per answer. It contains the messages up to and including the answer.

        Args:
            conversation: The conversation.
            answers: Indices of the answers.
        """
        without_prompt = replace(conversation, num_prompt_messages=None)
        parts = (replace(without_prompt, messages=without_prompt.messages[: index + 1]) for index in answers)
        return [self._build_draft(part, "last_assistant", is_single_turn=True) for part in parts]

    def _build_completion_draft(self, text: str, prompt: int) -> RenderedConversation:
        """Build the sample for a prompt and its completion, without a template.

        The end token is appended, unless the text already ends with it.

        Args:
            text: Prompt and completion, concatenated.
            prompt: Number of characters in the prompt.
        """
        trains_prompt = self.train_on == "all"
        suffix = () if text.endswith(self.end_text) else self.suffix
        return RenderedConversation(
            text, None, ((prompt, len(text)),), trains_all=trains_prompt, prefix=self.prefix, suffix=suffix
        )

    def _build_draft(
        self, conversation: Conversation, train_on: TrainOn | None, *, is_single_turn: bool = False
    ) -> RenderedConversation:
        """Render a conversation, and determine the positions of its answers.

        Args:
            conversation: The conversation.
            train_on: Tokens that contribute to the loss. None selects the default described in the class
                docstring.
            is_single_turn: Whether the conversation is already the sample of a single answer. If so, it
                must not be split again.

        Raises:
            RecordError: If the template fails or drops part of the conversation, or if no message
                contributes to the loss.
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
                raise build_template_error(
                    conversation, ("{% generation %} marks no text of the record; correct the template")
                )
            answers = tuple(index for index in answers if index not in marked_answers)
        if 2 * len(answers) * len(text) > _MAX_RENDERED_CHARS:
            raise build_template_error(
                conversation,
                f"the record has {len(answers):,} answers in {len(text):,} characters, which are too many to "
                "locate with this chat template; split the record into shorter records, or use a chat "
                "template with {% generation %}",
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
        """Build a sample in which all tokens from a given message to the end contribute to the loss.

        Args:
            conversation: The conversation.
            text: Rendered conversation.
            begin: Index of the first message that contributes to the loss. None if the record has no marked
                prompt.
            train_on: ``completion``, or ``all`` if the tokens before ``begin`` contribute as well.
            shown: For each trained answer with reasoning, whether the text contains it.

        Raises:
            RecordError: If ``begin`` is None, or if a later message is excluded from the loss.
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
        """Find the start of an answer in a rendered conversation.

        Args:
            conversation: The conversation.
            text: Rendered conversation.
            index: Index of the answer.
            opened: Rendered messages before the answer, with the generation prompt.

        Returns:
            The start in characters if the text begins with ``opened``. Otherwise, the rendered messages
            before the answer, which are used later to find the start in the tokens.
        """
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
        """Render the messages before a message as they appear in ``text``.

        There are two special cases. A message that is not from the assistant begins with a header instead
        of the generation prompt. To find the end of this header, the message is rendered with a known text
        as its content, and the result ends before this text. If the first message is from the assistant,
        there are no messages to render, and templates do not support an empty conversation. The generation
        prompt is then located in ``text``, and the result ends before or after it.

        Args:
            conversation: The conversation.
            text: Rendered conversation.
            index: Index of the message.
            prompted: Whether to add the generation prompt.

        Raises:
            AnswerNotFoundError: If the start of the message cannot be determined.
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
        """Return the text of the template for a conversation.

        If there are several templates, conversations with tools use ``tool_use``, and others use
        ``default``.

        Raises:
            UserError: If there is no template.
        """
        if isinstance(self.templates, str):
            return self.templates
        if self.templates is None:
            raise build_no_template_error()
        name = "tool_use" if conversation.tools and "tool_use" in self.templates else "default"
        return self.templates[name]

    def _build_variables(self, conversation: Conversation) -> dict[str, Any]:
        """Build the variables for the template. The current date is fixed to :data:`TEMPLATE_DATE`.

        The user or the record can set another date with the variable ``strftime_now``.
        """
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
            conversation: Conversation that provides the tools and variables.
            messages: Messages to render.
            prompted: Whether to add the generation prompt.

        Raises:
            RecordError: If the template fails, or if the text is excessively longer than the conversation.
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
        """Render messages with a template that marks the answers with ``{% generation %}``.

        Returns:
            The text, and the start and end of each nonempty marked span in characters. Both are empty if
            there are no messages.

        Raises:
            RecordError: If the template fails, or if the text is excessively longer than the conversation.
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
        """Convert message contents from strings to lists of parts if the template ignores strings."""
        if not self._requires_parts(self._select_template(conversation)):
            return conversation
        messages = tuple(map(_to_text_parts, conversation.messages))
        return replace(conversation, messages=messages)

    def _requires_parts(self, template: str) -> bool:
        """Return whether a template writes text only if the content of a message is a list of parts.

        Templates of image models often do. The result is cached, because it takes two renderings.
        """
        if template not in self._requires_parts_cache:
            message = {"role": "user", "content": _PROBE_TEXT}
            self._requires_parts_cache[template] = not self._is_message_shown(
                template, message
            ) and self._is_message_shown(template, _to_text_parts(message))
        return self._requires_parts_cache[template]

    def _is_message_shown(self, template: str, message: Message) -> bool:
        """Return whether a template writes the content of ``message``, which is ``_PROBE_TEXT``.

        Returns False if the template fails.
        """
        probe = Conversation((message,), "")
        try:
            return _PROBE_TEXT in _compile_template(template).render(
                messages=[message], add_generation_prompt=False, **self._build_variables(probe)
            )
        except Exception:  # a template may reject the probe; real data shows whether it works
            return False

    def _convert_tool_calls(self, conversation: Conversation) -> Conversation:
        """Convert messages with tool calls to a format that the template supports.

        By default, the content of a message with tool calls but no words is an empty string. Some
        templates, such as DeepSeek R1's, write the calls only if the content is null, so null is tried if
        the template fails or drops a call.

        Raises:
            RecordError: If the template writes the calls in neither format.
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
        """Convert the arguments of tool calls to JSON strings if the template does not support objects.

        This is the case if the template fails for objects, or if it writes them as Python dicts.

        Raises:
            UserError: If the template fails for both objects and strings.
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
    """Convert all exceptions of a template within this context to RecordErrors with the record's location.

    Args:
        conversation: Conversation of the record.
        context: Description of the rendered messages, to insert into the error message.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise build_template_error(
            conversation,
            (f"the template fails{context} ({_describe_error(error)}); correct the template or the record"),
        ) from error


def _compile_template(text: str) -> Any:
    """Compile the text of a template to a Jinja template.

    Raises:
        UserError: If the text is not a valid template.
    """
    try:
        return transformers_internals.compile_chat_template(text)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"data.chat_template: is not a valid template ({to_one_line(error)}); correct the template"
        ) from error


def _validate_length(conversation: Conversation, text: str) -> str:
    """Check that a rendered text is not excessively longer than its conversation.

    Otherwise, a malicious template could make the run tokenize gigabytes of text.

    Returns:
        The text, with lone surrogates replaced by ``?``.

    Raises:
        RecordError: If the text is too long.
    """
    if len(text) > _UNCHECKED_CHARS and len(text) > _MAX_EXPANSION * (
        num_characters := _count_characters(conversation)
    ):
        raise build_template_error(
            conversation,
            f"the template renders {len(text):,} characters for a record of {num_characters:,}; use "
            "another template",
        )
    return replace_surrogates(text)


def _check_messages_shown(conversation: Conversation, text: str) -> None:
    """Check that a rendered text contains the parts of the conversation that templates often drop.

    These are tool calls, messages with rare roles, and system messages after the first message.

    Raises:
        RecordError: If one of these parts is missing.
    """
    for index, message in enumerate(conversation.messages):
        names = [call["function"]["name"] for call in message.get("tool_calls", ())]
        parts = [(f"the call of {name!r}; use a template that renders tool calls", name) for name in names]
        if message["role"] in RARE_ROLES or (message["role"] in SYSTEM_ROLES and index):
            description = (
                f"message {index + 1}, which has role {message['role']}; use a template that renders the "
                "message, or move the message"
            )
            parts.append((description, get_message_text(message).strip()))
        for description, content in parts:
            if (
                replace_surrogates(content) not in text
                and json.dumps(content, ensure_ascii=False)[1:-1] not in text
            ):
                raise build_template_error(conversation, f"the template leaves out {description}")


def _select_first_trained_message(conversation: Conversation, begin: int | None, train_on: TrainOn) -> int:
    """Return ``begin``, after checking that this message and all later ones can contribute to the loss.

    Args:
        conversation: The conversation.
        begin: Index of the first message that contributes to the loss. None if the record has no
            prompt.
        train_on: ``completion`` or ``all``, used in the error message.

    Raises:
        RecordError: If ``begin`` is None, or if a message at or after it is excluded from the loss.
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
    """Build the error for a record that the template cannot render, from its location and the reason."""
    return RecordError(f"data.chat_template: {conversation.location}: {reason}")


def build_answer_not_found_error(conversation: Conversation, index: int) -> AnswerNotFoundError:
    """Build the error for an answer (message ``index``) that cannot be found in the complete conversation."""
    role = conversation.messages[index]["role"]
    subject = "an answer" if role == "assistant" else f"from {role}"
    reason = f"the beginning and the end of message {index + 1}, {subject}, cannot be found in the text"
    remedy = "use a template that marks answers with {% generation %}"
    if role != "assistant":
        remedy = f"use another template, or leave {role} out of data.roles_to_train"
    elif not index:
        reason = (
            "the first message is from the assistant, and the template does not render the text before it "
            "that precedes other answers"
        )
        remedy += ", or begin the conversation with a user message"
    return AnswerNotFoundError(f"data.chat_template: {conversation.location}: {reason}; {remedy}")


def _count_characters(conversation: Conversation) -> int:
    """Return the approximate number of characters in a conversation, to compare with its rendered text."""
    return len(str(conversation.messages)) + len(str(conversation.tools))


def _measure_prefix(text: str, part: str) -> int | str:
    """Return the length of ``part`` if ``text`` begins with it, otherwise ``part`` itself."""
    return len(part) if text.startswith(part) else part


def _extract_reasoning(message: Message) -> str:
    """Return the reasoning of a message, without surrounding whitespace. Empty if there is none.

    The reasoning is in ``reasoning_content``, or in the content between ``<think>`` and ``</think>``.
    """
    inline = get_message_text(message).rpartition("</think>")[0].rpartition("<think>")[2]
    return str(message.get("reasoning_content") or inline).strip()


def strip_reasoning(message: Message) -> str:
    """Return the content of a message without leading reasoning and surrounding whitespace."""
    content = get_message_text(message)
    return replace_surrogates(
        content[max((match.end() for match in _THOUGHT_END.finditer(content)), default=0) :].strip()
    )


def check_answer_words(
    conversation: Conversation, answer_words: Sequence[AnswerWords], trained_text: str
) -> None:
    """Check that the trained text contains the words and tool calls of all answers.

    Ignores whitespace and the case of words, because templates strip lines and may change the case.

    Args:
        conversation: The conversation, used in the error message.
        answer_words: Words of each answer, in the order of the conversation.
        trained_text: Parts of the rendered text that contribute to the loss.

    Raises:
        RecordError: If the words or a tool call of an answer are missing. The error names the message.
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
                f"the template leaves out the call of {name!r}; use a template that renders tool calls",
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
                f"the template leaves out the text of message {number + 1}, an answer with the keys "
                f"{keys}; use a template that renders this text, or remove the key that is rendered instead",
            )
        place = sum(min(places))


def _normalize_text(text: str) -> str:
    """Remove all whitespace and convert to lower case, for comparisons."""
    return "".join(text.split()).casefold()


def _to_text_parts(message: Message) -> Message:
    """Return a message with its string content converted to a list with one text part.

    Returns the message itself if the content is not a string.
    """
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def _to_text_arguments(message: Message) -> Message:
    """Return a message with the arguments of its tool calls converted from objects to JSON strings.

    Returns the message itself if it has no tool calls.
    """
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}


def _describe_error(error: BaseException) -> str:
    """Describe an exception in one line of at most 200 characters."""
    text = to_one_line(error) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."
