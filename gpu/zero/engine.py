"""Train models with DeepSpeed ZeRO."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from portable import plugins
from portable.batch_plan import compute_batch_plan
from portable.checkpoint.external import read_step_of_any_checkpoint
from portable.checkpoint.match_to_model import match_checkpoint_to_model
from portable.converters import Tensor as StoredTensor
from portable.engines.engine_interface import COMPUTE_DTYPES
from portable.engines.experts import find_modules_with_unused_parameters, find_stacked_expert_modules
from portable.engines.generation import sample_continuation
from portable.engines.transforms import apply_transforms, build_objective
from portable.errors import require
from portable.evaluation.totals import compute_new_totals
from portable.gpu.zero import config as deepspeed_json
from portable.gpu.zero import nvme, private_api
from portable.gpu.zero import optimizer as zero_optimizer
from portable.gpu.zero import runtime as zero_runtime
from portable.gpu.zero.deepspeed_loss_scale import DeepSpeedLossScale
from portable.gpu.zero.footprint import compute_zero_footprint
from portable.gpu.zero.partitions import FlatPartitions, ShardedPartitions
from portable.gpu.zero.saving import ZeroSaver
from portable.gpu.zero.settings import ModelElementCounts, build_deepspeed_config
from portable.model.freezing import list_frozen_names
from portable.model.layers import find_modules_called_repeatedly
from portable.model.loss import forward_loss, scale_loss_by_global_weight
from portable.model.parameter_groups import assign_parameter_groups
from portable.model.parameters import get_state_tensors, has_peft_adapter, materialize_model, replace_tensors
from portable.model.weight_sources import copy_into_tensor
from portable.optim.muon import Muon
from portable.optim.non_finite_updates import (
    INITIAL_COUNTERS,
    UpdateHealth,
    count_update_and_decide_skip,
    find_nonfinite_names,
    get_max_streak,
)
from portable.optim.optimizers import set_betas, set_learning_rates
from portable.optim.schedule import build_one_cycle_schedule
from portable.planner.memory_model import Cluster
from portable.planner.meta_model import build_inventory
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
    from portable.engines.engine_interface import EngineWithMetrics, RankInfo
    from portable.model.loss import MicroBatchMeasure, StepSums
    from portable.model.weight_sources import ReadableTensor

STAGE_BY_STRATEGY = {"zero1": 1, "zero2": 2, "zero3": 3}


def check_deepspeed(config: RunConfig, device_type: str) -> None:
    """Check that DeepSpeed can run a config on this machine.

    If the run has a DeepSpeed JSON, the function checks its keys and values, the packages and
    devices that it needs, and whether it is compatible with the optimizer. If the run swaps to
    disk, the function also checks ``memory.nvme_path`` and DeepSpeed's op ``async_io``. If the run
    needs C++ ops, they are compiled, which takes minutes once per machine.

    Args:
        config: Config of a run whose strategy is a ZeRO stage.
        device_type: Type of the run's devices, such as ``cuda``.

    Raises:
        UserError: If DeepSpeed or one of its ops is not available, or if a setting is not
            supported.
    """
    deepspeed = zero_runtime.import_deepspeed(device_type)
    document = deepspeed_json.read_deepspeed_document(config)
    if document is not None:
        deepspeed_json.check_installed(document, device_type)
    zero_optimizer.check_zero_optimizer(config, document)
    if nvme.is_swapping_to_disk(config):
        nvme.check_swapping(config, deepspeed)


def apply_deepspeed_json(config: RunConfig, device_type: str, world_size: int) -> RunConfig:
    """Replace defaults in a config with values from its DeepSpeed JSON.

    Args:
        config: Config of the run. It is returned unchanged if ``deepspeed.config`` is not set.
        device_type: Type of the run's devices, such as ``cuda``.
        world_size: Number of ranks.

    Raises:
        UserError: If the JSON is invalid, or contradicts a setting that the user has set.
    """
    if config.deepspeed.config is None:
        return config
    zero_runtime.import_deepspeed(device_type)  # reading the JSON requires DeepSpeed's list of keys
    document = deepspeed_json.read_deepspeed_document(config)
    return config if document is None else deepspeed_json.apply_document(config, document, world_size)


def build_deepspeed_notes(config: RunConfig, device_type: str) -> list[str]:
    """Build one-line notes for the user about a run's DeepSpeed JSON.

    The list is empty if the run has no DeepSpeed JSON.
    """
    zero_runtime.import_deepspeed(device_type)
    document = deepspeed_json.read_deepspeed_document(config)
    return [] if document is None else deepspeed_json.build_document_notes(config, document)


def build_engine(
    model: nn.Module, config: RunConfig, rank_info: RankInfo, at_stop: ExitStack
) -> EngineWithMetrics:
    """Shard a model with ZeRO and build its optimizer. All ranks must call this function.

    See :class:`portable.engines.engine_interface.EngineModule`. The function also applies the
    transforms of the run, and creates the folder for swap files if the run swaps to disk.

    Raises:
        UserError: If DeepSpeed is not available, if the disk for swap files is too small, or if
            ZeRO does not support the model. With several ranks, zero2 does not support experts that
            can remain unused in a pass. With zero3, a forward pass must not call a module with
            experts several times.
    """
    stage = STAGE_BY_STRATEGY[config.strategy]
    deepspeed = zero_runtime.import_deepspeed(rank_info.device.type)
    zero_runtime.start_deepspeed(deepspeed, rank_info.device, at_stop)
    plan = compute_batch_plan(config, world_size=rank_info.world_size, rank=rank_info.rank)
    document = deepspeed_json.read_deepspeed_document(config)
    settings = build_deepspeed_config(
        config, plan, ModelElementCounts.from_model(model), document, rank_info.device.type
    )
    if nvme.is_swapping_to_disk(config):
        _create_swap_folder(model, config, rank_info, at_stop)
    on_host = (
        document is not None and document.get_value("activation_checkpointing.cpu_checkpointing") is True
    )
    apply_transforms(model, config, at_stop, recompute_inputs_on_host=on_host)
    compute = COMPUTE_DTYPES[config.precision]
    parameters = dict(model.named_parameters())
    groups = assign_parameter_groups(model, config.train)  # before parameters lose their shapes
    # Checkpoints of an adapter do not contain frozen parameters, so their exact values are not needed.
    frozen = [] if has_peft_adapter(model) else list_frozen_names(model)
    rounded = [name for name in frozen if parameters[name].itemsize > compute.itemsize]
    experts = find_modules_with_unused_parameters(model)
    require(
        stage != 2 or not experts or rank_info.world_size == 1,
        f"strategy: zero2 does not support {type(model).__name__}, because zero2 reduces gradients as they "
        "are computed, and their order depends on the experts that each rank's tokens choose; set strategy "
        "to zero1, zero3 or full_shard",
    )
    if stage == 3:
        # DeepSpeed gathers a leaf module as one unit, and fills missing gradients with zeros.
        if leaves := [
            *experts,
            *find_stacked_expert_modules(model),
        ]:
            require(
                not (repeated := find_modules_called_repeatedly(model, leaves)),
                f"strategy: zero3 does not support {type(model).__name__}, because one forward pass calls "
                f"{', '.join(repeated[:1])} several times, and DeepSpeed would reduce its gradients once "
                "per call; set strategy to zero1 or full_shard",
            )
            deepspeed.utils.set_z3_leaf_modules(model, list({type(module) for module in leaves}))
        _materialize_partitioned(deepspeed, model, settings, rank_info.device, compute)
    else:
        materialize_model(model, rank_info.device)
    optimizer = zero_optimizer.build_zero_optimizer(config, document, model, groups)
    with discard_native_stdout():
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=settings, dist_init_required=False
        )
    at_stop.callback(_destroy_deepspeed_engine, engine)
    if config.memory.offload_params == "nvme":
        nvme.release_swap_buffers_after_forward(engine)
    return ZeroEngine(engine, stage, config, rank_info, rounded)


def _destroy_deepspeed_engine(engine: Any) -> None:
    """Destroy a DeepSpeed engine, ignoring errors.

    The function first waits until the swapping to disk has finished. Destroying the engine is
    necessary to free its memory, because the engine contains circular references.
    """
    with suppress(Exception):  # this fails if the device is broken, and that error is being raised already
        private_api.wait_for_swapping(engine.optimizer)
    with suppress(Exception):
        engine.destroy()


def _create_swap_folder(model: nn.Module, config: RunConfig, rank_info: RankInfo, at_stop: ExitStack) -> None:
    """Create an empty folder for this run's swap files, after checking the disk space.

    The first rank on each node creates the folder, and removes it at the end of the run. If the
    folder already exists, it is deleted first. All ranks must call this function, because it ends
    with a barrier.

    Args:
        model: Model whose shapes determine the size of the swap files.
        config: Config of the run.
        rank_info: Rank and world size of this process.
        at_stop: Exit stack that removes the folder when it is closed.

    Raises:
        UserError: If the disk has too little space.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        cluster = Cluster(rank_info.world_size, local)
        per_rank = compute_zero_footprint(build_inventory(model, config.train), config, cluster).disk
        nvme.check_free_space(config, per_rank * local)
        folder = nvme.get_swap_folder(config)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        at_stop.callback(shutil.rmtree, folder, ignore_errors=True)
    torch.distributed.barrier()


def _materialize_partitioned(
    deepspeed: Any, model: nn.Module, settings: dict[str, Any], device: torch.device, compute: torch.dtype
) -> None:
    """Allocate the parameters of a model one by one, partitioning each of them immediately.

    The values are uninitialized. A rank's memory contains at most its shards and one complete
    parameter. All ranks must call this function.

    Args:
        deepspeed: The module ``deepspeed``.
        model: Model on the meta device. Modified in place. Its buffers are moved to ``device``.
        settings: Configuration for ``deepspeed.initialize``.
        device: Device of this rank.
        compute: Compute dtype, used for all parameters.
    """
    # Do not enter the context of Init, because it would also cast the modules that are built inside. Its
    # method for a single parameter does not cast them.
    context = deepspeed.zero.Init(module=nn.Module(), config_dict_or_path=settings)

    def partition_parameter(_: str, meta: nn.Parameter) -> nn.Parameter:
        empty = torch.empty_like(meta, device=device, dtype=compute)
        full = nn.Parameter(empty, requires_grad=meta.requires_grad)
        private_api.partition_parameter(context, full)
        return full

    replace_tensors(model, partition_parameter, lambda _, buffer: buffer.to(device))


class ZeroEngine:
    """Training engine based on DeepSpeed ZeRO. Implements :class:`portable.backend.Engine`.

    Args:
        engine: Engine returned by ``deepspeed.initialize``.
        stage: ZeRO stage, from 1 to 3.
        config: Config of the run.
        rank_info: Device, rank and world size of this process.
        rounded_names: Names of frozen parameters that are rounded to the compute dtype. The engine also
            keeps their original values in host memory, for checkpoints.
    """

    def __init__(
        self,
        engine: Any,
        stage: int,
        config: RunConfig,
        rank_info: RankInfo,
        rounded_names: Collection[str] = (),
    ) -> None:
        self.model: nn.Module = engine.module
        self._engine = engine
        self.objective = build_objective(self.model, config)
        self._settings = config.train
        self._one_cycle = build_one_cycle_schedule(config.train)
        self._is_stage3 = stage == 3
        self._device = rank_info.device
        # The loss is already divided by the global token count, and DeepSpeed also averages gradients over
        # the ranks. This factor turns the average into a sum.
        self._loss_factor = float(rank_info.world_size)
        names: dict[nn.Parameter, str] = {p: name for name, p in self.model.named_parameters()}
        self._partitions: FlatPartitions | ShardedPartitions
        if self._is_stage3:
            self._partitions = ShardedPartitions(engine.optimizer, names, rank_info.rank)
        else:
            self._partitions = FlatPartitions(engine.optimizer, names, rank_info.rank)
        if isinstance(base := private_api.get_basic_optimizer(engine), Muon):
            base.device, base.flat_matrices = (
                rank_info.device,
                self._partitions.list_matrices(rank_info.world_size),
            )
        scaler = private_api.get_dynamic_loss_scaler(engine.optimizer)
        self._loss_scale = None if scaler is None else DeepSpeedLossScale(scaler)
        # DeepSpeed casts frozen parameters to the compute dtype. Keep the rounded ones in host memory, so
        # that checkpoints contain the original values. With stage 3, each rank keeps its shards. Otherwise
        # only rank 0 keeps them, because it saves for all ranks.
        here = self._is_stage3 or rank_info.rank == 0
        self._exact_frozen: dict[str, Tensor] = {}
        self._rounded_names = set(rounded_names) if here else set[str]()
        self._saver = ZeroSaver(engine, self._exact_frozen)
        # With dynamic loss scaling, an overflow is not a failure.
        self._max_streak = get_max_streak(config.train.on_non_finite)
        # Keep the counters on the host, because DeepSpeed syncs in every step for the norm anyway.
        self._nonfinite_counters = torch.tensor(INITIAL_COUNTERS)

    def begin_step(self, learning_rate: float) -> None:
        """Do nothing, because parameters are updated after the backward pass."""

    def accumulate_gradients(
        self,
        batch: Batch,
        global_weight: Tensor,
        *,
        is_last_micro_batch: bool,
        with_token_metrics: bool = False,
    ) -> StepSums:
        """Run the forward and backward pass of one micro-batch, accumulating gradients.

        If the loss is not finite, all gradients become NaN, so that DeepSpeed skips the update.

        Args:
            batch: Micro-batch on the device.
            global_weight: Weight of the global batch, by which the loss is divided. Scalar on the device.
            is_last_micro_batch: Whether the optimizer step follows.
            with_token_metrics: Whether to also compute the token accuracy and the entropy.

        Returns:
            The contribution of the micro-batch to the loss and to the logged values.
        """
        self._partitions.refresh_compute_copies()
        self._engine.set_gradient_accumulation_boundary(is_last_micro_batch)
        output = forward_loss(self._engine, batch, self.objective, with_token_metrics=with_token_metrics)
        loss, sums = scale_loss_by_global_weight(output, global_weight, self.objective.global_batch_size)
        # DeepSpeed checks only the gradients, which can be finite even if the loss is not. Make them NaN in
        # this case, so that the update is skipped.
        finite = torch.where(torch.isfinite(loss.detach()), 1.0, torch.nan)
        self._engine.backward(loss * (finite * self._loss_factor), scale_wrt_gas=False)
        return sums

    def take_optimizer_step(self, learning_rate: float, max_grad_norm: float, loss: Tensor) -> Tensor:
        """Clip the gradients, take an optimizer step, and zero the gradients.

        DeepSpeed skips the update if gradients are not finite on any rank. ``train.on_non_finite``
        limits the number of consecutive skipped updates. Once the limit is reached, this method
        only zeroes the gradients, and the run stops with an error when it next reads the counters
        (:meth:`read_update_health`). Updates that are skipped to lower the fp16 loss scale do not
        count.

        This method syncs the host with the device.

        Args:
            learning_rate: Learning rate of this step.
            max_grad_norm: Maximum gradient norm for clipping. 0 disables clipping.
            loss: Loss of the step, as a scalar on the device.

        Returns:
            The global gradient norm before clipping, as an fp32 scalar on the device. NaN once the
            limit is reached.

        Raises:
            RunError: If fp16 gradients overflow at the lowest loss scale.
        """
        optimizer = self._engine.optimizer
        if self.read_update_health().halted:
            optimizer.zero_grad(set_to_none=True)
            return torch.full((), torch.nan, device=self._device)
        set_learning_rates(optimizer, learning_rate, self._settings)
        set_betas(optimizer, self._one_cycle, self._engine.global_steps)
        private_api.set_clipping_norm(optimizer, max_grad_norm)
        try:
            self._engine.step()
        except Exception as error:
            if self._loss_scale is not None and private_api.is_scale_exhausted(error):
                raise self._loss_scale.build_exhausted_error() from error
            raise
        private_api.set_sample_count(self._engine, self._settings.global_batch_size)
        # Reading the result needs no additional sync, because DeepSpeed has already synced. It skips an
        # update if gradients are not finite on any rank.
        skipped = not self._engine.was_step_applied()
        if skipped and self._loss_scale is not None:
            self._loss_scale.count_overflow()
            skipped = False
        bad_loss = loss.cpu() if skipped else torch.zeros(())
        self._nonfinite_counters, _ = count_update_and_decide_skip(
            self._nonfinite_counters,
            is_non_finite=torch.tensor(skipped),
            loss=bad_loss,
            max_streak=self._max_streak,
        )
        norm = self._engine.get_global_grad_norm()
        return torch.as_tensor(norm, dtype=torch.float32, device=self._device)

    def read_update_health(self) -> UpdateHealth:
        """Return the counters of skipped updates, which are stored on the host."""
        return UpdateHealth.from_counters(self._nonfinite_counters.tolist(), self._max_streak)

    def find_nonfinite_gradients(self) -> list[str]:
        """Return the names of parameters with non-finite accumulated gradients.

        All ranks must call this method, because it gathers each gradient.
        """
        from deepspeed.utils import safe_get_full_grad

        names = []
        for name, parameter in self.model.named_parameters():
            gradient = safe_get_full_grad(parameter) if parameter.requires_grad else None
            if gradient is not None and not torch.isfinite(gradient).all():
                names.append(name)
        return names

    def find_nonfinite_state(self) -> list[str]:
        """Return the names of trained parameters with non-finite weights or optimizer state on this rank.

        The state of a custom optimizer is not checked, because its initial values may be infinite.
        """
        # The initial state of a custom optimizer may be infinite.
        weights_only = plugins.is_plugin_name(self._settings.optimizer)
        return find_nonfinite_names(self._partitions.iter_local_values(weights_only=weights_only))

    def get_metrics(self) -> dict[str, float]:
        """Return the metrics ``overflows`` and ``loss_scale`` of dynamic fp16 loss scaling.

        The result is empty in other precisions, and with a fixed loss scale from the DeepSpeed
        JSON.
        """
        return {} if self._loss_scale is None else self._loss_scale.get_metrics()

    @torch.no_grad()
    def evaluate_batch(
        self, batch: Batch, metric_accumulator: MicroBatchMeasure, totals: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Run the forward pass on an evaluation micro-batch, and return the totals including its sums.

        Args:
            batch: Micro-batch on the device.
            metric_accumulator: Function that computes the metric sums of a micro-batch.
            totals: Sums over the previous micro-batches. They are not modified.

        Returns:
            New totals, keyed by name.
        """
        self._partitions.refresh_compute_copies()
        self._engine.eval()
        sums = self.objective.measure_micro_batch(self.model, batch, metric_accumulator)
        self._engine.train()
        return compute_new_totals(totals, sums)

    def generate(
        self, prompt: Tensor, *, max_new_tokens: int, seed: int, image_columns: Batch | None = None
    ) -> Tensor:
        """Sample a continuation of ``prompt``.

        See :func:`portable.engines.generation.sample_continuation`. All ranks must call this
        method, because it gathers outdated compute copies (stages 1 and 2) or the parameters in
        each forward pass (stage 3). The model is in training mode afterward.
        """
        self._partitions.refresh_compute_copies()
        self._engine.eval()
        tokens = sample_continuation(
            self.model,
            prompt,
            self._device,
            max_new_tokens=max_new_tokens,
            seed=seed,
            image_columns=image_columns or {},
            is_collective=self._is_stage3,
        )
        self._engine.train()
        return tokens

    # -- weights and checkpoints -------------------------------------------------------------------------

    def swap_ema_weights(self) -> None:
        """Swap the weights with their exponential moving average.

        Call this method again to swap them back. All ranks must call it, because weights are
        gathered. Parameters without an average are skipped.
        """
        self._partitions.swap_ema_weights()
        self._partitions.refresh_compute_copies()

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, ReadableTensor]) -> None:
        """Load this rank's partitions, and the persistent buffers, from ``weights``.

        Frozen parameters are loaded as well. With stage 3, each rank loads its shards of them. The
        original values of frozen parameters that are rounded to the compute dtype are also kept in
        host memory, for checkpoints. Tensors that are missing in ``weights`` keep their values.

        Args:
            weights: Lazily read tensors, keyed by their names in the model.
        """
        self._partitions.load_weights(weights)
        for name, tensor in get_state_tensors(self.model).items():
            # Tensors that are not in the optimizer are complete on every rank. The only exception is ZeRO-3,
            # which also shards frozen parameters.
            if name in weights and not tensor.requires_grad:
                if isinstance(self._partitions, ShardedPartitions) and private_api.is_partitioned(tensor):
                    exact = self._partitions.load_frozen_parameter(
                        tensor, weights[name], return_exact=name in self._rounded_names
                    )
                    self._exact_frozen.update({} if exact is None else {name: exact})
                else:
                    copy_into_tensor(tensor, weights[name])
                    if name in self._rounded_names:
                        exact = torch.empty(tensor.shape, dtype=torch.float32)
                        copy_into_tensor(self._exact_frozen.setdefault(name, exact), weights[name])

    def load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Load the weights, the optimizer state, and the fp16 loss scale from a checkpoint.

        The step counters of the optimizer and of DeepSpeed's engine are also restored.

        Raises:
            CheckpointError: If a tensor of the model or optimizer state is missing, or if the
                optimizer state cannot be represented in ZeRO's flat partitions.
            UserError: If the file with the loss scale is damaged.
        """
        stored = match_checkpoint_to_model(checkpoint, self.model)
        self.load_weights(stored.weights)
        base = private_api.get_basic_optimizer(self._engine)
        zero_optimizer.restore_param_groups(base, self._settings, checkpoint.optimizer)
        samples = zero_optimizer.build_state_samples(base, self._settings)
        self._partitions.load_optimizer_state(stored.optimizer, samples)
        if self._loss_scale is not None:
            self._loss_scale.load_state(checkpoint.root)
        steps = _read_optimizer_steps(checkpoint)
        zero_optimizer.replay_optimizer_counters(base, steps)
        private_api.set_step_count(self._engine, read_step_of_any_checkpoint(checkpoint.root, steps))

    def save_shards(self, folder: Path, *, background: bool) -> SaveHandle:
        """Write this rank's files in DeepSpeed's checkpoint format.

        All ranks must call this method. With dynamic fp16 loss scaling, rank 0 also writes the loss
        scaler's state.

        Args:
            folder: Existing folder.
            background: Whether to write in a background thread, after copying the state to host
                memory.

        Returns:
            Handle for waiting until the files are written.
        """
        self._partitions.refresh_compute_copies()
        if self._loss_scale is not None and self._engine.global_rank == 0:
            self._loss_scale.save_state(folder)
        return self._saver.save(folder, background=background)


def _read_optimizer_steps(checkpoint: Checkpoint) -> int:
    """Read the number of optimizer steps that were taken before a checkpoint was saved.

    The number comes from the optimizer state, or else from the metadata. If neither contains it,
    the result is 0.
    """
    state: Any = next(iter(checkpoint.optimizer.state.values()), {}) if checkpoint.optimizer else {}
    step = state.get("step", checkpoint.metadata.get("step", 0))
    return int(step.read() if isinstance(step, StoredTensor) else step)
