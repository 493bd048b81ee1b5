"""Execute the compiled graphs of a run, count them, and explain unexpected compilations."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

from portable.tpu.xla.runtime import torch_xla, xla_metrics
from portable.tpu.xla.torch_xla_internals import xla

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

MAX_COMPARED_CHARS = 16 << 20  # graph texts are cut to this number of characters before they are compared


class GraphRunner:
    """Graph runner that reports unexpected compilations.

    Each graph has a name, such as ``step``, and should be compiled only once. If a second graph
    with the same name is compiled, the runner reports it with the probable cause.

    Args:
        report: Callback that receives a line about an unexpected graph.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._texts_by_hash: dict[str, dict[bytes, str]] = {}
        self._extra_graphs: Counter[str] = Counter()
        self._reported = False

    @contextmanager
    def warn_about_value_reads(self) -> Iterator[None]:
        """Return a context manager that warns if code reads the value of a tensor.

        Reading a value would execute a part of the graph too early. At exit, the context manager
        calls the ``report`` callback if XLA has compiled a graph or transferred data from a device
        since entry. Each runner reports this at most once.
        """
        counters_before = read_xla_counters()
        yield
        if read_xla_counters() != counters_before and not self._reported:
            self._reported = True
            self._report(
                "xla: the model reads tensor values in its forward or backward pass, which executes a "
                "part of each step early and waits for the device; set PT_XLA_DEBUG=1 to see where"
            )

    def run(self, kind: str, results: Sequence[Tensor]) -> None:
        """Start executing the traced operations as one graph.

        Executes all pending operations, even if their results are not in ``results``. Returns
        without waiting for the results, except when the graph runs for the first time.

        Args:
            kind: Name of the graph, such as ``step``. Only one graph with this name is expected, so
                the runner reports any further one.
            results: Tensors that the graph computes. A hash of their traced operations shows
                whether the graph has run before.
        """
        texts = self._texts_by_hash.setdefault(kind, {})
        fingerprint = xla.graph_hash(list(results))
        compilations_before = _count_metric_samples("CompileTime")
        if fingerprint not in texts:
            text = xla.graph_text(list(results))[:MAX_COMPARED_CHARS]
            nearest = _find_most_similar_text(text, texts.values()) if texts else None
            texts[fingerprint] = text
            if nearest is not None:
                self._report_extra_graph(kind, describe_graph_difference(nearest, text))
            # Wait for the first run of a graph. If the next graph began before its results exist, torch_xla
            # would sometimes compile the graph again.
            torch_xla.sync(wait=True)
            return
        torch_xla.sync()
        if _count_metric_samples("CompileTime") > compilations_before:
            self._extra_graphs[kind] += 1
            self._report_extra_graph(
                kind,
                "the loss is the same, but the update has a new constant, such as a learning rate, weight "
                "decay or beta",
            )

    def _report_extra_graph(self, graph_name: str, cause: str) -> None:
        number = self.graph_counts[graph_name]
        self._report(
            f"xla: compiling graph {number} of the {graph_name}, although one graph should be enough: {cause}"
        )

    @property
    def graph_counts(self) -> dict[str, int]:
        """Number of different graphs that were compiled under each name, keyed by that name.

        A number greater than 1 means that a graph such as ``step`` was compiled again with a
        change.
        """
        return {kind: len(texts) + self._extra_graphs[kind] for kind, texts in self._texts_by_hash.items()}


def _find_most_similar_text(text: str, texts: Iterable[str]) -> str:
    """Return the graph in ``texts`` that differs from ``text`` in the fewest lines.

    Each graph is given in text form. The comparison ignores the order of the lines, and the numbers
    in value names such as ``%12``.
    """
    lines = Counter(_strip_value_numbers(line) for line in text.splitlines())

    def compute_distance(other: str) -> int:
        others = Counter(_strip_value_numbers(line) for line in other.splitlines())
        return (lines - others).total() + (others - lines).total()

    return min(texts, key=compute_distance)


def describe_graph_difference(old_text: str, new_text: str) -> str:
    """Describe the first line that differs between two graph texts, such as ``f32[2] became f32[3]``.

    Value numbers are ignored, because one additional operation shifts the numbers of all later values.
    """
    old, new = ([_strip_value_numbers(line) for line in text.splitlines()] for text in (old_text, new_text))
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False) if len(old) < 4000 else None
    if matcher is None:
        pairs = ((a, b) for a, b in zip(old, new, strict=False) if a != b)
        pair = next(pairs, None)
        return f"{pair[0]} became {pair[1]}" if pair else "operations were added or removed"
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag != "equal":
            was, now = " ".join(old[a:b][:1]) or "nothing", " ".join(new[c:d][:1]) or "nothing"
            baked = "device_data" in was and "Constant" in now
            why = " (a scalar on the host that is now exactly 0 or 1)" if baked else ""
            return f"{was} became {now}{why}"
    return "the same operations in another order"


def _strip_value_numbers(line: str) -> str:
    """Remove the numbers of values, such as the 12 in ``%12``, from a line of a graph's text.

    Lines are compared without these numbers, because every additional operation shifts them.
    """
    return re.sub(r"%\d+", "%", line).strip()


def read_xla_counters() -> dict[str, float]:
    """Return how many graphs this process has compiled, and how often it has read from the devices.

    The numbers have the keys ``graphs_compiled`` and ``transfers_from_device``. A read is a
    transfer from a device to the host.
    """
    return {
        "graphs_compiled": _count_metric_samples("CompileTime"),
        "transfers_from_device": _count_metric_samples("TransferFromDeviceTime"),
    }


def _count_metric_samples(metric: str) -> int:
    data = xla_metrics.metric_data(metric)
    return int(data[0]) if data else 0
