"""Config file of another trainer, and its conversion to settings of a run, key by key.

:meth:`ForeignFile.convert_keys` looks up each key in the table of its program (:class:`ForeignProgram`). The
entry (a :class:`ForeignKey`) converts the value to settings, or raises :class:`NoEffect` or
:class:`NoCounterpart`. The result is an :class:`ImportedRun`.
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
"""Names from the top level of a file to a key."""
ConvertedSettings = Mapping[str, Any]
"""Values by dotted key of the config of a run."""
EMPTY_VALUES: tuple[Any, ...] = (None, "", {}, [])
"""Values that have no meaning for most keys."""


class NoEffect(Exception):  # noqa: N818  (not an error)
    """Raised by a conversion if a value has no effect in a run. Its text is the reason."""


class NoCounterpart(ValueError):  # noqa: N818
    """Raised by a conversion if a run has no equivalent of a value. Its text ends with advice."""


def is_off_or_empty(value: Any) -> bool:
    """Return whether ``value`` is null, false or empty. Zero is not."""
    return value is False or value in EMPTY_VALUES


@dataclass(frozen=True, kw_only=True)
class ForeignKey:
    """Conversion of the values of one key of another trainer.

    Null, false and empty values of a key are ignored, and so are the values in ``unless``.

    Attributes:
        unless: Further values to ignore, such as the default of the program.
        converts_empty_values: Whether :meth:`convert` also gets null, false and empty values.
        hint: Advice for error messages about this name in the config of a run. Empty if the target setting is
            enough.
    """

    unless: Sequence[Any] = ()
    converts_empty_values: bool = False
    hint: str = ""

    def has_no_effect(self, value: Any, file: ForeignFile) -> bool:
        """Return whether ``value`` is ignored, because it does not change anything."""
        silent = (*self.unless, *file.program.unset_values)
        if value in silent or parse_boolean_word(value) in silent or str(value) in map(str, silent):
            return True
        return not self.converts_empty_values and is_off_or_empty(value)

    def convert(self, value: Any, file: ForeignFile) -> ConvertedSettings:
        """Convert a value to settings.

        Args:
            value: Value of the key. :meth:`has_no_effect` must be false for it.
            file: The file. ``file.path`` is the path of the key.

        Returns:
            Values by dotted key. May be empty.

        Raises:
            NoEffect: If the value has no effect in a run.
            NoCounterpart: If a run has no equivalent of the value.
        """
        raise NotImplementedError

    @property
    def targets(self) -> tuple[str, ...]:
        """Settings that values may be converted to, as dotted keys."""
        return ()

    @property
    def remedy(self) -> str:
        """Replacement for this name in the config of a run: a setting, or a sentence."""
        return self.hint or ", ".join(self.targets)

    @property
    def summary(self) -> str:
        """Text about the key in docs/wild.md. Empty if the key has no effect and needs no replacement."""
        return self.remedy


ForeignKeys = Mapping[str, ForeignKey]
"""Table of a program: entries by dotted key. A key that ends with a star matches all keys with this
beginning."""


@dataclass
class ImportedRun:
    """Settings that were converted from files of other trainers.

    Attributes:
        values: Values by dotted key of the config of a run.
        origins: File, line and key of each value.
        assumed_keys: Settings that are defaults of the program. Values in other files take precedence over
            them.
        notes: Messages about keys that are ignored or have a different meaning in a run.
        refusals: Messages about keys that have no counterpart, with advice.
        differences: Sentences about differences between a run and the program that remain although all keys
            were converted.
        num_processes: Number of local ranks to start. None if a launcher or the backend determines it.
        gpu_ids: Value for ``CUDA_VISIBLE_DEVICES``. None to keep its value.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    assumed_keys: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    num_processes: int | None = None
    gpu_ids: str | None = None

    def raise_first_refusal(self) -> ImportedRun:
        """Return this object, unless a key has no counterpart.

        Raises:
            UserError: The first refusal.
        """
        if self.refusals:
            raise UserError(self.refusals[0])
        return self


@dataclass(frozen=True)
class ProgramDifference:
    """Difference between a run and the trainer of the imported file that no setting removes.

    Attributes:
        text: A sentence.
        setting: The setting that must be on for the difference to matter. Empty if it always matters.
    """

    text: str
    setting: str = ""


def refuse_unknown_key(file: ForeignFile, value: Any) -> None:
    """Refuse a key that is not in the table.

    False and empty values are ignored, because a later release of the program may have added a key that is
    off. They are only refused if the table has a similar name, because then the key may be misspelled.

    Raises:
        NoCounterpart: If the key may have a meaning.
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
    """Do nothing: the default of :attr:`ForeignProgram.normalize_file`."""


def _keep_settings(file: ForeignFile, num_devices: int) -> None:
    """Do nothing: the default of :attr:`ForeignProgram.complete_settings`."""


@dataclass(frozen=True)
class ForeignProgram:
    """Another program, with the table of its keys.

    Attributes:
        name: Name in messages.
        keys: Table of its keys.
        unique_keys: Keys that no other program has. They identify a file of the program.
        usual_keys: Further keys that its files usually have.
        title: Name in the list of programs, if it differs from ``name``.
        defaults: Defaults of the program that differ from the defaults of a run, by dotted key of the run.
        differences: Differences that remain although all keys were converted.
        unset_values: Values that are ignored for all keys.
        unknown_key_message: Message about an unknown key. ``{value}`` is replaced by its value.
        convert_unknown_key: Function that handles a key that is not in the table.
        normalize_file: Function that changes a file to the form that the table expects, before the
            conversion.
        complete_settings: Function that adds the settings that depend on several keys, after all keys have
            been converted. Its second argument is the number of devices that share a batch, or 0 if it is not
            known.
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
        """Return whether a file is probably a file of this program.

        At least two of its unique and usual keys must be in the file.

        Args:
            file_content: Content of the file.
            is_foreign_file: Whether the file is certainly from one of the programs. Then a single unique key
                is enough.
        """
        present = {*self.unique_keys, *self.usual_keys} & file_content.keys()
        return len(present) > 1 or (is_foreign_file and not present.isdisjoint(self.unique_keys))

    def find_key_entry(self, dotted_key: str) -> ForeignKey | None:
        """Return the entry of a dotted key, or None. See :func:`find_key_entry`."""
        return find_key_entry(self.keys, dotted_key)


def find_key_entry(keys: ForeignKeys, dotted_key: str) -> ForeignKey | None:
    """Return the entry of a dotted key, or the entry with a star that matches the key, or None."""
    if dotted_key in keys:
        return keys[dotted_key]
    starred = (
        key for start, key in keys.items() if start.endswith("*") and dotted_key.startswith(start[:-1])
    )
    return next(starred, None)


class ForeignValue(NamedTuple):
    """Value in a file of another trainer.

    Attributes:
        path: Path of its key.
        value: The value. It may be a mapping if the table has an entry for the key.
    """

    path: KeyPath
    value: Any


@dataclass
class ForeignFile:
    """File of another trainer while its keys are converted.

    Attributes:
        program: The program.
        values: Content of the file.
        build_origin: Function that returns the origin of a key, given its path.
        result: The settings that have been converted so far.
        path: Path of the key that is being converted.
    """

    program: ForeignProgram
    values: dict[str, Any]
    build_origin: Callable[[KeyPath], Origin]
    result: ImportedRun = field(default_factory=ImportedRun)
    path: KeyPath = ()

    def get_value(self, dotted_key: str, default: Any = None) -> Any:
        """Return a value of the file.

        Args:
            dotted_key: Path of the value, such as ``optimizer.params.lr``.
            default: Result if the value is missing or null.
        """
        value: Any = self.values
        for part in dotted_key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return default if value is None else value

    def set_setting(self, source_path: KeyPath, setting: str, value: Any) -> None:
        """Set a setting of the run, because of a key of the file.

        Args:
            source_path: Path of the key in the file, which becomes the origin of the setting.
            setting: Dotted key of the setting.
            value: Value of the setting.
        """
        self.result.values[setting] = value
        self.result.origins[setting] = self.build_origin(source_path)

    def set_default_setting(self, setting: str, value: Any, reason: str) -> None:
        """Set a setting of the run to a default, unless a key of the file has set it.

        Args:
            setting: Dotted key of the setting.
            value: Value of the setting.
            reason: Origin of the value in messages, such as ``default of TRL``.
        """
        if setting not in self.result.values:
            self.result.values[setting] = value
            self.result.origins[setting] = Origin(reason, 0)
            self.result.assumed_keys.add(setting)

    def set_global_batch_size(self, num_devices: int) -> None:
        """Set the global batch size: micro-batch size times accumulation steps times data-parallel devices.

        Other programs compute the global batch size when a run starts. Here, it is a setting and does not
        change with the number of devices. Nothing is set if one of the factors is not known.

        Args:
            num_devices: Number of devices that a batch is spread over. 0 if it is not known.
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
        """Add a note about the key at ``path``."""
        self.result.notes.append(to_one_line(f"{self.build_origin(path).text}: {message}"))

    def add_refusal(self, path: KeyPath, message: str) -> None:
        """Add the message that the key at ``path`` has no counterpart. The message ends with advice."""
        self.result.refusals.append(to_one_line(f"{self.build_origin(path).text}: {message}"))

    def convert_keys(self) -> None:
        """Convert every key of the file into :attr:`result`.

        Exceptions of a conversion become notes and refusals.
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
                # Raised by a conversion that expects another type.
                self.add_refusal(
                    path, f"{format_short_value(value)} has no counterpart: it is not of the expected kind"
                )

    def _iter_key_values(self, values: Mapping[str, Any], section: KeyPath) -> Iterator[ForeignValue]:
        """Yield each key with its value. For a section of the table, yield the keys inside of it instead.

        A section that is not a mapping is refused, unless its value is off.
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
        """Convert one key with its entry in the table, or with ``convert_unknown_key``."""
        key = self.program.find_key_entry(".".join(path))
        if key is None:
            self.program.convert_unknown_key(self, value)
        elif not key.has_no_effect(value, self):
            for setting, converted in key.convert(value, self).items():
                self.set_setting(path, setting, converted)
