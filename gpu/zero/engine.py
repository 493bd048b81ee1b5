"""A model in training under DeepSpeed ZeRO."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from portable import plugins
from portable.batch_plan import plan_batches
from portable.checkpoint.external import read_run_step
from portable.checkpoint.match_to_model import match_stored_state
from portable.converters import Tensor as StoredTensor
from portable.engines.engine_interface import COMPUTE_DTYPES
from portable.engines.experts import find_expert_modules, find_routed_modules
from portable.engines.generation import continue_text
from portable.engines.transforms import apply_transforms, build_objective
from portable.errors import require
from portable.evaluation.totals import add_to_totals
from portable.gpu.zero import config as deepspeed_json
from portable.gpu.zero import nvme, private_api
from portable.gpu.zero import optimizer as zero_optimizer
from portable.gpu.zero import runtime as zero_runtime
from portable.gpu.zero.deepspeed_loss_scale import DeepSpeedLossScale
from portable.gpu.zero.footprint import compute_zero_footprint
from portable.gpu.zero.partitions import FlatPartitions, ShardedPartitions
from portable.gpu.zero.saving import ZeroSaver
from portable.gpu.zero.settings import ModelSizes, build_settings
from portable.model.freezing import find_frozen_names
from portable.model.layers import find_repeated_modules
from portable.model.loss import divide_by_global_weight, forward_loss
from portable.model.parameter_groups import assign_groups
from portable.model.parameters import get_state_tensors, has_peft_adapter, materialize, replace_tensors
from portable.model.weight_sources import fill
from portable.optim.muon import Muon
from portable.optim.non_finite_updates import (
    NEW_COUNTERS,
    Health,
    count_update,
    find_nonfinite,
    get_allowed_streak,
)
from portable.optim.optimizers import set_betas, set_rates
from portable.optim.schedule import build_one_cycle
from portable.planner.memory_model import Cluster
from portable.planner.meta_model import inspect
from portable.terminal import discard_native_stdout

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from contextlib import ExitStack
    from pathlib import Path

    from torch import Tensor

    from portable.backend import SaveHandle
    from portable.batch import Batch
    from portable.config import RunConfig
    from portable.converters import Checkpoint
    from portable.engines.engine_interface import Machine, MeasuredEngine
    from portable.model.loss import MetricAccumulator, StepSums
    from portable.model.weight_sources import ReadableTensor

STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}


def check_deepspeed(config: RunConfig, device_type: str) -> None:
    """Raise UserError for what this machine's DeepSpeed cannot do."""
    deepspeed = zero_runtime.import_deepspeed(device_type)
    document = deepspeed_json.read(config)
    if document is not None:
        deepspeed_json.check_installed(document, device_type)
    zero_optimizer.check(config, document)
    if nvme.is_swapping(config):
        nvme.check(config, deepspeed)


def apply_deepspeed_json(config: RunConfig, device_type: str, world_size: int) -> RunConfig:
    """The config with the values of its DeepSpeed JSON in place of defaults."""
    if config.deepspeed.config is None:
        return config
    zero_runtime.import_deepspeed(device_type)  # reading the JSON asks it for its keys
    document = deepspeed_json.read(config)
    return config if document is None else deepspeed_json.adopt(config, document, world_size)


def build_deepspeed_notes(config: RunConfig, device_type: str) -> list[str]:
    """Notes on the run's DeepSpeed JSON, one line each."""
    zero_runtime.import_deepspeed(device_type)
    document = deepspeed_json.read(config)
    return [] if document is None else deepspeed_json.build_notes(config, document)


def build_engine(model: nn.Module, config: RunConfig, machine: Machine, at_stop: ExitStack) -> MeasuredEngine:
    """See :class:`portable.engines.engine_interface.EngineModule`."""
    stage = STAGES[config.strategy]
    deepspeed = zero_runtime.import_deepspeed(machine.device.type)
    zero_runtime.start(deepspeed, machine.device, at_stop)
    plan = plan_batches(config, world_size=machine.world_size, rank=machine.rank)
    document = deepspeed_json.read(config)
    settings = build_settings(config, plan, ModelSizes.from_model(model), document, machine.device.type)
    if nvme.is_swapping(config):
        _make_swap_folder(model, config, machine, at_stop)
    on_host = document is not None and document.get("activation_checkpointing.cpu_checkpointing") is True
    apply_transforms(model, config, at_stop, recompute_inputs_on_host=on_host)
    compute = COMPUTE_DTYPES[config.precision]
    parameters = dict(model.named_parameters())
    groups = assign_groups(model, config.train)  # before parameters lose their shapes
    frozen = (
        [] if has_peft_adapter(model) else find_frozen_names(model)
    )  # which checkpoints of an adapter leave out
    rounded = [name for name in frozen if parameters[name].itemsize > compute.itemsize]
    experts = find_routed_modules(model)
    require(
        stage != 2 or not experts or machine.world_size == 1,
        f"strategy: zero2 does not support {type(model).__name__}: it reduces gradients as they are "
        "computed, and their order depends on the experts that each rank's tokens choose; "
        "use zero1, zero3 or full_shard",
    )
    if stage == 3:
        if leaves := [
            *experts,
            *find_expert_modules(model),
        ]:  # gathered as one, so missing gradients become zeros
            require(
                not (repeated := find_repeated_modules(model, leaves)),
                f"strategy: zero3 does not support {type(model).__name__}: one forward pass calls "
                f"{', '.join(repeated[:1])} several times, whose gradients DeepSpeed would reduce once per "
                "call; use zero1 or full_shard",
            )
            deepspeed.utils.set_z3_leaf_modules(model, list({type(module) for module in leaves}))
        _partition(deepspeed, model, settings, machine.device, compute)
    else:
        materialize(model, machine.device)
    optimizer = zero_optimizer.build(config, document, model, groups)
    with discard_native_stdout():
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=settings, dist_init_required=False
        )
    at_stop.callback(_destroy, engine)
    if config.memory.offload_params == "nvme":
        nvme.release_buffers_after_forward(engine)
    return ZeroEngine(engine, stage, config, machine, rounded)


def _destroy(engine: Any) -> None:
    """Take a DeepSpeed engine apart. It references itself and would keep all its memory."""
    with suppress(Exception):  # fails on a broken device, whose own error is being raised already
        private_api.finish_swapping(engine.optimizer)
    with suppress(Exception):
        engine.destroy()


def _make_swap_folder(model: nn.Module, config: RunConfig, machine: Machine, at_stop: ExitStack) -> None:
    """Create an empty folder for this run's swap files, and remove it at the end."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        cluster = Cluster(machine.world_size, local)
        per_rank = compute_zero_footprint(inspect(model, config.train), config, cluster).disk
        nvme.check_room(config, per_rank * local)
        folder = nvme.get_swap_folder(config)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        at_stop.callback(shutil.rmtree, folder, ignore_errors=True)
    torch.distributed.barrier()


def _partition(
    deepspeed: Any, model: nn.Module, settings: dict[str, Any], device: torch.device, compute: torch.dtype
) -> None:
    """Allocate the meta-device ``model``, partitioning each parameter at once.

    A rank never holds more than its shards and one whole parameter.
    """
    # Init casts modules that are built inside its context, and takes a finished parameter as it is.
    context = deepspeed.zero.Init(module=nn.Module(), config_dict_or_path=settings)

    def partition_parameter(_: str, meta: nn.Parameter) -> nn.Parameter:
        empty = torch.empty_like(meta, device=device, dtype=compute)
        full = nn.Parameter(empty, requires_grad=meta.requires_grad)
        private_api.partition(context, full)
        return full

    replace_tensors(model, partition_parameter, lambda _, buffer: buffer.to(device))


class ZeroEngine:
    """Implements :class:`portable.backend.Engine`; see there for the contracts."""

    def __init__(
        self,
        engine: Any,
        stage: int,
        config: RunConfig,
        machine: Machine,
        rounded: Collection[str] = (),
    ) -> None:
        self.model: nn.Module = engine.module
        self._engine = engine
        self.objective = build_objective(self.model, config)
        self._settings = config.train
        self._cycle = build_one_cycle(config.train)
        self._sharded = stage == 3
        self._device = machine.device
        # The loss is already divided by the global batch; DeepSpeed averages gradients over the ranks on top.
        self._averaging = float(machine.world_size)
        names: dict[nn.Parameter, str] = {p: name for name, p in self.model.named_parameters()}
        self._partitions: FlatPartitions | ShardedPartitions
        if self._sharded:
            self._partitions = ShardedPartitions(engine.optimizer, names, machine.rank)
        else:
            self._partitions = FlatPartitions(engine.optimizer, names, machine.rank)
        if isinstance(base := private_api.get_basic_optimizer(engine), Muon):
            base.device, base.flat = machine.device, self._partitions.list_matrices(machine.world_size)
        scaler = private_api.get_dynamic_loss_scaler(engine.optimizer)
        self._scaler = None if scaler is None else DeepSpeedLossScale(scaler)
        # DeepSpeed casts frozen parameters to the compute type. What that rounds is kept in host memory, so
        # that checkpoints have it as it was: this rank's shards, or where rank 0 saves for all, whole.
        here = self._sharded or machine.rank == 0
        self._exact: dict[str, Tensor] = {}
        self._rounded = set(rounded) if here else set[str]()
        self._saver = ZeroSaver(engine, self._exact)
        # With dynamic loss scaling an overflow is no failure.
        self._limit = get_allowed_streak(config.train.on_non_finite)
        self._account = torch.tensor(NEW_COUNTERS)  # on the host: DeepSpeed syncs every step for the norm

    def accumulate(
        self, batch: Batch, weight: Tensor, *, last: bool, with_token_metrics: bool = False
    ) -> StepSums:
        """See :class:`portable.backend.Engine`."""
        self._partitions.refresh()
        self._engine.set_gradient_accumulation_boundary(last)
        output = forward_loss(self._engine, batch, self.objective, with_token_metrics=with_token_metrics)
        loss, sums = divide_by_global_weight(output, weight, self.objective.global_batch_size)
        # DeepSpeed checks gradients only, and an infinite loss can have finite ones: make them NaN.
        finite = torch.where(torch.isfinite(loss.detach()), 1.0, torch.nan)
        self._engine.backward(loss * (finite * self._averaging), scale_wrt_gas=False)
        return sums

    def update(self, learning_rate: float, max_norm: float, loss: Tensor) -> Tensor:
        optimizer = self._engine.optimizer
        if self.read_health().halted:
            optimizer.zero_grad(set_to_none=True)
            return torch.full((), torch.nan, device=self._device)
        set_rates(optimizer, learning_rate, self._settings)
        set_betas(optimizer, self._cycle, self._engine.global_steps)
        private_api.set_max_norm(optimizer, max_norm)
        try:
            self._engine.step()
        except Exception as error:
            if self._scaler is not None and private_api.is_scale_exhausted(error):
                raise self._scaler.build_exhausted_error() from error
            raise
        private_api.count_samples(self._engine, self._settings.global_batch_size)
        # DeepSpeed has synced, and skips an update that is not finite on any rank.
        skipped = not self._engine.was_step_applied()
        if skipped and self._scaler is not None:
            self._scaler.count_overflow()
            skipped = False
        bad_loss = loss.cpu() if skipped else torch.zeros(())
        self._account, _ = count_update(
            self._account, bad=torch.tensor(skipped), loss=bad_loss, limit=self._limit
        )
        norm = self._engine.get_global_grad_norm()
        return torch.as_tensor(norm, dtype=torch.float32, device=self._device)

    def read_health(self) -> Health:
        return Health.from_counters(self._account.tolist(), self._limit)

    def find_nonfinite_gradients(self) -> list[str]:
        from deepspeed.utils import safe_get_full_grad

        names = []
        for name, parameter in self.model.named_parameters():
            gradient = safe_get_full_grad(parameter) if parameter.requires_grad else None
            if gradient is not None and not torch.isfinite(gradient).all():
                names.append(name)
        return names

    def find_nonfinite_state(self) -> list[str]:
        """See :class:`portable.backend.Engine`."""
        # A custom optimizer may start from infinity.
        weights_only = plugins.names_code(self._settings.optimizer)
        return find_nonfinite(self._partitions.iter_parts(weights_only=weights_only))

    def get_metrics(self) -> dict[str, float]:
        """See :class:`portable.engines.engine_interface.MeasuredEngine`."""
        return {} if self._scaler is None else self._scaler.get_metrics()

    @torch.no_grad()
    def evaluate(
        self, batch: Batch, measure: MetricAccumulator, totals: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        self._partitions.refresh()
        self._engine.eval()
        sums = self.objective.evaluate(self.model, batch, measure)
        self._engine.train()
        return add_to_totals(totals, sums)

    def generate(self, prompt: Tensor, *, max_new_tokens: int, seed: int) -> Tensor:
        self._partitions.refresh()
        self._engine.eval()
        tokens = continue_text(
            self.model,
            prompt,
            self._device,
            max_new_tokens=max_new_tokens,
            seed=seed,
            collective=self._sharded,
        )
        self._engine.train()
        return tokens

    # -- weights and checkpoints -------------------------------------------------------------------------

    def swap_ema_weights(self) -> None:
        self._partitions.swap_ema_weights()
        self._partitions.refresh()

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, ReadableTensor]) -> None:
        self._partitions.load_weights(weights)
        for name, tensor in get_state_tensors(self.model).items():
            # Tensors without an optimizer are whole on every rank; under ZeRO-3 frozen parameters are
            # sharded.
            if name in weights and not tensor.requires_grad:
                if isinstance(self._partitions, ShardedPartitions) and private_api.is_partitioned(tensor):
                    exact = self._partitions.load_frozen(tensor, weights[name], exact=name in self._rounded)
                    self._exact.update({} if exact is None else {name: exact})
                else:
                    fill(tensor, weights[name])
                    if name in self._rounded:
                        exact = torch.empty(tensor.shape, dtype=torch.float32)
                        fill(self._exact.setdefault(name, exact), weights[name])

    def load(self, checkpoint: Checkpoint) -> None:
        stored = match_stored_state(checkpoint, self.model)
        self.load_weights(stored.weights)
        base = private_api.get_basic_optimizer(self._engine)
        zero_optimizer.restore_param_groups(base, self._settings, checkpoint.optimizer)
        samples = zero_optimizer.build_state_samples(base, self._settings)
        self._partitions.load_optimizer(stored.optimizer, samples)
        if self._scaler is not None:
            self._scaler.load(checkpoint.root)
        steps = _read_steps_done(checkpoint)
        zero_optimizer.catch_up(base, steps)
        private_api.set_steps(self._engine, read_run_step(checkpoint.root, steps))

    def save(self, folder: Path, *, background: bool) -> SaveHandle:
        self._partitions.refresh()
        if self._scaler is not None and self._engine.global_rank == 0:
            self._scaler.save(folder)
        return self._saver.save(folder, background=background)


def _read_steps_done(checkpoint: Checkpoint) -> int:
    """Optimizer steps before a checkpoint; 0 if it does not record them."""
    state: Any = next(iter(checkpoint.optimizer.state.values()), {}) if checkpoint.optimizer else {}
    step = state.get("step", checkpoint.metadata.get("step", 0))
    return int(step.read() if isinstance(step, StoredTensor) else step)
