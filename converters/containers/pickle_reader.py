"""Read pickles without executing code.

The reader interprets the opcodes itself and builds plain containers. Globals are looked up in an
allow-list of stand-ins. A stand-in is a function of this package that converts the arguments of a
call to plain data. Any other global raises an error that contains its name. Nothing is imported, no
attribute is set, and no constructor is called.

A pickle can reference one object many times, so a small file can describe a huge value. Two
quantities are therefore limited in proportion to the length of the pickle. `_WORK` limits the
number of items that opcodes copy out of existing containers. `_NODES` limits the size of the value,
counting shared objects at every reference. As a result, comparing, formatting, or traversing the
value takes time proportional to the size of the file.

Source: Lib/pickletools.py and PEP 3154 (protocol 4), PEP 574 (protocol 5).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from typing import Any

from portable.converters.errors import DamagedCheckpointError, UnsupportedCheckpointError
from portable.converters.limits import MAX_DEPTH, MAX_INT_BYTES, MAX_KEY, MAX_NAME, MAX_TUPLE_KEYS

Standin = Callable[..., Any]
_SCALARS = (str, int, float, bool, bytes, type(None))
# Number of items (arguments and keys) that may be copied out of containers per byte of the pickle, and in
# addition for any pickle. Pickles written by libraries copy less than one item per byte.
_WORK, _FREE_WORK = 8, 100_000
# Number of values per byte of the pickle, and in addition for any pickle. Shared values are counted at every
# reference. A pickle without sharing has less than one value per byte.
_NODES, _FREE_NODES = 4, 20_000
_ELEMENT = re.compile(r"torch\.(b?float|complex|q?u?int|bits)\w*")
# Protocols below 3 write the Python 2 names of these modules.
_PYTHON2 = {"__builtin__": "builtins", "copy_reg": "copyreg"}


class PickledGlobal:
    """Reference to a class, function, or other global in a pickle. The global itself is never imported.

    Args:
        key: Name of the global, `module.qualified.name`.
        standin: Function that is called instead of the global. If None, a call creates a
            `PickledInstance`.
    """

    __slots__ = ("key", "standin")

    def __init__(self, key: str, standin: Standin | None) -> None:
        self.key = key
        self.standin = standin

    def __call__(self, *args: Any) -> Any:
        """Call the stand-in with the pickled arguments.

        If the global does not have one, create a `PickledInstance`.
        """
        return PickledInstance(self.key, args) if self.standin is None else self.standin(*args)


class PickledInstance:
    """Object in a pickle whose class is known only by name.

    Args:
        key: Name of the class, `module.qualified.name`.
        args: Arguments of the constructor.

    Attributes:
        state: State of the object, usually a dict of its attributes. None if the pickle sets no state.
        items: Dict items that the pickle sets.
        elements: List elements that the pickle appends.
    """

    __slots__ = ("args", "elements", "items", "key", "state")

    def __init__(self, key: str, args: tuple[Any, ...]) -> None:
        self.key = key
        self.args = args
        self.state: Any = None
        self.items: dict[Any, Any] = {}
        self.elements: list[Any] = []

    def get_contained_values(self) -> tuple[Any, ...]:
        """Return all values that the object contains."""
        return self.args, self.state, self.items, self.elements


# Types that a stand-in may copy
_SIZED = (str, bytes, tuple, list, dict, set, frozenset)
# Types that nest values. Sets only contain scalars.
_NESTING = (tuple, list, dict)
# Types that count as one value each
_SINGLE = frozenset({int, float, bool, type(None), PickledGlobal})
_TOO_MUCH_WORK = "copies more data than any valid pickle of its length (no code was run)"


class PickleRefusedError(Exception):
    """Error raised by opcodes and stand-ins to reject a pickle.

    The message does not contain the name of the file. `unpickle_without_code` converts the error to a
    `CheckpointError` that does.
    """


def unpickle_without_code(
    data: bytes,
    *,
    location: str,
    standins: Mapping[str, Standin | None],
    allowed_prefixes: tuple[str, ...] = (),
    resolve_persistent_id: Callable[[Any], Any] | None = None,
) -> Any:
    """Read a pickle without executing code from it.

    Args:
        data: Bytes of the pickle.
        location: File or record that contains the pickle, used in error messages.
        standins: Allow-list of globals, keyed by `module.name`. The value is a function that is called
            with the pickled arguments, or None to create a `PickledInstance`.
        allowed_prefixes: Prefixes of modules, ending in a dot. All classes in these modules are
            accepted and become a `PickledInstance`.
        resolve_persistent_id: Function that returns the object for a persistent ID, such as a storage
            of torch.save. If None, persistent IDs raise an error.

    Returns:
        A value that consists of dicts, lists, tuples, sets, scalars, `PickledGlobal`s,
        `PickledInstance`s, and results of stand-ins.

    Raises:
        CheckpointError: If a global is not on the allow-list, an opcode is not supported, or the data
            is damaged.
    """
    try:
        value = _PickleMachine(data, standins, allowed_prefixes, resolve_persistent_id).run()
        _check_value_size(value, _FREE_NODES + _NODES * len(data))
        return value
    except PickleRefusedError as error:
        raise UnsupportedCheckpointError(f"{location}: {error}") from None
    except (
        IndexError,
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        struct.error,
        OverflowError,
    ) as error:
        raise DamagedCheckpointError(
            f"{location}: is not a readable pickle ({type(error).__name__})"
        ) from None


class _PickleMachine:
    """Interpreter of a pickle's opcodes. See `unpickle_without_code` for the arguments."""

    def __init__(
        self,
        data: bytes,
        standins: Mapping[str, Standin | None],
        prefixes: tuple[str, ...],
        persistent: Callable[[Any], Any] | None,
    ) -> None:
        self.data = data
        self.standins = standins
        self.prefixes = prefixes
        self.persistent = persistent
        self.globals: dict[str, PickledGlobal] = {}
        self.work = _FREE_WORK + _WORK * len(data)
        self.tuple_keys = MAX_TUPLE_KEYS

    def call_standin(self, replacement: Any, args: Any) -> Any:
        """Call the stand-in of a pickled global, and return its result.

        The lengths of the arguments are subtracted from the remaining work, because the stand-in may copy
        them.

        Args:
            replacement: Object that the pickle calls.
            args: Arguments of the call.

        Raises:
            PickleRefusedError: If the called object is not a global on the allow-list, or if no work
                remains.
        """
        if type(replacement) is not PickledGlobal or type(args) is not tuple:
            raise PickleRefusedError("calls something that is not a known class")
        self.work -= len(args)
        for arg in args:
            if type(arg) in _SIZED:
                self.work -= len(arg)
        if self.work < 0:
            raise PickleRefusedError(_TOO_MUCH_WORK)
        return replacement(*args)

    def validate_key(self, key: Any) -> Any:
        """Return a dict key or set item unchanged if hashing and comparing it is fast.

        Strings, numbers, None, instances, globals, and tuples of scalars are accepted.

        Raises:
            PickleRefusedError: If the key is any other value or too large a number, or if there are too
                many tuples.
        """
        kind = type(key)
        if kind is int and not -MAX_KEY < key < MAX_KEY:
            raise PickleRefusedError("a dict key or set item is a number that is too large")
        if kind in _SCALARS or kind is PickledInstance or kind is PickledGlobal:
            return key
        if kind is tuple:  # Hashing nested tuples can take exponential time.
            self.work -= len(key)
            self.tuple_keys -= 1
            if self.work < 0 or self.tuple_keys < 0:
                raise PickleRefusedError(_TOO_MUCH_WORK)
            if all(type(item) in _SCALARS for item in key):
                return key
        raise PickleRefusedError("a dict key or set item is not a plain value")

    def set_dict_items(self, target: Any, flat: list[Any]) -> None:
        """Set items of a dict, or of the attribute `items` of a `PickledInstance`.

        Args:
            target: Dict or `PickledInstance`.
            flat: Keys and values in alternating order.

        Raises:
            PickleRefusedError: If `target` has any other type, or if a key is not a plain value.
        """
        if type(target) is PickledInstance:
            target = target.items
        if type(target) is not dict or len(flat) % 2:
            raise PickleRefusedError("sets items of something that is not a dict")
        for i in range(0, len(flat), 2):
            key = flat[i]
            target[key if type(key) is str else self.validate_key(key)] = flat[i + 1]

    def load_global(self, module: Any, name: Any) -> PickledGlobal:
        """Return a global if it is on the allow-list. Each name always returns the same object.

        Raises:
            PickleRefusedError: If the global is not on the allow-list.
        """
        if type(module) is not str or type(name) is not str:
            raise PickleRefusedError("a global has no name")
        if len(module) > MAX_NAME or len(name) > MAX_NAME:
            raise PickleRefusedError("the name of a global is too long")
        key = f"{_PYTHON2.get(module, module)}.{name}"
        loaded = self.globals.get(key)
        if loaded is None:
            if key not in self.standins and not key.startswith(self.prefixes or ("\0",)):
                shown = key if len(key) < 100 and key.isprintable() else "with an unprintable name"
                if _ELEMENT.fullmatch(shown):
                    raise PickleRefusedError(
                        f"contains a tensor of the element type {shown[6:]}, which is not supported"
                    )
                raise PickleRefusedError(
                    f"contains the Python object {shown}, which is not on the allow-list (no code was run)"
                )
            loaded = self.globals[key] = PickledGlobal(key, self.standins.get(key))
        return loaded

    def run(self) -> Any:  # This is one loop for speed, with the most frequent opcodes first.
        """Interpret the opcodes, and return the unpickled value.

        Raises:
            PickleRefusedError: If the pickle is truncated, or if it contains an unsupported opcode or global.
                Damaged data can also raise the exceptions that `unpickle_without_code` catches, such as
                `IndexError`.
        """
        data, end = self.data, len(self.data)
        stack: list[Any] = []
        push, pop = stack.append, stack.pop
        marks: list[int] = []
        memo: dict[int, Any] = {}
        pos = 0
        while True:
            op = data[pos]
            pos += 1
            if op == 0x94:  # MEMOIZE
                memo[len(memo)] = stack[-1]
            elif op == 0x68:  # BINGET
                push(memo[data[pos]])
                pos += 1
            elif op == 0x6A:  # LONG_BINGET
                push(memo[int.from_bytes(data[pos : pos + 4], "little")])
                pos += 4
            elif op == 0x71:  # BINPUT
                memo[data[pos]] = stack[-1]
                pos += 1
            elif op == 0x72:  # LONG_BINPUT
                memo[int.from_bytes(data[pos : pos + 4], "little")] = stack[-1]
                pos += 4
            elif op == 0x28:  # MARK
                marks.append(len(stack))
            elif op == 0x29:  # EMPTY_TUPLE
                push(())
            elif op == 0x4B:  # BININT1
                push(data[pos])
                pos += 1
            elif op == 0x81 or op == 0x52:  # NEWOBJ, REDUCE
                args, function = pop(), pop()
                push(self.call_standin(function, args))
            elif op == 0x62:  # BUILD
                state, target = pop(), stack[-1]
                if type(target) is PickledInstance:
                    target.state = state
                elif type(target) is not dict:  # attributes of an OrderedDict are not needed
                    raise PickleRefusedError("sets the state of something that is not a known class")
            elif op == 0x8C or op == 0x58 or op == 0x8D:  # SHORT_BINUNICODE, BINUNICODE, BINUNICODE8
                width = 1 if op == 0x8C else 4 if op == 0x58 else 8
                count = int.from_bytes(data[pos : pos + width], "little")
                pos += width + count
                if pos > end:
                    raise PickleRefusedError("truncated")
                push(data[pos - count : pos].decode("utf-8", "surrogatepass"))
            elif op == 0x7D:  # EMPTY_DICT
                push({})
            elif op == 0x75:  # SETITEMS
                mark = marks.pop()
                self.set_dict_items(stack[mark - 1], stack[mark:])
                del stack[mark:]
            elif op == 0x73:  # SETITEM
                value, key = pop(), pop()
                self.set_dict_items(stack[-1], [key, value])
            elif op == 0x85:  # TUPLE1
                stack[-1:] = [(stack[-1],)]
            elif op == 0x86:  # TUPLE2
                stack[-2:] = [(stack[-2], stack[-1])]
            elif op == 0x87:  # TUPLE3
                stack[-3:] = [(stack[-3], stack[-2], stack[-1])]
            elif op == 0x74:  # TUPLE
                mark = marks.pop()
                stack[mark:] = [tuple(stack[mark:])]
            elif op == 0x4D:  # BININT2
                push(data[pos] | data[pos + 1] << 8)
                pos += 2
            elif op == 0x4A:  # BININT
                push(int.from_bytes(data[pos : pos + 4], "little", signed=True))
                pos += 4
            elif op == 0x8A or op == 0x8B:  # LONG1, LONG4
                width = 1 if op == 0x8A else 4
                count = int.from_bytes(data[pos : pos + width], "little")
                if count > MAX_INT_BYTES:
                    raise PickleRefusedError("an integer is too long")
                pos += width + count
                push(int.from_bytes(data[pos - count : pos], "little", signed=True))
            elif op == 0x89:  # NEWFALSE
                push(False)
            elif op == 0x88:  # NEWTRUE
                push(True)
            elif op == 0x4E:  # NONE
                push(None)
            elif op == 0x5D:  # EMPTY_LIST
                push([])
            elif op == 0x65:  # APPENDS
                mark = marks.pop()
                _extend_list(stack[mark - 1], stack[mark:])
                del stack[mark:]
            elif op == 0x61:  # APPEND
                value = pop()
                _extend_list(stack[-1], [value])
            elif op == 0x47:  # BINFLOAT
                push(struct.unpack_from(">d", data, pos)[0])
                pos += 8
            elif op == 0x93:  # STACK_GLOBAL
                name, module = pop(), pop()
                push(self.load_global(module, name))
            elif op == 0x63:  # GLOBAL
                first = data.index(b"\n", pos)
                second = data.index(b"\n", first + 1)
                push(self.load_global(data[pos:first].decode(), data[first + 1 : second].decode()))
                pos = second + 1
            elif op == 0x51:  # BINPERSID
                if self.persistent is None:
                    raise PickleRefusedError("refers to data outside the pickle")
                push(self.persistent(pop()))
            elif op == 0x43 or op == 0x42 or op == 0x8E or op == 0x96:  # (SHORT_)BINBYTES(8), BYTEARRAY8
                width = 1 if op == 0x43 else 4 if op == 0x42 else 8
                count = int.from_bytes(data[pos : pos + width], "little")
                pos += width + count
                if pos > end:
                    raise PickleRefusedError("truncated")
                push(data[pos - count : pos])
            elif op == 0x8F:  # EMPTY_SET
                push(set())
            elif op == 0x90:  # ADDITEMS
                mark = marks.pop()
                if type(stack[mark - 1]) is not set:
                    raise PickleRefusedError("adds to something that is not a set")
                stack[mark - 1].update(self.validate_key(item) for item in stack[mark:])
                del stack[mark:]
            elif op == 0x91:  # FROZENSET
                mark = marks.pop()
                stack[mark:] = [frozenset(self.validate_key(item) for item in stack[mark:])]
            elif op == 0x92:  # NEWOBJ_EX
                kwargs, args, function = pop(), pop(), pop()
                if type(kwargs) is not dict or kwargs:
                    raise PickleRefusedError("calls something that is not a known class")
                push(self.call_standin(function, args))
            elif op == 0x30:  # POP
                pop()
            elif op == 0x31:  # POP_MARK
                del stack[marks.pop() :]
            elif op == 0x32:  # DUP
                push(stack[-1])
            elif op == 0x80:  # PROTO
                if data[pos] > 5:
                    raise PickleRefusedError(f"pickle protocol {data[pos]} is not known")
                pos += 1
            elif op == 0x95:  # FRAME, a hint for streaming readers
                pos += 8
            elif op == 0x2E:  # STOP
                if len(stack) != 1 or marks:
                    raise PickleRefusedError("the pickle ends with values left on the stack")
                return stack[0]
            else:
                raise PickleRefusedError(f"the pickle opcode 0x{op:02x} is not supported")
            if pos > end:
                raise PickleRefusedError("truncated")


def _extend_list(target: Any, values: list[Any]) -> None:
    """Append values in place to a list, or to the attribute `elements` of a `PickledInstance`.

    Raises:
        PickleRefusedError: If `target` has any other type.
    """
    if type(target) is PickledInstance:
        target = target.elements
    if type(target) is not list:
        raise PickleRefusedError("appends to something that is not a list")
    target.extend(values)


def _check_value_size(root: Any, limit: int) -> None:
    """Check that a value is neither nested too deeply nor too large.

    A container counts once per reference. Each `PickledInstance` is checked separately, because
    comparing and formatting do not visit its content.

    Args:
        root: Value to check.
        limit: Maximum number of values.

    Raises:
        PickleRefusedError: If the value is too large or too deep, or if a container contains itself.
    """
    # Number of values in a container, including the container itself, and its depth, keyed by its ID. IDs are
    # unique because all containers exist until the root is deleted.
    measured: dict[int, tuple[int, int]] = {}
    roots = [root]
    while roots:
        # Containers with parts that have not been measured yet. If one of them occurs again, it contains
        # itself.
        waiting: set[int] = set()
        stack = [roots.pop()]
        while stack:
            value = stack[-1]
            value_id, kind = id(value), type(value)
            if value_id in measured or kind not in _NESTING:
                stack.pop()
                if kind is PickledInstance and value_id not in measured:
                    measured[value_id] = 1, 0
                    roots += [part for part in value.get_contained_values() if part]
                continue
            size, depth, pending = 1, 0, []
            if kind is dict:
                size += len(value) + sum(len(key) for key in value if type(key) is tuple)
            for part in value.values() if kind is dict else value:
                kind = type(part)
                # most of these are sizes and offsets
                if kind is tuple and _SINGLE.issuperset(map(type, part)):
                    size += 1 + len(part)
                    depth = depth or 1
                elif kind in _NESTING:
                    measurement = measured.get(id(part))
                    if measurement is None:
                        pending.append(part)
                    else:
                        size += measurement[0]
                        depth = max(depth, measurement[1])
                elif kind is str or kind is bytes:
                    size += 1 + (len(part) >> 6)
                else:
                    size += 1
                    if kind is PickledInstance and id(part) not in measured:
                        measured[id(part)] = 1, 0
                        roots += [inner for inner in part.get_contained_values() if inner]
            if pending:
                if value_id in waiting:
                    raise PickleRefusedError("a container contains itself")
                waiting.add(value_id)
                stack += pending
            else:
                waiting.discard(value_id)
                stack.pop()
                measured[value_id] = size, depth + 1
            if depth >= MAX_DEPTH or len(waiting) > MAX_DEPTH:
                raise PickleRefusedError(f"containers are nested more than {MAX_DEPTH} levels deep")
            if size > limit:
                raise PickleRefusedError(
                    "repeats references to the same objects so often that the value is too large"
                )


def build_getattr_standin(members: Mapping[tuple[str, str], Any]) -> Standin:
    """Build a stand-in for `builtins.getattr` that looks up its result in a table.

    It never reads an attribute. Python pickles a nested class as a call to `getattr`. Early versions of
    Python 3.11 (such as 3.11.2 in Debian 12) also pickle enum members this way.

    Args:
        members: Result of `getattr`, keyed by the name of the object (a global on the allow-list) and
            the name of the attribute.

    Returns:
        The stand-in. It raises a `PickleRefusedError` for an attribute that is not in the table.
    """

    def look_up_member(*args: Any) -> Any:
        if len(args) == 2 and type(args[0]) is PickledGlobal and type(args[1]) is str:
            standin = members.get((args[0].key, args[1]))
            if standin is not None:
                return standin
        raise PickleRefusedError("reads an attribute that is not on the allow-list (no code was run)")

    return look_up_member


def build_inert_members(members: Mapping[str, tuple[str, ...]]) -> dict[tuple[str, str], PickledGlobal]:
    """Build a table for `build_getattr_standin` whose results are globals without a stand-in.

    Args:
        members: Names of the attributes, keyed by the name of the class that contains them.

    Returns:
        A `PickledGlobal` for each attribute, keyed by the name of the class and the name of the
        attribute.
    """
    return {
        (owner, name): PickledGlobal(f"{owner}.{name}", None)
        for owner, names in members.items()
        for name in names
    }


def is_safe_index(value: Any) -> bool:
    """Return whether a value is a nonnegative integer below `MAX_KEY`, which is safe as a dict key."""
    return type(value) is int and 0 <= value < MAX_KEY


def format_untrusted_value(value: Any) -> str:
    """Format a value from an untrusted file for an error message.

    Returns:
        The representation of a number or a short string, or the type of any other value.
    """
    if type(value) is str:
        return repr(value if len(value) <= 80 else value[:77] + "...")
    return repr(value) if type(value) in (int, float, bool, type(None)) else f"a {type(value).__name__}"


def to_json_value(value: Any, *, limit: int = 100_000) -> Any:
    """Convert a value from a pickle to a JSON value.

    Objects are replaced with their class names. With shared references, a small pickle can describe a
    large or infinite value, so values beyond the limit are replaced with `"..."`.

    Args:
        value: Value to convert.
        limit: Maximum number of values.
    """
    remaining = [limit]

    def walk(value: Any, depth: int) -> Any:
        remaining[0] -= 1
        if remaining[0] < 0 or depth > 50:
            return "..."
        if isinstance(value, (str, int, float, bool, type(None))):
            return value
        if isinstance(value, dict):
            return {str(k) if not isinstance(k, str) else k: walk(v, depth + 1) for k, v in value.items()}
        if isinstance(value, (list, tuple, set, frozenset)):
            return [walk(item, depth + 1) for item in value]
        if isinstance(value, (PickledInstance, PickledGlobal)):
            return value.key
        return type(value).__name__

    return walk(value, 0)
