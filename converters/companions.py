"""The small files that make weights loadable: config.json, the tokenizer, and their like."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converters.errors import printable
from converters.guarded import LinkError, read_small_text, real_path
from converters.remote import RemotePath
from converters.remote_errors import AccessDeniedError

if TYPE_CHECKING:
    from converters.places import Place

_log = logging.getLogger(__name__)

_NAMES = re.compile(
    r"config\.json|generation_config\.json|tokenizer.*\.json|tokenizer\.model|special_tokens_map\.json"
    r"|added_tokens\.json|vocab\..+|merges\.txt|chat_template\..+|[\w.-]+\.model|preprocessor_config\.json"
    r"|processor_config\.json"
)
_SUBFOLDERS = ("model", "hf", "tokenizer")
_RUN_CHECKPOINTS = "checkpoints"
# Nothing a tokenizer needs is larger; a `.model` that is belongs to something else.
_MAX_BYTES = 1 << 30


def find_companions(root: Place) -> dict[str, Place]:
    """Files to copy beside converted weights: name -> path.

    Looked for in `root` (or the folder of a file), in its `model/`, then upwards to its parent, and on to the
    run folder where `root` lies in `<run>/checkpoints/`. The nearest file of a name wins. A link that leads
    out of the one of these folders that it was found in is passed over with a warning.
    """
    folder = root if root.is_dir() else root.parent
    folder = folder.absolute()
    upwards = [folder, folder.parent]
    if folder.parent.name == _RUN_CHECKPOINTS:
        upwards.append(folder.parent.parent)
    elif folder.parent.parent.name == _RUN_CHECKPOINTS:
        upwards += [folder.parent.parent, folder.parent.parent.parent]
    found: dict[str, Place] = {}
    for place in upwards:
        for where in (place, *(place / name for name in _SUBFOLDERS)):
            try:
                entries: list[Place] = list(where.iterdir())
            except (OSError, AccessDeniedError):  # credentials often reach no higher than the checkpoint
                continue
            for entry in sorted(entries, key=_name):
                if entry.name in found or not _NAMES.fullmatch(entry.name):
                    continue
                try:
                    real = entry if isinstance(entry, RemotePath) else Path(real_path(entry, place))  # type: ignore[arg-type]
                except LinkError as error:
                    _log.warning("warning: %s; not copied", printable(error))
                    continue
                # By its own name unless it is a link: what is copied is then what was looked at.
                real = real if not isinstance(entry, RemotePath) and entry.is_symlink() else entry
                if _usable(real, entry.name):
                    found[entry.name] = real
    return found


def trainer_metadata(folder: Place) -> dict[str, Any]:
    """What a `trainer_state.json` in `folder` tells (ours, or the Trainer's): its content and the step."""
    try:
        state = json.loads(read_small_text(folder / "trainer_state.json"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(state, dict):
        return {}
    step = state.get("step", state.get("global_step"))
    return {"trainer_state": state, **({"step": step} if isinstance(step, int) else {})}


def _name(path: Place) -> str:
    return path.name


def _usable(path: Place, name: str) -> bool:
    try:
        if not path.is_file() or path.stat().st_size > _MAX_BYTES:
            return False
        if name != "config.json":
            return True
        config = json.loads(read_small_text(path))
    except (OSError, ValueError, RecursionError):
        return False
    # Any tool may leave a config.json about; a model's says which model.
    return isinstance(config, dict) and ("model_type" in config or "architectures" in config)
