"""Write transformers' rules for names as data of the converter: ``python -m tests.published_names``.

The converter imports no framework, so ``converters/names/published_names.json`` holds what it needs to know:
the rules, which model types and classes they belong to, and the parts of composite models that have rules of
their own. ``tests/converters/test_published_names.py`` compares the file with transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parents[1] / "converters" / "names" / "published_names.json"


def table() -> dict[str, Any]:
    """Return the content of the file."""
    import transformers
    from transformers import conversion_mapping
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    rules: list[dict[str, Any]] = []
    positions: dict[str, int] = {}
    keys = {
        key: numbered(transforms, rules, positions)
        for key, transforms in conversion_mapping._build_checkpoint_conversion_mapping().items()
    }
    classes: dict[str, Any] = {}
    types: dict[str, Any] = {}
    for model_type in CONFIG_MAPPING_NAMES:
        names = classes_of(model_type)
        about: dict[str, Any] = {"classes": names, "base": ""}
        config = config_of(model_type)
        if text := getattr(getattr(config, "text_config", None), "model_type", None):
            about["text"] = text
        for name in names:
            try:
                found = getattr(transformers, name)
                about["base"] = about["base"] or found.base_model_prefix
            except (AttributeError, ImportError):  # it needs a package that is not installed
                continue
            if name in keys:
                about.setdefault("model", name)
            parts = None if config is None else parts_of(found, model_type)
            default = [["", model_type, [], model_type]] if model_type in keys else []
            if parts is not None and (parts != default or found.base_model_prefix != about["base"]):
                classes[f"{model_type} {name}"] = {"base": found.base_model_prefix, "parts": parts}
        types[model_type] = about
    return {
        "transformers": transformers.__version__,
        "rules": rules,
        "keys": keys,
        "types": types,
        "classes": classes,
    }


def numbered(transforms: list[Any], rules: list[dict[str, Any]], positions: dict[str, int]) -> list[int]:
    """Add the rules that are new, and return the positions of all."""
    from portable.private.of_transformers import rule_of

    found = []
    for transform in transforms:
        rule = rule_of(transform)
        text = json.dumps(rule)
        if text not in positions:
            positions[text] = len(rules)
            rules.append(rule)
        found.append(positions[text])
    return found


def classes_of(model_type: str) -> list[str]:
    """Return the classes that transformers' auto classes know for a model type."""
    from transformers.models.auto import modeling_auto

    found: dict[str, None] = {}
    for name, mapping in vars(modeling_auto).items():
        if name.startswith("MODEL_") and name.endswith("_MAPPING_NAMES") and model_type in mapping:
            named = mapping[model_type]
            found |= dict.fromkeys([named] if isinstance(named, str) else named)
    return list(found)


def config_of(model_type: str) -> Any:
    """Return a small config of a model type, or None if transformers cannot make one."""
    from transformers import AutoConfig

    from tests.tiny_models import tiny_config

    try:
        settings = {key: value for key, value in tiny_config(model_type).items() if key != "model_type"}
        return AutoConfig.for_model(model_type, **settings)
    except Exception:
        try:
            return AutoConfig.for_model(model_type)
        except Exception:
            return None


def parts_of(model_class: Any, model_type: str) -> list[list[Any]] | None:
    """Return the parts of a model that have rules, or None if the model cannot be built.

    Each is its path, the key of its rules, the keys that lead to its config, and the config's model type.
    """
    import torch
    from transformers import PreTrainedModel, conversion_mapping

    config = config_of(model_type)
    try:
        with torch.device("meta"):
            model = model_class(config)
    except Exception:
        return None
    of_transform: dict[int, str] = {}
    plain = conversion_mapping.get_checkpoint_conversion_mapping

    def noted(key: str) -> Any:
        found = plain(key)
        of_transform.update({id(transform): key for transform in found or ()})
        return found

    conversion_mapping.get_checkpoint_conversion_mapping = noted
    try:
        transforms = conversion_mapping.get_model_conversion_mapping(model, add_legacy=False)
    finally:
        conversion_mapping.get_checkpoint_conversion_mapping = plain
    base = model.base_model_prefix
    paths = {
        name.removeprefix(base).removeprefix("."): name
        for name, module in reversed(list(model.named_modules()))
        if name and isinstance(module, PreTrainedModel)
    }
    of_config = {id(found): keys for keys, found in reversed(list(configs(model.config, ())))}
    parts: dict[str, list[Any]] = {}
    for transform in transforms:
        scope = transform.scope_prefix
        path = "" if scope is None else paths[scope]
        part = model.get_submodule(path).config
        key = of_transform[id(transform)]
        parts.setdefault(f"{path} {key}", [path, key, list(of_config.get(id(part), ())), part.model_type])
    return list(parts.values())


def configs(config: Any, keys: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Return a config and all configs inside it, with the keys that lead to them."""
    from transformers import PretrainedConfig

    yield keys, config
    for key, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            yield from configs(value, (*keys, key))


def main() -> None:
    """Write the file."""
    found = table()
    # One rule, model type or class per line, so that a difference can be read.
    lines = ["{", f' "transformers": {json.dumps(found.pop("transformers"))},']
    for name, value in found.items():
        items = (
            [json.dumps(one) for one in value]
            if isinstance(value, list)
            else [f"{json.dumps(key)}: {json.dumps(one)}" for key, one in value.items()]
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
