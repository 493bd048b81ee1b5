"""Convert checkpoints between published tensor names and transformers' in-memory names.

    published = rename_to_published(open_checkpoint("run/checkpoints/step-000100"))

Published names are the names in the files of the published model. In-memory names are the keys of
the loaded model's `state_dict()`. The tensors, the optimizer state, and the names of tied tensors
are converted. Renaming does not read any tensor data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from portable.converters.checkpoint import OptimizerState
from portable.converters.config_and_tokenizer_files import find_companion_file
from portable.converters.containers.shard_index import INDEX_FILE_NAME, SINGLE_FILE_NAME
from portable.converters.errors import OptimizerStateError, prefix_checkpoint_errors
from portable.converters.formats.safetensors import read_safetensors_file
from portable.converters.formats.torchtitan import rename_from_torchtitan
from portable.converters.names.name_rules import (
    NameRules,
    Renamer,
    get_default_rules,
    list_write_rules,
    parse_rules_record,
    select_used_rules,
)
from portable.converters.names.published_names import are_memory_names, arrange_for_files, arrange_for_memory
from portable.converters.storage.folder import CheckpointFolder
from portable.converters.storage.safe_open import read_json_object_or_empty
from portable.converters.tensors.arrangements import ZEROS, build_arranged_tensor
from portable.converters.tensors.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from portable.converters.checkpoint import Aliases, Checkpoint, ParamGroups, Scalar
    from portable.converters.storage.path_or_url import AnyPath
    from portable.converters.tensors.arrangements import Arrangement
    from portable.converters.tensors.tensor import Shape

NAME_RULES_FILE = "published_names.json"
"""Name of the file in which a training run records the name rules of its base checkpoint."""


def find_name_rules(
    checkpoint: Checkpoint,
    published_names: Collection[str] | None = None,
    read_shapes: Callable[[], Mapping[str, Shape]] = dict,
) -> NameRules | None:
    """Find the rules that convert the tensor names in a checkpoint's files to the names in memory.

    Args:
        checkpoint: Checkpoint with a `config.json`.
        published_names: Names of the tensors in the published files from which the model was
            loaded. The names in old files may differ from the default names of the model type. If
            None, the rules that a training run recorded in the checkpoint's folder are used, or
            else the default rules of the model type.
        read_shapes: Function that returns the shapes of the tensors in the published files, keyed
            by name. Only called if the layout of the files depends on the shapes.

    Returns:
        The rules. None if transformers does not implement the model type or the model class in the
        `config.json`.

    Raises:
        CheckpointError: If the record of the training run is damaged, or contains a rule that this
            version does not support.
    """
    if published_names is None and (record := read_recorded_rules(checkpoint)) is not None:
        return record.rules
    rules = get_default_rules(checkpoint.read_config())
    if rules is None or published_names is None:
        return rules
    return select_used_rules(rules, published_names, read_shapes() if rules.depends_on_shapes else None)


class RecordedRules(NamedTuple):
    """Record of the rules by which a training run converted its base checkpoint's tensor names.

    The run stores this record in its own checkpoint.

    Attributes:
        rules: Rules for the tensors of the base checkpoint.
        not_loaded: Names of the base checkpoint's tensors that were not loaded.
    """

    rules: NameRules
    not_loaded: list[str]


def read_recorded_rules(checkpoint: Checkpoint) -> RecordedRules | None:
    """Read the name rules that a training run recorded in its checkpoint.

    Args:
        checkpoint: Checkpoint of any format.

    Returns:
        The recorded rules. None if the checkpoint does not contain any.

    Raises:
        CheckpointError: If the record is damaged, or contains a rule that this version does not
            support.
    """
    record = find_companion_file(checkpoint.root, NAME_RULES_FILE)
    if record is None:
        return None
    table = read_json_object_or_empty(record)
    not_loaded = table.get("not_loaded")
    names = [name for name in not_loaded if isinstance(name, str)] if isinstance(not_loaded, list) else []
    return RecordedRules(parse_rules_record(table, checkpoint.read_config(), str(record)), names)


def read_published_names(config: AnyPath) -> list[str] | None:
    """Read the tensor names of the published model that a `config.json` belongs to.

    Args:
        config: Path of the `config.json`.

    Returns:
        The tensor names, or None if the folder contains neither a valid `model.safetensors.index.json`
        nor a `model.safetensors`.

    Raises:
        CheckpointError: If `model.safetensors` is damaged, or is a link to a file outside the folder.
    """
    folder = config.parent
    table = read_json_object_or_empty(folder / INDEX_FILE_NAME).get("weight_map")
    if isinstance(table, dict):
        return list(table)
    if not (folder / SINGLE_FILE_NAME).is_file():
        return None
    return list(read_safetensors_file(CheckpointFolder(folder).get_file(SINGLE_FILE_NAME))[0])


def read_published_shapes(config: AnyPath) -> dict[str, Shape]:
    """Read the shapes of the tensors in the safetensors files next to a `config.json`.

    Args:
        config: Path of the `config.json`.

    Returns:
        The shapes, keyed by tensor name. Without a `model.safetensors.index.json`, the file is
        `model.safetensors`. If a file is missing, its tensors are omitted.

    Raises:
        CheckpointError: If a safetensors file is damaged or outside the folder.
    """
    folder = config.parent
    table = read_json_object_or_empty(folder / INDEX_FILE_NAME).get("weight_map")
    files = sorted({str(file) for file in table.values()}) if isinstance(table, dict) else [SINGLE_FILE_NAME]
    return {
        name: tensor.shape
        for file in files
        if (folder / file).is_file()
        for name, tensor in read_safetensors_file(CheckpointFolder(folder).get_file(file))[0].items()
    }


def rename_to_published(checkpoint: Checkpoint, rules: NameRules | None = None) -> Checkpoint:
    """Convert a checkpoint to the tensor names and shapes of the model's published files.

    Published files are the files that the model's authors distribute, for example on the Hub. The
    names and shapes in the transformers model in memory may be different.

    Args:
        checkpoint: Checkpoint of any format.
        rules: Name rules of the model. Defaults to the result of `find_name_rules`.

    Returns:
        The converted checkpoint. Names of torchtitan and Meta are first replaced with published
        names. If the tensors then have published names and shapes, or if the model type is unknown,
        nothing else is changed. If `rename_to_published` or `rename_to_live` has already converted
        the tensors, `checkpoint` itself is returned.

    Raises:
        CheckpointError: If a tensor cannot be rearranged, or if `find_name_rules` raises it.
    """
    if checkpoint.names != "stored":
        return checkpoint
    checkpoint = rename_from_torchtitan(checkpoint)
    rules = find_name_rules(checkpoint) if rules is None else rules
    if rules is None:
        return checkpoint
    live = are_memory_names(checkpoint.tensors, rules)
    if not live and not rules.file_shapes:
        return checkpoint
    with prefix_checkpoint_errors(checkpoint.root):
        shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
        arrangements = arrange_for_files(shapes, rules)
    # Some models have the published names in memory too, so only the shapes of some tensors differ.
    if not live and arrangements.keys() != shapes.keys():
        return checkpoint
    renaming = Renamer(list_write_rules(rules), write=True)
    return _build_renamed_checkpoint(
        checkpoint,
        arrangements,
        lambda name: renaming.apply_rename_rules(renaming.apply_convert_rule(name).name),
        "published",
    )


def rename_to_live(
    checkpoint: Checkpoint, rules: NameRules | None = None, live: Mapping[str, Shape] | None = None
) -> Checkpoint:
    """Convert a checkpoint to the tensor names and shapes that transformers uses in memory.

    Args:
        checkpoint: Checkpoint of any format.
        rules: Name rules of the model. Defaults to the result of `find_name_rules`.
        live: Shapes of the model's tensors in memory, keyed by name, or None if they are not known.
            The names show whether the model uses the prefix of its base model, such as `model.`.
            Some rules need the shapes to split or transpose a tensor.

    Returns:
        The converted checkpoint. Names of torchtitan and Meta are first replaced with published
        names. If the tensors then have in-memory names that differ from the published names, or if
        the model type is unknown, nothing else is changed. If `rename_to_live` has already
        converted the tensors, `checkpoint` itself is returned.

    Raises:
        CheckpointError: If a tensor cannot be rearranged, for example because its shape does not
            fit the rule, or if `find_name_rules` raises it.
    """
    if checkpoint.names == "live":
        return checkpoint
    checkpoint = rename_from_torchtitan(checkpoint)
    rules = find_name_rules(checkpoint) if rules is None else rules
    if rules is None or are_memory_names(checkpoint.tensors, rules):
        return checkpoint
    with prefix_checkpoint_errors(checkpoint.root):
        shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
        arrangements = arrange_for_memory(shapes, rules, live)
    renaming = Renamer(rules.rules, write=False)
    return _build_renamed_checkpoint(
        checkpoint,
        arrangements,
        lambda name: renaming.apply_convert_rule(renaming.apply_rename_rules(name)).name,
        "live",
    )


def _build_renamed_checkpoint(
    checkpoint: Checkpoint,
    arrangements: Mapping[str, Arrangement],
    rename_alias: Callable[[str], str],
    names: str,
) -> Checkpoint:
    """Build a checkpoint with new tensor names.

    An alias is kept only if its owner is unchanged except for its name. The optimizer state is
    rearranged when it is first used.

    Args:
        checkpoint: Checkpoint with the old names.
        arrangements: Composition of each new tensor from the tensors of `checkpoint`, keyed by the
            new name.
        rename_alias: Function that converts the old name of a tied tensor to its new name.
        names: Kind of the new names: `"published"` for the names in published files, or `"live"`
            for the names in memory.

    Returns:
        A new `Checkpoint`.
    """
    tensors = checkpoint.tensors
    with prefix_checkpoint_errors(checkpoint.root):
        arranged_tensors = {
            name: build_arranged_tensor(name, values, tensors) for name, values in arrangements.items()
        }
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    new_names = {
        values.find_identical_source(shapes.__getitem__) or "": name
        for name, values in arrangements.items()
        if len(values.tiles) == 1
    }
    aliases = {
        rename_alias(name): new_names[owner]
        for name, owner in checkpoint.aliases.items()
        if owner in new_names
    }

    remedy = "leave out --names live" if names == "live" else "add --names live"

    def load_optimizer(_: Aliases) -> OptimizerState | None:
        state = checkpoint.optimizer
        return None if state is None else _rearrange_optimizer_state(state, arrangements, tensors, remedy)

    return checkpoint.with_names(names, arranged_tensors, aliases, load_optimizer)


def _rearrange_optimizer_state(
    optimizer: OptimizerState,
    arrangements: Mapping[str, Arrangement],
    tensors: Mapping[str, Tensor],
    remedy: str,
) -> OptimizerState:
    """Rearrange the optimizer state in the same way as the parameters.

    The result is lazy: the data of the state is read when it is used. A new parameter has no state
    if none of its old parameters has a state.

    Args:
        optimizer: Optimizer state, keyed by the old parameter names.
        arrangements: Arrangement of each new parameter, keyed by its new name.
        tensors: Old parameters, keyed by name.
        remedy: How to keep the old names, used in error messages.

    Raises:
        OptimizerStateError: If a new parameter consists of several old parameters whose states have
            different names, or only some of which have a state, or if a state cannot be rearranged.
            See `_rearrange_one_state`.
    """
    new_names: dict[str, list[str]] = {}
    state: dict[str, Mapping[str, Tensor | Scalar]] = {}
    for name, values in arrangements.items():
        sources = values.list_sources()
        for source in sources:
            new_names.setdefault(source, []).append(name)
        states = {source: optimizer.state[source] for source in sources if source in optimizer.state}
        if not states:
            continue
        if len(states) != len(sources):
            missing = next(source for source in sources if source not in states)
            raise OptimizerStateError(
                f"{name}: consists of several parameters, but {missing} has no optimizer state; "
                f"{remedy} to keep the parameters separate"
            )
        keys = next(iter(states.values()))
        if any(values.keys() != keys.keys() for values in states.values()):
            raise OptimizerStateError(
                f"{name}: consists of several parameters that have different kinds of optimizer state; "
                f"{remedy} to keep the parameters separate"
            )
        state[name] = {
            key: _rearrange_one_state(f"{name}.{key}", key, values, states, tensors, remedy) for key in keys
        }

    def load_param_groups() -> ParamGroups:
        return [
            {
                **group,
                "params": [
                    *dict.fromkeys(
                        name for param in group.get("params", ()) for name in new_names.get(param, [param])
                    )
                ],
            }
            for group in optimizer.param_groups
        ]

    return OptimizerState(state, load_param_groups)


def _rearrange_one_state(
    new_name: str,
    state_name: str,
    arrangement: Arrangement,
    states: Mapping[str, Mapping[str, Tensor | Scalar]],
    tensors: Mapping[str, Tensor],
    remedy: str,
) -> Tensor | Scalar:
    """Rearrange one optimizer state in the same way as its parameter.

    Args:
        new_name: Name of the new state, used in error messages.
        state_name: Key of the state, such as `exp_avg`.
        arrangement: Description of how the new parameter is assembled from old parameters, which
            are called its sources.
        states: Optimizer states of the sources, keyed by source and then by state.
        tensors: Old parameters, keyed by name.
        remedy: How to keep the old names, used in error messages.

    Returns:
        The rearranged state. If the parameter is only renamed, its state is returned unchanged. If
        the states are scalars, such as `step`, the scalar of the first source is returned.

    Raises:
        OptimizerStateError: If the state is not a scalar and the parameter is not only renamed, and
            the state does not have the shape of its parameter or the new parameter is padded with
            zeros.
    """
    parts: dict[str, Any] = {
        source: source_states.get(state_name) for source, source_states in states.items()
    }
    source, first = next(iter(parts.items()))
    same_shape = all(
        isinstance(part, Tensor) and part.shape == tensors[source].shape for source, part in parts.items()
    )
    if same_shape and all(tile.source != ZEROS for tile in arrangement.tiles):
        return build_arranged_tensor(new_name, arrangement, parts)
    is_renamed = (
        len(arrangement.tiles) == 1
        and arrangement.find_identical_source(lambda name: tensors[name].shape) == source
    )
    is_scalar = not isinstance(first, Tensor) or first.numel == 1
    if first is None or not (is_renamed or is_scalar):
        raise OptimizerStateError(
            f"{new_name}: this optimizer state cannot be converted, because its shape differs from the "
            "shape of its parameter, or because the parameter is padded with zeros; "
            f"{remedy} to keep the names of the source"
        )
    return first  # type: ignore[no-any-return]
