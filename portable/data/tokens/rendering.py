"""Render conversations with a chat template, and locate the answers in the rendered text.

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
_MAX_RENDERED_CHARS = 1 << 30  # maximum total length of the prefixes rendered for one conversation
_UNCHECKED_CHARS, _MAX_EXPANSION = (
    1 << 20,
    64,
)  # a rendered text is rejected if it exceeds both this size and this multiple of the record's size
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
    """Expected text of an answer.

    :func:`check_answer_words` searches for the text in the parts of the rendered conversation that
    contribute to the loss, to check that the chat template has not dropped any part of the answer.

    Attributes:
        message_index: Index of the message in the conversation.
        text: Content of the message without reasoning. May be empty if the message has tool calls.
    """

    message_index: int
    text: str


@dataclass(frozen=True)
class RenderedConversation:
    """Rendered text of a sample, with the positions of the parts that contribute to the loss.

    Some templates mark the answers, so their character ranges are known (``trained_spans``). All
    other answers (``searched_answers``) are located by comparing the text with rendered prefixes of
    the conversation. If the characters do not match, the tokens are compared after tokenization.

    Attributes:
        text: Rendered text.
        conversation: The conversation. None if the text is a plain completion.
        trained_spans: Start and end character of each part that contributes to the loss and whose
            position is already known.
        searched_answers: Message indices of the answers that the template does not mark. If only
            the completion of a conversation contributes to the loss, this is the index of the first
            message of the completion, and the entire completion counts as one answer.
        answer_starts: Start of each answer in ``searched_answers``. This is a character position if
            the text begins with the rendered messages before the answer. Otherwise, it is an
            :class:`AnswerContext`, which is used to find the start after tokenization.
        answer_ends: End of each answer in ``searched_answers``. This is a character position if the
            text begins with the rendered messages up to and including the answer. Otherwise, it is
            the rendered text of these messages, which is used to find the end after tokenization.
        trains_all: Whether all tokens except image tokens contribute to the loss.
        prefix: Special tokens before the text. They contribute to the loss only if ``trains_all``
            is set. Empty for conversations, because the template writes their special tokens.
        suffix: Special tokens after the text. They contribute to the loss. Empty for conversations.
        reasoning_shown: For each trained answer with reasoning, whether the text contains the
            reasoning.
        separable_answers: Message indices of the answers that contribute to the loss. If one of the
            answers cannot be located, or if the template drops the reasoning of some answers but
            not of others, the conversation is split into one sample per answer. Empty if the sample
            must not be split.
        answer_words: Expected text of each trained answer that has text or tool calls. It is used
            to check that the parts that contribute to the loss contain the answers.
        num_empty_answers: Number of trained answers that have neither text nor tool calls nor
            reasoning.
        image_spans: Start and end character in the text for each image. Empty until
            :func:`portable.data.tokens.image_text.expand_placeholders` inserts the texts for
            images.
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
    """Raised if the start or end of an answer cannot be found in the rendered conversation.

    Also raised if the template drops the reasoning of some answers but not of others. If the error
    occurs while a loss mask is built, and :attr:`RenderedConversation.separable_answers` is not
    empty, the conversation is rendered again with one sample per answer.
    """


def build_no_template_error() -> UserError:
    """Build the error for a tokenizer without a chat template."""
    return UserError(
        "data.chat_template: the tokenizer has no template; set data.chat_template to a file with a "
        "template, or to chatml if the tokenizer has the tokens <|im_start|> and <|im_end|>"
    )


@dataclass(frozen=True)
class TemplateRenderer:
    """Picklable renderer for conversations.

    It also determines the trained parts of the text. Templates are untrusted code. To limit their
    time and memory, call the rendering methods through
    :func:`portable.data.tokens.limited_calls.call_within_limits`.

    Attributes:
        templates: Text of a template, or several texts keyed by name. None if only plain-text
            completions are rendered.
        variables: Variables for the templates.
        train_on: Value of ``data.train_on``, which selects the tokens that contribute to the
            loss. None selects the completion if a record has a prompt and the trained roles
            are the default roles. Otherwise, None selects the messages of the trained roles.
        split_turns: Whether each answer becomes a separate sample that also contains the
            messages before it.
        prefix: Special tokens before a plain-text completion.
        suffix: Special tokens after a plain-text completion. They are omitted if the
            completion already ends with ``end_text``.
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
            For each document, its rendered samples or its error.

        Raises:
            RecordError: If the template fails for a record and ``collect`` is False. If the
                template exceeds the time or memory limit, the error is raised even if ``collect``
                is True. The message contains the location of the record.
            UserError: If a conversation requires a template, and the template is missing or not
                valid. The error is raised even if ``collect`` is True.
        """
        drafts: list[list[RenderedConversation] | RecordError] = []
        for document in documents:
            try:
                drafts.append(self._render_document(document))
            except RecordError as error:
                # After a record exceeds a limit, there is no time left for the other records.
                if not collect or isinstance(error.__cause__, TimeoutError | MemoryError):
                    raise
                drafts.append(RecordError(str(error)))
        return drafts

    def render_question(self, text: str, location: str) -> str:
        """Render a single user message, followed by the generation prompt.

        Args:
            text: Content of the message.
            location: Name of the conversation, used in error messages.

        Raises:
            UserError: If there is no valid template, or if the template fails.
        """
        return self.render_prompt([{"role": "user", "content": text}], location)

    def render_prompt(self, messages: Sequence[Message], location: str) -> str:
        """Render a conversation, followed by the generation prompt.

        Args:
            messages: Messages of the conversation.
            location: Name of the conversation, used in error messages.

        Raises:
            UserError: If there is no valid template, if the template fails, or if the text is far
                longer than the conversation.
        """
        conversation = self._convert_to_text_parts(Conversation(tuple(messages), location))
        return self._render_messages(conversation, conversation.messages, prompted=True)

    def _render_document(self, document: Document) -> list[RenderedConversation]:
        """Render the samples of a document.

        Returns:
            One sample. If ``split_turns`` is set, a conversation has one sample per trained
            answer instead. Answers in its prompt are omitted if only the completion is trained.

        Raises:
            RecordError: If the document cannot be rendered. See :meth:`_build_draft`.
        """
        conversation = document.conversation
        if conversation is None:
            return [self._build_completion_draft(document.text, document.num_prompt_chars or 0)]
        if not self.split_turns:
            return [self._build_draft(conversation, self.train_on)]
        is_completion = _select_train_on(conversation, self.train_on) == "completion"
        begin = (conversation.num_prompt_messages or 0) if is_completion else 0
        return self.render_turns(
            conversation, [index for index in conversation.trained_message_indices if index >= begin]
        )

    def render_turns(self, conversation: Conversation, answers: Sequence[int]) -> list[RenderedConversation]:
        """Render one sample per answer.

        Each sample contains the messages up to and including its answer. Only this answer
        contributes to the loss. The attribute ``train_on`` is ignored.

        Args:
            conversation: The conversation.
            answers: Indices of the answers.

        Raises:
            RecordError: If the template fails or drops part of the conversation.
        """
        without_prompt = replace(conversation, num_prompt_messages=None)
        parts = (replace(without_prompt, messages=without_prompt.messages[: index + 1]) for index in answers)
        return [self._build_draft(part, "last_assistant", is_single_turn=True) for part in parts]

    def _build_completion_draft(self, text: str, prompt: int) -> RenderedConversation:
        """Build the sample for a prompt and its completion, without a template.

        The prompt contributes to the loss only if ``train_on`` is ``all``. The sample gets the
        special tokens in ``prefix`` and ``suffix``. If the text already ends with ``end_text``, the
        sample gets no suffix.

        Args:
            text: Prompt and completion, concatenated.
            prompt: Number of characters in the prompt.
        """
        trains_prompt = self.train_on == "all"
        suffix = () if self.end_text and text.endswith(self.end_text) else self.suffix
        return RenderedConversation(
            text, None, ((prompt, len(text)),), trains_all=trains_prompt, prefix=self.prefix, suffix=suffix
        )

    def _build_draft(
        self, conversation: Conversation, train_on: TrainOn | None, *, is_single_turn: bool = False
    ) -> RenderedConversation:
        """Render a conversation, and determine the positions of its answers.

        Args:
            conversation: The conversation.
            train_on: Value of ``data.train_on``, which selects the tokens that contribute to the
                loss. None selects the completion if the record has a prompt and the trained roles
                are the default roles. Otherwise, None selects the messages of the trained roles.
            is_single_turn: Whether the conversation was already split into one sample per answer,
                and this is one of these samples. If so, it must not be split again.

        Raises:
            RecordError: If the template fails or drops part of the conversation, if no message
                contributes to the loss, or if the template does not mark the answers and there are
                too many to locate.
            AnswerNotFoundError: If the start of an answer cannot be determined.
            UserError: If the template is missing or not valid.
        """
        train_on = _select_train_on(conversation, train_on)
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
                f"data.source: {conversation.location}: no message with role "
                f"{conversation.trained_roles_text} has text to train on; remove the record"
            )
        turns = () if is_single_turn else answers
        # The template marks only the assistant's messages; other roles are located with rendered prefixes.
        if marked:
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
        """Build a sample that trains on the completion of a conversation, or on all of its tokens.

        Args:
            conversation: The conversation.
            text: Rendered conversation.
            begin: Index of the first message of the completion, or 0 if ``train_on`` is ``all``.
                None if the record does not mark a prompt.
            train_on: ``completion`` to train on the messages from ``begin`` to the end, or ``all``
                to train on all tokens.
            shown: For each trained answer with reasoning, whether the text contains the reasoning.

        Raises:
            RecordError: If the record does not mark a prompt, or if a trained message is excluded
                from the loss.
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
            index: Index of the answer's message.
            opened: Rendered messages before the answer, followed by the generation prompt. The
                answer is expected to begin at the end of this text.

        Returns:
            The length of ``opened``, which is the character position of the answer, if ``text``
            begins with ``opened``. Otherwise, an :class:`AnswerContext`, which is used later to
            find the start of the answer in the tokens. Its ``prompted`` is ``opened``. Its
            ``unprompted`` is the text of the same messages without the generation prompt, or None
            if this text cannot be determined.
        """
        prefix = _measure_prefix(text, opened)
        if isinstance(prefix, int):
            return prefix
        try:
            return AnswerContext(prefix, self._render_before_answer(conversation, text, index))
        except AnswerNotFoundError:  # only needed if the start has to be found in the tokens
            return AnswerContext(prefix, None)

    def _render_before_answer(
        self, conversation: Conversation, text: str, index: int, *, prompted: bool = False
    ) -> str:
        """Render the messages before a given message, as they appear in ``text``.

        Args:
            conversation: The conversation.
            text: Rendered conversation.
            index: Index of the given message.
            prompted: Whether to add the generation prompt. Has no effect if the message is not from
                the assistant.

        Returns:
            The rendered messages, followed by the generation prompt if ``prompted`` is True. There
            are two special cases:

            - The message is not from the assistant. It then begins with a role header, and there is
              no generation prompt. The result includes this header, and ends immediately before
              the content of the message. To find the end of the header, the message is rendered
              with a known placeholder as its content.
            - The message is the first one and is from the assistant. There are then no messages to
              render, and templates do not support an empty conversation. The method therefore
              searches for the generation prompt in ``text``. The result ends after the prompt if
              ``prompted`` is True, and before the prompt otherwise.

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

        If there are several templates, conversations with tools use ``tool_use`` if it exists.
        All other conversations use ``default``.

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
        """Build the variables for the template.

        The current date is fixed to :data:`TEMPLATE_DATE`. Variables of the record replace entries
        of ``variables`` with the same name. Both can set another date with the variable
        ``strftime_now``, as an ISO date such as ``2025-01-31``. In the template, ``strftime_now``
        is a function that formats this date.

        Raises:
            ValueError: If the date is not a valid ISO date.
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
            RecordError: If the template fails, or if the text is far longer than the conversation.
        """
        total = len(conversation.messages)
        context = "" if len(messages) == total else f" for the first {len(messages)} of {total} messages"
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
            The text, and the start and end of each nonempty marked span in characters. Both are
            empty if there are no messages.

        Raises:
            RecordError: If the template fails, or if the text is far longer than the conversation.
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
        """Return whether a template requires the content of a message as a list of parts.

        Templates of image models often do. Such a template does not write the content if it is a
        string. The result is cached, because determining it takes two renderings.
        """
        if template not in self._requires_parts_cache:
            message = {"role": "user", "content": _PROBE_TEXT}
            self._requires_parts_cache[template] = not self._is_message_shown(
                template, message
            ) and self._is_message_shown(template, _to_text_parts(message))
        return self._requires_parts_cache[template]

    def _is_message_shown(self, template: str, message: Message) -> bool:
        """Return whether the text rendered by a template includes the content of ``message``.

        The content must be ``_PROBE_TEXT``, as a string or as a list with one text part. Returns
        False if the template cannot be rendered.
        """
        probe = Conversation((message,), "")
        try:
            return _PROBE_TEXT in _compile_template(template).render(
                messages=[message], add_generation_prompt=False, **self._build_variables(probe)
            )
        except Exception:  # a template may reject this test message; real data shows whether it works
            return False

    def _convert_tool_calls(self, conversation: Conversation) -> Conversation:
        """Convert messages with tool calls to a format that the template supports.

        Also converts the contents of messages with :meth:`_convert_to_text_parts`, even if there
        are no tool calls.

        If a message has tool calls but no text, its content is an empty string by default. Some
        templates, such as DeepSeek R1's, render the calls only if the content is null. If the
        template fails or drops a call, the conversion is therefore repeated with null as the
        content.

        Raises:
            RecordError: If the template fails or drops a call with both formats. This method checks
                for dropped calls only if a message has tool calls but no text.
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

        Objects are not supported if the template fails for them, or if it writes them as Python dicts.

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
        # The text contains Python's representation of a dict, which is not JSON.
        if any(arguments and str(arguments) in text for arguments in objects):
            conversation = as_text
        return conversation


@contextmanager
def _convert_template_errors(conversation: Conversation, context: str = "") -> Iterator[None]:
    """Convert exceptions of a chat template to RecordErrors with the location of the record.

    Context manager for code that renders the template. A UserError is not converted.

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
            f"the template raises an error{context} ({_describe_error(error)}); correct the template or the "
            "record",
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
    """Check the length of a rendered text, and replace its lone surrogates with ``?``.

    Texts of at most :data:`_UNCHECKED_CHARS` characters are not checked. A longer text may have at
    most :data:`_MAX_EXPANSION` times the characters of the conversation from which it was rendered.
    Without this limit, a malicious template could make the run tokenize gigabytes of text.

    Returns:
        The text without lone surrogates.

    Raises:
        RecordError: If the text is too long.
    """
    if len(text) > _UNCHECKED_CHARS and len(text) > _MAX_EXPANSION * (
        num_characters := _count_characters(conversation)
    ):
        raise build_template_error(
            conversation,
            f"the template renders {len(text):,} characters for a record of {num_characters:,} characters, "
            f"more than {_MAX_EXPANSION} times the length of the record; use another template",
        )
    return replace_surrogates(text)


def _check_messages_shown(conversation: Conversation, text: str) -> None:
    """Check that a rendered text contains the parts that templates often drop.

    These are the function names of tool calls, messages with one of the :data:`RARE_ROLES`, such as
    ``ipython``, and system or developer messages after the first message. The parts may also be
    escaped as in JSON. The arguments of tool calls are not checked.

    Raises:
        RecordError: If one of these parts is missing.
    """
    for index, message in enumerate(conversation.messages):
        names = [call["function"]["name"] for call in message.get("tool_calls", ())]
        parts = [
            (
                f"the template leaves out the call of the tool {name!r}; use a template that renders tool "
                "calls",
                name,
            )
            for name in names
        ]
        if message["role"] in RARE_ROLES or (message["role"] in SYSTEM_ROLES and index):
            reason = (
                f"the template leaves out message {index + 1}, which has role {message['role']}; use a "
                "template that renders the message, or move a system or developer message to the start"
            )
            parts.append((reason, get_message_text(message).strip()))
        for reason, content in parts:
            if (
                replace_surrogates(content) not in text
                and json.dumps(content, ensure_ascii=False)[1:-1] not in text
            ):
                raise build_template_error(conversation, reason)


def _select_train_on(conversation: Conversation, train_on: TrainOn | None) -> TrainOn:
    """Select the default of ``train_on`` for a conversation if the argument is None.

    The default is ``completion`` if the record has a prompt and the trained roles are the default
    roles, and ``assistant`` otherwise.
    """
    if train_on is not None:
        return train_on
    has_prompt = conversation.num_prompt_messages is not None
    return "completion" if has_prompt and conversation.trained_roles == DEFAULT_TRAINED_ROLES else "assistant"


def _select_first_trained_message(conversation: Conversation, begin: int | None, train_on: TrainOn) -> int:
    """Check that no message from ``begin`` on is excluded from the loss, and return ``begin``.

    A message is excluded if one of its ``WEIGHT_KEYS`` is 0 or false. Roles are not checked.

    Args:
        conversation: Conversation to check.
        begin: Index of the first message that contributes to the loss. None if the record has no
            prompt.
        train_on: ``completion`` or ``all``, used in the error message.

    Returns:
        Value of ``begin``, which is never None.

    Raises:
        RecordError: If ``begin`` is None, or if the message at ``begin`` or a later message is
            excluded from the loss.
    """
    if begin is None:
        raise RecordError(
            f"data.train_on: {conversation.location}: completion applies only to records with a prompt and a "
            "completion; set data.train_on to assistant or last_assistant"
        )
    if any(map(is_excluded_from_training, conversation.messages[begin:])):
        raise RecordError(
            f"data.train_on: {conversation.location}: a message is excluded from training, but {train_on} "
            "trains on complete texts; set data.train_on to assistant"
        )
    return begin


def build_template_error(conversation: Conversation, reason: str) -> RecordError:
    """Build the error for a record that the chat template cannot render.

    The message contains the location of the record and the reason.

    Args:
        conversation: Conversation of the record.
        reason: Reason, followed by a remedy.
    """
    return RecordError(f"data.chat_template: {conversation.location}: {reason}")


def build_answer_not_found_error(conversation: Conversation, index: int) -> AnswerNotFoundError:
    """Build the error for an answer that cannot be found in the rendered text.

    Args:
        conversation: Conversation that contains the answer.
        index: Index of the answer's message in the conversation.
    """
    role = conversation.messages[index]["role"]
    subject = "an answer" if role == "assistant" else f"from {role}"
    reason = (
        f"the beginning and the end of message {index + 1}, {subject}, cannot be found in the rendered text"
    )
    remedy = "use a template that marks answers with {% generation %}"
    if role != "assistant":
        remedy = f"use another template, or leave {role} out of data.roles_to_train"
    elif not index:
        reason = (
            "the conversation begins with an assistant message, but the template does not render the text "
            "that precedes other answers before this message"
        )
        remedy += ", or begin the conversation with a user message"
    return AnswerNotFoundError(f"data.chat_template: {conversation.location}: {reason}; {remedy}")


def _count_characters(conversation: Conversation) -> int:
    """Return the approximate number of characters in a conversation, including its tools.

    The caller compares this number with the length of the rendered text.
    """
    return len(str(conversation.messages)) + len(str(conversation.tools))


def _measure_prefix(text: str, part: str) -> int | str:
    """Return the length of ``part`` if ``text`` begins with it, otherwise ``part`` itself.

    The length is the character position at which ``part`` ends in ``text``. If ``part`` itself is
    returned, the caller finds this position later, by comparing tokens instead of characters.
    """
    return len(part) if text.startswith(part) else part


def _extract_reasoning(message: Message) -> str:
    """Return the reasoning of a message, without surrounding whitespace. Empty if there is none.

    The reasoning is in ``reasoning_content``. If this key is missing or empty, the reasoning
    is the content before the last ``</think>``, without the part up to ``<think>`` if there
    is such a tag.
    """
    inline = get_message_text(message).rpartition("</think>")[0].rpartition("<think>")[2]
    return str(message.get("reasoning_content") or inline).strip()


def strip_reasoning(message: Message) -> str:
    """Return the content of a message without leading reasoning and surrounding whitespace.

    The reasoning is all text up to and including the last closing tag, such as ``</think>`` or
    ``[/THINK]``. Lone surrogates in the result are replaced with ``?``.
    """
    content = get_message_text(message)
    return replace_surrogates(
        content[max((match.end() for match in _THOUGHT_END.finditer(content)), default=0) :].strip()
    )


def check_answer_words(
    conversation: Conversation, answer_words: Sequence[AnswerWords], trained_text: str
) -> None:
    """Check that the trained text contains the words and tool calls of all answers.

    Ignores whitespace and the case of words, because templates strip lines and may change the case.
    The words may also be escaped as in JSON. The texts of the answers must occur in the given
    order. For tool calls, only the function names and the number of their occurrences are checked.

    Args:
        conversation: The conversation, used in the error message.
        answer_words: Words of each answer, in the order of the conversation.
        trained_text: Parts of the rendered text that contribute to the loss.

    Raises:
        RecordError: If the words or a tool call of an answer are missing. The error
            identifies the message if words are missing, and the tool if a call is missing.
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
                f"the template leaves out the call of the tool {name!r}; use a template that renders tool "
                "calls",
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
