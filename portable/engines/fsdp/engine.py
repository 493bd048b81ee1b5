"""Training engine based on torch.distributed: DDP, FSDP2, or a single device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from portable import plugins
from portable.checkpoint.match_to_model import match_checkpoint_to_model
from portable.engines.compiling import CUDA_GRAPH_MODES, CudaGraphMemory
from portable.engines.engine_interface import COMPUTE_DTYPES
from portable.engines.fsdp import optimizer_state
from portable.engines.fsdp.saving import DcpSaver
from portable.engines.fsdp.sharding import shard_model, uses_ddp
from portable.engines.generation import sample_continuation
from portable.engines.transforms import apply_transforms, build_objective
from portable.evaluation.totals import compute_new_totals
from portable.model.layers import gives_all_parameters_gradients
from portable.model.loss import forward_loss, scale_loss_by_global_weight
from portable.model.parameter_groups import assign_parameter_groups
from portable.model.parameters import get_checkpointed_tensors, get_state_tensors, list_embedding_weights
from portable.optim.local_shards import compute_total_norm, group_by_mesh, to_local
from portable.optim.non_finite_updates import (
    INITIAL_COUNTERS,
    UpdateHealth,
    count_update_and_decide_skip,
    find_nonfinite_names,
    get_max_streak,
    get_streak,
)
from portable.optim.optimizers import build_optimizer, set_learning_rates
from portable.optim.weight_average import swap_weights_and_averages
from portable.private import torch_internals
from portable.private.transformers_internals import skip_mask_value_checks

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import ExitStack
    from pathlib import Path

    from torch import Tensor, nn

    from portable.backend import SaveHandle
    from portable.batch import Batch
    from portable.config import RunConfig
    from portable.converters import Checkpoint
    from portable.engines.engine_interface import EngineWithMetrics, RankInfo
    from portable.engines.fsdp.device_loss_scale import DeviceLossScale
    from portable.engines.fsdp.fused_backward import FusedBackward
    from portable.engines.fsdp.offload import HostParameterCopies
    from portable.engines.fsdp.sharding import ShardedModel
    from portable.model.loss import MicroBatchMeasure, StepSums
    from portable.model.weight_sources import ReadableTensor
    from portable.optim.optimizers import EngineOptimizer


def build_engine(
    model: nn.Module, config: RunConfig, rank_info: RankInfo, at_stop: ExitStack
) -> EngineWithMetrics:
    """Build the engine: transform the model, shard or replicate it, and create its optimizer.

    The model is changed in place: the transforms that the config needs, such as activation
    checkpointing, are applied before it is sharded.

    Args:
        model: Model on the meta device, not yet transformed.
        config: Config of the run.
        rank_info: Device, rank and world size of this process.
        at_stop: Exit stack to which this function adds its cleanup. The backend closes the
            stack before it destroys the process group.

    Returns:
        The engine. Its weights are still uninitialized.

    Raises:
        UserError: If the ranks cannot be divided into sharding groups, or if a module class in
            the section ``fsdp`` does not exist in the model.
    """
    # This check runs a trial pass, which needs the model before any transform.
    all_parameters_used = uses_ddp(config, rank_info) and gives_all_parameters_gradients(model)
    apply_transforms(model, config, at_stop)
    sharded = shard_model(model, config, rank_info, all_parameters_used=all_parameters_used)
    at_stop.callback(sharded.release_process_group)
    return TorchEngine(sharded, config, rank_info.device)


class TorchEngine:
    """Engine for DDP, FSDP2 and a single device. Implements :class:`portable.backend.Engine`.

    Args:
        sharded: Model with sharded or replicated parameters.
        config: Config of the run.
        device: This rank's device.
    """

    def __init__(self, sharded: ShardedModel, config: RunConfig, device: torch.device) -> None:
        self.model: nn.Module = sharded.model
        self._settings = config.train
        self.objective = build_objective(self.model, config)
        self._sharded = sharded
        self._device = device
        parameters = dict(self.model.named_parameters())
        memory = config.memory
        # Offloaded parameters are already in host memory, so the optimizer does not need copies of them.
        needs_host_copies = memory.offload_optimizer == "cpu" and memory.offload_params == "none"
        self._host_copies: HostParameterCopies | None = None
        self._loss_scale: DeviceLossScale | None = None
        if needs_host_copies:
            from portable.engines.fsdp.offload import HostParameterCopies

            self._host_copies = HostParameterCopies(parameters)
        self._optimized = parameters if self._host_copies is None else self._host_copies.copies
        embedding_parameters = set(list_embedding_weights(self.model))
        self._optimizer: EngineOptimizer = build_optimizer(
            config.train,
            self._optimized,
            assign_parameter_groups(self.model, config.train),
            embeddings={p for name, p in self._optimized.items() if parameters[name] in embedding_parameters},
            compute_dtype=COMPUTE_DTYPES[config.precision],
            seed=config.seed,
        )
        if config.train.optimizer == "muon":
            from portable.optim.muon import Muon

            assert isinstance(self._optimizer, Muon)
            self._optimizer.device = device
        device_parameters = {} if self._host_copies is None else self._host_copies.map_copies_to_parameters()
        self._trainable: list[nn.Parameter] = [
            device_parameters.get(p, p) for group in self._optimizer.param_groups for p in group["params"]
        ]
        self._fused_backward: FusedBackward | None = None
        if config.train.fused_backward:
            from portable.engines.fsdp.fused_backward import FusedBackward

            names: dict[Tensor, str] = {parameter: name for name, parameter in parameters.items()}
            self._fused_backward = FusedBackward(self._optimizer, names, device)
        uses_cuda_graphs = config.compile and config.compile_mode in CUDA_GRAPH_MODES
        self._cuda_graph_memory = CudaGraphMemory() if uses_cuda_graphs else None
        self._saver = DcpSaver()
        if config.precision == "fp16":
            from portable.engines.fsdp.device_loss_scale import DeviceLossScale

            self._loss_scale = DeviceLossScale(config.fp16, device)
        # With dynamic loss scaling, overflows are expected and only lower the scale. A failure means that
        # gradients overflow at the minimum scale, and a single failure stops the run.
        self._max_streak = get_max_streak(config.train.on_non_finite) if self._loss_scale is None else 1
        # The counters stay on the device and are read only when logging, because reading them triggers a
        # host-device sync.
        self._nonfinite_counters = torch.tensor(INITIAL_COUNTERS, device=device)

    def begin_step(self, learning_rate: float) -> None:
        """Set the learning rate before the backward pass, because this pass may already update parameters."""
        set_learning_rates(self._optimizer, learning_rate, self._settings)

    def accumulate_gradients(
        self,
        batch: Batch,
        global_weight: Tensor,
        *,
        is_last_micro_batch: bool,
        with_token_metrics: bool = False,
    ) -> StepSums:
        """Run the forward and backward pass of one micro-batch, and accumulate its gradients.

        With ``train.fused_backward``, the backward pass also updates the parameters and frees their
        gradients.

        Args:
            batch: Micro-batch on the device.
            global_weight: Total loss weight of the global batch, by which the loss is divided.
                Scalar on the device.
            is_last_micro_batch: Whether the optimizer step follows.
            with_token_metrics: Whether to also compute the token accuracy and the entropy.

        Returns:
            Contribution of the micro-batch to the loss and the logged metrics.
        """
        if self._cuda_graph_memory is not None:
            self._cuda_graph_memory.begin_pass()
        with self._sharded.get_sync_context(last=is_last_micro_batch):
            with self._sharded.get_autocast_context(), skip_mask_value_checks():
                output = forward_loss(
                    self._sharded.forward_module, batch, self.objective, with_token_metrics=with_token_metrics
                )
                loss, sums = scale_loss_by_global_weight(
                    output, global_weight, self.objective.global_batch_size
                )
            # DDP averages gradients over the ranks, but the loss is already divided by the global weight.
            # This factor turns the average into a sum.
            scaled_loss = loss * self._sharded.loss_factor
            if self._fused_backward is not None:
                is_halted = get_streak(self._nonfinite_counters) >= self._max_streak
                self._fused_backward.begin_backward(is_skipped=is_halted | ~torch.isfinite(sums.values[0]))
            (scaled_loss if self._loss_scale is None else scaled_loss * self._loss_scale.scale).backward()
        if self._cuda_graph_memory is not None:
            self._cuda_graph_memory.copy_gradients_out_of_graph_memory(
                self._trainable, last=is_last_micro_batch
            )
        return sums

    def take_optimizer_step(self, learning_rate: float, max_grad_norm: float, loss: Tensor) -> Tensor:
        """Clip the gradients, take an optimizer step, and set the gradients to None.

        The update is skipped on the device if the gradient norm or the loss is not finite, or if
        the limit of consecutive skipped updates has been reached. With ``train.fused_backward``,
        the backward pass has already updated the parameters, so this method only computes the
        gradient norm and counts the step.

        In fp16, this method also divides the gradients by the loss scale, and updates the scale. An
        overflow then counts as a skipped update only if the scale would have to be lowered, but is
        already at its minimum.

        Args:
            learning_rate: Learning rate of this step.
            max_grad_norm: Maximum gradient norm. If 0, the norm is only measured.
            loss: Loss of the step, a scalar on the device.

        Returns:
            Global gradient norm before clipping, a scalar on the device.
        """
        if self._fused_backward is not None:
            return self._end_fused_step(self._fused_backward.compute_grad_norm(), loss)
        gradients = [p.grad for p in self._trainable if p.grad is not None]
        if self._loss_scale is not None and gradients:
            shards = [to_local(gradient) for gradient in gradients]
            torch_internals.multiply_tensors_(
                shards, self._loss_scale.scale.reciprocal().to(shards[0].device)
            )
        self._sharded.average_gradients()
        # The norm of gradients in host memory (of offloaded parameters) is also in host memory.
        norm = compute_total_norm(gradients).to(self._device)
        if max_grad_norm > 0:
            for group in group_by_mesh(self._trainable):
                torch.nn.utils.clip_grads_with_norm_(group, max_grad_norm, norm)
        # The norm is global, so every rank detects an overflow on any rank.
        is_finite = torch.isfinite(norm) & torch.isfinite(loss)
        failed = ~is_finite if self._loss_scale is None else self._loss_scale.update(~is_finite)
        self._nonfinite_counters, is_skipped = count_update_and_decide_skip(
            self._nonfinite_counters, is_non_finite=failed, loss=loss, max_streak=self._max_streak
        )
        set_learning_rates(self._optimizer, learning_rate, self._settings)
        # A fused optimizer changes nothing if found_inf is 1. It reads found_inf on the device of the
        # parameters. This copy syncs the host only with offloading, which requires a sync for the gradients
        # anyway.
        parameter_device = next(iter(self._optimized.values())).device
        self._optimizer.found_inf = (is_skipped | ~is_finite).float().to(parameter_device)
        if self._host_copies is not None:
            self._host_copies.move_gradients_to_host()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._host_copies is not None:
            self._host_copies.copy_to_device()
        return norm

    def _end_fused_step(self, norm: Tensor, loss: Tensor) -> Tensor:
        """Count a step whose parameter updates already ran during the backward pass.

        The step is counted as non-finite if the gradient norm or the loss is not finite.

        Args:
            norm: Norm of the gradients of all ranks, a scalar on the device.
            loss: Loss of the step, a scalar on the device.

        Returns:
            ``norm``.
        """
        self._nonfinite_counters, _ = count_update_and_decide_skip(
            self._nonfinite_counters,
            is_non_finite=~(torch.isfinite(norm) & torch.isfinite(loss)),
            loss=loss,
            max_streak=self._max_streak,
        )
        return norm

    def read_update_health(self) -> UpdateHealth:
        """Read the counters of skipped updates from the device. Triggers a host-device sync.

        Raises:
            RunError: If an update was skipped because fp16 gradients overflow even at the lowest loss scale.
        """
        health = UpdateHealth.from_counters(self._nonfinite_counters.tolist(), self._max_streak)
        if health.skipped_updates and self._loss_scale is not None:
            raise self._loss_scale.build_exhausted_error()
        return health

    def find_nonfinite_gradients(self) -> list[str]:
        """Return the names of the parameters with non-finite gradient values on this rank.

        Checks only this rank's shards. Must be called before :meth:`take_optimizer_step`, which
        frees the gradients. With ``train.fused_backward``, the backward pass has already freed the
        gradients, so the result is empty. Triggers a host-device sync.
        """
        gradients = {
            name: to_local(p.grad) for name, p in self.model.named_parameters() if p.grad is not None
        }
        return [name for name, gradient in gradients.items() if not torch.isfinite(gradient).all()]

    def find_nonfinite_state(self) -> list[str]:
        """Return the names of trained parameters with non-finite weights or optimizer state on this rank.

        Triggers a host-device sync. The state of a custom optimizer is not checked, because its initial
        values may be infinite.
        """
        self._reshard_parameters()
        # The initial state of a custom optimizer may contain infinity.
        state = {} if plugins.is_plugin_name(self._settings.optimizer) else self._optimizer.state
        return find_nonfinite_names(
            (name, to_local(value))
            for name, parameter in self._optimized.items()
            for value in (parameter, *state.get(parameter, {}).values())
            if parameter.requires_grad and isinstance(value, torch.Tensor)
        )

    def get_metrics(self) -> dict[str, float]:
        """Return ``overflows`` and ``loss_scale`` in fp16, or an empty dict in other precisions.

        Triggers a host-device sync in fp16.
        """
        return {} if self._loss_scale is None else self._loss_scale.get_metrics()

    @torch.no_grad()
    def evaluate_batch(
        self, batch: Batch, metric_accumulator: MicroBatchMeasure, totals: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Run the forward pass of an evaluation micro-batch and return the updated totals.

        Args:
            batch: Micro-batch on the device.
            metric_accumulator: Function that computes the metric sums of a micro-batch.
            totals: Sums of the previous micro-batches, keyed by name. They are not modified.

        Returns:
            New totals, keyed by name.
        """
        self.model.eval()
        if self._cuda_graph_memory is not None:
            self._cuda_graph_memory.begin_pass()
        with self._sharded.get_autocast_context(), skip_mask_value_checks():
            sums = self.objective.measure_micro_batch(self._sharded.forward_module, batch, metric_accumulator)
        self.model.train()
        return compute_new_totals(totals, sums)

    def generate(
        self, prompt: Tensor, *, max_new_tokens: int, seed: int, image_columns: Batch | None = None
    ) -> Tensor:
        """Sample a continuation of ``prompt``. See :func:`sample_continuation` for arguments and result."""
        self.model.eval()
        if image_columns and isinstance(self.model, FSDPModule):
            # generate runs the image tower outside of the model's forward method, but FSDP gathers the
            # tower's parameters only in this method.
            self.model.unshard()
        with self._sharded.get_autocast_context():
            tokens = sample_continuation(
                self.model,
                prompt,
                self._device,
                max_new_tokens=max_new_tokens,
                seed=seed,
                image_columns=image_columns or {},
                is_collective=isinstance(self.model, FSDPModule),
            )
        self.model.train()
        return tokens

    # -- Weights and checkpoints -------------------------------------------------------------------------

    def _reshard_parameters(self) -> None:
        """Reshard the parameters of all FSDP modules, so that this rank's shards can be read and written.

        After a forward pass without a backward pass, the root module is still unsharded. With
        ``shard_grad_op``, all modules are still unsharded. Does nothing without FSDP.
        """
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def swap_ema_weights(self) -> None:
        """Swap the weights with their exponential moving average. Call it again to swap them back."""
        self._reshard_parameters()
        swap_weights_and_averages(self._optimizer.state.items())
        if self._host_copies is not None:
            self._host_copies.copy_to_device()

    def load_weights(self, weights: Mapping[str, ReadableTensor]) -> None:
        """Read this rank's shards of the parameters and persistent buffers in ``weights``.

        Tensors that ``weights`` does not contain keep their values.

        Args:
            weights: Lazily read tensors, keyed by the model's parameter and buffer names.
        """
        self._reshard_parameters()
        for name, tensor in get_state_tensors(self.model).items():
            if name in weights:
                optimizer_state.fill_local_shard(tensor, weights[name])
        if self._host_copies is not None:
            self._host_copies.copy_from_device(weights)

    def load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Load the weights, the optimizer state and, in fp16, the loss scale from a checkpoint.

        The loss scale keeps its value if the checkpoint was not written by an fp16 run.

        Raises:
            CheckpointError: If state is missing or has the wrong shape.
            UserError: If the file with the state of the loss scale is damaged.
        """
        stored = match_checkpoint_to_model(checkpoint, self.model)
        self.load_weights(stored.weights)
        optimizer_state.restore_optimizer_state(
            self._optimizer, self._optimized, stored, checkpoint.optimizer
        )
        if self._loss_scale is not None:
            self._loss_scale.load_state(checkpoint.root)

    def save_shards(self, folder: Path, *, background: bool) -> SaveHandle:
        """Write this rank's shards in the format of torch.distributed.checkpoint (DCP).

        All ranks have to call this method. In fp16, rank 0 also writes the state of the loss scale.

        Args:
            folder: Existing folder.
            background: Whether to copy the state to host memory and write it in a background thread.

        Returns:
            Handle of the write.
        """
        self._reshard_parameters()
        optimizer_tensors = optimizer_state.build_optimizer_state_dict(self._optimizer, self._optimized)
        state = {"model": get_checkpointed_tensors(self.model), "optim": optimizer_tensors}
        if self._loss_scale is not None and (not dist.is_initialized() or dist.get_rank() == 0):
            self._loss_scale.save_state(folder)
        return self._saver.save(state, folder, background=background)
