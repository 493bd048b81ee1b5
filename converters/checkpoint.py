"""The logical view that every checkpoint format opens into."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from converters.errors import blame
from converters.names.ties import resolve_ties

if TYPE_CHECKING:
    from collections.abc import Callable

    from converters.storage.path_or_url import Place
    from converters.tensors.tensor import Tensor

Scalar = int | float | bool
ParamGroups = list[dict[str, Any]]
Aliases = Mapping[str, str]
"""Tied alias -> the name that owns the values."""


class OptimizerState:
    """Optimizer state by parameter name.

    Attributes:
        state: parameter name -> state name -> `Tensor` or number. The state names are whatever the optimizer
            keeps (`exp_avg`, `exp_avg_sq`, `step`, a factored optimizer's rows and columns, ...); a tensor
            has the full shape of the state, whatever the world size that wrote it.
    """

    def __init__(
        self,
        state: Mapping[str, Mapping[str, Tensor | Scalar]],
        param_groups: ParamGroups | Callable[[], ParamGroups],
    ) -> None:
        self.state = state
        self._param_groups = param_groups

    @property
    def param_groups(self) -> ParamGroups:
        """One dict a group: `params` (a list of names) and the hyperparameters (`lr`, `betas`, ...).

        Read from disk at the first use, since some formats keep each value in a file item of its own.
        """
        if callable(self._param_groups):
            self._param_groups = self._param_groups()
        return self._param_groups


class Checkpoint:
    """One checkpoint, whatever wrote it. Nothing but headers is in memory; tensors read what they are asked.

    Attributes:
        format: the name of the format, for example `"dcp"` or `"safetensors"`.
        root: the folder (or file) that was opened.
        metadata: what else the format tells (`step`, `world_size`, ...), as plain Python values.
        companions: `config.json`, tokenizer files and the like found beside the shards: file name -> path.

    A format that has to work to name its optimizer state passes a function of `aliases` for `optimizer`,
    called at the first use, so that the model can be read where the optimizer cannot; `counters` are found in
    the same way. (Neither may know the checkpoint: its files close as soon as nobody has it any more.)
    """

    def __init__(
        self,
        *,
        format: str,
        root: Place,
        tensors: Mapping[str, Tensor],
        aliases: Aliases | None = None,
        optimizer: OptimizerState | Callable[[Aliases], OptimizerState | None] | None = None,
        metadata: Mapping[str, Any] | None = None,
        companions: Mapping[str, Place] | None = None,
        counters: Callable[[], Mapping[str, Scalar]] | None = None,
    ) -> None:
        self.format = format
        self.root = root
        self.metadata: Mapping[str, Any] = dict(metadata or {})
        self.companions: Mapping[str, Place] = dict(companions or {})
        self._stored = tensors
        self._known_aliases = dict(aliases or {})
        self._optimizer = optimizer
        self._counters = counters
        self._named_by_owner = False
        self._resolved: tuple[dict[str, Tensor], dict[str, str]] | None = None

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Parameters and persistent buffers by plain Hugging Face name, tied aliases left out."""
        return self._resolve()[0]

    @property
    def aliases(self) -> Mapping[str, str]:
        """Tied alias -> the name in `tensors` that owns the values."""
        return self._resolve()[1]

    @property
    def optimizer(self) -> OptimizerState | None:
        """The optimizer state, or None where the checkpoint holds none.

        Raises:
            CheckpointError: there is one, but which state belongs to which parameter cannot be told.
        """
        if callable(self._optimizer):
            self._optimizer = self._optimizer(self.aliases)
        if not self._named_by_owner:
            self._optimizer, self._named_by_owner = _by_owner(self._optimizer, self.aliases), True
        return self._optimizer

    @cached_property
    def counters(self) -> Mapping[str, Scalar]:
        """What the program that wrote it had counted, by that program's own names, as far as the shards tell.

        DeepSpeed's `global_steps`, `global_samples` and `skipped_steps`; what torchtitan keeps under
        `train_state` and `lr_scheduler` (`train_state.step`); `step` or `global_step` beside a state dict.

        Raises:
            CheckpointError: a damaged one.
        """
        return {} if self._counters is None else dict(self._counters())

    def take_companions(self, files: Mapping[str, Place]) -> None:
        """Let `files` (name -> path) go before what was found beside the shards; before anything is read."""
        self.companions = {**self.companions, **files}
        self._resolved = None

    def _resolve(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        if self._resolved is None:
            with blame(self.root):
                tensors, aliases = resolve_ties(
                    self._stored, self._known_aliases, self.companions.get("config.json")
                )
            self._resolved = tensors, aliases
        return self._resolved


def _by_owner(optimizer: OptimizerState | None, aliases: Mapping[str, str]) -> OptimizerState | None:
    """The same state with tied parameters under their owner's name, as the tensors are."""
    if optimizer is None or not any(alias in optimizer.state for alias in aliases):
        return optimizer
    state = {name: value for name, value in optimizer.state.items() if name not in aliases}
    for alias, owner in aliases.items():
        if alias in optimizer.state:
            state.setdefault(owner, optimizer.state[alias])

    def groups() -> ParamGroups:
        renamed = []
        for group in optimizer.param_groups:
            params = dict.fromkeys(aliases.get(name, name) for name in group.get("params", []))
            renamed.append({**group, "params": list(params)})
        return renamed

    return OptimizerState(state, groups)
