"""Merge the user's DeepSpeed JSON (``deepspeed.config``) with the settings of the run.

First, the JSON is read and checked. Its values then replace defaults of the run config. If the user
has also set the corresponding run setting, both values must be equal. Otherwise, an error is
raised. Finally, the JSON is merged into the configuration that is passed to DeepSpeed.
"""

from portable.gpu.zero.config.document import DeepSpeedDocument, read_deepspeed_document
from portable.gpu.zero.config.merging import build_document_notes, build_merged_config
from portable.gpu.zero.config.reconcile import apply_document, check_installed

__all__ = [
    "DeepSpeedDocument",
    "apply_document",
    "build_document_notes",
    "build_merged_config",
    "check_installed",
    "read_deepspeed_document",
]
