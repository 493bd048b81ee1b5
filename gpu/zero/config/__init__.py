"""A DeepSpeed JSON: read, check, reconcile with the run's config, merge into DeepSpeed's configuration."""

from portable.gpu.zero.config.document import Document, read
from portable.gpu.zero.config.merging import merged, notes
from portable.gpu.zero.config.reconcile import adopt, check_installed

__all__ = ["Document", "adopt", "check_installed", "merged", "notes", "read"]
