"""Checkpoint class that the readers of all file formats return."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING, Any

from portable.converters.errors import CheckpointError, prefix_checkpoint_errors
from portable.converters.names.model_config import override_config_settings
from portable.converters.names.tied_weights import resolve_ties
from portable.converters.storage.safe_open import read_json_object_or_empty
from portable.converters.tensors.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from portable.converters.storage.path_or_url import AnyPath

Scalar = int | float | bool
ParamGroups = list[dict[str, Any]]
Aliases = Mapping[str, str]
"""Maps each alias of a tied tensor to its owner. The tensor is kept under the owner's name."""


class OptimizerState:
    """Optimizer state, keyed by parameter name.

    Args:
        state: Optimizer states, as a nested mapping `{parameter name: {state name: value}}`. Each value is
            a `Tensor` or a number.
        param_groups: Parameter groups, or a function that returns them. The function is called the first
            time `param_groups` is accessed.

    Attributes:
        state: Optimizer states, as a nested mapping `{parameter name: {state name: value}}`. Each value is
            a `Tensor` or a number. The optimizer defines the state names, for example `exp_avg`,
            `exp_avg_sq`, and `step` for Adam, or the row and column statistics for a factored optimizer. Each
            tensor has the full, unsharded shape, even if several ranks wrote it in shards.
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
        """Parameter groups: dicts with `params` (parameter names) and hyperparameters such as `lr`.

        The groups are loaded on first access and then cached, because some formats store every value as a
        separate entry.

        Raises:
            CheckpointError: If the groups are damaged.
        """
        if callable(self._groups_or_loader):
            self._groups_or_loader = self._groups_or_loader()
        return self._groups_or_loader

    def rename_parameters(self, new_name: Callable[[str], str | None]) -> OptimizerState:
        """Return a copy of the optimizer state with its parameters renamed.

        If several parameters map to the same new name, the parameter that already had this name takes
        precedence. If none of them did, the first parameter takes precedence.

        Args:
            new_name: Function that maps a parameter name to its new name, or to None to drop the parameter.

        Returns:
            A new `OptimizerState` whose parameter groups are renamed when they are first accessed.
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
    """Checkpoint in any supported format, as returned by `open_checkpoint`.

    Opening a checkpoint reads only the headers. Tensor data is read on demand, one slice at a time.
    The optimizer state and the counters are loaded on first access, so the model can be read even
    if the optimizer state or a counter is damaged.

    Example:
        >>> from portable.converters import open_checkpoint
        >>> checkpoint = open_checkpoint("runs/quickstart")
        >>> first_rows = checkpoint.tensors["model.embed_tokens.weight"].read(slice(0, 16))

    Args:
        tensors: Stored tensors, including the aliases of tied tensors, keyed by Hugging Face name
            (without wrapper prefixes).
        aliases: Tied tensors recorded by the format, as a mapping from alias to owner.
        optimizer: Optimizer state, or a function that builds it. The function is called with the
            resolved aliases the first time the optimizer state is accessed. It must not hold a
            reference to this `Checkpoint`, because the reference cycle would keep the files open.
        counters: Function that returns the counters. It is called the first time the counters are
            accessed. Like the `optimizer` function, it must not hold a reference to this
            `Checkpoint`.
        ties: Whether to resolve tied tensors. If False, tied tensors are kept under all of their
            names, and `aliases` is empty.

    The remaining arguments set the attributes of the same name.

    Attributes:
        format: Name of the format, for example `"dcp"` or `"safetensors"`.
        root: Folder or file from which the checkpoint was opened.
        metadata: Additional values recorded by the format, such as `step` and `world_size`, as
            plain Python objects.
        companions: Paths of `config.json`, the tokenizer files, and similar files stored next to
            the shards, keyed by file name.
        config: Overrides for the companion `config.json`, applied when the checkpoint is written. A
            value of None removes the setting.
        documents: Contents of additional small files to write along with the tensors, keyed by file
            name.
        shards: Name of the output file for each tensor, keyed by tensor name. Only set if the
            output must be split into the same files as another model, otherwise empty.
        names: Kind of tensor names: `"stored"` (as in the checkpoint), `"published"` (as in the
            published files of the model type), or `"live"` (as in memory).
    """

    def __init__(
        self,
        *,
        format: str,
        root: AnyPath,
        tensors: Mapping[str, Tensor],
        aliases: Aliases | None = None,
        optimizer: OptimizerState | Callable[[Aliases], OptimizerState | None] | None = None,
        metadata: Mapping[str, Any] | None = None,
        companions: Mapping[str, AnyPath] | None = None,
        counters: Callable[[], Mapping[str, Scalar]] | None = None,
        config: Mapping[str, Any] | None = None,
        documents: Mapping[str, bytes] | None = None,
        ties: bool = True,
    ) -> None:
        self.format = format
        self.root = root
        self.metadata: Mapping[str, Any] = dict(metadata or {})
        self.companions: Mapping[str, AnyPath] = dict(companions or {})
        self._stored_tensors = tensors
        self._recorded_aliases = dict(aliases or {})
        self._optimizer_or_loader = optimizer
        self._load_counters = counters
        self.config: Mapping[str, Any] = dict(config or {})
        self.documents: Mapping[str, bytes] = dict(documents or {})
        self._should_resolve_ties = ties
        self.names = "stored"
        self.shards: Mapping[str, str] = {}

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Parameters and persistent buffers without aliases, keyed by Hugging Face name.

        Tied tensors are resolved on first access. This may read the values of two tensors to
        compare them.
        """
        return self._tensors_and_aliases[0]

    @property
    def aliases(self) -> Mapping[str, str]:
        """Tied tensors, as a mapping from each alias to the name of its owner in `tensors`."""
        return self._tensors_and_aliases[1]

    @cached_property
    def optimizer(self) -> OptimizerState | None:
        """Optimizer state, or None if the checkpoint was saved without it.

        It is loaded on first access and then cached. If a parameter is an alias of a tied tensor,
        its state has the name of the owner.

        Raises:
            CheckpointError: If the optimizer state is damaged or not supported, or cannot be
                matched to the parameters.
        """
        optimizer = (
            self._optimizer_or_loader(self.aliases)
            if callable(self._optimizer_or_loader)
            else self._optimizer_or_loader
        )
        aliases = self.aliases
        if optimizer is None or aliases.keys().isdisjoint(optimizer.state):
            return optimizer
        return optimizer.rename_parameters(lambda name: aliases.get(name, name))

    @cached_property
    def counters(self) -> Mapping[str, Scalar]:
        """Training counters, keyed by the names used in the program that wrote the checkpoint.

        Examples include DeepSpeed's `global_steps`, `global_samples`, and `skipped_steps`, and the values
        that torchtitan stores under `train_state` and `lr_scheduler` (such as `train_state.step`). A `step`
        or `global_step` that is saved alongside a state dict has the key `step`. Empty if the checkpoint
        contains no counters.

        Raises:
            CheckpointError: If a counter is damaged.
        """
        return {} if self._load_counters is None else dict(self._load_counters())

    def read_config(self) -> dict[str, Any]:
        """Read the companion `config.json` and apply the overrides in `config`.

        Returns:
            The settings of the model after the overrides, which may also remove settings. Only the
            overrides if the checkpoint does not have a `config.json`, or if this file is damaged.
        """
        settings = read_json_object_or_empty(self.companions.get("config.json"))
        override_config_settings(settings, self.config)
        return settings

    def with_companions(self, files: Mapping[str, AnyPath]) -> Checkpoint:
        """Return a copy of the checkpoint with additional companion files.

        Args:
            files: Paths of the files to add, keyed by file name. They replace existing companion files with
                the same name.

        Returns:
            A new `Checkpoint` with the same tensors.
        """
        return self._copy_with_attributes(companions={**self.companions, **files})

    def with_tensors(
        self, tensors: Mapping[str, Tensor], config: Mapping[str, Any], companions: Mapping[str, AnyPath]
    ) -> Checkpoint:
        """Return a copy of the checkpoint with different tensors, such as dequantized weights.

        Args:
            tensors: New tensors, keyed by Hugging Face name.
            config: Settings to merge into `config`, overriding existing values. A value of None
                removes the setting from the written `config.json`.
            companions: Paths of the new companion files, which are copied with the weights
                (`config.json`, the tokenizer, and similar files), keyed by file name. They replace
                all existing companions.

        Returns:
            A new `Checkpoint` with the same optimizer state, counters, and metadata.
        """
        return self._copy_with_attributes(
            _stored_tensors=tensors,
            _recorded_aliases=self.aliases,
            config={**self.config, **config},
            companions=companions,
        )

    def with_shards(self, shards: Mapping[str, str]) -> Checkpoint:
        """Return a copy of the checkpoint with a fixed output file for each tensor.

        The files replace the division of the tensors by size. All output formats except
        `safetensors` ignore them.

        Args:
            shards: Name of the output file, keyed by tensor name. Tensors that are missing are
                written to the last of these files in alphabetical order.

        Returns:
            A new `Checkpoint` with the same tensors.
        """
        return self._copy_with_attributes(shards=dict(shards))

    def with_names(
        self,
        names: str,
        tensors: Mapping[str, Tensor],
        aliases: Aliases,
        optimizer: Callable[[Aliases], OptimizerState | None],
    ) -> Checkpoint:
        """Return a copy of the checkpoint with different tensor names.

        See `portable.converters.naming`.

        Args:
            names: Kind of the new names: `"published"`, `"live"`, or `"stored"`. See the attribute
                `names`.
            tensors: Tensors, keyed by their new names.
            aliases: Tied tensors under their new names, as a mapping from alias to owner.
            optimizer: Function that receives the resolved aliases and returns the optimizer state
                under the new names, or None. It is called when the state is first accessed.

        Returns:
            A new `Checkpoint` with the same metadata and companion files.
        """
        return self._copy_with_attributes(
            names=names, _stored_tensors=tensors, _recorded_aliases=aliases, _optimizer_or_loader=optimizer
        )

    def with_state_as_weights(self, state_name: str) -> Checkpoint:
        """Return a copy of the checkpoint with its weights replaced by an optimizer state.

        This state may be a moving average of the weights, for example. Parameters without it, such
        as frozen ones, keep their original values. The shapes of the states are not checked.

        Args:
            state_name: Name of the optimizer state, for example `"ema"`.

        Returns:
            A new `Checkpoint` with the weights replaced.

        Raises:
            CheckpointError: If the optimizer state cannot be read, or if no parameter has a tensor
                with this state name.
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
                f"{self.root}: no parameter has an optimizer state named {state_name}; "
                "use a checkpoint that contains this state"
            )
        return self._copy_with_attributes(
            _stored_tensors={**self.tensors, **weights}, _recorded_aliases=self.aliases
        )

    def _copy_with_attributes(self, **changes: Any) -> Checkpoint:
        """Return a shallow copy with the given attributes replaced and all cached properties cleared."""
        checkpoint = copy(self)
        vars(checkpoint).update(changes)
        for cached_name in ("optimizer", "counters", "_tensors_and_aliases"):
            vars(checkpoint).pop(cached_name, None)
        return checkpoint

    @cached_property
    def _tensors_and_aliases(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Stored tensors without the aliases of tied tensors, and a mapping from alias to owner.

        An owner is the tensor of a tied group that is kept. An alias is another name for it. If
        ties are not resolved, all stored tensors are included, and the mapping is empty.
        """
        if not self._should_resolve_ties:
            return dict(self._stored_tensors), {}
        config = self.companions.get("config.json")
        with prefix_checkpoint_errors(self.root):
            return resolve_ties(self._stored_tensors, self._recorded_aliases, config)
