"""One ``RunConfig`` from a YAML file, flags on top of it, and the schema's defaults beneath."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portable.config import accelerate_yaml, flags, keys, yaml_text
from portable.config.problems import Origin, build, shown, unknown_key
from portable.config.schema import RunConfig
from portable.errors import UserError, one_line

if TYPE_CHECKING:
    from converters.remote import RemotePath
    from portable.config.accelerate_yaml import AccelerateSettings

_MOST_BYTES = 1 << 20
_AFTER_THE_FILE = sys.maxsize // 2


@dataclass
class _Draft:
    """What was given so far, nested as in the file, with the origin of every key."""

    values: dict[str, Any]
    origins: dict[tuple[str, ...], Origin]


def load_config(
    source: str | Path | RemotePath | Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | Sequence[str] = (),
) -> RunConfig:
    """Build the config of a run.

    ``source`` is a YAML file or a nested mapping; None stands for the quickstart. ``overrides`` win over it:
    a mapping from dotted keys to values, or flags as on the command line (``["--train.steps", "20"]``).
    Raises ``UserError``, one line that names the key, where it was written and what is allowed there.
    """
    if isinstance(overrides, Mapping):
        given = [flags.Override(tuple(key.split(".")), value, None) for key, value in overrides.items()]
    else:
        given = flags.parse(list(overrides), RunConfig, ()).overrides
    return assemble(source, given)


def assemble(
    source: str | Path | RemotePath | Mapping[str, Any] | None,
    overrides: Sequence[flags.Override],
    accelerate: Sequence[AccelerateSettings] = (),
) -> RunConfig:
    """``load_config`` with its overrides already taken apart, and with what Accelerate adds.

    Raises ``UserError`` also where ``source`` and one of ``accelerate`` disagree.
    """
    draft = _Draft({}, {})
    if isinstance(source, Mapping):
        draft.values = _copied(source)
    elif source is not None:
        draft = _read(Path(source) if isinstance(source, str) else source)
    for section in keys.sections(RunConfig):
        # ``fsdp:`` with nothing after it is an empty section.
        if section in draft.values and draft.values[section] is None:
            draft.values[section] = {}
    for settings in accelerate:
        for key, value in settings.values.items():
            _add(draft, tuple(key.split(".")), value, settings.origins[key])
    for index, override in enumerate(overrides):
        origin = override.flag and Origin(override.flag, _AFTER_THE_FILE + index, flag=True)
        _apply(draft, override, origin or None)
    return build(RunConfig, draft.values, draft.origins)


def read_accelerate_config(path: Path) -> AccelerateSettings:
    """Map an Accelerate config file; raises ``UserError`` for what in it has no counterpart."""
    return accelerate_yaml.read(_parse(path), str(path))


def _add(draft: _Draft, path: tuple[str, ...], value: Any, origin: Origin) -> None:
    """Put in a value that must not contradict one that is there."""
    target = draft.values
    for part in path[:-1]:
        target = target.setdefault(part, {})
        if not isinstance(target, dict):
            return  # of the wrong type, which the schema will say
    if target.get(path[-1], value) != value:
        there = draft.origins.get(path)
        other = f"{there.text if there else '--config'} sets it to {shown(target[path[-1]])}"
        key = ".".join(path)
        raise UserError(f"{origin.text} gives {key} {shown(value)}, and {other}; remove one of the two")
    target[path[-1]] = value
    draft.origins.setdefault(path, origin)


def _read(path: Path | RemotePath) -> _Draft:
    document = _parse(path)
    if document.value is None:
        raise UserError(f"{path}: the config is empty; leave --config out for the defaults")
    if not isinstance(document.value, dict):
        raise UserError(f"{path}: a config must be a mapping of settings, such as train: {{steps: 100}}")
    origins = {key: Origin(f"{path}:{line}", line) for key, line in document.lines.items()}
    return _Draft(document.value, origins)


def _parse(path: Path | RemotePath) -> yaml_text.Document:
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise UserError(one_line(f"{path}: cannot read the config: {error.strerror or error}")) from error
    except ValueError as error:
        raise UserError(one_line(f"{str(path)!r}: cannot read the config: {error}")) from error
    if len(content) > _MOST_BYTES:
        raise UserError(f"{path}: not a config file: larger than a megabyte")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a config file: not UTF-8 text") from error
    return yaml_text.parse(text, str(path))


def _copied(source: Mapping[str, Any]) -> dict[str, Any]:
    return {str(key): deepcopy(value) for key, value in source.items()}


def _apply(draft: _Draft, override: flags.Override, origin: Origin | None) -> None:
    path, value = override.path, override.value
    if len(path) == 1 and path[0] in keys.sections(RunConfig) and isinstance(value, Mapping):
        for name, item in value.items():
            _apply(draft, flags.Override((*path, str(name)), item, override.flag), origin)
        return
    inside = flags.open_mapping(RunConfig, ".".join(path))
    target = draft.values
    for depth, part in enumerate(path[:-1], start=1):
        if inside and ".".join(path[:depth]) == inside.key and target.get(part) is None:
            # A key inside a mapping that was not given changes the default mapping.
            target[part] = deepcopy(inside.default) or {}
        target = target.setdefault(part, {})
        if not isinstance(target, dict):
            around, name = ".".join(path[:depth]), ".".join(path)
            where = f"{origin.text}: " if origin else ""
            if inside is None and around not in keys.sections(RunConfig):
                raise UserError(one_line(where + unknown_key(RunConfig, name)))
            raise UserError(f"{where}{name} cannot be set inside {around}, which is not a mapping here")
    target[path[-1]] = value
    if origin:
        draft.origins[path] = origin
