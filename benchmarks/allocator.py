"""Measure the peak CPU memory of code sections with torch's profiler."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

_MARK = "allocations: "


@dataclass
class Phase:
    """Peak memory of a phase in bytes, relative to the start of the recording."""

    peak: int = 0


@dataclass
class Recording:
    """Peak memory of each phase in a recording. A phase is a named section of the recorded code."""

    phases: dict[str, Phase] = field(default_factory=dict)
    """Peak of each phase, keyed by name. Empty until the context of :func:`allocations` has ended."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Return a context manager that records its code as the phase ``name``."""
        with torch.profiler.record_function(_MARK + name):
            yield


@contextmanager
def allocations() -> Iterator[Recording]:
    """Record every CPU allocation of torch within this context.

    Yields:
        The recording. Its phases are filled when the context ends.
    """
    recording = Recording()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        yield recording
    recorder: Any = profile.profiler
    events = list(recorder.kineto_results.events())
    marks = [
        (event.start_ns(), event.end_ns(), Phase(), event.name().removeprefix(_MARK))
        for event in events
        if event.name().startswith(_MARK)
    ]
    recording.phases = {name: phase for _, _, phase, name in marks}
    now = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        before, now = now, now + event.nbytes()
        for start, end, phase, _ in marks:
            if start <= event.start_ns() <= end:
                phase.peak = max(phase.peak, before, now)
