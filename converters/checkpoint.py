"""The logical view of a checkpoint, which every format opens into."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING, Any

from converters.errors import CheckpointError, blame
from converters.names.tied_weights import resolve_ties
from converters.tensors.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from converters.storage.path_or_url import Place

Scalar = int | float | bool
ParamGroups = list[dict[str, Any]]
Aliases = Mapping[str, str]
"""Tied alias -> the name that owns the values."""


class OptimizerState:
    """Optimizer state by parameter name.

    Attributes:
        state: parameter name -> state name -> `Tensor` or number. The state names are the optimizer's own
            (`exp_avg`, `exp_avg_sq`, `step`, a factored optimizer's rows and columns, ...); a tensor has the
            full shape of the state, whatever world size wrote it.
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
        """One dict per group: `params` (a list of names) and the hyperparameters (`lr`, `betas`, ...).

        Read at the first use, since some formats store each value in a file item of its own.
        """
        if callable(self._param_groups):
            self._param_groups = self._param_groups()
        return self._param_groups

    def renamed(self, new: Callable[[str], str | None]) -> OptimizerState:
        """The same state under other names; that of a parameter without a new one is left out.

        Of two parameters that become one, the state of the one that had the name already stays.
        """

        def groups() -> ParamGroups:
            return [
                {**group, "params": [*dict.fromkeys(filter(None, map(new, group.get("params", ()))))]}
                for group in self.param_groups
            ]

        state: dict[str, Mapping[str, Tensor | Scalar]] = {}
        for name, values in self.state.items():
            made = new(name)
            if made is not None and (made == name or made not in state):
                state[made] = values
        return OptimizerState(state, groups)


class Checkpoint:
    """One checkpoint of any format. Only headers are in memory; tensors are read slice by slice on demand.

    Attributes:
        format: the name of the format, for example `"dcp"` or `"safetensors"`.
        root: the folder (or file) that was opened.
        metadata: what else the format records (`step`, `world_size`, ...), as plain Python values.
        companions: `config.json`, tokenizer files and the like found beside the shards: file name -> path.
        config: settings that a written `config.json` gets in place of the companion's own; None for one that
            it loses.
        documents: small files that are written beside the tensors: name -> content.
        shards: The file for each tensor, by name, if the files of another model are to be repeated.
        names: Whether the tensors have the names that were `stored`, `published` names, or `live` ones.

    `optimizer` may be a function of `aliases`, called at the first use, so that the model is readable where
    the optimizer is not; `counters` is called likewise. These callables must not reference the `Checkpoint`:
    the cycle would keep its files open. With `ties=False`, equal tensors keep all their names.
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
        config: Mapping[str, Any] | None = None,
        documents: Mapping[str, bytes] | None = None,
        ties: bool = True,
    ) -> None:
        self.format = format
        self.root = root
        self.metadata: Mapping[str, Any] = dict(metadata or {})
        self.companions: Mapping[str, Place] = dict(companions or {})
        self._stored = tensors
        self._known_aliases = dict(aliases or {})
        self._optimizer = optimizer
        self._counters = counters
        self.config: Mapping[str, Any] = dict(config or {})
        self.documents: Mapping[str, bytes] = dict(documents or {})
        self._ties = ties
        self.names = "stored"
        self.shards: Mapping[str, str] = {}

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Parameters and persistent buffers by plain Hugging Face name, tied aliases left out."""
        return self._resolved[0]

    @property
    def aliases(self) -> Mapping[str, str]:
        """Tied alias -> the name in `tensors` that owns the values."""
        return self._resolved[1]

    @cached_property
    def optimizer(self) -> OptimizerState | None:
        """The optimizer state, or None where the checkpoint holds none.

        Raises:
            CheckpointError: there is one, but its state cannot be matched to parameters.
        """
        found = self._optimizer(self.aliases) if callable(self._optimizer) else self._optimizer
        aliases = self.aliases
        if found is None or aliases.keys().isdisjoint(found.state):
            return found
        return found.renamed(lambda name: aliases.get(name, name))

    @cached_property
    def counters(self) -> Mapping[str, Scalar]:
        """The counters of the program that wrote it, under that program's own names.

        DeepSpeed's `global_steps`, `global_samples` and `skipped_steps`; what torchtitan keeps under
        `train_state` and `lr_scheduler` (`train_state.step`); `step` or `global_step` beside a state dict.

        Raises:
            CheckpointError: a counter is damaged.
        """
        return {} if self._counters is None else dict(self._counters())

    def with_companions(self, files: Mapping[str, Place]) -> Checkpoint:
        """The same checkpoint with `files` (name -> path), which override those found beside the shards."""
        return self._with(companions={**self.companions, **files})

    def with_tensors(
        self, tensors: Mapping[str, Tensor], config: Mapping[str, Any], companions: Mapping[str, Place]
    ) -> Checkpoint:
        """The same model with other tensors, and other settings and files beside them."""
        return self._with(
            _stored=tensors,
            _known_aliases=self.aliases,
            config={**self.config, **config},
            companions=companions,
        )

    def with_shards(self, shards: Mapping[str, str]) -> Checkpoint:
        """The same model, whose tensors are written into these files."""
        return self._with(shards=dict(shards))

    def with_names(
        self,
        names: str,
        tensors: Mapping[str, Tensor],
        aliases: Aliases,
        optimizer: Callable[[Aliases], OptimizerState | None],
    ) -> Checkpoint:
        """The same model under other names, see `converters.naming`."""
        return self._with(names=names, _stored=tensors, _known_aliases=aliases, _optimizer=optimizer)

    def with_state_as_weights(self, what: str) -> Checkpoint:
        """The same model with a state of the optimizer, such as an average of the weights, in their place.

        Parameters that have none, such as frozen ones, keep their own values.

        Raises:
            CheckpointError: no parameter has it.
        """
        state = {} if self.optimizer is None else self.optimizer.state
        found = {
            name: values[what] for name, values in state.items() if name in self.tensors and what in values
        }
        weights = {name: value for name, value in found.items() if isinstance(value, Tensor)}
        if not weights:
            raise CheckpointError(f"{self.root}: the optimizer has no {what}")
        return self._with(_stored={**self.tensors, **weights}, _known_aliases=self.aliases)

    def _with(self, **changes: Any) -> Checkpoint:
        """The same checkpoint, but for some of its attributes; what follows from them is found anew."""
        made = copy(self)
        vars(made).update(changes)
        for derived in ("optimizer", "counters", "_resolved"):
            vars(made).pop(derived, None)
        return made

    @cached_property
    def _resolved(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        if not self._ties:
            return dict(self._stored), {}
        config = self.companions.get("config.json")
        with blame(self.root):
            return resolve_ties(self._stored, self._known_aliases, config)
