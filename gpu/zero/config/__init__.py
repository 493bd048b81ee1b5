"""A DeepSpeed JSON: read, check, reconcile with the run's config, merge into DeepSpeed's configuration."""

from gpu.zero.config.document import Document, read
from gpu.zero.config.merging import merged, notes
from gpu.zero.config.reconcile import adopt, check_installed

__all__ = ["Document", "adopt", "check_installed", "merged", "notes", "read"]
