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
    """Exception raised by a converter if this project has no equivalent of an imported value.

    The message of the exception must end with advice for the user. The message is added to
    :attr:`ImportedRun.refusals`, prefixed with the origin of the key (such as the file and line).
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
        docs_text: Text for docs/keys.md. If it is empty, :attr:`summary` has a default.
    """

    unless: Sequence[Any] = ()
    converts_empty_values: bool = False
    hint: str = ""
    docs_text: str = ""

    def has_no_effect(self, value: Any, file: ForeignFile) -> bool:
        """Return whether ``value`` can be dropped without a note, because it changes nothing.

        This is the case for the following values:

        - The values in :attr:`unless`, such as the trainer's default.
        - Values that mean "not set" in the other trainer.
        - Null, false and empty values, if :attr:`converts_empty_values` is False.

        Values of the first two kinds are also recognized as text. For example, the string ``1``
        counts as the number 1, and ``no`` counts as false.
        """
        silent = (*self.unless, *file.program.unset_values)
        if value in silent or parse_boolean_word(value) in silent or str(value) in map(str, silent):
            return True
        return not self.converts_empty_values and is_off_or_empty(value)

    def convert(self, value: Any, file: ForeignFile) -> ConvertedSettings:
        """Convert a value to settings.

        Args:
            value: Value of the key. :meth:`has_no_effect` must have returned False for this value.
            file: Config file that is being converted. ``file.path`` is the path of the key within
                the file, such as ``("optimizer", "lr")``.

        Returns:
            Settings, which may be empty.

        Raises:
            NoEffect: If the conversion shows that the value has no effect in a run. The user then
                gets a note. In contrast, values for which :meth:`has_no_effect` returns True are
                dropped without a note.
            NoCounterpart: If no setting of a run is equivalent to the value.
        """
        raise NotImplementedError

    @property
    def targets(self) -> tuple[str, ...]:
        """Dotted keys of all settings that :meth:`convert` may return."""
        return ()

    @property
    def remedy(self) -> str:
        """Replacement for this key in the config of a run.

        This is :attr:`hint` if it is not empty. Otherwise, it is made from :attr:`targets`: the
        dotted key of a single setting, or ``set a.b and a.c`` for several settings.
        It is empty if the key has neither a hint nor targets.
        """
        *others, last = self.targets or ("",)
        return self.hint or (f"set {', '.join(others)} and {last}" if others else last)

    @property
    def summary(self) -> str:
        """Text that docs/keys.md shows for this key.

        This is :attr:`docs_text` if it is not empty. Otherwise, it is :attr:`remedy`, which is usually
        the name of the setting that replaces the key. If the remedy is a sentence and the key has
        :attr:`targets`, the text is a comma-separated list of the targets instead. The text is empty if
        the key has no effect and needs no replacement.
        """
        is_sentence = " " in self.remedy
        return self.docs_text or (", ".join(self.targets) if is_sentence and self.targets else self.remedy)


ForeignKeys = Mapping[str, ForeignKey]
"""Type of a key table: entries, keyed by the dotted key in the trainer's files.

A dotted key that ends with a star matches all keys with this prefix that have no separate entry.
"""


@dataclass
class ImportedRun:
    """Settings that were converted from files of other trainers.

    Attributes:
        values: Settings of a run, keyed by dotted key.
        origins: Origin of each setting in ``values``: the file, line and foreign key, or the reason
            for a default.
        assumed_keys: Keys of settings in ``values`` over which the user's own config takes
            precedence. Most of them are defaults of the trainer, or are derived from several keys.
            ``memory.nvme_path`` is also assumed, because paths differ between machines.
        notes: Messages about keys that are ignored, or that mean something else in this project.
        refusals: Messages about keys that have no counterpart, with advice.
        differences: Sentences about the behavior of the converted run. They explain the
            differences from a run of the original trainer that remain after all keys were
            converted.
        differing_programs: Names of the trainers to which ``differences`` refers.
        num_processes: Number of local ranks to start. None if a launcher or the backend determines
            it.
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
        """Raise an error if a key has no counterpart, otherwise return this object.

        Raises:
            UserError: If :attr:`refusals` is not empty. The message of the error is the first
                entry.
        """
        if self.refusals:
            raise UserError(self.refusals[0])
        return self


@dataclass(frozen=True)
class ProgramDifference:
    """Difference in behavior between a run and another trainer.

    No setting can remove this difference.

    Attributes:
        text: Sentence about the difference, which is shown to the user.
        setting: Dotted key of a setting. The difference is only shown if the imported run sets it
            to a value other than false, 0 or an empty value. If ``setting`` is empty, the
            difference is always shown.
    """

    text: str
    setting: str = ""


def refuse_unknown_key(file: ForeignFile, value: Any) -> None:
    """Refuse a key that is not in the other trainer's key table, unless its value can be ignored.

    Null is always ignored. False and empty values are ignored because the key may be a new option
    of a later release that is off by default. However, they are refused if the table contains a
    similar name, because the key may then be misspelled.

    Args:
        file: File that is being converted. ``file.path`` is the path of the key.
        value: Value of the key.

    Raises:
        NoCounterpart: If the key is refused. The message suggests a similar name, if there is one.
    """
    section = ".".join((*file.path[:-1], ""))
    inside = [name.removeprefix(section) for name in file.program.keys if name.startswith(section)]
    names = dict.fromkeys([*inside, *(name.partition(".")[0] for name in inside)])
    similar = find_similar_names(file.path[-1], names)
    if value is None or (is_off_or_empty(parse_boolean_word(value)) and not similar):
        return
    similar = similar or find_similar_names(file.path[-1], names, compare_last_parts=True)
    hint = f"did you mean {similar[0]}?" if similar else "remove the key"
    raise NoCounterpart(
        f"unknown key of {file.program.title or file.program.name}, with the value "
        f"{format_short_value(value)}; {hint}"
    )


def _keep_file(file: ForeignFile) -> None:
    """Do nothing. Default of :attr:`ForeignProgram.normalize_file`."""


def _keep_settings(file: ForeignFile, num_devices: int) -> None:
    """Do nothing. Default of :attr:`ForeignProgram.complete_settings`."""


@dataclass(frozen=True)
class ForeignProgram:
    """Another trainer whose files can be imported, with the table of its keys.

    ``defaults`` and ``differences`` have an effect only if ``complete_settings`` calls
    :func:`~portable.importing.trainer_conversions.complete_run_settings`.

    Attributes:
        name: Name of the trainer in messages.
        keys: Table of the keys in its files.
        unique_keys: Top-level keys that only this trainer has, so that they identify its files.
        usual_keys: Further top-level keys that its files usually contain.
        title: Name in the list of trainers, if it differs from ``name``. Otherwise empty.
        defaults: Defaults of the trainer that differ from the defaults of a run, keyed by dotted
            setting.
        differences: Differences in behavior that remain after all keys were converted.
        unset_values: Values that mean "not set" in the trainer. Most table entries ignore them. For
            keys that are not in the table, they are passed to ``convert_unknown_key``.
        convert_unknown_key: Function that handles a key that is not in the table.
        normalize_file: Function that is called before the conversion, and changes a file to the
            layout that the table expects.
        complete_settings: Function that is called after all keys have been converted, and adds the
            settings that depend on several keys. Its second argument is the number of all devices
            of the original run, or 0 if it is unknown.
    """

    name: str
    keys: ForeignKeys
    unique_keys: tuple[str, ...] = ()
    usual_keys: tuple[str, ...] = ()
    title: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    differences: tuple[ProgramDifference, ...] = ()
    unset_values: tuple[Any, ...] = ()
    convert_unknown_key: Callable[[ForeignFile, Any], None] = refuse_unknown_key
    normalize_file: Callable[[ForeignFile], None] = _keep_file
    complete_settings: Callable[[ForeignFile, int], None] = _keep_settings

    def is_program_of(self, file_content: Mapping[str, object], *, is_foreign_file: bool) -> bool:
        """Return whether a file is probably a config file of this trainer.

        The names of its top-level keys decide. At least two of them must be listed in
        :attr:`unique_keys` or :attr:`usual_keys`.

        Args:
            file_content: Content of the file.
            is_foreign_file: Whether the file is known to belong to one of the supported trainers.
                If so, a single key in :attr:`unique_keys` is sufficient.
        """
        present = {*self.unique_keys, *self.usual_keys} & file_content.keys()
        return len(present) > 1 or (is_foreign_file and not present.isdisjoint(self.unique_keys))

    def find_key_entry(self, dotted_key: str) -> ForeignKey | None:
        """Find the entry of a dotted key in this trainer's table. See :func:`find_key_entry`."""
        return find_key_entry(self.keys, dotted_key)


def find_key_entry(keys: ForeignKeys, dotted_key: str) -> ForeignKey | None:
    """Find the entry of a dotted key in a table.

    Returns:
        The entry for exactly this key. If there is none, the first matching entry whose key ends
        with a wildcard, such as ``vllm_*``. None if no entry matches.
    """
    if dotted_key in keys:
        return keys[dotted_key]
    starred = (
        key for start, key in keys.items() if start.endswith("*") and dotted_key.startswith(start[:-1])
    )
    return next(starred, None)


class ForeignValue(NamedTuple):
    """Key-value pair from another trainer's config file, which is converted as a unit.

    Attributes:
        path: Path of the key.
        value: Value of the key. If the trainer's key table has entries for the keys inside a
            mapping, each of these keys becomes a separate ``ForeignValue``. Otherwise, the mapping
            itself is the value.
    """

    path: KeyPath
    value: Any


@dataclass
class ForeignFile:
    """Config file of another trainer, and the state of its conversion.

    Attributes:
        program: Trainer to which the file belongs.
        values: Content of the file.
        build_origin: Function that takes the path of a key, and returns the place of the key (file,
            line and key).
        result: Result for the keys that have been converted so far: settings, notes, and messages
            about keys that have no counterpart.
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

        Other trainers compute the global batch size when a run starts, as the product of the
        micro-batch size, the accumulation steps and the number of data-parallel devices. In this
        project, it is a setting that does not change with the number of devices. The setting is
        marked as assumed.

        The number of data-parallel devices is ``num_devices``, divided by the converted settings
        ``context_parallel_size`` and ``tensor_parallel_size``. If the file does not contain
        ``gradient_accumulation_steps``, one accumulation step is assumed. Nothing is set if a
        factor is unknown.

        Args:
            num_devices: Number of all devices of the original run. 0 if it is unknown.
        """
        micro = self.result.values.get("train.micro_batch_size")
        steps = self.get_value("gradient_accumulation_steps", 1)
        if num_devices and isinstance(micro, int) and isinstance(steps, int):
            reason = f"micro-batch {micro} x accumulation {steps} x devices {num_devices}"
            for key, shared in (("context_parallel_size", "sequence"), ("tensor_parallel_size", "layer")):
                parts = self.result.values.get(key, 1)
                if isinstance(parts, int) and parts > 1:
                    reason += f" / {parts} devices per {shared}"
                    num_devices = max(1, num_devices // parts)
            self.set_default_setting("train.global_batch_size", micro * steps * num_devices, reason)

    def add_note(self, path: KeyPath, message: str) -> None:
        """Add a note about a key to the result.

        The note begins with the origin of the key, for example ``config.yaml:3: gpu_ids``. An
        origin contains the key and, if known, the file name and the line.

        Args:
            path: Path of the key.
            message: Text of the note.
        """
        self.result.notes.append(to_one_line(f"{self.build_origin(path).text}: {message}"))

    def add_refusal(self, path: KeyPath, message: str) -> None:
        """Add an error message about a key to the result, because the key cannot be converted.

        The message is added to ``refusals``, prefixed with the origin of the key.

        Args:
            path: Path of the key.
            message: Text of the message, which ends with advice.
        """
        self.result.refusals.append(to_one_line(f"{self.build_origin(path).text}: {message}"))

    def convert_keys(self) -> None:
        """Convert every key of the file, and add the settings to :attr:`result`.

        If a converter raises :class:`NoEffect`, its message is added to the result as a note. If it
        raises :class:`NoCounterpart`, its message is added to the ``refusals`` of the result. A
        TypeError, ValueError, AttributeError or LookupError of a converter is also reported in
        ``refusals``, as a value with an unexpected type.
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
                    path,
                    f"{format_short_value(value)} has an unexpected type; correct the value, or remove the "
                    "key",
                )

    def _iter_key_values(self, values: Mapping[str, Any], section: KeyPath) -> Iterator[ForeignValue]:
        """Yield the keys to convert, together with their values.

        A key is a section if the trainer's key table has entries for keys inside it. For example,
        an entry ``optimizer.lr`` makes ``optimizer`` a section. If the value of a section is a
        mapping, the keys inside it are yielded, but not the section itself. If the value is not a
        mapping, there are two cases:

        - If the table also has an entry for the section itself, the section is yielded like any
          other key.
        - If the table has no such entry, the value is reported with :meth:`add_refusal`, unless it
          is null, false or empty.

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
        """Convert one key, and add its settings to :attr:`result`.

        The key is converted by its entry in the trainer's key table. If the table has no such
        entry, the trainer's ``convert_unknown_key`` handles the key. A value that has no effect
        according to the entry is skipped.

        Exceptions of converters, such as :class:`NoCounterpart`, are not caught here, but in
        :meth:`convert_keys`.
        """
        key = self.program.find_key_entry(".".join(path))
        if key is None:
            self.program.convert_unknown_key(self, value)
        elif not key.has_no_effect(value, self):
            for setting, converted in key.convert(value, self).items():
                self.set_setting(path, setting, converted)
