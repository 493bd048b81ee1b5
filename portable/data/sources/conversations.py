"""Conversations: the formats in which people keep them, and one form for all.

Every format is read into :class:`Conversation`, messages as ``apply_chat_template`` of transformers takes
them. Nothing here knows a template or a tokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from portable.converters.similar_names import find_similar
from portable.data.sources.documents import (
    ANSWERING,
    WEIGHT_KEYS,
    Conversation,
    Document,
    Message,
    RecordError,
    find_value,
    kind_of,
    list_fields,
    listed,
    valid,
)
from portable.errors import UserError, one_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from portable.data.sources.documents import Format


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
_CHANGES_TRAINING = re.compile(r"train|loss|mask|weight", re.IGNORECASE)
"""Names of message keys that select the trained tokens. Such a key is read, or its record is refused."""
_OPTIONAL = {"tool_calls", "function_call", *_REASONING, "name", "tool_call_id"}
"""Keys that clients write into every message. Without a value they mean the same as a missing key."""
_SYSTEM_FIELDS = ("system", "system_prompt")
"""Fields of a record with a system prompt, in every format of conversations."""
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
_QUESTIONS = ("question", "query", "prompt", "instruction", "problem", "input", "inputs", "user", "human")
_ANSWERS = ("answer", "response", "completion", "output", "solution", "reply", "outputs", "assistant", "gpt")
"""Names of fields that are recognized as a question or its answer, used in error messages."""
_CONTEXTS = ("input", "context")
"""Names of fields with more input for a question."""
_FIELDS_OF_PAIR = 3


@dataclass(frozen=True)
class Completion:
    """A prompt and its completion as plain strings, which no template joins."""

    prompt: str
    completion: str


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
    if text_field == "text":
        _check_other_names(row, where)
    return "text"  # whose error names the fields


def _check_other_names(row: Mapping[str, Any], where: str) -> None:
    """Refuse a record of turns, or of a question and an answer, in fields of other names.

    Reading one of these fields as a text would train on half of the record.
    """
    names = {str(name).lower(): name for name in row}
    texts = [name for name in list_fields(row) if isinstance(find_value(row, name), str)]
    question, answer = (
        next((names[name] for name in usual if names.get(name) in texts), None)
        for usual in (_QUESTIONS, _ANSWERS)
    )
    more = next((names[name] for name in _CONTEXTS if names.get(name) in texts), None)
    turns = next((name for name, value in row.items() if _parse_turns(value)), None)
    strings = next((name for name, value in row.items() if _is_list_of_strings(value)), None)
    if turns is not None:
        form = "conversations" if _from_value(_parse_turns(row[turns])) else "messages"
        what, remedy = f"{turns!r} has the turns of a conversation", f"{{{form}: {turns}}}"
    elif question is not None and answer is not None:
        what = f"{question!r} and {answer!r} look like a question and its answer"
        context = f", input: {more}" if more not in (None, question, answer) else ""
        remedy = (
            f"{{instruction: {question}{context}, output: {answer}}} for the chat template, or to "
            f"{{prompt: {question}, completion: {answer}}} for plain text"
        )
    elif strings is not None:
        raise _refused(
            where,
            f"{strings} is a list of strings, not the turns of a conversation or one text; write it as "
            f"{EXPECTED['messages']}, or as a string",
        )
    elif len(texts) > 1:
        pairs = "" if len(texts) < _FIELDS_OF_PAIR else ", to {prompt: A, chosen: B, rejected: C} for pairs"
        raise UserError(
            f"data.columns: {where}: no field 'text', and the fields are {listed(list_fields(row))}; set "
            f"data.columns to {{prompt: A, completion: B}} or {{instruction: A, output: B}} to train on B as "
            f"the answer to A{pairs}, or set data.text_field to train on one field only"
        )
    else:
        return
    raise UserError(
        f"data.columns: {where}: {what}, which no format of data.format names so (the fields are "
        f"{listed(map(str, row))}); set data.columns to {remedy}"
    )


def _is_list_of_strings(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], str)


def _parse_turns(value: Any) -> list[Any]:
    """Return the turns in a value, which may be JSON. Empty if the value is not a list of turns."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return []
    said = isinstance(value, list) and value and isinstance(value[0], Mapping)
    return value if said and ({"role", "content"} <= value[0].keys() or _from_value(value)) else []


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
            raise _refused(where, "completion is empty; remove the record")
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
    return _conversation(_read_messages(_list(row, key, "messages", where), where), row, where)


def _sharegpt(row: Mapping[str, Any], where: str) -> Conversation:
    messages: list[Message] = []
    for at, turn in enumerate(_list(row, "conversations", "sharegpt", where)):
        if not isinstance(turn, Mapping) or not {"from", "value"} <= turn.keys():
            keys = f" (its keys are {listed(map(str, turn))})" if isinstance(turn, Mapping) else ""
            raise _unlike("sharegpt", where, f"message {at + 1} has no from and value{keys}")
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
    return _conversation(messages, row, where)


def _prompt_completion(row: Mapping[str, Any], where: str) -> Conversation | Completion:
    for key in ("prompt", "completion"):
        if key not in row:
            raise _build_missing_field_error("prompt_completion", where, key, row)
    prompt, completion = row["prompt"], row["completion"]
    if row.get("label") is False or str(row.get("label")).lower() == "false":
        raise _refused(
            where,
            "label is false, which marks a completion as a bad example; remove the record, or the field "
            "label to train on the completion",
        )
    if isinstance(prompt, str) and isinstance(completion, str):
        for key in (*_SYSTEM_FIELDS, "tools", "functions", "chat_template_kwargs"):
            if not is_empty(row.get(key)):
                raise _refused(
                    where,
                    f"{key} cannot be used with a prompt of plain text; make prompt and completion lists of "
                    f"messages, or write {key} into the prompt and remove the field",
                )
        return Completion(valid(prompt), valid(completion))
    if not (isinstance(prompt, Sequence) and isinstance(completion, Sequence)) or str in map(
        type, (prompt, completion)
    ):
        raise _unlike("prompt_completion", where, f"they are {kind_of(prompt)} and {kind_of(completion)}")
    if not prompt or not completion:
        raise _refused(where, f"{'prompt' if not prompt else 'completion'} is empty; remove the record")
    messages = _read_messages([*prompt, *completion], where)
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
        if key not in row:
            raise _build_missing_field_error("preference", where, key, row)
        if not isinstance(said, str | list | tuple):
            raise _unlike("preference", where, f"{key} is {kind_of(said)}")
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
    for key in ("instruction", "input", "output"):
        value = row.get(key)
        if not isinstance(value, str) and not (value is None and key == "input"):
            if key not in row:
                raise _build_missing_field_error("alpaca", where, key, row)
            raise _unlike("alpaca", where, f"{key} is {kind_of(value)}")
        texts[key] = value or ""
    asked = "\n".join(part for part in (texts["instruction"], texts["input"]) if part)
    messages: list[Message] = []
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
    """Check the order of the roles, and read the other fields of the record."""
    if not messages:
        raise _refused(where, "the conversation is empty; remove the record")
    for key in _MEDIA:
        if not is_empty(row.get(key)):
            raise _refused(where, f"{key} is not empty; only text can be trained on: remove the field")
    if (system := _system_prompt(row, messages, where)) is not None:
        messages = [{"role": "system", "content": system}, *messages]
        prompt = None if prompt is None else prompt + 1
    for at, message in enumerate(messages):
        before = messages[at - 1]["role"] if at else None
        if message["role"] in _TOOLS and before not in ("assistant", *_TOOLS):
            raise _refused(
                where,
                f"message {at + 1} is from {message['role']}, after {before or 'nothing'}; it must follow "
                "the assistant's call",
            )
    tools = _tools(row, where)
    kwargs = _json(row.get("chat_template_kwargs"), "chat_template_kwargs", where) or {}
    if not isinstance(kwargs, Mapping):
        raise _refused(where, f"chat_template_kwargs is {kind_of(kwargs)}, not a mapping")
    return Conversation(tuple(messages), where, tuple(tools) if tools else None, prompt, kwargs)


def _changes_training(key: Any) -> bool:
    """Return whether a key of a message selects trained tokens in a way that is not read."""
    return key not in WEIGHT_KEYS and _CHANGES_TRAINING.search(str(key)) is not None


def _system_prompt(row: Mapping[str, Any], messages: Sequence[Message], where: str) -> str | None:
    """Return the system prompt in a separate field. None if there is none, or the messages begin with it."""
    read = {key: row[key] for key in _SYSTEM_FIELDS if not is_empty(row.get(key))}
    for key, value in read.items():
        if not isinstance(value, str):
            raise _refused(where, f"{key} is {kind_of(value)}; make it a string")
    if messages[0]["role"] in FIRST:
        for key, value in read.items():
            if value.strip() != messages[0].get("content", "").strip():
                said = f"a field {key} and a message from {messages[0]['role']}"
                raise _refused(where, f"{said}; remove one")
        return None
    if len({value.strip() for value in read.values()}) > 1:
        raise _refused(where, f"fields {' and '.join(read)} that differ; remove one")
    return next(iter(read.values()), None)


def _tools(row: Mapping[str, Any], where: str) -> list[Any] | None:
    """Return the JSON schemas in ``tools``, or in ``functions``, which is their older name at OpenAI."""
    read: dict[str, list[Any]] = {}
    for key in ("tools", "functions"):
        value = _json(row.get(key), key, where)
        if is_empty(value):
            continue
        if not (isinstance(value, list | tuple) and all(isinstance(tool, Mapping) for tool in value)):
            raise _refused(where, f"{key} is not a list of JSON schemas")
        read[key] = list(value)
    if "functions" in read:
        read["functions"] = [
            function if "function" in function else {"type": "function", "function": function}
            for function in read["functions"]
        ]
        if read.get("tools", read["functions"]) != read["functions"]:
            raise _refused(where, "fields tools and functions that differ; remove one")
    return next(iter(read.values()), None)


def is_empty(value: Any) -> bool:
    """Return whether a value is empty, like the values of keys that clients write into every message."""
    if isinstance(value, str):
        return value.strip() in ("", "[]", "{}", "null", "None")
    if isinstance(value, Mapping):
        return all(map(is_empty, value.values()))
    return value is None or (isinstance(value, list | tuple) and all(map(is_empty, value)))


def _read_messages(turns: Sequence[Any], where: str) -> list[Message]:
    """Convert each message to its one form.

    The answer to an OpenAI ``function_call`` has the role ``function``. The call becomes one of
    ``tool_calls``, so its answer becomes one of a ``tool``, otherwise a template may write only the call.
    """
    messages = [_message(message, where, at) for at, message in enumerate(turns)]
    called = False
    for message, written in zip(messages, turns, strict=True):
        called = called or not is_empty(written.get("function_call"))
        if called and message["role"] == "function":
            message["role"] = "tool"
    return messages


def _message(message: Any, where: str, at: int) -> Message:
    """Convert a message to its one form.

    Parts of a text are joined, tool calls become objects, and a key without a value is left out.
    """
    if not isinstance(message, Mapping) or "role" not in message:
        keys = f" (its keys are {listed(map(str, message))})" if isinstance(message, Mapping) else ""
        if isinstance(message, Mapping) and {"from", "value"} <= message.keys():
            keys += "; set data.format to sharegpt, and data.columns to {conversations: messages}"
        raise _unlike("messages", where, f"message {at + 1} has no role{keys}")
    role, content = message["role"], message.get("content")
    if role not in ROLES:
        raise _refused(where, f"message {at + 1} has role {role!r}; use {_listed(ROLES)}")
    read: Message = {
        key: value
        for key, value in message.items()
        if value is not None and not (is_empty(value) and (key in _OPTIONAL or _changes_training(key)))
    }
    for key in read:
        if _changes_training(key):
            raise _refused(
                where,
                f"message {at + 1} has {key}, which is not read; use {_listed(WEIGHT_KEYS)} with 0 or 1 "
                "for a complete message, or remove the key",
            )
    for key in WEIGHT_KEYS:
        if (weight := read.get(key, 0)) not in (0, 1):
            raise _refused(where, f"message {at + 1} has {key} {weight!r}; use 0 or 1")
    if "function_call" in read:
        if "tool_calls" in read:
            raise _refused(where, f"message {at + 1} has function_call and tool_calls; remove one")
        read["tool_calls"] = read.pop("function_call")
    if isinstance(content, list | tuple):
        content = read["content"] = "".join(_part(part, where, at) for part in content)
    if not isinstance(content, str) and (content is not None or "tool_calls" not in read):
        raise _refused(where, f"message {at + 1}: content is {kind_of(content)}; make it a string")
    for key in _REASONING:
        if not isinstance(read.get(key, ""), str):
            raise _refused(where, f"message {at + 1}: {key} is {kind_of(read[key])}; make it a string")
    if "tool_calls" in read:
        read["tool_calls"] = _calls(read["tool_calls"], where, at)
        read = {"role": role, "content": "", **read}  # a call without words
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
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name.strip():
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
    if key not in row:
        raise _build_missing_field_error(kind, where, key, row)
    if not isinstance(value, list | tuple):
        raise _unlike(kind, where, f"{key} is {kind_of(value)}")
    return value


def _listed(names: Any) -> str:
    return ", ".join(names)


def _refused(where: str, what: str) -> UserError:
    return RecordError(f"data.source: {where}: {one_line(what)}")


def _unlike(kind: Format, where: str, what: str) -> UserError:
    return _refused(where, f"{what}; a record of data.format {kind} looks like {EXPECTED[kind]}")


def _build_missing_field_error(kind: Format, where: str, key: str, row: Mapping[str, Any]) -> UserError:
    """Build the error for a record without the field ``key``."""
    near = find_similar(key, map(str, row))
    hint = f" (did you mean {near[0]}?)" if near else ""
    remedy = "" if near else f"; set data.columns, such as {{{key}: NAME}}, if another field has it"
    return _unlike(kind, where, f"{key} is missing{hint}: the fields are {listed(map(str, row))}{remedy}")
