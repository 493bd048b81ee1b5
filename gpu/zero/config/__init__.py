"""DeepSpeed JSON: read it, check it, reconcile it with a run, and merge it into DeepSpeed's config."""

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
