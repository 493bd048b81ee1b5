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
        origins: File and line of each key. The dictionary is keyed by the path of the setting, such
            as ``("train", "steps")``. Empty for a mapping passed by Python code.
    """

    values: dict[str, Any]
    origins: dict[KeyPath, Origin]


def load_config(
    source: ConfigSource | Sequence[ConfigSource] | None = None,
    overrides: Mapping[str, Any] | Sequence[str] = (),
) -> RunConfig:
    """Build the config of a run.

    Each value is checked against the schema. :func:`portable.train` and :func:`portable.plan` check
    later whether the settings work together.

    Example:
        >>> from portable import load_config
        >>> config = load_config("run.yaml", {"train.learning_rate": 1e-4})
        >>> config.train.learning_rate
        0.0001

    Args:
        source: A YAML file or a nested mapping, or a sequence of these to merge in order. In a
            path that is a string, ``~`` and ``${VAR}`` are expanded. None uses the defaults, which
            are the settings of the quickstart.
        overrides: A mapping from dotted keys to values, or flags as on the command line
            (``["--train.steps", "20"]``). They override ``source``.

    Returns:
        The config. Settings have the same names as in YAML, for example
        ``config.train.learning_rate``.

    Raises:
        UserError: If a file cannot be read, or if a setting is not valid. The one-line message
            contains the key, its origin and the allowed values.
        MultipleMistakesError: If several settings are not valid. The attribute ``lines``
            of this ``UserError`` contains the messages.
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
        sources: YAML files or nested mappings. Later sources override earlier sources.
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
    overrides = _split_section_overrides(overrides)
    has_pretrained_model = _has_pretrained_model(merged, overrides)
    for assignment in overrides:
        merged.override_value(assignment, has_pretrained_model=has_pretrained_model)
    config = validate_settings(RunConfig, merged.values, merged.origins)
    config.origins.update(merged.origins)
    return config


def _split_section_overrides(overrides: Sequence[Assignment]) -> list[Assignment]:
    """Replace each override of a section with one override per key of its value.

    Only Python code can override a section, for example with ``{"train": {"steps": 20}}``. If the
    value of a section is not a mapping, it is kept, and validation reports the error.
    """
    split: list[Assignment] = []
    for assignment in overrides:
        path, value, origin = assignment[:3]
        is_section = len(path) == 1 and path[0] in keys.get_section_descriptions(RunConfig)
        if is_section and isinstance(value, Mapping):
            split += [Assignment((*path, str(name)), item, origin) for name, item in value.items()]
        else:
            split.append(assignment)
    return split


def _has_pretrained_model(merged: _MergedSettings, overrides: Sequence[Assignment]) -> bool:
    """Return whether ``model.name_or_path`` is set after all overrides have been applied.

    The overrides are flags, or values from Python code. An override such as
    ``--model.config.attention_dropout`` changes a single key of ``model.config``. If the files do
    not set ``model.config``, the other keys must come from elsewhere. With a pretrained model, they
    come from the config of this model. Without one, they come from the default value of
    ``model.config``.

    Args:
        merged: Settings from the files, before the overrides are applied.
        overrides: The overrides in order, without overrides of sections.
    """
    model = merged.values.get("model")
    name = model.get("name_or_path") if isinstance(model, dict) else None
    for path, value, *_ in overrides:
        if path == ("model", "name_or_path"):
            name = value
    return name is not None


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
        origins: Origins of the keys, keyed by path. Keys set by Python code have no origin.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, Origin] = field(default_factory=dict)

    def merge_file(self, values: dict[str, Any], origins: Mapping[KeyPath, Origin]) -> None:
        """Merge another file or mapping. Its values override the previous values.

        Mappings are merged key by key, except model configs of different model types, which are
        replaced like any other value. A section without a value, such as ``fsdp:``, counts as an
        empty section. If the file sets ``data.source`` but not ``data.sources``, the previous
        ``data.sources`` is removed, and vice versa.

        Args:
            values: Values, nested as in the YAML file. They may be changed.
            origins: Origins of the keys, keyed by path. Empty for a mapping from Python code.
        """
        for section in keys.get_section_descriptions(RunConfig):
            # A section without a value, such as `fsdp:`, is an empty section.
            if section in values and values[section] is None:
                values[section] = {}
        self._remove_replaced_source(values.get("data"))
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

        Does nothing if a parent of the setting, such as its section, has a value that is not a
        mapping. The validation of the config reports this error later. Also does nothing if the value
        is only assumed, and a config file sets the setting.

        Raises:
            UserError: If a config file sets the same setting to another value.
        """
        path, value, origin, is_assumed = assignment
        assert origin is not None
        target = self.values
        for name in path[:-1]:
            target = target.setdefault(name, {})
            if not isinstance(target, dict):
                return  # validation reports that the value is not a mapping
        if is_assumed and path[-1] in target:
            return
        if target.get(path[-1], value) != value:
            earlier = self.origins.get(path)
            key, earlier_value = ".".join(path), format_short_value(target[path[-1]])
            raise UserError(
                f"{origin.text} sets {key} to {format_short_value(value)}, but "
                f"{earlier.text if earlier else '--config'} sets the same key to {earlier_value}; remove "
                "one of the two values"
            )
        target[path[-1]] = value
        self.origins.setdefault(path, origin)

    def override_value(self, assignment: Assignment, *, has_pretrained_model: bool) -> None:
        """Replace the value from the config files with a value from a flag or from Python code.

        Args:
            assignment: Path, value and origin. The path leads to a setting, or to a key in a
                mapping such as ``model.config``.
            has_pretrained_model: Whether ``model.name_or_path`` is set after all overrides. If it is
                not, setting one key of ``model.config`` keeps the other keys of its default value.

        Raises:
            UserError: If the path leads through a key whose value is not a mapping.
        """
        path, value, origin = assignment[:3]
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

    def _remove_replaced_source(self, later: Any) -> None:
        """Remove ``data.source`` and its origins if ``later`` replaces it by ``sources``, or the reverse.

        If ``later`` sets both keys or neither, nothing is removed.

        Args:
            later: Section ``data`` of the next file. Ignored if it is not a mapping.
        """
        earlier = self.values.get("data")
        if isinstance(earlier, dict) and isinstance(later, dict):
            for key, replaced_key in (("source", "sources"), ("sources", "source")):
                if later.get(key) and not later.get(replaced_key) and replaced_key in earlier:
                    del earlier[replaced_key]
                    self._replace_origins(("data", replaced_key), None)

    def _replace_origins(self, path: KeyPath, origin: Origin | None) -> None:
        """Record the origin of a new value at ``path``, and remove replaced origins.

        The origins of keys inside the replaced value are removed as well. The new origin lists the
        previous origins of ``path`` in :attr:`Origin.overridden`.

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


def _have_different_model_types(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Return whether two mappings are model configs with different model types.

    Such mappings are not merged, because their keys have different meanings.
    """
    types = {config["model_type"] for config in (first, second) if isinstance(config.get("model_type"), str)}
    return len(types) > 1


def _describe_key_inside_value(path: KeyPath, value_depth: int, origin: Origin | None) -> str:
    """Return the error message for a key below a setting whose value is not a mapping.

    An example is the key ``a.b.c`` if the value of ``a.b`` is a number.

    Args:
        path: Path of the key, for example ``("a", "b", "c")``.
        value_depth: Number of names at the start of ``path`` that lead to the value, 2 in the
            example.
        origin: Origin of the key. None if Python code has set it.
    """
    outer, key = ".".join(path[:value_depth]), ".".join(path)
    start = f"{origin.text}: " if origin else ""
    if keys.find_open_mapping(RunConfig, key) is None and outer not in keys.get_section_descriptions(
        RunConfig
    ):
        return to_one_line(start + describe_unknown_key(RunConfig, key))
    return f"{start}{key} cannot be set: {outer} is not a mapping; set {outer} to a mapping"
