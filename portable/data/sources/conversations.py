"""Parse records in various conversation formats, and convert them to :class:`Conversation`.

The messages have the format that transformers' ``apply_chat_template`` expects. This module does
not depend on a template or a tokenizer.
"""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from portable.converters.similar_names import find_similar_names
from portable.data.sources.documents import (
    DEFAULT_TRAINED_ROLES,
    MAX_IMAGE_FILE_BYTES,
    WEIGHT_KEYS,
    Conversation,
    Document,
    ImageReference,
    Message,
    RecordError,
    count_images,
    describe_type,
    format_name_list,
    get_field_value,
    get_message_text,
    iter_field_names,
    replace_surrogates,
)
from portable.errors import UserError, to_one_line
from portable.formatting import format_count

if TYPE_CHECKING:
    from collections.abc import Callable

    from portable.data.sources.documents import RecordFormat


EXAMPLE_RECORDS: dict[RecordFormat, str] = {
    "messages": '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}]}',
    "sharegpt": '{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", ...}]}',
    "prompt_completion": '{"prompt": ..., "completion": ...}, both strings or both lists of messages',
    "preference": '{"prompt": ..., "chosen": ..., "rejected": ...}, all strings or all lists of messages',
    "alpaca": '{"instruction": "...", "input": "...", "output": "..."}, all strings',
}
"""Example record for each format, used in error messages."""
SYSTEM_ROLES = ("system", "developer")
RARE_ROLES = ("ipython", "function", "observation")
"""Roles for tool results that some chat templates do not support."""
ROLES = (*SYSTEM_ROLES, "user", "assistant", "tool", *RARE_ROLES)
"""All roles that a message may have."""
_SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "chatgpt", "bot"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "function_response", "tool_response"), "tool"),
    "function_call": "function_call",
    "system": "system",
    "developer": "developer",
}
"""Mapping from the sender of a ShareGPT message to a role.

``function_call`` is not a role. It marks a tool call of the assistant.
"""
_TOOL_ROLES = ("tool", *RARE_ROLES)
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Message keys that may contain the reasoning before an answer. All three have the same meaning."""
_TRAINING_KEY_PATTERN = re.compile(r"train|loss|mask|weight", re.IGNORECASE)
"""Pattern of message keys that may control which tokens contribute to the loss.

If a message has such a key with a value, and the key is not in ``WEIGHT_KEYS``, the record is rejected.
Ignoring the key might train the wrong tokens.
"""
_OPTIONAL_KEYS = {"tool_calls", "function_call", *_REASONING_KEYS, "name", "tool_call_id"}
"""Keys that some programs write into every message, often without a value.

A key with an empty value is treated like a missing key.
"""
_SYSTEM_FIELDS = ("system", "system_prompt")
"""Names of the fields that may contain a system prompt, in records of all conversation formats."""
_IMAGE_FIELDS = ("images", "image")
"""Names of the fields that may contain the images of a record's messages."""
_OTHER_MEDIA_FIELDS = ("video", "videos", "audio", "audios")
"""Names of fields for media that are not supported."""
_IMAGE_FIELD_PATTERN = re.compile(r"image|img|picture|photo", re.IGNORECASE)
"""Pattern of field names that suggest images, used in error messages."""
_IMAGE_MARK = "<image>"
"""Placeholder for an image in the text of a message, in the formats of LLaVA and ms-swift."""
_IMAGE_PART_TYPES = ("image", "image_url", "input_image")
"""Values of ``type`` that mark a content part as an image."""
_PNG_MODES = ("1", "L", "LA", "I;16", "P", "RGB", "RGBA")
"""Pillow image modes that a PNG file can store."""
_IMAGE_DATA_URL = re.compile(r"data:image/[\w.+-]+;base64,", re.IGNORECASE)
_QUESTION_FIELDS = (
    "question",
    "query",
    "prompt",
    "instruction",
    "problem",
    "input",
    "inputs",
    "user",
    "human",
)
_ANSWER_FIELDS = (
    "answer",
    "response",
    "completion",
    "output",
    "solution",
    "reply",
    "outputs",
    "assistant",
    "gpt",
)
"""Names of fields that probably contain an answer.

Error messages use these names and ``_QUESTION_FIELDS`` to suggest a value of ``data.columns``.
"""
_CONTEXT_FIELDS = ("input", "context")
"""Names of fields that probably contain additional input for a question, used in error messages."""
_FIELDS_OF_PAIR = 3


@dataclass(frozen=True)
class PlainCompletion:
    """Prompt and completion as plain strings, which are concatenated without a template.

    Attributes:
        prompt: Text of the prompt.
        completion: Text of the completion.
    """

    prompt: str
    completion: str


def detect_record_format(row: Mapping[str, Any], text_field: str, location: str) -> RecordFormat:
    """Detect the format of a record from its fields.

    See :data:`EXAMPLE_RECORDS` for the fields of each format. If a record fits several of the
    formats ``messages``, ``sharegpt``, ``prompt_completion`` and ``alpaca``, the first format in
    this list is used. A record is ambiguous if it fits ``text`` or ``preference`` in addition to
    another format.

    Args:
        row: Values of the record, keyed by field.
        text_field: Value of ``data.text_field``. If it differs from the default ``text``, the user
            has chosen a text field, so the record has the format ``text``.
        location: Location of the record in its source, used in error messages.

    Returns:
        The format, or ``text`` if no format fits. Reading such a record as text raises an error
        that lists its fields.

    Raises:
        RecordError: If a field contains JSON that cannot be parsed.
        UserError: If the record is ambiguous, or if the fields look like a known format with
            different names.
    """
    formats: list[RecordFormat] = []
    if text_field in row or ("." in text_field and text_field.partition(".")[0] in row):
        formats.append("text")
    if text_field == "text":  # otherwise, the user has selected a text column
        turns = row.get("conversations")
        if isinstance(turns, str) and _is_list_or_json_list(turns):
            turns = _parse_json(turns, "conversations", location)
        if _is_list_or_json_list(row.get("messages")) or (
            isinstance(turns, list) and not _is_sharegpt(turns)
        ):
            formats.append("messages")
        elif isinstance(turns, list):
            formats.append("sharegpt")
        elif {"prompt", "completion"} <= row.keys():
            formats.append("prompt_completion")
        elif {"instruction", "output"} <= row.keys():
            formats.append("alpaca")
        if {"chosen", "rejected"} <= row.keys():
            formats.append("preference")
    if len(formats) == 1:
        return formats[0]
    names = ", ".join(map(str, row)) or "none"
    if formats:
        raise UserError(
            f"data.format: {location}: the fields {names} match several formats ({', '.join(formats)}); set "
            "data.format to one of these formats"
        )
    if text_field == "text":
        _refuse_renamed_fields(row, location)
    return "text"  # reading it as text raises an error that lists the fields


def _refuse_renamed_fields(row: Mapping[str, Any], location: str) -> None:
    """Reject a record whose format is unknown, but whose fields suggest one of the known formats.

    Such a record contains the messages of a conversation, a question and its answer, a list of
    strings, or several texts. If only one of these fields were read as text, the model would be
    trained on only part of the record. Does nothing for other records.

    Args:
        row: Values of the record, keyed by field.
        location: Location of the record in its source, used in error messages.

    Raises:
        UserError: If the record is rejected. The message suggests a value of ``data.columns`` or
            another remedy.
    """
    names = {str(name).lower(): name for name in row}
    texts = [name for name in iter_field_names(row) if isinstance(get_field_value(row, name), str)]
    question, answer = (
        next((names[name] for name in usual if names.get(name) in texts), None)
        for usual in (_QUESTION_FIELDS, _ANSWER_FIELDS)
    )
    context_field = next((names[name] for name in _CONTEXT_FIELDS if names.get(name) in texts), None)
    turns = next((name for name, value in row.items() if _parse_turns(value)), None)
    strings = next((name for name, value in row.items() if _is_list_of_strings(value)), None)
    if turns is not None:
        form = "conversations" if _is_sharegpt(_parse_turns(row[turns])) else "messages"
        description, remedy = f"{turns!r} contains the messages of a conversation", f"{{{form}: {turns}}}"
    elif question is not None and answer is not None:
        description = f"{question!r} and {answer!r} look like a question and its answer"
        context = f", input: {context_field}" if context_field not in (None, question, answer) else ""
        image_field = _find_image_field(row)
        if image_field is None:
            remedy = (
                f"{{instruction: {question}{context}, output: {answer}}} for the chat template, or to "
                f"{{prompt: {question}, completion: {answer}}} for plain text"
            )
        else:  # plain text records cannot have images
            images = "" if image_field in _IMAGE_FIELDS else f", images: {image_field}"
            remedy = f"{{instruction: {question}{context}, output: {answer}{images}}}"
    elif strings is not None:
        raise UserError(
            f"data.source: {location}: {to_one_line(strings)} is a list of strings, which is neither a "
            f"conversation nor a text; write the turns as {EXAMPLE_RECORDS['messages']}, or the text as one "
            "string"
        )
    elif len(texts) > 1:
        pairs = "" if len(texts) < _FIELDS_OF_PAIR else ", to {prompt: A, chosen: B, rejected: C} for pairs"
        raise UserError(
            f"data.columns: {location}: there is no field 'text' (the fields are "
            f"{format_name_list(iter_field_names(row))}); set data.columns to {{prompt: A, completion: B}} "
            f"or {{instruction: A, output: B}} to train on B as the answer to A{pairs}, or set "
            "data.text_field to train on one field only"
        )
    else:
        return
    raise UserError(
        f"data.columns: {location}: {description}, but no data.format uses such field names (the fields are "
        f"{format_name_list(map(str, row))}); set data.columns to {remedy}"
    )


def _find_image_field(row: Mapping[str, Any]) -> str | None:
    """Guess which field of a record contains its images. Used in error messages.

    Returns:
        Name of a nonempty field whose name suggests images. None if no field fits.
    """
    names = [str(name) for name, value in row.items() if not is_empty(value)]
    present_names = (name for name in _IMAGE_FIELDS if name in names)
    return next(present_names, next(filter(_IMAGE_FIELD_PATTERN.search, names), None))


def _is_list_of_strings(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], str)


def _parse_turns(value: Any) -> list[Any]:
    """Return the messages in a field's value. Empty if the value is not a conversation.

    Args:
        value: Value of any field. A list may also be given as JSON.

    Returns:
        The list, if its first item has the keys of a message. Otherwise, an empty list.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return []
    is_list_of_mappings = isinstance(value, list) and value and isinstance(value[0], Mapping)
    return (
        value
        if is_list_of_mappings and ({"role", "content"} <= value[0].keys() or _is_sharegpt(value))
        else []
    )


def _is_list_or_json_list(value: Any) -> bool:
    """Return whether a value is a list, or a string that begins like a JSON list.

    Cells of .csv files contain lists as JSON.
    """
    return isinstance(value, list) or (isinstance(value, str) and value.lstrip().startswith("["))


def _is_sharegpt(turns: list[Any]) -> bool:
    """Return whether the messages are in ShareGPT's format, which has the key ``from``.

    True for an empty list.
    """
    return not turns or (isinstance(turns[0], Mapping) and "from" in turns[0])


def parse_documents(
    row: Mapping[str, Any],
    record_format: RecordFormat,
    location: str,
    roles: frozenset[str],
    columns: tuple[float, ...],
) -> list[Document]:
    """Convert a record with a conversation, a completion or a preference to documents.

    Args:
        row: Values of the record, keyed by field.
        record_format: Format of the record. Any format except ``text`` and ``samples``.
        location: Location of the record in its source, used in error messages.
        roles: Roles whose messages contribute to the loss. Ignored for a preference, which uses
            ``DEFAULT_TRAINED_ROLES``.
        columns: Numbers from the additional columns of ``data.columns``, copied to each document.

    Returns:
        One document. For a preference, two documents: the chosen one and the rejected one.

    Raises:
        UserError: If the record is not valid.
    """
    conversations = (
        parse_preference(row, location)
        if record_format == "preference"
        else [parse_conversation(row, record_format, location, roles)]
    )
    return [_build_document(conversation, location, columns) for conversation in conversations]


def _build_document(
    conversation: Conversation | PlainCompletion, location: str, columns: tuple[float, ...]
) -> Document:
    """Build the document of a conversation or a completion. Raises UserError if a completion is empty."""
    if isinstance(conversation, PlainCompletion):
        if not conversation.completion:
            raise _build_record_error(location, "completion is empty; remove the record")
        return Document(
            conversation.prompt + conversation.completion,
            num_prompt_chars=len(conversation.prompt),
            extra_columns=columns,
        )
    return Document(conversation.joined_text, conversation=conversation, extra_columns=columns)


def parse_conversation(
    row: Mapping[str, Any],
    record_format: RecordFormat,
    location: str,
    roles: frozenset[str] = DEFAULT_TRAINED_ROLES,
) -> Conversation | PlainCompletion:
    """Convert a record to a conversation. The record must not be plain text.

    A preference record is converted to its chosen conversation.

    Args:
        row: Values of the record, keyed by field.
        record_format: Format of the record. Any format except ``text`` and ``samples``.
        location: Location of the record in its source, used in error messages.
        roles: Roles whose messages contribute to the loss.

    Returns:
        A conversation, or a completion if prompt and completion are strings.

    Raises:
        UserError: If the record is not valid, or if no message of a conversation contributes to the
            loss. With the default ``roles``, messages of the prompt do not count. The completion of
            a :class:`PlainCompletion` is not checked, and may be empty.
    """
    conversation = _PARSERS[record_format](row, location)
    if isinstance(conversation, PlainCompletion):
        return conversation
    conversation = replace(conversation, trained_roles=roles)
    begin = 0 if roles != DEFAULT_TRAINED_ROLES else conversation.num_prompt_messages or 0
    if not any(index >= begin for index in conversation.trained_message_indices):
        raise _build_record_error(
            location,
            f"no message with role {conversation.trained_roles_text} has text to train on; remove the record",
        )
    return conversation


def _parse_openai_record(row: Mapping[str, Any], location: str) -> Conversation:
    """Parse a record with messages in OpenAI's format. Raises UserError if the record is not valid.

    Reads the field ``messages``, or ``conversations`` if there is no ``messages``.
    """
    key = "conversations" if "conversations" in row and "messages" not in row else "messages"
    return _build_conversation(
        _normalize_messages(_parse_list_field(row, key, "messages", location), location), row, location
    )


def _parse_sharegpt_record(row: Mapping[str, Any], location: str) -> Conversation:
    """Parse a record with ``conversations`` in ShareGPT's format. Raises UserError if it is not valid."""
    messages: list[Message] = []
    for index, turn in enumerate(_parse_list_field(row, "conversations", "sharegpt", location)):
        if not isinstance(turn, Mapping) or not {"from", "value"} <= turn.keys():
            keys = f" (its keys are {format_name_list(map(str, turn))})" if isinstance(turn, Mapping) else ""
            raise _build_format_error(
                "sharegpt",
                location,
                f"message {index + 1} lacks the key 'from' or 'value'{keys}; write both keys in each message",
            )
        role = _SHAREGPT_ROLES.get(turn["from"]) if isinstance(turn["from"], str) else None
        if role is None:
            raise _build_record_error(
                location,
                f"message {index + 1} has the unsupported role {turn['from']!r} in the key 'from'; use one "
                f"of {_join_with_commas(_SHAREGPT_ROLES)}",
            )
        rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
        if role == "function_call":
            rest |= {"role": "assistant", "tool_calls": turn["value"]}
        else:
            rest |= {"role": role, "content": turn["value"]}
        messages.append(_normalize_message(rest, location, index))
    return _build_conversation(messages, row, location)


def _parse_prompt_completion_record(row: Mapping[str, Any], location: str) -> Conversation | PlainCompletion:
    """Parse a record with ``prompt`` and ``completion``, both strings or both lists of messages.

    Returns:
        A PlainCompletion for strings, otherwise a Conversation.

    Raises:
        UserError: If a field is missing or invalid, or if ``label`` marks the completion as a bad example.
    """
    for key in ("prompt", "completion"):
        if key not in row:
            raise _build_missing_field_error("prompt_completion", location, key, row)
    prompt, completion = row["prompt"], row["completion"]
    if row.get("label") is False or str(row.get("label")).lower() == "false":
        raise _build_record_error(
            location,
            "label is false, which marks a completion as a bad example; remove the record, or remove its "
            "label field to train on the completion",
        )
    if isinstance(prompt, str) and isinstance(completion, str):
        for key in _IMAGE_FIELDS:
            if not is_empty(row.get(key)):
                raise _build_record_error(
                    location,
                    f"{key} cannot be used with a plain-text prompt; write prompt and completion as lists of "
                    "messages, or set data.columns to {instruction: prompt, output: completion}",
                )
        for key in (*_SYSTEM_FIELDS, "tools", "functions", "chat_template_kwargs"):
            if not is_empty(row.get(key)):
                raise _build_record_error(
                    location,
                    f"{key} cannot be used with a plain-text prompt; write the prompt and each answer as "
                    f"lists of messages, or move the content of {key} into the prompt",
                )
        return PlainCompletion(replace_surrogates(prompt), replace_surrogates(completion))
    if not (isinstance(prompt, Sequence) and isinstance(completion, Sequence)) or str in map(
        type, (prompt, completion)
    ):
        raise _build_format_error(
            "prompt_completion",
            location,
            f"prompt is {describe_type(prompt)}, and the completion (or chosen or rejected) is "
            f"{describe_type(completion)}; use two strings or two lists of messages",
        )
    if not prompt or not completion:
        raise _build_record_error(
            location, f"{'prompt' if not prompt else 'completion'} is empty; remove the record"
        )
    messages = _normalize_messages([*prompt, *completion], location)
    return _build_conversation(messages, row, location, prompt=len(prompt))


def parse_preference(row: Mapping[str, Any], location: str) -> tuple[Conversation | PlainCompletion, ...]:
    """Convert a preference record to its chosen and its rejected conversation.

    Both conversations include the prompt.

    If both answers are lists of messages and the prompt is missing, empty or a string, the answers
    are complete conversations. A string prompt is then ignored, and the prompt consists of the
    initial messages that both answers share. The last message of an answer never belongs to the
    prompt.

    Returns:
        The chosen and the rejected conversation. They are completions if the prompt and both
        answers are strings.

    Raises:
        UserError: If the record is not valid, or if it contains images.
    """
    chosen_messages, rejected_messages = chosen, rejected = row.get("chosen"), row.get("rejected")
    prompt = row.get("prompt")
    for key, answer in (("chosen", chosen), ("rejected", rejected)):
        if key not in row:
            raise _build_missing_field_error("preference", location, key, row)
        if not isinstance(answer, str | list | tuple):
            raise _build_format_error(
                "preference",
                location,
                f"{key} is {describe_type(answer)}; use a string or a list of messages",
            )
    are_conversations = isinstance(chosen, list | tuple) and isinstance(rejected, list | tuple)
    if are_conversations and (not prompt or isinstance(prompt, str)):
        # The answers are complete conversations. A string prompt only repeats their first question, so it is
        # ignored.
        chosen_messages, rejected_messages = list(chosen or ()), list(rejected or ())
        most = min(len(chosen_messages), len(rejected_messages)) - 1
        prompt_length = next(
            (index for index in range(most) if chosen_messages[index] != rejected_messages[index]),
            max(most, 0),
        )
        if prompt_length == 0:
            raise _build_format_error(
                "preference",
                location,
                "chosen and rejected have no prompt in common, so the prompt is unknown; begin both "
                "with the prompt, or write the prompt as a list of messages in a field named prompt",
            )
        prompt, chosen_messages, rejected_messages = (
            chosen_messages[:prompt_length],
            chosen_messages[prompt_length:],
            rejected_messages[prompt_length:],
        )
    elif prompt is None:
        raise _build_format_error("preference", location, "prompt is missing; add a field named prompt")
    rows = (
        {**row, "prompt": prompt, "completion": answer} for answer in (chosen_messages, rejected_messages)
    )
    conversations = tuple(parse_conversation(row, "prompt_completion", location) for row in rows)
    if any(isinstance(conversation, Conversation) and conversation.images for conversation in conversations):
        raise _build_record_error(
            location, "the record has images, but preference losses support only text; remove the images"
        )
    return conversations


def _parse_alpaca_record(row: Mapping[str, Any], location: str) -> Conversation:
    """Parse a record with ``instruction``, ``output`` and an optional ``input``.

    The user message is the instruction and the input, joined with a line break. An optional
    ``history`` contains previous turns as (question, answer) pairs. All messages except the output
    form the prompt. Raises UserError if a field is invalid.
    """
    texts: dict[str, str] = {}
    for key in ("instruction", "input", "output"):
        value = row.get(key)
        if not isinstance(value, str) and not (value is None and key == "input"):
            if key not in row:
                raise _build_missing_field_error("alpaca", location, key, row)
            raise _build_format_error(
                "alpaca", location, f"{key} is {describe_type(value)}; convert {key} to a string"
            )
        texts[key] = value or ""
    question = "\n".join(part for part in (texts["instruction"], texts["input"]) if part)
    messages: list[Message] = []
    history = row.get("history") or ()
    for pair in history if isinstance(history, Sequence) else (history,):
        if not isinstance(pair, Sequence) or len(pair) != 2 or {type(text) for text in pair} != {str}:
            raise _build_format_error(
                "alpaca",
                location,
                "history is not a list of pairs of strings; write history like [[QUESTION, ANSWER], ...]",
            )
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    messages.append({"role": "user", "content": question})
    prompt = len(messages)
    messages.append({"role": "assistant", "content": texts["output"]})
    return _build_conversation(messages, row, location, prompt=prompt)


_PARSERS: dict[RecordFormat, Callable[[Mapping[str, Any], str], Conversation | PlainCompletion]] = {
    "messages": _parse_openai_record,
    "sharegpt": _parse_sharegpt_record,
    "prompt_completion": _parse_prompt_completion_record,
    "preference": lambda row, where: parse_preference(row, where)[0],
    "alpaca": _parse_alpaca_record,
}


def _build_conversation(
    messages: list[Message], row: Mapping[str, Any], location: str, *, prompt: int | None = None
) -> Conversation:
    """Build a conversation from its messages and the other fields of the record.

    Args:
        messages: Normalized messages. See :func:`_normalize_message`.
        row: Values of the record. The system prompt, tools and template variables are read from it.
        location: Location of the record in its source, used in error messages.
        prompt: Number of messages at the start that form the prompt. None if the record does not mark a
            prompt.

    Raises:
        UserError: If there are no messages, if the record has unsupported media, if a tool message does
            not follow a message of the assistant or of another tool, or if another field is not valid.
    """
    if not messages:
        raise _build_record_error(location, "the conversation is empty; remove the record")
    for key in _OTHER_MEDIA_FIELDS:
        if not is_empty(row.get(key)):
            raise _build_record_error(
                location,
                f"the record has {key}, but training supports only text and images; remove the {key} field",
            )
    messages, images = _collect_images(messages, row, location)
    if (system := _find_system_prompt(row, messages, location)) is not None:
        messages = [{"role": "system", "content": system}, *messages]
        prompt = None if prompt is None else prompt + 1
    for index, message in enumerate(messages):
        before = messages[index - 1]["role"] if index else None
        if message["role"] in _TOOL_ROLES and before not in ("assistant", *_TOOL_ROLES):
            raise _build_record_error(
                location,
                f"message {index + 1 - (system is not None)} has role {message['role']}, but "
                f"{f'follows a message with role {before}' if before else 'is the first message'}; place "
                "the message after the assistant message with the tool call",
            )
    tools = _parse_tools(row, location)
    kwargs = _parse_json(row.get("chat_template_kwargs"), "chat_template_kwargs", location) or {}
    if not isinstance(kwargs, Mapping):
        raise _build_record_error(
            location,
            f"chat_template_kwargs is {describe_type(kwargs)}, not a mapping; use a mapping from names to "
            "values",
        )
    return Conversation(
        tuple(messages), location, tuple(tools) if tools else None, prompt, kwargs, images=images
    )


def _collect_images(
    messages: list[Message], row: Mapping[str, Any], location: str
) -> tuple[list[Message], tuple[ImageReference, ...]]:
    """Collect the images of a record, in the order of the messages.

    An image part of a message either contains its image, or is a placeholder for the next image
    in the record's field ``images`` or ``image``. If this field has images but there are no
    image parts, each ``<image>`` in the text is such a placeholder, except in answers. If the
    text contains no ``<image>`` either, all images are put before the text of the first user
    message.

    Args:
        messages: Normalized messages, whose image parts may contain an :class:`ImageReference`.
        row: Values of the record, keyed by field.
        location: Location of the record in its source, used in error messages.

    Returns:
        The messages, in which each image part is ``{"type": "image"}``, and the references to
        their images.

    Raises:
        UserError: If the number of images differs from the number of placeholders, if an answer
            contains an image, if there is no user message for the images, or if an image field
            is not valid. For the errors of a record without images, see
            :func:`_check_no_image_marks`.
    """
    from_field = _parse_image_fields(row, location)
    if not count_images(messages):
        if from_field:
            messages = _insert_image_parts(messages, len(from_field), location)
        else:
            _check_no_image_marks(messages, row, location)
    remaining, images = list(from_field), list[ImageReference]()
    num_places = sum(
        part["type"] == "image" and "image" not in part
        for message in messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
    )
    if num_places != len(from_field):
        images_text = f"the image field of the record has {format_count(len(from_field), 'image')}"
        raise _build_record_error(
            location,
            f"the messages have {format_count(num_places, 'image part')} without a path or URL, but "
            f"{images_text}; write exactly one image into this field for each of these parts",
        )
    converted = []
    for index, message in enumerate(messages):
        if count_images([message]):
            if message["role"] == "assistant":
                raise _build_image_answer_error(location, index)
            parts = []
            for part in message["content"]:
                if part["type"] == "image":
                    images.append(part["image"] if "image" in part else remaining.pop(0))
                    part = {"type": "image"}
                parts.append(part)
            message = {**message, "content": parts}
        converted.append(message)
    return converted, tuple(images)


def _parse_image_fields(row: Mapping[str, Any], location: str) -> list[ImageReference]:
    """Return the image references in a record's field ``images`` or ``image``, or an empty list.

    Raises:
        UserError: If both fields have images, or if a value is not an image reference.
    """
    fields = {key: row[key] for key in _IMAGE_FIELDS if not is_empty(row.get(key))}
    if len(fields) > 1:
        raise _build_record_error(
            location,
            f"the record has images in both fields {' and '.join(fields)}; remove one of the fields",
        )
    for key, value in fields.items():
        if isinstance(value, str) and value.lstrip().startswith("["):
            value = _parse_json(value, key, location)
        values = value if isinstance(value, list | tuple) else [value]
        return [_parse_image_reference(item, key, location) for item in values]
    return []


def _check_no_image_marks(messages: list[Message], row: Mapping[str, Any], location: str) -> None:
    """Check that a record without images does not use ``<image>`` as an image placeholder.

    The function is called if the messages of the record have no image parts, and its image field
    is missing or empty. If the field is missing and no other field seems to contain images,
    ``<image>`` is accepted as ordinary text.

    Raises:
        UserError: If a message contains ``<image>``, and either the image field is empty or another
            field seems to contain the images.
    """
    if not any(_IMAGE_MARK in get_message_text(message) for message in messages):
        return
    if (field := _find_image_field(row)) is not None:
        raise RecordError(
            f"data.columns: {location}: the messages contain {_IMAGE_MARK}, but the images are in the "
            f"field {field}; set data.columns to {{images: {field}}}, or remove {_IMAGE_MARK}"
        )
    if any(key in row for key in _IMAGE_FIELDS):
        raise _build_record_error(
            location,
            f"the messages contain {_IMAGE_MARK}, but the image field is empty; add the image to this "
            f"field, or remove {_IMAGE_MARK}",
        )


def _build_image_answer_error(location: str, index: int) -> UserError:
    """Build the error for an answer that contains an image. ``index`` is the index of its message."""
    return _build_record_error(
        location,
        f"message {index + 1} is an answer with an image, but answers can contain only text; remove the "
        "image",
    )


def _insert_image_parts(messages: list[Message], num_images: int, location: str) -> list[Message]:
    """Insert ``num_images`` image parts into messages that have none.

    Each ``<image>`` in the text is replaced by an image part, except in messages of the assistant.
    If no message contains ``<image>``, the image parts are put before the text of the first user
    message.

    Args:
        messages: Normalized messages without image parts.
        num_images: Number of images in the record, at least 1.
        location: Location of the record in its source, used in error messages.

    Raises:
        UserError: If messages contain ``<image>``, but not exactly ``num_images`` times outside of
            the messages of the assistant. Also if no message contains ``<image>``, and there is no
            user message.
    """
    texts = [get_message_text(message) for message in messages]
    marks = [
        text.count(_IMAGE_MARK) if message["role"] != "assistant" else 0
        for message, text in zip(messages, texts, strict=True)
    ]
    if sum(marks) != num_images:
        for index, (text, count) in enumerate(zip(texts, marks, strict=True)):
            if not count and _IMAGE_MARK in text:
                raise _build_image_answer_error(location, index)
    if not any(marks):
        first = next((index for index, message in enumerate(messages) if message["role"] == "user"), None)
        if first is None:
            raise _build_record_error(
                location, ("the record has images, but no user message; add a user message")
            )
        parts = [{"type": "image"}] * num_images + [{"type": "text", "text": texts[first]}]
        return [*messages[:first], {**messages[first], "content": parts}, *messages[first + 1 :]]
    if sum(marks) != num_images:
        raise _build_record_error(
            location,
            f"the messages contain {_IMAGE_MARK} {format_count(sum(marks), 'time')}, but the record has "
            f"{format_count(num_images, 'image')}; write {_IMAGE_MARK} once for each image",
        )
    return [
        {**message, "content": _split_at_image_marks(text)} if count else message
        for message, text, count in zip(messages, texts, marks, strict=True)
    ]


def _split_at_image_marks(text: str) -> list[dict[str, Any]]:
    """Split a text at ``<image>`` into text parts and image parts."""
    parts: list[dict[str, Any]] = []
    for index, piece in enumerate(text.split(_IMAGE_MARK)):
        parts += [{"type": "image"}] if index else []
        parts += [{"type": "text", "text": piece}] if piece else []
    return parts


def _parse_image_reference(value: Any, name: str, location: str) -> ImageReference:
    """Parse an image reference: a path, a URL, bytes, a Pillow image, or a mapping with one of these.

    A URL may be a data URL, whose base64 text is decoded. The file or URL is not read.

    Args:
        value: Value in a record.
        name: Name of the value, used in error messages.
        location: Location of the record in its source, used in error messages.

    Raises:
        UserError: If the value is not an image reference, or if a data URL is invalid or too
            large.
    """
    if isinstance(value, Mapping):
        keys = [
            key
            for key in ("bytes", "data", "path", "url", "image", "image_url", "source")
            if not is_empty(value.get(key))
        ]
        if keys:  # an Image feature of the datasets library contains the bytes of a file and the file's name
            return _parse_image_reference(_decode_base64(value, keys[0]), f"{name}.{keys[0]}", location)
    if isinstance(value, bytes | bytearray):
        return ImageReference(data=bytes(value))
    if isinstance(value, str) and value.strip():
        if _IMAGE_DATA_URL.match(value):
            return ImageReference(data=_parse_base64(value.partition(",")[2], name, location))
        if re.match(r"https?://", value, re.IGNORECASE):
            return ImageReference(url=value)
        if re.match(r"file://", value, re.IGNORECASE):
            value = value[len("file://") :]
        return ImageReference(path=value)
    if callable(getattr(value, "save", None)):  # a Pillow image, which user-defined code may yield
        return ImageReference(data=_encode_png(value))
    raise _build_record_error(
        location,
        f"{name} is {'a blank string' if isinstance(value, str) else describe_type(value)}, not an image; "
        "specify a path, a URL or the bytes of a file",
    )


def _encode_png(image: Any) -> bytes:
    """Encode a Pillow image as PNG, rotated according to its EXIF data."""
    from PIL import ImageOps

    rotated = ImageOps.exif_transpose(image)
    buffer = io.BytesIO()
    (rotated if rotated.mode in _PNG_MODES else rotated.convert("RGB")).save(buffer, format="PNG")
    return buffer.getvalue()


def _decode_base64(value: Mapping[str, Any], key: str) -> Any:
    """Return the value of ``key`` in a mapping that describes an image.

    A string under the key ``data`` is base64 text, and is returned as a data URL. Anthropic's
    format stores images in this way, together with ``type: base64``.
    """
    if key == "data" and isinstance(value[key], str):
        return f"data:image/any;base64,{value[key]}"
    return value[key]


def _parse_base64(text: str, name: str, location: str) -> bytes:
    """Decode the base64 text of an image.

    Raises UserError if the text is invalid, or if the decoded image is larger than
    ``MAX_IMAGE_FILE_BYTES`` (64 MiB).
    """
    if len(text) * 3 // 4 > MAX_IMAGE_FILE_BYTES + 2:  # up to 2 characters are padding
        raise _build_record_error(
            location,
            f"{name} is larger than the limit of {MAX_IMAGE_FILE_BYTES >> 20} MiB; scale the image down",
        )
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise _build_record_error(
            location,
            (f"{name} is not a base64-encoded image ({to_one_line(error)}); correct or remove the image"),
        ) from error


def _is_unread_training_key(key: Any) -> bool:
    """Return whether a message key looks like an unsupported loss setting.

    The name of such a key contains train, loss, mask or weight, but is not in ``WEIGHT_KEYS``.
    """
    return key not in WEIGHT_KEYS and _TRAINING_KEY_PATTERN.search(str(key)) is not None


def _find_system_prompt(row: Mapping[str, Any], messages: Sequence[Message], location: str) -> str | None:
    """Return the system prompt in the field ``system`` or ``system_prompt`` of a record.

    Returns:
        The system prompt. None if both fields are missing or empty, or if the messages already
        begin with a message of the role ``system`` or ``developer``.

    Raises:
        UserError: If a field is not a string, or if there are different system prompts.
    """
    prompts = {key: row[key] for key in _SYSTEM_FIELDS if not is_empty(row.get(key))}
    for key, value in prompts.items():
        if not isinstance(value, str):
            raise _build_record_error(location, f"{key} is {describe_type(value)}; convert {key} to a string")
    if messages[0]["role"] in SYSTEM_ROLES:
        for key, value in prompts.items():
            if value.strip() != get_message_text(messages[0]).strip():
                raise _build_record_error(
                    location,
                    f"the field {key} and the message with role {messages[0]['role']} contain different "
                    "system prompts; remove one of the prompts",
                )
        return None
    if len({value.strip() for value in prompts.values()}) > 1:
        raise _build_record_error(
            location,
            f"the fields {' and '.join(prompts)} contain different system prompts; remove one of the fields",
        )
    return next(iter(prompts.values()), None)


def _parse_tools(row: Mapping[str, Any], location: str) -> list[Any] | None:
    """Return the JSON schemas of the tools in the field ``tools`` or OpenAI's deprecated ``functions``.

    The schemas in ``functions`` are converted to the format of ``tools``.

    Returns:
        The schemas. None if the record has no tools.

    Raises:
        UserError: If a field is not a list of schemas, or if both fields exist and differ.
    """
    tools: dict[str, list[Any]] = {}
    for key in ("tools", "functions"):
        value = _parse_json(row.get(key), key, location)
        if is_empty(value):
            continue
        if not (isinstance(value, list | tuple) and all(isinstance(tool, Mapping) for tool in value)):
            raise _build_record_error(
                location,
                f"the field {key} is not a list of function definitions; use a list of JSON objects, each "
                "with the name and the parameters of a function",
            )
        tools[key] = list(value)
    if "functions" in tools:
        tools["functions"] = [
            function if "function" in function else {"type": "function", "function": function}
            for function in tools["functions"]
        ]
        if tools.get("tools", tools["functions"]) != tools["functions"]:
            raise _build_record_error(
                location, "the fields tools and functions contain different tools; remove one of the fields"
            )
    return next(iter(tools.values()), None)


def is_empty(value: Any) -> bool:
    """Return whether a value of a record counts as missing.

    None and a blank string count as missing. A string that spells an empty value also does, such as
    ``"[]"`` or ``"null"``. A list or mapping counts as missing if all its values do.
    """
    if isinstance(value, str):
        return value.strip() in ("", "[]", "{}", "null", "None")
    if isinstance(value, Mapping):
        return all(map(is_empty, value.values()))
    return value is None or (isinstance(value, list | tuple) and all(map(is_empty, value)))


def _normalize_messages(turns: Sequence[Any], location: str) -> list[Message]:
    """Normalize the messages of a record. See :func:`_normalize_message`.

    OpenAI's deprecated ``function_call`` becomes a tool call. In messages after such a call, the
    role ``function`` becomes ``tool``, because a chat template might otherwise render the call but
    skip the result.
    """
    messages = [_normalize_message(message, location, index) for index, message in enumerate(turns)]
    has_function_call = False
    for message, turn in zip(messages, turns, strict=True):
        has_function_call = has_function_call or not is_empty(turn.get("function_call"))
        if has_function_call and message["role"] == "function":
            message["role"] = "tool"
    return messages


def _normalize_message(message: Any, location: str, index: int) -> Message:
    """Normalize a message.

    Joins text parts, renames ``function_call`` to ``tool_calls``, and converts tool calls to
    objects. Stores reasoning under both ``thinking`` and ``reasoning_content``, because templates
    read one of these keys. Removes keys whose value is None, and optional keys with an empty value.
    If a message with tool calls has no content, its content becomes an empty string.

    Args:
        message: Message of a record.
        location: Location of the record in its source, used in error messages.
        index: Index of the message, from 0, used in error messages.

    Raises:
        UserError: If the message is not valid. For example, its role is not in :data:`ROLES`, the
            value of one of its ``WEIGHT_KEYS`` is neither 0 nor 1, or the name of another key
            suggests a loss setting. See :func:`_is_unread_training_key`.
    """
    if not isinstance(message, Mapping) or "role" not in message:
        if not isinstance(message, Mapping):
            reason = f"is {describe_type(message)}; write each message as a mapping with role and content"
        elif {"from", "value"} <= message.keys():
            reason = (
                "has the keys 'from' and 'value' instead of 'role' and 'content'; set data.format to "
                "sharegpt, and set data.columns to {conversations: messages}"
            )
        else:
            reason = f"has no role (its keys are {format_name_list(map(str, message))}); add the role"
        raise _build_format_error("messages", location, f"message {index + 1} {reason}")
    role, content = message["role"], message.get("content")
    if role not in ROLES:
        raise _build_record_error(
            location,
            f"message {index + 1} has the unsupported role {role!r}; use one of {_join_with_commas(ROLES)}",
        )
    converted: Message = {
        key: value
        for key, value in message.items()
        if value is not None
        and not (is_empty(value) and (key in _OPTIONAL_KEYS or _is_unread_training_key(key)))
    }
    for key in converted:
        if _is_unread_training_key(key):
            raise _build_record_error(
                location,
                f"message {index + 1} has the key {key}, which is not supported; remove the key, or "
                f"replace it with {_join_with_commas(WEIGHT_KEYS[:-1])} or {WEIGHT_KEYS[-1]}, set to 0 or 1",
            )
    for key in WEIGHT_KEYS:
        if (weight := converted.get(key, 0)) not in (0, 1):
            raise _build_record_error(location, f"message {index + 1} has {key}: {weight!r}; use 0 or 1")
    if "function_call" in converted:
        if "tool_calls" in converted:
            raise _build_record_error(
                location, f"message {index + 1} has both function_call and tool_calls; remove one of the keys"
            )
        converted["tool_calls"] = converted.pop("function_call")
    if isinstance(content, list | tuple):
        content = converted["content"] = _normalize_parts(content, location, index)
    if not isinstance(content, str | list) and (content is not None or "tool_calls" not in converted):
        raise _build_record_error(
            location, f"message {index + 1}: content is {describe_type(content)}; convert content to a string"
        )
    for key in _REASONING_KEYS:
        if not isinstance(converted.get(key, ""), str):
            raise _build_record_error(
                location,
                f"message {index + 1}: {key} is {describe_type(converted[key])}; convert {key} to a string",
            )
    if "tool_calls" in converted:
        converted["tool_calls"] = _normalize_tool_calls(converted["tool_calls"], location, index)
        converted = {"role": role, "content": "", **converted}  # a call without content gets an empty string
    reasoning = next((converted[key] for key in _REASONING_KEYS if key in converted), None)
    if reasoning is not None:  # templates read one of these two keys
        converted = {"thinking": reasoning, **converted, "reasoning_content": reasoning}
    return converted


def _normalize_parts(parts: Sequence[Any], location: str, index: int) -> str | list[dict[str, Any]]:
    """Merge adjacent text parts of a message's content, and convert its image parts.

    Args:
        parts: Parts of the content.
        location: Location of the record in its source, used in error messages.
        index: Index of the message, counted from 0. Used in error messages.

    Returns:
        The joined text if no part is an image. Otherwise, a list of text parts and image parts. An
        image part has a key ``image`` with its :class:`ImageReference`, unless it is a placeholder.

    Raises:
        UserError: If a part is neither text nor an image.
    """
    converted: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, Mapping) and part.get("type") in _IMAGE_PART_TYPES:
            keys = [
                key
                for key in ("image", "path", "url", "image_url", "bytes", "data", "source", "base64")
                if not is_empty(part.get(key))
            ]
            image: dict[str, Any] = {"type": "image"}
            if keys:
                value = (
                    _decode_base64({"data": part[keys[0]]}, "data") if keys[0] == "base64" else part[keys[0]]
                )
                image["image"] = _parse_image_reference(value, f"message {index + 1}: {keys[0]}", location)
            converted.append(image)
        else:
            text = _extract_part_text(part, location, index)
            if converted and converted[-1]["type"] == "text":
                converted[-1] = {"type": "text", "text": converted[-1]["text"] + text}
            else:
                converted.append({"type": "text", "text": text})
    if all(part["type"] == "text" for part in converted):
        return "".join(part["text"] for part in converted)
    return converted


def _extract_part_text(part: Any, location: str, index: int) -> str:
    """Return the text of one part of a message's content.

    Raises:
        UserError: If the part is not text, for example audio.
    """
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind not in ("text", "input_text") or not isinstance(text, str):
        raise _build_record_error(
            location,
            f"message {index + 1} has a part of type {kind}, but only text and images can be trained on; "
            "remove the part",
        )
    return text


def _normalize_tool_calls(value: Any, location: str, index: int) -> list[dict[str, Any]]:
    """Convert tool calls and their arguments to objects, as templates expect.

    Args:
        value: A tool call or a list of them, as objects or JSON. The arguments may also be JSON.
        location: Location of the record in its source, used in error messages.
        index: Index of the message, from 0, used in error messages.

    Returns:
        The calls in the form ``{"type": "function", "function": {"name": ..., "arguments": ...}}``,
        with the ``id`` if there is one. A call without the key ``function`` is converted to this
        form. Missing arguments become an empty dict.

    Raises:
        UserError: If a string is not valid JSON, or if a call has no function name.
    """
    calls = _parse_json(value, f"message {index + 1}: tool_calls", location)
    calls = calls if isinstance(calls, list | tuple) else [calls]
    converted: list[dict[str, Any]] = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name.strip():
            raise _build_record_error(
                location,
                f"message {index + 1}: a tool call has no function name; add the name of the function",
            )
        arguments = _parse_json(function.get("arguments"), f"message {index + 1}: arguments", location)
        function = {**function, "arguments": {} if arguments is None else arguments}
        keys = call if "function" in call else ("id",)
        call_fields = {key: call[key] for key in keys if call.get(key) is not None}
        converted.append({"type": "function", **call_fields, "function": function})
    return converted


def _parse_json(value: Any, name: str, location: str) -> Any:
    """Parse a string as JSON. A blank string becomes None. Other types are returned unchanged.

    Raises:
        UserError: If the string is not valid JSON.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError) as error:
        raise _build_record_error(
            location, f"{name} is not valid JSON ({to_one_line(error)}); correct the JSON"
        ) from error


def _parse_list_field(row: Mapping[str, Any], key: str, kind: RecordFormat, location: str) -> Sequence[Any]:
    """Return a field that must be a list. A string that contains a list as JSON is parsed.

    Args:
        row: Values of the record, keyed by field.
        key: Name of the field.
        kind: Format of the record, used in error messages.
        location: Location of the record in its source, used in error messages.

    Raises:
        UserError: If the field is missing or is not a list.
    """
    value = row.get(key)
    if _is_list_or_json_list(value):
        value = _parse_json(value, key, location)
    if key not in row:
        raise _build_missing_field_error(kind, location, key, row)
    if not isinstance(value, list | tuple):
        raise _build_format_error(kind, location, f"{key} is {describe_type(value)}; use a list of messages")
    return value


def _join_with_commas(names: Any) -> str:
    return ", ".join(names)


def _build_record_error(location: str, reason: str) -> UserError:
    """Build the RecordError for an invalid record, from its location and the reason."""
    return RecordError(f"data.source: {location}: {to_one_line(reason)}")


def _build_format_error(kind: RecordFormat, location: str, reason: str) -> UserError:
    """Build the error for a record in the wrong format. It contains an example of the expected format.

    Args:
        kind: Expected format of the record.
        location: Location of the record in its source.
        reason: Problem and remedy, separated by a semicolon.
    """
    return _build_record_error(
        location, f"{reason} (example for data.format: {kind}: {EXAMPLE_RECORDS[kind]})"
    )


def _build_missing_field_error(
    kind: RecordFormat, location: str, key: str, row: Mapping[str, Any]
) -> UserError:
    """Build the error for a record without the field ``key``. It suggests a field with a similar name.

    Args:
        kind: Expected format of the record.
        location: Location of the record in its source.
        key: Name of the missing field.
        row: Values of the record, keyed by field.
    """
    fields = format_name_list(map(str, row))
    if near := find_similar_names(key, map(str, row)):
        return _build_format_error(
            kind,
            location,
            f"there is no field {key} (the fields are {fields}); did you mean {near[0]}? If so, set "
            f"data.columns to {{{key}: {near[0]}}}",
        )
    return _build_format_error(
        kind,
        location,
        f"there is no field {key} (the fields are {fields}); add the field or, if another field NAME "
        f"contains this value, set data.columns to {{{key}: NAME}}",
    )
