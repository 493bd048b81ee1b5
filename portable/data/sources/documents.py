"""Documents and conversations: what the records of a source become."""

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


WEIGHT_KEYS = ("weight", "train", "training", "loss")
"""Keys of a message that may exclude it from the loss, in OpenAI's, axolotl's and ms-swift's data."""


RecordFormat = Literal["text", "messages", "sharegpt", "prompt_completion", "alpaca", "preference", "samples"]
DEFAULT_TRAINED_ROLES = frozenset({"assistant"})
"""The roles whose messages are trained, unless ``data.roles_to_train`` names others."""
Label = int | float | str | tuple[int | float | str, ...]
"""A class, several classes, a number or several numbers."""
PIECE_CHARS = 1 << 20  # longer texts are read and tokenized in pieces to limit memory


@dataclass(frozen=True)
class Conversation:
    """One record.

    Attributes:
        messages: with ``role`` and, unless it is a tool call alone, ``content``: a string. Templates see
            their other keys, too.
        tools: JSON schemas of the tools that the assistant may call.
        num_prompt_messages: how many messages are the prompt, if the record says so.
        template_kwargs: further variables of the template, from the record.
        location: the record's place in the source, for messages.
        trained_roles: whose messages are trained, besides those that say so.
    """

    messages: tuple[Message, ...]
    location: str
    tools: tuple[dict[str, Any], ...] | None = None
    num_prompt_messages: int | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    trained_roles: frozenset[str] = DEFAULT_TRAINED_ROLES

    @property
    def trained_message_indices(self) -> list[int]:
        """The places of the messages that are trained, which are the assistant's for most: see ``trained_roles``."""
        return [index for index, message in enumerate(self.messages) if self._is_trained(message)]

    def _is_trained(self, message: Message) -> bool:
        is_selected = message["role"] in self.trained_roles or bool(
            message.get("train") or message.get("training")
        )
        return is_selected and not is_excluded_from_training(message)

    @property
    def trained_roles_text(self) -> str:
        """Whose messages are trained, for messages."""
        return (
            "the assistant"
            if self.trained_roles == DEFAULT_TRAINED_ROLES
            else " or ".join(sorted(self.trained_roles))
        )

    @property
    def joined_text(self) -> str:
        """Everything that is said, a line each."""
        return replace_surrogates("\n".join(str(message.get("content", "")) for message in self.messages))


def is_excluded_from_training(message: Message) -> bool:
    """Whether a message says that it is not trained."""
    return any(message.get(key) == 0 for key in WEIGHT_KEYS)


@dataclass(frozen=True)
class Document:
    """A document, or a piece of a long one. Only the last piece has ``is_last_piece`` set."""

    text: str
    target: str | None = None
    label: Label | None = None
    is_last_piece: bool = True
    pair_text: str | None = None
    conversation: Conversation | None = None
    """What the tokens are made of instead of ``text``, which has what is said in it."""
    extra_columns: tuple[float, ...] = ()
    """Further numbers of the record, for a loss of the user's."""
    num_prompt_chars: int | None = None
    """How many characters of the text are a prompt, if it has one."""


class NoTextError(UserError):
    """A source contains no text."""


class RecordError(UserError):
    """A record cannot be used. Other records of its source may be fine."""


def compute_text_digest(content: str) -> str:
    """The name of what a text says."""
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def build_data_changed_error(path: object) -> UserError:
    """The error for data that changed during reading."""
    return UserError(
        f"data.source: {path} changed while it was read; wait until nothing writes to it, and start again"
    )


def get_field_value(row: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """Return the value of a field. A dotted name may be a path to a nested field."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return default
        value = value[part]
    return value


def iter_field_names(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the fields, with nested fields as dotted names."""
    for name, value in row.items():
        if isinstance(value, Mapping) and value:
            yield from (f"{name}.{inner}" for inner in value)
        else:
            yield name


def replace_surrogates(text: str) -> str:
    """``text`` without lone surrogates, which JSON may contain and tokenizers refuse."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def describe_type(value: object) -> str:
    """What a value is, for messages."""
    return "null" if value is None else f"of type {type(value).__name__}"


def format_name_list(names: Iterable[str]) -> str:
    shown = list(islice(names, 21))
    return ", ".join(shown[:20]) + (", ..." if len(shown) > 20 else "")
