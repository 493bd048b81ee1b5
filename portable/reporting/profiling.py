"""``--profile``: a trace of a few training steps, for Perfetto (https://ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.profiler import profile, schedule

if TYPE_CHECKING:
    from pathlib import Path

WAIT, WARMUP, RECORDED = 2, 1, 3
"""Steps left out, since the first compile and allocate; steps in which the profiler itself warms up; and
steps in the trace."""


class Profiler:
    """Writes ``<folder>/rank<r>.json.gz`` once the steps to record are over.

    Args:
        folder: ``profile`` in the run's folder; made when there is something to write.
        rank: of this process; each writes its own trace.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self.path = folder / f"rank{rank}.json.gz"
        self.written = False
        # Without activities named, it records the host and whatever kind of device is there.
        self._profile = profile(
            schedule=schedule(wait=WAIT, warmup=WARMUP, active=RECORDED, repeat=1),
            on_trace_ready=self._write,
            record_shapes=True,
        )
        self._profile.start()

    def step(self) -> None:
        """After every training step."""
        self._profile.step()

    def close(self) -> None:
        """Stop; what was recorded of fewer steps than meant is written too."""
        self._profile.stop()

    def _write(self, recorded: profile) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(self.path))
        self.written = True
