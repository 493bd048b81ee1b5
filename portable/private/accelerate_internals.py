"""Private names of Accelerate, and replacements in it."""

from __future__ import annotations

import logging
from typing import Any


class _Logger(logging.LoggerAdapter[logging.Logger]):
    """Logger that also works before Accelerate's process state exists, unlike Accelerate's own logger."""

    def warning_once(self, *given: Any, **more: Any) -> None:
        """Log a warning, like Accelerate's logger, but each time."""
        self.warning(*given, **more)


def get_tracker_classes() -> dict[str, Any]:
    """Return Accelerate's tracker classes, keyed by name. They work without its process state."""
    from accelerate import tracking

    tracking.logger = _Logger(logging.getLogger(tracking.__name__), {})
    return {str(getattr(name, "value", name)): kind for name, kind in tracking.LOGGER_TYPE_TO_CLASS.items()}
