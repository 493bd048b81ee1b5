"""``--profile``: a trace of a few training steps, for Perfetto (https://ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.profiler import profile, schedule

from portable.callbacks import Callback
from portable.paths import prepare_path_inside

if TYPE_CHECKING:
    from pathlib import Path

    from portable.callbacks import Run

NUM_SKIPPED_STEPS, NUM_WARMUP_STEPS, NUM_RECORDED_STEPS = 2, 1, 3
"""Steps skipped, because the first ones compile and allocate; steps in which the profiler warms up; steps
recorded."""


class Profiler(Callback):
    """Writes ``<folder>/rank<r>.json.gz`` after the recorded steps.

    Args:
        folder: ``profile`` in the run's folder; created when the trace is written.
        rank: of this process; each writes its own trace.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self.trace_path = folder / f"rank{rank}.json.gz"
        self.has_written_trace = False
        # By default it records the host and every kind of device present.
        self._profile = profile(
            schedule=schedule(
                wait=NUM_SKIPPED_STEPS, warmup=NUM_WARMUP_STEPS, active=NUM_RECORDED_STEPS, repeat=1
            ),
            on_trace_ready=self._write_trace,
            record_shapes=True,
        )
        self._profile.start()

    def on_step(self, run: Run) -> None:
        self._profile.step()

    def close(self) -> None:
        """Stop. A shorter trace is written too."""
        self._profile.stop()

    def _write_trace(self, recorded: profile) -> None:
        recorded.export_chrome_trace(
            str(prepare_path_inside(self._folder.parent, self._folder.name, self.trace_path.name))
        )
        self.has_written_trace = True
