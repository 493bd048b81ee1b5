"""What differs between accelerators: two protocols, and the registry that finds who implements them.

A :class:`Backend` is a machine: it starts the process group or runtime, places a batch, reduces a number and
prepares a model. What :meth:`Backend.prepare` returns, an :class:`Engine`, is the model in training. The loop
in :mod:`portable.loop` calls these and nothing else, so it never learns who answers.

Vocabulary: a *rank* is one process of the run; the *world size* is their number. A rank drives one device,
or, on XLA, all devices of its host as if they were one large one. The *global batch* is the sequences of one
optimizer step over all ranks, a *micro-batch* what a rank takes through the model at a time.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Protocol

import torch

from portable.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from converters import Checkpoint
    from portable.config import RunConfig
    from portable.model.tensors import ReadableTensor
    from portable.optim.non_finite import Health

Batch = dict[str, torch.Tensor]
"""Keyword arguments of the model's ``forward``, int64 ``[micro_batch, seq_len]``, plus ``labels`` that are
aligned with the logits (already shifted) and hold -100 where nothing is to be predicted; a classifier's may
be float32, and NaN there."""


class SaveHandle(Protocol):
    """A checkpoint on its way to disk."""

    def done(self) -> bool:
        """Whether :meth:`wait` would return at once; on rank 0, whether all ranks have written."""

    def wait(self) -> None:
        """Return once this rank's files are written (on rank 0, all ranks'); raise what went wrong."""


class Engine(Protocol):
    """A model in training, its optimizer and whatever shards them."""

    model: nn.Module
    """The transformers model itself, under its plain parameter names."""

    def load_weights(self, weights: Mapping[str, ReadableTensor]) -> None:
        """Fill this rank's slices of the parameters and persistent buffers named in ``weights``."""

    def load(self, checkpoint: Checkpoint) -> None:
        """Fill weights and optimizer state from a logical checkpoint; each rank reads its own slices."""

    def save(self, folder: Path, *, background: bool) -> SaveHandle:
        """Write this rank's shards into ``folder``, in the strategy's native format; all ranks call it.

        Args:
            folder: exists on this rank's host. Ranks may share one, or have a folder each, unseen by others.
            background: return once the state is copied to host memory, and write while training goes on.
        """

    def accumulate(self, batch: Batch, valid: Tensor, *, last: bool) -> Tensor:
        """Forward and backward of one micro-batch.

        Args:
            batch: placed by :meth:`Backend.place`.
            valid: valid tokens of the global batch, a scalar on the device from :meth:`Backend.total`, by
                which the summed token losses are divided.
            last: whether the optimizer steps after this micro-batch, so that gradients must be reduced now.

        Returns:
            this rank's share of the global mean loss, an fp32 scalar on the device, not yet read.
        """

    def update(
        self,
        learning_rate: float,
        max_norm: float,
        loss: Tensor,
        *,
        betas: tuple[float, float] | None = None,
    ) -> Tensor:
        """Clip, step, zero. An update whose loss or norm is not finite is left out, on all ranks alike.

        Weights, moments and the optimizer's step counts are then bit for bit what they were. After as many
        such updates in a row as ``train.on_non_finite`` allows (stop: one), none is made any more.

        Args:
            learning_rate: of this step.
            max_norm: bound of the global gradient norm; 0 does not clip.
            loss: the global loss of this step, on the device.
            betas: Adam's decay rates from this step on, where the schedule moves them.

        Returns:
            the gradient norm before clipping, an fp32 scalar on the device, not yet read.
        """

    def health(self) -> Health:
        """Read the device's account of updates left out. Waits for the device: call it when logging.

        Raises:
            RunError: where an engine knows better what went wrong than that something was not finite.
        """

    def unsound_gradients(self) -> list[str]:
        """The parameters whose accumulated gradient is not finite, as far as this rank holds it.

        In the model's order. To be called before :meth:`update`, by all ranks; waits for the device.
        """

    def evaluate(self, batch: Batch) -> Tensor:
        """Summed token loss of this rank's micro-batch, an fp32 scalar on the device, not yet read."""

    def generate(self, prompt: Tensor, *, max_new_tokens: int, seed: int) -> Tensor:
        """Continue ``prompt``, int64 ``[1, length]``; all ranks call it together."""


class Backend(Protocol):
    """A machine, or the part of it that this process drives."""

    name: str
    rank: int
    world_size: int
    device: torch.device
    one_program: bool
    """Whether all ranks run one program on one logical batch, so that randomness must be the same on all."""

    @property
    def devices_per_rank(self) -> int:
        """Devices that this rank drives."""

    def adopt(self, config: RunConfig, ranks: int) -> RunConfig:
        """Put what a file in an engine's own format says (a DeepSpeed JSON) in place of defaults.

        Args:
            config: as the user gave it.
            ranks: that this process will start; 1 where it is a rank itself.

        Raises:
            UserError: where that file contradicts the config.
        """

    def check(self, config: RunConfig) -> None:
        """Raise :class:`UserError` for a setting that this backend has no use for, before any work."""

    def notes(self, config: RunConfig) -> list[str]:
        """What of the config means something else here than a person may think, or nothing; one line each.

        Args:
            config: the run's, adopted and checked.
        """

    def start(self) -> None:
        """Join the process group, or start the runtime."""

    def stop(self) -> None:
        """Leave it again."""

    def resolve_precision(self, precision: str) -> str:
        """The compute type that ``auto`` means on this device; any other value comes back as it is."""

    def prepare(self, model: nn.Module, config: RunConfig) -> Engine:
        """Shard a model from the meta device and give it an optimizer; the weights are still unset."""

    def fits(
        self, build: Callable[[], nn.Module], config: RunConfig, steps: Callable[[Engine], None]
    ) -> bool | None:
        """Whether ``steps``, given an engine like :meth:`prepare`'s, fit the memory of the device.

        That engine talks to no other rank, so that one which runs out of memory leaves none waiting, and is
        gone afterwards. What it computes means nothing; what it allocates is what the run will. To be called
        before :meth:`start`, or after :meth:`leave`.

        Args:
            build: the model on the meta device.
            config: of the run.
            steps: takes training steps with this backend and the engine.

        Returns:
            None, without having tried, where running out of memory cannot be caught.
        """

    def ran_out_of_memory(self, error: BaseException) -> bool:
        """Whether ``error`` says that the device has no more memory."""

    def leave(self) -> None:
        """Have no part in the process group any more, yet keep other ranks from noticing: they would fail."""

    def record_memory(self) -> None:
        """Keep a history of allocations on the device from now on, for :meth:`dump_memory`."""

    def dump_memory(self, path: Path) -> None:
        """Write the history of allocations, and what is allocated now, as the device's own tools read it."""

    def dump_collectives(self, folder: Path) -> None:
        """Write what collectives this rank's device took part in last, if it keeps a record of them."""

    def seed(self, value: int) -> None:
        """Seed the randomness (dropout) of this rank's device, without waiting for it."""

    def place(self, batch: Batch) -> Batch:
        """Move a micro-batch to the device without waiting for the copy."""

    def total(self, count: int) -> Tensor:
        """Sum a number of this rank's host over all ranks: an int64 scalar on the device.

        Does not wait for the device.
        """

    def sum(self, value: Tensor) -> Tensor:
        """Sum a small device tensor over all ranks, without reading it."""

    def read(self, values: Sequence[Tensor]) -> list[float]:
        """Wait for the device and bring scalars to the host. The loop reads in no other way."""

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is set on any rank. Talks over the host, so the device is not waited for."""

    def gather(self, text: str) -> list[str]:
        """What every rank gave, by rank. Talks over the host."""

    def barrier(self) -> None:
        """Wait for all ranks."""

    def memory(self) -> tuple[int, int]:
        """Bytes in use now and at the peak, on this rank's device (resident host memory on CPU)."""

    def driver_memory(self) -> tuple[int, int] | None:
        """Bytes of this rank's device that are in use and that there are, as its driver counts them.

        That includes what libraries and other processes hold. None where no driver counts.
        """

    def shape_multiple(self, precision: str) -> int | None:
        """What the sizes of matrix products should be multiples of, in elements; None: no matter."""

    def peak_flops(self, precision: str) -> float | None:
        """FLOP/s that one device's data sheet gives for ``precision`` (dense), or None where unknown."""

    def figures(self) -> dict[str, float]:
        """What else this backend counts, by name: recorded in ``metrics.jsonl`` with every logged step."""


class BackendRoom(Protocol):
    """What a backend's module offers."""

    def local_devices(self, name: str) -> int:
        """Ranks that this machine can hold, one a device; 1 on CPU."""

    def create(self, name: str) -> Backend:
        """The backend of this process, from the launcher's environment variables where there are any."""

    def memory_advice(self, config: RunConfig) -> str:
        """Which settings to change where host memory runs out under ``config``, in one sentence."""


# Where each backend lives. Imported only when it is chosen: nobody pays for, or needs, an accelerator's
# libraries that are not used.
ROOMS: dict[str, str] = {"cpu": "gpu.backend", "cuda": "gpu.backend", "xla": "tpu.backend"}
EXTRAS: dict[str, str] = {"xla": "xla"}


def resolve_backend(name: str) -> str:
    """The backend that ``auto`` stands for on this machine."""
    if name != "auto":
        return name
    # A light module of the room: whoever has no TPU need not import its libraries to be told so.
    if importlib.import_module("tpu.devices").uses_tpu():
        return "xla"
    return "cuda" if torch.cuda.is_available() else "cpu"


def backend_room(name: str) -> BackendRoom:
    """Import the module behind a backend's name.

    Raises:
        UserError: if the backend, or a library that it stands on, is not installed.
    """
    module = ROOMS[name]
    try:
        room: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name == module:
            available = ", ".join(sorted(n for n, m in ROOMS.items() if m != module))
            raise UserError(f"backend: {name} is not part of this version; use one of {available}") from error
        if error.name is None or error.name.split(".")[0] in ("portable", "converters", "gpu", "tpu"):
            raise
        remedy = (
            f"; install it with: pip install 'portable-trainer[{EXTRAS[name]}]'" if name in EXTRAS else ""
        )
        raise UserError(f"backend: {name} needs the package {error.name}{remedy}") from error
    return room  # type: ignore[no-any-return]
