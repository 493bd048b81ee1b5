"""Generate the name rules of transformers as data for the converter: ``python -m tests.published_names``.

The converter does not import a framework. Therefore, ``converters/names/published_names.json`` contains the
rules, the model types and classes that they belong to, and the submodels of composite models that have their
own rules.
``tests/converters/test_published_names.py`` compares the file with transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parents[1] / "converters" / "names" / "published_names.json"


def build_table() -> dict[str, Any]:
    """Build the content of the file."""
    import transformers
    from transformers import conversion_mapping
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    rules: list[dict[str, Any]] = []
    positions: dict[str, int] = {}
    keys = {
        key: number_rules(transforms, rules, positions)
        for key, transforms in conversion_mapping._build_checkpoint_conversion_mapping().items()
    }
    classes: dict[str, Any] = {}
    types: dict[str, Any] = {}
    for model_type in CONFIG_MAPPING_NAMES:
        names = list_classes(model_type)
        about: dict[str, Any] = {"classes": names, "base": ""}
        config = create_config(model_type)
        if text := getattr(getattr(config, "text_config", None), "model_type", None):
            about["text"] = text
        for name in names:
            try:
                model_class = getattr(transformers, name)
                about["base"] = about["base"] or model_class.base_model_prefix
            except (AttributeError, ImportError):  # It requires a package that is not installed.
                continue
            if name in keys:
                about.setdefault("model", name)
            parts = None if config is None else find_submodels(model_class, model_type)
            default = [["", model_type, [], model_type]] if model_type in keys else []
            if parts is not None and (parts != default or model_class.base_model_prefix != about["base"]):
                classes[f"{model_type} {name}"] = {"base": model_class.base_model_prefix, "parts": parts}
        types[model_type] = about
    return {
        "transformers": transformers.__version__,
        "rules": rules,
        "keys": keys,
        "types": types,
        "classes": classes,
    }


def number_rules(transforms: list[Any], rules: list[dict[str, Any]], positions: dict[str, int]) -> list[int]:
    """Append new rules to a list.

    Args:
        transforms: Rules of transformers.
        rules: List of rules in JSON form, to which new rules are appended.
        positions: Position of each rule, keyed by its JSON text. It is updated.

    Returns:
        The position of each transform in ``rules``.
    """
    from portable.private.transformers_internals import convert_name_rule

    numbers = []
    for transform in transforms:
        rule = convert_name_rule(transform)
        text = json.dumps(rule)
        if text not in positions:
            positions[text] = len(rules)
            rules.append(rule)
        numbers.append(positions[text])
    return numbers


def list_classes(model_type: str) -> list[str]:
    """Return the classes that the auto classes of transformers support for a model type."""
    from transformers.models.auto import modeling_auto

    names: dict[str, None] = {}
    for name, mapping in vars(modeling_auto).items():
        if name.startswith("MODEL_") and name.endswith("_MAPPING_NAMES") and model_type in mapping:
            named = mapping[model_type]
            names |= dict.fromkeys([named] if isinstance(named, str) else named)
    return list(names)


def create_config(model_type: str) -> Any:
    """Create a small config of a model type, or return None if transformers cannot create the config."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

    from tests.composite import build_composite_config
    from tests.tiny_models import tiny_config

    if model_type in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES:
        with suppress(Exception):
            return build_composite_config(model_type, named=False)
    try:
        settings = {key: value for key, value in tiny_config(model_type).items() if key != "model_type"}
        return AutoConfig.for_model(model_type, **settings)
    except Exception:
        try:
            return AutoConfig.for_model(model_type)
        except Exception:
            return None


def find_submodels(model_class: Any, model_type: str) -> list[list[Any]] | None:
    """Find the submodels of a model that have their own rules.

    Args:
        model_class: Class of the model.
        model_type: Model type of the config.

    Returns:
        Path, key of the rules, keys that lead to the config, and model type of each submodel. None if the
        model cannot be built.
    """
    import torch
    from transformers import PreTrainedModel, conversion_mapping

    config = create_config(model_type)
    try:
        with torch.device("meta"):
            model = model_class(config)
    except Exception:
        return None
    of_transform: dict[int, str] = {}
    get_mapping = conversion_mapping.get_checkpoint_conversion_mapping

    def get_and_record(key: str) -> Any:
        transforms = get_mapping(key)
        of_transform.update({id(transform): key for transform in transforms or ()})
        return transforms

    conversion_mapping.get_checkpoint_conversion_mapping = get_and_record
    try:
        transforms = conversion_mapping.get_model_conversion_mapping(model, add_legacy=False)
    finally:
        conversion_mapping.get_checkpoint_conversion_mapping = get_mapping
    base = model.base_model_prefix
    paths = {
        name.removeprefix(base).removeprefix("."): name
        for name, module in reversed(list(model.named_modules()))
        if name and isinstance(module, PreTrainedModel)
    }
    of_config = {id(config): keys for keys, config in reversed(list(iterate_configs(model.config, ())))}
    parts: dict[str, list[Any]] = {}
    for transform in transforms:
        scope = transform.scope_prefix
        path = "" if scope is None else paths[scope]
        part = model.get_submodule(path).config
        key = of_transform[id(transform)]
        parts.setdefault(f"{path} {key}", [path, key, list(of_config.get(id(part), ())), part.model_type])
    return list(parts.values())


def iterate_configs(config: Any, keys: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield a config and all nested configs, with the keys that lead to them."""
    from transformers import PretrainedConfig

    yield keys, config
    for key, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            yield from iterate_configs(value, (*keys, key))


def main() -> None:
    """Write the file."""
    content = build_table()
    # Write one rule, model type, or class per line, so diffs are readable.
    lines = ["{", f' "transformers": {json.dumps(content.pop("transformers"))},']
    for name, value in content.items():
        items = (
            [json.dumps(item) for item in value]
            if isinstance(value, list)
            else [f"{json.dumps(key)}: {json.dumps(item)}" for key, item in value.items()]
        )
        opening, closing = "[]" if isinstance(value, list) else "{}"
        lines += [
            f" {json.dumps(name)}: {opening}",
            ",\n".join(f"  {item}" for item in items),
            f" {closing},",
        ]
    lines[-1] = lines[-1].rstrip(",")
    FILE.write_text("\n".join([*lines, "}", ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
