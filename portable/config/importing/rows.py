"""What a row of the table of foreign names says, and how rows are applied to a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from portable.config.origins import Origin, shown
from portable.config.types import truth
from portable.errors import UserError, one_line

if TYPE_CHECKING:
    from collections.abc import Iterator

Values = Mapping[str, Any]
Path = tuple[str, ...]
EMPTY: tuple[Any, ...] = (None, "", {}, [])


def nothing(value: Any) -> bool:
    """Whether ``value`` asks for nothing. A zero is a value."""
    return value is False or value in EMPTY


class NoEffect(Exception):  # noqa: N818  (no error)
    """A value means nothing here; the text says why."""


class NoCounterpart(ValueError):  # noqa: N818
    """A value has no counterpart here; the text says what to do instead."""


@dataclass(frozen=True)
class Row:
    """What a key of another program is here.

    Attributes:
        to: our setting, as a dotted key; empty if ``how`` names it, or if there is none.
        how: from the value to ours: words in any case, or a function of the value and the file. It returns
            the value, or settings by dotted key; None leaves the setting out.
        why: without a setting: why the key has no effect, or what to do instead. With one: what to write if
            that is more than its name.
        free: a key without a setting has no effect; without a reason it is passed over.
        silent: the values of such a key that ask for nothing.
    """

    to: str = ""
    how: Callable[[Any, File], Any] | Mapping[Any, Any] | None = None
    why: str = ""
    free: bool = False
    silent: tuple[Any, ...] = (*EMPTY, False)

    @property
    def hint(self) -> str:
        """What an error about this name as a key of ours says: our setting, or a remedy."""
        return self.why or self.to


Rows = Mapping[str, Row]


def named(rows: Rows, prefix: str = "") -> dict[str, Row]:
    """The row of each key, which begins with ``prefix``; in ``rows``, spaces separate keys with one row."""
    return {prefix + name: row for names, row in rows.items() for name in names.split()}


def free(why: str = "", *silent: Any) -> Row:
    """A key without effect."""
    return Row(why=why, free=True, silent=(*silent, *EMPTY, False))


def refused(why: str, *silent: Any) -> Row:
    """A key without a counterpart, with what to do instead."""
    return Row(why=why, silent=(*silent, *EMPTY, False))


def never_off(why: str) -> Row:
    """A switch that must not be off."""

    def take(value: Any, file: File) -> None:
        if value == 0 or truth(value) is False:
            raise NoCounterpart(f"false has no counterpart: {why}")

    return Row(how=take, why=f"never false: {why}")


@dataclass
class Imported:
    """What files of other programs come to.

    Attributes:
        values: by dotted key of the run's config.
        origins: the file, line and key of each.
        assumed: the settings that the files leave to their program; what another file says counts more.
        notes: keys that are ignored or have another meaning here, one line each.
        refused: keys without a counterpart, one line each, with what to do instead.
        processes: local ranks to start; None if a launcher or the backend decides.
        gpu_ids: the value for ``CUDA_VISIBLE_DEVICES``; None to keep it.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    assumed: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    processes: int | None = None
    gpu_ids: str | None = None

    def demand(self) -> Imported:
        """These, unless something is refused.

        Raises:
            UserError: with the first refusal.
        """
        if self.refused:
            raise UserError(self.refused[0])
        return self


@dataclass
class File:
    """A file of another program while its keys are taken over, one by one."""

    program: str
    values: dict[str, Any]
    rows: Rows
    origin: Callable[[Path], Origin]
    unknown: Callable[[File, Any], None]
    """What is done with a key that has no row."""
    result: Imported = field(default_factory=Imported)
    path: Path = ()
    """Of the key whose row is being applied."""

    def get(self, dotted: str, default: Any = None) -> Any:
        """The value at a dotted path of the file."""
        found: Any = self.values
        for part in dotted.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return default if found is None else found

    def put(self, path: Path, key: str, value: Any) -> None:
        """Set ``key`` of the run."""
        self.result.values[key] = value
        self.result.origins[key] = self.origin(path)

    def default(self, key: str, value: Any, why: str) -> None:
        """Set ``key`` of the run, unless the file does."""
        if key not in self.result.values:
            self.result.values[key] = value
            self.result.origins[key] = Origin(why, 0)
            self.result.assumed.add(key)

    def batch(self, devices: int) -> None:
        """The global batch, which does not change from now on; ``devices`` 0: that is not known."""
        micro, steps = (
            self.result.values.get("train.micro_batch_size"),
            self.get("gradient_accumulation_steps", 1),
        )
        if devices and isinstance(micro, int) and isinstance(steps, int):
            why = f"micro-batch {micro} x accumulation {steps} x devices {devices}"
            for key, what in (("context_parallel_size", "sequence"), ("tensor_parallel_size", "layer")):
                parts = self.result.values.get(key, 1)
                if isinstance(parts, int) and parts > 1:
                    why += f" / {parts} that share each {what}"
                    devices = max(1, devices // parts)
            self.default("train.global_batch_size", micro * steps * devices, why)

    def note(self, path: Path, message: str) -> None:
        """Say what has no effect."""
        self.result.notes.append(one_line(f"{self.origin(path).text}: {message}"))

    def refuse(self, path: Path, message: str) -> None:
        """Say what is refused, and what to do instead."""
        self.result.refused.append(one_line(f"{self.origin(path).text}: {message}"))

    def take(self) -> None:
        """Apply the row of each key."""
        for path, value in self._leaves(self.values, ()):
            self.path = path
            try:
                if (row := self.rows.get(".".join(path))) is None:
                    self.unknown(self, value)
                else:
                    self._take(path, row, value)
            except NoEffect as reason:
                self.note(path, str(reason))
            except NoCounterpart as reason:
                self.refuse(path, str(reason))
            except (TypeError, ValueError, AttributeError, LookupError):  # of a conversion
                self.refuse(
                    path, f"{shown(value)} has no counterpart: it is not of the kind that is expected"
                )

    def _leaves(self, values: Values, around: Path) -> Iterator[tuple[Path, Any]]:
        for key, value in values.items():
            path = (*around, str(key))
            dotted = ".".join(path)
            inside = any(name.startswith(f"{dotted}.") for name in self.rows)
            if inside and isinstance(value, Mapping):
                yield from self._leaves(value, path)
            elif inside and dotted not in self.rows and not nothing(value):
                self.refuse(path, f"must be a mapping, not {shown(value)}")
            elif not inside or dotted in self.rows:
                yield path, value

    def _take(self, path: Path, row: Row, value: Any) -> None:
        if not row.to and row.how is None:
            asks = truth(value) not in row.silent
            if asks and row.free and row.why:
                raise NoEffect(f"{shown(value)} has no effect: {row.why}")
            if asks and not row.free:
                raise NoCounterpart(f"{shown(value)} has no counterpart: {row.why}")
            return
        if isinstance(row.how, Mapping):
            value = choose(value, row.how)
        elif row.how is not None:
            value = row.how(value, self)
        if not row.to:
            for key, item in (value or {}).items():
                self.put(path, key, item)
        elif value is not None:
            self.put(path, row.to, value)


def choose(value: Any, words: Mapping[Any, Any]) -> Any:
    """What ``value`` stands for, in any case. Raises ``NoCounterpart`` with the words there are."""
    for given in (value, truth(value)):
        wanted = given.upper() if isinstance(given, str) else given
        for word, meant in words.items():
            same = word.upper() if isinstance(word, str) else word
            if type(same) is type(wanted) and same == wanted:
                return meant
    known = dict.fromkeys(str(word) for word in words if word is not None)
    raise NoCounterpart(f"{shown(value)} has no counterpart; use one of {', '.join(known)}")
