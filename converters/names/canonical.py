"""Map the keys of a state dict to canonical Hugging Face names, and separate model and optimizer."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from portable.converters.containers.pickle_reader import format_untrusted_value
from portable.converters.errors import CheckpointError, DamagedCheckpointError
from portable.converters.limits import MAX_OPTIMIZERS, MAX_TENSOR_NAME

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence

StateDictPath = tuple[str | int, ...]
"""Path of dict keys and list indices in a nested state dict."""
V = TypeVar("V")

# Attributes that module wrappers insert into the names of their parameters.
_WRAPPERS = frozenset(
    {"_orig_mod", "_orig_module", "_fsdp_wrapped_module", "_fpw_module", "_checkpoint_wrapped_module"}
)
_MODEL_KEYS = ("model", "module", "state_dict", "model_state_dict", "model_state")
_OPTIMIZER_KEYS = frozenset({"optim", "optimizer", "optimizers", "optimizer_state_dict", "optim_state"})
_STATE_NAMES = frozenset({"step", "exp_avg", "exp_avg_sq", "momentum_buffer", "max_exp_avg_sq"})
_DDP_PREFIX = "module."
_FLAT_PARAMETER = "_flat_param"
_OUTER_MODEL_PREFIX, _INNER_MODEL_PREFIXES = (
    "model.",
    ("model.model.", "model.lm_head.", "model.transformer."),
)


def is_parameter_index(text: str) -> bool:
    """Return whether a string is a number with at most nine digits, such as a parameter index.

    `str.isdigit` also accepts superscripts and numbers of any length.
    """
    return text.isascii() and text.isdigit() and len(text) < 10


def remove_wrapper_parts(name: str) -> str:
    """Remove the name components that wrappers insert (torch.compile, checkpointing, FSDP, XLA)."""
    if "._" not in name and not name.startswith("_"):
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def check_no_flat_parameters(names: Iterable[object], location: str) -> None:
    """Check that no name belongs to a flat parameter, which FSDP1 saves with LOCAL_STATE_DICT.

    Args:
        names: Names in a state dict.
        location: File of the state dict, used in error messages.

    Raises:
        CheckpointError: If there is a flat parameter, because its file does not contain the shapes of
            the parameters.
    """
    if any(str(name).rpartition(".")[2] == _FLAT_PARAMETER for name in names):
        raise CheckpointError(
            f"{location}: contains flat parameters of FSDP1 (LOCAL_STATE_DICT), which do not record the "
            "parameters' shapes; load the checkpoint with the program that saved it, and save it with "
            "SHARDED_STATE_DICT or FULL_STATE_DICT"
        )


def strip_common_prefixes(values: Mapping[str, V], *, location: str) -> dict[str, V]:
    """Remove wrapper components and common prefixes from the names in a state dict.

    The prefix `module.` of DDP is removed if all names have it. The prefix `model.` is removed if a
    transformers model is the attribute `model` of another module, as in Lightning and Composer.

    Args:
        values: Values of the state dict, keyed by name.
        location: File of the state dict, used in error messages.

    Returns:
        The values, keyed by the new names.

    Raises:
        CheckpointError: If two new names are equal, or if a name is not a string or is too long.
    """
    check_no_flat_parameters(values, location)
    for name in values:
        if type(name) is not str:  # A pickle may contain any key.
            raise CheckpointError(
                f"{location}: the tensor name {format_untrusted_value(name)} is not a string; rename the "
                "tensor in the checkpoint"
            )
        if len(name) > MAX_TENSOR_NAME:
            raise CheckpointError(
                f"{location}: a tensor name is too long ({len(name):,} characters, at most "
                f"{MAX_TENSOR_NAME:,}): {format_untrusted_value(name)}; rename the tensor in the checkpoint"
            )
    names = [remove_wrapper_parts(name) for name in values]
    if all(name.startswith(_DDP_PREFIX) for name in names):
        names = [name.removeprefix(_DDP_PREFIX) for name in names]
    if any(name.startswith(_INNER_MODEL_PREFIXES) for name in names) and all(
        name.startswith(_OUTER_MODEL_PREFIX) for name in names
    ):
        names = [name.removeprefix(_OUTER_MODEL_PREFIX) for name in names]
    plain: dict[str, V] = {}
    for short, value in zip(names, values.values(), strict=True):
        if short in plain:
            raise CheckpointError(
                f"{location}: two tensors have the name {short!r} without their wrapper prefixes; rename one "
                "of the tensors in the checkpoint"
            )
        plain[short] = value
    return plain


def find_plain_name(name: str, names: Container[str]) -> str:
    """Return the model's name for an optimizer's parameter, without the prefixes that wrappers add.

    Tries to remove each prefix that `strip_common_prefixes` removes.

    Args:
        name: Name in the optimizer's state.
        names: Names of the model's parameters.

    Returns:
        The first result that is the name of a parameter. If there is none, the name without wrapper
        components.
    """
    plain = remove_wrapper_parts(name)
    outer = plain.removeprefix(_DDP_PREFIX)
    spellings = (
        plain,
        outer,
        plain.removeprefix(_OUTER_MODEL_PREFIX),
        outer.removeprefix(_OUTER_MODEL_PREFIX),
    )
    return next((short for short in spellings if short in names), plain)


class StateKey(NamedTuple):
    """Parameter name and state name in a flattened optimizer key such as `model.norm.weight.exp_avg`."""

    parameter: str
    state: str


class _OptimizerPath(NamedTuple):
    """Path of a key in an optimizer, split into components.

    Attributes:
        container: Path of the optimizer.
        table: `state` or `param_groups`.
        rest: Path below the table.
    """

    container: StateDictPath
    table: str
    rest: StateDictPath


@dataclass
class KeyRoles:
    """Keys of a flattened state dict, grouped by role.

    Attributes:
        model: Keys of the parameters and buffers, by name.
        optimizer_state: Keys of the optimizer state, by the name or index of the parameter and the name
            of the state.
        param_groups: Keys of the parameter groups, by the path below `param_groups`. The path is `()`
            if the complete list is one item.
        other: Other keys, such as keys of schedulers, counters, and data loaders.
        optimizers: Paths of the optimizers. `optimizer_state` and `param_groups` are only valid if
            there is one.
    """

    model: dict[str, str] = field(default_factory=dict)
    optimizer_state: dict[str, dict[str, str]] = field(default_factory=dict)
    param_groups: dict[StateDictPath, str] = field(default_factory=dict)
    other: list[str] = field(default_factory=list)
    optimizers: set[StateDictPath] = field(default_factory=set)


def classify_state_dict_keys(
    paths: Mapping[str, StateDictPath], tensors: frozenset[str], *, location: str
) -> KeyRoles:
    """Find the role of each key in a flattened state dict.

    The dicts that contain an optimizer or the model are recognized by their content, not by their
    names: an optimizer has `state` and `param_groups`, and the model is the container of the other
    tensors. The model is found by nested paths instead of prefixes of flattened keys, because the
    prefix `model.` may also belong to the name of a parameter, as in Llama.

    Args:
        paths: Path of each key in the nested state dict before it was flattened.
        tensors: Keys that contain tensors.
        location: File of the state dict, used in error messages.

    Raises:
        CheckpointError: If a flattened key of an optimizer's state is too long.
    """
    roles = KeyRoles()
    optimizers = _find_optimizer_containers(paths)
    remaining: dict[str, StateDictPath] = {}
    flat_state: list[tuple[str, str]] = []
    for key, path in paths.items():
        parts = _split_optimizer_path(path, optimizers)
        if parts is None:
            remaining[key] = path
            continue
        container, table, rest = parts
        roles.optimizers.add(container)
        if table == "param_groups":
            roles.param_groups[rest] = key
        elif len(rest) >= 2:
            roles.optimizer_state.setdefault(str(rest[0]), {})[".".join(map(str, rest[1:]))] = key
        elif rest:
            flat_state.append((str(rest[0]), key))
    model = find_model_container([path for key, path in remaining.items() if key in tensors])
    model_keys: dict[str, str] = {}
    for key, path in remaining.items():
        if key in tensors and (model is None or path[:-1] == model):
            model_keys[".".join(map(str, path)) if model is None else str(path[-1])] = key
        else:
            roles.other.append(key)
    roles.model = model_keys
    for joined, key in flat_state:
        name, state = split_state_key(joined, model_keys)
        roles.optimizer_state.setdefault(name, {})[state] = key
    return roles


def infer_key_paths(keys: Iterable[str], *, location: str) -> dict[str, StateDictPath]:
    """Infer the paths of keys that were saved without their nesting.

    Keys are split at the tables of the optimizers (`state` and `param_groups`), and then at a common
    `model.`.

    Args:
        keys: Flattened keys.
        location: File of the state dict, used in error messages.

    Returns:
        The path of each key.

    Raises:
        CheckpointError: If there are too many optimizers.
    """
    keys = list(keys)
    containers = {
        match["container"] or ""
        for key in keys
        if (match := re.fullmatch(r"(?:(?P<container>.+?)\.)?param_groups(?:\..*)?", key))
    }
    if len(containers) > MAX_OPTIMIZERS:
        raise DamagedCheckpointError(f"{location}: damaged: the keys contain {len(containers):,} optimizers")
    paths: dict[str, StateDictPath] = {}
    rest: list[str] = []
    for key in keys:
        for container in containers | (_OPTIMIZER_KEYS if not containers else frozenset()):
            inside = key if not container else key.removeprefix(container + ".") if "." in key else ""
            if (
                inside
                and (not container or inside != key)
                and re.match(r"(state|param_groups)(\.|$)", inside)
            ):
                table, _, tail = inside.partition(".")
                head: StateDictPath = (container, table) if container else (table,)
                group = re.fullmatch(r"(\d{1,9})\.(\w+)", tail) if table == "param_groups" else None
                paths[key] = (*head, int(group[1]), group[2]) if group else (*head, tail) if tail else head
                break
        else:
            rest.append(key)
    wrapped = any(key.startswith(("model.model.", "model.lm_head.", "model.transformer.")) for key in rest)
    for key in rest:
        paths[key] = ("model", key.removeprefix("model.")) if wrapped and key.startswith("model.") else (key,)
    return paths


def _find_optimizer_containers(paths: Mapping[str, StateDictPath]) -> set[StateDictPath]:
    """Find the containers in a nested state dict that are optimizers.

    A container is an optimizer if it has parameter groups, or if both its name and the names of its
    states are typical of an optimizer.

    Args:
        paths: Path of each key in the nested state dict.

    Returns:
        Paths of the containers.
    """
    containers: set[StateDictPath] = set()
    for path in paths.values():
        for i, part in enumerate(path):
            if not isinstance(part, str):
                continue
            if (
                part == "param_groups"
                or part.startswith("param_groups.")
                or (
                    i > 0
                    and path[i - 1] in _OPTIMIZER_KEYS
                    and (part == "state" or part.startswith("state."))
                    and str(path[-1]).rpartition(".")[2] in _STATE_NAMES
                )
            ):
                containers.add(path[:i])
    return containers


def _split_optimizer_path(path: StateDictPath, containers: set[StateDictPath]) -> _OptimizerPath | None:
    """Split an optimizer key's path into the path of the optimizer, the table, and the rest.

    Args:
        path: Path of the key in the nested state dict.
        containers: Paths of all optimizers.

    Returns:
        The parts, or None if the key does not belong to an optimizer.
    """
    for i in range(len(path)):
        part = path[i]
        if path[:i] in containers and isinstance(part, str):
            for table in ("state", "param_groups"):
                if part == table:
                    return _OptimizerPath(path[:i], table, path[i + 1 :])
                if part.startswith(table + "."):
                    return _OptimizerPath(path[:i], table, (part[len(table) + 1 :], *path[i + 1 :]))
    return None


def find_model_container(paths: Sequence[StateDictPath]) -> StateDictPath | None:
    """Find the container of the model's tensors.

    Args:
        paths: Paths of the tensors that do not belong to an optimizer.

    Returns:
        Path of the container. None if there are several candidates, in which case the containers must
        remain in the names.
    """
    counts: dict[StateDictPath, int] = {}
    for path in paths:
        counts[path[:-1]] = counts.get(path[:-1], 0) + 1
    if len(counts) <= 1:
        return next(iter(counts), ())
    candidates = [path for path in counts if path and path[-1] in _MODEL_KEYS]
    shallowest = min(map(len, candidates), default=0)
    candidates = [path for path in candidates if len(path) == shallowest]
    if len(candidates) == 1:
        return candidates[0]
    # The name of a parameter contains a dot. The name of a single tensor outside the containers, such as an
    # RNG state or a counter, does not.
    if not candidates and any(len(path) == 1 and "." in str(path[0]) for path in paths):
        return ()
    return None


def split_state_key(joined: str, names: Container[str]) -> StateKey:
    """Split a flattened optimizer key `<parameter>.<state>`.

    The parameter is the longest parameter name that the key starts with. If there is none, the key is
    split at the last dot.

    Args:
        joined: Flattened key.
        names: Names of the model's parameters.

    Raises:
        CheckpointError: If the key is too long.
    """
    if len(joined) > MAX_TENSOR_NAME:
        raise CheckpointError(
            f"an optimizer state name has {len(joined):,} characters: {format_untrusted_value(joined)}; "
            "rename the tensor in the checkpoint"
        )
    cut = joined.rfind(".")
    while cut > 0:
        if joined[:cut] in names:
            return StateKey(joined[:cut], joined[cut + 1 :])
        cut = joined.rfind(".", 0, cut)
    name, _, state = joined.rpartition(".")
    return StateKey(name, state)
