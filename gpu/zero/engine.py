"""A model in training under DeepSpeed ZeRO."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from converters import Tensor as StoredTensor
from gpu.compiling import compile_layers
from gpu.experts import called_by_choice, routed, zero_missing_gradients
from gpu.footprint import footprint
from gpu.generation import continue_text
from gpu.loss_scale import LossScale
from gpu.zero import nvme
from gpu.zero import optimizer as zero_optimizer
from gpu.zero import runtime as zero_runtime
from gpu.zero.config import document as deepspeed_json
from gpu.zero.partitions import FlatPartitions, ShardedPartitions
from gpu.zero.saving import ZeroSaver
from gpu.zero.settings import ModelSizes, settings_for
from portable.batch_plan import plan_batches
from portable.checkpoint.matching import stored_state
from portable.errors import require, unsupported
from portable.model.activation_checkpointing import checkpoint_activations
from portable.model.loss import Objective
from portable.model.parameters import materialize, state_tensors
from portable.model.tensors import fill
from portable.optim.build import set_rates
from portable.optim.non_finite import NEW_COUNTERS, Health, allowed_streak, count_update
from portable.planner.memory_model import Cluster
from portable.planner.subject import inspect
from portable.terminal import native_stdout_closed

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from converters import Checkpoint
    from gpu.strategies import CountingEngine, Machine
    from portable.backend import Batch, SaveHandle
    from portable.config import RunConfig
    from portable.model.tensors import ReadableTensor

COMPUTE_DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}


def check(config: RunConfig, device_type: str) -> None:
    """Raise UserError for a setting that ZeRO has no use for."""
    unsupported(
        [
            (
                config.train.optimizer not in ("adamw", "sgd"),
                f"train.optimizer: {config.train.optimizer} does not work with ZeRO in this version; "
                "use adamw or sgd",
            ),
            (
                config.compile and config.strategy == "zero3",
                "compile: true does not go with strategy zero3, whose parameters come and go between the "
                "operations; use zero2 or full_shard",
            ),
        ]
    )
    deepspeed = zero_runtime.import_deepspeed(device_type)
    document = deepspeed_json.read(config)
    if document is not None:
        deepspeed_json.check_installed(document, device_type)
    zero_optimizer.check(config, document)
    if nvme.in_use(config):
        nvme.check(config, deepspeed)


def adopt(config: RunConfig, device_type: str, world_size: int) -> RunConfig:
    """The config with what its DeepSpeed JSON says in place of defaults."""
    if config.deepspeed.config is None:
        return config
    zero_runtime.import_deepspeed(device_type)  # which knows the keys
    document = deepspeed_json.read(config)
    assert document is not None
    return deepspeed_json.adopt(config, document, world_size)


def notes(config: RunConfig, device_type: str) -> list[str]:
    """What a person should be told of the run's DeepSpeed JSON, one line each."""
    zero_runtime.import_deepspeed(device_type)
    document = deepspeed_json.read(config)
    return [] if document is None else deepspeed_json.notes(config, document)


def prepare(model: nn.Module, config: RunConfig, machine: Machine) -> CountingEngine:
    """Hand a model from the meta device to DeepSpeed; the weights are still unset."""
    stage = STAGES[config.strategy]
    deepspeed = zero_runtime.import_deepspeed(machine.device.type)
    zero_runtime.start(deepspeed, machine.device)
    plan = plan_batches(config, world_size=machine.world_size, rank=machine.rank)
    document = deepspeed_json.read(config)
    settings = settings_for(config, plan, ModelSizes.of(model), document, machine.device.type)
    if nvme.in_use(config):
        _make_room(model, config, machine)
    on_host = document is not None and document.get("activation_checkpointing.cpu_checkpointing") is True
    checkpoint_activations(model, config.memory.activation_checkpointing, inputs_on_host=on_host)
    compile_layers(model, config)
    experts = routed(model)
    require(
        stage != 2 or not experts or machine.world_size == 1,
        "strategy: zero2 sends gradients as they come, and the ranks of a "
        f"{type(model).__name__} have them in different orders, by which experts their tokens choose; "
        "use zero1, zero3 or full_shard",
    )
    if stage == 3:
        if leaves := [*experts, *called_by_choice(model)]:  # gathered together, missing gradients are zeros
            deepspeed.utils.set_z3_leaf_modules(model, list({type(module) for module in leaves}))
        _partition(deepspeed, model, settings, machine.device, COMPUTE_DTYPES[config.precision])
    else:
        zero_missing_gradients(model)
        materialize(model, machine.device)
    optimizer = zero_optimizer.build(config, document, model)
    with native_stdout_closed():
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=settings, dist_init_required=False
        )
    zero_runtime.keep_until_stop(engine)
    if config.memory.offload_params == "nvme":
        nvme.give_buffers_back(engine)
    return ZeroEngine(engine, stage, config, machine)


def _make_room(model: nn.Module, config: RunConfig, machine: Machine) -> None:
    """An empty folder for this run's swap files, removed when the run ends."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        of_a_rank = footprint(inspect(model), config, Cluster(machine.world_size, local)).disk
        nvme.check_room(config, of_a_rank * local)
        zero_runtime.empty_until_stop(nvme.run_folder(config))
    torch.distributed.barrier()


def _partition(
    deepspeed: Any, model: nn.Module, settings: dict[str, Any], device: torch.device, compute: torch.dtype
) -> None:
    """Allocate the meta-device ``model`` parameter by parameter, each cut into its ranks' shares at once.

    No rank ever holds more than its share and one whole parameter.
    """
    convert: Any = None
    partitioned: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in partitioned:
                # DeepSpeed casts what is built inside its context; a finished module it takes as it is.
                whole = nn.Parameter(
                    torch.empty_like(parameter, device=device, dtype=compute),
                    requires_grad=parameter.requires_grad,
                )
                if convert is None:
                    holder = nn.Module()
                    holder.register_parameter("first", whole)
                    convert = deepspeed.zero.Init(module=holder, config_dict_or_path=settings)
                else:
                    convert._convert_to_zero_parameters([whole])
                partitioned[id(parameter)] = whole
            module._parameters[name] = partitioned[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


class ZeroEngine:
    """Implements :class:`portable.backend.Engine`; see there for the contracts."""

    def __init__(self, engine: Any, stage: int, config: RunConfig, machine: Machine) -> None:
        self.model: nn.Module = engine.module
        self._engine = engine
        self._objective = Objective(self.model, config.train.global_batch_size)
        self._sharded = stage == 3
        self._device = machine.device
        # DeepSpeed averages gradients over the ranks; the loss is already divided by the global batch.
        self._loss_scale = float(machine.world_size)
        names: dict[nn.Parameter, str] = {p: name for name, p in self.model.named_parameters()}
        self._partitions: FlatPartitions | ShardedPartitions
        if self._sharded:
            self._partitions = ShardedPartitions(engine.optimizer, names, machine.rank)
        else:
            self._partitions = FlatPartitions(engine.optimizer, names, machine.rank)
        self._scaling = LossScale(engine.optimizer.loss_scaler)
        self._saver = ZeroSaver(engine)
        # Under a search for a loss scale an overflow is no failure.
        self._limit = allowed_streak(config.train.on_non_finite)
        self._account = torch.tensor(NEW_COUNTERS)  # on the host, which waits for the norm in every step

    def accumulate(self, batch: Batch, valid: Tensor, *, last: bool) -> Tensor:
        self._partitions.refresh()
        self._engine.set_gradient_accumulation_boundary(last)
        loss = self._objective(self._engine, batch, valid)
        # DeepSpeed looks at gradients alone, and an infinite loss may have finite ones: then they become NaN.
        finite = torch.where(torch.isfinite(loss.detach()), 1.0, torch.nan)
        self._engine.backward(loss * (finite * self._loss_scale), scale_wrt_gas=False)
        return loss.detach()

    def update(
        self,
        learning_rate: float,
        max_norm: float,
        loss: Tensor,
        *,
        betas: tuple[float, float] | None = None,
    ) -> Tensor:
        optimizer = self._engine.optimizer
        if self.health().halted:
            optimizer.zero_grad(set_to_none=True)
            return torch.full((), torch.nan, device=self._device)
        set_rates(optimizer, learning_rate, betas)
        optimizer.clip_grad = max_norm
        try:
            self._engine.step()
        except Exception as error:
            raise self._scaling.translated(error) from error
        # DeepSpeed has left an update out that was not finite on any rank, and waited to find out.
        left_out = not self._engine.was_step_applied()
        if left_out and self._scaling.dynamic:
            self._scaling.count_overflow()
            left_out = False
        told = loss.cpu() if left_out else torch.zeros(())
        self._account, _ = count_update(
            self._account, bad=torch.tensor(left_out), loss=told, limit=self._limit
        )
        norm = self._engine.get_global_grad_norm()
        return torch.as_tensor(norm, dtype=torch.float32, device=self._device)

    def health(self) -> Health:
        return Health.of(self._account.tolist(), self._limit)

    def unsound_gradients(self) -> list[str]:
        from deepspeed.utils import safe_get_full_grad

        found = []
        for name, parameter in self.model.named_parameters():
            gradient = safe_get_full_grad(parameter) if parameter.requires_grad else None
            if gradient is not None and not torch.isfinite(gradient).all():
                found.append(name)
        return found

    def figures(self) -> dict[str, float]:
        """What the metrics record besides."""
        return self._scaling.figures()

    def let_go(self) -> None:
        pass  # zero_runtime.stop takes DeepSpeed's engine apart

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        self._partitions.refresh()
        self._engine.eval()
        loss = self._objective.evaluated(self.model, batch)
        self._engine.train()
        return loss

    def generate(self, prompt: Tensor, *, max_new_tokens: int, seed: int) -> Tensor:
        self._partitions.refresh()
        self._engine.eval()
        tokens = continue_text(
            self.model,
            prompt,
            self._device,
            max_new_tokens=max_new_tokens,
            seed=seed,
            in_step=self._sharded,
        )
        self._engine.train()
        return tokens

    # -- weights and checkpoints -------------------------------------------------------------------------

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, ReadableTensor]) -> None:
        self._partitions.load_weights(weights)
        for name, tensor in state_tensors(self.model).items():
            # What no optimizer moves is whole on every rank, or ZeRO-3's share of a frozen parameter.
            if name in weights and not tensor.requires_grad:
                if isinstance(self._partitions, ShardedPartitions) and hasattr(tensor, "ds_tensor"):
                    self._partitions.load_frozen(tensor, weights[name])
                else:
                    fill(tensor, weights[name])

    def load(self, checkpoint: Checkpoint) -> None:
        stored = stored_state(checkpoint, self.model)
        self.load_weights(stored.weights)
        self._partitions.load_optimizer(stored.optimizer)
        self._scaling.load(checkpoint.root)
        steps = _steps_done(checkpoint)
        zero_optimizer.catch_up(self._engine.basic_optimizer, steps)
        # DeepSpeed names its folder inside ours by the steps that it has counted.
        self._engine.global_steps = steps

    def save(self, folder: Path, *, background: bool) -> SaveHandle:
        self._partitions.refresh()
        if self._engine.global_rank == 0:
            self._scaling.save(folder)
        return self._saver.save(folder, background=background)


def _steps_done(checkpoint: Checkpoint) -> int:
    """Optimizer steps behind a checkpoint, as far as it tells."""
    state: Any = next(iter(checkpoint.optimizer.state.values()), {}) if checkpoint.optimizer else {}
    step = state.get("step", checkpoint.metadata.get("step", 0))
    return int(step.read() if isinstance(step, StoredTensor) else step)
