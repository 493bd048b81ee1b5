"""Numbers of each sample that a model computed once, kept beside the data and part of every batch."""

from __future__ import annotations

import json
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from portable.data.locked_folder import locked_folder
from portable.data.samples.base import Arrays, Extended, Samples
from portable.data.tokens.cache import BLOCK, CacheDamagedError, CheckedArray
from portable.errors import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    import numpy.typing as npt

_VALUES, _META = "values.bin", "meta.json"
_FLOAT = np.dtype("<f4")


def write_table(folder: Path, shapes: dict[str, list[int]], rows: Iterable[npt.NDArray[Any]]) -> None:
    """Write a row of numbers for each sample, in order; the folder appears whole.

    Args:
        folder: of the table.
        shapes: of the columns in a row, by name.
        rows: parts of ``[samples, numbers]``.
    """
    with locked_folder(folder) as draft:
        sums, held, count = [], b"", 0
        with (draft.path / _VALUES).open("wb") as file:
            for part in rows:
                data = np.ascontiguousarray(part, dtype=_FLOAT).tobytes()
                file.write(data)
                count += len(part)
                held += data
                while len(held) >= BLOCK:
                    sums.append(zlib.crc32(held[:BLOCK]))
                    held = held[BLOCK:]
        sums += [zlib.crc32(held)] if held else []
        meta = {"shapes": shapes, "samples": count, "sums": sums}
        (draft.path / _META).write_text(json.dumps(meta), "utf-8")
        draft.commit()


class Table:
    """Open numbers of each sample.

    Raises:
        CacheDamagedError: if ``folder`` does not exist or is damaged.
    """

    def __init__(self, folder: Path) -> None:
        try:
            meta = json.loads((folder / _META).read_text("utf-8"))
            self._shapes: dict[str, list[int]] = meta["shapes"]
            self._width = sum(int(np.prod(shape)) for shape in self._shapes.values())
            if (folder / _VALUES).stat().st_size != meta["samples"] * self._width * _FLOAT.itemsize:
                raise CacheDamagedError(f"{folder / _VALUES}: damaged")
            sums = np.array(meta["sums"], dtype="<u4")
            self._values = CheckedArray(folder / _VALUES, _FLOAT, sums, self._width)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CacheDamagedError(f"{folder}: {one_line(error)}") from error

    def columns(self, indices: Sequence[int]) -> Arrays:
        """The columns of some samples, float32 ``[len(indices), *shape]``."""
        rows, at, found = self._values[list(indices)], 0, {}
        for name, shape in self._shapes.items():
            width = int(np.prod(shape))
            found[name] = rows[:, at : at + width].reshape(len(indices), *shape).copy()
            at += width
        return found


class ComputedSamples(Extended):
    """Samples with the columns of a table, which exists from the start of the training on.

    Attributes:
        plain: the samples without them.
        folder: of the table.
    """

    def __init__(self, plain: Samples, folder: Path) -> None:
        super().__init__(plain)
        self.folder = folder
        self._table: Table | None = None

    def arrays(self, places: Sequence[tuple[int, int]]) -> Arrays:
        if self._table is None:
            self._table = Table(self.folder)
        return {**self.plain.arrays(places), **self._table.columns([index for _, index in places])}
