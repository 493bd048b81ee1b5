"""Define the rules by which transformers renames and rearranges tensors when it loads and saves a model.

In many models, the names and shapes of the tensors in memory differ from published files. For
example, transformers stacks the experts of a layer into one parameter. `published_names.json`
contains the rules of transformers as data, so that this module does not import a framework. `python
-m tests.published_names` generates the file. Each rule has two directions: `read` converts from
files to memory, and `write` converts from memory to files.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.converters.errors import CheckpointError, to_printable

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

_TABLE = Path(__file__).with_name("published_names.json")
RENAME, CONVERT, PREFIX, GROUP, SHIFT, PAIRS = "rename", "convert", "prefix", "group", "shift", "pairs"
EXCEPT_DENSE = r"(?!(?:gate|up|down)_proj\.)"
"""Part of a pattern that excludes dense layers from the renaming to ``block_sparse_moe``.

Published files of Kimi Linear have ``mlp`` in these layers, but ``save_pretrained`` renames all layers.
"""
_DENSE_RENAMED = re.compile(r"\.block_sparse_moe\.(?:gate|up|down)_proj\.")
Operation = tuple[Any, ...]


@dataclass(frozen=True)
class RuleDirection:
    r"""One direction of a name rule, either from files to memory or from memory to files.

    The rule searches a tensor's name for a source pattern, and replaces the match with a target
    pattern.

    Attributes:
        pattern: Regular expression that joins the source patterns. Source pattern `i` is the named
            group `g<i>`.
        sources: Source patterns.
        targets: Target patterns. `\1` in a target is replaced with the text of the source pattern's
            first group, `\2` with the text of its second group, and so on.
        operations: Operations to apply to the tensors, in order. Each one consists of its name and
            its arguments.
        offset: Number that a `shift` rule adds to the layer number.
    """

    pattern: str
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    operations: tuple[Operation, ...] = ()
    offset: int = 0


@dataclass(frozen=True)
class NameRule:
    """Rule by which transformers converts names or tensors, in both directions.

    The kinds of rules are:

    - `rename` changes a name.
    - `convert` changes names and rearranges the tensors.
    - `prefix` adds or removes the first module of a name.
    - `group` contains several renamings. The others are ignored until the first one has matched the
      name of a tensor in the checkpoint.
    - `shift` changes a layer number.
    - `pairs` joins two consecutive layers of the files into one layer in memory. Some files number
      the attention and the MLP of a layer separately. For example, `layers.4.mixer` and
      `layers.5.mixer` become `layers.2.self_attn` and `layers.2.mlp`.

    Attributes:
        kind: Kind of the rule.
        read: Direction from files to memory.
        write: Direction from memory to files.
        scope: Path of the submodule to which the rule applies, relative to the base model. None if
            the rule applies to the complete model.
        base: Name of the module that contains the base model, such as `model`. In models that
            contain the base model as a module, tensor names have this prefix before `scope`.
    """

    kind: str
    read: RuleDirection
    write: RuleDirection
    scope: str | None = None
    base: str = ""


@dataclass(frozen=True)
class NameRules:
    """Rules that convert the names and layouts of one model's tensors between files and memory.

    Published files are the files that the model's authors distribute, for example on the Hub.

    Attributes:
        rules: Rules in the order in which transformers applies them when it loads the model.
        base: Name of the base model's module, such as `model` or `transformer`. May be empty.
        config: Content of the model's `config.json`. Some operations depend on it.
        recorded: Whether the rules were selected because they match the tensor names in a base
            checkpoint. Otherwise, they are the defaults of the model type.
        file_shapes: Shapes of some tensors in the base checkpoint, keyed by the names in the files.
            Such a tensor has one of two layouts in published files, and only its shape shows which
            one. For example, published files of Qwen3-VL-MoE contain experts of shape
            `[experts, inputs, outputs]`, and `save_pretrained` writes `[experts, outputs, inputs]`.
    """

    rules: tuple[NameRule, ...]
    base: str
    config: Mapping[str, Any]
    recorded: bool = False
    file_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def depends_on_shapes(self) -> bool:
        """Whether the shapes of a base checkpoint are needed to choose the layout of a tensor.

        A base checkpoint is a published checkpoint of the model. Some tensors have one of two
        layouts in published files, and only their shapes in the base checkpoint show which one.
        """
        return any(map(_depends_on_expected_shape, self.rules))


def _depends_on_expected_shape(rule: NameRule) -> bool:
    """Return whether a rule transposes a tensor only if its shape differs from the expected shape."""
    return any(name == "transpose" and arguments[-1] for name, *arguments in rule.read.operations)


def parse_rule(value: Mapping[str, Any]) -> NameRule:
    """Parse a rule from JSON that `serialize_rule` has written.

    The types of the fields are not checked.

    Raises:
        KeyError: If a field is missing.
    """
    return NameRule(
        value["kind"],
        _parse_direction(value["read"]),
        _parse_direction(value["write"]),
        value.get("scope"),
        value.get("base", ""),
    )


def serialize_rule(rule: NameRule) -> dict[str, Any]:
    """Convert a rule to JSON that `parse_rule` can read."""
    value: dict[str, Any] = {
        "kind": rule.kind,
        "read": _serialize_direction(rule.read),
        "write": _serialize_direction(rule.write),
    }
    return value if rule.scope is None else {**value, "scope": rule.scope, "base": rule.base}


def _parse_direction(value: Mapping[str, Any]) -> RuleDirection:
    """Parse one direction of a rule from JSON: files to memory (`read`) or memory to files (`write`)."""
    return RuleDirection(
        value["find"],
        tuple(value["sources"]),
        tuple(value["targets"]),
        tuple(tuple(tuple(v) if isinstance(v, list) else v for v in step) for step in value.get("ops", ())),
        value.get("offset", 0),
    )


def _serialize_direction(direction: RuleDirection) -> dict[str, Any]:
    """Convert one direction of a rule to JSON. Default values are omitted."""
    value: dict[str, Any] = {
        "find": direction.pattern,
        "sources": list(direction.sources),
        "targets": list(direction.targets),
    }
    if direction.operations:
        value["ops"] = [list(step) for step in direction.operations]
    if direction.offset:
        value["offset"] = direction.offset
    return value


@dataclass(frozen=True)
class _Submodel:
    """Submodule with its own rules for tensor names, such as the text model in a multimodal model.

    Attributes:
        path: Path of the submodule, or an empty string for the complete model.
        key: Key of the submodule's rules in `published_names.json`.
        config: Keys that lead from the model's config to the nested config of the submodule.
        model_type: Model type of the submodule's config when `published_names.json` was generated.
    """

    path: str
    key: str
    config: tuple[str, ...]
    model_type: str


class _RuleTable:
    """Table of conversion rules for all models in transformers, read from `published_names.json`.

    The rules convert tensor names and shapes between published files and the model in memory.
    """

    def __init__(self) -> None:
        table = json.loads(_TABLE.read_bytes())
        self.version: str = table["transformers"]
        self.rules = tuple(parse_rule(value) for value in table["rules"])
        self.by_key: dict[str, list[int]] = table["keys"]
        self.classes: dict[str, dict[str, Any]] = table["classes"]
        self.types: dict[str, dict[str, Any]] = table["types"]
        self.bases = {name: about["base"] for about in self.types.values() for name in about["classes"]}
        self._unscoped = frozenset(self.rules)

    def get_rules(self, key: str) -> list[NameRule]:
        """Return the rules for a model type or class. Empty if there are none."""
        return [self.rules[i] for i in self.by_key.get(key, ())]

    def contains_rule(self, rule: NameRule) -> bool:
        """Return whether the table contains a rule, even if the rule is restricted to a submodule.

        The attributes `scope` and `base`, which express the restriction, are ignored.
        """
        return replace(rule, scope=None, base="") in self._unscoped


@cache
def _load_table() -> _RuleTable:
    return _RuleTable()


def get_architecture(config: Mapping[str, Any]) -> str | None:
    """Return the first class in the `architectures` of a config, or None if there is none."""
    names = config.get("architectures")
    first = names[0] if isinstance(names, list) and names else None
    return first if isinstance(first, str) else None


def get_default_rules(config: Mapping[str, Any], architecture: str | None = None) -> NameRules | None:
    """Return the default rules that convert a model's tensor names between files and memory.

    Args:
        config: The model's `config.json`.
        architecture: Class of the model. Defaults to the class in the config.

    Returns:
        The rules, or None if transformers does not implement the model type or the class.
    """
    model_type = config.get("model_type")
    table = _load_table()
    if not isinstance(model_type, str):
        return None
    class_name = architecture or get_architecture(config)
    class_entry = table.classes.get(f"{model_type} {class_name}")
    if class_entry is None:
        if class_name is not None:
            base = table.bases.get(class_name)
        else:
            base = table.types.get(model_type, {}).get("base")
        if base is None:
            return None
        parts = [["", model_type, [], model_type]] if model_type in table.by_key else []
        class_entry = {"base": base, "parts": parts}
    base = class_entry["base"]
    rules: list[NameRule] = []
    for path, key, config_keys, submodel_type in class_entry["parts"]:
        submodel = _Submodel(path, key, tuple(config_keys), submodel_type)
        scope = path.removeprefix(base).removeprefix(".")
        for rule in table.get_rules(_resolve_rules_key(submodel, config)):
            rules.append(replace(rule, scope=scope, base=base) if path else rule)
    return NameRules(tuple(rules), base, config)


def iter_possible_rules(config: Mapping[str, Any]) -> Iterator[NameRules]:
    """Yield the name rules of every class that transformers may use for a model, without duplicates.

    Classes whose rules differ only in `NameRules.base` count as duplicates. The rules of the class
    that the config names come first. The other classes for the config's model type follow. The
    classes for the model type of the nested text config come last.
    """
    table = _load_table()
    seen: set[tuple[NameRule, ...]] = set()
    text_config = config.get("text_config")
    for candidate in (config, text_config if isinstance(text_config, dict) else {}):
        model_type = candidate.get("model_type")
        about = table.types.get(model_type) if isinstance(model_type, str) else None
        names = [] if about is None else about["classes"]
        for architecture in (*([None] if candidate is config else []), *names):
            rules = get_default_rules(candidate, architecture)
            if rules is not None and rules.rules not in seen:
                seen.add(rules.rules)
                yield rules


def get_legacy_rules() -> tuple[NameRule, ...]:
    """Return the rules that rename tensors with outdated names, as in old checkpoints.

    For example, `LayerNorm.gamma` becomes `LayerNorm.weight`. These legacy rules apply to all model
    types.
    """
    return tuple(_load_table().get_rules("legacy"))


def add_legacy_rules(rules: NameRules) -> NameRules:
    """Return the rules of a model, followed by the rules for names in old files.

    transformers applies these legacy rules to the files of every model that it reads.
    """
    return replace(rules, rules=(*rules.rules, *get_legacy_rules()))


def _resolve_rules_key(submodel: _Submodel, config: Mapping[str, Any]) -> str:
    """Return the key of a submodel's rules in `published_names.json`.

    The key depends on the model type in the submodel's config. If the config has no model type, the
    default key of the submodel is returned.
    """
    table = _load_table()
    value: Any = config
    for name in submodel.config:
        value = value.get(name) if isinstance(value, dict) else None
    model_type = value.get("model_type") if isinstance(value, dict) else None
    if not submodel.config or not isinstance(model_type, str) or model_type == submodel.model_type:
        return submodel.key
    about = table.types.get(model_type)
    model = about.get("model") if about is not None else None
    return model if isinstance(model, str) and model in table.by_key else model_type


def parse_rules_record(value: Any, config: Mapping[str, Any], source: str) -> NameRules:
    """Parse the rules that a training run recorded in its checkpoint.

    Args:
        value: Content of the record.
        config: The model's `config.json`.
        source: Path of the record, used in error messages.

    Returns:
        The recorded rules.

    Raises:
        CheckpointError: If the record is damaged, or contains a rule that is not in
            `published_names.json`.
    """
    try:
        base, values = value["base"], value["rules"]
        if value["version"] != 1 or not isinstance(base, str) or not isinstance(values, list):
            raise ValueError
        rules = tuple(map(parse_rule, values))
        file_shapes = {name: tuple(shape) for name, shape in value.get("file_shapes", {}).items()}
        if any(type(size) is not int for shape in file_shapes.values() for size in shape):
            raise ValueError
        accepted = [
            _load_table().contains_rule(rule) and isinstance(rule.scope, str | None) for rule in rules
        ]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise CheckpointError(
            f"{source}: the file is damaged; remove the file to write the default names of the model type"
        ) from None
    # Accept only the rules of the table, because matching an arbitrary regular expression may never finish.
    if not all(accepted):
        pattern = to_printable(rules[accepted.index(False)].read.pattern)[:60]
        raise CheckpointError(
            f"{source}: contains the rule {pattern!r}, which this version does not support; remove the file "
            "to write the default names of the model type"
        )
    return NameRules(rules, base, config, recorded=True, file_shapes=file_shapes)


def build_rules_record(rules: NameRules) -> dict[str, Any]:
    """Convert the rules to a JSON record. `parse_rules_record` reads such a record."""
    record = {"version": 1, "base": rules.base, "rules": [serialize_rule(rule) for rule in rules.rules]}
    shapes = {name: list(shape) for name, shape in rules.file_shapes.items()}
    return {**record, "file_shapes": shapes} if shapes else record


@cache
def _compile_pattern(find: str) -> re.Pattern[str]:
    return re.compile(find)


class MatchedRule(NamedTuple):
    """Rule of kind `convert` that matches a name.

    Attributes:
        rule_index: Index of the rule in `Renamer.rules`.
        source: Source pattern of the rule that matches the name.
    """

    rule_index: int
    source: str


class ConvertedName(NamedTuple):
    """Result of applying the first matching `convert` rule to a tensor's name.

    Attributes:
        name: New name, or the unchanged name if no rule matches.
        rule: The matching rule, or None.
    """

    name: str
    rule: MatchedRule | None


class _RenamedKey(NamedTuple):
    """Name after applying a rule, and the source pattern that matched.

    The pattern is None if the rule does not match.
    """

    key: str
    source: str | None


class Renamer:
    """Converter of tensor names that applies rules in one direction and records which it has used.

    The result for a name may depend on the names that were converted before, because a `group` rule
    is ignored until its first pattern has matched. Convert the names in the order of
    `sort_naturally`.

    Args:
        rules: Rules in the order in which to apply them.
        write: Whether to convert names in memory to names in files. Otherwise, names in files are
            converted to names in memory.

    Attributes:
        used_rule_indices: Indices of the rules that have matched a name so far.
    """

    def __init__(self, rules: Iterable[NameRule], *, write: bool) -> None:
        self.rules = list(rules)
        self.write = write
        self.used_rule_indices: set[int] = set()
        self._active: set[int] = set()

    def get_direction(self, index: int) -> RuleDirection:
        """Return one direction of a rule: `write` if this renamer converts to files, `read` otherwise.

        Args:
            index: Index of the rule in `rules`.
        """
        rule = self.rules[index]
        return rule.write if self.write else rule.read

    def apply_convert_rule(self, key: str) -> ConvertedName:
        """Apply the first matching `convert` rule to a name.

        Args:
            key: Name of a tensor.

        Returns:
            The new name and the rule. In the new name, the first target pattern of the rule
            replaces the match. If no rule matches, the unchanged name and None.
        """
        for index, rule in enumerate(self.rules):
            if rule.kind == CONVERT:
                renamed, source = self._apply_rule(index, key)
                if source is not None:
                    return ConvertedName(renamed, MatchedRule(index, source))
        return ConvertedName(key, None)

    def apply_rename_rules(self, key: str) -> str:
        """Apply all rules except `convert` rules to a name, one after another, and return the new name.

        Records which rules were used.
        """
        for index, rule in enumerate(self.rules):
            if rule.kind != CONVERT:
                key, _ = self._apply_rule(index, key)
        return key

    def _apply_rule(self, index: int, key: str) -> _RenamedKey:
        """Apply one rule to a name, and record the rule as used if it matches.

        A `group` rule contains several source patterns. Until the first pattern has matched a name,
        the other patterns are ignored.

        Args:
            index: Index of the rule.
            key: Name of a tensor.

        Returns:
            The new name and the source pattern that matched, or the old name and None.
        """
        rule, direction = self.rules[index], self.get_direction(index)
        prefix = ""
        if rule.scope is not None:
            scope = f"{rule.scope}." if rule.scope else ""
            base = f"{rule.base}." if rule.base else ""
            if key.startswith(base + scope):
                prefix = base + scope
            elif key.startswith(scope):
                prefix = scope
            else:
                return _RenamedKey(key, None)
        rest = key[len(prefix) :]
        if rule.kind == PAIRS:
            renamed = rest if self.write else _join_layer_pairs(rest)
            if renamed == rest:
                return _RenamedKey(key, None)
            self.used_rule_indices.add(index)
            return _RenamedKey(prefix + renamed, direction.sources[0])
        match = _compile_pattern(direction.pattern).search(rest)
        if match is None:
            return _RenamedKey(key, None)
        group = next(name for name, value in match.groupdict().items() if value is not None)
        number = int(group[1:])
        target = direction.targets[0]
        if rule.kind == GROUP:
            if number == 0:
                self._active.add(index)
            elif index not in self._active:
                return _RenamedKey(key, None)
            target = direction.targets[number]
        self.used_rule_indices.add(index)
        begin = match.re.groupindex[group]
        if rule.kind == SHIFT:
            target = target.replace(r"\1", str(int(match.group(begin + 1)) + direction.offset))
        else:
            target = re.sub(r"\\(\d)", lambda digit: match.group(begin + int(digit[1])) or "", target)
        renamed = prefix + rest.replace(match.group(0), target, 1)
        return _RenamedKey(renamed, direction.sources[number])


_LAYER_OF_TWO = re.compile(r"layers\.(\d{1,9})\.(mixer|attn_alpha|mlp_alpha)(?=\.|$)")


def _join_layer_pairs(key: str) -> str:
    """Convert a name from a file that counts a layer's attention and MLP as two layers.

    For example, `layers.4.mixer` and `layers.5.mixer` become `layers.2.self_attn` and
    `layers.2.mlp`. The scalars `attn_alpha` and `mlp_alpha` of a layer become `lambda_1` and
    `lambda_2`. Other names are returned unchanged.
    """

    def rename_layer(match: re.Match[str]) -> str:
        number, module = int(match[1]), match[2]
        scalars = {"attn_alpha": "lambda_1", "mlp_alpha": "lambda_2"}
        return f"layers.{number // 2}.{scalars.get(module, ('self_attn', 'mlp')[number % 2])}"

    return _LAYER_OF_TWO.sub(rename_layer, key, count=1)


def sort_naturally(names: Iterable[str]) -> list[str]:
    """Sort names such that numbers in them are in numeric order."""

    def split_numbers(name: str) -> list[tuple[Any, ...]]:
        parts: list[tuple[Any, ...]] = []
        for part in name.split("."):
            text = part.rstrip("0123456789")
            if part.isdecimal():
                parts.append((0, int(part)))
            elif text != part:
                parts.append((1, text, int(part[len(text) :])))
            else:
                parts.append((1, part))
        return parts

    return sorted(names, key=split_numbers)


def select_used_rules(
    rules: NameRules, names: Collection[str], shapes: Mapping[str, tuple[int, ...]] | None = None
) -> NameRules:
    """Select the rules that apply to at least one name in a published checkpoint.

    transformers applies these rules when it loads the checkpoint. When it saves the model later, it
    applies them in reverse.

    Args:
        rules: Default rules of the model.
        names: Names of the tensors in the published checkpoint.
        shapes: Shapes of these tensors, keyed by name. They do not affect the selection. Needed if
            `rules.depends_on_shapes` is True. In this case, some tensors have one of two layouts in
            published files. Their shapes are recorded in the result, so that a later save restores
            the layout in the file. Without shapes, the save uses the layout in memory.

    Returns:
        The selected rules. They may include legacy rules, which rename tensors with outdated names.
    """
    candidates = add_legacy_rules(rules)
    renaming = Renamer(candidates.rules, write=False)
    file_shapes = {}
    for name in sort_naturally(names):
        _, converter = renaming.apply_convert_rule(renaming.apply_rename_rules(name))
        if (
            shapes
            and name in shapes
            and converter
            and _depends_on_expected_shape(candidates.rules[converter.rule_index])
        ):
            file_shapes[name] = shapes[name]
    used = [rule for index, rule in enumerate(candidates.rules) if index in renaming.used_rule_indices]
    if any(map(_DENSE_RENAMED.search, names)):
        used = [
            replace(rule, write=replace(rule.write, pattern=rule.write.pattern.replace(EXCEPT_DENSE, "")))
            for rule in used
        ]
    return replace(candidates, rules=tuple(used), recorded=True, file_shapes=file_shapes)


def list_write_rules(rules: NameRules) -> Sequence[NameRule]:
    """Return the rules that convert names in memory to published names, in order of application.

    Published names are the tensor names in published checkpoint files, for example on the Hub.

    If the rules were selected to match a base checkpoint, all of them are returned. Otherwise, they
    are the default rules of the model type. Most `prefix` rules are then omitted, because not all
    published files use the prefix.
    """
    used = (
        rules.rules if rules.recorded else [rule for rule in rules.rules if _is_written(rule, rules.config)]
    )
    return list(reversed(used))


_TYPES_WITH_PREFIXED_TOWERS = frozenset(
    {
        "aya_vision",
        "cohere2_vision",
        "gemma3",
        "lfm2_vl",
        "llava",
        "llava_next",
        "llava_next_video",
        "llava_onevision",
        "paligemma",
        "video_llava",
        "vipllava",
    }
)
"""Model types of transformers 4.57 whose vision towers contain a module `vision_model`.

Published files and inference servers use this name. transformers 5 removes it while it reads a
file.
"""


def _is_written(rule: NameRule, config: Mapping[str, Any]) -> bool:
    """Return whether a rule applies on saving if the model's base checkpoint is unknown.

    All rules apply except most `prefix` rules, because only some published files have the prefix. A
    `prefix` rule only applies inside the vision tower of a model type in
    `_TYPES_WITH_PREFIXED_TOWERS`.

    Args:
        rule: One of the default rules of the model type.
        config: The model's `config.json`.
    """
    in_tower = rule.scope is not None and rule.scope.endswith("_tower")
    return rule.kind != PREFIX or (in_tower and config.get("model_type") in _TYPES_WITH_PREFIXED_TOWERS)
