"""Which class of a model each label of the data is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from portable.data.documents import listed
from portable.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class KnownClasses:
    """The classes that a model has before it sees the data."""

    place: str
    """The setting that they come from."""
    names: tuple[str, ...]
    """In the order of their ids."""

    @property
    def named(self) -> bool:
        """Whether a person named them; transformers calls the others LABEL_0, LABEL_1 ..."""
        return any(name != f"LABEL_{index}" for index, name in enumerate(self.names))


@dataclass(frozen=True)
class Classes:
    """The classes that a model is trained on."""

    names: tuple[str, ...]
    """In the order of their ids."""
    ids: tuple[int, ...]
    """The id of each label of the data, in the order in which its token cache numbers them."""


def number_classes(
    labels: Sequence[int | str], declared: Sequence[str] | None = None, known: KnownClasses | None = None
) -> Classes:
    """Give each label of the data the id that the model has for it.

    Args:
        labels: the different ones that there are, sorted.
        declared: names of the classes in a data set that knows them; its labels are numbers of these.
        known: the model's own classes; None for a head yet to be trained, which takes those of the data.

    Raises:
        UserError: there are fewer than two, or they are not the model's.
    """
    if len(labels) < 2:
        raise UserError("data.label_field: all records have one label; there is nothing to tell apart")
    if declared is not None:
        if outside := [label for label in labels if label not in range(len(declared))]:
            raise UserError(
                f"data.label_field: some records have the label {outside[0]!r}, which is none of the "
                f"{len(declared)} classes of the data set ({listed(declared)}); choose another data.split"
            )
        fresh = Classes(tuple(declared), tuple(int(label) for label in labels))
    else:
        fresh = Classes(tuple(str(label) for label in labels), tuple(range(len(labels))))
    if known is None:
        return fresh
    for spelt in (str, str.casefold):
        places = {spelt(name): index for index, name in enumerate(known.names)}
        ours = [spelt(name) for name in fresh.names]
        if len(places) == len(known.names) == len(ours) == len(set(ours)) and places.keys() == set(ours):
            return Classes(known.names, tuple(places[ours[index]] for index in fresh.ids))
    count = len(known.names)
    numbers = tuple(label for label in labels if isinstance(label, int) and 0 <= label < count)
    if declared is None and len(numbers) == len(labels) and not any(map(_is_number, known.names)):
        complete = len(numbers) == count and not known.named
        return Classes(fresh.names if complete else known.names, numbers)
    if not known.named and count == len(fresh.names):
        return fresh
    raise UserError(
        f"data.label_field: the labels of the data ({listed(fresh.names)}) are not the classes of "
        f"{known.place} ({listed(known.names)}); give the data the model's names, or begin at a model whose "
        "head is not trained yet"
    )


def _is_number(name: str) -> bool:
    try:
        float(name)
    except ValueError:
        return False
    return True
