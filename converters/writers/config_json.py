"""The small files beside converted weights; `config.json` with the dtype that they are written in."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from converters.storage.safe_open import read_small_table
from converters.tensors.dtypes import CASTABLE, TO_TORCH

if TYPE_CHECKING:
    from collections.abc import Iterable

    from converters.checkpoint import Checkpoint
    from converters.storage.path_or_url import Place
    from converters.writers.conversion import Entry

_DTYPE_KEYS = ("dtype", "torch_dtype")  # transformers before 4.56 reads the second


def small_files(
    checkpoint: Checkpoint, entries: Iterable[Entry]
) -> tuple[dict[str, bytes], dict[str, Place]]:
    """The files to write beside the tensors (name -> content), and those to copy unchanged (name -> path).

    `config.json` gets the dtype of `entries` and the checkpoint's own settings, each also in the part of the
    config that has it. `from_pretrained` loads in the dtype that the config names, whatever the weights have.
    """
    changed, copied = _with_dtype(checkpoint, entries)
    return {**changed, **checkpoint.documents}, copied


def _with_dtype(
    checkpoint: Checkpoint, entries: Iterable[Entry]
) -> tuple[dict[str, bytes], dict[str, Place]]:
    copied = dict(checkpoint.companions)
    config = read_small_table(copied.get("config.json"))
    # In a config of quantized weights the dtype means something else.
    if not config or ("quantization_config" in config and "quantization_config" not in checkpoint.config):
        return {}, copied
    sizes: dict[str, int] = {}
    for entry in entries:
        if entry.dtype in CASTABLE and entry.tensor.shape:
            sizes[TO_TORCH[entry.dtype]] = sizes.get(TO_TORCH[entry.dtype], 0) + entry.nbytes
    named = next((config[key] for key in _DTYPE_KEYS if isinstance(config.get(key), str)), "")
    # With several dtypes, the one that the config names already is as good as any.
    fits = not sizes or named.removeprefix("torch.") in sizes
    if fits and not checkpoint.config:
        return {}, copied
    if not fits:
        _set_dtype(config, max(sizes, key=lambda name: sizes[name]))
    for key, value in checkpoint.config.items():
        parts = [part for part in config.values() if isinstance(part, dict) and key in part]
        for part in [part for part in (config, *parts) if key in part] or [config]:
            part[key] = value
            if value is None:
                del part[key]
    del copied["config.json"]
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    try:
        return {"config.json": text.encode()}, copied
    except UnicodeEncodeError:  # a lone surrogate, which JSON can only escape
        return {"config.json": (json.dumps(config, indent=2) + "\n").encode()}, copied


def _set_dtype(config: dict[str, Any], name: str) -> None:
    present = [key for key in _DTYPE_KEYS if key in config]
    config.update(dict.fromkeys(present or _DTYPE_KEYS[:1], name))
    for key, part in config.items():
        if key.endswith("_config") and isinstance(part, dict) and not part.keys().isdisjoint(_DTYPE_KEYS):
            _set_dtype(part, name)
