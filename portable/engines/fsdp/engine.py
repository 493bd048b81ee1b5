"""A model in training under DDP or FSDP2."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from portable.checkpoint.match_to_model import stored_state
from portable.engines.compiling import CAPTURING, CapturedMemory
from portable.engines.fsdp import optimizer_state
from portable.engines.fsdp.saving import Saver
from portable.engines.fsdp.sharding import shard
from portable.engines.generation import continue_text
from portable.engines.machine import COMPUTE_DTYPES
from portable.model.chunked_loss import chunked_head
from portable.model.groups import groups_of
from portable.model.loss import Objective, added, shares
from portable.model.parameters import embeddings, state_tensors, stored_tensors
from portable.optim.average import exchange
from portable.optim.non_finite import NEW_COUNTERS, Health, allowed_streak, count_update
from portable.optim.optimizers import build_optimizer, set_rates
from portable.optim.sharded import local
from portable.private import of_torch
from portable.private.of_transformers import no_value_checks

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import ExitStack
    from pathlib import Path

    from torch import Tensor, nn

    from converters import Checkpoint
    from portable.backend import Batch, SaveHandle
    from portable.config import RunConfig
    from portable.engines.fsdp.device_loss_scale import DeviceScaler
    from portable.engines.fsdp.offload import HostCopies
    from portable.engines.fsdp.sharding import ShardedModel
    from portable.engines.machine import Machine, MeasuredEngine
    from portable.model.chunked_loss import ChunkedHead
    from portable.model.loss import MetricAccumulator
    from portable.model.tensors import ReadableTensor
    from portable.optim.optimizers import Optimizer


def prepare(model: nn.Module, config: RunConfig, machine: Machine, at_stop: ExitStack) -> MeasuredEngine:
    """See :class:`portable.engines.machine.EngineModule`."""
    if config.context_parallel_size > 1:
        from portable.engines.shared_sequences import share_sequences

        share_sequences(model, config, at_stop)
    head = chunked_head(model, config.memory.loss_chunk_tokens)
    sharded = shard(model, config, machine)
    at_stop.callback(sharded.release_process_group)
    return TorchEngine(sharded, head, config, machine.device)


class TorchEngine:
    """Implements :class:`portable.backend.Engine`; see there for the contracts."""

    def __init__(
        self, sharded: ShardedModel, head: ChunkedHead | None, config: RunConfig, device: torch.device
    ) -> None:
        self.model: nn.Module = sharded.model
        self._settings = config.train
        self._head = head
        self.objective = Objective.of(self.model, config, head)
        self._sharded = sharded
        self._device = device
        parameters = dict(self.model.named_parameters())
        memory = config.memory
        # Offloaded parameters need no copies: their optimizer runs in host memory anyway.
        copied = memory.offload_optimizer == "cpu" and memory.offload_params == "none"
        self._host: HostCopies | None = None
        self._scaler: DeviceScaler | None = None
        if copied:
            from portable.engines.fsdp.offload import HostCopies

            self._host = HostCopies(parameters)
        self._trained = parameters if self._host is None else self._host.copies
        tables = set(embeddings(self.model))
        self._optimizer: Optimizer = build_optimizer(
            config.train,
            self._trained,
            groups_of(self.model, config.train),
            embeddings={p for name, p in self._trained.items() if parameters[name] in tables},
            compute=COMPUTE_DTYPES[config.precision],
        )
        if config.train.optimizer == "muon":
            from portable.optim.muon import Muon

            assert isinstance(self._optimizer, Muon)
            self._optimizer.device = device
        original = {} if self._host is None else self._host.original()
        self._parameters: list[nn.Parameter] = [
            original.get(p, p) for group in self._optimizer.param_groups for p in group["params"]
        ]
        captures = config.compile and config.compile_mode in CAPTURING
        self._captured = CapturedMemory() if captures else None
        self._saver = Saver()
        if config.precision == "fp16":
            from portable.engines.fsdp.device_loss_scale import DeviceScaler

            self._scaler = DeviceScaler(config.fp16, device)
        # With dynamic loss scaling an overflow is no failure; a failure then ends the run.
        self._limit = allowed_streak(config.train.on_non_finite) if self._scaler is None else 1
        self._account = torch.tensor(
            NEW_COUNTERS, device=device
        )  # read when logging only, to avoid a host sync

    def accumulate(self, batch: Batch, valid: Tensor, *, last: bool) -> Tensor:
        if self._captured is not None:
            self._captured.begin_pass()
        with self._sharded.accumulating(last=last):
            with self._sharded.autocast(), no_value_checks():
                loss, numbers = self.objective(self._sharded.forward, batch, valid)
            scaled = loss * self._sharded.averaging
            (scaled if self._scaler is None else scaled * self._scaler.scale).backward()
        if self._captured is not None:
            self._captured.keep_gradients(self._parameters, last=last)
        return shares(loss, numbers)

    def update(self, learning_rate: float, max_norm: float, loss: Tensor) -> Tensor:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if self._scaler is not None and gradients:
            parts = [local(gradient) for gradient in gradients]
            of_torch.scale_(parts, self._scaler.scale.reciprocal().to(parts[0].device))
        self._sharded.average_gradients()
        norm = torch.nn.utils.get_total_norm(gradients)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        norm = norm.to(self._device)  # gradients of offloaded parameters are in host memory
        if max_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, max_norm, norm)
        # The norm is global, so all ranks see any rank's overflow.
        finite = torch.isfinite(norm) & torch.isfinite(loss)
        bad = ~finite if self._scaler is None else self._scaler.update(~finite)
        self._account, left_out = count_update(self._account, bad=bad, loss=loss, limit=self._limit)
        set_rates(self._optimizer, learning_rate, self._settings)
        # If found_inf is 1 the fused optimizers change nothing. They read it on the parameters' device, so
        # that only offloading syncs, which it does for the gradients anyway.
        place = next(iter(self._trained.values())).device
        self._optimizer.found_inf = (left_out | ~finite).float().to(place)
        if self._host is not None:
            self._host.fetch_gradients()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._host is not None:
            self._host.copy_back()
        return norm

    def health(self) -> Health:
        health = Health.of(self._account.tolist(), self._limit)
        if health.skipped_updates and self._scaler is not None:
            raise self._scaler.exhausted()
        return health

    def nonfinite_gradients(self) -> list[str]:
        gradients = {name: local(p.grad) for name, p in self.model.named_parameters() if p.grad is not None}
        return [name for name, gradient in gradients.items() if not torch.isfinite(gradient).all()]

    def metrics(self) -> dict[str, float]:
        """See :class:`portable.engines.machine.MeasuredEngine`."""
        return {} if self._scaler is None else self._scaler.metrics()

    @torch.no_grad()
    def evaluate(
        self, batch: Batch, measure: MetricAccumulator, totals: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        self.model.eval()
        if self._captured is not None:
            self._captured.begin_pass()
        with self._sharded.autocast(), no_value_checks():
            sums = self.objective.evaluated(self._sharded.forward, batch, measure)
        self.model.train()
        return added(totals, sums)

    def generate(self, prompt: Tensor, *, max_new_tokens: int, seed: int) -> Tensor:
        self.model.eval()
        with self._sharded.autocast():
            tokens = continue_text(
                self.model, prompt, self._device, max_new_tokens=max_new_tokens, seed=seed, collective=False
            )
        self.model.train()
        return tokens

    # -- weights and checkpoints -------------------------------------------------------------------------

    def _reshard(self) -> None:
        """Make the model's parameters this rank's shards again.

        A forward without a backward leaves parameters unsharded, and their shards without storage, under
        ``shard_grad_op`` and in the root module.
        """
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def swap_ema_weights(self) -> None:
        self._reshard()
        exchange(self._optimizer.state.items())
        if self._host is not None:
            self._host.copy_back()

    def load_weights(self, weights: Mapping[str, ReadableTensor]) -> None:
        self._reshard()
        for name, tensor in state_tensors(self.model).items():
            if name in weights:
                optimizer_state.fill_shard(tensor, weights[name])
        if self._host is not None:
            self._host.refresh(weights)

    def load(self, checkpoint: Checkpoint) -> None:
        stored = stored_state(checkpoint, self.model)
        self.load_weights(stored.weights)
        optimizer_state.restore(self._optimizer, self._trained, stored, checkpoint.optimizer)
        if self._scaler is not None:
            self._scaler.load(checkpoint.root)

    def save(self, folder: Path, *, background: bool) -> SaveHandle:
        self._reshard()
        optimizer = optimizer_state.to_store(self._optimizer, self._trained)
        state = {"model": stored_tensors(self.model), "optim": optimizer}
        if self._scaler is not None and (not dist.is_initialized() or dist.get_rank() == 0):
            self._scaler.save(folder)
        return self._saver.save(state, folder, background=background)
