"""A DeepSpeed JSON: parsed, judged by DeepSpeed's models, and what it comes to as settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portable.config.origins import format_short_value
from portable.config.yaml_text import read_text
from portable.errors import UserError, require, to_one_line
from portable.gpu.zero import private_api
from portable.gpu.zero.config.schema import check, drop_unset
from portable.importing.deepspeed import AUTO, parse_json
from portable.importing.programs import convert_deepspeed, open_deepspeed

if TYPE_CHECKING:
    from portable.config import RunConfig
    from portable.importing.foreign_file import ImportedRun

KEY = "deepspeed.config"
"""The setting that names the file, or holds the mapping."""


@dataclass(frozen=True)
class DeepSpeedDocument:
    """A checked DeepSpeed configuration.

    Attributes:
        values: the configuration, under the names of the installed release.
        name: the file, or the setting that holds the mapping, for error messages.
        imported: the settings that it comes to, with a note for each value that was renamed, has no effect
            or another meaning here.
    """

    values: dict[str, Any]
    name: str
    imported: ImportedRun

    def get(self, path: str) -> Any:
        """The value at the dotted ``path``; None if it is missing or ``auto``."""
        value: Any = self.values
        for part in path.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return None if value == AUTO else value


def read(config: RunConfig) -> DeepSpeedDocument | None:
    """Read and check the JSON of ``deepspeed.config``; None if it is not set.

    The file is read once: :func:`portable.gpu.zero.config.reconcile.adopt` leaves the document in the config.

    Raises:
        UserError: if it cannot be read, or has a key or value that DeepSpeed does not accept.
    """
    source = config.deepspeed.config
    if source is None:
        return None
    if (document := config.documents.get(KEY)) is not None:
        return document  # type: ignore[no-any-return]
    name = KEY if isinstance(source, dict) else str(source)
    values = source if isinstance(source, dict) else parse_json(read_text(Path(source), KEY), name)
    file = open_deepspeed(values, name)
    zero = file.values.setdefault("zero_optimization", {})
    require(
        isinstance(zero, dict),
        f"{name}: zero_optimization must be a mapping, not {format_short_value(zero)}; remove it, or set its "
        "stage in it",
    )
    if (error := private_api.find_removed_key_error(file.values)) is not None:
        raise UserError(f"{name}: {to_one_line(error)}") from error
    for path in drop_unset(file.values):
        file.note(path, "has no effect: the installed DeepSpeed does not read it")
    check(file.values, name)
    zero["stage"] = _stage(config, zero, name)
    return DeepSpeedDocument(file.values, name, convert_deepspeed(file))


def _stage(config: RunConfig, zero: dict[str, Any], name: str) -> int:
    """The stage of the JSON, or of the run's strategy; without one, as in DeepSpeed, nothing is sharded."""
    stage = zero.get("stage", 0)
    if stage in (0, AUTO) and config.is_set("strategy"):
        return int(config.strategy[-1]) if config.strategy.startswith("zero") else 0
    if stage not in (0, 1, 2, 3):
        raise UserError(
            f"{name}: zero_optimization.stage is {format_short_value(stage)}; it must be 0, 1, 2 or 3, or "
            "set strategy to zero1, zero2 or zero3"
        )
    return int(stage)
