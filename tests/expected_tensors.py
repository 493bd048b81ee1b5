"""Generate the tensors that each model class requires, as data: ``python -m tests.expected_tensors``.

The converter does not import a framework. Therefore, ``converters/names/expected_tensors.json`` contains what
follows from building each text model of transformers on the ``meta`` device in many variants: every flag of
its config is flipped, every number is doubled, set to 0, and set to None, one at a time. The file
contains only facts that hold in all variants that can be built:

- ``required``: parameters that every variant has. ``untied``: parameters that every variant with
  ``tie_word_embeddings: false`` has in addition.
- ``stacks``: for each stack of layers, the config key with the number of layers, the parameters that every
  layer has, and groups of parameters that always occur together in a layer.
- ``shapes``: the sizes of parameters as products of config values, see
`portable.converters.names.expected_tensors`.

``tests/converters/test_integrity.py`` compares the file with transformers.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from portable.converters.names.expected_tensors import (
    SIZES,
    collect_integer_settings,
    compute_formula_sizes,
    group_names_by_layer,
    may_tie_embeddings,
    replace_layer_number,
)

FILE = Path(__file__).resolve().parents[1] / "converters" / "names" / "expected_tensors.json"
_IGNORED_KEYS = (
    "dropout",
    "chunk_size_feed_forward",
    "transformers_version",
    "token_id",
    "token_index",
    "dtype",
)
_LAYER_COUNT = re.compile(r"(^|_)n?_?(layers?|depth|num_layers)$|hidden_layers|num_blocks")
# Values with which a layer of every kind of a mixture of experts appears in a model of two layers.
_OTHER_BASES = {
    "first_k_dense_replace": 0,
    "num_dense_layers": 0,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}
# Models whose published names cannot be converted to the names in memory without the model.
_EXCLUDED_TYPES = ("deepseek_v4",)
_HAS_TEXT_CONFIG = "the class takes the text config, whose model type is described separately"
_NEEDS_TIMM = "the vision tower needs timm, which is not installed"
_AMBIGUOUS = "the config has two text configs"
UNDESCRIBED = {
    "dbrx DbrxForCausalLM": "transformers cannot build the model: its attention config lacks rope_theta",
    "dots3_note Dots3NoteForCausalLM": "transformers rejects the default config with fewer than 42 layers",
    "dots3_note_text Dots3NoteForCausalLM": "the number of heads differs between layers",
    "emu3 Emu3ForCausalLM": "the class takes the text config, which has no entry among the auto classes",
    "fast_vlm FastVlmForConditionalGeneration": _NEEDS_TIMM,
    "gemma3n Gemma3nForConditionalGeneration": _NEEDS_TIMM,
    "gemma4_assistant Gemma4AssistantForCausalLM": "transformers rejects the default config",
    "inkling_mm_model InklingForConditionalGeneration": "the model needs scipy, which is not installed",
    "layoutlmv2 LayoutLMv2ForSequenceClassification": "the model needs detectron2, which is not installed",
    "llama4 Llama4ForCausalLM": _HAS_TEXT_CONFIG,
    "musicflamingo MusicFlamingoForConditionalGeneration": "transformers rejects a smaller default config",
    "musicgen MusicgenForCausalLM": _AMBIGUOUS,
    "musicgen_melody MusicgenMelodyForCausalLM": _AMBIGUOUS,
    "perception_lm PerceptionLMForConditionalGeneration": _NEEDS_TIMM,
    "qwen3_5 Qwen3_5ForCausalLM": _HAS_TEXT_CONFIG,
    "qwen3_5_moe Qwen3_5MoeForCausalLM": _HAS_TEXT_CONFIG,
    "qwen4_exp Qwen4ExpForCausalLM": _HAS_TEXT_CONFIG,
}
"""Reasons why the file does not describe a class, by model type and class.

The converter checks these classes by the rules for unknown types. To describe a class, run
``python -m tests.expected_tensors MODEL_TYPE``, and remove the class here.
"""
_STRUCTURAL = re.compile(r"position|norm|proj|rope|attention_type|embed")
_STRINGS = (
    "none",
    "rotary",
    "alibi",
    "absolute",
    "relative_key",
    "rms_norm",
    "layer_norm",
    "gated-gelu",
    "relu",
)


Description = dict[str, Any]
"""Facts about a class: `required`, `untied`, `stacks`, `shapes` and `tied`."""


def list_pairs() -> list[Any]:
    """Return the pairs of a model type and a task whose classes are in the file."""
    from tests import architectures

    return [pair for pair in architectures.pairs() if pair.model_type not in _EXCLUDED_TYPES]


def describe_classes(pairs: Any) -> dict[str, Description]:
    """Describe the classes of pairs of a model type and a task in several processes.

    Returns:
        The descriptions, keyed by model type and class. Classes that cannot be built are missing.
    """
    descriptions = {}
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for pair, described in zip(pairs, pool.map(describe_class, *zip(*pairs, strict=True)), strict=True):
            print(*pair, described and described[1]["variants"], file=sys.stderr, flush=True)
            if described is not None:
                name, about = described
                descriptions[f"{pair.model_type} {name}"] = about
    return descriptions


def encode_table(descriptions: Mapping[str, Description]) -> dict[str, Any]:
    """Build the content of the file from descriptions of classes."""
    import transformers

    strings: dict[str, int] = {}
    bodies: dict[str, int] = {}
    classes: dict[str, int] = {}

    def number(names: Any) -> list[int]:
        return sorted(strings.setdefault(name, len(strings)) for name in sorted(names))

    for key, about in descriptions.items():
        body = {
            "required": number(about["required"]),
            "untied": number(about["untied"]),
            "stacks": {
                str(number([stack])[0]): {
                    "depth": layers["depth"],
                    "always": number(layers["always"]),
                    "groups": [number(group) for group in layers["groups"]],
                }
                for stack, layers in sorted(about["stacks"].items())
            },
            "shapes": {
                str(number([text])[0]): " ".join(formulas)
                for text, formulas in sorted(about["shapes"].items())
            },
            "tied": about["tied"],
        }
        classes[key] = bodies.setdefault(json.dumps(body, sort_keys=True), len(bodies))
    return {
        "transformers": transformers.__version__,
        "classes": classes,
        "strings": list(strings),
        "bodies": [json.loads(body) for body in bodies],
    }


def decode_table(table: Mapping[str, Any]) -> dict[str, Description]:
    """Return the descriptions of the classes in the content of the file."""
    strings = table["strings"]

    def names(numbers: Any) -> list[str]:
        return [strings[number] for number in numbers]

    def decode(body: Mapping[str, Any]) -> Description:
        return {
            "required": names(body["required"]),
            "untied": names(body["untied"]),
            "stacks": {
                strings[int(stack)]: {
                    "depth": layers["depth"],
                    "always": names(layers["always"]),
                    "groups": [names(group) for group in layers["groups"]],
                }
                for stack, layers in body["stacks"].items()
            },
            "shapes": {strings[int(text)]: formulas.split(" ") for text, formulas in body["shapes"].items()},
            "tied": body["tied"],
        }

    return {key: decode(table["bodies"][index]) for key, index in table["classes"].items()}


def create_config(model_type: str, task: str) -> Any:
    """Create the tiny config of a pair; raises if transformers cannot create the config."""
    from transformers import AutoConfig

    from tests.architectures import COMPOSITE
    from tests.composite import build_composite_config
    from tests.tiny_models import tiny_config

    if task == COMPOSITE:
        return build_composite_config(model_type)
    return AutoConfig.for_model(**tiny_config(model_type, task))


def find_class_name(model_type: str, task: str) -> str:
    """Return the name of the class of transformers for a model type and a task."""
    from transformers.models.auto import modeling_auto

    from tests.architectures import COMPOSITE, TASKS

    names = (
        modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
        if task == COMPOSITE
        else getattr(modeling_auto, TASKS[task])
    )
    name = names[model_type]
    return name if isinstance(name, str) else str(name[0])


def find_class(model_type: str, task: str) -> Any:
    """Return the class of transformers for a model type and a task."""
    import transformers

    return getattr(transformers, find_class_name(model_type, task))


def iterate_variants(config: Any) -> Iterator[Any]:
    """Yield the config, and copies of the config that differ in one or two values."""
    yield config
    bases = [config]
    text = config.get_text_config()
    for key, value in _OTHER_BASES.items():
        if getattr(text, key, value) != value:
            changed = copy.deepcopy(bases[-1])
            setattr(changed.get_text_config(), key, value)
            bases[1:] = [changed]
    for base in bases:
        yield from _iterate_lengths(base)
        yield from _iterate_changes(base)


def _iterate_lengths(config: Any) -> Iterator[Any]:
    """Yield copies with more layers, whose lists per layer are repeated."""
    text = config.get_text_config()
    for key in [key for key in vars(text) if _LAYER_COUNT.search(key) and type(getattr(text, key)) is int]:
        for count in (4, 6):
            longer = copy.deepcopy(config)
            part = longer.get_text_config()
            before = getattr(part, key)
            for name, value in list(vars(part).items()):
                if isinstance(value, list) and value and len(value) == before:
                    setattr(part, name, (value * count)[:count])
            try:
                setattr(part, key, count)
            except Exception:
                continue
            yield longer


def _iterate_changes(config: Any) -> Iterator[Any]:
    """Yield copies in which one value of the config or of a nested config differs."""
    from transformers import PretrainedConfig

    text = config.get_text_config()
    paths: list[tuple[str, ...]] = [()]
    paths += [(key,) for key, value in vars(config).items() if isinstance(value, PretrainedConfig)]
    for path in paths:
        part = config
        for key in path:
            part = getattr(part, key)
        for key, value in list(vars(part).items()):
            if key.startswith("_") or any(word in key for word in _IGNORED_KEYS):
                continue
            for changed in _vary(key, value, numbers=part is config or part is text):
                variant = copy.deepcopy(config)
                target = variant
                for step in path:
                    target = getattr(target, step)
                try:
                    setattr(target, key, changed)
                except Exception:
                    continue
                yield variant
    if type(getattr(text, "num_attention_heads", None)) is int:
        variant = copy.deepcopy(config)
        part = variant.get_text_config()
        part.num_attention_heads = 2 * part.num_attention_heads
        if type(getattr(part, "num_key_value_heads", None)) is int:
            part.num_key_value_heads = 2 * part.num_key_value_heads
        yield variant


def _vary(key: str, value: Any, *, numbers: bool) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        if _LAYER_COUNT.search(key):
            return []
        return [0, None, *([2 * value] if numbers else [])] if value else [1, 2]
    if isinstance(value, str) and _STRUCTURAL.search(key):
        return [text for text in _STRINGS if text != value]
    if value is None and key not in ("architectures", "quantization_config", "id2label", "label2id"):
        return [True, 2] if numbers else [True]
    if isinstance(value, list) and value and len(value) <= 8:
        return [[value[0]] * len(value), [value[-1]] * len(value), value[::-1], []]
    return []


class _Observations:
    """Facts that hold in all variants of a class that have been built."""

    def __init__(self) -> None:
        self.required: set[str] | None = None
        self.untied: set[str] | None = None
        self.aliases: set[str] = set()
        self.variants = 0
        # Layers in which a parameter occurs, keyed by stack and by the name inside the layer.
        self.layers: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
        self.counts: dict[str, set[int]] = defaultdict(set)
        self.depths: dict[str, dict[str, set[int]]] = {}
        self.shapes: dict[str, list[set[str]]] = {}
        self.values: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
        self.uneven: set[str] = set()
        self._number = 0

    def add(
        self,
        live: dict[str, tuple[int, ...]],
        aliases: set[str],
        ignored: list[str],
        config: dict[str, Any],
        *,
        tied: bool,
    ) -> None:
        """Add a variant."""
        self.variants += 1
        self.aliases |= {replace_layer_number(name) for name in aliases}
        needed = {
            replace_layer_number(name)
            for name in live
            if name not in aliases and not any(re.search(key, name) for key in ignored)
        }
        self.required = needed if self.required is None else self.required & needed
        if not tied:
            self.untied = needed if self.untied is None else self.untied & needed
        self._add_layers(group_names_by_layer(live), config)
        if aliases:
            self._add_layers(group_names_by_layer(name for name in live if name not in aliases), None)
        self._add_shapes(live, config)

    def _add_layers(
        self, stacks: dict[str, dict[int, dict[str, str]]], config: dict[str, Any] | None
    ) -> None:
        numbers = None if config is None else collect_integer_settings(config)
        for stack, layers in stacks.items():
            for layer in layers.values():
                self._number += 1
                self.counts[stack].add(self._number)
                for rest in layer:
                    self.layers[stack][rest].add(self._number)
            if numbers is not None:
                candidates = {key: {value} for key, value in numbers.items() if value == len(layers)}
                if stack in self.depths:
                    before = self.depths[stack]
                    candidates = {
                        key: before[key] | value for key, value in candidates.items() if key in before
                    }
                self.depths[stack] = candidates

    def _add_shapes(self, live: dict[str, tuple[int, ...]], config: dict[str, Any]) -> None:
        sizes = compute_formula_sizes(config)
        by_mask: dict[str, set[tuple[int, ...]]] = defaultdict(set)
        for name, shape in live.items():
            by_mask[replace_layer_number(name)].add(shape)
        for mask, different in by_mask.items():
            if len(different) > 1:
                self.uneven.add(mask)
                continue
            (shape,) = different
            if mask not in self.shapes:
                self.shapes[mask] = [set(SIZES) for _ in shape]
            if len(self.shapes[mask]) != len(shape):
                self.uneven.add(mask)
                continue
            for formula, value in sizes.items():
                self.values[mask][formula].add(value)
            for candidates, size in zip(self.shapes[mask], shape, strict=True):
                candidates &= {formula for formula in candidates if sizes.get(formula) == size}

    def choose_depth(self, stack: str) -> str | None:
        """Return the config key that always equals the number of layers, if variants have changed the key."""
        return min(
            (key for key, values in self.depths.get(stack, {}).items() if len(values) > 1), default=None
        )

    def choose_formula(self, mask: str, candidates: set[str]) -> str:
        """Return the formula of a dimension: a formula that remains and that variants have changed."""
        varied = [formula for formula in candidates if len(self.values[mask][formula]) > 1]
        return min(varied, key=lambda formula: (len(formula), formula), default="?")

    def group_layers(self, stack: str) -> tuple[list[str], list[list[str]]]:
        """Return the parameters of every layer, and groups of parameters that always occur together."""
        groups: dict[frozenset[int], list[str]] = defaultdict(list)
        for rest, numbers in self.layers[stack].items():
            groups[frozenset(numbers)].append(rest)
        always = groups.pop(frozenset(self.counts[stack]), [])
        return always, [group for group in groups.values() if len(group) > 1]


def describe_class(model_type: str, task: str) -> tuple[str, dict[str, Any]] | None:
    """Describe the parameters of a class, see the documentation of the module.

    Returns:
        The name of the class and its description, or None if transformers cannot build a tiny model.
    """
    import torch
    from transformers import logging

    logging.set_verbosity_error()
    try:
        config = create_config(model_type, task)
        model_class = find_class(model_type, task)
        tied_by_default = bool(getattr(type(config)(), "tie_word_embeddings", False))
    except Exception:
        return None
    observations = _Observations()
    try:
        variants = list(iterate_variants(config))
    except Exception:  # Some configs refuse to read values that differ between layers.
        return None
    for variant in variants:
        try:
            with torch.device("meta"):
                model = model_class(copy.deepcopy(variant))
            live = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
            aliases = set(getattr(model, "all_tied_weights_keys", None) or {})
            content = json.loads(model.config.to_json_string(use_diff=False))
            tied = may_tie_embeddings(content, default=False)
        except Exception:
            if not observations.variants:
                return None
            continue
        if any(0 in shape for shape in live.values()):
            continue  # a size of 0 is not a model
        ignored = list(getattr(model, "_keys_to_ignore_on_load_missing", None) or [])
        observations.add(live, aliases, ignored, content, tied=tied)
    if observations.required is None:
        return None
    stacks = {}
    for stack in observations.layers:
        always, groups = observations.group_layers(stack)
        depth = observations.choose_depth(stack)
        if depth or groups or always:
            stacks[stack] = {"depth": depth, "always": always, "groups": groups}
    shapes = {
        mask: formulas
        for mask, candidates in observations.shapes.items()
        if mask not in observations.uneven
        and (formulas := [observations.choose_formula(mask, dim) for dim in candidates])
        and any(formula != "?" for formula in formulas)
    }
    return model_class.__name__, {
        "required": observations.required,
        "untied": ((observations.untied or set()) & observations.aliases) - observations.required,
        "stacks": stacks,
        "shapes": shapes,
        "tied": tied_by_default,
        "variants": observations.variants,
    }


def main(model_types: Collection[str] = (), tasks: Collection[str] = ()) -> None:
    """Write the file.

    Args:
        model_types: Types to build. The classes of the other types keep their descriptions. Empty for all.
        tasks: Tasks to build. Empty for all.
    """
    pairs = [
        pair
        for pair in list_pairs()
        if (not model_types or pair.model_type in model_types) and (not tasks or pair.task in tasks)
    ]
    is_complete = not model_types and not tasks
    unchanged = {} if is_complete else decode_table(json.loads(FILE.read_bytes()))
    table = encode_table({**unchanged, **describe_classes(pairs)})
    lines = [
        f'"transformers": {json.dumps(table["transformers"])}',
        f'"classes": {json.dumps(table["classes"], separators=(",", ":"))}',
        '"strings": [\n' + ",\n".join(map(json.dumps, table["strings"])) + "\n]",
        '"bodies": [\n' + ",\n".join(json.dumps(b, separators=(",", ":")) for b in table["bodies"]) + "\n]",
    ]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.expected_tensors")
    parser.add_argument("model_types", nargs="*", help="types to build; all by default")
    parser.add_argument("--task", action="append", default=[], help="task to build; all by default")
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse_arguments()
    main(arguments.model_types, arguments.task)
