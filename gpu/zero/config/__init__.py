"""Merge the user's DeepSpeed JSON (``deepspeed.config``) with the settings of the run.

The JSON is read and checked. The run config adopts its values. The JSON is then merged into the
configuration that is passed to DeepSpeed.
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
