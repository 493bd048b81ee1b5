"""Check whether a checkpoint is a complete model that agrees with its config.

    problems = find_model_problems(open_checkpoint("run/checkpoints/step-000100"))

The problems are missing layers and tensors, lost experts, and contradictions between the tensors
and the config. If `portable.converters.names.expected_tensors` contains the model class, the
tensors are compared with the tensors that transformers creates for this class. For other classes,
and if the tensor names do not match the class, only rules that hold for every model apply. In
uncertain cases, no problem is reported.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.converters.adapters.adapter import find_adapter
from portable.converters.errors import CheckpointError, to_printable
from portable.converters.names.contradictions import (
    EXPERT_COUNT,
    describe_invalid_settings,
    find_contradicted_tie,
    find_tensors_of_class,
    has_stale_quantization,
)
from portable.converters.names.expected_tensors import (
    collect_integer_settings,
    compute_formula_sizes,
    group_names_by_layer,
    may_tie_embeddings,
    replace_layer_number,
)
from portable.converters.names.model_config import check_config_fits_tensors
from portable.converters.names.name_rules import get_architecture
from portable.converters.names.published_names import are_memory_names, arrange_for_memory
from portable.converters.naming import find_name_rules
from portable.converters.storage.path_or_url import is_in_store
from portable.converters.storage.store_errors import RemoteError
from portable.converters.tensors.dtypes import QUANTIZED_DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from portable.converters.checkpoint import Checkpoint
    from portable.converters.names.expected_tensors import ExpectedTensors, LayerStack
    from portable.converters.tensors.tensor import Array, Shape, Tensor

_MAX_SHOWN = 10
_BLOCK_BYTES = 1 << 20
_CONNECTIONS = 16
_SAMPLE_ELEMENTS = 64
_EXPERT_NAME = re.compile(
    r"(?P<module>(?:.+\.)?(?:experts|local_experts|expert))\.(?:expert_)?(?P<number>\d{1,6})\.(?P<rest>.+)"
)
_EXPERT_STACK_NAME = re.compile(r"(?:.+\.)?experts\.(?:[^.]+)(?:\.weight)?")
_MTP_COUNT = re.compile(r".*(nextn|mtp).*")
# Names of tensors that may be zero, or equal for several experts, such as the scales of quantized weights.
_QUANTIZATION_METADATA = re.compile(r"scale|zero|g_idx|bias|shape|absmax|quant|SCB|nested|sink|norm")
_LAYER_NUMBER = re.compile(r"\.layers\.(\d{1,6})\.")
_ATTENTION = re.compile(r"attn|attention")
# Config keys of settings that may specify which layers have a different structure.
_LAYER_KINDS = re.compile(r"layer|dense|sparse|shared|step|interval|freq|period|every|pattern|interleav")
_BLOCK_NAMES = ("layers", "layer", "h", "blocks", "block")
# Words in the names of image and audio encoders, and their nested configs.
_ENCODER_CONFIGS = (("visual", "vision_config"), ("vision", "vision_config"), ("audio", "audio_config"))
_TOWER_DEPTH = re.compile(r"(^|_)(depths?|layers|blocks)(_|$)")
_ZERO_EXPERTS = "zero_expert_num"  # LongCat-Flash's number of experts without parameters
LIVE_NAMES_PROBLEM = "names in memory"
"""Value of `CheckpointProblem.kind` for files with in-memory tensor names, which only transformers 5
can read.
"""
_TIE_SETTING = "tie_word_embeddings"


@dataclass(frozen=True)
class CheckpointProblem:
    """Reason why a checkpoint is not a complete model.

    Attributes:
        kind: Short identifier, such as `"missing"` or `"equal experts"`.
        message: Description of the problem.
        names: Names of the affected tensors.
        cause: Known cause of the problem. Empty if no cause is recognized.
        repaired: Whether the conversion fixes the problem. If True, the checkpoint is not rejected.
    """

    kind: str
    message: str
    names: tuple[str, ...] = ()
    cause: str = ""
    repaired: bool = False

    def __str__(self) -> str:
        shown = ", ".join(self.names[:_MAX_SHOWN])
        more = f" and {len(self.names) - _MAX_SHOWN:,} more" if len(self.names) > _MAX_SHOWN else ""
        names = f": {shown}{more}" if self.names else ""
        cause = f" ({self.cause})" if self.cause else ""
        return to_printable(f"{self.message}{names}{cause}")


def check_model_complete(
    checkpoint: Checkpoint, *, partial: bool = False, expert_source: Checkpoint | None = None
) -> list[CheckpointProblem]:
    """Check that a checkpoint contains a complete model.

    Args:
        checkpoint: Checkpoint to convert.
        partial: Whether to accept an incomplete model.
        expert_source: Checkpoint with the values of the experts. See `find_model_problems`.

    Returns:
        The problems that the conversion repairs. If `partial` is True, the list also contains the
        problems that would otherwise raise an error.

    Raises:
        CheckpointError: If `partial` is False and the model has a problem that the conversion
            cannot repair, such as a missing tensor or a conflict with the config. The message
            describes up to four problems. For other errors, which are raised even if `partial` is
            True, see `find_model_problems`.
    """
    problems = find_model_problems(checkpoint, expert_source=expert_source)
    serious = [problem for problem in problems if not problem.repaired]
    if serious and not partial:
        described = "; ".join(map(str, serious[:4]))
        more = f"; and {len(serious) - 4} more" if len(serious) > 4 else ""
        is_config = all(problem.kind == "config" for problem in serious)
        remedy = "correct config.json" if is_config else "convert a complete checkpoint"
        raise CheckpointError(
            f"{checkpoint.root}: {described}{more}; {remedy}, or add --partial to write this "
            "checkpoint as it is"
        )
    return problems


def find_model_problems(
    checkpoint: Checkpoint, *, read_values: bool = True, expert_source: Checkpoint | None = None
) -> list[CheckpointProblem]:
    """Find the reasons why a checkpoint is not a complete model.

    For an adapter, only its settings and the shapes of its LoRA tensors are checked. If a tensor is
    empty or a value in `config.json` is invalid, only these problems are returned.

    Args:
        checkpoint: Checkpoint of a model or of an adapter. The tensors may have published names or
            the names that transformers uses in memory.
        read_values: Whether to read weights to find experts that are zero or equal to another
            expert. For most experts, this reads a few bytes. In an object store, only one weight of
            each expert is read.
        expert_source: Checkpoint whose experts are read, `checkpoint` by default. When an adapter
            is merged, pass the base model, because reading a part of a merged weight may compute
            the complete weight.

    Returns:
        The problems. Empty if none were found. Uncertain cases are not reported. If the model class
        is unknown, only rules that hold for every model are checked.

    Raises:
        CheckpointError: If the weights of an expert cannot be read, or if the checkpoint contains a
            damaged record of name rules.
        RemoteError: If a request to an object store fails.
    """
    try:
        if find_adapter(checkpoint) is not None:
            return find_lora_shape_problems(checkpoint.tensors)
    except RemoteError:  # the store failed, so the error does not describe the adapter
        raise
    except CheckpointError as error:
        return find_lora_shape_problems(checkpoint.tensors) or [CheckpointProblem("adapter", str(error))]
    config = checkpoint.read_config()
    tensors = checkpoint.tensors
    problems = [*_find_empty_tensors(tensors)]
    if invalid := describe_invalid_settings(config, tensors):
        problems.append(CheckpointProblem("config", f"config.json: {'; '.join(invalid[:_MAX_SHOWN])}"))
    if problems:
        return problems
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    shapes |= {alias: shapes[owner] for alias, owner in checkpoint.aliases.items() if owner in shapes}
    expected = find_tensors_of_class(config)
    expert_problems = _find_expert_problems(shapes, config, is_known=expected is not None)
    class_problems = (
        None if expected is None else _compare_with_expected_tensors(checkpoint, shapes, config, expected)
    )
    problems += expert_problems
    if class_problems is not None:
        problems += [
            problem for problem in class_problems if not (expert_problems and _affects_only_experts(problem))
        ]
    else:
        problems += [*_find_layer_gaps(shapes), *_find_missing_embeddings(shapes, config)]
        try:
            if config and not expert_problems:
                check_config_fits_tensors(tensors, config, "config.json")
        except CheckpointError as error:
            problems.append(CheckpointProblem("config", str(error).rpartition("; ")[0]))
    if read_values:
        expert_source = checkpoint if expert_source is None else expert_source
        problems += _find_zero_or_equal_experts(
            expert_source.tensors, config, is_remote=is_in_store(expert_source.root)
        )
    problems += _find_repairable_contradictions(checkpoint, config, expected)
    return problems


def _affects_only_experts(problem: CheckpointProblem) -> bool:
    """Return whether all tensors of a problem belong to experts."""
    return bool(problem.names) and all(".experts." in name or ".expert" in name for name in problem.names)


def find_lora_shape_problems(tensors: Mapping[str, Tensor]) -> list[CheckpointProblem]:
    """Find empty tensors of an adapter, and LoRA factors with incompatible ranks.

    Args:
        tensors: Tensors of an adapter, keyed by name.

    Returns:
        At most one problem. If a tensor is empty, ranks are not compared. Factors that are not matrices
        or have no partner are never compared.
    """
    empty = tuple(name for name, tensor in tensors.items() if tensor.numel == 0)
    if empty:
        return [
            CheckpointProblem(
                "empty",
                f"the adapter contains {_format_count(empty, 'tensor')} without elements",
                empty,
                "the adapter was saved without gathering the partitions of ZeRO-3 or FSDP, so its values are "
                "lost",
            )
        ]
    names = []
    for name, tensor in tensors.items():
        other = tensors.get(name.replace(".lora_A.", ".lora_B."))
        if other is None or other is tensor or len(tensor.shape) != 2 or len(other.shape) != 2:
            continue
        if tensor.shape[0] != other.shape[1]:
            names.append(name)
    if not names:
        return []
    return [
        CheckpointProblem(
            "cut adapter",
            f"the factors lora_A and lora_B of {_format_count(names, 'module')} have incompatible shapes",
            tuple(names),
            "this happens if an adapter is saved under FSDP2 with only the shard of one rank; the other "
            "shards are lost, so train the adapter again with a newer version of Accelerate",
        )
    ]


def _find_empty_tensors(tensors: Mapping[str, Tensor]) -> list[CheckpointProblem]:
    """Find weights and biases without elements. Return at most one problem, which lists all these tensors."""
    empty = tuple(
        name
        for name, tensor in tensors.items()
        if tensor.numel == 0 and name.rpartition(".")[2] in ("weight", "bias")
    )
    if not empty:
        return []
    cause = ""
    if all(tensors[name].shape == (0,) for name in empty):
        cause = (
            "ZeRO-3 leaves such placeholders if a model is saved without gathering its parameters; convert "
            "the folder with the ZeRO checkpoint instead"
        )
    message = f"the checkpoint contains {_format_count(empty, 'tensor')} without elements"
    return [CheckpointProblem("empty", message, empty, cause)]


def _format_count(items: Iterable[object], noun: str) -> str:
    number = len(list(items))
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _describe_missing_tensors(names: Sequence[str]) -> str:
    return "1 tensor is missing" if len(names) == 1 else f"{len(names):,} tensors are missing"


# -- known classes ----------------------------------------------------------------------------------------


def _compare_with_expected_tensors(
    checkpoint: Checkpoint, shapes: Mapping[str, Shape], config: Mapping[str, Any], expected: ExpectedTensors
) -> list[CheckpointProblem] | None:
    """Compare the tensors of a checkpoint with the tensors that its transformers class requires.

    Args:
        checkpoint: Checkpoint of the model.
        shapes: Shape of each tensor, including aliases, keyed by name.
        config: Content of the `config.json`.
        expected: Tensors that the class requires.

    Returns:
        The problems, such as missing tensors. None if the tensor names do not follow the naming
        scheme of the class.
    """
    live = _rename_shapes_to_live(checkpoint, shapes, expected)
    if live is None:
        return None
    matcher = _TensorNames(live, is_quantized=_is_quantized(checkpoint.tensors, config))
    default = expected.tied
    wanted = (
        expected.required
        if may_tie_embeddings(config, default=default)
        else expected.required | expected.untied
    )
    missing = [
        mask
        for mask in sorted(wanted)
        if not matcher.has_tensor(mask) and matcher.has_non_expert_siblings(mask)
    ]
    problems = []
    by_stack = group_names_by_layer(live)
    holes: list[str] = []
    for stack, layers in expected.stacks.items():
        problems += _find_missing_layers(stack, layers, by_stack.get(stack, {}), config, expected.required)
        holes += _find_incomplete_layers(stack, layers, by_stack.get(stack, {}), config, matcher)
    reported = {replace_layer_number(name) for name in holes}
    names = (*(mask.replace(".*.", ".N.") for mask in missing if mask not in reported), *holes)
    if names:
        problems.append(CheckpointProblem("missing", _describe_missing_tensors(names), names))
    return problems + _find_wrong_shapes(checkpoint, live, config, expected)


def _rename_shapes_to_live(
    checkpoint: Checkpoint, shapes: Mapping[str, Shape], expected: ExpectedTensors
) -> dict[str, Shape] | None:
    """Convert a checkpoint's tensor names and shapes to the names and shapes in transformers.

    Args:
        checkpoint: Checkpoint of the model.
        shapes: Shape of each tensor, including aliases, keyed by name.
        expected: Tensors of the model class.

    Returns:
        The shapes, keyed by the name that transformers uses in memory. Names that the class does
        not have are kept. None if the name rules of the model are unknown, if a tensor cannot be
        rearranged, or if fewer than half of the names belong to the class.
    """
    rules = find_name_rules(checkpoint)
    if rules is None:
        return None
    converted = dict(shapes)
    if checkpoint.names != "live" and not are_memory_names(shapes, rules):
        errors: dict[str, str] = {}
        arrangements = arrange_for_memory(shapes, rules, None, errors)
        converted = {name: values.shape for name, values in arrangements.items()}
        if errors:  # The names of the results are unknown.
            return None
    masks = {
        *expected.required,
        *expected.untied,
        *expected.shapes,
        *(
            f"{stack}.*.{rest}"
            for stack, layers in expected.stacks.items()
            for group in (layers.always, *layers.groups)
            for rest in group
        ),
    }
    base = rules.base
    live: dict[str, Shape] = {}
    matched = 0
    modules = {mask.rpartition(".")[0] for mask in masks}
    for name, shape in converted.items():
        candidates = [name]
        if base:
            candidates += [f"{base}.{name}", name.removeprefix(f"{base}.")]
        chosen = next((each for each in candidates if replace_layer_number(each) in masks), None)
        if chosen is None:
            chosen = next(
                (each for each in candidates if replace_layer_number(each).rpartition(".")[0] in modules),
                None,
            )
        matched += chosen is not None
        live[chosen or name] = shape
    return live if 2 * matched >= len(converted) else None


def _is_quantized(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> bool:
    """Return whether the weights are quantized.

    A stale `quantization_config` without quantized tensors is ignored.
    """
    quantized = config.get("quantization_config") is not None or any(
        tensor.dtype in QUANTIZED_DTYPES and len(tensor.shape) > 1 for tensor in tensors.values()
    )
    return quantized and not has_stale_quantization(tensors, config)


class _TensorNames:
    """Set of tensor names that accounts for quantized weights.

    A quantized weight is stored as packed values and scales, which have different names than the
    weight. In a quantized checkpoint, a weight therefore counts as present if its module contains
    any tensor.
    """

    def __init__(self, names: Iterable[str], *, is_quantized: bool) -> None:
        self.names = set(names)
        self.masks = {replace_layer_number(name) for name in self.names}
        self.modules: set[str] = set()
        if is_quantized:
            for name in self.names:
                parts = name.split(".")
                self.modules |= {".".join(parts[:i]) for i in range(1, len(parts))}
            self.modules |= {
                replace_layer_number(module + ".x").removesuffix(".x") for module in self.modules
            }

    def has_tensor(self, name: str) -> bool:
        """Return whether a tensor exists.

        The layer index in `name` may be replaced by an asterisk. The tensor must then exist in any
        layer.

        If the weights are quantized, also returns True if the checkpoint contains any tensor in the
        same module, because a quantized weight may be stored under other names.
        """
        if name in self.names or name in self.masks:
            return True
        return name.rpartition(".")[0] in self.modules

    def has_non_expert_siblings(self, name_pattern: str) -> bool:
        """Return whether the parent of a tensor's module contains tensors outside of experts.

        The caller uses this to decide whether a missing tensor is an error. For example, the parent
        for `model.layers.*.mlp.up_proj.weight` is `model.layers.*.mlp`. If the parent only contains
        tensors of its `experts`, every layer may be a mixture of experts. A missing dense MLP is
        then not an error.

        Args:
            name_pattern: Name of the tensor, with the layer index replaced by an asterisk.

        Returns:
            Whether the parent contains such a tensor. Always True if the tensor does not belong to
            a layer.
        """
        parent = name_pattern.rpartition(".")[0].rpartition(".")[0]
        siblings = {name for name in self.masks if name.startswith(f"{parent}.")}
        return ".*." not in name_pattern or any(".experts." not in name for name in siblings)


def _find_missing_layers(
    stack: str,
    layers: LayerStack,
    present: Mapping[int, Any],
    config: Mapping[str, Any],
    required: Iterable[str],
) -> list[CheckpointProblem]:
    """Find layers that are missing entirely, and layers that exceed the number in the config.

    If the config does not contain the number of layers, only gaps between existing layers are
    found. Excess layers are accepted if the model has layers for multi-token prediction.

    Args:
        stack: Name of the stack, such as `model.layers`.
        layers: Names of the tensors that the model class defines for the layers of this stack, and
            the config key with the number of layers.
        present: Existing layers, keyed by layer index.
        config: Content of the `config.json`.
        required: Names of the tensors that every model of this class has. An asterisk replaces the
            layer index.
    """
    key, depth = layers.depth, collect_integer_settings(config).get(layers.depth or "")
    if depth is None:
        key, depth = _find_tower_depth(stack, config)
    if not present:
        if depth == 0 or not any(mask.startswith(f"{stack}.*.") for mask in required):
            return []
        return [CheckpointProblem("layers", "all layers are missing", (f"{stack}.*",))]
    if not layers.always:
        return []
    if depth is None:
        if stack.rpartition(".")[2] not in _BLOCK_NAMES:
            return []
        missing = [number for number in range(max(present)) if number not in present]
        names = tuple(f"{stack}.{number}" for number in missing)
        return [CheckpointProblem("layers", "layers in the middle are missing", names)] if missing else []
    missing = [number for number in range(min(depth, 100_000)) if number not in present]
    if missing:
        names = tuple(f"{stack}.{number}" for number in missing)
        return [
            CheckpointProblem(
                "layers", f"config.json has {key} {depth:,}, but some layers are missing", names
            )
        ]
    extra = max(present) + 1 - depth
    numbers = collect_integer_settings(config)
    if extra > 0 and not any(_MTP_COUNT.fullmatch(key) and value > 0 for key, value in numbers.items()):
        return [
            CheckpointProblem(
                "layers", f"config.json has {key} {depth:,}, but {stack} has {max(present) + 1:,} layers"
            )
        ]
    return []


class _TowerDepth(NamedTuple):
    """Number of layers in an image or audio encoder.

    Attributes:
        key: Config key of the number, such as `vision_config.depth`. Empty if the number is unknown.
        num_layers: Number of layers. None if it is unknown.
    """

    key: str
    num_layers: int | None


def _find_tower_depth(stack: str, config: Mapping[str, Any]) -> _TowerDepth:
    """Find the number of layers of an image or audio encoder in the encoder's nested config.

    Args:
        stack: Name prefix of the encoder's layers, such as `visual.blocks`.
        config: Content of the model's `config.json`, which contains for example `vision_config`.

    Returns:
        The dotted config key, such as `vision_config.depth`, and the number of layers. An empty key
        and None if the nested config has no key for the number of layers, or several such keys.
    """
    for word, part in _ENCODER_CONFIGS:
        nested = config.get(part)
        if word in stack and isinstance(nested, dict) and stack.rpartition(".")[2] in _BLOCK_NAMES:
            numbers = {
                key: value for key, value in nested.items() if _TOWER_DEPTH.search(key) and type(value) is int
            }
            if len(numbers) == 1:
                ((key, depth),) = numbers.items()
                return _TowerDepth(f"{part}.{key}", depth)
    return _TowerDepth("", None)


def _find_incomplete_layers(
    stack: str,
    layers: LayerStack,
    present: Mapping[int, Mapping[str, str]],
    config: Mapping[str, Any],
    matcher: _TensorNames,
) -> list[str]:
    """Find the tensors that are missing from partially stored layers.

    Layers without any tensor are not considered.

    Args:
        stack: Name of the stack, such as `model.layers`.
        layers: Parameters that the model class has in the layers of the stack.
        present: Names of the existing tensors, keyed by layer index and then by name in the layer.
        config: Content of the `config.json`.
        matcher: Names of all tensors in the checkpoint. In a quantized checkpoint, a weight also
            counts as present if it is stored under other names, as packed values and scales.

    Returns:
        Names of the missing tensors, sorted.
    """
    depth = collect_integer_settings(config).get(layers.depth or "", 1 << 60)
    missing = []
    mixtures = _find_mixture_modules(layers)
    lacking: dict[int, frozenset[str]] = {}
    for number, rests in present.items():
        if number >= depth:
            continue  # a layer for multi-token prediction, which transformers does not load

        def contains(rest: str, prefix: str = f"{stack}.{number}.") -> bool:
            return matcher.has_tensor(prefix + rest)

        lacking[number] = frozenset(
            rest
            for rest in layers.always
            if not contains(rest) and not _has_replacement_module(rest, layers.always, rests, contains)
        )
        for group in layers.groups:
            if any(rest in rests for rest in group):
                missing += [f"{stack}.{number}.{rest}" for rest in sorted(group) if not contains(rest)]
        missing += [
            f"{stack}.{number}.{module}"
            for module in mixtures
            if not any(rest.startswith(f"{module}.") for rest in rests)
        ]
    # The table was made from models with few layers and lacks some kinds of layers, such as layers that share
    # keys and values with an earlier layer. Such layers are accepted if the config distinguishes them.
    for kind in set(lacking.values()):
        numbers_of_kind = {number for number, rests in lacking.items() if rests == kind}
        if not _may_distinguish_layers(config, numbers_of_kind, len(lacking)):
            missing += [f"{stack}.{number}.{rest}" for number in numbers_of_kind for rest in kind]
    missing.sort()
    return list(dict.fromkeys(missing))


def _find_mixture_modules(layers: LayerStack) -> list[str]:
    """Find the modules that contain experts in some layers and no experts in others."""
    groups: dict[str, list[frozenset[str]]] = {}
    for group in layers.groups:
        modules = {rest.partition(".")[0] for rest in group}
        if len(modules) == 1:
            groups.setdefault(modules.pop(), []).append(group)
    return [
        module
        for module, alternatives in groups.items()
        if len(alternatives) > 1 and any(".experts." in rest for group in alternatives for rest in group)
    ]


def _may_distinguish_layers(config: Mapping[str, Any], layers: set[int], depth: int) -> bool:
    """Return whether a config setting can explain why only some layers lack certain tensors.

    Args:
        config: Content of the `config.json`.
        layers: Indices of the layers that lack these tensors.
        depth: Number of layers in the stack.

    Returns:
        True if a setting for layers is a number n, and the layers are the first n, the last n, all
        except the first n, all except the last n, or every nth layer. The numbers 0, 1 and `depth`
        do not count. Also True if the config lists the indices of these layers or of all other
        layers, or contains a list of layer types that separates these layers from the others.
        Always False for a single layer and for all layers.
    """
    if len(layers) < 2 or len(layers) == depth:
        return False
    first = min(layers)
    settings = {
        key: value for key, value in collect_integer_settings(config).items() if _LAYER_KINDS.search(key)
    }
    for number in set(settings.values()) - {0, 1, depth}:
        ranges = (range(number), range(number, depth), range(depth - number), range(depth - number, depth))
        if layers in map(set, ranges) or (
            number <= depth and layers == set(range(first % number, depth, number))
        ):
            return True
    text = config.get("text_config")
    values = {**config, **(text if isinstance(text, dict) else {})}
    for value in values.values():
        if not isinstance(value, list):
            continue
        entries = [repr(entry) for entry in value]
        if len(entries) == depth and {entries[i] for i in layers}.isdisjoint(
            entries[i] for i in range(depth) if i not in layers
        ):
            return True
        if value and all(type(entry) is int for entry in value):
            listed = {entry for entry in value if 0 <= entry < depth}
            if layers in (listed, set(range(depth)) - listed):
                return True
    return False


def _has_replacement_module(
    rest: str, always: Iterable[str], rests: Iterable[str], contains: Callable[[str], bool]
) -> bool:
    """Return whether a tensor is missing because another module, such as experts, replaces its module.

    This is assumed if two conditions hold. First, the layer has none of the tensors that are
    expected in the module. Second, the layer has other tensors whose names begin with the same
    component. For example, `mlp.up_proj.weight` and all other expected tensors of `mlp` are
    missing, but the layer has `mlp.experts.0.up_proj.weight`. The experts then replace the MLP.

    Args:
        rest: Name of the missing tensor, relative to the layer.
        always: Names of the tensors that the model class defines in every layer, relative to the
            layer.
        rests: Names of the tensors that the checkpoint contains for this layer, relative to the
            layer.
        contains: Function that returns whether the layer contains a tensor, possibly in quantized
            form under another name.
    """
    parent = rest.rpartition(".")[0].rpartition(".")[0]
    if not parent or any(contains(other) for other in always if other.startswith(f"{parent}.")):
        return False
    return any(other.startswith(f"{parent.partition('.')[0]}.") for other in rests)


def _find_wrong_shapes(
    checkpoint: Checkpoint,
    live: Mapping[str, Shape],
    config: Mapping[str, Any],
    expected: ExpectedTensors,
) -> list[CheckpointProblem]:
    """Find tensors whose shapes contradict the sizes in the config.

    Scalars, and layers after the number of layers in the config, are not checked.

    Returns:
        At most one problem, which lists all tensors with a wrong shape. Empty if the weights are
        quantized, because packed weights have other shapes.
    """
    if _is_quantized(checkpoint.tensors, config):
        return []
    sizes = compute_formula_sizes(config)
    numbers = collect_integer_settings(config)
    depths = {stack: numbers.get(layers.depth or "", 1 << 60) for stack, layers in expected.stacks.items()}
    names_after_last_layer = {
        name
        for stack, layers in group_names_by_layer(live).items()
        for number, rests in layers.items()
        if number >= depths.get(stack, 1 << 60)
        for name in rests.values()
    }
    # Some classes read head_dim if a config has it, although their own configs have no such key. The table
    # then contains the hidden size instead of the number of heads times the head size.
    separate_heads = sizes.get("HD") != sizes.get("E")
    wrong = []
    for name, shape in live.items():
        formulas = expected.shapes.get(replace_layer_number(name))
        if formulas is None or name in names_after_last_layer or (shape == () and formulas):
            continue
        if separate_heads and _ATTENTION.search(name) and not any("D" in formula for formula in formulas):
            continue
        wanted = [sizes.get(formula) for formula in formulas]
        fits = len(shape) == len(wanted) and all(
            size is None or size == actual for size, actual in zip(wanted, shape, strict=False)
        )
        if not fits:
            text = ["?" if size is None else str(size) for size in wanted]
            wrong.append(f"{name} has {list(shape)} instead of [{', '.join(text)}]")
    if not wrong:
        return []
    return [
        CheckpointProblem(
            "shapes",
            f"the shapes of {_format_count(wrong, 'tensor')} contradict config.json",
            tuple(wrong),
        )
    ]


# -- any model --------------------------------------------------------------------------------------------


def _find_layer_gaps(shapes: Mapping[str, Shape]) -> list[CheckpointProblem]:
    """Find gaps between layers, and single layers that differ from all other layers of the same stack.

    A single layer may lack a tensor, or one of its tensors may have a different shape. The layers
    are only compared with each other, so no config is required. Layers that are missing at the end
    of a stack are therefore not found. Stacks whose layers have fewer than four tensors are skipped,
    and the first and the last layer may differ from the others.
    """
    problems = []
    for stack, layers in group_names_by_layer(shapes).items():
        if stack.rpartition(".")[2] not in _BLOCK_NAMES or len(layers) < 2:
            continue
        sizes = sorted(len(rests) for rests in layers.values())
        if sizes[len(sizes) // 2] < 4:
            continue  # modules without parameters between the layers of an nn.Sequential
        missing = [number for number in range(max(layers)) if number not in layers]
        if missing and len(missing) <= max(layers) // 2:
            names = tuple(f"{stack}.{number}" for number in missing)
            problems.append(CheckpointProblem("layers", "layers in the middle are missing", names))
        kinds = Counter(frozenset(_replace_expert_numbers(rests)) for rests in layers.values())
        (usual, count), *_ = kinds.most_common(1)
        for number, rests in layers.items():
            layer_kind = frozenset(_replace_expert_numbers(rests))
            # Report only a single layer that differs and is not at either end, because models with different
            # kinds of layers have several layers of each kind.
            if (
                kinds[layer_kind] == 1
                and len(kinds) == 2
                and count >= 3
                and layer_kind < usual
                and 0 < number < max(layers)
            ):
                names = tuple(f"{stack}.{number}.{rest}" for rest in sorted(usual - layer_kind))
                problems.append(CheckpointProblem("missing", _describe_missing_tensors(names), names))
        problems += _find_deviating_shapes(shapes, layers)
    return problems


def _find_deviating_shapes(
    shapes: Mapping[str, Shape], layers: Mapping[int, Mapping[str, str]]
) -> list[CheckpointProblem]:
    """Find layers in which exactly one tensor has a different shape than in all other layers.

    Such a layer is probably damaged. In a layer that was designed with a different width, several
    tensors would have different shapes. The first and the last layer are not reported, and stacks
    with fewer than four layers are not checked.

    Args:
        shapes: Shape of each tensor, keyed by name.
        layers: Names of the tensors in one stack, keyed by layer index and then by name in the
            layer.
    """
    deviating: dict[int, list[str]] = {}
    for rest in set.intersection(*(set(rests) for rests in layers.values())):
        by_shape: dict[Shape, list[int]] = {}
        for number, rests in layers.items():
            by_shape.setdefault(shapes[rests[rest]], []).append(number)
        if len(by_shape) == 2 and len(layers) >= 4:
            for numbers in by_shape.values():
                if len(numbers) == 1:
                    deviating.setdefault(numbers[0], []).append(rest)
    return [
        CheckpointProblem(
            "shapes",
            f"a tensor has the shape {list(shapes[layers[number][rests[0]]])}, but a different shape in all "
            "other layers",
            (layers[number][rests[0]],),
        )
        for number, rests in deviating.items()
        if len(rests) == 1 and 0 < number < max(layers)
    ]


def _find_missing_embeddings(
    shapes: Mapping[str, Shape], config: Mapping[str, Any]
) -> list[CheckpointProblem]:
    """Check that a causal language model has both its input and its output embeddings.

    Only models with `tie_word_embeddings` set to false in the config are checked. Draft models for
    speculative decoding are skipped. A problem is reported if exactly one matrix has a dimension of at
    least the vocabulary size. Returns at most one problem.
    """
    words, architecture = (
        collect_integer_settings(config).get("vocab_size", 0),
        get_architecture(config) or "",
    )
    is_draft = any("draft" in key or "eagle" in key for key in config)
    if (
        config.get(_TIE_SETTING) is not False
        or words <= 0
        or not architecture.endswith("ForCausalLM")
        or is_draft
    ):
        return []
    if not any(stack.rpartition(".")[2] in _BLOCK_NAMES for stack in group_names_by_layer(shapes)):
        return []
    tables = [name for name, shape in shapes.items() if len(shape) == 2 and max(shape) >= words]
    if len(tables) != 1:
        return []
    return [
        CheckpointProblem(
            "missing",
            f"config.json has {_TIE_SETTING} false and vocab_size {words:,}, but only one tensor has this "
            "number of rows, so the input or output embeddings are missing",
            (tables[0],),
        )
    ]


def _replace_expert_numbers(rests: Iterable[str]) -> set[str]:
    """Replace the expert index in each tensor name with `*`.

    For example, `mlp.experts.3.up_proj.weight` becomes `mlp.experts.*.up_proj.weight`.

    Args:
        rests: Names of the tensors in a layer, relative to the layer.
    """
    return {
        f"{match['module']}.*.{match['rest']}" if (match := _EXPERT_NAME.fullmatch(rest)) else rest
        for rest in rests
    }


def _find_expert_problems(
    shapes: Mapping[str, Shape], config: Mapping[str, Any], *, is_known: bool
) -> list[CheckpointProblem]:
    """Find missing experts, experts with missing tensors, and numbers of experts that contradict the config.

    An expert lacks a tensor if more than half of the experts in the module have it. Layers after
    `num_hidden_layers` are skipped.

    Args:
        shapes: Shape of each tensor, keyed by name.
        config: Content of the `config.json`.
        is_known: Whether `expected_tensors` contains the model class.
    """
    counts = _list_expert_counts(config) or (_list_expert_counts(config, least=0) if is_known else set())
    modules: dict[str, dict[int, set[str]]] = {}
    depth = collect_integer_settings(config).get("num_hidden_layers", 1 << 60)
    wrong: list[str] = []
    holes: list[str] = []
    for name, shape in shapes.items():
        if (layer := _LAYER_NUMBER.search(name)) and int(layer[1]) >= depth:
            continue  # a layer for multi-token prediction, which transformers does not load
        if match := _EXPERT_NAME.fullmatch(name):
            experts = modules.setdefault(match["module"], {})
            experts.setdefault(int(match["number"]), set()).add(match["rest"])
        elif _EXPERT_STACK_NAME.fullmatch(name) and len(shape) >= 3 and counts and shape[0] not in counts:
            wrong.append(f"{name} has {shape[0]:,}")
    for module, experts in modules.items():
        size = max(experts) + 1
        if size > len(experts):
            holes += [f"{module}.{i}" for i in range(min(size, 100_000)) if i not in experts]
        elif counts and size not in counts:
            wrong.append(f"{module} has {size:,}")
        unused = config.get(_ZERO_EXPERTS)
        if isinstance(unused, int) and size - unused in counts:
            for number in range(max(0, size - unused), size):
                experts.pop(number, None)  # transformers only stores some tensors of these experts
        usual = Counter(rest for rests in experts.values() for rest in rests)
        for number, rests in sorted(experts.items()):
            holes += [
                f"{module}.{number}.{rest}"
                for rest, count in usual.items()
                if rest not in rests and 2 * count > len(experts)
            ]
    problems = []
    if holes:
        problems.append(
            CheckpointProblem(
                "experts",
                f"the checkpoint lacks {len(holes):,} experts or their tensors",
                tuple(holes),
            )
        )
    if wrong:
        problems.append(
            CheckpointProblem(
                "experts",
                f"config.json has {' or '.join(f'{count:,}' for count in sorted(counts))} experts, but "
                "some layers have a different number of experts",
                tuple(wrong),
                "this happens if an expert-parallel save writes the experts of only one rank; the other "
                "experts are lost",
            )
        )
    return problems


def _list_expert_counts(config: Mapping[str, Any], *, least: int = 1) -> set[int]:
    """Return the numbers of experts that a layer may have according to a config.

    There may be several numbers, because a config may have several settings for experts, and a
    setting may be a list. The sum of each list is also included.

    Args:
        config: Content of the `config.json`.
        least: Smallest number of experts to include. Smaller numbers are ignored.

    Returns:
        The numbers. Empty if the config does not contain any.
    """
    counts: set[int] = set()
    parts: list[Any] = [config]
    while parts:
        part = parts.pop()
        parts += [value for value in part.values() if isinstance(value, dict)]
        for key, value in part.items():
            if not EXPERT_COUNT.fullmatch(key):
                continue
            values = value if isinstance(value, list) else [value]
            numbers = [number for number in values if type(number) is int and number >= least]
            counts |= {*numbers, *([sum(numbers)] if len(numbers) > 1 else [])}
            if key == "moe_num_experts" and "vision_config" in config:
                # ERNIE 4.5 VL stores the image experts after the text experts, so the number may be doubled.
                counts |= {2 * number for number in numbers}
        # LongCat-Flash also has experts without parameters, which transformers includes in the number.
        if type(extra := part.get(_ZERO_EXPERTS)) is int:
            counts |= {count + extra for count in counts}
    return counts


def _group_expert_weights(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any]
) -> dict[tuple[str, str], list[_ExpertWeight]]:
    """Group the expert weights that have to be compared with each other.

    A group contains the corresponding weights of all experts in a layer, such as all `up_proj`
    weights. Biases, norms, and scales are omitted, because they may be equal in a complete model.

    Returns:
        The groups, keyed by two names: the module that contains the experts, and the weight within
        an expert. For stacked experts, the first name is the name of the stack, and the second name
        is empty.
    """
    unused = config.get(_ZERO_EXPERTS)
    groups: dict[tuple[str, str], list[_ExpertWeight]] = {}
    for name, tensor in tensors.items():
        if _QUANTIZATION_METADATA.search(name.rpartition("experts.")[2]):
            continue
        if match := _EXPERT_NAME.fullmatch(name):
            if len(tensor.shape) >= 2:
                expert = _ExpertWeight(name, tensor)
                groups.setdefault((match["module"], match["rest"]), []).append(expert)
        elif _EXPERT_STACK_NAME.fullmatch(name) and len(tensor.shape) >= 3 and tensor.numel:
            # The experts without parameters are at the end of the stack.
            count = tensor.shape[0]
            if isinstance(unused, int) and 0 <= unused < count:
                count -= unused
            groups[name, ""] = [_ExpertWeight(f"{name}[{i}]", tensor, i) for i in range(count)]
    return groups


def _read_samples(weights: Sequence[_ExpertWeight]) -> dict[_ExpertWeight, Array]:
    """Read a sample of each weight from an object store, with several connections in parallel."""
    from concurrent.futures import ThreadPoolExecutor  # not at the top, because the import is slow

    with ThreadPoolExecutor(_CONNECTIONS) as pool:
        return dict(zip(weights, pool.map(_ExpertWeight.read_sample, weights), strict=True))


def _find_zero_or_equal_experts(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], *, is_remote: bool
) -> list[CheckpointProblem]:
    """Find experts with zero weights, or with the same weights as another expert in the layer.

    This reads tensor data. For most weights, a small sample is enough.

    Args:
        tensors: Tensors of the checkpoint, keyed by name.
        config: Content of the `config.json`.
        is_remote: Whether the tensors are in an object store. If so, only one weight of each expert
            is examined, because each weight needs a request.
    """
    groups = _group_expert_weights(tensors, config)
    samples: dict[_ExpertWeight, Array] = {}
    if is_remote:
        # Compare one weight per expert, because each weight needs a request. This suffices, because lost or
        # repeated experts are zero or equal in all of their weights.
        firsts: dict[str, tuple[str, str]] = {}
        for name, rest in groups:
            firsts.setdefault(name if rest else name.rpartition("experts")[0], (name, rest))
        groups = {key: groups[key] for key in firsts.values()}
        samples = _read_samples([weight for experts in groups.values() for weight in experts])
    zero: list[str] = []
    equal: list[str] = []
    for experts in groups.values():
        by_sample: dict[bytes, list[_ExpertWeight]] = {}
        for expert in experts:
            sample = samples[expert] if is_remote else expert.read_sample()
            if not (sample != 0).any() and expert.is_zero():
                zero.append(expert.name)
                continue
            # Weights can only be equal if their samples are equal, so all other pairs are skipped.
            for other in by_sample.setdefault(sample.tobytes(), []):
                if expert.has_same_bytes(other):
                    equal.append(f"{expert.name} = {other.name}")
                    break
            else:
                by_sample[sample.tobytes()].append(expert)
    lost = "this happens if an expert-parallel save gathered the experts of only one rank"
    problems = []
    if zero:
        problems.append(
            CheckpointProblem(
                "zero experts",
                f"the checkpoint contains {_format_count(zero, 'expert weight')} with only zeros",
                tuple(zero),
                lost,
            )
        )
    if equal:
        problems.append(
            CheckpointProblem(
                "equal experts",
                f"the checkpoint contains {_format_count(equal, 'expert weight')} equal to the weight of "
                "another expert",
                tuple(equal),
                lost,
            )
        )
    return problems


@dataclass(frozen=True, eq=False)
class _ExpertWeight:
    """Weight of one expert: a tensor, or one index of a stack of experts.

    Attributes:
        name: Name used in messages.
        tensor: Tensor that contains the weight.
        index: Index along dimension 0, or None if the tensor belongs only to this expert.
    """

    name: str
    tensor: Tensor
    index: int | None = None

    @property
    def _shape(self) -> Shape:
        return self.tensor.shape if self.index is None else self.tensor.shape[1:]

    def _read_rows(self, rows: slice, columns: slice = slice(None)) -> Array:
        first = () if self.index is None else (slice(self.index, self.index + 1),)
        return self.tensor.read((*first, rows, columns))

    def read_sample(self) -> Array:
        """Read a few elements from the middle row of the weight."""
        row = self._shape[0] // 2
        return self._read_rows(slice(row, row + 1), slice(0, _SAMPLE_ELEMENTS))

    def _list_row_blocks(self) -> list[slice]:
        """Divide the rows of the weight into blocks of about 1 MiB."""
        rows = self._shape[0]
        row_bytes = max(1, self.tensor.nbytes // max(1, self.tensor.shape[0]))
        if self.index is not None:
            row_bytes = max(1, row_bytes // max(1, rows))
        step = max(1, _BLOCK_BYTES // row_bytes)
        return [slice(start, min(rows, start + step)) for start in range(0, rows, step)]

    def is_zero(self) -> bool:
        """Return whether all elements are zero. Stops reading at the first nonzero element."""
        return not any((self._read_rows(rows) != 0).any() for rows in self._list_row_blocks())

    def has_same_bytes(self, other: _ExpertWeight) -> bool:
        """Return whether another weight has the same dtype, shape, and bytes.

        Stops reading at the first difference.
        """
        if self._shape != other._shape or self.tensor.dtype != other.tensor.dtype:
            return False
        return all(
            self._read_rows(rows).tobytes() == other._read_rows(rows).tobytes()
            for rows in self._list_row_blocks()
        )


def _find_repairable_contradictions(
    checkpoint: Checkpoint, config: Mapping[str, Any], expected: ExpectedTensors | None
) -> list[CheckpointProblem]:
    """Find repairable contradictions between the config and the tensors.

    A conversion repairs each of them. Examples are a `quantization_config` for a model that is not
    quantized, and input and output embeddings that differ although the config ties them.
    """
    problems = []
    tensors = checkpoint.tensors
    # Only check safetensors files, because sharded checkpoints always contain the stacks that transformers
    # has in memory.
    stacks = tuple(name for name in tensors if _EXPERT_STACK_NAME.fullmatch(name))
    rules = find_name_rules(checkpoint) if stacks and checkpoint.format == "safetensors" else None
    if rules is not None and checkpoint.names == "stored" and are_memory_names(tensors, rules):
        problems.append(
            CheckpointProblem(
                LIVE_NAMES_PROBLEM,
                f"the checkpoint contains {_format_count(stacks, 'stack')} of experts, although models of "
                "this type have one tensor for each expert",
                stacks,
                "only transformers 5 reads such stacks; transformers 4, vLLM, SGLang and others skip the "
                "experts, and a conversion writes one tensor for each expert",
                repaired=True,
            )
        )
    if has_stale_quantization(tensors, config):
        problems.append(
            CheckpointProblem(
                "stale quantization_config",
                "config.json has a quantization_config, but no tensor is quantized",
                cause="a conversion removes the key",
                repaired=True,
            )
        )
    if tie := find_contradicted_tie(tensors, config):
        head, embedding = tie
        problems.append(
            CheckpointProblem(
                "split tie",
                f"config.json ties the embeddings, but {head} differs from {embedding}",
                cause=f"a conversion writes {_TIE_SETTING}: false",
                repaired=True,
            )
        )
    return problems
