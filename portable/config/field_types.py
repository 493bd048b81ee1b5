"""Field types of the schema, in addition to pydantic's types."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationInfo,
    WrapValidator,
    field_validator,
)

from portable import plugins
from portable.converters.errors import CheckpointError
from portable.converters.storage.path_or_url import expand_user_and_variables, is_url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

IDENTITY: dict[str, JsonValue] = {"identity": True}
"""Marker of a field that defines the run. See ``RunConfig.fingerprint``."""


_BOOLEAN_WORDS = {"yes": True, "on": True, "true": True, "no": False, "off": False, "false": False}
_MAX_DEPTH = 50
"""Maximum nesting depth of a mapping in a setting."""


class Section(BaseModel):
    """A group of settings: strict, frozen, and without unknown keys.

    The text below a field is its description, which help and docs/config.md show.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_forbidden_characters(cls, value: object, info: ValidationInfo) -> object:
        """Raise ``ValueError`` if a setting contains a character that no path, name or text file can have.

        pydantic calls this validator for every field before it validates the value.
        """
        kind = cls.model_fields[info.field_name or ""].annotation
        # A nested section checks its own fields.
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            for text in _iter_strings(value):
                if _FORBIDDEN_CHARACTERS.search(text):
                    raise ValueError(
                        "contains a NUL character or half a surrogate pair; remove this character"
                    )
        return value


_FORBIDDEN_CHARACTERS = re.compile("[\0\ud800-\udc7f\udd00-\udfff]")
"""NUL and half surrogate pairs. U+DC80 to U+DCFF are allowed, because they encode the bytes of file names
that are not UTF-8."""


def _iter_strings(value: object) -> Iterator[str]:
    """Yield the strings in a value, including the keys and values of mappings."""
    pending = [(value, 0)]
    while pending:
        value, depth = pending.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict | list | tuple) and depth <= _MAX_DEPTH:
            children = [*value.keys(), *value.values()] if isinstance(value, dict) else value
            pending.extend((item, depth + 1) for item in children)


def parse_boolean_word(value: Any) -> Any:
    """Convert the strings ``yes``, ``no``, ``on``, ``off``, ``true`` and ``false`` to booleans.

    Other values are returned unchanged.
    """
    return _BOOLEAN_WORDS.get(value.lower(), value) if isinstance(value, str) else value


def _to_plain(value: object, depth: int = 0) -> object:
    """Convert ``value`` to types that YAML and JSON support. Keys become strings, as in JSON.

    Tuples become lists. Raises ValueError for other types and for deep nesting.
    """
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deeply")
    if isinstance(value, dict):
        return {_to_text_key(key): _to_plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(item, depth + 1) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"contains a {type(value).__name__}, which YAML cannot express")


def _to_text_key(key: object) -> str:
    """Convert a key of a mapping to text. Raises ``ValueError`` for a date, for example."""
    if key is None or isinstance(key, bool | int | float | str):
        return str(key)
    raise ValueError(f"has a key of type {type(key).__name__}")


def _convert_mapping_to_plain_values(value: object) -> object:
    """Convert a mapping to plain values. Other values are returned unchanged, for pydantic to refuse."""
    return _to_plain(value) if isinstance(value, dict) else value


def _wrap_single_text(value: object) -> object:
    """Return a single string as a tuple. Other values are returned unchanged."""
    return (value,) if isinstance(value, str) else value


def _unwrap_single_pattern(value: object) -> object:
    """Return the only string of a list if it cannot be a module name; return other values unchanged.

    A flag passes a regular expression as such a list.
    """
    only_item = value[0] if isinstance(value, list | tuple) and len(value) == 1 else None
    return only_item if isinstance(only_item, str) and not re.fullmatch(r"[\w.]+", only_item) else value


def _to_lower_case(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


class PathMarker:
    """Marker of a string type whose value may be a path or a URL. See ``SettingField.may_be_path``."""


_MAX_NAME_BYTES, _MAX_PATH_BYTES = 255, 4095
"""Maximum number of bytes of a file name and of a path on Linux and macOS."""


def _expand_path(value: object) -> object:
    """Expand ``~`` and ``${VAR}`` in a string. Raises ``ValueError`` if the path is too long."""
    if not isinstance(value, str):
        return value
    try:
        text = expand_user_and_variables(value)
    except CheckpointError as error:
        raise ValueError(str(error)) from None
    if not is_url(text) and not plugins.is_plugin_name(text):
        path = text.encode("utf-8", "surrogatepass")
        longest_name_bytes = max(map(len, path.split(b"/")))
        if longest_name_bytes > _MAX_NAME_BYTES or len(path) > _MAX_PATH_BYTES:
            raise ValueError(
                f"is too long for a path: {len(path)} bytes, with a name of {longest_name_bytes}; use at "
                f"most {_MAX_PATH_BYTES}, and {_MAX_NAME_BYTES} for each name"
            )
    return text


PathText = Annotated[str, Field(min_length=1), BeforeValidator(_expand_path), PathMarker()]
"""Text that may be a path or a URL (or a hub id, or auto). ``~`` and ``${VAR}`` are expanded."""

Flag = Annotated[bool, BeforeValidator(parse_boolean_word)]
"""A boolean that may also be written as yes, no, on or off."""

OpenMapping = Annotated[dict[str, Any], BeforeValidator(_convert_mapping_to_plain_values)]
"""A mapping with the keys of another library (a model config, a DeepSpeed JSON), as plain values."""

Names = Annotated[tuple[str, ...], BeforeValidator(_wrap_single_text), Field(strict=False)]
"""A list of names. A single name needs no brackets."""

Columns = Annotated[
    Annotated[tuple[str, ...], Field(strict=False)] | dict[str, str], BeforeValidator(_wrap_single_text)
]
"""A list of names, or a mapping from names to the fields of a record that have their values."""


def _normalize_code_name(value: object) -> object:
    """Normalize the name of custom code, so that equal names are equal strings. Other types are unchanged."""
    return str(plugins.parse_plugin_spec(value)) if isinstance(value, str) else value


PlugIn = Annotated[str, Field(min_length=1), BeforeValidator(_normalize_code_name)]
"""Import path of custom code. See :mod:`portable.plugins`. Equal paths are equal strings."""


def _accept_code_or_name(value: object, validate_name: Callable[[object], object]) -> object:
    """Accept the import path of custom code. Any other value is validated as a built-in name.

    Args:
        value: The value to validate.
        validate_name: Function that validates a name that is not custom code.
    """
    return _normalize_code_name(value) if plugins.is_plugin_name(value) else validate_name(value)


OrPlugIn = WrapValidator(_accept_code_or_name, json_schema_input_type=str)
"""Validator that also allows the import path of custom code in a type of built-in names."""


def _validate_compile_backend_name(value: str) -> str:
    """Return the name of a compile backend. Raises ``ValueError`` if it cannot be one."""
    if re.fullmatch(r"[A-Za-z_][\w.-]*", value) is None:
        raise ValueError(f"{value[:40]!r} is not a name; use a backend of torch, such as inductor")
    return value


CompileBackend = Annotated[str, AfterValidator(_validate_compile_backend_name)]
"""Name of a backend of torch.compile. Only a process that compiles can check that the backend exists."""

_HUB_KERNEL = re.compile(r"[^/:@]+/[^/:@]+(@[^/:]+)?(:[^/:]+)?")


def _accept_kernel_or_name(value: object, validate_name: Callable[[object], object]) -> object:
    """Accept the name of a kernel on the hub, or validate another name.

    Args:
        value: The value to validate.
        validate_name: Function that validates a name that is not a kernel on the hub.
    """
    return value if isinstance(value, str) and _HUB_KERNEL.fullmatch(value) else validate_name(value)


OrHubKernel = WrapValidator(_accept_kernel_or_name, json_schema_input_type=str)
"""Validator that also allows a kernel on the hub, such as ``kernels-community/flash-attn3``, in a type of
names."""

OneOrMany = BeforeValidator(_wrap_single_text)
"""Validator that turns a single string into a list."""
NamesOrPattern = BeforeValidator(_unwrap_single_pattern)
"""Validator that turns a list with one regular expression into text."""
AnyCase = BeforeValidator(_to_lower_case)
"""Validator that converts text to lower case."""
