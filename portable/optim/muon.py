"""Muon (Jordan et al., 2024): the momentum of each matrix, orthogonalized; other parameters by AdamW.

A matrix is never orthogonalized in parts. Each one goes to one of the ranks that hold it, which sends the
result back, so that a step costs the same arithmetic on any number of ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from portable.optim.local_shards import shard_group, to_local

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

RateRule = Literal["match_rms_adamw", "original"]
COEFFICIENTS, ROUNDS, EPS = (3.4445, -4.7750, 2.0315), 5, 1e-7
"""Newton and Schulz's quintic, how often it is applied, and the least norm: those of torch's Muon."""


def orthogonalize(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest matrix with equal singular values, roughly: they come to lie between 0.7 and 1.2.

    Args:
        matrices: ``[..., rows, columns]``, each by itself. On XLA at least three dims: torch_xla computes
            ``addmm`` on the host.
        dtype: of the products.

    Returns:
        a tensor of the same shape and of type ``dtype``.
    """
    shape, (a, b, c) = matrices.shape, COEFFICIENTS
    x = matrices.to(dtype)
    if x.dim() > 3:
        x = x.reshape(-1, *shape[-2:])
    tall = shape[-2] > shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS)
    multiply_add = torch.addmm if x.dim() == 2 else torch.baddbmm
    for _ in range(ROUNDS):
        gram = x @ x.mT
        x = multiply_add(x, multiply_add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).reshape(shape)


def blend_momentum(gradient: Tensor, buffer: Tensor, momentum: float, dtype: torch.dtype) -> Tensor:
    """Return the update before it is orthogonalized, with Nesterov's momentum.

    Args:
        gradient: Gradient of a matrix, fp32.
        buffer: Its momentum, which includes the gradient already.
        momentum: Share of the buffer in the update.
        dtype: Dtype of the update.
    """
    return gradient.lerp(buffer, momentum).to(dtype)


def compute_rate_factor(rule: RateRule, shape: Sequence[int]) -> float:
    """What the learning rate of a matrix of this shape is multiplied by, as torch's ``adjust_lr_fn``."""
    rows, columns = shape[-2:]
    if rule == "original":
        return math.sqrt(max(1, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))


@dataclass(frozen=True)
class Matrix:
    """A matrix whose elements, in row-major order, are spread over ranks.

    Attributes:
        shape: rows and columns.
        sizes: elements that each rank holds, one rank after another; all of them on each if it is replicated.
        offset: of this rank's first in its flat tensor.
    """

    shape: tuple[int, int]
    sizes: tuple[int, ...]
    offset: int

    @property
    def elements(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def owner(self) -> int | None:
        """The one rank that holds all of it."""
        holding = [rank for rank, size in enumerate(self.sizes) if size]
        return holding[0] if len(holding) == 1 else None


def split_matrices(
    shape: Sequence[int], *, first: int, length: int, ranks: int, rank: int, offset: int = 0
) -> list[Matrix]:
    """The matrices of a parameter that is cut into flat parts of equal length.

    Args:
        shape: of the parameter, ``[..., rows, columns]``.
        first: the element that rank 0's part begins with; negative if it begins with something else.
        length: of each part; elements past the parameter's end are padding.
        ranks: how many there are.
        rank: this one.
        offset: of this rank's part in its flat tensor.
    """
    rows, columns = shape[-2:]
    size = rows * columns
    starts = [first + r * length for r in range(ranks)]
    matrices = []
    for begin in range(0, math.prod(shape), size):
        sizes = [max(0, min(begin + size, start + length) - max(begin, start)) for start in starts]
        within = max(begin, starts[rank]) - starts[rank]
        matrices.append(Matrix((rows, columns), tuple(sizes), offset + within))
    return matrices


@dataclass(frozen=True)
class _Part:
    """This rank's elements of a matrix, flat; they share memory with parameter, gradient and momentum."""

    matrix: Matrix
    parameter: Tensor
    gradient: Tensor
    momentum: Tensor


class Muon(torch.optim.Optimizer):
    """Muon for the groups with ``matrices``, AdamW for the others.

    The state of a matrix is ``momentum_buffer``, sharded like the parameter; that of others is AdamW's. In a
    tensor of more dims the last two are a matrix. Updates equal those of ``torch.optim.Muon`` and
    ``torch.optim.AdamW``.

    Args:
        groups: as for torch's optimizers, with the key ``matrices``, a bool.
        lr, betas, eps: as for ``torch.optim.AdamW``.
        momentum: as for ``torch.optim.Muon``, with ``nesterov``.
        rate_rule: its ``adjust_lr_fn``.
        compute: the type of products and of what ranks exchange.
    """

    found_inf: Tensor | None = None
    """An fp32 scalar on the parameters' device. If it is 1, the step is a no-op."""
    device: torch.device | None = None
    """Where to orthogonalize, if the parameters are elsewhere."""
    flat: Mapping[Tensor, Sequence[Matrix]] | None = None
    """The matrices in each flat parameter, for an engine that concatenates parts of several."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        momentum: float,
        rate_rule: RateRule,
        compute: torch.dtype = torch.bfloat16,
    ) -> None:
        self._rate_rule: RateRule = rate_rule
        self._compute = compute
        defaults = {"lr": lr, "weight_decay": 0.0, "matrices": False}
        super().__init__([{**get_group_settings(g, betas, eps, momentum), **g} for g in groups], defaults)

    def build_initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state of ``parameter`` before the first step, sharded."""
        (group,) = (g for g in self.param_groups if any(p is parameter for p in g["params"]))
        return self._build_state(parameter, group)

    def _build_state(self, parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        if group["matrices"]:
            return {"momentum_buffer": torch.zeros_like(parameter)}
        return {
            "step": torch.zeros((), device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            for parameter in trained:
                if not self.state[parameter]:
                    self.state[parameter] = self._build_state(parameter, group)
            if trained and group["matrices"]:
                self._step_muon(trained, group)
            elif trained:
                self._step_adamw(trained, group)

    def _step_adamw(self, trained: list[Any], group: dict[str, Any]) -> None:
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
        ranks = _ShardRanks.from_parameter(trained[0], flat=self.flat is not None)
        parts = [
            _Part(
                matrix,
                *(
                    to_local(tensor).view(-1)[matrix.offset :][: matrix.sizes[ranks.rank]]
                    for tensor in (parameter, parameter.grad, self.state[parameter]["momentum_buffer"])
                ),
            )
            for parameter in trained
            for matrix in self._get_matrices(parameter, ranks)
        ]
        for part in parts:
            if part.matrix.owner == ranks.rank:
                update = orthogonalize(self._update(part, group).view(part.matrix.shape), self._compute)
                self._move(part, update, group)
        # Of one size in a round, so that no rank waits for another.
        shared = sorted((p for p in parts if p.matrix.owner is None), key=lambda p: -p.matrix.elements)
        for start in range(0, len(shared), ranks.count):
            turn = shared[start : start + ranks.count]
            sent = [self._update(part, group) for part in turn]
            for part, update in zip(turn, ranks.orthogonalize_shared(sent, turn, self._compute), strict=True):
                self._move(part, update, group)

    def _get_matrices(self, parameter: Tensor, ranks: _ShardRanks) -> Sequence[Matrix]:
        if self.flat is not None:
            return self.flat[parameter]
        shape, elements = parameter.shape, parameter.numel()
        if ranks.replicated:
            alone = split_matrices(shape, first=0, length=elements, ranks=1, rank=0)
            return [Matrix(m.shape, m.sizes * ranks.count, m.offset) for m in alone]
        row = elements // max(1, shape[0])
        length = -(-shape[0] // ranks.count) * row  # FSDP2 gives each rank as many rows, the last ones fewer
        return split_matrices(shape, first=0, length=length, ranks=ranks.count, rank=ranks.rank)

    def _update(self, part: _Part, group: dict[str, Any]) -> Tensor:
        """Advance the momentum; returns the update before it is orthogonalized, where and as it is sent."""
        momentum = group["momentum"]
        fresh: Tensor | float = 1 - momentum
        if self.found_inf is not None:
            part.gradient.masked_fill_(self.found_inf > 0, 0.0)
            fresh = (1 - self.found_inf) * fresh
        part.momentum.lerp_(part.gradient, fresh)
        update = blend_momentum(part.gradient, part.momentum, momentum, self._compute)
        return update.to(device=self.device or part.parameter.device)

    def _move(self, part: _Part, update: Tensor, group: dict[str, Any]) -> None:
        rate = group["lr"] * compute_rate_factor(self._rate_rule, part.matrix.shape)
        decay = group["lr"] * group["weight_decay"]
        step = update.reshape(-1).to(part.parameter.device)
        if self.found_inf is None:
            part.parameter.mul_(1 - decay).add_(step, alpha=-rate)
        else:
            allowed = 1 - self.found_inf
            part.parameter.mul_(1 - allowed * decay).sub_(step * (allowed * rate))


def get_group_settings(
    group: Mapping[str, Any], betas: tuple[float, float], eps: float, momentum: float
) -> dict[str, Any]:
    """The settings of a group, by torch's names: Muon's or AdamW's."""
    if group["matrices"]:
        return {"momentum": momentum, "nesterov": True}
    return {"betas": betas, "eps": eps}


@dataclass(frozen=True)
class _ShardRanks:
    """The ranks that a parameter is spread over, or replicated on."""

    group: dist.ProcessGroup | None
    count: int
    rank: int
    replicated: bool

    @classmethod
    def from_parameter(cls, parameter: Tensor, *, flat: bool) -> _ShardRanks:
        if isinstance(parameter, DTensor):
            group = shard_group(parameter)
            return cls(group, dist.get_world_size(group), dist.get_rank(group), replicated=False)
        if dist.is_initialized() and dist.get_world_size() > 1:
            return cls(None, dist.get_world_size(), dist.get_rank(), replicated=not flat)
        return cls(None, 1, 0, replicated=False)

    def orthogonalize_shared(
        self, updates: list[Tensor], parts: list[_Part], compute: torch.dtype
    ) -> Iterator[Tensor]:
        """This rank's elements of each result; the matrix at place ``r`` is orthogonalized by rank ``r``."""
        matrix = parts[self.rank].matrix if self.rank < len(parts) else None
        if self.replicated:
            if matrix is not None:
                updates[self.rank] = orthogonalize(updates[self.rank].view(matrix.shape), compute).reshape(-1)
            waiting = [dist.broadcast(u, src=place, async_op=True) for place, u in enumerate(updates)]
            for work in waiting:
                if work is not None:
                    work.wait()
            yield from updates
            return
        out = [part.matrix.sizes[self.rank] for part in parts] + [0] * (self.count - len(parts))
        come = [0] * self.count if matrix is None else list(matrix.sizes)
        sent = torch.cat(updates)
        gathered = sent.new_empty(sum(come))
        dist.all_to_all_single(gathered, sent, come, out, group=self.group)
        if matrix is not None:
            gathered = orthogonalize(gathered.view(matrix.shape), compute).reshape(-1)
        back = torch.empty_like(sent)
        dist.all_to_all_single(back, gathered, out, come, group=self.group)
        yield from back.split(out[: len(parts)])
