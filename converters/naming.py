"""Checkpoints under published names, or under the names that transformers uses in memory.

    written = with_published_names(open_checkpoint("run/checkpoints/step-000100"))

The tensors, the optimizer state and the tied names all change. Nothing is read before a tensor is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converters.checkpoint import OptimizerState
from converters.config_and_tokenizer_files import find_beside
from converters.containers.shard_index import INDEX, SINGLE
from converters.errors import OptimizerStateError, blame
from converters.formats.safetensors import read_file
from converters.names.name_rules import (
    NameRules,
    Renaming,
    rules_from_record,
    rules_of,
    used_rules,
    writing,
)
from converters.names.published import are_live, to_files, to_memory
from converters.storage.folder import Folder
from converters.storage.safe_open import read_small_table
from converters.tensors.arranged import ZEROS, arranged
from converters.tensors.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from converters.checkpoint import Aliases, Checkpoint, ParamGroups, Scalar
    from converters.storage.path_or_url import Place
    from converters.tensors.arranged import Arrangement
    from converters.tensors.tensor import Shape

RECORD = "published_names.json"
"""The file in which a training run records the rules of its base checkpoint."""


def name_rules(checkpoint: Checkpoint, base: Iterable[str] | None = None) -> NameRules | None:
    """Return the rules for the names of a checkpoint.

    Args:
        checkpoint: A checkpoint with a `config.json`. If a training run recorded the rules of its base in
            the same folder, these rules apply.
        base: Names of the tensors in the published files that the model came from, if known. Old files may
            have other names than the model type's default.

    Returns:
        None if the model type is unknown or has only names that transformers does not change.

    Raises:
        CheckpointError: The record of a training run is damaged.
    """
    if base is None and (found := recorded_rules(checkpoint)) is not None:
        return found[0]
    rules = rules_of(_config(checkpoint))
    return rules if rules is None or base is None else used_rules(rules, base)


def recorded_rules(checkpoint: Checkpoint) -> tuple[NameRules, list[str]] | None:
    """Return what a training run recorded in its checkpoint: the rules, and the tensors that it lacks.

    Raises:
        CheckpointError: The record is damaged.
    """
    record = find_beside(checkpoint.root, RECORD)
    if record is None:
        return None
    table = read_small_table(record)
    lost = table.get("not_loaded")
    names = [name for name in lost if isinstance(name, str)] if isinstance(lost, list) else []
    return rules_from_record(table, _config(checkpoint), str(record)), names


def _config(checkpoint: Checkpoint) -> dict[str, Any]:
    return {**read_small_table(checkpoint.companions.get("config.json")), **checkpoint.config}


def published_files(config: Place) -> list[str] | None:
    """Return the names of the tensors in the folder of a `config.json`, or None without weights there."""
    folder = config.parent
    table = read_small_table(folder / INDEX).get("weight_map")
    if isinstance(table, dict):
        return list(table)
    if not (folder / SINGLE).is_file():
        return None
    return list(read_file(Folder(folder).file(SINGLE))[0])


def with_published_names(checkpoint: Checkpoint, rules: NameRules | None = None) -> Checkpoint:
    """Return a checkpoint whose tensors have the names and shapes of published files.

    If the checkpoint already has published names, or if its model is unknown, it is returned unchanged.

    Args:
        checkpoint: A checkpoint of any format.
        rules: The rules of its model; by default `name_rules(checkpoint)`.

    Raises:
        CheckpointError: A tensor cannot be rearranged.
    """
    if checkpoint.names != "stored":
        return checkpoint
    rules = name_rules(checkpoint) if rules is None else rules
    if rules is None or not are_live(checkpoint.tensors, rules):
        return checkpoint
    with blame(checkpoint.root):
        found = to_files({name: tensor.shape for name, tensor in checkpoint.tensors.items()}, rules)
    renaming = Renaming(writing(rules), write=True)
    return _renamed(checkpoint, found, lambda name: renaming.rename(renaming.convert(name)[0]), "published")


def with_live_names(
    checkpoint: Checkpoint, rules: NameRules | None = None, live: Mapping[str, Shape] | None = None
) -> Checkpoint:
    """Return a checkpoint whose tensors have the names and shapes that transformers uses in memory.

    Args:
        live: Shapes of the model's tensors in memory, if known.

    See `with_published_names` for the other arguments and errors.
    """
    if checkpoint.names == "live":
        return checkpoint
    rules = name_rules(checkpoint) if rules is None else rules
    if rules is None or are_live(checkpoint.tensors, rules):
        return checkpoint
    with blame(checkpoint.root):
        found = to_memory({name: t.shape for name, t in checkpoint.tensors.items()}, rules, live)
    renaming = Renaming(rules.rules, write=False)
    return _renamed(checkpoint, found, lambda name: renaming.convert(renaming.rename(name))[0], "live")


def _renamed(
    checkpoint: Checkpoint,
    found: Mapping[str, Arrangement],
    alias: Callable[[str], str],
    names: str,
) -> Checkpoint:
    tensors = checkpoint.tensors
    with blame(checkpoint.root):
        made = {name: arranged(name, values, tensors) for name, values in found.items()}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    of_whole = {
        values.whole(shapes.__getitem__) or "": name
        for name, values in found.items()
        if len(values.tiles) == 1
    }
    aliases = {
        alias(name): of_whole[owner] for name, owner in checkpoint.aliases.items() if owner in of_whole
    }

    def optimizer(_: Aliases) -> OptimizerState | None:
        state = checkpoint.optimizer
        return None if state is None else _moved(state, found, tensors)

    return checkpoint.with_names(names, made, aliases, optimizer)


def _moved(
    optimizer: OptimizerState, found: Mapping[str, Arrangement], tensors: Mapping[str, Tensor]
) -> OptimizerState:
    """Return the optimizer state of tensors that are arranged from others."""
    new: dict[str, list[str]] = {}
    state: dict[str, Mapping[str, Tensor | Scalar]] = {}
    for name, values in found.items():
        sources = values.sources()
        for source in sources:
            new.setdefault(source, []).append(name)
        held = {source: optimizer.state[source] for source in sources if source in optimizer.state}
        if not held:
            continue
        if len(held) != len(sources):
            lost = next(source for source in sources if source not in held)
            raise OptimizerStateError(
                f"{name}: the optimizer has no state of {lost}, a part of it; --names live writes the names "
                "in memory"
            )
        first = next(iter(held.values()))
        state[name] = {what: _state(f"{name}.{what}", what, values, held, tensors) for what in first}

    def groups() -> ParamGroups:
        return [
            {
                **group,
                "params": [
                    *dict.fromkeys(name for one in group.get("params", ()) for name in new.get(one, [one]))
                ],
            }
            for group in optimizer.param_groups
        ]

    return OptimizerState(state, groups)


def _state(
    name: str,
    what: str,
    values: Arrangement,
    held: Mapping[str, Mapping[str, Tensor | Scalar]],
    tensors: Mapping[str, Tensor],
) -> Tensor | Scalar:
    """Return one optimizer state of a rearranged tensor.

    Args:
        held: The optimizer states of its sources.
    """
    parts: dict[str, Any] = {source: states.get(what) for source, states in held.items()}
    source, first = next(iter(parts.items()))
    same_shape = all(
        isinstance(part, Tensor) and part.shape == tensors[source].shape for source, part in parts.items()
    )
    if same_shape and all(tile.source != ZEROS for tile in values.tiles):
        return arranged(name, values, parts)
    single = len(values.tiles) == 1 and values.whole(lambda source: tensors[source].shape) == source
    counter = not isinstance(first, Tensor) or first.numel == 1
    if first is None or not (single or counter):
        raise OptimizerStateError(
            f"{name}: this state does not have the shape of its parameter, so it cannot be rearranged; "
            "--names live writes the names in memory"
        )
    return first  # type: ignore[no-any-return]
