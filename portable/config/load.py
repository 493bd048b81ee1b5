"""Build a ``RunConfig`` from YAML files, settings imported from other trainers, and flags.

All values are merged into a nested mapping, which is validated only after everything has been
merged. The origin of each value (file and line, or flag) is recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, NamedTuple, Union

from portable.config import flags, keys
from portable.config.origins import Assignment, KeyPath, Origin, format_short_value
from portable.config.run_config import RunConfig
from portable.config.validation import describe_unknown_key, validate_settings
from portable.config.yaml_text import MAX_CONFIG_BYTES, read_yaml_file
from portable.errors import UserError, to_one_line

if TYPE_CHECKING:
    from portable.converters.storage.path_or_url import AnyPath

    ConfigSource = Union[str, AnyPath, Mapping[str, Any]]  # noqa: UP007
    """Path of a YAML file, or its content as nested mappings."""


class _SourceContent(NamedTuple):
    """Settings from a YAML file, or from a mapping passed by Python code.

    Attributes:
        values: Values, nested as in the YAML file.
        origins: Origins of all keys, keyed by path. Empty for a mapping passed by Python code.
    """

    values: dict[str, Any]
    origins: dict[KeyPath, Origin]


def load_config(
    source: ConfigSource | Sequence[ConfigSource] | None = None,
    overrides: Mapping[str, Any] | Sequence[str] = (),
) -> RunConfig:
    """Build the config of a run.

    Example:
        >>> from portable import load_config
        >>> config = load_config("run.yaml", {"train.learning_rate": 1e-4})
        >>> config.train.learning_rate
        0.0001

    Args:
        source: A YAML file or a nested mapping, or a sequence of these to merge in order. None uses the
            defaults, which are the settings of the quickstart.
        overrides: A mapping from dotted keys to values, or flags as on the command line
            (``["--train.steps", "20"]``). They override ``source``.

    Returns:
        The config. Settings have the same names as in YAML, for example ``config.train.learning_rate``.

    Raises:
        UserError: If a setting is not valid. The one-line message contains the key, its origin and the
            allowed values.
    """
    if isinstance(overrides, Mapping):
        assignments = [Assignment(tuple(key.split(".")), value, None) for key, value in overrides.items()]
    else:
        assignments = flags.parse_flags(list(overrides), RunConfig).settings
    if source is None:
        return build_run_config((), assignments)
    if isinstance(source, Sequence) and not isinstance(source, str):
        return build_run_config(source, assignments)
    return build_run_config([source], assignments)


def build_run_config(
    sources: Sequence[ConfigSource],
    overrides: Sequence[Assignment],
    imported: Sequence[Assignment] = (),
) -> RunConfig:
    """Merge all settings into one nested mapping and validate it.

    Args:
        sources: YAML files or nested mappings. Later ones override earlier ones.
        overrides: Settings that override all others, in order.
        imported: Settings imported from files of other trainers. They must not contradict ``sources``.

    Returns:
        The config, which also records the origin of each value.

    Raises:
        UserError: If a file cannot be read, if a setting is not valid, or if ``sources`` and
            ``imported`` disagree.
    """
    merged = _MergedSettings()
    for index, source in enumerate(sources):
        values, origins = _read_source(source, line_offset=index * MAX_CONFIG_BYTES)
        merged.merge_file(values, origins)
    for assignment in imported:
        merged.add_imported(assignment)
    for assignment in overrides:
        merged.override_value(assignment, has_pretrained_model=_has_pretrained_model(merged, overrides))
    config = validate_settings(RunConfig, merged.values, merged.origins)
    config.origins.update(merged.origins)
    return config


def _has_pretrained_model(merged: _MergedSettings, overrides: Sequence[Assignment]) -> bool:
    """Return whether the merged files or the overrides set ``model.name_or_path``.

    If so, a flag such as ``--model.config.attention_dropout`` changes the config of the pretrained
    model. If not, it changes the default value of ``model.config``.
    """
    model = merged.values.get("model")
    is_named = isinstance(model, dict) and model.get("name_or_path") is not None
    path = ("model", "name_or_path")
    return is_named or any(item.path == path and item.value is not None for item in overrides)


def _read_source(source: ConfigSource, line_offset: int) -> _SourceContent:
    """Read a YAML file, or copy a mapping passed by Python code.

    Args:
        source: The file or the mapping.
        line_offset: Number to add to line numbers for ``Origin.order``, so that this file is ordered
            after all previous files.

    Raises:
        UserError: If the file cannot be read, is empty, or is not a mapping.
    """
    if isinstance(source, Mapping):
        return _SourceContent({str(key): deepcopy(value) for key, value in source.items()}, {})
    path = FilePath(flags.expand_path("--config", source)) if isinstance(source, str) else source
    document = read_yaml_file(path)
    if document.value is None:
        raise UserError(f"{path}: the config is empty; add settings, or remove --config to use the defaults")
    if not isinstance(document.value, dict):
        raise UserError(f"{path}: is not a mapping of settings; write settings such as train: {{steps: 100}}")
    origins = {key: Origin(f"{path}:{line}", line_offset + line) for key, line in document.lines.items()}
    return _SourceContent(document.value, origins)


@dataclass
class _MergedSettings:
    """Settings that have been merged so far, not validated yet.

    Attributes:
        values: Values, nested as in the YAML file.
        origins: Origins of all keys, keyed by path.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, Origin] = field(default_factory=dict)

    def merge_file(self, values: dict[str, Any], origins: Mapping[KeyPath, Origin]) -> None:
        """Merge the content of another file. Its values override those of previous files.

        Mappings are merged key by key, except model configs of different model types, which are replaced
        like any other value. If the file sets ``data.source`` but not ``data.sources``, the previous
        ``data.sources`` is removed, and vice versa.

        Args:
            values: Values, nested as in the YAML file.
            origins: Origins of all keys, keyed by path.
        """
        for section in keys.get_section_descriptions(RunConfig):
            # A section without a value, such as `fsdp:`, is an empty section.
            if section in values and values[section] is None:
                values[section] = {}
        _remove_replaced_source(self.values.get("data"), values.get("data"))
        self._merge_mapping(self.values, values, (), origins)
        self.origins = {**origins, **self.origins}

    def _merge_mapping(
        self, target: dict[str, Any], values: dict[str, Any], path: KeyPath, origins: Mapping[KeyPath, Origin]
    ) -> None:
        """Merge ``values`` and their nested mappings into ``target``, in place.

        A nested model config is replaced instead if the new one has a different model type.

        Args:
            target: Mapping with the previous values.
            values: Mapping with the new values.
            path: Path of both mappings in the config.
            origins: Origins of the new values, keyed by path.
        """
        for name, value in values.items():
            inner_path, earlier_value = (*path, name), target.get(name)
            if (
                isinstance(value, dict)
                and isinstance(earlier_value, dict)
                and not _have_different_model_types(earlier_value, value)
            ):
                self._merge_mapping(earlier_value, value, inner_path, origins)
                continue
            if name in target:
                self._replace_origins(inner_path, origins.get(inner_path))
            target[name] = value

    def add_imported(self, assignment: Assignment) -> None:
        """Add a setting that was imported from a file of another trainer.

        Does nothing if the value of a section on the path is not a mapping, because validation reports
        this.

        Raises:
            UserError: If a config file sets the same setting to another value.
        """
        path, value, origin = assignment
        assert origin is not None
        target = self.values
        for name in path[:-1]:
            target = target.setdefault(name, {})
            if not isinstance(target, dict):
                return  # the validation reports the value of the wrong type
        if target.get(path[-1], value) != value:
            earlier = self.origins.get(path)
            key, earlier_value = ".".join(path), format_short_value(target[path[-1]])
            raise UserError(
                f"{origin.text} sets {key} to {format_short_value(value)}, but "
                f"{earlier.text if earlier else '--config'} sets the same key to {earlier_value}; remove "
                "one of the two"
            )
        target[path[-1]] = value
        self.origins.setdefault(path, origin)

    def override_value(self, assignment: Assignment, *, has_pretrained_model: bool) -> None:
        """Set a value from a flag or from Python code. It replaces the value from the files.

        Args:
            assignment: Value of a setting, of a key in a mapping such as ``model.config``, or (only from
                Python code) of a section.
            has_pretrained_model: Whether ``model.name_or_path`` is set. If not, a key in ``model.config``
                is added to the default value of ``model.config``.

        Raises:
            UserError: If the path contains a key whose value is not a mapping.
        """
        path, value, origin = assignment
        if (
            len(path) == 1
            and path[0] in keys.get_section_descriptions(RunConfig)
            and isinstance(value, Mapping)
        ):
            for name, item in value.items():
                self.override_value(
                    Assignment((*path, str(name)), item, origin), has_pretrained_model=has_pretrained_model
                )
            return
        mapping = keys.find_open_mapping(RunConfig, ".".join(path))
        target = self.values
        for depth, section_name in enumerate(path[:-1], start=1):
            if mapping and ".".join(path[:depth]) == mapping.key and target.get(section_name) is None:
                # The mapping is not set. Begin with its default, because the flag changes one key of the
                # mapping.
                changes_pretrained = has_pretrained_model and mapping.key == "model.config"
                target[section_name] = {} if changes_pretrained else deepcopy(mapping.default) or {}
            target = target.setdefault(section_name, {})
            if not isinstance(target, dict):
                raise UserError(_describe_key_inside_value(path, depth, origin))
        target[path[-1]] = value
        self._replace_origins(path, origin)

    def _replace_origins(self, path: KeyPath, origin: Origin | None) -> None:
        """Record the origin of a new value at ``path``, and remove the origins of replaced values.

        Args:
            path: Path of the value.
            origin: Origin of the new value. None if Python code has set it.
        """
        replaced_origin = self.origins.get(path)
        for inner in [inner for inner in self.origins if inner[: len(path)] == path]:
            del self.origins[inner]
        if origin is not None:
            over = () if replaced_origin is None else (replaced_origin.text, *replaced_origin.overridden)
            self.origins[path] = replace(origin, overridden=over)


def _remove_replaced_source(earlier: Any, later: Any) -> None:
    """Remove ``source`` from ``earlier`` if ``later`` only sets ``sources``, and vice versa.

    Args:
        earlier: Section ``data`` merged so far, changed in place. Ignored if it is not a mapping.
        later: Section ``data`` of the next file. Ignored if it is not a mapping.
    """
    if isinstance(earlier, dict) and isinstance(later, dict):
        for key, replaced_key in (("source", "sources"), ("sources", "source")):
            if later.get(key) and not later.get(replaced_key):
                earlier.pop(replaced_key, None)


def _have_different_model_types(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Return whether two mappings are model configs with different model types.

    They are not merged, because their keys have different meanings.
    """
    types = {config["model_type"] for config in (first, second) if isinstance(config.get("model_type"), str)}
    return len(types) > 1


def _describe_key_inside_value(path: KeyPath, value_depth: int, origin: Origin | None) -> str:
    """Return the error message for a key within a value that is not a mapping.

    Args:
        path: Path of the key.
        value_depth: Number of names at the start of ``path`` that form the path of the value.
        origin: Origin of the key. None if Python code has set it.
    """
    outer, key = ".".join(path[:value_depth]), ".".join(path)
    start = f"{origin.text}: " if origin else ""
    if keys.find_open_mapping(RunConfig, key) is None and outer not in keys.get_section_descriptions(
        RunConfig
    ):
        return to_one_line(start + describe_unknown_key(RunConfig, key))
    return f"{start}{key} cannot be set: {outer} is not a mapping; set {outer} to a mapping"
