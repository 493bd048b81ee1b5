"""Statistics that a device's compiler reports about the graphs of a training step."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class CollectiveStatistics:
    """Statistics of all collectives of one type, such as all-gather, in a graph.

    A collective inside a loop counts once per iteration.
    """

    count: int = 0
    bytes: int = 0
    """Number of bytes that a device sends, if the collectives use ring algorithms."""
    asynchronous: int = 0
    """Number of collectives that the schedule starts and completes with separate instructions."""
    overlapped: int = 0
    """Number of asynchronous collectives that overlap with computation."""
    compute_cycles: int = 0
    """Compiler's estimate of the computation that overlaps with collectives, in cycles."""

    def __add__(self, other: CollectiveStatistics) -> CollectiveStatistics:
        return CollectiveStatistics(
            *(a + b for a, b in zip(asdict(self).values(), asdict(other).values(), strict=True))
        )

    def __mul__(self, times: int) -> CollectiveStatistics:
        return CollectiveStatistics(*(value * times for value in asdict(self).values()))


@dataclass(frozen=True)
class LargeValue:
    """Large value in device memory, such as the logits.

    For ``portable-plan``, a value is large if its number of elements is at least the product of the
    micro-batch size, the sequence length, and the vocabulary size. Such values are worth reporting,
    because they often determine the peak memory.
    """

    shape: str
    bytes: int
    operation: str
    """Name of the model's operation that computes the value. Empty if the compiler does not report it."""
    source: str
    """Line of code that computes the value, such as ``models/llama.py:12``. Empty if it is unknown."""
    count: int = 1
    """Number of values in the graph with this shape and origin."""


@dataclass(frozen=True)
class CompiledGraph:
    """Statistics of a compiled graph. All sizes, FLOPs and memory traffic are per device.

    A graph named ``step`` computes a complete training step. If a run has no such graph, a step
    consists of one run of the graph ``micro-batch`` per micro-batch, and one run of the graph
    ``update``. The key of ``collectives`` is the type of the collective, such as ``all-gather``.
    ``custom_calls`` contains the number of calls, keyed by target.
    """

    name: str
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    """Size of the arguments whose memory is reused for results, in bytes."""
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
    """Instructions that transfer data to or from the host, so that the device waits for the host."""
    notes: tuple[str, ...] = ()

    @property
    def working_bytes(self) -> int:
        """Device memory in bytes that the running graph needs in addition to its arguments and code."""
        return self.output_bytes - self.alias_bytes + self.temporary_bytes

    @property
    def sent_bytes(self) -> int:
        """Number of bytes that a device sends in all collectives of the graph."""
        return sum(collective.bytes for collective in self.collectives.values())


@dataclass(frozen=True)
class CompiledRun:
    """All graphs of a run, compiled for a topology."""

    topology: str
    compiler: str
    """Name and version of the compiler."""
    hbm_bytes: int
    """Device memory that is available to programs, in bytes."""
    graphs: tuple[CompiledGraph, ...]
    """Graphs that the compiler could compile."""
    problems: tuple[str, ...] = ()
    """Reasons why the run does not fit into device memory, one line per reason.

    If the compiler fails for a graph because the graph does not fit, ``graphs`` does not contain the graph.
    """
    needed_bytes: int = 0
    """Memory required by the largest graph that does not fit into device memory, in bytes. 0 if every
    graph fits by itself."""
    notes: tuple[str, ...] = ()
    host_bytes: int = 0
    """Peak memory of the compiler process on this machine, in bytes."""

    @property
    def state_bytes(self) -> int:
        """Largest total size, in bytes, of the arguments of one compiled graph.

        The arguments of a graph are the training state and a batch. The value is 0 if the run has
        no compiled graph.
        """
        return max((graph.argument_bytes for graph in self.graphs), default=0)

    @property
    def working_bytes(self) -> int:
        """Working memory of the graph that needs the most, in bytes."""
        return max((graph.working_bytes for graph in self.graphs), default=0)

    @property
    def code_bytes(self) -> int:
        """Total size of the code of all graphs in bytes.

        The sizes are added, because the code of every graph stays loaded on the device.
        """
        return sum(graph.code_bytes for graph in self.graphs)

    @property
    def peak_bytes(self) -> int:
        """Peak memory of a device in bytes: the state, the code of all graphs, and the working memory.

        The graphs run one after another, so the working memory is the maximum over all graphs, not
        the sum. If some graphs do not fit into device memory, the peak is at least
        ``needed_bytes``, the memory that the largest of them requires.
        """
        return max(self.state_bytes + self.code_bytes + self.working_bytes, self.needed_bytes)

    @property
    def fits(self) -> bool:
        """Whether the compiler found no problem and the graphs fit into the memory of a device."""
        return not self.problems and self.peak_bytes <= self.hbm_bytes

    def find_graph(self, name: str) -> CompiledGraph | None:
        """Return the graph with the given name, or None if there is none."""
        return next((graph for graph in self.graphs if graph.name == name), None)

    def compute_sent_bytes_per_step(self, micro_batches: int) -> int:
        """Compute the number of bytes that a device sends in all collectives of an optimizer step.

        The graph ``micro-batch`` runs once per micro-batch, and the graphs ``step`` and ``update``
        run once. Other graphs, such as ``evaluation``, are not part of a step.

        Args:
            micro_batches: Number of micro-batches in the step.
        """
        times = {"step": 1, "micro-batch": micro_batches, "update": 1}
        return sum(graph.sent_bytes * times.get(graph.name, 0) for graph in self.graphs)
