"""Profile a few training steps for ``--profile``.

The resulting trace can be opened with Perfetto (https://ui.perfetto.dev) or chrome://tracing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.profiler import profile, schedule

from portable.callbacks import Callback
from portable.paths import prepare_path_inside

if TYPE_CHECKING:
    from pathlib import Path

    from portable.callbacks import Run

NUM_SKIPPED_STEPS, NUM_WARMUP_STEPS, NUM_RECORDED_STEPS = 2, 1, 3
"""Number of steps that are skipped, that warm up the profiler, and that are recorded.

The first steps are skipped because they compile and allocate.
"""


class Profiler(Callback):
    """Callback that records a trace of a few steps, and writes it to a file.

    The file is ``<folder>/rank<r>.json.gz``. The constructor starts the profiler. The first
    ``NUM_SKIPPED_STEPS`` steps of the launch are not recorded, the next ``NUM_WARMUP_STEPS`` steps
    warm up the profiler, and the next ``NUM_RECORDED_STEPS`` steps are recorded. The trace is then
    written.

    Args:
        folder: Folder for the traces of all ranks, which is the subfolder ``profile`` of the output
            folder. It is created when a trace is written.
        rank: Rank of this process. Each rank writes its own trace.

    Attributes:
        trace_path: Path of the trace.
        has_written_trace: Whether the trace has been written.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self.trace_path = folder / f"rank{rank}.json.gz"
        self.has_written_trace = False
        # Do not pass activities, because the profiler records the host and all kinds of devices by default.
        self._profile = profile(
            schedule=schedule(
                wait=NUM_SKIPPED_STEPS, warmup=NUM_WARMUP_STEPS, active=NUM_RECORDED_STEPS, repeat=1
            ),
            on_trace_ready=self._write_trace,
            record_shapes=True,
        )
        self._profile.start()

    def on_step(self, run: Run) -> None:
        """Notify the profiler that a step has ended."""
        self._profile.step()

    def close(self) -> None:
        """Stop the profiler.

        If the run ends while steps are being recorded, this method writes a trace of the steps so
        far.
        """
        self._profile.stop()

    def _write_trace(self, recorded: profile) -> None:
        recorded.export_chrome_trace(
            str(prepare_path_inside(self._folder.parent, self._folder.name, self.trace_path.name))
        )
        self.has_written_trace = True
