"""A file of another program while it is converted, key by key, and the settings that it becomes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.config.field_types import parse_truth
from portable.config.origins import Origin, format_short_value
from portable.converters.similar_names import find_similar
from portable.errors import UserError, to_one_line

if TYPE_CHECKING:
    from collections.abc import Iterator

Path = tuple[str, ...]
Settings = Mapping[str, Any]
"""Values by dotted key of the config of a run."""
EMPTY: tuple[Any, ...] = (None, "", {}, [])


class NoEffect(Exception):  # noqa: N818  (not an error)
    """A value has no effect here. The text gives the reason."""


class NoCounterpart(ValueError):  # noqa: N818
    """A value cannot be expressed here. The text ends with advice."""


def is_off(value: Any) -> bool:
    """Return whether ``value`` is null, false or empty. Zero is a value."""
    return value is False or value in EMPTY


@dataclass(frozen=True, kw_only=True)
class ForeignKey:
    """Conversion of the values of one key of another program.

    One rule holds for all programs: null, false and empty values mean nothing, and so do the values in
    ``unless``.

    Attributes:
        unless: Further values that mean nothing, such as the default of the program.
        reads_every_value: Whether :meth:`convert` also gets null, false and empty values.
        hint: Advice for messages about this name as a key of a run's config. Empty if the target is enough.
    """

    unless: Sequence[Any] = ()
    reads_every_value: bool = False
    hint: str = ""

    def has_no_effect(self, value: Any, file: ForeignFile) -> bool:
        """Return whether ``value`` leaves everything as it is."""
        silent = (*self.unless, *file.program.unset)
        if value in silent or parse_truth(value) in silent or str(value) in map(str, silent):
            return True
        return not self.reads_every_value and is_off(value)

    def convert(self, value: Any, file: ForeignFile) -> Settings:
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
        assumed: Settings that the files leave to their program. A value in another file precedes them.
        notes: Keys that are ignored or have another meaning here, one line each.
        refused: Keys without a counterpart, one line each, with what to do instead.
        differences: Differences between a run and the program that remain if every key has a counterpart.
        processes: Number of local ranks to start. None if a launcher or the backend decides.
        gpu_ids: Value for ``CUDA_VISIBLE_DEVICES``. None to keep it.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    assumed: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    processes: int | None = None
    gpu_ids: str | None = None

    def require_all(self) -> ImportedRun:
        """Return this object if no key is refused.

        Raises:
            UserError: The first refused key.
        """
        if self.refused:
            raise UserError(self.refused[0])
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


def refuse_unknown(file: ForeignFile, value: Any) -> None:
    """Refuse a key that is not in the table.

    A later release may have added a key that is off, so false and empty values are passed over. A key with a
    similar name in the table may be misspelled.

    Raises:
        NoCounterpart: If the key may mean something.
    """
    section = ".".join((*file.path[:-1], ""))
    inside = [name.removeprefix(section) for name in file.program.keys if name.startswith(section)]
    names = dict.fromkeys([*inside, *(name.partition(".")[0] for name in inside)])
    similar = find_similar(file.path[-1], names)
    if value is None or (is_off(parse_truth(value)) and not similar):
        return
    similar = similar or find_similar(file.path[-1], names, compare_last_parts=True)
    hint = f"; did you mean {similar[0]}?" if similar else ""
    raise NoCounterpart(file.program.unknown.format(value=format_short_value(value)) + hint)


def _do_nothing(file: ForeignFile) -> None:
    pass


def _finish_nothing(file: ForeignFile, devices: int) -> None:
    pass


@dataclass(frozen=True)
class ForeignProgram:
    """Another program, with the table of its keys.

    Attributes:
        name: Name in messages.
        keys: Table of its keys.
        own_keys: Keys that no other program has.
        usual_keys: More keys of its files.
        title: Name in the list of programs, if it is another one.
        defaults: Settings that the program assumes and that differ from the defaults here.
        differences: Differences that remain if every key has a counterpart.
        unset: Values that mean nothing for any of its keys.
        unknown: Message about an unknown key; ``{value}`` is its value.
        convert_unknown: Function that handles a key that is not in the table.
        prepare: Brings a file into the form that the table is for.
        finish: Converts settings that several keys determine together, after each of them has been
            converted. Its second argument is the number of devices that share a batch; 0 if it is not known.
    """

    name: str
    keys: ForeignKeys
    own_keys: tuple[str, ...] = ()
    usual_keys: tuple[str, ...] = ()
    title: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    differences: tuple[ProgramDifference, ...] = ()
    unset: tuple[Any, ...] = ()
    unknown: str = "{value} is not known here"
    convert_unknown: Callable[[ForeignFile, Any], None] = refuse_unknown
    prepare: Callable[[ForeignFile], None] = _do_nothing
    finish: Callable[[ForeignFile, int], None] = _finish_nothing

    def has_written(self, values: Mapping[str, object], *, likely: bool) -> bool:
        """Return whether a file with the top-level keys ``values`` is one of this program.

        Args:
            values: Content of the file.
            likely: Whether the file is from one of the programs. Then a single key that only
                this program has is enough.
        """
        present = {*self.own_keys, *self.usual_keys} & values.keys()
        return len(present) > 1 or (likely and not present.isdisjoint(self.own_keys))

    def find_key(self, name: str) -> ForeignKey | None:
        """Return the entry of the dotted key ``name``, or None."""
        return find_key(self.keys, name)


def find_key(keys: ForeignKeys, name: str) -> ForeignKey | None:
    """Return the entry of the dotted key ``name``, or the entry with a star that matches it, or None."""
    if name in keys:
        return keys[name]
    starred = (key for start, key in keys.items() if start.endswith("*") and name.startswith(start[:-1]))
    return next(starred, None)


class ForeignValue(NamedTuple):
    """A value in a file of another program.

    Attributes:
        path: Path of its key.
        value: The value, which may be a mapping if the table has an entry for the key.
    """

    path: Path
    value: Any


@dataclass
class ForeignFile:
    """A file of another program while its keys are converted.

    Attributes:
        program: The program.
        values: Content of the file.
        origin: Function from the path of a key to its origin.
        result: The settings so far.
        path: Path of the key that is being converted.
    """

    program: ForeignProgram
    values: dict[str, Any]
    origin: Callable[[Path], Origin]
    result: ImportedRun = field(default_factory=ImportedRun)
    path: Path = ()

    def get(self, dotted: str, default: Any = None) -> Any:
        """Return the value at a dotted path of the file."""
        value: Any = self.values
        for part in dotted.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return default if value is None else value

    def put(self, path: Path, key: str, value: Any) -> None:
        """Set ``key`` of the run because of the key at ``path``."""
        self.result.values[key] = value
        self.result.origins[key] = self.origin(path)

    def put_default(self, key: str, value: Any, reason: str) -> None:
        """Set ``key`` of the run, unless the file does."""
        if key not in self.result.values:
            self.result.values[key] = value
            self.result.origins[key] = Origin(reason, 0)
            self.result.assumed.add(key)

    def put_global_batch(self, devices: int) -> None:
        """Set the global batch size, which does not depend on the number of devices from now on.

        Args:
            devices: Number of devices that a batch is spread over; 0 if it is not known.
        """
        micro = self.result.values.get("train.micro_batch_size")
        steps = self.get("gradient_accumulation_steps", 1)
        if devices and isinstance(micro, int) and isinstance(steps, int):
            reason = f"micro-batch {micro} x accumulation {steps} x devices {devices}"
            for key, shared in (("context_parallel_size", "sequence"), ("tensor_parallel_size", "layer")):
                parts = self.result.values.get(key, 1)
                if isinstance(parts, int) and parts > 1:
                    reason += f" / {parts} that share each {shared}"
                    devices = max(1, devices // parts)
            self.put_default("train.global_batch_size", micro * steps * devices, reason)

    def note(self, path: Path, message: str) -> None:
        """Add a note about the key at ``path``."""
        self.result.notes.append(to_one_line(f"{self.origin(path).text}: {message}"))

    def refuse(self, path: Path, message: str) -> None:
        """Refuse the key at ``path``. The message ends with advice."""
        self.result.refused.append(to_one_line(f"{self.origin(path).text}: {message}"))

    def convert(self) -> None:
        """Convert every key."""
        for path, value in self._iter_leaves(self.values, ()):
            self.path = path
            try:
                self._convert_key(path, value)
            except NoEffect as reason:
                self.note(path, str(reason))
            except NoCounterpart as reason:
                self.refuse(path, str(reason))
            except (TypeError, ValueError, AttributeError, LookupError):  # of a conversion
                self.refuse(
                    path, f"{format_short_value(value)} has no counterpart: it is not of the expected kind"
                )

    def _iter_leaves(self, values: Mapping[str, Any], section: Path) -> Iterator[ForeignValue]:
        """Yield the path and the value of each key that is in the table or in none of its sections."""
        for key, value in values.items():
            path = (*section, str(key))
            dotted = ".".join(path)
            is_section = any(name.startswith(f"{dotted}.") for name in self.program.keys)
            if is_section and isinstance(value, Mapping):
                yield from self._iter_leaves(value, path)
            elif is_section and dotted not in self.program.keys and not is_off(value):
                self.refuse(path, f"must be a mapping, not {format_short_value(value)}")
            elif not is_section or dotted in self.program.keys:
                yield ForeignValue(path, value)

    def _convert_key(self, path: Path, value: Any) -> None:
        key = self.program.find_key(".".join(path))
        if key is None:
            self.program.convert_unknown(self, value)
        elif not key.has_no_effect(value, self):
            for setting, converted in key.convert(value, self).items():
                self.put(path, setting, converted)
