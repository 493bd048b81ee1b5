"""Use Accelerate's experiment trackers without its process state."""

from __future__ import annotations

import logging
from typing import Any


class _Logger(logging.LoggerAdapter[logging.Logger]):
    """Substitute for Accelerate's logger, which does not work without Accelerate's process state."""

    def warning_once(self, *given: Any, **more: Any) -> None:
        """Log a warning on every call. Accelerate's own method logs it only once."""
        self.warning(*given, **more)


def get_tracker_classes() -> dict[str, Any]:
    """Return Accelerate's tracker classes, keyed by name, such as ``tensorboard``.

    The logger of Accelerate's tracking module is replaced, so that the trackers work without
    Accelerate's process state.
    """
    from accelerate import tracking

    tracking.logger = _Logger(logging.getLogger(tracking.__name__), {})
    return {str(getattr(name, "value", name)): kind for name, kind in tracking.LOGGER_TYPE_TO_CLASS.items()}
