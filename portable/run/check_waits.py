"""A few steps of a run with a look at every operation: which of them make the host wait for the device.

A value that code reads in a step (``item()``, ``if tensor``, a boolean mask) makes the host wait until the
device has computed it, so that nothing is queued meanwhile. On XLA it cuts the step's graph. Nothing is
written.
"""

from __future__ import annotations

import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from portable import plugins
from portable.checkpoint.resume_source import checkpoints_of, resume_source
from portable.errors import UserError
from portable.formatting import human_count
from portable.loop import train_step
from portable.private import of_torch
from portable.run.batches import train_loader
from portable.run.callbacks import Run, call, check
from portable.run.own_code import named_code
from portable.run.restore import restore
from portable.terminal import tell

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from portable.run.prepare import Prepared

_FIRST, _LOOKED_AT = 2, 4  # steps: what is made once may wait
_aten = torch.ops.aten
_READS = {
    of_torch.aten("local_scalar_dense"): "a value is read (item, float, bool, tolist or a comparison)",
    _aten.nonzero.default: "the number of results depends on values (nonzero)",
    _aten.masked_select.default: "the number of results depends on values (masked_select)",
    _aten.equal.default: "tensors are compared (equal)",
}
_TO_COPY = of_torch.aten("to_copy")
_MASK = "the number of results depends on values (a boolean mask as an index)"
_COPY = "a tensor is copied between host and device"


@dataclass(frozen=True)
class Wait:
    """Where the host waits: why, and in which file and line of code."""

    why: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.why} at {Path(self.file).name}, line {self.line}"


class Waits:
    """Notes where operations read values, or copy between devices.

    Args:
        own: files to name first, if one of them is on the stack.
    """

    def __init__(self, own: frozenset[str] = frozenset()) -> None:
        self._own = own
        self.found: list[Wait] = []

    def looking(self) -> AbstractContextManager[None]:
        """A context in which waits are noted."""
        return of_torch.every_operation(self._look)

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
        own = [frame for frame in frames if frame.filename in self._own]
        others = [frame for frame in frames if "/torch/" not in frame.filename]
        frame = (own or others or frames)[-1]
        return Wait(why, frame.filename, frame.lineno or 0)


def check_waits(prepared: Prepared) -> int:
    """Take a few steps and print what waits in them; all ranks call it.

    Returns:
        the exit code, 0.

    Raises:
        UserError: if code of the user's waits, or compiles again in each step.
    """
    backend, config = prepared.backend, prepared.config
    checkpoints = checkpoints_of(prepared.settled.place)
    restored = restore(prepared, resume_source(config, checkpoints))
    engine, progress = restored.engine, restored.progress
    run = Run(prepared, engine, progress, checkpoints)
    callbacks = check(config.train.callbacks)
    files = {plugins.file_of(name): key for key, name in named_code(config).items()}
    waits = Waits(frozenset(files))
    batches = iter(train_loader(prepared, progress.samples))

    def step() -> None:
        train_step(
            backend,
            engine,
            batches,
            plan=prepared.plan,
            first_sample=progress.samples,
            learning_rate=prepared.schedule(progress.step),
            max_grad_norm=config.train.max_grad_norm or 0.0,
            betas=prepared.schedule.betas(progress.step),
        )
        progress.step += 1
        progress.samples += prepared.plan.global_batch_size
        call(callbacks, "on_step", run)

    call(callbacks, "on_start", run)
    try:
        for _ in range(_FIRST):
            step()
        before = backend.metrics()
        with waits.looking():
            for _ in range(_LOOKED_AT):
                step()
        compiled = {name: value - before.get(name, 0) for name, value in backend.metrics().items()}
    finally:
        batches.close()
    backend.barrier()
    found = Counter(waits.found)
    own = [wait for wait in found if wait.file in files]
    if own:
        more = f", and at {human_count(len(own) - 1, 'more place')}" if len(own) > 1 else ""
        raise UserError(
            f"{files[own[0].file]}: waits for the device in each step: {own[0]}{more}; compute it with "
            "tensors alone, or in a callback after a log"
        )
    again = compiled.get("graphs_compiled", 0)
    if again > 1 and files:  # one may come late
        raise UserError(
            f"{next(iter(files.values()))}: {again:.0f} graphs were compiled in {_LOOKED_AT} steps after the "
            "first; a number that changes must be a tensor, and shapes must stay"
        )
    if backend.rank == 0:
        for wait, times in found.items():
            tell(f"note: not in your code: {wait}, {times / _LOOKED_AT:g} times a step")
        print(f"{human_count(_LOOKED_AT, 'step')}: no code of yours waits for the device")
    return 0
