"""What this process takes of its host."""

from __future__ import annotations

import resource
import sys
from pathlib import Path


def host_memory() -> tuple[int, int]:
    """Resident bytes of this process now and at the peak."""
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    statm = Path("/proc/self/statm")
    now = int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else peak
    return now, peak
