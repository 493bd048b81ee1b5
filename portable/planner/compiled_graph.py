"""Statistics of the compiled graphs of a training step."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class CollectiveStatistics:
    """Statistics of all collectives of one kind in a graph.

    A collective in a loop counts once per iteration.
    """

    count: int = 0
    bytes: int = 0
    """Number of bytes that a device sends on a ring."""
    asynchronous: int = 0
    """Number of collectives with a separate start and end in the schedule."""
    overlapped: int = 0
    """Number of asynchronous collectives that overlap with computation."""
    compute_cycles: int = 0
    """Number of cycles of this computation, as the compiler estimates it."""

    def __add__(self, other: CollectiveStatistics) -> CollectiveStatistics:
        return CollectiveStatistics(
            *(a + b for a, b in zip(asdict(self).values(), asdict(other).values(), strict=True))
        )

    def __mul__(self, times: int) -> CollectiveStatistics:
        return CollectiveStatistics(*(value * times for value in asdict(self).values()))


@dataclass(frozen=True)
class LargeValue:
    """Result in device memory with at least as many elements as the logits of a device's micro-batch."""

    shape: str
    bytes: int
    operation: str
    """Operation of the model that computes the value. Empty if the compiler has not kept it."""
    source: str
    """Line of code that computes the value, such as ``models/llama.py:12``. Empty if it is unknown."""
    count: int = 1


@dataclass(frozen=True)
class CompiledGraph:
    """Compiled graph. Sizes are in bytes, and FLOPs and memory traffic are per device."""

    name: str
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    """Size of the arguments whose memory is reused for results."""
    temporary_bytes: int
    code_bytes: int
    flops: float
    bytes_accessed: float
    """Memory traffic according to the compiler's cost analysis. Caches are ignored."""
    compile_seconds: float
    collectives: dict[str, CollectiveStatistics] = field(default_factory=dict)
    large_values: tuple[LargeValue, ...] = ()
    custom_calls: dict[str, int] = field(default_factory=dict)
    host_transfers: tuple[str, ...] = ()
    """Instructions that wait for the host."""
    notes: tuple[str, ...] = ()

    @property
    def working_bytes(self) -> int:
        """Device memory that the running graph requires in addition to its arguments and its code."""
        return self.output_bytes - self.alias_bytes + self.temporary_bytes

    @property
    def sent_bytes(self) -> int:
        """Number of bytes that a device sends in all collectives."""
        return sum(collective.bytes for collective in self.collectives.values())


@dataclass(frozen=True)
class CompiledRun:
    """All graphs of a run, compiled for a topology."""

    topology: str
    compiler: str
    """Name and version of the compiler."""
    hbm_bytes: int
    """Device memory that is available to programs."""
    graphs: tuple[CompiledGraph, ...]
    problems: tuple[str, ...] = ()
    """Reasons why a graph or the graphs together do not fit, one line per reason. ``graphs`` does not contain
    a graph that does not fit by itself.
    """
    needed_bytes: int = 0
    """Largest memory that such a graph would require, according to the compiler. 0 if there is no such graph.
    """
    notes: tuple[str, ...] = ()
    host_bytes: int = 0
    """Peak memory of the compiler on this machine."""

    @property
    def state_bytes(self) -> int:
        """Size of the largest arguments: the state and a batch."""
        return max((graph.argument_bytes for graph in self.graphs), default=0)

    @property
    def working_bytes(self) -> int:
        """Largest working memory of a graph."""
        return max((graph.working_bytes for graph in self.graphs), default=0)

    @property
    def code_bytes(self) -> int:
        """Size of the code of all graphs. All programs stay loaded."""
        return sum(graph.code_bytes for graph in self.graphs)

    @property
    def peak_bytes(self) -> int:
        """Size of the state, the code of all graphs, and the working memory of the largest graph."""
        return max(self.state_bytes + self.code_bytes + self.working_bytes, self.needed_bytes)

    @property
    def fits(self) -> bool:
        """Whether the compiler found no problem and the graphs fit into the memory of a device."""
        return not self.problems and self.peak_bytes <= self.hbm_bytes

    def find_graph(self, name: str) -> CompiledGraph | None:
        """Return the graph with a name, or None if there is none."""
        return next((graph for graph in self.graphs if graph.name == name), None)

    def compute_sent_bytes_per_step(self, micro_batches: int) -> int:
        """Compute the number of bytes that a device sends in a step with a number of micro-batches."""
        times = {"step": 1, "micro-batch": micro_batches, "update": 1}
        return sum(graph.sent_bytes * times.get(graph.name, 0) for graph in self.graphs)
