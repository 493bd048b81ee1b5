"""What is replaced in Accelerate."""

from __future__ import annotations

import logging
from typing import Any


class _Logger(logging.LoggerAdapter[logging.Logger]):
    """Like Accelerate's own, which refuses to log before there is one of its process states."""

    def warning_once(self, *given: Any, **more: Any) -> None:
        self.warning(*given, **more)


def get_tracker_classes() -> dict[str, Any]:
    """Accelerate's trackers by name, to be used without its process state."""
    from accelerate import tracking

    tracking.logger = _Logger(logging.getLogger(tracking.__name__), {})
    return {str(getattr(name, "value", name)): kind for name, kind in tracking.LOGGER_TYPE_TO_CLASS.items()}
