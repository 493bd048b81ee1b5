"""Operations that make the host wait for the device: they read a value, so nothing can be queued."""

from __future__ import annotations

import traceback
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from portable.private import torch_internals

_aten = torch.ops.aten
_READS = {
    torch_internals.get_private_aten_operation(
        "local_scalar_dense"
    ): "a value is read (item, float, bool, tolist or a comparison)",
    _aten.nonzero.default: "the number of results depends on values (nonzero)",
    _aten.masked_select.default: "the number of results depends on values (masked_select)",
    _aten.equal.default: "tensors are compared (equal)",
}
_TO_COPY = torch_internals.get_private_aten_operation("to_copy")
_MASK = "the number of results depends on values (a boolean mask as an index)"
_COPY = "a tensor is copied between host and device"


@dataclass(frozen=True)
class Wait:
    """Place where the host waits: reason, file and line of code."""

    why: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.why} at {Path(self.file).name}, line {self.line}"


class Waits:
    """Recorder of operations that read values, or copy between devices."""

    def __init__(self) -> None:
        self.found: list[Wait] = []

    def looking(self) -> AbstractContextManager[None]:
        """Return a context in which waits are recorded."""
        return torch_internals.intercept_operations(self._look)

    def _look(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        why = _READS.get(func)
        if func is _TO_COPY:
            to = torch.device(kwargs.get("device") or args[0].device)
            why = _COPY if to.type != args[0].device.type else None
        if func is _aten.index.Tensor and any(i is not None and i.dtype == torch.bool for i in args[1]):
            why = _MASK
        if why is not None:
            self.found.append(self._where(why))
        return func(*args, **kwargs)

    def _where(self, why: str) -> Wait:
        frames = list(traceback.extract_stack())[:-2]  # without the two of this class
        begun = [at for at, frame in enumerate(frames) if frame.filename == __file__]
        frames = frames[begun[-1] + 1 :] if begun else frames
        others = [frame for frame in frames if "/torch/" not in frame.filename]
        frame = (others or frames)[-1]
        return Wait(why, frame.filename, frame.lineno or 0)
