"""Field types for the config schema, in addition to the types of pydantic."""

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
"""Value of ``json_schema_extra`` that marks a setting as part of ``RunConfig.fingerprint``.

Such settings define the run, so they must not change between its launches."""


_BOOLEAN_WORDS = {"yes": True, "on": True, "true": True, "no": False, "off": False, "false": False}
_MAX_DEPTH = 50
"""Maximum nesting depth of a mapping in a setting."""


class Section(BaseModel):
    """Base class of all groups of settings. Unknown keys are errors.

    Instances are immutable. Values are not converted to the type of a field, except by types that
    explicitly allow it. For example, :data:`Flag` converts ``yes`` to True. NaN and infinity are
    errors.

    The docstring below a field is the description of the setting in ``--help`` and in
    docs/config.md. Names and values in double backticks are formatted as code in docs/config.md,
    but not in ``--help``.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_forbidden_characters(cls, value: object, info: ValidationInfo) -> object:
        """Reject a value that contains a NUL character or an unpaired surrogate.

        Any other value is returned unchanged. The rejected characters cannot occur in paths, names
        or text files. The surrogates U+DC80 to U+DCFF are accepted, because Python uses them for
        bytes of file names that are not valid UTF-8.

        pydantic calls this validator for every field before it validates the value. The value of a
        nested section is not checked here, because the section checks its own fields.

        Raises:
            ValueError: If a string in the value contains NUL or an unpaired surrogate.
        """
        kind = cls.model_fields[info.field_name or ""].annotation
        # A nested section checks its own fields.
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            for text in _iter_strings(value):
                if _FORBIDDEN_CHARACTERS.search(text):
                    raise ValueError(
                        "contains a NUL character or an unpaired surrogate; remove this character"
                    )
        return value


_FORBIDDEN_CHARACTERS = re.compile("[\0\ud800-\udc7f\udd00-\udfff]")
"""Matches NUL and unpaired surrogates, except for U+DC80 to U+DCFF.

The exceptions are allowed because Python uses them for bytes of file names that are not valid UTF-8.
"""


def _iter_strings(value: object) -> Iterator[str]:
    """Yield all strings in a nested value, including the keys and values of mappings.

    Values nested deeper than ``_MAX_DEPTH`` levels are skipped.
    """
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

    The case of the words is ignored. Other values are returned unchanged.
    """
    return _BOOLEAN_WORDS.get(value.lower(), value) if isinstance(value, str) else value


def _to_plain(value: object, depth: int = 0) -> object:
    """Convert a nested value to the types that YAML and JSON support.

    Keys become strings, as in JSON, and tuples become lists.

    Args:
        value: The value.
        depth: Nesting depth of the value.

    Raises:
        ValueError: If the value contains an unsupported type, or is nested too deeply.
    """
    if depth > _MAX_DEPTH:
        raise ValueError(f"has more than {_MAX_DEPTH} levels of nesting; use fewer levels")
    if isinstance(value, dict):
        return {_to_text_key(key): _to_plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(item, depth + 1) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(
        f"contains a {type(value).__name__}, which YAML cannot represent; use numbers, strings, booleans, "
        "lists and mappings"
    )


def _to_text_key(key: object) -> str:
    """Convert a mapping key to text. Raises ``ValueError`` for types that are not valid as keys in YAML."""
    if key is None or isinstance(key, bool | int | float | str):
        return str(key)
    raise ValueError(f"has a key of type {type(key).__name__}; use strings as keys")


def _convert_mapping_to_plain_values(value: object) -> object:
    """Convert the contents of a mapping to the types that YAML and JSON support.

    A value that is not a mapping is returned unchanged, so that pydantic rejects it.

    Raises:
        ValueError: If the mapping contains an unsupported type, or is nested too deeply.
    """
    return _to_plain(value) if isinstance(value, dict) else value


def _wrap_single_text(value: object) -> object:
    """Wrap a single string in a tuple. Returns other values unchanged."""
    return (value,) if isinstance(value, str) else value


def _unwrap_single_pattern(value: object) -> object:
    """Replace a one-item list with its item if this item is a regular expression.

    All other values are returned unchanged. The command line passes a list for every setting that
    accepts a list, even if the user entered a single value. A string counts as a regular expression
    if it cannot be a module name, for example ``q_proj|v_proj``.
    """
    only_item = value[0] if isinstance(value, list | tuple) and len(value) == 1 else None
    return only_item if isinstance(only_item, str) and not re.fullmatch(r"[\w.]+", only_item) else value


def _to_lower_case(value: object) -> object:
    """Convert a string to lower case. Returns other values unchanged."""
    return value.lower() if isinstance(value, str) else value


class PathMarker:
    """Marker in the ``Annotated`` type of a string setting whose value may be a path or a URL.

    :attr:`SettingField.may_be_path` searches a setting's type for this marker.
    """


_MAX_NAME_BYTES, _MAX_PATH_BYTES = 255, 4095
"""Maximum number of bytes of a file name and of a path on Linux and macOS."""


def _expand_path(value: object) -> object:
    """Expand ``~`` and ``${VAR}`` in a string. Returns other values unchanged.

    The length is limited to :data:`_MAX_PATH_BYTES`, and for each component to
    :data:`_MAX_NAME_BYTES`. URLs and import paths of custom code have no limit.

    Raises:
        ValueError: If a variable or user is unknown, or if the path or one of its components is too
            long.
    """
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
                f"is too long: the path has {len(path)} bytes, and its longest name has "
                f"{longest_name_bytes} bytes; use at most {_MAX_PATH_BYTES} bytes for the path, and "
                f"{_MAX_NAME_BYTES} bytes for each name"
            )
    return text


PathText = Annotated[str, Field(min_length=1), BeforeValidator(_expand_path), PathMarker()]
"""Type of text that may be a path or a URL, or for some settings a hub id or a word such as auto.

``~`` and ``${VAR}`` are expanded."""

Flag = Annotated[bool, BeforeValidator(parse_boolean_word)]
"""Type of a boolean that may also be written as yes, no, on or off."""

OpenMapping = Annotated[dict[str, Any], BeforeValidator(_convert_mapping_to_plain_values)]
"""Type of a mapping with arbitrary keys, which another library defines, such as the config of a model."""

Names = Annotated[tuple[str, ...], BeforeValidator(_wrap_single_text), Field(strict=False)]
"""Type of a list of names. A single name may be written without brackets."""

Columns = Annotated[
    Annotated[tuple[str, ...], Field(strict=False)] | dict[str, str], BeforeValidator(_wrap_single_text)
]
"""Type of ``data.columns``: a list of column names, or a mapping from column names to fields of a record."""


def _normalize_code_name(value: object) -> object:
    """Normalize the import path of custom code, such as ``my_module:FocalLoss(gamma=2.0)``.

    The module and the arguments are optional, because settings such as ``train.loss`` also accept
    built-in names, for example ``dpo(beta=0.1)``. Different spellings of the same path and
    arguments become equal strings. A value that is not a string is returned unchanged.

    Raises:
        ValueError: If a string does not have this format.
    """
    return str(plugins.parse_plugin_spec(value)) if isinstance(value, str) else value


PlugIn = Annotated[str, Field(min_length=1), BeforeValidator(_normalize_code_name)]
"""Type of an import path of custom code, whose spelling is normalized. See :mod:`portable.plugins`."""


def _accept_code_or_name(value: object, validate_name: Callable[[object], object]) -> object:
    """Validate a setting that accepts the import path of custom code or a built-in name.

    Args:
        value: The value to validate.
        validate_name: Function that validates a built-in name.

    Returns:
        The normalized import path, or the result of ``validate_name``.
    """
    return _normalize_code_name(value) if plugins.is_plugin_name(value) else validate_name(value)


OrPlugIn = WrapValidator(_accept_code_or_name, json_schema_input_type=str)
"""Validator that extends a type of built-in names, so that import paths of custom code are allowed, too."""


def _validate_compile_backend_name(value: str) -> str:
    """Validate the format of a backend name, and return it. Raises ``ValueError`` if it is not valid."""
    if re.fullmatch(r"[A-Za-z_][\w.-]*", value) is None:
        raise ValueError(f"must be the name of a torch.compile backend, such as inductor, not {value[:40]!r}")
    return value


CompileBackend = Annotated[str, AfterValidator(_validate_compile_backend_name)]
"""Type of the name of a backend of torch.compile.

The existence of the backend is not checked here, because only a process that compiles can check it."""

_HUB_KERNEL = re.compile(r"[^/:@]+/[^/:@]+(@[^/:]+)?(:[^/:]+)?")


def _accept_kernel_or_name(value: object, validate_name: Callable[[object], object]) -> object:
    """Validate a setting that accepts a kernel on the Hub or a built-in name.

    A kernel has the form ``owner/name``, optionally followed by ``@revision`` and ``:function``.
    The existence of the kernel is not checked.

    Args:
        value: The value to validate.
        validate_name: Function that validates a built-in name.

    Returns:
        The name of the kernel, or the result of ``validate_name``.
    """
    return value if isinstance(value, str) and _HUB_KERNEL.fullmatch(value) else validate_name(value)


OrHubKernel = WrapValidator(_accept_kernel_or_name, json_schema_input_type=str)
"""Validator that extends a type of built-in names, so that kernels on the hub are allowed as well.

An example is ``kernels-community/flash-attn3``."""

OneOrMany = BeforeValidator(_wrap_single_text)
"""Validator for a type of lists, so that a single string is allowed as well."""
NamesOrPattern = BeforeValidator(_unwrap_single_pattern)
"""Validator that converts a list whose only item is a regular expression to a string."""
AnyCase = BeforeValidator(_to_lower_case)
"""Validator that converts text to lower case, so that upper case is allowed as well."""
