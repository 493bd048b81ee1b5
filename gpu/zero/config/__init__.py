"""A DeepSpeed JSON: read, check, reconcile with the run's config, merge into DeepSpeed's configuration."""

from portable.gpu.zero.config.document import DeepSpeedDocument, read
from portable.gpu.zero.config.merging import build_notes, merge_config
from portable.gpu.zero.config.reconcile import adopt, check_installed

__all__ = ["DeepSpeedDocument", "adopt", "build_notes", "check_installed", "merge_config", "read"]
