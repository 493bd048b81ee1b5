"""The user's DeepSpeed JSON (``deepspeed.config``), and the configuration that is passed to DeepSpeed.

The JSON is read and checked, its values are adopted by the config of the run, and it is merged into the
configuration for DeepSpeed.
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
