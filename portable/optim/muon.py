"""Muon (Jordan et al., 2024): orthogonalized momentum for matrices, and AdamW for other parameters.

Orthogonalization needs complete matrices. Each sharded matrix is therefore gathered on one rank,
which orthogonalizes it and sends the shards of the result back. Different matrices are gathered on
different ranks, so the total arithmetic of a step does not depend on the number of ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from portable.optim.local_shards import get_fsdp_sharding, get_shard_group, group_by_mesh, to_local

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

RateRule = Literal["match_rms_adamw", "original"]
NEWTON_SCHULZ_COEFFICIENTS, NEWTON_SCHULZ_ROUNDS, MIN_NORM = (3.4445, -4.7750, 2.0315), 5, 1e-7
"""Coefficients and number of rounds of the quintic Newton-Schulz iteration, and the smallest norm to divide
by. The values are the defaults of ``torch.optim.Muon``.
"""


def orthogonalize_matrices(matrices: Tensor, compute_dtype: torch.dtype) -> Tensor:
    """Approximate the orthogonal matrix nearest to each matrix with a Newton-Schulz iteration.

    The singular values of the result are roughly between 0.7 and 1.2.

    Args:
        matrices: Matrices ``[..., rows, columns]``, which are orthogonalized separately. On XLA,
            pass at least three dimensions. A tensor with two dimensions is multiplied with
            ``addmm``, which XLA runs on the host.
        compute_dtype: Dtype of the matrix products.

    Returns:
        Tensor of the same shape, in ``compute_dtype``.
    """
    shape, (a, b, c) = matrices.shape, NEWTON_SCHULZ_COEFFICIENTS
    x = matrices.to(compute_dtype)
    if x.dim() > 3:
        x = x.reshape(-1, *shape[-2:])
    tall = shape[-2] > shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=MIN_NORM)
    multiply_add = torch.addmm if x.dim() == 2 else torch.baddbmm
    for _ in range(NEWTON_SCHULZ_ROUNDS):
        gram = x @ x.mT
        x = multiply_add(x, multiply_add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).reshape(shape)


def compute_nesterov_update(gradient: Tensor, buffer: Tensor, momentum: float, dtype: torch.dtype) -> Tensor:
    """Compute the Nesterov momentum update of a matrix, before orthogonalization.

    Args:
        gradient: Gradient of a matrix, fp32.
        buffer: Momentum buffer, which already includes the gradient.
        momentum: Weight of the buffer in the update.
        dtype: Dtype of the update.
    """
    return gradient.lerp(buffer, momentum).to(dtype)


def compute_learning_rate_factor(rule: RateRule, shape: Sequence[int]) -> float:
    """Return the factor by which to multiply the learning rate for a matrix of the given shape.

    The rules are the same as for ``adjust_lr_fn`` in ``torch.optim.Muon``.

    Args:
        rule: Name of the rule, as in torch.
        shape: Shape of the matrix ``[..., rows, columns]``.
    """
    rows, columns = shape[-2:]
    if rule == "original":
        return math.sqrt(max(1, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))


@dataclass(frozen=True)
class ShardedMatrix:
    """Layout of a matrix whose elements, in row-major order, are split over ranks or replicated.

    Attributes:
        shape: Numbers of rows and columns.
        elements_per_rank: Number of elements on each rank, in rank order. If the matrix is
            replicated, every rank has all elements.
        local_offset: Index in this rank's flat local tensor at which the elements of the matrix
            begin. A local tensor may contain several matrices.
    """

    shape: tuple[int, int]
    elements_per_rank: tuple[int, ...]
    local_offset: int

    @property
    def num_elements(self) -> int:
        """Number of elements of the matrix."""
        return self.shape[0] * self.shape[1]

    @property
    def owner_rank(self) -> int | None:
        """Rank that has all elements of the matrix. None if several ranks have elements."""
        holding = [rank for rank, size in enumerate(self.elements_per_rank) if size]
        return holding[0] if len(holding) == 1 else None


def list_sharded_matrices(
    shape: Sequence[int],
    *,
    first_element: int,
    elements_per_part: int,
    num_ranks: int,
    rank: int,
    local_offset: int = 0,
) -> list[ShardedMatrix]:
    """List the matrices of a parameter that is sharded into flat parts of equal length.

    Args:
        shape: Shape of the parameter, ``[..., rows, columns]``.
        first_element: Index of rank 0's first element in the parameter. Negative if rank 0's part
            begins with elements of other parameters.
        elements_per_part: Number of elements on each rank. Elements after the end of the parameter are
            padding.
        num_ranks: Number of ranks.
        rank: Rank of this process.
        local_offset: Offset of this rank's part in the flat local tensor.

    Returns:
        The matrices, in the order of the parameter's leading dimensions.
    """
    rows, columns = shape[-2:]
    matrix_elements = rows * columns
    starts = [first_element + r * elements_per_part for r in range(num_ranks)]
    matrices = []
    for matrix_start in range(0, math.prod(shape), matrix_elements):
        sizes = [
            max(0, min(matrix_start + matrix_elements, start + elements_per_part) - max(matrix_start, start))
            for start in starts
        ]
        start = max(matrix_start, starts[rank]) - starts[rank]
        matrices.append(ShardedMatrix((rows, columns), tuple(sizes), local_offset + start))
    return matrices


@dataclass(frozen=True)
class _MatrixShard:
    """This rank's elements of a matrix, as flat views of the parameter, its gradient and its momentum."""

    matrix: ShardedMatrix
    parameter: Tensor
    gradient: Tensor
    momentum: Tensor


class Muon(torch.optim.Optimizer):
    """Optimizer that applies Muon to parameter groups with ``matrices: True``, and AdamW to others.

    The state of a matrix is ``momentum_buffer``, sharded like the parameter. Other parameters have
    the state of AdamW. A parameter with more than two dimensions is treated as a stack of matrices,
    with the rows and columns in the last two dimensions. Updates equal the updates of
    ``torch.optim.Muon`` and ``torch.optim.AdamW``.

    Args:
        groups: Parameter groups, as for torch's optimizers, with an additional bool ``matrices``.
        lr: Learning rate.
        betas: Decay rates of AdamW's moments.
        eps: Term added to the denominator of AdamW's updates.
        momentum: Nesterov momentum of Muon.
        rate_rule: Rule that adapts the learning rate to the shape of a matrix: ``match_rms_adamw``
            or ``original``, as for ``adjust_lr_fn`` of ``torch.optim.Muon``.
        compute_dtype: Dtype of the matrix products, and of the tensors that ranks exchange.
    """

    found_inf: Tensor | None = None
    """Flag on the device of the parameters, an fp32 scalar. If it is 1, the step does not change anything."""
    device: torch.device | None = None
    """Device on which matrices are orthogonalized. None for the device of the parameters."""
    flat_matrices: Mapping[Tensor, Sequence[ShardedMatrix]] | None = None
    """Matrices in each flat parameter, for engines that concatenate shards of several parameters, such as
    ZeRO. None if parameters have their own shapes.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        momentum: float,
        rate_rule: RateRule,
        compute_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self._rate_rule: RateRule = rate_rule
        self._compute_dtype = compute_dtype
        defaults = {"lr": lr, "weight_decay": 0.0, "matrices": False}
        super().__init__([{**build_group_settings(g, betas, eps, momentum), **g} for g in groups], defaults)

    def build_initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the initial state of ``parameter``.

        Momentum and moments are sharded like the parameter. The step count of AdamW is a plain
        scalar on its device.
        """
        (group,) = (g for g in self.param_groups if any(p is parameter for p in g["params"]))
        return self._build_state(parameter, group)

    def _build_state(self, parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the initial state of a parameter.

        A matrix has a momentum buffer. Other parameters have AdamW's state: a step count and two moments.
        """
        if group["matrices"]:
            return {"momentum_buffer": torch.zeros_like(parameter)}
        return {
            "step": torch.zeros((), device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient, unless ``found_inf`` is 1.

        All ranks have to call this method. A parameter's state is created at its first step.
        """
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            for parameter in trained:
                if not self.state[parameter]:
                    self.state[parameter] = self._build_state(parameter, group)
            if trained and not group["matrices"]:
                self._step_adamw(trained, group)
                continue
            for parameters in group_by_mesh(trained):
                self._step_muon(parameters, group)

    def _step_adamw(self, trained: list[Any], group: dict[str, Any]) -> None:
        """Update the local shards of parameters with torch's fused AdamW."""
        states = [self.state[p] for p in trained]
        beta1, beta2 = group["betas"]
        adamw(
            [to_local(p) for p in trained],
            [to_local(p.grad) for p in trained],
            [to_local(state["exp_avg"]) for state in states],
            [to_local(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            found_inf=self.found_inf,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _step_muon(self, trained: list[Any], group: dict[str, Any]) -> None:
        """Apply Muon's update to the matrices of a group.

        If a matrix is entirely on one rank, that rank updates it. The other matrices are processed
        in rounds. In each round, every rank gathers and orthogonalizes one matrix. All ranks have
        to call this method.

        Args:
            trained: Parameters that have a gradient. All belong to ``group`` and have the same
                device mesh.
            group: Parameter group.
        """
        ranks = _ShardRanks.from_parameter(trained[0], flat=self.flat_matrices is not None)
        parts = [
            _MatrixShard(
                matrix,
                *(
                    to_local(tensor).view(-1)[matrix.local_offset :][: matrix.elements_per_rank[ranks.rank]]
                    for tensor in (parameter, parameter.grad, self.state[parameter]["momentum_buffer"])
                ),
            )
            for parameter in trained
            for matrix in self._list_matrices(parameter, ranks)
        ]
        for part in parts:
            if part.matrix.owner_rank == ranks.rank:
                update = orthogonalize_matrices(
                    self._advance_momentum(part, group).view(part.matrix.shape), self._compute_dtype
                )
                self._apply_update(part, update, group)
        # Sort by size, so that matrices of similar size share a round and no rank waits long for another.
        shared = sorted(
            (p for p in parts if p.matrix.owner_rank is None), key=lambda p: -p.matrix.num_elements
        )
        for start in range(0, len(shared), ranks.num_ranks):
            round_shards = shared[start : start + ranks.num_ranks]
            sent = [self._advance_momentum(part, group) for part in round_shards]
            for part, update in zip(
                round_shards, ranks.orthogonalize_shared(sent, round_shards, self._compute_dtype), strict=True
            ):
                self._apply_update(part, update, group)

    def _list_matrices(self, parameter: Tensor, ranks: _ShardRanks) -> Sequence[ShardedMatrix]:
        """List the matrices of a parameter, with the number of elements that each rank stores.

        A parameter may contain several matrices, for example one per expert. It is stored in one of
        three ways: as a flat ZeRO partition (:attr:`flat_matrices`), as a replica on each rank, or
        as a shard of FSDP2. FSDP2 usually shards dimension 0. For a stack with fewer experts than
        ranks, it may shard dimension 1, so that each rank has some rows of every matrix.

        Args:
            parameter: Parameter of the optimizer.
            ranks: Ranks that together hold the parameter.
        """
        if self.flat_matrices is not None:
            return self.flat_matrices[parameter]
        (shape, dim), elements = get_fsdp_sharding(parameter), parameter.numel()
        if ranks.replicated:
            matrices = list_sharded_matrices(
                shape, first_element=0, elements_per_part=elements, num_ranks=1, rank=0
            )
            return [
                ShardedMatrix(m.shape, m.elements_per_rank * ranks.num_ranks, m.local_offset)
                for m in matrices
            ]
        if dim == 1:  # each rank has the same number of rows of each matrix
            rows, columns = shape[1:]
            size = rows * columns // ranks.num_ranks
            return [
                ShardedMatrix((rows, columns), (size,) * ranks.num_ranks, index * size)
                for index in range(shape[0])
            ]
        row = elements // max(1, parameter.shape[0])
        # FSDP2 gives each rank the same number of rows, except that the last ranks may have fewer.
        length = -(-shape[0] // ranks.num_ranks) * row
        return list_sharded_matrices(
            shape, first_element=0, elements_per_part=length, num_ranks=ranks.num_ranks, rank=ranks.rank
        )

    def _advance_momentum(self, part: _MatrixShard, group: dict[str, Any]) -> Tensor:
        """Update the momentum with the gradient, unless ``found_inf`` is 1.

        If ``found_inf`` is 1, the gradient is set to 0.

        Returns:
            This rank's elements of the update before orthogonalization, as a 1-D tensor in the
            compute dtype, on the device that computes the orthogonalization.
        """
        momentum = group["momentum"]
        new_gradient_share: Tensor | float = 1 - momentum
        if self.found_inf is not None:
            part.gradient.masked_fill_(self.found_inf > 0, 0.0)
            new_gradient_share = (1 - self.found_inf) * new_gradient_share
        part.momentum.lerp_(part.gradient, new_gradient_share)
        update = compute_nesterov_update(part.gradient, part.momentum, momentum, self._compute_dtype)
        return update.to(device=self.device or part.parameter.device)

    def _apply_update(self, part: _MatrixShard, update: Tensor, group: dict[str, Any]) -> None:
        """Apply weight decay and an update to this rank's elements of a matrix.

        Does nothing if the attribute ``found_inf``, a flag on the device, is 1.

        Args:
            part: This rank's elements of the matrix. Modified in place.
            update: Orthogonalized update of these elements, of any shape.
            group: Parameter group.
        """
        rate = group["lr"] * compute_learning_rate_factor(self._rate_rule, part.matrix.shape)
        decay = group["lr"] * group["weight_decay"]
        step = update.reshape(-1).to(part.parameter.device)
        if self.found_inf is None:
            part.parameter.mul_(1 - decay).add_(step, alpha=-rate)
        else:
            allowed = 1 - self.found_inf
            part.parameter.mul_(1 - allowed * decay).sub_(step * (allowed * rate))


def build_group_settings(
    group: Mapping[str, Any], betas: tuple[float, float], eps: float, momentum: float
) -> dict[str, Any]:
    """Return the hyperparameters of a parameter group, keyed by the names in torch's optimizers.

    Args:
        group: Parameter group. If its entry ``matrices`` is True, Muon updates the group.
            Otherwise, AdamW does.
        betas: Decay rates of AdamW's moments.
        eps: Term added to the denominator of AdamW's updates.
        momentum: Nesterov momentum of Muon.
    """
    if group["matrices"]:
        return {"momentum": momentum, "nesterov": True}
    return {"betas": betas, "eps": eps}


@dataclass(frozen=True)
class _ShardRanks:
    """Ranks over which a parameter is sharded or replicated.

    Attributes:
        group: Process group of these ranks. None for the default group.
        num_ranks: Number of ranks.
        rank: Index of this process in the group.
        replicated: Whether there are several ranks and each has a complete copy of the parameter.
            False if each rank holds one shard, or if there is only one rank.
    """

    group: dist.ProcessGroup | None
    num_ranks: int
    rank: int
    replicated: bool

    @classmethod
    def from_parameter(cls, parameter: Tensor, *, flat: bool) -> _ShardRanks:
        """Find the ranks over which a parameter is sharded or replicated.

        A DTensor is sharded over the ranks of its sharding group. A flat ZeRO partition is sharded over all
        ranks. Any other parameter is replicated over all ranks.

        Args:
            parameter: Parameter of the optimizer.
            flat: Whether the parameter is a flat partition of ZeRO.
        """
        if isinstance(parameter, DTensor):
            group = get_shard_group(parameter)
            return cls(group, dist.get_world_size(group), dist.get_rank(group), replicated=False)
        if dist.is_initialized() and dist.get_world_size() > 1:
            return cls(None, dist.get_world_size(), dist.get_rank(), replicated=not flat)
        return cls(None, 1, 0, replicated=False)

    def orthogonalize_shared(
        self, updates: list[Tensor], shards: list[_MatrixShard], compute_dtype: torch.dtype
    ) -> Iterator[Tensor]:
        """Orthogonalize up to one matrix per rank, and yield this rank's elements of each result.

        Rank ``r`` orthogonalizes the matrix at index ``r``. There are two cases:

        * Sharded matrices: rank ``r`` gathers the matrix from all ranks, orthogonalizes it, and
          sends each rank its elements of the result.
        * Replicated matrices: rank ``r`` already has the matrix. It orthogonalizes the matrix and
          broadcasts the complete result. The results overwrite ``updates``.

        All ranks have to call this method and consume the iterator, because it runs collectives.

        Args:
            updates: Values to orthogonalize. Each 1-D tensor contains this rank's elements of one
                matrix.
            shards: Shards of the same matrices, in the same order. They provide each matrix's shape
                and the number of its elements on each rank.
            compute_dtype: Dtype of the matrix products.
        """
        matrix = shards[self.rank].matrix if self.rank < len(shards) else None
        if self.replicated:
            if matrix is not None:
                updates[self.rank] = orthogonalize_matrices(
                    updates[self.rank].view(matrix.shape), compute_dtype
                ).reshape(-1)
            waiting = [
                dist.broadcast(u, src=source_rank, async_op=True) for source_rank, u in enumerate(updates)
            ]
            for work in waiting:
                if work is not None:
                    work.wait()
            yield from updates
            return
        send_sizes = [part.matrix.elements_per_rank[self.rank] for part in shards] + [0] * (
            self.num_ranks - len(shards)
        )
        receive_sizes = [0] * self.num_ranks if matrix is None else list(matrix.elements_per_rank)
        sent = torch.cat(updates)
        gathered = sent.new_empty(sum(receive_sizes))
        dist.all_to_all_single(gathered, sent, receive_sizes, send_sizes, group=self.group)
        if matrix is not None:
            gathered = orthogonalize_matrices(gathered.view(matrix.shape), compute_dtype).reshape(-1)
        returned = torch.empty_like(sent)
        dist.all_to_all_single(returned, gathered, send_sizes, receive_sizes, group=self.group)
        yield from returned.split(send_sizes[: len(shards)])
