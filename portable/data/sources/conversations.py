"""Conversations: the formats in which people keep them, and one form for all.

Every format is read into :class:`Conversation`, messages as ``apply_chat_template`` of transformers takes
them. Nothing here knows a template or a tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from portable.data.sources.documents import ANSWERING, Document, kind_of, valid
from portable.errors import UserError, one_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from portable.data.sources.documents import Format

Message = dict[str, Any]

EXPECTED: dict[Format, str] = {
    "messages": '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}]}',
    "sharegpt": '{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", ...}]}',
    "prompt_completion": '{"prompt": ..., "completion": ...}, both strings or both lists of messages',
    "preference": '{"prompt": ..., "chosen": ..., "rejected": ...}, all strings or all lists of messages',
    "alpaca": '{"instruction": "...", "input": "...", "output": "..."}, all strings',
}
"""What a record of each format looks like, for messages."""
FIRST = ("system", "developer")
SELDOM = ("ipython", "function", "observation")
"""Roles of a tool that a template may not know."""
ROLES = (*FIRST, "user", "assistant", "tool", *SELDOM)
_SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "chatgpt", "bot"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "function_response", "tool_response"), "tool"),
    "function_call": "function_call",
    "system": "system",
    "developer": "developer",
}
_TOOLS = ("tool", *SELDOM)
_REASONING = ("reasoning_content", "thinking", "reasoning")  # the same under three names
_WEIGHTS = ("weight", "train", "loss")  # of OpenAI, axolotl and ms-swift; 0 or false: not trained


@dataclass(frozen=True)
class Conversation:
    """One record.

    Attributes:
        messages: with ``role`` and, unless it is a tool call alone, ``content``: a string. Templates see
            their other keys, too.
        tools: JSON schemas of the tools that the assistant may call.
        prompt: how many messages are the prompt, if the record says so.
        template_kwargs: further variables of the template, from the record.
        where: the record's place in the source, for messages.
        roles: whose messages are trained, besides those that say so.
    """

    messages: tuple[Message, ...]
    where: str
    tools: tuple[dict[str, Any], ...] | None = None
    prompt: int | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    roles: frozenset[str] = ANSWERING

    @property
    def answers(self) -> list[int]:
        """The places of the messages that are trained, which are the assistant's for most: see ``roles``."""
        return [at for at, message in enumerate(self.messages) if self._trains(message)]

    def _trains(self, message: Message) -> bool:
        said = message["role"] in self.roles or bool(message.get("train"))
        return said and not context_only(message)

    @property
    def speakers(self) -> str:
        """Whose messages are trained, for messages."""
        return "the assistant" if self.roles == ANSWERING else " or ".join(sorted(self.roles))

    @property
    def text(self) -> str:
        """Everything that is said, a line each."""
        return valid("\n".join(str(message.get("content", "")) for message in self.messages))


@dataclass(frozen=True)
class Completion:
    """A prompt and its completion as plain strings, which no template joins."""

    prompt: str
    completion: str


def context_only(message: Message) -> bool:
    """Whether a message says that it is not trained."""
    return any(message.get(key) == 0 for key in _WEIGHTS)


def recognise(row: Mapping[str, Any], text_field: str, where: str) -> Format:
    """The format of a record by its columns.

    Raises:
        UserError: none fits, or several do.
    """
    found: list[Format] = []
    if text_field in row or ("." in text_field and text_field.partition(".")[0] in row):
        found.append("text")
    if text_field == "text":  # else the user has named the column of a text
        turns = row.get("conversations")
        if isinstance(turns, str) and _is_list(turns):
            turns = _json(turns, "conversations", where)
        if _is_list(row.get("messages")) or (isinstance(turns, list) and not _from_value(turns)):
            found.append("messages")
        elif isinstance(turns, list):
            found.append("sharegpt")
        elif {"prompt", "completion"} <= row.keys():
            found.append("prompt_completion")
        elif {"instruction", "output"} <= row.keys():
            found.append("alpaca")
        if {"chosen", "rejected"} <= row.keys():
            found.append("preference")
    if len(found) == 1:
        return found[0]
    names = ", ".join(map(str, row)) or "none"
    if found:
        raise UserError(
            f"data.format: {where}: the fields {names} fit both {' and '.join(found)}; set data.format to one"
        )
    return "text"  # whose error names the fields


def _is_list(value: Any) -> bool:
    """Whether a value is a list, or the JSON of one, as in a cell of a .csv file."""
    return isinstance(value, list) or (isinstance(value, str) and value.lstrip().startswith("["))


def _from_value(turns: list[Any]) -> bool:
    return not turns or (isinstance(turns[0], Mapping) and "from" in turns[0])


def documents_in(
    row: Mapping[str, Any], kind: Format, where: str, roles: frozenset[str], columns: tuple[float, ...]
) -> list[Document]:
    """The document of a record of a format other than text; the two of a preference, the chosen one first.

    Raises:
        UserError: it is not a valid record of that format.
    """
    read = (
        read_preference(row, where) if kind == "preference" else [read_conversation(row, kind, where, roles)]
    )
    return [_document(one, where, columns) for one in read]


def _document(read: Conversation | Completion, where: str, columns: tuple[float, ...]) -> Document:
    if isinstance(read, Completion):
        if not read.completion:
            raise UserError(f"data.source: {where}: completion is empty; remove the record")
        return Document(read.prompt + read.completion, prompt_chars=len(read.prompt), columns=columns)
    return Document(read.text, conversation=read, columns=columns)


def read_conversation(
    row: Mapping[str, Any], kind: Format, where: str, roles: frozenset[str] = ANSWERING
) -> Conversation | Completion:
    """Convert a record of a format other than text.

    Args:
        where: the place of the record, for messages.
        roles: whose messages are trained.

    Raises:
        UserError: it is not a valid record of that format.
    """
    found = _READERS[kind](row, where)
    if isinstance(found, Completion):
        return found
    found = replace(found, roles=roles)
    begin = 0 if roles != ANSWERING else found.prompt or 0
    if not any(at >= begin for at in found.answers):
        raise _refused(where, f"{found.speakers} says nothing, or context only; remove the record")
    return found


def _messages(row: Mapping[str, Any], where: str) -> Conversation:
    key = "conversations" if "conversations" in row and "messages" not in row else "messages"
    listed = _list(row, key, "messages", where)
    return _conversation([_message(message, where, at) for at, message in enumerate(listed)], row, where)


def _sharegpt(row: Mapping[str, Any], where: str) -> Conversation:
    messages: list[Message] = []
    for at, turn in enumerate(_list(row, "conversations", "sharegpt", where)):
        if not isinstance(turn, Mapping) or not {"from", "value"} <= turn.keys():
            raise _unlike("sharegpt", where, f"message {at + 1} has no from and value")
        role = _SHAREGPT_ROLES.get(turn["from"]) if isinstance(turn["from"], str) else None
        if role is None:
            raise _refused(
                where, f"message {at + 1} is from {turn['from']!r}; use {_listed(_SHAREGPT_ROLES)}"
            )
        rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
        if role == "function_call":
            rest |= {"role": "assistant", "tool_calls": turn["value"]}
        else:
            rest |= {"role": role, "content": turn["value"]}
        messages.append(_message(rest, where, at))
    system = row.get("system")
    if not isinstance(system, str | None):
        raise _refused(where, f"system is {kind_of(system)}; make it a string")
    if system and messages:
        if messages[0]["role"] == "system":
            raise _refused(where, "a field system and a message from system; remove one")
        messages.insert(0, {"role": "system", "content": system})
    return _conversation(messages, row, where)


def _prompt_completion(row: Mapping[str, Any], where: str) -> Conversation | Completion:
    for key in ("prompt", "completion"):
        if key not in row:
            raise _unlike("prompt_completion", where, f"no field {key}")
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return Completion(valid(prompt), valid(completion))
    if not (isinstance(prompt, Sequence) and isinstance(completion, Sequence)) or str in map(
        type, (prompt, completion)
    ):
        raise _unlike("prompt_completion", where, f"they are {kind_of(prompt)} and {kind_of(completion)}")
    if not prompt or not completion:
        raise _refused(where, f"{'prompt' if not prompt else 'completion'} is empty; remove the record")
    messages = [_message(message, where, at) for at, message in enumerate([*prompt, *completion])]
    return _conversation(messages, row, where, prompt=len(prompt))


def read_preference(row: Mapping[str, Any], where: str) -> tuple[Conversation | Completion, ...]:
    """A prompt with the completion that was chosen, and with the one that was rejected.

    Without a prompt, the messages with which both begin are it.

    Raises:
        UserError: it is no valid record.
    """
    one, other = chosen, rejected = row.get("chosen"), row.get("rejected")
    prompt = row.get("prompt")
    for key, said in (("chosen", chosen), ("rejected", rejected)):
        if not isinstance(said, str | list | tuple):
            raise _unlike("preference", where, f"{key} is {kind_of(said) if key in row else 'missing'}")
    talks = isinstance(chosen, list | tuple) and isinstance(rejected, list | tuple)
    if talks and (not prompt or isinstance(prompt, str)):
        # Both are whole conversations; a string beside them is the first question again.
        one, other = list(chosen or ()), list(rejected or ())
        most = min(len(one), len(other)) - 1
        same = next((at for at in range(most) if one[at] != other[at]), max(most, 0))
        if same == 0:
            raise _unlike("preference", where, "chosen and rejected do not begin with the same prompt")
        prompt, one, other = one[:same], one[same:], other[same:]
    elif prompt is None:
        raise _unlike("preference", where, "prompt is missing")
    rows = ({**row, "prompt": prompt, "completion": said} for said in (one, other))
    return tuple(read_conversation(row, "prompt_completion", where) for row in rows)


def _alpaca(row: Mapping[str, Any], where: str) -> Conversation:
    texts: dict[str, str] = {}
    for key in ("system", "instruction", "input", "output"):
        value = row.get(key)
        if not isinstance(value, str) and not (value is None and key in ("system", "input")):
            missing = "missing" if key not in row else kind_of(value)
            raise _unlike("alpaca", where, f"{key} is {missing}")
        texts[key] = value or ""
    asked = "\n".join(part for part in (texts["instruction"], texts["input"]) if part)
    messages: list[Message] = [{"role": "system", "content": texts["system"]}] if texts["system"] else []
    history = row.get("history") or ()
    for pair in history if isinstance(history, Sequence) else (history,):
        if not isinstance(pair, Sequence) or len(pair) != 2 or {type(text) for text in pair} != {str}:
            raise _unlike("alpaca", where, "history is not a list of pairs of strings")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    messages.append({"role": "user", "content": asked})
    prompt = len(messages)
    messages.append({"role": "assistant", "content": texts["output"]})
    return _conversation(messages, row, where, prompt=prompt)


_READERS: dict[Format, Callable[[Mapping[str, Any], str], Conversation | Completion]] = {
    "messages": _messages,
    "sharegpt": _sharegpt,
    "prompt_completion": _prompt_completion,
    "preference": lambda row, where: read_preference(row, where)[0],
    "alpaca": _alpaca,
}


def _conversation(
    messages: list[Message], row: Mapping[str, Any], where: str, *, prompt: int | None = None
) -> Conversation:
    """Check the order of the roles, and read what stands beside the messages."""
    if not messages:
        raise _refused(where, "the conversation is empty; remove the record")
    for at, message in enumerate(messages):
        before = messages[at - 1]["role"] if at else None
        if message["role"] in _TOOLS and before not in ("assistant", *_TOOLS):
            raise _refused(
                where,
                f"message {at + 1} is from {message['role']}, after {before or 'nothing'}; it must follow "
                "the assistant's call",
            )
    tools = _json(row.get("tools"), "tools", where)
    if tools is not None and not (
        isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)
    ):
        raise _refused(where, "tools is not a list of JSON schemas")
    kwargs = _json(row.get("chat_template_kwargs"), "chat_template_kwargs", where) or {}
    if not isinstance(kwargs, Mapping):
        raise _refused(where, f"chat_template_kwargs is {kind_of(kwargs)}, not a mapping")
    return Conversation(tuple(messages), where, tuple(tools) if tools else None, prompt, kwargs)


def _message(message: Any, where: str, at: int) -> Message:
    """A message in the one form: text parts joined, tool calls as objects, keys that are null left out."""
    if not isinstance(message, Mapping) or "role" not in message:
        raise _unlike("messages", where, f"message {at + 1} has no role")
    role, content = message["role"], message.get("content")
    if role not in ROLES:
        raise _refused(where, f"message {at + 1} has role {role!r}; use {_listed(ROLES)}")
    read: Message = {key: value for key, value in message.items() if value is not None}
    for key in _WEIGHTS:
        if (weight := read.get(key, 0)) not in (0, 1):
            raise _refused(where, f"message {at + 1} has {key} {weight!r}; use 0 or 1")
    if isinstance(content, list | tuple):
        content = read["content"] = "".join(_part(part, where, at) for part in content)
    if not isinstance(content, str) and (content is not None or not read.get("tool_calls")):
        raise _refused(where, f"message {at + 1}: content is {kind_of(content)}; make it a string")
    for key in _REASONING:
        if not isinstance(read.get(key, ""), str):
            raise _refused(where, f"message {at + 1}: {key} is {kind_of(read[key])}; make it a string")
    if "tool_calls" in read:
        read["tool_calls"] = _calls(read["tool_calls"], where, at)
    reasoning = next((read[key] for key in _REASONING if key in read), None)
    if reasoning is not None:  # templates look for one of two names
        read = {"thinking": reasoning, **read, "reasoning_content": reasoning}
    return read


def _part(part: Any, where: str, at: int) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, Mapping) else kind_of(part)
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind != "text" or not isinstance(text, str):
        raise _refused(where, f"message {at + 1} has a part of type {kind}; only text can be trained on")
    return text


def _calls(given: Any, where: str, at: int) -> list[dict[str, Any]]:
    """Tool calls with their arguments as an object, as templates expect them."""
    calls = _json(given, f"message {at + 1}: its tool call", where)
    calls = calls if isinstance(calls, list | tuple) else [calls]
    read: list[dict[str, Any]] = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise _refused(where, f"message {at + 1}: a tool call has no function name")
        arguments = _json(function.get("arguments"), f"message {at + 1}: arguments", where)
        function = {**function, "arguments": {} if arguments is None else arguments}
        keys = call if "function" in call else ("id",)
        beside = {key: call[key] for key in keys if call.get(key) is not None}
        read.append({"type": "function", **beside, "function": function})
    return read


def _json(value: Any, what: str, where: str) -> Any:
    """A value that may be given as a string of JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError) as error:
        raise _refused(where, f"{what} is not JSON ({one_line(error)})") from error


def _list(row: Mapping[str, Any], key: str, kind: Format, where: str) -> Sequence[Any]:
    value = row.get(key)
    if _is_list(value):
        value = _json(value, key, where)
    if not isinstance(value, list | tuple):
        raise _unlike(kind, where, f"{key} is {kind_of(value) if key in row else 'missing'}")
    return value


def _listed(names: Any) -> str:
    return ", ".join(names)


def _refused(where: str, what: str) -> UserError:
    return UserError(f"data.source: {where}: {one_line(what)}")


def _unlike(kind: Format, where: str, what: str) -> UserError:
    return _refused(where, f"{what}; a record of data.format {kind} looks like {EXPECTED[kind]}")
