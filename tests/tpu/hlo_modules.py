"""Small HLO modules, written field by field with the numbers in hlo.proto and xla_data.proto."""

from __future__ import annotations

from collections.abc import Sequence

F32, S32, BF16, PRED, TUPLE = 11, 4, 16, 1, 13
NAMES = {
    "parameter_number": 9,
    "tuple_index": 13,
    "channel_id": 26,
    "custom_call_target": 28,
    "called": 38,
    "backend_config": 43,
    "comparison_direction": 63,
}


def varint(value: int) -> bytes:
    """Encode an integer in base 128."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def field(number: int, value: int | bytes | str) -> bytes:
    """Serialize one field: an integer (a negative one as ``int64``), bytes, text or a message."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def numbers(*values: int) -> bytes:
    return b"".join(map(varint, values))


def shape(*dimensions: int, element: int = F32, memory: int = 0) -> bytes:
    layout = field(1, numbers(*reversed(range(len(dimensions)))))
    if memory:
        layout += field(8, memory)
    sizes = field(3, numbers(*dimensions)) + field(6, False) * len(dimensions) if dimensions else b""
    return field(2, element) + sizes + field(5, layout)


def tuple_of(*parts: bytes) -> bytes:
    return field(2, TUPLE) + b"".join(field(4, part) for part in parts)


def op(
    number: int,
    opcode: str,
    result: bytes,
    *operands: int,
    extra: bytes = b"",
    model: tuple[str, str, int] | None = None,
    **fields: int | str | bytes | list[int],
) -> bytes:
    """Serialize one instruction. ``model`` is the name, file and line of the operation that it comes from."""
    out = field(1, f"{opcode}.{number}") + field(2, opcode) + field(3, result) + field(35, number)
    if model is not None:
        out += field(7, field(2, model[0]) + field(3, model[1]) + field(4, model[2]))
    if operands:
        out += field(36, numbers(*operands))
    for name, value in fields.items():
        out += field(NAMES[name], numbers(*value) if isinstance(value, list) else value)
    return out + extra


def constant(number: int, value: int) -> bytes:
    literal = field(1, shape(element=S32)) + field(4, varint(value))
    return op(number, "constant", shape(element=S32), extra=field(8, literal))


def dot(number: int, result: bytes, left: int, right: int, *, extra: bytes = b"") -> bytes:
    axes = field(1, numbers(1)) + field(2, numbers(0))
    return op(
        number, "dot", result, left, right, extra=field(30, axes) + extra, model=("aten__mm", "llama.py", 12)
    )


def sharded(devices: int) -> bytes:
    """Serialize the annotation of a matrix that is sharded along its rows."""
    tiles = field(1, 3) + field(3, numbers(devices, 1)) + field(4, numbers(*range(devices)))
    return field(40, tiles)


def group(*devices: int) -> bytes:
    """Serialize the devices of a collective."""
    return field(49, field(1, numbers(*devices)))


def computation(
    number: int,
    instructions: Sequence[bytes],
    parameters: Sequence[bytes],
    result: bytes,
    root: int,
    *,
    fused: bool = False,
) -> bytes:
    return (
        field(1, f"computation.{number}")
        + b"".join(field(2, one) for one in instructions)
        + field(4, _signature(parameters, result))
        + field(5, number)
        + field(6, root)
        + (field(7, True) if fused else b"")
    )


def _signature(parameters: Sequence[bytes], result: bytes) -> bytes:
    names = b"".join(field(3, f"p{i}") for i in range(len(parameters)))
    return b"".join(field(1, one) for one in parameters) + field(2, result) + names


def module(
    others: Sequence[bytes],
    instructions: Sequence[bytes],
    parameters: Sequence[bytes],
    result: bytes,
    root: int,
    *,
    donated: Sequence[int] = (),
) -> bytes:
    """Serialize a module whose entry, computation 1, has these instructions."""
    entry = computation(1, instructions, parameters, result, root)
    donors = b"".join(field(1, field(1, one)) for one in donated)
    return (
        field(1, "module")
        + field(2, "computation.1")
        + b"".join(field(3, one) for one in (*others, entry))
        + field(4, _signature(parameters, result))
        + field(5, 1)
        + field(6, 1)
        + (field(18, donors) if donors else b"")
    )


def added(*dimensions: int, devices: int = 1, donated: bool = False) -> bytes:
    """Serialize a module that doubles an array."""
    array = shape(*dimensions)
    cut = sharded(devices) if devices > 1 else b""
    instructions = [
        op(1, "parameter", array, parameter_number=0, extra=cut),
        op(2, "add", array, 1, 1, extra=cut),
    ]
    return module([], instructions, [array], array, 2, donated=[0] if donated else [])


def custom(target: str) -> bytes:
    """Serialize a module with a custom call that no compiler supports."""
    array = shape(8)
    instructions = [
        op(1, "parameter", array, parameter_number=0),
        op(2, "custom-call", array, 1, custom_call_target=target, model=("aten__foo", "llama.py", 7)),
    ]
    return module([], instructions, [array], array, 2)


def loop(trips: int, width: int, devices: int, *, counting: Sequence[bytes] = ()) -> bytes:
    """Serialize a module that multiplies a sharded matrix with itself ``trips`` times.

    ``counting`` replaces the instructions that add 1 to the counter. They get the counter from instruction 11
    and the constant 1 from instruction 13, and the last one is instruction 14.
    """
    matrix, counter, flag = shape(width, width), shape(element=S32), shape(element=PRED)
    carried, cut = tuple_of(counter, matrix), sharded(devices)
    body = [
        op(10, "parameter", carried, parameter_number=0),
        op(11, "get-tuple-element", counter, 10, tuple_index=0),
        op(12, "get-tuple-element", matrix, 10, tuple_index=1),
        constant(13, 1),
        *(counting or [op(14, "add", counter, 11, 13)]),
        dot(15, matrix, 12, 12, extra=cut),
        op(16, "tanh", matrix, 15, extra=cut),
        op(17, "tuple", carried, 14, 16),
    ]
    condition = [
        op(20, "parameter", carried, parameter_number=0),
        op(21, "get-tuple-element", counter, 20, tuple_index=0),
        constant(22, trips),
        op(23, "compare", flag, 21, 22, comparison_direction="LT"),
    ]
    entry = [
        op(1, "parameter", matrix, parameter_number=0, extra=cut),
        constant(2, 0),
        op(3, "tuple", carried, 2, 1),
        op(4, "while", carried, 3, called=[2, 3]),
        op(5, "get-tuple-element", matrix, 4, tuple_index=1),
    ]
    others = [
        computation(2, body, [carried], carried, 17),
        computation(3, condition, [carried], flag, 23),
    ]
    return module(others, entry, [matrix], matrix, 5)


def nested_loops(outer: int, inner: int, width: int) -> bytes:
    """Serialize a loop that computes a ``tanh`` and then runs another loop, which computes a ``tanh``."""
    matrix, counter, flag = shape(width, width), shape(element=S32), shape(element=PRED)
    carried = tuple_of(counter, matrix)

    def repeat(start: int, trips: int, *inside: bytes, result: int) -> list[bytes]:
        body = [
            op(start, "parameter", carried, parameter_number=0),
            op(start + 1, "get-tuple-element", counter, start, tuple_index=0),
            op(start + 2, "get-tuple-element", matrix, start, tuple_index=1),
            constant(start + 3, 1),
            op(start + 4, "add", counter, start + 1, start + 3),
            op(start + 5, "tanh", matrix, start + 2),
            *inside,
            op(start + 9, "tuple", carried, start + 4, result),
        ]
        condition = [
            op(start + 10, "parameter", carried, parameter_number=0),
            op(start + 11, "get-tuple-element", counter, start + 10, tuple_index=0),
            constant(start + 12, trips),
            op(start + 13, "compare", flag, start + 11, start + 12, comparison_direction="LT"),
        ]
        return [
            computation(start, body, [carried], carried, start + 9),
            computation(start + 10, condition, [carried], flag, start + 13),
        ]

    def run_loop(start: int, value: int, called: int) -> list[bytes]:
        return [
            constant(start, 0),
            op(start + 1, "tuple", carried, start, value),
            op(start + 2, "while", carried, start + 1, called=[called, called + 10]),
            op(start + 3, "get-tuple-element", matrix, start + 2, tuple_index=1),
        ]

    others = [
        *repeat(300, inner, result=305),
        *repeat(100, outer, *run_loop(200, 105, 300), result=203),
    ]
    entry = [op(1, "parameter", matrix, parameter_number=0), *run_loop(2, 1, 100)]
    return module(others, entry, [matrix], matrix, 5)
