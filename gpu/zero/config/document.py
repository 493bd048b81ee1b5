"""Read a DeepSpeed JSON, validate it, and convert it to run settings.

The JSON is validated with the config parser and the pydantic models of the installed DeepSpeed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portable.config.origins import format_short_value
from portable.config.yaml_text import read_config_text
from portable.errors import UserError, require, to_one_line
from portable.gpu.zero import private_api
from portable.gpu.zero.config.schema import check_deepspeed_config, remove_disabled_unknown_keys
from portable.importing.deepspeed import AUTO, parse_deepspeed_json
from portable.importing.programs import build_deepspeed_file, convert_deepspeed_file

if TYPE_CHECKING:
    from portable.config import RunConfig
    from portable.importing.foreign_file import ImportedRun

CONFIG_KEY = "deepspeed.config"
"""Name of the setting whose value is the path of a DeepSpeed JSON, or a mapping with its content."""


@dataclass(frozen=True)
class DeepSpeedDocument:
    """DeepSpeed JSON that has been read and checked.

    Attributes:
        values: Content of the JSON, with the key names of the installed DeepSpeed release.
        name: Path of the file, or name of the setting that contains the mapping. Used in error
            messages.
        imported: Equivalent run settings, with a note for each value that was renamed, has no
            effect, or has a different meaning in this trainer.
    """

    values: dict[str, Any]
    name: str
    imported: ImportedRun

    def get_value(self, path: str) -> Any:
        """Return the value at a dotted path, or None if it is missing or ``auto``."""
        value: Any = self.values
        for part in path.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return None if value == AUTO else value


def read_deepspeed_document(config: RunConfig) -> DeepSpeedDocument | None:
    """Read and check the JSON of ``deepspeed.config``.

    If :func:`portable.gpu.zero.config.reconcile.apply_document` has already stored the document in
    ``config``, the file is not read again. Disabled unknown keys are removed with a note
    (:func:`remove_disabled_unknown_keys`). ``zero_optimization.stage`` is set in every document.
    Keys without a counterpart in this trainer are recorded in ``imported.refusals``, and raise no
    error here.

    Returns:
        The document. None if ``deepspeed.config`` is not set.

    Raises:
        UserError: If the file cannot be read, or if it contains a key or value that DeepSpeed does
            not accept.
    """
    source = config.deepspeed.config
    if source is None:
        return None
    if (document := config.documents.get(CONFIG_KEY)) is not None:
        return document  # type: ignore[no-any-return]
    name = CONFIG_KEY if isinstance(source, dict) else str(source)
    values = (
        source
        if isinstance(source, dict)
        else parse_deepspeed_json(read_config_text(Path(source), CONFIG_KEY), name)
    )
    file = build_deepspeed_file(values, name)
    zero = file.values.setdefault("zero_optimization", {})
    require(
        isinstance(zero, dict),
        f"{name}: zero_optimization must be a mapping, not {format_short_value(zero)}; remove "
        "zero_optimization, or set zero_optimization.stage",
    )
    if (error := private_api.find_removed_key_error(file.values)) is not None:
        raise UserError(f"{name}: {to_one_line(error)}") from error
    for path in remove_disabled_unknown_keys(file.values):
        file.add_note(path, "has no effect: the installed DeepSpeed does not read this key")
    check_deepspeed_config(file.values, name)
    zero["stage"] = _select_stage(config, zero, name)
    return DeepSpeedDocument(file.values, name, convert_deepspeed_file(file))


def _select_stage(config: RunConfig, zero_section: dict[str, Any], document_name: str) -> int:
    """Select the ZeRO stage, from 0 to 3.

    A stage from 1 to 3 in the JSON has priority. If the stage in the JSON is missing, 0 or
    ``auto``, the stage in ``strategy`` is used, if the user has set this setting. A strategy
    without ZeRO results in 0. If ``strategy`` is not set, a missing stage is 0, which disables
    sharding, as in DeepSpeed.

    Args:
        config: Config of the run.
        zero_section: Section ``zero_optimization`` of the JSON.
        document_name: Name of the JSON, used in error messages.

    Raises:
        UserError: If the JSON contains an invalid stage, or ``auto`` without a user-set
            ``strategy``.
    """
    stage = zero_section.get("stage", 0)
    if stage in (0, AUTO) and config.is_set("strategy"):
        return int(config.strategy[-1]) if config.strategy.startswith("zero") else 0
    if stage not in (0, 1, 2, 3):
        raise UserError(
            f"{document_name}: zero_optimization.stage is {format_short_value(stage)}, not 0, 1, 2 or 3; "
            "correct zero_optimization.stage, or set strategy to zero1, zero2 or zero3"
        )
    return int(stage)
