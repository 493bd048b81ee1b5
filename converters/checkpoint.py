"""Format-independent view of a checkpoint, which the reader of every format returns."""

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
"""Mapping from the alias of a tied tensor to the name that owns the values."""


class OptimizerState:
    """Optimizer state, keyed by parameter name.

    Args:
        state: Mapping from parameter name to state name to `Tensor` or number.
        param_groups: Parameter groups, or a function that returns them. The function is called when
            `param_groups` is first accessed.

    Attributes:
        state: Mapping from parameter name to state name to `Tensor` or number. The optimizer defines the
            state names, for example `exp_avg`, `exp_avg_sq` and `step`, or the row and column statistics of
            a factored optimizer. A tensor has the full shape of the state, even if several ranks wrote it in
            shards.
    """

    def __init__(
        self,
        state: Mapping[str, Mapping[str, Tensor | Scalar]],
        param_groups: ParamGroups | Callable[[], ParamGroups],
    ) -> None:
        self.state = state
        self._groups_or_loader = param_groups

    @property
    def param_groups(self) -> ParamGroups:
        """Parameter groups, each a dict with `params` (parameter names) and hyperparameters such as `lr`.

        The groups are loaded on first access, because some formats store every value as a separate item.
        """
        if callable(self._groups_or_loader):
            self._groups_or_loader = self._groups_or_loader()
        return self._groups_or_loader

    def renamed(self, new_name: Callable[[str], str | None]) -> OptimizerState:
        """Return the optimizer state under new parameter names.

        If two parameters get the same new name, the state of the parameter that already had this name is
        kept. If neither parameter had it, the state of the first parameter is kept.

        Args:
            new_name: Function that maps a parameter name to the new name, or to None to leave out the
                parameter.

        Returns:
            A new `OptimizerState`. Its parameter groups are renamed when they are first accessed.
        """

        def rename_groups() -> ParamGroups:
            return [
                {**group, "params": [*dict.fromkeys(filter(None, map(new_name, group.get("params", ()))))]}
                for group in self.param_groups
            ]

        state: dict[str, Mapping[str, Tensor | Scalar]] = {}
        for name, values in self.state.items():
            target_name = new_name(name)
            if target_name is not None and (target_name == name or target_name not in state):
                state[target_name] = values
        return OptimizerState(state, rename_groups)


class Checkpoint:
    """Checkpoint of any supported format, as returned by `open_checkpoint`.

    Opening a checkpoint reads only the headers. Tensors are read slice by slice on demand. The optimizer
    state and the counters are read on first access, so that the model can be read even if the optimizer
    state or a counter is damaged.

    Example:
        >>> from converters import open_checkpoint
        >>> checkpoint = open_checkpoint("runs/quickstart")
        >>> first_rows = checkpoint.tensors["model.embed_tokens.weight"].read(slice(0, 16))

    Args:
        tensors: Stored tensors by plain Hugging Face name, including the aliases of tied tensors.
        aliases: Tied tensors that the format records, as a mapping from alias to owner.
        optimizer: Optimizer state, or a function that builds it. The function is called with the resolved
            aliases on first access. It must not reference this `Checkpoint`, because the reference cycle
            would keep the files open.
        counters: Function that returns the counters. It is called on first access. It must not reference
            this `Checkpoint`, for the same reason as `optimizer`.
        ties: Whether to resolve tied tensors. If False, equal tensors keep all of their names and `aliases`
            is empty.

    The other arguments set the attributes of the same name.

    Attributes:
        format: Name of the format, for example `"dcp"` or `"safetensors"`.
        root: Folder or file that was opened.
        metadata: Other values that the format records, such as `step` and `world_size`, as plain Python
            values.
        companions: Paths of `config.json`, the tokenizer files and similar files next to the shards, keyed by
            file name.
        config: Settings that override the companion `config.json` when the checkpoint is written. A value of
            None removes the setting.
        documents: Contents of small files to write in addition to the tensors, keyed by file name.
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
        self._stored_tensors = tensors
        self._recorded_aliases = dict(aliases or {})
        self._optimizer_or_loader = optimizer
        self._load_counters = counters
        self.config: Mapping[str, Any] = dict(config or {})
        self.documents: Mapping[str, bytes] = dict(documents or {})
        self._should_resolve_ties = ties

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Parameters and persistent buffers by plain Hugging Face name, without aliases of tied tensors."""
        return self._tensors_and_aliases[0]

    @property
    def aliases(self) -> Mapping[str, str]:
        """Mapping from the alias of a tied tensor to the name in `tensors` that owns the values."""
        return self._tensors_and_aliases[1]

    @cached_property
    def optimizer(self) -> OptimizerState | None:
        """Optimizer state, or None if the checkpoint does not contain any.

        Raises:
            CheckpointError: The optimizer state cannot be matched to the parameters.
        """
        optimizer = (
            self._optimizer_or_loader(self.aliases)
            if callable(self._optimizer_or_loader)
            else self._optimizer_or_loader
        )
        aliases = self.aliases
        if optimizer is None or aliases.keys().isdisjoint(optimizer.state):
            return optimizer
        return optimizer.renamed(lambda name: aliases.get(name, name))

    @cached_property
    def counters(self) -> Mapping[str, Scalar]:
        """Training counters, under the names used by the program that wrote the checkpoint.

        Examples are `global_steps`, `global_samples` and `skipped_steps` of DeepSpeed, the values that
        torchtitan stores under `train_state` and `lr_scheduler` (such as `train_state.step`), and the `step`
        or `global_step` that is stored next to a state dict.

        Raises:
            CheckpointError: A counter is damaged.
        """
        return {} if self._load_counters is None else dict(self._load_counters())

    def with_companions(self, files: Mapping[str, Place]) -> Checkpoint:
        """Return a copy of the checkpoint with additional companion files.

        Args:
            files: Paths of the files, keyed by file name. They override companions with the same file name.

        Returns:
            A new `Checkpoint` with the same tensors.
        """
        return self._copy_with(companions={**self.companions, **files})

    def with_tensors(
        self, tensors: Mapping[str, Tensor], config: Mapping[str, Any], companions: Mapping[str, Place]
    ) -> Checkpoint:
        """Return a copy of the checkpoint with other tensors, for example dequantized weights.

        Args:
            tensors: Tensors of the copy, by plain Hugging Face name.
            config: Settings that are added to `config` and override its values. A value of None removes the
                setting from the written `config.json`.
            companions: Paths of the companion files of the copy, keyed by file name.

        Returns:
            A new `Checkpoint` with the same optimizer state, counters and metadata.
        """
        return self._copy_with(
            _stored_tensors=tensors,
            _recorded_aliases=self.aliases,
            config={**self.config, **config},
            companions=companions,
        )

    def with_state_as_weights(self, state_name: str) -> Checkpoint:
        """Return a copy of the checkpoint in which an optimizer state replaces the weights.

        The state can be, for example, a moving average of the weights. Parameters without this state, such
        as frozen parameters, keep their own values.

        Args:
            state_name: Name of the optimizer state, for example `"ema"`.

        Returns:
            A new `Checkpoint` in which the state of each parameter is stored under the parameter's name.

        Raises:
            CheckpointError: No parameter has this state.
        """
        state = {} if self.optimizer is None else self.optimizer.state
        replacements = {
            name: values[state_name]
            for name, values in state.items()
            if name in self.tensors and state_name in values
        }
        weights = {name: value for name, value in replacements.items() if isinstance(value, Tensor)}
        if not weights:
            raise CheckpointError(
                f"{self.root}: no parameter has the optimizer state {state_name}; "
                "use a checkpoint that was saved with this state"
            )
        return self._copy_with(_stored_tensors={**self.tensors, **weights}, _recorded_aliases=self.aliases)

    def _copy_with(self, **changes: Any) -> Checkpoint:
        """Copy the checkpoint, replace the given attributes and drop cached values that depend on them."""
        checkpoint = copy(self)
        vars(checkpoint).update(changes)
        for cached_name in ("optimizer", "counters", "_tensors_and_aliases"):
            vars(checkpoint).pop(cached_name, None)
        return checkpoint

    @cached_property
    def _tensors_and_aliases(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Stored tensors, split into tensors without aliases and the mapping from alias to owner."""
        if not self._should_resolve_ties:
            return dict(self._stored_tensors), {}
        config = self.companions.get("config.json")
        with blame(self.root):
            return resolve_ties(self._stored_tensors, self._recorded_aliases, config)
