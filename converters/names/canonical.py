"""Map state dict keys to canonical Hugging Face names, and separate the model from the optimizer."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from portable.converters.containers.pickle_reader import format_untrusted_value
from portable.converters.errors import CheckpointError, DamagedCheckpointError, prefix_checkpoint_errors
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
    """Return whether a string consists of one to nine ASCII digits, as a parameter index does.

    `str.isdigit` is not strict enough, because it also accepts superscripts and any number of
    digits.
    """
    return text.isascii() and text.isdigit() and len(text) < 10


def remove_wrapper_parts(name: str) -> str:
    """Remove the name components that wrappers insert (torch.compile, checkpointing, FSDP, XLA).

    The prefix `module.` of DDP is kept.
    """
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
    """Remove wrapper prefixes and wrapper components from the names in a state dict.

    Some wrappers insert a component: torch.compile, for example, inserts `_orig_mod`. Such
    components are always removed. DDP adds the prefix `module.`, which is removed if all names have
    it. Lightning and Composer store a transformers model in the attribute `model` of another
    module, which adds the prefix `model.`. It is removed under two conditions: all names have it,
    and at least one name continues with `model.`, `lm_head.` or `transformer.`.

    Args:
        values: Values of the state dict, keyed by name.
        location: File of the state dict, used in error messages.

    Returns:
        The values, keyed by the new names.

    Raises:
        CheckpointError: If two new names are equal, if a name is not a string or is too long, or if
            the state dict contains a flat parameter of FSDP1.
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
                f"{location}: the tensor name {format_untrusted_value(name)} is too long ({len(name):,} "
                f"characters, at most {MAX_TENSOR_NAME:,}); rename the tensor in the checkpoint"
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
                f"{location}: two tensors have the same name {short!r} after the prefixes of wrappers such "
                "as DDP are removed; rename one of the tensors in the checkpoint"
            )
        plain[short] = value
    return plain


def find_plain_name(name: str, names: Container[str]) -> str:
    """Find the model's name for a parameter in an optimizer's state.

    The name in the optimizer's state may have wrapper components, such as `_orig_mod`, and
    prefixes. The components are removed first. The result is then tried as it is, without
    `module.`, without `model.`, and without both prefixes.

    Args:
        name: Name in the optimizer's state.
        names: Names of the model's parameters.

    Returns:
        The first of the tried names that the model has. If it has none of them, the name without
        wrapper components.
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
    """Path of an optimizer's key in a nested state dict, split into three parts.

    For example, `("optim", "state", "a.weight", "exp_avg")` is split into `("optim",)`, `state` and
    `("a.weight", "exp_avg")`.

    Attributes:
        container: Path of the optimizer's dict in the state dict.
        table: Name of a table in the optimizer's dict, `state` or `param_groups`.
        rest: Remaining path within the table.
    """

    container: StateDictPath
    table: str
    rest: StateDictPath


@dataclass
class KeyRoles:
    """Keys of a flattened state dict, grouped by role.

    Nested keys are joined into one key. For example, the path `("optim", "state", 0, "step")`
    becomes the key `optim.state.0.step`.

    Attributes:
        model: Flattened key of each parameter and buffer, by tensor name.
        optimizer_state: Flattened key of each optimizer state, by the name or index of the
            parameter, and then by state name.
        param_groups: Flattened key of each value in the parameter groups, by the path below
            `param_groups`, such as `(0, "lr")`. The path is `()` if a single key contains the
            complete list of groups.
        other: Other flattened keys, such as keys of schedulers, counters, and data loaders.
        optimizers: Paths in the nested state dict at which optimizers were found, such as
            `("optim",)`. If there are several, `optimizer_state` and `param_groups` mix the keys of
            all optimizers and must not be used.
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

    An optimizer is a dict with `param_groups`. A dict without `param_groups` is only an optimizer
    if its own name and the name of at least one state are typical of an optimizer. The model is the dict
    that contains the tensors outside the optimizers. If several dicts contain such tensors,
    `find_model_container` selects one of them, mainly by its name, such as `model`. If it cannot
    select one, all these tensors belong to the model, and their names include the path of the dict.

    The keys are located by their paths in the nested state dict, not by prefixes of the flattened
    keys. A prefix such as `model.` would be ambiguous, because it also occurs in parameter names,
    for example in Llama.

    Args:
        paths: Path of each key in the nested state dict before it was flattened.
        tensors: Keys that contain tensors.
        location: File of the state dict, used in error messages.

    Raises:
        CheckpointError: If a flattened key of an optimizer's state has more characters than a
            tensor name may have.
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
        with prefix_checkpoint_errors(location):
            name, state = split_state_key(joined, model_keys)
        roles.optimizer_state.setdefault(name, {})[state] = key
    return roles


def infer_key_paths(keys: Iterable[str], *, location: str) -> dict[str, StateDictPath]:
    """Infer the nesting of a state dict from its flattened keys.

    The keys with the component `param_groups` show which prefixes belong to optimizers. Without
    such keys, conventional prefixes, such as `optimizer`, belong to optimizers. A key of an
    optimizer is split before and after `state` or `param_groups`. For example,
    `optimizer.state.norm.weight.exp_avg` becomes `("optimizer", "state", "norm.weight.exp_avg")`,
    and `optimizer.param_groups.0.lr` becomes `("optimizer", "param_groups", 0, "lr")`.

    The prefix `model.` of other keys is ambiguous, because names of parameters may also begin with
    it. It is split off if any of these keys begins with `model.model.`, `model.lm_head.` or
    `model.transformer.`. For example, `model.model.norm.weight` becomes `("model",
    "model.norm.weight")`.

    Args:
        keys: Flattened keys.
        location: File of the state dict, used in error messages.

    Returns:
        The path of each key.

    Raises:
        CheckpointError: If the keys contain more than `MAX_OPTIMIZERS` optimizers.
    """
    keys = list(keys)
    containers = {
        match["container"] or ""
        for key in keys
        if (match := re.fullmatch(r"(?:(?P<container>.+?)\.)?param_groups(?:\..*)?", key))
    }
    if len(containers) > MAX_OPTIMIZERS:
        raise DamagedCheckpointError(
            f"{location}: damaged: the keys contain {len(containers):,} optimizers, but at most "
            f"{MAX_OPTIMIZERS} are supported"
        )
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

    A container is an optimizer if it has parameter groups, or if both its name and the name of at least
    one of its states are typical of an optimizer.

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
    """Split the path of an optimizer's key into three parts.

    The parts are the path of the optimizer, the name of its table (`state` or `param_groups`), and
    the path within this table.

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
    """Find the nested dict that contains the model's tensors.

    The first rule that applies determines the result:

    1. If all tensors are in the same dict, the result is this dict.
    2. If dicts that directly contain tensors have a conventional key, such as `model` or
       `state_dict`, the result is the one at the lowest depth. If several are at this depth, the
       result is None.
    3. If the top level contains a tensor whose name has a dot, the result is the top level.

    Args:
        paths: Paths of the tensors that do not belong to an optimizer.

    Returns:
        Path of the dict. It is `()` for the top level of the state dict, or if there are no tensors.
        None if no dict was found. In this case, the caller has to include the path of the dict in
        each tensor name.
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

    The parameter is the longest parameter name with which the key begins, followed by a dot. If there
    is none, the key is split at the last dot. If the key contains no dot, the parameter name is empty.

    Args:
        joined: Flattened key.
        names: Names of the model's parameters.

    Raises:
        CheckpointError: If the key has more than `MAX_TENSOR_NAME` characters.
    """
    if len(joined) > MAX_TENSOR_NAME:
        raise CheckpointError(
            f"the optimizer state name {format_untrusted_value(joined)} is too long ({len(joined):,} "
            f"characters, at most {MAX_TENSOR_NAME:,}); rename the tensor in the checkpoint"
        )
    cut = joined.rfind(".")
    while cut > 0:
        if joined[:cut] in names:
            return StateKey(joined[:cut], joined[cut + 1 :])
        cut = joined.rfind(".", 0, cut)
    name, _, state = joined.rpartition(".")
    return StateKey(name, state)
