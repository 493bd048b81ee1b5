"""Convert tensors between published files and the layout that transformers has in memory.

Both directions follow `portable.converters.names.name_rules`. Tensors are rearranged lazily: most
operations of the rules slice or stack rows, so the result consists of spans of the original files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from portable.converters.errors import CheckpointError, UnconvertibleNamesError, prefix_checkpoint_errors
from portable.converters.limits import MAX_EXPERTS
from portable.converters.names.name_rules import (
    Renamer,
    RuleDirection,
    add_legacy_rules,
    list_write_rules,
    sort_naturally,
)
from portable.converters.tensors.arrangements import (
    Arrangement,
    arrange_source,
    arrange_zeros,
    chunk_arrangement,
    concat_arrangements,
    interleave_arrangement,
    select_from_arrangement,
    slice_arrangement,
    split_arrangement,
    stack_arrangements,
    transpose_arrangement,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from portable.converters.names.name_rules import MatchedRule, NameRules, Operation
    from portable.converters.tensors.tensor import Shape

Arrays = dict[str, list[Arrangement]]


@dataclass(frozen=True)
class _OperationContext:
    """Properties of the model and of the applied rule that an operation may depend on.

    Attributes:
        direction: Direction of the rule that is applied.
        name: Name of the result, with the first target pattern expanded.
        config: The model's `config.json`.
        find_shape: Function that returns the shape of a parameter in memory, or in the files if
            `NameRules.file_shapes` contains it. Returns None if the shape is unknown.
    """

    direction: RuleDirection
    name: str
    config: Mapping[str, Any]
    find_shape: Callable[[str], Shape | None]

    @property
    def text_config(self) -> Mapping[str, Any]:
        """Config of the text model."""
        text_config = self.config.get("text_config")
        return text_config if isinstance(text_config, dict) else self.config


def arrange_for_files(shapes: Mapping[str, Shape], rules: NameRules) -> dict[str, Arrangement]:
    """Arrange the tensors of a model in memory in the layout of its published files.

    Args:
        shapes: Shape of each tensor, keyed by the name in memory.
        rules: Rules of the model.

    Returns:
        The arrangement of each published tensor, keyed by the published name.

    Raises:
        CheckpointError: If a tensor cannot be rearranged.
    """
    renaming = Renamer(list_write_rules(rules), write=True)
    groups: dict[str, _TensorGroup] = {}
    for name in sort_naturally(shapes):
        key, converter = renaming.apply_convert_rule(name)
        if converter is None:
            key = renaming.apply_rename_rules(name)
        groups.setdefault(key, _TensorGroup(converter)).add_tensor(name, converter, shapes[name])
    arrangements: dict[str, Arrangement] = {}

    def get_shape(name: str) -> Shape | None:
        file_shape = rules.file_shapes.get(renaming.apply_rename_rules(name)) if rules.file_shapes else None
        return shapes.get(name) if file_shape is None else file_shape

    for key, group in groups.items():
        if group.converter is None:
            arrangements[key] = group.get_single_tensor()
            continue
        direction = renaming.get_direction(group.converter.rule_index)
        context = _OperationContext(direction, key, rules.config, get_shape)
        converted = group.apply_operations(context)
        arrangements |= {renaming.apply_rename_rules(name): values for name, values in converted.items()}
    return arrangements


def arrange_for_memory(
    shapes: Mapping[str, Shape],
    rules: NameRules,
    memory_shapes: Mapping[str, Shape] | None = None,
    errors: dict[str, str] | None = None,
    adapted_shapes: Mapping[str, Shape] | None = None,
) -> dict[str, Arrangement]:
    """Arrange the tensors of published files in the layout that transformers has in memory.

    Args:
        shapes: Shape of each tensor, keyed by the published name.
        rules: Rules of the model.
        memory_shapes: Shapes of the model's tensors in memory, if they are known. They determine
            whether names begin with the base model's module.
        errors: Dict to which an error message is added for each tensor that cannot be rearranged.
        adapted_shapes: Shapes of the parameters that an adapter changes, keyed by the name in memory.
            They are used if `memory_shapes` is None.

    Returns:
        The arrangement of each tensor, keyed by the name in memory.

    Raises:
        CheckpointError: If a tensor cannot be rearranged, and `errors` is None.
    """
    all_rules = add_legacy_rules(rules) if not rules.recorded else rules
    renaming = Renamer(all_rules.rules, write=False)
    groups: dict[str, _TensorGroup] = {}
    for name in sort_naturally(shapes):
        key, converter = renaming.apply_convert_rule(renaming.apply_rename_rules(name))
        if memory_shapes is not None:
            key = _match_base_prefix(key, rules.base, memory_shapes)
            if key not in memory_shapes and name in memory_shapes:
                key, converter = name, None
        groups.setdefault(key, _TensorGroup(converter)).add_tensor(name, converter, shapes[name])
    arrangements: dict[str, Arrangement] = {}

    def get_shape(name: str) -> Shape | None:
        if memory_shapes is not None:
            return memory_shapes.get(name)
        return (adapted_shapes or {}).get(name, (adapted_shapes or {}).get(f"{rules.base}.{name}"))

    for key, group in groups.items():
        try:
            if group.converter is None:
                arrangements[key] = group.get_single_tensor()
                continue
            direction = renaming.get_direction(group.converter.rule_index)
            arrangements |= group.apply_operations(_OperationContext(direction, key, rules.config, get_shape))
        except CheckpointError as error:
            if errors is None:
                raise
            errors[key] = error.reason
    return arrangements


def find_unclaimed_names(
    names: Collection[str], rules: NameRules, memory_names: Collection[str]
) -> list[str]:
    """Find published tensors that do not correspond to a tensor of the model in memory.

    Args:
        names: Names of all tensors in the files.
        rules: Rules of the model.
        memory_names: Names of the model's tensors in memory, including tied tensors.

    Returns:
        The published names, in natural order.
    """
    all_rules = add_legacy_rules(rules) if not rules.recorded else rules
    renaming = Renamer(all_rules.rules, write=False)
    unclaimed = []
    for name in sort_naturally(names):
        key, _ = renaming.apply_convert_rule(renaming.apply_rename_rules(name))
        if _match_base_prefix(key, rules.base, memory_names) not in memory_names and name not in memory_names:
            unclaimed.append(name)
    return unclaimed


def _match_base_prefix(key: str, base: str, memory_names: Collection[str]) -> str:
    """Add or remove the base model's module at the start of a name if the result is a name of the model.

    Args:
        key: Name of a tensor.
        base: Name of the base model's module, such as `model`. May be empty.
        memory_names: Names of the model's tensors in memory.

    Returns:
        The new name. `key` itself if neither adding nor removing the module results in a name of the
        model.
    """
    if not base:
        return key
    if key.startswith(base) and key[len(base) + 1 :] in memory_names:
        return key[len(base) + 1 :]
    return f"{base}.{key}" if f"{base}.{key}" in memory_names else key


def are_memory_names(names: Collection[str], rules: NameRules) -> bool:
    """Return whether tensors have transformers' names in memory rather than published names.

    A name in memory changes when it is converted to a published name, and converting the result back
    restores it. A published name behaves the same way in the opposite direction. Names that meet both
    or neither of these conditions are ignored.

    Args:
        names: Names of all tensors.
        rules: Rules of the model.

    Returns:
        True if there are more names in memory than published names.
    """
    write_renaming = Renamer(list_write_rules(rules), write=True)
    read_renaming = Renamer(add_legacy_rules(rules).rules, write=False)

    def write(name: str) -> tuple[str, bool]:
        changed, converter = write_renaming.apply_convert_rule(name)
        changed = write_renaming.apply_rename_rules(changed.replace("*.", "0."))
        return changed, converter is not None or changed != name

    def read(name: str) -> tuple[str, bool]:
        changed, converter = read_renaming.apply_convert_rule(read_renaming.apply_rename_rules(name))
        return changed, converter is not None or changed != name

    def is_restored(
        name: str, first: Callable[[str], tuple[str, bool]], second: Callable[[str], Any]
    ) -> bool:
        changed, differs = first(name)
        return differs and _mask_numbers(second(changed)[0]) == _mask_numbers(name)

    live = published = 0
    # Examine one layer and one expert, because a large mixture of experts has more than 100,000 names.
    for name in {_mask_numbers(name): name for name in sort_naturally(names)}.values():
        is_live, is_published = is_restored(name, write, read), is_restored(name, read, write)
        live += is_live and not is_published
        published += is_published and not is_live
    return live > published


def _mask_numbers(name: str) -> str:
    """Replace all numbers in a name with 0, so that names in different layers and experts become equal."""
    return re.sub(r"\d+", "0", name)


class _TensorGroup:
    """Tensors that a rule converts together, such as the experts of a layer.

    Args:
        converter: Rule of kind `convert` that the names match, or None if the tensor is only renamed.
    """

    def __init__(self, converter: MatchedRule | None) -> None:
        self.converter = converter
        self.arrays: Arrays = {}

    def add_tensor(self, name: str, converter: MatchedRule | None, shape: Shape) -> None:
        """Add a tensor to the group.

        Args:
            name: Name of the tensor before the conversion.
            converter: Rule and source pattern that the name matches, or None if the tensor is only renamed.
            shape: Shape of the tensor.
        """
        pattern = "" if converter is None else converter.source
        self.arrays.setdefault(pattern, []).append(arrange_source(name, shape))

    def get_single_tensor(self) -> Arrangement:
        """Return the only tensor of the group.

        Raises:
            CheckpointError: If there are several tensors.
        """
        arrays = [values for matches in self.arrays.values() for values in matches]
        if len(arrays) > 1:
            first, second = (values.list_sources()[0] for values in arrays[:2])
            raise UnconvertibleNamesError(f"{first!r} and {second!r} would get the same name")
        return arrays[0]

    def apply_operations(self, context: _OperationContext) -> dict[str, Arrangement]:
        """Apply the operations of the rule.

        Returns:
            The arrangement of each result, keyed by name.

        Raises:
            CheckpointError: If the tensors cannot be rearranged.
        """
        arrays = dict(self.arrays)
        with prefix_checkpoint_errors(context.name):
            for operation in context.direction.operations:
                function = _OPERATIONS.get(operation[0])
                if function is None:
                    raise UnconvertibleNamesError(
                        f"requires the transformers operation {operation[0]}, which is not supported"
                    )
                arrays = function(arrays, operation, context)
        full_name = context.name.replace("*.", "0.")
        target = next((key for key in arrays if key in full_name), None)
        if target is None:
            return {key: values[0] for key, values in arrays.items()}
        prefix, _, suffix = full_name.partition(target)
        return {prefix + key + suffix: values[0] for key, values in arrays.items()}


def _get_single_arrangement(arrays: Arrays) -> Arrangement:
    """Return the only tensor among the operands of an operation.

    Raises:
        CheckpointError: If there are several tensors.
    """
    if len(arrays) != 1 or any(len(values) != 1 for values in arrays.values()):
        raise UnconvertibleNamesError("consists of several tensors, but the rule expects only one tensor")
    return next(iter(arrays.values()))[0]


def _stack_parts(arrays: Arrays, operation: Operation, context: _OperationContext) -> Arrays:
    """Stack the tensors of each source pattern, such as a layer's experts, along a new dimension.

    The argument of the operation is the new dimension.
    """
    (dim,) = operation[1:]
    if len(arrays) == 1:
        return {context.direction.targets[0]: [stack_arrangements(next(iter(arrays.values())), dim)]}
    return {pattern: [stack_arrangements(values, dim)] for pattern, values in arrays.items()}


def _split_stack(arrays: Arrays, operation: Operation, context: _OperationContext) -> Arrays:
    """Split each stacked tensor into one tensor per index, such as one per expert.

    The argument of the operation is the stacked dimension. The index replaces the `*` in the target
    pattern.

    Raises:
        CheckpointError: If there are too many experts.
    """
    (dim,) = operation[1:]
    experts: Arrays = {}
    for pattern, (values, *_) in arrays.items():
        name = context.direction.targets[0] if len(arrays) == 1 else pattern
        if values.shape[dim] > MAX_EXPERTS:
            raise UnconvertibleNamesError(
                f"is a stack of {values.shape[dim]:,} experts, but at most {MAX_EXPERTS:,} are supported"
            )
        for i in range(values.shape[dim]):
            experts[name.replace("*", str(i))] = [select_from_arrangement(values, dim, i)]
    return experts


def _concat_parts(arrays: Arrays, operation: Operation, context: _OperationContext) -> Arrays:
    """Concatenate the tensors of all source patterns.

    The argument of the operation is the dimension.
    """
    dim = operation[1]
    parts = [values for pattern in context.direction.sources for values in arrays.get(pattern, ())]
    # Use the order of the arrays if earlier operations have replaced the patterns by other names.
    parts = parts or [values for matches in arrays.values() for values in matches]
    return {context.direction.targets[0]: [concat_arrangements(parts, dim)]}


def _split_chunks(arrays: Arrays, operation: Operation, context: _OperationContext) -> Arrays:
    """Split a tensor into chunks of equal size, one per target pattern.

    The arguments of the operation are the dimension and a config key, which may be None. If there is a
    key, its value is the number of chunks instead.

    Raises:
        CheckpointError: If the config does not contain a valid number of chunks.
    """
    dim, attribute = operation[1:]
    values = _get_single_arrangement(arrays)
    targets = list(context.direction.targets)
    if attribute is not None:
        count = context.text_config.get(attribute)
        if type(count) is not int or not 0 < count <= values.shape[dim]:
            raise CheckpointError(
                f"cannot be split, because config.json has no valid {attribute}; add {attribute} to "
                "config.json"
            )
        targets = [targets[0].replace("*", str(i)) for i in range(count)]
    return {
        name: [part]
        for name, part in zip(targets, chunk_arrangement(values, dim, len(targets)), strict=False)
    }


def _split_by_shapes(arrays: Arrays, operation: Operation, context: _OperationContext) -> Arrays:
    """Split a tensor into parts with the shapes of the targets. At most one shape may be unknown.

    Raises:
        CheckpointError: If several shapes are unknown.
    """
    (dim,) = operation[1:]
    targets = context.direction.targets
    values = _get_single_arrangement(arrays)
    shapes = [context.find_shape(context.name.replace(targets[0], target)) for target in targets]
    if shapes.count(None) > 1:
        raise UnconvertibleNamesError("cannot be split, because the sizes of the parts depend on the model")
    rest = values.shape[dim] - sum(shape[dim] for shape in shapes if shape is not None)
    parts = split_arrangement(values, dim, [rest if shape is None else shape[dim] for shape in shapes])
    return {name: [part] for name, part in zip(targets, parts, strict=True)}


def _transpose_weights(arrays: Arrays, operation: Operation, context: _OperationContext) -> Arrays:
    """Swap two dimensions of a tensor.

    The arguments of the operation are the dimensions and a flag. Some published files already contain
    the transposed layout. If the flag is set, the tensor is therefore only transposed if the sizes of
    these dimensions differ from the expected shape.

    Raises:
        CheckpointError: If the flag is set and the expected shape is unknown.
    """
    first, second, check = operation[1:]
    values = _get_single_arrangement(arrays)
    pattern = next(iter(arrays)) if len(context.direction.targets) > 1 else context.direction.targets[0]
    if check:
        shape = context.find_shape(context.name)
        if shape is None:
            raise UnconvertibleNamesError("cannot be converted, because the layout depends on the model")
        # Compare only these dimensions, because a base may have a different number of experts.
        if len(shape) == len(values.shape) and (shape[first], shape[second]) == (
            values.shape[first],
            values.shape[second],
        ):
            return {pattern: [values]}
    return {pattern: [transpose_arrangement(values, first, second)]}


def _interleave_rows(arrays: Arrays, operation: Operation, context: _OperationContext) -> Arrays:
    """Move elements with even indices to the first half of a dimension, and the others to the second.

    If the operation is inverse, interleave the two halves instead.
    """
    dim, inverse = operation[1:]
    values = _get_single_arrangement(arrays)
    groups = 2 if inverse else values.shape[dim] // 2
    return {context.direction.targets[0]: [interleave_arrangement(values, dim, groups)]}


def _permute_rope(arrays: Arrays, operation: Operation, context: _OperationContext) -> Arrays:
    """Convert the rows of each attention head between the two layouts of rotary embeddings.

    One layout stores the two rows of a rotated pair next to each other, and the other stores them in
    the two halves of the head. The arguments of the operation are the config key with the number of
    heads, the patterns of the tensors to convert (None for all), and the direction.

    Raises:
        CheckpointError: If the rows cannot be divided into pairs.
    """
    config_key, names, inverse = operation[1:]
    config: Any = context.config if config_key is None else context.config.get(config_key, context.config)
    heads = config.get("num_attention_heads", 1) if isinstance(config, dict) else 1
    is_single = len(context.direction.targets) == 1 and len(context.direction.sources) == 1
    permuted: Arrays = {}
    for pattern, (values, *_) in arrays.items():
        if names is None or any(name in pattern for name in names):
            rows = values.shape[0]
            if type(heads) is not int or heads < 1 or rows % heads or (rows // heads) % 2:
                raise UnconvertibleNamesError(
                    f"cannot divide {rows} rows into pairs for {heads} attention heads"
                )
            size = rows // heads
            groups = 2 if inverse else size // 2
            values = concat_arrangements(
                [
                    interleave_arrangement(slice_arrangement(values, 0, head * size, size), 0, groups)
                    for head in range(heads)
                ],
                0,
            )
        permuted[context.direction.targets[0] if is_single else pattern] = [values]
    return permuted


def _fuse_experts(arrays: Arrays, operation: Operation, context: _OperationContext) -> Arrays:
    """Stack and concatenate experts into one tensor per target pattern.

    Each source pattern, such as `gate_proj`, matches the experts of all targets in order: first the
    text experts, then the image experts. The experts of each target are stacked, and then the stacks of
    all source patterns are concatenated.
    """
    stack_dim, cat_dim = operation[1:]
    targets = context.direction.targets
    stacks: dict[str, list[Arrangement]] = {target: [] for target in targets}
    for pattern in context.direction.sources:
        experts = arrays[pattern]
        size = -(-len(experts) // len(targets))
        for i, target in enumerate(targets):
            stacks[target].append(stack_arrangements(experts[i * size : (i + 1) * size], stack_dim))
    return {target: [concat_arrangements(parts, cat_dim)] for target, parts in stacks.items()}


def _unfuse_experts(arrays: Arrays, operation: Operation, context: _OperationContext) -> Arrays:
    """Undo `_fuse_experts`: split each target's tensor into one tensor per expert and projection."""
    stack_dim, cat_dim = operation[1:]
    targets = context.direction.targets
    parts = [
        chunk_arrangement(arrays[pattern][0], cat_dim, len(targets)) for pattern in context.direction.sources
    ]
    separated: Arrays = {}
    for i, target in enumerate(targets):
        experts = [
            select_from_arrangement(part[i], stack_dim, expert)
            for part in parts
            for expert in range(part[i].shape[stack_dim])
        ]
        separated |= {target.replace("*", str(n)): [expert] for n, expert in enumerate(experts)}
    return separated


def _merge_queries(arrays: Arrays, operation: Operation, context: _OperationContext) -> Arrays:
    """Merge two query tensors into one stack with four rows per layer, or separate them again.

    Each of the two tensors contains two rows per layer. In the stack, rows 0 and 3 of a layer come from
    the first tensor, and rows 1 and 2 from the second.
    """
    (inverse,) = operation[1:]
    first, second = (*context.direction.targets, *context.direction.sources)[:2]
    if inverse:
        values = _get_single_arrangement(arrays)

        def gather_rows(order: tuple[int, int]) -> Arrangement:
            layers = [select_from_arrangement(values, 0, i) for i in range(values.shape[0])]
            return concat_arrangements(
                [slice_arrangement(layer, 0, n, 1) for layer in layers for n in order], 0
            )

        return {first: [gather_rows((0, 3))], second: [gather_rows((1, 2))]}
    queries, others = (arrays[pattern][0] for pattern in context.direction.sources)
    layers = [
        concat_arrangements(
            [
                slice_arrangement(queries, 0, 2 * i, 1),
                slice_arrangement(others, 0, 2 * i, 2),
                slice_arrangement(queries, 0, 2 * i + 1, 1),
            ],
            0,
        )
        for i in range(queries.shape[0] // 2)
    ]
    return {context.direction.targets[0]: [stack_arrangements(layers, 0)]}


def _remove_padding(arrays: Arrays, operation: Operation, context: _OperationContext) -> Arrays:
    """Remove the padding rows of the output head for the published file.

    The inverse operation adds zeros instead. In the config, `unpadded_vocab_size` is the number of rows
    without padding, and `vocab_size` the number with padding.

    Raises:
        CheckpointError: If the config does not contain the number of rows.
    """
    (inverse,) = operation[1:]
    values = _get_single_arrangement(arrays)
    key = "vocab_size" if inverse else "unpadded_vocab_size"
    rows = context.text_config.get(key)
    if type(rows) is not int or rows < 0:
        raise CheckpointError(f"config.json has no valid {key}; add {key} to config.json")
    if inverse and rows > values.shape[0]:
        values = concat_arrangements([values, arrange_zeros((rows - values.shape[0], *values.shape[1:]))], 0)
    elif not inverse:
        values = slice_arrangement(values, 0, 0, min(rows, values.shape[0]))
    return {context.direction.targets[0]: [values]}


def _pass_float_experts(arrays: Arrays, operation: Operation, context: _OperationContext) -> Arrays:
    """Return unquantized experts unchanged.

    Raises:
        CheckpointError: If the experts are quantized and therefore have scales.
    """
    return {context.direction.targets[0]: [_get_single_arrangement(arrays)]}


_OPERATIONS: dict[str, Callable[[Arrays, Operation, _OperationContext], Arrays]] = {
    "stack": _stack_parts,
    "unstack": _split_stack,
    "cat": _concat_parts,
    "chunk": _split_chunks,
    "split": _split_by_shapes,
    "transpose": _transpose_weights,
    "interleave": _interleave_rows,
    "rope": _permute_rope,
    "fuse_experts": _fuse_experts,
    "part_experts": _unfuse_experts,
    "merge_queries": _merge_queries,
    "unpad": _remove_padding,
    "plain_experts": _pass_float_experts,
}
