"""What a config needs, under each strategy, before any machine is rented.

The order is that of docs/choosing.md: DDP, what shares optimizer state and gradients, what shares parameters,
too, and then offloading, to the host and to a disk. FSDP2's strategies stand beside DeepSpeed's that do the
same: each next one saves more and does more for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import yaml

from portable.config.rules import largest_divisor
from portable.errors import UserError
from portable.planner.memory_model import SOME_DISK, Cluster, Footprint, Setting, footprint_room
from portable.planner.passes import Activations, Request
from portable.planner.speed import StepTime, step_time

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portable.config import RunConfig
    from portable.planner.device_catalog import Device
    from portable.planner.inventory import Inventory
    from portable.planner.subject import Subject

# Fastest first, as docs/choosing.md has it. The numbers say what is held to be alike; within a number the
# family of the config's own strategy comes first, which is FSDP2 unless somebody has chosen otherwise.
_ORDER: dict[Setting, int] = {
    Setting("no_shard"): 0,
    Setting("shard_grad_op"): 1,
    Setting("hybrid_shard_zero2"): 1,
    Setting("zero1"): 1,
    Setting("zero2"): 1,
    Setting("hybrid_shard"): 2,
    Setting("full_shard"): 3,
    Setting("zero3"): 3,
    Setting("zero1", "cpu"): 4,
    Setting("zero2", "cpu"): 5,
    Setting("zero3", "none", "cpu"): 6,
    Setting("full_shard", "cpu"): 7,
    Setting("zero3", "cpu"): 7,
    Setting("full_shard", "none", "cpu"): 8,
    Setting("zero3", "cpu", "cpu"): 8,
    Setting("zero3", "nvme"): 9,
    Setting("zero3", "nvme", "nvme"): 10,
}
_NAMED = list(_ORDER)
_LAST = 11


@dataclass(frozen=True)
class Target:
    """Where it is to run."""

    backend: str
    """cpu, cuda or xla."""
    cluster: Cluster
    device: Device | None
    """None: nothing to fit is known, and no rates."""
    host_memory: int | None
    """Bytes of a node; None: not known."""


@dataclass(frozen=True)
class DeviceBytes:
    """Bytes on the device of the rank that holds the most."""

    parameters: int
    gathered: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def resident(self) -> int:
        """What stays from step to step, whatever the micro-batch."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        return self.resident + self.gathered + self.activations


@dataclass(frozen=True)
class Option:
    """One way to run a config, and what it needs."""

    setting: Setting
    micro_batch: int
    recompute: str
    device_bytes: DeviceBytes
    host_bytes: int
    """On a node, of all its ranks."""
    disk_bytes: int
    """The same of what they swap to a local disk."""
    checkpoint_bytes: int
    communication_bytes: int
    """That a device sends in a step."""
    time: StepTime | None
    fits: bool | None

    @property
    def seconds(self) -> float | None:
        """Of a step, roughly."""
        return None if self.time is None else self.time.total

    def yaml(self, config: RunConfig) -> str:
        """The lines to put into the run's file, which has the rest of ``config``."""
        memory = {
            "activation_checkpointing": self.recompute,
            "offload_optimizer": self.setting.offload_optimizer,
            "offload_params": self.setting.offload_params,
        }
        if self.setting.swaps:
            memory["nvme_path"] = str(config.memory.nvme_path or SOME_DISK)
        lines = {
            "strategy": self.setting.strategy,
            "precision": config.precision,
            "train": {"micro_batch_size": self.micro_batch},
            "memory": memory,
        }
        return yaml.safe_dump(lines, sort_keys=False).rstrip()


class Planner:
    """Reckons what a run's settings come to; what was reckoned once is kept.

    Args:
        config: of the run, with a precision that is not ``auto``.
        subject: the model.
        target: where it is to run.
    """

    def __init__(self, config: RunConfig, subject: Subject, target: Target) -> None:
        self.target = target
        self.model: Inventory = subject.inventory
        self._subject = subject
        self._room = footprint_room(target.backend)
        share = max(1, config.train.global_batch_size // target.cluster.devices)
        wanted = config.train.micro_batch_size
        self.searching = wanted == "auto"
        self.micro_batch = largest_divisor(share, 1 if wanted == "auto" else wanted)
        self.config = config.replaced({"train.micro_batch_size": self.micro_batch})
        self.share = share
        self._footprints: dict[tuple[Setting, int, str], Footprint] = {}
        self.failure: str | None = None
        """Why activations could not be run, where they are a guess."""
        self._flops = self.model.flops_per_token(config.data.seq_len)
        self._checkpoint = self.model.checkpoint_bytes(config.train)

    # -- one option ----------------------------------------------------------------------------------------

    def option(
        self, setting: Setting, *, micro_batch: int | None = None, recompute: str | None = None
    ) -> Option:
        """What ``setting`` comes to.

        Raises:
            UserError: where it does not go with the rest of the config.
        """
        micro_batch = micro_batch or self.micro_batch
        config = setting.into(self.config).replaced({"train.micro_batch_size": micro_batch})
        if recompute is not None:
            config = config.replaced({"memory.activation_checkpointing": recompute})
        recompute = config.memory.activation_checkpointing
        cluster = self.target.cluster
        key = setting, micro_batch, recompute
        if key not in self._footprints:
            self._footprints[key] = self._room.footprint(self.model, config, cluster)
        footprint = self._footprints[key]
        working = self._activations(config, footprint, micro_batch)
        found = _device_bytes(footprint, working)
        ranks = min(cluster.per_node, cluster.devices)
        micro_batches = max(1, self.share // micro_batch)
        host = footprint.host * ranks
        device = self.target.device
        fits: bool | None = None
        if device is not None:
            fits = found.total <= device.usable(cluster.devices)
            if self.target.host_memory is not None:
                fits = fits and host <= self.target.host_memory
        time = None
        if device is not None:
            tokens = self.share * config.data.seq_len
            time = step_time(
                footprint,
                device,
                precision=config.precision,
                flops=tokens * self._flops,
                micro_batches=micro_batches,
                recompute=recompute,
                ranks_per_node=ranks,
            )
        sent = max(footprint.links.of(micro_batches), footprint.network.of(micro_batches))
        saved = self._checkpoint + footprint.also_saved
        disk = footprint.disk * ranks
        return Option(setting, micro_batch, recompute, found, host, disk, saved, int(sent), time, fits)

    def _activations(self, config: RunConfig, footprint: Footprint, micro_batch: int) -> Activations:
        request = Request.of(
            config,
            micro_batch=micro_batch,
            compute=footprint.compute,
            on_gpu=self.target.backend == "cuda",
            compiled=footprint.compiled,
        )
        found = self._subject.activations(request)
        self.failure = found.failure or self.failure
        return found

    # -- all of them ---------------------------------------------------------------------------------------

    def options(self) -> list[Option]:
        """Every way, with the config's own micro-batch and recomputation: what fits, fastest first, then the
        rest in the same order."""
        own = Setting.of(self.config)
        settings = list(self._room.settings(self.config, self.target.cluster))
        if own not in settings:
            settings.append(own)
        found = []
        for setting in sorted(settings, key=self._rank):
            try:
                found.append(self.option(setting))
            except UserError:
                if setting == own:
                    raise
        return sorted(found, key=lambda option: option.fits is False)

    @staticmethod
    def place(setting: Setting) -> int:
        """Of ``setting`` in the order, from 0; the same for those that are held to be alike."""
        return _ORDER.get(setting, _LAST)

    def _rank(self, setting: Setting) -> tuple[int, bool, int]:
        family = setting.strategy.startswith("zero") != self.config.strategy.startswith("zero")
        return self.place(setting), family, _NAMED.index(setting) if setting in _ORDER else len(_NAMED)

    def comes_before(self, one: Option, other: Option) -> bool:
        """Whether the order has ``one`` before ``other``."""
        return self._rank(one.setting) < self._rank(other.setting)

    def following(self, setting: Setting) -> str | None:
        """The next way in the order, in the words of the config; None after the last."""
        later = [
            s
            for s in self._room.settings(self.config, self.target.cluster)
            if self._rank(s) > self._rank(setting) and self._rank(s)[1] == self._rank(setting)[1]
        ]
        if not later:
            return None
        found = min(later, key=self._rank)
        moved = [f"memory.offload_{part} {place}" for part, place in found.offloaded.items()]
        return f"strategy {found.strategy}" + (f" with {' and '.join(moved)}" if moved else "")

    def best(self, options: list[Option]) -> Option | None:
        """The fastest way that fits, giving up one thing after another; None if none does, or nobody knows.

        First comes the micro-batch (more accumulation costs next to nothing), then activations (a third more
        work), then offloading; and of each, sharding in the guide's order. As it is configured, if that fits.
        """
        if self.target.device is None:
            return None
        for candidate in self._ladder(options):
            if candidate.fits:
                return candidate
        return None

    def _ladder(self, options: list[Option]) -> Iterator[Option]:
        ordered = sorted(filter(self._may_fit, options), key=lambda option: self._rank(option.setting))
        plain = [
            o for o in ordered if (o.setting.offload_optimizer, o.setting.offload_params) == ("none",) * 2
        ]
        offloaded = [o for o in ordered if o not in plain]
        yield from plain
        sizes = self._smaller()
        for option in plain:
            yield from self._largest_that_fits(option.setting, sizes, None)
        if self.config.memory.activation_checkpointing != "full":
            for option in plain:
                yield from self._largest_that_fits(option.setting, [self.micro_batch, *sizes], "full")
        for option in offloaded:
            yield from self._largest_that_fits(option.setting, [self.micro_batch, *sizes], "full")

    def _may_fit(self, option: Option) -> bool:
        """Whether there is room for what no smaller micro-batch and no recomputation makes less."""
        assert self.target.device is not None
        host = self.target.host_memory
        usable = self.target.device.usable(self.target.cluster.devices)
        return option.device_bytes.resident <= usable and (host is None or option.host_bytes <= host)

    def _largest_that_fits(
        self, setting: Setting, sizes: list[int], recompute: str | None
    ) -> Iterator[Option]:
        """The largest of ``sizes`` (descending) that fits; the smallest, tried first, tells if any does."""
        if sizes and self.option(setting, micro_batch=sizes[-1], recompute=recompute).fits:
            found = (self.option(setting, micro_batch=size, recompute=recompute) for size in sizes)
            yield next(option for option in found if option.fits)

    def _smaller(self) -> list[int]:
        """Smaller micro-batches, the largest first; at most two, the last of which is 1."""
        if self.micro_batch == 1:
            return []
        half = largest_divisor(self.share, max(1, self.micro_batch // 2))
        return list(dict.fromkeys([half, 1]))

    # -- micro-batches -------------------------------------------------------------------------------------

    def largest_micro_batch(self, sizes: list[int]) -> int | None:
        """The largest of ``sizes`` (ascending) that fits under the config's own setting, or None."""
        if self.target.device is None:
            return None
        own = Setting.of(self.config)
        good, bad = -1, len(sizes)  # what is known to fit, and not to fit
        while bad - good > 1:
            middle = (good + bad) // 2
            if self.option(own, micro_batch=sizes[middle]).fits:
                good = middle
            else:
                bad = middle
        return None if good < 0 else sizes[good]


def _device_bytes(footprint: Footprint, working: Activations) -> DeviceBytes:
    """At the peak: before the backward pass comes to the layers, in them, at their end, or in the update.

    Gradients count as complete, as they are from the second micro-batch of a step on; with a single one they
    come as activations go.
    """
    before, layers = working.before, working.in_layers
    moments = [
        (footprint.gathered + before.copies, before.work),
        (footprint.in_layers + layers.copies, layers.work),
        (max(footprint.at_end, footprint.in_update), 0),
    ]
    gathered, work = max(moments, key=sum)
    return DeviceBytes(footprint.parameters, gathered, footprint.gradients, footprint.optimizer, work)
