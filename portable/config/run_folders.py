"""Settings that name the folder of a run, or an adapter, where a model belongs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from portable.errors import UserError, require

if TYPE_CHECKING:
    from portable.config.run_config import RunConfig

CONFIG_FILE, FINAL = "config.yaml", "final"
"""In the folder of a run: its config, and the folder of the exported model."""


def with_exports(config: RunConfig) -> RunConfig:
    """``config`` with the exported model of each run that it names in place of a model or tokenizer.

    Raises:
        UserError: if a run has none, or ``model.name_or_path`` is an adapter, with what to write.
    """
    found = {}
    keys = ("model.name_or_path", "data.tokenizer", "adapter.name_or_path")
    for key, folder in ((key, Path(config.get(key))) for key in keys if config.get(key) is not None):
        if (folder / CONFIG_FILE).is_file() and not (folder / "config.json").is_file():
            require(
                (folder / FINAL).is_dir(),
                f"{key}: {folder} is a run without {FINAL}/, which checkpoint.export writes; train it to the "
                f"end, or write a folder for {key} with: portable-convert {folder} OUT",
            )
            found[key] = str(folder / FINAL)
    config = config.replaced(found) if found else config
    if config.model.name_or_path is None:
        return config
    folder = Path(config.model.name_or_path)
    if (adapter := folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        try:
            base = json.loads(adapter.read_text("utf-8")).get("base_model_name_or_path") or "BASE"
        except (OSError, ValueError, AttributeError):
            base = "BASE"
        raise UserError(
            f"model.name_or_path: {folder} is an adapter; to train it on, set model.name_or_path to {base} "
            f"and adapter.name_or_path to {folder}; to train all weights, merge them first: portable-convert "
            f"{folder} OUT --merge-into {base}"
        )
    return config
