"""Host memory of this process."""

from __future__ import annotations

import resource
import sys
from pathlib import Path


def host_memory() -> tuple[int, int]:
    """Return the current and the peak resident memory of this process in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    statm = Path("/proc/self/statm")
    now = int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else peak
    return now, peak
