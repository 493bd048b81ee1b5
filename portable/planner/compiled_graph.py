"""Graphs of a training step as a compiler sees them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class CollectiveStatistics:
    """All collectives of one kind in a graph. A loop's count as often as it runs."""

    count: int = 0
    bytes: int = 0
    """Bytes that a device sends, on a ring."""
    asynchronous: int = 0
    """Number of collectives with a separate start and end in the schedule."""
    overlapped: int = 0
    """Number of these that have computation between start and end."""
    compute_cycles: int = 0
    """The compiler's estimate of the cycles of that computation."""

    def __add__(self, other: CollectiveStatistics) -> CollectiveStatistics:
        return CollectiveStatistics(
            *(a + b for a, b in zip(asdict(self).values(), asdict(other).values(), strict=True))
        )

    def __mul__(self, times: int) -> CollectiveStatistics:
        return CollectiveStatistics(*(value * times for value in asdict(self).values()))


@dataclass(frozen=True)
class LargeValue:
    """A result in device memory with at least as many elements as the logits of a device's micro-batch."""

    shape: str
    bytes: int
    operation: str
    """Operation of the model, if the compiler has kept it."""
    source: str
    """``models/llama.py:12``; empty if unknown."""
    count: int = 1


@dataclass(frozen=True)
class CompiledGraph:
    """One graph, as compiled; sizes in bytes, FLOPs and traffic of one device."""

    name: str
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    """Arguments whose memory results take over."""
    temporary_bytes: int
    code_bytes: int
    flops: float
    bytes_accessed: float
    """By the compiler's cost analysis, which does not consider caches."""
    compile_seconds: float
    collectives: dict[str, CollectiveStatistics] = field(default_factory=dict)
    large_values: tuple[LargeValue, ...] = ()
    custom_calls: dict[str, int] = field(default_factory=dict)
    host_transfers: tuple[str, ...] = ()
    """Instructions that wait for the host."""
    notes: tuple[str, ...] = ()

    @property
    def working_bytes(self) -> int:
        """Device memory that the graph takes in addition to its arguments and code while it runs."""
        return self.output_bytes - self.alias_bytes + self.temporary_bytes

    @property
    def sent_bytes(self) -> int:
        """Bytes that a device sends in all collectives."""
        return sum(collective.bytes for collective in self.collectives.values())


@dataclass(frozen=True)
class CompiledRun:
    """A run's graphs, compiled for a topology."""

    topology: str
    compiler: str
    """Name and version."""
    hbm_bytes: int
    """Bytes of a device's memory that programs may fill."""
    graphs: tuple[CompiledGraph, ...]
    problems: tuple[str, ...] = ()
    """Reasons why a graph, or all graphs together, do not fit, one line per reason. A graph that alone
    does not fit is not among ``graphs``."""
    needed_bytes: int = 0
    """The most that such a graph would take, by the compiler; 0 if there is none."""
    notes: tuple[str, ...] = ()
    host_bytes: int = 0
    """The most memory of this machine that the compiler took."""

    @property
    def state_bytes(self) -> int:
        """The largest arguments: the state that stays from graph to graph, with a batch."""
        return max((graph.argument_bytes for graph in self.graphs), default=0)

    @property
    def working_bytes(self) -> int:
        """The most that a graph takes while it runs."""
        return max((graph.working_bytes for graph in self.graphs), default=0)

    @property
    def code_bytes(self) -> int:
        """Size of the code of all graphs, whose programs stay loaded."""
        return sum(graph.code_bytes for graph in self.graphs)

    @property
    def peak_bytes(self) -> int:
        """State, the code of all graphs, and the working memory of the largest graph."""
        return max(self.state_bytes + self.code_bytes + self.working_bytes, self.needed_bytes)

    @property
    def fits(self) -> bool:
        """Whether the compiler found no problem and the graphs fit into the memory of a device."""
        return not self.problems and self.peak_bytes <= self.hbm_bytes

    def find_graph(self, name: str) -> CompiledGraph | None:
        """Return the graph of this name; None if there is none."""
        return next((graph for graph in self.graphs if graph.name == name), None)

    def compute_sent_bytes_per_step(self, micro_batches: int) -> int:
        """Bytes that a device sends in a step of ``micro_batches`` micro-batches."""
        times = {"step": 1, "micro-batch": micro_batches, "update": 1}
        return sum(graph.sent_bytes * times.get(graph.name, 0) for graph in self.graphs)
