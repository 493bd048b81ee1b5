"""Generate the words in the tensor names of each model type: ``python -m tests.module_words``.

The converter does not import a framework. Therefore, ``converters/names/module_words.json`` contains the
names of all modules and parameters in the models of transformers, split at the dots. With these words, the
converter recognizes tensor names of other programs. ``tests/converters/test_published_names.py`` compares the
file with transformers.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

FILE = Path(__file__).resolve().parents[1] / "converters" / "names" / "module_words.json"


def find_words(model_type: str) -> set[str]:
    """Return the words in the names of a model type's tensors, in memory and in published files."""
    import torch
    import transformers

    from portable.converters.errors import CheckpointError
    from portable.converters.names.name_rules import get_default_rules
    from portable.converters.names.published_names import arrange_for_files
    from tests.published_names import create_config, list_classes

    words: set[str] = set()
    for name in list_classes(model_type):
        config = create_config(model_type)
        try:
            with torch.device("meta"):
                model = getattr(transformers, name)(config)
        except Exception:  # The model needs other settings or a package that is not installed.
            continue
        shapes = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
        names = [*shapes, *(key for key, _ in model.named_modules())]
        rules = get_default_rules({**config.to_dict(), "architectures": [name]})
        with contextlib.suppress(CheckpointError):
            names += [] if rules is None else arrange_for_files(shapes, rules)
        words.update(word for key in names for word in key.split(".") if word and not word.isdigit())
    return words


def main() -> None:
    """Write the file."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    lines = [
        f" {json.dumps(model_type)}: {json.dumps(' '.join(sorted(words)))}"
        for model_type in CONFIG_MAPPING_NAMES
        if (words := find_words(model_type))
    ]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
