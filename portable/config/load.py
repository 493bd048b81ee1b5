"""Build a ``RunConfig`` from YAML files, flags and the schema's defaults."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from converters.storage.path_or_url import suggest_path
from portable.config import flags, keys, yaml_text
from portable.config.origins import Origin, shown
from portable.config.problems import build, unknown_key
from portable.config.run_config import RunConfig
from portable.errors import UserError, one_line

if TYPE_CHECKING:
    from converters.storage.path_or_url import Place
    from portable.importing.foreign_file import ImportedRun

    Source = Union[str, Place, Mapping[str, Any]]  # noqa: UP007
    """A YAML file, or its content."""

MAX_BYTES = 1 << 20
_AFTER_THE_FILES = sys.maxsize // 2

Keys = tuple[str, ...]


@dataclass
class _Draft:
    """The values so far, nested as in the file, with the origin of every key."""

    values: dict[str, Any]
    origins: dict[Keys, Origin]

    def cover(self, path: Keys, origin: Origin | None) -> None:
        """Mark the values at and inside ``path`` as overridden by one from ``origin``."""
        before = self.origins.get(path)
        for inner in [inner for inner in self.origins if inner[: len(path)] == path]:
            del self.origins[inner]
        if origin is not None:
            over = () if before is None else (before.text, *before.over)
            self.origins[path] = replace(origin, over=over)


def load_config(
    source: Source | Sequence[Source] | None = None,
    overrides: Mapping[str, Any] | Sequence[str] = (),
) -> RunConfig:
    """Build the config of a run.

    Args:
        source: a YAML file or a nested mapping, or several, merged in order; None for the quickstart.
        overrides: a mapping from dotted keys to values, or flags as on the command line
            (``["--train.steps", "20"]``). They override ``source``.

    Raises:
        UserError: one line with the key, its origin and the allowed values.
    """
    if isinstance(overrides, Mapping):
        given = [flags.Override(tuple(key.split(".")), value, None) for key, value in overrides.items()]
    else:
        given = flags.parse(list(overrides), RunConfig).overrides
    if source is None:
        return assemble((), given)
    if isinstance(source, Sequence) and not isinstance(source, str):
        return assemble(source, given)
    return assemble([source], given)


def assemble(
    sources: Sequence[Source],
    overrides: Sequence[flags.Override],
    accelerate: Sequence[ImportedRun] = (),
) -> RunConfig:
    """``load_config`` with parsed overrides and settings from Accelerate.

    Raises ``UserError`` also if ``sources`` and one of ``accelerate`` disagree.
    """
    draft = _Draft({}, {})
    for number, source in enumerate(sources):
        later = _draft(source, number * MAX_BYTES)
        for section in keys.sections(RunConfig):
            # ``fsdp:`` without a value is an empty section.
            if section in later.values and later.values[section] is None:
                later.values[section] = {}
        _merge(draft, later)
    for settings in accelerate:
        for key, value in settings.values.items():
            _add(draft, tuple(key.split(".")), value, settings.origins[key])
    named = draft.values.get("model")
    named = isinstance(named, dict) and named.get("name_or_path") is not None
    named = named or any(one.path == ("model", "name_or_path") and one.value is not None for one in overrides)
    for index, override in enumerate(overrides):
        origin = override.flag and Origin(override.flag, _AFTER_THE_FILES + index, flag=True)
        _apply(draft, override, origin or None, named=named)
    config = build(RunConfig, draft.values, draft.origins)
    config.origins.update(draft.origins)
    return config


def _merge(draft: _Draft, later: _Draft) -> None:
    """Merge ``later`` into ``draft``: mappings key by key, other values as a whole."""

    def merge(there: dict[str, Any], given: dict[str, Any], path: Keys) -> None:
        for name, value in given.items():
            inner, before = (*path, name), there.get(name)
            if isinstance(value, dict) and isinstance(before, dict) and not _another(before, value):
                merge(before, value, inner)
                continue
            if name in there:
                draft.cover(inner, later.origins.get(inner))
            there[name] = value

    _drop_replaced_source(draft.values.get("data"), later.values.get("data"))
    merge(draft.values, later.values, ())
    draft.origins = later.origins | draft.origins


def _drop_replaced_source(earlier: Any, later: Any) -> None:
    """Drop the earlier `data.source` if the later file has `data.sources`, and the other way round."""
    if isinstance(earlier, dict) and isinstance(later, dict):
        for key, other in (("source", "sources"), ("sources", "source")):
            if later.get(key) and not later.get(other):
                earlier.pop(other, None)


def _another(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether these are configs of different model types, which must not be merged."""
    kinds = {config["model_type"] for config in (one, other) if isinstance(config.get("model_type"), str)}
    return len(kinds) > 1


def _add(draft: _Draft, path: Keys, value: Any, origin: Origin) -> None:
    """Add a value. Raises ``UserError`` if the key has another one."""
    target = draft.values
    for part in path[:-1]:
        target = target.setdefault(part, {})
        if not isinstance(target, dict):
            return  # the wrong type, which the schema will report
    if target.get(path[-1], value) != value:
        there = draft.origins.get(path)
        other = f"{there.text if there else '--config'} sets it to {shown(target[path[-1]])}"
        key = ".".join(path)
        raise UserError(f"{origin.text} sets {key} to {shown(value)}, but {other}; remove one of the two")
    target[path[-1]] = value
    draft.origins.setdefault(path, origin)


def _draft(source: Source, first_line: int) -> _Draft:
    if isinstance(source, Mapping):
        return _Draft(_copied(source), {})
    if isinstance(source, str):
        source = Path(flags.path_given("--config", source))
    return _read(source, first_line)


def _read(path: Place, first_line: int) -> _Draft:
    document = parse_file(path)
    if document.value is None:
        raise UserError(f"{path}: the config is empty; leave --config out for the defaults")
    if not isinstance(document.value, dict):
        raise UserError(f"{path}: a config must be a mapping of settings, such as train: {{steps: 100}}")
    origins = {key: Origin(f"{path}:{line}", first_line + line) for key, line in document.lines.items()}
    return _Draft(document.value, origins)


def parse_file(path: Place) -> yaml_text.Document:
    """Parse a YAML file. Raises ``UserError``."""
    return yaml_text.parse(read_text(path), str(path))


def read_text(path: Place, key: str | None = None) -> str:
    """The text of a config file, of at most a megabyte. Raises ``UserError``, which begins with ``key``."""
    start = "" if key is None else f"{key}: "
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        reason = f"{error.strerror or error}"
        if isinstance(error, FileNotFoundError):
            reason += suggest_path(path)
        raise UserError(one_line(f"{start}{path}: cannot read the config: {reason}")) from error
    except ValueError as error:
        raise UserError(one_line(f"{start}{str(path)!r}: cannot read the config: {error}")) from error
    if len(content) > MAX_BYTES:
        raise UserError(f"{start}{path}: not a config file: larger than a megabyte")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a config file: not UTF-8 text") from error


def _copied(source: Mapping[str, Any]) -> dict[str, Any]:
    return {str(key): deepcopy(value) for key, value in source.items()}


def _apply(draft: _Draft, override: flags.Override, origin: Origin | None, *, named: bool = False) -> None:
    """Set one value. ``named``: the model is a pretrained one, whose config is not the default one."""
    path, value = override.path, override.value
    if len(path) == 1 and path[0] in keys.sections(RunConfig) and isinstance(value, Mapping):
        for name, item in value.items():
            _apply(draft, flags.Override((*path, str(name)), item, override.flag), origin, named=named)
        return
    inside = flags.open_mapping(RunConfig, ".".join(path))
    target = draft.values
    for depth, part in enumerate(path[:-1], start=1):
        if inside and ".".join(path[:depth]) == inside.key and target.get(part) is None:
            # A key inside a mapping that is not set changes the default mapping.
            ours = named and inside.key == "model.config"
            target[part] = {} if ours else deepcopy(inside.default) or {}
        target = target.setdefault(part, {})
        if not isinstance(target, dict):
            around, name = ".".join(path[:depth]), ".".join(path)
            where = f"{origin.text}: " if origin else ""
            if inside is None and around not in keys.sections(RunConfig):
                raise UserError(one_line(where + unknown_key(RunConfig, name)))
            raise UserError(f"{where}{name} cannot be set: {around} is not a mapping; set {around} itself")
    target[path[-1]] = value
    draft.cover(path, origin)
