"""Chat templates: from a conversation to tokens, and to the tokens that are trained.

The template writes a conversation as one text. Which part of it the assistant wrote is known in two ways:

- The template marks it with ``{% generation %}``.
- Otherwise from prefixes. The conversation up to an answer, with the generation prompt, is where the answer
  begins; the conversation up to and with the answer is where it ends. Both are rendered and must be prefixes
  of the whole. A template that shows earlier turns otherwise than the last one (Qwen3 leaves out their
  thinking) has no such prefixes: each answer becomes a sample, in the context that the model will see.

After the last answer a template may write tokens that it writes nowhere else (Phi-3's end of text, GPT-OSS's
return in place of end). Such a prefix may differ from the whole in special tokens at its end.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from os.path import commonprefix
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from portable.data.sources.conversations import ANSWERING, FIRST, SELDOM, Conversation, context_only, valid
from portable.data.sources.documents import listed
from portable.errors import UserError, one_line
from portable.private import of_transformers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from portable.data.sources.conversations import Message
    from portable.data.sources.documents import Document
    from portable.data.tokens.tokenize import Frame

TrainOn = Literal["assistant", "completion", "last_assistant", "all"]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>\\n' }}"
    "{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
BUILT_IN = {"chatml": CHATML}
_PROBE = "What is shown of this?"
VERSION = 3  # of how records become tokens and masks; a change makes caches anew
DAY = "2025-01-01"
"""The date in a prompt that tells today's, so that the tokens are the same on every day."""
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_SPECIAL = re.compile(r"<\|[^\s<>|'\"]+\|>")
_MOST_RENDERED = 1 << 30  # characters written for one conversation
_Span = tuple[int, int]


@dataclass
class Encoded:
    """The tokens of some conversations, one sample after the other."""

    tokens: list[npt.NDArray[np.int64]] = field(default_factory=list)
    trained: list[npt.NDArray[np.bool_]] = field(default_factory=list)
    stopping: int = 0
    """Samples in which the token that ends the last answer is trained."""
    ends: Counter[int] = field(default_factory=Counter)
    """How often each token ends a last answer."""
    unstopped: str = ""
    """Where the trained part of a sample ends otherwise: its last tokens, and those after it."""
    prompt_left: str = ""
    """What the generation prompt has beyond the beginning of an answer, if anything."""
    samples: list[int] = field(default_factory=list)
    """How many each conversation became."""
    counts: Counter[str] = field(default_factory=Counter)
    """Of ``records``; of those ``apart``, for which the template shows earlier turns otherwise, and their
    samples, ``turns``; of records that ``think``, their ``thoughts``, and those ``lost`` by the template."""


@dataclass(frozen=True)
class _Draft:
    """A rendered conversation before it is tokenized."""

    text: str
    conversation: Conversation | None
    """None for a completion of plain text."""
    spans: tuple[_Span, ...] = ()
    answers: tuple[int, ...] = ()
    """Messages whose spans follow from prefixes."""
    opened: tuple[str, ...] = ()
    """For each the conversation before it, with the generation prompt."""
    closed: tuple[str, ...] = ()
    """For each the conversation up to and with it."""
    whole: bool = False
    """Whether all tokens are trained."""
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    """Tokens before and after the text; the latter are trained."""
    thoughts: tuple[bool, ...] = ()
    """For each trained answer with reasoning, whether the text has it."""
    turns: tuple[int, ...] = ()
    """The trained answers, if each may become a sample of its own."""


class _UnstableError(UserError):
    """The tokens of an answer cannot be told in the whole."""


def chat_template(tokenizer: Any, setting: str | None) -> str | dict[str, str]:
    """The template that ``data.chat_template`` means: a file, a name of the tokenizer's, or a built-in one.

    Returns:
        its text, or the texts of a tokenizer with several, of which ``default`` and ``tool_use`` are used.

    Raises:
        UserError: there is none.
    """
    own = getattr(tokenizer, "chat_template", None)
    if setting is None:
        if not own:
            raise no_template()
        if isinstance(own, dict) and "default" not in own:
            raise UserError(f"data.chat_template: the tokenizer has several ({listed(own)}); set it to one")
        return own  # type: ignore[no-any-return]
    if isinstance(own, dict) and setting in own:
        return str(own[setting])
    path = Path(setting)
    if path.suffix in (".jinja", ".jinja2", ".j2", ".txt") or path.is_file():
        try:
            return path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8"
            raise UserError(
                f"data.chat_template: {setting}: cannot read it ({reason}); check the path"
            ) from error
    if setting in BUILT_IN:
        return BUILT_IN[setting]
    names = [*(own if isinstance(own, dict) else ()), *BUILT_IN]
    raise UserError(
        f"data.chat_template: {setting!r} is no file and no name; use a path or one of {listed(names)}"
    )


def no_template() -> UserError:
    return UserError(
        "data.chat_template: the tokenizer has none; set it to a file with a template, or to chatml if the "
        f"tokenizer has its tokens ({' '.join(CHATML_TOKENS)})"
    )


class ChatTemplate:
    """Renders, tokenizes and masks conversations.

    Args:
        tokenizer: a fast one. The positions of its tokens in the text are needed.
        templates: from :func:`chat_template`; None if there is none, which only completions do without.
        frame: the special tokens around a completion.
        train_on: which tokens are trained; None: the completion of a record with a prompt, else what the
            assistant says.
        split_turns: make a sample of each answer, with what was said before it.
        pairs: the documents are pairs of completions of one prompt, which are trained from the same token on.
        kwargs: further variables of the template.

    Raises:
        UserError: the template or the tokenizer cannot be used.
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
                f"data.tokenizer: {type(tokenizer).__name__} is not a fast tokenizer, as conversations need; "
                "use one with a tokenizer.json"
            )
        self._tokenizer = tokenizer
        self._templates = templates
        self._frame = frame
        self._train_on = train_on
        self._split = split_turns
        self._pairs = pairs
        self._kwargs = {**tokenizer.special_tokens_map, **(kwargs or {})}
        self._parts: dict[str, bool] = {}
        for text in templates.values() if isinstance(templates, dict) else [templates or ""]:
            self._compiled(text)

    @property
    def key(self) -> str:
        """What the tokens depend on, besides the source and the tokenizer."""
        content = [VERSION, self._templates, self._train_on, self._split, self._pairs, self._kwargs, DAY]
        return json.dumps(content, sort_keys=True, default=str)

    @property
    def lacking(self) -> list[str]:
        """What the template writes in the form of special tokens, and the tokenizer has none for."""
        texts = self._templates.values() if isinstance(self._templates, dict) else [self._templates or ""]
        written = dict.fromkeys(_SPECIAL.findall(" ".join(texts)))
        known = self._tokenizer.get_vocab()
        return [token for token in written if token not in known]

    def encode(self, documents: Sequence[Document]) -> Encoded:
        """Tokenize conversations and completions.

        Raises:
            UserError: naming the record, if its template fails or its mask cannot be told.
        """
        drafts = [self._drafts(document) for document in documents]
        encodings = iter(self._encodings([draft.text for several in drafts for draft in several]))
        encoded = Encoded()
        for document, several in zip(documents, drafts, strict=True):
            found = [next(encodings) for _ in several]
            try:
                masks = self._masks(several, found, encoded)
            except _UnstableError:
                if document.conversation is None or not several[0].turns:
                    raise
                several = self._turns(document.conversation, several[0].turns)
                found = self._encodings([draft.text for draft in several])
                masks = self._masks(several, found, encoded)
                encoded.counts.update(apart=1, turns=len(several))
            for draft, encoding, within in zip(several, found, masks, strict=True):
                tokens = np.array([*draft.prefix, *encoding.ids, *draft.suffix], dtype=np.int64)
                ends = np.full(len(draft.prefix), draft.whole), within, np.ones(len(draft.suffix), dtype=bool)
                encoded.tokens.append(tokens)
                encoded.trained.append(np.concatenate(ends))
                self._count_stops(draft, tokens, encoded.trained[-1], encoded)
            shown = [shown for draft in several for shown in draft.thoughts]
            encoded.samples.append(len(several))
            encoded.counts.update(records=1, think=bool(shown), thoughts=len(shown), lost=shown.count(False))
        if self._pairs:  # the same tokens of the prompt count for both
            for one, other in zip(encoded.trained[::2], encoded.trained[1::2], strict=True):
                first, second = int(one.argmax()), int(other.argmax())
                one[second:first] = other[first:second] = True
        return encoded

    # -- rendering ------------------------------------------------------------------------------------------

    def _drafts(self, document: Document) -> list[_Draft]:
        conversation = document.conversation
        if conversation is None:
            return [self._completion(document.text, document.prompt_chars or 0)]
        if not self._split:
            return [self._draft(conversation, self._train_on)]
        begin = conversation.prompt or 0
        return self._turns(conversation, [at for at in conversation.answers if at >= begin])

    def _turns(self, conversation: Conversation, answers: Sequence[int]) -> list[_Draft]:
        """Each of these answers with what was said before it."""
        whole = replace(conversation, prompt=None)
        parts = (replace(whole, messages=whole.messages[: at + 1]) for at in answers)
        return [self._draft(part, "last_assistant", apart=True) for part in parts]

    def _completion(self, text: str, prompt: int) -> _Draft:
        """A prompt and its completion without a template, ended by the tokenizer's end token."""
        whole = self._train_on == "all"
        ended = text.endswith(str(self._tokenizer.eos_token))
        suffix = () if ended else self._frame.suffix
        return _Draft(
            text, None, ((prompt, len(text)),), whole=whole, prefix=self._frame.prefix, suffix=suffix
        )

    def _draft(self, conversation: Conversation, train_on: TrainOn | None, *, apart: bool = False) -> _Draft:
        if train_on is None:
            prompted = conversation.prompt is not None and conversation.roles == ANSWERING
            train_on = "completion" if prompted else "assistant"
        plain, conversation = conversation, self._with_arguments(self._with_parts(conversation))
        messages = conversation.messages
        marked = train_on in ("assistant", "last_assistant") and _MARKED.search(self._template(conversation))
        if marked:
            text, spans = self._marked(conversation, messages)
        else:
            text = self._render(conversation, messages)
        self._check_shown(plain, text)
        begin = conversation.prompt if train_on == "completion" else 0
        answers = tuple(at for at in conversation.answers if at >= (begin or 0))
        answers = answers[-1:] if train_on == "last_assistant" else answers
        thoughts = (_thought(plain.messages[at]) for at in answers)
        shown = tuple(valid(thought) in text for thought in thoughts if thought)
        if train_on in ("all", "completion"):
            if begin is None:
                raise UserError(
                    f"data.train_on: {conversation.where}: completion is for records with a prompt and a "
                    "completion; use assistant or last_assistant"
                )
            if any(map(context_only, messages[begin:])):
                raise UserError(
                    f"data.train_on: {conversation.where}: a message is context only, but {train_on} trains "
                    "whole texts; use assistant"
                )
            if train_on == "all":
                return _Draft(text, conversation, whole=True, thoughts=shown)
            opened = self._render(conversation, messages[:begin], prompted=True)
            return _Draft(text, conversation, (), (begin,), (opened,), (text,), thoughts=shown)
        if not answers:
            raise UserError(
                f"data.source: {conversation.where}: {conversation.speakers} says nothing; remove the record"
            )
        turns = () if apart else answers
        if marked:  # the assistant's; the others' are found by their prefixes
            said = [at for at in answers if messages[at]["role"] == "assistant"]
            if len(said) < sum(message["role"] == "assistant" for message in messages):
                ends = {end for at in said for end in (at, at + 1)}
                count = {end: len(self._marked(conversation, messages[:end])[1]) for end in ends}
                spans = [span for at in said for span in spans[count[at] : count[at + 1]]]
            if said and not spans:
                raise self._failure(conversation, "{% generation %} marks nothing in it")
            answers = tuple(at for at in answers if at not in said)
        else:
            spans = []
        if 2 * len(answers) * len(text) > _MOST_RENDERED:
            raise self._failure(
                conversation,
                f"{len(answers):,} answers in {len(text):,} characters are too many to find by their "
                "prefixes; cut the record into shorter ones, or use a template with {% generation %}",
            )
        opened_at = tuple(self._before(conversation, text, at, prompted=True) for at in answers)
        closed_at = tuple(
            text if at + 1 == len(messages) else self._render(conversation, messages[: at + 1])
            for at in answers
        )
        return _Draft(
            text,
            conversation,
            tuple(spans),
            answers,
            opened_at,
            closed_at,
            thoughts=shown,
            turns=turns,
        )

    def _before(self, conversation: Conversation, text: str, at: int, *, prompted: bool = False) -> str:
        """The conversation before an answer, as it stands in ``text``; before what another role says.

        No template takes an empty conversation as it takes others: it may write a system prompt only with the
        first message. So a first answer is found by the generation prompt, or what ``text`` has of it.
        """
        if (message := conversation.messages[at])["role"] != "assistant":
            other = self._with_parts(replace(conversation, messages=({**message, "content": _PROBE},)))
            shown = self._render(conversation, [*conversation.messages[:at], *other.messages])
            if _PROBE not in shown:
                raise self._unstable(conversation, at)
            return shown[: shown.rindex(_PROBE)]
        if at:
            return self._render(conversation, conversation.messages[:at], prompted=prompted)
        asked = self._with_parts(replace(conversation, messages=({"role": "user", "content": _PROBE},)))
        question = self._render(asked, asked.messages)
        header = self._render(asked, asked.messages, prompted=True)
        header = header[len(commonprefix([question, header])) :]  # noqa: RUF071 - of characters
        begun = next((header[:end] for end in range(len(header), 0, -1) if header[:end] in text), "")
        if not begun:
            raise self._unstable(conversation, at)
        return text[: text.index(begun)] + (header if prompted else "")

    def _template(self, conversation: Conversation) -> str:
        if isinstance(self._templates, str):
            return self._templates
        if self._templates is None:
            raise no_template()
        name = "tool_use" if conversation.tools and "tool_use" in self._templates else "default"
        return self._templates[name]

    def _compiled(self, text: str) -> Any:
        try:
            return of_transformers.compiled_template(text)
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"data.chat_template: it is no valid template ({one_line(error)}); correct it"
            ) from error

    def _variables(self, conversation: Conversation) -> dict[str, Any]:
        kwargs = {**self._kwargs, **conversation.template_kwargs}
        day = datetime.fromisoformat(str(kwargs.pop("strftime_now", DAY)))
        return {
            "strftime_now": day.strftime,
            "tools": None if conversation.tools is None else list(conversation.tools),
            "documents": None,
            **kwargs,
        }

    def _render(
        self, conversation: Conversation, messages: Sequence[Message], *, prompted: bool = False
    ) -> str:
        try:
            text = self._compiled(self._template(conversation)).render(
                messages=list(messages), add_generation_prompt=prompted, **self._variables(conversation)
            )
            return valid(str(text))
        except UserError:
            raise
        except Exception as error:  # templates are foreign code
            most = len(conversation.messages)
            alone = "" if len(messages) == most else f" with the first {len(messages)} of {most} messages"
            raise self._failure(conversation, f"the template fails{alone} ({_reason(error)})") from error

    def _marked(self, conversation: Conversation, messages: Sequence[Message]) -> tuple[str, list[_Span]]:
        """The rendered text, and what the template marks in it; nothing without messages."""
        if not messages:
            return "", []
        try:
            text, spans = of_transformers.rendered_with_marks(
                compiled_template=self._compiled(self._template(conversation)),
                messages=list(messages),
                add_generation_prompt=False,
                **self._variables(conversation),
            )
        except UserError:
            raise
        except Exception as error:
            raise self._failure(conversation, f"the template fails ({_reason(error)})") from error
        return valid(text), [(start, end) for start, end in spans if end > start]

    def _with_parts(self, conversation: Conversation) -> Conversation:
        """The conversation with lists of parts for texts, if the template would pass over a string."""
        if not self._takes_parts(self._template(conversation)):
            return conversation
        messages = tuple(map(_text_parts, conversation.messages))
        return replace(conversation, messages=messages)

    def _takes_parts(self, template: str) -> bool:
        """Whether a template, such as that of a model for images, shows a text only in a list of parts."""
        if template not in self._parts:
            message = {"role": "user", "content": _PROBE}
            self._parts[template] = not self._shows(template, message) and self._shows(
                template, _text_parts(message)
            )
        return self._parts[template]

    def _shows(self, template: str, message: Message) -> bool:
        probe = Conversation((message,), "")
        try:
            return _PROBE in self._compiled(template).render(
                messages=[message], add_generation_prompt=False, **self._variables(probe)
            )
        except Exception:  # templates are foreign code; what they take is shown by the data
            return False

    def _with_arguments(self, conversation: Conversation) -> Conversation:
        """The conversation with its calls' arguments as a string, if the template cannot take objects.

        Raises:
            UserError: the template fails with both.
        """
        calls = [
            call["function"] for message in conversation.messages for call in message.get("tool_calls", ())
        ]
        if not calls:
            return conversation
        as_text = replace(conversation, messages=tuple(map(_text_arguments, conversation.messages)))
        try:
            text = self._render(conversation, conversation.messages)
        except UserError as refusal:
            try:
                conversation, text = as_text, self._render(as_text, as_text.messages)
            except UserError:
                raise refusal from None
        objects = [call["arguments"] for call in calls if isinstance(call["arguments"], dict)]
        if any(arguments and str(arguments) in text for arguments in objects):  # written as Python has it
            conversation = as_text
        return conversation

    def _check_shown(self, conversation: Conversation, text: str) -> None:
        """Refuse a record with a call, or a message such as templates do not expect, that ``text`` lacks."""
        for at, message in enumerate(conversation.messages):
            names = [call["function"]["name"] for call in message.get("tool_calls", ())]
            parts = [(f"the call of {name!r}; use one that writes calls", name) for name in names]
            if message["role"] in SELDOM or (message["role"] in FIRST and at):
                what = f"message {at + 1}, from {message['role']}; use one that writes it, or move it"
                parts.append((what, str(message.get("content", "")).strip()))
            for what, said in parts:
                if valid(said) not in text and json.dumps(said, ensure_ascii=False)[1:-1] not in text:
                    raise self._failure(conversation, f"the template leaves out {what}")

    def _failure(self, conversation: Conversation, what: str) -> UserError:
        return UserError(f"data.chat_template: {conversation.where}: {what}")

    # -- masks ----------------------------------------------------------------------------------------------

    def _encodings(self, texts: list[str]) -> Any:
        if not texts:
            return []
        found = self._tokenizer(
            texts,
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return found.encodings

    def _masks(
        self, drafts: list[_Draft], found: Sequence[Any], encoded: Encoded
    ) -> list[npt.NDArray[np.bool_]]:
        return [self._trained(draft, one, encoded) for draft, one in zip(drafts, found, strict=True)]

    def _trained(self, draft: _Draft, encoding: Any, encoded: Encoded) -> npt.NDArray[np.bool_]:
        if draft.turns and len(set(draft.thoughts)) > 1 and draft.conversation is not None:
            # The template leaves out the reasoning of earlier answers.
            raise self._unstable(draft.conversation, draft.turns[0])
        trained = np.zeros(len(encoding.ids), dtype=bool)
        if draft.whole:
            trained[:] = True
        for start, end in draft.spans:
            trained[_token_with(encoding, start) : _token_after(encoding, end, len(draft.text))] = True
        for at, opened, closed in zip(draft.answers, draft.opened, draft.closed, strict=True):
            assert draft.conversation is not None
            first = self._start(draft, draft.conversation, encoding, at, opened, encoded)
            last = self._end(draft, draft.conversation, encoding, at, closed)
            if last <= first:
                raise self._failure(
                    draft.conversation, f"the template writes nothing for message {at + 1}, an answer"
                )
            trained[first:last] = True
        return trained

    def _start(
        self,
        draft: _Draft,
        conversation: Conversation,
        encoding: Any,
        at: int,
        opened: str,
        encoded: Encoded,
    ) -> int:
        """The first token of an answer."""
        if draft.text.startswith(opened):
            return _token_with(encoding, len(opened))
        if conversation.messages[at]["role"] != "assistant":
            raise self._unstable(conversation, at)
        # The generation prompt may begin the answer itself, such as "<think>".
        before = self._before(conversation, draft.text, at)
        context, rest = self._common(encoding, before)
        first, left = self._common(encoding, opened)
        ids = encoding.ids
        # A header ends with an added token or a space. What else is alike is so by chance.
        while first > context and not (ids[first - 1] in self._added or self._is_blank(ids[first - 1])):
            first -= 1
            left.insert(0, ids[first])
        begins = first > context or opened == before  # the answer, with part of the generation prompt
        if not self._only_special(rest) or not begins or first < context or first == len(ids):
            raise self._unstable(conversation, at)
        encoded.prompt_left = encoded.prompt_left or self._tokenizer.decode(left)
        return first

    def _end(self, draft: _Draft, conversation: Conversation, encoding: Any, at: int, closed: str) -> int:
        """The token after an answer."""
        if draft.text.startswith(closed):
            return _token_after(encoding, len(closed), len(draft.text))
        last, rest = self._common(encoding, closed)
        if not self._only_special(rest):
            raise self._unstable(conversation, at)
        return last

    def _common(self, encoding: Any, text: str) -> tuple[int, list[int]]:
        """How many first tokens of ``text`` are those of the whole, and the others of ``text``."""
        ids: list[int] = self._encodings([text])[0].ids
        count = next(
            (at for at, (one, other) in enumerate(zip(ids, encoding.ids, strict=False)) if one != other),
            min(len(ids), len(encoding.ids)),
        )
        return count, ids[count:]

    def _unstable(self, conversation: Conversation, at: int) -> _UnstableError:
        role = conversation.messages[at]["role"]
        what = "an answer" if role == "assistant" else f"from {role}"
        why = f"where message {at + 1}, {what}, begins and ends cannot be told from the text"
        remedy = "use one that marks answers with {% generation %}"
        if role != "assistant":
            remedy = f"use another, or leave {role} out of data.roles_to_train"
        elif not at:
            why = "the assistant speaks first, where the template does not write what precedes other answers"
            remedy += ", or let a user speak first"
        return _UnstableError(f"data.chat_template: {conversation.where}: {why}; {remedy}")

    # -- the token that ends a turn --------------------------------------------------------------------------

    @cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(self._tokenizer.all_special_ids) | {
            number for number, token in self._tokenizer.added_tokens_decoder.items() if token.special
        }

    @cached_property
    def _added(self) -> frozenset[int]:
        return self._special | frozenset(self._tokenizer.get_added_vocab().values())

    @cached_property
    def _blank(self) -> dict[int, bool]:
        return {}

    def _is_blank(self, token: int) -> bool:
        if token not in self._blank:
            self._blank[token] = not self._tokenizer.decode([token]).strip()
        return self._blank[token]

    def _only_special(self, tokens: list[int]) -> bool:
        return all(token in self._special or self._is_blank(token) for token in tokens)

    def _count_stops(
        self,
        draft: _Draft,
        tokens: npt.NDArray[np.int64],
        trained: npt.NDArray[np.bool_],
        encoded: Encoded,
    ) -> None:
        """Whether the sample teaches the end of its last answer, and the token of that end.

        It is the first of the special tokens after the last words, or any added token.
        """
        last = int(np.flatnonzero(trained)[-1]) if trained.any() else -1
        untrained = np.flatnonzero(~trained[: last + 1])
        begin = int(untrained[-1]) + 1 if len(untrained) else 0
        talk = draft.conversation
        spoke_last = talk is None or len(talk.messages) - 1 in talk.answers
        at = (len(tokens) if spoke_last else last + 1) - 1
        while at >= begin and self._is_blank(int(tokens[at])) and tokens[at] not in self._added:
            at -= 1
        end = at if at >= begin and tokens[at] in self._added else None
        while at >= begin and (tokens[at] in self._special or self._is_blank(int(tokens[at]))):
            end = at if tokens[at] in self._special else end
            at -= 1
        if end is not None:
            encoded.ends[int(tokens[end])] += 1
        if end is not None and trained[end]:
            encoded.stopping += 1
        elif not encoded.unstopped:
            decode = self._tokenizer.decode
            said, rest = decode(tokens[trained][-8:]), decode(tokens[last + 1 : last + 9])
            encoded.unstopped = f"{said!r}" + (f", and then comes {rest!r}" if rest else "")


def notes(counts: Counter[str], prompt_left: str) -> list[str]:
    """What a template does that may surprise, by the counts of all records; a line each.

    Raises:
        UserError: it leaves out all reasoning, and most records have some.
    """
    told = []
    if prompt_left:
        told.append(
            f"its generation prompt ends in {prompt_left!r}, which it does not write before the answers of "
            "the data: the model is trained without it"
        )
    if counts["apart"]:
        told.append(
            f"it shows earlier answers otherwise than the last: {counts['apart']:,} of {counts['records']:,} "
            f"conversations became {counts['turns']:,} samples, one for each answer"
        )
    if counts["lost"]:
        told.append(
            f"it leaves out the reasoning of {counts['lost']:,} of the {counts['thoughts']:,} answers that "
            "have some: the model is trained without it"
        )
    if counts["lost"] and counts["lost"] == counts["thoughts"] and 2 * counts["think"] > counts["records"]:
        raise UserError(
            f"data.chat_template: it leaves out all reasoning, which {counts['think']:,} of "
            f"{counts['records']:,} records have; use a template that writes it, or remove it from them"
        )
    return [f"data.chat_template: {line}" for line in told]


def _token_with(encoding: Any, char: int) -> int:
    """The token that contains a character, or the next one that contains any."""
    if (found := encoding.char_to_token(char)) is None:  # normalized away, such as a space
        starts = ((at, span[0]) for at, span in enumerate(encoding.offsets))
        found = next((at for at, start in starts if start >= char), len(encoding.ids))
    return int(found)


def _token_after(encoding: Any, char: int, length: int) -> int:
    """The first token that begins at a character or later."""
    if char >= length:
        return len(encoding.ids)
    found = _token_with(encoding, char)
    begins = found < len(encoding.ids) and encoding.token_to_chars(found)[0] < char
    return found + 1 if begins else found


def _thought(message: Message) -> str:
    """What is thought before an answer; empty if it has no reasoning."""
    inline = str(message.get("content", "")).rpartition("</think>")[0].rpartition("<think>")[2]
    return str(message.get("reasoning_content") or inline).strip()


def _text_parts(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def _text_arguments(message: Message) -> Message:
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}


def _reason(error: BaseException) -> str:
    text = one_line(error) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."
