"""What a row of the table of foreign names says, and how rows are applied to a file."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portable.config.origins import Origin, shown
from portable.config.types import truth
from portable.config.yaml_text import parse_value
from portable.errors import UserError, one_line

if TYPE_CHECKING:
    from collections.abc import Iterator

Keys = tuple[str, ...]
EMPTY: tuple[Any, ...] = (None, "", {}, [])
How = Callable[[Any, "File"], Any]


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
        how: from the value to ours: by word, or a function of the value and the file. It returns the value,
            or settings by dotted key; None leaves the setting out.
        why: without a setting: why the key has no effect, or what to do instead. With one: what to write if
            that is more than its name.
        free: a key without a setting has no effect; without a reason it is passed over.
        silent: more values of such a key that ask for nothing.
    """

    to: str = ""
    how: How | Mapping[str, Any] | None = None
    why: str = ""
    free: bool = False
    silent: Sequence[Any] = ()

    @property
    def hint(self) -> str:
        """What an error about this name as a key of ours says: our setting, or a remedy."""
        return self.why or self.to


Rows = Mapping[str, Row]
_TABLES = Path(__file__).with_name("keys.md")
"""The beginning of the file has the notation."""


def cells(chapter: str) -> list[list[str]]:
    """The cells of each row of a chapter of ``keys.md``, without the table's head."""
    found = _TABLES.read_text("utf-8").partition(f"\n## {chapter}\n")[2].partition("\n## ")[0]
    return [line[2:-2].split(" | ") for line in found.splitlines() if line.startswith("| ")][2:]


def table(
    chapter: str, functions: Mapping[str, How], taken: Callable[[str], How] | None = None
) -> dict[str, Row]:
    """The rows of a chapter of ``keys.md``, by key; one that ends with a star is for all that begin so.

    Args:
        chapter: its heading.
        functions: what ``how`` is where words do not say it, by keys that spaces separate.
        taken: what it is for a setting where neither does.
    """
    by_name = {name: how for names, how in functions.items() for name in names.split()}
    rows = {
        name: _row(here, by_name.get(name), taken)
        for names, here in cells(chapter)
        for name in re.findall("`(.+?)`", names)
    }
    assert by_name.keys() <= rows.keys(), by_name.keys() - rows.keys()
    return rows


def _row(here: str, how: How | None, taken: Callable[[str], How] | None) -> Row:
    """What the cell ``here`` says; see :data:`_TABLES`."""
    kind, _, why = here.partition(": ")
    if how is None and kind.startswith(("no effect", "refused")):
        silent = parse_value(f"[{kind.partition(' unless ')[2]}]")
        return Row(why=why, free=kind.startswith("no effect"), silent=silent)
    if how is None and kind == "never false":
        return Row(how=_never_false, why=here)
    if kind == "if true":
        settings = dict(re.findall(r"([\w.]+) to ([\w-]+)", why))
        return Row(how={"true": settings, "auto": settings, "full": settings, "false": {}}, why=why)
    to, words, why = re.fullmatch(r"(?:`(.+?)`)? ?({.*})?(?:^|: |$)(.*)", here).groups(default="")  # type: ignore[union-attr]
    if how is None and to and taken is not None:
        how = taken(to)
    return Row(to, parse_value(words) if words else how or (None if to else _nothing), why)


def _never_false(value: Any, file: File) -> None:
    if value == 0 or truth(value) is False:
        raise NoCounterpart(f"false has no counterpart: {file.row.why.removeprefix('never false: ')}")


def _nothing(value: Any, file: File) -> None:
    """Of a key that others read, or that no setting is for."""


def row_of(rows: Rows, name: str) -> Row | None:
    """The row of a key, by its name or how it begins."""
    begins = (row for start, row in rows.items() if start.endswith("*") and name.startswith(start[:-1]))
    return rows.get(name) or next(begins, None)


@dataclass
class Imported:
    """What files of other programs come to.

    Attributes:
        values: by dotted key of the run's config.
        origins: the file, line and key of each.
        assumed: the settings that the files leave to their program; what another file says counts more.
        notes: keys that are ignored or have another meaning here, one line each.
        refused: keys without a counterpart, one line each, with what to do instead.
        differences: Differences between a run and the program that remain if every key has a counterpart.
        processes: local ranks to start; None if a launcher or the backend decides.
        gpu_ids: the value for ``CUDA_VISIBLE_DEVICES``; None to keep it.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    assumed: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
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
    origin: Callable[[Keys], Origin]
    unknown: Callable[[File, Any], None]
    """What is done with a key that has no row."""
    result: Imported = field(default_factory=Imported)
    path: Keys = ()
    row: Row = field(default_factory=Row)
    """These are of the key that is being taken over."""

    def get(self, dotted: str, default: Any = None) -> Any:
        """The value at a dotted path of the file."""
        found: Any = self.values
        for part in dotted.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return default if found is None else found

    def put(self, path: Keys, key: str, value: Any) -> None:
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

    def note(self, path: Keys, message: str) -> None:
        """Say what has no effect."""
        self.result.notes.append(one_line(f"{self.origin(path).text}: {message}"))

    def refuse(self, path: Keys, message: str) -> None:
        """Say what is refused, and what to do instead."""
        self.result.refused.append(one_line(f"{self.origin(path).text}: {message}"))

    def take(self) -> None:
        """Apply the row of each key."""
        for path, value in self._leaves(self.values, ()):
            row = row_of(self.rows, ".".join(path))
            self.path, self.row = path, row or Row()
            try:
                if row is None:
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

    def _leaves(self, values: Mapping[str, Any], around: Keys) -> Iterator[tuple[Keys, Any]]:
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

    def _take(self, path: Keys, row: Row, value: Any) -> None:
        if not row.to and row.how is None:
            asks = truth(value) not in (False, *EMPTY, *row.silent) and str(value) not in map(str, row.silent)
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


def choose(value: Any, words: Mapping[str, Any]) -> Any:
    """What ``value`` stands for, in any case; null for nothing.

    Raises:
        NoCounterpart: with the words there are.
    """
    by_word = {"NULL": None} | {word.upper(): meant for word, meant in words.items()}
    for given in (value, truth(value)):
        word = (given if isinstance(given, str) else shown(given)).upper()
        if word in by_word:
            return by_word[word]
    raise NoCounterpart(f"{shown(value)} has no counterpart; use one of {', '.join(words)}")
