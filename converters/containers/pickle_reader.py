"""Read pickles without executing code.

The reader interprets the opcodes itself and builds plain containers. Globals are looked up in an
allow-list of names and module prefixes. A name may have a stand-in: a function of this package that
converts the arguments of a call to plain data. Calling an allowed global without a stand-in creates
a `PickledInstance`. Any other global raises an error with its name, unless the name is long or
unprintable. Nothing is imported, no attribute is set, and no constructor is called.

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
# Limits on the number of items (arguments and keys) that may be copied out of containers: a number per byte
# of the pickle, plus a constant. Pickles written by libraries copy less than one item per byte.
_WORK, _FREE_WORK = 8, 100_000
# Limits on the number of values: a number per byte of the pickle, plus a constant. Shared values are counted
# at every reference. A pickle without sharing has less than one value per byte.
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
        """Call the stand-in with these arguments instead of the pickled class or function.

        Without a stand-in, create a `PickledInstance` from the arguments.
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
        """Return the constructor arguments, the state, the dict items, and the list elements.

        Together, they contain all values that are nested in this object.
        """
        return self.args, self.state, self.items, self.elements


# Types that a stand-in may copy, so that their lengths count as work
_SIZED = (str, bytes, tuple, list, dict, set, frozenset)
# Types that nest values. Sets only contain scalars.
_NESTING = (tuple, list, dict)
# Types that count as one value each
_SINGLE = frozenset({int, float, bool, type(None), PickledGlobal})
_TOO_MUCH_WORK = "the pickle copies more data than any valid pickle of its length (no code was run)"


class PickleRefusedError(Exception):
    """Error that is raised internally to refuse a pickle.

    For example, the pickle contains an unsupported opcode, a class or function that is not on the
    allow-list, or too many references to the same objects. Stand-ins, the functions that replace
    the classes and functions in the pickle, may raise the error as well.

    The message does not contain the name of the file. `unpickle_without_code` converts the error to
    a `CheckpointError` whose message contains the name.
    """


class DamagedPickleError(PickleRefusedError):
    """Error that rejects a pickle because it is certainly damaged.

    For example, the pickle is truncated, or it calls an object that is not a class or function. The
    error is raised while an opcode is executed, or by a stand-in, which is a function that replaces
    a class or function in the pickle.
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
        standins: Allow-list of globals, keyed by `module.name`. Modules have their Python 3 names,
            such as `builtins`. The value is a function that is called with the pickled arguments,
            or None to create a `PickledInstance`.
        allowed_prefixes: Prefixes of modules, ending in a dot. All globals in these modules are
            accepted. A call creates a `PickledInstance`, unless `standins` contains the global.
        resolve_persistent_id: Function that returns the object for a persistent ID, such as a
            storage of torch.save. If None, persistent IDs raise an error.

    Returns:
        A value that consists of dicts, lists, tuples, sets, frozensets, scalars, bytes,
        `PickledGlobal`s, `PickledInstance`s, and results of stand-ins and of
        `resolve_persistent_id`. A bytearray becomes bytes.

    Raises:
        CheckpointError: If a global is not on the allow-list, an opcode or a persistent ID is not
            supported, the value is too large or nested too deeply, or the data is damaged.
    """
    try:
        value = _PickleMachine(data, standins, allowed_prefixes, resolve_persistent_id).run()
        _check_value_size(value, _FREE_NODES + _NODES * len(data))
        return value
    except DamagedPickleError as error:
        raise DamagedCheckpointError(f"{location}: damaged: {error}") from None
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
            f"{location}: damaged: the pickle cannot be read ({type(error).__name__})"
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
        """Call the stand-in for a pickled class or function, and return its result.

        A stand-in is a function that is called instead of the class or function that the pickle
        names. It may copy its arguments. To limit such copies, the number of arguments and their
        lengths are subtracted from `work`. This budget is the number of items that the pickle may
        still copy.

        Args:
            replacement: Object to call. It must be a `PickledGlobal`, which contains the stand-in.
            args: Tuple of the call's arguments.

        Raises:
            DamagedPickleError: If the called object is not a class or function, or if the arguments
                are not a tuple.
            PickleRefusedError: If the budget is exceeded.
        """
        if type(replacement) is not PickledGlobal or type(args) is not tuple:
            raise DamagedPickleError(
                "the pickle calls an object that is not a class or function (no code was run)"
            )
        self.work -= len(args)
        for arg in args:
            if type(arg) in _SIZED:
                self.work -= len(arg)
        if self.work < 0:
            raise PickleRefusedError(_TOO_MUCH_WORK)
        return replacement(*args)

    def validate_key(self, key: Any) -> Any:
        """Return a dict key or set item unchanged if hashing and comparing it is fast.

        Strings, bytes, numbers, None, `PickledInstance`s, `PickledGlobal`s, and tuples of scalars
        are accepted. An integer must have an absolute value below `MAX_KEY`. At most
        `MAX_TUPLE_KEYS` tuples are accepted per pickle, and their lengths are subtracted from
        `work`.

        Raises:
            PickleRefusedError: If the key has another type or is too large an integer, or if one of
                the two limits for tuples is exceeded.
        """
        kind = type(key)
        if kind is int and not -MAX_KEY < key < MAX_KEY:
            raise PickleRefusedError(
                f"the pickle contains the integer {key:,} as a dict key or set item, but only integers from "
                f"{1 - MAX_KEY:,} to {MAX_KEY - 1:,} are supported"
            )
        if kind in _SCALARS or kind is PickledInstance or kind is PickledGlobal:
            return key
        if kind is tuple:  # Hashing nested tuples can take exponential time.
            self.work -= len(key)
            self.tuple_keys -= 1
            if self.work < 0 or self.tuple_keys < 0:
                raise PickleRefusedError(_TOO_MUCH_WORK)
            if all(type(item) in _SCALARS for item in key):
                return key
        raise PickleRefusedError(
            "the pickle has a dict key or set item that is not a string, a number, None or a tuple of these"
        )

    def set_dict_items(self, target: Any, flat: list[Any]) -> None:
        """Set items of a dict, or of the attribute `items` of a `PickledInstance`.

        Args:
            target: Dict or `PickledInstance`.
            flat: Keys and values in alternating order.

        Raises:
            PickleRefusedError: If `target` has any other type, if the last key has no value, or if
                `validate_key` rejects a key.
        """
        if type(target) is PickledInstance:
            target = target.items
        if type(target) is not dict:
            raise DamagedPickleError("the pickle sets dict items of an object that is not a dict")
        if len(flat) % 2:
            raise DamagedPickleError("the pickle sets a dict key without a value")
        for i in range(0, len(flat), 2):
            key = flat[i]
            target[key if type(key) is str else self.validate_key(key)] = flat[i + 1]

    def load_global(self, module: Any, name: Any) -> PickledGlobal:
        """Return the reference to a class or function if it is on the allow-list.

        The class or function itself is never imported. Calls with the same module and name return
        the same object. The Python 2 module names `__builtin__` and `copy_reg` are replaced with
        `builtins` and `copyreg` before the lookup.

        Args:
            module: Name of the module, read from the pickle.
            name: Qualified name in the module, read from the pickle.

        Raises:
            PickleRefusedError: If the class or function is not on the allow-list, or if a name is
                too long or not a string.
        """
        if type(module) is not str or type(name) is not str:
            raise DamagedPickleError("the pickle refers to a class or function whose name is not a string")
        if len(module) > MAX_NAME or len(name) > MAX_NAME:
            raise PickleRefusedError(
                f"the pickle refers to a class or function with a name of more than {MAX_NAME:,} characters"
            )
        key = f"{_PYTHON2.get(module, module)}.{name}"
        loaded = self.globals.get(key)
        if loaded is None:
            if key not in self.standins and not key.startswith(self.prefixes or ("\0",)):
                shown = key if len(key) < 100 and key.isprintable() else "with a long or unprintable name"
                if _ELEMENT.fullmatch(shown):
                    raise PickleRefusedError(
                        f"contains a tensor of the element type {shown[6:]}, which is not supported"
                    )
                raise PickleRefusedError(
                    f"contains the Python class or function {shown}, which is not on the allow-list (no code "
                    "was run)"
                )
            loaded = self.globals[key] = PickledGlobal(key, self.standins.get(key))
        return loaded

    def run(self) -> Any:  # This is one loop for speed, with the most frequent opcodes first.
        """Interpret the opcodes, and return the unpickled value.

        Raises:
            PickleRefusedError: If the pickle is damaged, exceeds a limit, or contains an unsupported
                feature, such as an opcode or a global. Damaged data can also raise the exceptions that
                `unpickle_without_code` catches, such as `IndexError`.
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
                    raise PickleRefusedError(
                        "the pickle sets attributes of an object whose type is not supported"
                    )
            elif op == 0x8C or op == 0x58 or op == 0x8D:  # SHORT_BINUNICODE, BINUNICODE, BINUNICODE8
                width = 1 if op == 0x8C else 4 if op == 0x58 else 8
                count = int.from_bytes(data[pos : pos + width], "little")
                pos += width + count
                if pos > end:
                    raise DamagedPickleError("the pickle is truncated")
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
                    raise PickleRefusedError(
                        f"the pickle contains an integer of {count:,} bytes, but at most {MAX_INT_BYTES} are "
                        "supported"
                    )
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
                    raise PickleRefusedError(
                        "the pickle contains a persistent ID, which refers to data outside the file"
                    )
                push(self.persistent(pop()))
            elif op == 0x43 or op == 0x42 or op == 0x8E or op == 0x96:  # (SHORT_)BINBYTES(8), BYTEARRAY8
                width = 1 if op == 0x43 else 4 if op == 0x42 else 8
                count = int.from_bytes(data[pos : pos + width], "little")
                pos += width + count
                if pos > end:
                    raise DamagedPickleError("the pickle is truncated")
                push(data[pos - count : pos])
            elif op == 0x8F:  # EMPTY_SET
                push(set())
            elif op == 0x90:  # ADDITEMS
                mark = marks.pop()
                if type(stack[mark - 1]) is not set:
                    raise DamagedPickleError("the pickle adds set items to an object that is not a set")
                stack[mark - 1].update(self.validate_key(item) for item in stack[mark:])
                del stack[mark:]
            elif op == 0x91:  # FROZENSET
                mark = marks.pop()
                stack[mark:] = [frozenset(self.validate_key(item) for item in stack[mark:])]
            elif op == 0x92:  # NEWOBJ_EX
                kwargs, args, function = pop(), pop(), pop()
                if type(kwargs) is not dict or kwargs:
                    raise PickleRefusedError(
                        "the pickle calls a class with keyword arguments, which is not supported"
                    )
                push(self.call_standin(function, args))
            elif op == 0x30:  # POP
                pop()
            elif op == 0x31:  # POP_MARK
                del stack[marks.pop() :]
            elif op == 0x32:  # DUP
                push(stack[-1])
            elif op == 0x80:  # PROTO
                if data[pos] > 5:
                    raise PickleRefusedError(
                        f"the pickle has the protocol {data[pos]}, but only protocols up to 5 are supported"
                    )
                pos += 1
            elif op == 0x95:  # FRAME, a hint for streaming readers
                pos += 8
            elif op == 0x2E:  # STOP
                if len(stack) != 1 or marks:
                    raise DamagedPickleError("the pickle ends before all its values are used")
                return stack[0]
            else:
                raise PickleRefusedError(
                    f"the pickle contains the opcode 0x{op:02x}, which torch.save does not write with its "
                    "default pickle_protocol"
                )
            if pos > end:
                raise DamagedPickleError("the pickle is truncated")


def _extend_list(target: Any, values: list[Any]) -> None:
    """Append values in place to a list, or to the attribute `elements` of a `PickledInstance`.

    Raises:
        PickleRefusedError: If `target` has any other type.
    """
    if type(target) is PickledInstance:
        target = target.elements
    if type(target) is not list:
        raise DamagedPickleError("the pickle appends to an object that is not a list")
    target.extend(values)


def _check_value_size(root: Any, limit: int) -> None:
    """Check that a value is neither nested too deeply nor too large.

    A container that is referenced several times counts each time. A string or bytes object in a
    list, a tuple, or the values of a dict counts once, and once more per 64 characters or bytes.

    A `PickledInstance` counts as one value, because comparing or formatting it does not visit its
    content. Its arguments, state, items, and elements are checked separately. The same limits apply
    to each of them.

    Args:
        root: Value to check.
        limit: Maximum number of values, including containers and nested values.

    Raises:
        PickleRefusedError: If the value is too large or nested more than `MAX_DEPTH` levels deep,
            or if a list, tuple, or dict contains itself. A cycle through a `PickledInstance` is
            accepted.
    """
    # For each container, keyed by its ID: the number of values in it, including itself, and its depth. IDs
    # are unique, because all containers exist until the root is deleted.
    measured: dict[int, tuple[int, int]] = {}
    roots = [root]
    while roots:
        # Containers whose parts are still being measured. If one of them occurs again, it contains itself.
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
                # fast path, because most parts are tuples of sizes and offsets
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
                    raise PickleRefusedError("the pickle contains a list or dict that contains itself")
                waiting.add(value_id)
                stack += pending
            else:
                waiting.discard(value_id)
                stack.pop()
                measured[value_id] = size, depth + 1
            if depth >= MAX_DEPTH or len(waiting) > MAX_DEPTH:
                raise PickleRefusedError(
                    f"the lists and dicts in the pickle are nested more than {MAX_DEPTH} levels deep"
                )
            if size > limit:
                raise PickleRefusedError(
                    "the pickle repeats references to the same objects so often that the value is too large "
                    f"(more than {limit:,} items)"
                )


def build_getattr_standin(members: Mapping[tuple[str, str], Any]) -> Standin:
    """Build a stand-in for `builtins.getattr` that looks up its result in a table.

    It never reads an attribute. With protocols below 4, Python pickles a nested class as a call to
    `getattr`. Early versions of Python 3.11 (such as 3.11.2 in Debian 12) also pickle enum members this
    way.

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
        raise PickleRefusedError(
            "the pickle reads an attribute that is not on the allow-list (no code was run)"
        )

    return look_up_member


def build_inert_members(members: Mapping[str, tuple[str, ...]]) -> dict[tuple[str, str], PickledGlobal]:
    """Build a table of the class attributes that a pickle may look up with `getattr`.

    The table is an argument of `build_getattr_standin`. The function built there replaces `getattr`
    and refuses attributes that are not in its table. The reader never needs the value of an
    attribute in the table, so the lookup returns a `PickledGlobal` with the full name of the
    attribute. If the pickle calls this object, for example to create an instance of a nested class,
    the result is a `PickledInstance`, and no code of the class is run.

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
        The representation of a number, a boolean, None, or a string, or the type of any other value. A
        string of more than 80 characters is truncated.
    """
    if type(value) is str:
        return repr(value if len(value) <= 80 else value[:77] + "...")
    return repr(value) if type(value) in (int, float, bool, type(None)) else f"a {type(value).__name__}"


def to_json_value(value: Any, *, limit: int = 100_000) -> Any:
    """Convert a value from a pickle to a JSON value.

    Dict keys are converted with `str`, and tuples and sets become lists. A `PickledInstance` or
    `PickledGlobal` is replaced with its full name, and any other unsupported value, such as bytes
    or a tensor, with the name of its type.

    With shared references, a small pickle can describe a large or infinite structure. Therefore, at
    most `limit` values are converted. Each value that is reached after that, or that is nested
    deeper than 50 levels, is replaced with `"..."`.

    Args:
        value: Value to convert.
        limit: Maximum number of values to convert, including containers and nested values.
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
