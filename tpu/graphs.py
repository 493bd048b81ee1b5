"""The compiled graphs of a run: run them, count them, and say what brought about one too many."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tpu.runtime import torch_xla, xla, xla_metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

MOST_TEXT = 16 << 20  # characters of a graph worth comparing


class Graphs:
    """Runs what was recorded, one graph of each kind; a further one of the same kind is reported.

    Args:
        report: gets the line about a graph that was not expected.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._known: dict[str, dict[bytes, str]] = {}
        self._excess: Counter[str] = Counter()
        self._looked = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around what is only recorded: reports code that looks at values, and so runs what there is."""
        before = counted()
        yield
        if counted() != before and not self._looked:
            self._looked = True
            self._report(
                "xla: the model looks at values in its forward or backward pass, which runs part of the step "
                "early and waits for it, every time; set PT_XLA_DEBUG=1 to see where"
            )

    def run(self, kind: str, results: Sequence[Tensor]) -> None:
        """Start everything recorded so far, without waiting for it.

        Args:
            kind: what the graph computes, as a person would call it.
            results: tensors that the graph computes, by which it is recognised.
        """
        known = self._known.setdefault(kind, {})
        fingerprint = xla._get_graph_hash(list(results))
        before = _samples("CompileTime")
        if fingerprint not in known:
            text = xla._get_xla_tensors_text(list(results))[:MOST_TEXT]
            nearest = _nearest(text, known.values()) if known else None
            known[fingerprint] = text
            if nearest is not None:
                self._report_excess(kind, difference(nearest, text))
            torch_xla.sync()
            return
        torch_xla.sync()
        if _samples("CompileTime") > before:
            self._excess[kind] += 1
            self._report_excess(
                kind, "the same loss, but another update: a rate, decay or beta is a new value"
            )

    def _report_excess(self, kind: str, cause: str) -> None:
        number = self.distinct[kind]
        self._report(f"xla: graph {number} of the {kind} is compiled, where one should do: {cause}")

    @property
    def distinct(self) -> dict[str, int]:
        """How many different graphs of each kind there were."""
        return {kind: len(known) + self._excess[kind] for kind, known in self._known.items()}


def _nearest(text: str, known: Iterable[str]) -> str:
    lines = Counter(_normal(line) for line in text.splitlines())

    def distance(other: str) -> int:
        others = Counter(_normal(line) for line in other.splitlines())
        return (lines - others).total() + (others - lines).total()

    return min(known, key=distance)


def difference(before: str, after: str) -> str:
    """The first line in which two graphs differ, for a person: a shape, a value, or an operation."""
    old, new = ([_normal(line) for line in text.splitlines()] for text in (before, after))
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False) if len(old) < 4000 else None
    if matcher is None:
        pairs = ((a, b) for a, b in zip(old, new, strict=False) if a != b)
        found = next(pairs, None)
        return f"{found[0]} became {found[1]}" if found else "operations were added or removed"
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag != "equal":
            was, now = " ".join(old[a:b][:1]) or "nothing", " ".join(new[c:d][:1]) or "nothing"
            baked = "device_data" in was and "Constant" in now
            why = " (a scalar on the host that is now exactly 0 or 1)" if baked else ""
            return f"{was} became {now}{why}"
    return "the same operations in another order"


def _normal(line: str) -> str:
    """Without the numbers of the lines, which shift with every operation more."""
    return re.sub(r"%\d+", "%", line).strip()


def counted() -> dict[str, float]:
    """Graphs compiled, and transfers from the device, by this process so far."""
    return {
        "graphs_compiled": _samples("CompileTime"),
        "transfers_from_device": _samples("TransferFromDeviceTime"),
    }


def _samples(metric: str) -> int:
    data = xla_metrics.metric_data(metric)
    return int(data[0]) if data else 0
