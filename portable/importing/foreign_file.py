"""Classes that represent another trainer's config file and convert it key by key to settings of a run.

:meth:`ForeignFile.convert_keys` looks up each key of a file in the table of its trainer
(:class:`ForeignProgram`). The entry of the table (a :class:`ForeignKey`) converts the value to
settings, or raises :class:`NoEffect` or :class:`NoCounterpart`. The result is an
:class:`ImportedRun`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.config.field_types import parse_boolean_word
from portable.config.origins import Origin, format_short_value
from portable.converters.similar_names import find_similar_names
from portable.errors import UserError, to_one_line

if TYPE_CHECKING:
    from collections.abc import Iterator

KeyPath = tuple[str, ...]
"""Type of a key in a nested file: the names of the sections that contain it, and its own name."""
ConvertedSettings = Mapping[str, Any]
"""Type of settings of a run: values, keyed by the dotted key of the setting."""
EMPTY_VALUES: tuple[Any, ...] = (None, "", {}, [])
"""Values with which most keys of other trainers mean "not set"."""


class NoEffect(Exception):  # noqa: N818  (not an error)
    """Exception raised by a converter if a value has no effect in a run. Its message becomes a note."""


class NoCounterpart(ValueError):  # noqa: N818
    """Exception raised by a converter if a run has no equivalent of a value.

    Its message ends with advice, and becomes a refusal. See :attr:`ImportedRun.refusals`.
    """


def is_off_or_empty(value: Any) -> bool:
    """Return whether ``value`` is null, false or an empty string, list or mapping. Returns False for zero."""
    return value is False or value in EMPTY_VALUES


@dataclass(frozen=True, kw_only=True)
class ForeignKey:
    """Base class of table entries. An entry converts the values of one key of another trainer.

    By default, null, false and empty values are ignored.

    Attributes:
        unless: Further values to ignore, such as the trainer's default.
        converts_empty_values: Whether null, false and empty values are passed to :meth:`convert`
            instead of being ignored.
        hint: Advice for the error message if a user writes this key into the config of a run. If it is
            empty, the message only lists the settings in :attr:`targets`.
    """

    unless: Sequence[Any] = ()
    converts_empty_values: bool = False
    hint: str = ""

    def has_no_effect(self, value: Any, file: ForeignFile) -> bool:
        """Return whether ``value`` is ignored without a note.

        This is the case for values that mean "not set" in the trainer, and for the values in ``unless``.
        """
        silent = (*self.unless, *file.program.unset_values)
        if value in silent or parse_boolean_word(value) in silent or str(value) in map(str, silent):
            return True
        return not self.converts_empty_values and is_off_or_empty(value)

    def convert(self, value: Any, file: ForeignFile) -> ConvertedSettings:
        """Convert a value to settings.

        Args:
            value: Value of the key, for which :meth:`has_no_effect` has returned False.
            file: The file. ``file.path`` is the path of the key.

        Returns:
            Settings, which may be empty.

        Raises:
            NoEffect: If the value has no effect in a run.
            NoCounterpart: If a run has no equivalent of the value.
        """
        raise NotImplementedError

    @property
    def targets(self) -> tuple[str, ...]:
        """Dotted keys of all settings that :meth:`convert` may return."""
        return ()

    @property
    def remedy(self) -> str:
        """Replacement for this key in the config of a run: dotted keys of settings, or advice."""
        return self.hint or ", ".join(self.targets)

    @property
    def summary(self) -> str:
        """Description of the key in docs/keys.md. Empty if the key has no effect and needs no replacement."""
        return self.remedy


ForeignKeys = Mapping[str, ForeignKey]
"""Type of a table of keys: entries, by the dotted key in the file of the program.

A dotted key that ends with a star matches all keys with this prefix that have no separate entry."""


@dataclass
class ImportedRun:
    """Settings that were converted from files of other trainers.

    Attributes:
        values: Settings of a run, keyed by dotted key.
        origins: Origin (file, line and foreign key) of each setting in ``values``.
        assumed_keys: Keys of settings in ``values`` that do not come from the files, but from the
            trainer's defaults. The user's own config takes precedence over them.
        notes: Messages about keys that are ignored or have a different meaning in a run.
        refusals: Messages about keys that have no counterpart, with advice.
        differences: Sentences about differences between a run and the original trainer that remain
            after all keys were converted.
        differing_programs: Names of the trainers to which ``differences`` refers.
        num_processes: Number of local ranks to start. None if a launcher or the backend determines it.
        gpu_ids: Value of ``CUDA_VISIBLE_DEVICES``. None to leave the variable unchanged.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    assumed_keys: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    differing_programs: list[str] = field(default_factory=list)
    num_processes: int | None = None
    gpu_ids: str | None = None

    def raise_first_refusal(self) -> ImportedRun:
        """Raise an error about the first key without a counterpart, or return this object if there is none.

        Raises:
            UserError: If there is a refusal. The error has its message.
        """
        if self.refusals:
            raise UserError(self.refusals[0])
        return self


@dataclass(frozen=True)
class ProgramDifference:
    """Difference in behavior between a run and another trainer that no setting can remove.

    Attributes:
        text: Sentence about the difference, which is shown to the user.
        setting: Dotted key of a setting. The difference is only shown if the imported run sets it to a
            value other than false, 0 or an empty value. If ``setting`` is empty, the difference is
            always shown.
    """

    text: str
    setting: str = ""


def refuse_unknown_key(file: ForeignFile, value: Any) -> None:
    """Refuse a key that is not in the trainer's table, unless its value can be ignored.

    Null is always ignored. False and empty values are ignored because the key may be a new option of a
    later release that is off by default. However, they are refused if the table contains a similar
    name, because the key may then be misspelled.

    Args:
        file: File that is being converted. ``file.path`` is the path of the key.
        value: Value of the key.

    Raises:
        NoCounterpart: If the value is not ignored.
    """
    section = ".".join((*file.path[:-1], ""))
    inside = [name.removeprefix(section) for name in file.program.keys if name.startswith(section)]
    names = dict.fromkeys([*inside, *(name.partition(".")[0] for name in inside)])
    similar = find_similar_names(file.path[-1], names)
    if value is None or (is_off_or_empty(parse_boolean_word(value)) and not similar):
        return
    similar = similar or find_similar_names(file.path[-1], names, compare_last_parts=True)
    hint = f"; did you mean {similar[0]}?" if similar else ""
    raise NoCounterpart(file.program.unknown_key_message.format(value=format_short_value(value)) + hint)


def _keep_file(file: ForeignFile) -> None:
    """Do nothing. Default of :attr:`ForeignProgram.normalize_file`."""


def _keep_settings(file: ForeignFile, num_devices: int) -> None:
    """Do nothing. Default of :attr:`ForeignProgram.complete_settings`."""


@dataclass(frozen=True)
class ForeignProgram:
    """Another trainer whose files can be imported, with the table of its keys.

    Attributes:
        name: Name of the trainer in messages.
        keys: Table of the keys in its files.
        unique_keys: Top-level keys that only this trainer has, so that they identify its files.
        usual_keys: Further top-level keys that its files usually contain.
        title: Name in the list of trainers, if it differs from ``name``. Otherwise empty.
        defaults: Defaults of the trainer that differ from the defaults of a run, keyed by dotted
            setting.
        differences: Differences in behavior that remain after all keys were converted.
        unset_values: Values that mean "not set" in the trainer. They are ignored for all keys.
        unknown_key_message: Message about an unknown key, in which ``{value}`` is replaced by the key's
            value.
        convert_unknown_key: Function that handles a key that is not in the table.
        normalize_file: Function that is called before the conversion, and changes a file to the layout
            that the table expects.
        complete_settings: Function that is called after all keys have been converted, and adds the
            settings that depend on several keys. Its second argument is the number of devices over
            which a batch is divided, or 0 if it is unknown.
    """

    name: str
    keys: ForeignKeys
    unique_keys: tuple[str, ...] = ()
    usual_keys: tuple[str, ...] = ()
    title: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    differences: tuple[ProgramDifference, ...] = ()
    unset_values: tuple[Any, ...] = ()
    unknown_key_message: str = "{value} is not known here"
    convert_unknown_key: Callable[[ForeignFile, Any], None] = refuse_unknown_key
    normalize_file: Callable[[ForeignFile], None] = _keep_file
    complete_settings: Callable[[ForeignFile, int], None] = _keep_settings

    def is_program_of(self, file_content: Mapping[str, object], *, is_foreign_file: bool) -> bool:
        """Return whether a file is probably a config file of this trainer.

        The file must contain at least two of the trainer's unique and usual keys.

        Args:
            file_content: Content of the file.
            is_foreign_file: Whether the file certainly belongs to one of the trainers. If so, a single
                unique key is sufficient.
        """
        present = {*self.unique_keys, *self.usual_keys} & file_content.keys()
        return len(present) > 1 or (is_foreign_file and not present.isdisjoint(self.unique_keys))

    def find_key_entry(self, dotted_key: str) -> ForeignKey | None:
        """Find the entry of a dotted key in this trainer's table. See :func:`find_key_entry`."""
        return find_key_entry(self.keys, dotted_key)


def find_key_entry(keys: ForeignKeys, dotted_key: str) -> ForeignKey | None:
    """Find the entry of a dotted key in a table.

    Returns:
        The entry for exactly this key, otherwise the first entry with a star that matches the key. None
        if no entry matches.
    """
    if dotted_key in keys:
        return keys[dotted_key]
    starred = (
        key for start, key in keys.items() if start.endswith("*") and dotted_key.startswith(start[:-1])
    )
    return next(starred, None)


class ForeignValue(NamedTuple):
    """Key and value in another trainer's file that are converted as a unit.

    Attributes:
        path: Path of the key.
        value: Value of the key. It is a mapping only if the table has no entries for the mapping's
            keys, or also has an entry for the mapping itself.
    """

    path: KeyPath
    value: Any


@dataclass
class ForeignFile:
    """Config file of another trainer, and the state of its conversion.

    Attributes:
        program: Trainer to which the file belongs.
        values: Content of the file.
        build_origin: Function that returns the origin of a key, given its path.
        result: Settings, notes and refusals from the keys that have been converted so far.
        path: Path of the key that is being converted.
    """

    program: ForeignProgram
    values: dict[str, Any]
    build_origin: Callable[[KeyPath], Origin]
    result: ImportedRun = field(default_factory=ImportedRun)
    path: KeyPath = ()

    def get_value(self, dotted_key: str, default: Any = None) -> Any:
        """Return the value of a key in the file.

        Args:
            dotted_key: Dotted key, such as ``optimizer.params.lr``.
            default: Result if the key is missing or its value is null.
        """
        value: Any = self.values
        for part in dotted_key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return default if value is None else value

    def set_setting(self, source_path: KeyPath, setting: str, value: Any) -> None:
        """Set a setting in the result, and record the key of the file from which it was converted.

        Args:
            source_path: Path of the key in the file, which becomes the origin of the setting.
            setting: Dotted key of the setting.
            value: Value of the setting.
        """
        self.result.values[setting] = value
        self.result.origins[setting] = self.build_origin(source_path)

    def set_default_setting(self, setting: str, value: Any, reason: str) -> None:
        """Set a setting in the result to a default value, unless the result already contains the setting.

        The setting is marked as assumed, so that the user's own config takes precedence.

        Args:
            setting: Dotted key of the setting.
            value: Value of the setting.
            reason: Text that names the origin of the value in messages, such as ``default of TRL``.
        """
        if setting not in self.result.values:
            self.result.values[setting] = value
            self.result.origins[setting] = Origin(reason, 0)
            self.result.assumed_keys.add(setting)

    def set_global_batch_size(self, num_devices: int) -> None:
        """Set the global batch size, unless the file has set it.

        Other trainers compute it when a run starts, as the product of the micro-batch size, the
        accumulation steps and the number of data-parallel devices. In this project, it is a setting that
        does not change with the number of devices. Nothing is set if one of the factors is unknown.

        Args:
            num_devices: Number of devices over which a batch is divided. 0 if it is unknown.
        """
        micro = self.result.values.get("train.micro_batch_size")
        steps = self.get_value("gradient_accumulation_steps", 1)
        if num_devices and isinstance(micro, int) and isinstance(steps, int):
            reason = f"micro-batch {micro} x accumulation {steps} x devices {num_devices}"
            for key, shared in (("context_parallel_size", "sequence"), ("tensor_parallel_size", "layer")):
                parts = self.result.values.get(key, 1)
                if isinstance(parts, int) and parts > 1:
                    reason += f" / {parts} that share each {shared}"
                    num_devices = max(1, num_devices // parts)
            self.set_default_setting("train.global_batch_size", micro * steps * num_devices, reason)

    def add_note(self, path: KeyPath, message: str) -> None:
        """Add a note about a key to the result. The note begins with the origin of the key.

        Args:
            path: Path of the key.
            message: Text of the note.
        """
        self.result.notes.append(to_one_line(f"{self.build_origin(path).text}: {message}"))

    def add_refusal(self, path: KeyPath, message: str) -> None:
        """Add a refusal of a key to the result. Its message begins with the origin of the key.

        Args:
            path: Path of the key.
            message: Text of the message, which ends with advice.
        """
        self.result.refusals.append(to_one_line(f"{self.build_origin(path).text}: {message}"))

    def convert_keys(self) -> None:
        """Convert every key of the file, and add the settings to :attr:`result`.

        Exceptions of converters become notes and refusals in the result.
        """
        for path, value in self._iter_key_values(self.values, ()):
            self.path = path
            try:
                self._convert_key(path, value)
            except NoEffect as reason:
                self.add_note(path, str(reason))
            except NoCounterpart as reason:
                self.add_refusal(path, str(reason))
            except (TypeError, ValueError, AttributeError, LookupError):
                # A converter raises these exceptions if it expects a value of another type.
                self.add_refusal(
                    path, f"{format_short_value(value)} has an unexpected type; correct or remove the key"
                )

    def _iter_key_values(self, values: Mapping[str, Any], section: KeyPath) -> Iterator[ForeignValue]:
        """Yield the keys to convert. For a section, yield the keys inside it instead of the section itself.

        A mapping counts as a section if the table has entries for keys inside it. If the table expects a
        section but the value is not a mapping, a refusal is added, unless the value is off or empty.

        Args:
            values: Mapping from keys to values.
            section: Path of the mapping in the file. Empty for the top level.
        """
        for key, value in values.items():
            path = (*section, str(key))
            dotted = ".".join(path)
            is_section = any(name.startswith(f"{dotted}.") for name in self.program.keys)
            if is_section and isinstance(value, Mapping):
                yield from self._iter_key_values(value, path)
            elif is_section and dotted not in self.program.keys and not is_off_or_empty(value):
                self.add_refusal(path, f"must be a mapping, not {format_short_value(value)}")
            elif not is_section or dotted in self.program.keys:
                yield ForeignValue(path, value)

    def _convert_key(self, path: KeyPath, value: Any) -> None:
        """Convert one key with its entry in the table, or with ``convert_unknown_key`` if it has none."""
        key = self.program.find_key_entry(".".join(path))
        if key is None:
            self.program.convert_unknown_key(self, value)
        elif not key.has_no_effect(value, self):
            for setting, converted in key.convert(value, self).items():
                self.set_setting(path, setting, converted)
