"""Describe the output of a conversion: its files, and the contents of each file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from portable.converters.tensors.casting import BLOCK_BYTES, CastLosses
from portable.converters.tensors.entry import OutputTensor
from portable.converters.writers.parallel_jobs import get_default_thread_count

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from portable.converters.storage.path_or_url import AnyPath
    from portable.converters.tensors.tensor import Tensor


@dataclass(frozen=True)
class CrcTrailer:
    """Bytes that follow a tensor in a file and depend on the CRC32 of the tensor's data.

    Attributes:
        nbytes: Size of the trailer in bytes.
        compute_bytes: Function that computes the trailer from the CRC32 of the tensor's data.
        is_written_last: Whether to write the trailer after all other parts of the output, for
            example because it also depends on the CRC32 of other tensors.
    """

    nbytes: int
    compute_bytes: Callable[[int], bytes]
    is_written_last: bool = False


FilePart = bytes | OutputTensor | CrcTrailer


@dataclass(frozen=True)
class PlannedFile:
    """Output file that contains tensors.

    Attributes:
        name: Path of the file, relative to the output folder.
        parts: Contents of the file in order. A part is a literal byte string, a tensor, or a
            trailer. A trailer follows a tensor and depends on the CRC32 of its data.
    """

    name: str
    parts: tuple[FilePart, ...]

    @property
    def entries(self) -> list[OutputTensor]:
        """Tensors in the file."""
        return [part for part in self.parts if isinstance(part, OutputTensor)]

    @property
    def nbytes(self) -> int:
        """Size of the file in bytes."""
        return sum(map(get_part_nbytes, self.parts))


@dataclass(frozen=True)
class ConversionPlan:
    """Complete output of a conversion.

    Attributes:
        files: Files that contain tensors.
        documents: Contents of other small files to write, keyed by file name.
        companions: Source paths of files to copy unchanged, keyed by their file names in the output.
        reopen_tensors: Function that opens the written folder and returns its tensors, keyed by
            `OutputTensor.name`. With `--verify`, these tensors are compared with the source.
        losses: Counters of elements that became infinite or zero in a cast. `write_plan_atomically`
            updates them.
    """

    files: tuple[PlannedFile, ...]
    documents: Mapping[str, bytes]
    companions: Mapping[str, AnyPath]
    reopen_tensors: Callable[[AnyPath], Mapping[str, Tensor]]
    losses: CastLosses = field(default_factory=CastLosses)

    @property
    def names(self) -> set[str]:
        """Names of all output files."""
        return {*(file.name for file in self.files), *self.documents, *self.companions}

    @property
    def nbytes(self) -> int:
        """Total size of the files that contain tensors, in bytes."""
        return sum(file.nbytes for file in self.files)

    @property
    def peak_buffer_nbytes(self) -> int:
        """Estimated peak memory in bytes for tensor data while the plan is executed.

        The estimate assumes that the source and the output are on local disks. With an object
        store, more threads are used, and uploads need additional memory.
        """
        casts = any(entry.dtype != entry.tensor.dtype for file in self.files for entry in file.entries)
        return BLOCK_BYTES * (3 if casts else 1) * get_default_thread_count()


def get_part_nbytes(part: FilePart) -> int:
    """Return the size of a part in bytes."""
    return len(part) if isinstance(part, bytes) else part.nbytes
