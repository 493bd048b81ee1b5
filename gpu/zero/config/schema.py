"""Check a DeepSpeed JSON with the installed DeepSpeed release.

DeepSpeed parses some sections with pydantic models, which this module reuses. DeepSpeed parses the
other sections as plain dictionaries, ignores misspelled keys in them, and interprets the text
``"false"`` as true. To check these sections, this module runs DeepSpeed's parser on a
:class:`RecordedSection`, which records the keys that the parser looks up, and their defaults. A key
that the parser never looks up is unknown, and a value must have the same type as its default.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, KeysView
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model

from portable.config import keys
from portable.config.origins import format_short_value
from portable.converters.similar_names import format_name_suggestion
from portable.errors import UserError, to_one_line
from portable.gpu.zero import private_api
from portable.importing.deepspeed import AUTO, KEYS, OPTIMIZER_DEFAULTS, REFUSED_KEYS, SCHEDULER_DEFAULTS
from portable.importing.foreign_file import is_off_or_empty

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

KeyPath = tuple[str, ...]
_STRICT = ConfigDict(extra="forbid", strict=True)
_PARSER_BATCH = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
"""Placeholder batch sizes for DeepSpeed's parser, which requires them. The run checks the real
batch sizes.
"""
_KEYS_SET_BY_RUN = ("optimizer", "scheduler", "train_batch_size", *_PARSER_BATCH)
"""Keys that are not passed to DeepSpeed's parser, because the run determines the batch sizes, the optimizer
and the schedule.
"""
_REFUSED_SECTIONS = REFUSED_KEYS | {"data_efficiency"}
"""Sections whose keys are not checked, because the JSON is refused if one of these sections is enabled."""
_DTYPE_KEYS = tuple(("data_types", name) for name in ("grad_accum_dtype", "param_dtype", "buffer_dtype"))
"""Keys that this module checks itself, because DeepSpeed interprets their values only during
training.
"""


def _is_judged_elsewhere(path: KeyPath) -> bool:
    """Return whether a key is exempt from the check for unknown keys.

    The check runs DeepSpeed's parser, and records the keys that the parser looks up. A key that is
    never looked up is unknown. The check does not apply to unsupported sections, or to sections
    that DeepSpeed parses with a pydantic model.
    """
    return (
        path[0] in _REFUSED_SECTIONS | private_api.get_config_models().keys()
        or ".".join(path) in _REFUSED_SECTIONS
    )


class RecordedSection(dict[str, Any]):
    """Configuration section that records each key that DeepSpeed's parser looks up.

    Nested dicts become nested recorded sections, except in sections that are exempt from the check
    for unknown keys. Membership tests and iteration are also lookups. ``copy.copy`` and
    ``copy.deepcopy`` return the section itself, so that lookups in a copy are recorded.

    Args:
        values: Content of the section.
        path: Keys from the top level to this section.
        last: List to which the path of each lookup is appended. All sections of a configuration
            share it. If it is None, the section creates the list. This is the case for the top
            level.

    Attributes:
        defaults: Default of each key that the parser has looked up, or None if the parser passed no
            default.
        path: Keys from the top level to this section.
        looked_up_paths: Paths of all keys that the parser has looked up in any section, in order.
            This is the shared list.
    """

    def __init__(
        self, values: Mapping[str, Any], path: KeyPath = (), last: list[KeyPath] | None = None
    ) -> None:
        self.defaults: dict[str, Any] = {}
        self.path = path
        self.looked_up_paths: list[KeyPath] = [] if last is None else last
        super().__init__(
            {
                key: RecordedSection(value, (*path, key), self.looked_up_paths)
                if isinstance(value, dict) and not _is_judged_elsewhere((*path, key))
                else value
                for key, value in values.items()
            }
        )

    def record_lookup(self, key: str, default: Any = None) -> None:
        """Record that the parser looks up a key with a default.

        If a key is looked up several times, the first default other than None is kept.
        """
        self.looked_up_paths.append((*self.path, key))
        if self.defaults.get(key) is None:
            self.defaults[key] = default

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value like ``dict.get``, and record the lookup."""
        self.record_lookup(key, default)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.record_lookup(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.record_lookup(str(key))
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        for key in super().__iter__():
            self.record_lookup(key)
            yield key

    def keys(self) -> Any:
        """Return a view of the keys.

        The view records a lookup of each key that the caller iterates over or tests for membership.
        """
        return KeysView(self)

    def items(self) -> Any:
        """Return a list of the items, and record a lookup of every key."""
        return [(key, self[key]) for key in self]

    def __copy__(self) -> RecordedSection:
        return self

    def __deepcopy__(self, _: dict[int, Any]) -> RecordedSection:
        return self

    def iter_read_sections(self) -> Iterator[RecordedSection]:
        """Yield this section, and the nested sections whose keys the parser has looked up.

        Other nested mappings are omitted, because the parser either stores them unchanged or does not
        support them.
        """
        yield self
        for value in super().values():
            if isinstance(value, RecordedSection) and value.defaults:
                yield from value.iter_read_sections()

    def iter_items_unrecorded(self) -> Iterator[tuple[str, Any]]:
        """Yield the items of this section without recording their keys as looked up.

        The checks after parsing need this. A key that they recorded would no longer be reported as
        unknown.
        """
        yield from super().items()


@dataclass
class ConfigMistakes:
    """Mistakes that DeepSpeed finds in a configuration.

    Attributes:
        unknown_keys: Map from the path of each unknown key to the supported keys in the same section.
        first_wrong_value: Error message for the first wrong value, or None.
    """

    unknown_keys: dict[KeyPath, list[str]] = field(default_factory=dict)
    first_wrong_value: str | None = None


def find_config_mistakes(document: Mapping[str, Any]) -> ConfigMistakes:
    """Find mistakes in a DeepSpeed JSON with DeepSpeed's pydantic models and its parser.

    The parser only runs if the models find no wrong value. Values that are ``auto`` are not
    checked.
    """
    mistakes = ConfigMistakes()
    _add_model_mistakes(document, mistakes)
    if mistakes.first_wrong_value is None:
        _add_parser_mistakes(document, mistakes)
    return mistakes


def _add_model_mistakes(document: Mapping[str, Any], mistakes: ConfigMistakes) -> None:
    """Check a DeepSpeed JSON with DeepSpeed's pydantic models, and add the results to ``mistakes``."""
    schema, values = build_schema(document), filter_auto_values(document)
    try:
        schema(**values)
    except ValidationError as error:
        details = error.errors()
        for detail in details:
            if detail["type"] == "extra_forbidden":
                path = tuple(map(str, detail["loc"]))
                mistakes.unknown_keys[path] = list_section_keys(schema, path[:-1])
        wrong = next((detail for detail in details if detail["type"] != "extra_forbidden"), None)
        if wrong is not None:
            # The location in a pydantic error also contains names of union members, which are not keys.
            path = tuple(str(part) for part in wrong["loc"] if str(part) in _collect_keys(values))
            mistakes.first_wrong_value = _describe_wrong_value(path, wrong)
    except Exception as error:  # a validator may raise any exception
        mistakes.first_wrong_value = str(error) or type(error).__name__


def _add_parser_mistakes(document: Mapping[str, Any], mistakes: ConfigMistakes) -> None:
    """Check a DeepSpeed JSON with DeepSpeed's parser, and add the results to ``mistakes``.

    The parser does not receive the optimizer, the scheduler or the unknown keys that are already in
    ``mistakes``. It receives placeholders for the batch sizes. Further unknown keys are only added
    if the parser finds no wrong value.
    """
    values = {
        key: value for key, value in filter_auto_values(document).items() if key not in _KEYS_SET_BY_RUN
    } | _PARSER_BATCH
    for path in mistakes.unknown_keys:
        _find_section(values, path[:-1]).pop(path[-1], None)
    recorded = RecordedSection(values)
    problem: Exception | None = None
    try:
        private_api.parse_deepspeed_config(recorded)
    except Exception as error:  # the parser may raise any exception
        problem = error
    wrong = next(_iter_wrong_type_messages(recorded), None)
    if wrong is not None:
        mistakes.first_wrong_value = wrong
    elif isinstance(problem, TypeError | AttributeError | LookupError):
        mistakes.first_wrong_value = _describe_unreadable_value(recorded.looked_up_paths[-1], values)
    elif problem is not None:  # the message of the parser does not name the section
        mistakes.first_wrong_value = str(problem) or type(problem).__name__
    else:
        for section in recorded.iter_read_sections():
            for key, _ in section.iter_items_unrecorded():
                if key not in section.defaults:
                    mistakes.unknown_keys[(*section.path, key)] = _list_known_keys(section)


def _describe_unreadable_value(path: KeyPath, values: dict[str, Any]) -> str:
    """Build the error message for a value whose type makes DeepSpeed's parser fail.

    Args:
        path: Path of the value. The parser failed right after it had looked up this key.
        values: Configuration that contains the value.
    """
    key, value = ".".join(path), format_short_value(_find_value(values, path))
    if any(name.startswith(f"{key}.") for name in KEYS):
        return f"{key}: must be a mapping, not {value}; correct or remove {key}"
    return f"{key}: DeepSpeed cannot read {value}; correct or remove {key}"


def _list_known_keys(section: RecordedSection) -> list[str]:
    """List the valid keys of a section.

    A key is valid if DeepSpeed's parser has looked it up. There is one exception: the parser also
    looks up keys that DeepSpeed has removed, in order to reject them. These keys are omitted.
    """
    return [key for key in section.defaults if private_api.find_removed_key_error({key: None}) is None]


def _iter_wrong_type_messages(recorded: RecordedSection) -> Iterator[str]:
    """Yield an error message for each value that does not have the type of its default.

    The default is the fallback value that DeepSpeed's parser passed when it looked up the key. A
    value without a default, or with the default None, is not compared. The same applies to the
    values of unsupported sections. If the key names a dtype, such as
    ``data_types.grad_accum_dtype``, the value must be a dtype of DeepSpeed.
    """
    for section in recorded.iter_read_sections():
        for key, value in section.iter_items_unrecorded():
            path = (*section.path, key)
            if path in _DTYPE_KEYS and not private_api.is_deepspeed_dtype(value):
                yield (
                    f"{'.'.join(path)}: {format_short_value(value)} is not a dtype of DeepSpeed; use fp32, "
                    "fp16 or bf16"
                )
            default = section.defaults.get(key)
            is_section = isinstance(value, dict) and isinstance(default, dict)
            if default is None or is_section or ".".join(path) in _REFUSED_SECTIONS:
                continue
            try:
                TypeAdapter(_infer_value_type(default), config=_STRICT).validate_python(value)
            except ValidationError as error:
                yield _describe_wrong_value(path, error.errors()[0])


def _infer_value_type(default: Any) -> Any:
    """Infer the required type of a value from its default.

    A number may be an integer or a float. It must be at least 0, or at least the default if the
    default is negative. If the default is neither a bool, a dict nor a number, for example a
    string, any value is accepted.
    """
    if isinstance(default, bool | dict):
        return type(default)
    return Annotated[float, Field(ge=min(0, default))] if isinstance(default, int | float) else Any


def _describe_wrong_value(path: KeyPath, detail: Mapping[str, Any]) -> str:
    value = "" if isinstance(detail["input"], dict) else f", not {format_short_value(detail['input'])}"
    message = re.sub(r", (\w+) or \1$", r", \1", detail["msg"])  # an enum may list a value twice
    message = re.sub(r" or instance of \w+$", "", message)
    return f"{'.'.join(path)}: {message}{value}"


def build_schema(document: Mapping[str, Any]) -> type[BaseModel]:
    """Build a pydantic model that checks a DeepSpeed JSON.

    It combines DeepSpeed's own models with the models that this module builds for the sections
    ``optimizer`` and ``scheduler``. Sections without a pydantic model are left out.

    Args:
        document: DeepSpeed JSON. The types of its optimizer and its scheduler determine which
            parameters these two sections may contain.
    """
    sections = {
        "optimizer": {
            **dict.fromkeys(("type", "legacy_fusion"), Any),
            "params": _list_type_params(document, "optimizer", OPTIMIZER_DEFAULTS),
        },
        "scheduler": {"type": Any, "params": _list_type_params(document, "scheduler", SCHEDULER_DEFAULTS)},
        **private_api.get_config_models(),
    }
    return _build_model("DeepSpeed", sections, ConfigDict(strict=True))


def _build_model(name: str, types: Mapping[str, Any], config: ConfigDict = _STRICT) -> type[BaseModel]:
    """Build a pydantic model in which each key may be missing or null.

    Args:
        name: Name of the model.
        types: Type of each key. A nested mapping is a section.
        config: Pydantic configuration. By default, it forbids other keys and does not convert types.
    """
    fields: dict[str, Any] = {
        key: ((_build_model(key, kind) if isinstance(kind, dict) else kind) | None, None)
        for key, kind in types.items()
    }
    return create_model(name, __config__=config, **fields)


def remove_disabled_unknown_keys(document: dict[str, Any]) -> list[KeyPath]:
    """Remove unknown keys with a false or empty value from a DeepSpeed JSON.

    Such a key may belong to a later DeepSpeed release, and has no effect. A key that resembles a known
    key is not removed, because it may be misspelled. In sections that this trainer does not support,
    values equal to DeepSpeed's defaults are also removed. A section with only default values is
    therefore accepted.

    Args:
        document: DeepSpeed JSON. Modified in place.

    Returns:
        Path of each unknown key that was removed.
    """
    models = private_api.get_config_models()
    for section in REFUSED_KEYS & models.keys():
        if isinstance(refused_section := document.get(section), dict):
            defaults = models[section]().model_dump(exclude_none=True)
            remaining = {
                k: v
                for k, v in refused_section.items()
                if k not in defaults or not _is_default(v, defaults[k])
            }
            document.pop(section) if not remaining else document.update({section: remaining})
    removed_paths: list[KeyPath] = []
    for path, names in find_config_mistakes(document).unknown_keys.items():
        section_values = _find_section(document, path[:-1])
        if is_off_or_empty(section_values.get(path[-1])) and not format_name_suggestion(path[-1], names):
            del section_values[path[-1]]
            removed_paths.append(path)
    return removed_paths


def _find_section(values: dict[str, Any], path: Iterable[str]) -> dict[str, Any]:
    """Return the section at a path of keys, or an empty dict if it does not exist."""
    for part in path:
        section = values.get(part)
        values = section if isinstance(section, dict) else {}
    return values


def _find_value(values: dict[str, Any], path: KeyPath) -> Any:
    return _find_section(values, path[:-1]).get(path[-1])


def _is_default(value: Any, default: Any) -> bool:
    """Return whether a JSON value, or its string form, equals the default of a pydantic field."""
    return bool(value == default) or str(value) == str(default)


def check_deepspeed_config(document: dict[str, Any], name: str) -> None:
    """Check that the installed DeepSpeed supports all keys and values of a DeepSpeed JSON.

    Args:
        document: DeepSpeed JSON.
        name: Name of the JSON file or setting, used in error messages.

    Raises:
        UserError: If there are unknown keys, or if a value is wrong. The message lists the unknown
            keys that were found. If there are none, it describes the first wrong value. See
            :func:`find_config_mistakes`.
    """
    mistakes = find_config_mistakes(document)
    if mistakes.unknown_keys:
        raise UserError(f"{name}: {_describe_unknown_keys(mistakes.unknown_keys)}")
    if mistakes.first_wrong_value is not None:
        raise UserError(to_one_line(f"{name}: {mistakes.first_wrong_value}"))


def filter_auto_values(values: Mapping[str, Any], path: tuple[str, ...] = ()) -> dict[str, Any]:
    """Copy a DeepSpeed config without the entries whose value is ``auto``, including nested entries.

    ``data_types.keep_in_fp32_modules`` is kept, because DeepSpeed itself interprets ``auto`` there.

    Args:
        values: DeepSpeed config, or a section of it.
        path: Keys that lead from the top level of the config to ``values``.
    """
    return {
        key: filter_auto_values(value, (*path, key)) if isinstance(value, dict) else value
        for key, value in values.items()
        if value != AUTO or (*path, key) == ("data_types", "keep_in_fp32_modules")
    }


def _collect_keys(values: dict[str, Any]) -> set[str]:
    """Collect the names of all keys in a configuration, at any depth."""
    nested_keys = (_collect_keys(value) for value in values.values() if isinstance(value, dict))
    return set(values).union(*nested_keys)


def _describe_unknown_keys(unknown: Mapping[KeyPath, list[str]]) -> str:
    """Build an error message that lists unknown keys, with suggestions.

    If there is only one unknown key, and no similar key, the message lists the supported keys in
    the section.

    Args:
        unknown: Mapping from the path of each unknown key to the keys that its section supports.
    """
    hints = []
    for path, names in unknown.items():
        hints.append(
            ".".join(path) + format_name_suggestion(path[-1], names, prefix=".".join((*path[:-1], "")))
        )
    if len(hints) > 1:
        listed = [f"{hint.replace('; ', ' (')})" if "; " in hint else hint for hint in hints]
        return f"unknown keys {', '.join(listed)}; correct or remove these keys"
    ((path, names),) = unknown.items()
    section = ".".join(path[:-1]) or "the top level"
    section_hint = "" if hints[0] != ".".join(path) else f"; {section} takes {', '.join(sorted(names))}"
    return f"unknown key {hints[0]}{section_hint}"


def list_section_keys(schema: type[BaseModel], path: tuple[str, ...]) -> list[str]:
    """List the keys of a section in a pydantic model, including aliases.

    A part of ``path`` that names no section of the model is skipped. An example is a name that the
    user chooses for a group.
    """
    for part in path:
        fields = {key: field for name, field in schema.model_fields.items() for key in (name, field.alias)}
        annotation_parts = keys.iter_type_parts(fields[part].annotation) if part in fields else ()
        groups = (
            kind for kind, _ in annotation_parts if inspect.isclass(kind) and issubclass(kind, BaseModel)
        )
        schema = next(groups, schema)  # a mapping of groups has names that the user chooses
    return [key for name, field in schema.model_fields.items() for key in {name, field.alias or name}]


def _list_type_params(document: Mapping[str, Any], section_name: str, supported_types: Iterable[str]) -> Any:
    """Build the type annotation of an optimizer's or scheduler's parameters, for :func:`_build_model`.

    The DeepSpeed JSON selects the optimizer or scheduler. If it selects none, the parameters of all
    supported types are accepted.

    Args:
        document: DeepSpeed JSON.
        section_name: ``optimizer`` or ``scheduler``.
        supported_types: Supported values of the key ``type``.

    Returns:
        Dict that maps the name of each accepted parameter to ``Any``. If the selected type is not
        supported, the result is ``Any``, so that all parameters are accepted.
    """
    section = document.get(section_name)
    kind = section.get("type") if isinstance(section, dict) else None
    type_names = {str(kind), str(kind).lower()}
    names = [
        name
        for supported in supported_types
        if kind is None or supported in type_names
        for name in private_api.list_type_params(supported)
    ]
    return dict.fromkeys(names, Any) or Any
