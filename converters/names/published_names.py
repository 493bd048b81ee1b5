"""Convert tensors between the layout of published files and transformers' layout in memory.

Both directions follow the rules in `portable.converters.names.name_rules`. Tensors are rearranged
lazily. Most operations only slice or stack rows, so the new tensors refer to spans of the original
files.
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
        direction: Direction in which the rule is applied: from files to memory, or from memory to
            files.
        name: Name of the first resulting tensor. The part of the old name that matched the source
            pattern is replaced by the rule's first target pattern.
        config: Content of the model's `config.json`.
        find_shape: Function that returns the shape of a parameter in memory, or None if the shape
            is unknown. If tensors are converted to files, shapes in `NameRules.file_shapes` take
            precedence.
    """

    direction: RuleDirection
    name: str
    config: Mapping[str, Any]
    find_shape: Callable[[str], Shape | None]

    @property
    def text_config(self) -> Mapping[str, Any]:
        """Config of the text model. This is the complete config if it has no `text_config`."""
        text_config = self.config.get("text_config")
        return text_config if isinstance(text_config, dict) else self.config


def arrange_for_files(shapes: Mapping[str, Shape], rules: NameRules) -> dict[str, Arrangement]:
    """Compute how a model's tensors in memory are rearranged into the layout of its published files.

    Args:
        shapes: Shape of each tensor, keyed by the name in memory.
        rules: Rules of the model.

    Returns:
        The arrangement of each published tensor, keyed by the published name.

    Raises:
        CheckpointError: If a tensor cannot be rearranged, for example because its shape does not
            fit the rule or because two tensors would get the same name.
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
            _add_arrangements(arrangements, {key: group.get_single_tensor()})
            continue
        direction = renaming.get_direction(group.converter.rule_index)
        context = _OperationContext(direction, key, rules.config, get_shape)
        for name, values in group.apply_operations(context).items():
            _add_arrangements(arrangements, {renaming.apply_rename_rules(name): values})
    return arrangements


def arrange_for_memory(
    shapes: Mapping[str, Shape],
    rules: NameRules,
    memory_shapes: Mapping[str, Shape] | None = None,
    errors: dict[str, str] | None = None,
    adapted_shapes: Mapping[str, Shape] | None = None,
) -> dict[str, Arrangement]:
    """Compute how the tensors of published files are rearranged into the layout in memory.

    The rules for names in old files are also applied, unless the rules were selected to match a
    base checkpoint. If `memory_shapes` contains the published name of a tensor but not its new
    name, the tensor is not changed.

    Args:
        shapes: Shape of each tensor, keyed by the published name.
        rules: Rules of the model.
        memory_shapes: Shapes of the model's tensors in memory, keyed by name, or None if they are
            not known. The names show whether the model uses the prefix of its base model, such as
            `model.`. The shapes are needed by some rules that split or transpose a tensor.
        errors: Dict to which the reason is added for each tensor that cannot be rearranged, keyed
            by the name in memory and without a remedy. The tensor is then omitted from the result.
            If None, an error is raised instead.
        adapted_shapes: Shapes of the parameters that an adapter changes, keyed by the name in
            memory. If `memory_shapes` is None, the rules use these shapes instead.

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
                _add_arrangements(arrangements, {key: group.get_single_tensor()})
                continue
            direction = renaming.get_direction(group.converter.rule_index)
            context = _OperationContext(direction, key, rules.config, get_shape)
            _add_arrangements(arrangements, group.apply_operations(context))
        except CheckpointError as error:
            if errors is None:
                raise
            errors[key] = error.reason
    return arrangements


def _add_arrangements(arrangements: dict[str, Arrangement], added: Mapping[str, Arrangement]) -> None:
    """Add arrangements to a dict in place.

    Raises:
        CheckpointError: If the dict already contains one of the names.
    """
    for name, values in added.items():
        if name in arrangements:
            raise UnconvertibleNamesError(f"several tensors would get the name {name!r}")
        arrangements[name] = values


def find_unclaimed_names(
    names: Collection[str], rules: NameRules, memory_names: Collection[str]
) -> list[str]:
    """Find tensors in published files that do not correspond to a tensor of the model in memory.

    Args:
        names: Names of all tensors in the files.
        rules: Rules that convert the published names to names in memory.
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
    """Add or remove the base model's prefix if this results in a name that the model has.

    Args:
        key: Name of a tensor.
        base: Name of the base model's module, such as `model`. May be empty.
        memory_names: Names of the model's tensors in memory.

    Returns:
        The new name. `key` itself if the model has neither of the two possible names.
    """
    if not base:
        return key
    if key.startswith(base) and key[len(base) + 1 :] in memory_names:
        return key[len(base) + 1 :]
    return f"{base}.{key}" if f"{base}.{key}" in memory_names else key


def are_memory_names(names: Collection[str], rules: NameRules) -> bool:
    """Return whether tensors have transformers' in-memory names rather than published names.

    A name counts as an in-memory name if converting it to a published name changes it, and
    converting the result back restores it. A name counts as a published name if it passes the same
    test in the opposite direction. Names that pass both tests or neither are ignored. Names that
    differ only in their numbers count once.

    Args:
        names: Names of all tensors.
        rules: Rules of the model.

    Returns:
        True if there are more in-memory names than published names.
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
    """Group of tensors that one rule converts together, such as a layer's experts.

    A tensor that is only renamed is a group with one member.

    Args:
        converter: `convert` rule that matches the names of the tensors. None for a tensor that is
            only renamed.
    """

    def __init__(self, converter: MatchedRule | None) -> None:
        self.converter = converter
        self.arrays: Arrays = {}

    def add_tensor(self, name: str, converter: MatchedRule | None, shape: Shape) -> None:
        """Add a tensor to the group of tensors that one rule converts together.

        Args:
            name: Name of the tensor before the conversion.
            converter: Conversion rule, with the source pattern that matches the name. None if the
                tensor is only renamed.
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
            raise self._build_same_name_error()
        return arrays[0]

    def apply_operations(self, context: _OperationContext) -> dict[str, Arrangement]:
        """Apply the operations of the rule to the tensors of the group.

        Returns:
            The arrangement of each resulting tensor, keyed by name. It describes how the result is
            assembled from regions of the group's tensors.

        Raises:
            CheckpointError: If the tensors cannot be rearranged.
        """
        arrays = dict(self.arrays)
        if "" in arrays:  # a tensor already has the name that the rule would give to the others
            raise self._build_same_name_error()
        with prefix_checkpoint_errors(context.name):
            for operation in context.direction.operations:
                function = _OPERATIONS.get(operation[0])
                if function is None:
                    raise UnconvertibleNamesError(
                        f"requires the transformers operation {operation[0]}, which is not supported"
                    )
                try:
                    arrays = function(arrays, operation, context)
                except IndexError:  # a tensor has fewer dimensions or elements than the rule expects
                    raise UnconvertibleNamesError(
                        "does not have the shape that the conversion in transformers expects"
                    ) from None
        full_name = context.name.replace("*.", "0.")
        target = next((key for key in arrays if key in full_name), None)
        if target is None:
            return {key: values[0] for key, values in arrays.items()}
        prefix, _, suffix = full_name.partition(target)
        return {prefix + key + suffix: values[0] for key, values in arrays.items()}

    def _build_same_name_error(self) -> UnconvertibleNamesError:
        sources = [values.list_sources()[0] for matches in self.arrays.values() for values in matches]
        return UnconvertibleNamesError(f"{sources[0]!r} and {sources[-1]!r} would get the same name")


def _get_single_arrangement(arrays: Arrays) -> Arrangement:
    """Return the arrangement of the only tensor that an operation receives.

    Raises:
        CheckpointError: If the operation receives several tensors.
    """
    if len(arrays) != 1 or any(len(values) != 1 for values in arrays.values()):
        raise UnconvertibleNamesError(
            "consists of several tensors, but the conversion in transformers expects only one tensor"
        )
    return next(iter(arrays.values()))[0]


def _get_matches(arrays: Arrays, pattern: str) -> list[Arrangement]:
    """Return the tensors that match a source pattern of a rule.

    Raises:
        CheckpointError: If there are none.
    """
    if pattern not in arrays:
        raise UnconvertibleNamesError(f"requires tensors with names like {pattern!r}, which are missing")
    return arrays[pattern]


def _stack_parts(arrays: Arrays, operation: Operation, context: _OperationContext) -> Arrays:
    """Stack tensors, such as a layer's experts, along a new dimension.

    A conversion rule has one or more source patterns, for example one pattern for the up
    projections of all experts. The tensors of each source pattern are stacked separately. The
    argument of the operation is the index of the new dimension.
    """
    (dim,) = operation[1:]
    if len(arrays) == 1:
        return {context.direction.targets[0]: [stack_arrangements(next(iter(arrays.values())), dim)]}
    return {pattern: [stack_arrangements(values, dim)] for pattern, values in arrays.items()}


def _split_stack(arrays: Arrays, operation: Operation, context: _OperationContext) -> Arrays:
    """Split each stacked tensor into one tensor per index, such as one per expert.

    The argument of the operation is the dimension to split. The index along this dimension replaces
    the `*` in the name pattern of the new tensor. For example, `experts.*.up_proj` becomes
    `experts.0.up_proj`.

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
    """Concatenate the tensors that match the rule's source patterns, in the order of the patterns.

    If earlier operations have replaced the source patterns with other names, all tensors are
    concatenated in their current order. The operation has one argument, the dimension along which
    the tensors are concatenated.
    """
    dim = operation[1]
    parts = [values for pattern in context.direction.sources for values in arrays.get(pattern, ())]
    # If earlier operations have replaced the source patterns with other names, use the order of the arrays.
    parts = parts or [values for matches in arrays.values() for values in matches]
    return {context.direction.targets[0]: [concat_arrangements(parts, dim)]}


def _split_chunks(arrays: Arrays, operation: Operation, context: _OperationContext) -> Arrays:
    """Split a tensor into chunks, as `torch.chunk` does.

    The arguments of the operation are the dimension and a config key. The value of this key is the
    number of chunks, and the index of each chunk replaces the `*` in the target pattern. If the key
    is None, the rule has one target pattern per chunk.

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
                f"cannot be split, because config.json has no valid {attribute}; set {attribute} in "
                "config.json"
            )
        targets = [targets[0].replace("*", str(i)) for i in range(count)]
    return {
        name: [part] for name, part in zip(targets, chunk_arrangement(values, dim, len(targets)), strict=True)
    }


def _split_by_shapes(arrays: Arrays, operation: Operation, context: _OperationContext) -> Arrays:
    """Split a tensor into several parameters, one for each target pattern of the rule.

    The target patterns are the parts of names with which the rule replaces the source pattern. The
    argument of the operation is the dimension to split. Each part has the size of its target
    parameter in this dimension. If the shape of exactly one target is unknown, this target receives
    the remaining elements.

    Raises:
        CheckpointError: If the shapes of several targets are unknown.
    """
    (dim,) = operation[1:]
    targets = context.direction.targets
    values = _get_single_arrangement(arrays)
    shapes = [context.find_shape(context.name.replace(targets[0], target)) for target in targets]
    if shapes.count(None) > 1:
        raise UnconvertibleNamesError("cannot be split, because the shapes of its parts are unknown")
    rest = values.shape[dim] - sum(shape[dim] for shape in shapes if shape is not None)
    parts = split_arrangement(values, dim, [rest if shape is None else shape[dim] for shape in shapes])
    return {name: [part] for name, part in zip(targets, parts, strict=True)}


def _transpose_weights(arrays: Arrays, operation: Operation, context: _OperationContext) -> Arrays:
    """Swap two dimensions of a tensor.

    The arguments of the operation are the two dimensions and a flag. The flag exists because some
    published files already store the transposed layout. If it is set, a tensor that already has the
    expected sizes in both dimensions is returned unchanged.

    Raises:
        CheckpointError: If the flag is set and the expected shape is unknown.
    """
    first, second, check = operation[1:]
    values = _get_single_arrangement(arrays)
    pattern = next(iter(arrays)) if len(context.direction.targets) > 1 else context.direction.targets[0]
    if check:
        shape = context.find_shape(context.name)
        if shape is None:
            raise UnconvertibleNamesError("cannot be converted, because its expected shape is unknown")
        # Compare only these dimensions, because a base may have a different number of experts.
        if len(shape) == len(values.shape) and (shape[first], shape[second]) == (
            values.shape[first],
            values.shape[second],
        ):
            return {pattern: [values]}
    return {pattern: [transpose_arrangement(values, first, second)]}


def _interleave_rows(arrays: Arrays, operation: Operation, context: _OperationContext) -> Arrays:
    """Move the even and odd indices of a dimension into separate halves, or do the reverse.

    The arguments of the operation are the dimension and a flag. By default, the elements with even
    indices move to the first half of the dimension, and the elements with odd indices move to the
    second half. If the flag is set, the two halves are interleaved instead.
    """
    dim, inverse = operation[1:]
    values = _get_single_arrangement(arrays)
    groups = 2 if inverse else values.shape[dim] // 2
    return {context.direction.targets[0]: [interleave_arrangement(values, dim, groups)]}


def _permute_rope(arrays: Arrays, operation: Operation, context: _OperationContext) -> Arrays:
    """Convert the rows of each attention head between the two layouts of rotary embeddings.

    One layout stores the two rows of a rotated pair next to each other. The other layout stores
    them in the two halves of the head.

    The operation has three arguments:

    - Key of the nested config that contains `num_attention_heads`, such as `vision_config`. If the
      key is None or the config does not contain it, the top level is used. If the number of heads
      is missing, it is 1.
    - Substrings such as `q_proj`. Tensors are converted if their name pattern contains one of
      them. None converts all tensors.
    - Direction: False converts from adjacent rows to halves, and True converts from halves to
      adjacent rows.

    Raises:
        CheckpointError: If the rows cannot be divided into an even number of rows for each head.
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
                    f"has {rows} rows, which cannot be divided into an even number of rows for each of "
                    f"{heads} attention heads"
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
    """Fuse the experts of a layer into one tensor per target pattern.

    A layer may have several targets, for example one for the text experts and one for the image
    experts. Each source pattern, such as `gate_proj`, matches one tensor per expert: first the
    experts of the first target, then the experts of the second target, and so on. These tensors are
    split into equal parts, one per target. For each target, the experts of each source pattern are
    stacked, and these stacks are then concatenated.

    The operation has two arguments: the dimension along which to stack, and the dimension along
    which to concatenate.

    Raises:
        CheckpointError: If no tensor matches one of the source patterns.
    """
    stack_dim, cat_dim = operation[1:]
    targets = context.direction.targets
    stacks: dict[str, list[Arrangement]] = {target: [] for target in targets}
    for pattern in context.direction.sources:
        experts = _get_matches(arrays, pattern)
        size = -(-len(experts) // len(targets))
        for i, target in enumerate(targets):
            stacks[target].append(stack_arrangements(experts[i * size : (i + 1) * size], stack_dim))
    return {target: [concat_arrangements(parts, cat_dim)] for target, parts in stacks.items()}


def _unfuse_experts(arrays: Arrays, operation: Operation, context: _OperationContext) -> Arrays:
    """Undo `_fuse_experts`: split each fused tensor into one tensor per expert and projection.

    Raises:
        CheckpointError: If one of the fused tensors is missing.
    """
    stack_dim, cat_dim = operation[1:]
    targets = context.direction.targets
    parts = [
        chunk_arrangement(_get_matches(arrays, pattern)[0], cat_dim, len(targets))
        for pattern in context.direction.sources
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
    """Merge two tensors of query vectors into one stack, or split the stack into the two tensors.

    The argument of the operation is True to split and False to merge. Each of the two tensors
    contains two rows per layer. The stack contains four rows per layer. If the rows of a layer are
    a0, a1 in the first tensor and b0, b1 in the second, they are [a0, b0, b1, a1] in the stack.

    Raises:
        CheckpointError: If one of the tensors is missing.
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
    queries, others = (_get_matches(arrays, pattern)[0] for pattern in context.direction.sources)
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
    """Remove the padding rows of the output head, or append them as zeros.

    Published files contain these rows, but the model in memory does not. The operation has one
    argument: False to remove the rows, True to append them. In the config, `unpadded_vocab_size` is
    the number of rows without padding, and `vocab_size` is the number with padding. If there is
    nothing to remove or append, the tensor is unchanged.

    Raises:
        CheckpointError: If the config does not contain the resulting number of rows.
    """
    (inverse,) = operation[1:]
    values = _get_single_arrangement(arrays)
    key = "vocab_size" if inverse else "unpadded_vocab_size"
    rows = context.text_config.get(key)
    if type(rows) is not int or rows < 0:
        raise CheckpointError(f"config.json has no valid {key}; set {key} in config.json")
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
