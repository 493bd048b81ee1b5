"""Checkpoints under the names of published files, and under the names that transformers uses in memory.

Both directions follow `converters.names.name_rules`. Tensors are rearranged lazily: most operations of the
rules cut or stack along rows, so the result consists of spans of the same files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from converters.errors import CheckpointError, blame
from converters.limits import MAX_EXPERTS
from converters.names.name_rules import Direction, Renaming, natural_order, with_legacy, writing
from converters.tensors.arranged import (
    Arrangement,
    chunks,
    concatenated,
    regrouped,
    selected,
    sliced,
    source,
    split,
    stacked,
    transposed,
    zeros,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from converters.names.name_rules import NameRules, Operation
    from converters.tensors.tensor import Shape

Arrays = dict[str, list[Arrangement]]


@dataclass(frozen=True)
class _Call:
    """The context of an operation.

    Attributes:
        direction: The direction of the rule that is applied.
        name: Name of the result, in which the first target is expanded.
        config: The model's `config.json`.
        shape_of: Returns the shape of a parameter in memory, or None if it is unknown.
    """

    direction: Direction
    name: str
    config: Mapping[str, Any]
    shape_of: Callable[[str], Shape | None]

    @property
    def text(self) -> Mapping[str, Any]:
        """The config of the text model."""
        found = self.config.get("text_config")
        return found if isinstance(found, dict) else self.config


def to_files(shapes: Mapping[str, Shape], rules: NameRules) -> dict[str, Arrangement]:
    """Arrange the tensors of a model in memory as in its published files.

    Args:
        shapes: Shape of each tensor, by its name in memory.
        rules: The rules of the model.

    Returns:
        The arrangement of each published tensor, by its name.

    Raises:
        CheckpointError: A tensor cannot be rearranged.
    """
    renaming = Renaming(writing(rules), write=True)
    groups: dict[str, _Group] = {}
    for name in natural_order(shapes):
        key, converter = renaming.convert(name)
        if converter is None:
            key = renaming.rename(name)
        groups.setdefault(key, _Group(converter)).add(name, converter, shapes[name])
    found: dict[str, Arrangement] = {}
    for key, group in groups.items():
        if group.converter is None:
            found[key] = group.only()
            continue
        direction = renaming.direction(group.converter[0])
        made = group.convert(_Call(direction, key, rules.config, lambda name: shapes.get(name)))
        found |= {renaming.rename(name): values for name, values in made.items()}
    return found


def to_memory(
    shapes: Mapping[str, Shape],
    rules: NameRules,
    live: Mapping[str, Shape] | None = None,
    refused: dict[str, str] | None = None,
) -> dict[str, Arrangement]:
    """Arrange the tensors of published files as in memory.

    Args:
        shapes: Shape of each tensor, by its published name.
        rules: The rules of the model.
        live: Shapes of the model's tensors in memory, if known. They decide about the base model's prefix.
        refused: Receives the tensors that cannot be rearranged, with the reason.

    Raises:
        CheckpointError: A tensor cannot be rearranged, and `refused` is None.
    """
    everything = with_legacy(rules) if not rules.recorded else rules
    renaming = Renaming(everything.rules, write=False)
    groups: dict[str, _Group] = {}
    for name in natural_order(shapes):
        key, converter = renaming.convert(renaming.rename(name))
        if live is not None:
            key = _with_base(key, rules.base, live)
            if key not in live and name in live:
                key, converter = name, None
        groups.setdefault(key, _Group(converter)).add(name, converter, shapes[name])
    found: dict[str, Arrangement] = {}

    def shape_of(name: str) -> Shape | None:
        return None if live is None else live.get(name)

    for key, group in groups.items():
        try:
            if group.converter is None:
                found[key] = group.only()
                continue
            direction = renaming.direction(group.converter[0])
            found |= group.convert(_Call(direction, key, rules.config, shape_of))
        except CheckpointError as error:
            if refused is None:
                raise
            refused[key] = str(error)
    return found


def unclaimed(names: Collection[str], rules: NameRules, live: Collection[str]) -> list[str]:
    """Return the published names that no tensor of the model in memory has.

    Args:
        names: All names in the files.
        rules: The rules of the model.
        live: The names of the model's tensors in memory, including tied ones.
    """
    everything = with_legacy(rules) if not rules.recorded else rules
    renaming = Renaming(everything.rules, write=False)
    found = []
    for name in natural_order(names):
        key, _ = renaming.convert(renaming.rename(name))
        if _with_base(key, rules.base, live) not in live and name not in live:
            found.append(name)
    return found


def _with_base(key: str, base: str, live: Collection[str]) -> str:
    """Add the base model's module in front of a name, or remove it, if only then the model has the name."""
    if not base:
        return key
    if key.startswith(base) and key[len(base) + 1 :] in live:
        return key[len(base) + 1 :]
    return f"{base}.{key}" if f"{base}.{key}" in live else key


def are_live(names: Collection[str], rules: NameRules) -> bool:
    """Whether these are names in memory that differ from the published ones.

    Files of other programs may hold either kind of names. A name in memory changes when it is written, and
    reading the result gives the same name again; a published name does the same in the other order. Names
    that do both decide nothing.
    """
    back = Renaming(writing(rules), write=True)
    forth = Renaming(with_legacy(rules).rules, write=False)

    def written(name: str) -> tuple[str, bool]:
        changed, converter = back.convert(name)
        changed = back.rename(changed.replace("*.", "0."))
        return changed, converter is not None or changed != name

    def read(name: str) -> tuple[str, bool]:
        changed, converter = forth.convert(forth.rename(name))
        return changed, converter is not None or changed != name

    def returns(name: str, first: Callable[[str], tuple[str, bool]], second: Callable[[str], Any]) -> bool:
        changed, differs = first(name)
        return differs and _numbers(second(changed)[0]) == _numbers(name)

    live = published = 0
    # One expert and one layer decide for all: a large mixture has 100,000 names.
    for name in {_numbers(name): name for name in natural_order(names)}.values():
        one, other = returns(name, written, read), returns(name, read, written)
        live += one and not other
        published += other and not one
    return live > published


def _numbers(name: str) -> str:
    """Return the name with one number for all, since the experts of a stack become expert 0."""
    return re.sub(r"\d+", "0", name)


class _Group:
    """Tensors that one rule turns into others."""

    def __init__(self, converter: tuple[int, str] | None) -> None:
        self.converter = converter
        self.arrays: Arrays = {}

    def add(self, name: str, converter: tuple[int, str] | None, shape: Shape) -> None:
        pattern = "" if converter is None else converter[1]
        self.arrays.setdefault(pattern, []).append(source(name, shape))

    def only(self) -> Arrangement:
        arrays = [values for found in self.arrays.values() for values in found]
        if len(arrays) > 1:
            names = " and ".join(repr(values.sources()[0]) for values in arrays[:2])
            raise CheckpointError(f"{names} would get the same name; --names live writes them as they are")
        return arrays[0]

    def convert(self, call: _Call) -> dict[str, Arrangement]:
        """Apply the operations of the rule.

        Returns:
            The results by name.
        """
        arrays = dict(self.arrays)
        with blame(call.name):
            for operation in call.direction.operations:
                function = _OPERATIONS.get(operation[0])
                if function is None:
                    raise CheckpointError(
                        f"transformers' {operation[0]} is not supported here; --names live writes the "
                        "tensors as they are"
                    )
                arrays = function(arrays, operation, call)
        full = call.name.replace("*.", "0.")
        target = next((key for key in arrays if key in full), None)
        if target is None:
            return {key: values[0] for key, values in arrays.items()}
        front, _, rest = full.partition(target)
        return {front + key + rest: values[0] for key, values in arrays.items()}


def _only(arrays: Arrays) -> Arrangement:
    if len(arrays) != 1 or any(len(values) != 1 for values in arrays.values()):
        raise CheckpointError("belongs to several tensors where one is expected")
    return next(iter(arrays.values()))[0]


def _stack(arrays: Arrays, operation: Operation, call: _Call) -> Arrays:
    (dim,) = operation[1:]
    if len(arrays) == 1:
        return {call.direction.targets[0]: [stacked(next(iter(arrays.values())), dim)]}
    return {pattern: [stacked(values, dim)] for pattern, values in arrays.items()}


def _unstack(arrays: Arrays, operation: Operation, call: _Call) -> Arrays:
    (dim,) = operation[1:]
    found: Arrays = {}
    for pattern, (values, *_) in arrays.items():
        name = call.direction.targets[0] if len(arrays) == 1 else pattern
        if values.shape[dim] > MAX_EXPERTS:
            raise CheckpointError(f"a stack of {values.shape[dim]:,} experts is not supported")
        for i in range(values.shape[dim]):
            found[name.replace("*", str(i))] = [selected(values, dim, i)]
    return found


def _cat(arrays: Arrays, operation: Operation, call: _Call) -> Arrays:
    dim = operation[1]
    parts = [one for pattern in call.direction.sources for one in arrays.get(pattern, ())]
    # Earlier operations may have replaced the patterns by names of their own.
    parts = parts or [one for values in arrays.values() for one in values]
    return {call.direction.targets[0]: [concatenated(parts, dim)]}


def _chunk(arrays: Arrays, operation: Operation, call: _Call) -> Arrays:
    dim, attribute = operation[1:]
    values = _only(arrays)
    targets = list(call.direction.targets)
    if attribute is not None:
        count = call.text.get(attribute)
        if type(count) is not int or not 0 < count <= values.shape[dim]:
            raise CheckpointError(f"config.json has no {attribute}, which says how many parts it has")
        targets = [targets[0].replace("*", str(i)) for i in range(count)]
    return {name: [part] for name, part in zip(targets, chunks(values, dim, len(targets)), strict=False)}


def _split(arrays: Arrays, operation: Operation, call: _Call) -> Arrays:
    (dim,) = operation[1:]
    targets = call.direction.targets
    sizes = []
    for target in targets:
        shape = call.shape_of(call.name.replace(targets[0], target))
        if shape is None:
            raise CheckpointError("has parts whose sizes only the model knows; this is not supported here")
        sizes.append(shape[dim])
    parts = split(_only(arrays), dim, sizes)
    return {name: [part] for name, part in zip(targets, parts, strict=True)}


def _transpose(arrays: Arrays, operation: Operation, call: _Call) -> Arrays:
    first, second, check = operation[1:]
    values = _only(arrays)
    pattern = next(iter(arrays)) if len(call.direction.targets) > 1 else call.direction.targets[0]
    if check:
        shape = call.shape_of(call.name)
        if shape is None:
            raise CheckpointError("may be transposed, which only the model knows; this is not supported here")
        if shape == values.shape:
            return {pattern: [values]}
    return {pattern: [transposed(values, first, second)]}


def _interleave(arrays: Arrays, operation: Operation, call: _Call) -> Arrays:
    dim, inverse = operation[1:]
    values = _only(arrays)
    outer = 2 if inverse else values.shape[dim] // 2
    return {call.direction.targets[0]: [regrouped(values, dim, outer)]}


def _rope(arrays: Arrays, operation: Operation, call: _Call) -> Arrays:
    part, names, inverse = operation[1:]
    config: Any = call.config if part is None else call.config.get(part, call.config)
    heads = config.get("num_attention_heads", 1) if isinstance(config, dict) else 1
    single = len(call.direction.targets) == 1 and len(call.direction.sources) == 1
    found: Arrays = {}
    for pattern, (values, *_) in arrays.items():
        if names is None or any(name in pattern for name in names):
            rows = values.shape[0]
            if type(heads) is not int or heads < 1 or rows % heads or (rows // heads) % 2:
                raise CheckpointError(f"{rows} rows do not divide into pairs of {heads} attention heads")
            size = rows // heads
            outer = 2 if inverse else size // 2
            values = concatenated(
                [regrouped(sliced(values, 0, head * size, size), 0, outer) for head in range(heads)], 0
            )
        found[call.direction.targets[0] if single else pattern] = [values]
    return found


def _fuse_experts(arrays: Arrays, operation: Operation, call: _Call) -> Arrays:
    """Stack the experts for text and the experts for images separately, and concatenate their parts."""
    stack, cat = operation[1:]
    targets = call.direction.targets
    found: dict[str, list[Arrangement]] = {target: [] for target in targets}
    for pattern in call.direction.sources:
        experts = arrays[pattern]
        size = -(-len(experts) // len(targets))
        for i, target in enumerate(targets):
            found[target].append(stacked(experts[i * size : (i + 1) * size], stack))
    return {target: [concatenated(parts, cat)] for target, parts in found.items()}


def _part_experts(arrays: Arrays, operation: Operation, call: _Call) -> Arrays:
    """Undo `_fuse_experts`."""
    stack, cat = operation[1:]
    targets = call.direction.targets
    parts = [chunks(arrays[pattern][0], cat, len(targets)) for pattern in call.direction.sources]
    found: Arrays = {}
    for i, target in enumerate(targets):
        experts = [selected(part[i], stack, n) for part in parts for n in range(part[i].shape[stack])]
        found |= {target.replace("*", str(n)): [expert] for n, expert in enumerate(experts)}
    return found


def _merge_queries(arrays: Arrays, operation: Operation, call: _Call) -> Arrays:
    """Join the queries of each layer that is run in a loop, or part them again."""
    (inverse,) = operation[1:]
    first, second = (*call.direction.targets, *call.direction.sources)[:2]
    if inverse:
        values = _only(arrays)

        def rows(order: tuple[int, int]) -> Arrangement:
            layers = [selected(values, 0, i) for i in range(values.shape[0])]
            return concatenated([sliced(layer, 0, n, 1) for layer in layers for n in order], 0)

        return {first: [rows((0, 3))], second: [rows((1, 2))]}
    queries, others = (arrays[pattern][0] for pattern in call.direction.sources)
    layers = [
        concatenated(
            [sliced(queries, 0, 2 * i, 1), sliced(others, 0, 2 * i, 2), sliced(queries, 0, 2 * i + 1, 1)], 0
        )
        for i in range(queries.shape[0] // 2)
    ]
    return {call.direction.targets[0]: [stacked(layers, 0)]}


def _unpad(arrays: Arrays, operation: Operation, call: _Call) -> Arrays:
    """Remove the rows of the output head that no token uses, or add them again as zeros."""
    (inverse,) = operation[1:]
    values = _only(arrays)
    key = "vocab_size" if inverse else "unpadded_vocab_size"
    rows = call.text.get(key)
    if type(rows) is not int or rows < 0:
        raise CheckpointError(f"config.json has no {key}")
    if inverse and rows > values.shape[0]:
        values = concatenated([values, zeros((rows - values.shape[0], *values.shape[1:]))], 0)
    elif not inverse:
        values = sliced(values, 0, 0, min(rows, values.shape[0]))
    return {call.direction.targets[0]: [values]}


def _plain(arrays: Arrays, operation: Operation, call: _Call) -> Arrays:
    """Experts that are stored as floats; quantized ones are refused, since they have scales as well."""
    return {call.direction.targets[0]: [_only(arrays)]}


_OPERATIONS: dict[str, Callable[[Arrays, Operation, _Call], Arrays]] = {
    "stack": _stack,
    "unstack": _unstack,
    "cat": _cat,
    "chunk": _chunk,
    "split": _split,
    "transpose": _transpose,
    "interleave": _interleave,
    "rope": _rope,
    "fuse_experts": _fuse_experts,
    "part_experts": _part_experts,
    "merge_queries": _merge_queries,
    "unpad": _unpad,
    "plain_experts": _plain,
}
