"""A file of another program while it is converted, key by key, and the settings that it becomes."""

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
ConvertedSettings = Mapping[str, Any]
"""Values by dotted key of the config of a run."""
EMPTY_VALUES: tuple[Any, ...] = (None, "", {}, [])


class NoEffect(Exception):  # noqa: N818  (not an error)
    """A value has no effect here. The text gives the reason."""


class NoCounterpart(ValueError):  # noqa: N818
    """A value cannot be expressed here. The text ends with advice."""


def is_off_or_empty(value: Any) -> bool:
    """Return whether ``value`` is null, false or empty. Zero is a value."""
    return value is False or value in EMPTY_VALUES


@dataclass(frozen=True, kw_only=True)
class ForeignKey:
    """Conversion of the values of one key of another program.

    One rule holds for all programs: null, false and empty values mean nothing, and so do the values in
    ``unless``.

    Attributes:
        unless: Further values that mean nothing, such as the default of the program.
        converts_empty_values: Whether :meth:`convert` also gets null, false and empty values.
        hint: Advice for messages about this name as a key of a run's config. Empty if the target is enough.
    """

    unless: Sequence[Any] = ()
    converts_empty_values: bool = False
    hint: str = ""

    def has_no_effect(self, value: Any, file: ForeignFile) -> bool:
        """Return whether ``value`` leaves everything as it is."""
        silent = (*self.unless, *file.program.unset_values)
        if value in silent or parse_boolean_word(value) in silent or str(value) in map(str, silent):
            return True
        return not self.converts_empty_values and is_off_or_empty(value)

    def convert(self, value: Any, file: ForeignFile) -> ConvertedSettings:
        """Convert a value that means something to settings.

        Raises:
            NoEffect: If the value has no effect here.
            NoCounterpart: If the value is refused.
        """
        raise NotImplementedError

    @property
    def targets(self) -> tuple[str, ...]:
        """The settings that values may become."""
        return ()

    @property
    def remedy(self) -> str:
        """Replacement for this name in a run's config: a setting, or a sentence."""
        return self.hint or ", ".join(self.targets)

    @property
    def summary(self) -> str:
        """Text about the key in docs/wild.md; empty if the key has no effect and needs no replacement."""
        return self.remedy


ForeignKeys = Mapping[str, ForeignKey]


@dataclass
class ImportedRun:
    """The settings that files of other programs become.

    Attributes:
        values: Values by dotted key of the config of a run.
        origins: File, line and key of each value.
        assumed_keys: Settings that the files leave to their program. A value in another file precedes them.
        notes: Keys that are ignored or have another meaning here, one line each.
        refusals: Keys without a counterpart, one line each, with what to do instead.
        differences: Differences between a run and the program that remain if every key has a counterpart.
        num_processes: Number of local ranks to start. None if a launcher or the backend decides.
        gpu_ids: Value for ``CUDA_VISIBLE_DEVICES``. None to keep it.
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
        """Return this object if no key is refused.

        Raises:
            UserError: The first refused key.
        """
        if self.refusals:
            raise UserError(self.refusals[0])
        return self


@dataclass(frozen=True)
class ProgramDifference:
    """A difference that remains between a run and the program that its file is from.

    Attributes:
        text: A sentence.
        setting: The setting that must be on for the difference to matter; empty if it always does.
    """

    text: str
    setting: str = ""


def refuse_unknown_key(file: ForeignFile, value: Any) -> None:
    """Refuse a key that is not in the table.

    A later release may have added a key that is off, so false and empty values are passed over. A key with a
    similar name in the table may be misspelled.

    Raises:
        NoCounterpart: If the key may mean something.
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
    pass


def _keep_settings(file: ForeignFile, num_devices: int) -> None:
    pass


@dataclass(frozen=True)
class ForeignProgram:
    """Another program, with the table of its keys.

    Attributes:
        name: Name in messages.
        keys: Table of its keys.
        unique_keys: Keys that no other program has.
        usual_keys: More keys of its files.
        title: Name in the list of programs, if it is another one.
        defaults: Settings that the program assumes and that differ from the defaults here.
        differences: Differences that remain if every key has a counterpart.
        unset_values: Values that mean nothing for any of its keys.
        unknown_key_message: Message about an unknown key; ``{value}`` is its value.
        convert_unknown_key: Function that handles a key that is not in the table.
        normalize_file: Brings a file into the form that the table is for.
        complete_settings: Converts settings that several keys determine together, after each of them has been
            converted. Its second argument is the number of devices that share a batch; 0 if it is not known.
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
        """Return whether a file with the top-level keys ``file_content`` is one of this program.

        Args:
            file_content: Content of the file.
            is_foreign_file: Whether the file is from one of the programs. Then a single key that only
                this program has is enough.
        """
        present = {*self.unique_keys, *self.usual_keys} & file_content.keys()
        return len(present) > 1 or (is_foreign_file and not present.isdisjoint(self.unique_keys))

    def find_key_entry(self, dotted_key: str) -> ForeignKey | None:
        """Return the entry of the dotted key ``dotted_key``, or None."""
        return find_key_entry(self.keys, dotted_key)


def find_key_entry(keys: ForeignKeys, dotted_key: str) -> ForeignKey | None:
    """Return the entry of the dotted key ``dotted_key``, or the entry with a star that matches it, or None."""
    if dotted_key in keys:
        return keys[dotted_key]
    starred = (
        key for start, key in keys.items() if start.endswith("*") and dotted_key.startswith(start[:-1])
    )
    return next(starred, None)


class ForeignValue(NamedTuple):
    """A value in a file of another program.

    Attributes:
        path: Path of its key.
        value: The value, which may be a mapping if the table has an entry for the key.
    """

    path: KeyPath
    value: Any


@dataclass
class ForeignFile:
    """A file of another program while its keys are converted.

    Attributes:
        program: The program.
        values: Content of the file.
        build_origin: Function from the path of a key to its origin.
        result: The settings so far.
        path: Path of the key that is being converted.
    """

    program: ForeignProgram
    values: dict[str, Any]
    build_origin: Callable[[KeyPath], Origin]
    result: ImportedRun = field(default_factory=ImportedRun)
    path: KeyPath = ()

    def get_value(self, dotted_key: str, default: Any = None) -> Any:
        """Return the value at a dotted path of the file."""
        value: Any = self.values
        for part in dotted_key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return default if value is None else value

    def set_setting(self, source_path: KeyPath, setting: str, value: Any) -> None:
        """Set ``setting`` of the run because of the key at ``source_path``."""
        self.result.values[setting] = value
        self.result.origins[setting] = self.build_origin(source_path)

    def set_default_setting(self, setting: str, value: Any, reason: str) -> None:
        """Set ``setting`` of the run, unless the file does."""
        if setting not in self.result.values:
            self.result.values[setting] = value
            self.result.origins[setting] = Origin(reason, 0)
            self.result.assumed_keys.add(setting)

    def set_global_batch_size(self, num_devices: int) -> None:
        """Set the global batch size, which does not depend on the number of devices from now on.

        Args:
            num_devices: Number of devices that a batch is spread over; 0 if it is not known.
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
        """Refuse the key at ``path``. The message ends with advice."""
        self.result.refusals.append(to_one_line(f"{self.build_origin(path).text}: {message}"))

    def convert_keys(self) -> None:
        """Convert every key."""
        for path, value in self._iter_key_values(self.values, ()):
            self.path = path
            try:
                self._convert_key(path, value)
            except NoEffect as reason:
                self.add_note(path, str(reason))
            except NoCounterpart as reason:
                self.add_refusal(path, str(reason))
            except (TypeError, ValueError, AttributeError, LookupError):  # of a conversion
                self.add_refusal(
                    path, f"{format_short_value(value)} has no counterpart: it is not of the expected kind"
                )

    def _iter_key_values(self, values: Mapping[str, Any], section: KeyPath) -> Iterator[ForeignValue]:
        """Yield the path and the value of each key that is in the table or in none of its sections."""
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
        key = self.program.find_key_entry(".".join(path))
        if key is None:
            self.program.convert_unknown_key(self, value)
        elif not key.has_no_effect(value, self):
            for setting, converted in key.convert(value, self).items():
                self.set_setting(path, setting, converted)
