"""Classes for documents and conversations, to which the records of all sources are converted."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from portable.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Message = dict[str, Any]
"""Message of a conversation. It has the keys ``role`` and ``content``, as transformers'
``apply_chat_template`` expects.
"""


WEIGHT_KEYS = ("weight", "train", "training", "loss")
"""Message keys that exclude a message from the loss if their value is 0 or false.

They occur in data for OpenAI, axolotl and ms-swift.
"""


RecordFormat = Literal["text", "messages", "sharegpt", "prompt_completion", "alpaca", "preference", "samples"]
"""Formats of records. These are the values of ``data.format`` except ``auto``."""
MAX_IMAGE_FILE_BYTES = 64 << 20
"""Maximum size of an image file in bytes."""
DEFAULT_TRAINED_ROLES = frozenset({"assistant"})
"""Roles whose messages contribute to the loss, unless ``data.roles_to_train`` names others."""
Label = int | float | str | tuple[int | float | str, ...]
"""Label of a text: a class (integer or string), a number, or several classes or numbers."""
PIECE_CHARS = 1 << 20  # longer texts are read and tokenized in pieces to limit memory use


@dataclass(frozen=True)
class ImageReference:
    """Reference to an image in a record. Exactly one attribute is set.

    Attributes:
        path: Path of an image file. A relative path is resolved against the image folder, which
            is ``ImageReader.root``.
        url: URL of an image file.
        data: Content of an image file, such as a JPEG.
    """

    path: str | None = None
    url: str | None = None
    data: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Conversation:
    """Conversation of one record.

    Attributes:
        messages: Messages with the keys ``role`` and ``content``, and other keys that a template
            can read. The content is a string, possibly empty if the message has tool calls. If the
            message has images, the content is a list of parts: ``{"type": "text", "text": ...}``
            and ``{"type": "image"}``.
        location: Location of the record in the source, used in error messages.
        tools: JSON schemas of the tools that the assistant may call. None if there are no tools.
        num_prompt_messages: Number of messages at the start that form the prompt. None if the
            record does not mark a prompt.
        template_kwargs: Additional variables for the template.
        trained_roles: Roles whose messages contribute to the loss. A message of another role also
            contributes if its key ``train`` or ``training`` is true. A message never contributes if
            one of its ``WEIGHT_KEYS`` is 0 or false.
        images: Images of the conversation, in the order of the messages' image parts.
    """

    messages: tuple[Message, ...]
    location: str
    tools: tuple[dict[str, Any], ...] | None = None
    num_prompt_messages: int | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    trained_roles: frozenset[str] = DEFAULT_TRAINED_ROLES
    images: tuple[ImageReference, ...] = ()

    @property
    def trained_message_indices(self) -> list[int]:
        """Indices of the messages that contribute to the loss according to ``trained_roles``.

        Messages of the prompt may be included. If only the messages after the prompt contribute to
        the loss, callers must remove the indices below ``num_prompt_messages``.
        """
        return [index for index, message in enumerate(self.messages) if self._is_trained(message)]

    def _is_trained(self, message: Message) -> bool:
        """Return whether a message contributes to the loss.

        A message contributes if its role is in ``trained_roles``, or if its key ``train`` or
        ``training`` is true. It never contributes if one of its ``WEIGHT_KEYS`` is 0 or false.
        """
        is_selected = message["role"] in self.trained_roles or bool(
            message.get("train") or message.get("training")
        )
        return is_selected and not is_excluded_from_training(message)

    @property
    def trained_roles_text(self) -> str:
        """Roles whose messages contribute to the loss, as text that is used in error messages."""
        return " or ".join(sorted(self.trained_roles))

    @property
    def joined_text(self) -> str:
        """Text of all messages, joined with line breaks."""
        return replace_surrogates("\n".join(map(get_message_text, self.messages)))


def get_message_text(message: Message) -> str:
    """Return the text of a message. If its content is a list, joins the text parts and ignores images."""
    content = message.get("content", "")
    if isinstance(content, list):
        return "".join(part["text"] for part in content if part["type"] == "text")
    return str(content)


def count_images(messages: Iterable[Message]) -> int:
    """Count the image parts in messages."""
    contents = (message.get("content") for message in messages)
    return sum(part["type"] == "image" for parts in contents if isinstance(parts, list) for part in parts)


def is_excluded_from_training(message: Message) -> bool:
    """Return whether one of the ``WEIGHT_KEYS`` of a message is 0 or false.

    Such a message does not contribute to the loss.
    """
    return any(message.get(key) == 0 for key in WEIGHT_KEYS)


@dataclass(frozen=True)
class Document:
    """Document, or one piece of a long document.

    Attributes:
        text: Text of the document. For a conversation, the content of its messages.
        target: Target text for seq2seq.
        label: Label for classification.
        is_last_piece: Whether this is the last piece of the document. The pieces before it contain
            only ``text``.
        pair_text: Second text of a pair for classification.
        conversation: Conversation to tokenize instead of ``text``.
        extra_columns: Numbers from the additional columns, in the order in which ``data.columns``
            lists the columns.
        num_prompt_chars: Number of characters at the start of the text that form a prompt. None if
            the text has no prompt.
    """

    text: str
    target: str | None = None
    label: Label | None = None
    is_last_piece: bool = True
    pair_text: str | None = None
    conversation: Conversation | None = None
    extra_columns: tuple[float, ...] = ()
    num_prompt_chars: int | None = None


class NoTextError(UserError):
    """Raised if a source contains no text."""


class RecordError(UserError):
    """Raised if a record cannot be used. Other records of the source may be valid."""


def compute_text_digest(content: str) -> str:
    """Compute a 128-bit BLAKE2b digest of a text, as a hexadecimal string."""
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def build_data_changed_error(path: object) -> UserError:
    """Build the error for a file or source that another program changed while it was read."""
    return UserError(
        f"data.source: {path} changed while it was being read; wait until no program is writing to the "
        "file, then run the same command again"
    )


def get_field_value(row: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """Return the value of a record's field, or ``default`` if there is no such field.

    A dotted name such as ``a.b`` refers to a nested field, unless the record has a field with this
    exact name.
    """
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return default
        value = value[part]
    return value


def iter_field_names(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of a record's fields.

    For a field whose value is a nonempty mapping, yields the dotted names of its nested fields instead.
    """
    for name, value in row.items():
        if isinstance(value, Mapping) and value:
            yield from (f"{name}.{inner}" for inner in value)
        else:
            yield name


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates with ``?``. JSON may contain them, but tokenizers reject them."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def describe_type(value: object) -> str:
    """Describe the type of a value for an error message, such as ``of type int``.

    The result for None is ``null``.
    """
    return "null" if value is None else f"of type {type(value).__name__}"


def format_name_list(names: Iterable[str]) -> str:
    """Join names with commas. Shows at most 20 names."""
    shown = list(islice(names, 21))
    return ", ".join(shown[:20]) + (", ..." if len(shown) > 20 else "")
