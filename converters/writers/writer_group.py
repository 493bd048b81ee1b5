"""Write one output with a group of processes. Each process writes some of the files."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Protocol

from portable.converters.errors import CheckpointError, to_printable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from portable.converters.storage.path_or_url import AnyPath
    from portable.converters.writers.plan import ConversionPlan, PlannedFile


class WriterGroup(Protocol):
    """Processes on one or more machines that write the same plan to the same folder or bucket.

    Every process opens the same checkpoint and calls the same function to write it. Process 0 creates
    the output, writes the small files, and publishes the output after all processes have written their
    files.

    Attributes:
        number: Number of this process, from 0 to `size - 1`.
        size: Number of processes.
    """

    number: int
    size: int

    def call_everywhere(self, function: Callable[[], str]) -> list[str]:
        """Call a function in every process, and wait until all processes have returned.

        Args:
            function: Function to call in this process. Its result is sent to the other processes.

        Returns:
            The results of all processes, ordered by process number.

        Raises:
            CheckpointError: If the function fails in another process. A process in which the function fails
                raises the original exception.
        """


def distribute_files(files: Sequence[PlannedFile], num_processes: int) -> list[list[PlannedFile]]:
    """Distribute files over processes, balancing the number of bytes per process.

    All processes compute the same distribution.

    Args:
        files: Files to write.
        num_processes: Number of processes.

    Returns:
        The files for each process, in the order of `files`.
    """
    bytes_by_process = [0] * num_processes
    process_by_file: dict[str, int] = {}
    for file in sorted(files, key=lambda file: -file.nbytes):
        process = bytes_by_process.index(min(bytes_by_process))
        bytes_by_process[process] += file.nbytes
        process_by_file[file.name] = process
    return [
        [file for file in files if process_by_file[file.name] == number] for number in range(num_processes)
    ]


def compute_plan_digest(plan: ConversionPlan) -> str:
    """Compute a digest of a plan's file names, tensors, and literal bytes.

    A tensor contributes its name, dtype, and size, but not its data. Documents and companion files
    are not included. Processes compare the digest to check that they have planned the same output.
    """
    digest = hashlib.blake2b(digest_size=16)
    for file in plan.files:
        digest.update(repr((file.name, len(file.parts), file.nbytes)).encode())
        for part in file.parts:
            if isinstance(part, bytes):
                digest.update(part)
        for entry in file.entries:
            digest.update(repr((entry.name, entry.dtype, entry.nbytes)).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def check_equal_plan_digests(digests: Sequence[str]) -> None:
    """Check that all processes have planned the same files.

    Args:
        digests: Each process's plan digest.

    Raises:
        CheckpointError: If a digest differs from process 0's digest.
    """
    for number, digest in enumerate(digests):
        if digest != digests[0]:
            raise CheckpointError(
                f"process {number} of {len(digests)} does not read the same tensors from the checkpoint "
                "as process 0; use the same files and versions in all processes"
            )


def check_written_size(path: AnyPath, expected: int, actual: int | None) -> None:
    """Check the size of a file that another process has written.

    Args:
        path: Path or URL of the file.
        expected: Planned size of the file in bytes.
        actual: Size that this process finds, or None if the file is missing.

    Raises:
        CheckpointError: If the file is missing or has a different size.
    """
    if actual != expected:
        state = "is missing" if actual is None else f"has {actual:,} bytes instead of {expected:,}"
        raise CheckpointError(
            f"{to_printable(path)}: {state}, although another process has written the file; use a file "
            "system that all processes share, and write the output again"
        )
