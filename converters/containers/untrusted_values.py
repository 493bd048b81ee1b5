"""Check the types of values from a checkpoint's pickles and JSON files, which are untrusted.

The functions `require_...` raise an error if a value does not have the expected type. The functions
`get_...` return an empty value instead, for records that a checkpoint may lack.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from portable.converters.containers.pickle_reader import PickledInstance
from portable.converters.errors import CheckpointError, DamagedCheckpointError
from portable.converters.tensors.tensor import is_shape

if TYPE_CHECKING:
    from portable.converters.tensors.tensor import Shape


def require_mapping(value: Any, name: str, location: str = "") -> dict[Any, Any]:
    """Return `value` if it is a dict.

    Args:
        value: Value from a checkpoint.
        name: Description of the value for the error message.
        location: File that contains the value. Empty if the caller adds the file to the error message.

    Raises:
        CheckpointError: If the value is not a dict.
    """
    if isinstance(value, dict):
        return value
    raise _build_error(f"{name} is not a mapping", location)


def require_list(value: Any, name: str, location: str = "") -> list[Any]:
    """Check that `value` is a list or a tuple, and return it as a list.

    See `require_mapping` for the arguments.

    Raises:
        CheckpointError: If the value is neither a list nor a tuple.
    """
    if isinstance(value, (list, tuple)):
        return list(value)
    raise _build_error(f"{name} is not a list", location)


def require_names(value: Any, name: str, location: str = "") -> list[str]:
    """Check that `value` is a list or tuple of strings, and return it as a list.

    See `require_mapping` for the arguments.

    Raises:
        CheckpointError: If the value is not a list or tuple of strings.
    """
    names = require_list(value, name, location)
    if all(isinstance(name, str) for name in names):
        return names
    raise _build_error(f"{name} is not a list of names", location)


def require_shape(value: Any, name: str, location: str = "") -> Shape:
    """Check that `value` is valid as a shape, offsets, or strides, and return it as a tuple.

    See `require_mapping` for the arguments.

    Raises:
        CheckpointError: If the value is not a list or tuple of at most `MAX_DIMS` integers in the
            range [0, 2**63).
    """
    if is_shape(value):
        return tuple(value)
    raise _build_error(f"{name} is not a list of nonnegative integers", location)


def require_attributes(value: Any, class_name: str, location: str = "") -> dict[str, Any]:
    """Return the attributes of an unpickled instance of the class `class_name`.

    The module of the class is ignored. `class_name` is compared with the part of the instance's
    class name after the last dot. See `require_mapping` for `location`.

    Raises:
        CheckpointError: If the value is not an instance of this class, or if its state is not a
            dict.
    """
    if isinstance(value, PickledInstance) and value.key.rpartition(".")[2] == class_name:
        return require_mapping(value.state, f"the state of a {class_name} object", location)
    raise _build_error(f"an object of the class {class_name} is missing", location)


def get_mapping_or_empty(value: Any) -> dict[Any, Any]:
    """Return `value` if it is a dict, else an empty dict."""
    return value if isinstance(value, dict) else {}


def get_list_or_empty(value: Any) -> list[Any]:
    """Return `value` if it is a list, else an empty list. A tuple gives an empty list."""
    return value if isinstance(value, list) else []


def get_attributes_or_empty(value: Any) -> dict[Any, Any]:
    """Return the attributes of an unpickled object, or an empty dict for any other value.

    The reader represents unpickled objects as `PickledInstance`. If the class of the object has
    slots, only the attributes in the slots are returned.
    """
    state = value.state if isinstance(value, PickledInstance) else None
    if type(state) is tuple and len(state) == 2:  # The class has slots.
        state = state[1]
    return get_mapping_or_empty(state)


def _build_error(problem: str, location: str) -> CheckpointError:
    if location:
        return DamagedCheckpointError(f"{location}: damaged: {problem}")
    return DamagedCheckpointError(f"damaged: {problem}")
