"""Typed access to values from a checkpoint's pickles and JSON files, where any value may have any type.

The functions `require_...` raise an error if a value has another type. The functions `get_...` return an
empty value instead, for records that a checkpoint may lack.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converters.containers.pickle_reader import Instance
from converters.errors import CheckpointError
from converters.tensors.tensor import is_shape

if TYPE_CHECKING:
    from converters.tensors.tensor import Shape


def require_mapping(value: Any, what: str, where: str = "") -> dict[Any, Any]:
    """Return `value` if it is a dict.

    Args:
        value: Value from a checkpoint.
        what: Description of the value for the error message.
        where: File that contains the value; empty if the caller adds the file to the error message.

    Raises:
        CheckpointError: If the value has another type.
    """
    if isinstance(value, dict):
        return value
    raise _build_error(what, "a mapping", where)


def require_list(value: Any, what: str, where: str = "") -> list[Any]:
    """Return `value` as a list if it is a list or a tuple; see `require_mapping`."""
    if isinstance(value, (list, tuple)):
        return list(value)
    raise _build_error(what, "a list", where)


def require_names(value: Any, what: str, where: str = "") -> list[str]:
    """Return `value` as a list if it is a list or a tuple of strings; see `require_mapping`."""
    names = require_list(value, what, where)
    if all(isinstance(name, str) for name in names):
        return names
    raise _build_error(what, "a list of names", where)


def require_shape(value: Any, what: str, where: str = "") -> Shape:
    """Return `value` as a tuple if it can be a shape, offsets, or strides; see `require_mapping`."""
    if is_shape(value):
        return tuple(value)
    raise _build_error(what, "a list of sizes", where)


def require_attributes(value: Any, class_name: str, where: str = "") -> dict[str, Any]:
    """Return the attributes of an unpickled instance of the class `class_name`; see `require_mapping`."""
    if isinstance(value, Instance) and value.key.rpartition(".")[2] == class_name:
        return require_mapping(value.state, f"the state of a {class_name}", where)
    raise _build_error("a record", f"a {class_name}", where)


def get_mapping(value: Any) -> dict[Any, Any]:
    """Return `value` if it is a dict, else an empty dict."""
    return value if isinstance(value, dict) else {}


def get_list(value: Any) -> list[Any]:
    """Return `value` if it is a list, else an empty list."""
    return value if isinstance(value, list) else []


def get_attributes(value: Any) -> dict[Any, Any]:
    """Return the attributes of an unpickled instance, else an empty dict."""
    state = value.state if isinstance(value, Instance) else None
    if type(state) is tuple and len(state) == 2:  # of a class with slots
        state = state[1]
    return get_mapping(state)


def _build_error(what: str, kind: str, where: str) -> CheckpointError:
    message = f"damaged, {what} is not {kind}"
    return CheckpointError(f"{where}: {message}" if where else message)
