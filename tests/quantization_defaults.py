"""Generate the defaults of quantization settings: ``python -m tests.quantization_defaults``.

The converter rejects an unsupported setting of a ``quantization_config``, unless the setting has the
default of the library that writes it. The converter does not import these libraries, so their defaults are in
``converters/quantization/default_settings.json``. ``tests/converters/test_dequantize.py`` compares the file
with the classes of transformers and compressed-tensors.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

from portable.converters.options import is_unset
from portable.converters.quantization.dequantize import METHODS

FILE = Path(__file__).resolve().parents[1] / "converters" / "quantization" / "default_settings.json"
REQUIRED: dict[str, dict[str, Any]] = {"GPTQConfig": {"bits": 4}}
"""Arguments of the classes of transformers that have no default."""


def build_table() -> dict[str, dict[str, Any]]:
    """Return the default of each setting that is not off by default, keyed by ``quant_method``."""
    from compressed_tensors.quantization import QuantizationConfig
    from transformers.utils import quantization_config

    table: dict[str, dict[str, Any]] = {method: {} for method in METHODS}
    for name, kind in inspect.getmembers(quantization_config, inspect.isclass):
        arguments = REQUIRED.get(name, {})
        try:
            config: Any = kind(**arguments)
            settings = json.loads(config.to_json_string(use_diff=False))
        except Exception:  # not a config, or the config of a library that is not installed
            continue
        if settings.get("quant_method") in table:
            table[settings["quant_method"]] |= {k: v for k, v in settings.items() if k not in arguments}
    required: dict[str, Any] = {
        name: {} for name, field in QuantizationConfig.model_fields.items() if field.is_required()
    }
    compressed = QuantizationConfig(**required).model_dump(mode="json")
    table["compressed-tensors"] |= {key: compressed[key] for key in compressed.keys() - required.keys()}
    return {
        method: {
            key: value
            for key, value in sorted(settings.items())
            if not is_unset(value) and key != "quant_method"
        }
        for method, settings in sorted(table.items())
    }


def main() -> None:
    """Write the file."""
    lines = [f" {json.dumps(method)}: {json.dumps(settings)}" for method, settings in build_table().items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
